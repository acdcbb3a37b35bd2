"""Saving and loading weights and optimizer state of a sharded model: one path for both FSDP versions.

Everything goes through ``torch.distributed.checkpoint.state_dict``, whose names are the plain parameter names; that is
what lets a checkpoint move between FSDP1, FSDP2, any number of processes, and plain PyTorch.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from ....checkpoint.disk_space import telling_full_disk
from ....checkpoint.manifest import Manifest, write_manifest
from ...common.new_checkpoints import new_folder
from ..config.settings import FullState
from ..units.named_tensors import NamedTensor
from .dcp_writer import FolderWriter
from .optimizer_states import restore_full_optimizer, restore_optimizer
from .safe_dcp import SafePlanner, SafeReader
from .saving_plan import FullFromRankZero
from .state_dicts import put_where, state_dict_options, without_torch_noise

_log = logging.getLogger(__name__)

METADATA_FILE = "meta.pt"
"""Everything beside weights and optimizer state, in a sharded checkpoint; Lightning's name for it."""
_MODEL_KEYS = ("model", "state_dict")


@without_torch_noise()
def model_state(module: nn.Module, full: FullState | None) -> dict[str, Any]:
    """Return the weights: DTensors (``full`` is None), or full tensors where it says, as a rule on rank 0 alone."""
    options = state_dict_options(module, full=full is not None, where=full)
    state = get_model_state_dict(module, options=options)
    return state if full is None else put_where(state, full)


def save_sharded(
    path: Path,
    state: dict[str, Any],
    metadata: bytes,
    manifest: Manifest,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write one folder, every rank its own shards; it has its name only when it is complete.

    Args:
        path: The folder; a checkpoint that is there already is replaced, last of all.
        state: Weights under the engine's key, and optimizer state under ``optimizer_0`` and so on.
        metadata: The file for everything else, written by rank 0.
        manifest: For the merger.
        group: Through which the ranks agree; the default group by default.

    Raises:
        RuntimeError: On every rank, if any rank failed; it names the rank.
    """

    def complete(folder: Path) -> None:
        write_metadata(folder, metadata)
        write_manifest(
            folder, ties=manifest.ties, model_prefix=manifest.model_prefix, module_attribute=manifest.module_attribute
        )

    with new_folder(path, complete, group) as folder, _naming_ranks(f"saving {path}"):
        save(state, storage_writer=FolderWriter(folder), planner=FullFromRankZero(), process_group=group)


def write_metadata(folder: Path, metadata: bytes) -> None:
    """Write the file for everything beside weights and optimizer state."""
    path = folder / METADATA_FILE
    with telling_full_disk(path, len(metadata)):
        path.write_bytes(metadata)


@contextmanager
def _naming_ranks(what: str) -> Iterator[None]:
    """Turn DCP's report of failed ranks, which is no ``Exception``, into an error that one can catch and read."""
    try:
        yield
    except CheckpointException as error:
        failures = [f"process {rank}: {type(one).__name__}: {one}" for rank, (one, _) in sorted(error.failures.items())]
        first = next((one for one, _ in error.failures.values() if isinstance(one, ValueError | OSError)), None)
        raise RuntimeError("\n".join([f"{what} failed.", *failures])) from (first or error)


def sharded_state(
    model_key: str, weights: dict[str, Any], optimizer_states: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Put together what DCP saves; Lightning's names."""
    return {model_key: weights, **{f"optimizer_{index}": state for index, state in enumerate(optimizer_states)}}


def serialised(metadata: Mapping[str, Any]) -> bytes:
    """Return the metadata file's content: a snapshot, whatever is changed afterwards. Rank 0 alone needs it."""
    if dist.get_rank() != 0:
        return b""
    buffer = io.BytesIO()
    torch.save(dict(metadata), buffer)
    return buffer.getvalue()


def is_sharded(path: Path) -> bool:
    """Return whether ``path`` is a folder that DCP wrote."""
    return (path / ".metadata").is_file()


def read_file(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Return what a single-file checkpoint holds, mapped into memory and not read.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If it is a folder.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint.")
    if not path.is_file():
        raise ValueError(f"{path}: a folder without `.metadata` is no sharded checkpoint, and no file either.")
    return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)


@without_torch_noise()
def load_sharded(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    strict: bool,
    weights_only: bool | None,
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
    metadata = dict(torch.load(path / METADATA_FILE, map_location="cpu", weights_only=weights_only))
    num_stored = len({name.split(".", 1)[0] for name in names if name.startswith("optimizer_")})
    if optimizers and num_stored:
        _check_num_optimizers(num_stored, len(optimizers))
        for index, optimizer in enumerate(optimizers):
            if not _has_parameters(optimizer):
                continue
            key = f"optimizer_{index}"
            held = {name.removeprefix(f"{key}."): names[name] for name in names if name.startswith(f"{key}.")}

            def fill(template: dict[str, Any], key: str = key) -> None:
                _load(path, {key: template}, partial=True)

            restore_optimizer(module, optimizer, held, fill, num_steps=metadata.get("global_step"))
    return metadata


def _load(path: Path, state: dict[str, Any], *, partial: bool = False) -> None:
    with _naming_ranks(f"loading {path}"):
        load(state, storage_reader=SafeReader(path), planner=SafePlanner(allow_partial_load=partial))


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


def _has_parameters(optimizer: Optimizer) -> bool:
    """Return False for what Lightning makes where ``configure_optimizers`` returns None."""
    return any(group["params"] for group in optimizer.param_groups)


def _common_names(weights: dict[str, Any], stored: set[str], strict: bool, path: Path | str) -> dict[str, Any]:
    """Return the weights that the checkpoint has; report the rest, or raise if ``strict``."""
    missing, unexpected = sorted(set(weights) - stored), sorted(stored - set(weights))
    if missing or unexpected:
        report = f"{path}: missing in the checkpoint: {missing}; unexpected in the checkpoint: {unexpected}."
        if strict:
            raise RuntimeError(f"{report} Set `strict_loading=False` on the LightningModule to load the rest.")
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
def load_full(
    checkpoint: Mapping[str, Any],
    path: Path | str,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    order: Mapping[str, int],
    *,
    strict: bool,
) -> dict[str, Any]:
    """Load a single-file checkpoint (ours or any plain Lightning one) into a sharded model.

    Each rank copies its own shards out of it.

    Args:
        checkpoint: What the file holds.
        path: The file, for errors.
        module: What ``Engine.state_dict_module`` returns.
        optimizers: The optimizers to restore; none leaves optimizer state alone.
        order: Each parameter's place before sharding: a plain optimizer's state has no names, only numbers.
        strict: Whether every name must be on both sides.

    Returns:
        Everything but weights and optimizer state.

    Raises:
        RuntimeError: If ``strict`` and names are missing or unexpected.
        ValueError: If the optimizers do not fit.
    """
    checkpoint = dict(checkpoint)
    if "state_dict" not in checkpoint:
        raise ValueError(f"{path}: no 'state_dict' in it, only {sorted(checkpoint)}. Is it a Lightning checkpoint?")
    stored = checkpoint.pop("state_dict")
    present = _common_names(get_model_state_dict(module), set(stored), strict, path)
    for name, target in present.items():
        _copy_own_part(name, stored[name], target)
    set_model_state_dict(module, present, options=StateDictOptions(strict=strict))
    optimizer_states = checkpoint.pop("optimizer_states", None)
    if optimizers and optimizer_states:
        _check_num_optimizers(len(optimizer_states), len(optimizers))
        for optimizer, state in zip(optimizers, optimizer_states, strict=True):
            if not _has_parameters(optimizer):
                continue
            restore_full_optimizer(module, optimizer, state, order, num_steps=checkpoint.get("global_step"))
    return checkpoint
