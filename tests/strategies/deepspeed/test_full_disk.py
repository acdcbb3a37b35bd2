"""A full disk with ZeRO: no rank waits for one that could not write, and the next save finds room."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelight.checkpoint import merge_fsdp_weights
from tests.ranks import run_on_ranks
from tests.small_disk import small_disk
from tests.strategies.deepspeed.training import ds_config, trainer_for
from tests.strategies.full_disk import SavesOnAFullDisk
from tests.strategies.oracle import Case, Outcome, TinyModule, rank_loader


def _train(stage: int, folder: Path) -> tuple[str, list[str]]:
    case, callback = Case(optimizer="adamw"), SavesOnAFullDisk(folder)
    config = ds_config(stage, stage3_gather_16bit_weights_on_model_save=stage == 3)
    trainer = trainer_for(case, config, max_epochs=1, max_steps=2, callbacks=[callback])
    trainer.fit(TinyModule(case, Outcome()), rank_loader(2))
    return callback.message, callback.left


@pytest.mark.core("2")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_save_that_fails_leaves_nothing(stage: int, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1_000_000) as disk:
        outcomes = run_on_ranks(2, _train, stage, disk)
        assert outcomes[0] == outcomes[1]
        message, left = outcomes[0]
        assert left == ["filler", "first"]
        assert message.startswith(f"saving {disk}/second failed.\nprocess")
        assert "OSError: [Errno 28] No space left on device: about " in message
        assert f"'{disk}/.second.unfinished/checkpoint/" in message
        assert "there was room for " in message
        assert (disk / "second/latest").read_text() == "checkpoint"
        merge_fsdp_weights(disk / "second", tmp_path / "merged", progress=False)
