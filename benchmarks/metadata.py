"""``metadata``: what describes a checkpoint of 4,096 ranks, planned, written and read by one process each.

A model of 10,000 tensors (with Adam's states: one of 3,333), trained with hybrid sharding: 64 copies, each sharded
along dimension 0 over 64 ranks, which makes 640,000 pieces. Sharded over all ranks it would be 41 million, more than
torch can plan in a process's memory. Plans are simulated, and so are processes, with torch's ``fake`` backend; no
tensor's bytes are written. The copies share what is to be written, 156 pieces a rank.

Each step is a process of its own: seconds, and the peak of its memory above what it had before the step; in the
coordinator's are the plans that it was sent::

    python -m benchmarks metadata

``ACCELIGHT_BENCH_TENSORS`` and ``ACCELIGHT_BENCH_SHARDS`` set the numbers of tensors and of shards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.results import keep

NUM_RANKS = 4096
NUM_TENSORS = int(os.environ.get("ACCELIGHT_BENCH_TENSORS", "10000"))
NUM_SHARDS = int(os.environ.get("ACCELIGHT_BENCH_SHARDS", "64"))
_SHAPES = ((64, 1024), (256, 64), (1024,), (512, 8, 3), (128, 4096), (4096, 128), (64, 64), (2048,))
_STEPS = {
    "plan and write": "the coordinator, in a first save: the plans of all ranks as one, and .metadata",
    "later save": "the coordinator, by a kept plan: what all ranks tell it, and .metadata",
    "read: torch": "FileSystemReader.read_metadata, and a rank's plan of what to load",
    "read: ours": "SafeReader.read_metadata, and a rank's plan of what to load",
    "read: merge": "what a merge reads",
}
_TARGET = "written in less than 10 s, read in less than 10 s, each with 500 MB"
_STEP = "import sys; from benchmarks.metadata import step; step(*sys.argv[1:])"


def run() -> None:
    """Print seconds and memory of each step."""
    print(f"{NUM_RANKS} ranks, {NUM_TENSORS} tensors in {NUM_TENSORS * NUM_SHARDS} pieces")
    steps: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench_metadata_", dir=os.environ.get("ACCELIGHT_BENCH_DIR")) as folder:
        for name, what in _STEPS.items():
            command = [sys.executable, "-c", _STEP, name, folder]
            done = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            steps[name] = done
            parts = "   ".join(
                f"{part} {one['seconds']:.2f} s (processor {one['processor_seconds']:.2f})"
                for part, one in done["parts"].items()
            )
            print(f"  {name:15} {parts}   {done['mib']:.0f} MiB   ({what})")
        num_bytes = Path(folder, ".metadata").stat().st_size
        print(f"  .metadata has {num_bytes / 1e6:.1f} MB; target: {_TARGET}")
    sizes = {"num_tensors": NUM_TENSORS, "num_shards": NUM_SHARDS, "num_bytes": num_bytes}
    keep("metadata", {"num_ranks": NUM_RANKS, **sizes, "steps": steps})


def step(name: str, folder: str) -> None:
    """Do one step, and print what it took."""
    import torch.distributed.checkpoint  # noqa: F401 - before memory is looked at

    import accelight.strategies.fsdp.checkpoint.loader  # noqa: F401 - it too

    steps = {
        "plan and write": _plan_and_write,
        "later save": _later_save,
        "read: torch": _torch,
        "read: ours": _ours,
        "read: merge": _merge,
    }
    before, taken = _memory("VmRSS"), {}
    start = time.perf_counter(), time.process_time()
    for part in steps[name](Path(folder)):
        taken[part] = {"seconds": time.perf_counter() - start[0], "processor_seconds": time.process_time() - start[1]}
        if not part and name != "plan and write":
            before = _memory("VmRSS")
        start = time.perf_counter(), time.process_time()
    taken.pop("")
    print(json.dumps({"parts": taken, "mib": (_memory("VmHWM") - before) / 2**20}))


def _memory(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


@cache
def _names() -> list[str]:
    return [f"state_dict.model.layers.{number // 8}.part_{number % 8}.weight" for number in range(NUM_TENSORS)]


def _local_shape(number: int) -> tuple[int, ...]:
    first, *rest = _SHAPES[number % len(_SHAPES)]
    return (first, *rest)


def _plans() -> list[Any]:
    """Return the plan that each rank reports to rank 0."""
    from torch.distributed.checkpoint.planner import SavePlan

    keys = {name: ("state_dict", name.removeprefix("state_dict.")) for name in _names()}
    copies = NUM_RANKS // NUM_SHARDS
    plans = []
    for rank in range(NUM_RANKS):
        copy, shard = divmod(rank, NUM_SHARDS)
        items = _items(shard, copy, copies)
        plans.append(SavePlan(items, planner_data={item.index.fqn: keys[item.index.fqn] for item in items}))
    return plans


def _places(rank: int, num_items: int) -> Any:
    from accelight.strategies.fsdp.checkpoint.planner import WriteLocations

    return WriteLocations([f"__{rank}_0.distcp"], [(1000, 0, place * 2000, 2000, 7) for place in range(num_items)])


def _plan_and_write(folder: Path) -> Iterator[str]:
    """Yield what was done; "" for what is not measured."""
    from accelight.strategies.fsdp.checkpoint.planner import WriteLocations, merge_plans
    from accelight.strategies.fsdp.checkpoint.writer import FolderWriter

    plans = _plans()
    yield ""
    merged = merge_plans(1, plans)
    yield "plans put together"
    places = [_places(rank, len(own)) for rank, own in enumerate(merged.indices)]
    yield ""
    FolderWriter(folder).finish(merged.metadata, list(map(WriteLocations.results, places, merged.indices)))
    yield "write"


def _later_save(folder: Path) -> Iterator[str]:
    """The other ranks' part is done before, one after the other."""
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - the backend
    from torch.distributed import TCPStore

    from accelight.state.rendezvous import StoreMessages
    from accelight.strategies.fsdp.checkpoint.planner import WriteLocations, merge_plans
    from accelight.strategies.fsdp.checkpoint.writer import FolderWriter

    merged = merge_plans(1, _plans())
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("fake", store=store, rank=0, world_size=NUM_RANKS)
    group: Any = dist.group.WORLD
    other, own = StoreMessages(group, "a save"), WriteLocations([], [])
    for rank, items in enumerate(merged.indices):
        if rank == 0:
            own = _places(rank, len(items))
        else:
            other._rank, other.num_uses = rank, 0
            other.send_to_rank_zero(_places(rank, len(items)))
    del other
    yield ""

    def finish(reported: list[WriteLocations]) -> None:
        FolderWriter(folder).finish(merged.metadata, list(map(WriteLocations.results, reported, merged.indices)))

    StoreMessages(group, "a save").gather_then_broadcast(own, finish, "saving")
    yield "collect and write"


def _items(shard: int, copy: int, num_copies: int) -> list[Any]:
    """Return what a rank plans to write, as torch plans it for a DTensor."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    items, names = [], _names()
    for number, name in enumerate(names[copy::num_copies]):
        rows, *rest = _local_shape(copy + number * num_copies)
        offsets = torch.Size((shard * rows, *(0 for _ in rest)))
        chunk = ChunkStorageMetadata(offsets, torch.Size((rows, *rest)))
        data = TensorWriteData(chunk, TensorProperties(dtype=torch.bfloat16), torch.Size((rows * NUM_SHARDS, *rest)))
        items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
    return items


def _torch(folder: Path) -> Iterator[str]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return _read(lambda: FileSystemReader(folder))


def _ours(folder: Path) -> Iterator[str]:
    from accelight.strategies.fsdp.checkpoint.loader import SafeReader

    return _read(lambda: SafeReader(folder))


def _read(reader_of: Callable[[], Any]) -> Iterator[str]:
    """Read the description, and plan what rank 100 loads into as many shards, and into half as many."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=100, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS // NUM_SHARDS, NUM_SHARDS))
    states: list[dict[str, Any]] = []
    for scale in (1, 2):
        shards = NUM_SHARDS // scale
        mesh = init_device_mesh("cpu", (NUM_RANKS // shards, shards))
        states.append({})
        for number, name in enumerate(_names()):
            rows, *rest = _local_shape(number)
            local = torch.empty((rows * scale, *rest), device="meta")
            states[-1][name] = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
    yield ""
    metadata = reader_of().read_metadata()
    yield "read"
    for part, state in zip(("plan", "plan of other shards"), states, strict=True):
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, metadata, is_coordinator=False)
        items = planner.create_local_plan().items
        for item in items:
            metadata.storage_data[item.storage_index]
        if len(items) != NUM_TENSORS * (1 if part == "plan" else 2):
            raise AssertionError(f"{len(items)} items for {NUM_TENSORS} tensors")
        yield part


def _merge(folder: Path) -> Iterator[str]:
    from accelight.checkpoint.formats.dcp_metadata import read_dcp_metadata

    yield ""
    found = read_dcp_metadata(folder / ".metadata")
    yield "read"
    if len(found.tensors) != NUM_TENSORS or len(found.tensors[_names()[-1]].records) != NUM_SHARDS:
        raise AssertionError(f"{len(found.tensors)} tensors")
