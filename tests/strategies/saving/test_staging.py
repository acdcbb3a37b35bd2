"""Copies of states for saves in the background: exact, apart from what is copied, in memory that is used again."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelight.state.rendezvous import store_messages
from accelight.strategies.saving.async_save import AsyncSaver
from accelight.strategies.saving.staging import Stager
from tests.ranks import run_on_ranks


def _state(value: float, width: int = 3000, device: str = "cpu") -> dict[str, Any]:
    """Return a state of new tensors, as FSDP1 makes one for each save."""
    weight = torch.full((2, width), value, device=device)
    transposed = torch.arange(6.0, device=device).reshape(2, 3).t() + value
    return {
        "weights": {"weight": weight, "tied": weight, "row": weight[1], "transposed": transposed},
        "steps": [torch.tensor(value), 3, "three"],
        "empty": torch.empty(0, 4, device=device),
    }


def _tensors(state: dict[str, Any]) -> list[Tensor]:
    return [*state["weights"].values(), state["steps"][0], state["empty"]]


def _addresses(state: dict[str, Any]) -> list[int]:
    return [tensor.untyped_storage().data_ptr() for tensor in _tensors(state)]


@pytest.mark.gpu
def test_memory_is_used_again_on_a_gpu() -> None:
    run_on_ranks(1, _check_memory, "cuda")


def test_memory_is_used_again() -> None:
    _check_memory("cpu")


def _check_memory(device: str) -> None:
    stager = Stager()
    first, state = stager.copy(_state(1.0, device=device)), _state(2.0, device=device)
    addresses, num_bytes = _addresses(first), stager.num_bytes
    assert num_bytes == 2 * 3000 * 4 + 6 * 4 + 4
    second = stager.copy(state)
    assert (_addresses(second), stager.num_bytes) == (addresses, num_bytes)
    assert not set(addresses[:-1]) & set(_addresses(state))
    for copied, tensor in zip(_tensors(second), _tensors(state), strict=True):
        assert copied.device.type == "cpu"
        assert copied.stride() == tensor.stride()
        assert torch.equal(copied, tensor.cpu())
    expected = [tensor.clone() for tensor in _tensors(second)]
    for tensor in _tensors(state):
        tensor.zero_()
    assert all(map(torch.equal, _tensors(second), expected))
    weights = second["weights"]
    assert weights["weight"] is weights["tied"]
    assert weights["row"].untyped_storage().data_ptr() == weights["weight"].untyped_storage().data_ptr()
    assert weights["weight"].is_pinned() is (device == "cuda")
    assert second["steps"][1:] == [3, "three"]


def test_what_the_latest_state_has_no_use_for_is_freed() -> None:
    stager = Stager()
    stager.copy(_state(1.0, width=3000))
    stager.copy(_state(2.0, width=10))
    assert stager.num_bytes == 2 * 10 * 4 + 6 * 4 + 4
    stager.close()
    assert stager.num_bytes == 0


def test_lazily_conjugated_and_negated_tensors_have_their_values() -> None:
    numbers = torch.tensor([1 + 1j, 2 - 2j])
    state = {"conjugated": numbers.conj(), "negated": numbers.conj().imag, "own": numbers}
    copied = Stager().copy(state)
    assert all(torch.equal(copied[name].resolve_conj().resolve_neg(), one) for name, one in state.items())
    trained = numbers.conj().requires_grad_()
    trained.name_of_user = "filter"  # type: ignore[attr-defined]
    one = Stager().copy({"trained": trained})["trained"]
    assert (one.requires_grad, one.name_of_user, one.tolist()) == (True, "filter", trained.tolist())


def test_parameters_and_what_requires_gradients_stay_so() -> None:
    layer, master = nn.Linear(2, 3), torch.ones(4, requires_grad=True)
    layer.weight.requires_grad_(False)
    layer.bias.names_of_user = "head"  # type: ignore[attr-defined]
    state = {"layer": layer, "again": layer.weight, "master": master, "part": master[1:]}
    copied = Stager().copy(state)
    found = dict(copied["layer"].named_parameters())
    assert {name: one.requires_grad for name, one in found.items()} == {"weight": False, "bias": True}
    assert found["weight"] is copied["again"]
    assert found["bias"].names_of_user == "head"
    assert all(torch.equal(one, dict(layer.named_parameters())[name]) for name, one in found.items())
    assert type(copied["master"]) is Tensor
    assert copied["master"].requires_grad
    assert copied["part"].untyped_storage().data_ptr() == copied["master"].untyped_storage().data_ptr()
    assert copied["part"].untyped_storage().data_ptr() != master.untyped_storage().data_ptr()


class _UncopyableError(RuntimeError):
    pass


class _Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise _UncopyableError


def test_after_a_copy_that_failed_the_next_one_is_right() -> None:
    stager = Stager()
    stager.copy(_state(1.0))
    with pytest.raises(_UncopyableError):
        stager.copy({**_state(2.0), "bad": _Uncopyable()})
    assert torch.equal(stager.copy(_state(3.0))["weights"]["weight"], torch.full((2, 3000), 3.0))


def _stage_too_early() -> None:
    saves = AsyncSaver(timedelta(seconds=60))
    saves.connect(torch.device("cpu"))
    staged = saves.stage(_state(1.0))
    saves.start("Saving first", lambda group: None, store_messages("a test"))
    with pytest.raises(RuntimeError, match=r"Saving first is still in progress: call wait\(\) before the next"):
        saves.stage(_state(2.0))
    assert staged["weights"]["weight"].eq(1).all()
    saves.wait()
    assert saves.stage(_state(2.0))["weights"]["weight"].eq(2).all()
    saves.close()


def test_memory_that_is_being_written_is_not_used() -> None:
    run_on_ranks(1, _stage_too_early)
