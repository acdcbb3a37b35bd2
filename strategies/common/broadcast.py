"""All ranks begin with rank 0's parameters and buffers, as under ``DistributedDataParallel``.

The ranks compare names, shapes and dtypes first: tensors that differ in size would mix up bytes, or hang. Digests of
frozen weights show what checkpoints can leave out, and whether a run that resumes has the same.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ...checkpoint.files import listed
from ...state.collectives import sending_device
from ...state.process_group import is_planned, require_group
from ...state.rendezvous import num_ranks
from ..sharded_tensors.shards import FlatShard, copies_of
from ..upstream.torch_core import compute_local_shape_and_global_offset, is_traceable_wrapper_subclass

_BUCKET_BYTES = 2**18
"""Tensors smaller than this are sent together, which takes a copy; larger ones are sent from where they are."""
_PIECE_BYTES = 32 * 2**20
"""Part of a tensor that passes through another device at once."""


def check_layout(tensors: Mapping[str, Tensor]) -> list[str]:
    """Check that every rank has the same tensors; every rank calls it.

    Args:
        tensors: Parameters and buffers by name.

    Returns:
        The names of those that have values on rank 0 and are on the meta device on another rank.

    Raises:
        RuntimeError: On every rank, if names, shapes or dtypes differ, or if a tensor has values on another rank and
            none on rank 0; it names them.
    """
    if _is_alone():
        return []
    mine = {name: (_described(tensor), tensor.is_meta) for name, tensor in tensors.items()}
    digest = hashlib.sha256(repr(mine).encode()).hexdigest()
    digests: list[str] = [""] * num_ranks()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        return []
    layouts: list[dict[str, tuple[str, bool]]] = [{}] * num_ranks()
    dist.all_gather_object(layouts, mine)
    problems: dict[str, str] = {}
    for rank, other in enumerate(layouts[1:], 1):
        for name in dict.fromkeys([*layouts[0], *other]):
            here, there = layouts[0].get(name, ("missing", False)), other.get(name, ("missing", False))
            if here[0] != there[0]:
                problems.setdefault(name, f"{name!r} is {here[0]} on process 0 and {there[0]} on process {rank}")
            elif here[1] and not there[1]:
                problems.setdefault(name, f"{name!r} is on the meta device on process 0 but not on process {rank}")
        if not problems and list(layouts[0]) != list(other):
            first = next(pair for pair in zip(layouts[0], other, strict=True) if pair[0] != pair[1])
            problems[""] = f"{first[0]!r} on process 0 is in the position of {first[1]!r} on process {rank}"
    if problems:
        raise RuntimeError(
            f"The processes have built different models: {listed([*problems.values()], separator='; ')}. Build the "
            "same model on every process: its structure must not depend on the rank or on random numbers."
        )
    return [name for name, (_, is_meta) in layouts[0].items() if not is_meta and any(one[name][1] for one in layouts)]


def send_from_rank_zero(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Give every rank rank 0's values, in place; every rank calls it, with tensors that `check_layout` has compared.

    What lies on another device than the process group sends from passes through it in pieces. Tensors on the meta
    device, uninitialised ones and DTensors are left alone.

    Args:
        tensors: Parameters and buffers, in the same order on every rank.
        device: Where this process computes.
    """
    if _is_alone():
        return
    sender = sending_device(device, require_group("The parameters and buffers of process 0"))
    is_source = dist.get_rank() == 0
    with torch.no_grad():
        for bucket in _buckets(piece for tensor in tensors for piece in plain_parts(tensor)):
            _broadcast(bucket, sender, is_source)


def check_values(tensors: Mapping[str, Tensor]) -> None:
    """Check that all ranks have the same values under a name; every rank calls it, after `check_layout`.

    Raises:
        RuntimeError: On every rank, if values differ; it names the tensors.
    """
    if _is_alone():
        return
    mine = {name: _fingerprint(tensor) for name, tensor in tensors.items()}
    everyone: list[dict[str, int]] = [{}] * num_ranks()
    dist.all_gather_object(everyone, mine)
    first: dict[str, int] = {}
    different = dict.fromkeys(
        name for one in everyone for name, value in one.items() if first.setdefault(name, value) != value
    )
    if different:
        raise RuntimeError(
            f"The processes start with different values of {listed([repr(name) for name in different])}, and "
            "sync_module_states=False keeps them: a sharded parameter would mix the values of several processes. "
            "Omit sync_module_states, so that all processes start with the values of process 0, or create the same "
            "values everywhere (call seed_everything() before building the model)."
        )


def _is_alone() -> bool:
    return num_ranks() == 1 or is_planned()


def _described(tensor: Tensor) -> str:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return f"uninitialized {tensor.dtype}"
    shape = getattr(tensor, "ds_shape", tensor.shape)  # of a parameter that DeepSpeed has partitioned
    return f"{tuple(shape)} {str(tensor.dtype).removeprefix('torch.')}"


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that hold the values of ``tensor``."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer | DTensor):
        return
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        names, _ = wrapper.__tensor_flatten__()
        for name in names:
            yield from plain_parts(getattr(wrapper, name))
    elif not tensor.is_meta and tensor.numel():
        yield tensor.detach()


def _pieces(flat: Tensor) -> Sequence[Tensor]:
    return torch.split(flat, max(1, _PIECE_BYTES // flat.element_size()))


def _fingerprint(tensor: Tensor) -> int:
    checksum = 0
    for part in plain_parts(tensor):
        flat = part.contiguous().reshape(-1)
        for piece in _pieces(flat):
            content: Any = piece.view(torch.uint8).cpu().numpy()
            checksum = zlib.crc32(content, checksum)
    return checksum


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one dtype and device that are sent together, in an order that is the same on every rank."""
    open_buckets: dict[torch.dtype, list[Tensor]] = {}
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size >= _BUCKET_BYTES:
            yield [tensor]
            continue
        kind = tensor.dtype
        if sizes.get(kind, 0) + size > _BUCKET_BYTES:
            yield open_buckets.pop(kind)
            sizes[kind] = 0
        open_buckets.setdefault(kind, []).append(tensor)
        sizes[kind] = sizes.get(kind, 0) + size
    yield from open_buckets.values()


def _broadcast(tensors: list[Tensor], device: torch.device, is_source: bool) -> None:
    if len(tensors) == 1:
        _broadcast_one(tensors[0], device, is_source)
        return
    flat = torch.cat([tensor.to(device).reshape(-1) for tensor in tensors])
    dist.broadcast(flat.view(torch.uint8), src=0)  # as bytes: not every backend knows every dtype
    if not is_source:
        for tensor, values in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            _write(tensor, values)


def _broadcast_one(tensor: Tensor, device: torch.device, is_source: bool) -> None:
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.device == device:
        dist.broadcast(flat.view(torch.uint8), src=0)
    else:
        for piece in _pieces(flat):
            sent = piece.to(device)
            dist.broadcast(sent.view(torch.uint8), src=0)
            if not is_source:
                piece.copy_(sent)
    if not is_source and flat.data_ptr() != tensor.data_ptr():
        _write(tensor, flat)


def _write(tensor: Tensor, values: Tensor) -> None:
    values = values.view(tensor.shape)
    if 0 not in tensor.stride() or not torch.equal(tensor, values.to(tensor.device)):  # an expanded one takes no copies
        tensor.copy_(values)


# ------------------------------------------------------------------------------------------------
# Frozen weights that checkpoints leave out: known by a digest that is the same however they are sharded.


Shards = Mapping[str, tuple[Tensor, bool]]
"""This rank's part of each parameter, and whether it trains."""
FROZEN_BASE = "accelight_frozen_base"
"""Key of checkpoints: shape, dtype and digest of each parameter that they leave out."""
_NUM_AT_ONCE = 2**22
_FACTORS = (-7046029254386353131, -4658895280553007687)  # odd, with their bits spread


class FrozenBase:
    """The frozen weights that a fit begins with; every rank calls the methods.

    Args:
        shards: Of all parameters.
        device: Of the ranks' collectives.
    """

    def __init__(self, shards: Shards, device: torch.device) -> None:
        self._device = device
        self._described = describe({name: one for name, (one, is_trained) in shards.items() if not is_trained}, device)

    def unchanged(self, shards: Shards) -> dict[str, list[Any]]:
        """Return the frozen tensors that have their initial values, described for a checkpoint."""
        frozen = {name: one for name, (one, is_trained) in shards.items() if not is_trained and name in self._described}
        now = describe(frozen, self._device)
        return {name: known for name, known in now.items() if known == self._described[name]}


def describe(tensors: Mapping[str, Tensor], device: torch.device | None) -> dict[str, list[Any]]:
    """Return shape, dtype and digest of each tensor, the same for every sharding; every rank calls it.

    Args:
        tensors: Sharded or not, by name.
        device: Of the ranks' collectives; None for a process that calls it alone, with whole tensors.
    """
    if not tensors:
        return {}
    alone = device is None or num_ranks() == 1
    digests = torch.stack([_digest(one, alone=alone) for one in tensors.values()])
    if not alone:
        digests = digests.to(device)
        dist.all_reduce(digests)
    described = ([list(one.shape), str(one.dtype).removeprefix("torch.")] for one in tensors.values())
    return {name: [*known, digest] for name, known, digest in zip(tensors, described, digests.tolist(), strict=True)}


def check_base(stored: Mapping[str, Sequence[Any]], shards: Shards, device: torch.device | None, path: object) -> None:
    """Check that a model has the frozen weights that a checkpoint has left out; every rank calls it.

    Args:
        stored: What `FrozenBase.unchanged` gave when it was saved.
        shards: Of the model's parameters.
        device: See `describe`.
        path: Of the checkpoint.

    Raises:
        RuntimeError: On every rank, naming the weights that are others.
    """
    present = {name: one for name, (one, _) in shards.items() if name in stored}
    now = describe(present, device)
    problems = [f"{name} is missing" for name in stored if name not in now]
    for name, known in now.items():
        if known[:2] != list(stored[name][:2]):
            problems.append(f"{name} is {known[1]} {tuple(known[0])}, not {stored[name][1]} {tuple(stored[name][0])}")
        elif known[2] != stored[name][2]:
            problems.append(f"{name} has other values")
    if problems:
        raise RuntimeError(
            f"{path} has only what trained (save_trainable_only=True), and the frozen weights of this model are not "
            f"those that it was trained with: {listed(problems, separator='; ')}. Build the module with the same "
            "pretrained weights, or name them in pretrained_weights."
        )


@torch.no_grad()
def _digest(tensor: Tensor, *, alone: bool) -> Tensor:
    """Return a sum over this rank's elements: of their bits, each multiplied by a number that its place gives."""
    total = torch.zeros((), dtype=torch.int64)
    for offsets, part in _parts(tensor, alone=alone):
        strides = [1]
        for size in reversed(tensor.shape[1:]):
            strides.insert(0, strides[0] * max(1, size))
        rows = max(1, _NUM_AT_ONCE // max(1, part[:1].numel())) if part.dim() else 1
        for begin in range(0, part.shape[0], rows) if part.dim() else (0,):
            some = part[begin : begin + rows] if part.dim() else part
            place = torch.zeros((), dtype=torch.int64, device=some.device)
            for dim, (offset, size) in enumerate(zip(offsets, some.shape, strict=True)):
                first = offset + (begin if dim == 0 else 0)
                steps = torch.arange(first, first + size, device=some.device) * strides[dim]
                place = place.unsqueeze(-1) + steps
            weight = place * _FACTORS[0]
            weight = (weight ^ (weight >> 29)) * _FACTORS[1] | 1
            total += ((_bits(some) + 1) * weight).sum().cpu()
    return total


def _bits(values: Tensor) -> Tensor:
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj()).sum(-1)
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if values.dtype == torch.bool:
        return values.to(torch.int64)
    return values.contiguous().view(sizes[values.element_size()]).to(torch.int64)


def _parts(tensor: Tensor, *, alone: bool) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Yield this rank's parts of a tensor with their offsets; of copies on several ranks, one rank yields its own."""
    if isinstance(tensor, FlatShard):
        if tensor.place.replica == 0:
            yield from ((box.offsets, values) for box, values in tensor.boxes())
        return
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate() or ()
        copies = [at for at, placement in zip(coordinate, tensor.placements, strict=True) if placement == Replicate()]
        if not any((copies_of(tensor.device_mesh)[0], *copies)):
            _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            yield offsets, tensor.to_local()
        return
    if alone or dist.get_rank() == 0:
        yield from (((0,) * part.dim(), part) for part in plain_parts(tensor))


# ------------------------------------------------------------------------------------------------
# Buffers are rank 0's at each forward, where and when ``DistributedDataParallel`` makes them so by default.
#
# [Note: when buffers are broadcast] torch broadcasts before a forward, unless the forward before it ran without
# gradient or in ``no_sync``: before each first micro-batch of a window, and before the first batch of a validation; in
# manual optimization before the first step of a fit alone. Here those broadcasts are left out whose result is known:
# each rank looks at version and identity of its buffers, and says whether they have changed in a message that the ranks
# exchange for each step anyway (`Termination`). From the first change on all broadcast, as torch does. Changes that
# leave no trace (``buffer.data``) are found where rank 0's values arrive all the same: in the first forwards of a fit,
# in the first one of each epoch and of each evaluation.


_NUM_FIRST = 3
"""Forwards of a fit that broadcast whether buffers have changed or not."""


class BufferSync:
    """Follows the buffers of one model through its fits.

    Args:
        is_on: Whether buffers are rank 0's at each forward; else each rank keeps its own.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._root: nn.Module | None = None
        self._device = torch.device("cpu")
        self._holders: list[dict[str, Tensor | None]] = []
        self._seen: list[tuple[Tensor, int]] = []
        self._is_due = self._accumulates = False
        self._is_changing = False
        """Whether buffers have changed on any rank: the same on all ranks."""
        self._differ = False
        """Whether this rank has found that they have, and that no version shows it."""
        self._num_certain = 0

    def attach(self, root: nn.Module, device: torch.device) -> None:
        """Begin a fit, with rank 0's buffers; every rank calls it."""
        self.detach()
        if self.is_on and num_ranks() > 1:
            self._root, self._device = root, device
            self._is_due, self._num_certain = True, _NUM_FIRST
            self._find()
            self._broadcast(looks=False)

    def detach(self) -> None:
        """End a fit."""
        self._root, self._holders, self._seen = None, [], []
        self._is_due = self._is_changing = self._differ = self._accumulates = False

    # ------------------------------------------------------------------ what the ranks agree on
    def message(self) -> int:
        """Return whether this rank's buffers have changed since the last broadcast, for the maximum over all ranks."""
        return int(self._is_changing or self._differ or (bool(self._holders) and self._have_changed()))

    def receive(self, of_all: int) -> None:
        """Take note of the maximum of all ranks' messages."""
        self._is_changing = self._is_changing or (bool(of_all) and self._root is not None)

    def expect_changes(self) -> None:
        """Make the next forward broadcast if it is one that may: at the beginning of an epoch, on all ranks."""
        self._num_certain = max(self._num_certain, 1)

    # ------------------------------------------------------------------ around forwards
    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Run a micro-batch whose gradients are not reduced."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    @contextmanager
    def forward(self, *, is_trained: bool) -> Iterator[None]:
        """Run a step of the module, with rank 0's buffers if torch would broadcast them before it.

        Args:
            is_trained: Whether a backward follows that the strategy runs: not in evaluation and manual optimization.
        """
        if self._root is not None and self._is_due:
            is_certain = self._num_certain > 0 or not torch.is_grad_enabled()
            if is_certain:
                self._find()
            if self._holders and (is_certain or self._is_changing):
                self._broadcast(looks=is_certain and not self._is_changing)
            self._num_certain = max(self._num_certain - 1, 0)
        yield
        self._is_due = is_trained and torch.is_grad_enabled() and not self._accumulates

    def _find(self) -> None:
        """Find the buffers, which code may have registered since."""
        if self._root is not None:
            self._holders = [each._buffers for each in self._root.modules() if each._buffers]
        if not self._seen:
            self._seen = [(buffer, version_of(buffer)) for buffer in self._buffers()]

    def _buffers(self) -> list[Tensor]:
        """Return the buffers, each once; those that are DTensors are alike on all ranks, by their placements."""
        found = (buffer for holder in self._holders for buffer in holder.values())
        return list({id(one): one for one in found if one is not None and not isinstance(one, DTensor)}.values())

    def _have_changed(self) -> bool:
        buffers = self._buffers()
        return len(buffers) != len(self._seen) or any(
            buffer is not seen or version_of(buffer) != version
            for buffer, (seen, version) in zip(buffers, self._seen, strict=True)
        )

    def _broadcast(self, *, looks: bool) -> None:
        buffers = self._buffers()
        before = [buffer.clone() for buffer in buffers] if looks and dist.get_rank() else []
        writable: Any = tuple(buffer for buffer in buffers if not buffer.is_inference())
        # As torch does: a graph that has not run backward may have saved them.
        with torch.autograd._unsafe_preserve_version_counter(writable):  # type: ignore[attr-defined]
            send_from_rank_zero(buffers, self._device)
        if any(not torch.equal(*pair) for pair in zip(buffers, before, strict=False)):
            self._differ = True
        if not self._is_changing:
            self._seen = [(buffer, version_of(buffer)) for buffer in buffers]


def version_of(tensor: Tensor) -> int:
    """Return a number that each change of a tensor in place raises; broadcasts, and changes of its ``data``, do not."""
    return -1 if tensor.is_inference() else tensor._version
