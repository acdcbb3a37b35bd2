"""What holds for every test: a clean environment and state, and a watchdog for what runs in this process."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.ranks import reset_singletons

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two cores, several processes: threads would only fight
_TEST_LIMIT_S = 300.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA, and this machine has none"))


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    environment = dict(os.environ)
    faulthandler.dump_traceback_later(_TEST_LIMIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    reset_singletons()
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
