"""What FSDP cannot train is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from accelight.strategies.fsdp.settings import PrecisionSettings
from accelight.strategies.fsdp.units import check_modules
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.quantised import BF16, Linear4bit

_HALF = PrecisionSettings(param_dtype=BF16, reduce_dtype=BF16)
VERSIONS = pytest.mark.parametrize("version", [1, 2])


class Waves(nn.Module):
    def __init__(self, *, with_bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.waves = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(4)) if with_bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = (x.to(torch.complex64) @ self.waves).abs()
        return (y if self.bias is None else y + self.bias).sum()


@VERSIONS
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients(version: int, kind: Any) -> None:
    model = nn.ModuleDict({"layer": nn.Linear(2, 2), "embed": kind(4, 2, sparse=True)})
    with pytest.raises(ValueError, match=rf"embed: {kind.__name__}\(sparse=True\) has sparse gradients"):
        check_modules(model, version=version)
    model["embed"].requires_grad_(False)
    check_modules(model, version=version)


@VERSIONS
def test_ordinary_models_pass(version: int) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "bag": nn.EmbeddingBag(4, 2), "layer": nn.Linear(2, 2)})
    check_modules(model, [model["layer"]], version=version, precision=_HALF)


@VERSIONS
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_renormalise(kind: Any, version: int) -> None:
    model = nn.ModuleDict({"layer": nn.Linear(2, 2), "embed": kind(4, 2, max_norm=0.5)})
    message = rf"FSDP{version} cannot train this ModuleDict:\nembed: {kind.__name__}\(max_norm=0.5\) changes its weight"
    with pytest.raises(ValueError, match=message):
        check_modules(model, version=version)
    with pytest.raises(ValueError, match=message):  # each rank would change the rows it looks up
        check_modules(model, unsharded=[model["embed"]], version=version)
    check_modules(model.requires_grad_(False), unsharded=[model["embed"]], version=version)


def test_complex_parameters() -> None:
    alone, mixed = Waves(with_bias=False), Waves(with_bias=True)
    for model in (alone, mixed):
        with pytest.raises(
            ValueError, match=r"waves: torch.complex64 parameters cannot be flattened. Hold torch.view_as"
        ):
            check_modules(model, version=1)
        check_modules(model, unsharded=[model], version=1)
    check_modules(alone, version=2)
    check_modules(alone, version=2, precision=_HALF)
    with pytest.raises(ValueError, match=r"waves: torch.complex64 parameters cannot be reduced in one unit with real"):
        check_modules(mixed, version=2)
    with pytest.raises(ValueError, match=r"waves: torch.complex64 parameters cannot be reduced in torch.float32"):
        check_modules(alone, version=2, precision=PrecisionSettings(param_dtype=BF16, reduce_dtype=torch.float32))
    around = nn.Sequential(alone, nn.Linear(1, 1))
    check_modules(around, [alone], version=2)
    mixed.waves.requires_grad_(False)
    check_modules(mixed, version=2)


@VERSIONS
def test_4bit_weights(version: int) -> None:
    model = nn.Sequential(Linear4bit(), Linear4bit(torch.uint8))
    with pytest.raises(
        ValueError, match=r"1.weight: 4-bit weights stored as torch.uint8 cannot be sharded. .*bfloat16"
    ):
        check_modules(model, version=version, precision=_HALF)
    check_modules(model, unsharded=[model[1]], version=version, precision=_HALF)
    check_modules(model, unsharded=[model[1]], version=version)
    with pytest.raises(ValueError, match=r"0.weight: .* would be converted to torch.float16 .*_storage=torch.float16"):
        check_modules(
            model, unsharded=[model[1]], version=version, precision=PrecisionSettings(param_dtype=torch.float16)
        )


def _step(model: nn.Module, *inputs: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for one in inputs:
        (model(one).sum() / len(inputs)).backward()
    optimizer.step()


def _with_torch_alone() -> dict[str, Any]:
    """What torch makes of all this, so that a refusal is dropped when it has become needless."""
    rank, inputs = dist.get_rank(), [torch.full((2, 4), 1.0), torch.full((2, 4), 2.0)]
    found: dict[str, Any] = {}
    expected = Waves(with_bias=False)
    _step(expected, *inputs)
    for name, policy in {"plain": MixedPrecisionPolicy(), "reduced": MixedPrecisionPolicy(BF16, torch.float32)}.items():
        waves: Any = Waves(with_bias=False)
        fully_shard(waves, mp_policy=policy)
        try:
            _step(waves, inputs[rank])
            found[name] = torch.allclose(waves.waves.full_tensor(), expected.waves)
        except Exception as error:  # noqa: BLE001 (whatever torch says of it)
            found[name] = type(error).__name__
    builders: dict[str, Callable[[], Any]] = {
        "unit": lambda: fully_shard(Waves(with_bias=True)),
        "flat": lambda: FullyShardedDataParallel(Waves(with_bias=False), device_id=torch.device("cpu")),
    }
    for name, build in builders.items():
        try:
            _step(build(), inputs[rank])
            found[name] = True
        except (ValueError, AssertionError) as error:
            found[name] = str(error)
    embed: Any = nn.Embedding(4, 2, max_norm=0.5)
    fully_shard(embed)
    embed(torch.arange(4))
    embed.reshard()
    found["norm"] = embed.weight.full_tensor().norm(dim=-1).max().item()
    return found


def test_torch_cannot_either() -> None:
    for found in run_on_ranks(2, _with_torch_alone):
        assert found["plain"] is True
        assert found["reduced"] is not True
        assert "uniform original parameter dtype" in found["unit"]
        assert "Cannot flatten" in found["flat"]
        assert found["norm"] > 0.5
