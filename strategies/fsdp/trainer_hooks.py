"""What the Trainer calls while it runs: each hook of `AccelFSDPStrategy` goes to the part of it that does the work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from ...checkpoint.report import MergeReport
from ..common.full_tensors import FullTensors
from ..common.gradients import average_over_ranks, gradients_of, scale_gradients
from ..common.loop_following import LoopFollowing
from ..common.skipped_steps import SkippedSteps
from ..common.total_norms import TotalNorms
from ..common.user_code import UserCode
from ..upstream.lightning import (
    _PATH,
    DoublePrecision,
    FSDPPrecision,
    FSDPStrategy,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from .checkpoints.checkpointer import Checkpointer
from .engines.base import Engine
from .precision import AccelFSDPPrecision, check_scaler
from .running import Running
from .steps.unreduced_gradients import ZeroGradFollowing
from .summary import let_go
from .units.sharded_root import ShardedForm

_log = logging.getLogger(__name__)
_SAY_A_FLAG = (FSDPPrecision, MixedPrecision, HalfPrecision, DoublePrecision, Precision)
"""Precision plugins of Lightning's that are no more than a value of ``Trainer(precision=...)``."""


class TrainerHooks(FullTensors, LoopFollowing, FSDPStrategy):
    """Runs steps, gradients and checkpoints of a sharded module; `AccelFSDPStrategy` is the whole."""

    _engine: Engine[Any] | None = None
    _form: ShardedForm | None = None
    _running: Running
    _user_code: UserCode | None = None
    _reshard_during_accumulation: bool
    _checkpointer: Checkpointer
    _zero_grads: ZeroGradFollowing
    _total_norms: TotalNorms
    skipped_steps: SkippedSteps
    """Whether the gradient scaler left the last optimizer step out."""
    last_grad_norm: torch.Tensor | None
    """Global norm of the gradients before the last clipping by norm, a scalar."""

    # ------------------------------------------------------------------ what it knows
    @property
    def engine(self) -> Engine[Any]:
        """The FSDP1 or FSDP2 engine.

        Raises:
            RuntimeError: Before the processes are connected.
        """
        if self._engine is None:
            raise RuntimeError("The engine exists once the Trainer has connected the processes: in setup() and later.")
        return self._engine

    @property
    def form(self) -> ShardedForm:
        """The sharded model and what sharding hid of it.

        Raises:
            RuntimeError: Before the model is sharded.
        """
        if self._form is None:
            raise RuntimeError("There is no sharded model yet: it exists from the strategy's setup on.")
        return self._form

    @property
    @override
    def precision_plugin(self) -> AccelFSDPPrecision:
        if not isinstance(self._precision_plugin, AccelFSDPPrecision):
            self._precision_plugin = AccelFSDPPrecision("32-true", self)
        return self._precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is None or isinstance(precision_plugin, AccelFSDPPrecision):
            self._precision_plugin = precision_plugin
        elif type(precision_plugin) in _SAY_A_FLAG:  # made by the Trainer from its `precision`, or given in `plugins`
            check_scaler(precision_plugin)
            self._precision_plugin = AccelFSDPPrecision(str(precision_plugin.precision), self)
        else:
            raise TypeError(
                f"AccelFSDPStrategy cannot work with {type(precision_plugin).__name__}, only with "
                f"{', '.join(cls.__name__ for cls in _SAY_A_FLAG)}. Use Trainer(precision=...), and leave it out of "
                "plugins=[...]."
            )

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last optimizer step was left out because fp16 gradients overflowed."""
        return self.skipped_steps.last

    # ------------------------------------------------------------------ loops and gradients
    def run_backward(self, backward: Callable[[], None], *, keeps_graph: bool = False) -> None:
        """Run a backward; gradients are what one process would have when it ends, if it reduces them.

        Args:
            backward: Torch's, or whatever calls it.
            keeps_graph: Whether there may be another one of the same graph.
        """
        self._running.backward(backward, keeps_graph=keeps_graph)

    def _drop_unreduced(self, parameters: Iterable[nn.Parameter]) -> None:
        self.engine.drop_unreduced(self.form.root, parameters)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._running.evaluate("validation", partial(super().validation_step, *args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._running.evaluate("test", partial(super().test_step, *args, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._running.evaluate("predict", partial(super().predict_step, *args, **kwargs))

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._checkpointer.close(exception)
        if isinstance(exception, torch.OutOfMemoryError) and not self._reshard_during_accumulation:
            _log.error("Out of memory with reshard_during_accumulation=False: set it to True to hold shards alone.")

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        if self._tracker.plugin.sync_each_batch:
            yield
            return
        with self._running.accumulating(), self._buffers.accumulating():
            yield

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        super().pre_backward(closure_loss)
        self._running.before_backward()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        result = self._running.train(partial(super().training_step, *args, **kwargs))
        if self._is_manual:
            self.precision_plugin.update_scale()
        return result

    @property
    def _is_manual(self) -> bool:
        return self.lightning_module is not None and not self.lightning_module.automatic_optimization

    def finish_gradients(self, optimizer: Optimizer, *, rescale: bool) -> None:
        """Complete the gradients before they are unscaled, clipped and used; called once for each optimizer step.

        Args:
            optimizer: Whose gradients.
            rescale: Whether a shorter last window is divided by the micro-batches it really has.
        """
        self._checkpointer.before_optimizer_step()
        self._average_unsharded(optimizer)
        factor = self._tracker.short_window_factor
        if rescale and factor != 1.0:
            scale_gradients(gradients_of(self._parameters_of(optimizer)), factor)

    def clip_grad_norm(
        self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the optimizer's gradients by their global norm over all shards.

        Args:
            optimizer: Whose gradients.
            max_norm: Largest norm afterwards.
            norm_type: p of the p-norm; ``inf`` for the largest absolute value.
            error_if_nonfinite: Whether to raise if the norm is NaN or infinite; the gradients are useless then.

        Returns:
            The norm before clipping, a scalar, the same on every rank; also kept as ``last_grad_norm``.

        Raises:
            RuntimeError: If ``error_if_nonfinite`` and the norm is not finite; on every rank.
        """
        self.prepare_to_clip(optimizer)
        norm = self.engine.clip_grad_norm(self.form.root, self._parameters_of(optimizer), max_norm, norm_type)
        self.last_grad_norm = norm
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"The gradients' norm of order {norm_type} is {norm.item()}: they cannot be clipped.")
        return norm

    def prepare_to_clip(self, optimizer: Optimizer) -> None:
        """Make the optimizer's gradients what is to be clipped: in manual optimization nobody else has yet."""
        if self._is_manual:
            self._average_unsharded(optimizer)
            self.precision_plugin.unscale(optimizer)

    def _norm_of(self, gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor | None:
        """Return the norm of gradients that the user clips; None if it is torch's business."""
        parameters = list(self.form.root.parameters())
        known = {id(gradient) for gradient in gradients_of(parameters)}
        if gradients and not any(id(gradient) in known for gradient in gradients):
            return None
        if self._is_manual:
            average_over_ranks(parameter for parameter in parameters if parameter in self.form.unsharded)
        return self.engine.norm_of(self.form.root, gradients, norm_type)

    def _average_unsharded(self, optimizer: Optimizer) -> None:
        unsharded = self.form.unsharded
        if unsharded:
            average_over_ranks(parameter for parameter in self._parameters_of(optimizer) if parameter in unsharded)

    @staticmethod
    def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    # ------------------------------------------------------------------ checkpoints
    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._checkpointer.model_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._checkpointer.optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        self._checkpointer.save(checkpoint, str(filepath), storage_options)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        self._checkpointer.remove(filepath, partial(super().remove_checkpoint, filepath))

    def wait_for_saves(self) -> None:
        """Return when no checkpoint is being written any more; all processes must call it.

        With ``async_save=True``, a callback that needs a checkpoint just saved calls this first.

        Raises:
            RuntimeError: If the checkpoint could not be saved; on all processes.
        """
        self._checkpointer.wait()

    def save_safetensors(
        self,
        path: _PATH,
        max_shard_size: str | int | None = None,
        dtype: str | torch.dtype | None = None,
        *,
        strip_prefix: str | None = None,
    ) -> MergeReport:
        """Save the weights as safetensors; each process writes its own bytes and none gathers them. All must call it.

        The files are those that ``merge_fsdp_weights(reflink=False)`` makes of a sharded checkpoint, and appear when
        complete.

        Args:
            path: A file ``NAME.safetensors``, or a folder for ``model.safetensors``, which all processes see.
            max_shard_size: Split into files of at most this size (``"5GB"``, bytes), with Hugging Face's index.
            dtype: Convert floating-point tensors (``"bf16"``, ``"float16"``, a ``torch.dtype``).
            strip_prefix: Keep what lies under this attribute of the LightningModule, named as in the inner model;
                ``"auto"`` finds it.

        Raises:
            RuntimeError: On every process, naming the one that failed; or if some processes do not call it.
        """
        return self._checkpointer.save_safetensors(
            str(path), max_shard_size=max_shard_size, dtype=dtype, strip_prefix=strip_prefix
        )

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True  # after on_fit_start, in which callbacks may change parameter groups

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        return self._checkpointer.read(str(checkpoint_path), weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._held_weights.load(partial(self._checkpointer.load_weights, checkpoint, strict=strict))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpointer.load_optimizers(checkpoint)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        self._checkpointer.before_iterating()
        return super().process_dataloader(dataloader)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._checkpointer.before_batch(batch_idx)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.wait_for_saves()

    # ------------------------------------------------------------------ end
    @override
    def teardown(self) -> None:
        if self._user_code is not None:
            self._user_code.detach()
        self._tracker.close()
        self._termination.let_go()
        self._buffers.detach()
        if self.lightning_module is not None:
            self.skipped_steps.let_go(self.lightning_module)
            if (trainer := self.lightning_module._trainer) is not None:
                let_go(trainer.callbacks)  # type: ignore[attr-defined]
        self._zero_grads.let_go()
        self._total_norms.let_go()
        if self._form is not None:
            self.engine.end_training(self._form.root)
        super().teardown()
        self._checkpointer.close()
