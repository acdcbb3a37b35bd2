"""`RayAccelFSDPStrategy`: FSDP1 and FSDP2 in the workers of Ray Train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.launch import pickle_by_init_args
from ..fsdp.strategy import AccelFSDPStrategy
from ..upstream.lightning import FSDPStrategy
from .worker import InRayWorker, ray_lightning

if TYPE_CHECKING:
    from ray.train.lightning import RayFSDPStrategy
else:
    RayFSDPStrategy = ray_lightning("RayAccelFSDPStrategy", FSDPStrategy).RayFSDPStrategy


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
