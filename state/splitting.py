"""A share of some inputs for each process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence, Sized
from typing import Any

import torch


def split(inputs: Any, process_index: int, num_processes: int, *, apply_padding: bool) -> Any:
    """Return this process's share of ``inputs``: the first ``len % num_processes`` processes get one more.

    Raises:
        ValueError: If the values of a dict have different lengths.
        TypeError: If ``inputs`` has no length or cannot be sliced.
    """
    length = _common_length(inputs)
    if num_processes == 1:
        return inputs
    share, extra = divmod(length, num_processes)
    start = process_index * share + min(process_index, extra)
    stop = start + share + (process_index < extra)
    num_pad = share + (extra > 0) - (stop - start) if apply_padding and length else 0
    return _take(inputs, start, stop, num_pad)


def _common_length(inputs: Any) -> int:
    lengths = _lengths(inputs, "")
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name or 'inputs'}: {length}" for name, length in lengths.items())
        raise ValueError(f"All values of the dict must have the same length to be split together. Found {found}.")
    return next(iter(lengths.values()), 0)


def _lengths(inputs: Any, path: str) -> dict[str, int]:
    if isinstance(inputs, Mapping):
        found: dict[str, int] = {}
        for key, value in inputs.items():
            found.update(_lengths(value, f"{path}[{key!r}]"))
        return found
    if isinstance(inputs, torch.Tensor) and inputs.ndim == 0:
        raise TypeError(f"Cannot split a tensor of no dimensions{f' at {path}' if path else ''}. Give it one: t[None].")
    if isinstance(inputs, (str, bytes)) or not isinstance(inputs, Sized) or not hasattr(inputs, "__getitem__"):
        raise TypeError(
            f"Cannot split {type(inputs).__name__}{f' at {path}' if path else ''} between processes: it takes a list, "
            "tuple, tensor, datasets.Dataset, other sequence, or a dict of them."
        )
    return {path: len(inputs)}


def _take(inputs: Any, start: int, stop: int, num_pad: int) -> Any:
    """Return ``inputs[start:stop]`` with its last element repeated ``num_pad`` times, in the kind that it has."""
    if isinstance(inputs, Mapping):
        taken = {key: _take(value, start, stop, num_pad) for key, value in inputs.items()}
        return _like_mapping(inputs, taken)
    indices = [*range(start, stop), *[len(inputs) - 1] * num_pad]
    if isinstance(inputs, torch.Tensor):
        share = inputs[start:stop]
        return torch.cat([share, inputs[-1:].expand(num_pad, *inputs.shape[1:])]) if num_pad else share
    if hasattr(inputs, "select") and hasattr(inputs, "column_names"):  # datasets.Dataset: a slice would be a dict
        return inputs.select(indices)
    if isinstance(inputs, tuple):  # a share of a named tuple has another number of fields: a plain one
        return tuple(inputs[index] for index in indices)
    if isinstance(inputs, Sequence):
        return _take_from_sequence(inputs, start, stop, indices)
    # NumPy arrays and data frames: `+` would add numbers, so the rows are named instead.
    return getattr(inputs, "iloc", inputs)[indices] if num_pad else inputs[start:stop]


def _take_from_sequence(inputs: Sequence[Any], start: int, stop: int, indices: list[int]) -> Any:
    """Return a slice of the same kind where that needs no padding and is supported, else a list."""
    if len(indices) == stop - start:
        try:
            return inputs[start:stop]
        except TypeError:  # a deque has no slices
            pass
    return [inputs[index] for index in indices]


def _like_mapping(original: Mapping[Any, Any], taken: dict[Any, Any]) -> Any:
    """Return ``taken`` in a copy of the original's kind (an ordered or attribute dict), else as a plain dict."""
    if type(original) is dict or not isinstance(original, MutableMapping):
        return taken
    clone = copy.copy(original)
    clone.update(taken)
    return clone
