"""Checkpoints that are cut in a costly way: time and memory stay in proportion to the bytes, or the limit is named."""

from __future__ import annotations

import io
import pickle
import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from accelight.checkpoint import CheckpointError, merge_fsdp_weights
from accelight.checkpoint.files import FilePool, read_at
from accelight.checkpoint.formats.base import DTYPES, Piece, SourceTensor, check_coverage
from accelight.checkpoint.writing.copy import TensorReader
from tests.checkpoint import damage

LIMITED = """
import resource, sys
from accelight.checkpoint import merge_fsdp_weights
resource.setrlimit(resource.RLIMIT_AS, (400 * 2**20,) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
merge_fsdp_weights(sys.argv[1], sys.argv[2])
"""


def save_chunks(folder: Path, shape: Sequence[int], chunks: Sequence[tuple[tuple[int, ...], torch.Tensor]]) -> Path:
    """Write a tensor ``model.a`` in chunks, as DCP does it."""
    folder.mkdir()
    places, described = {}, []
    with (folder / "__0_0.distcp").open("wb") as stream:
        for offsets, values in chunks:
            record = io.BytesIO()
            torch.save(values, record)
            info = _StorageInfo("__0_0.distcp", stream.tell(), len(record.getvalue()))
            places[MetadataIndex("model.a", torch.Size(offsets))] = info
            described.append(ChunkStorageMetadata(torch.Size(offsets), values.shape))
            stream.write(record.getvalue())
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), described)
    metadata = Metadata(state_dict_metadata={"model.a": entry}, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def merge_within_limits(folder: Path, output: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(folder), str(output)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, (result.returncode, result.stderr[-2000:])


def test_many_columns_merge_in_proportion_to_their_bytes(tmp_path: Path) -> None:
    full = torch.arange(4 * 8_000.0).reshape(4, 8_000)
    columns = [((0, column), full[:, column : column + 1].clone()) for column in range(8_000)]
    folder = save_chunks(tmp_path / "in", full.shape, columns)
    merge_within_limits(folder, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes().endswith(full.numpy().tobytes())


def test_a_million_short_segments(tmp_path: Path) -> None:
    full = torch.arange(1_000_000 * 4.0).reshape(1_000_000, 2, 2)
    parts = [
        ((0, row, column), full[:, row : row + 1, column : column + 1].clone()) for row in (0, 1) for column in (0, 1)
    ]
    folder = save_chunks(tmp_path / "in", full.shape, parts)
    merge_within_limits(folder, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes().endswith(full.numpy().tobytes())


def test_a_tensor_that_is_mostly_strides(tmp_path: Path) -> None:
    folder = save_chunks(tmp_path / "in", (20_000, 20_000), [((0, 0), torch.ones(1).expand(20_000, 20_000))])
    with pytest.raises(
        CheckpointError, match=r"strides \[0, 0\] make 1600000000 bytes of 4 stored ones; tensors that expand"
    ):
        merge_fsdp_weights(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    small = save_chunks(tmp_path / "small", (300, 20), [((0, 0), torch.ones(20).expand(300, 20))])
    merge_fsdp_weights(small, tmp_path / "out", verify=True)


def test_one_file_under_many_names(tmp_path: Path) -> None:
    folder = damage.good(tmp_path / "in")
    for name in ("./__0_0.distcp", "__0_0.distcp/", "a//b", "a/./b"):

        def change(metadata: Any, name: str = name) -> None:
            damage.storage_of(metadata, "model.a").relative_path = name

        damage.edit_metadata(folder, change)
        with pytest.raises(CheckpointError, match="which is not a plain path"):
            merge_fsdp_weights(folder, tmp_path / "out")


@pytest.mark.parametrize("change", ["overlap", "far overlap", "gap"])
def test_many_chunks_that_do_not_fit(change: str) -> None:
    """One of a thousand columns lies where another is, or is not there."""
    places = list(range(1000))
    places[500] = {"overlap": 499, "far overlap": 3, "gap": 500}[change]
    if change == "gap":
        del places[700]
    pieces = [Piece(Path("x"), 0, (0, place), (5, 1)) for place in places]
    words = "part of it is missing" if change == "gap" else r"has overlapping chunks: \[0, \d+\] of size \[5, 1\]"
    with pytest.raises(CheckpointError, match=words):
        check_coverage("a", (5, 1000), pieces)


def test_more_chunks_than_are_compared(tmp_path: Path) -> None:
    places = [(row, 2 * column) for row in range(2) for column in range(5000)]
    pieces = [Piece(Path("x"), 0, place, (1, 2)) for place in places]
    check_coverage("a", (2, 10_000), pieces)
    with pytest.raises(CheckpointError, match="overlap"):
        check_coverage("a", (2, 10_000), [*pieces[:-1], pieces[0]])


def _boxes(shape: tuple[int, ...], chance: random.Random) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut each dimension into one to three ranges."""
    ranges = []
    for size in shape:
        ends = sorted(chance.sample(range(1, size), min(size - 1, chance.randint(0, 2))))
        ranges.append(list(zip([0, *ends], [*ends, size], strict=True)))
    return [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in product(*ranges)]


def test_tensors_cut_at_random(tmp_path: Path) -> None:
    """The same in each run: what is put together is the tensor, whatever the buffer's size."""
    chance = random.Random(0)
    for number in range(400):
        shape = tuple(chance.randint(1, chance.choice([2, 3, 9, 20])) for _ in range(chance.randint(0, 4)))
        dtype = DTYPES[chance.choice(["float32", "uint8", "int64", "complex128", "int16"])]
        full = torch.frombuffer(bytearray(chance.randbytes(prod(shape) * dtype.itemsize)), dtype=torch.uint8)
        full = full.view(*shape, dtype.itemsize)
        path, pieces = tmp_path / f"{number}", []
        with path.open("wb") as stream:
            for offsets, sizes in _boxes(shape, chance):
                part = full[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
                pieces.append(Piece(path, stream.tell(), offsets, sizes))
                stream.write(part.contiguous().numpy().tobytes())
        check_coverage("a", shape, pieces)
        files, found = FilePool(), bytearray(full.numel())
        reader = TensorReader(SourceTensor("a", dtype, shape, tuple(pieces)), files)
        for start, block in reader.blocks(memoryview(bytearray(chance.choice([16, 64, 1000, 4096])))):
            found[start : start + len(block)] = block
        assert found == full.numpy().tobytes(), (shape, dtype, pieces)
        for run in reader.runs() or ():
            data = read_at(files.fd(run.path), run.num_bytes, run.source)
            assert found[run.target : run.target + run.num_bytes] == data
        files.close()
