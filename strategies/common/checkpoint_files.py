"""Files and folders that the ranks write a checkpoint into together, where they lie, and files of ``torch.save``."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
import torch.distributed as dist
from fsspec.core import strip_protocol
from fsspec.utils import get_protocol
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from typing_extensions import override

from ...checkpoint.atomic_dir import (
    check_replaceable,
    drop_unfinished,
    drop_written_folder,
    keep_files_of_others,
    remove_folder,
    remove_unfinished,
    replace,
    unfinished_name,
)
from ...checkpoint.files import is_regular, translate_full_disk
from ...checkpoint.formats.torch_save import check_bytes
from ...checkpoint.storage import (
    ObjectFolder,
    check_replaceable_objects,
    has_checkpoint,
    is_remote,
    new_generation,
    remove_checkpoint,
    remove_others,
    without_credentials,
)
from ...state.rendezvous import raise_on_all_ranks, run_on_rank_zero
from ...state.utils import flag_from_env
from ..upstream.torch_core import tree_leaves

_log = logging.getLogger(__name__)
_UNFINISHED = ".tmp"
"""The suffix of torch's name for ``.metadata`` until it is complete."""


class AveragedWeights(Protocol):
    """Averages of the weights, for checkpoints beside these; see `ShardedEMA`."""

    tensors: dict[str, Tensor]
    """By the weights' names, sharded like these."""

    def aside(self) -> AbstractContextManager[bool]:
        """Restore the model's own weights in this context; it yields whether the model has averages outside of it."""
        ...


def with_own_weights(averages: AveragedWeights | None) -> AbstractContextManager[bool]:
    """Restore the model's own weights in this context, also where it has averages."""
    return nullcontext(False) if averages is None else averages.aside()


class NewFolder:
    """A folder that takes its name when it is complete. One rank calls this, wherever the others write from.

    Args:
        path: The name; a checkpoint that is there already is replaced, last of all. What it holds of others stays.
        number: Hexadecimal digits, for one that may still be written when another run begins to save under this name:
            the two must not write into each other's folder.
    """

    def __init__(self, path: Path, number: str = "") -> None:
        self.path = path
        self.unfinished = unfinished_name(path, number)
        """The path to write to until then."""
        self._mark: str | None = None

    def begin(self) -> str:
        """Make the folder, with nothing in it but what `check_shared` looks for, whose name is returned.

        What a killed run has left of a save under this name is removed, and so is what its processes still write:
        from now on they can neither write nor finish it.

        Raises:
            IsADirectoryError: If ``path`` is a folder that is no checkpoint; nothing is written then.
        """
        check_replaceable(self.path)
        remove_unfinished(self.path)
        self.unfinished.mkdir(parents=True)
        self._mark = mark(self.unfinished)
        return self._mark

    def check_shared(self, name: str) -> None:
        """Check that this is the folder that another process has made.

        Args:
            name: Result of its `begin`.

        Raises:
            RuntimeError: If it is not: the nodes share no disk here.
        """
        check_mark(self.unfinished, name)

    def finish(self, complete: Callable[[Path], None]) -> None:
        """Call ``complete``, which writes the rest into the given folder, and rename the folder."""
        with translate_full_disk(self.unfinished):
            if self._mark is not None:
                (self.unfinished / self._mark).unlink()
            complete(self.unfinished)
            keep_files_of_others(self.path, self.unfinished)
            replace(self.path, self.unfinished)

    def finish_own(self) -> None:
        """Do on the other processes what is left when `finish` has named it on one: nothing, but for `OwnFolder`."""

    def drop(self) -> None:
        """Remove what was written, also while others still write: a full disk would stay full."""
        drop_written_folder(self.unfinished, self.path)

    def drop_own(self) -> None:
        """Do so on the process that has made it, whichever calls this."""
        if dist.get_rank() == 0:
            self.drop()


class OwnFolder(NewFolder):
    """A folder of this process alone, see `in_own_folders`."""

    @override
    def check_shared(self, name: str) -> None:
        if dist.get_rank() != 0:
            self.begin()

    @override
    def finish_own(self) -> None:
        if dist.get_rank() != 0:
            self.finish(lambda _: None)  # the description of all parts is in process 0's

    @override
    def drop_own(self) -> None:
        self.drop()


class NewGeneration:
    """A checkpoint's objects under a URL, which count when `commit` names them; used as a `NewFolder`.

    Args:
        url: A checkpoint that is there already is replaced, last of all; see [Note: generations] in
            ``checkpoint/storage.py``.
        options: Of the file system.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.objects = ObjectFolder(url, options)
        self.path = self.objects.url
        self.generation = ""
        self._may_be_named = False

    @property
    def unfinished(self) -> str:
        """The place of the objects, for messages."""
        return self.objects / self.generation

    def begin(self) -> str:
        """Return the name of a new generation.

        Raises:
            IsADirectoryError: If what is there is no checkpoint; nothing is written then.
        """
        check_replaceable_objects(self.objects)
        return new_generation()

    def check_shared(self, name: str) -> None:
        """Write into the generation that another process has begun."""
        self.generation = name

    def commit(self, contents: Mapping[str, bytes], named_by: str, description: bytes) -> None:
        """Write what is missing, name all of it, and remove what was there before.

        Args:
            contents: Of the generation's last objects.
            named_by: The object that names the generation: ``.metadata``, or DeepSpeed's ``latest``.
            description: Its content.
        """
        for name, content in contents.items():
            self.objects.put(f"{self.generation}/{name}", content)
        self._may_be_named = True  # from here on, also if the answer to the request is lost
        self.objects.put(named_by, description)
        try:
            remove_others(self.objects, self.generation, named_by)
        except OSError as error:  # the checkpoint is there; the next save tries again
            _log.warning("The previous checkpoint under %s could not be removed: %s", self.path, error)

    def finish_own(self) -> None:
        """Nothing is left to do on the other processes."""

    def drop(self) -> None:
        """Remove what was written, as far as possible, unless the checkpoint may be named already."""
        if not self.generation or self._may_be_named:
            return
        with contextlib.suppress(OSError):
            self.objects.remove(name for name in self.objects.names() if name.startswith(f"{self.generation}/"))
            self.objects.remove_folder(self.generation)

    def drop_own(self) -> None:
        """Do so on process 0, the one that knows whether it has named the checkpoint."""
        if dist.get_rank() == 0:
            self.drop()


class ObjectStreams(FileSystem):
    """Files that torch.distributed.checkpoint writes, as objects of a store; ``.metadata`` last of all."""

    def __init__(self, objects: ObjectFolder) -> None:
        super().__init__()
        self._objects = objects
        self.error: Exception | None = None
        """The error of a stream: torch's threads do not report it."""

    @override
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        try:
            with self._objects.writing(str(path).removesuffix(_UNFINISHED)) as stream:
                yield cast("io.IOBase", stream)
        except Exception as error:
            self.error = error
            raise

    @override
    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"

    @override
    def init_path(self, path: str | os.PathLike[str]) -> str:
        return str(path)

    @override
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Do nothing: the object has its name already."""

    @override
    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing."""

    @override
    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False  # in a new generation


def folder_named(path: Path | str, options: Mapping[str, Any] | None = None) -> NewFolder | NewGeneration:
    """Return the folder to write a checkpoint into, as the caller's surroundings ask for it.

    Args:
        path: The name, or a URL; with `in_own_folders`, of this process's.
        options: Of the file system behind a URL.

    Raises:
        ValueError: For a URL inside of `in_own_folders`.
    """
    if is_remote(path):
        if writes_own_folders():
            raise ValueError(f"{path}: each process writes a folder of its own here, on a file system. Use a path.")
        return NewGeneration(str(path), options)
    return OwnFolder(Path(path)) if writes_own_folders() else NewFolder(Path(path))


def remove_saved(path: str | Path, remove_file: Callable[[], None]) -> None:
    """Remove a checkpoint, in one step where it is a folder; what others keep in it stays.

    Args:
        path: Or a URL; of a link, such as ``ModelCheckpoint(save_last="link")`` makes, the link goes alone.
        remove_file: Removes a checkpoint of one file.
    """
    if is_remote(path):
        objects = ObjectFolder(str(path))
        if has_checkpoint(objects):
            remove_checkpoint(objects)
            return
    elif Path(path).is_symlink():
        Path(path).unlink()
        return
    elif Path(path).is_dir():
        remove_folder(Path(path))
        return
    remove_file()


@contextmanager
def new_folder(
    folder: NewFolder | NewGeneration, finish: Callable[[], None], group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Give all ranks a folder to write into in the body; it takes its name when the body is done and it is complete.

    The body must fail on every rank if it fails on one.

    Args:
        folder: See `folder_named`.
        finish: Called on rank 0, in the end; finishes the folder.
        group: Through which the ranks agree; the default group by default.

    Raises:
        RuntimeError: On every rank, if rank 0 failed outside of the body.
        IsADirectoryError: As its cause, if something has the name that is no checkpoint; nothing is written then.
    """
    made = run_on_rank_zero(folder.begin, f"preparing {folder.unfinished}", group)
    try:
        with raise_on_all_ranks(f"saving {folder.path}", group):
            folder.check_shared(made)
        yield
        run_on_rank_zero(finish, f"finishing {folder.path}", group)
        folder.finish_own()
    except BaseException:
        folder.drop_own()
        raise


def new_file(
    path: Path, write: Callable[[Path], None], group: dist.ProcessGroup | None = None, *, beside: bool = True
) -> None:
    """Make rank 0 ``write`` one file and name it ``path``, where a sharded checkpoint may be in the way.

    Args:
        path: The file.
        write: Told where to write.
        group: Through which the ranks agree; the default group by default.
        beside: Whether that is beside ``path``, whose name the file gets when it is complete.

    Raises:
        RuntimeError: On every rank, if rank 0 failed.
        IsADirectoryError: As its cause, if ``path`` is a folder that is no checkpoint, or holds more than one.
    """

    def save_one() -> None:
        check_replaceable(path, by_file=True)
        if beside:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_unfinished(path)
            _write_beside(path, write)
            return
        if path.is_dir():
            remove_saved(path, path.unlink)
        write(path)

    run_on_rank_zero(save_one, f"saving {path}", group)


def _write_beside(path: Path, write: Callable[[Path], None]) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with translate_full_disk(unfinished):
            write(unfinished)
            replace(path, unfinished)
    except BaseException:
        drop_unfinished(unfinished)
        raise


_NUM_THREADS = 4
"""The number of threads that upload parts of one object."""


def save_object(content: Any, url: str, options: Mapping[str, Any] | None = None) -> None:
    """Write what ``torch.save`` makes of ``content`` as one object, where a sharded checkpoint may be in the way.

    Raises:
        OSError: If it cannot be written; it names the object.
    """
    folder, name = _parent_of(url, options)
    whole = folder.below(name)
    with folder.replacing(name, _NUM_THREADS) as stream:
        torch.save(content, stream)
        if not folder.has_buckets and has_checkpoint(whole):
            remove_checkpoint(whole)
    if folder.has_buckets and has_checkpoint(whole):
        remove_checkpoint(whole)


def open_object(url: str, storage_options: Mapping[str, Any] | None = None) -> AbstractContextManager[IO[bytes]]:
    """Open an object as a stream that can be searched.

    Raises:
        FileNotFoundError: If there is none.
    """
    folder, name = _parent_of(url, storage_options)
    return folder.reading(name)


def read_object(
    url: str, weights_only: bool | None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the object that `save_object`, or Lightning, has written; every rank reads it.

    Args:
        url: Of the object.
        weights_only: As in ``torch.load``.
        storage_options: Of the file system.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is not one of Lightning's checkpoints.
    """
    with open_object(url, storage_options) as stream:
        checkpoint: dict[str, Any] = torch.load(stream, map_location="cpu", weights_only=weights_only)
    check_full(checkpoint, without_credentials(url))
    return checkpoint


def _parent_of(url: str, options: Mapping[str, Any] | None = None) -> tuple[ObjectFolder, str]:
    parent, _, name = url.rstrip("/").rpartition("/")
    return ObjectFolder(parent, options), name


# ------------------------------------------------------------------------------------------------
# Checkpoints for nodes that share no disk: each process writes its part into a folder of its own.
#
# Whoever asks for that puts the folders together, into one that a run is gone on from: no two hold a file of one name.


_is_asked_for: ContextVar[bool] = ContextVar("accelight_own_folders", default=False)


@contextmanager
def in_own_folders() -> Iterator[None]:
    """Write checkpoints that begin inside this way; all processes must enter it, each saves to its own path.

    A checkpoint of one file is written to the path of process 0 alone, as always.
    """
    before = _is_asked_for.set(True)
    try:
        yield
    finally:
        _is_asked_for.reset(before)


def writes_own_folders() -> bool:
    """Return whether this thread is inside of `in_own_folders`."""
    return _is_asked_for.get()


# ------------------------------------------------------------------------------------------------
# Checks that all nodes share the folder of a checkpoint.


_PREFIX = ".accelight-shared-"
SEEN_WITHIN_S = 60.0
"""The longest time until a node sees a file that another one made: NFS clients cache a folder for so long."""
_PAUSE_S = 0.2


def mark(folder: Path) -> str:
    """Leave a file in ``folder`` for the other processes to look for; return its name, which no file had before."""
    name = f"{_PREFIX}{uuid.uuid4().hex}-{socket.gethostname()}"
    (folder / name).touch()
    return name


def check_mark(folder: Path, name: str) -> None:
    """Return when this process sees what another one has left with `mark`.

    Args:
        folder: Of the same path on all nodes.
        name: Result of `mark`.

    Raises:
        RuntimeError: If it does not see it for a minute: ``folder`` lies on a disk of the other node's own.
    """
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not (folder / name).exists():
        if time.monotonic() > deadline:
            made_by = name.removeprefix(_PREFIX).partition("-")[2]
            raise RuntimeError(
                f"{folder}, created on {made_by}, does not exist on {socket.gethostname()}: each process writes its "
                "part of a checkpoint into one shared folder. Save to a file system that all nodes share (NFS, "
                "Lustre), under the same absolute path; or save in one file, with state_dict_type='full_state_dict'."
            )
        with contextlib.suppress(OSError):
            os.listdir(folder)  # lets an NFS client ask its server again
        time.sleep(_PAUSE_S)


# ------------------------------------------------------------------------------------------------
# Places of checkpoints: a file system, or the storage behind a URL.


def local_path(path: str, what: str, instead: str = "") -> Path:
    """Return ``path`` on the file system; ``file://`` may stand before it.

    Args:
        path: A path or URL.
        what: What lies there, for the error.
        instead: What else to do, for the error; a sentence.

    Raises:
        ValueError: If it is a URL of something else. As a path, it would be a folder ``s3:`` right here.
    """
    if is_remote(path):
        raise ValueError(
            f"{path}: {what} must be on a file system that all processes share, not behind "
            f"{get_protocol(path)}://. Use a path{f', or {instead}' if instead else ''}."
        )
    return Path(strip_protocol(path) if "://" in path else path)


# ------------------------------------------------------------------------------------------------
# Files of ``torch.save``: written with clear errors of a full disk, read without a copy, each byte compared once.


def save_torch(content: Any, path: Path) -> None:
    """Write what ``torch.save`` makes of ``content``.

    Raises:
        OSError: If it cannot be written, with the path.
    """
    # To a stream: where torch opens the file itself, the system's error is lost.
    with translate_full_disk(path, num_bytes_of(content)), path.open("wb") as stream:
        torch.save(content, stream)


def read_torch(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Return the content of a single-file checkpoint, mapped into memory and not read; every rank must call it.

    Args:
        path: The file.
        weights_only: As in ``torch.load``.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If it is a folder, no regular file, or not what torch writes.
        RuntimeError: On every rank, if it is damaged.
    """
    if not path.exists():
        # As Lightning begins it: scripts look for these words.
        raise FileNotFoundError(f"Checkpoint file not found: {path}. Pass a path that trainer.save_checkpoint() wrote.")
    if path.is_dir():
        raise ValueError(
            f"{path}: a folder without `.metadata` is neither a sharded checkpoint nor a file. Pass a path that "
            "trainer.save_checkpoint() wrote as ckpt_path."
        )
    is_regular(path)  # else an error
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path} is not a checkpoint: torch.save() writes a zip file. Pass a path that trainer.save_checkpoint() "
            "wrote as ckpt_path; convert a file from torch before 1.6 with torch.save(torch.load(file))."
        )
    with raise_on_all_ranks(f"loading {path}"):
        if bytes_are_checked():
            check_bytes(path, (dist.get_rank(), dist.get_world_size()))
    return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)


def check_full(checkpoint: Mapping[str, Any], path: Path | str) -> None:
    """Check that a single-file checkpoint is one of Lightning's.

    Raises:
        ValueError: If it is not.
    """
    if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint:
        held = sorted(checkpoint) if isinstance(checkpoint, Mapping) else type(checkpoint).__name__
        raise ValueError(
            f"{path}: no 'state_dict' in it, only {held}. Is it a Lightning checkpoint? Load a file that holds only "
            "weights into the module before fit()."
        )


_RECORD_BYTES = 300  # what torch writes beside a tensor, about


def num_bytes_of(content: Any) -> int:
    """Return the size of a file with these nested containers, about; tensors that share memory count once."""
    storages: dict[object, int] = {}
    for leaf in tree_leaves(content):
        if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout == torch.strided:
            storages[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()
        elif isinstance(leaf, torch.Tensor):
            storages[id(leaf)] = leaf.numel() * leaf.element_size()
    return sum(storages.values()) + _RECORD_BYTES * len(storages)


# ------------------------------------------------------------------------------------------------
# The switch for comparing bytes with their checksums during a resume.


_VARIABLE = "ACCELIGHT_CHECK"


def bytes_are_checked() -> bool:
    """Return False where ``ACCELIGHT_CHECK=0`` says that a resume shall not read every byte for its checksum.

    Raises:
        ValueError: If it is no truth value.
    """
    return flag_from_env({_VARIABLE: os.environ.get(_VARIABLE) or "1"}, _VARIABLE)
