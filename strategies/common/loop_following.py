"""What every strategy of accelight does alike: it starts processes, and tells `LoopTracker` what the Trainer does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from ..upstream.lightning import ParallelStrategy, SIGTERMException, Trainer
from ..upstream.lightning_package import other_package_hint, other_package_is_imported
from .buffer_sync import BufferSync
from .held_weights import HeldWeights
from .launcher import SubprocessScriptLauncher
from .loader_places import LoaderPlaces, with_shared_order
from .loop_tracker import LoopTracker
from .lost_processes import tell_lost_processes
from .termination import Termination, mark_terminated


class LoopFollowing(ParallelStrategy):
    """Comes before Lightning's strategy among the bases; `GradientState` is right in every hook then."""

    _tracker: LoopTracker
    _termination: Termination
    _process_group_backend: str | None
    _held_weights: HeldWeights
    _loader_places: LoaderPlaces
    _buffers: BufferSync
    where_group_starts = "PartialState(timeout=..., backend=...) or init_process_group()"
    """What may have started the process group before the strategy does, for messages."""

    @override
    def __repr__(self) -> str:
        # A Trainer of the other package says no more about a strategy than this.
        return f"<{type(self).__name__}: {other_package_hint()}>" if other_package_is_imported() else super().__repr__()

    @property
    def loader_places(self) -> LoaderPlaces:
        """Where the training loaders are that know it."""
        return self._loader_places

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
    def restore_checkpoint_after_setup(self) -> bool:
        return False  # see `held_weights`

    @override
    def _configure_launcher(self) -> None:
        if self.cluster_environment is not None and not self.cluster_environment.creates_processes_externally:
            num_nodes = getattr(self, "num_nodes", 1)
            self._launcher = SubprocessScriptLauncher(self.cluster_environment, self.num_processes, num_nodes)

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return 0 if self.parallel_devices is None else len(self.parallel_devices)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """How samples are dealt: to the processes that are there, whatever ``Trainer(num_nodes=...)`` says."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is not None:
            return self._process_group_backend
        device = self.root_device
        if device.type == "cpu":
            return "gloo"
        return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"

    def _follow_buffers(self, root: torch.nn.Module) -> None:
        """Begin a fit of ``root``, sharded by now, with rank 0's buffers."""
        self._buffers.follow(root, self.root_device)
        self._termination.message, self._termination.receive = self._buffers.message, self._buffers.receive

    def _running_trainer(self) -> Trainer | None:
        """Return the Trainer if it is inside a loop over batches."""
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        return trainer if trainer is not None and trainer.state.stage is not None else None

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        trainer = self._running_trainer()
        if trainer is not None:
            if trainer.training:
                self._tracker.note_train_batch(trainer, counted=False)
            else:
                self._tracker.note_evaluation_batch(trainer, dataloader_idx)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        trainer = self._running_trainer()
        if trainer is not None:  # again, for training_step(dataloader_iter), whose batches pass nowhere else
            self._tracker.note_train_batch(trainer, counted=True)
        if batch_idx == 0:
            self._buffers.expect_changes()
        super().on_train_batch_start(batch, batch_idx)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self._running_trainer()
        if trainer is not None and trainer.training:
            self._loader_places.take(trainer)
            dataloader = with_shared_order(dataloader, self.distributed_sampler_kwargs)
        return super().process_dataloader(dataloader)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if (trainer := self._running_trainer()) is not None:
            self._loader_places.follow(trainer)

    def _end_training_loop(self) -> None:
        self._tracker.close()
        if (trainer := self._running_trainer()) is not None:
            self._loader_places.let_go(trainer)

    @override
    def on_train_end(self) -> None:
        self._end_training_loop()
        super().on_train_end()
        self._termination.agree()  # for what came during the last batch

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        with self._buffers.forward(is_trained=module is not None and module.automatic_optimization):
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._termination.before_evaluation_batch()
        with self._buffers.forward(is_trained=False):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._termination.before_evaluation_batch()
        with self._buffers.forward(is_trained=False):
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._termination.before_evaluation_batch()
        with self._buffers.forward(is_trained=False):
            return super().predict_step(*args, **kwargs)

    def _end_evaluation(self) -> None:
        self._tracker.end_evaluation()
        self._termination.end_evaluation()

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
        if isinstance(exception, SIGTERMException) and not exception.code:  # raised by Lightning's own loops
            mark_terminated(exception)
        self._end_training_loop()
        super().on_exception(exception)
        tell_lost_processes(exception, self._termination.run)
