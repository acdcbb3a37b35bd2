"""What Accelerate's launcher exports and a Trainer decides by itself: where the two differ, a warning says who wins."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..upstream.lightning import rank_zero_warn

PRECISION = "ACCELERATE_MIXED_PRECISION"
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
CLIPPING = "ACCELERATE_GRADIENT_CLIPPING"
_NOT_ASKED_FOR = {ACCUMULATION: 1, CLIPPING: 0}  # the launcher exports it by default, or it means nothing
_FLAGS = {"fp16": "16-mixed", "bf16": "bf16-mixed"}


def warn_of_other_precision(flag: str, mixed_precision: str, environment: Mapping[str, str] = os.environ) -> None:
    """Warn if the variable asks for another precision than that which is trained in.

    It cannot set it: a Trainer that was given no precision looks like one that was given ``"32-true"``.

    Args:
        flag: The Trainer's precision.
        mixed_precision: What that (or the plugin) means, in Accelerate's words.
        environment: The variables.
    """
    wanted = environment.get(PRECISION, "").lower() or "no"  # the launcher exports "no" where nobody asks for any
    wanted_flag = _FLAGS.get(wanted)
    same_dtype = wanted_flag is not None and flag.split("-")[0] == wanted_flag.split("-")[0]  # "bf16-true", say
    if wanted in ("no", mixed_precision) or same_dtype:
        return
    advice = "Unset the variable" + (f", or give Trainer(precision={wanted_flag!r})." if wanted_flag else ".")
    rank_zero_warn(
        f"{PRECISION}={environment[PRECISION]} has no effect: under a Trainer its own precision decides, which is "
        f"{flag!r} here. {advice}"
    )


def warn_if_overruled(variable: str, number: float, where: str, environment: Mapping[str, str] = os.environ) -> None:
    """Warn if a variable asks for another number than that which is trained with.

    Args:
        variable: `ACCUMULATION` or `CLIPPING`.
        number: Micro-batches for each optimizer step, or the largest norm of gradients.
        where: Who gives it.
        environment: The variables.
    """
    text = environment.get(variable, "").strip()
    try:
        wanted = float(text)
    except ValueError:  # not set, "none", "auto"
        return
    if wanted not in (number, _NOT_ASKED_FOR[variable]):
        rank_zero_warn(
            f"{variable}={text} has no effect: {where} wins. Unset the variable, or give both the same number."
        )
