"""Reads untrusted pickles with Python's C unpickler, which gets only allowed, inert classes. No torch.

`pickle.Unpickler` with a fixed table in the place of `find_class` imports nothing and calls nothing else. That alone is
not enough, so each pickle is scanned before it is loaded. Measured with CPython 3.11:

- ``LONG_BINPUT`` with an index of 2**32 allocates 64 GiB for the memo.
- A dict key that is a tuple of twice a tuple of twice a tuple ... hashes in C for hours, and a tuple in a tuple in a
  tuple, 200,000 deep, overflows the C stack and kills the process. Neither can be interrupted.
- A hundred thousand integers or tuples with equal hashes as keys take minutes.
- An extension code that the process has used before returns its object without asking `find_class`.
- Where an opcode reaches over the end of a frame, the rest of the frame is skipped: text to others is opcodes to it.

The scan admits the opcodes that ``torch.save`` and DCP write, with operands inside the pickle, and nothing else. It
replaces frames by opcodes that do nothing, and each ``EMPTY_DICT`` by ``NEXT_BUFFER``, which is as long and takes the
next of the unpickler's ``buffers``: a `CheckedDict`, which looks at each key before it is hashed.

Measured with the ``.metadata`` of 100,000 tensors in two pieces each, 43 MB: reading and checking it takes 464 MiB.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, cast

from ..files import CheckpointError, brief
from .base import MAX_BYTES, MAX_DIMS

Allowed = Mapping[tuple[str, str], object]
"""The replacement of each (module, name): a class, a callable, or a plain value.

A pickle can make objects of the class and set their state, and call the callable. It can set nothing on either, and
reach nothing else.

Classes must be `Sealed`, take any state through ``__setstate__``, and hash by identity; callables must be `SafeCall`.
"""


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
    try:
        _check_density(data, what)
        return _Unpickler(_scanned(data, what), allowed, what, persistent).load()
    except CheckpointError:
        raise
    except (RecursionError, MemoryError) as error:
        error.__traceback__ = None  # frees what was built: the message needs memory, too
        raise CheckpointError(f"{what}: the pickle is too deep or too large ({type(error).__name__}).") from None
    except (EOFError, IndexError):
        raise _cut_off(data, what) from None
    except Exception as error:  # raised by the unpickler, and by the table's classes for values they do not expect
        raise CheckpointError(f"{what}: not a readable pickle ({type(error).__name__}: {str(error)[:300]}).") from error


def _cut_off(data: bytes, what: str) -> CheckpointError:
    return CheckpointError(f"{what}: the pickle is cut off after {len(data)} bytes, or damaged.")


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, stream: io.BufferedReader, allowed: Allowed, what: str, persistent: Callable[[object], object] | None
    ):
        dicts = _empty_dicts(what)
        super().__init__(stream, buffers=dicts)
        self._new_dict = SafeCall(lambda: next(dicts))
        self._allowed = allowed
        self._what = what
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a name."""
        try:
            found = self._allowed[module, name]
        except KeyError:
            shown = f"{module}.{name}"[:200]
            raise CheckpointError(
                f"{self._what}: the pickle asks for {shown}, which is not allowed in a checkpoint. None of it was run."
            ) from None
        return self._new_dict if found is CheckedDict else found

    def persistent_load(self, pid: Any) -> Any:
        """Return the replacement of an object outside the pickle."""
        if self._persistent is None:
            raise CheckpointError(f"{self._what}: the pickle refers to external data, which is not allowed.")
        return self._persistent(pid)


# ------------------------------------------------------------------------------------------------
# The scan before the load.


_READ_BYTES = 128 * 1024
_DENSE_BYTES = 64 * 1024
_DENSE = 6  # a description of tensors has one container in about 25 bytes
_CONTAINERS = (b"}", b"]", b"\x81", b"\x85", b"\x86", b"\x87")


def _check_density(data: bytes, what: str) -> None:
    """Refuse a pickle that is containers more than content: each byte would become an object of 64 bytes or more."""
    if len(data) > _DENSE_BYTES and sum(map(data.count, _CONTAINERS)) > len(data) // _DENSE:
        raise CheckpointError(f"{what}: a pickle of {len(data)} bytes that consists mostly of empty containers.")


_WITHOUT_OPERAND = b"".join(
    (
        *(pickle.MARK, pickle.POP, pickle.MEMOIZE, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.EMPTY_TUPLE),
        *(pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
        *(pickle.SETITEM, pickle.SETITEMS, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD),
        pickle.BINPERSID,
    )
)
_OPERAND_BYTES = {
    1: pickle.BININT1 + pickle.BINGET + pickle.BINPUT,
    2: pickle.BININT2,
    4: pickle.BININT + pickle.LONG_BINGET,
    8: pickle.BINFLOAT,
}
_LENGTH_BYTES = {  # of opcodes followed by a length and as many bytes
    pickle.SHORT_BINUNICODE[0]: 1,
    pickle.BINUNICODE[0]: 4,
    pickle.BINUNICODE8[0]: 8,
    pickle.LONG1[0]: 1,
}
_EMPTY_DICT, _STOP, _FRAME = pickle.EMPTY_DICT[0], pickle.STOP[0], pickle.FRAME[0]
_FRAME_BYTES = 9  # with its length
_NO_FRAME = pickle.BININT1 + b"\0" + pickle.POP + (pickle.NONE + pickle.POP) * 3
_KNOWN = b"".join((_WITHOUT_OPERAND, *_OPERAND_BYTES.values(), pickle.GLOBAL, pickle.LONG_BINPUT, pickle.PROTO))


def _runs(num_bytes: int) -> re.Pattern[bytes]:
    """Return a pattern that matches many harmless opcodes in a row, in a pickle of a size.

    An index of the memo is below the size, rounded up to 2**16 or 2**24: the unpickler allocates 16 bytes for each
    index up to it. Integers of 4 to 8 bytes are what DCP writes for large offsets.
    """
    high = min(num_bytes >> 24, 255), 255 if num_bytes >> 24 else num_bytes >> 16
    index = rb"..[\x00-\x%02x][\x00-\x%02x]" % (high[1], high[0])
    operands = [rb"[%s].{%d}" % (re.escape(codes), size) for size, codes in _OPERAND_BYTES.items()]
    longs = [rb"%s\x%02x.{%d}" % (pickle.LONG1, size, size) for size in range(4, 9)]
    versions = rb"%s[\x00-\x%02x]" % (pickle.PROTO, pickle.HIGHEST_PROTOCOL)
    rest = [pickle.LONG_BINPUT + index, versions, pickle.GLOBAL + rb"[^\n]*\n[^\n]*\n"]
    # Not without end: the matcher keeps a state for each repetition.
    whole = rb"(?:" + rb"|".join([rb"[%s]+" % re.escape(_WITHOUT_OPERAND), *operands, *longs, *rest]) + rb"){1,1000}"
    return re.compile(whole, re.DOTALL)


def _scanned(data: bytes, what: str) -> io.BufferedReader:
    """Return a pickle whose dicts come out of the unpickler's buffers.

    Raises:
        CheckpointError: If it has other opcodes than are admitted, or is cut off.
    """
    stream, size, position = io.BytesIO(data), len(data), 0
    match = _runs(size).match
    with stream.getbuffer() as view:
        while position < size:
            if found := match(view, position):
                position = found.end()
                if position == size:
                    break
            code = view[position]
            if code == _EMPTY_DICT:
                view[position] = pickle.NEXT_BUFFER[0]
                position += 1
            elif code == _STOP:
                return io.BufferedReader(cast("io.RawIOBase", stream), _READ_BYTES)
            elif width := _LENGTH_BYTES.get(code):
                start = position + 1 + width
                position = start + int.from_bytes(view[position + 1 : start], "little")
            elif code == _FRAME:
                start = position + _FRAME_BYTES
                if start + int.from_bytes(view[position + 1 : start], "little") > size:
                    break
                view[position:start] = _NO_FRAME
                position = start
            elif not found:
                raise _refusal(view, position, what)
    raise _cut_off(data, what)


def _refusal(view: memoryview, position: int, what: str) -> Exception:
    """Return the error of an opcode that is not admitted; an IndexError where its operand is cut off."""
    code, operand = bytes(view[position : position + 1]), bytes(view[position + 1 : position + 5])
    if code == pickle.PROTO and operand:
        return CheckpointError(f"{what}: the pickle has protocol {operand[0]}, which is not allowed.")
    if code == pickle.LONG_BINPUT and len(operand) == 4:
        number = int.from_bytes(operand, "little")
        return CheckpointError(f"{what}: the pickle has {len(view)} bytes and puts entry {number} into its memo.")
    if code not in _KNOWN:
        return CheckpointError(f"{what}: pickle opcode {code!r} at byte {position} is unknown.")
    return IndexError()


# ------------------------------------------------------------------------------------------------
# Classes, functions and values that a pickle may name and cannot change.


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


_MAX_ODD_KEYS = 10_000
_MAX_KEY_LENGTH = 1000


class _KeyCheck:
    """Refuses keys that take long to hash, and more than a few whose hashes could all be made equal."""

    def __init__(self, what: str):
        self._what = what
        self._num_odd = 0

    def __call__(self, key: object) -> None:
        if isinstance(key, tuple):
            if any(isinstance(one, tuple) for one in key):
                raise CheckpointError(f"{self._what}: the pickle has a nested tuple as a key, which is not allowed.")
            if len(key) > _MAX_KEY_LENGTH:
                raise CheckpointError(f"{self._what}: the pickle has a tuple of {len(key)} elements as a key.")
        elif not (isinstance(key, float) or (isinstance(key, int) and abs(key) >= 2**31)):
            return  # hashed by identity, or small
        self._num_odd += 1
        if self._num_odd > _MAX_ODD_KEYS:
            raise CheckpointError(f"{self._what}: the pickle has more than {_MAX_ODD_KEYS} keys that are not strings.")


_set_item = dict.__setitem__


class CheckedDict(dict[Any, Any], metaclass=Sealed):
    """Every dict of a pickle; in a table, ``collections.OrderedDict``. Its attribute ``_metadata`` is dropped."""

    __slots__ = ("_check",)
    _check: _KeyCheck

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) is not str:
            self._check(key)
        elif key in self:
            raise pickle.UnpicklingError(f"two entries are named {brief(key)}")
        _set_item(self, key, value)

    def __setstate__(self, _: object) -> None: ...


def _empty_dicts(what: str) -> Iterator[CheckedDict]:
    check = _KeyCheck(what)
    while True:
        new = CheckedDict()
        new._check = check
        yield new


class Size(tuple[int, ...], metaclass=Sealed):
    """``torch.Size``: small non-negative integers, checked as they come in."""

    __slots__ = ()

    def __new__(cls, values: Iterable[Any] = ()) -> Size:  # noqa: PYI034 - Self is newer than Python 3.10
        """Check the sizes."""
        size = super().__new__(cls, values)
        if len(size) > MAX_DIMS or not all(type(one) is int and 0 <= one < MAX_BYTES for one in size):
            raise pickle.UnpicklingError(f"a torch.Size of {brief(tuple(size))}")
        return size

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError("sealed")


def type_name(value: object) -> str:
    """Return a name for the type of an object from a pickle."""
    return "dict" if type(value) is CheckedDict else type(value).__name__


# ------------------------------------------------------------------------------------------------
# Placeholders for objects that a pickle names and no reader needs: nothing is imported, nothing is run.


_ATTACK_MODULES = frozenset(("os", "posix", "nt", "subprocess", "sys", "pty", "runpy", "importlib", "shutil", "socket"))
_ATTACK_BUILTINS = frozenset(("eval", "exec", "execfile", "compile", "__import__", "open", "input", "breakpoint"))


class Inert(metaclass=Sealed):
    """Placeholder for every object that is not needed: accepts whatever the pickle gives it, and keeps nothing."""

    __slots__ = ()

    def __new__(cls, *_: object) -> Inert:  # noqa: PYI034 - Self is newer than Python 3.10
        """Take any arguments."""
        return super().__new__(cls)

    def __call__(self, *_: object) -> Inert:
        """Be the result of a call, too."""
        return self

    def __setstate__(self, _: object) -> None: ...

    def __setitem__(self, _: object, __: object) -> None: ...

    def append(self, _: object) -> None:
        """Drop what a list would keep."""

    def extend(self, _: object) -> None:
        """Drop what a list would keep."""


class InertByDefault(dict[tuple[str, str], object]):
    """Allowed names of a pickle; `Inert` for all others, however they are called: `Inert` keeps and runs nothing."""

    def __missing__(self, _: tuple[str, str]) -> type[Inert]:
        return Inert


class InertUnlessAttack(InertByDefault):
    """The same, but names that only an attack has a use for are an error.

    This protects nothing, it informs the user: with `Inert` the pickle would be just as harmless.
    """

    def __missing__(self, key: tuple[str, str]) -> type[Inert]:
        module, name = key
        if module.partition(".")[0] in _ATTACK_MODULES or (
            module in ("builtins", "__builtin__") and name in _ATTACK_BUILTINS
        ):
            raise CheckpointError(
                f"The pickle asks for {module}.{name}. No training run writes such a file. It may be malicious. None "
                "of it was run."
            )
        return Inert
