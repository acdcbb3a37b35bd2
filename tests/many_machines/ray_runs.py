"""A local Ray cluster for tests, and the functions that its workers run."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from ray.cluster_utils import Cluster
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, get_all_reported_checkpoints
from ray.train.lightning import RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from accelight.callbacks import ElasticTraining, MergeShardedCheckpoint, RayReportCheckpoint, TriggerEarlyStopping
from accelight.checkpoint import merge_fsdp_weights
from accelight.strategies import AccelFSDPStrategy, RayAccelDeepSpeedStrategy, RayAccelFSDPStrategy, reported_checkpoint
from tests.strategies.oracle import BATCH_SIZE, Case, Outcome, TinyModule, dataset, rank_loader

ROOT = Path(__file__).parents[2]
NUM_WORKERS = 2
_LONGEST_KILL_S = 120.0


_STORE_BYTES = 80 * 2**20  # the least that Ray takes


def prepare_environment() -> None:
    """Let what Ray starts find what is found here, tell nobody, and have time; before a cluster is started."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600"})


@contextmanager
def cluster() -> Iterator[None]:
    """Start a cluster of one node on this machine; nothing of it is left afterwards."""
    prepare_environment()
    ray.init(
        address="local",
        num_cpus=NUM_WORKERS,
        include_dashboard=False,
        object_store_memory=_STORE_BYTES,
        configure_logging=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


class Nodes:
    """A cluster of nodes on this machine, each of one worker, beside the driver's.

    Args:
        num_nodes: More than workers need are spare. (Ray starts nodes in the main thread alone.)
    """

    def __init__(self, num_nodes: int) -> None:
        prepare_environment()
        self._cluster: Any = Cluster(head_node_args={"num_cpus": 0, "include_dashboard": False}, initialize_head=True)
        ray.init(address=self._cluster.address, configure_logging=False)
        for _ in range(num_nodes):
            self._cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)

    def kill(self, node_id: str) -> None:
        """End a node with all of its processes by SIGKILL."""
        [node] = [one for one in self._cluster.worker_nodes if one.node_id == node_id]
        self._cluster.remove_node(node, allow_graceful=False)

    def end(self) -> None:
        """End all nodes."""
        ray.shutdown()
        self._cluster.shutdown()


@dataclass(frozen=True)
class Run:
    """What workers are to train; pickled for them."""

    strategy: str
    """``fsdp1``, ``fsdp2``, or ``zero0`` to ``zero3``; or several, with spaces between them."""
    folder: Path
    """For what workers note."""
    epochs: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    """Of the strategy."""
    every_n_train_steps: int = 0
    kill_at_step: int = 0
    """Optimizer step after which worker 1 kills itself, once; 0 never."""
    kills_node: bool = False
    """Whether it waits instead for the test to end its node."""
    own_disks: bool = False
    """Whether each worker has a folder for temporary files that no other looks into."""


def strategy_of(run: Run) -> Any:
    if run.strategy.startswith("zero"):
        return RayAccelDeepSpeedStrategy(zero_stage=int(run.strategy[-1]), **run.options)
    units: dict[str, Any] = {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Block"],
        "state_dict_type": "sharded_state_dict",
    }
    return RayAccelFSDPStrategy(fsdp_version=int(run.strategy[-1]), **{**units, **run.options})


def quiet_ray_trainer(strategy: Any, **more: Any) -> Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": "auto",
        "plugins": [RayLightningEnvironment()],
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(
            isinstance(callback, RayReportCheckpoint) for callback in more.get("callbacks", ())
        ),
    }
    return Trainer(strategy=strategy, **{**settings, **more})


class _Scheduled(TinyModule):
    """Its rate falls at the end of epochs, by a schedule and by a hook of its own: both belong to a checkpoint."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1, 0.7), "interval": "epoch"}}

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9)


class Notes(Callback):
    """Writes down what each start of the workers does, and ends one of them."""

    def __init__(self, run: Run, resumed_from: str | None) -> None:
        self.run, self.resumed_from = run, resumed_from

    def _note(self, line: str) -> None:
        with (self.run.folder / f"notes-{dist.get_rank()}").open("a") as file:
            file.write(line + "\n")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note(f"start {os.getpid()} {self.resumed_from}")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._note(f"loss {trainer.global_step} {pl_module.outcome.losses[-1]!r}")
        killed = self.run.folder / "killed"
        if trainer.global_step == self.run.kill_at_step and dist.get_rank() == 1 and not killed.exists():
            get_all_reported_checkpoints()  # answers when Ray knows of all that were reported
            killed.write_text(ray.get_runtime_context().get_node_id())
            if not self.run.kills_node:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(_LONGEST_KILL_S)


def train(run: Run) -> None:
    """Train in a worker, from where Ray goes on."""
    if run.own_disks:
        disk = run.folder / "disks" / f"{dist.get_rank()}"
        disk.mkdir(parents=True, exist_ok=True)
        tempfile.tempdir = str(disk)
    ckpt_path = reported_checkpoint()
    trainer = quiet_ray_trainer(
        strategy_of(run),
        max_epochs=run.epochs,
        callbacks=[RayReportCheckpoint(every_n_train_steps=run.every_n_train_steps), Notes(run, ckpt_path)],
    )
    module = _Scheduled(Case(), Outcome())
    loader = DataLoader(dataset(NUM_WORKERS), BATCH_SIZE, shuffle=True)  # Lightning puts its sampler into it
    prepare_trainer(trainer).fit(module, loader, ckpt_path=ckpt_path)


def train_elastically(run: Run) -> None:
    """Train in as many workers as there are."""
    ckpt_path = reported_checkpoint()
    elastic = ElasticTraining(global_batch_size=2 * BATCH_SIZE, max_batch_size=BATCH_SIZE)
    reporting = RayReportCheckpoint(every_n_train_steps=run.every_n_train_steps)
    trainer = quiet_ray_trainer(
        strategy_of(run), max_epochs=run.epochs, callbacks=[elastic, reporting, Notes(run, ckpt_path)]
    )
    loader = DataLoader(dataset(NUM_WORKERS), shuffle=True)
    prepare_trainer(trainer).fit(TinyModule(Case(), Outcome()), loader, ckpt_path=ckpt_path)


def train_as_plain_loop(run: Run) -> None:
    """Train over the oracle's batches, with one engine after the other, and save."""
    for strategy in run.strategy.split():
        trainer = quiet_ray_trainer(strategy_of(replace(run, strategy=strategy)), max_epochs=run.epochs)
        prepare_trainer(trainer).fit(TinyModule(Case(), Outcome()), rank_loader(NUM_WORKERS))
        trainer.save_checkpoint(run.folder / strategy)


def meet_errors(run: Run) -> None:
    """Use things wrongly in a worker, note what is said, and report weights beside other callbacks in the end."""

    def note(make: Callable[[], Any]) -> None:
        try:
            make()
        except (RuntimeError, ValueError) as error:
            with (run.folder / f"errors-{dist.get_rank()}").open("a") as file:
                file.write(f"{type(error).__name__}: {error}\n")

    module, loader = TinyModule(Case(), Outcome()), rank_loader(NUM_WORKERS)
    note(lambda: prepare_trainer(quiet_ray_trainer(AccelFSDPStrategy())))
    note(lambda: quiet_ray_trainer(strategy_of(run), plugins=None).fit(module, loader))
    signals = TriggerEarlyStopping(stop_on_signals=["SIGTERM"])
    note(lambda: quiet_ray_trainer(strategy_of(run), callbacks=[signals], max_epochs=1).fit(module, loader))
    late = quiet_ray_trainer(strategy_of(replace(run, options={"timeout": timedelta(minutes=5)})), fast_dev_run=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        late.fit(module, loader)
    told = [str(one.message) for one in caught if "existed before the Trainer" in str(one.message)]
    (run.folder / f"warnings-{dist.get_rank()}").write_text("\n".join(told))
    stopping = TriggerEarlyStopping(condition=lambda trainer, *_: trainer.global_step == 4 and trainer.is_global_zero)
    merging = MergeShardedCheckpoint(run.folder / "merged", strip_prefix="model")
    reporting = RayReportCheckpoint()
    trainer = quiet_ray_trainer(strategy_of(run), callbacks=[stopping, merging, reporting], max_epochs=2)
    prepare_trainer(trainer).fit(TinyModule(Case(), Outcome()), loader)
    again = quiet_ray_trainer(strategy_of(run), callbacks=[RayReportCheckpoint()], max_steps=trainer.global_step)
    again.fit(TinyModule(Case(), Outcome()), loader)  # to the same step, whose checkpoint Ray keeps already
    (run.folder / f"stopped-{dist.get_rank()}").write_text(f"{stopping.stopped_step} {reporting.last_reported}")


def run_on_ray(
    function: Callable[[Any], None],
    run: Any,
    storage: Path,
    *,
    max_failures: int = 0,
    keep: int | None = None,
    num_workers: Any = NUM_WORKERS,
    **more: Any,
) -> Any:
    """Run a function of this module on all workers; return Ray's ``Result``.

    Args:
        function: What each worker runs.
        run: Its argument.
        storage: Folder of the run's folder.
        max_failures: How often the workers are started again.
        keep: Checkpoints that Ray does not delete; None for all.
        num_workers: As for ``ScalingConfig``, whose types are those of Ray Train's first version.
        **more: For ``RunConfig``.
    """
    config = RunConfig(
        name="run",
        storage_path=str(storage),
        failure_config=FailureConfig(max_failures=max_failures),
        checkpoint_config=CheckpointConfig(num_to_keep=keep),
        **more,
    )
    scaling = ScalingConfig(num_workers=num_workers)
    return TorchTrainer(function, train_loop_config=run, scaling_config=scaling, run_config=config).fit()


def notes(folder: Path, rank: int) -> tuple[list[tuple[str, str]], list[dict[int, float]]]:
    """Return process and checkpoint of each start of a worker, and the losses by step after it."""
    starts: list[tuple[str, str]] = []
    losses: list[dict[int, float]] = []
    for line in (folder / f"notes-{rank}").read_text().splitlines():
        kind, first, second = line.split(" ", 2)
        if kind == "start":
            starts.append((first, second))
            losses.append({})
        else:
            losses[-1][int(first)] = float(second)
    return starts, losses


def merged_weights(checkpoint: Path, folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint, as a merge has them."""
    report = merge_fsdp_weights(checkpoint, folder, strip_prefix="model")
    return load_file(folder / report.files[0])
