"""Each rank plans its own part: together they are the whole, each piece once, as torch's planning has it."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from accelight.strategies.fsdp.checkpoint.planner import (
    LocalSavePlanner,
    PlanMessage,
    SavePlanCache,
    WriteLocations,
    merge_plans,
)
from accelight.strategies.fsdp.checkpoint.writer import FolderWriter
from tests.ranks import run_on_ranks

Box = tuple[tuple[int, ...], tuple[int, ...]]


def _state() -> dict[str, Any]:
    """Return a state of every kind: on four ranks with two copies of what is sharded by halves."""
    size = dist.get_world_size()
    flat = init_device_mesh("cpu", (size,))
    both = init_device_mesh("cpu", (2, size // 2)) if size > 2 else None
    rows, wide = torch.arange(35.0).reshape(7, 5), torch.arange(12.0).reshape(2, 6)
    state: dict[str, Any] = {
        "rows": distribute_tensor(rows, flat, [Shard(0)]),
        "columns": distribute_tensor(wide, flat, [Shard(1)]),
        "short": distribute_tensor(torch.ones(1), flat, [Shard(0)]),
        "empty": distribute_tensor(torch.ones(0, 3), flat, [Shard(0)]),
        "whole": distribute_tensor(rows, flat, [Replicate()]),
        "plain": torch.ones(3),
        "step": torch.tensor(2.0),
        "number": 7,
        "nested": {"list": [1, {"two": "2"}]},
    }
    if both is not None:
        for number in range(6):
            full = torch.ones(4 + number, 3, dtype=torch.bfloat16)
            state[f"hybrid{number}"] = distribute_tensor(full, both, [Replicate(), Shard(0)])
    return {"model": state}


def _boxes(plans: Sequence[SavePlan]) -> Counter[Any]:
    """Return the pieces with anything in them, and how often each is written."""
    found: Counter[Any] = Counter()
    for plan in plans:
        for item in plan.items:
            data = item.tensor_data
            if data is None:
                found[item.index.fqn, None] += 1
            elif data.chunk.sizes.numel() or not data.size.numel():
                found[item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes)] += 1
    return found


def _filled(chunks: Sequence[ChunkStorageMetadata]) -> dict[torch.Size, torch.Size]:
    return {one.offsets: one.sizes for one in chunks if one.sizes.numel()}


def _compare() -> list[int]:
    """Compare with torch's own planning of the same states; return the bytes of hybrid shards on each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    planners: list[Any] = [DefaultSavePlanner(), LocalSavePlanner()]
    gathered: list[list[SavePlan]] = []
    for planner in planners:
        planner.set_up_planner(_state(), is_coordinator=rank == 0)
        plans: list[Any] = [None] * size
        dist.all_gather_object(plans, planner.create_local_plan())
        gathered.append(plans)
    torchs, metadata = planners[0].create_global_plan(gathered[0])
    assert _boxes(gathered[1]) == _boxes(torchs)
    assert set(_boxes(gathered[1]).values()) == {1}
    merged = merge_plans(1, gathered[1])
    assert merged.metadata.planner_data == metadata.planner_data
    assert merged.metadata.state_dict_metadata.keys() == metadata.state_dict_metadata.keys()
    entries: dict[str, Any] = merged.metadata.state_dict_metadata
    for name, entry in entries.items():
        expected: Any = metadata.state_dict_metadata[name]
        assert type(entry) is type(expected)
        if not isinstance(entry, BytesStorageMetadata):
            assert (entry.properties, entry.size) == (expected.properties, expected.size)
            assert _filled(entry.chunks) == _filled(expected.chunks)
    for plan, indices in zip(gathered[1], merged.indices, strict=True):
        assert [item.index for item in plan.items] == list(indices)
        assert len(indices) == len(plan.items)
    hints: dict[str, list[int | None]] = {}
    for index in (index for indices in merged.indices for index in indices):
        hints.setdefault(index.fqn, []).append(index.index)
    assert all(own in ([None], list(range(len(own)))) for own in hints.values())
    return [
        sum(
            item.tensor_data.chunk.sizes.numel()
            for item in plan.items
            if "hybrid" in item.index.fqn and item.tensor_data is not None
        )
        for plan in gathered[1]
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parts_are_those_of_torchs_planning(world_size: int) -> None:
    shares = run_on_ranks(world_size, _compare)[0]
    if world_size == 4:  # copies share what both have
        assert abs(shares[0] - shares[2]) <= 15
        assert abs(shares[1] - shares[3]) <= 15
        assert sum(shares) == sum((4 + number) * 3 for number in range(6))


def _item(name: str, shape: tuple[int, ...], box: Box, dtype: torch.dtype = torch.float32) -> WriteItem:
    offsets, sizes = map(torch.Size, box)
    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def _plan(*items: WriteItem) -> SavePlan:
    return SavePlan(list(items), planner_data={item.index.fqn: (item.index.fqn,) for item in items})


FIRST, LAST = ((0, 0), (2, 3)), ((2, 0), (2, 3))


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ([_plan(_item("w", (4, 3), FIRST)), _plan()], "'w' has 12 elements, but its parts have 6"),
        ([_plan(_item("w", (4, 3), FIRST))] * 2, r"'w' has overlapping parts, at \(0, 0\) and at \(0, 0\)"),
        (
            [_plan(_item("w", (4, 3), FIRST)), _plan(_item("w", (4, 3), LAST, torch.float64))],
            r"'w' is torch.float64 \(4, 3\) on process 1, unlike on earlier processes",
        ),
        (
            [_plan(_item("w", (4, 3), FIRST)), _plan(_item("w", (4, 2), LAST))],
            r"'w' is torch.float32 \(4, 2\) on process 1, unlike on earlier processes",
        ),
        ([_plan(_item("w", (4, 3), ((3, 0), (2, 3))))], r"'w' has the shape \(4, 3\), but a part at \(3, 0\) of shape"),
        (
            [_plan(WriteItem(MetadataIndex("b"), WriteItemType.BYTE_IO))] * 2,
            "'b' is written twice, the second time by process 1",
        ),
        (
            [_plan(*(_item(f"w{number}", (4, 3), FIRST) for number in range(12)))],
            r"'w9' has 12 elements, but its parts have 6 \(and 2 more\)",
        ),
    ],
)
def test_parts_that_are_not_one_whole_are_refused(plans: list[SavePlan], message: str) -> None:
    with pytest.raises(ValueError, match=f"the parts of all processes do not fit together: .*{message}"):
        merge_plans(1, plans)


@st.composite
def _some_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(1, 4))):
        offsets = tuple(draw(st.integers(0, full - 1)) for full in shape)
        sizes = tuple(draw(st.integers(1, full - at)) for full, at in zip(shape, offsets, strict=True))
        boxes.append((offsets, sizes))
    return shape, boxes


@given(_some_boxes())
@settings(max_examples=300, deadline=None)
def test_what_fills_a_tensor_is_found(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = drawn
    times = numpy.zeros(shape, int)
    for offsets, sizes in boxes:
        times[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] += 1
    plan = _plan(*(_item("w", shape, box) for box in boxes))
    if (times == 1).all():
        chunks: Any = merge_plans(1, [plan]).metadata.state_dict_metadata["w"]
        assert [(tuple(one.offsets), tuple(one.sizes)) for one in chunks.chunks] == boxes
        assert chunks.chunks[0] == chunks.chunks[:1][0]
    else:
        with pytest.raises(ValueError, match="do not fit together"):
            merge_plans(1, [plan])


def test_a_plan_is_sent_once() -> None:
    plans, first, last = SavePlanCache(), _plan(_item("w", (4, 3), FIRST)), _plan(_item("w", (4, 3), LAST))
    merged = plans.merge([PlanMessage(1, first, (1,)), PlanMessage(5, last, (5,))])
    assert plans.merge([PlanMessage(1, None, (1,)), PlanMessage(5, None, (5,))]) is merged
    other = plans.merge([PlanMessage(1, None, (1,)), PlanMessage(6, last, (6, 5))])  # one of them has planned anew
    assert other.number != merged.number
    assert plans.merged_numbers == [other.number, merged.number]
    assert plans.merge([PlanMessage(1, None, (1,)), PlanMessage(5, None, (5, 6))]) is merged
    plans.merge([PlanMessage(2, first, (2, 1)), PlanMessage(6, None, (6, 5))])
    assert merged.number in plans.merged_numbers
    assert other.number not in plans.merged_numbers


@pytest.mark.parametrize("num_tensors", [0, 30])
def test_a_folders_description_is_torchs(num_tensors: int, tmp_path: Path) -> None:
    """The places of all ranks, and digests of their files and of the description."""
    names = [f"model.layers.{number}.weight" for number in range(num_tensors)]
    plans = [_plan(*(_item(name, (4, 3), box) for name in names)) for box in (FIRST, LAST)]
    merged = merge_plans(1, plans)
    locations = [
        WriteLocations([f"__{rank}_0.distcp"], [(24, 0, 2000 * number, 2000, 7) for number in range(num_tensors)])
        for rank in range(2)
    ]
    results = [own.results(indices) for indices, own in zip(merged.indices, locations, strict=True)]
    writer, torchs = FolderWriter(tmp_path / "ours"), FileSystemWriter(tmp_path / "torchs")
    for one in (writer, torchs):
        Path(one.path).mkdir()
        one.finish(merged.metadata, results)
    ours, theirs = (pickle.loads((tmp_path / name / ".metadata").read_bytes()) for name in ("ours", "torchs"))
    assert len(ours.storage_data) == 2 * num_tensors
    assert ours.storage_meta.checkpoint_id == tmp_path / "ours"
    theirs.storage_meta = ours.storage_meta = None
    assert ours == theirs
    assert set(writer.digests) == {".metadata", *(["__0_0.distcp", "__1_0.distcp"] if num_tensors else [])}
    writer.digests[".metadata"].check(tmp_path / "ours/.metadata", (tmp_path / "ours/.metadata").read_bytes())


def test_another_number_of_places_than_of_pieces_is_refused() -> None:
    merged = merge_plans(1, [_plan(_item("w", (4, 3), ((0, 0), (4, 3))))])
    with pytest.raises(ValueError, match="the wrong number of pieces: expected 1, got 0"):
        WriteLocations([], []).results(merged.indices[0])
