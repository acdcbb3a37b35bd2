"""The training loader whose samples can be dealt in global batches, and what of it counts."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ..strategies.upstream.lightning import (
    _get_dataloader_init_args_and_kwargs,
    _reinstantiate_wrapped_cls,
    _Stateful,
)
from .elastic_batches import GlobalBatches


def with_batches(loader: Any, batches: GlobalBatches) -> Any:
    """Return a loader of the same kind, dataset and settings with other batches."""
    args, kwargs = _get_dataloader_init_args_and_kwargs(loader, loader.sampler)
    ours = {"batch_sampler": batches, "sampler": None, "shuffle": False, "batch_size": 1, "drop_last": False}
    return _reinstantiate_wrapped_cls(loader, *args, **{**kwargs, **ours})


def _is_plain(sampler: object, kind: type) -> bool:
    """Return whether a sampler is of torch's own kind, or what torchdata has in its place."""
    own = type(sampler)
    return own is kind or (own.__name__ == kind.__name__ and own.__module__.startswith("torchdata."))


def map_style(loader: Any) -> Any:
    """Return the dataset of a loader whose samples can be dealt.

    Raises:
        ValueError: If they cannot, or hold a state of their own.
    """
    hint = (
        "Give a DataLoader over a dataset with __len__ and __getitem__, with shuffle= and without a sampler of its own."
    )
    if (
        not isinstance(loader, DataLoader)
        or not hasattr(loader.dataset, "__len__")
        or not _is_plain(loader.batch_sampler, BatchSampler)
    ):
        raise ValueError(f"ElasticTraining cannot deal the samples of {_described(loader)}. {hint}")
    if isinstance(loader.dataset, _Stateful):
        raise ValueError(
            f"{type(loader.dataset).__name__} has a state_dict: checkpoints hold that of process 0 alone, and it "
            "cannot be dealt to another number of processes. Let what __getitem__ returns depend on the index alone."
        )
    return loader.dataset


def is_shuffled(loader: Any) -> bool:
    """Return whether a loader's samples are shuffled.

    Raises:
        ValueError: If they have an order of their own.
    """
    sampler, dataset = loader.sampler, loader.dataset
    if _is_plain(sampler, SequentialSampler):
        return False
    if _is_plain(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(dataset):
        return True
    if type(sampler) is DistributedSampler and sampler.dataset is dataset:
        return sampler.shuffle
    raise ValueError(
        f"ElasticTraining draws the order of samples itself, and would not use {type(sampler).__name__}. Leave the "
        "sampler out and give shuffle=."
    )


def _described(loader: Any) -> str:
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__}"
    return f"a {type(loader).__name__} over {type(loader.dataset).__name__} with {type(loader.batch_sampler).__name__}"
