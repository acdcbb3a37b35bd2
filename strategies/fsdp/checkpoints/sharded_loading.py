"""Loading weights and optimizer state into a sharded model, from any kind of checkpoint."""

from __future__ import annotations

import logging
import os
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from ....checkpoint.digests import Digests, FileDigest
from ....checkpoint.files import is_regular, open_regular
from ....checkpoint.formats.torch_save.torch_file import check_bytes
from ....checkpoint.manifest import read_manifest
from ...common.agreed_outcome import failing_together
from ...common.checked_bytes import bytes_are_checked
from ..units.named_tensors import NamedTensor
from .accelerate_folders import OPTIMIZER_KEY, AccelerateFolder, missing_prefix, trainer_state
from .optimizer_states import restore_full_optimizer, restore_optimizer
from .safe_dcp import SafePlanner, SafeReader
from .sharded_checkpoints import METADATA_FILE, naming_ranks
from .state_dicts import without_torch_noise

_log = logging.getLogger(__name__)

_MODEL_KEYS = ("model", "state_dict")


def read_file(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Return what a single-file checkpoint holds, mapped into memory and not read.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If it is a folder, no regular file, or not what torch writes.
        RuntimeError: On every rank, if it is damaged.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint.")
    if path.is_dir():
        raise ValueError(f"{path}: a folder without `.metadata` is no sharded checkpoint, and no file either.")
    is_regular(path)  # else an error
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path} is no checkpoint: what torch.save() writes is a zip file. Give ckpt_path what "
            "trainer.save_checkpoint() wrote; a file of torch before 1.6 becomes one by torch.save(torch.load(file))."
        )
    with failing_together(f"loading {path}"):
        if bytes_are_checked():
            check_bytes(path, (dist.get_rank(), dist.get_world_size()))
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
    with failing_together(f"loading {path}"):
        manifest = read_manifest(path)
        digests = {} if manifest is None else manifest.digests
        names = _names(path, digests)
        metadata = read_metadata(path, weights_only, digests.get(METADATA_FILE))
        model_key = _model_key(names, path)
    _load_weights(_Part(path, model_key, names, digests=digests), module, strict=strict)
    num_stored = len({name.split(".", 1)[0] for name in names if name.startswith("optimizer_")})
    if optimizers and num_stored:
        _check_num_optimizers(num_stored, len(optimizers))
        for index, optimizer in enumerate(optimizers):
            if _has_parameters(optimizer):
                part = _Part(path, f"optimizer_{index}", names, digests=digests)
                _load_optimizer(part, module, optimizer, num_steps=metadata.get("global_step"))
    return metadata


@without_torch_noise()
def load_accelerate(
    folder: AccelerateFolder, module: nn.Module, optimizers: Sequence[Optimizer], attribute: str | None, *, strict: bool
) -> dict[str, Any]:
    """Load weights and optimizer states that Accelerate saved.

    Args:
        folder: Where they are.
        module: What ``Engine.state_dict_module`` returns.
        optimizers: The optimizers to restore; none leaves optimizer state alone.
        attribute: Of the module, which holds the model that Accelerate had.
        strict: As in `load_sharded`.

    Returns:
        What stands for the rest of a checkpoint.

    Raises:
        RuntimeError: As `load_sharded`.
        ValueError: If the folder holds another number of optimizers.
    """
    with failing_together(f"loading {folder.model.parent}"):
        names, held = _names(folder.model), [_names(path) for path in folder.optimizers]
        model_key = _model_key(names, folder.model)
    weights = get_model_state_dict(module)
    stored = [name.removeprefix(f"{model_key}.") for name in names]
    prefix = missing_prefix(stored, weights, attribute)
    _load_weights(_Part(folder.model, model_key, names, prefix), module, strict=strict)
    if optimizers and folder.optimizers:
        _check_num_optimizers(len(folder.optimizers), len(optimizers))
        for path, own, optimizer in zip(folder.optimizers, held, optimizers, strict=True):
            if _has_parameters(optimizer):
                _load_optimizer(_Part(path, OPTIMIZER_KEY, own, prefix), module, optimizer, num_steps=None)
    return trainer_state(folder, with_optimizer=bool(optimizers))


@dataclass(frozen=True)
class _Part:
    """The weights, or an optimizer's state, in a folder."""

    path: Path
    key: str
    """Above all of its names."""
    names: Mapping[str, Any]
    """What DCP's metadata says of each entry of the folder."""
    prefix: str = ""
    """What the names of parameters lack in front."""
    digests: Digests = field(default_factory=dict)
    """Of the folder's files, where they are known."""

    def own(self) -> dict[str, Any]:
        """Return the part's entries, without its key."""
        start = f"{self.key}."
        return {name.removeprefix(start): entry for name, entry in self.names.items() if name.startswith(start)}


def _names(path: Path, digests: Digests | None = None) -> Mapping[str, Any]:
    names: Mapping[str, Any] = SafeReader(path, digests).read_metadata().state_dict_metadata
    return names


def read_metadata(path: Path, weights_only: bool | None, digest: FileDigest | None = None) -> dict[str, Any]:
    """Return what the file for everything beside weights and optimizer state holds.

    Raises:
        ValueError: If there is none.
    """
    file = path / METADATA_FILE
    if not is_regular(file):
        raise ValueError(
            f"{path} has no {METADATA_FILE}, which Lightning and accelight write beside the weights: something else "
            "has saved it, and the Trainer cannot go on with it. To start from its weights, merge them (accelight "
            "merge-weights), and give the result as pretrained_weights, or load it into the module before fit()."
        )
    with os.fdopen(open_regular(file), "rb") as stream:
        if digest is not None:
            digest.check(file, stream.read())
            stream.seek(0)
        return dict(torch.load(stream, map_location="cpu", weights_only=weights_only))


def _load_weights(part: _Part, module: nn.Module, *, strict: bool) -> None:
    stored = {f"{part.prefix}{name}" for name in part.own()}
    weights = _common_names(get_model_state_dict(module), stored, strict, part.path)
    held = {name.removeprefix(part.prefix): value for name, value in weights.items()}
    _load(part, {part.key: held})
    loaded = {f"{part.prefix}{name}": value for name, value in held.items()}
    set_model_state_dict(module, loaded, options=StateDictOptions(strict=strict))


def _load_optimizer(part: _Part, module: nn.Module, optimizer: Optimizer, *, num_steps: int | None) -> None:
    prefix = part.prefix
    held = {re.sub(r"^state\.", f"state.{prefix}", name): entry for name, entry in part.own().items()}

    def fill(template: dict[str, Any]) -> None:
        states = {name.removeprefix(prefix): state for name, state in template["state"].items()}
        _load(part, {part.key: {**template, "state": states}}, partial=True)
        for group in template["param_groups"]:
            group["params"] = [f"{prefix}{name}" for name in group["params"]]

    restore_optimizer(module, optimizer, held, fill, num_steps=num_steps)


def _load(part: _Part, state: dict[str, Any], *, partial: bool = False) -> None:
    reader = SafeReader(part.path, part.digests)
    with naming_ranks(f"loading {part.path}"):
        load(state, storage_reader=reader, planner=SafePlanner(allow_partial_load=partial))


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
            raise RuntimeError(
                f"{report} Set `strict_loading=False` on the LightningModule to load the rest. (on_load_checkpoint() "
                "can change the names of full checkpoints, and not of sharded ones.)"
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
def load_full_weights(stored: Mapping[str, Tensor], path: Path | str, module: nn.Module, *, strict: bool) -> None:
    """Load a full state dict into a sharded model; each rank copies its own shards out of it.

    Args:
        stored: Full tensors by name; they may lie in a file that is mapped into memory.
        path: The file, for errors.
        module: What ``Engine.state_dict_module`` returns.
        strict: Whether every name must be on both sides.

    Raises:
        RuntimeError: If ``strict`` and names are missing or unexpected.
    """
    present = _common_names(get_model_state_dict(module), set(stored), strict, path)
    for name, target in present.items():
        _copy_own_part(name, stored[name], target)
    set_model_state_dict(module, present, options=StateDictOptions(strict=strict))


@without_torch_noise()
def load_full(
    checkpoint: Mapping[str, Any],
    path: Path | str,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    order: Mapping[str, int],
) -> dict[str, Any]:
    """Load all but the weights of a single-file checkpoint (ours or any plain Lightning one).

    Args:
        checkpoint: What the file holds.
        path: The file, for errors.
        module: What ``Engine.state_dict_module`` returns.
        optimizers: The optimizers to restore; none leaves optimizer state alone.
        order: Each parameter's place before sharding: a plain optimizer's state has no names, only numbers.

    Returns:
        Everything but optimizer state.

    Raises:
        ValueError: If it is no checkpoint of Lightning's, or the optimizers do not fit.
    """
    checkpoint = dict(checkpoint)
    if "state_dict" not in checkpoint:
        raise ValueError(f"{path}: no 'state_dict' in it, only {sorted(checkpoint)}. Is it a Lightning checkpoint?")
    optimizer_states = checkpoint.pop("optimizer_states", None)
    if optimizers and optimizer_states:
        _check_num_optimizers(len(optimizer_states), len(optimizers))
        for optimizer, state in zip(optimizers, optimizer_states, strict=True):
            if not _has_parameters(optimizer):
                continue
            restore_full_optimizer(module, optimizer, state, order, num_steps=checkpoint.get("global_step"))
    return checkpoint
