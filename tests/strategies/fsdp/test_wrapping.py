"""Which modules become units, against what FSDP1 itself would wrap, and which are ignored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _recursive_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from accelight.checkpoint.names import clean_name
from accelight.strategies.fsdp.plugin import FullyShardedDataParallelPlugin
from accelight.strategies.fsdp.settings import (
    WrapSettings,
    fsdp2_prepare_auto_wrap_policy,
    resolve_ignored,
    units_to_wrap,
)
from tests.ranks import run_on_ranks


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm(x))


class SpecialBlock(Block):
    pass


class Model(nn.Module):
    def __init__(self, *, depth: int = 2, tied: bool = False, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.attend = nn.MultiheadAttention(width, 2)
        self.head = nn.Linear(width, 10, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


class Wrapper(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"net": model})


def names(model: nn.Module, wrap: WrapSettings, ignored: set[nn.Module] | None = None) -> list[str]:
    units = units_to_wrap(model, wrap, ignored or set())
    by_name = dict(model.named_modules(remove_duplicate=False))
    for name, module in units:
        assert by_name[name] is module
        assert module is not model
    assert len({module for _, module in units}) == len(units)
    return [name for name, _ in units]


def by_class(*cls_names: str) -> WrapSettings:
    return WrapSettings(kind="transformer_based_wrap", transformer_cls_names=cls_names or None)


def by_size(size: int) -> WrapSettings:
    return WrapSettings(kind="size_based_wrap", min_num_params=size)


def by_policy(policy: Any) -> WrapSettings:
    return WrapSettings(kind="callable", policy=policy)


def tiny_llama(depth: int = 2) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=depth,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


# ---------------------------------------------------------------- by class
def test_no_wrap_leaves_everything_to_the_root() -> None:
    assert names(Model(), WrapSettings()) == []


def test_classes_by_name_in_registration_order() -> None:
    assert names(Model(), by_class("Linear", "Embedding"))[:3] == [
        "embedding",
        "blocks.0.attention.qkv",
        "blocks.0.attention.out",
    ]
    assert names(Model(depth=3), by_class("Block")) == ["blocks.0", "blocks.1", "blocks.2"]


def test_children_come_before_parents() -> None:
    assert names(Model(), by_class("Block", "Attention")) == [
        "blocks.0.attention",
        "blocks.0",
        "blocks.1.attention",
        "blocks.1",
    ]


def test_a_subclass_counts_as_its_base() -> None:
    assert names(nn.Sequential(Block(), SpecialBlock()), by_class("Block")) == ["0", "1"]
    assert names(nn.Sequential(Block(), SpecialBlock()), by_class("SpecialBlock")) == ["1"]


def test_a_module_under_two_names_comes_once() -> None:
    model = Model()
    model.blocks.append(model.blocks[0])
    model.register_module("again", model.blocks[1])
    assert names(model, by_class("Block")) == ["blocks.0", "blocks.1"]
    assert names(model, by_policy(functools.partial(lambda_auto_wrap_policy, lambda_fn=_is_block))) == [
        "blocks.0",
        "blocks.1",
    ]


def test_the_root_is_never_a_unit() -> None:
    block = Block()
    block.register_module("nested", Block())
    assert names(block, by_class("Block")) == ["nested"]
    with pytest.raises(ValueError, match="'Model'"):
        names(Model(), by_class("Model"))


def test_an_unknown_class_names_candidates_repeated_ones_first() -> None:
    with pytest.raises(ValueError, match=r"holds 'Blok', but .* Classes in the model: Block, Linear, .*Attention"):
        names(Model(), by_class("Block", "Blok"))


@pytest.mark.parametrize("wrap", [by_class(), WrapSettings(kind="transformer_based_wrap", transformer_cls_names=())])
def test_no_class_name_at_all(wrap: WrapSettings) -> None:
    with pytest.raises(ValueError, match=r"needs class names.*Set transformer_cls_names_to_wrap .*: Block, Linear, "):
        names(Model(), wrap)


# ---------------------------------------------------------------- Hugging Face models
def test_a_hugging_face_model_brings_its_classes() -> None:
    assert names(tiny_llama(), by_class()) == ["model.layers.0", "model.layers.1"]


def test_a_hugging_face_model_is_found_inside_a_lightning_module() -> None:
    model = Wrapper(tiny_llama())
    expected = ["inner.net.model.layers.0", "inner.net.model.layers.1"]
    assert names(model, by_class()) == expected
    assert names(model, by_class("LlamaDecoderLayer")) == expected
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(model)
    assert names(model, plugin.settings().wrap) == expected


def test_classes_of_absent_parts_are_passed_over() -> None:
    model = Model()
    model._no_split_modules = ["VisionBlock", "Block"]  # type: ignore[assignment]
    assert names(model, by_class()) == ["blocks.0", "blocks.1"]
    model._no_split_modules = ["VisionBlock"]  # type: ignore[assignment]
    with pytest.raises(ValueError, match="needs class names"):
        names(model, by_class())


# ---------------------------------------------------------------- by size, by callable: what FSDP1 would wrap
class Unit(nn.Module):
    """Stands for FSDP1's wrapper in `_recursive_wrap`."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module


def torchs_units(model: nn.Module, policy: Callable[..., bool], ignored: set[nn.Module]) -> list[str]:
    """Return the names that torch's own recursion wraps; ``model`` is not usable afterwards."""
    known = {module: name for name, module in model.named_modules()}
    units: list[str] = []

    def wrap(module: nn.Module, **_: Any) -> nn.Module:
        units.append(known[module])
        return Unit(module)

    params = {parameter for module in ignored for parameter in module.parameters()}
    _recursive_wrap(model, policy, wrap, ignored, params, only_wrap_children=True)
    return units


def same_as_torch(build: Callable[[], nn.Module], wrap: WrapSettings, ignored_names: str | None = None) -> list[str]:
    policy = wrap.policy or functools.partial(size_based_auto_wrap_policy, min_num_params=wrap.min_num_params)
    ours, theirs = build(), build()
    found = names(ours, wrap, resolve_ignored(ours, ignored_names))
    assert found == torchs_units(theirs, policy, resolve_ignored(theirs, ignored_names))
    return found


@pytest.mark.parametrize("size", [0, 1, 20, 40, 41, 64, 80, 150, 230, 250, 400, 470, 600, 10_000])
@pytest.mark.parametrize("tied", [False, True])
def test_size_based_units_are_torchs(size: int, tied: bool) -> None:
    same_as_torch(lambda: Model(tied=tied, depth=3), by_size(size))


def test_size_based_units_count_what_is_left_over() -> None:
    found = same_as_torch(Model, by_size(70))
    assert "blocks.0.mlp.0" in found  # 80 parameters
    assert "blocks.0.mlp" not in found  # 68 are left of it
    assert not any(name.startswith("attend") for name in found)  # torch takes a MultiheadAttention for a leaf
    assert not any(name.endswith("blocks") for name in found)


def test_size_based_units_leave_ignored_parameters_out() -> None:
    assert "blocks.0.mlp" not in same_as_torch(Model, by_size(100), r"blocks\.\d\.mlp\.\d")
    found = same_as_torch(Model, by_size(150), r"blocks\.0")
    assert found
    assert not any(name.startswith("blocks.0") for name in found)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_size_based_units_are_torchs_on_any_tree(data: st.DataObject) -> None:
    shapes = st.recursive(st.integers(1, 5), lambda children: st.lists(children, min_size=1, max_size=4), max_leaves=12)
    shape, size = data.draw(st.lists(shapes, min_size=1, max_size=3)), data.draw(st.integers(0, 60))

    def build(tree: Any = shape) -> nn.Module:
        if isinstance(tree, int):
            return nn.Linear(tree, tree, device="meta")
        return nn.Sequential(*map(build, tree)) if len(tree) % 2 else nn.ModuleList(map(build, tree))

    same_as_torch(build, by_size(size))


def _is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def _no_blocks_inside(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return not isinstance(module, Block) if recurse else nonwrapped_numel > 30


@pytest.mark.parametrize(
    "policy",
    [
        functools.partial(lambda_auto_wrap_policy, lambda_fn=_is_block),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block, Attention}),
        functools.partial(size_based_auto_wrap_policy, min_num_params=40, force_leaf_modules={Block}),
        _no_blocks_inside,
    ],
)
@pytest.mark.parametrize("ignored", [None, r"blocks\.0", r"blocks\.\d\.attention"])
def test_units_by_callable_are_torchs(policy: Callable[..., bool], ignored: str | None) -> None:
    assert same_as_torch(Model, by_policy(policy), ignored)


def test_policies_given_as_objects() -> None:
    assert names(Model(), by_policy(ModuleWrapPolicy({Block, Attention}))) == names(
        Model(), by_class("Block", "Attention")
    )
    assert names(Model(), by_policy(CustomPolicy(_is_block))) == ["blocks.0", "blocks.1"]
    model = Model()
    assert names(model, by_policy(ModuleWrapPolicy({Block})), {model.blocks[0]}) == ["blocks.1"]
    with pytest.raises(ValueError, match=r"returns \['forward_prefetch'\] for a Block"):
        names(
            Model(), by_policy(CustomPolicy(lambda module: {"forward_prefetch": True} if _is_block(module) else False))
        )


def _wrapped_by_fsdp1(wrap: WrapSettings) -> tuple[list[str], list[str]]:
    """Shard on this process with torch's policy; return FSDP1's units and ours."""
    policy = wrap.policy or functools.partial(size_based_auto_wrap_policy, min_num_params=wrap.min_num_params)
    model = Model()
    ours = [name for name, _ in units_to_wrap(model, wrap, set())]
    known = {module: name for name, module in model.named_modules()}
    root = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    theirs = [known[m.module] for m in root.modules() if isinstance(m, FullyShardedDataParallel) and m is not root]
    return sorted(theirs), sorted(ours)


def _fsdp1_policies() -> list[tuple[list[str], list[str]]]:
    policies: list[Any] = [ModuleWrapPolicy({Block}), CustomPolicy(_is_block)]
    return [_wrapped_by_fsdp1(wrap) for wrap in (*map(by_size, (40, 80, 150)), *map(by_policy, policies))]


def test_units_are_those_of_fsdp1_itself() -> None:
    for theirs, ours in run_on_ranks(1, _fsdp1_policies)[0]:
        assert theirs == ours
        assert theirs


# ---------------------------------------------------------------- wrappers
def compiled(module: nn.Module) -> nn.Module:
    wrapper: Any = torch.compile(module)  # typed as a function
    assert isinstance(wrapper, nn.Module)
    return wrapper


def test_activation_and_compile_wrappers_hide_nothing() -> None:
    model = Model(depth=4)
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    model.blocks[2] = compiled(model.blocks[2])
    model.blocks[3] = compiled(checkpoint_wrapper(model.blocks[3]))
    expected = ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    assert names(model, by_class("Block")) == expected
    assert names(model, by_policy(ModuleWrapPolicy({Block}))) == expected
    assert names(model, by_policy(functools.partial(lambda_auto_wrap_policy, lambda_fn=_is_block))) == expected
    plain = Model(depth=4)
    assert [clean_name(name) for name in names(model, by_size(40))] == names(plain, by_size(40))
    assert names(model, by_class("Block"), {model.blocks[1], model.blocks[2]}) == ["blocks.0", "blocks.3"]
    with pytest.raises(ValueError, match="Classes in the model: Block, Linear"):
        names(model, by_class("Blok"))


def test_a_compiled_root_hides_nothing() -> None:
    model = compiled(Model())
    assert names(model, by_class("Block")) == ["_orig_mod.blocks.0", "_orig_mod.blocks.1"]
    assert resolve_ignored(model, "head") == {model.get_submodule("_orig_mod.head")}
    with pytest.raises(ValueError, match="'Model'"):
        names(model, by_class("Model"))


# ---------------------------------------------------------------- ignored modules
def test_ignored_modules_and_what_is_in_them_are_no_units() -> None:
    model = Model()
    assert names(model, by_class("Block", "Attention"), {model.blocks[0]}) == ["blocks.1.attention", "blocks.1"]
    assert names(model, by_class("Block", "Attention"), {model.get_submodule("blocks.0.attention")}) == [
        "blocks.0",
        "blocks.1.attention",
        "blocks.1",
    ]


def test_ignored_modules_by_list_hold_their_submodules() -> None:
    model = Model()
    block = model.blocks[0]
    assert resolve_ignored(model, None) == set()
    assert resolve_ignored(model, (block, model.head)) == {*block.modules(), model.head}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("head", ["head"]),
        (r"blocks\.\d\.mlp\.0", ["blocks.0.mlp.0", "blocks.1.mlp.0"]),
        (r"(embedding|head)", ["embedding", "head"]),
    ],
)
def test_ignored_modules_by_expression(pattern: str, expected: list[str]) -> None:
    model = Model()
    assert resolve_ignored(model, pattern) == {model.get_submodule(name) for name in expected}


def test_an_expression_sees_names_without_wrappers_and_every_name_of_a_module() -> None:
    model = Model()
    inner = model.blocks[0]
    model.blocks[0] = checkpoint_wrapper(compiled(inner))
    model.register_module("alias", model.head)
    assert resolve_ignored(model, r"blocks\.0") == set(model.get_submodule("blocks.0").modules())
    assert inner.mlp in resolve_ignored(model, r"blocks\.0\.mlp")
    assert resolve_ignored(model, "alias") == {model.head}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("blocks(", r"ignored_modules='blocks\(' is not a valid regular expression: missing \)"),
        (
            "block",
            r"ignored_modules='block' fully matches no module name of Model. Names look like: embedding, blocks, ",
        ),
        ("", "ignored_modules='' fully matches no module name"),
    ],
)
def test_wrong_regular_expressions_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_ignored(Model(), pattern)


def test_a_wrong_expression_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_IGNORED_MODULES", "blocks(")
    expression = FullyShardedDataParallelPlugin().settings().ignored_modules
    message = r"ignored_modules \(environment variable FSDP_IGNORED_MODULES\)='blocks\(' is not a valid"
    with pytest.raises(ValueError, match=message):
        resolve_ignored(Model(), expression)


def test_a_listed_module_has_to_be_a_part_of_the_model() -> None:
    with pytest.raises(ValueError, match="holds a Linear that is not a part of Model"):
        resolve_ignored(Model(), (nn.Linear(1, 1),))
    model = Model()
    with pytest.raises(ValueError, match="holds a Model that is the whole model"):
        resolve_ignored(model, (model,))


# ---------------------------------------------------------------- fsdp2_prepare_auto_wrap_policy
@pytest.mark.parametrize(
    "fields",
    [
        {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]},
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 200, "ignored_modules": r"attend"},
        {"auto_wrap_policy": ModuleWrapPolicy({Block})},
    ],
)
def test_the_policy_for_fsdp2_is_true_of_the_units(fields: dict[str, Any]) -> None:
    model = Model()
    policy = fsdp2_prepare_auto_wrap_policy(FullyShardedDataParallelPlugin(fsdp_version=2, **fields), model)
    assert policy is not None
    assert [name for name, module in model.named_modules() if policy(module)] == ["blocks.0", "blocks.1"]


def test_no_policy_for_fsdp2_where_nothing_is_wrapped() -> None:
    assert fsdp2_prepare_auto_wrap_policy(FullyShardedDataParallelPlugin(fsdp_version=2), Model()) is None


def _shard_bottom_up() -> list[str]:
    mesh = init_device_mesh("cpu", (1,))
    model = Model()
    for _, unit in units_to_wrap(model, by_class("Block", "Attention", "Embedding"), set()):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def test_fully_shard_takes_the_units_in_this_order() -> None:
    assert run_on_ranks(1, _shard_bottom_up)[0] == [
        "",
        "embedding",
        "blocks.0",
        "blocks.0.attention",
        "blocks.1",
        "blocks.1.attention",
    ]
