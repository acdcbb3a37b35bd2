"""What FSDP would get wrong without a word, or refuse with an obscure one: told by name before anything is sharded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from ....checkpoint.names import clean_name
from ...common.sparse_embeddings import sparse_embeddings
from ..config.settings import PrecisionSettings
from .master_weights import holds_4bit, parameters_by_unit


def check_modules(
    model: nn.Module,
    units: Sequence[nn.Module] = (),
    unsharded: Collection[nn.Module] = (),
    *,
    version: int,
    precision: PrecisionSettings | None = None,
) -> None:
    """Check that FSDP can train what ``model`` is made of.

    Args:
        model: Not sharded yet.
        units: What is gathered on its own, without the root; children before parents.
        unsharded: Modules whose own parameters stay unsharded.
        version: Of FSDP.
        precision: Dtypes of computation and reduction.

    Raises:
        ValueError: If it cannot; all modules and parameters are listed, with what to do.
    """
    names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    problems = [
        *_renormalised(model, unsharded),
        *sparse_embeddings(model),
        *_complex(names, [*parameters_by_unit(model, units, unsharded)], version, precision or PrecisionSettings()),
        *_packed(model, unsharded, precision or PrecisionSettings()),
    ]
    if problems:
        raise ValueError("\n".join([f"FSDP{version} cannot train this {type(model).__name__}:", *problems]))


def _renormalised(model: nn.Module, unsharded: Collection[nn.Module]) -> Iterator[str]:
    """Embeddings that change their weight in forward: of a sharded one a copy, of another the rows of this rank."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or module.max_norm is None:
            continue
        if module not in unsharded or module.weight.requires_grad:
            yield (
                f"{clean_name(name)}: {type(module).__name__}(max_norm={module.max_norm:g}) changes its weight in "
                "forward, which reaches no other process, and is lost. Leave max_norm out and scale what it returns: "
                "x * (max_norm / x.norm(dim=-1, keepdim=True)).clamp(max=1)."
            )


def _complex(
    names: dict[nn.Parameter, str],
    units: Sequence[Sequence[nn.Parameter]],
    version: int,
    precision: PrecisionSettings,
) -> Iterator[str]:
    """Complex parameters: torch 2.13 flattens none, and reduces none together with others or in a real dtype."""
    by_reduction = precision.reduce_dtype not in (None, precision.param_dtype)
    for parameters in units:
        trained = {parameter.dtype for parameter in parameters if parameter.requires_grad}
        if version == 1:
            reason = "flattened"
        else:
            reason = f"reduced in {precision.reduce_dtype}" if by_reduction else "reduced in one unit with real ones"
        for parameter in parameters:
            is_reduced_alone = not parameter.requires_grad or (len(trained) == 1 and not by_reduction)
            if parameter.is_complex() and (version == 1 or not is_reduced_alone):
                yield (
                    f"{names[parameter]}: {parameter.dtype} parameters cannot be {reason}. Hold "
                    "torch.view_as_real(parameter) as the parameter, and compute with torch.view_as_complex of it."
                )


def _packed(model: nn.Module, unsharded: Collection[nn.Module], precision: PrecisionSettings) -> Iterator[str]:
    """4-bit weights of bitsandbytes: whoever converts or rebuilds the tensor that stores them loses them."""
    for name, module in model.named_modules():
        if module in unsharded or not holds_4bit(module):
            continue
        for own, parameter in module.named_parameters(recurse=False):
            if type(parameter) is nn.Parameter:  # a bias beside them
                continue
            stored, wanted = parameter.dtype, precision.param_dtype or torch.bfloat16
            if not stored.is_floating_point:
                problem = "cannot be sharded"
            elif precision.param_dtype not in (None, stored):
                problem = f"would be converted to {wanted} whenever they are gathered"
            else:
                continue
            yield (
                f"{clean_name(f'{name}.{own}')}: 4-bit weights stored as {stored} {problem}. Quantise with "
                f"bnb_4bit_quant_storage={wanted}, or give the module in ignored_modules."
            )
