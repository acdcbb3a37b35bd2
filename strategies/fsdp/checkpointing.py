"""Saving and loading weights and optimizer state of a sharded model: one path for both FSDP versions.

Everything goes through ``torch.distributed.checkpoint.state_dict``, whose names are the plain parameter names; that is
what lets a checkpoint move between FSDP1, FSDP2, any number of processes, and plain PyTorch.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from ...checkpoint.manifest import write_manifest
from .atomic import replace_folder
from .outcome import run_on_rank_zero
from .safe_dcp import SafePlanner, SafeReader

_log = logging.getLogger(__name__)

METADATA_FILE = "meta.pt"
"""Everything beside weights and optimizer state, in a sharded checkpoint; Lightning's name for it."""
_MODEL_KEYS = ("model", "state_dict")


@contextmanager
def _without_torch_noise() -> Iterator[None]:
    """Hide torch 2.13's warnings about its own calls; a user can do nothing about them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*_get_pg_default_device.*")
        warnings.filterwarnings("ignore", ".*Multiple backends are registered with this ProcessGroup.*")
        warnings.filterwarnings("ignore", ".*FSDP.state_dict_type.*", FutureWarning)
        warnings.filterwarnings("ignore", ".*NO_SHARD.*")
        yield


@_without_torch_noise()
def model_state(module: nn.Module, *, full: bool) -> dict[str, Any]:
    """Return the weights: DTensors (sharded), or whole tensors on rank 0 and nothing elsewhere (full)."""
    return _on_rank_zero_only(get_model_state_dict(module, options=_options(module, full=full)), full)


@_without_torch_noise()
def optimizer_state(module: nn.Module, optimizer: Optimizer, *, full: bool) -> dict[str, Any]:
    """Return the optimizer's state.

    Sharded, it is keyed by parameter name. Full, it is on rank 0 alone and has the form of
    ``torch.optim.Optimizer.state_dict()`` (numbered parameters), so that plain Lightning can load it; the names stand
    beside in each group's ``param_names``, as torch itself writes them.
    """
    state = get_optimizer_state_dict(module, optimizer, options=_options(module, full=full))
    state = _on_rank_zero_only(state, full)
    return _numbered(state) if full and state else state


def _options(module: nn.Module, *, full: bool, strict: bool = True) -> StateDictOptions:
    # FSDP1's full state dict with cpu_offload=True kills the process when its tensors are on the CPU (torch 2.13).
    on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
    return StateDictOptions(full_state_dict=full, cpu_offload=full and not on_cpu, strict=strict)


def _on_rank_zero_only(state: dict[str, Any], full: bool) -> dict[str, Any]:
    return {} if full and dist.get_rank() != 0 else state


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    """Turn parameter names into the running numbers that ``Optimizer.state_dict()`` uses."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    groups = [
        {**group, "params": [number[name] for name in group["params"]], "param_names": list(group["params"])}
        for group in state["param_groups"]
    ]
    return {"state": {number[name]: _own(value) for name, value in state["state"].items()}, "param_groups": groups}


def _own(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return one parameter's state with scalars of its own.

    FSDP1 hands the ``step`` of a flat parameter to all parameters in it, as one tensor; an optimizer over the original
    parameters would count it up once for each of them.
    """
    return {
        name: value.clone() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        for name, value in state.items()
    }


def _named(state: Mapping[str, Any], module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Turn running numbers back into parameter names, by ``param_names`` or else by the optimizer's order.

    Raises:
        ValueError: If the checkpoint numbers another number of parameters than the optimizer has.
    """
    groups = [dict(group) for group in state["param_groups"]]
    numbers = [number for group in groups for number in group["params"]]
    if all(isinstance(number, str) for number in numbers):
        return {**state, "state": {name: _own(value) for name, value in state["state"].items()}}
    if all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    else:
        current: dict[str, Any] = get_optimizer_state_dict(module, optimizer)
        names = [name for group in current["param_groups"] for name in group["params"]]
    if len(names) != len(numbers):
        raise ValueError(
            f"The checkpoint's optimizer has {len(numbers)} parameters, this one {len(names)}. "
            "Build the optimizer over the same parameters as when the checkpoint was saved."
        )
    name_of = dict(zip(numbers, names, strict=True))
    for group in groups:
        group["params"] = [name_of[number] for number in group["params"]]
        group.pop("param_names", None)
    return {
        "state": {name_of[number]: _own(value) for number, value in state["state"].items()},
        "param_groups": groups,
    }


def save_sharded(
    path: Path,
    model_key: str,
    weights: dict[str, Any],
    optimizer_states: Sequence[dict[str, Any]],
    metadata: Mapping[str, Any],
    *,
    ties: Mapping[str, str],
    module_attribute: str | None,
) -> None:
    """Write one folder, every rank its own shards; it has its name only when it is complete.

    Args:
        path: The folder; what is there already is replaced, last of all.
        model_key: Key of the weights.
        weights: Result of `model_state`.
        optimizer_states: Results of `optimizer_state`, one for each optimizer.
        metadata: Everything else, written by rank 0.
        ties: Tied parameters, alias to stored name, for the merger.
        module_attribute: Where the LightningModule holds its model, for the merger.

    Raises:
        RuntimeError: On every rank, if any rank failed; it names what failed on rank 0, or torch names the rank.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")

    def prepare() -> None:
        if unfinished.exists():  # left by a killed run
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)

    def finish() -> None:
        torch.save(dict(metadata), unfinished / METADATA_FILE)
        write_manifest(unfinished, ties=ties, model_prefix=model_key, module_attribute=module_attribute)
        replace_folder(path, unfinished)

    run_on_rank_zero(prepare, f"preparing {unfinished}")
    state = {model_key: weights, **{f"optimizer_{index}": state for index, state in enumerate(optimizer_states)}}
    save(state, checkpoint_id=unfinished)
    run_on_rank_zero(finish, f"finishing {path}")


def save_full(path: Path, write: Callable[[], None]) -> None:
    """Let rank 0 ``write`` one file at ``path``, where a sharded checkpoint may be in the way.

    Raises:
        RuntimeError: On every rank, if rank 0 failed.
        IsADirectoryError: As its cause, if ``path`` is a folder that is no checkpoint.
    """

    def replace() -> None:
        if path.is_dir():
            if not _is_sharded(path):
                raise IsADirectoryError(f"{path} is a folder and no sharded checkpoint: it is not overwritten.")
            shutil.rmtree(path)
        write()

    run_on_rank_zero(replace, f"saving {path}")


def _is_sharded(path: Path) -> bool:
    """Return whether ``path`` is a folder that DCP wrote."""
    return (path / ".metadata").is_file()


def loader_for(path: Path) -> Callable[..., dict[str, Any]]:
    """Return `load_sharded` or `load_full`, whichever reads ``path``.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If it is a folder that DCP did not write.
    """
    if _is_sharded(path):
        return load_sharded
    if path.is_file():
        return load_full
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint.")
    raise ValueError(f"{path}: a folder without `.metadata` is no sharded checkpoint, and no file either.")


@_without_torch_noise()
def load_sharded(
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer], *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load a folder of any of the four kinds (FSDP1's and FSDP2's, ours and Lightning's) into a sharded model.

    Args:
        path: The folder.
        module: What ``Engine.state_dict_module`` returns.
        optimizers: The optimizers to restore; none leaves optimizer state alone.
        strict: Whether every name must be on both sides; otherwise the common ones are loaded and the rest logged.
        weights_only: For the metadata file, as in ``torch.load``.

    Returns:
        Everything but weights and optimizer state.

    Raises:
        RuntimeError: If ``strict`` and names are missing or unexpected; all are listed.
        ValueError: If the folder holds no model weights, or another number of optimizers.
    """
    names = SafeReader(path).read_metadata().state_dict_metadata
    model_key = _model_key(names, path)
    weights = get_model_state_dict(module)
    stored = {name.removeprefix(f"{model_key}.") for name in names if name.startswith(f"{model_key}.")}
    weights = _common_names(weights, stored, strict, path)
    _load(path, {model_key: weights})
    set_model_state_dict(module, weights, options=StateDictOptions(strict=strict))
    num_stored = len({name.split(".", 1)[0] for name in names if name.startswith("optimizer_")})
    if optimizers and num_stored:
        _check_num_optimizers(num_stored, len(optimizers))
        for index, optimizer in enumerate(optimizers):
            state = {f"optimizer_{index}": get_optimizer_state_dict(module, optimizer)}
            _load(path, state)
            set_optimizer_state_dict(module, optimizer, state[f"optimizer_{index}"])
    return dict(torch.load(path / METADATA_FILE, map_location="cpu", weights_only=weights_only))


def _load(path: Path, state: dict[str, Any]) -> None:
    load(state, storage_reader=SafeReader(path), planner=SafePlanner())


def _model_key(names: Iterable[str], path: Path) -> str:
    prefixes = {name.split(".", 1)[0] for name in names}
    for key in _MODEL_KEYS:
        if key in prefixes:
            return key
    raise ValueError(f"{path}: holds no weights under {' or '.join(map(repr, _MODEL_KEYS))}, only {sorted(prefixes)}.")


def _check_num_optimizers(num_stored: int, num_present: int) -> None:
    if num_stored != num_present:
        raise ValueError(
            f"The checkpoint holds {num_stored} optimizers, configure_optimizers returned {num_present}. "
            "Resume with the same number."
        )


def _common_names(weights: dict[str, Any], stored: set[str], strict: bool, path: Path) -> dict[str, Any]:
    """Return the weights that the checkpoint has; report the rest, or raise if ``strict``."""
    missing, unexpected = sorted(set(weights) - stored), sorted(stored - set(weights))
    if missing or unexpected:
        report = f"{path}: missing in the checkpoint: {missing}; unexpected in the checkpoint: {unexpected}."
        if strict:
            raise RuntimeError(f"{report} Set `strict_loading=False` on the LightningModule to load the rest.")
        if dist.get_rank() == 0:
            _log.warning(report)
    return {name: value for name, value in weights.items() if name in stored}


@_without_torch_noise()
def load_full(
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer], *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load a single-file checkpoint (ours or any plain Lightning one) into a sharded model.

    The file is mapped into memory, and each rank copies out its own shards.

    Args:
        path: The file.
        module: What ``Engine.state_dict_module`` returns.
        optimizers: The optimizers to restore; none leaves optimizer state alone.
        strict: Whether every name must be on both sides.
        weights_only: As in ``torch.load``.

    Returns:
        Everything but weights and optimizer state.

    Raises:
        RuntimeError: If ``strict`` and names are missing or unexpected.
        ValueError: If the optimizers do not fit.
    """
    checkpoint = dict(torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True))
    if "state_dict" not in checkpoint:
        raise ValueError(f"{path}: no 'state_dict' in it, only {sorted(checkpoint)}. Is it a Lightning checkpoint?")
    stored = checkpoint.pop("state_dict")
    present = _common_names(get_model_state_dict(module), set(stored), strict, path)
    options = _options(module, full=True, strict=strict)
    set_model_state_dict(module, {name: stored[name] for name in present}, options=options)
    optimizer_states = checkpoint.pop("optimizer_states", None)
    if optimizers and optimizer_states:
        _check_num_optimizers(len(optimizer_states), len(optimizers))
        for optimizer, state in zip(optimizers, optimizer_states, strict=True):
            set_optimizer_state_dict(module, optimizer, _named(state, module, optimizer), options=options)
    return checkpoint
