"""`AccelFSDPStrategy` under the Trainer: its loops, what it tells the states, what it sends, what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import wrap
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from accelight.state import AcceleratorState, GradientAccumulationPlugin, GradientState, PartialState
from accelight.strategies import AccelFSDPStrategy, FullyShardedDataParallelPlugin, full_state_dict
from tests.log_messages import RANK_ZERO, log_messages
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.engines import BLOCKS, ENGINES
from tests.strategies.oracle import (
    BATCH_SIZE,
    NUM_MICRO_BATCHES,
    Block,
    Case,
    Outcome,
    TinyModule,
    assert_same,
    build_model,
    dataset,
    quiet_trainer,
    rank_loader,
    train_plain,
    train_sharded,
)


def _loader() -> DataLoader[tuple[Tensor, ...]]:
    return rank_loader(dist.get_world_size())


# ------------------------------------------------------------------ loops
def _evaluate(engine: str) -> dict[str, Any]:
    trainer = quiet_trainer(AccelFSDPStrategy(**ENGINES[engine]), 2, max_epochs=1)
    module = TinyModule(Case(), Outcome())
    before = trainer.validate(module, _loader(), verbose=False)[0]["val_loss"]
    predictions: Any = trainer.predict(module, _loader())
    trainer.fit(module, _loader(), _loader())
    after = trainer.test(module, _loader(), verbose=False)[0]["val_loss"]
    again = trainer.validate(module, _loader(), verbose=False)[0]["val_loss"]
    return {"before": before, "predictions": torch.cat(predictions), "after": after, "again": again}


@pytest.mark.parametrize("engine", ENGINES)
def test_validate_test_and_predict_before_and_after_fit(engine: str) -> None:
    results = run_on_ranks(2, _evaluate, engine)
    inputs, targets = dataset(2).tensors
    model = build_model()
    loss = functional.mse_loss(model(inputs), targets).item()
    assert [result["before"] for result in results] == [pytest.approx(loss, rel=1e-5)] * 2
    trained = train_plain(Case(epochs=1), 2)
    for rank, result in enumerate(results):  # Lightning's sampler gives each rank every second sample
        torch.testing.assert_close(result["predictions"], model(inputs[rank::2]).detach(), rtol=1e-5, atol=1e-6)
    model.load_state_dict(trained.weights)
    loss = functional.mse_loss(model(inputs), targets).item()
    for name in ("after", "again"):
        assert [result[name] for result in results] == [pytest.approx(loss, rel=1e-5)] * 2


# ------------------------------------------------------------------ what the states tell
class _Watch(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, bool, bool]] = []

    def _note(self, where: str, batch_idx: int) -> None:
        state = GradientState()
        self.seen.append((where, batch_idx, state.sync_gradients, state.end_of_dataloader))

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._note("train", batch_idx)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._note(f"val{dataloader_idx}", batch_idx)


def _watch(num_val_loaders: int) -> tuple[list[tuple[str, int, bool, bool]], tuple[Any, ...], tuple[Any, ...]]:
    watch = _Watch()
    strategy = AccelFSDPStrategy(fsdp_version=2, **BLOCKS)
    trainer = quiet_trainer(
        strategy, 2, max_epochs=1, accumulate_grad_batches=3, callbacks=[watch], val_check_interval=4,
        limit_val_batches=2, precision="bf16-mixed",
    )  # fmt: skip
    module = TinyModule(Case(), Outcome())
    trainer.fit(module, _loader(), [_loader()] * num_val_loaders)
    state = AcceleratorState()
    facts = (state.distributed_type.value, state.mixed_precision, state.is_fsdp2, state.num_processes)
    gradient = GradientState()
    return watch.seen, facts, (gradient.num_steps, gradient.in_dataloader, gradient.sync_gradients)


def test_gradient_state_follows_the_loops() -> None:
    for seen, facts, after in run_on_ranks(2, _watch, 2):
        train = [entry[1:] for entry in seen if entry[0] == "train"]
        assert train == [(i, i in (2, 5, 6), i == 6) for i in range(NUM_MICRO_BATCHES)]
        # Validation after batch 3, in the middle of a window: it leaves sync_gradients of the training loop alone.
        assert [(where, i, end) for where, i, _, end in seen if where != "train"] == [
            ("val0", 0, False),
            ("val0", 1, True),
            ("val1", 0, False),
            ("val1", 1, True),
        ]
        assert facts == ("FSDP", "bf16", True, 2)
        assert after == (3, False, True)


# ------------------------------------------------------------------ communication
def _num_steps(options: dict[str, Any], trainer_options: dict[str, Any]) -> tuple[int, int]:
    trainer = quiet_trainer(AccelFSDPStrategy(fsdp_version=2, **options), 1, max_epochs=1, **trainer_options)
    trainer.fit(TinyModule(Case(), Outcome()), _loader())
    return GradientState().num_steps, trainer.global_step


@pytest.mark.parametrize(
    ("options", "trainer_options", "env", "expected"),
    [
        ({}, {}, {}, 1),
        ({}, {}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"}, 3),
        ({}, {"accumulate_grad_batches": 2}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"}, 2),
        ({"gradient_accumulation": 2}, {}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"}, 2),
        ({"gradient_accumulation": 2}, {"accumulate_grad_batches": 2}, {}, 2),
    ],
    ids=["neither", "environment", "trainer", "strategy", "both"],
)
def test_where_the_number_of_accumulation_steps_comes_from(
    options: dict[str, Any], trainer_options: dict[str, Any], env: dict[str, str], expected: int
) -> None:
    [found] = run_on_ranks(1, _num_steps, options, trainer_options, env=env)
    assert found == (expected, -(-NUM_MICRO_BATCHES // expected))


class CountCollectives(TorchDispatchMode):
    """Counts calls of torch.distributed by the name of their operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def _count(engine: str, accumulate: int, each_batch: bool) -> int:
    plugin = GradientAccumulationPlugin(num_steps=accumulate, sync_each_batch=each_batch)
    strategy = AccelFSDPStrategy(gradient_accumulation=plugin, **ENGINES[engine])
    trainer = quiet_trainer(strategy, 2, max_epochs=1)
    with CountCollectives() as counted:
        trainer.fit(TinyModule(Case(), Outcome()), _loader())
    assert trainer.accumulate_grad_batches == accumulate
    return sum(number for name, number in counted.calls.items() if "reduce_scatter" in name)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_are_reduced_once_for_each_window(engine: str) -> None:
    units, windows = 3, 3  # two blocks and the root; 7 micro-batches in windows of 3
    assert run_on_ranks(2, _count, engine, 3, False)[0] == units * windows
    assert run_on_ranks(2, _count, engine, 3, True)[0] == units * NUM_MICRO_BATCHES


def _count_gathers(engine: str, reshard: bool, frees_last: bool = False) -> int:
    strategy = AccelFSDPStrategy(gradient_accumulation=3, reshard_during_accumulation=reshard, **ENGINES[engine])
    trainer = quiet_trainer(strategy, 2, max_epochs=1)
    with CountCollectives() as counted:

        def begin(_: Trainer, module: LightningModule) -> None:
            if frees_last:
                units = [each for each in module.modules() if isinstance(each, FSDPModule)]
                units[-1].set_reshard_after_forward(True)
            counted.calls.clear()

        trainer.callbacks.append(LambdaCallback(on_train_start=begin))  # type: ignore[attr-defined]
        trainer.fit(TinyModule(Case(), Outcome()), _loader())
    return sum(number for name, number in counted.calls.items() if "allgather" in name.replace("_", ""))


@pytest.mark.parametrize("engine", ENGINES)
def test_parameters_are_gathered_once_for_each_window_on_request(engine: str) -> None:
    units, windows = 3, 3
    # By default each block is gathered for forward and for backward, and once what stays gathered: the root, and the
    # last block of FSDP2.
    stay = 2 if ENGINES[engine]["fsdp_version"] == 2 else 1
    assert run_on_ranks(2, _count_gathers, engine, True)[0] == NUM_MICRO_BATCHES * (2 * units - stay)
    assert run_on_ranks(2, _count_gathers, engine, False)[0] == units * windows


def test_the_last_unit_of_fsdp2_can_be_freed_after_forward() -> None:
    assert run_on_ranks(2, _count_gathers, "fsdp2", True, True)[0] == NUM_MICRO_BATCHES * (2 * 3 - 1)


def _validate_inside_windows(case: Case, engine: str, reshard: bool) -> Outcome:
    outcome = Outcome()
    strategy = AccelFSDPStrategy(
        reshard_during_accumulation=reshard, state_dict_type="full_state_dict", **ENGINES[engine]
    )
    trainer = quiet_trainer(
        strategy, 2, max_epochs=case.epochs, accumulate_grad_batches=case.accumulate, val_check_interval=4
    )
    trainer.fit(TinyModule(case, outcome), _loader(), _loader())
    weights = strategy.lightning_module_state_dict()
    outcome.weights = {name.removeprefix("model."): tensor.clone() for name, tensor in weights.items()}
    outcome.global_step = trainer.global_step
    return outcome


@pytest.mark.core("fsdp2", "fsdp1-True")
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_validation_inside_a_window_leaves_its_gradients_alone(engine: str, reshard: bool) -> None:
    case = Case(accumulate=3)
    assert_same(run_on_ranks(2, _validate_inside_windows, case, engine, reshard)[0], train_plain(case, 2))


@pytest.mark.parametrize("sync_with_dataloader", [True, False])
def test_the_number_of_steps_may_change_from_epoch_to_epoch(sync_with_dataloader: bool) -> None:
    case = Case(1, accumulate_later=3, clip_norm=0.5, sync_with_dataloader=sync_with_dataloader)
    assert_same(run_on_ranks(2, train_sharded, case, ENGINES["fsdp2"])[0], train_plain(case, 2))


# ------------------------------------------------------------------ plugin, names, options
def _with_plugin(case: Case) -> Outcome:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="full_state_dict", **BLOCKS)
    strategy = AccelFSDPStrategy(fsdp_plugin=plugin)
    outcome = Outcome()
    trainer = quiet_trainer(strategy, 2, max_epochs=case.epochs)
    trainer.fit(TinyModule(case, outcome), _loader())
    outcome.weights = {
        name.removeprefix("model."): value.clone() for name, value in strategy.lightning_module_state_dict().items()
    }
    outcome.global_step = trainer.global_step
    return outcome


def test_a_plugin_serves_as_well_as_its_fields() -> None:
    assert_same(run_on_ranks(2, _with_plugin, Case())[0], train_plain(Case(), 2))


@pytest.mark.parametrize(
    "options",
    [
        {"forward_prefetch": True, **BLOCKS},
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 50},
        {"reshard_during_accumulation": False, **BLOCKS},
        {"auto_wrap_policy": {Block}},
        {"activation_checkpointing_policy": {Block}, **BLOCKS},
        {"activation_checkpointing_policy": {nn.Linear, nn.LayerNorm}, **BLOCKS},
        {"activation_checkpointing_policy": [Block, nn.Linear]},
    ],
    ids=["forward_prefetch", "size_based_wrap", "kept_gathered", "classes", "units", "within_units", "without_units"],
)
@pytest.mark.parametrize("version", [1, 2])
def test_options_train_the_same(version: int, options: dict[str, Any]) -> None:
    case = Case(accumulate=3, clip_norm=0.5)
    outcome = run_on_ranks(2, train_sharded, case, {"fsdp_version": version, **options})[0]
    assert_same(outcome, train_plain(case, 2))


@pytest.mark.parametrize("version", [1, 2])
def test_hybrid_sharding_trains_the_same(version: int) -> None:
    options = {"fsdp_version": version, "device_mesh": (2, 2), **BLOCKS}
    if version == 1:
        options["sharding_strategy"] = "HYBRID_SHARD"
    case = Case(accumulate=3, clip_norm=0.5)
    assert_same(run_on_ranks(4, train_sharded, case, options)[0], train_plain(case, 4))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_stays_near_full_precision(version: int, precision: str) -> None:
    outcome = run_on_ranks(2, train_sharded, Case(precision=precision), {"fsdp_version": version, **BLOCKS})[0]
    # bfloat16 keeps 8 bits: each rounding is within 2**-8, and some of them add up over 14 steps.
    expected = train_plain(Case(), 2)
    torch.testing.assert_close(torch.tensor(outcome.losses), torch.tensor(expected.losses), rtol=0.05, atol=0.02)
    dtypes = {value.dtype for value in outcome.weights.values()}
    assert dtypes == {torch.float32 if precision == "bf16-mixed" else torch.bfloat16}


def _overflow(version: int, options: dict[str, Any]) -> tuple[list[bool], int, bool, list[float]]:
    """Train in fp16 with a scheduler, the gradients of the second step infinite on one process alone."""

    class Overflowing(TinyModule):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.temperature = nn.Parameter(torch.tensor(1.0))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            factor = 1e30 if batch_idx == 1 and dist.get_rank() == 1 else 1.0
            return super().training_step(batch, batch_idx) * self.temperature * factor

    skipped: list[bool] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            skipped.append(cast("AccelFSDPStrategy", trainer.strategy).step_was_skipped)

    strategy = AccelFSDPStrategy(fsdp_version=version, **BLOCKS, **options)
    trainer = quiet_trainer(strategy, 2, max_steps=6, precision="16-mixed", callbacks=[Watch()])
    module = Overflowing(Case(), Outcome())
    trainer.fit(module, _loader())
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    finite = all(bool(parameter.isfinite().all()) for parameter in module.parameters())
    return skipped, scheduler.last_epoch, finite, module.outcome.losses


@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}], ids=["plain", "offload"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_skipped_step_holds_the_schedule_back_on_every_rank(version: int, options: dict[str, Any]) -> None:
    """Gradients of scalars, and of ignored modules, are whole beside the others' shards."""
    ignoring = run_on_ranks(2, _overflow, version, {"ignored_modules": r"model\.head", **options})
    all_sharded = run_on_ranks(2, _overflow, version, options)
    for skipped, num_scheduled, finite, losses in [*ignoring, *all_sharded]:
        assert skipped[1]
        assert num_scheduled == skipped.count(False) > 1
        assert finite
        assert losses == pytest.approx(all_sharded[0][-1], rel=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", ["accelight.strategies", "lightning.pytorch"])
def test_names_are_registered_in_either_order(first: str) -> None:
    second = {"accelight.strategies": "lightning.pytorch", "lightning.pytorch": "accelight.strategies"}[first]
    code = f"""
import {first}, {second}
from lightning.pytorch import Trainer
from accelight.strategies import AccelFSDPStrategy
options = dict(accelerator="cpu", devices=2, logger=False, enable_progress_bar=False)
for name, version, offload in [("accel_fsdp", 1, False), ("accel_fsdp1", 1, False), ("accel_fsdp2", 2, False),
                               ("accel_fsdp_offload", 1, True), ("accel_fsdp2_offload", 2, True)]:
    strategy = Trainer(strategy=name, **options).strategy
    assert type(strategy) is AccelFSDPStrategy
    assert strategy.fsdp_plugin.settings().cpu_offload is offload, name
    assert strategy.fsdp_plugin.fsdp_version == version
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------ what is refused
def test_a_plugin_and_its_fields_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got fsdp_plugin and also cpu_offload, fsdp_version"):
        AccelFSDPStrategy(FullyShardedDataParallelPlugin(), fsdp_version=2, cpu_offload=True)


def test_a_wrong_field_is_the_plugins_error() -> None:
    with pytest.raises(ValueError, match="fsdp_version"):
        AccelFSDPStrategy(fsdp_version=3)


def test_two_ways_of_recomputing_are_refused() -> None:
    with pytest.raises(ValueError, match="activation_checkpointing=True recomputes the units"):
        AccelFSDPStrategy(activation_checkpointing=True, activation_checkpointing_policy={nn.Linear})


def test_another_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="64-true"):
        quiet_trainer(AccelFSDPStrategy(), 1, precision="64-true")
    with pytest.raises(TypeError, match=r"cannot work with MyPrecision, only with FSDPPrecision, Mixed"):
        quiet_trainer(AccelFSDPStrategy(), 1, plugins=[MyPrecision()])
    chosen = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", growth_interval=3))
    with pytest.raises(ValueError, match=r"65536.0, 2.0, 0.5, 3\).*set_growth_interval"):
        quiet_trainer(AccelFSDPStrategy(), 1, plugins=[chosen])


class MyPrecision(Precision):
    """Of a user's own."""


@pytest.mark.parametrize("plugin", [MixedPrecision("bf16-mixed", "cpu"), HalfPrecision("bf16-true"), Precision()])
def test_plugins_of_lightnings_say_a_precision(plugin: Precision) -> None:
    trainer = quiet_trainer(AccelFSDPStrategy(), 1, plugins=[plugin])
    assert trainer.precision == trainer.strategy.precision_plugin.precision == plugin.precision


class InDouble(TinyModule):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.model(batch[0]).dtype == torch.float64
        return super().training_step([batch[0], batch[1].float()], batch_idx)


def _train_in_double_precision(version: int) -> dict[str, Tensor]:
    strategy = AccelFSDPStrategy(fsdp_version=version, state_dict_type="full", **BLOCKS)
    trainer = quiet_trainer(strategy, 2, plugins=[DoublePrecision()], max_epochs=1)
    trainer.fit(InDouble(Case(), Outcome()), rank_loader(2))
    return dict(trainer.strategy.lightning_module_state_dict())


@pytest.mark.parametrize("version", [1, 2])
def test_double_precision(version: int) -> None:
    found = run_on_ranks(2, _train_in_double_precision, version)[0]
    expected = train_plain(Case(epochs=1), 2).weights
    for name, weight in found.items():
        assert weight.dtype == torch.float64
        torch.testing.assert_close(weight.float(), expected[name.removeprefix("model.")])  # that is in fp32


def test_what_needs_the_trainer_says_so() -> None:
    strategy = AccelFSDPStrategy()
    with pytest.raises(RuntimeError, match="only after the Trainer has connected"):
        _ = strategy.device_mesh
    with pytest.raises(RuntimeError, match="no sharded model yet"):
        _ = strategy.sharded


def _fit_error(strategy_options: dict[str, Any], trainer_options: dict[str, Any], early: bool = False) -> str:
    module = TinyModule(Case(), Outcome())
    if early:
        optimizer = torch.optim.SGD(build_model().parameters(), lr=0.1)
        module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    try:
        trainer = quiet_trainer(
            AccelFSDPStrategy(**strategy_options), dist.get_world_size(), max_steps=1, **trainer_options
        )
        trainer.fit(module, _loader())
    except (ValueError, RuntimeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("strategy_options", "trainer_options", "early", "match"),
    [
        ({"gradient_accumulation": 2}, {"accumulate_grad_batches": 3}, False, r"gradient_accumulation=2 .*=3\) differ"),
        ({"device_mesh": (2, 2)}, {}, False, r"device_mesh=\(2, 2\) must be .* = 2"),
        ({"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD"}, {}, False, r"HYBRID_SHARD .*device_mesh="),
        ({"fsdp_version": 2}, {}, True, r"has no sharded parameter.*configure_optimizers"),
        ({"fsdp_version": 1}, {}, True, r"has no sharded parameter.*configure_optimizers"),
        (
            {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Blok"]},
            {},
            False,
            "Blok",
        ),
        ({"activation_checkpointing": True}, {}, False, "the wrap policy creates no unit"),
    ],
    ids=["accumulation", "mesh", "hybrid", "stale_fsdp2", "stale_fsdp1", "class_name", "checkpointing"],
)
def test_what_does_not_fit_is_explained(
    strategy_options: dict[str, Any], trainer_options: dict[str, Any], early: bool, match: str
) -> None:
    for message in run_on_ranks(2, _fit_error, strategy_options, trainer_options, early):
        assert message, "nothing was refused"
        with pytest.raises(AssertionError, match=match):
            raise AssertionError(message)


def _other_version_again() -> str:
    module = TinyModule(Case(), Outcome())
    quiet_trainer(AccelFSDPStrategy(fsdp_version=1), 1, max_steps=1).fit(module, _loader())
    try:
        quiet_trainer(AccelFSDPStrategy(fsdp_version=2), 1, max_steps=1).fit(module, _loader())
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_module_is_not_sharded_by_both_versions() -> None:
    assert "already sharded with FSDP1" in run_on_ranks(1, _other_version_again)[0]


def _again(version: int, options: dict[str, Any], precision: Any) -> str:
    module = TinyModule(Case(), Outcome())
    first = quiet_trainer(AccelFSDPStrategy(fsdp_version=version), 2, max_steps=1, precision="bf16-mixed")
    first.fit(module, _loader())
    trainer = quiet_trainer(AccelFSDPStrategy(fsdp_version=version, **options), 2, precision=precision)
    try:
        trainer.validate(module, _loader(), verbose=False)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("version", [1, 2])
def test_a_sharded_module_keeps_its_precision_and_mesh(version: int) -> None:
    assert run_on_ranks(2, _again, version, {}, "bf16-mixed") == ["", ""]
    for options, precision, before, after in (
        ({}, "32-true", "param_dtype torch.bfloat16, reduce_dtype torch.bfloat16", "param_dtype as stored"),
        ({"device_mesh": (2, 1)}, "bf16-mixed", "a mesh of 2 processes", "a mesh of 2 x 1 processes"),
    ):
        message = run_on_ranks(2, _again, version, options, precision)[0]
        assert f"is already sharded with {before}, and cannot be sharded again with {after}" in message


class _ReadsBeforeStep(TinyModule):
    """Calls a part between a backward and its step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            self.model.blocks[0](self.model.embed(torch.zeros(2, 5)))


def _prefetches(prefetch: bool) -> list[Tensor]:
    strategy = AccelFSDPStrategy(fsdp_version=2, forward_prefetch=prefetch, **BLOCKS)
    module = _ReadsBeforeStep(Case(), Outcome())
    quiet_trainer(strategy, 2, max_epochs=1).fit(module, _loader())
    return [one.clone() for one in strategy.full_state_dict(module).values()]


def test_a_prefetched_unit_that_was_not_used_is_gathered_again() -> None:
    [found, _], [expected, _] = (run_on_ranks(2, _prefetches, prefetch) for prefetch in (True, False))
    assert all(map(torch.equal, found, expected))


def _last_without_loss(strategy: Any) -> list[Tensor]:
    class WithoutLast(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    module = WithoutLast(Case(), Outcome())
    chosen = strategy if strategy == "auto" else AccelFSDPStrategy(fsdp_version=strategy)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "use_distributed_sampler": False}
    trainer = quiet_trainer(chosen, 1, max_epochs=1, **options)
    trainer.fit(module, DataLoader(dataset(1), 2))
    return [one.clone() for one in full_state_dict(trainer.strategy, module).values()]


@pytest.mark.parametrize("version", [1, 2])
def test_a_window_whose_last_micro_batch_has_no_loss_steps(version: int) -> None:
    [expected], [found] = (run_on_ranks(1, _last_without_loss, strategy) for strategy in ("auto", version))
    torch.testing.assert_close(found, expected)


def _skips(version: int, batches: list[int], skips: bool) -> tuple[float, list[Tensor]]:
    class Skipping(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if skips and batch_idx not in batches else super().training_step(batch, batch_idx)

    strategy, module, loader = AccelFSDPStrategy(fsdp_version=version), Skipping(Case(), Outcome()), _loader()
    options: dict[str, Any] = {"precision": "16-mixed", "gradient_clip_val": 0.05, "use_distributed_sampler": False}
    trainer = quiet_trainer(strategy, 1, max_epochs=1, **options)
    chosen = [one for number, one in enumerate(loader) if skips or number in batches]
    trainer.fit(module, DataLoader(chosen, batch_size=None))  # type: ignore[arg-type]
    scaler: Any = strategy.precision_plugin.scaler
    return scaler.get_scale(), [one.clone() for one in strategy.full_state_dict(module).values()]


@pytest.mark.parametrize("version", [1, 2])
def test_a_step_without_loss_leaves_the_gradient_scaler_alone(version: int) -> None:
    [found], [expected] = (run_on_ranks(1, _skips, version, [1, 3], skips) for skips in (True, False))
    assert found[0] == expected[0] > 1
    assert all(map(torch.equal, found[1], expected[1]))


def _nonfinite(version: int) -> str:
    class Exploding(TinyModule):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            next(p for p in self.parameters() if p.grad is not None).grad.mul_(float("inf"))  # type: ignore[union-attr]
            cast("AccelFSDPStrategy", self.trainer.strategy).clip_grad_norm(optimizer, 1.0, error_if_nonfinite=True)

    try:
        strategy = AccelFSDPStrategy(fsdp_version=version)
        quiet_trainer(strategy, 2, max_steps=1).fit(Exploding(Case(), Outcome()), _loader())
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("version", [1, 2])
def test_a_nonfinite_norm_is_an_error_when_asked_for(version: int) -> None:
    assert all("cannot be clipped" in message for message in run_on_ranks(2, _nonfinite, version))


def _state_in_hooks() -> list[int]:
    seen: list[int] = []

    class Watch(Callback):
        def setup(self, *_: Any, **__: Any) -> None:
            seen.append(PartialState().num_processes)

        def on_train_end(self, *_: Any) -> None:
            seen.append(PartialState().process_index)

    strategy = AccelFSDPStrategy(fsdp_version=2)
    loader = DataLoader(dataset(2), BATCH_SIZE)
    quiet_trainer(strategy, 2, max_steps=1, callbacks=[Watch()]).fit(TinyModule(Case(), Outcome()), loader)
    assert strategy.is_main_process is PartialState().is_main_process
    assert strategy.device == PartialState().device
    return seen


def test_partial_state_tells_the_truth_in_hooks() -> None:
    assert run_on_ranks(2, _state_in_hooks, init_group=False) == [[2, 0], [2, 1]]


class WrapsItself(TinyModule):
    """As Lightning's documentation of FSDP1 has it."""

    def configure_model(self) -> None:
        self.model.blocks = nn.Sequential(*(wrap(block) for block in self.model.blocks))


def _units_by_wrap(version: int) -> tuple[int, Outcome]:
    outcome = Outcome()
    trainer = quiet_trainer(AccelFSDPStrategy(fsdp_version=version, state_dict_type="full"), 2, max_epochs=2)
    trainer.fit(WrapsItself(Case(), outcome), rank_loader(2))
    outcome.global_step = trainer.global_step
    weights = trainer.strategy.lightning_module_state_dict()
    outcome.weights = {name.removeprefix("model."): tensor.clone() for name, tensor in weights.items()}
    root = cast("AccelFSDPStrategy", trainer.strategy).sharded.root
    return sum(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in root.modules()), outcome


@pytest.mark.parametrize("version", [1, 2])
def test_wrap_in_configure_model_makes_units(version: int) -> None:
    num_units, outcome = run_on_ranks(2, _units_by_wrap, version)[0]
    assert num_units == 3  # the blocks and the root
    assert_same(outcome, train_plain(Case(), 2))


class WrapsWithOptions(TinyModule):
    def configure_model(self) -> None:
        wrap(self.model.head, cpu_offload=True)


def _wrap_with_options() -> None:
    trainer = quiet_trainer(AccelFSDPStrategy(fsdp_version=2), 1, max_epochs=1)
    with pytest.raises(
        TypeError, match=r"wrap\(Linear\(...\), cpu_offload=...\).*only selects units, and accepts no options"
    ):
        trainer.fit(WrapsWithOptions(Case(), Outcome()), rank_loader(1))


def test_options_of_wrap_are_refused() -> None:
    run_on_ranks(1, _wrap_with_options)


def _told(options: dict[str, Any]) -> list[str]:
    with log_messages(RANK_ZERO) as lines:
        trainer = quiet_trainer(AccelFSDPStrategy(fsdp_version=2, **options), 2, max_epochs=1)
        trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
    return [line for line in lines if "as one unit" in line]


def test_one_unit_of_the_whole_model_is_told_once() -> None:
    told, silent = run_on_ranks(2, _told, {})
    assert [line[: line.index(":")] for line in told] == ["FSDP2 shards TinyModule as one unit"]
    assert not silent
    assert run_on_ranks(2, _told, BLOCKS) == [[], []]
