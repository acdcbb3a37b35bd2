"""The units of a plan, and its picture: what ``--plot`` draws is XML, and its numbers are the plan's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from accelight.command import main
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from accelight.strategies.common.launch import Unit
from accelight.strategies.planning import MemoryPlan, plan_memory
from accelight.strategies.planning.memory_plan import draw
from tests.strategies.planning.models import LanguageModel, text
from tools.docs import plan_plot

SVG = "{http://www.w3.org/2000/svg}"
BLOCKS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
UNITS = (
    Unit("", "Model", 10, 20, 40),
    *(Unit(f"blocks.{number}", "Block", 1000, 2000, 4000) for number in range(24)),
)
PARTS = {"parameters": 50_000, "gathered": 4_000, "gradients": 0, "optimizer": 100_000, "activations": 46_000}
PLAN = MemoryPlan(200_000, "backward", PARTS, 1, 1, 24_010, 2, {"strategy": "<fsdp2> & \x00\ud800"}, UNITS)


def _drawn(svg: str) -> tuple[list[str], dict[str, float]]:
    """Return the words of a picture, and the width of each bar by its hint."""
    root = ElementTree.fromstring(svg.encode("utf-8"))
    assert root.tag == f"{SVG}svg"
    assert root.find(f"{SVG}title") is not None
    bars = {
        bar.findtext(f"{SVG}title", ""): float(bar.attrib["width"])
        for bar in root.iter(f"{SVG}rect")
        if bar.find(f"{SVG}title") is not None
    }
    return [each.itertext().__next__() for each in root.iter(f"{SVG}text")], bars


# ------------------------------------------------------------------ units
@pytest.mark.core("fsdp2")
@pytest.mark.parametrize("version", [1, 2], ids=["fsdp1", "fsdp2"])
def test_units_are_those_that_the_strategy_makes(version: int) -> None:
    plan = plan_memory(LanguageModel, text(2, 64), AccelFSDPStrategy(fsdp_version=version, **BLOCKS), world_size=4)
    block = sum(each.numel() for each in LanguageModel().blocks[0].parameters())
    root, *blocks = plan.units
    assert [(one.name, one.class_name, one.numel) for one in blocks] == [
        ("blocks.0", "Block", block),
        ("blocks.1", "Block", block),
    ]
    assert (root.name, root.class_name, root.numel) == ("", "LanguageModel", plan.num_parameters - 2 * block)
    assert all(one.gathered_bytes == 4 * one.numel == 4 * one.shard_bytes for one in plan.units)
    steps = plan.parts["optimizer"] - 2 * sum(one.shard_bytes for one in plan.units)  # AdamW's, counted as storages
    assert 0 < steps <= 4 * len(list(LanguageModel().parameters()))


@pytest.mark.exhaustive
def test_gathered_bytes_are_those_of_the_dtype_that_is_gathered() -> None:
    strategy = AccelFSDPStrategy(fsdp_version=2, **BLOCKS)
    plan = plan_memory(LanguageModel, text(2, 64), strategy, world_size=2, precision="bf16-mixed")
    assert all(one.gathered_bytes == 2 * one.numel == one.shard_bytes for one in plan.units)


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", [1, 2], ids=["fsdp1", "fsdp2"])
def test_ignored_parameters_are_in_no_unit(version: int) -> None:
    model = LanguageModel()
    strategy = AccelFSDPStrategy(fsdp_version=version, ignored_modules=[model.head], **BLOCKS)
    plan = plan_memory(lambda: model, text(2, 64), strategy, world_size=2)
    head = sum(each.numel() for each in LanguageModel().head.parameters())
    assert sum(one.numel for one in plan.units) == plan.num_parameters - head
    assert f"{head:,} parameters are in no unit" in str(plan)


@pytest.mark.exhaustive
def test_units_of_zero_are_the_modules_of_stage_3() -> None:
    stages = [
        plan_memory(LanguageModel, text(2, 64), AccelDeepSpeedStrategy(zero_stage=stage), world_size=2)
        for stage in (2, 3)
    ]
    assert not stages[0].units
    assert "are in no unit: each process holds them whole" in str(stages[0])
    own = {name: one for name, one in LanguageModel().named_modules() if list(one.parameters(recurse=False))}
    assert {one.name: (one.class_name, one.numel) for one in stages[1].units} == {
        name: (type(one).__name__, sum(each.numel() for each in one.parameters())) for name, one in own.items()
    }


def test_equal_units_stand_in_one_line() -> None:
    lines = str(PLAN).splitlines()
    assert "24 x Block (blocks.0 to blocks.23)           1,000     2.00 kB     4.00 kB" in lines
    assert "Model (the root)                                10        20 B        40 B" in lines


# ------------------------------------------------------------------ the picture
def test_the_pictures_numbers_are_the_plans() -> None:
    words, bars = _drawn(draw([("", PLAN)]))
    for shown in ("24 x Block", "blocks.0 to blocks.23", "1,000", "2.00 kB", "4.00 kB", "200.00 kB", "46.00 kB"):
        assert shown in words
    assert any("<fsdp2> & " in each for each in words)  # and what XML cannot hold is replaced
    lengths = {part: bars[f"as requested, {part}: {num_bytes:,} bytes"] for part, num_bytes in PARTS.items()}
    assert lengths == pytest.approx({part: 764 * num_bytes / 200_000 for part, num_bytes in PARTS.items()}, abs=0.1)
    assert bars["24 x Block, shard of a process: 2,000 bytes"] * 2 == bars["24 x Block, gathered: 4,000 bytes"]


def test_settings_stand_beside_each_other_with_the_limit() -> None:
    smaller = MemoryPlan(50_000, "forward", {"activations": 50_000}, 1, 1, 24_010, 2)
    svg = draw([("", PLAN), ("checkpointing", smaller), ("8 processes", "reads <values>")], 400_000)
    words, bars = _drawn(svg)
    assert {"as requested", "checkpointing", "8 processes", "400.00 kB available"} <= set(words)
    assert "cannot be planned: reads <values>" in words
    assert bars["checkpointing, activations: 50,000 bytes"] == pytest.approx(764 / 8, abs=0.1)
    [limit] = ElementTree.fromstring(svg).iter(f"{SVG}line")
    assert float(limit.attrib["x1"]) == 16 + 764


def test_a_plan_without_units_has_a_picture() -> None:
    words, _ = _drawn(draw([("", MemoryPlan(7, "forward", {"parameters": 7}, 1, 1, 5, 1))]))
    assert "No units: no parameters are gathered" in words
    assert "5 parameters are in no unit: each process holds them whole" in words


# ------------------------------------------------------------------ the command
def test_the_command_writes_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = ["tests.strategies.planning.models:LanguageModel", "--batch", "4x64:int64", "--wrap", "Block"]
    assert main(["plan", *model, "--memory", "1GB", "--json", "--plot", str(tmp_path / "plan.svg")]) == 0
    [variant] = json.loads(capfd.readouterr().out)["variants"]
    words, bars = _drawn((tmp_path / "plan.svg").read_text(encoding="utf-8"))
    assert {
        f"as requested, {part}: {num_bytes:,} bytes" for part, num_bytes in variant["plan"]["parts"].items()
    } <= set(bars)
    assert {f"{unit['numel']:,}" for unit in variant["plan"]["units"]} <= set(words)
    assert "1.00 GB available" in words


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("plan.png", r"does not end in \.svg: use plan\.svg"),
        ("nowhere/plan.svg", "cannot be written: No such file or directory. Name a file in a folder that exists"),
        ("folder.svg", "cannot be written: it is a folder"),
    ],
)
def test_where_nothing_can_be_written_nothing_is_planned(
    name: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.svg").mkdir()
    before: list[Any] = list(tmp_path.iterdir())
    assert main(["plan", "no.such.module:Model", "--plot", name]) == 2
    assert re.search(match, capsys.readouterr().err)
    with pytest.raises(ValueError, match=match):
        PLAN.save_plot(name)
    assert list(tmp_path.iterdir()) == before


def test_a_plan_saves_its_plot(tmp_path: Path) -> None:
    PLAN.save_plot(tmp_path / "one.svg")
    assert (tmp_path / "one.svg").read_text(encoding="utf-8") == draw([("", PLAN)])


@pytest.mark.exhaustive
def test_the_picture_in_the_guide_is_the_commands(tmp_path: Path) -> None:
    plan_plot.write(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_bytes() == plan_plot.PATH.read_bytes(), "run python -m tools.docs.plan_plot"
