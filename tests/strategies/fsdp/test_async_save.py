"""`async_save`: the same checkpoints while training goes on, errors on all processes at one step, nothing lost."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import cast

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
from tests.strategies.saves_in_background import (
    NUM_STEPS,
    assert_fails_alike,
    crash_while_saving,
    fail_second_save,
    held_back,
    replace_while_saving,
    saving,
)

KINDS = ["sharded_state_dict", "full_state_dict"]
BEGINS = ((checkpointer, "save_sharded"), (checkpointer, "new_file"))
WRITES = (FileSystemWriter, "write_data")


def _fit(engine: str, kind: str, callback: AtStep, *, in_background: bool = True) -> None:
    strategy = AccelFSDPStrategy(async_save=in_background, state_dict_type=kind, **ENGINES[engine])
    trainer = quiet_trainer(strategy, dist.get_world_size(), max_epochs=1, callbacks=[callback])
    trainer.fit(TinyModule(Case(optimizer="adamw"), Outcome()), rank_loader(dist.get_world_size()))


def _memory(trainer: Trainer) -> Stager:
    saves = cast("AccelFSDPStrategy", trainer.strategy)._checkpointer.saves
    assert saves is not None
    assert saves._stager is not None
    return saves._stager


def _addresses(stager: Stager) -> dict[int, list[int]]:
    return {size: [storage.data_ptr() for storage in storages] for (size, _), storages in stager._used.items()}


def _save_while_training(engine: str, kind: str, folder: str) -> None:
    _fit(engine, kind, AtStep({2: saving(f"{folder}/now"), 5: saving(f"{folder}/now5")}), in_background=False)
    with held_back(*BEGINS) as go_on:
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

        _fit(engine, kind, AtStep({2: first_save, 5: second_save}))
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


def _replace_while_saving(kind: str, folder: str) -> None:
    replace_while_saving(partial(_fit, "fsdp2", kind), BEGINS, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_an_older_checkpoint_is_removed_when_the_newer_one_is_complete(kind: str, tmp_path: Path) -> None:
    run_on_ranks(2, _replace_while_saving, kind, str(tmp_path))


def _fail(engine: str, folder: str, fails_at: int) -> tuple[str, int]:
    return fail_second_save(partial(_fit, engine, KINDS[0]), WRITES, folder, fails_at)


@pytest.mark.parametrize(("world_size", "engine"), [(1, "fsdp2"), (2, "fsdp1"), (2, "fsdp2")])
@pytest.mark.parametrize("fails_at", [2, NUM_STEPS])
def test_an_error_surfaces_at_one_step_on_all_processes(
    world_size: int, engine: str, fails_at: int, tmp_path: Path
) -> None:
    assert_fails_alike(run_on_ranks(world_size, _fail, engine, str(tmp_path), fails_at), tmp_path, fails_at)


def _crash(folder: str, fails_too: bool) -> None:
    crash_while_saving(partial(_fit, "fsdp2", KINDS[0]), BEGINS, WRITES, folder, fails_too=fails_too)


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
