"""Callbacks of Lightning's that would be wrong with a sharded model without a word, or end in an obscure error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PRUNING = (
    "replaces parameters by masked ones that are no parameters, which nobody shards, and which optimizers do not know. "
    "Prune the merged weights after training, or use Trainer(strategy='ddp')."
)


def check_callbacks(callbacks: Iterable[object], refused: Mapping[str, str]) -> None:
    """Check that callbacks can work with a strategy, before it trains.

    Args:
        callbacks: The Trainer's.
        refused: Names of Lightning's classes, and what each does, with what to do instead.

    Raises:
        ValueError: If one of them is of such a class.
    """
    for callback in callbacks:
        lightnings = {cls.__name__ for cls in type(callback).__mro__ if cls.__module__.split(".")[0] != "accelight"}
        for name in lightnings & set(refused):
            raise ValueError(f"{type(callback).__name__} {refused[name]}")
