"""DeepSpeed's own sharded checkpoints, with the Trainer's state in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ....checkpoint.digests import FileDigest
from ....checkpoint.manifest import write_manifest
from ....state import gather_object
from ...common.agreed_outcome import failing_together, run_on_rank_zero
from ...common.extra_states import is_extra_state, load_extra_states
from ...common.held_weights import STORED_WEIGHTS
from ...common.new_checkpoints import new_folder
from ...common.own_folders import writes_own_folders
from ...common.parameter_ties import find_ties
from ..engines import partitions
from ..engines.changed_weights import take_changed_weights
from ..engines.library import deepspeed_library, quietly
from ..engines.window import window_of
from . import sixteen_bit, universal
from .checked_files import check_files, digests_of
from .guarded_files import guarded_files
from .safe_loading import reading_safely

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
    engine: Any, path: Path, trainer_state: dict[str, Any], *, write_16bit: bool, exclude_frozen: bool = False
) -> None:
    """Write one folder, every rank its own shards; it has its name only when it is complete.

    Args:
        engine: DeepSpeed's engine.
        path: The folder; what is there already is replaced, last of all.
        trainer_state: The Trainer's checkpoint, without weights and optimizer states.
        write_16bit: Whether rank 0 writes the consolidated weights into the folder, too.
        exclude_frozen: Whether frozen parameters are left out of the shards.

    Raises:
        ValueError: If the state has a key that DeepSpeed uses itself.
        RuntimeError: On every rank, if any rank failed; it names the rank.
    """
    taken = sorted(_OF_DEEPSPEED & set(trainer_state))
    if taken:
        raise ValueError(f"on_save_checkpoint() wrote {taken}, which DeepSpeed's checkpoint has itself. Rename them.")
    window = window_of(engine)
    if window is not None and window.changes is not None:
        window.changes.reach_model()
        window.follow_changed_weights()  # since the last step: the next would have done it
    elif partitions.is_partitioned_optimizer(engine.optimizer):
        take_changed_weights(engine.optimizer)
    weights: dict[str, torch.Tensor] = sixteen_bit.gather_16bit(engine) if write_16bit else {}

    with _told_what_is_trained(engine):
        left_out = [name for name, one in engine.module.named_parameters() if exclude_frozen and not one.requires_grad]

    of_others: dict[str, FileDigest] = {}

    def complete(folder: Path) -> None:
        (folder / "latest").write_text(universal.TAG)  # by DeepSpeed, it would be written between two meetings of ranks
        if write_16bit:
            sixteen_bit.write_16bit(weights, folder)
        # A module that has two names is among the shared parameters of DeepSpeed's files under one of them.
        ties, digests = find_ties(engine.module), {**of_others, **digests_of(folder)}
        write_manifest(folder, model_prefix="module", ties=ties, digests=digests, left_out=left_out)

    if window is not None and window.steps is not None and (counts := window.steps.state_dict()):
        trainer_state = {**trainer_state, _COUNTS: counts}
    with new_folder(path, complete) as folder:
        with guarded_files(engine, path), _told_what_is_trained(engine):
            engine.save_checkpoint(
                str(folder),
                tag=universal.TAG,
                client_state=trainer_state,
                save_latest=False,
                exclude_frozen_parameters=exclude_frozen,
            )
        if writes_own_folders():
            for digests in gather_object([digests_of(folder)]):
                of_others.update(digests)


@dataclass(frozen=True)
class StoredEngine:
    """What an engine takes of a checkpoint."""

    path: Path
    with_optimizer: bool
    """Whether the optimizer's state is read, too."""
    weights_only: bool
    """False reads anything, whatever it may execute."""


def read(path: Path, *, with_optimizer: bool, stage: int, any_number: bool, weights_only: bool) -> dict[str, Any]:
    """Return the Trainer's state in a checkpoint, and a `StoredEngine` in it; every file is checked that will be read.

    Args:
        path: The folder.
        with_optimizer: Whether the optimizer's state is to be read.
        stage: Of the engine that will take it.
        any_number: Whether another number of ranks may have written it.
        weights_only: False reads anything, whatever it may execute.

    Raises:
        FileNotFoundError: If there is no checkpoint of DeepSpeed's.
        ValueError: If the optimizer's state is to be read, and another number of ranks or kind of stage has written it.
        RuntimeError: If it holds objects that may run code, or if a file is damaged or none; on every rank.
    """
    _check_folder(path)
    if with_optimizer:
        _check_layout(path / universal.TAG, stage, any_number=any_number)
    with failing_together(f"loading {path}"):
        check_files(path, all_of_them=with_optimizer or stage == 3)  # stage 3 has weights in the optimizer's files
    checkpoint = read_trainer_state(path / universal.TAG, weights_only=weights_only)
    checkpoint[STORED_WEIGHTS] = StoredEngine(path, with_optimizer, weights_only)
    return checkpoint


def read_trainer_state(folder: Path, *, weights_only: bool) -> dict[str, Any]:
    """Return what DeepSpeed's files hold of the Trainer.

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


def load(engine: Any, stored: StoredEngine, *, strict: bool, load_universal: bool) -> None:
    """Load a checkpoint into the engine.

    Args:
        engine: DeepSpeed's engine, not used before.
        stored: What `read` has found.
        strict: Whether every weight has to be there, and no other.
        load_universal: Whether another number of ranks may have written it.

    Raises:
        ValueError: If other parameters were trained when it was saved.
        RuntimeError: If it holds objects that may run code.
    """
    path, with_optimizer = stored.path, stored.with_optimizer
    universally = with_optimizer and load_universal
    if universally and not universal.is_converted(path):
        run_on_rank_zero(lambda: universal.convert(path), f"converting {path} to a universal checkpoint")
    partitioned = engine.zero_optimization_partition_weights()
    if partitioned and not with_optimizer and not hasattr(engine.optimizer, "_restore_from_bit16_weights"):
        # DeepSpeed 0.19 asks for it also where there is no optimizer, and nothing to restore.
        engine.optimizer._restore_from_bit16_weights = lambda: None
    clipping = getattr(engine.optimizer, "clip_grad", None)
    with reading_safely(stored.weights_only), quietly(), _told_what_is_trained(engine):
        if not universally:
            _follow_frozen(engine, path / universal.TAG, with_optimizer=with_optimizer)
        _, state = engine.load_checkpoint(
            str(path),
            tag=None if universally else universal.TAG,
            load_module_strict=strict,
            load_optimizer_states=with_optimizer,
            load_lr_scheduler_states=False,
            custom_load_fn=None if with_optimizer or not partitioned else _with_extra_states(path, strict=strict),
        )
        if state is None:
            raise ValueError(f"DeepSpeed finds no checkpoint in {path}.")
        if universally:
            _load_what_is_not_trained(engine, path)
    if clipping is not None:  # stages 1 and 2 take over the saved run's; the Trainer's counts
        engine.optimizer.clip_grad = clipping
    window = window_of(engine)
    if window is not None:
        window.accept_weights()
    if with_optimizer and window is not None and window.steps is not None:
        window.steps.load_state_dict(state.get(_COUNTS, {}))


def _with_extra_states(path: Path, *, strict: bool) -> Callable[..., None]:
    """Return what loads weights that DeepSpeed has put together of stage 3's partitions: nothing else is in those."""

    def load_all(src: Mapping[str, Any], dst: nn.Module) -> None:
        saved: Mapping[str, Any] = _read_model_file(path / universal.TAG)["module"]
        extra = {name: state for name, state in saved.items() if is_extra_state(name)}
        dst.load_state_dict({**src, **extra}, strict=strict)

    return load_all


@contextmanager
def _told_what_is_trained(engine: Any) -> Iterator[None]:
    """Let DeepSpeed treat as frozen whatever its optimizer does not train, and nothing else.

    Stage 3 saves the values of frozen parameters separately, and would lose that of one which is in no optimizer.
    """
    before = [(each, each.requires_grad) for each in engine.module.parameters()]
    if partitions.is_partitioned_optimizer(engine.optimizer):
        trained = {each for group in partitions.parameter_groups(engine.optimizer) for each in group}
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
            then, now = ("trained", "is frozen here") if name in trained else ("frozen", "is trained here")
            raise ValueError(
                f"{name} was {then} when {folder.parent} was saved, and {now}: DeepSpeed's optimizer has no state for "
                "it there, or no place here. Begin fit() with the parameters frozen that were frozen then, and change "
                "that in on_train_start(); or load the weights into the module and begin anew."
            )
        parameter.requires_grad_(name in trained)


def _read_model_file(folder: Path) -> dict[str, Any]:
    """Return what the file of this process holds beside tensors, which stay in it.

    It is read as DeepSpeed reads it; `reading_safely` overrules the flag unless the user trusts the file.

    Raises:
        ValueError: If there is none.
    """
    own = dist.get_rank() if dist.is_initialized() else 0
    names = (f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (own, 0))  # or of fewer ranks
    for file in (folder / name for name in (*names, "mp_rank_00_model_states.pt")):
        if file.is_file():
            state: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
            return state
    raise ValueError(f"DeepSpeed finds no checkpoint in {folder.parent}.")


def _check_folder(path: Path) -> None:
    if not (path / universal.TAG).is_dir():
        kind = "is a file that torch.save() has not written" if path.is_file() else "has no 'checkpoint' in it"
        found = f"{path} {kind}" if path.exists() else f"Checkpoint file not found: {path}"  # as Lightning begins it
        raise FileNotFoundError(
            f"{found}: a checkpoint is the folder that "
            "trainer.save_checkpoint(path) writes with AccelDeepSpeedStrategy, or the file that it writes with others. "
            "Weights alone, from elsewhere, belong into the module before fit()."
        )


def _check_layout(folder: Path, here: int, *, any_number: bool) -> None:
    files = [match for file in folder.iterdir() if (match := _OPTIMIZER_FILE.search(file.name))]
    saved_by = len({match.group(1) for match in files})
    stage3 = any(folder.glob("zero_pp_rank_*_model_states.pt"))
    kind = "stage 3" if stage3 else "stage 1 or 2" if files else "stage 0"
    wanted = {0: "stage 0", 1: "stage 1 or 2", 2: "stage 1 or 2", 3: "stage 3"}[here]
    if kind != wanted:
        raise ValueError(
            f"{folder.parent} was saved with ZeRO {kind}, and this is stage {here}: DeepSpeed keeps its state "
            f"differently there. Resume with {kind}, or merge the weights and start from them."
        )
    if files and saved_by != dist.get_world_size() and not any_number:
        raise ValueError(
            f"{folder.parent} was saved by {saved_by} rank(s), and this run has {dist.get_world_size()}. Start "
            f"{saved_by}, or use AccelDeepSpeedStrategy(load_universal=True), which converts it once."
        )


def _load_what_is_not_trained(engine: Any, path: Path) -> None:
    """Load buffers, frozen parameters, extra states: a universal checkpoint restores what the optimizer has, alone."""
    module: nn.Module = engine.module
    stage3 = engine.zero_optimization_partition_weights()
    folder = path / universal.TAG
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
                f"{name} is frozen here and was not when {folder.parent} was saved: load_universal=True cannot restore "
                "it. Freeze the same parameters as then, or resume with the number of ranks that saved."
            )
        shape = saved[0]["frozen_param_shapes"][name]
        pieces = torch.cat([each["frozen_param_fragments"][name].flatten() for each in saved])
        with deepspeed_library().zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if dist.get_rank() == 0:
                parameter.copy_(pieces[: shape.numel()].view(shape))  # the last piece is padded


def _load_tensors(file: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return state
