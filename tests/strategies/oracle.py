"""The same training twice: under the Trainer on several processes, and in a plain single-process loop."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from accelight.state import GradientAccumulationPlugin, PartialState
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy

WIDTH = 8
BATCH_SIZE = 2
NUM_MICRO_BATCHES = 7
"""Of an epoch: with accumulation 3 the last window has one."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class TinyModel(nn.Module):
    """Odd sizes on purpose: shards of unequal length, and ranks with none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))


@dataclass(frozen=True)
class Case:
    """One cell of the grid."""

    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    optimizer: str = "sgd"
    epochs: int = 2
    precision: Any = "32-true"
    sync_with_dataloader: bool = True
    """Whether the last window of an epoch is cut short; else the next epoch goes on with it."""
    short_windows: Any = None
    """How a short window is divided."""
    accumulate_later: int | None = None
    """From the second epoch on, by Lightning's scheduler."""
    skip_at: int | None = None
    """``on_train_batch_start`` returns -1 here, which ends the first epoch; with ``sync_with_dataloader=False``."""
    validate_every: int | None = None
    """Micro-batches between validations, which must not change anything."""


@dataclass
class Outcome:
    """What training left: comparable between the two ways."""

    losses: list[float] = field(default_factory=list)
    """Mean loss of each global micro-batch."""
    grad_norms: list[float] = field(default_factory=list)
    """Global norm before clipping, for each optimizer step (empty without clipping by norm)."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    global_step: int = 0


def build_model() -> TinyModel:
    torch.manual_seed(1)
    return TinyModel()


def dataset(world_size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    size = NUM_MICRO_BATCHES * BATCH_SIZE * world_size
    return TensorDataset(torch.randn(size, 5, generator=generator), torch.randn(size, 3, generator=generator))


def rank_loader(world_size: int, batch_size: int = BATCH_SIZE) -> DataLoader[tuple[Tensor, ...]]:
    """This rank's share of the `dataset` for ``world_size``, in order: Lightning's own sampler would shuffle it."""
    data = dataset(world_size)
    if dist.is_initialized():
        sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, shuffle=False)
    else:  # the Trainer is to start the group
        sampler = DistributedSampler(data, world_size, int(os.environ["RANK"]), shuffle=False)
    return DataLoader(data, batch_size, sampler=sampler)


def build_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "fused_adamw":
        return torch.optim.AdamW(parameters, lr=0.01, fused=True)
    if name == "decoupled_adam":  # steps as AdamW
        return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.5, decoupled_weight_decay=True)
    if name == "sgd":  # shows a wrong gradient scale, which Adam hides
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.01)


class TinyModule(LightningModule):
    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__()
        self.model = build_model()
        self.case, self.outcome = case, outcome

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = functional.mse_loss(self.model(batch[0]).float(), batch[1].float())
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.outcome.losses.append(mean.item() / dist.get_world_size())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = functional.mse_loss(self.model(batch[0]).float(), batch[1].float())
        self.log("val_loss", loss, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        return self.model(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.case.optimizer, self.parameters())


class SkippingModule(TinyModule):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.case.skip_at and self.current_epoch == 0 else None


class _Recorder(Callback):
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        norm = cast("AccelFSDPStrategy", trainer.strategy).last_grad_norm
        if len(pl_module.outcome.grad_norms) < trainer.global_step and norm is not None:
            pl_module.outcome.grad_norms.append(norm.item())


def strategy_named(name: str) -> Any:
    """``fsdp1``, ``fsdp2`` (a unit for each block), or ``zero0`` to ``zero3``, with nothing else set."""
    number = int(name[-1])
    if name.startswith("zero"):
        return AccelDeepSpeedStrategy(hf_ds_config={"zero_optimization": {"stage": number}})
    units: dict[str, Any] = {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Block"],
    }
    return AccelFSDPStrategy(fsdp_version=number, **units)


def strategy_called(name: str) -> Any:
    """``ddp``, or as `strategy_named` with a suffix: ``_offload``, ``_orig_params`` (FSDP1), ``_fp16`` (ZeRO)."""
    if name.startswith("zero"):
        fp16 = {"fp16": {"enabled": True, "initial_scale_power": 6, "hysteresis": 1}} if name.endswith("fp16") else {}
        zero: dict[str, Any] = {"stage": int(name[4]), "reduce_bucket_size": 64}
        if name.endswith("offload"):
            zero["offload_optimizer"] = {"device": "cpu"}
        config = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, **fp16}
        return AccelDeepSpeedStrategy(hf_ds_config=config)
    if not name.startswith("fsdp"):
        return name
    options: dict[str, Any] = {"cpu_offload": name.endswith("offload")}
    if name.startswith("fsdp1"):
        options["use_orig_params"] = name.endswith("orig_params")
    return AccelFSDPStrategy(
        fsdp_version=int(name[4]),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type="full_state_dict",
        **options,
    )


def full_weights(strategy: Any) -> dict[str, Tensor]:
    """Return the weights of a `TinyModule` that trains, on every rank; all must call it."""
    if isinstance(strategy, AccelDeepSpeedStrategy):
        state = strategy.full_state_dict()
    else:
        state = strategy.broadcast(strategy.lightning_module_state_dict())  # that of FSDP is rank 0's
    return {name.removeprefix("model."): value.cpu().clone() for name, value in state.items()}


def quiet_trainer(strategy: Any, world_size: int, **more: Any) -> Trainer:
    """A Trainer for tests: CPU, nothing printed, nothing written unless asked for."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world_size,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(strategy=strategy, **{**settings, **more})


def train_sharded(case: Case, options: dict[str, Any], accelerator: str = "cpu") -> Outcome:
    """Train under the Trainer, inside one of several processes."""
    world_size, outcome = PartialState().num_processes, Outcome()
    plugin = GradientAccumulationPlugin(
        sync_with_dataloader=case.sync_with_dataloader, short_windows=case.short_windows
    )
    if plugin != GradientAccumulationPlugin():
        options = {**options, "gradient_accumulation": plugin}
    strategy = AccelFSDPStrategy(state_dict_type="full_state_dict", **options)
    callbacks: list[Callback] = [_Recorder()]
    if case.accumulate_later is not None:
        callbacks.append(GradientAccumulationScheduler({0: case.accumulate, 1: case.accumulate_later}))
    trainer = quiet_trainer(
        strategy,
        world_size,
        accelerator=accelerator,
        max_epochs=case.epochs,
        precision=case.precision,
        accumulate_grad_batches=1 if case.accumulate_later else case.accumulate,
        val_check_interval=case.validate_every,
        gradient_clip_val=case.clip_norm or case.clip_value,
        gradient_clip_algorithm="norm" if case.clip_norm else "value" if case.clip_value else None,
        callbacks=callbacks,
    )
    module = (TinyModule if case.skip_at is None else SkippingModule)(case, outcome)
    trainer.fit(module, rank_loader(world_size), rank_loader(world_size) if case.validate_every else None)
    weights = trainer.strategy.lightning_module_state_dict()
    outcome.weights = {name.removeprefix("model."): tensor.cpu().clone() for name, tensor in weights.items()}
    outcome.global_step = trainer.global_step
    return outcome


def train_plain(
    case: Case, world_size: int, change: Callable[[nn.Module], None] | None = None, model: nn.Module | None = None
) -> Outcome:
    """Train over the same global batches in a plain loop."""
    outcome, model = Outcome(), build_model() if model is None else copy.deepcopy(model)
    if change is not None:
        change(model)
    parameters = list(model.parameters())
    optimizer = build_optimizer(case.optimizer, parameters)
    inputs, targets = dataset(world_size).tensors
    global_size = BATCH_SIZE * world_size
    for window, num_steps in _windows(case):
        optimizer.zero_grad()
        for index in window:
            batch = slice(index * global_size, (index + 1) * global_size)
            loss = functional.mse_loss(model(inputs[batch]), targets[batch])
            (loss / (len(window) if case.short_windows == "mean" else num_steps)).backward()
            outcome.losses.append(loss.item())
        if not case.sync_with_dataloader and len(window) < num_steps:
            break  # of the last epoch: no other goes on with it
        if case.clip_norm:
            outcome.grad_norms.append(nn.utils.clip_grad_norm_(parameters, case.clip_norm).item())
        if case.clip_value:
            nn.utils.clip_grad_value_(parameters, case.clip_value)
        optimizer.step()
        outcome.global_step += 1
    outcome.weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return outcome


def _windows(case: Case) -> list[tuple[list[int], int]]:
    """Indices of the micro-batches of each window, and the number that a full one has."""
    windows: list[tuple[list[int], int]] = []
    open_window: list[int] = []
    for epoch in range(case.epochs):
        num_steps = case.accumulate_later if epoch and case.accumulate_later else case.accumulate
        num_batches = NUM_MICRO_BATCHES if epoch or case.skip_at is None else case.skip_at
        for index in range(num_batches):
            open_window.append(index)
            ends = index == NUM_MICRO_BATCHES - 1 and case.sync_with_dataloader
            if len(open_window) == num_steps or ends:
                windows.append((open_window, num_steps))
                open_window = []
    return [*windows, (open_window, num_steps)] if open_window else windows


def assert_same(found: Outcome, expected: Outcome, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Compare; fp32 sums in another order differ by some 1e-7 of the largest summand, hence ``atol``."""
    close: dict[str, Any] = {"rtol": rtol, "atol": atol}
    assert found.global_step == expected.global_step
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), **close)
    torch.testing.assert_close(torch.tensor(found.grad_norms), torch.tensor(expected.grad_norms), **close)
    _assert_same_weights(found.weights, expected.weights, close)


def _assert_same_weights(found: dict[str, Tensor], expected: dict[str, Tensor], close: dict[str, Any]) -> None:
    names: Sequence[str] = sorted(expected)
    assert sorted(found) == names
    for name in names:
        torch.testing.assert_close(
            found[name], expected[name], msg=f"{name}:\n{found[name]}\n{expected[name]}", **close
        )
