"""``local_state_dict``: flat shards saved as they are, back in the same arrangement, refused in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader, train_plain

WRAP: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
CASE = Case(accumulate=3, clip_norm=0.5, optimizer="adamw")
VARIANTS: dict[str, dict[str, Any]] = {
    "flat": {},
    "orig_params": {"use_orig_params": True},
    "ignored": {"ignored_modules": r"model\.head"},
    "kept_gathered": {"sharding_strategy": "SHARD_GRAD_OP"},
    "in_the_background": {"async_save": True},
}


def _fit(options: dict[str, Any], epochs: int, save_to: str | None, resume_from: str | None) -> tuple[Outcome, str]:
    outcome = Outcome()
    given = {"state_dict_type": "local_state_dict", "fsdp_version": 1, **WRAP, **options}
    trainer = quiet_trainer(
        AccelFSDPStrategy(**given),
        dist.get_world_size(),
        max_epochs=epochs,
        accumulate_grad_batches=CASE.accumulate,
        gradient_clip_val=CASE.clip_norm,
    )

    class Module(TinyModule):
        def on_train_batch_end(self, *_: Any) -> None:
            last = self.trainer.global_step == 3 and self.trainer.current_epoch == 0  # inside the loop
            if save_to is not None and last:
                self.trainer.save_checkpoint(save_to)

    try:
        trainer.fit(Module(CASE, outcome), rank_loader(2), ckpt_path=resume_from)
    except (RuntimeError, ValueError) as error:
        return outcome, str(error)
    return outcome, ""


@pytest.mark.core("flat", "ignored")
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_goes_on_from_flat_shards(variant: str, tmp_path: Path) -> None:
    path, options = str(tmp_path / "local.ckpt"), VARIANTS[variant]
    run_on_ranks(2, _fit, options, 1, path, None)
    assert sorted(file.name for file in Path(path).iterdir()) == [
        "meta.pt",
        "rank_00000_of_00002.pt",
        "rank_00001_of_00002.pt",
    ]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["local.ckpt"]
    expected = train_plain(CASE, 2).losses
    outcome, error = run_on_ranks(2, _fit, options, 2, None, path)[0]
    assert not error
    assert outcome.losses == pytest.approx(expected[len(expected) // 2 :], rel=1e-5)


@pytest.mark.parametrize(
    ("world_size", "options", "match"),
    [
        (
            3,
            {},
            "rank_00000_of_00002.pt, rank_00001_of_00002.pt: a local_state_dict can be restored only on the same",
        ),
        (2, {"auto_wrap_policy": "no_wrap"}, "the units differ: "),
        (2, {"fsdp_version": 2, "state_dict_type": "sharded_state_dict"}, "Load it with fsdp_version=1"),
    ],
    ids=["processes", "units", "engine"],
)
def test_another_arrangement_is_refused(world_size: int, options: dict[str, Any], match: str, tmp_path: Path) -> None:
    path = str(tmp_path / "local.ckpt")
    run_on_ranks(2, _fit, {}, 1, path, None)
    if options.get("auto_wrap_policy") == "no_wrap":
        options = {**options, "transformer_cls_names_to_wrap": None}
    for _, error in run_on_ranks(world_size, _fit, options, 2, None, path):
        assert match in error
