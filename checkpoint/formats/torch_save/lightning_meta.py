"""How far training was: epoch and step out of Lightning's ``meta.pt``, without torch and without running any of it."""

from __future__ import annotations

from pathlib import Path

from ...errors import CheckpointError
from ...files import is_regular
from ..safe_paths import file_inside
from .allowed_names import Allowed
from .pickled_objects import DictWithState, InertByDefault
from .torch_file import open_archive

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
    if not is_regular(path):
        return None, None
    path = file_inside(folder, META_NAME, str(folder))
    with open_archive(path, _MAX_PICKLE) as archive:
        content = archive.content(_ALLOWED, lambda _: None)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: should hold a dict, found {type(content).__name__}.")
    epoch, step = (content.get(key) for key in ("epoch", "global_step"))
    return epoch if type(epoch) is int else None, step if type(step) is int else None
