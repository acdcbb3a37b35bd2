"""Reads untrusted pickles: a small machine that builds only allowed, inert classes. No torch.

`pickle.Unpickler` is not used. It would:

- import, call and set attributes where the pickle asks for it,
- hash any key: a tuple of twice a tuple of twice a tuple ... takes forever,
- remember every object until its end.

Here an opcode that ``torch.save`` and DCP do not write is an error, a name means what the table says and nothing else,
keys of dicts are simple, and only what the pickle fetches again is remembered.

Measured with the ``.metadata`` of 100,000 tensors in two pieces each, 42 MB: 1.8 s and 27 MiB with all checks, as it is
read from the file block by block into a table (`TensorTable` in `dcp_metadata.py`) and what is alike is taken at once
(`Repeats`, and `StorageItems` there); `pickle.load` into torch's classes 3.2 s and 536 MiB.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NoReturn, Protocol

from ..files import CheckpointError, brief
from .base import MAX_BYTES, MAX_DIMS


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


# ------------------------------------------------------------------------------------------------
# What the names in a pickle may stand for: classes, functions and values that the pickle cannot change.


Allowed = Mapping[tuple[str, str], object]
"""What each (module, name) becomes: a class, a callable, or a plain value. The pickle can make objects of the class and
set their state, and call the callable; it can set nothing on either, and reach nothing else."""


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


def _empty_dict() -> dict[object, object]:
    """Without arguments: ``dict(pairs)`` would escape the check of keys."""
    return {}


EMPTY_DICT = SafeCall(_empty_dict)
"""Stands for ``collections.OrderedDict``, which pickles make empty and then fill item by item."""


# ------------------------------------------------------------------------------------------------
# Which entries of its memo a pickle may fetch: only these need be remembered while it is read.


_SMALL_MEMO = 256  # these indices are fetched by one byte, and always remembered
_BLOCK = 2**18
_CONTAINERS = (b"}", b"]", b"\x81", b"\x85", b"\x86", b"\x87")
_MEMOIZES = (b"\x94", b"q", b"r")
_DENSE_BYTES = 64 * 1024
_DENSE = 6  # a description of tensors has one container in about 25 bytes


def fetched_again(stream: BinaryIO, what: str) -> tuple[bytearray, int]:
    """Look through a pickle without reading it.

    Args:
        stream: The pickle; left at its beginning.
        what: Names the pickle in errors.

    Returns:
        One byte for each index, 1 where a byte that could be the opcode LONG_BINGET says that it is fetched; what is
        put at indices beyond must be remembered. And the pickle's size.

    Raises:
        CheckpointError: If it is made of containers more than of content.
    """
    num_bytes = num_containers = num_memo = 0
    for block in _blocks(stream):
        num_bytes += len(block)
        num_containers += sum(map(block.count, _CONTAINERS))
        num_memo += sum(map(block.count, _MEMOIZES))
    if num_bytes > _DENSE_BYTES and num_containers > num_bytes // _DENSE:
        raise CheckpointError(f"{what}: a pickle of {num_bytes} bytes that are containers more than content.")
    wanted = bytearray(num_memo + _SMALL_MEMO)
    wanted[:_SMALL_MEMO] = b"\1" * _SMALL_MEMO
    end = b""
    for block in _blocks(stream):
        for index in _operands(end + block):
            if index < len(wanted):
                wanted[index] = 1
        end = (end + block)[-4:]  # the four bytes of the last one are in the next block
    stream.seek(0)
    return wanted, num_bytes


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    stream.seek(0)
    while block := stream.read(_BLOCK):
        yield block


def _operands(block: bytes) -> Iterator[int]:
    """Return what follows each byte that could be LONG_BINGET, where all four bytes of it are there."""
    parts = block.split(b"j")
    found = {part[:4] for part in parts[1:]}
    if any(len(one) < 4 for one in found):  # an operand with that byte in it
        short = [number for number, part in enumerate(parts) if len(part) < 4]
        found.update([b"j".join(parts[number : number + 5])[:4] for number in short])
    return (int.from_bytes(one, "little") for one in found if len(one) == 4)


# ------------------------------------------------------------------------------------------------
# The machine that reads a pickle: its stack and memo, and checks of everything that the pickle does to objects.


_SLACK = 2**14
_MAX_LINE = 2**16
_MAX_ODD_KEYS = 10_000


class Filled(metaclass=Sealed):
    """What stands for a large dict: it takes the items as they come in, and need not keep them."""

    __slots__ = ()

    def fill(self, keys: list[Any], values: list[Any]) -> None:
        """Take items."""
        raise NotImplementedError


class Shortcut(Protocol):
    """Takes an object of one class at once where its bytes are as they are known to be."""

    def take(self, machine: Machine, position: int) -> int | None:
        """Put the object whose class was just fetched on the stack, and return where it ends; None to go on plainly."""

    def made(self, machine: Machine, position: int) -> None:
        """See an object that ends here, and was made plainly."""


class Machine:
    """The state of reading one pickle.

    Args:
        stream: The pickle, from its beginning to its end. A window of it is in memory.
        allowed: See `load_restricted`.
        what: Names the pickle in errors.
        persistent: See `load_restricted`.
        dicts: What stands for the dicts in the state of the pickle's outermost object, by their keys there.
        shortcuts: By the class that stands for the objects'.
    """

    def __init__(
        self,
        stream: BinaryIO,
        allowed: Allowed,
        what: str,
        persistent: Callable[[object], object] | None = None,
        dicts: Mapping[str, Filled] | None = None,
        shortcuts: Mapping[type, Shortcut] | None = None,
    ):
        self.what = what
        self.persistent = persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.wanted, self.num_bytes = fetched_again(stream, what)
        """For each index of the memo whether the pickle may fetch it, and the pickle's size."""
        self.memo: dict[int, Any] = {}
        self.num_memo = 0
        self.dicts = dict(dicts or {})
        self.shortcuts = dict(shortcuts or {})
        self.data = b""
        """The window."""
        self.base = 0
        """Where in the pickle the window begins."""
        self.last_frame = 0
        """Where in the pickle the last frame began."""
        self._stream = stream
        self._allowed = allowed
        self._num_odd_keys = 0

    def move(self, position: int) -> int:
        """Move the window on to a position in it, and return up to where opcodes may be begun without moving it."""
        self.base += position
        self.data = self.data[position:]
        if not self._extend(_BLOCK) and not self.data:
            raise IndexError
        return len(self.data) if self._is_complete else max(len(self.data) - _SLACK, 1)

    def take(self, position: int, size: int) -> bytes:
        """Return bytes of the pickle, all of them."""
        stop = position + size
        if stop > len(self.data) and self.base + stop <= self.num_bytes:
            self._extend(stop - len(self.data))
        taken = self.data[position:stop]
        if len(taken) != size:
            raise IndexError
        return taken

    def line_end(self, position: int) -> int:
        """Return where the next line feed is."""
        newline = self.data.find(b"\n", position)
        if newline < 0:
            self._extend(_MAX_LINE)
            newline = self.data.find(b"\n", position)
            if newline < 0:
                raise IndexError
        return newline

    @property
    def _is_complete(self) -> bool:
        return self.base + len(self.data) >= self.num_bytes

    def _extend(self, size: int) -> int:
        """Read some more of the pickle into the window, and return how much it was."""
        added = self._stream.read(size) or b""
        self.data += added
        return len(added)

    def may_fetch(self, number: int, count: int) -> bool:
        """Whether the pickle may fetch one of so many entries of its memo, from a number on."""
        return self.wanted.find(1, number, number + count) >= 0

    def marked(self) -> list[Any]:
        """Take what was put on the stack since the last mark."""
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def set_state(self, target: Any, state: Any) -> None:
        """Give an object that the pickle made its state."""
        if hasattr(type(target), "__setstate__"):
            target.__setstate__(state)
        elif isinstance(target, type) or callable(target) or not hasattr(target, "__dict__") or type(state) is not dict:
            raise self.error(f"sets the state of {brief(target)}")
        else:
            vars(target).update(state)

    def set_items(self, target: Any, keys: list[Any], values: list[Any]) -> None:
        """Put items into a dict, or into an object that stands for one."""
        if len(keys) != len(values):
            raise self.error("has a key without a value")
        if isinstance(target, dict):
            for key in keys:
                if type(key) is not str:
                    self._check_key(key)
            target.update(zip(keys, values, strict=True))
        elif isinstance(target, Filled):
            target.fill(keys, values)
        elif isinstance(type(target), Sealed):
            for key, value in zip(keys, values, strict=True):
                target[key] = value
        else:
            raise self.error(f"sets items of {brief(target)}")

    def _check_key(self, key: object) -> None:
        """Refuse what takes long to hash, and more than a few keys whose hashes could all be made equal."""
        parts = vars(key).values() if hasattr(key, "__dict__") else (key,)  # a frozen dataclass hashes its fields
        if any(isinstance(one, tuple) and any(isinstance(inner, tuple) for inner in one) for one in parts):
            raise self.error("has a nested tuple as a key")
        if isinstance(key, tuple | float) or (isinstance(key, int) and abs(key) >= 2**31):
            self._num_odd_keys += 1
            if self._num_odd_keys > _MAX_ODD_KEYS:
                raise self.error(f"has more than {_MAX_ODD_KEYS} keys that are no names")

    def extend(self, target: Any, items: list[Any]) -> None:
        """Put items at the end of a list, or of an object that stands for one."""
        if type(target) is not list and not isinstance(type(target), Sealed):
            raise self.error(f"appends to {brief(target)}")
        target.extend(items)

    def find(self, module: object, name: object) -> object:
        """Return what a name stands for."""
        if type(module) is not str or type(name) is not str:
            raise self.error("asks for something without a name")
        try:
            return self._allowed[module, name]
        except KeyError:
            shown = f"{module}.{name}"[:200]
            raise CheckpointError(
                f"{self.what}: the pickle asks for {shown}, which is not on the list of what a checkpoint "
                f"may hold. Nothing of it was run."
            ) from None

    def error(self, reason: str) -> CheckpointError:
        """Return the error of a pickle that does what it may not."""
        return CheckpointError(f"{self.what}: the pickle {reason}, which it may not.")


# ------------------------------------------------------------------------------------------------
# What each opcode of a pickle does: a function for each, in a table.
#
# Measured with a ``.metadata`` of 20,000 tensors in 80,000 chunks: reading it takes 5 percent longer than with one long
# chain of branches.
#
# Source: CPython 3.11 ``pickletools.py``, the description of each opcode.


_Handler = Callable[[Machine, int], int]
"""Takes the position behind the opcode, returns the position behind its arguments."""

# Two sequences that make up half of a description are taken as one where nothing of them is fetched again: an object
# that gets a dict as its state (EMPTY_TUPLE NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK), and a call with a tuple of up to
# three small numbers, which is a torch.Size (BININT1 ... TUPLE MEMOIZE TUPLE1 MEMOIZE REDUCE MEMOIZE).
_NEW_OBJECT = b")\x81\x94}\x94("
_CALL = re.compile(rb"((?:K.){1,3})([\x85-\x87])\x94\x85\x94R\x94", re.DOTALL)
_FLOAT = struct.Struct(">d")
_INT = struct.Struct("<i")
_STOP = pickle.STOP[0]
_OUTERMOST = [2]  # the marks where the outermost object's state is read: above the object and the state


def run(machine: Machine) -> object:
    """Read a pickle to its end and return what it describes."""
    position = 0
    while True:
        limit = machine.move(position)
        data, position = machine.data, 0
        while position < limit:
            code = data[position]
            if code == _STOP:
                return machine.stack.pop()
            position = _HANDLERS[code](machine, position + 1)


def _unknown(machine: Machine, position: int) -> int:
    code = machine.data[position - 1 : position]
    raise CheckpointError(f"{machine.what}: pickle opcode {code!r} at byte {machine.base + position - 1} is not known.")


_HANDLERS: list[_Handler] = [_unknown] * 256


def _handles(*opcodes: bytes) -> Callable[[_Handler], _Handler]:
    def register(handler: _Handler) -> _Handler:
        for opcode in opcodes:
            _HANDLERS[opcode[0]] = handler
        return handler

    return register


# --- the memo


@_handles(pickle.MEMOIZE)
def _memoize(machine: Machine, position: int) -> int:
    number = machine.num_memo
    if machine.wanted[number]:
        machine.memo[number] = machine.stack[-1]
    machine.num_memo = number + 1
    return position


@_handles(pickle.BINPUT)
def _binput(machine: Machine, position: int) -> int:
    return _put(machine, position, 1)


@_handles(pickle.LONG_BINPUT)
def _long_binput(machine: Machine, position: int) -> int:
    return _put(machine, position, 4)


def _put(machine: Machine, position: int, width: int) -> int:
    index = int.from_bytes(machine.take(position, width), "little")
    if index >= len(machine.wanted) or machine.wanted[index]:
        machine.memo[index] = machine.stack[-1]
    machine.num_memo += 1
    machine.shortcuts.clear()  # what the same bytes fetch may be something else from now on
    return position + width


@_handles(pickle.BINGET)
def _binget(machine: Machine, position: int) -> int:
    return _get(machine, machine.data[position], position + 1)


@_handles(pickle.LONG_BINGET)
def _long_binget(machine: Machine, position: int) -> int:
    return _get(machine, int.from_bytes(machine.data[position : position + 4], "little"), position + 4)


def _get(machine: Machine, index: int, position: int) -> int:
    """Fetch from the memo, and take what often follows together with it."""
    data, stack, number = machine.data, machine.stack, machine.num_memo
    if index not in machine.memo:
        raise machine.error(f"asks for entry {index} of its memo, which is empty")
    found = machine.memo[index]
    following = data[position]
    if following == 0x29:  # EMPTY_TUPLE
        if data.startswith(_NEW_OBJECT, position) and isinstance(found, type):
            return _new_object(machine, found, position)
    elif following == 0x4B and callable(found) and (call := _CALL.match(data, position)):  # BININT1
        is_complete = len(call[1]) // 2 == call[2][0] - 0x84
        if is_complete and not machine.may_fetch(number, 3):
            stack.append(found(tuple(call[1][1::2])))
            machine.num_memo += 3
            return call.end()
    stack.append(found)
    return position


def _new_object(machine: Machine, cls: Any, position: int) -> int:
    """Begin an object that gets a dict as its state, or take it at once."""
    stack, shortcut = machine.stack, machine.shortcuts.get(cls)
    end = None if shortcut is None else shortcut.take(machine, position)
    if end is not None:
        return end
    if machine.may_fetch(machine.num_memo, 2):
        stack.append(cls)
        return position
    stack += [cls.__new__(cls), {}]
    machine.marks.append(len(stack))
    machine.num_memo += 2
    return position + len(_NEW_OBJECT)


# --- numbers, text and constants


@_handles(pickle.BININT1)
def _binint1(machine: Machine, position: int) -> int:
    machine.stack.append(machine.data[position])
    return position + 1


@_handles(pickle.BININT2)
def _binint2(machine: Machine, position: int) -> int:
    machine.stack.append(int.from_bytes(machine.take(position, 2), "little"))
    return position + 2


@_handles(pickle.BININT)
def _binint(machine: Machine, position: int) -> int:
    machine.stack.append(_INT.unpack(machine.take(position, 4))[0])
    return position + 4


@_handles(pickle.LONG1)
def _long1(machine: Machine, position: int) -> int:
    size = machine.data[position]
    machine.stack.append(int.from_bytes(machine.take(position + 1, size), "little", signed=True))
    return position + 1 + size


@_handles(pickle.BINFLOAT)
def _binfloat(machine: Machine, position: int) -> int:
    machine.stack.append(_FLOAT.unpack(machine.take(position, 8))[0])
    return position + 8


@_handles(pickle.SHORT_BINUNICODE)
def _short_binunicode(machine: Machine, position: int) -> int:
    return _text(machine, position + 1, machine.data[position])


@_handles(pickle.BINUNICODE)
def _binunicode(machine: Machine, position: int) -> int:
    return _text(machine, position + 4, int.from_bytes(machine.take(position, 4), "little"))


@_handles(pickle.BINUNICODE8)
def _binunicode8(machine: Machine, position: int) -> int:
    return _text(machine, position + 8, int.from_bytes(machine.take(position, 8), "little"))


def _text(machine: Machine, position: int, size: int) -> int:
    machine.stack.append(str(machine.take(position, size), "utf-8", "surrogatepass"))
    return position + size


@_handles(pickle.NONE)
def _none(machine: Machine, position: int) -> int:
    machine.stack.append(None)
    return position


@_handles(pickle.NEWTRUE)
def _newtrue(machine: Machine, position: int) -> int:
    machine.stack.append(True)
    return position


@_handles(pickle.NEWFALSE)
def _newfalse(machine: Machine, position: int) -> int:
    machine.stack.append(False)
    return position


# --- containers


@_handles(pickle.MARK)
def _mark(machine: Machine, position: int) -> int:
    machine.marks.append(len(machine.stack))
    return position


@_handles(pickle.EMPTY_TUPLE)
def _empty_tuple(machine: Machine, position: int) -> int:
    machine.stack.append(())
    return position


@_handles(pickle.TUPLE1)
def _tuple1(machine: Machine, position: int) -> int:
    machine.stack[-1] = (machine.stack[-1],)
    return position


@_handles(pickle.TUPLE2)
def _tuple2(machine: Machine, position: int) -> int:
    second = machine.stack.pop()
    machine.stack[-1] = (machine.stack[-1], second)
    return position


@_handles(pickle.TUPLE3)
def _tuple3(machine: Machine, position: int) -> int:
    stack = machine.stack
    stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
    return position


@_handles(pickle.TUPLE)
def _tuple(machine: Machine, position: int) -> int:
    machine.stack.append(tuple(machine.marked()))
    return position


@_handles(pickle.EMPTY_LIST)
def _empty_list(machine: Machine, position: int) -> int:
    machine.stack.append([])
    return position


@_handles(pickle.LIST)
def _list(machine: Machine, position: int) -> int:
    machine.stack.append(machine.marked())
    return position


@_handles(pickle.APPEND)
def _append(machine: Machine, position: int) -> int:
    item = machine.stack.pop()
    machine.extend(machine.stack[-1], [item])
    return position


@_handles(pickle.APPENDS)
def _appends(machine: Machine, position: int) -> int:
    items = machine.marked()
    machine.extend(machine.stack[-1], items)
    return position


@_handles(pickle.EMPTY_DICT)
def _op_empty_dict(machine: Machine, position: int) -> int:
    stack = machine.stack
    if machine.marks == _OUTERMOST and type(stack[-1]) is str:
        stack.append(machine.dicts.pop(stack[-1], {}))
    else:
        stack.append({})
    return position


@_handles(pickle.DICT)
def _dict(machine: Machine, position: int) -> int:
    items = machine.marked()
    machine.stack.append({})
    machine.set_items(machine.stack[-1], items[::2], items[1::2])
    return position


@_handles(pickle.SETITEM)
def _setitem(machine: Machine, position: int) -> int:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.set_items(machine.stack[-1], [key], [value])
    return position


@_handles(pickle.SETITEMS)
def _setitems(machine: Machine, position: int) -> int:
    stack, mark = machine.stack, machine.marks.pop()
    keys, values = stack[mark::2], stack[mark + 1 :: 2]
    del stack[mark:]
    machine.set_items(stack[-1], keys, values)
    return position


# --- names and objects


@_handles(pickle.GLOBAL)
def _global(machine: Machine, position: int) -> int:
    module_end = machine.line_end(position)
    name_end = machine.line_end(module_end + 1)
    module, name = machine.data[position:module_end], machine.data[module_end + 1 : name_end]
    machine.stack.append(machine.find(module.decode(), name.decode()))
    return name_end + 1


@_handles(pickle.STACK_GLOBAL)
def _stack_global(machine: Machine, position: int) -> int:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.find(module, name))
    return position


@_handles(pickle.NEWOBJ)
def _newobj(machine: Machine, position: int) -> int:
    args, cls = machine.stack.pop(), machine.stack.pop()
    if not isinstance(cls, type) or type(args) is not tuple:
        raise machine.error(f"makes an object of {brief(cls)}")
    machine.stack.append(cls.__new__(cls, *args))
    return position


@_handles(pickle.REDUCE)
def _reduce(machine: Machine, position: int) -> int:
    args, function = machine.stack.pop(), machine.stack.pop()
    if not callable(function) or type(args) is not tuple:
        raise machine.error(f"calls {brief(function)}")
    machine.stack.append(function(*args))
    return position


@_handles(pickle.BUILD)
def _build(machine: Machine, position: int) -> int:
    stack = machine.stack
    state = stack.pop()
    machine.set_state(stack[-1], state)
    shortcut = machine.shortcuts.get(type(stack[-1]))
    if shortcut is not None:
        shortcut.made(machine, position)
    return position


@_handles(pickle.BINPERSID)
def _binpersid(machine: Machine, position: int) -> int:
    if machine.persistent is None:
        raise machine.error("refers to outside data")
    machine.stack.append(machine.persistent(machine.stack.pop()))
    return position


# --- how the bytes are written


@_handles(pickle.PROTO)
def _proto(machine: Machine, position: int) -> int:
    if machine.data[position] > pickle.HIGHEST_PROTOCOL:
        raise machine.error(f"is of protocol {machine.data[position]}")
    return position + 1


@_handles(pickle.FRAME)
def _frame(machine: Machine, position: int) -> int:
    size = int.from_bytes(machine.take(position, 8), "little")
    if machine.base + position + 8 + size > machine.num_bytes:  # Python reads frames as a whole, and refuses such a one
        raise IndexError
    machine.last_frame = machine.base + position
    return position + 8


@_handles(pickle.POP)
def _pop(machine: Machine, position: int) -> int:
    machine.stack.pop()
    return position


# ------------------------------------------------------------------------------------------------
# Objects of a pickle that are written as one before them was: taken as that one, without being read again.
#
# Most tensors of a model share their dtype, shape and cut with others, and what describes them is the same bytes but
# for the name: an object's bytes fetch earlier entries of the memo by their numbers, and number none themselves.


_MAX_BYTES = 16 * 2**20  # kept
_MAX_SIZES = 8


class Repeats:
    """A `Shortcut` for objects that nobody changes, so that one can stand for many."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[object, int]] = {}
        """What stands between the class and the next opcode, to the object and its number of entries in the memo."""
        self._sizes: list[int] = []
        self._num_bytes = 0
        self._begun = (0, 0, 0)

    def take(self, machine: Machine, position: int) -> int | None:
        """Put an object that is known by its bytes on the stack."""
        data, number = machine.data, machine.num_memo
        for size in self._sizes:
            found = self._known.get(data[position : position + size])
            if found is not None and not machine.may_fetch(number, found[1]):
                machine.stack.append(found[0])
                machine.num_memo = number + found[1]
                return position + size
        self._begun = (machine.base + position, number, len(machine.stack))
        return None

    def made(self, machine: Machine, position: int) -> None:
        """Remember an object, if its bytes say all of it."""
        start, number, depth = self._begun
        self._begun = (-1, 0, 0)
        count = machine.num_memo - number
        if (
            not machine.base <= start
            or machine.last_frame >= start
            or len(machine.stack) != depth + 1
            or machine.may_fetch(number, count)
        ):
            return
        content = machine.data[start - machine.base : position]
        size = len(content)
        if self._num_bytes + size > _MAX_BYTES:
            self._known.clear()
            self._sizes.clear()
            self._num_bytes = 0
        if size not in self._sizes:
            self._sizes = [size, *self._sizes][:_MAX_SIZES]
        self._known[content] = (machine.stack[-1], count)
        self._num_bytes += size


# ------------------------------------------------------------------------------------------------
# Placeholders for objects that a pickle names and that are not needed here: nothing is imported, nothing is run.


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
                f"The pickle asks for {module}.{name}, which no training writes: it may be an attack. "
                f"Nothing of it was run."
            )
        return Inert


class DictWithState(dict[object, object], metaclass=Sealed):
    """``collections.OrderedDict``, as ``Module.state_dict()`` makes it: its attribute ``_metadata`` is dropped."""

    __slots__ = ()

    def __init__(self) -> None:
        """Begin empty: pickles fill it item by item, and pairs given here would escape the check of keys."""
        super().__init__()

    def __setstate__(self, _: object) -> None: ...


class Size(tuple[int, ...], metaclass=Sealed):
    """``torch.Size``: small non-negative integers, checked as they come in; equal ones are one object."""

    __slots__ = ()

    def __new__(cls, values: Iterable[Any] = ()) -> Size:  # noqa: PYI034 - Self is newer than Python 3.10
        """Check the sizes."""
        sizes = tuple(values)
        for size in sizes:
            if type(size) is not int or not 0 <= size < MAX_BYTES or len(sizes) > MAX_DIMS:
                raise pickle.UnpicklingError(f"a torch.Size of {brief(sizes)}")
        known = _known_sizes.get(sizes)
        if known is None:
            if len(_known_sizes) > 10_000:
                _known_sizes.clear()
            known = _known_sizes[sizes] = super().__new__(cls, sizes)
        return known


_known_sizes: dict[tuple[int, ...], Size] = {}
