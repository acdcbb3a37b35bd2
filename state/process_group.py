"""The default process group and the device under it: found, started and asked. Keeps nothing."""

from __future__ import annotations

import atexit
import functools
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .environment import DEFAULT_PORT, ProcessInfo

_SETTLE_S = 0.05


def live_group() -> dist.ProcessGroup | None:
    """Return the default process group, or None while there is none."""
    return dist.group.WORLD if dist.is_available() else None


def is_planned() -> bool:
    """Return whether this process plans memory and stands for all ranks: tensors have no values."""
    return dist.is_available() and dist.is_initialized() and dist.get_backend() == "fake"


def default_accelerator() -> torch.device:
    """Return the accelerator's device type that torch finds, else CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def device_for(device_type: str, local_process_index: int) -> torch.device:
    """Return the device of a local process; processes beyond the number of devices share them in turn."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, local_process_index % max(1, torch.accelerator.device_count()))


def backends_by_device(group: dist.ProcessGroup) -> dict[str, str]:
    """Return for example ``{"cpu": "gloo", "cuda": "nccl"}``."""
    pairs = (part.split(":", 1) for part in dist.get_backend_config(group).split(","))
    return {pair[0]: pair[-1] for pair in pairs}


def backend_for(device_type: str, backend: str | None) -> str:
    """Return the backend string to start a group with: composite on an accelerator, so that CPU tensors go too.

    Raises:
        ValueError: If ``backend`` needs a device that this state does not use.
    """
    default = dist.get_default_backend_for_device(device_type)
    if backend is not None and ":" in backend:
        if device_type not in {part.split(":", 1)[0] for part in backend.split(",")}:
            raise ValueError(
                f"backend={backend!r} names no backend for device {device_type!r}. Add {device_type}:{default}."
            )
        return backend
    chosen = backend or default
    capable = dist.Backend.backend_capability.get(chosen)
    if chosen != default and capable is not None and device_type not in capable:
        raise ValueError(
            f"backend={chosen!r} works on {', '.join(capable)}, but this process uses device {device_type!r}. "
            f"Use backend={default!r}, or omit it."
        )
    return chosen if device_type == "cpu" or chosen == "gloo" else f"cpu:gloo,{device_type}:{chosen}"


def start_group(info: ProcessInfo, backend: str, arguments: Mapping[str, Any]) -> None:
    """Start the default group of ``info.num_processes`` processes; returns when all have met.

    Raises:
        RuntimeError: If several nodes have nowhere to meet.
    """
    kwargs: dict[str, Any] = {
        "rank": info.process_index,
        "world_size": info.num_processes,
        **arguments,
        "backend": backend,
    }
    if kwargs.get("init_method") is None and kwargs.get("store") is None:
        if info.num_processes == 1 and info.main_port is None:
            kwargs["store"] = dist.HashStore()  # alone: no port to choose, none to collide on
        else:
            kwargs["init_method"] = _rendezvous(info)
    with explaining_rendezvous():
        dist.init_process_group(**kwargs)


@contextmanager
def explaining_rendezvous() -> Iterator[None]:
    """Say what to do where a port is in use, or gloo does not find the address at which other nodes reach this one."""
    try:
        yield
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise RuntimeError(
                f"MASTER_PORT={os.environ.get('MASTER_PORT')} is in use on this machine: another run listens there, "
                "or an earlier one has left the variable behind. Unset MASTER_PORT (in a notebook, restart the "
                f"kernel), or choose a free port: torchrun --master-port PORT. torch says: {error}"
            ) from error
        if "gloo" not in str(error) or "Unable to" not in str(error):
            raise
        raise RuntimeError(
            f"gloo, which is needed next to NCCL, too, finds no address of this node ({socket.gethostname()}, "
            f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME')!r}): set GLOO_SOCKET_IFNAME to the interface "
            f"that the other nodes reach ('ip -brief address' lists them), on every node. gloo says: {error}"
        ) from error


def _rendezvous(info: ProcessInfo) -> str:
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return "env://"  # knows of torchrun's own store, which may listen on that port already
    if info.main_address is None:
        raise RuntimeError(
            f"{info.num_processes} processes with {info.num_local_processes} on this node are several nodes, but "
            "MASTER_ADDR is not set: set it to the host name of process 0 (and MASTER_PORT to a free port there), "
            "or pass init_method."
        )
    host = f"[{info.main_address}]" if ":" in info.main_address else info.main_address
    return f"tcp://{host}:{info.main_port or DEFAULT_PORT}"


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """Return the timeout of the group's collectives; torch's default where its backend does not have one."""
    if group is None:
        return dist.default_pg_timeout
    for device_type in backends_by_device(group):
        try:
            return group._get_backend(torch.device(device_type)).options._timeout
        except (RuntimeError, AttributeError):  # a backend without options, or not built for this device
            continue
    return dist.default_pg_timeout


@functools.cache
def await_gloo_at_exit() -> None:
    """Wait for gloo's threads before the interpreter ends; registered once.

    They free the last collective's tensors, for which they need the interpreter. Where it is being torn down by then,
    the process aborts ("terminate called without an active exception"): every other run of an FSDP2 script on two
    processes, with torch 2.13 (github.com/pytorch/pytorch/pull/179291). None of ten with this pause.
    """
    atexit.register(time.sleep, _SETTLE_S)


@functools.cache
def destroy_at_exit() -> None:
    """Destroy the default group where the interpreter ends; registered once. NCCL warns of what is left."""
    atexit.register(_destroy)


def _destroy() -> None:
    if live_group() is not None:
        dist.destroy_process_group()


def group_store(prefix: str) -> dist.Store:
    """Return the default group's key-value store, under a prefix of our own."""
    from .upstream import _get_default_store

    return dist.PrefixStore(prefix, _get_default_store())


def require_group(what: str) -> dist.ProcessGroup:
    """Return the live default group.

    Raises:
        RuntimeError: If there is none; the message says what wanted it.
    """
    group = live_group()
    if group is None:
        raise RuntimeError(
            f"{what} needs the process group, which was destroyed after this state was created. "
            "Communicate before destroy_process_group, or start a new group."
        )
    return group
