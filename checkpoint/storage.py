"""Checkpoints in object stores: folders of objects under a URL, through fsspec.

[Note: generations] Objects cannot be renamed, so a checkpoint cannot take its name when it is complete, as on a file
system (`atomic_dir`). Instead each save writes its objects under a name of its own, its generation, and last of all
one object that names them: ``.metadata``, whose relative paths begin with the generation, or DeepSpeed's ``latest``,
whose content it is. A store puts an object whole or not at all, so that one describes either the previous checkpoint or
the new one. After that the save removes the objects of all other generations: of the previous checkpoint, and of saves
that were killed.

Source: the object stores' own promise (Amazon S3's consistency model: a PUT is atomic, and reads after it see it).
"""

from __future__ import annotations

import copy
import hashlib
import io
import logging
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import RLock
from typing import IO, Any, TypeVar, cast
from weakref import WeakKeyDictionary

from .files import CheckpointError
from .formats.base import AVERAGED_WEIGHTS
from .formats.dcp_metadata import METADATA_NAME
from .formats.torch_save import META_NAME
from .formats.zero_files import LATEST_NAME
from .manifest import GENERATION, MANIFEST_NAME
from .object_path import PART_BYTES, ObjectPath, in_order

_LIMIT_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_STREAM_PART_BYTES = 6 * 2**20
"""Of a stream's first parts; later ones are larger."""
_READ_THREADS = 6
"""The number of threads that read parts of one object."""
_DEFINITE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError)
_PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(?:://|::)")
_LOCAL = re.compile(r"(file|local)://", re.IGNORECASE)
_PASSWORD = re.compile(r"://[^/@:]*:[^/@]*@")
_CREDENTIALS = re.compile(r"(?<=://)[^/@]*@")
_WITH_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss")
_NAMING = (METADATA_NAME, LATEST_NAME)
"""The files that list a checkpoint's objects; a reader looks for the first one first."""
_DCP = rf"{re.escape(METADATA_NAME)}(\.tmp)?|[^/]*\.distcp"
_UNFINISHED = re.compile(r"(.*/)?\.([^/]+)\.unfinished")
_OWN = re.compile(
    rf"(({AVERAGED_WEIGHTS}/)?({_DCP}|{re.escape(MANIFEST_NAME)}))|{re.escape(META_NAME)}"
    rf"|(checkpoint/)?[^/]*_states\.pt|{LATEST_NAME}|zero_to_\w+\.py"
)
WEIGHTS_IN_16_BIT = "model.safetensors"
"""Beside DeepSpeed's files, where the user asks for it."""
_T = TypeVar("_T")


def is_remote(path: object) -> bool:
    """Return whether ``path`` is a URL of something else than the file system (``s3://...``)."""
    return _protocol(str(path)) not in ("", "file", "local")


def _protocol(path: str) -> str:
    found = _PROTOCOL.match(path)
    return found[1].lower() if found else ""


def without_credentials(url: str) -> str:
    """Return a URL as messages may have it: ``user:password@`` is not shown."""
    return _CREDENTIALS.sub("", url)


def check_no_password(path: str | os.PathLike[str]) -> None:
    """Check that a path for the Trainer is no URL with a password, which Lightning would log and save in checkpoints.

    Raises:
        ValueError: If it is.
    """
    url = str(path)
    if is_remote(url) and _PASSWORD.search(url):
        protocol = _protocol(url)
        raise ValueError(
            f"{without_credentials(url)} has a password in it, which the Trainer would log and save in checkpoints. "
            f"Set it in fsspec's configuration: the environment variable FSSPEC_{protocol.upper()}_PASSWORD, or "
            f"fsspec.config.conf[{protocol!r}] = {{'password': ...}}."
        )


def source_path(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Path:
    """Return the place to read a checkpoint from: a path, or objects behind a URL in the place of one."""
    if isinstance(path, ObjectPath):
        return path
    if is_remote(path):
        return ObjectPath(ObjectFolder(str(path), storage_options))
    return Path(_LOCAL.sub("", str(path)))


_TURNS: WeakKeyDictionary[Any, AbstractContextManager[Any]] = WeakKeyDictionary()


def _turn_of(fs: Any) -> AbstractContextManager[Any]:
    """Return the lock that a thread holds during a request: stores of fsspec that are not async take one at a time."""
    if getattr(fs, "async_impl", False):
        return nullcontext()
    return _TURNS.setdefault(fs, RLock())


class ObjectFolder:
    """Objects whose names begin with a URL; names are relative to it.

    Requests that fail are repeated for a minute, with growing pauses, unless the error is definite.

    Args:
        url: Of any protocol that fsspec knows.
        options: Of the file system (``storage_options``); by default from the usual environment.

    Raises:
        ImportError: If the protocol's package is missing (``s3fs`` for ``s3://``).
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        from fsspec.core import url_to_fs  # slow to import, and nothing to those who read files

        self._fs, root = url_to_fs(url.rstrip("/"), **(options or {}))
        self._root: str = root
        self.has_buckets = _protocol(url) in _WITH_BUCKETS
        """Whether names are all that there is, and no folders: an object and others below its name may be there."""
        self.url = without_credentials(url.rstrip("/"))
        """For messages."""

    @property
    def _turn(self) -> AbstractContextManager[Any]:
        return _turn_of(self._fs)

    def __truediv__(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def __repr__(self) -> str:
        return f"ObjectFolder({self.url!r})"

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def names(self) -> list[str]:
        """Return the names of all objects below the URL."""
        return sorted(name for name in self.sizes() if name)

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all objects in bytes, by name; the object at the URL itself has an empty one."""
        start = f"{self._root}/"

        def find() -> dict[str, int]:
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
            sizes = {
                name.removeprefix(start): int(one["size"]) for name, one in found.items() if name.startswith(start)
            }
            if self._root in found:  # which some stores describe by nothing
                sizes[""] = int((found[self._root] or self._fs.info(self._root))["size"])
            return sizes

        return self._repeated(find, "listing", "")

    def _info(self, name: str) -> dict[str, Any] | None:
        """Return the store's description of an object; None where there is none."""

        def info() -> dict[str, Any] | None:
            self._fs.invalidate_cache()
            try:
                found: dict[str, Any] = self._fs.info(self._path(name))
            except (FileNotFoundError, NotADirectoryError):
                return None
            return None if found.get("type") == "directory" else found

        return self._repeated(info, "looking for", name)

    def size(self, name: str = "") -> int | None:
        """Return an object's size in bytes; None where there is none."""
        info = self._info(name)
        return None if info is None else int(info["size"])

    def identity(self, name: str = "") -> str | None:
        """Return a value that changes whenever an object is written; None where there is none."""
        info = self._info(name)
        return None if info is None else str(info)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return the bytes of an object from ``begin`` to ``end``, or to its own.

        Raises:
            CheckpointError: If it ends earlier.
            FileNotFoundError: If there is none.
        """
        if begin == end:
            return b""

        def get() -> bytes:
            if begin == 0 and end is None:
                return bytes(self._fs.cat_file(self._path(name)))
            try:
                return bytes(self._fs.cat_file(self._path(name), start=begin, end=end))
            except _DEFINITE:
                raise
            except Exception:  # stores refuse ranges beyond the end
                size = self.size(name)
                if size is None or size > begin:
                    raise
                return b""

        found = self._repeated(get, "reading", name)
        if end is not None and len(found) != end - begin:
            raise CheckpointError(
                f"{self / name} ends at byte {begin + len(found)}, expected {end}: it is cut off, or another save's."
            )
        return found

    def put(self, name: str, content: bytes) -> None:
        """Write an object by one request; there is all of it, or the one before."""
        if self.has_buckets:
            self._repeated(lambda: self._fs.pipe_file(self._path(name), content), "writing", name)
        else:
            with self.replacing(name) as stream:
                stream.write(content)

    @contextmanager
    def writing(self, name: str, num_threads: int = 1) -> Iterator[IO[bytes]]:
        """Yield a stream into an object, which is there when the body ends; not at all if that fails.

        Args:
            name: Of the object.
            num_threads: How many parts of 6 MiB are uploaded at once, where the store `takes_parts`; each is in memory.
        """
        self._make_parent(name)
        if self.takes_parts:
            with _PartStream(self, name, num_threads) as parts:
                yield cast("IO[bytes]", parts)
            return
        stream = self._repeated(lambda: self._fs.open(self._path(name), "wb", block_size=PART_BYTES), "writing", name)
        try:
            yield cast("IO[bytes]", _InPieces(stream, self._turn))
            with self._turn:
                stream.close()
        except BaseException as error:
            with suppress(Exception):
                stream.discard()
            if isinstance(error, OSError):
                raise self._named(error, "writing", name) from error
            raise

    def consists_of(self, name: str, tags: Sequence[str]) -> bool:
        """Return whether an object was uploaded in just these parts, given as S3's tags of them.

        A request that puts parts together is repeated where its answer is lost; the second one finds no upload.
        """
        if not tags:
            return False
        digest = hashlib.md5(b"".join(bytes.fromhex(tag.strip('"')) for tag in tags), usedforsecurity=False)
        found = str((self._info(name) or {}).get("ETag", "")).strip('"')
        return found == f"{digest.hexdigest()}-{len(tags)}"

    @contextmanager
    def replacing(self, name: str, num_threads: int = 1) -> Iterator[IO[bytes]]:
        """Yield a stream as `writing` does; in a store with folders, too, the name means all of it or the one before.

        There it is ``.NAME.unfinished`` until then, for the next attempt to overwrite where this one is killed.
        """
        if self.has_buckets:
            with self.writing(name, num_threads) as stream:
                yield stream
            return
        folder, slash, last = name.rpartition("/")
        unfinished = f"{folder}{slash}.{last}.unfinished"
        try:
            with self.writing(unfinished) as stream:
                yield stream
            self._repeated(lambda: self._move(unfinished, name), "writing", name)
        except BaseException:
            with suppress(Exception):
                self.remove([unfinished])
            raise

    def _move(self, name: str, to: str) -> None:
        self._fs.invalidate_cache()
        try:
            self._fs.mv(self._path(name), self._path(to))  # in one step, where the store can
        except Exception:  # noqa: BLE001 (each store has its own error)
            if not self._fs.exists(self._path(name)):  # an earlier attempt has moved it
                return
            if self._fs.exists(self._path(to)):  # which this store does not replace
                self._fs.rm_file(self._path(to))
            self._fs.mv(self._path(name), self._path(to))

    @contextmanager
    def reading(self, name: str) -> Iterator[IO[bytes]]:
        """Yield a stream of an object, which can be searched.

        Raises:
            FileNotFoundError: If there is none.
        """
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(f"reading {self / name}: there is no such object.")
        with io.BufferedReader(_ReadStream(self, name, size), PART_BYTES) as stream:
            yield cast("IO[bytes]", stream)

    def read_parts(self, name: str, begin: int, end: int) -> Iterator[bytes]:
        """Yield a range in order, as parts of which several are read at once."""

        def read(at: int) -> bytes:
            return self.read(name, at, min(at + PART_BYTES, end))

        starts = range(begin, end, PART_BYTES)
        yield from map(read, starts) if len(starts) < 2 else in_order(read, starts, _READ_THREADS)

    @classmethod
    def of(cls, path: ObjectPath) -> ObjectFolder:
        """Return the folder that a path is."""
        store = path.store
        assert isinstance(store, cls)
        return store if path.name_in_store == "" else store.below(path.name_in_store)

    def below(self, name: str) -> ObjectFolder:
        """Return the folder of a name, in the same store."""
        other = copy.copy(self)
        other._root, other.url = self._path(name), self / name
        return other

    @property
    def takes_parts(self) -> bool:
        """Whether an object can be uploaded in parts of any order, see `begin_upload`: S3."""
        return hasattr(self._fs, "call_s3")

    def begin_upload(self, name: str) -> Upload:
        """Begin an object that is uploaded in parts, where the store `takes_parts`."""
        return Upload(self, name)

    def can_copy_from(self, path: ObjectPath) -> bool:
        """Return whether the store can copy an object itself: it is in the same store, for the same user."""
        store = path.store
        return self.takes_parts and isinstance(store, ObjectFolder) and store._fs is self._fs

    def copy_source(self) -> dict[str, str]:
        """Return S3's name of this object as the source of a copy."""
        bucket, key, _ = self._fs.split_path(self._root)
        return {"Bucket": bucket, "Key": key}

    def request(self, doing: str, name: str, method: str, **arguments: Any) -> dict[str, Any]:
        """Make a request of S3's protocol about an object; see boto3's methods of a client."""
        bucket, key, _ = self._fs.split_path(self._path(name))

        def call() -> dict[str, Any]:
            return dict(self._fs.call_s3(method, Bucket=bucket, Key=key, **arguments))

        return self._repeated(call, doing, name)

    def _make_parent(self, name: str) -> None:
        """Make the folders above an object, where the store has folders."""
        if not self.has_buckets:
            parent = self._path(name).rpartition("/")[0]
            self._repeated(lambda: self._fs.makedirs(parent, exist_ok=True), "writing", name)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that are not there any more count as removed."""
        for name in names:

            def remove(name: str = name) -> None:
                with suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(name))

            self._repeated(remove, "removing", name)
        with self._turn:
            self._fs.invalidate_cache()

    def remove_folder(self, name: str = "") -> None:
        """Remove a folder, and what is in it, where the store has folders."""
        if not self.has_buckets:
            with suppress(FileNotFoundError), self._turn:  # fsspec's rm() takes the name for a pattern
                found = self._fs.find(self._path(name), withdirs=True, detail=True)
                for path in sorted(found, reverse=True):
                    (self._fs.rmdir if found[path]["type"] == "directory" else self._fs.rm_file)(path)

    def remove_uploads(self, is_left: Callable[[str], bool]) -> None:
        """Abort uploads in parts under this URL (S3), which killed processes have left; others, too, if there are any.

        Args:
            is_left: Returns whether the object of a name is to be given up.
        """
        if not self.takes_parts:
            return
        bucket, key, _ = self._fs.split_path(self._root)
        prefix = f"{key}/" if key else ""
        try:
            uploads = self._repeated(lambda: list(self._uploads(bucket, prefix)), "listing uploads of", "")
        except PermissionError as error:  # not needed for anything else
            logging.getLogger(__name__).debug("Uploads of killed processes stay under %s: %s", self.url, error)
            return
        for upload in uploads:
            key = upload["Key"]
            if is_left(key.removeprefix(prefix)):
                with suppress(Exception):
                    self._fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload["UploadId"])

    def _uploads(self, bucket: str, prefix: str) -> Iterator[dict[str, Any]]:
        after: dict[str, str] = {}
        while True:
            page = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **after)
            yield from page.get("Uploads", ())
            if not page.get("IsTruncated"):
                return
            after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _repeated(self, request: Callable[[], _T], doing: str, name: str) -> _T:
        deadline, pause = time.monotonic() + _LIMIT_S, _FIRST_PAUSE_S
        while True:
            try:
                with self._turn:
                    return request()
            except Exception as error:
                is_definite = isinstance(error, _DEFINITE) or "Credential" in type(error).__name__
                if is_definite or time.monotonic() + pause > deadline:
                    raise self._named(error, doing, name) from error
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _named(self, error: Exception, doing: str, name: str) -> Exception:
        """Return an error that names the object, which stores do not."""
        for kind in _DEFINITE:
            if isinstance(error, kind):
                return kind(f"{doing} {self / name}: {without_credentials(str(error))}")
        return OSError(f"{doing} {self / name} failed: {without_credentials(f'{type(error).__name__}: {error}')}")


class _ReadStream(io.RawIOBase):
    """An object that is read where the caller is, of long ranges several parts at once."""

    def __init__(self, folder: ObjectFolder, name: str, size: int) -> None:
        super().__init__()
        self._folder, self._name, self._size = folder, name, size
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position."""
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(begin + offset, 0)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill as much of ``buffer`` as there is."""
        view, begin = memoryview(buffer).cast("B"), self._position
        end = min(begin + len(view), self._size)
        for part in self._folder.read_parts(self._name, begin, end):
            at = self._position - begin
            view[at : at + len(part)] = part
            self._position += len(part)
        return self._position - begin


class Upload:
    """An object in parts, which is there when it is `complete`. Parts come in any order, from several threads.

    Source: Amazon S3's multipart upload: 1 to 10,000 parts, all but the last of at least 5 MiB and at most 5 GiB.
    """

    def __init__(self, folder: ObjectFolder, name: str) -> None:
        self._folder, self._name = folder, name
        self._id = self._request("create_multipart_upload")["UploadId"]
        self._parts: dict[int, dict[str, Any]] = {}

    def _request(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self._folder.request("writing", self._name, method, **arguments)

    def put(self, number: int, content: bytes | bytearray) -> None:
        """Upload a part; numbers begin at 1."""
        answer = self._request("upload_part", UploadId=self._id, PartNumber=number, Body=content)
        self._keep(number, answer)

    def copy(self, number: int, source: ObjectPath, begin: int, end: int) -> None:
        """Make the store copy bytes of another of its objects as a part."""
        answer = self._request(
            "upload_part_copy",
            UploadId=self._id,
            PartNumber=number,
            CopySource=ObjectFolder.of(source).copy_source(),
            CopySourceRange=f"bytes={begin}-{end - 1}",
        )
        self._keep(number, answer["CopyPartResult"])

    def _keep(self, number: int, answer: Mapping[str, Any]) -> None:
        sums = {name: value for name, value in answer.items() if name.startswith("Checksum") and name != "ChecksumType"}
        self._parts[number] = {"PartNumber": number, "ETag": answer["ETag"], **sums}

    def complete(self) -> None:
        """Put the parts together: the object is there."""
        parts = [self._parts[number] for number in sorted(self._parts)]
        try:
            self._request("complete_multipart_upload", UploadId=self._id, MultipartUpload={"Parts": parts})
        except FileNotFoundError:
            if not self._folder.consists_of(self._name, [part["ETag"] for part in parts]):
                raise

    def abort(self) -> None:
        """Give the parts up, as far as possible."""
        with suppress(Exception):
            self._request("abort_multipart_upload", UploadId=self._id)


class _Written(io.RawIOBase):
    """A stream that is written to the end, and knows where it is."""

    position = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self.position

    def write(self, data: Any) -> int:
        """Write all of ``data``.

        Raises:
            OSError: If bytes could not be written, these or earlier ones.
        """
        view = memoryview(data).cast("B")
        for at in range(0, len(view), PART_BYTES):
            self._take(view[at : at + PART_BYTES])
        self.position += len(view)
        return len(view)

    def _take(self, piece: memoryview) -> None:
        raise NotImplementedError


class _InPieces(_Written):
    """Passes on what is written in pieces: fsspec's streams copy what they are given before they send it."""

    def __init__(self, stream: Any, turn: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._stream, self._turn = stream, turn

    def _take(self, piece: memoryview) -> None:
        with self._turn:
            self._stream.write(piece)


def stream_part_bytes(number: int) -> int:
    """Return the size of a part of a stream, from 0: S3 takes 10,000, and nobody knows how long a stream will be."""
    return _STREAM_PART_BYTES * max(1, number // 400)


class _PartStream(_Written):
    """A stream into an object, of which several parts are uploaded at once; small ones are put by one request."""

    def __init__(self, folder: ObjectFolder, name: str, num_threads: int) -> None:
        super().__init__()
        self._folder, self._name = folder, name
        self._part = bytearray()
        self._upload: Upload | None = None
        self._num_parts = 0
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "accelight-upload")
        self._sent: deque[Future[None]] = deque()

    def _take(self, piece: memoryview) -> None:
        while len(piece):
            part_bytes = stream_part_bytes(self._num_parts)
            first = piece[: part_bytes - len(self._part)]
            self._part += first
            piece = piece[len(first) :]
            if len(self._part) == part_bytes:
                self._send()

    def _send(self) -> None:
        if self._upload is None:
            self._upload = self._folder.begin_upload(self._name)
        while len(self._sent) >= self._num_threads:
            self._sent.popleft().result()
        self._num_parts += 1
        self._sent.append(self._threads.submit(self._upload.put, self._num_parts, self._part))
        self._part = bytearray()

    def __exit__(self, error: object, *_: object) -> None:
        try:
            if error is None:
                self._complete()
        except BaseException:
            error = True
            raise
        finally:
            for one in self._sent:
                one.cancel()
            self._threads.shutdown()
            if error is not None and self._upload is not None:
                self._upload.abort()
            self.close()

    def _complete(self) -> None:
        if self._upload is None:
            self._folder.put(self._name, bytes(self._part))
            return
        if self._part:
            self._send()
        while self._sent:
            self._sent.popleft().result()
        self._upload.complete()


# ------------------------------------------------------------------------------------------------
# Checkpoints in such a folder: see [Note: generations].


def new_generation() -> str:
    """Return the name of a save, which no other has."""
    return uuid.uuid4().hex


def generation_of(paths: Iterable[str]) -> str:
    """Return the generation that relative paths begin with; nothing for a checkpoint without one."""
    first = next(iter(paths), "").partition("/")[0]
    return first if GENERATION.fullmatch(first) else ""


def has_checkpoint(folder: ObjectFolder, named_by: Sequence[str] = _NAMING) -> bool:
    """Return whether there is a sharded checkpoint; ``.metadata`` names FSDP's, and ``latest`` DeepSpeed's."""
    return any(folder.size(name) is not None for name in named_by)


def check_replaceable_objects(folder: ObjectFolder) -> None:
    """Check that a checkpoint may be written under this URL.

    Raises:
        IsADirectoryError: If there are objects that belong to no checkpoint, and no checkpoint.
        FileExistsError: If a file has the name, in a store with folders.
    """
    if not folder.has_buckets and folder.size() is not None:
        raise FileExistsError(f"{folder.url} is a file: it is not overwritten by a folder. Choose another name.")
    names = folder.names()
    foreign = [name for name in names if not is_own(name)]
    if foreign and not set(_NAMING) & set(names) and folder.size() is None:  # nor a checkpoint of one object
        raise IsADirectoryError(
            f"{folder.url} has objects under it but is not a checkpoint: it is not overwritten. It holds "
            f"{', '.join(foreign[:3])}. Choose another name, such as {folder / 'last.ckpt'}."
        )


def is_own(name: str) -> bool:
    """Return whether an object's name is one that a sharded checkpoint gives."""
    if unfinished := _UNFINISHED.fullmatch(name):
        name = f"{unfinished[1] or ''}{unfinished[2]}"
    first, _, rest = name.partition("/")
    if not (rest and GENERATION.fullmatch(first)):
        return _OWN.fullmatch(name) is not None
    return rest == WEIGHTS_IN_16_BIT or _OWN.fullmatch(rest) is not None


def remove_others(folder: ObjectFolder, generation: str, named_by: str = METADATA_NAME) -> None:
    """Remove the objects of all other saves under this URL; what belongs to no checkpoint stays.

    Args:
        folder: The URL.
        generation: Of the checkpoint that stays.
        named_by: What names it.
    """
    others = [name for name in folder.names() if is_own(name) and not name.startswith(f"{generation}/")]
    folder.remove(_naming_first(name for name in others if name != named_by))
    for name in {name.partition("/")[0] for name in others if "/" in name}:
        folder.remove_folder(name)
    folder.remove_uploads(lambda name: not name.startswith(f"{generation}/"))
    if folder.size() is not None:  # a checkpoint in one object had this name
        folder.remove([""])


def remove_checkpoint(folder: ObjectFolder) -> None:
    """Remove a sharded checkpoint; first what makes it one. What belongs to no checkpoint stays."""
    names = folder.names()
    own = [name for name in names if is_own(name)]
    folder.remove(_naming_first(own))
    folder.remove_uploads(lambda _: True)
    if len(own) == len(names):
        folder.remove_folder()


def _naming_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: name not in _NAMING)
