"""Which samples of a global batch lie where, and which are padding: read from a dataloader's sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SampleLayout:
    """How a dataloader deals its samples to processes."""

    remainder: int = -1
    """Samples that padding added to the last global batch; -1 where unknown."""
    interleaved: bool = False
    """Whether process r of n holds every n-th sample from r on, as ``DistributedSampler`` deals them."""
    batch_size: int | None = None
    """Samples per process in every batch but the last; None where unknown."""
    last_batch_size: int | None = None
    """Samples per process in the last batch; None where unknown."""


def layout_of(dataloader: Any, num_processes: int) -> SampleLayout:
    """Return what the dataloader's samplers tell; the unknown layout where they tell nothing."""
    batch_sampler = getattr(dataloader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None)
    batch_size = getattr(batch_sampler, "batch_size", None)
    drop_last = getattr(batch_sampler, "drop_last", None)
    if sampler is None or not isinstance(batch_size, int) or drop_last is None:
        return SampleLayout()
    import torch.utils.data as data
    from torch.utils.data.distributed import DistributedSampler

    if isinstance(sampler, DistributedSampler):
        if sampler.num_replicas != num_processes:
            return SampleLayout()  # data parallelism over a part of the processes: each sample lies on several
        return _interleaved(sampler, batch_size, drop_last)
    plain = (data.SequentialSampler, data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)
    return SampleLayout(remainder=0) if isinstance(sampler, plain) else SampleLayout()


def _interleaved(sampler: Any, batch_size: int, drop_last: bool) -> SampleLayout:
    per_process = -(-sampler.total_size // sampler.num_replicas)
    padding = max(0, sampler.total_size - len(sampler.dataset))
    incomplete = per_process % batch_size
    if incomplete and drop_last:
        padding = 0  # the samples that were added are at the very end, and dropped with it
    return SampleLayout(
        remainder=padding,
        interleaved=True,
        batch_size=batch_size,
        last_batch_size=batch_size if drop_last or not incomplete else incomplete,
    )
