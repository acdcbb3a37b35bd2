"""The tables of the documentation say of other code, and of ours, what is there."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator

import accelight
from tests.docs.pages import PAGES, ROOT, page_name, table_rows
from tests.docs.peers import LIGHTNING
from tools.docs import arguments, deepspeed_features, optimizers, user_code
from tools.docs.public_names import PACKAGES, public_names

DOCS = ROOT / "docs"


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("heading", LIGHTNING)
def test_every_argument_of_lightnings_strategies_is_in_a_table(heading: str) -> None:
    theirs, ours = LIGHTNING[heading]
    listed = [_code(row[0])[0] for row in table_rows(DOCS / "from-lightning.md", heading) if _code(row[0])]
    expected = list(inspect.signature(theirs).parameters)
    if theirs.__name__ == "FSDPStrategy":  # what it hands on
        torchs = inspect.signature(torch.distributed.fsdp.FullyShardedDataParallel.__init__).parameters
        expected += [name for name in torchs if name not in ("self", "module", *expected)]
    assert sorted(listed) == sorted(expected)
    for row in table_rows(DOCS / "from-lightning.md", heading):
        if not row[0].startswith("`") or row[1].startswith("key"):
            continue
        for code in _code(row[1]):
            name = code.partition("=")[0]
            assert name in inspect.signature(ours).parameters or re.match(r"(Trainer|fit)\(|\"", code), code


def test_every_name_of_the_accelerator_is_in_the_table() -> None:
    rows = [row for row in table_rows(DOCS / "from-accelerate.md", "## Every name of `Accelerator`") if _code(row[0])]
    listed = [name.split("(")[0] for row in rows for name in _code(row[0])]
    assert sorted(listed) == sorted(name for name in dir(Accelerator) if not name.startswith("_"))


def test_names_of_ours_in_the_guides_are_public() -> None:
    """Links into the API, and dotted names of accelight."""
    packages = {name: __import__(name, fromlist=["_"]) for name in (*PACKAGES, "accelight")}
    for page in PAGES:
        for path in set(re.findall(r"`(accelight\.[\w.]+)`", page.read_text(encoding="utf-8"))):
            owner, _, name = path.rpartition(".")
            there = path in packages or path == "accelight.json" or hasattr(packages.get(owner), name)
            there = there or (owner in packages and find_spec(path) is not None)  # a package that nobody has imported
            assert there, f"{page_name(page)}: {path}"


def test_the_tables_of_arguments_are_those_of_the_code() -> None:
    page = arguments.PAGE.read_text(encoding="utf-8")
    assert arguments.with_tables(page) == page, "python -m tools.docs.arguments writes them anew"


def test_the_table_of_optimizers_is_the_one_that_is_trained() -> None:
    page = optimizers.PAGE.read_text(encoding="utf-8")
    assert optimizers.with_table(page) == page, "python -m tools.docs.optimizers writes it anew"


def test_the_table_of_deepspeeds_features_is_the_one_that_configs_are_checked_by() -> None:
    page = deepspeed_features.PAGE.read_text(encoding="utf-8")
    assert deepspeed_features.with_table(page) == page, "python -m tools.docs.deepspeed_features writes it anew"


@pytest.mark.parametrize("page", user_code.PAGES, ids=page_name)
def test_the_tables_of_users_code_are_those_that_are_trained(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert user_code.with_table(page) == text, "python -m tools.docs.user_code writes them anew"


def test_every_variable_of_ours_is_documented() -> None:
    sources = [
        path for part in ("state", "checkpoint", "strategies", "callbacks") for path in (ROOT / part).rglob("*.py")
    ]
    used = {name for path in sources for name in re.findall(r"\bACCELIGHT_[A-Z_]+", path.read_text(encoding="utf-8"))}
    documented = arguments.PAGE.read_text(encoding="utf-8")
    assert used
    assert [name for name in sorted(used) if f"`{name}`" not in documented] == []


def test_the_reference_has_every_public_name() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.md")))
    listed = re.findall(r"^\.\. auto(?:class|function|exception):: (\S+)$", pages, re.MULTILINE)
    public = {path for path in listed if path in public_names().values()}
    assert public == set(public_names().values())


@pytest.mark.parametrize("name", sorted(public_names()))
def test_public_names_and_their_methods_have_docstrings(name: str) -> None:
    package, _, _ = public_names()[name].rpartition(".")
    documented = getattr(__import__(package, fromlist=[name]), name)
    assert inspect.getdoc(documented), name
    if not inspect.isclass(documented):
        return
    others = [base for base in documented.__mro__ if not base.__module__.startswith("accelight.")]
    for attribute, value in vars(documented).items():
        if attribute.startswith("_") or any(attribute in vars(base) for base in others):
            continue  # what overrides another library's method is documented there
        if inspect.isfunction(value) or isinstance(value, property):
            assert inspect.getdoc(getattr(documented, attribute)), f"{name}.{attribute}"


def _targets(page: Path) -> list[str]:
    text = re.sub(r"^(`{3,}).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    """Files and headings of this repository; Sphinx looks at the site's."""
    for target in _targets(page):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page_name(page)}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {_slug(heading) for heading in headings}, f"{page_name(page)}: {target}"


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


_MESSAGE = re.compile(r"^\*\*`(.+)`\*\*$", re.MULTILINE)


def test_the_messages_of_troubleshooting_are_in_the_code() -> None:
    sources = [
        path for part in ("state", "checkpoint", "strategies", "callbacks") for path in (ROOT / part).rglob("*.py")
    ]
    texts = [text for path in sources for text in _strings(ast.parse(path.read_text(encoding="utf-8")))]
    messages = _MESSAGE.findall((DOCS / "troubleshooting.md").read_text(encoding="utf-8"))
    assert len(messages) > 20
    for message in messages:
        parts = [part.strip() for part in message.split("...") if part.strip()]
        assert any(all(part in text for part in parts) for text in texts), message


def _strings(tree: ast.AST) -> Iterator[str]:
    """Give each string of a module; what an f-string fills in is ``...`` in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_example_is_in_the_index_and_in_a_test() -> None:
    page = (DOCS / "examples.md").read_text(encoding="utf-8")
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    folder = ROOT / "examples"
    examples = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*.*") if path.suffix in (".py", ".ipynb")
    )
    switching = [name for name in examples if name.startswith("switch/")]
    assert sorted(re.findall(r"^\| \[`([\w/]+\.(?:py|ipynb))`\]", page, re.MULTILINE) + switching) == examples
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    for name in examples:
        assert f"](../examples/{name})" in pages
        assert f"{Path(name).stem}." in tests, f"no test runs {name}"  # by itself, or by the job of that name


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["version"], cited["license"]) == (accelight.__version__, "Apache-2.0")


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_issue_templates_have_what_github_asks_for(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert isinstance(form["blank_issues_enabled"], bool)
        return
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields) > 0
