"""The public names of accelight: what the API reference holds, and what tests ask for documentation."""

from __future__ import annotations

import importlib
from functools import cache

PACKAGES = (
    "accelight.state",
    "accelight.checkpoint",
    "accelight.strategies",
    "accelight.strategies.fsdp",
    "accelight.strategies.deepspeed",
    "accelight.strategies.ray_train",
    "accelight.callbacks",
)
"""Packages whose ``__all__`` is public. A name that several of them have belongs to the first."""


@cache
def public_names() -> dict[str, str]:
    """Return each public name with the path under which it is documented."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        for name in importlib.import_module(package).__all__:
            found.setdefault(name, f"{package}.{name}")
    return found
