"""Checkpoints of sharded models: the same training after a resume, whatever saved it and whatever loads it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from safetensors.torch import load_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from accelight.checkpoint import merge_fsdp_weights
from accelight.checkpoint.manifest import read_manifest
from accelight.strategies import AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.engines import ENGINES
from tests.strategies.oracle import (
    BATCH_SIZE,
    Block,
    Case,
    Outcome,
    TinyModel,
    TinyModule,
    assert_same,
    quiet_trainer,
    rank_loader,
    train_plain,
)

CASE = Case(accumulate=3, clip_norm=0.5, optimizer="adamw")


def _trainer(engine: str, kind: str, epochs: int, **more: Any) -> Trainer:
    strategy = AccelFSDPStrategy(state_dict_type=kind, **ENGINES[engine])
    return quiet_trainer(
        strategy,
        dist.get_world_size(),
        max_epochs=epochs,
        accumulate_grad_batches=CASE.accumulate,
        gradient_clip_val=CASE.clip_norm,
        **more,
    )


def _loader() -> DataLoader[tuple[Tensor, ...]]:
    return rank_loader(2, 2 * BATCH_SIZE // dist.get_world_size())  # the same global batches on 1 and 2


def _train(engine: str, kind: str, epochs: int, save_to: str | None, resume_from: str | None) -> Outcome:
    outcome = Outcome()
    trainer, module = _trainer(engine, kind, epochs), TinyModule(CASE, outcome)
    trainer.fit(module, _loader(), ckpt_path=resume_from, weights_only=True if resume_from else None)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    outcome.global_step = trainer.global_step
    state = trainer.strategy.lightning_module_state_dict()
    outcome.weights = {  # sharded ones are gathered here, so that both kinds can be compared
        name.removeprefix("model."): (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in state.items()
    }
    return outcome


def _expected() -> tuple[Outcome, Outcome]:
    """What plain training leaves, and what its second epoch alone adds."""
    whole = train_plain(CASE, 2)
    second = Outcome(whole.losses[len(whole.losses) // 2 :], [], whole.weights, whole.global_step)
    return whole, second


@pytest.mark.core("fsdp1-full", "fsdp2-sharded")
@pytest.mark.parametrize("kind", ["full_state_dict", "sharded_state_dict"])
@pytest.mark.parametrize("saved_by", ENGINES)
def test_resume_continues_as_if_nothing_had_happened(saved_by: str, kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint.ckpt")
    run_on_ranks(2, _train, saved_by, kind, 1, path, None)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["checkpoint.ckpt"]
    _, second = _expected()
    for loaded_by in ENGINES:
        found = run_on_ranks(2, _train, loaded_by, "full_state_dict", 2, None, path)[0]
        assert_same(found, second)


def test_a_full_checkpoint_is_plain_lightnings_too(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint.ckpt")
    run_on_ranks(2, _train, "fsdp1", "full_state_dict", 1, path, None)
    module = TinyModule.load_from_checkpoint(path, case=CASE, outcome=Outcome(), weights_only=True)
    reference = train_plain(Case(accumulate=3, clip_norm=0.5, optimizer="adamw", epochs=1), 2)
    for name, tensor in module.model.state_dict().items():
        torch.testing.assert_close(tensor, reference.weights[name], rtol=1e-5, atol=1e-6)
    stored = torch.load(path, weights_only=True)["optimizer_states"][0]
    plain = torch.optim.AdamW(TinyModel().parameters())
    plain.load_state_dict(stored)  # numbered parameters: what a single-device Trainer does on resume
    assert len(plain.state) == len(list(TinyModel().parameters()))


def _save_with_ties(path: str) -> None:
    module = TinyModule(CASE, Outcome())
    first, second = (cast("Block", block) for block in module.model.blocks)
    second.linear.weight = first.linear.weight
    strategy = AccelFSDPStrategy(fsdp_version=2, auto_wrap_policy="no_wrap", state_dict_type="sharded_state_dict")
    trainer = quiet_trainer(strategy, 2, max_steps=1)
    trainer.fit(module, _loader())
    trainer.save_checkpoint(path)


def test_ties_are_recorded_for_the_merger(tmp_path: Path) -> None:
    run_on_ranks(2, _save_with_ties, str(tmp_path / "tied"))
    manifest = read_manifest(tmp_path / "tied")
    assert manifest is not None
    assert dict(manifest.ties) == {"model.blocks.1.linear.weight": "model.blocks.0.linear.weight"}
    assert manifest.model_prefix == "state_dict"
    assert manifest.module_attribute == "model"
    merge_fsdp_weights(tmp_path / "tied", tmp_path / "merged", strip_prefix="auto")
    merged = TinyModel()
    merged.blocks[1].linear.weight = merged.blocks[0].linear.weight  # type: ignore[union-attr]
    load_model(merged, tmp_path / "merged" / "model.safetensors")  # knows the alias from the file's header


def _load_with_another_shape(path: str, strict: bool) -> tuple[str, bool]:
    module = TinyModule(CASE, Outcome())
    extra = torch.nn.Linear(2, 2)
    module.extra = extra
    del module.model.head
    module.model.head = torch.nn.Linear(8, 3, bias=False)
    module.strict_loading = strict
    before = extra.weight.detach().clone()
    trainer = _trainer("fsdp2", "sharded_state_dict", 1)
    try:
        trainer.validate(module, _loader(), ckpt_path=path, weights_only=True, verbose=False)
    except RuntimeError as error:
        return str(error), False
    return "", torch.equal(cast("DTensor", extra.weight).full_tensor(), before)


@pytest.mark.parametrize("kind", ["full_state_dict", "sharded_state_dict"])
def test_strict_loading_lists_every_name(kind: str, tmp_path: Path) -> None:
    """Lightning's FSDP ignores strict_loading for sharded checkpoints (Lightning-AI/pytorch-lightning#20274)."""
    path = str(tmp_path / "checkpoint.ckpt")
    run_on_ranks(2, _train, "fsdp2", kind, 1, path, None)
    for message, _ in run_on_ranks(2, _load_with_another_shape, path, True):
        assert "missing in the checkpoint: ['extra.bias', 'extra.weight']" in message
        assert "unexpected in the checkpoint: ['model.head.bias']" in message
        assert "strict_loading=False" in message
    assert run_on_ranks(2, _load_with_another_shape, path, False) == [("", True)] * 2


def _load_error(path: str) -> tuple[str, str]:
    try:
        _trainer("fsdp2", "sharded_state_dict", 1).validate(
            TinyModule(CASE, Outcome()), _loader(), ckpt_path=path, weights_only=True, verbose=False
        )
    except (OSError, ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    [(kind, message)] = run_on_ranks(1, _load_error, str(folder))
    assert kind == "ValueError"
    assert "a folder without `.metadata`" in message
    torch.save({"weights": 1}, tmp_path / "file")
    [(kind, message)] = run_on_ranks(1, _load_error, str(tmp_path / "file"))
    assert kind == "ValueError"
    assert "no 'state_dict' in it" in message
    [(kind, message)] = run_on_ranks(1, _load_error, str(tmp_path / "nothing"))
    assert kind == "FileNotFoundError"


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("executed", "w"))


def test_a_hostile_metadata_file_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hostile"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(_Evil()))
    [(kind, message)] = run_on_ranks(1, _load_error, str(folder))
    assert kind == "RuntimeError"
    assert f"process 0: CheckpointError: {folder}/.metadata: the pickle asks for" in message
    assert "is not allowed in a checkpoint" in message
    assert not (tmp_path / "executed").exists()


def _save_twice(path: str) -> list[str]:
    trainer, module = _trainer("fsdp2", "sharded_state_dict", 1), TinyModule(CASE, Outcome())
    trainer.fit(module, _loader())
    Path(f"{Path(path).parent}/.{Path(path).name}.unfinished").mkdir(exist_ok=True)  # as a killed run leaves it
    trainer.save_checkpoint(path)
    trainer.save_checkpoint(path)
    return sorted(item.name for item in Path(path).parent.iterdir())


def test_a_save_replaces_the_checkpoint_of_that_name(tmp_path: Path) -> None:
    assert run_on_ranks(2, _save_twice, str(tmp_path / "last"))[0] == ["last"]


def _save_error(path: str, kind: str, ranks: list[int]) -> str:
    """Train, then save on some ranks; what they are told."""
    trainer, module = _trainer("fsdp2", kind, 1), TinyModule(CASE, Outcome())
    trainer.fit(module, _loader())
    try:
        if dist.get_rank() in ranks:
            trainer.save_checkpoint(path)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_failed_save_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for message in run_on_ranks(2, _save_error, str(tmp_path / "file" / "checkpoint"), "sharded_state_dict", [0, 1]):
        assert "failed on rank 0" in message


def test_a_save_on_one_rank_alone_is_an_error_and_no_hang(tmp_path: Path) -> None:
    """The usual `if rank == 0: save` hangs with a sharded model elsewhere (huggingface/accelerate#2000)."""
    messages = run_on_ranks(2, _save_error, str(tmp_path / "checkpoint"), "sharded_state_dict", [0], group_timeout_s=3)
    assert "trainer.save_checkpoint was called on process 0 of 2 only" in messages[0]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    for message in run_on_ranks(2, _save_error, str(tmp_path / "precious"), "full_state_dict", [0, 1]):
        assert "IsADirectoryError" in message
    assert (tmp_path / "precious").is_dir()


def _save_onto(engine: str, kind: str, folder: str) -> dict[str, str]:
    """Save onto what is there; say what each save was told."""
    told, precious = {}, Path(folder)
    trainer, module = _trainer(engine, kind, 1), TinyModule(CASE, Outcome())
    trainer.fit(module, _loader())
    names = ["new", "results", "notes", *(["empty"] if kind != "full_state_dict" else []), "last.ckpt"]
    for name in names:
        try:
            trainer.save_checkpoint(precious / name)
            told[name] = ""
        except RuntimeError as error:
            told[name] = f"{error} ({type(error.__cause__).__name__})"
    resumed = _trainer(engine, kind, 2)
    resumed.fit(TinyModule(CASE, Outcome()), _loader(), ckpt_path=precious / "last.ckpt", weights_only=False)
    told["resumed"] = f"{resumed.current_epoch}"
    return told


def _everything_in(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files if path.suffix == ".txt"}


@pytest.mark.parametrize(
    ("engine", "kind"),
    [("fsdp1", "sharded_state_dict"), ("fsdp2", "sharded_state_dict"), ("fsdp1", "local_state_dict"),
     ("fsdp2", "full_state_dict")],
)  # fmt: skip
def test_a_save_removes_nobody_elses_files(engine: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "results" / "plots").mkdir(parents=True)
    (tmp_path / "results" / "plots" / "a.txt").write_text("plot")
    (tmp_path / "results" / "table.txt").write_text("table")
    (tmp_path / "notes").write_text("notes")
    (tmp_path / "empty").mkdir()
    before = _everything_in(tmp_path)
    told = run_on_ranks(2, _save_onto, engine, kind, str(tmp_path))
    for rank, messages in enumerate(told):
        assert messages["new"] == messages["last.ckpt"] == messages.get("empty", "") == ""
        assert (
            "results is a folder but not a checkpoint: it is not overwritten. It holds plots, table.txt"
            in (messages["results"])
        )
        assert messages["results"].endswith("(IsADirectoryError)" if rank == 0 else "(NoneType)")
        assert messages["resumed"] == "2"
        assert bool(messages["notes"]) == (kind != "full_state_dict")  # a file replaces a file, as torch.save does
    assert _everything_in(tmp_path) == before


def _save_again(path: str) -> None:
    trainer, module = _trainer("fsdp2", "sharded_state_dict", 1), TinyModule(CASE, Outcome())
    trainer.fit(module, _loader())
    trainer.save_checkpoint(path)
    if dist.get_rank() == 0:
        (Path(path) / "mine").mkdir()
        (Path(path) / "mine" / "a.txt").write_text("mine")
        (Path(path) / "b.txt").write_text("mine, too")
    dist.barrier()
    before = os.stat(Path(path) / ".metadata").st_ino
    dist.barrier()
    trainer.save_checkpoint(path)
    assert os.stat(Path(path) / ".metadata").st_ino != before
    dist.barrier()  # rank 0 removes it for all
    trainer.strategy.remove_checkpoint(path)
    dist.barrier()


def test_what_is_put_beside_a_checkpoint_outlives_it(tmp_path: Path) -> None:
    run_on_ranks(2, _save_again, str(tmp_path / "last"))
    assert _everything_in(tmp_path) == {"last/b.txt": "mine, too", "last/mine/a.txt": "mine"}
    assert {path.name for path in (tmp_path / "last").iterdir()} == {"b.txt", "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def _other_number_of_optimizers(path: str) -> str:
    module = TinyModule(CASE, Outcome())
    module.automatic_optimization = False
    parameters = [list(module.model.embed.parameters()), list(module.model.blocks.parameters())]
    setattr(module, "configure_optimizers", lambda: [torch.optim.AdamW(some) for some in parameters])  # noqa: B010
    strategy = AccelFSDPStrategy(fsdp_version=1, use_orig_params=True, state_dict_type="sharded_state_dict")
    try:
        quiet_trainer(strategy, 1, max_epochs=2).fit(module, _loader(), ckpt_path=path, weights_only=True)
    except ValueError as error:
        return str(error)
    return ""


def test_another_number_of_optimizers_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    run_on_ranks(1, _train, "fsdp2", "sharded_state_dict", 1, path, None)
    [message] = run_on_ranks(1, _other_number_of_optimizers, path)
    assert "holds 1 optimizers, but configure_optimizers returned 2" in message


class WithoutOptimizer(TinyModule):
    def configure_optimizers(self) -> None:  # type: ignore[override]
        return None


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    return trainer.strategy.lightning_module_state_dict()


def _full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _train_nothing(engine: str, kind: str, path: str) -> tuple[int, bool]:
    torch.manual_seed(0)
    trainer, module = _trainer(engine, kind, 1), WithoutOptimizer(CASE, Outcome())
    trainer.fit(module, _loader())
    trainer.save_checkpoint(path)
    saved = {name: _full(tensor).clone() for name, tensor in _weights(trainer).items()}
    torch.manual_seed(1)
    trainer, module = _trainer(engine, kind, 2), WithoutOptimizer(CASE, Outcome())
    trainer.fit(module, _loader(), ckpt_path=path, weights_only=False)
    same = all(torch.equal(_full(tensor), saved[name]) for name, tensor in _weights(trainer).items())
    return trainer.current_epoch, same


@pytest.mark.parametrize("kind", ["sharded_state_dict", "full_state_dict"])
@pytest.mark.parametrize("engine", ["fsdp1_orig_params", "fsdp2"])
def test_without_an_optimizer(engine: str, kind: str, tmp_path: Path) -> None:
    assert run_on_ranks(2, _train_nothing, engine, kind, str(tmp_path / "last")) == [(2, True)] * 2


def _scale(version: int, save_to: str | None, resume_from: str | None) -> float:
    strategy = AccelFSDPStrategy(fsdp_version=version, state_dict_type="sharded_state_dict")
    trainer = quiet_trainer(strategy, 2, max_epochs=1, precision="16-mixed")
    module = TinyModule(CASE, Outcome())
    trainer.fit(module, _loader(), ckpt_path=resume_from, weights_only=resume_from is not None)
    scaler = strategy.precision_plugin.scaler
    assert scaler is not None
    if save_to is not None:
        scaler.update(new_scale=128.0)  # not the value a new one starts with
        trainer.save_checkpoint(save_to)
    return scaler.get_scale()


def test_the_gradient_scaler_is_saved_and_restored(tmp_path: Path) -> None:
    """A scaler that starts anew after a resume skips steps again (huggingface/accelerate#4289)."""
    path = str(tmp_path / "checkpoint")
    assert run_on_ranks(2, _scale, 1, path, None) == [128.0] * 2
    for version in (1, 2):
        assert run_on_ranks(2, _scale, version, None, path) == [128.0] * 2


class Renamed(TinyModule):
    """Has the model under another name, and says so to checkpoints of before."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(CASE, outcome)
        self.inner = self.model
        del self.model

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {
            name.replace("model.", "inner."): tensor for name, tensor in checkpoint["state_dict"].items()
        }


def _resume_renamed(engine: str, path: str) -> bool:
    torch.manual_seed(0)
    trainer = _trainer(engine, "full_state_dict", 1)
    trainer.fit(TinyModule(CASE, Outcome()), _loader())
    trainer.save_checkpoint(path)
    saved = {name: tensor.clone() for name, tensor in _weights(trainer).items()}
    trainer = _trainer(engine, "full_state_dict", 1)
    module = Renamed(Outcome())
    trainer.fit(module, _loader(), ckpt_path=path)  # is at its end already: it only loads
    loaded = _weights(trainer)
    return all(torch.equal(loaded[name.replace("model.", "inner.")], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize("engine", ["fsdp1_orig_params", "fsdp2"])
def test_names_can_be_changed_in_on_load_checkpoint(engine: str, tmp_path: Path) -> None:
    assert run_on_ranks(2, _resume_renamed, engine, str(tmp_path / "last")) == [True] * 2


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(AssertionError, match=r"text is not a checkpoint: torch.save\(\) writes a zip file"):
        run_on_ranks(1, _train, "fsdp2", "full_state_dict", 1, None, str(tmp_path / "text"))
