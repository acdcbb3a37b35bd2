"""What the benchmarks compute from what they measure."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks import __main__ as runner
from benchmarks import merge_zero, paired, plots, results, scale, timeline
from benchmarks.turns import WITH, WITHOUT, Batches, Turns, switch_in_turns, take_turns


def _rounds() -> dict[str, list[float]]:
    drift = numpy.random.default_rng(1).exponential(1.0, 200)  # the machine, in all sides of a round alike
    noise = numpy.random.default_rng(2).normal(0, 0.01, (3, 200))
    return {
        side: list(drift + added + noise[n])
        for n, (side, added) in enumerate({"by hand": 0, "a": 0.1, "b": 0.2}.items())
    }


def test_differences_are_those_within_a_round() -> None:
    rounds = _rounds()
    found = paired.difference(rounds, "a", "by hand")
    assert found.low < 0.1 < found.high
    assert found.high - found.low < 0.01  # though sides differ by 1 from round to round
    added = paired.ratio_of_added(rounds, "a", "b", "by hand")
    assert added is not None
    assert added.low < 0.5 < added.high
    assert str(paired.ratio(rounds, "a", "a")) == "1.00 (1.00 to 1.00)"
    more = paired.difference_of_added(rounds, ("b", "by hand"), ("a", "by hand"))
    assert more.low < 0.1 < more.high
    assert more.high - more.low < 0.01


def test_no_ratio_to_what_may_be_nothing() -> None:
    rounds = _rounds()
    assert paired.ratio_of_added(rounds, "b", "by hand", "by hand") is None
    assert paired.ratio_of_added(rounds, "b", "by hand", "a") is None


def test_results_are_kept_with_versions_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELIGHT_BENCH_RESULTS", f"{tmp_path}/results")
    results.keep("some", {"rounds": [1.0]})
    found = results.kept("some")
    assert found["rounds"] == [1.0]
    assert found["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]  # not of every build
    assert found["machine"]["cores"] > 0


def _train(side: str, loader: DataLoader[list[torch.Tensor]]) -> None:
    for index, [batch] in enumerate(loader):
        if side == "fails" and index == 3:
            raise ValueError("in the middle")
        assert batch.shape == (2, 4)


def test_kept_results_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELIGHT_BENCH_RESULTS", str(tmp_path))
    rounds = _rounds()
    sides = {"FSDP2 by hand": rounds["by hand"], "accelight FSDP2": rounds["a"], "another": rounds["b"]}
    bases = dict.fromkeys(("accelight FSDP2", "another"), "FSDP2 by hand")
    results.keep("overhead", {"added_to": bases, "processes": {"1": {"seconds_per_step": sides}}})
    first = plots.draw("overhead", tmp_path / "a").read_bytes()
    assert b"<svg" in first
    assert plots.draw("overhead", tmp_path / "b").read_bytes() == first
    results.keep_panels("merge", {"Merging rows": sides, "Merging columns": sides})
    assert b"<svg" in plots.draw("merge", tmp_path / "a").read_bytes()
    assert (results.is_kept("merge"), results.is_kept("save")) == (True, False)
    with pytest.raises(FileNotFoundError, match=r"save\.json"):
        plots.draw("save", tmp_path)


def test_a_timeline_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELIGHT_BENCH_RESULTS", str(tmp_path))
    events = [("forward", "block 0"), ("all-gather", ""), ("optimizer", ""), ("message", "")]
    results.keep(
        "timeline",
        {
            "engines": {
                engine: [
                    {"kind": kind, "unit": unit, "start_ms": float(at), "end_ms": at + 1.0}
                    for at, (kind, unit) in enumerate(events)
                ]
                for engine in timeline.ENGINES
            }
        },
    )
    drawn = plots.draw("timeline", tmp_path).read_text(encoding="utf-8")
    assert all(f"<!-- {words} -->" in drawn for words in ("ZeRO-3, ms", "all-gather", "computes", "0"))
    assert "<!-- reduce-scatter -->" not in drawn


@pytest.mark.machines
def test_a_timeline_has_the_collectives_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELIGHT_BENCH_RESULTS", str(tmp_path))
    timeline.run()
    engines = results.kept("timeline")["engines"]
    blocks = ["block 0", "block 1", "block 2"]
    for engine in ("FSDP1", "FSDP2"):
        units = {
            kind: [each["unit"] for each in engines[engine] if each["kind"] == kind]
            for kind in ("all-gather", "reduce-scatter", "forward", "backward")
        }
        rest = "rest of the root"
        assert units["all-gather"] == [rest, *blocks, *reversed(blocks)] * timeline.ACCUMULATE
        assert units["reduce-scatter"] == [*reversed(blocks), rest]
        assert units["forward"] == [rest, *blocks, rest] * timeline.ACCUMULATE
        assert units["backward"] == [rest, *reversed(blocks), rest] * timeline.ACCUMULATE
    kinds = [each["kind"] for each in engines["ZeRO-2"]]
    assert kinds.count("all-gather") == 1
    assert kinds[-1] == "all-gather"
    assert {each["unit"] for each in engines["ZeRO-3"] if each["kind"] == "all-gather"} > set(blocks)


@pytest.mark.exhaustive
def test_sides_take_turns() -> None:
    rounds = take_turns(["a", "b"], 2, _train, Turns(5, 3, 2), torch.zeros(2, 4))
    assert {side: len(values) for side, values in rounds.items()} == {"a": 5, "b": 5}
    assert all(value > 0 for values in rounds.values() for value in values)


def _train_switched(side: str, loader: DataLoader[list[torch.Tensor]]) -> None:
    batches = loader.dataset
    assert isinstance(batches, Batches)
    told: list[str] = []
    batches.on_turn = told.append
    for index, _ in enumerate(loader):
        if told[-1] == WITH and index % 5 >= 2:  # a measured step
            time.sleep(0.01)


@pytest.mark.exhaustive
def test_one_process_takes_turns_with_and_without() -> None:
    rounds = switch_in_turns("a", 2, _train_switched, Turns(5, 3, 2), torch.zeros(2, 4))
    assert {what: len(values) for what, values in rounds.items()} == {WITH: 5, WITHOUT: 5}
    assert min(rounds[WITH]) >= 0.01


@pytest.mark.exhaustive
def test_a_side_that_fails_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"fails, rank 0:[\s\S]*in the middle"):
        take_turns(["a", "fails"], 1, _train, Turns(5, 3, 2), torch.zeros(2, 4))


@pytest.mark.machines
def test_a_steps_collectives_are_those_of_the_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELIGHT_BENCH_RESULTS", str(tmp_path))
    monkeypatch.setenv("ACCELIGHT_BENCH_PROCESSES", "2")
    scale.run()
    printed = capsys.readouterr().out
    assert "target: equal to the formula everywhere: met" in printed
    assert len(results.kept("scale")["counted"]) == 14


@pytest.mark.machines
def test_merges_of_zero_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELIGHT_BENCH_RESULTS", str(tmp_path))
    monkeypatch.setenv("ACCELIGHT_BENCH_PARAMETERS", "1e6")
    monkeypatch.setattr(merge_zero, "REPEATS", 1)
    merge_zero.run()
    panels = results.kept("merge-zero")["panels"]
    assert [title.partition(" of ")[0] for title in panels] == ["Merging ZeRO-2", "Merging ZeRO-3"]
    assert all(len(sides) == 3 for sides in panels.values())


@pytest.mark.parametrize("options", [[], ["--keep"]])
def test_results_are_kept_where_that_is_asked_for(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELIGHT_BENCH_RESULTS", str(tmp_path))
    one = SimpleNamespace(__doc__="One.", run=lambda: results.keep("one", {}))
    monkeypatch.setitem(runner.BENCHMARKS, "one", one)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "one", *options])
    runner.main()
    assert [path.name for path in tmp_path.iterdir()] == (["one.json"] if options else [])
