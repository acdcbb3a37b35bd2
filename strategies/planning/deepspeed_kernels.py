"""DeepSpeed without its compiled operations, which would write memory that a plan does not have."""

from __future__ import annotations

import os
from typing import Any


class _NoKernels:
    """Stands for the compiled Adam on the CPU."""

    def create_adam(self, *_: Any) -> None:
        """Do nothing: steps read and write nothing."""

    adam_update = adam_rollback = destroy_adam = create_adam


def without_compiled_kernels() -> None:
    """Let DeepSpeed compile and run none of its own kernels, for the rest of this process.

    Raises:
        RuntimeError: If DeepSpeed computes on an accelerator in this process already.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.comm.torch as communication
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import CPUAdamBuilder

    if get_accelerator()._name != "cpu":
        raise RuntimeError(
            f"DeepSpeed computes on {get_accelerator()._name!r} in this process, and plans are made on the CPU. Set "
            "DS_ACCELERATOR=cpu in the environment, or plan in a script of its own."
        )
    communication.build_shm_op = lambda: None
    CPUAdamBuilder.load = lambda self, verbose=True: _NoKernels()
