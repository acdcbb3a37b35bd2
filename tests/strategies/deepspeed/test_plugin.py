"""`DeepSpeedPlugin`: where each field comes from, and what becomes of it beside a config. The oracle is Accelerate."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import DeepSpeedPlugin as Oracle
from accelerate.utils.deepspeed import HfDeepSpeedConfig as AcceleratesConfig
from torch import nn

from accelight.state import AcceleratorState, DistributedType
from accelight.strategies.common import config as spelling
from accelight.strategies.deepspeed import DeepSpeedPlugin as Plugin
from accelight.strategies.deepspeed import HfDeepSpeedConfig, get_active_deepspeed_plugin
from accelight.strategies.deepspeed.plugin import VARIABLES

ASKED_FOR = "ACCELERATE_CONFIG_DS_FIELDS"
DOCUMENTED = {
    "hf_ds_config": None,
    "gradient_accumulation_steps": None,
    "gradient_clipping": None,
    "zero_stage": None,
    "is_train_batch_min": True,
    "offload_optimizer_device": None,
    "offload_param_device": None,
    "offload_optimizer_nvme_path": None,
    "offload_param_nvme_path": None,
    "zero3_init_flag": None,
    "zero3_save_16bit_model": None,
    "transformer_moe_cls_names": None,
    "enable_msamp": None,
    "msamp_opt_level": None,
}
SAME = [name for name in DOCUMENTED if name != "hf_ds_config"]
STAGE_2 = {"zero_optimization": {"stage": 2}}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(spelling, "_warned", set())
    for variable in (*VARIABLES.values(), ASKED_FOR, "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(variable, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def fields_of(plugin: Any) -> dict[str, Any]:
    return {name: getattr(plugin, name) for name in SAME}


def without_none(config: Any) -> Any:
    """Accelerate writes nvme_path: None, which DeepSpeed takes for absent."""
    if not isinstance(config, dict):
        return config
    return {name: without_none(value) for name, value in config.items() if value is not None}


def assert_as_accelerate(**arguments: Any) -> Plugin:
    ours, oracle = Plugin(**arguments), Oracle(**copy.deepcopy(arguments))
    assert fields_of(ours) == fields_of(oracle)
    assert ours.deepspeed_config == without_none(oracle.deepspeed_config)
    assert ours.is_zero3_init_enabled() == oracle.is_zero3_init_enabled()
    assert ours.selected is oracle.selected is False
    return ours


# ---------------------------------------------------------------- fields
def test_fields_are_the_documented_ones_in_order() -> None:
    parameters = inspect.signature(Plugin).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == DOCUMENTED
    assert list(parameters) == list(DOCUMENTED)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_accumulation_steps": 4},
        {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"},
        {"gradient_clipping": 1.5},
        {"gradient_clipping": 0.0},
        *({"zero_stage": stage} for stage in range(4)),
        {"is_train_batch_min": False},
        {"offload_optimizer_device": "cpu"},
        {"zero_stage": 3, "offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/nvme"},
        {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/local_nvme"},
        {"zero_stage": 3, "offload_param_device": "cpu"},
        {"zero_stage": 3, "zero3_init_flag": False},
        {"zero_stage": 3, "zero3_init_flag": True},
        {"zero_stage": 3, "zero3_save_16bit_model": True},
        {"transformer_moe_cls_names": "MixtralSparseMoeBlock,Qwen2MoeSparseMoeBlock"},
        {"enable_msamp": False, "msamp_opt_level": "O2"},
        {"hf_ds_config": "none"},
    ],
    ids=str,
)
def test_fields_without_a_config(arguments: dict[str, Any]) -> None:
    assert_as_accelerate(**arguments)


CONFIGS: list[dict[str, Any]] = [
    {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "gradient_accumulation_steps": 2},
    {
        "zero_optimization": {
            "stage": "auto",
            "offload_optimizer": {"device": "auto"},
            "stage3_gather_16bit_weights_on_model_save": "auto",
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
    },
    {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5, "gradient_accumulation_steps": 1},
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("form", ["dict", "json", "own"])
def test_fields_from_a_config(config: dict[str, Any], form: str) -> None:
    before = copy.deepcopy(config)
    given: Any = {"dict": config, "json": json.dumps(config), "own": HfDeepSpeedConfig(config)}[form]
    ours, oracle = Plugin(hf_ds_config=given), Oracle(hf_ds_config=copy.deepcopy(config))
    assert fields_of(ours) == fields_of(oracle)
    assert ours.deepspeed_config == without_none(oracle.deepspeed_config)
    assert isinstance(ours.hf_ds_config, HfDeepSpeedConfig)
    assert ours.deepspeed_config is ours.hf_ds_config.config
    assert config == before
    if isinstance(given, HfDeepSpeedConfig):
        assert given.config == before


@pytest.mark.parametrize("library", [HfDeepSpeedConfig, AcceleratesConfig])
def test_stage_and_offload_after_a_change(library: Any) -> None:
    """Accelerate's callers set both anew; here they are read from the config as it is."""
    config = library({"zero_optimization": {"stage": 2}})
    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == (True, False, False)
    config.config["zero_optimization"] |= {"stage": 3, "offload_param": {"device": "cpu"}}
    config.set_stage_and_offload()
    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == (False, True, True)


def test_a_config_file_by_path(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(CONFIGS[0]))
    for path in (file, str(file)):
        assert Plugin(hf_ds_config=path).deepspeed_config == Plugin(hf_ds_config=CONFIGS[0]).deepspeed_config


def test_arguments_fill_what_the_config_leaves_open() -> None:
    arguments: dict[str, Any] = {
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.7,
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "zero3_save_16bit_model": True,
    }
    assert_as_accelerate(hf_ds_config=CONFIGS[1], **arguments)
    ours = Plugin(hf_ds_config={"zero_optimization": {}}, **arguments)  # absent keys: Accelerate drops the arguments
    assert fields_of(ours) == fields_of(Plugin(**arguments))
    assert ours.deepspeed_config == {
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.7,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "steps_per_print": float("inf"),
    }


def test_what_nobody_gives_beside_a_config() -> None:
    plugin = Plugin(hf_ds_config={"zero_optimization": {}})
    assert plugin.deepspeed_config == {"zero_optimization": {}, "steps_per_print": float("inf")}
    assert (plugin.zero_stage, plugin.gradient_accumulation_steps, plugin.gradient_clipping) == (0, "auto", "auto")
    assert Plugin(hf_ds_config={}, zero_stage=1).deepspeed_config["zero_optimization"] == {"stage": 1}
    with pytest.raises(ValueError, match=r"has no 'zero_optimization', and zero_stage is not given. Add"):
        Plugin(hf_ds_config={})
    open_paths = {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "auto"}}
    plugin = Plugin(hf_ds_config={"zero_optimization": open_paths})
    assert plugin.get_value("zero_optimization.offload_param") == {"device": "cpu"}
    assert Plugin(hf_ds_config={**STAGE_2, "steps_per_print": 5}).get_value("steps_per_print") == 5


def test_contradictions_are_listed_in_one_error() -> None:
    config = {
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
    }
    with pytest.raises(ValueError, match="contradicts") as caught:
        Plugin(
            hf_ds_config=config,
            zero_stage=3,
            gradient_accumulation_steps=4,
            gradient_clipping=2,
            offload_optimizer_device="none",
            zero3_save_16bit_model=True,
        )
    found = str(caught.value).splitlines()[1:-1]
    assert [line.split(":")[0] for line in found] == [
        "- gradient_accumulation_steps",
        "- gradient_clipping",
        "- zero_optimization.stage",
        "- zero_optimization.offload_optimizer.device",
        "- zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ]
    assert found[2] == "- zero_optimization.stage: 2 in the DeepSpeed config, zero_stage=3 as argument"
    assert Plugin(hf_ds_config=config, zero_stage=2, gradient_clipping=1, gradient_accumulation_steps="auto")


WRONG: list[tuple[type[Exception], dict[str, Any], str]] = [
    (ValueError, {"gradient_accumulation_steps": 0}, r"^gradient_accumulation_steps must be at least 1"),
    (ValueError, {"gradient_accumulation_steps": "two"}, r"gradient_accumulation_steps .*integer; got 'two'"),
    (TypeError, {"gradient_accumulation_steps": 1.5}, r"gradient_accumulation_steps .*must be an int; got 1.5"),
    (ValueError, {"gradient_clipping": -1}, r"^gradient_clipping must be at least 0"),
    (ValueError, {"gradient_clipping": float("nan")}, r"gradient_clipping .*must be at least 0 .*got nan"),
    (ValueError, {"gradient_clipping": "much"}, r"gradient_clipping .*a number or 'auto'; got 'much'"),
    (TypeError, {"gradient_clipping": True}, r"gradient_clipping .*a number or 'auto'; got True"),
    (ValueError, {"zero_stage": 4}, r"^zero_stage must be one of 0, 1, 2, 3; got 4"),
    (ValueError, {"hf_ds_config": {"zero_optimization": {"stage": 7}}},
     r"^zero_optimization.stage \(DeepSpeed config\) must be one of 0, 1, 2, 3; got 7"),
    (TypeError, {"stage": 2}, r"DeepSpeedPlugin has no argument 'stage'. Did you mean 'zero_stage'\? It has: hf_"),
    (TypeError, {"is_train_batch_min": 1}, r"is_train_batch_min must be a bool; got 1"),
    (ValueError, {"offload_optimizer_device": "disk"}, r"offload_optimizer_device .*of none, cpu, nvme; got 'disk'"),
    (TypeError, {"offload_param_device": 0}, r"offload_param_device .*must be a str; got 0"),
    (TypeError, {"offload_optimizer_nvme_path": 0}, r"offload_optimizer_nvme_path .*must be a path; got 0"),
    (ValueError, {"zero_stage": 3, "offload_param_device": "nvme"},
     r"offload_param_device='nvme' needs a folder on it: set offload_param_nvme_path .*offload_param.nvme_path"),
    (ValueError, {"hf_ds_config": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}},
     r"offload_optimizer_device='nvme' needs a folder"),
    (ValueError, {"zero3_init_flag": "maybe"}, r"^zero3_init_flag must be one of true, .*got 'maybe'"),
    (TypeError, {"zero3_save_16bit_model": 1}, r"zero3_save_16bit_model .*must be a bool; got 1"),
    (TypeError, {"transformer_moe_cls_names": 3}, r"transformer_moe_cls_names .*a list of class names; got 3"),
    (ValueError, {"msamp_opt_level": "O3"}, r"msamp_opt_level .*must be one of O1, O2; got 'O3'"),
    (ModuleNotFoundError, {"enable_msamp": True}, r"enable_msamp=True needs MS-AMP, which is not installed: see http"),
    (NotImplementedError, {"enable_msamp": True, "zero_stage": 3}, r"MS-AMP does not work with ZeRO stage 3. Use"),
    (TypeError, {"hf_ds_config": 5}, r"A DeepSpeed config must be a path, a dict, .*; got 5"),
    (ValueError, {"hf_ds_config": "missing.json"}, r"'missing.json' is neither an existing file"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "arguments", "message"), WRONG)
def test_what_no_field_takes(kind: type[Exception], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(kind, match=message):
        Plugin(**arguments)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "ACCELERATE_DEEPSPEED_ZERO_STAGE",
            "4",
            r"^zero_stage \(environment variable .*_ZERO_STAGE\) must be one of 0, 1",
        ),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "0", r"environment variable .*_STEPS\) must be at least 1"),
        (
            "ACCELERATE_GRADIENT_CLIPPING",
            "much",
            r"environment variable .*_CLIPPING\) must be a number or 'auto'; got 'm",
        ),
        ("ACCELERATE_DEEPSPEED_ZERO3_INIT", "maybe", r"environment variable .*ZERO3_INIT\) must be one of true, "),
        (
            "ACCELERATE_DEEPSPEED_CONFIG_FILE",
            "missing.json",
            r"environment variable .*FILE\)='missing.json' is neither an exist",
        ),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        Plugin()


def test_zero3_init_without_stage_3_is_ignored_aloud() -> None:
    with pytest.warns(UserWarning, match="zero3_init_flag needs ZeRO stage 3 and is ignored: stage 2"):
        assert Plugin(zero_stage=2, zero3_init_flag=True).zero3_init_flag is False


def test_msamp_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("msamp")  # stands for the installed package: nothing of it is called here
    module.__spec__ = importlib_spec("msamp")
    monkeypatch.setitem(sys.modules, "msamp", module)
    assert_as_accelerate(enable_msamp=True)
    assert_as_accelerate(enable_msamp=True, msamp_opt_level="O2", zero_stage=1)
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
    monkeypatch.setenv("ACCELERATE_FP8_OPT_LEVEL", "O2")
    assert assert_as_accelerate().deepspeed_config["msamp"] == {"enabled": True, "opt_level": "O2"}
    given = {**STAGE_2, "gradient_accumulation_steps": 1, "msamp": {"enabled": True, "opt_level": "O1"}}
    assert assert_as_accelerate(hf_ds_config=given).deepspeed_config["msamp"]["opt_level"] == "O1"


def importlib_spec(name: str) -> Any:
    from importlib.machinery import ModuleSpec

    return ModuleSpec(name, None)


# ---------------------------------------------------------------- environment
@pytest.mark.parametrize(
    ("variables", "arguments"),
    [
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, {"gradient_accumulation_steps": 4}),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto"}, {"gradient_accumulation_steps": "auto"}),
        ({"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, {"gradient_clipping": 0.5}),
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, {"zero_stage": 3}),
        ({"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, {"offload_optimizer_device": "cpu"}),
        (
            {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"},
            {"zero_stage": 3, "offload_param_device": "cpu"},
        ),
        (
            {
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme",
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "/nvme",
            },
            {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/nvme"},
        ),
        (
            {
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/nvme",
            },
            {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/nvme"},
        ),
        (
            {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false"},
            {"zero_stage": 3, "zero3_init_flag": False},
        ),
        ({"ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"}, {"zero3_save_16bit_model": True}),
        ({"ACCELERATE_FP8_BACKEND": "TE"}, {"enable_msamp": False}),
        ({"ACCELERATE_FP8_OPT_LEVEL": "O2"}, {"msamp_opt_level": "O2"}),
    ],
    ids=lambda given: "-".join(given),
)
def test_each_variable(variables: dict[str, str], arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Plugin(**arguments)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    plugin = assert_as_accelerate()
    assert fields_of(plugin) == fields_of(expected)
    assert plugin.deepspeed_config == expected.deepspeed_config
    overriding: dict[str, Any] = {"zero_stage": 1, "gradient_accumulation_steps": 7, "offload_optimizer_device": "none"}
    assert {name: getattr(Plugin(**overriding), name) for name in overriding} == overriding


def test_variables_for_the_config_and_the_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(CONFIGS[0]))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    assert assert_as_accelerate().zero_stage == 3
    assert Plugin(hf_ds_config=STAGE_2).zero_stage == 2
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "Experts, Router")
    assert Plugin().transformer_moe_cls_names == "Experts,Router"


def test_what_accelerates_launcher_writes_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fields_of(Plugin())
    for text in ("none", "None", ""):
        for variable in VARIABLES.values():
            monkeypatch.setenv(variable, text)
        assert fields_of(Plugin()) == expected


def test_a_variable_yields_to_the_config_unless_the_user_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
    plugin = Plugin(hf_ds_config=STAGE_2)
    assert (plugin.zero_stage, plugin.gradient_clipping) == (2, 0.5)
    monkeypatch.setenv(ASKED_FOR, "deepspeed_config_file,zero_stage")
    with pytest.raises(ValueError, match=r"zero_optimization.stage: 2 in the DeepSpeed config, zero_stage=3"):
        Plugin(hf_ds_config=STAGE_2)
    with pytest.raises(ValueError, match="will be ignored"):  # Accelerate refuses even the same value
        Oracle(hf_ds_config={"zero_optimization": {"stage": 3}})
    assert Plugin(hf_ds_config={"zero_optimization": {"stage": 3}}).zero_stage == 3


# ---------------------------------------------------------------- filling and matching
OPEN: dict[str, Any] = {
    "train_batch_size": "auto",
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999]}},
    **STAGE_2,
}


def both() -> tuple[Plugin, Any]:
    return Plugin(hf_ds_config=OPEN), Oracle(hf_ds_config=copy.deepcopy(OPEN))


def test_filling_as_accelerate_fills() -> None:
    ours, oracle = both()
    ours.deepspeed_config["gradient_accumulation_steps"] = 1  # Accelerate has put it there
    nowhere: dict[str, Any] = {"no.such.key": 1}
    known: dict[str, Any] = {"optimizer.params.lr": 1e-4, "gradient_clipping": 1.0, "unknown": 3}
    for plugin in (ours, oracle):
        assert plugin.is_auto("optimizer.params.lr")
        assert not plugin.is_auto("optimizer.params.eps")
        assert plugin.get_value("optimizer.params.eps", 1e-8) == 1e-8
        plugin.fill_match("train_batch_size", train_batch_size=8)
        plugin.fill_match("no.such.key", **nowhere)
        plugin.fill_match("gradient_clipping", must_match=False, gradient_clipping=9.0)
        plugin.deepspeed_config_process(**known)
    assert ours.deepspeed_config == oracle.deepspeed_config
    assert ours.get_value("optimizer.params.lr") == 1e-4


def test_matching_lists_every_mismatch() -> None:
    ours, oracle = both()
    arguments: dict[str, Any] = {
        "train_batch_size": 8,
        "optimizer.params.lr": 1.0,
        "gradient_clipping": 2.0,
        "optimizer.type": "SGD",
        "optimizer.params.betas": (0.9, 0.999),
    }
    for plugin in (ours, oracle):
        with pytest.raises(ValueError, match="gradient_clipping"):
            plugin.deepspeed_config_process(**arguments)
    with pytest.raises(ValueError, match="contradicts") as caught:
        ours.deepspeed_config_process(**arguments)
    assert str(caught.value).splitlines()[1:-1] == [
        "- gradient_clipping: 1.0 in the DeepSpeed config, 2.0 as argument",
        "- optimizer.type: 'AdamW' in the DeepSpeed config, 'SGD' as argument",
    ]
    ours.deepspeed_config_process(must_match=False, **arguments)
    noted: list[str] = []
    ours.deepspeed_config_process("optimizer.", noted, ours.deepspeed_config["optimizer"], **arguments)
    ours.fill_match("gradient_clipping", noted, gradient_clipping=3.0)
    assert [line.split(":")[0] for line in noted] == ["- optimizer.type", "- gradient_clipping"]
    with pytest.raises(ValueError, match=r"gradient_clipping: 1.0 in the DeepSpeed config, 3.0 as argument"):
        ours.fill_match("gradient_clipping", gradient_clipping=3.0)


def test_what_cannot_be_filled() -> None:
    for plugin in both():
        with pytest.raises(ValueError, match=r"optimizer.params.lr"):
            plugin.fill_match("optimizer.params.lr", lr=1.0)
        with pytest.raises(ValueError, match=r"train_batch_size"):
            plugin.deepspeed_config_process()
    with pytest.raises(ValueError, match=r"'optimizer.params.lr' is 'auto' .*\(given: lr\). Set it in the config, or"):
        both()[0].fill_match("optimizer.params.lr", lr=1.0)


HALF: list[dict[str, Any]] = [
    {},
    {"fp16": {"enabled": "auto"}},
    {"bf16": {"enabled": "auto"}},
    {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}},
    {"fp16": {"enabled": True, "loss_scale": 0}},
    {"bf16": {"enabled": True}, "fp16": {"enabled": False}},
    {"bf16": {"enabled": False}},
]


@pytest.mark.parametrize("sections", HALF, ids=str)
@pytest.mark.parametrize("precision", ["no", "fp16", "bf16", "fp8"])
def test_mixed_precision_as_accelerate_sets_it(sections: dict[str, Any], precision: str) -> None:
    config = {**STAGE_2, "gradient_accumulation_steps": 1, **sections}
    ours, oracle = Plugin(hf_ds_config=config), Oracle(hf_ds_config=copy.deepcopy(config))
    try:
        oracle.set_mixed_precision(precision)
    except ValueError:
        with pytest.raises(
            ValueError, match=r"mixed_precision='\w+' and \w+.enabled=true .*contradict each other. Set"
        ):
            ours.set_mixed_precision(precision)
    else:
        ours.set_mixed_precision(precision)
        assert ours.deepspeed_config == oracle.deepspeed_config


def test_precision_is_filled_anew_for_the_next_trainer() -> None:
    plugin = Plugin(hf_ds_config={**STAGE_2, "bf16": {"enabled": "auto"}})
    for precision in ("bf16", "no", "fp16", "bf16"):
        plugin.set_mixed_precision(precision)
        enabled = {name: plugin.get_value(f"{name}.enabled") for name in ("fp16", "bf16")}
        assert enabled == {name: name == precision for name in enabled}
        assert plugin.own_precision() == "no"
    plugin.deepspeed_config["bf16"]["enabled"] = True  # by the user, now: nobody's filling
    plugin.deepspeed_config["bf16"]["check_grad_overflow"] = False
    assert plugin.own_precision() == "bf16"
    plugin.set_mixed_precision("no")
    assert plugin.own_precision() == "bf16"
    with pytest.raises(ValueError, match="contradict"):
        plugin.set_mixed_precision("fp16")
    assert plugin.own_precision() == "bf16"


# ---------------------------------------------------------------- one of several
def test_a_plugin_is_selected_by_name() -> None:
    student, teacher = Plugin(), Plugin(zero_stage=1)
    with pytest.raises(ValueError, match=r"with AcceleratorState\(\).select_deepspeed_plugin\(name\)"):
        student.select()
    with pytest.raises(NotImplementedError, match="select_deepspeed_plugin"):
        student.selected = True
    state = AcceleratorState(deepspeed_plugin={"student": student, "teacher": teacher})
    assert (student.selected, teacher.selected) == (True, False)
    assert get_active_deepspeed_plugin(state) is student
    state.select_deepspeed_plugin("teacher")
    assert (student.selected, teacher.selected) == (False, True)
    assert get_active_deepspeed_plugin(state) is teacher


def test_no_active_plugin_without_deepspeed() -> None:
    state = AcceleratorState()
    with pytest.raises(
        ValueError, match=r"DeepSpeed is not enabled: distributed_type is DistributedType.NO. Train with"
    ):
        get_active_deepspeed_plugin(state)
    plugin = Plugin()
    AcceleratorState._fill(mixed_precision="no", distributed_type=DistributedType.DEEPSPEED, deepspeed_plugin=plugin)
    assert get_active_deepspeed_plugin(state) is plugin
    assert plugin.selected


def test_the_state_reads_precision_from_the_active_plugin() -> None:
    config = {**STAGE_2, "bf16": {"enabled": True}}
    state = AcceleratorState(deepspeed_plugin={"open": Plugin(), "bf16": Plugin(hf_ds_config=config)})
    assert state.mixed_precision == "no"
    state.select_deepspeed_plugin("bf16")
    assert state.mixed_precision == "bf16"
    assert "'stage': 2" in repr(state)


class Experts(nn.Linear):
    pass


def test_experts_by_class_name() -> None:
    from deepspeed.utils import get_z3_leaf_modules

    model = nn.Sequential(nn.Linear(2, 2), Experts(2, 2), nn.Sequential(Experts(2, 2)))
    Plugin().set_moe_leaf_modules(model)
    assert get_z3_leaf_modules(model) == []
    Plugin(transformer_moe_cls_names="Experts").set_moe_leaf_modules(model)
    assert get_z3_leaf_modules(model) == [model[1], model[2][0]]  # type: ignore[index]
    with pytest.raises(ValueError, match=r"no layer of class 'experts', 'Router'. It has Experts, Linear, Sequential"):
        Plugin(transformer_moe_cls_names="experts,Experts,Router").set_moe_leaf_modules(model)


def test_it_can_be_copied() -> None:
    for plugin in (Plugin(zero_stage=3), Plugin(hf_ds_config=CONFIGS[0])):
        plugin.select(_from_accelerator_state=True)
        for other in (copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))):
            assert fields_of(other) == fields_of(plugin)
            assert other.deepspeed_config == plugin.deepspeed_config
        again = dataclasses.replace(plugin)
        assert again.deepspeed_config == plugin.deepspeed_config
        plugin._unselect()


# ---------------------------------------------------------------- transformers
def test_transformers_is_told_while_stage_3_is_selected() -> None:
    deepspeed = pytest.importorskip("transformers.integrations.deepspeed", reason="needs transformers")
    config = {"zero_optimization": {"stage": 3}, "train_batch_size": "auto", "gradient_accumulation_steps": "auto"}
    plugin, other = Plugin(hf_ds_config=config), Plugin(zero_stage=2)
    state = AcceleratorState(deepspeed_plugin={"three": plugin, "two": other})
    assert deepspeed.is_deepspeed_zero3_enabled()
    told = deepspeed.deepspeed_config()
    assert (told["gradient_accumulation_steps"], told["train_micro_batch_size_per_gpu"]) == (1, 1)
    assert "train_batch_size" not in told
    assert plugin.is_auto("gradient_accumulation_steps")  # its own config is not touched
    with plugin.zero3_init_context_manager(enable=False):
        assert not plugin.is_zero3_init_enabled()
        assert not deepspeed.is_deepspeed_zero3_enabled()
        with plugin.zero3_init_context_manager(enable=True):
            assert deepspeed.is_deepspeed_zero3_enabled()
    assert deepspeed.is_deepspeed_zero3_enabled()
    with pytest.raises(RuntimeError, match="inside"), plugin.zero3_init_context_manager():
        raise RuntimeError("inside")
    assert deepspeed.is_deepspeed_zero3_enabled()
    state.select_deepspeed_plugin("two")
    assert not deepspeed.is_deepspeed_zero3_enabled()
    assert deepspeed.deepspeed_config()["zero_optimization"]["stage"] == 2
    AcceleratorState._reset_state()
    assert deepspeed.deepspeed_config() is None


def test_stage_3_without_zero3_init_builds_whole_models() -> None:
    deepspeed = pytest.importorskip("transformers.integrations.deepspeed", reason="needs transformers")
    AcceleratorState(deepspeed_plugin=Plugin(zero_stage=3, zero3_init_flag=False))
    assert not deepspeed.is_deepspeed_zero3_enabled()


# ---------------------------------------------------------------- imports
def test_everything_but_the_strategy_works_without_the_heavy_packages() -> None:
    code = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lightning", "deepspeed", "transformers", "accelerate"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Blocker())
from accelight.strategies import DeepSpeedPlugin, HfDeepSpeedConfig, get_active_deepspeed_plugin
from accelight.strategies import DummyOptim, DummyScheduler
from accelight.strategies.deepspeed import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
from accelight.state import AcceleratorState
plugin = DeepSpeedPlugin(zero_stage=3)
assert get_active_deepspeed_plugin(AcceleratorState(deepspeed_plugin=plugin)) is plugin
with plugin.zero3_init_context_manager(enable=False):
    DummyScheduler(DummyOptim([]))
plugin.transformer_moe_cls_names = "Linear"
import torch
try:
    plugin.set_moe_leaf_modules(torch.nn.Linear(2, 2))
except ModuleNotFoundError as error:
    assert "accelight[deepspeed]" in str(error), error
else:
    raise AssertionError("DeepSpeed is blocked")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_public_name_is_there() -> None:
    import accelight.strategies.deepspeed as package

    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    assert dir(package) == sorted(package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'DeepSpeedPlugins'"):
        package.DeepSpeedPlugins  # noqa: B018


def test_misspelled_keys_of_the_config_are_refused() -> None:
    config = {
        "gradient_cliping": 1.0,
        "zero_optimisation": {"stage": 3},
        "my_own_notes": "kept",
        "fp16": {"enabled": False},
    }
    with pytest.raises(ValueError, match="would ignore a part of this config") as caught:
        Plugin(hf_ds_config=config)
    assert str(caught.value).splitlines()[1:] == [
        "- gradient_cliping: there is no such key. Did you mean 'gradient_clipping'?",
        "- zero_optimisation: there is no such key. Did you mean 'zero_optimization'?",
    ]
