"""What mixed precision stores: fp32 masters of what is trained; frozen and 4-bit weights as they are."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.fsdp import fsdp2_prepare_model
from accelight.strategies.fsdp.units import convert_floats
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.plain_loop import accelerator
from tests.strategies.fsdp.quantised import BF16, FP32, Linear4bit
from tests.strategies.oracle import Case, Outcome, TinyModule, quiet_trainer, rank_loader


class Trained(nn.Linear):
    pass


class Base(nn.Sequential):
    pass


class Adapted(nn.Module):
    """A frozen base and a small trained layer, as LoRA has them."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.adapter = Trained(6, 6, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)


class Module(TinyModule):
    def __init__(self, kind: str) -> None:
        super().__init__(Case(), Outcome())
        torch.manual_seed(0)
        bases: dict[str, Any] = {
            "frozen": lambda: nn.Linear(6, 6, dtype=BF16),
            "mixed": lambda: Base(nn.Linear(6, 6, dtype=BF16), nn.LayerNorm(6)),
            "4bit": Linear4bit,
        }
        layers = (Adapted(bases[kind]()) for _ in range(2))
        self.model = nn.Sequential(Trained(5, 6, dtype=BF16), *layers, Trained(6, 3, dtype=BF16))  # type: ignore[assignment]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def _train(version: int, kind: str, precision: Any, fields: dict[str, Any], world_size: int) -> dict[str, Any]:
    module = Module(kind)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    strategy = AccelFSDPStrategy(fsdp_version=version, state_dict_type="full_state_dict", **fields)
    trainer = quiet_trainer(strategy, world_size, max_steps=2, precision=precision)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, rank_loader(world_size))
    state = strategy.lightning_module_state_dict()
    return {
        "dtypes": {name.removeprefix("model."): value.dtype for name, value in state.items()},
        "changed": {name.removeprefix("model.") for name in state if not _same(state[name], before[name])},
        "told": [str(one.message) for one in caught if "flattens" in str(one.message)],
    }


def _same(one: Tensor, other: Tensor) -> bool:
    """Compare bits: packed numbers may look like NaN."""
    if one.dtype != other.dtype:
        return torch.equal(one.float(), other.float())
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _names(*endings: str) -> set[str]:
    return {
        name.removeprefix("model.") for name, _ in Module("mixed").named_parameters() if any(e in name for e in endings)
    }


TRAINED = _names("model.0", "model.3", "adapter")


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize(
    ("version", "fields"),
    [
        (2, {}),
        (2, {"auto_wrap_policy": ModuleWrapPolicy({Adapted})}),
        (1, {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "use_orig_params": False}),
        (1, {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "use_orig_params": True}),
        (1, {"ignored_modules": r".*\.base", "use_orig_params": True}),
    ],
)
def test_frozen_weights_keep_their_dtype(version: int, fields: dict[str, Any], precision: str) -> None:
    found = run_on_ranks(2, _train, version, "frozen", precision, fields, 2)[0]
    assert {name for name, dtype in found["dtypes"].items() if dtype == FP32} == TRAINED
    assert set(found["dtypes"].values()) == {FP32, BF16}
    assert found["changed"] == TRAINED
    assert not found["told"]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_unit_of_fsdp1_has_one_dtype(use_orig_params: bool) -> None:
    """Trained and frozen in one unit (original parameters), or frozen ones of two dtypes (flat ones)."""
    classes: set[type[nn.Module]] = {Adapted} if use_orig_params else {Base, Trained}
    fields = {"auto_wrap_policy": ModuleWrapPolicy(classes), "use_orig_params": use_orig_params}
    found = run_on_ranks(2, _train, 1, "mixed", "bf16-mixed", fields, 2)[0]
    assert set(found["dtypes"].values()) == {FP32}
    assert found["changed"] == TRAINED
    [told] = set(found["told"])
    assert "are converted to fp32" in told
    assert "model.1.base.0.weight, model.1.base.0.bias, model.2.base.0.weight and 1 more" in told


@pytest.mark.core("2-fields0", "1-fields2-bf16-mixed")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
@pytest.mark.parametrize(
    ("version", "fields"),
    [
        (2, {}),
        (2, {"ignored_modules": r".*\.base"}),
        (1, {"ignored_modules": r".*\.base"}),
        (1, {"auto_wrap_policy": ModuleWrapPolicy({Linear4bit, Trained}), "use_orig_params": False}),
        (1, {"auto_wrap_policy": ModuleWrapPolicy({Linear4bit, Trained}), "use_orig_params": True}),
    ],
)
def test_4bit_weights_are_not_touched(version: int, fields: dict[str, Any], precision: str) -> None:
    found = run_on_ranks(2, _train, version, "4bit", precision, fields, 2)[0]
    trained = {"bf16-true": BF16}.get(precision, FP32)
    for name, dtype in found["dtypes"].items():
        assert dtype == (trained if name in TRAINED else BF16), name
    assert found["changed"] == TRAINED


def test_4bit_weights_beside_trained_ones_in_a_unit_of_fsdp1_are_refused() -> None:
    fields = {"auto_wrap_policy": ModuleWrapPolicy({Adapted}), "use_orig_params": True}
    with pytest.raises(AssertionError, match=r"FSDP1 flattens .* 4-bit weights next to others in torch.bfloat16 and "):
        run_on_ranks(2, _train, 1, "4bit", "bf16-mixed", fields, 2)


def _whole(parameter: Any) -> Tensor:
    whole: Tensor = parameter.detach().full_tensor()
    return whole


def _train_in_a_loop(policy: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Half-precision linears and a norm in fp32, and a step that is too small for bf16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in (model[0], model[2], model[3]):
        layer.to(BF16)
    model[2].requires_grad_(False)
    fsdp2_prepare_model(accelerator(auto_wrap_policy=None, mixed_precision_policy=policy, **fields), model)
    before = {name: _whole(parameter).clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(2, 4)).sum().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(2e-4)
    optimizer.step()
    after = {name: _whole(parameter) for name, parameter in model.named_parameters()}
    return {name: (after[name].dtype, (before[name] - after[name]).abs().max().item()) for name in after}


@pytest.mark.parametrize("ram_efficient", [False, True])
@pytest.mark.parametrize("policy", ["bf16", MixedPrecisionPolicy(param_dtype=BF16)])
def test_masters_in_a_plain_loop(policy: Any, ram_efficient: bool) -> None:
    fields = {"cpu_ram_efficient_loading": ram_efficient}
    for found in run_on_ranks(2, _train_in_a_loop, policy, fields):
        for name, (dtype, change) in found.items():
            frozen = name.startswith("2.")
            assert dtype == (BF16 if frozen else FP32)
            assert change == pytest.approx(0.0 if frozen else 2e-4, rel=1e-2)


def test_converting_leaves_complex_numbers_complex() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model.register_buffer("table", torch.ones(2, dtype=torch.float64))
    model.register_buffer("count", torch.ones(2, dtype=torch.int64))
    dtypes = {name: value.dtype for name, value in convert_floats(model, BF16).state_dict().items()}
    assert dtypes == {"weight": BF16, "phase": torch.complex64, "table": BF16, "count": torch.int64}
