"""Writes a merge into an object store, in parts. The store itself copies what is in it already.

An object is there when its last request is answered, and not before. Where a store takes parts in any order (S3),
threads upload them; elsewhere threads read ahead, and the parts go through one stream.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import IO

from ..files import CheckpointError, FilePool, open_regular
from ..object_path import NUM_THREADS, ObjectPath, in_order
from ..storage import ObjectFolder, Upload
from .copy import OnBytes, Run, TensorReader, blocks_of, compare_bin, compare_tensors, convert_block, runs_of, save_bin
from .plan import Plan, PlannedFile, PlannedTensor

_MIN_PART_BYTES = 5 * 2**20
"""S3's minimum for all parts but an object's last."""
_PART_BYTES = 5 * 2**20
"""Parts that go through this process have this size or little more."""
_COPY_BYTES = 256 * 2**20
"""The most bytes that the store copies in one request; S3's maximum is 5 GiB."""
_CONVERTED_BYTES = 2**20
_MAX_PARTS = 9_000
"""S3's maximum is 10,000."""
_MAX_THREADS = 5
"""Each holds one part: 25 to 50 MiB in all."""


def upload_plan(
    plan: Plan,
    into: ObjectPath,
    *,
    is_safe: bool,
    is_verified: bool,
    companions: Mapping[str, bytes],
    stale: Sequence[str],
    on_bytes: OnBytes,
) -> None:
    """Write all files of a plan under a URL.

    One file replaces that of an earlier merge at once. Of several, the old index goes first and the new one comes last.

    Args:
        plan: The files.
        into: What their names begin with.
        is_safe: Safetensors; False for torch's own format.
        is_verified: Compare each object, read back, with its source; objects that differ are removed.
        companions: Further objects.
        stale: Objects of an earlier merge that no longer belong to the result, removed at the end.
        on_bytes: Receives the progress.

    Raises:
        CheckpointError: If a source is damaged, or an object differs from it.
        OSError: If a source cannot be read, or an object not be written; the error names it.
    """
    folder = ObjectFolder.of(into)
    names = [file.name for file in plan.files]
    folder.remove_uploads(lambda name: name in names)  # of killed merges
    uploads: list[Upload] = []
    try:
        if is_safe and folder.takes_parts:
            for file in plan.files:
                uploads.append(folder.begin_upload(file.name))
                _upload_parts(file, uploads[-1], folder, on_bytes)
        if plan.index_name is not None:
            folder.remove([plan.index_name])
        for upload in uploads:
            upload.complete()
    except BaseException:
        for upload in uploads:
            upload.abort()
        raise
    for file in plan.files if not uploads else ():
        with folder.replacing(file.name) as stream:
            if is_safe:
                _stream_parts(file, stream, on_bytes)
            else:
                save_bin(file, stream)
                on_bytes(file.num_bytes)
    if is_verified:
        _compare(plan, into, is_safe, on_bytes)
    for name, content in companions.items():
        folder.put(name, content)
    if plan.index_name is not None:
        folder.put(plan.index_name, plan.index)
    folder.remove(stale)


def _compare(plan: Plan, into: ObjectPath, is_safe: bool, on_bytes: OnBytes) -> None:
    folder = ObjectFolder.of(into)
    written = ObjectPath(folder)
    for file in plan.files:
        try:
            if is_safe:
                compare_tensors(file, open_regular(written / file.name), on_bytes)
            else:
                with folder.reading(file.name) as stream:
                    compare_bin(file, stream)
                on_bytes(file.num_bytes)
        except CheckpointError:
            folder.remove([one.name for one in plan.files])
            raise


# ------------------------------------------------------------------------------------------------
# Parts of a file: ranges that the store copies from an object of its own, and ranges that are put together here.


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes ``begin`` to ``end`` of the output."""

    begin: int
    end: int
    run: Run | None = None
    """The store's object with these bytes; None where this process has to send them."""


def parts_of(file: PlannedFile, in_store: Callable[[Run], bool]) -> Iterator[Part]:
    """Yield the parts of a file, in order, as many as S3 allows; all but the last have at least 5 MiB.

    Args:
        file: Of safetensors.
        in_store: Returns whether the store can copy a run.
    """
    least = max(_MIN_PART_BYTES, file.num_bytes // _MAX_PARTS)
    part_bytes = max(_PART_BYTES, least)
    sent_from = 0  # where the bytes begin that this process sends next
    for begin, run in _copies(file, in_store):
        end = begin + run.num_bytes
        start = begin if sent_from == begin else max(begin, sent_from + least)
        if end - start < least:
            continue
        for cut in _cut(sent_from, start, part_bytes):
            yield Part(*cut)
        num = -(-(end - start) // _COPY_BYTES)
        for number in range(num):
            first, last = ((end - start) * one // num for one in (number, number + 1))
            source = run.source + start - begin + first
            yield Part(start + first, start + last, Run(run.path, source, start + first, last - first))
        sent_from = end
    for cut in _cut(sent_from, file.num_bytes, part_bytes):
        yield Part(*cut)


def _copies(file: PlannedFile, in_store: Callable[[Run], bool]) -> Iterator[tuple[int, Run]]:
    """Yield (position in the file, run) of what the store can copy, in order; runs that adjoin at both ends are one."""
    last: tuple[int, Run] | None = None
    for tensor in file.tensors:
        runs = [] if tensor.num_bytes < _MIN_PART_BYTES and not _adjoins(tensor, last) else runs_of(tensor) or []
        for run in sorted(runs, key=lambda one: one.target):
            begin = tensor.start + run.target
            if last is not None and _continues(last, begin, run):
                last = (last[0], Run(run.path, last[1].source, last[1].target, last[1].num_bytes + run.num_bytes))
                continue
            if last is not None:
                yield last
            last = (begin, run) if in_store(run) else None
    if last is not None:
        yield last


def _adjoins(tensor: PlannedTensor, last: tuple[int, Run] | None) -> bool:
    return last is not None and last[0] + last[1].num_bytes == tensor.start


def _continues(last: tuple[int, Run], begin: int, run: Run) -> bool:
    position, before = last
    return (
        position + before.num_bytes == begin
        and before.path == run.path
        and before.source + before.num_bytes == run.source
    )


def _cut(begin: int, end: int, part_bytes: int) -> list[tuple[int, int]]:
    """Return a range in parts of ``part_bytes`` to twice as many, or all of it if it is shorter; none if empty."""
    if begin == end:
        return []
    num = max((end - begin) // part_bytes, 1)
    return list(pairwise(begin + (end - begin) * number // num for number in range(num + 1)))


def _upload_parts(file: PlannedFile, upload: Upload, folder: ObjectFolder, on_bytes: OnBytes) -> None:
    content = _Content(file)

    def send(numbered: tuple[int, Part]) -> int:
        number, part = numbered
        if part.run is not None:
            source = part.run.path
            assert isinstance(source, ObjectPath)
            upload.copy(number, source, part.run.source, part.run.source + part.run.num_bytes)
        else:
            upload.put(number, content.read(part.begin, part.end))
        return part.end - part.begin

    def in_store(run: Run) -> bool:
        return isinstance(run.path, ObjectPath) and folder.can_copy_from(run.path)

    for num_bytes in in_order(send, enumerate(parts_of(file, in_store), 1), _MAX_THREADS):
        on_bytes(num_bytes)


def _stream_parts(file: PlannedFile, stream: IO[bytes], on_bytes: OnBytes) -> None:
    content = _Content(file)
    for part in in_order(lambda one: content.read(*one), _cut(0, file.num_bytes, _PART_BYTES), _MAX_THREADS):
        stream.write(part)
        on_bytes(len(part))


class _Content:
    """The bytes of a planned file, range by range; for several threads."""

    def __init__(self, file: PlannedFile) -> None:
        self._file = file
        self._header = b"".join(file.header)
        self._lock = Lock()
        self._whole: tuple[str, bytes] = ("", b"")
        """A tensor that cannot be read in parts, and its name; the parts of a file are asked for in order, about."""

    def read(self, begin: int, end: int) -> bytearray:
        """Return the bytes from ``begin`` to ``end``."""
        content = bytearray(end - begin)
        view = memoryview(content)
        head = self._header[begin:end]
        view[: len(head)] = head
        tensors, wanted = self._file.tensors, list[tuple[PlannedTensor, int, memoryview]]()
        index = max(bisect_right(tensors, begin, key=lambda one: one.start) - 1, 0)
        while index < len(tensors) and (tensor := tensors[index]).start < end:
            first = max(begin - tensor.start, 0)
            last = min(end - tensor.start, tensor.num_bytes)
            if first < last:
                wanted.append((tensor, first, view[tensor.start + first - begin : tensor.start + last - begin]))
            index += 1
        if len(wanted) > 1 and isinstance(wanted[0][0].source.pieces[0].path, ObjectPath):
            with ThreadPoolExecutor(NUM_THREADS, "accelight-read") as threads:
                list(threads.map(lambda one: self._fill(*one), wanted))
        else:
            for one in wanted:
                self._fill(*one)
        return content

    def _fill(self, tensor: PlannedTensor, first: int, view: memoryview) -> None:
        files = FilePool()
        try:
            self._fill_from(tensor, first, view, files)
        finally:
            files.close()

    def _fill_from(self, tensor: PlannedTensor, first: int, view: memoryview, files: FilePool) -> None:
        if tensor.compute is not None or not all(piece.is_plain for piece in tensor.source.pieces):
            view[:] = self._all_of(tensor)[first : first + len(view)]
            return
        reader = TensorReader(tensor.source, files)
        if tensor.dtype is tensor.source.dtype:
            reader.read_into(first, view)
            return
        for start in range(0, len(view), _CONVERTED_BYTES):
            self._convert(tensor, reader, first + start, view[start : start + _CONVERTED_BYTES])

    @staticmethod
    def _convert(tensor: PlannedTensor, reader: TensorReader, first: int, view: memoryview) -> None:
        """Fill ``view`` with converted bytes from ``first`` on; a part may begin and end inside an element."""
        source, target = tensor.source.dtype, tensor.dtype
        begin, end = first // target.itemsize, -(-(first + len(view)) // target.itemsize)
        values = memoryview(bytearray((end - begin) * source.itemsize))
        reader.read_into(begin * source.itemsize, values)
        skipped = first - begin * target.itemsize
        converted = convert_block(values, source, target, f"Tensor {tensor.name!r}")
        view[:] = converted[skipped : skipped + len(view)]

    def _all_of(self, tensor: PlannedTensor) -> bytes:
        with self._lock:
            if self._whole[0] != tensor.name:
                self._whole = ("", b"")
                content, files = bytearray(tensor.num_bytes), FilePool()
                buffer = memoryview(bytearray(_PART_BYTES))
                for start, block in blocks_of(tensor, files, buffer):
                    content[start : start + len(block)] = block
                files.close()
                self._whole = (tensor.name, bytes(content))
            return self._whole[1]
