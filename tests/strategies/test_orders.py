"""Random orders of what users do: every strategy leaves what plain Lightning leaves on one device."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.strategies.orders import ACTIONS, HOOKS, Event, Fit, Script, check

KINDS = ["fsdp2", "fsdp1", "fsdp1_flat"]
NUM_SCRIPTS = int(os.environ.get("ACCELIGHT_ORDERS", "20"))
"""For each kind; ``make test-orders`` draws 1,000, and other ones each time."""


@st.composite
def fits(draw: st.DrawFn, number: int, manual: bool) -> Fit:
    batches = draw(st.integers(2, 6))
    validate_every = draw(st.none() | st.integers(1, batches))
    hooks = HOOKS if validate_every else tuple(hook for hook in HOOKS if "validation" not in hook)
    events = st.builds(Event, st.sampled_from(hooks), st.integers(0, 4), st.sampled_from(ACTIONS))
    return Fit(
        start=draw(st.sampled_from(["same", "resume", "fresh"])) if number else "same",
        accumulate=1 if manual else draw(st.integers(1, 3)),
        epochs=draw(st.integers(1, 2)),
        batches=batches,
        clip=None if manual else draw(st.sampled_from([None, 0.05, 1.0])),
        limit=draw(st.sampled_from([None, None, batches - 1, batches + 2])),
        skip_at=draw(st.none() | st.integers(1, batches)),
        validate_every=validate_every,
        swap=validate_every is not None and draw(st.booleans()),
        events=tuple(draw(st.lists(events, max_size=3))),
    )


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    manual = draw(st.sampled_from([None, None, None, "zbs", "bsz", "bzs", "tzbs", "tbsz"]))
    every = draw(st.integers(1, 2)) if manual in ("zbs", "bsz", "tzbs", "tbsz") else 1
    return Script(
        fits=tuple(draw(fits(number, manual is not None)) for number in range(draw(st.integers(1, 3)))),
        optimizer=draw(st.sampled_from(["sgd", "decay", "adamw"])),
        over=draw(st.sampled_from(["all", "groups", "part"])),
        schedule=draw(st.sampled_from([None, "step", "epoch"])),
        manual=manual,
        every=every,
        unused=draw(st.sampled_from([None, "batch", "rank", "never"])),
        iterable=draw(st.booleans()),
        sharded=draw(st.booleans()),
    )


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
