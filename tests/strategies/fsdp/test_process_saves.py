"""`async_save="process"`: what `async_save=True` writes, by processes that outlive the ranks and nothing else."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from accelight.checkpoint import load_state_dict
from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.common.checkpoint_files import NewFolder
from accelight.strategies.fsdp.checkpoint import process_save
from accelight.strategies.fsdp.checkpoint.planner import SavePlanCache
from accelight.strategies.fsdp.checkpoint.process_save import SavingProcess, _records_of_others
from accelight.strategies.saving import staging
from tests.ranks import run_on_ranks
from tests.scripts import run_script, wait_for
from tests.strategies.fsdp.checkpoint_contents import files_of
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.fsdp.kill_after_saving import (
    EXPECTED,
    SAVED,
    check_complete,
    is_alive,
    kill_all,
    left_in,
    process_of,
    save_in_the_foreground,
    wait_until_gone,
    wait_until_killed,
    when_saved,
)
from tests.strategies.fsdp.steps import AtStep
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

SHARDED = "sharded_state_dict"
Action = Callable[[Trainer], None]


def _fit(actions: dict[int, Action], engine: str = "fsdp2", **options: Any) -> AtStep:
    given = {"async_save": "process", "state_dict_type": SHARDED, **ENGINES[engine], **options}
    callback = AtStep(actions)
    trainer = quiet_trainer(AccelFSDPStrategy(**given), dist.get_world_size(), max_epochs=1, callbacks=[callback])
    trainer.fit(TinyModule(Case(optimizer="adamw"), Outcome()), rank_loader(dist.get_world_size()))
    return callback


def _wait(trainer: Trainer) -> None:
    cast("AccelFSDPStrategy", trainer.strategy).wait_for_saves()


def _stop(trainer: Trainer) -> int:
    """Let this rank's process stand still, and return its id."""
    pid = process_of(trainer).pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid


# ---------------------------------------------------------------------- what is written
def _save_both_ways(engine: str, folder: str) -> None:
    pids: list[int | None] = []

    def save(**options: Any) -> Action:
        def both(trainer: Trainer) -> None:
            path = Path(folder, f"{trainer.global_step}")
            checkpointer = cast("AccelFSDPStrategy", trainer.strategy)._checkpointer
            saves, checkpointer.saves = checkpointer.saves, None
            plans, checkpointer._plans = checkpointer._plans, SavePlanCache()
            trainer.save_checkpoint(f"{path}.expected", **options)
            checkpointer.saves, checkpointer._plans = saves, plans
            trainer.save_checkpoint(path, **options)
            pids.append(process_of(trainer).pid)

        return both

    _fit({1: save(), 2: save(), 3: save(weights_only=True), 4: save()}, engine)
    assert len(set(pids)) == 1
    assert not is_alive(cast("int", pids[0]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.machines)])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_byte_is_what_the_ranks_themselves_write(engine: str, world_size: int, tmp_path: Path) -> None:
    run_on_ranks(world_size, _save_both_ways, engine, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted(f"{step}{end}" for step in range(1, 5) for end in ("", ".expected"))
    for step in range(1, 5):  # a first save, one by its plan, one with another plan, one by the first plan
        assert files_of(tmp_path / f"{step}") == files_of(tmp_path / f"{step}.expected")
        sizes = [(tmp_path / f"{step}{end}" / ".metadata").stat().st_size for end in ("", ".expected")]
        assert sizes[1] - sizes[0] == len(
            ".expected"
        )  # the only thing that it says otherwise, beside the save's number


def _save_both_forms_in_two_fits(folder: str) -> None:
    class Saves(Callback):
        def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
            for form, options in (("weights", {"weights_only": True}), ("all", {})):
                trainer.save_checkpoint(f"{folder}/{trainer.current_epoch}-{form}", **options)

    strategy = AccelFSDPStrategy(async_save="process", state_dict_type=SHARDED, **ENGINES["fsdp2"])
    trainer = quiet_trainer(strategy, 2, max_epochs=1, callbacks=[Saves()])
    module, loader = TinyModule(Case(), Outcome()), rank_loader(2)
    trainer.fit(module, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)  # with a new process, which has none of the plans


def test_plans_of_an_earlier_fit_are_sent_anew(tmp_path: Path) -> None:
    run_on_ranks(2, _save_both_forms_in_two_fits, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["0-all", "0-weights", "1-all", "1-weights"]
    assert set(load_state_dict(tmp_path / "1-weights")) == set(load_state_dict(tmp_path / "1-all"))


# ---------------------------------------------------------------------- when it is written
def _hold_back(folder: str) -> None:
    first, second = Path(folder, "first"), Path(folder, "second")

    def save(trainer: Trainer) -> None:
        trainer.save_checkpoint(first)
        _wait(trainer)
        assert first.exists()

    def save_held_back(trainer: Trainer) -> None:
        pid = _stop(trainer)
        trainer.save_checkpoint(second)  # returns although nobody writes
        trainer.strategy.remove_checkpoint(str(first))  # as ModelCheckpoint does
        assert not second.exists()
        assert first.exists()
        dist.barrier()
        os.kill(pid, signal.SIGCONT)
        trainer.save_checkpoint(Path(folder, "third"))  # waits for the second
        assert second.exists()
        dist.barrier()
        assert not first.exists()

    _fit({1: save, 3: save_held_back})
    assert sorted(os.listdir(folder)) == ["second", "third"]


def test_training_goes_on_and_a_second_save_waits(tmp_path: Path) -> None:
    run_on_ranks(2, _hold_back, str(tmp_path))


def _memory() -> list[int]:
    """Return the sizes of the files without a name that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        try:
            if "accelight-save" in os.readlink(path):
                found.append(os.stat(path).st_size)
        except FileNotFoundError:  # of the listing itself
            continue
    return found


def _fit_again(folder: str) -> None:
    pids: list[int | None] = []

    def save(trainer: Trainer) -> None:
        trainer.save_checkpoint(f"{folder}/{len(pids)}")
        pids.append(process_of(trainer).pid)

    class _CrashError(Exception):
        pass

    def crash(trainer: Trainer) -> None:
        save(trainer)
        raise _CrashError

    for _ in range(3):
        _fit({1: save, 2: save})
    with pytest.raises(_CrashError):
        _fit({1: crash})
    _fit({})
    assert not any(is_alive(pid) for pid in pids if pid is not None)
    assert len(set(pids)) == 4
    assert not any(_memory())
    gc.collect()
    assert _memory() == []
    assert sorted(os.listdir(folder)) == [f"{number}" for number in range(7)]


@pytest.mark.machines
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_fit_after_fit_leaves_neither_processes_nor_memory(tmp_path: Path) -> None:
    run_on_ranks(2, _fit_again, str(tmp_path))


# ---------------------------------------------------------------------- when it fails
def _fail(folder: str, what: str) -> tuple[str, int]:
    caught_at: list[AtStep] = []

    def first(trainer: Trainer) -> None:
        trainer.save_checkpoint(f"{folder}/first")
        _wait(trainer)

    def fail(trainer: Trainer) -> None:
        caught_at.append(next(one for one in trainer.callbacks if isinstance(one, AtStep)))  # type: ignore[attr-defined]
        pid = _stop(trainer)
        dist.barrier()
        trainer.save_checkpoint(f"{folder}/second")
        trainer.strategy.remove_checkpoint(f"{folder}/first")
        (unfinished,) = (one for one in Path(folder).iterdir() if one.name.startswith(".second.unfinished"))
        if what == "in the way" and dist.get_rank() == 1:
            (unfinished / "__1_0.distcp").mkdir()
        elif what == f"killed {dist.get_rank()}":
            os.kill(pid, signal.SIGKILL)
        dist.barrier()
        if is_alive(pid):
            os.kill(pid, signal.SIGCONT)

    with pytest.raises(RuntimeError) as caught:
        _fit({1: first, 3: fail})
    return str(caught.value), caught_at[0].steps[-1]


ERRORS = {
    "in the way": r"process 1: IsADirectoryError: .*__1_0\.distcp'",
    "killed 0": r"process 0: its writer process ended \(SIGKILL\)\.",
    "killed 1": r"process 1: its writer process ended \(SIGKILL\)\.",
}


@pytest.mark.core("killed 1")
@pytest.mark.parametrize("what", ERRORS)
def test_what_fails_there_is_raised_by_all_ranks_at_one_step(what: str, tmp_path: Path) -> None:
    outcomes = run_on_ranks(2, _fail, str(tmp_path), what)
    assert outcomes[0] == outcomes[1]
    message, last_step = outcomes[0]
    path = f"{tmp_path}/second"
    expected = rf"Saving {path} in the background failed: saving {path} failed\.\n{ERRORS[what]}"
    assert re.fullmatch(expected, message), message
    assert 3 <= last_step <= 7
    assert os.listdir(tmp_path) == ["first"]


def _save_and_wait(trainer: Trainer, path: str) -> None:
    trainer.save_checkpoint(path)
    _wait(trainer)


def _fail_early(folder: str) -> list[str]:
    messages: list[str] = []

    def save(trainer: Trainer) -> None:
        with pytest.raises(RuntimeError) as caught:
            trainer.save_checkpoint(f"{folder}/failed")
        messages.append(str(caught.value))

    def save_with_little_memory(trainer: Trainer) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(staging, "_available", lambda: 1000)
            save(trainer)

    def save_where_no_plan_can_be_sent(trainer: Trainer) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(process_save, "Part", _no_part)
            save(trainer)

    def save_without_python(trainer: Trainer) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", "")
            save(trainer)

    def save_without_a_module(trainer: Trainer) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process_save, "_MAIN", "raise SystemExit('nothing starts here')")
            with pytest.raises(RuntimeError) as caught:  # by the save, if the process has ended that soon
                _save_and_wait(trainer, f"{folder}/failed")
            messages.append(str(caught.value))

    def save_after_all(trainer: Trainer) -> None:
        trainer.save_checkpoint(f"{folder}/saved")

    _fit(
        {
            1: save_with_little_memory,
            2: save_where_no_plan_can_be_sent,
            3: save_without_python,
            4: save_without_a_module,
            5: save_after_all,
        }
    )
    return messages


def _no_part(**_: object) -> None:
    raise ValueError("no part")


@pytest.mark.exhaustive
def test_what_fails_before_a_save_returns_is_raised_there_on_all_ranks(tmp_path: Path) -> None:
    ours, theirs = run_on_ranks(2, _fail_early, str(tmp_path))
    assert ours == theirs
    assert re.search(r"process 1: RuntimeError: async_save='process' copies .* to shared memory: 1\.0 kB are", ours[0])
    assert ours[1].endswith("process 1: ValueError: no part")
    assert "sys.executable is empty. Use async_save=True." in ours[2]
    assert "ended (status 1). Its output ends with:\nnothing starts here" in ours[3]
    assert os.listdir(tmp_path) == ["saved"]


def test_whoever_does_not_leave_a_record_is_named(tmp_path: Path) -> None:
    part: Any = type("Part", (), {"num_ranks": 3})
    folder = NewFolder(tmp_path / "saved", "0")
    folder.begin()
    with pytest.raises(TimeoutError, match=r"the writer processes of ranks \[1, 2\] did not finish in 0\.01 s"):
        _records_of_others(folder, part, 0.01)


# ---------------------------------------------------------------------- when all ranks are killed
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.core("0")
@pytest.mark.parametrize("attempt", range(3))
def test_killed_after_a_save_has_returned_all_of_it_is_there(attempt: int, tmp_path: Path) -> None:
    """``python -m tests.strategies.fsdp.kill_after_saving`` in short; that kills 50 times."""
    check_complete(tmp_path, kill_all(tmp_path, 1 + attempt % 2))


@pytest.mark.machines
@pytest.mark.timeout(3000)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_killed_fifty_times_fifty_checkpoints_are_there(tmp_path: Path) -> None:
    for attempt in range(50):
        folder = tmp_path / f"{attempt}"
        folder.mkdir()
        check_complete(folder, kill_all(folder, 1 + attempt % 2))


def _before_rank_1_has_told(trainer: Trainer, rank: int, folder: Path) -> None:
    """Save; the moment is when rank 0's process knows of the save, and rank 1's does not."""
    save_in_the_foreground(trainer, folder / EXPECTED)
    trainer.save_checkpoint(folder / "other")
    _wait(trainer)
    if rank == 1:
        SavingProcess.submit = lambda *_: wait_until_killed(rank, folder, trainer)  # type: ignore[method-assign]
    else:
        _tell_when(folder, trainer, "begun")
    trainer.save_checkpoint(folder / SAVED)


def _before_rank_0_has_told(trainer: Trainer, rank: int, folder: Path) -> None:
    """Save; the moment is when both processes have been told, but for the end."""
    save_in_the_foreground(trainer, folder / EXPECTED)
    trainer.save_checkpoint(folder / "other")
    _wait(trainer)
    _tell_when(folder, trainer, "told")
    trainer.save_checkpoint(folder / SAVED)


def _tell_when(folder: Path, trainer: Trainer, what: str) -> None:
    tell, rank = SavingProcess.submit, dist.get_rank()

    def telling(self: SavingProcess, order: Any, *more: Any) -> None:
        if what == "told" and rank == 0 and hasattr(order, "ending"):
            wait_until_killed(rank, folder, trainer)
        tell(self, order, *more)
        if what == "begun" or rank == 1:
            _note(folder, trainer)

    SavingProcess.submit = telling  # type: ignore[method-assign, assignment]


def _note(folder: Path, trainer: Trainer) -> None:
    path = folder / f".{dist.get_rank()}.pids"
    path.with_suffix(".tmp").write_text(f"[{os.getpid()}, {process_of(trainer).pid}]")
    path.with_suffix(".tmp").rename(path)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.exhaustive
@pytest.mark.parametrize("moment", [_before_rank_1_has_told, _before_rank_0_has_told])
def test_killed_before_a_save_has_returned_none_of_it_is_there(moment: Any, tmp_path: Path) -> None:
    wait_until_gone(kill_all(tmp_path, moment=moment))
    assert left_in(tmp_path) == [EXPECTED, "other"]


def _when_saved_and_stopped(trainer: Trainer, rank: int, folder: Path) -> None:
    save_in_the_foreground(trainer, folder / EXPECTED)
    trainer.save_checkpoint(folder / "other")
    _wait(trainer)
    _stop(trainer)
    when_saved(trainer, rank, folder)


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_later_run_that_saves_under_this_name_wins(tmp_path: Path) -> None:
    writers = kill_all(tmp_path, moment=_when_saved_and_stopped)
    assert len([name for name in left_in(tmp_path) if name.startswith(f".{SAVED}.unfinished-")]) == 1
    later = NewFolder(tmp_path / SAVED)
    later.begin()
    (later.unfinished / "later").write_text("later")
    for pid in writers:
        os.kill(pid, signal.SIGCONT)
    wait_until_gone(writers)
    assert left_in(tmp_path) == [f".{SAVED}.unfinished", EXPECTED, "other"]
    later.finish(lambda folder: None)
    assert os.listdir(tmp_path / SAVED) == ["later"]


@pytest.mark.machines  # waits for the process group's timeout
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_process_that_dies_after_all_ranks_is_waited_for_and_no_longer(tmp_path: Path) -> None:
    writers = kill_all(tmp_path, moment=_when_saved_and_stopped, timeout_s=25)
    os.kill(writers[1], signal.SIGKILL)
    os.kill(writers[0], signal.SIGCONT)
    wait_until_gone(writers)
    assert left_in(tmp_path) == [EXPECTED, "other"]


_UNDER_TORCHRUN = """
import os, sys
from pathlib import Path
import torch
from tests.strategies.fsdp.kill_after_saving import fit, when_saved
torch.set_num_threads(1)
fit(int(os.environ["RANK"]), Path(sys.argv[1]), 2, when_saved)
"""


@pytest.mark.machines
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_killed_with_its_launcher(tmp_path: Path) -> None:
    """SIGTERM to the launcher, which ends its processes' groups, then SIGKILL to all of them and to itself."""
    writers: list[int] = []

    def kill() -> None:
        files = [tmp_path / f".{rank}.pids" for rank in range(2)]
        wait_for(lambda: all(file.exists() for file in files))
        pids = [tuple(map(int, file.read_text().strip("[]").split(","))) for file in files]
        writers.extend(writer for _, writer in pids)
        launcher = int(Path(f"/proc/{pids[0][0]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(launcher, signal.SIGTERM)
        for pid in (*(own for own, _ in pids), launcher):
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:  # the launcher was faster
                continue

    root = str(Path(__file__).parents[3])
    env = {"PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
    run_script(_UNDER_TORCHRUN, str(tmp_path), launcher="torchrun", env=env, check=False, while_running=kill)
    assert len(writers) == 2
    check_complete(tmp_path, writers)


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize("value", ["thread", "True", 1, None])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"async_save must be False .*, True .* or 'process' .*, got "):
        AccelFSDPStrategy(async_save=value)


def _refuse(folder: str) -> None:
    kinds: list[dict[str, Any]] = [
        {"fsdp_version": 2, "state_dict_type": "full_state_dict"},
        {"fsdp_version": 1},
        {"fsdp_version": 1, "state_dict_type": "local_state_dict"},
    ]
    refused = r"'process' writes only sharded checkpoints, but state_dict_type is '(full|local)_state_dict'"
    for options in kinds:
        trainer = quiet_trainer(AccelFSDPStrategy(async_save="process", **options), 2, max_epochs=1)
        with pytest.raises(ValueError, match=refused):
            trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
    callbacks = [ModelCheckpoint("memory://somewhere")]
    strategy = AccelFSDPStrategy(async_save="process", fsdp_version=2)
    trainer = quiet_trainer(strategy, 2, max_epochs=1, callbacks=callbacks, enable_checkpointing=True)
    with pytest.raises(ValueError, match=r"ModelCheckpoint saves to memory://somewhere\. Use a shared folder"):
        trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
    assert trainer.global_step == 0


def test_what_the_process_cannot_write_is_refused_before_training(tmp_path: Path) -> None:
    run_on_ranks(2, _refuse, str(tmp_path))


# ---------------------------------------------------------------------- what it is
def test_the_process_has_no_lightning_and_no_accelerator() -> None:
    code = """
import sys
import accelight.strategies.fsdp.checkpoint.process_save
import torch
heavy = {"lightning", "pytorch_lightning", "torchmetrics", "transformers", "deepspeed"}
assert not heavy & {name.split(".")[0] for name in sys.modules}
assert not torch.cuda.is_initialized()
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


def test_what_has_a_similar_name_is_not_removed(tmp_path: Path) -> None:
    kept = [".a.ckpt.unfinished", ".a.ckpt.unfinished-0f", ".a.unfinished-xyz", "a.unfinished", ".a.unfinishedx"]
    for name in (*kept, ".a.unfinished", ".a.unfinished-0123", ".a.removed", ".a.removed-ff"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / ".a.unfinished-1").touch()
    NewFolder(tmp_path / "a", "01").begin()
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, ".a.unfinished-01"])
