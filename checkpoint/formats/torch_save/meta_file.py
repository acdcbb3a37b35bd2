"""How far training was: epoch and step out of Lightning's ``meta.pt``, without torch and without running any of it."""

from __future__ import annotations

import zipfile
from pathlib import Path

from ...errors import CheckpointError
from ..safe_paths import file_inside
from .pickled_objects import DictWithState, InertByDefault
from .unpickler import Allowed, load_restricted

META_NAME = "meta.pt"
"""What Lightning's strategies and ours save beside the shards: everything but weights and optimizer state."""

_MAX_PICKLE = 64 * 2**20


_ALLOWED: Allowed = InertByDefault({("collections", "OrderedDict"): DictWithState})


def read_progress(folder: Path) -> tuple[int | None, int | None]:
    """Return epoch and global step from a folder's ``meta.pt``; None where it does not say them, or is missing.

    Raises:
        CheckpointError: If the file is not one that ``torch.save`` writes.
    """
    path = folder / META_NAME
    if not path.is_file():
        return None, None
    path = file_inside(folder, META_NAME, str(folder))
    content = load_restricted(_pickle_of(path), _ALLOWED, str(path), lambda _: None)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: should hold a dict, found {type(content).__name__}.")
    epoch, step = (content.get(key) for key in ("epoch", "global_step"))
    return epoch if type(epoch) is int else None, step if type(step) is int else None


def _pickle_of(path: Path) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            member = next((one for one in archive.infolist() if one.filename.endswith("/data.pkl")), None)
            if member is None or member.compress_type != zipfile.ZIP_STORED or member.file_size > _MAX_PICKLE:
                raise CheckpointError(f"{path}: no stored data.pkl of at most {_MAX_PICKLE} bytes in it.")
            return archive.read(member)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(f"{path}: not a file of torch.save ({error}).") from error
