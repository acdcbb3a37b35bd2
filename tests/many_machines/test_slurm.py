"""Real jobs of SLURM: trained on two nodes, told to end, requeued, and gone on with as if nothing had been."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.many_machines.slurm_cluster import MISSING, Cluster, slurm_cluster
from tests.ranks import free_port
from tests.scripts import wait_for

ROOT = Path(__file__).parents[2]
NUM_EPOCHS, STEPS_OF_AN_EPOCH = 3, 128  # 8192 samples, 16 on each of four processes

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.slurm,
    pytest.mark.skipif(bool(MISSING), reason=f"SLURM is not installed ({', '.join(MISSING)}); make test-slurm does it"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def _submit(cluster: Cluster, output: Path, *options: str) -> str:
    output.mkdir()
    place = f"MASTER_ADDR=127.0.0.1,MASTER_PORT={free_port()}"  # nobody resolves the names of these nodes
    options = (f"--output={output}/printed", f"--export=ALL,PYTHON={sys.executable},{place}", *options)
    arguments = (f"--epochs={NUM_EPOCHS}", f"--output={output}")
    return cluster.submit(*options, "examples/slurm/train.sbatch", *arguments, cwd=ROOT)


def _end(cluster: Cluster, job: str, output: Path) -> dict[str, str]:
    wait_for(lambda: cluster.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED"), 150)
    ended = cluster.job(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), (ended, (output / "printed").read_text())
    return ended


def _losses(output: Path, start: int) -> dict[int, float]:
    """Return the losses that the ``start``-th run of a job logged, by their steps."""
    with open(output / "log" / f"version_{start}" / "metrics.csv", newline="") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file) if row["loss"]}


def test_a_job_is_requeued_by_a_signal_and_goes_on_with_the_next_batch(cluster: Cluster, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    _end(cluster, _submit(cluster, whole), whole)
    job = _submit(cluster, cut)
    wait_for((cut / "log" / "version_0" / "metrics.csv").exists)
    cluster.run("scancel", "--signal=USR1", job)
    assert _end(cluster, job, cut)["Restarts"] == "1"
    printed = (cut / "printed").read_text()
    assert printed.count(f"SLURM job {job} is requeued.") == 1, printed
    expected, first, second = _losses(whole, 0), _losses(cut, 0), _losses(cut, 1)
    assert list(expected) == list(range(NUM_EPOCHS * STEPS_OF_AN_EPOCH))
    assert min(second) == max(first) + 2  # Lightning logs a batch after its hooks, in which the run had ended
    del expected[max(first) + 1]
    assert {**first, **second} == expected  # bit for bit: the same processes reduce in the same order


def test_a_job_that_may_not_be_requeued_ends_with_what_slurm_says(cluster: Cluster, tmp_path: Path) -> None:
    output = tmp_path / "run"
    job = _submit(cluster, output, "--no-requeue")
    wait_for((output / "log" / "version_0" / "metrics.csv").exists)
    cluster.run("scancel", "--signal=USR1", job)
    wait_for(lambda: cluster.job(job)["JobState"] == "FAILED", 60)
    printed = (output / "printed").read_text()
    assert f"SLURM job {job} could not be requeued: it reports" in printed
    assert "Submit with `#SBATCH --requeue`" in printed
    assert list(output.glob("last-stopped-*.ckpt"))


def _submit_script(cluster: Cluster, folder: Path, *lines: str) -> str:
    script = folder / "job.sbatch"
    script.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    place = f"MASTER_ADDR=127.0.0.1,MASTER_PORT={free_port()}"
    options = ("--nodes=2", "--ntasks-per-node=1", "--requeue", "--open-mode=append", f"--output={folder}/printed")
    return cluster.submit(*options, f"--export=ALL,PYTHON={sys.executable},{place}", str(script), cwd=ROOT)


def test_watchdog_requeues_the_job_of_a_process_that_is_stopped(cluster: Cluster, tmp_path: Path) -> None:
    job = _submit_script(
        cluster,
        tmp_path,
        'fault=stop; [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && fault=none',
        "export LOCAL_WORLD_SIZE=1 WORLD_SIZE=2 FAULT=$fault",
        'srun bash -c \'RANK=$SLURM_PROCID exec "$PYTHON" -m tests.many_machines.trains_with_faults '
        f"fsdp2 $FAULT 1 {tmp_path}/watchdog'",
    )
    assert _end(cluster, job, tmp_path)["Restarts"] == "1"
    printed = (tmp_path / "printed").read_text()
    assert "Watchdog: process 1" in printed
    assert "is stopped by a signal" in printed
    assert {"done 0", "done 1"} <= set(printed.splitlines())


@pytest.mark.parametrize(("limit", "ends"), [(20, "COMPLETED"), (1, "FAILED")])
def test_the_line_of_the_guide_requeues_a_job_that_fails(
    cluster: Cluster, tmp_path: Path, limit: int, ends: str
) -> None:
    guide = (ROOT / "docs" / "howto" / "long-runs.md").read_text()
    [line] = re.findall(r"^ *(srun python train\.py \|\| .*)$", guide, re.M)
    assert "-lt 20" in line
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint('started', flush=True)\nsys.exit(int(os.environ.get('SLURM_RESTART_COUNT', 0)) < 2)\n"
    )
    line = line.replace("python train.py", f'"$PYTHON" {tmp_path}/train.py').replace("-lt 20", f"-lt {limit}")
    job = _submit_script(cluster, tmp_path, line)
    wait_for(lambda: cluster.job(job)["JobState"] in ("COMPLETED", "FAILED"), 150)
    ended = cluster.job(job)
    assert (ended["JobState"], ended["Restarts"]) == (ends, f"{min(limit, 2)}"), (tmp_path / "printed").read_text()
