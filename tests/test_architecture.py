"""The floors of the house: imports point downwards, files do not import each other in a circle, names stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ["state", "checkpoint", "strategies", "callbacks"]  # from the lowest up


def _files() -> Iterator[tuple[str, Path]]:
    for floor in FLOORS:
        for path in sorted((ROOT / floor).rglob("*.py")):
            relative = path.relative_to(ROOT).with_suffix("")
            parts = relative.parts[:-1] if relative.name == "__init__" else relative.parts
            yield ".".join(parts), path


def _imports(module: str, path: Path) -> set[str]:
    """Return the modules of this project that a file imports, at its top or inside functions, for more than types."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    known = {name for name, _ in _files()}
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):  # what is only for type checkers is no import
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("accelight.") for alias in node.names if "accelight" in alias.name}
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *(node.module or "").removeprefix("accelight.").split(".")]).strip(".")
            for alias in node.names:
                full = f"{target}.{alias.name}".strip(".")
                found.add(full if full in known else target)
    return {name for name in found if name in known}


def test_imports_point_downwards() -> None:
    for module, path in _files():
        floor = FLOORS.index(module.split(".")[0])
        for target in _imports(module, path):
            assert FLOORS.index(target.split(".")[0]) <= floor, f"{path} imports {target}, from a higher floor"


def test_no_circles() -> None:
    graph = {module: _imports(module, path) - {module} for module, path in _files()}
    lazy = {name for name, path in _files() if path.name == "__init__.py"}  # they name their files; files may name them
    TopologicalSorter({module: {t for t in targets if t not in lazy} for module, targets in graph.items()}).prepare()


def test_imports_between_folders_are_relative() -> None:
    for _, path in _files():
        assert "from accelight" not in path.read_text().replace('"""', ""), f"{path} names its own package"


_BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
{code}
"""


@pytest.mark.parametrize(
    ("blocked", "code"),
    [
        (["lightning", "deepspeed", "transformers", "pandas", "scipy"], "from accelight.state import PartialState"),
        (["torch", "lightning", "numpy"], "from accelight.checkpoint import merge_fsdp_weights"),
        (["torch", "lightning", "numpy"], "from accelight.checkpoint.cli import main"),
        (
            ["lightning", "deepspeed", "transformers"],
            "from accelight.strategies import FullyShardedDataParallelPlugin as P; P(fsdp_version=2)",
        ),
        (["lightning"], "import accelight.callbacks as c; assert 'TriggerEarlyStopping' in dir(c)"),
        (
            ["lightning", "deepspeed", "transformers", "accelerate"],
            "from accelight.strategies import DeepSpeedPlugin as P; P(zero_stage=3).set_deepspeed_weakref()",
        ),
    ],
    ids=["state", "checkpoint", "command", "plugin", "callbacks", "deepspeed-plugin"],
)
def test_imports_without_heavy_packages(blocked: list[str], code: str) -> None:
    subprocess.run([sys.executable, "-c", _BLOCK.format(blocked=blocked, code=code)], check=True)


def test_deepspeed_is_imported_only_by_what_runs_it() -> None:
    code = "import accelight.strategies.fsdp.strategy, sys; assert 'deepspeed' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
