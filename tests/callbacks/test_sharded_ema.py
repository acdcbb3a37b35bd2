"""`ShardedEMA`: averages of shards are torch's averages of the whole model, in evaluation and in checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from accelight.callbacks import MergeShardedCheckpoint, ShardedEMA
from accelight.checkpoint import CheckpointError, load_state_dict, merge_fsdp_weights
from accelight.checkpoint.cli import main
from accelight.checkpoint.locate import find_checkpoint
from accelight.state import PartialState
from accelight.state.upstream import flight_record
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.oracle import (
    BATCH_SIZE,
    NUM_MICRO_BATCHES,
    TinyModel,
    dataset,
    quiet_trainer,
    rank_loader,
)

UNITS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
FSDP: dict[str, dict[str, Any]] = {
    "fsdp1": {"fsdp_version": 1, **UNITS},
    "fsdp1_flat": {"fsdp_version": 1, "use_orig_params": False, **UNITS},
    "fsdp1_no_shard": {"fsdp_version": 1, "sharding_strategy": "NO_SHARD", **UNITS},
    "fsdp2": {"fsdp_version": 2, **UNITS},
    "fsdp1_hybrid": {"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD", "device_mesh": (1, 2), **UNITS},
    "fsdp2_hybrid": {"fsdp_version": 2, "device_mesh": (2, 1), **UNITS},
    "fsdp2_offloaded": {"fsdp_version": 2, "cpu_offload": True, **UNITS},
    "fsdp2_ignored": {"fsdp_version": 2, "ignored_modules": r"model\.head", **UNITS},
}
ZERO = ("zero0", "zero1", "zero2", "zero3")
KINDS = (*FSDP, *ZERO, "ddp")
MAIN_KINDS = ("fsdp1", "fsdp2", "zero2", "zero3", "ddp")
ACCUMULATE, VALIDATE_EVERY, NUM_EPOCHS = 2, 3, 2


def strategy_of(kind: str, **more: Any) -> Any:
    if kind == "ddp":
        return "ddp_find_unused_parameters_true"
    if kind in ZERO:
        return AccelDeepSpeedStrategy(hf_ds_config={"zero_optimization": {"stage": int(kind[-1])}}, **more)
    return AccelFSDPStrategy(**{**FSDP[kind], **more})


class Decaying(TinyModel):
    """With a buffer that training changes and that counts in the output."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.mul_(0.95)
        return super().forward(x * self.scale)


def build() -> Decaying:
    torch.manual_seed(1)
    return Decaying()


def slow_average(averages: list[Tensor], weights: list[Tensor], num_averaged: Any) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.lerp_(weight, 1 / (float(num_averaged) + 3))


RULES: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "exponential": ({"decay": 0.7}, get_ema_multi_avg_fn(0.7)),
    "uniform": ({"averaging": "uniform"}, get_swa_multi_avg_fn()),
    "function": ({"averaging": slow_average}, slow_average),
}


class Silent(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_over(self.parameters(), adam=False)


Found = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]
"""Losses of validation, trained weights, averages."""


class Module(Silent):
    """Looks at what it evaluates with; the layers ``blocks.1`` train from step 3 on."""

    def __init__(self, *, adam: bool = False) -> None:
        super().__init__()
        self.adam = adam
        self.val_losses: list[float] = []
        self.averages: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", functional.mse_loss(self.model(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.val_losses.append(self.trainer.callback_metrics["val_loss"].item())

    def on_train_start(self) -> None:
        self.model.blocks[1].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.model.blocks[1].requires_grad_(self.trainer.global_step >= 3)

    def on_train_end(self) -> None:
        trainer: Any = self.trainer
        ema = next(one for one in trainer.callbacks if isinstance(one, ShardedEMA))
        self.weights = self.full()
        with ema.averaged_weights(self.trainer):
            self.averages = self.full()

    def full(self) -> dict[str, Tensor]:
        strategy = self.trainer.strategy
        if hasattr(strategy, "save_safetensors"):  # flat parameters have other names otherwise
            with tempfile.TemporaryDirectory() as folder:
                file = strategy.broadcast(f"{folder}/model.safetensors")
                strategy.save_safetensors(file)
                strategy.barrier()
                weights = load_file(file)
                strategy.barrier()
                return weights
        full = strategy.full_state_dict() if hasattr(strategy, "full_state_dict") else self.state_dict()
        return {name: tensor.cpu().clone() for name, tensor in full.items()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_over(self.parameters(), adam=self.adam)


def optimizer_over(parameters: Any, *, adam: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01) if adam else torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def settings(rule: str) -> dict[str, Any]:
    return {**RULES[rule][0], "every_n_steps": 2, "start_step": 1, "use_buffers": True}


def train(kind: str, rule: str, world_size: int) -> Found:
    trainer = quiet_trainer(
        strategy_of(kind), world_size, max_epochs=NUM_EPOCHS, accumulate_grad_batches=ACCUMULATE,
        val_check_interval=VALIDATE_EVERY, callbacks=[ShardedEMA(**settings(rule))],
    )  # fmt: skip
    module = Module()
    trainer.fit(module, rank_loader(world_size), rank_loader(world_size))
    return module.val_losses, module.weights, module.averages


def loader(world_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return this rank's share of batches that are the same on any number of processes, which divides 12."""
    data = dataset(6)
    sampler: DistributedSampler[Any] = DistributedSampler(data, world_size, PartialState().process_index, shuffle=False)
    return DataLoader(data, 12 // world_size, sampler=sampler)


def train_plainly(rule: str, world_size: int, validate_every: int = VALIDATE_EVERY, *, adam: bool = False) -> Found:
    """The same on one process, with torch's averages."""
    model, val_losses, num_steps = build(), list[float](), 0
    averaged: Any = AveragedModel(model, multi_avg_fn=RULES[rule][1], use_buffers=True)
    optimizer = optimizer_over(model.parameters(), adam=adam)
    inputs, targets = dataset(world_size).tensors
    size = BATCH_SIZE * world_size
    batches = [(inputs[at : at + size], targets[at : at + size]) for at in range(0, len(inputs), size)]
    for _ in range(NUM_EPOCHS):
        for index, (x, y) in enumerate(batches):
            model.blocks[1].requires_grad_(num_steps >= 3)
            loss = functional.mse_loss(model(x), y)
            (loss / ACCUMULATE).backward()
            if (index + 1) % ACCUMULATE == 0 or index + 1 == NUM_MICRO_BATCHES:
                optimizer.step()
                optimizer.zero_grad()
                num_steps += 1
                if num_steps % 2:
                    averaged.update_parameters(model)
            if (index + 1) % validate_every == 0:
                averaged.eval()
                with torch.no_grad():
                    val_losses.append(
                        torch.stack([functional.mse_loss(averaged(x), y) for x, y in batches]).mean().item()
                    )
    weights, averages = (
        {f"model.{name}": value.detach() for name, value in one.state_dict().items()}
        for one in (model, averaged.module)
    )
    return val_losses, weights, averages


def cells(kinds: Iterable[str], others: Iterable[Any], core: Callable[[str, Any], bool]) -> list[Any]:
    """Return all pairs, of which ``make test`` runs the core."""
    pairs = [(kind, other) for kind in kinds for other in others]
    return [pytest.param(*pair, marks=[] if core(*pair) else pytest.mark.exhaustive) for pair in pairs]


@pytest.mark.parametrize(
    ("kind", "rule"),
    cells(KINDS, RULES, lambda kind, rule: (rule == "exponential" and kind in MAIN_KINDS) or kind == "fsdp2"),
)
def test_averages_are_torchs_of_one_process(kind: str, rule: str) -> None:
    val_losses, weights, averages = train_plainly(rule, 2)
    for found in run_on_ranks(2, train, kind, rule, 2, init_group=kind not in ("ddp",)):
        assert found[0] == pytest.approx(val_losses, rel=1e-5)  # sums in another order
        for ours, theirs in ((found[1], weights), (found[2], averages)):
            if ours:
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(averages[name], weights[name]) for name in weights)


class InStages(Module):
    """Trains one block, and then the other one."""

    def on_train_start(self) -> None:
        self.model.blocks[1].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for at, block in enumerate(self.model.blocks):
            block.requires_grad_(at == (self.trainer.global_step >= 3))


def test_what_trains_later_is_averaged_also_where_as_much_stops() -> None:
    callback, module = ShardedEMA(decay=0.5), InStages()
    quiet_trainer("auto", 1, max_epochs=2, callbacks=[callback]).fit(module, loader(1))
    assert not any(
        torch.equal(module.weights[name], module.averages[name]) for name in module.averages if "blocks" in name
    )


def test_averages_of_a_tested_checkpoint_serve_outside_of_inference_mode(tmp_path: Path) -> None:
    trainer = quiet_trainer("auto", 1, max_epochs=1, callbacks=[ShardedEMA(decay=0.5)])
    trainer.fit(Module(), loader(1), loader(1))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    module, callback = Module(), ShardedEMA(decay=0.5)
    trainer = quiet_trainer("auto", 1, callbacks=[callback])
    trainer.validate(module, loader(1), ckpt_path=tmp_path / "saved.ckpt")
    own = {name: one.clone() for name, one in module.state_dict().items()}
    with callback.averaged_weights(trainer):
        assert any(not torch.equal(own[name], one) for name, one in module.state_dict().items())
    assert all(torch.equal(own[name], one) for name, one in module.state_dict().items())


# ------------------------------------------------------------------------------------------------
# Checkpoints: with both, resumed elsewhere, evaluated, exported.


@dataclass(frozen=True)
class Run:
    """On some ranks, with a strategy."""

    kind: str
    num_ranks: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    adam: bool = False
    """DeepSpeed restores the state of no other optimizer on another number of ranks."""

    def trainer(self, *callbacks: Callback, **more: Any) -> Trainer:
        options = dict(self.options)
        if self.kind in FSDP:
            options.setdefault("state_dict_type", "sharded_state_dict")
        ema = ShardedEMA(**settings("exponential"))
        return quiet_trainer(
            strategy_of(self.kind, **options), self.num_ranks, accumulate_grad_batches=ACCUMULATE,
            callbacks=[ema, *callbacks], **more
        )  # fmt: skip


class SaveInValidation(Callback):
    """Saves while the model has the averages."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 4 and trainer.state.fn == "fit":
            trainer.save_checkpoint(self.path)


def saving_at_end(path: str, *, weights_only: bool = False) -> ModelCheckpoint:
    place = Path(path)
    return ModelCheckpoint(
        place.parent, place.stem, monitor="val_loss", save_weights_only=weights_only, enable_version_counter=False
    )


def fit_and_save(run: Run, path: str, in_validation: bool = False, weights_only: bool = False) -> Found:
    """Train one epoch, and save at its end."""
    saving = SaveInValidation(path) if in_validation else saving_at_end(path, weights_only=weights_only)
    trainer, module = run.trainer(saving, max_epochs=1, enable_checkpointing=not in_validation), Module(adam=run.adam)
    trainer.fit(module, loader(run.num_ranks), loader(run.num_ranks))
    return module.val_losses, module.weights, module.averages


def resume(run: Run, path: str) -> Found:
    """Train the second epoch from a checkpoint."""
    trainer, module = run.trainer(max_epochs=NUM_EPOCHS, num_sanity_val_steps=1), Module(adam=run.adam)
    module.model.blocks[1].requires_grad_(run.kind not in FSDP)  # else from the first batch on
    trainer.fit(module, loader(run.num_ranks), loader(run.num_ranks), ckpt_path=path)
    return module.val_losses, module.weights, module.averages


SAVES: dict[str, tuple[Run, Run]] = {
    "fsdp2, to one process": (Run("fsdp2"), Run("fsdp2", 1)),
    "fsdp2, to fsdp1 on three": (Run("fsdp2"), Run("fsdp1", 3)),
    "fsdp1, to fsdp2": (Run("fsdp1"), Run("fsdp2")),
    "fsdp1 with flat parameters, to fsdp2": (Run("fsdp1_flat"), Run("fsdp2", 1)),
    "fsdp1 unsharded, to fsdp1": (Run("fsdp1_no_shard"), Run("fsdp1")),
    "in one file, to fsdp1": (Run("fsdp2", 2, {"state_dict_type": "full_state_dict"}), Run("fsdp1")),
    "in one file of fsdp1, to ddp": (Run("fsdp1", 2, {"state_dict_type": "full_state_dict"}), Run("ddp")),
    "ddp, to fsdp2": (Run("ddp"), Run("fsdp2")),
    "local, to the same": (Run("fsdp1", 2, {"state_dict_type": "local_state_dict"}), Run("fsdp1")),
    "in the background": (Run("fsdp2", 2, {"async_save": True}), Run("fsdp2")),
    "by a process": (Run("fsdp1", 2, {"async_save": "process"}), Run("fsdp2")),
    "zero0": (Run("zero0"), Run("zero0")),
    "zero1": (Run("zero1"), Run("zero1")),
    "zero2, to one process": (Run("zero2", adam=True), Run("zero2", 1, {"load_universal": True}, adam=True)),
    "zero3": (Run("zero3"), Run("zero3")),
    "zero3 in the background": (Run("zero3", 2, {"async_save": True}), Run("zero3")),
    "zero3, to three processes": (Run("zero3", adam=True), Run("zero3", 3, {"load_universal": True}, adam=True)),
}


RESUMED_FIRST = {
    ("fsdp1, to fsdp2", False),
    ("in one file of fsdp1, to ddp", False),
    ("in the background", False),
    ("zero1", True),
    ("zero3", False),
}
"""Whether what `make test` saves is saved inside of validation."""


@pytest.mark.parametrize(
    ("save", "in_validation"), cells(SAVES, (False, True), lambda save, later: (save, later) in RESUMED_FIRST)
)
def test_training_resumes_with_averages(save: str, in_validation: bool, tmp_path: Path) -> None:
    run, next_run = SAVES[save]
    path = str(tmp_path / "saved.ckpt")
    run_on_ranks(run.num_ranks, fit_and_save, run, path, in_validation, init_group=False)
    expected = train_plainly("exponential", 6, validate_every=NUM_MICRO_BATCHES, adam=run.adam)
    for found in run_on_ranks(next_run.num_ranks, resume, next_run, path, init_group=False):
        assert found[0][-1] == pytest.approx(expected[0][-1], rel=1e-5)
        for ours, theirs in zip(found[1:], expected[1:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def evaluate(run: Run, path: str) -> list[float]:
    """Return the loss of the averages in the fit that ends, and in Trainers that load its checkpoint; last, frozen."""
    saving, module = saving_at_end(path, weights_only=run.kind != "ddp"), Module()
    trainer = run.trainer(saving, max_epochs=1, enable_checkpointing=True)
    trainer.fit(module, loader(run.num_ranks), loader(run.num_ranks))
    losses = [trainer.validate(module, loader(run.num_ranks), verbose=False)[0]["val_loss"]]
    trained = module.full()  # as before
    torch.testing.assert_close(trained, module.weights, rtol=0, atol=0)
    for is_frozen in (False, True):
        later = Module().requires_grad_(not is_frozen)
        validate = run.trainer().validate
        losses.append(validate(later, loader(run.num_ranks), ckpt_path=path, verbose=False)[0]["val_loss"])
    return losses


@pytest.mark.core("fsdp1]", "fsdp2]", "zero3]")
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_after_a_fit_has_the_averages(kind: str, tmp_path: Path) -> None:
    expected = train_plainly("exponential", 6, validate_every=NUM_MICRO_BATCHES)[0][0]
    found = run_on_ranks(2, evaluate, Run(kind), str(tmp_path / "saved.ckpt"), init_group=False)
    assert found == [pytest.approx([expected] * 3, rel=1e-5)] * 2


@pytest.mark.core("fsdp2-False", "fsdp1-True", "zero3-True")
@pytest.mark.parametrize("in_validation", [False, True])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "zero0", "zero1", "zero3"])
def test_averages_are_exported(kind: str, in_validation: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    _, trained, averages = run_on_ranks(2, fit_and_save, Run(kind), path, in_validation, init_group=False)[0]
    assert main(["merge-weights", path, str(tmp_path / "ema"), "--weights", "ema", "--verify"]) == 0
    assert main(["verify", path, str(tmp_path / "ema"), "--weights", "ema"]) == 0
    merge_fsdp_weights(path, tmp_path / "model")
    for folder, expected in (("ema", averages), ("model", trained)):
        torch.testing.assert_close(load_file(tmp_path / folder / "model.safetensors"), expected, rtol=0, atol=0)
    merge_fsdp_weights(path, tmp_path / "ema", weights="ema", remove_checkpoint_dir=True)
    with pytest.raises(CheckpointError, match="averages" if kind.startswith("zero") else "does not exist"):
        find_checkpoint(path, "ema")
    if kind.startswith("zero"):  # whose averages have a folder of their own
        torch.testing.assert_close(load_state_dict(path), trained, rtol=0, atol=0)


@pytest.mark.core("sharded_state_dict-True")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("form", ["sharded_state_dict", "full_state_dict"])
def test_the_merge_callback_exports_averages(form: str, background: bool, tmp_path: Path) -> None:
    averages = run_on_ranks(2, fit_and_merge, str(tmp_path), form, background, init_group=False)[0]
    found = load_file(tmp_path / "merged" / "model.safetensors")
    torch.testing.assert_close(found, averages, rtol=0, atol=0)


def fit_and_merge(folder: str, form: str, background: bool) -> dict[str, Tensor]:
    merging = MergeShardedCheckpoint(f"{folder}/merged", weights="ema", background=background)
    trainer, module = Run("fsdp2", 2, {"state_dict_type": form}).trainer(merging, max_epochs=1), Module()
    trainer.fit(module, loader(2), loader(2))
    return module.averages


class Tied(Silent):
    model: Any

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 3))
        self.model[1].weight = self.model[0].weight


def test_tied_weights_are_averaged_and_stay_tied(tmp_path: Path) -> None:
    path, module = tmp_path / "saved.ckpt", Tied()
    trainer = quiet_trainer("auto", 1, max_epochs=1, callbacks=[ShardedEMA(decay=0.5)])
    trainer.fit(module, loader(1))
    trainer.save_checkpoint(path)
    stored = torch.load(path, weights_only=True)
    averages, trained = stored["averaged_weights"], stored["state_dict"]
    for weights in (averages, trained):
        assert weights.keys() == module.state_dict().keys()
        assert weights["model.1.weight"].data_ptr() == weights["model.0.weight"].data_ptr()
    assert torch.equal(trained["model.0.weight"], module.model[0].weight)
    assert not torch.equal(averages["model.0.weight"], trained["model.0.weight"])


class WithObject(Silent):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["folder"] = Path()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", functional.mse_loss(self.model(batch[0]), batch[1]))


def test_evaluation_reads_the_checkpoint_once_as_the_trainer_was_told(tmp_path: Path) -> None:
    path, module = tmp_path / "saved.ckpt", WithObject()
    trainer = quiet_trainer("auto", 1, max_epochs=1, callbacks=[ShardedEMA(decay=0.5)])
    trainer.fit(module, loader(1))
    trainer.save_checkpoint(path)
    later = quiet_trainer("auto", 1, callbacks=[ShardedEMA(decay=0.5)])
    found = later.validate(WithObject(), loader(1), ckpt_path=path, weights_only=False, verbose=False)
    assert found == trainer.validate(module, loader(1), verbose=False)


class Follow(Callback):
    """Saves the weights after each step."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}")


def follow_in_bf16(kind: str, folder: str) -> None:
    ema = ShardedEMA(decay=0.5)
    trainer = quiet_trainer(
        strategy_of(kind, **({"state_dict_type": "sharded_state_dict"} if kind in FSDP else {})), 2,
        precision="bf16-mixed", max_steps=4, callbacks=[ema, Follow(folder)],
    )  # fmt: skip
    trainer.fit(Module(), loader(2))


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "zero1", "zero2", "zero3"])
def test_mixed_precision_averages_the_fp32_weights(kind: str, tmp_path: Path) -> None:
    run_on_ranks(2, follow_in_bf16, kind, str(tmp_path), init_group=False)
    average = load_state_dict(tmp_path / "1")
    for step in (2, 3, 4):
        average = {name: (average[name] + value) / 2 for name, value in load_state_dict(tmp_path / f"{step}").items()}
    found = load_state_dict(tmp_path / "4", weights="ema")
    average["model.scale"] = load_state_dict(tmp_path / "4")["model.scale"]  # buffers are not averaged here
    torch.testing.assert_close(found, average, rtol=1e-6, atol=1e-7)  # of fp32; bf16 would be off by 1e-3


class Counting(Callback):
    """Counts the collectives of training."""

    def on_train_start(self, *_: Any) -> None:
        self.count = -last_collective()

    def on_train_end(self, *_: Any) -> None:
        self.count += last_collective()


def last_collective() -> int:
    return max((each["record_id"] for each in flight_record()), default=-1)


def count_collectives(kind: str) -> list[int]:
    """Return how many an epoch has with averages, and without."""
    counts = []
    for ema in (ShardedEMA(0.9, use_buffers=True), ShardedEMA(0.9, start_step=100)):
        counting = Counting()
        quiet_trainer(strategy_of(kind), 2, max_epochs=1, callbacks=[ema, counting]).fit(Module(), loader(2))
        counts.append(counting.count)
    return counts


@pytest.mark.core("fsdp2", "zero3")
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "zero1", "zero2", "zero3"])
def test_averaging_communicates_nothing(kind: str) -> None:
    for averaged, plain in run_on_ranks(2, count_collectives, kind, init_group=False):
        assert averaged == plain > 0


def average_after(**arguments: Any) -> int:
    ema = ShardedEMA(**arguments)
    quiet_trainer("auto", 1, max_epochs=2, callbacks=[ema]).fit(Module(), DataLoader(dataset(1), 2))
    return ema.num_averaged


@pytest.mark.parametrize(("start", "every", "expected"), [(0, 1, 14), (0, 5, 2), (3, 5, 3), (14, 1, 1), (15, 1, 0)])
def test_averages_begin_and_repeat_by_optimizer_steps(start: int, every: int, expected: int) -> None:
    assert average_after(start_step=start, every_n_steps=every) == expected  # of 14 steps


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"decay": 1.5}, "decay must be between 0 and 1, got 1.5"),
        ({"decay": 0.9, "averaging": "uniform"}, "decay=0.9 has no effect"),
        ({"averaging": "mean"}, "averaging must be 'exponential', 'uniform' or a function, got 'mean'"),
        ({"every_n_steps": 0}, "every_n_steps must be an int >= 1, got 0"),
        ({"start_step": -1}, "start_step must be an int >= 0, got -1"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ShardedEMA(**arguments)


def test_a_merge_without_averages_says_so(tmp_path: Path) -> None:
    run_on_ranks(2, save_without_averages, str(tmp_path), init_group=False)
    for kind in ("fsdp2", "zero2"):
        with pytest.raises(CheckpointError, match="holds no averages: it was saved without ShardedEMA"):
            merge_fsdp_weights(tmp_path / kind, tmp_path / "merged", weights="ema")


def save_without_averages(folder: str) -> None:
    for kind in ("fsdp2", "zero2"):
        trainer: Any = Run(kind).trainer(max_epochs=1)
        trainer.callbacks = []
        trainer.fit(Silent(), loader(2))
        trainer.save_checkpoint(f"{folder}/{kind}")
