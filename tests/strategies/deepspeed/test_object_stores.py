"""DeepSpeed's folders in an object store: S3's protocol, from a server on loopback."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor, nn

from accelight.callbacks import ShardedEMA, TriggerEarlyStopping
from accelight.checkpoint import CheckpointError, inspect_checkpoint, load_state_dict, merge_fsdp_weights, verify_merged
from accelight.strategies import (
    AccelDeepSpeedStrategy,
    AccelFSDPStrategy,
    full_state_dict,
    load_from_checkpoint,
    newest_checkpoint,
)
from tests.object_store import BUCKET, Store
from tests.ranks import run_on_ranks
from tests.strategies.oracle import quiet_trainer
from tests.strategies.stored import BATCH, BATCHES, URL, SaveEachStep, assert_close, data, kill_saves, two_best


class Module(LightningModule):
    """Sees the same batches whatever the number of processes is; ``width`` makes it large."""

    def __init__(self, width: int = 32, optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 1)
        self.optimizer = optimizer
        self.seen: dict[str, Tensor] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        share = BATCH // self.trainer.world_size
        own = batch[self.global_rank * share : (self.global_rank + 1) * share]
        loss = self.head(self.net.eval()(own)).square().mean()
        self.log("loss", loss.detach(), sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen = {name: one.clone() for name, one in full_state_dict(self.trainer.strategy, self).items()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def _trainer(strategy: Any, epochs: int, callbacks: Any = ()) -> Any:
    return quiet_trainer(
        strategy,
        dist.get_world_size(),
        max_epochs=epochs,
        use_distributed_sampler=False,
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks),
        callbacks=list(callbacks),
    )


def fit(arguments: dict[str, Any]) -> dict[str, Tensor]:
    return _fit(**arguments)


def _fit(
    epochs: int,
    *,
    stage: int = 2,
    save_to: str = "",
    resume_from: str | None = None,
    width: int = 32,
    optimizer: str = "sgd",
    callbacks: Any = (),
    copies_in: str | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    tempfile.tempdir = copies_in
    strategy: Any = (
        AccelDeepSpeedStrategy(zero_stage=stage, **options)
        if stage >= 0
        else AccelFSDPStrategy(fsdp_version=2, **options)
    )
    trainer, module = _trainer(strategy, epochs, callbacks), Module(width, optimizer)
    trainer.fit(module, data(), ckpt_path=resume_from)
    if save_to:
        trainer.save_checkpoint(save_to)
    return {name: one.clone() for name, one in full_state_dict(strategy, module).items()}


def _on(num_ranks: int, **arguments: Any) -> list[dict[str, Tensor]]:
    return run_on_ranks(num_ranks, fit, arguments, timeout_s=100)


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    """What two epochs leave that nothing interrupts."""
    return _on(2, epochs=2)[0]


@pytest.mark.core("2]", "3]")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_is_resumed_from_a_store(
    stage: int, store: Store, expected: dict[str, Tensor], tmp_path: Path
) -> None:
    url = f"{URL}/run/saved.ckpt"
    weights = _on(2, epochs=1, stage=stage, save_to=url)[0]
    for found in _on(2, epochs=2, stage=stage, resume_from=url, copies_in=str(tmp_path)):
        assert_close(found, expected)
    assert not list(tmp_path.iterdir())
    inspected = inspect_checkpoint(url)
    assert inspected.has_optimizer
    assert inspected.global_step == BATCHES
    assert inspected.has_digests
    torch.testing.assert_close({name: one for name, one in load_state_dict(url).items() if name in weights}, weights)
    merge_fsdp_weights(url, f"{URL}/merged")
    assert verify_merged(url, f"{URL}/merged").is_equal
    merge_fsdp_weights(url, f"{URL}/merged", remove_checkpoint_dir=True)
    assert store.names("run/") == []


def test_a_download_is_resumed(store: Store, expected: dict[str, Tensor], tmp_path: Path) -> None:
    """And an uploaded folder, which the next save replaces."""
    url = f"{URL}/saved.ckpt"
    _on(2, epochs=1, save_to=url)
    store.files().get(f"{BUCKET}/saved.ckpt/", f"{tmp_path}/down.ckpt/", recursive=True)
    assert_close(_on(2, epochs=2, resume_from=f"{tmp_path}/down.ckpt")[0], expected)
    _on(2, epochs=1, save_to=f"{tmp_path}/local.ckpt")
    store.files().put(f"{tmp_path}/local.ckpt", f"{BUCKET}/up.ckpt", recursive=True)
    assert_close(_on(2, epochs=2, resume_from=f"{URL}/up.ckpt")[0], expected)
    _on(2, epochs=1, save_to=f"{URL}/up.ckpt")
    assert len({name.partition("/")[0] for name in store.names("up.ckpt/")}) == 2  # `latest`, and one generation
    assert_close(_on(2, epochs=2, resume_from=f"{URL}/up.ckpt")[0], expected)


@pytest.mark.exhaustive
def test_strategies_replace_each_other(store: Store, expected: dict[str, Tensor]) -> None:
    """Also what killed saves have left is removed, and what others keep there stays."""
    url, files, left = f"{URL}/saved.ckpt", store.files(), "0" * 32
    files.pipe_file(f"{BUCKET}/saved.ckpt/{left}/zero_pp_rank_0_mp_rank_00_optim_states.pt", b"cut off")
    files.pipe_file(f"{BUCKET}/saved.ckpt/latest", left.encode())
    files.pipe_file(f"{BUCKET}/saved.ckpt/notes.txt", b"a user's")
    forms: list[tuple[dict[str, Any], str]] = [
        ({"stage": 2}, "latest"),
        ({"stage": -1, "state_dict_type": "sharded_state_dict"}, ".metadata"),
        ({"stage": 3}, "latest"),
        ({"stage": -1, "state_dict_type": "full_state_dict"}, ""),
        ({"stage": 2}, "latest"),
    ]
    for options, name in forms:
        _on(2, epochs=1, save_to=url, **options)
        folder = {one.partition("/")[0] for one in store.names("saved.ckpt/")} - {"notes.txt"}
        assert ({name} <= folder and len(folder) == 2) if name else not folder
        assert (store.files().info(f"{BUCKET}/saved.ckpt")["type"] == "file") == (name == "")
        assert_close(_on(2, epochs=2, resume_from=url, **options)[0], expected)
    assert files.cat_file(f"{BUCKET}/saved.ckpt/notes.txt") == b"a user's"


@pytest.mark.exhaustive
def test_requests_that_fail_are_repeated(store: Store, expected: dict[str, Tensor]) -> None:
    store.failing = 0.2
    url = f"{URL}/saved.ckpt"
    _on(2, epochs=1, save_to=url, stage=3)
    for found in _on(2, epochs=2, resume_from=url, stage=3):
        assert_close(found, expected)
    assert any(one.status in (0, 503) for one in store.requests)


def _refused(arguments: dict[str, Any]) -> str:
    with pytest.raises((RuntimeError, ValueError)) as error:
        _fit(**arguments)
    return f"{error.value} {error.value.__cause__}"


def test_an_object_that_cannot_be_written_is_named_on_every_rank(store: Store, expected: dict[str, Tensor]) -> None:
    url = f"{URL}/saved.ckpt"
    _on(2, epochs=1, save_to=url)
    before = store.names("saved.ckpt/")
    store.forbidden = "zero_pp_rank_1"
    for message in run_on_ranks(2, _refused, {"epochs": 1, "save_to": url}):
        assert "process 1: PermissionError: writing s3://bucket/saved.ckpt/" in message
    store.forbidden = ""
    assert store.names("saved.ckpt/") == before
    assert_close(_on(2, epochs=2, resume_from=url)[0], expected)


def test_damaged_checkpoints_are_errors_that_name_the_object(store: Store, tmp_path: Path) -> None:
    url, files = f"{URL}/saved.ckpt", store.files()
    _on(2, epochs=1, save_to=url)
    file = next(name for name in store.names("saved.ckpt/") if "zero_pp_rank_1" in name)
    whole = files.cat_file(f"{BUCKET}/saved.ckpt/{file}")
    middle = len(whole) // 2
    resume = {"epochs": 2, "resume_from": url, "copies_in": str(tmp_path)}
    for damage in (whole[:100], b"", whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
        files.pipe_file(f"{BUCKET}/saved.ckpt/{file}", damage)
        for message in run_on_ranks(2, _refused, resume):
            assert file.rpartition("/")[2] in message
    files.rm_file(f"{BUCKET}/saved.ckpt/{file}")
    for message in run_on_ranks(2, _refused, resume):
        assert "saved by 1 rank(s), and this run has 2" in message
    files.pipe_file(f"{BUCKET}/saved.ckpt/latest", b"../elsewhere")
    for message in run_on_ranks(2, _refused, resume):
        assert "which is not a plain path inside" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_ranks_of_another_number(store: Store, tmp_path: Path) -> None:
    """DeepSpeed's universal form is made of the copies; each node makes its own."""
    url = f"{URL}/saved.ckpt"
    expected = _on(2, epochs=2, optimizer="adam", stage=1)[0]
    _on(2, epochs=1, optimizer="adam", stage=1, save_to=url)
    resume: dict[str, Any] = {"resume_from": url, "load_universal": True, "copies_in": str(tmp_path)}
    for found in _on(3, epochs=2, optimizer="adam", stage=1, **resume):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # Adam enlarges what sums differ by
    assert not list(tmp_path.iterdir())


def _validates(url: str, stage: int) -> dict[str, Tensor]:
    module = Module()
    _trainer(AccelDeepSpeedStrategy(zero_stage=stage), 1).validate(module, data(), ckpt_path=url, verbose=False)
    return module.seen


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [2, 3])
def test_validation_on_another_number_of_ranks(stage: int, store: Store) -> None:
    url = f"{URL}/saved.ckpt"
    weights = _on(2, epochs=1, stage=stage, save_to=url)[0]
    for found in run_on_ranks(3, _validates, url, stage):
        assert_close(found, weights)


def _averages(url: str, resume_from: str | None) -> dict[str, Tensor]:
    average = ShardedEMA(decay=0.5)
    _fit(2 if resume_from else 1, stage=3, save_to=url, resume_from=resume_from, callbacks=[average])
    return {name: one.clone() for name, one in load_state_dict(url, weights="ema").items()}


@pytest.mark.exhaustive
def test_averages_and_weights_in_16_bit(store: Store, tmp_path: Path) -> None:
    first, second, local = f"{URL}/first.ckpt", f"{URL}/second.ckpt", str(tmp_path / "local.ckpt")
    run_on_ranks(2, _averages, first, None)
    run_on_ranks(2, _averages, local, None)
    expected = run_on_ranks(2, _averages, local, local)[0]
    for found in run_on_ranks(2, _averages, second, first):
        assert_close(found, expected)
    url = f"{URL}/whole.ckpt"
    weights = _on(2, epochs=1, stage=3, save_to=url, zero3_save_16bit_model=True)[0]
    [name] = [one for one in store.names("whole.ckpt/") if one.endswith("model.safetensors")]
    (tmp_path / "found").write_bytes(store.files().cat_file(f"{BUCKET}/whole.ckpt/{name}"))
    found = load_file(tmp_path / "found")
    assert all(torch.equal(found[name], one.to(found[name].dtype)) for name, one in weights.items())


def _keeps_best(folder: str, in_background: bool) -> tuple[str, list[str]]:
    callback = two_best(folder)
    _fit(1, stage=3 if in_background else 2, callbacks=[callback], async_save=in_background)
    return callback.last_model_path, sorted(callback.best_k_models)


@pytest.mark.exhaustive
@pytest.mark.parametrize("in_background", [False, True])
def test_model_checkpoint_keeps_the_best_and_the_last(
    in_background: bool, store: Store, expected: dict[str, Tensor]
) -> None:
    [(last, kept), _] = run_on_ranks(2, _keeps_best, f"{URL}/run", in_background)
    names = {name.partition("/")[0] for name in store.names("run/")}
    assert names == {path.rpartition("/")[2] for path in (*kept, last)}
    assert_close(_on(2, epochs=2, stage=3 if in_background else 2, resume_from=last)[0], expected)
    module = load_from_checkpoint(Module, last)
    weights = load_state_dict(last)
    assert all(torch.equal(one, weights[name]) for name, one in module.state_dict().items() if name in weights)


class _Signals(Callback):
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)


def _stops(folder: str) -> str | None:
    stopping = TriggerEarlyStopping(stop_on_signals=[signal.SIGUSR1])
    with pytest.raises(SystemExit):
        _fit(2, callbacks=[_Signals(), stopping, ModelCheckpoint(folder)])
    return stopping.checkpoint_path


@pytest.mark.exhaustive
def test_a_signal_saves_into_the_store(store: Store, expected: dict[str, Tensor]) -> None:
    path, of_other = run_on_ranks(2, _stops, f"{URL}/run")
    assert path == of_other == newest_checkpoint(f"{URL}/run")
    assert_close(_on(2, epochs=2, resume_from=path, callbacks=[TriggerEarlyStopping()])[0], expected)


@pytest.mark.exhaustive
def test_large_files_go_in_parts(store: Store) -> None:
    url, width = f"{URL}/saved.ckpt", 2048
    weights = _on(2, epochs=1, width=width, save_to=url)[0]
    assert any("partNumber" in one.query for one in store.requests)
    assert max(one.num_sent for one in store.requests) < 9 * 2**20
    store.requests.clear()
    found = load_state_dict(url)
    assert all(torch.equal(found[name], one) for name, one in weights.items())
    assert max(one.num_received for one in store.requests) < 9 * 2**20


def _weights_by(options: dict[str, str], url: str) -> dict[str, Tensor]:
    assert "AWS_ENDPOINT_URL" not in os.environ
    assert inspect_checkpoint(url, storage_options=options).global_step == BATCHES
    found = load_state_dict(url, storage_options=options)
    merge_fsdp_weights(url, f"{url}-merged", storage_options=options)
    assert verify_merged(url, f"{url}-merged", storage_options=options).is_equal
    module = load_from_checkpoint(Module, url, storage_options=options)
    assert all(torch.equal(one, found[name]) for name, one in module.state_dict().items() if name in found)
    return found


@pytest.mark.exhaustive
def test_options_instead_of_the_environment(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in no object, and in no message."""
    url, environment = f"{URL}/saved.ckpt", store.environment
    weights = _on(2, epochs=1, save_to=url)[0]
    options = {
        "endpoint_url": environment["AWS_ENDPOINT_URL"],
        "key": environment["AWS_ACCESS_KEY_ID"],
        "secret": environment["AWS_SECRET_ACCESS_KEY"],
    }
    for name in environment:
        monkeypatch.delenv(name)
    found = _weights_by(options, url)
    assert all(torch.equal(found[name], one) for name, one in weights.items())
    with pytest.raises(CheckpointError) as error:
        load_state_dict(f"{URL}/none.ckpt", storage_options=options)
    monkeypatch.undo()
    secrets = [options["key"].encode(), options["secret"].encode()]
    for name in store.files().find(BUCKET):
        content = store.files().cat_file(name)
        assert not any(secret in content for secret in secrets)
    assert not any(secret.decode() in f"{error.value!r} {error.value.__cause__!r}" for secret in secrets)


# ---------------------------------------------------------------------- kills
class _Counting(LightningModule):
    """All its weights are the number of steps: a checkpoint of two moments shows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(256, 256)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return -sum((one.sum() for one in self.parameters()), torch.zeros(()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def save_without_end(url: str) -> None:
    trainer = quiet_trainer(
        AccelDeepSpeedStrategy(zero_stage=2),
        2,
        max_epochs=100,
        use_distributed_sampler=False,
        callbacks=[SaveEachStep(url)],
    )
    trainer.fit(_Counting(), data())


def _check_kills(store: Store, tmp_path: Path, num_times: int) -> None:
    _on(2, epochs=1, save_to=kill_saves(__name__, tmp_path, num_times, load_state_dict))
    assert len({name.partition("/")[0] for name in store.names("killed.ckpt/")}) == 2  # `latest`, and one generation
    assert not store.files().list_multipart_uploads(BUCKET)


@pytest.mark.exhaustive
def test_killed_saves_leave_the_checkpoint_before_or_the_new_one(store: Store, tmp_path: Path) -> None:
    _check_kills(store, tmp_path, 1)


@pytest.mark.machines
@pytest.mark.timeout(1200)
def test_fifty_killed_saves(store: Store, tmp_path: Path) -> None:
    _check_kills(store, tmp_path, 50)
