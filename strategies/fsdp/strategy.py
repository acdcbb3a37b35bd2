"""`AccelFSDPStrategy`: FSDP1 and FSDP2 under Lightning's Trainer, with Accelerate's semantics."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torchmetrics import Metric
from typing_extensions import override

from ...state import AcceleratorState, DistributedType, GradientAccumulationPlugin, PartialState
from ...state.arguments import named_arguments
from ...state.process_group import explaining_interfaces
from ..common.buffer_sync import BufferSync
from ..common.held_weights import HeldWeights
from ..common.launcher_variables import warn_of_other_precision
from ..common.live_group import check_offload, tell_what_comes_too_late
from ..common.loader_places import LoaderPlaces
from ..common.loop_tracker import LoopTracker
from ..common.made_again import made_again
from ..common.refused_callbacks import PRUNING, check_callbacks
from ..common.skipped_steps import SkippedSteps
from ..common.termination import Termination
from ..common.total_norms import TotalNorms
from ..common.user_code import UserCode, running_as_library, with_plain_states
from ..upstream.lightning import (
    FSDPStrategy,
    Trainer,
    TrainerFn,
    _optimizers_to_device,
    rank_zero_info,
)
from .checkpoints.background_choice import check_kind, check_places, choose_saves, told_choice
from .checkpoints.checkpointer import Checkpointer
from .config.plugin import FullyShardedDataParallelPlugin
from .config.settings import WrapSettings
from .config.wrapping import as_policy
from .engines.choice import build_engine
from .run_summary import summarise_run
from .running import Running
from .steps.outside_calls import OutsideCalls
from .steps.unreduced_gradients import ZeroGradFollowing
from .steps.user_hooks import looks_before_backward, looks_between_batches
from .summary import summarise_whole
from .trainer_hooks import TrainerHooks
from .units.marked_units import marking_units
from .units.mesh import build_mesh
from .units.sharded_root import inside_root
from .units.unit_wrappers import without_wrappers
from .weights.initial_weights import materialize_alike, prepare_with_weights
from .weights.meta_init import parameters_on_meta

_ACCELERATES_NAMES: dict[torch.dtype | None, str] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_REFUSED_CALLBACKS = {
    "ModelPruning": PRUNING,
    "WeightAveraging": (
        "copies the model before it is sharded, and would average the copy with shards. Average in a callback of your "
        "own: parameters that are copied in on_train_start are sharded as those that train, and can be averaged and "
        "swapped in any hook. Or use Trainer(strategy='ddp')."
    ),
}


@running_as_library(
    *("setup", "teardown", "training_step", "validation_step", "test_step", "predict_step", "backward", "run_backward"),
    *("optimizer_step", "finish_gradients", "clip_grad_norm", "save_checkpoint", "load_checkpoint", "optimizer_state"),
    *("lightning_module_state_dict", "load_model_state_dict", "load_optimizer_state_dict", "save_safetensors"),
    *("wait_for_saves", "barrier", "on_exception"),
)
@made_again
@named_arguments
class AccelFSDPStrategy(TrainerHooks):
    """Fully sharded training with FSDP1 or FSDP2, on any device, CPU included.

    Give either ``fsdp_plugin`` or the plugin's fields as keyword arguments; a field left None comes from its
    environment variable (``FSDP_VERSION`` and so on), else from the documented default.

    Args:
        fsdp_plugin: A `FullyShardedDataParallelPlugin`; excludes the plugin's fields as arguments.
        fsdp_version: 1 (default) or 2.
        sharding_strategy: FSDP1: ``FULL_SHARD`` (default), ``SHARD_GRAD_OP``, ``NO_SHARD``, ``HYBRID_SHARD`` or
            ``HYBRID_SHARD_ZERO2``.
        reshard_after_forward: FSDP2: free parameters after forward (default True) or keep them for backward.
            FSDP1: another name of ``sharding_strategy``.
        backward_prefetch: FSDP1: ``BACKWARD_PRE``, ``BACKWARD_POST`` or ``NO_PREFETCH`` (default).
        mixed_precision_policy: Dtypes as torch's policy or a dict; wins over ``Trainer(precision=...)``.
        auto_wrap_policy: ``transformer_based_wrap``, ``size_based_wrap``, ``no_wrap`` (default), a set of module
            classes, or a callable.
        cpu_offload: Keep shards, gradients and optimizer state in host memory. Default False.
        ignored_modules: Modules left unsharded, or a regular expression matched on their names.
        state_dict_type: ``full_state_dict`` (default of FSDP1), ``sharded_state_dict`` (default of FSDP2), or
            ``full`` and ``sharded`` for short, or ``local_state_dict`` (FSDP1: flat shards as they are, for the same
            number of processes only).
        state_dict_config: torch's config: where a full state dict of the weights is. Default: rank 0, in host memory.
        optim_state_dict_config: The same for the optimizer's state.
        limit_all_gathers: FSDP1: hold back the host so that not too many gathers are in flight. Default True.
        use_orig_params: FSDP1: let optimizers see the original parameters. Default True, as Lightning's: over flat
            ones (Accelerate's default) groups, and optimizers over a part, would train something else.
        param_init_fn: FSDP1: how modules on the meta device are materialized.
        sync_module_states: All processes begin with the parameters and buffers of process 0, as under ddp. Default
            True. With False each keeps its own, and different parameters are an error.
        forward_prefetch: Gather the next unit while the present one computes. Default False.
        activation_checkpointing: Recompute units in backward instead of keeping activations. Default False.
        activation_checkpointing_policy: Recompute other modules than the units: a set of module classes, or a policy
            as torch has them for wrapping.
        activation_checkpointing_offload: Keep what recomputing starts from, each unit's inputs, in host memory until
            backward. Default False.
        cpu_ram_efficient_loading: Only rank 0 needs weights: built in ``configure_model`` or ``trainer.init_module()``,
            the model takes no memory on the others, ``from_pretrained`` of transformers included. Each rank is sent
            its own shards. Default False.
        transformer_cls_names_to_wrap: Class names of the units for ``transformer_based_wrap``; default the model's
            ``_no_split_modules``.
        min_num_params: Smallest unit for ``size_based_wrap``.
        gradient_accumulation: Number of micro-batches for each optimizer step, or a `GradientAccumulationPlugin`.
            Default: what ``Trainer(accumulate_grad_batches=...)`` says.
        reshard_during_accumulation: False keeps parameters gathered over a whole accumulation window: each is gathered
            once and each gradient reduced once for each optimizer step, at the price of holding the unsharded
            parameters and gradients. Default True.
        find_unused_parameters: Whether processes may use different units in one step (a layer that only some come
            through): the whole model is gathered as one unit around the step then. Which parameters they use within a
            unit may differ anyway; different units are an error without it. Default False.
        broadcast_buffers: Whether buffers (BatchNorm's statistics, memory banks, counters) are process 0's at each
            forward of a fit, where and when ddp broadcasts them. Default True.
        pretrained_weights: Safetensors file or folder that all ranks see, with the model's names or those inside the
            one attribute that holds it. The model is built without memory, and each rank reads its own slices.
        compile: Compile each unit in place, after activation checkpointing and before sharding; a dict gives keyword
            arguments of ``torch.compile``. FSDP1 cannot with ``use_orig_params=False``. Default False.
        async_save: Write checkpoints in the background while training goes on; the loop waits at most for the copy to
            host memory, and what is there already is copied behind the next backward. See `wait_for_saves`.
            ``"process"`` lets a process beside each rank write sharded ones: what `Trainer.save_checkpoint` has
            returned for is completed though all ranks are killed. Default False.
        device_mesh: ``(replicate, shard)`` sizes, or a mesh of these two dimensions, for hybrid sharding (HSDP).
        timeout: Of the process group's collectives. Default 30 minutes.
        process_group_backend: Default: gloo on CPU, on an accelerator its own backend with gloo beside it for what
            lies on the CPU.

    Raises:
        ValueError: If both a plugin and fields of it are given, or a field or ``async_save`` has a value that is not
            allowed.

    Source: accelerate 1.15 ``FullyShardedDataParallelPlugin``; lightning 2.6 ``FSDPStrategy``.
    """

    strategy_name = "accel_fsdp"

    def __init__(
        self,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        *,
        fsdp_version: int | None = None,
        sharding_strategy: str | ShardingStrategy | None = None,
        reshard_after_forward: str | ShardingStrategy | bool | None = None,
        backward_prefetch: str | BackwardPrefetch | None = None,
        mixed_precision_policy: dict[str, Any] | str | MixedPrecision | MixedPrecisionPolicy | None = None,
        # The names first: jsonargparse takes the first that fits, and a name passes as a callable that it cannot write.
        auto_wrap_policy: Literal["transformer_based_wrap", "size_based_wrap", "no_wrap"]
        | set[type[nn.Module]]
        | Callable[..., bool]
        | None = None,
        cpu_offload: bool | CPUOffload | CPUOffloadPolicy | None = None,
        ignored_modules: Iterable[nn.Module] | str | None = None,
        state_dict_type: str | StateDictType | None = None,
        state_dict_config: FullStateDictConfig | ShardedStateDictConfig | None = None,
        optim_state_dict_config: FullOptimStateDictConfig | ShardedOptimStateDictConfig | None = None,
        limit_all_gathers: bool | None = None,
        use_orig_params: bool | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        sync_module_states: bool | None = None,
        forward_prefetch: bool | None = None,
        activation_checkpointing: bool | None = None,
        activation_checkpointing_offload: bool | None = None,
        activation_checkpointing_policy: set[type[nn.Module]] | Callable[..., bool] | None = None,
        cpu_ram_efficient_loading: bool | None = None,
        transformer_cls_names_to_wrap: list[str] | None = None,
        min_num_params: int | None = None,
        gradient_accumulation: GradientAccumulationPlugin | int | None = None,
        reshard_during_accumulation: bool = True,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        pretrained_weights: str | os.PathLike[str] | None = None,
        compile: bool | dict[str, Any] = False,
        async_save: bool | Literal["process"] = False,
        device_mesh: tuple[int, int] | DeviceMesh | None = None,
        timeout: timedelta = timedelta(minutes=30),
        process_group_backend: str | None = None,
    ) -> None:
        fields = {
            name: value
            for name, value in locals().items()
            if name in FullyShardedDataParallelPlugin.__dataclass_fields__ and value is not None
        }
        if fsdp_plugin is not None and fields:
            raise ValueError(
                f"AccelFSDPStrategy got fsdp_plugin and also {', '.join(sorted(fields))}. "
                "Set these on the plugin, or leave the plugin out."
            )
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self.fsdp_plugin = fsdp_plugin or FullyShardedDataParallelPlugin(**fields)
        self.last_grad_norm = None
        self.skipped_steps = SkippedSteps()
        self._recomputed = _recomputed(self.fsdp_plugin, activation_checkpointing_policy)
        self._given_mesh = device_mesh
        self._compile_options = compile if isinstance(compile, dict) else {} if compile else None
        self._pretrained_weights = pretrained_weights
        self._reshard_during_accumulation = reshard_during_accumulation
        self._find_unused_parameters = find_unused_parameters
        self._tracker, self._termination = LoopTracker(gradient_accumulation), Termination()
        self._held_weights, self._loader_places = HeldWeights(), LoaderPlaces()
        self._buffers = BufferSync(broadcast_buffers)
        self._checkpointer = Checkpointer(self, choose_saves(async_save, timeout))
        self._zero_grads = ZeroGradFollowing(self._drop_unreduced)
        self._total_norms = TotalNorms(self._norm_of)

    # ------------------------------------------------------------------ what it knows
    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh over all ranks: ``("shard",)``, or ``("replicate", "shard")`` for HSDP."""
        return self.engine.mesh

    # ------------------------------------------------------------------ processes
    @override
    def setup_environment(self) -> None:
        tell_what_comes_too_late(self._timeout, self._process_group_backend, self.where_group_starts)
        with explaining_interfaces():
            super().setup_environment()
        self._held_weights.begin()
        PartialState()._refresh(
            device=self.root_device, local_process_index=self.local_rank, num_local_processes=self.num_processes
        )
        mesh = build_mesh(self._given_mesh, self.world_size, self.root_device.type)
        settings = self.fsdp_plugin.settings(
            precision=self.precision_plugin.settings, dp_replicate=mesh.size(0) if mesh.ndim == 2 else 1
        )
        settings = replace(
            settings,
            reshard_during_accumulation=self._reshard_during_accumulation,
            find_unused_parameters=self._find_unused_parameters,
            compile_options=self._compile_options,
            recomputed=self._recomputed,
        )
        check_kind(self._checkpointer.saves, settings.state_dict_type)
        if settings.cpu_offload:
            check_offload(self.root_device)
        self._checkpointer.connect()
        self._engine = build_engine(settings, mesh, self.root_device)
        self._engine.begin_max = self._termination.begin_max
        if self._timeout is not None:
            self._engine.timeout = self._timeout
        precision = self.precision_plugin.accelerate_name
        if precision == "no":  # the plugin's policy wins over the Trainer's precision
            precision = _ACCELERATES_NAMES.get(settings.precision.param_dtype, "no")
        warn_of_other_precision(self.precision_plugin.precision, precision)
        AcceleratorState._fill(
            mixed_precision=precision,
            fsdp_plugin=self.fsdp_plugin,
            distributed_type=DistributedType.FSDP,
        )
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = mesh  # its `device_mesh`, for configure_model()

    @override
    def barrier(self, name: str | None = None) -> None:
        if name == "Trainer.save_checkpoint":
            return  # our saves have ended on all processes, by a word of rank 0
        if dist.is_available() and dist.is_initialized():
            dist.barrier(device_ids=None if self.root_device.index is None else [self.root_device.index])

    # ------------------------------------------------------------------ model and optimizers
    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        from_rank_zero = self.fsdp_plugin.settings().weights_from_rank_zero
        without_values = self._pretrained_weights is not None or (from_rank_zero and not self.is_global_zero)
        with super().tensor_init_context(empty_init), parameters_on_meta() if without_values else nullcontext():
            yield

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        with marking_units():  # the engine wraps when the module is complete, both versions alike
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self.accelerator is None or self.model is None or self.lightning_module is None:
            raise RuntimeError("AccelFSDPStrategy.setup() is called by the Trainer, with a module connected.")
        self.accelerator.setup(trainer)
        self._termination.follow(trainer)
        if fitting:
            check_callbacks(trainer.callbacks, _REFUSED_CALLBACKS)  # type: ignore[attr-defined]
            check_places(self._checkpointer.saves, trainer.checkpoint_callbacks)
            self._tracker.start_fit(trainer)
            if self._layer_sync:
                self.model = self._layer_sync.apply(self.model)
        self.model = self._setup_model(self.model)
        self._held_weights.model_is_set_up()
        access, root = self.engine.shard_access(self.form.root), self.form.root
        self._user_code = UserCode(access, self._modules_with_shards(), always_in_steps=self.engine.hides_shards(root))
        self._user_code.attach(trainer, self.lightning_module)
        self.barrier()
        if fitting:
            self._follow_buffers(self.form.root)
            summarise_whole(trainer.callbacks, self.form.root)  # type: ignore[attr-defined]
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            saved_by = told_choice(self._checkpointer.saves)
            name, precision = type(self).__name__, str(self.precision_plugin.precision)
            summarise_run(name, self.engine, self.form, precision, saved_by).tell(trainer)

    def _modules_with_shards(self) -> list[nn.Module]:
        root = self.form.root
        owners = self.engine.sharded_modules(root)
        return [module for module in root.modules() if not owners.isdisjoint(module.modules())]

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        model = self.precision_plugin.convert_module(model)
        self._form = prepare_with_weights(self.engine, model, self, self._pretrained_weights)
        root = self._form.root
        self._running = Running(self.engine, self._form, lambda: self._is_manual)
        materialize_alike(self.engine, root)
        for module in root.modules():
            if isinstance(module, Metric):  # its states are neither parameters nor buffers: nobody else moves them
                module.to(self.root_device)
        if self.precision_plugin.precision == "16-mixed" and self.precision_plugin.scaler is None:
            self.precision_plugin.scaler = self.engine.grad_scaler()
        self.engine.get_ready(root)
        OutsideCalls(root, self.engine, self.precision_plugin.outside_context)
        return root

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()  # of an earlier fit: their parameters may be gone
        for parameter in self.form.root.parameters():  # of a window that an earlier fit left
            parameter.grad = None
        with without_wrappers(self.form.root):
            super(FSDPStrategy, self).setup_optimizers(trainer)
        for optimizer in self.optimizers:
            with_plain_states(optimizer)
            self.form.early.switch(optimizer, inside_root(self.form.root))
        self.engine.check_optimizers(self.form.root, self.optimizers)
        module = self.lightning_module
        if module is not None:
            self._zero_grads.follow(module, self.optimizers)
            self._total_norms.follow()
            self._running.resharded_before_backward = looks_before_backward(trainer, module)
            kept = not self._reshard_during_accumulation and not looks_between_batches(trainer, module)
            self._running.kept_gathered = kept
            if not self._reshard_during_accumulation and not kept:
                rank_zero_info(
                    "reshard_during_accumulation=False has no effect in this fit: hooks of the module or its callbacks "
                    "run between micro-batches, and what they change in weights has to be gathered."
                )
        if self.precision_plugin.scaler is not None and self.lightning_module is not None:
            self.skipped_steps.hold_back(self.lightning_module, self.lr_scheduler_configs)


def _recomputed(plugin: FullyShardedDataParallelPlugin, policy: Any) -> WrapSettings | None:
    if policy is None:
        return None
    if plugin.activation_checkpointing:
        raise ValueError(
            "activation_checkpointing=True recomputes the units, activation_checkpointing_policy other modules. Give "
            "one of them."
        )
    return WrapSettings(kind="callable", policy=as_policy("activation_checkpointing_policy", policy))
