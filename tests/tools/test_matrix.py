"""The command that runs tests with other versions: what it asks uv for, what it says, and what it keeps."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from accelight.strategies.deepspeed.library import OLDEST
from accelight.strategies.ray_train import storage as ray_library
from tools import matrix
from tools.versions import environments
from tools.versions.areas import AREAS, INSTALLATION, Cell, read_report, run_area, together
from tools.versions.environments import ENVIRONMENTS, MissingPythonError, UnresolvableError, constraints, floors
from tools.versions.report import BEGIN, END, Row, put_into, table

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_each_area_names_tests_that_are_there() -> None:
    for area, tests in AREAS.items():
        assert tests, area
        for test in tests:
            path, _, name = test.partition("::")
            text = (ROOT / path).read_text(encoding="utf-8")
            assert not name or f"def {name.partition('[')[0]}(" in text, test


def test_every_python_that_is_claimed_is_in_an_environment() -> None:
    claimed = set(re.findall(r"Python :: (3\.\d+)", PYPROJECT))
    assert {environment.python for environment in ENVIRONMENTS.values()} == claimed


def test_the_floors_are_those_of_pyproject() -> None:
    text = """
dependencies = [
    "torch>=2.9",
    "lightning>=2.6,!=2.6.2", # a reason
    "numpy",
]
[project.optional-dependencies]
cli = ["jsonargparse[signatures]>=4.39", "rich>=13"]
dev = [
    "mypy>=1.13",
]
"""
    assert floors(text) == {"torch": "2.9", "lightning": "2.6", "jsonargparse": "4.39", "rich": "13"}
    assert floors(PYPROJECT)["deepspeed"] == OLDEST
    assert floors(PYPROJECT)["ray"] == ray_library.OLDEST


def test_the_malicious_releases_of_lightning_are_left_out() -> None:
    claimed = re.findall(r'"lightning([<>=!][^"]*)"', PYPROJECT)
    assert claimed
    assert not [each for each in claimed for bad in ("2.6.2", "2.6.3") if SpecifierSet(each).contains(bad)]


def test_versions_are_held_where_they_shall_be() -> None:
    lowest = constraints(ENVIRONMENTS["lowest"])
    assert f"deepspeed=={OLDEST}" in lowest
    assert any(line.startswith("pytorch-lightning==") for line in lowest)
    assert "torch==2.13.0" in constraints(ENVIRONMENTS["pinned"])
    assert constraints(ENVIRONMENTS["torch-2.14"]) == ["torch==2.14.1"]
    assert constraints(ENVIRONMENTS["newest"]) == []


REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="passes"/>
<testcase classname="tests.a" name="fails"><failure message="E: no
more">long</failure></testcase>
<testcase classname="tests.a" name="left out"><skipped message="needs CUDA"/></testcase>
</testsuite></testsuites>"""


def test_a_report_becomes_a_cell() -> None:
    cell = read_report(REPORT)
    assert (cell.passed, cell.skipped) == (1, ["needs CUDA"])
    assert [failure.partition(":: ")[0] for failure in cell.failed] == ["tests.a::fails: E: no more"]
    assert str(cell) == "**1 fail**, 1 pass, 1 skipped"
    assert not cell.is_good
    assert str(together([Cell(passed=2), Cell(passed=3)])) == "5 pass"


def test_an_area_without_tests_is_not_good() -> None:
    assert not Cell().is_good
    assert str(Cell()) == "**no test**"
    assert Cell(why="no Python 3.13").is_good


def test_tests_that_do_not_start_are_a_failure(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    cell = run_area("state", tmp_path, tmp_path / "logs", 60)
    assert cell.failed == [f"state: ended with status 3, see {tmp_path / 'logs' / 'state.log'}"]
    program.write_text("#!/bin/sh\nsleep 60\n")
    cell = run_area("state", tmp_path, tmp_path / "logs", 0.2)
    assert cell.failed[0].startswith("state: not ended after 0 s")


ROWS = {
    "lowest": Row({"python": "3.10.1", "torch": "2.9.0"}, {"state": Cell(3), "ZeRO": Cell(1, ["tests.z: KeyError"])}),
    "newest": Row({"python": "3.13.0", "torch": "2.15.0"}, {"state": Cell(2, [], ["needs CUDA", "needs CUDA"])}),
    "pinned": Row(why="no Python 3.11"),
    "heads": Row(error="no torch==9"),
}


def test_the_table_tells_all() -> None:
    lines = table(ROWS).splitlines()
    assert "| lowest | 3.10.1 | 2.9.0 | none | none | none | none | none |" in lines
    assert "| environment | state | ZeRO |" in lines
    assert "| lowest | 3 pass | **1 fail**, 1 pass |" in lines
    assert "| newest | 2 pass, 2 skipped | not run |" in lines
    assert lines[-4:] == [
        "- lowest, ZeRO: fails: tests.z: KeyError",
        "- newest, state: skipped: needs CUDA",
        "- pinned: skipped: no Python 3.11",
        "- heads: fails to install: no torch==9",
    ]
    assert [row.is_good for row in ROWS.values()] == [False, True, True, False]


@pytest.mark.parametrize("name", ROWS)
def test_what_is_kept_is_the_same_again(name: str, tmp_path: Path) -> None:
    assert Row.load(tmp_path / "none.json") == Row()
    ROWS[name].save(tmp_path / "results" / "one.json")
    assert Row.load(tmp_path / "results" / "one.json") == ROWS[name]


def test_the_table_has_its_place(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    put_into(document, "new")
    put_into(document, "newer")
    assert document.read_text() == f"before\n{BEGIN}\nnewer\n{END}\nafter\n"
    document.write_text("nothing\n")
    with pytest.raises(ValueError, match="has no place for the table"):
        put_into(document, "new")
    assert matrix.DOCUMENT.read_text(encoding="utf-8").count(BEGIN) == 1


def examine(folder: Path, areas: list[str], *, keep: bool = False) -> Row:
    options = argparse.Namespace(keep=keep, timeout=1.0)
    return matrix.examine("newest", areas, folder, folder / "a.whl", options)


@pytest.fixture
def without_uv(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {"python": "3.13.0", "torch": "2.15.0"}
    monkeypatch.setattr(matrix, "make", lambda name, wheel, folder: (folder / "bin").mkdir(parents=True))
    monkeypatch.setattr(matrix, "versions", lambda folder: dict(found))
    monkeypatch.setattr(matrix, "run_area", lambda area, *_: Cell(len(area)))
    monkeypatch.setattr(matrix, "fits_together", lambda *_: Cell(100))
    return found


def test_areas_that_were_run_stay_while_versions_do(without_uv: dict[str, str], tmp_path: Path) -> None:
    examine(tmp_path, ["ZeRO"])
    assert examine(tmp_path, ["state"]).cells == {"state": Cell(5), "ZeRO": Cell(4)}
    without_uv["torch"] = "2.16.0"
    assert examine(tmp_path, ["merge"]).cells == {"merge": Cell(5)}
    assert examine(tmp_path, [INSTALLATION]).cells[INSTALLATION] == Cell(100 + len(INSTALLATION))


def test_environments_go_unless_they_shall_stay(without_uv: dict[str, str], tmp_path: Path) -> None:
    env = tmp_path / "environments" / "newest"
    examine(tmp_path, ["state"])
    assert not env.exists()
    examine(tmp_path, ["state"], keep=True)
    assert env.exists()


@pytest.mark.parametrize("error", [MissingPythonError("none"), UnresolvableError("none")])
def test_what_cannot_be_made_is_told(
    error: Exception, without_uv: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(matrix, "make", fail)
    row = examine(tmp_path, ["state"])
    assert row.is_good == isinstance(error, MissingPythonError)
    assert "none" in table({"newest": row})


def test_uv_is_asked_for_the_wheel_and_what_tests_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []

    def note(*arguments: str) -> str:
        calls.append(arguments)
        (tmp_path / "env").mkdir(exist_ok=True)
        return ""

    monkeypatch.setattr(environments, "uv", note)
    environments.make("torch-2.14", tmp_path / "a.whl", tmp_path / "env")
    assert calls[0][:4] == ("venv", "--quiet", "--python", "3.12")
    assert f"accelight[all,bench] @ file://{tmp_path}/a.whl" in calls[1]
    assert (tmp_path / "env" / "constraints.txt").read_text() == "torch==2.14.1\n"

    def fail(*arguments: str) -> str:
        if arguments[0] == "pip":
            raise subprocess.CalledProcessError(1, "uv", stderr="no\n  solution")
        return note(*arguments)

    monkeypatch.setattr(environments, "uv", fail)
    with pytest.raises(UnresolvableError, match="no solution"):
        environments.make("newest", tmp_path / "a.whl", tmp_path / "env")
    assert not (tmp_path / "env").exists()  # half an environment would be taken for a whole one


def test_without_uv_it_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ModuleNotFoundError, match="pip install uv"):
        environments.uv("--version")


def test_an_unknown_environment_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        matrix.main(["oldest"])
    assert "there is no environment oldest; there are lowest" in capsys.readouterr().err
