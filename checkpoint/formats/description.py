"""What is told of a checkpoint of any format: its tensors, files, ties and progress, as a table or as plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path

from ..errors import printable
from ..report import human_bytes
from .dtypes import DType


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

    @classmethod
    def of(cls, name: str, dtype: DType, shape: tuple[int, ...], num_chunks: int) -> StoredTensorInfo:
        """Return what is told of a tensor in ``num_chunks`` chunks."""
        stored = prod(shape)
        return cls(name, dtype.name, shape, stored * dtype.packed, stored * dtype.itemsize, num_chunks)


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
    """Who saved it in which way, as far as its folder tells, e.g. ``lightning-fsdp``."""
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
    has_digests: bool = False
    """Whether ``accelight.json`` says how the files were written. They were looked at, but for the tensors' bytes."""
    notes: tuple[str, ...] = ()
    """What could not be read and is not needed for a merge."""
    kind_in_words: str = ""
    """The kind, for people."""

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
        content = asdict(self)
        del content["kind_in_words"]
        return {**content, "path": str(self.path), "num_tensors": len(self.tensors), **totals}

    def __str__(self) -> str:
        """Return a table for people."""
        return _table(_rows(self))

    def tensor_table(self) -> str:
        """Return one line a tensor: name, dtype, shape, size and number of chunks."""
        return _table(
            (one.name, one.dtype, str(list(one.shape)), human_bytes(one.num_bytes), _count(one.num_chunks, "chunk"))
            for one in self.tensors
        )


def _rows(info: CheckpointInfo) -> list[tuple[str, str]]:
    rows = [
        ("checkpoint", str(info.path)),
        ("kind", info.kind_in_words or info.kind),
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
    as_written = "the files are as they were written; the tensors' bytes were not read"
    rows.append(("digests", as_written if info.has_digests else "none: changes since the save cannot all be told"))
    reasons: dict[str, int] = {}
    for reason in info.skipped.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    rows += [("left out", f"{reason} ({count})") for reason, count in reasons.items()]
    return rows + [("note", note) for note in info.notes]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    lines = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in lines
    )
