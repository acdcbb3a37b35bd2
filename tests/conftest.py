"""What holds for every test: a clean environment and state, and a limit of time."""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import deepspeed_ops
from tests.gpu import TRIED_ON_CPU
from tests.ranks import find_entry_points_once, preload, reset_singletons
from tests.slowness import slowness

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two cores, several processes: threads would only fight
find_entry_points_once()
_TEST_LIMIT_S = 300.0
_MINUTES = float(os.environ.get("ACCELIGHT_MINUTES", "inf"))
"""How long exhaustive tests may begin; the rest is skipped. Each day begins elsewhere: see `_rotate`."""
_BEGAN_AT = float(os.environ.setdefault("ACCELIGHT_TESTS_BEGAN_AT", str(time.time())))  # workers inherit it
_SLOW_TESTS = Path(__file__).with_name("slow_tests.txt")
"""Their names, a line each; ``python -m tools.slow_tests`` writes it."""
_OF_DEEPSPEED = (
    *("deepspeed", "deepspeed.runtime.engine", "deepspeed.module_inject", "accelight.strategies.deepspeed.strategy"),
    *("accelerate", "networkx", "torch.ao.quantization", "torch.utils.cpp_extension"),  # it imports them when it trains
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_exhaustive(items, complete=not config.option.file_or_dir)
    for item in items:
        tried = TRIED_ON_CPU and item.path.name == "test_gpu.py"
        if item.get_closest_marker("gpu") and not torch.cuda.is_available() and not tried:
            item.add_marker(pytest.mark.skip(reason="needs CUDA, and this machine has none"))
    items.sort(key=lambda item: _uses_deepspeed(item.path))  # the others run while its ops are built
    if math.isfinite(_MINUTES):
        _rotate(items, day=int(_BEGAN_AT // 86400))


def _rotate(items: list[pytest.Item], day: int) -> None:
    """Begin with another file each day, so that runs of two days cover what one of them has no minutes for.

    The files keep their places on a ring, and each day moves the beginning on by the golden ratio of all exhaustive
    tests: where a run reaches two thirds of them, two days in a row reach all; where it reaches half, three do.
    """
    items.sort(key=lambda item: hashlib.md5(item.path.name.encode()).digest())
    limited = [item.path for item in items if item.get_closest_marker("exhaustive")]
    if limited:
        first = limited[int(len(limited) * (day * 0.618034 % 1))]
        begin = next(index for index, item in enumerate(items) if item.path == first)
        items[:] = items[begin:] + items[:begin]


def _mark_exhaustive(items: list[pytest.Item], *, complete: bool) -> None:
    """Mark what is left to `make test-all`: slow tests, and cells that ``@pytest.mark.core(*words)`` does not name.

    Raises:
        pytest.UsageError: If a word is in no cell's name, or a slow test is not there, and all tests are here.
    """
    slow = set(_SLOW_TESTS.read_text().splitlines())
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.exhaustive)
    gone = {name.partition("[")[0] for name in slow} - {item.nodeid.partition("[")[0] for item in items}
    if complete and gone:
        raise pytest.UsageError(f"{_SLOW_TESTS} has tests that are not there: {', '.join(sorted(gone))}. Remove them.")
    named: set[tuple[str, str]] = set()
    found: set[tuple[str, str]] = set()
    for item in items:
        marker = item.get_closest_marker("core")
        if marker is None:
            continue
        test, _, cell = item.nodeid.partition("[")
        named |= {(test, word) for word in marker.args}
        hits = {(test, word) for word in marker.args if word in cell}
        found |= hits
        if not hits:
            item.add_marker(pytest.mark.exhaustive)
    if complete and named > found:
        unknown = [f"{test}: no cell with {word!r} in its name" for test, word in sorted(named - found)]
        raise pytest.UsageError("\n".join(unknown))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > _BEGAN_AT + 60 * _MINUTES and item.get_closest_marker("exhaustive"):
        pytest.skip(f"the {_MINUTES:g} minutes of this run are over (ACCELIGHT_MINUTES)")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let a test that hangs fail, with its stacks, and end what it has started; the tests after it go on."""
    if item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(_TEST_LIMIT_S * slowness()))
    return (yield)


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(_uses_deepspeed(item.path) for item in session.items) and not session.config.option.collectonly:
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        deepspeed_ops.start_building(session.config.rootpath / ".torch_extensions", devices)


def pytest_unconfigure() -> None:
    deepspeed_ops.end_building()


@cache
def _uses_deepspeed(file: Path) -> bool:
    text = file.read_text(encoding="utf-8")
    return re.search("deepspeed|zero([0-3]|_checkpoints|_universal)", text, re.IGNORECASE) is not None


@pytest.fixture(autouse=True, scope="module")
def _ops_are_built(request: pytest.FixtureRequest) -> Iterator[None]:
    """DeepSpeed chooses between CPU and CUDA when it is imported: where both are, in processes of their own."""
    if not _uses_deepspeed(request.path):
        yield
        return
    on_gpu = request.path.name == "test_gpu.py"
    device = "cuda" if on_gpu and torch.cuda.is_available() else "cpu"
    deepspeed_ops.wait_until_built(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(deepspeed_ops.folder_for(device)))
        if torch.cuda.is_available():
            patch.setenv("DS_ACCELERATOR", device)
        preload(*(() if on_gpu else _OF_DEEPSPEED))
        yield


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    environment = dict(os.environ)
    yield
    reset_singletons()
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
