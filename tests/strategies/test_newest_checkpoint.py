"""What a run that is started again goes on from: the newest checkpoint that is whole, whatever else lies beside it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from accelight.checkpoint.locate import find_newest
from accelight.strategies import newest_checkpoint
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader, strategy_named


def _save(engine: str, folder: str, num_steps: int, more: dict[str, Any]) -> None:
    size = dist.get_world_size()
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, **more)
    trainer = quiet_trainer(
        strategy_named(engine), size, max_steps=num_steps, callbacks=[saving], enable_checkpointing=True
    )
    trainer.fit(TinyModule(Case(), Outcome()), rank_loader(size))


def _saved(engine: str, folder: Path, num_steps: int = 3, **more: Any) -> Path:
    run_on_ranks(2, _save, engine, str(folder), num_steps, more)
    return folder


def _age(path: Path, seconds: float) -> None:
    now = path.stat().st_mtime
    os.utime(path, (now + seconds, now + seconds))


@pytest.mark.core("fsdp2", "fsdp1")
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "zero2"])
def test_steps_count_and_not_times_or_names(engine: str, tmp_path: Path) -> None:
    folder = _saved(engine, tmp_path / "saved", save_last=True)
    (folder / "step=3.ckpt").rename(folder / "a")  # a name that says nothing, and an older time
    if engine == "fsdp1":  # one file: its ending is what it is known by
        (folder / "a").rename(folder / "a.ckpt")
    shutil.rmtree(folder / "last.ckpt", ignore_errors=True)
    (folder / "last.ckpt").unlink(missing_ok=True)
    _age(folder / "step=1.ckpt", 100)
    found = find_newest(folder)
    assert found.path is not None
    assert (found.path.name.split(".")[0], found.global_step, found.passed_over) == ("a", 3, {})
    assert newest_checkpoint(folder) == str(found.path)


def test_what_is_not_whole_is_passed_over_by_name(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    folder = _saved("fsdp2", tmp_path / "saved")
    _saved("fsdp1", tmp_path / "full", 5)
    for step in (4, 5):
        shutil.copy(tmp_path / "full" / f"step={step}.ckpt", folder)
    os.truncate(folder / "step=5.ckpt", (folder / "step=5.ckpt").stat().st_size - 100)  # killed while it was written
    shutil.copytree(folder / "step=3.ckpt", folder / "cut")
    shard = next((folder / "cut").glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size - 1)
    shutil.copytree(folder / "step=3.ckpt", folder / ".step=9.ckpt.unfinished")
    (folder / "logs").mkdir()
    found = find_newest(folder)
    assert found.path == folder / "step=4.ckpt"
    assert sorted(found.passed_over) == ["cut", "logs", "step=5.ckpt"]
    assert newest_checkpoint(folder) == str(found.path)
    told = "\n".join(str(warning.message) for warning in recwarn.list)
    assert f"skips {folder / 'step=5.ckpt'}: " in told
    (folder / "step=4.ckpt").unlink()
    assert find_newest(folder).path == folder / "step=3.ckpt"


def test_weights_alone_are_passed_over(tmp_path: Path) -> None:
    folder = _saved("fsdp2", tmp_path / "saved", save_weights_only=True)
    found = find_newest(folder)
    assert found.path is None
    assert all("only weights" in reason for reason in found.passed_over.values())
    assert len(found.passed_over) == 3


def test_checkpoints_in_folders_of_the_folder_do_not_count(tmp_path: Path) -> None:
    folder = _saved("fsdp2", tmp_path / "saved", 2)
    _saved("fsdp2", folder / "best", 3)
    found = find_newest(f"file://{folder}")
    assert (found.path, found.global_step) == (folder / "step=2.ckpt", 2)
    assert "best" in found.passed_over


def test_a_first_start_has_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "not there") is None


def _look(folders: list[str]) -> str | None:
    return newest_checkpoint(folders[dist.get_rank()])


def test_all_processes_take_what_the_first_one_finds(tmp_path: Path) -> None:
    folder = _saved("fsdp2", tmp_path / "saved")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run_on_ranks(2, _look, [str(folder), str(empty)]) == [str(folder / "step=3.ckpt")] * 2
    assert run_on_ranks(2, _look, [str(empty), str(folder)]) == [None, None]


def _look_where_it_is_not_seen(folder: str) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:  # a machine without that folder
            patch.setattr(Path, "exists", lambda path: False)
        return newest_checkpoint(folder)


def test_a_folder_that_is_not_shared_is_an_error_on_all(tmp_path: Path) -> None:
    folder = _saved("fsdp2", tmp_path / "saved")
    with pytest.raises(
        AssertionError, match=r"(?s)2 of 2 ranks failed.*process 1: .*step=3\.ckpt of process 0 does not"
    ):
        run_on_ranks(2, _look_where_it_is_not_seen, str(folder))
