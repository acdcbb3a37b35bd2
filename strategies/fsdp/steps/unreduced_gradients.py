"""Gradients that a window has accumulated and not reduced yet: cleared where the user clears gradients.

The engines keep them beside the parameters, whose ``grad`` is None until a window's last backward has reduced it. So
`zero_grad`, wherever it is called, has to reach them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

_METHOD = "zero_grad"


class ZeroGradFollowing:
    """Lets ``zero_grad`` of optimizers and of a module clear what is not reduced.

    Args:
        drop: Clears the unreduced gradients of the parameters it is given.
    """

    def __init__(self, drop: Callable[[Iterable[nn.Parameter]], None]) -> None:
        self._drop = drop
        self._followed: list[Any] = []

    def follow(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Begin with these; those of before are let go."""
        self.let_go()
        self._attach(module, lambda: module.parameters())
        for optimizer in optimizers:
            self._attach(optimizer, partial(_parameters_of, optimizer))

    def let_go(self) -> None:
        """Undo `follow`."""
        for owner in self._followed:
            owner.__dict__.pop(_METHOD, None)
        self._followed = []

    def _attach(self, owner: Any, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        clear = getattr(owner, _METHOD)

        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            self._drop(parameters())
            return clear(*args, **kwargs)

        # On the instance: the class is the user's.
        owner.__dict__[_METHOD] = zero_grad
        self._followed.append(owner)


def _parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
