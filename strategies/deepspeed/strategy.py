"""`AccelDeepSpeedStrategy`: DeepSpeed under Lightning's Trainer, on any device, with Accelerate's semantics."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_debug, rank_zero_info
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import LBFGS, Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from ...checkpoint.manifest import Adapter
from ...state import AcceleratorState, DistributedType, GradientAccumulationPlugin, GradientState, PartialState
from ...state.process_group import explaining_rendezvous
from ...state.utils import named_arguments
from ..common.broadcast import BufferSync, FrozenBase
from ..common.checkpoint_files import AveragedWeights
from ..common.dataloader_state import DataLoaderStates
from ..common.grads import SkippedSteps, TotalNorms
from ..common.items import factor_for
from ..common.launch import (
    CLIPPING,
    pickle_by_init_args,
    warn_if_overruled,
    warn_ignored_process_group_args,
    warn_of_other_precision,
)
from ..common.loop import DeferredWeightLoad, LoopFollowing, LoopTracker
from ..common.modules import PRUNING, adapters_of, check_callbacks, keep_packing, refuse_module_of_fsdp, with_constants
from ..common.signals import Termination
from ..saving.async_save import describe_async_mode, make_async_saver
from ..sharded_tensors.user_code import (
    FullTensors,
    OwnStateDict,
    UserCode,
    callers_code,
    running_as_library,
    step_hooks,
)
from ..upstream.lightning import (
    Callback,
    CombinedLoader,
    DDPStrategy,
    DeepSpeedPrecision,
    DeepSpeedStrategy,
    GradClipAlgorithmType,
    LightningModule,
    Precision,
    Trainer,
    TrainerFn,
    _request_dataloader,
    _validate_device_index_selection,
    is_overridden,
    sized_len,
)
from ..upstream.patches import Patches
from . import engine as engines
from .accumulation import (
    CollectiveOrder,
    EngineBackwards,
    GradientAccumulator,
    gradient_norm,
    hold_parameters,
    hold_parameters_in_forward,
)
from .checkpoint import Checkpointer, check_async, with_trained_parameters
from .ds_config import (
    AUTO,
    DeepSpeedSettings,
    HfDeepSpeedConfig,
    TrainingFacts,
    accumulation_steps,
    check_optimizer_and_scheduler,
    hidden_size_of,
    is_auto_value,
    resolve,
)
from .engine import (
    end_engines_on,
    engine_of,
    free_with_last_reference,
    keep_hooks,
    release_parameters,
    summarise_run,
)
from .library import (
    allow_scalars,
    check_build_locks,
    choose_accelerator,
    deepspeed_library,
    forget_lost_groups,
    ninja_on_path,
    quietly,
    require_deepspeed,
)
from .optimizers import (
    Chosen,
    check_elementwise,
    check_parameters,
    check_real,
    choose,
    compiled_cpu_adam,
    for_offload,
    prefer_torch_adam,
    step_hooks_aside,
)
from .plugin import DeepSpeedPlugin
from .zero_access import ZeroAccess, refuse_change, refuse_norm

# ------------------------------------------------------------------------------------------------
# The Trainer's hooks of `AccelDeepSpeedStrategy`; each delegates to the part that does the work.


ONE_OPTIMIZER = (
    "The optimizer was recreated during fit(): DeepSpeed's engine trains with the one that configure_optimizers() "
    "returned when fit() started. Call fit() again for another optimizer, or change the options in "
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
    _window: GradientAccumulator | None
    _user_code: UserCode | None = None
    _access: ZeroAccess
    _given_optimizer: torch.optim.Optimizer | None = None
    """The user's, in which ZeRO has replaced the parameters or of which it has made another; None at stage 0."""
    _checkpointer: Checkpointer
    _while_fitting: ExitStack
    adapters: Mapping[str, Adapter] = MappingProxyType({})
    """PEFT's adapters in the module, for those who merge checkpoints."""
    save_trainable_only: bool
    """Whether checkpoints leave out what is frozen and unchanged."""
    frozen_base: FrozenBase | None = None
    """The frozen weights that the fit has begun with, if checkpoints leave them out."""
    averages: AveragedWeights | None = None
    """Averages of the weights, which checkpoints have, too."""

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
            raise RuntimeError("The settings are complete only after the strategy's setup: inside fit(), and after it.")
        return self._settings

    @property
    @override
    def deepspeed_engine(self) -> Any:
        """DeepSpeed's engine.

        Raises:
            RuntimeError: Before the Trainer's setup.
        """
        if not hasattr(self.model, "is_gradient_accumulation_boundary"):
            raise RuntimeError("DeepSpeed's engine exists only after the strategy's setup: inside fit(), and after it.")
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
                "Use Trainer(precision=...) without plugins."
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
        self._backward(loss, *args, **kwargs)
        if self._ends_window:
            self._present_window.complete()  # before the hooks that see it

    def _backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        window = self._present_window
        with ExitStack() as stack:
            if self._user_code is not None and window.stage == 3:  # whose other parameters are partitioned there
                stack.enter_context(self._user_code.in_gradient_hooks(window.names))
            window.backward(loss, *args, **kwargs)

    def run_backward_of_user(self, backward: Callable[[], None]) -> None:
        """Run a ``backward()`` that the user has written: each ``loss.backward()`` in it is the engine's.

        Args:
            backward: The module's, with its arguments.
        """
        in_hook = nullcontext() if self._user_code is None else self._user_code.in_hook(ends_window=self._ends_window)
        with in_hook, EngineBackwards(self._backward):
            backward()
        if self._ends_window:
            self._present_window.complete()

    @property
    def _ends_window(self) -> bool:
        return self._is_automatic and GradientState().sync_gradients

    @override
    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._window is not None and optimizer is not self._window.engine.optimizer:
            raise RuntimeError(ONE_OPTIMIZER)
        return super().optimizer_step(optimizer, *args, **kwargs)

    def clip_step(self, max_norm: float) -> None:
        """Clip the gradients of the next optimizer step by their norm; all ranks call it."""
        self._present_window.clip(max_norm)

    def grad_norm(self) -> torch.Tensor:
        """Return the global norm of the gradients before clipping and the step, in one reduction; all ranks call it.

        DeepSpeed itself computes the norm inside its step. Without a step this one stays as ``last_grad_norm``.
        """
        self.last_grad_norm = gradient_norm(self._present_window)
        return self.last_grad_norm

    @property
    def gradient_scale(self) -> float:
        """By what the step is still to divide the gradients: the loss scale, and the factor of the window."""
        return self._present_window.loss_scale / self._present_window.factor

    def take_step(self, **kwargs: Any) -> None:
        """Make the engine clip, step and zero the gradients."""
        engine = self.deepspeed_engine
        in_optimizer = nullcontext() if self._user_code is None else self._user_code.in_optimizer()
        with step_hooks_aside(self._given_optimizer), in_optimizer:
            norm = engines.step(engine, self._present_window, **kwargs)
        if norm is not None or self._present_window.has_stepped:
            self.last_grad_norm = norm
        self.skipped_steps.last = self._present_window.has_stepped and not engine.was_step_applied()
        if self.skipped_steps.last:
            rank_zero_info(
                f"DeepSpeed skipped optimizer step {engine.global_steps}: gradients overflowed "
                f"({engine.skipped_steps} so far)."
            )
        elif self._present_window.has_stepped:
            self.run_step_hooks("post")

    def run_step_hooks(self, when: Literal["pre", "post"]) -> None:
        """Run the user's hooks on the optimizer's step; those before it run before its closure, as torch has it."""
        hooks = step_hooks(self._given_optimizer, when)
        if hooks and self._user_code is not None:
            with self._user_code.in_hook():
                for hook in list(hooks.values()):
                    hook(self._given_optimizer, (), {})
            self._access.sync_to_model()

    def divide_by_items(self, num_items: int | torch.Tensor, optimizer: Any = None) -> None:
        """Divide the gradients by the number of items of all ranks, in manual optimization; all ranks call it.

        Call ``self.manual_backward(loss * num_items)`` for each micro-batch, and this before clipping and
        ``optimizer.step()``. In automatic optimization ``GradientAccumulationPlugin(average_over="items")`` does so.

        Args:
            num_items: This rank's items of all micro-batches since the last step, a whole number.
            optimizer: The one that steps; there is one with DeepSpeed.

        Raises:
            ValueError: On every rank, if no rank has an item.
        """
        self._present_window.complete()
        self._present_window.multiply(factor_for(num_items))

    @property
    def _present_window(self) -> GradientAccumulator:
        if self._window is None:
            raise RuntimeError("There is no optimizer to train with outside fit().")
        return self._window

    # ------------------------------------------------------------------ checkpoints
    def parameter_shards(self) -> dict[str, tuple[torch.Tensor, bool]]:
        """Return this rank's part of what is stepped on for each parameter, sharing memory, and whether it trains."""
        return self._access.parameter_shards()

    def push_parameter_shards(self) -> None:
        """Copy changes of `parameter_shards` to the weights that the model computes with; every rank calls it."""
        self._access.push_parameter_shards()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with nullcontext() if self.lightning_module is None else OwnStateDict.in_save(self.lightning_module):
            weights = super().lightning_module_state_dict()
        self._checkpointer.note_weights(weights)
        return weights

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        self._checkpointer.save(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        self._checkpointer.remove(filepath, partial(super().remove_checkpoint, filepath))

    def wait_for_saves(self) -> None:
        """Return when no checkpoint is being written any more; all processes must call it.

        With ``async_save=True``, a callback that needs a checkpoint just saved calls this first.

        Raises:
            RuntimeError: If the checkpoint could not be saved; on all processes.
        """
        self._checkpointer.wait()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return self._checkpointer.read(checkpoint_path, weights_only)

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False  # load_model_state_dict() has done it

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._deferred_weights.load(partial(self._checkpointer.load, checkpoint, strict=strict))

    @override
    def process_dataloader(self, dataloader: object) -> object:
        self._checkpointer.before_iterating()
        return super().process_dataloader(dataloader)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._checkpointer.before_batch(batch_idx)
        self._sync_to_model()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._sync_to_model()
        return super().validation_step(*args, **kwargs)

    def _sync_to_model(self) -> None:
        """Copy what hooks have changed in ``optimizer.param_groups`` to the weights that the model computes with."""
        if self._window is not None and self._window.engine is self.model and self._window.changes is not None:
            self._window.changes.sync_to_model()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.wait_for_saves()

    # ------------------------------------------------------------------ end
    @override
    def on_exception(self, exception: BaseException) -> None:
        self._checkpointer.close(exception)  # first: others that hear of the error shut the connections down
        super().on_exception(exception)
        engine = self.model
        if self._window is not None and self._window.engine is engine:
            self._window.forget()
            release_parameters(engine)

    @override
    def teardown(self) -> None:
        if self._user_code is not None:
            self._user_code.end()
        free_with_last_reference(self.model)
        self._given_optimizer = None
        self._tracker.close()
        self._termination.detach()
        self._buffers.detach()
        self._while_fitting.close()
        self.skipped_steps.detach()
        # Not Lightning's: moving the module to the CPU would tear parameters from the engine's buffers, and the engine
        # still evaluates and saves what it has trained.
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self._checkpointer.close()


_REFUSED_CALLBACKS = {
    "LearningRateFinder": (
        "(Tuner.lr_find, too) attaches a schedule to the optimizer, but DeepSpeed's is not a torch.optim.Optimizer. "
        "Find the rate with FSDP or on one process, then train with DeepSpeed."
    ),
    "ModelPruning": PRUNING,
    "WeightAveraging": (
        "replaces the weights in checkpoints with averages, but DeepSpeed's engine saves its own weights: the "
        "averages would be lost. Use accelight.callbacks.ShardedEMA, which saves both."
    ),
}


@running_as_library(
    *("setup", "teardown", "training_step", "validation_step", "test_step", "predict_step", "backward", "run_backward"),
    *(
        "optimizer_step",
        "clip_step",
        "grad_norm",
        "take_step",
        "divide_by_items",
        "parameter_shards",
        "push_parameter_shards",
        "save_checkpoint",
        "load_checkpoint",
        "load_model_state_dict",
        "wait_for_saves",
    ),
    *("lightning_module_state_dict", "optimizer_state", "barrier", "on_exception"),
)
@pickle_by_init_args
@named_arguments
class AccelDeepSpeedStrategy(TrainerHooks):
    """Training with DeepSpeed's ZeRO, on any device that DeepSpeed knows, CPU included.

    Give either ``deepspeed_plugin`` or the plugin's fields as keyword arguments; a field left None comes from its
    environment variable, else from the documented default.

    Args:
        deepspeed_plugin: A `DeepSpeedPlugin`, or several by name, the first of which trains the Trainer's module.
        hf_ds_config: A DeepSpeed config: path, dict, JSON or base64 text. ``"auto"`` values are filled from the
            Trainer.
        gradient_accumulation_steps: Micro-batches for each optimizer step. Default: the Trainer's.
        gradient_clipping: Largest norm of the gradients. Default: the Trainer's.
        zero_stage: 0 (nothing is sharded) to 3 (optimizer state, gradients and parameters are). Default 2.
        is_train_batch_min: Whether the smaller of the training and validation batch sizes fills
            ``train_micro_batch_size_per_gpu``, and not the larger.
        offload_optimizer_device: ``"none"`` (default), ``"cpu"`` or ``"nvme"``.
        offload_param_device: ``"none"`` (default), ``"cpu"`` or ``"nvme"``, for stage 3.
        offload_optimizer_nvme_path: Folder on NVMe for the optimizer's state.
        offload_param_nvme_path: Folder on NVMe for parameters.
        zero3_init_flag: Whether modules made in ``configure_model`` are partitioned while they are built. Default True
            for stage 3.
        zero3_save_16bit_model: Whether saving also writes consolidated 16-bit weights, for stage 3.
        transformer_moe_cls_names: Comma-separated class names of mixture-of-experts layers.
        enable_msamp: Whether MS-AMP trains in FP8.
        msamp_opt_level: MS-AMP's optimization level.
        load_universal: Whether a checkpoint may come from another number of ranks: it is converted to DeepSpeed's
            universal form once, in a folder next to it.
        find_unused_parameters: Whether ranks may use different layers in stage 3, too: it then keeps parameters
            gathered from forward to step, as stage 2 does. Stages 0 to 2 allow that anyway.
        broadcast_buffers: Whether buffers (BatchNorm's statistics, memory banks, counters) are process 0's at each
            forward of a fit, where and when ddp broadcasts them. Default True.
        async_save: Write checkpoints in the background while training continues; the loop waits for the copy to host
            memory. See `wait_for_saves`. Default False.
        save_trainable_only: Whether checkpoints leave out what is frozen, such as the base of adapters. The module
            that resumes must have it; other values are an error. Default False.
        exclude_frozen_parameters: Lightning's name for ``save_trainable_only``.
        weights_only: False lets a checkpoint hold any Python object, and so run code when it is read. What
            ``fit(weights_only=...)`` and the like are given wins.
        gradient_accumulation: A `GradientAccumulationPlugin`, or the number of micro-batches for each optimizer step.
        timeout: Of the process group's collectives. Default 30 minutes.
        process_group_backend: Default: gloo on CPU, on an accelerator its own backend, with gloo for CPU tensors.

    Raises:
        ModuleNotFoundError: If DeepSpeed is not installed.
        ValueError: If both a plugin and fields of it are given, or a field or ``async_save`` has a value that is not
            allowed.

    Source: accelerate 1.15 ``DeepSpeedPlugin``, ``accelerator.py`` (``_prepare_deepspeed``); lightning 2.6
    ``DeepSpeedStrategy``.
    """

    strategy_name = "accel_deepspeed"

    def __init__(
        self,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        *,
        hf_ds_config: str | dict[str, Any] | HfDeepSpeedConfig | None = None,
        gradient_accumulation_steps: int | str | None = None,
        gradient_clipping: float | str | None = None,
        zero_stage: int | None = None,
        is_train_batch_min: bool | None = None,
        offload_optimizer_device: str | None = None,
        offload_param_device: str | None = None,
        offload_optimizer_nvme_path: str | None = None,
        offload_param_nvme_path: str | None = None,
        zero3_init_flag: bool | None = None,
        zero3_save_16bit_model: bool | None = None,
        transformer_moe_cls_names: str | None = None,
        enable_msamp: bool | None = None,
        msamp_opt_level: Literal["O1", "O2"] | None = None,
        load_universal: bool = False,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        async_save: bool = False,
        save_trainable_only: bool = False,
        exclude_frozen_parameters: bool = False,
        weights_only: bool = True,
        gradient_accumulation: GradientAccumulationPlugin | int | None = None,
        timeout: timedelta = timedelta(minutes=30),
        process_group_backend: str | None = None,
    ) -> None:
        given = locals()
        fields = {n: given[n] for n in DeepSpeedPlugin.__dataclass_fields__ if given[n] is not None}
        require_deepspeed(type(self).__name__)
        # Not DeepSpeedStrategy's: it imports DeepSpeed, which decides for a device then, and makes its own config.
        DDPStrategy.__init__(self, process_group_backend=process_group_backend, timeout=timeout)
        self.deepspeed_plugins = _plugins(deepspeed_plugin, fields)
        self.config: dict[str, Any] = self.deepspeed_plugin.deepspeed_config
        """The config in use, which Lightning's code reads; complete from the setup on. Ours reads the settings."""
        self.remote_device = None
        self.load_full_weights = False
        self.save_trainable_only = save_trainable_only or exclude_frozen_parameters
        """Whether checkpoints leave out what is frozen."""
        self.last_grad_norm = None
        self.skipped_steps = SkippedSteps()
        self.load_universal = load_universal
        self.find_unused_parameters = find_unused_parameters
        """Whether ranks may use different layers in stage 3."""
        self.weights_only = weights_only
        self._tracker, self._termination = LoopTracker(gradient_accumulation), Termination()
        self._deferred_weights, self._dataloader_states = DeferredWeightLoad(), DataLoaderStates()
        self._buffers = BufferSync(broadcast_buffers)
        self._window = None
        self._checkpointer = Checkpointer(self, make_async_saver(async_save, timeout))
        self._while_fitting = ExitStack()
        self._logged_config: dict[str, Any] | None = None

    # ------------------------------------------------------------------ what it knows
    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The DeepSpeed config in use: without any ``"auto"`` from the Trainer's setup on."""
        return self.config

    # ------------------------------------------------------------------ processes
    @override
    def setup_environment(self) -> None:
        self._refuse_before_setup()
        device = self.root_device
        warn_ignored_process_group_args(self._timeout, self._process_group_backend, self.where_group_starts)
        choose_accelerator(device)
        self._while_fitting.close()  # of a run that was not torn down
        self._while_fitting.enter_context(allow_scalars())
        with explaining_rendezvous():
            super(DeepSpeedStrategy, self).setup_environment()  # DeepSpeedStrategy's takes CUDA alone
        self._termination.begin_run()
        self._deferred_weights.begin()
        self._checkpointer.connect()
        PartialState()._refresh(
            device=device, local_process_index=self.local_rank, num_local_processes=self.num_processes
        )
        precision = self.precision_plugin.accelerate_name
        warn_of_other_precision(self.precision_plugin.precision, precision)
        for plugin in self.deepspeed_plugins.values():
            plugin.set_mixed_precision(precision)
        AcceleratorState._fill(
            mixed_precision=precision,
            deepspeed_plugin=self.deepspeed_plugins,
            distributed_type=DistributedType.DEEPSPEED,
        )

    @override
    def setup_distributed(self) -> None:
        if self.root_device.type != "cpu":
            _validate_device_index_selection(self.parallel_devices or [])
        super(DeepSpeedStrategy, self).setup_distributed()
        if self.cluster_environment is not None:
            before = set(os.environ)
            self._set_node_environment_variables()
            if self.world_size == 1:  # with RANK, a later Trainer believes that a launcher has started it
                for name in set(os.environ) - before:
                    self._while_fitting.callback(os.environ.pop, name, None)
        forget_lost_groups()
        if self.root_device.type == "cpu":
            check_build_locks("deepspeed_shm_comm")
        with quietly(), ninja_on_path():  # on the CPU it compiles that op, and prints it
            deepspeed_library().init_distributed(self._process_group_backend, timeout=self._timeout)

    # ------------------------------------------------------------------ model and optimizer
    @override
    def _init_config_if_needed(self) -> None:
        pass  # the plugin has done it

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        config = self.deepspeed_plugin.dschf
        if config is None or not self.deepspeed_plugin.is_zero3_init_enabled():
            yield
            return
        with deepspeed_library().zero.Init(config_dict_or_path=config.config):
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        if self.lightning_module is not None:
            self._follow_user_code(trainer, self.lightning_module)
        if self.accelerator is None or self.model is None or self.lightning_module is None:
            raise RuntimeError("AccelDeepSpeedStrategy.setup() must be called by the Trainer, with a module connected.")
        self.accelerator.setup(trainer)
        self._termination.attach(trainer)
        self.optimizers, self.lr_scheduler_configs = [], []
        module = self.lightning_module
        refuse_module_of_fsdp(module)
        self.adapters = adapters_of(module, is_sharded=False)
        keep_packing(module)
        check_real(module)
        self.precision_plugin.convert_module(module)  # in place
        self.deepspeed_plugin.set_moe_leaf_modules(module)
        if trainer.state.fn == TrainerFn.FITTING:
            check_callbacks(trainer.callbacks, _REFUSED_CALLBACKS)  # type: ignore[attr-defined]
            self._setup_training(trainer, module)
        else:
            self._setup_evaluation(module)
        self._set_deepspeed_activation_checkpointing()
        self.setup_precision_plugin()
        self.frozen_base = None
        if trainer.state.fn == TrainerFn.FITTING and self.save_trainable_only:
            with with_trained_parameters(self.model):
                self.frozen_base = FrozenBase(with_constants(self.parameter_shards(), module), self.root_device)
        self._deferred_weights.model_is_set_up()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            name, precision = type(self).__name__, str(self.precision_plugin.precision)
            saved_by = describe_async_mode(self._checkpointer.saves)
            summarise_run(name, self.model, self.settings, self.root_device, precision, saved_by).log(trainer)

    def _follow_user_code(self, trainer: Trainer, module: LightningModule) -> None:
        access = self._access = ZeroAccess(module, self.root_device)
        with_parameters = [each for each in module.modules() if next(each.parameters(), None) is not None]
        partitions = self.deepspeed_plugin.zero_stage == 3
        self._user_code = UserCode(access, with_parameters, always_in_steps=partitions)
        OwnStateDict.attach(module, access)
        self._user_code.attach(trainer, module)

    def _setup_training(self, trainer: Trainer, module: LightningModule) -> None:
        config = self.deepspeed_plugin.config_for_trainer(clips=bool(trainer.gradient_clip_val))
        trainer.accumulate_grad_batches = accumulation_steps(config, trainer.accumulate_grad_batches)
        is_given = not is_auto_value(config.get_value("gradient_accumulation_steps", AUTO))
        self._tracker.start_fit(trainer, config="gradient_accumulation_steps (DeepSpeed config)" if is_given else None)
        kept = end_engines_on(module, stage=int(self.deepspeed_plugin.zero_stage or 0))
        chosen = choose(module, config)
        if chosen.real is not None:  # with the states that its constructor may have made
            check_elementwise(chosen.real, int(self.deepspeed_plugin.zero_stage or 0))
        kept.states.take(chosen.real)
        precision = self.precision_plugin.accelerate_name
        early = Patches("loaders")
        self._while_fitting.callback(early.remove)
        loaders = _FitLoaders(trainer, early)
        settings = settings_for_training(self.deepspeed_plugin, trainer, module, chosen, precision, loaders)
        settings = prefer_torch_adam(settings, self.root_device)
        optimizer = chosen.real
        self._given_optimizer = optimizer if settings.zero_stage else None
        check_parameters(chosen, module, settings.zero_stage)
        if optimizer is not None:
            optimizer, settings = for_offload(optimizer, settings)
        elif settings.offloads_optimizer and settings.defines_adam:
            compiled_cpu_adam()
        self._use(settings)
        chosen_parameters = list(chain.from_iterable(chosen.groups(module)))
        engine = engines.start_engine(
            module,
            settings,
            self.root_device,
            optimizer=optimizer,
            parameters=chosen.parameters(module),
            lr_scheduler=chosen.scheduler_callable,
        )
        check_async(self._checkpointer.saves, engine)
        chosen.take_schedule(engine)
        kept.masters.give(engine)
        self.model = engine
        self._follow_buffers(module)
        holds_parameters = settings.zero_stage == 3 and self.find_unused_parameters
        if holds_parameters:
            keep_hooks(engine, hold_parameters(engine))
        elif settings.zero_stage == 3:
            CollectiveOrder(engine, self._timeout or default_pg_timeout)
        self._window = GradientAccumulator(
            engine,
            chosen_parameters,
            self.root_device,
            holds_parameters=holds_parameters,
            items=self._tracker.items,
            gradient_factor=lambda: self._tracker.gradient_factor() if self._is_automatic else 1.0,
        )
        self._access.attach(engine)
        self._window.hooks_before_step = any(
            is_overridden("on_before_optimizer_step", each, parent)
            for parent, each in [(LightningModule, module), *((Callback, each) for each in trainer.callbacks)]  # type: ignore[attr-defined]
        )
        kept.states.give(self._window)
        self._while_fitting.enter_context(self._window.on_module(module))
        if not isinstance(engine.optimizer, torch.optim.Optimizer):  # with torch's, gradients are where they always are
            norms = TotalNorms(partial(refuse_norm, module), partial(refuse_change, module))
            norms.attach()
            self._while_fitting.callback(norms.detach)
        self.optimizers, self.lr_scheduler_configs = [engine.optimizer], chosen.configs
        if precision != "no":  # DeepSpeed skips steps for bf16 gradients that are not finite, too
            self.skipped_steps.hold_back(module, self.lr_scheduler_configs)

    def _setup_evaluation(self, module: LightningModule) -> None:
        before = engine_of(module)
        if before is not None:  # of a fit before this, which has the weights
            self.model, self._settings = before
            self._access.resume(self.model)
            self.config = self._settings.config
            return
        precision = self.precision_plugin.accelerate_name
        settings = settings_for_evaluation(self.deepspeed_plugin, module, precision)
        self._use(settings)
        end_engines_on(module, stage=settings.zero_stage)
        self.model = engines.start_engine(module, settings, self.root_device)
        self._access.attach(self.model)
        if settings.zero_stage == 3 and self.find_unused_parameters:
            keep_hooks(self.model, hold_parameters_in_forward(self.model))

    def prepare_model(
        self, model: nn.Module, plugin: str | DeepSpeedPlugin, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Make an engine for a further model under a plugin of its own, for distillation or reinforcement learning.

        Call it in ``setup()`` or ``configure_model()`` of the module, and keep the result out of the module's own
        submodules (in a list, say): the Trainer's engine would take its parameters for the module's.

        Args:
            model: The model, in place: ZeRO-3 partitions it.
            plugin: Name of one of the strategy's plugins, or a plugin.
            optimizer: Trains it: run ``engine.backward(loss)`` and ``engine.step()``, which ends a window. Without, the
                engine is for inference; parameters keep no gradients, and the model is in evaluation mode.

        Returns:
            DeepSpeed's engine; call it as the model.

        Raises:
            ValueError: If there is no plugin of that name, or DeepSpeed cannot train or hold the model.
            RuntimeError: Before the ranks are connected.
        """
        if not torch.distributed.is_initialized():
            raise RuntimeError("prepare_model() needs the process group: call it in setup() or configure_model().")
        chosen = AcceleratorState().get_deepspeed_plugin(plugin) if isinstance(plugin, str) else plugin
        stage, precision = int(chosen.zero_stage or 0), self.precision_plugin.accelerate_name
        check_real(model)
        if optimizer is not None:
            check_optimizer_and_scheduler(HfDeepSpeedConfig(chosen.deepspeed_config), optimizer, None)
            check_elementwise(optimizer, stage)
            check_parameters(Chosen(optimizer), model, stage)
        chosen.set_moe_leaf_modules(model)
        end_engines_on(model, stage=stage)
        if optimizer is None:
            model.requires_grad_(False).eval()
            return engines.start_engine(model, settings_for_evaluation(chosen, model, precision), self.root_device)
        settings = settings_by_hand(chosen, model, optimizer, precision, self.world_size)
        optimizer, settings = for_offload(optimizer, settings)
        return engines.start_engine(model, settings, self.root_device, optimizer=optimizer)

    def _use(self, settings: DeepSpeedSettings) -> None:
        self._settings = settings
        config = self.config = settings.config
        if config != self._logged_config:
            self._logged_config = json.loads(json.dumps(config, default=str))
            rank_zero_debug(f"DeepSpeed config: {json.dumps(config, default=str)}")

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Refuse to make optimizers anew: the Trainer's setup has given those that there are to the engine.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(ONE_OPTIMIZER)


def _plugins(
    given: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None, fields: dict[str, Any]
) -> dict[str, DeepSpeedPlugin]:
    if given is not None and fields:
        raise ValueError(
            f"AccelDeepSpeedStrategy got deepspeed_plugin and also {', '.join(sorted(fields))}. "
            "Set these on the plugin, or omit the plugin."
        )
    if given is None:
        given = DeepSpeedPlugin(**fields)
    plugins = dict(given) if isinstance(given, Mapping) else {"default": given}
    wrong = {name: type(plugin).__name__ for name, plugin in plugins.items() if not isinstance(plugin, DeepSpeedPlugin)}
    if wrong or not plugins:
        raise TypeError(f"deepspeed_plugin must be a DeepSpeedPlugin or a dict of them; got {wrong or given!r}.")
    return plugins


# ------------------------------------------------------------------------------------------------
# Values of the Trainer, its loaders, its module and its optimizer, for the ``"auto"`` values of a DeepSpeed config.


_MICRO, _TOTAL = "train_micro_batch_size_per_gpu", "train_batch_size"
_WINDOWS_END_OUTSIDE = {"managed_gradient_accumulation": False}  # see [Note: one window]


def settings_for_training(
    plugin: DeepSpeedPlugin,
    trainer: Trainer,
    module: LightningModule,
    chosen: Chosen,
    precision: Any,
    loaders: _FitLoaders,
) -> DeepSpeedSettings:
    """Return the settings that train a Trainer's module.

    Args:
        plugin: Its config is not changed.
        trainer: Gives accumulation, clipping and the number of steps.
        module: The model; gives the hidden size.
        chosen: What ``configure_optimizers`` returned.
        precision: ``"no"``, ``"fp16"`` or ``"bf16"``.
        loaders: Give batch sizes.

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
        micro_batch_size=loaders.micro_batch_size(plugin.is_train_batch_min) if _asks_for_batch_size(config) else None,
        train_batch_size=loaders.train_batch_size(),
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
    """Return the part of the plugin's config that counts without training."""
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


class _FitLoaders:
    """The loaders of a fit, which are asked for before the Trainer asks for them and gets the same ones.

    The Trainer's own ``setup_data()`` would begin to go through them: workers, and batches that are fetched ahead,
    would see weights that are not restored yet.

    Args:
        trainer: Before its fit.
        early: Replacements that end with the fit at the latest.
    """

    def __init__(self, trainer: Trainer, early: Patches) -> None:
        self._trainer, self._early = trainer, early

    def micro_batch_size(self, is_train_batch_min: bool) -> int | None:
        """Return the smallest or largest batch size of the loaders; None if one does not show it.

        As in Accelerate, a validation loader without the attribute does not count.
        """
        sizes = [_batch_size_of(loader) for loader in self._training]
        sizes += [_batch_size_of(loader) for loader in self._validation() if hasattr(loader, "batch_size")]
        known = [size for size in sizes if size is not None]
        if not sizes or len(known) < len(sizes):
            return None
        return min(known) if is_train_batch_min else max(known)

    def train_batch_size(self) -> int | None:
        """Return the batch size of the training loaders; None if one does not show it, or they differ."""
        sizes = {_batch_size_of(loader) for loader in self._training}
        return sizes.pop() if len(sizes) == 1 else None

    @cached_property
    def _training(self) -> list[Any]:
        loop = self._trainer.fit_loop
        if loop._combined_loader is None and self._trainer.limit_train_batches != 0:
            source = loop._data_source
            loaders = _request_dataloader(source)

            def hand_over() -> Any:
                self._early.remove()
                return loaders

            self._early.put(source, "dataloader", hand_over)
            return _flattened(loaders)
        return _flattened(loop._combined_loader)

    def _validation(self) -> list[Any]:
        loop = self._trainer.fit_loop.epoch_loop.val_loop
        if not self._will_validate():
            return []
        loop.setup_data()
        return _flattened(loop._combined_loader)

    def _will_validate(self) -> bool:
        """Return whether this fit comes to a validation; else the Trainer asks for no loader, which may be None."""
        trainer = self._trainer
        if not trainer.enable_validation:
            return False
        every = trainer.check_val_every_n_epoch
        if trainer.num_sanity_val_steps > 0 or every is None:
            return True
        most, num_batches = trainer.max_epochs, self._least_batches()
        if trainer.max_steps != -1 and math.isfinite(num_batches):
            num_steps = max(1, math.ceil(num_batches / trainer.accumulate_grad_batches))
            by_steps = math.ceil(trainer.max_steps / num_steps)
            most = by_steps if most in (None, -1) else min(most, by_steps)
        return most in (None, -1) or most // every > trainer.current_epoch // every

    def _least_batches(self) -> float:
        """Return the training batches of an epoch, or fewer where samplers are still to be cut among the ranks."""
        trainer, limit = self._trainer, self._trainer.limit_train_batches
        if trainer.fit_loop._combined_loader is not None:
            return trainer.num_training_batches
        least = min(map(self._length, self._training), default=0.0)
        return min(least, limit) if isinstance(limit, int) else least * limit

    def _length(self, loader: Any) -> float:
        trainer, length = self._trainer, sized_len(loader)
        if length is None:
            return math.inf
        is_cut = isinstance(loader, DataLoader) and trainer._data_connector._requires_distributed_sampler(loader)
        return length // trainer.world_size if is_cut else length


def _flattened(loaders: Any) -> list[Any]:
    if loaders is None:
        return []
    return list((loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)).flattened)


def _batch_size_of(loader: Any) -> int | None:
    for source in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(source, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


def _estimated_steps(trainer: Trainer, config: HfDeepSpeedConfig) -> float | None:
    return float(trainer.estimated_stepping_batches) if config.is_auto("scheduler.params.total_num_steps") else None


# ------------------------------------------------------------------------------------------------
# Precision under DeepSpeed: its engine runs backward and the step; the strategy says when gradients are complete.


class AccelDeepSpeedPrecision(DeepSpeedPrecision):
    """The meaning of ``Trainer(precision=...)`` under `AccelDeepSpeedStrategy`.

    Args:
        precision: ``"32-true"``; ``"bf16-mixed"`` or ``"16-mixed"`` (half weights and computation, fp32 master weights
            in the optimizer); ``"bf16-true"`` or ``"16-true"`` (the same, and the module made in half precision).
        strategy: The strategy it works for.

    Raises:
        ValueError: If ``precision`` is another.
    """

    def __init__(self, precision: str, strategy: TrainerHooks) -> None:
        super().__init__(precision)  # type: ignore[arg-type]
        self._strategy = strategy

    @property
    def accelerate_name(self) -> str:
        """The same in Accelerate's words: ``no``, ``fp16`` or ``bf16``."""
        return {"16": "fp16", "bf16": "bf16"}.get(self.precision.split("-")[0], "no")

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        if is_overridden("backward", model):
            self._strategy.run_backward_of_user(partial(model.backward, tensor, *args, **kwargs))
        else:
            self._strategy.run_backward(tensor, *args, **kwargs)

    @override
    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if clip_val > 0:
            if gradient_clip_algorithm != GradClipAlgorithmType.NORM:
                raise ValueError(
                    "DeepSpeed clips gradients by their norm only. Use clip_gradients(..., "
                    "gradient_clip_algorithm='norm')."
                )
            self._strategy.clip_step(float(clip_val))

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if isinstance(optimizer, LBFGS):
            raise TypeError(
                "LBFGS evaluates its closure several times, which DeepSpeed cannot do. Use another optimizer."
            )
        self._strategy.run_step_hooks("pre")
        with callers_code():
            result = closure()
        self._after_closure(model, optimizer)
        self._strategy.take_step(**kwargs)
        return result
