"""A file of DCP whose large tensors lie so that a merge can link them into its output instead of copying them.

File systems link whole blocks. A piece of a tensor is moved to the place within a block that it has in the tensor; a
merged file lets the tensor begin with a block (`checkpoint/writing/linkable.py`). What was in between is a gap between
two records, which readers skip: each record is found by its offset.

torch's ``torch.utils.serialization.config.save.storage_alignment`` is one for all threads of a process, and counts from
the record's beginning. So where in its record a tensor lies is seen when torch writes it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.planner import WriteItem
from typing_extensions import Buffer, override

from ....checkpoint.formats.state_dict_keys import is_optimizer_key
from ....checkpoint.writing.linkable import LINK_BYTES, first_element, middle

_SHARE = 1000  # of a file's bytes, at most one in this many is in a gap
_HEAD_BYTES = 64 * 1024  # what comes before a tensor in its record; torch 2.13 writes less than 1 KB


@dataclass(frozen=True)
class Place:
    """Where a record's tensor is to lie."""

    phase: int
    """Within a block."""
    num_bytes: int
    """Of the tensor."""


def in_writing_order(items: Sequence[WriteItem]) -> list[WriteItem]:
    """Return a file's items in the order in which torch writes them with a GPU; without one it keeps any order.

    Source: torch 2.13 ``distributed/checkpoint/filesystem.py`` (``_OverlappingCpuLoader``).
    """
    return sorted(items, key=_full_bytes)


def _full_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return -1 if data is None else data.size.numel() * data.properties.dtype.itemsize


def places(items: Sequence[WriteItem]) -> list[Place | None]:
    """Return the places of a file's records, None where any will do.

    As many are chosen as gaps of one block fit into a thousandth of the file: weights first, since they are what is
    merged, and the largest of them.
    """
    found = [_place(item) for item in items]
    most = sum(place.num_bytes for place in found if place is not None) // (_SHARE * LINK_BYTES)
    large = [
        (is_optimizer_key(items[number].index.fqn.split(".")[0]), -place.num_bytes, number)
        for number, place in enumerate(found)
        if place is not None and middle(place.phase, place.phase, place.num_bytes) != (0, 0)
    ]
    chosen = {number for _, _, number in sorted(large)[:most]}
    return [place if number in chosen else None for number, place in enumerate(found)]


def _place(item: WriteItem) -> Place | None:
    data = item.tensor_data
    if data is None:
        return None
    itemsize = data.properties.dtype.itemsize
    first = first_element(data.size, data.chunk.offsets, data.chunk.sizes)
    return None if first is None else Place(first * itemsize % LINK_BYTES, data.chunk.sizes.numel() * itemsize)


class AlignedFile(io.BufferedWriter):
    """A file into which torch writes records, asking for the position before and after each of them.

    A record's first bytes are held back until its tensor comes, and then begin where the tensor gets to its place. So
    torch takes the gap for the record's first bytes; `gaps` tells.

    Args:
        path: Is written anew.
        wanted: The places of the records, in their order.
    """

    def __init__(self, path: Path, wanted: Sequence[Place | None]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._wanted = iter(wanted)
        self._place: Place | None = None
        self._held: list[bytes] = []
        self._num_held = 0
        self._start = 0
        self._is_between = True
        self.gaps: dict[int, int] = {}
        """Where a record was begun, as torch was told, and how many bytes of nothing came first."""

    @override
    def tell(self) -> int:
        self._is_between = True
        return super().tell() + self._num_held

    @override
    def write(self, data: Buffer, /) -> int:
        if self._is_between:
            self._begin()
        place = self._place
        if place is None:
            return super().write(data)
        num_bytes = memoryview(data).nbytes
        if num_bytes == place.num_bytes:
            gap = (place.phase - super().tell() - self._num_held) % LINK_BYTES
            super().write(bytes(gap))
            self.gaps[self._start] = gap
        elif self._num_held + num_bytes <= _HEAD_BYTES:
            self._held.append(bytes(data))
            self._num_held += num_bytes
            return num_bytes
        self._release()
        return super().write(data)

    def _begin(self) -> None:
        self._release()
        self._is_between = False
        self._place = next(self._wanted, None)
        self._start = super().tell()

    def _release(self) -> None:
        """Write what was held back; the record goes on without further looks."""
        held, self._held, self._num_held, self._place = self._held, [], 0, None
        for data in held:
            super().write(data)

    @override
    def flush(self) -> None:
        if not self.closed:
            self._release()
        super().flush()
