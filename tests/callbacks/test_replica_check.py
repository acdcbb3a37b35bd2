"""Copies that differ in a bit are found at the next check, and copies that are equal raise no alarm."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import threading
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accelight.callbacks import ReplicaCheck, ShardedEMA, StepGuard, replica_check
from accelight.callbacks.replica_check import Difference, _Snapshot
from accelight.state import reset_state
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy, ParallelismConfig
from accelight.strategies.sharded_tensors.shards import FlatShard
from accelight.strategies.sharded_tensors.user_code import library_code
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import fp16_on_cpu
from tests.strategies.fsdp import cut_model
from tests.strategies.oracle import (
    Case,
    Outcome,
    TinyModule,
    assert_same,
    full_weights,
    quiet_trainer,
    rank_loader,
    train_plain,
)

SIZES = {"fsdp1_hybrid": 4, "fsdp1_hybrid_flat": 4, "fsdp2_hsdp": 4}
STRATEGIES = [
    *("ddp", "zero0", "zero1", "zero2", "zero3", "zero0_bf16", "zero0_fp16", "zero1_bf16", "zero2_fp16"),
    *("fsdp1", "fsdp1_flat", "fsdp1_whole", "fsdp1_hybrid", "fsdp1_hybrid_flat", "fsdp2", "fsdp2_hsdp"),
]


def strategy_called(name: str) -> Any:
    if name.startswith("zero"):
        half: dict[str, Any] = {}
        if name.endswith("fp16"):
            half = {"fp16": {"enabled": True, "initial_scale_power": 6, "hysteresis": 1}}
        elif name.endswith("bf16"):
            half = {"bf16": {"enabled": True}}
        zero = {"zero_optimization": {"stage": int(name[4])}, "zero_force_ds_cpu_optimizer": False}
        return AccelDeepSpeedStrategy(hf_ds_config={**zero, **half})
    if not name.startswith("fsdp"):
        return name
    options: dict[str, Any] = {"fsdp_version": int(name[4])}
    if "hybrid" in name or "hsdp" in name:
        options["device_mesh"] = (2, 2)
    if name.startswith("fsdp1"):
        kind = "HYBRID_SHARD" if "hybrid" in name else "NO_SHARD" if "whole" in name else "FULL_SHARD"
        options.update(sharding_strategy=kind, use_orig_params="flat" not in name)
    return AccelFSDPStrategy(
        auto_wrap_policy={nn.Linear},
        state_dict_type="full_state_dict",
        **options,
    )


# ---------------------------------------------------------------------- no alarm
class Collecting(TinyModule):
    def on_train_end(self) -> None:
        self.outcome.weights = full_weights(self.trainer.strategy)
        self.outcome.global_step = self.trainer.global_step


def train_as_plain(name: str, case: Case) -> Outcome:
    size, outcome = dist.get_world_size(), Outcome()
    check = ReplicaCheck(every_n_steps=1)
    trainer = quiet_trainer(
        strategy_called(name),
        size,
        max_epochs=case.epochs,
        accumulate_grad_batches=case.accumulate,
        val_check_interval=3,
        callbacks=[check, ShardedEMA(decay=0.5), StepGuard(max_norm=1e9, spike_factor=None)],
    )
    trainer.fit(Collecting(case, outcome), rank_loader(size), rank_loader(size))
    assert check.num_differences == 0
    assert not [one.name for one in threading.enumerate() if one.name == "accelight-replica-check"]
    assert "save_checkpoint" not in vars(trainer.strategy)
    reset_state()
    return outcome


@pytest.mark.core("plain-ddp")
@pytest.mark.parametrize("name", [name for name in STRATEGIES if not name.endswith("16")])
@pytest.mark.parametrize("case", [Case(accumulate=3), Case(optimizer="adamw", epochs=3)], ids=["plain", "adamw"])
def test_training_is_that_of_a_plain_loop(name: str, case: Case) -> None:
    size = SIZES.get(name, 2)
    expected = train_plain(case, size)
    for found in run_on_ranks(size, train_as_plain, name, case, timeout_s=100):
        assert_same(found, expected, rtol=1e-4 if case.optimizer == "adamw" else 1e-5, atol=1e-5)


class Rich(LightningModule):
    """With statistics that each rank computes for itself, a table that nobody changes, dropout and a schedule."""

    def __init__(self, optimizer: str = "sgd", norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.model = nn.Sequential(nn.Linear(5, 8), norm(8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.register_buffer("table", torch.randn(7, 3), persistent=False)
        self.register_buffer("seen", torch.zeros(()))
        self.optimizer = optimizer

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        table: Any = self.table
        seen: Any = self.seen
        seen.data = seen + batch[0].sum()  # leaves no trace in the buffer's version
        [weight, *_] = self.model.parameters()
        found = self.model(batch[0].to(weight.dtype))
        return nn.functional.mse_loss(found.float() * table.float().mean(), batch[1].float())

    def configure_optimizers(self) -> Any:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.optimizer == "adamw":
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def resume(name: str, folder: str) -> list[int]:
    """Train, and go on from a checkpoint with the same callback."""
    size, path = dist.get_world_size(), f"{folder}/{name}.ckpt"
    check, steps = ReplicaCheck(every_n_steps=2), []
    saves = ModelCheckpoint(dirpath=f"{folder}/{name}", every_n_train_steps=3, save_top_k=-1, save_weights_only=True)
    for epochs, ckpt_path in ((2, None), (4, path)):
        plugins = [MixedPrecision("16-mixed", "cpu")] if name == "ddp" else None
        trainer = quiet_trainer(
            strategy_called(name),
            size,
            max_epochs=epochs,
            callbacks=[check, saves],
            plugins=plugins,
            enable_checkpointing=True,
        )
        module = Rich("adamw", nn.LayerNorm if name.endswith("16") else nn.BatchNorm1d)
        with fp16_on_cpu() if name.endswith("fp16") else nullcontext():
            trainer.fit(module, rank_loader(size), ckpt_path=ckpt_path, weights_only=False if ckpt_path else None)
        trainer.save_checkpoint(path)
        steps.append(trainer.global_step)
        reset_state()
    assert check.differences == []
    return [*steps, check.num_differences]


@pytest.mark.core("ddp")
@pytest.mark.parametrize("name", STRATEGIES)
def test_statistics_dropout_and_resumes(name: str, tmp_path: Path) -> None:
    for found in run_on_ranks(SIZES.get(name, 2), resume, name, str(tmp_path), timeout_s=100):
        assert found == [14, 28, 0]


class Words(nn.Module):
    """Gives the loss of each position."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.dropout, self.head = nn.Embedding(11, 8), nn.Dropout(0.1), nn.Linear(8, 11)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.dropout(self.tokens(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(tokens.shape)


class Sequences(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Words()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens = (batch[0] * 10).long().abs() % 11
        return self.net(tokens[:, :4], tokens[:, 1:]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class DrawsAlone(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1:
            torch.rand(())


def train_cut(what: str, draws_alone: bool) -> str:
    module: LightningModule = cut_model.Module(dropout=0.1) if what == "tp_size" else Sequences()
    options: dict[str, Any] = {"sequence_modules": ["net"]}
    if what == "tp_size":
        plan = {"net.blocks.*.up": "colwise", "net.blocks.*.down": "rowwise", "net.head": "colwise_rep"}
        options = {"tp_plan": plan, "auto_wrap_policy": {cut_model.Block}}
    size = dist.get_world_size()
    config = ParallelismConfig(**{what: 2, "dp_replicate_size": size // 2})
    strategy = AccelFSDPStrategy(fsdp_version=2, parallelism_config=config, **options)
    callbacks = [*([DrawsAlone()] if draws_alone else []), ReplicaCheck(1)]
    trainer = quiet_trainer(strategy, size, max_epochs=1, callbacks=callbacks)
    try:
        trainer.fit(module, cut_model.loader(size // 2))
    except RuntimeError as error:
        return str(error)
    assert trainer.global_step == cut_model.BATCHES
    return ""


@pytest.mark.core("2-tp_size-False")
@pytest.mark.parametrize("draws_alone", [False, True])
@pytest.mark.parametrize("what", ["tp_size", "sp_size"])
@pytest.mark.parametrize("size", [2, 4])
def test_layers_and_sequences_cut_over_processes(size: int, what: str, draws_alone: bool) -> None:
    for message in run_on_ranks(size, train_cut, what, draws_alone, timeout_s=100):
        if not draws_alone:
            assert message == ""
        else:
            assert "after step 3 not all copies are equal of 1 values" in message
            assert "  random state of cpu: process 0 (" in message
            assert " against process 1 (" in message


# ---------------------------------------------------------------------- flipped bits
def flip(tensor: Tensor, bit: int) -> None:
    """Flip a bit in memory, as hardware does: torch does not see it."""
    size = tensor.element_size()
    element, bit = divmod(bit % (tensor.numel() * size * 8), size * 8)
    offset, left = 0, element
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        left, index = divmod(left, length)
        offset += index * stride
    byte = ctypes.c_uint8.from_address(tensor.data_ptr() + offset * size + bit // 8)
    byte.value ^= 1 << bit % 8


def local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, FlatShard):
        return tensor.held
    with library_code():  # a hook sees states of FSDP1 as shards, which have no memory of their own
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def parts_of(trainer: Trainer, module: nn.Module) -> dict[str, Tensor]:
    """What this rank has of each parameter."""
    strategy: Any = trainer.strategy
    if isinstance(strategy, AccelFSDPStrategy):
        return {name: local(shard) for name, (shard, _) in strategy.parameter_shards().items()}
    return {name: local(parameter) for name, parameter in module.named_parameters()}


def flip_float(value: float, bit: int) -> float:
    [word] = struct.unpack("<q", struct.pack("<d", value))
    [flipped] = struct.unpack("<d", struct.pack("<q", word ^ 1 << bit % 63))
    return float(flipped)


class Flips(Callback):
    """Flips one bit on one rank before each check, and flips it back afterwards; notes what the check says of it."""

    def __init__(self, check: ReplicaCheck, kinds: list[str]) -> None:
        self.check, self.kinds = check, kinds
        self.generator = random.Random(7)
        self.trials: list[tuple[int, str, str]] = []
        """Rank, kind and name of each."""
        self.found: list[list[Difference]] = []
        self.undo: Any = None

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if self.undo is not None:
            self.undo()
            self.undo = None

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step < 2:
            return  # from then on there are states, and buffers that have not changed
        rank, kind = self.generator.randrange(trainer.world_size), self.generator.choice(self.kinds)
        bit, index = self.generator.randrange(2**40), self.generator.randrange(2**20)
        name, undo = self.choose(trainer, module, kind, index, bit, acts=rank == trainer.global_rank)
        if rank == trainer.global_rank:
            self.undo = undo
        self.trials.append((rank, kind, name))

    def choose(self, trainer: Trainer, module: Any, kind: str, index: int, bit: int, *, acts: bool) -> tuple[str, Any]:
        optimizer = trainer.optimizers[0]
        if kind == "lr":
            group = optimizer.param_groups[0]
            before = group["lr"]
            if acts:
                group["lr"] = flip_float(before, bit)
            return "lr of parameter group 0", lambda: group.update(lr=before)
        if kind == "schedule":
            schedule: Any = trainer.lr_scheduler_configs[0].scheduler
            count = schedule.last_epoch
            if acts:
                schedule.last_epoch ^= 1 << bit % 31
            return "last_epoch of scheduler 0", lambda: setattr(schedule, "last_epoch", count)
        if kind == "buffer":
            name, tensor = "buffer table", module.table
        else:
            parameters = list(module.named_parameters())
            full_name, parameter = parameters[index % len(parameters)]
            name = full_name.replace("_fsdp_wrapped_module.", "")
            with library_code():  # ZeRO's states are of no parameter of the module, which is an error in a hook
                state = optimizer.state.get(parameter, {})
            tensor = parts_of(trainer, module)[name] if kind == "parameter" else state.get(kind)
            name = f"parameter {name}" if kind == "parameter" else f"{kind} of {name}"
        if tensor is None or local(tensor).numel() == 0:
            return "", None
        held = local(tensor)
        if acts:
            flip(held, bit)
        return name, lambda: flip(held, bit)


class Notes(Callback):
    """Comes after the check, whose verdict is on the step before."""

    def __init__(self, flips: Flips) -> None:
        self.flips = flips

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if len(self.flips.trials) > 1:
            self.flips.found.append(list(self.flips.check.differences))

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self.flips.found.append(list(self.flips.check.differences))


def flip_bits(name: str, kinds: list[str], num_trials: int) -> Any:
    size = dist.get_world_size()
    check = ReplicaCheck(every_n_steps=1, on_difference="warn")
    flips = Flips(check, kinds)
    callbacks = [flips, check, Notes(flips)]
    trainer = quiet_trainer(strategy_called(name), size, max_steps=num_trials + 1, max_epochs=-1, callbacks=callbacks)
    module = Rich("adamw" if "exp_avg" in kinds else "sgd")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, rank_loader(size))
    messages = [str(one.message) for one in caught if str(one.message).startswith("ReplicaCheck")]
    logged = float(trainer.callback_metrics["replica_check/differences"])
    return flips.trials, flips.found, messages, logged, check.num_differences


STATES = {
    "sgd": ["parameter", "momentum_buffer", "buffer", "lr", "schedule"],
    "adamw": ["parameter", "exp_avg", "exp_avg_sq", "step", "buffer", "lr"],
}


@pytest.mark.core("ddp-sgd")
@pytest.mark.parametrize(
    ("name", "size", "kinds", "num_trials"),
    [
        pytest.param("ddp", 3, STATES["sgd"], 100, id="ddp-sgd"),
        pytest.param("ddp", 3, STATES["adamw"], 100, id="ddp-adamw"),
        pytest.param("fsdp1_whole", 3, STATES["adamw"], 60, id="fsdp1_whole-adamw"),
        pytest.param("fsdp1_hybrid", 4, STATES["sgd"], 60, id="fsdp1_hybrid-sgd"),
        pytest.param("fsdp2_hsdp", 4, STATES["sgd"], 60, id="fsdp2_hsdp-sgd"),
        pytest.param("fsdp2_hsdp", 4, STATES["adamw"], 60, id="fsdp2_hsdp-adamw"),
        pytest.param("zero0", 3, STATES["adamw"], 60, id="zero0-adamw"),
        pytest.param("zero2", 3, ["parameter", "buffer", "lr", "schedule"], 60, id="zero2-sgd"),
        pytest.param("zero3", 2, ["buffer", "lr", "schedule"], 20, id="zero3-sgd"),
    ],
)
def test_each_flipped_bit_is_found_and_named(name: str, size: int, kinds: list[str], num_trials: int) -> None:
    copies = size if size != 4 else 2
    everyone = run_on_ranks(size, flip_bits, name, kinds, num_trials, timeout_s=200)
    found = everyone[0][1]
    for index, (rank, kind, _) in enumerate(everyone[0][0]):
        named = everyone[rank][0][index][2]
        if not named:  # that rank has nothing of it
            continue
        assert len(found[index]) == 1, (kind, named, rank)
        [difference] = found[index]
        assert difference.name == named
        num_alike = size if kind in ("buffer", "lr", "schedule", "step") else copies
        assert sum(map(len, difference.groups)) == num_alike
        if num_alike > 2 or kind == "buffer":
            assert difference.wrong == (rank,)
        else:
            assert difference.right is None
            assert rank in difference.wrong
    for _, others, messages, logged, num_differences in everyone:
        assert others == found
        assert len(found) == num_trials
        assert num_differences - logged <= 2  # the last step's is found when training has ended, and again by its check
        assert len(messages) in (0, sum(map(bool, found)), sum(map(bool, found)) + 1)
    assert everyone[0][2]
    assert not everyone[1][2]


# ---------------------------------------------------------------------- errors
class FlipsOnce(Callback):
    def __init__(self, step: int, save_to: str = "", weights_only: bool = False) -> None:
        self.step, self.save_to, self.weights_only = step, save_to, weights_only

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self.step:
            return
        if trainer.global_rank == 1:
            flip(parts_of(trainer, module)["model.3.weight"], 5)
        if self.save_to:
            trainer.save_checkpoint(self.save_to, weights_only=self.weights_only)


def fail(name: str, every: int, folder: str) -> tuple[list[str], list[bool]]:
    """Let fits of one callback fail in several ways, and one succeed."""
    size, check, messages, exist = dist.get_world_size(), ReplicaCheck(every), [], []
    path = f"{folder}/saved.ckpt"
    for flips in (FlipsOnce(4), FlipsOnce(4, path), FlipsOnce(4, path, True), FlipsOnce(99)):
        callbacks = [flips, check, OnExceptionCheckpoint(folder, "saved")]
        options: dict[str, Any] = {"callbacks": callbacks, "enable_checkpointing": True}
        trainer = quiet_trainer(strategy_called(name), size, max_epochs=2, **options)
        try:
            trainer.fit(Rich(), rank_loader(size))
        except RuntimeError as error:
            messages.append(f"{trainer.global_step}: {error}")
        dist.barrier()
        exist.append(os.path.exists(path))
        assert not [one.name for one in threading.enumerate() if one.name == "accelight-replica-check"]
        reset_state()
    return messages, exist


@pytest.mark.core("ddp")
@pytest.mark.parametrize("name", ["ddp", "fsdp1_hybrid", "fsdp2_hsdp", "zero1"])
def test_all_processes_raise_and_nothing_is_saved(name: str, tmp_path: Path) -> None:
    host = os.uname().nodename
    for messages, exist in run_on_ranks(SIZES.get(name, 3), fail, name, 3, str(tmp_path), timeout_s=100):
        assert exist == [False] * 4
        first = messages[0]
        if name != "zero1":  # whose step gathers the weights anew
            assert first.startswith("9: ReplicaCheck: after step 6 not all copies are equal of ")
            assert "  parameter model.3.weight: process" in first
            assert "one of step 3 or before has equal copies" in first
            del messages[0]
        assert len(messages) == 2
        for save in messages:
            assert save.startswith("4: ReplicaCheck: after step 4 not all copies are equal of 1 values that must be.\n")
            if name in ("ddp", "zero1"):
                assert "  parameter model.3.weight: processes 0, 2 against process 1\n" in save
                assert (
                    f"Wrong values are on process 1 on {host}, and the copies of the others could repair them.\n"
                    in save
                )
            else:
                assert "  parameter model.3.weight: process 1 against process 3\n" in save
                assert "it is unknown which copies are right" in save


class TwoOptimizers(Rich):
    """Steps twice in each batch, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self.model(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        first, last = self.model[0].parameters(), self.model[3].parameters()
        return [torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.AdamW(last, lr=0.1)]


class FlipsMomentum(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 10 and trainer.global_rank == 0:
            flip(trainer.optimizers[1].state[module.model[3].bias]["exp_avg"], 9)
            trainer.optimizers[0].param_groups[0]["momentum"] = 0.8


def optimize_manually() -> str:
    check = ReplicaCheck(every_n_steps=3)
    trainer = quiet_trainer("ddp", 3, max_epochs=2, callbacks=[FlipsMomentum(), check])
    with pytest.raises(RuntimeError) as raised:
        trainer.fit(TwoOptimizers(), rank_loader(3))
    return f"{trainer.global_step}: {raised.value}"


def test_several_optimizers_in_manual_optimization() -> None:
    for message in run_on_ranks(3, optimize_manually):
        assert message.startswith("12: ReplicaCheck: after step 10 not all copies are equal of 2 values ")
        assert "exp_avg of model.3.bias of optimizer 1: processes 1, 2 against process 0\n" in message
        found = "momentum of parameter group 0 of optimizer 0: processes 1, 2 (0.9) against process 0 (0.8)\n"
        assert found in message


class SharesNothing(ReplicaCheck):
    """Does not compare on rank 1."""

    def _begin_check(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.global_rank != 1 or trainer.global_step < 2:
            super()._begin_check(trainer, module)


def lose_a_rank() -> str:
    trainer = quiet_trainer("ddp", 3, max_epochs=2, callbacks=[SharesNothing(every_n_steps=2)])
    with pytest.raises(RuntimeError) as raised:
        trainer.fit(Rich(), rank_loader(3))
    assert not [one.name for one in threading.enumerate() if one.name == "accelight-replica-check"]
    return str(raised.value)


@pytest.mark.exhaustive
def test_a_missing_process_is_named() -> None:
    first, _, third = run_on_ranks(3, lose_a_rank, group_timeout_s=3)
    for message in (first, third):
        assert message.startswith("The comparison of copies by ReplicaCheck could not end: ")
        assert "process 1 did not finish in 3 s." in message


class Leaves(Callback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 4 and trainer.global_rank == self.rank:
            raise KeyError(self.rank)


def leave_apart() -> list[str]:
    """Let one process leave a fit before a check, and the other while its thread waits for it; then fit again."""
    check, messages = ReplicaCheck(every_n_steps=1), []
    for callbacks in ([Leaves(1), check, Leaves(0)], [check]):
        trainer = quiet_trainer("ddp", 2, max_steps=6, callbacks=callbacks)
        try:
            trainer.fit(Rich(), rank_loader(2))
        except KeyError as error:
            messages.append(str(error))
        assert not [one.name for one in threading.enumerate() if one.name == "accelight-replica-check"]
    return [*messages, f"{trainer.global_step} {check.num_differences}"]


def test_a_fit_that_one_process_leaves_and_another_one() -> None:
    assert run_on_ranks(2, leave_apart) == [["0", "6 0"], ["1", "6 0"]]


def counting(count: Counter[str], name: str, function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        count[name] += 1
        return function(*args, **kwargs)

    return call


def count_collectives(name: str) -> tuple[dict[str, int], dict[str, int]]:
    names = ["all_reduce", "all_gather_object", "broadcast_object_list", "broadcast", "barrier", "all_gather"]
    names += ["all_gather_into_tensor", "reduce_scatter_tensor", "gather_object", "scatter_object_list", "send", "recv"]
    counts = []
    for callbacks in ([], [ReplicaCheck(every_n_steps=2)], []):  # a first fit makes groups
        count = Counter[str]()
        with pytest.MonkeyPatch.context() as patch:
            for each in names:
                original = getattr(dist, each)

                patch.setattr(dist, each, counting(count, each, original))
            trainer = quiet_trainer(strategy_called(name), 2, max_epochs=1, callbacks=callbacks)
            trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
        counts.append(dict(count))
        reset_state()
    return counts[1], counts[2]


@pytest.mark.core("ddp")
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero2"])
def test_no_collective_is_added(name: str) -> None:
    for found, expected in run_on_ranks(2, count_collectives, name):
        assert found == expected
        assert expected["all_reduce"] > 0


# ---------------------------------------------------------------------- fingerprints
def fingerprint(tensor: Tensor) -> Any:
    snapshot = _Snapshot()
    snapshot.add("it", tensor, None)
    snapshot.launch()
    snapshot.finish()
    return snapshot.values[None]["it"]


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
DTYPES += [torch.int64, torch.int32, torch.uint8, torch.bool]


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (4, 16, 3)], ids=str)
def test_every_bit_counts(shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        generator = torch.Generator().manual_seed(3)
        size = torch.empty(shape, dtype=dtype).nbytes
        content = torch.randint(0, 2, (size,), generator=generator, dtype=torch.uint8)
        tensor = content.view(dtype).view(shape)
        expected = fingerprint(tensor)
        for bit in range(size * 8) if size < 40 else random.Random(5).sample(range(size * 8), 100):
            flip(tensor, bit)
            assert fingerprint(tensor) != expected
            flip(tensor, bit)
        assert fingerprint(tensor) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_places_in_memory_do_not_count(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 10, 3, 5).to(dtype)
    expected = fingerprint(tensor)
    behind = torch.cat([torch.zeros(1, dtype=dtype), tensor.flatten()])[1:].view(tensor.shape)
    assert behind.storage_offset() == 1
    for other in (behind, tensor.to(memory_format=torch.channels_last), nn.Parameter(tensor)):
        assert fingerprint(other) == expected
    assert fingerprint(tensor.flip(0)) != expected  # rows that changed places


def test_tensors_of_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_check, "_PIECE_BYTES", 256)
    tensor = torch.randn(333)
    expected = fingerprint(tensor)
    assert len(expected) == 6
    for bit in random.Random(6).sample(range(333 * 32), 300):
        flip(tensor, bit)
        assert fingerprint(tensor) != expected
        flip(tensor, bit)


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be an int >= 1, got 0"),
        ({"every_n_steps": True}, "every_n_steps must be an int >= 1, got True"),
        ({"on_difference": "stop"}, "on_difference must be 'raise' or 'warn', got 'stop'"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ReplicaCheck(**options)


def test_other_strategies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet_trainer("auto", 1)
    monkeypatch.setattr(Trainer, "strategy", FSDPStrategy())
    with pytest.raises(ValueError, match="does not know which copies FSDPStrategy keeps equal"):
        ReplicaCheck().setup(trainer, Rich(), "fit")


def alone(name: str) -> list[str]:
    check = ReplicaCheck(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(strategy_called(name), 1, max_epochs=1, callbacks=[check])
        trainer.fit(TinyModule(Case(), Outcome()), rank_loader(1))
        trainer.validate(TinyModule(Case(), Outcome()), rank_loader(1))
    return [str(one.message) for one in caught if "ReplicaCheck" in str(one.message)]


@pytest.mark.core("auto")
@pytest.mark.parametrize("name", ["auto", "fsdp2"])
def test_one_process_is_warned_once(name: str) -> None:
    assert run_on_ranks(1, alone, name) == [["ReplicaCheck has nothing to compare on one process, and does nothing."]]
