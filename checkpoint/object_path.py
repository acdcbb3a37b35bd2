"""Objects of a store, where reading code expects paths of a file system."""

# ruff: noqa: D102 (what has no docstring is pathlib's)

from __future__ import annotations

import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import total_ordering
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

PART_BYTES = 8 * 2**20
"""The most bytes that one request writes or reads; S3 wants parts of 5 MiB at least."""
NUM_THREADS = 16
"""The number of threads that wait for small requests."""
_SMALL_BYTES = 64 * 1024
"""A request of this or less is for a header."""
_Base: Any = object
if TYPE_CHECKING:
    _Base = Path


_Item = TypeVar("_Item")
_T = TypeVar("_T")


def in_order(do: Callable[[_Item], _T], items: Iterable[_Item], num_threads: int) -> Iterator[_T]:
    """Yield ``do(item)`` of all, in order; as many threads are ahead."""
    waiting: deque[Future[_T]] = deque()
    with ThreadPoolExecutor(num_threads, "accelight-requests") as threads:
        try:
            for item in items:
                waiting.append(threads.submit(do, item))
                if len(waiting) > num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for one in waiting:
                one.cancel()


class Store(Protocol):
    """The place of objects: see `ObjectFolder`."""

    url: str

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all objects, by name."""

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes of an object."""


class _Status(NamedTuple):
    st_size: int
    st_mode: int
    st_mtime: float = 0.0


@total_ordering
class ObjectPath(_Base):  # type: ignore[misc] # to a type checker a Path, whose part for reading it has
    """An object, or what the names of several begin with.

    What there is, is asked once, for all paths that are made of one.

    Args:
        store: The objects.
        name: In the store; nothing for all of it.
        sizes: Of the objects, where they are known.
    """

    def __init__(self, store: Store, name: str = "", sizes: dict[str, int] | None = None) -> None:
        self._store = store
        self._name = name
        self._sizes = store.sizes() if sizes is None else sizes

    def _other(self, name: str) -> ObjectPath:
        return ObjectPath(self._store, name, self._sizes)

    @property
    def store(self) -> Store:
        """The store that holds it."""
        return self._store

    @property
    def name_in_store(self) -> str:
        """The name there; nothing for all of it."""
        return self._name

    @property
    def name(self) -> str:
        return str(self).rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> ObjectPath:
        return self._other(self._name.rpartition("/")[0])

    def __truediv__(self, name: Any) -> ObjectPath:
        return self._other("/".join(filter(None, (self._name, str(name)))))

    def joinpath(self, *names: Any) -> ObjectPath:
        return self / "/".join(map(str, names))

    def __str__(self) -> str:
        return "/".join(filter(None, (self._store.url, self._name)))

    def __repr__(self) -> str:
        return f"ObjectPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and str(self) == str(other)

    def __lt__(self, other: Any) -> bool:
        return str(self) < str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def as_posix(self) -> str:
        return str(self)

    def resolve(self, strict: bool = False) -> ObjectPath:
        return self

    def relative_to(self, other: Any, *_: Any) -> PurePosixPath:
        return PurePosixPath(str(self).removeprefix(f"{other}/"))

    def is_relative_to(self, other: Any, *_: Any) -> bool:
        return f"{self}/".startswith(f"{other}/")

    def is_file(self) -> bool:
        return self._name in self._sizes

    def is_symlink(self) -> bool:
        return False

    def is_dir(self) -> bool:
        return any(True for _ in self.iterdir())

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator[ObjectPath]:
        start = f"{self._name}/" if self._name else ""
        children = {
            one[len(start) :].partition("/")[0] for one in self._sizes if one.startswith(start) and one != start
        }
        return (self / child for child in sorted(children - {""}))

    def glob(self, pattern: str) -> Iterator[ObjectPath]:
        first, _, rest = pattern.partition("/")
        for child in self.iterdir():
            if fnmatchcase(child.name, first):
                yield from child.glob(rest) if rest else (child,)

    def stat(self) -> _Status:
        if self.is_file():
            return _Status(self._sizes[self._name], stat.S_IFREG)
        if self.is_dir():
            return _Status(0, stat.S_IFDIR)
        raise FileNotFoundError(f"{self} does not exist.")

    def open_object(self) -> ObjectFile:
        """Return the object for reading.

        Raises:
            FileNotFoundError: If there is none.
        """
        return ObjectFile(self._store, self._name, self.stat().st_size)


class ObjectFile:
    """An object that is read in ranges, by one thread. Where it is read on, a part of 8 MiB is requested at once."""

    def __init__(self, store: Store, name: str, size: int) -> None:
        self._store, self._name, self.size = store, name, size
        self._ahead, self._ahead_from = b"", 0
        self._end = -1
        """Of the last range that was asked for."""

    def pread(self, num_bytes: int, offset: int) -> bytes:
        """Return bytes as ``os.pread`` does."""
        end = min(offset + num_bytes, self.size)
        if offset >= end:
            return b""
        begin = offset - self._ahead_from
        if not 0 <= begin <= begin + end - offset <= len(self._ahead):
            is_read_on = offset == self._end and num_bytes > _SMALL_BYTES
            to = min(max(end, offset + PART_BYTES), self.size) if is_read_on else end
            self._ahead = b""  # not in memory beside what comes
            self._ahead, self._ahead_from, begin = self._store.read(self._name, offset, to), offset, 0
        self._end = end
        found = self._ahead[begin : begin + end - offset]
        if begin + end - offset == len(self._ahead) > _SMALL_BYTES:  # headers are looked at again
            self._ahead = b""
        return found

    def preadv(self, vectors: Sequence[memoryview], offset: int) -> int:
        """Fill ``vectors`` as ``os.preadv`` does."""
        data, filled = memoryview(self.pread(sum(map(len, vectors)), offset)), 0
        for vector in vectors:
            part = data[filled : filled + len(vector)]
            vector[: len(part)] = part
            filled += len(part)
        return filled
