"""Folders saved by several processes, bit for bit against what the unsharded model holds."""

from __future__ import annotations

import filecmp
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from accelight.checkpoint import merge_fsdp_weights
from tests.checkpoint import saving
from tests.ranks import run_on_ranks


def assert_is_model(output: Path, expected: dict[str, torch.Tensor], folder: Path) -> None:
    """Compare the whole file with the one that the safetensors library writes."""
    reference = folder / "reference.safetensors"
    save_file(expected, reference, metadata={"format": "pt"})
    assert load_file(output / "model.safetensors").keys() == expected.keys()
    assert filecmp.cmp(output / "model.safetensors", reference, shallow=False)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(("world_size", "hsdp"), [(2, False), (3, False), (4, True)])
def test_folders_of_our_strategy_are_merged(tmp_path: Path, engine: str, world_size: int, hsdp: bool) -> None:
    run_on_ranks(world_size, saving.save_engine, str(tmp_path / "in"), engine, hsdp, True)
    report = merge_fsdp_weights(tmp_path / "in", tmp_path / "out", verify=True)
    assert_is_model(tmp_path / "out", saving.full_state_dict(), tmp_path)
    assert all(reason in ("optimizer state", "not a tensor") for reason in report.skipped.values())
    assert any(name.startswith("optimizer_0.") for name in report.skipped)


def test_fsdp1_with_flat_parameters(tmp_path: Path) -> None:
    run_on_ranks(2, saving.save_engine, str(tmp_path / "in"), "fsdp1", False, False)
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    assert_is_model(tmp_path / "out", saving.full_state_dict(), tmp_path)


@pytest.mark.parametrize("fsdp_version", [1, 2])
def test_accelerates_folders(tmp_path: Path, fsdp_version: int) -> None:
    from accelerate.utils import merge_fsdp_weights as accelerates_merge

    run_on_ranks(2, saving.save_accelerate, str(tmp_path / "in"), fsdp_version)
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    assert_is_model(tmp_path / "out", saving.full_state_dict(), tmp_path)
    accelerates_merge(str(tmp_path / "in" / "pytorch_model_fsdp_0"), str(tmp_path / "theirs"))
    theirs, ours = tmp_path / "theirs" / "model.safetensors", tmp_path / "out" / "model.safetensors"
    assert filecmp.cmp(ours, theirs, shallow=False)


@pytest.mark.parametrize("fsdp_version", [1, 2])
def test_accelerates_optimizer_folder_when_asked_for(tmp_path: Path, fsdp_version: int) -> None:
    run_on_ranks(2, saving.save_accelerate, str(tmp_path / "in"), fsdp_version)
    merge_fsdp_weights(tmp_path / "in" / "optimizer_0", tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged["state.head.weight.exp_avg"].shape == (5, 7)


@pytest.mark.parametrize("save", [saving.save_lightning_fsdp, saving.save_lightning_model_parallel])
def test_lightnings_folders(tmp_path: Path, save: Callable[[str], None]) -> None:
    run_on_ranks(2, save, str(tmp_path / "in"))
    assert (tmp_path / "in" / "meta.pt").is_file()
    merge_fsdp_weights(tmp_path / "in", tmp_path / "whole")
    assert_is_model(tmp_path / "whole", saving.full_state_dict(saving.Wrapped), tmp_path)
    merge_fsdp_weights(tmp_path / "in", tmp_path / "inner", strip_prefix="auto")
    assert_is_model(tmp_path / "inner", saving.full_state_dict(), tmp_path)


def test_a_state_dict_without_a_key_above_it(tmp_path: Path) -> None:
    run_on_ranks(2, saving.save_full_model_state, str(tmp_path / "in"))
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    assert_is_model(tmp_path / "out", saving.full_state_dict(), tmp_path)


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (4,), (2, 2)])
def test_every_placement(tmp_path: Path, mesh_shape: tuple[int, ...]) -> None:
    """Shards along any dimension, uneven and empty ones, replicas, and two dimensions of a mesh."""
    world_size = torch.Size(mesh_shape).numel()
    run_on_ranks(world_size, saving.save_layouts, str(tmp_path / "in"), mesh_shape)
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out", verify=True)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    tensors = saving.layout_tensors()
    assert {name.partition(".")[0] for name in merged} == tensors.keys()
    for name, value in merged.items():
        expected = tensors[name.partition(".")[0]]
        assert value.dtype == expected.dtype, name
        assert torch.equal(value, expected), name
