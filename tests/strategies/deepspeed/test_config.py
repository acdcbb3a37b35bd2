"""A DeepSpeed config under the Trainer: ``"auto"`` everywhere, dummies, mistakes, several models, construction."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from accelight.state import AcceleratorState, DistributedType, reset_state
from accelight.strategies import AccelDeepSpeedStrategy, DeepSpeedPlugin, DummyOptim, DummyScheduler
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.auto_configs import WARMUP_AND_DECAY
from tests.strategies.deepspeed.training import ds_config, trainer_for, whole_weights
from tests.strategies.oracle import Case, Outcome, TinyModule, build_model, dataset, quiet_trainer, rank_loader


def auto_config(stage: int) -> dict[str, Any]:
    """Hugging Face's documented config, with every value open that it has open."""
    return {
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
        },
        "scheduler": WARMUP_AND_DECAY,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }


class WithDummies(TinyModule):
    hidden_size = 8

    def __init__(self) -> None:
        super().__init__(Case(), Outcome())
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer: Any = DummyOptim(self.parameters(), lr=0.01, weight_decay=0.1)
        return {"optimizer": optimizer, "lr_scheduler": DummyScheduler(optimizer, warmup_num_steps=2)}

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def train_auto() -> list[tuple[dict[str, Any], list[float], list[float], str]]:
    found = []
    for stage in (2, 3):
        given = auto_config(stage)
        strategy = AccelDeepSpeedStrategy(hf_ds_config=given, is_train_batch_min=stage == 2)
        trainer = quiet_trainer(strategy, 2, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5)
        module = WithDummies()
        trainer.fit(module, rank_loader(2), rank_loader(2, batch_size=1))
        assert given == auto_config(stage), "what the user gave stays"
        config = trainer.strategy.deepspeed_config  # type: ignore[attr-defined]
        state = AcceleratorState()
        assert state.distributed_type == DistributedType.DEEPSPEED
        assert state.deepspeed_plugin is trainer.strategy.deepspeed_plugin  # type: ignore[attr-defined]
        found.append((config, module.rates, module.outcome.losses, state.mixed_precision))
        reset_state()
    return found


def test_a_config_with_auto_everywhere_trains_unchanged() -> None:
    for stage, (config, rates, losses, precision) in zip((2, 3), run_on_ranks(2, train_auto)[0], strict=True):
        assert "auto" not in str({**config, "overlap": None})
        assert config["train_micro_batch_size_per_gpu"] == stage - 1  # the smaller is the validation loader's
        assert config["gradient_accumulation_steps"] == 2
        assert config["train_batch_size"] == 4 * (stage - 1)
        assert config["gradient_clipping"] == 0.5
        assert config["optimizer"]["params"] == {
            "lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True
        }  # fmt: skip
        assert config["scheduler"]["params"] == {
            "warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 2, "total_num_steps": 8
        }  # fmt: skip
        assert config["zero_optimization"]["reduce_bucket_size"] == 64
        assert config["zero_optimization"].get("stage3_param_persistence_threshold", 80) == 80
        assert config["zero_optimization"]["stage"] == stage
        assert precision == "no"
        assert len(rates) == 8  # once for each optimizer step: the schedule does not run ahead
        assert max(rates) == rates[2] > rates[-1] > 0
        assert losses[-1] < losses[0]


# ---------------------------------------------------------------------- mistakes
class Returning(TinyModule):
    def __init__(self, make: Any) -> None:
        super().__init__(Case(), Outcome())
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _scheduled(parameters: Any, make: Any) -> Any:
    optimizer = _sgd(parameters)
    return [optimizer], [make(optimizer)]


def _custom_batches() -> Any:
    return DataLoader(dataset(1), batch_sampler=_Batches())


class _Batched(IterableDataset[Any]):
    """Makes its batches itself."""

    def __iter__(self) -> Any:
        return iter(rank_loader(1))


class _Batches:
    def __iter__(self) -> Any:
        return iter(BatchSampler(SequentialSampler(dataset(1)), 2, drop_last=False))

    def __len__(self) -> int:
        return 7


ADAM: dict[str, Any] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
WARMUP: dict[str, Any] = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
CONSTANT = torch.optim.lr_scheduler.ConstantLR
MISTAKES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], Any, str]] = {
    "both_optimizers": (_sgd, {"optimizer": ADAM}, {}, None, "Both the DeepSpeed config and configure_optimizers"),
    "dummy_for_nothing": (DummyOptim, {}, {}, None, "no 'optimizer' for it to represent"),
    "no_optimizer": (lambda _: None, {}, {}, None, "Neither the DeepSpeed config nor"),
    "both_schedules": (
        lambda p: _scheduled(p, lambda o: CONSTANT(o)), {"scheduler": WARMUP}, {}, None, "define a schedule",
    ),
    "schedule_for_nothing": (lambda p: _scheduled(p, DummyScheduler), {}, {}, None, "no 'scheduler' for it to"),
    "windows_differ": (_sgd, {"gradient_accumulation_steps": 3}, {"accumulate_grad_batches": 2}, None, "3 in the Deep"),
    "clipping_differs": (_sgd, {"gradient_clipping": 3.0}, {"gradient_clip_val": 2.0}, None, "3.0 in the Deep"),
    "clipping_by_value": (
        _sgd, {"gradient_clipping": 3.0}, {"gradient_clip_val": 2.0, "gradient_clip_algorithm": "value"}, None,
        "Trainer(gradient_clip_val)=2.0\n- Trainer(gradient_clip_algorithm='value'): DeepSpeed clips",
    ),
    "precisions_differ": (_sgd, {"fp16": {"enabled": True}}, {"precision": "bf16-mixed"}, None, "contradict"),
    "batch_size_unknown": (_sgd, {}, {}, _custom_batches, "set train_micro_batch_size_per_gpu"),
    "batches_of_an_iterable": (
        _sgd, {}, {}, lambda: DataLoader(_Batched(), batch_size=None), "set train_micro_batch_size_per_gpu",
    ),
    "several_optimizers": (lambda p: [_sgd([q]) for q in p][:2], {}, {}, None, "optimizer"),
    "asynchronous_io": (
        _sgd, {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}}, {}, None,
        "libaio",
    ),
}  # fmt: skip


def make_mistakes() -> dict[str, str]:
    errors = {}
    for name, (make, config, arguments, loader, _) in MISTAKES.items():
        if name == "asynchronous_io":
            from deepspeed.ops.op_builder import AsyncIOBuilder

            if AsyncIOBuilder().is_compatible(verbose=False):
                errors[name] = "libaio is installed here"
                continue
        try:
            trainer = trainer_for(
                Case(), {**ds_config(2), **config}, callbacks=[], use_distributed_sampler=False, **arguments
            )
            trainer.fit(Returning(make), loader() if loader else rank_loader(1))
            errors[name] = "no error"
        except Exception as error:  # noqa: BLE001 (every kind is compared below)
            errors[name] = f"{type(error).__name__}: {error}"
        reset_state()
    for config in ({"train_micro_batch_size_per_gpu": 2}, {"gradient_accumulation_steps": 2}):
        loader = _custom_batches() if "train_micro_batch_size_per_gpu" in config else rank_loader(1)
        trainer = trainer_for(
            Case(), {**ds_config(2), **config}, accumulate_grad_batches=1, max_epochs=1, use_distributed_sampler=False
        )
        trainer.fit(Returning(_sgd), loader)
        errors[str(config)] = str(trainer.global_step)
        reset_state()
    return errors


def test_mistakes_have_a_way_out() -> None:
    errors = run_on_ranks(1, make_mistakes, timeout_s=120)[0]
    wrong = {name: errors[name] for name, mistake in MISTAKES.items() if mistake[-1] not in errors[name]}
    assert not wrong
    assert errors["{'train_micro_batch_size_per_gpu': 2}"] == "7"  # the key that the error named
    assert errors["{'gradient_accumulation_steps': 2}"] == "4"  # the config's number counts (lightning#19891)


def schedule_adagrad(stage: int) -> tuple[float, float]:
    def make(parameters: Any) -> Any:
        optimizer = DummyOptim(parameters, lr=0.1)
        halving = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
        return [optimizer], [DummyScheduler(optimizer, lr_scheduler_callable=halving)]

    config = {**ds_config(stage), "optimizer": {"type": "Adagrad", "params": {"lr": 0.1}}}
    trainer = trainer_for(Case(), config, max_epochs=1)
    trainer.fit(Returning(make), rank_loader(1))
    [found] = trainer.lr_scheduler_configs[0].scheduler.get_last_lr()
    return trainer.optimizers[0].param_groups[0]["lr"], float(found)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_schedule_drives_adagrad_of_the_config(stage: int) -> None:
    [(used, scheduled)] = run_on_ranks(1, schedule_adagrad, stage)
    assert used == scheduled < 0.01


# ---------------------------------------------------------------------- several models, construction
class Student(TinyModule):
    """Learns from a teacher that is partitioned under a plugin of its own."""

    def setup(self, stage: str) -> None:
        torch.manual_seed(5)
        strategy: Any = self.trainer.strategy
        self.teacher = [strategy.prepare_model(torch.nn.Linear(5, 3), plugin="teacher")]
        self.critic = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1)
        self.critics = [strategy.prepare_model(self.critic, "critic", optimizer)]
        del self.critic

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher[0](batch[0])
        [critic] = self.critics
        critic.backward(critic(wanted).square().mean())
        critic.step()
        loss = functional.mse_loss(self.model(batch[0]), wanted)
        self.outcome.losses.append(loss.item())
        return loss


def distil() -> tuple[list[float], list[bool], int]:
    plugins = {
        "student": DeepSpeedPlugin(hf_ds_config=ds_config(2)),
        "teacher": DeepSpeedPlugin(hf_ds_config=ds_config(3)),
        "critic": DeepSpeedPlugin(hf_ds_config=ds_config(1)),
    }
    module = Student(Case(accumulate=2), Outcome())
    trainer = quiet_trainer(AccelDeepSpeedStrategy(plugins), 2, max_epochs=3, accumulate_grad_batches=2)
    trainer.fit(module, rank_loader(2))
    teacher = list(module.teacher[0].module.parameters())
    assert AcceleratorState().deepspeed_plugin is plugins["student"]
    return module.outcome.losses, [hasattr(p, "ds_tensor") for p in teacher], module.critics[0].global_steps


def test_several_models_have_engines_of_their_own() -> None:
    losses, partitioned, steps = run_on_ranks(2, distil)[0]
    assert losses[-1] < losses[0] / 2
    assert all(partitioned)
    assert steps == 21


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def of_another_model(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(nn.Linear(2, 2))


class Preparing(TinyModule):
    def __init__(self, model: nn.Module, make: Any) -> None:
        super().__init__(Case(), Outcome())
        self.prepared = model, make

    def setup(self, stage: str) -> None:
        model, make = self.prepared
        self.trainer.strategy.prepare_model(model, "other", make and make(model))  # type: ignore[attr-defined]


def refuse_to_prepare(model: nn.Module, make: Any, config: dict[str, Any], message: str) -> None:
    plugins = {"own": DeepSpeedPlugin(zero_stage=1), "other": DeepSpeedPlugin(hf_ds_config={**ds_config(1), **config})}
    with pytest.raises(ValueError, match=message):
        quiet_trainer(AccelDeepSpeedStrategy(plugins), 1).fit(Preparing(model, make), rank_loader(1))
    reset_state()


def refuse_all_to_prepare() -> None:
    in_config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    for model, make, config, message in (
        (nn.Linear(2, 2, dtype=torch.complex64), None, {}, "makes torch.complex64 parameters real"),
        (nn.Linear(2, 2), adafactor, {}, "Adafactor cannot train with ZeRO stage 1"),
        (nn.Linear(2, 2), of_another_model, {}, "2 parameters that do not belong to Linear"),
        (nn.Linear(2, 2), sgd, in_config, "Both the DeepSpeed config and"),
        (nn.Embedding(2, 2, sparse=True), sgd, {}, "has sparse gradients"),
    ):
        refuse_to_prepare(model, make, config, message)


def test_engines_by_hand_refuse_what_the_trainers_refuses() -> None:
    run_on_ranks(1, refuse_all_to_prepare)


class BuiltLater(TinyModule):
    """Made in ``configure_model``, with other weights on each rank: rank 0's count."""

    def __init__(self) -> None:
        super().__init__(Case(), Outcome())
        del self.model
        self.partitioned: list[bool] = []

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = build_model()
            self.partitioned = [hasattr(p, "ds_tensor") and p.numel() == 0 for p in self.model.parameters()]


class Pretrained(LightningModule):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder, self.partitioned = folder, [False]

    def configure_model(self) -> None:
        from transformers import GPT2LMHeadModel

        self.model = GPT2LMHeadModel.from_pretrained(self.folder)
        self.partitioned = [hasattr(parameter, "ds_tensor") for parameter in self.model.parameters()]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens = torch.arange(8)[None]
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.0)


def construct(folder: str) -> tuple[dict[str, list[bool]], dict[str, Tensor]]:
    found = {}
    for name, flag in (("partitioned", True), ("whole", False)):
        module = BuiltLater()
        strategy = AccelDeepSpeedStrategy(hf_ds_config=ds_config(3), zero3_init_flag=flag)
        quiet_trainer(strategy, 2, max_epochs=1).fit(module, rank_loader(2))
        found[name] = module.partitioned
        reset_state()
    config = {**ds_config(3), **{key: auto_config(3)[key] for key in ("bf16", "train_batch_size")}}
    pretrained = Pretrained(folder)
    quiet_trainer(AccelDeepSpeedStrategy(hf_ds_config=config), 2, max_epochs=1).fit(pretrained, rank_loader(2))
    found["pretrained"] = pretrained.partitioned
    return found, whole_weights(pretrained)


def test_modules_are_partitioned_while_they_are_built(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=2, n_head=2))
    model.save_pretrained(tmp_path)
    found, weights = run_on_ranks(2, construct, str(tmp_path), timeout_s=120)[0]
    assert all(found["partitioned"])
    assert not any(found["whole"])
    assert all(found["pretrained"])
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=0)  # the learning rate is 0
