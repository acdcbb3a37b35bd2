"""A state dict that ``torch.save`` wrote (``pytorch_model.bin``): read without torch, and not trusted."""

from __future__ import annotations

import os
import struct
from math import prod
from pathlib import Path

from ...errors import CheckpointError
from ..layout import is_contiguous
from ..tensor_file import FileTensor, TensorFile
from .pickled_objects import DictWithState
from .records import TENSOR_NAMES, DescribedTensor, place, storage_of
from .unpickler import Allowed, SafeCall, load_restricted
from .zip_file import TorchArchive, Window

_MAX_PICKLE = 2**30  # about 150 bytes a tensor


_NAMES: Allowed = {
    **TENSOR_NAMES,
    ("collections", "OrderedDict"): DictWithState,
    ("torch._utils", "_rebuild_parameter"): SafeCall(lambda data, *_: data),
}


def read_bin(path: Path) -> TensorFile:
    """Find the tensors of a state dict that ``torch.save`` wrote.

    Raises:
        CheckpointError: If it is not one, holds anything but tensors under names, or points outside itself.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        archive = TorchArchive(Window(fd, 0, os.fstat(fd).st_size), _MAX_PICKLE, str(path))
        content = load_restricted(archive.pickle(), _NAMES, str(path), storage_of)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path}: should hold a state dict, found {type(content).__name__}.")
        return TensorFile(path, {_name(path, key): _tensor(archive, path, key, content[key]) for key in content})
    except (struct.error, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not a zip of torch.save ({error}).") from error
    finally:
        os.close(fd)


def _name(path: Path, key: object) -> str:
    if not isinstance(key, str):
        raise CheckpointError(f"{path}: a state dict has names as keys, found {type(key).__name__}.")
    return key


def _tensor(archive: TorchArchive, path: Path, name: object, value: object) -> FileTensor:
    what = f"{path}: {name!r}"
    if not isinstance(value, DescribedTensor):
        raise CheckpointError(f"{what} is no tensor but {type(value).__name__}; a merged state dict holds tensors.")
    found = place(archive, value, what)
    strides = None if is_contiguous(found.shape, found.strides) else found.strides
    return FileTensor(found.dtype, found.shape, found.start, prod(found.shape) * found.dtype.itemsize, strides)
