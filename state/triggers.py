"""Triggers: any process sets one, all learn of it in the same check.

[Note: slots] All triggers travel in one reduction (MAX) of one small tensor that is kept: one element a name. Which
element is whose is settled through the group's store, when a process first uses a name: whoever claims the name first
takes the next slot and writes it down. So processes may use names in any order, and even a name that others have never
heard of. Element 0 carries how many slots are taken, from which everybody learns the names.

[Note: nonblocking] A non-blocking check starts its reduction and answers from the one that the check before started,
which the others have had a whole step to join. What a check answers depends only on what was set before the previous
check, never on who came when, so all processes agree. A key in the store would be cheaper still to look for, but says
nothing about those who have looked already: without a collective between two checks, processes would disagree.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .facts import communication_group
from .process_group import backends_by_device, group_store

if TYPE_CHECKING:
    import torch.distributed as dist

DEFAULT = "default"
MAX_TRIGGERS = 64


@dataclass
class _Flags:
    """What this process knows of triggers, whatever group it is in."""

    pending: set[str] = field(default_factory=set)
    """Set here, told to nobody yet."""
    agreed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Known to all and not asked for yet: name to the processes that set it."""
    last_setters: dict[str, tuple[int, ...]] = field(default_factory=dict)


class _Alone:
    """Agreement with oneself: the same answers at the same checks as with others."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sent: set[str] | None = None

    @property
    def names(self) -> list[str]:
        """Names that all processes know."""
        return self._names

    def register(self, name: str) -> None:
        """Learn a name."""
        if name not in self._names:
            self._names.append(name)

    def exchange(self, pending: set[str], blocking: bool) -> dict[str, tuple[int, ...]]:
        """Send what is pending; return what has been agreed since the last call."""
        agreed = set(self._sent or ())
        self._sent = None if blocking else set(pending)
        if blocking:
            agreed |= pending
        return dict.fromkeys(agreed, (0,))

    def finish(self) -> None:
        """Nothing is ever under way."""


class _Channel:
    """Agreement with the other processes of one group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        import torch.distributed as dist

        self._default = weakref.ref(group)
        self._num_processes = dist.get_world_size(group)
        self._own_group: dist.ProcessGroup | None = None
        self._slots: dict[str, int] = {}
        self._names: list[str] = []
        self._num_agreed = 0
        self._store = group_store("accelight/triggers")
        self._buffer = torch.zeros(1 + MAX_TRIGGERS, dtype=torch.int32)
        self._sent: list[int] = []
        self._work: dist.Work | None = None
        self._work_group: dist.ProcessGroup | None = None

    @property
    def names(self) -> list[str]:
        """Names that all processes know, as of the last answer: the same everywhere."""
        return self._names[: self._num_agreed]

    def register(self, name: str) -> None:
        """Learn the slot of ``name``, or take the next one: see [Note: slots]."""
        if name in self._slots:
            return
        store = self._store
        if store.add(f"claim/{name}", 1) == 1:
            slot = store.add("num_slots", 1) - 1
            if slot < MAX_TRIGGERS:
                store.set(f"name/{slot}", name)
            store.set(f"slot/{name}", f"{slot}")
        slot = int(store.get(f"slot/{name}"))
        if slot >= MAX_TRIGGERS:
            raise RuntimeError(
                f"Trigger {name!r} is one too many: a job has at most {MAX_TRIGGERS} names. Reuse names."
            )
        self._slots[name] = slot
        self._learn_names(slot + 1)

    def exchange(self, pending: set[str], blocking: bool) -> dict[str, tuple[int, ...]]:
        """Send what is pending; return what has been agreed since the last call."""
        agreed = self._collect()
        self._send(pending, blocking)
        if blocking:
            for name, setters in self._collect().items():
                agreed[name] = tuple(sorted({*agreed.get(name, ()), *setters}))
        return agreed

    def finish(self) -> None:
        """Wait for a reduction under way, before the group goes."""
        if self._work is not None:
            with contextlib.suppress(RuntimeError):  # a peer that is gone: nobody will ask for the answer
                self._work.wait()
            self._work = None

    def _send(self, pending: set[str], blocking: bool) -> None:
        import torch.distributed as dist

        for name in sorted(pending):
            self.register(name)
        self._sent = [1 + self._slots[name] for name in pending]
        self._buffer.zero_()
        self._buffer[0] = len(self._names)
        for position in self._sent:
            self._buffer[position] = 1
        self._work_group = self._group_for(blocking)
        self._work = dist.all_reduce(self._buffer, dist.ReduceOp.MAX, group=self._work_group, async_op=True)

    def _collect(self) -> dict[str, tuple[int, ...]]:
        """Wait for the reduction under way and read it; who set what is asked only where something was set."""
        if self._work is None:
            return {}
        work, self._work = self._work, None
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"The processes could not agree on triggers: one has ended, or has not come to its check. ({error})"
            ) from error
        num_slots, *values = self._buffer.tolist()
        self._learn_names(num_slots)
        self._num_agreed = num_slots
        raised = [slot for slot, value in enumerate(values) if value]
        return self._who(raised) if raised else {}

    def _who(self, raised: list[int]) -> dict[str, tuple[int, ...]]:
        import torch.distributed as dist

        mine = torch.zeros(1 + MAX_TRIGGERS, dtype=torch.int32)
        mine[self._sent] = 1
        everyone = [torch.empty_like(mine) for _ in range(self._num_processes)]
        dist.all_gather(everyone, mine, group=self._work_group)
        return {
            self._names[slot]: tuple(index for index, flags in enumerate(everyone) if flags[1 + slot])
            for slot in raised
        }

    def _learn_names(self, num_slots: int) -> None:
        for slot in range(len(self._names), num_slots):
            self._names.append(self._store.get(f"name/{slot}").decode())
            self._slots[self._names[slot]] = slot

    def _group_for(self, blocking: bool) -> dist.ProcessGroup | None:
        """Return the default group where it takes CPU tensors, else (and for work under way) our own gloo group."""
        import torch.distributed as dist

        default = self._default()
        if blocking and default is not None and "cpu" in backends_by_device(default):
            return default
        if self._own_group is None:  # a collective: all processes are in the same check
            self._own_group = dist.new_group(backend="gloo", group_desc="accelight_triggers")
        return self._own_group


_flags = _Flags()
_alone = _Alone()
_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, _Channel] = weakref.WeakKeyDictionary()


def _channel(what: str) -> _Alone | _Channel:
    group = communication_group(what)
    if group is None:
        return _alone
    if group not in _channels:
        _channels[group] = _Channel(group)
    return _channels[group]


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"A trigger's name must be a non-empty string, got {name!r}.")


def set_trigger(name: str = DEFAULT) -> None:
    """Set a trigger on this process, for the next check on all. Only a new name costs anything, once.

    Raises:
        RuntimeError: Before the process group has started, in a process that Lightning's launcher started; or if the
            job has used too many names.
    """
    _check_name(name)
    _channel("set_trigger").register(name)
    _flags.pending.add(name)


def check_trigger(name: str = DEFAULT, blocking: bool = True) -> bool:
    """Tell whether any process has set the trigger, and reset it. Every process must call it, and gets the same answer.

    Other triggers found set on the way are kept for their own check.

    Args:
        name: The trigger.
        blocking: True answers for all that was set before this check. False answers for what was set before the
            previous check and hardly waits, for use at each step; the loop's last answer needs a blocking one. Check
            several names together with :func:`check_triggers`: each call is a check of its own.

    Source: accelerate 1.15 ``accelerator.py`` (``check_trigger``), which has one unnamed trigger and always blocks.
    """
    _check_name(name)
    channel = _channel("check_trigger")
    channel.register(name)
    _exchange(channel, blocking)
    return _take(name)


def check_triggers(blocking: bool = True) -> dict[str, bool]:
    """Check and reset all triggers in one reduction; see :func:`check_trigger`.

    Returns:
        Every name that any process has set or checked so far, in the same order on all processes.
    """
    channel = _channel("check_triggers")
    for name in sorted(_flags.pending):
        channel.register(name)
    _exchange(channel, blocking)
    return {name: _take(name) for name in channel.names}


def triggered_by(name: str = DEFAULT) -> tuple[int, ...]:
    """Return which processes had set the trigger when a check last found it set; empty before that."""
    return _flags.last_setters.get(name, ())


def finish() -> None:
    """Wait for reductions under way, before the default group is destroyed."""
    for channel in list(_channels.values()):
        channel.finish()


def reset() -> None:
    """Forget all triggers. A reduction under way is left to end by itself, with the tensor it writes to."""
    global _flags, _alone
    _flags = _Flags()
    _alone = _Alone()
    _channels.clear()


def _exchange(channel: _Alone | _Channel, blocking: bool) -> None:
    pending, _flags.pending = _flags.pending, set()
    for name, setters in channel.exchange(pending, blocking).items():
        _flags.agreed[name] = tuple(sorted({*_flags.agreed.get(name, ()), *setters}))


def _take(name: str) -> bool:
    setters = _flags.agreed.pop(name, ())
    if setters:
        _flags.last_setters[name] = setters
    return bool(setters)
