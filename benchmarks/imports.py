"""``import``: what accelight adds to ``import torch``, and how fast its command starts."""

from __future__ import annotations

import statistics
import subprocess

from benchmarks import results
from benchmarks.measure import python, time_commands

_TIMED = "import torch, time; s = time.perf_counter(); from {} import PartialState; print(time.perf_counter() - s)"
_COMMAND = "import sys; sys.argv[1:] = ['--help']; from accelight.checkpoint.cli import main; main()"


def run() -> None:
    """Print medians; the targets are <= 50 ms over torch, and <= 100 ms for the command."""
    seconds: dict[str, list[float]] = {"accelight.state": [], "accelerate.state": []}
    for repeat in range(8):  # inside the process: starting torch varies by more than what is measured
        for module, values in seconds.items():
            done = subprocess.run(python(_TIMED.format(module)), check=True, capture_output=True, text=True)
            if repeat:
                values.append(float(done.stdout))
    for module, values in seconds.items():
        spread = max(values) - min(values)
        print(f"{module:18} {statistics.median(values) * 1000:6.1f} ms over torch   spread {spread * 1000:.1f} ms")
    timings = time_commands({"python -c pass": python("pass"), "accelight --help": python(_COMMAND)})
    for name, timing in timings.items():
        print(f"{name:18} {timing.median * 1000:6.1f} ms start to end   spread {timing.spread * 1000:.1f} ms")
    results.keep_panels(
        "import",
        {
            "Importing, over torch": seconds,
            "Starting a command": {name: timing.seconds for name, timing in timings.items()},
        },
    )
