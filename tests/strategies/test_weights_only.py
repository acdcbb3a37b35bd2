"""``weights_only`` of ``fit`` and the like: what the call says holds for its checkpoint, and for no later one."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader, strategy_named


class WithObject(TinyModule):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["path"] = PurePosixPath("an/object")


def _call(engine: str, name: str, folder: str) -> None:
    trainer = quiet_trainer(strategy_named(engine), 1, max_epochs=1)
    trainer.fit(WithObject(Case(), Outcome()), rank_loader(1))
    path = f"{folder}/saved"
    trainer.save_checkpoint(path)
    for weights_only in (None, False, None, True):
        trainer = quiet_trainer(strategy_named(engine), 1, max_epochs=2)
        module = WithObject(Case(), Outcome())
        resume = partial(getattr(trainer, name), module, rank_loader(1), ckpt_path=path, weights_only=weights_only)
        if weights_only is False:
            resume()
        else:
            with pytest.raises((pickle.UnpicklingError, RuntimeError), match="PurePosixPath"):
                resume()


@pytest.mark.core("fit", "fsdp1-predict", "fsdp2-validate", "zero2-test")
@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "zero2", "zero3"])
def test_weights_only_of_the_call_is_followed(engine: str, name: str, tmp_path: Any) -> None:
    run_on_ranks(1, _call, engine, name, str(tmp_path))
