"""What is built and installed: the package `accelight`, and nothing beside it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import accelight
from tests.scripts import run_script

ROOT = Path(__file__).parents[1]
PARTS = ["state", "checkpoint", "strategies", "callbacks"]
ITSELF = [path for path in sorted((ROOT / "package").iterdir()) if path.is_file()]
"""What `accelight` is beside its parts."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    # Without isolation: the build requirement is installed, and nothing has to be downloaded.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


def test_wheel_holds_every_source_and_nothing_else(built: tuple[Path, Path]) -> None:
    names = {name for name in zipfile.ZipFile(built[1]).namelist() if ".dist-info/" not in name}
    expected = {f"accelight/{part}/py.typed" for part in PARTS} | {f"accelight/{path.name}" for path in ITSELF}
    for part in PARTS:
        expected |= {f"accelight/{path.relative_to(ROOT)}" for path in (ROOT / part).rglob("*.py")}
    assert names == expected


def test_the_description_has_no_links_that_are_dead_elsewhere(built: tuple[Path, Path]) -> None:
    archive = zipfile.ZipFile(built[1])
    [name] = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
    described = archive.read(name).decode()
    assert "Description-Content-Type: text/markdown" in described
    assert "docs/install.md, docs/tour.md" in described
    assert not re.findall(r"\]\((?!https?://|#)", described)
    assert ".svg" not in described


def test_sdist_holds_the_tests(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = archive.getnames()
    for wanted in ("tests/ranks.py", "examples/train_gpt.py", "constraints.txt", "Makefile", "LICENSE"):
        assert any(name.endswith("/" + wanted) for name in names), wanted


@pytest.mark.exhaustive
def test_the_sdists_tests_find_all_that_they_need(built: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(built[0]) as archive:
        archive.extractall(tmp_path)
    [checkout] = tmp_path.iterdir()
    package = tmp_path / "site" / "accelight"
    package.mkdir(parents=True)
    for source in [*(checkout / part for part in PARTS), *(checkout / "package").iterdir()]:
        (package / source.name).symlink_to(source)
    for chosen in (["--collect-only"], ["tests/test_workflows.py", "tests/test_examples.py"]):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not exhaustive", *chosen]
        environment = {**os.environ, "PYTHONPATH": str(package.parent)}
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_installed_wheel_imports_and_has_its_command(built: tuple[Path, Path], tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), str(built[1])]
    subprocess.run(install, check=True)
    assert not (tmp_path / "state").exists()
    code = "import accelight.state as s, accelight.strategies.fsdp as f; print(s.__file__); print(f.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert all(line.startswith(str(tmp_path)) for line in found.stdout.split())
    assert (tmp_path / "bin" / "accelight").is_file()
    assert importlib.metadata.Distribution.at(next(tmp_path.glob("*.dist-info"))).version == accelight.__version__


_USED = """
import site, sys
site.addsitedir({folder!r})
import accelight
from tests.scripts import run_script
assert [name for name in sys.modules if name.startswith("accelight")] == ["accelight"]
import accelight.checkpoint.cli
print(accelight.__file__, accelight.checkpoint.cli.__file__)
"""


def test_an_editable_install_is_this_checkout(tmp_path: Path) -> None:
    """Without any other package: the parts are found in their folders, and merging needs none."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    checkout = tmp_path / "checkout"  # setuptools writes beside the sources
    for name in ("package", *PARTS, "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, checkout / name)
    folder = tmp_path / "installed"
    subprocess.run([*install, "--target", str(folder), "--editable", str(checkout)], check=True)
    command = [sys.executable, "-S", "-c", _USED.format(folder=str(folder))]
    found = subprocess.run(command, env={}, capture_output=True, text=True, check=True).stdout.split()
    assert found == [str(checkout / "package" / "__init__.py"), str(checkout / "checkpoint" / "cli.py")]


@pytest.mark.parametrize("module", ["accelight", "accelight.checkpoint"])
def test_the_package_is_its_command(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"accelight {accelight.__version__}\n"


@pytest.mark.skipif(not (ROOT / ".types").is_dir(), reason="an sdist has no links")
def test_static_tools_find_every_part() -> None:
    found = (ROOT / ".types" / "accelight").iterdir()
    links = {path.name: path.resolve() for path in found if path.name != "__pycache__"}  # of the site's build
    assert links == {path.name: path for path in [*(ROOT / part for part in PARTS), *ITSELF]}


def test_imports_are_silent() -> None:
    code = "import accelight.strategies, accelight.callbacks, accelight.state; accelight.strategies.AccelFSDPStrategy"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


_DEPRECATED = """
import traceback
import warnings

def raised_here(message, category, filename, lineno, file=None, line=None):
    if issubclass(category, (DeprecationWarning, FutureWarning)):
        around = ("warnings.py", "typing_extensions.py", "c10d_logger.py")  # of what is deprecated itself
        callers = [each.filename for each in traceback.extract_stack()[:-1] if not each.filename.endswith(around)]
        print(f"deprecated: {callers[-1]}: {message}", flush=True)

warnings.showwarning = raised_here
warnings.simplefilter("always")
import os
import torch
from lightning.pytorch import LightningModule, Trainer
from accelight.callbacks import GradNormMonitor, MergeShardedCheckpoint, TriggerEarlyStopping
from accelight.strategies import AccelFSDPStrategy

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

if __name__ == "__main__":
    version, folder = int(os.environ["FSDP_VERSION"]), os.environ["FOLDER"]
    trainer = Trainer(
        strategy=AccelFSDPStrategy(fsdp_version=version, state_dict_type="sharded_state_dict"), accelerator="cpu",
        devices=2, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=1.0, default_root_dir=folder,
        callbacks=[GradNormMonitor(), MergeShardedCheckpoint(folder + "/merged"), TriggerEarlyStopping()],
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=2))
    trainer.save_checkpoint(folder + "/saved")
"""


@pytest.mark.machines
@pytest.mark.parametrize("version", [1, 2])
def test_a_plain_run_warns_of_nothing_deprecated(version: int, tmp_path: Path) -> None:
    """Nothing, that is, that a call of accelight's has caused: the warnings of others are at their own places."""
    env = {"FSDP_VERSION": f"{version}", "FOLDER": str(tmp_path)}
    script = run_script(_DEPRECATED, env=env)
    parts = [importlib.import_module(f"accelight.{part}") for part in PARTS]
    own = tuple(f"deprecated: {Path(part.__file__ or '').parent}/" for part in parts)
    assert not [line for line in script.lines if line.startswith(own)]
