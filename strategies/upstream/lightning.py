"""All that is used of Lightning (2.6), from whichever of its packages, and private names of torchmetrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lightning_package import lightning_package, other_package_hint

if TYPE_CHECKING or lightning_package() == "lightning":
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.fabric.plugins.precision.utils import _DtypeContextManager
    from lightning.fabric.strategies.deepspeed import _validate_device_index_selection
    from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
    from lightning.fabric.utilities.data import _reinstantiate_wrapped_cls, _set_sampler_epoch, sized_len
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
    from lightning.fabric.utilities.optimizer import _optimizers_to_device
    from lightning.fabric.utilities.seed import pl_worker_init_function
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.callbacks import (
        Checkpoint,
        GradientAccumulationScheduler,
        LambdaCallback,
        ModelCheckpoint,
        ModelSummary,
    )
    from lightning.pytorch.core.optimizer import (
        LightningOptimizer,
        _configure_optimizers,
        _configure_schedulers_automatic_opt,
        _configure_schedulers_manual_opt,
        _MockOptimizer,
        _validate_optimizers_attached,
    )
    from lightning.pytorch.core.saving import _load_state
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
    from lightning.pytorch.plugins.precision import (
        DeepSpeedPrecision,
        DoublePrecision,
        FSDPPrecision,
        HalfPrecision,
        MixedPrecision,
        Precision,
    )
    from lightning.pytorch.profilers import PassThroughProfiler, Profiler
    from lightning.pytorch.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        FSDPStrategy,
        ParallelStrategy,
        SingleDeviceStrategy,
    )
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
    from lightning.pytorch.trainer.call import _call_lightning_module_hook
    from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
    from lightning.pytorch.tuner.tuning import Tuner
    from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_info, rank_zero_warn
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
    from lightning.pytorch.utilities.data import (
        _get_dataloader_init_args_and_kwargs,
        _update_dataloader,
        extract_batch_size,
    )
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.model_summary.model_summary import LayerSummary
    from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary as Summary
    from lightning.pytorch.utilities.seed import isolate_rng
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from lightning.pytorch.utilities.types import LRSchedulerConfig
else:
    from lightning_fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning_fabric.plugins.precision.utils import _DtypeContextManager
    from lightning_fabric.strategies.deepspeed import _validate_device_index_selection
    from lightning_fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
    from lightning_fabric.utilities.data import _reinstantiate_wrapped_cls, _set_sampler_epoch, sized_len
    from lightning_fabric.utilities.distributed import DistributedSamplerWrapper
    from lightning_fabric.utilities.optimizer import _optimizers_to_device
    from lightning_fabric.utilities.seed import pl_worker_init_function
    from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
    from pytorch_lightning.callbacks import (
        Checkpoint,
        GradientAccumulationScheduler,
        LambdaCallback,
        ModelCheckpoint,
        ModelSummary,
    )
    from pytorch_lightning.core.optimizer import (
        LightningOptimizer,
        _configure_optimizers,
        _configure_schedulers_automatic_opt,
        _configure_schedulers_manual_opt,
        _MockOptimizer,
        _validate_optimizers_attached,
    )
    from pytorch_lightning.core.saving import _load_state
    from pytorch_lightning.loggers.logger import DummyLogger
    from pytorch_lightning.loops.fetchers import _DataLoaderIterDataFetcher
    from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
    from pytorch_lightning.plugins.precision import (
        DeepSpeedPrecision,
        DoublePrecision,
        FSDPPrecision,
        HalfPrecision,
        MixedPrecision,
        Precision,
    )
    from pytorch_lightning.profilers import PassThroughProfiler, Profiler
    from pytorch_lightning.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        FSDPStrategy,
        ParallelStrategy,
        SingleDeviceStrategy,
    )
    from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
    from pytorch_lightning.trainer.call import _call_lightning_module_hook
    from pytorch_lightning.trainer.connectors.data_connector import _request_dataloader
    from pytorch_lightning.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
    from pytorch_lightning.tuner.tuning import Tuner
    from pytorch_lightning.utilities import GradClipAlgorithmType, rank_zero_info, rank_zero_warn
    from pytorch_lightning.utilities.combined_loader import CombinedLoader
    from pytorch_lightning.utilities.data import (
        _get_dataloader_init_args_and_kwargs,
        _update_dataloader,
        extract_batch_size,
    )
    from pytorch_lightning.utilities.exceptions import SIGTERMException
    from pytorch_lightning.utilities.model_helpers import is_overridden
    from pytorch_lightning.utilities.model_summary.model_summary import LayerSummary
    from pytorch_lightning.utilities.model_summary.model_summary import ModelSummary as Summary
    from pytorch_lightning.utilities.seed import isolate_rng
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
    from pytorch_lightning.utilities.types import LRSchedulerConfig

__all__ = [
    "AsyncCheckpointIO",
    "Callback",
    "Checkpoint",
    "CheckpointIO",
    "ClusterEnvironment",
    "CombinedLoader",
    "DDPStrategy",
    "DeepSpeedPrecision",
    "DeepSpeedStrategy",
    "DistributedSamplerWrapper",
    "DoublePrecision",
    "DummyLogger",
    "FSDPPrecision",
    "HalfPrecision",
    "MixedPrecision",
    "FSDPStrategy",
    "GradClipAlgorithmType",
    "GradientAccumulationScheduler",
    "LRSchedulerConfig",
    "LayerSummary",
    "LambdaCallback",
    "LightningDataModule",
    "LightningModule",
    "LightningOptimizer",
    "ModelCheckpoint",
    "ModelSummary",
    "ParallelStrategy",
    "PassThroughProfiler",
    "Precision",
    "Profiler",
    "RunningStage",
    "SIGTERMException",
    "SingleDeviceStrategy",
    "Summary",
    "TorchCheckpointIO",
    "Trainer",
    "TrainerFn",
    "TrainerState",
    "TrainerStatus",
    "Tuner",
    "extract_batch_size",
    "isolate_rng",
    "is_overridden",
    "is_param_in_hook_signature",
    "pl_worker_init_function",
    "rank_zero_info",
    "rank_zero_warn",
    "sized_len",
    "_call_lightning_module_hook",  # calls `configure_optimizers` as the Trainer does, with its profiler
    "_configure_optimizers",  # understands every form that `configure_optimizers` may return
    "_configure_schedulers_automatic_opt",  # says when each schedule steps, in automatic optimization
    "_configure_schedulers_manual_opt",  # the same in manual optimization
    "_validate_device_index_selection",  # refuses a choice of devices that DeepSpeed would number otherwise
    "_validate_optimizers_attached",  # refuses the schedule of an optimizer that was not returned
    "_ChildProcessObserver",  # kills the processes of a run of which one has ended with a status
    "_DataLoaderIterDataFetcher",  # batches of training_step(dataloader_iter) pass no hook
    "_DtypeContextManager",  # the default dtype of "16-true" and "bf16-true"
    "_MockOptimizer",  # what there is where configure_optimizers returns None
    "_get_dataloader_init_args_and_kwargs",  # a loader with batches of another kind
    "_reinstantiate_wrapped_cls",  # the same
    "_load_state",  # a module from hyperparameters and weights that lie in no file of Lightning's
    "_SubprocessScriptLauncher",  # it does not give processes their number on a node
    "_optimizers_to_device",  # the same
    "_request_dataloader",  # notes how users make their loaders, which it may make again
    "_set_sampler_epoch",  # an epoch that is begun in the middle shuffles as it did
    "_update_dataloader",  # a loader with another sampler
]

_TRAINER = "lightning.pytorch.Trainer"
_EVALUATION = "lightning.pytorch.loops.evaluation_loop._EvaluationLoop"
_EPOCH = "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop"
_FIT = "lightning.pytorch.loops.fit_loop._FitLoop"
_MODULE = "lightning.pytorch.LightningModule"
_LOADERS = "lightning.pytorch.utilities.combined_loader.CombinedLoader"
_METRIC = "torchmetrics.Metric"
_SUMMARY = "lightning.pytorch.utilities.model_summary.model_summary.ModelSummary"
_OBSERVER = "lightning.fabric.strategies.launchers.subprocess_script._ChildProcessObserver"
_SIGNALS = "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector"

ATTRIBUTES = {
    "_active_loop": (_TRAINER, "which loop runs, and where in its data it is"),
    "_after_closure": ("lightning.pytorch.plugins.precision.Precision", "hooks before the step, and clipping"),
    "_broadcast_sigterm_tensor": (_EPOCH, "ranks agree on a SIGTERM before a batch"),
    "_checkpoint_connector": (_TRAINER, "which checkpoint a run goes on from"),
    "_child_processes": (_OBSERVER, "processes that may end with a status, since their launcher ended them"),
    "_clip_gradients": (
        "lightning.pytorch.plugins.precision.Precision",
        "the last place before a step, around clipping, which knows the norm",
    ),
    "_combined_loader": (_FIT, "the loaders that a loop goes through"),
    "_combined_loader_states_to_load": (_FIT, "where a checkpoint says that loaders are"),
    "_computed": (_METRIC, "a padding step's result is forgotten"),
    "_copy_state_dict": (_METRIC, "states are put back after a padding step"),
    "_current_fx_name": (_MODULE, "from which hook a value is logged"),
    "_data_connector": (_TRAINER, "loaders before the Trainer puts samplers into them"),
    "_data_fetcher": (_FIT, "batches that were fetched ahead"),
    "_data_source": (_FIT, "where the Trainer gets its loaders"),
    "_defaults": (_METRIC, "a metric's states"),
    "_device_mesh": (_MODULE, "the mesh that configure_model() asks for"),
    "_flop_counter": (_SUMMARY, "operations by names with wrappers"),
    "_forward_example_input": (_SUMMARY, "sizes of inputs and outputs"),
    "_generate_state_key": ("lightning.pytorch.Callback", "how a callback's state is called in a checkpoint"),
    "_is_sequential": (_EVALUATION, "loaders come one after the other"),
    "_layer_sync": ("lightning.pytorch.strategies.ParallelStrategy", "Trainer(sync_batchnorm=True)"),
    "_load_state_dicts": (_LOADERS, "loaders go to where their states say"),
    "_make_zero_grad_fn": (
        "lightning.pytorch.loops.optimization.automatic._AutomaticOptimization",
        "a window that goes on over an epoch's end is not zeroed there",
    ),
    "_max_depth": (_SUMMARY, "how deep a summary goes"),
    "_model": (_SUMMARY, "the module that is summarised"),
    "_module": ("lightning.pytorch.utilities.model_summary.model_summary.LayerSummary", "the module of a row"),
    "_num_ready_batches_reached": (_EPOCH, "whether an epoch's data is at its end"),
    "_on_before_fetch": (_EPOCH, "where loaders are before a batch is read ahead"),
    "_prepare_dataloader": (
        "lightning.pytorch.trainer.connectors.data_connector._DataConnector",
        "where it does that",
    ),
    "_reductions": (_METRIC, "how a metric's states are reduced"),
    "_requires_distributed_sampler": (
        "lightning.pytorch.trainer.connectors.data_connector._DataConnector",
        "whether the Trainer will cut a loader among the ranks",
    ),
    "_reset_optimizers_and_schedulers": ("lightning.pytorch.strategies.Strategy", "optimizers of an earlier fit"),
    "_results": (_TRAINER, "values that evaluation steps have logged"),
    "_sampler": (
        "lightning.fabric.utilities.distributed._DatasetSamplerWrapper",
        "whether a loader's own sampler shuffles",
    ),
    "_should_accumulate": (_EPOCH, "whether a window ends here"),
    "_signal_connector": (_TRAINER, "Lightning's handler of SIGTERM"),
    "_sigterm_notifier_fn": (_SIGNALS, "the handler itself"),
    "_slurm_sigusr_handler_fn": (_SIGNALS, "the handler that would save in the middle of a step"),
    "_state_dicts": (_LOADERS, "where loaders are"),
    "_summary": ("lightning.pytorch.callbacks.ModelSummary", "counts a module's parameters"),
    "_sync_dist": (_METRIC, "states of any number of samples are gathered"),
    "_trainer": (_MODULE, "the Trainer, or None"),
    "_update_count": (_METRIC, "a padding step does not count"),
}


# ------------------------------------------------------------------------------------------------
# Refuses the Trainer of the other Lightning package, which would accept a callback.


def check_trainer(trainer: object) -> None:
    """Check that a callback was given to a Trainer of the package that it was made for.

    Raises:
        TypeError: If it is the other package's.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"This Trainer is of {type(trainer).__module__.split('.')[0]}. {other_package_hint()}")
