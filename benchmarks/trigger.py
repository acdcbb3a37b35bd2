"""``trigger``: what checking a trigger adds to each step, against Accelerate's blocking ``check_trigger``.

Two gloo processes run the same loop without a check, with ours (``blocking=False``) at each step and at every eighth,
and with Accelerate's, in turn: around an empty step, a step that computes for 2.7 ms, and a training step of a tiny
model that FSDP2 shards, whose time varies by less than a check adds::

    python -m benchmarks trigger                               # seven minutes on two idle cores
    ACCELIGHT_BENCH_REPEATS=1000 python -m benchmarks trigger  # narrower intervals

What a check adds is the difference to the run without one in the same round, with intervals of 95 % by bootstrap
(`paired`). Turns are short, eight steps, and many: within a long one the machine changes by more than a check adds. The
collectives of a check, for which a process waits for the others, are counted.
Should it hang, it shows the stacks of both processes and fails. The processes need a core each: with fewer, waiting for
each other is all that is measured.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks import paired, results
from benchmarks.turns import in_rounds

_NUM_ROUNDS = int(os.environ.get("ACCELIGHT_BENCH_REPEATS", "300"))
_NUM_PROCESSES = 2
_NUM_STEPS = 8
_HANGS_AFTER_S = 600.0
_NONE, _EACH, _EIGHTH, _BLOCKING = "no check", "accelight", "accelight, every 8 steps", "accelight, blocking"
_ACCELERATE = "accelerate"
_TARGETS = {_EACH: "<= 0.33", _EIGHTH: "<= 0.10"}


def run() -> None:
    """Print what each way of checking adds to a step, and the ratio to what Accelerate's adds."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={_NUM_PROCESSES}", "--standalone"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    subprocess.run([*torchrun, "-m", "benchmarks.trigger"], check=True, env=env)


def measure() -> None:
    """Measure inside one of the processes."""
    from accelerate import Accelerator

    from accelight.state import PartialState, check_trigger

    state = PartialState(cpu=True)
    accelerator = Accelerator(cpu=True)
    checks: dict[str, Callable[[int], object]] = {
        _NONE: lambda step: None,
        _EACH: lambda step: check_trigger(blocking=False),
        _EIGHTH: lambda step: check_trigger(blocking=False) if step % 8 == 7 else None,
        _BLOCKING: lambda step: check_trigger(),
        _ACCELERATE: lambda step: accelerator.check_trigger(),
    }
    faulthandler.dump_traceback_later(_HANGS_AFTER_S, exit=True)
    calls = {name: _collectives_a_step(check) for name, check in checks.items()}
    measured = {}
    for name, work in {"empty step": lambda: None, "2.7 ms step": _compute, "FSDP2 step": _fsdp2_step()}.items():
        turns = {check: partial(_time, work, function) for check, function in checks.items()}
        num_rounds = _NUM_ROUNDS * 5 if name == "FSDP2 step" else _NUM_ROUNDS  # waits for gloo vary
        measured[name] = seconds = in_rounds(turns, num_rounds)
        if state.is_main_process:
            _report(name, seconds, calls)
    if state.is_main_process:
        results.keep(
            "trigger",
            {"processes": _NUM_PROCESSES, "seconds_per_step": measured, "collectives_per_step": calls},
        )
    faulthandler.cancel_dump_traceback_later()


def _collectives_a_step(check: Callable[[int], object]) -> float:
    from benchmarks.sharded_training import Collectives

    with Collectives() as collectives:
        for step in range(_NUM_STEPS):
            check(step)
    return sum(collectives.calls.values()) / _NUM_STEPS


def _time(work: Callable[[], object], check: Callable[[int], object]) -> float:
    """Return seconds for each step, of the slower process."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    for step in range(_NUM_STEPS):
        work()
        check(step)
    dist.barrier()
    return (time.perf_counter() - start) / _NUM_STEPS


def _compute() -> None:
    end = time.perf_counter() + 0.0027
    while time.perf_counter() < end:
        pass


def _fsdp2_step() -> Callable[[], object]:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (_NUM_PROCESSES,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(16, 64)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _report(name: str, seconds: Mapping[str, Sequence[float]], calls: Mapping[str, float]) -> None:
    print(f"{name}: {paired.median_of(seconds, _NONE).in_ms()} without a check")
    for check in (_EACH, _EIGHTH, _BLOCKING, _ACCELERATE):
        ratio = paired.ratio_of_added(seconds, check, _ACCELERATE, _NONE)
        print(
            f"  {check:26} adds {paired.difference(seconds, check, _NONE).in_ms()}   ratio to accelerate "
            f"{ratio or 'unknown: more rounds would tell'}   {calls[check]:.2f} collectives"
            f"   {'target ' + _TARGETS[check] if check in _TARGETS else ''}".rstrip(),
            flush=True,
        )


if __name__ == "__main__":
    measure()
