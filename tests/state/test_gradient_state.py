"""``GradientState``: the stack of dataloaders, accumulation, its plugin."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own habit)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelight.state import AcceleratorState, DistributedType, GradientAccumulationPlugin, GradientState, PartialState
from tests.ranks import run_on_ranks

READ_ONLY = [
    "end_of_dataloader",
    "remainder",
    "sync_gradients",
    "active_dataloader",
    "dataloader_references",
    "num_steps",
    "adjust_scheduler",
    "sync_with_dataloader",
    "plugin_kwargs",
    "in_dataloader",
    "initialized",
]


def loader(length: int = 3) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(length)))


def test_defaults_of_the_gradient_state() -> None:
    state = GradientState()
    assert (state.num_steps, state.adjust_scheduler, state.sync_with_dataloader) == (1, False, True)
    assert (state.sync_gradients, state.end_of_dataloader, state.remainder) == (True, False, -1)
    assert (state.in_dataloader, state.active_dataloader, state.dataloader_references) == (False, None, [None])
    assert (state.plugin_kwargs, state.is_xla_gradients_synced, state.initialized) == ({}, False, True)
    assert repr(state) == (
        "Sync Gradients: True\nAt end of current dataloader: False\nExtra samples added: -1\n"
        "Gradient accumulation plugin: {}\n"
    )


@pytest.mark.parametrize("name", READ_ONLY)
def test_attributes_are_read_only(name: str) -> None:
    with pytest.raises(AttributeError, match=f"GradientState.{name} is read-only"):
        setattr(GradientState(), name, True)


def test_the_plugin_sets_the_values_and_a_later_one_changes_them_for_all() -> None:
    first = GradientState(GradientAccumulationPlugin(num_steps=4))
    assert (first.num_steps, first.adjust_scheduler, first.plugin_kwargs) == (4, True, {"num_steps": 4})
    GradientState()
    assert first.num_steps == 4
    changed = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=False, sync_with_dataloader=False)
    GradientState(changed)
    assert (first.num_steps, first.adjust_scheduler, first.sync_with_dataloader) == (2, False, False)
    first._set_plugin(GradientAccumulationPlugin(sync_each_batch=True))
    assert (first.num_steps, first.plugin_kwargs) == (1, {"sync_each_batch": True})


def test_the_environment_sets_the_default_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    assert GradientState().num_steps == 8
    assert GradientState(GradientAccumulationPlugin(num_steps=2)).num_steps == 2
    GradientState._reset_state()
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "none")
    with pytest.raises(ValueError, match="ACCELERATE_GRADIENT_ACCUMULATION_STEPS='none' must be an integer"):
        GradientState()


def test_the_plugin_checks_itself() -> None:
    plugin = GradientAccumulationPlugin()
    assert (plugin.num_steps, plugin.adjust_scheduler, plugin.sync_with_dataloader, plugin.sync_each_batch) == (
        None,
        True,
        True,
        False,
    )
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        GradientAccumulationPlugin(num_steps=0)
    for wrong in (1.5, True, "2"):
        with pytest.raises(TypeError, match="num_steps must be an int"):
            GradientAccumulationPlugin(num_steps=wrong)  # type: ignore[arg-type]


def test_xla_gradients_are_always_synced_with_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    state = GradientState()
    state.is_xla_gradients_synced = True
    assert GradientState().is_xla_gradients_synced
    state.is_xla_gradients_synced = False
    assert [state.is_xla_gradients_synced] == [False]
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert state.is_xla_gradients_synced
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    AcceleratorState._fill(mixed_precision="no", distributed_type=DistributedType.FSDP)
    assert state.is_xla_gradients_synced


def test_validation_inside_training_does_not_disturb_it() -> None:
    state, train, validation = GradientState(), loader(), loader()
    state._add_dataloader(train, remainder=3)
    state._set_sync_gradients(False)
    state._set_end_of_dataloader(train, True)
    state._add_dataloader(validation, remainder=1)
    assert (state.active_dataloader, state.remainder, state.end_of_dataloader) == (validation, 1, False)
    assert state.dataloader_references == [None, train, validation]
    state._set_end_of_dataloader(validation, True)
    state._remove_dataloader(validation)
    assert (state.active_dataloader, state.remainder, state.end_of_dataloader) == (train, 3, True)
    assert state.sync_gradients is False
    state._remove_dataloader(train)
    state._remove_dataloader(train)  # not there any more: nothing to do
    assert (state.in_dataloader, state.end_of_dataloader, state.remainder) == (False, False, -1)


def test_dataloaders_are_held_weakly_and_what_cannot_be_is_held() -> None:
    state = GradientState()
    gone = loader()
    state._add_dataloader(gone)
    del gone
    gc.collect()
    assert not state.in_dataloader
    state._add_dataloader([1, 2])
    gc.collect()
    assert state.active_dataloader == [1, 2]


def test_one_loader_may_be_iterated_inside_itself() -> None:
    state, twice = GradientState(), loader(2)
    ends = [(state.end_of_dataloader, len(state.dataloader_references)) for _ in state.track(twice)
            for _ in state.track(twice)]  # fmt: skip
    assert ends == [(False, 3), (True, 3)] * 2
    assert not state.in_dataloader


def test_a_loader_that_is_not_iterated_has_no_end() -> None:
    with pytest.raises(RuntimeError, match=r"is not being iterated. Call _add_dataloader first"):
        GradientState()._set_end_of_dataloader([1], True)
    with pytest.raises(TypeError, match="A dataloader is needed, got None"):
        GradientState()._add_dataloader(None)


def test_track_knows_the_last_batch_and_always_unregisters() -> None:
    state = GradientState()
    assert [state.end_of_dataloader for _ in state.track(loader())] == [False, False, True]
    assert list(state.track([])) == []
    for _ in state.track(loader()):
        assert state.in_dataloader
        break
    assert not state.in_dataloader
    with pytest.raises(KeyError):  # noqa: PT012 (the loop is what is tested)
        for _ in state.track(loader()):
            raise KeyError
    assert not state.in_dataloader
    kept = state.track(loader())
    next(kept)
    kept.close()
    assert not state.in_dataloader


class CountingModel(nn.Linear):
    """Counts how often it was told not to synchronise, in DDP's way."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.unsynced = 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.unsynced += 1
        yield


@pytest.mark.parametrize(
    ("plugin", "expected", "unsynced"),
    [
        (GradientAccumulationPlugin(num_steps=2), [False, True, False, True, True], 2),
        (GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False), [False, True, False, True, False], 3),
        (GradientAccumulationPlugin(num_steps=3), [False, False, True, False, True], 3),
        (GradientAccumulationPlugin(num_steps=3, sync_each_batch=True), [False, False, True, False, True], 0),
        (GradientAccumulationPlugin(), [True] * 5, 0),
    ],
)
def test_accumulate_decides_which_micro_batch_synchronises(
    plugin: GradientAccumulationPlugin, expected: list[bool], unsynced: int
) -> None:
    state, model = GradientState(plugin), CountingModel()
    found = []
    for _ in state.track(loader(5)):
        with state.accumulate(model, nn.Linear(1, 1)):
            found.append(state.sync_gradients)
    assert found == expected
    assert model.unsynced == unsynced


def test_windows_begin_anew_with_each_epoch_only_if_the_dataloader_ends_them() -> None:
    state = GradientState(GradientAccumulationPlugin(num_steps=2))

    def epoch() -> list[bool]:
        found = []
        for _ in state.track(loader(3)):
            with state.accumulate():
                found.append(state.sync_gradients)
        return found

    assert [epoch(), epoch()] == [[False, True, True]] * 2
    state._set_plugin(GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False))
    assert [epoch(), epoch()] == [[False, True, False], [True, False, True]]


def test_the_size_of_the_accumulation_window() -> None:
    state = GradientState(GradientAccumulationPlugin(num_steps=3))
    assert [state.window_size(index, 7) for index in range(7)] == [3, 3, 3, 3, 3, 3, 1]
    assert [state.window_size(index, 8) for index in (5, 6, 7)] == [3, 2, 2]
    assert state.window_size(6) == state.window_size(6, float("inf")) == 3
    state._set_plugin(GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False))
    assert state.window_size(6, 7) == 3
    for index in (-1, 7):
        with pytest.raises(ValueError, match=f"batch_idx={index} is out of range: the epoch has 7 micro-batches"):
            state.window_size(index, 7)


def train(kind: str, num_steps: int) -> tuple[list[float], list[list[float]]]:
    """Train a line on 7 micro-batches of 2, the last window short; return the losses and the final weights."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    process = PartialState()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    inputs = torch.randn(7, 2, 2, 4)  # the same data on one process and on two
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh

        fully_shard(model, mesh=init_device_mesh("cpu", (process.num_processes,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = GradientState(GradientAccumulationPlugin(num_steps=num_steps))
    losses = []
    for index, batch in enumerate(state.track(list(inputs))):
        mine = batch.flatten(0, 1) if kind == "plain" else batch[process.process_index]
        with state.accumulate(model):
            loss = F.mse_loss(model(mine), torch.zeros_like(mine))
            (loss / state.window_size(index, len(inputs))).backward()
        if state.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        final = model(inputs[0, 0])
    return losses, final.tolist()


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_accumulated_training_on_two_processes_is_that_of_one_on_all_data(kind: str) -> None:
    ((_, expected),) = run_on_ranks(1, train, "plain", 3)
    first, second = run_on_ranks(2, train, kind, 3)
    torch.testing.assert_close(torch.tensor(first[1]), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(second[1]), torch.tensor(expected), rtol=1e-5, atol=1e-6)
