"""Folders of torch.distributed.checkpoint as a source of the merge: which tensors are the model's, where they lie."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ...digests import RecordDigests
from ...errors import CheckpointError
from ...files import open_regular
from ...manifest import Manifest
from ..safe_paths import file_inside
from ..source import Piece, Source, SourceTensor, check_coverage, check_expansion, is_contiguous
from ..state_dict_keys import MODEL_KEYS, is_optimizer_key
from ..torch_save.described_tensors import PlacedTensor
from .metadata import METADATA_NAME, DCPMetadata, StoredRecord, StoredTensor
from .records import RecordReader


def dcp_source(folder: Path, metadata: DCPMetadata, manifest: Manifest | None = None) -> Source:
    """Return the model of a DCP folder.

    Args:
        folder: Holds the files.
        metadata: Says what is in them.
        manifest: Says under which key of the saved state dict the model is, and how the files were written.

    Raises:
        CheckpointError: If the model cannot be told, or the records are others than were written.
    """
    names, skipped = select_model(metadata, None if manifest is None else manifest.model_prefix, str(folder))
    digests = RecordDigests({} if manifest is None else manifest.digests, metadata.offsets, str(folder / METADATA_NAME))
    tensors = {name: metadata.tensors[fqn] for name, fqn in names.items()}
    skipped |= dict.fromkeys(metadata.not_tensors, "not a tensor")

    def locate(wanted: Iterable[str]) -> dict[str, SourceTensor]:
        return _Locator(folder, digests).locate({name: tensors[name] for name in wanted})

    def check(wanted: Iterable[str], on_bytes: Callable[[int], object]) -> None:
        _check_records(folder, [tensors[name] for name in wanted], digests, on_bytes)

    return Source(folder, tensors, skipped, locate, check)


def select_model(metadata: DCPMetadata, prefix: str | None, where: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the model's names with their entries' full names, and what belongs to something else."""
    paths = {fqn: metadata.paths.get(fqn) or (fqn,) for fqn in metadata.tensors}
    skipped: dict[str, str] = {}
    for depth in range(max(map(len, paths.values()), default=0)):
        groups: dict[str, int] = {}
        for path in paths.values():
            if len(path) > depth + 1:
                groups[path[depth]] = groups.get(path[depth], 0) + 1
        optimizers = {key for key in groups if is_optimizer_key(key)}
        if len(optimizers) < len(groups):  # a folder of nothing but optimizer state was asked for
            for fqn in [fqn for fqn, path in paths.items() if len(path) > depth + 1 and path[depth] in optimizers]:
                skipped[fqn] = "optimizer state"
                del paths[fqn]
            groups = {key: count for key, count in groups.items() if key not in optimizers}
        chosen = _choose_group(groups, sum(groups.values()) == len(paths), prefix if depth == 0 else None, where)
        if chosen is None:
            break
        for fqn in [fqn for fqn, path in paths.items() if len(path) <= depth + 1 or path[depth] != chosen]:
            skipped[fqn] = f"not part of {chosen!r}, the model"
            del paths[fqn]
        if is_optimizer_key(chosen):  # asked for: its own keys stay in the names
            depth += 1
            break
    else:
        depth = 0
    names: dict[str, str] = {}
    for fqn, path in paths.items():
        name = ".".join(path[depth:])
        if name in names:
            raise CheckpointError(f"{where}: two entries are called {name!r}: {names[name]!r} and {fqn!r}.")
        names[name] = fqn
    return names, skipped


def _choose_group(groups: Mapping[str, int], is_complete: bool, prefix: str | None, where: str) -> str | None:
    """Return the key to go down into, or None to stay on this level."""
    if prefix is not None:
        if prefix not in groups:
            raise CheckpointError(f"{where}: the model should be under the key {prefix!r}; found {sorted(groups)}.")
        return prefix
    found = [key for key in MODEL_KEYS if key in groups]
    if len(found) > 1:
        raise CheckpointError(
            f"{where}: weights are under both {found[0]!r} ({groups[found[0]]} tensors) and {found[1]!r} "
            f"({groups[found[1]]} tensors). A folder of one model has one of them."
        )
    if found:
        return found[0]
    return next(iter(groups)) if len(groups) == 1 and is_complete else None


@dataclass(slots=True)
class _Wanted:
    """A record to look at, and where its answer goes."""

    name: str
    chunk: int
    record: StoredRecord


class _Locator:
    """Goes through the files one by one, in the order of their records."""

    def __init__(self, folder: Path, digests: RecordDigests):
        self._folder = folder
        self._digests = digests
        self._paths: dict[str, Path] = {}

    def locate(self, tensors: Mapping[str, StoredTensor]) -> dict[str, SourceTensor]:
        by_file: dict[str, list[_Wanted]] = {}
        for name, stored in tensors.items():
            for chunk, (_, _, record) in enumerate(stored.chunks):
                by_file.setdefault(record.relative_path, []).append(_Wanted(name, chunk, record))
        pieces: dict[str, list[Piece | None]] = {name: [None] * len(one.chunks) for name, one in tensors.items()}
        for relative, wanted in by_file.items():
            self._read_file(relative, wanted, tensors, pieces)
        located: dict[str, SourceTensor] = {}
        for name, stored in tensors.items():
            parts = tuple(piece for piece in pieces.pop(name) if piece is not None)
            check_coverage(stored.fqn, stored.shape, parts)
            located[name] = SourceTensor(stored.fqn, stored.dtype, stored.shape, parts)
        return located

    def _read_file(
        self,
        relative: str,
        wanted: list[_Wanted],
        tensors: Mapping[str, StoredTensor],
        pieces: Mapping[str, list[Piece | None]],
    ) -> None:
        path = file_inside(
            self._folder, relative, f"{self._folder / METADATA_NAME}: tensor {tensors[wanted[0].name].fqn!r}"
        )
        wanted.sort(key=lambda one: (one.record.offset, one.record.length))
        for first, second in pairwise(wanted):
            _check_records_apart(path, first, second, tensors)
        fd = open_regular(path)
        try:
            reader = RecordReader(fd, str(path), os.fstat(fd).st_size)
            for one in wanted:
                pieces[one.name][one.chunk] = self._piece(reader, path, one, tensors[one.name])
        finally:
            os.close(fd)

    def _piece(self, reader: RecordReader, path: Path, wanted: _Wanted, tensor: StoredTensor) -> Piece:
        offsets, sizes, record = tensor.chunks[wanted.chunk]
        if record.transforms:
            reader.check_range(tensor.fqn, record.offset, record.length)
            return Piece(path, record.offset, offsets, sizes, None, record.transforms, record.length)
        if record.is_raw:
            reader.check_range(tensor.fqn, record.offset, record.length)
            return Piece(path, record.offset, offsets, sizes)
        digest = self._digests.of(record.relative_path, record.offset)
        found = reader.locate(tensor.fqn, record.offset, record.length, digest)
        _check_as_described(path, tensor, sizes, found)
        strides = None if is_contiguous(found.shape, found.strides) else found.strides
        if strides is not None:
            check_expansion(f"{path}: tensor {tensor.fqn!r}", sizes, strides, tensor.dtype.itemsize)
        return Piece(path, found.start, offsets, sizes, strides)


def _check_records(
    folder: Path, tensors: Iterable[StoredTensor], digests: RecordDigests, on_bytes: Callable[[int], object]
) -> None:
    """Compare the bytes of tensors with the checksums in their records; raw and transformed ones have none."""
    by_file: dict[str, dict[StoredRecord, str]] = {}
    for tensor in tensors:
        for _, _, record in tensor.chunks:
            if not record.is_raw and not record.transforms:
                by_file.setdefault(record.relative_path, {}).setdefault(record, tensor.fqn)
    for relative, records in by_file.items():
        path = file_inside(folder, relative, str(folder))
        fd = open_regular(path)
        try:
            reader = RecordReader(fd, str(path), os.fstat(fd).st_size)
            for record in sorted(records, key=lambda one: one.offset):
                digest = digests.of(relative, record.offset)
                on_bytes(reader.check(records[record], record.offset, record.length, digest))
        finally:
            os.close(fd)


def _check_records_apart(path: Path, first: _Wanted, second: _Wanted, tensors: Mapping[str, StoredTensor]) -> None:
    """One record may serve two names, but two records may not share bytes."""
    a, b = first.record, second.record
    if (a.offset, a.length) != (b.offset, b.length) and a.offset + a.length > b.offset and a.length and b.length:
        raise CheckpointError(
            f"{path}: the records of {tensors[first.name].fqn!r} (bytes {a.offset} to {a.offset + a.length}) and "
            f"{tensors[second.name].fqn!r} (from byte {b.offset}) overlap."
        )


def _check_as_described(path: Path, tensor: StoredTensor, sizes: tuple[int, ...], found: PlacedTensor) -> None:
    if found.dtype != tensor.dtype:
        raise CheckpointError(
            f"{path}: tensor {tensor.fqn!r} is stored as {found.dtype.name}, {METADATA_NAME} says {tensor.dtype.name}."
        )
    if found.shape != sizes:
        raise CheckpointError(
            f"{path}: tensor {tensor.fqn!r} is stored with shape {list(found.shape)}, "
            f"{METADATA_NAME} says {list(sizes)}."
        )
