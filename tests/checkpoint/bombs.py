"""Pickles of a few bytes that would take hours or gigabytes to read carelessly."""

from __future__ import annotations

import struct

from tests.checkpoint.hostile import METADATA, stack_global, text

LEVELS = 400  # 2**400 elements, if somebody walks through all of them


def shared_tuples(num_levels: int = LEVELS) -> bytes:
    """A tuple of twice a tuple of twice a tuple ...: few bytes, and no end for whoever hashes or prints it."""
    data = b")\x94"
    for level in range(num_levels):
        get = b"j" + struct.pack("<I", level)
        data += b"0" + get + get + b"\x86\x94"
    return data


def metadata(**fields: bytes) -> bytes:
    content = b"".join(text(name.encode()) + value for name, value in fields.items())
    return b"\x80\x04" + stack_global(METADATA, b"Metadata") + b")\x81}(" + content + b"ub."


def tensor_entry(properties: bytes = b"N", size: bytes = b"N") -> bytes:
    storage = stack_global(METADATA, b"TensorStorageMetadata") + b")\x81}("
    return storage + text(b"properties") + properties + text(b"size") + size + b"ub"


def entry(value: bytes) -> bytes:
    return b"}" + text(b"w") + value + b"s"


SIZE = stack_global(b"torch", b"Size")
DTYPE = stack_global(METADATA, b"TensorProperties") + b")\x81}" + text(b"dtype")
BOMBS = {
    "a key to hash": b"\x80\x04}" + shared_tuples() + b"Ns.",
    "a key in an ordered dict": b"\x80\x04" + stack_global(b"collections", b"OrderedDict") + b"]" + shared_tuples()
    + b"N\x86a\x85R.",
    "a size to print": metadata(state_dict_metadata=entry(tensor_entry(size=SIZE + shared_tuples() + b"\x85R"))),
    "a dtype to print": metadata(state_dict_metadata=entry(tensor_entry(DTYPE + shared_tuples() + b"sb"))),
    "a path to print": metadata(
        state_dict_metadata=b"}", storage_data=b"}", planner_data=entry(shared_tuples() + b"\x85")
    ),
    "a name to print": metadata(state_dict_metadata=b"}" + b"(" + shared_tuples() + b"Nu"),
    "a module to look up": b"\x80\x04" + shared_tuples() + text(b"x") + b"\x93.",
    "a long name": b"\x80\x04" + stack_global(b"a" * 10_000_000, b"x") + b".",
    "empty dicts": b"\x80\x04" + b"}" * 20_000_000 + b".",
    "empty lists": b"\x80\x04" + b"]" * 20_000_000 + b".",
    "tuples in tuples": b"\x80\x04)" + b"\x85" * 20_000_000 + b".",
    "equal hashes": b"\x80\x04}(" + b"".join(
        b"\x8a\x0a" + (n * (2**61 - 1)).to_bytes(10, "little") + b"N" for n in range(100_000)
    ) + b"u.",
}  # fmt: skip

REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n("
STORAGE = b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"0") + text(b"cpu") + b"K\x0ctQ"
RECORD_BOMBS = {
    "a storage's kind": b"\x80\x04(" + text(b"storage") + text(b"storage") + shared_tuples() + b"\x86" + text(b"0")
    + text(b"cpu") + b"K\x0ctQ.",
    "a storage's key": b"\x80\x04(" + text(b"storage") + b"ctorch\nFloatStorage\n" + shared_tuples() + text(b"cpu")
    + b"K\x0ctQ.",
    "a shape": b"\x80\x04" + REBUILD + STORAGE + b"K\0" + shared_tuples() + b")N)tR.",
    "a shape of many sizes": b"\x80\x04" + REBUILD + STORAGE + b"K\0(" + b"\x8a\x08" * 0
    + b"J\xff\xff\xff\x7f" * 6000 + b"t)N)tR.",
    "a lazy bit": b"\x80\x04" + REBUILD + STORAGE + b"K\0))N)" + shared_tuples() + b"tR.",
}  # fmt: skip
