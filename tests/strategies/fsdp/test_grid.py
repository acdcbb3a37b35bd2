"""The oracle grid: engine x accumulation x clipping x kind of model x precision, each trains as a plain loop.

Each test is one run on the processes with six cells in it (accumulation x clipping); what ran is printed as a table at
the end of pytest's output. Per step, losses and gradient norms are compared, and in the end the weights.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.strategies.fsdp.grid import (
    KINDS,
    Cell,
    Kind,
    Trace,
    assert_same,
    train_cell,
    train_plain,
)

Setting = tuple[str, str, str]
"""Engine, kind of model, precision."""


@functools.cache
def cells_for(kind: str, world_size: int) -> list[Cell]:
    """Accumulation x clipping, which bites at some of the steps: one that always does would hide a wrong scale."""
    cells = []
    for accumulate in (1, 3):
        unclipped = Cell(accumulate, "none")
        median = statistics.median(train_plain(KINDS[kind], "32-true", unclipped, world_size).norms)
        cells += [unclipped, Cell(accumulate, "norm", median), Cell(accumulate, "value", median / 20)]
    return cells


# ------------------------------------------------------------------ under the Trainer


def train_cells(
    engine: str, kind: Kind, precision: Any, cells: Sequence[Cell], accelerator: str = "cpu"
) -> list[Trace]:
    return [train_cell(engine, kind, precision, cell, accelerator) for cell in cells]


# ------------------------------------------------------------------ the oracle


def _check(world_size: int, setting: Setting, tolerance: dict[str, Any], accelerator: str = "cpu") -> None:
    engine, kind, precision = setting
    cells = cells_for(kind, world_size)
    on_cpu = accelerator == "cpu"
    more: dict[str, Any] = {} if on_cpu else {"init_group": False, "timeout_s": 240}
    traces = run_on_ranks(world_size, train_cells, engine, KINDS[kind], precision, cells, accelerator, **more)[0]
    oracle = (KINDS[kind], precision, cells, world_size)  # CUDA is not used in this process: others are forked from it
    plain = _plain_cells(*oracle, "cpu") if on_cpu else run_on_ranks(1, _plain_cells, *oracle, "cuda")[0]
    for cell, found, expected in zip(cells, traces, plain, strict=True):
        if cell.clipping == "norm":
            assert min(expected.norms) < cast("float", cell.limit) < max(expected.norms)
        assert_same(found, expected, tolerance)


def _plain_cells(kind: Kind, precision: str, cells: Sequence[Cell], world_size: int, device: str) -> list[Trace]:
    return [train_plain(kind, precision, cell, world_size, device) for cell in cells]


# Sums in another order differ by some 1e-7 of the largest summand, hence ``atol``; steps that are not clipped carry it
# on, to 1.7e-6 on one kind of processor. In bf16 the oracle makes the very same casts, so that each rounding is the
# same one and only the fp32 parts differ.
_CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 4e-6}
# Of gradients of embeddings a GPU adds up in any order, in half precision before rounding; training carries it on.
_CLOSE_ON_GPU: dict[str, Any] = {"32-true": {"rtol": 1e-4, "atol": 1e-5}, "bf16-mixed": {"rtol": 2**-5, "atol": 2**-7}}
PRECISIONS = ("32-true", "bf16-mixed")
SETTINGS: list[Setting] = list(itertools.product(("fsdp1", "fsdp2"), KINDS, PRECISIONS))
# Flat parameters change what optimizers hold, nothing else: where ties, freezing and ignoring meet is enough.
SETTINGS += itertools.product(("fsdp1_flat",), ("plain", "together"), PRECISIONS)
SOME: list[Setting] = list(itertools.product(("fsdp1", "fsdp2"), ("plain", "together"), ("32-true",)))


def _name(value: Setting | int) -> str:
    return f"{value}_processes" if isinstance(value, int) else "-".join(value)


@pytest.mark.core(
    "2_processes-fsdp2-plain-32",
    "2_processes-fsdp1-together-32",
    "2_processes-fsdp2-together",
    "fsdp1_flat-together-32",
)
@pytest.mark.parametrize(
    ("world_size", "setting"), [*((2, setting) for setting in SETTINGS), *((3, setting) for setting in SOME)], ids=_name
)
def test_processes_train_as_one(
    world_size: int, setting: Setting, record_property: Callable[[str, object], None]
) -> None:
    """Also where an epoch's last window is short, which is divided by the full number, as Lightning does."""
    record_property("grid", (world_size, "cpu", *setting))
    _check(world_size, setting, _CLOSE)


@pytest.mark.gpu
@pytest.mark.parametrize("setting", SETTINGS, ids=_name)
def test_gpus_train_as_one_cpu_process(setting: Setting, record_property: Callable[[str, object], None]) -> None:
    record_property("grid", (torch.cuda.device_count(), "gpu", *setting))
    _check(torch.cuda.device_count(), setting, _CLOSE_ON_GPU[setting[2]], "gpu")
