"""All ranks begin with rank 0's parameters and buffers, however each of them has built its model."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.common.broadcast import check_layout, check_values, send_from_rank_zero
from tests.ranks import run_on_ranks
from tests.strategies.one_start import Module, assert_alike, fit, plain_weights
from tests.strategies.oracle import quiet_trainer

ENGINES: dict[str, dict[str, Any]] = {
    "fsdp1": {"fsdp_version": 1},
    "fsdp1-flat": {"fsdp_version": 1, "use_orig_params": False},
    "fsdp2": {"fsdp_version": 2},
}


def _strategy(engine: str, **options: Any) -> AccelFSDPStrategy:
    return AccelFSDPStrategy(state_dict_type="full_state_dict", **ENGINES[engine], **options)


def _fit(engine: str, where: str, others: str = "cpu") -> tuple[dict[str, Tensor], Tensor]:
    strategy = _strategy(engine)
    module = fit(strategy, where, device=others if dist.get_rank() else "cpu")
    weights = strategy.lightning_module_state_dict()
    return {name: tensor.clone() for name, tensor in weights.items()}, module.offset.clone()


@pytest.mark.core("init-fsdp1", "setup-fsdp2", "configure_model-fsdp2")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("where", ["init", "setup", "configure_model"])
def test_training_begins_with_rank_zeros_values(where: str, engine: str) -> None:
    expected = plain_weights(where)
    outcomes = run_on_ranks(2, _fit, engine, where)
    assert_alike(outcomes[0][0], expected)
    for _, buffer in outcomes:
        assert torch.equal(buffer, expected["offset"])


def _refused(engine: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        fit(_strategy(engine, sync_module_states=False), "init")
    return str(caught.value)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_own_values_that_differ_are_named(engine: str) -> None:
    for message in run_on_ranks(2, _refused, engine):
        assert re.search(r"different values of 'net.0.weight', 'net.0.bias'.*Omit sync_module_states", message)
        assert "offset" not in message


def _fit_alike(engine: str) -> bool:
    torch.manual_seed(0)
    fit(_strategy(engine, sync_module_states=False), "init", seed=5)
    return True


def test_own_values_that_are_alike_train() -> None:
    assert run_on_ranks(2, _fit_alike, "fsdp2") == [True, True]


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_without_values_are_sent_theirs(engine: str) -> None:
    """As with Hugging Face's scripts: the model is on the meta device on all ranks but the first."""
    outcomes = run_on_ranks(2, _fit, engine, "init", "meta")
    assert_alike(outcomes[0][0], plain_weights("init"))


def _copies(engine: str) -> list[Tensor]:
    """Make everything after sharding, on four ranks that draw different numbers, with two copies."""
    options = {"device_mesh": (2, 2)} | ({"sharding_strategy": "HYBRID_SHARD"} if engine != "fsdp2" else {})
    module = Module("init", dist.get_rank(), device="meta")
    strategy = _strategy(engine, **options)
    trainer = quiet_trainer(strategy, 4)
    torch.manual_seed(dist.get_rank())
    trainer.validate(module, DataLoader(cast("Any", [])), verbose=False)
    own = [getattr(parameter, "_local_tensor", parameter) for parameter in module.parameters()]
    return [parameter.detach().clone() for parameter in own]


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_copies_of_what_is_made_after_sharding_are_alike(engine: str) -> None:
    ranks = run_on_ranks(4, _copies, engine)
    for one, copy in ((0, 2), (1, 3)):
        assert sum(tensor.numel() for tensor in ranks[one])
        assert all(torch.equal(*pair) for pair in zip(ranks[one], ranks[copy], strict=True))


# ------------------------------------------------------------------ the parts
def _layout(kind: str) -> str:
    tensors: dict[str, Tensor] = {"a": torch.zeros(2), "b": torch.zeros(3)}
    if dist.get_rank() == 1:
        tensors = {
            "shape": {**tensors, "b": torch.zeros(4)},
            "dtype": {**tensors, "b": torch.zeros(3).half()},
            "missing": {"a": torch.zeros(2)},
            "order": {"b": torch.zeros(3), "a": torch.zeros(2)},
            "meta": tensors,
        }[kind]
    elif kind == "meta":
        tensors["b"] = torch.empty(3, device="meta")
    with pytest.raises(RuntimeError) as caught:
        check_layout(tensors)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("shape", r"'b' is \(3,\) float32 on process 0 and \(4,\) float32 on process 1"),
        ("dtype", r"'b' is \(3,\) float32 on process 0 and \(3,\) float16 on process 1"),
        ("missing", r"'b' is \(3,\) float32 on process 0 and missing on process 1"),
        ("order", r"'a' on process 0 is in the position of 'b' on process 1"),
        ("meta", r"'b' is on the meta device on process 0 but not on process 1"),
    ],
)
def test_different_models_are_named_on_all_ranks(kind: str, problem: str) -> None:
    for message in run_on_ranks(2, _layout, kind):
        assert re.search(f"The processes have built different models: {problem}", message)


def _many_kinds(rank: int) -> list[Tensor]:
    torch.manual_seed(rank)
    large = torch.randn(3_000, 3_000)  # more than a bucket
    return [
        torch.randn(3, 4),
        torch.randn(5) > 0,
        torch.randint(100, (3,)),
        torch.randn((), dtype=torch.float64),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(7).bfloat16(),
        torch.randn(2, dtype=torch.complex64),
        torch.empty(0),
        torch.full((1,), 4.0).expand(3),
        large,
        large.T.clone(memory_format=torch.preserve_format) + rank,
    ]


def _sent() -> bool:
    tensors = _many_kinds(dist.get_rank())
    versions = [tensor.is_contiguous() for tensor in tensors]
    send_from_rank_zero([*tensors, torch.empty(2, device="meta"), nn.UninitializedParameter()], torch.device("cpu"))
    check_values({str(number): tensor for number, tensor in enumerate(tensors)})
    expected = _many_kinds(0)
    same = all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))
    return same and versions == [tensor.is_contiguous() for tensor in tensors]


def test_values_of_any_kind_arrive() -> None:
    assert run_on_ranks(2, _sent) == [True, True]
