"""Each key of a DeepSpeed config is trained with here, named in the log, or refused: nothing is dropped silently."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from accelight.strategies import AccelDeepSpeedStrategy, DeepSpeedPlugin, HfDeepSpeedConfig
from accelight.strategies.deepspeed.ds_config import (
    FEATURES,
    Feature,
    TrainingFacts,
    check_features,
    resolve,
    untested_line,
)
from tests.log_messages import RANK_ZERO, log_messages
from tests.ranks import run_on_ranks
from tests.strategies.deepspeed.training import OFFLOADED, ds_config, train_deepspeed
from tests.strategies.oracle import Case, Outcome, TinyModule, assert_same, quiet_trainer, rank_loader, train_plain

BLOCK = "tests.strategies.oracle.Block"
OF_STAGES_1_AND_2: dict[str, Any] = {
    "contiguous_gradients": False,
    "reduce_scatter": False,
    "allgather_partitions": False,
    "allgather_bucket_size": 16,
    "use_multi_rank_bucket_allreduce": False,
    "round_robin_gradients": True,
    "parameter_alignment": True,
    "ignore_unused_parameters": False,
}
OF_STAGE_3: dict[str, Any] = {
    "overlap_comm": False,
    "contiguous_gradients": False,
    "reduce_scatter": False,
    "sub_group_size": 20,
    "stage3_max_live_parameters": 10,
    "stage3_max_reuse_distance": 10,
    "stage3_model_persistence_threshold": 10,
    "stage3_use_all_reduce_for_fetch_params": True,
    "stage3_allgather_sequential": True,
    "leaf_module": {"classes": [BLOCK]},
    "memory_efficient_linear": False,
    "override_module_apply": False,
    "enable_sanity_checks": True,
    "log_trace_cache_warnings": True,
}
ANYWHERE: dict[str, Any] = {
    "managed_gradient_accumulation": True,
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
    "csv_monitor": {"enabled": True},
    "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": "flops.txt"},
    "comms_logger": {"enabled": True},
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "dump_state": True,
    "timers": {"throughput": {"enabled": False}},
    "steps_per_print": 1,
    "disable_python_gc": True,
    "communication_data_type": "fp32",
}
CELLS: dict[str, dict[str, Any]] = {
    **{f"{name}-{stage}": ds_config(stage, **{name: OF_STAGES_1_AND_2[name]})
       for name, stage in itertools.product(OF_STAGES_1_AND_2, (1, 2))},
    "overlap_comm-2": ds_config(2, overlap_comm=True),
    "round_robin_gradients-offloaded": ds_config(2, round_robin_gradients=True, **OFFLOADED)
    | {"zero_force_ds_cpu_optimizer": False},
    **{f"{name}-3": ds_config(3, **{name: value}) for name, value in OF_STAGE_3.items()},
    **{f"{name}-{stage}": {**ds_config(stage), name: ANYWHERE[name]}
       for name, stage in itertools.product(ANYWHERE, (0, 2, 3))},
    **{f"{name}-{stage}": {**ds_config(stage), "prescale_gradients": prescales, "gradient_predivide_factor": 2.0}
       for (name, prescales), stage in itertools.product((("prescale", True), ("predivide", False)), (0, 1))},
    **{f"prescale_alone-{stage}": {**ds_config(stage), "prescale_gradients": True} for stage in (0, 1)},
}  # fmt: skip
"""Configs that change no number."""
ROUNDED: dict[str, dict[str, Any]] = {
    f"{name}-{stage}": {**ds_config(stage), name: value}
    for (name, value), stage in itertools.product(
        (("communication_data_type", "bf16"), ("torch_autocast", {"enabled": True, "dtype": "bfloat16"})), (0, 2, 3)
    )
}
"""Configs that round to bf16, which has 8 bits: steps differ by some thousandths."""
WITHOUT_NORM = {f"compute_grad_norm-{stage}": ds_config(stage, compute_grad_norm=False) for stage in (1, 2)}
ELSEWHERE = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer", "scheduler", "fp16", "bf16", "zero_allow_untested_optimizer"),
    *("zero_optimization.offload_param", "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
}
"""Keys that other files of this folder train with."""
SECOND_COPIES = {number: ds_config(3, zero_hpz_partition_size=number) for number in (2, 4)}
"""By the ranks of a node."""
CASES = [Case(accumulate=3, epochs=1), Case(accumulate=3, epochs=1, clip_norm=0.1)]


def keys_of_deepspeed() -> tuple[set[str], set[str]]:
    """Return the keys that DeepSpeed looks for at the top of a config, and those of ``zero_optimization``."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    class Recorded(dict[str, Any]):
        def __contains__(self, key: object) -> bool:
            asked.add(str(key))
            return super().__contains__(key)

        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return super().get(key, default)

        def keys(self) -> Any:
            return self

    asked: set[str] = set()
    DeepSpeedConfig(Recorded(train_micro_batch_size_per_gpu=1))
    return asked, {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}


def test_every_key_of_deepspeed_is_in_the_table() -> None:
    top, zero = run_on_ranks(1, keys_of_deepspeed)[0]
    keys = {key for feature in FEATURES for key in feature.keys}
    assert len(top) > 50
    assert top - {key.partition(".")[0] for key in keys} == set()
    assert {f"zero_optimization.{name}" for name in zero} - keys == set()


def test_every_tested_key_is_trained_with() -> None:
    configs = [
        HfDeepSpeedConfig(each)
        for each in (*CELLS.values(), *ROUNDED.values(), *WITHOUT_NORM.values(), SECOND_COPIES[2])
    ]
    for key in keys_answered("tested"):
        if key in ELSEWHERE:
            files = Path(__file__).parent.glob("*.py")
            assert any(key.rpartition(".")[2] in file.read_text() for file in files if file != Path(__file__)), key
        else:
            assert any(config.get_value(key) is not None for config in configs), key


def keys_answered(answer: str) -> list[str]:
    return [key for feature in FEATURES if feature.answer == answer for key in feature.keys]


def train_all(config: dict[str, Any], cases: Iterable[Case], folder: str) -> list[Outcome]:
    for name, key in (("csv_monitor", "output_path"), ("flops_profiler", "output_file")):
        if name in config:
            config = {**config, name: {**config[name], key: f"{folder}/{name}"}}
    return [train_deepspeed(case, config) for case in cases]


@pytest.mark.core("round_robin_gradients-2", "leaf_module-3", "predivide-1", "csv_monitor-0")
@pytest.mark.parametrize("config", CELLS.values(), ids=CELLS)
def test_trains_as_a_plain_loop(config: dict[str, Any], tmp_path: Path) -> None:
    for outcomes in run_on_ranks(2, train_all, config, CASES, str(tmp_path), timeout_s=120):
        for case, found in zip(CASES, outcomes, strict=True):
            if case.clip_norm is None:
                found.grad_norms.clear()
            assert_same(found, train_plain(case, 2))
    if "csv_monitor" in config:
        assert [path.name for path in tmp_path.rglob("*.csv")] == ["Train_Samples_lr.csv"]


@pytest.mark.core("communication_data_type-2")
@pytest.mark.parametrize("config", ROUNDED.values(), ids=ROUNDED)
def test_rounded_training_is_near_a_plain_loop(config: dict[str, Any], tmp_path: Path) -> None:
    expected = train_plain(CASES[0], 2)
    for [found] in run_on_ranks(2, train_all, config, CASES[:1], str(tmp_path), timeout_s=120):
        found.grad_norms.clear()
        assert_same(found, expected, rtol=2e-2, atol=1e-2)
        with pytest.raises(AssertionError):
            assert_same(found, expected)


@pytest.mark.core("1")
@pytest.mark.parametrize("config", WITHOUT_NORM.values(), ids=WITHOUT_NORM)
def test_norms_may_be_left_out(config: dict[str, Any], tmp_path: Path) -> None:
    for [found] in run_on_ranks(2, train_all, config, CASES[:1], str(tmp_path), timeout_s=120):
        assert_same(found, train_plain(CASES[0], 2))
        assert found.grad_norms == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks_of_a_node", SECOND_COPIES)
def test_second_copies_within_nodes(ranks_of_a_node: int, tmp_path: Path) -> None:
    for outcomes in run_on_ranks(4, train_all, SECOND_COPIES[ranks_of_a_node], CASES, str(tmp_path), timeout_s=120):
        for case, found in zip(CASES, outcomes, strict=True):
            if case.clip_norm is None:
                found.grad_norms.clear()
            assert_same(found, train_plain(case, 4))


ASKING = "something"


REFUSED = [
    (feature, key, stage)
    for feature in FEATURES
    if feature.answer == "refused"
    for key in feature.keys
    for stage in feature.stages[:1]
]


@pytest.mark.parametrize(("feature", "key", "stage"), REFUSED, ids=[key for _, key, _ in REFUSED])
def test_refused_keys(feature: Feature, key: str, stage: int) -> None:
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": stage}})
    config.set_value(key, ASKING)
    with pytest.raises(ValueError, match="asks for what a Trainer cannot train with") as caught:
        DeepSpeedPlugin(hf_ds_config=config)
    assert str(caught.value).splitlines()[1:] == [f"- {key}={ASKING!r}: {feature.note}."]
    for off in (feature.off, None, "auto"):
        config.set_value(key, off)
        assert DeepSpeedPlugin(hf_ds_config=config).get_value(key, "absent") == "absent"


def test_the_config_of_transformers_documentation_with_amp_off() -> None:
    """DeepSpeed 0.19 rejects the section even so."""
    amp = {"enabled": "auto", "opt_level": "auto"}
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, "amp": amp})
    assert "amp" not in plugin.deepspeed_config


def test_summed_gradients_are_refused_in_a_changed_config_too() -> None:
    plugin = DeepSpeedPlugin(zero_stage=2)
    plugin.deepspeed_config["gradient_allreduce_op"] = "sum"
    with pytest.raises(ValueError, match="multiplies them by the number of ranks"):
        resolve(HfDeepSpeedConfig(plugin.deepspeed_config), TrainingFacts(micro_batch_size=1))


def test_a_stage_that_overlaps_and_one_that_does_not() -> None:
    check_features(HfDeepSpeedConfig(ds_config(2, overlap_comm=True)))
    with pytest.raises(ValueError, match="use stage 2"):
        check_features(HfDeepSpeedConfig(ds_config(1, overlap_comm=True)))


@pytest.mark.parametrize("dtype", ["float16", "torch.float16", "fp16", "half"])
def test_autocast_in_float16_is_refused(dtype: str) -> None:
    for stage in range(4):
        config = {**ds_config(stage), "torch_autocast": {"enabled": True, "dtype": dtype}}
        with pytest.raises(ValueError, match=r"torch_autocast.dtype='\w+': .*precision='16-mixed'"):
            check_features(HfDeepSpeedConfig(config))
        config["torch_autocast"]["enabled"] = False
        check_features(HfDeepSpeedConfig(config))


def test_untested_keys_are_named_in_one_line() -> None:
    config = {
        **ds_config(3, zenflow={"topk_ratio": 0.1}, zero_quantized_weights=False, load_from_fp32_weights=True),
        "hybrid_engine": {"enabled": True, "max_out_tokens": 64},
        "tensorboard": {"enabled": False, "job_name": "none"},
        "my_own_notes": "kept",
    }
    assert untested_line(HfDeepSpeedConfig(config)) == (
        "DeepSpeed config: zero_optimization.zenflow, hybrid_engine: passed to DeepSpeed; accelight "
        "has no test of it; my_own_notes: DeepSpeed has no such key and ignores it."
    )
    assert untested_line(HfDeepSpeedConfig(CELLS["leaf_module-3"])) is None


def lines_of_a_fit() -> list[str]:
    with log_messages(RANK_ZERO) as lines:
        strategy = AccelDeepSpeedStrategy(
            hf_ds_config={**ds_config(2), "my_own_notes": "kept", "aio": {"thread_count": 2}}
        )
        quiet_trainer(strategy, 2, max_epochs=1).fit(TinyModule(CASES[0], Outcome()), rank_loader(2))
    return [line for line in lines if line.startswith("DeepSpeed config")]


def test_a_fit_logs_the_line_once() -> None:
    here, other = run_on_ranks(2, lines_of_a_fit, timeout_s=120)
    assert len(here) == 1
    assert "aio: passed to DeepSpeed" in here[0]
    assert "my_own_notes" in here[0]
    assert other == []
