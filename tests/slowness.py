"""How slow the machine is now: limits of tests are stretched by it, so that load alone fails nothing."""

from __future__ import annotations

import os
import time

_LOOPS = 400_000
_LOOPS_S = 0.02
"""What the loop below takes on one idle core that the limits were chosen for."""


def _measured() -> float:
    begin = time.perf_counter()
    for _ in range(_LOOPS):
        pass
    return (time.perf_counter() - begin) / _LOOPS_S


_SPEED = max(1.0, min(_measured() for _ in range(3)))


def slowness() -> float:
    """Return by how much longer than on two idle cores things may take: 1 or more."""
    return _SPEED * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
