"""The same sharded training under accelight, under Lightning's own strategies and by hand, on gloo processes."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy

BY_HAND, DDP_BY_HAND = "FSDP2 by hand", "DDP by hand"
LIGHTNING_DDP = "Lightning DDPStrategy"
LIGHTNING_FSDP1, LIGHTNING_FSDP2 = "Lightning FSDPStrategy", "Lightning ModelParallelStrategy"
OURS_FSDP1, OURS_FSDP2 = "accelight FSDP1", "accelight FSDP2"
OURS_ZERO = "accelight ZeRO-"
"""And the stage."""
ACCELERATE = "Accelerate's loop, FSDP2"
KEPT = ", kept gathered"
COPIES = ", two copies"
"""HSDP."""


@dataclass(frozen=True)
class Work:
    """What is trained."""

    num_layers: int
    width: int
    accumulate: int
    num_steps: int
    """Optimizer steps; the first two are not measured."""


@dataclass(frozen=True)
class Measured:
    """What one run on one process took."""

    seconds_per_step: list[float]
    calls: Counter[str]
    """Collective calls of all steps."""
    num_bytes: Counter[str]
    """Whole tensors gathered, reduced and scattered, and reduced alone, in all steps."""
    loss: float


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class _Module(LightningModule):
    def __init__(self, work: Work, shard_itself: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Layer(work.width) for _ in range(work.num_layers)))
        self.shard_itself = shard_itself
        self.ticks: list[float] = []
        """When each step began: a hook of ours between steps would see to it that parameters are sharded there."""

    def configure_model(self) -> None:
        if self.shard_itself and not hasattr(self.model, "unshard"):
            _shard(self.model, self.device_mesh["data_parallel"])  # type: ignore[index]

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.ticks.append(time.perf_counter())
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class FSDPStrategyOnCPU(FSDPStrategy):
    """Lightning refuses exactly its own class on CPU.

    It reduces gradients once a window, as ours does: Lightning's ``block_backward_sync`` asks for DDP by a protocol
    whose members (``module``, ``no_sync``) FSDP1's wrapper happens to have. `ModelParallelStrategy` reduces each time.
    """

    def _setup_model(self, model: nn.Module) -> nn.Module:
        self.kwargs["device_id"] = torch.device("cpu")
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, **{"use_orig_params": True, **self.kwargs})


class Collectives(TorchDispatchMode):
    """Counts calls and bytes of torch.distributed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.split(".")[0].strip("_")
            self.calls[name] += 1
            if "gather" in name or "reduce_scatter" in name or name == "allreduce":
                whole = tree_leaves(args[1] if "scatter" in name else args[0])  # gloo takes lists for FSDP1's gathers
                self.num_bytes[name] += sum(t.numel() * t.element_size() for t in whole if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


def run(kind: str, work: Work, count: bool) -> Measured:
    """Train inside one of several processes; counting slows it down."""
    collectives = Collectives()
    if count:
        with collectives:
            ticks, loss = _train(kind, work)
    else:
        ticks, loss = _train(kind, work)
    ends = ticks[work.accumulate - 1 :: work.accumulate]
    seconds = [later - earlier for earlier, later in itertools.pairwise(ends[1:])]
    return Measured(seconds, collectives.calls, collectives.num_bytes, loss)


def _train(kind: str, work: Work) -> tuple[list[float], float]:
    data = torch.randn(work.num_steps * work.accumulate * 2, work.width, generator=torch.Generator().manual_seed(1))
    return train(kind, work, DataLoader(TensorDataset(data), 2))


def train(
    kind: str,
    work: Work,
    loader: DataLoader[Any],
    callbacks: Sequence[Callback] = (),
    max_norm: float | None = None,
) -> tuple[list[float], float]:
    """Train on every batch of a loader, and return when each began or ended, and the last loss.

    Callbacks and clipping are for Trainers only.
    """
    if kind in (BY_HAND, DDP_BY_HAND):
        return _train_by_hand(kind, work, loader)
    if kind == ACCELERATE:
        return _train_with_accelerate(work, loader)
    world_size = dist.get_world_size()
    module = _Module(work, kind == LIGHTNING_FSDP2)
    trainer = Trainer(
        strategy=_strategy(kind, world_size), accelerator="cpu", devices=world_size, max_epochs=1, logger=False,
        accumulate_grad_batches=work.accumulate, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, callbacks=list(callbacks),
        gradient_clip_val=max_norm,
    )  # fmt: skip
    trainer.fit(module, loader)
    return module.ticks, float(trainer.callback_metrics.get("loss", 0.0))


def _strategy(kind: str, world_size: int) -> Any:
    if kind == LIGHTNING_FSDP1:
        return FSDPStrategyOnCPU(auto_wrap_policy=ModuleWrapPolicy({Layer}), process_group_backend="gloo")
    if kind == LIGHTNING_FSDP2:
        return ModelParallelStrategy(world_size, 1, process_group_backend="gloo")
    if kind == LIGHTNING_DDP:
        return DDPStrategy(process_group_backend="gloo")
    if kind.startswith(OURS_ZERO):
        return AccelDeepSpeedStrategy(zero_stage=int(kind.removeprefix(OURS_ZERO)))
    version = 1 if kind.startswith(OURS_FSDP1) else 2
    hybrid = kind.endswith(COPIES)
    return AccelFSDPStrategy(
        fsdp_version=version,
        sharding_strategy="HYBRID_SHARD" if hybrid and version == 1 else None,
        device_mesh=(2, world_size // 2) if hybrid else None,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Layer"],
        reshard_during_accumulation=not kind.endswith(KEPT),
    )


def _shard(model: nn.Sequential, mesh: Any) -> None:
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _train_by_hand(kind: str, work: Work, loader: DataLoader[Any]) -> tuple[list[float], float]:
    model: Any = _Module(work, False).model
    if kind == DDP_BY_HAND:
        model = DistributedDataParallel(model)
    else:
        _shard(model, dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer, ticks, loss = torch.optim.SGD(model.parameters(), lr=0.01), [], torch.zeros(())
    for index, [batch] in enumerate(loader):
        last = (index + 1) % work.accumulate == 0
        if kind == DDP_BY_HAND:
            model.require_backward_grad_sync = last
        else:
            model.set_requires_gradient_sync(last)
        loss = model(batch).square().mean() / work.accumulate
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        ticks.append(time.perf_counter())
    return ticks, loss.item()


def _train_with_accelerate(work: Work, loader: DataLoader[Any]) -> tuple[list[float], float]:
    """Accelerate takes FSDP for DDP on the CPU unless its state is told otherwise."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType
    from accelerate.utils import FullyShardedDataParallelPlugin as Plugin

    AcceleratorState._reset_state(True)
    plugin: Any = Plugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Layer"],
        cpu_ram_efficient_loading=False,
    )  # fmt: skip
    accelerator: Any = Accelerator(cpu=True, gradient_accumulation_steps=work.accumulate)
    accelerator.state.__dict__.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    model: Any = _Module(work, False).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    ticks, loss = [], torch.zeros(())
    for [batch] in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        ticks.append(time.perf_counter())
    AcceleratorState._reset_state(True)
    return ticks, loss.item()
