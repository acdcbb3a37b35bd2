"""Where a sharded model's first values come from: each rank's own, rank 0's, or files that all ranks see."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...common.agreed_outcome import num_ranks, raise_together
from ...common.one_start import check_layout, check_values, send_from_rank_zero
from ...upstream.lightning import _materialize_distributed_module
from ..engines.base import Engine
from ..units.named_tensors import named_tensors
from ..units.sharded_root import ShardedForm, recall_form
from .full_state_dict import Process
from .full_state_dict import send_from_rank_zero as send_shards
from .ram_efficient import take_weights
from .safetensors_loading import read_slices


def prepare_with_weights(
    engine: Engine[Any], model: nn.Module, process: Process, pretrained_weights: str | os.PathLike[str] | None = None
) -> ShardedForm:
    """Shard ``model`` and see to it that every shard has the right values; every rank calls it.

    All ranks begin with rank 0's values. Where the values come from elsewhere, nothing that this rank holds is kept
    while it is sharded, and what arrives is shards alone. A model that is sharded already keeps its form and its
    values.

    Args:
        engine: How to shard, and whether rank 0's values replace the other ranks'.
        model: With values on every rank, on rank 0 (``weights_from_rank_zero``), or nowhere (``pretrained_weights``).
        process: Anything with ``device`` and ``is_main_process``.
        pretrained_weights: Safetensors file or folder, with the model's names or those inside the one attribute that
            holds all of its parameters.

    Raises:
        RuntimeError: On every rank, if the values and the model do not fit, if the ranks have built different models,
            or if they begin with different values and ``sync_module_states`` is False.
    """
    if recall_form(model, engine.version) is not None:
        return engine.prepare(model)
    if pretrained_weights is None and not engine.settings.weights_from_rank_zero and not _begin_alike(engine, model):
        return engine.prepare(model)
    _check_metrics(model)
    taken = take_weights(model, keep=process.is_main_process or pretrained_weights is not None)
    if pretrained_weights is not None:
        taken.state_dict.clear()  # buffers are all that no file holds
    form = engine.prepare(model, to_be_filled=True)
    with engine.named_tensors(form) as (tensors, targets):
        if pretrained_weights is None:
            send_shards(process, tensors, taken.state_dict, taken.buffers, targets)
        else:
            prefixes = ("", f"{form.module_attribute}.") if form.module_attribute else ("",)
            read_slices(Path(pretrained_weights), tensors, taken.buffers, targets, prefixes=prefixes)
    return form


def _begin_alike(engine: Engine[Any], model: nn.Module) -> bool:
    """Give every rank rank 0's values; every rank calls it, before sharding.

    Returns:
        Whether some ranks have no memory for the values, so that each is to be sent its shards.

    Raises:
        RuntimeError: On every rank, if the ranks have built different models, or begin with different values and
            ``sync_module_states`` is False.
    """
    if engine.mesh.size() != num_ranks():  # a mesh of one's own, over some of the ranks
        return False
    tensors = {named.name: named.tensor for named in named_tensors(model)}
    absent = check_layout(tensors)
    if not engine.settings.sync_module_states:
        check_values({name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)})
    elif absent:
        return True
    else:
        send_from_rank_zero(tensors.values(), engine.device)
    return False


def materialize_alike(engine: Engine[Any], root: nn.Module) -> None:
    """Give what is on the meta device values after sharding; every rank calls it.

    What is not sharded gets rank 0's. A shard is one rank's alone, and the copies of hybrid sharding get the first
    one's.

    Args:
        engine: That has sharded ``root``.
        root: With values, or on the meta device.
    """
    is_made_here = any(named.tensor.is_meta for named in named_tensors(root))
    _materialize_distributed_module(root, engine.device)
    if not is_made_here or not engine.settings.sync_module_states:
        return
    tensors = [named.tensor for named in named_tensors(root)]
    send_from_rank_zero([tensor for tensor in tensors if not isinstance(tensor, DTensor)], engine.device)
    if engine.mesh.ndim == 2 and engine.mesh.size(0) > 1:
        group = engine.mesh.get_group(0)
        with torch.no_grad():
            for tensor in tensors:
                if isinstance(tensor, DTensor):
                    dist.broadcast(tensor.to_local(), group=group, group_src=0)


def _check_metrics(model: nn.Module) -> None:
    """Refuse metrics on the meta device: their states are neither parameters nor buffers, so nobody fills them.

    Raises:
        RuntimeError: On every rank.
    """
    from torchmetrics import Metric

    empty = [
        name
        for name, module in model.named_modules()
        if isinstance(module, Metric)
        for value in module._defaults.values()
        if not isinstance(value, list) and value.is_meta
    ]
    problem = f"the metrics {sorted(set(empty))} are on the meta device: make them in __init__()"
    raise_together("Preparing the model", [problem] if empty else [])
