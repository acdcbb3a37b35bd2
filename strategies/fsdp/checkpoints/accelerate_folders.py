"""Sharded folders that Accelerate saved (``accelerator.save_state``), resumed by the Trainer.

They hold weights and optimizer state, and nothing of the Trainer: it begins at step 0. Accelerate's model is as a rule
what the LightningModule holds under one attribute, so that its names lack that attribute.

Source: accelerate 1.15 ``utils/fsdp_utils.py`` (``save_fsdp_model``, ``save_fsdp_optimizer``).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ....checkpoint.formats.dcp.metadata import METADATA_NAME
from ...upstream.lightning_package import lightning_package

_log = logging.getLogger(__name__)

_MODEL = "pytorch_model_fsdp_0"
_OPTIMIZER = re.compile(r"optimizer_(\d+)")
_FILES = re.compile(r"pytorch_model_fsdp(_\d+)?(_rank\d+)?\.bin")
OPTIMIZER_KEY = "optimizer"
"""Under which each of the optimizers' folders keeps its state."""


@dataclass(frozen=True)
class AccelerateFolder:
    """Where the parts lie."""

    model: Path
    optimizers: tuple[Path, ...]
    """In their order."""


def find_accelerate_folder(path: Path) -> AccelerateFolder | None:
    """Return the parts of a folder that Accelerate saved; None if it is none.

    Args:
        path: The folder given to ``save_state``, or ``pytorch_model_fsdp_0`` in it.

    Raises:
        ValueError: If Accelerate saved it in another way than sharded by torch.distributed.checkpoint.
    """
    if not path.is_dir() or ((path / METADATA_NAME).exists() and path.name != _MODEL):
        return None
    parent = path.parent if path.name == _MODEL else path
    if not (parent / _MODEL / METADATA_NAME).exists():
        files = sorted(one.name for one in path.iterdir() if _FILES.fullmatch(one.name))
        if files:
            raise ValueError(
                f"{path} holds {files[0]}, which Accelerate writes for FULL_STATE_DICT, LOCAL_STATE_DICT and "
                "use_dcp=False. What resumes here is SHARDED_STATE_DICT (pytorch_model_fsdp_0/): load it with "
                "Accelerate as it was saved, and save it so."
            )
        return None
    numbered = {int(match[1]): one for one in parent.iterdir() if (match := _OPTIMIZER.fullmatch(one.name))}
    folders = [numbered[number] for number in sorted(numbered)]
    return AccelerateFolder(parent / _MODEL, tuple(one for one in folders if (one / METADATA_NAME).exists()))


def missing_prefix(stored: Iterable[str], present: Iterable[str], attribute: str | None) -> str:
    """Return what stored names lack in front: the attribute that holds the model, with its dot, or nothing."""
    prefix = f"{attribute}." if attribute else ""
    missing = set(present) - set(stored)
    return prefix if missing and {name.removeprefix(prefix) for name in missing} & set(stored) else ""


def trainer_state(folder: AccelerateFolder, *, with_optimizer: bool) -> dict[str, Any]:
    """Return what stands for the Trainer's part of a checkpoint, and say that there is none."""
    if dist.get_rank() == 0:
        what = "Weights and optimizer state are" if with_optimizer and folder.optimizers else "Weights alone are"
        _log.warning(
            "%s was saved by Accelerate. %s restored; steps and epochs, learning-rate schedules, callbacks and random "
            "states are not in it: the Trainer begins with step 0.",
            folder.model.parent,
            what,
        )
    return {"pytorch-lightning_version": version(lightning_package()), "lr_schedulers": []}
