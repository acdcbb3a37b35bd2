"""Each Python block of README and the documentation runs as it stands, those of one page in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, blocks, num_processes, page_name, run_page
from tests.ranks import run_on_ranks

_SLOW = {"README.md", "callbacks.md", "finetune-hf.md", "lora.md", "merge-publish.md", "notebook.md", "tour.md"}
"""They import transformers, or wait for merges in the background, or are run by other tests: for `make test-all`."""
WITH_PYTHON = [
    pytest.param(page, marks=pytest.mark.exhaustive if page.name in _SLOW else (), id=page_name(page))
    for page in PAGES
    if blocks(page, "python")
]
MOST_SKIPS = 0
"""How many blocks of all pages may not run. Each says why; one more needs a better reason than this number."""


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    reports = run_on_ranks(num_processes(page), run_page, str(page), str(tmp_path), init_group=False, timeout_s=120)
    assert all(len(reasons) <= MOST_SKIPS for reasons in reports)


def test_blocks_that_do_not_run_are_few_and_say_why() -> None:
    skips = [line for page in PAGES for line in re.findall(r"<!--+ skip.*-->", page.read_text(encoding="utf-8"))]
    assert len(skips) <= MOST_SKIPS, skips
    assert all(re.search(r'reason="[^"]{20,}"', line) for line in skips), skips


def test_every_block_says_its_language() -> None:
    """What has none would be neither run nor checked."""
    known = {"python", "console", "output", "yaml", "json", "text", "{eval-rst}", "{toctree}", "{include}"}
    known |= {"{literalinclude}", "{image}", "{figure}", "{note}", "{warning}", "{tip}", "{contents}"}
    unknown = {
        f"{page_name(page)}:{block.line}: {block.language or 'no language'}"
        for page in PAGES
        for block in blocks(page)
        if block.language.split(" ")[0] not in known
    }
    assert not unknown
