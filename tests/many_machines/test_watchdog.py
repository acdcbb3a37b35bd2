"""`Watchdog` under torchrun: each fault is named, and ends the run; ordinary runs are left alone."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.many_machines.two_hosts import TwoHosts, two_hosts, why_not
from tests.scripts import run_script

SCRIPT = Path(__file__).parent / "trains_with_faults.py"
_REASON = why_not()
pytestmark = pytest.mark.machines

SAYS = {
    "stop": r"Watchdog: process {0} \(\S+\) is stopped by a signal .*last heard from",
    "loop": r"Watchdog: process {0} \(\S+\) stands still in forward, .*\n(.*\n)*{0} .*trains_with_faults.py:\d+ in f",
    "worker": r"Watchdog: process {0} \(\S+\) stands still in data, \[_TrainingEpochLoop\].train_dataloader_next",
    "kill": r"(process {0} has ended|Process {0} .*ended|[Pp]rocess {0}\b.*(does not answer|did not))",
    "branch": r"wait for each other.*process {1} .* in barrier .*trains_with_faults.py|"
    r"process {1} waits in barrier|do not run the same|[Pp]rocess {1}\b.*barrier",
}


def _processes_of(folder: Path) -> list[str]:
    """Return the commands that have the folder among their arguments and still run."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            commands.append(path.read_text(errors="replace").replace("\0", " "))
    return [command for command in commands if str(folder) in command]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("fault", list(SAYS))
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "zero2", "zero3", "ddp"])
def test_a_fault_is_named_and_ends_the_run(strategy: str, fault: str, victim: int, tmp_path: Path) -> None:
    done = run_script(SCRIPT, strategy, fault, f"{victim}", str(tmp_path), launcher="torchrun", check=False)
    assert done.returncodes != [0]
    assert "done" not in done.output
    pattern = SAYS[fault].replace("{0}", f"{victim}").replace("{1}", f"{victim}")
    assert re.search(pattern, done.output), done.output
    if fault in ("stop", "loop", "worker"):
        assert f"process {victim} hangs" in done.output
        assert "exitcode  : 75" in done.output
        assert list(tmp_path.glob(f"rank{1 - victim}-step*.txt"))
        assert _processes_of(tmp_path) == []  # no worker of a loader is left


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "zero2", "zero3", "ddp"])
def test_a_hook_that_does_not_end_is_named(strategy: str, tmp_path: Path) -> None:
    done = run_script(SCRIPT, strategy, "hook", "1", str(tmp_path), launcher="torchrun", check=False)
    assert done.returncodes != [0]
    assert re.search(r"Watchdog: process 1 \(\S+\) stands still in .*on_train_batch_end", done.output), done.output
    assert "exitcode  : 75" in done.output


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_although_sigterm_comes_meanwhile(victim: int, tmp_path: Path) -> None:
    done = run_script(SCRIPT, "ddp", "term", f"{victim}", str(tmp_path), launcher="torchrun", check=False)
    assert done.returncodes != [0]
    assert re.search(SAYS["kill"].replace("{0}", f"{victim}"), done.output), done.output


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path) as made:
        yield made


@pytest.mark.skipif(bool(_REASON), reason=_REASON)
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "zero2", "zero3", "ddp"])
def test_a_host_that_is_cut_off_is_named_on_both_sides(strategy: str, hosts: TwoHosts) -> None:
    hosts.torchrun(SCRIPT, strategy, "cut", "1", str(hosts.folder / "stacks"), "--pause=0.1", "--steps=1000")
    hosts.wait_for("at batch 20", host=1)
    hosts.cut()
    assert all(hosts.end())
    said = hosts.said(0) + hosts.said(1)
    assert re.search(r"process 1 \(host1\) is on a machine that is down or cut off", hosts.said(0)), said
    assert re.search(r"process 1 \(host1\) stands still .* store has not answered", hosts.said(1)), said


_ORDINARY_S = float(os.environ.get("ACCELIGHT_WATCH_S", "60"))


@pytest.mark.timeout(_ORDINARY_S + 240)
def test_an_ordinary_run_raises_no_alarm(tmp_path: Path) -> None:
    """Of longer runs: ``ACCELIGHT_WATCH_S=1800 pytest -o faulthandler_timeout=2400 -m machines ... -k ordinary``."""
    script = f"""
import time, torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset
from accelight.callbacks import Watchdog
from accelight.strategies import AccelFSDPStrategy

class Data(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        time.sleep(4.0 if index == 100 else 0.0)  # a pause of a known length, longer than the limit
        return torch.ones(8)

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.compile(torch.nn.Linear(8, 8))
    def training_step(self, batch, batch_idx):
        return self.net(batch[: 1 + batch_idx % 3]).sum()  # compiles more than once
    def validation_step(self, batch, batch_idx):
        time.sleep(0.5)
    def on_save_checkpoint(self, checkpoint):
        time.sleep(4.0)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

trainer = Trainer(
    accelerator="cpu", devices=2, strategy=AccelFSDPStrategy(fsdp_version=2), max_epochs=-1,
    max_time={{"seconds": {_ORDINARY_S}}}, limit_val_batches=5, logger=False, enable_progress_bar=False,
    default_root_dir={str(tmp_path)!r}, callbacks=[
        Watchdog("abort", min_limit_s=3, first_limit_s=120, every_s=0.5, limits={{"data": 30, "save": 30}}),
        ModelCheckpoint({str(tmp_path / "saved")!r}, save_top_k=1),
    ],
)
trainer.fit(Module(), DataLoader(Data(), batch_size=4), DataLoader(Data(), batch_size=4))
print("steps", trainer.global_step > 0)
"""
    done = run_script(script, launcher="torchrun", timeout_s=_ORDINARY_S + 120)
    assert done.lines.count("steps True") == 2
    assert "Watchdog:" not in done.output
    assert (tmp_path / "watchdog" / "timings.json").exists()
