"""Private names of torch (2.13) for running without kernels: fake tensors and collectives that reach nobody."""

from __future__ import annotations

import importlib

import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed import Backend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

importlib.import_module("torch.testing._internal.distributed.fake_pg")  # makes the backend known
FAKE_BACKEND: str = Backend.FAKE
"""Of process groups whose collectives reach nobody: see `is_planned`."""


def fake_mode_is_on() -> bool:
    """Return whether somebody computes shapes with fake tensors: DTensor does, for each operation that is new to it."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


__all__ = [
    "FAKE_BACKEND",  # one process stands for all
    "DataDependentOutputException",  # what has a shape that depends on values
    "DynamicOutputShapeException",  # the same
    "FakeTensor",  # what an operation returns, without running it
    "FakeTensorMode",  # the same
    "FakeWork",  # what a collective returns that has ended
    "fake_mode_is_on",  # what computes shapes holds nothing
    "TorchDispatchMode",  # stands in the place of kernels
    "UnsupportedOperatorException",  # an operation that does not say what it returns
    "tree_leaves",  # tensors inside of arguments
    "tree_map_only",  # the same, to replace them
]

ATTRIBUTES = {
    "_TorchDispatchModeKey": ("torch._C", "whether somebody computes shapes with fake tensors"),
    "_get_dispatch_mode": ("torch._C", "whether somebody computes shapes with fake tensors"),
    "_cdata": ("torch.UntypedStorage", "which tensors share memory"),
    "_schema": ("torch._ops.OpOverload", "what an operation writes and returns"),
}
