"""Random orders of what users do: every strategy leaves what plain Lightning leaves on one device."""

from __future__ import annotations

import math
import os

import pytest

from tests.strategies.orders import check
from tests.strategies.scripts import FOUND, KINDS, for_random_scripts

IN_ONE_TEST = 5
NUM_SCRIPTS = int(os.environ.get("ACCELIGHT_ORDERS", "5"))
"""For each kind; beyond the first test they are `exhaustive`."""
SEED = int(os.environ.get("ACCELIGHT_ORDERS_SEED", "0"))
"""Of the first test; each further one has the next number."""
NUMBERS = [
    pytest.param(number, marks=[pytest.mark.exhaustive] if number > SEED else [])
    for number in range(SEED, SEED + math.ceil(NUM_SCRIPTS / IN_ONE_TEST))
]


@pytest.mark.core("-fsdp2", "input-fsdp1]", "and resumed-zero3")
@pytest.mark.parametrize(
    "kind",
    [
        *("fsdp2", "fsdp1", "zero3"),
        *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("fsdp2_tp", "fsdp2_sp", "fsdp2_cp")),
        *(pytest.param(kind, marks=pytest.mark.machines) for kind in ("fsdp1_flat", "zero1", "zero2")),
    ],
)
@pytest.mark.parametrize("name", FOUND)
def test_orders_that_once_trained_wrong(name: str, kind: str) -> None:
    check(FOUND[name], kind)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.exhaustive)
        if kind in ("fsdp2_tp", "fsdp2_cp", "fsdp1_flat", "zero1")
        else kind
        for kind in KINDS
    ],
)
@pytest.mark.parametrize("number", NUMBERS)
def test_random_orders(number: int, kind: str) -> None:
    for_random_scripts(kind, lambda script: check(script, kind), number=number, num_scripts=IN_ONE_TEST)
