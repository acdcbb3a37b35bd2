"""`AccelFSDPStrategy`: FSDP1 and FSDP2 under Lightning's Trainer, with Accelerate's semantics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
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
from ...state.meeting import meet
from ..launcher import SubprocessScriptLauncher
from ..loop_tracker import LoopTracker
from ..skipped_steps import SkippedSteps
from . import checkpointing
from .engine import Engine
from .engines import build_engine
from .gradients import average_over_ranks, gradients_of, scale_gradients
from .mesh import build_mesh
from .plugin import FullyShardedDataParallelPlugin
from .precision import AccelFSDPPrecision
from .root import ShardedForm

_log = logging.getLogger(__name__)


def _refuse_what_is_missing(plugin: FullyShardedDataParallelPlugin) -> None:
    """Raise for what the plugin can say and the strategy cannot do yet, rather than train without it."""
    if plugin.cpu_ram_efficient_loading:
        raise NotImplementedError(
            "cpu_ram_efficient_loading=True is not possible with AccelFSDPStrategy yet. Leave it out: every process "
            "then builds the model, and keeps its shards alone."
        )
    if plugin.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        raise NotImplementedError(
            "state_dict_type='local_state_dict' is not possible with AccelFSDPStrategy yet. Use 'sharded_state_dict'."
        )


class AccelFSDPStrategy(FSDPStrategy):
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
        state_dict_type: ``full_state_dict`` (default of FSDP1) or ``sharded_state_dict`` (default of FSDP2).
        state_dict_config: torch's config for the model's state dict.
        optim_state_dict_config: torch's config for the optimizer's state dict.
        limit_all_gathers: FSDP1: hold back the host so that not too many gathers are in flight. Default True.
        use_orig_params: FSDP1: let optimizers see the original parameters. Default False.
        param_init_fn: FSDP1: how modules on the meta device are materialised.
        sync_module_states: FSDP1: broadcast rank 0's weights while wrapping. Default False.
        forward_prefetch: Gather the next unit while the present one computes. Default False.
        activation_checkpointing: Recompute units in backward instead of keeping activations. Default False.
        cpu_ram_efficient_loading: Not possible yet: True raises.
        transformer_cls_names_to_wrap: Class names of the units for ``transformer_based_wrap``; default the model's
            ``_no_split_modules``.
        min_num_params: Smallest unit for ``size_based_wrap``.
        gradient_accumulation: Number of micro-batches for each optimizer step, or a `GradientAccumulationPlugin`.
            Default: what ``Trainer(accumulate_grad_batches=...)`` says.
        reshard_during_accumulation: False keeps parameters gathered over a whole accumulation window: each is gathered
            once and each gradient reduced once for each optimizer step, at the price of holding the unsharded
            parameters and gradients. Default True.
        device_mesh: ``(replicate, shard)`` sizes, or a mesh of these two dimensions, for hybrid sharding (HSDP).
        timeout: Of the process group's collectives. Default 30 minutes.
        process_group_backend: Default: gloo on CPU, on an accelerator its own backend with gloo beside it for what
            lies on the CPU.

    Raises:
        ValueError: If both a plugin and fields of it are given, or a field has a value that is not allowed.
        NotImplementedError: If the plugin asks for ``cpu_ram_efficient_loading`` or ``local_state_dict``.

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
        auto_wrap_policy: Callable[..., bool]
        | Literal["transformer_based_wrap", "size_based_wrap", "no_wrap"]
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
        _refuse_what_is_missing(self.fsdp_plugin)
        self.last_grad_norm: torch.Tensor | None = None
        """Global norm of the gradients before the last clipping by norm, a scalar."""
        self.skipped_steps = SkippedSteps()
        """Whether the gradient scaler left the last optimizer step out."""
        self._given_mesh = device_mesh
        self._reshard_during_accumulation = reshard_during_accumulation
        self._tracker = LoopTracker(gradient_accumulation)
        self._engine: Engine[Any] | None = None
        self._form: ShardedForm | None = None

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
    def device_mesh(self) -> DeviceMesh:
        """The mesh over all ranks: ``("shard",)``, or ``("replicate", "shard")`` for HSDP."""
        return self.engine.mesh

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.root_device

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.is_global_zero

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

    @property
    def _full(self) -> bool:
        return self.engine.settings.state_dict_type == "full_state_dict"

    # ------------------------------------------------------------------ processes
    @override
    def _configure_launcher(self) -> None:
        if self.cluster_environment is not None and not self.cluster_environment.creates_processes_externally:
            self._launcher = SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is not None:
            return self._process_group_backend
        device = self.root_device
        if device.type == "cpu":
            return "gloo"
        return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"

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
        settings = replace(settings, reshard_during_accumulation=self._reshard_during_accumulation)
        self._engine = build_engine(settings, mesh, self.root_device)
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
    def model_sharded_context(self) -> Generator[None, None, None]:
        yield  # the engine wraps when the module is complete, both versions alike

    @override
    def setup(self, trainer: Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self.accelerator is None or self.model is None or self.lightning_module is None:
            raise RuntimeError("AccelFSDPStrategy.setup() is called by the Trainer, with a module connected.")
        self.accelerator.setup(trainer)
        if fitting:
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
        self._form = self.engine.prepare(self.precision_plugin.convert_module(model))
        root = self._form.root
        _materialize_distributed_module(root, self.root_device)
        for module in root.modules():
            if isinstance(module, Metric):  # its states are neither parameters nor buffers: nobody else moves them
                module.to(self.root_device)
        if self.precision_plugin.precision == "16-mixed" and self.precision_plugin.scaler is None:
            self.precision_plugin.scaler = self.engine.grad_scaler()
        return root

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()  # of an earlier fit: their parameters may be gone
        self.engine.reshard(self.form.root)
        super(FSDPStrategy, self).setup_optimizers(trainer)
        self._check_optimizers()
        if self.precision_plugin.scaler is not None and self.lightning_module is not None:
            self.skipped_steps.hold_back(self.lightning_module, self.lr_scheduler_configs)

    def _check_optimizers(self) -> None:
        """Refuse optimizers over parameters that the sharded model does not have: they would train nothing.

        Raises:
            ValueError: If a parameter of an optimizer is not a parameter of the sharded model.
        """
        if self.model is None:
            return
        present = set(self.model.parameters())
        for index, optimizer in enumerate(self.optimizers):
            stale = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if p not in present]
            if stale:
                raise ValueError(
                    f"Optimizer {index} holds {len(stale)} parameters that are not in the sharded model (shapes "
                    f"{stale[:5]}): it was made before sharding. Make it in configure_optimizers(), over "
                    "self.parameters()."
                )

    # ------------------------------------------------------------------ loops and gradients
    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        trainer = self._running_trainer()
        if trainer is not None:
            if trainer.training:
                self._tracker.note_train_batch(trainer, counted=False)
            else:
                self._tracker.note_evaluation_batch(trainer, dataloader_idx)
        return super().batch_to_device(batch, device, dataloader_idx)

    def _running_trainer(self) -> Trainer | None:
        """Return the Trainer if it is inside a loop over batches."""
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        return trainer if trainer is not None and trainer.state.stage is not None else None

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        trainer = self._running_trainer()
        if trainer is not None:  # again, for training_step(dataloader_iter), whose batches pass nowhere else
            self._tracker.note_train_batch(trainer, counted=True)

    @override
    def on_train_end(self) -> None:
        self._tracker.close()

    def _end_evaluation(self) -> None:
        self._tracker.end_evaluation()
        self.engine.reshard(self.form.root)

    @override
    def on_validation_end(self) -> None:
        self._end_evaluation()

    @override
    def on_test_end(self) -> None:
        self._end_evaluation()

    @override
    def on_predict_end(self) -> None:
        self._end_evaluation()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._tracker.close()
        if isinstance(exception, torch.OutOfMemoryError) and not self._reshard_during_accumulation:
            _log.error("Out of memory with reshard_during_accumulation=False: set it to True to hold shards alone.")

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with nullcontext() if self._tracker.plugin.sync_each_batch else self.engine.no_sync(self.form.root):
            yield

    def finish_gradients(self, optimizer: Optimizer, *, rescale: bool) -> None:
        """Make gradients whole before they are unscaled, clipped and used; called once for each optimizer step.

        Args:
            optimizer: Whose gradients.
            rescale: Whether a shorter last window is divided by the micro-batches it really has.
        """
        parameters = self._parameters_of(optimizer)
        average_over_ranks(parameter for parameter in parameters if parameter in self.form.unsharded)
        factor = self._tracker.short_window_factor
        if rescale and factor != 1.0:
            scale_gradients(gradients_of(parameters), factor)

    def clip_grad_norm(
        self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the optimizer's gradients by their global norm over all shards.

        FSDP1 clips all parameters of the model together, whichever optimizer is named.

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
        norm = self.engine.clip_grad_norm(self.form.root, self._parameters_of(optimizer), max_norm, norm_type)
        self.last_grad_norm = norm
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"The gradients' norm of order {norm_type} is {norm.item()}: they cannot be clipped.")
        return norm

    @staticmethod
    def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    # ------------------------------------------------------------------ checkpoints
    def _state_dict_module(self) -> nn.Module:
        return self.engine.state_dict_module(self.form.root)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        meet("trainer.save_checkpoint")  # its first step; alone, a process would hang in the collectives that follow
        return checkpointing.model_state(self._state_dict_module(), full=self._full)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return checkpointing.optimizer_state(self._state_dict_module(), plain, full=self._full)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        path = Path(self.broadcast(str(filepath)))
        if self._full:
            checkpointing.save_full(
                path, lambda: self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            )
            return
        if storage_options is not None:
            raise TypeError(
                "storage_options is for a CheckpointIO, which sharded checkpoints do not use. Leave it out."
            )
        weights = checkpoint.pop("state_dict")
        optimizer_states = checkpoint.pop("optimizer_states", [])
        form = self.form
        checkpointing.save_sharded(
            path,
            self.engine.model_key,
            weights,
            optimizer_states,
            checkpoint,
            ties=form.ties,
            module_attribute=form.module_attribute,
        )

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        module = self.lightning_module
        if module is None:
            raise RuntimeError("load_checkpoint() is called by the Trainer, with a module connected.")
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if fitting else []
        load = checkpointing.loader_for(path)
        return load(
            path, self._state_dict_module(), optimizers, strict=module.strict_loading, weights_only=weights_only
        )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        pass  # load_checkpoint() has done it

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        pass  # load_checkpoint() has done it

    # ------------------------------------------------------------------ end
    @override
    def teardown(self) -> None:
        self._tracker.close()
        if self.lightning_module is not None:
            self.skipped_steps.let_go(self.lightning_module)
        super().teardown()
