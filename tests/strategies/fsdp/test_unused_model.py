"""Steps whose loss is not of the model: nothing follows their forward, and the model is saved all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader


class Unused(TinyModule):
    def __init__(self, kind: str) -> None:
        super().__init__(Case(), Outcome())
        self.kind = kind

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if self.kind == "called":
            self.model(batch[0])
        return None if self.kind == "skipped" else torch.tensor(0.1, requires_grad=True)


def _save(world_size: int, version: int, kind: str, path: str) -> None:
    strategy = AccelFSDPStrategy(fsdp_version=version, state_dict_type="full_state_dict")
    module = Unused(kind)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer = quiet_trainer(strategy, world_size, max_epochs=1)
    trainer.fit(module, rank_loader(world_size))
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())


@pytest.mark.core("fsdp1-1")
@pytest.mark.parametrize(
    ("world_size", "kind"),
    # Lightning refuses skipped steps on several processes.
    [(1, "called"), (1, "ignored"), (1, "skipped"), (2, "called"), (2, "ignored")],
)
@pytest.mark.parametrize("version", [1, 2], ids=["fsdp1", "fsdp2"])
def test_a_model_that_no_backward_reached_is_saved(tmp_path: Path, version: int, world_size: int, kind: str) -> None:
    run_on_ranks(world_size, _save, world_size, version, kind, str(tmp_path / "saved.ckpt"))
