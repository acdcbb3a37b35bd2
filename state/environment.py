"""This process's rank and world, from the launcher's environment variables. Reads a mapping, changes nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Launcher = Literal["none", "torchrun", "mpi", "slurm", "lightning"]

DEFAULT_PORT = 29500  # torchrun's own default

# (rank, size, local rank, local size) of each MPI: Open MPI, MPICH and Intel MPI, MVAPICH2.
_MPI_VARIABLES = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    tuple(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
)


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """One process's place among all of them, as its launcher reports it."""

    launcher: Launcher = "none"
    process_index: int = 0
    num_processes: int = 1
    local_process_index: int = 0
    num_local_processes: int = 1
    node: str | None = None
    """Name that the processes of one node share. None where the launcher counts node by node, so that
    ``process_index - local_process_index`` distinguishes the nodes."""
    main_address: str | None = None
    main_port: int | None = None

    @property
    def deferred(self) -> bool:
        """Whether Lightning's launcher started this process: its group begins in ``Trainer.fit`` and not before."""
        return self.launcher == "lightning"

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> ProcessInfo:
        """Read torchrun's variables, else MPI's, else SLURM's; one process where there are none.

        Without ``LOCAL_RANK``, torchrun-like variables mean one process a node (as Kubeflow starts them). Without
        ``LOCAL_WORLD_SIZE``, all processes count as one node.

        Raises:
            RuntimeError: If the environment is set halfway or contradicts itself; the message names the variables.
        """
        if "RANK" in env:
            return _from_torchrun(env)
        for names in _MPI_VARIABLES:
            # Under srun with PMI2 only SLURM knows the place on the node.
            pmi_of_slurm = names[0] == "PMI_RANK" and "SLURM_PROCID" in env and names[2] not in env
            if (names[0] in env or names[1] in env) and not pmi_of_slurm:
                return _from_mpi(env, names)
        if "SLURM_PROCID" in env and (info := _from_slurm(env)) is not None:
            return info
        if "WORLD_SIZE" in env or "LOCAL_RANK" in env:
            return _from_lightning(env)
        return cls()

    @classmethod
    def of_group(cls, env: Mapping[str, str], process_index: int, num_processes: int) -> ProcessInfo:
        """Return the facts about a process in a live group: the group is right, the environment fills in the node.

        An environment that does not fit the group is not used: then all processes count as one node.
        """
        one_node = cls(
            process_index=process_index,
            num_processes=num_processes,
            local_process_index=process_index,
            num_local_processes=num_processes,
        )
        if "RANK" not in env and "LOCAL_RANK" in env:
            # Lightning's launcher; its teardown removes WORLD_SIZE, and NODE_RANK may be the user's own.
            return _of_lightning_group(env, one_node)
        try:
            info = cls.from_env(env)
        except RuntimeError:
            return one_node
        return info if (info.process_index, info.num_processes) == (process_index, num_processes) else one_node


def _from_torchrun(env: Mapping[str, str]) -> ProcessInfo:
    if "WORLD_SIZE" not in env:
        raise RuntimeError(
            f"RANK={env['RANK']} is set but WORLD_SIZE is not. Start with torchrun (it sets both), or unset RANK."
        )
    rank, world_size = _index_and_size(env, "RANK", "WORLD_SIZE")
    local_rank = _integer(env, "LOCAL_RANK") if "LOCAL_RANK" in env else 0
    default_size = world_size if "LOCAL_RANK" in env else 1
    local_world_size = _integer(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else default_size
    _check_local(local_rank, local_world_size, rank, world_size, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    main = _main_address(env, several_nodes=local_world_size < world_size)
    return _place("torchrun", (rank, world_size), (local_rank, local_world_size), main)


def _from_mpi(env: Mapping[str, str], names: tuple[str, ...]) -> ProcessInfo:
    missing = [name for name in names if name not in env]
    if missing:
        found = ", ".join(f"{name}={env[name]}" for name in names if name in env)
        raise RuntimeError(
            f"The MPI environment is only partly set: {found}, but not {', '.join(missing)}. "
            "Start with mpirun, or with torchrun."
        )
    rank, size = _index_and_size(env, names[0], names[1])
    local_rank, local_size = _index_and_size(env, names[2], names[3])
    _check_local(local_rank, local_size, rank, size, names[2], names[3])
    main = _main_address(env, several_nodes=local_size < size)
    # mpirun may deal ranks out round robin over the nodes
    return _place("mpi", (rank, size), (local_rank, local_size), main, node=_hostname())


def _place(
    launcher: Launcher,
    place: tuple[int, int],
    local: tuple[int, int],
    main: tuple[str | None, int | None],
    node: str | None = None,
) -> ProcessInfo:
    """Put together a process's index and number, those on its node, and the main process's address and port."""
    return ProcessInfo(
        launcher=launcher,
        process_index=place[0],
        num_processes=place[1],
        local_process_index=local[0],
        num_local_processes=local[1],
        node=node,
        main_address=main[0],
        main_port=main[1],
    )


def _from_slurm(env: Mapping[str, str]) -> ProcessInfo | None:
    """Return the place in a job step; None where a batch script or a shell runs without ``srun``."""
    in_step = "SLURM_STEP_ID" in env or "SLURM_STEPID" in env
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    if size_name not in env:
        if _integer(env, "SLURM_PROCID") == 0 and not in_step:
            return None
        raise RuntimeError(f"SLURM_PROCID={env['SLURM_PROCID']} is set but {size_name} is not. Start with srun.")
    rank, size = _index_and_size(env, "SLURM_PROCID", size_name)
    if rank == 0 and size > 1 and not in_step:
        # The batch script itself and an interactive shell carry the job's size too, but run once.
        if env.get("SLURM_JOB_NAME") in ("bash", "interactive"):
            return None
        raise RuntimeError(
            f"{size_name}={size}, but this process was not started by srun (SLURM_STEP_ID is not set): "
            f"waiting for {size - 1} others would never end. Start with `srun python ...`, or unset {size_name}."
        )
    if size == 1:
        return ProcessInfo(launcher="slurm")
    if "SLURM_LOCALID" not in env:
        raise RuntimeError(f"SLURM_PROCID={rank} is set but SLURM_LOCALID is not. Start with srun.")
    local_rank = _integer(env, "SLURM_LOCALID")
    local_size = _tasks_on_this_node(env, size)
    _check_local(local_rank, local_size, rank, size, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    main = _slurm_main_address(env, several_nodes=local_size < size)
    # srun may deal ranks out cyclically over the nodes
    return _place("slurm", (rank, size), (local_rank, local_size), main, node=env.get("SLURM_NODEID"))


def _tasks_on_this_node(env: Mapping[str, str], size: int) -> int:
    """Read ``SLURM_STEP_TASKS_PER_NODE``, for example ``2(x3),1``: three nodes with two tasks, then one with one."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if text is None:
        return size
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise RuntimeError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not of the form '2(x3),1'. Start with srun.")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _integer(env, "SLURM_NODEID") if "SLURM_NODEID" in env else 0
    if node >= len(counts):
        raise RuntimeError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE={text!r} has {len(counts)} node(s).")
    return counts[node]


def _slurm_main_address(env: Mapping[str, str], *, several_nodes: bool) -> tuple[str | None, int | None]:
    """Return MASTER_ADDR and MASTER_PORT where set, else the job's first host and a port made from the job's id."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    defaults: dict[str, str] = {}
    if nodes:
        # "gpu[03-07,9],cpu1" begins with gpu03
        first = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
        if first is not None:
            defaults["MASTER_ADDR"] = first[1] + (first[2] or "")
    if (job := env.get("SLURM_JOB_ID", "")).isdigit():
        defaults["MASTER_PORT"] = str(15000 + int(job) % 10000)  # jobs that share a host must not share a port
    return _main_address({**defaults, **env}, several_nodes=several_nodes)


def _from_lightning(env: Mapping[str, str]) -> ProcessInfo:
    """Read what Lightning's own launcher sets in the processes it starts: everything of torchrun's but RANK."""
    needed = ("WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in env]
    if missing:
        found = ", ".join(f"{name}={env[name]}" for name in ("WORLD_SIZE", "LOCAL_RANK") if name in env)
        raise RuntimeError(
            f"{found} is set, but RANK is not (nor {', '.join(missing)}, as Lightning's launcher would): the rank of "
            "this process is unknown. Start with torchrun (it sets all of them), or unset WORLD_SIZE and LOCAL_RANK."
        )
    local_rank, world_size = _index_and_size(env, "LOCAL_RANK", "WORLD_SIZE")
    node_rank = _integer(env, "NODE_RANK")
    if node_rank > 0 and "LOCAL_WORLD_SIZE" not in env:
        raise RuntimeError(
            f"NODE_RANK={node_rank} and LOCAL_RANK={local_rank}, but neither RANK nor LOCAL_WORLD_SIZE is set: the "
            "rank of this process is unknown. Set LOCAL_WORLD_SIZE to the number of processes per node (accelight's "
            "strategies do), or start with torchrun."
        )
    local_world_size = _integer(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else world_size
    rank = node_rank * local_world_size + local_rank
    if rank >= world_size:
        raise RuntimeError(
            f"NODE_RANK={node_rank}, LOCAL_WORLD_SIZE={local_world_size} and LOCAL_RANK={local_rank} make this process "
            f"{rank}, but WORLD_SIZE={world_size} has only 0 to {world_size - 1}. Start with torchrun."
        )
    _check_local(local_rank, local_world_size, rank, world_size, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return ProcessInfo(
        launcher="lightning",
        process_index=rank,
        num_processes=world_size,
        local_process_index=local_rank,
        num_local_processes=local_world_size,
    )


def _of_lightning_group(env: Mapping[str, str], one_node: ProcessInfo) -> ProcessInfo:
    rank, world_size = one_node.process_index, one_node.num_processes
    try:
        local_rank = _integer(env, "LOCAL_RANK")
        node_rank = _integer(env, "NODE_RANK") if "NODE_RANK" in env else 0
        if "LOCAL_WORLD_SIZE" in env:
            local_world_size = _integer(env, "LOCAL_WORLD_SIZE")
        else:  # Lightning starts equally many on every node
            local_world_size = (rank - local_rank) // node_rank if node_rank else world_size
        _check_local(local_rank, local_world_size, rank, world_size, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    except RuntimeError:
        return one_node
    return replace(one_node, local_process_index=local_rank, num_local_processes=local_world_size)


def _main_address(env: Mapping[str, str], *, several_nodes: bool) -> tuple[str | None, int | None]:
    if "MASTER_ADDR" not in env and several_nodes:
        return None, None  # an error only for those who start the group from it: see `rendezvous`
    port = _integer(env, "MASTER_PORT") if "MASTER_PORT" in env else None
    return env.get("MASTER_ADDR", "127.0.0.1"), port


def _index_and_size(env: Mapping[str, str], index_name: str, size_name: str) -> tuple[int, int]:
    index, size = _integer(env, index_name), _integer(env, size_name)
    if size < 1 or not 0 <= index < size:
        raise RuntimeError(
            f"{index_name}={index} does not fit {size_name}={size}: it must be from 0 to {size_name} - 1. "
            "Start with torchrun, or unset both."
        )
    return index, size


def _check_local(local: int, local_size: int, index: int, size: int, local_name: str, local_size_name: str) -> None:
    if not (0 <= local < local_size <= size and local <= index):
        raise RuntimeError(
            f"{local_name}={local} and {local_size_name}={local_size} do not fit process {index} of {size}: "
            f"{local_name} must be from 0 to {local_size_name} - 1, and {local_size_name} at most {size}. "
            "Start with torchrun."
        )


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise RuntimeError(f"{name}={env[name]!r} is not an integer. Start with torchrun, or unset it.") from None


def _hostname() -> str:
    import socket

    return socket.gethostname()
