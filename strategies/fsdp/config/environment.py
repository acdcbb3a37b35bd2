"""The ``FSDP_*`` variables of Accelerate's launcher, and the spellings that they share with arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from ...common.spelling import (
    FromVariable,
    as_bool,
    as_int,
    as_member,
    as_names,
    source,
    warn_once,
    wrong_type,
    wrong_value,
)

__all__ = [
    "VARIABLES",
    "as_bool",
    "as_dtype",
    "as_int",
    "as_member",
    "as_names",
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "fields_from_env",
    "source",
    "warn_once",
    "wrong_type",
    "wrong_value",
]

VARIABLES: Mapping[str, str] = {
    "fsdp_version": "FSDP_VERSION",
    "sharding_strategy": "FSDP_SHARDING_STRATEGY",
    "reshard_after_forward": "FSDP_RESHARD_AFTER_FORWARD",
    "backward_prefetch": "FSDP_BACKWARD_PREFETCH",
    "auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "transformer_cls_names_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "min_num_params": "FSDP_MIN_NUM_PARAMS",
    "cpu_offload": "FSDP_OFFLOAD_PARAMS",
    "state_dict_type": "FSDP_STATE_DICT_TYPE",
    "use_orig_params": "FSDP_USE_ORIG_PARAMS",
    "sync_module_states": "FSDP_SYNC_MODULE_STATES",
    "forward_prefetch": "FSDP_FORWARD_PREFETCH",
    "activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
    "activation_checkpointing_offload": "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
    "cpu_ram_efficient_loading": "FSDP_CPU_RAM_EFFICIENT_LOADING",
    "ignored_modules": "FSDP_IGNORED_MODULES",
}
"""The plugin's fields that a variable can fill."""

_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def fields_from_env(env: Mapping[str, str]) -> dict[str, FromVariable]:
    """Return what ``env`` says about the plugin's fields, unparsed. An empty variable counts as unset."""
    texts = {field: env.get(variable, "").strip() for field, variable in VARIABLES.items()}
    return {field: FromVariable(text, VARIABLES[field]) for field, text in texts.items() if text}


def enable_fsdp_ram_efficient_loading() -> None:
    """Tell this process and its children, Hugging Face libraries among them, that only rank 0 loads weights.

    Source: accelerate 1.15 ``utils/fsdp_utils.py``; transformers ``integrations/fsdp.py`` reads both variables.
    """
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")
    os.environ[VARIABLES["cpu_ram_efficient_loading"]] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Take back `enable_fsdp_ram_efficient_loading`: every process loads the weights."""
    os.environ[VARIABLES["cpu_ram_efficient_loading"]] = "False"


def as_dtype(field: str, value: object) -> torch.dtype:
    """Return the floating-point dtype that ``value`` is or names.

    Raises:
        ValueError: If it is no dtype that a model computes in.
        TypeError: If it is neither dtype nor string.
    """
    if not isinstance(value, torch.dtype | str):
        raise wrong_type(field, value, "a str or a torch.dtype")
    dtype = _DTYPES.get(value.lower().removeprefix("torch.")) if isinstance(value, str) else value
    if dtype is None or dtype not in _DTYPES.values():
        raise wrong_value(field, value, _DTYPES)
    return dtype
