"""Copies of what was there when they were asked for, however it is written over before they are made."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.fsdp.checkpoint.staging import PendingCopies, SharedStager, Stager
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.checkpoint_contents import assert_equal, everything_in
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.fsdp.late_copies import late_copies
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

NUM_NUMBERS = 2**16
_C: Any = torch._C


def _optimizer_step(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Callable[[Tensor], None]:
    def step(tensor: Tensor) -> None:
        parameter = nn.Parameter(torch.empty(0))
        parameter.data = tensor
        parameter.grad = torch.ones_like(tensor)
        make([parameter]).step()

    return step


def _compiled(tensor: Tensor) -> None:
    torch.compile(lambda x: x.mul_(2))(tensor)


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda tensor: tensor.mul_(2),
    "data": lambda tensor: tensor.data.mul_(2),
    "a view": lambda tensor: tensor.view(2, -1)[1, 5:7].fill_(3),
    "detached": lambda tensor: tensor.detach().zero_(),
    "an index": lambda tensor: tensor.index_fill_(0, torch.tensor([4]), 3.0),
    "a mask": lambda tensor: tensor.masked_fill_(tensor > 0, 3.0),
    "out": lambda tensor: torch.add(tensor, 1, out=tensor),
    "foreach": lambda tensor: torch._foreach_mul_([tensor], 2.0),
    "foreach copy": lambda tensor: torch._foreach_copy_([tensor], [torch.ones_like(tensor)]),
    "foreach lerp": lambda tensor: torch._foreach_lerp_([tensor], [torch.ones_like(tensor)], 0.1),
    "NumPy": lambda tensor: np.multiply(tensor.numpy(), 2, out=tensor.numpy()),
    "DLPack": lambda tensor: torch.utils.dlpack.from_dlpack(tensor).mul_(2),
    "an address": lambda tensor: np.ctypeslib.as_array((ctypes.c_float * 4).from_address(tensor.data_ptr())).fill(3),
    "storage": lambda tensor: tensor.untyped_storage().copy_(torch.ones(NUM_NUMBERS).untyped_storage()),
    "resize": lambda tensor: tensor.untyped_storage().resize_(0),
    "random": lambda tensor: nn.init.normal_(tensor),
    "sgd": _optimizer_step(lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9)),
    "sgd fused": _optimizer_step(lambda given: torch.optim.SGD(given, lr=0.1, fused=True)),
    "adamw": _optimizer_step(lambda given: torch.optim.AdamW(given)),
    "adamw foreach": _optimizer_step(lambda given: torch.optim.AdamW(given, foreach=True)),
    "adamw fused": _optimizer_step(lambda given: torch.optim.AdamW(given, fused=True)),
    "adagrad fused": _optimizer_step(lambda given: torch.optim.Adagrad(given, fused=True)),
    "compiled": _compiled,
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.exhaustive) if way == "compiled" else way for way in WAYS]
)
def test_whoever_writes_first_changes_no_copy(way: str) -> None:
    tensor, stager, pending = torch.arange(float(NUM_NUMBERS)), Stager(), PendingCopies()
    expected, other = tensor.clone(), tensor.view(4, -1)
    copied = stager.copy({"one": tensor, "same": other, "row": other[2]}, pending)
    assert len(pending._copies) == 1
    WAYS[way](tensor)
    changed = tensor.clone() if way != "resize" else None
    pending.run()
    assert torch.equal(copied["one"], expected)
    assert torch.equal(copied["same"], expected.view(4, -1))
    assert torch.equal(copied["row"], expected.view(4, -1)[2])
    if changed is not None:
        assert not torch.equal(changed, expected)
        assert torch.equal(tensor, changed)
        assert torch.equal(other, changed.view(4, -1))  # a view from before still is one
    pending.wait()
    assert not _C._is_cow_tensor(tensor)
    if changed is not None:
        assert torch.equal(tensor, changed)


def test_what_was_copied_stays_where_it_is() -> None:
    tensor, stager, pending = torch.arange(float(NUM_NUMBERS)), Stager(), PendingCopies()
    seen = tensor.numpy()
    stager.copy({"one": tensor}, pending)
    pending.run()
    pending.wait()
    assert not _C._is_cow_tensor(tensor)
    seen += 1
    tensor.add_(1)
    assert tensor[3] == seen[3] == 5


def test_what_nobody_else_has_is_freed_when_it_is_copied() -> None:
    tensor, stager, pending = torch.arange(float(NUM_NUMBERS)), Stager(), PendingCopies()
    stager.copy({"one": tensor}, pending)
    gone = StorageWeakRef(tensor.untyped_storage())
    del tensor
    pending.run()
    assert gone.expired()
    pending.wait()


def test_reading_copies_nothing() -> None:
    tensor, pending = torch.arange(float(NUM_NUMBERS)), PendingCopies()
    Stager().copy({"one": tensor}, pending)
    address = _C._data_address(tensor)
    assert float(tensor.sum() + tensor.view(256, -1).mm(torch.ones(256, 2)).sum()) > 0
    torch._foreach_copy_([torch.empty(NUM_NUMBERS)], [tensor])
    assert torch.equal(tensor, tensor.clone())
    assert _C._is_cow_tensor(tensor)
    assert _C._data_address(tensor) == address


@pytest.mark.parametrize("make", [Stager, SharedStager])
def test_what_cannot_be_shared_is_copied_at_once(make: type[Stager], tmp_path: Path) -> None:
    memory, pending, stager = np.ones(NUM_NUMBERS, np.float32), PendingCopies(), make()
    mapped = torch.from_file(str(tmp_path / "mapped"), shared=True, size=NUM_NUMBERS)
    state = {
        "numpy": torch.from_numpy(memory),
        "shared": torch.ones(NUM_NUMBERS).share_memory_(),
        "mapped": mapped.fill_(1),
        "small": torch.ones(3),
        "empty": torch.ones(0),
    }
    copied = stager.copy(state, pending)
    assert not pending._copies
    memory += 1
    for tensor in state.values():
        tensor.add_(1)
    pending.run()
    assert all(bool((one == 1).all()) for one in copied.values())
    stager.close()


@pytest.mark.gpu
def test_pinned_memory_is_copied_at_once() -> None:
    pending, stager = PendingCopies(), Stager()
    state = {"pinned": torch.ones(NUM_NUMBERS, pin_memory=True), "device": torch.ones(NUM_NUMBERS, device="cuda")}
    copied = stager.copy(state, pending)
    assert not pending._copies
    for tensor in state.values():
        tensor.add_(1)
    torch.cuda.synchronize()
    assert all(bool((one == 1).all()) for one in copied.values())
    stager.close()


def test_who_waits_goes_on_when_a_copy_cannot_be_made() -> None:
    pending = PendingCopies()
    tensor = torch.ones(NUM_NUMBERS)
    assert pending.add(tensor.untyped_storage(), torch.empty(3).untyped_storage())
    with pytest.raises(RuntimeError, match="size"):
        pending.run()
    pending.wait()
    assert not pending._copies


class _Writes(Callback):
    """Saves after some batches, and writes to weights and state by ``data`` wherever they are sharded."""

    def __init__(self, folder: str, everywhere: bool) -> None:
        self.folder, self.everywhere, self.num_batches = folder, everywhere, 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.num_batches += 1
        if self.num_batches in (2, 5):
            trainer.save_checkpoint(f"{self.folder}/{self.num_batches}")
            self._write(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._write(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._write(trainer, pl_module)

    def _write(self, trainer: Trainer, module: LightningModule) -> None:
        if not self.everywhere:
            return
        for parameter in module.parameters():
            _local(parameter).mul_(1.01)
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                torch._foreach_mul_(
                    [_local(one) for one in state.values() if isinstance(one, Tensor) and one.ndim], 0.9
                )


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data


class _Manual(TinyModule):
    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


class _Overflowing(TinyModule):
    """The scaler leaves out every other step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (float("inf") if batch_idx % 2 else 1.0)


KINDS: dict[str, tuple[type[TinyModule], dict[str, Any], bool]] = {
    "automatic": (TinyModule, {}, False),
    "written": (TinyModule, {"gradient_clip_val": 0.1}, True),
    "manual": (_Manual, {}, True),
    "skipped": (_Overflowing, {"precision": "16-mixed"}, True),
    "accumulated": (TinyModule, {"accumulate_grad_batches": 3, "max_epochs": 3}, True),
}


def _train(engine: str, form: str, kind: str, folder: str, optimizer_waits: bool) -> list[int]:
    make, options, everywhere = KINDS[kind]

    def fit(name: str, *, in_background: bool) -> None:
        strategy = AccelFSDPStrategy(async_save=in_background, state_dict_type=form, **ENGINES[engine])
        callback = _Writes(f"{folder}/{name}", everywhere)
        settings: dict[str, Any] = {"max_epochs": 2, **options}
        trainer = quiet_trainer(strategy, 2, callbacks=[callback], **settings)
        trainer.fit(make(Case(optimizer="adamw"), Outcome()), rank_loader(2))

    fit("now", in_background=False)
    with late_copies(optimizer_waits=optimizer_waits) as made:
        fit("later", in_background=True)
        return [one.num_copies for one in made if one.num_copies]  # type: ignore[attr-defined]


@pytest.mark.core("automatic-True-fsdp2-sharded", "written-False-fsdp1_orig_params-sharded", "skipped-True-fsdp1-full")
@pytest.mark.parametrize("form", ["sharded_state_dict", "full_state_dict"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("optimizer_waits", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_of_its_step(kind: str, optimizer_waits: bool, engine: str, form: str, tmp_path: Path) -> None:
    copies = run_on_ranks(2, _train, engine, form, kind, str(tmp_path), optimizer_waits)[0]
    assert len(copies) >= 2
    for name in ("2", "5"):
        assert_equal(everything_in(tmp_path / "later" / name), everything_in(tmp_path / "now" / name))
