"""``python -m tests.checkpoint.kills [N]``: kill -9 a merge N times at random moments, and look at what is left.

The verdict does not depend on when a kill comes: after each one, the output folder must hold all of the old result or
all of the new one, and the checkpoint must be as it was. How often a kill came too late is printed, not judged.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from accelight.checkpoint import merge_fsdp_weights
from tests.checkpoint.saving import save

_MERGE = "import sys; from accelight.checkpoint.cli import main; print(flush=True); sys.exit(main(sys.argv[1:]))"


def content(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder that have their names; ``.NAME.*.tmp`` is nobody's result."""
    if not folder.exists():
        return {}
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


def kill_merges(scratch: Path, num_kills: int, seed: int) -> Counter[str]:
    """Kill merges into a new folder and over an old result; return how often each outcome was there.

    Raises:
        AssertionError: If half a result was left, or the checkpoint was changed.
    """
    choose = random.Random(seed)
    source, output, whole = scratch / "in", scratch / "out", scratch / "whole"
    save(source, {"model": {f"w{i}": torch.full((250_000,), float(i)) for i in range(24)}})
    before = content(source)
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", _MERGE, "merge-weights", source, whole, "--quiet"], check=True)
    usual = time.monotonic() - started
    new = content(whole)
    outcomes: Counter[str] = Counter()
    for number in range(num_kills):
        old = {"model.safetensors": b"old"} if number % 2 else {}
        for path in sorted(output.rglob("*"), reverse=True) if output.exists() else []:
            path.unlink()
        if output.exists():
            output.rmdir()
        if old:
            output.mkdir()
            (output / "model.safetensors").write_bytes(old["model.safetensors"])
        command = [sys.executable, "-c", _MERGE, "merge-weights", str(source), str(output), "--quiet"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.read(1)  # the interpreter is up
            time.sleep(choose.uniform(0, usual))
            process.kill()
        left = content(output)
        assert left in (old, new), (
            f"kill {number}: half a result: { ({name: len(data) for name, data in left.items()}) }"
        )
        assert content(source) == before, f"kill {number}: the checkpoint was changed"
        outcomes["new result" if left == new else "as before"] += 1
    merge_fsdp_weights(source, output)
    assert content(output) == new
    return outcomes


def main() -> None:
    """Run the kills and print the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("num_kills", nargs="?", type=int, default=50)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(f"seed {arguments.seed}: {dict(kill_merges(Path(scratch), arguments.num_kills, arguments.seed))}")


if __name__ == "__main__":
    main()
