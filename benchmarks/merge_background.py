"""``merge-background``: training steps while checkpoints are merged, against the same steps while nothing is.

Two processes train with FSDP2 on the CPU. Windows of steps alternate: in every other one, a checkpoint is merged again
and again as `MergeShardedCheckpoint` does it, in a process of low priority. ``ACCELIGHT_BENCH_MB`` sets the size of the
model, ``ACCELIGHT_BENCH_DIR`` the folder for checkpoint and result (twice that size)::

    python -m benchmarks merge-background               # 200 MB
    ACCELIGHT_BENCH_MB=1000 python -m benchmarks merge-background
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile


def run() -> None:
    """Print the median step with and without merges, their ratio, and what one merge costs training."""
    with tempfile.TemporaryDirectory(prefix="bench_merge_", dir=os.environ.get("ACCELIGHT_BENCH_DIR")) as scratch:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELIGHT_BENCH_SCRATCH": scratch}
        subprocess.run([*command, "-m", "benchmarks.merge_background_training"], check=True, env=environment)
