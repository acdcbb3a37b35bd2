"""Checkpoints on a server of SFTP: a store with folders, whose URLs have passwords in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint

from accelight.checkpoint import inspect_checkpoint, merge_fsdp_weights, verify_merged
from accelight.checkpoint.storage import ObjectFolder
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy, load_from_checkpoint, newest_checkpoint
from accelight.strategies.common.checkpoint_files import remove_saved
from tests.log_messages import log_messages
from tests.ranks import run_on_ranks
from tests.sftp_server import PASSWORD, USER, log_in, running_sftp
from tests.strategies.oracle import Case, Outcome, TinyModule, assert_same, quiet_trainer, rank_loader, train_plain

CASE = Case(accumulate=1, optimizer="adamw")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "served").mkdir()
    log_in()
    with running_sftp(tmp_path / "served") as url:
        yield url


def _strategy(engine: str) -> Any:
    if engine == "zero":
        return AccelDeepSpeedStrategy(zero_stage=3)
    form = "full_state_dict" if engine == "full" else "sharded_state_dict"
    return AccelFSDPStrategy(fsdp_version=2, state_dict_type=form)


def keeps(url: str) -> str:
    callback = ModelCheckpoint(f"{url}/kept")
    trainer = quiet_trainer(_strategy("fsdp2"), 2, callbacks=[callback], enable_checkpointing=True)
    with pytest.raises(ValueError, match="has a password in it") as error:
        trainer.fit(TinyModule(CASE, Outcome()), rank_loader(2))
    return f"{error.value}"


def train(engine: str, epochs: int, save_to: str | None, resume_from: str | None) -> tuple[Outcome, list[str]]:
    from accelight.strategies import full_state_dict

    log_in()
    outcome = Outcome()
    trainer, module = quiet_trainer(_strategy(engine), 2, max_epochs=epochs), TinyModule(CASE, outcome)
    with log_messages("", without=("paramiko", "fsspec", "asyncio")) as lines:
        trainer.fit(module, rank_loader(2), ckpt_path=resume_from, weights_only=True if resume_from else None)
        if save_to is not None:
            trainer.save_checkpoint(save_to)
    outcome.global_step = trainer.global_step
    outcome.weights = {
        name.removeprefix("model."): value.clone() for name, value in full_state_dict(trainer.strategy).items()
    }
    return outcome, lines


@pytest.mark.core("fsdp2")
@pytest.mark.parametrize("engine", ["fsdp2", "zero", "full"])
def test_a_checkpoint_is_saved_twice_and_resumed(engine: str, server: str, tmp_path: Path) -> None:
    url, served = f"{server}/run/one.ckpt", tmp_path / "served" / "run"
    for _ in range(2):
        run_on_ranks(2, train, engine, 1, url, None)
        assert os.listdir(served) == ["one.ckpt"]
        assert engine == "full" or len(os.listdir(served / "one.ckpt")) == 2  # what names it, and one generation
    whole = train_plain(CASE, 2)
    second = Outcome(whole.losses[len(whole.losses) // 2 :], [], whole.weights, whole.global_step)
    for outcome, _ in run_on_ranks(2, train, engine, 2, None, url)[:1]:
        assert_same(outcome, second)
    assert newest_checkpoint(f"{server}/run") is not None
    if engine == "full":
        return
    merge_fsdp_weights(url, f"{server}/run/merged")
    assert verify_merged(url, f"{server}/run/merged").is_equal
    assert sorted(os.listdir(served / "merged")) == ["model.safetensors"]
    assert isinstance(load_from_checkpoint(TinyModule, url, case=CASE, outcome=Outcome()), LightningModule)


def test_a_removed_folder_is_no_pattern(server: str) -> None:
    """As those of hydra's runs may be."""
    for name in ("layers=6", "layers=[64,64]"):
        folder = ObjectFolder(f"{server}/{name}/last.ckpt")
        folder.put(f"{'0' * 32}/one.distcp", b"1")
        folder.put(".metadata", b"2")
    remove_saved(f"{server}/layers=[64,64]/last.ckpt", lambda: None)
    assert ObjectFolder(f"{server}/layers=6/last.ckpt").size(".metadata") == 1
    assert ObjectFolder(f"{server}/layers=[64,64]/last.ckpt").size(".metadata") is None


def fails(engine: str, save_to: str | None, resume_from: str | None) -> str:
    with pytest.raises(Exception) as error:  # noqa: PT011 (whatever it is, it shows no password)
        train(engine, 1, save_to, resume_from)
    return f"{error.value!r} {error.value} {error.value.__cause__!r}"


@pytest.mark.core("zero")
@pytest.mark.parametrize("engine", ["fsdp2", "zero"])
def test_passwords_are_nowhere(engine: str, server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url, served = f"{server}/run/one.ckpt", tmp_path / "served" / "run"
    for _, lines in run_on_ranks(2, train, engine, 1, url, None):
        assert PASSWORD not in "\n".join(lines)
    for file in filter(Path.is_file, served.rglob("*")):
        assert PASSWORD.encode() not in file.read_bytes()
    assert PASSWORD not in f"{inspect_checkpoint(url)} {ObjectFolder(url)!r}"
    (served / "two.ckpt").mkdir()
    (served / "two.ckpt" / "notes.txt").write_text("a user's")
    messages = run_on_ranks(2, fails, engine, f"{server}/run/two.ckpt", None)
    largest = max(served.rglob("*.pt" if engine == "zero" else "*.distcp"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    messages += run_on_ranks(2, fails, engine, None, url)
    messages += run_on_ranks(2, fails, engine, None, f"{server}/run/none.ckpt")
    with_password = url.replace("://", f"://{USER}:{PASSWORD}@")
    refused = run_on_ranks(2, fails, engine, with_password, None) + run_on_ranks(2, fails, engine, None, with_password)
    assert all("has a password in it, which the Trainer would log" in message for message in refused)
    messages += refused + run_on_ranks(2, keeps, with_password.rpartition("/")[0])
    for message in messages:
        assert "sftp://127.0.0.1" in message
        assert PASSWORD not in message
    captured = capfd.readouterr()
    assert PASSWORD not in captured.out + captured.err
