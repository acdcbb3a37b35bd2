"""``merge``: a checkpoint of two shards to one safetensors file, against Accelerate and against ``cat`` of the shards.

``ACCELIGHT_BENCH_GB`` sets the size of the model; ``ACCELIGHT_BENCH_DIR`` the folder for everything that is written
(four times the size, on the disk that is to be measured)::

    python -m benchmarks merge                          # 1 GB, a minute or two
    ACCELIGHT_BENCH_GB=2 python -m benchmarks merge
    ACCELIGHT_BENCH_GB=6 python -m benchmarks merge

Every side ends with fsync of what it wrote, and finds the shards in the page cache. Linux, for ``/proc`` and ``sync``.
"""

from __future__ import annotations

import filecmp
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measure import Timing, python

REPEATS = 5
TARGETS = {"rows": "<= 1.2 x cat", "columns": "<= 3 x cat"}
_NUM_SHARDS = 2
_SIDE = 4096  # a matrix of 64 MB, as in a model of a few billion parameters
_OURS, _CAT, _ACCELERATE = "accelight merge-weights", "cat of the shards", "accelerate"
_SAVE = "import sys; from benchmarks.merge import save_shards; save_shards(*sys.argv[1:])"
_MERGE = """
import os, sys
from accelerate.utils import merge_fsdp_weights
merge_fsdp_weights(sys.argv[1], sys.argv[2])
fd = os.open(os.path.join(sys.argv[2], "model.safetensors"), os.O_RDWR)
os.fsync(fd)
"""


def run() -> None:
    """Print medians, spread, ratios and peak memory; the targets stand beside them."""
    num_bytes = int(float(os.environ.get("ACCELIGHT_BENCH_GB", "1")) * 10**9)
    with tempfile.TemporaryDirectory(prefix="bench_merge_", dir=os.environ.get("ACCELIGHT_BENCH_DIR")) as scratch:
        free = shutil.disk_usage(scratch).free
        if free < 5 * num_bytes:
            raise OSError(f"{scratch} has {free} bytes free, {5 * num_bytes} are needed. Set ACCELIGHT_BENCH_DIR.")
        for layout, target in TARGETS.items():
            folder = Path(scratch, layout)
            _run_savers(folder, layout, num_bytes)
            _compare(folder, layout, target)
            shutil.rmtree(folder)


def _compare(folder: Path, layout: str, target: str) -> None:
    shards = sorted((folder / "in").glob("*.distcp"))
    outputs = {name: folder / f"out{number}" for number, name in enumerate((_OURS, _CAT, _ACCELERATE))}
    commands = {
        _OURS: [str(Path(sys.executable).with_name("accelight")), "merge-weights", str(folder / "in")],
        _CAT: ["sh", "-c", f'cat {shlex.join(map(str, shards))} > "$0/cat" && sync "$0/cat"'],
        _ACCELERATE: [*python(_MERGE), str(folder / "in")],
    }
    commands = {name: [*command, str(outputs[name])] for name, command in commands.items()}
    peaks = {name: _peak_bytes(command, outputs[name]) for name, command in commands.items()}  # the warm-up, too
    if not filecmp.cmp(outputs[_OURS] / "model.safetensors", outputs[_ACCELERATE] / "model.safetensors", shallow=False):
        raise AssertionError(f"{layout}: the two merged files differ")
    timings = _time(commands, outputs)
    total = sum(path.stat().st_size for path in shards)
    print(f"{layout}: {total / 1e9:.2f} GB in {len(shards)} shards; merged files are identical")
    ours = timings[_OURS].median
    for name, timing in timings.items():
        print(
            f"  {name:24} {timing.median:7.2f} s   spread {timing.spread:5.2f} s   "
            f"peak {peaks[name] / 2**20:7.1f} MiB   ours / this {ours / timing.median:6.3f}   "
            f"this / ours {timing.median / ours:6.2f}"
        )
    print(f"  targets: {target}, <= 32 MB, and (rows) >= 8 times faster than Accelerate at 2 GB, >= 4 times at 6 GB")


def _time(commands: Mapping[str, Sequence[str]], outputs: Mapping[str, Path]) -> dict[str, Timing]:
    """Run all in turn, so that drift hits all alike; what was written before is removed outside of the measurement."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(REPEATS):
        for name, command in commands.items():
            _empty(outputs[name])
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def _peak_bytes(command: Sequence[str], output: Path) -> int:
    """Run a command and return its largest resident memory; of a shell, the shell's.

    Looks into ``/proc`` while it runs: ``ru_maxrss`` would count what the measuring process had when it started it.
    """
    _empty(output)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        line = next((line for line in status.splitlines() if line.startswith("VmHWM")), None)
        peak = max(peak, int(line.split()[1]) * 1024 if line else 0)
        time.sleep(0.005)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return peak


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _run_savers(folder: Path, layout: str, num_bytes: int) -> None:
    folder.mkdir()
    savers = [
        subprocess.Popen([*python(_SAVE), str(folder), layout, str(num_bytes), str(rank)])
        for rank in range(_NUM_SHARDS)
    ]
    statuses = [saver.wait() for saver in savers]
    if any(statuses):
        raise RuntimeError(f"the checkpoint could not be saved, the processes ended with {statuses}; see above")


def save_shards(folder: str, layout: str, num_bytes: str, rank: str) -> None:
    """Save one process's half of a model with torch.distributed.checkpoint: matrices, and a vector to each."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=_NUM_SHARDS)
    mesh = init_device_mesh("cpu", (_NUM_SHARDS,))
    torch.manual_seed(int(rank))
    half = _SIDE // _NUM_SHARDS
    dim, shape = (0, (half, _SIDE)) if layout == "rows" else (1, (_SIDE, half))
    state = {}
    for layer in range(max(1, int(num_bytes) // (_SIDE * _SIDE * 4))):
        state[f"layers.{layer}.weight"] = DTensor.from_local(torch.rand(shape), mesh, [Shard(dim)], run_check=False)
        state[f"layers.{layer}.bias"] = DTensor.from_local(torch.rand(half), mesh, [Shard(0)], run_check=False)
    save({"model": state}, storage_writer=FileSystemWriter(f"{folder}/in"))
    dist.destroy_process_group()
