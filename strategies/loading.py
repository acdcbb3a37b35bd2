"""`load_from_checkpoint`: a LightningModule out of a sharded checkpoint, on one process and without a strategy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..checkpoint.load import load_state_dict
from ..checkpoint.locate import find_checkpoint
from ..checkpoint.manifest import read_manifest
from .deepspeed.checkpoints.engine_checkpoints import read_trainer_state
from .fsdp.checkpoints.sharded_checkpoints import METADATA_FILE
from .fsdp.checkpoints.sharded_loading import read_metadata
from .upstream.lightning import LightningModule, _load_state

ModuleT = TypeVar("ModuleT", bound=LightningModule)


def load_from_checkpoint(
    module_class: type[ModuleT],
    checkpoint_path: str | os.PathLike[str],
    *,
    map_location: str | torch.device | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> ModuleT:
    """Return a module with the full weights and the hyperparameters of a checkpoint, sharded or not.

    ``module_class.load_from_checkpoint`` does that for a file, and cannot read folders.

    Args:
        module_class: The LightningModule's class.
        checkpoint_path: A folder that the Trainer saved with FSDP or DeepSpeed, accelight's strategies or Lightning's.
            A file is handed on to ``module_class.load_from_checkpoint``.
        map_location: Device of the module. Default: the CPU for a folder, Lightning's default for a file.
        strict: Whether every name must be on both sides. Default: the module's ``strict_loading``.
        weights_only: False lets what lies beside the weights be any object, and so run code when it is read; for
            checkpoints that one trusts.
        **kwargs: Arguments of the class, which win over the saved hyperparameters.

    Raises:
        CheckpointError: If the checkpoint is damaged, or no model can be told in it.
        ValueError: If the folder holds weights alone, and nothing of a Trainer.
        RuntimeError: If ``strict`` and names are missing or unexpected; if what lies beside the weights may run code.

    Source: lightning 2.6 ``LightningModule.load_from_checkpoint``.
    """
    path = Path(checkpoint_path)
    if not path.is_dir():
        return module_class.load_from_checkpoint(
            path, map_location=map_location, strict=strict, weights_only=weights_only, **kwargs
        )
    checkpoint = _trainer_state(path, weights_only)
    checkpoint["state_dict"] = load_state_dict(path)
    checkpoint.setdefault(module_class.CHECKPOINT_HYPER_PARAMS_KEY, {}).update(kwargs)
    module: ModuleT = _load_state(module_class, checkpoint, strict=strict, **kwargs)  # type: ignore[assignment]
    return module if map_location is None else module.to(map_location)


def _trainer_state(path: Path, weights_only: bool | None) -> dict[str, Any]:
    folder = find_checkpoint(path).folder
    for one in (path, folder):
        if (one / METADATA_FILE).exists():
            manifest = read_manifest(one)
            return read_metadata(one, weights_only, None if manifest is None else manifest.digests.get(METADATA_FILE))
    if any(folder.glob("*_model_states.pt")):
        return read_trainer_state(folder, weights_only=weights_only is not False)
    return read_metadata(folder, weights_only)  # says that there is none
