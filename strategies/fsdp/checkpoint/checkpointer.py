"""Saves and loads a sharded model for the strategy: every type of state dict, synchronous or not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from ....checkpoint.files import MergeReport, is_regular, listed
from ....checkpoint.formats.base import AVERAGED_NAMES, AVERAGED_WEIGHTS, conversion_target
from ....checkpoint.formats.dcp_metadata import METADATA_NAME
from ....checkpoint.formats.torch_save import check_bytes
from ....checkpoint.manifest import Adapter, Manifest
from ....checkpoint.merge import merge_fsdp_weights
from ....checkpoint.names import checked_prefix, clean_name
from ....checkpoint.storage import (
    ObjectFolder,
    check_no_password,
    has_checkpoint,
    is_remote,
    remove_checkpoint,
    without_credentials,
)
from ....checkpoint.writing.plan import parse_size
from ....state.rendezvous import raise_on_all_ranks, run_on_rank_zero, store_barrier, store_messages
from ...common import dataloader_state
from ...common.broadcast import FROZEN_BASE, FrozenBase, check_base
from ...common.checkpoint_files import (
    AveragedWeights,
    NewFolder,
    NewGeneration,
    bytes_are_checked,
    check_full,
    folder_named,
    local_path,
    new_file,
    new_folder,
    read_object,
    read_torch,
    save_object,
    save_torch,
    with_own_weights,
    writes_own_folders,
)
from ...common.dataloader_state import RANDOM_STATES_KEY, DataLoaderStates, ResumedRandomState, random_state
from ...common.loop import STORED_WEIGHTS
from ...common.modules import (
    ShardingArtifacts,
    check_whole,
    extra_states,
    is_extra_state,
    load_extra_states,
    strip_sharding,
    with_constants,
)
from ...saving.async_save import AsyncCheckpointer, AsyncSaver
from ...sharded_tensors.shards import gathered, local_part
from ...sharded_tensors.user_code import running_as_library
from ...upstream.lightning import (
    CheckpointIO,
    LightningModule,
    LightningOptimizer,
    RunningStage,
    TorchCheckpointIO,
    TrainerFn,
)
from ..engine import Engine
from ..fsdp2 import own_class
from ..sharded_model import ShardedModel, named_tensors
from ..step import is_inside
from . import loader, state_dict
from .loader import (
    find_accelerate_folder,
    find_accelerate_objects,
    is_accelerates_model,
    read_metadata,
    read_sharded_objects,
)
from .optim_state_dict import optimizer_state
from .planner import SavePlanCache
from .process_save import HandedSave, SavingProcess
from .safetensors import save_safetensors
from .writer import save_sharded, serialised_on_rank_zero, write_metadata

_NUMBERS = itertools.count(1)
"""On rank 0: of the next model that is saved."""
_Stage = Callable[[dict[str, Any]], dict[str, Any]]
"""Copies a state that training continues to change; or returns it as it is, where nothing changes."""
_Write = Callable[[dist.ProcessGroup | None], None]
"""Writes a checkpoint, with a group for its collectives."""


class FSDPSavingStrategy(Protocol):
    """The strategy as its checkpointer sees it."""

    @property
    def engine(self) -> Engine[Any]:
        """Of the sharded model."""

    @property
    def sharded(self) -> ShardedModel:
        """The sharded model."""

    @property
    def root_device(self) -> torch.device:
        """Of this process."""

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """For checkpoints in one file."""

    @property
    def lightning_module(self) -> LightningModule | None:
        """Connected to the Trainer, or None."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """Of the running fit."""

    @property
    def dataloader_states(self) -> DataLoaderStates:
        """Of the running fit."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the main process."""

    @property
    def frozen_base(self) -> FrozenBase | None:
        """The weights that checkpoints leave out; None if they have all."""

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """PEFT's adapters in the module."""

    def parameter_shards(self) -> dict[str, tuple[Tensor, bool]]:
        """Return this rank's part of each parameter, and whether it trains."""

    @property
    def averages(self) -> AveragedWeights | None:
        """Averages of the weights, which checkpoints have, too."""

    def broadcast(self, obj: str, src: int = 0) -> str:
        """Return the object of the process ``src``."""


@running_as_library(
    *("model_state", "optimizer_state", "save", "wait", "save_safetensors", "read", "load_weights", "load_optimizers")
)
class Checkpointer(AsyncCheckpointer):
    """Saves and loads the sharded model of a strategy.

    Args:
        strategy: Whose model.
        saves: Where saves continue while training does; None to wait for them.
    """

    _strategy: FSDPSavingStrategy

    def __init__(self, strategy: FSDPSavingStrategy, saves: AsyncSaver | None = None) -> None:
        super().__init__(strategy, saves)
        self._plans = SavePlanCache()
        self._random_state = ResumedRandomState()
        self._left_out: dict[str, list[Any]] = {}
        """The names that `model_state` has left out last."""
        self._path = ""
        """Of the checkpoint that was loaded last."""

    @property
    def _full(self) -> bool:
        return self._strategy.engine.settings.state_dict_type == "full_state_dict"

    @property
    def _local(self) -> bool:
        return self._strategy.engine.settings.state_dict_type == "local_state_dict"

    def _state_dict_module(self) -> nn.Module:
        if is_inside():
            raise RuntimeError(
                "The model cannot be saved or loaded while one of its steps runs: its parameters are gathered. Save "
                "or load in a hook, such as on_train_batch_end() or on_validation_end()."
            )
        module = self._strategy.engine.state_dict_module(self._strategy.sharded.root)
        self._strategy.engine.reshard(self._strategy.sharded.root)
        return module

    def model_state(self) -> dict[str, Any]:
        """Return the weights as ``state_dict_type`` has them; all processes must call it."""
        sharded = self._strategy.sharded  # else an error: before the setup there may be no process group to meet in
        store_barrier(
            "trainer.save_checkpoint"
        )  # its first step; alone, a process would hang in the collectives that follow
        if self._local:
            return local_model_state(sharded)
        full = self._strategy.engine.settings.full_weights if self._full else None
        with with_own_weights(self._strategy.averages):
            state = state_dict.model_state(self._state_dict_module(), full, self._strategy.root_device)
            self._left_out = self._find_left_out()
        for name in self._names_left_out(self._left_out):
            state.pop(name, None)
        return state

    def _find_left_out(self) -> dict[str, list[Any]]:
        base = self._strategy.frozen_base
        if base is None:
            return {}
        unchanged = base.unchanged(self._frozen_and_trained())
        of_adapters = {name for adapter in self._strategy.adapters.values() for name in adapter.names.values()}
        return {name: known for name, known in unchanged.items() if name not in of_adapters}

    def _frozen_and_trained(self) -> dict[str, tuple[Tensor, bool]]:
        return with_constants(self._strategy.parameter_shards(), self._state_dict_module())

    def _names_left_out(self, found: Collection[str]) -> list[str]:
        """Return what `_find_left_out` has found, with its aliases."""
        return [*found, *(alias for alias, name in self._strategy.sharded.ties.items() if name in found)]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state as ``state_dict_type`` has it; all processes must call it."""
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self._local:
            return plain.state_dict()
        full = self._strategy.engine.settings.full_optimizer if self._full else None
        return optimizer_state(self._state_dict_module(), plain, self._strategy.sharded.order, full)

    def save(self, checkpoint: dict[str, Any], path: str, storage_options: Any | None = None) -> None:
        """Write what the Trainer gathered, or begin to; all processes must call it, and rank 0's path is taken."""
        check_no_password(path)
        self.wait()
        checkpoint = dict(checkpoint)  # callbacks and the module were shown the Trainer's, and may have kept it
        path = self._meet_for_save(checkpoint, path)
        share_scaler_state(checkpoint)
        if self._left_out:
            checkpoint[FROZEN_BASE] = self._left_out
        save, saves = self._full_save if self._full else self._folder_save, self._saver_now
        traces = traces_of(self._strategy.engine.sharded_modules(self._strategy.sharded.root))
        averages = self._strategy.averages
        with strip_sharding(checkpoint, traces), with_own_weights(averages) as in_evaluation:
            if averages is not None and averages.tensors:
                checkpoint[AVERAGED_WEIGHTS] = self._averaged_state(checkpoint["state_dict"], averages.tensors)
                checkpoint[AVERAGED_NAMES] = sorted(averages.tensors)
            if saves is None:
                save(checkpoint, path, storage_options, lambda state: state)(None)
            else:  # what is staged is a copy
                write = save(checkpoint, path, storage_options, saves.stage)
                saves.start(f"Saving {path}", write, self._plans.messages)
            if in_evaluation:  # the model has the averages again when this ends
                self.wait()

    def _averaged_state(self, weights: Mapping[str, Any], averages: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the weights with the averages in their place, as ``state_dict_type`` has them."""
        if self._local:
            return {name: local_part(average) for name, average in averages.items()}
        full = self._strategy.engine.settings.full_weights if self._full else None
        found = dict(averages)
        if full is not None:
            found = {}
            for name, average in averages.items():  # one after the other
                whole = gathered(average.to(self._strategy.root_device))
                found.update(state_dict.place_full_state({name: whole.cpu() if full.offload_to_cpu else whole}, full))
        ties = self._strategy.sharded.ties
        found.update({alias: found[name] for alias, name in ties.items() if name in found})
        kept = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
        return {**kept, **found} if kept else {}

    def _meet_for_save(self, checkpoint: dict[str, Any], path: str) -> str:
        """Give rank 0's ``checkpoint`` what each rank has of its own; return rank 0's path, where that is wanted."""

        def on_rank_zero(states: list[tuple[dict[str, Any], list[Any]]]) -> tuple[str, int]:
            check_whole(checkpoint, ("state_dict", "optimizer_states"))
            if "optimizer_states" in checkpoint:  # not one of weights alone
                group_size = self._strategy.dataloader_states.group_size
                checkpoint[RANDOM_STATES_KEY] = [state for state, _ in states[::group_size]]
                dataloader_state.keep([places for _, places in states], checkpoint, group_size)
            return path, self._plans.number or next(_NUMBERS)

        module, what = self._strategy.lightning_module, f"saving {path}"
        places = self._strategy.dataloader_states.own(None if module is None else module._trainer, checkpoint)
        own = random_state(self._strategy.root_device), places
        common, self._plans.number = store_messages().gather_then_broadcast(own, on_rank_zero, what)
        return path if writes_own_folders() else common

    def _full_save(self, checkpoint: dict[str, Any], path: str, storage_options: Any, stage: _Stage) -> _Write:
        own_io = type(self._strategy.checkpoint_io) is TorchCheckpointIO
        if own_io and storage_options is not None and not is_remote(path):
            raise TypeError("storage_options requires a CheckpointIO other than Lightning's own. Remove it.")
        staged = stage(checkpoint)

        def write(where: Path | str) -> None:
            self._strategy.checkpoint_io.save_checkpoint(staged, where, storage_options=storage_options)

        if is_remote(path):
            save = partial(save_object, staged, path, storage_options) if own_io else partial(write, path)
            return lambda group: run_on_rank_zero(save, f"saving {path}", group)
        file = local_path(path, "checkpoints")
        # Another CheckpointIO than Lightning's own may write later, or elsewhere: what it wrote is not ours to rename.
        if not own_io:
            return lambda group: new_file(file, write, group, beside=False)
        # Lightning's own would make all of the file in memory, and then write it to the system's temporary folder.
        return lambda group: new_file(file, partial(save_torch, staged), group)

    def _folder_save(self, checkpoint: dict[str, Any], path: str, storage_options: Any, stage: _Stage) -> _Write:
        remote = is_remote(path) and not self._local
        if storage_options is not None and not remote:
            raise TypeError("storage_options is for URLs, and for a CheckpointIO. Remove it.")
        folder = path if remote else local_path(path, "local_state_dict checkpoints")
        weights, optimizer_states = checkpoint.pop("state_dict"), checkpoint.pop("optimizer_states", [])
        averages = checkpoint.pop(AVERAGED_WEIGHTS, {})
        metadata = serialised_on_rank_zero(checkpoint, f"saving {path}")
        if self._local:
            local = stage({**local_state(weights, optimizer_states), AVERAGED_WEIGHTS: averages})
            return partial(save_local, folder_named(folder), local, metadata)
        key, sharded = self._strategy.engine.model_key, self._strategy.sharded
        state = state_dict.sharded_state(key, weights, optimizer_states)
        if averages:
            state[AVERAGED_WEIGHTS] = averages
        left_out = tuple(self._names_left_out(self._left_out))
        adapters, saves = self._strategy.adapters, self.saves
        manifest = Manifest(key, sharded.ties, sharded.module_attribute, left_out=left_out, adapters=adapters)
        if saves is not None and isinstance(saves.process, SavingProcess) and stage == saves.stage:
            if writes_own_folders():
                raise ValueError(
                    f"saving {folder}: async_save='process' writes into one folder that all processes share. Use "
                    "async_save=True."
                )
            if remote:
                raise ValueError(f"saving {path}: async_save='process' writes to a file system. Use async_save=True.")
            stager = saves.shared_stager
            return HandedSave(Path(folder), state, metadata, manifest, self._plans, stager, saves.process).hand_over(
                saves.group
            )
        staged = stage(state)
        new = folder_named(folder, storage_options)
        return lambda group: save_sharded(new, staged, metadata, manifest, self._plans, group)

    def save_safetensors(self, path: str, **options: Any) -> MergeReport:
        """Save the weights as safetensors; see `AccelFSDPStrategy.save_safetensors`."""
        store_barrier("strategy.save_safetensors")
        module, path = self._state_dict_module(), self._strategy.broadcast(path)
        weights = state_dict.model_state(module, None, self._strategy.root_device)
        left_out = self._names_left_out(self._find_left_out())
        for name in left_out:
            weights.pop(name, None)
        key, sharded = self._strategy.engine.model_key, self._strategy.sharded
        manifest = Manifest(key, sharded.ties, sharded.module_attribute, left_out=tuple(left_out))
        if is_remote(path):
            return self._upload_safetensors(path, weights, manifest, **options)
        return save_safetensors(local_path(path, "weights"), weights, module, manifest, **options)

    def _upload_safetensors(
        self,
        url: str,
        weights: dict[str, Any],
        manifest: Manifest,
        *,
        max_shard_size: str | int | None,
        dtype: str | torch.dtype | None,
        strip_prefix: str | None,
    ) -> MergeReport:
        """Write each rank's shards into the store, and let rank 0 merge them there; S3 copies most of the bytes itself.

        A store takes the parts of an object in order, or none below 5 MiB, so ranks cannot write into one together.
        """
        if url.endswith(".safetensors"):
            raise ValueError(f"{without_credentials(url)}: in an object store, pass the folder for model.safetensors.")
        checked_prefix(strip_prefix)  # what is wrong is an error before anything is uploaded
        conversion_target(dtype)
        if max_shard_size is not None:
            parse_size(max_shard_size)
        shards = f"{url.rstrip('/')}/.unmerged.ckpt"
        metadata = serialised_on_rank_zero({}, f"saving {without_credentials(url)}")
        state = state_dict.sharded_state(manifest.model_prefix, weights, [])
        save_sharded(NewGeneration(shards), state, metadata, manifest, SavePlanCache())
        try:
            return merge_fsdp_weights(
                shards, url, max_shard_size=max_shard_size, dtype=dtype, strip_prefix=strip_prefix
            )
        finally:
            if self._strategy.is_global_zero:
                remove_checkpoint(ObjectFolder(shards))

    def read(self, path: str, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the Trainer's checkpoint of any kind; what only a sharded model can take is loaded from it later.

        All processes must call it, and rank 0's path is taken. Weights of a full one are in it, for the user's
        ``on_load_checkpoint`` to look at and rename.

        Raises:
            RuntimeError: Without a module connected to the Trainer; on every rank, if a save in the background failed.
        """
        module = self._strategy.lightning_module
        if module is None:
            raise RuntimeError("load_checkpoint() must be called by the Trainer, with a module connected.")
        check_no_password(path)
        self.wait()
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        self._path = store_messages().broadcast_from_rank_zero(lambda: path, f"loading {path}")
        checkpoint = self._read(self._path, weights_only, fitting=fitting)
        share_scaler_state(checkpoint)
        self._strategy.dataloader_states.load(checkpoint)
        random_states = checkpoint.pop(RANDOM_STATES_KEY, None)
        if fitting and random_states:
            group_size = self._strategy.dataloader_states.group_size
            self._random_state.load(random_states, self._strategy.root_device, group_size)
        return checkpoint

    def _read(self, path: str, weights_only: bool | None, *, fitting: bool) -> dict[str, Any]:
        if is_remote(path):
            if has_checkpoint(ObjectFolder(path), (METADATA_NAME,)) and not is_accelerates_model(path):
                return read_sharded_objects(path, weights_only)
            if (folder := find_accelerate_objects(path)) is not None:
                return loader.read_accelerate(folder, with_optimizer=fitting)
            if type(self._strategy.checkpoint_io) is TorchCheckpointIO:
                return read_object(path, weights_only)
            checkpoint = self._strategy.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
            check_full(checkpoint, path)
            return dict(checkpoint)
        place = local_path(path, "checkpoints")
        if is_local(place):
            if self._strategy.engine.version != 1:
                raise ValueError(f"{place} holds a local_state_dict of FSDP1. Load it with fsdp_version=1.")
            return read_local(place, weights_only)
        if (folder := find_accelerate_folder(place)) is not None:
            return loader.read_accelerate(folder, with_optimizer=fitting)
        if state_dict.is_sharded(place):
            return loader.read_sharded(place, weights_only)
        checkpoint = read_torch(place, weights_only)
        check_full(checkpoint, path)
        return checkpoint

    def load_weights(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Load the weights of what `read` has returned into the sharded model; all processes must call it."""
        module, stored = self._state_dict_module(), checkpoint.get(STORED_WEIGHTS)
        base = checkpoint.get(FROZEN_BASE, {})
        if base:
            check_base(base, self._frozen_and_trained(), self._strategy.root_device, self._path)
        if stored is not None:
            stored.load_weights(self._strategy.sharded, module, strict=strict)
        else:
            ties = self._strategy.sharded.ties
            left_out = {*base, *(alias for alias, name in ties.items() if name in base)}
            loader.load_full_weights(checkpoint["state_dict"], self._path, module, strict=strict, left_out=left_out)

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states of what `read` has returned; all processes must call it."""
        module = self._state_dict_module()
        loader.load_optimizers(checkpoint, self._strategy.sharded, module, self._strategy.optimizers)

    def before_iterating(self) -> None:
        """Restore random states where an epoch of training begins."""
        if self._trainer_state is not None and self._trainer_state.stage == RunningStage.TRAINING:
            self._random_state.before_iterating()

    def before_batch(self, batch_idx: int) -> None:
        """Restore random states before a batch of training; raise what a save in the background failed with."""
        self._random_state.before_batch(in_epoch=batch_idx > 0)
        self.check_saves()


# ------------------------------------------------------------------------------------------------
# ``local_state_dict``: each rank's flat shards of FSDP1 as they are, which come back in the same arrangement only.


_MODEL, _OPTIMIZERS = "model", "optimizers"


def local_model_state(sharded: ShardedModel) -> dict[str, Any]:
    """Return this rank's flat shards by the names of their units, what is unsharded, and extra states.

    Nothing is communicated and nothing is copied.
    """
    state: dict[str, Any] = {}
    for name, module in sharded.root.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            flat = module._handle.flat_param
            # While a unit is gathered, `data` is all of it; until the first forward, there is no `_local_shard`.
            state[clean_name(f"{name}._flat_param")] = getattr(flat, "_local_shard", flat.data)
    for named in named_tensors(sharded.root):
        unsharded = named.tensor in sharded.unsharded if isinstance(named.tensor, nn.Parameter) else named.persistent
        if unsharded:
            state[named.name] = named.tensor.detach()
    return {**state, **extra_states(sharded.root)}


def save_local(
    folder: NewFolder | NewGeneration, state: dict[str, Any], metadata: bytes, group: dist.ProcessGroup | None = None
) -> None:
    """Write one folder with a file of each rank; it has its name only when it is complete.

    Args:
        folder: New; a checkpoint that has its name already is replaced, last of all.
        state: Result of `local_state`.
        metadata: The file for everything else, written by rank 0.
        group: Through which the ranks agree; the default group by default.

    Raises:
        RuntimeError: On every rank, if any rank failed; it names the rank.
    """
    assert isinstance(folder, NewFolder)  # behind a URL are no checkpoints of this kind
    finish = partial(folder.finish, partial(write_metadata, metadata=metadata))
    with new_folder(folder, finish, group), raise_on_all_ranks(f"saving {folder.path}", group):
        save_torch(state, folder.unfinished / _file_of(dist.get_rank(), dist.get_world_size()))


def local_state(model: dict[str, Any], optimizer_states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Put together what a rank's file holds."""
    return {_MODEL: model, _OPTIMIZERS: list(optimizer_states)}


def is_local(path: Path) -> bool:
    """Return whether ``path`` is a folder that `save_local` wrote."""
    return path.is_dir() and any(path.glob("rank_*_of_*.pt"))


def read_local(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Return the Trainer's checkpoint of a folder that as many processes saved.

    Args:
        path: The folder.
        weights_only: For the metadata file, as in ``torch.load``.

    Raises:
        RuntimeError: On every rank, if another number of processes saved it, or what is read here is damaged.
    """
    with raise_on_all_ranks(f"Loading {path}"):
        file = path / _file_of(dist.get_rank(), dist.get_world_size())
        checkpoint = read_metadata(path, weights_only)
        if not is_regular(file):
            raise ValueError(
                f"{file.name} does not exist, only {listed(sorted(one.name for one in path.glob('rank_*')))}: a "
                "local_state_dict can be restored only on the same number of processes. Save a sharded_state_dict "
                "to resume on a different number."
            )
        if bytes_are_checked():
            check_bytes(file)
        stored = torch.load(file, map_location="cpu", weights_only=weights_only is not False, mmap=True)
    checkpoint[STORED_WEIGHTS] = LocalWeights(path, stored[_MODEL])
    if stored.get(AVERAGED_WEIGHTS):
        checkpoint[AVERAGED_WEIGHTS] = LocalAverages(path, stored[AVERAGED_WEIGHTS])
    if "lr_schedulers" in checkpoint:  # not one of weights alone
        checkpoint["optimizer_states"] = [LocalOptimizer(state) for state in stored[_OPTIMIZERS]]
    return checkpoint


@dataclass(frozen=True)
class LocalWeights:
    """This rank's flat shards, as they were saved."""

    path: Path
    stored: dict[str, Any] = field(repr=False)

    def load_weights(self, sharded: ShardedModel, module: nn.Module, *, strict: bool) -> None:
        """Load them; every rank must call it.

        Raises:
            RuntimeError: On every rank, before any weight is changed, if the units or the engine are others.
        """
        with raise_on_all_ranks(f"Loading {self.path}"):
            present = local_model_state(sharded)
            _compare(self.stored, present)
        with torch.no_grad():
            for name, tensor in present.items():
                if not is_extra_state(name):
                    tensor.copy_(self.stored[name])
        load_extra_states(sharded.root, self.stored)


@dataclass(frozen=True)
class LocalAverages:
    """This rank's shards of averaged weights, as they were saved."""

    path: Path
    stored: dict[str, Tensor] = field(repr=False)

    @torch.no_grad()
    def fill(self, averages: Mapping[str, Tensor]) -> None:
        """Load them; every rank must call it.

        Raises:
            RuntimeError: On every rank, if other parameters are averaged.
        """
        with raise_on_all_ranks(f"Loading {self.path}"):
            _compare(self.stored, {name: local_part(average) for name, average in averages.items()})
        for name, average in averages.items():
            local_part(average).copy_(self.stored[name])


@dataclass(frozen=True)
class LocalOptimizer:
    """An optimizer's state over this rank's flat shards."""

    state: dict[str, Any] = field(repr=False)

    def load_optimizer(
        self, sharded: ShardedModel, module: nn.Module, optimizer: Optimizer, *, num_steps: int | None
    ) -> None:
        """Load it."""
        optimizer.load_state_dict(self.state)


def _compare(stored: dict[str, Any], present: dict[str, Any]) -> None:
    saved, now = ({name: _form_of(name, value) for name, value in one.items()} for one in (stored, present))
    other = [
        f"{name} (saved {saved.get(name)}, now {now.get(name)})"
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name) != now.get(name)
    ]
    if other:
        raise ValueError(
            f"the units differ: {listed(other)}. A local_state_dict needs the same wrapping; a sharded_state_dict "
            "does not."
        )


def _form_of(name: str, value: Any) -> object:
    return "an extra state" if is_extra_state(name) else tuple(value.shape)


def _file_of(rank: int, world_size: int) -> str:
    return f"rank_{rank:05d}_of_{world_size:05d}.pt"


# ------------------------------------------------------------------------------------------------
# The state of the fp16 gradient scaler in a checkpoint, for any precision plugin.


_PLUGINS = ("AccelFSDPPrecision", "FSDPPrecision", "MixedPrecision")
"""Ours and Lightning's; each looks under its class's name."""


def share_scaler_state(checkpoint: dict[str, Any]) -> None:
    """Put the gradient scaler's state under all the names that it is looked for under."""
    state = next((checkpoint[name] for name in _PLUGINS if name in checkpoint), None)
    if state is not None:
        checkpoint.update(dict.fromkeys(_PLUGINS, state))


# ------------------------------------------------------------------------------------------------
# Removing FSDP's artifacts from modules that are saved among the hyperparameters.


_ADDED = ("_fsdp_", "_is_fsdp_", "__composable_api_")
"""The prefixes of torch's marks, of FSDP1 and FSDP2."""


def _restore(attributes: dict[str, Any]) -> None:
    for name in list(attributes):
        if name.startswith(_ADDED):
            del attributes[name]


def traces_of(sharded: Collection[nn.Module]) -> ShardingArtifacts:
    """Return the artifacts to remove, where ``sharded`` are the modules with parameters of their own in shards."""
    return ShardingArtifacts(
        packages=("torch.distributed", "torch._dynamo", "accelight"),
        restore=_restore,
        own_class=own_class,
        holds_shards=sharded.__contains__,
        reason="FSDP has sharded",
        way_out=" Or exclude it from sharding: AccelFSDPStrategy(ignored_modules=...).",
    )
