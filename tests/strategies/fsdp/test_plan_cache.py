"""Each rank caches its save plan: later saves write the same bytes without collectives, whichever rank plans anew."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.utils._python_dispatch import TorchDispatchMode

from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.fsdp.checkpoint.checkpointer import Checkpointer
from accelight.strategies.fsdp.checkpoint.writer import FolderWriter
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.checkpoint_contents import files_of
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.fsdp.steps import AtStep
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader


class _Collectives(TorchDispatchMode):
    """Notes the collectives of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def _checkpointer(trainer: Trainer) -> Checkpointer:
    return cast("AccelFSDPStrategy", trainer.strategy)._checkpointer


def _forget_plans(trainer: Trainer, *ranks: int) -> None:
    if dist.get_rank() in ranks:
        _checkpointer(trainer)._plans._plans.clear()


def _fit(engine: str, actions: dict[int, Callable[[Trainer], None]], **options: Any) -> None:
    trainer = quiet_trainer(
        AccelFSDPStrategy(state_dict_type="sharded_state_dict", **options, **ENGINES[engine]),
        dist.get_world_size(),
        max_epochs=1,
        callbacks=[AtStep(actions)],
    )
    trainer.fit(TinyModule(Case(optimizer="adamw"), Outcome()), rank_loader(dist.get_world_size()))


def _count(engine: str, folder: str) -> dict[str, list[str]]:
    counted: dict[str, list[str]] = {}

    def counting(name: str, act: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
        def action(trainer: Trainer) -> None:
            with _Collectives() as collectives:
                act(trainer)
            counted[name] = collectives.names

        return action

    def save(name: str) -> Callable[[Trainer], None]:
        return counting(name, lambda trainer: trainer.save_checkpoint(f"{folder}/{name}"))

    def load(trainer: Trainer) -> None:
        checkpointer = _checkpointer(trainer)
        checkpoint = checkpointer.read(f"{folder}/first")
        checkpointer.load_weights(checkpoint, strict=True)
        checkpointer.load_optimizers(checkpoint)

    _fit(engine, {1: save("first"), 2: save("later"), 3: save("last"), 4: counting("load", load)})
    return counted


@pytest.mark.parametrize("engine", ENGINES)
def test_saves_and_loads_have_no_collectives_but_a_barrier(engine: str, tmp_path: Path) -> None:
    # FSDP1, to load: for each of three units torch gathers the weights, before and after.
    weights = ["allgather_"] * 3 if engine != "fsdp2" else []
    for counted in run_on_ranks(2, _count, engine, str(tmp_path)):
        assert counted["first"] == counted["later"] == counted["last"] == ["allreduce_"]
        assert counted["load"] == 2 * weights


def _save_both_ways(engine: str, folder: str) -> None:
    def save(*ranks: int, **options: Any) -> Callable[[Trainer], None]:
        def both(trainer: Trainer) -> None:
            step = trainer.global_step
            trainer.save_checkpoint(f"{folder}/kept{step}", **options)
            _forget_plans(trainer, *ranks)
            trainer.save_checkpoint(f"{folder}/new{step}", **options)

        return both

    everyone = range(dist.get_world_size())
    _fit(engine, {1: save(*everyone), 2: save(1), 3: save(0), 4: save(*everyone, weights_only=True), 5: save(1)})


@pytest.mark.core("fsdp2-2")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_save_by_a_kept_plan_is_the_same_byte_by_byte(engine: str, world_size: int, tmp_path: Path) -> None:
    run_on_ranks(world_size, _save_both_ways, engine, str(tmp_path))
    for step in range(1, 6):
        kept, new = files_of(tmp_path / f"kept{step}"), files_of(tmp_path / f"new{step}")
        assert kept == new, step


def _saving(folder: str, name: str) -> Callable[[Trainer], None]:
    return lambda trainer: _save_and_wait(trainer, f"{folder}/{name}")


def _save_and_wait(trainer: Trainer, path: str) -> None:
    trainer.save_checkpoint(path)
    cast("AccelFSDPStrategy", trainer.strategy).wait_for_saves()


def _fail_on_one(folder: str, in_background: bool) -> list[str]:
    seen: list[str] = []

    def fail(trainer: Trainer) -> None:
        def broken(self: Any, *_: Any) -> Any:
            raise OSError(f"disk of rank {dist.get_rank()}")

        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(FolderWriter, "write_data", broken)
            with pytest.raises(RuntimeError) as caught:
                _save_and_wait(trainer, f"{folder}/failed")
        seen.extend([str(caught.value), *sorted(path.name for path in Path(folder).iterdir())])

    _fit("fsdp2", {1: _saving(folder, "before"), 2: fail, 3: _saving(folder, "after")}, async_save=in_background)
    return seen


@pytest.mark.parametrize("in_background", [False, True])
def test_a_later_save_that_fails_on_one_process_fails_on_all_and_the_next_is_whole(
    in_background: bool, tmp_path: Path
) -> None:
    for message, *names in run_on_ranks(2, _fail_on_one, str(tmp_path), in_background):
        assert f"saving {tmp_path}/failed failed.\nprocess 1: OSError: disk of rank 1" in message
        assert names == ["before"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "before"]
    assert files_of(tmp_path / "after").keys() == files_of(tmp_path / "before").keys()


def _end_one(folder: str, in_background: bool) -> None:
    def end(self: Any, *_: Any) -> Any:
        os._exit(3)

    def fail(trainer: Trainer) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(FolderWriter, "write_data", end)
            _save_and_wait(trainer, f"{folder}/failed")

    _fit("fsdp2", {1: _saving(folder, "before"), 2: fail}, async_save=in_background)


@pytest.mark.parametrize("in_background", [False, True])
def test_the_end_of_a_process_in_a_later_save_is_noticed_at_once(in_background: bool, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        run_on_ranks(2, _end_one, str(tmp_path), in_background)
    assert "rank 1: died with exit code 3" in str(caught.value)
    assert f"finishing {tmp_path}/failed failed on rank 0: RuntimeError: A process has ended" in str(caught.value)
    assert "process 1 did not finish." in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["before"]


def _save_two_models(folder: str) -> None:
    """An inner Trainer saves while the outer one's save goes on."""
    go_on = threading.Event()
    write = FolderWriter.write_data

    def held(self: Any, *args: Any) -> Any:
        if str(self.path).endswith(".outer.unfinished"):
            assert go_on.wait(60)
        return write(self, *args)

    def train_another(trainer: Trainer) -> None:
        trainer.save_checkpoint(f"{folder}/outer")
        for name in ("inner1", "inner2"):
            _fit("fsdp2", {1: _saving(folder, name), 2: _saving(folder, f"{name}_later")})
        assert not Path(folder, "outer").exists()
        go_on.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderWriter, "write_data", held)
        _fit("fsdp2", {1: train_another, 3: _saving(folder, "outer_later")}, async_save=True)


def test_another_model_is_saved_while_one_is(tmp_path: Path) -> None:
    run_on_ranks(2, _save_two_models, str(tmp_path))
    names = ["inner1", "inner1_later", "inner2", "inner2_later", "outer", "outer_later"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    first, second = (files_of(tmp_path / name) for name in ("inner1_later", "inner2_later"))
    assert first == second
    assert files_of(tmp_path / "outer") == files_of(tmp_path / "inner1")
