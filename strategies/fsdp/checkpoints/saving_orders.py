"""What a process tells the process that writes its part of a checkpoint: all that is needed when nobody else is left.

An order is a file without a name, whole before its descriptor is sent: it arrives whole or not at all. Tensors stand in
it as places in shared memory, whose descriptor is sent with it.

[Note: records] The processes that write a checkpoint may be on several machines, and whoever started them may be dead.
What all of them reach for certain is the checkpoint's folder: when one has written its part, it leaves a record there
of what lies where, or of its error. The one of rank 0 reads them, removes them, and completes the folder.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import re
import socket
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import SavePlan
from typing_extensions import Self, override

from ....checkpoint.manifest import Manifest
from .packed_plans import MergedPlan
from .shared_memory import SharedMemory, unnamed_file
from .written_parts import Places

_NUM_DESCRIPTORS = 2


@dataclass(frozen=True)
class Begun:
    """Rank 0 is about to make the folder: without a further word it is to be removed."""

    path: Path
    number: str


@dataclass(frozen=True)
class Plan:
    """What is the same for all saves by one plan."""

    own: SavePlan
    merged: MergedPlan | None
    """On rank 0, what all ranks write."""


@dataclass(frozen=True)
class Ending:
    """What rank 0 adds to the folder."""

    metadata: bytes
    """The file for everything else."""
    manifest: Manifest
    timeout_s: float
    """How long to wait for each other rank's part."""


@dataclass(frozen=True)
class Part:
    """A rank's part of one checkpoint."""

    path: Path
    known_as: Path
    """Where it is written, for ``.metadata``: what a rank itself would say."""
    number: str
    """Of the folder, see `NewFolder`."""
    rank: int
    num_ranks: int
    plan_number: int
    plan: Plan | None
    """None if it was sent with an earlier part."""
    kept_plans: Sequence[int]
    """Numbers of the plans that may come again."""
    ending: Ending | None
    """On rank 0."""


@dataclass(frozen=True)
class Answer:
    """What became of a part, one line of JSON."""

    problem: str | None
    """What this rank's process failed with."""
    complete: bool
    """Whether the checkpoint has its name; told to rank 0 alone."""

    def line(self) -> bytes:
        """Return it as it is sent."""
        return json.dumps([self.problem, self.complete]).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> Self:
        """Return what was sent."""
        return cls(*json.loads(line))


@dataclass(frozen=True)
class Record:
    """What a rank's process leaves in the folder: see [Note: records]."""

    places: Places | None
    problem: str | None = None

    def leave(self, folder: Path, rank: int) -> None:
        """Write it; it has its name when it is whole."""
        places = self.places
        content = {
            "problem": self.problem,
            "files": [] if places is None else places.files,
            "numbers": [] if places is None else places.numbers.tolist(),
        }
        path = folder / _record_name(rank)
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_text(json.dumps(content))
        temporary.replace(path)

    @staticmethod
    def ranks_in(folder: Path) -> list[int]:
        """Return which ranks have left one.

        Raises:
            FileNotFoundError: If the folder is gone.
        """
        return [int(match[1]) for name in os.listdir(folder) if (match := _RECORD.fullmatch(name))]

    @classmethod
    def take(cls, folder: Path, rank: int) -> Self:
        """Read and remove it."""
        path = folder / _record_name(rank)
        content = json.loads(path.read_text())
        path.unlink()
        if content["problem"] is not None:
            return cls(None, content["problem"])
        return cls(Places(content["files"], array("q", content["numbers"])))


_RECORD = re.compile(r"\.written_(\d+)")


def _record_name(rank: int) -> str:
    return f".written_{rank:05d}"


# ---------------------------------------------------------------------- how they are sent
@dataclass
class Received:
    """An order, and what its tensors lie in."""

    order: Begun | Part
    data: list[Any] = field(repr=False)
    """Of a part: tensors and bytes in the order of its plan."""


def send(connection: socket.socket, order: Begun | Part, data: Sequence[Any], memory: SharedMemory | None) -> None:
    """Send an order.

    Args:
        connection: To the process that writes.
        order: What to do.
        data: Of a part: what its plan's items are.
        memory: Where the tensors in ``data`` lie; what does not is sent by value.

    Raises:
        OSError: If there is nobody to receive it.
    """
    content = unnamed_file()
    try:
        with os.fdopen(os.dup(content), "wb") as stream:
            pickle.dump(order, stream)
            _Pickler(stream, memory).dump(list(data))
        descriptors = [content] if memory is None else [content, memory.descriptor]
        socket.send_fds(connection, [b"."], descriptors)
    finally:
        os.close(content)


def receive(connection: socket.socket) -> Received | None:
    """Return the next order; None when no more will come."""
    sign, descriptors, _, _ = socket.recv_fds(connection, 1, _NUM_DESCRIPTORS)
    if not sign:
        return None
    try:
        with os.fdopen(os.dup(descriptors[0]), "rb") as stream:
            stream.seek(0)
            order = pickle.load(stream)
            memory = _mapped(descriptors[1]) if len(descriptors) > 1 else None
            return Received(order, _Unpickler(stream, memory).load())
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _mapped(descriptor: int) -> mmap.mmap:
    """Return shared memory to read; nobody else sees what is written there."""
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BufferedIOBase, memory: SharedMemory | None) -> None:
        super().__init__(stream)
        self._memory = memory

    @override
    def persistent_id(self, obj: Any) -> Any:
        if self._memory is None or type(obj) not in (Tensor, nn.Parameter):
            return None
        storage = obj.untyped_storage()
        place = self._memory.place_of(storage)
        if place is None:
            return None
        return place, storage.nbytes(), obj.dtype, obj.storage_offset(), tuple(obj.shape), obj.stride()


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BufferedIOBase, memory: mmap.mmap | None) -> None:
        super().__init__(stream)
        self._memory = memory
        self._storages: dict[int, torch.UntypedStorage] = {}

    @override
    def persistent_load(self, pid: Any) -> Tensor:
        place, num_bytes, dtype, offset, shape, strides = pid
        if self._memory is None:
            raise RuntimeError("tensors in shared memory, and no shared memory came with them.")
        if place not in self._storages:
            values = torch.frombuffer(self._memory, dtype=torch.uint8, offset=place, count=num_bytes)
            self._storages[place] = values.untyped_storage()
        return torch.empty(0, dtype=dtype).set_(self._storages[place], offset, shape, strides)
