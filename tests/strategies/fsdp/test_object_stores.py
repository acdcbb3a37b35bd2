"""Sharded checkpoints in an object store: S3's protocol, from a server on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from accelight.checkpoint import inspect_checkpoint, load_state_dict, merge_fsdp_weights, verify_merged
from accelight.checkpoint.cli import main
from accelight.strategies import AccelFSDPStrategy, full_state_dict, load_from_checkpoint, newest_checkpoint
from accelight.strategies.common import checkpoint_files
from tests.object_store import BUCKET, Store
from tests.ranks import run_on_ranks
from tests.strategies.oracle import quiet_trainer
from tests.strategies.stored import BATCH, BATCHES, URL, SaveEachStep, assert_close, data, kill_saves, two_best


class Module(LightningModule):
    """Sees the same batches whatever the number of processes is; ``width`` makes it large."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        share = BATCH // self.trainer.world_size
        loss = self.net(batch[self.global_rank * share : (self.global_rank + 1) * share]).square().mean()
        self.log("loss", loss.detach(), sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def _fit(
    epochs: int,
    *,
    save_to: str = "",
    resume_from: str | None = None,
    version: int = 2,
    width: int = 32,
    form: str = "sharded_state_dict",
    callbacks: Any = (),
    **options: Any,
) -> dict[str, Tensor]:
    strategy = AccelFSDPStrategy(fsdp_version=version, auto_wrap_policy={nn.Linear}, state_dict_type=form, **options)
    trainer = quiet_trainer(
        strategy,
        dist.get_world_size(),
        max_epochs=epochs,
        use_distributed_sampler=False,
        enable_checkpointing=bool(callbacks),
        callbacks=list(callbacks),
    )
    module = Module(width)
    trainer.fit(module, data(), ckpt_path=resume_from)
    if save_to:
        trainer.save_checkpoint(save_to)
    if not options.get("use_orig_params", True):
        return {}
    return {name: one.clone() for name, one in full_state_dict(strategy, module).items()}


def fit(arguments: dict[str, Any]) -> dict[str, Tensor]:
    return _fit(**arguments)


def _on(num_ranks: int, **arguments: Any) -> list[dict[str, Tensor]]:
    return run_on_ranks(num_ranks, fit, arguments, timeout_s=100)


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    """What two epochs leave that nothing interrupts."""
    return _on(2, epochs=2)[0]


RESUMES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "fsdp2": ({"version": 2}, 2, {"version": 2}),
    "fsdp2 on three, fsdp1": ({"version": 2}, 3, {"version": 1}),
    "fsdp1 on one, fsdp2": ({"version": 1}, 1, {"version": 2}),
    "flat, fsdp2 on three": ({"version": 1, "use_orig_params": False}, 3, {"version": 2}),
    "in the background": ({"version": 2, "async_save": True}, 3, {"version": 2}),
    "one object": ({"version": 2, "form": "full_state_dict"}, 2, {"version": 1}),
}


@pytest.mark.core("fsdp2]", "fsdp2 on three", "in the background")
@pytest.mark.parametrize("name", RESUMES)
def test_a_checkpoint_is_resumed_from_a_store(name: str, store: Store, expected: dict[str, Tensor]) -> None:
    options, num_ranks, next_options = RESUMES[name]
    url = f"{URL}/{name.replace(' ', '-')}/saved.ckpt"
    _on(2, epochs=1, save_to=url, **options)
    for found in _on(num_ranks, epochs=2, resume_from=url, **next_options):
        assert_close(found, expected)


def test_a_save_replaces_the_one_before_and_what_killed_ones_left(store: Store) -> None:
    url, files = f"{URL}/saved.ckpt", store.files()
    _on(2, epochs=1, save_to=url)
    first = set(store.names("saved.ckpt/"))
    left = "0" * 32
    files.pipe_file(f"{BUCKET}/saved.ckpt/{left}/__0_0.distcp", b"cut off")
    files.pipe_file(f"{BUCKET}/saved.ckpt/notes.txt", b"a user's")
    files.call_s3("create_multipart_upload", Bucket=BUCKET, Key=f"saved.ckpt/{left}/__1_0.distcp")
    _on(2, epochs=1, save_to=url)
    second = set(store.names("saved.ckpt/"))
    assert first & second == {".metadata"}
    assert "notes.txt" in second
    assert len({name.partition("/")[0] for name in second} - {".metadata", "notes.txt"}) == 1
    assert not any(name.startswith(left) for name in second)
    assert not files.list_multipart_uploads(BUCKET)
    assert files.cat_file(f"{BUCKET}/saved.ckpt/notes.txt") == b"a user's"


def test_forms_replace_each_other(store: Store, expected: dict[str, Tensor]) -> None:
    url = f"{URL}/saved.ckpt"
    for form in ("sharded_state_dict", "full_state_dict", "sharded_state_dict"):
        _on(2, epochs=1, save_to=url, form=form)
        assert any(name == "" for name in store.names("saved.ckpt")) == (form == "full_state_dict")
        assert (".metadata" in store.names("saved.ckpt/")) == (form == "sharded_state_dict")
        assert_close(_on(2, epochs=2, resume_from=url)[0], expected)


def _refused(url: str) -> str:
    with pytest.raises(RuntimeError) as error:
        _fit(1, save_to=url)
    return f"{error.value} {error.value.__cause__}"


def test_what_is_no_checkpoint_is_not_overwritten(store: Store) -> None:
    store.files().pipe_file(f"{BUCKET}/data/train.csv", b"1,2")
    for message in run_on_ranks(2, _refused, f"{URL}/data"):
        assert "s3://bucket/data has objects under it but is not a checkpoint" in message
    assert store.names("data/") == ["train.csv"]


def test_an_object_that_cannot_be_written_is_named_on_every_rank(store: Store, expected: dict[str, Tensor]) -> None:
    """Also where a thread beside the rank's own writes it; the checkpoint before stays."""
    url = f"{URL}/saved.ckpt"
    _on(2, epochs=1, save_to=url)
    before = store.names("saved.ckpt/")
    store.forbidden = "__1_"
    for message in run_on_ranks(2, _refused, url):
        assert "process 1: PermissionError: writing s3://bucket/saved.ckpt/" in message
        assert "/__1_" in message
    store.forbidden = ""
    assert store.names("saved.ckpt/") == before
    assert_close(_on(2, epochs=2, resume_from=url)[0], expected)


def _fails_after_naming(url: str) -> str:
    def fail(*_: Any) -> None:
        raise KeyError("after the PUT of .metadata")

    with mock.patch.object(checkpoint_files, "remove_others", fail), pytest.raises(RuntimeError) as error:
        _fit(1, save_to=url)
    return f"{error.value}"


def test_a_checkpoint_that_is_named_is_not_taken_for_a_failed_one(store: Store, expected: dict[str, Tensor]) -> None:
    url = f"{URL}/saved.ckpt"
    for message in run_on_ranks(2, _fails_after_naming, url):
        assert "after the PUT of .metadata" in message
    assert_close(_on(2, epochs=2, resume_from=url)[0], expected)


def test_ranks_read_their_own_bytes_alone(store: Store) -> None:
    """Also on another number of processes; momentum is as large as the weights."""
    width, url = 1024, f"{URL}/saved.ckpt"
    weights = _on(2, epochs=1, save_to=url, width=width)[0]
    num_bytes = 2 * sum(one.nbytes for one in weights.values())
    for num_ranks in (2, 3, 1):
        store.requests.clear()
        _on(num_ranks, epochs=1, resume_from=url, width=width)
        assert num_bytes <= store.num_received(".distcp") <= 1.05 * num_bytes


def test_requests_that_fail_are_repeated(store: Store, expected: dict[str, Tensor]) -> None:
    store.failing = 0.1
    url = f"{URL}/saved.ckpt"
    _on(2, epochs=1, save_to=url)
    for found in _on(3, epochs=2, resume_from=url):
        assert_close(found, expected)
    assert any(one.status == 503 for one in store.requests)
    assert any(one.status == 0 for one in store.requests)


@pytest.mark.exhaustive
def test_requests_that_are_never_answered_are_repeated(store: Store, expected: dict[str, Tensor]) -> None:
    """After the 15 s that s3fs waits by default."""
    store.failing, store.stalling = 0.1, 0.04
    url = f"{URL}/saved.ckpt"
    _on(2, epochs=1, save_to=url)
    for found in _on(2, epochs=2, resume_from=url):
        assert_close(found, expected)
    merge_fsdp_weights(url, f"{URL}/merged")
    store.failing = store.stalling = 0.0
    assert verify_merged(url, f"{URL}/merged").is_equal
    assert any(one.status == 0 for one in store.requests)


def _fails(url: str, saves: bool) -> str:
    from accelight.checkpoint import storage

    storage._LIMIT_S = 2.0
    with pytest.raises((RuntimeError, OSError)) as error:
        _fit(1, save_to=url if saves else "", resume_from=None if saves else url)
    return f"{error.value}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("saves", [True, False], ids=["saving", "loading"])
def test_a_store_that_is_down_is_an_error_on_every_rank(saves: bool, store: Store) -> None:
    url = f"{URL}/saved.ckpt"
    _on(2, epochs=1, save_to=url)
    store.is_down = True
    for message in run_on_ranks(2, _fails, url, saves, timeout_s=200):
        assert "s3://bucket/saved.ckpt" in message
        assert "secret-of-the-tests" not in message


def _keeps_best(folder: str) -> tuple[str, str, list[str]]:
    callback = two_best(folder)
    _fit(1, callbacks=[callback])
    return callback.best_model_path, callback.last_model_path, sorted(callback.best_k_models)


def _resumes_last(folder: str, which: str) -> dict[str, Tensor]:
    callback = ModelCheckpoint(folder, save_last=True, save_top_k=0)
    return _fit(2, callbacks=[callback], resume_from=which)


def test_model_checkpoint_keeps_the_best_and_the_last(store: Store, expected: dict[str, Tensor]) -> None:
    folder = f"{URL}/run"
    [(best, last, kept), _] = run_on_ranks(2, _keeps_best, folder)
    names = {name.partition("/")[0] for name in store.names("run/")}
    assert names == {path.rpartition("/")[2] for path in (*kept, last)}
    assert best in kept
    assert len(kept) == 2
    for which in (last, "last"):
        assert_close(run_on_ranks(2, _resumes_last, folder, which)[0], expected)


def _refuses_to_load(url: str) -> str:
    with pytest.raises(RuntimeError) as error:
        _fit(2, resume_from=url)
    return f"{error.value}"


def test_damaged_checkpoints_are_errors_that_name_the_object(store: Store) -> None:
    url, files = f"{URL}/saved.ckpt", store.files()
    _on(2, epochs=1, save_to=url)
    shard = next(name for name in store.names("saved.ckpt/") if name.endswith("__1_0.distcp"))
    damages: dict[str, tuple[str, bytes]] = {
        f"{shard} ends at byte": (shard, files.cat_file(f"{BUCKET}/saved.ckpt/{shard}")[:100]),
        f"{shard}": (shard, b""),
        ".metadata": (".metadata", b""),
        "accelight.json": (f"{shard.partition('/')[0]}/accelight.json", b"{}"),
        "meta.pt has": (f"{shard.partition('/')[0]}/meta.pt", b"short"),
    }
    for words, (name, content) in damages.items():
        whole = files.cat_file(f"{BUCKET}/saved.ckpt/{name}")
        files.pipe_file(f"{BUCKET}/saved.ckpt/{name}", content)
        for message in run_on_ranks(2, _refuses_to_load, url):
            assert words in message
            assert "process" in message
        files.pipe_file(f"{BUCKET}/saved.ckpt/{name}", whole)
    files.rm_file(f"{BUCKET}/saved.ckpt/{shard}")
    for message in run_on_ranks(2, _refuses_to_load, url):
        assert shard in message


def test_torch_reads_the_folder(store: Store, tmp_path: Path) -> None:
    url = f"{URL}/saved.ckpt"
    expected = _on(2, epochs=1, save_to=url)[0]
    target = {"state_dict": {name: torch.zeros_like(one) for name, one in expected.items()}}
    load(target, storage_reader=FsspecReader(url), no_dist=True)
    assert all(torch.equal(target["state_dict"][name], one) for name, one in expected.items())
    store.files().get(f"{BUCKET}/saved.ckpt/", f"{tmp_path}/saved.ckpt/", recursive=True)  # downloaded
    target = {"state_dict": {name: torch.zeros_like(one) for name, one in expected.items()}}
    load(target, storage_reader=FileSystemReader(tmp_path / "saved.ckpt"), no_dist=True)
    assert all(torch.equal(target["state_dict"][name], one) for name, one in expected.items())


def test_folders_of_torchs_writer_are_resumed(store: Store, expected: dict[str, Tensor], tmp_path: Path) -> None:
    """As Lightning's development version saves them: all objects in one folder, and ``meta.pt`` beside them."""
    local, url = tmp_path / "saved.ckpt", f"{URL}/saved.ckpt"
    weights = _on(2, epochs=1, save_to=str(local))[0]
    save({"state_dict": weights}, storage_writer=FsspecWriter(url), no_dist=True)
    files = store.files()
    assert ".metadata" in store.names("saved.ckpt/")
    files.pipe_file(f"{BUCKET}/saved.ckpt/meta.pt", (local / "meta.pt").read_bytes())
    for found in run_on_ranks(2, _weights_of, url):
        assert all(torch.equal(found[name], one) for name, one in weights.items())


def _weights_of(url: str) -> dict[str, Tensor]:
    strategy = AccelFSDPStrategy(fsdp_version=2, auto_wrap_policy={nn.Linear})
    trainer = quiet_trainer(strategy, dist.get_world_size())
    trainer.validate(_Validated(), data(), ckpt_path=url, verbose=False)
    return {name: one.clone() for name, one in full_state_dict(strategy).items()}


class _Validated(Module):
    def validation_step(self, batch: Tensor) -> None:
        self.net(batch)


class _Counting(Module):
    """All its weights are the number of steps: a checkpoint of two moments shows."""

    def __init__(self) -> None:
        super().__init__(256)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return -torch.stack([one.sum() for one in (self.net(batch) * 0).sum(0)]).sum()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            parameter.grad = -torch.ones_like(parameter)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def save_without_end(url: str) -> None:
    strategy = AccelFSDPStrategy(fsdp_version=2, auto_wrap_policy={nn.Linear}, state_dict_type="sharded_state_dict")
    trainer = quiet_trainer(strategy, 2, max_epochs=100, use_distributed_sampler=False, callbacks=[SaveEachStep(url)])
    trainer.fit(_Counting(), data())


def _weights_by_torch(url: str) -> dict[str, Tensor]:
    reader = FsspecReader(url)
    entries = reader.read_metadata().state_dict_metadata
    weights = {name: one for name, one in entries.items() if name.startswith("state_dict.")}
    state = {name: torch.zeros(one.size) for name, one in weights.items() if isinstance(one, TensorStorageMetadata)}
    load(state, storage_reader=reader, no_dist=True)
    return state


def _check_kills(store: Store, tmp_path: Path, num_times: int) -> None:
    _on(2, epochs=1, save_to=kill_saves(__name__, tmp_path, num_times, _weights_by_torch))
    assert len({name.partition("/")[0] for name in store.names("killed.ckpt/")}) == 2  # .metadata, and one generation


@pytest.mark.exhaustive
def test_killed_saves_leave_the_checkpoint_before_or_the_new_one(store: Store, tmp_path: Path) -> None:
    _check_kills(store, tmp_path, 1)


@pytest.mark.machines
@pytest.mark.timeout(1200)
def test_fifty_killed_saves(store: Store, tmp_path: Path) -> None:
    _check_kills(store, tmp_path, 50)


# ---------------------------------------------------------------------- reading without training
def _same_files(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    return names == sorted(path.name for path in other.iterdir()) and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


def test_merging_from_a_store_equals_merging_a_download(store: Store, tmp_path: Path) -> None:
    """In the command's process, where torch is not imported, and no more than the bytes of the weights are read."""
    url, local = f"{URL}/saved.ckpt", tmp_path / "saved.ckpt"
    weights = _on(2, epochs=1, save_to=url, width=1024)[0]
    num_bytes = sum(one.nbytes for one in weights.values())
    store.files().get(f"{BUCKET}/saved.ckpt/", f"{local}/", recursive=True)
    store.requests.clear()
    for source, into in ((url, "from_store"), (str(local), "from_disk")):
        assert main(["merge-weights", source, str(tmp_path / into), "--strip-prefix", "auto"]) == 0
        if source == url:
            assert num_bytes <= store.num_received(".distcp") <= 1.05 * num_bytes
    assert _same_files(tmp_path / "from_store", tmp_path / "from_disk")
    merged = load_file(tmp_path / "from_store" / "model.safetensors")
    assert all(torch.equal(merged[name.removeprefix("net.")], one) for name, one in weights.items())
    assert verify_merged(url, tmp_path / "from_store", strip_prefix="auto").is_equal
    assert load_state_dict(url).keys() == weights.keys()
    found = load_from_checkpoint(Module, url, width=1024)
    assert all(torch.equal(found.state_dict()[name], one) for name, one in weights.items())


def test_inspecting_reads_descriptions_alone(store: Store) -> None:
    url = f"{URL}/saved.ckpt"
    _on(2, epochs=1, save_to=url, width=1024)
    store.requests.clear()
    info = inspect_checkpoint(url)
    assert (info.global_step, info.has_optimizer) == (BATCHES, True)
    assert store.num_received(".distcp") == 0
    assert main(["inspect", url]) == 0


def _newest(folder: str) -> str | None:
    return newest_checkpoint(folder)


def test_the_newest_checkpoint_of_a_store_is_found(store: Store) -> None:
    folder = f"{URL}/run"
    assert newest_checkpoint(folder) is None
    _on(2, epochs=2, save_to=f"{folder}/late.ckpt", form="full_state_dict")
    _on(2, epochs=1, save_to=f"{folder}/early.ckpt")
    store.files().pipe_file(f"{BUCKET}/run/cut.ckpt/.metadata", b"cut off")
    with pytest.warns(UserWarning, match=r"skips s3://bucket/run/cut\.ckpt"):
        assert newest_checkpoint(folder) == f"{folder}/late.ckpt"
    assert run_on_ranks(2, _newest, folder) == [f"{folder}/late.ckpt"] * 2


def test_a_merge_can_remove_the_checkpoint(store: Store, tmp_path: Path) -> None:
    url = f"{URL}/saved.ckpt"
    _on(2, epochs=1, save_to=url)
    store.files().pipe_file(f"{BUCKET}/saved.ckpt/notes.txt", b"a user's")
    merge_fsdp_weights(url, tmp_path / "merged", remove_checkpoint_dir=True)
    assert store.names("saved.ckpt/") == ["notes.txt"]


def _begin_with(url: str, version: int) -> dict[str, Tensor]:
    strategy = AccelFSDPStrategy(fsdp_version=version, auto_wrap_policy={nn.Linear}, pretrained_weights=url)
    trainer = quiet_trainer(strategy, dist.get_world_size(), max_steps=0)
    module = Module(1024)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    trainer.fit(module, data())
    return {name: one.clone() for name, one in full_state_dict(strategy, module).items()}


@pytest.mark.core("True-2")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("shards", [True, False])
def test_first_weights_come_from_a_store(shards: bool, version: int, store: Store, tmp_path: Path) -> None:
    weights = Module(1024).state_dict()
    state = {"state_dict": weights}
    save(state, storage_writer=FileSystemWriter(tmp_path / "saved"), no_dist=True)
    merge_fsdp_weights(tmp_path / "saved", tmp_path / "merged", max_shard_size="3MB" if shards else None)
    store.files().put(f"{tmp_path}/merged/", f"{BUCKET}/base/", recursive=True)
    num_bytes = sum(one.nbytes for one in weights.values())
    for url in (f"{URL}/base",) if shards else (f"{URL}/base", f"{URL}/base/model.safetensors"):
        store.requests.clear()
        for found in run_on_ranks(2, _begin_with, url, version):
            assert all(torch.equal(found[name], one) for name, one in weights.items())
        assert num_bytes <= store.num_received(".safetensors") <= 1.05 * num_bytes
