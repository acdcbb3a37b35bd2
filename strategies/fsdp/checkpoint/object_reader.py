"""Loading sharded checkpoints from object stores: each rank requests the ranges that it needs, several at once."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from typing_extensions import override

from ....checkpoint.files import CheckpointError
from ....checkpoint.formats.base import is_contiguous
from ....checkpoint.formats.dcp import RecordReader
from ....checkpoint.formats.dcp_metadata import METADATA_NAME
from ....checkpoint.manifest import MANIFEST_NAME, RecordDigests, parse_manifest
from ....checkpoint.object_path import PART_BYTES
from ....checkpoint.storage import ObjectFolder, generation_of
from ....state.rendezvous import raise_on_all_ranks, store_messages
from ...common.checkpoint_files import bytes_are_checked
from ...upstream.torch_core import _StorageInfo
from .loader import SafeReader, with_stored_states
from .writer import METADATA_FILE

_NUM_REQUESTS = 6
"""At once, of at most `PART_BYTES` each: with the one in use, a rank holds 56 MiB."""
_WHOLE_BYTES = 256 * 1024
"""A record up to this size is read whole, also where a part of it is wanted."""
_GAP_BYTES = 1024
"""Records that lie closer are read by one request."""

_Request = tuple[Callable[[], bytes], Callable[[bytes], None]]
"""How to get bytes, in a thread, and what to do with them then."""


def read_sharded_objects(url: str, weights_only: bool | None) -> dict[str, Any]:
    """Return the Trainer's checkpoint of a folder behind a URL: ours, torch's, or Lightning's; every rank calls it.

    Args:
        url: Of the folder.
        weights_only: For the metadata file, as in ``torch.load``.

    Raises:
        ValueError: If the folder holds no model weights.
        RuntimeError: On every rank, if what is read here is damaged.
    """
    with raise_on_all_ranks(f"loading {url}", store_messages()):
        reader = ObjectReader(ObjectFolder(url))
        return with_stored_states(reader.trainer_state(weights_only), reader.url, reader, reader.manifest)


class ObjectReader(SafeReader):
    """A `SafeReader` of objects.

    Args:
        folder: With a ``.metadata``.

    Raises:
        FileNotFoundError: If it has none.
    """

    def __init__(self, folder: ObjectFolder) -> None:
        super().__init__(Path())
        self._folder = folder
        self.path = self.url = folder.url
        self._description = folder.read(METADATA_NAME)
        self.read_metadata()
        self._generation = generation_of(self._places)
        name = self._in_generation(MANIFEST_NAME)
        self.manifest = None
        if folder.size(name) is not None:
            self.manifest = parse_manifest(folder.read(name), folder / name)
            self._digests = self.manifest.digests
            if METADATA_NAME in self._digests:
                self._digests[METADATA_NAME].check(self._what, self._description)

    def _in_generation(self, name: str) -> str:
        return f"{self._generation}/{name}" if self._generation else name

    def trainer_state(self, weights_only: bool | None) -> dict[str, Any]:
        """Return what the file for everything beside weights and optimizer state holds.

        Raises:
            ValueError: If there is none.
        """
        name = self._in_generation(METADATA_FILE)
        try:
            content = self._folder.read(name)
        except FileNotFoundError:
            raise ValueError(
                f"{self.path} has no {METADATA_FILE}, which Lightning and accelight write next to the weights: other "
                "software saved it, and the Trainer cannot resume from it."
            ) from None
        if METADATA_FILE in self._digests:
            self._digests[METADATA_FILE].check(self._folder / name, content)
        return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=weights_only))

    @override
    def _content(self) -> bytes:
        return self._description

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        records: dict[tuple[str, int, int], list[ReadItem]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            records.setdefault((info.relative_path, info.offset, info.length), []).append(item)
        with ThreadPoolExecutor(_NUM_REQUESTS, thread_name_prefix="accelight-read") as pool:
            pending: deque[tuple[Any, Callable[[bytes], None]]] = deque()
            for get, use in self._requests(dict(sorted(records.items())), planner):
                pending.append((pool.submit(get), use))
                if len(pending) > _NUM_REQUESTS:
                    self._finish(*pending.popleft())
            while pending:
                self._finish(*pending.popleft())
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @staticmethod
    def _finish(answer: Any, use: Callable[[bytes], None]) -> None:
        use(answer.result())

    def _requests(
        self, records: dict[tuple[str, int, int], list[ReadItem]], planner: LoadPlanner
    ) -> Iterator[_Request]:
        """Yield requests of at most `PART_BYTES`: for records that lie close together, or for a part of a large one."""
        digests = RecordDigests(self._digests, self._places, self._what)
        group: list[tuple[int, int, list[ReadItem]]] = []
        name, begin, end = "", 0, 0
        for (file, offset, length), items in records.items():
            if self._is_in_parts(length, items):
                yield from self._parts(file, offset, length, items, planner, digests)
                continue
            if group and (file != name or offset > end + _GAP_BYTES or offset + length - begin > PART_BYTES):
                yield self._together(name, begin, end, group, planner, digests)
                group = []
            if not group:
                name, begin, end = file, offset, offset
            group.append((offset, length, items))
            end = max(end, offset + length)
        if group:
            yield self._together(name, begin, end, group, planner, digests)

    def _is_in_parts(self, length: int, items: list[ReadItem]) -> bool:
        info: list[_StorageInfo] = [self.storage_data[item.storage_index] for item in items]
        if length <= _WHOLE_BYTES or any(one.transform_descriptors for one in info):
            return False
        if any(item.type == LoadItemType.BYTE_IO for item in items):
            return False
        return length > PART_BYTES or all(prod(item.lengths) < self._size_of(item) for item in items)

    def _size_of(self, item: ReadItem) -> int:
        """Return the number of elements in an item's chunk."""
        entry: Any = self.read_metadata().state_dict_metadata[item.storage_index.fqn]
        offset = item.storage_index.offset
        return next((prod(one.sizes) for one in entry.chunks if one.offsets == offset), prod(entry.size))

    def _together(
        self,
        name: str,
        begin: int,
        end: int,
        group: list[tuple[int, int, list[ReadItem]]],
        planner: LoadPlanner,
        digests: RecordDigests,
    ) -> _Request:
        def use(data: bytes) -> None:
            def read(num_bytes: int, offset: int) -> bytes:
                return data[offset - begin : offset - begin + num_bytes]

            reader = RecordReader(read, self._folder / name, end)
            for offset, length, items in group:
                record = read(length, offset)
                for item in items:
                    transforms = self.storage_data[item.storage_index].transform_descriptors or ()
                    if not transforms:
                        fqn, digest = item.storage_index.fqn, digests.of(name, offset)
                        reader.check(fqn, offset, length, digest, bytes_too=bytes_are_checked())
                    stream = self.transforms.transform_load_stream(item, transforms, io.BytesIO(record))
                    _load(item, io.BytesIO(stream.read()), planner)

        return partial(self._folder.read, name, begin, end), use

    def _parts(
        self, name: str, offset: int, length: int, items: list[ReadItem], planner: LoadPlanner, digests: RecordDigests
    ) -> Iterator[_Request]:
        """Yield requests for the rows of a tensor that are wanted."""

        def read(num_bytes: int, at: int) -> bytes:
            return self._folder.read(name, at, min(at + num_bytes, offset + length))

        what = self._folder / name
        reader = RecordReader(read, what, offset + length)
        for item in items:
            fqn = item.storage_index.fqn
            found = reader.locate(fqn, offset, length, digests.of(name, offset))
            if not is_contiguous(found.shape, found.strides) or not found.shape:
                raise CheckpointError(f"{what}: tensor {fqn!r} does not lie row by row. Download the checkpoint.")
            target = planner.resolve_tensor(item).detach()
            if target.shape != item.lengths:
                raise CheckpointError(
                    f"{what}: tensor {fqn!r}: {list(target.shape)} is wanted of {list(item.lengths)}."
                )
            row = found.dtype.itemsize * prod(found.shape[1:])
            first, num_rows = item.storage_offsets[0], item.lengths[0]
            step = max(1, PART_BYTES // max(1, row))
            for at in range(0, num_rows, step):
                rows = min(step, num_rows - at)
                start = found.start + (first + at) * row
                shape = (rows, *found.shape[1:])
                into = target.narrow(0, at, rows)
                use = partial(_fill, into, getattr(torch, found.dtype.name), shape, item)
                yield partial(self._folder.read, name, start, start + rows * row), use
            planner.commit_tensor(item, target)


def _fill(into: Tensor, dtype: torch.dtype, shape: tuple[int, ...], item: ReadItem, data: bytes) -> None:
    rows = torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
    for dim in range(1, len(shape)):
        rows = rows.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
    into.copy_(rows)


def _load(item: ReadItem, record: io.BytesIO, planner: LoadPlanner) -> None:
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, record)
        return
    tensor: Tensor = torch.load(record, map_location="cpu", weights_only=True)
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(tensor)
    planner.commit_tensor(item, target)
