"""`AccelFSDPStrategy`: FSDP1 and FSDP2 under Lightning's Trainer, with Accelerate's semantics."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
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
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from ...state import AcceleratorState, DistributedType, GradientAccumulationPlugin, PartialState
from ..common.gradients import average_over_ranks, gradients_of, scale_gradients
from ..common.loop_following import LoopFollowing
from ..common.loop_tracker import LoopTracker
from ..common.skipped_steps import SkippedSteps
from .checkpoints.background_saves import BackgroundSaves
from .checkpoints.checkpointer import CheckpointingStrategy
from .config.plugin import FullyShardedDataParallelPlugin
from .engines.choice import build_engine
from .precision import AccelFSDPPrecision
from .steps.outside_calls import OutsideCalls, inside
from .steps.total_norms import TotalNorms
from .steps.unreduced_gradients import ZeroGradFollowing
from .steps.user_hooks import looks_before_backward, looks_between_batches
from .units.mesh import build_mesh
from .units.refused_models import check_callbacks
from .units.sharded_root import explaining_mixtures, inside_root
from .weights.initial_weights import prepare_with_weights
from .weights.meta_init import parameters_on_meta

_log = logging.getLogger(__name__)


class AccelFSDPStrategy(LoopFollowing, CheckpointingStrategy):
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
        auto_wrap_policy: ``transformer_based_wrap``, ``size_based_wrap``, ``no_wrap`` (default) or a callable.
        cpu_offload: Keep shards, gradients and optimizer state in host memory. Default False.
        ignored_modules: Modules left whole on every rank, or a regular expression matched on their names.
        state_dict_type: ``full_state_dict`` (default of FSDP1), ``sharded_state_dict`` (default of FSDP2) or
            ``local_state_dict`` (FSDP1: flat shards as they are, for the same number of processes only).
        state_dict_config: torch's config: where a full state dict of the weights is. Default: rank 0, in host memory.
        optim_state_dict_config: The same for the optimizer's state.
        limit_all_gathers: FSDP1: hold back the host so that not too many gathers are in flight. Default True.
        use_orig_params: FSDP1: let optimizers see the original parameters. Default True, as Lightning's: over flat
            ones (Accelerate's default) groups, and optimizers over a part, would train something else.
        param_init_fn: FSDP1: how modules on the meta device are materialised.
        sync_module_states: FSDP1: broadcast rank 0's weights while wrapping. Default False.
        forward_prefetch: Gather the next unit while the present one computes. Default False.
        activation_checkpointing: Recompute units in backward instead of keeping activations. Default False.
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
        pretrained_weights: Safetensors file or folder that all ranks see, with the model's names or those inside the
            one attribute that holds it. The model is built without memory, and each rank reads its own slices.
        compile: Compile each unit, after activation checkpointing and before sharding; a dict gives keyword arguments
            of ``torch.compile``. FSDP1 cannot with ``use_orig_params=False``. Default False.
        async_save: Write checkpoints in the background while training goes on; the loop waits for the copy to host
            memory alone. See `wait_for_saves`. Default False.
        device_mesh: ``(replicate, shard)`` sizes, or a mesh of these two dimensions, for hybrid sharding (HSDP).
        timeout: Of the process group's collectives. Default 30 minutes.
        process_group_backend: Default: gloo on CPU, on an accelerator its own backend with gloo beside it for what
            lies on the CPU.

    Raises:
        ValueError: If both a plugin and fields of it are given, or a field has a value that is not allowed.

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
        cpu_ram_efficient_loading: bool | None = None,
        transformer_cls_names_to_wrap: list[str] | None = None,
        min_num_params: int | None = None,
        gradient_accumulation: GradientAccumulationPlugin | int | None = None,
        reshard_during_accumulation: bool = True,
        find_unused_parameters: bool = False,
        pretrained_weights: str | os.PathLike[str] | None = None,
        compile: bool | dict[str, Any] = False,
        async_save: bool = False,
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
        self.last_grad_norm: torch.Tensor | None = None
        """Global norm of the gradients before the last clipping by norm, a scalar."""
        self.skipped_steps = SkippedSteps()
        """Whether the gradient scaler left the last optimizer step out."""
        self._given_mesh = device_mesh
        self._compile_options = compile if isinstance(compile, dict) else {} if compile else None
        self._pretrained_weights = pretrained_weights
        self._reshard_during_accumulation = reshard_during_accumulation
        self._find_unused_parameters = find_unused_parameters
        self._tracker = LoopTracker(gradient_accumulation)
        self._saves = BackgroundSaves(timeout) if async_save else None
        self._zero_grads = ZeroGradFollowing(self._drop_unreduced)
        self._total_norms = TotalNorms(self._norm_of)
        self._accumulating = False
        self._resharded_before_backward = False
        self._kept_gathered = False
        """Whether what a micro-batch gathers serves the next one of its window."""

    # ------------------------------------------------------------------ what it knows
    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh over all ranks: ``("shard",)``, or ``("replicate", "shard")`` for HSDP."""
        return self.engine.mesh

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
        elif isinstance(precision_plugin, FSDPPrecision):  # made by the Trainer from its `precision` argument
            self._precision_plugin = AccelFSDPPrecision(precision_plugin.precision, self)
        else:
            raise TypeError(
                f"AccelFSDPStrategy cannot work with {type(precision_plugin).__name__}. "
                "Use Trainer(precision=...) and leave plugins=... out."
            )

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last optimizer step was left out because fp16 gradients overflowed."""
        return self.skipped_steps.last

    # ------------------------------------------------------------------ processes
    @override
    def setup_environment(self) -> None:
        super().setup_environment()
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
        )
        if self._saves is not None:
            self._saves.connect()
        self._engine = build_engine(settings, mesh, self.root_device)
        if self._timeout is not None:
            self._engine.timeout = self._timeout
        AcceleratorState._fill(
            mixed_precision=self.precision_plugin.accelerate_name,
            fsdp_plugin=self.fsdp_plugin,
            distributed_type=DistributedType.FSDP,
        )
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = mesh  # its `device_mesh`, for configure_model()

    @override
    def barrier(self, name: str | None = None) -> None:
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
        yield  # the engine wraps when the module is complete, both versions alike

    @override
    def setup(self, trainer: Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self.accelerator is None or self.model is None or self.lightning_module is None:
            raise RuntimeError("AccelFSDPStrategy.setup() is called by the Trainer, with a module connected.")
        self.accelerator.setup(trainer)
        if fitting:
            check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
            self._tracker.start_fit(trainer)
            if self._layer_sync:
                self.model = self._layer_sync.apply(self.model)
        self.model = self._setup_model(self.model)
        self.barrier()
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        model = self.precision_plugin.convert_module(model)
        self._form = prepare_with_weights(self.engine, model, self, self._pretrained_weights)
        root = self._form.root
        _materialize_distributed_module(root, self.root_device)
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
        super(FSDPStrategy, self).setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self.form.early.switch(optimizer, inside_root(self.form.root))
        self.engine.check_optimizers(self.form.root, self.optimizers)
        module = self.lightning_module
        if module is not None:
            self._zero_grads.follow(module, self.optimizers)
            self._total_norms.follow()
            self._resharded_before_backward = looks_before_backward(trainer, module)
            self._kept_gathered = not self._reshard_during_accumulation and not looks_between_batches(trainer, module)
            if not self._reshard_during_accumulation and not self._kept_gathered:
                rank_zero_info(
                    "reshard_during_accumulation=False has no effect in this fit: hooks of the module or its callbacks "
                    "run between micro-batches, and what they change in weights has to be gathered."
                )
        if self.precision_plugin.scaler is not None and self.lightning_module is not None:
            self.skipped_steps.hold_back(self.lightning_module, self.lr_scheduler_configs)

    # ------------------------------------------------------------------ loops and gradients
    @contextmanager
    def _running_step(self, *, reshard: bool) -> Iterator[None]:
        """Run one of the module's steps, around which the root's unit is gathered, if there is one.

        Where there is none (manual optimization), each call inside of the step gathers what it needs.
        """
        root = self.form.root
        with inside() if self.form.has_root_unit else nullcontext():
            try:
                yield
            except BaseException as error:  # whoever catches it may save, evaluate and fit again
                instead = self.engine.explained(error)
                self.engine.make_idle(root)
                if instead is not None:
                    raise instead from error
                raise
        if reshard:
            self.engine.reshard(root)

    @contextmanager
    def _evaluating(self, stage: str) -> Iterator[None]:
        path = self.engine.path
        if self.form.has_root_unit:
            path.begin(stage)
        with self._running_step(reshard=True):
            yield
            if self.form.has_root_unit:
                path.end()

    @contextmanager
    def running_backward(self, *, keeps_graph: bool = False) -> Iterator[None]:
        """Run a backward; gradients are what one process would have when it ends, if it reduces them.

        Args:
            keeps_graph: Whether there may be another one of the same graph.
        """
        root = self.form.root
        self.engine.begin_backward(root)
        with inside():
            try:
                if self._is_manual:
                    self.engine.path.begin("backward")
                with explaining_mixtures():
                    yield
                self.engine.path.end()
            except BaseException:
                self.engine.make_idle(root)
                raise
            self.engine.end_backward(root, reduced=not self._accumulating)
            if keeps_graph:
                self.engine.keep_graph()
            if not (self._kept_gathered and self._accumulating):  # a step follows: also units that this batch left out
                self.engine.reshard(root)

    def _drop_unreduced(self, parameters: Iterable[nn.Parameter]) -> None:
        self.engine.drop_unreduced(self.form.root, parameters)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating("validation"):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating("test"):
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating("predict"):
            return super().predict_step(*args, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if isinstance(exception, torch.OutOfMemoryError) and not self._reshard_during_accumulation:
            _log.error("Out of memory with reshard_during_accumulation=False: set it to True to hold shards alone.")

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        if self._tracker.plugin.sync_each_batch:
            yield
            return
        self._accumulating = True
        try:
            with self.engine.no_sync(self.form.root):
                yield
        finally:
            self._accumulating = False

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._is_manual:  # hooks come between this and the backward
            self.engine.end_step(self.form.root)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.engine.begin_step(self.form.root)
        if not self._is_manual:
            self.engine.path.forget()
            self.engine.path.begin(("train", self._accumulating))
        with self._running_step(reshard=self._resharded_before_backward or self._is_manual):
            result = super().training_step(*args, **kwargs)
        if self._is_manual:
            self.precision_plugin.update_scale()
        else:
            self.engine.end_step(self.form.root)
        return result

    @property
    def _is_manual(self) -> bool:
        return self.lightning_module is not None and not self.lightning_module.automatic_optimization

    def finish_gradients(self, optimizer: Optimizer, *, rescale: bool) -> None:
        """Make gradients whole before they are unscaled, clipped and used; called once for each optimizer step.

        Args:
            optimizer: Whose gradients.
            rescale: Whether a shorter last window is divided by the micro-batches it really has.
        """
        self._make_whole(optimizer)
        parameters = self._parameters_of(optimizer)
        factor = self._tracker.short_window_factor
        if rescale and factor != 1.0:
            scale_gradients(gradients_of(parameters), factor)

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
            self._make_whole(optimizer)
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

    def _make_whole(self, optimizer: Optimizer) -> None:
        parameters = self._parameters_of(optimizer)
        average_over_ranks(parameter for parameter in parameters if parameter in self.form.unsharded)

    @staticmethod
    def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    # ------------------------------------------------------------------ end
    @override
    def teardown(self) -> None:
        self._tracker.close()
        if self.lightning_module is not None:
            self.skipped_steps.let_go(self.lightning_module)
        self._zero_grads.let_go()
        self._total_norms.let_go()
        if self._form is not None:
            self.engine.drop_unreduced(self._form.root)
        super().teardown()
