"""``merge-small``: a checkpoint of very many small tensors, where descriptions cost more than bytes.

Against the same peers as ``merge``. ``ACCELIGHT_BENCH_TENSORS`` sets the number of tensors (100,000)::

    python -m benchmarks merge-small
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from benchmarks import results
from benchmarks.merge import SMALL_PAIR_BYTES, compare, save_checkpoint


def run() -> None:
    """Print medians, spread, ratios and peak memory."""
    num_pairs = int(float(os.environ.get("ACCELIGHT_BENCH_TENSORS", "1e5"))) // 2
    with tempfile.TemporaryDirectory(prefix="bench_merge_", dir=os.environ.get("ACCELIGHT_BENCH_DIR")) as scratch:
        folder = Path(scratch, "small")
        save_checkpoint(folder, "small", num_pairs * SMALL_PAIR_BYTES)
        results.keep_panels("merge-small", compare(folder, "small", "seconds, not minutes"), num_tensors=2 * num_pairs)
