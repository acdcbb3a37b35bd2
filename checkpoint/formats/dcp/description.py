"""What a folder of torch.distributed.checkpoint holds, told from its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...digests import Digests
from ...errors import CheckpointError
from ...files import read_regular
from ...manifest import Manifest
from ..description import CheckpointInfo, ShardFile, StoredTensorInfo
from ..safe_paths import file_inside
from ..state_dict_keys import is_optimizer_key
from ..torch_save.lightning_meta import META_NAME, read_progress
from .metadata import METADATA_NAME, DCPMetadata
from .reader import select_model
from .tensor_table import StoredRecord

_MAX_META_BYTES = 2**31
_KINDS = {
    "accelight": "accelight (torch.distributed.checkpoint with accelight.json)",
    "accelerate": "Accelerate, FSDP",
    "lightning-fsdp": "Lightning, FSDPStrategy",
    "lightning-model-parallel": "Lightning, ModelParallelStrategy",
    "lightning": "Lightning Fabric",
    "torch-dcp": "torch.distributed.checkpoint",
    "torch-dcp-safetensors": "torch.distributed.checkpoint, safetensors format",
}


def describe_dcp(folder: Path, metadata: DCPMetadata, manifest: Manifest | None, unknown_kind: str) -> CheckpointInfo:
    """Say what a DCP folder holds.

    Args:
        folder: The folder.
        metadata: Where its tensors lie.
        manifest: What ``accelight.json`` says, if there is one.
        unknown_kind: The kind where nothing tells who saved the folder.
    """
    names, skipped = select_model(metadata, None if manifest is None else manifest.model_prefix, str(folder))
    digests = {} if manifest is None else manifest.digests
    if META_NAME in digests:
        digests[META_NAME].check(folder / META_NAME, read_regular(folder / META_NAME, _MAX_META_BYTES, META_NAME))
    notes: tuple[str, ...] = ()
    epoch = step = None
    try:
        epoch, step = read_progress(folder)
    except CheckpointError as error:
        notes = (f"epoch and step are not known: {error}",)
    prefix = _prefix(names)
    kind = _kind(folder, manifest, prefix, unknown_kind)
    described = {name: metadata.tensors[fqn] for name, fqn in names.items()}
    return CheckpointInfo(
        path=folder,
        kind=kind,
        model_prefix=prefix,
        tensors=tuple(
            StoredTensorInfo.of(name, tensor.dtype, tensor.shape, len(tensor.chunks))
            for name, tensor in described.items()
        ),
        files=_files(folder, metadata, digests),
        has_optimizer=_has_optimizer(folder, metadata),
        ties={} if manifest is None else dict(manifest.ties),
        module_attribute=None if manifest is None else manifest.module_attribute,
        epoch=epoch,
        global_step=step,
        skipped=skipped | dict.fromkeys(metadata.not_tensors, "not a tensor"),
        has_digests=bool(digests),
        notes=notes,
        kind_in_words=_KINDS[kind],
    )


def _prefix(names: Mapping[str, str]) -> str:
    """Return what was taken off in front of the model's names."""
    return next((fqn[: len(fqn) - len(name)].rstrip(".") for name, fqn in names.items()), "")


def _kind(folder: Path, manifest: Manifest | None, prefix: str, unknown: str) -> str:
    if manifest is not None:
        return "accelight"
    if folder.name.startswith("pytorch_model_fsdp_"):
        return "accelerate"
    if (folder / META_NAME).is_file():
        return {"model": "lightning-fsdp", "state_dict": "lightning-model-parallel"}.get(prefix, "lightning")
    return unknown


def _has_optimizer(folder: Path, metadata: DCPMetadata) -> bool:
    entries = (*metadata.tensors, *metadata.not_tensors)
    if any(is_optimizer_key((metadata.paths.get(fqn) or (fqn,))[0].partition(".")[0]) for fqn in entries):
        return True
    beside = folder.resolve().parent.glob(f"*/{METADATA_NAME}") if folder.name.startswith("pytorch_model_fsdp_") else ()
    return any(is_optimizer_key(path.parent.name) for path in beside)


def _files(folder: Path, metadata: DCPMetadata, digests: Digests) -> tuple[ShardFile, ...]:
    by_file: dict[str, list[tuple[str, StoredRecord]]] = {}
    for fqn, tensor in metadata.tensors.items():
        for _, _, record in tensor.chunks:
            by_file.setdefault(record.relative_path, []).append((fqn, record))
    files = []
    for name in sorted(by_file):
        fqn, last = max(by_file[name], key=lambda one: one[1].offset + one[1].length)
        size = file_inside(folder, name, f"{folder / METADATA_NAME}: tensor {fqn!r}").stat().st_size
        if last.offset + last.length > size:
            raise CheckpointError(
                f"{folder / name}: tensor {fqn!r}: the record should end at byte {last.offset + last.length}, the file "
                f"has {size}. It was cut off, or belongs to another save."
            )
        if name in digests:
            digests[name].check_size(folder / name, size)
        files.append(ShardFile(name, size, len(by_file[name])))
    return tuple(files)
