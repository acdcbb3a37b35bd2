"""``python -m benchmarks [NAME ...] [--keep]``: run the named comparisons, or all.

Results are written into a temporary folder, so that a measurement leaves the checkout as it is. ``--keep`` writes them
to ``benchmarks/results``, which README and plots are compared with.
"""

from __future__ import annotations

import argparse
import os
import tempfile

from benchmarks import (
    accumulate,
    first_weights,
    gpu,
    imports,
    load_full,
    merge,
    merge_background,
    merge_small,
    merge_zero,
    metadata,
    object_store,
    optimizer_steps,
    overhead,
    results,
    save,
    save_zero,
    scale,
    timeline,
    trigger,
    watch,
)

BENCHMARKS = {
    "accumulate": accumulate,
    "first-weights": first_weights,
    "gpu": gpu,
    "import": imports,
    "load-full": load_full,
    "merge": merge,
    "merge-background": merge_background,
    "merge-small": merge_small,
    "merge-zero": merge_zero,
    "metadata": metadata,
    "object-store": object_store,
    "optimizer": optimizer_steps,
    "overhead": overhead,
    "save": save,
    "save-zero": save_zero,
    "scale": scale,
    "timeline": timeline,
    "trigger": trigger,
    "watch": watch,
}


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}; default all")
    help_text = "keep the results in benchmarks/results, or in the folder that ACCELIGHT_BENCH_RESULTS names"
    parser.add_argument("--keep", action="store_true", help=help_text)
    arguments = parser.parse_args()
    names = arguments.names or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    if not arguments.keep:  # processes of the benchmarks inherit it
        os.environ[results.VARIABLE] = tempfile.mkdtemp(prefix="accelight-benchmarks-")
    for name in names:
        print(f"=== {name}: {(BENCHMARKS[name].__doc__ or '').splitlines()[0]}")
        BENCHMARKS[name].run()


if __name__ == "__main__":
    main()
