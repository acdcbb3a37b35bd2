"""Loading weights and optimizer state into a sharded model, from any kind of checkpoint.

The Trainer reads a checkpoint before the model is sharded. Where a full one has tensors, it is given a `StoredPart`,
which is loaded afterwards.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from ....checkpoint.digests import FileDigest
from ....checkpoint.files import is_regular, open_regular
from ....checkpoint.formats.state_dict_keys import MODEL_KEYS
from ....checkpoint.manifest import read_manifest
from ...common.extra_states import is_extra_state
from ...common.held_weights import STORED_WEIGHTS
from ...common.store_messages import store_messages
from ...upstream.torch_core import unflatten_state_dict
from ..units.model_state_dicts import load_model_state_dict, model_state_dict
from ..units.named_tensors import NamedTensor
from ..units.sharded_root import ShardedForm
from .accelerate_folders import OPTIMIZER_KEY, AccelerateFolder, missing_prefix, trainer_state
from .optimizer_states import restore_full_optimizer, restore_optimizer
from .safe_dcp import SafePlanner, SafeReader
from .sharded_checkpoints import METADATA_FILE
from .state_dicts import without_torch_noise

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
    with store_messages().failing_together(f"loading {path}"):
        manifest = read_manifest(path)
        digests = {} if manifest is None else manifest.digests
        reader = SafeReader(path, digests)
        names = reader.read_metadata().state_dict_metadata
        checkpoint = read_metadata(path, weights_only, digests.get(METADATA_FILE))
        model_key = _model_key(names, path)
    checkpoint[STORED_WEIGHTS] = StoredPart(path, model_key, reader)
    if "lr_schedulers" in checkpoint:  # not one of weights alone
        num_stored = len({name.split(".", 1)[0] for name in names if name.startswith("optimizer_")})
        checkpoint["optimizer_states"] = [StoredPart(path, f"optimizer_{index}", reader) for index in range(num_stored)]
    return checkpoint


def read_accelerate(folder: AccelerateFolder, *, with_optimizer: bool) -> dict[str, Any]:
    """Return what stands for the Trainer's checkpoint of a folder that Accelerate saved.

    Args:
        folder: Where its parts are.
        with_optimizer: Whether they are to be trained, and not evaluated.

    Raises:
        ValueError: If the folder holds no model weights.
        RuntimeError: On every rank, if what is read here is damaged.
    """
    with store_messages().failing_together(f"loading {folder.model.parent}"):
        reader, readers = SafeReader(folder.model), [SafeReader(path) for path in folder.optimizers]
        names = reader.read_metadata().state_dict_metadata
        for one in readers:
            one.read_metadata()
        model_key = _model_key(names, folder.model)
    weights = [name.removeprefix(f"{model_key}.") for name in names]
    checkpoint = trainer_state(folder, with_optimizer=with_optimizer)
    checkpoint[STORED_WEIGHTS] = StoredPart(folder.model, model_key, reader, weights)
    checkpoint["optimizer_states"] = [
        StoredPart(path, OPTIMIZER_KEY, own, weights) for path, own in zip(folder.optimizers, readers, strict=True)
    ]
    return checkpoint


@dataclass(frozen=True)
class StoredPart:
    """The weights, or an optimizer's state, in a folder."""

    path: Path
    key: str
    """Above all of its names."""
    reader: SafeReader = field(repr=False)
    """Of the folder; it keeps the metadata."""
    of_accelerate: Sequence[str] = field(default=(), repr=False)
    """The names of all weights, where Accelerate saved them: they may lack the attribute that holds the model."""

    def own(self) -> dict[str, Any]:
        """Return the part's entries, without its key."""
        start, entries = f"{self.key}.", self.reader.read_metadata().state_dict_metadata
        return {name.removeprefix(start): entry for name, entry in entries.items() if name.startswith(start)}

    def prefix(self, present: Iterable[str], attribute: str | None) -> str:
        """Return what its names lack in front, beside those that are present."""
        return missing_prefix(self.of_accelerate, present, attribute) if self.of_accelerate else ""

    @without_torch_noise()
    def load_weights(self, form: ShardedForm, module: nn.Module, *, strict: bool) -> None:
        """Load weights into a sharded model; every rank must call it.

        Args:
            form: The sharded model.
            module: What ``Engine.state_dict_module`` returns of it.
            strict: Whether every name must be on both sides; otherwise the common ones are loaded, the rest logged.

        Raises:
            RuntimeError: If ``strict`` and names are missing or unexpected; all are listed.
        """
        present = model_state_dict(module)
        prefix = self.prefix(present, form.module_attribute)
        extra = self._extra_states(present, prefix)
        parts = tuple(f"{name}." for name in extra)  # DCP saves dictionaries and lists entry by entry
        stored = {name for name in (f"{prefix}{one}" for one in self.own()) if not (parts and name.startswith(parts))}
        weights = _common_names({**present, **extra}, stored | extra.keys(), strict, self.path)
        held = {name.removeprefix(prefix): value for name, value in weights.items()}
        _load(self, {self.key: held})
        loaded = {f"{prefix}{name}": value for name, value in held.items()}
        load_model_state_dict(module, loaded, strict=strict)

    def _extra_states(self, present: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Return places for what modules keep beside tensors, in the form it was saved in: that may change in training.

        Args:
            present: The module's state dict.
            prefix: What stored names lack.
        """
        own = {name.removeprefix(prefix): value for name, value in present.items() if is_extra_state(name)}
        if not own:
            return {}
        entries, paths = self.reader.read_metadata().state_dict_metadata, dict[str, tuple[str | int, ...]]()
        for fqn, path in self.reader.read_paths().items():
            if path[0] == self.key and len(path) > 1 and path[1] in own:
                paths[fqn] = path
        places = unflatten_state_dict({fqn: _place(entries[fqn]) for fqn in paths}, paths).get(self.key, {})
        nothing = {name: value for name, value in own.items() if value == {}}  # no entry in the folder
        return {f"{prefix}{name}": place for name, place in {**nothing, **places}.items()}

    @without_torch_noise()
    def load_optimizer(
        self, form: ShardedForm, module: nn.Module, optimizer: Optimizer, *, num_steps: int | None
    ) -> None:
        """Load an optimizer's state; every rank must call it.

        Args:
            form: The sharded model.
            module: What ``Engine.state_dict_module`` returns of it.
            optimizer: Which is restored.
            num_steps: Optimizer steps of the run that saved it, if that is known.
        """
        present = model_state_dict(module) if self.of_accelerate else {}
        prefix = self.prefix(present, form.module_attribute)
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
        self, form: ShardedForm, module: nn.Module, optimizer: Optimizer, *, num_steps: int | None
    ) -> None:
        """Load it; every rank must call it."""


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


def _load(part: StoredPart, state: dict[str, Any], *, partial: bool = False) -> None:
    """Load what this rank needs, by its own plan: torch (2.9 to 2.15) does not change plans when it joins them."""
    planner = SafePlanner(allow_partial_load=partial)
    with store_messages().failing_together(f"loading {part.path}"):
        try:
            load(state, storage_reader=part.reader, planner=planner, no_dist=True)
        except CheckpointException as error:  # which is no Exception, and holds one
            [(own, _)] = error.failures.values()
            raise own from error


def _model_key(names: Iterable[str], path: Path) -> str:
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
def load_full_weights(stored: Mapping[str, Any], path: Path | str, module: nn.Module, *, strict: bool) -> None:
    """Load a full state dict into a sharded model; each rank copies its own shards out of it.

    Args:
        stored: By name full tensors, which may lie in a file that is mapped into memory, and modules' extra states.
        path: The file, for errors.
        module: What ``Engine.state_dict_module`` returns.
        strict: Whether every name must be on both sides.

    Raises:
        RuntimeError: If ``strict`` and names are missing or unexpected.
    """
    present = _common_names(model_state_dict(module), set(stored), strict, path)
    for name, target in present.items():
        if is_extra_state(name):
            present[name] = stored[name]
        else:
            _copy_own_part(name, stored[name], target)
    load_model_state_dict(module, present, strict=strict)


@without_torch_noise()
def load_optimizers(
    checkpoint: Mapping[str, Any], form: ShardedForm, module: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Load the states of all optimizers from a checkpoint of any kind; every rank must call it.

    Args:
        checkpoint: The Trainer's. A plain optimizer's state has no names, only numbers.
        form: The sharded model.
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
            f"The checkpoint holds {len(states)} optimizers, configure_optimizers returned {len(optimizers)}. "
            "Resume with the same number."
        )
    num_steps = checkpoint.get("global_step")
    for optimizer, state in zip(optimizers, states, strict=True):
        if not _has_parameters(optimizer):
            continue
        if isinstance(state, Mapping):
            restore_full_optimizer(module, optimizer, state, form.order, num_steps=num_steps)
        else:
            state.load_optimizer(form, module, optimizer, num_steps=num_steps)
