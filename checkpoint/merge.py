"""`merge_fsdp_weights`: a sharded checkpoint in, safetensors out; `load_state_dict`: a sharded checkpoint in memory."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .adapters import find_adapter, merged_tensors, select_adapter
from .atomic_dir import AtomicFolder, remove_folder
from .files import CheckpointError, MergeReport, human_bytes, translate_full_disk, write_exactly
from .formats.base import DType, Source, SourceTensor, conversion_target
from .formats.zero_files import remove_pointers
from .locate import FoundCheckpoint, Weights, find_checkpoint
from .manifest import GENERATION, MANIFEST_NAME, Manifest
from .names import Selection, checked_prefix, patterns, select
from .object_path import ObjectPath
from .storage import ObjectFolder, is_remote, remove_checkpoint, source_path
from .writing.copy import OnBytes, compare_tensors, copy_tensors, same_bytes
from .writing.plan import (
    ADAPTER_CONFIG,
    Compute,
    Plan,
    PlannedFile,
    check_conflicts,
    check_destination,
    make_plan,
    parse_size,
    stale_files,
)
from .writing.upload import upload_plan

if TYPE_CHECKING:
    import torch


# ------------------------------------------------------------------------------------------------
# Progress of a merge: a bar on a terminal, a callable for programs, silence otherwise.


ProgressCallback = Callable[[int, int], object]
"""Called with the bytes done and the bytes in all; the last call has both equal."""

_DELAY_S = 0.7  # a short merge shows no bar, and does not import what draws one
_INTERVAL_S = 0.1
_WIDTH = 30


class Progress:
    """Counts bytes and reports them to the listener, if there is one."""

    def __init__(self, progress: ProgressCallback | bool | None, label: str = "merging"):
        if progress is not None and not isinstance(progress, bool) and not callable(progress):
            raise TypeError(f"progress must be a callable, True, False or None, got {type(progress).__name__}.")
        if progress is None:
            progress = sys.stderr is not None and sys.stderr.isatty()
        self._listener: ProgressCallback | None
        self._bar = _Bar(label) if progress is True else None
        self._listener = self._bar.show if self._bar else progress if callable(progress) else None
        self._done = 0
        self._total = 0
        self._last = 0.0

    def start(self, total: int) -> None:
        """Set how many bytes there will be."""
        self._total = total

    def add(self, num_bytes: int) -> None:
        """Count bytes; the listener is called at most ten times a second."""
        self._done = min(self._done + num_bytes, self._total)  # what is looked at beside the tensors was not foreseen
        if self._listener is None:
            return
        now = time.monotonic()
        if now - self._last >= _INTERVAL_S and self._done < self._total:
            self._last = now
            self._listener(self._done, self._total)

    def finish(self) -> None:
        """Tell the listener that all bytes are done."""
        if self._listener is not None:
            self._listener(self._total, self._total)

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._bar.close()


class _Bar:
    """A bar on stderr: rich's where rich is installed, else one line of text."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._start = time.monotonic()
        self._rich: Any = None
        self._task: Any = None
        self._is_shown = False

    def show(self, done: int, total: int) -> None:
        if not self._is_shown:
            if time.monotonic() - self._start < _DELAY_S or done >= total:
                return
            self._is_shown = True
            self._open(total)
        if self._rich is not None:
            self._rich.update(self._task, completed=done)
            return
        filled = _WIDTH * done // max(total, 1)
        text = f"\r{self._label} [{'#' * filled}{' ' * (_WIDTH - filled)}] {human_bytes(done)} of {human_bytes(total)} "
        print(text, end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._rich is not None:
            self._rich.stop()
        elif self._is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        self._is_shown = False

    def _open(self, total: int) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as RichProgress
        except ModuleNotFoundError:
            return
        columns = (self._label, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._rich = RichProgress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._rich.add_task(self._label, total=total)
        self._rich.start()


# ------------------------------------------------------------------------------------------------
# In a process group the main process works, and all processes get its result or its error.


T = TypeVar("T")


def run_on_main(fn: Callable[[], T]) -> T:
    """Run ``fn`` on the main process of the default process group, and return its result on every process.

    The others wait on the group's store, not in a collective, which would time out while ``fn`` takes long. Torch is
    not imported here: where nobody has imported it, there is no process group.

    Raises:
        CheckpointError: On the other processes, if ``fn`` failed on the main one, or that went away. The main process
            gets its own error.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return fn()
    from ..state.process_group import require_group  # torch
    from ..state.rendezvous import one_first

    group = require_group("merge_fsdp_weights")
    rank = group.rank()
    turn = one_first(
        group, first=rank == 0, scope="merge", num_waiting=group.size() - 1, process_index=rank, timeout=None
    )
    if rank == 0:
        with turn as results:
            results.append(fn())
        return results[0]
    try:
        with turn as results:
            return results[0]
    except RuntimeError as error:
        raise CheckpointError(f"The merge failed on the main process. {error}") from error


DEFAULT_THREADS, REMOTE_THREADS = 2, 8
"""Measured: a second thread gains up to a fifth on a warm cache, further ones nothing; a store takes time to answer."""


@dataclass(frozen=True)
class _Request:
    """The arguments, checked."""

    checkpoint_dir: Path
    output_path: Path
    safe: bool
    remove: bool
    max_shard_bytes: int | None
    dtype: DType | None
    strip_prefix: str | None
    include: tuple[str, ...] | None
    exclude: tuple[str, ...] | None
    weights: Weights
    adapter: str | None
    """Of the only one, if empty."""
    merge_adapter: str | None
    is_raw: bool
    """Whether a model with adapters may be written under its own names."""
    threads: int
    verify: bool
    check: bool
    """Whether the source is compared with its checksums."""


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
    *,
    max_shard_size: str | int | None = None,
    dtype: str | torch.dtype | None = None,
    strip_prefix: str | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    weights: Weights = "model",
    adapter: str | bool | None = None,
    merge_adapter: str | bool = False,
    threads: int | None = None,
    progress: ProgressCallback | bool | None = None,
    verify: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> MergeReport:
    """Merge a sharded checkpoint into the weights of one model, by copying bytes.

    In a process group, every process calls it: the main one merges, the others wait and get the same report, or an
    error that names the main process.

    Args:
        checkpoint_dir: A folder of torch.distributed.checkpoint as Accelerate, Lightning, accelight or torch itself
            save it, a ZeRO folder of DeepSpeed, or the folder above one of these if that holds one model.
        output_path: Folder for ``model.safetensors``; made where missing. A file of that name is replaced. It may be
            the URL of an object store; one that has the checkpoint, too, copies the bytes itself where it can.
        safe_serialization: False writes ``pytorch_model.bin`` instead, with the full model in memory.
        remove_checkpoint_dir: Remove the folder that was merged, after the output was read back and compared. An
            optimizer's folder next to it stays; DeepSpeed's ``latest`` is removed with the tag folder that it names.
        max_shard_size: Split into files of at most this size (``"5GB"``, bytes), with Hugging Face's index.
        dtype: Convert floating-point tensors (``"bf16"``, ``"float16"``, a ``torch.dtype``); others keep theirs. None
            keeps each one's own, but for ZeRO 1 to 3: fp32, as DeepSpeed's ``zero_to_fp32`` gives.
        strip_prefix: Keep what lies under this attribute of the LightningModule, named as in the inner model;
            ``"auto"`` finds the attribute.
        include: Patterns (``fnmatch``) over the output's names; only names that match one are written.
        exclude: Patterns over the output's names; names that match one are left out.
        weights: ``"ema"`` takes the averages that ``ShardedEMA`` has added to the checkpoint.
        adapter: Write a folder that ``peft.PeftModel.from_pretrained`` loads (``adapter_model.safetensors`` and
            ``adapter_config.json``) of this adapter of PEFT; True takes the only one. Its names are PEFT's own. False
            writes a model with adapters under its own names, which ``from_pretrained`` does not know; None, the
            default, refuses that.
        merge_adapter: Write the base, with this adapter merged into it as PEFT's ``merge_and_unload()`` does it; True
            takes the only one. Needs peft, and a checkpoint with the base.
        threads: How many copy; None takes what was measured to be best. Five upload to an object store.
        progress: Called with bytes done and bytes in all; True shows a bar, False none, None one on a terminal.
        verify: True reads the output back and compares every byte with its source before it gets its name (in an
            object store, after that). False leaves out what is done by default, too, for checkpoints on a file system:
            while they are copied, their bytes are compared with the checksums that torch wrote when they were saved.
        storage_options: Of the file system behind URLs (``endpoint_url``), see fsspec; by default from the environment.

    Returns:
        What was written, tied and left out.

    Raises:
        CheckpointError: If the checkpoint is damaged, incomplete, or has no model. Nothing was written.
        ValueError: If an argument is wrong.
        OSError: If the disk is full, or a file may not be read or written. Nothing is left of the output.

    Source: accelerate 1.15 ``utils/fsdp_utils.py`` (``merge_fsdp_weights``) and deepspeed 0.19.8
    ``utils/zero_to_fp32.py``; the output equals theirs.
    """
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise ValueError(f"threads must be at least 1, or None, got {threads!r}.")
    request = _Request(
        checkpoint_dir=source_path(checkpoint_dir, storage_options),
        output_path=source_path(output_path, storage_options),
        safe=safe_serialization,
        remove=remove_checkpoint_dir,
        max_shard_bytes=None if max_shard_size is None else parse_size(max_shard_size),
        dtype=conversion_target(dtype),
        strip_prefix=checked_prefix(strip_prefix),
        include=patterns(include, "include"),
        exclude=patterns(exclude, "exclude"),
        weights=weights,
        adapter=_adapter_name(adapter),
        merge_adapter=_adapter_name(merge_adapter),
        is_raw=adapter is False,
        threads=threads or (REMOTE_THREADS if is_remote(checkpoint_dir) else DEFAULT_THREADS),
        verify=bool(verify) or remove_checkpoint_dir,
        check=verify is None and not remove_checkpoint_dir and not is_remote(checkpoint_dir),
    )
    of_names = {"strip_prefix": strip_prefix, "include": request.include, "exclude": request.exclude}
    of_files = {"max_shard_size": request.max_shard_bytes, "safe_serialization=False": not request.safe}
    if request.adapter is not None and (given := [name for name, value in (of_names | of_files).items() if value]):
        raise ValueError(f"adapter= writes one file with PEFT's names; omit {', '.join(given)}.")
    if request.merge_adapter is not None and (given := [name for name, value in of_names.items() if value]):
        raise ValueError(f"merge_adapter= writes all of the base, under the base's names; omit {', '.join(given)}.")
    if request.adapter is not None and request.merge_adapter is not None:
        raise ValueError("adapter= and merge_adapter= were both given: one folder is an adapter's or a model's.")
    shown = Progress(progress)
    return run_on_main(lambda: _merge(request, shown))


def _adapter_name(given: str | bool | None) -> str | None:
    return None if given is None or given is False else "" if given is True else given


def _merge(request: _Request, progress: Progress) -> MergeReport:
    started = time.monotonic()
    found = find_checkpoint(request.checkpoint_dir, request.weights)
    check_destination(found.folder, request.output_path, remove=request.remove)
    source, manifest, selection, plan = plan_merge(
        found,
        strip_prefix=request.strip_prefix,
        include=request.include,
        exclude=request.exclude,
        dtype=request.dtype,
        max_shard_bytes=request.max_shard_bytes,
        safe=request.safe,
        adapter=request.adapter,
        merge_adapter=request.merge_adapter,
        is_raw=request.is_raw,
        by_size=request.safe and _is_copied_in_store(found.folder, request.output_path),
    )
    check_conflicts(request.output_path, plan)
    config = None if request.adapter is None else _adapter_config(manifest, request.adapter)
    _write(request, plan, progress, lambda on_bytes: source.check(set(selection.names.values()), on_bytes), config)
    if request.remove:
        _remove(found.folder)
    names = [file.name for file in plan.files] + ([plan.index_name] if plan.index_name else [])
    if request.adapter is not None:
        names.append(ADAPTER_CONFIG)
    return MergeReport(
        destination=request.output_path,
        files=tuple(names),
        num_tensors=sum(len(file.tensors) for file in plan.files),
        num_bytes=_num_bytes(request.output_path, names),
        seconds=time.monotonic() - started,
        ties=dict(selection.ties),
        skipped=dict(source.skipped) | {source.tensors[name].fqn: why for name, why in selection.skipped.items()},
        verified=request.verify,
    )


def _remove(folder: Path) -> None:
    """Remove a checkpoint, with ``latest`` where it names the folder; what others have put into it stays."""
    if isinstance(folder, ObjectPath):
        is_named = folder.name_in_store and GENERATION.fullmatch(folder.name)  # by the object `latest` above it
        remove_checkpoint(ObjectFolder.of(folder.parent if is_named else folder))
    else:
        remove_pointers(folder)
        remove_folder(folder)


def _num_bytes(folder: Path, names: Iterable[str]) -> int:
    written = ObjectPath(folder.store, folder.name_in_store) if isinstance(folder, ObjectPath) else folder
    return sum((written / name).stat().st_size for name in names)


def _is_copied_in_store(source: Path, output: Path) -> bool:
    """Return whether a store copies the bytes itself, for which small tensors should adjoin."""
    return (
        isinstance(source, ObjectPath)
        and isinstance(output, ObjectPath)
        and ObjectFolder.of(output).can_copy_from(source)
    )


def _adapter_config(manifest: Manifest | None, adapter: str) -> bytes:
    _, chosen = find_adapter(manifest, adapter)
    return json.dumps(dict(chosen.config), indent=2, sort_keys=True).encode()


def plan_merge(
    found: FoundCheckpoint,
    *,
    strip_prefix: str | None = None,
    include: tuple[str, ...] | None = None,
    exclude: tuple[str, ...] | None = None,
    dtype: DType | None = None,
    max_shard_bytes: int | None = None,
    safe: bool = True,
    adapter: str | None = None,
    merge_adapter: str | None = None,
    is_raw: bool = True,
    by_size: bool = False,
) -> tuple[Source, Manifest | None, Selection, Plan]:
    """Return a checkpoint's content and its manifest, the selection, and the files that result."""
    source, manifest = found.format.open(found.folder)
    names = list(source.tensors)
    computed: dict[str, Compute] = {}
    if adapter is not None:
        selection = select_adapter(names, manifest, adapter)
    elif merge_adapter is not None:
        selection, computed = merged_tensors(source, manifest, merge_adapter)
    elif manifest is not None and manifest.adapters and not is_raw:
        raise CheckpointError(
            f"The model has adapters of PEFT ({', '.join(manifest.adapters)}), whose names from_pretrained does not "
            "know: it would initialize weights anew. adapter=True (--adapter) writes the folder that PEFT loads, "
            "merge_adapter=True (--merge-adapter) the base with the adapter merged into it, and adapter=False "
            "(--no-adapter) the names of the module, for load_state_dict of a model that is built in the same way."
        )
    else:
        selection = select(names, manifest, strip_prefix=strip_prefix, include=include, exclude=exclude)
    plan = make_plan(
        selection,
        _locate(source, selection),
        dtype=dtype or source.dtype,
        max_shard_bytes=max_shard_bytes,
        safe=safe,
        infos=source.tensors,
        stem=None if adapter is None else "adapter_model",
        computed=computed,
        by_size=by_size,
    )
    return source, manifest, selection, plan


def _locate(source: Source, selection: Selection) -> Mapping[str, SourceTensor]:
    """Find the bytes of what is selected; a tied tensor that was stored twice must be the same twice."""
    wanted: Iterable[str] = selection.names.values()
    if selection.duplicates:
        wanted = dict.fromkeys([*wanted, *chain.from_iterable(selection.duplicates.values())])
    located = source.locate(wanted)
    for alias, name in selection.duplicates.values():
        one, two = located[alias], located[name]
        if (one.dtype, one.shape) != (two.dtype, two.shape) or not same_bytes(one, two):
            raise CheckpointError(
                f"{source.folder / MANIFEST_NAME} ties {one.fqn!r} to {two.fqn!r}, but they hold different values: "
                f"{one.dtype.name} {list(one.shape)} and {two.dtype.name} {list(two.shape)}."
            )
    return located


def _write(
    request: _Request,
    plan: Plan,
    progress: Progress,
    check: Callable[[OnBytes], None],
    config: bytes | None = None,
) -> None:
    progress.start(plan.num_bytes * (3 if request.verify else 1))
    try:
        if isinstance(request.output_path, ObjectPath):
            if request.verify:
                check(progress.add)
            elif request.check:  # before an object is there, which cannot be taken back
                check(lambda _: None)
            upload_plan(
                plan,
                request.output_path,
                is_safe=request.safe,
                is_verified=request.verify,
                companions={} if config is None else {ADAPTER_CONFIG: config},
                stale=stale_files(request.output_path, plan),
                on_bytes=progress.add,
            )
        else:
            _write_files(request, plan, progress, check, config)
        progress.finish()
    finally:
        progress.close()


def _write_files(
    request: _Request, plan: Plan, progress: Progress, check: Callable[[OnBytes], None], config: bytes | None
) -> None:
    with AtomicFolder(request.output_path) as folder, translate_full_disk(request.output_path, plan.num_bytes):
        with _Meanwhile(check) if request.check else nullcontext():
            if request.safe:
                _write_safetensors(request, plan, folder, progress)
            else:
                folder.check_space(plan.num_bytes)
                for file in plan.files:
                    _write_bin(request, file, folder, progress)
        if request.verify:
            check(progress.add)
        if plan.index_name is not None:
            write_exactly(folder.create(plan.index_name, None), memoryview(plan.index), 0)
        if config is not None:
            write_exactly(folder.create(ADAPTER_CONFIG, None), memoryview(config), 0)
        folder.commit(plan.index_name, stale_files(request.output_path, plan))


class _Meanwhile:
    """Compares the source with its checksums while the body copies it, whose pages are in memory then.

    Raises:
        CheckpointError: When the body is done, if they differ.
    """

    def __init__(self, check: Callable[[OnBytes], None]) -> None:
        self._check = check
        self._is_wanted = True
        self._thread = ThreadPoolExecutor(1, "accelight-check")

    def __enter__(self) -> None:
        self._checked = self._thread.submit(self._check, self._continue)

    def _continue(self, _: int) -> None:
        if not self._is_wanted:
            raise InterruptedError("The merge has failed.")

    def __exit__(self, error: object, *_: object) -> None:
        try:
            if error is None:
                self._checked.result()
        finally:
            self._is_wanted = False
            self._thread.shutdown()


def _write_safetensors(request: _Request, plan: Plan, folder: AtomicFolder, progress: Progress) -> None:
    folder.check_space(plan.num_bytes)
    opened = [(file, folder.create(file.name, file.num_bytes)) for file in plan.files]
    copy_tensors(opened, request.threads, progress.add)
    if request.verify:
        folder.forget_cache()
        for file, fd in opened:
            compare_tensors(file, fd, progress.add)


def _write_bin(request: _Request, file: PlannedFile, folder: AtomicFolder, progress: Progress) -> None:
    from .writing.copy import compare_bin, save_bin  # torch

    fd = folder.create(file.name, None)
    with os.fdopen(os.dup(fd), "wb") as stream:
        save_bin(file, stream)
    progress.add(file.num_bytes)
    if request.verify:
        folder.forget_cache()
        with os.fdopen(os.dup(fd), "rb") as stream:
            stream.seek(0)
            compare_bin(file, stream)
        progress.add(file.num_bytes)


# ------------------------------------------------------------------------------------------------
# The weights of a sharded checkpoint in memory, instead of in files.


def load_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    strip_prefix: str | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    weights: Weights = "model",
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the full weights of a sharded checkpoint on the CPU: what `merge_fsdp_weights` would write.

    One process calls it; nothing is written, and tied weights are one tensor under all of their names.

    Args:
        checkpoint_dir: As for `merge_fsdp_weights`.
        dtype: Convert floating-point tensors; None keeps each one's own, but for ZeRO 1 to 3: fp32.
        strip_prefix: Keep what lies under this attribute of the LightningModule; ``"auto"`` finds it.
        include: Patterns (``fnmatch``) over the resulting names; only names that match one are read.
        exclude: Patterns over the resulting names; names that match one are left out.
        weights: ``"ema"`` returns the averages of ``ShardedEMA``.
        storage_options: Of the file system behind URLs (``endpoint_url``), see fsspec; by default from the environment.

    Raises:
        CheckpointError: If the checkpoint is damaged, incomplete, or no model can be identified in it.
        ValueError: If an argument is wrong.
    """
    from .writing.copy import load_tensors

    found = find_checkpoint(source_path(checkpoint_dir, storage_options), weights)
    source, _, selection, plan = plan_merge(
        found,
        strip_prefix=checked_prefix(strip_prefix),
        include=patterns(include, "include"),
        exclude=patterns(exclude, "exclude"),
        dtype=conversion_target(dtype),
        max_shard_bytes=None,
        safe=False,
    )
    if not isinstance(found.folder, ObjectPath):  # behind a URL it would fetch all bytes twice, as in merges
        source.check(set(selection.names.values()), lambda _: None)
    tensors: dict[str, torch.Tensor] = {}
    for file in plan.files:
        tensors.update(load_tensors(file))
        tensors.update({alias: tensors[name] for alias, name in file.ties.items()})
    return tensors
