"""One rank that fails ends the run on all of them with its error; batch sizes are found by all ranks together."""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accelight.state import deadlocks, rendezvous
from accelight.strategies import batch_size, find_executable_batch_size
from accelight.strategies.deepspeed import AccelDeepSpeedStrategy
from accelight.strategies.fsdp import AccelFSDPStrategy
from accelight.strategies.upstream.lightning import LightningModule
from tests.log_messages import log_messages
from tests.ranks import run_on_ranks
from tests.scripts import run_script
from tests.strategies.deepspeed.training import whole_weights
from tests.strategies.oracle import quiet_trainer

STRATEGIES: dict[str, Callable[[], Any]] = {
    "fsdp1": lambda: AccelFSDPStrategy(fsdp_version=1, auto_wrap_policy={nn.Linear}),
    "fsdp2": lambda: AccelFSDPStrategy(fsdp_version=2, auto_wrap_policy={nn.Linear}),
    "zero2": lambda: AccelDeepSpeedStrategy(zero_stage=2),
    "zero3": lambda: AccelDeepSpeedStrategy(zero_stage=3),
}
TOO_MUCH = "Tried to allocate 2.00 GiB"


class _Failing(LightningModule):
    """Raises on one rank, in a section of the third batch."""

    def __init__(self, section: str, rank: int = 1, error: type[Exception] = torch.OutOfMemoryError) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        self.section, self.rank, self.error, self.batch = section, rank, error, 0

    def fail_in(self, section: str) -> None:
        if (section, self.global_rank, self.batch) == (self.section, self.rank, 2):
            raise self.error(TOO_MUCH)

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        self.before = _shards(self.trainer.strategy)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.batch = batch_idx
        self.fail_in("forward")
        output = self.net(batch[0])
        output.register_hook(lambda _: self.fail_in("backward"))
        return output.pow(2).mean()

    def on_train_batch_end(self, outputs: object, batch: list[Tensor], batch_idx: int) -> None:
        if self.section == "save" and batch_idx == 2:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/saved")

    def setup(self, stage: str) -> None:
        if (self.section, self.global_rank) == ("setup", self.rank):
            raise self.error(TOO_MUCH)

    def configure_model(self) -> None:
        if (self.section, self.global_rank) == ("configure_model", self.rank):
            raise self.error(TOO_MUCH)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.fail_in("save")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.batch = batch_idx
        self.fail_in("validation")
        return self.net(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        module = self

        class Failing(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                loss = closure() if closure is not None else None
                module.fail_in("optimizer")
                super().step()
                return loss

        return Failing(self.parameters(), lr=0.1, momentum=0.9)


def _shards(strategy: Any) -> dict[str, Tensor]:
    return {name: getattr(shard, "held", shard).clone() for name, (shard, _) in strategy.parameter_shards().items()}


def _loader(batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(128.0).view(16, 8) / 128), batch_size)


def _error_of(run: Callable[[], object]) -> tuple[str, str]:
    """Return the error with its notes, which the log has before Python 3.11, and its class."""
    with log_messages(rendezvous.__name__) as logged:
        try:
            run()
        except Exception as error:  # noqa: BLE001 (whatever it is)
            notes = getattr(error, "__notes__", logged if sys.version_info < (3, 11) else [])
            return "\n".join([str(error), *notes]), type(error).__name__
    return "", ""


def _fit(kind: str, section: str, folder: str, rank: int = 1) -> tuple[str, str]:
    strategy = STRATEGIES[kind]()
    trainer = quiet_trainer(strategy, dist.get_world_size(), max_epochs=1, default_root_dir=folder)
    validation = _loader() if section == "validation" else None
    module = _Failing(section, rank)
    error = _error_of(lambda: trainer.fit(module, _loader(), validation))
    if section in ("forward", "backward"):
        torch.testing.assert_close(_shards(strategy), module.before, rtol=0, atol=0)
    return error


WHERE = {
    "setup": "in setup() at step 0 (epoch 0)",
    "configure_model": "in configure_model() at step 0 (epoch 0)",
    "forward": "in the forward at step 2 (epoch 0, batch 2)",
    "backward": "in the backward at step 2 (epoch 0, batch 2)",
    "optimizer": "in the optimizer step at step 2 (epoch 0, batch 2)",
    "validation": "in validation at step 4 (epoch 0)",
    "save": "in a save at step 3 (epoch 0, batch 2)",
}


@pytest.mark.core("fsdp2-backward")
@pytest.mark.parametrize("case", [f"{kind}-{section}" for kind in STRATEGIES for section in WHERE])
def test_a_rank_out_of_memory_ends_all_with_its_error(case: str, tmp_path: Path) -> None:
    """The group's timeout is torch's 30 minutes."""
    kind, section = case.split("-")
    first, second = run_on_ranks(2, _fit, kind, section, f"{tmp_path}", timeout_s=40, group_timeout_s=1800)
    sentence = f"Process 1 failed {WHERE[section]} with OutOfMemoryError: {TOO_MUCH}. Its memory peaked at "
    assert sentence in first[0]
    assert re.search(r"peaked at [\d.]+ GiB of resident memory, of which it held weights [\d.]+ GiB", first[0])
    assert ("optimizer state 0.00 GiB when it failed." in first[0]) == (section not in ("setup", "configure_model"))
    assert first[1] in ("RuntimeError", "ProcessFailedError")
    assert "0 * unit" not in first[0]
    assert second[1] == "OutOfMemoryError"
    assert second[0].startswith(f"{TOO_MUCH}\n{sentence}")


def _validate(kind: str) -> tuple[str, str]:
    trainer = quiet_trainer(STRATEGIES[kind](), 2)
    return _error_of(lambda: trainer.validate(_Failing("validation"), _loader()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", list(STRATEGIES))
def test_validation_without_a_fit(kind: str) -> None:
    for error, _ in run_on_ranks(2, _validate, kind, timeout_s=40, group_timeout_s=1800):
        assert f"Process 1 failed in validation at step 0 (epoch 0) with OutOfMemoryError: {TOO_MUCH}. Its" in error


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["fsdp2", "zero2"])
def test_three_ranks_learn_of_it(kind: str, tmp_path: Path) -> None:
    errors = run_on_ranks(3, _fit, kind, "backward", f"{tmp_path}", 0, timeout_s=60, group_timeout_s=1800)
    for error, _ in errors:
        assert f"Process 0 failed {WHERE['backward']} with OutOfMemoryError: {TOO_MUCH}. Its" in error


def _fit_again(kind: str) -> tuple[list[str], int, bool]:
    """All ranks fail alike, wait for each other long afterwards, and train again in the same group."""
    errors = []

    class Alike(_Failing):
        def fail_in(self, section: str) -> None:
            if section == self.section and self.batch == 2:
                raise ValueError("the batch is bad")

    module = Alike("forward")
    for section in ("forward", "none"):
        module.section = section
        trainer = quiet_trainer(STRATEGIES[kind](), 2, max_epochs=1)
        errors.append(_error_of(lambda trainer=trainer: trainer.fit(module, _loader()))[0])  # type: ignore[misc]
        if section == "forward" and dist.get_rank() == 1:
            threading.Event().wait(4)  # longer than the others need to see it
        dist.barrier()
    return errors, trainer.global_step, deadlocks.found_deadlock() is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", list(STRATEGIES))
def test_ranks_that_fail_alike_train_again_in_the_same_group(kind: str) -> None:
    for errors, steps, is_whole in run_on_ranks(2, _fit_again, kind, timeout_s=60):
        assert errors == ["the batch is bad", ""]
        assert steps == 4
        assert is_whole


# ---------------------------------------------------------------------- batch sizes
def _train(kind: str, batch_size: int, sizes: list[int], limits: tuple[int, int]) -> dict[str, Tensor]:
    """Train with a memory for so many samples on each rank."""
    torch.manual_seed(0)
    sizes.append(batch_size)

    class Limited(_Failing):
        def fail_in(self, section: str) -> None:
            if section == self.section and batch_size > limits[self.global_rank]:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    module = Limited("backward")
    trainer = quiet_trainer(STRATEGIES[kind](), 2, max_epochs=2)
    trainer.fit(module, _loader(batch_size))
    if kind.startswith("zero"):
        return whole_weights(module)
    return {name: weights.clone() for name, weights in trainer.strategy.full_state_dict(module).items()}  # type: ignore[attr-defined]


def _find(kind: str, limits: tuple[int, int]) -> tuple[list[int], dict[str, Tensor], int]:
    sizes: list[int] = []
    halves = iter([4, 2, 1])

    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: next(halves))
    def train(batch_size: int, kind: str) -> dict[str, Tensor]:
        return _train(kind, batch_size, sizes, limits)

    weights = train(kind)
    gc.collect()
    return sizes, weights, sum(thread.name == "accelight-deadlocks" for thread in threading.enumerate())


def _train_once(kind: str) -> dict[str, Tensor]:
    return _train(kind, 2, [], (2, 2))


@pytest.mark.core("fsdp2-one_rank")
@pytest.mark.parametrize("limits", [(8, 2), (2, 4)], ids=["one_rank", "both"])
@pytest.mark.parametrize("kind", list(STRATEGIES))
def test_ranks_find_a_batch_size_together(kind: str, limits: tuple[int, int]) -> None:
    [expected, _] = run_on_ranks(2, _train_once, kind)
    for sizes, weights, num_watches in run_on_ranks(2, _find, kind, limits, timeout_s=100, group_timeout_s=1800):
        assert sizes == [8, 4, 2]
        assert num_watches == 1  # those of earlier groups have ended
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def _loop(batch_size: int, fits: int, error: Exception) -> float:
    """A loop without a Trainer, in which one rank does not come to the second reduction."""
    total = torch.ones(1)
    for step in range(2):
        if step == 1 and dist.get_rank() == 1 and batch_size > fits:
            raise error
        dist.all_reduce(total)
    return float(total) * batch_size


def _find_in_a_loop(error: Exception, size: int, fits: int) -> tuple[Any, str]:
    result = []
    train = find_executable_batch_size(_loop, starting_batch_size=size)
    message, _ = _error_of(lambda: result.append(train(fits, error)))
    return result, message


@pytest.mark.exhaustive
def test_batch_sizes_in_a_loop_without_a_trainer() -> None:
    """As Accelerate's: 0.9 of the size before."""
    found = run_on_ranks(2, _find_in_a_loop, MemoryError("no memory"), 10, 8, group_timeout_s=1800)
    assert found == [([4.0 * 8], "")] * 2


@pytest.mark.exhaustive
def test_any_other_error_ends_all_attempts() -> None:
    error = ValueError("the batch is bad")
    first, second = run_on_ranks(2, _find_in_a_loop, error, 10, 9, group_timeout_s=1800)
    assert first == ([], "Process 1 failed with ValueError: the batch is bad")
    assert second == ([], "the batch is bad")


@pytest.mark.exhaustive
def test_no_batch_size_is_left() -> None:
    for result, message in run_on_ranks(2, _find_in_a_loop, MemoryError(), 1, 0, group_timeout_s=1800):
        assert result == []
        assert message.startswith("No executable batch size found: 1 is too large, and 0 would be next.")


def _differ() -> str:
    train = find_executable_batch_size(lambda size: size, starting_batch_size=8 + dist.get_rank())
    return _error_of(train)[0]


def test_batch_sizes_that_differ_are_an_error() -> None:
    for message in run_on_ranks(2, _differ):
        assert message == "An attempt has failed: process 0, batch size 8: fits; process 1, batch size 9: fits"


def _find_over_nccl() -> tuple[Any, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_size, "backends_by_device", lambda group: {"cpu": "gloo", "cuda": "nccl"})
        return _find_in_a_loop(MemoryError(), 10, 8)


@pytest.mark.exhaustive
def test_over_nccl_all_ranks_end_with_the_next_size() -> None:
    for result, message in run_on_ranks(2, _find_over_nccl, group_timeout_s=1800):
        assert result == []
        assert "with a batch size of 10, and collectives of nccl cannot be ended" in message
        assert message.endswith("Start again with starting_batch_size=9.")


def test_one_process_tries_again() -> None:
    sizes = []

    @find_executable_batch_size(starting_batch_size=4, reduce_batch_size_fn=lambda: sizes[-1] // 2)
    def train(batch_size: int) -> int:
        sizes.append(batch_size)
        if batch_size > 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return batch_size

    assert train() == 1
    assert sizes == [4, 2, 1]
    with pytest.raises(ValueError, match="starting_batch_size must be >= 1, got 0"):
        find_executable_batch_size(_loop, starting_batch_size=0)


SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader
from lightning.pytorch import LightningModule, Trainer
from accelight.strategies import find_executable_batch_size

class Module(LightningModule):
    def __init__(self, most):
        super().__init__()
        self.net, self.most = nn.Linear(8, 1), most

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 0 and len(batch) > self.most:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def train(batch_size, most=0):
    global trainer
    settings = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = Trainer(strategy="accel_fsdp2", accelerator="cpu", devices=2, max_epochs=1, **settings)
    trainer.fit(Module(most), DataLoader(torch.ones(64, 8), batch_size))
    return batch_size

try:
    if sys.argv[1] == "search":
        found = find_executable_batch_size(train, starting_batch_size=5)(most=4)
        print(f"rank {trainer.global_rank} finds {found} after {trainer.global_step} steps", flush=True)
    else:
        train(4)
except Exception as error:
    print(f"rank {trainer.global_rank} ends with {error}", flush=True)
    if sys.argv[1] == "uncaught":
        raise
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", ["python", "torchrun", "by_hand"])
def test_batch_sizes_under_launchers(launcher: Any) -> None:
    """The next group is on the store that process 0 or torchrun's agent holds."""
    output = run_script(SCRIPT, "search", launcher=launcher, timeout_s=90).output
    for rank in (0, 1):  # two processes may print on one line
        assert f"rank {rank} finds 4 after 8 steps" in output


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["caught", "uncaught"])
def test_process_0_holds_the_store_and_ends_at_once(way: str) -> None:
    ended = run_script(SCRIPT, way, launcher="by_hand", check=False, timeout_s=60)
    assert "rank 0 ends with Tried to allocate" in ended.output
    [line] = [line for line in ended.lines if line.startswith("rank 1 ends with")]
    assert "Process 0 failed in the forward at step 2 (epoch 0, batch 2) with OutOfMemoryError: Tried to" in line
