"""DeepSpeed checkpoints as DeepSpeed saves them on gloo processes, with what it makes of them itself."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.strategies.deepspeed.training import fp16_on_cpu

ENV = {"DS_ACCELERATOR": "cpu"}
EXPECTED, LIVE, SCRIPT_OUTPUT, SHARDED_OUTPUT = "expected.pt", "live.pt", "script", "sharded"


@dataclass(frozen=True)
class Variant:
    """One way to train and save."""

    stage: int
    zero: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = True
    frozen: bool = True
    exclude_frozen: bool = False
    tiny: bool = False


_BF16 = {"bf16": {"enabled": True}}
_FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
_CPU = {"offload_optimizer": {"device": "cpu"}}
_NO_OP = {"zero_force_ds_cpu_optimizer": False}  # torch's AdamW: nothing has to be compiled

BASIC = {f"stage {stage}": Variant(stage) for stage in (1, 2, 3)}
BASIC |= {f"one element, stage {stage}": Variant(stage, tiny=True) for stage in (1, 2, 3)}
MORE = {
    "stage 0": Variant(0),
    "stage 0 in bf16": Variant(0, config=_BF16),
    "stage 1 in bf16": Variant(1, config=_BF16),
    "stage 1 in bf16, fp32 accumulation": Variant(
        1, config={**_BF16, "data_types": {"grad_accum_dtype": "fp32"}}, frozen=False
    ),
    "stage 2 in bf16": Variant(2, config=_BF16),
    "stage 0 in fp16": Variant(0, config=_FP16),
    "stage 2 in fp16": Variant(2, config=_FP16),
    "stage 3 in fp16": Variant(3, config=_FP16),
    "stage 2 untied": Variant(2, tied=False),
    "stage 3 untied, in bf16": Variant(3, config=_BF16, tied=False),
    "stage 2 aligned": Variant(2, {"parameter_alignment": True, "round_robin_gradients": True}),
    "stage 2 offloaded": Variant(2, _CPU, _NO_OP),
    "stage 3 offloaded": Variant(3, {**_CPU, "offload_param": {"device": "cpu"}}, _NO_OP),
    "stage 3 in small groups": Variant(3, {"sub_group_size": 40, "stage3_param_persistence_threshold": 0}),
    "stage 2 without frozen": Variant(2, exclude_frozen=True),
    "stage 3 without frozen": Variant(3, exclude_frozen=True),
}

VARIANTS = {f"{name}, 2 processes": variant for name, variant in {**BASIC, **MORE}.items()}
VARIANTS |= {f"stage {stage}, {world_size} processes": Variant(stage) for stage in (2, 3) for world_size in (1, 3)}
VARIANTS |= {f"one element, stage {stage}, 3 processes": Variant(stage, tiny=True) for stage in (2, 3)}


class Shift(nn.Module):
    """A float and an int buffer, as batch norm has; that itself fails in bf16 under stage 3."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.linspace(0, 1, width))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.get_buffer("mean").to(x.dtype)) * self.weight


class Net(nn.Module):
    """Uneven sizes, buffers of several dtypes, frozen layers, one element, no element, tied weights."""

    def __init__(self, tied: bool, frozen: bool, empty: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.norm = Shift(7)
        self.up = nn.Linear(7, 13)
        self.base = nn.Linear(13, 13).requires_grad_(not frozen)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.nothing = nn.Parameter(torch.empty(0, 3), requires_grad=False) if empty else None
        self.down = nn.Linear(13, 7)
        self.head = nn.Linear(7, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("table", torch.linspace(0, 1, 5))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.base(self.up(self.norm(self.embed(x))))) * self.scale)


class Tiny(nn.Module):
    """Fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def save_variants(folder: str, variants: Mapping[str, Variant]) -> dict[str, str]:
    """Save each variant in a folder of its name; returns what DeepSpeed's own conversion failed with, if it did."""
    failures = {}
    with deepspeed_quiet(), fp16_on_cpu():
        for name, variant in variants.items():
            error = save_variant(Path(folder, name), variant)
            if error is not None:
                failures[name] = error
    return failures


@contextlib.contextmanager
def deepspeed_quiet() -> Iterator[None]:
    """Import DeepSpeed without its remarks; its own group ends with ours."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.disable(logging.WARNING)
    import deepspeed
    from deepspeed.utils import groups

    before = {name: value for name, value in vars(groups).items() if name.startswith("_") and not name.startswith("__")}
    deepspeed.init_distributed("gloo", verbose=False)
    try:
        yield
    finally:
        vars(groups).update(before)
        deepspeed.comm.comm.cdb = None
        logging.disable(logging.NOTSET)


def train(variant: Variant) -> Any:
    """Return an engine after one step."""
    import deepspeed

    torch.manual_seed(0)
    no_empty = variant.stage == 3  # which fails on a parameter without elements
    model = Tiny() if variant.tiny else Net(variant.tied, variant.frozen, empty=not no_empty)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained[::2]}, {"params": trained[1::2], "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": variant.stage, "reduce_bucket_size": 1000, **variant.zero},  # not 2 GB
        **variant.config,
    }
    engine, *_ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=0),
        model=model,
        optimizer=torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01),
        config=config,
    )
    dtype = next(engine.module.parameters()).dtype
    x = torch.ones(2, 1, dtype=dtype) if variant.tiny else torch.arange(2) + 2 * dist.get_rank()
    engine.backward(engine(x).float().square().sum())
    engine.step()
    return engine


def save_variant(folder: Path, variant: Variant) -> str | None:
    """Train and save; rank 0 adds the live weights, and what DeepSpeed's own functions make of the checkpoint."""
    from deepspeed.utils.zero_to_fp32 import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
    )

    engine = train(variant)
    client_state = {"note": argparse.Namespace(anything=object), "epoch": 4}
    engine.save_checkpoint(str(folder), client_state=client_state, exclude_frozen_parameters=variant.exclude_frozen)
    live = _live_weights(engine, variant.stage)
    error = None
    if dist.get_rank() == 0:
        torch.save(live, folder / LIVE)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                torch.save(get_fp32_state_dict_from_zero_checkpoint(str(folder)), folder / EXPECTED)
            except Exception as failure:  # noqa: BLE001 - whatever it is, the test looks at it
                error = f"{type(failure).__name__}: {failure}"
            if error is None and not variant.tied:
                for output, size in ((SCRIPT_OUTPUT, None), (SHARDED_OUTPUT, 1000)):
                    convert_zero_checkpoint_to_fp32_state_dict(
                        str(folder), str(folder / output), max_shard_size=size, safe_serialization=True
                    )
    dist.barrier()
    engine.destroy()
    return error


def _live_weights(engine: Any, stage: int) -> dict[str, torch.Tensor]:
    import deepspeed

    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=stage == 3):
        return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}


def convert_to_universal(folder: str, target: str) -> None:
    """Convert a checkpoint with DeepSpeed's own program, in this process."""
    from deepspeed.checkpoint import ds_to_universal

    tag = (Path(folder) / "latest").read_text()
    args = ["--input_folder", str(Path(folder, tag)), "--output_folder", target, "--inject_missing_state"]
    sys.argv[1:] = [*args, "--num_extract_workers", "1", "--num_merge_workers", "1"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(ds_to_universal.parse_arguments())


def save_lightning(folder: str) -> dict[str, torch.Tensor]:
    """Train two steps under Lightning's own strategy, let onto the CPU, and save; returns the live weights."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
    from torch.utils.data import DataLoader, TensorDataset

    from tests.strategies.oracle import quiet_trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Net(tied=True, frozen=True, empty=False)

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch[0]).square().sum()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.01)

    class OnCPU(DeepSpeedStrategy):
        def setup_environment(self) -> None:
            DDPStrategy.setup_environment(self)  # not through the guard against CPUs

        def setup_distributed(self) -> None:
            self.set_world_ranks()  # the group is there; the rest looks at GPUs' indices

        def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
            import deepspeed

            args = argparse.Namespace(device_rank=0)  # on a CPU it would be None, which DeepSpeed compares with 0
            engine, optimizer, *_ = deepspeed.initialize(
                args=args, config=self.config, model=model, optimizer=optimizer, dist_init_required=False
            )
            return engine, optimizer

    with deepspeed_quiet():
        strategy = OnCPU(stage=3, zero_allow_untested_optimizer=True, logging_batch_size_per_gpu=2)
        trainer = quiet_trainer(strategy, dist.get_world_size(), max_epochs=1)
        torch.manual_seed(0)
        trainer.fit(Module(), DataLoader(TensorDataset(torch.arange(8)), batch_size=2))
        trainer.save_checkpoint(folder)
        weights = _live_weights(strategy.deepspeed_engine, 3)
        strategy.deepspeed_engine.destroy()
        return weights
