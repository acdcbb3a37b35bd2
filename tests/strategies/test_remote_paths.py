"""Checkpoints behind URLs: one file goes through Lightning's CheckpointIO; what needs a disk is refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from safetensors.torch import load_file

from accelight.callbacks import MergeShardedCheckpoint
from accelight.checkpoint.storage import ObjectFolder, is_remote, remove_checkpoint, without_credentials
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy, full_state_dict
from accelight.strategies.common.checkpoint_files import local_path
from tests.ranks import run_on_ranks
from tests.storage import URL
from tests.strategies.oracle import Case, Outcome, TinyModule, assert_same, quiet_trainer, rank_loader, train_plain

CASE = Case(accumulate=1, optimizer="adamw")


def _train(strategy: Any, epochs: int, save_to: str | None, resume_from: str | None, **more: Any) -> Outcome:
    outcome = Outcome()
    trainer, module = quiet_trainer(strategy, 2, max_epochs=epochs, **more), TinyModule(CASE, outcome)
    trainer.fit(module, rank_loader(2), ckpt_path=resume_from, weights_only=True if resume_from else None)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    outcome.global_step = trainer.global_step
    outcome.weights = {
        name.removeprefix("model."): value.clone() for name, value in full_state_dict(trainer.strategy).items()
    }
    return outcome


def train_fsdp(version: int, epochs: int, save_to: str | None, resume_from: str | None) -> Outcome:
    strategy = AccelFSDPStrategy(fsdp_version=version, state_dict_type="full_state_dict")
    return _train(strategy, epochs, save_to, resume_from)


@pytest.mark.parametrize("version", [1, 2])
def test_a_full_checkpoint_is_saved_to_a_storage_and_resumed_from_there(version: int, tmp_path: Path) -> None:
    url = f"{URL}{tmp_path}/checkpoints/one.ckpt"
    run_on_ranks(2, train_fsdp, version, 1, url, None)
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["one.ckpt"]
    whole = train_plain(CASE, 2)
    second = Outcome(whole.losses[len(whole.losses) // 2 :], [], whole.weights, whole.global_step)
    assert_same(run_on_ranks(2, train_fsdp, 3 - version, 2, None, url)[0], second)


def refuse_folders(folder: str) -> None:
    os.chdir(folder)
    local = AccelFSDPStrategy(fsdp_version=1, use_orig_params=False, state_dict_type="local_state_dict")
    with pytest.raises(ValueError, match=r"storage:///x\.ckpt: local_state_dict checkpoints must be on a file system"):
        _train(local, 1, f"{URL}/x.ckpt", None)
    by_process = AccelFSDPStrategy(fsdp_version=2, state_dict_type="sharded_state_dict", async_save="process")
    with pytest.raises(ValueError, match=r"async_save='process' writes to a file system"):
        _train(by_process, 1, None, None, callbacks=[_SavesTo(f"{URL}/x.ckpt")])


def save_weights(url: str) -> Outcome:
    strategy = AccelFSDPStrategy(fsdp_version=2)
    outcome = _train(strategy, 1, None, None)
    strategy.save_safetensors(url)
    return outcome


def test_weights_in_a_store_with_folders(tmp_path: Path) -> None:
    outcome = run_on_ranks(2, save_weights, f"{URL}{tmp_path}/merged")[0]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["merged", "model.safetensors"]
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert {name.removeprefix("model."): one.tolist() for name, one in found.items()} == {
        name: one.tolist() for name, one in outcome.weights.items()
    }


def train_sharded(engine: str, epochs: int, save_to: str | None, resume_from: str | None) -> Outcome:
    if engine == "zero":
        return _train(AccelDeepSpeedStrategy(zero_stage=2), epochs, save_to, resume_from)
    strategy = AccelFSDPStrategy(fsdp_version=int(engine[-1]), state_dict_type="sharded_state_dict")
    return _train(strategy, epochs, save_to, resume_from)


@pytest.mark.parametrize(("engine", "other"), [("fsdp2", "fsdp1"), ("zero", "zero")])
def test_a_sharded_checkpoint_in_a_store_with_folders(engine: str, other: str, tmp_path: Path) -> None:
    url, folder = f"{URL}{tmp_path}/checkpoints/one.ckpt", tmp_path / "checkpoints" / "one.ckpt"
    for _ in range(2):
        run_on_ranks(2, train_sharded, engine, 1, url, None)
        assert len(os.listdir(folder)) == 2  # .metadata or `latest`, and one generation
    whole = train_plain(CASE, 2)
    second = Outcome(whole.losses[len(whole.losses) // 2 :], [], whole.weights, whole.global_step)
    assert_same(run_on_ranks(2, train_sharded, other, 2, None, url)[0], second)
    assert_same(run_on_ranks(2, train_sharded, other, 2, None, str(folder))[0], second)  # it is a download, too
    remove_checkpoint(ObjectFolder(url))
    assert not folder.exists()


def _refuse_file(url: str) -> None:
    with pytest.raises(RuntimeError, match=r"storage:.*one\.ckpt is a file: it is not overwritten by a folder"):
        train_sharded("fsdp2", 1, url, None)


def test_a_file_in_a_store_with_folders_stays(tmp_path: Path) -> None:
    (tmp_path / "one.ckpt").write_bytes(b"others")
    run_on_ranks(2, _refuse_file, f"{URL}{tmp_path}/one.ckpt")
    assert (tmp_path / "one.ckpt").read_bytes() == b"others"


class _SavesTo(Callback):
    def __init__(self, path: str) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self._path)


def refuse_to_merge(folder: str) -> None:
    os.chdir(folder)
    from lightning.pytorch.callbacks import ModelCheckpoint

    callbacks = [MergeShardedCheckpoint(Path(folder, "merged")), ModelCheckpoint(f"{URL}{folder}/saved")]
    with pytest.raises(ValueError, match=r"storage:.*ckpt: MergeShardedCheckpoint merges sharded checkpoints from"):
        _train("ddp", 1, None, None, callbacks=callbacks, enable_checkpointing=True)


@pytest.mark.parametrize("refuse", [refuse_folders, refuse_to_merge])
def test_folders_are_refused_before_anything_is_written(refuse: Any, tmp_path: Path) -> None:
    run_on_ranks(2, refuse, str(tmp_path))
    assert [path for path in tmp_path.rglob("*") if not path.is_dir() or "storage" in path.name] == []
    with pytest.raises(ValueError, match=r"sftp://host/merged: MergeShardedCheckpoint takes no password in a URL"):
        MergeShardedCheckpoint("sftp://user:password@host/merged")


def test_which_paths_are_remote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert [is_remote(path) for path in ("s3://b/x", "memory://x", "a/b", "/a:b", "file:///a")] == [
        True, True, False, False, False,
    ]  # fmt: skip
    assert without_credentials("sftp://me:word@host/a") == "sftp://host/a"
    assert local_path("file:///a/b.ckpt", "it") == Path("/a/b.ckpt")
    assert local_path("a/epoch=1.ckpt", "it") == Path("a/epoch=1.ckpt")
