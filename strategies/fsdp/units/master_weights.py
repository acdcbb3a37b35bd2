"""What a precision makes of a model's weights before it is sharded: fp32 masters of what is trained, and no more."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from ....checkpoint.names import clean_name
from ...upstream.lightning import rank_zero_warn
from ..config.settings import EngineSettings
from ..config.wrapping import resolve_ignored, units_to_wrap
from .groups import without_split_ties
from .plan import left_over, parts_called_alone

_NUM_NAMES = 3


def make_masters(model: nn.Module, without: Collection[nn.Module] = ()) -> None:
    """Let trainable floating-point parameters be fp32, also where the model was loaded in half precision.

    Frozen ones keep their dtype and so their memory, and nothing of a module with 4-bit weights (bitsandbytes) is
    touched: their bytes are packed numbers, whatever dtype they are stored as.

    Args:
        model: Not sharded yet.
        without: Modules whose own parameters stay as they are.

    Source: accelerate 1.15 ``utils/fsdp_utils.py`` (``fsdp2_prepare_model``); huggingface/accelerate#3979, #3987.
    """
    for module in model.modules():
        if module in without or holds_4bit(module):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                _upcast(parameter)


def one_dtype_in_each_unit(model: nn.Module, settings: EngineSettings) -> None:
    """Let a unit of FSDP1 be fp32 where it has several dtypes: torch flattens it into one tensor.

    Args:
        model: Not sharded yet.
        settings: What its units will be.

    Raises:
        ValueError: If one of them is a 4-bit weight, which cannot be converted.
    """
    packed = {
        parameter for module in model.modules() if holds_4bit(module) for parameter in module.parameters(recurse=False)
    }
    changed: list[nn.Parameter] = []
    for parameters in _parameters_by_planned_unit(model, settings):
        floating = [parameter for parameter in parameters if parameter.is_floating_point()]
        dtypes = {parameter.dtype for parameter in floating}
        if len(dtypes) < 2:
            continue
        if not packed.isdisjoint(floating):
            raise ValueError(
                f"FSDP1 flattens the parameters of a unit into one tensor, and one of them has 4-bit weights beside "
                f"others in {' and '.join(sorted(map(str, dtypes)))}: "
                f"{_named(model, floating)}. Give what is trained units of its own, or use fsdp_version=2."
            )
        changed += [parameter for parameter in floating if parameter.dtype != torch.float32]
        for parameter in floating:
            _upcast(parameter)
    if changed:
        rank_zero_warn(
            "FSDP1 flattens the parameters of a unit into one tensor of one dtype. These are frozen, and fp32 from now "
            f"on, since their units hold fp32 as well: {_named(model, changed)}. Give frozen layers units of their "
            "own, or use fsdp_version=2, to keep them as small as they were."
        )


def convert_floats(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert floating-point parameters and buffers in place, as ``model.to(dtype)`` would.

    But complex ones, which that would make real, stay; and so do modules with 4-bit weights.
    """
    kept = {
        id(tensor)
        for module in model.modules()
        if holds_4bit(module)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and id(tensor) not in kept else tensor

    model._apply(convert)  # type: ignore[no-untyped-call]
    return model


def parameters_by_unit(
    model: nn.Module, units: Sequence[nn.Module], unsharded: Collection[nn.Module]
) -> Iterator[list[nn.Parameter]]:
    """Yield what each unit gathers; the last one is the root's.

    Args:
        model: Not sharded yet.
        units: Without the root; children before parents.
        unsharded: Modules whose own parameters nobody gathers.
    """
    taken = {parameter for module in unsharded for parameter in module.parameters(recurse=False)}
    for unit in [*units, model]:
        yield [parameter for parameter in unit.parameters() if parameter not in taken]
        taken.update(unit.parameters())


def holds_4bit(module: nn.Module) -> bool:
    """Return whether a module itself has 4-bit weights of bitsandbytes."""
    classes = (cls for parameter in module.parameters(recurse=False) for cls in type(parameter).__mro__)
    return any(cls.__name__ == "Params4bit" for cls in classes)


def _parameters_by_planned_unit(model: nn.Module, settings: EngineSettings) -> Iterator[list[nn.Parameter]]:
    """Yield what each unit will gather, if there is anything to be told apart."""
    if len({parameter.dtype for parameter in model.parameters()}) < 2:
        return
    ignored = resolve_ignored(model, settings.ignored_modules)
    units = without_split_ties(model, [unit for _, unit in units_to_wrap(model, settings.wrap, ignored)], ignored)
    parts = without_split_ties(model, parts_called_alone(model, ignored), ignored)
    unsharded = ignored | left_over(model, parts) if parts else ignored
    yield from parameters_by_unit(model, [*units, *parts], unsharded)


def _upcast(parameter: nn.Parameter) -> None:
    if parameter.is_floating_point() and parameter.dtype != torch.float32:
        parameter.data = parameter.data.float()


def _named(model: nn.Module, parameters: Collection[nn.Parameter]) -> str:
    chosen = set(parameters)
    names = [clean_name(name) for name, parameter in model.named_parameters() if parameter in chosen]
    more = f" and {len(names) - _NUM_NAMES} more" if len(names) > _NUM_NAMES else ""
    return ", ".join(names[:_NUM_NAMES]) + more
