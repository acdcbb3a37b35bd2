"""Plans against what the allocator counts in real training of two gloo processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy, ParallelismConfig
from accelight.strategies.planning import plan_memory
from accelight.strategies.planning.example_model import causal_lm_batch
from tests.ranks import forget_processes, run_on_ranks
from tests.strategies.planning.measured import NUM_STEPS, Measured, build_allocator, measure
from tests.strategies.planning.models import Images, LanguageModel, images, small_llama, text, write_llama_config

WORLD_SIZE = 2
TOLERANCE = 0.10
"""What is promised."""

WEIGHTS = {"width": 448, "depth": 3, "length": 64}
ACTIVATIONS = {"width": 128, "depth": 4, "length": 256}


@dataclass(frozen=True)
class Case:
    options: dict[str, Any]
    model: dict[str, Any] = field(default_factory=lambda: WEIGHTS)
    batch_size: int = 2
    trainer: dict[str, Any] = field(default_factory=dict)
    num_steps: int = NUM_STEPS


MIXED, HALF = {"precision": "bf16-mixed"}, {"precision": "bf16-true"}
CHECKPOINTED = {"activation_checkpointing": True}
BLOCKS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
ONE, TWO = {"fsdp_version": 1, **BLOCKS}, {"fsdp_version": 2, **BLOCKS}
OFFLOADED = {"offload_optimizer_device": "cpu"}
CUT = {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}
CASES = {
    "fsdp2-weights": Case(TWO),
    "fsdp2-activations": Case(TWO, ACTIVATIONS, 16, {"gradient_clip_val": 1.0}),
    "fsdp2-checkpointed": Case({**TWO, **CHECKPOINTED}, ACTIVATIONS, 16),
    "fsdp2-shard-grad-op": Case({**TWO, "reshard_after_forward": False}, trainer={"accumulate_grad_batches": 3}),
    "fsdp2-kept-gathered": Case({**TWO, "reshard_during_accumulation": False}, trainer={"accumulate_grad_batches": 4}),
    "fsdp2-one-unit": Case({"fsdp_version": 2}, {**WEIGHTS, "optimizer": "sgd"}),
    "fsdp2-mixed": Case(TWO, ACTIVATIONS, 4, {**MIXED, "gradient_clip_val": 1.0}),
    "fsdp2-half-checkpointed": Case({**TWO, **CHECKPOINTED}, ACTIVATIONS, 4, HALF),
    "fsdp2-offloaded": Case({**TWO, "cpu_offload": True}, trainer={"gradient_clip_val": 1.0}),
    "fsdp2-tensor-parallel": Case({**TWO, "parallelism_config": ParallelismConfig(tp_size=2), "tp_plan": CUT}),
    "fsdp2-sequences": Case(
        {**TWO, "parallelism_config": ParallelismConfig(sp_size=2), "sequence_modules": ["blocks"]}, ACTIVATIONS, 16
    ),
    "fsdp2-context": Case(
        {**TWO, "parallelism_config": ParallelismConfig(cp_size=2), "sequence_modules": ["blocks"]}, ACTIVATIONS, 16
    ),
    "fsdp1-weights": Case(ONE),
    "fsdp1-checkpointed": Case({**ONE, **CHECKPOINTED}, ACTIVATIONS, 16),
    "fsdp1-shard-grad-op": Case({**ONE, "sharding_strategy": "SHARD_GRAD_OP"}, ACTIVATIONS, 16),
    "fsdp1-accumulate": Case(ONE, trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 1.0}),
    "fsdp1-mixed": Case({**ONE, "use_orig_params": False}, ACTIVATIONS, 4, {**MIXED, "gradient_clip_val": 1.0}),
    "fsdp1-half": Case(ONE, ACTIVATIONS, 4, HALF),
    "fsdp1-fp16": Case(ONE, ACTIVATIONS, 4, {"precision": "16-mixed"}, num_steps=8),  # the scaler skips some
    "zero1-activations": Case({"zero_stage": 1}, ACTIVATIONS, 16),
    "zero2-weights": Case({"zero_stage": 2}, trainer={"gradient_clip_val": 1.0}),
    "zero2-mixed": Case({"zero_stage": 2}, ACTIVATIONS, 4, MIXED),
    "zero2-offloaded": Case({"zero_stage": 2, **OFFLOADED}),
    "zero3-weights": Case({"zero_stage": 3}),
    "zero3-mixed-accumulate": Case({"zero_stage": 3}, ACTIVATIONS, 4, {**MIXED, "accumulate_grad_batches": 3}),
    "zero3-offloaded": Case({"zero_stage": 3, **OFFLOADED, "offload_param_device": "cpu"}),
}  # fmt: skip
CORE = ("fsdp2-weights", "zero2-weights")


@pytest.fixture(scope="module")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield str(build_allocator(tmp_path_factory.mktemp("allocator")))
    forget_processes(WORLD_SIZE)  # theirs counts for good


def strategy_of(options: dict[str, Any]) -> Any:
    return (AccelDeepSpeedStrategy if "zero_stage" in options else AccelFSDPStrategy)(**options)


def _measure(
    library: str, make_module: Any, make_batch: Any, options: dict[str, Any], trainer: dict[str, Any], num_steps: int
) -> Measured:
    return measure(library, make_module, make_batch, strategy_of(options), WORLD_SIZE, num_steps, **trainer)


def _compare(
    library: str,
    make_module: Any,
    make_batch: Any,
    options: dict[str, Any],
    trainer: dict[str, Any],
    num_steps: int = NUM_STEPS,
) -> None:
    plan = plan_memory(
        make_module, make_batch(), partial(strategy_of, options), world_size=WORLD_SIZE,
        **{"precision": "32-true", **trainer},
    )  # fmt: skip
    ranks = run_on_ranks(
        WORLD_SIZE, _measure, library, make_module, make_batch, options, trainer, num_steps, timeout_s=250
    )
    most = max(rank.peak_bytes for rank in ranks)
    print(f"planned {plan.peak_bytes:,} measured {most:,} ({plan.peak_bytes / most - 1:+.3%}); building "
          f"{plan.init_peak_bytes:,} {max(rank.init_peak_bytes for rank in ranks):,}; "
          f"between steps {plan.steady_state_bytes:,} {max(rank.steady_state_bytes for rank in ranks):,}")  # fmt: skip
    assert plan.peak_bytes == pytest.approx(most, rel=TOLERANCE)
    assert plan.steady_state_bytes == pytest.approx(max(rank.steady_state_bytes for rank in ranks), rel=TOLERANCE)
    assert plan.init_peak_bytes == pytest.approx(max(rank.init_peak_bytes for rank in ranks), rel=TOLERANCE)
    assert sum(plan.parts.values()) == plan.peak_bytes


@pytest.mark.parametrize(
    "name", [name if name in CORE else pytest.param(name, marks=pytest.mark.machines) for name in CASES]
)
def test_the_peak_is_what_is_measured(name: str, allocator: str) -> None:
    case = CASES[name]
    make_batch = partial(text, case.batch_size, case.model["length"])
    _compare(allocator, partial(LanguageModel, **case.model), make_batch, case.options, case.trainer, case.num_steps)


@pytest.mark.machines
@pytest.mark.parametrize("options", [{"fsdp_version": 2}, {"zero_stage": 1}], ids=["fsdp2", "zero1"])
def test_the_peak_of_a_convolutional_network(options: dict[str, Any], allocator: str) -> None:
    _compare(allocator, Images, partial(images, 16), options, {})


LLAMA = {"auto_wrap_policy": "transformer_based_wrap"}


@pytest.mark.machines
@pytest.mark.parametrize(
    "options",
    [{"fsdp_version": 2, **LLAMA}, {"fsdp_version": 1, **LLAMA, **CHECKPOINTED}, {"zero_stage": 3}],
    ids=["fsdp2", "fsdp1-checkpointed", "zero3"],
)
def test_the_peak_of_a_hugging_face_config(options: dict[str, Any], allocator: str, tmp_path: Path) -> None:
    write_llama_config(str(tmp_path))
    _compare(allocator, partial(small_llama, str(tmp_path)), partial(causal_lm_batch, 4, 128), options, {})
