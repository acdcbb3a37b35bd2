"""`find_executable_batch_size`: a function is tried with smaller and smaller batches, on all ranks with the same.

[Note: fresh groups] A rank that runs out of memory leaves the others in a collective that nothing ends but the end of
its connections, and gloo makes no new ones for a group. So after such an attempt all ranks meet on the store, and the
next one begins with a new default group on the same store. What belongs to the old group, as sharded parameters do,
is of no use to it: the function builds everything anew.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import torch
import torch.distributed as dist

from ..state.deadlocks import watch_for_deadlocks, watch_of_live_group
from ..state.process_group import backends_by_device, group_store, live_group, timeout_of
from ..state.rendezvous import is_cause, report_missing_ranks, text_of
from ..state.store import Channel, leave_now
from .common.sections import is_out_of_memory

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)


class _Attempts(Channel):
    """The outcomes of all ranks. Waits for them cannot be interrupted, as others in this group may have been."""

    def agree(self, *outcome: Any) -> list[list[Any]]:
        """Return what each rank gives."""
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
            _free_memory()
            _renew_group(batch_size, smaller)
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


def _free_memory() -> None:
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _renew_group(batch_size: int, smaller: int) -> None:
    """Replace the default group by one whose connections work: see [Note: fresh groups]."""
    group = live_group()
    if group is None or group.size() == 1:
        return
    backends = backends_by_device(group)
    if set(backends.values()) != {"gloo"}:
        raise RuntimeError(
            f"A process has run out of memory with a batch size of {batch_size}, and collectives of "
            f"{', '.join(sorted(set(backends.values()) - {'gloo'}))} cannot be ended to try a smaller one in these "
            f"processes. Start again with starting_batch_size={smaller}."
        )
    if (watch := watch_of_live_group()) is not None:
        watch.shut_down()  # else what some have begun and others have not would keep the group from ending
        watch.close()
    leave_now(group)
    config, rank, size, timeout = dist.get_backend_config(group), group.rank(), group.size(), timeout_of(group)
    store = group_store(f"accelight/after/{batch_size}")
    dist.destroy_process_group()
    dist.init_process_group(config, store=store, rank=rank, world_size=size, timeout=timeout)
