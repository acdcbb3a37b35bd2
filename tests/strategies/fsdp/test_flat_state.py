"""Sharded saves of FSDP1 gather nothing, and hold what torch's own state dict, which does, would have held."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.optim import SGD, Optimizer
from torchmetrics import SumMetric

from accelight.checkpoint import merge_fsdp_weights
from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.fsdp.checkpoint.optim_state_dict import _kind, _received
from accelight.strategies.fsdp.checkpoint.state_dict import flat_model_state, has_flat_state, model_state
from accelight.strategies.sharded_tensors.shards import FlatShard
from tests.ranks import run_on_ranks
from tests.strategies.oracle import WIDTH, Block, Case, Outcome, TinyModule, quiet_trainer, rank_loader

BLOCKS: dict[str, Any] = {
    "auto_wrap_policy": "transformer_based_wrap",
    "transformer_cls_names_to_wrap": ["Block", "Convolving"],
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "two-flat": (2, {}),
    "two-orig_params": (2, {"use_orig_params": True}),
    "two-kept_gathered": (2, {"sharding_strategy": "SHARD_GRAD_OP"}),
    "two-offloaded": (2, {"cpu_offload": True, "use_orig_params": True}),
    "two-bf16": (
        2,
        {"mixed_precision_policy": MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)},
    ),
    "two-recomputed": (2, {"activation_checkpointing": True}),
    "three-flat": (3, {}),
    "three-orig_params": (3, {"use_orig_params": True}),
    "hybrid": (4, {"device_mesh": (2, 2), "use_orig_params": True}),
}


class Told(nn.Module):
    """Has a state of its own beside its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"calls": 3}


class Convolving(Block):
    """Has a weight whose memory is in another order than its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = torch.arange(27.0).reshape(1, 3, 3, 3).to(x.dtype) / 27
        return super().forward(x) + self.conv(image * x.mean()).mean()


class Module(TinyModule):
    """With ties, a shared module, memory in another order, nothing at all, buffers, a metric, and ignored weights."""

    def __init__(self) -> None:
        super().__init__(Case(), Outcome())
        model: Any = self.model
        model.tied = nn.Linear(5, WIDTH)
        model.tied.weight = model.embed.weight
        model.extra = nn.Linear(3, 3)
        model.blocks[0] = first = Convolving()
        last = model.blocks[-1]
        first.conv.register_buffer("running", torch.arange(3.0) / 3)
        first.again = first.conv
        last.empty = nn.Parameter(torch.empty(0, 4))
        last.one = nn.Parameter(torch.ones(1, 1, 1))
        last.told = Told()
        self.metric = SumMetric()
        self.metric.persistent(True)
        model.register_buffer("count", torch.tensor(3))
        model.register_buffer("mean", torch.arange(7.0) / 7)
        model.register_buffer("scratch", torch.zeros(2), persistent=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        # FSDP1 casts the target with all other inputs; torch 2.9 has no backward of mse_loss over two dtypes.
        return super().training_step([batch[0], batch[1].float()], batch_idx)

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


def _fit(
    options: dict[str, Any], module: TinyModule | None = None, resume_from: str | None = None
) -> tuple[Trainer, nn.Module]:
    given: dict[str, Any] = {"fsdp_version": 1, "state_dict_type": "sharded_state_dict", **BLOCKS, **options}
    strategy = AccelFSDPStrategy(ignored_modules=r"model\.extra" if module is None else None, **given)
    trainer = quiet_trainer(strategy, dist.get_world_size(), max_steps=2, max_epochs=1)
    trainer.fit(module or Module(), rank_loader(dist.get_world_size()), ckpt_path=resume_from)
    return trainer, strategy._checkpointer._state_dict_module()


def _full(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: cast("Any", one).full_tensor().cpu() if hasattr(one, "full_tensor") else one
        for name, one in state.items()
    }


def _gathered(root: nn.Module) -> dict[str, Any]:
    return dict(get_model_state_dict(root, options=StateDictOptions(full_state_dict=True)))


def _compare(options: dict[str, Any]) -> None:
    _, root = _fit(options)
    assert has_flat_state(root)
    found, expected = flat_model_state(root), _gathered(root)
    cut = {name for name, one in found.items() if isinstance(one, FlatShard)}
    buffers = {name for name in found if name.endswith((".running", "model.count", "model.mean"))}
    others = {name for name in found if name.startswith(("model.extra", "metric")) or "_extra_state" in name}
    assert cut == found.keys() - buffers - others - {"model.blocks.1.empty"}
    assert found["model.tied.weight"] is found["model.embed.weight"]
    assert "model.blocks.0.again.weight" in cut
    assert list(found) == list(expected)
    for name, full in _full(found).items():
        if isinstance(full, Tensor):
            assert (full.shape, full.dtype, full.stride()) == (
                expected[name].shape,
                expected[name].dtype,
                full.stride(),
            )
            assert torch.equal(full, expected[name].to(full.device)), name
        else:
            assert full == expected[name], name
    assert found["model.mean"].dtype == torch.float32
    assert not any(getattr(one, "requires_grad", False) for one in found.values())


@pytest.mark.core("two-flat", "two-bf16", "three-orig_params", "hybrid")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_what_torch_gathers(layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    run_on_ranks(world_size, _compare, options)


def _replace_data(use_orig_params: bool) -> None:
    _, root = _fit({"use_orig_params": use_orig_params})
    before = _full(flat_model_state(root))
    for parameter in root.parameters():
        parameter.data = parameter.data.clone() * 2
    after = _full(flat_model_state(root))
    assert torch.equal(after["model.blocks.0.conv.weight"], before["model.blocks.0.conv.weight"] * 2)
    gathered = _gathered(root)
    assert all(torch.equal(after[name], gathered[name]) for name in after if name.endswith("weight"))


def test_other_data_in_a_parameters_place_is_saved() -> None:
    run_on_ranks(2, _replace_data, True)


def _save_inside(folder: str) -> str:
    trainer, root = _fit({})
    with FullyShardedDataParallel.summon_full_params(root), pytest.raises(RuntimeError) as raised:
        trainer.save_checkpoint(folder)
    return str(raised.value)


def test_inside_of_summon_full_params_nothing_is_saved(tmp_path: Path) -> None:
    """What is written to full parameters reaches the shards when the context ends."""
    for message in run_on_ranks(2, _save_inside, str(tmp_path / "never")):
        assert "summon_full_params" in message
    assert not (tmp_path / "never").exists()


class SavedBeforeBackward(TinyModule):
    """Recomputed in backward with the views of flat parameters that its forward saw."""

    def __init__(self, path: str) -> None:
        super().__init__(Case(), Outcome())
        self.path = path

    def on_before_backward(self, loss: Tensor) -> None:
        if self.path:
            self.trainer.save_checkpoint(self.path)


def _full_saves_in_half_precision(folder: str) -> list[dict[str, Any]]:
    trained = []
    for path in ("", f"{folder}/saved.ckpt"):
        strategy = AccelFSDPStrategy(
            fsdp_version=1,
            use_orig_params=False,
            auto_wrap_policy={Block},
            activation_checkpointing=True,
            state_dict_type="full_state_dict",
        )
        trainer = quiet_trainer(strategy, dist.get_world_size(), max_steps=2, precision="bf16-mixed")
        trainer.fit(SavedBeforeBackward(path), rank_loader(dist.get_world_size()))
        trained.append(_gathered(strategy._checkpointer._state_dict_module()))
    return trained


def test_a_full_save_between_forward_and_backward_leaves_the_views_that_backward_recomputes_with(
    tmp_path: Path,
) -> None:
    """The save shows full precision, in other memory."""
    for never_saved, saved in run_on_ranks(2, _full_saves_in_half_precision, str(tmp_path)):
        assert all(torch.equal(saved[name], value) for name, value in never_saved.items())


def _double(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    state[f"{prefix}one"] = state[f"{prefix}one"] * 2 + state[f"{prefix}told.linear.weight"].sum()


class Doubling(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state[f"{kwargs['prefix']}bias"] = state[f"{kwargs['prefix']}bias"] * 2
        return state


def _with_hook(module: Module) -> None:
    cast("Any", module.model).blocks[-1].register_state_dict_post_hook(_double)


def _with_old_hook(module: Module) -> None:
    cast("Any", module.model).blocks[-1]._register_state_dict_hook(lambda *given: _double(*given))


def _with_override(module: Module) -> None:
    cast("Any", module.model).tied = Doubling(5, WIDTH)


CHANGES: dict[str, Callable[[Module], None]] = {
    "hook": _with_hook,
    "old_hook": _with_old_hook,
    "override": _with_override,
}


def _save_changed(change: str, folder: str) -> dict[str, Any]:
    module = Module()
    CHANGES[change](module)
    trainer, root = _fit({}, module)
    assert not has_flat_state(root)
    trainer.save_checkpoint(folder)
    return {name: one for name, one in _gathered(root).items() if isinstance(one, Tensor)}


@pytest.mark.parametrize("change", CHANGES)
def test_who_has_a_say_in_the_state_dict_sees_full_weights(change: str, tmp_path: Path) -> None:
    expected = run_on_ranks(2, _save_changed, change, str(tmp_path / "sharded"))[0]
    merge_fsdp_weights(tmp_path / "sharded", tmp_path / "merged", progress=False)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name in ("model.blocks.1.one", "model.tied.bias", "model.blocks.0.conv.weight"):
        assert torch.equal(merged[name], expected[name]), name


def _unsharded() -> None:
    _, root = _fit({"sharding_strategy": "NO_SHARD", "use_orig_params": True})
    assert not has_flat_state(root)
    state = model_state(root, None, torch.device("cpu"))
    assert not any(isinstance(one, FlatShard) for one in state.values())


def test_what_is_not_sharded_is_as_torch_has_it() -> None:
    run_on_ranks(2, _unsharded)


class Trained(TinyModule):
    def __init__(self) -> None:
        super().__init__(Case(), Outcome())
        self.model.blocks[0] = Convolving()


def _momentum(trainer: Trainer) -> dict[str, Any]:
    state: Any = trainer.strategy.optimizer_state(trainer.optimizers[0]).get("state", {})
    return _full({f"{name}.{key}": value for name, own in state.items() for key, value in own.items()})


def _resume(saved_as: dict[str, Any], loaded_as: dict[str, Any], path: str) -> None:
    trainer, _ = _fit(saved_as, Trained())
    trainer.save_checkpoint(path)
    again, _ = _fit(loaded_as, Trained(), resume_from=path)
    expected, found = _momentum(trainer), _momentum(again)
    assert found.keys() == expected.keys()
    if found or dist.get_rank() == 0:  # full states are there alone
        [momentum] = [one for one in expected.values() if getattr(one, "shape", None) == (5, 3, 3, 3)]
        assert len(momentum.unique()) > 5
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.core("full-orig", "sharded-flat")
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_optimizer_state_of_memory_in_another_order(kind: str, use_orig_params: bool, tmp_path: Path) -> None:
    """Full states were cut in the order of elements, and each rank got other elements than its parameter has."""
    options = {"state_dict_type": f"{kind}_state_dict", "use_orig_params": use_orig_params}
    run_on_ranks(2, _resume, options, options, str(tmp_path / "saved"))


class Rows(SGD):
    """Keeps something that is not of a parameter's shape, as optimizers with factored states do."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and parameter.numel():
                self.state[parameter]["row"] = torch.zeros(1000)
        return loss


class WithRows(Trained):
    def configure_optimizers(self) -> Optimizer:
        return Rows(self.parameters(), lr=0.1, momentum=0.9)


def _save_rows(options: dict[str, Any], folder: str) -> None:
    trainer, _ = _fit(options, WithRows())
    with pytest.raises(ValueError, match=r"state of '[\w.]+' has a part with the shape \(1000,\).* Use fsdp_version=2"):
        trainer.save_checkpoint(folder)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_states_of_another_shape_are_refused(kind: str, tmp_path: Path) -> None:
    options = {"state_dict_type": f"{kind}_state_dict", "use_orig_params": True}
    run_on_ranks(2, _save_rows, options, str(tmp_path / "never"))
    assert not (tmp_path / "never").exists()


def _save_and_gather(options: dict[str, Any], folder: str) -> dict[str, Tensor]:
    trainer, root = _fit(options)
    trainer.save_checkpoint(f"{folder}/sharded")
    strategy = cast("AccelFSDPStrategy", trainer.strategy)
    report = strategy.save_safetensors(f"{folder}/direct")
    assert report.skipped == {"model.blocks.1.told._extra_state": "not a tensor"}
    return {name: one for name, one in _gathered(root).items() if isinstance(one, Tensor)}


@pytest.mark.core("two-flat", "hybrid")
@pytest.mark.parametrize("layout", ["two-flat", "three-orig_params", "hybrid"])
def test_folders_hold_what_torch_gathers(layout: str, tmp_path: Path) -> None:
    world_size, options = LAYOUTS[layout]
    expected = run_on_ranks(world_size, _save_and_gather, options, str(tmp_path))[0]
    merge_fsdp_weights(tmp_path / "sharded", tmp_path / "merged", progress=False, verify=True)
    for folder in ("merged", "direct"):
        found = load_file(tmp_path / folder / "model.safetensors")
        assert "model.blocks.0.conv.weight" in found
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), (folder, name)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("value", [0.1, 7, float("inf"), 2**24 + 1])
def test_tensors_without_dimensions_are_told_exactly(dtype: torch.dtype, value: float) -> None:
    if value == float("inf") and not dtype.is_floating_point:
        value = 1
    tensor = torch.tensor(value, dtype=torch.float64).to(dtype)
    for own in (tensor, nn.Parameter(tensor, requires_grad=False)):
        with torch.device("meta"):  # a user's default
            told = _received(pickle.loads(pickle.dumps(_kind(own, 1))))
        assert (told.dtype, told.shape, told.device.type) == (dtype, (), "cpu")
        assert torch.equal(told, tensor)
    kept = _received(_kind(tensor, 1))
    assert kept.data_ptr() != tensor.data_ptr()
