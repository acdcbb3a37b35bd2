"""A full disk: the error says so on all processes, what was written is gone, and the next save finds room."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accelight.checkpoint import merge_fsdp_weights
from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.small_disk import fill, small_disk
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.full_disk import SavesOnAFullDisk
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

SAVES: dict[str, dict[str, Any]] = {
    "fsdp1-sharded": {**ENGINES["fsdp1_orig_params"], "state_dict_type": "sharded_state_dict"},
    "fsdp1-local": {**ENGINES["fsdp1"], "state_dict_type": "local_state_dict"},
    "fsdp2-sharded": {**ENGINES["fsdp2"], "state_dict_type": "sharded_state_dict"},
    "fsdp2-in-background": {**ENGINES["fsdp2"], "state_dict_type": "sharded_state_dict", "async_save": True},
    "fsdp2-by-process": {**ENGINES["fsdp2"], "state_dict_type": "sharded_state_dict", "async_save": "process"},
    "fsdp2-full": {**ENGINES["fsdp2"], "state_dict_type": "full_state_dict"},
    "fsdp2-full-in-background": {**ENGINES["fsdp2"], "state_dict_type": "full_state_dict", "async_save": True},
}


def _train(options: dict[str, Any], folder: Path) -> tuple[str, list[str]]:
    callback = SavesOnAFullDisk(folder)
    trainer = quiet_trainer(AccelFSDPStrategy(**options), 2, max_steps=2, callbacks=[callback])
    trainer.fit(TinyModule(Case(optimizer="adamw"), Outcome()), rank_loader(2))
    return callback.message, callback.left


@pytest.mark.core("fsdp2-sharded", "fsdp2-full-in-background")
@pytest.mark.parametrize("save", SAVES)
def test_a_save_that_fails_leaves_nothing(save: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1_000_000) as disk:
        outcomes = run_on_ranks(2, _train, SAVES[save], disk)
        assert outcomes[0] == outcomes[1]
        message, left = outcomes[0]
        assert left == ["filler", "first"]
        assert "OSError: [Errno 28] No space left on device: about " in message
        assert f"'{disk}/.second.unfinished" in message
        assert "there was room for " in message
        assert sorted(os.listdir(disk)) == ["first", "second"]
        if SAVES[save]["state_dict_type"] == "sharded_state_dict":
            one, two = (_merged(disk / name, tmp_path / name) for name in ("first", "second"))
            assert one
            assert all(torch.equal(one[name], two[name]) for name in one)


def _merged(folder: Path, output: Path) -> dict[str, torch.Tensor]:
    merge_fsdp_weights(folder, output, progress=False)
    return load_file(output / "model.safetensors")


def _save_in_full(folder: Path, temporary: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        trainer = quiet_trainer(AccelFSDPStrategy(**SAVES["fsdp2-full"]), 2, max_steps=1)
        trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
        trainer.save_checkpoint(folder / "new folder" / "last.ckpt")


def test_a_full_checkpoint_does_not_pass_through_the_temporary_folder(tmp_path: Path) -> None:
    with small_disk(tmp_path / "temporary", 100_000) as temporary:
        fill(temporary / "filler", 0)
        run_on_ranks(2, _save_in_full, tmp_path, temporary)
    assert torch.load(tmp_path / "new folder/last.ckpt", weights_only=True)["global_step"] == 1
    assert os.listdir(tmp_path / "new folder") == ["last.ckpt"]
