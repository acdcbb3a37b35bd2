"""DeepSpeed's bucket of gradients has the size of the model, unless the config says otherwise."""

from __future__ import annotations

import pytest
import torch

from accelight.strategies import AccelDeepSpeedStrategy
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import whole_weights
from tests.strategies.oracle import Case, Outcome, TinyModule, assert_same, quiet_trainer, rank_loader, train_plain


def fit_twice(stage: int) -> tuple[list[int], Outcome]:
    """The second fit finds parameters that ZeRO-3 has partitioned."""
    sizes, outcome, case = [], Outcome(), Case(epochs=1)
    module = TinyModule(case, outcome)
    for _ in range(2):
        strategy = AccelDeepSpeedStrategy(zero_stage=stage)
        trainer = quiet_trainer(strategy, 2, max_epochs=1, deterministic=True)
        trainer.fit(module, rank_loader(2))
        sizes.append(strategy.deepspeed_engine.optimizer.reduce_bucket_size)
        outcome.weights, outcome.global_step = whole_weights(module), trainer.global_step
        if len(sizes) == 1:
            first = Outcome(outcome.losses[:], [], outcome.weights, outcome.global_step)
    torch.use_deterministic_algorithms(False)  # Lightning leaves it on
    return sizes, first


@pytest.mark.core("2")
@pytest.mark.parametrize("stage", [2, 3])
def test_buckets_hold_the_model_and_no_more(stage: int) -> None:
    expected = train_plain(Case(epochs=1), 2)
    num_elements = sum(tensor.numel() for tensor in expected.weights.values())
    for sizes, outcome in run_on_ranks(2, fit_twice, stage, timeout_s=120):
        assert sizes == [num_elements] * 2
        assert_same(outcome, expected)
