"""Every ``"auto"`` of a DeepSpeed config: what fills it, what contradicts it, and what is said when nothing does."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelight.strategies.deepspeed import DeepSpeedPlugin, DummyOptim, DummyScheduler, HfDeepSpeedConfig
from accelight.strategies.deepspeed.ds_config import (
    TrainingFacts,
    accumulation_steps,
    check_optimizer_and_scheduler,
    hidden_size_of,
    resolve,
)
from tests.strategies.deepspeed.auto_configs import EVERYTHING_AUTO

WEIGHT = nn.Parameter(torch.zeros(2))


def filled(config: dict[str, Any], **facts: Any) -> dict[str, Any]:
    return resolve(HfDeepSpeedConfig(config), TrainingFacts(**{"micro_batch_size": 1, **facts})).config


def leaf(config: dict[str, Any], key: str) -> Any:
    return HfDeepSpeedConfig(config).get_value(key, "absent")


def test_everything_auto_is_filled_as_transformers_fills_it() -> None:
    deepspeed = pytest.importorskip("transformers.integrations.deepspeed", reason="needs transformers")
    oracle = deepspeed.HfTrainerDeepSpeedConfig(copy.deepcopy(EVERYTHING_AUTO))
    arguments = SimpleNamespace(
        world_size=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        max_grad_norm=0.5,
        learning_rate=1e-4,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.01,
        save_on_each_node=False,
        fp16=False,
        fp16_full_eval=False,
        bf16=True,
        bf16_full_eval=False,
        get_warmup_steps=lambda total: 7,
    )
    oracle.trainer_config_process(arguments)
    oracle.trainer_config_finalize(arguments, SimpleNamespace(config=SimpleNamespace(hidden_size=10)), 100)

    plugin = DeepSpeedPlugin(hf_ds_config=EVERYTHING_AUTO)
    before = copy.deepcopy(plugin.deepspeed_config)
    optimizer = DummyOptim([WEIGHT], lr=1e-4, weight_decay=0.01)
    facts = TrainingFacts(
        world_size=2,
        micro_batch_size=4,
        accumulate_grad_batches=3,
        gradient_clip_val=0.5,
        mixed_precision="bf16",
        optimizer=optimizer,
        scheduler=DummyScheduler(optimizer, warmup_num_steps=7),
        estimated_steps=100,
        hidden_size=10,
    )
    settings = resolve(HfDeepSpeedConfig(plugin.deepspeed_config), facts)
    expected = oracle.config
    # What transformers leaves to its Trainer, and Accelerate fills.
    expected["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = False
    assert settings.config == {**expected, "steps_per_print": float("inf")}
    assert settings.zero_stage == 3
    assert plugin.deepspeed_config == before  # the next Trainer fills it anew


@pytest.mark.parametrize(
    ("config", "facts", "expected"),
    [
        # the window
        ({}, {}, 1),
        ({}, {"accumulate_grad_batches": 4}, 4),
        ({"gradient_accumulation_steps": "auto"}, {"accumulate_grad_batches": 4}, 4),
        ({"gradient_accumulation_steps": 3}, {}, 3),
        ({"gradient_accumulation_steps": 3}, {"accumulate_grad_batches": 3}, 3),
    ],
)
def test_accumulation(config: dict[str, Any], facts: dict[str, Any], expected: int) -> None:
    assert leaf(filled(config, **facts), "gradient_accumulation_steps") == expected
    assert accumulation_steps(HfDeepSpeedConfig(config), facts.get("accumulate_grad_batches", 1)) == expected


def test_accumulation_twice() -> None:
    config = HfDeepSpeedConfig({"gradient_accumulation_steps": 2})
    message = (
        r"gradient_accumulation_steps: 2 in the DeepSpeed config, Trainer\(accumulate_grad_batches\)=4 \(with 'auto'"
    )
    with pytest.raises(ValueError, match=message):
        resolve(config, TrainingFacts(accumulate_grad_batches=4, micro_batch_size=1))
    assert accumulation_steps(config, 4) == 4  # which resolve() is told


@pytest.mark.parametrize(
    ("config", "micro", "expected"),
    [
        ({}, 4, (4, 24)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, 4, (4, 24)),
        ({"train_micro_batch_size_per_gpu": 5}, 4, (5, 30)),
        ({"train_micro_batch_size_per_gpu": 5, "train_batch_size": 30}, None, (5, 30)),
        ({"train_batch_size": 30}, None, (5, 30)),
        ({"train_batch_size": 30}, 4, (5, 30)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": "auto"}, 4, (4, 24)),
        ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": "auto"}, None, (5, 30)),
    ],
)
def test_batch_sizes(config: dict[str, Any], micro: int | None, expected: tuple[int, int]) -> None:
    found = filled(config, micro_batch_size=micro, accumulate_grad_batches=3, world_size=2)
    assert (found["train_micro_batch_size_per_gpu"], found["train_batch_size"]) == expected


@pytest.mark.parametrize("config", [{}, {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}])
def test_batch_sizes_that_nobody_knows(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="leaves these values open") as caught:
        filled(config, micro_batch_size=None)
    (line,) = str(caught.value).splitlines()[1:]
    assert line.startswith("- train_micro_batch_size_per_gpu: the dataloaders have no batch size (a batch")
    assert line.endswith("set train_micro_batch_size_per_gpu to the samples in one rank's batch")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"train_batch_size": 32},
            r"train_batch_size: 32 .*, 30 from train_micro_batch_size_per_gpu=5 x grad.*=3 x 2 pro",
        ),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto"}, r"train_batch_size: 32 .*, 24 from"),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 8}, r"train_batch_size: 24 .*, 48 from"),
    ],
)
def test_batch_sizes_that_do_not_fit(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filled(config, micro_batch_size=4, accumulate_grad_batches=3, world_size=2)


def test_everything_that_contradicts_the_trainer_is_one_error() -> None:
    config = {
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "train_micro_batch_size_per_gpu": 64,
        "bf16": {"enabled": False},
    }
    facts: dict[str, Any] = {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0, "mixed_precision": "bf16"}
    with pytest.raises(ValueError, match="contradicts other settings") as caught:
        filled(config, train_batch_size=4, **facts)
    found = [line.split(":")[0] for line in str(caught.value).splitlines() if line.startswith("- ")]
    assert found == [
        "- gradient_accumulation_steps",
        "- train_micro_batch_size_per_gpu",
        "- gradient_clipping",
        "- bf16.enabled",
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train_micro_batch_size_per_gpu": 64}, "train_micro_batch_size_per_gpu: 64 .*, 4 by the training data's"),
        ({"train_batch_size": 30}, "train_batch_size: 30 .*, 24 by the training data's batch size of 4"),
    ],
)
def test_batch_sizes_that_the_data_does_not_have(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filled(config, train_batch_size=4, accumulate_grad_batches=3, world_size=2)


@pytest.mark.parametrize("given", [None, 5])
def test_batch_sizes_that_the_data_has_or_does_not_tell(given: int | None) -> None:
    facts: dict[str, Any] = {"train_batch_size": given, "accumulate_grad_batches": 3, "world_size": 2}
    for config in ({"train_micro_batch_size_per_gpu": 5}, {"train_batch_size": 30}):
        assert filled(config, **facts)["train_batch_size"] == 30


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        ({}, None, 0.0),
        ({"gradient_clipping": "auto"}, None, 0.0),
        ({"gradient_clipping": "auto"}, 0.5, 0.5),
        ({}, 2, 2.0),
        ({"gradient_clipping": 1.0}, None, 1.0),
        ({"gradient_clipping": 1.0}, 1, 1.0),
        ({"gradient_clipping": 1.0}, 0, 1.0),
    ],
)
def test_clipping(config: dict[str, Any], given: float | None, expected: float) -> None:
    assert filled(config, gradient_clip_val=given)["gradient_clipping"] == expected


def test_clipping_twice() -> None:
    with pytest.raises(ValueError, match=r"gradient_clipping: 1.0 in .*, Trainer\(gradient_clip_val\)=0.5"):
        filled({"gradient_clipping": 1.0}, gradient_clip_val=0.5)


AUTO = {"enabled": "auto"}
ON = {"enabled": True}
OFF = {"enabled": False}


@pytest.mark.parametrize(
    ("config", "wanted", "expected"),
    [
        ({}, "no", "no"),
        ({}, "bf16", "bf16"),
        ({}, "fp16", "fp16"),
        ({}, "fp8", "bf16"),
        ({"fp16": AUTO, "bf16": AUTO}, "bf16", "bf16"),
        ({"fp16": AUTO, "bf16": AUTO}, "fp16", "fp16"),
        ({"fp16": AUTO, "bf16": AUTO}, "no", "no"),
        ({"bf16": ON}, "no", "bf16"),
        ({"bf16": ON, "fp16": AUTO}, "no", "bf16"),
        ({"bf16": ON, "fp16": OFF}, "bf16", "bf16"),
        ({"fp16": {"loss_scale": 128}}, "fp16", "fp16"),
    ],
)
def test_precision(config: dict[str, Any], wanted: Any, expected: str) -> None:
    found = filled(config, mixed_precision=wanted)
    for name in ("fp16", "bf16"):
        assert found[name]["enabled"] is (name == expected)


@pytest.mark.parametrize(
    ("config", "wanted", "message"),
    [
        ({"fp16": ON}, "bf16", r"fp16.enabled: True in the DeepSpeed config, Trainer\(precision\) is 'bf16'"),
        ({"bf16": OFF}, "bf16", r"bf16.enabled: False in the DeepSpeed config, Trainer\(precision\) is 'bf16'"),
        ({"bf16": ON}, "fp16", r"bf16.enabled: True .* is 'fp16'"),
        ({"bf16": ON, "fp16": ON}, "no", r"has both fp16.enabled and bf16.enabled. Set one of them to false"),
    ],
)
def test_precisions_that_contradict(config: dict[str, Any], wanted: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filled(config, mixed_precision=wanted)


def test_apex_is_off() -> None:
    assert "amp" not in filled({"amp": {"enabled": "auto", "opt_level": "auto"}})  # DeepSpeed 0.19 has removed it


def optimizer_section(kind: str = "AdamW", **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def test_optimizer_from_the_dummy() -> None:
    dummy = DummyOptim([WEIGHT], lr=0.5, weight_decay=0.1, betas=(0.8, 0.9), momentum=0.3)
    opened = optimizer_section(lr="auto", weight_decay="auto", betas="auto", eps="auto", momentum="auto", amsgrad=True)
    assert filled(opened, optimizer=dummy)["optimizer"]["params"] == {
        "lr": 0.5,
        "weight_decay": 0.1,
        "betas": [0.8, 0.9],
        "eps": 1e-8,
        "momentum": 0.3,
        "amsgrad": True,
    }
    fixed = optimizer_section(lr=0.5, weight_decay=0.1, betas=[0.8, 0.9])
    assert filled(fixed, optimizer=dummy)["optimizer"] == fixed["optimizer"]
    # A dummy's defaults may not have been given, so they contradict nothing.
    assert filled(fixed, optimizer=DummyOptim([WEIGHT]))["optimizer"] == fixed["optimizer"]


def test_optimizer_values_that_contradict_are_listed_together() -> None:
    dummy = DummyOptim([WEIGHT], lr=0.5, weight_decay=0.1, betas=(0.8, 0.9))
    config = optimizer_section(lr=1.0, weight_decay=0.0, betas=[0.9, 0.9])
    with pytest.raises(ValueError, match="contradicts") as caught:
        filled({**config, "gradient_clipping": 1.0}, optimizer=dummy, gradient_clip_val=2.0)
    assert str(caught.value).splitlines()[1:-1] == [
        "- gradient_clipping: 1.0 in the DeepSpeed config, Trainer(gradient_clip_val)=2.0",
        "- optimizer.params.lr: 1.0 in the DeepSpeed config, DummyOptim(lr)=0.5",
        "- optimizer.params.weight_decay: 0.0 in the DeepSpeed config, DummyOptim(weight_decay)=0.1",
        "- optimizer.params.betas: [0.9, 0.9] in the DeepSpeed config, DummyOptim(betas)=[0.8, 0.9]",
    ]


def scheduler_section(**params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": "WarmupDecayLR", "params": params}}


OPEN_SCHEDULE = scheduler_section(
    warmup_min_lr="auto", warmup_max_lr="auto", warmup_num_steps="auto", total_num_steps="auto"
)


@pytest.mark.parametrize("world_size", [1, 4])
def test_schedule_from_the_dummy_does_not_depend_on_the_number_of_processes(world_size: int) -> None:
    optimizer = DummyOptim([WEIGHT], lr=0.5)
    given = {"optimizer": optimizer, "world_size": world_size, "estimated_steps": 100}
    config = {**optimizer_section(lr="auto"), **OPEN_SCHEDULE}
    found = filled(config, **given, scheduler=DummyScheduler(optimizer, warmup_num_steps=10))
    expected = {"warmup_min_lr": 0, "warmup_max_lr": 0.5, "warmup_num_steps": 10, "total_num_steps": 100}
    assert found["scheduler"]["params"] == expected
    found = filled(config, **given, scheduler=DummyScheduler(optimizer, 60, warmup_min_lr=0.1))
    expected = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 1, "total_num_steps": 60}
    assert found["scheduler"]["params"] == expected


def test_schedule_climbs_to_the_rate_that_the_optimizer_has() -> None:
    real = torch.optim.SGD([WEIGHT], lr=0.25)
    config = scheduler_section(warmup_max_lr="auto")
    found = filled(config, optimizer=real, scheduler=DummyScheduler(real))
    assert leaf(found, "scheduler.params.warmup_max_lr") == 0.25
    # Accelerate takes the dummy's default here, whatever the config's optimizer starts with.
    dummy = DummyOptim([WEIGHT])
    found = filled({**optimizer_section(lr=0.125), **config}, optimizer=dummy, scheduler=DummyScheduler(dummy))
    assert leaf(found, "scheduler.params.warmup_max_lr") == 0.125


def test_schedule_values_that_contradict() -> None:
    real = torch.optim.SGD([WEIGHT], lr=0.25)
    config = scheduler_section(total_num_steps=10, warmup_num_steps=3, warmup_min_lr=0.1)
    scheduler = DummyScheduler(real, 20, 4, warmup_min_lr=0.2)
    with pytest.raises(ValueError, match="contradicts") as caught:
        filled(config, optimizer=real, scheduler=scheduler)
    assert [line.split(",")[1] for line in str(caught.value).splitlines()[1:-1]] == [
        " DummyScheduler(warmup_min_lr)=0.2",
        " DummyScheduler(total_num_steps)=20",
        " DummyScheduler(warmup_num_steps)=4",
    ]
    assert filled(config, optimizer=real, estimated_steps=99)["scheduler"] == config["scheduler"]


@pytest.mark.parametrize(
    ("stage", "size", "expected"),
    [
        (
            3,
            10,
            {"reduce_bucket_size": 100, "stage3_prefetch_bucket_size": 90, "stage3_param_persistence_threshold": 100},
        ),
        (
            2,
            10,
            {"reduce_bucket_size": 100, "stage3_prefetch_bucket_size": 90, "stage3_param_persistence_threshold": 100},
        ),
        (0, None, {}),
    ],
)
def test_bucket_sizes(stage: int, size: int | None, expected: dict[str, int]) -> None:
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    config = {"zero_optimization": {"stage": stage, **dict.fromkeys(names, "auto")}}
    assert filled(config, hidden_size=size)["zero_optimization"] == {"stage": stage, **expected}


@pytest.mark.parametrize(
    ("zero", "num_elements", "expected"),
    [
        ({"stage": 2}, 77, 77),
        ({"stage": 3}, 7 * 10**9, 5 * 10**8),
        ({"stage": 1, "reduce_bucket_size": 64}, 77, 64),
        ({"stage": 2}, 0, None),
        ({"stage": 0}, 77, None),
    ],
)
def test_a_bucket_that_nobody_sized_is_as_large_as_the_model(
    zero: dict[str, int], num_elements: int, expected: int | None
) -> None:
    config = filled({"zero_optimization": zero}, num_elements=num_elements)
    assert config["zero_optimization"].get("reduce_bucket_size") == expected


def test_everything_that_stays_open_is_listed_with_what_to_do() -> None:
    config = {
        **EVERYTHING_AUTO,
        "data_types": {"keep_in_fp32_modules": "auto", "grad_accum_dtype": "auto"},
        "curriculum": [{"type": "auto"}],
    }
    with pytest.raises(ValueError, match="leaves these values open") as caught:
        filled(config, micro_batch_size=None, estimated_steps=float("inf"))
    lines = [line.removeprefix("- ").split(": ", 1) for line in str(caught.value).splitlines()[1:]]
    in_the_code = "return Dummy{}(...) with it from configure_optimizers, or set it in the config"
    no_size = "the model defines no hidden size (model.config.hidden_size, or its own hidden_size)"
    nothing = "no other setting defines it; set it in the config, or omit it for DeepSpeed's default"
    expected = {
        "train_micro_batch_size_per_gpu": "the dataloaders have no batch size",
        **{f"optimizer.params.{name}": in_the_code.format("Optim") for name in ("lr", "betas", "eps", "weight_decay")},
        **{
            f"scheduler.params.{name}": in_the_code.format("Scheduler")
            for name in ("warmup_max_lr", "warmup_num_steps", "total_num_steps")
        },
        "zero_optimization.reduce_bucket_size": no_size,
        "zero_optimization.stage3_prefetch_bucket_size": no_size,
        "zero_optimization.stage3_param_persistence_threshold": no_size,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": nothing,  # the plugin fills it
        "data_types.grad_accum_dtype": nothing,
        "curriculum[0].type": nothing,
    }
    assert [key for key, _ in lines] == list(expected)
    for key, advice in lines:
        assert advice.startswith(expected[key]), key


# ---------------------------------------------------------------- both or neither
REAL = torch.optim.SGD([WEIGHT], lr=0.1)
SCHEDULE = torch.optim.lr_scheduler.ConstantLR(REAL)
DUMMY = DummyOptim([WEIGHT])
WITH_OPTIMIZER = optimizer_section(lr=0.1)
WITH_SCHEDULER = scheduler_section(total_num_steps=5)
LATE = DummyScheduler(DUMMY, lr_scheduler_callable=torch.optim.lr_scheduler.ConstantLR)


@pytest.mark.parametrize(
    ("config", "optimizer", "scheduler", "message"),
    [
        (WITH_OPTIMIZER, REAL, None, r"Both the DeepSpeed config and configure_optimizers \(SGD\) define an opt.*Dum"),
        ({}, DUMMY, None, r"returns a DummyOptim, but the DeepSpeed config has no 'optimizer'.* Add"),
        ({}, None, None, r"Neither the DeepSpeed config nor configure_optimizers defines an optimizer. Return one"),
        (WITH_SCHEDULER, REAL, SCHEDULE, r"configure_optimizers \(ConstantLR\) define a schedule. .*DummyScheduler"),
        (WITH_OPTIMIZER, DUMMY, SCHEDULE, r"ConstantLR needs a real optimizer.* Return DummyScheduler\(opt"),
        (WITH_SCHEDULER, REAL, LATE, r"Both the DeepSpeed config and DummyScheduler\(lr_scheduler_callable=...\) "),
        ({"optimizer": {"type": "Muon"}}, DUMMY, None, r"Muon, which DeepSpeed may silently replace .* Use torch.opt"),
        ({}, REAL, DummyScheduler(REAL), r"returns a DummyScheduler, but the DeepSpeed config has no 'scheduler'"),
    ],
)  # fmt: skip
def test_defined_twice_or_not_at_all(config: dict[str, Any], optimizer: Any, scheduler: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_optimizer_and_scheduler(HfDeepSpeedConfig(config), optimizer, scheduler)


@pytest.mark.parametrize(
    ("config", "optimizer", "scheduler"),
    [
        ({}, REAL, None),
        ({}, REAL, SCHEDULE),
        ({}, REAL, DummyScheduler(REAL, lr_scheduler_callable=torch.optim.lr_scheduler.ConstantLR)),
        (WITH_SCHEDULER, REAL, None),
        (WITH_SCHEDULER, REAL, DummyScheduler(REAL)),
        (WITH_OPTIMIZER, None, None),
        (WITH_OPTIMIZER, DUMMY, None),
        (WITH_OPTIMIZER, DUMMY, LATE),
        ({**WITH_OPTIMIZER, **WITH_SCHEDULER}, DUMMY, DummyScheduler(DUMMY)),
        ({**WITH_OPTIMIZER, **WITH_SCHEDULER}, None, None),
    ],
)
def test_defined_once(config: dict[str, Any], optimizer: Any, scheduler: Any) -> None:
    check_optimizer_and_scheduler(HfDeepSpeedConfig(config), optimizer, scheduler)


def test_dummies_keep_what_they_are_given() -> None:
    optim = DummyOptim(iter([WEIGHT]), 0.5, 0.1, betas=(0.1, 0.2))
    assert (optim.params, optim.lr, optim.weight_decay, optim.kwargs) == ([WEIGHT], 0.5, 0.1, {"betas": (0.1, 0.2)})
    assert (DummyOptim([]).lr, DummyOptim([]).weight_decay) == (0.001, 0)
    for given in (iter([WEIGHT]), WEIGHT):
        assert DummyOptim([{"params": given, "lr": 0.1}]).params == [{"params": [WEIGHT], "lr": 0.1}]
    scheduler = DummyScheduler(optim, 10, 2, print, cycle=3)
    assert (scheduler.optimizer, scheduler.total_num_steps, scheduler.warmup_num_steps) == (optim, 10, 2)
    assert (scheduler.lr_scheduler_callable, scheduler.kwargs) == (print, {"cycle": 3})
    default = DummyScheduler(optim)
    assert (default.total_num_steps, default.warmup_num_steps, default.lr_scheduler_callable) == (None, 0, None)


# ---------------------------------------------------------------- hidden size
class Named(nn.Module):
    def __init__(self, inner: nn.Module | None = None, **attributes: Any) -> None:
        super().__init__()
        self.inner = inner
        for name, value in attributes.items():
            setattr(self, name, value)


def config_of(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**values)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Named(config=config_of(hidden_size=8)), 8),
        (Named(config=config_of(hidden_sizes=[4, 16, 8])), 16),
        (Named(config=config_of(text_config=config_of(hidden_size=6))), 6),
        (Named(config=config_of(text_config=config_of(hidden_sizes=(6, 7)))), 7),
        (Named(config={"hidden_size": 5}), 5),
        (Named(hparams={"hidden_size": 3}), 3),
        (Named(hidden_size=2), 2),
        (Named(Named(Named(config=config_of(hidden_size=9)))), 9),
        (Named(nn.Sequential(Named(config=config_of(hidden_size=9)), Named(config=config_of(hidden_size=12)))), 12),
        (Named(Named(config=config_of(hidden_size=9)), config=config_of(hidden_size=1)), 1),
        (Named(config=config_of(hidden_size=None)), None),
        (nn.Linear(3, 3), None),
    ],
)
def test_hidden_size(model: nn.Module, expected: int | None) -> None:
    assert hidden_size_of(model) == expected


def test_hidden_size_of_a_transformers_model_inside_a_module() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11)
    assert hidden_size_of(Named(transformers.GPT2LMHeadModel(config))) == 8


def test_what_deepspeed_alone_understands_passes_through() -> None:
    """NVMe, asynchronous I/O and fp16's scale: they may not run here, and arrive as they are."""
    nvme = {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 5, "pin_memory": True, "max_in_cpu": 1e9}
    given: dict[str, Any] = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {**nvme, "fast_init": True}, "offload_param": nvme},
        "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 2},
    }
    config = filled(given, mixed_precision="fp16")
    assert {key: config[key] for key in ("zero_optimization", "aio")} == {
        key: given[key] for key in ("zero_optimization", "aio")
    }
    assert config["fp16"] == {**given["fp16"], "enabled": True}
