"""What holds for every example; that each does what it says stands beside the tests of what it shows."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
WITH_ARGUMENTS = [path for path in EXAMPLES if "argparse" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", WITH_ARGUMENTS, ids=lambda path: path.stem)
def test_help_answers_before_anything_heavy_is_imported(path: Path) -> None:
    command = [sys.executable, "-S", str(path), "--help"]  # without site-packages: an import of torch fails
    done = subprocess.run(command, env={}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {path.name} ")
    assert "--help" in done.stdout


class _Page(HTMLParser):
    """What a page refers to, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [tag for name, _ in attrs if name in ("src", "href")] + [tag for _ in range(tag == "script")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_of_the_demo_needs_nothing_else(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLES[0].with_name("train_gpt.py"))
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.LanguageModel()
    model.curves = {"loss": [5.0, 3.0, 4.0], "grad_norm": [float("inf")] * 3}
    texts = {"ran": "FSDP2 <of> & units", "result": "validation", "merged": "54 tensors", "written": "import os"}
    example.write_report(tmp_path / "report.html", model, texts)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = _Page(text)
    assert not page.links
    assert all(words in page.text for words in (*texts.values(), "loss: 5 at step 1, 4 at step 3", "No gradient norm"))
    [chart] = [ElementTree.fromstring(part + "</svg>") for part in _between(text, "<svg", "</svg>")]
    [line] = chart.iter("polyline")
    assert line.attrib["points"] == "50.0,10.0 370.0,190.0 690.0,100.0"


def _between(text: str, begin: str, end: str) -> list[str]:
    return [begin + part.split(end)[0] for part in text.split(begin)[1:]]
