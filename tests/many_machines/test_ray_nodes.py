"""Ray Train on several nodes, all on this machine: one of them is lost, and they share no folder."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripts import wait_for

pytestmark = [
    pytest.mark.machines,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'accelight[ray]'"
    ),
    pytest.mark.timeout(900),
]


@pytest.fixture(params=[2])
def nodes(request: pytest.FixtureRequest) -> Iterator[Any]:
    from tests.many_machines import ray_runs

    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTHONPATH", "RAY_USAGE_STATS_ENABLED", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"):
            patch.setenv(name, os.environ.get(name, ""))  # is put back
        made = ray_runs.Nodes(request.param)
        try:
            yield made
        finally:
            made.end()


@pytest.mark.parametrize("nodes", [3], indirect=True)
def test_a_lost_node_changes_nothing(nodes: Any, tmp_path: Path) -> None:
    """The node of worker 1 is killed in the second epoch, and a spare one takes its place; all see the same folder."""
    from tests.many_machines import ray_runs

    weights, losses = {}, {}
    for name, step in (("whole", 0), ("killed", 10)):
        folder = tmp_path / name
        folder.mkdir()
        watching = threading.Thread(target=_end_node, args=(nodes, folder), daemon=True)
        if step:
            watching.start()
        run = ray_runs.Run("fsdp2", folder, kill_at_step=step, kills_node=True)
        result = ray_runs.run_on_ray(ray_runs.train, run, folder / "storage", max_failures=3, keep=1)
        [kept] = (folder / "storage" / "run").glob("checkpoint_epoch=*")
        assert str(kept) == result.checkpoint.path
        weights[name] = ray_runs.merged_weights(kept / "checkpoint.ckpt", folder / "merged")
        losses[name] = ray_runs.notes(folder, 0)
    watching.join()
    starts, runs = losses["killed"]
    assert starts[-1][1].endswith("/checkpoint_epoch=0-step=7/checkpoint.ckpt")
    assert set(runs[-1]) == {*range(8, 22)}
    assert {**runs[0], **runs[-1]} == losses["whole"][1][0]
    for name, tensor in weights["whole"].items():
        assert torch.equal(weights["killed"][name], tensor), name


def _end_node(nodes: Any, folder: Path) -> None:
    marker = folder / "killed"
    wait_for(lambda: marker.exists() and bool(marker.read_text()), 600)
    nodes.kill(marker.read_text())


def test_it_goes_on_with_the_node_that_is_left(nodes: Any, tmp_path: Path) -> None:
    """After step 10 one worker goes on from step 9, with the same global batches."""
    from tests.many_machines import ray_runs

    weights = {}
    for name, step in (("whole", 0), ("killed", 10)):
        folder = tmp_path / name
        folder.mkdir()
        if step:
            threading.Thread(target=_end_node, args=(nodes, folder), daemon=True).start()
        run = ray_runs.Run("fsdp2", folder, kill_at_step=step, kills_node=True, every_n_train_steps=3)
        result = ray_runs.run_on_ray(
            ray_runs.train_elastically, run, folder / "storage", max_failures=3, num_workers=(1, 2)
        )
        assert result.checkpoint.path.endswith("/checkpoint_epoch=2-step=21")
        weights[name] = ray_runs.merged_weights(Path(result.checkpoint.path, "checkpoint.ckpt"), folder / "merged")
    starts, (_, after) = ray_runs.notes(tmp_path / "killed", 0)
    assert starts[1][1].endswith("/checkpoint_epoch=1-step=9/checkpoint.ckpt")
    assert set(after) == {*range(9, 22)}  # 9 is the middle of the tenth window, of two micro-batches now
    assert len(ray_runs.notes(tmp_path / "killed", 1)[0]) == 1
    for name, tensor in weights["whole"].items():
        torch.testing.assert_close(weights["killed"][name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1", "zero2"])
def test_nodes_that_share_no_folder(strategy: str, nodes: Any, tmp_path: Path) -> None:
    """Each worker writes into a folder of its own; Ray puts them together, and each node gets a copy to go on from."""
    import pyarrow.fs

    from tests.many_machines import ray_runs

    (tmp_path / "bucket").mkdir()
    bucket = pyarrow.fs.SubTreeFileSystem(str(tmp_path / "bucket"), pyarrow.fs.LocalFileSystem())
    run = ray_runs.Run(strategy, tmp_path, kill_at_step=10, own_disks=True)
    result = ray_runs.run_on_ray(ray_runs.train, run, Path("results"), max_failures=1, storage_filesystem=bucket)
    assert result.checkpoint.path == "results/run/checkpoint_epoch=2-step=21"
    checkpoints = [tmp_path / "bucket" / "results" / "run" / f"checkpoint_epoch={n}-step={7 * n + 7}" for n in range(3)]
    whole = tmp_path / "whole"
    whole.mkdir()
    ray_runs.run_on_ray(ray_runs.train, ray_runs.Run(strategy, whole), whole / "storage")
    for checkpoint in checkpoints:
        shared = whole / "storage" / "run" / checkpoint.name
        assert _names(checkpoint) == _names(shared)
        found = ray_runs.merged_weights(checkpoint / "checkpoint.ckpt", tmp_path / "merged" / checkpoint.name)
        expected = ray_runs.merged_weights(shared / "checkpoint.ckpt", whole / "merged" / checkpoint.name)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    for rank in range(2):
        starts, (before, after) = ray_runs.notes(tmp_path, rank)
        _, [losses] = ray_runs.notes(whole, rank)
        assert Path(starts[1][1]).is_relative_to(tmp_path / "disks" / "0")  # the same path on all nodes
        assert not list((tmp_path / "disks" / f"{rank}").iterdir())  # neither what was uploaded nor what was downloaded
        assert {**before, **after} == losses


def _names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
