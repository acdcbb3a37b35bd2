"""Files and folders that get their names only when they are complete, and replace older checkpoints alone."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from .files import listed
from .formats.base import AVERAGED_WEIGHTS
from .manifest import GENERATION, MANIFEST_NAME
from .writing.plan import RESULT_NAMES


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
            with suppress(OSError):  # something was put there meanwhile
                path.rmdir()

    def check_space(self, num_bytes: int) -> None:
        """Raise OSError (ENOSPC) if the folder's disk has less space than that."""
        free = shutil.disk_usage(self._base).free
        if free < num_bytes:
            raise OSError(
                errno.ENOSPC,
                f"The output needs {num_bytes} bytes, but the disk has {free} free",
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
        """Return the temporary place of a shared file until `commit`."""
        return self._base / f".{self.folder.name}.{name}.unfinished"

    def _open(self, name: str) -> tuple[int, Path | None]:
        if self._shared:
            path = self.path_of(name)
            # Not truncated: what is left of a killed run may still write into the old file.
            path.unlink(missing_ok=True)
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
        _sync_entry(self.folder)
        _sync_entry(self._base)

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


def _sync_entry(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some systems sync no folders
            raise
    finally:
        os.close(fd)


# ------------------------------------------------------------------------------------------------
# Replacing an older checkpoint by a finished one, so that the name never refers to half of one.


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # Linux, renameat2
_RENAME_SWAP = 2  # macOS, renamex_np
_LEFT = re.compile(r"(unfinished|removed)(-[0-9a-f]+)?")


def replace(path: Path, finished: Path) -> None:
    """Rename ``finished``, a folder or a file, to ``path`` and remove what stood there.

    Where the system can exchange two names in one step (Linux and macOS on their usual file systems), ``path`` is at
    every moment either the old one or the new one. Elsewhere there is an instant between two renames in which an old
    folder is called ``.NAME.old``; a file replaces a file in one step everywhere.
    """
    _sync(finished)
    if not os.path.lexists(path):
        finished.rename(path)
    elif finished.is_file() and (path.is_symlink() or not path.is_dir()):
        os.replace(finished, path)
    elif _exchange(path, finished):
        _remove(finished)  # the old one, by now
    else:
        old = path.with_name(f".{path.name}.old")
        _remove(old)
        path.rename(old)
        try:
            finished.rename(path)
        except BaseException:
            old.rename(path)
            raise
        _remove(old)
    _sync_entry(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a checkpoint's folder so that its name never means a part of it; what others put into it stays."""
    if is_checkpoint(path) and files_of_others(path):
        remove_own(path)
        return
    hidden = path.with_name(f".{path.name}.removed")
    _remove(hidden)  # left by a killed run
    path.rename(hidden)
    shutil.rmtree(hidden)


def unfinished_name(path: Path, number: str = "") -> Path:
    """Return the temporary place of a checkpoint until it is complete.

    Args:
        path: The name that it gets.
        number: Hexadecimal digits that distinguish it from others of this name.
    """
    return path.with_name(f".{path.name}.unfinished{number and f'-{number}'}")


def remove_unfinished(path: Path) -> None:
    """Remove whatever is there of checkpoints that were to get this name, by whichever run.

    Other processes may be writing there: each folder gets another name first, in one step. Whoever knows it by its old
    one can create nothing in it any more, and cannot give it the checkpoint's name.
    """
    if not path.parent.is_dir():
        return
    prefix = f".{path.name}."
    for entry in os.listdir(path.parent):
        if entry.startswith(prefix) and _LEFT.fullmatch(entry.removeprefix(prefix)):
            _remove_at_once(path.with_name(entry), path)


def drop_written_folder(left: Path, path: Path) -> None:
    """Remove what a failed save of ``path`` has written into ``left``, as `drop_unfinished`; others may still write."""
    with suppress(OSError):
        _remove_at_once(left, path)


def _remove_at_once(left: Path, path: Path) -> None:
    hidden = path.with_name(f".{path.name}.removed-{secrets.token_hex(8)}")
    try:
        left.rename(hidden)
    except FileNotFoundError:  # another process was faster, or it is finished
        return
    with suppress(OSError):  # NFS keeps what is open somewhere; the next save tries again
        _remove(hidden)


def drop_unfinished(path: Path) -> None:
    """Remove what a failed save has written, as far as possible: the error that it failed with is raised."""
    with suppress(OSError):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            _sync_entry(file)
    _sync_entry(folder)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step; False where the system cannot.

    Raises:
        OSError: If it can, and fails.
    """
    library = ctypes.CDLL(None, use_errno=True)
    a, b = os.fsencode(first), os.fsencode(second)
    if sys.platform == "darwin" and hasattr(library, "renamex_np"):
        failed = library.renamex_np(a, b, _RENAME_SWAP)
    elif hasattr(library, "renameat2"):
        failed = library.renameat2(_AT_FDCWD, a, _AT_FDCWD, b, _RENAME_EXCHANGE)
    else:
        return False
    if not failed:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # an old kernel, or a file system without it
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


# ------------------------------------------------------------------------------------------------
# Files of others in a checkpoint's place: a checkpoint replaces checkpoints, and nothing else.
#
# [Note: files of others] A folder may hold a checkpoint and files that are not part of it. A new
# checkpoint of that name takes over what is not the old one's: as links to the same bytes, made before the names are
# exchanged, so that there is no moment at which they could be lost.


_DCP = (re.compile(r"\.metadata(\.tmp)?"), re.compile(r".*\.distcp"), re.compile(r"meta\.pt"))
_LOCAL = (re.compile(r"rank_\d+_of_\d+\.pt"), re.compile(r"meta\.pt"))
_OURS = re.compile(re.escape(MANIFEST_NAME))
_TAG, _CONVERTED = "checkpoint", "checkpoint_universal"
"""DeepSpeed's folders inside a checkpoint of Lightning's or ours, which have the same names in both."""
_DEEPSPEED = (
    *map(re.compile, ("latest", "latest_universal", r"zero_to_\w+\.py")),
    *(re.compile(re.escape(name)) for name in RESULT_NAMES),
)
_STATES = re.compile(r".*_states\.pt")
_INSIDE = {
    _TAG: (_STATES, re.compile("offloaded_tensors")),  # the latter is a folder, of what is on NVMe
    **dict.fromkeys((_CONVERTED, f".{_CONVERTED}.unfinished"), (re.compile(r".*"),)),
    AVERAGED_WEIGHTS: (*_DCP, _OURS),
}
"""The names inside the folders of a checkpoint of DeepSpeed's."""
_IN_GENERATION = (*_DCP, _OURS, _STATES, re.compile(AVERAGED_WEIGHTS), re.compile(re.escape(RESULT_NAMES[0])))
"""The names inside the folder of one save, which a download from an object store has."""


def check_replaceable(path: Path, *, by_file: bool = False) -> None:
    """Check that nothing is lost when a checkpoint takes this name.

    A folder that is replaced by a folder keeps what is not the checkpoint's, see `keep_files_of_others`.

    Args:
        path: Nothing, an empty folder (not ``by_file``), a checkpoint of torch's, Lightning's, DeepSpeed's or ours, or
            a link to one.
        by_file: Whether a file takes the name. A file replaces any file, as ``torch.save`` does.

    Raises:
        IsADirectoryError: If it is another folder, or (``by_file``) one that holds files beside the checkpoint's.
        FileExistsError: If it is a file that is no checkpoint, and a folder takes the name.
    """
    if path.is_dir():
        names = os.listdir(path)
        if (names or by_file) and not is_checkpoint(path):
            raise IsADirectoryError(
                f"{path} is a folder but not a checkpoint: it is not overwritten. It holds "
                f"{listed(sorted(names), 3) or 'nothing'}. Choose another name, such as {path / 'last.ckpt'}."
            )
        if by_file and (foreign := files_of_others(path)):
            raise IsADirectoryError(
                f"{path} is a folder with a checkpoint and {listed(foreign, 3)}: it is not overwritten by a file. "
                "Choose another name, or move these files away."
            )
    elif path.is_file() and not by_file and not _is_saved_file(path):
        raise FileExistsError(f"{path} is a file but not a checkpoint: it is not overwritten. Choose another name.")


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder holds a sharded checkpoint: of DCP's, of ``local_state_dict``, or of DeepSpeed's."""
    return bool(_patterns(folder))


def files_of_others(folder: Path) -> list[str]:
    """Return the foreign files of a checkpoint's folder, as relative paths."""
    patterns, inside = _patterns(folder), _INSIDE if _has_states(folder) else {}
    foreign = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        name = entry.name
        if not entry.is_dir(follow_symlinks=False):
            foreign += [] if _matches(name, patterns) else [name]
        elif own := _IN_GENERATION if patterns and GENERATION.fullmatch(name) else inside.get(name):
            foreign += [f"{name}/{one}" for one in sorted(os.listdir(entry.path)) if not _matches(one, own)]
        else:
            foreign.append(name)
    return foreign


def _matches(name: str, patterns: Iterable[re.Pattern[str]]) -> bool:
    return any(pattern.fullmatch(name) for pattern in patterns)


def keep_files_of_others(old: Path, new: Path) -> None:
    """Put what ``old`` holds beside its checkpoint into ``new``, too: see [Note: files of others]."""
    if not old.is_dir() or old.is_symlink() or not is_checkpoint(old):  # of a link, only the link is replaced
        return
    for name in files_of_others(old):
        source, target = old / name, new / name
        if os.path.lexists(target) or not target.parent.is_dir():
            target = new / f"{name.replace('/', '.')}.kept"
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, target, symlinks=True, copy_function=_link)
        else:
            _link(str(source), str(target))


def remove_own(folder: Path) -> None:
    """Remove a checkpoint's own files from a folder that holds others; first those without which it is none."""
    foreign = set(files_of_others(folder))
    own = [name for name in os.listdir(folder) if name not in foreign]
    for name in sorted(own, key=lambda name: (name not in (".metadata", "meta.pt", "latest"), name)):
        path = folder / name
        if not path.is_dir() or path.is_symlink():
            path.unlink()
            continue
        kept = {one.removeprefix(f"{name}/") for one in foreign if one.startswith(f"{name}/")}
        if not kept:
            shutil.rmtree(path)
            continue
        for inner in path.iterdir():
            if inner.name not in kept:
                _remove(inner)


def _patterns(folder: Path) -> tuple[re.Pattern[str], ...]:
    """Return the patterns of the names of a checkpoint's files; none for another folder."""
    patterns: tuple[re.Pattern[str], ...] = ()
    if (folder / ".metadata").is_file():
        patterns += _DCP
    if any(_LOCAL[0].fullmatch(name) for name in os.listdir(folder)):
        patterns += _LOCAL
    if _has_states(folder):
        patterns += _DEEPSPEED
    return (*patterns, _OURS) if patterns else ()


def _has_states(folder: Path) -> bool:
    """Return whether one of DeepSpeed's tag folders is inside: ours, Lightning's, or a save's of an object store."""
    tags = [name for name in os.listdir(folder) if name == _TAG or GENERATION.fullmatch(name)]
    return any(_STATES.fullmatch(name) for tag in tags if (folder / tag).is_dir() for name in os.listdir(folder / tag))


def _is_saved_file(path: Path) -> bool:
    return path.stat().st_size == 0 or path.suffix == ".ckpt" or zipfile.is_zipfile(path)  # torch.save writes a zip


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, target, follow_symlinks=False)
    return target
