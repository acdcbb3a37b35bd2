"""Tensors of a DCP folder as the merge sees them: made of a table when they are asked for."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..source import Piece, SourceTensor, TensorInfo
from .tensor_table import TensorTable


class TensorInfos(Mapping[str, TensorInfo]):
    """What is known of a table's tensors before their bytes are looked for."""

    def __init__(self, table: TensorTable):
        self._table = table

    def __getitem__(self, name: str) -> TensorInfo:
        """Return what is known of a tensor."""
        return self._table.info(name)

    def __iter__(self) -> Iterator[str]:
        """Yield the names in order."""
        return iter(self._table)

    def __len__(self) -> int:
        """Return how many tensors there are."""
        return len(self._table)


class LocatedTensors(Mapping[str, SourceTensor]):
    """Tensors with the places of their pieces' bytes.

    Args:
        folder: Of the files.
        table: Says how the tensors are cut, and in which files they lie.
        names: Of the tensors.
    """

    def __init__(self, folder: Path, table: TensorTable, names: Sequence[str]):
        self.table = table
        self.starts = array("q", bytes(8 * table.first[-1]))
        """Where in its file each chunk's bytes begin; its record, where that is transformed."""
        self.strides: dict[int, tuple[int, ...]] = {}
        """Of the chunks that are not contiguous."""
        self._names = names
        self._names_by_number: list[str] = []
        self._paths = [folder / name for name in table.files]

    def fqn_of(self, chunk: int) -> str:
        """Return the full name of the tensor that a chunk is part of."""
        if not self._names_by_number:
            self._names_by_number = [""] * len(self.table.layouts)
            for name, number in self.table.numbers.items():
                self._names_by_number[number] = name
        number = self.table.tensor_of(chunk)
        return self.table.fqn(self._names_by_number[number], number)

    def __getitem__(self, name: str) -> SourceTensor:
        """Return a tensor."""
        table = self.table
        number = table.numbers[name]
        layout, first = table.layouts[number], table.first[number]
        pieces = tuple([self._piece(first + place, *box) for place, box in enumerate(layout.boxes)])
        return SourceTensor(table.fqn(name, number), layout.dtype, layout.shape, pieces)

    def _piece(self, chunk: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Piece:
        table = self.table
        path, start = self._paths[table.file_of[chunk]], self.starts[chunk]
        if table.transforms and chunk in table.transforms:
            return Piece(path, start, offsets, sizes, None, table.transforms[chunk], table.lengths[chunk])
        return Piece(path, start, offsets, sizes, self.strides.get(chunk) if self.strides else None)

    def __iter__(self) -> Iterator[str]:
        """Yield the names in order."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return how many tensors there are."""
        return len(self._names)
