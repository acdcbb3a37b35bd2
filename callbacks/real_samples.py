"""A sampler that gives each sample to one process once, and yet each process equally many batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from ..strategies.upstream.lightning import DistributedSamplerWrapper

_KNOWN = (DistributedSampler.__iter__, DistributedSamplerWrapper.__iter__)


class RealSamples(DistributedSampler[Any]):
    """This process's share of a `DistributedSampler` without what was repeated to make the shares equal.

    The repetition is the last sample of a share, if any. It is left out, unless it would be alone in its batch: then it
    stays, since no process may run fewer forward passes than the others. Such a batch has no real sample.

    Args:
        dealt: The sampler that deals to the processes.
        batch_size: Samples in a batch.
    """

    def __init__(self, dealt: DistributedSampler[Any], batch_size: int) -> None:
        self.__dict__.update(vars(dealt))  # dataset, rank, total_size, ...: what others ask a DistributedSampler for
        self.dealt = dealt
        self.batch_size = batch_size

    @property
    def num_real(self) -> int:
        """Samples of this process."""
        return len(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]

    def num_real_in(self, batch_idx: int) -> int:
        """Return how many real samples this process has in a batch; 0 where there is only a repetition."""
        return max(0, min(self.batch_size, self.num_real - batch_idx * self.batch_size))

    def __len__(self) -> int:
        alone = self.num_real % self.batch_size == 0
        return len(self.dealt) if alone else self.num_real

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.dealt), len(self))

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler that deals."""
        self.epoch = epoch
        self.dealt.set_epoch(epoch)


def real_samples_of(loader: Any, world_size: int) -> RealSamples | None:
    """Return the sampler that leaves a loader's repetitions out, or None where it is not known how samples are dealt.

    Raises:
        ValueError: If samples are left out that a single process would evaluate.
    """
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return None
    dealt, batch_size = loader.sampler, loader.batch_sampler.batch_size
    if not isinstance(dealt, DistributedSampler) or dealt.num_replicas != world_size:
        return None
    if isinstance(dealt, RealSamples):
        return dealt
    if type(dealt).__iter__ not in _KNOWN:
        return None
    sampler = RealSamples(dealt, batch_size)
    num_samples = len(dealt.dataset)  # type: ignore[arg-type]
    if dealt.drop_last and num_samples % world_size:
        raise ValueError(
            f"DistributedSampler(drop_last=True) leaves out {num_samples % world_size} of {num_samples} samples on "
            f"{world_size} processes: the result cannot equal that of one process. Leave drop_last out."
        )
    if loader.batch_sampler.drop_last and len(dealt) % batch_size:
        raise ValueError(
            f"DataLoader(drop_last=True) leaves out the last {len(dealt) % batch_size} of {len(dealt)} samples of each "
            "process: the result cannot equal that of one process. Leave drop_last out of evaluation loaders."
        )
    return sampler
