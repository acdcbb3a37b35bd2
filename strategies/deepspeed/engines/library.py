"""DeepSpeed itself: imported when it is used, on the device that is used, without its noise."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...common.requirements import require_installed
from ..config.settings import DeepSpeedSettings
from .scalars import allow_scalars

OLDEST = "0.19.8"


def require_deepspeed(who: str) -> None:
    """Check that a DeepSpeed is installed that works here; nothing is imported.

    Raises:
        ModuleNotFoundError: If not.
    """
    require_installed(who, "DeepSpeed", "deepspeed", OLDEST)


def choose_accelerator(device: torch.device) -> None:
    """Make DeepSpeed compute on ``device``'s kind: it decides once, when it is first imported.

    Raises:
        RuntimeError: If it has decided otherwise already.
    """
    if "deepspeed" not in sys.modules:
        os.environ.setdefault("DS_ACCELERATOR", device.type)
    chosen = deepspeed_library().accelerator.get_accelerator()._name
    if chosen != device.type:
        raise RuntimeError(
            f"DeepSpeed computes on {chosen!r} in this process, and the Trainer on {device.type!r}. Set "
            f"DS_ACCELERATOR={device.type} in the environment before deepspeed is imported, or change "
            "Trainer(accelerator=...)."
        )


def deepspeed_library() -> Any:
    """Import DeepSpeed, without the warnings that torch would repeat at every step because of it."""
    if "deepspeed" in sys.modules:
        _silence()
        allow_scalars()
        return sys.modules["deepspeed"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = importlib.import_module("deepspeed")
    _silence()
    allow_scalars()
    return library


def forget_lost_groups() -> None:
    """Let DeepSpeed make its groups anew where those that it keeps went with a default group.

    It forgets them when they are destroyed through ``deepspeed.comm``, and is not told of
    ``torch.distributed.destroy_process_group()``.
    """
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    if groups._WORLD_GROUP is None:
        return
    try:
        torch.distributed.get_global_rank(groups._WORLD_GROUP, 0)
    except ValueError:  # torch does not know it any more
        groups._release_process_group_references()


@functools.cache
def _silence() -> None:
    warnings.filterwarnings("ignore", r".*`torch\.distributed\.\w+_tensor` is deprecated.*", FutureWarning)
    importlib.import_module("deepspeed.utils").logger.addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of DeepSpeed's log is shown: not that an optimizer is untested, since others than Adam work."""
    return "ZeRO with an untested optimizer" not in record.getMessage()


@contextmanager
def quietly() -> Iterator[None]:
    """Drop what DeepSpeed prints inside this context; its log and its exceptions stay."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def check_async_io(settings: DeepSpeedSettings) -> None:
    """Check, if anything is offloaded to NVMe, that DeepSpeed's asynchronous I/O can be built here.

    Raises:
        RuntimeError: If not; it says what to install.
    """
    devices = {"optimizer": settings.offload_optimizer_device, "param": settings.offload_param_device}
    where = [what for what, device in devices.items() if device == "nvme"]
    if not where:
        return
    from deepspeed.ops.op_builder import AsyncIOBuilder

    with ninja_on_path():
        if AsyncIOBuilder().is_compatible(verbose=False):
            return
    raise RuntimeError(
        f"offload_{where[0]}_device='nvme' needs DeepSpeed's asynchronous I/O, which cannot be built here: it needs a "
        "C++ compiler and libaio with its headers (apt install libaio-dev). Install them, or offload to 'cpu'."
    )


@contextmanager
def ninja_on_path() -> Iterator[None]:
    """Let torch find the ninja that is installed beside this Python, also where its folder is not on the PATH."""
    before = os.environ.get("PATH", "")
    if shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before
