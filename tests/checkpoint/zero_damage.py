"""DeepSpeed's good checkpoints made bad: contents edited, pickles replaced, files cut off."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.checkpoint.damage import rebuild

MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
SHARD = "zero_pp_rank_{}_mp_rank_00_model_states.pt"


class _Plain(pickle.Unpickler):
    """Loads DeepSpeed's classes as plain ones: the stage as a number, the rest as empty objects."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "ZeroStageEnum":
            return int
        if module.startswith("deepspeed"):
            return _Anything
        return super().find_class(module, name)


class _Anything(SimpleNamespace):
    def __new__(cls, *_: Any) -> _Anything:  # noqa: PYI034 - Self is newer than Python 3.10
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        super().__init__()


def copy(saved: Path, target: Path) -> Path:
    """Return a copy of a checkpoint's tag folder."""
    shutil.copytree(saved / (saved / "latest").read_text(), target)
    return target


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Load a file (it is our own), change it, write it back."""
    loader = SimpleNamespace(Unpickler=_Plain, load=pickle.load, __name__="plain")
    content = torch.load(path, weights_only=False, pickle_module=loader)
    change(content)
    torch.save(content, path)


def replace_pickle(path: Path, pickled: bytes) -> None:
    """Give a file another ``data.pkl``."""
    path.write_bytes(rebuild(path.read_bytes(), data_pkl=pickled))
