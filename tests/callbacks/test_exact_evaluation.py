"""`ExactEvaluation`: what many processes compute equals what one computes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import CatMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.retrieval import RetrievalMAP

from accelight.callbacks import ExactEvaluation
from accelight.callbacks.exact_evaluation import RealSamples
from accelight.state import PartialState, gather_for_metrics, reset_state
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy, ParallelismConfig
from tests.ranks import run_on_ranks
from tests.scripts import run_script
from tests.strategies.oracle import quiet_trainer

EXAMPLES = Path(__file__).parents[2] / "examples"
LENGTHS = range(1, 13)
NUM_CLASSES = 3


def samples(length: int) -> TensorDataset:
    """Small whole numbers: whatever the order of summation, float sums of them are exact, and equal to the last bit."""
    generator = torch.Generator().manual_seed(length)
    inputs = torch.randint(-3, 4, (length, 4), generator=generator).float()
    return TensorDataset(inputs, torch.randint(0, NUM_CLASSES, (length,), generator=generator))


class Classifier(LightningModule):
    """Logs a loss and metrics in each of the ways that Lightning has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.each = nn.Linear(4, NUM_CLASSES), nn.Linear(1, 1)
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(12.0).view(3, 4) % 5 - 2)
            self.layer.bias.zero_()
            self.each.weight.fill_(1)
            self.each.bias.zero_()
        self.accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.scores = MetricCollection([MulticlassF1Score(NUM_CLASSES), MulticlassAUROC(NUM_CLASSES)])
        self.confusion = MulticlassConfusionMatrix(NUM_CLASSES)
        self.seen = CatMetric()
        self.num_forwards = 0
        self.matrix: Tensor | None = None
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        return self.layer(self.each(x.unsqueeze(2)).squeeze(2))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        inputs, labels = batch
        logits = self(inputs)
        losses = 12 * logits[torch.arange(len(labels)), labels] ** 2  # their means over up to 4 are whole numbers
        loss = losses.mean()
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("total", logits.sum(), reduce_fx="sum")
        self.log("largest", logits.max(), reduce_fx="max")
        self.log("smallest", logits.min(), reduce_fx=torch.min)
        self.log("weighted", loss, batch_size=2 * len(labels))
        self.accuracy(logits, labels)
        self.log("accuracy", self.accuracy)
        self.scores.update(logits.softmax(-1), labels)
        self.log_dict(self.scores)
        self.confusion.update(logits, labels)
        self.seen.update(inputs.sum(1))
        return {"logits": logits, "loss": loss}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("logged later", outputs["logits"].sum(), reduce_fx="sum")
        self.outputs.append(outputs["logits"])

    def on_validation_epoch_end(self) -> None:
        self.matrix = self.confusion.compute()
        self.confusion.reset()
        self.log("num_seen", float(self.seen.compute().numel()))
        self.seen.reset()

    test_step = validation_step
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end


def evaluate(length: int, batch_size: int, strategy: Any, world_size: int, exact: bool = True) -> dict[str, Any]:
    model = Classifier()
    trainer = quiet_trainer(strategy, world_size, callbacks=[ExactEvaluation()] if exact else [])
    run = trainer.test if length % 2 else trainer.validate
    [metrics] = run(model, DataLoader(samples(length), batch_size), verbose=False)
    assert not {"log", "validation_step", "test_step", "process_dataloader"} & {*vars(model), *vars(trainer.strategy)}
    assert model.confusion.dist_sync_fn is None
    assert model.matrix is not None
    return {
        "values": (metrics, model.matrix.tolist()),
        "num_forwards": model.num_forwards,
        "num_outputs": sum(map(len, model.outputs)),
    }


def batch_sizes(strategy: str) -> tuple[int, ...]:
    return (1, 4) if strategy == "ddp" else (2,)


def evaluate_all(strategy: str) -> dict[tuple[int, int], dict[str, Any]]:
    import accelight.strategies  # noqa: F401 (the names)

    cases = [(length, batch_size) for length in LENGTHS for batch_size in batch_sizes(strategy)]
    return {case: evaluate(*case, strategy, PartialState().num_processes) for case in cases}


@functools.cache
def expected(length: int, batch_size: int) -> dict[str, Any]:
    return evaluate(length, batch_size, "auto", 1, exact=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("strategy", "world_size"), [("ddp", 2), ("ddp", 3), ("accel_fsdp2", 2), ("accel_fsdp2", 3)])
def test_every_length_gives_the_values_of_one_process(strategy: str, world_size: int) -> None:
    results = run_on_ranks(world_size, evaluate_all, strategy, timeout_s=120)
    for length, batch_size in results[0]:
        found = [result[length, batch_size] for result in results]
        for one in found:  # bit for bit: see `samples`
            assert one["values"] == expected(length, batch_size)["values"], (length, batch_size)
        assert len({one["num_forwards"] for one in found}) == 1
        assert sum(one["num_outputs"] for one in found) == length


def evaluate_under_deepspeed() -> dict[tuple[int, int], dict[str, Any]]:
    found = {}
    for stage in (2, 3):
        for length in (1, 7):
            strategy = AccelDeepSpeedStrategy(hf_ds_config={"zero_optimization": {"stage": stage}})
            found[stage, length] = evaluate(length, 2, strategy, PartialState().num_processes)
            reset_state()
    return found


def test_deepspeed_gives_the_values_of_one_process() -> None:
    results = run_on_ranks(2, evaluate_under_deepspeed, timeout_s=200)
    for stage, length in results[0]:
        found = [result[stage, length] for result in results]
        for one in found:
            assert one["values"] == expected(length, 2)["values"], (stage, length)
        assert len({one["num_forwards"] for one in found}) == 1
        assert sum(one["num_outputs"] for one in found) == length


def tensor_parallel() -> Any:
    cut = {"layer": "rowwise_rep"}
    return AccelFSDPStrategy(fsdp_version=2, parallelism_config=ParallelismConfig(tp_size=2), tp_plan=cut)


def sequence_parallel() -> Any:
    sizes = ParallelismConfig(sp_size=2)
    return AccelFSDPStrategy(fsdp_version=2, parallelism_config=sizes, sequence_modules=["each"])


def evaluate_in_groups() -> tuple[dict[int, dict[str, Any]], dict[tuple[int, int], Any]]:
    found = {}
    for length in (1, 5, 6, 7):
        make = sequence_parallel if length == 6 else tensor_parallel
        found[length] = evaluate(length, 2, make(), PartialState().num_processes)
    lists = evaluate_lists(tensor_parallel, lengths=(1, 3, 6))
    return found, lists


@pytest.mark.core("4")
@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_that_share_a_model_count_as_one(world_size: int) -> None:
    results = run_on_ranks(world_size, evaluate_in_groups, timeout_s=120)
    alone = evaluate_lists(lengths=(1, 3, 6))
    for found, lists in results:
        for length, one in found.items():
            assert one["values"] == expected(length, 2)["values"], length
        for case, metrics in lists.items():
            assert metrics == pytest.approx(alone[case], abs=1e-6), case
    for length in results[0][0]:
        assert sum(found[length]["num_outputs"] for found, _ in results) == 2 * length


def evaluate_without(group_size: int) -> dict[str, Any]:
    make = tensor_parallel if group_size > 1 else partial(AccelFSDPStrategy, fsdp_version=2)
    found = evaluate(7, 2, make(), PartialState().num_processes, exact=False)
    return {**found, "gathered": gather_in_fit(make(), group_size)}


def test_without_the_callback_metrics_are_those_of_the_groups() -> None:
    expected = run_on_ranks(2, evaluate_without, 1)
    for rank, found in enumerate(run_on_ranks(4, evaluate_without, 2)):
        assert found == expected[rank // 2]


def evaluate_dropping(strategy: str) -> int:
    import accelight.strategies  # noqa: F401 (the names)

    class Count(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def validation_step(self, batch: list[Tensor]) -> None:
            self.layer(batch[0])
            self.log("count", float(len(batch[0])), reduce_fx="sum")

    trainer = quiet_trainer(strategy, 2, callbacks=[ExactEvaluation()])
    loader = DataLoader(samples(15), 4, drop_last=True)
    return int(trainer.validate(Count(), loader, verbose=False)[0]["count"])


@pytest.mark.parametrize("strategy", ["ddp", "accel_fsdp2"])
def test_a_loader_that_would_drop_only_a_repetition_drops_nothing(strategy: str) -> None:
    assert run_on_ranks(2, evaluate_dropping, strategy) == [15, 15]


def test_one_process_evaluates_as_without_the_callback() -> None:
    for length in LENGTHS:
        assert evaluate(length, 4, "auto", 1) == expected(length, 4)


class Numbers(Metric):
    """A list of plain numbers, each an element of its own, as ROUGE has them."""

    numbers: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("numbers", default=[], dist_reduce_fx=None)

    def update(self, values: Tensor) -> None:
        self.numbers.extend(value for value in values)

    def compute(self) -> Tensor:
        return torch.stack(self.numbers).sum() + 100 * len(self.numbers)


class Lists(LightningModule):
    """Logs metrics whose lists torchmetrics gathers element by element."""

    def __init__(self) -> None:
        super().__init__()
        self.retrieval, self.numbers = RetrievalMAP(), Numbers()
        self.layer = nn.Linear(4, 1)  # for those who must shard one

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        inputs, labels = batch
        scores = inputs @ torch.tensor([0.3, 0.07, 0.011, 0.0019])  # no two alike: ties go by the samples' order
        self.retrieval.update(scores, labels > 0, inputs[:, 2].abs().long())
        self.log("retrieval", self.retrieval)
        self.numbers.update(labels.float())
        self.log("numbers", self.numbers)


def evaluate_lists(
    strategy: Callable[[], Any] | None = None, lengths: Iterable[int] = LENGTHS
) -> dict[tuple[int, int], Any]:
    found = {}
    for length in lengths:
        for batch_size in (1, 3):
            model, world_size = Lists(), PartialState().num_processes
            chosen = strategy() if strategy is not None else "ddp" if world_size > 1 else "auto"
            trainer = quiet_trainer(chosen, world_size, callbacks=[ExactEvaluation()])
            [metrics] = trainer.validate(model, DataLoader(samples(length), batch_size), verbose=False)
            assert "_sync_dist" not in {*vars(model.retrieval), *vars(model.numbers)}
            found[length, batch_size] = metrics
    return found


@pytest.mark.core("3")
@pytest.mark.parametrize("world_size", [2, 3])
def test_lists_that_are_not_concatenated(world_size: int) -> None:
    """Retrieval's, and single numbers: as many as there are samples, which the processes have in different numbers."""
    alone = evaluate_lists()
    for found in run_on_ranks(world_size, evaluate_lists, timeout_s=120):
        for case, metrics in found.items():
            assert metrics == pytest.approx(alone[case], abs=1e-6), case


class Gathering(LightningModule):
    """Computes from gathered samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, NUM_CLASSES)
        self.seen: list[list[float]] = []
        self.by_function: list[list[float]] = []
        self.num_samples: list[int | None] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.layer(batch[0])
        exact = ExactEvaluation.of(self.trainer)
        rows = exact.gather({"inputs": batch[0], "labels": batch[1]})
        self.seen += rows["inputs"].tolist()
        self.by_function += gather_for_metrics(batch[0]).tolist()
        self.num_samples.append(exact.num_samples)
        self.log("labels", rows["labels"].float().mean())
        with pytest.raises(
            ValueError, match=rf"data has shape \[7\], but this process's batch has {len(batch[0])} sample"
        ):
            exact.gather(torch.ones(7))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def gather_in_fit(strategy: Any, group_size: int = 1) -> dict[str, Any]:
    import accelight.strategies  # noqa: F401 (the names)

    state, model = PartialState(), Gathering()
    world_size, rank = state.num_processes, state.process_index // group_size
    own_sampler: DistributedSampler[Any] = DistributedSampler(samples(5), world_size // group_size, rank, shuffle=False)
    loaders = [DataLoader(samples(7), 2), DataLoader(samples(5), 2, sampler=own_sampler)]
    trainer = quiet_trainer(strategy, world_size, max_epochs=2, callbacks=[ExactEvaluation()])
    trainer.fit(model, DataLoader(samples(4), 2), loaders)
    assert not isinstance(loaders[1].sampler, RealSamples)  # the user's own loader stays as it was
    with pytest.raises(RuntimeError, match="num_samples is known only in validation and test steps"):
        _ = ExactEvaluation.of(trainer).num_samples
    return {
        "seen": model.seen,
        "by_function": model.by_function,
        "num_samples": model.num_samples,
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
    }


@pytest.mark.parametrize("strategy", ["ddp", "accel_fsdp1"])
def test_gathering_in_fit_with_two_loaders(strategy: str) -> None:
    """Also `gather_for_metrics`; in fit the second validation goes through the same loaders again."""
    order = [*samples(7).tensors[0].tolist(), *samples(5).tensors[0].tolist()] * 2
    means = [samples(length).tensors[1].float().mean().item() for length in (7, 5)]
    results = run_on_ranks(2, gather_in_fit, strategy)
    for result in results:
        assert result["seen"] == order
        assert result["by_function"] == order
        found = [result["metrics"][f"labels/dataloader_idx_{index}"] for index in range(2)]
        assert found == pytest.approx(means, rel=1e-6)  # means over 3 samples are no exact floats
    assert [result["num_samples"] for result in results] == [[2, 2, 2, 1] * 2, [2, 1, 2, 0] * 2]


class Faulty(LightningModule):
    """Does one thing that cannot be exact."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.layer = nn.Linear(4, 1)
        self.metric = MulticlassAccuracy(NUM_CLASSES, sync_on_compute=fault != "local")
        self.averaged = Averaged()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.layer(batch[0]).sum()
        if self.fault == "on_step":
            self.log("x", loss, on_step=True, sync_dist=True)
        if self.fault == "outside":
            self.log("x", MulticlassAccuracy(NUM_CLASSES), metric_attribute="metric")
        if self.fault == "local":
            self.log("x", self.metric)
        if self.fault == "averaged":
            self.averaged.update(loss)
            self.log("x", self.averaged)
        if self.fault == "names":
            self.log(f"x{self.global_rank}", loss)

    def on_validation_epoch_end(self) -> None:
        self.log("same", 3)
        if self.fault == "epoch_end":
            self.log("x", float(self.global_rank), sync_dist=True)
        if self.fault == "numpy":
            self.log("x", np.float32(self.global_rank))


class Averaged(Metric):
    """A metric with a state that torchmetrics averages over processes."""

    value: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, value: Tensor) -> None:
        self.value = self.value + value

    def compute(self) -> Tensor:
        return self.value


class Fetching(LightningModule):
    def validation_step(self, dataloader_iter: Any) -> None:
        next(dataloader_iter)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.ones(2 + PartialState().process_index, 4))


class Sized(Stream):
    def __len__(self) -> int:
        return 2 + PartialState().process_index


class OwnSampler(DistributedSampler[Any]):
    def __iter__(self) -> Any:
        return iter([self.rank])


_FAULTS = {
    "on_step": r"self.log\('x', on_step=True, sync_dist=True\) averages over processes regardless of how many",
    "outside": r"self.log\('x'\): the MulticlassAccuracy is not an attribute of the module",
    "local": r"MulticlassAccuracy\(sync_on_compute=False\) computes from the samples of one process",
    "averaged": r"self.log\('x'\): Averaged averages \['value'\] over processes",
    "names": "do not communicate the same data",
    "epoch_end": r"self.log\('x'\) got \[0.0, 1.0\] on the processes, outside a step",
    "numpy": r"self.log\('x'\) got \[0.0, 1.0\] on the processes, outside a step",
}


def raise_everything() -> None:
    data = samples(5)

    def validate(model: LightningModule, loader: Any, strategy: str = "ddp", **exact: Any) -> Any:
        return quiet_trainer(strategy, 2, callbacks=[ExactEvaluation(**exact)]).validate(model, loader, verbose=False)

    assert validate(Faulty(""), DataLoader(data))[0]["same"] == 3
    for fault, message in _FAULTS.items():
        with pytest.raises(ValueError, match=message):
            validate(Faulty(fault), DataLoader(data))
    with pytest.raises(ValueError, match=r"cannot follow validation_step\(dataloader_iter\)"):
        validate(Fetching(), DataLoader(data))
    loaders: list[tuple[str, Any]] = [
        ("cannot determine how a DataLoader over Stream", DataLoader(Stream())),
        ("cannot determine how .* OwnSampler, BatchSampler distributes", DataLoader(data, sampler=OwnSampler(data))),
        ("drops the last 1 of 3 samples of each process", DataLoader(data, 2, drop_last=True)),
        ("drops 1 of 5 samples", DataLoader(data, sampler=DistributedSampler(data, drop_last=True))),
        ("mixes several loaders", CombinedLoader([DataLoader(data), DataLoader(data)], "max_size")),
    ]
    for message, loader in loaders:
        with pytest.raises(ValueError, match=message):
            validate(Faulty(""), loader)
    with pytest.raises(ValueError, match=r"evaluation loaders have \[2, 3\] batches"):
        validate(Faulty(""), DataLoader(Sized(), None), assume_disjoint=True)
    with pytest.raises(RuntimeError, match="The Trainer has no ExactEvaluation"):
        ExactEvaluation.of(quiet_trainer("ddp", 2))


def test_what_cannot_be_exact_is_an_error_on_every_process() -> None:
    run_on_ranks(2, raise_everything)


def accept_disjoint() -> float:
    class Mean(LightningModule):
        def validation_step(self, batch: Tensor) -> None:
            self.log("mean", batch.mean())

    rank = PartialState().process_index
    data: Any = torch.arange(rank * 4.0, rank * 4 + 4)
    loader: DataLoader[Tensor] = DataLoader(data, 1 if rank else 3, sampler=range(2 if rank else 4))
    trainer = quiet_trainer("ddp", 2, use_distributed_sampler=False, callbacks=[ExactEvaluation(assume_disjoint=True)])
    return trainer.validate(Mean(), loader, verbose=False)[0]["mean"]


def test_loaders_of_ones_own_that_are_disjoint() -> None:
    """Process 0 has 0 to 3 in batches of 3 and 1, process 1 has 4 and 5 in batches of one."""
    assert run_on_ranks(2, accept_disjoint) == [2.5, 2.5]


@pytest.mark.machines
def test_the_example_of_exact_evaluation_runs() -> None:
    lines = run_script(EXAMPLES / "exact_evaluation.py", "--devices", "2").lines  # compares by itself, too
    shown = [line for line in lines if "one process" in line]
    assert [line.split()[0] for line in shown] == ["MulticlassAccuracy", "MulticlassF1Score", "loss"]
    assert all(line.split()[3] != line.split()[-1] for line in shown)  # without the callback, other numbers
