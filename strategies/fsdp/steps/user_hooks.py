"""Whether the user's code runs at certain moments of a window, and may look at parameters or change them there."""

from __future__ import annotations

from ...upstream.lightning import Callback, LightningModule, Trainer, is_overridden

_BEFORE_BACKWARD = ("on_before_zero_grad", "on_before_backward", "optimizer_zero_grad")
_BETWEEN_BATCHES = (
    *_BEFORE_BACKWARD,
    "on_after_backward",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_validation_model_zero_grad",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_save_checkpoint",
)
_ONLY_LOOK = ("lightning.pytorch.callbacks.", "pytorch_lightning.callbacks.", "accelight.")
"""Modules whose callbacks change no weights there, but for those that say so by their names."""
_CHANGE_WEIGHTS = ("WeightAveraging", "StochasticWeightAveraging")


def looks_before_backward(trainer: Trainer, module: LightningModule) -> bool:
    """Return whether anybody's code runs between a training step and its backward."""
    return _overrides(trainer, module, _BEFORE_BACKWARD)


def looks_between_batches(trainer: Trainer, module: LightningModule) -> bool:
    """Return whether anybody's code runs between the micro-batches of a window."""
    return _overrides(trainer, module, _BETWEEN_BATCHES)


def _overrides(trainer: Trainer, module: LightningModule, hooks: tuple[str, ...]) -> bool:
    callbacks = [each for each in trainer.callbacks if not _only_looks(each)]  # type: ignore[attr-defined]
    return any(
        hasattr(parent, hook) and is_overridden(hook, each)
        for parent, each in [(LightningModule, module), *((Callback, each) for each in callbacks)]
        for hook in hooks
    )


def _only_looks(callback: Callback) -> bool:
    changes = any(cls.__name__ in _CHANGE_WEIGHTS for cls in type(callback).__mro__)
    return type(callback).__module__.startswith(_ONLY_LOOK) and not changes
