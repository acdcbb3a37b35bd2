"""Stand-ins for an optimizer and a schedule that the DeepSpeed config defines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class DummyOptim:
    """Stands for the optimizer that the DeepSpeed config defines; return it from ``configure_optimizers``.

    Its values fill the ``"auto"`` entries of ``optimizer.params``; an entry that has a value in the config keeps it.

    Args:
        params: The parameters, or parameter groups, that DeepSpeed's optimizer gets.
        lr: Learning rate.
        weight_decay: Weight decay.
        **kwargs: Further values by the config's names, for example ``betas`` and ``eps``.

    Source: accelerate 1.15 ``utils/deepspeed.py``, which ignores ``kwargs``.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params if isinstance(params, list) else list(params)
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Stands for the schedule that the DeepSpeed config defines, or for one that is made once the optimizer exists.

    Its values fill the ``"auto"`` entries of ``scheduler.params``; an entry that has a value in the config keeps it.
    All steps are optimizer steps of the whole job: nothing is divided by the number of ranks.

    Args:
        optimizer: The optimizer in the code: a `DummyOptim`, or a real one.
        total_num_steps: Length of the schedule; None takes the Trainer's estimate.
        warmup_num_steps: Length of the warm-up.
        lr_scheduler_callable: Makes the schedule from DeepSpeed's optimizer, where the config defines none.
        **kwargs: Further values by the config's names, for example ``warmup_min_lr``.

    Source: accelerate 1.15 ``utils/deepspeed.py``, which ignores ``kwargs``, and whose ``prepare`` divides
    ``total_num_steps`` by the number of ranks but not ``warmup_num_steps``.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
