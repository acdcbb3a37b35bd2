"""The merge of folders saved by one process: dtypes, strides, names, files, arguments."""

from __future__ import annotations

import filecmp
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from accelight.checkpoint import CheckpointError, load_state_dict, merge_fsdp_weights, verify_merged, write_manifest
from tests.checkpoint.saving import save

# fmt: off
SAFE_DTYPES = [
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]
# fmt: on


def every_dtype() -> dict[str, torch.Tensor]:
    """Return bytes 0 to 255 as every dtype (bool as 0 and 1)."""
    raw = torch.arange(256, dtype=torch.uint8)
    tensors = {name: raw.clone().view(getattr(torch, name)) for name in SAFE_DTYPES if name != "bool"}
    return tensors | {"bool": (raw % 2).bool(), "float4": raw.clone().view(torch.float4_e2m1fn_x2)}


def every_shape() -> dict[str, torch.Tensor]:
    return {
        "scalar": torch.tensor(1.5),
        "scalar.int": torch.tensor(7),
        "empty": torch.empty(0),
        "empty.matrix": torch.empty(3, 0, 2),
        "one": torch.ones(1, 1, 1),
        'long.name.ä.😀."quoted"\\\n\x01': torch.randn(3),
        "large": torch.randn(700, 512),  # more than one block of copying
    }


def strided() -> dict[str, torch.Tensor]:
    return {
        "transposed": torch.randn(40, 30).t(),
        "channels_last": torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last),
        "permuted.bf16": torch.randn(4, 5, 6).to(torch.bfloat16).permute(2, 0, 1),
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and torch.equal(bits(one), bits(two))


def test_every_dtype_as_the_library_writes_it(tmp_path: Path) -> None:
    tensors = every_dtype() | every_shape()
    save(tmp_path / "in", {"model": tensors})
    report = merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    save_file(tensors, tmp_path / "reference", metadata={"format": "pt"})
    assert filecmp.cmp(tmp_path / "out/model.safetensors", tmp_path / "reference", shallow=False)
    assert report.num_tensors == len(tensors)
    assert report.num_bytes == os.path.getsize(tmp_path / "reference")
    assert report.files == ("model.safetensors",)
    assert report.destination == tmp_path / "out"
    assert not report.skipped
    assert not report.ties


def test_the_same_as_loading_through_torch(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    tensors = every_shape() | strided()
    save(tmp_path / "in", tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "in", tmp_path / "theirs.pt")
    theirs = torch.load(tmp_path / "theirs.pt")
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    ours = load_file(tmp_path / "out/model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(same(ours[name], theirs[name]) for name in theirs)


def test_the_same_as_accelerate(tmp_path: Path) -> None:
    from accelerate.utils import merge_fsdp_weights as theirs

    save(tmp_path / "in/pytorch_model_fsdp_0", {"model": every_shape() | strided()})
    merge_fsdp_weights(str(tmp_path / "in"), str(tmp_path / "ours"))
    theirs(str(tmp_path / "in/pytorch_model_fsdp_0"), str(tmp_path / "theirs"))
    assert filecmp.cmp(tmp_path / "ours/model.safetensors", tmp_path / "theirs/model.safetensors", shallow=False)


def test_a_part_of_a_larger_storage(tmp_path: Path) -> None:
    whole = torch.arange(100.0)
    save(tmp_path / "in", {"middle": whole[10:20], "every_other": whole[::2]})
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    merged = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(merged["middle"], whole[10:20])
    assert torch.equal(merged["every_other"], whole[::2])


@pytest.mark.parametrize("options", [{"single_file_per_rank": False}, {"thread_count": 3}])
def test_several_files_of_one_process(tmp_path: Path, options: dict[str, Any]) -> None:
    save(tmp_path / "in", every_shape(), **options)
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    merged = load_file(tmp_path / "out/model.safetensors")
    assert merged.keys() == every_shape().keys()


def test_a_dtype_safetensors_has_no_word_for(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2, dtype=torch.complex128), "b": torch.ones(2)}
    save(tmp_path / "in", tensors)
    with pytest.raises(CheckpointError, match=r"'a' is complex128, which safetensors cannot hold.*exclude"):
        merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out", exclude="a")
    merge_fsdp_weights(tmp_path / "in", tmp_path / "bin", safe_serialization=False, verify=True)
    assert same(torch.load(tmp_path / "bin/pytorch_model.bin")["a"], tensors["a"])


def test_compressed_records(tmp_path: Path) -> None:
    pytest.importorskip("zstandard", reason="DCP compresses with zstandard")
    from torch.distributed.checkpoint._extension import ZStandard

    save(tmp_path / "in", every_shape() | strided(), _extensions=[ZStandard()])
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out", verify=True)
    assert load_file(tmp_path / "out/model.safetensors").keys() == (every_shape() | strided()).keys()


def test_many_small_tensors(tmp_path: Path) -> None:
    """Records like each other are told by comparison, and neighbours are written together: each value in its place."""
    tensors = {
        f"layers.{i}.w": torch.full((i % 5, i % 3 + 1), i, dtype=(torch.float32, torch.bfloat16, torch.int64)[i % 3])
        for i in range(2000)
    }
    tensors |= {"large.0": torch.randn(150_000), "large.1": torch.randn(40_000, 4)}
    save(tmp_path / "in", {"model": tensors})
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    save_file(tensors, tmp_path / "reference", metadata={"format": "pt"})
    assert filecmp.cmp(tmp_path / "out/model.safetensors", tmp_path / "reference", shallow=False)


def test_what_is_not_a_tensor_is_reported(tmp_path: Path) -> None:
    save(tmp_path / "in", {"model": {"w": torch.ones(2), "_extra_state": {"a": "b"}}, "step": 3, "rng": torch.ones(4)})
    report = merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    assert report.skipped == {
        "model._extra_state.a": "not a tensor",
        "step": "not a tensor",
        "rng": "not part of 'model', the model",
    }


def test_the_tutorials_layout(tmp_path: Path) -> None:
    state = {"app": {"model": {"w": torch.ones(2)}, "optim": {"state": {"w": {"exp_avg": torch.ones(2)}}}}}
    save(tmp_path / "in", state)
    report = merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"w"}
    assert report.skipped == {"app.optim.state.w.exp_avg": "optimizer state"}


def test_a_key_of_any_other_name_if_it_is_the_only_one(tmp_path: Path) -> None:
    save(tmp_path / "in", {"net": {"w": torch.ones(2)}, "optimizer": {"state": {"w": torch.ones(2)}}})
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"w"}


def test_several_keys_none_of_them_known_stay_in_the_names(tmp_path: Path) -> None:
    save(tmp_path / "in", {"net": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2)}})
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"net.w", "ema.w"}


def test_two_models_in_one_folder(tmp_path: Path) -> None:
    save(tmp_path / "in", {"model": {"w": torch.ones(2)}, "state_dict": {"w": torch.ones(2)}})
    with pytest.raises(CheckpointError, match=r"under both 'model' \(1 tensors\) and 'state_dict'"):
        merge_fsdp_weights(tmp_path / "in", tmp_path / "out")


def test_a_state_saved_unflattened_is_merged(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(
            {"w": torch.ones(2)},
            checkpoint_id=tmp_path / "in",
            planner=DefaultSavePlanner(flatten_state_dict=False),
        )
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"w"}


# --- the folder


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist, expected a folder with a \.metadata"):
        merge_fsdp_weights(tmp_path / "no", tmp_path / "out")


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        merge_fsdp_weights(tmp_path / "file", tmp_path / "out")


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(CheckpointError, match=r"No checkpoint in .*pytorch_model_fsdp_0"):
        merge_fsdp_weights(tmp_path / "in", tmp_path / "out")


def test_a_folder_with_several_checkpoints(tmp_path: Path) -> None:
    for name in ("pytorch_model_fsdp_0", "pytorch_model_fsdp_1", "optimizer_0"):
        save(tmp_path / "in" / name, {"model": {"w": torch.ones(2)}})
    with pytest.raises(CheckpointError, match=r"several checkpoints: pytorch_model_fsdp_0, pytorch_model_fsdp_1"):
        merge_fsdp_weights(tmp_path / "in", tmp_path / "out")


def test_a_folder_with_optimizer_state_alone(tmp_path: Path) -> None:
    save(tmp_path / "in/optimizer_0", {"optimizer": {"w": torch.ones(2)}})
    with pytest.raises(CheckpointError, match=r"only optimizer state \(optimizer_0\)"):
        merge_fsdp_weights(tmp_path / "in", tmp_path / "out")


def test_a_folder_saved_without_coordination(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/__0_.metadata").touch()
    with pytest.raises(CheckpointError, match="use_collectives=True"):
        merge_fsdp_weights(tmp_path / "in", tmp_path / "out")


def test_a_checkpoint_without_tensors(tmp_path: Path) -> None:
    save(tmp_path / "in", {"model": {"step": 3}})
    with pytest.raises(CheckpointError, match="No tensors to write: it holds none"):
        merge_fsdp_weights(tmp_path / "in", tmp_path / "out")


# --- files of the output


@pytest.mark.parametrize("limit", ["1KB", "3.5 kb", 2000, "1TB", 1])
def test_shards_as_hugging_face_makes_them(tmp_path: Path, limit: str | int) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    tensors = {f"layer.{i}.weight": torch.randn(i % 7 + 1, 60) for i in range(12)} | {"empty": torch.empty(0)}
    save(tmp_path / "in", {"model": tensors})
    report = merge_fsdp_weights(tmp_path / "in", tmp_path / "out", max_shard_size=limit, verify=True)
    pattern = "model{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(tensors, filename_pattern=pattern, max_shard_size=limit)
    assert list(report.files) == [
        *split.filename_to_tensors,
        *(["model.safetensors.index.json"] if split.is_sharded else []),
    ]
    for file, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, tmp_path / "reference", metadata={"format": "pt"})
        assert filecmp.cmp(tmp_path / "out" / file, tmp_path / "reference", shallow=False)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        written = (tmp_path / "out/model.safetensors.index.json").read_text()
        assert written == json.dumps(index, indent=2, sort_keys=True) + "\n"
    assert sorted(os.listdir(tmp_path / "out")) == sorted(report.files)


@pytest.mark.parametrize("limit", ["5XB", "", "-1", 0, -5, "GB", 1.5, True, "0.1"])
def test_a_shard_size_that_is_none(tmp_path: Path, limit: Any) -> None:
    with pytest.raises(ValueError, match="A size"):
        merge_fsdp_weights(tmp_path, tmp_path / "out", max_shard_size=limit)


def test_from_pretrained_reads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    save(tmp_path / "in", {"model": model.state_dict()})
    write_manifest(tmp_path / "in", model_prefix="model", ties={"lm_head.weight": "transformer.wte.weight"})
    for limit, folder in ((None, "one"), ("20KB", "many")):
        config.save_pretrained(tmp_path / folder)
        report = merge_fsdp_weights(tmp_path / "in", tmp_path / folder, max_shard_size=limit)
        assert report.ties == {"lm_head.weight": "transformer.wte.weight"}
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / folder)
        assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
        assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_bin_output(tmp_path: Path) -> None:
    tensors = every_dtype() | every_shape() | strided()
    save(tmp_path / "in", {"model": tensors})
    report = merge_fsdp_weights(tmp_path / "in", tmp_path / "out", False, verify=True)
    assert report.files == ("pytorch_model.bin",)
    loaded = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)
    assert list(loaded) == list(tensors)
    assert all(same(loaded[name], value) for name, value in tensors.items())


def test_bin_output_in_shards(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(10) for i in range(5)}
    save(tmp_path / "in", {"model": tensors})
    report = merge_fsdp_weights(tmp_path / "in", tmp_path / "out", False, max_shard_size=80)
    assert report.files == (
        *(f"pytorch_model-0000{i}-of-00003.bin" for i in (1, 2, 3)),
        "pytorch_model.bin.index.json",
    )
    index = json.loads((tmp_path / "out/pytorch_model.bin.index.json").read_text())
    assert index["metadata"] == {"total_size": 200}
    assert torch.equal(torch.load(tmp_path / "out" / index["weight_map"]["w4"])["w4"], tensors["w4"])


# --- dtype


@pytest.mark.parametrize(
    ("dtype", "target"), [("bf16", "bfloat16"), (torch.float16, "float16"), ("torch.float32", "float32")]
)
@pytest.mark.parametrize("safe", [True, False])
def test_dtype_converts_floating_point_alone(tmp_path: Path, dtype: Any, target: str, safe: bool) -> None:
    tensors = {
        name: torch.randn(700, 401).to(getattr(torch, name)) for name in ("float32", "bfloat16", "float64", "float16")
    }
    tensors |= strided() | {"int": torch.arange(5), "bool": torch.ones(2, dtype=torch.bool), "empty": torch.empty(0, 3)}
    tensors["inf"] = torch.tensor([float("inf"), float("nan"), -0.0])
    save(tmp_path / "in", {"model": tensors})
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out", safe, dtype=dtype, verify=True)
    merged = load_file(tmp_path / "out/model.safetensors") if safe else torch.load(tmp_path / "out/pytorch_model.bin")
    for name, value in tensors.items():
        assert same(merged[name], value.to(getattr(torch, target)) if value.is_floating_point() else value), name


@pytest.mark.parametrize(
    ("source", "value", "dtype", "message"),
    [
        ("float32", -1e6, "fp16", r"the value 1e\+06 does not fit in float16"),
        ("bfloat16", 1e6, "fp16", r"the value .* does not fit in float16"),
        ("float32", torch.finfo(torch.float32).min, "bf16", r"the value 3\.40282e\+38 does not fit in bfloat16"),
        ("float64", 1e300, "fp32", r"the value 1e\+300 does not fit in float32"),
    ],
)
def test_dtype_that_a_value_does_not_fit(tmp_path: Path, source: str, value: float, dtype: str, message: str) -> None:
    save(tmp_path / "in", {"w": torch.tensor([1.0, math.inf, value], dtype=getattr(torch, source))})
    with pytest.raises(CheckpointError, match=rf"Tensor 'w': {message}"):
        merge_fsdp_weights(tmp_path / "in", tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("dtype", "target"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_infinities_and_8_bit_values_are_converted(tmp_path: Path, dtype: str, target: torch.dtype) -> None:
    tensors = {"w": torch.tensor([1.0, math.inf, math.nan]), "f8": torch.tensor([448.0, 0.5]).to(torch.float8_e4m3fn)}
    save(tmp_path / "in", tensors)
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out", dtype=dtype)
    merged = load_file(tmp_path / "out/model.safetensors")
    assert all(same(merged[name], value.to(target)) for name, value in tensors.items())


def test_ties_of_what_was_left_out_are_left_out(tmp_path: Path) -> None:
    save(tmp_path / "in", {"state_dict": {"net.a": torch.ones(2)}})
    ties = {"net.head.w": "net.embed.w"}
    write_manifest(tmp_path / "in", model_prefix="state_dict", ties=ties, left_out=["net.embed.w", "net.head.w"])
    assert list(load_state_dict(tmp_path / "in")) == ["net.a"]
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out", verify=True)
    assert verify_merged(tmp_path / "in", tmp_path / "out").is_equal


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", torch.int64, "", 3])
def test_dtype_that_is_none(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16, float64"):
        merge_fsdp_weights(tmp_path, tmp_path / "out", dtype=dtype)


# --- threads, progress


@pytest.mark.parametrize("threads", [None, 1, 2, 5])
def test_threads_change_nothing(tmp_path: Path, threads: int | None) -> None:
    tensors = every_dtype() | every_shape() | strided()
    save(tmp_path / "in", {"model": tensors})
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out", threads=threads)
    merged = load_file(tmp_path / "out/model.safetensors")
    assert all(same(merged[name], value) for name, value in tensors.items() if name != "float4")


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", True])
def test_threads_that_are_none(tmp_path: Path, threads: Any) -> None:
    with pytest.raises(ValueError, match="threads must be at least 1"):
        merge_fsdp_weights(tmp_path, tmp_path / "out", threads=threads)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("safe", "verify"), [(True, False), (True, True), (False, False), (False, True)])
def test_progress_is_told_from_start_to_end(tmp_path: Path, threads: int, safe: bool, verify: bool) -> None:
    save(tmp_path / "in", {"model": every_shape()})
    told: list[tuple[int, int]] = []
    report = merge_fsdp_weights(
        tmp_path / "in", tmp_path / "out", safe, threads=threads, verify=verify, progress=lambda *now: told.append(now)
    )
    totals = {total for _, total in told}
    assert len(totals) == 1
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
    assert not safe or told[-1][1] == report.num_bytes * (3 if verify else 1)


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_in_progress_ends_the_merge(tmp_path: Path, threads: int) -> None:
    save(tmp_path / "in", {"model": every_shape()})

    def stop(done: int, total: int) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        merge_fsdp_weights(tmp_path / "in", tmp_path / "out", threads=threads, progress=stop)
    assert not (tmp_path / "out").exists()


def test_progress_that_is_none(tmp_path: Path) -> None:
    progress: Any = 3
    with pytest.raises(TypeError, match="progress must be a callable, True, False or None, got int"):
        merge_fsdp_weights(tmp_path, tmp_path / "out", progress=progress)


def test_a_bar_for_a_long_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import accelight.checkpoint.merge as progress

    monkeypatch.setattr(progress, "_DELAY_S", 0.0)
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.0)
    save(tmp_path / "in", {"model": every_shape()})
    for blocked in (False, True):
        with monkeypatch.context() as patch:
            if blocked:
                for name in ("rich.console", "rich.progress"):
                    patch.setitem(__import__("sys").modules, name, None)
            merge_fsdp_weights(tmp_path / "in", tmp_path / "out", progress=True, threads=1)
        assert ("merging [" in capfd.readouterr().err) == blocked


def test_silent_where_there_is_no_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "in", {"model": every_shape()})
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


# --- what the header says


def header_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


@pytest.mark.parametrize("stored_twice", [True, False])
def test_ties_as_safetensors_save_model_writes_them(tmp_path: Path, stored_twice: bool) -> None:
    shared = torch.randn(4, 3)
    state = {"embed.weight": shared, "norm": torch.ones(3)} | ({"head.weight": shared.clone()} if stored_twice else {})
    save(tmp_path / "in", {"state_dict": state})
    write_manifest(tmp_path / "in", model_prefix="state_dict", ties={"head.weight": "embed.weight"})
    report = merge_fsdp_weights(tmp_path / "in", tmp_path / "out", verify=True)
    assert report.ties == {"head.weight": "embed.weight"}
    assert report.num_tensors == 2
    assert header_of(tmp_path / "out/model.safetensors") == {"format": "pt", "head.weight": "embed.weight"}
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"embed.weight", "norm"}


def test_a_tied_model_loads_as_safetensors_load_model(tmp_path: Path) -> None:
    from safetensors.torch import load_model

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    save(tmp_path / "in", {"model": Tied().state_dict()})
    write_manifest(tmp_path / "in", model_prefix="model", ties={"head.weight": "embed.weight"})
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    missing, unexpected = load_model(Tied(), tmp_path / "out/model.safetensors")
    assert not missing
    assert not unexpected


def test_ties_in_a_bin_file_share_their_storage(tmp_path: Path) -> None:
    save(tmp_path / "in", {"model": {"a": torch.ones(3)}})
    write_manifest(tmp_path / "in", model_prefix="model", ties={"b": "a"})
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out", False)
    loaded = torch.load(tmp_path / "out/pytorch_model.bin")
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()


def test_ties_of_different_values(tmp_path: Path) -> None:
    save(tmp_path / "in", {"model": {"a": torch.ones(3), "b": torch.zeros(3)}})
    write_manifest(tmp_path / "in", model_prefix="model", ties={"b": "a"})
    with pytest.raises(CheckpointError, match=r"ties 'model\.b' to 'model\.a', but they hold different values"):
        merge_fsdp_weights(tmp_path / "in", tmp_path / "out")


def test_a_tied_name_that_the_header_uses(tmp_path: Path) -> None:
    save(tmp_path / "in", {"model": {"a": torch.ones(3)}})
    write_manifest(tmp_path / "in", model_prefix="model", ties={"format": "a"})
    with pytest.raises(CheckpointError, match="A tied tensor is named 'format'"):
        merge_fsdp_weights(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_names_that_a_header_cannot_hold(tmp_path: Path, name: str) -> None:
    from accelight.checkpoint.formats.base import DTYPES
    from accelight.checkpoint.formats.safetensors import Entry, lay_out

    with pytest.raises(CheckpointError, match=r"which safetensors reserves|not valid text"):
        lay_out([name], lambda name: Entry(name, DTYPES["float32"], (1,), 4), {"format": "pt"})


def test_a_header_that_grows_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelight.checkpoint.formats.safetensors as header
    from accelight.checkpoint.formats.base import DTYPES

    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 50)
    with pytest.raises(CheckpointError, match="Set max_shard_size"):
        header.lay_out(["w"], lambda name: header.Entry(name, DTYPES["float32"], (1,), 4), {"format": "pt"})


# --- the model's key, said by the manifest


def test_the_manifest_names_the_models_key(tmp_path: Path) -> None:
    save(tmp_path / "in", {"model": {"a": torch.ones(3)}, "state_dict": {"b": torch.ones(3)}})
    write_manifest(tmp_path / "in", model_prefix="state_dict")
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"b"}


def test_the_manifest_names_a_key_that_is_not_there(tmp_path: Path) -> None:
    save(tmp_path / "in", {"model": {"a": torch.ones(3)}})
    write_manifest(tmp_path / "in", model_prefix="state_dict")
    with pytest.raises(CheckpointError, match=r"expected the model under the key 'state_dict'; found \['model'\]"):
        merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
