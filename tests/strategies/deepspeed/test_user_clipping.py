"""Clipping in the user's own code: what it does takes effect, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import ds_config, trainer_for, whole_weights
from tests.strategies.oracle import Case, Outcome, TinyModule, assert_same, rank_loader, train_plain

LIMIT = 0.05


class ClipsBySelf(TinyModule):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=LIMIT, gradient_clip_algorithm="norm")


class ClipsByTorch(TinyModule):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), LIMIT)


class ClipsValues(TinyModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), LIMIT)


class Scales(TinyModule):
    """By a norm of its own."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), LIMIT, torch.ones(()))


class ClipsAnother(ClipsBySelf):
    """Norms of what DeepSpeed does not train are torch's business."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        other = torch.ones(3, requires_grad=True)
        other.grad = torch.full((3,), 2.0)
        torch.nn.utils.clip_grad_value_([other], 1.0)
        assert torch.nn.utils.clip_grad_norm_([other], 1.0) == pytest.approx(3**0.5)


def fit(kind: type[TinyModule], config: dict[str, Any], precision: str) -> tuple[Outcome, str]:
    case, outcome, message = Case(accumulate=3, epochs=1, precision=precision), Outcome(), ""
    module = kind(case, outcome)
    trainer = trainer_for(case, config)
    try:
        trainer.fit(module, rank_loader(2))
    except RuntimeError as error:
        message = str(error)
    weights: dict[str, Tensor] = whole_weights(module)
    outcome.weights, outcome.global_step = weights, trainer.global_step
    torch.nn.utils.clip_grad_norm_([], 1.0)  # torch's own again
    return outcome, message


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        *((ClipsBySelf, stage) for stage in (0, 2, 3)),
        *((ClipsByTorch, stage) for stage in (0, 1, 2, 3)),
        (ClipsAnother, 2),
    ],
)
def test_clipping_that_takes_effect_trains_as_a_plain_loop(kind: type[TinyModule], stage: int) -> None:
    expected = train_plain(Case(accumulate=3, epochs=1, clip_norm=LIMIT), 2)
    for found, message in run_on_ranks(2, fit, kind, ds_config(stage), "32-true"):
        assert not message
        if kind is ClipsByTorch:  # DeepSpeed's own norm is of what was clipped
            found.grad_norms = expected.grad_norms
        assert_same(found, expected)


@pytest.mark.parametrize("kind", [ClipsValues, Scales])
def test_gradients_are_clipped_as_by_stage_0(kind: type[TinyModule]) -> None:
    expected, _ = run_on_ranks(2, fit, kind, ds_config(0), "32-true")[0]
    for stage in (2, 3):
        for found, message in run_on_ranks(2, fit, kind, ds_config(stage), "32-true"):
            assert not message
            for name, weight in expected.weights.items():
                torch.testing.assert_close(found.weights[name], weight, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("kind", "stage", "precision", "expected"),
    [
        (ClipsByTorch, 0, "bf16-mixed", "clip_grad_norm_ (or get_total_norm) would clip nothing"),
        (ClipsValues, 0, "bf16-mixed", "clip_grad_value_ would change nothing"),
        (Scales, 0, "bf16-mixed", "clip_grads_with_norm_ would change nothing"),
    ],
)
def test_what_would_clip_nothing_is_refused(kind: type[TinyModule], stage: int, precision: str, expected: str) -> None:
    for found, message in run_on_ranks(2, fit, kind, ds_config(stage), precision):
        assert message.startswith(f"torch.nn.utils.{expected}")
        assert found.global_step == 0


def refuse_batch_sizes() -> str:
    case = Case(accumulate=4)
    config = {"train_micro_batch_size_per_gpu": 64, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    trainer = trainer_for(case, {**config, **ds_config(2)}, gradient_clip_val=1.0)
    with pytest.raises(ValueError, match="contradicts other settings") as caught:
        trainer.fit(TinyModule(case, Outcome()), rank_loader(2))
    return str(caught.value)


def test_everything_that_contradicts_the_trainer_is_one_error() -> None:
    for message in run_on_ranks(2, refuse_batch_sizes):
        assert "- gradient_accumulation_steps: 2 in the DeepSpeed config" in message
        assert "- gradient_clipping: 0.5 in the DeepSpeed config" in message
        assert "- train_micro_batch_size_per_gpu: 64 in the DeepSpeed config, 2 by the training data" in message
