"""Steps on whole tensors of which each rank has some, for torch's Muon, Adafactor, LAMB and the like.

A parameter, its gradient and its state travel to one rank, its owner, which steps on them as one process does. New
values travel back. Each rank owns about as many elements as another. Outside of the step, in hooks and in checkpoints,
all are shards. Trade-offs: during the step a rank holds its share a second time. A step takes two all-to-alls for each
dtype and each 64 MiB that a rank holds, and an all-gather of one row of numbers.
"""

from __future__ import annotations

import itertools
import types
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from ..sharded_tensors.shards import FlatShard, dtensor_of, local_part
from ..upstream.patches import Patches
from ..upstream.torch_core import all_gather_single

_BUCKET_BYTES = 64 * 2**20
_SAME, _OTHER, _FAILED = 0.0, 1.0, 2.0
"""The first number of a rank's row: its states have the form that all ranks know, or another, or none."""
State = MutableMapping[Any, Any]
"""An optimizer's state of one parameter."""
Form = dict[Any, tuple[Any, ...]]
"""The same without numbers: ``("tensor", shape, dtype)``, ``("scalar", dtype, on_cpu)``, ``("number", type)`` or
``("value", value)`` for each key."""


@dataclass(frozen=True)
class Cut:
    """A tensor as the ranks have cut it: each has a range of its elements in memory."""

    shape: torch.Size
    strides: tuple[int, ...]
    """Of the whole tensor, which has no gaps."""
    ranges: tuple[tuple[int, int], ...]
    """Of each rank: its first element, and their number."""

    @classmethod
    def by_rows(cls, shape: torch.Size, num_ranks: int) -> Cut:
        """Return the cut of a DTensor with ``Shard(0)``."""
        row, per_rank = shape[1:].numel(), -(-shape[0] // num_ranks)
        begins = [min(rank * per_rank, shape[0]) * row for rank in range(num_ranks + 1)]
        strides = tuple(shape[dim + 1 :].numel() for dim in range(len(shape)))
        return cls(shape, strides, tuple((a, b - a) for a, b in itertools.pairwise(begins)))

    @classmethod
    def of_flat(cls, shard: FlatShard) -> Cut:
        """Return the cut of a parameter out of one of FSDP1's flat parameters."""
        place = shard.place
        if place.cut is None:
            raise ValueError("This shard does not know how other ranks have cut its tensor.")
        (begin, per_rank), numel = place.cut, place.shape.numel()
        begins = [min(max(rank * per_rank - begin, 0), numel) for rank in range(place.group.size() + 1)]
        return cls(place.shape, place.strides, tuple((a, b - a) for a, b in itertools.pairwise(begins)))

    def allocate(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return memory for the whole tensor: with one dimension, and in its shape."""
        flat = torch.empty(self.shape.numel(), dtype=dtype, device=device)
        return flat, flat.as_strided(self.shape, self.strides)

    def flatten(self, whole: Tensor) -> Tensor:
        """Return a whole tensor's elements in the order of the ranges; a copy if they lie otherwise in memory."""
        if whole.stride() == self.strides:
            return whole.as_strided((whole.numel(),), (1,))
        flat, shaped = self.allocate(whole.dtype, whole.device)
        shaped.copy_(whole)
        return flat


@dataclass
class _Sharded:
    """A sharded parameter of the optimizer."""

    parameter: nn.Parameter
    cut: Cut
    owner: int = 0
    """The rank that steps on it."""


@dataclass
class _Travel:
    """A tensor that travels from all ranks to its owner, or from there to all."""

    owner: int
    cut: Cut
    shard: Tensor
    """This rank's range, in any shape."""
    whole: Tensor | None
    """On the owner: all of it, with one dimension."""


class Step(ABC):
    """Stands for an optimizer's step.

    Args:
        optimizer: Over sharded parameters, and maybe others, which each rank steps as it would anyway.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def attach(self, patches: Patches) -> None:
        """Replace the optimizer's ``step`` until ``patches`` are removed; its hooks run around it as before."""

        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined] # a schedule warns of one that never steps
            return self._step(closure)

        hooked: Any = Optimizer.profile_hook_step(step)
        if hasattr(self._optimizer.step, "_wrapped_by_lr_sched"):  # or a schedule warns that another step replaces it
            hooked._wrapped_by_lr_sched = True
        patches.put(self._optimizer, "step", types.MethodType(hooked, self._optimizer))

    @abstractmethod
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """Step as the optimizer's class does."""


class WholeTensorStep(Step):
    """Lets an optimizer step on whole tensors.

    Args:
        optimizer: Over sharded parameters.
        group: Of the ranks that share a parameter.
        device: On which ``group`` communicates.
        shard_of: Returns the shard that a parameter of FSDP1 is; None for any other one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: dist.ProcessGroup,
        device: torch.device,
        shard_of: Callable[[Tensor], FlatShard | None],
    ) -> None:
        super().__init__(optimizer)
        self._group, self._device, self._shard_of = group, device, shard_of
        self._rank, self._size = dist.get_rank(group), group.size()
        self._parameters: dict[nn.Parameter, _Sharded | None] = {}
        """All of the optimizer's; None for one that is not sharded."""
        self._is_flat = False

    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """Step as the optimizer's class does; every rank calls it.

        Args:
            closure: Computes the gradients, once.

        Raises:
            RuntimeError: On every rank, if the class's step fails on one of them. Shards are as before then.
        """
        evaluate = None
        if closure is not None:
            with torch.enable_grad():
                evaluate = _Once(closure())
        stepped = self._stepped()
        known = [self._form(one) for one in stepped]
        wholes, states = self._gather(stepped)
        plain = [parameter for parameter, sharded in self._parameters.items() if sharded is None]
        forms: dict[int, Form] = {}
        error: Exception | None = None
        try:
            with self._replaced(wholes, plain, states):
                loss = unhooked_step(self._optimizer, evaluate)
            forms = {
                at: self._form_of_whole(one, states[wholes[one.parameter]])
                for at, one in enumerate(stepped)
                if one.owner == self._rank
            }
        except Exception as raised:  # noqa: BLE001 (whatever a user's class raises: no rank may wait for this one)
            error = raised
        numbers = {at: _numbers_of(states[wholes[stepped[at].parameter]], form) for at, form in forms.items()}
        new_forms, new_numbers = self._agree(stepped, known, forms, numbers, error)
        self._scatter(stepped, new_forms, new_numbers, wholes, states)
        return loss

    @contextmanager
    def _replaced(
        self,
        substitutes: Mapping[nn.Parameter, nn.Parameter],
        plain: Iterable[nn.Parameter],
        states: defaultdict[Tensor, Any],
    ) -> Iterator[None]:
        """Replace shards in the optimizer's groups by other parameters.

        Args:
            substitutes: By the shards; the optimizer does not see shards that have none.
            plain: Parameters that it sees as they are.
            states: Of the substitutes; the context adds those of ``plain``, and what is no parameter's.
        """
        optimizer, held, plain = self._optimizer, self._optimizer.state, set(plain)

        def kept_in(own: Mapping[Any, Any]) -> dict[Any, Any]:
            return {key: own[key] for key in own if key in plain or not isinstance(key, Tensor)}

        names = ("params", "param_names")
        lists: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (group, {name: group[name] for name in names if name in group}) for group in optimizer.param_groups
        ]
        states.update(kept_in(held))
        try:
            for group, before in lists:
                kept = [at for at, one in enumerate(before["params"]) if one in substitutes or one in plain]
                group.update({name: [values[at] for at in kept] for name, values in before.items()})
                group["params"] = [substitutes.get(one, one) for one in group["params"]]
            optimizer.state = states
            yield
        finally:
            optimizer.state = held
            for group, before in lists:
                group.update(before)
            held.update(kept_in(states))

    # ------------------------------------------------------------------ which parameters, on which ranks
    def _stepped(self) -> list[_Sharded]:
        """Return the sharded parameters that have gradients; the same on every rank."""
        parameters = [one for group in self._optimizer.param_groups for one in group["params"]]
        if not self._parameters.keys() >= set(parameters):
            self._learn(parameters)
        sharded = [one for one in map(self._parameters.get, parameters) if one is not None]
        return [one for one in sharded if one.parameter.grad is not None]

    def _form(self, one: _Sharded) -> Form:
        """Return the form of the state that this rank has of a parameter."""
        form = _form_of(self._optimizer.state.get(one.parameter, {}))
        if not self._is_flat:
            return form
        return {
            key: (kind, one.cut.shape, what[-1]) if kind == "tensor" else (kind, *what)
            for key, (kind, *what) in form.items()
        }

    def _form_of_whole(self, one: _Sharded, state: State) -> Form:
        form = _form_of(state)
        for key, (kind, *what) in form.items():
            if self._is_flat and kind == "tensor" and what[0] != one.cut.shape:
                raise TypeError(
                    f"its state {key!r} has the shape {tuple(what[0])}, its parameter {tuple(one.cut.shape)}"
                )
        return form

    def _learn(self, parameters: Iterable[nn.Parameter]) -> None:
        """Find out how parameters are cut, and give each one to the rank that owns the fewest elements so far."""
        self._parameters = {}
        for parameter in parameters:
            shard = self._shard_of(parameter)
            self._is_flat = self._is_flat or shard is not None
            if shard is not None:
                self._parameters[parameter] = _Sharded(parameter, Cut.of_flat(shard))
            elif isinstance(parameter, DTensor):
                _check_placements(parameter)
                self._parameters[parameter] = _Sharded(parameter, Cut.by_rows(parameter.shape, self._size))
            else:
                self._parameters[parameter] = None
        loads = [0] * self._size
        sharded = [one for one in self._parameters.values() if one is not None]
        for one in sorted(sharded, key=lambda one: -one.cut.shape.numel()):
            one.owner = loads.index(min(loads))
            loads[one.owner] += one.cut.shape.numel()

    # ------------------------------------------------------------------ shards to whole tensors, and back
    def _gather(self, stepped: Sequence[_Sharded]) -> tuple[dict[nn.Parameter, nn.Parameter], defaultdict[Tensor, Any]]:
        """Return this rank's whole parameters, with their gradients, and their states."""
        travels: list[_Travel] = []
        wholes: dict[nn.Parameter, nn.Parameter] = {}
        states: defaultdict[Tensor, Any] = defaultdict(dict)

        def gather(one: _Sharded, cut: Cut, shard: Tensor) -> Tensor | None:
            flat, whole = cut.allocate(shard.dtype, shard.device) if one.owner == self._rank else (None, None)
            travels.append(_Travel(one.owner, cut, shard, flat))
            return whole

        for one in stepped:
            parameter, gradient = one.parameter, one.parameter.grad
            shard = local_part(parameter)
            values = gather(one, one.cut, shard)
            slope = gather(one, one.cut, torch.zeros_like(shard) if gradient is None else local_part(gradient))
            state = {
                key: _whole(value) if cut is None else gather(one, cut, local_part(value))
                for key, value in self._optimizer.state.get(parameter, {}).items()
                for cut in [self._cut_of_state(one, value)]
            }
            if values is not None:
                whole = wholes[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                whole.grad = slope
                vars(whole).update(vars(parameter))  # such as a mark of one without weight decay
                if state:
                    states[whole] = state
        self._exchange(travels, to_owners=True)
        return wholes, states

    def _cut_of_state(self, one: _Sharded, value: Any) -> Cut | None:
        """Return the cut of a value of a parameter's state; None if every rank has all of it."""
        if self._is_flat:
            return one.cut if isinstance(value, Tensor) and value.ndim else None
        if not isinstance(value, DTensor) or value.placements[-1].is_replicate():
            return None
        _check_placements(value)
        return Cut.by_rows(value.shape, self._size)

    def _scatter(
        self,
        stepped: Sequence[_Sharded],
        forms: Sequence[Form],
        numbers: Sequence[Sequence[Any]],
        wholes: Mapping[nn.Parameter, nn.Parameter],
        states: Mapping[Tensor, Any],
    ) -> None:
        """Give every rank its shards of what the owners have stepped on."""
        travels: list[_Travel] = []
        for one, form, row in zip(stepped, forms, numbers, strict=True):
            parameter = one.parameter
            whole = wholes.get(parameter)
            values = None if whole is None else one.cut.flatten(whole.detach())
            travels.append(_Travel(one.owner, one.cut, local_part(parameter.detach()), values))
            before, own = self._optimizer.state.get(parameter, {}), {} if whole is None else states[whole]
            after = self._build(one, form, row, before, own)
            for key, (kind, *_) in form.items():
                if kind == "tensor":
                    cut = self._cut_of_state(one, after[key]) or one.cut
                    values = None if whole is None else cut.flatten(own[key].detach())
                    travels.append(_Travel(one.owner, cut, local_part(after[key]), values))
            self._optimizer.state[parameter] = after
        self._exchange(travels, to_owners=False)

    def _build(
        self, one: _Sharded, form: Form, numbers: Sequence[Any], before: Mapping[Any, Any], own: Mapping[Any, Any]
    ) -> dict[Any, Any]:
        """Return a parameter's state on this rank.

        Args:
            one: The parameter.
            form: Of the state.
            numbers: In it.
            before: The state so far, whose shards are kept where they fit.
            own: The state that this rank's step has left, if it owns the parameter.
        """
        state: dict[Any, Any] = {}
        left = iter(numbers)
        for key, (kind, *what) in form.items():
            if kind == "tensor":
                shape, dtype = what
                cut = one.cut if self._is_flat or shape == one.cut.shape else Cut.by_rows(shape, self._size)
                state[key] = self._shard(before.get(key), one, cut, dtype)
            elif kind == "scalar":
                dtype, on_cpu = what
                device = torch.device("cpu") if on_cpu else local_part(one.parameter).device
                number = next(left)
                state[key] = own[key] if key in own else torch.tensor(number, dtype=dtype, device=device)
            else:
                state[key] = what[0](next(left)) if kind == "number" else what[0]
        return state

    def _shard(self, before: Any, one: _Sharded, cut: Cut, dtype: torch.dtype) -> Tensor:
        """Return this rank's shard of a state: what there is, else new memory."""
        parameter, count = one.parameter, cut.ranges[self._rank][1]
        if isinstance(before, Tensor) and before.dtype == dtype:
            known = self._cut_of_state(one, before)
            if known is not None and known.shape == cut.shape:
                return before
        shard = torch.empty(count, dtype=dtype, device=local_part(parameter).device)
        if not isinstance(parameter, DTensor):
            return shard
        row = cut.shape[1:].numel()
        shard = shard.view(count // row if row else cut.shape[0], *cut.shape[1:])
        return dtensor_of(shard, parameter.device_mesh, parameter.placements, cut.shape, cut.strides)

    def _exchange(self, travels: Sequence[_Travel], *, to_owners: bool) -> None:
        """Exchange tensors, in a few collectives."""
        for bucket in _buckets(travels, self._size):
            sent: list[list[Tensor]] = [[] for _ in range(self._size)]
            received: list[list[Tensor]] = [[] for _ in range(self._size)]
            at_owner, elsewhere = (received, sent) if to_owners else (sent, received)
            for one in bucket:
                elsewhere[one.owner].append(one.shard)
                if one.whole is not None:
                    for rank, (start, count) in enumerate(one.cut.ranges):
                        at_owner[rank].append(one.whole.narrow(0, start, count))
            flat = [tensor.reshape(-1).to(self._device) for tensors in sent for tensor in tensors]
            num_received, num_sent = ([sum(map(torch.numel, each)) for each in lists] for lists in (received, sent))
            dtype = bucket[0].shard.dtype
            outgoing = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=self._device)
            incoming = torch.empty(sum(num_received), dtype=dtype, device=self._device)
            dist.all_to_all_single(incoming, outgoing, num_received, num_sent, group=self._group)
            targets = [tensor for tensors in received for tensor in tensors]
            parts = torch.split(incoming, [tensor.numel() for tensor in targets])
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part.view(target.shape))

    # ------------------------------------------------------------------ what is no tensor
    def _agree(
        self,
        stepped: Sequence[_Sharded],
        known: Sequence[Form],
        own: Mapping[int, Form],
        numbers: Mapping[int, list[Any]],
        error: Exception | None,
    ) -> tuple[list[Form], list[list[Any]]]:
        """Tell all ranks the forms and the numbers of the states; they communicate forms where one has changed.

        Args:
            stepped: The parameters.
            known: The forms before the step, by all ranks.
            own: The forms of this rank's parameters after it, by their places in ``stepped``.
            numbers: Of the same.
            error: What this rank's step has raised.

        Raises:
            RuntimeError: If a rank's step has raised.
        """
        if not stepped and error is None:  # no rank communicates in this step
            return [], []
        owned = [[at for at, one in enumerate(stepped) if one.owner == rank] for rank in range(self._size)]
        sizes = [[sum(kind in ("scalar", "number") for kind, *_ in known[at].values()) for at in ats] for ats in owned]
        outcome = _FAILED if error is not None else _SAME if all(known[at] == own[at] for at in own) else _OTHER
        row = torch.zeros(1 + max(map(sum, sizes)), dtype=torch.float64, device=self._device)
        row[0] = outcome
        if outcome == _SAME and sizes[self._rank]:
            mine = [value for at in owned[self._rank] for value in numbers[at]]
            if mine:
                row[1 : 1 + len(mine)] = _stacked(mine, self._device)
        rows = torch.empty(self._size * len(row), dtype=row.dtype, device=self._device)
        all_gather_single(rows, row, group=self._group)
        by_rank = rows.view(self._size, -1).tolist()
        outcomes = [first for first, *_ in by_rank]
        if _FAILED in outcomes:
            self._raise_together(error)
        if _OTHER in outcomes:
            plain = {at: [float(value) for value in values] for at, values in numbers.items()}
            from_ranks: list[Any] = [None] * self._size
            dist.all_gather_object(from_ranks, (dict(own), plain), group=self._group)
            forms = {at: form for each, _ in from_ranks for at, form in each.items()}
            values = {at: row for _, each in from_ranks for at, row in each.items()}
            return [forms[at] for at in range(len(stepped))], [values[at] for at in range(len(stepped))]
        found: dict[int, list[Any]] = {}
        for (_, *left), ats, counts in zip(by_rank, owned, sizes, strict=True):
            for at, count in zip(ats, counts, strict=True):
                found[at], left = left[:count], left[count:]
        return list(known), [found[at] for at in range(len(stepped))]

    def _raise_together(self, error: Exception | None) -> None:
        messages: list[Any] = [None] * self._size
        own = None if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(messages, own, group=self._group)
        ranks = {dist.get_global_rank(self._group, at): text for at, text in enumerate(messages) if text is not None}
        raise RuntimeError(
            f"{type(self._optimizer).__name__}.step() failed on whole parameters on "
            + "; ".join(f"rank {rank}: {text}" for rank, text in ranks.items())
        ) from error


def _whole(value: Any) -> Any:
    return local_part(value) if isinstance(value, Tensor) else value


class _Once:
    """A closure that has been evaluated.

    Args:
        loss: What it has returned.
    """

    def __init__(self, loss: Any) -> None:
        self._losses = [loss]

    def __call__(self) -> Any:
        """Return the loss.

        Raises:
            RuntimeError: The second time: whole tensors are not what the model computes with.
        """
        if not self._losses:
            raise RuntimeError("it evaluates its closure several times, which a step on whole tensors does not allow.")
        return self._losses.pop()


def unhooked_step(optimizer: Optimizer, *closure: Callable[[], Any] | None) -> Any:
    """Call the class's own step: hooks run around the one that stands for it."""
    step: Any = type(optimizer).step
    return (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer, *closure)


def _check_placements(tensor: DTensor) -> None:
    *outer, last = tensor.placements
    if type(last) is not Shard or last.dim != 0 or not all(one.is_replicate() for one in outer):
        raise ValueError(
            f"An optimizer cannot step on a whole tensor with the placements {tuple(tensor.placements)}: only rows may "
            "be sharded, over the last dimension of the mesh."
        )


def _buckets(travels: Sequence[_Travel], num_ranks: int) -> Iterator[list[_Travel]]:
    """Return tensors of one dtype that travel together; the same on every rank."""
    by_dtype: dict[torch.dtype, list[_Travel]] = {}
    for one in travels:
        by_dtype.setdefault(one.shard.dtype, []).append(one)
    for alike in by_dtype.values():
        bucket: list[_Travel] = []
        num_bytes = 0
        for one in alike:
            size = one.cut.shape.numel() * one.shard.element_size() // num_ranks
            if bucket and num_bytes + size > _BUCKET_BYTES:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(one)
            num_bytes += size
        yield bucket


def _form_of(state: Mapping[Any, Any]) -> Form:
    """Return the form of a parameter's state, of shards as of whole tensors.

    Raises:
        TypeError: If it holds something whose parts cannot travel.
    """
    form: Form = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            if value.ndim:
                form[key] = ("tensor", value.shape, value.dtype)
            else:
                form[key] = ("scalar", value.dtype, value.device.type == "cpu")
        elif isinstance(value, bool | int | float):
            form[key] = ("number", type(value))
        elif value is None or isinstance(value, str):
            form[key] = ("value", value)
        else:
            raise TypeError(f"its state {key!r} is a {type(value).__name__}, not a tensor, a number or a string")
    return form


def _numbers_of(state: Mapping[Any, Any], form: Form) -> list[Any]:
    return [state[key] for key, (kind, *_) in form.items() if kind in ("scalar", "number")]


def _stacked(values: Sequence[Any], device: torch.device) -> Tensor:
    """Return numbers and tensors without dimensions as one tensor, in as few copies to the device as there can be."""
    tensors = {at: value for at, value in enumerate(values) if isinstance(value, Tensor)}
    stacked = torch.tensor([0.0 if at in tensors else value for at, value in enumerate(values)], dtype=torch.float64)
    for kind in {value.device for value in tensors.values()}:
        ats = [at for at, value in tensors.items() if value.device == kind]
        together = torch.stack([tensors[at].double() for at in ats])
        stacked[ats] = together.to("cpu")
    return stacked.to(device)
