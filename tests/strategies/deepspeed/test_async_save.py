"""`async_save` of ZeRO: the files of a synchronous save while training goes on, errors on all processes at one step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from accelight.callbacks import ShardedEMA
from accelight.state import reset_state
from accelight.strategies import AccelDeepSpeedStrategy
from accelight.strategies.common.checkpoint_files import NewFolder
from accelight.strategies.deepspeed.files import LocalFiles
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import CONFIGS, ds_config, fp16_on_cpu, whole_weights
from tests.strategies.full_disk import content
from tests.strategies.kill_while_saving import kill_once
from tests.strategies.late_saves import late_saves
from tests.strategies.oracle import Case, Outcome, TinyModule, assert_same, quiet_trainer, rank_loader, train_plain
from tests.strategies.saves_in_background import (
    NUM_STEPS,
    assert_fails_alike,
    crash_while_saving,
    fail_second_save,
    replace_while_saving,
)

BEGINS = ((NewFolder, "begin"),)
WRITES = (LocalFiles, "save")
CASE = Case(optimizer="adamw")


class _Module(TinyModule):
    """Keeps a module among its hyperparameters, and an object beside the weights."""

    def __init__(self, loss: torch.nn.Module, *, is_frozen: bool = False, manual: bool = False) -> None:
        super().__init__(CASE, Outcome())
        self.save_hyperparameters("loss")
        self.model.blocks[0].requires_grad_(not is_frozen)
        self.automatic_optimization = not manual

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["parameter"] = torch.nn.Parameter(torch.ones(2))


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    **{name: (config, {}, {}) for name, config in CONFIGS.items()},
    "stage2-bf16": (CONFIGS["stage2"], {}, {"precision": "bf16-mixed"}),
    "stage0-fp16": (CONFIGS["stage0"], {}, {"precision": "16-mixed"}),
    "stage3-fp16-beside": (
        ds_config(3, stage3_gather_16bit_weights_on_model_save=True), {}, {"precision": "16-mixed"}
    ),
    "stage1-accumulated": (CONFIGS["stage1"], {}, {"accumulate_grad_batches": 3, "max_epochs": 2}),
    "stage2-manual": (CONFIGS["stage2"], {"manual": True}, {}),
    "stage2-frozen": (CONFIGS["stage2"], {"is_frozen": True}, {}),
    "stage3-frozen": (CONFIGS["stage3"], {"is_frozen": True}, {}),
}  # fmt: skip
"""The config, options of the module and of the Trainer."""


def _fit(
    config: dict[str, Any],
    callbacks: list[Callback],
    *,
    in_background: bool,
    module: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = 0  # stage 3 numbers the parameters of a process, and saves the numbers
    reset_state()
    is_frozen = (module or {}).get("is_frozen", False)
    strategy = AccelDeepSpeedStrategy(hf_ds_config=config, async_save=in_background, save_trainable_only=is_frozen)
    trainer = quiet_trainer(strategy, dist.get_world_size(), callbacks=callbacks, **{"max_epochs": 1, **options})
    trainer.fit(_Module(torch.nn.Linear(2, 2), **(module or {})), rank_loader(dist.get_world_size()))


class _Saves(Callback):
    """Saves after some batches."""

    def __init__(self, folder: str) -> None:
        self.folder, self.num_batches = folder, 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.num_batches += 1
        if self.num_batches in (2, 5):
            trainer.save_checkpoint(f"{self.folder}/{self.num_batches}")


def _save_late(kind: str, folder: str) -> list[str]:
    config, module, options = KINDS[kind]

    def fit(name: str, *, in_background: bool) -> None:
        callbacks = [_Saves(f"{folder}/{name}"), *([ShardedEMA(decay=0.5)] if "frozen" in kind else [])]
        torch.manual_seed(0)
        _fit(config, callbacks, in_background=in_background, module=module, **options)

    with fp16_on_cpu():
        fit("now", in_background=False)
        with late_saves() as saved:
            fit("later", in_background=True)
    return saved


def _content(folder: Path) -> dict[str, Any]:
    """Return the bytes of files; the description of averages has the time of the save in it."""
    found: dict[str, Any] = content(folder)
    return {name: one for name, one in found.items() if not name.endswith(".metadata")}


@pytest.mark.core("stage0-fp16", "stage2-manual", "stage3-frozen", "stage3-fp16")
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_of_its_step(kind: str, tmp_path: Path) -> None:
    saved = run_on_ranks(2, _save_late, kind, str(tmp_path))[0]
    assert len(saved) == 2
    now, later = _content(tmp_path / "now"), _content(tmp_path / "later")
    assert sorted(now) == sorted(later)
    assert [name for name in now if now[name] != later[name]] == []


def _in_background(config: dict[str, Any], callback: Callback) -> None:
    _fit(config, [callback], in_background=True)


def _replace_while_saving(folder: str) -> None:
    replace_while_saving(partial(_in_background, CONFIGS["stage2"]), BEGINS, folder)
    assert Path(folder, "last/latest").exists()


def test_an_older_checkpoint_is_removed_when_the_newer_one_is_complete(tmp_path: Path) -> None:
    run_on_ranks(2, _replace_while_saving, str(tmp_path))


def _fail(stage: int, folder: str, fails_at: int) -> tuple[str, int]:
    return fail_second_save(partial(_in_background, CONFIGS[f"stage{stage}"]), WRITES, folder, fails_at)


@pytest.mark.core("2-2-2", "7-2-3")
@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 1), (2, 2), (2, 3)])
@pytest.mark.parametrize("fails_at", [2, NUM_STEPS])
def test_an_error_surfaces_at_one_step_on_all_processes(
    world_size: int, stage: int, fails_at: int, tmp_path: Path
) -> None:
    assert_fails_alike(run_on_ranks(world_size, _fail, stage, str(tmp_path), fails_at), tmp_path, fails_at)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first"]


def _crash(folder: str, fails_too: bool) -> None:
    crash_while_saving(partial(_in_background, CONFIGS["stage3"]), BEGINS, WRITES, folder, fails_too=fails_too)


def test_a_crash_of_training_leaves_the_checkpoint_complete(tmp_path: Path) -> None:
    run_on_ranks(2, _crash, str(tmp_path), False)
    run_on_ranks(2, _crash, str(tmp_path), True)


def _resume(stage: int, folder: Path) -> Outcome:
    """Train the first epoch with a save after each step, and the second from the last, with the same Trainer."""
    outcome = Outcome()
    strategy = AccelDeepSpeedStrategy(hf_ds_config=CONFIGS[f"stage{stage}"], async_save=True)
    keeps = ModelCheckpoint(folder, "{step}", save_top_k=1, every_n_train_steps=1, save_last="link")
    trainer = quiet_trainer(strategy, 2, callbacks=[keeps], enable_checkpointing=True)
    for epochs, path in ((1, None), (2, f"{folder}/last.ckpt")):
        trainer.fit_loop.max_epochs = epochs
        module = TinyModule(CASE, outcome)
        trainer.fit(module, rank_loader(2), ckpt_path=path)
    outcome.weights, outcome.global_step = whole_weights(module), trainer.global_step
    trainer.save_checkpoint(folder / "after")  # not in the background: it is there when this returns
    assert (folder / "after/latest").is_file()
    return outcome


@pytest.mark.core("3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_model_checkpoint_keeps_one_and_a_link_to_resume_from(stage: int, tmp_path: Path) -> None:
    for found in run_on_ranks(2, _resume, stage, tmp_path)[:1]:
        assert_same(found, train_plain(CASE, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "last.ckpt", f"step={2 * NUM_STEPS}.ckpt"]
    assert (tmp_path / "last.ckpt").resolve() == tmp_path / f"step={2 * NUM_STEPS}.ckpt"


@pytest.mark.parametrize(
    ("form", "only_one", "seconds"),
    [
        pytest.param("zero2", False, 0.2, marks=pytest.mark.exhaustive),
        pytest.param("zero3", True, 0.3, marks=pytest.mark.exhaustive),
    ],
)
def test_training_killed_while_it_saves_leaves_a_checkpoint(
    form: str, only_one: bool, seconds: float, tmp_path: Path
) -> None:
    """``python -m tests.strategies.kill_while_saving`` in short."""
    kill_once(tmp_path, form, True, only_one, seconds)


# ---------------------------------------------------------------------- what is refused
def test_values_that_are_none_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="async_save='process' writes sharded checkpoints of AccelFSDPStrategy alone"):
        AccelDeepSpeedStrategy(async_save="process")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"async_save must be False .* got 'later'"):
        AccelDeepSpeedStrategy(async_save="later")  # type: ignore[arg-type]


def _refuse() -> str:
    config = {**CONFIGS["stage2"], "checkpoint": {"checkpoint_serialization": False}}
    with pytest.raises(ValueError, match="async_save=True copies the state to host memory") as caught:
        _fit(config, [], in_background=True)
    return str(caught.value)


def test_what_torch_does_not_write_is_refused_before_training() -> None:
    assert "not DeepSpeed's TorchCheckpointEngine" in run_on_ranks(1, _refuse)[0]
