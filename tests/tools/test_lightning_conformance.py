"""The tool that runs Lightning's tests, on a small checkout of tests that are known to pass, fail or hang."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from tests.slowness import slowness
from tools.conformance.known import COMPATIBILITY, KnownFailure, judge, read_known_failures
from tools.conformance.plugin import OURS, make_strategy, with_defaults
from tools.conformance.report import area_of, table
from tools.conformance.source import lightning_source
from tools.lightning_conformance import main

ROOT = Path(__file__).parents[2]
TESTS = """
import os

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel


def fit(tmp_path, **arguments):
    trainer = Trainer(default_root_dir=tmp_path, fast_dev_run=1, enable_progress_bar=False, **arguments)
    trainer.fit(BoringModel())
    return trainer


def test_trains(tmp_path):
    trainer = fit(tmp_path)
    assert trainer.world_size == int(os.environ.get("WORLD_SIZE", 1))
    paths = [None] * trainer.world_size
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(paths, str(tmp_path))
        assert len(set(paths)) == 1


@pytest.mark.parametrize("number", [1, 2])
def test_is_not_ours(tmp_path, number):
    trainer = fit(tmp_path)
    if "Accel" in type(trainer.strategy).__name__ and trainer.global_rank == trainer.world_size - 1:
        raise ValueError("ours")
    trainer.strategy.barrier()


def test_keeps_what_it_asks_for(tmp_path):
    assert type(fit(tmp_path, strategy="ddp").strategy).__name__ == "DDPStrategy"


def test_always_fails():
    assert not "always"


def test_dies_with_ours(tmp_path):
    if "Accel" in type(fit(tmp_path).strategy).__name__:
        os._exit(3)


def test_comes_after_it(tmp_path):
    fit(tmp_path)


@pytest.mark.skip
def test_skipped():
    pass
"""
KNOWN = """
Words before it.

| Test | With | Why |
| --- | --- | --- |
| `loops/test_small.py::test_is_not_ours[1]` | fsdp1, fsdp2 | it is said to fail |
| `loops/test_small.py::test_trains` | fsdp2 | it was said to fail |
| `loops/test_small.py::test_comes_after_it` | fsdp2:7, zero2 | it is about others |
| `loops/test_gone.py::test_gone` | fsdp2 | it is not in this release |
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout" / "tests" / "tests_pytorch" / "loops"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "test_small.py").write_text(TESTS)
    return tmp_path / "checkout"


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [pytest.param(1, id="one"), pytest.param(2, id="two", marks=pytest.mark.machines)])
def test_it_finds_what_fails_with_ours_alone(checkout: Path, tmp_path: Path, devices: int) -> None:
    known = tmp_path / "known.md"
    known.write_text(KNOWN)
    command = [sys.executable, "-m", "tools.lightning_conformance", "loops", "--source", str(checkout)]
    command += ["--known", str(known), "--strategy", "fsdp2", "--devices", str(devices), "--jobs", "2"]
    places = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    limit_s = 280 * slowness()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 1, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0].startswith("8 tests: 1 are skipped, 1 fail without accelight, 0 do not pass with ddp."), done.stdout
    assert "loops 6 3" in lines
    assert "known fsdp2 loops/test_small.py::test_is_not_ours[1]: it is said to fail" in lines
    process = f"process {devices - 1}: " if devices > 1 else ""
    assert f"UNLISTED fsdp2 loops/test_small.py::test_is_not_ours[2]: {process}ValueError: ours" in lines
    assert "UNLISTED fsdp2 loops/test_small.py::test_dies_with_ours: hung or killed its process" in lines
    assert "PASSES fsdp2 loops/test_small.py::test_trains: take it off the list" in lines
    assert len([line for line in lines if line.startswith(("known", "UNLISTED", "PASSES"))]) == 4, done.stdout
    assert "fsdp2: 6 of 6" in done.stderr


def test_a_list_that_is_right_is_no_failure() -> None:
    known = [KnownFailure("a.py::test[*]", frozenset({("fsdp1", 2)}), "so it is")]
    failed = {"fsdp1": {"a.py::test[x]": "error"}, "fsdp2": {}}
    right = judge(known, ["a.py::test[x]", "a.py::other"], failed, 2)
    assert (right.known, right.unlisted, right.passing) == ({("fsdp1", "a.py::test[x]"): "so it is"}, {}, [])
    assert judge(known, ["a.py::test[x]"], failed, 1).unlisted == {("fsdp1", "a.py::test[x]"): "error"}


def test_the_list_in_the_documentation_can_be_read() -> None:
    table_lines = [line for line in COMPATIBILITY.read_text().splitlines() if line.startswith("| `") and "::" in line]
    known = read_known_failures()
    assert len(known) == len(table_lines) > 0
    assert len({line.test for line in known}) == len(known)


def test_a_list_with_an_unknown_strategy_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "known.md"
    path.write_text("| `a.py::test` | fsdp3 | why |\n")
    with pytest.raises(ValueError, match=r"has a.py::test with 'fsdp3'. Write one of fsdp1, fsdp2, zero2"):
        read_known_failures(path)


def test_trainers_get_what_they_leave_open() -> None:
    assert with_defaults("ddp", 2, {}) == {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    assert with_defaults("ddp", 2, {"devices": 1, "strategy": "auto"})["devices"] == 2
    asked = {"accelerator": "cpu", "devices": 3, "strategy": "ddp_spawn"}
    assert with_defaults("fsdp1", 2, asked) == asked
    assert with_defaults("fsdp1", 2, {"accelerator": "gpu"}) == {"accelerator": "gpu"}
    made = [make_strategy(kind) for kind in OURS]
    assert [type(strategy) for strategy in made] == [AccelFSDPStrategy, AccelFSDPStrategy, AccelDeepSpeedStrategy]


def test_the_table_counts_by_area() -> None:
    tests = ["loops/a.py::x", "loops/optimization/b.py::x", "trainer/optimization/c.py::x", "utilities/d.py::x"]
    assert [area_of(test) for test in tests] == ["loops", "optimization", "optimization", "utilities"]
    rows = [line.split() for line in table(tests, {"fsdp1": {tests[1]: "why"}}).splitlines()]
    assert rows[1:] == [["loops", "1", "1"], ["optimization", "2", "1"], ["utilities", "1", "1"], ["all", "4", "3"]]


@pytest.mark.parametrize("kind", ["zip", "gztar"])
def test_an_archive_is_as_good_as_a_checkout(checkout: Path, tmp_path: Path, kind: str) -> None:
    archive = Path(shutil.make_archive(str(tmp_path / "archive"), kind, checkout.parent, "checkout"))
    with lightning_source(archive, "2.6.6") as source:
        assert (source / "tests" / "tests_pytorch" / "loops" / "test_small.py").read_text() == TESTS
    assert not source.exists()


def test_a_source_without_tests_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match=r"no tests/tests_pytorch in .*packages from the registry hold no tests"),
        lightning_source(tmp_path, "2.6.6"),
    ):
        pass
    with (
        pytest.raises(FileNotFoundError, match=r"does not exist. Give a checkout"),
        lightning_source(tmp_path / "none.tar.gz", "2.6.6"),
    ):
        pass


def test_without_a_network_it_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\necho no network >&2\nexit 128\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with (
        pytest.raises(RuntimeError, match=r"--branch 2.6.6 .*no network. Where there is no network, give --source"),
        lightning_source(None, "2.6.6"),
    ):
        pass


def test_help_and_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--source" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["--jobs", "0"])
    assert "--jobs 0 --timeout 60: both have to be above 0" in capsys.readouterr().err
