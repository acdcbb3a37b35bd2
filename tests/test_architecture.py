"""The floors of the house: imports point downwards, files do not import each other in a circle, names stay light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ["state", "checkpoint", "strategies", "callbacks"]  # from the lowest up
ROOMS = {  # of a folder, from the lowest up; files beside them stand on all of them
    "checkpoint": ["formats", "writing"],
    "strategies": [
        "upstream",
        "sharded_tensors",
        "common",
        "saving",
        "optimizers",
        "parallelism",
        "fsdp",
        "deepspeed",
        "planning",
        "ray_train",
    ],
    "strategies/fsdp": ["checkpoint"],
}
APART = {("strategies/deepspeed", "strategies/fsdp")}
"""Siblings of which neither knows the other: what they share is in ``common``."""
MOST_FILES = 14


@cache
def _files() -> list[tuple[str, Path]]:
    found = []
    for floor in FLOORS:
        for path in sorted((ROOT / floor).rglob("*.py")):
            relative = path.relative_to(ROOT).with_suffix("")
            parts = relative.parts[:-1] if relative.name == "__init__" else relative.parts
            found.append((".".join(parts), path))
    return found


def _imports(module: str, path: Path, *, for_types: bool = False) -> set[str]:
    """Return the modules of this project that a file imports, at its top or inside functions.

    Args:
        module: Its name.
        path: Where it is.
        for_types: Whether to count what only type checkers import.
    """
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    known = {name for name, _ in _files()}
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if not for_types else ():
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


def test_rooms_import_from_those_before_them() -> None:
    for module, path in _files():
        for target in _imports(module, path, for_types=True):
            _check_rooms(path.relative_to(ROOT).as_posix(), target.replace(".", "/"))


def _check_rooms(file: str, target: str) -> None:
    for folder, rooms in ROOMS.items():
        if not (file.startswith(f"{folder}/") and target.startswith(f"{folder}/")):
            continue
        own, other = (name.removeprefix(f"{folder}/").split("/")[0] for name in (file, target))
        if own in rooms and other in rooms:
            assert rooms.index(other) <= rooms.index(own), f"{file} imports {target}, from a later folder"
    for one, another in APART:
        together = {f"{one}/", f"{another}/"}
        sides = [next((side for side in together if name.startswith(side)), None) for name in (file, target)]
        assert None in sides or sides[0] == sides[1], f"{file} imports {target}, from a sibling"


def test_folders_are_listed() -> None:
    """A new folder takes its place among the others."""
    for folder, rooms in ROOMS.items():
        found = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
        assert found == set(rooms), folder


def test_no_folder_holds_more_than_can_be_seen_at_once() -> None:
    files = Counter(path.parent for _, path in _files())
    assert not {str(folder): count for folder, count in files.items() if count > MOST_FILES}


@pytest.mark.parametrize("for_types", [False, True])
def test_no_circles(for_types: bool) -> None:
    graph = {module: _imports(module, path, for_types=for_types) - {module} for module, path in _files()}
    lazy = {name for name, path in _files() if path.name == "__init__.py"}  # they name their files; files may name them
    TopologicalSorter({module: {t for t in targets if t not in lazy} for module, targets in graph.items()}).prepare()


def test_imports_between_folders_are_relative() -> None:
    for _, path in _files():
        assert "from accelight" not in path.read_text().replace('"""', ""), f"{path} names its own package"


def test_tests_do_not_import_each_other() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        assert not re.search(r"^ *from tests\.[\w.]*\btest_|^ *import tests\.[\w.]*\btest_", path.read_text(), re.M), (
            path
        )


_BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
{code}
"""


@pytest.mark.core("state", "command")
@pytest.mark.parametrize(
    ("blocked", "code"),
    [
        (["lightning", "deepspeed", "transformers", "pandas", "scipy"], "from accelight.state import PartialState"),
        (["torch", "lightning", "numpy"], "from accelight.checkpoint import merge_fsdp_weights"),
        (["torch", "lightning", "numpy"], "from accelight.checkpoint.cli import main"),
        (["torch", "lightning", "numpy"], "from accelight.command import main"),
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
    ids=["state", "checkpoint", "command", "whole-command", "plugin", "callbacks", "deepspeed-plugin"],
)
def test_imports_without_heavy_packages(blocked: list[str], code: str) -> None:
    subprocess.run([sys.executable, "-c", _BLOCK.format(blocked=blocked, code=code)], check=True)


def test_deepspeed_is_imported_only_by_what_runs_it() -> None:
    code = "import accelight.strategies.fsdp.strategy, sys; assert 'deepspeed' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------------------
# Attributes of other libraries' modules, classes and objects are replaced through the table in `patches.py` alone.

PATCHES = ROOT / "strategies" / "upstream" / "patches.py"
LIBRARIES = ("torch", "lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics", "deepspeed", "transformers")
OURS = {
    "state/utils.py: changed.__init__": "a decorator of our own classes",
    "strategies/common/launch.py: changed.__init__": "a decorator of our own classes",
    "strategies/common/launch.py: changed.__reduce_ex__": "a decorator of our own classes",
    "strategies/registration.py: spec.loader.exec_module": "a loader that importlib made for this import",
    "strategies/deepspeed/engine.py: layer.__dict__['_original_parameters']": "removes what DeepSpeed has left",
    "callbacks/merge_sharded_checkpoint.py: job.write_companions": "our own object",
}
"""What looks like it and is not."""


def _libraries_names(tree: ast.Module) -> set[str]:
    """Return the names that a file has imported from a library, or from our files of its names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, (alias.asname or alias.name).split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            of_libraries = "upstream" in (node.module or "").split(".")
            names = [("torch" if of_libraries else node.module or "", one.asname or one.name) for one in node.names]
        else:
            continue
        found |= {name for module, name in names if module.split(".")[0] in LIBRARIES}
    return found


def _targets(node: ast.AST) -> list[tuple[ast.expr, ast.expr | None]]:
    """Return what a statement assigns to or deletes, each with its value where it is known."""
    if isinstance(node, ast.Delete):
        return [(target, None) for target in node.targets]
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [(node.target, node.value)]
    found: list[tuple[ast.expr, ast.expr | None]] = []
    if not isinstance(node, ast.Assign):
        return found
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            found += zip(target.elts, node.value.elts, strict=True)
        else:
            found += [(each, node.value) for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return found


def _is_function(value: ast.expr | None, functions: set[str]) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "partial"
    name = ast.unparse(value) if isinstance(value, ast.Name | ast.Attribute) else ""
    return isinstance(value, ast.Lambda) or name in functions


def _replacements(tree: ast.Module) -> set[str]:
    """Return where a file replaces attributes of others' objects, as far as it shows."""
    libraries, found = _libraries_names(tree), set[str]()
    outer = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    functions = {node.name for each in outer for one in each.body for node in ast.walk(one) if node in outer}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    functions |= {f"self.{node.name}" for each in classes for node in each.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        for target, value in _targets(node):
            place, text = target, ast.unparse(target)
            if isinstance(place, ast.Subscript) and re.search(r"(__dict__|vars\(.*\))\['(?!_accelight)", text):
                found.add(text)
            if not isinstance(place, ast.Attribute):
                continue
            root: ast.expr = place.value
            while isinstance(root, ast.Attribute):
                root = root.value
            name = root.id if isinstance(root, ast.Name) else ""
            is_own = isinstance(place.value, ast.Name) and name in ("self", "cls")
            is_replaced = name in libraries or place.attr in ("__class__", "cell_contents")
            if is_replaced or (not is_own and _is_function(value, functions)):
                found.add(text)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            found |= {ast.unparse(node)} if ast.unparse(node.args[0]).split(".")[0] in libraries else set()
    return found


def test_what_belongs_to_others_is_replaced_through_the_table() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {text}"
        for _, path in _files()
        if path != PATCHES
        for text in _replacements(ast.parse(path.read_text()))
    }
    assert found == set(OURS), "use patches.Patches or replace_for_good, with a row in patches.TABLE"
