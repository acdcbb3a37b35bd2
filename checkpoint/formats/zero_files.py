"""The files of a DeepSpeed checkpoint: which folder they are in, and which rank wrote which.

Source: deepspeed 0.19.8 ``runtime/engine.py`` (``_get_ckpt_name``, ``_get_rank_zero_ckpt_name``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath

from ..files import CheckpointError, file_inside, is_regular, read_regular, resolved

LATEST_NAME = "latest"
"""The file beside the tag folders that names the newest one."""
LATEST_UNIVERSAL_NAME = "latest_universal"
"""The same, written by ``ds_to_universal``."""

_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_SHARD = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_FOREIGN = {
    "mixture of experts": re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_.*\.pt"),
    "pipeline parallelism": re.compile(r"layer_\d+-.*model_states\.pt"),
}
_MAX_TAG_BYTES = 4096


@dataclass(frozen=True)
class ZeroFiles:
    """The paths of one tag folder, by rank."""

    folder: Path
    model: Path | None
    """Written by rank 0 below stage 3."""
    model_shards: Mapping[int, Path]
    """Of stage 3."""
    optimizer_shards: Mapping[int, Path]


def has_zero_files(folder: Path) -> bool:
    """Whether ``folder`` is a tag folder."""
    return any(pattern.fullmatch(name) for name in _names(folder) for pattern in (_MODEL, _SHARD, _OPTIMIZER))


def latest_tag(folder: Path) -> Path | None:
    """Return the tag folder that ``latest`` or ``latest_universal`` names; None if there is neither.

    Raises:
        CheckpointError: If it names no folder with DeepSpeed's files, or one that is not inside ``folder``.
    """
    pointer = next((folder / name for name in (LATEST_NAME, LATEST_UNIVERSAL_NAME) if is_regular(folder / name)), None)
    if pointer is None:
        return None
    content = read_regular(file_inside(folder, pointer.name, str(folder)), _MAX_TAG_BYTES, "a folder's name")
    tag = content.decode(errors="replace").strip()
    parts = PurePosixPath(tag).parts
    if not parts or parts[0] == "/" or ".." in parts or "\\" in tag or "\0" in tag:
        raise CheckpointError(f"{pointer} names the folder {tag[:200]!r}, which is not a plain path inside {folder}.")
    found = folder.joinpath(*parts)
    if not resolved(found).is_relative_to(folder.resolve()):
        raise CheckpointError(f"{pointer} names {tag!r}, a link out of the folder to {resolved(found)}.")
    if not found.is_dir() or not has_zero_files(found):
        what = "holds none of DeepSpeed's files" if found.is_dir() else "does not exist"
        raise CheckpointError(f"{pointer} names the folder {tag!r}, which {what}. Pass the checkpoint folder itself.")
    return found


def remove_pointers(tag_folder: Path) -> None:
    """Remove ``latest`` and ``latest_universal`` beside a tag folder where they name it, before it is removed itself.

    A pointer to another tag stays. So does everything else beside the folder.
    """
    for name in (LATEST_NAME, LATEST_UNIVERSAL_NAME):
        pointer = tag_folder.absolute().parent / name
        if not pointer.is_file() or pointer.stat().st_size > _MAX_TAG_BYTES:
            continue
        if pointer.read_bytes().decode(errors="replace").strip() == tag_folder.absolute().name:
            pointer.unlink()


def list_zero_files(folder: Path) -> ZeroFiles:
    """Return the files of a tag folder.

    Raises:
        CheckpointError: If some belong to a parallelism that cannot be put together here, or two are of one rank.
    """
    names = _names(folder)
    for what, pattern in _FOREIGN.items():
        found = next((name for name in names if pattern.fullmatch(name)), None)
        if found is not None:
            raise CheckpointError(
                f"{folder}: {found} is a file of {what}; only data-parallel ZeRO checkpoints can be merged. Gather "
                "and save the weights in the training program."
            )
    model = _by_rank(folder, ((name, match, 0, 1) for name in names if (match := _MODEL.fullmatch(name))))
    return ZeroFiles(
        folder,
        model.get(0),
        _by_rank(folder, ((name, match, 1, 2) for name in names if (match := _SHARD.fullmatch(name)))),
        _by_rank(folder, ((name, match, 1, 2) for name in names if (match := _OPTIMIZER.fullmatch(name)))),
    )


def _by_rank(folder: Path, found: Iterable[tuple[str, re.Match[str], int, int]]) -> dict[int, Path]:
    """Return paths by data-parallel rank; names are (name, match, group of that rank, group of the other)."""
    paths: dict[int, Path] = {}
    for name, match, data, model in found:
        rank = int(match[data]) if data else 0
        if int(match[model]):
            raise CheckpointError(
                f"{folder}: {name} belongs to model-parallel rank {int(match[model])}; tensor-parallel weights "
                "cannot be merged. Save gathered weights with engine.save_16bit_model()."
            )
        if rank in paths:
            raise CheckpointError(f"{folder}: {paths[rank].name} and {name} both belong to rank {rank}.")
        paths[rank] = file_inside(folder, name, str(folder))
    return dict(sorted(paths.items()))


def check_ranks(folder: Path, paths: Mapping[int, Path], world_size: int, kind: str) -> None:
    """Check that there is a file of each of ``world_size`` ranks and no other.

    Raises:
        CheckpointError: If one is missing or too many.
    """
    missing = list(islice((rank for rank in range(world_size) if rank not in paths), 9))  # the number may be hostile
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise CheckpointError(
            f"{folder}: saved by {world_size} processes, {len(paths)} *_{kind}_states.pt files exist: that of rank "
            f"{shown} is missing. Were the files of all processes copied?"
        )
    extra = next((path for rank, path in paths.items() if rank >= world_size), None)
    if extra is not None:
        raise CheckpointError(
            f"{folder}: saved by {world_size} processes, but {extra.name} exists, too, left from another save. "
            "Remove the files of other saves."
        )


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []
