"""Saves in the background that are held back, fail, or outlive a crash of training; the same for both strategies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer

from tests.strategies.fsdp.steps import AtStep

Fit = Callable[[AtStep], object]
"""Trains with a callback, and with saves in the background."""
Place = tuple[Any, str]
"""An object and the name of its function."""
NUM_STEPS = 7


def saving(path: str) -> Callable[[Trainer], None]:
    return lambda trainer: trainer.save_checkpoint(path)


@contextmanager
def held_back(*places: Place) -> Iterator[threading.Event]:
    """Let functions that begin to write do so when the event is set, and not before."""
    go_on = threading.Event()

    def hold(function: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any, **kwargs: Any) -> Any:
            assert go_on.wait(100)
            return function(*args, **kwargs)

        return held

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in places:
            patch.setattr(owner, name, hold(getattr(owner, name)))
        yield go_on


def replace_while_saving(fit: Fit, begins: Sequence[Place], folder: str) -> None:
    """Remove the first checkpoint while the second is being saved, and load the second."""
    old, new = Path(folder, "old"), Path(folder, "new")
    with held_back(*begins) as go_on:

        def replace(trainer: Trainer) -> None:
            strategy: Any = trainer.strategy
            go_on.set()
            strategy.wait_for_saves()
            go_on.clear()
            trainer.save_checkpoint(str(new))
            strategy.remove_checkpoint(str(old))  # as ModelCheckpoint does
            assert old.exists()
            assert not new.exists()
            dist.barrier()  # nobody writes before all have looked
            go_on.set()
            assert strategy.load_checkpoint(str(new), weights_only=False)["global_step"] == 2  # waits for it
            dist.barrier()
            assert new.exists()
            assert not old.exists()

        fit(AtStep({1: saving(str(old)), 2: replace, NUM_STEPS: saving(f"{folder}/last")}))
    assert Path(folder, "last").exists()  # fit() waits for the last


def _no_disk(*_: Any) -> None:
    raise OSError("this disk is gone")


def fail_second_save(fit: Fit, writes: Place, folder: str, fails_at: int) -> tuple[str, int]:
    """Let the writing of the second checkpoint fail on the last rank; return what is raised, and after which step."""

    def fail(trainer: Trainer) -> None:
        strategy: Any = trainer.strategy
        strategy.wait_for_saves()
        if dist.get_rank() == dist.get_world_size() - 1:
            patch.setattr(*writes, _no_disk)
        trainer.save_checkpoint(f"{folder}/second")
        strategy.remove_checkpoint(f"{folder}/first")

    callback = AtStep({1: saving(f"{folder}/first"), fails_at: fail})
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as caught:
        fit(callback)
    return str(caught.value), callback.steps[-1]


def assert_fails_alike(outcomes: list[tuple[str, int]], folder: Path, fails_at: int) -> None:
    """Check what `fail_second_save` has returned on each rank: one error after one step, and the first checkpoint."""
    assert outcomes == [outcomes[0]] * len(outcomes)
    message, last_step = outcomes[0]
    assert message.startswith(f"Saving {folder}/second in the background failed")
    assert f"process {len(outcomes) - 1}: OSError: this disk is gone" in message
    assert fails_at <= last_step <= NUM_STEPS
    assert (folder / "first").is_dir()
    assert not (folder / "second").exists()


class _CrashError(RuntimeError):
    pass


def crash_while_saving(fit: Fit, begins: Sequence[Place], writes: Place, folder: str, *, fails_too: bool) -> None:
    """Let training fail while a save is held back: the checkpoint is complete, unless its writing fails, too."""
    with held_back(*begins) as go_on, pytest.MonkeyPatch.context() as patch:
        if fails_too:
            patch.setattr(*writes, _no_disk)

        def crash(trainer: Trainer) -> None:
            threading.Timer(0.2, go_on.set).start()
            raise _CrashError

        with pytest.raises(_CrashError):
            fit(AtStep({2: saving(f"{folder}/{fails_too}"), 3: crash}))
        dist.barrier()
        assert Path(folder, f"{fails_too}").exists() is not fails_too
    assert not [one for one in threading.enumerate() if one.name == "accelight-save"]
