"""The command that trains other libraries' models: what it says and how it ends; the libraries are not needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import clients

ROOT = Path(__file__).parents[2]


def test_each_model_has_its_file_and_none_is_left_over() -> None:
    files = {path.stem for path in (ROOT / "tools" / "clients_cases").glob("*.py") if not path.stem.startswith("_")}
    assert files - {"worker", "recording", "sharing"} == set(clients.LIBRARIES)
    assert all(name in clients.LIBRARIES and strategy in clients.STRATEGIES for name, strategy in clients.KNOWN)


@pytest.mark.parametrize(
    ("outcomes", "status", "cell"),
    [
        ([{"losses": 1e-7, "weights": 2e-6}, {"losses": 1e-7, "weights": 2e-6}], 0, "same (2e-06)"),
        ([{"losses": 1e-7, "weights": 0.25}], 0, "differs by 0.25"),
        ([{}, {"error": "ValueError: no"}], 1, "ValueError: no"),
        ([{"losses": 1e-7, "weights": 2e-6}], 134, "ended with status 134"),
        ([], 0, "ended with status 0"),
        ([{}], 0, "trained"),
    ],
)
def test_outcomes_become_a_status_and_a_cell(outcomes: list[dict[str, object]], status: int, cell: str) -> None:
    assert clients.verdict(outcomes, status) == cell


def test_what_is_known_to_fail_has_its_reason_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(clients.KNOWN, ("tft", "zero3"), "why it fails")
    rows = {"tft": {"fsdp1": "same (1e-07)", "zero3": "TypeError: a | b"}}
    lines = clients.markdown(rows, ["fsdp1", "zero3"]).splitlines()
    assert lines[2].endswith(r"| same (1e-07) | TypeError: a \| b [1] |")
    assert lines[-1] == "[1] why it fails"


def run(monkeypatch: pytest.MonkeyPatch, row: dict[str, str]) -> int:
    monkeypatch.setattr(clients, "_row", lambda *_: row)
    return clients.main(["tft", "--no-install", "--strategy", "zero3"])


def test_only_failures_that_nobody_knows_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, {"zero3": "same (1e-07)"}) == 0
    assert run(monkeypatch, {"zero3": "TypeError: no"}) == 1
    monkeypatch.setitem(clients.KNOWN, ("tft", "zero3"), "why it fails")
    assert run(monkeypatch, {"zero3": "TypeError: no"}) == 0


def test_torch_is_pinned_and_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: calls.append(command))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    clients.install(tmp_path, ["peft", "monai", "peft"])
    pins = (tmp_path / "constraints.txt").read_text().splitlines()
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    assert calls[0][-1] == torch
    assert all(torch in call and str(tmp_path / "constraints.txt") in call for call in calls)
    assert [call[-1] for call in calls[2:]] == ["peft", "monai"]
    assert not any(pin.startswith(("pandas", "numpy")) for pin in pins)


def test_a_name_that_is_none_is_answered_with_all() -> None:
    command = [sys.executable, "-m", "tools.clients", "tfd"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "there is no model tfd; there are nbeats, tft, neural" in ended.stderr
