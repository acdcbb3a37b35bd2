"""Measuring commands: alternating, repeated, as medians with their spread."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of several runs of one thing."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Middle run."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Longest minus shortest run."""
        return max(self.seconds) - min(self.seconds)


def time_commands(commands: Mapping[str, Sequence[str]], repeats: int = 9) -> dict[str, Timing]:
    """Run each command ``repeats`` times after one warm-up, all in turn, so that drift hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for repeat in range(repeats + 1):
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def python(code: str) -> list[str]:
    """Return the command that runs ``code`` with this Python."""
    return [sys.executable, "-c", code]
