"""``verify_merged`` and ``accelight verify``: equal results, results changed in every part, and what is no result."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from accelight.checkpoint import CheckpointError, merge_fsdp_weights, verify_merged, write_manifest
from accelight.checkpoint.cli import main
from tests.checkpoint import damage, saving
from tests.checkpoint.saving import save
from tests.checkpoint.without_torch import WITHOUT_TORCH
from tests.ranks import run_on_ranks

BIG = 3 * 512 * 1024 // 4  # float32 elements in three blocks of a comparison


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {"a": torch.arange(12.0).reshape(3, 4), "big": torch.randn(BIG), "c": torch.ones(5).bfloat16()}
    return save(tmp_path / "in", {"model": state})


@pytest.fixture
def merged(folder: Path, tmp_path: Path) -> Path:
    merge_fsdp_weights(folder, tmp_path / "out")
    return tmp_path / "out"


def flip(path: Path, name: str, byte: int) -> None:
    """Change one byte of a tensor in a safetensors file."""
    with path.open("r+b") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        position = 8 + size + json.loads(file.read(size))[name]["data_offsets"][0] + byte
        file.seek(position)
        value = file.read(1)[0]
        file.seek(position)
        file.write(bytes([value ^ 1]))


# --- equal


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_shard_size": "1KB"},
        {"strip_prefix": "auto", "include": "blocks.*"},
        {"exclude": ["*.weight"]},
        {"dtype": "bf16"},
    ],
)
def test_what_the_merge_wrote_is_equal(tmp_path: Path, options: dict[str, Any]) -> None:
    run_on_ranks(2, saving.save_lightning_model_parallel, str(tmp_path / "in"))
    report = merge_fsdp_weights(tmp_path / "in", tmp_path / "out", **options)
    same = {name: value for name, value in options.items() if name != "max_shard_size"}
    verified = verify_merged(tmp_path / "in", tmp_path / "out", **same)
    assert verified.is_equal
    assert verified.num_tensors == report.num_tensors
    assert str(verified).endswith("equal to the checkpoint")


def test_every_layout(tmp_path: Path) -> None:
    run_on_ranks(4, saving.save_layouts, str(tmp_path / "in"), (2, 2))
    report = merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    verified = verify_merged(tmp_path / "in", tmp_path / "out" / "model.safetensors")
    assert (verified.is_equal, verified.num_tensors) == (True, report.num_tensors)
    assert verified.num_bytes == sum(
        tensor.numel() * tensor.element_size() for tensor in load_file(tmp_path / "out/model.safetensors").values()
    )


def test_a_result_of_another_writer(folder: Path, merged: Path, tmp_path: Path) -> None:
    """The header may be another one: bytes, dtypes, shapes and names count."""
    tensors = load_file(merged / "model.safetensors")
    save_file(tensors, tmp_path / "other.safetensors", {"format": "pt", "by": "hand"})
    assert verify_merged(folder, tmp_path / "other.safetensors").is_equal


def test_ties_are_verified(tmp_path: Path) -> None:
    folder = save(tmp_path / "in", {"model": {"w": torch.randn(4), "v": torch.randn(2)}})
    write_manifest(folder, model_prefix="model", ties={"head": "w"})
    merge_fsdp_weights(folder, tmp_path / "out")
    path = tmp_path / "out/model.safetensors"
    assert verify_merged(folder, path).is_equal
    tensors = load_file(path)
    save_file(tensors, path)
    assert verify_merged(folder, path).differences == {
        "head": "tied to 'w' in the checkpoint; no header records the tie, and no tensor has this name"
    }
    save_file(tensors | {"head": tensors["w"].clone()}, path)
    assert verify_merged(folder, path).is_equal
    save_file(tensors | {"head": tensors["w"] + 1}, path)
    assert list(verify_merged(folder, path).differences) == ["head"]


# --- pytorch_model.bin


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "1KB"}, {"dtype": "fp16"}])
def test_bin_files(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    write_manifest(folder, model_prefix="model", ties={"head": "a"})
    report = merge_fsdp_weights(folder, tmp_path / "out", False, **options)
    same = {name: value for name, value in options.items() if name != "max_shard_size"}
    verified = verify_merged(folder, tmp_path / "out", **same)
    assert verified.is_equal
    assert verified.num_tensors == report.num_tensors + 1  # the tied name is a tensor there
    assert verify_merged(folder, tmp_path / "out" / report.files[-1], **same).is_equal


def test_bin_files_of_others(folder: Path, tmp_path: Path) -> None:
    """Accelerate's, one with what ``Module.state_dict`` keeps on it, parameters, and strides of their own."""
    from accelerate.utils import merge_fsdp_weights as accelerates_merge

    accelerates_merge(str(folder), str(tmp_path / "theirs"), safe_serialization=False)
    assert verify_merged(folder, tmp_path / "theirs").is_equal
    path = tmp_path / "state_dict.bin"
    tensors = torch.load(tmp_path / "theirs/pytorch_model.bin")
    state_dict: Any = torch.nn.ParameterDict(tensors).state_dict()
    assert state_dict._metadata
    state_dict["a"] = torch.nn.Parameter(tensors["a"].t().contiguous().t())
    state_dict["c"] = tensors["c"].repeat(3)[5:10]  # a part of a larger storage
    torch.save(state_dict, path)
    assert verify_merged(folder, path).is_equal
    torch.save(state_dict | {"a": (tensors["a"] + 1).t().contiguous().t()}, path)
    assert verify_merged(folder, path).differences == {
        "a": "state_dict.bin: differs from its source starting at byte 0"
    }


def test_a_bin_file_that_differs(folder: Path, tmp_path: Path) -> None:
    merge_fsdp_weights(folder, tmp_path / "out", False)
    path = tmp_path / "out/pytorch_model.bin"
    tensors = torch.load(path)
    tensors["big"][BIG - 1] += 1
    torch.save(tensors | {"a": tensors["a"].half(), "new": torch.ones(1)}, path)
    differences = verify_merged(folder, path).differences
    assert list(differences) == ["a", "big", "new"]
    assert "float16 [3, 4], expected float32 [3, 4]" in differences["a"]
    assert (
        f"starting at byte {BIG * 4 - 4}" in differences["big"]
        or f"starting at byte {BIG * 4 - 2}" in differences["big"]
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(2)], "expected a state dict, found list"),
        ({1: torch.ones(2)}, "expected a state dict with strings as keys, found int"),
        ({"step": 3}, "'step' is int, not a tensor"),
        ({"m": torch.nn.Linear(1, 1)}, r"asks for torch\.nn\.modules\.linear\.Linear"),
        (b"no zip", "too short for a zip"),
        (b"x" * 100, "does not end like a zip archive of torch.save"),
    ],
)
def test_a_broken_bin_file_is_an_error(folder: Path, tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=message):
        verify_merged(folder, tmp_path)


# --- different


@pytest.mark.parametrize("byte", [0, 512 * 1024 - 1, 512 * 1024, BIG * 4 - 1])
def test_one_changed_byte_is_found(folder: Path, merged: Path, byte: int) -> None:
    flip(merged / "model.safetensors", "big", byte)
    report = verify_merged(folder, merged)
    assert report.differences == {"big": f"model.safetensors: differs from its source starting at byte {byte}"}
    assert str(report) == f"1 of 3 tensors differ. First 'big': {report.differences['big']}"


def test_other_values_dtypes_shapes_and_names(folder: Path, merged: Path) -> None:
    tensors = load_file(merged / "model.safetensors")
    changed = {"a": tensors["a"].reshape(4, 3), "c": tensors["c"].half(), "new": torch.ones(1)}
    save_file(changed, merged / "model.safetensors")
    differences = verify_merged(folder, merged).differences
    assert differences == {
        "big": "missing from the result",
        "a": "model.safetensors: float32 [4, 3], expected float32 [3, 4]",
        "c": "model.safetensors: float16 [5], expected bfloat16 [5]",
        "new": "model.safetensors: not expected from the checkpoint and these options. "
        "Did the merge use other options?",
    }


def test_a_result_made_with_other_options_differs(folder: Path, tmp_path: Path) -> None:
    merge_fsdp_weights(folder, tmp_path / "out", include="a")
    assert set(verify_merged(folder, tmp_path / "out").differences) == {"big", "c"}


def test_an_index_that_is_wrong(folder: Path, tmp_path: Path) -> None:
    merge_fsdp_weights(folder, tmp_path / "out", max_shard_size=48)
    path = tmp_path / "out/model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, second = index["weight_map"]["a"], index["weight_map"]["c"]
    shutil.copy(tmp_path / "out" / first, tmp_path / "out/twice.safetensors")
    index["weight_map"] |= {"c": first, "ghost": second, "big": index["weight_map"]["big"], "x": "twice.safetensors"}
    path.write_text(json.dumps(index))
    assert verify_merged(folder, tmp_path / "out").differences == {
        "a": f"in {first} and in twice.safetensors",
        "c": f"in {second}, model.safetensors.index.json says {first}",
        "ghost": f"not in {second}, where model.safetensors.index.json lists it",
        "x": "not in twice.safetensors, where model.safetensors.index.json lists it",
    }


# --- no result


def test_a_folder_without_a_result(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"holds none of model.safetensors, model.safetensors.index.json, pytorch_model.bin"
    ):
        verify_merged(folder, tmp_path)
    with pytest.raises(CheckpointError, match=r"no.safetensors does not exist"):
        verify_merged(folder, tmp_path / "no.safetensors")


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "no json"])
def test_a_broken_index_is_an_error(folder: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="not an index of files"):
        verify_merged(folder, tmp_path)


def test_an_index_that_is_missing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist, expected an index of files"):
        verify_merged(folder, tmp_path / "other.index.json")


def test_an_index_out_of_its_folder(folder: Path, merged: Path, tmp_path: Path) -> None:
    index = tmp_path / "deep" / "model.safetensors.index.json"
    index.parent.mkdir()
    index.write_text(json.dumps({"weight_map": {"a": "../out/model.safetensors"}}))
    with pytest.raises(CheckpointError, match="which is not a plain path inside"):
        verify_merged(folder, index)


def header(described: object) -> bytes:
    text = json.dumps(described).encode() if not isinstance(described, bytes) else described
    return len(text).to_bytes(8, "little") + text


def one(**changes: object) -> bytes:
    return header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc", "not a safetensors file, or cut off"),
        (b"\xff" * 8 + b"{}", "not a safetensors file, or cut off"),
        (one(), "the tensors end at byte .*, but the file has"),
        (one() + b"1234567890", "the tensors end at byte .*, but the file has"),
        (one(data_offsets=[4, 12]) + b"x" * 12, "tensor 'a' begins at byte"),
        (one(dtype="F3") + b"x" * 8, "tensor 'a' has dtype 'F3', which is not supported"),
        (one(shape=[3]) + b"x" * 8, r"tensor 'a' of float32 \[3\] needs 12 bytes, but data_offsets gives it 8"),
        (one(shape=[-2]) + b"x" * 8, r"tensor 'a' has shape \[-2\]"),
        (one(shape=[2.0]) + b"x" * 8, r"tensor 'a' has shape \[2.0\]"),
        (one(data_offsets=[0]) + b"x" * 8, "the header is not a safetensors header"),
        (header([1]), "the header is not a safetensors header"),
        (header({"__metadata__": {"a": 1}}), "the header is not a safetensors header"),
        (header(b"\xff\xff"), "the header is not a safetensors header"),
        (header(b'{"a": 1, "a": 2}'), "a name appears twice"),
        (header(b"[" * 100_000), "the header is not a safetensors header"),
    ],
)
def test_no_safetensors_file(folder: Path, tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        verify_merged(folder, path)


def test_wrong_arguments_of_verify_are_refused(folder: Path, merged: Path) -> None:
    with pytest.raises(ValueError, match="strip_prefix must be"):
        verify_merged(folder, merged, strip_prefix=".")
    with pytest.raises(ValueError, match="dtype must be one of"):
        verify_merged(folder, merged, dtype="int8")
    with pytest.raises(ValueError, match="include must be one or more patterns"):
        verify_merged(folder, merged, include="")


# --- the command


def test_exit_statuses_of_verify(folder: Path, merged: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", str(folder), str(merged)]
    assert main(arguments) == 0
    assert capfd.readouterr().out.startswith("3 tensors, ")
    assert main([*arguments, "--quiet"]) == 0
    assert capfd.readouterr() == ("", "")
    assert main([*arguments, "--strip-prefix", "."]) == 2
    capfd.readouterr()
    flip(merged / "model.safetensors", "a", 5)
    assert main([*arguments, "--quiet"]) == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "accelight: error: 1 of 3 tensors differ. "
        "First 'a': model.safetensors: differs from its source starting at byte 5\n"
    )
    assert main([*arguments, "--json"]) == 1
    told = json.loads(capfd.readouterr().out)
    assert (told["is_equal"], list(told["differences"])) == (False, ["a"])
    os.truncate(merged / "model.safetensors", 1000)
    assert main(arguments) == 1
    assert "accelight: error: " in capfd.readouterr().err


def test_options_of_the_merge(tmp_path: Path) -> None:
    save(tmp_path / "in", {"model": {f"net.w{i}": torch.randn(10) for i in range(6)} | {"loss.x": torch.ones(2)}})
    places = [str(tmp_path / "in"), str(tmp_path / "out")]
    options = ["--strip_prefix", "net", "--include", "w*", "--exclude", "w5", "--dtype", "fp16"]
    assert main(["merge-weights", *places, *options]) == 0
    assert main(["verify", *places, *options]) == 0
    assert main(["verify", *places]) == 1


def test_progress_reaches_the_whole(folder: Path, merged: Path) -> None:
    calls: list[tuple[int, int]] = []
    verify_merged(folder, merged, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (2 * (48 + BIG * 4 + 10),) * 2  # once to look at the checkpoint, once to compare


def test_torch_is_never_imported(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in")
    for safe in (True, False):
        merge_fsdp_weights(folder, tmp_path / f"{safe}", safe)
        subprocess.run([sys.executable, "-c", WITHOUT_TORCH, "verify", folder, tmp_path / f"{safe}"], check=True)
