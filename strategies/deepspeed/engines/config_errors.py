"""What DeepSpeed says of a config that it does not understand, in a line for each key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def readable_config_errors() -> Iterator[None]:
    """Let an engine be made inside this context.

    Raises:
        ValueError: With each key that DeepSpeed does not know, and the one that was meant, or does not take; or if the
            device lacks the precision.
    """
    try:
        yield
    except ValueError as error:
        if lacking := re.fullmatch(r"Type (\w+) is not supported on your device\.", str(error)):
            raise ValueError(
                f"DeepSpeed does not compute in {lacking[1]} on this device. Use another Trainer(precision=...), "
                "'bf16-mixed' or '32-true', and leave the fp16 section out of the DeepSpeed config, or another device."
            ) from None
        if type(error).__name__ != "ValidationError" or not hasattr(error, "errors"):  # pydantic's
            raise
        known = _keys_of(error)
        lines = [_line(found, known) for found in error.errors()]
        raise ValueError("\n".join(["DeepSpeed does not take this config:", *lines])) from None


def _line(found: dict[str, Any], known: list[str]) -> str:
    key = ".".join(str(part) for part in found["loc"])
    if found["type"] != "extra_forbidden":
        return f"- {key}: {found['input']!r}. {found['msg']}."
    near = difflib.get_close_matches(key, known, n=1)
    return f"- {key}: there is no such key." + (f" Did you mean {near[0]!r}?" if near else "")


def _keys_of(error: Any) -> list[str]:
    """Return the keys of the section that the error is about."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return list(DeepSpeedZeroConfig.model_fields) if error.title == DeepSpeedZeroConfig.__name__ else []
