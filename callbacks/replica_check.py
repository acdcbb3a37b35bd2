"""`ReplicaCheck`: finds copies of weights, optimizer state and counters that have come apart between processes.

[Note: what must be equal] Copies are what several ranks compute from the same numbers, the results of collectives: a
parameter under ``ddp``, its shard in each copy of the model (HSDP), what ZeRO gathers. Ranks that share layers (tensor
parallelism) compute gradients of what no plan cuts each for itself, which kernels of accelerators need not do to the
last bit: such copies are not compared. Nor are buffers that a forward writes, which ranks may leave different until
rank 0's are broadcast. A buffer that no rank has written since the last check must have the value that it had then.

[Note: waiting for the verdict] A thread of each rank sends digests to rank 0's, which compares them. All ranks ask for
the verdict at the same place, some steps later; none waits in a step for messages that are on their way.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FlatParameter
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler
from typing_extensions import override

from ..checkpoint.names import clean_name
from ..state.process_group import require_group
from ..state.rendezvous import StoreMessages, name_processes, shared_number, store_messages
from ..state.utils import check_count, named_arguments
from ..strategies.common.broadcast import plain_parts, version_of
from ..strategies.sharded_tensors.shards import FlatShard, local_part
from ..strategies.sharded_tensors.user_code import library_code
from ..strategies.upstream.lightning import (
    Callback,
    DeepSpeedStrategy,
    LightningModule,
    Trainer,
    check_trainer,
    rank_zero_warn,
)
from ..strategies.upstream.patches import Patches
from ..strategies.upstream.torch_core import tree_leaves
from .second_computation import SecondComputation
from .step_guard import is_known_strategy

Ranks: TypeAlias = "tuple[int, ...] | None"
"""Those that hold copies of a value; None stands for all."""

_MOST_STEPS_LATER = 10
_MOST_LISTED = 10
_JOINS_WITHIN_S = 5.0
_WHAT = "The comparison of copies by ReplicaCheck"


class Difference(NamedTuple):
    """One value of which not all copies are equal."""

    name: str
    """Such as ``"parameter model.head.weight"`` or ``"lr of parameter group 0"``."""
    groups: tuple[tuple[int, ...], ...]
    """The ranks that agree with each other; the largest group first."""
    right: tuple[int, ...] | None
    """The ranks whose copies can repair the others: the majority, or those whose buffer has not changed; none of a
    layer that a rank has computed twice with different results."""
    values: tuple[str, ...] = ()
    """Of each group, where the value is not a tensor."""

    @property
    def wrong(self) -> tuple[int, ...]:
        """The ranks whose copies are wrong; all, if it is unknown which are."""
        return tuple(sorted(rank for group in self.groups if group != self.right for rank in group))


@named_arguments
class ReplicaCheck(Callback):
    """Finds silent corruption: what must be equal on several processes, and is not.

    ::

        Trainer(strategy="ddp", callbacks=[ReplicaCheck(every_n_steps=500)])

    After every ``every_n_steps`` optimizer steps, each process computes fingerprints of its parameters, its optimizer
    state and its constant buffers, which a single flipped bit changes. Threads compare those of copies through the
    process group's store, without a collective; step counts, learning rates, the state of schedules and samplers, the
    loss scale, and the random state of processes that must draw alike, too. A difference names the tensor, the
    processes that differ and the step, and says whether a majority of the copies could repair it.

    - All processes raise the same error at the same place, at most ten steps after the step that was compared.
    - Every save first compares the present state, as does the end of training: no checkpoint has unseen differences.
    - Compared are copies in hybrid sharding (HSDP), under ``ddp`` and ``NO_SHARD``; the weights that ZeRO 0 to 2
      gather; the optimizer state of ZeRO-0 in fp32; parameters of ignored modules. Shards of which there is one, as
      with plain FSDP and ZeRO-3, have no copy to be compared with: there the rest is checked.
    - One process has nothing to compare without ``recompute``, and logs that once.

    Args:
        every_n_steps: Optimizer steps from one check to the next.
        on_difference: ``"raise"`` ends training with a RuntimeError on every process. ``"warn"`` warns on rank 0 and
            logs ``replica_check/differences``, the number of differences found so far.
        recompute: Whether each process also computes the layers of one micro-batch for each check a second time, right
            after the first and without gradient: a result that differs in a bit is wrong, whatever copies say. It
            costs one more forward for each check. A layer is a module without children that has parameters or is
            torch's own, or ``nn.MultiheadAttention``; what a forward computes between layers, and backwards, are
            computed once. Layers that are compiled, that change their input, or whose results differ in the first
            micro-batch of a fit (kernels that add in any order) are left out. It works on one process, too.

    Raises:
        ValueError: If an argument is out of its range; when training starts, if the strategy is not known.
        RuntimeError: On every process, if copies differ; or if a process does not send its digests within the process
            group's timeout.
    """

    def __init__(
        self, every_n_steps: int = 500, on_difference: Literal["raise", "warn"] = "raise", recompute: bool = False
    ) -> None:
        check_count("every_n_steps", every_n_steps)
        if on_difference not in ("raise", "warn"):
            raise ValueError(f"on_difference must be 'raise' or 'warn', got {on_difference!r}.")
        if not isinstance(recompute, bool):
            raise ValueError(f"recompute must be a bool, got {recompute!r}.")
        self.every_n_steps, self.on_difference, self.recompute = every_n_steps, on_difference, recompute
        self.num_differences = 0
        """The number of differences that all checks of this fit have found."""
        self.differences: list[Difference] = []
        """Those of the last check."""
        self._patches = Patches("callbacks")
        self._comparer: _Comparer | None = None
        self._error: RuntimeError | None = None
        self._last_step = self._checked_step = -1
        self._equal_step: int | None = None
        self._due_step: int | None = None
        self._buffers: dict[str, tuple[Tensor, int]] = {}
        self._second: SecondComputation | None = None
        self._computed_step: int | None = None
        """The step of the last micro-batch that was computed twice."""
        self._miscomputed: list[str] = []
        """The layers of this rank that no check has reported yet."""

    # ------------------------------------------------------------------ the run
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_trainer(trainer)
        if stage == "fit":
            _check_strategy(trainer.strategy)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach()
        self.num_differences, self.differences = 0, []
        self._error, self._equal_step, self._buffers = None, None, {}
        self._last_step, self._checked_step = trainer.global_step, -1
        self._second, self._computed_step = SecondComputation() if self.recompute else None, None
        self._miscomputed = []
        if trainer.world_size == 1:
            if self.recompute:
                return
            rank_zero_warn("ReplicaCheck has nothing to compare on one process, and does nothing.")
            return
        number = shared_number("a fit with ReplicaCheck", store_messages())
        self._comparer = _Comparer(StoreMessages(require_group("ReplicaCheck"), f"replica check {number}"))
        save = trainer.strategy.save_checkpoint

        def save_what_is_equal(*args: Any, **kwargs: Any) -> None:
            self._check_now(trainer, pl_module)
            save(*args, **kwargs)

        # Not `on_save_checkpoint`, which the Trainer does not call where it saves weights only.
        self._patches.put(trainer.strategy, "save_checkpoint", save_what_is_equal)
        self._begin_check(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._second is None:
            return
        step = trainer.global_step
        is_due = self._computed_step is None or (step + 1) % self.every_n_steps == 0
        if is_due and step != self._computed_step:
            self._computed_step = step
            self._second.begin(pl_module, trainer.strategy.root_device)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        before, self._last_step = self._last_step, trainer.global_step
        if self._second is not None:
            self._miscomputed += self._second.end()
        if self._comparer is None:
            if self._second is not None:
                self._report([_miscomputed(name, 0) for name in self._miscomputed], [socket.gethostname()])
                self._miscomputed = []
            return
        every, step = self.every_n_steps, self._last_step
        is_due = self._due_step is not None and step >= self._due_step
        if is_due:
            self._take_verdict(self._comparer)
        if step // every != before // every:
            self._begin_check(trainer, pl_module)
        if self.on_difference == "warn" and (is_due or self.num_differences):
            number = float(self.num_differences)
            pl_module.log("replica_check/differences", number, on_step=True, on_epoch=False, batch_size=1)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check_now(trainer, pl_module)
        self._detach()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._detach(keeps_saves=self._error is not None)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._detach()

    def _detach(self, *, keeps_saves: bool = False) -> None:
        if not keeps_saves:
            self._patches.remove()
        if self._comparer is not None:
            self._comparer.close()
            self._comparer = None
        if self._second is not None:
            self._second.end()
        self._due_step, self._buffers, self._second = None, {}, None

    # ------------------------------------------------------------------ checks
    def _begin_check(self, trainer: Trainer, module: LightningModule) -> None:
        comparer = self._comparer
        if comparer is None:
            return
        if self._due_step is not None:
            self._take_verdict(comparer)
        self._checked_step = trainer.global_step
        with library_code():  # hooks of a subclass are a user's, to whom shards look like whole tensors
            snapshot = _snapshot(trainer, module, self._buffers)
        snapshot.miscomputed, self._miscomputed = self._miscomputed, []
        comparer.begin(snapshot)
        self._due_step = self._checked_step + min(self.every_n_steps, _MOST_STEPS_LATER)

    def _check_now(self, trainer: Trainer, module: LightningModule) -> None:
        """Compare the present state and wait for the verdict; every rank calls it."""
        if self._error is not None:
            raise self._error
        if self._comparer is None:
            return
        self._begin_check(trainer, module)
        self._take_verdict(self._comparer)

    def _take_verdict(self, comparer: _Comparer) -> None:
        self._due_step = None
        found, hosts = comparer.verdict()
        if not found:
            self._equal_step = self._checked_step
        self._report(found, hosts)

    def _report(self, found: list[Difference], hosts: Sequence[str]) -> None:
        self.differences = found
        if not found:
            return
        self.num_differences += len(found)
        step = self._last_step if self._comparer is None else self._checked_step
        text = _describe(found, hosts, step, self._equal_step)
        if self.on_difference == "warn":
            rank_zero_warn(text)
            return
        self._error = RuntimeError(text)
        raise self._error


def _check_strategy(strategy: Any) -> None:
    if not is_known_strategy(strategy):
        raise ValueError(
            f"ReplicaCheck does not know which copies {type(strategy).__name__} keeps equal. Use AccelFSDPStrategy, "
            "AccelDeepSpeedStrategy, 'ddp' or a single device."
        )


def _describe(found: Sequence[Difference], hosts: Sequence[str], step: int, equal_step: int | None) -> str:
    lines = []
    twice = [one for one in found if one.right == ()]
    if twice:
        lines.append(f"ReplicaCheck: before step {step} a second computation of {len(twice)} layers had other results.")
        lines += [f"  {one.name} on process {one.wrong[0]} on {hosts[one.wrong[0]]}" for one in twice[:_MOST_LISTED]]
    found = [one for one in found if one.right != ()]
    if found:
        lines.append(f"ReplicaCheck: after step {step} not all copies are equal of {len(found)} values that must be.")
    for one in found[:_MOST_LISTED]:
        values = [f" ({value})" for value in one.values] or [""] * len(one.groups)
        groups = [f"{name_processes(group)}{value}" for group, value in zip(one.groups, values, strict=True)]
        lines.append(f"  {one.name}: {' against '.join(groups)}")
    if len(found) > _MOST_LISTED:
        lines.append(f"  and {len(found) - _MOST_LISTED} more")
    wrong = sorted({rank for one in found if one.right is not None for rank in one.wrong})
    if wrong:
        places = ", ".join(f"process {rank} on {hosts[rank]}" for rank in wrong)
        lines.append(f"Wrong values are on {places}, and the copies of the others could repair them.")
    if any(one.right is None for one in found):
        lines.append("Without a majority it is unknown which copies are right, and none can repair the others.")
    known = f"one of step {equal_step} or before" if equal_step is not None else "an earlier one"
    lines.append(
        f"Resume from a checkpoint: {known} has equal copies. If it happens again on the same host, its memory or "
        "device is at fault, and the run should leave it out; elsewhere look for code that changes a value on some "
        "processes only."
    )
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------
# The thread of one rank: sends digests, and on rank 0 compares them.


class _ClosedError(Exception):
    """Ends a wait for messages that nobody needs any more."""


_Summary: TypeAlias = tuple[dict[Ranks, str], dict[str, tuple[Any, Any]], list[str]]
"""A digest for each set of ranks; of each buffer its fingerprint, and the one of the last check if it must be equal;
layers with another result of a second computation."""
_Verdict: TypeAlias = tuple[list[Difference], list[str]]


class _Comparer:
    """Compares snapshots, one after the other, while the ranks train.

    Args:
        messages: Of this fit; no other thread uses them.
    """

    def __init__(self, messages: StoreMessages) -> None:
        self._messages = messages
        self._snapshots: queue.SimpleQueue[_Snapshot | None] = queue.SimpleQueue()
        self._verdicts: queue.SimpleQueue[_Verdict | Exception] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._before: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, name="accelight-replica-check", daemon=True)
        self._thread.start()

    def begin(self, snapshot: _Snapshot) -> None:
        """Begin to compare a snapshot with those of the other ranks."""
        self._snapshots.put(snapshot)

    def verdict(self) -> _Verdict:
        """Return the differences, the same on all ranks, and the ranks' hosts; waits until they are known.

        Raises:
            RuntimeError: If a rank did not send its digests in time, or the store is gone.
        """
        verdict = self._verdicts.get()  # the thread's waits are bounded by the group's timeout
        if isinstance(verdict, Exception):
            raise RuntimeError(f"{_WHAT} could not end: {verdict}") from verdict
        return verdict

    def close(self) -> None:
        """End the thread, also while it waits for others."""
        self._is_closed.set()
        self._snapshots.put(None)
        self._thread.join(_JOINS_WITHIN_S)

    def is_broken(self) -> bool:
        """End waits for messages once this is closed: see `Watch`."""
        if self._is_closed.is_set():
            raise _ClosedError("training has ended on this process.")
        return False

    def _run(self) -> None:
        while (snapshot := self._snapshots.get()) is not None:
            try:
                self._verdicts.put(self._compare(snapshot))
            except Exception as error:  # noqa: BLE001 (raised by `verdict`)
                self._verdicts.put(error)

    def _compare(self, snapshot: _Snapshot) -> _Verdict:
        snapshot.finish()
        values = snapshot.values
        before, self._before = self._before, {name: value for name, (value, _) in snapshot.buffers.items()}
        buffers = {
            name: (value, before.get(name) if is_constant else None)
            for name, (value, is_constant) in snapshot.buffers.items()
        }
        summary: _Summary = {ranks: _digest(each) for ranks, each in values.items()}, buffers, snapshot.miscomputed
        differing, found = self._gather(summary, _differing)
        for one in found:  # the value that it must have
            if one.name in before:
                self._before[one.name] = before[one.name]
        if not differing and not found:
            return [], []
        own = {ranks: values[ranks] for ranks in differing if ranks in values}, socket.gethostname()

        def details(everyone: list[tuple[dict[Ranks, dict[str, Any]], str]]) -> _Verdict:
            of_all = [each for each, _ in everyone]
            more = [one for ranks in differing for one in _differences(of_all, ranks)]
            return [*found, *more], [host for _, host in everyone]

        return self._gather(own, details)

    def _gather(self, content: Any, action: Callable[[list[Any]], Any]) -> Any:
        return self._messages.gather_then_broadcast(content, action, _WHAT, watch=self)


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.blake2b(repr(sorted(values.items())).encode(), digest_size=16).hexdigest()


def _differing(everyone: list[_Summary]) -> tuple[list[Ranks], list[Difference]]:
    """Return the sets of ranks whose digests differ, and the layers and buffers that do; given each rank's summary."""
    digests = [each for each, _, _ in everyone]
    known = dict.fromkeys(ranks for each in digests for ranks in each)
    differing = [ranks for ranks in known if len({digests[one].get(ranks) for one in _all(ranks, digests)}) > 1]
    found = [_miscomputed(name, rank) for rank, (_, _, layers) in enumerate(everyone) for name in layers]
    for name in everyone[0][1]:
        pairs = [buffers.get(name, (0, None)) for _, buffers, _ in everyone]
        if None in {before for _, before in pairs} or len({before for _, before in pairs}) > 1:
            continue  # written since, or each rank's own: see [Note: what must be equal]
        kept = tuple(rank for rank, (now, before) in enumerate(pairs) if now == before)
        changed = tuple(rank for rank in range(len(pairs)) if rank not in kept)
        if kept and changed:  # a write that leaves no trace (``buffer.data``) changes all
            found.append(Difference(name, (kept, changed), right=kept))
    return differing, found


def _miscomputed(layer: str, rank: int) -> Difference:
    return Difference(f"layer {layer}", ((rank,),), right=())


def _all(ranks: Ranks, everyone: Sequence[Any]) -> Sequence[int]:
    return range(len(everyone)) if ranks is None else ranks


def _differences(everyone: Sequence[Mapping[Ranks, Mapping[str, Any]]], ranks: Ranks) -> Iterator[Difference]:
    """Yield the values that differ among some ranks, given those of all."""
    held = {rank: everyone[rank].get(ranks, {}) for rank in _all(ranks, everyone)}
    for name in dict.fromkeys(name for each in held.values() for name in each):
        groups: dict[Any, list[int]] = {}
        for rank, each in held.items():
            groups.setdefault(each.get(name, "missing"), []).append(rank)
        if len(groups) == 1:
            continue
        in_order = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1]))
        largest = tuple(in_order[0][1])
        are_texts = all(isinstance(value, str) for value in groups)
        yield Difference(
            name,
            tuple(tuple(group) for _, group in in_order),
            right=largest if 2 * len(largest) > len(held) else None,
            values=tuple(value for value, _ in in_order) if are_texts else (),
        )


# ------------------------------------------------------------------------------------------------
# Fingerprints: sums of 64-bit words, row by row, each row times an odd number of its own. A bit that flips changes the
# sum of its row by a power of two, and the fingerprint by an odd multiple of that: modulo 2**64 never by zero.

_NUM_ROWS = 64
_PIECE_BYTES = 2**26
"""A piece whose bytes are no whole words, or do not begin at one, is copied; tensors are cut the same on all ranks."""
_Fingerprint: TypeAlias = list[int]
"""A number for each piece of a tensor."""


def _row_sums(tensor: Tensor) -> Iterator[Tensor]:
    flat, size = tensor.reshape(-1), tensor.element_size()
    for piece in torch.split(flat, _PIECE_BYTES // size) if flat.numel() * size > _PIECE_BYTES else (flat,):
        if piece.numel() * size % 8 or piece.storage_offset() * size % 8:
            padded = torch.zeros(-(-piece.numel() * size // 8), dtype=torch.int64, device=piece.device)
            padded.view(torch.uint8)[: piece.numel() * size] = piece.view(torch.uint8)
            words = padded
        else:
            words = piece.view(torch.int64)
        yield words.view(math.gcd(words.numel(), _NUM_ROWS), -1).sum(1)


@functools.cache
def _weights(device: torch.device) -> Tensor:
    drawn = torch.randint(-(2**62), 2**62, (_NUM_ROWS,), generator=torch.Generator().manual_seed(0))
    return (drawn * 2 + 1).to(device)


class _Snapshot:
    """A rank's tensors after one step. Fingerprints stay on their devices until `finish` waits for them."""

    def __init__(self) -> None:
        self.values: dict[Ranks, dict[str, Any]] = {}
        """By the ranks that hold copies."""
        self.miscomputed: list[str] = []
        """The layers whose second computation had another result."""
        self.buffers: dict[str, tuple[Any, bool]] = {}
        """Of each the fingerprint, and whether it is the same object, with the same version, as at the last check."""
        self._sums: dict[tuple[torch.device, int], list[Tensor]] = {}
        """By device and number of rows: those of pieces."""
        self._owners: dict[tuple[torch.device, int], list[tuple[_Fingerprint, int]]] = {}
        self._numbers: dict[tuple[torch.device, int], Tensor] = {}
        self._events: list[torch.Event] = []

    def add(self, name: str, value: Any, ranks: Ranks) -> None:
        """Take a value that must be equal on ``ranks``: a tensor by its fingerprint, anything else by its text."""
        value = self._fingerprint(value) if isinstance(value, Tensor) else repr(value)
        self.values.setdefault(ranks, {})[name] = value

    def add_buffer(self, name: str, buffer: Tensor, *, is_constant: bool) -> None:
        """Take a buffer."""
        self.buffers[name] = self._fingerprint(buffer), is_constant

    def _fingerprint(self, tensor: Tensor) -> _Fingerprint:
        found: _Fingerprint = []  # filled in `finish`
        for part in plain_parts(local_part(tensor)):
            for rows in _row_sums(part):
                key = rows.device, rows.numel()
                self._sums.setdefault(key, []).append(rows)
                self._owners.setdefault(key, []).append((found, len(found)))
                found.append(0)
        return found

    def launch(self) -> None:
        """Compute one number for each piece, on its device."""
        for (device, num_rows), sums in self._sums.items():
            self._numbers[device, num_rows] = (torch.stack(sums) * _weights(device)[:num_rows]).sum(1)
        self._sums.clear()
        for device in {device for device, _ in self._numbers if device.type != "cpu"}:
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
            self._events.append(event)

    def finish(self) -> None:
        """Wait for the fingerprints; any thread may."""
        for event in self._events:
            event.synchronize()
        for key, numbers in self._numbers.items():
            for (owner, piece), number in zip(self._owners[key], numbers.tolist(), strict=True):
                owner[piece] = number
        for held in self.values.values():  # lists compare, and have no hash
            held.update({name: tuple(value) for name, value in held.items() if isinstance(value, list)})
        self.buffers = {name: (tuple(value), is_constant) for name, (value, is_constant) in self.buffers.items()}


# ------------------------------------------------------------------------------------------------
# A rank's tensors, and the ranks that hold copies of them: see [Note: what must be equal].


class _Holders:
    """Knows which ranks hold copies.

    Args:
        strategy: That trains.
    """

    def __init__(self, strategy: Any) -> None:
        self.own = (int(strategy.global_rank),)
        self._world_size = int(strategy.world_size)
        self._mesh: DeviceMesh | None = getattr(strategy, "device_mesh", None)
        self._known: dict[tuple[DeviceMesh, tuple[int, ...]], Ranks] = {}

    def of(self, tensor: Tensor) -> Ranks:
        """Return the ranks that hold copies of this rank's part."""
        if isinstance(tensor, DTensor):
            mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or ()
            placed = enumerate(tensor.placements)
            return self._over(mesh, tuple(i for i, one in placed if one.is_replicate() and names[i : i + 1] != ("tp",)))
        if isinstance(tensor, FlatShard):
            return self.own if self._mesh is None else self._over(self._mesh, tuple(range(self._mesh.ndim - 1)))
        return None if getattr(tensor, "allreduce", True) else self.own  # DeepSpeed's mark of experts

    def of_counts(self, tensor: Tensor) -> Ranks:
        """Return the ranks that step on a part of a parameter, and count its steps."""
        if not isinstance(tensor, FlatShard):
            return None if isinstance(tensor, DTensor) else self.of(tensor)
        if self._mesh is None or tensor.place.cut is None:
            return self.own
        (begin, share), size = tensor.place.cut, tensor.place.group.size()
        parts = [at for at in range(size) if at * share < begin + tensor.numel() and begin < (at + 1) * share]
        return self.as_ranks(self._mesh.mesh.reshape(-1, size)[:, parts].flatten().tolist())

    def as_ranks(self, ranks: Iterable[int]) -> Ranks:
        """Return ranks in order, or None for all."""
        found = tuple(sorted(ranks))
        return None if len(found) == self._world_size else found

    def _over(self, mesh: DeviceMesh, dims: tuple[int, ...]) -> Ranks:
        if (mesh, dims) not in self._known:
            place = mesh.get_coordinate()
            index = tuple(slice(None) if dim in dims else at for dim, at in enumerate(place or ()))
            held = self.own if place is None else self.as_ranks(mesh.mesh[index].flatten().tolist())
            self._known[mesh, dims] = held
        return self._known[mesh, dims]


@torch.no_grad()
def _snapshot(trainer: Trainer, module: LightningModule, known_buffers: dict[str, tuple[Tensor, int]]) -> _Snapshot:
    """Take what this rank holds.

    Args:
        trainer: That trains.
        module: That it trains.
        known_buffers: Buffers at the last check, and their versions; they are replaced by those of now.
    """
    snapshot, holders = _Snapshot(), _Holders(trainer.strategy)
    ignored: set[str] = set(getattr(trainer.strategy.model, "parameters_to_ignore", ()))  # ddp's
    shards = _shards(trainer, module, ignored)
    parameters = ((f"parameter {name}", shard, holders.of(shard)) for name, shard in shards.items())
    states = _optimizer_states(trainer, module, shards, holders)
    for name, value, ranks in itertools.chain(parameters, states, _progress(trainer, holders)):
        if ranks is None or len(ranks) > 1:
            snapshot.add(name, value, ranks)
    before = dict(known_buffers)
    known_buffers.clear()
    for full_name, buffer in module.named_buffers():
        if (name := clean_name(full_name)) not in ignored:
            version = version_of(buffer)
            is_known = name in before and before[name][0] is buffer and before[name][1] == version
            known_buffers[name] = buffer, version
            snapshot.add_buffer(f"buffer {name}", buffer, is_constant=is_known)
    snapshot.launch()
    return snapshot


def _shards(trainer: Trainer, module: LightningModule, ignored: set[str]) -> Mapping[str, Tensor]:
    """Return this rank's part of each parameter; of ZeRO those that every rank has."""
    strategy: Any = trainer.strategy
    if hasattr(strategy, "parameter_shards") and not isinstance(strategy, DeepSpeedStrategy):
        return {name: shard for name, (shard, _) in strategy.parameter_shards().items()}
    named = {clean_name(name): each for name, each in module.named_parameters()}
    return {name: each for name, each in named.items() if name not in ignored and not hasattr(each, "ds_tensor")}


def _optimizer_states(
    trainer: Trainer, module: LightningModule, shards: Mapping[str, Tensor], holders: _Holders
) -> Iterator[tuple[str, Any, Ranks]]:
    """Yield options of groups, and states of parameters; not of ZeRO's partitions, of which there is one each."""
    names = {id(each): clean_name(name) for name, each in module.named_parameters()}
    of_flat = next((holders.of(one) for one in shards.values() if isinstance(one, FlatShard)), None)
    for number, optimizer in enumerate(trainer.optimizers):
        of_it = f" of optimizer {number}" if len(trainer.optimizers) > 1 else ""
        for index, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for path, value in _leaves(options):
                yield f"{path} of parameter group {index}{of_it}", value, None
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            continue  # each rank has the state of some parameters
        for parameter, state in optimizer.state.items():
            name = names.get(id(parameter), "")
            if name in shards:
                held_by, counted_by = holders.of(shards[name]), holders.of_counts(shards[name])
            elif isinstance(parameter, FlatParameter):
                held_by, counted_by = of_flat, None
            else:
                continue
            for path, value in _leaves(state):
                is_count = not isinstance(value, Tensor) or (value.dim() == 0 and not isinstance(value, DTensor))
                ranks = counted_by if is_count else holders.of(value) if isinstance(value, DTensor) else held_by
                yield f"{path} of {name}{of_it}", value, ranks


def _progress(trainer: Trainer, holders: _Holders) -> Iterator[tuple[str, Any, Ranks]]:
    """Yield counters and the like, which are no tensors."""
    strategy: Any = trainer.strategy
    yield "trainer.global_step", trainer.global_step, None
    yield "trainer.current_epoch", trainer.current_epoch, None
    for number, config in enumerate(trainer.lr_scheduler_configs):
        state = config.scheduler.state_dict()
        if config.reduce_on_plateau:  # it follows a metric, of which each rank may have its own
            state = {key: value for key, value in state.items() if key in ("last_epoch", "_last_lr")}
        for path, value in _leaves(state):
            yield f"{path} of scheduler {number}", value, None
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    for path, value in _leaves({} if scaler is None else scaler.state_dict()):
        yield f"{path} of the gradient scaler", value, None
    if isinstance(strategy, DeepSpeedStrategy):
        engine: Any = trainer.model
        yield "DeepSpeed's global_steps", engine.global_steps, None
        yield "DeepSpeed's skipped_steps", engine.skipped_steps, None
        if engine.fp16_enabled():
            yield "DeepSpeed's loss scale", float(engine.optimizer.loss_scale), None
    for number, loader in enumerate(tree_leaves(trainer.train_dataloader)):
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            for key in ("epoch", "seed", "num_replicas", "shuffle"):
                yield f"{key} of the sampler of loader {number}", getattr(sampler, key), None
    if (size := int(getattr(strategy, "non_data_parallel_size", 1))) > 1:  # consecutive ranks, which draw alike
        device, first = strategy.root_device, holders.own[0] // size * size
        is_cpu = device.type == "cpu"
        drawn = torch.get_rng_state() if is_cpu else torch.get_device_module(device).get_rng_state(device)
        text = hashlib.blake2b(drawn.numpy().tobytes(), digest_size=8).hexdigest()  # of numbers that count each other
        yield f"random state of {device.type}", text, holders.as_ranks(range(first, first + size))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield numbers, texts and tensors in nested dictionaries and lists, with their paths."""
    if isinstance(value, Tensor | bool | int | float | str) or value is None:
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(one, f"{path}.{key}" if path else f"{key}")
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _leaves(one, f"{path}[{index}]")
