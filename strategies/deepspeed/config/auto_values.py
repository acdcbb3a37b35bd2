"""Fills every ``"auto"`` of a DeepSpeed config from what a Trainer, its model and its optimizer know."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer

from .config_precision import fill_precision, precision_of
from .dummies import DummyOptim, DummyScheduler
from .hf_config import AUTO, HfDeepSpeedConfig, is_auto_value
from .mismatches import differ, mismatch_error
from .settings import DeepSpeedSettings

_SET_IT = "set it in the config"
_UNDERSTOOD_BY_DEEPSPEED = ("data_types.keep_in_fp32_modules", "pipeline.stages")
_LARGEST_BUCKET = 500_000_000  # elements: DeepSpeed's default
_ADAM = {"betas": [0.9, 0.999], "eps": 1e-8}  # torch's defaults, and those of DeepSpeed's Adam


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """What is known beside the config."""

    world_size: int = 1
    """Data-parallel ranks."""
    micro_batch_size: int | None = None
    """Samples in one rank's batch; None where the loaders do not tell."""
    train_batch_size: int | None = None
    """Samples in one rank's batch of training; None where the loaders do not tell, or differ."""
    accumulate_grad_batches: int = 1
    """Of the Trainer; 1 counts as not given."""
    gradient_clip_val: float | None = None
    """Of the Trainer; None and 0 count as not given."""
    clips_by_value: bool = False
    """Whether the Trainer is to clip each gradient, and not their norm."""
    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] = "no"
    """Of the Trainer; ``"no"`` counts as not given."""
    optimizer: DummyOptim | Optimizer | None = None
    """What ``configure_optimizers`` returned."""
    scheduler: DummyScheduler | object | None = None
    """What ``configure_optimizers`` returned."""
    estimated_steps: float | None = None
    """Optimizer steps of the whole training, if they are known and finite."""
    hidden_size: int | None = None
    """Of the model; see `hidden_size.hidden_size_of`."""
    num_elements: int | None = None
    """Of all parameters together."""


def resolve(config: HfDeepSpeedConfig, facts: TrainingFacts) -> DeepSpeedSettings:
    """Return the settings for ``facts``; ``config`` stays as it is.

    Raises:
        ValueError: If the config and the facts contradict each other, or an ``"auto"`` cannot be filled; the message
            lists every key, with both values or with what to do.

    Source: accelerate 1.15 ``accelerator.py`` (``_prepare_deepspeed``); transformers 5.23
    ``integrations/deepspeed.py`` for the values that depend on the hidden size and for Adam's. Different here: clipping
    that nobody asks for is off; a schedule's steps are not divided by the number of ranks.
    """
    filling = _Filling(HfDeepSpeedConfig(config), facts)
    filling.fill_window()
    filling.fill_batch_sizes()
    filling.fill_clipping()
    filling.fill_precision()
    filling.fill_optimizer()
    filling.fill_scheduler()
    filling.fill_buckets()
    filling.finish()
    return DeepSpeedSettings.of(filling.config)


def accumulation_steps(config: HfDeepSpeedConfig, accumulate_grad_batches: int) -> int:
    """Return the micro-batches per step of the config where the Trainer is given none (1), else the Trainer's.

    Where they contradict each other, `resolve` says so, together with what else does.
    """
    steps: int | str = config.get_value("gradient_accumulation_steps", AUTO)
    return accumulate_grad_batches if is_auto_value(steps) or accumulate_grad_batches != 1 else int(steps)


class _Filling:
    """A config on its way, and what is wrong with it so far."""

    def __init__(self, config: HfDeepSpeedConfig, facts: TrainingFacts) -> None:
        self.config = config
        self.facts = facts
        self.mismatches: list[str] = []
        self.open: dict[str, str] = {}

    def fill(self, key: str, value: Any, advice: str = _SET_IT) -> None:
        """Fill an ``"auto"``; None means that the value is not known."""
        if not self.config.is_auto(key):
            return
        if value is None:
            self.open[key] = advice
        else:
            self.config.set_value(key, value)

    def match(self, key: str, given: Any, where: str) -> None:
        """Note if a value of the config differs from what was given elsewhere."""
        value = self.config.get_value(key)
        if value is not None and not is_auto_value(value) and differ(value, given):
            self.mismatches.append(f"- {key}: {value!r} in the DeepSpeed config, {where}={given!r}")

    def known(self, key: str) -> Any:
        """Return a value of the config, None where it is absent or open."""
        value = self.config.get_value(key)
        return None if is_auto_value(value) else value

    def fill_window(self) -> None:
        given = self.facts.accumulate_grad_batches
        steps = self.known("gradient_accumulation_steps")
        if steps is None:
            self.config.set_value("gradient_accumulation_steps", given)
        elif given not in (1, steps):
            self.mismatches.append(_accumulation_mismatch(steps, given))

    def fill_batch_sizes(self) -> None:
        micro_key, total_key = "train_micro_batch_size_per_gpu", "train_batch_size"
        others = self.config.get_value("gradient_accumulation_steps") * self.facts.world_size
        micro, total = self.known(micro_key), self.known(total_key)
        asked = False
        if micro is None:
            asked = self.config.is_auto(micro_key) or total is None
            micro = self.facts.micro_batch_size if asked else None
        if micro is None and total is not None:
            micro = total // others  # a remainder shows below
        if micro is None:
            self.open[micro_key] = (
                "the dataloaders have no batch size of their own (a batch sampler, or a dataset that makes batches); "
                f"set {micro_key} to the samples in one rank's batch"
            )
            self.config.del_config_sub_tree(total_key)  # follows from the other, so it is no problem of its own
            return
        given = self.facts.train_batch_size
        stated = self.known(micro_key) is not None
        if given is not None and given != micro and (stated or not asked):
            key, value, meant = (micro_key, micro, given) if stated else (total_key, total, given * others)
            self.mismatches.append(
                f"- {key}: {value!r} in the DeepSpeed config, {meant} by the training data's batch size of {given}"
            )
        self.config.set_value(micro_key, micro)
        if total is None:
            self.config.set_value(total_key, micro * others)
        elif total != micro * others:
            self.mismatches.append(
                f"- {total_key}: {total!r} in the DeepSpeed config, {micro * others} from {micro_key}={micro} x "
                f"gradient_accumulation_steps={others // self.facts.world_size} x {self.facts.world_size} process(es)"
            )

    def fill_clipping(self) -> None:
        given = self.facts.gradient_clip_val
        if given:
            self.match("gradient_clipping", given, "Trainer(gradient_clip_val)")
        if given and self.facts.clips_by_value:
            self.mismatches.append(
                "- Trainer(gradient_clip_algorithm='value'): DeepSpeed clips gradients by their norm only; use 'norm'"
            )
        if self.known("gradient_clipping") is None:
            self.config.set_value("gradient_clipping", float(given or 0.0))

    def fill_precision(self) -> None:
        wanted = self.facts.mixed_precision
        for name, on in (("fp16", wanted == "fp16"), ("bf16", wanted in ("bf16", "fp8"))):
            key = f"{name}.enabled"
            if self.config.is_false(key) if on else wanted != "no" and self.config.is_true(key):
                value = self.config.get_value(key)
                self.mismatches.append(f"- {key}: {value!r} in the DeepSpeed config, Trainer(precision) is {wanted!r}")
        # The config may have one of them on and the other open.
        fill_precision(self.config, precision_of(self.config) if wanted == "no" else wanted)
        self.fill("amp.enabled", False)
        self.fill("amp.opt_level", "O1")

    def fill_optimizer(self) -> None:
        optimizer = self.facts.optimizer
        advice = f"return DummyOptim(...) with it from configure_optimizers, or {_SET_IT}"
        values: dict[str, Any] = {}
        if isinstance(optimizer, DummyOptim):
            given = {name: value for name, value in _named(optimizer).items() if value != _DEFAULTS_OF_OPTIM.get(name)}
            for name, value in given.items():
                self.match(f"optimizer.params.{name}", value, f"DummyOptim({name})")
            values = {**_ADAM, **_named(optimizer)}
        self._fill_section("optimizer.params", values, advice)

    def fill_scheduler(self) -> None:
        scheduler = self.facts.scheduler
        advice = f"return DummyScheduler(...) with it from configure_optimizers, or {_SET_IT}"
        steps = self.facts.estimated_steps
        values: dict[str, Any] = {
            "total_num_steps": int(steps) if steps is not None and math.isfinite(steps) else None,
            "warmup_min_lr": 0,
            "warmup_max_lr": self._learning_rate(),
        }
        if isinstance(scheduler, DummyScheduler):
            given: dict[str, Any] = {**scheduler.kwargs}
            if scheduler.total_num_steps is not None:
                given["total_num_steps"] = scheduler.total_num_steps
            if scheduler.warmup_num_steps:
                given["warmup_num_steps"] = scheduler.warmup_num_steps
            for name, value in given.items():
                self.match(f"scheduler.params.{name}", value, f"DummyScheduler({name})")
            values |= {"warmup_num_steps": 1, **given}  # DeepSpeed 0.19.6 refuses 0 steps, and means none by 1
        self._fill_section("scheduler.params", values, advice)

    def fill_buckets(self) -> None:
        size = self.facts.hidden_size
        advice = (
            f"the model tells no hidden size (model.config.hidden_size, or a hidden_size of its own); {_SET_IT}, "
            "or give the model one"
        )
        stage = self.config.get_value("zero_optimization.stage", 0)
        for name, value, used in (
            ("reduce_bucket_size", size and size * size, stage > 0),
            ("stage3_prefetch_bucket_size", size and int(0.9 * size * size), stage == 3),
            ("stage3_param_persistence_threshold", size and 10 * size, stage == 3),
        ):
            key = f"zero_optimization.{name}"
            if self.config.is_auto(key) and value is None and not used:
                self.config.del_config_sub_tree(key)
            self.fill(key, value, advice)
        # DeepSpeed holds a bucket of gradients for the whole fit, of 2 GB by default however small the model is; and
        # Trainer(deterministic=True) lets torch fill it at every step.
        bucket, elements = "zero_optimization.reduce_bucket_size", self.facts.num_elements
        if stage > 0 and elements and self.config.get_value(bucket) is None:
            self.config.set_value(bucket, min(elements, _LARGEST_BUCKET))

    def finish(self) -> None:
        """Raise what was found, and what is still open."""
        for key in _open_keys(self.config.config):
            if key not in _UNDERSTOOD_BY_DEEPSPEED:
                self.open.setdefault(key, f"nothing here tells it; {_SET_IT}, or leave it out for DeepSpeed's default")
        if self.mismatches:
            raise mismatch_error(self.mismatches)
        if self.open:
            listed = "\n".join(f"- {key}: {advice}" for key, advice in self.open.items())
            raise ValueError(f"The DeepSpeed config leaves open what nothing fills:\n{listed}")

    def _fill_section(self, section: str, values: Mapping[str, Any], advice: str) -> None:
        node = self.config.get_value(section)
        for name in list(node) if isinstance(node, dict) else []:
            self.fill(f"{section}.{name}", values.get(name), advice)

    def _learning_rate(self) -> float | None:
        """Return the optimizer's learning rate, the config's first."""
        configured: float | None = self.known("optimizer.params.lr")
        if configured is not None:
            return configured
        optimizer = self.facts.optimizer
        if isinstance(optimizer, DummyOptim):
            return optimizer.lr
        return None if optimizer is None else optimizer.defaults.get("lr")


_DEFAULTS_OF_OPTIM = {"lr": 0.001, "weight_decay": 0}  # a dummy that has these may not have been given them


def _named(optimizer: DummyOptim) -> dict[str, Any]:
    kwargs = {name: list(value) if isinstance(value, tuple) else value for name, value in optimizer.kwargs.items()}
    return {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **kwargs}


def _accumulation_mismatch(steps: object, given: int) -> str:
    return (
        f"- gradient_accumulation_steps: {steps!r} in the DeepSpeed config, Trainer(accumulate_grad_batches)={given!r} "
        "(with 'auto', or without the key, DeepSpeed follows the Trainer)"
    )


def _open_keys(node: object, prefix: str = "") -> Iterator[str]:
    if is_auto_value(node):
        yield prefix
    elif isinstance(node, dict):
        for name, value in node.items():
            yield from _open_keys(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _open_keys(value, f"{prefix}[{index}]")
