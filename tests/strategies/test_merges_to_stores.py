"""Merges whose output is an object store: S3's protocol, and a store with folders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from accelight.callbacks import MergeShardedCheckpoint
from accelight.callbacks.merge_sharded_checkpoint import MergeJob, MergeOptions, MergeQueue
from accelight.checkpoint import CheckpointError, merge_fsdp_weights, verify_merged
from accelight.checkpoint.cli import main
from accelight.checkpoint.formats.base import DTYPES, Piece, SourceTensor
from accelight.checkpoint.names import Selection
from accelight.checkpoint.object_path import ObjectPath
from accelight.checkpoint.storage import ObjectFolder, stream_part_bytes
from accelight.checkpoint.writing import upload
from accelight.checkpoint.writing.copy import runs_of
from accelight.checkpoint.writing.plan import PlannedFile, make_plan
from accelight.strategies import AccelFSDPStrategy, full_state_dict
from tests.object_store import BUCKET, Store
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

URL = f"s3://{BUCKET}"
MIB = 2**20


def _weights(rows: int = 2048, layers: int = 2) -> dict[str, Tensor]:
    """Matrices of ``rows`` KiB, and small tensors beside each."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(layers):
        weights[f"layer{layer}.norm"] = torch.randn(1001, generator=generator)
        weights[f"layer{layer}.matrix"] = torch.randn(rows, 256, generator=generator)
        weights[f"layer{layer}.half"] = torch.randn(333, 3, generator=generator).to(torch.bfloat16)
    return weights


def _save(folder: Path, weights: dict[str, Tensor]) -> Path:
    save({"state_dict": weights}, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


def _merged(store: Store, name: str) -> dict[str, Tensor]:
    return load(store.files().cat_file(f"{BUCKET}/{name}/model.safetensors"))


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert found[name].dtype == one.dtype
        assert torch.equal(found[name], one), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(tmp_path_factory.mktemp("local") / "saved", _weights(16 * 1024))


@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"max_shard_size": "17MB"}, {"safe_serialization": False}])
def test_the_output_equals_that_on_a_disk(options: dict[str, Any], store: Store, saved: Path, tmp_path: Path) -> None:
    local = merge_fsdp_weights(saved, tmp_path / "merged", **options)
    report = merge_fsdp_weights(saved, f"{URL}/merged", **options)
    assert (report.files, report.num_bytes) == (local.files, local.num_bytes)
    for name in report.files:
        assert store.files().cat_file(f"{BUCKET}/merged/{name}") == (tmp_path / "merged" / name).read_bytes()
    assert store.names("merged/") == sorted(report.files)
    assert verify_merged(saved, f"{URL}/merged", dtype=options.get("dtype")).is_equal


@st.composite
def _files(draw: st.DrawFn) -> PlannedFile:
    """Tensors of up to 40 MiB, cut along the first dimension, of which objects of the store hold some."""
    tensors, names = {}, {}
    places = dict.fromkeys(("store/a", "store/b", "disk"), 0)
    for number, (is_large, rows) in enumerate(draw(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=8))):
        width = MIB if is_large else 7
        cuts = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=3))})
        pieces = []
        for first, last in pairwise(cuts):
            place = draw(st.sampled_from(list(places)))
            places[place] += draw(st.sampled_from([0, 0, 64]))
            pieces.append(Piece(Path(place), places[place], (first, 0), (last - first, width)))
            places[place] += (last - first) * width
        name = f"{number}"
        tensors[name], names[name] = SourceTensor(name, DTYPES["uint8"], (rows, width), tuple(pieces)), name
    tensors["last"], names["last"] = SourceTensor("last", DTYPES["uint8"], (0,), ()), "last"
    return make_plan(Selection(names, {}, {}), tensors, by_size=draw(st.booleans())).files[0]


@given(_files(), st.sampled_from([9_000, 4]))
def test_parts_are_as_the_protocol_wants_them(file: PlannedFile, max_parts: int) -> None:
    """They adjoin, have 5 MiB but for the last, are not too many, and copies are the tensors' own bytes."""
    with mock.patch.object(upload, "_MAX_PARTS", max_parts):
        parts = list(upload.parts_of(file, lambda run: run.path.parent == Path("store")))
    assert [one.begin for one in parts] == [0, *(one.end for one in parts[:-1])]
    assert parts[-1].end == file.num_bytes
    assert all(one.end - one.begin >= 5 * MIB for one in parts[:-1])
    assert len(parts) <= max_parts + 1
    runs = [(tensor.start, run) for tensor in file.tensors for run in runs_of(tensor) or ()]
    for part in parts:
        if part.run is None:
            continue
        assert part.run.num_bytes == part.end - part.begin
        position, source = part.begin, part.run.source
        while position < part.end:
            start, run = next(
                (start, run)
                for start, run in runs
                if start + run.target <= position < start + run.target + run.num_bytes
            )
            assert (run.path, run.source + position - start - run.target) == (part.run.path, source)
            step = start + run.target + run.num_bytes - position
            position, source = position + step, source + step


def test_the_store_copies_what_it_has(store: Store, saved: Path) -> None:
    """Of 32 MiB, what is sent and read is a part of 5 MiB at most: the header's, with the small tensors."""
    store.files().put(f"{saved}/", f"{BUCKET}/saved.ckpt/", recursive=True)
    store.requests.clear()
    merge_fsdp_weights(f"{URL}/saved.ckpt", f"{URL}/merged")
    sent = sum(one.num_sent for one in store.requests if one.method in ("PUT", "POST"))
    assert sent < 5.1 * MIB
    assert store.num_received(".distcp") < 5.2 * MIB  # with the records' headers
    _assert_equal(_merged(store, "merged"), _weights(16 * 1024))
    assert main(["verify", f"{URL}/saved.ckpt", f"{URL}/merged"]) == 0


@pytest.mark.exhaustive
def test_small_requests_are_made_at_once(store: Store, tmp_path: Path) -> None:
    """Not one after the other: of 80 tensors each needs some, and the store takes 50 ms for an answer."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"{n:03}": torch.randn(300, 60 + n % 20, generator=generator) for n in range(80)}
    store.files().put(f"{_save(tmp_path / 'saved', weights)}/", f"{BUCKET}/saved.ckpt/", recursive=True)
    store.requests.clear()
    store.latency_s = 0.05
    merge_fsdp_weights(f"{URL}/saved.ckpt", f"{URL}/merged")
    assert max(one.at_once for one in store.requests) >= 4
    _assert_equal(_merged(store, "merged"), weights)


@pytest.mark.exhaustive
def test_what_passes_through_this_process_does_not_grow(store: Store, tmp_path: Path) -> None:
    """Of 32 MiB and of 128, a part of 5 MiB is read and sent: of two tensors of 270 MiB, that is below 1 %."""
    for rows in (16 * 1024, 64 * 1024):
        weights = _weights(rows)
        name = f"{rows}.ckpt"
        store.files().put(f"{_save(tmp_path / name, weights)}/", f"{BUCKET}/{name}/", recursive=True)
        store.requests.clear()
        assert main(["merge-weights", f"{URL}/{name}", f"{URL}/merged"]) == 0
        passed = sum(
            one.num_sent + one.num_received for one in store.requests if ".ckpt" in one.path or "merged" in one.path
        )
        assert passed < 10.5 * MIB
        _assert_equal(_merged(store, "merged"), weights)


def test_a_merge_replaces_an_earlier_one(store: Store, saved: Path, tmp_path: Path) -> None:
    merge_fsdp_weights(saved, f"{URL}/merged", max_shard_size="17MB")
    store.files().pipe_file(f"{BUCKET}/merged/notes.txt", b"a user's")
    report = merge_fsdp_weights(saved, f"{URL}/merged", max_shard_size="30MB")
    assert store.names("merged/") == sorted([*report.files, "notes.txt"])
    with pytest.raises(ValueError, match=r"s3://bucket/merged holds .*, which loaders prefer to pytorch_model\.bin"):
        merge_fsdp_weights(saved, f"{URL}/merged", safe_serialization=False)


def test_a_checkpoint_is_compared_and_removed(store: Store, saved: Path) -> None:
    store.files().put(f"{saved}/", f"{BUCKET}/saved.ckpt/", recursive=True)
    merge_fsdp_weights(f"{URL}/saved.ckpt", f"{URL}/merged", remove_checkpoint_dir=True)
    assert store.names("") == ["merged/model.safetensors"]
    _assert_equal(_merged(store, "merged"), _weights(16 * 1024))


def test_a_checkpoint_is_removed_with_the_options_that_it_was_read_with(
    store: Store, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.files().put(f"{saved}/", f"{BUCKET}/saved.ckpt/", recursive=True)
    given = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"], "key": "key-of-the-tests", "secret": "secret-of-the-tests"}
    for name in store.environment:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    merge_fsdp_weights(f"{URL}/saved.ckpt", f"{URL}/merged", remove_checkpoint_dir=True, storage_options=given)
    monkeypatch.undo()
    assert store.names("") == ["merged/model.safetensors"]


def test_an_index_by_its_url_is_compared(store: Store, saved: Path) -> None:
    merge_fsdp_weights(saved, f"{URL}/merged", max_shard_size="17MB")
    assert verify_merged(saved, f"{URL}/merged/model.safetensors.index.json").is_equal


def test_uploads_that_may_not_be_listed_stay(store: Store, saved: Path) -> None:
    store.hides_uploads = True
    merge_fsdp_weights(saved, f"{URL}/merged")
    _assert_equal(_merged(store, "merged"), _weights(16 * 1024))


def test_requests_that_fail_are_repeated(store: Store, saved: Path) -> None:
    store.failing = 0.1
    merge_fsdp_weights(saved, f"{URL}/merged", max_shard_size="17MB", verify=True)
    store.failing = 0.0
    assert verify_merged(saved, f"{URL}/merged").is_equal


def test_lost_answers_are_no_errors(store: Store, saved: Path) -> None:
    """The store has put an object's parts together; the request that is repeated finds no upload."""
    store.losing = "POST uploadId"
    merge_fsdp_weights(saved, f"{URL}/merged", verify=True)
    with ObjectFolder(URL).writing("streamed") as stream:
        stream.write(bytes(17 * MIB))
    assert store.files().info(f"{BUCKET}/streamed")["size"] == 17 * MIB
    assert [one.path for one in store.requests if one.status == 404 and "uploadId" in one.query]
    other = ObjectFolder(URL).begin_upload("other")
    other.put(1, b"one")
    store.files().pipe_file(f"{BUCKET}/other", b"another's")
    other.abort()
    with pytest.raises(FileNotFoundError, match="writing s3://bucket/other"):
        other.complete()


def test_what_cannot_be_written_is_named_and_leaves_nothing(store: Store, saved: Path) -> None:
    store.forbidden = "merged"
    with pytest.raises(PermissionError, match=r"writing s3://bucket/merged/model\.safetensors"):
        merge_fsdp_weights(saved, f"{URL}/merged")
    store.forbidden = ""
    assert store.names("") == []


def test_a_damaged_source_leaves_the_output_before(store: Store, saved: Path, tmp_path: Path) -> None:
    merge_fsdp_weights(saved, f"{URL}/merged")
    before = store.files().cat_file(f"{BUCKET}/merged/model.safetensors")
    damaged = _save(tmp_path / "saved", {name: 2 * one for name, one in _weights(16 * 1024).items()})
    [data] = damaged.glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 4] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="CRC"):
        merge_fsdp_weights(damaged, f"{URL}/merged", verify=True)
    assert store.files().cat_file(f"{BUCKET}/merged/model.safetensors") == before
    assert _uploads(store) == []


def _uploads(store: Store) -> list[str]:
    return [one["Key"] for one in store.files().list_multipart_uploads(BUCKET)]


def test_a_killed_merge_leaves_the_output_before(store: Store, saved: Path, tmp_path: Path) -> None:
    merge_fsdp_weights(saved, f"{URL}/merged")
    before = store.files().cat_file(f"{BUCKET}/merged/model.safetensors")
    other = _save(tmp_path / "saved", {name: 2 * one for name, one in _weights(16 * 1024).items()})
    store.latency_s = 1.0
    store.requests.clear()
    merge = subprocess.Popen([sys.executable, "-m", "accelight", "merge-weights", str(other), f"{URL}/merged"])
    deadline = time.monotonic() + 60
    while not any(one.method == "PUT" for one in store.requests):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(merge.pid, signal.SIGKILL)
    merge.wait()
    store.latency_s = 0.0
    assert store.files().cat_file(f"{BUCKET}/merged/model.safetensors") == before
    assert _uploads(store) == ["merged/model.safetensors"]
    merge_fsdp_weights(other, f"{URL}/merged")
    assert _uploads(store) == []
    assert torch.equal(_merged(store, "merged")["layer0.norm"], 2 * _weights()["layer0.norm"])


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "17MB"}, {"safe_serialization": False}, {"verify": True}])
def test_a_store_with_folders_gets_whole_files(options: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    url = f"memory:/{tmp_path}/merged"
    report = merge_fsdp_weights(saved, url, **options)
    merge_fsdp_weights(saved, url, **options)
    merge_fsdp_weights(saved, tmp_path / "merged", **options)
    assert ObjectFolder(url).names() == sorted(report.files)
    for name in report.files:
        with fsspec.open(f"{url}/{name}", "rb") as stream:
            assert stream.read() == (tmp_path / "merged" / name).read_bytes()


# ------------------------------------------------------------------------------------------------
# During training.


def train(
    output: str,
    checkpoints: str | None,
    form: str = "sharded_state_dict",
    asynchronous: bool = False,
    when: Any = "fit_end",
) -> tuple[dict[str, Tensor], dict[str, str]]:
    strategy = AccelFSDPStrategy(fsdp_version=2, state_dict_type=form, async_save=asynchronous)
    merge = MergeShardedCheckpoint(output, when)
    callbacks: list[Callback] = [merge]
    if checkpoints is not None:
        callbacks.append(ModelCheckpoint(checkpoints, filename="{epoch}", save_top_k=1, monitor="epoch", mode="max"))
    trainer = quiet_trainer(
        strategy, 2, max_epochs=2, callbacks=callbacks, enable_checkpointing=checkpoints is not None,
        limit_train_batches=2,
    )  # fmt: skip
    trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
    return {name: one.clone() for name, one in full_state_dict(strategy).items()}, merge.merged


@pytest.mark.core("True")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_of_a_run_are_merged_in_the_store(asynchronous: bool, store: Store) -> None:
    """The first one waits for its merge before `ModelCheckpoint` has it removed."""
    arguments = (f"{URL}/merged", f"{URL}/run", "sharded_state_dict", asynchronous, "every_save")
    (weights, merged), _ = run_on_ranks(2, train, *arguments, timeout_s=100)
    assert merged == {f"{URL}/run/epoch={n}.ckpt": f"{URL}/merged/epoch={n}" for n in (0, 1)}
    _assert_equal(_merged(store, "merged/epoch=1"), weights)
    assert store.names("merged/") == [f"epoch={n}/model.safetensors" for n in (0, 1)]
    assert {name.partition("/")[0] for name in store.names("run/")} == {"epoch=1.ckpt"}


@pytest.mark.exhaustive
def test_the_end_of_a_fit_without_checkpoints_leaves_the_model_alone(store: Store) -> None:
    (weights, merged), _ = run_on_ranks(2, train, f"{URL}/merged", None, timeout_s=100)
    assert list(merged.values()) == [f"{URL}/merged"]
    _assert_equal(_merged(store, "merged"), weights)
    assert store.names("") == ["merged/model.safetensors"]


def _save_safetensors(version: int, url: str, dtype: str | None) -> dict[str, Tensor]:
    strategy = AccelFSDPStrategy(fsdp_version=version)
    trainer = quiet_trainer(strategy, 2, max_epochs=1, limit_train_batches=2)
    trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
    report = strategy.save_safetensors(url, dtype=dtype)
    assert (report.files, str(report.destination)) == (("model.safetensors",), url)
    with pytest.raises(ValueError, match="A size must be"):
        strategy.save_safetensors(f"{url}/other", max_shard_size="much")
    with pytest.raises(ValueError, match=r"a\.safetensors: in an object store, pass the folder"):
        strategy.save_safetensors(f"{url}/a.safetensors")
    return {name: one.clone() for name, one in full_state_dict(strategy).items()}


@pytest.mark.core("2-bf16")
@pytest.mark.parametrize(("version", "dtype"), [(1, None), (2, "bf16")])
def test_save_safetensors_writes_into_a_store(version: int, dtype: str | None, store: Store) -> None:
    weights = run_on_ranks(2, _save_safetensors, version, f"{URL}/merged", dtype, timeout_s=100)[0]
    _assert_equal(_merged(store, "merged"), {name: one.bfloat16() if dtype else one for name, one in weights.items()})
    assert store.names("") == ["merged/model.safetensors"]


def _train_in_one_file() -> None:
    with pytest.raises(ValueError, match=r"epoch=0\.ckpt: MergeShardedCheckpoint merges sharded checkpoints from"):
        train(f"{URL}/merged", f"{URL}/run", "full_state_dict")


def test_checkpoints_in_one_object_are_refused(store: Store) -> None:
    run_on_ranks(2, _train_in_one_file)
    assert store.names("") == []


def _train_into(folder: str) -> None:
    train(f"{URL}/merged", folder)


def _fail_to_merge(folder: str) -> None:
    with pytest.raises(CheckpointError, match=r"1 of 1 merges failed.*writing s3://bucket/merged/model"):
        _train_into(folder)


def test_a_merge_that_may_not_write_is_an_error_on_all_processes(store: Store, tmp_path: Path) -> None:
    store.forbidden = "merged"
    run_on_ranks(2, _fail_to_merge, str(tmp_path))
    store.forbidden = ""
    assert store.names("") == []


def test_companions_go_into_the_store(store: Store, saved: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "words.txt").write_text("a b")

    queue = MergeQueue(MergeOptions(("--no-adapter",)))
    job = MergeJob(saved, ObjectPath(ObjectFolder(f"{URL}/merged"), "", {}), write_companions=write)
    queue.submit(job)
    queue.drain()
    assert job.error is None
    assert store.names("merged/") == ["model.safetensors", "words.txt"]


def test_streams_have_no_more_parts_than_s3_takes() -> None:
    sizes = [stream_part_bytes(number) for number in range(10_000)]
    assert min(sizes) >= 5 * 2**20
    assert max(sizes) < 2**28
    assert sum(sizes) > 700 * 2**30  # an object of one rank


_MERGES = """
import sys, threading, s3fs
from accelight.checkpoint import merge_fsdp_weights


def resident():
    own = [int(one) * 4096 for one in open("/proc/self/statm").read().split()[1:3]]
    return own[0] - own[1]  # without pages of mapped files


s3fs.S3FileSystem().find("bucket")  # imports what it needs
before, peaks, ends = resident(), [0], threading.Event()


def watch():
    while not ends.wait(0.005):
        peaks.append(resident() - before)


thread = threading.Thread(target=watch)
thread.start()
merge_fsdp_weights(sys.argv[1], sys.argv[2], progress=False)
ends.set()
thread.join()
print(max(peaks))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
@pytest.mark.parametrize("side", [1024, 2048], ids=["small tensors", "large tensors"])
def test_merges_take_little_memory(side: int, store: Store, tmp_path: Path) -> None:
    state = {"state_dict": {f"w{index}": torch.randn(side, side) for index in range(100 * 2**20 // (4 * side * side))}}
    save(state, storage_writer=FileSystemWriter(tmp_path / "saved"), no_dist=True)
    store.files().put(str(tmp_path / "saved"), f"{BUCKET}/saved", recursive=True)
    places = [(str(tmp_path / "saved"), f"{URL}/one"), (f"{URL}/saved", f"{URL}/two"), (f"{URL}/saved", "three")]
    for source, target in places:
        target = str(tmp_path / target) if target == "three" else target
        done = subprocess.run(
            [sys.executable, "-c", _MERGES, source, target], capture_output=True, text=True, check=True
        )
        assert int(done.stdout.strip().splitlines()[-1]) < 64 * 2**20, (source, target)
