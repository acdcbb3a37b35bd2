"""The private names of DeepSpeed, Lightning and torch that `AccelDeepSpeedStrategy` uses: all are still there."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from accelight.strategies.deepspeed.engines import upstream

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "strategies" / "deepspeed"
ENTRIES = [
    pytest.param(name, *where, id=f"{name}-stage3" if table is upstream.STAGE_3_ATTRIBUTES else name)
    for table in (upstream.ATTRIBUTES, upstream.STAGE_3_ATTRIBUTES)
    for name, where in table.items()
]


def find(path: str) -> Any:
    """Import a module, or the class in a module."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def has(owner: Any, name: str) -> bool:
    """Whether a class or module has a name, or its file gives it to instances."""
    if hasattr(owner, name):
        return True
    modules = [owner] if isinstance(owner, ModuleType) else [inspect.getmodule(each) for each in owner.__mro__[:-1]]
    sources = (inspect.getsource(module) for module in modules if getattr(module, "__file__", None))
    return any(re.search(rf"\b{name}\b", source) for source in sources)


@pytest.mark.parametrize(("name", "path", "purpose"), ENTRIES)
def test_a_private_attribute_is_still_there(name: str, path: str, purpose: str) -> None:
    library = path.split(".")[0]
    found = f"{library} {importlib.metadata.version(library)}"
    try:
        owner = find(path)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{found} has no {path} ({error}), whose {name} was used: {purpose}.")
    assert has(owner, name), f"{found} has no {name} in {path} any more. It was used: {purpose}."


def test_what_is_gone_is_told() -> None:
    assert has(find("deepspeed.runtime.engine.DeepSpeedEngine"), "_running_engine_step")
    assert not has(find("deepspeed.runtime.engine.DeepSpeedEngine"), "_running_engine_steps")
    assert not has(find("torch.distributed"), "_no_such_name")


def parsed_files() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def test_private_names_are_imported_in_one_place() -> None:
    for path, tree in parsed_files():
        if path.name == "upstream.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                private = [part for part in parts if part.startswith("_") and part != "__future__"]
                assert not private, f"{path} imports {private}: import it in engines/upstream.py, with the reason"


def test_private_attributes_are_listed() -> None:
    own = {"__name__"}
    for folder in ("state", "strategies"):
        for path in (ROOT / folder).rglob("*.py"):
            own |= set(defined_in(ast.parse(path.read_text())))
    listed = {*upstream.ATTRIBUTES, *upstream.STAGE_3_ATTRIBUTES}
    for path, tree in parsed_files():
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        private = {name for name in used if name.startswith("_") and not name.startswith("__")}
        missing = sorted(private - own - listed)
        assert not missing, f"{path} uses {missing}: list them in engines/upstream.py, with the reason"


def defined_in(tree: ast.Module) -> Iterator[str]:
    """Yield what a file gives its own modules, classes and instances."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
