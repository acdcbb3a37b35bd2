"""Which DeepSpeed engine is on which module: the next one has to end it first, whichever strategy made it.

An engine stays on its module after fit(): it evaluates and saves what it has trained. If it were still there when the
next engine trains, its hooks on parameters and layers would reduce gradients twice and gather parameters for nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..config.settings import DeepSpeedSettings
from . import input_dtypes, layer_outputs
from .earlier_states import EarlierStates
from .library import deepspeed_library
from .master_weights import MasterWeights
from .window import window_of

_ENGINES: WeakKeyDictionary[Any, DeepSpeedSettings] = WeakKeyDictionary()
_OF_LAYERS = ("pre_bwd_fn", "post_bwd_fn")  # functions of one engine, which the next would take over
_OF_PARAMETERS = {
    *("all_gather", "all_gather_coalesced", "partition", "reduce_gradients_at_owner", "partition_gradients", "item"),
    *("aligned_size", "padding_size", "partition_numel", "convert_to_zero_parameters", "_orig_item", "nvme_swapper"),
    *("is_external_param", "_z3_optimizer", "grad_accum"),
}
"""What DeepSpeed's stage 3 adds to parameters, beside what is called ``ds_...``."""


@dataclass(frozen=True)
class Kept:
    """What engines that have ended leave to the next."""

    masters: MasterWeights = field(default_factory=MasterWeights)
    """The fp32 weights of what was trained in 16 bits."""
    states: EarlierStates = field(default_factory=EarlierStates)
    """Of the optimizers of the user's code."""


def remember(engine: Any, settings: DeepSpeedSettings) -> None:
    """Note that an engine is on its module, made with these settings."""
    _ENGINES[engine] = settings


def engine_of(module: nn.Module) -> tuple[Any, DeepSpeedSettings] | None:
    """Return the engine whose module this is and its settings, or None."""
    return next((found for found in _ENGINES.items() if found[0].module is module), None)


def end_engines_on(module: nn.Module, *, stage: int) -> Kept:
    """End every engine that has a parameter of this module.

    Parameters keep their values. Those that stage 3 has partitioned stay partitioned for another engine of that stage;
    for any other, every rank gets the full parameters back.

    Args:
        module: The module that gets another engine.
        stage: The next engine's ZeRO stage.

    Returns:
        What the next engine goes on with.
    """
    mine, kept = set(module.parameters()), Kept()
    for engine in [each for each in list(_ENGINES) if not mine.isdisjoint(each.module.parameters())]:
        kept.masters.keep(engine)
        kept.states.keep(engine)
        end_engine(engine)
    if stage != 3:
        unpartition(module)
    return kept


def end_engine(engine: Any) -> None:
    """Take an engine's hooks off its module."""
    _ENGINES.pop(engine, None)
    window = window_of(engine)
    if window is not None:
        window.forget()
    release_parameters(engine)
    engine.destroy()
    layer_outputs.let_go(engine)
    input_dtypes.let_go(engine)
    for name in ("module_forward_pre_hook", "module_forward_post_hook"):
        if hasattr(engine, name):
            getattr(engine, name).remove()
    for layer in engine.module.modules():
        for name in _OF_LAYERS:
            layer.__dict__.pop(name, None)
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_persist"):
            parameter.ds_persist = parameter.is_external_param = False  # the next engine has its own


def release_parameters(engine: Any) -> None:
    """Let stage 3 release all parameters, even after an exception in the middle of a forward or backward."""
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    if not hasattr(offload, "partition_all_parameters"):
        return
    from deepspeed.runtime.zero import parameter_offload

    roots = [each.module for each in _ENGINES]
    parameter_offload.FWD_MODULE_STACK[:] = [
        layer for layer in parameter_offload.FWD_MODULE_STACK if any(layer is root for root in roots)
    ]
    for layer in engine.module.modules():
        if hasattr(layer._parameters, "_in_forward"):
            layer._parameters._in_forward = False
        layer.__dict__.pop("applied_pre_backward_ref_cnt", None)
        layer.__dict__.pop("ds_grads_remaining", None)
    offload.release_backward_leftovers()
    offload.partition_all_parameters()


def unpartition(module: nn.Module) -> None:
    """Undo stage 3's partitioning; every rank must call it."""
    for layer in module.modules():
        if "_original_parameters" in layer.__dict__:
            del layer.__dict__["_original_parameters"]
            layer._parameters = dict(layer._parameters)
    for parameter in module.parameters():
        if hasattr(parameter, "ds_id"):
            with deepspeed_library().zero.GatheredParameters([parameter]):
                full = parameter.data.clone()
            for name in [name for name in vars(parameter) if name.startswith("ds_") or name in _OF_PARAMETERS]:
                delattr(parameter, name)
            parameter.data = full
