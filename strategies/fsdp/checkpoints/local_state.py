"""``local_state_dict``: each rank's flat shards of FSDP1 as they are, which come back in the same arrangement only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from ....checkpoint.files import is_regular
from ....checkpoint.formats.torch_save.torch_file import check_bytes
from ....checkpoint.names import clean_name
from ...common.agreed_outcome import failing_together
from ...common.checked_bytes import bytes_are_checked
from ...common.extra_states import extra_states, is_extra_state, load_extra_states
from ...common.held_weights import STORED_WEIGHTS
from ...common.new_checkpoints import new_folder
from ...common.torch_files import save_torch
from ..units.named_tensors import named_tensors
from ..units.sharded_root import ShardedForm
from ..weights.full_state_dict import listed
from .sharded_checkpoints import write_metadata
from .sharded_loading import read_metadata

_MODEL, _OPTIMIZERS = "model", "optimizers"


def local_model_state(form: ShardedForm) -> dict[str, Any]:
    """Return this rank's flat shards by the names of their units, what is unsharded, and extra states.

    Nothing is communicated and nothing is copied.
    """
    state: dict[str, Any] = {}
    for name, module in form.root.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            flat = module._handle.flat_param
            # While a unit is gathered, `data` is all of it; until the first forward, there is no `_local_shard`.
            state[clean_name(f"{name}._flat_param")] = getattr(flat, "_local_shard", flat.data)
    for named in named_tensors(form.root):
        unsharded = named.tensor in form.unsharded if isinstance(named.tensor, nn.Parameter) else named.persistent
        if unsharded:
            state[named.name] = named.tensor.detach()
    return {**state, **extra_states(form.root)}


def save_local(path: Path, state: dict[str, Any], metadata: bytes, group: dist.ProcessGroup | None = None) -> None:
    """Write one folder with a file of each rank; it has its name only when it is complete.

    Args:
        path: The folder; a checkpoint that is there already is replaced, last of all.
        state: Result of `local_state`.
        metadata: The file for everything else, written by rank 0.
        group: Through which the ranks agree; the default group by default.

    Raises:
        RuntimeError: On every rank, if any rank failed; it names the rank.
    """

    def complete(folder: Path) -> None:
        write_metadata(folder, metadata)

    with new_folder(path, complete, group) as folder, failing_together(f"saving {path}", group):
        save_torch(state, folder / _file_of(dist.get_rank(), dist.get_world_size()))


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
    with failing_together(f"Loading {path}"):
        file = path / _file_of(dist.get_rank(), dist.get_world_size())
        checkpoint = read_metadata(path, weights_only)
        if not is_regular(file):
            raise ValueError(
                f"{file.name} is not there, only {listed(sorted(one.name for one in path.glob('rank_*')))}: a "
                "local_state_dict comes back on the same number of processes only. Save a sharded_state_dict to resume "
                "on another."
            )
        if bytes_are_checked():
            check_bytes(file)
        stored = torch.load(file, map_location="cpu", weights_only=weights_only is not False, mmap=True)
    checkpoint[STORED_WEIGHTS] = LocalWeights(path, stored[_MODEL])
    if "lr_schedulers" in checkpoint:  # not one of weights alone
        checkpoint["optimizer_states"] = [LocalOptimizer(state) for state in stored[_OPTIMIZERS]]
    return checkpoint


@dataclass(frozen=True)
class LocalWeights:
    """This rank's flat shards, as they were saved."""

    path: Path
    stored: dict[str, Any] = field(repr=False)

    def load_weights(self, form: ShardedForm, module: nn.Module, *, strict: bool) -> None:
        """Load them; every rank must call it.

        Raises:
            RuntimeError: On every rank, before any weight is changed, if the units or the engine are others.
        """
        with failing_together(f"Loading {self.path}"):
            present = local_model_state(form)
            _compare(self.stored, present)
        with torch.no_grad():
            for name, tensor in present.items():
                if not is_extra_state(name):
                    tensor.copy_(self.stored[name])
        load_extra_states(form.root, self.stored)


@dataclass(frozen=True)
class LocalOptimizer:
    """An optimizer's state over this rank's flat shards."""

    state: dict[str, Any] = field(repr=False)

    def load_optimizer(
        self, form: ShardedForm, module: nn.Module, optimizer: Optimizer, *, num_steps: int | None
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
            f"the units are others: {listed(other)}. A local_state_dict needs the same wrapping; a sharded_state_dict "
            "does not."
        )


def _form_of(name: str, value: Any) -> object:
    return "an extra state" if is_extra_state(name) else tuple(value.shape)


def _file_of(rank: int, world_size: int) -> str:
    return f"rank_{rank:05d}_of_{world_size:05d}.pt"
