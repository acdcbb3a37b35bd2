"""Damages a checkpoint's file in many ways, and merges it each time; a program without torch, to run under limits.

``python -m tests.checkpoint.fuzz ROOT FILE EXAMPLES`` takes the checkpoint in ``ROOT/in``. Each example must end in
CheckpointError with nothing written, or in a result. A result that is not the undamaged one's is kept under
``ROOT/disputed`` together with the damaged file: whether the file now says so is for somebody with torch to tell. The
examples are the same in each run.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from accelight.checkpoint import CheckpointError, merge_fsdp_weights

MEMORY_BYTES, PROCESSOR_SECONDS = 2**30, 200
_MAX_ERROR = 500
_OPCODES = b"(.)012BCGIJKLMNPQRSTUVX]abcdeghijlopqrstu}" + bytes(range(0x80, 0x99))
_FRAGMENTS = (
    b"cos\nsystem\n",
    b"cbuiltins\neval\n",
    b"ctorch\nSize\n",
    b"ctorch\nFloatStorage\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ccollections\nOrderedDict\n",
    b")\x81}(",
    b"\x85R",
    b"}b",
    b"N\x86b",
    b"h\0h\0\x86\x94",
    b"j\1\0\0\0",
    b"X\x02\0\0\0..",
    b"X\x0b\0\0\0/etc/passwd",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"J\xff\xff\xff\xff",
    b"K\0",
)
_NUMBERS = (0, 1, 2, 16, 63, 64, 2**8 - 1, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)
# position and width of every field of a zip's headers
_LOCAL_FIELDS = ((0, 4), (4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2))
_CENTRAL_FIELDS = ((0, 4), (6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (42, 4))
_END_FIELDS = ((0, 4), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2))

WriteLocations = list[tuple[int, int]]


def zips_in(data: bytes) -> Iterator[tuple[int, zipfile.ZipFile]]:
    """Yield the zips that stand one after the other in a file, with their positions."""
    import io

    start = 0
    while (start := data.find(b"PK\3\4", start)) >= 0:
        end = data.find(b"PK\5\6", start)
        if end < 0:
            return
        yield start, zipfile.ZipFile(io.BytesIO(data[start : end + 22]))
        start = end + 22


def places_of(data: bytes) -> tuple[WriteLocations, WriteLocations]:
    """Return what may be damaged, as ranges: all but the tensors' own bytes; and the zips' fields."""
    ranges: WriteLocations = []
    fields: WriteLocations = []
    before = 0
    for zip_start, archive in zips_in(data):
        central = zip_start + archive.start_dir
        for member in archive.infolist():
            local = zip_start + member.header_offset
            if "/data" not in member.filename:
                central += 46 + len(member.filename) + len(member.extra) + len(member.comment)
                continue  # the version and such, which nobody reads
            fields += [(local + offset, width) for offset, width in _LOCAL_FIELDS]
            fields += [(central + offset, width) for offset, width in _CENTRAL_FIELDS]
            central += 46 + len(member.filename) + len(member.extra) + len(member.comment)
            if "/data/" in member.filename:
                names, extra = (int.from_bytes(data[local + at : local + at + 2], "little") for at in (26, 28))
                content = local + 30 + names + extra
                ranges.append((before, content))
                before = content + member.file_size
                fields += [(before + offset, 4) for offset in (0, 4, 8, 12)]  # the data descriptor
        fields += [(central + offset, width) for offset, width in _END_FIELDS]
    return [*ranges, (before, len(data))], fields


def damaged(draw: st.DrawFn, good: bytes, ranges: WriteLocations, fields: WriteLocations) -> bytes:
    """Return the file after one to three changes."""
    data = bytearray(good)
    kinds = ["byte", "opcode", "number", "fragment", "insert", "cut", "remove", "copy"] + ["field"] * 6 * bool(fields)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(kinds))
        start, stop = draw(st.sampled_from(ranges))
        at = draw(st.integers(start, stop - 1))
        if kind == "byte":
            data[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "opcode":
            data[at : at + 1] = bytes([draw(st.sampled_from(_OPCODES))])
        elif kind == "number":
            width = draw(st.sampled_from((1, 2, 4, 8)))
            data[at : at + width] = _number(draw, bytes(data[at : at + width]), width)
        elif kind == "field":
            at, width = draw(st.sampled_from(fields))
            data[at : at + width] = _number(draw, bytes(data[at : at + width]), width)
        elif kind == "fragment":
            fragment = draw(st.sampled_from(_FRAGMENTS))
            data[at : at + len(fragment)] = fragment
        elif kind == "insert":
            data[at:at] = draw(st.sampled_from(_FRAGMENTS))
        elif kind == "cut":
            del data[at:]
        elif kind == "remove":
            del data[at : at + draw(st.integers(1, 64))]
        else:
            source = draw(st.integers(0, len(good) - 1))
            part = good[source : source + draw(st.integers(1, 64))]
            data[at : at + len(part)] = part
    return bytes(data)


def _number(draw: st.DrawFn, old: bytes, width: int) -> bytes:
    value = int.from_bytes(old, "little")
    near = [value + step for step in (-64, -16, -8, -4, -1, 1, 4, 8, 16, 64)]
    return (draw(st.sampled_from([*near, *_NUMBERS])) % 256**width).to_bytes(width, "little")


def content_of(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of each tensor in a safetensors file."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    return {
        name: (one["dtype"], tuple(one["shape"]), data[begin + one["data_offsets"][0] : begin + one["data_offsets"][1]])
        for name, one in header.items()
    }


def check_message(message: str) -> None:
    """Check that an error is one line, of what a terminal can show, and not too long."""
    assert len(message) <= _MAX_ERROR, message[:200]
    assert message.isprintable(), ascii(message)


def main(root: Path, file: str, num_examples: int) -> None:
    """Run the examples; print how many ended how."""
    merge_fsdp_weights(root / "in", root / "out")
    right = content_of(root / "out/model.safetensors")
    shutil.rmtree(root / "out")
    path = root / "in" / file
    good = path.read_bytes()
    ranges, fields = places_of(good)
    (root / "disputed").mkdir()
    before = {one.relative_to(root) for one in root.rglob("*")}
    ends = {"refused": 0, "right": 0, "disputed": 0}

    @settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.composite(damaged)(good, ranges, fields))
    def one(data: bytes) -> None:
        path.write_bytes(data)
        try:
            merge_fsdp_weights(root / "in", root / "out", verify=True)  # damage may reach a tensor's bytes
        except CheckpointError as error:
            check_message(str(error))
            ends["refused"] += 1
        else:
            if content_of(root / "out/model.safetensors") == right:
                ends["right"] += 1
                shutil.rmtree(root / "out")
            else:
                ends["disputed"] += 1
                kept = root / "disputed" / str(ends["disputed"])
                (root / "out").rename(kept)
                (kept / "damaged").write_bytes(data)
        now = {one.relative_to(root) for one in root.rglob("*")}
        assert {one for one in now if one.parts[0] != "disputed"} | {Path("disputed")} == before, now ^ before

    try:
        one()
    finally:
        if path.read_bytes() != good:
            (root / "last").write_bytes(path.read_bytes())
            path.write_bytes(good)
    print(json.dumps(ends))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.fsync = lambda fd: None  # what a power cut would leave is not looked at here
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS))
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
