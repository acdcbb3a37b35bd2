"""Replacing a checkpoint's folder: the name always means a whole one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accelight.strategies.fsdp import atomic

NUM_FILES = 20


def _write(folder: Path, text: str) -> Path:
    folder.mkdir()
    for index in range(NUM_FILES):
        (folder / f"{index}").write_text(text)
    return folder


def _content(folder: Path) -> set[str]:
    return {(folder / f"{index}").read_text() for index in range(NUM_FILES)}


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
    atomic.replace_folder(path, _write(tmp_path / ".last.unfinished", "new"))
    assert _content(path) == {"new"}
    assert not path.is_symlink()
    left = {"last", "target"} if before == "link" else {"last"}
    assert {item.name for item in tmp_path.iterdir()} == left
    if before == "link":
        assert _content(tmp_path / "target") == {"untouched"}


_FOREVER = """
import itertools, sys
from pathlib import Path
from accelight.strategies.fsdp.atomic import replace_folder
path = Path(sys.argv[1])
print("started", flush=True)
for number in itertools.count():
    new = path.with_name(f".new{number}")
    new.mkdir()
    for index in range(20):
        (new / f"{index}").write_text(f"{number}")
    replace_folder(path, new)
"""


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
