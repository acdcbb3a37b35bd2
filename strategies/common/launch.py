"""Launching: Lightning's launcher, launchers' variables, process groups, pickling of strategies, the run summary."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import Backend, BackendConfig
from typing_extensions import override

from ... import __version__
from ...state.process_group import backends_by_device, live_group, require_group, timeout_of
from ..upstream.lightning import Trainer, _SubprocessScriptLauncher, rank_zero_info, rank_zero_warn


class SubprocessScriptLauncher(_SubprocessScriptLauncher):
    """Sets ``LOCAL_WORLD_SIZE`` as torchrun does, so that `PartialState` knows its rank before the group exists."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        # Lightning asks in notebooks and interactive shells alone, and recommends DDP there.
        if self._alone:
            return True
        advice = (
            "Use devices=1, put model, Trainer and fit into a function and call accelight.strategies.notebook_launcher("
            f"function, num_processes={self.num_processes}), or run a script."
        )
        raise RuntimeError(
            f"A Trainer with {self.num_processes * self.num_nodes} processes starts the others by running the script "
            "again, and a notebook (or an interactive shell) has no script. "
            + (advice if self.num_nodes == 1 else f"Run a script on each of the {self.num_nodes} machines.")
        )

    @property
    def _alone(self) -> bool:
        return self.num_processes * self.num_nodes == 1

    @override
    def _call_children_scripts(self) -> None:
        # A process that is alone sets no variables: with LOCAL_RANK, a later Trainer of a notebook would believe that a
        # launcher has started it and all others.
        if not self._alone:
            os.environ["LOCAL_WORLD_SIZE"] = str(self.num_processes)
            super()._call_children_scripts()


def check_devices(num_devices: int, environment: Mapping[str, str] = os.environ) -> None:
    """Check that each process that torchrun has started on this machine has a device, with one result for all.

    More devices than processes are right: ``devices="auto"`` counts all GPUs.

    Raises:
        ValueError: If processes have no device.
    """
    size = environment.get("LOCAL_WORLD_SIZE", "")
    if "RANK" in environment and size.isdigit() and int(size) > num_devices:
        raise ValueError(
            f"Trainer(devices={num_devices}), but the launcher has started {size} processes on this machine "
            f"(LOCAL_WORLD_SIZE={size}). Use devices={size}, or start {num_devices}."
        )


# ------------------------------------------------------------------------------------------------
# Variables of Accelerate's launcher that the Trainer decides by itself: a warning names the one that counts.


PRECISION = "ACCELERATE_MIXED_PRECISION"
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
CLIPPING = "ACCELERATE_GRADIENT_CLIPPING"
_NOT_ASKED_FOR = {ACCUMULATION: 1, CLIPPING: 0}  # the launcher exports it by default, or it means nothing
_FLAGS = {"fp16": "16-mixed", "bf16": "bf16-mixed"}


def warn_of_other_precision(flag: str, mixed_precision: str, environment: Mapping[str, str] = os.environ) -> None:
    """Warn if the variable asks for another precision than that which is trained in.

    It cannot set it: a Trainer that was given no precision looks like one that was given ``"32-true"``.

    Args:
        flag: The Trainer's precision.
        mixed_precision: What that (or the plugin) means, in Accelerate's words.
        environment: The variables.
    """
    wanted = environment.get(PRECISION, "").lower() or "no"  # the launcher exports "no" where nobody asks for any
    wanted_flag = _FLAGS.get(wanted)
    same_dtype = wanted_flag is not None and flag.split("-")[0] == wanted_flag.split("-")[0]  # "bf16-true", say
    if wanted in ("no", mixed_precision) or same_dtype:
        return
    advice = "Unset the variable" + (f", or use Trainer(precision={wanted_flag!r})." if wanted_flag else ".")
    rank_zero_warn(
        f"{PRECISION}={environment[PRECISION]} has no effect: the Trainer's own precision, {flag!r}, is used. {advice}"
    )


def warn_if_overruled(variable: str, number: float, where: str, environment: Mapping[str, str] = os.environ) -> None:
    """Warn if a variable asks for another number than that which is trained with.

    Args:
        variable: `ACCUMULATION` or `CLIPPING`.
        number: Micro-batches for each optimizer step, or the largest norm of gradients.
        where: Who gives it.
        environment: The variables.
    """
    text = environment.get(variable, "").strip()
    try:
        wanted = float(text)
    except ValueError:  # not set, "none", "auto"
        return
    if wanted not in (number, _NOT_ASKED_FOR[variable]):
        rank_zero_warn(
            f"{variable}={text} has no effect: {where} takes precedence. Unset the variable, or set both to the same "
            "number."
        )


# ------------------------------------------------------------------------------------------------
# A strategy's arguments for a process group that may already exist.


def warn_ignored_process_group_args(timeout: timedelta | None, backend: str | None, instead: str) -> None:
    """Warn of arguments that have no effect on a process group that is there already.

    Args:
        timeout: Of collectives; torch's default counts as not given.
        backend: As for ``init_process_group``; None is not given.
        instead: What starts the group, and takes them.
    """
    group = live_group()
    if group is None:
        return
    late = []
    if timeout not in (None, default_pg_timeout) and timeout_of(group) != timeout:
        late.append(f"timeout={timeout} (it has {timeout_of(group)})")
    live = backends_by_device(group)
    wanted = {} if backend is None else BackendConfig(Backend(backend)).get_device_backend_map()
    if any(str(live.get(device)) != str(own) for device, own in wanted.items()):
        has = ",".join(f"{device}:{own}" for device, own in live.items())
        late.append(f"process_group_backend={backend!r} (it has {has!r})")
    if late:
        rank_zero_warn(
            f"The process group existed before the Trainer, so these have no effect: {'; '.join(late)}. Set them "
            f"where the group is created: {instead}."
        )


def check_offload(device: torch.device) -> None:
    """Check that what ``cpu_offload=True`` keeps in host memory can be reduced from there.

    Args:
        device: Where the model computes.

    Raises:
        ValueError: If it cannot: NCCL takes no CPU tensors.
    """
    backends = backends_by_device(require_group("cpu_offload=True"))
    check_offload_backends(device.type, backends)


def check_offload_backends(device_type: str, backends: dict[str, str]) -> None:
    """Check as `check_offload` does, with the backend of each device."""
    if device_type != "cpu" and "cpu" not in backends:
        has = ",".join(f"{device}:{own}" for device, own in backends.items())
        raise ValueError(
            f"cpu_offload=True reduces gradients in host memory, but the process group supports only {has!r}. Omit "
            f"process_group_backend, or create the group with backend='cpu:gloo,{has}'."
        )


# ------------------------------------------------------------------------------------------------
# Strategies are copied and pickled as the arguments that they were made with.
#
# Libraries keep what their users give the Trainer among the hyperparameters, and so in checkpoints: neuralforecast's
# ``save_hyperparameters()`` is one. What a strategy holds while it trains, processes, hooks and shards, is not for
# them.


T = TypeVar("T")
_GIVEN = "_accelight_arguments"


def pickle_by_init_args(cls: type[T]) -> type[T]:
    """Decorate a class whose objects are to be copied that way; classes derived from it decide for themselves."""
    initialize: Any = cls.__init__

    @functools.wraps(initialize)
    def remember_and_initialize(self: T, *args: Any, **kwargs: Any) -> None:
        if type(self) is cls:
            vars(self)[_GIVEN] = args, kwargs
        initialize(self, *args, **kwargs)

    def reduce(self: T, protocol: Any) -> Any:
        given = vars(self).get(_GIVEN)
        return object.__reduce_ex__(self, protocol) if given is None else (_make, (cls, *given))

    changed: Any = cls
    changed.__init__, changed.__reduce_ex__ = remember_and_initialize, reduce
    return cls


def _make(cls: type[T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return cls(*args, **kwargs)


# ------------------------------------------------------------------------------------------------
# The summary of a run at its start: one block of three lines, on rank 0.


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Facts about a sharded module for the summary of a fit."""

    strategy: str
    """Name of the strategy's class."""
    engine: str
    """The engine, such as ``"FSDP2"``."""
    device: torch.device
    """Of this process."""
    world_size: int
    """The number of processes."""
    details: Sequence[str] = ()
    """The kind of sharding, in short words."""
    parts: Sequence[str] = ()
    """The sharded units and parameters, and rank 0's part of them."""
    precision: str
    """The Trainer's, and what it means here."""
    checkpoints: str
    """Form of saved checkpoints."""
    tables: Sequence[str] = ()
    """Further lines."""

    def log(self, trainer: Trainer) -> None:
        """Log it on rank 0, as Lightning logs what it says of a run.

        Args:
            trainer: About to fit.
        """
        rank_zero_info("\n  ".join(self.lines(trainer)))

    def lines(self, trainer: Trainer) -> list[str]:
        """Return the block.

        Args:
            trainer: About to fit.
        """
        processes = f"{self.world_size} {'process' if self.world_size == 1 else 'processes'} ({self.device.type})"
        kind = f"accelight {__version__}, {self.strategy}: {self.engine} on {processes}"
        run = [f"precision {self.precision}", _accumulation(trainer), f"checkpoints {self.checkpoints}"]
        return [", ".join([kind, *self.details]), "; ".join(self.parts), "; ".join(run), *self.tables]


@dataclass(frozen=True)
class Unit:
    """A part of a sharded model whose parameters are gathered together."""

    name: str
    """The module's name in the model as it was written; empty for the root."""
    class_name: str
    """The module's class."""
    numel: int
    """Elements of its parameters, without those of units inside it."""
    shard_bytes: int
    """The bytes that this process holds of them at rest."""
    gathered_bytes: int
    """Their bytes while they are gathered, in the dtype in which they are."""


def counted(classes: Iterable[type]) -> str:
    """Return how many there are of each class: ``"12 Block, 1 GPT"``."""
    return ", ".join(f"{number:,} {one.__name__}" for one, number in Counter(classes).items())


def short_dtype(dtype: torch.dtype) -> str:
    """Return a dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def _accumulation(trainer: Trainer) -> str:
    if not trainer.lightning_module.automatic_optimization:
        return "manual optimization"
    number = trainer.accumulate_grad_batches
    return f"{number} micro-batch{'' if number == 1 else 'es'} a step"
