"""``merge-zero``: DeepSpeed's ZeRO-2 and ZeRO-3 checkpoints to one safetensors file, against DeepSpeed's own script.

``ACCELIGHT_BENCH_PARAMETERS`` sets the size of the model (default 500 million, for which saving the two checkpoints
needs 16 GB of memory and 12 GB of disk each); ``ACCELIGHT_BENCH_DIR`` the folder for everything that is written::

    python -m benchmarks merge-zero
    ACCELIGHT_BENCH_PARAMETERS=100e6 python -m benchmarks merge-zero

The checkpoints are saved by DeepSpeed on two gloo processes, after a step of AdamW in bf16. Both sides, and ``cat`` of
as many bytes, which is the disk's limit, are whole commands that end with fsync of what they wrote, and find the
checkpoint in the page cache. Linux, for ``/proc``.
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

from benchmarks import results
from benchmarks.measure import empty, peak_bytes, python, time_into

REPEATS = int(os.environ.get("ACCELIGHT_BENCH_REPEATS", "5"))
TARGETS = "targets: >= 3 times faster than zero_to_fp32.py, memory <= a tenth"
_NUM_RANKS = 2
_SIDE = 2048
_OURS, _SCRIPT, _CAT = "accelight merge-weights", "zero_to_fp32.py", "cat of as many bytes"
_SAVE = "import sys; from benchmarks.merge_zero import save; save(*sys.argv[1:])"
_RUN_SCRIPT = """
import os, runpy, sys
source, target = sys.argv[1:]
sys.argv = ["zero_to_fp32.py", source, target, "--safe_serialization", "--max_shard_size", "1TB"]
try:
    runpy.run_path(os.path.join(source, "zero_to_fp32.py"), run_name="__main__")
finally:
    os.fsync(os.open(os.path.join(target, "model.safetensors"), os.O_RDWR))
"""


def run() -> None:
    """Print medians, spread, ratios and peak memory; the targets stand beside them."""
    num_parameters = int(float(os.environ.get("ACCELIGHT_BENCH_PARAMETERS", "500e6")))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with tempfile.TemporaryDirectory(prefix="bench_merge_zero_", dir=os.environ.get("ACCELIGHT_BENCH_DIR")) as scratch:
        free, needed = shutil.disk_usage(scratch).free, 26 * num_parameters
        if free < needed:
            raise OSError(f"{scratch} has {free} bytes free, {needed} are needed. Set ACCELIGHT_BENCH_DIR.")
        panels: dict[str, Mapping[str, Sequence[float]]] = {}
        for stage in (2, 3):
            folder = Path(scratch, str(stage))
            _run_savers(folder, stage, num_parameters)
            panels.update(_compare(folder, stage))
            shutil.rmtree(folder)
    results.keep_panels("merge-zero", panels)
    print(f"  {TARGETS}")


def _compare(folder: Path, stage: int) -> results.Panels:
    outputs = {_OURS: folder / "ours", _SCRIPT: folder / "theirs", _CAT: folder / "cat"}
    parts = sorted((folder / "in").glob("*/*optim_states.pt"))
    num_bytes = sum(part.stat().st_size for part in parts) // 3  # masters, and AdamW's two averages of the same size
    commands = {
        _OURS: [str(Path(sys.executable).with_name("accelight")), "merge-weights", "--no-verify", str(folder / "in")],
        _SCRIPT: [*python(_RUN_SCRIPT), str(folder / "in")],
        _CAT: [
            *("sh", "-c"),
            f'head -qc {num_bytes // len(parts)} {shlex.join(map(str, parts))} > "$0/cat" && sync "$0/cat"',
        ],
    }
    commands = {name: [*command, str(outputs[name])] for name, command in commands.items()}
    for output in outputs.values():
        empty(output)
    peaks = {name: peak_bytes(command) for name, command in commands.items()}  # the warm-up, too
    one, other = (outputs[name] / "model.safetensors" for name in (_OURS, _SCRIPT))
    if not filecmp.cmp(one, other, shallow=False):
        raise AssertionError(f"stage {stage}: the two merged files differ")
    size = f"{one.stat().st_size / 1e9:.2f} GB"
    print(f"stage {stage}: {size} from {_NUM_RANKS} ranks; merged files are identical")
    timings = time_into(commands, dict.fromkeys(commands, folder / "in"), outputs, REPEATS)
    ours = timings[_OURS].median
    for name, timing in timings.items():
        resident, anonymous = peaks[name]
        print(
            f"  {name:24} {timing.median:7.2f} s   spread {timing.spread:5.2f} s   "
            f"peak {resident / 2**20:7.1f} MiB, {anonymous / 2**20:7.1f} without pages of files   "
            f"this / ours {timing.median / ours:6.2f} time, {resident / peaks[_OURS][0]:6.1f} memory"
        )
    title = f"Merging ZeRO-{stage} of {_NUM_RANKS} ranks to {size}"
    return {title: {name: timing.seconds for name, timing in timings.items()}}


def _run_savers(folder: Path, stage: int, num_parameters: int) -> None:
    folder.mkdir()
    savers = [
        subprocess.Popen(
            [*python(_SAVE), str(folder), str(stage), str(num_parameters), str(rank)], stdout=subprocess.DEVNULL
        )
        for rank in range(_NUM_RANKS)
    ]
    statuses = [saver.wait() for saver in savers]
    if any(statuses):
        raise RuntimeError(f"the checkpoint could not be saved, the processes ended with {statuses}; see above")


def save(folder: str, stage: str, num_parameters: str, rank: str) -> None:
    """Train one step and save one process's part of a model: matrices, and a vector to each."""
    from argparse import Namespace

    import torch
    import torch.distributed as dist

    store = f"file://{folder}/store"
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(_NUM_RANKS))
    dist.init_process_group("gloo", init_method=store, rank=int(rank), world_size=_NUM_RANKS)
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    count = max(1, int(num_parameters) // (_SIDE * _SIDE + _SIDE))
    model = torch.nn.Sequential(*(torch.nn.Linear(_SIDE, _SIDE) for _ in range(count)))
    engine, *_ = deepspeed.initialize(
        args=Namespace(device_rank=0),
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": int(stage)},
        },
    )
    engine.backward(engine(torch.ones(1, _SIDE, dtype=torch.bfloat16)).float().sum())
    engine.step()
    engine.save_checkpoint(f"{folder}/in")
    dist.destroy_process_group()
