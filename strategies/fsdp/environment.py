"""The ``FSDP_*`` variables of Accelerate's launcher, and the spellings that they share with arguments."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch

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
    "cpu_ram_efficient_loading": "FSDP_CPU_RAM_EFFICIENT_LOADING",
    "ignored_modules": "FSDP_IGNORED_MODULES",
}
"""The plugin's fields that a variable can fill."""

_BOOLEANS = {"true": True, "yes": True, "on": True, "t": True, "y": True, "1": True} | {
    "false": False,
    "no": False,
    "off": False,
    "f": False,
    "n": False,
    "0": False,
}
_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_HERE = Path(__file__).parent.parent
_warned: set[str] = set()
EnumT = TypeVar("EnumT", bound=Enum)


def fields_from_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return what ``env`` says about the plugin's fields, unparsed. An empty variable counts as unset."""
    return {field: env[variable].strip() for field, variable in VARIABLES.items() if env.get(variable, "").strip()}


def enable_fsdp_ram_efficient_loading() -> None:
    """Tell this process and its children, Hugging Face libraries among them, that only rank 0 loads weights.

    Source: accelerate 1.15 ``utils/fsdp_utils.py``; transformers ``integrations/fsdp.py`` reads both variables.
    """
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")
    os.environ[VARIABLES["cpu_ram_efficient_loading"]] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Take back `enable_fsdp_ram_efficient_loading`: every process loads the weights."""
    os.environ[VARIABLES["cpu_ram_efficient_loading"]] = "False"


def wrong_value(field: str, value: object, allowed: Iterable[object]) -> ValueError:
    """Return the error for a value outside ``allowed``."""
    return ValueError(f"{_source(field)} must be one of {', '.join(map(str, allowed))}; got {value!r}.")


def wrong_type(field: str, value: object, allowed: str) -> TypeError:
    """Return the error for a value that is not even of an allowed type."""
    return TypeError(f"{_source(field)} must be {allowed}; got {value!r} of type {type(value).__name__}.")


def warn_once(field: str, message: str) -> None:
    """Warn who made the plugin, unless this process has been warned about ``field`` before."""
    if field in _warned:
        return
    _warned.add(field)
    depth, frame = 1, sys._getframe()
    while frame.f_back and (frame.f_code.co_filename == "<string>" or _HERE in Path(frame.f_code.co_filename).parents):
        depth, frame = depth + 1, frame.f_back  # a dataclass's __init__ lies in the file "<string>"
    warnings.warn(message, stacklevel=depth)


def as_bool(field: str, value: object) -> bool:
    """Return the boolean that ``value`` is or spells.

    Raises:
        ValueError: If a string spells none.
        TypeError: If it is neither boolean nor string.
    """
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise wrong_type(field, value, "a bool")
    if value.lower() not in _BOOLEANS:
        raise wrong_value(field, value, _BOOLEANS)
    return _BOOLEANS[value.lower()]


def as_int(field: str, value: object) -> int:
    """Return the integer that ``value`` is or spells.

    Raises:
        ValueError: If a string spells none.
        TypeError: If it is neither integer nor string.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise wrong_type(field, value, "an int")
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{_source(field)} must be a whole number; got {value!r}.") from None


def as_member(field: str, value: object, members: type[EnumT]) -> EnumT:
    """Return the member of an enumeration of torch that ``value`` is, names (in any case) or numbers.

    Raises:
        ValueError: If no member has that name or number.
        TypeError: If it is none of the three.
    """
    if isinstance(value, members):
        return value
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise wrong_type(field, value, f"a str, an int or a {members.__name__}")
    # torch spells HYBRID_SHARD_ZERO2 with a leading underscore, Accelerate without.
    spellings = {member.name.lstrip("_"): member for member in members}
    spellings |= {str(member.value): member for member in members}
    member = spellings.get(str(value).upper().lstrip("_"))
    if member is None:
        raise wrong_value(field, value, spellings)
    return member


def as_names(field: str, value: object) -> list[str]:
    """Return the class names in a comma-separated string or in an iterable of strings, as a new list.

    Raises:
        TypeError: If it is neither.
    """
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    names: list[Any] = list(value) if isinstance(value, Iterable) else [value]
    if not all(isinstance(name, str) for name in names) or not isinstance(value, Iterable):
        raise wrong_type(field, value, "a list of class names")
    return names


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


def _source(field: str) -> str:
    variable = VARIABLES.get(field)
    return f"{field} (argument or environment variable {variable})" if variable else field
