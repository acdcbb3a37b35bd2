"""Untrusted pickles: a machine of our own, with few opcodes, that builds only what a table lists. No torch.

`pickle.Unpickler` is not used. It would:

- import, call and set attributes where told otherwise,
- hash any key: a tuple of twice a tuple of twice a tuple ... takes forever,
- remember every object until its end.

Here an opcode that ``torch.save`` and DCP do not write is an error, a name means what the table says and nothing else,
keys of dicts are simple, and only what the pickle fetches again is remembered.

Measured with the ``.metadata`` of 100,000 tensors in two pieces each, 42 MB: 1.8 s and 27 MiB with all checks, as it is
read from the file block by block into a table (`dcp/tensor_table.py`) and what is alike is taken at once (`repeats.py`,
`dcp/storage_items.py`); `pickle.load` into torch's classes 3.2 s and 536 MiB.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import BinaryIO

from ...errors import CheckpointError
from .allowed_names import Allowed
from .opcodes import run
from .pickle_machine import Filled, Machine, Shortcut


def load_restricted(
    data: bytes | BinaryIO,
    allowed: Allowed,
    what: str,
    persistent: Callable[[object], object] | None = None,
    *,
    dicts: Mapping[str, Filled] | None = None,
    shortcuts: Mapping[type, Shortcut] | None = None,
) -> object:
    """Unpickle ``data`` into what ``allowed`` lists and Python's plain containers.

    Args:
        data: The complete pickle; or a file of nothing else, which is read block by block.
        allowed: Fixed table of (module, name) and what stands for it.
        what: Names the pickle in errors, e.g. the file.
        persistent: Resolves persistent ids (``torch.save`` writes storages so); None refuses them.
        dicts: What takes the items of the dicts in the state of the pickle's outermost object, by their keys there.
        shortcuts: What takes objects at once where it can, by what ``allowed`` has for their class.

    Raises:
        CheckpointError: Whatever is wrong with the pickle.
    """
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    try:
        return run(Machine(stream, allowed, what, persistent, dicts, shortcuts))
    except CheckpointError:
        raise
    except (RecursionError, MemoryError) as error:
        raise CheckpointError(f"{what}: the pickle is too deep or too large ({type(error).__name__}).") from None
    except IndexError:
        size = stream.seek(0, io.SEEK_END)
        raise CheckpointError(f"{what}: the pickle is cut off after {size} bytes, or damaged.") from None
    except Exception as error:  # raised by the table's classes and functions for values that they do not expect
        raise CheckpointError(f"{what}: not a readable pickle ({type(error).__name__}: {str(error)[:300]}).") from error
