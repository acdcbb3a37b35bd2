"""Triggers: any process sets one, and all see it in the same check.

[Note: one number] A blocking check reduces one number that is kept: whether this process has anything to report, a
trigger or a name that the others may not know. Only if someone has, all gather who set what. (gloo cuts a larger tensor
into several messages: a flag for each of 64 names took 1.9 to 4.8 times as long as Accelerate's check, one number 0.9.)

[Note: rounds] A non-blocking check is a round in the store: one call, which reports what was set here. It answers from
the round before, to which all came a whole step ago, so that it hardly waits. An answer depends on what was set before
the previous check, and never on who came when: all processes agree. (A reduction started at one check and awaited at
the next took as long as a blocking one: torch 2.13, gloo, two processes.)
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .process_group import backends_by_device, group_store, require_group, timeout_of
from .process_record import communication_group
from .store import DeadlockError, count_uses, poll

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist


DEFAULT = "default"


@dataclass
class _Flags:
    """This process's triggers, in any group."""

    pending: set[str] = field(default_factory=set)
    """Set here, not reported yet."""
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
        self._own_group: dist.ProcessGroup | None = None
        self._knows_group = False
        self._process_index = dist.get_rank(group)
        self._num_processes = dist.get_world_size(group)
        self._unsent: dict[str, None] = {}
        """Names asked for here that others may not know."""
        with torch.inference_mode(False):  # checks in an evaluation and in training reuse it
            self._buffer = torch.zeros(1, dtype=torch.int32, device="cpu")
        self._rounds = Rounds(
            group_store("accelight/triggers"),
            "check_trigger(blocking=False)",
            self._num_processes,
            lambda: timeout_of(self._group()).total_seconds(),
        )
        self._round_is_open = False
        rounds = self._rounds
        count_uses(group, "check_trigger(blocking=False)", lambda: rounds.number, rounds.num_missing)

    def register(self, name: str) -> None:
        """Learn a name; the others learn it in the next blocking check."""
        if name not in self.names:
            self._unsent.setdefault(name)

    def exchange(self, pending: set[str], blocking: bool) -> dict[str, tuple[int, ...]]:
        """Send what is pending; return what has been agreed since the last call."""
        previous = self._rounds.number if self._round_is_open else None
        agreed: dict[str, tuple[int, ...]] = {}
        try:
            if not blocking:
                self._rounds.join([self._process_index, sorted(pending)] if pending else None)
            for setter, names in self._rounds.messages(previous) if previous is not None else ():
                _merge(agreed, dict.fromkeys(names, (setter,)))
        except DeadlockError:
            raise
        except RuntimeError as error:  # DistNetworkError: the process that holds the store is gone
            raise RuntimeError(
                f"Lost the process group's store in check_trigger: a process has ended. ({error})"
            ) from error
        self._round_is_open = not blocking
        if blocking:
            _merge(agreed, self._reduce(pending))
        _extend(self.names, sorted(agreed))
        return agreed

    def forget(self) -> None:
        """Drop what an open round will say."""
        self._round_is_open = False

    def _reduce(self, pending: set[str]) -> dict[str, tuple[int, ...]]:
        """Agree on what was set; see [Note: one number]."""
        import torch.distributed as dist

        buffer, group = self._buffer.fill_(bool(pending or self._unsent)), self._group_for_reducing()
        try:
            dist.all_reduce(buffer, dist.ReduceOp.MAX, group=group)
        except RuntimeError as error:
            raise RuntimeError(
                f"The processes could not agree on triggers: one has ended, or has not reached its check. ({error})"
            ) from error
        if not buffer.item():
            return {}
        everyone: list[Any] = [None] * self._num_processes
        dist.all_gather_object(everyone, (list(self._unsent), sorted(pending)), group)
        self._unsent.clear()
        agreed: dict[str, tuple[int, ...]] = {}
        for setter, (unsent, names) in enumerate(everyone):
            _extend(self.names, [*unsent, *names])
            _merge(agreed, dict.fromkeys(names, (setter,)))
        return agreed

    def _group_for_reducing(self) -> dist.ProcessGroup | None:
        """Return None for the default group where it takes CPU tensors, else a gloo group of our own."""
        if not self._knows_group:
            import torch.distributed as dist

            if "cpu" not in backends_by_device(require_group("check_trigger")):
                self._own_group = dist.new_group(backend="gloo")  # a collective: all are in the same check
            self._knows_group = True
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
    """Set a trigger on this process, for the next check on all. Costs nothing until then.

    Raises:
        RuntimeError: Before the process group has started, in a process that Lightning's launcher started.
    """
    _check_name(name)
    communication_group("set_trigger", needs_all=False)  # raises where there is no other process
    _flags.pending.add(name)


def check_trigger(name: str = DEFAULT, blocking: bool = True) -> bool:
    """Return whether any process has set the trigger, and reset it. Every process calls it, and gets the same answer.

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


def check_triggers(blocking: bool = True, names: Iterable[str] | None = None) -> dict[str, bool]:
    """Check and reset several triggers, or all, in one reduction; see :func:`check_trigger`.

    Args:
        blocking: As in :func:`check_trigger`.
        names: The triggers, the same on every process; others are kept for their own check. Default all.

    Returns:
        Whether each was set. Without ``names``: every name that all processes know of by now, in the same order on
        all of them.
    """
    channel = _channel("check_triggers")
    asked = None if names is None else list(names)
    for name in asked or ():
        _check_name(name)
        if blocking:
            channel.register(name)
    _exchange(channel, blocking)
    return {name: _take(name) for name in (channel.names if asked is None else asked)}


def triggered_by(name: str = DEFAULT) -> tuple[int, ...]:
    """Return which processes had set the trigger when a check last found it set; empty before that."""
    return _flags.last_setters.get(name, ())


def reset() -> None:
    """Forget all triggers. The names stay: they belong to the group."""
    global _flags, _alone
    _flags = _Flags()
    _alone = _Alone()
    for channel in _channels.values():
        channel.forget()


def _exchange(channel: _Alone | _Channel, blocking: bool) -> None:
    pending, _flags.pending = _flags.pending, set()
    try:
        agreed = channel.exchange(pending, blocking)
    except BaseException:
        _flags.pending |= pending
        raise
    _merge(_flags.agreed, agreed)


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


# ------------------------------------------------------------------------------------------------
# Rounds in a store: a message in a round reaches all processes once all have joined the round.
#
# [Note: one call] All rounds share one counter, so that joining a round shows how many have joined the one before. A
# process comes to a round only when everybody has come to the last but one: whoever is ahead is so by less than two
# rounds. Rounds of even and of odd numbers are therefore counted apart: then a count is full exactly when all have
# come. Messages are counted above both; as long as that number is the known one, nobody has to look for any.


_COUNT_BITS = 20
_COUNT_MASK = (1 << _COUNT_BITS) - 1
_ONE_MESSAGE = 1 << (2 * _COUNT_BITS)


class Rounds:
    """Rounds of the processes of one group, counted in its store.

    Args:
        store: Of the group; its keys are for these rounds alone.
        what: What comes to a round, for errors.
        num_processes: All of them come to every round.
        timeout_s: Returns how long to wait for one that does not come.
        rounds_in_key: After how many rounds the next counter begins; by default before one could overflow.
    """

    def __init__(
        self,
        store: dist.Store,
        what: str,
        num_processes: int,
        timeout_s: Callable[[], float],
        rounds_in_key: int | None = None,
    ) -> None:
        self._store, self._what, self._num_processes, self._timeout_s = store, what, num_processes, timeout_s
        self._rounds_in_key = rounds_in_key or max(2, (1 << _COUNT_BITS) // num_processes // 2 * 2)
        self.number = 0
        """Of the last round that this process has come to, from 1."""
        self._seen = 0
        """The counter, as it was when it came there."""
        self._complete = 0
        """The last round that all have joined, as far as it knows."""
        self._counted_to, self._num_counted = 0, 0
        """The last round whose messages were counted, and how many there were since the counter began."""

    def join(self, message: Any = None) -> None:
        """Join the next round.

        Args:
            message: The message for the others; None is no message.

        Raises:
            TimeoutError: If somebody does not join the last but one.
        """
        if self.number - 1 > self._complete:
            self._wait_for(self.number - 1)
        self.number += 1
        count = 1 << (self.number % 2 * _COUNT_BITS)
        if message is not None:
            place = self._store.add(self._messages(self.number), 1)
            self._store.set(f"{self._messages(self.number)}/{place}", json.dumps(message))
            count += _ONE_MESSAGE
        self._seen = self._store.add(self._key(self.number), count)

    def messages(self, number: int) -> list[Any]:
        """Return the messages of a round that this process has joined, once all have.

        Args:
            number: Of the last round, or of the one before.

        Raises:
            TimeoutError: If somebody does not join it.
        """
        key = self._key(number)
        seen = self._seen if self._key(self.number) == key else self._store.add(key, 0)
        if not self._is_full(number, seen):
            seen = self._wait_for(number)
        self._complete = max(self._complete, number)
        if number > 2 and self._key(number - 1) != self._key(number - 2):
            self._store.delete_key(self._key(number - 2))  # whoever has joined this round has read that one
        if self._key(self._counted_to) != key:
            self._counted_to, self._num_counted = number - (number - 1) % self._rounds_in_key - 1, 0
        found = 0
        if seen // _ONE_MESSAGE != self._num_counted:  # in this round, in one that was not asked for, or in the next
            for each in range(self._counted_to + 1, number + 1):
                found = self._store.add(self._messages(each), 0)
                self._num_counted += found
            self._counted_to = number
        return [json.loads(self._store.get(f"{self._messages(number)}/{place}")) for place in range(1, found + 1)]

    def num_missing(self) -> int:
        """Return how many processes have yet to join the last round."""
        return 0 if self.number == 0 else self._missing(self.number, self._store.add(self._key(self.number), 0))

    def _wait_for(self, number: int) -> int:
        key = self._key(number)

        def full() -> int | None:
            seen = self._store.add(key, 0)
            return seen if self._is_full(number, seen) else None

        timeout_s = self._timeout_s()
        seen = poll(full, timeout_s)
        if seen is None:
            num_joined = self._num_processes - self._missing(number, self._store.add(key, 0))
            raise TimeoutError(
                f"{num_joined} of {self._num_processes} processes have reached the previous {self._what} after "
                f"{timeout_s:g} s. Every process must check equally often."
            )
        self._complete = max(self._complete, number)
        return seen

    def _is_full(self, number: int, seen: int) -> bool:
        return self._missing(number, seen) == 0

    def _missing(self, number: int, seen: int) -> int:
        """Return how many have not joined a round, provided that nobody has joined the next but one."""
        rounds = ((number - 1) % self._rounds_in_key) // 2 + 1  # of this parity, under this key, up to this one
        join = seen >> (number % 2 * _COUNT_BITS) & _COUNT_MASK
        return max(0, self._num_processes * rounds - join)

    def _key(self, number: int) -> str:
        return f"rounds/{(number - 1) // self._rounds_in_key}"

    @staticmethod
    def _messages(number: int) -> str:
        return f"round/{number}"
