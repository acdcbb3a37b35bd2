"""Keeping ranks on one path through the layers of a model that stage 3 has partitioned, or letting them differ.

Stage 3 gathers a layer's parameters where the layer is used, on all ranks at once. A rank on a path of its own would
gather other parameters than its peers, which crashes, hangs, or mixes up values.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...common.compared_actions import ComparedActions

WAY_OUT = (
    "Stage 3 gathers parameters where they are used, on every rank at once. Use stage 0, 1 or 2, or "
    "AccelDeepSpeedStrategy(find_unused_parameters=True), which keeps parameters gathered, or let each rank use the "
    "same layers, for example by adding 0 * layer(x).sum() to its loss."
)


def hold_parameters(engine: Any) -> None:
    """Let stage 3 keep all parameters gathered from each forward to the next step, so that ranks may differ."""
    coordinator = _coordinator(engine)
    coordinator.reset_step = lambda: None  # its trace of layers has to be alike on every rank
    gather(engine)
    engine.module.register_forward_pre_hook(lambda *_: gather(engine), prepend=True)


def gather(engine: Any) -> None:
    """Gather every parameter of an engine that `hold_parameters` has prepared."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    parameters = list(engine.module.parameters())
    partitioned = [each for each in parameters if each.ds_status == ZeroParamStatus.NOT_AVAILABLE]
    if partitioned:
        partitioned[0].all_gather(param_list=partitioned)
    for parameter in parameters:
        parameter.is_external_param = True  # no layer releases it; the step does


def hold_parameters_in_forward(engine: Any) -> None:
    """Let an engine for evaluation keep all parameters gathered during each forward, so that ranks may differ."""
    _coordinator(engine).reset_step = lambda: None
    engine.module.register_forward_pre_hook(lambda *_: gather(engine), prepend=True)
    engine.module.register_forward_hook(lambda *_: _release(engine), always_call=True)


def _release(engine: Any) -> None:
    parameters = list(engine.module.parameters())
    parameters[0].partition(param_list=parameters)


def finish_gather(engine: Any, parameter: nn.Parameter) -> None:
    """Wait for a parameter that DeepSpeed has begun to gather ahead of the forward that needs it."""
    from deepspeed.accelerator import get_accelerator

    coordinator, device = _coordinator(engine), get_accelerator()
    coordinator._PartitionedParameterCoordinator__inflight_param_registry.pop(parameter).wait()
    if not device.resolves_data_dependency():
        device.current_stream().wait_stream(coordinator._PartitionedParameterCoordinator__allgather_stream)


class SamePath:
    """Refuses, by name, to gather the parameters of another layer than the other ranks.

    While DeepSpeed records in which order layers are used, ranks compare each of them. From then on nothing is
    compared, until a rank leaves the recorded order: the others have to say the same.

    Args:
        engine: DeepSpeed's engine, of stage 3.
        timeout: How long ranks wait for each other where they compare.
    """

    def __init__(self, engine: Any, timeout: timedelta) -> None:
        self._compared = ComparedActions(WAY_OUT, timeout)
        # By identity: a metric's hash is another one after each update, on each rank at its own time.
        self._names: MutableMapping[nn.Module, str] = WeakIdKeyDictionary(
            {layer: name for name, layer in engine.module.named_modules()}
        )
        coordinator = self._coordinator = _coordinator(engine)
        self._fetch, self._check_trace = coordinator.fetch_sub_module, coordinator.trace_prologue
        coordinator.fetch_sub_module, coordinator.trace_prologue = self._fetch_alike, self._depart_together

    def _fetch_alike(self, layer: nn.Module, forward: bool) -> None:
        if not all(each is None or hasattr(each, "ds_id") for each in layer._parameters.values()):
            raise RuntimeError(
                f"{self._name(layer)} was called with other parameters than those that are partitioned "
                "(torch.func.functional_call, vmap, parameters replaced by hand), which stage 3 cannot gather. Use "
                "stage 2, or call a copy of the module that was made in __init__(), with the values of "
                "'strategy.full_state_dict()'."
            )
        if not self._coordinator.is_complete_trace():
            self._compared.compare(f"{'goes' if forward else 'goes back'} through {self._name(layer)!r}")
        with torch.inference_mode(False):  # what is gathered in the user's stays, and would not train
            self._fetch(layer, forward)

    def _depart_together(self, layer: nn.Module) -> None:
        was_complete = self._coordinator.is_complete_trace()
        self._check_trace(layer)
        if was_complete and not self._coordinator.is_complete_trace():
            self._compared.compare(f"leaves the recorded order at {self._name(layer)!r}")

    def _name(self, layer: nn.Module) -> str:
        return self._names.get(layer) or type(layer).__name__


def _coordinator(engine: Any) -> Any:
    return getattr(engine.optimizer, "parameter_offload", engine.optimizer).get_param_coordinator()
