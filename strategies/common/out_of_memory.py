"""A rank that runs out of memory: where, and with what peak."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType

import torch

from ...state.rendezvous import is_cause, text_of
from ..upstream.lightning import Trainer

_SECTIONS = {
    "training_step": "in the forward",
    "backward": "in the backward",
    "optimizer_step": "in the optimizer step",
    "validation_step": "in validation",
    "test_step": "in a test",
    "predict_step": "in a prediction",
    "save_checkpoint": "in a save",
}
"""By the names of functions, Lightning's and ours: the innermost one in a traceback says what failed."""
_SIGNS = (
    "OutOfMemoryError",  # in a report of another error
    "out of memory",  # of CUDA, HIP, XPU and MPS
    "DefaultCPUAllocator: can't allocate memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",  # as Lightning and Accelerate have it
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that this process has too little memory, on the device or of the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS) and is_cause(error)


def describe_failure(error: BaseException, trainer: Trainer | None, device: torch.device) -> str:
    """Return what has failed where, and the peak of the memory if there was too little: what follows "process 1"."""
    text = f"failed with {text_of(error)}"
    if trainer is not None:
        stage = str(trainer.state.stage.name).lower().replace("_", " ")  # type: ignore[union-attr]
        section = _section(error.__traceback__) or f"while {stage}"
        batch = f", batch {trainer.fit_loop.epoch_loop.batch_idx}" if trainer.training else ""
        place = f"{trainer.global_step} (epoch {trainer.current_epoch}{batch})"
        text = f"failed {section} at step {place} with {text_of(error)}"
    if not is_out_of_memory(error):
        return text
    return (
        f"{text.rstrip('.')}. Its memory peaked at {_peak(device)}. Resume from the last checkpoint with smaller "
        "batches, or with more accumulation; 'accelight plan' lists what a process needs."
    )


def _section(frames: TracebackType | None) -> str:
    found = ""
    while frames is not None:
        found = _SECTIONS.get(frames.tb_frame.f_code.co_name, found)
        frames = frames.tb_next
    return found


def _peak(device: torch.device) -> str:
    with contextlib.suppress(ImportError, RuntimeError):  # Windows has no `resource`, some devices have no statistics
        if device.type != "cpu":
            used, kept = torch.accelerator.max_memory_allocated(device), torch.accelerator.max_memory_reserved(device)
            return f"{used / 2**30:.2f} GiB in tensors on {device}, {kept / 2**30:.2f} GiB with what torch keeps"
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.2f} GiB of resident memory"
    return "an unknown size"
