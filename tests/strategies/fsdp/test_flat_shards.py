"""Ranges of FSDP1's parameters as boxes of full tensors: what they are cut into, and what can be done with them."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from accelight.strategies.sharded_tensors.shards import FlatLayout, FlatShard, boxes_of, memory_order
from tests.ranks import run_on_ranks

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def _ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(0, prod(shape) - start))


@given(_ranges())
@settings(max_examples=300, deadline=None)
def test_boxes_hold_the_range_and_nothing_else(drawn: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, count = drawn
    full = torch.arange(prod(shape)).reshape(shape)
    boxes = boxes_of(shape, start, count)
    found = [full[tuple(map(slice, box.offsets, map(sum, zip(box.offsets, box.sizes, strict=True))))] for box in boxes]
    assert [int(one) for part in found for one in part.flatten()] == list(range(start, start + count))
    assert [box.begin for box in boxes] == [int(part.flatten()[0]) - start for part in found]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(SHAPES, st.data())
@settings(max_examples=200, deadline=None)
def test_the_order_in_memory_is_found(shape: tuple[int, ...], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    places = [order.index(dim) for dim in range(len(order))]
    full = torch.arange(prod(shape)).reshape([shape[dim] for dim in order]).permute(places)
    found = memory_order(full.shape, full.stride())
    assert found is not None
    assert full.permute(found).flatten().tolist() == list(range(prod(shape)))


@pytest.mark.parametrize("full", [torch.zeros(4, 4)[:, :3], torch.zeros(3, 1).expand(3, 2)])
def test_gaps_in_memory_have_no_order(full: Tensor) -> None:
    assert memory_order(full.shape, full.stride()) is None


def _shards(full: Tensor, rank: int, world_size: int, group: Any = None) -> FlatShard:
    """Return a rank's part of a dense tensor, as FSDP1 cuts it: ceil(numel / world_size) elements each."""
    order = memory_order(full.shape, full.stride())
    assert order is not None
    size = -(-full.numel() // world_size)
    start = min(rank * size, full.numel())
    place = FlatLayout(
        full.shape,
        full.stride(),
        order,
        start,
        min(size, full.numel() - start),
        0,
        1,
        group,
        torch.device("cpu"),
    )
    return FlatShard(place.own_range(full).clone(), place)


def _channels_last(*shape: int) -> Tensor:
    return torch.arange(float(prod(shape))).reshape(shape).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("full", [torch.arange(35.0).reshape(5, 7), _channels_last(3, 4, 3, 3), torch.tensor(3.0)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 50])
def test_boxes_of_all_ranks_are_the_tensor(full: Tensor, world_size: int) -> None:
    found = torch.full_like(full, -1)
    for rank in range(world_size):
        for box, values in _shards(full, rank, world_size).boxes():
            part = tuple(slice(begin, begin + size) for begin, size in zip(box.offsets, box.sizes, strict=True))
            assert (found[part] == -1).all()
            found[part] = values
    assert torch.equal(found, full)


def _every_way(values: Tensor) -> dict[str, Tensor]:
    return {
        "half": values.half(),
        "negative": -values,
        "scaled": values * 2,
        "by a tensor": values * torch.tensor(3.0),
        "sum": values + values.detach(),
        "clone": values.clone(),
        "to": values.to(torch.float64),
        "comparison": values > 3,
        "deep copy": copy.deepcopy(values),
        "zeros": torch.zeros_like(values),
        "full": torch.full_like(values, 3, dtype=torch.int8),
    }


def _check_operations() -> None:
    full = _channels_last(2, 3, 3, 3)
    shard = _shards(full, dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    assert (shard.shape, shard.dtype, shard.device, shard.stride()) == (
        full.shape,
        full.dtype,
        full.device,
        full.stride(),
    )
    expected = _every_way(full)
    for what, found in _every_way(shard).items():
        assert isinstance(found, FlatShard), what
        together = found.full_tensor()
        assert together.stride() == full.stride(), what
        torch.testing.assert_close(together, expected[what], rtol=0, atol=0)
    detached: Any = shard.detach()
    assert detached.held.data_ptr() == shard.held.data_ptr()
    shard.mul_(2).add_(shard)
    assert torch.equal(shard.full_tensor(), full * 4)
    shard.copy_(_shards(full, dist.get_rank(), dist.get_world_size(), dist.group.WORLD))
    assert torch.equal(shard.full_tensor(), full)
    held = shard.held.clone()
    assert f"start={shard.place.start}" in repr(shard)
    for refused in (
        torch.sum,
        torch.flatten,
        lambda one: torch.equal(one, one),
        lambda one: one + full,
        lambda one: one[0],
    ):
        with pytest.raises(RuntimeError, match=rf"this process has {len(held)} of 54 elements. Call full_tensor\(\)"):
            refused(shard)
    with pytest.raises(TypeError, match="A single shard cannot be pickled"):
        pickle.dumps(shard)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_goes_element_by_element_goes_on_shards(world_size: int) -> None:
    run_on_ranks(world_size, _check_operations)


def _full_of(dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, Tensor]:
    return {dtype: torch.arange(11).to(dtype) for dtype in dtypes}


def _check_full(dtypes: Sequence[torch.dtype]) -> None:
    for full in _full_of(dtypes).values():
        shard = _shards(full, dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
        assert torch.equal(shard.full_tensor(), full)


def test_full_tensors_are_exact_in_every_dtype() -> None:
    """NaN and -0.0 too: bytes are put together, and not numbers."""
    run_on_ranks(2, _check_full, [torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.complex64, torch.bool])
    run_on_ranks(2, _check_bits)


def _check_bits() -> None:
    full = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45, 5.0])
    shard = _shards(full, dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    assert torch.equal(shard.full_tensor().view(torch.int32), full.view(torch.int32))


def _tensors() -> dict[str, Tensor]:
    return {
        "matrix": torch.arange(35.0).reshape(5, 7),
        "convolution": _channels_last(3, 4, 3, 3),
        "vector": torch.arange(5.0),
        "small": torch.arange(1.0),
    }


def _save(folder: str) -> None:
    save(
        {
            name: _shards(full, dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
            for name, full in _tensors().items()
        },
        checkpoint_id=folder,
    )


def _load(folder: str) -> None:
    state: dict[str, Any] = {
        name: _shards(torch.zeros_like(full), dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
        for name, full in _tensors().items()
    }
    load(state, checkpoint_id=folder)
    for name, full in _tensors().items():
        assert torch.equal(state[name].full_tensor(), full), name


@pytest.mark.parametrize("world_sizes", itertools.permutations([1, 2, 3], 2), ids=str)
def test_torchs_own_checkpoints_take_them(world_sizes: tuple[int, int], tmp_path: Path) -> None:
    """The oracle of the boxes: ``dcp.save`` writes them, ``dcp.load`` reads them into full tensors, and into others."""
    saving, loading = world_sizes
    run_on_ranks(saving, _save, str(tmp_path))
    plain = {name: torch.zeros(full.shape) for name, full in _tensors().items()}
    load(plain, checkpoint_id=tmp_path, no_dist=True)
    for name, full in _tensors().items():
        assert torch.equal(plain[name], full), name
    run_on_ranks(loading, _load, str(tmp_path))
