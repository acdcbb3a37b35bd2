"""A folder's description as torch's planners ask for it: the same as torch reads, made when it is asked for."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from accelight.checkpoint import CheckpointError
from accelight.strategies.fsdp.checkpoint.loader import SafeReader


def save(folder: Path, dtype: torch.dtype = torch.bfloat16, file: str = "__0_0.distcp") -> None:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {"model.step": BytesStorageMetadata()}
    storage = {MetadataIndex("model.step"): _StorageInfo(file, 7, 100)}
    for layer in range(20):
        name, rows = f"model.{layer}.weight", 3 + layer % 2
        boxes = [(torch.Size((place * rows, 0)), torch.Size((rows, 5))) for place in range(4)]
        chunks = [ChunkStorageMetadata(*box) for box in boxes]
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size((4 * rows, 5)), chunks)
        for place, (offsets, _) in enumerate(boxes):
            storage[MetadataIndex(name, offsets, place)] = _StorageInfo(file, 1000 * layer + 200 * place, 150)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, None, storage)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.quint8], ids=["table", "torch's objects"])
def test_the_same_as_torch_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also where a dtype is none that a merge can write."""
    save(tmp_path, dtype)
    found, expected = SafeReader(tmp_path).read_metadata(), FileSystemReader(tmp_path).read_metadata()
    assert set(found.state_dict_metadata) == set(expected.state_dict_metadata)
    for name, entry in expected.state_dict_metadata.items():
        mine = found.state_dict_metadata[name]
        assert name in found.state_dict_metadata
        assert isinstance(mine, type(entry))
        if isinstance(entry, TensorStorageMetadata) and isinstance(mine, TensorStorageMetadata):
            assert (mine.size, mine.properties.dtype) == (entry.size, dtype)
            assert [(one.offsets, one.sizes) for one in mine.chunks] == [
                (one.offsets, one.sizes) for one in entry.chunks
            ]
    assert len(found.storage_data) == len(expected.storage_data) == 81
    assert set(found.storage_data) == set(expected.storage_data)
    for index, info in expected.storage_data.items():
        mine = found.storage_data[index]
        assert (mine.relative_path, mine.offset, mine.length) == (info.relative_path, info.offset, info.length)


def test_unknown_names_are_key_errors(tmp_path: Path) -> None:
    save(tmp_path)
    found = SafeReader(tmp_path).read_metadata()
    assert "model.20.weight" not in found.state_dict_metadata
    with pytest.raises(KeyError):
        found.state_dict_metadata["model.20.weight"]
    with pytest.raises(KeyError):
        found.storage_data[MetadataIndex("model.0.weight", torch.Size((1, 1)))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.quint8], ids=["table", "torch's objects"])
def test_files_outside_the_folder(tmp_path: Path, dtype: torch.dtype) -> None:
    save(tmp_path, dtype, file="../__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"points to '\.\./__0_0\.distcp', outside its folder"):
        SafeReader(tmp_path).read_metadata()
