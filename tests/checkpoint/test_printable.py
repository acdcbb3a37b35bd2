"""Names from a checkpoint on a terminal: escaped, and not without end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accelight.checkpoint import CheckpointError, inspect_checkpoint, merge_fsdp_weights, write_manifest
from tests.checkpoint import damage

EVIL = "a\x1b]0;title\x07\x1b[2J\rb\x00c\x9b31m\u202ed\ue000\u2028"
ESCAPED = r"a\x1b]0;title\x07\x1b[2J\rb\x00c\x9b31m\u202ed\ue000\u2028"


def accelight(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelight.checkpoint", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, encoding="utf-8")


def assert_plain(text: str) -> None:
    assert all(line.isprintable() for line in text.split("\n")), ascii(text)


def test_names_in_tables_are_escaped(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in", **{EVIL: torch.ones(3), "w" * 1000: torch.ones(2)})
    write_manifest(folder, model_prefix="model", ties={f"tied{EVIL}": EVIL}, module_attribute=EVIL)
    result = accelight("inspect", folder, "--tensors")
    assert result.returncode == 0, result.stderr
    assert_plain(result.stdout)
    assert result.stdout.count(ESCAPED) == 4
    assert f"\n{'w' * 77} ... {'w' * 77} " in result.stdout
    assert_plain(str(inspect_checkpoint(folder)))
    described = json.loads(accelight("inspect", folder, "--json").stdout)
    assert [one["name"] for one in described["tensors"]] == [EVIL, "w" * 1000]


def test_names_in_reports_are_escaped(tmp_path: Path) -> None:
    folder, output = damage.good(tmp_path / "in", **{EVIL: torch.ones(3), "b": torch.ones(2)}), tmp_path / "o\x1b[2Jut"
    result = accelight("merge-weights", folder, output, "--include", "b")
    assert result.returncode == 0, result.stderr
    assert_plain(result.stdout + result.stderr)
    assert ESCAPED in result.stderr
    result = accelight("verify", folder, output)
    assert result.returncode == 1
    assert_plain(result.stderr)
    assert ESCAPED in result.stderr


@pytest.mark.parametrize("name", [EVIL, "x" * 100_000, "\ud800"])
def test_errors(tmp_path: Path, name: str) -> None:
    folder = damage.good(tmp_path / "in", a=torch.ones(3))

    def change(metadata: Any) -> None:
        damage.storage_of(metadata, "model.a").relative_path = name

    damage.edit_metadata(folder, change)
    result = accelight("merge-weights", folder, tmp_path / "out")
    assert result.returncode == 1, result.stderr
    assert_plain(result.stderr)
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 600
    with pytest.raises(CheckpointError) as caught:
        merge_fsdp_weights(folder, tmp_path / "out")
    assert_plain(str(caught.value))
    assert len(str(caught.value)) <= 500


@pytest.mark.parametrize("name", ["\ud800", "w\udfff"])
@pytest.mark.parametrize("options", [[], ["--max-shard-size", "10"]])
def test_names_that_are_no_text(tmp_path: Path, name: str, options: list[str]) -> None:
    folder = damage.good(tmp_path / "in", **{name: torch.ones(3), "b": torch.ones(4)})
    result = accelight("merge-weights", folder, tmp_path / "out", *options)
    assert result.returncode == 1, result.stderr
    assert "is not valid text" in result.stderr
    assert not (tmp_path / "out").exists()
    assert accelight("inspect", folder, "--tensors").returncode == 0


def test_links_in_a_circle(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in")
    (folder / "__0_0.distcp").unlink()
    os.symlink("__0_0.distcp", folder / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp'.*chain of links"):
        merge_fsdp_weights(folder, tmp_path / "out")
