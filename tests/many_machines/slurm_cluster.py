"""SLURM itself on this machine: one controller and two nodes, under the user who runs the tests, in a folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import free_port
from tests.scripts import wait_for

NODES = ("n0", "n1")
MISSING = [name for name in ("slurmctld", "slurmd", "srun", "sbatch", "scontrol") if shutil.which(name) is None]
"""Of SLURM's programs, those that this machine does not have."""

_CONFIG = """
ClusterName=accelight
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
SchedulerParameters=sched_interval=1,bf_interval=1
PartitionName=all Nodes=n0,n1 Default=YES State=UP MaxTime=INFINITE
"""
# cred_expire: a requeued job waits until the credentials of its first start are void.


@dataclass(frozen=True)
class Cluster:
    """A running SLURM."""

    env: Mapping[str, str]
    """In which SLURM's programs find it."""

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Return what one of SLURM's programs prints.

        Raises:
            AssertionError: With all that it said, if it failed.
        """
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, cwd=cwd, timeout=60, check=False)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def submit(self, *command: str, cwd: Path) -> str:
        """Return the number of a job; ``command`` is what comes after ``sbatch``."""
        return self.run("sbatch", "--parsable", *command, cwd=cwd).strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what SLURM knows of a job: JobState, Restarts, ExitCode and so on."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Run SLURM inside, with what it keeps in ``folder``."""
    host, user = socket.gethostname().partition(".")[0], subprocess.check_output(["id", "-un"], text=True).strip()
    lines = _CONFIG.format(host=host, user=user, folder=folder, controller=free_port()).strip().splitlines()
    for node in NODES:
        lines.append(f"NodeName={node} NodeAddr=127.0.0.1 NodeHostname={host} Port={free_port()} CPUs=2")
        (folder / f"spool-{node}").mkdir()
    lines.append(lines.pop(-3))  # the partition, after its nodes
    (folder / "state").mkdir()
    config = folder / "slurm.conf"
    config.write_text("\n".join([*lines, ""]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    cluster = Cluster({**kept, "SLURM_CONF": str(config), "OMP_NUM_THREADS": "1"})
    commands = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    with open(folder / "daemons.log", "ab") as log:
        daemons = [subprocess.Popen(one, env=cluster.env, stdout=log, stderr=log) for one in commands]
    try:
        wait_for(lambda: _is_idle(cluster))
        yield cluster
    finally:
        with contextlib.suppress(subprocess.SubprocessError):  # else what the jobs have started outlives SLURM
            subprocess.run(["scancel", "--signal=KILL", "--full", f"--user={user}"], env=cluster.env, timeout=30)
            subprocess.run(["scancel", f"--user={user}"], env=cluster.env, timeout=30)
            wait_for(lambda: not cluster.run("squeue", "--noheader").strip(), 30)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(60)


def _is_idle(cluster: Cluster) -> bool:
    found = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], env=cluster.env, capture_output=True, text=True)
    return found.stdout.split() == ["idle"] * len(NODES)
