"""Measuring commands: alternating, repeated, as medians with their spread."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


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


def time_into(
    commands: Mapping[str, Sequence[str]], inputs: Mapping[str, Path], outputs: Mapping[str, Path], repeats: int
) -> dict[str, Timing]:
    """Run commands that read a folder and write into one, all in turn.

    Outside of the measurement all outputs are emptied, the disk gets to rest, and the input is read once: every command
    finds it in the page cache, and not in what the one before left of it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            for output in outputs.values():
                empty(output)
            os.sync()
            _read_all(inputs[name])
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def _read_all(folder: Path) -> None:
    buffer = bytearray(2**24)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def peak_bytes(command: Sequence[str]) -> tuple[int, int]:
    """Run a command and return its largest resident memory, and that without pages of files; of a shell, the shell's.

    Looks into ``/proc`` while it runs: ``ru_maxrss`` would count what the measuring process had when it started it.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peaks = {"VmHWM": 0, "RssAnon": 0}
    while process.poll() is None:
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in peaks:
                peaks[name] = max(peaks[name], int(value.split()[0]) * 1024)
        time.sleep(0.005)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return peaks["VmHWM"], peaks["RssAnon"]


def empty(folder: Path) -> None:
    """Make a folder with nothing in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def python(code: str) -> list[str]:
    """Return the command that runs ``code`` with this Python."""
    return [sys.executable, "-c", code]
