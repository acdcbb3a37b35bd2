"""Users' code and orders of events on CUDA: streams, copies and allocators are what the CPU does not have.

Two processes share a GPU over gloo. Patterns are compared with ``ddp`` there, orders with one process on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import share_a_device
from tests.ranks import forget_processes, run_on_ranks
from tests.strategies.orders import Script, check
from tests.strategies.scripts import FOUND, KINDS, for_random_scripts
from tests.strategies.trained_optimizers import OPTIMIZERS, problem
from tests.strategies.trained_patterns import BATCHES_OF_PATTERNS, PARALLEL, problems
from tests.strategies.user_patterns import ENGINES

pytestmark = pytest.mark.gpu

_LERPS_DTENSORS = torch.__version__ >= "2.13"  # compared as versions

NUM_SCRIPTS = int(os.environ.get("ACCELIGHT_ORDERS", "10"))


@pytest.fixture(scope="module", autouse=True)
def _processes_of_their_own() -> Iterator[None]:
    """DeepSpeed chooses between CPU and CUDA once in a process."""
    forget_processes(2)
    yield
    forget_processes(2)


_NOT_ON_CUDA = {"WeightsInWorkers", "ValuesWrittenThroughNumPy"}
"""A forked worker has no CUDA, and NumPy no arrays there: ddp fails, too."""


def _problems(names: list[str], engine: str) -> list[str]:
    left_out = set(_NOT_ON_CUDA)
    if engine.startswith("zero"):  # configure_optimizers() draws weights on the CPU there, and under ddp on CUDA
        left_out.add("XavierWithOptimizer")
    names = [name for name in names if name not in left_out]
    return problems(names, engine, **share_a_device())


@pytest.mark.parametrize("engine", [*ENGINES, *PARALLEL])
@pytest.mark.parametrize("batch", BATCHES_OF_PATTERNS)
def test_users_code_trains_as_under_ddp(batch: str, engine: str) -> None:
    reports = run_on_ranks(2, _problems, BATCHES_OF_PATTERNS[batch], engine, timeout_s=250)
    assert reports == [[], []], "\n".join(line for report in reports for line in report)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "zero2", "zero3"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains_as_the_table_says(name: str, engine: str, tmp_path: Path) -> None:
    if name.startswith("Lion") and engine == "fsdp2" and not _LERPS_DTENSORS:
        pytest.skip("torch before 2.13 has no aten._foreach_lerp of DTensors; the refusal names it")
    if needs := OPTIMIZERS[name].needs:
        pytest.importorskip(needs)
    assert problem(name, engine, tmp_path, on_gpu=True) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_orders_that_once_trained_wrong(kind: str) -> None:
    for script in FOUND.values():
        _check(script, kind)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_random_orders(kind: str) -> None:
    number = int(os.environ.get("ACCELIGHT_ORDERS_SEED", "0"))
    for_random_scripts(kind, lambda script: _check(script, kind), number=number, num_scripts=NUM_SCRIPTS)


def _check(script: Script, kind: str) -> None:
    actions: set[Any] = {event.action for fit in script.fits for event in fit.events}
    if "noise" not in actions:  # CUDA draws other numbers than the CPU
        check(script, kind, on_gpu=True)
