"""Full checkpoints, in one file, whose weights an engine takes: plain Lightning's, or those of FSDP."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...common.extra_states import is_extra_state, load_extra_states
from ...common.torch_files import check_full, read_torch
from ...upstream.lightning import rank_zero_info, rank_zero_warn
from ..engines import partitions
from ..engines.library import deepspeed_library
from ..engines.window import window_of
from .safe_loading import reading_safely


def is_full(path: Path) -> bool:
    """Return whether ``path`` is a file of ``torch.save``."""
    return path.is_file() and zipfile.is_zipfile(path)


def read_full(path: Path, *, weights_only: bool, fitting: bool) -> dict[str, Any]:
    """Return the Trainer's checkpoint; its weights stay in the file until they are loaded.

    Args:
        path: The file.
        weights_only: False reads anything, whatever it may execute.
        fitting: Whether an optimizer begins, whose state the file has in a form that ZeRO cannot take.

    Raises:
        ValueError: If it holds no weights.
        RuntimeError: If it holds objects that may run code, or is damaged; on every rank.
    """
    with reading_safely(weights_only):
        checkpoint = read_torch(path, weights_only)
    check_full(checkpoint, path)
    if fitting and checkpoint.pop("optimizer_states", None):
        rank_zero_warn(
            f"{path} has the optimizer's state of whole parameters, which DeepSpeed's optimizer does not take: "
            "weights, schedules and the loop's position go on, and the optimizer begins anew. Checkpoints of "
            "AccelDeepSpeedStrategy bring it back."
        )
    return checkpoint


@torch.no_grad()
def load_full(engine: Any, weights: Mapping[str, Tensor], *, strict: bool) -> None:
    """Load full weights into an engine, partitioned or not, and into the fp32 ones that its optimizer steps on.

    Args:
        engine: DeepSpeed's.
        weights: On every rank.
        strict: Whether every weight has to be there, and no other.

    Raises:
        RuntimeError: If names or shapes do not fit.
        ValueError: If the engine keeps fp32 weights where nobody can reach them.
    """
    zero, module = engine.optimizer, engine.module
    partitioned = partitions.is_partitioned_optimizer(zero)
    if not partitioned and isinstance(getattr(zero, "optimizer", None), torch.optim.Optimizer):
        raise ValueError(
            "DeepSpeed's stage 0 in half precision keeps fp32 weights of its own, which do not follow a full "
            "checkpoint. Use stage 1, or load the weights into the module before fit()."
        )
    tensors = _check_names(module, weights, strict=strict)
    for name, tensor in tensors.items():
        if name not in weights:
            continue
        if hasattr(tensor, "ds_id"):
            with deepspeed_library().zero.GatheredParameters([tensor], modifier_rank=0):
                if dist.get_rank() == 0:
                    tensor.copy_(weights[name])
        else:
            tensor.copy_(weights[name])
    load_extra_states(module, weights)
    if partitioned:
        flats = partitions.masters(zero)
        names = {parameter: name for name, parameter in module.named_parameters()}
        for piece in partitions.pieces(zero):
            if names[piece.parameter] in weights:
                values = weights[names[piece.parameter]].flatten()[piece.start : piece.start + piece.numel]
                piece.of(flats[piece.group].detach()).copy_(values)
    window = window_of(engine)
    if window is not None:
        window.accept_weights()


def _check_names(module: nn.Module, weights: Mapping[str, Tensor], *, strict: bool) -> dict[str, Any]:
    """Return the parameters and persistent buffers of a module by all their names."""
    persistent = set(module.state_dict())
    tensors: dict[str, Any] = {
        name: tensor
        for name, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        if name in persistent
    }
    wanted = {*tensors, *filter(is_extra_state, persistent)}
    missing, unexpected = sorted(wanted - set(weights)), sorted(set(weights) - persistent)
    problems = [f"{name} is missing." for name in missing] + [f"{name} is not in the model." for name in unexpected]
    if problems and not strict:
        rank_zero_info("\n".join(["strict_loading=False loads what both sides have:", *problems]))
        problems = []
    for name, tensor in tensors.items():
        shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
        if name in weights and tuple(weights[name].shape) != shape:
            problems.append(f"{name} has the shape {tuple(weights[name].shape)}, and {shape} in the model.")
    if problems:
        raise RuntimeError(
            "\n".join([f"The weights do not fit {type(module).__name__}:", *problems])
            + "\nstrict_loading=False of the LightningModule loads the names that both sides have."
        )
    return tensors
