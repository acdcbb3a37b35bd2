"""The names for ``Trainer(strategy="...")``, whichever of accelight and Lightning is imported first."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fsdp.strategy import AccelFSDPStrategy

_REGISTRY_MODULE = "lightning.pytorch.strategies"


def _make_fsdp(**arguments: Any) -> AccelFSDPStrategy:
    from .fsdp.strategy import AccelFSDPStrategy

    return AccelFSDPStrategy(**arguments)


_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    name + suffix: (f"{which} with Accelerate's semantics{where}", {**version, **offload})
    for name, which, version in (
        ("accel_fsdp", "FSDP (version from FSDP_VERSION, else 1)", {}),
        ("accel_fsdp1", "FSDP1", {"fsdp_version": 1}),
        ("accel_fsdp2", "FSDP2", {"fsdp_version": 2}),
    )
    for suffix, where, offload in (("", "", {}), ("_offload", ", offloaded to host memory", {"cpu_offload": True}))
}


def register_strategies() -> None:
    """Make the names known to Lightning: now if it is imported already, else as soon as it is.

    ``import accelight.strategies`` must not cost Lightning's import for those who only want a config dataclass, and
    sorted imports put it before Lightning's; hence the hook.
    """
    if _REGISTRY_MODULE in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterLightning) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterLightning())


def _register() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    for name, (description, arguments) in _NAMES.items():
        # A factory: importing the strategy while Lightning is being imported would be a circle.
        StrategyRegistry.register(name, _make_fsdp, description=description, override=True, **arguments)


class _AfterLightning(MetaPathFinder):
    """Registers the names when Lightning's registry has been imported, then is gone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
