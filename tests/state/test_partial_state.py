"""``PartialState``: facts, read-only attributes, contradictions, adoption, decorators."""

from __future__ import annotations

import inspect
import os
import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelight.state import AcceleratorState, DistributedType, InitProcessGroupKwargs, PartialState, reset_state
from accelight.state.process_group import timeout_of
from tests.ranks import free_port, run_on_ranks

ATTRIBUTES = [
    "device",
    "distributed_type",
    "backend",
    "num_processes",
    "process_index",
    "local_process_index",
    "num_local_processes",
    "mixed_precision",
    "is_main_process",
    "is_local_main_process",
    "is_last_process",
    "use_distributed",
    "initialized",
    "debug",
    "fork_launched",
    "default_device",
]


def facts() -> dict[str, Any]:
    state = PartialState()
    return {name: getattr(state, name) for name in ATTRIBUTES} | {"repr": repr(state)}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("init_group", [True, False], ids=["adopts the group", "starts the group"])
def test_facts(world_size: int, init_group: bool) -> None:
    for rank, found in enumerate(run_on_ranks(world_size, facts, init_group=init_group)):
        assert found["device"] == torch.device("cpu")
        assert found["default_device"] == torch.device("cpu")
        assert found["distributed_type"] == DistributedType.MULTI_CPU
        assert found["backend"] == "gloo"
        assert (found["num_processes"], found["num_local_processes"]) == (world_size, world_size)
        assert (found["process_index"], found["local_process_index"]) == (rank, rank)
        assert found["is_main_process"] == found["is_local_main_process"] == (rank == 0)
        assert found["is_last_process"] == (rank == world_size - 1)
        assert found["use_distributed"] == (world_size > 1)
        assert found["initialized"]
        assert (found["mixed_precision"], found["debug"], found["fork_launched"]) == ("no", False, False)
        assert found["repr"] == (
            "Distributed environment: DistributedType.MULTI_CPU  Backend: gloo\n"
            f"Num processes: {world_size}\nProcess index: {rank}\nLocal process index: {rank}\nDevice: cpu\n"
        )


def test_the_state_of_one_plain_process() -> None:
    state = PartialState()
    assert (state.distributed_type, state.backend, state.num_processes) == (DistributedType.NO, None, 1)
    assert not state.use_distributed
    assert not dist.is_initialized()
    state.wait_for_everyone()
    state.set_device()
    with state.main_process_first(), state.local_main_process_first():
        pass
    assert repr(state).startswith("Distributed environment: DistributedType.NO\nNum processes: 1\n")


def test_accelerates_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    monkeypatch.setenv("FORK_LAUNCHED", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    state = PartialState()
    assert (state.debug, state.fork_launched, state.mixed_precision) == (True, True, "bf16")
    assert state.device == torch.device("meta")
    reset_state()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "yes")
    assert PartialState().device == torch.device("cpu")
    reset_state()
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "perhaps")
    with pytest.raises(ValueError, match="ACCELERATE_DEBUG_MODE='perhaps' is neither true nor false"):
        PartialState()


@pytest.mark.parametrize("name", [*ATTRIBUTES, "something_new"])
def test_attributes_are_read_only(name: str) -> None:
    for state in (PartialState(), AcceleratorState()):
        with pytest.raises(AttributeError, match=f"{type(state).__name__}.{name} is read-only"):
            setattr(state, name, 1)
        with pytest.raises(AttributeError, match=f"{name} is read-only"):
            delattr(state, name)


def test_all_instances_share_one_state_made_by_the_first() -> None:
    first = PartialState(cpu=True, timeout=timedelta(seconds=7))
    assert PartialState().device == first.device
    assert pickle.loads(pickle.dumps(first)).num_processes == 1
    reset_state()
    with pytest.raises(AttributeError, match=r"was reset .* Call PartialState\(\) again"):
        _ = first.device


def test_unknown_and_wrong_arguments_raise() -> None:
    with pytest.raises(TypeError, match=r"Unknown argument.s. colour: init_process_group accepts backend, init_method"):
        PartialState(colour="red")
    with pytest.raises(TypeError, match=r"timeout must be a datetime.timedelta, got 5"):
        PartialState(timeout=5)
    with pytest.raises(ValueError, match="rank and world_size must be set together"):
        PartialState(rank=0)
    assert PartialState().num_processes == 1


def test_init_process_group_kwargs() -> None:
    assert InitProcessGroupKwargs().to_kwargs() == {}
    given = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=3)).to_kwargs()
    assert given == {"backend": "gloo", "timeout": timedelta(seconds=3)}
    with pytest.raises(TypeError, match=r"got 3. Write timeout=timedelta\(seconds=...\)"):
        InitProcessGroupKwargs(timeout=3)  # type: ignore[arg-type]


def contradict_the_live_group() -> float:
    state = PartialState(backend="gloo", timeout=timedelta(seconds=45))
    PartialState(backend="gloo", timeout=timedelta(seconds=45), world_size=2, rank=state.process_index)
    PartialState(cpu=True, backend="cpu:gloo")
    with pytest.raises(ValueError, match="backend='nccl' contradicts the live state, which has backend='gloo'"):
        PartialState(backend="nccl")
    with pytest.raises(ValueError, match=r"backend='cpu:mpi' contradicts .* backend='cpu:gloo'"):
        PartialState(backend="cpu:mpi")
    with pytest.raises(ValueError, match=r"timeout=.*seconds=9.* contradicts .*seconds=45"):
        PartialState(timeout=timedelta(seconds=9))
    with pytest.raises(ValueError, match="world_size=3 contradicts the live state, which has world_size=2"):
        PartialState(world_size=3, rank=state.process_index)
    return timeout_of(dist.group.WORLD).total_seconds()


def test_arguments_reach_the_group_and_contradictions_name_both_values() -> None:
    assert run_on_ranks(2, contradict_the_live_group, init_group=False) == [45, 45]


def contradict_before_adoption() -> None:
    with pytest.raises(ValueError, match="backend='nccl' contradicts the live state, which has backend='gloo'"):
        PartialState(backend="nccl")
    assert PartialState().num_processes == dist.get_world_size()  # the failed one left no state behind


def test_a_live_group_is_not_what_the_first_instance_asked_for() -> None:
    run_on_ranks(1, contradict_before_adoption)


def test_a_backend_for_another_device_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"backend='nccl' works on cuda, but this process uses device 'cpu'.*'gloo'"):
        PartialState(cpu=True, backend="nccl")
    with pytest.raises(ValueError, match=r"backend='cuda:nccl' names no backend for device 'cpu'. Add cpu:gloo"):
        PartialState(cpu=True, backend="cuda:nccl")
    assert PartialState(cpu=True).backend == "gloo"  # alone and without MASTER_PORT: needs no port


def test_several_nodes_without_an_address_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="are several nodes, but MASTER_ADDR is not set"):
        PartialState()


def start_by_mpi(port: int) -> tuple[int, int, str]:
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    for name in [name for name in os.environ if name.endswith("RANK") or "WORLD_SIZE" in name or "MASTER" in name]:
        del os.environ[name]
    os.environ.update(PMI_RANK=rank, PMI_SIZE=size, MPI_LOCALRANKID=rank, MPI_LOCALNRANKS=size, MASTER_PORT=f"{port}")
    state = PartialState()
    state.wait_for_everyone()
    return state.process_index, state.num_processes, str(state.backend)


def start_by_slurm(port: int) -> tuple[int, int, str]:
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    for name in [name for name in os.environ if name.endswith("RANK") or "WORLD_SIZE" in name or "MASTER" in name]:
        del os.environ[name]
    os.environ.update(SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_STEP_NUM_TASKS=size, SLURM_STEP_ID="0")
    os.environ.update(SLURM_STEP_NODELIST="localhost", MASTER_PORT=f"{port}")
    state = PartialState()
    state.wait_for_everyone()
    return state.process_index, state.num_processes, str(state.backend)


def start_by_arguments(port: int) -> tuple[int, int, str]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in [name for name in os.environ if name.endswith("RANK") or "WORLD_SIZE" in name or "MASTER" in name]:
        del os.environ[name]
    state = PartialState(rank=rank, world_size=size, init_method=f"tcp://127.0.0.1:{port}")
    return state.process_index, state.num_processes, str(state.backend)


@pytest.mark.parametrize("start", [start_by_mpi, start_by_slurm, start_by_arguments])
def test_the_group_starts_from_other_launchers(start: Any) -> None:
    assert run_on_ranks(2, start, free_port(), init_group=False) == [(0, 2, "gloo"), (1, 2, "gloo")]


def adopt_a_later_group(port: int) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    del os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]
    state, also = PartialState(), AcceleratorState()
    run_late = state.on_process(process_index=0)(lambda: "ran")
    run_on_last = state.on_process(process_index=size - 1)(lambda: "ran")
    run_on_none, on_none_here = state.on_process(process_index=size), state.on_local_process(local_process_index=size)
    assert (state.num_processes, run_late(), run_on_last()) == (1, "ran", "ran")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    assert (state.process_index, state.num_processes, also.process_index) == (rank, size, rank)
    assert run_late() == ("ran" if rank == 0 else None)
    assert run_on_last() == ("ran" if rank == size - 1 else None)
    for decorator in (run_on_none, on_none_here):
        with pytest.raises(ValueError, match=rf"process_index={size} is out of range: there are \d process\(es\)"):
            decorator(lambda: "ran")()
    PartialState._refresh(device=torch.device("meta"), local_process_index=0, num_local_processes=1)
    assert (also.device.type, also.local_process_index, also.num_local_processes) == ("meta", 0, 1)
    state.wait_for_everyone()
    state.destroy_process_group()
    state.destroy_process_group()  # nothing left to do
    assert (state.process_index, state.num_processes) == (rank, size)  # as last known
    with pytest.raises(RuntimeError, match="wait_for_everyone needs the process group, which was destroyed"):
        state.wait_for_everyone()
    with (
        pytest.raises(RuntimeError, match="main_process_first needs the process group, which was destroyed"),
        state.main_process_first(),
    ):
        pass


def test_a_group_that_comes_alive_later_is_adopted_and_may_end() -> None:
    run_on_ranks(2, adopt_a_later_group, free_port(), init_group=False)


def adopt_a_bound_group(port: int) -> list[str]:
    rank = int(os.environ["RANK"])
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cuda"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    devices = [f"{PartialState().device}"]
    reset_state()
    group = dist.group.WORLD
    assert group is not None
    group.bound_device_id = torch.device("cuda", rank + 1)  # as the Trainer does with devices=[1, 2]
    devices.append(f"{PartialState().device}")
    group.bound_device_id = None
    return devices


def test_a_groups_own_device_is_adopted() -> None:
    assert run_on_ranks(2, adopt_a_bound_group, free_port(), init_group=False) == [
        ["cuda:0", "cuda:1"],
        ["cuda:0" if torch.cuda.device_count() < 2 else "cuda:1", "cuda:2"],
    ]


def be_started_by_lightning() -> None:
    os.environ["NODE_RANK"] = "0"
    rank = int(os.environ.pop("RANK"))
    state = PartialState()
    assert not dist.is_initialized()
    assert (state.process_index, state.num_processes, state.local_process_index) == (rank, 2, rank)
    assert (state.distributed_type, state.backend) == (DistributedType.MULTI_CPU, None)
    state.wait_for_everyone()
    with state.main_process_first(), state.local_main_process_first():
        pass
    with pytest.raises(RuntimeError, match=r"check_trigger needs the process group, which starts in Trainer.fit"):
        state.check_trigger()


def test_in_a_process_of_lightnings_launcher_nothing_waits() -> None:
    run_on_ranks(2, be_started_by_lightning, init_group=False)


def keep_a_notebooks_group() -> bool:
    os.environ["FORK_LAUNCHED"] = "1"
    PartialState().destroy_process_group()
    return dist.is_initialized()


def destroy_a_subgroup() -> bool:
    state = PartialState()
    group = dist.new_group()
    state.wait_for_everyone()  # new_group returns where this process is connected; others may still be connecting to it
    state.destroy_process_group(group)
    state.wait_for_everyone()
    return dist.is_initialized()


def test_destroying_groups() -> None:
    assert run_on_ranks(1, keep_a_notebooks_group) == [True]
    assert run_on_ranks(2, destroy_a_subgroup) == [True, True]


def run_decorated() -> list[Any]:
    state = PartialState()

    def name(prefix: str = "process") -> str:
        """Say which."""
        return f"{prefix} {state.process_index}"

    last = state.num_processes - 1
    decorated = [
        state.on_main_process(name),
        state.on_local_main_process(name),
        state.on_last_process(name),
        state.on_process(process_index=last)(name),
        state.on_process(name, process_index=0),
        state.on_local_process(local_process_index=last)(name),
        state.on_local_process(name, local_process_index=0),
    ]
    for function in decorated:
        assert (function.__name__, function.__doc__) == ("name", "Say which.")
        assert inspect.signature(function) == inspect.signature(name)
    for index in (-1, *([last + 1] if last else [])):
        with pytest.raises(ValueError, match=f"process_index={index} is out of range"):
            state.on_process(process_index=index)
        with pytest.raises(ValueError, match=f"local_process_index={index} is out of range"):
            state.on_local_process(local_process_index=index)
    if not last:  # alone, it is every process, as in Accelerate
        assert state.on_process(process_index=3)(name)("rank") == "rank 0"
        assert state.on_local_process(name, local_process_index=3)("rank") == "rank 0"
    with pytest.raises(ValueError, match=r"process_index is missing. Write @state.on_process\(process_index=0\)"):
        state.on_process(name)
    with pytest.raises(ValueError, match=r"Write @state.on_local_process\(local_process_index=0\)"):
        state.on_local_process(name)
    with pytest.raises(TypeError, match="process_index must be an int, got '0'"):
        state.on_process(process_index="0")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="expects a function, got 'name'"):
        state.on_main_process("name")  # type: ignore[arg-type]
    return [function(prefix="rank") for function in decorated]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_decorators(world_size: int) -> None:
    first, last = "rank 0", f"rank {world_size - 1}"
    expected = [first, first, last, last, first, last, first]
    for rank, results in enumerate(run_on_ranks(world_size, run_decorated)):
        assert results == [who if who == f"rank {rank}" else None for who in expected]


def print_everywhere(folder: str) -> None:
    with open(f"{folder}/{PartialState().process_index}", "w") as file:
        PartialState().print("hello", file=file)


def test_print_prints_on_the_nodes_first_process(tmp_path: Any) -> None:
    run_on_ranks(2, print_everywhere, str(tmp_path))
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["hello\n", ""]
