"""All processes have to come to the same call: found out on the store before a collective can hang."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING

from .ordering import poll, shortest_pause
from .process_group import group_store, require_group, timeout_of
from .process_record import shared

if TYPE_CHECKING:
    import torch.distributed as dist

# Of the group and not of the states, as the store is: after a reset, old keys must not look new.
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


def meet(what: str) -> None:
    """Wait until every process has come to ``what``, at most as long as the group's timeout.

    Args:
        what: Names the call in the error, such as ``"trainer.save_checkpoint"``.

    Raises:
        RuntimeError: If some processes do not come; it names those that did.
    """
    group = require_group(what)
    counts = _meetings.setdefault(group, Counter())
    counts[what] += 1
    num_processes, process_index = shared.current().num_processes, shared.current().process_index
    store, timeout_s = group_store(f"accelight/meet/{what}/{counts[what]}"), timeout_of(group).total_seconds()
    store.set(f"{process_index}", "")
    come = store.add("come", 1)
    if process_index == 0 and counts[what] > 2:  # whoever is here has left the last meeting, so all have left that one
        before_last = group_store(f"accelight/meet/{what}/{counts[what] - 2}")
        for key in ("come", *map(str, range(num_processes))):
            before_last.delete_key(key)
    if come == num_processes:
        return

    def all_have_come() -> bool | None:
        return store.add("come", 0) == num_processes or None

    if poll(all_have_come, timeout_s, shortest_pause(num_processes)) is None:
        present = [index for index in range(num_processes) if store.check([f"{index}"])]
        if store.add("come", -1) == num_processes - 1:  # the last came just now
            store.add("come", 1)
            return
        store.delete_key(f"{process_index}")  # else it would be here already when all come the next time
        counts[what] -= 1
        raise RuntimeError(
            f"{what} was called on {'process' if len(present) == 1 else 'processes'} "
            f"{', '.join(map(str, present))} of {num_processes} alone: the others did not come in {timeout_s:g} s. "
            "Call it on every process; each has a part in it."
        )
