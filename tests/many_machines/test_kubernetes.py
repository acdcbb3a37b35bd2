"""The Kubernetes example: what schemas say of it, and its command, run as its pods would run it."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.ranks import free_port
from tests.slowness import slowness

ROOT = Path(__file__).parents[2]
MANIFEST: dict[str, Any] = yaml.safe_load((ROOT / "examples/kubernetes/train.yaml").read_text())
JOBSET = {  # what jobset.x-k8s.io/v1alpha2 has around Kubernetes' own Job, and is used here
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"network", "failurePolicy", "replicatedJobs"},
    "network": {"enableDNSHostnames", "publishNotReadyAddresses", "subdomain"},
    "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "replicatedJob": {"name", "groupName", "replicas", "template", "dependsOn"},
}


def _job() -> dict[str, Any]:
    [replicated] = MANIFEST["spec"]["replicatedJobs"]
    name = f"{MANIFEST['metadata']['name']}-{replicated['name']}-0"
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, **replicated["template"]}


def test_the_jobset_has_the_fields_of_its_schema() -> None:
    spec = MANIFEST["spec"]
    [replicated] = spec["replicatedJobs"]
    parts = {"": MANIFEST, "spec": spec, "replicatedJob": replicated}
    parts |= {name: spec[name] for name in ("network", "failurePolicy")}
    assert (MANIFEST["apiVersion"], MANIFEST["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    for name, part in parts.items():
        assert set(part) <= JOBSET[name], name


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_its_job_is_valid_for_kubernetes(version: str) -> None:
    kubernetes_validate.validate(_job(), version, strict=True)
    wrong = copy.deepcopy(_job())
    wrong["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagee"):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_what_the_pods_share_fits() -> None:
    job, pod = _job()["spec"], _job()["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert job["parallelism"] == job["completions"]
    assert f"--nnodes={job['parallelism']}" in container["command"][-1]
    assert f"{_job()['metadata']['name']}-0.{MANIFEST['metadata']['name']}" in container["command"][-1]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.machines
def test_the_pods_command_trains(tmp_path: Path) -> None:
    [container] = _job()["spec"]["template"]["spec"]["containers"]
    shell, option, command = container["command"]
    places = {
        "train-node-0-0.train": "127.0.0.1",
        "29500": str(free_port()),
        "/app/train.py": str(ROOT / "examples/many_machines.py") + " --epochs 1",
        "/checkpoints/run": str(tmp_path / "run"),
    }
    for theirs, here in places.items():
        assert theirs in command
        command = command.replace(theirs, here)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    pods = [
        subprocess.Popen(
            [shell, option, command],
            env={**kept, "PATH": path, "PROCESSES": "1", "JOB_COMPLETION_INDEX": str(index), "OMP_NUM_THREADS": "1"},
        )
        for index in range(2)
    ]
    try:
        assert [pod.wait(180 * slowness()) for pod in pods] == [0, 0]
    finally:
        for pod in pods:
            pod.kill()
    assert list((tmp_path / "run").glob("*.ckpt"))
