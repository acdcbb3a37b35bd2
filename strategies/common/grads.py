"""Gradients: norms and scaling over sharded and unsharded parameters, hooks, clipping by users' code, skipped steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from ...state.collectives import all_reduce_max
from ..sharded_tensors.shards import local_part
from ..sharded_tensors.user_code import write_back_views
from ..upstream.lightning import LightningModule, LRSchedulerConfig
from ..upstream.patches import Patches

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Sharding = tuple[DeviceMesh | None, tuple[int, ...]]
    """A mesh, and the dimensions of it that something is sharded over."""

WHOLE = "_accelight_whole"
"""Attribute of a parameter that holds the handle of a hook which sums the gradients of parts of sequences."""


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients that exist."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters in an optimizer's groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def hook_leaf(leaf: Any, name: str, hook: Callable[[Tensor], Tensor | None], kind: str = "register_hook") -> None:
    """Run ``hook`` on gradients of ``leaf``, frozen or not, in place of the hook that had this name.

    It runs before hooks that users have registered; the one named `WHOLE` runs before all others.

    Args:
        leaf: A tensor without a graph.
        name: Of the attribute of the leaf that keeps torch's handle.
        hook: What to run.
        kind: The method of the leaf that registers it.
    """
    if hasattr(leaf, name):
        getattr(leaf, name).remove()
    is_trained = leaf.requires_grad
    leaf.requires_grad_(True)  # torch hooks nothing else, and what is frozen may be thawed
    setattr(leaf, name, getattr(leaf, kind)(hook))
    leaf.requires_grad_(is_trained)
    if kind == "register_hook":
        hooks = leaf._backward_hooks
        handles = [getattr(leaf, each).id for each in dict.fromkeys([WHOLE, name]) if hasattr(leaf, each)]
        first = [key for key in handles if key in hooks]  # a sharded parameter has the attributes of its unsharded form
        order = [*first, *(key for key in hooks if key not in first)]
        hooks.update([(key, hooks.pop(key)) for key in order])  # torch goes through it as through a plain dict


def global_norm(gradients: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm over all elements of all gradients, each counted once whatever its sharding.

    One reduction for each set of mesh dimensions that gradients are sharded over, whatever their number; plain FSDP2
    has one such set.

    Args:
        gradients: DTensors (sharded or replicated, no partial sums) and plain tensors that are equal on all ranks.
        norm_type: p of the p-norm; ``inf`` for the largest absolute value.

    Returns:
        Scalar tensor on the gradients' device, the same on every rank; float32, or float64 as the gradients are.
    """
    parts: dict[Sharding, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        mesh: DeviceMesh | None = None
        dims: tuple[int, ...] = ()
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            dims = tuple(dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate())
        parts[mesh if dims else None, dims].append(local_part(gradient))
    devices = {sharding: tensors[0].device for sharding, tensors in parts.items()}
    return norm_of_parts(parts, norm_type, devices)


def norm_of_parts(
    parts: Mapping[Sharding, Sequence[torch.Tensor]], norm_type: float, devices: Mapping[Sharding, torch.device]
) -> torch.Tensor:
    """Return the `global_norm` of what this rank holds of each kind of gradient.

    Args:
        parts: Local tensors by the mesh and its dimensions that they are sharded over. Every rank gives the same keys
            in the same order, also where it has no tensor.
        norm_type: p of the p-norm.
        devices: Of each part, also where this rank has no tensor or an empty one: where the others reduce theirs. The
            first is the result's.
    """
    if not parts:
        return torch.tensor(0.0)
    powers = [_power_over_mesh(tensors, *sharding, norm_type, devices[sharding]) for sharding, tensors in parts.items()]
    device = devices[next(iter(parts))]
    stacked = torch.stack([power.to(device) for power in powers])
    norm = stacked.max() if math.isinf(norm_type) else stacked.sum() ** (1.0 / norm_type)
    return norm.to(_dtype_of_norms(one for tensors in parts.values() for one in tensors))


def _power_over_mesh(
    tensors: Sequence[torch.Tensor],
    mesh: DeviceMesh | None,
    dims: tuple[int, ...],
    norm_type: float,
    device: torch.device,
) -> torch.Tensor:
    """Return norm**p (the norm itself for inf) of ``tensors`` taken together over the mesh dimensions ``dims``."""
    tensors = [tensor for tensor in tensors if tensor.numel()]  # an empty shard has no largest value
    power = torch.zeros((), dtype=dtype_of_powers(device), device=device)
    if tensors:
        powers = norm_powers(tensors, norm_type)
        power = powers.max() if math.isinf(norm_type) else powers.sum()
    reduce_powers(power, [] if mesh is None else [mesh.get_group(dim) for dim in dims], norm_type)
    return power


def norm_powers(tensors: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return norm**p (the norm itself for inf) of each tensor, none of them empty, on the device of the first.

    Norms are computed in float32 at least: a bfloat16 sum of squares loses the small ones.
    """
    device = tensors[0].device  # gradients of ignored modules are not offloaded
    found = torch._foreach_norm(list(tensors), norm_type, dtype=_dtype_of_norms(tensors))
    norms = torch.stack([one.to(device) for one in found]).to(dtype_of_powers(device))
    return norms if math.isinf(norm_type) else norms**norm_type


def _dtype_of_norms(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    return torch.float64 if any(one.dtype == torch.float64 for one in tensors) else torch.float32


def dtype_of_powers(device: torch.device) -> torch.dtype:
    """Return the dtype in which ranks add up powers of norms, the same on ranks without gradients."""
    return torch.float32 if device.type == "mps" else torch.float64


def reduce_powers(powers: torch.Tensor, groups: Iterable[dist.ProcessGroup], norm_type: float) -> None:
    """Make norm**p of what lies on all ranks of the groups out of each rank's own, in place."""
    for group in groups:
        if math.isinf(norm_type):
            all_reduce_max(powers, group)
        else:
            dist.all_reduce(powers, group=group)


@torch.no_grad()
def average_over_ranks(parameters: Iterable[nn.Parameter]) -> None:
    """Replace the gradients of unsharded parameters by their mean over all ranks, as sharded ones have been already.

    One reduction for each dtype. A parameter without a gradient on this rank counts as zero; one that has none on any
    rank gets none.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.requires_grad:
            by_dtype[parameter.dtype].append(parameter)
    for alike in by_dtype.values():
        own = [torch.zeros_like(one) if one.grad is None else one.grad for one in alike]
        exist = own[0].new_tensor([one.grad is not None for one in alike])
        flat = torch.cat([*(gradient.flatten() for gradient in own), exist])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        *means, exist = torch.split(flat, [*(gradient.numel() for gradient in own), len(alike)])
        # Only what this rank lacks has to be known on the host.
        missing = [False] * len(alike) if len(gradients_of(alike)) == len(alike) else (exist == 0).tolist()
        for parameter, gradient, mean, is_missing in zip(alike, own, means, missing, strict=True):
            if not is_missing:
                parameter.grad = gradient.copy_(mean.view_as(gradient))


def refuse_second_derivatives(unit: str | None) -> None:
    """Refuse a backward that is to be differentiated itself, when it comes to a unit of FSDP.

    Args:
        unit: Its name.

    Raises:
        RuntimeError: If ``create_graph=True``: its graph would hold gathered parameters that are freed by then.
    """
    if torch.is_grad_enabled():  # what autograd sets from create_graph while a backward runs
        raise RuntimeError(
            f"A gradient through {unit or 'the model'!r} was requested with create_graph=True (a gradient penalty). "
            "FSDP frees the gathered parameters of a unit, so it does not support gradients of gradients. Compute "
            "the penalty without them (finite differences), add the network to ignored_modules, or use "
            "strategy='ddp'."
        )


def scale_gradients(gradients: Sequence[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply every gradient by ``factor``, in place."""
    tensors = [local_part(gradient) for gradient in gradients]
    if not tensors:
        return
    if isinstance(factor, torch.Tensor):
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for tensor in tensors:
            alike[tensor.device, tensor.dtype].append(tensor)
        for (device, dtype), group in alike.items():
            torch._foreach_mul_(group, factor.to(device, dtype))
    else:
        torch._foreach_mul_(tensors, factor)


def clip_to_norm(gradients: Sequence[torch.Tensor], total: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Scale gradients whose `global_norm` is ``total`` so that it is at most ``max_norm``; return ``total``.

    Source: ``torch.nn.utils.clip_grad_norm_`` (same 1e-6 in the divisor, no host synchronisation).
    """
    scale_gradients(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


# ------------------------------------------------------------------------------------------------
# torch's functions for clipping and norms, called by users on sharded gradients.
#
# FSDP1's gradients are plain tensors: torch would take this rank's part for the whole, silently. Those of FSDP2
# are DTensors, which torch does not take together with the plain ones of ignored modules.


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
        self._patches = Patches("clipping")

    def attach(self) -> None:
        """Put them in."""
        self.detach()
        self._replace(clip_grad._get_total_norm, self._total_norm)
        self._replace(clip_grad._clip_grads_with_norm_, self._scale)
        self._replace(clip_grad.clip_grad_value_, self._clip_values)

    def detach(self) -> None:
        """Undo `attach`."""
        self._patches.remove()

    def _replace(self, function: Any, replacement: Callable[..., Any]) -> None:
        # Importers hold the function that torch's `_no_grad` made, which keeps the real one in a cell.
        cell = function.__closure__[function.__code__.co_freevars.index("func")]
        torchs = cell.cell_contents

        def replaced(*args: Any, **kwargs: Any) -> Any:
            write_back_views()
            return replacement(torchs, *args, **kwargs)

        self._patches.put(cell, "cell_contents", replaced)

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
            raise RuntimeError(
                f"The total norm of order {norm_type} is {norm.item()}: the gradients cannot be clipped."
            )
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
            clip_to_norm(gradients, local_part(total_norm), max_norm)
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
        parameters = [parameter for parameter in parameters if parameter.grad is not None]  # torch refuses to clip none
        sharded = [parameter for parameter in parameters if isinstance(parameter.grad, DTensor)]
        others = [parameter for parameter in parameters if not isinstance(parameter.grad, DTensor)]  # ignored modules'
        for alike in filter(None, (sharded, others)):
            torchs(alike, clip_value, foreach)


class SkippedSteps:
    """Knows whether the last optimizer step was skipped, and holds schedulers back then."""

    def __init__(self) -> None:
        self.last: bool = False
        """Whether the last step was left out for gradients that overflowed."""
        self._patches = Patches("user code")

    @contextmanager
    def watch(self, optimizer: Optimizer) -> Iterator[None]:
        """Find out whether ``optimizer`` really steps inside this context."""
        stepped: list[bool] = []
        handle = optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        try:
            yield
        finally:
            handle.remove()
        self.last = not stepped

    def hold_back(self, module: LightningModule, configs: Sequence[LRSchedulerConfig]) -> None:
        """Keep schedulers that count steps from advancing at a skipped one.

        Source: accelerate 1.15 ``scheduler.py`` (``AcceleratedScheduler``).
        """
        self.detach()
        by_step = {id(config.scheduler) for config in configs if config.interval == "step"}
        advance = module.lr_scheduler_step

        def advance_if_stepped(scheduler: Any, metric: Any) -> None:
            if not (self.last and id(scheduler) in by_step):
                advance(scheduler, metric)

        self._patches.put(module, "lr_scheduler_step", advance_if_stepped)

    def detach(self) -> None:
        """Undo `hold_back`."""
        self._patches.remove()
