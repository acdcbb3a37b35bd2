"""Where a sharded model's first values come from: each rank's own, rank 0's, or files that all ranks see."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from ...common.agreed_outcome import raise_together
from ..engines.base import Engine
from ..units.sharded_root import ShardedForm, recall_form
from .full_state_dict import Process, send_from_rank_zero
from .ram_efficient import take_weights
from .safetensors_loading import read_slices


def prepare_with_weights(
    engine: Engine[Any], model: nn.Module, process: Process, pretrained_weights: str | os.PathLike[str] | None = None
) -> ShardedForm:
    """Shard ``model`` and see to it that every shard has the right values; every rank calls it.

    Where the values come from elsewhere, nothing that this rank holds is kept while it is sharded, and what arrives is
    shards alone. A model that is sharded already keeps its form and its values.

    Args:
        engine: How to shard, and whether rank 0's weights replace the other ranks'.
        model: With values on every rank, on rank 0 (``weights_from_rank_zero``), or nowhere (``pretrained_weights``).
        process: Anything with ``device`` and ``is_main_process``.
        pretrained_weights: Safetensors file or folder, with the model's names or those inside the one attribute that
            holds all of its parameters.

    Raises:
        RuntimeError: On every rank, if the values and the model do not fit.
    """
    elsewhere = pretrained_weights is not None or engine.settings.weights_from_rank_zero
    if not elsewhere or recall_form(model, engine.version) is not None:
        return engine.prepare(model)
    _check_metrics(model)
    taken = take_weights(model, keep=process.is_main_process or pretrained_weights is not None)
    if pretrained_weights is not None:
        taken.state_dict.clear()  # buffers are all that no file holds
    form = engine.prepare(model, to_be_filled=True)
    with engine.named_tensors(form) as (tensors, targets):
        if pretrained_weights is None:
            send_from_rank_zero(process, tensors, taken.state_dict, taken.buffers, targets)
        else:
            prefixes = ("", f"{form.module_attribute}.") if form.module_attribute else ("",)
            read_slices(Path(pretrained_weights), tensors, taken.buffers, targets, prefixes=prefixes)
    return form


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
