"""Functions on real gloo processes: a pool forked from one preloaded server and reused over the tests.

Starting a process with torch and Lightning costs 4 to 5 s by ``spawn``; a fork server that has them imported forks one
in a fraction of that, and a process kept for the next test costs nothing. What a test may have left behind (process
group, singletons, environment, seeds) is put back before the next one; after a failure the processes are thrown away.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib.metadata
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.slowness import slowness

_PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "lightning.pytorch",
    "lightning.pytorch.strategies",
    "accelight.state",
]
_MORE: tuple[str, ...] = ()
_START_S = 120.0
_MOST_THREADS = 100
"""Of a worker between two tests: DeepSpeed keeps engines, and with them groups, that nobody else knows any more."""
_WORN = b"worn"
_DUMP_S = 0.5  # after its time is up, a rank writes its stacks
_CRASH = "Fatal Python error"
_GRACE_S = 10.0  # what the other ranks get to finish (or fail on their own) after the first one has failed


@dataclass
class _Task:
    """What a worker is told to do, pickled as a whole so that a bad pickle is the task's failure and not the pool's."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass
class _Order:
    """The surroundings of a task: always picklable."""

    task: bytes
    env: dict[str, str]
    cwd: str
    sys_path: list[str]
    rank: int
    world_size: int
    folder: str
    group_timeout_s: float | None
    timeout_s: float


@dataclass
class _Worker:
    process: Any
    connection: multiprocessing.connection.Connection
    log: Path
    stacks: Path


@dataclass
class _Pool:
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="accelight-ranks-")))
    workers: dict[int, list[_Worker]] = field(default_factory=dict)
    num_started: int = 0
    num_runs: int = 0

    def get(self, world_size: int) -> list[_Worker]:
        """Return the live workers for ``world_size`` ranks, forking them where there are none."""
        if world_size not in self.workers:
            self.workers[world_size] = [self._fork() for _ in range(world_size)]
            for worker in self.workers[world_size]:  # a test's time begins when its processes are there
                assert worker.connection.poll(_START_S * slowness()), (
                    f"no worker after {_START_S} s: {_tail(worker.log)}"
                )
                worker.connection.recv()
        return self.workers[world_size]

    def _fork(self) -> _Worker:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOAD, *_MORE])
        self.num_started += 1
        log, stacks = (self.folder / f"{self.num_started}.{kind}" for kind in ("log", "stacks"))
        ours, theirs = context.Pipe()
        # Not a daemon: tests start DataLoader workers, which daemonic processes may not.
        process = context.Process(target=_serve, args=(theirs, str(log), str(stacks)))
        process.start()
        theirs.close()
        return _Worker(process, ours, log, stacks)

    def discard(self, world_size: int) -> None:
        """Kill the workers of one world size: their state can no longer be trusted."""
        for worker in self.workers.pop(world_size, []):
            worker.process.kill()
            worker.process.join()
            worker.connection.close()

    def close(self) -> None:
        """Kill every worker and remove the pool's files."""
        for world_size in list(self.workers):
            self.discard(world_size)
        shutil.rmtree(self.folder, ignore_errors=True)


_POOL: _Pool | None = None


def _pool() -> _Pool:
    global _POOL
    if _POOL is None:
        _POOL = _Pool()
        atexit.register(_POOL.close)
    return _POOL


def preload(*modules: str) -> None:
    """Let every process that is forked from now on have these modules, however often processes are thrown away.

    Those of an earlier call are not there any more.
    """
    global _MORE
    if modules == _MORE:
        return
    _MORE = modules
    for world_size in list(_pool().workers):
        _pool().discard(world_size)
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined] # the next process starts another one


def free_port() -> int:
    """Return a TCP port that is free on loopback now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def forget_processes(world_size: int) -> None:
    """Let the next run on ``world_size`` ranks have new processes: what it imports decides once in each."""
    _pool().discard(world_size)


def run_on_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60,
    env: Mapping[str, str] | None = None,
    init_group: bool = True,
    group_timeout_s: float | None = None,
) -> list[Any]:
    """Run module-level ``fn(*args)`` on ``world_size`` processes and return their results in rank order.

    Args:
        world_size: Number of processes.
        fn: A module-level function; it and its result travel by pickle.
        *args: Its arguments, the same on every rank (ask ``torch.distributed.get_rank()`` inside).
        timeout_s: The watchdog: after so long (longer on a slow machine) the stack of every rank is printed and the
            processes are killed.
        env: Environment variables beside the caller's own.
        init_group: Whether a gloo group exists when ``fn`` starts. Without it, ``fn`` finds a complete torchrun
            environment (``MASTER_PORT`` free) and may start the group itself.
        group_timeout_s: Timeout of that group's collectives. Default 60, or more on a slow machine.

    Raises:
        AssertionError: If a rank raised, died or hung; the message holds what each rank has to say.
    """
    __tracebackhide__ = True  # a failure is the ranks', not this function's
    stretch = slowness()
    timeout_s *= stretch
    pool = _pool()
    workers = pool.get(world_size)
    pool.num_runs += 1
    folder = pool.folder / f"run{pool.num_runs}"
    folder.mkdir()
    task = pickle.dumps(_Task(fn, args))
    base = dict(os.environ)
    base.update(
        WORLD_SIZE=f"{world_size}",
        LOCAL_WORLD_SIZE=f"{world_size}",
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=f"{free_port()}",
        TORCHELASTIC_RUN_ID=f"run{pool.num_runs}",
        OMP_NUM_THREADS="1",
        **(env or {}),
    )
    for rank, worker in enumerate(workers):
        worker.log.write_bytes(b"")
        rank_env = {**base, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
        timeout = (group_timeout_s or 60 * stretch) if init_group else None
        worker.connection.send(
            _Order(task, rank_env, os.getcwd(), sys.path, rank, world_size, str(folder), timeout, timeout_s)
        )
    try:
        reports = _collect(workers, timeout_s)
        if not any(isinstance(report, str) for report in reports):
            for worker in workers:
                worker.connection.send("clean up")
            problems = _collect(workers, timeout_s)
            if _WORN in problems:
                pool.discard(world_size)
                problems = [b"" if problem == _WORN else problem for problem in problems]
            reports = [problem or report for problem, report in zip(problems, reports, strict=True)]
    except BaseException:  # Ctrl-C in the middle of a run leaves the workers in an unknown state
        pool.discard(world_size)
        raise
    failures = [f"rank {rank}: {report}" for rank, report in enumerate(reports) if isinstance(report, str)]
    if failures:
        pool.discard(world_size)
        raise AssertionError("\n".join([f"{len(failures)} of {world_size} ranks failed", *failures]))
    shutil.rmtree(folder, ignore_errors=True)
    return [pickle.loads(report) for report in reports if isinstance(report, bytes)]


def _collect(workers: list[_Worker], timeout_s: float) -> list[bytes | str]:
    """Wait for every worker: bytes are a pickled result, text says what went wrong."""
    reports: dict[int, bytes | str] = {}
    deadline = time.monotonic() + timeout_s + _DUMP_S
    while len(reports) < len(workers):
        waiting = [rank for rank in range(len(workers)) if rank not in reports]
        handles = {workers[rank].connection: rank for rank in waiting}
        ready = multiprocessing.connection.wait(list(handles), max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in waiting:
                reports[rank] = _describe_hang(workers[rank], timeout_s)
            break
        for connection in ready:
            rank = handles[connection]  # type: ignore[index]
            try:
                reports[rank] = workers[rank].connection.recv()
            except (EOFError, ConnectionError):
                workers[rank].process.join()
                reports[rank] = f"died with exit code {workers[rank].process.exitcode}\n{_tail(workers[rank].log)}"
            if isinstance(reports[rank], str):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return [reports[rank] for rank in range(len(workers))]


def _describe_hang(worker: _Worker, timeout_s: float) -> str:
    if not worker.stacks.read_bytes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, signal.SIGUSR1)
    for _ in range(500):  # written within milliseconds by a handler in C, once the rank is scheduled
        if b"File" in worker.stacks.read_bytes():
            break
        time.sleep(0.02)
    stacks = worker.stacks.read_text(errors="replace")
    return f"still running when its time was up (limit {timeout_s:g} s). Its stacks:\n{stacks}\n{_tail(worker.log)}"


def _tail(path: Path, num_chars: int = 4000) -> str:
    text = path.read_text(errors="replace")
    crash = text.rfind(_CRASH)
    if crash >= 0:  # which thread crashed stands first, and a corrupt frame's name may be longer than all else
        why = text[max(0, crash - 500) : crash]  # what libc, or C++, says of it
        text = why + "\n".join(line[:200] for line in text[crash:].splitlines())[: 2 * num_chars]
    else:
        text = text[-num_chars:]
    return f"--- its output ---\n{text}" if text.strip() else "(it printed nothing)"


def _serve(connection: multiprocessing.connection.Connection, log: str, stacks: str) -> None:
    """Body of a worker process: one order after the other, until the other side hangs up."""
    log_file, stacks_file = (open(path, "ab", buffering=0) for path in (log, stacks))  # noqa: SIM115 (kept open)
    os.dup2(log_file.fileno(), 1)
    os.dup2(log_file.fileno(), 2)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    import torch

    torch.set_num_threads(1)
    find_entry_points_once()
    _fill_what_nobody_wrote()
    _keep_dumping_stacks()
    pristine = _Pristine()
    connection.send("ready")
    while True:
        try:
            order: _Order = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        # Stacks when the process dies, when the time is up, and on SIGUSR1, for those who wait for a rank that failed.
        # For each order anew: a test may have handled SIGUSR1 itself.
        _dump_stacks(order.timeout_s, stacks_file, log_file)
        try:
            report: bytes | str = _obey(order)
        except BaseException:  # noqa: BLE001 (pytest.fail and SystemExit are results of a test, too)
            report = traceback.format_exc() + _tail(Path(log))
        faulthandler.cancel_dump_traceback_later()
        connection.send(report)
        # The caller answers when every rank has reported: none leaves the group while another still talks to it, and
        # a peer that is gone does not hide why. No answer comes after a failure.
        try:
            connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        _dump_stacks(order.timeout_s, stacks_file, log_file)
        try:
            pristine.restore()
            cleaned: bytes | str = _WORN if _num_threads() > _MOST_THREADS else b""
        except Exception:  # noqa: BLE001 (whatever it was, it is the test's failure)
            cleaned = "clean-up after the test failed:\n" + traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        connection.send(cleaned)


def _dump_stacks(timeout_s: float, stacks_file: Any, log_file: Any) -> None:
    """Write this process's stacks when it dies, when its time is up, and on SIGUSR1."""
    stacks_file.truncate(0)
    faulthandler.disable()  # or the next line would leave a lost handler lost
    faulthandler.enable(log_file)
    faulthandler.dump_traceback_later(timeout_s, file=stacks_file)
    faulthandler.register(signal.SIGUSR1, stacks_file, all_threads=True)


def _obey(order: _Order) -> bytes:
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    os.environ.clear()
    os.environ.update(order.env)
    os.chdir(order.cwd)
    sys.path[:] = order.sys_path
    tell_lightning_its_rank(order.rank)
    task: _Task = pickle.loads(order.task)
    if order.group_timeout_s is not None:
        store = FileStore(f"{order.folder}/store", order.world_size)  # a file needs no free port
        timeout = timedelta(seconds=order.group_timeout_s)
        dist.init_process_group("gloo", store=store, rank=order.rank, world_size=order.world_size, timeout=timeout)
    result = task.fn(*task.args)
    return pickle.dumps(result)  # plain pickle: tensors go by value, not as shared memory of a process that may die


def _fill_what_nobody_wrote() -> None:
    """Let memory hold NaN (integers: the largest) until it is written, so that a test that reads it fails each time.

    torch does so while algorithms are to be deterministic, and each Trainer says that they need not be: here, what has
    no such algorithm then only warns.
    """
    import torch

    really = torch.use_deterministic_algorithms

    def use(mode: bool, *, warn_only: bool = False) -> None:
        really(True, warn_only=warn_only or not mode)

    torch.use_deterministic_algorithms = use
    use(False)


def _keep_dumping_stacks() -> None:
    """Keep the handlers that write stacks: a Trainer "restores" those that are not Python's to their default."""
    really = signal.signal
    of_faults = {signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGUSR1}

    def set_handler(number: int, handler: Any) -> Any:
        if number in of_faults and handler is signal.SIG_DFL and signal.getsignal(number) is signal.SIG_DFL:
            return handler
        return really(number, handler)

    signal.signal = set_handler  # type: ignore[assignment]


class _Pristine:
    """The process-wide state before any test, to be put back after each."""

    def __init__(self) -> None:
        import torch

        self.handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
        self.linear = torch.nn.functional.linear
        self.num_modules = 0
        self.collect()

    def collect(self) -> None:
        """Free what a test left: each group that lives on has three threads, which wake up a hundred times a second."""
        gc.collect()
        if len(sys.modules) > self.num_modules + 20:  # what was imported stays, and need not be looked at every time
            gc.freeze()
            self.num_modules = len(sys.modules)

    def restore(self) -> None:
        import torch
        import torch.distributed as dist

        reset_singletons()
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget_meshes()
        self.collect()
        for number, handler in self.handlers.items():
            if handler is not None and number != signal.SIGUSR1:  # SIGUSR1 is the watchdog's
                signal.signal(number, handler)
        torch.nn.functional.linear = self.linear  # DeepSpeed's ZeRO-3 puts one of its own there, which rounds otherwise
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
        torch.manual_seed(0)


def _num_threads() -> int:
    """Return the number of this process's threads, those of C++ libraries among them; 0 where nobody says."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0


def reset_singletons() -> None:
    """Forget everything that accelight and Lightning remember of the last run in this process."""
    from accelight.state import reset_state

    reset_state()
    tell_lightning_its_rank(0)
    _forget_deepspeed()


def _forget_meshes() -> None:
    """Drop what DTensor caches by mesh: an equal mesh would get the groups of an earlier one, which are gone."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    getattr(_redistribute, "_planner_cache", {}).clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def _forget_deepspeed() -> None:
    """Drop DeepSpeed's process groups, which die with torch's; its accelerator and its compiled ops stay."""
    registry = sys.modules.get("accelight.strategies.deepspeed.engine")
    while registry is not None and registry._ENGINES:
        registry._ENGINES.popitem()[0].destroy()
    comm, groups = (sys.modules.get(f"deepspeed.{name}") for name in ("comm.comm", "utils.groups"))
    if comm is not None:
        vars(comm)["cdb"] = None
    for name, value in vars(groups).items() if groups is not None else ():
        if name.startswith("_") and name.isupper():
            setattr(groups, name, {} if isinstance(value, dict) else value if isinstance(value, str) else None)


def find_entry_points_once() -> None:
    """Let each Trainer find the installed packages' callbacks without reading every package's description again."""
    for package in ("lightning.fabric", "lightning_fabric"):
        registry = sys.modules.get(f"{package}.utilities.registry")
        if registry is not None:
            vars(registry).update(entry_points=functools.cache(importlib.metadata.entry_points))


def tell_lightning_its_rank(rank: int) -> None:
    """Set what Lightning reads from the environment once, when it is imported: before any test."""
    module = sys.modules.get("lightning_utilities.core.rank_zero")
    if module is not None:
        module.rank_zero_only.rank = rank
