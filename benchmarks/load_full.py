"""``load-full``: full weights, on rank 0 or in safetensors files, into a sharded model on the meta device.

``ACCELIGHT_BENCH_GB`` sets the size of the weights, ``ACCELIGHT_BENCH_DIR`` the folder of the files::

    python -m benchmarks load-full                               # 0.2 GB
    ACCELIGHT_BENCH_GB=1.2 python -m benchmarks load-full

Two gloo processes; each way in turn, after a warm-up. Bytes are those of the tensors that rank 1 receives. Memory is
measured in processes of its own for each way, whose allocators keep nothing of another's: what each holds anonymously
beyond its start at the worst moment, rank 0's weights not counted.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from typing_extensions import Self

from benchmarks import results
from benchmarks.measure import Timing, python

REPEATS = 5
NUM_RANKS = 2
_SIDE = 1024
_LAYER_BYTES = 4 * _SIDE * _SIDE * 4
_LOAD = "import sys; from benchmarks.load_full import load; load(*sys.argv[1:])"
OURS, FILES = "accelight, from rank 0", "accelight, from files"
ACCELERATE, TORCH = "Accelerate's fsdp2_load_full_state_dict", "torch's set_model_state_dict"
WAYS = (ACCELERATE, TORCH, OURS, FILES)


def run() -> None:
    """Print medians, spread, bytes, memory and ratios; the targets stand beside them."""
    wanted = int(float(os.environ.get("ACCELIGHT_BENCH_GB", "0.2")) * 10**9)
    num_bytes = max(1, wanted // _LAYER_BYTES) * _LAYER_BYTES
    with tempfile.TemporaryDirectory(prefix="bench_load_", dir=os.environ.get("ACCELIGHT_BENCH_DIR")) as folder:
        found = _start(folder, num_bytes, WAYS, REPEATS)
        peaks_of = {way: [one[way]["peak"] for one in _start(folder, num_bytes, (way,), 0)] for way in WAYS}
    timings = {way: Timing(tuple(found[0][way]["seconds"])) for way in WAYS}
    print(f"{num_bytes / 1e6:.0f} MB of weights, half of them on each process")
    for way, timing in timings.items():
        peaks = " and ".join(f"{peak / 1e6:.0f}" for peak in peaks_of[way])
        ratios = ", ".join(f"{timings[peer].median / timing.median:.2f} x {peer}" for peer in (ACCELERATE, TORCH))
        print(
            f"{way:40} {timing.median * 1000:8.0f} ms   spread {timing.spread * 1000:6.0f} ms   received "
            f"{found[1][way]['received'] / 1e6:7.0f} MB   peak {peaks} MB   {ratios}"
        )
    title = f"Loading {num_bytes / 1e6:.0f} MB into {NUM_RANKS} processes"
    results.keep_panels(
        "load-full",
        {title: {way: timing.seconds for way, timing in timings.items()}},
        peak_bytes=peaks_of,
        received_bytes={way: found[1][way]["received"] for way in WAYS},
    )
    print("targets: >= 2.5 x both from rank 0, with half the bytes; >= 3.5 x from files")


def _start(folder: str, num_bytes: int, ways: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """Let both processes load; return what each has found."""
    Path(folder, "store").unlink(missing_ok=True)  # of the processes before
    arguments = [folder, f"{num_bytes}", json.dumps(ways), f"{repeats}"]
    processes = [subprocess.Popen([*python(_LOAD), *arguments, f"{rank}"]) for rank in range(NUM_RANKS)]
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise RuntimeError("a process failed, see above")
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def load(folder: str, num_bytes: str, wanted: str, repeats: str, rank: str) -> None:
    """Be one of the processes."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=NUM_RANKS)
    num_layers = int(num_bytes) // _LAYER_BYTES
    full_sd = {}
    if rank == "0":
        full_sd = {f"{layer}.weight": torch.randn(4 * _SIDE, _SIDE) for layer in range(num_layers)}
        save_file(full_sd, Path(folder, "model.safetensors"))
    dist.barrier()
    ways: list[str] = json.loads(wanted)
    found: dict[str, dict[str, Any]] = {way: {"seconds": []} for way in ways}
    for repeat in range(int(repeats) + 1):
        for way in ways:
            model = _sharded_on_meta(num_layers)
            # torch replaces the tensors of a dict that it is given
            fill = _filler(way, model, dict(full_sd), folder)
            with _Peak() as peak:
                dist.barrier()
                start = time.perf_counter()
                fill()
                dist.barrier()
                seconds = time.perf_counter() - start
            _check(model, full_sd)
            if repeat:
                found[way]["seconds"].append(seconds)
            found[way]["peak"] = max(found[way].get("peak", 0), peak.num_bytes)
            del model, fill
            gc.collect()  # FSDP2's modules refer to each other: dead ones would add up to all memory there is
    for way in ways:
        found[way]["received"] = _received(_filler(way, _sharded_on_meta(num_layers), dict(full_sd), folder))
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _sharded_on_meta(num_layers: int) -> Any:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(_SIDE, 4 * _SIDE, bias=False) for _ in range(num_layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _filler(way: str, model: Any, full_sd: dict[str, Any], folder: str) -> Callable[[], Any]:
    import torch
    import torch.distributed as dist
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict as accelerates
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    from accelight.strategies.fsdp import fsdp2_load_full_state_dict, fsdp2_load_safetensors

    process: Any = SimpleNamespace(device=torch.device("cpu"), is_main_process=dist.get_rank() == 0)
    if way == OURS:
        return lambda: fsdp2_load_full_state_dict(process, model, full_sd)
    if way == FILES:
        return lambda: fsdp2_load_safetensors(process, model, folder)
    if way == ACCELERATE:
        return lambda: accelerates(process, model, full_sd)

    def with_torch() -> None:
        model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, full_sd, options=options)

    return with_torch


def _check(model: Any, full_sd: dict[str, Any]) -> None:
    """Look at the sums that all ranks can agree on: whoever is fast has to be right."""
    import torch

    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor()
        if full_sd and not torch.equal(whole, full_sd[name]):
            raise RuntimeError(f"{name} is not what was loaded")


def _received(fill: Callable[[], Any]) -> int:
    """Return the bytes of the tensors that collectives and receives write on this rank."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    counted: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d" and any(word in func.__name__ for word in ("broadcast", "scatter", "recv")):
                leaves = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
                counted[func.__name__] += sum(leaf.numel() * leaf.element_size() for leaf in leaves)
            return func(*args, **(kwargs or {}))

    with Count():
        fill()
    return counted.total()


class _Peak:
    """Anonymous memory of this process beyond its start, looked at every two milliseconds."""

    def __enter__(self) -> Self:
        self.start = self.most = _anonymous()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.done.wait(0.002):
            self.most = max(self.most, _anonymous())

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()
        self.num_bytes = max(self.most, _anonymous()) - self.start


def _anonymous() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(("RssAnon", "RssShmem")))
