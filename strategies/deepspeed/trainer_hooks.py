"""What the Trainer calls while it runs: each hook of `AccelDeepSpeedStrategy` goes to the part that does the work."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from ...state import GradientState
from ..common.full_tensors import FullTensors
from ..common.loop_following import LoopFollowing
from ..common.skipped_steps import SkippedSteps
from ..common.user_code import UserCode
from ..upstream.lightning import DeepSpeedPrecision, DeepSpeedStrategy, Precision
from .checkpoints.checkpointer import Checkpointer
from .config.plugin import DeepSpeedPlugin
from .config.settings import DeepSpeedSettings
from .engines import engine as engines
from .engines.engine_registry import release_parameters
from .engines.window import EngineBackwards, Window
from .engines.zero_access import ZeroAccess
from .precision import AccelDeepSpeedPrecision

ONE_OPTIMIZER = (
    "The optimizer was made anew during fit(): DeepSpeed's engine trains with the one that configure_optimizers() "
    "returned when fit() began. Call fit() once more for another optimizer, or change the options in "
    "optimizer.param_groups."
)


class TrainerHooks(FullTensors, LoopFollowing, DeepSpeedStrategy):
    """Runs steps, gradients and checkpoints of an engine; `AccelDeepSpeedStrategy` is the strategy that users make."""

    deepspeed_plugins: dict[str, DeepSpeedPlugin]
    load_universal: bool
    """Whether a checkpoint may come from another number of ranks."""
    weights_only: bool
    """Whether checkpoints may hold tensors and plain values only."""
    last_grad_norm: torch.Tensor | None
    """Global norm of the gradients before clipping at the last optimizer step, a scalar."""
    skipped_steps: SkippedSteps
    """Whether the loss scaler left the last optimizer step out."""
    _settings: DeepSpeedSettings | None = None
    _window: Window | None
    _user_code: UserCode | None = None
    _access: ZeroAccess
    _checkpointer: Checkpointer
    _while_fitting: ExitStack

    # ------------------------------------------------------------------ what it knows
    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin:
        """The plugin that trains the Trainer's module: the first."""
        return next(iter(self.deepspeed_plugins.values()))

    @property
    def settings(self) -> DeepSpeedSettings:
        """The settings of the engine.

        Raises:
            RuntimeError: Before the Trainer's setup.
        """
        if self._settings is None:
            raise RuntimeError("The settings are complete from the strategy's setup on: inside fit(), and after it.")
        return self._settings

    @property
    @override
    def deepspeed_engine(self) -> Any:
        """DeepSpeed's engine.

        Raises:
            RuntimeError: Before the Trainer's setup.
        """
        if not hasattr(self.model, "is_gradient_accumulation_boundary"):
            raise RuntimeError("DeepSpeed's engine exists from the strategy's setup on: inside fit(), and after it.")
        return self.model

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last optimizer step was left out because fp16 or bf16 gradients overflowed."""
        return self.skipped_steps.last

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        return False  # else the Trainer leaves the end of a window to the engine's own count, and the last one is lost

    @property
    @override
    def precision_plugin(self) -> AccelDeepSpeedPrecision:
        if not isinstance(self._precision_plugin, AccelDeepSpeedPrecision):
            self._precision_plugin = AccelDeepSpeedPrecision("32-true", self)
        return self._precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is None or isinstance(precision_plugin, AccelDeepSpeedPrecision):
            self._precision_plugin = precision_plugin
        elif isinstance(precision_plugin, DeepSpeedPrecision):  # made by the Trainer from its `precision` argument
            self._precision_plugin = AccelDeepSpeedPrecision(self._precision_wanted(precision_plugin.precision), self)
        else:
            raise TypeError(
                f"AccelDeepSpeedStrategy cannot work with {type(precision_plugin).__name__}. "
                "Use Trainer(precision=...) and leave plugins=... out."
            )

    def _precision_wanted(self, precision: str) -> str:
        """Return the Trainer's precision, or the half precision that the config switches on beside its default."""
        if precision != "32-true":
            return precision
        own = self.deepspeed_plugin.own_precision()
        return {"fp16": "16-mixed", "bf16": "bf16-mixed", "no": precision}[own]

    # ------------------------------------------------------------------ gradients
    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self._buffers.accumulating():
            yield  # the engine knows from the boundary what to communicate

    def run_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the engine's backward; the last of a window makes the gradients complete.

        Args:
            loss: The micro-batch's loss, divided by the number of accumulation steps as the Trainer does it.
            *args: For ``engine.backward``.
            **kwargs: For ``engine.backward``.
        """
        window = self._present_window
        window.backward(loss, *args, **kwargs)
        if self._ends_window:
            window.complete()  # before the hooks that see it

    def run_backward_of_user(self, backward: Callable[[], None]) -> None:
        """Run a ``backward()`` that the user has written: each ``loss.backward()`` in it is the engine's.

        Args:
            backward: The module's, with its arguments.
        """
        window = self._present_window
        in_hook = nullcontext() if self._user_code is None else self._user_code.in_hook(ends_window=self._ends_window)
        with in_hook, EngineBackwards(window.backward):
            backward()
        if self._ends_window:
            window.complete()

    @property
    def _ends_window(self) -> bool:
        return self._is_automatic and GradientState().sync_gradients

    @override
    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._window is not None and optimizer is not self._window.engine.optimizer:
            raise RuntimeError(ONE_OPTIMIZER)
        return super().optimizer_step(optimizer, *args, **kwargs)

    def clip_step(self, max_norm: float) -> None:
        """Let the next optimizer step clip its gradients by their norm."""
        self._present_window.clip(max_norm)

    def take_step(self, **kwargs: Any) -> None:
        """Let the engine clip, step and zero the gradients."""
        engine = self.deepspeed_engine
        factor = self._tracker.short_window_factor if self._is_automatic else 1.0
        self.last_grad_norm = engines.step(engine, self._present_window, factor, **kwargs)
        self.skipped_steps.last = self._present_window.has_stepped and not engine.was_step_applied()
        if self.skipped_steps.last:
            rank_zero_info(
                f"DeepSpeed skipped optimizer step {engine.global_steps}: gradients overflowed "
                f"({engine.skipped_steps} so far)."
            )

    @property
    def _present_window(self) -> Window:
        if self._window is None:
            raise RuntimeError("There is no optimizer to train with outside fit().")
        return self._window

    @property
    def _is_automatic(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.automatic_optimization

    # ------------------------------------------------------------------ checkpoints
    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        self._checkpointer.save(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return self._checkpointer.read(checkpoint_path, weights_only)

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False  # load_model_state_dict() has done it

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._held_weights.load(partial(self._checkpointer.load, checkpoint, strict=strict))

    @override
    def process_dataloader(self, dataloader: object) -> object:
        self._checkpointer.before_iterating()
        return super().process_dataloader(dataloader)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._checkpointer.before_batch(batch_idx)
        self._let_changes_reach_model()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._let_changes_reach_model()
        return super().validation_step(*args, **kwargs)

    def _let_changes_reach_model(self) -> None:
        """Let the model compute with what hooks have changed in ``optimizer.param_groups``."""
        if self._window is not None and self._window.engine is self.model and self._window.changes is not None:
            self._window.changes.reach_model()

    # ------------------------------------------------------------------ end
    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        engine = self.model
        if self._window is not None and self._window.engine is engine:
            self._window.forget()
            release_parameters(engine)

    @override
    def teardown(self) -> None:
        if self._user_code is not None:
            self._user_code.detach()
        self._tracker.close()
        self._termination.let_go()
        self._buffers.detach()
        self._while_fitting.close()
        if self.lightning_module is not None:
            self.skipped_steps.let_go(self.lightning_module)
        # Not Lightning's: moving the module to the CPU would tear parameters from the engine's buffers, and the engine
        # still evaluates and saves what it has trained.
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
