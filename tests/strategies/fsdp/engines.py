"""The engines that most tests of FSDP run on."""

from __future__ import annotations

from typing import Any

BLOCKS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp1": {"fsdp_version": 1, "use_orig_params": False, **BLOCKS},
    "fsdp1_orig_params": {"fsdp_version": 1, "use_orig_params": True, **BLOCKS},
    "fsdp2": {"fsdp_version": 2, **BLOCKS},
}
