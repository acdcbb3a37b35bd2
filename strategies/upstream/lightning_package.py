"""The one of Lightning's two packages that a process uses: ``lightning`` or ``pytorch_lightning``, the same code twice.

Their classes are not each other's: a Trainer takes strategies and modules of its own package alone.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec

VARIABLE = "ACCELIGHT_LIGHTNING"
ROOTS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
"""Package to the module that has its Trainer."""


@cache
def lightning_package() -> str:
    """Return the package that strategies and callbacks are made for; the first answer holds for the whole process.

    ``ACCELIGHT_LIGHTNING`` says which. Without it, it is the one that is imported already, and ``lightning`` if both
    are or neither is.

    Raises:
        ValueError: If the variable has another value.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted:
        if wanted not in ROOTS:
            raise ValueError(f"{VARIABLE}={wanted!r} is no package of Lightning's. Use {' or '.join(ROOTS)}.")
        return wanted
    imported = [package for package, root in ROOTS.items() if root in sys.modules]
    if not imported and find_spec("lightning") is None:
        return "pytorch_lightning"
    return imported[0] if imported else "lightning"


def other_package_hint() -> str:
    """Say how accelight is made to follow the other package."""
    package = lightning_package()
    other = next(each for each in ROOTS if each != package)
    return (
        f"accelight follows the package {package} in this process. For {other}, set {VARIABLE}={other}, or import "
        f"{other} before accelight."
    )


def other_package_is_imported() -> bool:
    """Return whether the package that is not followed is here, too."""
    return any(root in sys.modules for package, root in ROOTS.items() if package != lightning_package())
