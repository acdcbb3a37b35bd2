"""What DeepSpeed's files say, checked: model states (names, shapes, buffers) and optimizer states (fp32 partitions).

Source: deepspeed 0.19.8 ``runtime/engine.py`` (``_common_checkpoint_state``), ``runtime/zero/stage_1_and_2.py`` and
``stage3.py`` (``state_dict``), ``runtime/bf16_optimizer.py``, ``utils/zero_to_fp32.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ...errors import CheckpointError
from ..source import MAX_BYTES
from ..torch_save.described_tensors import DescribedTensor
from ..torch_save.pickled_objects import Inert
from ..torch_save.torch_file import OddTensor, read_torch_file

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
    """Alias to the name of the parameter it shares; rank 0 says so."""
    ds_version: str | None
    steps: Mapping[str, int | None]
    """``global_steps`` of DeepSpeed, ``epoch`` and ``global_step`` of Lightning."""
    is_lightning: bool
    has_optimizer: bool
    """Whether optimizer state is beside the weights, as in stage 0."""


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
        raise CheckpointError(f"{path}: should hold one floating-point tensor, found {_kind(tensor)}.")
    return tensor


class _Reader:
    """Turns the content of one file into checked values."""

    def __init__(self, path: Path):
        self._path = path
        self._content = self._dict(read_torch_file(path), "the file")

    def model_states(self) -> ModelStates:
        content = self._content
        if content.get("buffer_names") is None:
            self._fail("it has no buffer_names: not a model states file, or of a DeepSpeed older than 0.4.4")
        if (size := content.get("mp_world_size", 1)) not in (None, 1):
            self._fail(
                f"saved with mp_world_size {size!r}: tensor-parallel weights cannot be merged here. Save gathered ones "
                f"with engine.save_16bit_model()"
            )
        if content.get("ds_autoep_layers") or content.get("autoep_layers"):
            self._fail("it has expert-parallel layers (AutoEP), which cannot be merged here")
        if content.get("module") is None:
            self._fail("it has no module: saved with pipeline parallelism, which cannot be merged here")
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
            self._fail("it holds no flat fp32 groups: not a ZeRO optimizer's state")
        # A bf16 optimizer with fp32 accumulation does not say its stage: it is laid out as stage 1.
        stage = self._count(state.get("zero_stage", 1), "zero_stage")
        if stage not in (1, 2, 3) or (stage == 3) != (key == "fp32_flat_groups"):
            self._fail(f"zero_stage is {stage}, beside {key}")
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
            self._fail(f"{what} has dtype {tensor.dtype.name}, floating point is wanted")
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
            self._fail(f"a name in {what} should be text, found {_kind(value)}")
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
        return "an object of a class that is not read here"
    if isinstance(value, (DescribedTensor, OddTensor)):
        return "a tensor"
    return type(value).__name__
