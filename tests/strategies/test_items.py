"""``average_over="items"``: however a step's items are split over ranks and micro-batches, each weighs the same."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor
from torch.utils.data import DataLoader

from accelight.callbacks import TriggerEarlyStopping
from accelight.state import GradientAccumulationPlugin, PartialState, reset_state
from accelight.state.upstream import flight_record
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from accelight.strategies.common import items
from tests.ranks import run_on_ranks
from tests.scripts import run_script
from tests.strategies.oracle import TinyModel, build_model, quiet_trainer

ENGINES = ("fsdp1", "fsdp2", "zero0", "zero1", "zero2", "zero3")
NUM_STEPS, NUM_ROWS = 5, 12
EXAMPLES = Path(__file__).parents[2] / "examples"
Split = list[list[list[list[int]]]]
"""Rows of each step, rank and micro-batch."""


def random_split(seed: int, num_ranks: int) -> Split:
    """Deal the rows of each step to random ranks and micro-batches, some of which get none."""
    rng = random.Random(seed)
    num_micro = rng.randint(1, 5)
    split: Split = []
    for step in range(NUM_STEPS):
        shares: list[list[list[int]]] = [[[] for _ in range(num_micro)] for _ in range(num_ranks)]
        for row in range(step * NUM_ROWS, (step + 1) * NUM_ROWS):
            shares[rng.randrange(num_ranks)][rng.randrange(num_micro)].append(row)
        split.append(shares)
    return split


def rows(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    size = NUM_STEPS * NUM_ROWS
    x, y = torch.randn(size, 5, generator=generator), torch.randn(size, 3, generator=generator)
    return x.to(dtype), y.to(dtype)


class ByItems(LightningModule):
    """Its loss is a mean over the rows of a micro-batch: 0/0 where it has none."""

    def __init__(self, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.model: TinyModel = build_model()
        self.rows = rows(dtype)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        x, y = (each[batch].to(next(self.model.parameters()).dtype) for each in self.rows)
        loss = (self.model(x) - y).square().sum() / len(batch) * self.scale
        return {"loss": loss, "num_items": len(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)


def strategy_for(engine: str, average_over: Any = "items", sync_with_dataloader: bool = True, **more: Any) -> Any:
    plugin = GradientAccumulationPlugin(average_over=average_over, sync_with_dataloader=sync_with_dataloader)
    number = int(engine[-1])
    if engine.startswith("zero"):
        config = {"zero_optimization": {"stage": number}, "train_micro_batch_size_per_gpu": 1}
        return AccelDeepSpeedStrategy(hf_ds_config=config, gradient_accumulation=plugin, **more)
    units: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    return AccelFSDPStrategy(fsdp_version=number, gradient_accumulation=plugin, **units, **more)


def train(engine: str, split: Split, double: bool = False, module: Any = None, **more: Any) -> dict[str, Tensor]:
    """Train inside one of several processes; return the full weights."""
    rank = PartialState().process_index
    batches = [torch.tensor(rows, dtype=torch.long) for shares in split for rows in shares[rank]]
    if double:
        more["plugins"] = [DoublePrecision()]
    trainer = quiet_trainer(
        more.pop("strategy", None) or strategy_for(engine),
        PartialState().num_processes,
        max_epochs=1,
        accumulate_grad_batches=len(split[0][0]),
        use_distributed_sampler=False,
        **more,
    )
    module = module or ByItems(torch.float64 if double else torch.float32)
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type] # a list is a dataset
    with trainer.strategy.full_parameters(module):  # type: ignore[attr-defined]
        weights = {name: each.detach().cpu().clone() for name, each in module.model.named_parameters()}
    reset_state()
    return weights


def train_many(engine: str, splits: list[Split], double: bool) -> list[dict[str, Tensor]]:
    return [train(engine, split, double) for split in splits]


def train_on_all_rows(dtype: torch.dtype, clip: float | None = None) -> dict[str, Tensor]:
    """Return the weights of one process that has all rows of a step in one batch."""
    model = build_model().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)
    x, y = rows(dtype)
    for step in range(NUM_STEPS):
        own = slice(step * NUM_ROWS, (step + 1) * NUM_ROWS)
        optimizer.zero_grad()
        ((model(x[own]) - y[own]).square().sum() / NUM_ROWS).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: each.detach() for name, each in model.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        scale = weight.abs().max().item()  # sums in another order differ relative to the largest
        torch.testing.assert_close(found[name], weight, rtol=tolerance, atol=tolerance * scale)


def check_splits(engine: str, num_ranks: int, seeds: range, *, double: bool) -> None:
    splits = [random_split(seed, num_ranks) for seed in seeds]
    expected = train_on_all_rows(torch.float64 if double else torch.float32)
    for found in run_on_ranks(num_ranks, train_many, engine, splits, double, timeout_s=400)[0]:
        assert_close(found, expected, 1e-6 if double else 1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_any_split_trains_as_one_batch(engine: str) -> None:
    check_splits(engine, 2, range(3), double=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_any_split_trains_as_one_batch_in_double_precision(engine: str) -> None:
    check_splits(engine, 2, range(3, 9), double=True)


@pytest.mark.machines
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_hundred_splits_train_as_one_batch(engine: str, num_ranks: int) -> None:
    check_splits(engine, num_ranks, range(100, 134), double=False)


# ------------------------------------------------------------------------------------------------
# What else happens in a step.


class Clipping(Callback):
    """Notes norms, and what others see of a step."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.losses: list[float] = []
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        with trainer.strategy.full_gradients(pl_module, writeback=False) as gradients:
            self.seen.append(torch.nn.utils.get_total_norm(list(gradients.values())).item())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        norm = trainer.strategy.last_grad_norm
        if norm is not None and len(self.norms) < trainer.global_step:
            self.norms.append(norm.item())


def train_clipped(engine: str, split: Split) -> Any:
    noted = Clipping()
    weights = train(engine, split, callbacks=[noted], gradient_clip_val=0.5)
    return weights, noted.norms, noted.seen, noted.losses


@pytest.mark.parametrize("engine", ENGINES)
def test_clipping_and_hooks_see_the_gradient_of_the_mean_over_items(engine: str) -> None:
    split = random_split(7, 2)
    norms: list[float] = []
    real = torch.nn.utils.clip_grad_norm_

    def noting(*args: Any) -> Tensor:
        norms.append(real(*args).item())
        return torch.tensor(norms[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", noting)
        expected = train_on_all_rows(torch.float32, clip=0.5)
    weights, found, seen, losses = run_on_ranks(2, train_clipped, engine, split)[0]
    assert_close(weights, expected, 1e-5)
    assert found == pytest.approx(norms, rel=1e-5)
    assert seen == pytest.approx(norms, rel=1e-5)
    own = [len(micro) for shares in split for micro in shares[0]]
    assert [loss == loss for loss in losses] == [size > 0 for size in own]  # the user's, 0/0 where there is no row


ONE_EACH: Split = [
    [[[step * NUM_ROWS + rank * 2 + micro] for micro in range(2)] for rank in range(2)] for step in range(5)
]


class ReadingGradients(ByItems):
    """Reads gradients in its last step alone: in the others, the optimizer multiplies them by the window's factor."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == NUM_STEPS - 1:
            assert all(each.grad is not None for each in self.parameters())


def train_reading(engine: str) -> None:
    num_items = 93  # 1 / (1 / 93) * (1 / 93) is not 1
    train(engine, [[[[row % 60 for row in range(num_items)]]]] * NUM_STEPS, module=ReadingGradients())


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_gradients_are_read_after_steps_that_have_multiplied_them(engine: str) -> None:
    run_on_ranks(1, train_reading, engine)


class ByItemsOrNot(ByItems):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"]


def train_both(engine: str, more: dict[str, Any]) -> list[dict[str, Tensor]]:
    scale = 0.01  # in fp16, neither way overflows at the first scale of gradients
    by_items = train(engine, ONE_EACH, module=ByItems(scale=scale), **more)
    other = strategy_for(engine, "micro_batches")
    return [by_items, train(engine, ONE_EACH, module=ByItemsOrNot(scale=scale), strategy=other, **more)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("engine", "precision"),
    [
        *(("fsdp1", "16-mixed"), ("fsdp2", "16-mixed"), ("fsdp2", "bf16-mixed"), ("zero2", "bf16-mixed")),
        ("zero0", "bf16-mixed"),
    ],
)
def test_equal_numbers_of_items_train_as_micro_batches_in_half_precision(engine: str, precision: str) -> None:
    [items, micro_batches], _ = run_on_ranks(2, train_both, engine, {"precision": precision, "gradient_clip_val": 1.0})
    for name, weight in micro_batches.items():
        torch.testing.assert_close(items[name], weight, rtol=0.02, atol=2e-3)  # half precision rounds other products


def some_empty() -> Split:
    """No rank has a row in the second of three steps."""
    split = random_split(11, 2)[:3]
    split[1] = [[[] for _ in shares] for shares in split[1]]
    return split


def train_with_empty(engine: str, precision: str, clip: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    more: dict[str, Any] = {"precision": precision, "gradient_clip_val": 1.0 if clip else None}
    split = some_empty()
    return train(engine, split, **more), train(engine, [split[0], split[2]], **more)


@pytest.mark.parametrize(
    ("engine", "precision", "clip"),
    [
        *((engine, "32-true", False) for engine in ("fsdp1", "zero0", "zero2")),
        ("fsdp2", "16-mixed", True),
        *(
            pytest.param(engine, precision, clip, marks=pytest.mark.exhaustive)
            for engine, precision, clip in [
                *(("fsdp2", "32-true", False), ("zero1", "32-true", False), ("zero3", "32-true", False)),
                ("zero2", "bf16-mixed", True),
            ]
        ),
    ],
)
def test_a_window_without_items_takes_no_step(engine: str, precision: str, clip: bool) -> None:
    found, without = run_on_ranks(2, train_with_empty, engine, precision, clip)[0]
    for name, weight in without.items():
        assert torch.equal(found[name], weight), name


def lines_of_empty_windows() -> list[str]:
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items, "rank_zero_info", lines.append)
        train("fsdp2", [[[[]], [[]]]] * 3)
    return lines


def test_a_window_without_items_is_logged_once() -> None:
    for lines in run_on_ranks(2, lines_of_empty_windows):
        assert len(lines) == 1
        assert "had no items on any process" in lines[0]


class TensorItems(ByItems):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {**super().training_step(batch, batch_idx), "num_items": torch.tensor(float(len(batch)))}


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "zero1", "zero2"])
def test_a_partial_last_window_weighs_its_items_alike(engine: str) -> None:
    split = random_split(7, 2)
    split[-1] = [[[*shares[0], *shares[-1]], *shares[1:-1]] for shares in split[-1]]  # a micro-batch less
    found = run_on_ranks(2, train, engine, split, False, TensorItems())[0]
    assert_close(found, train_on_all_rows(torch.float32), 1e-5)


class Tied(ByItems):
    """Uses one weight twice, and a branch for some rows: a micro-batch without such a row does not use it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.branch = torch.nn.Linear(5, 3)
        blocks: Any = self.model.blocks
        self.model.branch, blocks[1].linear.weight = self.branch, blocks[0].linear.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        x, y = (each[batch] for each in self.rows)
        found, branched = self.model(x), batch % 5 == 0
        if branched.any():
            found = found + branched[:, None] * self.branch(x)
        return {"loss": (found - y).square().sum() / len(batch), "num_items": len(batch)}


@pytest.mark.parametrize(
    "engine", ["fsdp2", "zero2", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("fsdp1", "zero1"))]
)
def test_ties_and_layers_that_some_micro_batches_skip(engine: str) -> None:
    split = random_split(13, 2)
    module = Tied()
    model, optimizer = module.model, module.configure_optimizers()
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        module.training_step(torch.arange(step * NUM_ROWS, (step + 1) * NUM_ROWS), 0)["loss"].backward()
        optimizer.step()
    expected = {name: each.detach() for name, each in model.named_parameters()}
    found = run_on_ranks(2, train_tied, engine, split)[0]
    assert_close({name: found[name] for name in expected}, expected, 1e-5)


def train_tied(engine: str, split: Split) -> dict[str, Tensor]:
    return train(engine, split, module=Tied())


def train_by_value(engine: str, split: Split) -> dict[str, Tensor]:
    return train(engine, split, gradient_clip_val=0.05, gradient_clip_algorithm="value")


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_clipping_by_value_has_the_gradient_of_the_mean_over_items(engine: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", torch.nn.utils.clip_grad_value_)
        expected = train_on_all_rows(torch.float32, clip=0.05)
    assert_close(run_on_ranks(2, train_by_value, engine, random_split(17, 2))[0], expected, 1e-5)


UNEVEN: list[list[list[int]]] = [[[0, 1, 2], [3]], [[4], []], [[5, 6], [7, 8, 9]]]
"""Rows of each micro-batch of an epoch, and rank: windows of two go on in the next epoch."""


class SkipsBatch(ByItems):
    """Ends the first epoch at this batch."""

    def __init__(self, skip_at: int | None) -> None:
        super().__init__()
        self.skip_at = skip_at

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.skip_at and self.current_epoch == 0 else None


def train_over_epochs(engine: str, skip_at: int | None) -> dict[str, Tensor]:
    rank = PartialState().process_index
    strategy = strategy_for(engine, sync_with_dataloader=False)
    trainer = quiet_trainer(strategy, 2, max_epochs=4, accumulate_grad_batches=2, use_distributed_sampler=False)
    module = SkipsBatch(skip_at)
    batches: Any = [torch.tensor(shares[rank], dtype=torch.long) for shares in UNEVEN]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    with strategy.full_parameters(module):
        weights = {name: each.detach().cpu().clone() for name, each in module.model.named_parameters()}
    reset_state()
    return weights


@pytest.mark.core("None-fsdp1", "1-fsdp2", "2-zero2")
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "zero2"])
@pytest.mark.parametrize("skip_at", [None, 1, 2])
def test_a_window_that_goes_on_in_the_next_epoch_weighs_its_items_alike(engine: str, skip_at: int | None) -> None:
    module = ByItems()
    optimizer = module.configure_optimizers()
    micro_batches = UNEVEN[:skip_at] + 3 * UNEVEN
    for first, second in zip(micro_batches[::2], micro_batches[1::2], strict=False):  # one may be left over
        chosen = torch.tensor([row for shares in (first, second) for rows in shares for row in rows])
        optimizer.zero_grad()
        module.training_step(chosen, 0)["loss"].backward()
        optimizer.step()
    expected = {name: each.detach() for name, each in module.model.named_parameters()}
    assert_close(run_on_ranks(2, train_over_epochs, engine, skip_at)[0], expected, 1e-5)


class Wrong(ByItems):
    def __init__(self, num_items: Any) -> None:
        super().__init__()
        self.num_items = num_items

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        given = {} if self.num_items is None else {"num_items": self.num_items}
        return {"loss": super().training_step(batch, batch_idx)["loss"], **given}


def train_wrong(engine: str, num_items: Any) -> str:
    with pytest.raises(ValueError, match="items") as error:
        train(engine, ONE_EACH, module=Wrong(num_items))
    return str(error.value)


@pytest.mark.parametrize(
    ("num_items", "message"),
    [
        *((None, "needs the number of items"), (-1, "got -1"), (1.5, "got 1.5"), (True, "got True")),
        *((torch.tensor([1, 2]), "got tensor"), ("3", "got '3'")),
    ],
)
def test_other_numbers_of_items_are_refused(num_items: Any, message: str) -> None:
    assert message in run_on_ranks(1, train_wrong, "fsdp2", num_items)[0]


class NoLoss(ByItems):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None


def train_without_loss(engine: str) -> str:
    with pytest.raises(RuntimeError, match="returned None on process") as error:
        train(engine, ONE_EACH, module=NoLoss())
    return str(error.value)


def test_no_loss_is_refused_with_what_to_return() -> None:
    for message in run_on_ranks(2, train_without_loss, "fsdp2"):
        assert '"num_items": 0' in message


def num_collectives(engine: str, average_over: str) -> int:
    before = max((each["record_id"] for each in flight_record()), default=-1)
    module = ByItems() if average_over == "items" else ByItemsOrNot()
    train(engine, ONE_EACH, module=module, strategy=strategy_for(engine, average_over))
    return max(each["record_id"] for each in flight_record()) - before


def both_numbers_of_collectives(engine: str) -> tuple[int, int]:
    return num_collectives(engine, "items"), num_collectives(engine, "micro_batches")


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "zero1", "zero2"])
def test_counting_items_takes_no_collective_more(engine: str) -> None:
    for by_items, by_micro_batches in run_on_ranks(2, both_numbers_of_collectives, engine):
        assert by_items == by_micro_batches > NUM_STEPS


def train_watched(engine: str) -> int:
    stops = TriggerEarlyStopping(stop_on_nonfinite_loss=True)
    train(engine, random_split(7, 2), callbacks=[stops])  # some micro-batches have no rows
    return -1 if stops.stopped_step is None else stops.stopped_step


def test_the_loss_over_no_items_does_not_stop_training() -> None:
    assert run_on_ranks(2, train_watched, "fsdp2") == [-1, -1]


@pytest.mark.machines
def test_the_example_measures_what_averages_over_micro_batches_miss() -> None:
    output = run_script(EXAMPLES / "token_exact.py", timeout_s=400).output
    shares = re.findall(r"average over (\w+) +(\S+) of", output)
    assert [name for name, _ in shares] == ["micro_batches", "items"] * 2
    for name, share in shares:
        assert (float(share) > 0.01) == (name == "micro_batches")


class Manual(ByItems):
    def __init__(self, num_micro: int) -> None:
        super().__init__()
        self.num_micro, self.automatic_optimization = num_micro, False
        self.num_items = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        x, y = self.rows
        self.num_items += len(batch)
        self.manual_backward((self.model(x[batch]) - y[batch]).square().sum())
        if (batch_idx + 1) % self.num_micro == 0:
            self.trainer.strategy.divide_by_items(self.num_items, optimizer)  # type: ignore[attr-defined]
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.num_items = 0


def train_manual(engine: str, split: Split) -> dict[str, Tensor]:
    num_micro = len(split[0][0])
    flat = [[shares[rank][micro] for rank in range(2)] for shares in split for micro in range(num_micro)]
    return train(engine, [[[rows] for rows in each] for each in flat], module=Manual(num_micro))


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "zero0", "zero1"])
def test_manual_optimization_divides_by_all_items(engine: str) -> None:
    expected = train_on_all_rows(torch.float32, clip=0.5)
    assert_close(run_on_ranks(2, train_manual, engine, random_split(7, 2))[0], expected, 1e-5)
