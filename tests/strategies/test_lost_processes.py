"""Which process does not answer, also where the process group is ended while it is asked for."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from accelight.state import rendezvous
from tests.ranks import run_on_ranks


def _ask_while_the_group_ends() -> str:
    """As in a worker of Ray Train, which ends the group from another thread when a worker is lost."""
    if dist.get_rank() == 1:
        return ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "ANSWERS_WITHIN_S", 1.0)
        ending = threading.Timer(0.3, dist.destroy_process_group)
        ending.start()
        said = rendezvous.missing_ranks("accelight/run/0")
        ending.join()
    return said


def test_a_group_that_is_ended_meanwhile() -> None:
    [said, _] = run_on_ranks(2, _ask_while_the_group_ends)
    assert said.startswith("and process 1 did not answer within 1 s")
