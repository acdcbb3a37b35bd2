"""The parameters of a sharded module as they were before, with either engine."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FlatParameter

from .engines.fsdp1_units import WholeParameter, parameters_by_owner


class WholeParameters:
    """The parameters of modules as they were before sharding.

    Args:
        root: Sharded.
    """

    def __init__(self, root: nn.Module) -> None:
        self._flattened = parameters_by_owner(root)
        self._hidden = {id(one) for one in root.parameters() if isinstance(one, FlatParameter)}
        for unit in self._flattened:  # original parameters are this process's part
            self._hidden.update(id(one) for one in unit.parameters(recurse=False))

    def of(self, module: nn.Module) -> Iterator[WholeParameter]:
        """Return the parameters inside ``module``, each once."""
        found: dict[object, WholeParameter] = {}
        for inner in module.modules():
            own = [
                WholeParameter(id(one), one.numel(), one.requires_grad)
                for one in inner.parameters(recurse=False)
                if id(one) not in self._hidden
            ]
            found.update((one.key, one) for one in (*self._flattened.get(inner, ()), *own))
        yield from found.values()
