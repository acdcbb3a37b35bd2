"""The workflows for GitHub: what they run is named so that nobody can change it, and is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.versions.environments import ENVIRONMENTS

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def _jobs(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_named_by_their_commits(path: Path) -> None:
    """A tag can be moved to other code. The version stands behind, for whoever reads it."""
    used = re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
    assert used
    assert not [line for line in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_nothing_may_be_written_but_by_publishing(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    asking = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
    publishing = {"release": {"id-token": "write"}, "docs": {"id-token": "write", "pages": "write"}}
    assert asking == ({"publish": publishing[path.stem]} if path.stem in publishing else {})


def test_what_the_jobs_name_is_there() -> None:
    ci = _jobs(ROOT / ".github" / "workflows" / "ci.yml")
    assert set(ci["versions"]["strategy"]["matrix"]["environment"]) <= set(ENVIRONMENTS)
    claimed = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    release = _jobs(ROOT / ".github" / "workflows" / "release.yml")
    for job in (ci["run"], release["install"]):
        assert job["strategy"]["matrix"]["python"] == claimed
    for path in WORKFLOWS:
        for example in re.findall(r"examples/\w+\.py", path.read_text(encoding="utf-8")):
            assert (ROOT / example).is_file()
