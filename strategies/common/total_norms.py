"""``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm``, called by the user, over gradients that are cut up.

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
    """

    def __init__(self, norm: Callable[[list[Tensor], float], Tensor | None]) -> None:
        self._norm = norm
        self._torchs: list[tuple[CellType, Any]] = []

    def follow(self) -> None:
        """Begin; what was followed before is let go."""
        self.let_go()
        self._replace(clip_grad._get_total_norm, self._total_norm)
        self._replace(clip_grad._clip_grads_with_norm_, _scale)

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
    torchs: Callable[..., None],
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = gradients_of(parameters)
    if len({isinstance(gradient, DTensor) for gradient in gradients}) == 2:  # of ignored modules, too
        clip_to_norm(gradients, local_tensor(total_norm), max_norm)
    else:
        torchs(parameters, max_norm, total_norm, foreach)
