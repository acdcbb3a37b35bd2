"""Checkpoints that have their names when they are complete, in place of older checkpoints and of nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from ...checkpoint.disk_space import telling_full_disk
from .agreed_outcome import run_on_rank_zero
from .atomic_folders import drop_unfinished, replace
from .own_files import check_replaceable, keep_files_of_others


@contextmanager
def new_folder(path: Path, complete: Callable[[Path], None], group: dist.ProcessGroup | None = None) -> Iterator[Path]:
    """Yield a folder for all ranks to write into; it takes the name ``path`` when the body is done and it is complete.

    The body must fail on every rank if it fails on one. What it has written is removed then: a full disk would stay
    full.

    Args:
        path: The name; a checkpoint that is there already is replaced, last of all. What it holds of others stays.
        complete: Called with the folder on rank 0, in the end.
        group: Through which the ranks agree; the default group by default.

    Raises:
        RuntimeError: On every rank, if rank 0 failed outside of the body.
        IsADirectoryError: As its cause, if ``path`` is a folder that is no checkpoint; nothing is written then.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")

    def prepare() -> None:
        check_replaceable(path)
        if unfinished.exists():  # left by a killed run
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)

    def finish() -> None:
        with telling_full_disk(unfinished):
            complete(unfinished)
            keep_files_of_others(path, unfinished)
            replace(path, unfinished)

    run_on_rank_zero(prepare, f"preparing {unfinished}", group)
    try:
        yield unfinished
        run_on_rank_zero(finish, f"finishing {path}", group)
    except BaseException:
        if dist.get_rank() == 0:
            drop_unfinished(unfinished)
        raise


def new_file(
    path: Path, write: Callable[[Path], None], group: dist.ProcessGroup | None = None, *, beside: bool = True
) -> None:
    """Let rank 0 ``write`` one file that gets the name ``path``, where a sharded checkpoint may be in the way.

    Args:
        path: The file.
        write: Told where to write.
        group: Through which the ranks agree; the default group by default.
        beside: Whether that is beside ``path``, whose name the file gets when it is complete.

    Raises:
        RuntimeError: On every rank, if rank 0 failed.
        IsADirectoryError: As its cause, if ``path`` is a folder that is no checkpoint, or holds more than one.
    """

    def save_one() -> None:
        check_replaceable(path, by_file=True)
        if beside:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_beside(path, write)
            return
        if path.is_dir():
            shutil.rmtree(path)
        write(path)

    run_on_rank_zero(save_one, f"saving {path}", group)


def _write_beside(path: Path, write: Callable[[Path], None]) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with telling_full_disk(unfinished):
            write(unfinished)
            replace(path, unfinished)
    except BaseException:
        drop_unfinished(unfinished)
        raise
