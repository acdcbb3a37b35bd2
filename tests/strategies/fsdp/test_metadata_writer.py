"""A description that is written piece by piece is the one that torch would have written."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from accelight.checkpoint.formats.dcp_metadata import StorageItems, read_dcp_metadata
from accelight.checkpoint.formats.safe_unpickler import Repeats
from accelight.strategies.fsdp.checkpoint import writer as dcp_writer
from accelight.strategies.fsdp.checkpoint.planner import pickle_metadata
from accelight.strategies.fsdp.checkpoint.writer import FolderWriter
from tests.checkpoint.shortcuts import count_shortcuts

NUMBERS = st.sampled_from([0, 1, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**40])
NAMES = st.text(st.sampled_from("ab.\x94\u0414j"), min_size=1, max_size=5) | st.just("long" * 70)


@st.composite
def saves(draw: st.DrawFn) -> tuple[Metadata, list[list[WriteResult]]]:
    """Return what a save plans, and what its ranks have written."""
    entries: dict[str, Any] = {}
    results: list[list[WriteResult]] = [[], [], []]
    for name in draw(st.lists(NAMES, unique=True, max_size=8)):
        index: MetadataIndex | None = None
        if draw(st.booleans()) and draw(st.booleans()):
            entries[name], index = BytesStorageMetadata(), MetadataIndex(name)
            indices = [index]
        else:
            num_dims = draw(st.integers(0, 5))
            sizes = torch.Size(draw(st.lists(NUMBERS, min_size=num_dims, max_size=num_dims)))
            places = draw(st.lists(st.integers(0, 300), unique=True, max_size=3)) if num_dims else [0]
            offsets = [torch.Size([place, *sizes[1:]] if num_dims else []) for place in places]
            properties = TensorProperties(dtype=torch.bfloat16, requires_grad=draw(st.booleans()))
            entries[name] = TensorStorageMetadata(
                properties, sizes, [ChunkStorageMetadata(one, sizes) for one in offsets]
            )
            indices = [MetadataIndex(name, one, draw(st.sampled_from([None, n]))) for n, one in enumerate(offsets)]
        for one in indices:
            rank = draw(st.integers(0, 2))
            info = _StorageInfo(
                f"__{rank}_0.distcp", draw(NUMBERS), draw(NUMBERS), draw(st.sampled_from([None, ["zstd"]]))
            )
            results[rank].append(WriteResult(one, 1, info))
    paths = draw(st.sampled_from([None, {name: ("model", 3, name) for name in entries}]))
    return Metadata(entries, paths), results


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(saves())
def test_any_description_is_read_as_it_was(save: tuple[Metadata, list[list[WriteResult]]]) -> None:
    metadata, results = save
    stream = io.BytesIO()
    pickle_metadata(stream, metadata, results)
    found = pickle.loads(stream.getvalue())
    storage = {one.index: one.storage_data for own in results for one in own}
    assert (found.state_dict_metadata, found.planner_data) == (metadata.state_dict_metadata, metadata.planner_data)
    assert list(found.state_dict_metadata) == list(metadata.state_dict_metadata)
    assert found.storage_data == storage
    assert [one.index for one in found.storage_data] == [one.index for one in storage]
    assert pickle._loads(stream.getvalue()) == found  # type: ignore[attr-defined]  # Python's, without C


def planned(num_tensors: int) -> tuple[Metadata, list[list[WriteResult]]]:
    entries: dict[str, Any] = {}
    results: list[list[WriteResult]] = [[], []]
    for layer in range(num_tensors):
        name, offsets = f"model.layers.{layer}.weight", [torch.Size((0, 0)), torch.Size((8, 0))]
        chunks = [ChunkStorageMetadata(one, torch.Size((8, 4))) for one in offsets]
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size((16, 4)), chunks)
        for rank, one in enumerate(offsets):
            info = _StorageInfo(f"__{rank}_0.distcp", 2000 * layer, 2000)
            results[rank].append(WriteResult(MetadataIndex(name, one, rank), 64, info))
    return Metadata(entries, {name: ("model", name[6:]) for name in entries}), results


@pytest.mark.parametrize("is_known", [True, False], ids=["piece by piece", "as torch does"])
def test_a_folders_description_is_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    """Also where torch's classes have become others."""
    if not is_known:
        monkeypatch.setattr(dcp_writer, "can_write", lambda metadata: False)
    (tmp_path / "torchs").mkdir()
    (tmp_path / "ours").mkdir()
    FileSystemWriter(tmp_path / "torchs").finish(*planned(30))
    writer = FolderWriter(tmp_path / "ours")
    writer.finish(*planned(30))
    theirs, ours = (pickle.loads((tmp_path / name / ".metadata").read_bytes()) for name in ("torchs", "ours"))
    assert ours.storage_meta.checkpoint_id == tmp_path / "ours"
    theirs.storage_meta = ours.storage_meta = None
    assert ours == theirs
    assert [one.name for one in (tmp_path / "ours").iterdir()] == [".metadata"]
    content = (tmp_path / "ours/.metadata").read_bytes()
    writer.digests[".metadata"].check(tmp_path / "ours/.metadata", content)


def test_it_is_read_as_quickly_as_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the shortcuts for what is alike."""
    taken = count_shortcuts(monkeypatch)
    FolderWriter(tmp_path).finish(*planned(500))
    assert len(read_dcp_metadata(tmp_path / ".metadata").tensors) == 500
    assert taken[Repeats] >= 499
    assert taken[StorageItems] >= 990
