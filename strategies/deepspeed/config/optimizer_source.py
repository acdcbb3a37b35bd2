"""Who defines the optimizer and the schedule: the DeepSpeed config, with dummies in the code, or the code."""

from __future__ import annotations

from .dummies import DummyOptim, DummyScheduler
from .hf_config import HfDeepSpeedConfig

_REMOVE = "remove {0!r} from the DeepSpeed config, or return a {1} from configure_optimizers in its place"


def check_optimizer_and_scheduler(config: HfDeepSpeedConfig, optimizer: object, scheduler: object) -> None:
    """Check that each of the two is defined once.

    Args:
        config: The DeepSpeed config.
        optimizer: What ``configure_optimizers`` returned, None for none.
        scheduler: What ``configure_optimizers`` returned, None for none.

    Raises:
        ValueError: If both sides define one, or neither defines what the other stands for.

    Source: accelerate 1.15 ``accelerator.py`` (``_prepare_deepspeed``), which takes a model without any optimizer.
    """
    _check_optimizer("optimizer" in config.config, optimizer)
    if scheduler is not None:
        _check_scheduler("scheduler" in config.config, optimizer, scheduler)


def _check_optimizer(in_config: bool, optimizer: object) -> None:
    if isinstance(optimizer, DummyOptim):
        if not in_config:
            raise ValueError(
                "configure_optimizers returns a DummyOptim, but the DeepSpeed config has no 'optimizer' that it could "
                "stand for. Add one to the config, or return a real optimizer."
            )
    elif in_config and optimizer is not None:
        raise ValueError(
            f"Both the DeepSpeed config and configure_optimizers ({type(optimizer).__name__}) define an optimizer. "
            f"To choose one, {_REMOVE.format('optimizer', 'DummyOptim(params, lr=...)')}."
        )
    elif not in_config and optimizer is None:
        raise ValueError(
            "Neither the DeepSpeed config nor configure_optimizers defines an optimizer. Return one from "
            "configure_optimizers, or add 'optimizer' to the config and return DummyOptim(self.parameters(), lr=...)."
        )


def _check_scheduler(in_config: bool, optimizer: object, scheduler: object) -> None:
    if not isinstance(scheduler, DummyScheduler):
        if in_config:
            raise ValueError(
                f"Both the DeepSpeed config and configure_optimizers ({type(scheduler).__name__}) define a schedule. "
                f"To choose one, {_REMOVE.format('scheduler', 'DummyScheduler(optimizer, ...)')}."
            )
        if isinstance(optimizer, DummyOptim):
            raise ValueError(
                f"{type(scheduler).__name__} needs a real optimizer, and DummyOptim is none. Return "
                "DummyScheduler(optimizer, lr_scheduler_callable=...), which makes the schedule once there is the "
                "optimizer."
            )
    elif in_config and scheduler.lr_scheduler_callable is not None:
        raise ValueError(
            "Both the DeepSpeed config and DummyScheduler(lr_scheduler_callable=...) define a schedule. Remove "
            "'scheduler' from the config, or leave lr_scheduler_callable out."
        )
    elif not in_config and scheduler.lr_scheduler_callable is None:
        raise ValueError(
            "configure_optimizers returns a DummyScheduler, but the DeepSpeed config has no 'scheduler' that it could "
            "stand for. Add one to the config, or give DummyScheduler(lr_scheduler_callable=...)."
        )
