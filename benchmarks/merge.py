"""``merge``: a checkpoint of two shards to one safetensors file, against Accelerate, Lightning, torch and ``cat``.

``ACCELIGHT_BENCH_GB`` sets the size of the model; ``ACCELIGHT_BENCH_DIR`` the folder for everything that is written
(eight times the size, on the disk that is to be measured)::

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.measure import empty, peak_bytes, python, time_into

REPEATS = int(os.environ.get("ACCELIGHT_BENCH_REPEATS", "5"))
_ROOM = 8  # two checkpoints and five results, of one model
TARGETS = {
    "rows": "<= 1.2 x cat, <= 32 MB, >= 8 times faster than Accelerate at 2 GB, >= 4 times at 6 GB",
    "columns": "<= 3 x cat, <= 32 MB",
}
_NUM_SHARDS = 2
_SIDE = 4096  # a matrix of 64 MB, as in a model of a few billion parameters
_SMALL_SIDE = 16
SMALL_PAIR_BYTES = _SMALL_SIDE * _SMALL_SIDE * 4  # a matrix; the vector beside it does not count
_OURS, _CAT, _ACCELERATE = "accelight merge-weights", "cat of the shards", "accelerate"
_CHECKED = "accelight, checksums too"
_LIGHTNING, _TORCH = "lightning consolidation", "torch HF consolidation"
_SAVE = "import sys; from benchmarks.merge import save_shards; save_shards(*sys.argv[1:])"
_MERGE = """
import os, sys
from accelerate.utils import merge_fsdp_weights
merge_fsdp_weights(sys.argv[1], sys.argv[2])
fd = os.open(os.path.join(sys.argv[2], "model.safetensors"), os.O_RDWR)
os.fsync(fd)
"""
_LIGHTNING_MERGE = """
import os, sys
from pathlib import Path
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
path = os.path.join(sys.argv[2], "model.ckpt")
torch.save(_load_distributed_checkpoint(Path(sys.argv[1])), path)
fd = os.open(path, os.O_RDWR)
os.fsync(fd)
"""
# torch consolidates its own safetensors shards; the same tensors are saved in that format, too.
_TORCH_MERGE = """
import os, sys
from pathlib import Path
from safetensors import safe_open
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
with safe_open(next(Path(sys.argv[1]).glob("*.safetensors")), "pt") as shard:
    files = dict.fromkeys(shard.keys(), 1)
consolidate_safetensors_files(sys.argv[1], sys.argv[2], files, num_threads=2)
for name in os.listdir(sys.argv[2]):
    fd = os.open(os.path.join(sys.argv[2], name), os.O_RDWR)
    os.fsync(fd)
"""


def run() -> None:
    """Print medians, spread, ratios and peak memory; the targets stand beside them."""
    num_bytes = int(float(os.environ.get("ACCELIGHT_BENCH_GB", "1")) * 10**9)
    with tempfile.TemporaryDirectory(prefix="bench_merge_", dir=os.environ.get("ACCELIGHT_BENCH_DIR")) as scratch:
        free = shutil.disk_usage(scratch).free
        if free < _ROOM * num_bytes:
            raise OSError(f"{scratch} has {free} bytes free, {_ROOM * num_bytes} are needed. Set ACCELIGHT_BENCH_DIR.")
        panels: dict[str, Mapping[str, Sequence[float]]] = {}
        for layout, target in TARGETS.items():
            folder = Path(scratch, layout)
            save_checkpoint(folder, layout, num_bytes)
            panels.update(compare(folder, layout, target))
            shutil.rmtree(folder)
    results.keep_panels("merge", panels)


def compare(folder: Path, layout: str, target: str) -> results.Panels:
    """Merge what `save_checkpoint` wrote with all, in turn, print a line for each and the ``target``; return all."""
    shards = sorted((folder / "in").glob("*.distcp"))
    names = (_OURS, _CHECKED, _CAT, _ACCELERATE, _LIGHTNING, _TORCH)
    ours = [str(Path(sys.executable).with_name("accelight")), "merge-weights"]
    outputs = {name: folder / f"out{number}" for number, name in enumerate(names)}
    commands = {
        _OURS: [*ours, "--no-verify", str(folder / "in")],  # the others compare no checksums
        _CHECKED: [*ours, str(folder / "in")],
        _CAT: ["sh", "-c", f'cat {shlex.join(map(str, shards))} > "$0/cat" && sync "$0/cat"'],
        _ACCELERATE: [*python(_MERGE), str(folder / "in")],
        _LIGHTNING: [*python(_LIGHTNING_MERGE), str(folder / "in")],
        _TORCH: [*python(_TORCH_MERGE), str(folder / "hf")],
    }
    commands = {name: [*command, str(outputs[name])] for name, command in commands.items()}
    for output in outputs.values():
        empty(output)
    peaks = {name: peak_bytes(command)[0] for name, command in commands.items()}  # the warm-up, too
    if not filecmp.cmp(outputs[_OURS] / "model.safetensors", outputs[_ACCELERATE] / "model.safetensors", shallow=False):
        raise AssertionError(f"{layout}: the two merged files differ")
    inputs = {name: folder / ("hf" if name == _TORCH else "in") for name in names}
    timings = time_into(commands, inputs, outputs, REPEATS)
    total = sum(path.stat().st_size for path in shards)
    print(f"{layout}: {total / 1e9:.2f} GB in {len(shards)} shards; merged files are identical")
    median = timings[_OURS].median
    for name, timing in timings.items():
        print(
            f"  {name:24} {timing.median:7.2f} s   spread {timing.spread:5.2f} s   "
            f"peak {peaks[name] / 2**20:7.1f} MiB   ours / this {median / timing.median:6.3f}   "
            f"this / ours {timing.median / median:6.2f}"
        )
    print(f"  targets: {target}")
    title = f"Merging {len(shards)} shards of {total / 1e9:.2f} GB ({layout})"
    return {title: {name: timing.seconds for name, timing in timings.items()}}


def save_checkpoint(folder: Path, layout: str, num_bytes: int, code: str = _SAVE) -> None:
    """Write a checkpoint of two processes into ``folder``, once as DCP has it and once as safetensors."""
    folder.mkdir()
    savers = [
        subprocess.Popen([*python(code), str(folder), layout, str(num_bytes), str(rank)]) for rank in range(_NUM_SHARDS)
    ]
    statuses = [saver.wait() for saver in savers]
    if any(statuses):
        raise RuntimeError(f"the checkpoint could not be saved, the processes ended with {statuses}; see above")


def save_shards(folder: str, layout: str, num_bytes: str, rank: str) -> None:
    """Save one process's half of a model with torch.distributed.checkpoint."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = rank_state(folder, layout, num_bytes, rank)
    save({"model": state}, storage_writer=FileSystemWriter(f"{folder}/in"))
    save(state, storage_writer=HuggingFaceStorageWriter(f"{folder}/hf", save_distributed=True))
    dist.destroy_process_group()


def rank_state(folder: str, layout: str, num_bytes: str, rank: str) -> dict[str, Any]:
    """Start a process group, and return one process's half of a model: matrices, and a vector to each."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=_NUM_SHARDS)
    mesh = init_device_mesh("cpu", (_NUM_SHARDS,))
    torch.manual_seed(int(rank))
    side = _SMALL_SIDE if layout == "small" else _SIDE
    half = side // _NUM_SHARDS
    dim, shape = (1, (side, half)) if layout == "columns" else (0, (half, side))
    state = {}
    for layer in range(max(1, int(num_bytes) // (side * side * 4))):
        state[f"layers.{layer}.weight"] = DTensor.from_local(torch.rand(shape), mesh, [Shard(dim)], run_check=False)
        state[f"layers.{layer}.bias"] = DTensor.from_local(torch.rand(half), mesh, [Shard(0)], run_check=False)
    return state
