"""What the README says of others, and of measurements, is so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.plots import PLOTS
from tests.docs.pages import ROOT, table_rows
from tests.docs.peers import LIGHTNING
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule

ROWS = {row[0]: row for row in table_rows(ROOT / "README.md", "## Beside others")}


@pytest.mark.parametrize("column", [2, 4])
def test_the_strategies_that_refuse_the_cpu_do(column: int) -> None:
    assert ROWS["shards on CPU processes"][column] == "refuses the CPU"
    name = ROWS[""][column].split("`")[1]
    with pytest.raises((ValueError, RuntimeError, MisconfigurationException), match=r"(?i)cuda|gpu|accelerator"):
        _fit_on_cpu(LIGHTNING[f"## {name}"][0])


def _fit_on_cpu(strategy: type) -> None:
    trainer = Trainer(strategy=strategy(), accelerator="cpu", devices=1, logger=False)
    trainer.fit(TinyModule(Case(), Outcome()), DataLoader(TensorDataset(torch.randn(4, 4))))


def _what_accelerate_makes_of_it() -> str:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    return type(accelerator.prepare(torch.nn.Linear(2, 2))).__name__


@pytest.mark.exhaustive
def test_accelerate_trains_with_ddp_on_the_cpu() -> None:
    assert ROWS["shards on CPU processes"][5] == "trains with DDP instead"
    assert run_on_ranks(2, _what_accelerate_makes_of_it, init_group=False) == ["DistributedDataParallel"] * 2


def test_lightnings_fsdp_does_not_clip_by_norm() -> None:
    assert ROWS["clips by norm"][2] == "raises"
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(MisconfigurationException, match="norm"):
        FSDPPrecision("32-true").clip_gradients(optimizer, 1.0)


def _kept(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8")))


def test_times_are_those_that_the_benchmarks_have_kept() -> None:
    one, two = (dict(bars) for bars in PLOTS["overhead"](_kept("overhead")).values())
    found = {name: f"{one[name].median * 1000:.2f}; {two[name].median * 1000:.1f} ms" for name in one}
    [row] = [cells for name, cells in ROWS.items() if name.startswith("time added to a step")]
    sides = ["accelight FSDP2", "Lightning ModelParallelStrategy", "Accelerate's loop, FSDP2"]
    assert [found[side] for side in sides] == [row[1], row[3], row[5]]
    [(_, bars)] = [each for each in PLOTS["save"](_kept("save")).items() if "fsdp1" in each[0]]
    found = {name: f"{interval.median:.2f} s" for name, interval in bars}
    [row] = [cells for name, cells in ROWS.items() if name.startswith("a sharded save")]
    assert row[1] == f"{found['sharded']}, in the background {found['async_save']}"
    assert row[2] == found["Lightning's FSDPStrategy"]


def test_times_of_optimizer_steps_are_those_that_the_benchmark_has_kept() -> None:
    [bars] = [
        dict(each) for title, each in PLOTS["optimizer"](_kept("optimizer")).items() if "AdamW.step(), 1000" in title
    ]
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    ours, torchs = (f"{bars[side].median * 1000:.0f}" for side in ("accelight", "DTensors"))
    assert f"`AdamW` over 1000 sharded parameters steps in {ours} ms, on torch's DTensors in {torchs} ms" in text


def test_times_of_merges_are_those_that_the_benchmarks_have_kept() -> None:
    for start, name, panel, columns in (
        ("merging 1.95 GB", "merge", "rows", {1: "accelight merge-weights", 2: "lightning", 5: "accelerate"}),
        ("merging ZeRO-3", "merge-zero", "ZeRO-3", {1: "accelight merge-weights", 4: "zero_to_fp32.py"}),
    ):
        [bars] = [dict(bars) for title, bars in PLOTS[name](_kept(name)).items() if panel in title]
        [row] = [cells for title, cells in ROWS.items() if title.startswith(start)]
        for column, side in columns.items():
            [median] = [found.median for shown, found in bars.items() if shown.startswith(side)]
            assert f"{median:.1f} s, " in row[column], (start, side)


def test_what_shows_a_row_is_there() -> None:
    for name, row in ROWS.items():
        if name:
            shown = row[-1].strip("`")
            assert re.match(r"([A-Z_]+=\S+ )*python -m benchmarks ", shown) or (ROOT / Path(shown)).is_file(), name
