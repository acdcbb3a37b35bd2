"""Items of a DCP description's largest dict, which says where each chunk lies: each is read at once.

They are all written alike: a ``MetadataIndex`` (name, place in the list of chunks, offset) and a ``_StorageInfo``
(file, offset, length), whose classes and fields are fetched from the memo. Once the numbers of these entries are known,
an item is a few fixed bytes with a name, an offset, a file and three numbers between them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

from ..torch_save.pickle_machine import Machine
from ..torch_save.pickled_objects import Size

_BEGIN = b")\x81\x94}\x94("  # EMPTY_TUPLE NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK
_GET = rb"(?:h.|j.{4})"
_NUMBER = rb"(?:K.|M..|J.{4}|\x8a\x05.{5}|\x8a\x06.{6})"
_SIZES = rb"((?:" + _NUMBER + rb"){1,3}[\x85-\x87])\x94\x85\x94R\x94"
_ONE_NUMBER = re.compile(_NUMBER, re.DOTALL)
_ONE_GET = re.compile(_GET, re.DOTALL)
_INT = struct.Struct("<i")
_SHORT_TEXT, _MEMOIZE = 0x8C, b"\x94"
_NOTHING = rb"(?!)"
_MAX_KNOWN = 10_000
_MAX_TRIES = 100


class StorageItems:
    """A `Shortcut` for items of ``storage_data``.

    Args:
        info: What stands for ``_StorageInfo``.
        make: Makes an index and its storage of name, offset, file, place and length.
    """

    def __init__(self, info: type, make: Callable[[Any, Any, Any, int, int], tuple[object, object]]):
        self._info = info
        self._make = make
        self._begin = b"-"
        """What stands before a name."""
        self._end = re.compile(_NOTHING)
        """Matches what stands behind it."""
        self._num_tries = 0
        self._offsets: dict[bytes, Size] = {}

    def take(self, machine: Machine, position: int) -> int | None:
        """Put an index and its storage on the stack."""
        data, memo = machine.data, machine.memo
        if not data.startswith(self._begin, position) and not self._learn(machine, position):
            return None
        start = position + len(self._begin)
        stop, name = _text(data, start)
        found = self._end.match(data, stop)
        if found is None and self._learn(machine, position):
            found = self._end.match(data, stop)
        if found is None:
            return None
        sizes, fetched, path, place, length = found.groups()
        number, count = machine.num_memo, 4 + (name is not None) + 3 * (fetched is None)
        if machine.may_fetch(number, count):
            return None
        offset = self._offset(sizes) if fetched is None else memo[_operand(fetched)]
        if offset is None:
            return None
        fqn = str(name, "utf-8", "surrogatepass") if name is not None else memo[_operand(data[start:stop])]
        machine.stack += self._make(fqn, offset, memo[_operand(path)], _number(place), _number(length))
        machine.num_memo = number + count
        return found.end()

    def made(self, machine: Machine, position: int) -> None:
        """Do nothing: what is learnt is learnt in `take`."""

    def _offset(self, sizes: bytes) -> Size | None:
        """Return the ``torch.Size`` of some numbers and the opcode that makes a tuple of so many of them."""
        offset = self._offsets.get(sizes)
        if offset is None:
            numbers = [_number(one) for one in _ONE_NUMBER.findall(sizes[:-1])]
            if len(numbers) != sizes[-1] - 0x84:
                return None
            if len(self._offsets) > _MAX_KNOWN:
                self._offsets.clear()
            offset = self._offsets[sizes] = Size(numbers)
        return offset

    def _learn(self, machine: Machine, position: int) -> bool:
        """Find out by which numbers an item's class and fields are fetched, from one that fetches all of them."""
        if self._num_tries >= _MAX_TRIES:
            return False
        self._num_tries += 1
        data, memo = machine.data, machine.memo
        begin = _ONE_GET.match(data, position + len(_BEGIN))
        if not data.startswith(_BEGIN, position) or begin is None:
            return False
        stop, _ = _text(data, begin.end())
        end = _LEARN.match(data, stop)
        if end is None:
            return False
        fields = {**end.groupdict(), "fqn": begin[0]}
        expected = {**_FIELDS, "info": self._info}
        if any(one is not None and memo.get(_operand(one)) != expected[name] for name, one in fields.items()):
            return False
        self._begin = _BEGIN + begin[0]
        self._end = _end({name: _NOTHING if one is None else re.escape(one) for name, one in fields.items()})
        return True


def _end(gets: dict[str, bytes]) -> re.Pattern[bytes]:
    """Return what matches an item behind its name; ``gets`` match what is the same in all items."""
    offset = rb"(?:" + gets["size"] + _SIZES + rb"|(" + _GET + rb"))"
    index = gets["index"] + rb"(?:" + _NUMBER + rb"|N)" + gets["offset"] + offset + rb"ub"
    info = gets["path"] + rb"(" + _GET + rb")" + gets["place"] + rb"(" + _NUMBER + rb")"
    return re.compile(
        index + gets["info"] + re.escape(_BEGIN) + info + gets["length"] + rb"(" + _NUMBER + rb")ub", re.DOTALL
    )


_FIELDS: dict[str, object] = {
    "fqn": "fqn",
    "index": "index",
    "offset": "offset",
    "size": Size,
    "path": "relative_path",
    "place": "offset",
    "length": "length",
}
_LEARN = _end({name: b"(?P<" + name.encode() + b">" + _GET + b")" for name in (*_FIELDS, "info") if name != "fqn"})


def _text(data: bytes, position: int) -> tuple[int, bytes | None]:
    """Return where a short text ends, and it; where what fetches one ends, and None; or where nothing can follow."""
    code = data[position]
    if code == _SHORT_TEXT:
        stop = position + 2 + data[position + 1]
        return (stop + 1, data[position + 2 : stop]) if data[stop : stop + 1] == _MEMOIZE else (len(data), None)
    return position + {0x68: 2, 0x6A: 5}.get(code, len(data)), None


def _operand(get: bytes) -> int:
    """Return the memo's number that is fetched; one that there is not for what fetches nothing."""
    if get[0] == 0x68:
        return get[1]
    return int.from_bytes(get[1:], "little") if get[0] == 0x6A else -1


def _number(data: bytes) -> int:
    """Return the number that an opcode puts on the stack."""
    code = data[0]
    if code == 0x4B:
        return data[1]
    if code == 0x4D:
        return data[1] | data[2] << 8
    if code == 0x4A:
        return int(_INT.unpack(data[1:])[0])
    return int.from_bytes(data[2:], "little", signed=True)
