"""Constants of weights that bitsandbytes holds in 4 and 8 bits: scales and tables, beside the weights in state dicts.

torch's functions for state dicts take the names (``weight.absmax``) for tensors of a parameter, and strict loading
takes most of them for unexpected. A module brings its own constants with its base: checkpoints hold them for other
readers, and for a comparison.

Source: bitsandbytes 0.50 ``nn/modules.py``.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.names import clean_name
from ..upstream.patches import replace_for_good

_OF_8_BITS = ("SCB", "weight_format")


def is_constant(name: str, tensors: Container[str]) -> bool:
    """Return whether an entry of a state dict belongs to one of its tensors: ``weight.absmax`` to ``weight``."""
    owner, _, last = name.rpartition(".")
    if last in _OF_8_BITS:
        return f"{owner}.weight" in tensors
    while owner:
        if owner in tensors:
            return True
        owner = owner.rpartition(".")[0]
    return False


def constants_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the constants that ``module`` computes with, by plain names in a state dict."""
    found: dict[str, Tensor] = {}
    for name, one in module.named_modules():
        prefix = clean_name(f"{name}." if name else "")
        weight = dict(one.named_parameters(recurse=False)).get("weight")  # PEFT's layers show that of the one inside
        state = getattr(weight, "quant_state", None) or vars(one).get("quant_state")
        if state is not None and hasattr(state, "as_dict"):
            found.update({f"{prefix}weight.{key}": value for key, value in state.as_dict(packed=True).items()})
        scales = getattr(weight, "SCB", None)
        if scales is None:
            scales = getattr(vars(one).get("state"), "SCB", None)
        if isinstance(scales, Tensor):
            found[f"{prefix}SCB"] = scales
    return found


def with_constants(shards: Mapping[str, tuple[Tensor, bool]], module: nn.Module) -> dict[str, tuple[Tensor, bool]]:
    """Return parameters' shards, and the constants beside them, which do not train."""
    return {**shards, **{name: (one, False) for name, one in constants_of(module).items()}}


def check_constants(stored: Mapping[str, Any], module: nn.Module, path: object) -> None:
    """Check that a checkpoint's weights have the constants that ``module`` computes with.

    Args:
        stored: By plain names; others are left.
        module: With a base of its own.
        path: Of the checkpoint.

    Raises:
        RuntimeError: If constants differ.
    """
    for name, own in constants_of(module).items():
        if name in stored and not torch.equal(stored[name].cpu(), own.cpu()):
            raise RuntimeError(
                f"{path} holds quantized weights with another {name} than this module has. Build the module with the "
                "same pretrained weights, quantized in the same way."
            )


@contextmanager
def constants_aside(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Keep constants out of state dicts of ``module``, and of those that it loads.

    Yields:
        Those of these state dicts, by plain names.
    """
    found: dict[str, Any] = {}

    def put_aside(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        found.update({clean_name(name): state.pop(name) for name in [one for one in state if is_constant(one, state)]})

    saving = module.register_state_dict_post_hook(put_aside)  # type: ignore[no-untyped-call]
    loading = module.register_load_state_dict_pre_hook(put_aside)  # type: ignore[no-untyped-call]
    try:
        yield found
    finally:
        saving.remove()
        loading.remove()


def keep_packing(module: nn.Module) -> None:
    """Keep 4-bit weights from being packed in another way in evaluation on a CPU: they may be a shard, or a copy."""
    for one in module.modules():
        if getattr(one, "support_avx512bf16_for_cpu", False):
            replace_for_good("sharded modules", one, support_avx512bf16_for_cpu=False)
