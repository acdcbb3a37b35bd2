"""Parts of all formats: dtypes, tensors, places of bytes, descriptions, the `Format` interface. No torch."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from random import Random

from ..files import CheckpointError, human_bytes, is_regular, printable, read_regular
from ..manifest import Manifest


@dataclass(frozen=True)
class DType:
    """A torch dtype without torch."""

    name: str
    """As in ``torch.<name>``."""
    itemsize: int
    """Bytes of one stored element."""
    code: str | None
    """Name in a safetensors header; None where safetensors has none."""
    rank: int = -1
    """Place in the safetensors library's enumeration: files hold higher ranks first."""
    packed: int = 1
    """Values in one stored element; safetensors counts values in the last dimension."""


# Order of the `Dtype` enumeration in the safetensors library, lowest first; its `prepare` sorts by it, descending.
# Source: safetensors 0.8 `src/tensor.rs`. Older releases know fewer names, in the same order.
_RANKED = (
    ("bool", 1, "BOOL"),
    ("float4_e2m1fn_x2", 1, "F4"),
    ("uint8", 1, "U8"),
    ("int8", 1, "I8"),
    ("float8_e5m2", 1, "F8_E5M2"),
    ("float8_e4m3fn", 1, "F8_E4M3"),
    ("float8_e8m0fnu", 1, "F8_E8M0"),
    ("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
    ("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
    ("int16", 2, "I16"),
    ("uint16", 2, "U16"),
    ("float16", 2, "F16"),
    ("bfloat16", 2, "BF16"),
    ("int32", 4, "I32"),
    ("uint32", 4, "U32"),
    ("float32", 4, "F32"),
    ("complex64", 8, "C64"),
    ("float64", 8, "F64"),
    ("int64", 8, "I64"),
    ("uint64", 8, "U64"),
)

DTYPES: dict[str, DType] = {
    name: DType(name, itemsize, code, rank, 2 if name.endswith("_x2") else 1)
    for rank, (name, itemsize, code) in enumerate(_RANKED)
}
# torch has these and safetensors does not.
DTYPES |= {name: DType(name, size, None) for name, size in (("complex32", 4), ("complex128", 16))}

CONVERSION_TARGETS = ("float32", "float16", "bfloat16", "float64")
_SHORT_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"} | {
    "float": "float32",
    "half": "float16",
    "double": "float64",
}

STORAGE_CLASSES: dict[str, str | None] = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": None,
}
"""torch's storage classes and their element dtype; None for bytes, whose dtype stands next to the storage."""


def is_floating(dtype: DType) -> bool:
    """Whether a dtype conversion of the merge applies: real floating point with one value an element."""
    return dtype.name.startswith(("float", "bfloat")) and dtype.packed == 1


def conversion_target(dtype: object) -> DType | None:
    """Return the dtype that a ``dtype`` argument asks for; None keeps every tensor's own.

    Args:
        dtype: None, a name (``"bfloat16"``, ``"bf16"``, ``"torch.bfloat16"``) or a ``torch.dtype``.

    Raises:
        ValueError: If it is none of the real floating-point dtypes wider than one byte.
    """
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.").lower()
    name = _SHORT_NAMES.get(name, name)
    if name not in CONVERSION_TARGETS:
        raise ValueError(
            f"dtype must be one of {', '.join(CONVERSION_TARGETS)} (or fp32, fp16, bf16, fp64), got {dtype!r}."
        )
    return DTYPES[name]


# ------------------------------------------------------------------------------------------------
# The interface between readers and the merge: tensors, their pieces, and the places of the bytes.


_MANY = 32  # pieces, up to which comparing pairs is no work
_MOST_COMPARISONS = 300_000
_PRIME = 2**61 - 1
_MAX_EXPANDED = 64 * 2**20
MAX_DIMS = 64  # as torch has it
MAX_BYTES = 2**62  # no file or tensor is larger; sums of two such still fit the C types behind os.pread


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangular part of a tensor and the place of its bytes."""

    path: Path
    """The file."""
    start: int
    """Position in the file of the piece's first element; of the record where ``encoding`` is set."""
    offsets: tuple[int, ...]
    """The piece's offset in the tensor, one number a dimension."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """In elements; None for contiguous bytes."""
    encoding: tuple[str, ...] = ()
    """DCP's transform descriptors; empty for bytes as they are."""
    length: int = 0
    """Bytes of the record; set where ``encoding`` is."""

    @property
    def is_plain(self) -> bool:
        """Whether the file holds the piece's bytes as the output needs them."""
        return self.strides is None and not self.encoding


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Facts about a tensor that need no look at its bytes."""

    fqn: str
    """Name in the checkpoint, in full."""
    dtype: DType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the full tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SourceTensor(TensorInfo):
    """A full tensor, cut into pieces that cover it exactly."""

    pieces: tuple[Piece, ...]
    is_flat: bool = False
    """Whether the pieces are ranges of the flattened tensor, as ZeRO cuts it."""

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """The shape that the pieces' offsets and sizes refer to."""
        return (prod(self.shape),) if self.is_flat else self.shape


@dataclass(frozen=True)
class Source:
    """A checkpoint whose description was read: the model's tensors, in the order they were saved, and the rest."""

    folder: Path
    tensors: Mapping[str, TensorInfo]
    """By name in the model (wrapper names still in place)."""
    skipped: Mapping[str, str]
    """Entry, by its full name, to the reason why it is not among the tensors."""
    locate: Callable[[Iterable[str]], Mapping[str, SourceTensor]]
    """Finds the bytes of the tensors with these names; raises CheckpointError where they are not as described."""
    check: Callable[[Iterable[str], Callable[[int], object]], None] = lambda wanted, on_bytes: None
    """Compares the stored bytes of the tensors with these names with the checksums next to them, reports how many it
    has compared, and raises CheckpointError where they differ. Without checksums: does nothing."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Alias to the name of the tensor it shares, where the checkpoint itself records it."""
    dtype: DType | None = None
    """The dtype of floating-point tensors where nothing else is asked for; None keeps each one's own."""


def check_coverage(fqn: str, shape: Sequence[int], pieces: Sequence[Piece]) -> None:
    """Check that ``pieces`` cover a tensor of ``shape`` exactly once.

    Raises:
        CheckpointError: On a piece outside the tensor, an overlap or a gap.
    """
    for piece in pieces:
        if (
            len(piece.offsets) != len(shape)
            or len(piece.sizes) != len(shape)
            or any(offset + size > full for offset, size, full in zip(piece.offsets, piece.sizes, shape, strict=True))
        ):
            raise CheckpointError(
                f"{piece.path.name}: tensor {fqn!r} has a chunk at {list(piece.offsets)} of size {list(piece.sizes)}, "
                f"outside the tensor's shape {list(shape)}."
            )
    solid = sorted((p for p in pieces if all(p.sizes)), key=lambda piece: piece.offsets)
    if len(solid) > _MANY and _cover_once(shape, solid):
        return
    _raise_on_overlap(fqn, solid)
    covered, full = sum(prod(piece.sizes) for piece in solid), prod(shape)
    if covered != full:
        raise CheckpointError(
            f"Tensor {fqn!r} of shape {list(shape)} has {full} elements, but its {len(pieces)} chunks hold {covered}: "
            f"part of it is missing. Were the files of all processes copied?"
        )
    if len(solid) > _MANY:
        raise CheckpointError(
            f"Tensor {fqn!r} of shape {list(shape)}: some of its {len(solid)} chunks overlap, and there are gaps."
        )


def _cover_once(shape: Sequence[int], pieces: Sequence[Piece]) -> bool:
    """Return whether pieces cover a shape exactly once, except by chance.

    Each coordinate at which a piece begins or ends gets a random number, a piece the product over the dimensions of the
    differences between its ends. These add up to the same product for the whole shape if everything is covered once,
    and to something else otherwise, but for one case in 2**55: a sum of as many terms as there are pieces, where
    comparing pairs of 100,000 columns would take an hour.
    """
    numbers: list[dict[int, int]] = [{} for _ in shape]
    random = Random(int.from_bytes(os.urandom(16), "little")).getrandbits  # not known to whoever made the file

    def weight(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        product = 1
        for known, offset, size in zip(numbers, offsets, sizes, strict=True):
            for end in (offset, offset + size):
                if end not in known:
                    known[end] = random(60)
            product = product * (known[offset + size] - known[offset]) % _PRIME
        return product

    return sum(weight(piece.offsets, piece.sizes) for piece in pieces) % _PRIME == weight((0,) * len(shape), shape)


def _raise_on_overlap(fqn: str, pieces: Sequence[Piece]) -> None:
    """Sweep along dimension 0: only pieces whose ranges meet there are compared, and not without end."""
    active: list[Piece] = []
    num_left = _MOST_COMPARISONS
    for piece in pieces:
        active = [
            other for other in active if not piece.offsets or other.offsets[0] + other.sizes[0] > piece.offsets[0]
        ]
        num_left -= len(active)
        if num_left < 0:
            return
        for other in active:
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(piece.offsets, piece.sizes, other.offsets, other.sizes, strict=True)
            ):
                raise CheckpointError(
                    f"Tensor {fqn!r} has overlapping chunks: {list(other.offsets)} of size {list(other.sizes)} in "
                    f"{other.path.name}, and {list(piece.offsets)} of size {list(piece.sizes)} in {piece.path.name}."
                )
        active.append(piece)


def check_expansion(what: str, sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
    """Check that a strided tensor is not many times what a file holds of it: it is put together in memory.

    Raises:
        CheckpointError: If it is.
    """
    reach = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size)
    num_bytes = prod(sizes) * itemsize
    if num_bytes > _MAX_EXPANDED and num_bytes > 2 * reach * itemsize:
        raise CheckpointError(
            f"{what}: the strides {list(strides)} make {num_bytes} bytes of {reach * itemsize} stored ones; tensors "
            f"that expand more than twofold are supported up to {_MAX_EXPANDED} bytes. Call contiguous() before "
            "saving."
        )


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie in row-major order without gaps; strides of dimensions of size 1 do not matter."""
    if not prod(shape):
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


# ------------------------------------------------------------------------------------------------
# The description of a checkpoint of any format: its tensors, files, ties and progress, as a table or as plain values.


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
        """Return the description of a tensor in ``num_chunks`` chunks."""
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
    """The library that saved it, and its way, as far as the folder shows, e.g. ``lightning-fsdp``."""
    model_prefix: str
    """Keys of the saved state dict above the model, with dots between them; empty if there are none."""
    tensors: tuple[StoredTensorInfo, ...]
    """The model's, in the order they were saved."""
    files: tuple[ShardFile, ...]
    has_optimizer: bool
    """Whether optimizer state is in the folder or, for Accelerate's, in the one next to it."""
    ties: dict[str, str] = field(default_factory=dict)
    """Alias to the name of the tensor it shares, as ``accelight.json`` or DeepSpeed says."""
    module_attribute: str | None = None
    """The attribute of the LightningModule that holds its model, as ``accelight.json`` says."""
    epoch: int | None = None
    global_step: int | None = None
    """From ``meta.pt`` or DeepSpeed's model states; None where they lack them."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Tensors that are not the model's, with the reason."""
    has_digests: bool = False
    """Whether ``accelight.json`` says how the files were written. All were compared, except for the tensors' bytes."""
    notes: tuple[str, ...] = ()
    """Parts that could not be read and that a merge does not need."""
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
    as_written = "the files match their digests; tensor data was not read"
    rows.append(("digests", as_written if info.has_digests else "none: changes since the save may go unnoticed"))
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


# ------------------------------------------------------------------------------------------------
# The interface of a checkpoint format: one subclass in each format's file, one line for each in `locate.FORMATS`.


class Format(ABC):
    """A way to keep a sharded checkpoint in a folder."""

    signs: tuple[str, ...]
    """The files that identify such a folder, for the error that finds none of them."""

    @abstractmethod
    def detect(self, folder: Path) -> bool:
        """Whether ``folder`` holds a checkpoint of this format; looks at names alone."""

    @abstractmethod
    def open(self, folder: Path) -> tuple[Source, Manifest | None]:
        """Read the description of the checkpoint in ``folder``, and what is known of ties and the module's attribute.

        Raises:
            CheckpointError: If it is damaged, or the model cannot be identified in it.
        """

    @abstractmethod
    def describe(self, folder: Path) -> CheckpointInfo:
        """Describe the checkpoint in ``folder``.

        Raises:
            CheckpointError: As `open`, and if a file that the description names is missing or too short.
        """

    def named_inside(self, folder: Path) -> Path | None:
        """Return the folder of this format that a file in ``folder`` names; None where none does."""
        return None

    def why_unreadable(self, folder: Path) -> str | None:
        """Return why ``folder``, which resembles one of this format, cannot be read; None where it does not."""
        return None


# ------------------------------------------------------------------------------------------------
# Files of full tensors, safetensors or torch's: their descriptions, checked against the file's size.


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file."""

    dtype: DType
    shape: tuple[int, ...]
    """As torch has it: packed dtypes count stored elements."""
    start: int
    """Position of its first element in the file."""
    num_bytes: int
    strides: tuple[int, ...] | None = None
    """In elements; None for contiguous bytes."""


@dataclass(frozen=True)
class TensorFile:
    """The tensors of one file."""

    path: Path
    tensors: Mapping[str, FileTensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Of a safetensors header; a file of torch has none."""


# ------------------------------------------------------------------------------------------------
# Keys and folders of weights and optimizer state in saved state dicts.


MODEL_KEYS = ("model", "state_dict")
"""The keys of weights: Accelerate, Lightning's FSDPStrategy and FSDP1 folders of ours; its ModelParallelStrategy and
FSDP2 folders of ours."""
AVERAGED_WEIGHTS = "averaged_weights"
"""The key of the averages of ``ShardedEMA``, in DeepSpeed's checkpoints a folder; with copies of other weights."""
AVERAGED_NAMES = "averaged_names"
"""The key of the names of those that are averages."""


def is_optimizer_key(key: str) -> bool:
    """Whether ``key`` is where optimizer state is kept: ``optimizer``, ``optimizer_0``, ``optim``, ``optimizers``."""
    return key in ("optim", "optims", "optimizers") or key.rstrip("0123456789").rstrip("_") == "optimizer"


# ------------------------------------------------------------------------------------------------
# Hugging Face's index of a model that is split over several files: ``model.safetensors.index.json`` and the like.


_MAX_INDEX_BYTES = 256 * 2**20


def read_weight_map(path: Path) -> dict[str, str]:
    """Return each tensor's file, by the tensor's name, as an index says; the files' names are not checked.

    Raises:
        CheckpointError: If it is not an index.
    """
    if not is_regular(path):
        raise CheckpointError(f"{path} does not exist, expected an index of files.")
    text = read_regular(path, _MAX_INDEX_BYTES, "an index")
    try:
        weight_map = json.loads(text.decode("utf-8"))["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(one, str) for one in weight_map.values()):
            raise TypeError("weight_map must map names to files")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not an index of files ({error}).") from error
    return weight_map
