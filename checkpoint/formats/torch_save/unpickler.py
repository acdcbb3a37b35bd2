"""Untrusted pickles: a machine of our own, with few opcodes, that builds only what a table lists. No torch.

`pickle.Unpickler` is not used. It would:

- import, call and set attributes where told otherwise,
- hash any key: a tuple of twice a tuple of twice a tuple ... takes forever,
- remember every object until its end.

Here an opcode that ``torch.save`` and DCP do not write is an error, a name means what the table says and nothing else,
keys of dicts are simple, and only what the pickle fetches again is remembered: half the memory of `pickle.Unpickler`,
for one and a half times its time.
"""

from __future__ import annotations

from collections.abc import Callable

from ...errors import CheckpointError
from .allowed_names import Allowed
from .opcodes import run
from .pickle_machine import Machine

_DENSE_BYTES = 64 * 1024
_DENSE = 6  # a description of tensors has one container in about 25 bytes


def load_restricted(
    data: bytes, allowed: Allowed, what: str, persistent: Callable[[object], object] | None = None
) -> object:
    """Unpickle ``data`` into what ``allowed`` lists and Python's plain containers.

    Args:
        data: The complete pickle.
        allowed: Fixed table of (module, name) and what stands for it.
        what: Names the pickle in errors, e.g. the file.
        persistent: Resolves persistent ids (``torch.save`` writes storages so); None refuses them.

    Raises:
        CheckpointError: Whatever is wrong with the pickle.
    """
    if len(data) > _DENSE_BYTES and sum(map(data.count, (b"}", b"]", b"\x81", b"\x85", b"\x86", b"\x87"))) > (
        len(data) // _DENSE
    ):
        raise CheckpointError(f"{what}: a pickle of {len(data)} bytes that are containers more than content.")
    try:
        return run(Machine(data, allowed, what, persistent))
    except CheckpointError:
        raise
    except (RecursionError, MemoryError) as error:
        raise CheckpointError(f"{what}: the pickle is too deep or too large ({type(error).__name__}).") from None
    except IndexError:
        raise CheckpointError(f"{what}: the pickle is cut off after {len(data)} bytes, or damaged.") from None
    except Exception as error:  # raised by the table's classes and functions for values that they do not expect
        raise CheckpointError(f"{what}: not a readable pickle ({type(error).__name__}: {str(error)[:300]}).") from error
