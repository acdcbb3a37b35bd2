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


def chain(link: bytes, num_links: int) -> bytes:
    """Things in one another, each of which refers to the one before it as entry 1 of the memo."""
    return b"\x80\x04Nq\x01" + text(b"sizes") + b"q\x02" + (b"0" + link + b"q\x01") * num_links + b"."


def equal_hashes(num_keys: int) -> bytes:
    """Keys of a dict: pairs of numbers whose hashes are all the same."""
    pairs: list[bytes] = []
    first, mask = 0, 2**64 - 1
    prime_1, prime_2, prime_5 = 11400714785074694791, 14029467366897019727, 2870177450012600261
    inverse = pow(prime_2, -1, 2**64)
    while len(pairs) < num_keys:  # as `tuplehash` in CPython's Objects/tupleobject.c computes it
        first += 1
        lane = (prime_5 + first * prime_2) & mask
        lane = (lane << 31 | lane >> 33) * prime_1 & mask
        second = (12345 - lane) * inverse & mask
        if second < 2**61 - 1:
            pairs.append(b"\x8a\x08%b\x8a\x08%b\x86N" % (first.to_bytes(8, "little"), second.to_bytes(8, "little")))
    return b"".join(pairs)


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
    "pairs with equal hashes": b"\x80\x04}(" + equal_hashes(20_000) + b"u.",
    "a long key again and again": b"\x80\x04(" + b"N" * 2_000_000 + b"tq\x010" + b"}h\x01Ns" * 100_000 + b".",
    "an entry of the memo": b"\x80\x04" + text(b"a" * 1_000_000) + b"r\xff\xff\xff\x0f.",
    "an element of a set": b"\x80\x04\x8f(" + shared_tuples() + b"\x90.",
    "a frozen set": b"\x80\x04(" + shared_tuples() + b"\x91.",
    "a key from the stack": b"\x80\x04(" + shared_tuples() + b"Nd.",
    "a key of a key": b"\x80\x04}}" + shared_tuples() + b"NsNs.",
    "a text of the size of memory": b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"a.",
    "bytes of the size of memory": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"a.",
    "a frame of the size of memory": b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"N.",
    "lists in lists": chain(b"]h\x01a", 500_000),
    "dicts in dicts": chain(b"}h\x02h\x01s", 500_000),
    "objects in objects": chain(stack_global(METADATA, b"ChunkStorageMetadata") + b")\x81}h\x02h\x01sb", 200_000),
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
