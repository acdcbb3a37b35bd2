"""Tensors as the pickles of ``torch.save`` describe them, and where in a file their bytes lie. No torch.

Source: torch 2.13 ``serialization.py`` (``_save``), ``_utils.py`` (``_rebuild_tensor_v2``, ``_v3``).
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ...errors import CheckpointError, brief
from ..dtypes import DTYPES, STORAGE_CLASSES, DType
from ..source import MAX_BYTES, MAX_DIMS
from .allowed_names import EMPTY_DICT, Allowed, SafeCall
from .zip_file import TorchArchive


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A stored tensor, and where in the file its first element lies."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


class Storage(NamedTuple):  # a tuple: a pickle cannot set its fields, as it can those of a frozen dataclass
    """What a persistent id says of a storage; ``dtype`` is None for bytes."""

    dtype: DType | None
    key: str
    numel: int


class DescribedTensor(NamedTuple):
    """A tensor as a pickle describes it."""

    storage: Storage
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_v2(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, *more: Any
) -> DescribedTensor:
    if not isinstance(storage, Storage) or storage.dtype is None:
        raise pickle.UnpicklingError("a tensor without a typed storage")
    return _described(storage, storage.dtype, offset, shape, strides, more)


def _rebuild_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *more: Any
) -> DescribedTensor:
    if not isinstance(storage, Storage) or not isinstance(dtype, str) or dtype not in DTYPES:
        raise pickle.UnpicklingError(f"a tensor of dtype {brief(dtype)}")
    return _described(storage, DTYPES[dtype], offset, shape, strides, more)


def _described(storage: Storage, dtype: DType, offset: Any, shape: Any, strides: Any, more: Any) -> DescribedTensor:
    if any(more):  # conjugate or negative bit: the bytes are not the values
        raise pickle.UnpicklingError(f"a lazy tensor, {brief(more)}. Save it after resolve_conj() and resolve_neg()")
    if type(shape) is not tuple or type(strides) is not tuple or not len(shape) == len(strides) <= MAX_DIMS:
        raise pickle.UnpicklingError(f"a tensor of shape {brief(shape)} and strides {brief(strides)}")
    numbers = (offset, *shape, *strides)
    if not all(type(one) is int and 0 <= one < MAX_BYTES for one in numbers):
        raise pickle.UnpicklingError(
            f"a tensor of shape, strides and storage offset {', '.join(map(brief, (shape, strides, offset)))}"
        )
    return DescribedTensor(storage, dtype, offset, shape, strides)


TENSOR_NAMES: Allowed = {
    ("torch._utils", "_rebuild_tensor_v2"): SafeCall(_rebuild_v2),
    ("torch._utils", "_rebuild_tensor_v3"): SafeCall(_rebuild_v3),
    ("collections", "OrderedDict"): EMPTY_DICT,
    **{("torch", name): ("storage", name) for name in STORAGE_CLASSES},
    **{("torch.storage", name): ("storage", name) for name in STORAGE_CLASSES},
    **{("torch", name): name for name in DTYPES},
}


def storage_of(pid: Any) -> Storage:
    """Resolve a persistent id of ``torch.save``."""
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[1], tuple):
        raise pickle.UnpicklingError("a storage that is not written by torch.save")
    _, kind, key, _, numel = pid
    name = kind[1] if len(kind) == 2 else None
    if type(name) is not str or name not in STORAGE_CLASSES:
        raise pickle.UnpicklingError(f"a storage of the kind {brief(name)}")
    if not isinstance(key, str) or type(numel) is not int or not 0 <= numel < MAX_BYTES:
        raise pickle.UnpicklingError(f"a storage with the key {brief(key)} and {brief(numel)} elements")
    dtype = STORAGE_CLASSES[name]
    return Storage(None if dtype is None else DTYPES[dtype], key, numel)


def place(archive: TorchArchive, described: DescribedTensor, what: str) -> PlacedTensor:
    """Return where the described tensor's first element lies.

    Raises:
        CheckpointError: If its storage is missing, has another size, or is too small for it.
    """
    storage = described.storage
    start, size = archive.storage(storage.key)
    itemsize = described.dtype.itemsize
    if size != storage.numel * (1 if storage.dtype is None else storage.dtype.itemsize):
        raise CheckpointError(f"{what}: data/{storage.key} has {size} bytes, data.pkl says {storage.numel} elements.")
    reach = ((n - 1) * stride for n, stride in zip(described.shape, described.strides, strict=True))
    last = described.offset + sum(reach)
    if prod(described.shape) and (last + 1) * itemsize > size:
        raise CheckpointError(
            f"{what}: shape and strides reach element {last}, data/{storage.key} has {size // itemsize}."
        )
    return PlacedTensor(described.dtype, described.shape, described.strides, start + described.offset * itemsize)
