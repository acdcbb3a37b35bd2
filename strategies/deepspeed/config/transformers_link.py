"""What transformers is told about DeepSpeed: ``from_pretrained``, ``generate`` and others ask for it."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from .hf_config import HfDeepSpeedConfig

_MODULE = "transformers.integrations.deepspeed"


def tell_transformers(config: HfDeepSpeedConfig | None) -> None:
    """Make ``config`` the one that transformers sees, or none.

    transformers keeps a weak reference only: the caller keeps ``config`` alive. Where transformers is not installed, or
    not imported and stage 3 (which decides how it builds models) is not asked for, there is nobody to tell.
    """
    module = _transformers(needed=config is not None and config.is_zero3())
    if module is None:
        return
    if config is None:
        module.unset_hf_deepspeed_config()
    else:
        module.set_hf_deepspeed_config(config)


def _transformers(*, needed: bool) -> Any:
    loaded: ModuleType | None = sys.modules.get(_MODULE)
    if loaded is not None or not needed:
        return loaded
    try:
        return importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        return None
