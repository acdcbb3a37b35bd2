"""Packages of extras: whether one is installed that works here, asked without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from packaging.version import Version


def require_installed(who: str, name: str, package: str, oldest: str) -> None:
    """Check that a package is installed, and not too old.

    Args:
        who: Needs it.
        name: What people call it.
        package: To be imported, installed, and of accelight's extra.
        oldest: Version that works.

    Raises:
        ModuleNotFoundError: If not.
    """
    found = importlib.metadata.version(package) if importlib.util.find_spec(package) else None
    if found is None or Version(found) < Version(oldest):
        raise ModuleNotFoundError(
            f"{who} needs {name} {oldest} or newer, and {found or 'none'} is installed: "
            f"pip install 'accelight[{package}]'."
        )
