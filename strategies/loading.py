"""Checkpoints without a strategy: `load_from_checkpoint`, `newest_checkpoint` and `unwrap_model`."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..checkpoint.locate import find_checkpoint, find_newest
from ..checkpoint.manifest import description_folder, read_manifest
from ..checkpoint.merge import load_state_dict
from ..checkpoint.storage import check_no_password, is_remote, source_path
from ..state.rendezvous import raise_together, run_on_rank_zero
from .common.broadcast import FROZEN_BASE, check_base
from .common.checkpoint_files import open_object
from .common.modules import check_constants, is_constant, with_constants
from .deepspeed.checkpoint import read_extra_states, read_trainer_state
from .fsdp.checkpoint import loader
from .fsdp.checkpoint.writer import METADATA_FILE
from .fsdp.sharded_model import RootWrapper
from .upstream.lightning import LightningModule, _load_state, rank_zero_warn

ModuleT = TypeVar("ModuleT", bound=LightningModule)


def load_from_checkpoint(
    module_class: type[ModuleT],
    checkpoint_path: str | os.PathLike[str],
    *,
    map_location: str | torch.device | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> ModuleT:
    """Return a module with the full weights and the hyperparameters of a checkpoint, sharded or not.

    ``module_class.load_from_checkpoint`` does that for a file, and cannot read folders.

    Args:
        module_class: The LightningModule's class.
        checkpoint_path: A folder that the Trainer saved with FSDP or DeepSpeed, accelight's strategies or Lightning's.
            A file is handed on to ``module_class.load_from_checkpoint``.
        map_location: Device of the module. Default: the CPU for a folder, Lightning's default for a file.
        strict: Whether every name must be on both sides; a folder of FSDP has none for an extra state that is empty.
            Default: the module's ``strict_loading``.
        weights_only: False lets what lies beside the weights be any object, and so run code when it is read; for
            checkpoints that one trusts.
        storage_options: Of the file system behind URLs (``endpoint_url``), see fsspec; by default from the environment.
        **kwargs: Arguments of the class, which win over the saved hyperparameters.

    Raises:
        CheckpointError: If the checkpoint is damaged, or no model can be identified in it.
        ValueError: If the folder holds weights alone, and nothing of a Trainer.
        RuntimeError: If ``strict`` and names are missing or unexpected; if what lies beside the weights may run code;
            if the checkpoint has left frozen weights out, and the module brings others.

    Source: lightning 2.6 ``LightningModule.load_from_checkpoint``.
    """
    path = source_path(checkpoint_path, storage_options)
    if not path.is_dir():
        url = str(checkpoint_path)
        with open_object(url, storage_options) if is_remote(url) else nullcontext(url) as file:
            return module_class.load_from_checkpoint(
                file, map_location=map_location, strict=strict, weights_only=weights_only, **kwargs
            )
    checkpoint, extra_states = _trainer_state(path, weights_only)
    weights = load_state_dict(path)
    parts = tuple(f"{name}." for name in extra_states)
    weights = {name: one for name, one in weights.items() if not name.startswith(parts)}
    base = checkpoint.get(FROZEN_BASE, {})
    saved_from = {*weights, *base}
    constants = {name: weights.pop(name) for name in list(weights) if is_constant(name, saved_from)}
    checkpoint["state_dict"] = {**weights, **extra_states}
    checkpoint.setdefault(module_class.CHECKPOINT_HYPER_PARAMS_KEY, {}).update(kwargs)
    if base:  # the module brings what the checkpoint has left out
        module: ModuleT = _load_state(module_class, checkpoint, strict=False, **kwargs)  # type: ignore[assignment]
        if module.strict_loading if strict is None else strict:
            _check_names(module, set(checkpoint["state_dict"]), base)
        shards = {name: (one, False) for name, one in module.named_parameters()}
        check_base(base, with_constants(shards, module), None, path)
    else:
        module = _load_state(module_class, checkpoint, strict=strict, **kwargs)  # type: ignore[assignment]
    check_constants(constants, module, path)
    return module if map_location is None else module.to(map_location)


def _check_names(module: LightningModule, stored: set[str], left_out: Container[str]) -> None:
    named = list(module.named_parameters(remove_duplicate=False))
    brought = {one for name, one in named if name in left_out}
    state = module.state_dict()
    own = {name for name in state if not is_constant(name, state)} - {name for name, one in named if one in brought}
    missing, unexpected = sorted(own - stored), sorted(stored - own)
    if missing or unexpected:
        raise RuntimeError(
            f"The weights do not fit {type(module).__name__}: missing in the checkpoint: {missing}; unexpected: "
            f"{unexpected}. Pass strict=False to load what both sides have."
        )


def _trainer_state(path: Path, weights_only: bool | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the Trainer's state, and what modules keep beside tensors."""
    folder = find_checkpoint(path).folder
    for one in (path, folder):
        place = description_folder(one)
        if (place / METADATA_FILE).exists():
            manifest = read_manifest(one)
            digest = None if manifest is None else manifest.digests.get(METADATA_FILE)
            return loader.read_metadata(place, weights_only, digest), loader.read_extra_states(folder)
    if any(folder.glob("*_model_states.pt")):
        is_safe = weights_only is not False
        return read_trainer_state(folder, weights_only=is_safe), read_extra_states(folder, weights_only=is_safe)
    return loader.read_metadata(folder, weights_only), {}  # says that there is none


# ------------------------------------------------------------------------------------------------
# `newest_checkpoint`: the checkpoint that a restarted run resumes from, the same on all processes.


def newest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the newest whole checkpoint of a folder, or None where there is none: training begins then.

    For ``trainer.fit(..., ckpt_path=newest_checkpoint("checkpoints"))`` in a script that is started again whenever it
    has ended. Newest is the one of the most steps, as the checkpoint itself says, full or sharded, whatever its name
    (``last.ckpt`` and ``hpc_ckpt_1.ckpt`` too). Checkpoints that a killed process has left incomplete, and those
    without optimizer state, are skipped with a warning. The bytes of tensors are not read.

    With a process group, process 0 searches and sends the result to the others, and all must call it. Without one,
    each process searches by itself. `ElasticTraining(resume_from=...)` searches once the processes are connected.

    Args:
        folder: Such as ``ModelCheckpoint(dirpath)``. It need not exist.

    Raises:
        RuntimeError: On every process, if some do not see the checkpoint that process 0 has found, naming them.
    """
    check_no_password(folder)

    def find() -> tuple[str | None, dict[str, str]]:
        found = find_newest(folder)
        return None if found.path is None else str(found.path), found.passed_over

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        path, passed_over = find()
    else:
        path, passed_over = run_on_rank_zero(find, f"Looking for a checkpoint in {folder}")
        _check_seen_by_all(path, folder)
    for name, reason in passed_over.items():
        rank_zero_warn(f"newest_checkpoint() skips {source_path(folder) / name}: {reason}")
    return path


def _check_seen_by_all(path: str | None, folder: str | os.PathLike[str]) -> None:
    problems = []
    if path is not None and not source_path(path).exists():
        problems.append(
            f"{path} of process 0 does not exist on this process. {folder} must be one folder that all "
            "processes share: use a path on a file system that the machines share."
        )
    raise_together(f"Looking for a checkpoint in {folder}", problems)


# ------------------------------------------------------------------------------------------------
# The user's model inside the wrappers of strategies and ``torch.compile``.


_COMPILED = "_orig_mod"  # where torch keeps what `torch.compile` wraps; importing its class costs seconds


def unwrap_model(model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
    """Return the module inside of wrappers for training on several processes, such as ``trainer.strategy.model``.

    Those of FSDP1 and of DDP, DeepSpeed's engine, the root that FSDP2's hooks are on. Sharded parameters stay sharded:
    save and merge them, or call the model on every process, to use the weights.

    Args:
        model: The outermost module.
        keep_fp32_wrapper: Takes what Accelerate's callers pass; nothing here wraps a model's outputs.
        keep_torch_compile: Keep the wrapper of ``torch.compile`` where it stands directly around the user's model; one
            around the wrappers for training goes with them.

    Source: accelerate 1.15 ``utils/other.py`` (``extract_model_from_parallel``).
    """
    kept = model
    while (inner := _inside(model)) is not None:
        if not _is_compiled(model):
            kept = inner
        model = inner
    return kept if keep_torch_compile else model


def _is_compiled(model: nn.Module) -> bool:
    return _COMPILED in model._modules


def _inside(model: nn.Module) -> Any:
    """Return the module in a wrapper, or None of what is no wrapper."""
    if _is_compiled(model):
        return model._modules[_COMPILED]
    return model.module if isinstance(model, _wrappers()) else None


def _wrappers() -> tuple[type[nn.Module], ...]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    found = [DistributedDataParallel, torch.nn.DataParallel, FullyShardedDataParallel, RootWrapper]
    deepspeed = sys.modules.get("deepspeed")  # else there is no engine
    return (*found, deepspeed.DeepSpeedEngine) if deepspeed is not None else tuple(found)
