"""``accelight.json``: written by strategies, read strictly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelight.checkpoint import CheckpointError, Manifest, read_manifest, write_manifest

GOOD: dict[str, Any] = {"format_version": 1, "model_prefix": "model", "ties": {"a": "b"}, "module_attribute": "net"}


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = write_manifest(tmp_path, model_prefix="state_dict", ties={"b": "a", "c": "a"}, module_attribute="model")
    assert path == tmp_path / "accelight.json"
    assert read_manifest(tmp_path) == Manifest("state_dict", {"b": "a", "c": "a"}, "model")
    assert [path.name for path in tmp_path.iterdir()] == ["accelight.json"]


def test_a_manifest_without_optional_fields(tmp_path: Path) -> None:
    write_manifest(tmp_path, model_prefix="model")
    assert read_manifest(tmp_path) == Manifest("model", {}, None)


def test_a_folder_without_a_manifest(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format_version": 3}, "format_version is 3, but this release reads 1 and 2. Upgrade"),
        ({"format_version": None}, "format_version is None"),
        ({"more": 1}, r"unknown keys \['more'\]"),
        ({"model_prefix": "x"}, "model_prefix must be 'model', 'state_dict' or 'module', got 'x'"),
        ({"model_prefix": None}, "model_prefix must be"),
        ({"ties": [1]}, "ties must map alias to fqn"),
        ({"ties": {"a": 3}}, "ties must map names to names, got 'a': 3"),
        ({"ties": {"": "b"}}, "ties must map names to names"),
        ({"ties": {"a": "b", "b": "c"}}, "'a' is tied to 'b', which is an alias itself"),
        ({"ties": {"a": "a"}}, "an alias itself"),
        ({"module_attribute": ["net"]}, "module_attribute must be"),
        ({"module_attribute": 3}, "module_attribute must be an attribute's name or None"),
    ],
)
def test_content_that_cannot_be(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    (tmp_path / "accelight.json").write_text(json.dumps(GOOD | change))
    with pytest.raises(CheckpointError, match=rf"accelight\.json: .*{match}"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, "\ud800"])
def test_text_that_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "accelight.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(CheckpointError, match=r"accelight\.json: "):
        read_manifest(tmp_path)


def test_a_size_no_manifest_has(tmp_path: Path) -> None:
    with open(tmp_path / "accelight.json", "wb") as file:
        file.truncate(2**30)
    with pytest.raises(CheckpointError, match="has 1073741824 bytes, more than the"):
        read_manifest(tmp_path)


def test_writing_checks_as_reading_does(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model_prefix must be"):
        write_manifest(tmp_path, model_prefix="")
    assert list(tmp_path.iterdir()) == []


def test_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from accelight.checkpoint import read_manifest, write_manifest;"
        "write_manifest(sys.argv[1], model_prefix='model'); read_manifest(sys.argv[1]);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
