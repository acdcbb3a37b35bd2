"""Which entries of its memo a pickle may fetch: only these need be remembered while it is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from ...errors import CheckpointError

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
