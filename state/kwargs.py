"""Arguments for ``torch.distributed.init_process_group``, checked where they are given."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from .arguments import named_arguments


@named_arguments
@dataclass(frozen=True)
class InitProcessGroupKwargs:
    """Arguments for :class:`PartialState`'s process group: ``PartialState(**InitProcessGroupKwargs(...).to_kwargs())``.

    Unlike Accelerate's class of the same name, an unset backend stays unset, so that the device decides.

    Source: accelerate 1.15 ``utils/dataclasses.py`` (``InitProcessGroupKwargs``).
    """

    backend: str | None = None
    """For example ``"nccl"``; None takes torch's default for the device."""
    init_method: str | None = None
    """URL of the rendezvous; None takes what the launcher set."""
    timeout: timedelta | None = None
    """Of every collective; None takes torch's default for the backend."""

    def __post_init__(self) -> None:
        if self.timeout is not None and not isinstance(self.timeout, timedelta):
            raise TypeError(
                f"timeout must be a datetime.timedelta, got {self.timeout!r}. Write timeout=timedelta(seconds=...)."
            )

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments that differ from the defaults."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def check_group_arguments(arguments: dict[str, Any]) -> None:
    """Raise ``TypeError`` for what ``init_process_group`` would not take."""
    from torch.distributed import init_process_group

    known = [name for name in inspect.signature(init_process_group).parameters if not name.startswith("_")]
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise TypeError(f"Unknown argument(s) {', '.join(unknown)}: init_process_group takes {', '.join(known)}.")
    InitProcessGroupKwargs(timeout=arguments.get("timeout"))
    if ("rank" in arguments) != ("world_size" in arguments):
        raise ValueError("rank and world_size must be given together. Give both, or neither (the launcher knows them).")
