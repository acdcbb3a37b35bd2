"""``reshard_after_forward=<int>``: until backward, parameters lie over fewer processes, and nobody else sees it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from accelight.checkpoint import load_state_dict
from accelight.strategies import AccelFSDPStrategy, ParallelismConfig, full_state_dict
from accelight.strategies.fsdp import FullyShardedDataParallelPlugin, fsdp2_prepare_model
from tests.ranks import run_on_ranks
from tests.strategies.oracle import (
    Case,
    assert_same,
    build_model,
    dataset,
    quiet_trainer,
    rank_loader,
    train_plain,
    train_sharded,
)  # fmt: skip

OVER_TWO: dict[str, Any] = {"fsdp_version": 2, "reshard_after_forward": 2, "auto_wrap_policy": {nn.Linear}}
"""The head has three rows: over two and over four processes their parts differ in size."""
CELLS: dict[str, tuple[int, Case, dict[str, Any]]] = {
    "accumulated": (4, Case(accumulate=2, clip_norm=0.3, validate_every=3), {}),
    "plain": (4, Case(), {}),
    "recomputed": (4, Case(), {"activation_checkpointing": True, "forward_prefetch": True}),
    "unused": (4, Case(accumulate=3), {"find_unused_parameters": True}),
    "two copies": (8, Case(clip_norm=0.3), {"device_mesh": (2, 4)}),
    "bf16": (4, Case(precision="bf16-mixed", validate_every=2), {}),
}


@pytest.mark.core("accumulated")
@pytest.mark.parametrize("name", CELLS)
def test_it_trains_as_one_process(name: str) -> None:
    num_ranks, case, options = CELLS[name]
    if case.precision == "32-true":
        expected = train_plain(case, num_ranks)
    else:  # rounded as where all processes gather
        expected = run_on_ranks(num_ranks, train_sharded, case, {**OVER_TWO, "reshard_after_forward": True})[0]
    assert_same(run_on_ranks(num_ranks, train_sharded, case, {**OVER_TWO, **options})[0], expected)


class _Looks(LightningModule):
    """Drops graphs, changes weights between two forwards of a step, and steps between two more."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()
        self.automatic_optimization = False
        self.seen: list[float] = []
        self.meshes: set[tuple[int, ...]] = set()

    def _loss(self, batch: list[Tensor]) -> Tensor:
        loss = functional.mse_loss(self.model(batch[0]), batch[1])
        self.meshes |= {tuple(one.device_mesh.shape) for one in self.parameters() if isinstance(one, DTensor)}
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self._loss(batch)
        self._read()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.9)
        loss = self._loss(batch)
        self._read()
        self.manual_backward(loss)
        self._loss(batch)
        optimizer.step()
        self.manual_backward(self._loss(batch))
        optimizer.step()
        optimizer.zero_grad()
        self._read()

    def _read(self) -> None:
        self.seen += [one.detach().norm().item() for one in self.parameters()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def look(path: str) -> tuple[list[float], dict[str, Tensor], set[tuple[int, ...]]]:
    strategy, module = AccelFSDPStrategy(**OVER_TWO), _Looks()
    trainer = quiet_trainer(strategy, 4, max_epochs=1)
    trainer.fit(module, rank_loader(4))
    module.model(torch.ones(1, 5)).sum()  # a forward without a backward
    trainer.save_checkpoint(path)
    return module.seen, dict(full_state_dict(strategy, module)), module.meshes


def test_nobody_sees_what_lies_over_fewer_processes(tmp_path: Any) -> None:
    plain = _Looks()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(plain, torch.utils.data.DataLoader(dataset(4), 8))
    for seen, weights, meshes in run_on_ranks(4, look, str(tmp_path / "saved")):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(plain.seen), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weights, dict(plain.state_dict()), rtol=1e-5, atol=1e-6)
        assert meshes == {(4,)}
    saved = load_state_dict(tmp_path / "saved")
    assert all(torch.equal(saved[name], one) for name, one in weights.items())


class _NotesGathers(TorchDispatchMode):
    """Over how many processes each all-gather goes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in f"{func}":
            self.sizes.append(args[0].numel() // args[1].numel())
        return func(*args, **(kwargs or {}))


def gathers_of_a_loop() -> tuple[list[int], list[int], int]:
    """Of a forward, then of its backward, in a plain loop; and how many groups the model has started."""
    plugin = FullyShardedDataParallelPlugin(**OVER_TWO)
    accelerator: Any = SimpleNamespace(
        device=torch.device("cpu"), is_main_process=dist.get_rank() == 0, fsdp_plugin=plugin
    )
    before = len(dist.distributed_c10d._world.pg_names)
    model = fsdp2_prepare_model(accelerator, build_model())
    num_groups = len(dist.distributed_c10d._world.pg_names) - before
    with _NotesGathers() as forward:
        loss = model(torch.ones(2, 5)).sum()
    with _NotesGathers() as backward:
        loss.backward()
    return forward.sizes, backward.sizes, num_groups


def test_backward_gathers_among_fewer_and_units_share_groups() -> None:
    for forward, backward, num_groups in run_on_ranks(4, gathers_of_a_loop):
        assert set(forward) == {4}
        assert backward == [2] * 4
        assert num_groups <= 2


def refused(size: int, options: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match="reshard_after_forward") as error:
        quiet_trainer(AccelFSDPStrategy(**{**OVER_TWO, "reshard_after_forward": size, **options}), 4).fit(_Looks())
    return f"{error.value}"


@pytest.mark.parametrize(
    ("size", "options", "words"),
    [
        (3, {}, "reshard_after_forward=3 must divide 4, the number of processes that FSDP2 shards over, and be less"),
        (4, {}, "reshard_after_forward=4 must divide 4"),
        (2, {"device_mesh": (2, 2)}, "reshard_after_forward=2 must divide 2"),
        (2, {"reshard_during_accumulation": False}, "keeps parameters gathered. Set only one of them"),
        (2, {"parallelism_config": ParallelismConfig(tp_size=2)}, "tp_size=2 do not go together"),
    ],
)
def test_what_cannot_be_is_refused(size: int, options: dict[str, Any], words: str) -> None:
    assert words in run_on_ranks(4, refused, size, options)[0]
