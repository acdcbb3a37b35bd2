"""Private names of Lightning (2.6) and torchmetrics: loops, strategies, optimizers, dataloaders, metrics."""

from __future__ import annotations

from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.types import _PATH, _Stateful
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.data import _update_dataloader

__all__ = [
    "_PATH",  # the paths that a strategy's methods take
    "_DataLoaderIterDataFetcher",  # batches of training_step(dataloader_iter) pass no hook
    "_DtypeContextManager",  # the default dtype of "16-true" and "bf16-true"
    "_Launcher",  # every call of the Trainer's comes through it, with its arguments
    "_MockOptimizer",  # what there is where configure_optimizers returns None
    "_Stateful",  # loaders that keep their own place
    "_SubprocessScriptLauncher",  # it does not tell processes how many they are on a node
    "_materialize_distributed_module",  # modules on the meta device, as Lightning's own strategies do
    "_optimizers_to_device",  # the same
    "_set_sampler_epoch",  # an epoch that is begun in the middle shuffles as it did
    "_update_dataloader",  # a loader with another sampler
]

_TRAINER = "lightning.pytorch.Trainer"
_EVALUATION = "lightning.pytorch.loops.evaluation_loop._EvaluationLoop"
_EPOCH = "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop"
_FIT = "lightning.pytorch.loops.fit_loop._FitLoop"
_MODULE = "lightning.pytorch.LightningModule"
_METRIC = "torchmetrics.Metric"
_SIGNALS = "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector"

ATTRIBUTES = {
    "_active_loop": (_TRAINER, "which loop runs, and where in its data it is"),
    "_after_closure": ("lightning.pytorch.plugins.precision.Precision", "hooks before the step, and clipping"),
    "_broadcast_sigterm_tensor": (_EPOCH, "ranks agree on a SIGTERM before a batch"),
    "_combined_loader": (_FIT, "the loaders that a loop goes through"),
    "_computed": (_METRIC, "a padding step's result is forgotten"),
    "_copy_state_dict": (_METRIC, "states are put back after a padding step"),
    "_current_fx_name": (_MODULE, "from which hook a value is logged"),
    "_data_fetcher": (_FIT, "batches that were fetched ahead"),
    "_defaults": (_METRIC, "a metric's states"),
    "_device_mesh": (_MODULE, "the mesh that configure_model() asks for"),
    "_generate_state_key": ("lightning.pytorch.Callback", "how a callback's state is called in a checkpoint"),
    "_is_sequential": (_EVALUATION, "loaders come one after the other"),
    "_layer_sync": ("lightning.pytorch.strategies.ParallelStrategy", "Trainer(sync_batchnorm=True)"),
    "_make_zero_grad_fn": (
        "lightning.pytorch.loops.optimization.automatic._AutomaticOptimization",
        "a window that goes on over an epoch's end is not zeroed there",
    ),
    "_num_ready_batches_reached": (_EPOCH, "whether an epoch's data is at its end"),
    "_reductions": (_METRIC, "how a metric's states are reduced"),
    "_reset_optimizers_and_schedulers": ("lightning.pytorch.strategies.Strategy", "optimizers of an earlier fit"),
    "_results": (_TRAINER, "values that evaluation steps have logged"),
    "_should_accumulate": (_EPOCH, "whether a window ends here"),
    "_signal_connector": (_TRAINER, "Lightning's handler of SIGTERM"),
    "_sigterm_notifier_fn": (_SIGNALS, "the handler itself"),
    "_sync_dist": (_METRIC, "states of any number of samples are gathered"),
    "_trainer": (_MODULE, "the Trainer, or None"),
    "_update_count": (_METRIC, "a padding step does not count"),
}
