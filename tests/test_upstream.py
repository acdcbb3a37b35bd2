"""Private names of other libraries: all in one place each, each with a reason, each still there."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FLOORS = ("state", "checkpoint", "strategies", "callbacks")
FILES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
HOMES = [path for path in FILES if path.name == "upstream.py" or path.parent.name == "upstream"]
LIBRARIES = ("torch", "lightning", "torchmetrics", "deepspeed", "transformers")
PYTHONS_OWN = {"_current_frames", "_exit", "_getframe"}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _module(path: Path) -> Any:
    return importlib.import_module(f"accelight.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}")


TABLES: dict[str, dict[str, tuple[str, str]]] = {
    f"{path.relative_to(ROOT).with_suffix('')}:{name}": table
    for path in HOMES
    if path.name != "__init__.py"
    for name, table in vars(_module(path)).items()
    if name.endswith("ATTRIBUTES")
}
ONLY_WITH: dict[str, Requirement] = {
    name: Requirement(with_) for path in HOMES for name, with_ in getattr(_module(path), "ONLY_WITH", {}).items()
}
ENTRIES = [
    pytest.param(name, *entry, id=f"{where}:{name}") for where, table in TABLES.items() for name, entry in table.items()
]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _private_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in LIBRARIES:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if any(map(_is_private, full.split("."))):
                    yield full
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if any(map(_is_private, one.name.split("."))))


def test_private_names_are_imported_in_one_place_each() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}" for path in FILES if path not in HOMES for name in _private_imports(path)
    }
    assert not found, "import these in an upstream module, with the reason, and from there"


def test_lightning_is_named_in_one_place() -> None:
    home = ROOT / "strategies" / "upstream" / "lightning.py"
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in FILES
        if path != home
        for node in ast.walk(_tree(path))
        for name in _modules_imported(node)
        if name.split(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning")
    }
    assert not found, "import it from strategies/upstream/lightning.py, which knows the package that is used"


def test_both_packages_of_lightnings_give_the_same_names() -> None:
    tree = _tree(ROOT / "strategies" / "upstream" / "lightning.py")
    [choice] = [node for node in tree.body if isinstance(node, ast.If)]
    found = [
        sorted(
            re.sub("^lightning[_.]fabric", "fabric", re.sub("^(pytorch_lightning|lightning.pytorch)", "", name))
            + f": {alias.name}"
            for node in branch
            if isinstance(node, ast.ImportFrom)
            for name in [node.module or ""]
            for alias in node.names
        )
        for branch in (choice.body, choice.orelse)
    ]
    assert found[0] == found[1]


def _modules_imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def _own_names() -> set[str]:
    """Return what the package itself defines: functions, classes, variables, attributes that it sets."""
    own: set[str] = set()
    for path in FILES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                own.add(node.attr)
    return own


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _foreign_attributes() -> dict[str, set[str]]:
    """Return the private attributes that are used of other objects than one's own, and in which files."""
    own, found = _own_names(), dict[str, set[str]]()
    for path in FILES:
        for node in ast.walk(_tree(path)):
            if not isinstance(node, ast.Attribute) or not _is_private(node.attr) or node.attr in own | PYTHONS_OWN:
                continue
            if not node.attr.startswith("_accelight"):  # what we put on others' objects
                found.setdefault(node.attr, set()).add(f"{path.relative_to(ROOT)}")
    return found


def test_private_attributes_are_listed_with_a_reason() -> None:
    listed = {name for table in TABLES.values() for name in table}
    missing = {name: sorted(files) for name, files in _foreign_attributes().items() if name not in listed}
    assert not missing, "list these in ATTRIBUTES of an upstream module: who has it, why it is used"


def test_nothing_is_listed_that_is_not_used() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in FILES if path not in HOMES)
    inside = [
        ast.unparse(node)
        for path in HOMES
        for node in _tree(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    unused = [name for table in TABLES.values() for name in table if name not in "\n".join([text, *inside])]
    names = {name for path in HOMES for name in getattr(_module(path), "__all__", ())}
    assert not unused + [name for name in names if name not in text and not name.endswith("ATTRIBUTES")]


def _resolve(path: str) -> Any:
    """Return the module or class with a dotted path."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


@pytest.mark.parametrize(("name", "owner", "reason"), ENTRIES)
def test_it_is_still_there(name: str, owner: str, reason: str) -> None:
    library = owner.split(".")[0]
    with_ = ONLY_WITH.get(name, Requirement(library))
    if not with_.specifier.contains(version(with_.name), prereleases=True):
        pytest.skip(f"{name} is there with {with_} alone, and its home does without it elsewhere")
    gone = (
        f"{library} {version(library)} has no {name} in {owner} any more (or has moved it). It is used because: "
        f"{reason}. Find what takes its place, in the upstream module that lists it."
    )
    try:
        found = _resolve(owner)
    except (ModuleNotFoundError, AttributeError):
        pytest.fail(gone)
    assert _has(found, name), gone


def _has(owner: Any, name: str) -> bool:
    """Return whether a class or module has a name, or its file gives it to instances."""
    if hasattr(owner, name):
        return True
    name = name.removeprefix(f"_{owner.__name__}")  # as its class writes it
    modules = [owner] if inspect.ismodule(owner) else [inspect.getmodule(each) for each in owner.__mro__]
    files = {file for each in modules if (file := getattr(each, "__file__", None)) and file.endswith(".py")}
    return any(re.search(rf"\b{name}\b", Path(file).read_text(encoding="utf-8")) for file in files)


def test_what_is_gone_is_told() -> None:
    engine = _resolve("deepspeed.runtime.engine.DeepSpeedEngine")
    assert _has(engine, "_running_engine_step")
    assert not _has(engine, "_running_engine_steps")
    assert not _has(_resolve("torch.distributed"), "_no_such_name")
