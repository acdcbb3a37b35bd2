"""`RayAccelDeepSpeedStrategy`: DeepSpeed's ZeRO in the workers of Ray Train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.launch import pickle_by_init_args
from ..deepspeed.strategy import AccelDeepSpeedStrategy
from ..upstream.lightning import DeepSpeedStrategy
from .worker import InRayWorker, ray_lightning

if TYPE_CHECKING:
    from ray.train.lightning import RayDeepSpeedStrategy
else:
    RayDeepSpeedStrategy = ray_lightning("RayAccelDeepSpeedStrategy", DeepSpeedStrategy).RayDeepSpeedStrategy


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
