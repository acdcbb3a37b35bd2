"""`async_save`: the same checkpoints while training goes on, errors on all processes at one step, nothing lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.fsdp.checkpoint import checkpointer
from accelight.strategies.saving.staging import Stager
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.checkpoint_contents import assert_equal, everything_in
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.fsdp.steps import AtStep
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

KINDS = ["sharded_state_dict", "full_state_dict"]
NUM_STEPS = 7


def _fit(engine: str, kind: str, actions: dict[int, Callable[[Trainer], None]], *, in_background: bool) -> AtStep:
    strategy = AccelFSDPStrategy(async_save=in_background, state_dict_type=kind, **ENGINES[engine])
    callback = AtStep(actions)
    trainer = quiet_trainer(strategy, dist.get_world_size(), max_epochs=1, callbacks=[callback])
    trainer.fit(TinyModule(Case(optimizer="adamw"), Outcome()), rank_loader(dist.get_world_size()))
    return callback


def saving(path: str) -> Callable[[Trainer], None]:
    return lambda trainer: trainer.save_checkpoint(path)


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Let saves begin to write when the event is set, and not before."""
    go_on = threading.Event()

    def hold(function: Callable[..., None]) -> Callable[..., None]:
        def held(*args: Any, **kwargs: Any) -> None:
            assert go_on.wait(100)
            function(*args, **kwargs)

        return held

    with pytest.MonkeyPatch.context() as patch:
        for name in ("save_sharded", "new_file"):
            patch.setattr(checkpointer, name, hold(getattr(checkpointer, name)))
        yield go_on


def _memory(trainer: Trainer) -> Stager:
    saves = cast("AccelFSDPStrategy", trainer.strategy)._checkpointer.saves
    assert saves is not None
    assert saves._stager is not None
    return saves._stager


def _addresses(stager: Stager) -> dict[int, list[int]]:
    return {size: [storage.data_ptr() for storage in storages] for (size, _), storages in stager._used.items()}


def _save_while_training(engine: str, kind: str, folder: str) -> None:
    _fit(engine, kind, {2: saving(f"{folder}/now"), 5: saving(f"{folder}/now5")}, in_background=False)
    with held_back() as go_on:
        memory: list[tuple[Stager, dict[int, list[int]]]] = []

        def first_save(trainer: Trainer) -> None:
            trainer.save_checkpoint(f"{folder}/later")
            memory.append((_memory(trainer), _addresses(_memory(trainer))))

        def second_save(trainer: Trainer) -> None:
            assert not Path(folder, "later").exists()  # weights have changed three times since the copy
            dist.barrier()
            threading.Timer(0.2, go_on.set).start()
            trainer.save_checkpoint(f"{folder}/later5")  # waits for the first, and uses its memory again
            assert Path(folder, "later").exists()
            assert memory == [(_memory(trainer), _addresses(_memory(trainer)))]

        _fit(engine, kind, {2: first_save, 5: second_save}, in_background=True)
    assert memory[0][0].num_bytes == 0
    assert Path(folder, "later5").exists()  # fit() waits for the last


@pytest.mark.core("fsdp2-sharded", "fsdp1-full")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_save_in_the_background_holds_what_was_there_when_it_was_asked_for(
    engine: str, kind: str, tmp_path: Path
) -> None:
    run_on_ranks(2, _save_while_training, engine, kind, str(tmp_path))
    for step in ("", "5"):
        now, later = tmp_path / f"now{step}", tmp_path / f"later{step}"
        assert_equal(everything_in(later), everything_in(now))


def _remove_while_saving(kind: str, folder: str) -> None:
    old, new = Path(folder, "old"), Path(folder, "new")
    with held_back() as go_on:

        def replace(trainer: Trainer) -> None:
            strategy = cast("AccelFSDPStrategy", trainer.strategy)
            go_on.set()
            strategy.wait_for_saves()
            go_on.clear()
            trainer.save_checkpoint(str(new))
            strategy.remove_checkpoint(str(old))  # as ModelCheckpoint does
            assert old.exists()
            assert not new.exists()
            dist.barrier()  # nobody writes before all have looked
            go_on.set()
            strategy.wait_for_saves()
            dist.barrier()
            assert new.exists()
            assert not old.exists()

        _fit("fsdp2", kind, {1: saving(str(old)), 2: replace}, in_background=True)


@pytest.mark.parametrize("kind", KINDS)
def test_an_older_checkpoint_is_removed_when_the_newer_one_is_complete(kind: str, tmp_path: Path) -> None:
    run_on_ranks(2, _remove_while_saving, kind, str(tmp_path))


def _fail(engine: str, folder: str, fails_at: int) -> tuple[str, int]:
    """Let the writing of the second checkpoint fail on the last rank; return what is raised, and after which step."""
    callback: AtStep | None = None

    def fail(trainer: Trainer) -> None:
        nonlocal callback
        cast("AccelFSDPStrategy", trainer.strategy).wait_for_saves()
        callback = next(one for one in trainer.callbacks if isinstance(one, AtStep))  # type: ignore[attr-defined]
        if dist.get_rank() == dist.get_world_size() - 1:
            patch.setattr(FileSystemWriter, "write_data", _no_disk)
        trainer.save_checkpoint(f"{folder}/second")
        trainer.strategy.remove_checkpoint(f"{folder}/first")

    with pytest.MonkeyPatch.context() as patch:
        with pytest.raises(RuntimeError) as caught:
            _fit(engine, KINDS[0], {1: saving(f"{folder}/first"), fails_at: fail}, in_background=True)
        assert callback is not None
        return str(caught.value), callback.steps[-1]


def _no_disk(*_: Any) -> None:
    raise OSError("this disk is gone")


@pytest.mark.parametrize(("world_size", "engine"), [(1, "fsdp2"), (2, "fsdp1"), (2, "fsdp2")])
@pytest.mark.parametrize("fails_at", [2, NUM_STEPS])
def test_an_error_surfaces_at_one_step_on_all_processes(
    world_size: int, engine: str, fails_at: int, tmp_path: Path
) -> None:
    outcomes = run_on_ranks(world_size, _fail, engine, str(tmp_path), fails_at)
    assert outcomes == [outcomes[0]] * world_size
    message, last_step = outcomes[0]
    assert message.startswith(f"Saving {tmp_path}/second in the background failed")
    assert f"process {world_size - 1}: OSError: this disk is gone" in message
    assert fails_at <= last_step <= NUM_STEPS
    assert (tmp_path / "first").is_dir()
    assert not (tmp_path / "second").exists()


class _CrashError(RuntimeError):
    pass


def _crash(folder: str, fails_too: bool) -> None:
    with held_back() as go_on, pytest.MonkeyPatch.context() as patch:
        if fails_too:
            patch.setattr(FileSystemWriter, "write_data", _no_disk)

        def crash(trainer: Trainer) -> None:
            threading.Timer(0.2, go_on.set).start()
            raise _CrashError

        with pytest.raises(_CrashError):
            _fit("fsdp2", KINDS[0], {2: saving(f"{folder}/{fails_too}"), 3: crash}, in_background=True)
        dist.barrier()
        assert Path(folder, f"{fails_too}").exists() is not fails_too


def test_a_crash_of_training_leaves_the_checkpoint_complete(tmp_path: Path) -> None:
    run_on_ranks(2, _crash, str(tmp_path), False)
    run_on_ranks(2, _crash, str(tmp_path), True)


def _save_after_fit(folder: str) -> None:
    strategy = AccelFSDPStrategy(async_save=True, **ENGINES["fsdp2"])
    trainer = quiet_trainer(strategy, 2, max_steps=1)
    trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
    trainer.save_checkpoint(f"{folder}/end")
    assert Path(folder, "end").is_dir()


def test_a_save_after_training_is_complete_when_it_returns(tmp_path: Path) -> None:
    run_on_ranks(2, _save_after_fit, str(tmp_path))
