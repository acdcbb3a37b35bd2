"""Safetensors files into a sharded model: every process reads its own slices, and none the whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .full_state_dict import Process, buffers_by_name, listed
from .outcome import failing_together, raise_together
from .root import ShardedRoot
from .slots import Slot, materialise, reshard, slots_of

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def fsdp2_load_safetensors(
    accelerator: Process,
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    buffers_from: nn.Module | Mapping[str, Tensor] | None = None,
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

    Raises:
        RuntimeError: On every rank, before anything is changed: if a file cannot be read, names are missing or
            unexpected, or shapes differ.
    """
    root = model  # it may hold a unit of its own, and that unit's setup
    if isinstance(model, ShardedRoot):
        model = model.module
    what = f"Loading {path} into the sharded model"
    with ExitStack() as files:
        with failing_together(what):
            opened = _open(Path(path), files)
            reshard(root)
            slots = [slot for slot in slots_of(model) if slot.persistent or slot.tensor.is_meta]
            parts = [slot.part() for slot in slots]
            found, problems = _match(slots, opened)
            buffers = {} if buffers_from is None else buffers_by_name(buffers_from)
            problems += _check_buffers(slots, buffers)
        raise_together(what, problems)
        with failing_together(what):
            materialise(root, accelerator.device)
            after = {slot.names: slot for slot in slots_of(model)}
            for slot, (offsets, sizes) in zip(slots, parts, strict=True):
                target = after[slot.names].local()
                if not slot.persistent:
                    target.copy_(buffers[slot.name])
                elif not target.ndim:
                    name = found[slot.names]
                    target.copy_(opened[name].get_tensor(name))
                elif 0 not in sizes:
                    name = found[slot.names]
                    where = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
                    target.copy_(opened[name].get_slice(name)[where])


def _open(path: Path, files: ExitStack) -> dict[str, Any]:
    """Return the open file of each tensor, and of each alias that its metadata tells of."""
    from safetensors import safe_open

    index: dict[str, str] | None = None
    if path.is_dir() and (path / INDEX_FILE).is_file():
        index = json.loads((path / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
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
    opened: dict[str, Any] = {}
    for one in paths:
        file = files.enter_context(safe_open(one, framework="pt"))
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if index is None or index.get(name) == one.name:
                opened[name] = file
    absent = sorted(set(index or ()) - set(opened))
    if absent:
        raise ValueError(f"{path / INDEX_FILE} names tensors that its files do not hold: {listed(absent)}.")
    return opened


def _aliases(opened: Mapping[str, Any]) -> dict[str, str]:
    """Return alias to stored name, as safetensors' ``save_model`` and our merger note tied tensors."""
    files = {id(file): file for file in opened.values()}.values()
    metadata = {alias: name for file in files for alias, name in (file.metadata() or {}).items()}
    return {alias: name for alias, name in metadata.items() if name in opened and alias not in opened}


def _match(slots: list[Slot], opened: Mapping[str, Any]) -> tuple[dict[tuple[str, ...], str], list[str]]:
    """Return the stored name for each slot's names, and what is wrong."""
    aliases = _aliases(opened)
    found: dict[tuple[str, ...], str] = {}
    problems: list[str] = []
    missing: list[str] = []
    for slot in slots:
        if not slot.persistent:
            continue
        stored = [name for name in slot.names if name in opened]
        stored += [aliases[name] for name in slot.names if name in aliases]
        if not stored:
            missing.append(slot.name)
            continue
        found[slot.names] = stored[0]
        for name in stored:
            shape = tuple(opened[name].get_slice(name).get_shape())
            if shape != slot.shape:
                problems.append(f"{name!r} is {shape} in the file, {slot.shape} in the model")
    wanted = {name for slot in slots if slot.persistent for name in slot.names} | set(found.values())
    unexpected = sorted(set(opened) - wanted)
    for kind, names in (("missing in", missing), ("unexpected in", unexpected)):
        if names:
            problems.append(f"{kind} the file: {listed(names)}")
    return found, problems


def _check_buffers(slots: list[Slot], buffers: Mapping[str, Tensor]) -> list[str]:
    problems = []
    for slot in slots:
        if slot.persistent:
            continue
        buffer = buffers.get(slot.name)
        if buffer is None or buffer.is_meta or tuple(buffer.shape) != slot.shape:
            problems.append(
                f"the buffer {slot.name!r} {slot.shape} is not persistent and on the meta device: no file holds it. "
                "Give buffers_from a module that has it with values, on every process"
            )
    return problems
