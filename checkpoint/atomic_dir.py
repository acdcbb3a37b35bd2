"""Output files that get their names only when all of them are complete."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path


class AtomicFolder:
    """Collects files for a folder, and gives them their names together at the end.

    A file is made without a name (``O_TMPFILE``) where the file system can, so that even ``kill -9`` leaves nothing of
    it; else under a hidden temporary name. A folder that does not exist yet appears complete, by one rename; in one
    that exists, the files are renamed one after the other. Leaving the ``with`` block without `commit` removes all
    files, and the folders created above.

    Args:
        folder: Where the files go.
        shared: Whether other processes write into the files, too. The files then have a name from the start, found with
            `path_of` and the same each time, so that the next attempt takes over what a killed one left.
    """

    def __init__(self, folder: Path, *, shared: bool = False):
        self.folder = folder
        self._shared = shared
        self._base = folder
        self._created: list[Path] = []
        self._files: dict[str, tuple[int, Path | None]] = {}

    def __enter__(self) -> AtomicFolder:  # noqa: PYI034 - Self is newer than Python 3.10
        if self.folder.exists():
            return self
        self._base = path = self.folder.parent
        missing = []
        while not path.exists():
            missing.append(path)
            path = path.parent
        for one in reversed(missing):
            one.mkdir()
            self._created.append(one)
        return self

    def __exit__(self, *_: object) -> None:
        for fd, temporary in self._files.values():
            os.close(fd)
            if temporary is not None:
                temporary.unlink(missing_ok=True)
        self._files.clear()
        for path in reversed(self._created):
            with contextlib.suppress(OSError):  # something was put there meanwhile
                path.rmdir()

    def check_space(self, num_bytes: int) -> None:
        """Raise OSError (ENOSPC) if the folder's disk has less space than that."""
        free = shutil.disk_usage(self._base).free
        if free < num_bytes:
            raise OSError(
                errno.ENOSPC,
                f"The output needs {num_bytes} bytes, the disk has {free} free",
                str(self.folder),
            )

    def create(self, name: str, num_bytes: int | None) -> int:
        """Return the descriptor of a new file, with ``num_bytes`` reserved where they are known."""
        fd, temporary = self._open(name)
        self._files[name] = (fd, temporary)
        if num_bytes:
            _reserve(fd, num_bytes, self.folder / name)
        return fd

    def path_of(self, name: str) -> Path:
        """Return where a shared file lies until `commit`."""
        return self._base / f".{self.folder.name}.{name}.unfinished"

    def _open(self, name: str) -> tuple[int, Path | None]:
        if self._shared:
            path = self.path_of(name)
            path.unlink(
                missing_ok=True
            )  # not truncated: what is left of a killed run may still write into the old file
            return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666), path
        if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
            try:
                return os.open(self._base, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666), None
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                    raise
        temporary = self._temporary(name)
        return os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666), temporary

    def _temporary(self, name: str) -> Path:
        return self._base / f".{name}.{os.urandom(6).hex()}.tmp"

    def _link(self, fd: int, name: str) -> Path:
        """Give a file without a name a temporary one: a link cannot replace what is there, a rename can."""
        temporary = self._temporary(name)
        folder_fd = os.open(self._base, os.O_RDONLY | os.O_CLOEXEC)
        try:  # with a folder's descriptor Python calls linkat, without one link, which would link the link itself
            os.link(f"/proc/self/fd/{fd}", temporary.name, dst_dir_fd=folder_fd, follow_symlinks=True)
        finally:
            os.close(folder_fd)
        return temporary

    def sync(self) -> None:
        """Sync all files to the disk."""
        for fd, _ in self._files.values():
            os.fsync(fd)

    def forget_cache(self) -> None:
        """Sync, and let the system drop its copies, so that a comparison reads what the disk holds."""
        self.sync()
        for fd, _ in self._files.values():
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def commit(self, last: str | None = None, stale: Iterable[str] = ()) -> None:
        """Give the files their names; those of an earlier run are replaced.

        Args:
            last: The file that makes the others count (an index): an old one goes first, the new one comes last.
            stale: Files of an earlier run that no longer belong to the result, removed at the end.
        """
        self.sync()
        for name, (fd, temporary) in list(self._files.items()):
            if temporary is None:
                self._files[name] = (fd, self._link(fd, name))
        if self._base is self.folder:
            if last is not None:
                (self.folder / last).unlink(missing_ok=True)
            self._place(self.folder, last)
        else:
            staging = self._temporary(self.folder.name)
            staging.mkdir()
            try:
                self._place(staging, last)
                os.rename(staging, self.folder)
            except BaseException:
                shutil.rmtree(staging, ignore_errors=True)
                raise
        for name in stale:
            (self.folder / name).unlink(missing_ok=True)
        self._created.clear()
        _sync_folder(self.folder)
        _sync_folder(self._base)

    def _place(self, folder: Path, last: str | None) -> None:
        """Give the files their names in ``folder``, or none of them."""
        placed: list[str] = []
        try:
            for name in sorted(self._files, key=lambda one: one == last):
                _, temporary = self._files[name]
                if temporary is not None:
                    os.replace(temporary, folder / name)
                    placed.append(name)
                os.close(self._files.pop(name)[0])
        except BaseException:
            for name in placed:  # a part of the result is useless
                (folder / name).unlink(missing_ok=True)
            raise


def _reserve(fd: int, num_bytes: int, path: Path) -> None:
    """Reserve the space now, so that a full disk shows before the copying and not in the middle of it."""
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except AttributeError:  # macOS
        os.ftruncate(fd, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
        os.ftruncate(fd, num_bytes)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # file systems that cannot sync a folder
            raise
    finally:
        os.close(fd)
