"""The DeepSpeed config: questions by dotted key, ``"auto"`` values, precision, optimizer dummies, and settings."""

from __future__ import annotations

import base64
import binascii
import copy
import difflib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from ..common.config import source

AUTO = "auto"


class HfDeepSpeedConfig:
    """A copy of a DeepSpeed config, asked and changed by keys such as ``"zero_optimization.stage"``.

    Args:
        config_file_or_dict: Path of a JSON file, a dict, JSON text (plain or in base64), or another config object: one
            of this class, or of Accelerate's or transformers'. What is given is never modified.

    Raises:
        ValueError: If the text is no file and no JSON object, or an object in it has a key twice.
        TypeError: If it is of another type.

    Source: accelerate 1.15 ``utils/deepspeed.py``. Different here: stage and offload are read anew each time, so a
    changed ``config`` never disagrees with them, and `is_true` and `is_false` both deny an open ``"auto"``.
    """

    def __init__(self, config_file_or_dict: str | os.PathLike[str] | Mapping[str, Any] | HfDeepSpeedConfig) -> None:
        self.config: dict[str, Any] = _read(config_file_or_dict)

    def set_stage_and_offload(self) -> None:
        """Do nothing: `is_zero2`, `is_zero3` and `is_offload` read the config as it is. For callers of Accelerate's."""

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dict that holds a key (None where there is no such dict), and the key's last part."""
        *sections, ds_key = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section)
            if not isinstance(node, dict):
                return None, ds_key
        return node, ds_key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key, or ``default`` where it is not set."""
        node, ds_key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(ds_key, default)

    def set_value(self, ds_key_long: str, value: Any) -> None:
        """Set a key, making the sections around it where they are missing.

        Raises:
            ValueError: If something that is no section stands in the way.
        """
        *sections, ds_key = ds_key_long.split(".")
        node = self.config
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise ValueError(f"{ds_key_long!r} cannot be set: {section!r} is {node!r} in the DeepSpeed config.")
        node[ds_key] = value

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete a key, with everything below it.

        Args:
            ds_key_long: The key.
            must_exist: Whether it is an error if the key is not there.

        Raises:
            ValueError: If it must exist and does not.
        """
        node, ds_key = self.find_config_node(ds_key_long)
        if node is not None and ds_key in node:
            del node[ds_key]
        elif must_exist:
            raise ValueError(f"There is no {ds_key_long!r} to delete in the DeepSpeed config: {self.config}.")

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a key is left open with ``"auto"``."""
        return is_auto_value(self.get_value(ds_key_long))

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a key is set to something true. Not set and ``"auto"`` are neither true nor false."""
        value = self.get_value(ds_key_long)
        return value is not None and not is_auto_value(value) and bool(value)

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a key is set to something false. Not set and ``"auto"`` are neither true nor false."""
        value = self.get_value(ds_key_long)
        return value is not None and not is_auto_value(value) and not value

    def is_zero2(self) -> bool:
        """Whether this is ZeRO stage 2."""
        return self.get_value("zero_optimization.stage") == 2

    def is_zero3(self) -> bool:
        """Whether this is ZeRO stage 3."""
        return self.get_value("zero_optimization.stage") == 3

    def is_offload(self) -> bool:
        """Whether stage 2 or 3 moves optimizer state or parameters to the CPU or to NVMe."""
        devices = {self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")}
        return (self.is_zero2() or self.is_zero3()) and bool(devices & {"cpu", "nvme"})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config})"


def is_auto_value(value: object) -> bool:
    """Whether a value is ``"auto"``: to be filled in by whoever knows it."""
    return isinstance(value, str) and value == AUTO


def _read(given: object) -> dict[str, Any]:
    inner = getattr(given, "config", None)
    if isinstance(inner, Mapping):
        given = inner
    if isinstance(given, Mapping):
        return {name: _copied(value) for name, value in given.items()}
    if not isinstance(given, str | os.PathLike):
        raise TypeError(
            "A DeepSpeed config must be a path, a dict, JSON or base64 text or an HfDeepSpeedConfig; "
            f"got {given!r} of type {type(given).__name__}."
        )
    if os.path.exists(given):
        return _parse(Path(given).read_text(encoding="utf-8"), f"the file {os.fspath(given)!r}")
    text = os.fspath(given)
    if text.lstrip().startswith("{"):
        return _parse(text, "the JSON text")
    return _parse(_decoded(text), "the base64 text")


def _copied(value: Any) -> Any:
    """Copy as JSON would: a section that the user has put in two places becomes two, each filled on its own."""
    if isinstance(value, Mapping):
        return {name: _copied(inner) for name, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else copy.deepcopy(value)


def _decoded(text: str) -> str:
    """Return the text that ``text`` encodes in base64, in the alphabet for URLs or the standard one."""
    try:
        return base64.b64decode(text.strip().replace("-", "+").replace("_", "/"), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeError, ValueError):
        raise ValueError(
            f"{source('hf_ds_config', text)}={text!r} is neither an existing file, nor a JSON object, nor base64 of "
            "one. Pass the path of a DeepSpeed config file, a dict, or its JSON."
        ) from None


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        config = json.loads(text, object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise ValueError(f"The DeepSpeed config in {source} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"The DeepSpeed config in {source} must be a JSON object, got {config!r}.")
    return config


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"key(s) given twice in one object: {', '.join(map(repr, twice))}. Keep one of each.")
    return dict(pairs)


# ------------------------------------------------------------------------------------------------
# The precision of a DeepSpeed config: its ``fp16`` and ``bf16`` sections.


Precision = Literal["no", "fp16", "bf16"]
_SECTIONS = ("fp16", "bf16")


def precision_of(config: HfDeepSpeedConfig) -> Precision:
    """Return the half precision that the config switches on, ``"no"`` for none.

    Raises:
        ValueError: If it switches on both.
    """
    fp16, bf16 = config.is_true("fp16.enabled"), config.is_true("bf16.enabled")
    if fp16 and bf16:
        raise ValueError("The DeepSpeed config has both fp16.enabled and bf16.enabled. Set one of them to false.")
    return "fp16" if fp16 else "bf16" if bf16 else "no"


def _is_on(section: str, mixed_precision: str) -> bool:
    """Whether ``mixed_precision`` computes in what a section stands for: ``"fp8"`` in bf16."""
    return section == ("bf16" if mixed_precision == "fp8" else mixed_precision)


def fill_precision(config: HfDeepSpeedConfig, mixed_precision: str) -> None:
    """Switch on what computes in ``mixed_precision`` where the config leaves it open."""
    for name in _SECTIONS:
        on = _is_on(name, mixed_precision)
        # DeepSpeed does not cast the inputs of an fp16 model by itself. A section of the user's keeps what it says.
        fresh = {"enabled": on, "auto_cast": True} if on and name == "fp16" else {"enabled": on}
        config.config.setdefault(name, fresh)
        if config.is_auto(f"{name}.enabled") or config.get_value(f"{name}.enabled") is None:
            config.set_value(f"{name}.enabled", on)


class PrecisionSections:
    """Fills the precision sections of one config again and again, each time from what the user wrote into them."""

    def __init__(self) -> None:
        self._written: dict[str, Any] = {}
        self._filled: dict[str, Any] | None = None

    def fill(self, config: HfDeepSpeedConfig, mixed_precision: str) -> None:
        """Switch on what computes in ``mixed_precision`` where the user has left it open.

        Raises:
            ValueError: If the config switches on the other half precision.
        """
        written = self._as_written(config)
        for name in _SECTIONS:
            config.del_config_sub_tree(name)
        config.config.update(written)
        self._written = copy.deepcopy(written)
        for name, other in (("fp16", "bf16"), ("bf16", "fp16")):
            if _is_on(name, mixed_precision) and config.is_true(f"{other}.enabled"):
                raise ValueError(
                    f"mixed_precision={mixed_precision!r} and {other}.enabled=true in the DeepSpeed config "
                    f"contradict each other. Set {other}.enabled to 'auto' or false, or mixed_precision to {other!r}."
                )
        fill_precision(config, mixed_precision)
        self._filled = _sections_of(config)

    def own(self, config: HfDeepSpeedConfig) -> Precision:
        """Return the half precision that the config itself switches on, whatever has been filled in since."""
        return precision_of(HfDeepSpeedConfig(self._as_written(config)))

    def _as_written(self, config: HfDeepSpeedConfig) -> dict[str, Any]:
        present = _sections_of(config)
        return copy.deepcopy(self._written) if present == self._filled else present


def _sections_of(config: HfDeepSpeedConfig) -> dict[str, Any]:
    """Return a copy of what the config says about precision."""
    return {name: copy.deepcopy(config.config[name]) for name in _SECTIONS if name in config.config}


# ------------------------------------------------------------------------------------------------
# The frozen settings of one engine: a DeepSpeed config with every ``"auto"`` filled, and its values by name.


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSettings:
    """A resolved config. Make it with `resolve`."""

    config: dict[str, Any]
    """For ``deepspeed.initialize`` only; nothing in it is ``"auto"`` but where DeepSpeed itself knows that word."""
    zero_stage: int = 0
    """0 to 3."""
    offload_optimizer_device: str = "none"
    """``"none"``, ``"cpu"`` or ``"nvme"``."""
    offload_param_device: str = "none"
    """``"none"``, ``"cpu"`` or ``"nvme"``."""
    optimizer_type: str | None = None
    """Lower-case name of the optimizer that the config defines."""
    optimizer_params: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of that optimizer."""
    forces_deepspeed_cpu_optimizer: bool = True
    """Whether only DeepSpeed's own optimizers may step on offloaded state."""

    @classmethod
    def of(cls, config: HfDeepSpeedConfig) -> DeepSpeedSettings:
        """Return the settings of a config that has no ``"auto"`` left; they have a copy of it."""
        config = HfDeepSpeedConfig(config)
        optimizer_type = config.get_value("optimizer.type")
        return cls(
            config=config.config,
            zero_stage=int(config.get_value("zero_optimization.stage", 0)),
            offload_optimizer_device=config.get_value("zero_optimization.offload_optimizer.device") or "none",
            offload_param_device=config.get_value("zero_optimization.offload_param.device") or "none",
            optimizer_type=None if optimizer_type is None else str(optimizer_type).lower(),
            optimizer_params=config.get_value("optimizer.params") or {},
            forces_deepspeed_cpu_optimizer=bool(config.get_value("zero_force_ds_cpu_optimizer", True)),
        )

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state is in host memory or on NVMe."""
        return self.offload_optimizer_device != "none"

    @property
    def defines_adam(self) -> bool:
        """Whether the config's optimizer is Adam or AdamW."""
        return self.optimizer_type in ("adam", "adamw")

    def changed(self, changes: Mapping[str, Any]) -> DeepSpeedSettings:
        """Return settings with other values at these keys of the config, such as ``"zero_optimization.stage"``."""
        config = HfDeepSpeedConfig(self.config)
        for key, value in changes.items():
            config.set_value(key, value)
        return self.of(config)


# ------------------------------------------------------------------------------------------------
# Stand-ins for an optimizer and a schedule that the DeepSpeed config defines.


class DummyOptim:
    """Stands for the optimizer that the DeepSpeed config defines; return it from ``configure_optimizers``.

    Its values fill the ``"auto"`` entries of ``optimizer.params``; an entry that has a value in the config keeps it.

    Args:
        params: The parameters, or parameter groups, that DeepSpeed's optimizer gets.
        lr: Learning rate.
        weight_decay: Weight decay.
        **kwargs: Further values by the config's names, for example ``betas`` and ``eps``.

    Source: accelerate 1.15 ``utils/deepspeed.py``, which ignores ``kwargs``.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = [
            {**each, "params": _listed(each["params"])} if isinstance(each, dict) else each for each in params
        ]
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)


class DummyScheduler:
    """Stands for the schedule that the DeepSpeed config defines, or for one that is made once the optimizer exists.

    Its values fill the ``"auto"`` entries of ``scheduler.params``; an entry that has a value in the config keeps it.
    All steps are optimizer steps of the whole job: nothing is divided by the number of ranks.

    Args:
        optimizer: The optimizer in the code: a `DummyOptim`, or a real one.
        total_num_steps: Length of the schedule; None takes the Trainer's estimate.
        warmup_num_steps: Length of the warm-up.
        lr_scheduler_callable: Makes the schedule from DeepSpeed's optimizer, where the config defines none.
        **kwargs: Further values by the config's names, for example ``warmup_min_lr``.

    Source: accelerate 1.15 ``utils/deepspeed.py``, which ignores ``kwargs``, and whose ``prepare`` divides
    ``total_num_steps`` by the number of ranks but not ``warmup_num_steps``.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


# ------------------------------------------------------------------------------------------------
# One error for everything in which a DeepSpeed config and what stands beside it differ.


def differ(one: Any, other: Any) -> bool:
    """Whether two values of a config differ; a tuple is the list that JSON makes of it."""
    one, other = (list(value) if isinstance(value, tuple) else value for value in (one, other))
    return bool(one != other)


def mismatch_error(mismatches: Sequence[str]) -> ValueError:
    """Return the error that lists all mismatches."""
    return ValueError(
        "The DeepSpeed config contradicts other settings:\n"
        + "\n".join(mismatches)
        + "\nSet each value once: set it to 'auto' in the config (or omit it), or omit the other one."
    )


# ------------------------------------------------------------------------------------------------
# Fills every ``"auto"`` of a DeepSpeed config from what a Trainer, its model and its optimizer know.


_SET_IT = "set it in the config"
_UNDERSTOOD_BY_DEEPSPEED = ("data_types.keep_in_fp32_modules", "pipeline.stages")
_LARGEST_BUCKET = 500_000_000  # elements: DeepSpeed's default
_ADAM = {"betas": [0.9, 0.999], "eps": 1e-8}  # torch's defaults, and those of DeepSpeed's Adam


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """Facts about the training that the config does not have."""

    world_size: int = 1
    """Data-parallel ranks."""
    micro_batch_size: int | None = None
    """Samples in one rank's batch; None where the loaders do not show it."""
    train_batch_size: int | None = None
    """Samples in one rank's batch of training; None where the loaders do not show it, or differ."""
    accumulate_grad_batches: int = 1
    """Of the Trainer; 1 counts as not given."""
    gradient_clip_val: float | None = None
    """Of the Trainer; None and 0 count as not given."""
    clips_by_value: bool = False
    """Whether the Trainer is to clip each gradient, and not their norm."""
    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] = "no"
    """Of the Trainer; ``"no"`` counts as not given."""
    optimizer: DummyOptim | Optimizer | None = None
    """The result of ``configure_optimizers``."""
    scheduler: DummyScheduler | object | None = None
    """The result of ``configure_optimizers``."""
    estimated_steps: float | None = None
    """Optimizer steps of the whole training, if they are known and finite."""
    hidden_size: int | None = None
    """Of the model; see `hidden_size_of`."""
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
    check_features(filling.config)  # which may have been changed since the plugin was made
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
                "the dataloaders have no batch size (a batch sampler, or a dataset that returns batches); "
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
        for name in _SECTIONS:
            key, on = f"{name}.enabled", _is_on(name, wanted)
            if self.config.is_false(key) if on else wanted != "no" and self.config.is_true(key):
                value = self.config.get_value(key)
                self.mismatches.append(f"- {key}: {value!r} in the DeepSpeed config, Trainer(precision) is {wanted!r}")
        # The config may have one of them on and the other open.
        fill_precision(self.config, precision_of(self.config) if wanted == "no" else wanted)

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
            f"the model defines no hidden size (model.config.hidden_size, or its own hidden_size); {_SET_IT}, or add "
            "one to the model"
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
                self.open.setdefault(key, f"no other setting defines it; {_SET_IT}, or omit it for DeepSpeed's default")
        if self.mismatches:
            raise mismatch_error(self.mismatches)
        if self.open:
            listed = "\n".join(f"- {key}: {advice}" for key, advice in self.open.items())
            raise ValueError(
                f"The DeepSpeed config leaves these values open, and no other setting fills them:\n{listed}"
            )

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


# ------------------------------------------------------------------------------------------------
# The origin of the optimizer and the schedule: the DeepSpeed config, with dummies in the code, or the code.


_REMOVE = "remove {0!r} from the DeepSpeed config, or return a {1} from configure_optimizers instead"


def check_optimizer_and_scheduler(config: HfDeepSpeedConfig, optimizer: object, scheduler: object) -> None:
    """Check that each of the two is defined once.

    Args:
        config: The DeepSpeed config.
        optimizer: What ``configure_optimizers`` returned, None for none.
        scheduler: What ``configure_optimizers`` returned, None for none.

    Raises:
        ValueError: If both sides define one, or neither defines what the other stands for; or for DeepSpeed's Muon.

    Source: accelerate 1.15 ``accelerator.py`` (``_prepare_deepspeed``), which takes a model without any optimizer.
    """
    _check_optimizer("optimizer" in config.config, optimizer)
    if str(config.get_value("optimizer.type")).lower() == "muon":
        raise ValueError(
            "The DeepSpeed config defines the optimizer Muon, which DeepSpeed may silently replace by another one for "
            "parameters that zero.Init has partitioned (DeepSpeed#8438), and at stage 0 (DeepSpeed#8441). Use "
            "torch.optim.Muon with AccelFSDPStrategy(fsdp_version=2), or AdamW."
        )
    if scheduler is not None:
        _check_scheduler("scheduler" in config.config, optimizer, scheduler)


def _check_optimizer(in_config: bool, optimizer: object) -> None:
    if isinstance(optimizer, DummyOptim):
        if not in_config:
            raise ValueError(
                "configure_optimizers returns a DummyOptim, but the DeepSpeed config has no 'optimizer' for it to "
                "represent. Add one to the config, or return a real optimizer."
            )
    elif in_config and optimizer is not None:
        raise ValueError(
            f"Both the DeepSpeed config and configure_optimizers ({type(optimizer).__name__}) define an optimizer. "
            f"To choose one, {_REMOVE.format('optimizer', 'DummyOptim(params, lr=...)')}."
        )
    elif not in_config and optimizer is None:
        raise ValueError(
            "Neither the DeepSpeed config nor configure_optimizers defines an optimizer. Return one from "
            "configure_optimizers, or add 'optimizer' to the config and return DummyOptim(self.parameters(), lr=...)."
        )


def _check_scheduler(in_config: bool, optimizer: object, scheduler: object) -> None:
    if not isinstance(scheduler, DummyScheduler):
        if in_config:
            raise ValueError(
                f"Both the DeepSpeed config and configure_optimizers ({type(scheduler).__name__}) define a schedule. "
                f"To choose one, {_REMOVE.format('scheduler', 'DummyScheduler(optimizer, ...)')}."
            )
        if isinstance(optimizer, DummyOptim):
            raise ValueError(
                f"{type(scheduler).__name__} needs a real optimizer, which DummyOptim is not. Return "
                "DummyScheduler(optimizer, lr_scheduler_callable=...), which creates the schedule once the "
                "optimizer exists."
            )
    elif in_config and scheduler.lr_scheduler_callable is not None:
        raise ValueError(
            "Both the DeepSpeed config and DummyScheduler(lr_scheduler_callable=...) define a schedule. Remove "
            "'scheduler' from the config, or omit lr_scheduler_callable."
        )
    elif not in_config and scheduler.lr_scheduler_callable is None:
        raise ValueError(
            "configure_optimizers returns a DummyScheduler, but the DeepSpeed config has no 'scheduler' for it to "
            "represent. Add one to the config, or use DummyScheduler(lr_scheduler_callable=...)."
        )


# ------------------------------------------------------------------------------------------------
# The model's hidden size, from which DeepSpeed's bucket sizes follow.


def hidden_size_of(model: nn.Module) -> int | None:
    """Return the hidden size that a model states, the largest of several; None where it states none.

    Asked are the ``config`` (as transformers has it), the ``hparams`` (as Lightning has it) and the ``hidden_size`` of
    the model, and then the ``config`` of each module inside it.
    """
    for place in (getattr(model, "config", None), getattr(model, "hparams", None), model):
        if (size := _size_in(place)) is not None:
            return size
    inner = (_size_in(getattr(module, "config", None)) for module in model.modules())
    return max((size for size in inner if size is not None), default=None)


def _size_in(source: Any) -> int | None:
    for part in (source, _get(source, "text_config")):
        size = _get(part, "hidden_size")
        sizes = [size] if size is not None else _get(part, "hidden_sizes")
        if isinstance(sizes, list | tuple) and sizes and all(type(size) is int and size > 0 for size in sizes):
            return int(max(sizes))
    return None


def _get(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


# ------------------------------------------------------------------------------------------------
# The keys of a DeepSpeed config that a Trainer can train with. DeepSpeed takes any key at the top, ignores others,
# and leaves some to its own data loader, launcher or pipeline, which a Trainer does not use.


Answer = Literal["tested", "untested", "refused"]


@dataclass(frozen=True)
class Feature:
    """Keys of a DeepSpeed config, such as ``"zero_optimization.stage"``, that have one answer."""

    keys: tuple[str, ...]
    """A section stands for everything in it that has no row of its own."""
    answer: Answer
    """Whether the tests train with it, it is passed to DeepSpeed as it is, or it is an error."""
    note: str
    """The effect of a tested or untested key; for a refused one, what to do instead."""
    off: object = False
    """The value that asks for nothing; so do None and a section in which nothing is on."""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    """Of ZeRO, for which it is the answer."""

    def is_asked_for(self, value: object) -> bool:
        """Whether a key with this value asks for the feature."""
        if isinstance(value, dict):
            inside = [value["enabled"]] if "enabled" in value else value.values()
            return any(map(self.is_asked_for, inside))
        return value is not None and not is_auto_value(value) and value != self.off


def _zero(*names: str) -> tuple[str, ...]:
    return tuple(f"zero_optimization.{name}" for name in names)


_REMOVED = "DeepSpeed 0.19 has removed it: "
_SCALES = "DeepSpeed scales gradients before it reduces them at stages 0 and 1 alone; remove it"
_SEQUENCES = (
    "the Trainer gives each rank sequences of its own under DeepSpeed; use "
    "AccelFSDPStrategy(fsdp_version=2, parallelism_config=ParallelismConfig(sp_size=...))"
)

FEATURES: tuple[Feature, ...] = (
    Feature(
        (
            *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
            *("optimizer", "scheduler", "fp16", "bf16", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
            *_zero("stage", "offload_optimizer", "offload_param", "reduce_bucket_size", "stage3_prefetch_bucket_size"),
            *_zero("stage3_param_persistence_threshold", "stage3_gather_16bit_weights_on_model_save"),
        ),
        "tested",
        "see the other sections of this page",
    ),
    Feature(("managed_gradient_accumulation",), "tested", "the Trainer ends accumulation windows, whatever it says"),
    Feature(
        _zero(
            *(
                "allgather_bucket_size",
                "allgather_partitions",
                "contiguous_gradients",
                "reduce_scatter",
                "overlap_comm",
            ),
            *("use_multi_rank_bucket_allreduce", "round_robin_gradients", "parameter_alignment", "sub_group_size"),
            *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_model_persistence_threshold"),
            *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "leaf_module"),
            *("memory_efficient_linear", "override_module_apply", "enable_sanity_checks", "log_trace_cache_warnings"),
            *("ignore_unused_parameters",),
        ),
        "tested",
        "weights equal a plain loop's",
    ),
    Feature(_zero("zero_hpz_partition_size"), "tested", "ZeRO++ (hpZ): second copies of the weights; 4 processes"),
    Feature(
        _zero("compute_grad_norm"),
        "tested",
        "false, at stages 1 and 2 without clipping, saves the norm: `strategy.last_grad_norm` is None",
    ),
    Feature(
        ("prescale_gradients", "gradient_predivide_factor"),
        "tested",
        "weights equal a plain loop's at stages 0 and 1",
    ),
    Feature(
        ("communication_data_type",),
        "tested",
        "changes numbers: gradients are rounded to it where ranks add them up",
    ),
    Feature(
        ("torch_autocast",),
        "tested",
        "changes numbers: forward and backward run in its dtype; `Trainer(precision=...)` stays '32-true'. float16 is "
        "refused: use `Trainer(precision='16-mixed')`",
    ),
    Feature(
        ("activation_checkpointing",),
        "tested",
        "sets up `deepspeed.checkpointing.checkpoint()`, for models that call it; by itself it checkpoints nothing",
    ),
    Feature(
        ("csv_monitor", "flops_profiler", "comms_logger", "wall_clock_breakdown", "memory_breakdown", "dump_state"),
        "tested",
        "DeepSpeed's own logs, files and printed lines; weights equal a plain loop's",
    ),
    Feature(("timers", "steps_per_print", "disable_python_gc"), "tested", "weights equal a plain loop's"),
    Feature(
        _zero("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"),
        "untested",
        "ZeRO++: changes numbers, weights and gradients travel in 8 or 4 bits; CUDA only",
    ),
    Feature(_zero("zenflow"), "untested", "ZenFlow: changes numbers, most gradients reach the weights later"),
    Feature(_zero("offload_optimizer.super_offload"), "untested", "SuperOffload: steps on the CPU during backward"),
    Feature(_zero("offload_optimizer.cpuadam_cores_perc"), "untested", "the cores that SuperOffload steps on", off=0.8),
    Feature(
        _zero("offload_optimizer.ratio"), "untested", "Twin-Flow: a part of the steps on the device, stage 3", off=1.0
    ),
    Feature(_zero("elastic_checkpoint", "pipeline_loading_checkpoint"), "untested", "how DeepSpeed reads checkpoints"),
    Feature(_zero("load_from_fp32_weights"), "untested", "false: a resume rounds the master weights", off=True),
    Feature(_zero("save_muon_momentum_buffer_in_memory"), "untested", "of DeepSpeed's Muon, which is refused"),
    Feature(("expert_parallel",), "untested", "AutoEP: experts of known MoE layers over the processes"),
    Feature(("use_data_before_expert_parallelism",), "untested", "order of the groups of DeepSpeed's MoE layers"),
    Feature(("hybrid_engine",), "untested", "generates in inference mode between steps, for RLHF"),
    Feature(("data_types",), "untested", "dtypes of parameters, buffers and accumulated gradients"),
    Feature(("weight_quantization",), "untested", "quantizes weights while stage 3 builds them, for inference"),
    Feature(("checkpoint.tag_validation",), "untested", "compares the names of checkpoints over ranks", off="Warn"),
    Feature(
        ("checkpoint.use_node_local_storage", "checkpoint.parallel_write", "checkpoint.checkpoint_serialization"),
        "untested",
        "how DeepSpeed writes checkpoints",
    ),
    Feature(("aio",), "untested", "asynchronous reads and writes of NVMe"),
    Feature(("tensorboard", "wandb", "comet"), "untested", "DeepSpeed's own monitors, whose packages rank 0 needs"),
    Feature(("log_level",), "untested", "DeepSpeed's logger"),
    Feature(
        ("disable_allgather", "vocabulary_size"), "untested", "DeepSpeed 0.19.8 reads it, and does nothing with it"
    ),
    Feature(("msamp",), "untested", "MS-AMP (`enable_msamp=True`), which has to be installed"),
    Feature(
        ("gradient_allreduce_op",),
        "refused",
        "adding up gradients over ranks multiplies them by the number of ranks; multiply the loss in training_step()",
        off="mean",
    ),
    Feature(
        _zero("overlap_comm"),
        "refused",
        "DeepSpeed overlaps at stage 1 only where it ends windows itself; remove it, or use stage 2",
        stages=(1,),
    ),
    Feature(("prescale_gradients",), "refused", _SCALES, stages=(2, 3)),
    Feature(("gradient_predivide_factor",), "refused", _SCALES, off=1.0, stages=(2, 3)),
    Feature(
        _zero("stage3_module_granularity_threshold"),
        "refused",
        "the first backward fails with it; name the layers in zero_optimization.leaf_module",
    ),
    Feature(
        ("compile",),
        "refused",
        "DeepCompile ends accumulation windows itself, as the Trainer does; call torch.compile on layers of the model",
    ),
    Feature(
        ("tensor_parallel",),
        "refused",
        "ranks that share layers need the same batches, which the Trainer does not give them under DeepSpeed; use "
        "AccelFSDPStrategy(fsdp_version=2, parallelism_config=ParallelismConfig(tp_size=...))",
    ),
    Feature(("sequence_parallel_size", "data_parallel_size"), "refused", _SEQUENCES, off=1),
    Feature(("seq_parallel_communication_data_type",), "refused", _SEQUENCES, off="fp32"),
    Feature(
        ("data_efficiency",),
        "refused",
        "sampling and curriculum are of DeepSpeed's own data loader; use a sampler in train_dataloader(), and change "
        "layers or sequence lengths in training_step() in place of random-LTD",
    ),
    Feature(
        ("dataloader_drop_last",), "refused", "DeepSpeed's own data loader reads it; use DataLoader(drop_last=True)"
    ),
    Feature(
        ("autotuning",), "refused", "DeepSpeed's launcher reads it; run `deepspeed --autotuning` on a script alone"
    ),
    Feature(
        ("pipeline",),
        "refused",
        "deepspeed.PipelineModule reads it, which the Trainer cannot step; use stage 3 instead",
    ),
    Feature(
        ("checkpoint.writer", "datastates_ckpt"),
        "refused",
        "accelight writes DeepSpeed's files itself with torch.save; use async_save=True for saves in the background",
    ),
    Feature(("checkpoint.load_universal",), "refused", "use AccelDeepSpeedStrategy(load_universal=True)"),
    Feature(("bfloat16",), "refused", "renamed; write bf16"),
    Feature(_zero("cpu_offload"), "refused", 'renamed; write offload_optimizer={"device": "cpu"}'),
    Feature(_zero("cpu_offload_param"), "refused", 'renamed; write offload_param={"device": "cpu"}'),
    Feature(
        _zero("cpu_offload_use_pin_memory"),
        "refused",
        "renamed; write pin_memory in offload_optimizer and offload_param",
    ),
    Feature(
        _zero("stage3_gather_fp16_weights_on_model_save"),
        "refused",
        "renamed; write stage3_gather_16bit_weights_on_model_save",
    ),
    Feature(_zero("legacy_stage1"), "refused", f"{_REMOVED}remove it, for the stage 1 of today"),
    Feature(("amp",), "refused", f"{_REMOVED}use Trainer(precision='bf16-mixed') or '16-mixed'"),
    Feature(
        ("sparse_gradients",),
        "refused",
        f"{_REMOVED}an embedding made with sparse=True needs no key, and check whether its optimizer takes it",
    ),
    Feature(("curriculum_learning",), "refused", f"{_REMOVED}choose samples in train_dataloader()"),
    Feature(("elasticity",), "refused", f"{_REMOVED}resume with load_universal=True on another number of processes"),
    Feature(
        (
            *("compression_training", "quantize_training", "eigenvalue", "sparse_attention", "graph_harvesting"),
            *("progressive_layer_drop", "nebula"),
            *_zero("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"),
        ),
        "refused",
        f"{_REMOVED}remove it",
    ),
)
"""Every key that DeepSpeed 0.19.8 reads at the top of a config and in ``zero_optimization``."""
_KNOWN = {key.partition(".")[0] for feature in FEATURES for key in feature.keys}
_DECIDE = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "activation_checkpointing"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "communication_data_type", "steps_per_print"),
    *("prescale_gradients", "gradient_predivide_factor", "wall_clock_breakdown"),
)
"""Keys that most configs have, and keys that change numbers."""
_CLOSE = 0.8


def check_features(config: HfDeepSpeedConfig) -> None:
    """Check that a config asks for nothing that would be dropped, and has no key that is nearly one that counts.

    A refused key that asks for nothing is deleted: DeepSpeed rejects some that it has removed although they are off.

    Raises:
        ValueError: With all such keys, and what to do instead.
    """
    top = [key for key in config.config if key not in _KNOWN]
    near = {key: difflib.get_close_matches(key, _DECIDE, n=1, cutoff=_CLOSE) for key in top}
    lines = [f"- {key}: there is no such key. Did you mean {found[0]!r}?" for key, found in near.items() if found]
    if lines:
        raise ValueError("\n".join(["DeepSpeed would ignore a part of this config:", *lines]))
    for feature, key, value in _present(config, "refused"):
        if feature.is_asked_for(value):
            lines.append(f"- {key}={value!r}: {feature.note}.")
        else:
            config.del_config_sub_tree(key)
    dtype = str(config.get_value("torch_autocast.dtype")).removeprefix("torch.")
    if config.is_true("torch_autocast.enabled") and dtype in ("float16", "fp16", "half"):
        lines.append(
            f"- torch_autocast.dtype={dtype!r}: DeepSpeed shows neither its loss scale nor the steps that it "
            "skips; use Trainer(precision='16-mixed')."
        )
    if lines:
        raise ValueError("\n".join(["The DeepSpeed config asks for what a Trainer cannot train with:", *lines]))


def untested_line(config: HfDeepSpeedConfig) -> str | None:
    """Return the line of the log that names what DeepSpeed gets without a test here, or ignores; None for nothing."""
    untested = [key for feature, key, value in _present(config, "untested") if feature.is_asked_for(value)]
    unknown = [key for key in config.config if key not in _KNOWN]
    said = [f"{', '.join(untested)}: passed to DeepSpeed; accelight has no test of it"] if untested else []
    said += [f"{', '.join(unknown)}: DeepSpeed has no such key and ignores it"] if unknown else []
    return f"DeepSpeed config: {'; '.join(said)}." if said else None


def _present(config: HfDeepSpeedConfig, answer: Answer) -> Iterator[tuple[Feature, str, object]]:
    """Yield the keys of a config that have this answer."""
    stage = config.get_value("zero_optimization.stage", 0)
    for feature in FEATURES:
        for key in feature.keys if feature.answer == answer and stage in feature.stages else ():
            node, name = config.find_config_node(key)
            if node is not None and name in node:
                yield feature, key, node[name]
