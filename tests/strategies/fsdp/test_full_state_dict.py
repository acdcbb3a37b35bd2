"""A full state dict of rank 0 reaches every shard bit for bit, and each byte is sent once."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from accelight.strategies.fsdp import fsdp2_load_full_state_dict
from accelight.strategies.fsdp.sharded_model import named_tensors
from accelight.strategies.fsdp.weights import _NUM_IN_BATCH
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.loading import assert_equals, build, full_dict, process, shard


def _load(device: str, shape: tuple[int, ...] | None) -> int:
    model = shard(build(device), shape)
    parameters, expected = list(model.parameters()), full_dict()
    sent, batches = 0, list[int]()
    batch_isend_irecv = dist.batch_isend_irecv

    def counting(operations: list[dist.P2POp]) -> list[dist.Work]:
        nonlocal sent
        sending = [one.tensor for one in operations if one.op is dist.isend]
        sent += sum(tensor.nbytes for tensor in sending)
        batches.append(len(operations))
        return batch_isend_irecv(operations)

    source = build("cpu") if dist.get_rank() == 0 else None
    with mock.patch.object(dist, "batch_isend_irecv", counting):
        fsdp2_load_full_state_dict(process(), model, expected if source else None, buffers_from=source)
    assert_equals(model, expected)
    assert model.low.dtype == torch.bfloat16
    assert model.head.weight is model.embed.weight
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    assert [parameter.requires_grad for parameter in model.layers[0].parameters()] == [False] * 4
    assert torch.equal(model.layers[1].table, torch.arange(3.0))
    kept = sum(
        named.local().numel() * named.local().element_size() for named in named_tensors(model) if named.persistent
    )
    kept += sum(layer.table.numel() * 4 for layer in model.layers) if device == "meta" else 0
    assert max(batches, default=0) <= (_NUM_IN_BATCH if dist.get_rank() == 0 else 1)
    kept_elsewhere = torch.tensor(0 if dist.get_rank() == 0 else kept)
    dist.all_reduce(kept_elsewhere)
    assert sent == (kept_elsewhere.item() if dist.get_rank() == 0 else 0)

    reference = shard(build("cpu"), shape)
    theirs: dict[str, Any] = dict(full_dict()) if dist.get_rank() == 0 else {}
    set_model_state_dict(reference, theirs, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for ours, their in zip(model.parameters(), reference.parameters(), strict=True):
        assert type(ours) is type(their)
        if isinstance(ours, DTensor) and isinstance(their, DTensor):
            assert torch.equal(ours.to_local(), their.to_local())
    return sent


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("world_size", "shape"), [(1, None), (2, None), (3, None), (4, (2, 2))])
def test_every_shard_arrives_and_each_byte_is_sent_once(
    device: str, world_size: int, shape: tuple[int, int] | None
) -> None:
    """huggingface/accelerate#3930: buffers, too, whether in the state dict or not."""
    run_on_ranks(world_size, _load, device, shape)


def _load_many() -> None:
    """Many parts, some larger than what a socket holds, a process that comes late, and one that needs less."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, 1 if width % 3 else 700, bias=False) for width in range(200, 240)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    generator = torch.Generator().manual_seed(1)
    expected = {name: torch.randn(value.shape, generator=generator) for name, value in model.state_dict().items()}
    if dist.get_rank() == 1:
        time.sleep(0.3)
    fsdp2_load_full_state_dict(process(), model, expected)
    assert_equals(model, expected)


def test_many_parts_arrive_whoever_is_late() -> None:
    run_on_ranks(3, _load_many)


def _load_offloaded() -> None:
    model = shard(build("meta"), offload_policy=CPUOffloadPolicy(pin_memory=False))
    expected = full_dict()
    fsdp2_load_full_state_dict(process(), model, expected, buffers_from=build("cpu"))
    assert_equals(model, expected)


def test_offloaded_shards_are_materialised_on_the_cpu() -> None:
    run_on_ranks(2, _load_offloaded)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.full((2,), 7.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale


def _train_after_loading() -> float:
    with torch.device("meta"):
        model = Small()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # over meta parameters, which stay the same objects
    torch.manual_seed(0)
    plain = Small()
    fsdp2_load_full_state_dict(process(), model, plain.state_dict(), buffers_from=plain)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    inputs = torch.randn(4, 3)
    for _ in range(2):
        losses = []
        for one, other in ((model, optimizer), (plain, plain_optimizer)):
            loss = one(inputs).square().mean()
            loss.backward()
            other.step()
            other.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    fsdp2_load_full_state_dict(process(), model, plain.state_dict())  # again, in the middle of training
    assert_equals(model, plain.state_dict())
    return losses[0]


def test_a_loaded_model_trains_and_loads_again() -> None:
    first, second = run_on_ranks(2, _train_after_loading)
    assert first == second


def _refuse(kind: str) -> tuple[str, bool]:
    model = shard(build("cpu"))
    before = model.layers[0].linear.weight.full_tensor().clone()
    state: Any = full_dict()
    if kind == "missing":
        del state["layers.0.linear.weight"]
    elif kind == "unexpected":
        state["stray"] = torch.zeros(1)
    elif kind == "shape":
        state["layers.0.linear.weight"] = torch.zeros(5, 3)
    elif kind == "tied":
        state["head.weight"] = torch.zeros(7, 4)
    elif kind == "not a tensor":
        state["stray"] = 3
    elif kind == "none":
        state = None
    elif kind == "buffer":
        model = shard(build("meta"))
    elif kind == "one rank" and dist.get_rank() == 1:
        model.register_parameter("own", nn.Parameter(torch.zeros(1)))
    with pytest.raises(RuntimeError) as caught:
        fsdp2_load_full_state_dict(process(), model, state if dist.get_rank() == 0 else None)
    weight = model.layers[0].linear.weight
    return str(caught.value), weight.is_meta or torch.equal(weight.full_tensor(), before)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", r"process 0: missing in the state dict: layers.0.linear.weight"),
        ("unexpected", r"unexpected in the state dict: stray"),
        ("shape", r"'layers.0.linear.weight' is \(5, 3\) in the state dict, \(5, 4\) in the model"),
        ("tied", r"'embed.weight' and 'head.weight' are tied in the model, but differ"),
        ("not a tensor", r"not tensors in the state dict: stray"),
        ("none", r"missing in the state dict: embed.weight"),
        ("buffer", r"the buffer 'layers.0.table' is not persistent.*buffers_from"),
        ("one rank", r"missing in the state dict: own"),
    ],
)
def test_what_does_not_fit_is_named_on_every_rank_and_changes_nothing(kind: str, message: str) -> None:
    for text, unchanged in run_on_ranks(2, _refuse, kind):
        with pytest.raises(RuntimeError, match=message):
            raise RuntimeError(text)
        assert unchanged
