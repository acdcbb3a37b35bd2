"""Whether an optimizer can train shards: found out by a few steps of its own class on small tensors.

A name does not show it: a subclass of ``SGD`` may divide by norms, and an option may switch a trust ratio on. So the
class itself steps, with the options of the user's groups, on full tensors and on what an engine would give it: pieces
of flattened parameters (FSDP1, ZeRO), or DTensors (FSDP2). Equal weights after every step mean that it is right there.

Trade-offs: thresholds that neither these gradients nor this number of steps reach stay undetected, and an optimizer
that draws random numbers counts as different, since shards draw others than full tensors do.
"""

from __future__ import annotations

import copy
import random
import sys
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..upstream.torch_core import TorchDispatchMode

_NUM_STEPS = 12
"""Enough for warm-ups of ten steps, preconditioners and queues of gradients to take effect."""
_LARGE = (64, 72)
"""Optimizers with states of 8 bits, in blocks, keep those of fewer than 4,096 elements in full."""
_NUM_LARGE_STEPS = 2
"""Of a large matrix: what preconditions it takes long."""
_SHAPES = ((4, 6), (5,), (), (3, 2, 2, 2))
_FEWER_SHAPES = ((4, 6), (5,))
_SCALES = (1.0, 0.05, 20.0, 1.0, 3.0, 0.5)
"""Of the gradients, step by step: below and above the thresholds that clip them."""
_ORTHOGONAL_STEPS = (3, 4, 9)
"""Steps whose gradients are orthogonal to the weights, as some optimizers test for."""
_LR = 1.0
"""In place of each group's: a schedule's first may be 0, where steps look alike, and adapted sizes grow with it."""
_MOST_GROUPS = 16
_SIMPLE = (torch.Tensor, bool, int, float, str, type(None), list, tuple, dict, deque)
"""Kinds of state whose use shows in a few steps."""


@dataclass(frozen=True)
class Verdict:
    """The result of testing a class."""

    problem: str | None = None
    """Why it cannot train what it was tested on; None if it can."""
    needs_closure: bool = False
    """Whether its ``step`` works with a closure alone."""
    has_plain_states: bool = True
    """Whether each state is a plain tensor, a number or a string."""
    unlike_parameters: frozenset[Any] = frozenset()
    """Keys of states that have not their parameter's shape."""


class _StuckError(Exception):
    """The class cannot be tested; the message says why."""


_by_pieces: weakref.WeakKeyDictionary[type, dict[str, Verdict]] = weakref.WeakKeyDictionary()
_by_owners: weakref.WeakKeyDictionary[type, dict[str, Verdict]] = weakref.WeakKeyDictionary()
_by_dtensors: weakref.WeakKeyDictionary[type, dict[str, Verdict]] = weakref.WeakKeyDictionary()


def is_known(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to treat each element alone."""
    return type(optimizer) in (SGD, Adam, AdamW)


def try_on_pieces(optimizer: Optimizer) -> Verdict:
    """Return whether the optimizer's class treats each element alone, so that it can step on pieces of parameters.

    It steps on a few full tensors together, and on the halves of one flat tensor of all of them.

    Args:
        optimizer: The user's; neither it nor any random state changes.
    """
    if is_known(optimizer):
        return Verdict()
    known = _by_pieces.setdefault(type(optimizer), {})
    key = _options_of(optimizer)
    if key not in known:
        known[key] = _on_some_device(optimizer, _run_on_pieces)
    return known[key]


def try_on_dtensors(optimizer: Optimizer, mesh: DeviceMesh, placements: Sequence[Placement]) -> Verdict:
    """Return whether the optimizer's class trains DTensors as it trains full tensors; every rank of ``mesh`` calls it.

    Args:
        optimizer: The user's; neither it nor any random state changes.
        mesh: Of the DTensors.
        placements: Of parameters with a dimension.
    """
    if is_known(optimizer):
        return Verdict()
    kinds = _kinds_of_shapes(optimizer, mesh.size(mesh.ndim - 1))
    known = _by_dtensors.setdefault(type(optimizer), {})
    key = f"{_options_of(optimizer)} {kinds} {mesh.shape} {placements}"
    if key not in known:
        with _same_random_states(torch.device(mesh.device_type)):
            verdict = _run_on_dtensors(optimizer, mesh, placements, kinds)
        if dist.get_world_size() > 1:
            verdicts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(verdicts, verdict)
            verdict = next((each for each in verdicts if each.problem), verdict)
        known[key] = verdict
    return known[key]


def try_on_owners(
    optimizer: Optimizer, shape_of: Callable[[torch.Tensor], torch.Size], *, keeps_shapes: bool
) -> Verdict:
    """Return whether the optimizer's class can step on each whole parameter apart from the others.

    It steps on a few tensors together; then on every other one of them, on the rest, and on none, with the tensors
    replaced before each step.

    Args:
        optimizer: The user's; neither it nor any random state changes.
        shape_of: Returns the shape of a parameter before sharding.
        keeps_shapes: Whether each state must have its parameter's shape, or none.
    """
    known = _by_owners.setdefault(type(optimizer), {})
    kinds = _kinds_of_shapes(optimizer, 1, shape_of)
    key = f"{_options_of(optimizer)} {kinds} {keeps_shapes}"
    if key not in known:
        run = partial(_run_on_owners, kinds=kinds, keeps_shapes=keeps_shapes)
        known[key] = _on_some_device(optimizer, run)
    return known[key]


# ---------------------------------------------------------------------- the three tests
def _run_on_pieces(optimizer: Optimizer, device: torch.device) -> Verdict:
    """Step on full tensors, then on the pieces of what they are together."""
    numbers = len(_groups_to_try(optimizer))
    full = [_weights(_SHAPES, device, seed) for seed in range(numbers)]
    try:
        first = _Run(optimizer, full)
    except _StuckError:  # such as a class that takes no tensor without a dimension
        full = [_weights(_FEWER_SHAPES, device, seed) for seed in range(numbers)]
        first = _Run(optimizer, full)
    verdict = _compare_pieces(optimizer, full, first)
    if verdict.problem is None:
        large = [_weights([_LARGE], device, seed) for seed in range(numbers)]
        on_large = _compare_pieces(optimizer, large, _Run(optimizer, large, num_steps=_NUM_LARGE_STEPS))
        return on_large if on_large.problem else verdict
    return verdict


def _compare_pieces(optimizer: Optimizer, full: list[list[torch.Tensor]], first: _Run) -> Verdict:
    for state, _ in first.states:
        for key, value in state.items():
            if not isinstance(value, _SIMPLE):
                return Verdict(f"its state {key!r} is a {type(value).__name__}: steps beyond those tried may use it")
    flat = [torch.cat([one.flatten() for one in group]) for group in full]
    cuts = [len(group) * 2 // 3 - 1 for group in flat]
    for part in (_head, _tail):
        pieces = [[part(one, cut)] for one, cut in zip(flat, cuts, strict=True)]
        second = _Run(optimizer, pieces, gradients=[_pieces_of(step, cuts, part) for step in first.gradients])
        for step, weights in enumerate(second.weights):
            wanted = _pieces_of(first.weights[step], cuts, part)
            travelled = _pieces_of(first.travelled[step], cuts, part)
            if not _equal(weights, wanted, travelled, first.tolerance):
                return Verdict(
                    "it updates an element differently in a full parameter and in a flat part of one (tried on "
                    f"small tensors, different weights after {step + 1} step{'s' if step else ''})",
                    first.needs_closure,
                )
        if second.options != first.options:
            return Verdict(
                "what its steps keep in the groups depends on the parameters that it sees (D-adaptation does that)",
                first.needs_closure,
            )
    values = [(key, value, one) for state, one in first.states for key, value in state.items()]
    return Verdict(
        needs_closure=first.needs_closure,
        has_plain_states=_unsharded_state(first) is None,
        unlike_parameters=frozenset(
            key for key, value, one in values if isinstance(value, torch.Tensor) and value.shape != one.shape
        ),
    )


def _run_on_dtensors(
    optimizer: Optimizer,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    kinds: Sequence[Sequence[tuple[int, bool]]],
) -> Verdict:
    """Step on full tensors, then on the same ones as DTensors."""
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    num_shards = mesh.size(mesh.ndim - 1)
    shapes = [
        [(max(2 * num_shards - (not is_even), 3), 6, 2, 2)[:ndim] for ndim, is_even in group] for group in kinds
    ]  # some rows for every rank
    verdict = _compare_dtensors(optimizer, mesh, placements, device, shapes, _NUM_STEPS)
    if verdict.problem is None and _have_matrices(kinds):
        shapes = [[_LARGE]] * len(kinds)
        return _compare_dtensors(optimizer, mesh, placements, device, shapes, _NUM_LARGE_STEPS)
    return verdict


def _have_matrices(kinds: Sequence[Sequence[tuple[int, bool]]]) -> bool:
    return all(any(ndim == 2 for ndim, _ in group) for group in kinds)


def _compare_dtensors(
    optimizer: Optimizer,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    device: torch.device,
    shapes: Sequence[Sequence[tuple[int, ...]]],
    num_steps: int,
) -> Verdict:
    full = [_weights(group, device, seed) for seed, group in enumerate(shapes)]
    try:
        first = _Run(optimizer, full, sees_dtypes=True, num_steps=num_steps)
    except _StuckError as stuck:
        return Verdict(str(stuck))

    def shard(tensor: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None) if tensor.ndim else tensor.clone()

    gradients = [[[shard(one) for one in group] for group in step] for step in first.gradients]
    try:
        second = _Run(optimizer, [[shard(one) for one in group] for group in full], gradients=gradients)
    except _StuckError as stuck:
        return Verdict(f"its step fails on DTensors: {stuck}", first.needs_closure)
    tolerance = max(first.tolerance, 1e-5)  # norms are sums over ranks, in another order

    def own(tensors: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Return this rank's shards: no rank waits for another, which may be stuck."""
        sharded = [[one if isinstance(one, DTensor) else shard(one) for one in group] for group in tensors]
        return [[one.to_local() if isinstance(one, DTensor) else one for one in group] for group in sharded]

    for step, weights in enumerate(second.weights):
        wanted, travelled = own(first.weights[step]), own(first.travelled[step])
        if first.is_coarse:
            same = _nearly_equal(own(weights), wanted, travelled)
        else:
            same = _equal(own(weights), wanted, travelled, tolerance, by_tensor=True)
        if not same:
            return Verdict(
                "its step gives different weights for DTensors and for full tensors (tried on small tensors, after "
                f"{step + 1} step{'s' if step else ''})",
                first.needs_closure,
            )
    return Verdict(needs_closure=first.needs_closure)


def _run_on_owners(
    optimizer: Optimizer, device: torch.device, *, kinds: Sequence[Sequence[tuple[int, bool]]], keeps_shapes: bool
) -> Verdict:
    """Step on full tensors, then on what each of two ranks would own, and on what a third one would: nothing."""
    shapes = [[(4, 6, 2, 2)[:ndim] for ndim, _ in group for _ in range(2)] for group in kinds]
    full = [_weights(group, device, seed) for seed, group in enumerate(shapes)]
    first = _Run(optimizer, full)
    if first.needs_closure:
        return Verdict("its step needs a closure", needs_closure=True)
    options: list[str] = []
    for owned in (slice(0, None, 2), slice(1, None, 2), slice(0, 0)):

        def own(tensors: list[list[torch.Tensor]], owned: slice = owned) -> list[list[torch.Tensor]]:
            return [group[owned] for group in tensors]

        second = _Run(optimizer, own(full), gradients=[own(step) for step in first.gradients], renews=True)
        for weights, wanted, travelled in zip(second.weights, first.weights, first.travelled, strict=False):
            if not _equal(weights, own(wanted), own(travelled), first.tolerance, by_tensor=True):
                return Verdict("it updates a parameter differently when others are elsewhere (tried on small tensors)")
        if problem := _unsharded_state(second):
            return Verdict(problem)
        for state, parameter in second.states:
            for key, value in state.items():
                if keeps_shapes and isinstance(value, torch.Tensor) and value.ndim and value.shape != parameter.shape:
                    return Verdict(f"its state {key!r} has another shape than its parameter")
        options.append(second.options)
    if len(set(options)) > 1:
        return Verdict("the options of its groups depend on the parameters that a rank owns")
    if _have_matrices(kinds):
        large = [_weights([_LARGE], device, seed) for seed in range(len(kinds))]
        return Verdict(_unsharded_state(_Run(optimizer, large, num_steps=1)))
    return Verdict()


def _unsharded_state(run: _Run) -> str | None:
    """Return why a state cannot be sharded; subclasses of tensors hold more than one."""
    for state, _ in run.states:
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                is_plain = type(value) in (torch.Tensor, nn.Parameter)
            else:
                is_plain = isinstance(value, bool | int | float | str | None)
            if not is_plain:
                return f"its state {key!r} is a {type(value).__name__}, which cannot be sharded"
    return None


class _Run:
    """Steps of a twin of an optimizer on given weights.

    Args:
        optimizer: The user's.
        weights: For each group to try.
        gradients: For each step and group; without, made along the way.
        sees_dtypes: Whether to find out whether the step computes in fewer bits than its weights have.
        renews: Whether other tensors with the same values and states replace the weights before each step.
        num_steps: How many, where gradients are made. In fewer than usual the weights may stay as they are, as in the
            first steps of a warm-up.

    Raises:
        _StuckError: If the class cannot step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        weights: list[list[torch.Tensor]],
        *,
        gradients: list[list[list[torch.Tensor]]] | None = None,
        sees_dtypes: bool = False,
        renews: bool = False,
        num_steps: int = _NUM_STEPS,
    ) -> None:
        self.gradients: list[list[list[torch.Tensor]]] = []
        self.weights: list[list[list[torch.Tensor]]] = []
        """After each step."""
        self.travelled: list[list[list[torch.Tensor]]] = []
        """The distance that each element has moved by each step, added up."""
        self.states: list[tuple[dict[Any, Any], torch.Tensor]] = []
        """At the end, with their parameters."""
        self.options = ""
        """Of the groups, at the end."""
        self.needs_closure = False
        self._renews, self._num_steps = renews, num_steps
        self.is_coarse = False
        """Whether it computes in half precision, where results depend on the order of sums."""
        self.tolerance = 1e-6 if all(one.dtype == torch.float64 for group in weights for one in group) else 1e-3
        self._held = [[nn.Parameter(one.clone()) for one in group] for group in weights]
        try:
            self._twin = _twin_of(optimizer, self._held)
            if callable(train := getattr(self._twin, "train", None)):  # schedule-free: steps in this mode alone
                train()
            self._run(gradients, sees_dtypes=sees_dtypes)
            self.states = [(state, one) for one, state in self._twin.state.items() if isinstance(one, torch.Tensor)]
            groups = [sorted(group.items()) for group in self._twin.param_groups]
            self.options = repr(
                [[item for item in group if item[0] not in ("params", "param_names")] for group in groups]
            )
        except Exception as error:  # whatever a user's class raises
            first_line = str(error).strip().split("\n")[0].rstrip(".")
            raise _StuckError(": ".join(filter(None, [type(error).__name__, first_line]))) from error
        finally:
            del self._held
            self.__dict__.pop("_twin", None)
        if (
            gradients is None
            and num_steps == _NUM_STEPS
            and not any(bool(one.any()) for group in self.travelled[-1] for one in group)
        ):
            raise _StuckError("its steps do not change the weights")

    def _run(self, given: list[list[list[torch.Tensor]]] | None, *, sees_dtypes: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        before = [[one.detach().clone() for one in group] for group in self._held]
        travelled = [[torch.zeros_like(one) for one in group] for group in before]
        for step in range(self._num_steps if given is None else len(given)):
            if self._renews:
                self._renew()
            gradients = self._gradients(step, generator) if given is None else given[step]
            if sees_dtypes and step == 1:
                with _DtypesSeen() as seen:  # type: ignore[no-untyped-call]
                    self._step(gradients)
                self.is_coarse = seen.half
            else:
                self._step(gradients)
            after = [[one.detach().clone() for one in group] for group in self._held]
            if given is None:
                if not all(bool(one.isfinite().all()) for group in after for one in group):
                    if step < 3:
                        raise _StuckError("its steps give infinite weights")
                    return
                travelled = [
                    [far + (new - old).abs() for far, new, old in zip(*three, strict=True)]
                    for three in zip(travelled, after, before, strict=True)
                ]
                self.gradients.append(gradients)
                self.travelled.append(travelled)
                before = after
            self.weights.append(after)

    def _renew(self) -> None:
        renewed = {one: nn.Parameter(one.detach().clone()) for group in self._held for one in group}
        self._held = [[renewed[one] for one in group] for group in self._held]
        for group in self._twin.param_groups:
            group["params"] = [renewed[one] for one in group["params"]]
        before: Mapping[Any, Any] = self._twin.state
        states = {renewed.get(one, one): state for one, state in before.items()}
        self._twin.state = defaultdict(dict, states)

    def _gradients(self, step: int, generator: torch.Generator) -> list[list[torch.Tensor]]:
        """Return gradients of quite different sizes, from element to element, tensor to tensor and step to step."""
        made: list[list[torch.Tensor]] = []
        for parameters in self._held:
            made.append([])
            for number, parameter in enumerate(parameters):
                shape, device, dtype = parameter.shape, parameter.device, parameter.dtype
                same = torch.Generator().manual_seed(number)  # one direction all along, so that step sizes can grow
                noise = torch.randn(shape, generator=generator, dtype=torch.float64)
                steady = torch.randn(shape, generator=same, dtype=torch.float64)
                spread = 10 ** (2 * torch.rand(shape, generator=same, dtype=torch.float64) - 1)
                gradient = (steady + 0.3 * noise) * spread * (_SCALES[step % len(_SCALES)] * 3.0 ** (-number))
                if step in _ORTHOGONAL_STEPS and shape and shape[-1:].numel() > 1:
                    rows = parameter.detach().to("cpu", torch.float64)
                    rows = rows.reshape(shape[0], -1) if len(shape) > 1 else rows.reshape(1, -1)
                    by_row = gradient.reshape(rows.shape)
                    along = (by_row * rows).sum(1, keepdim=True) / (rows * rows).sum(1, keepdim=True)
                    gradient = (by_row - along * rows).reshape(shape)
                made[-1].append(gradient.to(device, dtype))
        return made

    def _step(self, gradients: list[list[torch.Tensor]]) -> None:
        pairs = [
            pair
            for parameters, group in zip(self._held, gradients, strict=True)
            for pair in zip(parameters, group, strict=True)
        ]
        begun = [parameter.detach().clone() for parameter, _ in pairs]

        def closure() -> torch.Tensor:  # of a curved loss: away from where the step began, gradients are others
            for (parameter, gradient), start in zip(pairs, begun, strict=True):
                parameter.grad = gradient + 2 * (parameter.detach() - start)
            return torch.ones((), requires_grad=True)

        closure()
        step: Callable[..., Any] = type(self._twin).step
        if not self.needs_closure:
            try:
                step(self._twin)
            except Exception:
                if self.weights or self.gradients:
                    raise
                self.needs_closure = True
            else:
                return
        step(self._twin, closure)


class _DtypesSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether anything is computed in half precision."""

    half = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype in (torch.bfloat16, torch.float16):
            self.half = True
        return result


# ---------------------------------------------------------------------- weights
def _weights(shapes: Sequence[tuple[int, ...]], device: torch.device, seed: int) -> list[torch.Tensor]:
    """Return weights of order 1, quite unlike from row to row."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if device.type == "mps" or _fp32_alone[0] else torch.float64
    made = []
    for shape in shapes:
        rows = 2.0 ** torch.arange(shape[0] if shape else 1).remainder(5).reshape(-1, *[1] * (len(shape) - 1))
        scale = rows if shape else torch.ones(())
        made.append((torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(device, dtype))
    return made


def _head(tensor: torch.Tensor, cut: int) -> torch.Tensor:
    return tensor[:cut]


def _tail(tensor: torch.Tensor, cut: int) -> torch.Tensor:
    return tensor[cut:]


def _pieces_of(
    tensors: list[list[torch.Tensor]], cuts: list[int], part: Callable[[torch.Tensor, int], torch.Tensor]
) -> list[list[torch.Tensor]]:
    return [[part(torch.cat([one.flatten() for one in group]), cut)] for group, cut in zip(tensors, cuts, strict=True)]


def _equal(
    found: list[list[torch.Tensor]],
    wanted: list[list[torch.Tensor]],
    travelled: list[list[torch.Tensor]],
    tolerance: float,
    *,
    by_tensor: bool = False,
) -> bool:
    """Return whether weights are equal, measured by how far each element, or the farthest of each tensor, has come."""
    for groups in zip(found, wanted, travelled, strict=True):
        for one, other, far in zip(*groups, strict=True):
            scale = far.max() if by_tensor and far.numel() else far
            close = (one - other).abs() <= tolerance * scale + 4 * torch.finfo(other.dtype).eps * other.abs()
            if not bool(close.all()):
                return False
    return True


def _nearly_equal(
    found: list[list[torch.Tensor]], wanted: list[list[torch.Tensor]], travelled: list[list[torch.Tensor]]
) -> bool:
    """Return whether weights are equal as far as half precision goes: a tenth of the way, on the whole."""
    return all(
        bool((one - other).norm() <= 0.1 * far.norm())
        for groups in zip(found, wanted, travelled, strict=True)
        for one, other, far in zip(*groups, strict=True)
    )


# ---------------------------------------------------------------------- twins
def _twin_of(optimizer: Optimizer, tensors: list[list[nn.Parameter]]) -> Optimizer:
    """Return an optimizer of the same class, options and attributes over ``tensors``, made without its constructor."""
    memo: dict[int, Any] = {}
    alive: list[Any] = []  # an id is one only as long as what has it
    groups = _groups_to_try(optimizer)
    for group, small in zip(groups, tensors, strict=True):
        memo[id(group["params"])] = list(small)
    of_option = {_key_of(group): small for group, small in zip(groups, tensors, strict=True)}
    for group in optimizer.param_groups:
        small = of_option.get(_key_of(group), tensors[0])
        for place, parameter in enumerate(group["params"]):
            memo[id(parameter)] = small[place % len(small)] if small else None
    _check_attributes(optimizer)
    return _copied(optimizer, groups, memo, alive)


def _copied(optimizer: Optimizer, groups: list[dict[str, Any]], memo: dict[int, Any], alive: list[Any]) -> Optimizer:
    twin: Optimizer = type(optimizer).__new__(type(optimizer))
    memo[id(optimizer)] = twin
    copied = [{name: _option(name, value, memo) for name, value in group.items()} for group in groups]
    for group in copied:
        if "param_names" in group:
            group["param_names"] = [f"weight{number}" for number in range(len(group["params"]))]
    memo[id(optimizer.param_groups)] = copied
    alive.append(optimizer.param_groups)
    state: defaultdict[Any, Any] = _copied_state(optimizer, memo)
    memo[id(optimizer.state)] = state
    for inner in optimizer.__dict__.values():  # such as Lookahead's
        if isinstance(inner, Optimizer) and id(inner) not in memo:
            _copied(
                inner, groups if inner.param_groups is optimizer.param_groups else _groups_to_try(inner), memo, alive
            )
    for name, value in optimizer.__dict__.items():
        if name == "step" or name.endswith("_hooks"):  # a schedule counts steps there; hooks are no part of a class
            twin.__dict__[name] = type(value)() if name.endswith("_hooks") else None
        else:
            twin.__dict__[name] = copy.deepcopy(value, memo)
    twin.__dict__.pop("step", None)
    twin.__dict__.update(param_groups=copied, state=state)
    return twin


def _option(name: str, value: Any, memo: dict[int, Any]) -> Any:
    if name == "lr" and isinstance(value, float | int) and not isinstance(value, bool):
        return _LR
    return copy.deepcopy(value, memo)


def _copied_state(optimizer: Optimizer, memo: dict[int, Any]) -> defaultdict[Any, Any]:
    """Return the constructor's states of parameters, for the small tensors; those that steps create are new."""
    made: defaultdict[Any, Any] = defaultdict(dict)
    states: Mapping[Any, Any] = optimizer.state
    for parameter, state in states.items():
        if not isinstance(parameter, torch.Tensor):
            made[parameter] = copy.deepcopy(state, memo)
            continue
        small = memo.get(id(parameter))
        if not isinstance(small, torch.Tensor) or small in made:
            continue
        own: dict[Any, Any] = {}
        for key, value in state.items():
            value = value.to_local() if isinstance(value, DTensor) else value
            if not isinstance(value, torch.Tensor):
                own[key] = copy.deepcopy(value, memo)
            elif value.ndim == 0 and parameter.ndim:
                own[key] = value.detach().clone()
            else:
                others = (each.get(key) for each in states.values() if isinstance(each, Mapping))
                own[key] = torch.full_like(small, _first_number(chain([value], others))).detach()
        made[small] = own
    return made


def _first_number(values: Iterable[Any]) -> float:
    """Return the first number that is in one of these tensors: a rank may have nothing of a parameter's."""
    for value in values:
        value = value.to_local() if isinstance(value, DTensor) else value
        if isinstance(value, torch.Tensor) and value.numel():
            return float(value.flatten()[0])
    return 0.0


def _check_attributes(optimizer: Optimizer) -> None:
    """Raise where an optimizer holds a model: copying that is out of the question, and its step may look at it."""
    for name, value in optimizer.__dict__.items():
        if isinstance(value, nn.Module) or (
            isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module)
        ):
            raise _StuckError(f"it holds a module in {name}, which small tensors cannot replace")


def _groups_to_try(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups that differ in more than the size of a number."""
    by_options: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        by_options.setdefault(_key_of(group), group)
    return list(by_options.values())[:_MOST_GROUPS]


def _kinds_of_shapes(
    optimizer: Optimizer, num_shards: int, shape_of: Callable[[torch.Tensor], torch.Size] = lambda one: one.shape
) -> list[list[tuple[int, bool]]]:
    """Return how many dimensions the parameters of each group to try have, and whether their rows divide evenly."""
    found: dict[str, set[tuple[int, bool]]] = {_key_of(group): set() for group in optimizer.param_groups}
    for group in optimizer.param_groups:
        for shape in map(shape_of, group["params"]):
            found[_key_of(group)].add((min(len(shape), 4), not shape or shape[0] % num_shards == 0))
    return [sorted(found[_key_of(group)]) or [(1, True)] for group in _groups_to_try(optimizer)]


def _key_of(group: dict[str, Any]) -> str:
    return repr(
        [(name, _kind_of(value)) for name, value in sorted(group.items()) if name not in ("params", "param_names")]
    )


def _kind_of(value: Any) -> Any:
    """Return the aspect of an option that decides a step's way: of a number, whether it is zero."""
    if isinstance(value, bool | str | type(None)):
        return value
    if isinstance(value, int | float):
        return value != 0
    if isinstance(value, list | tuple):
        return [_kind_of(each) for each in value]
    return type(value).__qualname__


def _options_of(optimizer: Optimizer) -> str:
    """Return the options that distinguish two optimizers of a class."""
    simple = (bool, int, float, str, type(None), tuple)
    attributes = {name: value for name, value in optimizer.__dict__.items() if isinstance(value, simple)}
    optimizers = [each for each in optimizer.__dict__.values() if isinstance(each, Optimizer)]
    inner = [f"{type(each)} {_options_of(each)}" for each in optimizers]
    return repr(([_key_of(group) for group in _groups_to_try(optimizer)], sorted(attributes.items()), inner))


# ---------------------------------------------------------------------- where
_fp32_alone = [False]


def _on_some_device(optimizer: Optimizer, test: Callable[[Optimizer, torch.device], Verdict]) -> Verdict:
    """Run a test on the CPU, else in fp32, else where the parameters are: some classes have kernels for that alone."""
    devices = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    devices -= {torch.device("cpu"), torch.device("meta")}
    problem = ""
    for device, fp32 in [(torch.device("cpu"), False), (torch.device("cpu"), True), *((one, True) for one in devices)]:
        _fp32_alone[0] = fp32
        try:
            with _same_random_states(device):
                return test(optimizer, device)
        except _StuckError as stuck:
            problem = problem or str(stuck)
        finally:
            _fp32_alone[0] = False
    return Verdict(f"its step cannot be tried on small tensors ({problem})")


@contextmanager
def _same_random_states(device: torch.device) -> Iterator[None]:
    """Leave all random generators as they are."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy is not None else None
    devices = [] if device.type in ("cpu", "meta", "mps") else [torch.get_device_module(device).current_device()]
    try:
        with torch.random.fork_rng(devices, device_type="cuda" if not devices else device.type), torch.enable_grad():
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
