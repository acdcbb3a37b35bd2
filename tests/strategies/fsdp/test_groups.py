"""Parameters that are gathered together: tied ones always, the output head apart where that saves communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from accelight.strategies.fsdp import FullyShardedDataParallelPlugin
from accelight.strategies.fsdp import units as groups
from accelight.strategies.fsdp.strategy import build_engine
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.grid import (
    KINDS,
    Cell,
    Decoder,
    Kind,
    Trace,
    assert_same,
    next_token_loss,
    tokens,
    train_cell,
    train_plain,
)

CLASSES = {"transformer_cls_names_to_wrap": ["Embedding", "Linear", "Block"]}


# ------------------------------------------------------------------ ties
def _train_tied(engine: str) -> Trace:
    return train_cell(engine, Kind(tied=True, options=CLASSES), "32-true", Cell(1, "none"), "cpu")


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_tied_modules_that_the_policy_takes_apart_share_one_group(engine: str) -> None:
    """huggingface/accelerate#4171: with torch 2.13, two groups for one parameter fail at the first forward."""
    expected = train_plain(KINDS["tied"], "32-true", Cell(1, "none"), 2)
    assert_same(run_on_ranks(2, _train_tied, engine)[0], expected, {"rtol": 1e-5, "atol": 4e-6})


def test_units_that_split_a_tie_are_left_to_what_is_around_them() -> None:
    model = Decoder(KINDS["tied"])
    units: list[Any] = [model.embed, model.blocks[0].linear, model.blocks[0], model.head]
    with pytest.warns(UserWarning, match=r"gathered with their parent's unit .* own: embed, head\.$"):
        assert groups.without_split_ties(model, units) == [model.blocks[0].linear, model.blocks[0]]
    assert groups.without_split_ties(model, units, {model.head, model.embed}) == units  # nobody shards the tie
    around = nn.ModuleList([model])
    assert groups.without_split_ties(around, [model]) == [model]


# ------------------------------------------------------------------ the head
class Traffic(TorchDispatchMode):
    """Bytes that gathers bring and reductions take, by the phase that the caller names."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "first"
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if func.namespace == "c10d" and ("allgather" in name or "reduce_scatter" in name):
            whole: Tensor = args[0] if "allgather" in name else args[1]
            kind = "gathered" if "allgather" in name else "reduced"
            self.num_bytes[f"{self.phase} {kind}"] += whole.numel() * whole.element_size()
        return func(*args, **(kwargs or {}))


def _traffic(worth: int, policy: Any, use_head: bool) -> dict[str, int]:
    was, groups._WORTH_A_COLLECTIVE = groups._WORTH_A_COLLECTIVE, worth
    try:
        fields: dict[str, Any] = {"transformer_cls_names_to_wrap": ["Block"]} if policy != "no_wrap" else {}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=policy, **fields)
        engine = build_engine(plugin.settings(), init_device_mesh("cpu", (2,)), torch.device("cpu"))
        model = Decoder(KINDS["plain"])
        root = engine.prepare(model).root
    finally:
        groups._WORTH_A_COLLECTIVE = was
    assert isinstance(model.head, FSDPModule) is (worth == 1 and policy != "no_wrap")
    if not use_head:
        skipped = model.head
        model.head = nn.Identity()  # type: ignore[assignment]
        model.register_module("unused", skipped)
    traffic = Traffic()

    def enter(phase: str) -> Any:
        return lambda *_: setattr(traffic, "phase", phase)

    model.blocks[0].register_forward_pre_hook(enter("layers"), prepend=True)
    model.blocks[0].register_full_backward_hook(enter("last"))
    with traffic:
        if use_head:
            next_token_loss(root, tokens(2)).backward()
        else:
            root(tokens(2)[:, :-1]).sum().backward()
    return dict(traffic.num_bytes)


def _total(traffic: dict[str, int], kinds: Iterable[str]) -> int:
    return sum(number for name, number in traffic.items() if name.split()[1] in kinds)


def test_the_head_is_gathered_and_reduced_while_layers_compute() -> None:
    model = Decoder(KINDS["plain"])
    head = -(-model.head.weight.size(0) // 2) * 2 * model.head.weight.size(1) * 4  # rows padded to both ranks
    together = run_on_ranks(2, _traffic, 2**20, "transformer_based_wrap", True)[0]
    apart = run_on_ranks(2, _traffic, 1, "transformer_based_wrap", True)[0]
    # Before the first layer there is one head less to wait for, and after the last one, too; not a byte more in all.
    assert together["first gathered"] - apart["first gathered"] == head
    assert together["last reduced"] - apart["last reduced"] == head
    assert _total(together, ["gathered", "reduced"]) == _total(apart, ["gathered", "reduced"])


def test_a_step_without_the_head_does_not_gather_it() -> None:
    model = Decoder(KINDS["plain"])
    head = -(-model.head.weight.size(0) // 2) * 2 * model.head.weight.size(1) * 4
    together = run_on_ranks(2, _traffic, 2**20, "transformer_based_wrap", False)[0]
    apart = run_on_ranks(2, _traffic, 1, "transformer_based_wrap", False)[0]
    assert _total(together, ["gathered"]) - _total(apart, ["gathered"]) == head


def test_no_wrap_means_one_group() -> None:
    traffic = run_on_ranks(2, _traffic, 1, "no_wrap", True)[0]
    assert set(traffic) == {"first gathered", "last reduced"}


def test_which_layers_are_late_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tied = Decoder(KINDS["plain"]), Decoder(KINDS["tied"])
    blocks = list(model.blocks)
    assert groups.output_heads(model, blocks, set()) == []  # too small
    monkeypatch.setattr(groups, "_WORTH_A_COLLECTIVE", 1)
    assert groups.output_heads(model, blocks, set()) == [model.head]
    assert groups.output_heads(model, blocks, {model.head}) == []
    assert groups.output_heads(model, [], set()) == []
    assert groups.output_heads(tied, list(tied.blocks), set()) == []


def _reads_the_weight() -> str:
    groups._WORTH_A_COLLECTIVE, was = 1, groups._WORTH_A_COLLECTIVE

    class Fused(Decoder):
        def forward(self, x: Tensor) -> Tensor:
            head, self.head = self.head, nn.Identity()  # type: ignore[assignment]
            try:
                return super().forward(x) @ head.weight.T
            finally:
                self.head = head

    try:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
        engine = build_engine(plugin.settings(), init_device_mesh("cpu", (2,)), torch.device("cpu"))
        root = engine.prepare(Fused(KINDS["plain"])).root
    finally:
        groups._WORTH_A_COLLECTIVE = was
    try:
        root(tokens(2)[:, :-1])
    except RuntimeError as error:
        return str(error)
    return ""


def test_weights_read_past_their_forward_are_explained() -> None:
    assert all("ModuleWrapPolicy({Block})" in message for message in run_on_ranks(2, _reads_the_weight))


def test_attention_stays_with_an_encoder_layer_that_reads_its_weights() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 2)
    decoder = nn.TransformerDecoderLayer(4, 2)
    model = nn.ModuleList([encoder, decoder])
    kinds = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
    units: list[nn.Module] = [one for one in model.modules() if isinstance(one, kinds)]
    kept = groups.without_attention_of_encoders(model, units)
    assert kept == [*encoder.layers, decoder.self_attn, decoder.multihead_attn]
