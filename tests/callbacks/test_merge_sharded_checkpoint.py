"""`MergeShardedCheckpoint`: what training saved, as safetensors, however training goes on or ends."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accelight.callbacks import MergeShardedCheckpoint, ShardedEMA
from accelight.checkpoint import CheckpointError
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from accelight.strategies.fsdp.checkpoint import writer
from tests.ranks import run_on_ranks
from tests.scripts import run_script
from tests.strategies.oracle import Case, Outcome, TinyModule, build_model, dataset, quiet_trainer, rank_loader

NAMES = sorted(f"model.{name}" for name in build_model().state_dict())


def sharded(version: int = 2) -> Strategy:
    return AccelFSDPStrategy(fsdp_version=version, state_dict_type="sharded_state_dict")


class Recorder(Callback):
    """Keeps the weights at the end of each epoch, and the score to compare by."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.score = 0.0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights.append(whole_weights(trainer))
        pl_module.log("score", float(trainer.current_epoch != 1), rank_zero_only=False)  # the second epoch is the best


def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    weights = trainer.strategy.lightning_module_state_dict()
    whole = {name: getattr(one, "full_tensor", lambda one=one: one)().clone() for name, one in weights.items()}
    everyone: list[Any] = [None] * dist.get_world_size()  # FSDP1's shards are ShardedTensors or DTensors by kind
    dist.all_gather_object(everyone, whole if whole else None)
    return next(one for one in everyone if one)


def fit(
    strategy: Strategy, folder: str, callbacks: list[Callback], *, epochs: int = 3, save: Any = None, **more: Any
) -> tuple[Trainer, Recorder]:
    """Train; ``save`` are the arguments of a ModelCheckpoint."""
    recorder = Recorder()
    recorders = [] if isinstance(strategy, AccelDeepSpeedStrategy) else [recorder]
    checkpoints = [] if save is None else [ModelCheckpoint(folder, **save)]
    trainer = quiet_trainer(
        strategy,
        dist.get_world_size(),
        max_epochs=epochs,
        callbacks=[*recorders, *callbacks, *checkpoints],
        enable_checkpointing=bool(checkpoints),
        default_root_dir=folder,
        limit_train_batches=2,
    )
    trainer.fit(TinyModule(Case(), Outcome()), rank_loader(dist.get_world_size()), **more)
    return trainer, recorder


def assert_merged(folder: Path, weights: dict[str, Tensor]) -> None:
    merged = load_file(folder / "model.safetensors")
    assert sorted(merged) == sorted(weights) == NAMES
    for name, tensor in merged.items():
        assert torch.equal(tensor, weights[name].cpu()), name


def merge_last_and_best(folder: str) -> None:
    for version in (1, 2):
        root = Path(folder, f"{version}")
        last, best = MergeShardedCheckpoint(root / "last"), MergeShardedCheckpoint(root / "best", which="best")
        save = {"monitor": "score", "mode": "min", "save_top_k": -1, "filename": "{epoch}"}
        _, recorder = fit(sharded(version), str(root / "ckpt"), [last, best], save=save)
        assert_merged(root / "last", recorder.weights[2])
        assert_merged(root / "best", recorder.weights[1])
        if dist.get_rank() == 0:
            assert last.merged == {str(root / "ckpt/epoch=2.ckpt"): str(root / "last")}
        assert len(list((root / "ckpt").iterdir())) == 3


def merge_without_checkpoint(folder: str) -> None:
    strategies: dict[str, Any] = {"sharded": sharded(), "ddp": "ddp"}
    for name, strategy in strategies.items():
        output = Path(folder, name, "merged")
        _, recorder = fit(strategy, str(output.parent), [MergeShardedCheckpoint(output, dtype="fp64")], epochs=1)
        dist.barrier()
        assert [path.name for path in output.parent.iterdir()] == ["merged"]  # what was saved for the merge is gone
        assert_merged(output, {key: value.double() for key, value in recorder.weights[0].items()})


def merge_and_remove(folder: str) -> None:
    callback = MergeShardedCheckpoint(
        Path(folder, "merged"), remove_checkpoint_dir=True, max_shard_size=200, strip_prefix="auto", background=False
    )
    fit(sharded(), str(Path(folder, "ckpt")), [callback], epochs=1, save={})
    dist.barrier()
    assert not list(Path(folder, "ckpt").iterdir())
    files = sorted(Path(folder, "merged").iterdir())
    assert len(files) > 3
    assert files[-1].name == "model.safetensors.index.json"
    merged = {name: tensor for file in files[:-1] for name, tensor in load_file(file).items()}
    assert sorted(merged) == sorted(build_model().state_dict())


def merge_binaries_of_full_checkpoints(folder: str) -> None:
    callback = MergeShardedCheckpoint(Path(folder, "merged"), safe_serialization=False, remove_checkpoint_dir=True)
    _, recorder = fit(AccelFSDPStrategy(), str(Path(folder, "ckpt")), [callback], epochs=1, save={})
    dist.barrier()
    assert not list(Path(folder, "ckpt").iterdir())
    merged = torch.load(Path(folder, "merged", "pytorch_model.bin"))
    assert all(torch.equal(merged[name], tensor) for name, tensor in recorder.weights[0].items())


END_OF_FIT = [merge_last_and_best, merge_without_checkpoint, merge_and_remove, merge_binaries_of_full_checkpoints]


@pytest.mark.core("merge_last_and_best")
@pytest.mark.parametrize("check", END_OF_FIT)
def test_at_the_end_of_fit(check: Any, tmp_path: Path) -> None:
    run_on_ranks(2, check, str(tmp_path))


def merge_deepspeed(folder: str) -> None:
    from tests.strategies.deepspeed.training import whole_weights as deepspeed_weights

    whens: list[tuple[int, Any]] = [(2, "fit_end"), (3, "every_save")]
    for stage, when in whens:
        strategy: Any = AccelDeepSpeedStrategy(zero_stage=stage, async_save=when == "every_save")
        root, save = Path(folder, f"{stage}"), {"save_top_k": -1, "filename": "saved"}
        callback = MergeShardedCheckpoint(root / "merged", when)
        trainer, _ = fit(strategy, str(root / "ckpt"), [callback], epochs=1, save=save)
        dist.barrier()
        assert trainer.lightning_module is not None
        trained = deepspeed_weights(trainer.lightning_module)
        output = root / "merged" / ("saved" if when == "every_save" else "")
        assert_merged(output, {f"model.{name}": tensor for name, tensor in trained.items()})


def test_deepspeed(tmp_path: Path) -> None:
    run_on_ranks(2, merge_deepspeed, str(tmp_path), timeout_s=120)


def merge_every_save(folder: str, background: bool, asynchronous: bool) -> dict[str, Any]:
    """The last one overwrites the same name at each epoch, and of the others only the newest is kept."""
    callback = MergeShardedCheckpoint(Path(folder, "merged"), "every_save", background=background)
    save = {"save_top_k": 1, "save_last": True, "filename": "{epoch}"}
    strategy = AccelFSDPStrategy(fsdp_version=2, async_save=asynchronous)
    _, recorder = fit(strategy, str(Path(folder, "ckpt")), [callback], save=save)
    dist.barrier()
    for epoch, weights in enumerate(recorder.weights):
        assert_merged(Path(folder, "merged", f"epoch={epoch}"), weights)
    assert_merged(Path(folder, "merged", "last"), recorder.weights[-1])
    assert sorted(path.name for path in Path(folder, "ckpt").iterdir()) == ["epoch=2.ckpt", "last.ckpt"]
    return callback.state_dict()


@pytest.mark.core("background-async_save")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
@pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])
def test_every_save_though_checkpoints_are_overwritten_and_deleted(
    background: bool, asynchronous: bool, tmp_path: Path
) -> None:
    states = run_on_ranks(2, merge_every_save, str(tmp_path), background, asynchronous, timeout_s=90)
    names = ["epoch=0", "epoch=1", "epoch=2", "last"]
    assert states[0] == {
        "merged": {f"{tmp_path}/ckpt/{name}.ckpt": f"{tmp_path}/merged/{name}" for name in names},
        "pending": [],
    }
    assert states[1] == {"merged": {}, "pending": []}


class HoldUp(Callback):
    """Holds the merges up, deletes what is to be merged and overwrites what is to be merged."""

    def __init__(self, folder: Path, merging: MergeShardedCheckpoint) -> None:
        self.folder, self.merging, self.gate = folder, merging, threading.Event()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.merging._queue is not None:
            self.merging._queue._pool.submit(self.gate.wait)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        queue, deleted, overwritten = (
            self.merging._queue,
            self.folder / "deleted.ckpt",
            self.folder / "overwritten.ckpt",
        )
        trainer.save_checkpoint(deleted)
        trainer.strategy.remove_checkpoint(deleted)  # as ModelCheckpoint does
        assert queue is None or deleted.exists()
        trainer.save_checkpoint(overwritten)
        threading.Timer(0.5, self.gate.set).start()
        trainer.save_checkpoint(overwritten)
        assert queue is None or [queue.needs(path) for path in (deleted, overwritten)] == [False, True]
        assert queue is None or [job.error for job in queue.jobs[:2]] == [None, None]
        assert not deleted.exists()


def spare(folder: str) -> None:
    callback = MergeShardedCheckpoint(Path(folder, "merged"), "every_save")
    _, recorder = fit(sharded(), folder, [callback, HoldUp(Path(folder), callback)], epochs=1)
    for name in ("deleted", "overwritten"):
        assert_merged(Path(folder, "merged", name), recorder.weights[0])


def test_what_a_merge_needs_is_spared_until_it_is_done(tmp_path: Path) -> None:
    """The half second only lets a failure show; a save that waits for the merge waits for the gate as well."""
    run_on_ranks(2, spare, str(tmp_path))


class Damage(Callback):
    """Removes a file of each checkpoint when it has been saved, on one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")
        if trainer.is_global_zero:
            (self.folder / f"{trainer.current_epoch}.ckpt" / ".metadata").unlink()


def fail(folder: str) -> list[str]:
    messages = []
    for number, options in enumerate([{}, {"when": "every_save"}, {"when": "every_save", "background": False}]):
        output, checkpoints = Path(folder, f"merged{number}"), Path(folder, f"{number}")
        output.mkdir(exist_ok=True)
        (output / "0").write_text("a file in the way")
        (output / "model.safetensors").mkdir(exist_ok=True)
        callback = MergeShardedCheckpoint(output, **options)  # type: ignore[arg-type]
        damage = Damage(checkpoints)
        started = damage if number == 0 else Saver(checkpoints)
        with pytest.raises(CheckpointError) as caught:
            fit(sharded(), str(checkpoints), [callback, started], epochs=2)
        messages.append(str(caught.value))
    return messages


class Saver(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a name that an error of at most 500 characters can hold several times."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_failures_are_raised_at_the_end_on_all_processes_with_their_cause(short_path: Path) -> None:
    """In the foreground at once: the first of the two saves fails, so there is one merge; else the second succeeds."""
    tmp_path = short_path
    for rank, (missing, background, foreground) in enumerate(run_on_ranks(2, fail, str(tmp_path))):
        assert f"{tmp_path}/0/1.ckpt -> {tmp_path}/merged0: " in missing
        assert "No checkpoint in" in missing
        assert "1 of 2 merges failed" in background
        assert "1 of 1 merges failed" in foreground
        for message in (background, foreground):
            assert f"{tmp_path}/merged{1 if message is background else 2}/0 is a file" in message
        if rank:
            assert "The merge failed on the main process" in background


class Stop(Callback):
    """Interrupts training once a merge runs, which it holds up by a signal."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir, f"{trainer.current_epoch}.ckpt"))
        if trainer.current_epoch == 1:
            raise ZeroDivisionError("in training")


def interrupt(folder: str) -> dict[str, Any]:
    output = Path(folder, "merged")
    callback = MergeShardedCheckpoint(output, "every_save")
    running: list[int] = []

    class Hold(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, idx: int) -> None:
            while trainer.current_epoch == 1 and trainer.is_global_zero and not running:
                process = callback._queue._process if callback._queue is not None else None
                if process is not None:
                    running.append(process.pid)
                    os.kill(process.pid, signal.SIGSTOP)
                elif callback._queue is not None and not callback._queue.needs(Path(folder, "0.ckpt")):
                    running.append(0)  # was faster
                time.sleep(0.001)

    with pytest.raises(ZeroDivisionError):
        fit(sharded(), folder, [callback, Hold(), Stop()])
    assert "save_checkpoint" not in callback.__dict__
    for pid in filter(None, running):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)  # ended, and waited for
    leftovers = sorted(path.name for path in Path(folder).rglob(".*") if "tmp" in path.name)
    return {"held": running, "leftovers": leftovers, "output": sorted(path.name for path in output.glob("*"))}


@pytest.mark.exhaustive
def test_an_exception_in_training_ends_the_merges(tmp_path: Path) -> None:
    """The merge is held up by SIGSTOP, so that it is under way for sure; it does not hear SIGTERM, and is killed."""
    first, _ = run_on_ranks(2, interrupt, str(tmp_path))
    assert first["leftovers"] == []
    assert first["output"] == ([] if first["held"][0] else ["0"])


def resume(folder: str) -> None:
    output, checkpoints = Path(folder, "merged"), Path(folder, "ckpt")
    fit(sharded(), str(checkpoints), [MergeShardedCheckpoint(output, "every_save")], epochs=1, save={"save_top_k": -1})
    dist.barrier()
    [saved] = checkpoints.iterdir()
    [merged] = output.iterdir()
    dist.barrier()
    if dist.get_rank() == 0:  # as if the run had been killed before the merge
        (merged / "model.safetensors").unlink()
        merged.rmdir()
    callback = MergeShardedCheckpoint(output, "every_save")
    fit(sharded(), str(checkpoints), [callback], epochs=2, save={"save_top_k": -1}, ckpt_path=str(saved))
    dist.barrier()
    assert len(list(output.iterdir())) == 2
    assert (merged / "model.safetensors").is_file()
    done = MergeShardedCheckpoint(output)
    fit(sharded(), str(checkpoints), [done], epochs=1, save={"save_top_k": -1}, ckpt_path=str(saved))  # no step to do
    dist.barrier()
    assert (output / "model.safetensors").is_file()


def test_what_an_interrupted_run_left_unmerged_is_merged_by_the_next(tmp_path: Path) -> None:
    run_on_ranks(2, resume, str(tmp_path))


class Alone(TinyModule):
    """Without a process group."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])


def test_averages_that_nothing_has_saved_are_saved_on_one_device_too(tmp_path: Path) -> None:
    ema = ShardedEMA(decay=0.5)
    merging = MergeShardedCheckpoint(tmp_path / "merged", weights="ema")
    trainer, module = quiet_trainer("auto", 1, max_epochs=1, callbacks=[ema, merging]), Alone(Case(), Outcome())
    trainer.fit(module, DataLoader(dataset(1), 2))
    with ema.averaged_weights(trainer):
        assert_merged(tmp_path / "merged", module.state_dict())


def test_saves_that_would_lack_the_averages_are_refused(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, save_weights_only=True)
    merging = MergeShardedCheckpoint(tmp_path / "merged", weights="ema")
    callbacks = [ShardedEMA(decay=0.5), merging, saving]
    trainer = quiet_trainer("auto", 1, max_epochs=1, enable_checkpointing=True, callbacks=callbacks)
    with pytest.raises(ValueError, match=r"leaves the averages out .* Remove save_weights_only"):
        trainer.fit(TinyModule(Case(), Outcome()), DataLoader(dataset(1), 2))


class _Counts(nn.Module):
    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": 3, "scale": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        """Nothing depends on it."""


def _fit_with_extra_state(folder: str) -> None:
    module = TinyModule(Case(), Outcome())
    module.counts = _Counts()
    merging = MergeShardedCheckpoint(f"{folder}/merged")
    quiet_trainer("auto", 1, max_epochs=1, callbacks=[merging]).fit(module, rank_loader(1))
    weights = {name: one for name, one in module.state_dict().items() if "extra_state" not in name}
    assert_merged(Path(folder, "merged"), weights)


def test_extra_states_are_no_weights(tmp_path: Path) -> None:
    run_on_ranks(1, _fit_with_extra_state, str(tmp_path))


def _fails_in_the_background(folder: str) -> str:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(f"{folder}/last.ckpt")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    options: dict[str, Any] = {"state_dict_type": "sharded_state_dict", "async_save": True}
    callbacks = [MergeShardedCheckpoint(f"{folder}/merged", "every_save"), Saves()]
    trainer = quiet_trainer(AccelFSDPStrategy(fsdp_version=2, **options), 2, max_epochs=1, callbacks=callbacks)
    with mock.patch.object(writer, "finish_checkpoint", full), pytest.raises(RuntimeError) as error:
        trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
    return str(error.value)


def test_a_save_that_fails_is_raised_before_its_merge_is_waited_for(tmp_path: Path) -> None:
    for message in run_on_ranks(2, _fails_in_the_background, str(tmp_path), timeout_s=60):
        assert "the disk is full" in message


def test_arguments() -> None:
    faults: list[tuple[str, dict[str, Any]]] = [
        ("when must be 'fit_end' or 'every_save', got 'now'", {"when": "now"}),
        ("which must be 'last' or 'best', got 'first'", {"which": "first"}),
        ("int3", {"dtype": "int3"}),
        ("5 apples", {"max_shard_size": "5 apples"}),
        ("strip_prefix must be", {"strip_prefix": ""}),
    ]
    for message, arguments in faults:
        with pytest.raises(ValueError, match=message):
            MergeShardedCheckpoint("out", **arguments)
    trainer = quiet_trainer("auto", 1, callbacks=[MergeShardedCheckpoint("out", which="best")])
    with pytest.raises(ValueError, match=r"needs a ModelCheckpoint\(monitor=...\)"):
        trainer.fit(TinyModule(Case(), Outcome()), [])
    keys = {MergeShardedCheckpoint(name).state_key for name in ("a", "b")}
    assert len(keys) == 2
    assert f"{MergeShardedCheckpoint('out').output_dir}" == "out"  # the key is the same in another working directory


class HuggingFace(LightningModule):
    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=16)
        self.net, self.head = GPT2LMHeadModel(config), nn.Linear(1, 1)
        self.tokenizer = tokenizer

    def training_step(self, batch: list[Tensor]) -> Tensor:
        tokens = (batch[0].abs() * 5).long().clamp(max=10)
        return self.net(input_ids=tokens, labels=tokens).loss + self.head(batch[0][:, :1]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def merge_hugging_face(folder: str) -> dict[int, dict[str, Tensor]]:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))
    trained = {}
    for version in (1, 2):
        module = HuggingFace(tokenizer)
        strategy = AccelFSDPStrategy(
            fsdp_version=version,
            state_dict_type="sharded_state_dict",
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["GPT2Block"],
            use_orig_params=True if version == 1 else None,
        )
        callbacks: list[Callback] = [MergeShardedCheckpoint(Path(folder, f"{version}")), Recorder()]
        trainer = quiet_trainer(strategy, 2, max_epochs=1, callbacks=callbacks)
        trainer.fit(module, rank_loader(2))
        trained[version] = callbacks[1].weights[0]  # type: ignore[attr-defined]
    return trained


def test_hugging_face_models_load_by_from_pretrained(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = run_on_ranks(2, merge_hugging_face, str(tmp_path), timeout_s=120)[0]
    for version, weights in trained.items():
        loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / f"{version}", output_loading_info=True)
        model, info = loaded
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, weights[f"net.{name}"]), name
        assert model.config.architectures == ["GPT2LMHeadModel"]
        assert AutoTokenizer.from_pretrained(tmp_path / f"{version}").encode("b") == [1]


@pytest.mark.machines
def test_the_example_of_merging_runs() -> None:
    """Lightning keeps the two best of four checkpoints; all four were merged before, each better than the last."""
    lines = run_script(Path(__file__).parents[2] / "examples" / "merge_after_training.py").lines
    assert "checkpoints: epoch=2.ckpt epoch=3.ckpt" in lines
    merged = [line.split() for line in lines if line.startswith("merged:")]
    assert [words[1] for words in merged] == [f"epoch={epoch}" for epoch in range(4)]
    losses = [float(words[-1]) for words in merged]
    assert losses == sorted(losses, reverse=True)
