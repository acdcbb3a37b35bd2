"""The plugin: what each field takes, where its value comes from, and what the engines are told."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from accelight.state import AcceleratorState
from accelight.strategies.common import config
from accelight.strategies.fsdp.plugin import FullyShardedDataParallelPlugin as Plugin
from accelight.strategies.fsdp.plugin import materialize
from accelight.strategies.fsdp.settings import (
    VARIABLES,
    FSDP1Settings,
    FSDP2Settings,
    PrecisionSettings,
    WrapSettings,
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
    fields_from_env,
)

BF16 = torch.bfloat16
DOCUMENTED = {
    "fsdp_version": None,
    "sharding_strategy": None,
    "reshard_after_forward": None,
    "backward_prefetch": None,
    "mixed_precision_policy": None,
    "auto_wrap_policy": None,
    "cpu_offload": None,
    "ignored_modules": None,
    "state_dict_type": None,
    "state_dict_config": None,
    "optim_state_dict_config": None,
    "limit_all_gathers": True,
    "use_orig_params": None,
    "param_init_fn": None,
    "sync_module_states": None,
    "forward_prefetch": None,
    "activation_checkpointing": None,
    "activation_checkpointing_offload": None,
    "cpu_ram_efficient_loading": None,
    "transformer_cls_names_to_wrap": None,
    "min_num_params": None,
}
FULL_CONFIGS = {
    "state_dict_config": fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
    "optim_state_dict_config": fsdp.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
}
SHARDED_CONFIGS = {
    "state_dict_config": fsdp.ShardedStateDictConfig(offload_to_cpu=True),
    "optim_state_dict_config": fsdp.ShardedOptimStateDictConfig(offload_to_cpu=True),
}
COMMON_DEFAULTS = {
    "backward_prefetch": None,
    "mixed_precision_policy": None,
    "auto_wrap_policy": None,
    "ignored_modules": None,
    "limit_all_gathers": True,
    "param_init_fn": None,
    "forward_prefetch": False,
    "activation_checkpointing": False,
    "activation_checkpointing_offload": False,
    "cpu_ram_efficient_loading": False,
    "transformer_cls_names_to_wrap": None,
    "min_num_params": None,
}
DEFAULTS: dict[int, dict[str, Any]] = {
    1: COMMON_DEFAULTS
    | FULL_CONFIGS
    | {
        "fsdp_version": 1,
        "sharding_strategy": ShardingStrategy.FULL_SHARD,
        "reshard_after_forward": ShardingStrategy.FULL_SHARD,
        "cpu_offload": fsdp.CPUOffload(offload_params=False),
        "state_dict_type": StateDictType.FULL_STATE_DICT,
        "use_orig_params": True,  # Accelerate: False
        "sync_module_states": True,  # Accelerate: False
    },
    2: COMMON_DEFAULTS
    | SHARDED_CONFIGS
    | {
        "fsdp_version": 2,
        "sharding_strategy": None,
        "reshard_after_forward": True,
        "cpu_offload": fsdp.OffloadPolicy(),
        "state_dict_type": StateDictType.SHARDED_STATE_DICT,
        "use_orig_params": None,
        "sync_module_states": True,
    },
}


def always(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return True


def initialise(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(config, "_warned", set())
    for variable in (*VARIABLES.values(), "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(variable, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a warning that a test does not expect is a failure
        yield


def held(plugin: Plugin) -> dict[str, Any]:
    return {field.name: getattr(plugin, field.name) for field in dataclasses.fields(plugin)}


# ---------------------------------------------------------------- fields
def test_fields_are_the_documented_ones_in_order() -> None:
    parameters = inspect.signature(Plugin).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == DOCUMENTED
    assert list(parameters) == list(DOCUMENTED)


@pytest.mark.parametrize("version", [1, 2])
def test_defaults_of_the_plugin(version: int) -> None:
    assert held(Plugin(fsdp_version=version)) == DEFAULTS[version]


def test_version_1_is_the_default() -> None:
    assert Plugin().fsdp_version == 1


# field, what is given, what the plugin holds; version 1 unless said otherwise.
FORMS: list[tuple[str, Any, Any, int]] = [
    ("fsdp_version", "2", 2, 2),
    *((field, form, ShardingStrategy.SHARD_GRAD_OP, 1)
      for field in ("sharding_strategy", "reshard_after_forward")
      for form in ("SHARD_GRAD_OP", "shard_grad_op", "2", 2, ShardingStrategy.SHARD_GRAD_OP)),
    ("sharding_strategy", "1", ShardingStrategy.FULL_SHARD, 1),
    ("sharding_strategy", "3", ShardingStrategy.NO_SHARD, 1),
    ("sharding_strategy", "4", ShardingStrategy.HYBRID_SHARD, 1),
    ("sharding_strategy", "5", ShardingStrategy._HYBRID_SHARD_ZERO2, 1),
    ("sharding_strategy", "HYBRID_SHARD_ZERO2", ShardingStrategy._HYBRID_SHARD_ZERO2, 1),
    ("sharding_strategy", "_HYBRID_SHARD_ZERO2", ShardingStrategy._HYBRID_SHARD_ZERO2, 1),
    *(("reshard_after_forward", form, False, 2) for form in (False, "false", "False", "0")),
    *(("reshard_after_forward", form, True, 2) for form in (True, "true", "1")),
    *(("reshard_after_forward", form, 8, 2) for form in (8, "8")),
    *(("backward_prefetch", form, BackwardPrefetch.BACKWARD_PRE, 1)
      for form in ("BACKWARD_PRE", "backward_pre", "1", 1, BackwardPrefetch.BACKWARD_PRE)),
    ("backward_prefetch", "2", BackwardPrefetch.BACKWARD_POST, 1),
    ("backward_prefetch", "NO_PREFETCH", None, 1),
    ("mixed_precision_policy", "bf16", fsdp.MixedPrecision(BF16, BF16, BF16), 1),
    ("mixed_precision_policy", "bf16", fsdp.MixedPrecisionPolicy(BF16, BF16, BF16), 2),
    ("mixed_precision_policy", {"param_dtype": "bf16", "reduce_dtype": "float32", "buffer_dtype": torch.float16},
     fsdp.MixedPrecision(torch.bfloat16, torch.float32, torch.float16), 1),
    ("mixed_precision_policy", {"param_dtype": None, "cast_root_forward_inputs": "false"},
     fsdp.MixedPrecision(cast_root_forward_inputs=False), 1),
    ("mixed_precision_policy", {"param_dtype": "torch.bfloat16", "output_dtype": "fp32", "cast_forward_inputs": False},
     fsdp.MixedPrecisionPolicy(torch.bfloat16, None, torch.float32, False), 2),
    ("mixed_precision_policy", fsdp.MixedPrecision(torch.float16), fsdp.MixedPrecision(torch.float16), 1),
    ("mixed_precision_policy", fsdp.MixedPrecisionPolicy(torch.float16), fsdp.MixedPrecisionPolicy(torch.float16), 2),
    ("auto_wrap_policy", "transformer_based_wrap", transformer_auto_wrap_policy, 1),
    ("auto_wrap_policy", "TRANSFORMER_BASED_WRAP", transformer_auto_wrap_policy, 2),
    ("auto_wrap_policy", "size_based_wrap", size_based_auto_wrap_policy, 1),
    ("auto_wrap_policy", "no_wrap", None, 1),
    ("auto_wrap_policy", always, always, 2),
    *(("cpu_offload", form, fsdp.CPUOffload(True), 1) for form in (True, "true", fsdp.CPUOffload(True))),
    *(("cpu_offload", form, fsdp.CPUOffloadPolicy(), 2)
      for form in (True, "true", fsdp.CPUOffload(True), fsdp.CPUOffloadPolicy())),
    *(("cpu_offload", form, fsdp.OffloadPolicy(), 2) for form in (False, fsdp.CPUOffload(False), fsdp.OffloadPolicy())),
    ("cpu_offload", fsdp.CPUOffloadPolicy(pin_memory=False), fsdp.CPUOffloadPolicy(pin_memory=False), 2),
    ("ignored_modules", r"head\..*", r"head\..*", 1),
    *(("state_dict_type", form, StateDictType.SHARDED_STATE_DICT, 1)
      for form in ("sharded_state_dict", "SHARDED_STATE_DICT", "3", 3, StateDictType.SHARDED_STATE_DICT)),
    ("state_dict_type", "local_state_dict", StateDictType.LOCAL_STATE_DICT, 1),
    ("state_dict_type", "full_state_dict", StateDictType.FULL_STATE_DICT, 2),
    ("state_dict_config", fsdp.FullStateDictConfig(), fsdp.FullStateDictConfig(), 1),
    ("optim_state_dict_config", fsdp.ShardedOptimStateDictConfig(False), fsdp.ShardedOptimStateDictConfig(False), 2),
    ("limit_all_gathers", False, False, 1),
    ("limit_all_gathers", "false", False, 1),
    ("use_orig_params", True, True, 1),
    ("use_orig_params", "yes", True, 1),
    ("param_init_fn", initialise, initialise, 1),
    ("sync_module_states", False, False, 1),
    ("sync_module_states", "false", False, 2),
    *((field, form, True, version)
      for field in ("forward_prefetch", "activation_checkpointing", "cpu_ram_efficient_loading")
      for form in (True, "true")
      for version in (1, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("field", "given", "expected", "version"), FORMS)
def test_each_form_of_a_field(field: str, given: Any, expected: Any, version: int) -> None:
    plugin = Plugin(**{"fsdp_version": version, field: given})
    assert getattr(plugin, field) == expected
    assert type(getattr(plugin, field)) is type(expected)


@pytest.mark.parametrize("names", ["Block, Head", ["Block", "Head"], ("Block", "Head")])
def test_class_names(names: Any) -> None:
    plugin = Plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=names)
    assert plugin.transformer_cls_names_to_wrap == ["Block", "Head"]


@pytest.mark.parametrize("size", [1000, "1000"])
def test_min_num_params(size: Any) -> None:
    assert Plugin(auto_wrap_policy="size_based_wrap", min_num_params=size).min_num_params == 1000
    assert Plugin(auto_wrap_policy="size_based_wrap").min_num_params == 0


def test_ignored_modules_is_a_list_of_its_own() -> None:
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert Plugin(ignored_modules=modules).ignored_modules == modules
    assert Plugin(ignored_modules=(module for module in modules)).ignored_modules == modules
    assert Plugin(ignored_modules=modules).ignored_modules is not modules


WRONG: list[tuple[type[Exception], dict[str, Any], str]] = [
    (ValueError, {"fsdp_version": 3}, r"^fsdp_version must be one of 1, 2; got 3"),
    (ValueError, {"fsdp_version": "two"}, r"fsdp_version .*integer; got 'two'"),
    (TypeError, {"fsdp_version": 2.0}, r"fsdp_version .*must be an int; got 2.0 of type float"),
    (TypeError, {"fsdp_version": True}, r"fsdp_version .*must be an int; got True"),
    (ValueError, {"sharding_strategy": "ALL"}, r"sharding_strategy .*one of FULL_SHARD, .*got 'ALL'"),
    (ValueError, {"sharding_strategy": 6}, r"sharding_strategy .*one of FULL_SHARD, .*got 6"),
    (TypeError, {"sharding_strategy": 1.0}, r"sharding_strategy .*must be a str, an int or a ShardingStrategy"),
    (ValueError, {"reshard_after_forward": True}, r"reshard_after_forward=True is not possible with fsdp_version=1"),
    (ValueError, {"reshard_after_forward": "ALL"}, r"reshard_after_forward .*one of FULL_SHARD, .*got 'ALL'"),
    (ValueError, {"sharding_strategy": "FULL_SHARD", "reshard_after_forward": "SHARD_GRAD_OP"},
     r"sharding_strategy='FULL_SHARD' and reshard_after_forward='SHARD_GRAD_OP' differ"),
    *((ValueError, {"fsdp_version": 2, "reshard_after_forward": value},
       r"reshard_after_forward=.* is not possible with fsdp_version=2. Use True")
      for value in ("FULL_SHARD", ShardingStrategy.FULL_SHARD, 1, 0, -2)),
    (ValueError, {"reshard_after_forward": 8}, r"reshard_after_forward must be one of FULL_SHARD, .*got 8"),
    (ValueError, {"fsdp_version": 2, "sharding_strategy": "FULL_SHARD", "reshard_after_forward": 8},
     r"'FULL_SHARD' and reshard_after_forward=8 contradict"),
    (ValueError, {"fsdp_version": 2, "sharding_strategy": "NO_SHARD"}, r"NO_SHARD is not possible .*Lightning's 'ddp'"),
    (ValueError, {"fsdp_version": 2, "sharding_strategy": "ALL"}, r"sharding_strategy .*got 'ALL'"),
    (ValueError, {"fsdp_version": 2, "sharding_strategy": "FULL_SHARD", "reshard_after_forward": False},
     r"'FULL_SHARD' and reshard_after_forward=False contradict"),
    (ValueError, {"backward_prefetch": "BACKWARD"}, r"backward_prefetch .*one of BACKWARD_PRE, .*got 'BACKWARD'"),
    (ValueError, {"backward_prefetch": 0}, r"backward_prefetch .*got 0"),
    (TypeError, {"backward_prefetch": True}, r"backward_prefetch .*a BackwardPrefetch; got True"),
    (ValueError, {"mixed_precision_policy": "half"}, r"mixed_precision must be one of fp16, bf16, .*got 'half'"),
    (ValueError, {"mixed_precision_policy": {"param_dtype": torch.int8}}, r"\['param_dtype'\] must be one of .*int8"),
    (TypeError, {"mixed_precision_policy": {"param_dtype": 16}}, r"\['param_dtype'\] must be a str or a torch.dtype"),
    (ValueError, {"mixed_precision_policy": {"params": "bf16"}}, r"a key of mixed_precision_policy .*got 'params'"),
    (ValueError, {"mixed_precision_policy": {"output_dtype": "bf16"}}, r"a key .*buffer_dtype.*got 'output_dtype'"),
    (TypeError, {"mixed_precision_policy": fsdp.MixedPrecisionPolicy()}, r"torch.distributed.fsdp.MixedPrecision;"),
    (TypeError, {"fsdp_version": 2, "mixed_precision_policy": fsdp.MixedPrecision()}, r"fsdp.MixedPrecisionPolicy;"),
    (TypeError, {"mixed_precision_policy": 16}, r"mixed_precision_policy must be a str, a dict or"),
    (ValueError, {"mixed_precision_policy": fsdp.MixedPrecision(keep_low_precision_grads=True)},
     r"mixed_precision_policy: keep_low_precision_grads is not supported"),
    (ValueError, {"mixed_precision_policy": fsdp.MixedPrecision(_module_classes_to_ignore=(nn.LayerNorm,))},
     r"mixed_precision_policy: _module_classes_to_ignore is not supported"),
    (ValueError, {"auto_wrap_policy": "block_wrap"}, r"auto_wrap_policy .*one of transformer_based_wrap, .*'block"),
    (TypeError, {"auto_wrap_policy": 5}, r"auto_wrap_policy .*a wrap policy of torch; got 5"),
    (TypeError, {"auto_wrap_policy": lambda module: True}, r"auto_wrap_policy is called as policy\(module.*Custom"),
    (TypeError, {"auto_wrap_policy": lambda_auto_wrap_policy}, r"missing a required argument: 'lambda_fn'"),
    (TypeError, {"cpu_offload": fsdp.CPUOffloadPolicy()}, r"cpu_offload .*\(fsdp_version=1\).*fsdp.CPUOffload; got"),
    (TypeError, {"fsdp_version": 2, "cpu_offload": 1}, r"cpu_offload .*\(fsdp_version=2\).*fsdp.OffloadPolicy; got 1"),
    (ValueError, {"cpu_offload": "cpu"}, r"cpu_offload .*must be one of true, .*got 'cpu'"),
    (TypeError, {"ignored_modules": 3}, r"ignored_modules .*a list of modules; got 3"),
    (TypeError, {"ignored_modules": ["head"]}, r"ignored_modules .*a list of modules; got 'head'"),
    (TypeError, {"ignored_modules": nn.Linear(2, 2)}, r"ignored_modules .*a list of modules; got Linear"),
    (ValueError, {"state_dict_type": "ful"},
     r"^state_dict_type must be one of full_state_dict, sharded_state_dict, local_state_dict; got 'ful'"),
    (ValueError, {"fsdp_version": 2, "state_dict_type": "shard"},
     r"^state_dict_type must be one of full_state_dict, sharded_state_dict; got 'shard'"),
    (ValueError, {"backward_prefetch": "PRE"}, r"one of BACKWARD_PRE, BACKWARD_POST, NO_PREFETCH; got 'PRE'"),
    (ValueError, {"sharding_strategy": "ALL"},
     r"one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2; got 'ALL'"),
    (TypeError, {"fsdp_versoin": 2}, r"has no argument 'fsdp_versoin'. Did you mean 'fsdp_version'\? It has: fsdp_"),
    (ValueError, {"fsdp_version": 2, "state_dict_type": "local_state_dict"}, r"not possible with fsdp_version=2. Use"),
    (TypeError, {"state_dict_config": fsdp.ShardedStateDictConfig()}, r"state_dict_config must be a FullStateDict"),
    (TypeError, {"optim_state_dict_config": fsdp.ShardedOptimStateDictConfig()}, r"a FullOptimStateDictConfig with"),
    (TypeError, {"limit_all_gathers": 1}, r"limit_all_gathers must be a bool; got 1 of type int"),
    (TypeError, {"param_init_fn": "zeros"}, r"param_init_fn must be a function of a module; got 'zeros'"),
    *((ValueError, {name: "maybe"}, rf"{name} .*must be one of true, .*got 'maybe'")
      for name in ("use_orig_params", "sync_module_states", "forward_prefetch", "activation_checkpointing",
                   "cpu_ram_efficient_loading")),
    *((ValueError, {"fsdp_version": version, "activation_checkpointing_offload": True},
       r"nothing is recomputed. Set activation_checkpointing=True \(or FSDP_ACTIVATION_CHECKPOINTING=true\)")
      for version in (1, 2)),
    (ValueError, {"auto_wrap_policy": "size_based_wrap", "min_num_params": "1e6"}, r"min_num_params .*integer"),
    (ValueError, {"auto_wrap_policy": "size_based_wrap", "min_num_params": -1}, r"min_num_params must be >= 0; got -1"),
    (TypeError, {"auto_wrap_policy": "size_based_wrap", "min_num_params": 1e6}, r"min_num_params .*must be an int"),
    (TypeError, {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": [nn.Linear]},
     r"transformer_cls_names_to_wrap .*a list of class names"),
    (TypeError, {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": 5},
     r"transformer_cls_names_to_wrap .*a list of class names; got 5"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "given", "message"), WRONG)
def test_wrong_values_are_refused(error: type[Exception], given: dict[str, Any], message: str) -> None:
    with pytest.raises(error, match=message):
        Plugin(**given)


# ---------------------------------------------------------------- environment
ENVIRONMENT: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"FSDP_VERSION": "2"}, {"fsdp_version": 2, "reshard_after_forward": True}),
    ({"FSDP_SHARDING_STRATEGY": "2"}, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    ({"FSDP_RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"}, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    ({"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}, {"reshard_after_forward": False}),
    ({"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "4"}, {"reshard_after_forward": 4}),
    ({"FSDP_BACKWARD_PREFETCH": "BACKWARD_POST"}, {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}),
    ({"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B"},
     {"auto_wrap_policy": transformer_auto_wrap_policy, "transformer_cls_names_to_wrap": ["A", "B"]}),
    ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "100"},
     {"auto_wrap_policy": size_based_auto_wrap_policy, "min_num_params": 100}),
    ({"FSDP_AUTO_WRAP_POLICY": "NO_WRAP", "FSDP_MIN_NUM_PARAMS": "100", "FSDP_TRANSFORMER_CLS_TO_WRAP": "A"},
     {"auto_wrap_policy": None, "min_num_params": None, "transformer_cls_names_to_wrap": None}),
    ({"FSDP_OFFLOAD_PARAMS": "true"}, {"cpu_offload": fsdp.CPUOffload(True)}),
    ({"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}, {"state_dict_type": StateDictType.SHARDED_STATE_DICT}),
    ({"FSDP_USE_ORIG_PARAMS": "true"}, {"use_orig_params": True}),
    ({"FSDP_SYNC_MODULE_STATES": "false"}, {"sync_module_states": False}),
    ({"FSDP_FORWARD_PREFETCH": "true"}, {"forward_prefetch": True}),
    ({"FSDP_VERSION": "2", "FSDP_FORWARD_PREFETCH": "true"}, {"forward_prefetch": True}),
    ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {"activation_checkpointing": True}),
    ({"FSDP_ACTIVATION_CHECKPOINTING": "true", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"},
     {"activation_checkpointing_offload": True}),
    ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, {"cpu_ram_efficient_loading": True, "sync_module_states": True}),
    ({"FSDP_IGNORED_MODULES": "head"}, {"ignored_modules": "head"}),
    ({"FSDP_VERSION": "", "FSDP_OFFLOAD_PARAMS": " "}, {"fsdp_version": 1, "cpu_offload": fsdp.CPUOffload(False)}),
]  # fmt: skip


@pytest.mark.parametrize(("env", "expected"), ENVIRONMENT)
def test_unset_fields_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], expected: dict[str, Any]
) -> None:
    for variable, value in env.items():
        monkeypatch.setenv(variable, value)
    plugin = Plugin()
    assert {name: getattr(plugin, name) for name in expected} == expected


def test_every_documented_variable_is_read() -> None:
    env = {variable: f" {number} " for number, variable in enumerate(VARIABLES.values())}
    assert fields_from_env(env) == {field: str(number) for number, field in enumerate(VARIABLES)}
    documented = (
        "VERSION SHARDING_STRATEGY RESHARD_AFTER_FORWARD BACKWARD_PREFETCH AUTO_WRAP_POLICY TRANSFORMER_CLS_TO_WRAP "
        "MIN_NUM_PARAMS OFFLOAD_PARAMS STATE_DICT_TYPE USE_ORIG_PARAMS SYNC_MODULE_STATES FORWARD_PREFETCH "
        "ACTIVATION_CHECKPOINTING ACTIVATION_CHECKPOINTING_OFFLOAD CPU_RAM_EFFICIENT_LOADING IGNORED_MODULES"
    )
    assert sorted(VARIABLES.values()) == sorted("FSDP_" + name for name in documented.split())


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    monkeypatch.setenv("FSDP_BACKWARD_PREFETCH", "BACKWARD_PRE")
    monkeypatch.setenv("FSDP_FORWARD_PREFETCH", "nonsense")
    plugin = Plugin(
        fsdp_version=1,
        reshard_after_forward="SHARD_GRAD_OP",
        auto_wrap_policy="no_wrap",
        cpu_offload=False,
        backward_prefetch="NO_PREFETCH",
        forward_prefetch=False,
    )
    settings = plugin.settings()
    assert isinstance(settings, FSDP1Settings)
    assert settings.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert settings.wrap == WrapSettings()
    assert (settings.cpu_offload, settings.backward_prefetch, settings.forward_prefetch) == (False, None, False)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("FSDP_VERSION", r"^fsdp_version \(environment variable FSDP_VERSION\) .*got '?oops"),
        ("FSDP_RESHARD_AFTER_FORWARD", r"\(environment variable FSDP_RESHARD_AFTER_FORWARD\) .*got 'oops'"),
        ("FSDP_SHARDING_STRATEGY", r"FSDP_SHARDING_STRATEGY.*got 'oops'"),
        ("FSDP_STATE_DICT_TYPE", r"FSDP_STATE_DICT_TYPE.*got 'oops'"),
        ("FSDP_OFFLOAD_PARAMS", r"FSDP_OFFLOAD_PARAMS.*got 'oops'"),
        ("FSDP_AUTO_WRAP_POLICY", r"FSDP_AUTO_WRAP_POLICY.*got 'oops'"),
    ],
)
def test_wrong_variables_are_named(monkeypatch: pytest.MonkeyPatch, variable: str, message: str) -> None:
    monkeypatch.setenv(variable, "oops")
    with pytest.raises(ValueError, match=message):
        Plugin()


@pytest.mark.parametrize("version", ["1", "2"])
def test_what_accelerates_launcher_exports_by_default_is_understood(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    exported = {
        "VERSION": version,
        "SHARDING_STRATEGY": "FULL_SHARD",
        "RESHARD_AFTER_FORWARD": "true",
        "OFFLOAD_PARAMS": "false",
        "MIN_NUM_PARAMS": "100000000",
        "BACKWARD_PREFETCH": "BACKWARD_PRE",
        "FORWARD_PREFETCH": "false",
        "USE_ORIG_PARAMS": "true",
        "CPU_RAM_EFFICIENT_LOADING": "true",
        "SYNC_MODULE_STATES": "true",
        "ACTIVATION_CHECKPOINTING": "false",
        "ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    }
    for name, value in exported.items():
        monkeypatch.setenv(f"FSDP_{name}", value)
    plugin = Plugin()  # without a warning
    assert plugin.reshard_after_forward == (ShardingStrategy.FULL_SHARD if version == "1" else True)
    assert plugin.use_orig_params is (True if version == "1" else None)


@pytest.mark.parametrize("value", ["true", "1", "yes", "True"])
def test_fsdp2s_truth_value_alone_in_the_environment_says_nothing_to_fsdp1(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin = Plugin(fsdp_version=1)
    assert plugin.sharding_strategy is plugin.reshard_after_forward is ShardingStrategy.FULL_SHARD


def test_fsdp1_says_that_it_ignores_fsdp2s_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    with pytest.warns(UserWarning, match="RESHARD_AFTER_FORWARD=false is for FSDP2 .*Set FSDP_SHARDING_STRATEGY=SHARD"):
        plugin = Plugin(fsdp_version=1)
    assert plugin.sharding_strategy is ShardingStrategy.FULL_SHARD


def test_the_environment_is_left_alone() -> None:
    before = dict(os.environ)
    Plugin(cpu_ram_efficient_loading=True).settings()
    assert dict(os.environ) == before


def test_ram_efficient_loading_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    enable_fsdp_ram_efficient_loading()
    assert os.environ["ACCELERATE_USE_FSDP"] == os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True"
    assert Plugin().cpu_ram_efficient_loading is True
    disable_fsdp_ram_efficient_loading()
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "False"
    assert Plugin().cpu_ram_efficient_loading is False
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "1")
    enable_fsdp_ram_efficient_loading()
    assert os.environ["ACCELERATE_USE_FSDP"] == "1"


# ---------------------------------------------------------------- the versions beside each other
@pytest.mark.parametrize(
    ("strategy", "reshard", "hint"),
    [
        ("FULL_SHARD", True, ""),
        ("SHARD_GRAD_OP", False, ""),
        (ShardingStrategy.HYBRID_SHARD, True, r"device_mesh=\(replicate, shard\)"),
        ("HYBRID_SHARD_ZERO2", False, r"device_mesh=\(replicate, shard\)"),
    ],
)
def test_fsdp2_translates_the_sharding_strategy(strategy: Any, reshard: bool, hint: str) -> None:
    with pytest.warns(UserWarning, match=f"interpreted as reshard_after_forward={reshard}.*{hint}"):
        plugin = Plugin(fsdp_version=2, sharding_strategy=strategy)
    assert (plugin.reshard_after_forward, plugin.sharding_strategy) == (reshard, None)


def test_fsdp2_translates_a_sharding_strategy_that_is_alone_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP")
    with pytest.warns(UserWarning, match="sharding_strategy='SHARD_GRAD_OP' is obsolete"):
        assert Plugin(fsdp_version=2).reshard_after_forward is False
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "true")
    assert Plugin(fsdp_version=2).reshard_after_forward is True


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"backward_prefetch": "BACKWARD_PRE"},
            "backward_prefetch is obsolete .* and ignored: FSDP2 always prefetches",
        ),
        ({"use_orig_params": False}, "use_orig_params is obsolete .* and ignored: FSDP2 always keeps"),
        ({"param_init_fn": initialise}, "param_init_fn is obsolete .* and ignored: with FSDP2 the strategy"),
        ({"limit_all_gathers": False}, "limit_all_gathers=False has no effect with fsdp_version=2"),
        ({"mixed_precision_policy": {"buffer_dtype": "bf16"}}, r"\['buffer_dtype'\] has no effect with fsdp_version=2"),
    ],
)
def test_fsdp2_drops_what_is_obsolete_and_says_so_once(given: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message) as caught:
        plugin = Plugin(fsdp_version=2, **given)
    assert [warning.filename for warning in caught] == [__file__]
    Plugin(fsdp_version=2, **given).settings()  # the filter would turn a second warning into an error
    for name in given.keys() - {"limit_all_gathers", "mixed_precision_policy"}:
        assert getattr(plugin, name) is None


def test_one_warning_for_each_field() -> None:
    with pytest.warns(UserWarning, match="obsolete with fsdp_version=2") as caught:
        Plugin(fsdp_version=2, sharding_strategy="FULL_SHARD", use_orig_params=True)
    assert len(caught) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"transformer_cls_names_to_wrap": ["A"]},
            "transformer_cls_names_to_wrap=.* no effect without auto_wrap_policy",
        ),
        ({"min_num_params": 5}, "min_num_params=5 has no effect without auto_wrap_policy='size_based_wrap'"),
    ],
)
def test_fields_of_another_policy_are_said_to_be_ignored(given: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        Plugin(**given)


def test_ram_efficient_loading_forces_the_broadcast() -> None:
    assert Plugin(cpu_ram_efficient_loading=True).sync_module_states is True
    with pytest.warns(UserWarning, match="sync_module_states=False is overridden by cpu_ram_efficient_loading=True"):
        plugin = Plugin(cpu_ram_efficient_loading=True, sync_module_states=False)
    assert plugin.sync_module_states is True
    assert Plugin(fsdp_version=2, cpu_ram_efficient_loading=True).sync_module_states is True


def test_a_module_on_meta_is_materialised_by_default_where_states_are_synced() -> None:
    plugin = Plugin(sync_module_states=True)
    assert plugin.param_init_fn is not None
    module = nn.Sequential(nn.Linear(2, 2)).to("meta")
    plugin.param_init_fn(module)
    assert module[0].weight.is_meta  # a module's own tensors only: FSDP1 calls it for each module
    plugin.param_init_fn(module[0])
    assert not module[0].weight.is_meta
    assert Plugin(sync_module_states=True, param_init_fn=initialise).param_init_fn is initialise


# ---------------------------------------------------------------- what is given stays as it is
def test_given_objects_are_copied() -> None:
    names, modules = ["Block"], [nn.Linear(2, 2)]
    given: dict[str, Any] = {
        "transformer_cls_names_to_wrap": names,
        "ignored_modules": modules,
        "mixed_precision_policy": fsdp.MixedPrecision(torch.bfloat16),
        "cpu_offload": fsdp.CPUOffload(True),
        "state_dict_config": fsdp.FullStateDictConfig(),
        "optim_state_dict_config": fsdp.FullOptimStateDictConfig(),
    }
    plugin = Plugin(auto_wrap_policy="transformer_based_wrap", **given)
    for name, value in given.items():
        assert getattr(plugin, name) == value
        assert getattr(plugin, name) is not value
    policy = {"param_dtype": "bf16"}
    Plugin(mixed_precision_policy=policy)
    assert (policy, names, len(modules)) == ({"param_dtype": "bf16"}, ["Block"], 1)


@pytest.mark.parametrize("version", [1, 2])
def test_plugins_can_be_made_again_copied_and_pickled(version: int) -> None:
    plugin = Plugin(
        fsdp_version=version,
        auto_wrap_policy="size_based_wrap",
        min_num_params=10,
        cpu_offload=True,
        mixed_precision_policy="bf16",
        cpu_ram_efficient_loading=True,
    )
    assert dataclasses.replace(plugin) == plugin
    assert copy.deepcopy(plugin) == plugin
    assert pickle.loads(pickle.dumps(plugin)) == plugin


# ---------------------------------------------------------------- methods
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


def test_set_auto_wrap_policy_finds_the_classes() -> None:
    model = nn.Sequential(Block(), Block())
    plugin = Plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"])
    plugin.set_auto_wrap_policy(model)
    assert isinstance(plugin.auto_wrap_policy, partial)
    assert plugin.auto_wrap_policy.func is transformer_auto_wrap_policy
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {Block}}
    assert plugin.settings().wrap == WrapSettings(kind="callable", policy=plugin.auto_wrap_policy)
    with pytest.raises(ValueError, match=r"'Blok'.*Classes in the model: Block"):
        Plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Blok"]).set_auto_wrap_policy(
            model
        )
    with pytest.raises(ValueError, match="needs class names"):
        Plugin(auto_wrap_policy="transformer_based_wrap").set_auto_wrap_policy(model)


def test_set_auto_wrap_policy_by_size() -> None:
    plugin = Plugin(auto_wrap_policy="size_based_wrap", min_num_params=7)
    plugin.set_auto_wrap_policy(nn.Linear(2, 2))
    assert isinstance(plugin.auto_wrap_policy, partial)
    assert plugin.auto_wrap_policy.keywords == {"min_num_params": 7}
    without = Plugin(auto_wrap_policy="size_based_wrap")
    without.set_auto_wrap_policy(nn.Linear(2, 2))
    assert without.auto_wrap_policy is None
    own = Plugin(auto_wrap_policy=always)
    own.set_auto_wrap_policy(nn.Linear(2, 2))
    assert own.auto_wrap_policy is always


def test_set_mixed_precision() -> None:
    plugin = Plugin()
    plugin.set_mixed_precision("fp16", buffer_autocast=True)
    assert plugin.mixed_precision_policy == fsdp.MixedPrecision(torch.float16, torch.float16, torch.float32)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.param_dtype == torch.float16
    plugin.set_mixed_precision(torch.bfloat16, override=True)
    assert plugin.mixed_precision_policy == fsdp.MixedPrecision(BF16, BF16, BF16)
    second = Plugin(fsdp_version=2)
    second.set_mixed_precision("bf16", buffer_autocast=True)
    assert second.mixed_precision_policy == fsdp.MixedPrecisionPolicy(BF16, BF16, BF16)
    for wrong in ("half", torch.int32):
        with pytest.raises(ValueError, match="mixed_precision must be one of fp16"):
            plugin.set_mixed_precision(wrong)
    with pytest.raises(TypeError, match=r"mixed_precision must be a str or a torch.dtype; got 16"):
        plugin.set_mixed_precision(16)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [1, 2])
def test_fp8_stands_on_bf16(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Accelerate: layers compute in FP8 around a policy of bf16."""
    policy = Plugin(fsdp_version=version, mixed_precision_policy="bf16").mixed_precision_policy
    plugin = Plugin(fsdp_version=version)
    plugin.set_mixed_precision("fp8")
    assert plugin.mixed_precision_policy == policy
    assert Plugin(fsdp_version=version, mixed_precision_policy="FP8").mixed_precision_policy == policy
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "torchao" or None)
    told = Plugin(fsdp_version=version)
    assert AcceleratorState(mixed_precision="fp8", fsdp_plugin=told).mixed_precision == "fp8"
    assert told.mixed_precision_policy == policy


def test_set_state_dict_type_switches_the_configs_too() -> None:
    plugin = Plugin(fsdp_version=2, state_dict_config=fsdp.ShardedStateDictConfig(offload_to_cpu=False))
    plugin.set_state_dict_type()
    assert plugin.state_dict_config == fsdp.ShardedStateDictConfig(offload_to_cpu=False)
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert {name: getattr(plugin, name) for name in FULL_CONFIGS} == FULL_CONFIGS
    assert plugin.settings().state_dict_type == "full_state_dict"
    with pytest.raises(ValueError, match="local_state_dict"):
        plugin.set_state_dict_type(StateDictType.LOCAL_STATE_DICT)
    assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT
    first = Plugin()
    first.set_state_dict_type("2")
    assert held(first)["state_dict_config"] == fsdp.LocalStateDictConfig()
    assert held(first)["optim_state_dict_config"] == fsdp.LocalOptimStateDictConfig()


@pytest.mark.parametrize("version", [1, 2])
def test_validation_of_fields_set_later(version: int) -> None:
    plugin = Plugin(fsdp_version=version, mixed_precision_policy="bf16")
    plugin.validate_mixed_precision_policy()
    plugin.validate_cpu_offload()
    plugin.cpu_offload = True
    with pytest.raises(TypeError, match=f"cpu_offload .*fsdp_version={version}"):
        plugin.validate_cpu_offload()
    plugin.set_cpu_offload()
    plugin.validate_cpu_offload()
    plugin.mixed_precision_policy = {"param_dtype": "bf16"}
    with pytest.raises(TypeError, match=f"mixed_precision_policy .*fsdp_version={version}"):
        plugin.validate_mixed_precision_policy()
    assert plugin.settings().precision.param_dtype == torch.bfloat16  # `settings` takes every form again
    plugin.state_dict_type = "no such"
    with pytest.raises(ValueError, match=r"state_dict_type .*'no such'"):
        plugin.settings()


# ---------------------------------------------------------------- settings
def test_settings_of_fsdp1() -> None:
    ignored = nn.Linear(2, 2)
    plugin = Plugin(
        sharding_strategy="SHARD_GRAD_OP",
        backward_prefetch="BACKWARD_POST",
        mixed_precision_policy={"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp16"},
        auto_wrap_policy="size_based_wrap",
        min_num_params=5,
        cpu_offload=True,
        ignored_modules=[ignored],
        state_dict_type="local_state_dict",
        limit_all_gathers=False,
        use_orig_params=True,
        param_init_fn=initialise,
        sync_module_states=True,
        forward_prefetch=True,
        activation_checkpointing=True,
        activation_checkpointing_offload=True,
        cpu_ram_efficient_loading=True,
    )
    assert plugin.settings(precision=PrecisionSettings(param_dtype=torch.float16)) == FSDP1Settings(
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        precision=PrecisionSettings(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            buffer_dtype=torch.float16,
            cast_forward_inputs=False,
            cast_root_forward_inputs=True,
        ),
        wrap=WrapSettings(kind="size_based_wrap", min_num_params=5),
        cpu_offload=True,
        ignored_modules=(ignored,),
        state_dict_type="local_state_dict",
        limit_all_gathers=False,
        use_orig_params=True,
        param_init_fn=initialise,
        sync_module_states=True,
        forward_prefetch=True,
        activation_checkpointing=True,
        activation_checkpointing_offload=True,
        cpu_ram_efficient_loading=True,
    )


def test_settings_of_fsdp2() -> None:
    plugin = Plugin(
        fsdp_version=2,
        reshard_after_forward=False,
        mixed_precision_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float16, False),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_offload=fsdp.CPUOffloadPolicy(pin_memory=False),
        ignored_modules="head",
        forward_prefetch=True,
        activation_checkpointing=True,
        cpu_ram_efficient_loading=True,
    )
    assert plugin.settings(dp_replicate=2) == FSDP2Settings(
        reshard_after_forward=False,
        precision=PrecisionSettings(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            output_dtype=torch.float16,
            cast_forward_inputs=False,
            cast_root_forward_inputs=False,
        ),
        wrap=WrapSettings(kind="transformer_based_wrap", transformer_cls_names=("Block",)),
        cpu_offload=True,
        pin_memory=False,
        ignored_modules="head",
        state_dict_type="sharded_state_dict",
        forward_prefetch=True,
        activation_checkpointing=True,
        cpu_ram_efficient_loading=True,
    )


@pytest.mark.parametrize("version", [1, 2])
def test_the_trainers_precision_fills_in(version: int) -> None:
    precision = PrecisionSettings(param_dtype=torch.float16, cast_root_forward_inputs=False)
    assert Plugin(fsdp_version=version).settings(precision=precision).precision == precision
    assert Plugin(fsdp_version=version).settings().precision == PrecisionSettings()


@pytest.mark.parametrize("offload", [True, fsdp.CPUOffloadPolicy()])
def test_pinning_is_left_to_the_engine(offload: Any) -> None:
    settings = Plugin(fsdp_version=2, cpu_offload=offload).settings()
    assert (settings.cpu_offload, settings.pin_memory) == (True, None)


def test_the_engine_materialises_where_the_user_says_nothing() -> None:
    plugin = Plugin(sync_module_states=True)
    settings = plugin.settings()
    assert isinstance(settings, FSDP1Settings)
    assert (plugin.param_init_fn, settings.param_init_fn) == (materialize, None)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("FULL_SHARD", ShardingStrategy.HYBRID_SHARD),
        ("SHARD_GRAD_OP", ShardingStrategy._HYBRID_SHARD_ZERO2),
        ("HYBRID_SHARD", ShardingStrategy.HYBRID_SHARD),
        ("HYBRID_SHARD_ZERO2", ShardingStrategy._HYBRID_SHARD_ZERO2),
    ],
)
def test_model_copies_make_fsdp1_hybrid(strategy: str, expected: ShardingStrategy) -> None:
    settings = Plugin(sharding_strategy=strategy).settings(dp_replicate=2)
    assert isinstance(settings, FSDP1Settings)
    assert settings.sharding_strategy is expected


def test_settings_refuse_impossible_copies() -> None:
    with pytest.raises(ValueError, match="NO_SHARD and 2 model copies"):
        Plugin(sharding_strategy="NO_SHARD").settings(dp_replicate=2)


@pytest.mark.parametrize(
    "policy",
    [
        always,
        partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        ModuleWrapPolicy({Block}),
        CustomPolicy(lambda module: True),
    ],
)
def test_policies_of_torch_reach_the_engine_as_they_are(policy: Any) -> None:
    assert Plugin(auto_wrap_policy=policy).settings().wrap == WrapSettings(kind="callable", policy=policy)


def test_a_size_of_zero_wraps_nothing_and_says_so() -> None:
    with pytest.warns(UserWarning, match="min_num_params=0 wraps nothing"):
        assert Plugin(auto_wrap_policy="size_based_wrap").settings().wrap == WrapSettings()


# ---------------------------------------------------------------- imports
def test_the_plugin_works_without_lightning_and_imports_fsdp_late() -> None:
    code = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocker())
from accelight.strategies.fsdp import FullyShardedDataParallelPlugin, fsdp2_prepare_auto_wrap_policy
assert "torch.distributed.fsdp" not in sys.modules
FullyShardedDataParallelPlugin(fsdp_version=2).settings()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", ["full", "sharded", "FULL"])
def test_lightnings_short_names_of_state_dict_types(version: int, kind: str) -> None:
    plugin = Plugin(fsdp_version=version, state_dict_type=kind)
    assert plugin.settings().state_dict_type == f"{kind.lower()}_state_dict"


@pytest.mark.parametrize("policy", [set(), {"Block"}, [torch.nn.Linear(1, 1)]])
def test_sets_of_anything_but_classes_are_refused(policy: Any) -> None:
    with pytest.raises(TypeError, match="auto_wrap_policy must be a set of module classes"):
        Plugin(auto_wrap_policy=policy)
