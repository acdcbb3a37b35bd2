"""What training held is free when nobody has its Trainer and its module any more."""

from __future__ import annotations

import gc

import pytest
from lightning.pytorch import Trainer
from torch import nn

from tests.ranks import run_on_ranks
from tests.strategies.orders import Event, Fit, Script, play_on_rank

SCRIPTS = {
    "plain": Script((Fit(),)),
    "stopped_in_a_window": Script((Fit(accumulate=3, batches=6, events=(Event("on_train_batch_end", 3, "stop"),)),)),
    "an_exception": Script((Fit(accumulate=3, batches=6, events=(Event("on_before_backward", 4, "raise"),)),)),
    "sampled_and_recomputed": Script((Fit(events=(Event("on_train_end", 0, "sample"),)),), option="recompute"),
    "two_optimizers": Script((Fit(),), manual="tzbs"),
    "evaluated_and_resumed": Script((Fit(call="validate"), Fit(), Fit(start="fresh")), sharded=True),
}


def _play(script: Script, kind: str, folder: str) -> list[str]:
    """Return the names of the classes of what is left."""
    before = {id(each) for each in _alive()}
    play_on_rank(script, kind, folder)
    return [type(each).__name__ for each in _alive() if id(each) not in before]


def _alive() -> list[object]:
    for _ in range(3):  # what a freed tensor held in C++ is seen by the next one
        gc.collect()
    return [each for each in gc.get_objects() if type(each) is Trainer or issubclass(type(each), nn.Module)]


KINDS = "fsdp2", "fsdp1", "fsdp1_flat", "zero1", "zero2", "zero3"
_CORE = "plain-fsdp", "plain-zero2", "an_exception-fsdp", "an_exception-zero3", "two_optimizers-fsdp1_flat"


@pytest.mark.core(*_CORE, "sampled_and_recomputed-fsdp1]")
@pytest.mark.parametrize(
    ("script", "kind"),
    [
        pytest.param(script, kind, id=f"{name}-{kind}")
        for name, script in SCRIPTS.items()
        for kind in KINDS
        if not (kind.startswith("zero") and (script.manual or script.option))  # one optimizer, and no such option
    ],
)
def test_a_trained_model_is_freed(script: Script, kind: str, tmp_path: object) -> None:
    assert run_on_ranks(2, _play, script, kind, f"{tmp_path}") == [[], []]
