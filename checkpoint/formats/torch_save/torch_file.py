"""A file of ``torch.save`` with many tensors: what it holds, and where each tensor lies. No torch, nothing is run.

Plain containers, numbers, text and tensors come out as they are; every other object becomes an `Inert`.

Source: torch 2.13 ``serialization.py``, ``_utils.py``, ``_tensor.py`` (``_rebuild_from_type_v2``).
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ...digests import HINT, FileDigest
from ...errors import CheckpointError
from ...files import open_regular
from .allowed_names import Allowed, SafeCall
from .described_tensors import TENSOR_NAMES, storage_of
from .pickled_objects import DictWithState, Inert, InertUnlessAttack, Size
from .zip_file import TorchArchive, Window, directory_digest

MAX_DESCRIPTION_BYTES = 256 * 2**20
"""Of one file's pickle: a hundred thousand tensors need 20 MB; the rest is for what users keep in checkpoints."""


class OddTensor(NamedTuple):
    """A tensor that cannot be copied; an error only where it is needed."""

    reason: str


def _lenient(name: str) -> SafeCall:
    rebuild = TENSOR_NAMES["torch._utils", name]
    if not callable(rebuild):
        raise TypeError(f"torch._utils.{name} is not one of the functions that rebuild a tensor")

    def call(*args: object) -> object:
        try:
            return rebuild(*args)
        except (pickle.UnpicklingError, TypeError) as error:
            return OddTensor(str(error))

    return SafeCall(call)


def _rebuild_parameter(data: Any = None, *_: object) -> object:
    return data


def _rebuild_from_type(rebuild: Any = None, _: object = None, args: Any = (), *__: object) -> object:
    """``torch.Tensor`` with attributes, as DeepSpeed sets them: the tensor alone."""
    known = isinstance(rebuild, SafeCall) and isinstance(args, tuple)
    return rebuild(*args) if known else Inert()


_ALLOWED: Allowed = InertUnlessAttack(
    {
        **{key: value for key, value in TENSOR_NAMES.items() if key[0] != "torch._utils"},
        ("torch._utils", "_rebuild_tensor_v2"): _lenient("_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_tensor_v3"): _lenient("_rebuild_tensor_v3"),
        ("torch._utils", "_rebuild_parameter"): SafeCall(_rebuild_parameter),
        ("torch._utils", "_rebuild_parameter_with_state"): SafeCall(_rebuild_parameter),
        ("torch._tensor", "_rebuild_from_type_v2"): SafeCall(_rebuild_from_type),
        ("collections", "OrderedDict"): DictWithState,
        ("torch", "Size"): Size,
        # An enumeration of ints: the int alone.
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"): SafeCall(lambda value=None, *_: value),
    }
)


def _storage(pid: Any) -> object:
    try:
        return storage_of(pid)
    except pickle.UnpicklingError:  # of a dtype that cannot be copied; its tensor becomes an OddTensor
        return Inert()


@contextmanager
def open_archive(path: Path, max_pickle_bytes: int = MAX_DESCRIPTION_BYTES) -> Iterator[TorchArchive]:
    """Open a file of ``torch.save``.

    Args:
        path: The file.
        max_pickle_bytes: The largest pickle that is read into memory.

    Raises:
        CheckpointError: If it is not one, or is cut off.
    """
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if os.pread(fd, 2, 0) == b"\x80\x02":
            raise CheckpointError(
                f"{path}: saved in torch's old format, not as a zip. Load it with torch and save it again, in "
                f"DeepSpeed with checkpoint serialization on."
            )
        try:
            yield TorchArchive(Window(fd, 0, size), max_pickle_bytes, str(path))
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: not a zip of torch.save, or cut off: {error}.") from error
    finally:
        os.close(fd)


def digest_of_file(path: Path) -> FileDigest:
    """Return the digest of a file of ``torch.save``, from its end alone.

    Raises:
        CheckpointError: If it is not one.
    """
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        return FileDigest.of_records(size, [directory_digest(fd, 0, size, str(path))])
    finally:
        os.close(fd)


def check_written(path: Path, digest: FileDigest) -> None:
    """Check that a file of ``torch.save`` is the one that was written; its tensors are not looked at.

    Raises:
        CheckpointError: If it is another one.
    """
    digest.check_size(path, path.stat().st_size)
    found = digest_of_file(path)
    if found != digest:
        raise CheckpointError(
            f"{path} is not the file that was written: its digest is {found.records.hex()}, accelight.json says "
            f"{digest.records.hex()}. It was damaged, or belongs to another save. {HINT}"
        )


def check_bytes(path: Path, share: tuple[int, int] = (0, 1)) -> None:
    """Compare all bytes in a file of ``torch.save`` with the checksums beside them; its old format has none.

    Args:
        path: The file.
        share: Which of how many shares to look at, where several processes look.

    Raises:
        CheckpointError: If they are not as they were written.
    """
    with os.fdopen(open_regular(path), "rb") as stream:
        is_zip = stream.read(2) == b"PK"
    if is_zip:
        with open_archive(path) as archive:
            archive.check(share=share)


def read_torch_file(path: Path) -> object:
    """Return what a file of ``torch.save`` holds; tensors as `DescribedTensor`.

    Raises:
        CheckpointError: If it is not such a file, is cut off, or its pickle is not as torch writes it.
    """
    try:
        with open_archive(path) as archive:
            return archive.content(_ALLOWED, _storage)
    except CheckpointError as error:
        if str(error).startswith(str(path)):
            raise
        raise CheckpointError(f"{path}: {error}") from None
