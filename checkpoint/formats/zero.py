"""DeepSpeed's tag folders as a format: ZeRO's partitions, the parts of tensors in them, and how they join."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from ..files import CheckpointError, brief, file_inside
from ..manifest import MANIFEST_NAME, Manifest, read_manifest
from .base import (
    DTYPES,
    MAX_BYTES,
    CheckpointInfo,
    DType,
    Format,
    Piece,
    ShardFile,
    Source,
    SourceTensor,
    StoredTensorInfo,
    TensorInfo,
    check_coverage,
    check_expansion,
    is_contiguous,
)
from .safe_unpickler import Inert, type_name
from .torch_save import DescribedTensor, OddTensor, PlacedTensor, check_written, open_archive, place, read_torch_file
from .zero_files import LATEST_NAME, ZeroFiles, check_ranks, has_zero_files, latest_tag, list_zero_files


class ZeROFormat(Format):
    """Model and optimizer states in ``*_states.pt`` files, next to a ``latest`` file that names the newest folder."""

    signs = ("DeepSpeed's *_states.pt files", f"its file {LATEST_NAME!r}")

    def detect(self, folder: Path) -> bool:
        """Whether there are files named as DeepSpeed names them."""
        return has_zero_files(folder)

    def open(self, folder: Path) -> tuple[Source, Manifest | None]:
        """Read all ranks' states; DeepSpeed records ties itself, except for modules that have two names."""
        manifest = _manifest(folder)
        source = read_zero(folder).source()
        more = {alias: name for alias, name in manifest.ties.items() if alias not in source.tensors}
        skipped = {**source.skipped, **manifest.left_out_of(source.tensors)}
        return replace(source, skipped=skipped), replace(manifest, ties={**more, **source.ties})

    def describe(self, folder: Path) -> CheckpointInfo:
        """Describe it from its states, and from ``accelight.json`` in or above the folder."""
        manifest = _manifest(folder)
        return describe_zero(read_zero(folder), manifest)

    def named_inside(self, folder: Path) -> Path | None:
        """Return the tag folder that ``latest`` or ``latest_universal`` names."""
        return latest_tag(folder)


def _manifest(folder: Path) -> Manifest:
    """Return the module's attribute and the digests of ``accelight.json``, in a tag folder or above it.

    Raises:
        CheckpointError: If a file is not the one that was written; its tensors are not looked at.
    """
    found, place = read_manifest(folder), folder
    if found is None and (folder.parent / LATEST_NAME).is_file():
        found, place = read_manifest(folder.parent), folder.parent
    if found is None:
        return Manifest("module")
    for name, digest in found.digests.items():
        path = place / name
        if path.parent == folder:
            check_written(file_inside(folder, path.name, str(place / MANIFEST_NAME)), digest)
    return replace(found, model_prefix="module")


# ------------------------------------------------------------------------------------------------
# Description of a tag folder.


_KINDS = {
    "deepspeed-universal": "DeepSpeed, universal checkpoint",
    **{f"deepspeed-stage-{stage}": f"DeepSpeed, ZeRO stage {stage}" for stage in range(4)},
    **{f"lightning-deepspeed-stage-{stage}": f"Lightning, DeepSpeedStrategy, stage {stage}" for stage in range(4)},
}
_OURS = "accelight, AccelDeepSpeedStrategy, ZeRO stage {}"
"""The place of ``accelight.json`` next to Lightning's state: no other strategy writes it."""


def describe_zero(checkpoint: ZeroCheckpoint, manifest: Manifest) -> CheckpointInfo:
    """Describe a tag folder.

    Args:
        checkpoint: Its description.
        manifest: The content of ``accelight.json``, checked.
    """
    states, files = checkpoint.states, checkpoint.files
    chunks: dict[Path, int] = {}
    for tensor in checkpoint.tensors.values():
        for part in tensor.parts:
            chunks[part.path] = chunks.get(part.path, 0) + 1
    paths = [files.model] if files.model is not None else []
    paths += [*files.model_shards.values(), *files.optimizer_shards.values()]
    paths += [path for path in chunks if path not in paths]  # one for each parameter, of a universal checkpoint
    kind = f"{'lightning-' if states.is_lightning else ''}deepspeed-stage-{checkpoint.stage}"
    if checkpoint.is_universal:
        kind = "deepspeed-universal"
    return CheckpointInfo(
        path=files.folder,
        kind=kind,
        model_prefix="module",
        tensors=tuple(
            StoredTensorInfo.of(name, tensor.dtype, tensor.shape, len(tensor.parts))
            for name, tensor in checkpoint.tensors.items()
        ),
        files=tuple(_shard_file(files.folder, path, chunks.get(path, 0)) for path in paths),
        has_optimizer=checkpoint.has_optimizer,
        ties=dict(checkpoint.ties),
        module_attribute=manifest.module_attribute,
        has_digests=bool(manifest.digests),
        epoch=states.steps["epoch"],
        global_step=states.steps["global_step" if states.is_lightning else "global_steps"],
        skipped={**checkpoint.skipped, **manifest.left_out_of(checkpoint.tensors)},
        kind_in_words=_OURS.format(checkpoint.stage) if states.is_lightning and manifest.digests else _KINDS[kind],
    )


def _shard_file(folder: Path, path: Path, num_chunks: int) -> ShardFile:
    return ShardFile(path.relative_to(folder.resolve()).as_posix(), path.stat().st_size, num_chunks)


# ------------------------------------------------------------------------------------------------
# DeepSpeed's ZeRO checkpoints as a source of the merge: which bytes of which rank's file make which tensor.
#
# Below stage 3 a flat group is the concatenation of its parameters, cut into equal ranges, one a rank. In stage 3 each
# parameter is cut into equal ranges, one a rank, and a rank's flat groups are the concatenation of its ranges.
#
# Source: deepspeed 0.19.8 ``utils/zero_to_fp32.py``, whose result this equals bit for bit.


UNIVERSAL_FOLDER = "zero"
"""Of a universal checkpoint: a folder for each parameter, with ``fp32.pt`` and the optimizer's tensors."""
OFFLOAD_FOLDER = "offloaded_tensors"
"""The folder for the tensors that DeepSpeed offloads to NVMe."""


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
        """Whether optimizer state is in the folder: stage 0 keeps it next to the weights."""
        return self.stage > 0 or self.states.has_optimizer

    def source(self) -> Source:
        """Return the source of a merge."""

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
            raise CheckpointError(f"{files.folder}: mp_rank_00_model_states.pt, which names the weights, is missing.")
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
            f"{files.folder}: saved with ZeRO, whose fp32 weights are in *_optim_states.pt files, but no such file "
            "exists. Were the files of all processes copied?"
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
                f"{states.path}: param_shapes, which names ZeRO's fp32 weights in the other files, is missing."
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
            raise CheckpointError(f"{self._states.path}: two entries are named {name!r}.")
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
                    f"{states.path}: {name!r} is in frozen_param_shapes but not in frozen_param_fragments."
                )
            fragments.append((states.path, states.frozen_fragments[name]))
        if self._stage < 3:
            path, stored = fragments[0]
            if stored.shape != shape:
                raise CheckpointError(
                    f"{path}: tensor {name!r} is stored with shape {list(stored.shape)}, but frozen_param_shapes says "
                    f"{list(shape)}."
                )
            return stored_in_full(path, stored)
        dtype, share = fragments[0][1].dtype, share_of(shape, len(fragments))
        for path, stored in fragments:
            if prod(stored.shape) != share or not is_contiguous(stored.shape, stored.strides):
                raise CheckpointError(
                    f"{path}: tensor {name!r} of shape {list(shape)} has a part of {prod(stored.shape)} elements, "
                    f"expected {share} on each of {len(fragments)} ranks."
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
                    f"{path}: tensor {name!r} is stored with shape {list(stored.shape)}, but param_shapes says "
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
                    f"{self._optimizers[0].path.name} {sizes[0]}. Do these files belong to one save?"
                )

    def _check_module(self, name: str, shape: tuple[int, ...]) -> None:
        stored = self._states.module.get(name)
        if stored is not None and stored.shape != shape:
            raise CheckpointError(
                f"{self._states.path}: tensor {name!r} is stored with shape {list(stored.shape)}, but param_shapes "
                f"says {list(shape)}."
            )

    def _cut(self, name: str, shape: tuple[int, ...], flat: Flat, offset: int, number: int) -> ZeroTensor:
        end = offset + prod(shape)
        if end > flat.total:
            raise CheckpointError(
                f"{self._files.folder}: tensor {name!r} of shape {list(shape)} should end at element {end} of flat "
                f"fp32 group {number}, but the parts of all ranks have {flat.total}. Do these files belong to one "
                "save?"
            )
        return ZeroTensor(self._optimizers[0].groups[number].dtype, shape, tuple(flat.cut(offset, end)), True)

    def _check_consumed(self, number: int, offset: int, flat: Flat) -> None:
        """Check that the rest is the padding to a multiple of twice the ranks, no more."""
        step = 2 * len(self._optimizers)
        if -(-offset // step) != -(-flat.total // step):
            raise CheckpointError(
                f"{self._files.folder}: flat fp32 group {number} has {flat.total} elements, but its parameters have "
                f"{offset}. Do these files belong to one save?{self._offload_hint()}"
            )

    def _sharded_by_parameter(self, groups: Sequence[Shapes]) -> Iterator[tuple[str, ZeroTensor]]:
        world_size = len(self._optimizers)
        flats = [Flat([(one.path, group) for group in one.groups]) for one in self._optimizers]
        shapes = _merged(groups)
        if len(shapes) != sum(map(len, groups)):
            raise CheckpointError(f"{self._states.path}: two groups of param_shapes hold the same name.")
        wanted = sum(share_of(shape, world_size) for shape in shapes.values())
        if wanted != flats[0].total:
            raise CheckpointError(
                f"{self._optimizers[0].path}: its flat fp32 groups have {flats[0].total} elements, but a rank's "
                f"shares of the {len(shapes)} parameters in {self._states.path.name} have {wanted}. Do these files "
                f"belong to one save?{self._offload_hint()}"
            )
        offset = 0
        for name, shape in shapes.items():
            yield name, joined_shares(self._optimizers[0].groups[0].dtype, shape, flats, offset)
            offset += share_of(shape, world_size)

    def _offload_hint(self) -> str:
        if not (self._files.folder / OFFLOAD_FOLDER).is_dir():
            return ""
        return f" {OFFLOAD_FOLDER}/ holds the state offloaded to NVMe, which cannot be read."

    def _add_rest(self) -> None:
        """Take what DeepSpeed saved among the module's weights alone, as it does with frozen ones in stage 1."""
        states = self._states
        for name, stored in states.module.items():
            if name in self._tensors or name in states.shared:
                continue
            if self._stage == 3 and not prod(stored.shape):
                self._skipped[name] = "a placeholder: stage 3 saved no values for it"
            else:
                self._add(name, stored_in_full(states.path, stored))

    def _ties(self) -> dict[str, str]:
        states = self._states
        ties: dict[str, str] = {}
        for alias, name in states.shared.items():
            if name in states.shared or not alias or not name:
                raise CheckpointError(
                    f"{states.path}: shared_params ties {alias!r} to {name!r}, which is an alias itself."
                )
            if name not in self._tensors:
                self._skipped[alias] = f"shares {name!r}, which the checkpoint does not hold"
            elif alias not in self._tensors:  # empty parameters are all reported as sharing one, and are stored, too
                ties[alias] = name
        return ties


def _merged(groups: Sequence[Shapes] | None) -> Shapes:
    return {name: shape for group in groups or () for name, shape in group.items()}


def _check_same(path: Path, value: object, other_path: Path, other: object, what: str) -> None:
    if value != other:
        raise CheckpointError(
            f"{other_path}: {what} is {other}, but in {path.name} it is {value}. Do these files belong to one save?"
        )


def _check_same_shapes(first: ModelStates, shapes: Shapes, other: ModelStates, others: Shapes, what: str) -> None:
    """Check that two ranks name the same parameters, in one order and with the same shapes."""
    for (name, shape), (other_name, other_shape) in zip(shapes.items(), others.items(), strict=False):
        if name != other_name:
            _check_same(first.path, repr(name), other.path, repr(other_name), f"a name in {what}")
        _check_same(first.path, list(shape), other.path, list(other_shape), f"the shape of {name!r} in {what}")
    _check_same(first.path, len(shapes), other.path, len(others), f"the number of names in {what}")


# ------------------------------------------------------------------------------------------------
# The content of DeepSpeed's files, checked: model states (names, shapes, buffers), optimizer states (fp32 partitions).
#
# Source: deepspeed 0.19.8 ``runtime/engine.py`` (``_common_checkpoint_state``), ``runtime/zero/stage_1_and_2.py`` and
# ``stage3.py`` (``state_dict``), ``runtime/bf16_optimizer.py``, ``utils/zero_to_fp32.py``.


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelStates:
    """A ``*_model_states.pt`` file."""

    path: Path
    module: Mapping[str, DescribedTensor]
    """Below stage 3 all weights, in the dtype they train in; in stage 3 placeholders; buffers in either."""
    not_tensors: tuple[str, ...]
    buffer_names: frozenset[str]
    param_shapes: tuple[Shapes, ...] | None
    """Shapes of the parameters in each flat group, in the group's order; None for stage 0."""
    frozen_shapes: Shapes
    frozen_fragments: Mapping[str, DescribedTensor]
    """Of parameters that are not trained: in full below stage 3, this rank's part in stage 3."""
    shared: Mapping[str, str]
    """Alias to the name of the parameter it shares; recorded by rank 0."""
    ds_version: str | None
    steps: Mapping[str, int | None]
    """``global_steps`` of DeepSpeed, ``epoch`` and ``global_step`` of Lightning."""
    is_lightning: bool
    has_optimizer: bool
    """Whether optimizer state is next to the weights, as in stage 0."""


@dataclass(frozen=True)
class OptimizerStates:
    """A ``*_optim_states.pt`` file."""

    path: Path
    stage: int
    world_size: int
    groups: tuple[DescribedTensor, ...]
    """This rank's part of each flat fp32 group, one-dimensional."""
    paddings: tuple[tuple[int, ...], ...] | None
    """Elements after each parameter of each group; None if there are none."""


def read_model_states(path: Path) -> ModelStates:
    """Read a ``*_model_states.pt`` file.

    Raises:
        CheckpointError: If it is damaged, or its content is impossible.
    """
    return _Reader(path).model_states()


def read_optimizer_states(path: Path) -> OptimizerStates:
    """Read a ``*_optim_states.pt`` file.

    Raises:
        CheckpointError: If it is damaged, or its content is impossible.
    """
    return _Reader(path).optimizer_states()


def read_universal_tensor(path: Path) -> DescribedTensor:
    """Read the ``fp32.pt`` file of one parameter of a universal checkpoint.

    Raises:
        CheckpointError: If it is damaged, or not one floating-point tensor.
    """
    content = read_torch_file(path)
    tensor = content.get("param") if isinstance(content, dict) else content
    if not isinstance(tensor, DescribedTensor) or not tensor.dtype.name.startswith(("float", "bfloat")):
        raise CheckpointError(f"{path}: expected one floating-point tensor, found {_kind(tensor)}.")
    return tensor


class _Reader:
    """Turns the content of one file into checked values."""

    def __init__(self, path: Path):
        self._path = path
        self._content = self._dict(read_torch_file(path), "the file")

    def model_states(self) -> ModelStates:
        content = self._content
        if content.get("buffer_names") is None:
            self._fail("it has no buffer_names: not a model states file, or from a DeepSpeed older than 0.4.4")
        if (size := content.get("mp_world_size", 1)) not in (None, 1):
            self._fail(
                f"saved with mp_world_size {brief(size)}: tensor-parallel weights cannot be merged. Save gathered "
                "weights with engine.save_16bit_model()"
            )
        if content.get("ds_autoep_layers") or content.get("autoep_layers"):
            self._fail("it has expert-parallel layers (AutoEP), which cannot be merged")
        if content.get("module") is None:
            self._fail("it has no module: saved with pipeline parallelism, which cannot be merged")
        module = self._dict(content["module"], "module")
        tensors = {self._text(name, "module"): value for name, value in module.items()}
        kept = {name: value for name, value in tensors.items() if isinstance(value, (DescribedTensor, OddTensor))}
        groups = content.get("param_shapes")
        return ModelStates(
            path=self._path,
            module={name: self._tensor(value, f"module[{name!r}]") for name, value in kept.items()},
            not_tensors=tuple(name for name in tensors if name not in kept),
            buffer_names=frozenset(
                self._text(name, "buffer_names") for name in self._list(content["buffer_names"], "buffer_names")
            ),
            param_shapes=None
            if groups is None
            else tuple(self._shapes(one, "param_shapes") for one in self._list(groups, "param_shapes")),
            frozen_shapes=self._shapes(content.get("frozen_param_shapes") or {}, "frozen_param_shapes"),
            frozen_fragments=self._tensors(content.get("frozen_param_fragments") or {}, "frozen_param_fragments"),
            shared=self._shared(content.get("shared_params") or {}),
            ds_version=version if isinstance(version := content.get("ds_version"), str) else None,
            steps={
                key: value if type(value := content.get(key)) is int else None
                for key in ("global_steps", "epoch", "global_step")
            },
            is_lightning="pytorch-lightning_version" in content,
            has_optimizer=content.get("optimizer") is not None,
        )

    def optimizer_states(self) -> OptimizerStates:
        state = self._dict(self._content.get("optimizer_state_dict"), "optimizer_state_dict")
        key = "fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"
        if key not in state:
            self._fail("it holds no flat fp32 groups: not the state of a ZeRO optimizer")
        # A bf16 optimizer with fp32 accumulation does not record its stage: it is laid out as stage 1.
        stage = self._count(state.get("zero_stage", 1), "zero_stage")
        if stage not in (1, 2, 3) or (stage == 3) != (key == "fp32_flat_groups"):
            self._fail(f"zero_stage is {stage}, but {key} exists")
        counts = state.get("partition_count")
        counts = counts if isinstance(counts, list) and counts else [counts]
        groups = self._list(state[key], key)
        return OptimizerStates(
            path=self._path,
            stage=stage,
            world_size=max(self._count(one, "partition_count") for one in counts),
            groups=tuple(self._partition(one, f"{key}[{number}]") for number, one in enumerate(groups)),
            paddings=self._paddings(state.get("param_alignment_paddings")),
        )

    def _partition(self, value: object, what: str) -> DescribedTensor:
        tensor = self._tensor(value, what)
        if len(tensor.shape) != 1 or (tensor.shape[0] > 1 and tensor.strides != (1,)):
            self._fail(f"{what} should be flat, found shape {list(tensor.shape)} and strides {list(tensor.strides)}")
        if not tensor.dtype.name.startswith(("float", "bfloat")):
            self._fail(f"{what} has dtype {tensor.dtype.name}, expected floating point")
        return tensor

    def _paddings(self, value: object) -> tuple[tuple[int, ...], ...] | None:
        if value is None:
            return None
        what = "param_alignment_paddings"
        return tuple(tuple(self._count(one, what) for one in self._list(row, what)) for row in self._list(value, what))

    def _shapes(self, value: object, what: str) -> Shapes:
        shapes: dict[str, tuple[int, ...]] = {}
        for key, sizes in self._dict(value, what).items():
            name = self._text(key, what)
            if not isinstance(sizes, (tuple, list)) or isinstance(sizes, DescribedTensor):
                self._fail(f"{what}[{name!r}] should be a shape, found {_kind(sizes)}")
            shapes[name] = tuple(self._count(size, f"{what}[{name!r}]") for size in sizes)
        return shapes

    def _shared(self, value: object) -> dict[str, str]:
        pairs = self._dict(value, "shared_params").items()
        return {self._text(alias, "shared_params"): self._text(name, "shared_params") for alias, name in pairs}

    def _tensors(self, value: object, what: str) -> dict[str, DescribedTensor]:
        return {
            self._text(name, what): self._tensor(one, f"{what}[{name!r}]")
            for name, one in self._dict(value, what).items()
        }

    def _tensor(self, value: object, what: str) -> DescribedTensor:
        if isinstance(value, OddTensor):
            self._fail(f"{what} is {value.reason}")
        if not isinstance(value, DescribedTensor):
            self._fail(f"{what} should be a tensor, found {_kind(value)}")
        return value

    def _dict(self, value: object, what: str) -> dict[Any, Any]:
        if not isinstance(value, dict):
            self._fail(f"{what} should be a dict, found {_kind(value)}")
        return value

    def _list(self, value: object, what: str) -> list[Any] | tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or isinstance(value, (DescribedTensor, OddTensor)):
            self._fail(f"{what} should be a list, found {_kind(value)}")
        return value

    def _text(self, value: object, what: str) -> str:
        if not isinstance(value, str):
            self._fail(f"a name in {what} should be a string, found {_kind(value)}")
        return value

    def _count(self, value: object, what: str) -> int:
        if type(value) is not int or not 0 <= value < MAX_BYTES:
            found = repr(value) if type(value) is int else _kind(value)
            self._fail(f"{what} should be a number from 0 to {MAX_BYTES - 1}, found {found}")
        return value

    def _fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {what}.")


def _kind(value: object) -> str:
    if isinstance(value, Inert) or value is Inert:
        return "an object of a class that is not supported"
    if isinstance(value, (DescribedTensor, OddTensor)):
        return "a tensor"
    return type_name(value)


# ------------------------------------------------------------------------------------------------
# Tensors of a ZeRO checkpoint as ranges of the tensors that its files store, and where those lie.


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a stored tensor, and where it belongs in the full one; in elements of the flattened tensors."""

    path: Path
    stored: DescribedTensor
    first: int
    target: int
    count: int


@dataclass(frozen=True, slots=True)
class ZeroTensor:
    """A tensor of the model."""

    dtype: DType
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    is_flat: bool
    """Whether it is put together from flat ranges; else it is one stored tensor."""


def stored_in_full(path: Path, stored: DescribedTensor) -> ZeroTensor:
    """Return a stored tensor as it is."""
    return ZeroTensor(stored.dtype, stored.shape, (Part(path, stored, 0, 0, prod(stored.shape)),), False)


class Flat:
    """Flat tensors of one or several files, seen as one after the other."""

    def __init__(self, tensors: Sequence[tuple[Path, DescribedTensor]]):
        self._tensors = tensors
        self.sizes = [prod(stored.shape) for _, stored in tensors]
        self._ends = list(accumulate(self.sizes))
        self.total = self._ends[-1] if self._ends else 0

    def cut(self, begin: int, end: int, target: int = 0) -> Iterator[Part]:
        """Yield the parts from element ``begin`` to ``end``, placed from ``target`` on."""
        index = bisect_right(self._ends, begin)
        while begin < end:
            path, stored = self._tensors[index]
            first = begin - self._ends[index] + self.sizes[index]
            count = min(end, self._ends[index]) - begin
            if count:
                yield Part(path, stored, first, target, count)
            begin, target, index = begin + count, target + count, index + 1


def joined_shares(dtype: DType, shape: tuple[int, ...], ranks: Sequence[Flat], offset: int) -> ZeroTensor:
    """Join one share of each rank, which begins at its element ``offset``; the last ranks' shares end with padding."""
    numel = prod(shape)
    share = share_of(shape, len(ranks))
    parts: list[Part] = []
    for rank, flat in enumerate(ranks):
        parts += flat.cut(offset, offset + min(share, max(numel - rank * share, 0)), rank * share)
    return ZeroTensor(dtype, shape, tuple(parts), True)


def share_of(shape: tuple[int, ...], world_size: int) -> int:
    """Return how many elements of a parameter each rank has in stage 3, padding included."""
    return -(-prod(shape) // world_size)


def locate_parts(tensors: Mapping[str, ZeroTensor]) -> dict[str, SourceTensor]:
    """Find where the bytes of tensors lie.

    Raises:
        CheckpointError: If a storage is missing or has another size than the pickle says.
    """
    by_path: dict[Path, dict[DescribedTensor, str]] = {}
    for name, tensor in tensors.items():
        for part in tensor.parts:
            by_path.setdefault(part.path, {}).setdefault(part.stored, name)
    places: dict[tuple[Path, DescribedTensor], PlacedTensor] = {}
    for path, stored in by_path.items():
        with open_archive(path) as archive:
            for one, name in stored.items():
                places[path, one] = place(archive, one, f"{path}: tensor {name!r}")
    located: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        pieces = tuple(_piece(part, tensor, places[part.path, part.stored].start) for part in tensor.parts)
        found = SourceTensor(name, tensor.dtype, tensor.shape, pieces, tensor.is_flat)
        check_coverage(name, found.cut_shape, pieces)
        located[name] = found
    return located


def check_parts(tensors: Iterable[ZeroTensor], on_bytes: Callable[[int], object]) -> None:
    """Compare the bytes of what holds these tensors with the checksums that torch wrote next to them.

    Raises:
        CheckpointError: If they are not as they were written.
    """
    keys: dict[Path, dict[str, None]] = {}
    for tensor in tensors:
        for part in tensor.parts:
            keys.setdefault(part.path, {})[part.stored.storage.key] = None
    for path, own in keys.items():
        with open_archive(path) as archive:
            for key in own:
                on_bytes(archive.check([key]))


def _piece(part: Part, tensor: ZeroTensor, start: int) -> Piece:
    if tensor.is_flat:
        return Piece(part.path, start + part.first * tensor.dtype.itemsize, (part.target,), (part.count,))
    strides = None if is_contiguous(tensor.shape, part.stored.strides) else part.stored.strides
    if strides is not None:
        check_expansion(
            f"{part.path}: a tensor of shape {list(tensor.shape)}", tensor.shape, strides, tensor.dtype.itemsize
        )
    return Piece(part.path, start, (0,) * len(tensor.shape), tensor.shape, strides)
