"""ZeRO's optimizers: each rank's pieces of parameters in flat partitions, master weights, and steps on a part of them.

Stages 1 to 3 hand the user's optimizer one flat tensor for each parameter group (stage 3: for each sub-group). The
attributes are those of DeepSpeed 0.19.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..upstream.patches import replace_for_good


@dataclass(frozen=True)
class Piece:
    """This rank's part of one parameter."""

    parameter: nn.Parameter
    group: int
    """Index of the flat partition."""
    flat_start: int
    """Its offset in the flat partition."""
    start: int
    """Its offset in the flattened parameter."""
    numel: int

    def of(self, flat: Tensor) -> Tensor:
        """Return this piece of a flat partition, a view."""
        return flat.narrow(0, self.flat_start, self.numel)


def is_partitioned_optimizer(optimizer: Any) -> bool:
    """Whether it is ZeRO's of the stages 1 to 3 (and not DeepSpeed's optimizer for bf16, or torch's own)."""
    return hasattr(optimizer, "parallel_partitioned_bit16_groups") or hasattr(optimizer, "fp32_partitioned_groups_flat")


def is_stage_3(optimizer: Any) -> bool:
    """Whether it is ZeRO's of stage 3."""
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def parameter_groups(optimizer: Any) -> list[list[nn.Parameter]]:
    """Return the parameters of each flat partition, in its order."""
    groups: list[list[nn.Parameter]] = optimizer.fp16_groups if is_stage_3(optimizer) else optimizer.bit16_groups
    return groups


def masters(optimizer: Any) -> list[Tensor]:
    """Return this rank's flat partitions of the weights that the optimizer steps on."""
    flat: list[Tensor] = (
        optimizer.fp32_partitioned_groups_flat if is_stage_3(optimizer) else optimizer.single_partition_of_fp32_groups
    )
    return flat


def show_masters(optimizer: Any) -> None:
    """Put the tensors that stage 3's optimizer steps on into its groups, as in stages 1 and 2.

    DeepSpeed puts one flat partition after another there while it steps, and leaves none.
    """
    if not is_stage_3(optimizer) or getattr(optimizer, "swap_optimizer", False):
        return
    groups = optimizer.optimizer.param_groups
    for group in groups:
        group["params"] = []
    for number, flat in enumerate(masters(optimizer)):
        groups[optimizer.sub_group_to_group_id[number]]["params"].append(flat)


@contextmanager
def groups_with_masters(optimizer: Any) -> Iterator[None]:
    """Put the tensors that a ZeRO optimizer steps on into its groups, in this context."""
    before = [group["params"] for group in optimizer.optimizer.param_groups]
    show_masters(optimizer)
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.optimizer.param_groups, before, strict=True):
            group["params"] = parameters


def computing_weights(optimizer: Any) -> list[Tensor | None]:
    """Return this rank's flat partitions of the weights that the model computes with; None if they are on NVMe."""
    if is_stage_3(optimizer):
        return list(optimizer.fp16_partitioned_groups_flat)
    return [
        partitions[dist.get_rank(group)]
        for partitions, group in zip(
            optimizer.parallel_partitioned_bit16_groups, optimizer.real_dp_process_group, strict=True
        )
    ]


def pieces(optimizer: Any) -> Iterator[Piece]:
    """Yield this rank's piece of each parameter that it has a part of."""
    return _pieces_3(optimizer) if is_stage_3(optimizer) else _pieces_1_2(optimizer)


def _pieces_1_2(optimizer: Any) -> Iterator[Piece]:
    for group, parameters in enumerate(optimizer.params_in_partition):
        partition = dist.get_rank(optimizer.real_dp_process_group[group])
        for parameter in parameters:
            parameter_id = optimizer.get_param_id(parameter)
            start = int(optimizer.grad_start_offset[group][partition][parameter_id])
            flat_start = int(optimizer.grad_partition_insertion_offset[group][partition][parameter_id])
            numel = min(parameter.numel() - start, int(optimizer.partition_size[group]) - flat_start)
            if numel > 0:
                yield Piece(parameter, group, flat_start, start, numel)


def _pieces_3(optimizer: Any) -> Iterator[Piece]:
    return (piece for piece, _ in _padded_pieces_3(optimizer) if piece.numel > 0)


def _padded_pieces_3(optimizer: Any) -> Iterator[tuple[Piece, int]]:
    """Yield each parameter's piece, which may be empty, and the room for it in the flat partition."""
    for parameter in (each for group in optimizer.fp16_groups for each in group):
        group, flat_start, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        yield Piece(parameter, group, flat_start, *range_in_partition(parameter, size)), size


def range_in_partition(parameter: Any, size: int) -> tuple[int, int]:
    """Return the offset and length of this rank's piece of a parameter of stage 3: the last ones may be shorter."""
    start = dist.get_rank(parameter.ds_process_group) * size
    return start, max(0, min(size, parameter.ds_numel - start))


@torch.no_grad()
def clear_padding(module: nn.Module, optimizer: Any) -> None:
    """Zero what stage 3 leaves unwritten behind the pieces of parameters that the ranks do not divide evenly.

    DeepSpeed takes that memory as it finds it: NaN, or large numbers. It then is in checkpoints, in the weights that
    users look at (``safe_get_local_fp32_param``), and in the scales of quantized weights. Partitions on NVMe are left.

    Args:
        module: Of an engine of stage 3.
        optimizer: Of that engine; another than ZeRO's, or None, has no partitions.
    """
    parameter: Any
    for parameter in module.parameters():
        partition: Tensor | None = getattr(parameter, "ds_tensor", None)
        if partition is not None and partition.numel() == parameter.partition_numel():  # not so while it is on NVMe
            partition[range_in_partition(parameter, partition.numel())[1] :].zero_()
    if not is_partitioned_optimizer(optimizer):
        return
    for piece, size in _padded_pieces_3(optimizer):
        master = masters(optimizer)[piece.group]  # empty while it is on NVMe
        master[piece.flat_start + piece.numel : piece.flat_start + size].zero_()


def process_group(optimizer: Any, group: int) -> dist.ProcessGroup:
    """Return the ranks that hold the other pieces of a flat partition."""
    found: dist.ProcessGroup = (
        optimizer.dp_process_group if is_stage_3(optimizer) else optimizer.real_dp_process_group[group]
    )
    return found


def places(optimizer: Any) -> dict[nn.Parameter, tuple[int, tuple[int, int]]]:
    """Return each parameter's flat partition, and how that is cut: where the parameter begins, and a rank's share."""
    if is_stage_3(optimizer):
        groups: Any = optimizer.fp16_groups
        return {each: (group, (0, each.partition_numel())) for group, some in enumerate(groups) for each in some}
    partitions = zip(
        optimizer.round_robin_bit16_groups,
        optimizer.round_robin_bit16_offsets,
        map(int, optimizer.partition_size),
        strict=True,
    )
    return {
        each: (group, (begin, share))
        for group, (parameters, begins, share) in enumerate(partitions)
        for each, begin in zip(parameters, begins, strict=True)
    }


def gradient_dtype(optimizer: Any) -> torch.dtype:
    """Return the dtype of reduced gradients."""
    dtype: torch.dtype = optimizer.gradient_accumulation_dtype
    return dtype


def gradient_piece(optimizer: Any, piece: Piece) -> Tensor:
    """Return this rank's piece of a reduced gradient, sharing memory with what the optimizer steps on.

    Raises:
        RuntimeError: If it is not where DeepSpeed 0.19 keeps it.
    """
    offloads = getattr(optimizer, "offload_optimizer", False) or getattr(optimizer, "cpu_offload", False)
    flat = masters(optimizer)[piece.group].grad
    if offloads and flat is not None:
        return piece.of(flat)
    begin = 0
    for part in optimizer.averaged_gradients.get(piece.group) or ():
        if begin <= piece.flat_start and piece.flat_start + piece.numel <= begin + part.numel():
            return part.view(-1).narrow(0, piece.flat_start - begin, piece.numel)
        begin += part.numel()
    raise RuntimeError(
        "DeepSpeed has no reduced gradient for this parameter. Use p.grad in on_before_optimizer_step(), or "
        "precision and offloading that keep gradients in memory."
    )


def gradient_attribute(zero: Any) -> str:
    """Return the attribute of a parameter for its unreduced gradient in stage 1 or 2."""
    return "grad_accum" if getattr(zero, "use_grad_accum_attribute", False) else "grad"


# ------------------------------------------------------------------------------------------------
# Weights that users' code changes: the master weights follow, or the change is refused.


class ChangedWeights:
    """Lets the weights that a ZeRO optimizer steps on, and those that the model computes with, follow each other.

    The user's code changes either: the module's parameters, or those of ``optimizer.param_groups``, which are the flat
    partitions that the optimizer steps on. Version counters of these show that it was they.

    Args:
        zero: DeepSpeed's optimizer of the stages 1 to 3.
        parameters: That it trains.
        names: Of the module's parameters.
        frozen: Parameters that the user's optimizer was given and that DeepSpeed left out.
    """

    def __init__(
        self,
        zero: Any,
        parameters: Sequence[nn.Parameter],
        names: Mapping[nn.Parameter, str],
        frozen: Sequence[nn.Parameter],
    ) -> None:
        self._zero, self._parameters, self._names, self._frozen = zero, parameters, names, frozen
        self.accept()

    def accept(self) -> None:
        """Accept what there is: both are equal."""
        self._masters = [each._version for each in masters(self._zero)]
        self._weights = [_version_of(each) for each in self._parameters]

    def attach(self) -> None:
        """Copy changed weights to their masters; changes of the masters themselves stay.

        Raises:
            RuntimeError: If both were changed since the last call.
        """
        changed = self._changed_masters()
        if changed:
            pairs = zip(self._parameters, self._weights, strict=True)
            both = [self._names[each] for each, version in pairs if _version_of(each) != version]
            if both:
                raise RuntimeError(
                    f"{_first(both)} was changed in the module, and the weights of optimizer.param_groups were "
                    "changed, too, before they were synchronized. Change only the module's parameters."
                )
        sync_master_weights(self._zero, except_for=changed)
        self.accept()

    def sync_to_model(self) -> None:
        """Copy masters that were changed through the optimizer to the model's weights; every rank must call it."""
        if self._changed_masters():
            self.attach()
            self.push()

    def sync_to_optimizer(self) -> None:
        """Copy changed weights to their masters, unless the masters were changed themselves."""
        if not self._changed_masters():
            self.attach()

    def push(self) -> None:
        """Copy the masters to the model's weights; every rank must call it."""
        push_masters(self._zero)
        self.accept()

    def switch_mode(self, name: str) -> None:
        """As `switch_mode`, with what the user's code has changed before."""
        self.attach()
        switch_mode(self._zero, name)
        self.accept()

    def _changed_masters(self) -> list[int]:
        flats = masters(self._zero)
        changed = [
            place
            for place, (flat, version) in enumerate(zip(flats, self._masters, strict=True))
            if flat._version != version
        ]
        if changed and self._frozen:
            raise RuntimeError(
                "Weights of optimizer.param_groups were changed, which held frozen parameters "
                f"({_first([self._names[each] for each in self._frozen])}): DeepSpeed leaves these out of its flat "
                "ones, so the change did not reach them. Change the module's parameters, or give the optimizer only "
                "those with requires_grad=True."
            )
        return changed


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" and others" if names[3:] else "")


def _version_of(parameter: Any) -> int:
    """Return a number that grows with each change in place, also of a partition of stage 3."""
    partition: Tensor | None = getattr(parameter, "ds_tensor", None)
    return int(parameter._version) + (0 if partition is None else int(partition._version))


def switch_mode(optimizer: Any, name: str) -> None:
    """Call ``train()`` or ``eval()`` of the optimizer inside DeepSpeed's, whose weights change, on every rank.

    Args:
        optimizer: DeepSpeed's.
        name: Of the method.
    """
    if not is_partitioned_optimizer(optimizer):
        getattr(optimizer.optimizer, name)()
        return
    with groups_with_masters(optimizer):
        getattr(optimizer.optimizer, name)()
    push_masters(optimizer)


@torch.no_grad()
def push_masters(zero: Any) -> None:
    """Copy the weights that a ZeRO optimizer steps on into those that the model computes with, on all ranks.

    Every rank must call it, outside of forward and backward.
    """
    if is_stage_3(zero):  # before its partitions change: what is gathered would look like a change of the user's
        zero.parameter_offload.partition_all_parameters()
    for master, weights in zip(masters(zero), computing_weights(zero), strict=True):
        if weights is not None and weights.data_ptr() != master.data_ptr():
            weights.copy_(master)
    if is_stage_3(zero):
        if zero.persistent_parameters:  # small ones, which stay gathered
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        return
    for flat, parts, group in zip(
        zero.bit16_groups_flat, zero.parallel_partitioned_bit16_groups, zero.real_dp_process_group, strict=True
    ):
        own = parts[dist.get_rank(group)].clone()
        gathered = [torch.empty_like(own) for _ in parts]
        dist.all_gather(gathered, own, group=group)
        flat.copy_(torch.cat(gathered)[: flat.numel()])


@torch.no_grad()
def sync_master_weights(zero: Any, *, except_for: Sequence[int] = ()) -> None:
    """Copy to the weights that a ZeRO optimizer steps on what the user's code has written into the parameters.

    Args:
        zero: DeepSpeed's optimizer of the stages 1 to 3.
        except_for: Flat partitions that the user's code has changed themselves.
    """
    pairs = zip(masters(zero), computing_weights(zero), strict=True)
    for place, (master, weights) in enumerate(pairs):
        if weights is None or place in except_for or weights.data_ptr() == master.data_ptr():
            continue
        if weights.dtype == master.dtype and weights.device == master.device:
            master.data.copy_(weights)
            continue
        on_device = weights.to(master.device)
        changed = on_device != master.detach().to(on_device.dtype)
        if bool(changed.any()):
            master.data.copy_(torch.where(changed, on_device.to(master.dtype), master.detach()))


# ------------------------------------------------------------------------------------------------
# The fp32 weights of an engine that computes in 16 bits, handed to the next engine on the same module.


class MasterWeights:
    """The fp32 weights that an engine had beside the 16-bit ones, for the engine after it."""

    def __init__(self) -> None:
        self._pieces: dict[nn.Parameter, tuple[int, Tensor]] = {}

    def keep(self, engine: Any) -> None:
        """Keep this rank's part of an engine's fp32 weights."""
        zero = engine.optimizer
        if not is_partitioned_optimizer(zero):
            return
        flats = masters(zero)
        for piece in pieces(zero):
            if piece.parameter.dtype != flats[piece.group].dtype:
                self._pieces[piece.parameter] = piece.start, piece.of(flats[piece.group].detach())

    @torch.no_grad()
    def give(self, engine: Any) -> None:
        """Hand them to the next engine, parameter by parameter; every rank must call it.

        A weight that has changed since, for example by ``load_state_dict()`` on the module, keeps its new value.
        """
        zero = engine.optimizer
        known = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(known, bool(self._pieces))
        if not any(known) or not is_partitioned_optimizer(zero):
            return
        full, weights = masters(zero), computing_weights(zero)
        mine = {piece.parameter: piece for piece in pieces(zero)}
        for parameter in (each for group in parameter_groups(zero) for each in group):
            numel = int(getattr(parameter, "ds_numel", parameter.numel()))
            shared = torch.zeros(2, numel, device=engine.device)  # the values, and where there are any
            if parameter in self._pieces:
                start, values = self._pieces[parameter]
                shared[0, start : start + values.numel()] = values.to(shared.device)
                shared[1, start : start + values.numel()] = 1
            torch.distributed.all_reduce(shared)
            piece = mine.get(parameter)
            lowered = None if piece is None else weights[piece.group]
            if piece is None or lowered is None:
                continue
            values, given = shared[:, piece.start : piece.start + piece.numel]
            now = piece.of(lowered)
            kept = (given > 0) & (values.to(now.dtype) == now.to(values.device))
            master = piece.of(full[piece.group].detach())
            master.copy_(torch.where(kept, values.to(master.dtype), master.to(values.device)))


# ------------------------------------------------------------------------------------------------
# Optimizer steps on ZeRO's flat partitions that skip parameters without a gradient, as torch's do.
#
# If every parameter of a partition has a gradient, the optimizer steps on the flat tensor as usual. Otherwise it
# steps on the pieces of those that have one: neither momentum nor decay touches the others, and what it counts for each
# tensor (such as Adam's steps) is counted for each parameter.


State = dict[str, Any]
"""An optimizer's state of a tensor."""


class PerParameterStep:
    """Takes the place of ``_optimizer_step`` in a ZeRO optimizer of the stages 1 to 3.

    Args:
        zero: DeepSpeed's optimizer.
        names: The parameters' names, for errors and checkpoints.
    """

    def __init__(self, zero: Any, names: Mapping[nn.Parameter, str]) -> None:
        self._zero, self._names = zero, names
        self._step_flat = zero._optimizer_step
        self._pieces: dict[int, list[Piece]] = defaultdict(list)
        for piece in pieces(zero):
            self._pieces[piece.group].append(piece)
        self.used: set[nn.Parameter] = set()
        """Parameters that have a gradient on some rank in this window."""
        self._own: dict[int, dict[nn.Parameter, State]] = {}
        """For each partition whose pieces have not all stepped equally often: what is counted for each that has."""
        replace_for_good("ZeRO optimizers", zero, _optimizer_step=self._step)
        if is_stage_3(zero) and not getattr(zero, "swap_optimizer", False):
            show = self._show_masters
            replace_for_good(
                "ZeRO optimizers", zero, _set_fp32_optimizer_param_groups=show, _clear_fp32_optimizer_param_groups=show
            )
        self._show_masters()

    def _show_masters(self) -> None:
        show_masters(self._zero)

    def _step(self, group: int) -> None:
        try:
            self._step_on_used(group)
        finally:
            self._show_masters()

    def _step_on_used(self, group: int) -> None:
        pieces = self._pieces[group]
        stepping = [piece for piece in pieces if piece.parameter in self.used]
        if len(stepping) == len(pieces) and self._is_even(group):
            if not pieces and self.used.isdisjoint(parameter_groups(self._zero)[group]):
                return
            self._own.pop(group, None)
            self._step_flat(group)
        elif stepping:
            self._step_on_pieces(group, stepping)

    def _is_even(self, group: int) -> bool:
        """Whether all pieces of a partition have stepped equally often; then their counts go to the flat tensor."""
        own = self._own.get(group)
        if own is None:
            return True
        counts = [own.get(piece.parameter) for piece in self._pieces[group]]
        first = counts[0] if counts else None
        if first is None or any(each is None or not _same(first, each) for each in counts):
            return False
        self._zero.optimizer.state[masters(self._zero)[group]].update(_copied(first))
        return True

    def _step_on_pieces(self, group: int, stepping: list[Piece]) -> None:
        self._check_possible()
        zero, optimizer, flat = self._zero, self._zero.optimizer, masters(self._zero)[group]
        own = self._own[group] = self._counts(group)
        tensors = [self._tensor_of(piece, flat, own) for piece in stepping]
        self._step_on(group, tensors)
        for piece, tensor in zip(stepping, tensors, strict=True):
            self._take_state(piece, flat, optimizer.state.pop(tensor, {}), own)
        optimizer.state[flat].update(_copied(max(own.values(), key=lambda state: float(state.get("step", 0)))))
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
            zero._lazy_init_hp_params_optimizer_state()

    def _counts(self, group: int) -> dict[nn.Parameter, State]:
        """Return the optimizer's counts for each piece of a partition that has stepped."""
        if group in self._own:
            return self._own[group]
        flat = masters(self._zero)[group]
        flat_state = self._zero.optimizer.state.get(flat)
        if not flat_state:
            return {}
        counted = {key: value for key, value in flat_state.items() if not _is_spread(value, flat)}
        return {piece.parameter: _copied(counted) for piece in self._pieces[group]}

    def _check_possible(self) -> None:
        zero = self._zero
        if getattr(zero, "swap_optimizer", False):
            unused = [self._names[p] for group in parameter_groups(zero) for p in group if p not in self.used]
            raise RuntimeError(
                f"{', '.join(unused)} had no gradient in this window. With an optimizer on NVMe, DeepSpeed would step "
                "on them anyway. Offload to 'cpu', use every parameter in every window, or freeze these before fit()."
            )

    def _tensor_of(self, piece: Piece, flat: Tensor, own: dict[nn.Parameter, State]) -> nn.Parameter:
        """Return a piece as a parameter for the optimizer, with its gradient and its state: all of them views."""
        tensor = nn.Parameter(piece.of(flat.detach()))
        tensor.grad = piece.of(flat.grad) if flat.grad is not None else None
        state = self._zero.optimizer.state
        if piece.parameter in own:
            spread = {key: piece.of(value) for key, value in state[flat].items() if _is_spread(value, flat)}
            state[tensor] = {**spread, **own[piece.parameter]}
        return tensor

    def _step_on(self, group: int, tensors: list[nn.Parameter]) -> None:
        """Step on these tensors alone, with the options of their group."""
        zero, optimizer = self._zero, self._zero.optimizer
        index = zero.sub_group_to_group_id[group] if is_stage_3(zero) else group
        all_groups = optimizer.param_groups
        mine = all_groups[index]
        before, mine["params"] = mine["params"], tensors
        optimizer.param_groups = [mine]
        try:
            optimizer.step()
        finally:
            mine["params"], optimizer.param_groups = before, all_groups

    def _take_state(self, piece: Piece, flat: Tensor, state: State, own: dict[nn.Parameter, State]) -> None:
        """Put what the optimizer has kept for a piece where it is kept for all."""
        flat_state = self._zero.optimizer.state[flat]
        counted = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == piece.numel:
                if key not in flat_state:
                    flat_state[key] = torch.zeros_like(flat, dtype=value.dtype, requires_grad=False)
                mine = piece.of(flat_state[key])
                if mine.data_ptr() != value.data_ptr():
                    mine.copy_(value)
            else:
                counted[key] = value
        own[piece.parameter] = counted

    # ------------------------------------------------------------------ from engine to engine
    def states(self) -> Iterator[tuple[Piece, State, State]]:
        """Yield each piece that has stepped: what the optimizer keeps for its elements, and what it counts for it."""
        for group, pieces in self._pieces.items():
            counts, flat = self._counts(group), masters(self._zero)[group]
            state = self._zero.optimizer.state.get(flat, {})
            for piece in pieces:
                if piece.parameter in counts:
                    spread = {key: piece.of(value) for key, value in state.items() if _is_spread(value, flat)}
                    yield piece, spread, counts[piece.parameter]

    def take_states(self, states: Iterable[tuple[nn.Parameter, State]]) -> None:
        """Take over the state of whole parameters: of those that are given, and of no other."""
        optimizer, flats = self._zero.optimizer, masters(self._zero)
        mine = {piece.parameter: piece for pieces in self._pieces.values() for piece in pieces}
        for parameter, state in states:
            if parameter not in mine:
                continue
            piece = mine[parameter]
            part = {
                key: value.reshape(-1)[piece.start : piece.start + piece.numel]
                if _is_of(parameter, key, value)
                else value
                for key, value in state.items()
            }
            own = self._own.setdefault(piece.group, {})
            self._take_state(piece, flats[piece.group], part, own)
            if "step" in own[parameter]:
                own[parameter]["step"] = _step_for(optimizer, own[parameter]["step"])
        for group, own in self._own.items():
            optimizer.state[flats[group]].update(
                _copied(max(own.values(), key=lambda each: float(each.get("step", 0))))
            )

    # ------------------------------------------------------------------ checkpoints
    def state_dict(self) -> dict[str, State]:
        """Return the counts of each parameter, by its name, if they differ anywhere; every rank must call it."""
        of_all_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all_ranks, bool(self._own))
        if not any(of_all_ranks):  # as a rule, and pickling a count for each parameter takes longer than its copy
            return {}
        mine = {
            self._names[parameter]: state for group in self._pieces for parameter, state in self._counts(group).items()
        }
        dist.all_gather_object(of_all_ranks, mine)
        return {name: state for counts in of_all_ranks for name, state in counts.items()}

    def load_state_dict(self, counts: Mapping[str, State]) -> None:
        """Take over what `state_dict` gave."""
        self._own = {}
        for group, pieces in self._pieces.items() if counts else ():
            named = {piece.parameter: self._names[piece.parameter] for piece in pieces}
            self._own[group] = {each: _copied(counts[name]) for each, name in named.items() if name in counts}


def step_on_all_values(zero: Any) -> None:
    """Make an optimizer in fp32 step on gradients that are not finite, as one without DeepSpeed does.

    DeepSpeed leaves such steps out, which is right for half precision and its loss scale. In fp32 weights are to become
    NaN, for detectors of NaN to see.
    """
    if zero.dtype != torch.float32:
        return

    def keep_scale(has_overflow: bool = False) -> None:
        zero.overflow = False

    replace_for_good("ZeRO optimizers", zero, _update_scale=keep_scale)


def _is_spread(value: Any, flat: Tensor) -> bool:
    """Whether it has an element for each of the flat partition's, like a momentum."""
    return isinstance(value, Tensor) and value.shape == flat.shape and value.dim() > 0


def _is_of(parameter: nn.Parameter, key: str, value: Any) -> bool:
    """Whether it has an element for each of a parameter's."""
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return isinstance(value, Tensor) and key != "step" and value.shape == shape


def _step_for(optimizer: Any, step: Any) -> Any:
    """Return a count of steps as the optimizer has it: DeepSpeed's Adam on the CPU has a number, torch's a tensor."""
    if type(optimizer).__name__.startswith("DeepSpeedCPU"):
        return int(step)
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    return torch.tensor(float(step)) if is_torchs and not isinstance(step, Tensor) else step


def _copied(state: Mapping[str, Any]) -> State:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(bool(one[key] == other[key]) for key in one)


# ------------------------------------------------------------------------------------------------
# Optimizers that report users' calls to the accumulation window of their engine.


def attach_window(optimizer: Any, window: Any) -> None:
    """Make ``optimizer.zero_grad()`` drop the window, and DeepSpeed's own refuse further groups."""
    optimizer.accelight_window = window
    kind: type = type(optimizer)
    inner = None if isinstance(optimizer, Optimizer) else getattr(optimizer, "optimizer", None)
    has_modes = all(callable(getattr(inner, name, None)) for name in ("train", "eval"))
    replace_for_good("ZeRO optimizers", optimizer, __class__=_class_with_window(kind, has_modes))
    if not isinstance(optimizer, Optimizer):
        replace_for_good("ZeRO optimizers", optimizer, add_param_group=_refuse_group)
        if isinstance(inner, Optimizer) and not hasattr(optimizer, "defaults"):
            optimizer.defaults = inner.defaults


def detach_window(optimizer: Any) -> None:
    """Undo `attach_window`."""
    replace_for_good("ZeRO optimizers", optimizer, __class__=type(optimizer).__base__)
    del optimizer.accelight_window


@functools.cache
def _class_with_window(base: type, has_modes: bool) -> type:
    """Return a class of optimizers whose ``zero_grad()`` drops the window; ``train()`` and ``eval()`` reach the model.

    A method of the instance would not do: Lightning's own optimizers derive from the class, and call its methods.
    """

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        self.accelight_window.zero_grad(*args, **kwargs)

    def train(self: Any) -> None:
        self.accelight_window.set_mode("train")

    def evaluate(self: Any) -> None:
        self.accelight_window.set_mode("eval")

    modes = {"train": train, "eval": evaluate} if has_modes else {}
    return type(base.__name__, (base,), {"zero_grad": zero_grad, **modes, "__module__": base.__module__})


def _refuse_group(param_group: Any) -> None:
    raise RuntimeError(
        "DeepSpeed's optimizer accepts no parameter group after fit() has started (add_param_group, "
        "BaseFinetuning). Pass every parameter to the optimizer at the start and freeze those that train later in "
        "on_train_start(), or unfreeze them between two calls of fit(), or use stage 0 in fp32."
    )
