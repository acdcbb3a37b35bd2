"""Files: errors, reports, free disk space, safe paths, and complete reads and writes."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from .object_path import ObjectFile, ObjectPath

# ------------------------------------------------------------------------------------------------
# `CheckpointError`, and the display of values from checkpoints in it.


_MAX_NAME = 160
_MAX_MESSAGE = 500
_NAME = re.compile(rf"\S{{{_MAX_NAME + 1},}}")
_NOT_PLAIN = re.compile(r"[^ -~]")


class CheckpointError(ValueError):
    """The checkpoint, or the pair of checkpoint and request, cannot give a right result.

    The message names file, tensor and both values of a mismatch. A ``ValueError``, because that is what Accelerate's
    ``merge_fsdp_weights`` raises for a folder it cannot read. Wrong arguments are plain ``ValueError`` or
    ``TypeError``; a full disk or a missing permission stays the ``OSError`` it is.

    Whatever names the message has, it is one line of at most 500 characters that a terminal can show.
    """

    def __init__(self, message: str):
        super().__init__(printable_message(message))


def printable(text: str) -> str:
    """Return text from a checkpoint as a terminal may have it: what is no printable character is written as an escape.

    Names may neither break the line nor send commands to the terminal. A very long one is shortened in the middle.
    """
    if not text.isprintable():
        text = _NOT_PLAIN.sub(lambda found: found[0] if found[0].isprintable() else ascii(found[0])[1:-1], text)
    return _NAME.sub(lambda found: _shortened(found[0], _MAX_NAME), text) if len(text) > _MAX_NAME else text


def printable_message(text: str) -> str:
    """Return a message that names things from a checkpoint, `printable` and of a length that people read."""
    return _shortened(printable(text), _MAX_MESSAGE)


def _shortened(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    half = (length - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def brief(value: object) -> str:
    """Return a value from a pickle for an error: never the content of containers, which may be without end."""
    if value is None or isinstance(value, bool | float | str) or (isinstance(value, int) and abs(value) < 2**128):
        text = repr(value)
        return text if len(text) <= 200 else f"{text[:200]}..."
    if type(value) is tuple or type(value) is list:
        shown = [brief(one) if not isinstance(one, tuple | list) else type(one).__name__ for one in value[:8]]
        text = f"{', '.join(shown)}{', ...' if len(value) > 8 else ''}"
        return f"[{text}]" if type(value) is list else f"({text})"
    return "dict" if isinstance(value, dict) else type(value).__name__


def listed(names: Sequence[str], most: int = 10, separator: str = ", ") -> str:
    """Return names for an error, the first ``most`` of very many."""
    more = len(names) - most
    return separator.join(names[:most]) + (f" and {more} more" if more > 0 else "")


# ------------------------------------------------------------------------------------------------
# The report of a merge.


@dataclass(frozen=True)
class MergeReport:
    """Result of `merge_fsdp_weights`."""

    destination: Path
    """The output folder."""
    files: tuple[str, ...]
    """Names of the written files; the index, where there is one, comes last."""
    num_tensors: int
    num_bytes: int
    """Of all files together."""
    seconds: float
    ties: dict[str, str]
    """Alias to the name of the tensor it shares, as in the output."""
    skipped: dict[str, str]
    """Tensors of the checkpoint, or of the saved model, that the output lacks: names in the checkpoint, and reasons."""
    verified: bool
    """Whether the output was read back and compared with its sources."""

    def skipped_by_reason(self) -> dict[str, list[str]]:
        """Return the names of what was left out under each reason."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            reasons.setdefault(reason, []).append(name)
        return reasons

    def to_dict(self) -> dict[str, object]:
        """Return plain values, as ``--json`` prints them."""
        return {**vars(self), "destination": str(self.destination), "files": list(self.files)}

    def __str__(self) -> str:
        """Return one line for people."""
        rate = self.num_bytes / max(self.seconds, 1e-9)
        extras = [f"{len(self.ties)} tied"] if self.ties else []
        extras += [f"{len(self.skipped)} left out"] if self.skipped else []
        extras += ["verified"] if self.verified else []
        where = self.destination / self.files[0] if len(self.files) == 1 else self.destination
        what = f"{self.num_tensors} tensors, {human_bytes(self.num_bytes)} in {self.seconds:.2f} s"
        return ", ".join([f"{what} ({human_bytes(rate)}/s)", *extras]) + f" -> {printable(str(where))}"


def human_bytes(num_bytes: float) -> str:
    """Return a size in the unit people read best, powers of 1000 as Hugging Face counts."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


BLOCK_BYTES = 512 * 1024
"""Measured best between 256 KB and 1 MB: larger buffers fall out of the processor's cache."""


_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def is_regular(path: Path) -> bool:
    """Return whether there is a regular file; False where there is nothing.

    Raises:
        CheckpointError: If there is something else, or a link that leads to nothing.
    """
    if isinstance(path, ObjectPath):
        return path.is_file()
    if not os.path.lexists(path):
        return False
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise CheckpointError(f"{path} is a broken link, expected a file.") from None
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise CheckpointError(f"{path} is {kind}, expected a file. Was the checkpoint copied unchanged?")
    return True


Descriptor = int | ObjectFile
"""Of a file that is open for reading; see `read_at`, `size_of`, `close`."""


def read_at(fd: Descriptor, num_bytes: int, offset: int) -> bytes:
    """Return so many bytes from such an offset, or fewer where the file ends."""
    return os.pread(fd, num_bytes, offset) if isinstance(fd, int) else fd.pread(num_bytes, offset)


def size_of(fd: Descriptor) -> int:
    """Return the size of an open file, in bytes."""
    return os.fstat(fd).st_size if isinstance(fd, int) else fd.size


def close(fd: Descriptor) -> None:
    """Close an open file."""
    if isinstance(fd, int):
        os.close(fd)


def open_regular(path: Path) -> Descriptor:
    """Return a regular file, or an object, open for reading."""
    return path.open_object() if isinstance(path, ObjectPath) else open_file(path)


def open_file(path: Path) -> int:
    """Return a descriptor for reading a regular file.

    Raises:
        CheckpointError: If it is something else; a FIFO is not waited for.
        OSError: If it is not there, or may not be read.
    """
    is_regular(path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)  # it has become something else in between
    raise CheckpointError(f"{path} is not a regular file, expected a file.")


def open_limited(path: Path, max_bytes: int, wanted: str) -> Descriptor:
    """Return a descriptor for reading a regular file that is not too large.

    Args:
        path: The file.
        max_bytes: What it may have at most.
        wanted: What it should be, for the error.

    Raises:
        CheckpointError: If it is larger, or no regular file.
    """
    fd = open_regular(path)
    size = size_of(fd)
    if size > max_bytes:
        close(fd)
        raise CheckpointError(f"{path} has {size} bytes, more than the limit of {max_bytes} for {wanted}.")
    return fd


def read_regular(path: Path, max_bytes: int, wanted: str) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        max_bytes: What it may have at most.
        wanted: What it should be, for the error.

    Raises:
        CheckpointError: If it is larger, or no regular file.
    """
    fd = open_limited(path, max_bytes, wanted)
    if not isinstance(fd, int):
        return read_at(fd, size_of(fd), 0)
    with os.fdopen(fd, "rb") as stream:
        return stream.read()


class FilePool:
    """Files open for reading, at most ``limit`` at a time; the least recently used is closed first. Not thread-safe."""

    def __init__(self, limit: int = 32):
        self._limit = limit
        self._open: OrderedDict[Path, Descriptor] = OrderedDict()

    def fd(self, path: Path) -> Descriptor:
        """Return a descriptor, valid until ``limit`` other files were asked for."""
        fd = self._open.get(path)
        if fd is None:
            if len(self._open) >= self._limit:
                close(self._open.popitem(last=False)[1])
            fd = self._open[path] = open_regular(path)
        else:
            self._open.move_to_end(path)
        return fd

    def close(self) -> None:
        """Close all files."""
        while self._open:
            close(self._open.popitem()[1])


def read_exactly(fd: Descriptor, path: Path, vectors: list[memoryview], position: int, num_bytes: int) -> None:
    """Read ``num_bytes`` into ``vectors``; an end of file in between is an error, not a short result."""
    read = partial(os.preadv, fd) if isinstance(fd, int) else fd.preadv
    got = read(vectors, position)
    if got == num_bytes:
        return
    for vector in vectors:  # rare (a signal, a network file system): vector by vector, until all is there
        filled = 0
        while filled < len(vector):
            step = read([vector[filled:]], position)
            if not step:
                raise CheckpointError(f"{path} was truncated while it was read: it ends before byte {position}.")
            filled += step
            position += step


def write_exactly(fd: int, view: memoryview, position: int) -> None:
    """Write all of ``view``."""
    while len(view):
        written = os.pwrite(fd, view, position)
        view, position = view[written:], position + written


# ------------------------------------------------------------------------------------------------
# Errors of a full disk: the path, the size of the write, and the free space.


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NUMBER = re.compile(r"\(os error (\d+)\)")  # safetensors has the system's errors as text


@contextmanager
def translate_full_disk(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Run the body, which writes a file or folder; if the disk is full, the error says so.

    torch 2.13 reports such a write as an unexpected position in its zip, with the system's own error behind it.

    Args:
        path: What is written.
        num_bytes: How much is to be written in all, where that is known.

    Raises:
        OSError: With the path, in the place of whatever the full disk made the body raise. One that names a path
            already stays as it is.
    """
    try:
        yield
    except Exception as error:
        number = _number_behind(error)
        if number is None or (isinstance(error, OSError) and error.filename is not None):
            raise
        raise OSError(number, _described(number, path, num_bytes), str(path)) from error


def _number_behind(error: BaseException) -> int | None:
    """Return the number of the system's error that an exception stands for, if it is that of a full disk."""
    link: BaseException | None = error
    for _ in range(20):
        if link is None:
            return None
        number = link.errno if isinstance(link, OSError) else None
        if number is None and (found := _NUMBER.search(str(link))):
            number = int(found[1])
        if number in _FULL:
            return number
        link = link.__cause__ or link.__context__
    return None


def _described(number: int, path: Path, num_bytes: int | None) -> str:
    wanted = "" if num_bytes is None else f" about {human_bytes(num_bytes)} were to be written, but"
    if number != errno.ENOSPC:
        return f"{os.strerror(number)}:{wanted} a quota or a limit of this process allows less"
    return f"{os.strerror(number)}:{wanted} there was room for {human_bytes(_room(path))}"


def _room(path: Path) -> int:
    """Return the free bytes of the disk before the present part of ``path`` was written."""
    place = path
    while not place.exists():
        place = place.parent
    files = [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path] if place == path else []
    return shutil.disk_usage(place).free + sum(one.stat().st_blocks * 512 for one in files)


# ------------------------------------------------------------------------------------------------
# Paths of the files that a checkpoint names: they must be regular files inside its own folder.


def resolved(path: Path) -> Path:
    """Return a path without links; of links in a circle one, for which `Path.resolve` raises before Python 3.13."""
    return path.resolve() if isinstance(path, ObjectPath) else Path(os.path.realpath(path))


def file_inside(folder: Path, relative: str, what: str) -> Path:
    """Return the real path of the file that a checkpoint in ``folder`` calls ``relative``.

    Raises:
        CheckpointError: If the name or a link leads out of the folder, or there is no regular file.
    """
    parts = PurePosixPath(relative).parts
    plain = relative == "/".join(parts)  # each file has one name, and is looked for once
    if not plain or not parts or parts[0] == "/" or ".." in parts or "\\" in relative or "\0" in relative:
        raise CheckpointError(f"{what} names the file {relative!r}, which is not a plain path inside {folder}.")
    try:
        os.fsencode(relative)
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{what} names the file {relative!r}, which is not a valid file name on this system."
        ) from None
    if isinstance(folder, ObjectPath):
        if not (folder / relative).is_file():
            raise CheckpointError(f"{what} needs the object {relative!r}, not found in {folder}. Were all copied?")
        return folder / relative
    root = folder.resolve()
    path = resolved(root.joinpath(*parts))
    if not path.is_relative_to(root):
        raise CheckpointError(f"{what} names the file {relative!r}, a link out of the checkpoint's folder to {path}.")
    try:
        mode = os.lstat(path).st_mode
    except OSError as error:
        raise CheckpointError(
            f"{what} needs the file {relative!r}, not found in {folder} ({error.strerror}). Were the files of all "
            "processes copied?"
        ) from None
    if stat.S_ISLNK(mode):
        raise CheckpointError(f"{what} names the file {relative!r}, a chain of links that never ends.")
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{what} names {relative!r}, which is not a regular file.")
    return path
