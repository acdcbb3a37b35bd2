"""Pickles from strangers: only listed opcodes run, and only listed names are rebuilt. No torch.

Two fences. First the opcodes are walked without executing them: extension codes, old-style instances and anything else
that ``torch.save`` and DCP do not write are refused, and so is a memo index that would make the C unpickler reserve
gigabytes. Then ``pickle.Unpickler`` runs with a ``find_class`` that looks the exact pair of module and name up in a
fixed table, and imports nothing, whatever the pickle says.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Mapping
from typing import NoReturn

from .errors import CheckpointError

Allowed = Mapping[tuple[str, str], object]
"""What each (module, name) becomes. Values must be immutable, or sealed: a pickle can try to set attributes on them."""

_FORBIDDEN = -1
_TWO_LINES = -3  # GLOBAL: two arguments, each up to a newline
_COUNT_1, _COUNT_4, _COUNT_8 = -4, -5, -6  # length in 1, 4, 8 bytes, then so many bytes
_MEMO = -7  # LONG_BINPUT


def _opcode_table() -> list[int]:
    table = [_FORBIDDEN] * 256
    sized: tuple[tuple[bytes, int], ...] = (
        (b"().0NQRabdelstu]}\x81\x85\x86\x87\x88\x89\x93\x94", 1),  # no argument
        (b"Khq\x80", 2),  # one byte: small int, memo get and put, protocol
        (b"M", 3),
        (b"Jj", 5),
        (b"G\x95", 9),
        (b"c", _TWO_LINES),
        (b"\x8a\x8c", _COUNT_1),
        (b"X", _COUNT_4),
        (b"\x8d", _COUNT_8),
        (b"r", _MEMO),
    )
    for codes, size in sized:
        for code in codes:
            table[code] = size
    return table


_OPCODES = _opcode_table()
_WIDTHS = {_COUNT_1: 1, _COUNT_4: 4, _COUNT_8: 8}
_STACK_SIZE_LOCK = threading.Lock()
_STOP = ord(".")
_TUPLES = frozenset(b"t\x85\x86\x87")
_STACK_PER_TUPLE = 512  # hashing a nested tuple recurses in C without a check, 60 to 80 bytes a level in CPython 3.11


def check_opcodes(data: bytes, what: str) -> int:
    """Walk a pickle without running it.

    Returns:
        The number of tuples it builds, which bounds how deep they can be nested.

    Raises:
        CheckpointError: If it holds an opcode that torch and DCP do not write, or is cut off.
    """
    position, end, table, num_tuples = 0, len(data), _OPCODES, 0
    while position < end:
        code = data[position]
        size = table[code]
        if size > 0:
            position += size
            if code == _STOP:
                return num_tuples
            num_tuples += code in _TUPLES
        elif size == _FORBIDDEN:
            raise CheckpointError(f"{what}: pickle opcode {bytes([code])!r} at byte {position} is not allowed.")
        elif size == _MEMO:
            index = int.from_bytes(data[position + 1 : position + 5], "little")
            if index > end:  # a memo entry takes at least one byte of pickle
                raise CheckpointError(f"{what}: pickle memo index {index} in a pickle of {end} bytes.")
            position += 5
        elif size == _TWO_LINES:
            position = _after_line(data, _after_line(data, position + 1, what), what)
        else:
            width = _WIDTHS[size]
            count = int.from_bytes(data[position + 1 : position + 1 + width], "little")
            position += 1 + width + count
    raise CheckpointError(f"{what}: the pickle is cut off after {end} bytes.")


def _after_line(data: bytes, position: int, what: str) -> int:
    newline = data.find(b"\n", position)
    if newline < 0:
        raise CheckpointError(f"{what}: the pickle is cut off after {len(data)} bytes.")
    return newline + 1


class _RestrictedUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, allowed: Allowed, what: str, persistent: Callable[[object], object] | None):
        super().__init__(io.BytesIO(data))
        self._allowed = allowed
        self._what = what
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> object:
        try:
            return self._allowed[module, name]
        except KeyError:
            raise CheckpointError(
                f"{self._what}: the pickle asks for {module}.{name}, which is not on the list of what a checkpoint "
                f"may hold. Nothing of it was run."
            ) from None

    def persistent_load(self, pid: object) -> object:
        if self._persistent is None:
            raise CheckpointError(f"{self._what}: the pickle refers to outside data, which it may not.")
        return self._persistent(pid)

    def read(self) -> object:
        try:
            return self.load()
        except CheckpointError:
            raise
        except (RecursionError, MemoryError) as error:
            raise CheckpointError(
                f"{self._what}: the pickle is nested too deep or too large ({type(error).__name__})."
            ) from None
        except Exception as error:  # a broken pickle can raise anything
            raise CheckpointError(f"{self._what}: not a readable pickle ({type(error).__name__}: {error}).") from error


def load_restricted(
    data: bytes, allowed: Allowed, what: str, persistent: Callable[[object], object] | None = None
) -> object:
    """Unpickle ``data`` into what ``allowed`` lists and Python's plain containers.

    Args:
        data: The whole pickle.
        allowed: Fixed table of (module, name) and what stands for it.
        what: Names the pickle in errors, e.g. the file.
        persistent: Resolves persistent ids (``torch.save`` writes storages so); None refuses them.

    Raises:
        CheckpointError: Whatever is wrong with the pickle.
    """
    num_tuples = check_opcodes(data, what)
    unpickler = _RestrictedUnpickler(data, allowed, what, persistent)
    if num_tuples <= 1000:
        return unpickler.read()
    return _with_stack(unpickler.read, 2**20 + min(num_tuples * _STACK_PER_TUPLE, 2**32))


def _with_stack(fn: Callable[[], object], stack_bytes: int) -> object:
    """Run ``fn`` in a thread whose stack is that large: a hostile dict key must not overflow the caller's."""
    outcome: list[tuple[object, CheckpointError | None]] = []

    def run() -> None:
        try:
            outcome.append((fn(), None))
        except CheckpointError as error:
            outcome.append((None, error))

    with _STACK_SIZE_LOCK:
        before = threading.stack_size(-(-stack_bytes // 2**16) * 2**16)
        try:
            thread = threading.Thread(target=run, name="accelight-unpickle")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


class Sealed(type):
    """Metaclass of the classes a pickle may instantiate: their attributes cannot be set through the class."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise TypeError(f"{cls.__name__} is sealed")


class SafeCall(metaclass=Sealed):
    """A callable that a pickle may name: it runs ``fn``, and nothing can be set on it."""

    __slots__ = ("_fn",)
    _fn: Callable[..., object]

    def __init__(self, fn: Callable[..., object]):
        object.__setattr__(self, "_fn", fn)

    def __call__(self, *args: object) -> object:
        """Run ``fn``."""
        return self._fn(*args)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise TypeError("sealed")

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError("sealed")
