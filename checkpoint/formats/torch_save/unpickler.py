"""Pickles from strangers: a machine of our own, with few opcodes, that builds nothing but what a table lists. No torch.

`pickle.Unpickler` is not used. It would import, call and set attributes where told otherwise, hash whatever stands as a
key (a tuple of a tuple of itself takes for ever), and remember every object until its end. Here an opcode that
``torch.save`` and DCP do not write is an error, a name means what the table says and nothing else, keys of dicts are
simple, and only what the pickle asks for again is remembered: half the memory, for half as much time again.

Source: CPython 3.11 ``pickletools.py``, the description of each opcode.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ...errors import CheckpointError

Allowed = Mapping[tuple[str, str], object]
"""What each (module, name) becomes: a class, a callable, or a plain value. The pickle can make objects of the class and
set their state, and call the callable; it can set nothing on either, and reach nothing else."""

_SMALL_MEMO = 256  # these indices are fetched by one byte, and always remembered
# Two sequences that make up half of a description, taken as one where nothing of them is fetched again: an object that
# gets a dict as its state (EMPTY_TUPLE NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK), and a call with a tuple of up to three
# small numbers, which is a torch.Size (BININT1 ... TUPLE MEMOIZE TUPLE1 MEMOIZE REDUCE MEMOIZE).
_NEW_OBJECT = b")\x81\x94}\x94("
_CALL = re.compile(rb"((?:K.){1,3})([\x85-\x87])\x94\x85\x94R\x94", re.DOTALL)
_BLOCK = 2**20
_MAX_ODD_KEYS = 10_000
_DENSE_BYTES = 64 * 1024
_DENSE = 6  # a description of tensors has a container to about 25 bytes
_FLOAT = struct.Struct(">d")
_INT = struct.Struct("<i")


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
    if len(data) > _DENSE_BYTES and sum(map(data.count, (b"}", b"]", b"\x81", b"\x85", b"\x86", b"\x87"))) > (
        len(data) // _DENSE
    ):
        raise CheckpointError(f"{what}: a pickle of {len(data)} bytes that are containers more than content.")
    machine = _Machine(data, allowed, what, persistent)
    try:
        return machine.run()
    except CheckpointError:
        raise
    except (RecursionError, MemoryError) as error:
        raise CheckpointError(f"{what}: the pickle is too deep or too large ({type(error).__name__}).") from None
    except IndexError:
        raise CheckpointError(f"{what}: the pickle is cut off after {len(data)} bytes, or damaged.") from None
    except Exception as error:  # what the table's classes and functions say to values that fit nothing
        raise CheckpointError(f"{what}: not a readable pickle ({type(error).__name__}: {str(error)[:300]}).") from error


def brief(value: object) -> str:
    """Return a value from a pickle for an error: never the content of containers, which may be without end."""
    if value is None or isinstance(value, bool | float | str) or (isinstance(value, int) and abs(value) < 2**128):
        text = repr(value)
        return text if len(text) <= 200 else f"{text[:200]}..."
    if type(value) is tuple or type(value) is list:
        shown = [brief(one) if not isinstance(one, tuple | list) else type(one).__name__ for one in value[:8]]
        text = f"{', '.join(shown)}{', ...' if len(value) > 8 else ''}"
        return f"[{text}]" if type(value) is list else f"({text})"
    return type(value).__name__


def _fetched_again(data: bytes) -> set[int]:
    """Return the memo's indices that a pickle may fetch: of every byte that could be LONG_BINGET, and some more."""
    found: set[bytes] = set()
    for start in range(0, len(data), _BLOCK):
        block = data[start : start + _BLOCK + 4]  # the four bytes of the last one are in the next block
        parts = block.split(b"j")
        found.update([part[:4] for part in parts[1:]])
        short = [number for number, part in enumerate(parts) if len(part) < 4]  # an operand with that byte in it
        found.update([b"j".join(parts[number : number + 5])[:4] for number in short])
    return {int.from_bytes(one, "little") for one in found} | set(range(_SMALL_MEMO))


class _Machine:
    """One pickle on its way."""

    def __init__(self, data: bytes, allowed: Allowed, what: str, persistent: Callable[[object], object] | None):
        self._data = data
        self._allowed = allowed
        self._what = what
        self._persistent = persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._num_odd_keys = 0

    def run(self) -> object:
        data, end = self._data, len(self._data)
        stack, marks = self._stack, self._marks
        push = stack.append
        wanted = _fetched_again(data)
        memo: dict[int, Any] = {}
        num_memo = position = 0
        while True:
            code = data[position]
            position += 1
            if code == 0x94:  # MEMOIZE
                if num_memo in wanted:
                    memo[num_memo] = stack[-1]
                num_memo += 1
            elif code == 0x68 or code == 0x6A:  # BINGET, LONG_BINGET
                width = 1 if code == 0x68 else 4
                index = data[position] if code == 0x68 else int.from_bytes(data[position : position + 4], "little")
                if index not in memo:
                    raise self._error(f"asks for entry {index} of its memo, which is empty")
                found = memo[index]
                position += width
                following = data[position]
                if following == 0x29 and (
                    data.startswith(_NEW_OBJECT, position)
                    and num_memo not in wanted
                    and num_memo + 1 not in wanted
                    and isinstance(found, type)
                ):
                    push(self._new(found, ()))
                    push({})
                    marks.append(len(stack))
                    position += len(_NEW_OBJECT)
                    num_memo += 2
                elif following == 0x4B and (call := _CALL.match(data, position)) and callable(found):
                    if not wanted.isdisjoint((num_memo, num_memo + 1, num_memo + 2)) or (
                        len(call[1]) // 2 != call[2][0] - 0x84
                    ):
                        push(found)
                        continue
                    push(found(tuple(call[1][1::2])))
                    position = call.end()
                    num_memo += 3
                else:
                    push(found)
            elif code == 0x4B:  # BININT1
                push(data[position])
                position += 1
            elif code == 0x28:  # MARK
                marks.append(len(stack))
            elif code == 0x29:  # EMPTY_TUPLE
                push(())
            elif code == 0x81:  # NEWOBJ
                args, cls = stack.pop(), stack.pop()
                if not isinstance(cls, type) or type(args) is not tuple:
                    raise self._error(f"makes an object of {brief(cls)}")
                push(self._new(cls, args))
            elif code == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif code == 0x52:  # REDUCE
                args, function = stack.pop(), stack.pop()
                if not callable(function) or type(args) is not tuple:
                    raise self._error(f"calls {brief(function)}")
                push(function(*args))
            elif code == 0x62:  # BUILD
                state = stack.pop()
                self._set_state(stack[-1], state)
            elif code == 0x86:  # TUPLE2
                second = stack.pop()
                stack[-1] = (stack[-1], second)
            elif code == 0x8C:  # SHORT_BINUNICODE
                size = data[position]
                push(str(self._take(position + 1, size), "utf-8", "surrogatepass"))
                position += 1 + size
            elif code == 0x7D:  # EMPTY_DICT
                push({})
            elif code == 0x75:  # SETITEMS
                mark = marks.pop()
                keys, values = stack[mark::2], stack[mark + 1 :: 2]
                del stack[mark:]
                self._set_items(stack[-1], keys, values)
            elif code == 0x5D:  # EMPTY_LIST
                push([])
            elif code == 0x61:  # APPEND
                item = stack.pop()
                if type(stack[-1]) is list:
                    stack[-1].append(item)
                else:
                    self._extend(stack[-1], [item])
            elif code == 0x74:  # TUPLE
                push(tuple(self._marked()))
            elif code == 0x4D:  # BININT2
                push(int.from_bytes(self._take(position, 2), "little"))
                position += 2
            elif code == 0x4A:  # BININT
                push(_INT.unpack(self._take(position, 4))[0])
                position += 4
            elif code == 0x89 or code == 0x88:  # NEWFALSE, NEWTRUE
                push(code == 0x88)
            elif code == 0x4E:  # NONE
                push(None)
            elif code == 0x95:  # FRAME: how the bytes were written, nothing more
                position += 8
            elif code in b"qr":  # BINPUT, LONG_BINPUT
                width = 1 if code == 0x71 else 4
                index = int.from_bytes(self._take(position, width), "little")
                if index in wanted:
                    memo[index] = stack[-1]
                num_memo += 1
                position += width
            elif code == 0x8A:  # LONG1
                size = data[position]
                push(int.from_bytes(self._take(position + 1, size), "little", signed=True))
                position += 1 + size
            elif code in b"X\x8d":  # BINUNICODE, BINUNICODE8
                width = 4 if code == 0x58 else 8
                size = int.from_bytes(self._take(position, width), "little")
                push(str(self._take(position + width, size), "utf-8", "surrogatepass"))
                position += width + size
            elif code == 0x63:  # GLOBAL
                module_end = self._line_end(position)
                name_end = self._line_end(module_end + 1)
                push(self._find(data[position:module_end].decode(), data[module_end + 1 : name_end].decode()))
                position = name_end + 1
            elif code == 0x93:  # STACK_GLOBAL
                name, module = stack.pop(), stack.pop()
                push(self._find(module, name))
            elif code == 0x51:  # BINPERSID
                if self._persistent is None:
                    raise self._error("refers to outside data")
                push(self._persistent(stack.pop()))
            elif code == 0x87:  # TUPLE3
                stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
            elif code == 0x65:  # APPENDS
                items = self._marked()
                self._extend(stack[-1], items)
            elif code == 0x73:  # SETITEM
                value, key = stack.pop(), stack.pop()
                self._set_items(stack[-1], [key], [value])
            elif code == 0x6C:  # LIST
                push(self._marked())
            elif code == 0x64:  # DICT
                items = self._marked()
                push({})
                self._set_items(stack[-1], items[::2], items[1::2])
            elif code == 0x47:  # BINFLOAT
                push(_FLOAT.unpack(self._take(position, 8))[0])
                position += 8
            elif code == 0x80:  # PROTO
                position += 1
            elif code == 0x30:  # POP
                stack.pop()
            elif code == 0x2E:  # STOP
                return stack.pop()
            else:
                raise CheckpointError(
                    f"{self._what}: pickle opcode {bytes([code])!r} at byte {position - 1} is not known."
                )
            if position > end:
                raise IndexError

    def _new(self, cls: Any, args: tuple[Any, ...]) -> object:
        return cls.__new__(cls, *args)

    def _take(self, position: int, size: int) -> bytes:
        taken = self._data[position : position + size]
        if len(taken) != size:
            raise IndexError
        return taken

    def _line_end(self, position: int) -> int:
        newline = self._data.find(b"\n", position)
        if newline < 0:
            raise IndexError
        return newline

    def _marked(self) -> list[Any]:
        """Take what was put on the stack since the last mark."""
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _set_state(self, target: Any, state: Any) -> None:
        if hasattr(type(target), "__setstate__"):
            target.__setstate__(state)
        elif isinstance(target, type) or callable(target) or not hasattr(target, "__dict__") or type(state) is not dict:
            raise self._error(f"sets the state of {brief(target)}")
        else:
            vars(target).update(state)

    def _set_items(self, target: Any, keys: list[Any], values: list[Any]) -> None:
        if len(keys) != len(values):
            raise self._error("has a key without a value")
        if isinstance(target, dict):
            for key in keys:
                if type(key) is not str:
                    self._check_key(key)
            target.update(zip(keys, values, strict=True))
        elif isinstance(type(target), Sealed):
            for key, value in zip(keys, values, strict=True):
                target[key] = value
        else:
            raise self._error(f"sets items of {brief(target)}")

    def _check_key(self, key: object) -> None:
        """Refuse what takes long to hash, and more than a few keys whose hashes could all be made equal."""
        parts = vars(key).values() if hasattr(key, "__dict__") else (key,)  # a frozen dataclass hashes its fields
        if any(isinstance(one, tuple) and any(isinstance(inner, tuple) for inner in one) for one in parts):
            raise self._error("has a nested tuple as a key")
        if isinstance(key, tuple | float) or (isinstance(key, int) and abs(key) >= 2**31):
            self._num_odd_keys += 1
            if self._num_odd_keys > _MAX_ODD_KEYS:
                raise self._error(f"has more than {_MAX_ODD_KEYS} keys that are no names")

    def _extend(self, target: Any, items: list[Any]) -> None:
        if type(target) is not list and not isinstance(type(target), Sealed):
            raise self._error(f"appends to {brief(target)}")
        target.extend(items)

    def _find(self, module: object, name: object) -> object:
        if type(module) is not str or type(name) is not str:
            raise self._error("asks for something without a name")
        try:
            return self._allowed[module, name]
        except KeyError:
            shown = f"{module}.{name}"[:200]
            raise CheckpointError(
                f"{self._what}: the pickle asks for {shown}, which is not on the list of what a checkpoint "
                f"may hold. Nothing of it was run."
            ) from None

    def _error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._what}: the pickle {reason}, which it may not.")


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
