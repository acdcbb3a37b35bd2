"""Training with `AccelDeepSpeedStrategy` in a test, and what it left."""

from __future__ import annotations

from typing import Any
from unittest import mock

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from accelight.state import GradientAccumulationPlugin, PartialState, reset_state
from accelight.strategies import AccelDeepSpeedStrategy
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

SMALL_BUCKETS: dict[str, Any] = {  # several buckets and gathers even for a tiny model
    "reduce_bucket_size": 64,
    "stage3_prefetch_bucket_size": 64,
    "stage3_param_persistence_threshold": 0,
}


def ds_config(stage: int, **zero: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **SMALL_BUCKETS, **zero}}


OFFLOADED: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
EVERYTHING_OFFLOADED: dict[str, Any] = {**OFFLOADED, "offload_param": {"device": "cpu"}}
CONFIGS = {
    "stage0": ds_config(0),
    "stage1": ds_config(1),
    "stage2": ds_config(2),
    "stage3": ds_config(3),
    "stage2_offload": ds_config(2, **OFFLOADED),
    "stage3_offload": ds_config(3, **EVERYTHING_OFFLOADED),
}
"""Every kind of sharding and offloading, by name."""


def fp16_on_cpu() -> Any:
    """DeepSpeed refuses fp16 on processors without instructions for it; torch computes in it on all."""
    from deepspeed.accelerator import get_accelerator  # in the processes alone

    return mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True)


def whole_weights(module: LightningModule) -> dict[str, Tensor]:
    """Return all weights on every rank, without the prefix of `TinyModule`."""
    import deepspeed  # in the processes alone

    weights = {}
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            weights[name.removeprefix("model.")] = parameter.detach().float().cpu().clone()
    return weights


class Recorder(Callback):
    """Notes the norm of each optimizer step."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        norm = trainer.strategy.last_grad_norm  # type: ignore[attr-defined]
        if norm is not None and len(pl_module.outcome.grad_norms) < trainer.global_step:
            pl_module.outcome.grad_norms.append(norm.item())


def trainer_for(case: Case, config: dict[str, Any], **more: Any) -> Trainer:
    windows = GradientAccumulationPlugin(short_windows=case.short_windows) if case.short_windows else None
    return quiet_trainer(
        AccelDeepSpeedStrategy(hf_ds_config=config, gradient_accumulation=windows),
        PartialState().num_processes,
        **{
            "max_epochs": case.epochs,
            "precision": case.precision,
            "accumulate_grad_batches": case.accumulate,
            "gradient_clip_val": case.clip_norm,
            "callbacks": [Recorder()],
            **more,
        },
    )


def train_deepspeed(case: Case, config: dict[str, Any], loader: Any = None, **more: Any) -> Outcome:
    """Train inside one of several processes."""
    outcome = Outcome()
    trainer, module = trainer_for(case, config, **more), TinyModule(case, outcome)
    trainer.fit(module, rank_loader(PartialState().num_processes) if loader is None else loader)
    outcome.weights, outcome.global_step = whole_weights(module), trainer.global_step
    reset_state()
    return outcome
