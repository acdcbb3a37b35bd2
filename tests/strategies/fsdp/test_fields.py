"""What each field of the plugin does to the running model on both engines, or how it says that it does nothing there.

Each run shards one model per variant the way the strategy does, trains it for two steps and writes down what happened:
which submodules became units, what was gathered and reduced, in which dtype, and in which order around the layers.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accelight.state import PartialState
from accelight.strategies import AccelFSDPStrategy, FullyShardedDataParallelPlugin
from accelight.strategies.fsdp.sharded_model import build_mesh, unwrap_root
from accelight.strategies.fsdp.strategy import build_engine
from accelight.strategies.fsdp.weights import prepare_with_weights
from tests.ranks import run_on_ranks
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader

WIDTH = 8
NUM_LAYERS = 3
LAYER = WIDTH * WIDTH
"""Parameters of a layer; everything divides by two, so that no shard is padded."""
BF16, FP32 = torch.bfloat16, torch.float32
BLOCKS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Layer"]}
VERSIONS = pytest.mark.parametrize("version", [1, 2])
FIELDS = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
shown: dict[str, set[int]] = {}
"""Which fields the tests below are about, and the versions."""


def shows(*fields: str, versions: tuple[int, ...] = (1, 2)) -> Callable[[Any], Any]:
    """Note what a test is about."""
    for field in fields:
        shown.setdefault(field, set()).update(versions)
    return lambda test: test


# ------------------------------------------------------------------ the model and what it notes
Event = tuple[Any, ...]
"""("gather" | "reduce" | "all_reduce", numel, dtype) and ("forward" | "enter" | "leave", layer)."""


class _Mark(torch.autograd.Function):
    """Notes when backward passes here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[Event], event: Event) -> Tensor:
        ctx.events, ctx.event = events, event
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.events.append(ctx.event)
        return grads[0], None, None


class Projection(nn.Linear):
    """Takes any dtype, and computes in that of its weight."""

    def __init__(self, width: int) -> None:
        super().__init__(WIDTH, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Layer(nn.Module):
    table: Tensor

    def __init__(self, number: int, events: list[Event], dtypes: dict[str, Any]) -> None:
        super().__init__()
        self.number, self.events, self.dtypes = number, events, dtypes
        self.linear = Projection(WIDTH)
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.events.append(("forward", self.number))
        self.dtypes.update({f"input_{self.number}": x.dtype, "buffer": self.table.dtype})
        x = self.linear(_Mark.apply(x, self.events, ("leave", self.number)))
        self.dtypes["weight"] = x.dtype
        return cast("Tensor", _Mark.apply(torch.tanh(x) * self.table.to(x.dtype), self.events, ("enter", self.number)))


class Model(nn.Module):
    """Layers between a first and a last linear layer, which the root's unit holds unless a policy takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.dtypes: dict[str, Any] = {}
        self.first = Projection(WIDTH)
        self.layers = nn.Sequential(*(Layer(number, self.events, self.dtypes) for number in range(NUM_LAYERS)))
        self.last = Projection(2)

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes["input"] = x.dtype
        return cast("Tensor", self.last(self.layers(self.first(x))))


class _Traffic(TorchDispatchMode):
    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.events = events
        self.num_copies = 0
        """Of tensors of an activation's size."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.replace("_", "")
        self.num_copies += func is torch.ops.aten.copy_.default and args[0].numel() == 2 * WIDTH
        if func.namespace == "c10d":
            for word, kind, at in (("allgather", "gather", 0), ("reducescatter", "reduce", 1)):
                if word in name:
                    parts = tree_leaves(args[at])  # gloo takes lists for FSDP1's gathers
                    self.events.append((kind, sum(part.numel() for part in parts), parts[0].dtype))
            if name.startswith("allreduce"):
                parts = tree_leaves(args[0])
                self.events.append(("all_reduce", sum(part.numel() for part in parts), parts[0].dtype))
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass
class Seen:
    """What one variant did on one rank."""

    units: list[str]
    """Names of the submodules that are units; the root not among them."""
    kinds: set[str]
    """What makes the units: "FSDP1", "FSDP2"."""
    parameters: dict[str, tuple[int, ...]]
    """Shapes of what optimizers get, by name; of this rank's shards."""
    events: list[Event]
    """Of the second step."""
    dtypes: dict[str, Any]
    weights: dict[str, Tensor]
    """Before training, whole, where nothing is flat."""
    num_copies: int
    """Of activations, in the second step."""
    num_queued: int
    """Events that hold back FSDP1's gathers."""
    warnings: list[str]

    def count(self, *kinds: str) -> int:
        return sum(event[0] in kinds for event in self.events)

    def numel(self, kind: str) -> int:
        return sum(event[1] for event in self.events if event[0] == kind)

    def found(self, kind: str) -> set[torch.dtype]:
        return {event[2] for event in self.events if event[0] == kind}


@dataclasses.dataclass(frozen=True)
class Variant:
    """Fields to shard with, and where the model comes from."""

    fields: dict[str, Any]
    origin: Literal["same", "per_rank", "meta", "meta_but_rank_0"] = "same"
    dp_replicate: int = 1
    ignore: str | None = None
    """A submodule to put into ``ignored_modules`` itself."""


def _build(origin: str) -> Model:
    rank = dist.get_rank()
    torch.manual_seed(rank if origin == "per_rank" else 0)
    on_meta = origin == "meta" or (origin == "meta_but_rank_0" and rank > 0)
    with torch.device("meta" if on_meta else "cpu"):
        return Model()


def _observe(variant: Variant) -> Seen:
    model = _build(variant.origin)
    fields = {**BLOCKS, **variant.fields}
    if variant.ignore:
        fields["ignored_modules"] = [model.get_submodule(variant.ignore)]
    plugin = FullyShardedDataParallelPlugin(**fields)
    copies, size = variant.dp_replicate, dist.get_world_size()
    mesh = build_mesh(None if copies == 1 else (copies, size // copies), size, "cpu")
    engine = build_engine(plugin.settings(dp_replicate=copies), mesh, torch.device("cpu"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        root = prepare_with_weights(engine, model, PartialState()).root
    inside = unwrap_root(root)
    units = {
        _plain(name): "FSDP1" if isinstance(module, FullyShardedDataParallel) else "FSDP2"
        for name, module in inside.named_modules()
        if isinstance(module, FullyShardedDataParallel | FSDPModule) and _plain(name)
    }
    weights = {_plain(name): _whole(parameter) for name, parameter in inside.named_parameters()}
    events = model.events
    for _ in range(2):
        root.zero_grad()
        events.clear()
        with _Traffic(events) as traffic:
            root(torch.ones(2, WIDTH)).float().sum().backward()
    queues = {id(queue): queue for module in root.modules() if (queue := getattr(module, "_free_event_queue", None))}
    return Seen(
        units=list(units),
        kinds=set(units.values()),
        parameters={_plain(name): tuple(_local(p).shape) for name, p in inside.named_parameters()},
        events=list(events),
        dtypes=dict(model.dtypes),
        weights=weights,
        num_copies=traffic.num_copies,
        num_queued=sum(len(queue._queue) for queue in queues.values()),
        warnings=[str(warning.message) for warning in told],
    )


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if not part.startswith("_") or part == "_flat_param")


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def _observe_all(variants: list[Variant]) -> list[Seen]:
    return [_observe(variant) for variant in variants]


def observe(*variants: Variant, world_size: int = 2) -> list[Seen]:
    """What rank 0 saw of each variant."""
    return cast("list[Seen]", run_on_ranks(world_size, _observe_all, list(variants))[0])


def with_fields(version: int, **fields: Any) -> Variant:
    return Variant({"fsdp_version": version, **fields})


def order(seen: Seen, *, backward: bool) -> list[tuple[str, Any]]:
    """Gathers of layers and what layers do, in forward or in backward."""
    at = seen.events.index(("enter", NUM_LAYERS - 1))
    while backward and seen.events[at - 1][0] == "gather":  # which the first layer of backward waits for
        at -= 1
    events = seen.events[at:] if backward else seen.events[:at]
    layers = [event for event in events if event[0] not in ("gather", "reduce") or event[1] == LAYER]
    return [(event[0], event[1] if event[0] not in ("gather", "reduce") else "") for event in layers]


# ------------------------------------------------------------------ version, sharding, wrapping
@shows("fsdp_version")
def test_fsdp_version() -> None:
    one, two = observe(with_fields(1), with_fields(2))
    assert (one.kinds, two.kinds) == ({"FSDP1"}, {"FSDP2"})
    assert one.units == two.units == [f"layers.{number}" for number in range(NUM_LAYERS)]
    assert two.parameters["layers.0.linear.weight"] == (
        WIDTH // 2,
        WIDTH,
    )  # rows, and no piece of a flat one
    assert one.parameters["layers.0.linear.weight"] == (LAYER // 2,)


@shows("sharding_strategy", "reshard_after_forward")
@pytest.mark.parametrize("field", ["sharding_strategy", "reshard_after_forward"])
@VERSIONS
def test_sharding_strategy(version: int, field: str) -> None:
    """Freed after forward, each layer is gathered again for backward; the root's unit stays, and FSDP2's last one."""
    translated = {"FULL_SHARD": True, "SHARD_GRAD_OP": False} if version == 2 and field.startswith("reshard") else {}
    freed, kept = observe(
        *(with_fields(version, **{field: translated.get(name, name)}) for name in ("FULL_SHARD", "SHARD_GRAD_OP"))
    )
    assert freed.count("gather") == 2 * NUM_LAYERS + 1 - (version == 2)
    assert kept.count("gather") == NUM_LAYERS + 1
    assert freed.count("reduce") == kept.count("reduce") == NUM_LAYERS + 1


def test_no_shard_and_hybrid_shard() -> None:
    [whole] = observe(with_fields(1, sharding_strategy="NO_SHARD"))
    assert (whole.count("gather", "reduce"), whole.count("all_reduce")) == (0, NUM_LAYERS + 1)
    assert whole.parameters["layers.0.linear.weight"] == (WIDTH, WIDTH)
    with pytest.raises(ValueError, match="NO_SHARD is not possible with fsdp_version=2"):
        FullyShardedDataParallelPlugin(fsdp_version=2, sharding_strategy="NO_SHARD")
    hybrid = [Variant({"fsdp_version": version}, dp_replicate=2) for version in (1, 2)]
    hybrid[0].fields["sharding_strategy"] = "HYBRID_SHARD"
    for seen in observe(*hybrid, world_size=4):  # shards go over two processes, and then over the two copies
        assert seen.count("reduce") == seen.count("all_reduce") == NUM_LAYERS + 1
        assert seen.numel("all_reduce") == seen.numel("reduce") // 2


@VERSIONS
def test_an_obsolete_sharding_strategy_is_translated_aloud(version: int) -> None:
    if version == 2:
        with pytest.warns(UserWarning, match="sharding_strategy='SHARD_GRAD_OP' is obsolete with fsdp_version=2"):
            FullyShardedDataParallelPlugin(fsdp_version=2, sharding_strategy="SHARD_GRAD_OP")
    else:
        with pytest.raises(ValueError, match="reshard_after_forward"):
            FullyShardedDataParallelPlugin(fsdp_version=1, reshard_after_forward="never")


def _is_layer(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or (isinstance(module, Layer) and module.number == 1)


@shows("auto_wrap_policy", "transformer_cls_names_to_wrap", "min_num_params")
@VERSIONS
def test_wrap_policies_of_the_plugin(version: int) -> None:
    no_class: dict[str, Any] = {"transformer_cls_names_to_wrap": None}
    nothing, by_class, by_size, larger, by_call = observe(
        with_fields(version, auto_wrap_policy="no_wrap", **no_class),
        with_fields(version, transformer_cls_names_to_wrap=["Projection"]),
        with_fields(version, auto_wrap_policy="size_based_wrap", min_num_params=LAYER, **no_class),
        with_fields(version, auto_wrap_policy="size_based_wrap", min_num_params=2 * LAYER, **no_class),
        with_fields(version, auto_wrap_policy=_is_layer, **no_class),
    )
    assert (nothing.units, nothing.count("gather")) == ([], 1)
    linears = ["first", "last", *(f"layers.{number}.linear" for number in range(NUM_LAYERS))]
    assert sorted(by_class.units) == linears
    assert sorted(by_size.units) == [name for name in linears if name != "last"]
    assert larger.units == ["layers"]
    assert by_call.units == ["layers.1"]
    assert by_call.count("reduce") == 2


@shows("ignored_modules")
@VERSIONS
def test_ignored_modules(version: int) -> None:
    fields = {"fsdp_version": version}
    plain, by_name, by_object = observe(
        Variant(fields), Variant({**fields, "ignored_modules": r"layers\.1"}), Variant(fields, ignore="layers.1")
    )
    for seen in (by_name, by_object):
        assert seen.units == ["layers.0", "layers.2"]
        assert seen.parameters["layers.1.linear.weight"] == (WIDTH, WIDTH)  # whole on each process
        assert plain.numel("reduce") - seen.numel("reduce") == LAYER


# ------------------------------------------------------------------ what is gathered when
@shows("backward_prefetch", versions=(1,))
def test_backward_prefetch_of_fsdp1() -> None:
    """Before the layer's backward, after it but before its gradients leave, or only when it is needed."""
    before, after, never = observe(
        *(with_fields(1, backward_prefetch=name) for name in ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"))
    )
    own, layer, reduce = ("gather", ""), [("enter", 2), ("leave", 2)], ("reduce", "")
    assert order(before, backward=True)[:5] == [own, own, *layer, reduce]
    assert order(after, backward=True)[:5] == [own, *layer, own, reduce]
    assert order(never, backward=True)[:5] == [own, *layer, reduce, own]


@shows("forward_prefetch")
@VERSIONS
def test_forward_prefetch(version: int) -> None:
    ahead, when_needed = observe(*(with_fields(version, forward_prefetch=flag) for flag in (True, False)))
    gather = ("gather", "")
    at = order(ahead, backward=False)
    assert at[:3] == [gather, gather, ("forward", 0)]
    assert order(when_needed, backward=False)[:3] == [gather, ("forward", 0), gather]
    assert ahead.count("gather") == when_needed.count("gather")


@shows("limit_all_gathers", versions=(1,))
def test_limit_all_gathers_of_fsdp1() -> None:
    """The host waits for events that freed units leave in a queue."""
    limited, free = observe(*(with_fields(1, limit_all_gathers=flag) for flag in (True, False)))
    assert limited.num_queued > 0
    assert free.num_queued == 0


@shows("activation_checkpointing")
@VERSIONS
def test_activation_checkpointing(version: int) -> None:
    again, once = observe(*(with_fields(version, activation_checkpointing=flag) for flag in (True, False)))
    assert (again.count("forward"), once.count("forward")) == (2 * NUM_LAYERS, NUM_LAYERS)


@shows("activation_checkpointing_offload")
@VERSIONS
def test_activation_checkpointing_offload(version: int) -> None:
    """Each layer's input is copied to host memory (on the CPU, into memory of its own), and nothing else changes."""
    plain, moved = observe(
        *(
            with_fields(version, activation_checkpointing=True, activation_checkpointing_offload=flag)
            for flag in (False, True)
        )
    )
    assert moved.num_copies - plain.num_copies == NUM_LAYERS
    assert (moved.events, moved.units, moved.parameters) == (plain.events, plain.units, plain.parameters)


# ------------------------------------------------------------------ precision
def _dtypes(version: int, *policies: Any) -> list[Seen]:
    return observe(*(with_fields(version, mixed_precision_policy=policy) for policy in policies))


@shows("mixed_precision_policy")
@VERSIONS
def test_mixed_precision_policy(version: int) -> None:
    """Each dtype of the policy alone: `param_dtype`, `reduce_dtype`, and FSDP1's buffers or FSDP2's outputs."""
    kind = MixedPrecision if version == 1 else MixedPrecisionPolicy
    third = "buffer_dtype" if version == 1 else "output_dtype"
    everything, param, reduce, last = _dtypes(
        version, "bf16", kind(param_dtype=BF16), {"reduce_dtype": "bf16"}, {third: BF16}
    )
    for seen, computed, reduced in [
        (everything, BF16, BF16),
        (param, BF16, BF16),  # without reduce_dtype, gradients go as they are
        (reduce, FP32, BF16),
        (last, FP32, FP32),
    ]:
        assert (seen.dtypes["weight"], seen.found("gather")) == (computed, {computed})
        assert seen.found("reduce") == {reduced}
        assert seen.dtypes["buffer"] == (BF16 if third == "buffer_dtype" and seen in (everything, last) else FP32)
    assert last.dtypes["input_1"] == (FP32 if version == 1 else BF16)


@VERSIONS
def test_mixed_precision_policy_casts_inputs_or_not(version: int) -> None:
    """FSDP1 has a flag for the root and one for all units, the root's too; FSDP2 has one. The layer between is fp32."""
    flags = [(root, units) for root in (True, False) for units in (True, False) if version == 1 or root == units]
    given: list[dict[str, Any]] = [{"param_dtype": BF16, "cast_forward_inputs": units} for _, units in flags]
    if version == 1:
        given = [policy | {"cast_root_forward_inputs": root} for policy, (root, _) in zip(given, flags, strict=True)]
    found = observe(*(with_fields(version, mixed_precision_policy=it, ignored_modules="first") for it in given))
    for seen, (root, units) in zip(found, flags, strict=True):
        assert seen.dtypes["input"] == (BF16 if root or units else FP32)
        assert seen.dtypes["input_0"] == (BF16 if units else FP32)


@pytest.mark.parametrize("name", ["keep_low_precision_grads", "_module_classes_to_ignore"])
def test_what_the_policy_of_fsdp1_cannot_do_here(name: str) -> None:
    value: Any = True if name.startswith("keep") else [nn.Linear]
    policy = dataclasses.replace(MixedPrecision(param_dtype=BF16), **{name: value})
    with pytest.raises(ValueError, match=f"{name} is not supported"):
        FullyShardedDataParallelPlugin(mixed_precision_policy=policy)


# ------------------------------------------------------------------ parameters and first values
@shows("use_orig_params", versions=(1,))
def test_use_orig_params_of_fsdp1() -> None:
    flat, original = observe(*(with_fields(1, use_orig_params=flag) for flag in (False, True)))
    names = [f"layers.{number}" for number in range(NUM_LAYERS)]
    assert sorted(flat.parameters) == ["_flat_param", *(f"{name}._flat_param" for name in names)]
    assert sorted(original.parameters) == ["first.weight", "last.weight", *(f"{name}.linear.weight" for name in names)]


def _fill(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.constant_(tensor, 7.0)


@shows("param_init_fn", versions=(1,))
def test_param_init_fn_of_fsdp1() -> None:
    [seen] = observe(Variant({"fsdp_version": 1, "param_init_fn": _fill}, origin="meta"))
    assert {value.item() for tensor in seen.weights.values() for value in tensor.flatten()} == {7.0}


def _first_layer(fields: dict[str, Any], origin: Literal["per_rank", "meta_but_rank_0"]) -> Tensor:
    """Its weight before training: with FSDP1 this rank's half of it, flat."""
    weights = _observe(Variant(fields, origin=origin)).weights
    return next(weight for name, weight in weights.items() if name.startswith("layers.0")).flatten()


def _expected_layer(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return next(Model().layers.parameters()).detach().flatten()


@shows("sync_module_states")
@VERSIONS
def test_sync_module_states(version: int) -> None:
    """Rank 1 has other weights to begin with: its half of a layer is rank 0's, or training is refused."""
    fields = {"fsdp_version": version, "sync_module_states": True}
    first, second = run_on_ranks(2, _first_layer, fields, "per_rank")
    assert torch.equal(torch.cat([first, second]) if version == 1 else second, _expected_layer(0))
    with pytest.raises(AssertionError, match=r"The processes start with different values of 'first\.weight'"):
        run_on_ranks(2, _first_layer, {**fields, "sync_module_states": False}, "per_rank")


@shows("cpu_ram_efficient_loading")
@VERSIONS
def test_cpu_ram_efficient_loading(version: int) -> None:
    """Only rank 0 has weights, the others nothing but meta tensors."""
    fields = {"fsdp_version": version, "cpu_ram_efficient_loading": True}
    first, second = run_on_ranks(2, _first_layer, fields, "meta_but_rank_0")
    assert torch.equal(torch.cat([first, second]) if version == 1 else second, _expected_layer(0))


# ------------------------------------------------------------------ where shards are kept and saved
@shows("cpu_offload")
@VERSIONS
def test_cpu_offload_on_cpu_says_that_it_does_nothing(version: int) -> None:
    offloaded, plain = observe(*(with_fields(version, cpu_offload=flag) for flag in (True, False)))
    message = "cpu_offload has no effect on the CPU"
    assert [any(message in warning for warning in seen.warnings) for seen in (offloaded, plain)] == [True, False]


@pytest.mark.gpu
@VERSIONS
def test_cpu_offload_keeps_shards_in_host_memory(version: int) -> None:
    assert run_on_ranks(1, _devices, version, init_group=False)[0] == {True: {"cpu"}, False: {"cuda"}}


def _devices(version: int) -> dict[bool, set[str]]:
    devices = {}
    for offload in (True, False):
        strategy = AccelFSDPStrategy(fsdp_version=version, cpu_offload=offload)
        trainer = quiet_trainer(strategy, 1, accelerator="cuda", max_steps=1)
        module = TinyModule(Case(), Outcome())
        trainer.fit(module, rank_loader(1))
        devices[offload] = {parameter.device.type for parameter in module.parameters()}
    return devices


def _save(version: int, kinds: list[str], folder: str) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        strategy = AccelFSDPStrategy(fsdp_version=version, state_dict_type=kind)
        trainer = quiet_trainer(strategy, 2, max_steps=1)
        trainer.fit(TinyModule(Case(), Outcome()), rank_loader(2))
        path = Path(folder) / kind
        trainer.save_checkpoint(path)
        dist.barrier()
        if path.is_file():
            found[kind] = sorted(torch.load(path, weights_only=True)["state_dict"])
        else:
            found[kind] = sorted(re.sub(r"\d+", "N", entry.name) for entry in path.iterdir())
    return found


@shows("state_dict_type")
@VERSIONS
def test_state_dict_type(version: int, tmp_path: Path) -> None:
    kinds = ["full_state_dict", "sharded_state_dict", *(["local_state_dict"] if version == 1 else [])]
    found = run_on_ranks(2, _save, version, kinds, str(tmp_path))[0]
    assert "model.embed.weight" in found["full_state_dict"]
    assert found["sharded_state_dict"].count("__N_N.distcp") == 2
    if version == 1:
        assert found["local_state_dict"] != found["sharded_state_dict"]
    else:
        with pytest.raises(ValueError, match=r"local_state_dict.* is not possible with fsdp_version=2"):
            FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="local_state_dict")


# ------------------------------------------------------------------ what FSDP2 says of the rest
OBSOLETE: dict[str, Any] = {
    "backward_prefetch": "BACKWARD_PRE",
    "limit_all_gathers": False,
    "use_orig_params": True,
    "param_init_fn": _fill,
}


@pytest.mark.parametrize("field", OBSOLETE)
def test_fsdp2_says_what_it_does_not_need(field: str) -> None:
    with pytest.warns(UserWarning, match=rf"^{field}.* with fsdp_version=2"):
        FullyShardedDataParallelPlugin(fsdp_version=2, **{field: OBSOLETE[field]})


def test_every_field_is_shown_on_both_engines() -> None:
    """What ``state_dict_config`` and ``optim_state_dict_config`` do is not about sharding or training."""
    for field in OBSOLETE:
        shown[field].add(2)
    elsewhere = {"state_dict_config", "optim_state_dict_config"}
    assert {field for field, versions in shown.items() if versions == {1, 2}} | elsewhere == FIELDS
