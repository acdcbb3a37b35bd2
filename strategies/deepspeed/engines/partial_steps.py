"""Optimizer steps that leave out the parameters without a gradient, as torch's do, on ZeRO's flat partitions.

Where every parameter of a partition has a gradient, the optimizer steps on the flat tensor as usual. Otherwise it steps
on the pieces of those that have one: neither momentum nor decay touches the others, and what it counts for each tensor
(such as Adam's steps) is counted for each parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import partitions

State = dict[str, Any]
"""What an optimizer keeps for a tensor."""


class PiecewiseSteps:
    """Takes the place of ``_optimizer_step`` in a ZeRO optimizer of the stages 1 to 3.

    Args:
        zero: DeepSpeed's optimizer.
        names: The parameters' names, for errors and checkpoints.
    """

    def __init__(self, zero: Any, names: Mapping[nn.Parameter, str]) -> None:
        self._zero, self._names = zero, names
        self._step_flat = zero._optimizer_step
        self._pieces: dict[int, list[partitions.Piece]] = defaultdict(list)
        for piece in partitions.pieces(zero):
            self._pieces[piece.group].append(piece)
        self.used: set[nn.Parameter] = set()
        """Parameters that have a gradient on some rank in this window."""
        self._own: dict[int, dict[nn.Parameter, State]] = {}
        """For each partition whose pieces have not all stepped equally often: what is counted for each that has."""
        zero._optimizer_step = self._step
        if partitions.is_stage_3(zero) and not getattr(zero, "swap_optimizer", False):
            zero._set_fp32_optimizer_param_groups = zero._clear_fp32_optimizer_param_groups = self._show_masters
        self._show_masters()

    def _show_masters(self) -> None:
        partitions.show_masters(self._zero)

    def _step(self, group: int) -> None:
        try:
            self._step_on_used(group)
        finally:
            self._show_masters()

    def _step_on_used(self, group: int) -> None:
        pieces = self._pieces[group]
        stepping = [piece for piece in pieces if piece.parameter in self.used]
        if len(stepping) == len(pieces) and self._is_even(group):
            if not pieces and self.used.isdisjoint(partitions.parameter_groups(self._zero)[group]):
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
        self._zero.optimizer.state[partitions.masters(self._zero)[group]].update(_copied(first))
        return True

    def _step_on_pieces(self, group: int, stepping: list[partitions.Piece]) -> None:
        self._check_possible()
        zero, optimizer, flat = self._zero, self._zero.optimizer, partitions.masters(self._zero)[group]
        own = self._own[group] = self._counts(group)
        tensors = [self._tensor_of(piece, flat, own) for piece in stepping]
        self._step_on(group, tensors)
        for piece, tensor in zip(stepping, tensors, strict=True):
            self._take_state(piece, flat, optimizer.state.pop(tensor, {}), own)
        optimizer.state[flat].update(_copied(max(own.values(), key=lambda state: float(state.get("step", 0)))))
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
            zero._lazy_init_hp_params_optimizer_state()

    def _counts(self, group: int) -> dict[nn.Parameter, State]:
        """Return what the optimizer counts for each piece of a partition that has stepped."""
        if group in self._own:
            return self._own[group]
        flat = partitions.masters(self._zero)[group]
        flat_state = self._zero.optimizer.state.get(flat)
        if not flat_state:
            return {}
        counted = {key: value for key, value in flat_state.items() if not _is_spread(value, flat)}
        return {piece.parameter: _copied(counted) for piece in self._pieces[group]}

    def _check_possible(self) -> None:
        zero = self._zero
        if getattr(zero, "torch_autocast_gradscaler", None) or getattr(zero, "swap_optimizer", False):
            unused = [
                self._names[p] for group in partitions.parameter_groups(zero) for p in group if p not in self.used
            ]
            raise RuntimeError(
                f"{', '.join(unused)} had no gradient in this window. With torch_autocast in fp16 or an optimizer on "
                "NVMe, DeepSpeed would step on them all the same. Leave those settings out, use every parameter in "
                "every window, or freeze these before fit()."
            )

    def _tensor_of(self, piece: partitions.Piece, flat: Tensor, own: dict[nn.Parameter, State]) -> nn.Parameter:
        """Return a piece as a parameter for the optimizer, with its gradient and its state: all of them views."""
        tensor = nn.Parameter(piece.of(flat.detach()))
        tensor.grad = piece.of(flat.grad) if flat.grad is not None else None
        state = self._zero.optimizer.state
        if piece.parameter in own:
            spread = {key: piece.of(value) for key, value in state[flat].items() if _is_spread(value, flat)}
            state[tensor] = {**spread, **own[piece.parameter]}
        return tensor

    def _step_on(self, group: int, tensors: list[nn.Parameter]) -> None:
        """Let the optimizer step on these tensors alone, with the options of their group."""
        zero, optimizer = self._zero, self._zero.optimizer
        index = zero.sub_group_to_group_id[group] if partitions.is_stage_3(zero) else group
        all_groups = optimizer.param_groups
        mine = all_groups[index]
        before, mine["params"] = mine["params"], tensors
        optimizer.param_groups = [mine]
        try:
            optimizer.step()
        finally:
            mine["params"], optimizer.param_groups = before, all_groups

    def _take_state(self, piece: partitions.Piece, flat: Tensor, state: State, own: dict[nn.Parameter, State]) -> None:
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
    def states(self) -> Iterator[tuple[partitions.Piece, State, State]]:
        """Yield each piece that has stepped: what the optimizer keeps for its elements, and what it counts for it."""
        for group, pieces in self._pieces.items():
            counts, flat = self._counts(group), partitions.masters(self._zero)[group]
            state = self._zero.optimizer.state.get(flat, {})
            for piece in pieces:
                if piece.parameter in counts:
                    spread = {key: piece.of(value) for key, value in state.items() if _is_spread(value, flat)}
                    yield piece, spread, counts[piece.parameter]

    def take_states(self, states: Iterable[tuple[nn.Parameter, State]]) -> None:
        """Take over the state of whole parameters: of those that are given, and of no other."""
        optimizer, flats = self._zero.optimizer, partitions.masters(self._zero)
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
        """Return what is counted for each parameter, by its name, if it differs anywhere; every rank must call it."""
        mine = {
            self._names[parameter]: state for group in self._pieces for parameter, state in self._counts(group).items()
        }
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (bool(self._own), mine))
        if not any(uneven for uneven, _ in told):
            return {}
        return {name: state for _, counts in told for name, state in counts.items()}

    def load_state_dict(self, counts: Mapping[str, State]) -> None:
        """Take over what `state_dict` gave."""
        self._own = {}
        for group, pieces in self._pieces.items() if counts else ():
            named = {piece.parameter: self._names[piece.parameter] for piece in pieces}
            self._own[group] = {each: _copied(counts[name]) for each, name in named.items() if name in counts}


def step_on_all_values(zero: Any) -> None:
    """Let an optimizer in fp32 step on gradients that are not finite, as one without DeepSpeed does.

    DeepSpeed leaves such steps out, which is right for half precision and its loss scale. In fp32 weights are to become
    NaN, for detectors of NaN to see.
    """
    scalers = ("torch_autocast_gradscaler", "torch_autocast_z0_gradscaler")
    if zero.dtype != torch.float32 or any(getattr(zero, name, None) is not None for name in scalers):
        return

    def keep_scale(has_overflow: bool = False) -> None:
        zero.overflow = False

    zero._update_scale = keep_scale


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
