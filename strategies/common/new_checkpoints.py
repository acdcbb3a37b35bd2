"""Checkpoints that have their names when they are complete, in place of older checkpoints and of nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch.distributed as dist
from typing_extensions import override

from ...checkpoint.disk_space import telling_full_disk
from .agreed_outcome import failing_together, run_on_rank_zero
from .atomic_folders import drop_unfinished, drop_written_folder, remove_unfinished, replace, unfinished_name
from .own_files import check_replaceable, keep_files_of_others
from .own_folders import writes_own_folders
from .shared_folders import check_mark, mark


class NewFolder:
    """A folder that takes its name when it is complete. One rank calls this, wherever the others write from.

    Args:
        path: The name; a checkpoint that is there already is replaced, last of all. What it holds of others stays.
        number: Hexadecimal digits, for one that may still be written when another run begins to save under this name:
            the two must not write into each other's folder.
    """

    def __init__(self, path: Path, number: str = "") -> None:
        self.path = path
        self.unfinished = unfinished_name(path, number)
        """Where to write until then."""
        self._mark: str | None = None

    def begin(self) -> str:
        """Make the folder, with nothing in it but what `check_shared` looks for, whose name is returned.

        What a killed run has left of a save under this name is removed, and so is what its processes still write:
        from now on they can neither write nor finish it.

        Raises:
            IsADirectoryError: If ``path`` is a folder that is no checkpoint; nothing is written then.
        """
        check_replaceable(self.path)
        remove_unfinished(self.path)
        self.unfinished.mkdir(parents=True)
        self._mark = mark(self.unfinished)
        return self._mark

    def check_shared(self, name: str) -> None:
        """Check that this is the folder that another process has made.

        Args:
            name: Result of its `begin`.

        Raises:
            RuntimeError: If it is not: the nodes share no disk here.
        """
        check_mark(self.unfinished, name)

    def finish(self, complete: Callable[[Path], None]) -> None:
        """Let ``complete`` write what is missing into the folder that it is told, and give it its name."""
        with telling_full_disk(self.unfinished):
            if self._mark is not None:
                (self.unfinished / self._mark).unlink()
            complete(self.unfinished)
            keep_files_of_others(self.path, self.unfinished)
            replace(self.path, self.unfinished)

    def finish_own(self) -> None:
        """Do on the other processes what is left when `finish` has named it on one: nothing, but for `OwnFolder`."""

    def drop(self) -> None:
        """Remove what was written, also while others still write: a full disk would stay full."""
        drop_written_folder(self.unfinished, self.path)

    def drop_own(self) -> None:
        """Do so on the process that has made it, whichever calls this."""
        if dist.get_rank() == 0:
            self.drop()


class OwnFolder(NewFolder):
    """A folder of this process alone, see `in_own_folders`."""

    @override
    def check_shared(self, name: str) -> None:
        if dist.get_rank() != 0:
            self.begin()

    @override
    def finish_own(self) -> None:
        if dist.get_rank() != 0:
            self.finish(lambda _: None)  # what tells of all parts is in process 0's

    @override
    def drop_own(self) -> None:
        self.drop()


def folder_named(path: Path) -> NewFolder:
    """Return the folder to write a checkpoint into, as the caller's surroundings ask for it.

    Args:
        path: The name; with `in_own_folders`, of this process's.
    """
    return OwnFolder(path) if writes_own_folders() else NewFolder(path)


@contextmanager
def new_folder(path: Path, complete: Callable[[Path], None], group: dist.ProcessGroup | None = None) -> Iterator[Path]:
    """Yield a folder for all ranks to write into; it takes the name ``path`` when the body is done and it is complete.

    The body must fail on every rank if it fails on one.

    Args:
        path: As for `NewFolder`.
        complete: Called with the folder on rank 0, in the end.
        group: Through which the ranks agree; the default group by default.

    Raises:
        RuntimeError: On every rank, if rank 0 failed outside of the body.
        IsADirectoryError: As its cause, if ``path`` is a folder that is no checkpoint; nothing is written then.
    """
    folder = folder_named(path)
    made = run_on_rank_zero(folder.begin, f"preparing {folder.unfinished}", group)
    try:
        with failing_together(f"saving {path}", group):
            folder.check_shared(made)
        yield folder.unfinished
        run_on_rank_zero(partial(folder.finish, complete), f"finishing {path}", group)
        folder.finish_own()
    except BaseException:
        folder.drop_own()
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
            remove_unfinished(path)
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
