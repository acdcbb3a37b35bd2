"""DeepSpeed as a library: imported on first use, checked versions, builds of its ops, and scalar parameters."""

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
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..common.config import require_installed
from ..sharded_tensors.user_code import as_library
from ..upstream.patches import Patches
from .ds_config import DeepSpeedSettings
from .upstream import build_lock

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
            f"DeepSpeed computes on {chosen!r} in this process, but the Trainer computes on {device.type!r}. Set "
            f"DS_ACCELERATOR={device.type} in the environment before deepspeed is imported, or change "
            "Trainer(accelerator=...)."
        )


def deepspeed_library() -> Any:
    """Import DeepSpeed, without the warnings that torch would repeat at every step because of it."""
    if "deepspeed" not in sys.modules:
        with warnings.catch_warnings():  # which forgets what has been shown: not at each call
            warnings.simplefilter("ignore")
            importlib.import_module("deepspeed")
    _silence()
    return sys.modules["deepspeed"]


def forget_lost_groups() -> None:
    """Make DeepSpeed create its groups again where those that it keeps ended with a default group.

    It forgets them when they are destroyed through ``deepspeed.comm``, and does not learn of
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
        f"offload_{where[0]}_device='nvme' needs DeepSpeed's asynchronous I/O, which cannot be built on this system: "
        "it needs a C++ compiler and libaio with its headers (apt install libaio-dev). Install them, or offload to "
        "'cpu'."
    )


@contextmanager
def ninja_on_path() -> Iterator[None]:
    """Put the ninja that is installed next to this Python on the PATH that torch searches."""
    before = os.environ.get("PATH", "")
    if shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before


# ------------------------------------------------------------------------------------------------
# Locks left by a killed build, for which torch would wait forever without a message.


_LONGEST_BUILD_S = 600.0
_LOOK_S = 0.2


def check_build_locks(*ops: str) -> None:
    """Wait until nobody's locks of these ops are left behind, before DeepSpeed compiles or loads them.

    A lock that a process on this machine holds open belongs to a running build, which torch waits for. Any other may
    belong to another machine with the same home folder: this waits for it, with a warning, as long as a build may take.

    Args:
        *ops: DeepSpeed's names of the ops, as ``cpu_adam``.

    Raises:
        RuntimeError: If a lock is, or becomes, too old for a build; nothing is deleted.

    Source: torch 2.13 ``utils/file_baton.py``: the holder keeps the file open, and removes it in the end. From 2.15 on,
    the system frees a lock with the process that has it, and the file stays.
    """
    for op in set(ops) - _loaded():
        lock, is_warned = build_lock(op), False
        while lock is not None and (age := _age_of_left(lock)) is not None:
            found = f"DeepSpeed's op {op} is locked by {lock}, which no process on this machine has open"
            advice = f"If no other machine builds it, a killed process left it: rm '{lock}'"
            if age > _LONGEST_BUILD_S:
                raise RuntimeError(
                    f"{found}, and which is {age / 60:.0f} minutes old: torch would wait for it forever. {advice}, and "
                    "start again."
                )
            if not is_warned:
                left_s = _LONGEST_BUILD_S - age
                warnings.warn(f"{found}: waiting for at most {left_s:.0f} s. {advice}.", stacklevel=2)
                is_warned = True
            time.sleep(_LOOK_S)


def ops_of_optimizer(settings: DeepSpeedSettings) -> Iterator[str]:
    """Yield the op that DeepSpeed compiles for the optimizer that the config defines, if any."""
    name = "adam" if settings.defines_adam else settings.optimizer_type
    if name in ("adam", "lamb", "lion", "adagrad") and not settings.optimizer_params.get("torch_adam"):
        yield f"cpu_{name}" if settings.offloads_optimizer else f"fused_{name}"


def _loaded() -> set[str]:
    """Return the ops that this process has already."""
    module = sys.modules.get("deepspeed.ops.op_builder.builder")
    return set() if module is None else set(module.OpBuilder._loaded_ops)


def _age_of_left(lock: Path) -> float | None:
    """Return the seconds since a lock was made that no process on this machine has open; None without one."""
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return None
    return None if is_open(lock) or not lock.exists() else age  # it may have ended meanwhile


def is_open(path: Path) -> bool:
    """Whether a process on this machine has the file open, as far as ``/proc`` shows."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == str(path):
                return True
        except OSError:  # closed meanwhile, or another user's
            continue
    return False


# ------------------------------------------------------------------------------------------------
# Parameters without a dimension (a temperature, CLIP's ``logit_scale``), which DeepSpeed cannot handle.
#
# DeepSpeed 0.19 views what it broadcasts as bytes, and a tensor without a dimension has no such view; it
# multiplies gradients in place with a tensor of one dimension. These parameters have one dimension while it does so.


def allow_scalars() -> Patches:
    """Make DeepSpeed's engines, partitioning and ``GatheredParameters`` accept parameters without a dimension.

    Returns:
        What undoes it.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init

    patches = Patches("scalars")
    weights, gradients = _around(lambda one: None if hasattr(one, "ds_id") else one), _around(lambda one: one.grad)
    patches.share(DeepSpeedEngine, "_broadcast_model", weights)
    patches.share(DeepSpeedEngine, "clip_fp32_gradients", gradients)
    patches.share(Init, "_zero_init_param", _partitioning)
    patches.share(GatheredParameters, "__exit__", _leaving)
    return patches


def _around(choose: Callable[[Any], Any]) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Return a decorator that runs a method of engines while these tensors of its parameters have one dimension."""

    def make(method: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(self: Any) -> None:
            with _in_one_dimension(filter(lambda one: one is not None, map(choose, self.module.parameters()))):
                method(self)

        return run

    return make


def _partitioning(partition: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def zero_init_param(self: Any, param: Any) -> None:
        if param.ndim:
            partition(self, param)
            return
        convert = self._convert_to_deepspeed_param

        def convert_scalar(scalar: Any) -> None:
            convert(scalar)
            scalar.data = scalar.data.view(1)  # until it is partitioned; it has noted its shape

        with Patches("scalars") as patches:
            patches.put(self, "_convert_to_deepspeed_param", convert_scalar)
            partition(self, param)

    return zero_init_param


def _leaving(leave: Callable[..., None]) -> Callable[..., None]:
    def exit_gathered(self: Any, *args: Any) -> None:
        for one in getattr(self, "params", None) or ():
            if not one.ndim and self.src_rank is not None:
                one.data = one.data.view(1)  # until it is partitioned
        leave(self, *args)

    return as_library(exit_gathered)


def is_gathered_by_user(parameter: Any) -> bool:
    """Return whether a parameter is inside of ``GatheredParameters``."""
    from deepspeed.runtime.zero.partition_parameters import DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR

    return bool(getattr(parameter, DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR, 0))


@contextmanager
def _in_one_dimension(tensors: Iterable[Any]) -> Iterator[None]:
    scalars = [one for one in tensors if not one.ndim]
    for one in scalars:
        one.data = one.data.view(1)
    try:
        yield
    finally:
        for one in scalars:
            one.data = one.data.view(())
