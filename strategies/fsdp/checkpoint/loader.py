"""Loading weights and optimizer state into a sharded model, from any kind of checkpoint.

The Trainer reads a checkpoint before the model is sharded. Where a full one has tensors, it gets a
`LazyShardedState`, which is loaded afterwards.
"""

from __future__ import annotations

import io
import logging
import os
import pathlib
import re
from ast import literal_eval
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future
from torch.optim import Optimizer
from typing_extensions import override

from ....checkpoint.files import CheckpointError, is_regular, listed, open_file, read_regular
from ....checkpoint.formats.base import AVERAGED_WEIGHTS, MAX_BYTES, MODEL_KEYS, is_contiguous
from ....checkpoint.formats.dcp import RecordReader
from ....checkpoint.formats.dcp_metadata import (
    MAX_METADATA_BYTES,
    METADATA_NAME,
    DCPMetadata,
    Layout,
    StoredRecord,
    offset_key,
    parse_dcp_metadata,
)
from ....checkpoint.formats.safe_unpickler import SafeCall, Sealed, load_restricted
from ....checkpoint.manifest import (
    MANIFEST_NAME,
    Digests,
    FileDigest,
    Manifest,
    RecordDigests,
    description_folder,
    parse_manifest,
    read_manifest,
)
from ....checkpoint.object_path import PART_BYTES, ObjectPath, in_order
from ....checkpoint.storage import ObjectFolder, generation_of, source_path
from ....state.rendezvous import raise_on_all_ranks, store_messages
from ...common.checkpoint_files import bytes_are_checked
from ...common.loop import STORED_WEIGHTS
from ...common.modules import check_constants, constants_of, is_constant, is_extra_state
from ...upstream.lightning_package import lightning_package
from ...upstream.torch_core import _StorageInfo, unflatten_state_dict
from ..sharded_model import NamedTensor, ShardedModel, load_model_state_dict, model_state_dict
from .optim_state_dict import restore_full_optimizer, restore_optimizer
from .state_dict import without_torch_noise
from .writer import METADATA_FILE

_log = logging.getLogger(__name__)


def read_sharded(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Return the Trainer's checkpoint of a folder of any of the four kinds (FSDP1's and FSDP2's, ours and Lightning's).

    Args:
        path: The folder.
        weights_only: For the metadata file, as in ``torch.load``.

    Raises:
        ValueError: If the folder holds no model weights.
        RuntimeError: On every rank, if what is read here is damaged.
    """
    with raise_on_all_ranks(f"loading {path}", store_messages()):
        manifest = read_manifest(path)
        digests = {} if manifest is None else manifest.digests
        reader = SafeReader(path, digests)
        reader.read_metadata()
        checkpoint = read_metadata(description_folder(path), weights_only, digests.get(METADATA_FILE))
        return with_stored_states(checkpoint, path, reader, manifest)


def with_stored_states(
    checkpoint: dict[str, Any], path: Path | str, reader: SafeReader, manifest: Manifest | None
) -> dict[str, Any]:
    """Put what stands for weights and optimizer states into the Trainer's checkpoint.

    Args:
        checkpoint: Without them.
        path: Of the folder, for errors.
        reader: Of the folder.
        manifest: In the folder.

    Raises:
        ValueError: If the folder holds no model weights.
    """
    names = reader.read_metadata().state_dict_metadata
    model_key = _model_key(names, path)
    left_out = frozenset(() if manifest is None else manifest.left_out)
    checkpoint[STORED_WEIGHTS] = LazyShardedState(path, model_key, reader, left_out=left_out)
    if any(name.startswith(f"{AVERAGED_WEIGHTS}.") for name in names):
        checkpoint[AVERAGED_WEIGHTS] = LazyShardedState(path, AVERAGED_WEIGHTS, reader)
    if "lr_schedulers" in checkpoint:  # not one of weights alone
        num_stored = len({name.split(".", 1)[0] for name in names if name.startswith("optimizer_")})
        checkpoint["optimizer_states"] = [
            LazyShardedState(path, f"optimizer_{index}", reader) for index in range(num_stored)
        ]
    return checkpoint


def read_accelerate(folder: AccelerateFolder, *, with_optimizer: bool) -> dict[str, Any]:
    """Return a Trainer's checkpoint for a folder that Accelerate saved.

    Args:
        folder: Where its parts are.
        with_optimizer: Whether they are to be trained, and not evaluated.

    Raises:
        ValueError: If the folder holds no model weights.
        RuntimeError: On every rank, if what is read here is damaged.
    """
    with raise_on_all_ranks(f"loading {folder.model.parent}", store_messages()):
        reader, readers = _reader_of(folder.model), [_reader_of(path) for path in folder.optimizers]
        names = reader.read_metadata().state_dict_metadata
        for one in readers:
            one.read_metadata()
        model_key = _model_key(names, folder.model)
    weights = [name.removeprefix(f"{model_key}.") for name in names]
    checkpoint = trainer_state(folder, with_optimizer=with_optimizer)
    checkpoint[STORED_WEIGHTS] = LazyShardedState(folder.model, model_key, reader, weights)
    checkpoint["optimizer_states"] = [
        LazyShardedState(path, OPTIMIZER_KEY, own, weights)
        for path, own in zip(folder.optimizers, readers, strict=True)
    ]
    return checkpoint


def _reader_of(folder: Path) -> SafeReader:
    return ObjectReader(ObjectFolder.of(folder)) if isinstance(folder, ObjectPath) else SafeReader(folder)


@dataclass(frozen=True)
class LazyShardedState:
    """The weights, or an optimizer's state, in a folder."""

    path: Path | str
    key: str
    """Above all of its names."""
    reader: SafeReader = field(repr=False)
    """Of the folder; it keeps the metadata."""
    of_accelerate: Sequence[str] = field(default=(), repr=False)
    """The names of all weights, where Accelerate saved them: they may lack the attribute that holds the model."""
    left_out: frozenset[str] = field(default=frozenset(), repr=False)
    """Frozen weights that the folder lacks, since the module brings them."""

    def own(self) -> dict[str, Any]:
        """Return the part's entries, without its key."""
        start, entries = f"{self.key}.", self.reader.read_metadata().state_dict_metadata
        return {name.removeprefix(start): entry for name, entry in entries.items() if name.startswith(start)}

    def prefix(self, present: Iterable[str], attribute: str | None) -> str:
        """Return the prefix that its names lack, compared with those that are present."""
        return missing_prefix(self.of_accelerate, present, attribute) if self.of_accelerate else ""

    @without_torch_noise()
    def load_weights(self, sharded: ShardedModel, module: nn.Module, *, strict: bool) -> None:
        """Load weights into a sharded model; every rank must call it.

        Args:
            sharded: The sharded model.
            module: What ``Engine.state_dict_module`` returns of it.
            strict: Whether every name must be on both sides; otherwise the common ones are loaded, the rest logged.

        Raises:
            RuntimeError: If ``strict`` and names are missing or unexpected; all are listed.
        """
        present = model_state_dict(module)
        prefix = self.prefix(present, sharded.module_attribute)
        extra = self._extra_states(present, prefix)
        constants = {name: one.clone() for name, one in constants_of(module).items()}
        parts = tuple(f"{name}." for name in extra)  # DCP saves dictionaries and lists entry by entry
        known = {**present, **extra, **constants}
        stored = {name for name in (f"{prefix}{one}" for one in self.own()) if not (parts and name.startswith(parts))}
        stored = {name for name in stored if name in constants or not is_constant(name, present)}
        wanted = {name: value for name, value in known.items() if name not in self.left_out}
        weights = _common_names(wanted, stored | extra.keys(), strict, self.path)
        held = {name.removeprefix(prefix): value for name, value in weights.items()}
        _load(self, {self.key: held})
        loaded = {f"{prefix}{name}": value for name, value in held.items()}
        check_constants({name: loaded.pop(name) for name in constants if name in loaded}, module, self.path)
        load_model_state_dict(module, loaded, strict=strict and not self.left_out)

    @without_torch_noise()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the part's tensors of these names into these; every rank must call it.

        Raises:
            RuntimeError: On every rank, if the part lacks some.
        """
        with raise_on_all_ranks(f"loading {self.path}", store_messages()):
            missing = sorted(set(tensors) - set(self.own()))
            if missing:
                raise RuntimeError(
                    f"{self.path} has no averages of {listed(missing)}, which train now. Train what trained then."
                )
        _load(self, {self.key: dict(tensors)})

    def _extra_states(self, present: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Return places for what modules keep beside tensors, in the form it was saved in: that may change in training.

        Args:
            present: The module's state dict.
            prefix: What stored names lack.
        """
        own = {name.removeprefix(prefix): value for name, value in present.items() if is_extra_state(name)}
        nothing = {name: value for name, value in own.items() if value == {}}  # no entry in the folder
        places = self._places(own.__contains__) if own else {}
        return {f"{prefix}{name}": place for name, place in {**nothing, **places}.items()}

    def _places(self, accept: Callable[[str], bool]) -> dict[str, Any]:
        entries, paths = self.reader.read_metadata().state_dict_metadata, dict[str, tuple[str | int, ...]]()
        for fqn, path in self.reader.read_paths().items():
            if path[0] == self.key and len(path) > 1 and accept(str(path[1])):
                paths[fqn] = path
        places: dict[str, Any] = unflatten_state_dict({fqn: _place(entries[fqn]) for fqn in paths}, paths)
        return places.get(self.key, {})

    @without_torch_noise()
    def read_extra_states(self) -> dict[str, Any]:
        """Return what modules keep beside tensors, by stored names; one process calls it."""
        states = self._places(is_extra_state)
        _load_alone(self, {self.key: states})
        return states

    @without_torch_noise()
    def load_optimizer(
        self, sharded: ShardedModel, module: nn.Module, optimizer: Optimizer, *, num_steps: int | None
    ) -> None:
        """Load an optimizer's state; every rank must call it.

        Args:
            sharded: The sharded model.
            module: What ``Engine.state_dict_module`` returns of it.
            optimizer: Which is restored.
            num_steps: Optimizer steps of the run that saved it, if that is known.
        """
        present = model_state_dict(module) if self.of_accelerate else {}
        prefix = self.prefix(present, sharded.module_attribute)
        held = {re.sub(r"^state\.", f"state.{prefix}", name): entry for name, entry in self.own().items()}

        def fill(template: dict[str, Any]) -> None:
            states = {name.removeprefix(prefix): state for name, state in template["state"].items()}
            _load(self, {self.key: {**template, "state": states}}, partial=True)
            for group in template["param_groups"]:
                group["params"] = [f"{prefix}{name}" for name in group["params"]]

        restore_optimizer(module, optimizer, held, fill, num_steps=num_steps)


class StoredOptimizer(Protocol):
    """An optimizer's state that is not a plain state dict."""

    def load_optimizer(
        self, sharded: ShardedModel, module: nn.Module, optimizer: Optimizer, *, num_steps: int | None
    ) -> None:
        """Load it; every rank must call it."""


def read_metadata(path: Path, weights_only: bool | None, digest: FileDigest | None = None) -> dict[str, Any]:
    """Return the content of the file for everything but weights and optimizer state.

    Raises:
        ValueError: If there is none.
    """
    file = path / METADATA_FILE
    content = read_regular(file, MAX_BYTES, "the Trainer's state") if is_regular(file) else None
    return _metadata(content, path, file, weights_only, digest)


def read_extra_states(folder: Path) -> dict[str, Any]:
    """Return what modules keep beside tensors in a folder, by stored names; one process calls it."""
    if isinstance(folder, ObjectPath):
        reader = _reader_of(folder)  # which has the digests itself
    else:
        manifest = read_manifest(folder)
        reader = SafeReader(folder, {} if manifest is None else manifest.digests)
    key = _model_key(reader.read_metadata().state_dict_metadata, folder)
    return LazyShardedState(folder, key, reader).read_extra_states()


def _metadata(
    content: bytes | None, path: object, file: object, weights_only: bool | None, digest: FileDigest | None
) -> dict[str, Any]:
    if content is None:
        raise ValueError(
            f"{path} has no {METADATA_FILE}, which Lightning and accelight write next to the weights: other software "
            "saved it, and the Trainer cannot resume from it. To start from its weights, merge them (accelight "
            "merge-weights), and pass the result as pretrained_weights, or load it into the module before fit()."
        )
    if digest is not None:
        digest.check(file, content)
    return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=weights_only))


def _load(part: LazyShardedState, state: dict[str, Any], *, partial: bool = False) -> None:
    """Load what this rank needs, by its own plan: torch (2.11 to 2.15) does not change plans when it joins them."""
    with raise_on_all_ranks(f"loading {part.path}", store_messages()):
        _load_alone(part, state, partial=partial)


def _load_alone(part: LazyShardedState, state: dict[str, Any], *, partial: bool = False) -> None:
    try:
        load(state, storage_reader=part.reader, planner=SafePlanner(allow_partial_load=partial), no_dist=True)
    except CheckpointException as error:  # which is no Exception, and holds one
        [(own, _)] = error.failures.values()
        raise own from error


def _model_key(names: Iterable[str], path: Path | str) -> str:
    prefixes = {name.split(".", 1)[0] for name in names}
    for key in MODEL_KEYS:
        if key in prefixes:
            return key
    raise ValueError(f"{path}: holds no weights under {' or '.join(map(repr, MODEL_KEYS))}, only {sorted(prefixes)}.")


def _has_parameters(optimizer: Optimizer) -> bool:
    """Return False for what Lightning makes where ``configure_optimizers`` returns None."""
    return any(group["params"] for group in optimizer.param_groups)


def _place(entry: TensorStorageMetadata | BytesStorageMetadata) -> Any:
    if isinstance(entry, BytesStorageMetadata):
        return None
    return torch.zeros(entry.size, dtype=entry.properties.dtype)


def _common_names(weights: dict[str, Any], stored: set[str], strict: bool, path: Path | str) -> dict[str, Any]:
    """Return the weights that the checkpoint has; report the rest, or raise if ``strict``."""
    missing, unexpected = sorted(set(weights) - stored), sorted(stored - set(weights))
    if missing or unexpected:
        report = f"{path}: missing in the checkpoint: {missing}; unexpected in the checkpoint: {unexpected}."
        if strict:
            raise RuntimeError(
                f"{report} Set `strict_loading=False` on the LightningModule to load the rest. (on_load_checkpoint() "
                "can rename entries of full checkpoints, but not of sharded ones.)"
            )
        if dist.get_rank() == 0:
            _log.warning(report)
    return {name: value for name, value in weights.items() if name in stored}


def _copy_own_part(name: str, full: Tensor, target: Tensor) -> None:
    """Copy this rank's part of a full tensor into its shard, or all of it where nothing is sharded.

    Raises:
        RuntimeError: If the shapes differ.
    """
    if full.shape != target.shape:
        raise RuntimeError(f"{name}: {tuple(full.shape)} in the checkpoint, {tuple(target.shape)} in the model.")
    named = NamedTensor((name,), target, persistent=True)
    offsets, sizes = named.part()
    named.local().copy_(full[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))])


@without_torch_noise()
def load_full_weights(
    stored: Mapping[str, Any], path: Path | str, module: nn.Module, *, strict: bool, left_out: Container[str] = ()
) -> None:
    """Load a full state dict into a sharded model; each rank copies its own shards out of it.

    Args:
        stored: By name full tensors, which may lie in a file that is mapped into memory, and modules' extra states.
        path: The file, for errors.
        module: What ``Engine.state_dict_module`` returns.
        strict: Whether every name must be on both sides.
        left_out: Names that may be missing, since the module brings them.

    Raises:
        RuntimeError: If ``strict`` and names are missing or unexpected.
    """
    known = model_state_dict(module)
    wanted = {name: value for name, value in known.items() if name not in left_out}
    present = _common_names(wanted, {name for name in stored if not is_constant(name, known)}, strict, path)
    check_constants(stored, module, path)
    for name, target in present.items():
        if is_extra_state(name):
            present[name] = stored[name]
        else:
            _copy_own_part(name, stored[name], target)
    load_model_state_dict(module, present, strict=strict and not left_out)


@without_torch_noise()
def load_optimizers(
    checkpoint: Mapping[str, Any], sharded: ShardedModel, module: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Load the states of all optimizers from a checkpoint of any kind; every rank must call it.

    Args:
        checkpoint: The Trainer's. A plain optimizer's state has no names, only numbers.
        sharded: The sharded model.
        module: What ``Engine.state_dict_module`` returns of it.
        optimizers: Those of the running fit.

    Raises:
        ValueError: If the checkpoint has those of another number of optimizers, or they do not fit.
    """
    states: Sequence[StoredOptimizer | dict[str, Any]] = checkpoint["optimizer_states"]
    if not states:
        return
    if len(states) != len(optimizers):
        raise ValueError(
            f"The checkpoint holds {len(states)} optimizers, but configure_optimizers returned {len(optimizers)}. "
            "Resume with the same number."
        )
    num_steps = checkpoint.get("global_step")
    for optimizer, state in zip(optimizers, states, strict=True):
        if not _has_parameters(optimizer):
            continue
        if isinstance(state, Mapping):
            restore_full_optimizer(module, optimizer, state, sharded.order, num_steps=num_steps)
        else:
            state.load_optimizer(sharded, module, optimizer, num_steps=num_steps)


# ------------------------------------------------------------------------------------------------
# Reading DCP folders through torch without executing their pickles.
#
# torch 2.13 unpickles ``.metadata`` and non-tensor entries without restriction; a checkpoint from elsewhere could run
# code in every process. Here both go through allow-lists.


_DTYPES = tuple(value for value in vars(torch).values() if isinstance(value, torch.dtype))
_CLASSES = (
    dcp.Metadata,
    dcp.MetadataIndex,
    dcp.ChunkStorageMetadata,
    dcp.TensorStorageMetadata,
    dcp.BytesStorageMetadata,
    dcp.TensorProperties,
    dcp.StorageMeta,
)


def _allowed() -> dict[tuple[str, str], object]:
    """Return the names that ``.metadata`` may contain.

    Classes are throw-away subclasses, because a pickle makes objects of what it names, and keys of dicts. As keys they
    hash by identity: their fields may be tuples without end.
    """
    here, by_identity = dcp.__name__, {"__hash__": object.__hash__, "__eq__": object.__eq__}
    table: dict[tuple[str, str], object] = {("torch", str(dtype).removeprefix("torch.")): dtype for dtype in _DTYPES}
    for original in _CLASSES:
        table[(here, original.__name__)] = Sealed(original.__name__, (original,), {"__module__": here, **by_identity})
    table[(_StorageInfo.__module__, "_StorageInfo")] = Sealed("_StorageInfo", (_StorageInfo,), by_identity)
    table[("torch", "Size")] = SafeCall(torch.Size)
    table[("torch.serialization", "_get_layout")] = SafeCall(lambda name: torch.strided)
    for name in ("_MEM_FORMAT_ENCODING", "TensorProperties._MEM_FORMAT_ENCODING"):
        table[(here, name)] = SafeCall(lambda value: dcp._MEM_FORMAT_ENCODING(value))
    for name in ("PosixPath", "WindowsPath", "PurePosixPath"):
        for module in ("pathlib", "pathlib._local"):  # Python 3.13 pickles paths under the second
            table[(module, name)] = SafeCall(lambda *parts: pathlib.PurePosixPath(*parts))
    return table


class _RegularFiles(FileSystem):
    """Opens regular files alone: a FIFO in the place of a shard would be waited for."""

    @override
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with os.fdopen(open_file(pathlib.Path(path)), mode) as stream:
            yield cast("io.IOBase", stream)


class SafeReader(FileSystemReader):
    """A ``FileSystemReader`` whose metadata comes through the restricted unpickler, and whose bytes are checked.

    Args:
        path: The folder.
        digests: Of its files, where they are known.
    """

    def __init__(self, path: pathlib.Path, digests: Digests | None = None) -> None:
        super().__init__(path)
        self.fs = _RegularFiles()
        self._digests = digests or {}
        self._metadata: Metadata | None = None
        self._places: Mapping[str, Sequence[int]] = {}
        """The offsets of the records in each file, once the description is read."""

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._check(plan)
        return super().read_data(plan, planner)

    def _check(self, plan: LoadPlan) -> None:
        """Compare the records that are about to be read with the checksums in them."""
        digests = RecordDigests(self._digests, self._places, self._what)
        bytes_too = bytes_are_checked()
        wanted: dict[str, dict[tuple[int, int], str]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            if not info.transform_descriptors:
                name = item.storage_index.fqn
                wanted.setdefault(info.relative_path, {}).setdefault((info.offset, info.length), name)
        for relative, records in wanted.items():
            path = pathlib.Path(self.path) / relative
            with os.fdopen(open_file(path), "rb") as stream:
                read_at, size = partial(os.pread, stream.fileno()), os.fstat(stream.fileno()).st_size
                reader = RecordReader(read_at, str(path), size)
                for (offset, length), name in sorted(records.items()):
                    reader.check(name, offset, length, digests.of(relative, offset), bytes_too=bytes_too)

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the folder's metadata, read once."""
        if self._metadata is None:
            self._metadata = self._read_metadata()
        return self._metadata

    def read_paths(self) -> Mapping[str, tuple[str | int, ...]]:
        """Return the paths of the folder's entries in nested states; nothing if they were in none."""
        paths = self._read_objects().planner_data
        return paths if isinstance(paths, Mapping) else {}

    def _read_metadata(self) -> Metadata:
        try:
            content = parse_dcp_metadata(self._content(), self._what)
        except CheckpointError:  # what no merge can read: of a dtype that safetensors does not have, say
            return self._read_objects()
        for name in content.offsets:
            _check_inside(self._what, name)
        self._places = content.offsets
        loaded = torch_metadata(content)
        cast("dcp.StorageMeta", loaded.storage_meta).load_id = self.load_id
        return loaded

    @property
    def _what(self) -> str:
        """The description, in errors."""
        return f"{self.path}/{METADATA_NAME}"

    def _content(self) -> bytes:
        """Return the description's bytes."""
        content = read_regular(pathlib.Path(self.path) / METADATA_NAME, MAX_METADATA_BYTES, "a description")
        if METADATA_NAME in self._digests:
            self._digests[METADATA_NAME].check(self._what, content)
        return content

    def _read_objects(self) -> Metadata:
        """Return torch's objects as the pickle describes them."""
        path = self._what
        loaded = load_restricted(self._content(), _allowed(), path)
        if not isinstance(loaded, Metadata) or not isinstance(loaded.storage_data, dict):
            raise CheckpointError(f"{path}: holds no DCP metadata.")
        offsets: dict[str, set[int]] = {}
        for info in loaded.storage_data.values():
            _check_inside(path, info.relative_path)
            offsets.setdefault(info.relative_path, set()).add(info.offset)
        self._places = {name: sorted(own) for name, own in offsets.items()}
        # Indices are compared by class, too: torch looks them up as its own.
        storage: dict[MetadataIndex, _StorageInfo] = {}
        for index, info in loaded.storage_data.items():
            if type(index.fqn) is not str or not isinstance(index.offset, torch.Size | None):
                raise CheckpointError(f"{path}: a key of storage_data does not name a chunk of a tensor.")
            storage[MetadataIndex(index.fqn, index.offset, index.index)] = info
        loaded.storage_data = storage
        if loaded.storage_meta is None:
            loaded.storage_meta = dcp.StorageMeta()
        loaded.storage_meta.load_id = self.load_id
        return loaded


def _check_inside(path: str, name: str) -> None:
    relative = pathlib.PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise CheckpointError(f"{path}: points to {name!r}, outside its folder.")


class SafePlanner(DefaultLoadPlanner):
    """A ``DefaultLoadPlanner`` whose non-tensor entries are read with ``weights_only=True``."""

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        checked = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)


# ------------------------------------------------------------------------------------------------
# The contents of ``.metadata`` in torch's classes, made on access.
#
# torch's own objects take about 2.5 KB a chunk, in every process.


def torch_metadata(content: DCPMetadata) -> Metadata:
    """Return torch's form of a folder's description."""
    entries: Any = _Entries(content)
    storage: Any = _Storage(content)
    return Metadata(entries, None, storage, StorageMeta())


class _Entries(Mapping[str, TensorStorageMetadata | BytesStorageMetadata]):
    """``state_dict_metadata``; tensors of one layout share their list of chunks."""

    def __init__(self, content: DCPMetadata) -> None:
        self._tensors = content.tensors
        self._others = dict.fromkeys(content.not_tensors)
        self._known: dict[Layout, TensorStorageMetadata] = {}

    def __getitem__(self, fqn: str) -> TensorStorageMetadata | BytesStorageMetadata:
        tensor = self._tensors.get(fqn)
        if tensor is None:
            self._others[fqn]  # a KeyError where there is none
            return BytesStorageMetadata()
        layout = tensor.layout
        found = self._known.get(layout)
        if found is None:
            chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in layout.boxes]
            dtype = getattr(torch, layout.dtype.name)
            found = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(layout.shape), chunks)
            self._known[layout] = found
        return found

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._others

    def __len__(self) -> int:
        return len(self._tensors) + len(self._others)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._tensors or fqn in self._others


class _Storage(Mapping[MetadataIndex, _StorageInfo]):
    """``storage_data``."""

    def __init__(self, content: DCPMetadata) -> None:
        self._tensors = content.tensors
        self._others = content.others
        self._places: dict[Layout, dict[str, int]] = {}

    def __getitem__(self, index: MetadataIndex) -> _StorageInfo:
        record = self._record(index)
        return _StorageInfo(record.relative_path, record.offset, record.length, record.transforms or None)

    def _record(self, index: MetadataIndex) -> StoredRecord:
        key, tensor = offset_key(index.offset), self._tensors.get(index.fqn)
        place = None if tensor is None else self._places_in(tensor.layout).get(key)
        return self._others[index.fqn, key] if tensor is None or place is None else tensor.records[place]

    def _places_in(self, layout: Layout) -> dict[str, int]:
        """Return which of a layout's chunks begins at an offset; the first where there are several."""
        found = self._places.get(layout)
        if found is None:
            found = self._places[layout] = {}
            for place, (offsets, _) in enumerate(layout.boxes):
                found.setdefault(offset_key(offsets), place)
        return found

    def __iter__(self) -> Iterator[MetadataIndex]:
        for fqn, tensor in self._tensors.items():
            for key in self._places_in(tensor.layout):
                yield MetadataIndex(fqn, torch.Size(literal_eval(key)))
        for fqn, key in self._others:
            yield MetadataIndex(fqn, torch.Size(literal_eval(key)) if key else None)

    def __len__(self) -> int:
        return len(self._others) + sum(len(self._places_in(tensor.layout)) for tensor in self._tensors.values())


# ------------------------------------------------------------------------------------------------
# Checkpoints in object stores: each rank requests the ranges that it needs, several at once.


_NUM_REQUESTS = 6
"""At once, of at most `PART_BYTES` each: with the one in use, a rank holds 56 MiB."""
_WHOLE_BYTES = 256 * 1024
"""A record up to this size is read whole, also where a part of it is wanted."""
_GAP_BYTES = 1024
"""Records that lie closer are read by one request."""

_Request = tuple[Callable[[], bytes], Callable[[bytes], None]]
"""A function that gets bytes, in a thread, and one that uses them then."""


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
        """Return the content of the file for everything but weights and optimizer state.

        Raises:
            ValueError: If there is none.
        """
        name, content = self._in_generation(METADATA_FILE), None
        with suppress(FileNotFoundError):
            content = self._folder.read(name)
        return _metadata(content, self.path, self._folder / name, weights_only, self._digests.get(METADATA_FILE))

    @override
    def _content(self) -> bytes:
        return self._description

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        records: dict[tuple[str, int, int], list[ReadItem]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            records.setdefault((info.relative_path, info.offset, info.length), []).append(item)
        requests = self._requests(dict(sorted(records.items())), planner)
        for data, use in in_order(lambda one: (one[0](), one[1]), requests, _NUM_REQUESTS):
            use(data)
        done: Future[None] = Future()
        done.set_result(None)
        return done

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
                    _load_record(item, io.BytesIO(stream.read()), planner)

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


def _load_record(item: ReadItem, record: io.BytesIO, planner: LoadPlanner) -> None:
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, record)
        return
    tensor: Tensor = torch.load(record, map_location="cpu", weights_only=True)
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(tensor)
    planner.commit_tensor(item, target)


# ------------------------------------------------------------------------------------------------
# Sharded folders that Accelerate saved (``accelerator.save_state``), resumed by the Trainer.
#
# They hold weights and optimizer state, and nothing of the Trainer: it begins at step 0. Accelerate's model is as a
# rule what the LightningModule holds under one attribute, so that its names lack that attribute.
#
# Source: accelerate 1.15 ``utils/fsdp_utils.py`` (``save_fsdp_model``, ``save_fsdp_optimizer``).


_MODEL = "pytorch_model_fsdp_0"
_OPTIMIZER = re.compile(r"optimizer_(\d+)")
_FILES = re.compile(r"pytorch_model_fsdp(_\d+)?(_rank\d+)?\.bin")
OPTIMIZER_KEY = "optimizer"
"""Under which each of the optimizers' folders keeps its state."""


@dataclass(frozen=True)
class AccelerateFolder:
    """The places of the parts."""

    model: Path
    optimizers: tuple[Path, ...]
    """In their order."""


def is_accelerates_model(url: str) -> bool:
    """Return whether a URL's last part is what Accelerate calls a model's folder."""
    return url.rstrip("/").endswith(f"/{_MODEL}")


def find_accelerate_objects(url: str) -> AccelerateFolder | None:
    """Return the parts of a folder behind a URL, as `find_accelerate_folder`."""
    return find_accelerate_folder(source_path(url.rstrip("/").removesuffix(f"/{_MODEL}")))


def find_accelerate_folder(path: Path) -> AccelerateFolder | None:
    """Return the parts of a folder that Accelerate saved; None if it is none.

    Args:
        path: The folder given to ``save_state``, or ``pytorch_model_fsdp_0`` in it.

    Raises:
        ValueError: If Accelerate saved it in another way than sharded by torch.distributed.checkpoint.
    """
    if not path.is_dir() or ((path / METADATA_NAME).exists() and path.name != _MODEL):
        return None
    parent = path.parent if path.name == _MODEL else path
    if not (parent / _MODEL / METADATA_NAME).exists():
        files = sorted(one.name for one in path.iterdir() if _FILES.fullmatch(one.name))
        if files:
            raise ValueError(
                f"{path} holds {files[0]}, which Accelerate writes for FULL_STATE_DICT, LOCAL_STATE_DICT and "
                "use_dcp=False. Only SHARDED_STATE_DICT (pytorch_model_fsdp_0/) can be resumed: load the checkpoint "
                "with Accelerate as it was saved, and save it as SHARDED_STATE_DICT."
            )
        return None
    numbered = {int(match[1]): one for one in parent.iterdir() if (match := _OPTIMIZER.fullmatch(one.name))}
    folders = [numbered[number] for number in sorted(numbered)]
    return AccelerateFolder(parent / _MODEL, tuple(one for one in folders if (one / METADATA_NAME).exists()))


def missing_prefix(stored: Iterable[str], present: Iterable[str], attribute: str | None) -> str:
    """Return the prefix that stored names lack: the attribute that holds the model, with its dot, or nothing."""
    prefix = f"{attribute}." if attribute else ""
    missing = set(present) - set(stored)
    return prefix if missing and {name.removeprefix(prefix) for name in missing} & set(stored) else ""


def trainer_state(folder: AccelerateFolder, *, with_optimizer: bool) -> dict[str, Any]:
    """Return a substitute for the Trainer's part of a checkpoint, and warn that there is none."""
    if dist.get_rank() == 0:
        what = "Weights and optimizer state are" if with_optimizer and folder.optimizers else "Only weights are"
        _log.warning(
            "%s was saved by Accelerate. %s restored; steps and epochs, learning-rate schedules, callbacks and "
            "random states are not in it: the Trainer starts at step 0.",
            folder.model.parent,
            what,
        )
    return {"pytorch-lightning_version": version(lightning_package()), "lr_schedulers": []}
