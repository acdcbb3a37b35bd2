"""A state dict that ``torch.save`` wrote (``pytorch_model.bin``): read without torch, and not trusted."""

from __future__ import annotations

from math import prod
from pathlib import Path

from ...errors import CheckpointError
from ..source import is_contiguous
from ..tensor_file import FileTensor, TensorFile
from .allowed_names import Allowed, SafeCall
from .described_tensors import TENSOR_NAMES, DescribedTensor, place, storage_of
from .pickled_objects import DictWithState
from .torch_file import open_archive
from .zip_file import TorchArchive

_MAX_PICKLE = 2**30  # about 150 bytes a tensor

_NAMES: Allowed = {
    **TENSOR_NAMES,
    ("collections", "OrderedDict"): DictWithState,
    ("torch._utils", "_rebuild_parameter"): SafeCall(lambda data, *_: data),
}


def read_state_dict_file(path: Path) -> TensorFile:
    """Find the tensors of a state dict that ``torch.save`` wrote.

    Raises:
        CheckpointError: If it is not one, holds anything but tensors under names, or points outside itself.
    """
    with open_archive(path, _MAX_PICKLE) as archive:
        content = archive.content(_NAMES, storage_of)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path}: should hold a state dict, found {type(content).__name__}.")
        return TensorFile(path, {_name(path, key): _tensor(archive, path, key, content[key]) for key in content})


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
