"""`AccelFSDPStrategy`: FSDP1 and FSDP2 under Lightning's Trainer, with Accelerate's semantics."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
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
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from ...checkpoint.files import MergeReport
from ...checkpoint.manifest import Adapter
from ...state import AcceleratorState, DistributedType, GradientAccumulationPlugin, PartialState
from ...state.process_group import explaining_rendezvous
from ...state.utils import named_arguments
from ..common.broadcast import BufferSync, FrozenBase
from ..common.checkpoint_files import AveragedWeights
from ..common.dataloader_state import DataLoaderStates, seed_workers
from ..common.grads import (
    SkippedSteps,
    TotalNorms,
    average_over_ranks,
    clip_to_norm,
    gradients_of,
    parameters_of,
    scale_gradients,
)
from ..common.items import factor_for
from ..common.launch import check_offload, pickle_by_init_args, warn_ignored_process_group_args, warn_of_other_precision
from ..common.loop import DeferredWeightLoad, LoopFollowing, LoopTracker
from ..common.modules import PRUNING, adapters_of, check_callbacks, gather_metrics_once, keep_packing, with_constants
from ..common.signals import Termination
from ..parallelism.config import (
    ParallelismConfig,
    SameBatches,
    as_parallelism,
    build_named_mesh,
    launched_parallelism,
)
from ..parallelism.sequence import SequenceParallel
from ..parallelism.tensor import WITHOUT_WEIGHTS, TensorParallel
from ..saving.async_save import describe_async_mode, make_async_saver
from ..sharded_tensors.shards import FlatShard, cut_states, note_copies
from ..sharded_tensors.user_code import FullTensors, OwnStateDict, UserCode, running_as_library
from ..upstream.lightning import (
    DoublePrecision,
    FSDPPrecision,
    FSDPStrategy,
    HalfPrecision,
    Precision,
    Trainer,
    TrainerFn,
    _optimizers_to_device,
    rank_zero_info,
)
from ..upstream.lightning import MixedPrecision as LightningMixedPrecision
from ..upstream.patches import Patches
from .checkpoint.checkpointer import Checkpointer
from .checkpoint.process_save import SavingProcess, check_kind, check_places
from .checkpoint.state_dict import parameter_shards
from .engine import Engine, StepRunner
from .fsdp1 import FSDP1Engine
from .fsdp2 import FSDP2Engine
from .plugin import FullyShardedDataParallelPlugin
from .precision import AccelFSDPPrecision, check_scaler
from .settings import EngineSettings, FSDP1Settings, FSDP2Settings, WrapSettings, as_policy
from .sharded_model import ShardedModel, build_mesh, recall_sharded, unwrap_root
from .step import UnshardOnCall, ZeroGradFollowing, looks_after_backward, looks_before_backward, looks_between_batches
from .summary import summarise_run, summarise_whole
from .units import marking_units, without_wrappers
from .weights import materialize_alike, parameters_on_meta, prepare_with_weights

# ------------------------------------------------------------------------------------------------
# The Trainer's hooks of `AccelFSDPStrategy`; each delegates to the part that does the work.


_log = logging.getLogger(__name__)
_SAY_A_FLAG = (FSDPPrecision, LightningMixedPrecision, HalfPrecision, DoublePrecision, Precision)
"""Precision plugins of Lightning's that are no more than a value of ``Trainer(precision=...)``."""


class TrainerHooks(FullTensors, LoopFollowing, FSDPStrategy):
    """Runs steps, gradients and checkpoints of a sharded module; `AccelFSDPStrategy` is the whole."""

    _engine: Engine[Any] | None = None
    _sharded: ShardedModel | None = None
    _running: StepRunner
    _user_code: UserCode | None = None
    _reshard_during_accumulation: bool
    _averages_early: bool = False
    """Whether users' code sees gradients of ignored modules before the optimizer step, which averages them too."""
    _checkpointer: Checkpointer
    _same_batches: SameBatches | None = None
    _zero_grads: ZeroGradFollowing
    _total_norms: TotalNorms
    _summaries: Patches
    _replicas: Patches
    adapters: Mapping[str, Adapter] = MappingProxyType({})
    """PEFT's adapters in the module, for those who merge checkpoints."""
    save_trainable_only: bool
    """Whether checkpoints leave out what is frozen and unchanged."""
    frozen_base: FrozenBase | None = None
    """The frozen weights that the fit has begun with, if checkpoints leave them out."""
    averages: AveragedWeights | None = None
    """Averages of the weights, which checkpoints have, too."""
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
            raise RuntimeError(
                "The engine exists only after the Trainer has connected the processes: in setup() and later."
            )
        return self._engine

    @property
    def sharded(self) -> ShardedModel:
        """The sharded model and what sharding hid of it.

        Raises:
            RuntimeError: Before the model is sharded.
        """
        if self._sharded is None:
            raise RuntimeError("There is no sharded model yet: it exists only after the strategy's setup.")
        return self._sharded

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
                f"{', '.join(cls.__name__ for cls in _SAY_A_FLAG)}. Use Trainer(precision=...), and remove it from "
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
        if self._averages_early and self._running.reduces:
            average_over_ranks(self._unsharded())

    def run_backward_of_user(self, backward: Callable[[], None], *, keeps_graph: bool = False) -> None:
        """Run a ``backward()`` that the user has written, which may look at weights and at gradients.

        Args:
            backward: The module's, with its arguments.
            keeps_graph: Whether there may be another one of the same graph.
        """

        def as_users_code() -> None:
            with nullcontext() if self._user_code is None else self._user_code.in_own_backward(self._unsharded()):
                backward()

        self.run_backward(as_users_code, keeps_graph=keeps_graph)

    def _drop_unreduced(self, parameters: Iterable[nn.Parameter]) -> None:
        self.engine.discard_unreduced_grads(self.sharded.root, parameters)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation", super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test", super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict", super().predict_step, *args, **kwargs)

    def _evaluate(self, stage: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._same_batches is not None and self._tracker.is_first_of_evaluation:
            self._same_batches.check_batch(args[0])
        return self._running.evaluate(stage, partial(step, *args, **kwargs))

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._checkpointer.close(exception)  # first: others that hear of the error shut the connections down
        super().on_exception(exception)
        if isinstance(exception, torch.OutOfMemoryError) and not self._reshard_during_accumulation:
            _log.error("Out of memory with reshard_during_accumulation=False: set it to True to keep only shards.")

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

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._user_code is None else self._user_code.in_step_hooks(optimizer):
            return super().optimizer_step(optimizer, *args, **kwargs)

    def reduce_left_over(self) -> None:
        """Reduce the gradients of a window whose last micro-batch has no backward; on the only process."""
        self.engine.reduce_left_over(self.sharded.root)

    def scale_grads(self, optimizer: Optimizer, factor: float) -> None:
        """Multiply an optimizer's gradients, also those that the ranks have not reduced yet."""
        parameters = parameters_of(optimizer)
        scale_gradients(gradients_of(parameters), factor)
        self.engine.scale_unreduced_grads(self.sharded.root, parameters, factor)

    def finish_gradients(self, optimizer: Optimizer) -> bool:
        """Complete the gradients before they are unscaled, clipped and used; called once for each optimizer step.

        Args:
            optimizer: Whose gradients.

        Returns:
            False for a window without items: no gradient is left.
        """
        if self.engine.tensor_parallel is not None:
            self.engine.tensor_parallel.check_gradients(optimizer, unwrap_root(self.sharded.root))
        self._average_unsharded(optimizer)
        factor = self._tracker.gradient_factor() if self._is_automatic else 1.0
        parameters = parameters_of(optimizer)
        if factor == 0:  # no items in this window: no optimizer steps without gradients
            for parameter in parameters:
                parameter.grad = None
        elif factor != 1.0:
            scale_gradients(gradients_of(parameters), factor)
        return factor != 0

    def divide_by_items(self, num_items: int | torch.Tensor, optimizer: Optimizer) -> None:
        """Divide the gradients by the number of items of all ranks, in manual optimization; all ranks call it.

        Call ``self.manual_backward(loss * num_items)`` for each micro-batch, and this before clipping and
        ``optimizer.step()``. In automatic optimization ``GradientAccumulationPlugin(average_over="items")`` does so.

        Args:
            num_items: This rank's items of all micro-batches since the optimizer's last step, a whole number.
            optimizer: Whose gradients.

        Raises:
            ValueError: On every rank, if no rank has an item.
        """
        self._average_unsharded(optimizer)
        scale_gradients(gradients_of(parameters_of(optimizer)), factor_for(num_items))

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
        norm = self.grad_norm(optimizer, norm_type)
        clip_to_norm(gradients_of(parameters_of(optimizer)), norm, max_norm)
        self.last_grad_norm = norm
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The gradient norm of order {norm_type} is {norm.item()}: the gradients cannot be clipped."
            )
        return norm

    def grad_norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> torch.Tensor:
        """Return the global norm of the optimizer's gradients over all shards, in one reduction; all ranks call it.

        Args:
            optimizer: Whose gradients. Those of all micro-batches have to be there: after the last backward.
            norm_type: p of the p-norm; ``inf`` for the largest absolute value.

        Returns:
            Scalar on the gradients' device, the same on every rank; float32, or float64 as the gradients are.
        """
        self.prepare_to_clip(optimizer)
        return self.engine.grad_norm(self.sharded.root, parameters_of(optimizer), norm_type)

    def prepare_to_clip(self, optimizer: Optimizer) -> None:
        """Make the optimizer's gradients what is to be clipped: in manual optimization nobody else has yet."""
        if self._is_manual:
            self._average_unsharded(optimizer)
            self.precision_plugin.unscale(optimizer)

    def _norm_of(self, gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor | None:
        """Return the norm of gradients that the user clips; None if it is torch's business."""
        parameters = list(self.sharded.root.parameters())
        known = {id(gradient) for gradient in gradients_of(parameters)}
        if gradients and not any(isinstance(one, FlatShard) or id(one) in known for one in gradients):
            return None
        if self._is_manual:
            average_over_ranks(self._unsharded())
        return self.engine.total_norm(self.sharded.root, gradients, norm_type)

    def _unsharded(self) -> list[nn.Parameter]:
        """Return the parameters of ignored modules, in the same order on each rank."""
        unsharded = self.sharded.unsharded
        return (
            [parameter for parameter in self.sharded.root.parameters() if parameter in unsharded] if unsharded else []
        )

    def _average_unsharded(self, optimizer: Optimizer) -> None:
        unsharded = self.sharded.unsharded
        if unsharded:
            average_over_ranks(parameter for parameter in parameters_of(optimizer) if parameter in unsharded)

    # ------------------------------------------------------------------ checkpoints
    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._checkpointer.model_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._checkpointer.optimizer_state(optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        self._checkpointer.save(checkpoint, str(filepath), storage_options)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        self._checkpointer.remove(filepath, partial(super().remove_checkpoint, filepath))

    def parameter_shards(self) -> dict[str, tuple[torch.Tensor, bool]]:
        """Return this rank's part of each parameter, sharing memory, and whether it trains; no rank communicates."""
        self.engine.reshard(self.sharded.root)
        return parameter_shards(self.engine.state_dict_module(self.sharded.root))

    def wait_for_saves(self) -> None:
        """Return when no checkpoint is being written any more; all processes must call it.

        With ``async_save=True``, a callback that needs a checkpoint just saved calls this first.

        Raises:
            RuntimeError: If the checkpoint could not be saved; on all processes.
        """
        self._checkpointer.wait()

    def save_safetensors(
        self,
        path: str | Path,
        max_shard_size: str | int | None = None,
        dtype: str | torch.dtype | None = None,
        *,
        strip_prefix: str | None = None,
    ) -> MergeReport:
        """Save the weights as safetensors; each process writes its own bytes and none gathers them. All must call it.

        The files are those that ``merge_fsdp_weights`` makes of a sharded checkpoint, and appear when
        complete.

        Args:
            path: A file ``NAME.safetensors``, or a folder for ``model.safetensors``, which all processes see. It may be
                a folder's URL: each process uploads its shards, and the first merges them in the store.
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
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return self._checkpointer.read(str(checkpoint_path), weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._deferred_weights.load(partial(self._checkpointer.load_weights, checkpoint, strict=strict))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpointer.load_optimizers(checkpoint)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        self._checkpointer.before_iterating()
        processed = super().process_dataloader(dataloader)
        if self.non_data_parallel_size > 1:
            seed_workers(processed, self.distributed_sampler_kwargs["rank"], self._replicas)
        return processed

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and self._same_batches is not None:
            self._same_batches.check_batch(batch)
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
            self._user_code.end()
        self._tracker.close()
        self._termination.detach()
        self._buffers.detach()
        self.skipped_steps.detach()
        self._summaries.remove()
        self._replicas.remove()
        self._zero_grads.detach()
        self._total_norms.detach()
        if self._sharded is not None:
            self.engine.end_training(self._sharded.root)
        super().teardown()
        self._checkpointer.close()


_ACCELERATES_NAMES: dict[torch.dtype | None, str] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_REFUSED_CALLBACKS = {
    "ModelPruning": PRUNING,
    "WeightAveraging": (
        "copies the model before it is sharded, and would average the copy with shards. Use "
        "accelight.callbacks.ShardedEMA, which averages shards."
    ),
}


@running_as_library(
    *("setup", "teardown", "training_step", "validation_step", "test_step", "predict_step", "backward", "run_backward"),
    *("optimizer_step", "finish_gradients", "clip_grad_norm", "grad_norm", "save_checkpoint", "load_checkpoint"),
    *("lightning_module_state_dict", "load_model_state_dict", "load_optimizer_state_dict", "optimizer_state"),
    *("save_safetensors", "divide_by_items", "parameter_shards", "wait_for_saves", "barrier", "on_exception"),
)
@pickle_by_init_args
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
        reshard_after_forward: FSDP2: free parameters after forward (default True) or keep them for backward; a number
            keeps them sharded over so many processes, such as those of a node. FSDP1: another name of
            ``sharding_strategy``.
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
        whole_tensor_optimizers: Whether optimizers that look further than an element (Adafactor, LAMB, LARS) step on
            whole tensors, each on one rank, as on one process: a rank holds its share of parameters, gradients and
            states a second time during the step. None lets torch's ``Muon`` alone do so, which would gather each matrix
            13 times otherwise. Default None.
        broadcast_buffers: Whether buffers (BatchNorm's statistics, memory banks, counters) are process 0's at each
            forward of a fit, where and when ddp broadcasts them. Default True.
        pretrained_weights: Safetensors file or folder that all ranks see, or its URL, with the model's names or those
            inside the one attribute that holds it. The model is built without memory, and each rank reads its own
            slices.
        compile: Compile each unit in place, after activation checkpointing and before sharding; a dict gives keyword
            arguments of ``torch.compile``. FSDP1 cannot with ``use_orig_params=False``. Default False.
        async_save: Write checkpoints in the background while training continues; the loop waits for the copy to host
            memory alone. See `wait_for_saves`. ``"process"`` lets a separate process for each rank write sharded ones:
            once `Trainer.save_checkpoint` has returned, the checkpoint is completed even if all ranks are killed.
            Default False.
        save_trainable_only: Whether checkpoints leave out what is frozen and has not changed since fit began, such as
            the base of adapters. The module that resumes must have it, or ``pretrained_weights``; other values are an
            error. Default False.
        device_mesh: ``(replicate, shard)`` sizes, or a mesh of these two dimensions, for hybrid sharding (HSDP).
        parallelism_config: Sizes of all dimensions, in the place of ``device_mesh``; also Accelerate's own config. With
            ``tp_size``, FSDP2 shards what tensor parallelism leaves to each process; with ``sp_size`` or ``cp_size``
            processes share sequences. Default: that of ``accelerate launch``, if it has one.
        tp_plan: How tensor parallelism cuts layers: patterns over names of modules to ``"colwise"``, ``"rowwise"`` and
            so on, or to torch's ``ParallelStyle``. Default: the plan of a transformers model.
        sequence_modules: Patterns over names of modules inside of which ``sp_size`` or ``cp_size`` cuts sequences.
            Default: a causal language model of transformers.
        timeout: Of the process group's collectives. Default 30 minutes.
        process_group_backend: Default: gloo on CPU, on an accelerator its own backend, with gloo for CPU tensors.

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
        reshard_after_forward: str | ShardingStrategy | bool | int | None = None,
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
        whole_tensor_optimizers: bool | None = None,
        broadcast_buffers: bool = True,
        pretrained_weights: str | os.PathLike[str] | None = None,
        compile: bool | dict[str, Any] = False,
        async_save: bool | Literal["process"] = False,
        save_trainable_only: bool = False,
        device_mesh: tuple[int, int] | DeviceMesh | None = None,
        parallelism_config: ParallelismConfig | None = None,
        tp_plan: dict[str, Any] | None = None,
        sequence_modules: list[str] | None = None,
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
                "Set these on the plugin, or omit the plugin."
            )
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self.fsdp_plugin = fsdp_plugin or FullyShardedDataParallelPlugin(**fields)
        self.last_grad_norm = None
        self.skipped_steps = SkippedSteps()
        self._recomputed = _recomputed(self.fsdp_plugin, activation_checkpointing_policy)
        self._given_mesh = device_mesh
        self._tp_plan, self._sequence_modules = tp_plan, sequence_modules
        self._parallelism = _checked(parallelism_config, device_mesh, tp_plan, sequence_modules, self.fsdp_plugin)
        self._compile_options = compile if isinstance(compile, dict) else {} if compile else None
        self._pretrained_weights = pretrained_weights
        self._reshard_during_accumulation = reshard_during_accumulation
        self._find_unused_parameters = find_unused_parameters
        self._whole_tensor_optimizers = whole_tensor_optimizers
        self.save_trainable_only = save_trainable_only
        self._tracker, self._termination = LoopTracker(gradient_accumulation), Termination()
        self._termination.items = self._tracker.items
        self._deferred_weights, self._dataloader_states = DeferredWeightLoad(), DataLoaderStates()
        self._buffers = BufferSync(broadcast_buffers)
        self._checkpointer = Checkpointer(self, make_async_saver(async_save, timeout, SavingProcess))
        self._zero_grads = ZeroGradFollowing(self._drop_unreduced)
        self._total_norms, self._summaries = TotalNorms(self._norm_of), Patches("trainer")
        self._replicas = Patches("user code")

    # ------------------------------------------------------------------ what it knows
    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh over all ranks: ``("shard",)``, or ``("replicate", "shard")`` for HSDP."""
        return self.engine.mesh

    # ------------------------------------------------------------------ processes
    @override
    def setup_environment(self) -> None:
        self._refuse_before_setup()
        warn_ignored_process_group_args(self._timeout, self._process_group_backend, self.where_group_starts)
        with explaining_rendezvous():
            super().setup_environment()
        self._termination.begin_run()
        self._deferred_weights.begin()
        PartialState()._refresh(
            device=self.root_device, local_process_index=self.local_rank, num_local_processes=self.num_processes
        )
        mesh, tensor_parallel, sequence_parallel = self._meshes()
        settings = self.fsdp_plugin.settings(
            precision=self.precision_plugin.settings, dp_replicate=mesh.size(0) if mesh.ndim == 2 else 1
        )
        settings = replace(
            settings,
            reshard_during_accumulation=self._reshard_during_accumulation,
            find_unused_parameters=self._find_unused_parameters,
            whole_tensor_optimizers=self._whole_tensor_optimizers,
            compile_options=self._compile_options,
            recomputed=self._recomputed,
        )
        check_kind(self._checkpointer.saves, settings.state_dict_type)
        if self.save_trainable_only and settings.state_dict_type == "local_state_dict":
            raise ValueError(
                "save_trainable_only=True cannot leave parameters out of a local_state_dict, which has flat ones. Use "
                "state_dict_type='sharded_state_dict' or 'full_state_dict'."
            )
        if settings.cpu_offload:
            check_offload(self.root_device)
        self._checkpointer.connect()
        self._engine = build_engine(settings, mesh, self.root_device)
        self._engine.tensor_parallel, self._engine.sequence_parallel = tensor_parallel, sequence_parallel
        self._engine.all_reduce_max_async = self._termination.all_reduce_max_async
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
            parallelism_config=self._parallelism,
        )
        if self.lightning_module is not None:  # its `device_mesh`, for configure_model()
            cuts = tensor_parallel is not None and not settings.cpu_ram_efficient_loading
            whole = tensor_parallel.whole_mesh if tensor_parallel is not None and cuts else mesh
            self.lightning_module._device_mesh = whole

    def _meshes(self) -> tuple[DeviceMesh, TensorParallel | None, SequenceParallel | None]:
        """Return the mesh that FSDP shards over, and what cuts layers and sequences."""
        device = self.root_device.type
        note_copies(None)
        self._same_batches = None
        if self._parallelism is None:
            return build_mesh(self._given_mesh, self.world_size, device), None, None
        self._parallelism = config = self._parallelism.for_processes(self.world_size)
        self._dataloader_states.group_size = config.non_data_parallel_size
        replicate, tp = config.dp_replicate_size or 1, config.tp_size or 1
        setting: Literal["sp_size", "cp_size"] = "cp_size" if config.cp_enabled else "sp_size"
        parts = getattr(config, setting) or 1
        shard = (config.dp_shard_size or 1) * parts  # FSDP shards over the ranks that share a sequence, too
        sequence_parallel, data = None, config.data_parallel_size
        if config.non_data_parallel_size > 1:
            group = build_named_mesh({"data": data, "alike": parts * tp}, device)["alike"].get_group()
            self._same_batches = SameBatches(group, f"{setting}={parts}, tp_size={tp}")
            if parts > 1 and tp > 1:  # else all that are alike share a sequence
                group = build_named_mesh({"data": data, "parts": parts, "tp": tp}, device)["parts"].get_group()
            if parts > 1:
                sequence_parallel = SequenceParallel(group, setting, self._sequence_modules)
        if not config.tp_enabled:
            mesh = build_mesh((replicate, shard) if replicate > 1 else None, self.world_size, device)
            return mesh, None, sequence_parallel
        sizes = {**({"replicate": replicate} if replicate > 1 else {}), "shard": shard, "tp": tp}
        mesh = build_named_mesh(sizes, device)
        tensor_parallel = TensorParallel(mesh, self._tp_plan)
        return mesh[tuple(name for name in sizes if name != "tp")], tensor_parallel, sequence_parallel

    @property
    @override
    def non_data_parallel_size(self) -> int:
        return 1 if self._parallelism is None else self._parallelism.non_data_parallel_size

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
        broadcast_from_rank_zero = self.fsdp_plugin.settings().cpu_ram_efficient_loading
        without_values = self._pretrained_weights is not None or (broadcast_from_rank_zero and not self.is_global_zero)
        with super().tensor_init_context(empty_init), parameters_on_meta() if without_values else nullcontext():
            yield

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        try:
            with marking_units():  # the engine wraps when the module is complete, both versions alike
                yield
        except KeyError as error:  # the module has no `device_mesh["tp"]` then
            if self.engine.tensor_parallel is not None and "('tp',)" in f"{error}":
                raise ValueError(WITHOUT_WEIGHTS) from error
            raise

    @override
    def setup(self, trainer: Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self.accelerator is None or self.model is None or self.lightning_module is None:
            raise RuntimeError("AccelFSDPStrategy.setup() must be called by the Trainer, with a module connected.")
        self.accelerator.setup(trainer)
        self._termination.attach(trainer)
        if self._same_batches is not None:
            self._same_batches.share_random_states(self.root_device)
        if fitting:
            check_callbacks(trainer.callbacks, _REFUSED_CALLBACKS)  # type: ignore[attr-defined]
            check_places(self._checkpointer.saves, trainer.checkpoint_callbacks)
            self._tracker.start_fit(trainer)
            if self._layer_sync:
                self.model = self._layer_sync.apply(self.model)
        is_sharded = recall_sharded(self.lightning_module, self.engine.version) is not None
        self.adapters = adapters_of(self.lightning_module, is_sharded=is_sharded)
        keep_packing(self.lightning_module)
        self.model = self._setup_model(self.model)
        self.frozen_base = None
        if fitting and self.save_trainable_only:
            self.frozen_base = FrozenBase(
                with_constants(self.parameter_shards(), self.lightning_module), self.root_device
            )
        access, root = self.engine.shard_access(self.sharded.root), self.sharded.root
        OwnStateDict.attach(self.lightning_module, access)
        self._deferred_weights.model_is_set_up()
        self._user_code = UserCode(access, self._modules_with_shards(), always_in_steps=self.engine.hides_shards(root))
        self._user_code.attach(trainer, self.lightning_module)
        self.barrier()
        if fitting:
            self._follow_buffers(self.sharded.root)
            summarise_whole(trainer.callbacks, self.sharded.root, self._summaries)  # type: ignore[attr-defined]
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            self._zero_grads.attach(self.lightning_module, self.optimizers)  # with Lightning's wrappers, made just now
            _optimizers_to_device(self.optimizers, self.root_device)
            saved_by = describe_async_mode(self._checkpointer.saves)
            name, precision = type(self).__name__, str(self.precision_plugin.precision)
            by_default = self.fsdp_plugin.version_is_default
            summary = summarise_run(name, self.engine, self.sharded, precision, saved_by, version_is_default=by_default)
            summary.log(trainer)

    def _modules_with_shards(self) -> list[nn.Module]:
        root = self.sharded.root
        owners = self.engine.sharded_modules(root)
        return [module for module in root.modules() if not owners.isdisjoint(module.modules())]

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        model = self.precision_plugin.convert_module(model)
        self._sharded = prepare_with_weights(self.engine, model, self, self._pretrained_weights)
        root = self._sharded.root
        self._running = StepRunner(self.engine, self._sharded, lambda: self._is_manual)
        materialize_alike(self.engine, root)
        for module in root.modules():
            if isinstance(module, Metric):  # its states are neither parameters nor buffers: nobody else moves them
                module.to(self.root_device)
        gather_metrics_once(root, self.non_data_parallel_size, self._replicas)
        if self.precision_plugin.precision == "16-mixed" and self.precision_plugin.scaler is None:
            self.precision_plugin.scaler = self.engine.grad_scaler()
        self.engine.lazy_init(root)
        UnshardOnCall(root, self.engine, self.precision_plugin.outside_context)
        return root

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()  # of an earlier fit: their parameters may be gone
        for parameter in self.sharded.root.parameters():  # of a window that an earlier fit left
            parameter.grad = None
        with without_wrappers(self.sharded.root):
            super(FSDPStrategy, self).setup_optimizers(trainer)
        for optimizer in self.optimizers:
            cut_states(optimizer)
            self.sharded.early.switch(optimizer, unwrap_root(self.sharded.root))
        self.engine.check_optimizers(self.sharded.root, self.optimizers)
        module = self.lightning_module
        if module is not None:
            self._total_norms.attach()
            self._averages_early = self._is_manual or looks_after_backward(trainer, module)
            self._running.resharded_before_backward = looks_before_backward(trainer, module)
            kept = not self._reshard_during_accumulation and not looks_between_batches(trainer, module)
            self._running.kept_gathered = kept
            if not self._reshard_during_accumulation and not kept:
                rank_zero_info(
                    "reshard_during_accumulation=False has no effect in this fit: hooks of the module or its callbacks "
                    "run between micro-batches, and the weights that they change must be gathered."
                )
        if self.precision_plugin.scaler is not None and self.lightning_module is not None:
            self.skipped_steps.hold_back(self.lightning_module, self.lr_scheduler_configs)


def _checked(
    parallelism: Any,
    device_mesh: Any,
    tp_plan: Any,
    sequence_modules: Any,
    plugin: FullyShardedDataParallelPlugin,
) -> ParallelismConfig | None:
    config = launched_parallelism() if parallelism is None else as_parallelism(parallelism)
    for name, given, sizes in (
        ("tp_plan", tp_plan, ("tp_size",)), ("sequence_modules", sequence_modules, ("sp_size", "cp_size"))
    ):  # fmt: skip
        if given is not None and (config is None or all(getattr(config, size) == 1 for size in sizes)):
            raise ValueError(f"{name} needs parallelism_config=ParallelismConfig({sizes[0]}=...), greater than 1.")
    if config is None:
        return None
    if device_mesh is not None:
        raise ValueError("device_mesh and parallelism_config were both given: the config has the same sizes and more.")
    for size in ("tp_size", "sp_size", "cp_size"):
        if getattr(config, size) != 1 and plugin.fsdp_version != 2:
            raise ValueError(f"{size}={getattr(config, size)} needs fsdp_version=2.")
    reshard = plugin.reshard_after_forward
    if config.tp_enabled and isinstance(reshard, int) and not isinstance(reshard, bool):
        raise ValueError(
            f"reshard_after_forward={reshard} and tp_size={config.tp_size} do not go together: torch cannot reshard "
            "what is cut over fewer processes. Use reshard_after_forward=True or False, or tp_size=1."
        )
    return config


def _recomputed(plugin: FullyShardedDataParallelPlugin, policy: Any) -> WrapSettings | None:
    if policy is None:
        return None
    if plugin.activation_checkpointing:
        raise ValueError(
            "activation_checkpointing=True recomputes the units, and activation_checkpointing_policy recomputes "
            "other modules. Set only one of them."
        )
    return WrapSettings(kind="callable", policy=as_policy("activation_checkpointing_policy", policy))


# ------------------------------------------------------------------------------------------------
# The one place that asks for the FSDP version.


def build_engine(settings: EngineSettings, mesh: DeviceMesh, device: torch.device) -> Engine[Any]:
    """Return the engine that ``settings`` are for.

    Raises:
        TypeError: If they are for none.
    """
    if isinstance(settings, FSDP1Settings):
        return FSDP1Engine(settings, mesh, device)
    if isinstance(settings, FSDP2Settings):
        return FSDP2Engine(settings, mesh, device)
    raise TypeError(f"settings must be FSDP1Settings or FSDP2Settings, got {type(settings).__name__}.")
