"""torch's functions that clip gradients and take their norm, called by the user, over gradients that are cut up.

FSDP1's gradients are plain tensors: torch would take this rank's part for the whole, without a word. Those of FSDP2 are
DTensors, which torch does not take together with the plain ones of ignored modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import CellType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from .gradients import clip_to_norm, gradients_of, local_tensor


class TotalNorms:
    """Puts norms and scaling of ours into torch's functions, wherever they were imported.

    Args:
        norm: Given gradients and the norm's type, returns their norm; None leaves it to torch.
        check: Given a function's name and parameters whose gradients it is to change, raises if it cannot see them.
    """

    def __init__(
        self,
        norm: Callable[[list[Tensor], float], Tensor | None],
        check: Callable[[str, list[Tensor]], None] = lambda *_: None,
    ) -> None:
        self._norm, self._check = norm, check
        self._torchs: list[tuple[CellType, Any]] = []

    def follow(self) -> None:
        """Begin; what was followed before is let go."""
        self.let_go()
        self._replace(clip_grad._get_total_norm, self._total_norm)
        self._replace(clip_grad._clip_grads_with_norm_, self._scale)
        self._replace(clip_grad.clip_grad_value_, self._clip_values)

    def let_go(self) -> None:
        """Undo `follow`."""
        for cell, torchs in self._torchs:
            cell.cell_contents = torchs
        self._torchs = []

    def _replace(self, function: Any, replacement: Callable[..., Any]) -> None:
        # Everybody who imported it holds the function that torch's `_no_grad` made; that keeps the real one in a cell.
        cell = function.__closure__[function.__code__.co_freevars.index("func")]
        torchs = cell.cell_contents
        self._torchs.append((cell, torchs))
        cell.cell_contents = partial(replacement, torchs)

    def _total_norm(
        self,
        torchs: Callable[..., Tensor],
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        norm = self._norm(gradients, float(norm_type))
        if norm is None:
            return torchs(gradients, norm_type, error_if_nonfinite, foreach)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"The total norm of order {norm_type} is {norm.item()}: it cannot be clipped.")
        return norm

    def _scale(
        self,
        torchs: Callable[..., None],
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        total_norm: Tensor,
        foreach: bool | None = None,
    ) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._check("clip_grads_with_norm_", parameters)
        gradients = gradients_of(parameters)
        if len({isinstance(gradient, DTensor) for gradient in gradients}) == 2:  # of ignored modules, too
            clip_to_norm(gradients, local_tensor(total_norm), max_norm)
        else:
            torchs(parameters, max_norm, total_norm, foreach)

    def _clip_values(
        self,
        torchs: Callable[..., None],
        parameters: Tensor | Iterable[Tensor],
        clip_value: float,
        foreach: bool | None = None,
    ) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._check("clip_grad_value_", parameters)
        sharded = [parameter for parameter in parameters if isinstance(parameter.grad, DTensor)]
        others = [parameter for parameter in parameters if not isinstance(parameter.grad, DTensor)]  # ignored modules'
        for alike in filter(None, (sharded, others)):
            torchs(alike, clip_value, foreach)
