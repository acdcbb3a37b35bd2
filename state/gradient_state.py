"""``GradientState``: whether gradients synchronise now, and where in its data the running loop is.

Its methods that begin with an underscore are for those who drive it: the strategies, or a loop of one's own.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

from .partial_state import ReadOnlyState
from .process_group import live_group
from .process_record import DistributedType, shared
from .utils import flag_from_env, named_arguments

T = TypeVar("T")


class _Entry:
    """A dataloader being iterated. Loaders are held weakly; what cannot be (a list, say), by itself."""

    def __init__(self, dataloader: Any, remainder: int) -> None:
        try:
            self.dataloader: Callable[[], Any] = weakref.ref(dataloader)
        except TypeError:
            self.dataloader = lambda: dataloader
        self._given_remainder = remainder
        self._given_end: bool | None = None
        self.cut_short = False
        """Whether the driver goes no further, though the loader has more batches."""

    def set_end(self, value: bool, cut_short: bool = False) -> None:
        self._given_end, self.cut_short = value, cut_short

    @property
    def end_of_dataloader(self) -> bool:
        if self._given_end is not None:
            return self._given_end
        return bool(getattr(self.dataloader(), "end_of_dataloader", False))

    @property
    def gave_last_batch(self) -> bool:
        """Whether this batch is the one that may hold padding."""
        return self.end_of_dataloader and not self.cut_short

    @property
    def remainder(self) -> int:
        """Samples that padding added to the last global batch."""
        if self._given_remainder != -1:
            return self._given_remainder
        dataloader = self.dataloader()
        own = getattr(dataloader, "remainder", None)
        if own is None:
            return self.layout.remainder
        real = self.num_real_in_last_batch
        return int(own) if real is None else int(dataloader.total_batch_size) - real if real else 0

    @property
    def num_real_in_last_batch(self) -> int | None:
        """For Accelerate's own loaders, whose ``remainder`` counts real samples (0 for all, -1 unknown); else None."""
        dataloader = self.dataloader()
        own = getattr(dataloader, "remainder", None)
        if own is None or own < 0 or getattr(dataloader, "total_batch_size", None) is None:
            return None
        return int(own)

    @cached_property
    def layout(self) -> SampleLayout:
        """The layout that the samplers report; unknown once the loader is gone."""
        return layout_of(self.dataloader(), *_process_counts())


class _Shared:
    """The state that all ``GradientState`` instances share."""

    def __init__(self) -> None:
        self.initialized = False
        self.plugin: GradientAccumulationPlugin | None = None
        self.default_num_steps = 1
        self.sync_gradients = True
        self.is_xla_gradients_synced = False
        self.step = 0
        self.entries: list[_Entry] = []


_shared = _Shared()


class GradientState(ReadOnlyState):
    """Facts about gradient accumulation and the data under it. All instances share one state.

    A strategy drives it under a Trainer. In a loop of your own, use :meth:`track` and :meth:`accumulate`::

        gradients = GradientState(GradientAccumulationPlugin(num_steps=4))
        for batch in gradients.track(dataloader):
            with gradients.accumulate(model):
                (loss_of(model, batch) / gradients.num_steps).backward()
            if gradients.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()

    Loaders are kept as a stack: a validation loader iterated inside training has its own ``end_of_dataloader`` and
    ``remainder``, and training's are there again when it ends.

    Args:
        gradient_accumulation_plugin: The settings. A later instance with another plugin changes them for all, as in
            Accelerate; one without leaves them.

    Source: accelerate 1.15 ``state.py`` (``GradientState``).
    """

    __slots__ = ()

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        if not _shared.initialized:
            _shared.default_num_steps = _num_steps_from_env()
            _shared.initialized = True
        if gradient_accumulation_plugin is not None:
            self._set_plugin(gradient_accumulation_plugin)

    @property
    def initialized(self) -> bool:
        """Whether the state exists."""
        return _shared.initialized

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends its window: gradients are reduced over processes, and the optimizer steps."""
        return _shared.sync_gradients

    @property
    def num_steps(self) -> int:
        """Micro-batches per optimizer step."""
        given = None if _shared.plugin is None else _shared.plugin.num_steps
        return _shared.default_num_steps if given is None else given

    @property
    def adjust_scheduler(self) -> bool:
        """The plugin's setting, for code that reads it here; False without a plugin."""
        return _shared.plugin is not None and _shared.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the end of the dataloader ends a window early, and the count begins anew."""
        return _shared.plugin is None or _shared.plugin.sync_with_dataloader

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The plugin's settings that differ from the defaults."""
        return {} if _shared.plugin is None else _shared.plugin.to_kwargs()

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether XLA gradients have been reduced before this step; always True with FSDP. May be assigned."""
        sharded = shared.initialized and shared.distributed_type == DistributedType.FSDP
        return sharded or flag_from_env(os.environ, "ACCELERATE_USE_FSDP") or _shared.is_xla_gradients_synced

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, value: bool) -> None:
        _shared.is_xla_gradients_synced = bool(value)

    @property
    def in_dataloader(self) -> bool:
        """Whether a dataloader is being iterated."""
        return _top() is not None

    @property
    def active_dataloader(self) -> Any:
        """The dataloader being iterated, the innermost one; or None."""
        entry = _top()
        return None if entry is None else entry.dataloader()

    @property
    def dataloader_references(self) -> list[Any]:
        """None, then the dataloaders being iterated, the innermost one last."""
        return [None, *(entry.dataloader() for entry in _living())]

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active dataloader has given its last batch, or the last that a Trainer's limit lets it give.

        False outside a dataloader.
        """
        entry = _top()
        return entry is not None and entry.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Number of samples that padding added to the active dataloader's last global batch.

        0 when it added none, -1 when unknown or outside a dataloader. Accelerate 1.15 documents this meaning, too, but
        returns the number of real samples in that batch.
        """
        entry = _top()
        return -1 if entry is None else entry.remainder

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )

    def window_size(self, batch_idx: int, num_batches: float | None = None) -> int:
        """Return how many micro-batches share the optimizer step of ``batch_idx``.

        That is ``num_steps``, and fewer in the last window of an epoch whose length does not divide by it. A loss
        divided by it makes the mean over the window; Accelerate divides by ``num_steps`` there, too.

        Args:
            batch_idx: Index of the micro-batch in its epoch.
            num_batches: Micro-batches in the epoch; None or infinity where unknown.

        Raises:
            ValueError: If there is no such micro-batch.
        """
        size = size_of_window(batch_idx, num_batches, self.num_steps)
        return size if self.sync_with_dataloader else self.num_steps

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Run one micro-batch's forward and backward; only the last of a window reduces gradients over processes.

        Sets :attr:`sync_gradients`: True at every ``num_steps``-th micro-batch, and at the end of the active
        dataloader. Otherwise each model keeps its gradients to itself, in its own way: ``no_sync()`` (DDP, FSDP1) or
        ``set_requires_gradient_sync`` (FSDP2).

        Args:
            *models: The models trained here.
        """
        state = _shared
        if self.sync_with_dataloader and self.end_of_dataloader:
            state.step = 0
            self._set_sync_gradients(True)
        else:
            state.step += 1
            self._set_sync_gradients(state.step % self.num_steps == 0)
        each_batch = state.plugin is not None and state.plugin.sync_each_batch
        with ExitStack() as stack:
            if not (state.sync_gradients or each_batch):
                for model in models:
                    stack.enter_context(_without_sync(model))
            yield

    def track(self, dataloader: Iterable[T]) -> Generator[T, None, None]:
        """Iterate a dataloader as the active one, and know its last batch: it is always one batch ahead.

        A loop that ends early unregisters it too, at once if it iterates ``track(...)`` directly; an iterator kept in
        a variable does when it is closed.

        Args:
            dataloader: Anything that can be iterated; :attr:`remainder` is known for torch's samplers.
        """
        entry = _push(dataloader, -1)
        try:
            entry.set_end(False)
            iterator = iter(dataloader)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            for following in iterator:
                yield batch
                batch = following
            entry.set_end(True)
            yield batch
        finally:
            if entry in _shared.entries:
                _shared.entries.remove(entry)

    def _set_plugin(self, plugin: GradientAccumulationPlugin) -> None:
        """Take settings from now on."""
        _shared.plugin = plugin

    def _set_sync_gradients(self, value: bool) -> None:
        """Say whether the micro-batch that begins now ends its window."""
        _shared.sync_gradients = bool(value)

    def _add_dataloader(self, dataloader: Any, *, remainder: int = -1) -> None:
        """Make ``dataloader`` the active one. ``remainder`` -1 takes it from its samplers."""
        _push(dataloader, remainder)

    def _remove_dataloader(self, dataloader: Any) -> None:
        """Take the innermost entry of ``dataloader`` off the stack, if there is one."""
        entry = _find(dataloader)
        if entry is not None:
            _shared.entries.remove(entry)

    def _set_end_of_dataloader(self, dataloader: Any, value: bool, *, cut_short: bool = False) -> None:
        """Say whether the batch that ``dataloader`` gave last is the last one used.

        Args:
            dataloader: As given to :meth:`_add_dataloader`.
            value: Whether no other batch follows.
            cut_short: Whether the loader has more, and this batch is whole: padding lies in batches that do not come.

        Raises:
            RuntimeError: If it is not being iterated.
        """
        entry = _find(dataloader)
        if entry is None:
            raise RuntimeError(f"{dataloader!r} is not being iterated. Call _add_dataloader first.")
        entry.set_end(value, cut_short)

    @staticmethod
    def _reset_state() -> None:
        """Forget the shared state, for tests."""
        global _shared
        _shared = _Shared()


def active_entry() -> _Entry | None:
    """Return the facts about the innermost dataloader being iterated."""
    return _top()


def _living() -> list[_Entry]:
    # A loader that is gone cannot be iterated any more: whoever registered it was interrupted.
    _shared.entries = [entry for entry in _shared.entries if entry.dataloader() is not None]
    return _shared.entries


def _top() -> _Entry | None:
    entries = _living()
    return entries[-1] if entries else None


def _find(dataloader: Any) -> _Entry | None:
    return next((entry for entry in reversed(_living()) if entry.dataloader() is dataloader), None)


def _push(dataloader: Any, remainder: int) -> _Entry:
    if dataloader is None:
        raise TypeError("A dataloader is needed, got None.")
    entry = _Entry(dataloader, remainder)
    _shared.entries.append(entry)
    return entry


def _without_sync(model: Any) -> AbstractContextManager[Any]:
    if hasattr(model, "set_requires_gradient_sync"):
        return _fsdp2_without_sync(model)
    if hasattr(model, "no_sync"):
        return model.no_sync()
    return ExitStack()


@contextmanager
def _fsdp2_without_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _process_counts() -> tuple[int, int]:
    """Return the number of processes, and of those that see different batches."""
    if shared.initialized:
        facts = shared.current()
        return facts.num_processes, facts.data_parallel_size
    group = live_group()
    count = 1 if group is None else group.size()
    return count, count


def _num_steps_from_env() -> int:
    text = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if text == "auto":  # DeepSpeed's word for what the training loop says
        return 1
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={text!r} must be an integer of at least 1.")
    return int(text)


# ------------------------------------------------------------------------------------------------
# Gradient accumulation: the plugin and its decision for each micro-batch.


ShortWindows = Literal["full", "mean"]
AverageOver = Literal["micro_batches", "items"]
_SHORT_WINDOWS_VARIABLE = "ACCELIGHT_SHORT_WINDOWS"


@named_arguments
@dataclass(frozen=True)
class GradientAccumulationPlugin:
    """Settings of :class:`GradientState`.

    Source: accelerate 1.15 ``utils/dataclasses.py`` (``GradientAccumulationPlugin``).
    """

    num_steps: int | None = None
    """Micro-batches per optimizer step; None is 1 (or ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``)."""
    adjust_scheduler: bool = True
    """Kept for code that reads it from :class:`GradientState`. Learning rates follow optimizer steps whatever it says,
    under a Trainer as with Accelerate 1.15, whose wrapper reads False for both values."""
    sync_with_dataloader: bool = True
    """Whether the end of the dataloader ends a window of micro-batches early."""
    sync_each_batch: bool = False
    """Whether to reduce gradients at every micro-batch all the same: less memory with FSDP, more communication."""
    short_windows: ShortWindows | None = None
    """The divisor of the gradients of an epoch's last window where that has fewer than ``num_steps`` micro-batches
    under a strategy: ``"full"`` for ``num_steps``, as in Lightning and Accelerate, or ``"mean"`` for the window's
    own number, as in transformers' Trainer. None is ``ACCELIGHT_SHORT_WINDOWS``, else ``"full"``."""
    average_over: AverageOver = "micro_batches"
    """Things of equal weight in a step under a strategy: ``"micro_batches"``, as in Lightning and Accelerate, or
    ``"items"`` (samples, tokens, pixels) of the window's micro-batches on all processes. ``training_step`` returns
    ``{"loss": mean_over_its_items, "num_items": n}`` then, and ``short_windows`` has no effect."""

    def __post_init__(self) -> None:
        if self.average_over not in get_args(AverageOver):
            raise ValueError(f"average_over must be 'micro_batches' or 'items', got {self.average_over!r}.")
        if self.short_windows is not None:
            _check_short_windows(self.short_windows, "short_windows")
        if self.num_steps is None:
            return
        if isinstance(self.num_steps, bool) or not isinstance(self.num_steps, int):
            raise TypeError(f"num_steps must be an int, got {self.num_steps!r}.")
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}. Use 1 for no accumulation.")

    def resolve_short_windows(self, environment: Mapping[str, str] | None = None) -> ShortWindows:
        """Return ``short_windows``, what the environment says where it is None, and ``"full"`` where nobody says.

        Raises:
            ValueError: If the environment has another value.
        """
        given = self.short_windows
        if given is None:
            environment = os.environ if environment is None else environment
            given = _check_short_windows(environment.get(_SHORT_WINDOWS_VARIABLE, "full"), _SHORT_WINDOWS_VARIABLE)
        return given

    def to_kwargs(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}


def _check_short_windows(value: object, name: str) -> ShortWindows:
    for allowed in get_args(ShortWindows):
        if value == allowed:
            return allowed
    raise ValueError(
        f"{name}={value!r} must be 'full' (divide by num_steps) or 'mean' (divide by the number of micro-batches in "
        "the window)."
    )


def size_of_window(batch_idx: int, num_batches: float | None, num_steps: int) -> int:
    """Return how many micro-batches the window of ``batch_idx`` has, if windows begin anew with each epoch.

    Args:
        batch_idx: Index of a micro-batch in its epoch.
        num_batches: Micro-batches in the epoch; None or infinity where unknown.
        num_steps: Micro-batches in a full window.

    Raises:
        ValueError: If there is no such micro-batch.
    """
    if batch_idx < 0 or (num_batches is not None and batch_idx >= num_batches):
        raise ValueError(f"batch_idx={batch_idx} is out of range: the epoch has {num_batches} micro-batches.")
    if num_batches is None or math.isinf(num_batches):
        return num_steps
    begin = batch_idx - batch_idx % num_steps
    return min(num_steps, int(num_batches) - begin)


# ------------------------------------------------------------------------------------------------
# The layout of samples in a global batch, and its padding, read from a dataloader's sampler.


@dataclass(frozen=True, kw_only=True)
class SampleLayout:
    """A dataloader's distribution of samples to processes."""

    remainder: int = -1
    """Samples that padding added to the last global batch; -1 where unknown."""
    interleaved: bool = False
    """Whether process r of n holds every n-th sample from r on, as ``DistributedSampler`` deals them."""
    batch_size: int | None = None
    """Samples per process in every batch but the last; None where unknown."""
    last_batch_size: int | None = None
    """Samples per process in the last batch; None where unknown."""
    num_replicas: int | None = None
    """Processes, or groups that see the same batches, with samples of their own; None where unknown."""


def layout_of(dataloader: Any, *num_replicas: int) -> SampleLayout:
    """Return the layout that the dataloader's samplers report; the unknown layout where they report none.

    Args:
        dataloader: Being iterated.
        *num_replicas: Numbers of processes among which a sampler may deal.
    """
    batch_sampler = getattr(dataloader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None)
    batch_size = getattr(batch_sampler, "batch_size", None)
    drop_last = getattr(batch_sampler, "drop_last", None)
    if sampler is None or not isinstance(batch_size, int) or drop_last is None:
        return SampleLayout()
    import torch.utils.data as data
    from torch.utils.data.distributed import DistributedSampler

    if isinstance(sampler, DistributedSampler):
        if sampler.num_replicas not in num_replicas:
            return SampleLayout()  # which processes have the same samples is unknown
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
        num_replicas=sampler.num_replicas,
    )
