"""The tables of arguments in ``docs/arguments.md``, made from the code: ``python -m tools.docs.arguments`` writes them.

`tests/docs/test_tables.py` compares the page with what this makes.
"""

from __future__ import annotations

import ast
import enum
import inspect
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.docs.generated import with_lines

PAGE = Path(__file__).parents[2] / "docs" / "arguments.md"


def main() -> None:
    """Put the tables into the page."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(page: str) -> str:
    """Return the page with new tables in the place of those that it has."""
    return with_lines(page, PAGE, "arguments", _tables())


def _tables() -> Iterator[str]:
    from accelight.strategies import (
        AccelDeepSpeedStrategy,
        AccelFSDPStrategy,
        DeepSpeedPlugin,
        FullyShardedDataParallelPlugin,
    )
    from accelight.strategies.deepspeed import plugin as for_deepspeed
    from accelight.strategies.fsdp import settings as for_fsdp
    from accelight.strategies.fsdp.plugin import OBSOLETE_IN_FSDP2, PluginFields

    surroundings = dict(os.environ)
    for variable in (*for_fsdp.VARIABLES.values(), *for_deepspeed.VARIABLES.values()):
        os.environ.pop(variable, None)
    try:
        first, second = (FullyShardedDataParallelPlugin(fsdp_version=version) for version in (1, 2))
        deepspeed = DeepSpeedPlugin()
    finally:
        os.environ.update(surroundings)
    fields = _documented_fields(PluginFields)
    yield "## FullyShardedDataParallelPlugin\n"
    yield "| field | default | meaning | variable | type |"
    yield "| --- | --- | --- | --- | --- |"
    for name, (kind, meaning) in fields.items():
        default, other = _default(name, first), "ignored" if name in OBSOLETE_IN_FSDP2 else _default(name, second)
        if name != "fsdp_version" and other != default:
            default += f"; FSDP2: {other}"
        yield _row(f"`{name}`", default, meaning, _variable(for_fsdp.VARIABLES, name), kind)
    yield "\n### Further arguments of `AccelFSDPStrategy`\n"
    yield from _further(AccelFSDPStrategy, {*fields, "fsdp_plugin"})
    fields = _documented_fields(DeepSpeedPlugin)
    yield "\n## DeepSpeedPlugin\n"
    yield "| field | default | meaning | variable | type |"
    yield "| --- | --- | --- | --- | --- |"
    for name, (kind, meaning) in fields.items():
        default = {"hf_ds_config": "None", "zero3_init_flag": "True with stage 3"}.get(name) or _default(
            name, deepspeed
        )
        yield _row(f"`{name}`", default, meaning, _variable(for_deepspeed.VARIABLES, name), kind)
    yield "\n### Further arguments of `AccelDeepSpeedStrategy`\n"
    yield from _further(AccelDeepSpeedStrategy, {*fields, "deepspeed_plugin"})


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _variable(variables: Any, name: str) -> str:
    return f"`{variables[name]}`" if name in variables else ""


def _documented_fields(plugin: type) -> dict[str, tuple[str, str]]:
    """Return the type and the docstring of each field of a dataclass, as its source has them."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(plugin))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, tuple[str, str]] = {}
    for field, doc in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = _type(ast.unparse(field.annotation)), _meaning(str(doc.value.value))
    return found


def _type(annotation: str) -> str:
    short = re.sub(r"\b(?:nn|os|torch)\.", "", annotation).removesuffix(" | None").replace("'", '"')
    return "`" + short.replace("|", "\\|") + "`"


def _meaning(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def _default(name: str, plugin: Any) -> str:
    """Return what a plugin that was given nothing has, in the words that an argument would have."""
    value = getattr(plugin, name)
    if isinstance(value, enum.Enum):
        return f'`"{value.name.lower() if "state" in name else value.name}"`'
    if name in ("state_dict_config", "optim_state_dict_config"):
        return f"`{type(value).__name__}`"
    if name == "cpu_offload":
        return "`False`"
    named = {"backward_prefetch": '`"NO_PREFETCH"`', "auto_wrap_policy": '`"no_wrap"`'}
    if value is None:
        return named.get(name, "None")
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _further(strategy: type, known: set[str]) -> Iterator[str]:
    """The arguments that a strategy has beside its plugin's fields, as its signature and its docstring have them."""
    yield "| argument | default | meaning | type |"
    yield "| --- | --- | --- | --- |"
    meanings = _argument_docs(strategy)
    for name, parameter in inspect.signature(strategy).parameters.items():
        if name not in known:
            default = "None" if parameter.default is None else f"`{_shown(parameter.default)}`"
            yield _row(f"`{name}`", default, meanings[name], _type(str(parameter.annotation)))


def _shown(default: object) -> str:
    return f'"{default}"' if isinstance(default, str) else str(default)


def _argument_docs(documented: type) -> dict[str, str]:
    """Return what a Google docstring says about each argument."""
    text = inspect.getdoc(documented) or ""
    section = text[text.index("Args:\n") + len("Args:\n") :].partition("\n\n")[0]
    entries = re.split(r"^    (?=\w)", textwrap.indent(textwrap.dedent(section), "    "), flags=re.MULTILINE)
    pairs = (entry.partition(":") for entry in entries if entry.strip())
    return {name.strip(): _meaning(meaning) for name, _, meaning in pairs}


if __name__ == "__main__":
    main()
