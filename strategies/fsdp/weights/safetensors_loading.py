"""Safetensors files into a sharded model: every process reads its own slices, and none the whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ....checkpoint.formats.index_file import read_weight_map
from ...common.agreed_outcome import failing_together, raise_together
from ..units.named_tensors import NamedTensor, open_tensors
from .full_state_dict import Process, buffers_by_name, listed

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
        path: A safetensors file, or a folder with ``model.safetensors.index.json`` or ``model.safetensors``. Where a
            file's metadata says ``alias: name``, the tensor serves both.
        buffers_from: A module with the same names, or its buffers by name, for non-persistent buffers that are on the
            meta device on this rank: files do not hold them.
        prefix: What the model's names begin with and the files' do not, such as ``"model."`` where a LightningModule
            holds a Hugging Face model as ``self.model``.

    Raises:
        RuntimeError: On every rank, before anything is changed: if a file cannot be read, names are missing or
            unexpected, or shapes differ.
    """
    with failing_together(f"Loading {path} into the sharded model"):
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
        with failing_together(what):
            opened = _open(Path(path), files)
            names = {name for named in tensors for name in named.names}
            prefix = max(prefixes, key=lambda prefix: sum(f"{prefix}{name}" in names for name in opened))
            stored = {f"{prefix}{name}": tensor for name, tensor in opened.items()}
            wanted = [named.part() for named in tensors]
            found, problems = _match(tensors, stored)
            problems += _check_buffers(tensors, buffers)
        raise_together(what, problems)
        with failing_together(what):
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


def _open(path: Path, files: ExitStack) -> dict[str, _Stored]:
    """Return every tensor by its name, and by each alias that a file's metadata tells of."""
    from safetensors import safe_open

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
    stored: dict[str, _Stored] = {}
    aliases: dict[str, str] = {}
    for one in paths:
        file = files.enter_context(safe_open(one, framework="pt"))
        aliases.update(file.metadata() or {})  # as safetensors' save_model and our merger note tied tensors
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if index is None or index.get(name) == one.name:
                stored[name] = _Stored(file, name)
    absent = sorted(set(index or ()) - set(stored))
    if absent:
        raise ValueError(f"{path / INDEX_FILE} names tensors that its files do not hold: {listed(absent)}.")
    return {**{alias: stored[name] for alias, name in aliases.items() if name in stored}, **stored}


def _match(
    tensors: Sequence[NamedTensor], stored: Mapping[str, _Stored]
) -> tuple[dict[tuple[str, ...], _Stored], list[str]]:
    """Return what is stored for each tensor's names, and what is wrong."""
    found: dict[tuple[str, ...], _Stored] = {}
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
                f"the buffer {named.name!r} {named.shape} is not persistent and on the meta device: no file holds it. "
                "Give buffers_from a module that has it with values, on every process"
            )
    return problems
