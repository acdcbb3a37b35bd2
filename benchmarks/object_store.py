"""``object-store``: sharded saves and loads in S3, against torch's ``FsspecWriter`` and ``FsspecReader``.

``ACCELIGHT_BENCH_GB`` sets the size of the weights::

    python -m benchmarks object-store                            # 0.2 GB
    ACCELIGHT_BENCH_GB=1 python -m benchmarks object-store

The server is moto's, in this machine's memory, behind a proxy that answers each request after 30 ms and passes on
100 MB/s for each connection, about what one connection to S3 gives (``ACCELIGHT_BENCH_LATENCY_MS``,
``ACCELIGHT_BENCH_MB_PER_S``; 0 leaves it out). Two gloo processes save and load the shards of an FSDP2 model in turn
with either way. Lightning's development version saves and loads as torch does.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import paired, results
from tests.object_store import BUCKET, running_store
from tests.ranks import run_on_ranks

_NUM_ROUNDS = int(os.environ.get("ACCELIGHT_BENCH_REPEATS", "5"))
_NUM_RANKS = 2
_SIDE = 2048
_OURS, _TORCHS = "accelight", "torch's Fsspec classes"


def run() -> None:
    """Print medians, ratios, bytes, requests and memory; the target stands beside them."""
    num_layers = max(1, int(float(os.environ.get("ACCELIGHT_BENCH_GB", "0.2")) * 10**9) // (4 * _SIDE * _SIDE))
    rounds: dict[str, list[float]] = {f"{way}, {what}": [] for way in (_TORCHS, _OURS) for what in ("save", "load")}
    counts: dict[str, str] = {}
    with running_store() as store:
        store.latency_s = float(os.environ.get("ACCELIGHT_BENCH_LATENCY_MS", "30")) / 1000
        store.bytes_per_s = float(os.environ.get("ACCELIGHT_BENCH_MB_PER_S", "100")) * 10**6
        for number in range(_NUM_ROUNDS + 1):
            for way in (_TORCHS, _OURS):
                store.requests.clear()
                url = f"s3://{BUCKET}/{'ours' if way == _OURS else 'torchs'}.ckpt"
                found = run_on_ranks(_NUM_RANKS, _save_and_load, way, url, num_layers, timeout_s=600)
                sent = sum(one.num_sent for one in store.requests) / 1e6
                received = sum(one.num_received for one in store.requests) / 1e6
                peaks = " and ".join(f"{max(one['peaks']) / 1e6:.0f}" for one in found)
                counts[way] = (
                    f"{len(store.requests)} requests, {sent:.0f} MB sent, {received:.0f} MB received, {peaks} MB "
                    "of memory beyond the shards"
                )
                if number:  # the first round warms up
                    for what in ("save", "load"):
                        rounds[f"{way}, {what}"].append(max(one[what] for one in found))
    print(f"{num_layers * 4 * _SIDE * _SIDE / 1e6:.0f} MB of weights on {_NUM_RANKS} processes")
    for name in rounds:
        print(f"  {name:32} {paired.median_of(rounds, name).in_ms()}")
    for what in ("save", "load"):
        print(f"  {what}: {paired.ratio(rounds, f'{_OURS}, {what}', f'{_TORCHS}, {what}')} of torch's   target <= 0.5")
    for way, text in counts.items():
        print(f"  {way}: {text}")
    results.keep("object-store", {"processes": _NUM_RANKS, "seconds": rounds, "counts": counts})


def _save_and_load(way: str, url: str, num_layers: int) -> dict[str, Any]:
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(_SIDE, _SIDE, bias=False) for _ in range(num_layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    state = {"state_dict": dict(model.state_dict())}
    seconds: dict[str, Any] = {"peaks": []}
    for what, act in (("save", _save), ("load", _load)):
        dist.barrier()
        with _Peak() as peak:
            began = time.monotonic()
            act(way, url, state)
            dist.barrier()
            seconds[what] = time.monotonic() - began
        seconds["peaks"].append(peak.num_bytes)
    return seconds


def _save(way: str, url: str, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from accelight.checkpoint.manifest import Manifest
    from accelight.strategies.common.checkpoint_files import folder_named
    from accelight.strategies.fsdp.checkpoint.planner import SavePlanCache
    from accelight.strategies.fsdp.checkpoint.writer import save_sharded

    if way == _TORCHS:
        save(state, storage_writer=FsspecWriter(url))
        return
    plans = SavePlanCache()
    plans.number = 1
    save_sharded(folder_named(url), state, b"", Manifest("state_dict"), plans)


def _load(way: str, url: str, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
    from torch.distributed.checkpoint.state_dict_loader import load

    from accelight.checkpoint.storage import ObjectFolder
    from accelight.strategies.fsdp.checkpoint.loader import ObjectReader

    if way == _TORCHS:
        load(state, storage_reader=FsspecReader(url))
    else:
        load(state, storage_reader=ObjectReader(ObjectFolder(url)), no_dist=True)


class _Peak:
    """The most memory of this process in a ``with`` block beyond what it had before, by samples."""

    num_bytes = 0

    def __enter__(self) -> _Peak:  # noqa: PYI034 (Self is newer than Python 3.10)
        self._ends = threading.Event()
        self._start = _resident()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._ends.wait(0.01):
            self.num_bytes = max(self.num_bytes, _resident() - self._start)

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
