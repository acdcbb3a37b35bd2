"""What a DeepSpeed checkpoint holds, told from its files' descriptions."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from ...manifest import Manifest
from ..description import CheckpointInfo, ShardFile, StoredTensorInfo
from .reader import ZeroCheckpoint

_KINDS = {
    "deepspeed-universal": "DeepSpeed, universal checkpoint",
    **{f"deepspeed-stage-{stage}": f"DeepSpeed, ZeRO stage {stage}" for stage in range(4)},
    **{f"lightning-deepspeed-stage-{stage}": f"Lightning, DeepSpeedStrategy, stage {stage}" for stage in range(4)},
}
_OURS = "accelight, AccelDeepSpeedStrategy, ZeRO stage {}"
"""Where ``accelight.json`` is beside Lightning's state: no other strategy writes it."""


def describe_zero(checkpoint: ZeroCheckpoint, manifest: Manifest) -> CheckpointInfo:
    """Say what a tag folder holds.

    Args:
        checkpoint: Its description.
        manifest: What ``accelight.json`` says, checked.
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
        skipped={**checkpoint.skipped, **left_out(manifest, checkpoint.tensors)},
        kind_in_words=_OURS.format(checkpoint.stage) if states.is_lightning and manifest.digests else _KINDS[kind],
    )


def left_out(manifest: Manifest, stored: Container[str]) -> dict[str, str]:
    """Return the parameters that a checkpoint lacks by the user's wish, with the reason."""
    reason = "frozen, and not in the checkpoint (saved with exclude_frozen_parameters)"
    return {name: reason for name in manifest.left_out if name not in stored}


def _shard_file(folder: Path, path: Path, num_chunks: int) -> ShardFile:
    return ShardFile(path.relative_to(folder.resolve()).as_posix(), path.stat().st_size, num_chunks)
