"""Where the ranks come from: every launcher, every half-set environment."""

from __future__ import annotations

import pytest

from accelight.state import ProcessInfo

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[03-04,9]",
    "SLURM_JOB_ID": "1234567",
}
LIGHTNING = {
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "NODE_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
}


def place(info: ProcessInfo) -> tuple[int, int, int, int]:
    return info.process_index, info.num_processes, info.local_process_index, info.num_local_processes


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def test_nothing_set_is_one_process() -> None:
    info = ProcessInfo.from_env({"MASTER_ADDR": "left over"})
    assert (info.launcher, place(info)) == ("none", (0, 1, 0, 1))


def test_variables_of_torchrun() -> None:
    info = ProcessInfo.from_env(TORCHRUN)
    assert (info.launcher, place(info)) == ("torchrun", (3, 4, 1, 2))
    assert (info.main_address, info.main_port) == ("node0", 1234)


def test_torchrun_comes_before_mpi_and_slurm() -> None:
    mpi = {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
    assert place(ProcessInfo.from_env({**SLURM, **mpi, **TORCHRUN})) == (3, 4, 1, 2)


def test_rank_without_local_rank_is_one_process_per_node_as_kubeflow_starts_them() -> None:
    env = without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert place(ProcessInfo.from_env(env)) == (3, 4, 0, 1)


@pytest.mark.parametrize(
    "names",
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ],
)
def test_variables_of_mpi(names: tuple[str, ...]) -> None:
    env = dict(zip(names, ("3", "4", "1", "2"), strict=True))
    info = ProcessInfo.from_env({**env, "MASTER_ADDR": "node0"})
    assert (info.launcher, place(info), info.main_address) == ("mpi", (3, 4, 1, 2), "node0")
    with pytest.raises(RuntimeError, match=f"only partly set.*{names[2]}"):
        ProcessInfo.from_env(without(env, names[2]))


def test_pmi_under_slurm_takes_the_place_on_the_node_from_slurm() -> None:
    assert place(ProcessInfo.from_env({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "5"})) == (3, 5, 1, 2)


def test_variables_of_slurm() -> None:
    info = ProcessInfo.from_env(SLURM)
    assert (info.launcher, place(info), info.node) == ("slurm", (3, 5, 1, 2), "1")
    assert (info.main_address, info.main_port) == ("gpu03", 15000 + 4567)


def test_slurm_comes_after_a_half_set_world_size() -> None:
    assert place(ProcessInfo.from_env({**SLURM, "WORLD_SIZE": "5"})) == (3, 5, 1, 2)


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_PROCID": "0"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "interactive"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"},
    ],
)
def test_slurm_without_srun_is_one_process(env: dict[str, str]) -> None:
    assert place(ProcessInfo.from_env(env)) == (0, 1, 0, 1)


def test_lightnings_launcher_defers_the_group() -> None:
    info = ProcessInfo.from_env(LIGHTNING)
    assert info.deferred
    assert place(info) == (3, 4, 1, 2)
    on_first_node = {**without(LIGHTNING, "LOCAL_WORLD_SIZE"), "NODE_RANK": "0"}
    assert place(ProcessInfo.from_env(on_first_node)) == (1, 4, 1, 4)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "RANK=0 is set but WORLD_SIZE is not"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 does not fit WORLD_SIZE=4"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 does not fit WORLD_SIZE=4"),
        ({**TORCHRUN, "WORLD_SIZE": "many"}, "WORLD_SIZE='many' is not an integer"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2 do not fit process 3 of 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "LOCAL_RANK=1 and LOCAL_WORLD_SIZE=8 do not fit"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set, but RANK is not"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 is set, but RANK is not"),
        (without(LIGHTNING, "NODE_RANK"), "RANK is not .nor NODE_RANK"),
        (without(LIGHTNING, "LOCAL_WORLD_SIZE"), "NODE_RANK=1 and LOCAL_RANK=1, but neither RANK nor LOCAL_WORLD_SIZE"),
        ({**LIGHTNING, "NODE_RANK": "2"}, "NODE_RANK=2, LOCAL_WORLD_SIZE=2 and LOCAL_RANK=1 make this process 5"),
        ({"SLURM_PROCID": "1"}, "SLURM_PROCID=1 is set but SLURM_NTASKS is not"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "not started by srun .SLURM_STEP_ID is not set."),
        (without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID is not"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE='two' is not of the form"),
        ({**SLURM, "SLURM_NODEID": "7"}, "SLURM_NODEID=7, but SLURM_STEP_TASKS_PER_NODE=.* has 3 node"),
    ],
)
def test_half_set_environments_raise_and_name_the_variables(env: dict[str, str], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ProcessInfo.from_env(env)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, (3, 4, 3, 4)),
        (TORCHRUN, (3, 4, 1, 2)),
        ({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}, (3, 4, 3, 4)),  # of another job
        ({"RANK": "7"}, (3, 4, 3, 4)),
        (without(LIGHTNING, "WORLD_SIZE"), (3, 4, 1, 2)),  # after Lightning's teardown
        (without(LIGHTNING, "LOCAL_WORLD_SIZE"), (3, 4, 1, 2)),
        ({"LOCAL_RANK": "9"}, (3, 4, 3, 4)),
    ],
)
def test_a_live_group_is_right_and_the_environment_fills_in_the_node(
    env: dict[str, str], expected: tuple[int, int, int, int]
) -> None:
    assert place(ProcessInfo.of_group(env, 3, 4)) == expected
