"""Kills training at random moments while it saves without a pause, and looks at what is left.

By hand, 50 times (two or three minutes)::

    python -m tests.strategies.kill_while_saving 50
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from accelight.checkpoint import inspect_checkpoint, merge_fsdp_weights
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy, full_state_dict
from tests.ranks import _PRELOAD
from tests.strategies.oracle import quiet_trainer

NUM_RANKS = 2
MOMENTUM = 0.5
_START_S = 120.0
_FORMS = ("sharded", "full", "safetensors", "zero2", "zero3")


class _Counter(LightningModule):
    """Its weights tell how often they were stepped: a checkpoint of two moments shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(8))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self) -> Tensor:
        return torch.stack([layer(torch.eye(256)).sum() for layer in self.layers]).sum()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=MOMENTUM)


def expected_weight(num_steps: int) -> float:
    """Return what every weight is after so many steps."""
    weight = moment = 0.0
    for _ in range(num_steps):
        moment = MOMENTUM * moment + 1
        weight -= moment
    return weight


class _Exporter(ModelCheckpoint):
    """Writes the weights in the Hugging Face form instead of a checkpoint."""

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        strategy: Any = trainer.strategy
        strategy.save_safetensors(filepath)


def _strategy(form: str, in_background: bool = False) -> Any:
    if form.startswith("zero"):
        os.environ["DS_ACCELERATOR"] = "cpu"
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": int(form[-1])}}
        return AccelDeepSpeedStrategy(hf_ds_config=config, async_save=in_background)
    kind = "full_state_dict" if form == "full" else "sharded_state_dict"
    return AccelFSDPStrategy(fsdp_version=2, state_dict_type=kind, async_save=in_background)


def _train(rank: int, folder: str, form: str, in_background: bool) -> None:
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{NUM_RANKS}", LOCAL_WORLD_SIZE=f"{NUM_RANKS}")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", GROUP_RANK="0", TORCHELASTIC_RUN_ID="kill")
    sys.stderr = open(f"{folder}/.errors{rank}", "w")  # noqa: SIM115 (until it is killed)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/.store", rank=rank, world_size=NUM_RANKS)
    strategy = _strategy(form, in_background)
    kind = _Exporter if form == "safetensors" else ModelCheckpoint
    suffix = ".safetensors" if form == "safetensors" else ".ckpt"
    callback = kind(folder, "{step}", save_top_k=1, every_n_train_steps=1, save_last=form != "safetensors")
    callback.FILE_EXTENSION = suffix
    trainer = quiet_trainer(strategy, NUM_RANKS, max_steps=-1, callbacks=[callback], enable_checkpointing=True)
    data = TensorDataset(torch.zeros(1000, 1))
    trainer.fit(_Counter(), DataLoader(data, 1, sampler=DistributedSampler(data, num_replicas=NUM_RANKS, rank=rank)))


def _resume(rank: int, folder: str, form: str, path: str, num_steps: int) -> None:
    """Train one step on from a checkpoint; the process fails unless weights and momentum are what they must be."""
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{NUM_RANKS}", LOCAL_WORLD_SIZE=f"{NUM_RANKS}")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", GROUP_RANK="0", TORCHELASTIC_RUN_ID="resume")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/.store2", rank=rank, world_size=NUM_RANKS)
    strategy = _strategy(form)
    trainer = quiet_trainer(strategy, NUM_RANKS, max_steps=num_steps + 1)
    data, module = TensorDataset(torch.zeros(1000, 1)), _Counter()
    loader = DataLoader(data, 1, sampler=DistributedSampler(data, num_replicas=NUM_RANKS, rank=rank))
    trainer.fit(module, loader, ckpt_path=path, weights_only=True)
    values = {value for one in full_state_dict(strategy, module).values() for value in one.unique().tolist()}
    assert values == {expected_weight(num_steps + 1)}, (path, num_steps, values)


def kill_once(folder: Path, form: str, in_background: bool, only_one: bool, seconds: float) -> list[str]:
    """Train, kill all ranks or one ``seconds`` after the first checkpoint, and check what is there.

    Returns:
        The names of the checkpoints that are left.

    Raises:
        AssertionError: If none is left, or one cannot be read or is not of one moment, or the last one does not resume.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, "tests.strategies.oracle"])
    ranks = [context.Process(target=_train, args=(rank, f"{folder}", form, in_background)) for rank in range(NUM_RANKS)]
    for rank in ranks:
        rank.start()
    try:
        deadline = time.monotonic() + _START_S
        while not _checkpoints(folder):
            assert time.monotonic() < deadline, "no checkpoint appeared"
            assert all(rank.is_alive() for rank in ranks), (folder / ".errors0").read_text()[-3000:]
            time.sleep(0.01)
        time.sleep(seconds)
        victims = [random.choice(ranks)] if only_one else ranks
        for rank in victims:
            rank.kill()
        time.sleep(0.3 if only_one else 0)  # what the other one makes of it
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    found = _checkpoints(folder)
    assert found, "no checkpoint is left"
    for path in found:
        num_steps = _check(path, form)
    if num_steps is not None:  # the last one
        ranks = [
            context.Process(target=_resume, args=(rank, f"{folder}", form, f"{path}", num_steps))
            for rank in range(NUM_RANKS)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(_START_S)
            rank.kill()
        assert [rank.exitcode for rank in ranks] == [0] * NUM_RANKS, f"{path} does not resume"
    return [path.name for path in found]


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _check(path: Path, form: str) -> int | None:
    """Return the number of steps that the checkpoint is of, where it says so."""
    num_steps: int | None = None
    if form == "safetensors":
        weights = load_file(path)
    elif form == "full":
        checkpoint = torch.load(path, weights_only=True)
        weights, num_steps = checkpoint["state_dict"], checkpoint["global_step"]
        assert len(checkpoint["optimizer_states"][0]["state"]) == 8
    elif form.startswith("zero"):
        with tempfile.TemporaryDirectory() as output:
            merge_fsdp_weights(path, output, progress=False)
            weights = load_file(Path(output, "model.safetensors"))
        num_steps = inspect_checkpoint(path).global_step
    else:
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        with tempfile.NamedTemporaryFile() as file:
            dcp_to_torch_save(path, file.name)
            everything = torch.load(file.name, weights_only=True)
        weights = everything["state_dict"]
        assert len(everything["optimizer_0"]["state"]) == 8
        num_steps = torch.load(path / "meta.pt", weights_only=True)["global_step"]
    values = {value for weight in weights.values() for value in weight.unique().tolist()}
    assert len(weights) == 8
    assert len(values) == 1, f"{path} is of several moments: {values}"
    if num_steps is not None:
        assert values == {expected_weight(num_steps)}, (path, num_steps, values)
    return num_steps


def kill_often(num_attempts: int, seed: int) -> None:
    """Kill in every way in turn; print what was left."""
    generator = random.Random(seed)
    for attempt in range(num_attempts):
        form, in_background = _FORMS[attempt % len(_FORMS)], bool(attempt // len(_FORMS) % 2)
        only_one = bool(attempt // len(_FORMS) // 2 % 2)
        seconds = generator.uniform(0, 1)
        with tempfile.TemporaryDirectory() as folder:
            left = kill_once(Path(folder), form, in_background, only_one, seconds)
        how = f"{form}{' in the background' if in_background else ''}, {'one rank' if only_one else 'all'} killed"
        print(f"{attempt + 1:3}: {how}, {seconds:.3f} s after the first: {', '.join(left)}", flush=True)


if __name__ == "__main__":
    kill_often(int(sys.argv[1]) if len(sys.argv) > 1 else 50, seed=int(time.time()))
