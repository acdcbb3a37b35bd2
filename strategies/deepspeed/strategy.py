"""`AccelDeepSpeedStrategy`: DeepSpeed under Lightning's Trainer, on any device, with Accelerate's semantics."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.strategies.deepspeed import _validate_device_index_selection
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from ...state import AcceleratorState, DistributedType, GradientAccumulationPlugin, GradientState, PartialState
from ...state.same_call import meet
from ..common.loop_following import LoopFollowing
from ..common.loop_tracker import LoopTracker
from ..common.skipped_steps import SkippedSteps
from ..common.storage_paths import local_path
from .checkpoints import checkpointing
from .config.auto_values import accumulation_steps
from .config.hf_config import HfDeepSpeedConfig
from .config.plugin import DeepSpeedPlugin
from .engines import engine as engines
from .engines.build_locks import check_build_locks
from .engines.engine_precision import AccelDeepSpeedPrecision
from .engines.library import (
    check_async_io,
    choose_accelerator,
    deepspeed_library,
    ninja_on_path,
    quietly,
    require_deepspeed,
)
from .engines.living_engines import end_engines_on, engine_of, put_down, shapes_to_see
from .engines.optimizers import check_elementwise, choose, compiled_cpu_adam, for_offload, prefer_torch_adam_on_cpu
from .engines.same_path import SamePath, hold_parameters, hold_parameters_in_forward
from .engines.window import Window
from .trainer_facts import config_by_hand, config_for_evaluation, config_for_training


class AccelDeepSpeedStrategy(LoopFollowing, DeepSpeedStrategy):
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
        load_universal: Whether a checkpoint may come from another number of processes: it is converted to DeepSpeed's
            universal form once, beside itself.
        find_unused_parameters: Whether ranks may use different layers in stage 3, too: it keeps parameters whole from
            forward to step then, as stage 2 does. Stages 0 to 2 allow that anyway.
        weights_only: False lets a checkpoint hold any Python object, and so run code when it is read. (Lightning 2.6
            does not hand the ``weights_only`` of ``fit()`` to a strategy that restores after its setup.)
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
        """The config in use, as Lightning's code knows it; complete from the setup on."""
        self.remote_device = None
        self.load_full_weights = self.exclude_frozen_parameters = False
        self.last_grad_norm: torch.Tensor | None = None
        """Global norm of the gradients before clipping at the last optimizer step, a scalar."""
        self.skipped_steps = SkippedSteps()
        """Whether the loss scaler left the last optimizer step out."""
        self.load_universal = load_universal
        """Whether a checkpoint may come from another number of processes."""
        self.find_unused_parameters = find_unused_parameters
        """Whether ranks may use different layers in stage 3."""
        self.weights_only = weights_only
        """Whether checkpoints may hold tensors and plain values only."""
        self._tracker = LoopTracker(gradient_accumulation)
        self._window: Window | None = None
        self._while_fitting = ExitStack()
        self._logged_config: dict[str, Any] | None = None

    # ------------------------------------------------------------------ what it knows
    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin:
        """The plugin that trains the Trainer's module: the first."""
        return next(iter(self.deepspeed_plugins.values()))

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The DeepSpeed config in use: without any ``"auto"`` from the Trainer's setup on."""
        return self.config

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

    # ------------------------------------------------------------------ processes
    @override
    def setup_environment(self) -> None:
        device = self.root_device
        choose_accelerator(device)
        super(DeepSpeedStrategy, self).setup_environment()  # DeepSpeedStrategy's takes CUDA alone
        PartialState()._refresh(
            device=device, local_process_index=self.local_rank, num_local_processes=self.num_processes
        )
        precision = self.precision_plugin.accelerate_name
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
        if self.accelerator is None or self.model is None or self.lightning_module is None:
            raise RuntimeError("AccelDeepSpeedStrategy.setup() is called by the Trainer, with a module connected.")
        self.accelerator.setup(trainer)
        self.optimizers, self.lr_scheduler_configs = [], []
        module = self.lightning_module
        self.precision_plugin.convert_module(module)  # in place
        self.deepspeed_plugin.set_moe_leaf_modules(module)
        if trainer.state.fn == TrainerFn.FITTING:
            self._setup_training(trainer, module)
        else:
            self._setup_evaluation(module)
        self._set_deepspeed_activation_checkpointing()
        self.setup_precision_plugin()
        self.barrier()

    def _setup_training(self, trainer: Trainer, module: LightningModule) -> None:
        config = HfDeepSpeedConfig(self.deepspeed_plugin.deepspeed_config)
        trainer.accumulate_grad_batches = accumulation_steps(config, trainer.accumulate_grad_batches)
        self._tracker.start_fit(trainer)
        masters = end_engines_on(module, stage=int(self.deepspeed_plugin.zero_stage or 0))
        with shapes_to_see(module):
            chosen = choose(module, config)
        precision = self.precision_plugin.accelerate_name
        resolved = config_for_training(self.deepspeed_plugin, trainer, module, chosen, precision)
        prefer_torch_adam_on_cpu(resolved, self.root_device)
        if is_overridden("configure_gradient_clipping", module) and trainer.gradient_clip_val is not None:
            resolved["gradient_clipping"] = 0.0  # that method decides
        self._take_config(resolved)
        if self.load_universal:
            self.config.setdefault("checkpoint", {})["load_universal"] = True
        self.config["managed_gradient_accumulation"] = False  # see [Note: one window]
        if chosen.real is not None:
            check_elementwise(chosen.real, self._stage)
            optimizer = for_offload(chosen.real, self.config)
        else:
            optimizer = None
            if _offloads_adam(self.config):
                compiled_cpu_adam()
        chosen_parameters = chosen.trained(module)
        engine = engines.start_engine(
            module,
            self.config,
            self.root_device,
            optimizer=optimizer,
            parameters=chosen.parameters(module),
            lr_scheduler=chosen.scheduler_callable,
        )
        chosen.take_schedule(engine)
        masters.give(engine)
        self.model = engine
        is_whole = self._stage == 3 and self.find_unused_parameters
        if is_whole:
            hold_parameters(engine)
        elif self._stage == 3:
            SamePath(engine, self._timeout or default_pg_timeout)
        self._window = Window(engine, chosen_parameters, self.root_device, is_whole=is_whole)
        self._while_fitting.enter_context(self._window.on_module(module))
        self.optimizers, self.lr_scheduler_configs = [engine.optimizer], chosen.configs
        if precision != "no":  # DeepSpeed skips steps for bf16 gradients that are not finite, too
            self.skipped_steps.hold_back(module, self.lr_scheduler_configs)

    @property
    def _stage(self) -> int:
        return int(self.config.get("zero_optimization", {}).get("stage", 0))

    def _setup_evaluation(self, module: LightningModule) -> None:
        engine = engine_of(module)
        if engine is not None:  # of a fit before this, which has the weights
            self.model, self.config = engine, engine.config
            return
        precision = self.precision_plugin.accelerate_name
        self._take_config(config_for_evaluation(self.deepspeed_plugin, module, precision))
        end_engines_on(module, stage=self._stage)
        self.model = engines.start_engine(module, self.config, self.root_device)
        if self._stage == 3 and self.find_unused_parameters:
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
            RuntimeError: Before the processes are connected.
        """
        if not torch.distributed.is_initialized():
            raise RuntimeError("prepare_model() needs the processes: call it in setup() or configure_model().")
        chosen = AcceleratorState().get_deepspeed_plugin(plugin) if isinstance(plugin, str) else plugin
        chosen.set_moe_leaf_modules(model)
        end_engines_on(model, stage=int(chosen.zero_stage or 0))
        precision = self.precision_plugin.accelerate_name
        if optimizer is None:
            model.requires_grad_(False).eval()
            return engines.start_engine(model, config_for_evaluation(chosen, model, precision), self.root_device)
        config = config_by_hand(chosen, model, optimizer, precision, self.world_size)
        config["managed_gradient_accumulation"] = False
        return engines.start_engine(model, config, self.root_device, optimizer=for_offload(optimizer, config))

    def _take_config(self, config: dict[str, Any]) -> None:
        check_async_io(config)
        self.config = config
        if config != self._logged_config:
            self._logged_config = json.loads(json.dumps(config, default=str))
            rank_zero_info(f"DeepSpeed config: {json.dumps(config, default=str)}")

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        pass  # the engine has done it

    # ------------------------------------------------------------------ gradients
    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
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
        if self._is_automatic and GradientState().sync_gradients:
            window.complete()  # before the hooks that see it

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
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise TypeError("storage_options is for a CheckpointIO, which DeepSpeed does not use. Leave it out.")
        meet("trainer.save_checkpoint")  # alone, a process would hang in the collectives that follow
        path = local_path(self.broadcast(str(filepath)), "sharded checkpoints")
        state = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        write_16bit = self.zero_stage_3 and bool(self.deepspeed_plugin.zero3_save_16bit_model)
        checkpointing.save(self.deepspeed_engine, path, state, write_16bit=write_16bit)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        module = self.lightning_module
        if module is None:
            raise RuntimeError("load_checkpoint() is called by the Trainer, with a module connected.")
        return checkpointing.load(
            self.deepspeed_engine,
            local_path(self.broadcast(str(checkpoint_path)), "sharded checkpoints"),
            with_optimizer=module.trainer.state.fn == TrainerFn.FITTING,
            strict=module.strict_loading,
            load_universal=self.load_universal,
            weights_only=self.weights_only if weights_only is None else weights_only,
        )

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False  # load_checkpoint() has done it

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        pass  # load_checkpoint() has done it

    # ------------------------------------------------------------------ end
    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        engine = self.model
        if self._window is not None and self._window.engine is engine:
            self._window.forget()
            put_down(engine)

    @override
    def teardown(self) -> None:
        self._tracker.close()
        self._while_fitting.close()
        if self.lightning_module is not None:
            self.skipped_steps.let_go(self.lightning_module)
        # Not Lightning's: moving the module to the CPU would tear parameters from the engine's buffers, and the engine
        # still evaluates and saves what it has trained.
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()


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


def _offloads_adam(config: dict[str, Any]) -> bool:
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    return offload.get("device", "none") != "none" and config["optimizer"]["type"].lower() in ("adam", "adamw")
