"""DeepSpeed's ZeRO checkpoints as a source of the merge: which bytes of which rank's file make which tensor.

Below stage 3 a flat group is the concatenation of its parameters, cut into equal ranges, one a rank. In stage 3 each
parameter is cut into equal ranges, one a rank, and a rank's flat groups are the concatenation of its ranges.

Source: deepspeed 0.19.8 ``utils/zero_to_fp32.py``, whose result this equals bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ...errors import CheckpointError
from ..dtypes import DTYPES
from ..safe_paths import file_inside
from ..source import Source, SourceTensor, TensorInfo, is_contiguous
from ..torch_save.described_tensors import DescribedTensor
from .files import ZeroFiles, check_ranks, list_zero_files
from .states import (
    ModelStates,
    OptimizerStates,
    Shapes,
    read_model_states,
    read_optimizer_states,
    read_universal_tensor,
)
from .tensor_ranges import Flat, Part, ZeroTensor, check_parts, joined_shares, share_of, stored_in_full
from .tensor_ranges import locate as locate_parts

UNIVERSAL_FOLDER = "zero"
"""Of a universal checkpoint: a folder for each parameter, with ``fp32.pt`` and the optimizer's tensors."""
OFFLOAD_FOLDER = "offloaded_tensors"
"""Where DeepSpeed keeps what it offloads to NVMe."""


@dataclass(frozen=True)
class ZeroCheckpoint:
    """A tag folder whose description was read and checked."""

    files: ZeroFiles
    stage: int
    world_size: int
    states: ModelStates
    """Of rank 0."""
    tensors: Mapping[str, ZeroTensor]
    """In the order of DeepSpeed's own conversion: buffers, frozen parameters, trained ones."""
    ties: Mapping[str, str]
    skipped: Mapping[str, str]

    @property
    def is_universal(self) -> bool:
        """Whether each trained parameter has a file of its own."""
        return self.stage > 0 and not self.files.optimizer_shards

    @property
    def has_optimizer(self) -> bool:
        """Whether optimizer state is in the folder: stage 0 keeps it beside the weights."""
        return self.stage > 0 or self.states.has_optimizer

    def source(self) -> Source:
        """Return what the merge needs."""

        def locate(wanted: Iterable[str]) -> dict[str, SourceTensor]:
            return locate_parts({name: self.tensors[name] for name in wanted})

        def check(wanted: Iterable[str], on_bytes: Callable[[int], object]) -> None:
            check_parts([self.tensors[name] for name in wanted], on_bytes)

        return Source(
            folder=self.files.folder,
            check=check,
            tensors={name: TensorInfo(name, one.dtype, one.shape) for name, one in self.tensors.items()},
            skipped=self.skipped,
            locate=locate,
            ties=self.ties,
            dtype=DTYPES["float32"] if self.stage else None,
        )


def read_zero(folder: Path) -> ZeroCheckpoint:
    """Read the description of a DeepSpeed checkpoint.

    Args:
        folder: The tag folder, with ``*_model_states.pt`` and, from stage 1 on, ``*_optim_states.pt``.

    Raises:
        CheckpointError: If a file is missing or damaged, or two of them disagree.
    """
    files = list_zero_files(folder)
    if not files.optimizer_shards:
        return _read_universal(files) if (folder / UNIVERSAL_FOLDER).is_dir() else _read_stage_0(files)
    optimizers = [read_optimizer_states(path) for path in files.optimizer_shards.values()]
    first = optimizers[0]
    for other in optimizers[1:]:
        _check_same(first.path, first.stage, other.path, other.stage, "zero_stage")
        _check_same(first.path, first.world_size, other.path, other.world_size, "partition_count")
    check_ranks(folder, files.optimizer_shards, first.world_size, "optim")
    models = _read_models(files, first.stage, first.world_size)
    return _Builder(files, models, optimizers, first.stage).build()


def _read_universal(files: ZeroFiles) -> ZeroCheckpoint:
    """Read what ``ds_to_universal`` made: model states as they were, each parameter's fp32 weights in a file."""
    stage = 3 if files.model is None else 2
    return _Builder(files, _read_models(files, stage, len(files.model_shards)), (), stage).build()


def _read_models(files: ZeroFiles, stage: int, world_size: int) -> list[ModelStates]:
    if stage < 3:
        if files.model is None:
            raise CheckpointError(f"{files.folder}: mp_rank_00_model_states.pt is missing, which names the weights.")
        return [read_model_states(files.model)]
    check_ranks(files.folder, files.model_shards, world_size, "model")
    models = [read_model_states(path) for path in files.model_shards.values()]
    first = models[0]
    for other in models[1:]:
        _check_same(first.path, first.steps["global_steps"], other.path, other.steps["global_steps"], "global_steps")
        _check_same(first.path, first.ds_version, other.path, other.ds_version, "ds_version")
        _check_same_shapes(first, _merged(first.param_shapes), other, _merged(other.param_shapes), "param_shapes")
        _check_same_shapes(first, first.frozen_shapes, other, other.frozen_shapes, "frozen_param_shapes")
    return models


def _read_stage_0(files: ZeroFiles) -> ZeroCheckpoint:
    """Read a checkpoint without ZeRO: the weights are in the one file, ties are names of one stored tensor."""
    path = files.model or next(iter(files.model_shards.values()))
    states = read_model_states(path)
    if states.param_shapes is not None or files.model is None:
        raise CheckpointError(
            f"{files.folder}: saved with ZeRO, whose fp32 weights are in *_optim_states.pt files; none is here. Were "
            f"all processes' files copied here?"
        )
    tensors: dict[str, ZeroTensor] = {}
    ties: dict[str, str] = {}
    names: dict[DescribedTensor, str] = {}
    for name, stored in states.module.items():
        known = names.setdefault(stored, name) if prod(stored.shape) else name
        if known != name:
            ties[name] = known
        else:
            tensors[name] = stored_in_full(path, stored)
    skipped = dict.fromkeys(states.not_tensors, "not a tensor")
    if states.has_optimizer:
        skipped["optimizer"] = "optimizer state"
    return ZeroCheckpoint(files, 0, 1, states, tensors, ties, skipped)


class _Builder:
    """Puts the descriptions of all ranks together."""

    def __init__(
        self, files: ZeroFiles, models: Sequence[ModelStates], optimizers: Sequence[OptimizerStates], stage: int
    ):
        self._files = files
        self._models = models
        self._states = models[0]
        self._optimizers = optimizers
        self._stage = stage
        self._tensors: dict[str, ZeroTensor] = {}
        self._skipped = {"optimizer_state_dict": "optimizer state"}

    def build(self) -> ZeroCheckpoint:
        states, module = self._states, self._states.module
        if states.param_shapes is None:
            raise CheckpointError(
                f"{states.path}: param_shapes is missing, which names ZeRO's fp32 weights in the other files."
            )
        if self._optimizers:
            self._check_groups()
        for name in (name for name in module if name in states.buffer_names):
            self._add(name, stored_in_full(states.path, module[name]))
        for name, shape in states.frozen_shapes.items():
            self._add(name, self._frozen(name, shape))
        for name, tensor in self._trained(states.param_shapes):
            self._add(name, tensor)
        self._add_rest()
        ties = self._ties()
        for name in states.not_tensors:
            self._skipped[name] = "not a tensor"
        return ZeroCheckpoint(
            self._files, self._stage, len(self._optimizers or self._models), states, self._tensors, ties, self._skipped
        )

    def _add(self, name: str, tensor: ZeroTensor) -> None:
        if name in self._tensors:
            raise CheckpointError(f"{self._states.path}: two entries are called {name!r}.")
        self._tensors[name] = tensor

    def _check_groups(self) -> None:
        """Check that all ranks have the same groups, of one dtype."""
        first = self._optimizers[0]
        for other in self._optimizers[1:]:
            _check_same(first.path, len(first.groups), other.path, len(other.groups), "number of flat fp32 groups")
            _check_same(first.path, first.paddings, other.path, other.paddings, "param_alignment_paddings")
            for number, (one, two) in enumerate(zip(first.groups, other.groups, strict=True)):
                what = f"flat fp32 group {number}"
                _check_same(first.path, one.dtype.name, other.path, two.dtype.name, f"dtype of {what}")
                if self._stage == 3:  # a parameter may lie in several
                    _check_same(first.path, first.groups[0].dtype.name, first.path, one.dtype.name, f"dtype of {what}")
                    _check_same(first.path, one.shape[0], other.path, two.shape[0], f"elements of {what}")

    def _frozen(self, name: str, shape: tuple[int, ...]) -> ZeroTensor:
        fragments = []
        for states in self._models:
            if name not in states.frozen_fragments:
                raise CheckpointError(
                    f"{states.path}: frozen_param_fragments has no {name!r}, frozen_param_shapes has."
                )
            fragments.append((states.path, states.frozen_fragments[name]))
        if self._stage < 3:
            path, stored = fragments[0]
            if stored.shape != shape:
                raise CheckpointError(
                    f"{path}: tensor {name!r} is stored with shape {list(stored.shape)}, frozen_param_shapes says "
                    f"{list(shape)}."
                )
            return stored_in_full(path, stored)
        dtype, share = fragments[0][1].dtype, share_of(shape, len(fragments))
        for path, stored in fragments:
            if prod(stored.shape) != share or not is_contiguous(stored.shape, stored.strides):
                raise CheckpointError(
                    f"{path}: tensor {name!r} of shape {list(shape)} has a part of {prod(stored.shape)} elements, "
                    f"{share} are a rank's share of {len(fragments)}."
                )
            _check_same(fragments[0][0], dtype.name, path, stored.dtype.name, f"dtype of {name!r}")
        return joined_shares(dtype, shape, [Flat([fragment]) for fragment in fragments], 0)

    def _trained(self, groups: Sequence[Shapes]) -> Iterator[tuple[str, ZeroTensor]]:
        if not self._optimizers:
            return self._one_file_each(groups)
        return self._sharded_by_parameter(groups) if self._stage == 3 else self._sharded_by_group(groups)

    def _one_file_each(self, groups: Sequence[Shapes]) -> Iterator[tuple[str, ZeroTensor]]:
        folder = self._files.folder
        for name, shape in (pair for group in groups for pair in group.items()):
            path = file_inside(folder, f"{UNIVERSAL_FOLDER}/{name}/fp32.pt", f"{self._states.path}: tensor {name!r}")
            stored = read_universal_tensor(path)
            if prod(stored.shape) != prod(shape) or not is_contiguous(stored.shape, stored.strides):
                raise CheckpointError(
                    f"{path}: tensor {name!r} is stored with shape {list(stored.shape)}, param_shapes says "
                    f"{list(shape)}."
                )
            yield name, ZeroTensor(stored.dtype, shape, (Part(path, stored, 0, 0, prod(shape)),), True)

    def _sharded_by_group(self, groups: Sequence[Shapes]) -> Iterator[tuple[str, ZeroTensor]]:
        first = self._optimizers[0]
        if len(groups) != len(first.groups):
            raise CheckpointError(
                f"{self._states.path}: param_shapes has {len(groups)} groups, {first.path.name} has "
                f"{len(first.groups)}."
            )
        if first.paddings is not None:
            sizes, padded = [len(one) for one in groups], [len(one) for one in first.paddings]
            _check_same(self._states.path, sizes, first.path, padded, "number of parameters in each group")
        for number, shapes in enumerate(groups):
            flat = Flat([(one.path, one.groups[number]) for one in self._optimizers])
            self._check_partitions(number, flat)
            paddings = (0,) * len(shapes) if first.paddings is None else first.paddings[number]
            offset = 0
            for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
                self._check_module(name, shape)
                yield name, self._cut(name, shape, flat, offset, number)
                offset += prod(shape) + padding
            self._check_consumed(number, offset, flat)

    def _check_partitions(self, number: int, flat: Flat) -> None:
        """All ranks' parts are of one size, but for the padding that was taken off at the end of the group."""
        sizes = flat.sizes
        for rank, size in enumerate(sizes[1:], 1):
            if size != sizes[0] and (size > sizes[0] or any(sizes[rank + 1 :])):
                raise CheckpointError(
                    f"{self._optimizers[rank].path}: flat fp32 group {number} has {size} elements, that of "
                    f"{self._optimizers[0].path.name} {sizes[0]}. Are these files of one save?"
                )

    def _check_module(self, name: str, shape: tuple[int, ...]) -> None:
        stored = self._states.module.get(name)
        if stored is not None and stored.shape != shape:
            raise CheckpointError(
                f"{self._states.path}: tensor {name!r} is stored with shape {list(stored.shape)}, param_shapes says "
                f"{list(shape)}."
            )

    def _cut(self, name: str, shape: tuple[int, ...], flat: Flat, offset: int, number: int) -> ZeroTensor:
        end = offset + prod(shape)
        if end > flat.total:
            raise CheckpointError(
                f"{self._files.folder}: tensor {name!r} of shape {list(shape)} should end at element {end} of flat "
                f"fp32 group {number}, all ranks' parts of it have {flat.total}. Are these files of one save?"
            )
        return ZeroTensor(self._optimizers[0].groups[number].dtype, shape, tuple(flat.cut(offset, end)), True)

    def _check_consumed(self, number: int, offset: int, flat: Flat) -> None:
        """What is left is the padding to a multiple of twice the ranks, no more."""
        step = 2 * len(self._optimizers)
        if -(-offset // step) != -(-flat.total // step):
            raise CheckpointError(
                f"{self._files.folder}: flat fp32 group {number} has {flat.total} elements, its parameters have "
                f"{offset}. Are these files of one save?{self._offload_hint()}"
            )

    def _sharded_by_parameter(self, groups: Sequence[Shapes]) -> Iterator[tuple[str, ZeroTensor]]:
        world_size = len(self._optimizers)
        flats = [Flat([(one.path, group) for group in one.groups]) for one in self._optimizers]
        shapes = _merged(groups)
        if len(shapes) != sum(map(len, groups)):
            raise CheckpointError(f"{self._states.path}: a name is in two groups of param_shapes.")
        wanted = sum(share_of(shape, world_size) for shape in shapes.values())
        if wanted != flats[0].total:
            raise CheckpointError(
                f"{self._optimizers[0].path}: its flat fp32 groups have {flats[0].total} elements, a rank's shares of "
                f"the {len(shapes)} parameters in {self._states.path.name} have {wanted}. Are these files of one "
                f"save?{self._offload_hint()}"
            )
        offset = 0
        for name, shape in shapes.items():
            yield name, joined_shares(self._optimizers[0].groups[0].dtype, shape, flats, offset)
            offset += share_of(shape, world_size)

    def _offload_hint(self) -> str:
        if not (self._files.folder / OFFLOAD_FOLDER).is_dir():
            return ""
        return f" {OFFLOAD_FOLDER}/ holds what was offloaded to NVMe, which cannot be read here."

    def _add_rest(self) -> None:
        """Take what DeepSpeed saved among the module's weights alone, as it does with frozen ones in stage 1."""
        states = self._states
        for name, stored in states.module.items():
            if name in self._tensors or name in states.shared:
                continue
            if self._stage == 3 and not prod(stored.shape):
                self._skipped[name] = "a placeholder: stage 3 saved no values of it"
            else:
                self._add(name, stored_in_full(states.path, stored))

    def _ties(self) -> dict[str, str]:
        states = self._states
        ties: dict[str, str] = {}
        for alias, name in states.shared.items():
            if name in states.shared or not alias or not name:
                raise CheckpointError(f"{states.path}: shared_params ties {alias!r} to {name!r}, an alias itself.")
            if name not in self._tensors:
                self._skipped[alias] = f"shares {name!r}, which the checkpoint does not hold"
            elif alias not in self._tensors:  # empty parameters are all reported as sharing one, and are stored, too
                ties[alias] = name
        return ties


def _merged(groups: Sequence[Shapes] | None) -> Shapes:
    return {name: shape for group in groups or () for name, shape in group.items()}


def _check_same(path: Path, value: object, other_path: Path, other: object, what: str) -> None:
    if value != other:
        raise CheckpointError(f"{other_path}: {what} is {other}, in {path.name} it is {value}. Are these of one save?")


def _check_same_shapes(first: ModelStates, shapes: Shapes, other: ModelStates, others: Shapes, what: str) -> None:
    """Check that two ranks name the same parameters, in one order and with the same shapes."""
    for (name, shape), (other_name, other_shape) in zip(shapes.items(), others.items(), strict=False):
        if name != other_name:
            _check_same(first.path, repr(name), other.path, repr(other_name), f"a name in {what}")
        _check_same(first.path, list(shape), other.path, list(other_shape), f"the shape of {name!r} in {what}")
    _check_same(first.path, len(shapes), other.path, len(others), f"the number of names in {what}")
