"""A full disk with ZeRO: no rank waits for one that could not write, and the next save finds room."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelight.checkpoint import merge_fsdp_weights
from accelight.strategies import AccelDeepSpeedStrategy
from tests.ranks import run_on_ranks
from tests.small_disk import small_disk
from tests.strategies.deepspeed.training import ds_config
from tests.strategies.full_disk import SavesOnAFullDisk
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader


def _train(stage: int, in_background: bool, folder: Path) -> tuple[str, list[str]]:
    case, callback = Case(optimizer="adamw"), SavesOnAFullDisk(folder)
    config = ds_config(stage, stage3_gather_16bit_weights_on_model_save=stage == 3)
    strategy = AccelDeepSpeedStrategy(hf_ds_config=config, async_save=in_background)
    trainer = quiet_trainer(strategy, 2, max_epochs=1, max_steps=2, callbacks=[callback])
    trainer.fit(TinyModule(case, Outcome()), rank_loader(2))
    return callback.message, callback.left


@pytest.mark.core("now-2", "later-3")
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("in_background", [False, True], ids=["now", "later"])
def test_a_save_that_fails_leaves_nothing(in_background: bool, stage: int, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1_000_000) as disk:
        outcomes = run_on_ranks(2, _train, stage, in_background, disk)
        assert outcomes[0] == outcomes[1]
        message, left = outcomes[0]
        assert left == ["filler", "first"]
        before = f"Saving {disk}/second in the background failed: " if in_background else ""
        assert message.startswith(f"{before}saving {disk}/second failed.\nprocess")
        assert "OSError: [Errno 28] No space left on device: about " in message
        assert f"'{disk}/.second.unfinished/checkpoint/" in message
        assert "there was room for " in message
        assert (disk / "second/latest").read_text() == "checkpoint"
        merge_fsdp_weights(disk / "second", tmp_path / "merged", progress=False)
