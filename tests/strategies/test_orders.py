"""Random orders of what users do: every strategy leaves what plain Lightning leaves on one device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.strategies.orders import ACTIONS, HOOKS, OPTIONS, Event, Fit, Script, check

T = TypeVar("T")
Pick = Callable[[Sequence[T]], T]

KINDS = ["fsdp2", "fsdp1", "fsdp1_flat"]
NUM_SCRIPTS = int(os.environ.get("ACCELIGHT_ORDERS", "20"))
"""For each kind; where the variable is set, other ones are drawn each time."""


def pick_fit(pick: Pick, number: int, manual: bool) -> Fit:
    start = pick(["same", "resume", "fresh"]) if number else "same"
    call = pick(["fit", "fit", "fit", "fit", "validate", "predict"])
    if call != "fit":
        return Fit(call=call, start=start)
    batches = pick([2, 3, 4, 5, 6])
    validate_every = pick([None, None, *range(1, batches + 1)])
    hooks = HOOKS if validate_every else tuple(hook for hook in HOOKS if "validation" not in hook)
    events = tuple(Event(pick(hooks), pick([0, 1, 2, 3, 4]), pick(ACTIONS)) for _ in range(pick([0, 1, 2, 3])))
    return Fit(
        start=start,
        accumulate=1 if manual else pick([1, 2, 3]),
        epochs=pick([1, 2]),
        batches=batches,
        clip=None if manual else pick([None, 0.05, 1.0]),
        limit=pick([None, None, batches - 1, batches + 2]),
        skip_at=pick([None, None, None, 1, batches - 1]),
        validate_every=validate_every,
        swap=validate_every is not None and pick([False, True]),
        events=events,
    )


def pick_script(pick: Pick) -> Script:
    """Make a script of choices."""
    manual = pick([None, None, None, None, None, "zbs", "bsz", "bzs", "tzbs", "tbsz"])
    num_fits = pick([1, 2, 2, 3])
    return Script(
        fits=tuple(pick_fit(pick, number, manual is not None) for number in range(num_fits)),
        optimizer=pick(["sgd", "decay", "adamw"]),
        over=pick(["all", "all", "groups", "part"]),
        schedule=pick([None, "step", "epoch"]),
        manual=manual,
        every=pick([1, 2]) if manual in ("zbs", "bsz", "tzbs", "tbsz") else 1,
        unused=pick([None, None, "batch", "rank", "never"]),
        iterable=pick([False, True]),
        sharded=pick([False, True]),
        option=pick([None, None, None, *OPTIONS]),
    )


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    return pick_script(lambda options: draw(st.sampled_from(options)))


@pytest.mark.parametrize("kind", KINDS)
def test_random_orders(kind: str) -> None:
    @settings(
        max_examples=NUM_SCRIPTS,
        deadline=None,
        database=None,
        derandomize="ACCELIGHT_ORDERS" not in os.environ,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(scripts())
    def run(script: Script) -> None:
        check(script, kind)

    run()
