"""Orders of events: those that random ones, or outsiders, have found wrong, and how random ones are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.strategies.orders import ACTIONS, HOOKS, OPTIONS, Event, Fit, Script

Pick = Callable[[Sequence[Any]], Any]

FSDP = ["fsdp2", "fsdp1", "fsdp1_flat"]
KINDS = [*FSDP, "fsdp2_tp", "fsdp2_sp", "fsdp2_cp", "zero1", "zero2", "zero3"]

MIDDLE = Script(
    (
        Fit(accumulate=2, batches=5, epochs=2, events=(Event("on_after_backward", 2, "save"),)),
        Fit(start="fresh", back=2, accumulate=2),
    ),
    optimizer="adamw",
    schedule="step",
    sharded=True,
    option="background",
)

FOUND: dict[str, Script] = {
    "a save before backward, recomputed": Script(  # on CUDA, where a full save shows weights on the CPU
        (Fit(events=(Event("on_before_backward", 0, "save"),)), Fit(call="validate")),
        manual="tbsz",
        option="recompute",
    ),
    "a save before the backward of a second fit": Script(
        (
            Fit(batches=2, events=(Event("on_train_start", 0, "save"), Event("on_train_start", 0, "save"))),
            Fit(start="fresh", batches=2, events=(Event("on_before_backward", 0, "save"),)),
        )
    ),
    "a batch that is fetched ahead, before a resume": Script(
        (Fit(batches=2), Fit(start="fresh", batches=5)), scaled_targets=True, iterable=True
    ),
    "a save before the first step": Script(
        (
            Fit(
                accumulate=3,
                batches=5,
                events=(Event("on_train_start", 0, "save"), Event("on_after_backward", 1, "save")),
            ),
        ),
        optimizer="adamw",
    ),
    "sampling at every moment": Script(
        (
            Fit(
                accumulate=3,
                batches=6,
                events=(
                    Event("on_train_start", 0, "sample"),
                    Event("on_after_backward", 1, "sample"),
                    Event("on_before_backward", 2, "sample"),
                    Event("on_before_optimizer_step", 0, "part"),
                    Event("on_train_batch_end", 3, "draft"),
                ),
            ),
        )
    ),
    "weights changed and read in a window": Script(
        (
            Fit(
                accumulate=2,
                batches=6,
                events=(
                    Event("on_before_backward", 1, "read"),
                    Event("on_after_backward", 0, "clamp"),
                    Event("on_train_batch_end", 1, "clamp"),
                    Event("on_train_batch_end", 3, "read"),
                ),
            ),
        )
    ),
    "weights swapped for validation in a window": Script((Fit(accumulate=3, batches=6, validate_every=2, swap=True),)),
    "a stop in a window, then another fit": Script(
        (Fit(accumulate=3, batches=6, events=(Event("on_train_batch_end", 3, "stop"),)), Fit(accumulate=3)),
    ),
    "an exception in a window, then another fit": Script(
        (Fit(accumulate=3, batches=6, events=(Event("on_before_backward", 4, "raise"),)), Fit(accumulate=3)),
    ),
    "a window that Lightning drops": Script((Fit(accumulate=3, batches=6, epochs=2, skip_at=4),), optimizer="decay"),
    "data shorter than the limit": Script((Fit(accumulate=3, batches=5, epochs=2, limit=8),), iterable=True),
    "a short window": Script((Fit(accumulate=3, batches=5, epochs=2),), schedule="step"),
    "the same module and a fresh one resume": Script(
        (Fit(accumulate=2, epochs=2), Fit(start="resume"), Fit(start="fresh", batches=3)), optimizer="adamw"
    ),
    "they resume from folders": Script(
        (Fit(accumulate=2, epochs=2), Fit(start="resume"), Fit(start="fresh", batches=3)),
        optimizer="adamw",
        sharded=True,
    ),
    "a full checkpoint into layers that are recomputed": Script(
        (Fit(batches=2), Fit(start="fresh")), option="recompute"
    ),
    "groups by name": Script((Fit(accumulate=2, clip=0.1), Fit(start="fresh")), over="groups", optimizer="decay"),
    "an optimizer over a part": Script((Fit(accumulate=2), Fit(start="fresh")), over="part", optimizer="decay"),
    "a layer that a dropped window used": Script(
        (Fit(accumulate=2, batches=7, epochs=2, skip_at=3),), optimizer="decay", unused="late"
    ),
    "parameters that nobody uses": Script((Fit(accumulate=2), Fit(start="resume")), unused="never", optimizer="decay"),
    "parameters that some batches use": Script((Fit(epochs=2),), unused="batch", optimizer="decay"),
    "parameters that some ranks use": Script((Fit(accumulate=2, epochs=2),), unused="rank", optimizer="decay"),
    "a unit that some batches use": Script((Fit(accumulate=3, epochs=2),), unused="unit", optimizer="decay"),
    "a unit that some ranks use": Script((Fit(epochs=2),), unused="unit_rank"),
    "a unit that some ranks use, with the option": Script((Fit(epochs=2),), unused="unit_rank", option="find_unused"),
    "an evaluation in which ranks use different units": Script((Fit(call="validate"), Fit()), unused="unit_rank"),
    "two optimizers in the documented order": Script((Fit(epochs=2),), manual="tzbs", optimizer="decay"),
    "two optimizers every other batch": Script((Fit(batches=1), Fit()), over="part", manual="tbsz", every=2),
    "a late penalty on weights that stay gathered until the hooks before the backward": Script(
        (Fit(epochs=2, batches=2),), penalty=True, option="kept"
    ),
    "a penalty counts as each item does": Script((Fit(epochs=2, batches=2),), penalty=True, items=True),
    "kept gathered, and hooks that change weights": Script(
        (Fit(accumulate=3, batches=6, events=(Event("on_train_batch_end", 1, "clamp"),)),), option="kept"
    ),
    "layers frozen between forward and backward": Script(
        (Fit(batches=3, events=(Event("on_before_zero_grad", 1, "freeze"),)), Fit(call="predict", start="fresh"))
    ),
    "a resume with layers frozen since": Script(
        (Fit(batches=3, events=(Event("on_train_end", 0, "freeze"),)), Fit(start="resume"))
    ),
    "a unit frozen in a window": Script(
        (Fit(accumulate=3, batches=3, events=(Event("on_after_backward", 1, "freeze"),)),)
    ),
    "a unit frozen between two micro-batches": Script(
        (Fit(accumulate=2, batches=2, events=(Event("on_train_batch_start", 1, "freeze"),)),)
    ),
    "a fresh module resumes what trained with frozen layers": Script(
        (Fit(batches=2, events=(Event("on_train_start", 0, "freeze"),)), Fit(batches=2), Fit(start="fresh", batches=2))
    ),
    "weights changed after the last step, and resumed": Script(
        (Fit(batches=2, events=(Event("on_train_batch_end", 1, "clamp"),)), Fit(start="resume", batches=2))
    ),
    "the gradient of a frozen layer's input": Script(
        (Fit(batches=2, events=(Event("on_train_start", 0, "freeze"), Event("on_train_epoch_start", 0, "adversary"))),)
    ),
    "the gradient of a toggled layer's input": Script(
        (Fit(batches=2, events=(Event("on_after_backward", 1, "adversary"),)),), manual="tzbs"
    ),
    "the gradient of an input between backward and step": Script(
        (Fit(batches=2, events=(Event("on_after_backward", 0, "adversary"),)),), manual="zbs"
    ),
    "a fresh module from a checkpoint of the middle of a window": MIDDLE,
    "the same with another process that writes": replace(MIDDLE, option="process"),
    "weights clamped between a forward and what is recomputed of it": Script(
        (Fit(batches=2, events=(Event("on_before_zero_grad", 0, "clamp"),)),), option="recompute"
    ),
    "a layer frozen between its forward and what is recomputed of it": Script(
        (Fit(batches=2, events=(Event("on_before_zero_grad", 0, "freeze"),)),), option="recompute"
    ),
    "weights assigned between a forward and its backward": Script(
        (Fit(batches=2, events=(Event("on_before_backward", 0, "assign"),)),), manual="zbs"
    ),
    "weights divided by their norms, through p.data": Script(
        (Fit(batches=2, events=(Event("on_train_start", 0, "norms"),)),)
    ),
    "averages in validation, saved there, and resumed": Script(
        (
            Fit(accumulate=2, batches=6, validate_every=3, events=(Event("on_validation_batch_end", 0, "save"),)),
            Fit(start="fresh", accumulate=2, batches=6, epochs=2, validate_every=2),
        ),
        average=1,
    ),
    "averages of layers that begin to train, and an exception in validation": Script(
        (
            Fit(
                batches=6,
                validate_every=2,
                events=(
                    Event("on_train_start", 0, "freeze"),
                    Event("on_train_batch_start", 3, "thaw"),
                    Event("on_validation_batch_end", 3, "raise"),
                ),
            ),
            Fit(batches=3, validate_every=1),
        ),
        average=2,
    ),
    "gradients that manual optimization has cleared": Script(
        (Fit(batches=2, events=(Event("on_before_backward", 1, "gradients"),)),), manual="tbsz"
    ),
    "a layer frozen between two reductions of one window": Script(
        (
            Fit(
                accumulate=3,
                batches=6,
                validate_every=2,
                events=(Event("on_after_backward", 1, "freeze"), Event("on_train_batch_end", 3, "thaw")),
            ),
            Fit(batches=2),
        ),
        option="each_batch",
    ),
    "trained after a validation, and saved by all ranks": Script(
        (Fit(call="validate"), Fit(batches=2)), manual="zbs", sharded=True
    ),
    "rows edited before manual optimization": Script(
        (Fit(batches=2, events=(Event("on_train_start", 0, "rows"),)),), manual="zbs"
    ),
}
"""What random orders, or outsiders, have found wrong."""


def pick_fit(pick: Pick, number: int, manual: bool) -> Fit:
    start = pick(["same", "resume", "fresh"]) if number else "same"
    back = pick([1, 1, 2, 3]) if start != "same" else 1
    call = pick(["fit", "fit", "fit", "fit", "validate", "predict"])
    if call != "fit":
        return Fit(call=call, start=start, back=back)
    batches = pick([2, 3, 4, 5, 6])
    validate_every = pick([None, None, *range(1, batches + 1)])
    hooks = HOOKS if validate_every else tuple(hook for hook in HOOKS if "validation" not in hook)
    events = tuple(Event(pick(hooks), pick([0, 1, 2, 3, 4]), pick(ACTIONS)) for _ in range(pick([0, 1, 2, 3])))
    return Fit(
        start=start,
        back=back,
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


def pick_script(pick: Pick, kind: str) -> Script:
    """Make a script of choices; DeepSpeed has one optimizer."""
    is_fsdp = kind.startswith("fsdp")
    manual = pick([None, None, None, None, None, "zbs", "bsz", "bzs", "tzbs", "tbsz"]) if is_fsdp else None
    fits = tuple(pick_fit(pick, number, manual is not None) for number in range(pick([1, 2, 2, 3])))
    # By items, gradients have their scale from `on_before_optimizer_step` on; what they have before is the engine's.
    scaled = all((one.hook, one.action) != ("on_after_backward", "gradients") for fit in fits for one in fit.events)
    script = Script(
        fits=fits,
        optimizer=pick(["sgd", "decay", "adamw", *(["ratio"] if kind in ("fsdp1", "fsdp2") else [])]),
        over=pick(["all", "all", "groups", "part"]),
        schedule=pick([None, "step", "epoch"]),
        manual=manual,
        every=pick([1, 2]) if manual in ("zbs", "bsz", "tzbs", "tbsz") else 1,
        unused=pick([None, None, None, "batch", "late", "rank", "never", "unit", "unit_rank"]),
        iterable=pick([False, True]),
        scaled_targets=kind != "fsdp1_flat" and pick([False, False, True]),
        penalty=manual is None and kind != "fsdp1_flat" and pick([False, False, True]),
        sharded=pick([False, True]),
        option=pick([None, None, None, *OPTIONS] if is_fsdp else [None, "background"]),
        average=pick([None, None, 1, 2]),
        items=manual is None and scaled and pick([False, False, True]),
    )
    return replace(script, remote=script.option != "process" and pick([False, False, True]))


@st.composite
def scripts(draw: st.DrawFn, kind: str) -> Script:
    return pick_script(lambda options: draw(st.sampled_from(options)), kind)


def for_random_scripts(kind: str, check: Callable[[Script], None], *, number: int, num_scripts: int) -> None:
    """Check random scripts for a kind of strategy, the same ones for a number each time."""

    @seed(number)
    @settings(
        max_examples=num_scripts,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(scripts(kind))
    def run(script: Script) -> None:
        check(script)

    run()
