"""A Sphinx extension: names in docstrings and annotations become links to where they are documented."""

from __future__ import annotations

import re
from typing import Any

from tools.docs.public_names import public_names

_NAME = re.compile(r"(?<![`:\w])`([^`<>]+)`(?!`)")


def setup(app: Any) -> dict[str, bool]:
    """Connect the functions below."""
    app.connect("autodoc-process-docstring", _link_names)
    app.connect("missing-reference", _find_public_name)
    return {"parallel_read_safe": True}


def _link_names(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings have names in single backticks: a public one becomes a link, another is code."""
    package = name.split(".")[:2]
    lines[:] = [_NAME.sub(lambda found: _as_role(found[1], ".".join(package), name), line) for line in lines]


def _as_role(text: str, package: str, documented: str) -> str:
    first, _, rest = text.partition("(")[0].partition(".")
    path = public_names().get(first)
    if path is None or rest or path == documented:
        return f"``{text}``"
    return f":py:obj:`{text} <{path}>`"


def _find_public_name(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Annotations name the private file that defines a class: link the public name."""
    target = str(node.get("reftarget", ""))
    path = public_names().get(target.rpartition(".")[2])
    if node.get("refdomain") != "py" or path is None or path == target:
        return None
    return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, "obj", path, node, contnode)
