"""Ray Train on a real cluster of this machine: two workers that train, are killed, and go on."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.scripts import run_script
from tests.strategies.oracle import Case, train_plain

ROOT = Path(__file__).parents[2]
_MISSING = importlib.util.find_spec("ray") is None
_LONG = pytest.mark.machines
_TOLD = (
    "Invalid strategy class: <class 'accelight.strategies.fsdp.strategy.AccelFSDPStrategy'>",
    "RayAccelFSDPStrategy asks Ray which process this is, but the Trainer asks LightningEnvironment. Use",
    "stop_on_signals needs Trainer.fit in the main thread",
)
"""By Ray, by the strategy, and by a callback."""

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(_MISSING, reason="Ray is not installed: pip install 'accelight[ray]'"),
    pytest.mark.timeout(900),
]


@_LONG
def test_the_example_goes_on_where_it_was(tmp_path: Path) -> None:
    """Started again for a second epoch, in a storage that has the first, it ends where two epochs at once do."""

    def said(storage: str, epochs: int) -> str:
        arguments = (f"--epochs={epochs}", f"--storage={tmp_path / storage}")
        env = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"}
        output = run_script(ROOT / "examples" / "ray_train.py", *arguments, env=env, timeout_s=300).output
        [checksum] = set(re.findall(r"step \d+, sum of squared weights [\d.]+", output))
        return str(checksum)

    assert said("parts", 1).startswith("step 84,")
    assert said("parts", 2) == said("whole", 2)
    names = {path.name for path in (tmp_path / "parts" / "regression").glob("checkpoint_epoch=*")}
    assert names == {"checkpoint_epoch=1-step=150", "checkpoint_epoch=1-step=168"}


@pytest.fixture(scope="module")
def runs() -> Iterator[Any]:
    from tests.many_machines import ray_runs

    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTHONPATH", "RAY_USAGE_STATS_ENABLED", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"):
            patch.setenv(name, os.environ.get(name, ""))  # is put back
        with ray_runs.cluster():
            yield ray_runs


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 0, atol: float = 0) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=atol, msg=name)


@_LONG
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "zero2"])
def test_a_killed_worker_changes_nothing(strategy: str, runs: Any, tmp_path: Path) -> None:
    """Worker 1 is killed after step 10, in the second epoch: Ray starts both again from the end of the first."""
    weights, losses = {}, {}
    for name, step in (("whole", 0), ("killed", 10)):
        folder = tmp_path / name
        folder.mkdir()
        run = runs.Run(strategy, folder, kill_at_step=step)
        result = runs.run_on_ray(runs.train, run, folder / "storage", max_failures=1, keep=2)
        storage = folder / "storage" / "run"
        assert result.error is None
        assert {path.name for path in storage.glob("checkpoint_epoch=*")} == {
            "checkpoint_epoch=1-step=14",
            "checkpoint_epoch=2-step=21",
        }
        assert result.checkpoint.path == f"{storage}/checkpoint_epoch=2-step=21"
        assert result.metrics["step"] == 21
        weights[name] = runs.merged_weights(Path(result.checkpoint.path, "checkpoint.ckpt"), folder / "merged")
        losses[name] = [runs.notes(folder, rank) for rank in range(2)]
    for rank in range(2):
        [(_, begun_from)], [whole] = losses["whole"][rank]
        assert begun_from == "None"
        starts, (before, after) = losses["killed"][rank]
        assert len({process for process, _ in starts}) == 2
        assert [path for _, path in starts] == [
            "None",
            f"{tmp_path}/killed/storage/run/checkpoint_epoch=0-step=7/checkpoint.ckpt",
        ]
        assert set(before) in ({*range(1, 11)}, {*range(1, 12)})  # the other worker may have come a step further
        assert set(after) == {*range(8, 22)}
        assert {**before, **after} == whole  # bit for bit
        assert all(before[step] == whole[step] for step in before)
    _assert_equal(weights["killed"], weights["whole"])


@_LONG
def test_it_goes_on_within_an_epoch(runs: Any, tmp_path: Path) -> None:
    """A checkpoint every three steps: after the kill at step 12, that of step 12 or 9 is gone on from."""
    weights, losses = {}, {}
    for name, step in (("whole", 0), ("killed", 11)):
        folder = tmp_path / name
        folder.mkdir()
        run = runs.Run("fsdp2", folder, kill_at_step=step, every_n_train_steps=3)
        result = runs.run_on_ray(runs.train, run, folder / "storage", max_failures=1)
        weights[name] = runs.merged_weights(Path(result.checkpoint.path, "checkpoint.ckpt"), folder / "merged")
        losses[name] = runs.notes(folder, 0)
        saved = {path.name for path in (folder / "storage" / "run").glob("checkpoint_epoch=*")}
        assert saved == {
            *(f"checkpoint_epoch={(step - 1) // 7}-step={step}" for step in (3, 6, 9, 12, 15, 18)),
            *(f"checkpoint_epoch={step // 7 - 1}-step={step}" for step in (7, 14, 21)),
        }
    starts, (before, after) = losses["killed"]
    assert starts[1][1].endswith("/checkpoint_epoch=1-step=9/checkpoint.ckpt")
    assert set(after) == {*range(10, 22)}
    assert {**before, **after} == losses["whole"][1][0]
    _assert_equal(weights["killed"], weights["whole"])


@_LONG
def test_they_train_as_a_plain_loop(runs: Any, tmp_path: Path) -> None:
    engines = ["fsdp1", "fsdp2", "zero0", "zero1", "zero2", "zero3"]
    runs.run_on_ray(runs.train_as_plain_loop, runs.Run(" ".join(engines), tmp_path, epochs=2), tmp_path / "storage")
    expected = train_plain(Case(), 2).weights
    for engine in engines:
        weights = runs.merged_weights(tmp_path / engine, tmp_path / f"{engine}-merged")
        _assert_equal(weights, expected, rtol=1e-5, atol=1e-6)


@_LONG
@pytest.mark.parametrize("form", ["sharded", "full"])
def test_a_storage_that_is_no_file_system(form: str, runs: Any, tmp_path: Path) -> None:
    """Ray uploads what each worker has written, and they go on from a copy of it."""
    import pyarrow.fs

    (tmp_path / "bucket").mkdir()
    bucket = pyarrow.fs.SubTreeFileSystem(str(tmp_path / "bucket"), pyarrow.fs.LocalFileSystem())
    run = runs.Run("fsdp2", tmp_path, kill_at_step=10, options={"state_dict_type": f"{form}_state_dict"})
    result = runs.run_on_ray(runs.train, run, Path("results"), max_failures=1, storage_filesystem=bucket)
    stored = tmp_path / "bucket" / "results" / "run"
    names = [f"checkpoint_epoch={epoch}-step={7 * epoch + 7}" for epoch in range(3)]
    assert sorted(path.name for path in stored.glob("checkpoint_epoch=*")) == names
    assert result.checkpoint.path == f"results/run/{names[-1]}"
    starts, (_, after) = runs.notes(tmp_path, 0)
    copy = Path(starts[1][1])
    assert copy.parent.name.startswith(f"accelight-{names[0]}-")
    assert not copy.parent.exists()  # removed when training had begun
    assert set(after) == {*range(8, 22)}
    assert [path.is_dir() for path in stored.glob("*/checkpoint.ckpt")] == [form == "sharded"] * 3


@_LONG
def test_what_a_worker_is_told(runs: Any, tmp_path: Path) -> None:
    """Wrong uses; other callbacks beside; a second fit to a step whose checkpoint Ray keeps already."""
    runs.run_on_ray(runs.meet_errors, runs.Run("fsdp2", tmp_path), tmp_path / "storage")
    for rank in range(2):
        errors = (tmp_path / f"errors-{rank}").read_text().splitlines()
        assert len(errors) == len(_TOLD)
        for found, expected in zip(errors, _TOLD, strict=True):
            assert found.startswith(f"RuntimeError: {expected}")
        assert (tmp_path / f"stopped-{rank}").read_text() == "5 checkpoint_epoch=0-step=5"
    warned = (tmp_path / "warnings-0").read_text()
    assert "timeout=0:05:00 (it has 0:30:00)" in warned
    assert "TorchTrainer(torch_config=TorchConfig(timeout_s=..., backend=...))" in warned
    storage = tmp_path / "storage" / "run"
    names = ["checkpoint_epoch=0-step=5", "checkpoint_epoch=0-step=5-v1"]
    assert sorted(path.name for path in storage.glob("checkpoint_epoch=*")) == names
    weights = [runs.merged_weights(storage / name / "checkpoint.ckpt", tmp_path / name) for name in names]
    _assert_equal(weights[1], weights[0])
    _assert_equal(load_file(tmp_path / "merged" / "model.safetensors"), weights[0])
