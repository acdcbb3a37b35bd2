"""Folders of torch.distributed.checkpoint, with a ``.metadata`` file or as safetensors shards, as formats."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from ..files import CheckpointError, close, file_inside, is_regular, open_regular, read_at, read_regular, size_of
from ..manifest import HINT, Digests, Manifest, RecordDigests, description_folder, read_manifest
from ..object_path import NUM_THREADS, ObjectPath
from .base import (
    AVERAGED_WEIGHTS,
    MAX_BYTES,
    MODEL_KEYS,
    CheckpointInfo,
    DType,
    Format,
    Piece,
    ShardFile,
    Source,
    SourceTensor,
    StoredTensorInfo,
    TensorFile,
    check_coverage,
    check_expansion,
    is_contiguous,
    is_optimizer_key,
)
from .dcp_metadata import (
    METADATA_NAME,
    Box,
    DCPMetadata,
    Layout,
    StoredRecord,
    StoredTensor,
    read_dcp_metadata,
)
from .safe_unpickler import load_restricted, type_name
from .safetensors import read_safetensors
from .torch_save import (
    BEGINNING,
    META_NAME,
    SMALL,
    TENSOR_NAMES,
    DescribedTensor,
    FileWindow,
    Fixed,
    PlacedTensor,
    ReadAt,
    TorchArchive,
    place,
    read_progress,
    storage_of,
)

# ------------------------------------------------------------------------------------------------
# Folders of DCP's safetensors format: each rank's chunks in a file, and their places in its header.
#
# Such a folder has no ``.metadata``. A header has each chunk's offset in its tensor, but not the tensor's full
# shape: as for torch's own reader, it ends where the last chunk does.
#
# Source: torch 2.13 ``distributed/checkpoint/hf_storage.py`` (``HuggingFaceStorageWriter`` with
# ``save_distributed=True``; ``HuggingFaceStorageReader.read_metadata``), ``filesystem.py``
# (``_write_files_from_queue``).


SHARD_PATTERN = "shard-*-model-*-of-*.safetensors"
_OFFSETS = "DCP_SHARDING_INFO"


def has_safetensors_shards(folder: Path) -> bool:
    """Whether a folder holds files with the names that DCP's safetensors writer gives."""
    return next(folder.glob(SHARD_PATTERN), None) is not None


def read_safetensors_shards(folder: Path) -> DCPMetadata:
    """Read the headers of all shards in a folder.

    Raises:
        CheckpointError: If one is damaged or does not say where its chunks belong, or two disagree about a tensor.
    """
    dtypes: dict[str, tuple[DType, str]] = {}
    chunks: dict[str, dict[Box, StoredRecord]] = {}
    for name in sorted(path.name for path in folder.glob(SHARD_PATTERN)):
        file = read_safetensors(file_inside(folder, name, str(folder)))
        for fqn, offsets in _saved_offsets(file).items():
            found = file.tensors[fqn]
            first, where = dtypes.setdefault(fqn, (found.dtype, name))
            known = chunks.setdefault(fqn, {})
            if found.dtype is not first:
                raise CheckpointError(
                    f"{folder}: tensor {fqn!r} is {first.name} in {where} and {found.dtype.name} in {name}."
                )
            if any(len(sizes) != len(found.shape) for _, sizes in known):
                raise CheckpointError(
                    f"{folder}: tensor {fqn!r} has a different number of dimensions in {where} and in {name}."
                )
            record = StoredRecord(name, found.start, found.num_bytes, (), is_raw=True)
            known.setdefault((offsets, found.shape), record)  # replicas
    tensors: dict[str, StoredTensor] = {}
    for fqn, known in chunks.items():
        ends = [tuple(map(sum, zip(*box, strict=True))) for box in known]
        layout = Layout(dtypes[fqn][0], tuple(map(max, zip(*ends, strict=True))), tuple(known))
        tensors[fqn] = StoredTensor.of(fqn, layout, tuple(known.values()))
    return DCPMetadata(tensors, (), {})


def _saved_offsets(file: TensorFile) -> dict[str, tuple[int, ...]]:
    """Return the offset of each chunk of a file in its tensor."""
    if _OFFSETS not in file.metadata:
        raise CheckpointError(
            f"{file.path}: the header has no {_OFFSETS}, which records the position of each chunk. "
            f"torch.distributed.checkpoint's safetensors writer puts it there."
        )
    try:
        info = json.loads(file.metadata[_OFFSETS])
        found = {fqn: tuple(info[fqn]["saved_offsets"]) for fqn in file.tensors}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{file.path}: {_OFFSETS} does not give the position of every tensor ({error!r})."
        ) from error
    for fqn, offsets in found.items():
        shape = file.tensors[fqn].shape
        if len(offsets) != len(shape) or not all(type(one) is int and 0 <= one < MAX_BYTES for one in offsets):
            raise CheckpointError(
                f"{file.path}: tensor {fqn!r} of shape {list(shape)} has the invalid offsets {list(offsets)}."
            )
    return found


_TORCH_CHECKPOINTING_NAME = "metadata.pkl"
"""meta-pytorch/torch_checkpointing's description, next to a file for each of the checkpoint's items and processes."""


class DCPFormat(Format):
    """Records in ``.distcp`` files, and ``.metadata``, which has the place of each."""

    signs: tuple[str, ...] = (f"{METADATA_NAME} (torch.distributed.checkpoint; Lightning's and accelight's folders)",)
    kind = "torch-dcp"
    """Its name where nothing shows which library saved it."""
    key: str | None = None
    """The key of the weights, instead of the model's."""

    def detect(self, folder: Path) -> bool:
        """Whether there is a ``.metadata`` file."""
        return (folder / METADATA_NAME).is_file()

    def open(self, folder: Path) -> tuple[Source, Manifest | None]:
        """Read the metadata; ``accelight.json`` may name the model's place in it."""
        manifest = read_manifest(folder)
        return dcp_source(folder, self.read_metadata(folder, manifest), manifest, self.key), manifest

    def describe(self, folder: Path) -> CheckpointInfo:
        """Describe it from its metadata, ``accelight.json`` and ``meta.pt``."""
        manifest = read_manifest(folder)
        return describe_dcp(folder, self.read_metadata(folder, manifest), manifest, self.kind)

    def why_unreadable(self, folder: Path) -> str | None:
        """Explain folders with a description for each process, with one that is no file, or with files by rank."""
        try:
            is_regular(folder / METADATA_NAME)
        except CheckpointError as error:
            return f"cannot be read: {error}"
        by_rank = sorted(path.name for path in folder.glob("pytorch_model_fsdp*_rank*.bin"))
        if by_rank:
            return (
                f"holds {by_rank[0]}, one of {len(by_rank)} files that Accelerate wrote with use_dcp=False or as "
                "LOCAL_STATE_DICT: they fit only that number of processes, and do not record the position of each "
                "shard in its tensor. Load them on that many processes with load_fsdp_model(), and save with "
                "use_dcp=True and SHARDED_STATE_DICT."
            )
        of_first_rank = next((path.name for path in sorted(folder.glob("*_0.pt"))), None)
        if of_first_rank is not None and (folder / _TORCH_CHECKPOINTING_NAME).is_file():
            return (
                f"holds {_TORCH_CHECKPOINTING_NAME} and {of_first_rank}: torch_checkpointing's layout, which newer "
                "versions of torchtitan write. Its metadata is a pickle that can run arbitrary code, and is not "
                "read. Load it with torch_checkpointing, and save it with torch.distributed.checkpoint."
            )
        if not any(folder.glob(f"__*{METADATA_NAME}")):
            return None
        return (
            f"was saved without coordination (__0_{METADATA_NAME} and so on, one per process). "
            f"Save it with use_collectives=True to merge it."
        )

    def read_metadata(self, folder: Path, manifest: Manifest | None) -> DCPMetadata:
        """Read where the tensors of a folder lie."""
        digest = None if manifest is None else manifest.digests.get(METADATA_NAME)
        return read_dcp_metadata(folder / METADATA_NAME, digest)


class DCPAveragesFormat(DCPFormat):
    """The averages that ``ShardedEMA`` adds to a folder."""

    key = AVERAGED_WEIGHTS

    def read_metadata(self, folder: Path, manifest: Manifest | None) -> DCPMetadata:
        """Read where the tensors of a folder lie.

        Raises:
            CheckpointError: If it has no averages.
        """
        metadata = super().read_metadata(folder, manifest)
        if not any(fqn.startswith(f"{AVERAGED_WEIGHTS}.") for fqn in metadata.tensors):
            raise CheckpointError(
                f"{folder} holds no averages: it was saved without ShardedEMA, or before its first update."
            )
        return metadata


class DCPSafetensorsFormat(DCPFormat):
    """Shards in safetensors files, whose headers have the place of each."""

    signs = (
        f"{SHARD_PATTERN} (its safetensors format)",
        f"a folder such as pytorch_model_fsdp_0/{METADATA_NAME} (Accelerate)",  # of DCP's, too: listed after both
    )
    kind = "torch-dcp-safetensors"

    def detect(self, folder: Path) -> bool:
        """Whether there are files named as its writer names them."""
        return has_safetensors_shards(folder)

    def why_unreadable(self, folder: Path) -> str | None:
        """Nothing: `DCPFormat` has the reasons."""
        return None

    def read_metadata(self, folder: Path, manifest: Manifest | None) -> DCPMetadata:
        """Read the headers of the shards."""
        return read_safetensors_shards(folder)


# ------------------------------------------------------------------------------------------------
# Description of a folder.


_MAX_META_BYTES = 2**31
_KINDS = {
    "accelight": "accelight (torch.distributed.checkpoint with accelight.json)",
    "accelerate": "Accelerate, FSDP",
    "lightning-fsdp": "Lightning, FSDPStrategy",
    "lightning-model-parallel": "Lightning, ModelParallelStrategy",
    "lightning": "Lightning Fabric",
    "torch-dcp": "torch.distributed.checkpoint",
    "torch-dcp-safetensors": "torch.distributed.checkpoint, safetensors format",
}


def describe_dcp(folder: Path, metadata: DCPMetadata, manifest: Manifest | None, unknown_kind: str) -> CheckpointInfo:
    """Describe a DCP folder.

    Args:
        folder: The folder.
        metadata: Where its tensors lie.
        manifest: The content of ``accelight.json``, if there is one.
        unknown_kind: The kind where nothing shows which library saved the folder.
    """
    names, skipped = select_model(metadata, None if manifest is None else manifest.model_prefix, str(folder))
    digests = {} if manifest is None else manifest.digests
    described = description_folder(folder)
    if META_NAME in digests:
        meta = described / META_NAME
        digests[META_NAME].check(meta, read_regular(meta, _MAX_META_BYTES, META_NAME))
    notes: tuple[str, ...] = ()
    epoch = step = None
    try:
        epoch, step = read_progress(described)
    except CheckpointError as error:
        notes = (f"epoch and step are not known: {error}",)
    prefix = _prefix(names)
    kind = _kind(folder, manifest, prefix, unknown_kind)
    return CheckpointInfo(
        path=folder,
        kind=kind,
        model_prefix=prefix,
        tensors=tuple(
            StoredTensorInfo.of(name, tensor.dtype, tensor.shape, len(tensor.records))
            for name, tensor in ((name, metadata.tensors[fqn]) for name, fqn in names.items())
        ),
        files=_files(folder, metadata, digests),
        has_optimizer=_has_optimizer(folder, metadata),
        ties={} if manifest is None else dict(manifest.ties),
        module_attribute=None if manifest is None else manifest.module_attribute,
        epoch=epoch,
        global_step=step,
        skipped={
            **skipped,
            **dict.fromkeys(metadata.not_tensors, "not a tensor"),
            **({} if manifest is None else manifest.left_out_of(names)),
        },
        has_digests=bool(digests),
        notes=notes,
        kind_in_words=_KINDS[kind],
    )


def _prefix(names: Mapping[str, str]) -> str:
    """Return the prefix that was removed from the model's names."""
    return next((fqn[: len(fqn) - len(name)].rstrip(".") for name, fqn in names.items()), "")


def _kind(folder: Path, manifest: Manifest | None, prefix: str, unknown: str) -> str:
    if manifest is not None:
        return "accelight"
    if folder.name.startswith("pytorch_model_fsdp_"):
        return "accelerate"
    if (folder / META_NAME).is_file():
        return {"model": "lightning-fsdp", "state_dict": "lightning-model-parallel"}.get(prefix, "lightning")
    return unknown


def _has_optimizer(folder: Path, metadata: DCPMetadata) -> bool:
    entries = (*metadata.tensors, *metadata.not_tensors)
    if any(is_optimizer_key((metadata.paths.get(fqn) or (fqn,))[0].partition(".")[0]) for fqn in entries):
        return True
    siblings = (
        folder.resolve().parent.glob(f"*/{METADATA_NAME}") if folder.name.startswith("pytorch_model_fsdp_") else ()
    )
    return any(is_optimizer_key(path.parent.name) for path in siblings)


def _files(folder: Path, metadata: DCPMetadata, digests: Digests) -> tuple[ShardFile, ...]:
    by_file: dict[str, list[tuple[str, StoredRecord]]] = {}
    for fqn, tensor in metadata.tensors.items():
        for record in tensor.records:
            by_file.setdefault(record.relative_path, []).append((fqn, record))
    files = []
    for name in sorted(by_file):
        fqn, last = max(by_file[name], key=lambda one: one[1].offset + one[1].length)
        size = file_inside(folder, name, f"{folder / METADATA_NAME}: tensor {fqn!r}").stat().st_size
        if last.offset + last.length > size:
            raise CheckpointError(
                f"{folder / name}: tensor {fqn!r}: the record should end at byte {last.offset + last.length}, but "
                f"the file has {size}. It is cut off, or belongs to another save."
            )
        if name in digests:
            digests[name].check_size(folder / name, size)
        files.append(ShardFile(name, size, len(by_file[name])))
    return tuple(files)


# ------------------------------------------------------------------------------------------------
# A folder as a source of the merge: the model's tensors, and the places of their bytes.


_is_contiguous = lru_cache(maxsize=1000)(is_contiguous)  # a few shapes, of very many tensors


def dcp_source(folder: Path, metadata: DCPMetadata, manifest: Manifest | None = None, key: str | None = None) -> Source:
    """Return the model of a DCP folder.

    Args:
        folder: Holds the files.
        metadata: Their description.
        manifest: Has the model's key in the saved state dict, and the files' digests.
        key: Of other weights than the model's.

    Raises:
        CheckpointError: If the model cannot be identified, or the records are others than were written.
    """
    prefix = key or (None if manifest is None else manifest.model_prefix)
    names, skipped = select_model(metadata, prefix, str(folder))
    digests = RecordDigests({} if manifest is None else manifest.digests, metadata.offsets, str(folder / METADATA_NAME))
    skipped |= dict.fromkeys(metadata.not_tensors, "not a tensor")
    if manifest is not None:
        skipped |= manifest.left_out_of(names)
    tensors = {name: metadata.tensors[fqn] for name, fqn in names.items()}

    def locate(wanted: Iterable[str]) -> Mapping[str, SourceTensor]:
        return locate_tensors(folder, {name: tensors[name] for name in wanted}, digests)

    def check(wanted: Iterable[str], on_bytes: Callable[[int], object]) -> None:
        _check_records(folder, [tensors[name] for name in wanted], digests, on_bytes)

    return Source(folder, tensors, skipped, locate, check)


def select_model(metadata: DCPMetadata, prefix: str | None, where: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the model's names with their entries' full names, and what belongs to something else."""
    fqns, depth, skipped = _select(metadata, prefix, where)
    names: dict[str, str] = {}
    for fqn in fqns:
        name = ".".join((metadata.paths.get(fqn) or (fqn,))[depth:])
        if names.setdefault(name, fqn) != fqn:
            raise CheckpointError(f"{where}: two entries are named {name!r}: {names[name]!r} and {fqn!r}.")
    return names, skipped


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
        for fqn, key in zip(fqns, keys, strict=True):
            if key != chosen:
                skipped[fqn] = "averages" if key == AVERAGED_WEIGHTS else f"not part of {chosen!r}, the model"
        fqns = [fqn for fqn, key in zip(fqns, keys, strict=True) if key == chosen]
        if is_optimizer_key(chosen):  # asked for: its own keys stay in the names
            depth += 1
            break
    else:
        depth = 0
    return fqns, depth, skipped


def _keys(metadata: DCPMetadata, fqns: Iterable[str], depth: int) -> list[str | None]:
    """Return the key on a level of each entry's path; None where the path ends there."""
    paths = (metadata.paths.get(fqn) or (fqn,) for fqn in fqns)
    return [path[depth] if len(path) > depth + 1 else None for path in paths]


def _choose_group(groups: Mapping[str, int], is_complete: bool, prefix: str | None, where: str) -> str | None:
    """Return the key to go down into, or None to stay on this level."""
    if prefix is not None:
        if prefix not in groups:
            raise CheckpointError(f"{where}: expected the model under the key {prefix!r}; found {sorted(groups)}.")
        return prefix
    found = [key for key in MODEL_KEYS if key in groups]
    if len(found) > 1:
        raise CheckpointError(
            f"{where}: weights are under both {found[0]!r} ({groups[found[0]]} tensors) and {found[1]!r} "
            f"({groups[found[1]]} tensors). A checkpoint of one model has only one of them."
        )
    if found:
        return found[0]
    return next(iter(groups)) if len(groups) == 1 and is_complete else None


class _Chunk(NamedTuple):
    """One chunk of a tensor, and where the list of the tensor's pieces has it."""

    tensor: StoredTensor
    place: int
    record: StoredRecord
    pieces: list[Piece]


def locate_tensors(
    folder: Path, tensors: Mapping[str, StoredTensor], digests: RecordDigests
) -> Mapping[str, SourceTensor]:
    """Find the bytes of tensors: goes through the files one by one, in the order of their records.

    In an object store, threads go through a few records each: a request takes longer than what it answers.

    Raises:
        CheckpointError: If they are not as described.
    """
    chunks: list[_Chunk] = []
    pieces: dict[str, list[Piece]] = {}
    for name, tensor in tensors.items():
        pieces[name] = own = [_NOT_LOCATED] * len(tensor.records)
        chunks += [_Chunk(tensor, place, record, own) for place, record in enumerate(tensor.records)]
    in_files = [(_checked_path(folder, relative, in_file), in_file) for relative, in_file in _by_file(chunks).items()]
    if isinstance(folder, ObjectPath):
        cut = [
            (path, in_file[start : start + _NUM_RECORDS])
            for path, in_file in in_files
            for start in range(0, len(in_file), _NUM_RECORDS)
        ]
        with ThreadPoolExecutor(NUM_THREADS, "accelight-locate") as pool:
            list(pool.map(lambda one: _locate_in_file(one[0], one[1], digests), cut))
    else:
        for path, in_file in in_files:
            _locate_in_file(path, in_file, digests)
    checked: set[Layout] = set()
    located: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        located[name] = SourceTensor(tensor.fqn, tensor.dtype, tensor.shape, tuple(pieces[name]))
        if tensor.layout not in checked:
            check_coverage(tensor.fqn, tensor.shape, pieces[name])
            checked.add(tensor.layout)
    return located


_NUM_RECORDS = 32
"""The number of tensors that a thread locates one after the other: it reads similar small ones together."""
_NOT_LOCATED = Piece(Path(), 0, (), ())


def _by_file(chunks: Iterable[_Chunk]) -> dict[str, list[_Chunk]]:
    """Return chunks by file, in the order of their records."""
    by_file: dict[str, list[_Chunk]] = {}
    for chunk in chunks:
        by_file.setdefault(chunk.record.relative_path, []).append(chunk)
    for in_file in by_file.values():
        in_file.sort(key=lambda one: (one.record.offset, one.record.length))
    return by_file


def _checked_path(folder: Path, relative: str, chunks: Sequence[_Chunk]) -> Path:
    """Return a file's path, whose records must not overlap."""
    path = file_inside(folder, relative, f"{folder / METADATA_NAME}: tensor {chunks[0].tensor.fqn!r}")
    end, last = 0, chunks[0]
    for chunk in chunks:
        start, length = chunk.record.offset, chunk.record.length
        if end > start and length and (start, length) != (last.record.offset, last.record.length):
            raise CheckpointError(
                f"{path}: the records of {last.tensor.fqn!r} (bytes {last.record.offset} to {end}) and "
                f"{chunk.tensor.fqn!r} (from byte {start}) overlap."
            )
        if length:
            end, last = start + length, chunk
    return path


def _locate_in_file(path: Path, chunks: Sequence[_Chunk], digests: RecordDigests) -> None:
    fd = open_regular(path)
    try:
        reader = RecordReader(partial(read_at, fd), str(path), size_of(fd))
        for chunk in chunks:
            chunk.pieces[chunk.place] = _locate_chunk(reader, path, chunk, digests)
    finally:
        close(fd)


def _locate_chunk(reader: RecordReader, path: Path, chunk: _Chunk, digests: RecordDigests) -> Piece:
    fqn, dtype, record = chunk.tensor.fqn, chunk.tensor.dtype, chunk.record
    start, length = record.offset, record.length
    offsets, sizes = chunk.tensor.layout.boxes[chunk.place]
    if record.is_raw or record.transforms:
        reader.check_range(fqn, start, length)
        return Piece(path, start, offsets, sizes, None, record.transforms, length if record.transforms else 0)
    found = reader.locate(fqn, start, length, digests.of(record.relative_path, start))
    if found.dtype is not dtype or found.shape != sizes:
        _check_as_described(path, fqn, dtype, sizes, found)
    if _is_contiguous(found.shape, found.strides):
        return Piece(path, found.start, offsets, sizes)
    check_expansion(f"{path}: tensor {fqn!r}", sizes, found.strides, dtype.itemsize)
    return Piece(path, found.start, offsets, sizes, found.strides)


def _check_records(
    folder: Path, tensors: Iterable[StoredTensor], digests: RecordDigests, on_bytes: Callable[[int], object]
) -> None:
    """Compare the bytes of tensors with the checksums in their records; raw and transformed ones have none."""
    by_file: dict[str, dict[tuple[int, int], str]] = {}
    for tensor in tensors:
        for record in tensor.records:
            if not record.is_raw and not record.transforms:  # one may serve two names
                by_file.setdefault(record.relative_path, {}).setdefault((record.offset, record.length), tensor.fqn)
    for relative, records in by_file.items():
        path = file_inside(folder, relative, str(folder))
        fd = open_regular(path)
        try:
            reader = RecordReader(partial(read_at, fd), str(path), size_of(fd))
            for (offset, length), fqn in sorted(records.items()):
                on_bytes(reader.check(fqn, offset, length, digests.of(relative, offset)))
        finally:
            close(fd)


def _check_as_described(path: Path, fqn: str, dtype: DType, sizes: tuple[int, ...], found: PlacedTensor) -> None:
    if found.dtype != dtype:
        raise CheckpointError(
            f"{path}: tensor {fqn!r} is stored as {found.dtype.name}, but {METADATA_NAME} says {dtype.name}."
        )
    if found.shape != sizes:
        raise CheckpointError(
            f"{path}: tensor {fqn!r} is stored with shape {list(found.shape)}, but {METADATA_NAME} says {list(sizes)}."
        )


# ------------------------------------------------------------------------------------------------
# One record of a ``.distcp`` file: a tensor written by ``torch.save``, located without copying.
#
# A record is a small zip whose members are stored uncompressed: ``data.pkl`` describes the tensor, ``data/0`` holds its
# bytes. Only the record's two ends are read.


_MAX_PICKLE = 64 * 1024
_MAX_DIRECTORY = 64 * 2**20  # of a record that is no tensor, too
_MAX_KNOWN = 1000
_AHEAD = 64 * 1024


class RecordReader:
    """Locates records in one open file."""

    def __init__(self, read: ReadAt, name: str, file_bytes: int):
        self._read = read
        self._name = name
        self._file_bytes = file_bytes
        self._known: dict[tuple[int, bytes], tuple[Fixed, PlacedTensor, int]] = {}
        self._ahead, self._ahead_from = b"", 0

    def locate(self, fqn: str, offset: int, length: int, digest: int | None = None) -> PlacedTensor:
        """Return the tensor in the record at ``offset``.

        Args:
            fqn: For errors.
            offset: Of the record.
            length: Of the record.
            digest: Of the record when it was written, where that is known.

        Raises:
            CheckpointError: If the file is shorter, or the record is not one tensor stored as torch does, or another.
        """
        self.check_range(fqn, offset, length)
        known = self._locate_known(offset, length, digest)
        if known is not None:
            return known
        what = f"{self._name}: tensor {fqn!r}"
        window = FileWindow(self._read, offset, length)
        try:
            archive = TorchArchive(window, _MAX_PICKLE, what)
            if digest is not None:
                check_digest(what, archive.digest, digest)
            described = _describe(archive.pickle(), what)
            found = place(archive, described, what)
            if window.all_bytes and len(self._known) < _MAX_KNOWN:
                relative = PlacedTensor(found.dtype, found.shape, found.strides, found.start - offset)
                fixed = archive.fixed(described.storage.key)
                self._known[length, window.beginning] = fixed, relative, archive.directory_start
            return found
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{what}: the record at byte {offset} is not a zip archive of torch.save ({error})."
            ) from error

    def _locate_known(self, offset: int, length: int, digest: int | None) -> PlacedTensor | None:
        """Return the tensor in a record that differs from an earlier one in its values alone; None in other records."""
        if length > SMALL:
            return None
        data = self._bytes(offset, length)
        found = self._known.get((length, data[:BEGINNING]))
        if found is None:
            return None
        fixed, like, directory = found
        for where, expected in fixed:
            if data[where] != expected:
                return None
        if digest is not None and zlib.crc32(data[directory:]) != digest:
            return None
        return PlacedTensor(like.dtype, like.shape, like.strides, offset + like.start)

    def _bytes(self, offset: int, length: int) -> bytes:
        """Return the bytes of a small record; those that follow it are likely to be asked for next."""
        start = offset - self._ahead_from
        if start < 0 or start + length > len(self._ahead):
            self._ahead, self._ahead_from, start = self._read(_AHEAD, offset), offset, 0
        return self._ahead[start : start + length]

    def check_range(self, fqn: str, offset: int, length: int) -> None:
        """Check that the file is long enough for a record."""
        if offset + length > self._file_bytes:
            raise CheckpointError(
                f"{self._name}: tensor {fqn!r}: the record should end at byte {offset + length}, but the file has "
                f"{self._file_bytes}. It is cut off, or belongs to another save."
            )

    def check(self, fqn: str, offset: int, length: int, digest: int | None = None, *, bytes_too: bool = True) -> int:
        """Compare the bytes of a record with the checksums in it, and return how many there were.

        Args:
            fqn: For errors.
            offset: Of the record.
            length: Of the record.
            digest: Of the record when it was written, where that is known.
            bytes_too: Whether to look at more than the digest.

        Raises:
            CheckpointError: If they are not as they were written.
        """
        what = f"{self._name}: tensor {fqn!r}"
        self.check_range(fqn, offset, length)
        try:
            archive = TorchArchive(FileWindow(self._read, offset, length), _MAX_DIRECTORY, what)
            check_digest(what, archive.digest, digest)
            return archive.check() if bytes_too else 0
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{what}: the record at byte {offset} is not a zip archive of torch.save ({error})."
            ) from error


def check_digest(what: str, found: int, expected: int | None) -> None:
    """Check that a record is the one that was written.

    Raises:
        CheckpointError: If it is another one; nothing where it is not known which was written.
    """
    if expected is not None and found != expected:
        raise CheckpointError(
            f"{what}: the record changed after the save: its digest is {found:08x}, but accelight.json says "
            f"{expected:08x}. The file is damaged, or belongs to another save. {HINT}"
        )


_known_pickles: dict[bytes, DescribedTensor] = {}  # thousands of layers repeat a few shapes


def _describe(data: bytes, what: str) -> DescribedTensor:
    known = _known_pickles.get(data)
    if known is not None:
        return known
    described = load_restricted(data, TENSOR_NAMES, what, storage_of)
    if not isinstance(described, DescribedTensor):
        raise CheckpointError(f"{what}: the record holds {type_name(described)}, not one tensor.")
    if len(_known_pickles) > 10_000:
        _known_pickles.clear()
    _known_pickles[data] = described
    return described
