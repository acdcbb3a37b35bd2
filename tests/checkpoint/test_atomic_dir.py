"""What stands in the output folder: all of the result or nothing of it, whatever happens on the way."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import accelight.checkpoint.atomic_dir as writer
from accelight.checkpoint import CheckpointError, merge_fsdp_weights
from tests.checkpoint import damage, kills
from tests.checkpoint.saving import save


@pytest.fixture(params=["without a name", "hidden name"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with files that have no name until they are complete, and with those of file systems that cannot do that."""
    if request.param == "hidden name":
        monkeypatch.delattr(os, "O_TMPFILE")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return damage.good(tmp_path / "in", a=torch.randn(1000, 900), b=torch.ones(5))


@pytest.mark.usefixtures("both_ways")
def test_nothing_else_stays_in_the_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/config.json").write_text("{}")
    merge_fsdp_weights(folder, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]


@pytest.mark.usefixtures("both_ways")
def test_a_file_of_that_name_is_replaced(folder: Path, tmp_path: Path) -> None:
    for values in (torch.zeros(3), torch.ones(3)):
        save(folder, {"model": {"w": values}})
        merge_fsdp_weights(folder, tmp_path / "out")
        assert torch.equal(load_file(tmp_path / "out/model.safetensors")["w"], values)
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


@pytest.mark.usefixtures("both_ways")
def test_permissions_are_those_of_a_new_file(folder: Path, tmp_path: Path) -> None:
    merge_fsdp_weights(folder, tmp_path / "out")
    (tmp_path / "new").touch()
    assert (tmp_path / "out/model.safetensors").stat().st_mode == (tmp_path / "new").stat().st_mode


KILLED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # below nohup and `&` it is ignored
if sys.argv[3] == "hidden name":
    del os.O_TMPFILE
from accelight.checkpoint import merge_fsdp_weights
def kill(done, total):
    os.kill(os.getpid(), int(sys.argv[4]))
merge_fsdp_weights(sys.argv[1], sys.argv[2], threads=1, progress=kill)
"""


@pytest.mark.parametrize("way", ["without a name", "hidden name"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_on_the_way(folder: Path, tmp_path: Path, way: str, number: signal.Signals) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model.safetensors").write_text("old")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    command = [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "out"), way, str(int(number))]
    assert subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == -number
    left = os.listdir(tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_text() == "old"
    assert {name for name in left if not name.startswith(".")} == {"model.safetensors"}
    if way == "without a name" or number == signal.SIGINT:
        assert left == ["model.safetensors"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_killed_between_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several files some have their names already: the index, without which they do not count, has none."""
    folder = damage.good(tmp_path / "in", **{f"w{i}": torch.full((10,), float(i)) for i in range(4)})
    merge_fsdp_weights(folder, tmp_path / "out", max_shard_size=40)
    placed: list[str] = []
    replace = os.replace

    def stop_at_the_third(source: Path, target: Path) -> None:
        if len(placed) == 2:
            assert not (tmp_path / "out/model.safetensors.index.json").exists()
            raise OSError(errno.EIO, "the disk went away")
        placed.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop_at_the_third)
    with pytest.raises(OSError, match="the disk went away"):
        merge_fsdp_weights(folder, tmp_path / "out", max_shard_size=40)
    assert not [name for name in os.listdir(tmp_path / "out") if name in placed or name.startswith(".")]


@pytest.mark.usefixtures("both_ways")
def test_a_new_folder_appears_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = damage.good(tmp_path / "in", **{f"w{i}": torch.full((10,), float(i)) for i in range(4)})
    rename = os.rename
    seen: list[list[str]] = []

    def look(source: Path, target: Path) -> None:
        assert not target.exists()
        rename(source, target)
        seen.append(sorted(os.listdir(target)))

    monkeypatch.setattr(os, "rename", look)
    report = merge_fsdp_weights(folder, tmp_path / "out", max_shard_size=40)
    assert seen == [sorted(report.files)]
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_an_error_while_a_new_folder_appears(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, "the disk went away")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="the disk went away"):
        merge_fsdp_weights(folder, tmp_path / "er/out")
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.usefixtures("both_ways")
def test_an_error_on_the_way_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise RuntimeError("stop")

    for output in (tmp_path / "out", tmp_path / "new/er/out"):
        with pytest.raises(RuntimeError, match="stop"):
            merge_fsdp_weights(folder, output, progress=stop)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "new").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of 2 MB; where that is not allowed, the test has no disk to fill."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(path)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.usefixtures("both_ways")
def test_too_little_disk_is_an_error_before_writing(folder: Path, small_disk: Path) -> None:
    with pytest.raises(OSError, match=r"needs 36\d+ bytes, but the disk has \d+ free") as caught:
        merge_fsdp_weights(folder, small_disk / "out")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(small_disk) == []


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("safe", [True, False])
def test_the_disk_fills_up_meanwhile(
    folder: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, safe: bool
) -> None:
    monkeypatch.setattr(writer.AtomicFolder, "check_space", lambda *_: None)  # as if there had been room
    with pytest.raises((OSError, RuntimeError)):  # torch.save says RuntimeError
        merge_fsdp_weights(folder, small_disk / "out", safe)
    assert os.listdir(small_disk) == []


def test_the_disk_fills_up_where_nothing_can_be_reserved(
    folder: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer.AtomicFolder, "check_space", lambda *_: None)
    monkeypatch.delattr(os, "posix_fallocate")
    with pytest.raises(OSError, match="No space left"):
        merge_fsdp_weights(folder, small_disk / "out")
    assert os.listdir(small_disk) == []


def test_a_file_size_limit(folder: Path, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            merge_fsdp_weights(folder, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "out").exists()


# --- what else is in the folder


def test_other_weights_that_would_be_loaded_instead(folder: Path, tmp_path: Path) -> None:
    merge_fsdp_weights(folder, tmp_path / "out")
    for options in ({"max_shard_size": 100}, {"safe_serialization": False}):
        with pytest.raises(ValueError, match=r"holds model\.safetensors, which loaders prefer to "):
            merge_fsdp_weights(folder, tmp_path / "out", **options)


def test_another_split_replaces_the_old_one(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in", **{f"w{i}": torch.ones(10) for i in range(4)})
    merge_fsdp_weights(folder, tmp_path / "out", max_shard_size=40)
    (tmp_path / "out/model-00001-of-00009.safetensors").write_text("not named by the index: somebody else's")
    report = merge_fsdp_weights(folder, tmp_path / "out", max_shard_size=80)
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*report.files, "model-00001-of-00009.safetensors"])


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": {"a": "../in/.metadata", "b": 3, "c": "x/model.bin"}}'])
def test_an_old_index_removes_nothing_it_should_not(tmp_path: Path, index: str) -> None:
    folder = damage.good(tmp_path / "in", **{f"w{i}": torch.ones(10) for i in range(4)})
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model.safetensors.index.json").write_text(index)
    merge_fsdp_weights(folder, tmp_path / "out", max_shard_size=40)
    assert (folder / ".metadata").is_file()


def test_a_file_where_the_folder_should_be(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(ValueError, match=r"output_path is the folder to write into; .* is a file"):
        merge_fsdp_weights(folder, tmp_path / "out")


def test_a_files_name_where_the_folders_should_be(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Pass its parent folder"):
        merge_fsdp_weights(folder, tmp_path / "out/model.safetensors")


def test_a_folder_that_may_not_be_written(folder: Path) -> None:
    with pytest.raises(OSError, match=r"proc"):
        merge_fsdp_weights(folder, "/proc/merged")


def test_inside_the_checkpoint(folder: Path) -> None:
    merge_fsdp_weights(folder, folder / "merged")
    assert (folder / "merged/model.safetensors").is_file()


# --- verify and remove


@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"safe_serialization": False}])
def test_verify_finds_a_byte_that_is_not_the_sources(
    folder: Path, tmp_path: Path, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    forget = writer.AtomicFolder.forget_cache

    def damage_it(self: writer.AtomicFolder) -> None:
        for fd, _ in self._files.values():
            position = os.fstat(fd).st_size // 2
            os.pwrite(fd, bytes([os.pread(fd, 1, position)[0] ^ 1]), position)
        forget(self)

    monkeypatch.setattr(writer.AtomicFolder, "forget_cache", damage_it)
    with pytest.raises(CheckpointError, match=r"tensor 'a' read back differs from its source"):
        merge_fsdp_weights(folder, tmp_path / "out", verify=True, **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=r"read back differs"):
        merge_fsdp_weights(folder, tmp_path / "out", remove_checkpoint_dir=True, **options)  # type: ignore[arg-type]
    assert (folder / ".metadata").is_file()


def test_verify_finds_a_changed_header(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage_it(self: writer.AtomicFolder) -> None:
        for fd, _ in self._files.values():
            os.pwrite(fd, b"X", 20)

    monkeypatch.setattr(writer.AtomicFolder, "forget_cache", damage_it)
    with pytest.raises(CheckpointError, match="the header read back is not the one written"):
        merge_fsdp_weights(folder, tmp_path / "out", verify=True)


def test_remove_takes_the_merged_folder_alone(tmp_path: Path) -> None:
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        save(tmp_path / "in" / name, {"model": {"w": torch.ones(3)}})
    report = merge_fsdp_weights(tmp_path / "in", tmp_path / "out", True, True)
    assert report.verified
    assert os.listdir(tmp_path / "in") == ["optimizer_0"]
    assert (tmp_path / "out/model.safetensors").is_file()


def test_remove_leaves_what_others_have_put_into_the_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "merged").mkdir()
    (folder / "merged/model.safetensors").write_text("an earlier result")
    merge_fsdp_weights(folder, tmp_path / "out", remove_checkpoint_dir=True)
    assert [str(path.relative_to(folder)) for path in folder.rglob("*")] == ["merged", "merged/model.safetensors"]


@pytest.mark.parametrize("inside", ["", "merged", "a/b"])
def test_remove_with_the_output_inside(folder: Path, inside: str) -> None:
    with pytest.raises(ValueError, match="would remove the output with it"):
        merge_fsdp_weights(folder, folder / inside, remove_checkpoint_dir=True)
    assert (folder / ".metadata").is_file()


def test_remove_through_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ValueError, match="is a link"):
        merge_fsdp_weights(tmp_path / "link", tmp_path / "out", remove_checkpoint_dir=True)
    assert (folder / ".metadata").is_file()


def test_nothing_is_removed_after_an_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        merge_fsdp_weights(folder, tmp_path / "out", remove_checkpoint_dir=True, include="no such name")
    assert (folder / ".metadata").is_file()


def test_kills_at_random_moments(tmp_path: Path) -> None:
    """A short run of ``python -m tests.checkpoint.kills``."""
    assert sum(kills.kill_merges(tmp_path, 6, seed=0).values()) == 6
