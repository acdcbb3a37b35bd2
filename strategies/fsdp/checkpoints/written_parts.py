"""Where the ranks wrote their parts of a sharded checkpoint, in as few bytes as tell it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import Self

from ...upstream.torch_core import _StorageInfo
from .packed_plans import Indices

_NUM_NUMBERS = 5
Record = tuple[str, "tuple[int, ...] | None", "int | None", str, int, int, Any]
"""Name, beginning in the tensor, hint; file, offset and length there, transforms."""


@dataclass(frozen=True)
class Written(WriteResult):
    """What torch tells rank 0 of a record, with its digest."""

    digest: int


@dataclass
class Places:
    """Where a rank wrote what its plan says."""

    files: list[str]
    numbers: array[int]
    """Of each item of the plan: size of its content, the file's number, offset and length there, digest."""

    @classmethod
    def of(cls, plan: SavePlan, results: Sequence[WriteResult]) -> Self:
        """Pack what ``write_data`` returned for ``plan``."""
        by_index = {one.index: one for one in results if isinstance(one, Written)}  # FolderWriter's all are
        files: dict[str, int] = {}
        numbers = array("q")
        for item in plan.items:
            one = by_index[item.index]
            place = one.storage_data
            number = files.setdefault(place.relative_path, len(files))
            numbers.extend((one.size_in_bytes, number, place.offset, place.length, one.digest))
        return cls(list(files), numbers)

    def __len__(self) -> int:
        """Return how many items there are."""
        return len(self.numbers) // _NUM_NUMBERS

    def rows(self) -> Iterator[tuple[int, str, int, int, int]]:
        """Yield of each item the size of its content, its file, offset and length there, and digest."""
        numbers, files = self.numbers, self.files
        for at in range(0, len(numbers), _NUM_NUMBERS):
            size, file, offset, length, digest = numbers[at : at + _NUM_NUMBERS]
            yield size, files[file], offset, length, digest


class RankResults(Iterable[WriteResult]):
    """What a rank has written, made of its places whenever it is asked for.

    Args:
        indices: What it was to write.
        places: Where that is, in the same order.

    Raises:
        ValueError: If there are more of one than of the other.
    """

    def __init__(self, indices: Indices, places: Places) -> None:
        if len(indices) != len(places):
            raise ValueError(f"A process was to write {len(indices)} pieces, and tells of {len(places)}.")
        self.indices, self.places = indices, places

    def __iter__(self) -> Iterator[Written]:
        """Yield what ``write_data`` returned."""
        for index, (size, file, offset, length, digest) in zip(self.indices, self.places.rows(), strict=True):
            yield Written(index, size, _StorageInfo(file, offset, length), digest)

    def files(self) -> Iterable[str]:
        """Return the files that it has written, each at least once."""
        return self.places.files

    def records(self) -> Iterator[Record]:
        """Yield what lies where."""
        for index, (_, file, offset, length, _) in zip(self.indices.rows(), self.places.rows(), strict=True):
            yield (*index, file, offset, length, None)

    def digests(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield file, offset, length and digest of each record."""
        for _, file, offset, length, digest in self.places.rows():
            yield file, offset, length, digest


class TorchsResults:
    """The same of what torch's own planning tells.

    Args:
        results: What ``write_data`` returned.
    """

    def __init__(self, results: Iterable[WriteResult]) -> None:
        self._results = results

    def files(self) -> Iterable[str]:
        """Return the files that it has written, each at least once."""
        return (one.storage_data.relative_path for one in self._results)

    def records(self) -> Iterator[Record]:
        """Yield what lies where."""
        for one in self._results:
            index, place = one.index, one.storage_data
            where = place.relative_path, place.offset, place.length, place.transform_descriptors
            yield index.fqn, index.offset, index.index, *where

    def digests(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield file, offset, length and digest of each record that has one."""
        for one in self._results:
            if isinstance(one, Written):
                place = one.storage_data
                yield place.relative_path, place.offset, place.length, one.digest


def parts_of(results: Iterable[Iterable[WriteResult]]) -> list[RankResults | TorchsResults]:
    """Return all ranks' parts, whoever tells of them."""
    return [own if isinstance(own, RankResults) else TorchsResults(own) for own in results]
