"""What the Trainer, its loaders, its module and its optimizer tell, for the ``"auto"`` values of a DeepSpeed config."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..common.launcher_variables import CLIPPING, warn_if_overruled
from ..upstream.lightning import LightningModule, Trainer, is_overridden
from .config.auto_values import TrainingFacts, resolve
from .config.hf_config import AUTO, HfDeepSpeedConfig, is_auto_value
from .config.hidden_size import hidden_size_of
from .config.plugin import DeepSpeedPlugin
from .config.settings import DeepSpeedSettings
from .engines.optimizers import Chosen

_MICRO, _TOTAL = "train_micro_batch_size_per_gpu", "train_batch_size"
_WINDOWS_END_OUTSIDE = {"managed_gradient_accumulation": False}  # see [Note: one window]


def settings_for_training(
    plugin: DeepSpeedPlugin, trainer: Trainer, module: LightningModule, chosen: Chosen, precision: Any
) -> DeepSpeedSettings:
    """Return the settings that train a Trainer's module.

    Args:
        plugin: Its config is not changed.
        trainer: Gives batch size, accumulation, clipping and the number of steps.
        module: The model; gives the hidden size.
        chosen: What ``configure_optimizers`` returned.
        precision: ``"no"``, ``"fp16"`` or ``"bf16"``.

    Raises:
        ValueError: If the config contradicts the Trainer, or a value cannot be found out; it names each key.
    """
    algorithm = trainer.gradient_clip_algorithm
    clip_val = trainer.gradient_clip_val
    config = plugin.config_for_trainer(clips=bool(clip_val))
    config.config.setdefault("zero_allow_untested_optimizer", True)
    if clip_val and is_auto_value(config.get_value("gradient_clipping", AUTO)):  # else a difference is an error
        warn_if_overruled(CLIPPING, float(clip_val), f"Trainer(gradient_clip_val={clip_val})")
    facts = TrainingFacts(
        world_size=trainer.world_size,
        micro_batch_size=_micro_batch_size(trainer, plugin.is_train_batch_min)
        if _asks_for_batch_size(config)
        else None,
        train_batch_size=_train_batch_size(trainer),
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        gradient_clip_val=None if clip_val is None else float(clip_val),
        clips_by_value=algorithm is not None and algorithm.value == "value",
        mixed_precision=precision,
        optimizer=chosen.optimizer,
        scheduler=chosen.scheduler,
        estimated_steps=_estimated_steps(trainer, config),
        hidden_size=hidden_size_of(module),
        num_elements=_num_elements(module),
    )
    settings = resolve(config, facts).changed(_WINDOWS_END_OUTSIDE)
    if is_overridden("configure_gradient_clipping", module) and trainer.gradient_clip_val is not None:
        return settings.changed({"gradient_clipping": 0.0})  # that method decides
    return settings


def settings_by_hand(
    plugin: DeepSpeedPlugin, module: nn.Module, optimizer: Optimizer, precision: Any, world_size: int
) -> DeepSpeedSettings:
    """Return the settings for a model that a loop by hand trains: its ``step()`` ends a window."""
    config = HfDeepSpeedConfig(plugin.deepspeed_config)
    config.config.setdefault("zero_allow_untested_optimizer", True)
    for key in (_TOTAL, "gradient_accumulation_steps"):
        config.del_config_sub_tree(key)
    facts = TrainingFacts(
        world_size=world_size,
        micro_batch_size=1,  # for DeepSpeed's counters alone
        mixed_precision=precision,
        optimizer=optimizer,
        hidden_size=hidden_size_of(module),
        num_elements=_num_elements(module),
    )
    return resolve(config, facts).changed(_WINDOWS_END_OUTSIDE)


def settings_for_evaluation(plugin: DeepSpeedPlugin, module: nn.Module, precision: Any) -> DeepSpeedSettings:
    """Return what of the plugin's config counts without training."""
    config = HfDeepSpeedConfig(plugin.deepspeed_config)
    for key in ("optimizer", "scheduler", _TOTAL, _MICRO, "gradient_accumulation_steps", "gradient_clipping"):
        config.del_config_sub_tree(key)
    if not config.is_zero3():  # nothing to shard without gradients and optimizer state
        config.del_config_sub_tree("zero_optimization")
    facts = TrainingFacts(micro_batch_size=1, mixed_precision=precision, hidden_size=hidden_size_of(module))
    resolved = HfDeepSpeedConfig(resolve(config, facts).config)
    resolved.del_config_sub_tree(_TOTAL)  # of one rank alone, and unused
    return DeepSpeedSettings.of(resolved)


def _num_elements(module: nn.Module) -> int:
    """Return the elements of all parameters, frozen ones too, since they may be thawed; partitioned or not."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())


def _asks_for_batch_size(config: HfDeepSpeedConfig) -> bool:
    return config.is_auto(_MICRO) or (_MICRO not in config.config and is_auto_value(config.get_value(_TOTAL, AUTO)))


def _micro_batch_size(trainer: Trainer, is_train_batch_min: bool) -> int | None:
    """Return the smallest or largest batch size of the loaders; None if one does not tell."""
    sizes = [_batch_size_of(loader) for loader in (*_training_loaders(trainer), *_validation_loaders(trainer))]
    known = [size for size in sizes if size is not None]
    if not sizes or len(known) < len(sizes):
        return None
    return min(known) if is_train_batch_min else max(known)


def _train_batch_size(trainer: Trainer) -> int | None:
    """Return the batch size of the training loaders; None if one does not tell, or they differ."""
    sizes = {_batch_size_of(loader) for loader in _training_loaders(trainer)}
    return sizes.pop() if len(sizes) == 1 else None


def _training_loaders(trainer: Trainer) -> Iterator[Any]:
    loop = trainer.fit_loop
    loop.setup_data()
    if loop._combined_loader is not None:
        yield from loop._combined_loader.flattened


def _validation_loaders(trainer: Trainer) -> Iterator[Any]:
    loop = trainer.fit_loop.epoch_loop.val_loop
    if not _will_validate(trainer):
        return
    loop.setup_data()
    if loop._combined_loader is not None:
        yield from loop._combined_loader.flattened


def _will_validate(trainer: Trainer) -> bool:
    """Return whether this fit comes to a validation: the Trainer asks for no loader otherwise, which may be None."""
    if not trainer.enable_validation:
        return False
    every = trainer.check_val_every_n_epoch
    if trainer.num_sanity_val_steps > 0 or every is None:
        return True
    most = trainer.max_epochs
    if trainer.max_steps != -1 and math.isfinite(trainer.num_training_batches):
        num_steps = max(1, math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches))
        by_steps = math.ceil(trainer.max_steps / num_steps)
        most = by_steps if most in (None, -1) else min(most, by_steps)
    return most in (None, -1) or most // every > trainer.current_epoch // every


def _batch_size_of(loader: Any) -> int | None:
    for source in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(source, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


def _estimated_steps(trainer: Trainer, config: HfDeepSpeedConfig) -> float | None:
    return float(trainer.estimated_stepping_batches) if config.is_auto("scheduler.params.total_num_steps") else None
