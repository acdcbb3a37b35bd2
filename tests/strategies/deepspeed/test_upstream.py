"""The private names of DeepSpeed, Lightning and torch that `AccelDeepSpeedStrategy` uses: all are still there.

That nothing else is used is for ``tests/test_upstream.py``, which also looks at the other libraries.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from accelight.strategies.deepspeed.engines import upstream

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
    files = (Path(module.__file__) for module in modules if module is not None and module.__file__ is not None)
    return any(re.search(rf"\b{name}\b", file.read_text()) for file in files)


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
