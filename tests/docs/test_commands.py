"""Each shell command of README and the documentation is one that its program takes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from accelight.checkpoint.cli import _parser
from accelight.command import _add_timings
from accelight.strategies.planning.command import add_plan
from benchmarks.__main__ import BENCHMARKS
from tests.docs.pages import PAGES, ROOT, blocks, page_name
from tests.scripts import run_script


def _commands(page: Path) -> list[str]:
    """The lines of `console` blocks that begin with a prompt."""
    lines = [line for block in blocks(page, "console") for line in block.text.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


COMMANDS = sorted({command for page in PAGES for command in _commands(page)})


def _accelight(arguments: list[str]) -> None:
    if arguments != ["--version"]:
        _parser((add_plan, _add_timings)).parse_args(arguments)


def _python(arguments: list[str]) -> None:
    if arguments[0] != "-m":
        return _script(arguments)
    module, rest = arguments[1], arguments[2:]
    if module in ("accelight", "accelight.checkpoint"):
        _accelight(rest)
    elif module == "benchmarks":
        assert set(rest) <= {*BENCHMARKS, "--keep"}
    else:
        assert find_spec(module), module
    return None


def _script(arguments: list[str]) -> None:
    """A script of the repository with options that its help has, or one that its page makes (`tour.py`)."""
    script, *rest = arguments
    if "/" not in script:
        assert any(f"`{script}`" in page.read_text(encoding="utf-8") for page in PAGES), script
        return
    text = (ROOT / script).read_text(encoding="utf-8")
    for option in rest:
        if option.startswith("--"):
            assert f'add_argument("{option}"' in text, f"{script} has no {option}"


def _torchrun(arguments: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    told = get_args_parser().parse_args(arguments)
    _script([told.training_script, *told.training_script_args])


def _accelerate(arguments: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert arguments[0] == "launch"
    told = launch_command_parser().parse_args(arguments[1:])
    _script([told.training_script, *told.training_script_args])


def _pip(arguments: list[str]) -> None:
    extras = re.search(r"^\[project.optional-dependencies\](.*?)^\[", _pyproject(), re.MULTILINE | re.DOTALL)
    assert extras
    parser = ArgumentParser()
    parser.add_argument("--no-deps", action="store_true")
    parser.add_argument("packages", nargs="+")
    assert arguments[0] == "install"
    for package in parser.parse_args(arguments[1:]).packages:
        name, _, wanted = package.rstrip("]").partition("[")
        assert name in ("accelight", ".", "peft", "uv")
        for extra in filter(None, wanted.split(",")):
            assert re.search(rf"^{extra} = \[", extras[1], re.MULTILINE), extra


def _pyproject() -> str:
    return (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def _make(arguments: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(arguments) <= set(targets)


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "accelight": _accelight,
    "accelerate": _accelerate,
    "make": _make,
    "pip": _pip,
    "python": _python,
    "torchrun": _torchrun,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_that_its_program_takes(command: str) -> None:
    words = shlex.split(command, comments=True)
    while re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    assert words[0] in CHECKS, f"no test knows {words[0]}: {command}"
    CHECKS[words[0]](words[1:])


def test_commands_in_the_text_are_there() -> None:
    """In single backticks: benchmarks, make targets, and modules to run."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for command in re.findall(r"`((?:[A-Z_]+=\S+ )*(?:python -m|make) [^`]+)`", text):
            words = [word for word in command.split() if not re.match(r"[A-Z_]+=", word)]
            if "NAME" in words or "..." in words:
                continue
            if words[0] == "make":
                _make(words[1:2])
            elif words[2] == "benchmarks":
                _python(words[1:])
            elif words[2].startswith(("accelight", "tests.", "tools.", "benchmarks.")):
                assert find_spec(words[2]), f"{page_name(page)}: {command}"


def test_the_shells_prompt_is_not_copied_into_what_has_none() -> None:
    """Commands are in `console` blocks, where the prompt tells them from what they print."""
    for page in PAGES:
        for block in blocks(page, "console"):
            assert block.text.startswith("$ "), f"{page_name(page)}:{block.line}"


@pytest.mark.machines
def test_accelerates_config_file_reaches_the_strategy(tmp_path: Path) -> None:
    """The file that the page shows, through Accelerate's own launcher."""
    [config] = blocks(ROOT / "docs" / "from-accelerate.md", "yaml")
    assert yaml.safe_load(config.text)["distributed_type"] == "FSDP"
    (tmp_path / "fsdp.yaml").write_text(config.text, encoding="utf-8")
    (tmp_path / "script.py").write_text(
        "from accelight.strategies import AccelFSDPStrategy\n"
        "plugin = AccelFSDPStrategy().fsdp_plugin\n"
        "print(plugin.fsdp_version, plugin.reshard_after_forward, plugin.state_dict_type.name,\n"
        "      plugin.transformer_cls_names_to_wrap, flush=True)\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    done = subprocess.run(
        [*command, "--config_file", "fsdp.yaml", "script.py"], cwd=tmp_path, env={**os.environ}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("2 False SHARDED_STATE_DICT ['Block']") == 2, done.stdout


@pytest.mark.exhaustive
def test_the_yaml_of_the_strategy_is_read_by_lightnings_cli(tmp_path: Path) -> None:
    [config] = blocks(ROOT / "docs" / "fsdp.md", "yaml")
    (tmp_path / "config.yaml").write_text(config.text, encoding="utf-8")
    script = (
        "from lightning.pytorch import LightningModule\n"
        "from lightning.pytorch.cli import LightningCLI\n"
        "cli = LightningCLI(LightningModule, run=False)\n"
        "plugin = cli.trainer.strategy.fsdp_plugin\n"
        "print(plugin.fsdp_version, plugin.transformer_cls_names_to_wrap, plugin.mixed_precision_policy.param_dtype)\n"
    )
    told = run_script(script, "--config", "config.yaml", "--trainer.accelerator", "cpu", cwd=tmp_path)
    assert told.lines[-1] == "2 ['Block'] torch.bfloat16"


def test_the_map_for_contributors_names_files_that_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|md|toml|txt))`", text))
    folders = [ROOT, ROOT / "strategies", ROOT / "tests"]
    assert named
    assert not {name for name in named if not any((folder / name).exists() for folder in folders)}
