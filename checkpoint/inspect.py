"""What a sharded checkpoint holds, told from its description alone: no tensor is read, torch is not imported."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path

from .errors import CheckpointError
from .formats.dcp.metadata import METADATA_NAME, DCPMetadata, StoredRecord, StoredTensor
from .formats.dcp.reader import is_optimizer_key, read_description, select_model
from .formats.registry import zero_manifest
from .formats.safe_paths import file_inside
from .formats.torch_save.meta_file import META_NAME, read_progress
from .formats.zero.files import has_zero_files
from .formats.zero.reader import ZeroCheckpoint, read_zero
from .locate import find_checkpoint
from .manifest import Manifest, read_manifest
from .report import human_bytes

KINDS = {
    "accelight": "accelight (torch.distributed.checkpoint with accelight.json)",
    "accelerate": "Accelerate, FSDP",
    "lightning-fsdp": "Lightning, FSDPStrategy",
    "lightning-model-parallel": "Lightning, ModelParallelStrategy",
    "lightning": "Lightning Fabric",
    "torch-dcp": "torch.distributed.checkpoint",
    "torch-dcp-safetensors": "torch.distributed.checkpoint, safetensors format",
    "deepspeed-universal": "DeepSpeed, universal checkpoint",
    **{f"deepspeed-stage-{stage}": f"DeepSpeed, ZeRO stage {stage}" for stage in range(4)},
    **{f"lightning-deepspeed-stage-{stage}": f"Lightning, DeepSpeedStrategy, stage {stage}" for stage in range(4)},
}
"""Who saved a checkpoint, as far as its folder tells."""


@dataclass(frozen=True)
class StoredTensorInfo:
    """One tensor of the model."""

    name: str
    """Without the model's prefix; wrapper names are still in it."""
    dtype: str
    shape: tuple[int, ...]
    num_parameters: int
    num_bytes: int
    num_chunks: int


@dataclass(frozen=True)
class ShardFile:
    """One file of the checkpoint."""

    name: str
    num_bytes: int
    num_chunks: int
    """Chunks in it, of the model and of everything else."""


@dataclass(frozen=True)
class CheckpointInfo:
    """Result of `inspect_checkpoint`."""

    path: Path
    """The folder with ``.metadata``, or with the shards where there is none; DeepSpeed's tag folder."""
    kind: str
    """A key of `KINDS`."""
    model_prefix: str
    """Keys of the saved state dict above the model, with dots between them; empty if there are none."""
    tensors: tuple[StoredTensorInfo, ...]
    """The model's, in the order they were saved."""
    files: tuple[ShardFile, ...]
    has_optimizer: bool
    """Whether optimizer state is in the folder or, for Accelerate's, in the one beside it."""
    ties: dict[str, str] = field(default_factory=dict)
    """Alias to the name of the tensor it shares, as ``accelight.json`` or DeepSpeed says."""
    module_attribute: str | None = None
    """The attribute of the LightningModule that holds its model, as ``accelight.json`` says."""
    epoch: int | None = None
    global_step: int | None = None
    """From ``meta.pt`` or DeepSpeed's model states; None where they do not say."""
    skipped: dict[str, str] = field(default_factory=dict)
    """What is not the model's, with the reason."""
    notes: tuple[str, ...] = ()
    """What could not be read and is not needed for a merge."""

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors, buffers included."""
        return sum(tensor.num_parameters for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of the model."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def num_chunks(self) -> int:
        """Chunks of all tensors of the model."""
        return sum(tensor.num_chunks for tensor in self.tensors)

    @property
    def dtypes(self) -> dict[str, int]:
        """Return the number of tensors of each dtype, most bytes first."""
        num_bytes: dict[str, int] = {}
        count: dict[str, int] = {}
        for tensor in self.tensors:
            num_bytes[tensor.dtype] = num_bytes.get(tensor.dtype, 0) + tensor.num_bytes
            count[tensor.dtype] = count.get(tensor.dtype, 0) + 1
        return {dtype: count[dtype] for dtype in sorted(count, key=lambda one: -num_bytes[one])}

    def to_dict(self) -> dict[str, object]:
        """Return plain values, as ``--json`` prints them."""
        totals = {name: getattr(self, name) for name in ("num_parameters", "num_bytes", "num_chunks", "dtypes")}
        return {**asdict(self), "path": str(self.path), "num_tensors": len(self.tensors), **totals}

    def __str__(self) -> str:
        """Return a table for people."""
        return _table(_rows(self))

    def tensor_table(self) -> str:
        """Return one line a tensor: name, dtype, shape, size and number of chunks."""
        return _table(
            (one.name, one.dtype, str(list(one.shape)), human_bytes(one.num_bytes), _count(one.num_chunks, "chunk"))
            for one in self.tensors
        )


def inspect_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> CheckpointInfo:
    """Describe a sharded checkpoint.

    Args:
        checkpoint_dir: As for `merge_fsdp_weights`: the folder, or the one above it.

    Raises:
        CheckpointError: If the description is damaged, no model can be told in it, or a file that it names is missing
            or too short. Whether the bytes in the files make sense is left to the merge.
    """
    folder = find_checkpoint(checkpoint_dir)
    if has_zero_files(folder):
        return _describe_zero(read_zero(folder))
    manifest = read_manifest(folder)
    metadata = read_description(folder)
    names, skipped = select_model(metadata, None if manifest is None else manifest.model_prefix, str(folder))
    notes: tuple[str, ...] = ()
    epoch = step = None
    try:
        epoch, step = read_progress(folder)
    except CheckpointError as error:
        notes = (f"epoch and step are not known: {error}",)
    prefix = _prefix(names)
    return CheckpointInfo(
        path=folder,
        kind=_kind(folder, manifest, prefix),
        model_prefix=prefix,
        tensors=tuple(_describe(name, metadata.tensors[fqn]) for name, fqn in names.items()),
        files=_files(folder, metadata),
        has_optimizer=_has_optimizer(folder, metadata),
        ties={} if manifest is None else dict(manifest.ties),
        module_attribute=None if manifest is None else manifest.module_attribute,
        epoch=epoch,
        global_step=step,
        skipped=skipped | dict.fromkeys(metadata.not_tensors, "not a tensor"),
        notes=notes,
    )


def _describe_zero(checkpoint: ZeroCheckpoint) -> CheckpointInfo:
    states, files = checkpoint.states, checkpoint.files
    chunks: dict[Path, int] = {}
    for tensor in checkpoint.tensors.values():
        for part in tensor.parts:
            chunks[part.path] = chunks.get(part.path, 0) + 1
    paths = [files.model] if files.model is not None else []
    paths += [*files.model_shards.values(), *files.optimizer_shards.values()]
    paths += [path for path in chunks if path not in paths]  # one for each parameter, of a universal checkpoint
    return CheckpointInfo(
        path=files.folder,
        kind="deepspeed-universal"
        if checkpoint.is_universal
        else f"{'lightning-' if states.is_lightning else ''}deepspeed-stage-{checkpoint.stage}",
        model_prefix="module",
        tensors=tuple(
            StoredTensorInfo(
                name=name,
                dtype=tensor.dtype.name,
                shape=tensor.shape,
                num_parameters=prod(tensor.shape) * tensor.dtype.packed,
                num_bytes=prod(tensor.shape) * tensor.dtype.itemsize,
                num_chunks=len(tensor.parts),
            )
            for name, tensor in checkpoint.tensors.items()
        ),
        files=tuple(_shard_file(files.folder, path, chunks.get(path, 0)) for path in paths),
        has_optimizer=checkpoint.has_optimizer,
        ties=dict(checkpoint.ties),
        module_attribute=zero_manifest(files.folder, checkpoint.ties).module_attribute,
        epoch=states.steps["epoch"],
        global_step=states.steps["global_step" if states.is_lightning else "global_steps"],
        skipped=dict(checkpoint.skipped),
    )


def _shard_file(folder: Path, path: Path, num_chunks: int) -> ShardFile:
    return ShardFile(path.relative_to(folder.resolve()).as_posix(), path.stat().st_size, num_chunks)


def _describe(name: str, tensor: StoredTensor) -> StoredTensorInfo:
    stored = prod(tensor.shape)
    return StoredTensorInfo(
        name=name,
        dtype=tensor.dtype.name,
        shape=tensor.shape,
        num_parameters=stored * tensor.dtype.packed,
        num_bytes=stored * tensor.dtype.itemsize,
        num_chunks=len(tensor.chunks),
    )


def _prefix(names: Mapping[str, str]) -> str:
    """Return what was taken off in front of the model's names."""
    return next((fqn[: len(fqn) - len(name)].rstrip(".") for name, fqn in names.items()), "")


def _kind(folder: Path, manifest: Manifest | None, prefix: str) -> str:
    if manifest is not None:
        return "accelight"
    if folder.name.startswith("pytorch_model_fsdp_"):
        return "accelerate"
    if (folder / META_NAME).is_file():
        return {"model": "lightning-fsdp", "state_dict": "lightning-model-parallel"}.get(prefix, "lightning")
    return "torch-dcp" if (folder / METADATA_NAME).is_file() else "torch-dcp-safetensors"


def _has_optimizer(folder: Path, metadata: DCPMetadata) -> bool:
    entries = (*metadata.tensors, *metadata.not_tensors)
    if any(is_optimizer_key((metadata.paths.get(fqn) or (fqn,))[0].partition(".")[0]) for fqn in entries):
        return True
    beside = folder.resolve().parent.glob(f"*/{METADATA_NAME}") if folder.name.startswith("pytorch_model_fsdp_") else ()
    return any(is_optimizer_key(path.parent.name) for path in beside)


def _files(folder: Path, metadata: DCPMetadata) -> tuple[ShardFile, ...]:
    by_file: dict[str, list[tuple[str, StoredRecord]]] = {}
    for fqn, tensor in metadata.tensors.items():
        for _, _, record in tensor.chunks:
            by_file.setdefault(record.relative_path, []).append((fqn, record))
    files = []
    for name in sorted(by_file):
        fqn, last = max(by_file[name], key=lambda one: one[1].offset + one[1].length)
        size = file_inside(folder, name, f"{folder / METADATA_NAME}: tensor {fqn!r}").stat().st_size
        if last.offset + last.length > size:
            raise CheckpointError(
                f"{folder / name}: tensor {fqn!r}: the record should end at byte {last.offset + last.length}, the file "
                f"has {size}. It was cut off, or belongs to another save."
            )
        files.append(ShardFile(name, size, len(by_file[name])))
    return tuple(files)


def _rows(info: CheckpointInfo) -> list[tuple[str, str]]:
    rows = [
        ("checkpoint", str(info.path)),
        ("kind", KINDS[info.kind]),
        ("model under", info.model_prefix or "(the top)"),
        ("tensors", f"{_count(len(info.tensors), 'tensor')} in {_count(info.num_chunks, 'chunk')}"),
        ("parameters", f"{info.num_parameters:,}"),
        ("size", f"{human_bytes(info.num_bytes)} ({info.num_bytes:,} bytes)"),
        ("dtypes", ", ".join(f"{dtype} ({count})" for dtype, count in info.dtypes.items()) or "none"),
        ("optimizer", "yes" if info.has_optimizer else "no"),
    ]
    trained = {"epoch": info.epoch, "step": info.global_step}
    if any(one is not None for one in trained.values()):
        rows.append(("trained", ", ".join(f"{name} {one}" for name, one in trained.items() if one is not None)))
    if info.module_attribute is not None:
        rows.append(("attribute", info.module_attribute or "(none: the module holds layers itself)"))
    rows += [("tied", f"{alias} -> {name}") for alias, name in info.ties.items()]
    rows += [
        ("file", f"{one.name}  {human_bytes(one.num_bytes)}  {_count(one.num_chunks, 'chunk')}") for one in info.files
    ]
    reasons: dict[str, int] = {}
    for reason in info.skipped.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    rows += [("left out", f"{reason} ({count})") for reason, count in reasons.items()]
    return rows + [("note", note) for note in info.notes]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in lines
    )
