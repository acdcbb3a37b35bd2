"""Training loaders that know their place (``state_dict``, ``load_state_dict``) go on there, each process at its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from tests.ranks import run_on_ranks
from tests.scripts import run_script
from tests.strategies.oracle import quiet_trainer
from tests.strategies.stateful import NUM_SAMPLES, Seeing, loader_named, seen, strategy_for

STRATEGIES = ["fsdp1", "fsdp2", "zero2"]


class Failing(Callback):
    fails = True

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.fails:
            raise KeyError("of the user's")


MOMENTS = {  # within an epoch, at its end, after the next one's first batch
    "4": (4, "on_train_batch_end"),
    "6": (6, "on_train_batch_end"),
    "7": (7, "on_train_batch_end"),
    "validated": (6, "on_validation_end"),
    "epoch_end": (6, "on_train_epoch_end"),
}


@pytest.mark.core("fsdp2-shuffled-4", "zero2-own-4", "fsdp1-shuffled-epoch_end")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["plain", "shuffled", "own"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_process_goes_on_at_its_own_place(strategy: str, kind: str, moment: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    save_at, hook = MOMENTS[moment]
    whole = run_on_ranks(2, seen, strategy, kind, path, save_at, hook)
    resumed = run_on_ranks(2, seen, strategy, kind, path, None)
    num_before = save_at if kind == "own" else 2 * save_at
    assert resumed == [samples[num_before:] for samples in whole]
    if kind != "own":
        assert sorted(whole[0][:12] + whole[1][:12]) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_end"])
@pytest.mark.parametrize("kind", ["plain", "shuffled"])
def test_an_epoch_that_ended_early_is_not_continued(kind: str, hook: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    whole = run_on_ranks(2, seen, "fsdp2", kind, path, 6)
    run_on_ranks(2, seen, "fsdp2", kind, path, 4, hook, 4)
    assert run_on_ranks(2, seen, "fsdp2", kind, path, None) == [samples[12:] for samples in whole]


@pytest.mark.core("fsdp2-workers-epoch_end", "fsdp2-workers_early-epoch_end")
@pytest.mark.parametrize("moment", ["6", "validated", "epoch_end"])
@pytest.mark.parametrize("kind", ["workers", "workers_early"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_workers_begin_with_the_order_of_the_epoch_that_is_resumed(
    strategy: str, kind: str, moment: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "saved.ckpt")
    hook = {"6": "on_train_batch_end", "validated": "on_validation_end"}.get(moment, f"on_train_{moment}")
    whole = run_on_ranks(2, seen, strategy, kind, path, 6, hook)
    resumed = run_on_ranks(2, seen, strategy, kind, path, None)
    assert resumed == [samples[12:] for samples in whole]


def refused(strategy: str, kind: str, path: str) -> str:
    with pytest.raises(ValueError, match="loader") as error:
        seen(strategy, kind, path, None)
    return str(error.value)


@pytest.mark.core("fsdp2")
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_another_number_of_processes_is_refused_within_an_epoch(strategy: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    run_on_ranks(2, seen, strategy, "plain", path, 4)
    [found] = run_on_ranks(1, refused, strategy, "plain", path)
    assert found == (
        "The checkpoint was saved before the end of an epoch, and holds the positions of the training loaders of 2 "
        "processes; 1 resumes. Resume on 2, or from a checkpoint of on_train_epoch_end, or train with "
        "ElasticTraining, which counts samples over all processes."
    )


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_end"])
def test_another_number_of_processes_begins_an_epoch(hook: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    run_on_ranks(2, seen, "fsdp2", "plain", path, 6, hook, 6)
    [found] = run_on_ranks(1, seen, "fsdp2", "plain", path, None)
    assert [sorted(found[:24]), sorted(found[24:])] == [list(range(NUM_SAMPLES))] * 2


def test_a_stream_of_ones_own_is_refused_at_an_epochs_end_too(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    run_on_ranks(2, seen, "fsdp2", "own", path, 6, "on_train_epoch_end")
    [found] = run_on_ranks(1, refused, "fsdp2", "own", path)
    assert found.startswith(
        "The checkpoint was saved at the end of an epoch, and holds the positions of the training loaders of 2 "
    )


def after_a_failed_resume(path: str) -> list[float]:
    module, loader, failing = Seeing(), loader_named("plain"), Failing()
    trainer = quiet_trainer(strategy_for("fsdp2"), 2, max_epochs=3, callbacks=[failing])
    with pytest.raises(KeyError, match="of the user's"):
        trainer.fit(module, loader, ckpt_path=path)
    failing.fails = False
    trainer.fit(module, loader)
    return module.seen


def test_a_resume_that_failed_goes_on_with_the_trainers_next_fit(tmp_path: Path) -> None:
    """Lightning keeps the loops where the checkpoint left them, and the loaders are to fit them."""
    path = str(tmp_path / "saved.ckpt")
    whole = run_on_ranks(2, seen, "fsdp2", "plain", path, 4)
    assert run_on_ranks(2, after_a_failed_resume, path) == [samples[8:] for samples in whole]


_SCRIPT = """
import sys
import torch
from lightning.pytorch import Trainer
from torchdata.stateful_dataloader import StatefulDataLoader
from tests.strategies.stateful import Numbers, SaveAt, Seeing, strategy_for

if __name__ == "__main__":
    path, resumes = sys.argv[1], sys.argv[2] == "resume"
    trainer = Trainer(strategy=strategy_for("fsdp2"), accelerator="cpu", devices=2, max_epochs=2, logger=False,
                      callbacks=[SaveAt(path, 4, "on_train_batch_end")], enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False)
    module = Seeing()
    loader = StatefulDataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=2)
    trainer.fit(module, loader, ckpt_path=path if resumes else None)
    seen = " ".join(str(int(one)) for one in module.seen)
    sys.stdout.write(f"process {trainer.global_rank}: {seen}\\n")  # at once: torchrun's processes have no buffer
"""


def _seen_by_script(*args: str) -> list[list[str]]:
    env = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
    lines = sorted(run_script(_SCRIPT, *args, launcher="torchrun", env=env).lines)
    return [line.split()[2:] for line in lines if line.startswith("process ")]


@pytest.mark.machines
def test_loaders_with_workers_go_on_too(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    whole, resumed = _seen_by_script(path, "begin"), _seen_by_script(path, "resume")
    assert [len(samples) for samples in whole] == [24, 24]
    assert resumed == [samples[8:] for samples in whole]
