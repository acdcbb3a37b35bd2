"""The environments of ``tools.matrix``: which versions each has, and how it is made from the built wheel with uv."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
SHOWN = ("torch", "lightning", "deepspeed", "transformers", "accelerate", "torchmetrics")
"""Packages whose versions the table has."""
_TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "zstandard", "build", "setuptools", "pip")
_FLOOR = re.compile(r'"([\w-]+)(?:\[[\w,]+\])?>=([\w.]+)[^"]*"')
_GITHUB = "git+https://github.com"


@dataclass(frozen=True)
class Environment:
    """A row of the table."""

    python: str
    versions: Literal["lowest", "pinned", "newest"]
    """The floors of pyproject.toml, constraints.txt, or whatever is out."""
    torch: str | None = None
    """This one instead."""
    heads: tuple[str, ...] = ()
    """Requirements that take the place of releases."""
    prereleases: str | None = None
    """An index of torch's nightly builds."""


ENVIRONMENTS = {
    "lowest": Environment("3.10", "lowest"),
    "pinned": Environment("3.11", "pinned"),
    "torch-2.14": Environment("3.12", "newest", torch="2.14.1"),
    "newest": Environment("3.13", "newest"),
    "heads": Environment(
        "3.13",
        "newest",
        heads=(
            f"lightning @ {_GITHUB}/Lightning-AI/pytorch-lightning",
            f"accelerate @ {_GITHUB}/huggingface/accelerate",
            f"deepspeed @ {_GITHUB}/deepspeedai/DeepSpeed",
        ),
        prereleases="https://download.pytorch.org/whl/nightly/cpu",
    ),
}
RELEASES = tuple(name for name, environment in ENVIRONMENTS.items() if not environment.heads)


class MissingPythonError(Exception):
    """An environment that cannot be made on this machine, with the reason."""


class UnresolvableError(Exception):
    """An environment whose versions cannot be installed beside each other, with the reason."""


def floors(pyproject: str) -> dict[str, str]:
    """Return the lowest version that is claimed of each package."""
    claimed = pyproject.partition("\ndependencies = [")[2].partition("\ndev = [")[0]
    return dict(_FLOOR.findall(claimed))


def constraints(environment: Environment) -> list[str]:
    """Return what holds the versions of an environment in place."""
    if environment.versions == "lowest":
        lowest = floors((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        lines = [f"{name}=={version}" for name, version in lowest.items()]
        lines.append(f"pytorch-lightning=={lowest['lightning']}")
    elif environment.versions == "pinned":
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    else:
        lines = []
    if environment.torch:
        lines = [line for line in lines if not line.startswith("torch==")] + [f"torch=={environment.torch}"]
    return lines


def build_wheel(folder: Path) -> Path:
    """Build the wheel, from the sdist: nothing that lies about in the checkout gets into it."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("accelight-*"):
        old.unlink()
    uv("build", "--quiet", "--out-dir", str(folder), str(ROOT))
    return next(folder.glob("*.whl"))


def make(name: str, wheel: Path, folder: Path) -> None:
    """Make the environment in ``folder`` anew, with the wheel, its extras, and what tests need.

    Raises:
        MissingPythonError: If there is no such Python.
        UnresolvableError: If the versions cannot be installed together.
    """
    environment = ENVIRONMENTS[name]
    bare(environment.python, folder)
    pins = folder / "constraints.txt"
    pins.write_text("\n".join(constraints(environment)) + "\n", encoding="utf-8")
    requirements = [f"accelight[all,bench] @ {wheel.as_uri()}", "pytorch-lightning", *_TEST_TOOLS]
    index = ["--index", environment.prereleases, "--prerelease", "allow"] if environment.prereleases else []
    if environment.heads:
        overrides = folder / "overrides.txt"
        overrides.write_text("\n".join(environment.heads) + "\n", encoding="utf-8")
        index += ["--overrides", str(overrides)]
    try:
        uv("pip", "install", "--quiet", "--python", str(folder), "-c", str(pins), *index, *requirements)
    except subprocess.CalledProcessError as error:
        shutil.rmtree(folder)  # what is half made is not used again
        raise UnresolvableError(" ".join(error.stderr.split())) from error


def renew(wheel: Path, folder: Path) -> None:
    """Put the wheel as it is now into an environment that was kept."""
    uv("pip", "install", "--quiet", "--python", str(folder), "--no-deps", "--reinstall", str(wheel))


def bare(python: str, folder: Path) -> None:
    """Make an empty environment.

    Raises:
        MissingPythonError: If there is no such Python, and uv cannot fetch one.
    """
    if folder.exists():
        shutil.rmtree(folder)
    try:
        uv("venv", "--quiet", "--python", python, str(folder))
    except subprocess.CalledProcessError as error:
        raise MissingPythonError(
            f"no Python {python}: put it on PATH, or let uv fetch it (uv python install {python})"
        ) from error


def versions(folder: Path) -> dict[str, str]:
    """Return the versions of an environment, Python's among them."""
    listed = json.loads(uv("pip", "list", "--format", "json", "--python", str(folder)))
    found = {package["name"]: package["version"] for package in listed}
    code = "import platform; print(platform.python_version())"
    python = subprocess.run([str(folder / "bin" / "python"), "-c", code], capture_output=True, text=True, check=True)
    return {"python": python.stdout.strip(), **{name: found[name] for name in SHOWN if name in found}}


def uv(*arguments: str) -> str:
    """Run uv and return what it printed.

    Raises:
        ModuleNotFoundError: If there is no uv.
        subprocess.CalledProcessError: If it fails; ``stderr`` says why.
    """
    program = shutil.which("uv")
    if program is None:
        raise ModuleNotFoundError("tools.matrix makes its environments with uv: pip install uv")
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run([program, *arguments], env=clean, capture_output=True, text=True, check=True).stdout
