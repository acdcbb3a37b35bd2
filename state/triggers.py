"""Triggers: any process sets one, all learn of it in the same check.

[Note: slots] In a blocking check all triggers travel in one reduction (MAX) of one small tensor that is kept: one
element a name. Which element is whose is settled through the group's store, when a process first uses a name: whoever
claims the name first takes the next slot and writes it down. So processes may use names in any order, and even a name
that others have never heard of. Element 0 carries how many slots are taken, from which everybody learns the names.

[Note: rounds] A non-blocking check is a round in the store: it writes down what was set here, then adds itself to the
round's counter, and answers from the round before, once that one's counter says that all have come: a whole step ago,
so it hardly waits. An answer depends on what was set before the previous check, and never on who came when: all
processes agree. (To look for a key without counting would be cheaper, but a process that has looked already would
never know.) Measured with two and three gloo processes on two cores, a round adds 0.4 and 1.0 ms to a step of 5 and
12 ms; a reduction started at one check and awaited at the next 1.7 and 2.4 ms; a blocking check 1.7 and 3.2 ms (medians
of 9; torch 2.13).
"""

from __future__ import annotations

import json
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .facts import communication_group
from .ordering import poll
from .process_group import backends_by_device, group_store, require_group, timeout_of

if TYPE_CHECKING:
    import torch.distributed as dist

DEFAULT = "default"
MAX_TRIGGERS = 64
_ONE_SETTER = 1 << 40  # a round's counter holds who has come below this bit, and how many of them set something above


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
        self.names: list[str] = []
        self._registered: list[str] = []
        self._sent: set[str] = set()

    def register(self, name: str) -> None:
        """Learn a name."""
        if name not in self._registered:
            self._registered.append(name)

    def exchange(self, pending: set[str], blocking: bool) -> dict[str, tuple[int, ...]]:
        """Send what is pending; return what has been agreed since the last call."""
        agreed, self._sent = self._sent | (pending if blocking else set()), set() if blocking else set(pending)
        _extend(self.names, [*(self._registered if blocking else ()), *sorted(agreed)])
        return dict.fromkeys(agreed, (0,))


class _Channel:
    """Agreement with the other processes of one group. Lives as long as the group: its counters are in the store."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        import torch.distributed as dist

        self.names: list[str] = []
        """Names that all processes know, in the same order everywhere."""
        self._group = weakref.ref(group)
        self._reducing_group: dist.ProcessGroup | None = None
        self._process_index = dist.get_rank(group)
        self._num_processes = dist.get_world_size(group)
        self._store = group_store("accelight/triggers")
        self._buffer = torch.zeros(1 + MAX_TRIGGERS, dtype=torch.int32)
        self._slots: dict[str, int] = {}
        self._slot_names: list[str] = []
        self._round = 0
        self._round_is_open = False

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
            raise RuntimeError(f"Trigger {name!r} is one too many: a job has at most {MAX_TRIGGERS} names. Reuse some.")
        self._learn_slots(slot + 1)

    def exchange(self, pending: set[str], blocking: bool) -> dict[str, tuple[int, ...]]:
        """Send what is pending; return what has been agreed since the last call."""
        for name in sorted(pending):
            self.register(name)
        previous = self._round if self._round_is_open else None
        if not blocking:
            self._open_round(pending)
        self._round_is_open = not blocking
        agreed = self._read_round(previous) if previous is not None else {}
        if blocking:
            _merge(agreed, self._reduce(pending))
        _extend(self.names, sorted(agreed))
        return agreed

    def forget(self) -> None:
        """Drop what an open round will say."""
        self._round_is_open = False

    def _open_round(self, pending: set[str]) -> None:
        """Begin the next round: see [Note: rounds]."""
        self._round += 1
        store, key = self._store, f"round/{self._round}"
        come = 1
        if pending:
            number = store.add(f"{key}/setters", 1)
            store.set(f"{key}/{number}", json.dumps([self._process_index, sorted(pending)]))
            come += _ONE_SETTER
        store.add(key, come)

    def _read_round(self, number: int) -> dict[str, tuple[int, ...]]:
        """Return what was set in a round, once all processes have come to it."""
        store, key = self._store, f"round/{number}"
        timeout_s = timeout_of(self._group()).total_seconds()

        def all_have_come() -> int | None:
            come = store.add(key, 0)
            return come if come % _ONE_SETTER >= self._num_processes else None

        try:
            come = poll(all_have_come, timeout_s)
            if come is None:
                raise TimeoutError(
                    f"{store.add(key, 0) % _ONE_SETTER} of {self._num_processes} processes have come to the previous "
                    f"check_trigger(blocking=False) after {timeout_s:g} s. Every process must check equally often."
                )
            messages = [json.loads(store.get(f"{key}/{n}")) for n in range(1, 1 + come // _ONE_SETTER)]
            if self._process_index == 0 and number > 2:
                store.delete_key(f"round/{number - 2}")  # all have come to `number`, so have read that one
        except RuntimeError as error:  # DistNetworkError: the process that holds the store is gone
            raise RuntimeError(
                f"Lost the process group's store in check_trigger: a process has ended. ({error})"
            ) from error
        agreed: dict[str, tuple[int, ...]] = {}
        for setter, names in messages:
            _merge(agreed, dict.fromkeys(names, (setter,)))
        return agreed

    def _reduce(self, pending: set[str]) -> dict[str, tuple[int, ...]]:
        """Reduce all flags over the processes; who set what is asked only where something was set."""
        import torch.distributed as dist

        buffer = self._buffer.zero_()
        buffer[0] = len(self._slot_names)
        for name in pending:
            buffer[1 + self._slots[name]] = 1
        group = self._group_for_reducing()
        try:
            dist.all_reduce(buffer, dist.ReduceOp.MAX, group=group)
        except RuntimeError as error:
            raise RuntimeError(
                f"The processes could not agree on triggers: one has ended, or has not come to its check. ({error})"
            ) from error
        num_slots, *raised = buffer.tolist()
        self._learn_slots(num_slots)
        _extend(self.names, self._slot_names)
        if not any(raised):
            return {}
        everyone: list[Any] = [None] * self._num_processes
        dist.all_gather_object(everyone, sorted(pending), group)
        agreed: dict[str, tuple[int, ...]] = {}
        for setter, names in enumerate(everyone):
            _merge(agreed, dict.fromkeys(names, (setter,)))
        return agreed

    def _learn_slots(self, num_slots: int) -> None:
        for slot in range(len(self._slot_names), num_slots):
            self._slot_names.append(self._store.get(f"name/{slot}").decode())
            self._slots[self._slot_names[slot]] = slot

    def _group_for_reducing(self) -> dist.ProcessGroup:
        """Return the default group where it takes CPU tensors, else a gloo group of our own."""
        if self._reducing_group is None:
            import torch.distributed as dist

            group = require_group("check_trigger")
            if "cpu" not in backends_by_device(group):
                return self._keep(dist.new_group(backend="gloo"))  # a collective: all are in the same check
            return group  # not kept: it may end
        return self._reducing_group

    def _keep(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        self._reducing_group = group
        return group


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
    if blocking:
        channel.register(name)
    _exchange(channel, blocking)
    return _take(name)


def check_triggers(blocking: bool = True) -> dict[str, bool]:
    """Check and reset all triggers in one reduction; see :func:`check_trigger`.

    Returns:
        Every name that all processes know of by now, in the same order on all of them.
    """
    channel = _channel("check_triggers")
    _exchange(channel, blocking)
    return {name: _take(name) for name in channel.names}


def triggered_by(name: str = DEFAULT) -> tuple[int, ...]:
    """Return which processes had set the trigger when a check last found it set; empty before that."""
    return _flags.last_setters.get(name, ())


def reset() -> None:
    """Forget all triggers. The names' slots stay: they belong to the group."""
    global _flags, _alone
    _flags = _Flags()
    _alone = _Alone()
    for channel in _channels.values():
        channel.forget()


def _exchange(channel: _Alone | _Channel, blocking: bool) -> None:
    pending, _flags.pending = _flags.pending, set()
    _merge(_flags.agreed, channel.exchange(pending, blocking))


def _take(name: str) -> bool:
    setters = _flags.agreed.pop(name, ())
    if setters:
        _flags.last_setters[name] = setters
    return bool(setters)


def _merge(into: dict[str, tuple[int, ...]], other: dict[str, tuple[int, ...]]) -> None:
    for name, setters in other.items():
        into[name] = tuple(sorted({*into.get(name, ()), *setters}))


def _extend(names: list[str], new: list[str]) -> None:
    names += [name for name in dict.fromkeys(new) if name not in names]
