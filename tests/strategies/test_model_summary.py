"""Lightning's model summary of a sharded module is that of the plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import summarize
from torch import Tensor, nn

from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Block, Case, Outcome, TinyModule, quiet_trainer, rank_loader


class Summarised(TinyModule):
    """With a frozen block, a tied weight, a parameter of its own, and a module that is left unsharded."""

    def __init__(self) -> None:
        super().__init__(Case(epochs=1), Outcome())
        self.model.blocks[0].requires_grad_(False)
        self.get_parameter("model.blocks.1.linear.weight").requires_grad_(False)
        self.ignored = nn.Linear(3, 5)
        self.tied = nn.Linear(8, 3)
        self.tied.weight = self.model.head.weight
        self.scale = nn.Parameter(torch.ones(3))
        self.example_input_array = torch.ones(2, 5)
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) * self.scale + self.ignored(self.model(x)).sum() + self.tied(torch.ones(8)).sum()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[1]).pow(2).mean()


class Noting(ModelSummary):
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen = described(self._summary(trainer, pl_module))


class RichNoting(RichModelSummary):
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen = described(self._summary(trainer, pl_module))


def described(summary: Any) -> dict[str, Any]:
    data = {name: list(values) for name, values in summary._get_summary_data() if name != "Params per Device"}
    counts = [summary.total_parameters, summary.trainable_parameters, summary.model_size, summary.total_training_modes]
    return {"data": data, "counts": counts, "rows": summary.param_nums}


def strategy_for(kind: str, module: Summarised) -> Any:
    if kind.startswith("zero"):
        zero = {"stage": int(kind[-1]), "stage3_param_persistence_threshold": 0}
        return AccelDeepSpeedStrategy(hf_ds_config={"zero_optimization": zero})
    more: dict[str, Any] = {"use_orig_params": False} if "flat" in kind else {}
    policy: Any = "no_wrap" if "one_unit" in kind else {Block}
    if "one_unit" not in kind:
        more["activation_checkpointing"] = True
    return AccelFSDPStrategy(
        fsdp_version=int(kind[4]), auto_wrap_policy=policy, ignored_modules=[module.ignored], **more
    )


def summaries(kind: str) -> list[dict[str, Any]]:
    module = Summarised()
    if "flat" in kind:  # torch flattens what is frozen and what is not into different units alone
        module.get_parameter("model.blocks.1.linear.weight").requires_grad_(True)
    callbacks = [cls(max_depth=depth) for cls in (Noting, RichNoting) for depth in (-1, 1, 2)]
    expected = [described(summarize(module, max_depth=depth)) for depth in (-1, 1, 2)]
    trainer = quiet_trainer(
        strategy_for(kind, module), 2, max_epochs=1, limit_train_batches=1, callbacks=[*callbacks, ModelSummary()]
    )
    trainer.fit(module, rank_loader(2))
    assert not any("_summary" in vars(callback) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    return [*expected, *(callback.seen for callback in callbacks)]


@pytest.mark.core("fsdp1", "fsdp1_flat", "zero3")
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1_one_unit", "fsdp1_flat", "fsdp2", "fsdp2_one_unit", "zero2", "zero3"])
def test_the_summary_is_that_of_the_plain_module(kind: str) -> None:
    found = run_on_ranks(2, summaries, kind)[0]
    expected = found[:3]
    assert found[3:6] == expected
    assert found[6:] == expected
