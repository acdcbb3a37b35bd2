"""``AcceleratorState``: precision, plugins, and who may change what."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import pytest

from accelight.state import AcceleratorState, DistributedType, PartialState
from tests.ranks import run_on_ranks


@dataclass
class FSDPPlugin:
    fsdp_version: int = 1
    precisions: list[str] = field(default_factory=list)

    def set_mixed_precision(self, precision: str) -> None:
        self.precisions.append(precision)


@dataclass(eq=False)
class DeepSpeedPlugin:
    deepspeed_config: dict[str, Any] = field(default_factory=dict)
    selected: bool = False
    precisions: list[str] = field(default_factory=list)

    def set_mixed_precision(self, precision: str) -> None:
        self.precisions.append(precision)

    def select(self, _from_accelerator_state: bool = False) -> None:
        self.selected = True

    def _unselect(self) -> None:
        self.selected = False


def test_an_accelerator_state_made_by_hand() -> None:
    state = AcceleratorState()
    assert state.initialized
    assert (state.mixed_precision, state.fsdp_plugin, state.deepspeed_plugin) == ("no", None, None)
    assert (state.dynamo_plugin, state.torch_tp_plugin, state.megatron_lm_plugin) == (None, None, None)
    assert not state.is_fsdp2
    assert (state.num_processes, state.is_main_process) == (1, True)
    assert repr(state).endswith("\nMixed precision type: no\n")


def test_not_initialized_before() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not PartialState.__new__(PartialState).initialized
    PartialState()
    assert not AcceleratorState.__new__(AcceleratorState).initialized


def test_everything_of_the_signature_is_kept() -> None:
    kept = {"dynamo_plugin": object(), "torch_tp_plugin": object(), "megatron_lm_plugin": object()}
    state = AcceleratorState("bf16", True, _from_accelerator=True, **kept)
    assert {name: getattr(state, name) for name in kept} == kept
    assert state.mixed_precision == PartialState().mixed_precision == "bf16"


def test_the_environment_gives_the_default_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "FP16")
    assert AcceleratorState().mixed_precision == "fp16"


def test_precisions_that_do_not_exist_or_cannot_run_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="mixed_precision must be one of no, fp16, bf16, fp8, got 'int8'"):
        AcceleratorState(mixed_precision="int8")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"'fp8' needs a library .* pip install 'transformer-engine"):
        AcceleratorState(mixed_precision="fp8")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "torchao" or None)
    assert AcceleratorState(mixed_precision="fp8").mixed_precision == "fp8"


def test_a_wrong_precision_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "half")
    with pytest.raises(ValueError, match="ACCELERATE_MIXED_PRECISION must be one of no, fp16, bf16, fp8, got 'half'"):
        AcceleratorState()


def test_changing_a_value_raises_and_names_both() -> None:
    state = AcceleratorState(mixed_precision="fp16")
    assert AcceleratorState().mixed_precision == AcceleratorState("fp16").mixed_precision == "fp16"
    with pytest.raises(ValueError, match="has mixed_precision='fp16', which cannot become 'bf16'"):
        AcceleratorState(mixed_precision="bf16")
    with pytest.raises(ValueError, match=r"has fsdp_plugin=None, which cannot become FSDPPlugin\(fsdp_version=2"):
        AcceleratorState(fsdp_plugin=FSDPPlugin(2))
    assert state.mixed_precision == "fp16"
    assert state.fsdp_plugin is None


@pytest.mark.parametrize("version", [1, 2])
def test_an_fsdp_plugin_by_hand(version: int) -> None:
    plugin = FSDPPlugin(version)
    state = AcceleratorState("bf16", fsdp_plugin=plugin)
    assert (state.fsdp_plugin, state.is_fsdp2) == (plugin, version == 2)
    assert state.distributed_type == PartialState().distributed_type == DistributedType.FSDP
    assert plugin.precisions == ["bf16"]


def test_one_way_to_shard() -> None:
    with pytest.raises(ValueError, match="fsdp_plugin and deepspeed_plugin exclude each other"):
        AcceleratorState(fsdp_plugin=FSDPPlugin(), deepspeed_plugin=DeepSpeedPlugin())


def test_deepspeed_plugins_are_selected_by_name() -> None:
    student = DeepSpeedPlugin({"bf16": {"enabled": True}})
    teacher = DeepSpeedPlugin({"fp16": {"enabled": True}})
    state = AcceleratorState(deepspeed_plugin={"student": student, "teacher": teacher})
    assert state.distributed_type == DistributedType.DEEPSPEED
    assert (state.deepspeed_plugin, student.selected, teacher.selected) == (student, True, False)
    assert state.mixed_precision == "bf16"
    state.select_deepspeed_plugin("teacher")
    assert (state.deepspeed_plugin, student.selected, teacher.selected) == (teacher, False, True)
    assert state.mixed_precision == "fp16"
    assert "ds_config: {'fp16': {'enabled': True}}" in repr(state)
    assert state.get_deepspeed_plugin("student") is student
    assert state.deepspeed_plugins == {"student": student, "teacher": teacher}
    for ask in (state.get_deepspeed_plugin, state.select_deepspeed_plugin):
        with pytest.raises(ValueError, match=r"There is no DeepSpeed plugin 'judge'. Known: 'student', 'teacher'"):
            ask("judge")
    assert state.deepspeed_plugin is teacher
    AcceleratorState._fill(mixed_precision="fp16", distributed_type=DistributedType.DEEPSPEED, deepspeed_plugin=teacher)
    assert state.deepspeed_plugin is teacher


def test_one_deepspeed_plugin_is_the_default_one() -> None:
    plugin = DeepSpeedPlugin({"fp16": {"enabled": "auto"}})
    state = AcceleratorState("bf16", deepspeed_plugin=plugin)
    assert state.get_deepspeed_plugin("default") is state.deepspeed_plugin is plugin
    assert state.mixed_precision == "bf16"  # "auto" leaves it to the Trainer
    plugin.deepspeed_config = {}
    assert state.mixed_precision == "bf16"
    plugin.deepspeed_config = {"bf16": {"enabled": False}}
    assert state.mixed_precision == "no"


def test_a_precision_that_nobody_gave_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, told in ((None, []), ("no", ["no"]), ("fp16", ["fp16"])):
        plugin = DeepSpeedPlugin()
        AcceleratorState(given, deepspeed_plugin=plugin)
        assert plugin.precisions == told
        AcceleratorState._reset_state()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    AcceleratorState(deepspeed_plugin=plugin)
    assert plugin.precisions == ["fp16", "bf16"]


def test_a_strategy_with_the_plugins_given_by_hand() -> None:
    one, two = DeepSpeedPlugin(), DeepSpeedPlugin()
    state = AcceleratorState(deepspeed_plugin=one)
    fill("no", DistributedType.DEEPSPEED, deepspeed_plugin={"any name": one})
    assert (state.deepspeed_plugins, one.selected) == ({"default": one}, True)
    for others in ({"one": one, "two": two}, {"two": two}, two, {}):
        with pytest.raises(ValueError, match=r"has deepspeed_plugin=.*, which cannot become"):
            fill("no", DistributedType.DEEPSPEED, deepspeed_plugin=others)
    AcceleratorState._reset_state()
    state = AcceleratorState(deepspeed_plugin={"one": one, "two": two})
    state.select_deepspeed_plugin("two")
    fill("no", DistributedType.DEEPSPEED, deepspeed_plugin={"one": one})
    assert (state.deepspeed_plugin, one.selected, two.selected) == (two, False, True)  # what the user has selected


def test_without_deepspeed_plugins_none_is_known() -> None:
    with pytest.raises(ValueError, match=r"no DeepSpeed plugin 'default'. Known: none"):
        AcceleratorState().get_deepspeed_plugin("default")


def fill(precision: str, kind: DistributedType, **plugins: Any) -> AcceleratorState:
    return AcceleratorState._fill(mixed_precision=precision, distributed_type=kind, **plugins)


def test_a_strategy_fills_it_and_the_next_one_replaces_that() -> None:
    module_level = AcceleratorState()
    state = fill("bf16", DistributedType.FSDP, fsdp_plugin=FSDPPlugin(2))
    assert (module_level.mixed_precision, module_level.is_fsdp2) == ("bf16", True)
    plugin = DeepSpeedPlugin()
    fill("fp16", DistributedType.DEEPSPEED, deepspeed_plugin=plugin)
    assert (state.fsdp_plugin, state.deepspeed_plugin) == (None, plugin)
    assert state.distributed_type == DistributedType.DEEPSPEED
    selected = [plugin.selected]
    fill("no", DistributedType.NO)
    assert [*selected, plugin.selected] == [True, False]
    assert (state.distributed_type, state.deepspeed_plugin, state.mixed_precision) == (DistributedType.NO, None, "no")
    with pytest.raises(ValueError, match="has mixed_precision='no', which cannot become 'bf16'"):
        AcceleratorState("bf16")


def test_a_strategy_may_not_contradict_what_was_fixed_by_hand() -> None:
    plugin = FSDPPlugin(2)
    state = AcceleratorState("fp16", fsdp_plugin=plugin)
    with pytest.raises(ValueError, match="has mixed_precision='fp16', which cannot become 'bf16'"):
        fill("bf16", DistributedType.FSDP, fsdp_plugin=plugin)
    with pytest.raises(ValueError, match=r"has fsdp_plugin=.*which cannot become FSDPPlugin\(fsdp_version=1"):
        fill("fp16", DistributedType.FSDP, fsdp_plugin=FSDPPlugin(1))
    with pytest.raises(ValueError, match=r"has fsdp_plugin=.*which cannot become None"):
        fill("fp16", DistributedType.DEEPSPEED, deepspeed_plugin=DeepSpeedPlugin())
    assert fill("fp16", DistributedType.FSDP, fsdp_plugin=plugin).is_fsdp2
    assert state.mixed_precision == "fp16"


def use_on_ranks() -> tuple[Any, ...]:
    state = AcceleratorState(mixed_precision="bf16", fsdp_plugin=FSDPPlugin(2))
    with state.main_process_first(), state.local_main_process_first():
        pass
    with state.split_between_processes([0, 1, 2, 3, 4, 5]) as share:
        pass
    state.wait_for_everyone()
    found = (state.process_index, state.distributed_type, len(share), state.use_distributed)
    state.wait_for_everyone()
    state.destroy_process_group()
    with pytest.raises(RuntimeError, match="wait_for_everyone needs the process group, which was destroyed"):
        AcceleratorState().wait_for_everyone()
    return found


def test_everything_of_partial_state() -> None:
    for world_size in (2, 3):
        for rank, found in enumerate(run_on_ranks(world_size, use_on_ranks)):
            assert found == (rank, DistributedType.FSDP, 6 // world_size, True)


def use_accelerates_variable() -> DistributedType:
    return AcceleratorState().distributed_type


def test_accelerates_fsdp_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_on_ranks(1, use_accelerates_variable, env={"ACCELERATE_USE_FSDP": "true"}) == [DistributedType.FSDP]
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert AcceleratorState().distributed_type == DistributedType.NO


class BrokenPlugin(FSDPPlugin):
    def set_mixed_precision(self, precision: str) -> None:
        raise ValueError(f"cannot do {precision}")


def test_a_plugin_that_refuses_leaves_no_state_behind() -> None:
    with pytest.raises(ValueError, match="cannot do bf16"):
        AcceleratorState("bf16", fsdp_plugin=BrokenPlugin())
    assert AcceleratorState("fp16").distributed_type == DistributedType.NO
