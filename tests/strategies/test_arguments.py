"""A misspelled keyword argument is answered with the one that was meant, and with all there are."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from accelight.callbacks import ExactEvaluation, GradNormMonitor, MergeShardedCheckpoint, TriggerEarlyStopping
from accelight.state import GradientAccumulationPlugin, InitProcessGroupKwargs
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy


class Derived(AccelFSDPStrategy):
    def __init__(self, size: int, **more: Any) -> None:
        super().__init__(**more)
        self.size = size


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (
            AccelFSDPStrategy,
            "fsdp_versoin",
            "AccelFSDPStrategy has no argument 'fsdp_versoin'. Did you mean 'fsdp_version'?",
        ),
        (AccelDeepSpeedStrategy, "stage", "AccelDeepSpeedStrategy has no argument 'stage'. Did you mean 'zero_stage'?"),
        (
            AccelDeepSpeedStrategy,
            "xyz",
            "AccelDeepSpeedStrategy has no argument 'xyz'. It has: deepspeed_plugin, ",
        ),
        (
            GradientAccumulationPlugin,
            "steps",
            "Did you mean 'num_steps'? It has: num_steps, adjust_scheduler, ",
        ),
        (
            InitProcessGroupKwargs,
            "time_out",
            "Kwargs has no argument 'time_out'. Did you mean 'timeout'?",
        ),
        (MergeShardedCheckpoint, "output", "Did you mean 'output_dir'? It has: output_dir, "),
        (TriggerEarlyStopping, "check_every_n_step", "Did you mean 'check_every_n_steps'?"),
        (GradNormMonitor, "xyz", "GradNormMonitor has no argument 'xyz'. It has: "),
        (ExactEvaluation, "xyz", "ExactEvaluation has no argument 'xyz'."),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(kind: Any, wrong: str, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        kind(**{wrong: 2})
    assert message in str(caught.value)


def test_so_is_one_that_comes_through_a_derived_class() -> None:
    with pytest.raises(TypeError, match=r"Strategy has no argument 'fsdp_versoin'. Did you mean 'fsdp_version'"):
        Derived(3, fsdp_versoin=2)
    assert Derived(3, fsdp_version=2).size == 3


def test_signatures_stay() -> None:
    assert list(inspect.signature(AccelFSDPStrategy).parameters)[:2] == ["fsdp_plugin", "fsdp_version"]
    assert GradientAccumulationPlugin(2).num_steps == 2
    with pytest.raises(TypeError, match="positional argument"):
        AccelDeepSpeedStrategy(None, 2)  # type: ignore[arg-type, call-arg]
