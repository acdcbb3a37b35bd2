"""The state of the fp16 gradient scaler in a checkpoint, for whichever precision plugin looks for it."""

from __future__ import annotations

from typing import Any

_PLUGINS = ("AccelFSDPPrecision", "FSDPPrecision", "MixedPrecision")
"""Ours and Lightning's; each looks under its class's name."""


def share_scaler_state(checkpoint: dict[str, Any]) -> None:
    """Put the gradient scaler's state under all the names that it is looked for under."""
    state = next((checkpoint[name] for name in _PLUGINS if name in checkpoint), None)
    if state is not None:
        checkpoint.update(dict.fromkeys(_PLUGINS, state))
