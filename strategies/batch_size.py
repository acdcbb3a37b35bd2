"""Batch sizes that fit, which all ranks try together: `find_executable_batch_size`, and `Tuner` for a Trainer.

[Note: fresh groups] A rank that runs out of memory leaves the others in a collective that nothing ends but the end of
its connections, and gloo makes no new ones for a group. So after such an attempt all ranks meet on the store, and the
next one begins with a new default group on the same store. What belongs to the old group, as sharded parameters do,
is of no use to it: each attempt builds everything anew, `Tuner` from copies of what has not run.
"""

from __future__ import annotations

import copy
import functools
import gc
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import torch
import torch.distributed as dist
from typing_extensions import override

from ..state.deadlocks import watch_for_deadlocks, watch_of_live_group
from ..state.process_group import backends_by_device, group_store, live_group, timeout_of
from ..state.rendezvous import is_cause, report_missing_ranks, text_of
from ..state.store import Channel, leave_now
from .common.sections import is_out_of_memory
from .upstream import lightning
from .upstream.lightning import (
    DummyLogger,
    LightningDataModule,
    LightningModule,
    Trainer,
    isolate_rng,
    rank_zero_info,
)

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)


class _Attempts(Channel):
    """The outcomes of all ranks. Waits for them cannot be interrupted, as others in this group may have been."""

    def agree(self, *outcome: Any) -> list[list[Any]]:
        """Return the value of each rank."""
        keys = [f"{self.num_uses}/{rank}" for rank in range(self._num_ranks)]
        self.num_uses += 1
        self._store.set(keys[self._rank], json.dumps(outcome))
        deadline = time.monotonic() + self.timeout_s()
        while not all(self._store.check([key]) for key in keys):
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise RuntimeError(
                    f"Process {', '.join(map(str, missing))} has not ended its attempt {self.timeout_s():g} s after "
                    f"process {self._rank}. Start again with a smaller starting_batch_size."
                )
            time.sleep(0.05)
        return [json.loads(self._store.get(key)) for key in keys]


@overload
def find_executable_batch_size(
    function: Callable[Concatenate[int, P], R],
    starting_batch_size: int = ...,
    reduce_batch_size_fn: Callable[[], int] | None = ...,
) -> Callable[P, R]: ...


@overload
def find_executable_batch_size(
    function: None = ...,
    starting_batch_size: int = ...,
    reduce_batch_size_fn: Callable[[], int] | None = ...,
) -> Callable[[Callable[Concatenate[int, P], R]], Callable[P, R]]: ...


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Run a function with smaller and smaller batches until no process runs out of memory.

    ::

        @find_executable_batch_size(starting_batch_size=128)
        def train(batch_size):
            trainer = Trainer(strategy="accel_fsdp2", devices=4)
            trainer.fit(MyModule(), DataLoader(dataset, batch_size))

        train()

    As Accelerate's decorator, and also on several processes: where one of them runs out of memory, all end the attempt
    and try the same smaller size. Any other exception of one process ends the function on all of them. The function
    has to make everything that it trains: modules, optimizers, loaders and the Trainer. It may load a checkpoint.

    On several processes it tries again over gloo. Collectives of other backends cannot be ended safely: there
    every process raises `RuntimeError` with the size to start again with.

    Args:
        function: Takes the batch size of this process as its first argument.
        starting_batch_size: The first size.
        reduce_batch_size_fn: Returns the next size, the same on every process; default: 0.9 of the one before.

    Returns:
        The function without its first argument. It raises `RuntimeError` where no size is left.

    Source: accelerate 1.15 ``utils/memory.py`` (``find_executable_batch_size``).
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    if starting_batch_size < 1:
        raise ValueError(f"starting_batch_size must be >= 1, got {starting_batch_size}.")
    batch_size = starting_batch_size

    @functools.wraps(function)
    def attempts(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        while True:
            fits, result = _attempt(functools.partial(function, batch_size, *args, **kwargs), batch_size)
            if fits:
                return result
            smaller = int(batch_size * 0.9) if reduce_batch_size_fn is None else int(reduce_batch_size_fn())
            if not 1 <= smaller < batch_size:
                raise RuntimeError(
                    f"No executable batch size found: {batch_size} is too large, and {smaller} would be next. Shard or "
                    "offload more; 'accelight plan' lists what a process needs."
                )
            _renew_group(batch_size, f"Start again with starting_batch_size={smaller}.")
            _log.info("Out of memory with a batch size of %d; the next attempt has %d.", batch_size, smaller)
            batch_size = smaller

    return attempts


def _attempt(run: Callable[[], Any], batch_size: int) -> tuple[bool, Any]:
    """Return whether memory sufficed on all ranks, and this rank's result."""
    result, error, name = None, None, ""
    group = live_group()
    if group is not None and (watch := watch_for_deadlocks(group)) is not None:
        name = f"accelight/attempt/{_Attempts.of(group, 'attempts').num_uses}"
        watch.runs.add(name)
    try:
        result = run()
    except Exception as caught:  # noqa: BLE001 (raised below, once all have ended the attempt)
        error = caught
        report_missing_ranks(error, name)
    finally:
        if watch_now := watch_of_live_group():
            watch_now.runs.discard(name)
    too_large = error is not None and is_out_of_memory(error)
    group = live_group()  # the first attempt may have started it
    if group is None or (watch := watch_for_deadlocks(group)) is None:
        if error is not None and not too_large:
            raise error
        return error is None, result
    kind = "fits" if error is None else "too large" if too_large else "other" if is_cause(error) else "consequence"
    watch.publish_connections()
    outcomes = _Attempts.of(group, "attempts").agree(batch_size, kind, "" if error is None else text_of(error))
    kinds = {kind for _, kind, _ in outcomes}
    if len({size for size, _, _ in outcomes}) == 1 and (
        kinds == {"fits"} or ("too large" in kinds and "other" not in kinds)
    ):
        return kinds == {"fits"}, result
    if error is not None and not too_large:
        raise error
    raise RuntimeError(
        "An attempt has failed: "
        + "; ".join(
            f"process {rank}, batch size {size}: {text or kind}" for rank, (size, kind, text) in enumerate(outcomes)
        )
    ) from error


def _renew_group(batch_size: int, advice: str) -> None:
    """Free memory, and replace the default group by one whose connections work: see [Note: fresh groups]."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    group = live_group()
    if group is None or group.size() == 1:
        return
    backends = backends_by_device(group)
    if set(backends.values()) != {"gloo"}:
        raise RuntimeError(
            f"A process has run out of memory with a batch size of {batch_size}, and collectives of "
            f"{', '.join(sorted(set(backends.values()) - {'gloo'}))} cannot be ended to go on in these processes. "
            f"{advice}"
        )
    if (watch := watch_of_live_group()) is not None:
        watch.shut_down()  # else what some have begun and others have not would keep the group from ending
        watch.close()
    leave_now(group)
    config, rank, size, timeout = dist.get_backend_config(group), group.rank(), group.size(), timeout_of(group)
    store = group_store(f"accelight/after/{batch_size}")
    dist.destroy_process_group()
    dist.init_process_group(config, store=store, rank=rank, world_size=size, timeout=timeout)


# ------------------------------------------------------------------------------------------------
# The largest batch size for a Trainer that has not run.

Method = Literal["fit", "validate", "test", "predict"]
_BATCHES: dict[Method, str] = {"fit": "training", "validate": "val", "test": "test", "predict": "predict"}
"""The Trainer's name for a method's batches."""


class Tuner(lightning.Tuner):
    """Lightning's `Tuner`, whose `scale_batch_size` also works over several processes, with every strategy.

    ::

        trainer = Trainer(strategy="accel_fsdp2", devices=4)
        batch_size = Tuner(trainer).scale_batch_size(module, datamodule=data, mode="binsearch")
        trainer.fit(module, datamodule=data)                # trains with that size

    Args:
        trainer: It has not run yet; its first run comes after the search.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.trainer: Any = trainer

    @override
    def scale_batch_size(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        method: Method = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Find the largest batch size of a process with which no process runs out of memory, and set it.

        Every process calls it. A trial runs a few steps with copies of the module and of the Trainer, so that both,
        and the random numbers of the run that follows, are as without a search; loggers and callbacks take no part.
        Where one process runs out of memory, the trial ends on all of them. Under ``method="fit"`` a trial runs
        validation, too, if there is one.

        Over gloo, the next trial begins in the same processes. Collectives of other backends cannot be ended safely:
        there every process raises `RuntimeError` with the largest size that fitted, at the first that does not.

        Args:
            model: Has the batch size as an attribute or in its ``hparams``, if ``datamodule`` does not, and makes the
                loaders if there is no ``datamodule``.
            train_dataloaders: None, or the data module.
            val_dataloaders: None.
            dataloaders: None, or the data module.
            datamodule: Makes the loaders. It is not copied: each trial calls its ``setup()``.
            method: What of the Trainer runs.
            mode: "power" doubles the size until one does not fit; "binsearch" then looks between the last two.
            steps_per_trial: Optimizer steps of a trial, or batches of an evaluation.
            init_val: The first size. If it does not fit, smaller ones are tried.
            max_trials: So many trials at most.
            batch_arg_name: The name of the attribute.
            margin: By what fraction a size that "binsearch" has found is reduced.
            max_val: No larger size is tried.

        Returns:
            The batch size; None under ``Trainer(fast_dev_run=True)``, which has no search.

        Raises:
            ValueError: For arguments that are not as above.
            RuntimeError: If the Trainer has run before, or if no size fits.

        Source: Lightning 2.6 ``tuner/tuning.py``, which refuses distributed strategies.
        """
        given = [each for each in (train_dataloaders, val_dataloaders, dataloaders) if each is not None]
        if datamodule is None and len(given) == 1 and isinstance(given[0], LightningDataModule):
            datamodule, given = given.pop(), []
        search = _Search(mode, init_val, max_trials, max_val, margin)
        self._check(method, given, steps_per_trial)
        if self.trainer.fast_dev_run:
            rank_zero_info("There is no search for a batch size under Trainer(fast_dev_run=True).")
            return None
        with _BatchSize(batch_arg_name, model, datamodule).restored_on_error() as batch_size:
            while (size := search.next_size) is not None:
                batch_size.set(size)
                trial = functools.partial(self._try, model, datamodule, method, steps_per_trial)
                with isolate_rng():
                    fits, usable = _attempt(trial, size)
                search.note(fits and usable.has_batches, may_grow=fits and usable.may_grow)
                if not fits:
                    _renew_group(size, search.summary())
                rank_zero_info(search.progress())
            found = search.found()
            batch_size.set(found)
        return found

    def _check(self, method: str, loaders: list[Any], steps_per_trial: int) -> None:
        if method not in _BATCHES:
            raise ValueError(f"method must be one of {', '.join(_BATCHES)}, got {method!r}.")
        if loaders:
            raise ValueError(
                "scale_batch_size() cannot change the batch size of loaders that exist. Let the module, or a "
                "LightningDataModule, make them with its batch_size."
            )
        if steps_per_trial < 1:
            raise ValueError(f"steps_per_trial must be >= 1, got {steps_per_trial}.")
        if self.trainer.state.fn is not None:
            raise RuntimeError(
                "scale_batch_size() needs a Trainer that has not run. Call it first, or on a new Trainer."
            )

    def _try(self, model: LightningModule, datamodule: Any, method: Method, steps: int) -> _Usable:
        """Run a few steps with copies."""
        trainer: Any = self._copy_of_trainer()
        if method == "fit":
            trainer.fit_loop.epoch_loop.max_steps, trainer.limit_train_batches = steps, 1.0
            if trainer.limit_val_batches:
                trainer.limit_val_batches = trainer.num_sanity_val_steps = steps
        else:
            # The second batch shows that a larger one is possible.
            setattr(trainer, f"limit_{_BATCHES[method]}_batches", max(2, steps))
        module: Any = copy.deepcopy(model, {id(model._trainer): None})
        module.configure_callbacks = list
        getattr(trainer, method)(module, datamodule=datamodule)
        found = getattr(trainer, f"num_{_BATCHES[method]}_batches")
        num_batches = min(found, default=math.inf) if isinstance(found, list) else found
        agree = trainer.strategy.reduce_boolean_decision if live_group() is not None else bool
        return _Usable(bool(agree(num_batches > 0)), bool(agree(num_batches > 1)))

    def _copy_of_trainer(self) -> Trainer:
        trainer = self.trainer
        strategy, callbacks, loggers = trainer.strategy, trainer.callbacks, trainer.loggers
        copied = object.__new__(type(strategy))  # ours are copied without what the Trainer has given them
        memo: dict[int, Any] = {id(strategy): copied}
        trainer.callbacks, trainer.loggers = [], []
        try:
            vars(copied).update(copy.deepcopy(vars(strategy), memo))
            trial: Trainer = copy.deepcopy(trainer, memo)
            trial.loggers = [DummyLogger() for _ in loggers]
            return trial
        finally:
            trainer.callbacks, trainer.loggers = callbacks, loggers


@dataclass(frozen=True)
class _Usable:
    """The result of a trial, the same on all ranks."""

    has_batches: bool
    may_grow: bool


class _BatchSize:
    """An attribute, or a hyperparameter, of a module, of its data module, or of both."""

    def __init__(self, name: str, *owners: Any) -> None:
        self._name = name
        places = (place for each in owners if each is not None for place in (each, each.hparams))
        self._places = [place for place in places if hasattr(place, name)]
        if not self._places:
            raise ValueError(
                f"Neither the module nor a data module has {name!r} as an attribute or in its hparams. Set "
                f"self.{name} in its __init__ and use it in train_dataloader(), or give batch_arg_name=...."
            )

    def set(self, value: int) -> None:
        """Set it wherever it is."""
        for place in self._places:
            setattr(place, self._name, value)

    @contextmanager
    def restored_on_error(self) -> Iterator[_BatchSize]:
        """Leave the values that were there if the search fails."""
        before = [getattr(place, self._name) for place in self._places]
        try:
            yield self
        except BaseException:
            for place, value in zip(self._places, before, strict=True):
                setattr(place, self._name, value)
            raise


@dataclass
class _Search:
    """Chooses the next size from the results of the trials before it."""

    mode: str
    init_val: int
    max_trials: int
    max_val: int
    margin: float
    next_size: int | None = None
    """None at the end."""
    _fits: int = 0
    _too_large: float = math.inf
    _tried: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.mode not in ("power", "binsearch"):
            raise ValueError(f"mode must be 'power' or 'binsearch', got {self.mode!r}.")
        if not 0.0 <= self.margin < 1.0:
            raise ValueError(f"margin must be >= 0 and < 1, got {self.margin}.")
        for name in ("init_val", "max_trials", "max_val"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}.")
        self.next_size = min(self.init_val, self.max_val)

    def note(self, fits: bool, may_grow: bool) -> None:
        """Take the outcome of the trial with `next_size`."""
        assert self.next_size is not None
        self._tried.append(self.next_size)
        if fits:
            self._fits = self.next_size
        else:
            self._too_large = self.next_size
        is_last = len(self._tried) == self.max_trials or (fits and not may_grow)
        size = self._candidate()
        self.next_size = None if is_last or size in (0, *self._tried) else size

    def _candidate(self) -> int:
        if self._too_large == math.inf:
            return min(2 * self._fits, self.max_val)
        if self.mode == "power":
            return self._fits or int(self._too_large) // 2
        return (self._fits + int(self._too_large)) // 2

    def progress(self) -> str:
        """Return a line for the log."""
        size = self._tried[-1]
        outcome = "fits" if size == self._fits else "does not fit"
        return f"Batch size {size} {outcome}" + (f"; trying {self.next_size}." if self.next_size else ".")

    def summary(self) -> str:
        """Return the results so far."""
        if self._fits:
            return f"The largest batch size that has fitted is {self._fits}."
        return f"Of the batch sizes {', '.join(map(str, self._tried))} none has fitted."

    def found(self) -> int:
        """Return the size.

        Raises:
            RuntimeError: If none fits.
        """
        if not self._fits:
            raise RuntimeError(
                f"{self.summary()} Shard or offload more; 'accelight plan' lists what a process needs. A loader that "
                "drops its last batch may have none of this size."
            )
        reduced = int(self._fits * (1 - self.margin)) if self.mode == "binsearch" else self._fits
        return max(1, reduced)
