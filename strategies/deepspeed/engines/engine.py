"""DeepSpeed's engine, driven from outside: a window ends where it is told, never by its own count."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...common.one_start import check_layout, send_from_rank_zero
from ..config.settings import DeepSpeedSettings
from .build_locks import check_build_locks, ops_of_optimizer
from .config_errors import readable_config_errors
from .earlier_states import drive_adagrad, keeping_adagrad
from .engine_registry import remember
from .input_dtypes import cast_inputs
from .layer_outputs import OpaqueOutputs
from .library import deepspeed_library, ninja_on_path
from .partitions import clear_padding
from .window import Window


def start_engine(
    module: nn.Module,
    settings: DeepSpeedSettings,
    device: torch.device,
    *,
    optimizer: Any = None,
    parameters: Iterable[Any] = (),
    lr_scheduler: Any = None,
) -> Any:
    """Run ``deepspeed.initialize``; all ranks begin with rank 0's parameters and buffers.

    Args:
        module: The model; the engine shards it in place.
        settings: Of this engine; their config is handed on.
        device: Where this rank computes.
        optimizer: A real optimizer; None takes the config's, over ``parameters``.
        parameters: Parameters, or groups of them, for the config's optimizer.
        lr_scheduler: A callable that makes a schedule; None takes the config's, if it has one.

    Raises:
        RuntimeError: On every rank, if the ranks have built different models.
    """
    check_layout(dict(itertools.chain(module.named_parameters(), module.named_buffers())))
    send_from_rank_zero(module.buffers(), device)  # DeepSpeed broadcasts the parameters alone
    # The engine compares the rank of its device with 0, where Lightning has None for the CPU.
    arguments = argparse.Namespace(device_rank=0 if device.index is None else device.index)
    check_build_locks(*ops_of_optimizer(settings))
    outputs = OpaqueOutputs(module) if settings.zero_stage == 3 else None
    with ninja_on_path(), readable_config_errors(), keeping_adagrad(optimizer):
        engine, *_ = deepspeed_library().initialize(
            args=arguments,
            config=settings.config,
            model=module,
            optimizer=optimizer,
            model_parameters=list(parameters),
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
    if outputs is not None:
        outputs.follow(engine)
        clear_padding(engine.module, engine.optimizer)
    drive_adagrad(engine)
    cast_inputs(engine)
    remember(engine, settings)
    return engine


@contextmanager
def gradients_scaled(engine: Any, factor: float) -> Iterator[None]:
    """Make the engine's step inside this context use its gradients multiplied by ``factor``.

    ZeRO's optimizers divide their gradients by the loss scale, wherever they keep them (flat partitions, host memory,
    files): a scale smaller by ``factor`` is one way for all. Others have gradients where torch has them.
    """
    scaler = getattr(engine.optimizer, "loss_scaler", None) if engine.zero_optimization() else None
    if factor == 1.0 or scaler is None:
        for gradient in () if factor == 1.0 else _plain_gradients(engine):
            gradient.mul_(factor)
        yield
        return
    scaler.cur_scale /= factor
    try:
        yield
    finally:  # a dynamic scale may have moved in between, by a factor of its own
        scaler.cur_scale *= factor


def _plain_gradients(engine: Any) -> list[torch.Tensor]:
    of_bf16_optimizer = getattr(engine.optimizer, "fp32_groups_gradients", None)
    if of_bf16_optimizer is not None:
        return [gradient for group in of_bf16_optimizer for gradient in group if gradient is not None]
    return [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]


def step(engine: Any, window: Window, factor: float, **kwargs: Any) -> torch.Tensor | None:
    """Let the optimizer step on the window's gradients multiplied by ``factor``.

    Returns:
        The gradients' global norm before clipping; None without any, or where DeepSpeed is told not to compute it.
    """
    window.complete()
    with gradients_scaled(engine, factor):
        plain = None if engine.zero_optimization() else _plain_norm(engine)
        window.step(**kwargs)
    norm = engine.get_global_grad_norm() if plain is None else plain
    return None if norm is None or not window.has_stepped else torch.as_tensor(norm).detach().float().reshape(())


def _plain_norm(engine: Any) -> torch.Tensor:
    """Return the norm of unpartitioned gradients: stage 0 computes none in fp32, and a scaled one in fp16."""
    config, scaler = getattr(engine.optimizer, "loss_scale_config", None), engine.torch_autocast_z0_gradscaler
    scale = scaler.get_scale() if scaler is not None else 1.0 if config is None else config.cur_scale
    return nn.utils.get_total_norm([gradient.float() for gradient in _plain_gradients(engine)]) / scale
