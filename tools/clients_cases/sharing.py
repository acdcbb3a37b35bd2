"""Each process's share of a loader, in order: Lightning's own sampler would shuffle it."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def shared(loader: Any) -> Any:
    """Return a loader of this process's samples; the processes' batches together are those of one process."""
    sampler: Any = DistributedSampler(
        loader.dataset,
        num_replicas=int(os.environ.get("WORLD_SIZE", "1")),
        rank=int(os.environ.get("RANK", "0")),
        shuffle=False,
    )
    return DataLoader(loader.dataset, loader.batch_size, sampler=sampler, collate_fn=loader.collate_fn, drop_last=True)
