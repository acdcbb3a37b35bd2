"""The names for ``Trainer(strategy="...")``, whichever of accelight and Lightning is imported first."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .upstream.lightning_package import ROOTS, lightning_package, other_package_hint

if TYPE_CHECKING:
    from .deepspeed.strategy import AccelDeepSpeedStrategy
    from .fsdp.strategy import AccelFSDPStrategy

_REGISTRIES = {f"{root}.strategies": package for package, root in ROOTS.items()}
"""Module that has a registry, to its package."""


def _make_fsdp(package: str, **arguments: Any) -> AccelFSDPStrategy:
    _check_package(package)
    from .fsdp.strategy import AccelFSDPStrategy

    return AccelFSDPStrategy(**arguments)


def _make_deepspeed(package: str, **arguments: Any) -> AccelDeepSpeedStrategy:
    _check_package(package)
    from .deepspeed.strategy import AccelDeepSpeedStrategy

    return AccelDeepSpeedStrategy(**arguments)


def _check_package(package: str) -> None:
    if package != lightning_package():
        raise RuntimeError(f"This is the Trainer of {package}. {other_package_hint()}")


_FSDP: dict[str, tuple[str, dict[str, Any]]] = {
    name + suffix: (f"{which} with Accelerate's semantics{where}", {**version, **offload})
    for name, which, version in (
        ("accel_fsdp", "FSDP (version from FSDP_VERSION, else 1)", {}),
        ("accel_fsdp1", "FSDP1", {"fsdp_version": 1}),
        ("accel_fsdp2", "FSDP2", {"fsdp_version": 2}),
    )
    for suffix, where, offload in (("", "", {}), ("_offload", ", offloaded to host memory", {"cpu_offload": True}))
}
_OPTIMIZER_TO_CPU = {"offload_optimizer_device": "cpu"}
_ALL_TO_CPU = {**_OPTIMIZER_TO_CPU, "offload_param_device": "cpu"}
_ALL_TO_NVME = {
    f"offload_{what}_{how}": value
    for what in ("optimizer", "param")
    for how, value in (("device", "nvme"), ("nvme_path", "/local_nvme"))
}
_DEEPSPEED: dict[str, tuple[str, dict[str, Any]]] = {
    "accel_deepspeed": ("DeepSpeed (stage from ACCELERATE_DEEPSPEED_ZERO_STAGE, else 2)", {}),
    "accel_deepspeed_stage_1": ("DeepSpeed ZeRO stage 1", {"zero_stage": 1}),
    "accel_deepspeed_stage_2": ("DeepSpeed ZeRO stage 2", {"zero_stage": 2}),
    "accel_deepspeed_stage_2_offload": ("DeepSpeed ZeRO stage 2, offloaded", {"zero_stage": 2, **_OPTIMIZER_TO_CPU}),
    "accel_deepspeed_stage_3": ("DeepSpeed ZeRO stage 3", {"zero_stage": 3}),
    "accel_deepspeed_stage_3_offload": ("DeepSpeed ZeRO stage 3, offloaded", {"zero_stage": 3, **_ALL_TO_CPU}),
    "accel_deepspeed_stage_3_offload_nvme": (
        "DeepSpeed ZeRO stage 3, offloaded to NVMe (/local_nvme)",
        {"zero_stage": 3, **_ALL_TO_NVME},
    ),
}


def register_strategies() -> None:
    """Make the names known to Lightning: now if it is imported already, else as soon as it is.

    ``import accelight.strategies`` must not cost Lightning's import for those who only want a config dataclass, and
    sorted imports put it before Lightning's; hence the hook.
    """
    for name in _REGISTRIES:
        if name in sys.modules:
            _register(sys.modules[name])
        elif not any(isinstance(finder, _AfterLightning) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterLightning(name))


def _register(module: ModuleType) -> None:
    package = _REGISTRIES[module.__name__]
    # Factories: importing a strategy while Lightning is being imported would be a circle.
    for make, names in ((_make_fsdp, _FSDP), (_make_deepspeed, _DEEPSPEED)):
        for name, (description, arguments) in names.items():
            registered = partial(make, package)
            module.StrategyRegistry.register(name, registered, description=description, override=True, **arguments)


class _AfterLightning(MetaPathFinder):
    """Registers the names when a registry of Lightning's has been imported, then is gone.

    Args:
        name: The module that has it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
