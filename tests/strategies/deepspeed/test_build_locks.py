"""Locks of ops that a killed build has left, real files where torch puts them."""

from __future__ import annotations

import os
import re
import time
import warnings
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from accelight.strategies.deepspeed import HfDeepSpeedConfig
from accelight.strategies.deepspeed.ds_config import DeepSpeedSettings
from accelight.strategies.deepspeed.library import check_build_locks, ops_of_optimizer
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import ds_config, trainer_for
from tests.strategies.oracle import Case, Outcome, TinyModule, rank_loader

OLD_S = 3600.0
_HAVE_BATONS = hasattr(cpp_extension, "FileBaton")
_needs_batons = pytest.mark.skipif(not _HAVE_BATONS, reason="torch 2.15 leaves its locks to the system")


def leave_lock(root: Path, op: str, age_s: float) -> Path:
    lock = root / op / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - age_s,) * 2)
    return lock


@_needs_batons
def test_an_abandoned_lock_is_told_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    old = leave_lock(tmp_path, "cpu_adam", OLD_S)
    with pytest.raises(RuntimeError, match=rf"cpu_adam is locked .* 60 minutes old.* rm '{re.escape(str(old))}'"):
        check_build_locks("cpu_adam")
    assert old.is_file()


@_needs_batons
def test_a_young_lock_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    young, removed = leave_lock(tmp_path, "fused_adam", 1), []

    def remove_at_warning(message: Warning | str, *_: object, **__: object) -> None:
        assert f"rm '{young}'" in str(message)
        young.unlink()
        removed.append(message)

    monkeypatch.setattr(warnings, "warn", remove_at_warning)
    check_build_locks("fused_adam")
    assert len(removed) == 1


@_needs_batons
def test_a_young_lock_that_nobody_removes_is_an_error_when_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    young = leave_lock(tmp_path, "fused_adam", 600 - 2)
    with (
        pytest.warns(UserWarning, match=r"waiting for at most [012] s\."),
        pytest.raises(RuntimeError, match="which is 10 minutes old"),
    ):
        check_build_locks("fused_adam")
    assert young.is_file()


def test_a_file_that_stays_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.15 leaves one in each folder, which only the system locks."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delattr(cpp_extension, "FileBaton", raising=_HAVE_BATONS)
    leave_lock(tmp_path, "cpu_adam", OLD_S)
    leave_lock(tmp_path, "fused_adam", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_build_locks("cpu_adam", "fused_adam")


@_needs_batons
def test_a_running_build_and_no_build_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.file_baton import FileBaton

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    baton = FileBaton(str(tmp_path / "cpu_adam" / "lock"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_build_locks("cpu_adam")
        assert baton.try_acquire()
        os.utime(baton.lock_file_path, (time.time() - OLD_S,) * 2)
        check_build_locks("cpu_adam")
    baton.release()


@pytest.mark.parametrize(
    ("optimizer", "offload", "ops"),
    [
        ({"type": "AdamW"}, "cpu", ["cpu_adam"]),
        ({"type": "Adam"}, "none", ["fused_adam"]),
        ({"type": "Adam", "params": {"torch_adam": True}}, "none", []),
        ({"type": "SGD"}, "none", []),
        (None, "cpu", []),
    ],
)
def test_which_op_an_optimizer_of_the_config_needs(optimizer: object, offload: str, ops: list[str]) -> None:
    config = {"optimizer": optimizer, "zero_optimization": {"offload_optimizer": {"device": offload}}}
    assert list(ops_of_optimizer(DeepSpeedSettings.of(HfDeepSpeedConfig(config)))) == ops


def fit_behind_a_lock() -> str:
    from deepspeed.ops.op_builder.builder import OpBuilder

    loaded = dict(OpBuilder._loaded_ops)
    OpBuilder._loaded_ops.clear()  # as in a process that has just started
    try:
        with pytest.raises(RuntimeError, match="rm '") as caught:
            trainer_for(Case(), ds_config(2)).fit(TinyModule(Case(), Outcome()), rank_loader(1))
        return str(caught.value)
    finally:
        OpBuilder._loaded_ops.update(loaded)


@_needs_batons
def test_the_trainer_does_not_wait_for_ever(tmp_path: Path) -> None:
    lock = leave_lock(tmp_path, "deepspeed_shm_comm", OLD_S)
    [error] = run_on_ranks(1, fit_behind_a_lock, env={"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert str(lock) in error
