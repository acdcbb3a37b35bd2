"""Refuses the Trainer of the package of Lightning's that accelight does not follow: it would take a callback."""

from __future__ import annotations

from ..strategies.upstream.lightning import Trainer
from ..strategies.upstream.lightning_package import other_package_hint


def check_trainer(trainer: object) -> None:
    """Check that a callback was given to a Trainer of the package that it was made for.

    Raises:
        TypeError: If it is the other package's.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"This Trainer is of {type(trainer).__module__.split('.')[0]}. {other_package_hint()}")
