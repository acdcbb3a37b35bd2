"""What modules keep beside tensors (``get_extra_state``) is saved and restored, in every kind of checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from accelight.strategies import AccelFSDPStrategy, load_from_checkpoint
from tests.ranks import run_on_ranks
from tests.strategies import oracle
from tests.strategies.extra_states import Holds
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

NEW: dict[str, Any] = {
    "dict": {"calls": 0, "seen": [], "more": {}},
    "number": 0,
    "tensor": torch.zeros(1, dtype=torch.uint8),
    "nothing": {},
    "list": [],
}
CHANGED: dict[str, Any] = {
    "dict": {"calls": 3, "seen": [1, {"scale": torch.arange(3.0)}], "name": "fp8", "more": {"1.5": None}},
    "number": 7,
    "tensor": torch.arange(5, dtype=torch.uint8),
    "nothing": {},
    "list": [[1, 2], "x"],
}


class Told(Holds, nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.held = NEW[name]


class Block(Holds, oracle.Block):
    """A unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.told = Told("number")
        self.held = 0


class Module(TinyModule):
    def __init__(self) -> None:
        super().__init__(Case(), Outcome())
        self.told = nn.ModuleDict({name: Told(name) for name in NEW})
        block = Block()
        block.load_state_dict(self.model.blocks[0].state_dict(), strict=False)
        self.model.blocks[0] = block


class Look(Callback):
    found: dict[str, Any]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        self.found = {name: told.held for name, told in module.told.items()}
        self.found["inside"] = _block(module).told.held
        self.found["unit"] = _block(module).held


def _block(module: Any) -> Any:
    return next(one for one in module.modules() if isinstance(one, Block))


def _fit(engine: str, kind: str, *, save_to: str | None, resume_from: str | None) -> dict[str, Any]:
    look = Look()
    strategy = AccelFSDPStrategy(state_dict_type=kind, **ENGINES[engine])
    trainer = quiet_trainer(strategy, dist.get_world_size(), max_epochs=2 if resume_from else 1, callbacks=[look])
    module: Any = Module()
    trainer.fit(module, rank_loader(dist.get_world_size()), ckpt_path=resume_from)
    if save_to is not None:
        for name, told in module.told.items():
            told.held = CHANGED[name]
        _block(module).told.held, _block(module).held = 5, 9
        trainer.save_checkpoint(save_to)
    return look.found


def _there_and_back(engine: str, other: str, kind: str, path: str) -> dict[str, Any]:
    _fit(engine, kind, save_to=path, resume_from=None)
    return _fit(other, kind, save_to=None, resume_from=path)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(_same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.core("fsdp1-fsdp1-sharded", "fsdp2-fsdp1-full", "fsdp2-fsdp2-sharded", "local")
@pytest.mark.parametrize(
    ("engine", "other", "kind"),
    [
        ("fsdp1", "fsdp1", "local_state_dict"),
        ("fsdp1_orig_params", "fsdp1_orig_params", "local_state_dict"),
        *(
            (engine, other, kind)
            for engine, other in (("fsdp1", "fsdp1"), ("fsdp2", "fsdp2"), ("fsdp2", "fsdp1"))
            for kind in ("sharded_state_dict", "full_state_dict")
        ),
    ],
)
def test_they_come_back_as_they_were(engine: str, other: str, kind: str, tmp_path: Path) -> None:
    """Nested ones were refused: full ones as no tensors, sharded ones by the names that DCP takes them apart into.

    Local ones lost all of them.
    """
    for found in run_on_ranks(2, _there_and_back, engine, other, kind, str(tmp_path / "saved")):
        expected = {**CHANGED, "inside": 5, "unit": 9}
        assert found.keys() == expected.keys()
        for name, held in expected.items():
            assert _same(found[name], held), (name, found[name])
    if kind == "sharded_state_dict":
        module: Any = load_from_checkpoint(Module, tmp_path / "saved", strict=False)  # DCP has no entry for {}
        for name, held in CHANGED.items():
            assert _same(module.told[name].held, held), (name, module.told[name].held)
