"""Users' own parameters: their classes, and the hooks on them (``parameter.register_hook``).

Under ddp a hook runs on a parameter's local gradient in each backward, before gradients are reduced. With FSDP,
autograd never reaches the parameter that users see: the hooks run on the unsharded one that is used in its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ....checkpoint.names import clean_name

GUARD = "_accelight_guard"
"""Where a parameter has the handle of a hook that is not the user's."""
_FROM_LIBRARIES = ("torch.", "bitsandbytes.")


def check_parameters(
    model: nn.Module,
    unsharded: Collection[nn.Module] = (),
    *,
    version: int,
    keeps_parameters: bool,
    is_flattened: bool = False,
) -> None:
    """Check that sharding loses nothing of the parameters of ``model``.

    Args:
        model: Not sharded yet.
        unsharded: Modules whose own parameters stay as they are.
        version: Of FSDP.
        keeps_parameters: Whether users see the same objects afterwards.
        is_flattened: Whether they see flat parameters.

    Raises:
        ValueError: If it does; all parameters are listed, with what to do.
    """
    problems: list[str] = []
    for prefix, module in model.named_modules():
        if module not in unsharded:
            for name, parameter in module.named_parameters(prefix, recurse=False):
                problems += _problems(
                    clean_name(name), parameter, keeps_parameters=keeps_parameters, is_flattened=is_flattened
                )
    if problems:
        raise ValueError("\n".join([f"FSDP{version} cannot train this {type(model).__name__}:", *problems]))


def _problems(name: str, parameter: nn.Parameter, *, keeps_parameters: bool, is_flattened: bool) -> Iterator[str]:
    cls: Any = type(parameter)
    is_own = issubclass(cls, nn.Parameter) and cls not in (nn.Parameter, UninitializedParameter)
    if is_own and parameter.requires_grad and not cls.__module__.startswith(_FROM_LIBRARIES):
        behaves = cls.__torch_function__ is not nn.Parameter.__torch_function__
        if behaves or not keeps_parameters:
            yield (
                f"{name}: the class {cls.__name__} is lost when the parameter is sharded. Use nn.Parameter, and mark "
                "it with an attribute (parameter.kind = ...), which stays."
            )
    if parameter._post_accumulate_grad_hooks:
        yield (
            f"{name}: register_post_accumulate_grad_hook() would run on no gradient that an optimizer uses. Use "
            "register_hook() for the local gradient, or on_before_optimizer_step() of the module for the reduced one."
        )
    if parameter._backward_hooks and is_flattened:
        yield (
            f"{name}: register_hook() on a part of a flat parameter never runs. Set use_orig_params=True (the default)."
        )


def run_hooks(parameter: Any, gradient: Tensor) -> Tensor | None:
    """Run the hooks on ``parameter`` on the local gradient of its unsharded form; return what replaces it, if any."""
    changed: Tensor | None = None
    guard = getattr(parameter, GUARD, None)
    for key, hook in list((parameter._backward_hooks or {}).items()):
        if guard is not None and key == guard.id:
            continue
        result = hook(gradient)
        if result is not None:
            gradient = changed = result
    return changed


def run_hooks_on(leaf: Any, record: Any) -> None:
    """Let hooks on a parameter of FSDP2 run on the gradient of its unsharded form.

    Args:
        leaf: The unsharded form.
        record: Torch's record of the parameter, with the ``sharded_param`` that users see.
    """
    if hasattr(leaf, "_accelight_hooks"):
        return
    known = weakref.ref(record)  # a hook keeps what it knows, where no garbage collector looks

    def run(gradient: Tensor) -> Tensor | None:
        found = known()
        return None if found is None else run_hooks(found.sharded_param, gradient)

    is_trained = leaf.requires_grad
    leaf.requires_grad_(True)  # torch hooks nothing else
    leaf._accelight_hooks = leaf.register_hook(run)
    leaf.requires_grad_(is_trained)
