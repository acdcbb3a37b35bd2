"""DeepSpeed checkpoints: merged without DeepSpeed, equal to the live weights and to DeepSpeed's own conversion."""

from __future__ import annotations

import filecmp
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accelight.checkpoint import MergeReport, inspect_checkpoint, merge_fsdp_weights, verify_merged
from tests.checkpoint import zero_saving
from tests.checkpoint.zero_saving import EXPECTED, LIVE, SCRIPT_OUTPUT, SHARDED_OUTPUT, VARIANTS
from tests.ranks import run_on_ranks

Saved = tuple[Path, dict[str, str]]


def merged(report: MergeReport) -> dict[str, torch.Tensor]:
    """Return what was written, aliases included."""
    weights: dict[str, torch.Tensor] = {}
    for name in report.files:
        if name.endswith(".safetensors"):
            weights |= load_file(report.destination / name)
    return weights | {alias: weights[name] for alias, name in report.ties.items()}


def fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("name", VARIANTS)
def test_equal_to_the_live_weights_and_to_deepspeed(zero_checkpoints: Saved, tmp_path: Path, name: str) -> None:
    folder, variant = zero_checkpoints[0] / name, VARIANTS[name]
    report = merge_fsdp_weights(folder, tmp_path, verify=True)
    weights = merged(report)

    live = torch.load(folder / LIVE)
    frozen = {"base.weight", "base.bias", "nothing"} if variant.exclude_frozen else set()
    assert set(weights) == set(live) - frozen
    for key, value in weights.items():  # the fp32 masters, rounded to the dtype that trains
        assert torch.equal(value.to(live[key].dtype), live[key]), key
    assert ("head.weight" in report.ties) == (variant.tied and not variant.tiny)

    if name in zero_checkpoints[1]:  # what DeepSpeed cannot convert
        assert variant.stage == 0 or "fp32 accumulation" in name, zero_checkpoints[1][name]
        return
    expected = torch.load(folder / EXPECTED)
    lost = {key for key in weights if key.startswith("base.") or key == "nothing"} if variant.stage == 1 else set()
    assert set(weights) - set(expected) == lost  # DeepSpeed forgets frozen parameters in stage 1
    for key, value in expected.items():
        assert weights[key].dtype == fp32(value).dtype
        assert torch.equal(weights[key].reshape(-1).view(torch.uint8), fp32(value).reshape(-1).view(torch.uint8)), key


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if not variant.tied])
def test_the_file_is_that_of_deepspeeds_script(zero_checkpoints: Saved, tmp_path: Path, name: str) -> None:
    merge_fsdp_weights(zero_checkpoints[0] / name, tmp_path)
    theirs = zero_checkpoints[0] / name / SCRIPT_OUTPUT / "model.safetensors"
    assert filecmp.cmp(tmp_path / "model.safetensors", theirs, shallow=False)


def test_options_of_a_merge_of_zero(zero_checkpoints: Saved, tmp_path: Path) -> None:
    folder = zero_checkpoints[0] / "stage 3 untied, in bf16, 2 processes"
    report = merge_fsdp_weights(
        folder, tmp_path / "bf16", dtype="bf16", max_shard_size=700, exclude=["*.count", "mask"], verify=True
    )
    assert len(report.files) > 2
    live = torch.load(folder / LIVE)
    weights = merged(report)
    assert set(weights) == set(live) - {"norm.count", "mask"}
    assert all(torch.equal(value, live[name].bfloat16()) for name, value in weights.items())
    assert verify_merged(folder, tmp_path / "bf16", dtype="bf16", exclude=["*.count", "mask"]).is_equal

    report = merge_fsdp_weights(folder, tmp_path / "up", strip_prefix="up")
    assert set(merged(report)) == {"weight", "bias"}
    assert report.skipped["optimizer_state_dict"] == "optimizer state"
    different = verify_merged(folder, tmp_path / "up", strip_prefix="down").differences
    assert "float32 [13, 7], expected float32 [7, 13]" in different["weight"]

    report = merge_fsdp_weights(folder, tmp_path / "bin", safe_serialization=False, verify=True)
    state_dict = torch.load(tmp_path / "bin/pytorch_model.bin", weights_only=True)
    assert all(torch.equal(value, fp32(value)) for value in state_dict.values())
    assert set(state_dict) == set(live)


def test_files_in_several_parts_are_deepspeeds(zero_checkpoints: Saved, tmp_path: Path) -> None:
    folder = zero_checkpoints[0] / "stage 2 untied, 2 processes"
    report = merge_fsdp_weights(folder, tmp_path, max_shard_size=1000)
    theirs = folder / SHARDED_OUTPUT
    assert sorted(path.name for path in theirs.iterdir()) == sorted(report.files)
    assert all(filecmp.cmp(tmp_path / name, theirs / name, shallow=False) for name in report.files[:-1])
    ours, other = (json.loads((one / report.files[-1]).read_text()) for one in (tmp_path, theirs))
    assert ours["weight_map"] == other["weight_map"]


def test_tied_weights_in_a_file_of_torch(zero_checkpoints: Saved, tmp_path: Path) -> None:
    merge_fsdp_weights(zero_checkpoints[0] / "stage 2, 2 processes", tmp_path, safe_serialization=False)
    state_dict = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert state_dict["head.weight"].data_ptr() == state_dict["embed.weight"].data_ptr()


@pytest.mark.parametrize("given", ["folder", "tag"])
@pytest.mark.parametrize("latest", ["global_step1", "global_step0"])
def test_removes_the_tag_folder_and_its_pointer(
    zero_checkpoints: Saved, tmp_path: Path, given: str, latest: str
) -> None:
    """A ``latest`` that names nothing would stop the next start; one that names another tag stays."""
    folder = tmp_path / "in"
    shutil.copytree(zero_checkpoints[0] / "stage 2, 2 processes", folder)
    shutil.copytree(folder / "global_step1", folder / "global_step0")
    (folder / "latest").write_text(latest)
    removed = latest if given == "folder" else "global_step1"
    merge_fsdp_weights(folder if given == "folder" else folder / removed, tmp_path / "out", remove_checkpoint_dir=True)
    assert not (folder / removed).exists()
    assert (folder / "latest").exists() == (latest != removed)
    assert (folder / ({"global_step0", "global_step1"} - {removed}).pop()).is_dir()
    assert (folder / "zero_to_fp32.py").is_file()


def test_a_changed_result_is_told(zero_checkpoints: Saved, tmp_path: Path) -> None:
    folder = zero_checkpoints[0] / "stage 3, 3 processes"
    merge_fsdp_weights(folder, tmp_path)
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert len(verify_merged(folder, path).differences) == 1


def test_inspect(zero_checkpoints: Saved) -> None:
    info = inspect_checkpoint(zero_checkpoints[0] / "stage 3 in small groups, 2 processes")
    assert (info.kind, info.path.name, info.model_prefix) == ("deepspeed-stage-3", "global_step1", "module")
    assert (info.has_optimizer, info.epoch, info.global_step) == (True, 4, 1)
    assert info.ties == {"head.weight": "embed.weight"}
    tensors = {tensor.name: tensor for tensor in info.tensors}
    assert (tensors["up.weight"].shape, tensors["up.weight"].num_chunks) == ((13, 7), 2)
    assert (tensors["norm.count"].shape, tensors["norm.count"].dtype) == ((), "int64")
    assert [file.name for file in info.files] == [
        *(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)),
        *(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)),
    ]
    assert sum(file.num_chunks for file in info.files) == info.num_chunks
    assert "DeepSpeed, ZeRO stage 3" in str(info)
    assert inspect_checkpoint(zero_checkpoints[0] / "stage 0 in bf16, 2 processes").kind == "deepspeed-stage-0"


def test_the_command_imports_neither_torch_nor_deepspeed(zero_checkpoints: Saved, tmp_path: Path) -> None:
    """bf16 buffers and frozen parameters are widened without torch, too."""
    folder, code = (
        zero_checkpoints[0] / "stage 2 in bf16, 2 processes",
        (
            "import sys; from accelight.checkpoint.cli import main; code = main(sys.argv[1:]); "
            "assert not {'torch', 'numpy', 'deepspeed'} & set(sys.modules); sys.exit(code)"
        ),
    )
    for command in (["merge-weights", folder, tmp_path, "--verify"], ["verify", folder, tmp_path], ["inspect", folder]):
        subprocess.run([sys.executable, "-c", code, *map(str, command)], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.exhaustive
def test_folder_of_lightnings_strategy(tmp_path: Path) -> None:
    """``DeepSpeedStrategy`` saves under the tag ``checkpoint``, with the Trainer's state among DeepSpeed's own."""
    folder = tmp_path / "epoch=0.ckpt"
    results = run_on_ranks(2, zero_saving.save_lightning, str(folder), env=zero_saving.ENV, timeout_s=200)
    report = merge_fsdp_weights(folder, tmp_path / "out", strip_prefix="auto", verify=True)
    weights = merged(report)
    live = {name.removeprefix("model."): value for name, value in results[0].items()}
    assert set(weights) == set(live)
    assert all(torch.equal(fp32(value), weights[name]) for name, value in live.items())
    info = inspect_checkpoint(folder)
    assert (info.kind, info.path.name) == ("lightning-deepspeed-stage-3", "checkpoint")
    assert (info.epoch, info.global_step) == (1, 2)


@pytest.mark.parametrize("stage", [2, 3])
def test_universal_checkpoints(zero_checkpoints: Saved, zero_universal: Path, tmp_path: Path, stage: int) -> None:
    merge_fsdp_weights(zero_universal / str(stage), tmp_path, verify=True)
    assert verify_merged(zero_checkpoints[0] / f"stage {stage}, 2 processes", tmp_path).is_equal
    info = inspect_checkpoint(zero_universal / str(stage))
    assert (info.kind, info.ties) == ("deepspeed-universal", {"head.weight": "embed.weight"})


def test_universal_folder_by_its_pointer(zero_universal: Path) -> None:
    (zero_universal / "latest_universal").write_text("3")
    assert inspect_checkpoint(zero_universal).path == zero_universal / "3"
