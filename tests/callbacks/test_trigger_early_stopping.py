"""All processes stop at the same step, whichever of them says so, and go on from there as if nothing had been."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelight.callbacks import TriggerEarlyStopping
from accelight.state import GradientState, PartialState, set_trigger
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.scripts import Launcher, run_script, wait_for
from tests.strategies.oracle import (
    NUM_MICRO_BATCHES,
    Case,
    Outcome,
    TinyModule,
    assert_same,
    dataset,
    quiet_trainer,
    rank_loader,
    train_plain,
)

BLOCKS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}


def strategy_named(name: str) -> Any:
    if name in ("ddp", "auto"):
        return name
    if name.startswith("zero"):
        return AccelDeepSpeedStrategy(hf_ds_config={"zero_optimization": {"stage": int(name[-1])}})
    kind = "full_state_dict" if name == "fsdp1" else "sharded_state_dict"
    asynchronous = name == "async_fsdp2"
    return AccelFSDPStrategy(fsdp_version=int(name[-1]), state_dict_type=kind, async_save=asynchronous, **BLOCKS)


class Listener(Callback):
    """Runs ``act(batch number counted over all epochs)`` on one process before its batches."""

    def __init__(self, process: int, at: int, act: Any) -> None:
        self.process, self.at, self.act, self.count = process, at, act, 0

    def on_train_batch_start(self, *_: Any) -> None:
        if self.count == self.at and PartialState().process_index == self.process:
            self.act()
        self.count += 1


def told(callback: TriggerEarlyStopping) -> tuple[int | None, str | None, tuple[int, ...]]:
    return callback.stopped_step, callback.reason, callback.triggered_by


# ---------------------------------------------------------------------- conditions and triggers
def stop_and_resume(strategy: str, lag: bool, folder: str) -> dict[str, Any]:
    """The last of the processes says stop in its fifth batch; then resume from the checkpoint of that step."""
    state = PartialState()
    last = state.num_processes - 1

    def condition(trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> bool:
        assert outputs["loss"].isfinite()
        assert len(batch) == 2
        return state.process_index == last and batch_idx == 4

    stopping = TriggerEarlyStopping(condition, lag=lag)
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    more: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 2}
    trainer = quiet_trainer(strategy_named(strategy), state.num_processes, callbacks=[saving, stopping], **more)
    trainer.fit(TinyModule(Case(), Outcome()), rank_loader(state.num_processes))
    found = {"told": told(stopping), "step": trainer.global_step, "epoch": trainer.current_epoch}
    resumed, outcome = TriggerEarlyStopping(), Outcome()
    trainer = quiet_trainer(strategy_named(strategy), state.num_processes, callbacks=[resumed], max_steps=8)
    trainer.fit(
        TinyModule(Case(), outcome),
        rank_loader(state.num_processes),
        ckpt_path=f"{folder}/step={found['step']}.ckpt",
        weights_only=False,
    )
    return {**found, "restored": told(resumed), "resumed to": trainer.global_step, "losses": len(outcome.losses)}


@pytest.mark.parametrize(
    ("strategy", "world_size", "lag"),
    [("fsdp2", 3, True), ("fsdp1", 3, False), ("ddp", 3, True), ("ddp", 2, False)],
)
def test_one_of_several_stops_all_at_the_same_step(strategy: str, world_size: int, lag: bool, tmp_path: Path) -> None:
    step = 6 if lag else 5
    for found in run_on_ranks(world_size, stop_and_resume, strategy, lag, str(tmp_path), timeout_s=100):
        assert found["told"] == found["restored"] == (step, "condition", (world_size - 1,))
        assert (found["step"], found["epoch"]) == (step, 1)
        assert (found["resumed to"], found["losses"]) == (8, 8 - step)


class Alone(LightningModule):
    """For a single device; `TinyModule` needs a process group."""

    def __init__(self, losses: dict[int, float] | None = None) -> None:
        super().__init__()
        self.model = torch.nn.Linear(5, 3)
        self.losses, self.seen = losses or {}, list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch_idx)
        return self.model(batch[0]).square().mean() * self.losses.get(len(self.seen), 1.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("metric", float(self.trainer.global_step), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def alone(callbacks: list[Any], module: Any = None, **more: Any) -> Trainer:
    trainer = quiet_trainer("auto", 1, callbacks=callbacks, **{"max_epochs": 2, **more})
    loader = DataLoader(dataset(1), 2)
    trainer.fit(module or Alone(), loader, loader)
    return trainer


@pytest.mark.parametrize(("lag", "step"), [(True, 5), (False, 4)])
def test_a_single_device_stops_by_set_trigger_anywhere(lag: bool, step: int) -> None:
    stopping = TriggerEarlyStopping(lag=lag)
    trainer = alone([stopping, Listener(0, 3, set_trigger)])
    assert (trainer.global_step, told(stopping)) == (step, (step, "set_trigger()", (0,)))


def test_checks_come_at_the_end_of_every_nth_window() -> None:
    steps = []
    for options in ({"check_every_n_steps": 3}, {"check_every_n_steps": 2, "lag": False}, {"lag": False}):
        stopping = TriggerEarlyStopping(lambda *args: args[-1] == 2, **options)  # in the second window
        steps.append(alone([stopping], accumulate_grad_batches=2).global_step)
    # Windows end after batches 2, 4, 6, 7, and so on; checks 3 and 6 with lag, check 2, window 2.
    assert steps == [6, 2, 2]


@pytest.mark.parametrize(("minimum", "step"), [({"min_steps": 9}, 9), ({"min_epochs": 2}, 14), ({"min_steps": 2}, 7)])
def test_not_before_min_steps_and_min_epochs(minimum: dict[str, int], step: int) -> None:
    # With min_steps Lightning also asks for one whole epoch.
    stopping = TriggerEarlyStopping(lambda trainer, *_: trainer.global_step == 3, lag=False)
    trainer = alone([stopping], max_epochs=3, **minimum)
    assert (trainer.global_step, told(stopping)) == (step, (3, "condition", (0,)))


def test_beside_lightnings_early_stopping() -> None:
    found = []
    for at in (4, 100):
        metric = EarlyStopping("metric", mode="min", patience=2)  # the metric grows: patience ends with epoch 3
        stopping = TriggerEarlyStopping(lambda trainer, *_, at=at: trainer.global_step == at, lag=False)
        trainer = alone([metric, stopping], max_epochs=5)
        found.append((trainer.global_step, stopping.stopped_step, metric.stopped_epoch))
    assert found == [(4, 4, 0), (3 * NUM_MICRO_BATCHES, None, 2)]


def test_two_in_one_trainer_are_refused() -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `TriggerEarlyStopping`"):
        alone([TriggerEarlyStopping(), TriggerEarlyStopping(stop_on_nonfinite_loss=True)])


class NonfiniteOnOne(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 2 and PartialState().process_index == 1 else loss


def stop_at_a_nonfinite_loss(lag: bool) -> Any:
    stopping = TriggerEarlyStopping(stop_on_nonfinite_loss=True, lag=lag)
    trainer = quiet_trainer(strategy_named("fsdp2"), 2, callbacks=[stopping], max_epochs=2)
    trainer.fit(NonfiniteOnOne(Case(), Outcome()), rank_loader(2))
    return trainer.global_step, told(stopping)


@pytest.mark.parametrize(("lag", "step"), [(True, 4), (False, 3)])
def test_a_loss_that_is_not_finite_on_one_process(lag: bool, step: int) -> None:
    assert run_on_ranks(2, stop_at_a_nonfinite_loss, lag) == [(step, (step, "non-finite loss", (1,)))] * 2


def test_a_nonfinite_loss_in_the_middle_of_a_window_and_in_the_last_step() -> None:
    for number, step in ((3, 3), (13, 8), (14, 8)):  # windows of 2: 4 steps in an epoch of 7; seen one check later
        stopping = TriggerEarlyStopping(stop_on_nonfinite_loss=True)
        alone([stopping], Alone({number: float("inf")}), accumulate_grad_batches=2)
        assert told(stopping) == (step, "non-finite loss", (0,))


class Manual(Alone):
    def __init__(self, returns: Any) -> None:
        super().__init__()
        self.automatic_optimization, self.returns = False, returns

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.model(batch[0]).square().mean() / (0 if batch_idx == 2 else 1)
        self.manual_backward(loss)
        optimizer.step()
        return self.returns(loss)


def test_manual_optimization() -> None:
    for returns in (lambda loss: loss, lambda loss: {"loss": loss}):
        stopping = TriggerEarlyStopping(stop_on_nonfinite_loss=True, lag=False)
        assert alone([stopping], Manual(returns)).global_step == 3
    with pytest.raises(RuntimeError, match=r"needs the loss, but training_step returned no loss\. Return the loss"):
        alone([TriggerEarlyStopping(stop_on_nonfinite_loss=True)], Manual(lambda loss: None))


def fail_in_the_condition() -> str:
    def condition(*_: Any) -> bool:
        if PartialState().process_index == 1:
            raise ValueError("no such key: accuracy")
        return False

    trainer = quiet_trainer(strategy_named("fsdp2"), 2, callbacks=[TriggerEarlyStopping(condition)], max_epochs=2)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_condition_that_raises_on_one_process_raises_on_all() -> None:
    assert run_on_ranks(2, fail_in_the_condition) == [
        "RuntimeError: The condition of TriggerEarlyStopping failed.\nprocess 1: ValueError: no such key: accuracy",
        "ValueError: no such key: accuracy",
    ]


# ---------------------------------------------------------------------- signals
def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """Whole weights, at least on process 0."""
    weights = trainer.strategy.lightning_module_state_dict()
    whole = {name: w.full_tensor() if isinstance(w, DTensor) else w.clone() for name, w in weights.items()}
    return {name.removeprefix("model."): tensor for name, tensor in whole.items()}


def interrupt_and_resume(strategy: str, case: Case, at: int, folder: str) -> dict[str, Any]:
    """A real signal to the last process; Lightning's exit on all; then on from the checkpoint, to the end."""
    size, outcome = PartialState().num_processes, Outcome()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    stopping = TriggerEarlyStopping(stop_on_signals=["SIGTERM", signal.SIGUSR2])
    kill = Listener(size - 1, at, lambda: os.kill(os.getpid(), signal.SIGTERM))
    more: dict[str, Any] = {"accumulate_grad_batches": case.accumulate, "max_epochs": case.epochs}
    more["enable_checkpointing"] = True
    saving = ModelCheckpoint(folder, save_top_k=0)
    trainer = quiet_trainer(strategy_named(strategy), size, callbacks=[stopping, kill, saving], **more)
    with pytest.raises(SIGTERMException) as caught:
        trainer.fit(TinyModule(case, outcome), rank_loader(size))
    assert caught.value.code == 143  # the exit status
    assert {number: signal.getsignal(number) for number in before} == before
    found = {"told": told(stopping), "path": stopping.checkpoint_path, "step": trainer.global_step}
    resumed = TriggerEarlyStopping(stop_on_signals=["SIGTERM"])
    trainer = quiet_trainer(strategy_named(strategy), size, callbacks=[resumed, ModelCheckpoint(folder)], **more)
    trainer.fit(TinyModule(case, outcome), rank_loader(size), ckpt_path="last", weights_only=False)
    assert {number: signal.getsignal(number) for number in before} == before
    outcome.global_step = trainer.global_step
    outcome.weights = weights_of(trainer)
    return {**found, "restored": told(resumed), "outcome": outcome}


@pytest.mark.parametrize(
    ("strategy", "case", "at", "step"),
    [
        ("fsdp2", Case(), 2, 4),
        ("fsdp2", Case(accumulate=2), 9, 7),  # second epoch: windows end after its batches 2, 4, 6, 7
        ("async_fsdp2", Case(), 5, 7),  # agreed at the epoch's last batch
        ("ddp", Case(), 9, 11),
        ("zero2", Case(accumulate=2), 3, 3),
        ("fsdp1", Case(accumulate=3, epochs=3), 5, 3),  # agreed at the epoch's last, short window
    ],
    ids=["fsdp2", "fsdp2_accumulate", "async_fsdp2_epoch_end", "ddp", "zero2", "fsdp1_accumulate_epoch_end"],
)
def test_a_signal_to_one_process_and_the_run_goes_on_as_if_nothing_had_been(
    strategy: str, case: Case, at: int, step: int, tmp_path: Path
) -> None:
    expected = train_plain(case, 2)
    results = run_on_ranks(2, interrupt_and_resume, strategy, case, at, str(tmp_path), timeout_s=100)
    for found in results:
        assert found["told"] == found["restored"] == (step, "SIGTERM", (1,))
        assert found["step"] == step
        assert Path(found["path"]).parent == tmp_path
    assert_same(results[0]["outcome"], expected)  # each batch once: the losses of both runs are those of one


def interrupt_late() -> tuple[Any, list[str]]:
    """A signal in the last batch: no check comes after it, and it must not be lost."""
    size, calls = PartialState().num_processes, list[str]()
    stopping = TriggerEarlyStopping(stop_on_signals=["SIGTERM"], check_every_n_steps=5, verbose=False)
    kill = Listener(1, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
    trainer = quiet_trainer(strategy_named("ddp"), size, callbacks=[stopping, kill], max_epochs=1)
    try:
        trainer.fit(TinyModule(Case(), Outcome()), rank_loader(size))
    except SIGTERMException:
        calls.append("exit")
    assert stopping.checkpoint_path is not None
    assert os.path.exists(stopping.checkpoint_path)
    return told(stopping), calls


def test_a_signal_in_the_last_batch_ends_the_program_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the default_root_dir, without a ModelCheckpoint
    assert run_on_ranks(2, interrupt_late) == [((7, "SIGTERM", (1,)), ["exit"])] * 2


JOB = """
import os, signal, sys, time
from pathlib import Path
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from accelight.callbacks import TriggerEarlyStopping
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy

folder, max_steps = Path(sys.argv[1]), int(sys.argv[2])

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        self.print(f"step {self.global_step}: batch {batch_idx} has samples {batch[0].flatten().int().tolist()}")
        if batch_idx == 3 and max_steps < 0:  # begun: the test may send its signal
            (folder / f"pid{self.global_rank}.new").write_text(str(os.getpid()))
            (folder / f"pid{self.global_rank}.new").rename(folder / f"pid{self.global_rank}")
        return self.model(batch[0] / 1e6).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

strategy = AccelFSDPStrategy(fsdp_version=2) if sys.argv[3] == "fsdp2" else sys.argv[3]
trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=max_steps, max_epochs=-1, logger=False,
                  callbacks=[TriggerEarlyStopping(stop_on_signals=[signal.SIGTERM]),
                             ModelCheckpoint(folder, save_top_k=0)],
                  enable_progress_bar=False, enable_model_summary=False)
samples = torch.arange(100_000.0).unsqueeze(1)
trainer.fit(Module(), DataLoader(TensorDataset(samples), 2), ckpt_path="last")
print("fit has returned", flush=True)
"""

NUM_STEPS = 25_000  # of an epoch of this job, which goes on until it is told to end


@pytest.mark.machines
@pytest.mark.parametrize(("launcher", "strategy"), [("python", "fsdp2"), ("torchrun", "ddp")])
def test_sigterm_to_one_process_from_outside(launcher: Launcher, strategy: str, tmp_path: Path) -> None:
    """The second process of a running job is told to end; the first one has a part in the checkpoint."""

    def send() -> None:
        pids = [tmp_path / f"pid{rank}" for rank in range(2)]
        wait_for(lambda: all(pid.exists() for pid in pids))
        os.kill(int(pids[1].read_text()), signal.SIGTERM)

    first = run_script(JOB, str(tmp_path), "-1", strategy, launcher=launcher, while_running=send, check=False)
    assert first.returncodes == [143 if launcher == "python" else 1]  # torchrun has one of its own
    assert "SIGTERM, from process 1" in first.output
    assert "fit has returned" not in first.output
    [checkpoint] = tmp_path.glob("*.ckpt")
    [(epoch, step)] = re.findall(r"last-stopped-epoch=(\d+)-step=(\d+)\.ckpt", checkpoint.name)
    lines = [line for line in first.lines if line.startswith("step ")]
    assert len(lines) == int(step)
    if launcher == "python":  # once is enough
        done = int(step) - NUM_STEPS * int(epoch)
        second = run_script(JOB, str(tmp_path), str(int(step) + 2), strategy, launcher=launcher)
        assert second.lines.count("fit has returned") == 2
        # What process 0 gets from the sampler that Lightning inserts, which shuffles by epoch.
        order = torch.randperm(4 * NUM_STEPS, generator=torch.Generator().manual_seed(int(epoch)))[::2].view(-1, 2)
        assert [line for line in second.lines if line.startswith("step ")] == [
            f"step {int(step) + i}: batch {done + i} has samples {order[done + i].tolist()}" for i in range(2)
        ]


# ---------------------------------------------------------------------- uneven data
class Stream(IterableDataset[Tensor]):
    """So many samples in each epoch, and nobody knows before."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = list(lengths)

    def __iter__(self) -> Any:
        for _ in range(self.lengths.pop(0)):
            yield torch.randn(5), torch.randn(3)


class Counting(TinyModule):
    def __init__(self, case: Case) -> None:
        super().__init__(case, Outcome())
        self.batches, self.windows, self.validations = list[int](), list[int](), 0

    def on_train_epoch_start(self) -> None:
        self.batches.append(0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches[-1] += 1
        if isinstance(self.trainer.strategy, AccelFSDPStrategy) and GradientState().end_of_dataloader:
            self.windows.append(self.batches[-1])  # the strategy knows it before backward, as it must
        return super().training_step(batch, batch_idx)

    def on_validation_end(self) -> None:
        self.validations += 1


def train_on_uneven_data(strategy: str, streaming: bool) -> Any:
    state = PartialState()
    size, rank = state.num_processes, state.process_index
    if streaming:
        loader: Any = DataLoader(Stream(*((9, 5) if rank == 0 else (7, 8))), 1)
    else:
        data = TensorDataset(torch.randn(9 - 2 * rank, 5), torch.randn(9 - 2 * rank, 3))
        loader = DataLoader(data, 1)
    module = Counting(Case(accumulate=2))
    stopping = TriggerEarlyStopping(end_epoch_when_exhausted=True)
    trainer = quiet_trainer(
        strategy_named(strategy),
        size,
        callbacks=[stopping],
        max_epochs=2,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
    )
    trainer.fit(module, loader, rank_loader(size))
    return module.batches, module.windows, module.validations, trainer.global_step, trainer.current_epoch


@pytest.mark.parametrize(
    ("strategy", "streaming"), [("fsdp2", True), ("fsdp1", False), ("ddp", True)], ids=["fsdp2", "fsdp1_sized", "ddp"]
)
def test_the_process_with_the_least_data_ends_the_epoch(strategy: str, streaming: bool) -> None:
    batches = [7, 5] if streaming else [7, 7]
    windows = [] if strategy == "ddp" else batches
    steps = sum(-(-num // 2) for num in batches)
    assert run_on_ranks(2, train_on_uneven_data, strategy, streaming) == [(batches, windows, 2, steps, 2)] * 2


def train_on_nothing(num_first: int) -> None:
    lengths = (5, 5) if PartialState().is_main_process else (num_first, 0)
    trainer = quiet_trainer(
        strategy_named("fsdp2"), 2, callbacks=[TriggerEarlyStopping(end_epoch_when_exhausted=True)], max_epochs=2
    )
    with pytest.raises(RuntimeError, match="training data of process 1 had no batch in this epoch"):
        trainer.fit(TinyModule(Case(), Outcome()), DataLoader(Stream(*lengths), 1))


@pytest.mark.parametrize("num_first", [0, 3])
def test_a_process_without_any_data_is_an_error_on_all(num_first: int) -> None:
    run_on_ranks(2, train_on_nothing, num_first)


class TakesIterator(Alone):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return self.model(next(dataloader_iter)[0][0]).square().mean()


def test_uneven_data_needs_batches() -> None:
    with pytest.raises(NotImplementedError, match=r"not possible with training_step\(dataloader_iter\)"):
        alone([TriggerEarlyStopping(end_epoch_when_exhausted=True)], TakesIterator())


# ---------------------------------------------------------------------- arguments
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"condition": 5}, TypeError, "condition must be a function of"),
        ({"check_every_n_steps": 0}, ValueError, "must be an int >= 1, got 0"),
        ({"check_every_n_steps": 1.5}, ValueError, "must be an int >= 1, got 1.5"),
        ({"stop_on_signals": "SIGTERM"}, TypeError, "must be a list of signals, got 'SIGTERM'"),
        ({"stop_on_signals": ["TERM"]}, ValueError, "no signal 'TERM' on this system. Choose from .*SIGTERM"),
        ({"stop_on_signals": [99]}, ValueError, "no signal 99 on this system"),
        ({"stop_on_signals": [signal.SIGKILL]}, ValueError, "SIGKILL cannot be caught. Use SIGTERM or SIGUSR1"),
    ],
)
def test_arguments_out_of_range(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TriggerEarlyStopping(**arguments)


def test_signals_need_the_main_thread() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match=r"needs Trainer\.fit in the main thread"):
        pool.submit(alone, [TriggerEarlyStopping(stop_on_signals=["SIGTERM"])]).result()


class Recorder(BoringModel):
    """Remembers the batches that it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.batches.append(batch[0, 0].item())
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader[Tensor]:
        numbers: Any = torch.arange(7.0).unsqueeze(1).expand(-1, 32)
        return DataLoader(numbers)


@pytest.mark.parametrize("saved_step", [3, 10])
def test_any_checkpoint_within_an_epoch_resumes_with_the_next_batch(saved_step: int, tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=saved_step, save_top_k=-1)
    undisturbed, resumed = Recorder(), Recorder()
    quiet_trainer("auto", 1, max_epochs=2, callbacks=[saving], enable_checkpointing=True).fit(undisturbed)
    trainer = quiet_trainer("auto", 1, max_epochs=2, callbacks=[TriggerEarlyStopping()])
    trainer.fit(resumed, ckpt_path=tmp_path / f"step={saved_step}.ckpt")
    assert resumed.batches == undisturbed.batches[saved_step:]


class Numbers(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(7.0)[:, None, None].expand(-1, 1, 32))


class SkipsTheRest(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        rest = -1 if trainer.global_step == 3 else None
        trainer.lightning_module.on_train_batch_start = lambda *_: rest  # type: ignore[method-assign]


def stop_early() -> TriggerEarlyStopping:
    return TriggerEarlyStopping(lambda trainer, *_: trainer.global_step == 3, lag=False)


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("ending", [[], [stop_early], [SkipsTheRest]], ids=["last_batch", "stopped", "skipped"])
def test_a_checkpoint_of_an_epochs_end_resumes_with_a_whole_epoch(
    ending: list[Any], has_length: bool, tmp_path: Path
) -> None:
    saving = ModelCheckpoint(tmp_path, filename="saved", save_on_train_epoch_end=True)
    data = None if has_length else DataLoader(Numbers(), None)
    ended, resumed = Recorder(), Recorder()
    callbacks = [saving, *(build() for build in ending)]
    quiet_trainer("auto", 1, max_epochs=1, callbacks=callbacks, enable_checkpointing=True).fit(ended, data)
    trainer = quiet_trainer("auto", 1, max_epochs=2, callbacks=[TriggerEarlyStopping()])
    trainer.fit(resumed, data, ckpt_path=tmp_path / "saved.ckpt")
    assert len(ended.batches) == 3 if ending else 7
    assert resumed.batches == list(range(7))
    assert trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
