"""``merge-links``: merging where files can share blocks (XFS, btrfs), against a merge that copies and ``cat``.

Two processes save a checkpoint as accelight's strategy does, so that its tensors can be linked. As root, new file
systems are mounted for it, each in a file; ``ACCELIGHT_BENCH_DIR`` takes a folder on one that is there instead.
``ACCELIGHT_BENCH_GB`` sets the size of the model; five times as much is written::

    python -m benchmarks merge-links
    ACCELIGHT_BENCH_GB=6 ACCELIGHT_BENCH_DIR=/mnt/xfs python -m benchmarks merge-links

Every side ends with fsync of what it wrote, and finds the shards in the page cache. Linux.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import results
from benchmarks.measure import empty, time_into
from benchmarks.merge import rank_state, save_checkpoint

REPEATS = int(os.environ.get("ACCELIGHT_BENCH_REPEATS", "5"))
TARGETS = "targets: <= 1 % of the bytes written, a fraction of cat's time"
_ROOM = 6  # a checkpoint and three results of one model, and the file system's own
_OURS, _COPIED, _CAT = "accelight merge-weights", "  with --no-reflink", "cat of the shards"
_SAVE = "import sys; from benchmarks.merge_links import save_aligned; save_aligned(*sys.argv[1:])"


def run() -> None:
    """Print medians, spread, ratios and what was written; the targets stand beside them."""
    num_bytes = int(float(os.environ.get("ACCELIGHT_BENCH_GB", "1")) * 10**9)
    given = os.environ.get("ACCELIGHT_BENCH_DIR")
    if given is not None:
        with tempfile.TemporaryDirectory(prefix="bench_merge_links_", dir=given) as folder:
            panels = _compare(Path(folder), given, num_bytes)
    elif os.getuid() == 0:
        panels = {}
        for kind in ("xfs", "btrfs"):
            with _mounted(kind, _ROOM * num_bytes + 2**29) as folder:
                panels.update(_compare(Path(folder), kind, num_bytes))
    else:
        print("  only root can mount file systems. Set ACCELIGHT_BENCH_DIR to a folder on XFS or btrfs.")
        return
    results.keep_panels("merge-links", panels)
    print(f"  {TARGETS}")


@contextmanager
def _mounted(kind: str, num_bytes: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="bench_merge_links_") as scratch:
        image, folder = f"{scratch}/image", f"{scratch}/mounted"
        os.mkdir(folder)
        with open(image, "wb") as stream:
            stream.truncate(num_bytes)
        subprocess.run([f"mkfs.{kind}", "-q", image], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["mount", "-o", "loop", image, folder], check=True)
        try:
            yield folder
        finally:
            subprocess.run(["umount", folder], check=True)


def _compare(folder: Path, what: str, num_bytes: int) -> dict[str, dict[str, tuple[float, ...]]]:
    save_checkpoint(folder / "saved", "rows", num_bytes, _SAVE)
    source = folder / "saved/in"
    shards = sorted(source.glob("*.distcp"))
    ours = [str(Path(sys.executable).with_name("accelight")), "merge-weights", str(source)]
    outputs = {name: folder / f"out{number}" for number, name in enumerate((_OURS, _COPIED, _CAT))}
    commands = {
        _OURS: ours,
        _COPIED: [*ours, "--no-reflink"],
        _CAT: ["sh", "-c", f'cat {shlex.join(map(str, shards))} > "$0/cat" && sync "$0/cat"'],
    }
    commands = {name: [*command, str(outputs[name])] for name, command in commands.items()}
    written = {}
    for name, command in commands.items():  # the warm-up, too
        empty(outputs[name])
        before = _used(folder)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        written[name] = _used(folder) - before
    timings = time_into(commands, dict.fromkeys(commands, source), outputs, REPEATS)
    total = sum(path.stat().st_size for path in shards)
    print(f"{what}: {total / 1e9:.2f} GB in {len(shards)} shards")
    for name, timing in timings.items():
        print(
            f"  {name:24} {timing.median:7.2f} s   spread {timing.spread:5.2f} s   "
            f"written {written[name] / total:8.3%}   this / cat {timing.median / timings[_CAT].median:6.3f}"
        )
    title = f"Merging {len(shards)} shards of {total / 1e9:.2f} GB on {what}"
    return {title: {name.strip(): timing.seconds for name, timing in timings.items()}}


def _used(folder: Path) -> int:
    os.sync()
    return shutil.disk_usage(folder).used


def save_aligned(folder: str, layout: str, num_bytes: str, rank: str) -> None:
    """Save one process's half of a model as the strategy does."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save

    from accelight.strategies.fsdp.checkpoint.writer import FolderWriter

    state = rank_state(folder, layout, num_bytes, rank)
    save({"model": state}, storage_writer=FolderWriter(Path(folder, "in")))
    dist.destroy_process_group()
