"""Checkpoints of DeepSpeed: the engine's sharded folders, full files, checks of what is read, and 16-bit weights."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from ...checkpoint.files import is_regular, listed
from ...checkpoint.formats.base import AVERAGED_NAMES, AVERAGED_WEIGHTS
from ...checkpoint.formats.torch_save import check_bytes, check_written
from ...checkpoint.formats.zero_files import LATEST_NAME, latest_tag
from ...checkpoint.locate import find_checkpoint
from ...checkpoint.manifest import MANIFEST_NAME, Adapter, FileDigest, Manifest, read_manifest
from ...checkpoint.merge import plan_merge
from ...checkpoint.object_path import ObjectPath
from ...checkpoint.storage import ObjectFolder, check_no_password, has_checkpoint, is_remote, source_path
from ...checkpoint.writing.copy import load_tensors
from ...state.rendezvous import raise_on_all_ranks, run_on_rank_zero, store_barrier, store_messages
from ..common import dataloader_state
from ..common.broadcast import FROZEN_BASE, FrozenBase, check_base
from ..common.checkpoint_files import (
    AveragedWeights,
    NewFolder,
    NewGeneration,
    OwnFolder,
    bytes_are_checked,
    check_full,
    folder_named,
    local_path,
    new_folder,
    read_object,
    read_torch,
    with_own_weights,
    writes_own_folders,
)
from ..common.dataloader_state import RANDOM_STATES_KEY, DataLoaderStates, ResumedRandomState, random_state
from ..common.loop import STORED_WEIGHTS
from ..common.modules import (
    ShardingArtifacts,
    check_constants,
    check_whole,
    constants_aside,
    find_ties,
    is_constant,
    is_extra_state,
    load_extra_states,
    strip_sharding,
    with_constants,
)
from ..saving.async_save import AsyncCheckpointer, AsyncSaver, SavingStrategy
from ..sharded_tensors.shards import local_part, part_of
from ..sharded_tensors.user_code import OwnStateDict
from ..upstream.lightning import RunningStage, TrainerFn, rank_zero_info, rank_zero_warn
from ..upstream.patches import Patches
from . import universal, zero_optimizer
from .accumulation import window_of
from .ds_config import DeepSpeedSettings
from .files import Download, LocalFiles, ObjectFiles, StagedFiles, download, written_elsewhere
from .library import deepspeed_library, quietly
from .plugin import DeepSpeedPlugin
from .universal import reading_safely
from .zero_optimizer import sync_master_weights

_WHAT = "sharded checkpoints"


class DeepSpeedSavingStrategy(SavingStrategy, Protocol):
    """The strategy as its checkpointer sees it."""

    load_universal: bool
    weights_only: bool

    @property
    def frozen_base(self) -> FrozenBase | None:
        """The weights that checkpoints leave out; None if they have all."""

    @property
    def deepspeed_engine(self) -> Any:
        """DeepSpeed's engine."""

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin:
        """The plugin that trains the Trainer's module."""

    @property
    def settings(self) -> DeepSpeedSettings:
        """Of the engine."""

    @property
    def dataloader_states(self) -> DataLoaderStates:
        """Of the running fit."""

    @property
    def averages(self) -> AveragedWeights | None:
        """Averages of the weights, which checkpoints have, too."""

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """PEFT's adapters in the module."""

    def parameter_shards(self) -> dict[str, tuple[Tensor, bool]]:
        """Return this rank's part of each parameter."""

    def broadcast(self, obj: str, src: int = 0) -> str:
        """Return the object of the rank ``src``."""


class Checkpointer(AsyncCheckpointer):
    """Saves and loads the engine of a strategy; every rank must call it.

    Args:
        strategy: Whose engine.
        saves: Where saves continue while training does; None to wait for them.
    """

    _strategy: DeepSpeedSavingStrategy

    def __init__(self, strategy: DeepSpeedSavingStrategy, saves: AsyncSaver | None = None) -> None:
        super().__init__(strategy, saves)
        self._random_state = ResumedRandomState()
        self._weights: dict[str, Any] = {}

    def note_weights(self, weights: Mapping[str, Any]) -> None:
        """Take note of the state dict that goes into the Trainer's checkpoint."""
        self._weights = dict(weights)

    def _check_weights(self, weights: Mapping[str, Any]) -> None:
        """Check that it is still the same, since the engine saves its own weights.

        Raises:
            ValueError: If users' code has changed it.
        """
        before, self._weights = self._weights, {}
        names = [*before, *(name for name in weights if name not in before)]
        if changed := [name for name in names if before.get(name) is not weights.get(name)]:
            raise ValueError(
                f"on_save_checkpoint() changes checkpoint['state_dict'] ({listed(changed, 3)}), and DeepSpeed's engine "
                "saves its own weights. Put other tensors under a key of your own; "
                "accelight.callbacks.ShardedEMA saves averages."
            )

    def save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None) -> None:
        """Write one folder, or begin to.

        Args:
            checkpoint: The Trainer's; the engine itself knows the weights and the optimizer's state.
            path: The folder, or the URL of one.
            storage_options: Of the file system behind a URL.

        Raises:
            TypeError: If there are storage options for a path.
            ValueError: If the path is a URL and the engine writes in another way than ``torch.save``, the checkpoint
                has a key that DeepSpeed uses itself, a module in it
                has parameters that ZeRO-3 has partitioned, or users' code has changed its state dict.
            RuntimeError: On every rank, if this save failed, or one in the background before it.
        """
        if storage_options is not None and not is_remote(path):
            raise TypeError("storage_options is for URLs. Remove it.")
        check_no_password(path)
        engine = self._strategy.deepspeed_engine  # else an error: before the setup there may be no process group
        self.wait()
        store_barrier("trainer.save_checkpoint")  # alone, a rank would hang in the collectives that follow
        places, module = self._strategy.dataloader_states, self._strategy.lightning_module
        own = places.own(None if module is None else module._trainer, checkpoint)
        random = random_state(self._strategy.root_device)
        of_all: list[Any] = [None] * dist.get_world_size()  # rank 0's file has them; stage 3 writes one for each rank
        of_all[dist.get_rank()] = random

        def on_rank_zero(of_ranks: list[tuple[Any, Any]]) -> tuple[str, list[Any]]:
            check_whole(checkpoint, ("state_dict", "optimizer_states"))
            self._check_weights(checkpoint.get("state_dict", self._weights))
            of_all[:] = [each for each, _ in of_ranks]
            return str(path), [places for _, places in of_ranks]

        common, states = store_messages().gather_then_broadcast((random, own), on_rank_zero, f"saving {path}")
        if "optimizer_states" in checkpoint:  # not one of weights alone
            checkpoint[RANDOM_STATES_KEY] = of_all
        dataloader_state.keep(states, checkpoint)
        place = str(path) if writes_own_folders() else common
        folder = folder_named(place if is_remote(place) else local_path(place, _WHAT), storage_options)
        state = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        plugin = self._strategy.deepspeed_plugin
        write_16bit = self._strategy.settings.zero_stage == 3 and bool(plugin.zero3_save_16bit_model)
        left_out = self._left_out()
        if left_out:
            state[FROZEN_BASE] = left_out
        averages = self._strategy.averages
        with strip_sharding(state, TRACES), with_own_weights(averages):
            if averages is not None:
                state[AVERAGED_NAMES] = sorted(averages.tensors)
            save(
                engine,
                folder,
                state,
                write_16bit=write_16bit,
                exclude_frozen=bool(left_out),
                adapters=self._strategy.adapters,
                averaged=self._averaged_state(left_out),
                saver=self._saver_now,
            )

    def _left_out(self) -> dict[str, list[Any]]:
        """Return the weights that the checkpoint leaves out.

        Raises:
            RuntimeError: On every rank, if a frozen weight has changed: DeepSpeed leaves out all of them or none.
        """
        base = self._strategy.frozen_base
        if base is None:
            return {}
        with with_trained_parameters(self._strategy.deepspeed_engine):
            shards = with_constants(self._strategy.parameter_shards(), self._strategy.deepspeed_engine.module)
        unchanged = base.unchanged(shards)
        changed = [name for name, (_, is_trained) in shards.items() if not is_trained and name not in unchanged]
        if changed:
            raise RuntimeError(
                f"save_trainable_only=True would lose {', '.join(changed[:5])}{' and others' if changed[5:] else ''}: "
                "frozen, and changed since fit() began. Set save_trainable_only=False, or use FSDP, which saves them."
            )
        return unchanged

    def _averaged_state(self, left_out: Container[str]) -> dict[str, Tensor]:
        """Return the weights that are saved with the averages in their place; nothing where there are none."""
        averages = self._strategy.averages
        if averages is None or not averages.tensors:
            return {}
        buffers: dict[str, Tensor] = {}
        for prefix, module in self._strategy.deepspeed_engine.module.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    buffers[f"{prefix}.{name}" if prefix else name] = buffer.detach()
        weights = {name: shard for name, (shard, _) in self._strategy.parameter_shards().items()}
        kept = {name: value for name, value in {**weights, **buffers}.items() if name not in left_out}
        return {**kept, **averages.tensors}

    def read(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        """Return the Trainer's checkpoint; what the engine takes of it is loaded later.

        Args:
            path: The folder, or the file of a full checkpoint; or the URL of one.
            weights_only: Whether it may hold tensors and plain values only; None takes the strategy's.

        Raises:
            RuntimeError: If no module is connected.
        """
        module = self._strategy.lightning_module
        if module is None:
            raise RuntimeError("load_checkpoint() must be called by the Trainer, with a module connected.")
        check_no_password(path)
        self.wait()
        url = self._strategy.broadcast(str(path))
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        weights_only = self._strategy.weights_only if weights_only is None else weights_only
        if is_remote(url) and not has_checkpoint(ObjectFolder(url), (LATEST_NAME,)):
            with reading_safely(weights_only):
                checkpoint = take_full(read_object(url, weights_only), url, fitting=fitting)
        elif is_full(place := source_path(url) if is_remote(url) else local_path(url, _WHAT)):
            checkpoint = read_full(place, weights_only=weights_only, fitting=fitting)
        else:
            checkpoint = read(
                place,
                with_optimizer=fitting,
                stage=int(self._strategy.deepspeed_plugin.zero_stage or 0),
                any_number=self._strategy.load_universal,
                weights_only=weights_only,
            )
        self._strategy.dataloader_states.load(checkpoint)
        random_states = checkpoint.pop(RANDOM_STATES_KEY, None)
        if fitting and random_states:
            self._random_state.load(random_states, self._strategy.root_device)
        return checkpoint

    def before_iterating(self) -> None:
        """Restore random states where an epoch of training begins."""
        if self._trainer_state is not None and self._trainer_state.stage == RunningStage.TRAINING:
            self._random_state.before_iterating()

    def before_batch(self, batch_idx: int) -> None:
        """Restore random states before a batch of training; raise what a save in the background failed with."""
        self._random_state.before_batch(in_epoch=batch_idx > 0)
        self.check_saves()

    def load(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Load what `read` has returned into the engine, with the optimizer's state when fitting.

        Args:
            checkpoint: The Trainer's.
            strict: Whether every weight has to be there, and no other.
        """
        base = checkpoint.get(FROZEN_BASE, {})
        if base:
            shards = with_constants(self._strategy.parameter_shards(), self._strategy.deepspeed_engine.module)
            check_base(base, shards, self._strategy.root_device, "the checkpoint")
        if STORED_WEIGHTS not in checkpoint:
            load_full(self._strategy.deepspeed_engine, checkpoint["state_dict"], strict=strict)
            return
        load(
            self._strategy.deepspeed_engine,
            checkpoint[STORED_WEIGHTS],
            strict=strict,
            load_universal=self._strategy.load_universal,
            left_out=base,
        )


# ------------------------------------------------------------------------------------------------
# DeepSpeed's own sharded checkpoints, with the Trainer's state in them.


_OPTIMIZER_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$")
_MODEL_FILE = re.compile(r"^zero_pp_rank_\d+_mp_rank_00_model_states\.pt$")
_COUNTS = "accelight_optimizer_counts"
"""Key in a checkpoint of what an optimizer counts for each parameter, if some have stepped less often than others."""
_OF_DEEPSPEED = {
    "module", "optimizer", "lr_scheduler", "buffer_names", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
    "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
}  # fmt: skip


def save(
    engine: Any,
    folder: NewFolder | NewGeneration,
    trainer_state: dict[str, Any],
    *,
    write_16bit: bool,
    exclude_frozen: bool = False,
    adapters: Mapping[str, Adapter] = MappingProxyType({}),
    averaged: Mapping[str, Tensor] = MappingProxyType({}),
    saver: AsyncSaver | None = None,
) -> None:
    """Write one folder, every rank its own shards; it has its name only when it is complete.

    Args:
        engine: DeepSpeed's engine.
        folder: Where; what is there already is replaced, last of all.
        trainer_state: The Trainer's checkpoint, without weights and optimizer states.
        write_16bit: Whether rank 0 writes the consolidated weights into the folder, too.
        exclude_frozen: Whether frozen parameters are left out of the shards.
        adapters: PEFT's adapters in the module.
        averaged: Averages of the weights, sharded, for a folder of their own.
        saver: Writes it from a copy, after this has returned; None to write it now.

    Raises:
        ValueError: If the state has a key that DeepSpeed uses itself.
        RuntimeError: On every rank, if any rank failed; it names the rank.
    """
    taken = sorted(_OF_DEEPSPEED & set(trainer_state))
    if taken:
        raise ValueError(f"on_save_checkpoint() wrote {taken}, which DeepSpeed's checkpoint already has. Rename them.")
    window = window_of(engine)
    if window is not None and window.changes is not None:
        window.changes.sync_to_model()
        window.follow_changed_weights()  # since the last step: the next would have done it
    elif zero_optimizer.is_partitioned_optimizer(engine.optimizer):
        sync_master_weights(engine.optimizer)
    weights: dict[str, torch.Tensor] = gather_16bit(engine) if write_16bit else {}

    with with_trained_parameters(engine):
        left_out = [name for name, one in engine.module.named_parameters() if exclude_frozen and not one.requires_grad]

    files: LocalFiles | ObjectFiles  # before anything is written: it may be an error
    files = ObjectFiles(folder, engine) if isinstance(folder, NewGeneration) else LocalFiles(folder, engine)
    digests: dict[str, FileDigest] = {}
    # A module that has two names is among the shared parameters of DeepSpeed's files under one of them.
    ties = find_ties(engine.module)

    def finish() -> None:
        manifest = Manifest(
            "module", ties, digests={**digests, **files.digests()}, left_out=tuple(left_out), adapters=adapters
        )
        of_averages = Manifest("model", ties, left_out=manifest.left_out, adapters=adapters) if averaged else None
        files.finish(manifest, of_averages, weights)

    if window is not None and window.steps is not None and (counts := window.steps.state_dict()):
        trainer_state = {**trainer_state, _COUNTS: counts}

    def save_engine(into: LocalFiles | ObjectFiles | StagedFiles) -> None:
        aside = constants_aside(engine.module) if exclude_frozen else nullcontext()
        own = OwnStateDict.in_save(engine.module)
        with guarded_files(engine, into, folder.path), with_trained_parameters(engine), aside, own:
            engine.save_checkpoint(
                into.place,
                tag=into.tag,
                client_state=trainer_state,
                save_latest=False,  # by DeepSpeed, it would be written between two meetings of ranks
                exclude_frozen_parameters=exclude_frozen,
            )

    def write(
        write_files: Callable[[], None], averages: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
    ) -> None:
        with new_folder(folder, finish, group):
            write_files()
            if averages:
                try:
                    save_dcp({"model": dict(averages)}, storage_writer=files.averages_writer(), process_group=group)
                except CheckpointException as error:  # which is no Exception
                    raise RuntimeError(f"saving {folder.path} failed: {error}") from error
            if isinstance(folder, OwnFolder):
                with raise_on_all_ranks(f"saving {folder.path}", group):
                    own = files.digests()
                of_all: list[Any] = [None] * dist.get_world_size(group)
                dist.all_gather_object(of_all, own, group)
                for each in of_all:
                    digests.update(each)

    if saver is None:
        write(partial(save_engine, files), averaged)
        return
    staged = StagedFiles(files)
    save_engine(staged)
    with raise_on_all_ranks(f"saving {folder.path}"):
        copied = saver.stage({"files": staged.states, "averages": dict(averaged)})
    staged.states.clear()  # else what DeepSpeed has made for the files lives until they are written

    def write_files(group: dist.ProcessGroup) -> None:
        with raise_on_all_ranks(f"saving {folder.path}", group):
            staged.write(copied["files"])

    saver.start(
        f"Saving {folder.path}",
        lambda group: write(partial(write_files, group), copied["averages"], group),
        store_messages(f"saves in {saver.group.group_name}"),
    )


@dataclass(frozen=True)
class StoredEngine:
    """The parts of a checkpoint that an engine loads."""

    path: Path
    tag: str
    """The folder in it with DeepSpeed's files."""
    with_optimizer: bool
    """Whether the optimizer's state is read, too."""
    weights_only: bool
    """False reads anything, whatever it may execute."""
    source: Path
    """The checkpoint, where ``path`` is a copy of one behind a URL; else the same."""
    copy: Download | None


def read(source: Path, *, with_optimizer: bool, stage: int, any_number: bool, weights_only: bool) -> dict[str, Any]:
    """Return the Trainer's state in a checkpoint, and a `StoredEngine` in it; every file is checked that will be read.

    Args:
        source: The folder; that behind a URL is copied to a temporary one.
        with_optimizer: Whether the optimizer's state is to be read.
        stage: Of the engine that will take it.
        any_number: Whether another number of ranks may have written it.
        weights_only: False reads anything, whatever it may execute.

    Raises:
        FileNotFoundError: If there is no checkpoint of DeepSpeed's.
        ValueError: If the optimizer's state is to be read, and another number of ranks or kind of stage has written it.
        RuntimeError: If it holds objects that may run code, or if a file is damaged or none; on every rank.
    """
    tag = _find_tag(source)
    if with_optimizer:
        _check_layout(source / tag, stage, any_number=any_number)
    path, copy = source, None
    if isinstance(source, ObjectPath):
        copy = download(source, tag, with_optimizer=with_optimizer, whole=any_number)
        path = copy.path
    with raise_on_all_ranks(f"loading {source}"):
        check_files(path, tag, files_to_check(path, tag, all_of_them=with_optimizer) if copy is None else copy.own)
    checkpoint = read_trainer_state(path / tag, weights_only=weights_only)
    checkpoint[STORED_WEIGHTS] = StoredEngine(path, tag, with_optimizer, weights_only, source, copy)
    for folder in (source / AVERAGED_WEIGHTS, source / tag / AVERAGED_WEIGHTS):
        if folder.is_dir():
            checkpoint[AVERAGED_WEIGHTS] = StoredAverages(folder)
    return checkpoint


@dataclass(frozen=True)
class StoredAverages:
    """Averages of the weights in a folder of torch.distributed.checkpoint."""

    path: Path

    @torch.no_grad()
    def fill(self, averages: Mapping[str, Tensor]) -> None:
        """Load this rank's part of each, one full tensor after the other; every rank calls it.

        Raises:
            RuntimeError: On every rank, if the folder is damaged or has no averages of what trains now.
        """
        with raise_on_all_ranks(f"loading {self.path}"):
            source, _, selection, plan = plan_merge(find_checkpoint(self.path), safe=False)
            if bytes_are_checked():
                source.check(set(selection.names.values()), lambda _: None)
            missing = sorted(set(averages) - {tensor.name for file in plan.files for tensor in file.tensors})
            if missing:
                raise RuntimeError(
                    f"{self.path} has no {missing}, which train now. Train what trained when it was saved."
                )
            for file in plan.files:
                wanted = tuple(tensor for tensor in file.tensors if tensor.name in averages)
                for name, full in load_tensors(replace(file, tensors=wanted)):
                    local_part(averages[name]).copy_(local_part(part_of(full, averages[name])))


def read_trainer_state(folder: Path, *, weights_only: bool) -> dict[str, Any]:
    """Return the Trainer's state in DeepSpeed's files.

    Args:
        folder: The one with the files, inside a checkpoint.
        weights_only: False reads anything, whatever it may execute.

    Raises:
        ValueError: If DeepSpeed's file for it is not there.
        RuntimeError: If it holds objects that may run code.
    """
    with reading_safely(weights_only):
        state = _read_model_file(folder)
    left_out = {*_OF_DEEPSPEED, _COUNTS}
    return {key: value for key, value in state.items() if key not in left_out}


def read_extra_states(folder: Path, *, weights_only: bool) -> dict[str, Any]:
    """Return what modules keep beside tensors, by stored names; see `read_trainer_state`."""
    with reading_safely(weights_only):
        return filter_extra_states(_read_model_file(folder)["module"])


def load(
    engine: Any, stored: StoredEngine, *, strict: bool, load_universal: bool, left_out: Container[str] = ()
) -> None:
    """Load a checkpoint into the engine.

    Args:
        engine: DeepSpeed's engine, not used before.
        stored: What `read` has found.
        strict: Whether every weight has to be there, and no other.
        load_universal: Whether another number of ranks may have written it.
        left_out: Frozen weights that it lacks, since the module brings them.

    Raises:
        ValueError: If other parameters were trained when it was saved.
        RuntimeError: If it holds objects that may run code.
    """
    path, tag, with_optimizer = stored.path, stored.tag, stored.with_optimizer
    universally = with_optimizer and load_universal
    convert = partial(universal.convert, path, tag, weights_only=stored.weights_only)
    if universally and not universal.is_converted(path):
        what = f"converting {path} to a universal checkpoint"
        if stored.copy is None:
            run_on_rank_zero(convert, what)
        else:
            with raise_on_all_ranks(what):
                stored.copy.once(".converted", lambda _: convert())
    if engine.zero_optimization_partition_weights() and not with_optimizer:
        extra = read_extra_states(path / tag, weights_only=stored.weights_only)
        weights = stored_weights(stored.source / tag, engine)
        load_full(engine, {**weights, **extra}, strict=strict and not left_out)
        _drop(stored.copy)
        return
    clipping = getattr(engine.optimizer, "clip_grad", None)
    with (
        reading_safely(stored.weights_only),
        quietly(),
        with_trained_parameters(engine),
        constants_aside(engine.module) as constants,
        Patches("ZeRO files") as patches,
    ):
        patches.put(engine, "load_universal_checkpoint", lambda: universally)
        if not universally:
            _follow_frozen(engine, path / tag, with_optimizer=with_optimizer)
        _, state = engine.load_checkpoint(
            str(path),
            tag=None if universally else tag,
            load_module_strict=strict and not left_out,
            load_optimizer_states=with_optimizer,
            load_lr_scheduler_states=False,
        )
        if state is None:
            raise ValueError(f"DeepSpeed finds no checkpoint in {path}.")
        if universally:
            _load_what_is_not_trained(engine, path / tag)
    _drop(stored.copy)
    check_constants(constants, engine.module, path)
    if clipping is not None:  # stages 1 and 2 take over the saved run's; the Trainer's counts
        engine.optimizer.clip_grad = clipping
    window = window_of(engine)
    if window is not None:
        window.accept_weights()
    if with_optimizer and window is not None and window.steps is not None:
        window.steps.load_state_dict(state.get(_COUNTS, {}))


def filter_extra_states(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra states in a state dict."""
    return {name: state for name, state in saved.items() if is_extra_state(name)}


def _drop(copy: Download | None) -> None:
    if copy is not None:
        copy.remove()


def stored_weights(folder: Path, engine: Any) -> dict[str, Tensor]:
    """Return the weights that stage 3 has saved, whichever number of ranks that was; every rank calls it.

    Args:
        folder: With DeepSpeed's files; may be behind a URL.
        engine: That takes them. Without an optimizer, rank 0 alone reads the values of what ZeRO-3 partitions.
    """
    skipped: set[str] = set()
    if dist.get_rank() != 0 and not zero_optimizer.is_partitioned_optimizer(engine.optimizer):
        named = engine.module.named_parameters(remove_duplicate=False)
        skipped = {name for name, one in named if hasattr(one, "ds_id")}
    weights: dict[str, Tensor] = {}
    with raise_on_all_ranks(f"loading {folder}"):
        source, _, selection, plan = plan_merge(find_checkpoint(folder), safe=False)
        if dist.get_rank() == 0 and bytes_are_checked():
            source.check(set(selection.names.values()), lambda _: None)
        for file in plan.files:
            for tensor in file.tensors:
                if tensor.name in skipped:
                    weights[tensor.name] = torch.empty(tensor.source.shape, device="meta")
            weights.update(
                load_tensors(replace(file, tensors=tuple(one for one in file.tensors if one.name not in weights)))
            )
            weights.update({alias: weights[name] for alias, name in file.ties.items()})
    return weights


@contextmanager
def with_trained_parameters(engine: Any) -> Iterator[None]:
    """Make DeepSpeed treat as frozen whatever its optimizer does not train, and nothing else.

    Stage 3 saves the values of frozen parameters separately, and would lose that of one which is in no optimizer.
    """
    before = [(each, each.requires_grad) for each in engine.module.parameters()]
    if zero_optimizer.is_partitioned_optimizer(engine.optimizer):
        trained = {each for group in zero_optimizer.parameter_groups(engine.optimizer) for each in group}
        for parameter, _ in before if trained else ():
            parameter.requires_grad_(parameter in trained)
    try:
        yield
    finally:
        for parameter, requires_grad in before:
            parameter.requires_grad_(requires_grad)


def _follow_frozen(engine: Any, folder: Path, *, with_optimizer: bool) -> None:
    """Take for frozen what was frozen when a checkpoint was saved, where DeepSpeed looks for the values it had.

    Raises:
        ValueError: If the optimizer is to be restored, and trains other parameters than the one that was saved.
    """
    groups = _read_model_file(folder).get("param_shapes")
    if not groups:  # stage 0, where it makes no difference
        return
    trained = {name for group in groups for name in group}  # stage 1 saves no names of what was frozen
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad == (name in trained):
            continue
        if with_optimizer:
            then, now = ("trained", "is frozen now") if name in trained else ("frozen", "is trained now")
            raise ValueError(
                f"{name} was {then} when {folder.parent} was saved, and {now}: DeepSpeed's optimizer has no state "
                "for it in the checkpoint, or does not hold it now. Start fit() with the same parameters frozen as "
                "then, and change that in on_train_start(); or load the weights into the module and start from "
                "scratch."
            )
        parameter.requires_grad_(name in trained)


def _read_model_file(folder: Path) -> dict[str, Any]:
    """Return the content of this process's file other than tensors, which stay in it.

    It is read as DeepSpeed reads it; `reading_safely` overrules the flag unless the user trusts the file.

    Raises:
        ValueError: If there is none.
    """
    own = dist.get_rank() if dist.is_initialized() else 0
    names = (f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (own, 0))  # or of fewer ranks
    for file in (folder / name for name in (*names, "mp_rank_00_model_states.pt")):
        if not file.is_file():
            continue
        state: dict[str, Any]
        if isinstance(file, ObjectPath):
            with ObjectFolder.of(file).reading("") as stream:
                state = torch.load(stream, map_location="cpu", weights_only=False)
        else:
            state = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
        return state
    raise ValueError(f"DeepSpeed finds no checkpoint in {folder.parent}.")


def _find_tag(path: Path) -> str:
    """Return the name of the folder with DeepSpeed's files: see [Note: tags] in ``files.py``."""
    named = latest_tag(path) if path.is_dir() else None
    if named is not None and named.name != universal.FOLDER:
        return str(named.relative_to(path))
    if not (path / universal.TAG).is_dir():
        kind = "is a file that torch.save() did not write" if path.is_file() else "has no 'checkpoint' in it"
        found = f"{path} {kind}" if path.exists() else f"Checkpoint file not found: {path}"  # as Lightning begins it
        raise FileNotFoundError(
            f"{found}: a checkpoint is the folder that trainer.save_checkpoint(path) writes with "
            "AccelDeepSpeedStrategy, or the file that it writes with other strategies. Load weights from elsewhere "
            "into the module before fit()."
        )
    return universal.TAG


def _check_layout(folder: Path, here: int, *, any_number: bool) -> None:
    files = [match for file in folder.iterdir() if (match := _OPTIMIZER_FILE.search(file.name))]
    saved_by = len({match.group(1) for match in files})
    stage3 = any(folder.glob("zero_pp_rank_*_model_states.pt"))
    kind = "stage 3" if stage3 else "stage 1 or 2" if files else "stage 0"
    wanted = {0: "stage 0", 1: "stage 1 or 2", 2: "stage 1 or 2", 3: "stage 3"}[here]
    if kind != wanted:
        raise ValueError(
            f"{folder.parent} was saved with ZeRO {kind}, and this is stage {here}: DeepSpeed stores its state "
            f"differently in each. Resume with {kind}, or merge the weights and start from them."
        )
    if files and saved_by != dist.get_world_size() and not any_number:
        raise ValueError(
            f"{folder.parent} was saved by {saved_by} rank(s), and this run has {dist.get_world_size()}. Start "
            f"{saved_by}, or use AccelDeepSpeedStrategy(load_universal=True), which converts it once."
        )


def _load_what_is_not_trained(engine: Any, folder: Path) -> None:
    """Load buffers, frozen parameters, extra states: a universal checkpoint restores what the optimizer has, alone."""
    module: nn.Module = engine.module
    stage3 = engine.zero_optimization_partition_weights()
    file = folder / ("zero_pp_rank_0_mp_rank_00_model_states.pt" if stage3 else "mp_rank_00_model_states.pt")
    saved = _load_tensors(file)["module"]
    frozen = {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}
    with torch.no_grad():
        for name, tensor in {**({} if stage3 else frozen), **dict(module.named_buffers())}.items():
            if name in saved:
                tensor.copy_(saved[name])
    load_extra_states(module, _read_model_file(folder)["module"])
    if stage3 and frozen:
        _load_frozen_pieces(frozen, folder)


def _load_frozen_pieces(frozen: dict[str, nn.Parameter], folder: Path) -> None:
    """Join the pieces of frozen parameters that stage 3 has saved, and partition them over these ranks."""
    files = [file for file in folder.iterdir() if _MODEL_FILE.search(file.name)]
    saved = [_load_tensors(file) for file in sorted(files, key=lambda file: int(file.name.split("_")[3]))]
    if saved[0]["frozen_param_shapes"] is None:  # saved with exclude_frozen_parameters
        return
    for name, parameter in frozen.items():
        if name not in saved[0]["frozen_param_shapes"]:
            raise ValueError(
                f"{name} is frozen, but was not when {folder.parent} was saved: load_universal=True cannot restore "
                "it. Freeze the same parameters as then, or resume with the same number of ranks."
            )
        shape = saved[0]["frozen_param_shapes"][name]
        pieces = torch.cat([each["frozen_param_fragments"][name].flatten() for each in saved])
        with deepspeed_library().zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if dist.get_rank() == 0:
                parameter.copy_(pieces[: shape.numel()].view(shape))  # the last piece is padded


def _load_tensors(file: Path) -> dict[str, Any]:
    """Return a file's content; for the flag see `_read_model_file`."""
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
    return state


# ------------------------------------------------------------------------------------------------
# Full checkpoints, in one file, whose weights an engine takes: plain Lightning's, or those of FSDP.


def is_full(path: Path) -> bool:
    """Return whether ``path`` is a file of ``torch.save``."""
    return path.is_file() and zipfile.is_zipfile(path)


def read_full(path: Path, *, weights_only: bool, fitting: bool) -> dict[str, Any]:
    """Return the Trainer's checkpoint; its weights stay in the file until they are loaded.

    Args:
        path: The file.
        weights_only: False reads anything, whatever it may execute.
        fitting: Whether an optimizer begins, whose state the file has in a form that ZeRO cannot take.

    Raises:
        ValueError: If it holds no weights.
        RuntimeError: If it holds objects that may run code, or is damaged; on every rank.
    """
    with reading_safely(weights_only):
        checkpoint = read_torch(path, weights_only)
    return take_full(checkpoint, path, fitting=fitting)


def take_full(checkpoint: dict[str, Any], path: Path | str, *, fitting: bool) -> dict[str, Any]:
    """Return a full checkpoint without what ZeRO cannot take; see `read_full`."""
    check_full(checkpoint, path)
    if fitting and checkpoint.pop("optimizer_states", None):
        rank_zero_warn(
            f"{path} has the optimizer's state of whole parameters, which DeepSpeed's optimizer does not accept: "
            "weights, schedules and the position of the loop are restored, and the optimizer starts from scratch. "
            "Checkpoints of AccelDeepSpeedStrategy restore it."
        )
    return checkpoint


@torch.no_grad()
def load_full(engine: Any, weights: Mapping[str, Tensor], *, strict: bool) -> None:
    """Load full weights into an engine, partitioned or not, and into the fp32 ones that its optimizer steps on.

    Args:
        engine: DeepSpeed's.
        weights: On every rank.
        strict: Whether every weight has to be there, and no other.

    Raises:
        RuntimeError: If names or shapes do not fit.
        ValueError: If the engine keeps fp32 weights where nobody can reach them.
    """
    zero, module = engine.optimizer, engine.module
    partitioned = zero_optimizer.is_partitioned_optimizer(zero)
    if not partitioned and isinstance(getattr(zero, "optimizer", None), torch.optim.Optimizer):
        raise ValueError(
            "DeepSpeed's stage 0 in half precision keeps separate fp32 weights, which a full checkpoint does not "
            "restore. Use stage 1, or load the weights into the module before fit()."
        )
    check_constants(weights, module, "the checkpoint")
    weights = {name: weight for name, weight in weights.items() if not is_constant(name, weights)}
    tensors = _check_names(module, weights, strict=strict)
    for name, tensor in tensors.items():
        if name not in weights:
            continue
        if hasattr(tensor, "ds_id"):
            with deepspeed_library().zero.GatheredParameters([tensor], modifier_rank=0):
                if dist.get_rank() == 0:
                    tensor.copy_(weights[name])
        else:
            tensor.copy_(weights[name])
    load_extra_states(module, weights)
    if partitioned:
        flats = zero_optimizer.masters(zero)
        names = {parameter: name for name, parameter in module.named_parameters()}
        for piece in zero_optimizer.pieces(zero):
            if names[piece.parameter] in weights:
                values = weights[names[piece.parameter]].flatten()[piece.start : piece.start + piece.numel]
                piece.of(flats[piece.group].detach()).copy_(values)
    window = window_of(engine)
    if window is not None:
        window.accept_weights()


def _check_names(module: nn.Module, weights: Mapping[str, Tensor], *, strict: bool) -> dict[str, Any]:
    """Return the parameters and persistent buffers of a module by all their names."""
    persistent = set(module.state_dict())
    tensors: dict[str, Any] = {
        name: tensor
        for name, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        if name in persistent
    }
    wanted = {*tensors, *filter(is_extra_state, persistent)}
    missing, unexpected = sorted(wanted - set(weights)), sorted(set(weights) - persistent)
    problems = [f"{name} is missing." for name in missing] + [f"{name} is not in the model." for name in unexpected]
    if problems and not strict:
        rank_zero_info("\n".join(["strict_loading=False loads what both sides have:", *problems]))
        problems = []
    for name, tensor in tensors.items():
        shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
        if name in weights and tuple(weights[name].shape) != shape:
            problems.append(f"{name} has the shape {tuple(weights[name].shape)}, and {shape} in the model.")
    if problems:
        raise RuntimeError(
            "\n".join([f"The weights do not fit {type(module).__name__}:", *problems])
            + "\nSet strict_loading=False on the LightningModule to load the names that both have."
        )
    return tensors


# ------------------------------------------------------------------------------------------------
# Whether DeepSpeed's files are as they were written: each rank looks at its share of them.


_MODEL, _ALL = "*_model_states.pt", "*_states.pt"


def files_to_check(path: Path, tag: str, *, all_of_them: bool) -> list[Path]:
    """Return this rank's share of what DeepSpeed will read of a folder that all ranks share.

    Args:
        path: The checkpoint's folder.
        tag: The one in it with DeepSpeed's files.
        all_of_them: Whether optimizer states are read, too.
    """
    files = sorted((path / tag).glob(_ALL if all_of_them else _MODEL))
    if all_of_them:
        files += sorted((path / universal.FOLDER).rglob("*.pt"))
    return files[dist.get_rank() :: dist.get_world_size()]


def check_files(path: Path, tag: str, files: Iterable[Path]) -> None:
    """Check files that DeepSpeed will read.

    Raises:
        CheckpointError: If one is damaged, or no file: DeepSpeed would wait for a FIFO.
    """
    place = path if (path / MANIFEST_NAME).exists() else path / tag
    manifest = read_manifest(place)
    for file in files:
        if file.suffix != ".pt":
            continue
        is_regular(file)
        name = file.relative_to(place).as_posix() if file.is_relative_to(place) else ""
        if manifest is not None and name in manifest.digests:
            check_written(file, manifest.digests[name])
        if bytes_are_checked():
            check_bytes(file)


# ------------------------------------------------------------------------------------------------
# Writing DeepSpeed's files so that a rank that cannot does not leave the others waiting for it.
#
# DeepSpeed's ranks meet after each has written its files. One that raised on the way there would not come, and the
# others would learn of it from a timeout.


@contextmanager
def guarded_files(engine: Any, into: LocalFiles | ObjectFiles | StagedFiles, path: Path | str) -> Iterator[None]:
    """Make an engine write a checkpoint; an error of one rank is raised on all, once all have finished.

    Args:
        engine: DeepSpeed's.
        into: What takes the files.
        path: Names the checkpoint in errors.

    Raises:
        RuntimeError: On every rank, naming the ranks and files that failed.
    """
    files = _GuardedFiles(engine.checkpoint_engine, into)
    with Patches("ZeRO files") as patches:
        patches.put(engine, "checkpoint_engine", files)
        patches.put(engine, "_copy_recovery_script", files.guarded(into.copy_script))
        yield
    with raise_on_all_ranks(f"saving {path}"):
        if files.error is not None:
            raise files.error


class _GuardedFiles:
    """DeepSpeed's checkpoint engine for one save: after a failure, nothing more is written."""

    def __init__(self, engine: Any, into: LocalFiles | ObjectFiles | StagedFiles) -> None:
        self.engine = engine
        self.error: Exception | None = None
        self.makedirs = self.guarded(into.make_folder)
        self.commit = self.guarded(engine.commit)
        self._save = self.guarded(into.save)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file as DeepSpeed does, or do nothing after a failure."""
        self._save(state_dict, Path(path))

    def guarded(self, action: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``action`` so that the first error is kept, and nothing done after it."""

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self.error is not None:
                return None
            try:
                return action(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 (raised when all ranks have come to the end)
                self.error = error
                return None

        return guarded


def check_async(saves: AsyncSaver | None, engine: Any) -> None:
    """Check, before anything is trained, that an engine's state can be copied for saves in the background.

    Raises:
        ValueError: If it cannot.
    """
    if saves is not None and (what := written_elsewhere(engine)):
        raise ValueError(
            f"async_save=True copies the state to host memory, and torch.save writes the copy: not {what}. Use "
            "async_save=False."
        )


# ------------------------------------------------------------------------------------------------
# DeepSpeed's attributes on modules, for those that are saved among the hyperparameters.


_ADDED = {"applied_pre_backward_ref_cnt", "_external_params", "_original_parameters"}
"""Attributes that DeepSpeed's stage 3 adds to layers, besides functions and those named ``ds_...``."""


def _restore(attributes: dict[str, Any]) -> None:
    attributes["_parameters"] = dict(attributes.get("_original_parameters", attributes["_parameters"]))
    for name in list(attributes):
        if name.startswith("ds_") or name in _ADDED:
            del attributes[name]


def _is_partitioned(layer: nn.Module) -> bool:
    return any(hasattr(parameter, "ds_id") for parameter in layer.parameters(recurse=False))


TRACES = ShardingArtifacts(
    packages=("deepspeed", "accelight"),
    restore=_restore,
    holds_shards=_is_partitioned,
    reason="ZeRO-3 has partitioned",
)


# ------------------------------------------------------------------------------------------------
# Consolidated 16-bit weights of a model that ZeRO-3 has partitioned.


def gather_16bit(engine: Any) -> dict[str, Tensor]:
    """Return all weights and buffers in 16 bits on rank 0, nothing elsewhere; every rank must call it.

    One layer after the other is gathered. Weights that compute in fp32 become bf16. A tied weight is there once.
    """
    gathered = deepspeed_library().zero.GatheredParameters
    dtype = torch.float16 if engine.fp16_enabled() else torch.bfloat16
    is_writer, seen, weights = dist.get_rank() == 0, set(), {}
    for prefix, module in engine.module.named_modules():
        parameters = list(module.parameters(recurse=False))
        own = {*(name for name, _ in module.named_parameters(recurse=False))}
        own |= {name for name, _ in module.named_buffers(recurse=False)} - module._non_persistent_buffers_set
        with gathered(parameters, enabled=engine.zero_optimization_partition_weights()):
            for name in sorted(own) if is_writer else ():
                tensor = getattr(module, name)
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    to = dtype if tensor.is_floating_point() else tensor.dtype
                    full = f"{prefix}.{name}" if prefix else name
                    weights[full] = tensor.detach().to("cpu", to, copy=True).contiguous()
    return weights
