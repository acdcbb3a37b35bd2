"""Sections of a run: the one that a process is in, the time it spends there, and the one in which it has failed.

The Trainer reports each hook, and each batch that it waits for, to its profiler. `SectionClock` listens, and adds up
the time between two reports for the innermost action that is open, so that no second is counted twice. Another
thread can read it at any time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from time import perf_counter
from types import TracebackType

import torch
from torch import Tensor

from ...state.rendezvous import is_cause, text_of
from ..sharded_tensors.shards import local_part
from ..upstream.lightning import Callback, PassThroughProfiler, Profiler, Trainer
from ..upstream.patches import Patches
from .grads import gradients_of, parameters_of

SECTIONS = ("data", "forward", "backward", "optimizer", "hooks", "validation", "save", "setup", "between hooks")
"""The groups of actions, in the order of tables."""
MICRO_BATCH = "run_training_batch"
"""The action that encloses a micro-batch."""
_COMPUTE = ("forward", "backward", "optimizer", "hooks", "between hooks")
PARTS = {"data": ("data",), "compute": _COMPUTE, "validation": ("validation",), "save": ("save",)}
"""Sections whose times processes are compared by: a slow loader, a slow processor, a slow disk."""

_BY_HOOK = {
    **dict.fromkeys(["training_step"], "forward"),
    **dict.fromkeys(["backward", "on_before_backward", "on_after_backward"], "backward"),
    **dict.fromkeys(["save_checkpoint", "on_save_checkpoint"], "save"),
    **dict.fromkeys(
        [
            *("optimizer_step", "on_before_optimizer_step", "configure_gradient_clipping", "lr_scheduler_step"),
            *("on_before_zero_grad", "optimizer_zero_grad"),
        ],
        "optimizer",
    ),
    **dict.fromkeys(
        [
            *("train_dataloader_next", "batch_to_device", "transfer_batch_to_device", "train_dataloader"),
            *("on_before_batch_transfer", "on_after_batch_transfer"),
        ],
        "data",
    ),
    **dict.fromkeys(
        [
            *("setup", "prepare_data", "configure_model", "configure_optimizers", "configure_callbacks", "teardown"),
            *("on_load_checkpoint", "load_state_dict", "on_fit_start", "on_fit_end"),
        ],
        "setup",
    ),
}
_IN_EVALUATION = ("validation", "sanity", "val_", "test_", "predict")


@functools.cache
def section_of(action: str) -> str:
    """Return the one of `SECTIONS` that an action of Lightning's profilers belongs to."""
    hook = action.rpartition(".")[2]
    if hook in _BY_HOOK:
        return _BY_HOOK[hook]
    if any(part in hook for part in _IN_EVALUATION):
        return "validation"
    return "hooks" if action.startswith("[") else "between hooks"


class Action:
    """One action of the clock, as a context; all times in seconds."""

    __slots__ = ("_clock", "count", "longest", "name", "seconds", "section")

    def __init__(self, clock: SectionClock, name: str) -> None:
        self._clock = clock
        self.name, self.section = name, section_of(name)
        self.count = 0
        """The number of times it has begun."""
        self.seconds = 0.0
        """All time in it, without what other actions inside of it took."""
        self.longest = 0.0
        """Longest time between two reports since someone has set this to zero."""

    def __enter__(self) -> None:
        clock = self._clock
        clock.count()
        self.count += 1
        clock.open.append(self)

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        clock = self._clock
        if clock.count() is self:
            del clock.open[-1]
        else:
            clock.close(self)


class _MicroBatch(Action):
    """The action that encloses a micro-batch; as one begins, the times of the one before are complete."""

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        self._clock.note_micro_batch()


@dataclass
class Spread:
    """Seconds of each micro-batch that spent time in one of `PARTS`, without waits for others."""

    count: int = 0
    """Of these micro-batches."""
    total: float = 0.0
    squares: float = 0.0
    """Sum of the squares of their seconds."""

    def add(self, spent: float) -> None:
        """Add one micro-batch."""
        self.count += 1
        self.total += spent
        self.squares += spent * spent

    def since(self, before: Spread) -> Spread:
        """Return the difference to an earlier state."""
        return Spread(self.count - before.count, self.total - before.total, self.squares - before.squares)

    def error(self) -> float:
        """Return the standard error of `total`: how far chance moves it where each micro-batch is drawn alike."""
        if self.count < 2:
            return 0.0
        deviations = max(0.0, self.squares - self.total**2 / self.count)
        return math.sqrt(deviations * self.count / (self.count - 1))


class SectionClock:
    """Counts what the Trainer reports to its profiler.

    Args:
        profiler: The Trainer's.
        patches: What replaces the profiler's methods, until it is removed.
    """

    def __init__(self, profiler: Profiler, patches: Patches) -> None:
        self.actions: dict[str, Action] = {}
        self.open: list[Action] = [Action(self, "between hooks")]
        """The actions under way, outermost first; never empty."""
        self.since = perf_counter()
        """When an action has begun or ended last, by ``time.perf_counter()``; another value after each."""
        self.waited: dict[str, float] = dict.fromkeys(SECTIONS, 0.0)
        """By section: in which the process waited for others, in seconds. The thread that observes adds to it."""
        self.spreads = {part: Spread() for part in PARTS}
        self._noted = dict.fromkeys(PARTS, 0.0)
        self._profiler = profiler.profile, profiler.start, profiler.stop
        patches.put(profiler, "profile", self.action if isinstance(profiler, PassThroughProfiler) else self._profile)
        patches.put(profiler, "start", self._start)
        patches.put(profiler, "stop", self._stop)

    def count(self) -> Action:  # some eighty times a step
        """Count the time since the last report for the innermost action, and return it."""
        now = perf_counter()
        top = self.open[-1]
        spent = now - self.since
        top.seconds += spent
        if spent > top.longest:
            top.longest = spent
        self.since = now
        return top

    def action(self, name: str) -> Action:
        """Return the action of this name, the same at each call."""
        found = self.actions.get(name)
        if found is None:
            found = self.actions[name] = (_MicroBatch if name == MICRO_BATCH else Action)(self, name)
        return found

    def seconds(self) -> dict[str, float]:
        """Return the time in each section that has been entered; any thread may ask."""
        found: dict[str, float] = {}
        for action in self.all_actions():
            found[action.section] = found.get(action.section, 0.0) + action.seconds
        return found

    def note_micro_batch(self) -> None:
        """Add what has passed since the last call to `spreads`."""
        seconds = self.seconds()
        for part, sections in PARTS.items():
            spent = sum(seconds.get(name, 0.0) - self.waited[name] for name in sections)
            if spent != self._noted[part]:
                self.spreads[part].add(spent - self._noted[part])
                self._noted[part] = spent

    def close(self, action: Action) -> None:
        """Close an action, and those in it whose end Lightning has not reported: a loader raised StopIteration."""
        if action in self.open[1:]:
            while self.open.pop() is not action:
                pass

    def all_actions(self) -> list[Action]:
        """Return every action so far; for other threads."""
        return [self.open[0], *self.actions.copy().values()]

    @contextmanager
    def _profile(self, name: str) -> Iterator[str]:
        profile, _, _ = self._profiler
        found = self.action(name)
        with profile(name), nullcontext() if self.open[-1] is found else found:  # most call `start` themselves
            yield name

    def _start(self, name: str) -> None:
        _, start, _ = self._profiler
        start(name)
        found = self.action(name)
        if self.open[-1] is found:
            self.close(found)
        found.__enter__()

    def _stop(self, name: str) -> None:
        _, _, stop = self._profiler
        self.action(name).__exit__()
        stop(name)


# ------------------------------------------------------------------------------------------------
# Tables of all processes.


CHANCE = 2.5
"""A difference between processes that is less than so many of its standard errors counts as none.

Three reports in a row exceed it by chance about once in four million. A loader whose rare pauses fall on the processes
at random is no slow loader.
"""


@dataclass(frozen=True)
class Timings:
    """The time that each process has spent in each section, per micro-batch."""

    step: int
    """``trainer.global_step`` of process 0 at the end of the window."""
    hosts: Sequence[str]
    """Of each process."""
    num_batches: Sequence[int]
    """Micro-batches of each process in the window."""
    seconds: Mapping[str, Sequence[float]]
    """By section: of each process, per micro-batch."""
    waited: Mapping[str, Sequence[float]]
    """The part of ``seconds`` in which the process waited for others in a collective, estimated from samples."""
    errors: Mapping[str, Sequence[float]]
    """By part (`PARTS`): the standard error of each process's `work`, from how its micro-batches differ."""

    def work(self, part: str) -> list[float]:
        """Return the seconds per micro-batch of each process in one of `PARTS`, without waits for others."""
        sections = [name for name in PARTS[part] if name in self.seconds]
        ranks = range(len(self.hosts))
        return [sum(max(0.0, self.seconds[one][rank] - self.waited[one][rank]) for one in sections) for rank in ranks]

    def factors(self, part: str) -> list[float]:
        """Return each process's work in a part, divided by the median of all processes.

        A difference of less than a twentieth of a micro-batch, or than `CHANCE` explains, counts as none. Of two
        processes the faster one is the median.
        """
        work, errors = self.work(part), self.errors[part]
        median = statistics.median_low(work)
        of_median = errors[work.index(median)]
        least = 0.05 * max(sum(one[rank] for one in self.seconds.values()) for rank in range(len(self.hosts)))
        return [
            one / max(median, 1e-9) if one - median > max(least, CHANCE * math.hypot(error, of_median)) else 1.0
            for one, error in zip(work, errors, strict=True)
        ]

    def to_json(self) -> str:
        """Return it as text, for `from_json`."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Timings:
        """Return what `to_json` wrote.

        Raises:
            ValueError: If the text is something else.
        """
        try:
            return cls(**dict(json.loads(text)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"These are no timings of a Watchdog: {error}") from None

    def __str__(self) -> str:
        shown = [name for name in SECTIONS if any(self.seconds.get(name, ()))]
        header = ["process", "host", *shown, "waits", "all"]
        rows = [header]
        for rank, host in enumerate(self.hosts):
            own = [self.seconds[name][rank] for name in shown]
            waits = sum(one[rank] for one in self.waited.values())
            rows.append([f"{rank}", host, *(f"{1e3 * one:.2f}" for one in [*own, waits, sum(own)])])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        title = f"Milliseconds per micro-batch up to step {self.step}; waits for other processes are part of sections."
        slow = [
            f"Process {rank} ({self.hosts[rank]}) needs {factor:.1f} times the median for {part}."
            for part in PARTS
            for rank, factor in enumerate(self.factors(part))
            if factor > 1.0
        ]
        return "\n".join([title, *lines, *slow])


class TimingCallback(Callback):
    """A callback that strategies ask for the timings of a run."""

    def timings(self) -> Timings:
        """Return the present table."""
        raise NotImplementedError


# ------------------------------------------------------------------------------------------------
# The section in which a process has failed, read from the traceback: a step pays nothing for it.

_IN_WORDS = {
    "setup": "in setup()",
    "configure_model": "in configure_model()",
    "training_step": "in the forward",
    "backward": "in the backward",
    "optimizer_step": "in the optimizer step",
    "validation_step": "in validation",
    "test_step": "in a test",
    "predict_step": "in a prediction",
    "save_checkpoint": "in a save",
}
"""By the names of functions, the user's, Lightning's and ours: the innermost one in a traceback says what failed."""
_SIGNS = (
    "OutOfMemoryError",  # in a report of another error
    "out of memory",  # of CUDA, HIP, XPU and MPS
    "DefaultCPUAllocator: can't allocate memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",  # as Lightning and Accelerate have it
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that this process has too little memory, on the device or of the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS) and is_cause(error)


def describe_failure(error: BaseException, trainer: Trainer | None, device: torch.device) -> str:
    """Return the failed section, and the peak of memory if there was too little, as words after "process 1"."""
    text = f"failed with {text_of(error)}"
    if trainer is not None:
        stage = str(trainer.state.stage.name).lower().replace("_", " ")  # type: ignore[union-attr]
        section = _section(error.__traceback__) or f"while {stage}"
        batch_idx = trainer.fit_loop.epoch_loop.batch_idx  # -1 before the first
        batch = f", batch {batch_idx}" if trainer.training and batch_idx >= 0 else ""
        place = f"{trainer.global_step} (epoch {trainer.current_epoch}{batch})"
        text = f"failed {section} at step {place} with {text_of(error)}"
    if not is_out_of_memory(error):
        return text
    parts = "" if trainer is None else _at_rest(trainer)
    return (
        f"{text.rstrip('.')}. Its memory peaked at {_peak(device)}{parts}. Resume from the last checkpoint with "
        "smaller batches, or with more accumulation; 'accelight plan' lists what a process needs."
    )


def _section(frames: TracebackType | None) -> str:
    found = ""
    while frames is not None:
        found = _IN_WORDS.get(frames.tb_frame.f_code.co_name, found)
        frames = frames.tb_next
    return found


def _at_rest(trainer: Trainer) -> str:
    """Return the bytes that a process holds between steps, which smaller batches do not change."""
    found, counted = {"weights": 0, "gradients": 0, "optimizer state": 0}, set[int]()

    def count(part: str, *tensors: object) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = local_part(getattr(tensor, "ds_tensor", tensor)).untyped_storage()
                if storage.data_ptr() not in counted:
                    counted.add(storage.data_ptr())
                    found[part] += storage.nbytes()

    with contextlib.suppress(Exception):  # a run may fail in the middle of setting these up
        parameters = list(trainer.lightning_module.parameters())
        count("weights", *parameters)
        count("gradients", *gradients_of(parameters))
        for optimizer in trainer.optimizers:
            count("optimizer state", *parameters_of(optimizer))
            count("optimizer state", *(value for state in optimizer.state.values() for value in state.values()))
    sizes = [f"{what} {num_bytes / 2**30:.2f} GiB" for what, num_bytes in found.items() if num_bytes]
    return f", of which it held {', '.join(sizes)} when it failed" if sizes else ""


def _peak(device: torch.device) -> str:
    with contextlib.suppress(ImportError, RuntimeError):  # Windows has no `resource`, some devices have no statistics
        if device.type != "cpu":
            used, kept = torch.accelerator.max_memory_allocated(device), torch.accelerator.max_memory_reserved(device)
            return f"{used / 2**30:.2f} GiB in tensors on {device}, {kept / 2**30:.2f} GiB with what torch keeps"
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.2f} GiB of resident memory"
    return "an unknown size"
