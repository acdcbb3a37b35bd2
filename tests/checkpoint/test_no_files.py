"""Folders, FIFOs and dead links in the place of files: an error at once, never a wait."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accelight.checkpoint import (
    CheckpointError,
    inspect_checkpoint,
    merge_fsdp_weights,
    read_manifest,
    verify_merged,
    write_manifest,
)
from tests.checkpoint import damage
from tests.checkpoint.zero_damage import OPTIMIZER

KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder": (Path.mkdir, "is a folder"),
    "fifo": (os.mkfifo, "is a FIFO"),
    "dead link": (lambda path: path.symlink_to("nowhere"), "is a broken link"),
}
OTHER_WORDS = "not a regular file|which is not there|not found in"
"""For files that a description names."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "accelight.json"])
def test_dcp_files_that_are_no_files_are_errors(tmp_path: Path, name: str, kind: str) -> None:
    make, words = KINDS[kind]
    folder = damage.good(tmp_path / "in")
    write_manifest(folder, model_prefix="model")
    merge_fsdp_weights(folder, tmp_path / "out")
    (folder / name).unlink()
    make(folder / name)
    match = rf"{name.replace('.', '[.]')}'?.*({words}|{OTHER_WORDS})"
    with pytest.raises(CheckpointError, match=match):
        merge_fsdp_weights(folder, tmp_path / "again")
    with pytest.raises(CheckpointError, match=match):
        inspect_checkpoint(folder)
    with pytest.raises(CheckpointError, match=match):
        verify_merged(folder, tmp_path / "out")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_meta_file_or_manifest_that_is_no_file_is_an_error(tmp_path: Path, kind: str) -> None:
    make, words = KINDS[kind]
    folder = damage.good(tmp_path / "in")
    make(folder / "meta.pt")
    (note,) = inspect_checkpoint(folder).notes
    assert words in note
    make(folder / "accelight.json")
    with pytest.raises(CheckpointError, match=words):
        read_manifest(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_results_that_are_no_files_are_errors(tmp_path: Path, kind: str) -> None:
    make, words = KINDS[kind]
    folder = damage.good(tmp_path / "in")
    for name in ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"):
        make(tmp_path / name)
        with pytest.raises(CheckpointError, match=f"{words}|does not exist|holds none of"):
            verify_merged(folder, tmp_path / name)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_files_that_are_no_files_are_errors(
    zero_checkpoints: tuple[Path, dict[str, str]], tmp_path: Path, kind: str
) -> None:
    make, words = KINDS[kind]
    folder = tmp_path / "in"
    shutil.copytree(zero_checkpoints[0] / "stage 2, 2 processes", folder)
    tag = (folder / "latest").read_text()
    (folder / "latest").unlink()
    make(folder / "latest")
    with pytest.raises(CheckpointError, match=f"latest {words}"):
        merge_fsdp_weights(folder, tmp_path / "out")
    (folder / tag / OPTIMIZER.format(1)).unlink()
    make(folder / tag / OPTIMIZER.format(1))
    for read in (inspect_checkpoint, lambda path: merge_fsdp_weights(path, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=f"{words}|{OTHER_WORDS}"):
            read(folder / tag)


def test_a_device(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in")
    (folder / "accelight.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="is a device"):
        inspect_checkpoint(folder)


def test_accelerates_files_by_rank(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model_fsdp_0_rank0.bin")
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model_fsdp_0_rank1.bin")
    for read in (inspect_checkpoint, lambda path: merge_fsdp_weights(path, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"holds pytorch_model_fsdp_0_rank0\.bin, one of 2 files .*use_dcp"):
            read(tmp_path)


def test_torch_checkpointings_layout(tmp_path: Path) -> None:
    for name in ("metadata.pkl", "model_0.pt", "model_1.pt", "optimizer_0.pt"):
        (tmp_path / name).touch()
    for read in (inspect_checkpoint, lambda path: merge_fsdp_weights(path, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"holds metadata\.pkl and model_0\.pt: torch_checkpointing's layout"):
            read(tmp_path)


def test_what_is_there_is_listed(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"file {number}").touch()
    with pytest.raises(CheckpointError, match="It holds file 0, file 1, file 2, file 3, file 4 and 2 more"):
        inspect_checkpoint(tmp_path)
