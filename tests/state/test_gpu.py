"""`accelight.state` on CUDA with NCCL, and gloo beside it for what lies on the CPU."""

from __future__ import annotations

import pytest
import torch

from accelight.state import PartialState, check_trigger, gather, reduce, set_trigger
from tests.gpu import ACCELERATOR, NUM_DEVICES
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.gpu


def communicate() -> tuple[str, list[int], list[int], float, list[bool]]:
    state = PartialState()
    own = torch.tensor([state.process_index], device=state.device)
    with state.main_process_first():
        pass
    gathered, on_cpu = gather(own), gather(own.cpu())
    mean = reduce(own.float())
    state.wait_for_everyone()
    answers = [check_trigger()]
    if state.is_last_process:
        set_trigger()
    answers += [check_trigger(blocking=False), check_trigger(blocking=False), check_trigger()]
    return state.device.type, gathered.tolist(), on_cpu.tolist(), mean.item(), answers


def test_processes_communicate() -> None:
    ranks = list(range(NUM_DEVICES))
    for device, gathered, on_cpu, mean, answers in run_on_ranks(NUM_DEVICES, communicate, init_group=False):
        assert device == {"gpu": "cuda"}.get(ACCELERATOR, ACCELERATOR)
        assert gathered == on_cpu == ranks
        assert mean == sum(ranks) / len(ranks)
        assert answers == [False, False, True, False]
