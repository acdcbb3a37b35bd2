"""What a DCP description says of very many tensors, in little memory: no object for each of them, or for its chunks.

Most tensors share dtype, shape and cut with others: these are kept once, in a `Layout`. Where each chunk lies is in
arrays. The objects of `metadata` are made when they are asked for.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...errors import CheckpointError
from ..dtypes import DType
from ..source import TensorInfo

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """Where DCP wrote one chunk: a range of a file, relative to the checkpoint's folder."""

    relative_path: str
    offset: int
    length: int
    transforms: tuple[str, ...]
    is_raw: bool = False
    """The chunk's bytes themselves, as in a safetensors file; else a record of ``torch.save``."""


@dataclass(frozen=True, slots=True)
class StoredTensor(TensorInfo):
    """One tensor as ``.metadata`` describes it; chunks are (offsets, sizes, record)."""

    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...], StoredRecord], ...]


class Layout:
    """How tensors are cut."""

    __slots__ = ("_places", "boxes", "dtype", "shape")

    def __init__(self, dtype: DType, shape: tuple[int, ...], boxes: tuple[Box, ...]):
        self.dtype = dtype
        self.shape = shape
        self.boxes = boxes
        self._places: dict[tuple[int, ...], int] | None = None

    @property
    def places(self) -> dict[tuple[int, ...], int]:
        """Offsets to the first of the chunks that begin there: an empty one may begin where another does."""
        if self._places is None:
            offsets = [offsets for offsets, _ in self.boxes]
            self._places = dict(zip(reversed(offsets), range(len(offsets) - 1, -1, -1), strict=True))
        return self._places


def same_names(where: str, name: str, one: str, two: str) -> CheckpointError:
    """Return the error of two entries that would have one name."""
    return CheckpointError(f"{where}: two entries are called {name!r}: {one!r} and {two!r}.")


class TensorTable(Mapping[str, StoredTensor]):
    """Tensors by name."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        """Each tensor's, by name."""
        self.layouts: list[Layout] = []
        self.first = array("q", [0])
        """The first chunk of each tensor, and behind the last one how many there are."""
        self.files: list[str] = [""]
        self.file_of = array("I")
        """Of each chunk, the place in ``files``; 0 where none is known."""
        self.offsets = array("q")
        self.lengths = array("q")
        self.transforms: dict[int, tuple[str, ...]] = {}
        """Of the chunks that have any."""
        self.is_raw = False
        self._prefix: str | None = ""
        """What stands before each name in full; None where it is not the same for all."""
        self._fqns: dict[int, str] = {}
        self._layouts: dict[tuple[str, tuple[int, ...], tuple[Box, ...]], Layout] = {}
        self._files: dict[str, int] = {}

    @classmethod
    def of(cls, tensors: Iterable[StoredTensor]) -> TensorTable:
        """Return a table of tensors with records of one kind."""
        table = cls()
        for tensor in tensors:
            boxes = tuple((offsets, sizes) for offsets, sizes, _ in tensor.chunks)
            number = table.add(tensor.fqn, table.layout(tensor.dtype, tensor.shape, boxes))
            for chunk, (_, _, record) in enumerate(tensor.chunks, table.first[number]):
                table.set_record(chunk, record)
        return table

    def layout(self, dtype: DType, shape: tuple[int, ...], boxes: tuple[Box, ...]) -> Layout:
        """Return the layout of this kind, of which there is one."""
        key = (dtype.name, shape, boxes)
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = Layout(dtype, shape, boxes)
        return found

    def add(self, fqn: str, layout: Layout) -> int:
        """Add a tensor whose chunks have no record yet, and return its number."""
        number = len(self.layouts)
        self.numbers[fqn] = number
        self.layouts.append(layout)
        count = len(layout.boxes)
        self.first.append(self.first[number] + count)
        zeros = bytes(8 * count)
        self.file_of.frombytes(zeros[: 4 * count])
        self.offsets.frombytes(zeros)
        self.lengths.frombytes(zeros)
        return number

    def file_number(self, name: str) -> int:
        """Return a file's place in ``files``."""
        number = self._files.get(name)
        if number is None:
            number = self._files[name] = len(self.files)
            self.files.append(name)
        return number

    def set_record(self, chunk: int, record: StoredRecord) -> None:
        """Say where a chunk lies."""
        self.file_of[chunk] = self.file_number(record.relative_path)
        self.offsets[chunk] = record.offset
        self.lengths[chunk] = record.length
        if record.transforms:
            self.transforms[chunk] = record.transforms
        self.is_raw = record.is_raw

    def record(self, chunk: int) -> StoredRecord:
        """Return where a chunk lies."""
        path = self.files[self.file_of[chunk]]
        return StoredRecord(path, self.offsets[chunk], self.lengths[chunk], self.transforms.get(chunk, ()), self.is_raw)

    def chunks(self, number: int) -> range:
        """Return the chunks of a tensor."""
        return range(self.first[number], self.first[number + 1])

    def tensor_of(self, chunk: int) -> int:
        """Return the number of the tensor that a chunk is part of."""
        return bisect_right(self.first, chunk) - 1

    def fqn(self, name: str, number: int) -> str:
        """Return a tensor's name in full."""
        return self._fqns[number] if self._prefix is None else self._prefix + name

    def info(self, name: str) -> TensorInfo:
        """Return what is known of a tensor without its chunks."""
        number = self.numbers[name]
        layout = self.layouts[number]
        return TensorInfo(self.fqn(name, number), layout.dtype, layout.shape)

    def __getitem__(self, name: str) -> StoredTensor:
        """Return a tensor."""
        number = self.numbers[name]
        layout = self.layouts[number]
        chunks = tuple((*box, self.record(chunk)) for box, chunk in zip(layout.boxes, self.chunks(number), strict=True))
        return StoredTensor(self.fqn(name, number), layout.dtype, layout.shape, chunks)

    def __iter__(self) -> Iterator[str]:
        """Yield the names in order."""
        return iter(self.numbers)

    def __len__(self) -> int:
        """Return how many tensors there are."""
        return len(self.numbers)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name."""
        return name in self.numbers

    def rename(self, names: Iterable[tuple[str, str]], where: str) -> None:
        """Keep some tensors, under other names.

        Args:
            names: New name and name. Each name is forgotten as it comes: there may be a hundred thousand.
            where: Names the folder in errors.

        Raises:
            CheckpointError: If two get one name.
        """
        old, new, prefix = self.numbers, dict[str, int](), None
        fqns: list[str] = []
        """Of those so far, where they do not all begin with the same prefix."""
        for name, fqn in names:
            if name in new:
                first = prefix + name if prefix is not None else fqns[list(new).index(name)]
                raise same_names(where, name, first, fqn)
            if not new:
                prefix = fqn.removesuffix(name)
            if prefix is not None and prefix + name != fqn:
                fqns = [prefix + one for one in new]
                prefix = None
            if prefix is None:
                fqns.append(fqn)
            new[name] = old.pop(fqn)
        self._prefix = prefix
        self._fqns = dict(zip(new.values(), fqns, strict=False))
        self.numbers = new


class Paths(Mapping[str, tuple[str, ...]]):
    """Keys of a nested state dict that lead to its entries: mostly, an entry's name is its keys with dots between."""

    def __init__(self, table: TensorTable):
        self._table = table
        self._cuts: list[tuple[int, ...] | None] = []
        """Of each tensor, the lengths of all keys but the last."""
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._others: dict[str, tuple[str, ...]] = {}
        self._num_tensors = 0

    def add(self, fqn: str, path: tuple[str, ...]) -> None:
        """Add an entry's."""
        number = self._table.numbers.get(fqn)
        if number is None or ".".join(path) != fqn or not path:
            self._others[fqn] = path
            return
        cut = tuple(map(len, path[:-1]))
        if len(self._cuts) <= number:
            self._cuts += [None] * (number + 1 - len(self._cuts))
        self._num_tensors += self._cuts[number] is None
        self._cuts[number] = self._known.setdefault(cut, cut)

    def __getitem__(self, fqn: str) -> tuple[str, ...]:
        """Return the keys that lead to an entry."""
        number = self._table.numbers.get(fqn)
        cut = self._cuts[number] if number is not None and number < len(self._cuts) else None
        if cut is None:
            return self._others[fqn]
        keys, position = [], 0
        for size in cut:
            keys.append(fqn[position : position + size])
            position += size + 1
        keys.append(fqn[position:])
        return tuple(keys)

    def __iter__(self) -> Iterator[str]:
        """Yield the entries."""
        for fqn, number in self._table.numbers.items():
            if number < len(self._cuts) and self._cuts[number] is not None:
                yield fqn
        yield from self._others

    def __len__(self) -> int:
        """Return how many entries there are."""
        return self._num_tensors + len(self._others)


class RecordPlaces(Mapping[str, Sequence[int]]):
    """Where in each file its records begin, in order: tensors' and others."""

    def __init__(self, table: TensorTable, others: Iterable[StoredRecord]):
        self._table = table
        self._others: dict[str, set[int]] = {}
        for record in others:
            self._others.setdefault(record.relative_path, set()).add(record.offset)
        self._names = dict.fromkeys([*table.files[1:], *self._others])
        self._places: dict[str, array[int]] = {}

    def __getitem__(self, name: str) -> Sequence[int]:
        """Return the places in a file."""
        if not self._places:
            self._places = self._find()
        return self._places[name]

    def _find(self) -> dict[str, array[int]]:
        """Return the places in all files, after one look at all chunks."""
        table, found = self._table, {name: array("q", self._others.get(name, ())) for name in self._names}
        by_number = [found.get(name, array("q")) for name in table.files]
        for number, place in zip(table.file_of, table.offsets, strict=True):
            by_number[number].append(place)
        return {name: array("q", sorted(set(places))) for name, places in found.items()}

    def __iter__(self) -> Iterator[str]:
        """Yield the files' names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return how many files there are."""
        return len(self._names)
