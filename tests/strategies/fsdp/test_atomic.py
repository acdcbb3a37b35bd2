"""Replacing a checkpoint's folder: the name always means a whole one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accelight.checkpoint import atomic_dir as atomic
from accelight.strategies.common.checkpoint_files import remove_saved
from tests.strategies.kill_while_saving import kill_once

NUM_FILES = 20


def _write(folder: Path, text: str) -> Path:
    folder.mkdir()
    for index in range(NUM_FILES):
        (folder / f"{index}").write_text(text)
    return folder


def _content(folder: Path) -> set[str]:
    return {(folder / f"{index}").read_text() for index in range(NUM_FILES)}


def test_removing_a_link_keeps_the_checkpoint_it_points_to(tmp_path: Path) -> None:
    target = _write(tmp_path / "epoch=1", "saved")
    (target / ".metadata").touch()
    last = tmp_path / "last"
    last.symlink_to(target.name)
    remove_saved(last, lambda: None)
    assert not last.is_symlink()
    assert _content(target) == {"saved"}
    assert (target / ".metadata").exists()


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("before", ["nothing", "folder", "file", "link"])
def test_the_finished_folder_takes_the_name(
    before: str, can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    path = tmp_path / "last"
    if before == "folder":
        _write(path, "old")
    elif before == "file":
        path.write_text("old")
    elif before == "link":
        path.symlink_to(_write(tmp_path / "target", "untouched"))
    atomic.replace(path, _write(tmp_path / ".last.unfinished", "new"))
    assert _content(path) == {"new"}
    assert not path.is_symlink()
    left = {"last", "target"} if before == "link" else {"last"}
    assert {item.name for item in tmp_path.iterdir()} == left
    if before == "link":
        assert _content(tmp_path / "target") == {"untouched"}


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("before", ["nothing", "folder", "file", "link"])
def test_a_finished_file_takes_the_name(
    before: str, can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    path, new = tmp_path / "last", tmp_path / ".last.unfinished"
    if before == "folder":
        _write(path, "old")
    elif before == "file":
        path.write_text("old")
    elif before == "link":
        path.symlink_to(_write(tmp_path / "target", "untouched"))
    new.write_text("new")
    atomic.replace(path, new)
    assert path.read_text() == "new"
    assert {item.name for item in tmp_path.iterdir()} == ({"last", "target"} if before == "link" else {"last"})


_FOREVER = """
import itertools, sys
from pathlib import Path
from accelight.checkpoint.atomic_dir import replace
path = Path(sys.argv[1])
print("started", flush=True)
for number in itertools.count():
    new = path.with_name(f".new{number}")
    new.mkdir()
    for index in range(20):
        (new / f"{index}").write_text(f"{number}")
    replace(path, new)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="needs a system that exchanges names")
def test_killed_at_any_moment_the_name_means_a_whole_folder(tmp_path: Path) -> None:
    path = _write(tmp_path / "last", "first")
    for attempt in range(8):
        process = subprocess.Popen([sys.executable, "-c", _FOREVER, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.003 * attempt)  # no assertion depends on where in its work this finds the process
        process.kill()
        process.wait()
        process.stdout.close()
        assert len(_content(path)) == 1, os.listdir(path)


@pytest.mark.parametrize(
    ("form", "in_background", "only_one", "seconds"),
    [
        ("sharded", True, True, 0.3),
        pytest.param("sharded", False, False, 0.1, marks=pytest.mark.exhaustive),
        pytest.param("full", True, False, 0.2, marks=pytest.mark.exhaustive),
    ],
)
def test_training_killed_while_it_saves_leaves_a_checkpoint(
    form: str, in_background: bool, only_one: bool, seconds: float, tmp_path: Path
) -> None:
    """``python -m tests.strategies.kill_while_saving`` in short; that kills 50 times at random moments."""
    kill_once(tmp_path, form, in_background, only_one, seconds)
