"""``optimizer``: ``step()`` over FSDP2's shards, against the same step on the local tensors and on DTensors.

One process holds parameters in six models at once and steps each in turn: as plain tensors (torch's default way,
``foreach``, fused), as DTensors (default, ``foreach``), which is what FSDP2 gives optimizers, and as accelight steps::

    python -m benchmarks optimizer                               # about two minutes; on a GPU where there is one
    ACCELIGHT_BENCH_REPEATS=100 python -m benchmarks optimizer   # narrower intervals

Ratios are paired by round, with intervals of 95 % by bootstrap (`paired`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW

from accelight.strategies.optimizers.local_steps import LocalShardStep
from accelight.strategies.upstream.patches import Patches
from benchmarks import paired, results
from benchmarks.turns import in_rounds

_NUM_ROUNDS = int(os.environ.get("ACCELIGHT_BENCH_REPEATS", "30"))
_OURS = "accelight"
_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_SIDES: dict[str, dict[str, bool]] = {
    "local tensors": {},
    "local tensors, foreach": {"foreach": True},
    "local tensors, fused": {"fused": True},
    "DTensors": {},
    "DTensors, foreach": {"foreach": True},
    _OURS: {},
}
_MODELS = {"192 parameters of 256 x 256": (192, 256), "1000 parameters of 64 x 64": (1000, 64)}
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(SGD, lr=1e-3, momentum=0.9),
    "AdamW": partial(AdamW, lr=1e-3),
}


def run() -> None:
    """Print how long steps take, and the ratios to the step on local tensors."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        panels = {}
        for what, (number, size) in _MODELS.items():
            for name, make in _OPTIMIZERS.items():
                seconds = in_rounds({side: _turn(side, make, number, size) for side in _SIDES}, _NUM_ROUNDS)
                _report(f"{name}, {what}", seconds)
                panels[f"{name}.step(), {what}"] = seconds
        results.keep_panels("optimizer", panels)
    finally:
        dist.destroy_process_group()


def _turn(side: str, make: Callable[..., torch.optim.Optimizer], number: int, size: int) -> Callable[[], float]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(size, size, bias=False, device=_DEVICE) for _ in range(number)))
    if not side.startswith("local"):
        fully_shard(model, mesh=init_device_mesh(_DEVICE.type, (1,)))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = make(model.parameters(), **_SIDES[side])
    if side == _OURS:
        LocalShardStep(optimizer).attach(Patches("user code"))
    step: Callable[[], Any] = optimizer.step

    def turn() -> float:
        start = time.perf_counter()
        step()
        if _DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return turn


def _report(what: str, seconds: dict[str, list[float]]) -> None:
    print(what)
    for side in _SIDES:
        to_default = paired.ratio(seconds, side, "local tensors")
        to_fused = paired.ratio(seconds, side, "local tensors, fused")
        print(
            f"  {side:24} {paired.median_of(seconds, side).in_ms():28} to local tensors {to_default}, to fused "
            f"{to_fused}{'   target <= 1.1' if side == _OURS else ''}",
            flush=True,
        )
