"""`notebook_launcher`: a function on several processes, started from a notebook or an interactive shell."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes

from ..state import ProcessInfo, reset_state

_GRACE_S = 5.0  # for processes that are asked to end


def notebook_launcher(function: Callable[..., Any], args: Sequence[Any] = (), *, num_processes: int) -> None:
    """Run a function on several processes of this machine, as Accelerate's function of this name does.

    Each process is a fork of this one: it has all that the notebook has defined so far. The function begins with the
    variables that torchrun sets, so it can do everything that a script under torchrun can. What it changes is gone
    when it ends: write what you need later into a file, such as a checkpoint. With one process, the function runs
    in the notebook's own process, and in a script that torchrun has started on as many processes, in each of these.

    Example::

        def train():
            trainer = Trainer(strategy="accel_fsdp2", accelerator="cpu", devices=2, max_epochs=1)
            trainer.fit(BoringModel())
            trainer.save_checkpoint("sharded.ckpt")

        notebook_launcher(train, num_processes=2)

    Args:
        function: The work of each process. Create Trainer and model in it.
        args: Arguments of the function.
        num_processes: How many to start: with GPUs, at most as many as there are. A Trainer in ``function`` has the
            same number of ``devices``.

    Raises:
        ValueError: If ``num_processes`` is less than 1.
        TypeError: If ``function`` cannot be called, ``args`` is no sequence, or ``num_processes`` is no int.
        RuntimeError: If a fork of this process cannot train: a cell has used a GPU or started a process group, or a
            launcher has started another number of processes.
        torch.multiprocessing.ProcessRaisedException: If the function raises. The message holds the traceback of the
            first process that failed; the others are ended.
    """
    if not callable(function):
        raise TypeError(
            f"function must be a function, got {function!r}. Pass the function itself, notebook_launcher(train, ...), "
            "not what it returns, notebook_launcher(train(), ...)."
        )
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise TypeError(f"args must be a tuple or list of the function's arguments, got {args!r}. Use ({args!r},).")
    if not isinstance(num_processes, int) or isinstance(num_processes, bool):
        raise TypeError(f"num_processes must be an int, got {num_processes!r}.")
    if num_processes < 1:
        raise ValueError(f"num_processes must be at least 1, got {num_processes}.")
    launched = ProcessInfo.from_env(os.environ)
    if launched.num_processes == num_processes:
        function(*args)
        return
    _check_fork(num_processes, launched)
    with socket.socket() as found:  # a MASTER_PORT that an earlier cell has left behind may be in use
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    started = start_processes(  # type: ignore[no-untyped-call]
        _run, (function, args, num_processes, port), nprocs=num_processes, join=False, start_method="fork"
    )
    try:
        while not started.join(grace_period=_GRACE_S):
            pass
    except ProcessRaisedException as error:
        if "Cannot re-initialize" not in str(error):
            raise
        raise RuntimeError(
            f"The processes of notebook_launcher(..., num_processes={num_processes}) are forks of the notebook, and a "
            "GPU that the notebook has used cannot be used in forks. Restart the kernel, and use GPUs "
            "(torch.cuda.is_available(), tensor.cuda(), a Trainer's fit) only inside the function."
        ) from error
    finally:  # some are still running if the user has interrupted the cell
        for process in started.processes:
            process.terminate()
        for process in started.processes:
            process.join(_GRACE_S)
            process.kill()


def _check_fork(num_processes: int, launched: ProcessInfo) -> None:
    call = f"notebook_launcher(..., num_processes={num_processes})"
    if launched.num_processes > 1:
        raise RuntimeError(
            f"{call} runs in one of {launched.num_processes} processes of a launcher (RANK="
            f"{os.environ.get('RANK')}). Use num_processes={launched.num_processes}, or unset RANK, WORLD_SIZE and "
            "LOCAL_RANK if they are left over from another job."
        )
    if dist.is_initialized():
        raise RuntimeError(
            f"{call} forks this process, but a cell has started a process group (a Trainer's fit does), which does not "
            "survive a fork. Call torch.distributed.destroy_process_group() first, or restart the kernel and train "
            "only inside the function."
        )


def _run(rank: int, function: Callable[..., Any], args: Sequence[Any], num_processes: int, port: int) -> None:
    os.environ.update(
        RANK=f"{rank}",
        LOCAL_RANK=f"{rank}",
        GROUP_RANK="0",
        WORLD_SIZE=f"{num_processes}",
        LOCAL_WORLD_SIZE=f"{num_processes}",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=f"{port}",
        TORCHELASTIC_RUN_ID="notebook",  # Lightning then compares the Trainer's devices with WORLD_SIZE
    )
    # As torchrun, which sets OMP_NUM_THREADS=1. And an OpenMP pool of the notebook's does not survive the fork: GNU's
    # waits forever for threads that are not there.
    torch.set_num_threads(1)
    reset_state()  # the notebook may have asked `PartialState()` which process it is
    function(*args)
    if dist.is_initialized():
        dist.destroy_process_group()
