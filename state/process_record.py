"""The record of this process's place that all states share; it is renewed when a process group starts."""

from __future__ import annotations

import enum
import inspect
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from .environment import ProcessInfo
from .process_group import (
    await_gloo_at_exit,
    backend_for,
    backends_by_device,
    default_accelerator,
    destroy_at_exit,
    device_for,
    live_group,
    require_group,
    start_group,
    timeout_of,
)
from .rendezvous import refuse_while_waited_for
from .store import leave_in_order
from .utils import flag_from_env, named_arguments

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class ProcessFacts:
    """The states' record of this process; see the properties of ``PartialState``."""

    device: torch.device
    backend: str | None
    num_processes: int
    process_index: int
    local_process_index: int
    num_local_processes: int
    node: str
    deferred: bool
    distributed_type: DistributedType
    group: weakref.ref[dist.ProcessGroup] | None = None
    non_data_parallel_size: int = 1
    """Processes with consecutive indices that see the same batches, as a strategy has set it."""

    @property
    def data_parallel_size(self) -> int:
        """Number of processes, or groups of them, that see different batches."""
        return self.num_processes // self.non_data_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """Position among those."""
        return self.process_index // self.non_data_parallel_size


class SharedFacts:
    """Owner of the record. There is one, :data:`shared`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._facts: ProcessFacts | None = None
        self._arguments: dict[str, Any] = {}
        self._cpu = False
        self._sharded_type: DistributedType | None = None
        self.debug = False
        self.fork_launched = False
        self.read_mixed_precision: Callable[[], str] = precision_from_env

    @property
    def initialized(self) -> bool:
        """Whether a state has been made."""
        return self._facts is not None

    def current(self) -> ProcessFacts:
        """Return the record, renewed first if an unknown process group is alive: see [Note: adoption]."""
        facts = self._facts
        if facts is None:
            raise AttributeError(
                "The state was reset (or copied into another process) and holds nothing. Call PartialState() again."
            )
        group = live_group()
        if group is not None and (facts.group is None or facts.group() is not group):
            facts = self._facts = self._adopt(group)
        return facts

    def start(self, cpu: bool, arguments: dict[str, Any]) -> None:
        """Make the record, and the process group if the environment asks for one; later calls only compare."""
        env = os.environ
        cpu = cpu or flag_from_env(env, "ACCELERATE_USE_CPU")
        check_group_arguments(arguments)
        if self._facts is not None:
            self._check_same(cpu, arguments)
            return
        group = live_group()
        self._cpu = cpu
        self._arguments = dict(arguments)
        try:
            facts = self._adopt(group) if group is not None else self._begin(env)
            self._facts = facts
            if group is not None:
                self._check_same(cpu, arguments)
        except BaseException:
            self.reset()
            raise
        self.debug = flag_from_env(env, "ACCELERATE_DEBUG_MODE")
        self.fork_launched = flag_from_env(env, "FORK_LAUNCHED")

    def refresh(
        self,
        device: torch.device | None,
        local_process_index: int | None,
        num_local_processes: int | None,
    ) -> None:
        """Read the live group again, and take what only the caller knows."""
        group = live_group()
        facts = self._adopt(group) if group is not None else self.current()
        if device is not None:
            facts = replace(facts, device=device)
            if group is not None:
                kind = DistributedType.of_device(device.type)
                facts = replace(facts, distributed_type=kind, backend=_backend_of(group, device.type))
        if local_process_index is not None:
            node = f"{facts.process_index - local_process_index}"
            facts = replace(facts, local_process_index=local_process_index, node=node)
        if num_local_processes is not None:
            facts = replace(facts, num_local_processes=num_local_processes)
        self._facts = facts

    def set_non_data_parallel_size(self, size: int) -> None:
        """Record how many processes with consecutive indices see the same batches."""
        if self._facts is not None:
            self._facts = replace(self._facts, non_data_parallel_size=size)

    @property
    def distributed_type(self) -> DistributedType:
        """FSDP or DEEPSPEED where somebody shards the model, else what the devices say."""
        return self._sharded_type or self.current().distributed_type

    @distributed_type.setter
    def distributed_type(self, value: DistributedType) -> None:
        self._sharded_type = value if value in (DistributedType.FSDP, DistributedType.DEEPSPEED) else None

    def _device_type(self) -> str:
        named = os.environ.get("ACCELERATE_TORCH_DEVICE")
        if self._cpu:
            return "cpu"
        return torch.device(named).type if named else default_accelerator().type

    def _begin(self, env: Mapping[str, str]) -> ProcessFacts:
        """Make the record where no group is alive."""
        info = ProcessInfo.from_env(env)
        if "world_size" in self._arguments:
            info = ProcessInfo.of_group(env, self._arguments["rank"], self._arguments["world_size"])
        device_type = self._device_type()
        alone = info.num_processes == 1 and info.launcher != "torchrun" and "world_size" not in self._arguments
        if alone or info.deferred:
            return self._without_group(info, device_type)
        device = device_for(device_type, info.local_process_index)
        set_device(device)  # before the group: NCCL communicators belong to the current device
        start_group(info, backend_for(device_type, self._arguments.get("backend")), self._arguments)
        group = live_group()
        if group is None:
            raise RuntimeError("init_process_group returned without a default group.")
        return self._describe(group, info, device)

    def _without_group(self, info: ProcessInfo, device_type: str) -> ProcessFacts:
        if info.deferred:
            device = device_for(device_type, info.local_process_index)
            kind = DistributedType.of_device(device_type)
        else:
            named = os.environ.get("ACCELERATE_TORCH_DEVICE")
            device = torch.device(named) if named and not self._cpu else torch.device(device_type)
            kind = DistributedType.NO
        return ProcessFacts(
            device=device,
            backend=None,
            num_processes=info.num_processes,
            process_index=info.process_index,
            local_process_index=info.local_process_index,
            num_local_processes=info.num_local_processes,
            node=_node_of(info),
            deferred=info.deferred,
            distributed_type=kind,
        )

    def _adopt(self, group: dist.ProcessGroup) -> ProcessFacts:
        """Make the record of a live group. Communicates nothing: see [Note: adoption]."""
        import torch.distributed as dist

        info = ProcessInfo.of_group(os.environ, dist.get_rank(group), dist.get_world_size(group))
        return self._describe(group, info, self._adopted_device(group, info))

    def _adopted_device(self, group: dist.ProcessGroup, info: ProcessInfo) -> torch.device:
        """Guess the device from the backend: a gloo group on a machine with CUDA means training on the CPU."""
        device_type = self._device_type()
        named = "ACCELERATE_TORCH_DEVICE" in os.environ
        backends = backends_by_device(group)
        if device_type != "cpu" and not named:
            import torch.distributed as dist

            if backends.get(device_type) != dist.get_default_backend_for_device(device_type):
                device_type = "cpu"
        elif device_type == "cpu" and "cpu" not in backends:
            if self._cpu and self._facts is None:
                raise ValueError(
                    f"cpu=True, but the live process group works only on {', '.join(backends)}. "
                    "Start it with backend='gloo' (or a composite one), or omit cpu."
                )
            device_type = next(iter(backends))
        return _device_of(group, device_type) or device_for(device_type, info.local_process_index)

    def _describe(self, group: dist.ProcessGroup, info: ProcessInfo, device: torch.device) -> ProcessFacts:
        backends = set(backends_by_device(group).values())
        if backends - {"gloo"}:
            destroy_at_exit()
        if "gloo" in backends:
            await_gloo_at_exit()
        leave_in_order(group)
        return ProcessFacts(
            device=device,
            backend=_backend_of(group, device.type),
            num_processes=info.num_processes,
            process_index=info.process_index,
            local_process_index=info.local_process_index,
            num_local_processes=info.num_local_processes,
            node=_node_of(info),
            deferred=False,
            distributed_type=DistributedType.of_device(device.type),
            group=weakref.ref(group),
        )

    def _check_same(self, cpu: bool, arguments: dict[str, Any]) -> None:
        """Raise ``ValueError`` for arguments that the live state contradicts; remember those it says nothing about."""
        facts = self.current()
        if cpu and facts.device.type != "cpu":
            raise ValueError(
                f"cpu=True contradicts the live state, whose device is {facts.device}. "
                "Pass cpu=True where the first state is created."
            )
        for name, value in arguments.items():
            if value is None:
                continue
            live = self._live_argument(name, value, facts)
            if live is None:
                self._arguments[name] = value
            elif value != live:
                raise ValueError(
                    f"{name}={value!r} contradicts the live state, which has {name}={live!r}. "
                    "Pass it where the first state is created, or omit it."
                )

    def _live_argument(self, name: str, value: Any, facts: ProcessFacts) -> Any:
        """Return the value of an argument of ``init_process_group``, or None where it is not known."""
        group = live_group()
        if group is not None:
            if name == "backend":
                return _live_backend(value, facts, backends_by_device(group))
            if name == "timeout":
                return timeout_of(group)
            if name in ("rank", "world_size"):
                return facts.process_index if name == "rank" else facts.num_processes
        return self._arguments.get(name)


def set_device(device: torch.device) -> None:
    """Make ``device`` the current one, where it is one of several."""
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def _device_of(group: dist.ProcessGroup, device_type: str) -> torch.device | None:
    """Return the device that a group was bound to, or that this process has chosen; None where neither is known.

    A process that has chosen none has the first one as its current device, as all others.
    """
    bound = getattr(group, "bound_device_id", None)
    if bound is not None and bound.type == device_type:
        return torch.device(bound)
    if device_type == "cpu" or default_accelerator().type != device_type:
        return None
    index = torch.accelerator.current_device_index()
    return torch.device(device_type, index) if index else None


def _live_backend(asked: str, facts: ProcessFacts, running: dict[str, str]) -> str | None:
    """Return the live backend in the form it was asked for: of this state's device, or of the devices named."""
    if ":" not in asked:
        return facts.backend
    named = [part.split(":", 1)[0] for part in asked.split(",")]
    return ",".join(f"{device}:{running.get(device)}" for device in named)


def _backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    backends = backends_by_device(group)
    return backends.get(device_type) or next(iter(backends.values()))


def _node_of(info: ProcessInfo) -> str:
    return info.node if info.node is not None else f"{info.process_index - info.local_process_index}"


def precision_from_env() -> str:
    """Return ``ACCELERATE_MIXED_PRECISION``, or ``no``."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()


shared = SharedFacts()


def communication_group(what: str, *, needs_all: bool = True) -> dist.ProcessGroup | None:
    """Return the default group for ``what``, or None where this is the only process; makes the state if need be.

    Args:
        what: Names it in errors.
        needs_all: Whether it waits for all processes.

    Raises:
        RuntimeError: If the group starts later (a process of Lightning's launcher) or has been destroyed, or if others
            wait for this process to leave its `main_process_first` block.
    """
    if not shared.initialized:
        shared.start(False, {})
    facts = shared.current()
    if facts.deferred:
        raise RuntimeError(
            f"{what} needs the process group, which starts in Trainer.fit: Lightning's launcher started this process "
            f"({facts.process_index} of {facts.num_processes}), and the first one is past this line. Call it inside "
            "fit, or start all processes with torchrun."
        )
    if facts.num_processes == 1:
        return None
    group = require_group(what)
    if needs_all:
        refuse_while_waited_for(what, group)
    return group


# ------------------------------------------------------------------------------------------------
# Arguments for ``torch.distributed.init_process_group``, checked where they are given.


@named_arguments
@dataclass(frozen=True)
class InitProcessGroupKwargs:
    """Arguments for :class:`PartialState`'s process group: ``PartialState(**InitProcessGroupKwargs(...).to_kwargs())``.

    Unlike Accelerate's class of the same name, an unset backend stays unset, so that the device decides.

    Source: accelerate 1.15 ``utils/dataclasses.py`` (``InitProcessGroupKwargs``).
    """

    backend: str | None = None
    """For example ``"nccl"``; None takes torch's default for the device."""
    init_method: str | None = None
    """URL of the rendezvous; None takes what the launcher set."""
    timeout: timedelta | None = None
    """Of every collective; None takes torch's default for the backend."""

    def __post_init__(self) -> None:
        if self.timeout is not None and not isinstance(self.timeout, timedelta):
            raise TypeError(
                f"timeout must be a datetime.timedelta, got {self.timeout!r}. Write timeout=timedelta(seconds=...)."
            )

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments that differ from the defaults."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def check_group_arguments(arguments: dict[str, Any]) -> None:
    """Raise ``TypeError`` for what ``init_process_group`` would not take."""
    from torch.distributed import init_process_group

    known = [name for name in inspect.signature(init_process_group).parameters if not name.startswith("_")]
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise TypeError(f"Unknown argument(s) {', '.join(unknown)}: init_process_group accepts {', '.join(known)}.")
    InitProcessGroupKwargs(timeout=arguments.get("timeout"))
    if ("rank" in arguments) != ("world_size" in arguments):
        raise ValueError("rank and world_size must be set together. Pass both, or neither (the launcher sets them).")


# ------------------------------------------------------------------------------------------------
# The kinds of distributed environment, under the names that Accelerate's users know.


class DistributedType(str, enum.Enum):
    """Kind of distributed environment; a ``str`` too, so that it compares with and serialises as its name.

    ``MULTI_GPU`` is CUDA and ROCm, and any accelerator that has no member of its own. ``FSDP`` and ``DEEPSPEED`` are
    set when a strategy (or :class:`AcceleratorState` with a plugin) shards the model, on whatever device.

    Source: accelerate 1.15 ``utils/dataclasses.py`` (``DistributedType``): same members and values.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"

    @classmethod
    def of_device(cls, device_type: str) -> DistributedType:
        """Return the type that several processes on ``device_type`` devices have."""
        return cls.__members__.get(f"MULTI_{device_type.upper()}", cls.MULTI_GPU)
