"""A resume in plain Lightning's order, though sharded weights can be loaded only once the model is sharded.

The Trainer reads a checkpoint, shows it to the hooks and restores callbacks before the strategy sets up the model. So
what callbacks do in ``on_fit_start`` (a `Timer` that has run out, the parameter groups of `BaseFinetuning`) follows the
checkpoint, and optimizers are restored after that. A strategy that had all of this done after its setup, as Lightning's
sharded ones have, would restore callbacks when ``on_fit_start`` is over.

Source of the order: lightning 2.6 ``Trainer._run``.
"""

from __future__ import annotations

from collections.abc import Callable

STORED_WEIGHTS = "sharded_state_dict"
"""Key in the Trainer's checkpoint, while it is restored, of what loads weights that only shards can take."""


class HeldWeights:
    """Holds the loading of weights back until the strategy has set up their model."""

    def __init__(self) -> None:
        self._load: Callable[[], None] | None = None
        self._has_model = False

    def begin(self) -> None:
        """Begin a run: its model is yet to be set up."""
        self._load, self._has_model = None, False

    def load(self, load: Callable[[], None]) -> None:
        """Call ``load`` now, or at the run's `model_is_set_up`."""
        if self._has_model:
            load()
        else:
            self._load = load

    def model_is_set_up(self) -> None:
        """Load what was held back."""
        self._has_model = True
        load, self._load = self._load, None
        if load is not None:
            load()
