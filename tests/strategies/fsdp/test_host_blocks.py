"""Bytes on their way to a file: no copy of what is in host memory, and the right bytes at any size of a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from accelight.checkpoint.formats.base import DTYPES
from accelight.strategies.fsdp.checkpoint.safetensors import in_host_memory
from tests.ranks import run_on_ranks


def _pieces(sizes: Sequence[int], device: str = "cpu") -> Iterator[tuple[int, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for index, size in enumerate(sizes):
        yield index, torch.randint(256, (size,), dtype=torch.uint8, generator=generator).to(device)


def _joined(sizes: Sequence[int], block_bytes: int, device: str = "cpu") -> list[Tensor]:
    """Return what comes, put together again; each byte comes once."""
    whole = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    counts = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    for key, start, values in in_host_memory(_pieces(sizes, device), block_bytes, copy_all=True):
        assert values.device.type == "cpu"
        assert values.numel() <= block_bytes
        assert values.data_ptr() % 8 == 0
        whole[key][start : start + values.numel()] = values
        counts[key][start : start + values.numel()] += 1
    assert all(count.eq(1).all() for count in counts)
    return whole


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 100), max_size=8), st.sampled_from([16, 32, 64, 128]))
def test_every_byte_comes_once(sizes: list[int], block_bytes: int) -> None:
    expected = [values for _, values in _pieces(sizes)]
    assert all(map(torch.equal, _joined(sizes, block_bytes), expected))


@pytest.mark.gpu
def test_every_byte_comes_from_a_gpu() -> None:
    run_on_ranks(1, _check_gpu)


def _check_gpu() -> None:
    sizes = [5, 3000, 0, 70_000, 2**20]
    expected = [values for _, values in _pieces(sizes)]
    for _ in range(20):  # each block is filled again while others are in flight
        assert all(map(torch.equal, _joined(sizes, 4096, "cuda"), expected))


def test_what_is_in_host_memory_is_not_copied() -> None:
    values = torch.arange(100, dtype=torch.uint8)
    [(key, start, found)] = in_host_memory([("name", values)], 16)
    assert (key, start) == ("name", 0)
    assert found is values


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", sorted(set(DTYPES)))
def test_tensors_of_every_dtype_have_bytes(name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    tensor = torch.empty(3, 2, dtype=dtype)
    assert tensor.reshape(-1).view(torch.uint8).data_ptr() == tensor.data_ptr()
