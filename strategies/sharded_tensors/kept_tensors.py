"""Tensors that users' code has kept of parameters: aliases, views of gathered tensors, memory that parameters had.

Under ``ddp`` a view of a parameter has its values at any time, and what is written to it changes the parameter. Here
`Aliases` knows what shares memory with a shard; a gathered tensor lives as long as a view of it, and has the shards'
values whenever users' code uses that view; and a use of memory that a parameter has lost is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary
from typing_extensions import Self

from ...checkpoint.names import clean_name
from .shards import FlatShard, Sharded, gathered, local_part, part_of


@dataclass
class OpenTensor:
    """A full tensor that was gathered, and the shard that it is of."""

    tensor: Tensor
    """The user's object: the shard itself, or its parameter; not one of its aliases."""
    shard: Sharded
    full: Tensor
    version: int
    num_changes: int
    """The number of changes of shards before it was gathered; see `GlobalTensors.num_changes`."""
    seen: Tensor | None = None
    """The last seen values of NumPy arrays, whose writes no version counts; None where users have none."""
    arrays: list[ref[np.ndarray]] = field(default_factory=list)

    @classmethod
    def gathered(cls, tensor: Tensor, shard: Sharded, num_changes: int, into: Tensor | None = None) -> Self:
        """Return a new one; every rank calls it.

        Args:
            tensor: The user's.
            shard: Its shard.
            num_changes: How often shards may have changed before.
            into: The full tensor that an earlier one had.
        """
        with torch.inference_mode(False), torch.no_grad():  # versions of its values count
            full = gathered(shard).data  # no view: users' are views of it
        if into is not None:
            full = into if torch.equal(into, full) else into.copy_(full)  # a graph that waits for backward may have it
        return cls(tensor, shard, full, full._version, num_changes)

    @property
    def is_changed(self) -> bool:
        """Whether the full tensor has values that the shard lacks."""
        is_written = self.seen is not None and not torch.allclose(self.full, self.seen, rtol=0, atol=0, equal_nan=True)
        return is_written or self.full._version != self.version

    def show_uncounted(self, view: Any = None) -> None:
        """Take note that users get a view whose writes no version counts; an array may be a copy, which is none."""
        if isinstance(view, np.ndarray):
            if not is_array_of(view, self.full):
                return
            self.arrays.append(ref(view))
        if self.seen is None:
            self.seen = self.full.clone()

    def end(self) -> None:
        """Make arrays that users have kept read-only: their writes would reach no shard any more."""
        for one in self.arrays:
            if (array := one()) is not None:
                array.setflags(write=False)

    def write_back(self) -> None:
        """Copy what was written to the full tensor since to the shard."""
        if self.is_changed:
            local_part(self.shard).copy_(local_part(part_of(self.full, self.shard)))
            self._settle()

    @torch.no_grad()
    def refresh(self, num_changes: int) -> None:
        """Gather the shards' changes since into the full tensor; every rank calls it.

        Args:
            num_changes: How often shards may have changed before. Versions of the parts differ between the ranks: those
                of FSDP1 are views of one tensor, and a rank's part may be empty.
        """
        if num_changes != self.num_changes:
            self.full.copy_(gathered(self.shard))
            self.num_changes = num_changes
            self._settle()

    def _settle(self) -> None:
        self.version = self.full._version
        self.seen = None if self.seen is None else self.full.clone()


class _Kept:
    """A full tensor that lives on where users have kept views of it."""

    def __init__(self, opened: OpenTensor) -> None:
        self.tensor, self._version, self._full = opened.tensor, opened.version, TensorWeakRef(opened.full)

    def full(self) -> Tensor | None:
        """Return the full tensor, if it is still there.

        Raises:
            RuntimeError: If a view was written to where nobody saw it.
        """
        full: Tensor | None = self._full()
        if full is not None and full._version != self._version:
            raise RuntimeError(
                "A view of a sharded parameter (p.data[0], say) that a hook has kept was changed outside of hooks: "
                "the change has reached no process. Change the parameter in a hook."
            )
        return full


class Aliases:
    """Tensors that share memory with parameters: what ``p.data`` and ``p.detach()`` have returned.

    All ranks create the same aliases. Addresses do not identify them, because a rank's part may be empty.
    """

    def __init__(self) -> None:
        self.kept: dict[int, _Kept] = {}
        """By the identity of an original, its full tensor of earlier hooks, if users may have views of it."""
        self.gradients: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        """By the identity of a parameter whose gradient is made for each use, the first one that users still have."""
        self._originals: Any = WeakIdKeyDictionary()
        self._found: dict[int, list[ref[Tensor]]] = {}
        """By the identity of an original, its aliases. Nothing refers to originals weakly, which stops
        `nn.Module._apply`; an alias keeps its original alive, so that no identity stands for two."""

    def original(self, tensor: Tensor) -> Tensor:
        """Return the tensor of which another is an alias; itself if it is none."""
        original: Tensor = self._originals.get(tensor, tensor)
        return original

    def add(self, tensor: Tensor, alias: Tensor) -> Tensor:
        """Return ``alias``, and take note that it shares memory with ``tensor``."""
        original = self.original(tensor)
        if alias is not tensor and alias is not original:
            self._originals[alias] = original
            self._found.setdefault(id(original), []).append(ref(alias, partial(self._drop, id(original))))
        return alias

    def _drop(self, original: int, alias: ref[Tensor]) -> None:
        found = self._found.get(original, [])
        if alias in found:
            found.remove(alias)
        if not found:
            self._found.pop(original, None)

    def separate(self, tensor: Tensor, *, also_itself: bool = False) -> Tensor:
        """Give aliases memory of their own before ``tensor`` is assigned to, as that gives it; return the original.

        Args:
            tensor: The original, or an alias.
            also_itself: Whether the original is one among others, such as a gradient that is made for each use.
        """
        original = self.original(tensor)
        aliases = [each() for each in self._found.pop(id(original), ())]
        for alias in [*aliases, original] if also_itself else aliases:
            if alias is None:
                continue
            self._originals.pop(alias, None)
            if isinstance(alias, FlatShard):
                alias.held = alias.held.detach().clone()
            elif isinstance(alias, DTensor):
                alias._local_tensor = alias._local_tensor.detach().clone()
            else:
                alias.data = alias.detach().clone()
        self.kept.pop(id(original), None)
        return original

    def keep(self, opened: dict[int, OpenTensor]) -> None:
        """Take over full tensors as a hook ends; they are freed unless users have views of them."""
        for key in list(opened):
            opened[key].end()
            self.kept[key] = _Kept(opened.pop(key))
        self.kept = {key: one for key, one in self.kept.items() if one.full() is not None}


class OldMemory:
    """Memory that parameters have lost, and that users' code may have kept: when they were sharded, or by ZeRO-3."""

    def __init__(self) -> None:
        self._parts: dict[Any, list[_Lost]] = {}
        """By `weak_storage`."""
        self._num_steps = 0
        self._most_parts = 0
        """Beyond which `_parts` may have more freed than used ones."""
        self.replaced: dict[int, tuple[TensorWeakRef, nn.Parameter]] = {}
        """By the identity of an original parameter that is still there, the one that FSDP2 has put in its place."""

    @staticmethod
    def of(module: nn.Module) -> OldMemory:
        """Return the module's."""
        return _old_memory.setdefault(module, OldMemory())

    def take(self, module: nn.Module) -> None:
        """Note where parameters are; the module is about to be sharded."""
        for name, parameter in module.named_parameters():
            part = None if isinstance(parameter, UninitializedParameter) else local_part(parameter)
            if part is not None and part.device.type != "meta" and part.numel():
                parts = self._parts.setdefault(weak_storage(part), [])
                parts.append(_Lost(*_addresses(part), clean_name(name), step=None))

    def forget(self, module: nn.Module) -> None:
        """Forget what is freed, and what parameters have where they had it before."""
        used = {weak_storage(local_part(one)) for one in module.parameters()}
        self._parts = {key: one for key, one in self._parts.items() if not key.expired() and key not in used}

    @contextmanager
    def partitioning(self, parameter: nn.Parameter, name: str, part: Tensor) -> Iterator[None]:
        """Note the memory that a gathered parameter loses, if a view or a graph still has it.

        Args:
            parameter: Gathered.
            name: Its name.
            part: What this process keeps of it; one that is alone keeps all, and loses nothing.
        """
        storage, begin, size = weak_storage(parameter), parameter.data_ptr(), parameter.nbytes
        yield
        if not storage.expired() and parameter.data_ptr() != begin and weak_storage(part) != storage:
            self._parts.setdefault(storage, []).append(_Lost(begin, begin + size, name, self._num_steps))
            if len(self._parts) > self._most_parts:
                self._parts = {key: one for key, one in self._parts.items() if not key.expired()}
                self._most_parts = 2 * len(self._parts)

    def begin_step(self) -> bool:
        """Take note that a training step begins; return whether it may use memory that an earlier one has kept."""
        self._num_steps += 1
        return any(
            not storage.expired() and any(each.step is not None for each in parts)
            for storage, parts in self._parts.items()
        )

    def end_values(self) -> None:
        """Take note that an optimizer has stepped: what is lost so far has older values than its parameters."""
        self._num_steps += 1

    def present(self, tensor: Tensor) -> Tensor:
        """Return the parameter that has taken the place of an original one; any other tensor as it is."""
        original, present = self.replaced.get(id(tensor), (None, tensor))
        return present if original is None or original() is tensor else tensor

    def check(self, tensors: Iterator[Tensor], hook: str, *, in_step: bool) -> None:
        """Check that none of these tensors lies in such memory; a step may use what it has gathered itself.

        Integers are not trained: those of a quantized layer, which it keeps, have the values of now.

        Raises:
            RuntimeError: If one does.
        """
        for tensor in tensors if self._parts else ():
            is_trained = tensor.dtype.is_floating_point or tensor.dtype.is_complex
            if type(tensor) not in (Tensor, nn.Parameter) or not is_trained or not has_storage(tensor):
                continue
            parts = self._parts.get(weak_storage(tensor), ())
            begin, end = _addresses(tensor) if parts else (0, 0)
            for lost in parts:
                if begin < lost.end and lost.begin < end and not (in_step and lost.step == self._num_steps):
                    raise RuntimeError(_kept_error(hook, lost))


class _Lost(NamedTuple):
    """Memory that a parameter had."""

    begin: int
    end: int
    name: str
    step: int | None
    """Number of the training step that had gathered it; None of what was there before the model was sharded."""


def _kept_error(hook: str, lost: _Lost) -> str:
    if lost.step is None:
        when = "before the model was sharded: p.data, a view or a bound method of it, kept since then"
    else:
        when = "when a training step had gathered it: a part of it that the step has kept (self.row = weight[0])"
    return (
        f"{hook or 'User code'} uses a tensor that shares memory with {lost.name!r} as it was {when}. It has the "
        "values of then, and changes of it reach nothing. Read the parameter from its module where it is used; to keep "
        "the values of then, keep a copy (p.detach().clone())."
    )


_old_memory: WeakKeyDictionary[nn.Module, OldMemory] = WeakKeyDictionary()


def weak_storage(tensor: Tensor) -> Any:
    """Return a reference to a tensor's storage, which keeps its address from being reused."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _addresses(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's elements, and the first one after them."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size() if tensor.numel() else 0


def share_memory(full: Tensor, tensor: Any) -> bool:
    """Return whether something is a plain tensor in the memory of ``full``."""
    is_plain = isinstance(tensor, Tensor) and not isinstance(tensor, Sharded) and has_storage(tensor)
    return is_plain and full.device == tensor.device and storage_of(full) == storage_of(tensor)


def is_array_of(array: np.ndarray, tensor: Tensor) -> bool:
    """Return whether a NumPy array, made of a tensor, lies in its memory; one of another dtype is a copy."""
    begin, end = _addresses(tensor)
    return begin <= array.ctypes.data < end


def check_not_freed(tensor: Tensor, hook: str) -> None:
    """Refuse a tensor whose memory FSDP has freed: reading it would end the process."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.numel() and has_storage(tensor)
    if is_plain and not tensor.untyped_storage().nbytes():
        raise RuntimeError(
            f"{hook or 'User code'} uses a parameter, or a part of one, that a training step or a forward has kept "
            "(self.row = self.layer.weight[0]): FSDP frees the memory of unsharded parameters after the forward. Read "
            "the parameter from its module where it is used, or keep a copy (weight[0].detach().clone())."
        )


def has_storage(tensor: Tensor) -> bool:
    """Return whether a tensor has memory: sparse ones have none, nor those in `torch.func` and `torch.export`."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()
