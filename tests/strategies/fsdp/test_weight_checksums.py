"""The checksum that shows a change of weights through ``parameter.data``, which leaves no other trace."""

from __future__ import annotations

import pytest
import torch

from accelight.strategies.fsdp.step import checksum

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 8, 1001, 2**18 + 5])
def test_each_element_and_each_place_counts(dtype: torch.dtype, count: int) -> None:
    values = torch.arange(1, count + 4).remainder(97).to(dtype)[3:]  # which begins at no multiple of eight bytes
    known = checksum(values)
    assert known == checksum(values.clone())
    for place in {0, count // 2, count - 1}:
        changed = values.clone()
        changed[place] += 1
        assert checksum(changed) != known
    if count > 1:
        assert checksum(values.flip(0)) != known


def test_tensors_without_elements_or_dimensions() -> None:
    assert checksum(torch.empty(0)) == 0
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(2.0))
    assert checksum(torch.ones(3, dtype=torch.bfloat16)) != checksum(torch.zeros(3, dtype=torch.bfloat16))
