"""How the Trainer's calls (``fit``, ``validate``, ...) begin: processes are started, and arguments noted."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from ..upstream.lightning import _Launcher, _SubprocessScriptLauncher


class NotingLauncher(_Launcher):
    """Notes what a strategy is not told: ``weights_only`` of ``Trainer.fit(weights_only=...)`` and the like.

    Lightning (2.6) forgets it where a strategy restores checkpoints after its setup.
    """

    weights_only: bool | None = None
    """Of the running call; None where it was not given, or nothing runs."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("trainer", None)
        return self._call(function, *args, **kwargs)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.weights_only = inspect.signature(function).bind(*args, **kwargs).arguments.get("weights_only")
        try:
            return function(*args, **kwargs)
        finally:
            self.weights_only = None

    @override
    def kill(self, signum: Any) -> None:
        pass  # whoever started the processes looks after them


class SubprocessScriptLauncher(_SubprocessScriptLauncher, NotingLauncher):
    """Lightning's own; sets ``LOCAL_WORLD_SIZE`` as torchrun does.

    `PartialState` knows its rank from that before the group exists.
    """

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().launch(self._call, function, *args, **kwargs)

    @override
    def _call_children_scripts(self) -> None:
        if self.num_processes * self.num_nodes > 1:  # a process that is alone leaves nothing behind for later ones
            os.environ["LOCAL_WORLD_SIZE"] = str(self.num_processes)
        super()._call_children_scripts()
