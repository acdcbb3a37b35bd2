"""What the oracle grid (``test_fsdp_grid.py``) leaves out: other optimizers, one process."""

from __future__ import annotations

import math

import pytest

from tests.ranks import run_on_ranks
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.oracle import Case, assert_same, train_plain, train_sharded


@pytest.mark.parametrize("engine", ENGINES)
def test_one_process_trains_as_a_plain_loop(engine: str) -> None:
    case = Case(accumulate=3, clip_norm=0.5)
    assert_same(run_on_ranks(1, train_sharded, case, ENGINES[engine])[0], train_plain(case, 1))


@pytest.mark.core("fsdp2-2", "fsdp1-3")
@pytest.mark.parametrize("epochs", [2, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_windows_go_on_over_the_end_of_an_epoch(engine: str, epochs: int) -> None:
    """Seven micro-batches an epoch, three a window: two epochs leave two over, three fill the seventh window."""
    case = Case(accumulate=3, clip_norm=0.5, epochs=epochs, sync_with_dataloader=False, validate_every=5)
    options = {**ENGINES[engine], "reshard_during_accumulation": epochs == 2}
    assert_same(run_on_ranks(2, train_sharded, case, options)[0], train_plain(case, 2))


@pytest.mark.parametrize("engine", ENGINES)
def test_adamw(engine: str) -> None:
    case = Case(accumulate=2, clip_norm=0.5, optimizer="adamw")
    assert_same(run_on_ranks(2, train_sharded, case, ENGINES[engine])[0], train_plain(case, 2))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fused_optimizer_under_fp16_steps_as_another(engine: str) -> None:
    """Its own unscaling would come after clipping, and would look for overflows in one rank's shards alone."""
    fused, plain = (
        run_on_ranks(2, train_sharded, Case(2, clip_norm=0.5, optimizer=name, precision="16-mixed"), ENGINES[engine])
        for name in ("fused_adamw", "adamw")
    )
    assert any(math.isinf(norm) for norm in plain[0].grad_norms), "no step overflowed: the case shows too little"
    assert fused[0].grad_norms == pytest.approx(plain[0].grad_norms, rel=1e-5)
    assert fused[0].losses == pytest.approx(plain[0].losses, rel=1e-5)
