"""`verify_merged`: compares a merged result with the checkpoint it was made from, byte for byte."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import (
    BLOCK_BYTES,
    CheckpointError,
    Descriptor,
    FilePool,
    close,
    file_inside,
    human_bytes,
    open_regular,
    printable_message,
)
from .formats.base import (
    DType,
    FileTensor,
    Piece,
    SourceTensor,
    TensorFile,
    check_expansion,
    conversion_target,
    is_floating,
    read_weight_map,
)
from .formats.safetensors import read_safetensors
from .formats.torch_save import read_state_dict_file
from .locate import Weights, find_checkpoint
from .merge import Progress, ProgressCallback
from .names import Selection, checked_prefix, patterns, select
from .storage import is_remote, source_path
from .writing.copy import OnBytes, blocks_of, first_difference
from .writing.plan import RESULT_NAMES, PlannedTensor

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class VerifyReport:
    """Result of `verify_merged`."""

    num_tensors: int
    """Tensors that the checkpoint and the options ask for, and any further ones in the result."""
    num_bytes: int
    """Bytes that were compared."""
    seconds: float
    differences: dict[str, str]
    """Name in the result to what is wrong with it, missing ones first."""

    @property
    def is_equal(self) -> bool:
        """Whether the result is what a merge would write."""
        return not self.differences

    def to_dict(self) -> dict[str, object]:
        """Return plain values, as ``--json`` prints them."""
        return {**vars(self), "is_equal": self.is_equal}

    def __str__(self) -> str:
        """Return one line for people."""
        if self.is_equal:
            size = human_bytes(self.num_bytes)
            return f"{self.num_tensors} tensors, {size} in {self.seconds:.2f} s: equal to the checkpoint"
        name, reason = next(iter(self.differences.items()))
        return printable_message(
            f"{len(self.differences)} of {self.num_tensors} tensors differ. First {name!r}: {reason}"
        )


def verify_merged(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    strip_prefix: str | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    weights: Weights = "model",
    progress: ProgressCallback | bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Compare every byte of a merged result with its source.

    Takes no part in a process group: one process calls it. ``dtype`` needs torch, all else does without.

    Args:
        checkpoint_dir: As it was given to the merge.
        output_path: The folder with ``model.safetensors``, ``pytorch_model.bin`` or the index of either, or one such
            file.
        dtype: As in the merge; so are the following, and names and dtypes that differ for lack of them are differences.
        strip_prefix: See `merge_fsdp_weights`.
        include: See there.
        exclude: See there.
        weights: See there.
        progress: See there.
        storage_options: See there.

    Raises:
        CheckpointError: If the checkpoint is damaged (the checksums that torch wrote in it are compared, too), or the
            result is no file of tensors or is cut off.
        ValueError: If an argument is wrong.
    """
    started = time.monotonic()
    target = conversion_target(dtype)
    prefix, included, excluded = (
        checked_prefix(strip_prefix),
        patterns(include, "include"),
        patterns(exclude, "exclude"),
    )
    shown = Progress(progress, "comparing")
    found = find_checkpoint(source_path(checkpoint_dir, storage_options), weights)
    source, manifest = found.format.open(found.folder)
    selection = select(list(source.tensors), manifest, strip_prefix=prefix, include=included, exclude=excluded)
    files, differences = read_result(_result_place(output_path, storage_options))
    expected = _expected(selection, files)
    located = source.locate(set(expected.values()))
    comparison = _Comparison({name: located[one] for name, one in expected.items()}, target or source.dtype, shown.add)
    shown.start(2 * sum(tensor.num_bytes for file in files for tensor in file.tensors.values()))
    try:
        source.check(set(expected.values()), shown.add)
        for file in files:
            differences |= {name: why for name, why in comparison.compare(file).items() if name not in differences}
        shown.finish()
    finally:
        shown.close()
    differences = _missing(selection, expected, files) | differences
    names = {name for file in files for name in file.tensors} | set(expected) | set(differences)
    return VerifyReport(len(names), comparison.num_bytes, time.monotonic() - started, differences)


def _result_place(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> Path:
    """Return the place of a result, in its folder: an index names files that are beside it."""
    folder, slash, name = str(path).rpartition("/")
    if slash and is_remote(path) and name.endswith(".index.json"):
        return source_path(folder, storage_options) / name
    return source_path(path, storage_options)


def _expected(selection: Selection, files: list[TensorFile]) -> dict[str, str]:
    """Return name in the result to name in the source; a tied name that was written as a tensor must hold it too."""
    present = {name for file in files for name in file.tensors}
    aliases = {alias: selection.names[name] for alias, name in selection.ties.items() if alias in present}
    return selection.names | aliases


def _missing(selection: Selection, expected: Mapping[str, str], files: list[TensorFile]) -> dict[str, str]:
    """Return the tensors that the result does not hold, and the tied names that none of its headers mentions."""
    present = {name for file in files for name in file.tensors}
    missing = {name: "missing from the result" for name in expected if name not in present}
    metadata: dict[str, str] = {}
    for file in files:
        metadata |= file.metadata
    for alias, name in selection.ties.items():
        if alias not in present and metadata.get(alias) != name:
            missing[alias] = (
                f"tied to {name!r} in the checkpoint; no header records the tie, and no tensor has this name"
            )
    return missing


class _Comparison:
    """Goes through the files of a result."""

    def __init__(self, expected: Mapping[str, SourceTensor], dtype: DType | None, on_bytes: OnBytes):
        self._expected = expected
        self._dtype = dtype
        self._on_bytes = on_bytes
        self.num_bytes = 0

    def compare(self, file: TensorFile) -> dict[str, str]:
        """Return the problem of each tensor of a file that is not as expected."""
        files, buffer = FilePool(), memoryview(bytearray(BLOCK_BYTES))
        wrong: dict[str, str] = {}
        fd = open_regular(file.path)
        try:
            for name, found in file.tensors.items():
                why = self._describe(name, found) or self._bytes(name, found, file.path, fd, files, buffer)
                if why is not None:
                    wrong[name] = f"{file.path.name}: {why}"
        finally:
            close(fd)
            files.close()
        return wrong

    def _wanted(self, tensor: SourceTensor) -> DType:
        return self._dtype if self._dtype is not None and is_floating(tensor.dtype) else tensor.dtype

    def _describe(self, name: str, found: FileTensor) -> str | None:
        tensor = self._expected.get(name)
        if tensor is None:
            return "not expected from the checkpoint and these options. Did the merge use other options?"
        dtype = self._wanted(tensor)
        if (found.dtype, found.shape) == (dtype, tensor.shape):
            return None
        return f"{found.dtype.name} {list(found.shape)}, expected {dtype.name} {list(tensor.shape)}"

    def _bytes(
        self, name: str, found: FileTensor, path: Path, fd: Descriptor, files: FilePool, buffer: memoryview
    ) -> str | None:
        tensor = self._expected[name]
        planned = PlannedTensor(name, tensor, self._wanted(tensor), None, found.start)
        if found.strides is None:
            position = first_difference(planned, fd, files, buffer, self._count)
        else:
            position = self._strided(planned, found, path, files, buffer)
        return None if position is None else f"differs from its source starting at byte {position}"

    def _strided(
        self, planned: PlannedTensor, found: FileTensor, path: Path, files: FilePool, buffer: memoryview
    ) -> int | None:
        """Compare a tensor that the result holds with strides: all of it in memory, through torch."""
        from .writing.copy import decode_piece

        check_expansion(f"{path}: tensor {planned.name!r}", found.shape, found.strides or (), found.dtype.itemsize)
        piece = Piece(path, found.start, (0,) * len(found.shape), found.shape, found.strides)
        data = decode_piece(SourceTensor(planned.name, found.dtype, found.shape, (piece,)), piece)
        for position, block in blocks_of(planned, files, buffer):
            if data[position : position + len(block)] != block:
                return position
            self._count(len(block))
        return None

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._on_bytes(num_bytes)


# ------------------------------------------------------------------------------------------------
# Finds and reads the result of a merge: one file, or several with an index.


def read_result(path: Path) -> tuple[list[TensorFile], dict[str, str]]:
    """Return the files of a result, and what is wrong in its index.

    Args:
        path: The folder, of which the file is taken that loaders prefer, or one of `RESULT_NAMES`.

    Raises:
        CheckpointError: If there is none, or it is not what its name says.
    """
    if path.is_dir():
        found = [path / name for name in RESULT_NAMES if (path / name).is_file()]
        if not found:
            raise CheckpointError(f"{path} holds none of {', '.join(RESULT_NAMES)}.")
        path = found[0]
    if path.name.endswith(".index.json"):
        return _read_index(path)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; expected a merged folder, a .safetensors or a .bin file.")
    return [_read_file(path)], {}


def _read_file(path: Path) -> TensorFile:
    return read_state_dict_file(path) if path.suffix == ".bin" else read_safetensors(path)


def _read_index(path: Path) -> tuple[list[TensorFile], dict[str, str]]:
    weight_map = read_weight_map(path)
    names = sorted(set(weight_map.values()))
    files = [_read_file(file_inside(path.parent, name, str(path))) for name in names]
    found: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for file_name, file in zip(names, files, strict=True):
        for name in file.tensors:
            if name in found:
                wrong[name] = f"in {found[name]} and in {file_name}"
            elif weight_map.get(name) != file_name:
                wrong[name] = f"in {file_name}, {path.name} says {weight_map.get(name)}"
            found[name] = file_name
    wrong |= {
        name: f"not in {file_name}, where {path.name} lists it"
        for name, file_name in weight_map.items()
        if name not in found
    }
    return files, wrong
