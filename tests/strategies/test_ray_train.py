"""Ray's strategies and callback without a cluster: what they are, and what they say where they cannot work."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

import accelight.strategies
from accelight.callbacks import RayReportCheckpoint
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy, reported_checkpoint
from accelight.strategies.ray_train import storage
from tests.strategies.oracle import quiet_trainer

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'accelight[ray]'"
)

_WITHOUT_RAY = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "ray":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "ray" else found(name, package)
from accelight.strategies import *
from accelight.callbacks import *
for make in (
    lambda: __import__("accelight.strategies").strategies.RayAccelFSDPStrategy,
    lambda: __import__("accelight.strategies").strategies.RayAccelDeepSpeedStrategy,
    reported_checkpoint,
):
    try:
        make()
    except ModuleNotFoundError as error:
        print(error)
"""


def _run(code: str, **env: str) -> str:
    command = ["env", *(f"{name}={value}" for name, value in env.items()), sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_without_ray_its_names_say_what_to_install() -> None:
    lines = _run(_WITHOUT_RAY).splitlines()
    strategies = "A strategy for Ray's workers"
    whose = (strategies, strategies, "reported_checkpoint()")
    advice = "needs Ray Train 2.51 or newer, but none is installed: pip install 'accelight[ray]'."
    assert lines == [f"{who} {advice}" for who in whose]


def test_ray_is_imported_by_its_names_alone() -> None:
    _run(
        "import sys, accelight.strategies, accelight.callbacks\n"
        "accelight.strategies.AccelFSDPStrategy, accelight.callbacks.RayReportCheckpoint\n"
        "accelight.strategies.reported_checkpoint\n"
        "assert 'ray' not in sys.modules"
    )


@needs_ray
@pytest.mark.exhaustive
def test_the_first_version_of_ray_train_is_refused() -> None:
    code = (
        "try:\n    from accelight.strategies import RayAccelFSDPStrategy\n"
        "except RuntimeError as error:\n    print(error)"
    )
    printed = _run(code, RAY_TRAIN_V2_ENABLED="0")
    assert "needs the second version of Ray Train, but RAY_TRAIN_V2_ENABLED=0 selects the first" in printed


@needs_ray
@pytest.mark.exhaustive
def test_both_of_lightnings_packages_are_told_apart() -> None:
    code = (
        "try:\n    from accelight.strategies import RayAccelFSDPStrategy\n"
        "except RuntimeError as error:\n    print(error)"
    )
    printed = _run(code, ACCELIGHT_LIGHTNING="pytorch_lightning")
    assert "Ray uses the package lightning, but accelight uses pytorch_lightning" in printed


@needs_ray
@pytest.mark.parametrize("kind", ["FSDP", "DeepSpeed"])
def test_they_are_rays_strategies_with_our_semantics(kind: str) -> None:
    from ray.train import lightning as theirs

    ours: Any = getattr(accelight.strategies, f"RayAccel{kind}Strategy")
    assert issubclass(ours, getattr(theirs, f"Ray{kind}Strategy"))
    plain: Any = AccelFSDPStrategy if kind == "FSDP" else AccelDeepSpeedStrategy
    other = {
        name
        for parent in plain.__mro__
        if parent.__module__.startswith("accelight.")
        for name in vars(parent)
        if not name.startswith("__") and getattr(ours, name) is not getattr(plain, name)
    }
    assert other <= {
        "_configure_launcher", "num_processes", "setup_environment", "strategy_name", "where_group_starts",
        "_abc_impl",
    }  # fmt: skip


@needs_ray
@pytest.mark.parametrize("kind", ["FSDP", "DeepSpeed"])
def test_outside_of_a_worker_they_say_so(kind: str) -> None:
    strategy = getattr(accelight.strategies, f"RayAccel{kind}Strategy")()
    assert type(copy.deepcopy(strategy)) is type(strategy)
    expected = f"RayAccel{kind}Strategy works only inside a Ray Train worker.*Elsewhere, use Accel{kind}Strategy"
    with pytest.raises(RuntimeError, match=expected):
        quiet_trainer(strategy, 1)


class _Stored:
    """A checkpoint of Ray's in a bucket."""

    path = "bucket/run/checkpoint_epoch=0-step=10"
    is_whole = True

    def to_directory(self, folder: str) -> None:
        Path(folder).mkdir()
        if not self.is_whole:
            raise OSError("no connection")


def test_downloads_of_workers_that_died_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(storage, "_downloaded", set())
    worker, stored = SimpleNamespace(get_local_rank=lambda: 0, get_experiment_name=lambda: "run"), _Stored()
    [folder] = {storage._download(stored, worker) for _ in range(2)}
    assert [folder] == [*tmp_path.iterdir()]
    storage.remove_downloaded()
    stored.is_whole = False
    with pytest.raises(RuntimeError, match="no connection"):
        storage._download(stored, worker)
    assert [*tmp_path.iterdir()] == []


@needs_ray
def test_a_checkpoint_needs_a_worker(tmp_path: Any) -> None:
    with pytest.raises(
        RuntimeError, match=r"reported_checkpoint\(\) works only inside .*use newest_checkpoint\(folder\)"
    ):
        reported_checkpoint()
    trainer = Trainer(callbacks=[RayReportCheckpoint()], accelerator="cpu", logger=False, default_root_dir=tmp_path)
    assert [type(one) for one in trainer.checkpoint_callbacks] == [RayReportCheckpoint]
    with pytest.raises(RuntimeError, match=r"RayReportCheckpoint works only inside .*ModelCheckpoint"):
        trainer.fit(_Module())


class _Module(LightningModule):
    def train_dataloader(self) -> Any:
        return [0]

    def training_step(self, batch: Any) -> None:
        return None

    def configure_optimizers(self) -> None:
        return None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_epochs": -1}, "every_n_epochs must be an int >= 0, got -1"),
        ({"every_n_train_steps": 2.5}, "every_n_train_steps must be an int >= 0, got 2.5"),
        ({"every_n_train_steps": True}, "every_n_train_steps must be an int >= 0, got True"),
        ({"every_n_epochs": 0}, "are both 0: nothing would be saved"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayReportCheckpoint(**arguments)


def test_it_is_a_checkpoint_callback() -> None:
    assert issubclass(RayReportCheckpoint, Checkpoint)  # called after the module's own hooks at an epoch's end
    with pytest.raises(TypeError, match="It has: every_n_epochs, every_n_train_steps"):
        RayReportCheckpoint(every_n_steps=3)  # type: ignore[call-arg]
