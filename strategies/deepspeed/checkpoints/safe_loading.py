"""Reading DeepSpeed's checkpoints without executing what they say: DeepSpeed itself unpickles anything."""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_CLASSES = (  # what DeepSpeed 0.16 to 0.19 writes beside tensors and plain values
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


def _classes() -> list[Any]:
    found = (path.rpartition(".") for path in _CLASSES)
    return [getattr(importlib.import_module(module), name) for module, _, name in found]


@contextmanager
def reading_safely(weights_only: bool | None = None) -> Iterator[None]:
    """Let ``torch.load`` inside this context build tensors, plain values and DeepSpeed's own records, nothing else.

    Args:
        weights_only: False reads anything, as DeepSpeed does: for checkpoints that one trusts.

    Raises:
        RuntimeError: If a file holds something else.
    """
    if weights_only is False:
        yield
        return
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals(_classes()):
            yield
    except pickle.UnpicklingError as error:
        raise RuntimeError(
            "The checkpoint holds objects that may run code when they are read. If you trust it, use "
            f"fit(weights_only=False) or AccelDeepSpeedStrategy(weights_only=False). torch says: {error}"
        ) from error
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before
