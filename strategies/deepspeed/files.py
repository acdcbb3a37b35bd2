"""The places of DeepSpeed's checkpoint files: a folder, or objects behind a URL.

DeepSpeed reads paths, several of them more than once, so a resume from a URL reads copies. What it writes goes through
its checkpoint engine, whose paths need not be any.

[Note: tags] A folder behind a URL is laid out as DeepSpeed's own: ``latest`` names the folder beside it that has the
files. That is the save's generation, see [Note: generations] in ``checkpoint/storage.py``.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ...checkpoint.files import CheckpointError, translate_full_disk
from ...checkpoint.formats.base import AVERAGED_WEIGHTS, DTYPES
from ...checkpoint.formats.safetensors import Entry, lay_out
from ...checkpoint.formats.torch_save import digest_of_file
from ...checkpoint.formats.zero_files import LATEST_NAME
from ...checkpoint.manifest import MANIFEST_NAME, FileDigest, Manifest, manifest_text, save_manifest
from ...checkpoint.object_path import NUM_THREADS, ObjectPath, in_order
from ...checkpoint.storage import WEIGHTS_IN_16_BIT, ObjectFolder
from ...state.rendezvous import raise_on_all_ranks, store_barrier, store_messages
from ..common.checkpoint_files import NewFolder, NewGeneration, ObjectStreams, num_bytes_of, save_torch
from .universal import TAG

_NUM_THREADS = 4
"""The number of threads that upload parts of a file; DeepSpeed writes one file after the other."""
_FILE = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_\d+_(model|optim)_states\.pt")
_FORMAT = {"format": "pt"}


class LocalFiles:
    """Takes a checkpoint's files into a folder.

    Args:
        folder: Begun when the first file comes.
        engine: DeepSpeed's.
    """

    tag = TAG

    def __init__(self, folder: NewFolder, engine: Any) -> None:
        self._folder = folder
        self._checkpoint_engine = engine.checkpoint_engine
        self.make_folder: Callable[..., Any] = engine.checkpoint_engine.makedirs
        self.copy_script: Callable[..., Any] = engine._copy_recovery_script

    @property
    def place(self) -> str:
        """The prefix of paths."""
        return str(self._folder.unfinished)

    def save(self, state: Any, path: Path) -> None:
        """Write a file of the engine's."""
        if _is_torchs(self._checkpoint_engine):
            save_torch(state, path)  # what that engine does, with the system's error where it fails
            return
        with translate_full_disk(path, num_bytes_of(state)):
            self._checkpoint_engine.save(state, str(path))

    def averages_writer(self) -> FileSystemWriter:
        """Return the writer of the averages of weights."""
        return FileSystemWriter(self._folder.unfinished / AVERAGED_WEIGHTS)

    def digests(self) -> dict[str, FileDigest]:
        """Return the digests of DeepSpeed's files."""
        return _digests_of((self._folder.unfinished / TAG).glob("*_states.pt"), f"{TAG}/")

    def finish(self, manifest: Manifest, of_averages: Manifest | None, weights: Mapping[str, Tensor]) -> None:
        """Write the rest, and give the folder its name; on rank 0.

        Args:
            manifest: Of the checkpoint.
            of_averages: Of the averages, where there are any.
            weights: In 16 bits, where the user asks for them.
        """

        def complete(folder: Path) -> None:
            (folder / LATEST_NAME).write_text(TAG)
            if weights:
                with translate_full_disk(folder / WEIGHTS_IN_16_BIT, num_bytes_of(weights)):
                    save_file(dict(weights), folder / WEIGHTS_IN_16_BIT, metadata=_FORMAT)
            save_manifest(folder, manifest)
            if of_averages is not None:
                save_manifest(folder / AVERAGED_WEIGHTS, of_averages)

        self._folder.finish(complete)


class StagedFiles:
    """Takes what a checkpoint's files will hold, to be copied and written later; used as `LocalFiles` by the engine.

    Args:
        files: The files that will be written.
    """

    tag = TAG

    def __init__(self, files: LocalFiles | ObjectFiles) -> None:
        self.place = files.place
        self._files = files
        self.states: dict[str, Any] = {}
        """By the names of this rank's files."""
        self._has_scripts = False

    def make_folder(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is nothing yet."""

    def copy_script(self, *_: Any) -> None:
        """Note that this rank has to write DeepSpeed's scripts."""
        self._has_scripts = True

    def save(self, state: Any, path: Path) -> None:
        """Take a file of the engine's; training continues to change its tensors."""
        self.states[path.name] = state

    def write(self, states: Mapping[str, Any]) -> None:
        """Write this rank's files, in the folder that has been begun meanwhile.

        Args:
            states: Copies of what was taken.
        """
        folder = Path(self._files.place, self._files.tag)
        self._files.make_folder(folder, exist_ok=True)
        for name, state in states.items():
            self._files.save(state, folder / name)
        if self._has_scripts:
            self._files.copy_script(self._files.place)


class ObjectFiles:
    """Takes a checkpoint's files into a generation behind a URL; as `LocalFiles`.

    Args:
        folder: Begun when the first file comes.
        engine: DeepSpeed's.

    Raises:
        ValueError: If the engine writes in another way than by ``torch.save``, or keeps state on NVMe.
    """

    def __init__(self, folder: NewGeneration, engine: Any) -> None:
        if what := written_elsewhere(engine):
            raise ValueError(f"saving {folder.path}: {what} need a file system. Save to a path, and upload the folder.")
        self._folder = folder
        self.place = folder.path

    @property
    def tag(self) -> str:
        """The folder below the URL."""
        return self._folder.generation

    def make_folder(self, *_: Any, **__: Any) -> None:
        """Do nothing: objects need none."""

    def copy_script(self, *_: Any) -> None:
        """Leave DeepSpeed's scripts out, which read files."""

    @contextmanager
    def _writing(self, name: str) -> Iterator[IO[bytes]]:
        with self._folder.objects.writing(f"{self.tag}/{name}", _NUM_THREADS) as stream:
            yield stream

    def save(self, state: Any, path: Path) -> None:
        """Write a file of the engine's."""
        with self._writing(path.name) as stream:
            torch.save(state, stream)

    def averages_writer(self) -> FileSystemWriter:
        """Return the writer of the averages of weights."""
        writer = FileSystemWriter(".", sync_files=False)
        writer.fs, writer.path = ObjectStreams(self._folder.objects), f"{self.tag}/{AVERAGED_WEIGHTS}"
        return writer

    def digests(self) -> dict[str, FileDigest]:
        """Return the digests of DeepSpeed's files."""
        return _digests_of((ObjectPath(self._folder.objects) / self.tag).glob("*_states.pt"), "")

    def finish(self, manifest: Manifest, of_averages: Manifest | None, weights: Mapping[str, Tensor]) -> None:
        """Write the rest, and name the generation; on rank 0."""
        if weights:
            self._save_safetensors(weights)
        contents = {MANIFEST_NAME: manifest_text(manifest).encode()}
        if of_averages is not None:
            contents[f"{AVERAGED_WEIGHTS}/{MANIFEST_NAME}"] = manifest_text(of_averages).encode()
        self._folder.commit(contents, LATEST_NAME, self.tag.encode())

    def _save_safetensors(self, weights: Mapping[str, Tensor]) -> None:
        def describe(name: str) -> Entry:
            weight = weights[name]
            return Entry(name, DTYPES[str(weight.dtype).removeprefix("torch.")], tuple(weight.shape), weight.nbytes)

        layout = lay_out(weights, describe, _FORMAT)
        with self._writing(WEIGHTS_IN_16_BIT) as stream:
            for block in layout.header:
                stream.write(block)
            for name in layout.names:
                stream.write(weights[name].reshape(-1).view(torch.uint8).numpy().data)


def written_elsewhere(engine: Any) -> str:
    """Name what an engine writes in another way than by ``torch.save``; empty if there is nothing."""
    if engine.zero_nvme_offload_optimizer():
        return "optimizer states on NVMe"
    kind = type(engine.checkpoint_engine).__name__
    return "" if _is_torchs(engine.checkpoint_engine) else f"DeepSpeed's {kind}"


def _is_torchs(engine: Any) -> bool:
    is_torchs = type(engine).__name__ == "TorchCheckpointEngine"
    return is_torchs and bool(getattr(engine, "zipfile_serialization", False))


def _digests_of(files: Iterable[Path], place: str) -> dict[str, FileDigest]:
    def digest(file: Path) -> FileDigest | None:
        with suppress(CheckpointError):  # torch's old format, which DeepSpeed can be set to write
            return digest_of_file(file)
        return None

    files = sorted(files)
    found = zip(files, in_order(digest, files, NUM_THREADS), strict=True)
    return {f"{place}{file.name}": one for file, one in found if one is not None}


# ------------------------------------------------------------------------------------------------
# Copies of checkpoints behind URLs, for DeepSpeed to read.


class Download:
    """A copy of a checkpoint on this node's disk, with the files that its ranks read; each is fetched by one of them.

    Args:
        path: The folder, laid out as behind the URL.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.own: list[Path] = []
        """The files that this rank has fetched."""
        self._remove = weakref.finalize(self, shutil.rmtree, path, True)  # also where the load fails

    def once(self, name: str, action: Callable[[Path], None]) -> bool:
        """Call ``action`` with the path of a new file, on one rank of the node; return whether this is the one.

        It is done when the others have come to the end of a `raise_on_all_ranks`.
        """
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.touch(exist_ok=False)
        except FileExistsError:
            return False
        action(target)
        return True

    def remove(self) -> None:
        """Remove it; every rank calls this, when it reads no more of it."""
        store_barrier("loading a checkpoint")
        self._remove()


def download(source: ObjectPath, tag: str, *, with_optimizer: bool, whole: bool) -> Download:
    """Copy what this rank needs of a checkpoint to a temporary folder; every rank calls it.

    Args:
        source: The checkpoint.
        tag: The folder in it with DeepSpeed's files.
        with_optimizer: Whether it needs optimizer states.
        whole: Whether it needs those of all ranks, else its own.

    Raises:
        RuntimeError: On every rank, if one could not read or write a file.
    """
    token = store_messages().broadcast_from_rank_zero(lambda: uuid.uuid4().hex, f"loading {source}")
    copy = Download(Path(tempfile.gettempdir(), f"accelight-{token}"))
    with raise_on_all_ranks(f"loading {source}"):
        files = list(_files(source, tag, with_optimizer=with_optimizer, whole=whole))
        first = dist.get_rank() * len(files) // dist.get_world_size()  # the ranks of a node begin with different ones
        for file in (*files[first:], *files[:first]):
            name = str(file.relative_to(source))
            if copy.once(name, partial(_fetch, file)):
                copy.own.append(copy.path / name)
    return copy


def _files(source: ObjectPath, tag: str, *, with_optimizer: bool, whole: bool) -> Iterator[ObjectPath]:
    for name in (LATEST_NAME, MANIFEST_NAME):
        if (source / name).is_file():
            yield source / name
    for file in (source / tag).iterdir():
        match = _FILE.fullmatch(file.name)
        if match is not None:
            rank, kind = match.groups()
            own = {None, str(dist.get_rank())} | ({"0"} if kind == "model" else set())  # which has the Trainer's state
            is_needed = (with_optimizer or kind == "model") and (rank in own or (with_optimizer and whole))
        if file.name == MANIFEST_NAME if match is None else is_needed:
            yield file


def _fetch(source: ObjectPath, target: Path) -> None:
    """Copy an object into a file."""
    size = source.stat().st_size
    with translate_full_disk(target, size), target.open("wb") as stream:
        stream.writelines(ObjectFolder.of(source).read_parts("", 0, size))
