"""The process that holds the store stays until the others need it no more, and no longer."""

from __future__ import annotations

import pytest

from tests.scripts import Launcher, run_script

START = """
import os, sys, time
import torch.distributed as dist
from accelight.state import PartialState, check_trigger, set_trigger

state = PartialState()
late_s = float(sys.argv[1])

def say(what):
    sys.stdout.write(f"{what} {state.process_index}\\n")  # at once: torchrun's processes have no buffer
    sys.stdout.flush()
"""

# What the others do at the end while the main process has nothing left to do.
LATE = {
    "before the block": """
if not state.is_main_process:
    time.sleep(late_s * state.process_index)
with state.main_process_first():
    say("done")
""",
    "in the block": """
with state.main_process_first():
    if not state.is_main_process:
        time.sleep(late_s * state.process_index)
    with state.main_process_first():
        say("done")
""",
    "before the local block": """
if not state.is_main_process:
    time.sleep(late_s * state.process_index)
with state.local_main_process_first():
    say("done")
""",
    "second block": """
with state.main_process_first():
    if state.is_main_process:
        time.sleep(0.3)
if not state.is_main_process:
    time.sleep(late_s * state.process_index)
try:
    with state.main_process_first():
        if state.is_main_process:
            raise KeyError("no such thing")
except (KeyError, RuntimeError) as error:
    assert "no such thing" in str(error)
    say("done")
""",
    "trigger": """
set_trigger(f"t{state.process_index}")
check_trigger("t0", blocking=False)
if not state.is_main_process:
    time.sleep(late_s * state.process_index)
assert check_trigger("t0", blocking=False)
say("done")
""",
}
ENDS = {
    "end": "",
    "destroy": "state.destroy_process_group()\ntime.sleep(0.1)\n",
    "torch": "dist.destroy_process_group()",
}


@pytest.mark.machines
@pytest.mark.parametrize(
    ("late", "end"), [*((late, "end") for late in LATE), ("in the block", "destroy"), ("in the block", "torch")]
)
def test_the_others_come_late_to_what_the_main_process_ends_with(late: str, end: str) -> None:
    num_processes = 3 if end == "end" else 2
    result = run_script(START + LATE[late] + ENDS[end], "1", launcher="by_hand", nproc=num_processes, timeout_s=60)
    assert sorted(result.lines) == [f"done {rank}" for rank in range(num_processes)]  # and no warning of torch's


@pytest.mark.exhaustive
def test_rank_zero_waits_for_a_rank_that_is_very_late() -> None:
    source = START + LATE["before the block"] + ENDS["destroy"]
    lines = run_script(source, "7", launcher="by_hand", nproc=2, timeout_s=60).lines
    assert "done 1" in lines
    assert any("Process 0 waits for the others, which have not reached main_process_first yet" in one for one in lines)


@pytest.mark.machines
@pytest.mark.parametrize("launcher", ["torchrun", "two_nodes"])
def test_late_ranks_end_well_under_torchrun(launcher: Launcher) -> None:
    result = run_script(START + LATE["before the local block"], "1.5", launcher=launcher, nproc=2)
    count = 4 if launcher == "two_nodes" else 2
    assert sorted(line for line in result.lines if "done" in line) == [f"done {rank}" for rank in range(count)]


LEAVING = {
    "only the main process has the block": """
if state.is_main_process:
    with state.main_process_first():
        say("done")
""",
    "the others end before they come to it": """
if not state.is_main_process:
    sys.exit(0)
with state.main_process_first():
    say("done")
""",
    "again in a new group": """
with state.main_process_first():
    pass
state.destroy_process_group()
time.sleep(0.0 if state.is_main_process else 1.0)  # on the same port: or they find the old store
dist.init_process_group("gloo")
with state.main_process_first():
    pass
if state.is_main_process:
    say("done")
""",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("leaving", LEAVING)
def test_nobody_stays_for_those_who_have_left(leaving: str) -> None:
    # The limit of the script, and not the group's timeout, half an hour.
    result = run_script(START + LEAVING[leaving], "0", launcher="by_hand", nproc=3, timeout_s=60)
    assert result.lines == ["done 0"]


@pytest.mark.exhaustive
def test_an_error_on_the_main_process_is_not_held_back_for_long() -> None:
    source = (
        START + "if state.is_main_process:\n    with state.main_process_first():\n        pass\n    raise KeyError(7)\n"
    )
    # The limit of the script, and not the group's timeout, half an hour.
    result = run_script(source + "time.sleep(16)\n", "0", launcher="by_hand", nproc=2, timeout_s=60, check=False)
    assert result.returncodes == [1, 0]
    assert "KeyError: 7" in result.output
