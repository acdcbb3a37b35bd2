"""The ``ACCELERATE_*`` variables that fill the fields of `DeepSpeedPlugin`, and what each field takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ...common.spelling import (
    FromVariable,
    as_bool,
    as_int,
    as_names,
    source,
    warn_once,
    wrong_type,
    wrong_value,
)
from .hf_config import AUTO, is_auto_value

__all__ = ["PARSERS", "VARIABLES", "as_names", "fields_asked_for", "fields_from_env", "warn_once"]

VARIABLES: Mapping[str, str] = {
    "hf_ds_config": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "transformer_moe_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
    "enable_msamp": "ACCELERATE_FP8_BACKEND",
    "msamp_opt_level": "ACCELERATE_FP8_OPT_LEVEL",
}
"""The plugin's fields that a variable can fill."""

_ASKED_FOR = "ACCELERATE_CONFIG_DS_FIELDS"


def fields_from_env(env: Mapping[str, str]) -> dict[str, FromVariable]:
    """Return what ``env`` says about the plugin's fields, unparsed.

    An empty variable counts as unset, and so does ``none``, which Accelerate's launcher writes for what was not given.
    """
    values = {field: env.get(variable, "").strip() for field, variable in VARIABLES.items()}
    found = {
        field: FromVariable(value, VARIABLES[field])
        for field, value in values.items()
        if value.lower() not in ("", "none")
    }
    if "enable_msamp" in found:  # the variable names one of several FP8 libraries
        is_msamp = found["enable_msamp"].upper() == "MSAMP"
        found["enable_msamp"] = FromVariable(str(is_msamp), VARIABLES["enable_msamp"])
    return found


def fields_asked_for(env: Mapping[str, str]) -> set[str]:
    """Return the fields that the user's Accelerate config file sets itself, and not its launcher by default."""
    return {name.strip() for name in env.get(_ASKED_FOR, "").split(",")} & set(VARIABLES)


def _micro_batches(field: str, value: object) -> int | str:
    if is_auto_value(value):
        return AUTO
    number = as_int(field, value)
    if number < 1:
        raise ValueError(f"{source(field, value)} must be at least 1 (no accumulation), or 'auto'; got {value!r}.")
    return number


def _norm(field: str, value: object) -> float | str:
    if is_auto_value(value):
        return AUTO
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong_type(field, value, "a number or 'auto'")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{source(field, value)} must be a number or 'auto'; got {value!r}.") from None
    if not number >= 0:  # NaN, too
        raise ValueError(f"{source(field, value)} must be at least 0 (no clipping), or 'auto'; got {value!r}.")
    return number


def _stage(field: str, value: object) -> int:
    stage = as_int(field, value)
    if stage not in range(4):
        raise wrong_value(field, value, range(4))
    return stage


def _device(field: str, value: object) -> str:
    return _one_of(field, value, ("none", "cpu", "nvme")).lower()


def _level(field: str, value: object) -> str:
    return _one_of(field, value, ("O1", "O2")).upper()


def _one_of(field: str, value: object, allowed: Collection[str]) -> str:
    if not isinstance(value, str):
        raise wrong_type(field, value, "a str")
    if value.lower() not in {name.lower() for name in allowed}:
        raise wrong_value(field, value, allowed)
    return value


def _path(field: str, value: object) -> str:
    if not isinstance(value, str | os.PathLike):
        raise wrong_type(field, value, "a path")
    return str(os.fspath(value))


def _names(field: str, value: object) -> str:
    return ",".join(as_names(field, value))


def _config(field: str, value: object) -> Any:
    return None if isinstance(value, str) and value.lower() == "none" else value  # Accelerate's word, too


PARSERS: Mapping[str, Callable[[str, object], Any]] = {
    "hf_ds_config": _config,
    "gradient_accumulation_steps": _micro_batches,
    "gradient_clipping": _norm,
    "zero_stage": _stage,
    "is_train_batch_min": as_bool,
    "offload_optimizer_device": _device,
    "offload_param_device": _device,
    "offload_optimizer_nvme_path": _path,
    "offload_param_nvme_path": _path,
    "zero3_init_flag": as_bool,
    "zero3_save_16bit_model": as_bool,
    "transformer_moe_cls_names": _names,
    "enable_msamp": as_bool,
    "msamp_opt_level": _level,
}
"""What turns a given value into the field's own type, or says what is allowed; by field."""
