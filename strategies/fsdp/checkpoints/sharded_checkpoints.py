"""Saving weights and optimizer state of a sharded model: one path for both FSDP versions.

Everything goes through ``torch.distributed.checkpoint.state_dict``, whose names are the plain parameter names; that is
what lets a checkpoint move between FSDP1, FSDP2, any number of processes, and plain PyTorch.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save

from ....checkpoint.digests import FileDigest
from ....checkpoint.disk_space import telling_full_disk
from ....checkpoint.formats.dcp.metadata import METADATA_NAME
from ....checkpoint.manifest import Manifest, write_manifest
from ...common.new_checkpoints import new_folder
from ..config.settings import FullState
from .dcp_writer import FolderWriter
from .saving_plan import FullFromRankZero
from .state_dicts import put_where, state_dict_options, without_torch_noise

_log = logging.getLogger(__name__)

METADATA_FILE = "meta.pt"
"""Everything beside weights and optimizer state, in a sharded checkpoint; Lightning's name for it."""
_MODEL_KEYS = ("model", "state_dict")


@without_torch_noise()
def model_state(module: nn.Module, full: FullState | None, device: torch.device) -> dict[str, Any]:
    """Return the weights: DTensors (``full`` is None), or full tensors where it says, as a rule on rank 0 alone."""
    state = get_model_state_dict(module, options=state_dict_options(full, device))
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
    digests = {METADATA_FILE: FileDigest.of(metadata)}

    def complete(folder: Path) -> None:
        write_metadata(folder, metadata)
        write_manifest(
            folder,
            ties=manifest.ties,
            model_prefix=manifest.model_prefix,
            module_attribute=manifest.module_attribute,
            digests=digests,
        )

    with new_folder(path, complete, group) as folder, naming_ranks(f"saving {path}"):
        writer = FolderWriter(folder)
        save(state, storage_writer=writer, planner=FullFromRankZero(), process_group=group)
        digests |= writer.digests


def write_metadata(folder: Path, metadata: bytes) -> None:
    """Write the file for everything beside weights and optimizer state."""
    path = folder / METADATA_FILE
    with telling_full_disk(path, len(metadata)):
        path.write_bytes(metadata)


@contextmanager
def naming_ranks(what: str) -> Iterator[None]:
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
    return os.path.lexists(path / METADATA_NAME)
