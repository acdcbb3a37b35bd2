"""The logged norm is that of a plain loop, whatever shards the model, and costs no reduction that is not needed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from accelight.callbacks import GradNormMonitor
from accelight.state import GradientAccumulationPlugin, PartialState, reset_state
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import fp16_on_cpu
from tests.strategies.oracle import (
    BATCH_SIZE,
    NUM_MICRO_BATCHES,
    Case,
    Outcome,
    TinyModule,
    build_model,
    dataset,
    quiet_trainer,
    rank_loader,
)

BLOCKS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp1": {"fsdp_version": 1, "use_orig_params": False, **BLOCKS},
    "fsdp1_orig_params": {"fsdp_version": 1, "use_orig_params": True, **BLOCKS},
    "fsdp2": {"fsdp_version": 2, **BLOCKS},
}
GROUPS = {"embed": r"embed\.", "blocks": r"blocks\.\d", "biases": r"bias$"}


class Recorder(Callback):
    """What stands in the metrics after each optimizer step."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []
        self.step = 0

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step > self.step:
            metrics = trainer.callback_metrics
            self.found.append({name: float(norm) for name, norm in metrics.items() if name.startswith("grad_norm")})
            self.step = trainer.global_step

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self.on_train_batch_start(trainer)


def monitored(strategy: Any, case: Case, monitor: GradNormMonitor | None, module: Any = None) -> list[dict[str, float]]:
    size, recorder = PartialState().num_processes, Recorder()
    trainer = quiet_trainer(
        strategy,
        size,
        max_epochs=case.epochs,
        precision=case.precision,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip_norm or case.clip_value,
        gradient_clip_algorithm="norm" if case.clip_norm else "value" if case.clip_value else None,
        callbacks=[recorder, *([] if monitor is None else [monitor])],
    )
    trainer.fit(module or TinyModule(case, Outcome()), rank_loader(size))
    return recorder.found


def plain_norms(case: Case, world_size: int, norm_type: float = 2.0, freeze: Any = None) -> list[dict[str, float]]:
    """Train in a plain loop; for each step the norm of all gradients and of each of `GROUPS`, before clipping."""
    found: list[dict[str, float]] = []
    model = build_model()
    if freeze is not None:
        freeze(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = dataset(world_size).tensors
    size = BATCH_SIZE * world_size
    chosen = {"": [""], "embed": ["embed."], "blocks": ["blocks."], "biases": ["bias"]}
    for start in [i for _ in range(case.epochs) for i in range(0, NUM_MICRO_BATCHES, case.accumulate)]:
        window = range(start, min(start + case.accumulate, NUM_MICRO_BATCHES))
        optimizer.zero_grad()
        for index in window:
            batch = slice(index * size, (index + 1) * size)
            (nn.functional.mse_loss(model(inputs[batch]), targets[batch]) / case.accumulate).backward()
        gradients = {n: p.grad.flatten() for n, p in model.named_parameters() if p.grad is not None}
        found.append({})
        for label, parts in chosen.items():
            members = [g for n, g in gradients.items() if any(part in n for part in parts)]
            if members:
                key = f"grad_norm/{label}" if label else "grad_norm"
                found[-1][key] = torch.linalg.vector_norm(torch.cat(members), norm_type).item()
        if case.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        if case.clip_value:
            nn.utils.clip_grad_value_(model.parameters(), case.clip_value)
        optimizer.step()
    return found


def assert_same_norms(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Sums of squares in another order, after up to 14 steps with weights that differ as much: some 1e-6."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx({name: theirs[name] for name in ours}, rel=1e-4)


# ---------------------------------------------------------------------- sharded, against a plain loop
CASES = {
    "plain": Case(epochs=1),
    "accumulate": Case(accumulate=3, epochs=1),
    "clip_norm": Case(accumulate=3, clip_norm=0.5),
    "clip_value": Case(accumulate=2, clip_value=0.05, epochs=1),
}


def monitor_all_cases(options: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        found[name] = monitored(AccelFSDPStrategy(**options), case, GradNormMonitor())
    found["groups"] = monitored(AccelFSDPStrategy(**options), CASES["clip_norm"], GradNormMonitor(GROUPS))
    found["inf"] = monitored(AccelFSDPStrategy(**options), CASES["accumulate"], GradNormMonitor(GROUPS, 1, math.inf))
    return found


@pytest.mark.core("fsdp1]")
@pytest.mark.parametrize("engine", ENGINES)
def test_fsdp_logs_the_norm_of_a_plain_loop(engine: str) -> None:
    for found in run_on_ranks(2, monitor_all_cases, ENGINES[engine], timeout_s=200):
        for name, case in CASES.items():
            assert_same_norms(found[name], plain_norms(case, 2))
            assert set(found[name][0]) == {"grad_norm"}
        assert_same_norms(found["groups"], plain_norms(CASES["clip_norm"], 2))
        assert_same_norms(found["inf"], plain_norms(CASES["accumulate"], 2, math.inf))
        assert set(found["groups"][0]) == {"grad_norm", "grad_norm/embed", "grad_norm/blocks", "grad_norm/biases"}


class Frozen(TinyModule):
    def __init__(self, case: Case) -> None:
        super().__init__(case, Outcome())
        self.model.blocks[0].requires_grad_(False)


def monitor_what_is_not_sharded(options: dict[str, Any]) -> list[dict[str, float]]:
    case = Case(accumulate=3)
    return monitored(
        AccelFSDPStrategy(ignored_modules=r"model\.head", **options), case, GradNormMonitor(GROUPS), Frozen(case)
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_frozen_ignored_and_offloaded_parameters(engine: str) -> None:
    options = {**ENGINES[engine], "cpu_offload": True}
    expected = plain_norms(Case(accumulate=3), 2, freeze=lambda model: model.blocks[0].requires_grad_(False))
    for found in run_on_ranks(2, monitor_what_is_not_sharded, options):
        assert_same_norms(found, expected)
        assert len(found[0]) == 4


@pytest.mark.parametrize(("strategy", "world_size"), [("ddp", 2), ("auto", 1)])
def test_ddp_and_a_single_device(strategy: str, world_size: int) -> None:
    case = Case(clip_norm=0.5)
    for found in run_on_ranks(world_size, monitored, strategy, case, GradNormMonitor({"embed": "embed"})):
        assert_same_norms(found, plain_norms(case, world_size))
        assert set(found[0]) == {"grad_norm", "grad_norm/embed"}


@pytest.mark.parametrize("engine", ["fsdp1_orig_params", "fsdp2"])
def test_hybrid_sharding_counts_each_copy_once(engine: str) -> None:
    case, options = Case(epochs=1), {**ENGINES[engine], "device_mesh": (2, 2)}
    if engine.startswith("fsdp1"):
        options["sharding_strategy"] = "HYBRID_SHARD"
    for found in run_on_ranks(4, monitor_hybrid, case, options):
        assert_same_norms(found, plain_norms(case, 4))


def monitor_hybrid(case: Case, options: dict[str, Any]) -> list[dict[str, float]]:
    return monitored(AccelFSDPStrategy(**options), case, GradNormMonitor(GROUPS))


class ByItems(TinyModule):
    """Its gradients are divided by the number of items as the window ends."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "num_items": len(batch[0])}


def monitor_deepspeed(stage: int) -> tuple[Any, Any, Any]:
    config: dict[str, Any] = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 64}}
    whole = monitored(AccelDeepSpeedStrategy(hf_ds_config=config), CASES["clip_norm"], GradNormMonitor())
    reset_state()
    grouped = monitored(AccelDeepSpeedStrategy(hf_ds_config=config), CASES["accumulate"], GradNormMonitor(GROUPS))
    reset_state()
    items = GradientAccumulationPlugin(average_over="items")
    strategy = AccelDeepSpeedStrategy(hf_ds_config=config, gradient_accumulation=items)
    by_items = monitored(strategy, Case(epochs=1), GradNormMonitor(GROUPS), ByItems(Case(), Outcome()))
    reset_state()
    return whole, grouped, by_items


@pytest.mark.core("3")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_deepspeed_logs_the_norm_of_a_plain_loop(stage: int) -> None:
    for whole, grouped, by_items in run_on_ranks(2, monitor_deepspeed, stage, timeout_s=200):
        assert_same_norms(whole, plain_norms(CASES["clip_norm"], 2))
        assert_same_norms(by_items, plain_norms(Case(epochs=1), 2))
        assert_same_norms(grouped, plain_norms(CASES["accumulate"], 2))
        assert set(grouped[0]) == {"grad_norm", "grad_norm/embed", "grad_norm/blocks", "grad_norm/biases"}


class Half(TinyModule):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([part.half() for part in batch], batch_idx)


def monitor_groups_in_fp16(stage: int) -> list[dict[str, float]]:
    fp16 = {"enabled": True, "loss_scale": 128}
    config: dict[str, Any] = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 64}, "fp16": fp16}
    case = Case(epochs=1, accumulate=3, precision="16-mixed")
    strategy = AccelDeepSpeedStrategy(hf_ds_config=config)
    try:
        with fp16_on_cpu():
            return monitored(strategy, case, GradNormMonitor(GROUPS), Half(case, Outcome()))
    finally:
        reset_state()


@pytest.mark.parametrize("stage", [2, 3])
def test_groups_under_deepspeed_with_fp16_are_those_of_unscaled_gradients(stage: int) -> None:
    for found in run_on_ranks(2, monitor_groups_in_fp16, stage, timeout_s=100):
        expected = plain_norms(Case(epochs=1, accumulate=3), 2)
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-2)  # fp16 has 11 bits; the scale is 128


# ---------------------------------------------------------------------- reductions
def count_reductions(engine: str, case: Case) -> tuple[int, int, int]:
    """Reductions with the monitor beyond those without it, the same with groups; and the number of steps."""
    counts: list[int] = []
    original = dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return original(*args, **kwargs)

    steps = 0
    dist.all_reduce = counting
    try:
        for monitor in (None, GradNormMonitor(), GradNormMonitor(GROUPS)):
            counts.append(0)
            strategy: Any = "ddp" if engine == "ddp" else AccelFSDPStrategy(**ENGINES[engine])
            steps = len(monitored(strategy, case, monitor))
    finally:
        dist.all_reduce = original
    return counts[1] - counts[0], counts[2] - counts[0], steps


@pytest.mark.parametrize(
    ("engine", "case", "plain", "grouped"),
    [
        ("fsdp1", Case(epochs=1, clip_norm=0.5), 0, 1),
        ("fsdp2", Case(epochs=1, clip_norm=0.5, accumulate=3), 0, 1),
        ("fsdp2", Case(epochs=1), 1, 1),
        ("ddp", Case(epochs=1, clip_norm=0.5), 0, 0),
    ],
)
def test_reductions_for_each_step(engine: str, case: Case, plain: int, grouped: int) -> None:
    for with_monitor, with_groups, steps in run_on_ranks(2, count_reductions, engine, case, timeout_s=100):
        assert (with_monitor, with_groups) == (plain * steps, grouped * steps)


# ---------------------------------------------------------------------- other ways to clip and to step
class ClipsItself(TinyModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


def clip_in_a_hook() -> list[dict[str, float]]:
    case = Case(epochs=1)
    return monitored(AccelFSDPStrategy(**ENGINES["fsdp2"]), case, GradNormMonitor(), ClipsItself(case, Outcome()))


def test_clipping_in_a_hook_of_the_module() -> None:
    for found in run_on_ranks(2, clip_in_a_hook):
        assert_same_norms(found, plain_norms(Case(epochs=1, clip_norm=0.5), 2))


class TwoOptimizers(TinyModule):
    """Clips the first one's gradients by hand; notes both norms, from whole gradients."""

    def __init__(self) -> None:
        super().__init__(Case(), Outcome())
        self.automatic_optimization = False
        self.norms: list[dict[str, float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.manual_backward(loss)
        self.norms.append({})
        for index, optimizer in enumerate(optimizers):
            gradients: list[Any] = [p.grad for group in optimizer.param_groups for p in group["params"]]
            whole = torch.cat([gradient.full_tensor().flatten() for gradient in gradients])
            self.norms[-1][f"grad_norm/{index}"] = whole.norm().item()
        strategy: Any = self.trainer.strategy
        strategy.clip_grad_norm(optimizers[0].optimizer, 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        head = list(self.model.head.parameters())
        rest = [p for p in self.model.parameters() if all(p is not other for other in head)]
        return [torch.optim.SGD(part, lr=0.1) for part in (rest, head)]


def step_two_optimizers() -> tuple[Any, Any]:
    module = TwoOptimizers()
    recorder = Recorder()
    strategy = AccelFSDPStrategy(**ENGINES["fsdp2"])
    trainer = quiet_trainer(strategy, 2, max_epochs=1, callbacks=[recorder, GradNormMonitor()])
    trainer.fit(module, rank_loader(2))
    return recorder.found, module.norms


def test_two_optimizers_one_clipped_by_hand() -> None:
    for found, expected in run_on_ranks(2, step_two_optimizers):
        assert len(expected) == NUM_MICRO_BATCHES
        assert_same_norms(found, expected)


# ---------------------------------------------------------------------- the rest
def measure_every_third_and_resume(folder: str) -> tuple[Any, ...]:
    monitor, case = GradNormMonitor(every_n_steps=3), Case(epochs=1)
    recorder = Recorder()
    trainer = quiet_trainer(AccelFSDPStrategy(**ENGINES["fsdp2"]), 2, max_epochs=1, callbacks=[monitor, recorder])
    trainer.fit(TinyModule(case, Outcome()), rank_loader(2))
    recorded = [next(iter(found.values()), 0.0) for found in recorder.found]
    trainer.save_checkpoint(f"{folder}/saved.ckpt")
    restored = GradNormMonitor(every_n_steps=3)
    trainer = quiet_trainer(AccelFSDPStrategy(**ENGINES["fsdp2"]), 2, max_epochs=1, callbacks=[restored])
    trainer.fit(TinyModule(case, Outcome()), rank_loader(2), ckpt_path=f"{folder}/saved.ckpt", weights_only=False)
    return recorded, float(monitor.last["grad_norm"]), float(restored.last["grad_norm"])


def test_every_third_step_and_what_a_checkpoint_keeps(tmp_path: Any) -> None:
    expected = [found["grad_norm"] for found in plain_norms(Case(epochs=1), 2)]
    shown = [0.0, 0.0, *[expected[2]] * 3, *[expected[5]] * 2]
    for recorded, last, restored in run_on_ranks(2, measure_every_third_and_resume, str(tmp_path)):
        assert recorded == pytest.approx(shown, rel=1e-4)
        assert last == restored == pytest.approx(expected[5], rel=1e-4)


def ask_for_a_group_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"No gradient belongs to 'decoder'\. The gradients belong to model\.embed"):
        monitored(AccelFSDPStrategy(**ENGINES["fsdp2"]), Case(), GradNormMonitor({"decoder": "decoder"}))


def test_a_group_without_parameters_is_an_error() -> None:
    run_on_ranks(2, ask_for_a_group_that_is_not_there)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be an int >= 1, got 0"),
        ({"norm_type": 0}, "norm_type must be > 0, got 0"),
        ({"groups": {"a": "("}}, r"groups\['a'\]: '\(' is not a regular expression"),
    ],
)
def test_arguments_out_of_range(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradNormMonitor(**arguments)
