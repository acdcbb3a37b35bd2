"""A Sphinx extension: beside each PAGE.html of the site lies PAGE.md, for programs that read Markdown.

It is the page's source. Where the source names what Sphinx puts in (another file, or a docstring), that stands in it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_DIRECTIVE = re.compile(r"^(`{3,}|:{3,})\{(\w[\w-]*)\}[ \t]*(\S*)[ \t]*\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)


def setup(app: Any) -> dict[str, bool]:
    """Connect the function below."""
    app.connect("build-finished", _write_pages)
    return {"parallel_read_safe": True}


def _write_pages(app: Any, exception: Exception | None) -> None:
    if exception is not None or app.builder.name not in ("html", "dirhtml"):
        return
    for name in app.env.found_docs:
        source, page = Path(app.env.doc2path(name)), Path(app.outdir, f"{name}.md")
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(as_markdown(source), encoding="utf-8")


def as_markdown(source: Path) -> str:
    """Return a page's Markdown, with what its directives put in."""
    return _DIRECTIVE.sub(lambda found: _replaced(found, source.parent), source.read_text(encoding="utf-8"))


def _replaced(found: re.Match[str], folder: Path) -> str:
    _, directive, argument, body = found.groups()
    if directive == "include":
        return (folder / argument).read_text(encoding="utf-8")
    if directive == "literalinclude":
        text = (folder / argument).read_text(encoding="utf-8")
        if before := re.search(r"^:diff: (\S+)$", body, re.MULTILINE):
            return f"```diff\n{''.join(_difference(folder / before[1], folder / argument))}```"
        return f"```{'python' if argument.endswith('.py') else 'bash'}\n{text}```"
    if directive == "toctree":
        return "\n".join(f"- {line}.md" for line in body.splitlines() if re.fullmatch(r"[\w/-]+", line))
    if directive == "eval-rst":
        return "\n\n".join(map(_documented, re.findall(r"^\.\. auto\w+:: (\S+)$", body, re.MULTILINE)))
    return found[0]


def _difference(before: Path, after: Path) -> Iterable[str]:
    old, new = (path.read_text(encoding="utf-8").splitlines(keepends=True) for path in (before, after))
    return difflib.unified_diff(old, new, before.name, after.name)


def _signature(documented: Any) -> str:
    """Return the arguments of something public; an exception that only has a name takes its message."""
    is_error = inspect.isclass(documented) and issubclass(documented, Exception)
    return "(message)" if is_error and "__init__" not in vars(documented) else str(inspect.signature(documented))


def _documented(path: str) -> str:
    owner, _, name = path.rpartition(".")
    documented = getattr(importlib.import_module(owner), name)
    parts = [
        f"### `{name}`",
        f"```python\n{name}{_signature(documented)}\n```",
        inspect.getdoc(documented) or "",
    ]
    if inspect.isclass(documented):
        for method, value in vars(documented).items():
            if inspect.isfunction(value) and value.__doc__ and not method.startswith("_"):
                parts.append(f"#### `{name}.{method}{inspect.signature(value)}`\n\n{inspect.cleandoc(value.__doc__)}")
    return "\n\n".join(parts)
