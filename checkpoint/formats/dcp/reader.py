"""Folders of torch.distributed.checkpoint as a source of the merge: which tensors are the model's, where they lie."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from ...digests import RecordDigests
from ...errors import CheckpointError
from ...files import open_regular
from ...manifest import Manifest
from ..dtypes import DType
from ..safe_paths import file_inside
from ..source import Source, SourceTensor, check_coverage, check_expansion, is_contiguous
from ..state_dict_keys import MODEL_KEYS, is_optimizer_key
from ..torch_save.described_tensors import PlacedTensor
from .located_tensors import LocatedTensors, TensorInfos
from .metadata import METADATA_NAME, DCPMetadata
from .records import RecordReader
from .tensor_table import Layout, TensorTable, same_names

_is_contiguous = lru_cache(maxsize=1000)(is_contiguous)  # a few shapes, of very many tensors


def dcp_source(folder: Path, metadata: DCPMetadata, manifest: Manifest | None = None) -> Source:
    """Return the model of a DCP folder.

    Args:
        folder: Holds the files.
        metadata: Says what is in them.
        manifest: Says under which key of the saved state dict the model is, and how the files were written.

    Raises:
        CheckpointError: If the model cannot be told, or the records are others than were written.
    """
    prefix = None if manifest is None else manifest.model_prefix
    fqns, depth, skipped = _select(metadata, prefix, str(folder))
    digests = RecordDigests({} if manifest is None else manifest.digests, metadata.offsets, str(folder / METADATA_NAME))
    skipped |= dict.fromkeys(metadata.not_tensors, "not a tensor")
    table = metadata.tensors
    table.rename(_named(metadata, fqns, depth), str(folder))

    def locate(wanted: Iterable[str]) -> Mapping[str, SourceTensor]:
        return locate_tensors(folder, table, wanted, digests)

    def check(wanted: Iterable[str], on_bytes: Callable[[int], object]) -> None:
        _check_records(folder, table, wanted, digests, on_bytes)

    return Source(folder, TensorInfos(table), skipped, locate, check)


def select_model(metadata: DCPMetadata, prefix: str | None, where: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the model's names with their entries' full names, and what belongs to something else."""
    fqns, depth, skipped = _select(metadata, prefix, where)
    names: dict[str, str] = {}
    for name, fqn in _named(metadata, fqns, depth):
        if name in names:
            raise same_names(where, name, names[name], fqn)
        names[name] = fqn
    return names, skipped


def _named(metadata: DCPMetadata, fqns: list[str], depth: int) -> Iterator[tuple[str, str]]:
    """Yield each entry's name below a level of its path, and in full. The list is used up: it may be a long one."""
    fqns.reverse()
    while fqns:
        fqn = fqns.pop()
        name = ".".join((metadata.paths.get(fqn) or (fqn,))[depth:])
        yield fqn if name == fqn else name, fqn


def _select(metadata: DCPMetadata, prefix: str | None, where: str) -> tuple[list[str], int, dict[str, str]]:
    """Return the model's entries, the level of their paths where its names begin, and what is not the model's."""
    path_of = metadata.paths.get
    fqns = list(metadata.tensors)
    longest = max((len(path_of(fqn) or (fqn,)) for fqn in fqns), default=0)
    skipped: dict[str, str] = {}
    for depth in range(longest):
        keys = _keys(metadata, fqns, depth)
        groups: dict[str, int] = {}
        for key in keys:
            if key is not None:
                groups[key] = groups.get(key, 0) + 1
        optimizers = {key for key in groups if is_optimizer_key(key)}
        if len(optimizers) < len(groups) and optimizers:  # a folder of nothing but optimizer state was asked for
            skipped |= {fqn: "optimizer state" for fqn, key in zip(fqns, keys, strict=True) if key in optimizers}
            fqns = [fqn for fqn, key in zip(fqns, keys, strict=True) if key not in optimizers]
            keys = [key for key in keys if key not in optimizers]
            groups = {key: count for key, count in groups.items() if key not in optimizers}
        chosen = _choose_group(groups, sum(groups.values()) == len(fqns), prefix if depth == 0 else None, where)
        if chosen is None:
            break
        others = [fqn for fqn, key in zip(fqns, keys, strict=True) if key != chosen]
        skipped |= dict.fromkeys(others, f"not part of {chosen!r}, the model")
        fqns = [fqn for fqn, key in zip(fqns, keys, strict=True) if key == chosen]
        if is_optimizer_key(chosen):  # asked for: its own keys stay in the names
            depth += 1
            break
    else:
        depth = 0
    return fqns, depth, skipped


def _keys(metadata: DCPMetadata, fqns: Iterable[str], depth: int) -> list[str | None]:
    """Return the key on a level of each entry's path; None where the path ends there. Equal ones are one object."""
    known: dict[str, str] = {}
    found: list[str | None] = []
    for fqn in fqns:
        path = metadata.paths.get(fqn) or (fqn,)
        found.append(known.setdefault(path[depth], path[depth]) if len(path) > depth + 1 else None)
    return found


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


def locate_tensors(
    folder: Path, table: TensorTable, wanted: Iterable[str], digests: RecordDigests
) -> Mapping[str, SourceTensor]:
    """Find the bytes of tensors: goes through the files one by one, in the order of their records.

    Raises:
        CheckpointError: If they are not as described.
    """
    names = list(wanted)
    located = LocatedTensors(folder, table, names)
    for relative, chunks in _by_file(table, names).items():
        _locate_in_file(folder, relative, chunks, located, digests)
    checked: set[Layout] = set()
    for name in names:
        layout = table.layouts[table.numbers[name]]
        if layout not in checked:
            tensor = located[name]
            check_coverage(tensor.fqn, tensor.shape, tensor.pieces)
            checked.add(layout)
    return located


def _by_file(table: TensorTable, names: Iterable[str]) -> dict[str, array[int]]:
    """Return the chunks of tensors by file, in the order of their records."""
    by_file = [array("q") for _ in table.files]
    for name in names:
        for chunk in table.chunks(table.numbers[name]):
            by_file[table.file_of[chunk]].append(chunk)
    offsets, lengths = table.offsets, table.lengths
    for number, chunks in enumerate(by_file):
        if any(offsets[first] >= offsets[second] for first, second in pairwise(chunks)):
            by_file[number] = array("q", sorted(chunks, key=lambda one: (offsets[one], lengths[one])))
    return {name: chunks for name, chunks in zip(table.files, by_file, strict=True) if chunks}


def _locate_in_file(
    folder: Path, relative: str, chunks: array[int], located: LocatedTensors, digests: RecordDigests
) -> None:
    table = located.table
    path = file_inside(folder, relative, f"{folder / METADATA_NAME}: tensor {located.fqn_of(chunks[0])!r}")
    offsets, lengths = table.offsets, table.lengths
    end, last = 0, -1
    for chunk in chunks:
        start, length = offsets[chunk], lengths[chunk]
        if end > start and length and (start, length) != (offsets[last], lengths[last]):
            raise CheckpointError(
                f"{path}: the records of {located.fqn_of(last)!r} (bytes {offsets[last]} to {end}) and "
                f"{located.fqn_of(chunk)!r} (from byte {start}) overlap."
            )
        if length:
            end, last = start + length, chunk
    fd = open_regular(path)
    try:
        reader = RecordReader(fd, str(path), os.fstat(fd).st_size)
        for chunk in chunks:
            _locate_chunk(reader, path, relative, chunk, located, digests)
    finally:
        os.close(fd)


def _locate_chunk(
    reader: RecordReader, path: Path, relative: str, chunk: int, located: LocatedTensors, digests: RecordDigests
) -> None:
    table = located.table
    number = table.tensor_of(chunk)
    layout, start, length = table.layouts[number], table.offsets[chunk], table.lengths[chunk]
    if table.is_raw or chunk in table.transforms:
        reader.check_range(located.fqn_of(chunk), start, length)
        located.starts[chunk] = start
        return
    sizes = layout.boxes[chunk - table.first[number]][1]
    like = reader.locate_known(start, length, digests.of(relative, start))
    if like is None:
        fqn = located.fqn_of(chunk)
        like = reader.locate(fqn, start, length, digests.of(relative, start))
    if like.dtype is not layout.dtype or like.shape != sizes:
        _check_as_described(path, located.fqn_of(chunk), layout.dtype, sizes, like)
    if not _is_contiguous(like.shape, like.strides):
        fqn = located.fqn_of(chunk)
        check_expansion(f"{path}: tensor {fqn!r}", sizes, like.strides, layout.dtype.itemsize)
        located.strides[chunk] = like.strides
    located.starts[chunk] = like.start


def _check_records(
    folder: Path,
    table: TensorTable,
    wanted: Iterable[str],
    digests: RecordDigests,
    on_bytes: Callable[[int], object],
) -> None:
    """Compare the bytes of tensors with the checksums in their records; raw and transformed ones have none."""
    if table.is_raw:
        return
    located = LocatedTensors(folder, table, [])
    for relative, chunks in _by_file(table, wanted).items():
        path = file_inside(folder, relative, str(folder))
        fd = open_regular(path)
        try:
            reader = RecordReader(fd, str(path), os.fstat(fd).st_size)
            before = (-1, -1)
            for chunk in chunks:
                record = (table.offsets[chunk], table.lengths[chunk])
                if chunk not in table.transforms and record != before:  # one may serve two names
                    digest = digests.of(relative, record[0])
                    on_bytes(reader.check(located.fqn_of(chunk), *record, digest))
                before = record
        finally:
            os.close(fd)


def _check_as_described(path: Path, fqn: str, dtype: DType, sizes: tuple[int, ...], found: PlacedTensor) -> None:
    if found.dtype != dtype:
        raise CheckpointError(
            f"{path}: tensor {fqn!r} is stored as {found.dtype.name}, {METADATA_NAME} says {dtype.name}."
        )
    if found.shape != sizes:
        raise CheckpointError(
            f"{path}: tensor {fqn!r} is stored with shape {list(found.shape)}, {METADATA_NAME} says {list(sizes)}."
        )
