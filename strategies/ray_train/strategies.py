"""Strategies for the workers of Ray Train: Ray starts them, connects them, and assigns their devices."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from ..common.launch import pickle_by_init_args
from ..common.loop import LoopFollowing
from ..deepspeed.strategy import AccelDeepSpeedStrategy
from ..fsdp.strategy import AccelFSDPStrategy
from ..upstream.lightning import FSDPStrategy
from .storage import ray_train, worker_context


def _ray_lightning(who: str, base: type) -> Any:
    """Import ``ray.train.lightning``, whose strategies are to be of the package that accelight follows.

    Args:
        who: Needs it.
        base: A strategy of that package.

    Raises:
        ModuleNotFoundError: If Ray is not installed.
        RuntimeError: If Ray follows Lightning's other package.
    """
    ray_train(who)
    module = importlib.import_module("ray.train.lightning")
    theirs = module.RayDDPStrategy.__bases__[0]
    if _package(theirs) != _package(base):
        raise RuntimeError(
            f"Ray uses the package {_package(theirs)}, but accelight uses {_package(base)}. Ray uses lightning "
            "wherever it is installed: import lightning before accelight, or set ACCELIGHT_LIGHTNING=lightning."
        )
    return module


def _package(cls: type) -> str:
    return cls.__module__.split(".")[0]


class InRayWorker(LoopFollowing):
    """Comes before accelight's strategy among the bases, and that before Ray's."""

    where_group_starts = "TorchTrainer(torch_config=TorchConfig(timeout_s=..., backend=...))"

    _device: torch.device | None = None

    def _context(self) -> Any:
        name = type(self).__name__
        return worker_context(name, f"{name.removeprefix('Ray')}")

    @property
    def root_device(self) -> torch.device:
        """The device that Ray has given this worker."""
        if self._device is None:  # asked for at each batch, and Ray looks it up anew
            self._context()
            self._device = importlib.import_module("ray.train.torch").get_device()
        return self._device

    @property
    @override
    def num_processes(self) -> int:
        return int(self._context().get_local_world_size())

    @override
    def _configure_launcher(self) -> None:
        """Start nothing: the workers are there."""

    @override
    def setup_environment(self) -> None:
        self._context()
        environment = importlib.import_module("ray.train.lightning").RayLightningEnvironment
        if not isinstance(self.cluster_environment, environment):
            raise RuntimeError(
                f"{type(self).__name__} asks Ray which process this is, but the Trainer asks "
                f"{type(self.cluster_environment).__name__}. Use Trainer(plugins=[RayLightningEnvironment()]) of "
                "ray.train.lightning, and its prepare_trainer(trainer)."
            )
        super().setup_environment()


if TYPE_CHECKING:
    from ray.train.lightning import RayDeepSpeedStrategy, RayFSDPStrategy
else:
    _ray = _ray_lightning("A strategy for Ray's workers", FSDPStrategy)
    RayDeepSpeedStrategy, RayFSDPStrategy = _ray.RayDeepSpeedStrategy, _ray.RayFSDPStrategy


@pickle_by_init_args
class RayAccelFSDPStrategy(InRayWorker, AccelFSDPStrategy, RayFSDPStrategy):
    """`AccelFSDPStrategy` for the workers of Ray Train: Ray's ``prepare_trainer`` takes it.

    ::

        trainer = Trainer(
            strategy=RayAccelFSDPStrategy(fsdp_version=2), plugins=[RayLightningEnvironment()],
            devices="auto", accelerator="auto", callbacks=[RayReportCheckpoint()],
        )
        trainer = prepare_trainer(trainer)
        trainer.fit(module, loader, ckpt_path=reported_checkpoint())

    It takes the same arguments and trains the same weights; state dicts are those of `AccelFSDPStrategy`, too. Ray
    starts the processes, connects them and chooses the devices, so ``timeout`` and ``process_group_backend`` have no
    effect: give ``TorchConfig(timeout_s=..., backend=...)`` to Ray. ``backend="cpu:gloo,cuda:nccl"`` is what
    ``cpu_offload=True`` needs on GPUs.

    Args:
        *args: As for `AccelFSDPStrategy`.
        **kwargs: As for `AccelFSDPStrategy`.

    Raises:
        ModuleNotFoundError: On import, if Ray Train is not installed.
        RuntimeError: When a Trainer uses it outside of a Ray Train worker, or without ``RayLightningEnvironment``.

    Source: ray 2.60 ``train/lightning/_lightning_utils.py`` (``RayFSDPStrategy``, ``prepare_trainer``).
    """

    strategy_name = "ray_accel_fsdp"


@pickle_by_init_args
class RayAccelDeepSpeedStrategy(InRayWorker, AccelDeepSpeedStrategy, RayDeepSpeedStrategy):
    """`AccelDeepSpeedStrategy` for the workers of Ray Train: Ray's ``prepare_trainer`` takes it.

    It is used as `RayAccelFSDPStrategy` is, and takes the arguments of `AccelDeepSpeedStrategy`; ``timeout`` and
    ``process_group_backend`` have no effect: give ``TorchConfig(timeout_s=..., backend=...)`` to Ray.

    Args:
        *args: As for `AccelDeepSpeedStrategy`.
        **kwargs: As for `AccelDeepSpeedStrategy`.

    Raises:
        ModuleNotFoundError: On import, if Ray Train is not installed; when it is made, if DeepSpeed is not.
        RuntimeError: When a Trainer uses it outside of a Ray Train worker, or without ``RayLightningEnvironment``.

    Source: ray 2.60 ``train/lightning/_lightning_utils.py`` (``RayDeepSpeedStrategy``, ``prepare_trainer``).
    """

    strategy_name = "ray_accel_deepspeed"
