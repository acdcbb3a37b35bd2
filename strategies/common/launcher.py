"""Lightning's own launcher, telling the processes it starts how many they are on this node."""

from __future__ import annotations

import os

from typing_extensions import override

from ..upstream.lightning import _SubprocessScriptLauncher


class SubprocessScriptLauncher(_SubprocessScriptLauncher):
    """Sets ``LOCAL_WORLD_SIZE`` as torchrun does, so that `PartialState` knows its rank before the group exists."""

    @override
    def _call_children_scripts(self) -> None:
        if self.num_processes * self.num_nodes > 1:  # a process that is alone leaves nothing behind for later ones
            os.environ["LOCAL_WORLD_SIZE"] = str(self.num_processes)
        super()._call_children_scripts()
