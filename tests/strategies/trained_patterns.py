"""Training the patterns of users' code under an engine and under ``ddp``, and what differs."""

from __future__ import annotations

import gc
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from packaging.version import Version
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy, ParallelismConfig, full_state_dict
from tests.strategies.oracle import quiet_trainer
from tests.strategies.user_patterns import (
    INPUTS,
    OUTPUTS,
    PATTERNS,
    Block,
    ManualPattern,
    Pattern,
    Refused,
    Stopped,
    in_table,
)

BATCHES = 4
CLOSE, CLOSE_IN_PARTS = 2e-5, 1e-4
"""Sums in another order differ by some 1e-7 in a step, and momentum carries them on; weights that are divided by their
deviation magnify what parts of a layer or a sequence differ by."""


@dataclass
class Trained:
    """What a fit left on a rank."""

    weights: dict[str, Tensor]
    seen: dict[str, float]
    error: str = ""


PARALLEL: dict[str, dict[str, Any]] = {
    "fsdp2-tp": {"tp_plan": {"model.blocks.*.up": "colwise", "model.blocks.*.down": "rowwise"}},
    "fsdp2-sp": {"sequence_modules": ["model"]},
    "fsdp2-cp": {"sequence_modules": ["model"]},
}
"""Engines whose two ranks see the same batches."""
NOT_FOR_SEQUENCES = {
    *("SampleThenChange", "BankAndCounter", "BatchNormInEvaluation", "BatchNormWithValidation"),
    *("CodesMovedInForward", "CodesReplacedInForward", "HooksOfForwards", "BuffersOfSecondFit"),
}
"""Patterns whose samples have no sequence, that look at all of it at once, or that count calls: the trial has some."""
_NOT_IN_PARTS = {"NumbersInHooksOfModules", "EditsBeforeForwardByHand"}
"""Hooks of modules also run in the trial of a sequence's first batch; a tensor-parallel layer shows its own part."""
_ANSWERS = {("WeightNorm", "fsdp2-tp"): Refused("is parametrized", "leave it out of the plan")}
"""Where an engine of `PARALLEL` has another one than FSDP2."""
_NEEDS_TORCH = {"SumsOfRowsAndBroadcasts": ("2.13", "c10d.broadcast_")}
"""What older torch does not show to modes, and how it is refused there: as an operation that shards do not have."""


def _loader(seed: int, engine: str) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    # Two samples are too few to compare what adds up in another order: norms of them are as good as signs.
    size, sequence = (16, (4,) if "sequence_modules" in PARALLEL[engine] else ()) if engine in PARALLEL else (2, ())
    inputs = torch.randn(2, BATCHES * size, *sequence, INPUTS, generator=generator)
    targets = torch.randn(2, BATCHES * size, *sequence, OUTPUTS, generator=generator)
    own = 0 if engine in PARALLEL else dist.get_rank()
    return DataLoader(TensorDataset(inputs[own], targets[own]), size)


class _Ddp(DDPStrategy):
    """On CUDA, the first weights from rank 0 may arrive in gloo's stream after `configure_optimizers()` drew others."""

    def configure_ddp(self) -> None:
        super().configure_ddp()
        if self.root_device.type == "cuda":
            torch.cuda.synchronize()


def _strategy(engine: str, leaves_unused: bool, ignored: str | None = None, saves: str = "full_state_dict") -> Any:
    if engine == "ddp":
        return _Ddp(process_group_backend="gloo", find_unused_parameters=leaves_unused)
    version = int(engine[4])
    form: Any = {"auto_wrap_policy": {Block}, "state_dict_type": saves, "ignored_modules": ignored}
    if engine in PARALLEL:
        config = ParallelismConfig(**{f"{engine[-2:]}_size": 2})
        return AccelFSDPStrategy(fsdp_version=2, parallelism_config=config, **form, **PARALLEL[engine])
    if engine.startswith("fsdp"):
        return AccelFSDPStrategy(
            fsdp_version=version, sharding_strategy="NO_SHARD" if engine.endswith("no_shard") else None, **form
        )
    prefetched = 5 * 10**7 if engine.endswith("prefetching") else 64
    persistent = 10**5 if engine.endswith("persistent") else 0
    buckets = {
        "reduce_bucket_size": 64,
        "stage3_prefetch_bucket_size": prefetched,
        "stage3_param_persistence_threshold": persistent,
    }
    return AccelDeepSpeedStrategy(hf_ds_config={"zero_optimization": {"stage": version, **buckets}})


@contextmanager
def _shared_folder() -> Iterator[Path]:
    with TemporaryDirectory(ignore_cleanup_errors=True) as own:
        names = [own]
        dist.broadcast_object_list(names)
        yield Path(names[0])


def _train(kind: type[Pattern], engine: str, data_of: str, **where: Any) -> Trained:
    with _shared_folder() if kind.resumes else nullcontext(Path()) as folder:
        return _train_in(folder, kind, engine, data_of, **where)


def _train_in(folder: Path, kind: type[Pattern], engine: str, data_of: str, **where: Any) -> Trained:
    module, saved = kind(), None

    def with_trainer(**settings: Any) -> Any:
        strategy = _strategy(engine, kind.leaves_unused, kind.ignored, kind.resumes or "full_state_dict")
        return quiet_trainer(strategy, dist.get_world_size(), use_distributed_sampler=False, **settings, **where)

    try:
        for number in range(kind.fits):
            if number and kind.is_evaluated:
                with_trainer().validate(module, _loader(3, data_of))
            trainer = with_trainer(
                max_epochs=kind.epochs * (1 if saved is None else 2),
                accumulate_grad_batches=(kind.accumulate, kind.accumulate_later or kind.accumulate)[number > 0],
                callbacks=module.callbacks(),
            )
            loaders = module.data(_loader(2, data_of), _loader(3, data_of) if kind.validates else None)
            with suppress(Stopped):
                trainer.fit(module, **loaders, ckpt_path=saved)
            if kind.resumes and saved is None:
                saved = f"{folder}/saved.ckpt"
                trainer.save_checkpoint(saved)
                module = kind()
    except Exception as error:  # noqa: BLE001 (compared with the words of the table)
        trained = Trained({}, {}, f"{type(error).__name__}: {error}")
    else:
        weights = {key: one.detach().cpu().clone() for key, one in full_state_dict(trainer.strategy, module).items()}
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        return Trained(weights, {**module.seen, **metrics})
    gc.collect()  # an error in torch.utils.checkpoint leaves its hooks for saved tensors until its frame is gone
    return trained


_UNDER_DDP: dict[tuple[str, str], Trained] = {}


def _under_ddp(name: str, engine: str, **where: Any) -> Trained:
    kind, key = PATTERNS[name].module, (name, engine if engine in PARALLEL else "")
    if key not in _UNDER_DDP:
        _UNDER_DDP[key] = _train(kind.referee or kind, "ddp", engine, **where)
    return _UNDER_DDP[key]


def problems(names: Sequence[str], engine: str, **where: Any) -> list[str]:
    """Train patterns on this rank, and return those that are not what the table says.

    Args:
        names: Of patterns.
        engine: One of `ENGINES`, or ``ddp``.
        where: The Trainer's settings of devices; the same ones in all calls of a process.
    """
    found = []
    for name in names:
        if "sequence_modules" in PARALLEL.get(engine, ()) and name in NOT_FOR_SEQUENCES:
            continue
        if engine in PARALLEL and name in _NOT_IN_PARTS:
            continue
        if engine.startswith("zero") and PATTERNS[name].module.ignored is not None:
            continue
        expected, trained = _under_ddp(name, engine, **where), _train(PATTERNS[name].module, engine, engine, **where)
        column = "zero2" if engine == "zero1" else engine.split("-")[0]  # one column of the table
        answer = _ANSWERS.get((name, engine), PATTERNS[name].answers.get(column))
        first, refusal = _NEEDS_TORCH.get(name, ("0", ""))
        if Version(torch.__version__) < Version(first) and column != "zero2":
            answer = Refused(refusal, f"torch {first}")
        problem = _problem(answer, trained, expected, CLOSE_IN_PARTS if engine in PARALLEL else CLOSE)
        if problem:
            found.append(f"{name}: {problem}")
    return found


def silent_problems(names: Sequence[str], engine: str) -> list[str]:
    """Return the problems that no error tells: where nothing is sharded, more may be right or refused than usual."""
    return [one for one in problems(names, engine) if "Error" not in one and "was not refused; equal" not in one]


class _CallsWithWrongShape(ManualPattern):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)
        with torch.no_grad():
            self.model.blocks[0](batch[0])


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


class _IsInterrupted(Pattern):
    """Is interrupted in the second batch."""

    where: str

    def interrupt_in(self, where: str) -> None:
        if where == self.where and self.trainer.fit_loop.epoch_loop.batch_idx == 1:
            _interrupt()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.interrupt_in("step")
        if batch_idx == 1 and self.where == "unit":
            self.model.blocks[0].register_forward_pre_hook(_interrupt)
        loss = self.loss(batch)
        loss.register_hook(lambda _: self.interrupt_in("backward"))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.interrupt_in("hook")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "call in a hook":
            self.model.blocks[0].register_forward_pre_hook(_interrupt)
            with torch.no_grad():
                self.model(batch[0])


class _IsInterruptedInCall(ManualPattern):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)
        self.model.blocks[0].register_forward_pre_hook(_interrupt)
        with torch.no_grad():
            self.model.blocks[0](batch[0])


class _CallsParts(ManualPattern):
    """Calls parts of a child, which are unsharded for that alone."""

    def loss(self, batch: Any) -> Tensor:
        net = self.model
        return functional.mse_loss(net.head(net.blocks(net.blocks[0](net.embed(batch[0])))), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.first_backward(batch).step()


def fit_after_an_error(engine: str) -> tuple[str, str]:
    """Fail in a call of a unit; return the error, and what the next fit of this process has that differs from ddp."""
    error = _train(_CallsWithWrongShape, engine, engine).error
    return error, _problem_of_next_fit(engine)


INTERRUPTS: dict[str, type[Pattern]] = {
    **{
        where: type("_", (_IsInterrupted,), {"where": where})
        for where in ("step", "unit", "backward", "hook", "call in a hook")
    },
    "call in a step": _IsInterruptedInCall,
}


def fits_after_interrupts(engine: str) -> dict[str, str]:
    """Interrupt a fit in each place; return what each next fit of this process has that differs from ddp."""
    return {where: _fit_after_an_interrupt(module, engine) for where, module in INTERRUPTS.items()}


def _fit_after_an_interrupt(module: type[Pattern], engine: str) -> str:
    before = signal.getsignal(signal.SIGINT)
    try:
        return f"was not interrupted: {_train(module, engine, engine).error}"
    except SystemExit:  # Lightning's answer, which ignores SIGINT from then on
        signal.signal(signal.SIGINT, before)
        return _problem_of_next_fit(engine)


def _problem_of_next_fit(engine: str) -> str:
    trained, expected = (_train(_CallsParts, each, engine) for each in (engine, "ddp"))
    return _problem(None, trained, expected, CLOSE)


class _Evaluated(Pattern):
    """Looks at weights in a test and in predictions, and changes them for the latter."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.first.weight.pow(2).sum() + self.first.weight[0].abs().max(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.first.weight[1] = 0.5
        self.see("squares", sum(p.pow(2).sum() for p in self.parameters()))
        outputs: Tensor = self.model(batch[0])
        return outputs


def numbers_without_a_fit(engine: str) -> list[float]:
    """Test and predict with an engine; return what the steps have seen, and predicted."""
    module, trainer = _Evaluated(), quiet_trainer(_strategy(engine, False), 2, use_distributed_sampler=False)
    trainer.test(module, _loader(2, engine))
    predicted: Any = trainer.predict(module, _loader(3, engine))
    metrics = [float(value) for value in trainer.callback_metrics.values()]
    return [*module.seen.values(), *metrics, *(each.sum().item() for each in predicted)]


def _problem(answer: Refused | None, trained: Trained, expected: Trained, close: float) -> str:
    if expected.error:
        return f"ddp cannot train it: {expected.error}"
    if answer is None:
        return trained.error or _difference(trained, expected, close)
    if not trained.error:
        return f"was not refused; {_difference(trained, expected, close) or 'equal'}"
    return "" if re.search(answer.match, trained.error, re.DOTALL) else f"another refusal: {trained.error}"


def _difference(trained: Trained, expected: Trained, close: float) -> str:
    if trained.weights.keys() != expected.weights.keys() or trained.seen.keys() != expected.seen.keys():
        return f"other names: {trained.weights.keys() ^ expected.weights.keys()}, {trained.seen} {expected.seen}"
    pairs = {
        **{key: (trained.weights[key].double(), value.double()) for key, value in expected.weights.items()},
        **{key: (torch.tensor(trained.seen[key]), torch.tensor(value)) for key, value in expected.seen.items()},
    }
    worst = {key: ((one - other).abs() / other.abs().clamp(min=1)).max().item() for key, (one, other) in pairs.items()}
    return ", ".join(f"{key} differs by {most:.1e}" for key, most in worst.items() if not most <= close)


def _batches() -> dict[str, list[str]]:
    """The core; the first pattern of each other row of the docs; the rest, which is for `make test-machines`."""
    core = [name for name, entry in PATTERNS.items() if entry.core]
    rows = in_table(PATTERNS.values()).values()
    first = [row[0].name for row in rows if not any(entry.core for entry in row)]
    rest = [name for name in PATTERNS if name not in {*core, *first}]
    return {
        "core": core,
        **{f"row{at // 10 + 1}": first[at : at + 10] for at in range(0, len(first), 10)},
        **{f"rest{at // 10 + 1}": rest[at : at + 10] for at in range(0, len(rest), 10)},
    }


BATCHES_OF_PATTERNS = _batches()
