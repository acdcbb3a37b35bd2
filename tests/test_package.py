"""What is built and installed: the namespace package `accelight`, and nothing beside it."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ["state", "checkpoint", "strategies", "callbacks"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    # Without isolation: the build requirement is installed, and nothing has to be downloaded.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


def test_wheel_holds_every_source_and_nothing_else(built: tuple[Path, Path]) -> None:
    names = {name for name in zipfile.ZipFile(built[1]).namelist() if ".dist-info/" not in name}
    expected = {f"accelight/{part}/py.typed" for part in PARTS}
    for part in PARTS:
        expected |= {f"accelight/{path.relative_to(ROOT)}" for path in (ROOT / part).rglob("*.py")}
    assert names == expected


def test_sdist_holds_the_tests(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = archive.getnames()
    for wanted in ("tests/ranks.py", "examples/train_gpt.py", "constraints.txt", "Makefile", "LICENSE"):
        assert any(name.endswith("/" + wanted) for name in names), wanted


def test_installed_wheel_imports_and_has_its_command(built: tuple[Path, Path], tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), str(built[1])]
    subprocess.run(install, check=True)
    assert not (tmp_path / "state").exists()
    code = "import accelight.state as s, accelight.strategies.fsdp as f; print(s.__file__); print(f.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert all(line.startswith(str(tmp_path)) for line in found.stdout.split())
    assert (tmp_path / "bin" / "accelight").is_file()


def test_static_tools_find_every_part() -> None:
    links = {path.name: path.resolve() for path in (ROOT / ".types" / "accelight").iterdir()}
    assert links == {part: ROOT / part for part in PARTS}
