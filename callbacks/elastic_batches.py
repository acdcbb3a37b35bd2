"""How the samples of an epoch are dealt so that every optimizer step has the same ones on any number of processes.

[Note: global batches] The order of an epoch's samples is drawn from a seed and the epoch's number alone, and cut into
global batches: one for each optimizer step. A global batch is cut into as many micro-batches as there are processes
times accumulation steps, equally large but for the last, incomplete one of an epoch, whose micro-batches may differ by
a sample. Each counts in the gradient by its number of samples, see `GlobalBatches.weight`, so that the gradient is the
mean over the global batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Division:
    """How a global batch is divided."""

    global_batch_size: int
    num_processes: int
    batch_size: int
    """Samples of one process in one micro-batch."""
    accumulate_grad_batches: int
    """Micro-batches of one process in one optimizer step."""

    @classmethod
    def of(cls, global_batch_size: int, num_processes: int, max_batch_size: int | None = None) -> Division:
        """Divide with as few micro-batches as fit.

        Args:
            global_batch_size: Samples of one optimizer step.
            num_processes: Processes with data of their own.
            max_batch_size: Most samples of one process in one micro-batch; None for no limit.

        Raises:
            ValueError: If the processes cannot have equally many samples; it says which numbers of processes can.
        """
        share, rest = divmod(global_batch_size, num_processes)
        if rest:
            fitting = [str(n) for n in range(1, global_batch_size + 1) if global_batch_size % n == 0]
            raise ValueError(
                f"global_batch_size={global_batch_size} cannot be dealt equally to {num_processes} processes. Start "
                f"{_listed(fitting)} processes, or train with a global batch that all numbers of processes divide that "
                "may be left."
            )
        limit = share if max_batch_size is None else max_batch_size
        steps = next(steps for steps in range(1, share + 1) if share % steps == 0 and share // steps <= limit)
        return cls(global_batch_size, num_processes, share // steps, steps)

    @property
    def num_micro_batches(self) -> int:
        """Of all processes, in one optimizer step."""
        return self.num_processes * self.accumulate_grad_batches


class EpochOrder:
    """The order of a dataset's samples in an epoch: the same for every number of processes.

    Args:
        num_samples: Of the dataset.
        shuffle: Whether each epoch has an order of its own.
        seed: Of the first epoch's order.
    """

    def __init__(self, num_samples: int, shuffle: bool, seed: int) -> None:
        self.num_samples, self.shuffle, self.seed = num_samples, shuffle, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch is iterated next; the Trainer calls it."""
        self.epoch = epoch

    def indices(self) -> list[int]:
        """Return the present epoch's order; drawn as ``DistributedSampler`` draws it."""
        if not self.shuffle:
            return list(range(self.num_samples))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(self.num_samples, generator=generator).tolist()
        return order


class GlobalBatches:
    """One process's micro-batches of each epoch, as the ``batch_sampler`` of a loader.

    Args:
        order: Of the samples, kept as ``sampler``, where the Trainer looks for ``set_epoch``.
        division: Of each global batch.
        rank: Of this process among those that have data of their own.
        drop_last: Whether the last, incomplete global batch of an epoch is left out.

    Raises:
        ValueError: If there is no global batch in an epoch.
    """

    def __init__(self, order: EpochOrder, division: Division, rank: int, drop_last: bool) -> None:
        self.sampler, self.division, self.rank, self.drop_last = order, division, rank, drop_last
        self._skipped: tuple[int, int] | None = None
        if self.num_steps == 0:
            raise ValueError(
                f"The training data has {order.num_samples} samples, not one global batch of "
                f"{division.global_batch_size}"
                + (" (drop_last=True leaves an incomplete one out)." if drop_last else ".")
            )

    @property
    def batch_size(self) -> int:
        """Samples of a micro-batch."""
        return self.division.batch_size

    @property
    def num_steps(self) -> int:
        """Optimizer steps of a whole epoch."""
        full, rest = divmod(self.sampler.num_samples, self.division.global_batch_size)
        return full if self.drop_last or not rest else full + 1

    def skip(self, epoch: int, num_steps: int) -> None:
        """Leave out the first steps of one epoch: a run that went before this one has used them."""
        self._skipped = epoch, num_steps

    def weight(self, micro_batch: int) -> float:
        """Return what a micro-batch's mean loss counts in the mean over micro-batches, for the mean over samples.

        Args:
            micro_batch: This process's, counted from the epoch's begin.
        """
        step, position = divmod(micro_batch, self.division.accumulate_grad_batches)
        begin, end = self._bounds(step, position)
        return (end - begin) * self.division.num_micro_batches / self._size_of_step(step)

    def __len__(self) -> int:
        """Return the number of micro-batches in a whole epoch, whatever was used of it before."""
        return self.num_steps * self.division.accumulate_grad_batches

    def __iter__(self) -> Iterator[list[int]]:
        epoch, indices = self.sampler.epoch, self.sampler.indices()
        first = self._skipped[1] if self._skipped is not None and self._skipped[0] == epoch else 0
        for step in range(first, self.num_steps):
            offset = step * self.division.global_batch_size
            for position in range(self.division.accumulate_grad_batches):
                begin, end = self._bounds(step, position)
                # Every process takes part in every forward: one without a sample has one that counts nothing.
                yield indices[offset + begin : offset + end] or [indices[offset]]

    def _size_of_step(self, step: int) -> int:
        size = self.division.global_batch_size
        return min(size, self.sampler.num_samples - step * size)

    def _bounds(self, step: int, position: int) -> tuple[int, int]:
        """Return which samples of a global batch a micro-batch of this process has."""
        number, count = position * self.division.num_processes + self.rank, self.division.num_micro_batches
        size = self._size_of_step(step)
        return number * size // count, (number + 1) * size // count


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
