"""The process that holds the store stays until the others have done with it what it has done.

[Note: staying] Whoever waits on the store needs the process that holds it, process 0 as a rule: wherever it listens for
the others itself, without torchrun's agent. Its last ``main_process_first`` block is done before the others have even
come to theirs; if it ended then, or destroyed the group, they would find nobody. So everyone counts its uses; when the
group goes (destroyed, or the program ends) process 0 waits until the others have caught up, or have left themselves and
said so. A process that was killed says nothing: the group's timeout bounds the waiting, and after an error of its own,
which would only be printed late, process 0 gives the others 10 s.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import time
import weakref
from dataclasses import dataclass, field
from multiprocessing import util
from typing import TYPE_CHECKING, Protocol

from .process_group import group_store, timeout_of

if TYPE_CHECKING:
    import torch.distributed as dist

    from .upstream import Store, TCPStore

_log = logging.getLogger(__name__)

_AFTER_AN_ERROR_S = 10.0
_SILENT_S = 5.0
_TOGETHER_S = 0.05  # all end at the same time, as a rule: leaving, they must not find the store just gone
_POLL_S = 0.005


class Use(Protocol):
    """Something that processes do with the store, equally often."""

    @property
    def num_uses(self) -> int:
        """How often this process has."""
        ...

    def num_missing(self) -> int:
        """Return how many uses of the others are still to come, to be as many as here."""
        ...


@dataclass
class _Stay:
    store: Store
    host: str
    port: int
    process_index: int
    num_processes: int
    timeout_s: float
    uses: dict[str, Use] = field(default_factory=dict)

    def leave(self) -> None:
        """Say so, or, on process 0, let the others leave first where they need it."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and nobody is left to be told
            if self.process_index == 0:
                self._wait()
            elif _listens(self.host, self.port):
                self.store.set(f"left/{self.process_index}", json.dumps(self._counts()))

    def _counts(self) -> dict[str, int]:
        return {name: use.num_uses for name, use in self.uses.items()}

    def _wait(self) -> None:
        started = time.monotonic()
        limit_s = self.timeout_s if getattr(sys, "last_value", None) is None else _AFTER_AN_ERROR_S
        told = False
        while (missing := self._missing()) and time.monotonic() - started < limit_s:
            if not told and time.monotonic() - started > _SILENT_S:
                _log.warning(
                    "Process 0 stays for the others, which have not come to %s yet; at most %g s more. (Ctrl-C ends "
                    "it.)",
                    " and ".join(missing),
                    limit_s - _SILENT_S,
                )
                told = True
            time.sleep(_POLL_S if time.monotonic() - started < 1 else 0.1)
        started = time.monotonic()
        while len(self._left()) < self.num_processes - 1 and time.monotonic() - started < _TOGETHER_S:
            time.sleep(_POLL_S)

    def _missing(self) -> list[str]:
        """Return the names of the uses that others are still to come to."""
        missing = {name: use.num_missing() for name, use in self.uses.items() if use.num_uses}
        if not any(missing.values()):
            return []
        left = self._left()
        return [
            name
            for name, count in missing.items()
            if count > sum(max(0, self.uses[name].num_uses - counts.get(name, 0)) for counts in left)
        ]

    def _left(self) -> list[dict[str, int]]:
        """Return what those had counted that have left."""
        keys = [f"left/{index}" for index in range(1, self.num_processes)]
        return [json.loads(self.store.get(key)) for key in keys if self.store.check([key])]


_stays: weakref.WeakKeyDictionary[dist.ProcessGroup, _Stay] = weakref.WeakKeyDictionary()


def watch(group: dist.ProcessGroup) -> None:
    """See to it that this process leaves ``group`` as it should: see [Note: staying]. Communicates nothing now."""
    import torch.distributed as dist

    if group in _stays or dist.get_world_size(group) == 1:
        return
    listening = _listening_store()
    if listening is None:
        return
    stay = _Stay(
        group_store("accelight/stay"),
        listening.host,
        listening.port,
        dist.get_rank(group),
        dist.get_world_size(group),
        timeout_of(group).total_seconds(),
    )
    _stays[group] = stay
    leave = weakref.finalize(group, stay.leave)  # also at the program's end
    util.Finalize(None, leave, exitpriority=0)  # in a process that multiprocessing started, which knows no atexit


def count(group: dist.ProcessGroup, name: str, use: Use) -> None:
    """Let ``use`` be among what process 0 stays for."""
    stay = _stays.get(group)
    if stay is not None:
        stay.uses[name] = use


def is_needed(group: dist.ProcessGroup) -> bool:
    """Return whether process 0 may have to stay: it listens for the others itself."""
    return group in _stays


def _listening_store() -> TCPStore | None:
    """Return the default group's TCP store; None for others, and where torchrun's agent holds it and outlives us."""
    from .upstream import PrefixStore, TCPStore, _get_default_store

    store = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return store


def _listens(host: str, port: int) -> bool:
    """Return whether somebody does. To ask the store would print a long warning where it is gone."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True
