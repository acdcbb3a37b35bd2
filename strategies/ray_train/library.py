"""Ray itself: imported when it is used, and asked which worker this process is."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

from ..common.requirements import require_installed

OLDEST = "2.51"
"""The first with Ray Train v2 as what it is without being asked: reports of what is in the run's storage already."""


@functools.cache
def ray_train(who: str) -> Any:
    """Import ``ray.train``; what is installed is looked up once.

    Raises:
        ModuleNotFoundError: If Ray, or what its extra ``train`` brings, is not installed.
        RuntimeError: If Ray Train is to be its first version.
    """
    require_installed(who, "Ray Train", "ray", OLDEST)
    try:
        module = importlib.import_module("ray.train")
    except ImportError as error:  # Ray without what its extra brings
        raise ModuleNotFoundError(f"{who} needs Ray Train: pip install 'accelight[ray]'. {error}") from error
    if not hasattr(module, "CheckpointUploadMode"):
        value = os.environ.get("RAY_TRAIN_V2_ENABLED")
        raise RuntimeError(
            f"{who} needs the second version of Ray Train, and RAY_TRAIN_V2_ENABLED={value} asks for the first. Unset "
            "the variable."
        )
    return module


def worker_context(who: str, instead: str) -> Any:
    """Return what Ray knows of this worker, its ``TrainContext``.

    Args:
        who: Needs a worker.
        instead: What to use elsewhere.

    Raises:
        RuntimeError: Outside of a Ray Train worker.
    """
    train = ray_train(who)
    try:
        context = train.get_context()
        context.get_world_size()
    except (RuntimeError, DeprecationWarning) as error:  # the second is what Ray raises inside of Ray Tune
        raise RuntimeError(
            f"{who} works inside of a Ray Train worker alone: in the function that TorchTrainer(...) is given, or in "
            f"what it calls. Here, use {instead}."
        ) from error
    return context
