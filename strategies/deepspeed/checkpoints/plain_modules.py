"""What DeepSpeed leaves on modules, for those that are saved among the hyperparameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...common.plain_modules import Traces

_ADDED = {"applied_pre_backward_ref_cnt", "_external_params", "_original_parameters"}
"""What DeepSpeed's stage 3 adds to layers, beside functions and what is called ``ds_...``."""


def _restore(attributes: dict[str, Any]) -> None:
    attributes["_parameters"] = dict(attributes.get("_original_parameters", attributes["_parameters"]))
    for name in list(attributes):
        if name.startswith("ds_") or name in _ADDED:
            del attributes[name]


def _is_partitioned(layer: nn.Module) -> bool:
    return any(hasattr(parameter, "ds_id") for parameter in layer.parameters(recurse=False))


TRACES = Traces(
    packages=("deepspeed", "accelight"),
    restore=_restore,
    holds_shards=_is_partitioned,
    told="ZeRO-3 has partitioned",
)
