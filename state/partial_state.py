"""`PartialState`: the place of this process among the others, and control over which process runs what when."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, ParamSpec, TypeVar, overload

import torch

from . import triggers
from .process_group import default_accelerator, live_group, require_group
from .process_record import DistributedType, ProcessFacts, set_device, shared
from .rendezvous import one_first, refuse_while_waited_for
from .utils import like_mapping

P = ParamSpec("P")
R = TypeVar("R")


class ReadOnlyState:
    """Base of the states: instances hold nothing of their own, and no attribute can be assigned."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        member = getattr(type(self), name, None)
        if isinstance(member, property) and member.fset is not None:
            member.fset(self, value)
            return
        raise AttributeError(f"{type(self).__name__}.{name} is read-only: the state reports how the processes run.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} is read-only: the state reports how the processes run.")


class PartialState(ReadOnlyState):
    """Facts about this process and its peers, and process control. All instances share one state.

    The first instance makes the state: from a live process group if there is one, else from what torchrun, MPI or
    SLURM set (then it starts the group: ``cpu:gloo`` plus the device's own backend), else for one process. A group
    that comes alive later, as in Lightning's ``Trainer.fit``, is adopted at the next access. After a group has been
    destroyed the facts stay as last known, and communication raises ``RuntimeError``.

    In a process that Lightning's own launcher started (``LOCAL_RANK`` and ``WORLD_SIZE`` set, ``RANK`` not) the group
    begins in ``Trainer.fit``. Until then the state knows its place, but cannot communicate: the first process is past
    this line already. ``wait_for_everyone`` and ``main_process_first`` do nothing there, gathering and triggers raise.

    Args:
        cpu: Use the CPU even where there is an accelerator. ``ACCELERATE_USE_CPU=1`` does the same.
        **kwargs: For ``torch.distributed.init_process_group``; :class:`InitProcessGroupKwargs` makes them. A plain
            ``backend`` is for the device; an accelerator's group carries CPU tensors too.

    Raises:
        ValueError: If the state exists and an argument contradicts it.
        TypeError: If ``init_process_group`` does not know an argument.
        RuntimeError: If the environment is set halfway.

    Source: accelerate 1.15 ``state.py`` (``PartialState``).
    """

    __slots__ = ()

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        shared.start(cpu, kwargs)

    @property
    def _facts(self) -> ProcessFacts:
        return shared.current()

    @property
    def initialized(self) -> bool:
        """Whether the state exists."""
        return shared.initialized

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self._facts.device

    @property
    def default_device(self) -> torch.device:
        """Device type that torch prefers on this machine, without an index."""
        return default_accelerator()

    @property
    def distributed_type(self) -> DistributedType:
        """Kind of distributed environment; ``NO`` without a process group."""
        return shared.distributed_type

    @property
    def backend(self) -> str | None:
        """Backend of the group for this state's device (of ``cpu:gloo,cuda:nccl``, ``nccl``); None without a group."""
        return self._facts.backend

    @property
    def num_processes(self) -> int:
        """Number of processes on all nodes."""
        return self._facts.num_processes

    @property
    def process_index(self) -> int:
        """Index of this process among all."""
        return self._facts.process_index

    @property
    def num_local_processes(self) -> int:
        """Number of processes on this node."""
        return self._facts.num_local_processes

    @property
    def local_process_index(self) -> int:
        """Index of this process on its node."""
        return self._facts.local_process_index

    @property
    def mixed_precision(self) -> str:
        """``no``, ``fp16``, ``bf16`` or ``fp8``: :class:`AcceleratorState`'s, else ``ACCELERATE_MIXED_PRECISION``."""
        return shared.read_mixed_precision()

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0."""
        return self._facts.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is process 0 of its node."""
        return self._facts.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process with the highest index."""
        facts = self._facts
        return facts.process_index == facts.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.distributed_type != DistributedType.NO and self.num_processes > 1

    @property
    def debug(self) -> bool:
        """Whether ``ACCELERATE_DEBUG_MODE`` was set."""
        return shared.debug

    @property
    def fork_launched(self) -> bool:
        """Whether ``FORK_LAUNCHED`` was set (a notebook launcher forked this process and owns its group)."""
        return shared.fork_launched

    def __repr__(self) -> str:
        facts = self._facts
        backend = f"  Backend: {facts.backend}" if facts.backend else ""
        return (
            f"Distributed environment: {self.distributed_type!s}{backend}\n"
            f"Num processes: {facts.num_processes}\n"
            f"Process index: {facts.process_index}\n"
            f"Local process index: {facts.local_process_index}\n"
            f"Device: {facts.device}\n"
        )

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per node: on its first process."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    def set_device(self) -> None:
        """Make :attr:`device` torch's current device. The state does so itself when it starts the group."""
        set_device(self.device)

    def wait_for_everyone(self) -> None:
        """Return when every process has come here. Does nothing on one process, nor before ``Trainer.fit`` (see class).

        Raises:
            RuntimeError: If the group has been destroyed, or inside a `main_process_first` block that the others wait
                for.
        """
        facts = self._facts
        if facts.deferred or facts.num_processes == 1:
            return
        import torch.distributed as dist

        group = require_group("wait_for_everyone")
        refuse_while_waited_for("wait_for_everyone", group)
        on_accelerator = facts.device.type != "cpu" and facts.device.index is not None
        dist.barrier(group, device_ids=[facts.device.index] if on_accelerator and facts.backend != "gloo" else None)

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy ``group``, or the default group; where a notebook launcher owns the default group, nothing."""
        if self.fork_launched and group is None:
            return
        if live_group() is None:
            return
        import torch.distributed as dist

        dist.destroy_process_group(group)

    @contextmanager
    def main_process_first(self, timeout: timedelta | float | None = None) -> Iterator[None]:
        """Run the block on the main process first, then on all others at once.

        The others wait on the group's store, not in a collective: a block of an hour trips no backend's timeout. An
        exception in the main process's block is raised there, and reaches the others at once as an error naming it.
        Blocks nest. Before ``Trainer.fit`` in a process that Lightning's launcher started, nobody waits: the main
        process has left the block before it started this one.

        It may be the last thing in a script: where the main process holds the group's store, its end, or destroying the
        group, waits for the others to leave their blocks (or their programs), at most as long as the group's timeout.

        Args:
            timeout: How long the others wait, as ``timedelta`` or seconds; None waits as long as it takes.

        Raises:
            RuntimeError: On the others, if the block failed on the main process, or that process is gone.
            TimeoutError: On the others, after ``timeout``.
        """
        facts = self._facts
        with self._first(facts, facts.process_index == 0, "all", facts.num_processes, timeout):
            yield

    @contextmanager
    def local_main_process_first(self, timeout: timedelta | float | None = None) -> Iterator[None]:
        """Run the block on the first process of each node, then on the others of that node.

        As :meth:`main_process_first` in everything else.
        """
        facts = self._facts
        scope = f"node {facts.node}"
        with self._first(facts, facts.local_process_index == 0, scope, facts.num_local_processes, timeout):
            yield

    @staticmethod
    def _first(
        facts: ProcessFacts, first: bool, scope: str, count: int, timeout: timedelta | float | None
    ) -> AbstractContextManager[object]:
        if facts.deferred or facts.num_processes == 1:
            return nullcontext()
        return one_first(
            require_group("main_process_first"),
            first=first,
            scope=scope,
            num_waiting=count - 1,
            process_index=facts.process_index,
            timeout=timeout,
        )

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the main process only; elsewhere it returns None."""
        return run_where(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the first process of each node only; elsewhere it returns None."""
        return run_where(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the last process only; elsewhere it returns None."""
        return run_where(lambda: self.is_last_process, function)

    @overload
    def on_process(self, function: Callable[P, R], process_index: int | None = None) -> Callable[P, R | None]: ...
    @overload
    def on_process(
        self, function: None = None, process_index: int | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorate a function to run on one process only: ``@state.on_process(process_index=2)``.

        A process that is alone runs it, whatever the index. More may come later: Lightning's launcher starts them in
        ``Trainer.fit``, and each call is decided by the processes there are then.

        Raises:
            ValueError: If there are several processes and none with that index: at decoration, or at the first call
                after they have come.
        """
        name, index = "process_index", check_index("process_index", process_index)

        def chosen() -> bool:
            facts = self._facts
            count = facts.num_processes
            return is_chosen(name, index, facts.process_index, count, alone=count == 1)

        return self._decorate(chosen, function)

    @overload
    def on_local_process(
        self, function: Callable[P, R], local_process_index: int | None = None
    ) -> Callable[P, R | None]: ...
    @overload
    def on_local_process(
        self, function: None = None, local_process_index: int | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorate a function to run on one process of each node only; else as :meth:`on_process`.

        Raises:
            ValueError: If there are several processes and none with that index on this node.
        """
        name, index = "local_process_index", check_index("local_process_index", local_process_index)

        def chosen() -> bool:
            facts = self._facts
            count, alone = facts.num_local_processes, facts.num_processes == 1
            return is_chosen(name, index, facts.local_process_index, count, alone=alone)

        return self._decorate(chosen, function)

    @staticmethod
    def _decorate(chosen: Callable[[], bool], function: Any) -> Any:
        chosen()  # raises here where the index is wrong already
        return partial(run_where, chosen) if function is None else run_where(chosen, function)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give each process its share of ``inputs``; the first ``len(inputs) % num_processes`` get one more.

        Kinds stay: tuples are tuples, tensors keep device and dtype. The inputs themselves are never changed; on one
        process they are handed through. Processes that share one copy of the model (tensor or sequence parallelism)
        count as one process, and get the same share, from the start of the Trainer on that divides the model so.

        Args:
            inputs: List, tuple, tensor, ``datasets.Dataset``, map-style dataset (a ``Subset`` is returned), other
                sequence, or a (nested) dict of equally long ones.
            apply_padding: Repeat the last element so that all processes get equally many.

        Raises:
            ValueError: If a dict's values have different lengths.
        """
        facts = self._facts
        yield split(inputs, facts.data_parallel_rank, facts.data_parallel_size, apply_padding=apply_padding)

    def set_trigger(self, name: str = triggers.DEFAULT) -> None:
        """Set a trigger; see :func:`accelight.state.set_trigger`."""
        triggers.set_trigger(name)

    def check_trigger(self, name: str = triggers.DEFAULT, blocking: bool = True) -> bool:
        """Check a trigger on all processes; see :func:`accelight.state.check_trigger`."""
        return triggers.check_trigger(name, blocking)

    def check_triggers(self, blocking: bool = True, names: Iterable[str] | None = None) -> dict[str, bool]:
        """Check several triggers, or all, on all processes; see :func:`accelight.state.check_triggers`."""
        return triggers.check_triggers(blocking, names)

    @classmethod
    def _refresh(
        cls,
        *,
        device: torch.device | None = None,
        local_process_index: int | None = None,
        num_local_processes: int | None = None,
    ) -> None:
        """Read the live group again, and take what the strategy knows from its cluster environment."""
        shared.refresh(device, local_process_index, num_local_processes)

    @staticmethod
    def _reset_state() -> None:
        """Forget the shared state, for tests."""
        shared.reset()


# ------------------------------------------------------------------------------------------------
# Decorators that run a function on some processes only, decided at each call.


def run_where(condition: Callable[[], bool], function: Callable[P, R]) -> Callable[P, R | None]:
    """Return ``function`` that runs where ``condition()`` holds at the call, and returns None elsewhere.

    At the call and not at decoration: a function is often decorated before the process group exists.
    """
    if not callable(function):
        raise TypeError(f"This decorator expects a function, got {function!r}.")

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if condition() else None

    return run


def check_index(name: str, index: int | None) -> int:
    """Return ``index``, or raise if no process can have it.

    Raises:
        ValueError: If it is missing or negative.
        TypeError: If it is no whole number.
    """
    if index is None:
        raise ValueError(f"{name} is missing. Write @state.on_{name.removesuffix('_index')}({name}=0).")
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"{name} must be an int, got {index!r}.")
    if index < 0:
        raise ValueError(f"{name}={index} is out of range: the first process is 0.")
    return index


def is_chosen(name: str, index: int, own_index: int, count: int, *, alone: bool) -> bool:
    """Return whether this process is the one with ``index``; one that is alone is every one, as in Accelerate.

    Args:
        name: What errors call the index.
        index: The chosen one.
        own_index: This process's.
        count: Processes among which it is chosen.
        alone: Whether there is no other process at all, as far as is known now.

    Raises:
        ValueError: If there are several processes, and none with ``index``.
    """
    if alone:
        return True
    if index >= count:
        raise ValueError(f"{name}={index} is out of range: there are {count} process(es), 0 to {count - 1}.")
    return own_index == index


# ------------------------------------------------------------------------------------------------
# A share of some inputs for each process.


def split(inputs: Any, process_index: int, num_processes: int, *, apply_padding: bool) -> Any:
    """Return this process's share of ``inputs``: the first ``len % num_processes`` processes get one more.

    Raises:
        ValueError: If the values of a dict have different lengths.
        TypeError: If ``inputs`` has no length or cannot be sliced.
    """
    length = _common_length(inputs)
    if num_processes == 1:
        return inputs
    share, extra = divmod(length, num_processes)
    start = process_index * share + min(process_index, extra)
    stop = start + share + (process_index < extra)
    num_pad = share + (extra > 0) - (stop - start) if apply_padding and length else 0
    return _take(inputs, start, stop, num_pad)


def _common_length(inputs: Any) -> int:
    lengths = _lengths(inputs, "")
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name or 'inputs'}: {length}" for name, length in lengths.items())
        raise ValueError(f"All values of the dict must have the same length to be split together. Found {found}.")
    return next(iter(lengths.values()), 0)


def _lengths(inputs: Any, path: str) -> dict[str, int]:
    if isinstance(inputs, Mapping):
        found: dict[str, int] = {}
        for key, value in inputs.items():
            found.update(_lengths(value, f"{path}[{key!r}]"))
        return found
    if isinstance(inputs, torch.Tensor) and inputs.ndim == 0:
        raise TypeError(f"Cannot split a tensor of no dimensions{f' at {path}' if path else ''}. Add one: t[None].")
    if isinstance(inputs, (str, bytes)) or not isinstance(inputs, Sized) or not hasattr(inputs, "__getitem__"):
        raise TypeError(
            f"Cannot split {type(inputs).__name__}{f' at {path}' if path else ''} between processes: expected a "
            "list, tuple, tensor, datasets.Dataset, other sequence, or a dict of them."
        )
    return {path: len(inputs)}


def _take(inputs: Any, start: int, stop: int, num_pad: int) -> Any:
    """Return ``inputs[start:stop]`` with its last element repeated ``num_pad`` times, in the kind that it has."""
    if isinstance(inputs, Mapping):
        taken = {key: _take(value, start, stop, num_pad) for key, value in inputs.items()}
        return like_mapping(inputs, taken)
    indices = [*range(start, stop), *[len(inputs) - 1] * num_pad]
    if isinstance(inputs, torch.Tensor):
        share = inputs[start:stop]
        return torch.cat([share, inputs[-1:].expand(num_pad, *inputs.shape[1:])]) if num_pad else share
    if hasattr(inputs, "select") and hasattr(inputs, "column_names"):  # datasets.Dataset: a slice would be a dict
        return inputs.select(indices)
    if isinstance(inputs, torch.utils.data.Dataset):  # which may take a slice for an index of its own
        return torch.utils.data.Subset(inputs, indices)
    if isinstance(inputs, tuple):  # a share of a named tuple has another number of fields: a plain one
        return tuple(inputs[index] for index in indices)
    if isinstance(inputs, Sequence):
        return _take_from_sequence(inputs, start, stop, indices)
    # NumPy arrays and data frames: `+` would add numbers, so the rows are named instead.
    return getattr(inputs, "iloc", inputs)[indices] if num_pad else inputs[start:stop]


def _take_from_sequence(inputs: Sequence[Any], start: int, stop: int, indices: list[int]) -> Any:
    """Return a slice of the same kind where that needs no padding and is supported, else a list."""
    if len(indices) == stop - start:
        try:
            return inputs[start:stop]
        except TypeError:  # a deque has no slices
            pass
    return [inputs[index] for index in indices]
