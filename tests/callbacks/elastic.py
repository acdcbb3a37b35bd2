"""A training whose samples are known one by one: under the Trainer on any number of processes, and in a plain loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from accelight.callbacks import ElasticTraining
from accelight.state import GradientAccumulationPlugin
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy, ParallelismConfig
from tests.strategies.oracle import Block, build_model, build_optimizer, quiet_trainer, strategy_named

GLOBAL_BATCH_SIZE, MAX_BATCH_SIZE = 12, 3
NUM_SAMPLES = 26
"""Of an epoch: its last global batch has two, fewer than there are processes."""
NUM_EPOCHS = 2
NUM_STEPS = 3
"""Of an epoch."""


class Samples(Dataset[tuple[Tensor, Tensor, int]]):
    """They tell which they are."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(num_samples, 5, generator=generator)
        self.targets = torch.randn(num_samples, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.targets[index], index


class Module(LightningModule):
    """Keeps the samples of each optimizer step that counts, of this process."""

    def __init__(self, optimizer: str = "sgd", frequency: int = 1, counts_items: bool = False) -> None:
        super().__init__()
        self.counts_items = counts_items
        self.model, self.optimizer, self.frequency = build_model(), optimizer, frequency
        self.used: dict[int, list[int]] = {}
        self.rates: dict[int, float] = {}

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Any:
        callback = next(one for one in self.trainer.callbacks if isinstance(one, ElasticTraining))  # type: ignore[attr-defined]
        assert callback._batches is not None
        if callback._batches.weight(batch_idx):
            self.used.setdefault(self.global_step, []).extend(batch[2].tolist())
        self.rates[self.global_step] = self.trainer.optimizers[0].param_groups[0]["lr"]
        loss = functional.mse_loss(self.model(batch[0]), batch[1])
        return {"loss": loss, "num_items": len(batch[0])} if self.counts_items else loss

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.optimizer, self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": self.frequency}]


@dataclass
class Run:
    """What a run did, of all processes."""

    used: dict[int, list[int]] = field(default_factory=dict)
    """Optimizer step to the samples that it used, sorted."""
    rates: dict[int, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    validated: list[int] = field(default_factory=list)
    """Optimizer steps after which validation ran."""
    global_step: int = 0
    epoch: int = 0
    resumed_from: str | None = None


class Validations(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.steps.append(trainer.global_step)


GROUPS = {"tp2": 2}
"""Engines whose processes share one copy of the model, and how many do."""


BY_ITEMS = {"fsdp2_items"}
"""Engines that average over samples by their numbers."""


def strategy(name: str) -> Any:
    if name in GROUPS:
        sizes = ParallelismConfig(tp_size=GROUPS[name])
        cut = {"model.blocks.*.linear": "colwise_rep"}
        return AccelFSDPStrategy(fsdp_version=2, auto_wrap_policy={Block}, parallelism_config=sizes, tp_plan=cut)
    if name == "auto" or name == "ddp":
        return name
    if name in BY_ITEMS:
        by_items = GradientAccumulationPlugin(average_over="items")
        return AccelFSDPStrategy(fsdp_version=2, auto_wrap_policy={Block}, gradient_accumulation=by_items)
    if name.startswith("zero"):
        config = {"zero_optimization": {"stage": int(name[-1])}}
        return AccelDeepSpeedStrategy(hf_ds_config=config, load_universal=True)
    return strategy_named(name)


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Samples(), **{"batch_size": 5, "shuffle": True, **options})


def train(
    engine: str,
    *,
    folder: Path | None = None,
    ckpt_path: str | None = None,
    callbacks: list[Callback] | None = None,
    data: Any = None,
    validation: Any = None,
    elastic: Mapping[str, Any] | None = None,
    frequency: int = 1,
    **settings: Any,
) -> Run:
    """Train on the processes that are there, from the beginning or a checkpoint on; save each step if told a folder."""
    size = dist.get_world_size()
    given = {"global_batch_size": GLOBAL_BATCH_SIZE, "max_batch_size": MAX_BATCH_SIZE, **(elastic or {})}
    callback, validations = ElasticTraining(**given), Validations()
    saving = [] if folder is None else [ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)]
    trainer = quiet_trainer(
        strategy(engine),
        size,
        callbacks=[callback, validations, *(callbacks or []), *saving],
        enable_checkpointing=bool(saving),
        **{"max_epochs": NUM_EPOCHS, "use_distributed_sampler": True, **settings},
    )
    module = Module(optimizer_for(engine), frequency, engine in BY_ITEMS)
    trainer.fit(module, loader() if data is None else data, validation, ckpt_path=ckpt_path)
    return Run(
        merged(module.used, GROUPS.get(engine, 1)),
        module.rates,
        whole_weights(trainer),
        validations.steps,
        trainer.global_step,
        trainer.current_epoch,
        callback.resumed_from,
    )


def merged(used: dict[int, list[int]], group_size: int = 1) -> dict[int, list[int]]:
    """Put together what all processes used, of those that must use the same what one of them did."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, used)
    assert all(one == everyone[rank // group_size * group_size] for rank, one in enumerate(everyone))
    everyone = everyone[::group_size]
    steps = sorted({step for one in everyone for step in one})
    return {step: sorted(sample for one in everyone for sample in one.get(step, [])) for step in steps}


def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    if trainer.strategy.__class__.__name__ == "AccelDeepSpeedStrategy":
        import deepspeed

        module: Any = trainer.lightning_module
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            state = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    else:
        state = trainer.strategy.lightning_module_state_dict()
    whole = {name: w.full_tensor() if isinstance(w, DTensor) else w.detach().clone() for name, w in state.items()}
    told = [{name.removeprefix("model."): tensor for name, tensor in whole.items()}]
    dist.broadcast_object_list(told)  # FSDP1 has whole weights on the first process alone
    return told[0]


def optimizer_for(engine: str) -> str:
    """SGD shows a wrong scale, which Adam hides; but DeepSpeed converts checkpoints of Adam alone."""
    return "adamw" if engine.startswith("zero") else "sgd"


def train_plain(engine: str, num_samples: int = NUM_SAMPLES, *, drop_last: bool = False, frequency: int = 1) -> Run:
    """The same in a plain loop over global batches."""
    samples, model, run = Samples(num_samples), build_model(), Run()
    optimizer = build_optimizer(optimizer_for(engine), model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for epoch in range(NUM_EPOCHS):
        order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(epoch))
        for indices in order.split(GLOBAL_BATCH_SIZE):
            if drop_last and len(indices) < GLOBAL_BATCH_SIZE:
                continue
            step = run.global_step
            run.used[step], run.rates[step] = sorted(indices.tolist()), optimizer.param_groups[0]["lr"]
            optimizer.zero_grad()
            functional.mse_loss(model(samples.inputs[indices]), samples.targets[indices]).backward()
            optimizer.step()
            run.global_step += 1
            # Lightning counts a schedule's batches within each epoch.
            if (step % (len(order) // GLOBAL_BATCH_SIZE + (not drop_last)) + 1) % frequency == 0:
                schedule.step()
    run.epoch, run.weights = NUM_EPOCHS, {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return run


def assert_goes_on(found: Run, expected: Run, first_step: int = 0) -> None:
    """Check that a run from a step on did what the whole one did; sums in another order differ by some 1e-7."""
    later = {step: samples for step, samples in expected.used.items() if step >= first_step}
    assert found.used == later
    assert found.rates == {step: rate for step, rate in expected.rates.items() if step >= first_step}
    assert (found.global_step, found.epoch) == (expected.global_step, expected.epoch)
    if later:
        assert sorted(found.weights) == sorted(expected.weights)
        for name, tensor in expected.weights.items():
            torch.testing.assert_close(found.weights[name], tensor, rtol=1e-5, atol=1e-6)
