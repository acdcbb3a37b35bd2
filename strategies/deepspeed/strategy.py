"""`AccelDeepSpeedStrategy`: DeepSpeed under Lightning's Trainer, on any device, with Accelerate's semantics."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_debug
from torch import nn
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from ...state import AcceleratorState, DistributedType, GradientAccumulationPlugin, PartialState
from ...state.arguments import named_arguments
from ...state.process_group import explaining_interfaces
from ..common.buffer_sync import BufferSync
from ..common.held_weights import HeldWeights
from ..common.launcher_variables import warn_of_other_precision
from ..common.live_group import tell_what_comes_too_late
from ..common.loader_places import LoaderPlaces
from ..common.loop_tracker import LoopTracker
from ..common.made_again import made_again
from ..common.refused_callbacks import PRUNING, check_callbacks
from ..common.sharded_elsewhere import refuse_module_of_fsdp
from ..common.skipped_steps import SkippedSteps
from ..common.termination import Termination
from ..common.total_norms import TotalNorms
from ..common.user_code import UserCode, running_as_library
from ..upstream.lightning import (
    Callback,
    DDPStrategy,
    DeepSpeedStrategy,
    LightningModule,
    Trainer,
    TrainerFn,
    _validate_device_index_selection,
    is_overridden,
)
from .checkpoints.checkpointer import Checkpointer
from .config.auto_values import accumulation_steps
from .config.hf_config import AUTO, HfDeepSpeedConfig, is_auto_value
from .config.plugin import DeepSpeedPlugin
from .config.settings import DeepSpeedSettings
from .engines import engine as engines
from .engines.build_locks import check_build_locks
from .engines.engine_registry import end_engines_on, engine_of
from .engines.library import (
    check_async_io,
    choose_accelerator,
    deepspeed_library,
    forget_lost_groups,
    ninja_on_path,
    quietly,
    require_deepspeed,
)
from .engines.optimizers import (
    check_elementwise,
    check_embeddings,
    check_parameters,
    choose,
    compiled_cpu_adam,
    for_offload,
    prefer_torch_adam,
)
from .engines.same_path import SamePath, hold_parameters, hold_parameters_in_forward
from .engines.user_clipping import refuse_change, refuse_norm
from .engines.window import Window
from .engines.zero_access import ZeroAccess
from .run_summary import summarise_run
from .trainer_hooks import ONE_OPTIMIZER, TrainerHooks
from .trainer_settings import settings_by_hand, settings_for_evaluation, settings_for_training

_REFUSED_CALLBACKS = {
    "LearningRateFinder": (
        "(Tuner.lr_find, too) puts a schedule on the optimizer, and DeepSpeed's is no torch.optim.Optimizer. Find the "
        "rate with another strategy, FSDP or one process, and train with DeepSpeed then."
    ),
    "ModelPruning": PRUNING,
    "WeightAveraging": (
        "puts averages in the place of the weights in checkpoints, and those of DeepSpeed's engine are saved by "
        "itself: the averages would be lost. Average in a callback of your own, with a state_dict() for its "
        "checkpoints, or use Trainer(strategy='ddp')."
    ),
}


@running_as_library(
    *("setup", "teardown", "training_step", "validation_step", "test_step", "predict_step", "backward", "run_backward"),
    *("optimizer_step", "clip_step", "take_step", "save_checkpoint", "load_checkpoint", "load_model_state_dict"),
    *("lightning_module_state_dict", "barrier", "on_exception"),
)
@made_again
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
            universal form once, beside itself.
        find_unused_parameters: Whether ranks may use different layers in stage 3, too: it then keeps parameters
            gathered from forward to step, as stage 2 does. Stages 0 to 2 allow that anyway.
        broadcast_buffers: Whether buffers (BatchNorm's statistics, memory banks, counters) are process 0's at each
            forward of a fit, where and when ddp broadcasts them. Default True.
        exclude_frozen_parameters: Whether checkpoints leave out what is frozen. They resume with
            ``strict_loading=False`` of the module, which brings the frozen weights itself.
        weights_only: False lets a checkpoint hold any Python object, and so run code when it is read. What
            ``fit(weights_only=...)`` and the like are given wins.
        gradient_accumulation: A `GradientAccumulationPlugin`, or the number of micro-batches for each optimizer step.
        timeout: Of the process group's collectives. Default 30 minutes.
        process_group_backend: Default: gloo on CPU, on an accelerator its own backend with gloo beside it.

    Raises:
        ModuleNotFoundError: If DeepSpeed is not installed.
        ValueError: If both a plugin and fields of it are given, or a field has a value that is not allowed.

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
        self.exclude_frozen_parameters = exclude_frozen_parameters
        """Whether checkpoints leave out what is frozen."""
        self.last_grad_norm = None
        self.skipped_steps = SkippedSteps()
        self.load_universal = load_universal
        self.find_unused_parameters = find_unused_parameters
        """Whether ranks may use different layers in stage 3."""
        self.weights_only = weights_only
        self._tracker, self._termination = LoopTracker(gradient_accumulation), Termination()
        self._held_weights, self._loader_places = HeldWeights(), LoaderPlaces()
        self._buffers = BufferSync(broadcast_buffers)
        self._window = None
        self._checkpointer = Checkpointer(self)
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
        device = self.root_device
        tell_what_comes_too_late(self._timeout, self._process_group_backend, self.where_group_starts)
        choose_accelerator(device)
        with explaining_interfaces():
            super(DeepSpeedStrategy, self).setup_environment()  # DeepSpeedStrategy's takes CUDA alone
        self._held_weights.begin()
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
            self._set_node_environment_variables()
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
            raise RuntimeError("AccelDeepSpeedStrategy.setup() is called by the Trainer, with a module connected.")
        self.accelerator.setup(trainer)
        self._termination.follow(trainer)
        self.optimizers, self.lr_scheduler_configs = [], []
        module = self.lightning_module
        refuse_module_of_fsdp(module)
        self.precision_plugin.convert_module(module)  # in place
        self.deepspeed_plugin.set_moe_leaf_modules(module)
        if trainer.state.fn == TrainerFn.FITTING:
            check_callbacks(trainer.callbacks, _REFUSED_CALLBACKS)  # type: ignore[attr-defined]
            self._setup_training(trainer, module)
        else:
            self._setup_evaluation(module)
        self._set_deepspeed_activation_checkpointing()
        self.setup_precision_plugin()
        self._held_weights.model_is_set_up()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            name, precision = type(self).__name__, str(self.precision_plugin.precision)
            summarise_run(name, self.model, self.settings, self.root_device, precision).tell(trainer)

    def _follow_user_code(self, trainer: Trainer, module: LightningModule) -> None:
        access = self._access = ZeroAccess(module, self.root_device)
        with_parameters = [each for each in module.modules() if next(each.parameters(), None) is not None]
        partitions = self.deepspeed_plugin.zero_stage == 3
        self._user_code = UserCode(access, with_parameters, always_in_steps=partitions)
        self._user_code.attach(trainer, module)

    def _setup_training(self, trainer: Trainer, module: LightningModule) -> None:
        config = self.deepspeed_plugin.config_for_trainer(clips=bool(trainer.gradient_clip_val))
        trainer.accumulate_grad_batches = accumulation_steps(config, trainer.accumulate_grad_batches)
        told = not is_auto_value(config.get_value("gradient_accumulation_steps", AUTO))
        self._tracker.start_fit(trainer, config="gradient_accumulation_steps (DeepSpeed config)" if told else None)
        kept = end_engines_on(module, stage=int(self.deepspeed_plugin.zero_stage or 0))
        chosen = choose(module, config)
        kept.states.take(chosen.real)
        precision = self.precision_plugin.accelerate_name
        settings = settings_for_training(self.deepspeed_plugin, trainer, module, chosen, precision)
        check_async_io(settings)
        settings = prefer_torch_adam(settings, self.root_device)
        if self.load_universal:
            settings = settings.changed({"checkpoint.load_universal": True})
        check_embeddings(module, settings)
        optimizer = chosen.real
        if optimizer is not None:
            check_parameters(optimizer, module)
            check_elementwise(optimizer, settings.zero_stage)
            optimizer, settings = for_offload(optimizer, settings)
        elif settings.offloads_optimizer and settings.defines_adam:
            compiled_cpu_adam()
        self._use(settings)
        chosen_parameters = chosen.trained(module)
        engine = engines.start_engine(
            module,
            settings,
            self.root_device,
            optimizer=optimizer,
            parameters=chosen.parameters(module),
            lr_scheduler=chosen.scheduler_callable,
        )
        chosen.take_schedule(engine)
        kept.masters.give(engine)
        self.model = engine
        self._follow_buffers(module)
        holds_parameters = settings.zero_stage == 3 and self.find_unused_parameters
        if holds_parameters:
            hold_parameters(engine)
        elif settings.zero_stage == 3:
            SamePath(engine, self._timeout or default_pg_timeout)
        self._window = Window(engine, chosen_parameters, self.root_device, holds_parameters=holds_parameters)
        self._access.follow(engine)
        self._window.hooks_before_step = any(
            is_overridden("on_before_optimizer_step", each, parent)
            for parent, each in [(LightningModule, module), *((Callback, each) for each in trainer.callbacks)]  # type: ignore[attr-defined]
        )
        kept.states.give(self._window)
        self._while_fitting.enter_context(self._window.on_module(module))
        if not isinstance(engine.optimizer, torch.optim.Optimizer):  # with torch's, gradients are where they always are
            norms = TotalNorms(partial(refuse_norm, module), partial(refuse_change, module))
            norms.follow()
            self._while_fitting.callback(norms.let_go)
        self.optimizers, self.lr_scheduler_configs = [engine.optimizer], chosen.configs
        if precision != "no":  # DeepSpeed skips steps for bf16 gradients that are not finite, too
            self.skipped_steps.hold_back(module, self.lr_scheduler_configs)

    def _setup_evaluation(self, module: LightningModule) -> None:
        before = engine_of(module)
        if before is not None:  # of a fit before this, which has the weights
            self.model, self._settings = before
            self.config = self._settings.config
            return
        precision = self.precision_plugin.accelerate_name
        settings = settings_for_evaluation(self.deepspeed_plugin, module, precision)
        check_async_io(settings)
        self._use(settings)
        end_engines_on(module, stage=settings.zero_stage)
        self.model = engines.start_engine(module, settings, self.root_device)
        if settings.zero_stage == 3 and self.find_unused_parameters:
            hold_parameters_in_forward(self.model)

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
            ValueError: If there is no plugin of that name.
            RuntimeError: Before the ranks are connected.
        """
        if not torch.distributed.is_initialized():
            raise RuntimeError("prepare_model() needs the process group: call it in setup() or configure_model().")
        chosen = AcceleratorState().get_deepspeed_plugin(plugin) if isinstance(plugin, str) else plugin
        chosen.set_moe_leaf_modules(model)
        end_engines_on(model, stage=int(chosen.zero_stage or 0))
        precision = self.precision_plugin.accelerate_name
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
            "Set these on the plugin, or leave the plugin out."
        )
    if given is None:
        given = DeepSpeedPlugin(**fields)
    plugins = dict(given) if isinstance(given, Mapping) else {"default": given}
    wrong = {name: type(plugin).__name__ for name, plugin in plugins.items() if not isinstance(plugin, DeepSpeedPlugin)}
    if wrong or not plugins:
        raise TypeError(f"deepspeed_plugin must be a DeepSpeedPlugin or a dict of them; got {wrong or given!r}.")
    return plugins
