"""``accelight plan``: its options, what it prints, what it suggests, how it ends."""

from __future__ import annotations

import json
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import ShardingStrategy

from accelight.command import main
from accelight.strategies.planning.example_model import batch_of, batch_size_of
from accelight.strategies.planning.memory_plan import MemoryPlan, size
from accelight.strategies.planning.plan_config import PlanConfig, named
from accelight.strategies.planning.planner import Variant, advice, table, try_variants
from tests.strategies.planning import models

MODEL = "tests.strategies.planning.models:LanguageModel"
SMALL = [MODEL, "--batch", "16x64:int64", "--world-size", "2", "--wrap", "Block"]


def text_batch() -> torch.Tensor:
    return models.text(4, 64)


# ------------------------------------------------------------------ whole runs
def test_a_table_and_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--strategy", "fsdp1", "--clip", "1", "--accumulate", "2"]) == 0
    printed = capfd.readouterr().out
    assert "parameters on 2 processes: strategy=fsdp1, precision=32-true, accumulate=2" in printed
    assert "peak of each process, in " in printed
    assert "NCCL buffers" in printed
    where = ["--batch", f"{__name__}:text_batch"]
    assert main(["plan", MODEL, "--module-args", '{"depth": 1}', *where, "--strategy", "zero2", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert sum(told["parts"].values()) == told["peak_bytes"]
    assert told["world_size"] == 1


@pytest.mark.machines
def test_what_does_not_fit_is_tried_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--json"]) == 0
    peak = json.loads(capsys.readouterr().out)["peak_bytes"]
    assert main(["plan", *SMALL, "--memory", f"{peak}B"]) == 0
    assert capsys.readouterr().out.strip().endswith(" unchanged (" + size(peak) + ").")
    assert main(["plan", *SMALL, "--memory", f"{peak - 1}B"]) == 0
    assert "with activation checkpointing (" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.machines
def test_a_hugging_face_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.write_llama_config(str(tmp_path))
    options = ["--hf-config", str(tmp_path / "config.json"), "--batch-size", "4", "--seq-len", "64"]
    assert main(["plan", *options, "--world-size", "4", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main(["plan", *options, "--strategy", "zero3", "--activation-checkpointing", "--memory", "1MB"]) == 1
    assert "None of the tried variants fits 1.00 MB" in capsys.readouterr().out
    assert whole["settings"]["batch_size"] == 4


@pytest.mark.machines
def test_layers_that_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    cut = {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}
    held = []
    for more in ({}, {"parallelism_config": {"tp_size": 2}, "tp_plan": cut}):
        words = ["--world-size", "4", "--strategy-args", json.dumps(more), "--json"]
        assert main(["plan", *SMALL, *words]) == 0
        held.append(json.loads(capsys.readouterr().out))
    assert held[1]["parts"]["gathered"] < held[0]["parts"]["gathered"]
    assert held[1]["num_parameters"] == held[0]["num_parameters"]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ([], "Pass either MODULE:CLASS or --hf-config"),
        ([*SMALL, "--batch-size", "4"], "use either them or --batch"),
        (["--hf-config", "x", "--batch", "4x4:int64", "--seq-len", "4"], "use either them or --batch"),
        (["--hf-config", "x", "--module-args", '{"depth": 1}'], "--module-args are of MODULE:CLASS"),
        ([MODEL], "No batch is defined"),
        ([MODEL, "--batch", ":text_batch"], "':text_batch' is not a valid name"),
        ([MODEL, "--batch", "ids:8x:int64"], "is not a tensor of a batch"),
        ([MODEL, "--batch", "4x4:int65"], "is not a tensor of a batch"),
        ([MODEL, "--batch", "a:4x4:int64", "--batch", "4x4:int64"], "or none"),
        (["nothing", "--batch", "4:int64"], "is not a valid name"),
        (["nowhere.py:Model", "--batch", "4:int64"], "does not exist"),
        ([MODEL + "s", "--batch", "4:int64"], "has no 'LanguageModels'"),
        ([*SMALL, "--strategy", "zero2"], "--wrap names FSDP units"),
        (
            [MODEL, "--batch", "4x4:int64", "--strategy", "zero2", "--activation-checkpointing"],
            "must recompute on its own",
        ),
    ],
)
def test_wrong_words_are_errors(words: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert match in capsys.readouterr().err


def test_what_cannot_be_planned_is_an_error_of_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", MODEL.replace("LanguageModel", "ReadsItsLoss"), "--batch", "4x64:int64"]) == 1
    told = capfd.readouterr()
    assert told.err.splitlines()[-1].startswith("accelight: error: A value that is computed from weights is read at ")
    assert told.out == ""


@pytest.mark.parametrize("words", [["--memory", "24XB"], ["--module-args", "[1]"], ["--module-args", "{"]])
def test_options_that_cannot_be_read(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", MODEL, *words])


# ------------------------------------------------------------------ its parts
def test_batches() -> None:
    assert {name: tuple(one.shape) for name, one in batch_of(["a:2x3:int64", "b:2:bool"]).items()} == {
        "a": (2, 3),
        "b": (2,),
    }
    assert batch_of(["2x3:bfloat16"]).dtype == torch.bfloat16
    assert [one.dtype for one in batch_of(["2:float32", "2:int8"])] == [torch.float32, torch.int8]
    assert batch_size_of({"a": 1, "b": [torch.zeros(()), torch.zeros(5, 2)]}) == 5
    assert batch_size_of(UserDict(input_ids=torch.zeros(6, 2))) == 6  # as Hugging Face's tokenizers return
    with pytest.raises(ValueError, match="no tensor with a length"):
        batch_size_of({"a": 1})


def _plan_of_bytes(num_bytes: int) -> MemoryPlan:
    return MemoryPlan(num_bytes, "forward", {"activations": num_bytes}, 1, 1, 1, 1)


def test_variants_are_tried_from_the_least_intrusive_on() -> None:
    config = PlanConfig(hf_config="x", batch_size=6, world_size=2, strategy_args={"reshard_after_forward": False})
    asked: list[PlanConfig] = []

    def plan(each: PlanConfig) -> MemoryPlan:
        asked.append(each)
        return _plan_of_bytes(100 if len(asked) < 4 else 10)

    variants = try_variants(config, 50, plan)
    assert [variant.change for variant in variants] == [
        "",
        "fsdp2, fully sharded",
        "fsdp2, fully sharded and activation checkpointing",
        "fsdp2, fully sharded and activation checkpointing and 2 times smaller micro-batches, 2 times as many",
        "fsdp2, fully sharded and activation checkpointing and 4 processes",
        "fsdp2, fully sharded and activation checkpointing and 8 processes",
    ]
    assert (asked[3].batch_size, asked[3].accumulate, asked[4].world_size) == (3, 2, 4)
    assert advice(variants, 50).startswith(
        "Fits 50 B with fsdp2, fully sharded and activation checkpointing and 2 times"
    )
    assert table(variants, 50).count(" no") == 3


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        ({"sharding_strategy": "SHARD_GRAD_OP"}, {}),
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, {}),
        ({}, {"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}),
    ],
)
def test_full_sharding_is_tried_whatever_has_asked_for_less(
    version: int, arguments: dict[str, Any], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if version == 2 and "reshard_after_forward" in arguments:
        arguments = {"reshard_after_forward": False}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    full = PlanConfig(module="x", strategy=f"fsdp{version}", strategy_args=arguments).fully_sharded()
    assert full is not None
    assert full.fully_sharded() is None
    plugin = full.make_strategy().fsdp_plugin
    assert plugin.reshard_after_forward in (True, ShardingStrategy.FULL_SHARD)


def test_changes_that_there_are_not() -> None:
    zero: Any = PlanConfig(module="x", strategy="zero2")
    assert zero.fully_sharded() == PlanConfig(module="x", strategy="zero3")
    assert zero.recomputed() is None
    assert zero.in_micro_batches(2) is None
    assert PlanConfig(strategy="zero3").fully_sharded() is None
    refused = [Variant("", _plan_of_bytes(9)), Variant("b", None, "why")]
    assert "cannot be planned: why" in table(refused, 5)
    assert advice(refused, 5).startswith("None of the tried variants fits 5 B: the smallest needs 9 B.")


def test_a_class_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "its_neighbour2.py").write_text("def batch():\n    return 3\n", encoding="utf-8")
    (tmp_path / "mine.py").write_text("import its_neighbour2\nclass Model:\n    pass\n", encoding="utf-8")
    model: Any = named(f"{tmp_path}/mine.py:Model")
    assert model is named(f"{tmp_path}/mine.py:Model")  # the file ran once
    assert PlanConfig(batch=("its_neighbour2:batch",)).make_batch(model) == 3
