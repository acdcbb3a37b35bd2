"""One error for everything in which a DeepSpeed config and what stands beside it differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def differ(one: Any, other: Any) -> bool:
    """Whether two values of a config differ; a tuple is the list that JSON makes of it."""
    one, other = (list(value) if isinstance(value, tuple) else value for value in (one, other))
    return bool(one != other)


def mismatch_error(mismatches: Sequence[str]) -> ValueError:
    """Return the error that lists all mismatches."""
    return ValueError(
        "The DeepSpeed config contradicts what is given beside it:\n"
        + "\n".join(mismatches)
        + "\nGive each value once: set it to 'auto' in the config (or leave it out), or leave the other one out."
    )
