"""`Watchdog`: finds the process that a run waits for, and slow ones.

Each process has two threads. The *observer* looks at the thread that trains ten times a second: in which action of the
Trainer it is (`SectionClock`), since when, and whether it waits for other processes. The *exchange* writes this to the
store every few seconds. The one of process 0 reads what all have written, and judges. If process 0 is not heard from,
the first process that is takes its place. Training itself waits for none of it.

[Note: who is to blame] A process that waits in a collective stands still because of another one. One that stands still
for longer than its limit and waits for nobody is to blame, and so is one that is no longer heard from. Where every
process waits for another, all are: they took different branches.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import nn
from typing_extensions import override

from ..state.deadlocks import (
    describe_place,
    own_connection,
    stack_of,
    waits_for_ranks,
    waits_on_store,
    watch_for_deadlocks,
)
from ..state.process_group import group_store, live_group
from ..state.rendezvous import is_cause, shared_number, store_messages
from ..state.upstream import dump_flight_record
from ..state.utils import named_arguments
from ..strategies.common.checkpoint_files import local_path
from ..strategies.common.sections import (
    MICRO_BATCH,
    PARTS,
    SECTIONS,
    Action,
    SectionClock,
    Spread,
    TimingCallback,
    Timings,
    section_of,
)
from ..strategies.upstream.lightning import Callback, LightningModule, Trainer, check_trainer
from ..strategies.upstream.patches import Patches
from .trigger_early_stopping import ask_slurm_to_requeue, slurm_job

if TYPE_CHECKING:
    from types import FrameType

_log = logging.getLogger(__name__)

EXIT_STATUS = 75
"""Of processes that ``on_hang="abort"`` ends; EX_TEMPFAIL of sysexits.h: "try again"."""

_LOOK_S = 0.1
_STANDS_S = 1.0
"""After so long in one place the observer asks what the process waits for, which takes longer."""
_KNOWN_AFTER = 3
"""Times that an action is seen before its own limit holds."""
_COMPILERS = tuple(os.path.join("torch", name) for name in ("_dynamo", "_inductor", "_functorch"))


@named_arguments
class Watchdog(TimingCallback):
    """Reports which process hangs, where and since when, and which ones are slow; ends the run on request.

    ::

        Trainer(strategy="accel_fsdp2", callbacks=[Watchdog(on_hang="abort")])

    A process has a limit for each action of the Trainer (a hook, the next batch, the backward, a save): ``factor``
    times the median of how long it usually takes, at least twice what it has taken twice, and at least
    ``min_limit_s``. The first three times, and while ``torch.compile`` compiles, the limit is ``first_limit_s``. When
    a process stands still for longer and does not wait for another one, when its messages end, or when all
    wait for each other, process 0 logs a table of all processes, and each one writes the stacks of its threads (and
    torch's flight recorder) to ``dirpath``.

    Every ``report_every_s`` process 0 compares how long the processes take for a micro-batch, without the time in
    which they wait for others: ``data`` (loaders), ``compute``, ``validation``, ``save`` (disks). It warns of one that
    was slower than the median by ``straggler_factor`` in ``straggler_reports`` reports in a row, logs the largest
    factors as ``straggler/data`` and so on, and saves the table as ``timings.json``, which ``accelight timings`` shows.
    A difference counts only where it exceeds 2.5 of its standard errors, by how much micro-batches differ: rare pauses
    that fall on any process at random make none slow. A report covers at least two micro-batches of each process.
    Waits are known for the CPU (gloo); on accelerators, ``compute`` has the waits in it.

    It works under any strategy and on one device, in fit, validate, test and predict. It adds no collective: processes
    exchange a kilobyte each through the process group's store.

    Args:
        on_hang: ``"report"`` logs and keeps waiting. ``"abort"`` also ends every process with exit status 75, so
            that torchrun, Kubernetes or Ray start the run again (from `newest_checkpoint`), and requeues a SLURM job.
            Processes on the same machine that do not respond are killed.
        factor: Of the usual time, for limits.
        min_limit_s: Smallest limit, in seconds.
        first_limit_s: Limit of an action that has not been seen three times, in seconds.
        limits: Fixed limits in seconds, by section (``"data"``, ``"forward"``, ``"backward"``, ``"optimizer"``,
            ``"hooks"``, ``"validation"``, ``"save"``, ``"setup"``), or by hook (``"on_train_epoch_end"``).
        every_s: Seconds between two messages of a process.
        dirpath: Local folder for stacks and timings; default: ``watchdog`` in ``trainer.default_root_dir``.
        report_every_s: Seconds between two comparisons of the processes' speed.
        straggler_factor: From which factor of the median on a process is slow; None compares nothing.
        straggler_reports: In how many reports in a row, for a warning.

    Raises:
        ValueError: If an argument is out of its range, or ``dirpath`` is not local.
    """

    def __init__(
        self,
        on_hang: Literal["report", "abort"] = "report",
        factor: float = 10.0,
        min_limit_s: float = 120.0,
        first_limit_s: float = 1800.0,
        limits: Mapping[str, float] | None = None,
        every_s: float = 5.0,
        dirpath: str | Path | None = None,
        report_every_s: float = 60.0,
        straggler_factor: float | None = 1.5,
        straggler_reports: int = 3,
    ) -> None:
        if on_hang not in ("report", "abort"):
            raise ValueError(f"on_hang must be 'report' or 'abort', got {on_hang!r}.")
        seconds = {"min_limit_s": min_limit_s, "first_limit_s": first_limit_s, "every_s": every_s}
        seconds |= {"report_every_s": report_every_s, **{f"limits[{one!r}]": of for one, of in (limits or {}).items()}}
        for name, value in seconds.items():
            if not value > 0:
                raise ValueError(f"{name} must be > 0 seconds, got {value!r}.")
        if not factor > 1 or not (straggler_factor is None or straggler_factor > 1):
            raise ValueError(f"Factors must be > 1, got factor={factor!r}, straggler_factor={straggler_factor!r}.")
        if straggler_reports < 1:
            raise ValueError(f"straggler_reports must be >= 1, got {straggler_reports!r}.")
        for name in limits or {}:
            if name not in SECTIONS and section_of(name) == "between hooks" and not hasattr(Callback, name):
                raise ValueError(f"limits has {name!r}: name a hook, or a section: {', '.join(SECTIONS)}.")
        self.on_hang, self.every_s, self.dirpath = on_hang, every_s, None if dirpath is None else Path(dirpath)
        if dirpath is not None:
            self.dirpath = local_path(str(dirpath), "dirpath")
        self.report_every_s, self.straggler_factor = report_every_s, straggler_factor
        self.straggler_reports = straggler_reports
        self._limits = _Limits(factor, min_limit_s, first_limit_s, dict(limits or {}))
        self._patches = Patches("callbacks")
        self._observer: _Observer | None = None
        self._exchange: _Exchange | None = None

    @override
    def timings(self) -> Timings:
        """Return how long each process takes: in the last report, or since the run began before there is one.

        Any process can call it, at any time; the others need not.

        Raises:
            RuntimeError: Outside of a run.
        """
        if self._exchange is None:
            raise RuntimeError("There are timings only while the Trainer runs with this Watchdog.")
        return self._exchange.timings()

    # ------------------------------------------------------------------ the run
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_trainer(trainer)
        self._close()
        folder = self.dirpath or local_path(trainer.default_root_dir, "dirpath, or default_root_dir,") / "watchdog"
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        clock = SectionClock(profiler, self._patches)
        self._observer = _Observer(trainer, clock, self._limits.renewed())
        self._exchange = _Exchange(self, self._observer, folder)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._exchange is not None and not is_cause(exception):
            self._exchange.report_lost()
        self._close(f"{type(exception).__name__}: {exception}")

    def _close(self, error: str | None = None) -> None:
        self._patches.remove()
        if self._exchange is not None and self._observer is not None:
            self._observer.close()
            self._exchange.close(error)
        self._observer = self._exchange = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        exchange = self._exchange
        if exchange is not None and exchange.factors is not None:
            factors, exchange.factors = exchange.factors, None
            for part, factor in factors.items():
                pl_module.log(
                    f"straggler/{part}", factor, on_step=True, on_epoch=False, batch_size=1, rank_zero_only=True
                )


# ------------------------------------------------------------------------------------------------
# How long an action may take.


@dataclass
class _Usual:
    """The duration of one action: the longest stretches without another report of the Trainer, in seconds."""

    by_message: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    """One for each message in whose time the action has ended."""
    longest: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """The two longest of all, the longest first."""


@dataclass
class _Limits:
    factor: float
    min_limit_s: float
    first_limit_s: float
    fixed: Mapping[str, float]
    _usual: dict[str, _Usual] = field(default_factory=lambda: defaultdict(_Usual))

    def renewed(self) -> _Limits:
        """Return limits that have learned nothing."""
        return _Limits(self.factor, self.min_limit_s, self.first_limit_s, self.fixed)

    def learn(self, clock: SectionClock) -> None:
        """Take what the clock has counted since the last call."""
        for action in clock.all_actions():
            spent, action.longest = action.longest, 0.0
            if spent > 0:
                usual = self._usual[action.name]
                usual.by_message.append(spent)
                usual.longest = sorted([*usual.longest, spent], reverse=True)[:2]

    def of(self, action: Action, *, compiles: bool) -> float:
        """Return the limit of an action, in seconds."""
        for name in (action.name.rpartition(".")[2], action.section):
            if name in self.fixed:
                return self.fixed[name]
        usual = self._usual.get(action.name)
        if compiles or usual is None or (len(usual.by_message) < _KNOWN_AFTER and action.count <= _KNOWN_AFTER):
            return self.first_limit_s
        return max(self.min_limit_s, self.factor * statistics.median(usual.by_message), 2 * usual.longest[1])


# ------------------------------------------------------------------------------------------------
# This process.


class _Observer:
    """The thread that looks at the thread that trains, which is the one that makes this object."""

    def __init__(self, trainer: Trainer, clock: SectionClock, limits: _Limits) -> None:
        self._trainer, self.clock, self.limits = weakref.ref(trainer), clock, limits
        self.thread_id = threading.get_ident()
        thread = threading.current_thread()
        self._task = f"self/task/{thread.native_id}"
        self._waited_until = 0.0
        self._names: dict[int, str] = {}
        self._ends = threading.Event()

    def start(self, check: Callable[[], None]) -> None:
        """Begin to look, and call ``check`` after each look."""
        name = "accelight-watchdog-observer"
        self._thread = threading.Thread(target=self._run, args=(check,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ends.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _run(self, check: Callable[[], None]) -> None:
        looked = time.monotonic()
        while not self._ends.wait(_LOOK_S):
            stack, now = stack_of(self.thread_id), time.monotonic()
            if stack and self._waits_now(stack):
                self.clock.waited[self.clock.open[-1].section] += now - looked
            looked = now
            del stack  # it would keep the thread's locals alive
            check()

    def _waits_now(self, stack: list[FrameType]) -> bool:
        """Guess whether the thread waits for other processes, from where it is and whether it sleeps."""
        code = stack[0].f_code
        if waits_on_store(stack):
            return True
        is_collective = f"torch{os.sep}distributed" in code.co_filename
        if not is_collective and code.co_name != "_engine_run_backward":  # in which ddp reduces
            return False
        stat = _stat_of(self._task)
        return is_collective if stat is None else stat[0] == "S"

    def stands_s(self) -> float:
        """Return for how long the Trainer has reported nothing, in seconds."""
        return time.perf_counter() - self.clock.since

    def exceeds(self) -> bool:
        """Return whether the process stands still for longer than the limit."""
        stands_s = self.stands_s()
        return stands_s > self.limits.min_limit_s and stands_s > self.limits.of(self.clock.open[-1], compiles=False)

    def describe(self) -> dict[str, Any]:
        """Return the state of this process, for the others."""
        self.limits.learn(self.clock)
        since, action, stands_s = self.clock.since, self.clock.open[-1], self.stands_s()
        limit_s = self.limits.of(action, compiles=False)
        place = waits = None
        if stands_s > min(_STANDS_S, limit_s / 2) and (stack := stack_of(self.thread_id)):
            if any(part in each.f_code.co_filename for each in stack for part in _COMPILERS):
                limit_s = self.limits.of(action, compiles=True)
            place = describe_place(stack)
            waits = waits_for_ranks(self.thread_id, stack)
            if waits is not None:
                self._waited_until = time.perf_counter()
                if unit := self._unit(stack):
                    waits += f", for {unit}"
            del stack  # it would keep the thread's locals alive
        alone_s = time.perf_counter() - max(since, self._waited_until)
        return {
            **self._progress(),
            "section": action.section,
            "action": action.name,
            "since": since,
            "stands_s": stands_s,
            "alone_s": alone_s,  # of these, after it was last seen to wait for others
            "limit_s": limit_s,
            "place": place,
            "waits": waits,
            **self._totals(),
        }

    def _progress(self) -> dict[str, int]:
        trainer = self._trainer()
        if trainer is None:
            return {"step": 0, "epoch": 0, "batch": 0}
        return {"step": trainer.global_step, "epoch": trainer.current_epoch, "batch": trainer.fit_loop.batch_idx}

    def _totals(self) -> dict[str, Any]:
        return {
            "seconds": self.clock.seconds(),
            "waited": self.clock.waited,
            "spreads": {part: asdict(spread) for part, spread in self.clock.spreads.items()},
            "batches": self.clock.action(MICRO_BATCH).count,
        }

    def _unit(self, stack: list[FrameType]) -> str:
        """Return the name of the module, or of FSDP2's unit, that the thread is in."""
        trainer = self._trainer()
        if not self._names and trainer is not None and trainer.lightning_module is not None:
            self._names = {id(module): name for name, module in trainer.lightning_module.named_modules() if name}
        for one in stack:
            for value in one.f_locals.copy().values():
                if isinstance(value, nn.Module):
                    if name := self._names.get(id(value)):
                        return name
                elif name := getattr(value, "_module_fqn", None):
                    return str(name)
        return ""


# ------------------------------------------------------------------------------------------------
# All processes.


@dataclass
class _Heard:
    """The last message of a process."""

    number: int
    at: float
    """When it was read first, by ``time.monotonic()`` of this process: the clocks of machines differ."""
    content: dict[str, Any]


class _Exchange:
    """The thread that writes and reads messages."""

    def __init__(self, options: Watchdog, observer: _Observer, folder: Path) -> None:
        self._options, self._observer, self._folder = options, observer, folder
        group = live_group()
        self._rank, self._num_ranks = (0, 1) if group is None else (group.rank(), group.size())
        self._store: Any = dist.HashStore()
        if group is not None and self._num_ranks > 1:
            number = shared_number("a run with Watchdog", store_messages())
            self._store = own_connection(group_store(f"accelight/watchdog/{number}"))
            watch_for_deadlocks(group)
        self._silent_s = max(observer.limits.min_limit_s, 3 * options.every_s)
        self._identity = {"host": socket.gethostname(), "pid": os.getpid(), "started": _start_of(os.getpid())}
        self._number = 0
        self._heard: dict[int, _Heard] = {}
        self._follows_all_since: float | None = None
        self._num_verdicts = 0
        self._reported: set[tuple[int, float]] = set()
        self._reached = time.monotonic()
        self._is_unreachable = False
        self._window: list[dict[str, Any]] | None = None
        self._window_began = time.monotonic()
        self._num_slow: dict[tuple[str, int], int] = defaultdict(int)
        self.factors: dict[str, float] | None = None
        """The largest factors of the last report, until the thread that trains has logged them."""
        self._ends, self._lock = threading.Event(), threading.Lock()
        observer.start(self._check_reachable)
        self._thread = threading.Thread(target=self._run, name="accelight-watchdog-exchange", daemon=True)
        self._thread.start()

    def close(self, error: str | None) -> None:
        """End the thread, and let the others know that this process has left."""
        self._ends.set()
        self._thread.join(timeout=5)
        if self._lock.acquire(timeout=0.1):  # else the thread waits for a store that does not answer
            with suppress(RuntimeError):
                self._send(ended=True, error=error)
                if self._rank == 0 and self._window is None and self._read(range(self._num_ranks)):
                    self._save(self._compare())

    def _write(self, write: Callable[[], Any]) -> None:
        """Call ``write``, which puts files into the folder: neither a verdict nor training depends on them."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write()
        except OSError as error:
            _log.warning("Watchdog cannot write to %s: %s", self._folder, error)

    def _run(self) -> None:
        with self._lock:
            while not self._ends.is_set():
                try:
                    self._send()
                    self._follow_verdicts()
                    self._judge()
                    self._reached = time.monotonic()
                except RuntimeError as error:  # the store is gone: see `_check_reachable`
                    _log.debug("Watchdog: the store of the process group failed: %s", error)
                self._ends.wait(self._options.every_s)

    # ------------------------------------------------------------------ messages
    def _send(self, **more: Any) -> None:
        self._number += 1
        message = {"number": self._number, **self._identity, **self._observer.describe(), **more}
        self._store.set(f"{self._rank}", json.dumps(message))

    def _read(self, ranks: range) -> bool:
        """Read the last messages of these processes; return whether there is one of each process at all."""
        keys = [f"{rank}" for rank in ranks]
        now = time.monotonic()
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        texts = self._store.multi_get(keys) if self._store.has_extended_api() else map(self._store.get, keys)
        for key, text in zip(keys, texts, strict=True):
            content, rank = json.loads(bytes(text)), int(key)
            if rank not in self._heard or self._heard[rank].number != content["number"]:
                self._heard[rank] = _Heard(content["number"], now, content)
        return len(self._heard) == self._num_ranks

    def _silent(self) -> list[int]:
        now = time.monotonic()
        limit_s = self._silent_s if self._follows_all_since is None else 3 * self._options.every_s
        return [
            rank
            for rank, heard in self._heard.items()
            if rank != self._rank and now - heard.at > limit_s and not heard.content.get("ended")
        ]

    # ------------------------------------------------------------------ judging
    def _judge(self) -> None:
        if self._rank != 0 and not self._replaces_zero():
            return
        if not self._read(range(self._num_ranks)):
            return
        if self._rank == 0:
            self._compare_speed()
        self._report(self._guilty())

    def _replaces_zero(self) -> bool:
        """Return whether process 0 is gone and this one is the first that is not."""
        if self._follows_all_since is None:
            self._read(range(1))
            if 0 not in self._heard or not self._is_gone(0):
                return False
            self._heard = {0: self._heard[0]}
            self._follows_all_since = time.monotonic()
        self._read(range(self._num_ranks))
        if not self._is_gone(0):
            self._follows_all_since = None
            return False
        is_known = time.monotonic() - self._follows_all_since > 3 * self._options.every_s
        return is_known and all(self._is_gone(rank) for rank in range(self._rank))

    def _is_gone(self, rank: int) -> bool:
        return rank in self._silent() or bool(self._heard[rank].content.get("ended"))

    def _guilty(self) -> dict[int, str]:
        """Return why, by process: see [Note: who is to blame]."""
        silent = self._silent()
        found = {rank: self._describe_silence(rank, silent) for rank in silent}
        others = {
            rank: heard.content
            for rank, heard in self._heard.items()
            if rank not in found and not heard.content.get("ended")
        }
        for rank, one in others.items():
            if one["alone_s"] > one["limit_s"]:
                found[rank] = f"stands still in {_where(one)} for {one['stands_s']:.1f} s, limit {one['limit_s']:g} s"
        if not found and others and all(one["waits"] and one["stands_s"] > one["limit_s"] for one in others.values()):
            found = {rank: f"waits for {one['waits']}" for rank, one in others.items()}
        return found

    def _describe_silence(self, rank: int, silent: list[int]) -> str:
        heard = self._heard[rank]
        one = heard.content
        if one["host"] == self._identity["host"]:
            state = _IN_WORDS[_state_of(one["pid"], one["started"])].format(one["pid"])
        else:
            on_host = [other for other, each in self._heard.items() if each.content["host"] == one["host"]]
            is_whole = all(other in silent for other in on_host)
            state = "is on a machine that is down or cut off" if is_whole else "does not respond"
        ago_s = time.monotonic() - heard.at
        return f"{state} (last heard from {ago_s:.0f} s ago, in {_where(one)} of step {one['step']})"

    def _report(self, guilty: dict[int, str]) -> None:
        keys = {(rank, self._heard[rank].content["since"]) for rank in guilty}
        recovered = {rank for rank, _ in self._reported} - set(guilty)
        for rank in sorted(recovered):
            _log.warning("Watchdog: process %d continues.", rank)
        is_new = not keys <= self._reported
        self._reported = keys
        if not is_new:
            return
        text = self._table(guilty)
        _log.error("%s", text)
        number = self._store.add("verdicts", 0) + 1
        path = self._folder / f"hang{number}-step{self._heard[self._rank].content['step']}.txt"
        self._write(lambda: path.write_text(text + "\n"))
        self._store.set(f"verdict/{number}", json.dumps([min(guilty), self._options.on_hang == "abort"]))
        self._store.add("verdicts", 1)
        self._follow_verdicts(present=[rank for rank in self._heard if not self._is_gone(rank)])

    def _table(self, guilty: dict[int, str]) -> str:
        causes = [f"process {rank} ({self._heard[rank].content['host']}) {why}" for rank, why in sorted(guilty.items())]
        if all(self._heard[rank].content["waits"] for rank in guilty if not self._is_gone(rank)) and len(causes) > 1:
            causes.append("they wait for each other: every process must call the same collectives in the same order")
        ranks_by_row: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for rank, heard in sorted(self._heard.items()):
            one = heard.content
            does = f"waits for {one['waits']}" if one["waits"] else "stands still" if rank in guilty else "runs"
            if one.get("ended"):
                does = f"has left{': ' + one['error'] if one.get('error') else ''}"
            elif rank in self._silent():
                does = "not heard from"
            place = f" {one['place']}" if one["place"] and not one.get("ended") else ""
            since = f"{one['stands_s']:.1f} s" if one["stands_s"] > min(_STANDS_S, one["limit_s"] / 2) else ""
            row = (one["host"], f"{one['step']}", f"{one['batch']}", _where(one), since, does + place)
            ranks_by_row[row].append(rank)
        rows: list[tuple[str, ...]] = [("process", "host", "step", "batch", "section", "since", "")]
        rows += [(_join_ranks(ranks), *row) for row, ranks in ranks_by_row.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        head = f"Watchdog: {'; '.join(causes)}."
        return "\n".join([head, *lines, f"The stacks of all processes are in {self._folder}."])

    # ------------------------------------------------------------------ verdicts
    def _follow_verdicts(self, present: list[int] | None = None) -> None:
        number = self._store.add("verdicts", 0)
        if number == self._num_verdicts:
            return
        self._num_verdicts = number
        rank, ends = json.loads(bytes(self._store.get(f"verdict/{number}")))
        self._write(self._write_stacks)
        if not ends:
            return
        self._store.add(f"followed/{number}", 1)
        if present is not None:
            deadline = time.monotonic() + 3 * self._options.every_s
            while self._store.add(f"followed/{number}", 0) < len(present) and time.monotonic() < deadline:
                time.sleep(0.05)
            self._kill(self._silent())
            _requeue()
        self._end(f"process {rank} hangs")

    def _kill(self, silent: list[int]) -> None:
        """Kill those of the silent processes that are on this machine: nothing else ends one that is frozen."""
        for rank in silent:
            one = self._heard[rank].content
            if one["host"] == self._identity["host"] and _start_of(one["pid"]) == one["started"] is not None:
                with suppress(OSError):
                    os.kill(one["pid"], signal.SIGKILL)

    def _end(self, why: str) -> None:
        _log.critical("Watchdog: %s: process %d ends with exit status %d.", why, self._rank, EXIT_STATUS)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        for child in multiprocessing.active_children():
            if child.daemon:  # as at an ordinary exit; a loader's worker that hangs does not notice that we are gone
                child.kill()
        os._exit(EXIT_STATUS)  # the thread that trains cannot be interrupted

    def _write_stacks(self) -> None:
        one = self._observer.describe()
        path = self._folder / f"rank{self._rank}-step{one['step']}.txt"
        with open(path, "a") as file:
            file.write(f"process {self._rank} on {self._identity['host']}, {time.strftime('%Y-%m-%d %H:%M:%S')}: ")
            file.write(f"in {_where(one)} for {one['stands_s']:.1f} s, step {one['step']}, batch {one['batch']}\n")
            file.write(f"{'waits for ' + one['waits'] if one['waits'] else 'waits for no process'}, {one['place']}\n")
            for child in multiprocessing.active_children():
                file.write(f"child process {child.pid} ({child.name}): {_state_of(child.pid or 0, None)}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\n")
        if (record := dump_flight_record()) is not None:
            (self._folder / f"flight-recorder-{self._rank}.pkl").write_bytes(record)

    def _check_reachable(self) -> None:
        """Notice, in the observer's thread, that the store does not answer: the exchange waits for it."""
        silence_s = time.monotonic() - self._reached
        if silence_s <= self._silent_s + self._options.every_s:
            self._is_unreachable = False
            return
        if self._is_unreachable or self._ends.is_set():
            return
        if not self._observer.exceeds():
            return
        self._is_unreachable = True
        _log.error(
            "Watchdog: process %d (%s) stands still in %s, and the process group's store has not answered for %.0f s: "
            "process 0 %s.",
            self._rank,
            self._identity["host"],
            self._observer.clock.open[-1].name,
            silence_s,
            self._describe_silence(0, [0]) if 0 in self._heard else "does not respond, or is cut off",
        )
        self._write(self._write_stacks)
        if self._options.on_hang == "abort":
            self._kill([rank for rank in (0,) if rank in self._heard])
            if self._rank == 1:
                _requeue()
            self._end("the other processes cannot be reached")

    def report_lost(self) -> None:
        """Log which processes have ended, after a collective has failed; waits for two messages of the others."""
        # Lightning's handler of SIGTERM, which torchrun sends next, fails in a collective, and ends the process.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            self._ends.set()
            self._thread.join(timeout=5)
            # A thread of its own: where another thread takes the signal, the handler still runs in this one.
            reports = threading.Thread(target=self._report_lost, name="accelight-watchdog-lost")
            reports.start()
            reports.join()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _report_lost(self) -> None:
        try:
            if lost := self._find_lost():
                causes = [f"process {rank} {self._describe_silence(rank, lost)}" for rank in lost]
                _log.error("Watchdog: a collective has failed: %s.", "; ".join(causes))
        except RuntimeError as error:
            _log.error("Watchdog: a collective has failed, and the process group's store does not answer: %s", error)

    def _find_lost(self) -> list[int]:
        """Return the processes that have ended, on the one of lowest rank that is left."""
        deadline = time.monotonic() + 2 * self._options.every_s + 1
        self._read(range(self._num_ranks))
        before = {rank: one.number for rank, one in self._heard.items() if rank != self._rank}
        lost: list[int] = []
        while before and not lost:
            lost = [rank for rank in before if self._has_ended(rank)] or (
                list(before) if time.monotonic() > deadline else []
            )
            time.sleep(0.05)
            self._send()
            self._read(range(self._num_ranks))
            before = {rank: number for rank, number in before.items() if self._heard[rank].number == number}
        return lost if all(rank in lost for rank in range(self._rank)) else []

    def _has_ended(self, rank: int) -> bool:
        one = self._heard[rank].content
        return one["host"] == self._identity["host"] and _state_of(one["pid"], one["started"]) == "ended"

    # ------------------------------------------------------------------ speed
    def timings(self) -> Timings:
        """See `Watchdog.timings`."""
        if self._store.check(["timings"]):
            return Timings.from_json(bytes(self._store.get("timings")).decode())
        texts = [bytes(self._store.get(f"{rank}")) for rank in range(self._num_ranks)]
        return _timings([json.loads(text) for text in texts], None)

    def _compare(self) -> Timings:
        return _timings([self._heard[rank].content for rank in range(self._num_ranks)], self._window)

    def _compare_speed(self) -> None:
        now = time.monotonic()
        if now - self._window_began < self._options.report_every_s:
            return
        timings = self._compare()
        if min(timings.num_batches) < 2:  # a long validation, a long step: one micro-batch says nothing of the next
            return
        self._window_began = now
        self._window = [self._heard[rank].content for rank in range(self._num_ranks)]
        self._store.set("timings", timings.to_json())
        self._save(timings)
        if self._options.straggler_factor is not None and self._num_ranks > 1:
            self._warn_of_slow(timings, self._options.straggler_factor)

    def _warn_of_slow(self, timings: Timings, limit: float) -> None:
        factors = {part: timings.factors(part) for part in PARTS}
        self.factors = {part: max(of_ranks) for part, of_ranks in factors.items()}
        for rank in range(self._num_ranks):
            slow = []
            for part, of_ranks in factors.items():
                is_slow = of_ranks[rank] >= limit
                self._num_slow[part, rank] = self._num_slow[part, rank] + 1 if is_slow else 0
                if self._num_slow[part, rank] == self._options.straggler_reports:
                    slow.append(part)
            if slow:
                _log.warning("Watchdog: %s", _describe_slow(timings, rank, slow))

    def _save(self, timings: Timings) -> None:
        path, unfinished = self._folder / "timings.json", self._folder / "timings.tmp"

        def write() -> None:
            unfinished.write_text(timings.to_json())
            os.replace(unfinished, path)

        self._write(write)


_CAUSES = {
    "data": "its loader, or the disk it reads from, is slow",
    "compute": "its device or processor is slow, or another program uses it",
    "validation": "it has more to validate, or its device or loader is slow",
    "save": "the disk it writes to is slow",
}


def _describe_slow(timings: Timings, rank: int, parts: list[str]) -> str:
    of_parts = []
    for part in parts:
        work = timings.work(part)
        of_parts.append(
            f"{timings.factors(part)[rank]:.1f} times the median of all processes for {part} "
            f"({1e3 * work[rank]:.2f} against {1e3 * statistics.median_low(work):.2f} ms per micro-batch)"
        )
    is_host = "compute" in parts and len(parts) > 1
    cause = "its machine is slow" if is_host else " and ".join(_CAUSES[part] for part in parts)
    return f"process {rank} ({timings.hosts[rank]}) needs {' and '.join(of_parts)} up to step {timings.step}: {cause}."


def _timings(messages: list[dict[str, Any]], before: list[dict[str, Any]] | None) -> Timings:
    """Return the processes' work since ``before``, given their messages in the order of ranks."""

    def passed(rank: int, kind: str, section: str) -> float:
        earlier = 0.0 if before is None else before[rank][kind].get(section, 0.0)
        return float(messages[rank][kind].get(section, 0.0) - earlier)

    ranks = range(len(messages))
    batches = [messages[rank]["batches"] - (0 if before is None else before[rank]["batches"]) for rank in ranks]
    names = [name for name in SECTIONS if any(name in one["seconds"] for one in messages)]

    def table(kind: str) -> dict[str, list[float]]:
        return {name: [passed(rank, kind, name) / max(1, batches[rank]) for rank in ranks] for name in names}

    def error(rank: int, part: str) -> float:
        spread = Spread(**messages[rank]["spreads"][part])
        if before is not None:
            spread = spread.since(Spread(**before[rank]["spreads"][part]))
        return spread.error() / max(1, batches[rank])

    hosts = [one["host"] for one in messages]
    errors = {part: [error(rank, part) for rank in ranks] for part in PARTS}
    return Timings(messages[0]["step"], hosts, batches, table("seconds"), table("waited"), errors)


# ------------------------------------------------------------------------------------------------
# Words, and the system's processes.


def _where(one: Mapping[str, Any]) -> str:
    return one["section"] if one["action"] == one["section"] else f"{one['section']}, {one['action']}"


def _join_ranks(ranks: list[int]) -> str:
    """Return for example ``0, 2-5``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{part[0]}" if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _stat_of(task: int | str) -> list[str] | None:
    """Return the fields of ``/proc/<task>/stat`` after the name; None where there is none, and outside of Linux."""
    try:
        return Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _start_of(pid: int) -> str | None:
    """Return when a process of this machine has begun, in the system's ticks; None where it has ended."""
    stat = _stat_of(pid)
    return None if stat is None or stat[0] in "ZX" else stat[19]


_IN_WORDS = {
    "ended": "has ended",
    "stopped": "is stopped by a signal (`kill -CONT {0}` continues it)",
    "runs": "does not respond, though its process {0} runs",
    "sleeps": "does not respond, though its process {0} is there and sleeps",
    "unknown": "does not respond",
}


def _state_of(pid: int, started: str | None) -> str:
    """Return one of ``_IN_WORDS`` for a process of this machine, begun at ``started`` (None: whenever)."""
    if _stat_of(os.getpid()) is None:  # not Linux
        return "unknown"
    stat = _stat_of(pid)
    if stat is None or stat[0] in "ZX" or started not in (None, stat[19]):
        return "ended"
    return "stopped" if stat[0] in "Tt" else "runs" if stat[0] == "R" else "sleeps"


def _requeue() -> None:
    job = slurm_job()
    if job is not None and (refusal := ask_slurm_to_requeue(job)) is not None:
        _log.error("SLURM job %s could not be requeued: %s", job, refusal)
