"""Whether DeepSpeed's files are as they were written: each rank looks at its share of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from ....checkpoint.digests import FileDigest
from ....checkpoint.errors import CheckpointError
from ....checkpoint.files import is_regular
from ....checkpoint.formats.torch_save.torch_file import check_bytes, check_written, digest_of_file
from ....checkpoint.manifest import read_manifest
from ...common.checked_bytes import bytes_are_checked
from . import universal

_MODEL, _ALL = "*_model_states.pt", "*_states.pt"


def digests_of(folder: Path) -> dict[str, FileDigest]:
    """Return the digests of what DeepSpeed has written into a checkpoint's folder."""
    digests = {}
    for file in (folder / universal.TAG).glob(_ALL):
        with suppress(CheckpointError):  # torch's old format, which DeepSpeed can be told to write
            digests[f"{universal.TAG}/{file.name}"] = digest_of_file(file)
    return digests


def check_files(path: Path, *, all_of_them: bool) -> None:
    """Check this rank's share of what DeepSpeed will read.

    Args:
        path: The checkpoint's folder.
        all_of_them: Whether optimizer states are read, too.

    Raises:
        CheckpointError: If one is damaged, or no file: DeepSpeed would wait for a FIFO.
    """
    manifest = read_manifest(path)
    files = sorted((path / universal.TAG).glob(_ALL if all_of_them else _MODEL))
    if all_of_them:
        files += sorted((path / universal.FOLDER).rglob("*.pt"))
    for file in files[dist.get_rank() :: dist.get_world_size()]:
        is_regular(file)
        name = file.relative_to(path).as_posix()
        if manifest is not None and name in manifest.digests:
            check_written(file, manifest.digests[name])
        if bytes_are_checked():
            check_bytes(file)
