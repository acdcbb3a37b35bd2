"""Full parameters, gradients and state dicts on request, with any strategy.

With the strategies of accelight the ranks gather what is sharded, and each writes its own part back when the context
ends. With any other strategy of Lightning (``ddp``, one device) tensors are whole already, so one script runs with all.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter

from ...checkpoint.names import clean_name
from .global_tensors import GlobalTensors, ShardAccess, Sharded, gathered, local_part, part_of
from .user_code import UserCode, library_code, running

Modules = nn.Module | Iterable[nn.Module] | None


class FullTensors:
    """Methods of the strategies of accelight."""

    _user_code: UserCode | None

    @property
    def shard_access(self) -> ShardAccess:
        """Where the shards are.

        Raises:
            RuntimeError: Before the model is sharded.
        """
        if self._user_code is None:
            raise RuntimeError("There is no sharded model yet: it exists from the strategy's setup on.")
        return self._user_code.access

    def full_parameters(
        self, modules: Modules = None, *, writeback: bool = True
    ) -> AbstractContextManager[dict[str, nn.Parameter]]:
        """See `full_parameters`."""
        return full_parameters(self, modules, writeback=writeback)

    def full_gradients(
        self, modules: Modules = None, *, writeback: bool = True
    ) -> AbstractContextManager[dict[str, Tensor]]:
        """See `full_gradients`."""
        return full_gradients(self, modules, writeback=writeback)

    def full_state_dict(self, module: nn.Module | None = None) -> dict[str, Any]:
        """See `full_state_dict`."""
        return full_state_dict(self, module)


@contextmanager
def full_parameters(
    strategy: Any, modules: Modules = None, *, writeback: bool = True
) -> Generator[dict[str, nn.Parameter], None, None]:
    """Let modules have full, writable parameters inside this context; every rank enters it.

    Do not call the modules inside: their forward gathers and frees parameters itself.

    Args:
        strategy: The Trainer's (``trainer.strategy``).
        modules: A module or several; default: the LightningModule. Parameters of modules inside them are included.
        writeback: Whether each rank's part of the values at the end is what trains on. All ranks must have written the
            same; under ``ddp`` ranks that write different values diverge in the same way.

    Yields:
        The parameters by their names in ``modules``, without the names of wrappers; on the device of the shards.

    Raises:
        RuntimeError: Before the model is sharded.
    """
    found = list(_modules(strategy, modules))
    names = {name: parameter for name, _, _, parameter in _places(found)}
    if not hasattr(strategy, "shard_access"):
        yield names
        return
    _come(strategy, "calls full_parameters()")
    access: ShardAccess = strategy.shard_access
    with library_code():
        shards: dict[int, tuple[Sharded, nn.Parameter]] = {}
        places = list(_places(found))
        for _, _, _, parameter in places:
            shard = _shard(access, parameter)
            if shard is not None and isinstance(parameter, FlatParameter):
                raise RuntimeError(
                    "full_parameters() cannot show original parameters with use_orig_params=False: modules have none. "
                    "Set use_orig_params=True (the default)."
                )
            if shard is not None and id(parameter) not in shards:
                shards[id(parameter)] = shard, nn.Parameter(gathered(shard), parameter.requires_grad)
        for _, owner, name, parameter in places:
            if id(parameter) in shards:
                owner._parameters[name] = shards[id(parameter)][1]
    try:
        yield {name: shards[id(one)][1] if id(one) in shards else one for name, one in names.items()}
    finally:
        with library_code(), torch.no_grad():
            for _, owner, name, parameter in places:
                owner._parameters[name] = parameter
            for shard, full in shards.values() if writeback else ():
                local_part(shard).copy_(local_part(part_of(full.detach(), shard)))


@contextmanager
def full_gradients(
    strategy: Any, modules: Modules = None, *, writeback: bool = True
) -> Generator[dict[str, Tensor], None, None]:
    """Give the full, reduced gradients of modules, to look at or to change in place; every rank enters it.

    Use it where gradients are complete: in ``on_before_optimizer_step`` and, in the last micro-batch of an accumulation
    window, in ``on_after_backward``.

    Args:
        strategy: The Trainer's (``trainer.strategy``).
        modules: A module or several; default: the LightningModule.
        writeback: Whether the optimizer steps on the values that the gradients have at the end.

    Yields:
        The gradients by their parameters' names in ``modules``; parameters without a gradient on any rank are left out.

    Raises:
        RuntimeError: Before the model is sharded, or while gradients are not reduced yet (ZeRO).
    """
    _come(strategy, "calls full_gradients()")
    places = list(_places(list(_modules(strategy, modules))))
    access: ShardAccess | None = getattr(strategy, "shard_access", None)
    with library_code():
        gradients: dict[str, Tensor] = {}
        for name, _, _, parameter in places:
            owns = access is not None and access.owns_gradient(parameter)
            gradient = access.gradient_of(parameter) if owns and access is not None else parameter.grad
            if gradient is not None:
                gradients[name] = gradient
        full = {name: gathered(one) for name, one in gradients.items()}
    yield full
    with library_code(), torch.no_grad():
        for name, gradient in gradients.items() if writeback else ():
            if isinstance(gradient, Sharded):
                local_part(gradient).copy_(local_part(part_of(full[name], gradient)))


def full_state_dict(strategy: Any, module: nn.Module | None = None) -> dict[str, Any]:
    """Return ``module.state_dict()`` with full tensors; every rank calls it, and each gets all.

    The tensors stay on the device of the shards. For large models save a sharded checkpoint or
    ``strategy.save_safetensors()``, where no rank holds everything.

    Args:
        strategy: The Trainer's (``trainer.strategy``).
        module: Default: the LightningModule.

    Raises:
        RuntimeError: Before the model is sharded.
    """
    chosen: nn.Module = strategy.lightning_module if module is None else module
    if not hasattr(strategy, "shard_access"):
        return dict(chosen.state_dict())
    _come(strategy, "calls full_state_dict()")
    with running(GlobalTensors(strategy.shard_access)):
        state = chosen.state_dict()
    with library_code():
        return {clean_name(key): gathered(one) if isinstance(one, Tensor) else one for key, one in state.items()}


def _come(strategy: Any, action: str) -> None:
    """Come to the user's line, before ranks gather: one that is there alone says so."""
    user_code: UserCode | None = getattr(strategy, "_user_code", None)
    if user_code is not None and user_code.places is not None:
        user_code.places.come(action)


def _modules(strategy: Any, modules: Modules) -> Iterable[nn.Module]:
    if modules is None:
        return [strategy.lightning_module]
    return [modules] if isinstance(modules, nn.Module) else modules


def _places(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield each parameter with its name, and the module and the attribute that have it; ties under each name."""
    for module in modules:
        for prefix, owner in module.named_modules():
            own: Mapping[str, nn.Parameter | None] = owner._parameters
            for name, parameter in own.items():
                if parameter is not None:
                    yield clean_name(f"{prefix}.{name}".lstrip(".")), owner, name, parameter


def _shard(access: ShardAccess, parameter: nn.Parameter) -> Sharded | None:
    return parameter if isinstance(parameter, Sharded) else access.shard_of(parameter)
