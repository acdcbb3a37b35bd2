"""A process group of which this process is rank 0, and of which nobody else is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from typing_extensions import override

from ...state.upstream import HashStore
from ..upstream.lightning import ClusterEnvironment
from ..upstream.torch_fake import FAKE_BACKEND


class PretendedEnvironment(ClusterEnvironment):
    """All processes on one node, this one the first.

    Args:
        world_size: Number of processes.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    @override
    def main_port(self) -> int:
        return 0

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return self._world_size

    @override
    def set_world_size(self, size: int) -> None:
        pass

    @override
    def global_rank(self) -> int:
        return 0

    @override
    def set_global_rank(self, rank: int) -> None:
        pass

    @override
    def local_rank(self) -> int:
        return 0

    @override
    def node_rank(self) -> int:
        return 0


@contextmanager
def pretended_group(world_size: int) -> Iterator[None]:
    """Be rank 0 of ``world_size`` processes, of which nobody else is there.

    Raises:
        RuntimeError: If there is a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "A plan pretends to be several processes, and this one is in a process group already. Plan in a script of "
            "its own, before training is launched."
        )
    torch.set_num_threads(1)
    dist.init_process_group(FAKE_BACKEND, rank=0, world_size=world_size, store=HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
