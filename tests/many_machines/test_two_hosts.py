"""Training over a real link between two hosts: slow, cut for a while, cut for good; and disks of their own."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.many_machines.two_hosts import TwoHosts, two_hosts, why_not
from tests.scripts import run_script

SCRIPT = Path(__file__).parent / "trains_on_two_hosts.py"
NUM_STEPS = 60
_REASON = why_not()
pytestmark = [pytest.mark.machines, pytest.mark.skipif(bool(_REASON), reason=_REASON)]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path) as made:
        yield made


def _losses(printed: str) -> dict[str, set[str]]:
    """Return by step the losses that processes printed."""
    found: dict[str, set[str]] = {}
    for step, loss in re.findall(r"step (\d+) loss ([0-9.]+(?:e-?[0-9]+)?)", printed):
        found.setdefault(step, set()).add(loss)
    return found


def _on_one_host(strategy: str) -> dict[str, set[str]]:
    losses = _losses(run_script(SCRIPT, strategy, launcher="torchrun", nproc=2).output)
    assert len(losses) == NUM_STEPS
    return losses


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "zero2"])
def test_two_hosts_train_as_one_does(strategy: str, hosts: TwoHosts) -> None:
    expected, path = _on_one_host(strategy), hosts.folder / "saved.ckpt"
    hosts.torchrun(SCRIPT, strategy, f"--save={path}")
    assert hosts.end() == [0, 0], hosts.said(0) + hosts.said(1)
    for host in (0, 1):
        assert "gathered [0, 1]" in hosts.said(host)
    assert _losses(hosts.said(0) + hosts.said(1)) == expected  # bit for bit
    assert path.is_dir()


def test_a_trigger_stops_both_hosts_at_the_same_step(hosts: TwoHosts) -> None:
    hosts.torchrun(SCRIPT, "fsdp2", "--stop-at=7")
    assert hosts.end() == [0, 0], hosts.said(0) + hosts.said(1)
    for host in (0, 1):  # set after the check of step 7, by one process
        assert list(_losses(hosts.said(host))) == [f"{step}" for step in range(1, 9)]


def test_a_link_that_is_cut_for_ten_seconds_changes_nothing(hosts: TwoHosts) -> None:
    expected = _on_one_host("fsdp2")
    hosts.torchrun(SCRIPT, "fsdp2", "--pause=0.05")
    hosts.wait_for("step 10 loss")
    hosts.cut()
    time.sleep(10)
    assert "step 59 loss" not in hosts.said(0)
    hosts.mend()
    assert hosts.end() == [0, 0], hosts.said(0) + hosts.said(1)
    assert _losses(hosts.said(0) + hosts.said(1)) == expected


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2"])
def test_a_link_that_is_cut_for_good_ends_both_with_the_name_of_the_other(strategy: str, hosts: TwoHosts) -> None:
    hosts.torchrun(SCRIPT, strategy, "--pause=0.05", "--timeout=15")
    hosts.wait_for("step 10 loss")
    hosts.cut()
    assert hosts.end() == [1, 1], hosts.said(0) + hosts.said(1)
    here = "Process 0 on host0 could not communicate with the others, and process 1 did not answer within 10 s"
    there = "Process 1 on host1 could not communicate with the others, nor does the store at 10.99.77.1:29500, which"
    assert here in hosts.said(0), hosts.said(0)
    assert there in hosts.said(1), hosts.said(1)


def test_a_disk_of_its_own_is_noticed_at_the_first_save(hosts: TwoHosts) -> None:
    folder = hosts.folder / "local"
    folder.mkdir()
    hosts.torchrun(SCRIPT, "fsdp2", f"--save={folder}/saved.ckpt", own_disk=folder)
    assert hosts.end(180) == [1, 1]
    sentence = f"process 1: RuntimeError: {folder}/.saved.ckpt.unfinished, created on host0, does not exist on host1"
    for host in (0, 1):
        assert sentence in hosts.said(host), hosts.said(host)
    assert not list(folder.iterdir())
