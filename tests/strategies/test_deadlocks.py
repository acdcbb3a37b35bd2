"""Ranks that take different ways end within seconds, with an error that names ranks and places."""

from __future__ import annotations

import contextlib
import gc
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accelight.state import deadlocks
from accelight.state.deadlocks import Report, deadlocked, watch_for_deadlocks
from accelight.state.process_group import require_group
from accelight.strategies.deepspeed import AccelDeepSpeedStrategy
from accelight.strategies.fsdp import AccelFSDPStrategy
from accelight.strategies.upstream.lightning import LightningModule, Trainer
from tests.ranks import run_on_ranks
from tests.slowness import slowness

STRATEGIES: dict[str, Callable[[], Any]] = {
    "fsdp1": lambda: AccelFSDPStrategy(fsdp_version=1, auto_wrap_policy={nn.Linear}),
    "fsdp2": lambda: AccelFSDPStrategy(fsdp_version=2, auto_wrap_policy={nn.Linear}),
    "zero2": lambda: AccelDeepSpeedStrategy(zero_stage=2),
    "zero3": lambda: AccelDeepSpeedStrategy(zero_stage=3),
}
ENDS_WITHIN_S = 15.0
"""After the ranks have parted, on a machine that runs other tests meanwhile; alone it is less than 5 s."""


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class _Parts(LightningModule):
    """Does on one rank alone what ``way`` says, at the third batch."""

    def __init__(self, way: str, folder: str) -> None:
        super().__init__()
        self.net, self.out = _Net(), nn.Linear(8, 1)
        self.way, self.folder, self.parted = way, folder, 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.net(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.parted = time.monotonic()
            if self.global_rank == 1 and self.way == "no_model_in_loss":
                return torch.tensor(0.0, requires_grad=True)
            if self.global_rank == 1 and self.way == "layer":
                return self.out(batch[0]).mean()
            if self.global_rank == 0 and self.way == "error":
                raise ValueError("the batch is bad")
            if self.global_rank == 0 and self.way == "layer_0":
                return self.out(batch[0]).mean()
        return self(batch[0]).pow(2).mean()

    def on_train_batch_end(self, outputs: object, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx != 2:
            return
        if self.way == "stop" and self.global_rank == 1:
            self.trainer.should_stop = True
        if self.global_rank != 0:
            return
        if self.way == "forward":
            self(batch[0])
        elif self.way == "norm":
            self.net.first.weight.norm().item()
        elif self.way == "row":
            self.net.first.weight[0].sum().item()
        elif self.way == "full_state_dict":
            self.trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
        elif self.way == "save":
            self.trainer.save_checkpoint(f"{self.folder}/checkpoint")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _fit(way: str, kind: str, folder: str) -> tuple[str, float]:
    module = _Parts(way, folder)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=STRATEGIES[kind](),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    error = ""
    loader = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=2)
    try:
        trainer.fit(module, loader)
    except Exception as caught:  # noqa: BLE001 (whatever it is)
        error = f"{type(caught).__name__}: {caught}"
    return error, time.monotonic() - module.parted


WAYS = {
    "fsdp1": ["forward", "no_model_in_loss", "layer", "layer_0", "stop", "full_state_dict", "save"],
    "fsdp2": ["forward", "no_model_in_loss", "layer", "layer_0", "stop", "norm", "row", "full_state_dict", "save"],
    "zero2": ["stop", "save"],  # each process has all weights
    "zero3": ["forward", "no_model_in_loss", "layer", "layer_0", "stop", "norm", "row", "full_state_dict", "save"],
}
CASES = [f"{kind}-{way}" for kind, ways in WAYS.items() for way in ways]


@pytest.mark.core("fsdp2-forward", "fsdp1-no_model_in_loss", "zero3-layer")
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_part_end_with_both_places(case: str, tmp_path: Path) -> None:
    """The group's timeout is torch's 30 minutes."""
    kind, way = case.split("-")
    for error, seconds in run_on_ranks(2, _fit, way, kind, f"{tmp_path}", timeout_s=40, group_timeout_s=1800):
        if way == "stop" and "different places" in error:  # ZeRO's ranks meet before each batch
            assert "process 0 starts a training batch; process 1 ends its training" in error
            continue
        assert re.search(r"process 0 waits .* at \S*test_deadlocks.py:.*; process 1 waits .* at \S*", error)
        assert seconds < ENDS_WITHIN_S * slowness()


_PAIR = (0, 1)


def _report(*pending: tuple[str, int, str, int, tuple[int, ...]], **issued: int) -> Report:
    return Report("waits", pending, issued)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (_report(("0", 5, "all_gather", 8, _PAIR), **{"0": 5}), _report(**{"0": 4}), True),
        (_report(("0", 5, "gather", 8, _PAIR), **{"0": 5}), _report(("0", 6, "barrier", 0, _PAIR), **{"0": 6}), False),
        (
            _report(("0", 5, "all_gather", 8, _PAIR), **{"0": 5}),
            _report(("0", 5, "all_reduce", 1, _PAIR), **{"0": 5}),
            True,
        ),
        (
            _report(("0", 5, "all_reduce", 8, _PAIR), **{"0": 5}),
            _report(("0", 5, "all_reduce", 1, _PAIR), **{"0": 5}),
            True,
        ),
        (
            _report(("0", 5, "all_reduce", 8, _PAIR), **{"0": 5}),
            _report(("0", 5, "all_reduce", 8, _PAIR), **{"0": 5}),
            False,
        ),
        (_report(), _report(), True),
    ],
    ids=["not_issued", "on_its_way", "different", "different_sizes", "slow", "both_on_the_store"],
)
def test_which_pairs_of_waits_are_a_deadlock(first: Report, second: Report, expected: bool) -> None:
    """A collective that all have issued is on its way, however slowly."""
    assert deadlocked({0: first, 1: second}) is expected
    assert Report.from_json(first.to_json()) == first


def _compute_for_long() -> float:
    """Rank 1 computes, longer than it takes to report a wait."""
    watch_for_deadlocks(require_group("a test"))
    if dist.get_rank() == 1:
        time.sleep(5)
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


def test_a_rank_that_takes_its_time_is_waited_for() -> None:
    assert run_on_ranks(2, _compute_for_long) == [2.0, 2.0]


def _fail_on_rank_zero(kind: str) -> str:
    module = _Parts("error", "")
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=STRATEGIES[kind](),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=2))
    except Exception as caught:  # noqa: BLE001 (whatever it is)
        if dist.get_rank() == 0:  # as the end of its process would
            _shut_down_all()
        return str(caught)
    return ""


def _shut_down_all() -> None:
    time.sleep(0.5)
    for connection in deadlocks._sockets():
        with connection, contextlib.suppress(OSError):
            deadlocks._ends(connection)  # raises for those that listen
            connection.shutdown(socket.SHUT_RDWR)


def test_a_consequence_ends_with_the_failure_that_it_comes_from() -> None:
    first, second = run_on_ranks(2, _fail_on_rank_zero, "fsdp2", timeout_s=40)
    assert first == "the batch is bad"
    assert "Connection closed" in second
    where = "in the forward at step 2 (epoch 0, batch 2)"
    assert second.endswith(f"because process 0 failed {where} with ValueError: the batch is bad")


def _threads_after_a_group() -> list[str]:
    watch_for_deadlocks(require_group("A test"))
    dist.barrier()  # a rank that still connects to this one would find it gone
    dist.destroy_process_group()
    gc.collect()
    return [each.name for each in threading.enumerate() if each.name == "accelight-deadlocks"]


def test_the_watch_ends_with_its_group() -> None:
    """It would free a `FileStore` later, which waits for its file with the GIL held where somebody has removed it."""
    assert run_on_ranks(2, _threads_after_a_group) == [[], []]


_LOOKS_AT_A_THREAD = """
import gc, os, sys, threading, time
from accelight.state.deadlocks import stack_of

class Garbage:
    def __init__(self): self.own = self
    def __del__(self): time.sleep(0)

def look():
    for _ in range(500):
        garbage = [Garbage() for _ in range(3)]
        del garbage
        stack = stack_of(threading.main_thread().ident)
        looks.append(len(stack))
        time.sleep(1e-4)  # else the main thread waits at the lock of its first fork until all looks are over

def descend(depth):
    return 1 + descend(depth - 1) if depth else time.sleep(0) or 0

looks, forked = [], []
gc.set_threshold(5, 2, 2)
sys.setswitchinterval(1e-4)
threads = [threading.Thread(target=look) for _ in range(2)]
for one in threads:
    one.start()
while any(one.is_alive() for one in threads):
    descend(30)
    if len(looks) >= 100 * len(forked):
        forked.append(os.fork())
        if not forked[-1]:
            os._exit(0 if gc.isenabled() else 3)
assert len(looks) == 1000 and max(looks) > 30 and gc.isenabled(), (len(looks), max(looks))
assert not any(os.waitpid(one, 0)[1] for one in forked)
"""


def test_a_collection_of_garbage_lets_no_frame_end_that_is_looked_at() -> None:
    """In Python 3.11, the first look would crash, and two threads that look would switch collections on too early."""
    subprocess.run([sys.executable, "-X", "faulthandler", "-c", _LOOKS_AT_A_THREAD], check=True, timeout=60)
