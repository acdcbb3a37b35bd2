"""What a strategy asks of the process group, which may have been there before it."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import Backend, BackendConfig

from ...state.process_group import backends_by_device, live_group, require_group, timeout_of
from ..upstream.lightning import rank_zero_warn


def tell_what_comes_too_late(timeout: timedelta | None, backend: str | None, instead: str) -> None:
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
            f"The process group was there before the Trainer, so these have no effect: {'; '.join(late)}. Give them "
            f"where the group is started: {instead}."
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
            f"cpu_offload=True reduces gradients in host memory, and the process group has {has!r} only. Leave "
            f"process_group_backend out, or start the group with backend='cpu:gloo,{has}'."
        )
