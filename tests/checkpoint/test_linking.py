"""Merging where files can share blocks: next to nothing is written, and the output is the same as a copy."""

from __future__ import annotations

import errno
import filecmp
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save

from accelight.checkpoint import merge_fsdp_weights
from accelight.checkpoint.cli import main
from accelight.strategies.fsdp.checkpoint.writer import FolderWriter
from tests.disk_images import mounted, used_bytes
from tests.small_disk import fill


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    whole = {f"layers.{n}.weight": torch.randn(1024, 1536) for n in range(4)}
    small = {f"layers.{n}.bias": torch.randn(1001) for n in range(4)}
    return whole | small | {"embed.weight": torch.randn(3001, 600).bfloat16().repeat(1, 2)}  # fills no whole block


def save_aligned(folder: Path) -> dict[str, torch.Tensor]:
    """Save as the strategy does."""
    state = weights()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"model": state}, storage_writer=FolderWriter(folder), no_dist=True)
    return state


@pytest.fixture(params=["xfs", "btrfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with mounted(request.param, tmp_path / "disk") as folder:
        yield folder


def assert_holds(file: Path, state: dict[str, torch.Tensor]) -> None:
    merged = load_file(file)
    assert merged.keys() == state.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in state.items())


def written_bytes() -> int:
    """Return what this process has had written to disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


def test_one_in_a_hundred_bytes_is_written(disk: Path, tmp_path: Path) -> None:
    state = save_aligned(disk / "in")
    used, written = used_bytes(disk), written_bytes()
    report = merge_fsdp_weights(disk / "in", disk / "out")
    assert used_bytes(disk) - used <= 0.01 * report.num_bytes
    assert written_bytes() - written <= 0.01 * report.num_bytes
    assert report.num_linked_bytes >= 0.99 * report.num_bytes
    assert "linked" in str(report)
    assert_holds(disk / "out/model.safetensors", state)
    copied = merge_fsdp_weights(disk / "in", tmp_path / "copied", verify=True)  # another disk
    assert copied.num_linked_bytes == 0
    merge_fsdp_weights(disk / "in", disk / "copied", reflink=False)
    assert filecmp.cmp(disk / "copied/model.safetensors", tmp_path / "copied/model.safetensors", shallow=False)
    save_file(state, tmp_path / "library.safetensors", {"format": "pt"})
    assert filecmp.cmp(tmp_path / "library.safetensors", tmp_path / "copied/model.safetensors", shallow=False)


@pytest.mark.core("xfs")
def test_the_output_outlives_the_shards(disk: Path) -> None:
    state = save_aligned(disk / "in")
    shard = disk / "in/__0_0.distcp"
    merge_fsdp_weights(disk / "in", disk / "out")
    shard.write_bytes(bytes(shard.stat().st_size))  # into the shared blocks
    assert_holds(disk / "out/model.safetensors", state)
    save_aligned(disk / "other")
    report = merge_fsdp_weights(disk / "other", disk / "out2", remove_checkpoint_dir=True)
    assert report.num_linked_bytes
    assert not (disk / "other").exists()
    fill(disk / "full")  # takes every block that was freed
    assert_holds(disk / "out2/model.safetensors", state)


@pytest.mark.core("xfs")
def test_several_files(disk: Path) -> None:
    state = save_aligned(disk / "in")
    report = merge_fsdp_weights(disk / "in", disk / "out", max_shard_size="14MB", verify=True)
    assert len(report.files) > 2
    assert report.num_linked_bytes >= 0.99 * report.num_bytes
    merged = {name: tensor for file in report.files[:-1] for name, tensor in load_file(disk / "out" / file).items()}
    assert all(torch.equal(merged[name], tensor) for name, tensor in state.items())


@pytest.mark.core("xfs")
def test_links_need_no_room(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_aligned(disk / "in")
    fill(disk / "full", 16 * 2**20)
    os.sync()  # btrfs gives room back then
    command = ["merge-weights", str(disk / "in"), str(disk / "out"), "--quiet"]
    assert main([*command, "--no-reflink"]) == 1
    assert f"[Errno {errno.ENOSPC}]" in capsys.readouterr().err
    assert main(command) == 0
