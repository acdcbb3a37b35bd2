"""Descriptions of DCP: what is read is what torch reads, and very many tensors take little time and memory."""

from __future__ import annotations

import pickle
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from accelight.checkpoint import CheckpointError
from accelight.checkpoint.formats.dcp_metadata import DCPMetadata, read_dcp_metadata

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn]
SIZES = st.sampled_from([0, 1, 2, 148, 149, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**40])
KEYS = st.text(st.sampled_from("ab.\x94\u0414j\u00e9"), min_size=1, max_size=4) | st.just("long" * 70)
FILES = ["__0_0.distcp", "__1_0.distcp", "sub/\u00e9.distcp"]


def own(size: torch.Size) -> torch.Size:
    """Return an object of its own, as what comes from another process is."""
    return torch.Size(tuple(size))


def copied(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")


@st.composite
def descriptions(draw: st.DrawFn) -> Metadata:
    """Return what a save may describe: a few layouts, each of several tensors; entries share objects or do not."""
    layouts = []
    for _ in range(draw(st.integers(1, 4))):
        num_dims = draw(st.integers(0, 5))
        rows = draw(st.lists(SIZES, min_size=num_dims, max_size=num_dims))
        boxes = [(torch.Size([0] * num_dims), torch.Size(rows))]
        for place in range(1, draw(st.integers(1, 4)) if num_dims else 1):
            boxes.append((torch.Size([place * 1000 + one for one in rows]), torch.Size(rows)))
        layouts.append((draw(st.sampled_from(DTYPES)), torch.Size(rows), boxes))
    shares = draw(st.booleans())
    name_of = (lambda text: text) if shares else copied
    size_of = (lambda size: size) if shares else own
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[str, ...]] = {}
    for path in draw(st.lists(st.lists(KEYS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=12)):
        fqn = draw(st.sampled_from([".".join(path), ".".join(path), "odd-" + ".".join(path)]))
        if fqn in entries:
            continue
        paths[name_of(fqn)] = path
        if draw(st.integers(0, 7)) == 0:
            entries[fqn] = BytesStorageMetadata()
            storage[MetadataIndex(name_of(fqn))] = _StorageInfo(draw(st.sampled_from(FILES)), draw(SIZES), 100)
            continue
        dtype, shape, boxes = draw(st.sampled_from(layouts))
        chunks = [ChunkStorageMetadata(size_of(offsets), size_of(sizes)) for offsets, sizes in boxes]
        replicas = chunks[: draw(st.integers(0, 1))]
        properties = TensorProperties(dtype=dtype, requires_grad=draw(st.booleans()))
        entries[fqn] = TensorStorageMetadata(properties, size_of(shape), chunks + replicas)
        for place, (offsets, _) in enumerate(boxes):
            info = _StorageInfo(draw(st.sampled_from(FILES)), draw(SIZES), draw(SIZES))
            if draw(st.integers(0, 5)) == 0:
                info.transform_descriptors = ["zstd"]
            index = draw(st.sampled_from([place, None]))
            storage[MetadataIndex(name_of(fqn), size_of(offsets), index)] = info
    return Metadata(entries, draw(st.sampled_from([paths, None])), storage)


def check_as_torch_reads(found: DCPMetadata, path: Path) -> None:
    with path.open("rb") as stream:
        expected = pickle.load(stream)
    tensors = {fqn: one for fqn, one in expected.state_dict_metadata.items() if isinstance(one, TensorStorageMetadata)}
    assert list(found.tensors) == list(tensors)
    assert found.not_tensors == tuple(fqn for fqn in expected.state_dict_metadata if fqn not in tensors)
    assert dict(found.paths) == (expected.planner_data or {})
    for fqn, one in tensors.items():
        tensor = found.tensors[fqn]
        assert (tensor.fqn, f"torch.{tensor.dtype.name}", tensor.shape) == (fqn, str(one.properties.dtype), one.size)
        boxes = dict.fromkeys((chunk.offsets, chunk.sizes) for chunk in one.chunks)
        assert tensor.layout.boxes == tuple(boxes)
        for (offsets, _), record in zip(tensor.layout.boxes, tensor.records, strict=True):
            info = expected.storage_data[MetadataIndex(fqn, torch.Size(offsets))]
            assert (record.relative_path, record.offset, record.length) == (
                info.relative_path,
                info.offset,
                info.length,
            )
            assert record.transforms == tuple(info.transform_descriptors or ())
    places: dict[str, set[int]] = {}
    for info in expected.storage_data.values():
        places.setdefault(info.relative_path, set()).add(info.offset)
    assert {name: list(one) for name, one in found.offsets.items()} == {
        name: sorted(one) for name, one in places.items()
    }


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(descriptions(), st.sampled_from([2, 3, 4, 4, 4, 5]))
def test_any_description_is_read_as_torch_reads_it(tmp_path: Path, metadata: Metadata, protocol: int) -> None:
    """With objects shared or not, names and numbers of every width."""
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(metadata, protocol))
    check_as_torch_reads(read_dcp_metadata(path), path)


def many(num_tensors: int, num_chunks: int = 2) -> Metadata:
    """Return a description of a model of many layers, saved by several processes."""
    entries: dict[str, Any] = {}
    storage, paths = {}, {}
    files = [f"__{place}_0.distcp" for place in range(num_chunks)]
    for layer in range(num_tensors):
        fqn, rows = f"model.layers.{layer}.weight", (16, 1000)[layer % 2]
        chunks = [
            ChunkStorageMetadata(torch.Size([place * rows, 0]), torch.Size([rows, 8])) for place in range(num_chunks)
        ]
        size = torch.Size([rows * num_chunks, 8])
        entries[fqn] = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), size, chunks)
        paths[copied(fqn)] = ("model", copied(fqn.removeprefix("model.")))
        for place, chunk in enumerate(chunks):
            index = MetadataIndex(copied(fqn), own(chunk.offsets), place)
            storage[index] = _StorageInfo(files[place], layer * 2000, 2000)
    return Metadata(entries, paths, storage)


def test_many_tensors_take_memory_in_proportion(tmp_path: Path) -> None:
    """100,000 tensors in two pieces each may take 600 MiB while they are read."""
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(many(3000)))
    read_dcp_metadata(path)
    tracemalloc.start()
    metadata = read_dcp_metadata(path)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(metadata.tensors) == 3000
    assert len({tensor.layout for tensor in metadata.tensors.values()}) == 2
    assert kept < 2000 * 3000, kept
    assert peak < 6000 * 3000, peak


def test_fields_in_another_order(tmp_path: Path) -> None:
    """Records come before the tensors that they belong to."""
    metadata, path = many(50), tmp_path / ".metadata"
    vars(metadata).update({name: vars(metadata).pop(name) for name in ("planner_data", "state_dict_metadata")})
    assert next(iter(vars(metadata))) == "storage_data"
    path.write_bytes(pickle.dumps(metadata))
    check_as_torch_reads(read_dcp_metadata(path), path)


def test_a_memo_that_changes(tmp_path: Path) -> None:
    """What the same bytes meant before, they need not mean later: here the field's name becomes None."""
    content = pickle.dumps(many(500))
    item = list(re.finditer(rb"j.{4}\)\x81\x94\}\x94\(j(.{4})\x8c", content, re.DOTALL))[-1]
    path = tmp_path / ".metadata"
    path.write_bytes(content[: item.start()] + b"Nr" + item[1] + b"0" + content[item.start() :])
    with pytest.raises(CheckpointError, match=r"a storage index's name should be str, found NoneType"):
        read_dcp_metadata(path)


def test_two_entries_of_one_name(tmp_path: Path) -> None:
    content = pickle.dumps(many(5))
    path = tmp_path / ".metadata"
    path.write_bytes(content.replace(b"layers.3", b"layers.4"))
    with pytest.raises(CheckpointError, match=r"two entries are named 'model\.layers\.4\.weight'"):
        read_dcp_metadata(path)
