"""``split_between_processes``: every kind of input, padding, and what cannot be split."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, strategies
from torch.utils.data import Subset, TensorDataset

from accelight.state import AcceleratorState, PartialState
from accelight.state.partial_state import split
from tests.ranks import run_on_ranks


class Pair(NamedTuple):
    a: list[int]
    b: list[int]


def shares(inputs: Any, num_processes: int, apply_padding: bool = False) -> list[Any]:
    return [split(inputs, index, num_processes, apply_padding=apply_padding) for index in range(num_processes)]


@given(length=strategies.integers(0, 20), num_processes=strategies.integers(1, 6))
def test_shares_join_to_the_whole_and_the_first_get_one_more(length: int, num_processes: int) -> None:
    inputs = list(range(length))
    parts = shares(inputs, num_processes)
    assert [item for part in parts for item in part] == inputs
    extra = length % num_processes
    assert [len(part) for part in parts] == [
        length // num_processes + (index < extra) for index in range(num_processes)
    ]
    padded = shares(inputs, num_processes, apply_padding=True)
    assert {len(part) for part in padded} == {-(-length // num_processes)}
    for part, full in zip(parts, padded, strict=True):
        assert full == part + inputs[-1:] * (len(full) - len(part))


@pytest.mark.parametrize(
    ("inputs", "expected", "padded"),
    [
        (["A", "B", "C"], [["A", "B"], ["C"]], [["A", "B"], ["C", "C"]]),
        (("A", "B", "C"), [("A", "B"), ("C",)], [("A", "B"), ("C", "C")]),
        (range(3), [range(2), range(2, 3)], [range(2), [2, 2]]),
        (deque("ABC"), [["A", "B"], ["C"]], [["A", "B"], ["C", "C"]]),
        (["A"], [["A"], []], [["A"], ["A"]]),
        (("A",), [("A",), ()], [("A",), ("A",)]),
        ([], [[], []], [[], []]),
        ((), [(), ()], [(), ()]),
        ({}, [{}, {}], [{}, {}]),
        (
            {"a": [1, 2, 3], "b": {"c": (4, 5, 6)}},
            [{"a": [1, 2], "b": {"c": (4, 5)}}, {"a": [3], "b": {"c": (6,)}}],
            [{"a": [1, 2], "b": {"c": (4, 5)}}, {"a": [3, 3], "b": {"c": (6, 6)}}],
        ),
        (Pair([1], [2]), [([1],), ([2],)], [([1],), ([2],)]),
    ],
)
def test_kinds(inputs: Any, expected: list[Any], padded: list[Any]) -> None:
    assert shares(inputs, 2) == expected
    assert shares(inputs, 2, apply_padding=True) == padded


@pytest.mark.parametrize("dtype", [torch.float16, torch.int16, torch.bool, torch.float64])
def test_tensors_keep_dtype_and_device(dtype: torch.dtype) -> None:
    inputs = torch.tensor([[1, 0], [0, 1], [1, 1]]).to(dtype)
    first, second = shares(inputs, 2, apply_padding=True)
    assert torch.equal(first, inputs[:2])
    assert torch.equal(second, inputs[[2, 2]])
    assert (second.dtype, second.device) == (dtype, inputs.device)
    assert [len(part) for part in shares(inputs[:1], 3)] == [1, 0, 0]
    assert [len(part) for part in shares(inputs[:1], 3, apply_padding=True)] == [1, 1, 1]
    assert shares(inputs[:0], 2, apply_padding=True)[1].shape == (0, 2)
    on_meta = torch.empty(3, 2, device="meta")
    assert shares(on_meta, 2, apply_padding=True)[1].device.type == "meta"


def test_numpy_arrays() -> None:
    numpy = pytest.importorskip("numpy")
    second = shares(numpy.array([1, 2, 3]), 2, apply_padding=True)[1]
    assert second.tolist() == [3, 3]


def test_datasets() -> None:
    datasets = pytest.importorskip("datasets")
    inputs = datasets.Dataset.from_dict({"x": [1, 2, 3]})
    parts = shares(inputs, 2)
    assert [part["x"] for part in parts] == [[1, 2], [3]]
    assert isinstance(parts[0], datasets.Dataset)
    assert [part["x"] for part in shares(inputs, 2, apply_padding=True)] == [[1, 2], [3, 3]]
    assert [part["x"][:] for part in shares(inputs.select([0]), 3)] == [[1], [], []]


def test_torchs_datasets() -> None:
    """One of several tensors gives columns for a slice."""
    inputs = TensorDataset(torch.arange(3), torch.arange(3) * 2)
    for parts in (shares(inputs, 2), shares(Subset(inputs, range(3)), 2)):
        assert [[int(first) for first, _ in part] for part in parts] == [[0, 1], [2]]
    assert [len(part) for part in shares(inputs, 2, apply_padding=True)] == [2, 2]


def test_the_callers_dict_is_not_changed_and_its_kind_stays() -> None:
    inner = {"b": [1, 2, 3]}
    for inputs in (OrderedDict(a=[1, 2, 3], inner=inner), UserDict(a=[1, 2, 3], inner=inner)):
        first, second = shares(inputs, 2, apply_padding=True)
        assert type(first) is type(inputs)
        assert (second["a"], second["inner"]) == ([3, 3], {"b": [3, 3]})
        assert inputs["a"] == [1, 2, 3]
    assert inner == {"b": [1, 2, 3]}


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"a": [1], "b": [1, 2]}, ValueError, r"same length .* Found \['a'\]: 1, \['b'\]: 2"),
        ({"a": [1], "b": {"c": [1, 2]}}, ValueError, r"\['b'\]\['c'\]: 2"),
        (5, TypeError, "Cannot split int between processes"),
        ({"a": 5}, TypeError, r"Cannot split int at \['a'\]"),
        ("prompt", TypeError, "Cannot split str"),
        (torch.tensor(1), TypeError, "Cannot split a tensor of no dimensions"),
    ],
)
def test_what_cannot_be_split_raises_on_any_number_of_processes(
    inputs: Any, error: type[Exception], message: str
) -> None:
    for num_processes in (1, 2):
        with pytest.raises(error, match=message):
            shares(inputs, num_processes)


def split_here() -> list[Any]:
    results: list[Any] = []
    for state in (PartialState(), AcceleratorState()):
        for apply_padding in (False, True):
            with state.split_between_processes(["A", "B", "C", "D"], apply_padding=apply_padding) as inputs:
                results.append(inputs)
    return results


def test_functions_run_on_the_processes_that_are_named() -> None:
    assert run_on_ranks(1, split_here) == [[list("ABCD")] * 4]
    assert run_on_ranks(3, split_here) == [
        [["A", "B"], ["A", "B"]] * 2,
        [["C"], ["C", "D"]] * 2,
        [["D"], ["D", "D"]] * 2,
    ]
