"""``state_dict()`` and ``load_state_dict()`` that users call on a sharded module, or on any part of it.

A state dict holds sharded tensors of the full shape: DTensors (FSDP2) or `FlatShard` (FSDP1, ZeRO-3). No rank waits for
another, and a shard refuses to be pickled alone; ``strategy.full_state_dict()`` gathers. Loading takes full tensors or
shards, under the names that the model had, and each rank keeps its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor

from .global_tensors import ShardAccess, Sharded, local_part, part_of
from .user_code import is_library, is_user_code

_MARK = "_accelight_state_dicts"


def follow_state_dicts(modules: Iterable[nn.Module], access: ShardAccess) -> None:
    """Let these modules save and load shards when users call them.

    Args:
        modules: Those with sharded parameters of their own.
        access: Where the shards are.
    """
    for module in modules:
        if _MARK not in module.__dict__:
            module.register_state_dict_post_hook(_after_saving)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_before_loading)  # type: ignore[no-untyped-call]
        module.__dict__[_MARK] = access


def _after_saving(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Let a state dict of users' have shards."""
    if is_library() or is_user_code():  # under a mode, detach() has done it
        return
    access: ShardAccess = module.__dict__[_MARK]
    for name, parameter in module._parameters.items():
        is_flat = parameter is None or isinstance(parameter, FlatParameter)  # the flat one is torch's business
        shard = None if parameter is None or is_flat else access.shard_of(parameter)
        if shard is not None and state_dict.get(prefix + name, parameter) is not parameter:
            state_dict[prefix + name] = shard


def _before_loading(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Cut full tensors to this rank's part."""
    if is_library() or is_user_code():  # under a mode, copy_() does it
        return
    access: ShardAccess = module.__dict__[_MARK]
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if parameter is None or not isinstance(value, Tensor):
            continue
        known: Any = parameter
        shard = known if isinstance(known, Sharded) else access.shard_of(parameter)
        if shard is None or value.shape != shard.shape or (isinstance(value, DTensor) and shard is known):
            continue
        part = value if isinstance(value, Sharded) else part_of(value, shard)
        if isinstance(known, Sharded):
            state_dict[prefix + name] = part
        elif local_part(shard).shape == parameter.shape:
            state_dict[prefix + name] = local_part(part)
        else:  # ZeRO-3, whose parameter shows nothing
            local_part(shard).copy_(local_part(part))
            state_dict[prefix + name] = parameter.detach()


def refuse_copies(modules: Iterable[nn.Module]) -> None:
    """Let ``copy.deepcopy()`` of sharded modules, or of what has them, say what to do instead."""
    for module in modules:
        module.__dict__["__deepcopy__"] = partial(_refuse_copy, type(module).__name__)


def _refuse_copy(name: str, _: dict[int, Any]) -> nn.Module:
    raise RuntimeError(
        f"copy.deepcopy() of a sharded module ({name}): a copy would not be sharded as its original. Copy the module "
        "in __init__() or configure_model(), before it is sharded, as a submodule; or load "
        "strategy.full_state_dict(module) into a new one."
    )


def replace_in_user_code(hooks: MutableMapping[int, Any], other: Callable[..., Any]) -> None:
    """Let ``other`` run in place of torch's own hooks while users' code runs under a mode."""
    for key, hook in list(hooks.items()):
        if getattr(hook, _MARK, None) is None:
            hooks[key] = _choosing(hook, other)


def _choosing(hook: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        return other(*args, **kwargs) if is_user_code() else hook(*args, **kwargs)

    setattr(run, _MARK, True)
    return run
