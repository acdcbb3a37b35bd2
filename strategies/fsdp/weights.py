"""Initial weights of a sharded model: each rank's own, rank 0's, or files; full state dicts into sharded parameters."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...checkpoint.files import listed
from ...checkpoint.formats.base import FileTensor, read_weight_map
from ...checkpoint.formats.safetensors import read_safetensors
from ...checkpoint.object_path import PART_BYTES, ObjectPath
from ...checkpoint.storage import source_path
from ...state.collectives import sending_device
from ...state.rendezvous import num_ranks, raise_on_all_ranks, raise_together
from ..common.broadcast import check_layout, check_values, send_from_rank_zero
from ..parallelism.tensor import check_parallelized, is_cut
from ..sharded_tensors.shards import local_part
from ..upstream.lightning import rank_zero_warn
from ..upstream.patches import Patches
from .engine import Engine
from .sharded_model import (
    NamedTensor,
    ShardedModel,
    materialize,
    named_tensors,
    open_tensors,
    own_tensors,
    recall_sharded,
    swap_for_empty,
    unwrap_root,
)


def prepare_with_weights(
    engine: Engine[Any], model: nn.Module, process: Process, pretrained_weights: str | os.PathLike[str] | None = None
) -> ShardedModel:
    """Shard ``model`` and see to it that every shard has the right values; every rank calls it.

    All ranks begin with rank 0's values. Where the values come from elsewhere, nothing that this rank holds is kept
    while it is sharded, and what arrives is shards alone. A model that is sharded already keeps its form and its
    values.

    Args:
        engine: How to shard, and whether rank 0's values replace the other ranks'.
        model: With values on all ranks, on rank 0 (``cpu_ram_efficient_loading``), or nowhere (``pretrained_weights``).
        process: Anything with ``device`` and ``is_main_process``.
        pretrained_weights: Safetensors file or folder, with the model's names or those inside the one attribute that
            holds all of its parameters.

    Raises:
        RuntimeError: On every rank, if the values and the model do not fit, if the ranks have built different models,
            or if they begin with different values and ``sync_module_states`` is False.
    """
    if recall_sharded(model, engine.version) is not None:
        return engine.prepare(model)
    if engine.num_ranks == num_ranks():
        from_rank_zero = pretrained_weights is None and engine.settings.cpu_ram_efficient_loading
        check_parallelized(model, engine.tensor_parallel, from_rank_zero=from_rank_zero)
    if pretrained_weights is None and not engine.settings.cpu_ram_efficient_loading and not _begin_alike(engine, model):
        return engine.prepare(model)
    _check_metrics(model)
    taken = take_weights(model, keep=process.is_main_process or pretrained_weights is not None)
    if pretrained_weights is not None:
        taken.state_dict.clear()  # buffers are all that no file holds
    sharded = engine.prepare(model, deferred_init=True)
    with engine.named_tensors(sharded) as (tensors, targets):
        if pretrained_weights is None:
            send_shards(process, tensors, taken.state_dict, taken.buffers, targets)
        else:
            prefixes = ("", f"{sharded.module_attribute}.") if sharded.module_attribute else ("",)
            read_slices(pretrained_weights, tensors, taken.buffers, targets, prefixes=prefixes)
    return sharded


def _begin_alike(engine: Engine[Any], model: nn.Module) -> bool:
    """Give every rank rank 0's values; every rank calls it, before sharding.

    Returns:
        Whether some ranks have no memory for the values, so that each is to be sent its shards.

    Raises:
        RuntimeError: On every rank, if the ranks have built different models, or begin with different values and
            ``sync_module_states`` is False.
    """
    if engine.num_ranks != num_ranks():  # a mesh of one's own, over some of the ranks
        return False
    tensors = {named.name: named.tensor for named in named_tensors(model)}
    absent = check_layout(tensors)
    if not engine.settings.sync_module_states:
        parameters = {name: one for name, one in tensors.items() if isinstance(one, nn.Parameter)}
        rank = 0 if engine.tensor_parallel is None else engine.tensor_parallel.rank
        check_values(
            {f"{name} (part {rank})" if is_cut(one) else name: local_part(one) for name, one in parameters.items()}
        )
    elif absent:
        return True
    else:
        send_from_rank_zero(tensors.values(), engine.device)
        _send_parts(engine, tensors.values(), range(engine.mesh.ndim))
    return False


def _send_parts(engine: Engine[Any], tensors: Iterable[Tensor], dims: Iterable[int]) -> None:
    """Give all ranks that hold one part of a DTensor the first one's values; every rank calls it.

    Args:
        engine: Of the mesh.
        tensors: Among them DTensors.
        dims: Of the mesh, over which none of them is sharded.
    """
    parallel = engine.tensor_parallel
    with torch.no_grad():
        for tensor in tensors:
            if isinstance(tensor, DTensor) and not tensor.is_meta:
                groups = [engine.mesh.get_group(at) for at in dims]
                if parallel is not None and not is_cut(tensor):
                    groups.append(parallel.group)
                for group in groups:
                    dist.broadcast(tensor.to_local(), group=group, group_src=0)


def materialize_alike(engine: Engine[Any], root: nn.Module) -> None:
    """Give what is on the meta device values after sharding, by ``reset_parameters()``; every rank calls it.

    What is not sharded gets rank 0's. A shard is one rank's alone, and the copies of hybrid sharding get the first
    one's.

    Args:
        engine: That has sharded ``root``.
        root: With values, or on the meta device, or with some modules there.
    """
    made = [module for module in root.modules() if any(one.is_meta for one in own_tensors(module))]
    if not made:
        return
    valued = [(one, one.detach().clone()) for module in made for one in own_tensors(module) if not one.is_meta]
    materialize(root, engine.device)
    without: set[str] = set()
    for module in made:
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        else:
            without.add(type(module).__name__)
    with torch.no_grad():
        for tensor, value in valued:
            tensor.copy_(value)
    if without:
        rank_zero_warn(
            f"{', '.join(sorted(without))}: parameters or buffers on the meta device have undefined values, since "
            "these modules have no reset_parameters(). Define it, or create them with values."
        )
    if not engine.settings.sync_module_states:
        return
    tensors = [named.tensor for named in named_tensors(root)]
    send_from_rank_zero([tensor for tensor in tensors if not isinstance(tensor, DTensor)], engine.device)
    _send_parts(engine, tensors, range(engine.mesh.ndim - 1))


def _check_metrics(model: nn.Module) -> None:
    """Refuse metrics on the meta device: their states are neither parameters nor buffers, so nobody fills them.

    Raises:
        RuntimeError: On every rank.
    """
    from torchmetrics import Metric

    empty = [
        name
        for name, module in model.named_modules()
        if isinstance(module, Metric)
        for value in module._defaults.values()
        if not isinstance(value, list) and value.is_meta
    ]
    problem = f"the metrics {sorted(set(empty))} are on the meta device: create them in __init__()"
    raise_together("Preparing the model", [problem] if empty else [])


# ------------------------------------------------------------------------------------------------
# Loading a full state dict of rank 0 into a sharded model: each rank receives its own shards only.


_WHAT = "Loading a full state dict into the sharded model"
_NUM_IN_BATCH = 4


class Process(Protocol):
    """The required part of an ``accelerator``: the strategy, ``PartialState`` and Accelerate's own have it."""

    @property
    def device(self) -> torch.device:
        """This process's device."""
        ...

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        ...


@dataclass(frozen=True)
class _Need:
    """One rank's request for its part of one tensor."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    persistent: bool


def fsdp2_load_full_state_dict(
    accelerator: Process,
    model: nn.Module,
    full_sd: Mapping[str, Any] | None,
    *,
    buffers_from: nn.Module | Mapping[str, Tensor] | None = None,
) -> None:
    """Load rank 0's full state dict into a sharded model, in place; every rank calls it.

    Rank 0 cuts each tensor and sends each rank its part: no byte crosses the wire that the receiver does not keep, and
    a receiver holds its shards and, where dtype or device differ, one part more. Names decide what goes where. Tensors
    on the meta device get memory, and stay the same objects: ties and optimizers keep holding them. The model's dtypes
    stay, values are cast.

    Args:
        accelerator: Anything with ``device`` and ``is_main_process``.
        model: Sharded, on the meta device or with values; ignored parameters and buffers are unsharded.
        full_sd: The weights and persistent buffers, on rank 0. Ignored elsewhere.
        buffers_from: On rank 0, a module with the same names, or its buffers by name, for non-persistent buffers
            that are on the meta device somewhere. Default: ``model`` itself. Non-persistent buffers with values are
            left alone.

    Raises:
        RuntimeError: On every rank, before anything is sent or changed: if names are missing or unexpected or shapes
            differ (all are listed), or tied names stand for different values.

    Source: accelerate 1.15 ``utils/fsdp_utils.py``, which broadcasts each full tensor to every rank.
    """
    with raise_on_all_ranks(_WHAT):
        tensors, targets = open_tensors(model, accelerator.device)
        buffers = buffers_by_name(unwrap_root(model) if buffers_from is None else buffers_from)
    send_shards(accelerator, tensors, full_sd or {}, buffers, targets)


def send_shards(
    accelerator: Process,
    tensors: Sequence[NamedTensor],
    full_sd: Mapping[str, Any],
    buffers: Mapping[str, Tensor],
    targets: Callable[[], list[Tensor]],
) -> None:
    """Fill this rank's part of each tensor with rank 0's values; every rank calls it.

    Args:
        accelerator: Anything with ``device`` and ``is_main_process``.
        tensors: The tensors to fill.
        full_sd: Rank 0's values of persistent tensors, by any of their names; ignored elsewhere.
        buffers: Rank 0's values of the others, likewise.
        targets: Returns the memory of this rank's part of each tensor, called when all is found to fit.

    Raises:
        RuntimeError: On every rank, before anything is sent, if names, shapes, dtypes or ties do not fit.
    """
    reports: list[Any] = [None] * num_ranks()
    with raise_on_all_ranks(_WHAT):
        needs = [_need(named) for named in tensors]
        if accelerator.is_main_process != (_rank() == 0):
            raise ValueError(f"is_main_process={accelerator.is_main_process}: the state dict must be on rank 0.")
    if num_ranks() == 1:
        reports = [needs]
    else:
        dist.gather_object(needs, reports if _rank() == 0 else None, dst=0)
    sources: dict[str, Tensor] = {}
    problems: list[str] = []
    if _rank() == 0:
        sources = {name: value for name, value in full_sd.items() if isinstance(value, Tensor)}
        others = sorted(set(full_sd) - set(sources))
        problems = [f"not tensors in the state dict: {listed(others)}"] if others else []
        problems += _compare(sources, reports)
        problems += _compare_dtypes(reports)
        problems += _find_buffers(sources, buffers, reports)
    raise_together(_WHAT, problems)
    with raise_on_all_ranks(_WHAT):
        parts = targets()
    device = accelerator.device if num_ranks() == 1 else sending_device(accelerator.device, _world())
    if num_ranks() > 1 and device.type != "cpu":  # NCCL's first communication must be one of all ranks
        dist.all_reduce(torch.zeros((), device=device))
    if _rank() == 0:
        _send(sources, reports, device)
        for need, part in zip(needs, parts, strict=True):
            part.copy_(_cut(_source_of(need, sources), need))
    else:
        _receive(needs, parts, device)


def _rank() -> int:
    return dist.get_rank() if num_ranks() > 1 else 0


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("There is no process group.")
    return group


def _need(named: NamedTensor) -> _Need:
    offsets, sizes = named.part()
    return _Need(named.names, named.shape, offsets, sizes, named.tensor.dtype, named.persistent)


def _compare(sources: Mapping[str, Tensor], reports: list[list[_Need]]) -> list[str]:
    """Return the problems of names, shapes and ties."""
    problems: dict[str, None] = {}
    wanted = {need.names: need for needs in reports for need in needs if need.persistent}
    missing = sorted(names[0] for names in wanted if not any(name in sources for name in names))
    unexpected = sorted(set(sources) - {name for names in wanted for name in names})
    for kind, found in (("missing in", missing), ("unexpected in", unexpected)):
        if found:
            problems[f"{kind} the state dict: {listed(found)}"] = None
    for need in (need for needs in reports for need in needs if need.persistent):
        present = [name for name in need.names if name in sources]
        for name in present:
            if tuple(sources[name].shape) != need.shape:
                problems[f"{name!r} is {tuple(sources[name].shape)} in the state dict, {need.shape} in the model"] = (
                    None
                )
    for names in wanted:
        first, *others = [name for name in names if name in sources] or [""]
        for other in others:
            if not _same(sources[first], sources[other]):
                problems[f"{first!r} and {other!r} are tied in the model, but differ in the state dict"] = None
    problems.update(
        {f"{name!r} is on the meta device in the state dict": None for name in sources if sources[name].is_meta}
    )
    return list(problems)


def _compare_dtypes(reports: list[list[_Need]]) -> list[str]:
    """Return which tensors have other dtypes on other ranks: gathering their shards would mix up bytes."""
    first = {need.names: need.dtype for need in reports[0]}
    problems: dict[str, None] = {}
    for rank, needs in enumerate(reports):
        for need in needs:
            if need.dtype != first.get(need.names, need.dtype):
                problems[f"{need.names[0]!r} is {first[need.names]} on rank 0 and {need.dtype} on rank {rank}"] = None
    return list(problems)


def _same(one: Tensor, other: Tensor) -> bool:
    if one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride():
        return True
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other.to(one.device))


def buffers_by_name(source: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the non-persistent buffers of a module under all their names; a mapping is returned as it is."""
    if not isinstance(source, nn.Module):
        return source
    return {name: named.tensor for named in named_tensors(source) if not named.persistent for name in named.names}


def _find_buffers(sources: dict[str, Tensor], buffers: Mapping[str, Tensor], reports: list[list[_Need]]) -> list[str]:
    """Add the non-persistent buffers that some rank wants to ``sources``; return what cannot be had."""
    problems: dict[str, None] = {}
    for need in (need for needs in reports for need in needs if not need.persistent):
        buffer = buffers.get(need.names[0])
        if buffer is None or buffer.is_meta:
            problems[
                f"the buffer {need.names[0]!r} is not persistent, on the meta device, and has no values on rank 0: "
                "pass a module that has them as buffers_from"
            ] = None
        elif tuple(buffer.shape) != need.shape:
            problems[f"{need.names[0]!r} is {tuple(buffer.shape)} in buffers_from, {need.shape} in the model"] = None
        else:
            sources[need.names[0]] = buffer
    return list(problems)


def _source_of(need: _Need, sources: Mapping[str, Tensor]) -> Tensor:
    return next(sources[name] for name in need.names if name in sources)


def _cut(tensor: Tensor, need: _Need) -> Tensor:
    tensor = tensor.detach()
    for dim, (offset, size) in enumerate(zip(need.offsets, need.sizes, strict=True)):
        tensor = tensor.narrow(dim, min(offset, tensor.shape[dim]), size)
    return tensor


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return contiguous ``tensor`` as bytes: not every backend knows every dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def _send(sources: Mapping[str, Tensor], reports: list[list[_Need]], device: torch.device) -> None:
    """Send each rank its parts, one batch while the next one is made ready.

    Each receives in the order of its own tensors and sends nothing, so that no batch can wait for a later one.
    """
    batch: list[dist.P2POp] = []
    in_flight: deque[tuple[list[dist.Work], list[dist.P2POp]]] = deque()  # tensors must live until they have been sent
    for part, rank in _parts_of_others(sources, reports, device):
        batch.append(dist.P2POp(dist.isend, _as_bytes(part), rank))
        if len(batch) == _NUM_IN_BATCH:
            in_flight.append((dist.batch_isend_irecv(batch), batch))
            batch = []
            if len(in_flight) > 1:
                _wait(in_flight.popleft()[0])
    if batch:
        in_flight.append((dist.batch_isend_irecv(batch), batch))
    for works, _ in in_flight:
        _wait(works)


def _parts_of_others(
    sources: Mapping[str, Tensor], reports: list[list[_Need]], device: torch.device
) -> Iterator[tuple[Tensor, int]]:
    """Yield each part that another rank needs, ready to be sent, and the rank."""
    for index in range(max(map(len, reports))):
        for rank, needs in enumerate(reports):
            if rank != 0 and index < len(needs) and 0 not in needs[index].sizes:
                need = needs[index]
                part = _cut(_source_of(need, sources), need)
                yield part.to(device=device, dtype=need.dtype).contiguous(), rank


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _receive(needs: list[_Need], targets: list[Tensor], device: torch.device) -> None:
    for need, target in zip(needs, targets, strict=True):
        if 0 in need.sizes:
            continue
        direct = target.is_contiguous() and target.device == device
        part = target if direct else torch.empty(need.sizes, dtype=need.dtype, device=device)
        # In a batch of its own: NCCL makes another communicator for each pair that communicates outside of batches.
        _wait(dist.batch_isend_irecv([dist.P2POp(dist.irecv, _as_bytes(part), 0)]))
        if not direct:
            target.copy_(part)


_state = threading.local()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put parameters on the meta device as modules register them; buffers keep their values.

    Inside, ``from_pretrained`` of transformers reads no weights either: it builds the model that its config describes.
    It is asked to by ``device_map="meta"``, so another ``device_map`` is replaced.
    """
    if getattr(_state, "active", False):  # entered twice, by nested contexts of the Trainer
        yield
        return
    with Patches("init") as patches:
        patches.put(nn.Module, "register_parameter", _register_on_meta)
        if importlib.util.find_spec("transformers") is not None:
            from transformers import PreTrainedModel

            build: Any = classmethod(_without_values(PreTrainedModel.__dict__["from_pretrained"].__func__))
            patches.put(PreTrainedModel, "from_pretrained", build)
        _state.active = True
        try:
            yield
        finally:
            _state.active = False


_register_parameter = nn.Module.register_parameter


def _register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    _register_parameter(module, name, param)
    if param is not None and not param.is_meta:
        meta = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        torch.utils.swap_tensors(param, meta)  # type: ignore[no-untyped-call] # the same object: ties stay


def _without_values(from_pretrained: Any) -> Any:
    def build(cls: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = from_pretrained(cls, *args, **{**kwargs, "device_map": "meta"})
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info=True
        _compute_buffers(model)
        return loaded

    return build


def _compute_buffers(model: Any) -> None:
    """Give the non-persistent buffers their values: no file holds them, only the constructor computes them."""
    wanted = [named for named in named_tensors(model) if not named.persistent and named.tensor.is_meta]
    if not wanted:
        return
    twin = type(model)(model.config)
    values = {name: named.tensor for named in named_tensors(twin) if not named.persistent for name in named.names}
    for named in wanted:
        value = values.get(named.name)
        if value is not None and value.shape == named.tensor.shape:
            torch.utils.swap_tensors(named.tensor, value.to(named.tensor.dtype))  # type: ignore[no-untyped-call]


# ------------------------------------------------------------------------------------------------
# RAM-efficient loading: rank 0's weights taken out of the model before it is sharded, to be sent afterwards.


@dataclass(frozen=True)
class TakenWeights:
    """The state dict of rank 0; empty on other ranks."""

    state_dict: dict[str, Tensor] = field(default_factory=dict)
    """For `fsdp2_load_full_state_dict`."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Non-persistent ones, for its ``buffers_from``."""


def take_weights(model: nn.Module, *, keep: bool) -> TakenWeights:
    """Put all of ``model``, not sharded yet, on the meta device; parameters stay the same objects.

    Args:
        model: With values on the rank that keeps them.
        keep: Whether to return the values (rank 0); otherwise their memory is given back.
    """
    taken = TakenWeights()
    for named in named_tensors(model):
        if keep:
            into = taken.state_dict if named.persistent else taken.buffers
            into[named.name] = named.tensor.detach()
        if not named.tensor.is_meta:
            swap_for_empty(named.tensor, torch.device("meta"))
    return taken


# ------------------------------------------------------------------------------------------------
# Loading safetensors files into a sharded model: each process reads its own slices.


INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def fsdp2_load_safetensors(
    accelerator: Process,
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    buffers_from: nn.Module | Mapping[str, Tensor] | None = None,
    prefix: str = "",
) -> None:
    """Load weights from files that all processes see into a sharded model, in place; every rank calls it.

    Nothing is sent, and no process holds more than its shards and one slice. Names decide what goes where. Tensors on
    the meta device get memory, and stay the same objects: ties and optimizers keep holding them. The model's dtypes
    stay, values are cast.

    Args:
        accelerator: Anything with ``device`` and ``is_main_process``.
        model: Sharded, on the meta device or with values.
        path: A safetensors file, or a folder with ``model.safetensors.index.json`` or ``model.safetensors``; or a URL
            of one. Where a file's metadata says ``alias: name``, the tensor serves both.
        buffers_from: A module with the same names, or its buffers by name, for non-persistent buffers that are on the
            meta device on this rank: files do not hold them.
        prefix: What the model's names begin with and the files' do not, such as ``"model."`` where a LightningModule
            holds a Hugging Face model as ``self.model``.

    Raises:
        RuntimeError: On every rank, before anything is changed: if a file cannot be read, names are missing or
            unexpected, or shapes differ.
    """
    with raise_on_all_ranks(f"Loading {path} into the sharded model"):
        tensors, targets = open_tensors(model, accelerator.device)
        buffers = {} if buffers_from is None else buffers_by_name(buffers_from)
    read_slices(path, tensors, buffers, targets, prefixes=(prefix,))


def read_slices(
    path: str | os.PathLike[str],
    tensors: Sequence[NamedTensor],
    buffers: Mapping[str, Tensor],
    targets: Callable[[], list[Tensor]],
    *,
    prefixes: Sequence[str] = ("",),
) -> None:
    """Fill this rank's part of each tensor from files; every rank calls it.

    Args:
        path: A safetensors file, or a folder with one or with an index.
        tensors: The tensors to fill.
        buffers: Values of those that are not persistent.
        targets: Returns the memory of this rank's part of each tensor, called when all is found to fit.
        prefixes: What the model's names may begin with and the files' do not; the one that fits most names is taken.

    Raises:
        RuntimeError: On every rank, before anything is changed, if the files do not fit.
    """
    what = f"Loading {path} into the sharded model"
    with ExitStack() as files:
        with raise_on_all_ranks(what):
            opened = _open(source_path(path), files)
            names = {name for named in tensors for name in named.names}
            prefix = max(prefixes, key=lambda prefix: sum(f"{prefix}{name}" in names for name in opened))
            stored = {f"{prefix}{name}": tensor for name, tensor in opened.items()}
            wanted = [named.part() for named in tensors]
            found, problems = _match(tensors, stored)
            problems += _check_buffers(tensors, buffers)
        raise_together(what, problems)
        with raise_on_all_ranks(what):
            for named, part, (offsets, sizes) in zip(tensors, targets(), wanted, strict=True):
                if not named.persistent:
                    part.copy_(buffers[named.name])
                elif 0 not in sizes:
                    part.copy_(found[named.names].read(offsets, sizes))


@dataclass(frozen=True)
class _Stored:
    """A tensor in an open file."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a part of it, and read no more."""
        if not sizes:
            return self.file.get_tensor(self.name)
        where = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        return self.file.get_slice(self.name)[where]


_NUM_REQUESTS = 6


@dataclass(frozen=True)
class _StoredObject:
    """A tensor in a safetensors file behind a URL; of a part, whole rows are read."""

    path: ObjectPath
    tensor: FileTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a part of it."""
        shape, first, num_rows = self.shape or (1,), (*offsets, 0)[0], (*sizes, 1)[0]
        row = self.tensor.dtype.itemsize * prod(shape[1:])
        start, num_bytes, data = self.tensor.start + first * row, num_rows * row, bytearray(num_rows * row)

        def fill(at: int) -> None:
            piece = self.path.open_object().pread(min(PART_BYTES, num_bytes - at), start + at)
            data[at : at + len(piece)] = piece

        with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
            list(pool.map(fill, range(0, num_bytes, PART_BYTES)))
        rows = torch.frombuffer(data, dtype=getattr(torch, self.tensor.dtype.name)).view(num_rows, *shape[1:])
        for dim in range(1, len(sizes)):
            rows = rows.narrow(dim, offsets[dim], sizes[dim])
        return rows.view(()) if not self.shape else rows


_Readable = _Stored | _StoredObject


def _tensors_in(path: Path, files: ExitStack) -> tuple[dict[str, _Readable], dict[str, str]]:
    """Return the tensors of a safetensors file, and its metadata."""
    if isinstance(path, ObjectPath):
        found = read_safetensors(path)
        return {name: _StoredObject(path, one) for name, one in found.tensors.items()}, dict(found.metadata)
    from safetensors import safe_open

    file = files.enter_context(safe_open(path, framework="pt"))
    return {name: _Stored(file, name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 (not a dict)


def _open(path: Path, files: ExitStack) -> dict[str, _Readable]:
    """Return every tensor by its name, and by each alias in a file's metadata."""
    index: dict[str, str] | None = None
    if path.is_dir() and (path / INDEX_FILE).is_file():
        index = read_weight_map(path / INDEX_FILE)
        names = sorted(set(index.values()))
        if any(Path(name).name != name for name in names):
            raise ValueError(f"{path / INDEX_FILE} names files outside its folder: {names}.")
        paths = [path / name for name in names]
    elif path.is_dir():
        paths = [path / SINGLE_FILE]
    else:
        paths = [path]
    missing = [str(one) for one in paths if not one.is_file()]
    if missing:
        raise FileNotFoundError(f"no such file: {listed(missing)}.")
    stored: dict[str, _Readable] = {}
    aliases: dict[str, str] = {}
    for one in paths:
        tensors, metadata = _tensors_in(one, files)
        aliases.update(metadata)  # as safetensors' save_model and our merger note tied tensors
        stored.update({name: own for name, own in tensors.items() if index is None or index.get(name) == one.name})
    absent = sorted(set(index or ()) - set(stored))
    if absent:
        raise ValueError(f"{path / INDEX_FILE} names tensors that its files do not hold: {listed(absent)}.")
    return {**{alias: stored[name] for alias, name in aliases.items() if name in stored}, **stored}


def _match(
    tensors: Sequence[NamedTensor], stored: Mapping[str, _Readable]
) -> tuple[dict[tuple[str, ...], _Readable], list[str]]:
    """Return the stored entry of each tensor's names, and the problems."""
    found: dict[tuple[str, ...], _Readable] = {}
    problems: list[str] = []
    missing: list[str] = []
    persistent = [named for named in tensors if named.persistent]
    for named in persistent:
        present = {name: stored[name] for name in named.names if name in stored}
        if not present:
            missing.append(named.name)
            continue
        found[named.names] = next(iter(present.values()))
        for name, tensor in present.items():
            if tensor.shape != named.shape:
                problems.append(f"{name!r} is {tensor.shape} in the file, {named.shape} in the model")
    used = {stored[name] for named in persistent for name in named.names if name in stored}
    unexpected = sorted(name for name, tensor in stored.items() if tensor not in used)
    for kind, names in (("missing in", missing), ("unexpected in", unexpected)):
        if names:
            problems.append(f"{kind} the file: {listed(names)}")
    return found, problems


def _check_buffers(tensors: Sequence[NamedTensor], buffers: Mapping[str, Tensor]) -> list[str]:
    problems = []
    for named in tensors:
        if named.persistent:
            continue
        buffer = buffers.get(named.name)
        if buffer is None or buffer.is_meta or tuple(buffer.shape) != named.shape:
            problems.append(
                f"the buffer {named.name!r} {named.shape} is not persistent and on the meta device: no file holds "
                "it. On every process, pass a module that has its values as buffers_from"
            )
    return problems
