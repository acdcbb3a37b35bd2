"""``save_trainable_only``: checkpoints without frozen weights, which the module that resumes has to bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from accelight.callbacks import ShardedEMA
from accelight.checkpoint import inspect_checkpoint, load_state_dict, merge_fsdp_weights
from accelight.state import PartialState
from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy, full_state_dict, load_from_checkpoint
from accelight.strategies.common.broadcast import describe
from tests.ranks import run_on_ranks
from tests.strategies.oracle import TinyModel, build_model, dataset, quiet_trainer

UNITS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
TRAINED = ("model.head.weight", "model.head.bias", "model.blocks.1.linear.bias")


@dataclass(frozen=True)
class Run:
    """With a strategy on some ranks."""

    kind: str
    num_ranks: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    def strategy(self) -> Any:
        if self.kind.startswith("zero"):
            config = {"zero_optimization": {"stage": int(self.kind[-1])}}
            return AccelDeepSpeedStrategy(hf_ds_config=config, save_trainable_only=True, **self.options)
        options = {"state_dict_type": "sharded_state_dict", "save_trainable_only": True, **UNITS, **self.options}
        return AccelFSDPStrategy(fsdp_version=int(self.kind[-1]), **options)

    def trainer(self, *callbacks: Callback, max_epochs: int) -> Trainer:
        return quiet_trainer(self.strategy(), self.num_ranks, max_epochs=max_epochs, callbacks=list(callbacks))


class Module(LightningModule):
    """Trains a few weights; ``change`` makes another base, ``emptied`` one without what is trained."""

    seen: Tensor

    def __init__(self, change: float = 0.0, *, emptied: bool = False) -> None:
        super().__init__()
        self.model: TinyModel = build_model()
        self.register_buffer("seen", torch.zeros(2))
        with torch.no_grad():
            self.model.embed.weight[0, 0] += change
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(name in TRAINED)
                if emptied and name in TRAINED:
                    parameter.zero_()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.seen += 1
        return functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1, momentum=0.9)


def loader(num_ranks: int) -> DataLoader[tuple[Tensor, ...]]:
    data = dataset(6)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_ranks, PartialState().process_index, shuffle=False)
    return DataLoader(data, 12 // num_ranks, sampler=sampler)


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.cpu().clone() for name, value in full_state_dict(trainer.strategy).items()}


def train(run: Run, path: str | None, epochs: int, ckpt_path: str | None = None) -> dict[str, Tensor]:
    trainer, module = run.trainer(max_epochs=epochs), Module(emptied=ckpt_path is not None)
    trainer.fit(module, loader(run.num_ranks), ckpt_path=ckpt_path)
    if path is not None:
        trainer.save_checkpoint(path)
    return weights_of(trainer)


def num_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return sum(one.stat().st_size for one in files)


RESUMES: dict[str, tuple[Run, Run]] = {
    "fsdp2, to fsdp1": (Run("fsdp2"), Run("fsdp1")),
    "fsdp1, to fsdp2 on one process": (Run("fsdp1"), Run("fsdp2", 1)),
    "in one file": (Run("fsdp2", 2, {"state_dict_type": "full_state_dict"}), Run("fsdp1", 3)),
    "in the background": (Run("fsdp1", 2, {"async_save": True}), Run("fsdp2")),
    "by a process": (Run("fsdp2", 2, {"async_save": "process"}), Run("fsdp2")),
    "zero0": (Run("zero0"), Run("zero0")),
    "zero1": (Run("zero1"), Run("zero1")),
    "zero2": (Run("zero2"), Run("zero2")),
    "zero3": (Run("zero3"), Run("zero3")),
}


@pytest.mark.core("fsdp2, to fsdp1", "in one file", "zero3")
@pytest.mark.parametrize("name", RESUMES)
def test_training_resumes_on_the_base_of_the_module(name: str, tmp_path: Path) -> None:
    run, next_run = RESUMES[name]
    path = str(tmp_path / "saved.ckpt")
    run_on_ranks(run.num_ranks, train, run, path, 1, init_group=False)
    expected = run_on_ranks(run.num_ranks, train, run, None, 2, init_group=False)[0]
    for found in run_on_ranks(next_run.num_ranks, train, next_run, None, 2, path, init_group=False):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # sums in another order


@pytest.mark.core("fsdp2")
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_files_bring_the_base(kind: str, tmp_path: Path) -> None:
    save_file(Module().state_dict(), tmp_path / "base.safetensors")
    run = Run(kind, 2, {"pretrained_weights": str(tmp_path / "base.safetensors")})
    path = str(tmp_path / "saved.ckpt")
    run_on_ranks(2, train, run, path, 1, init_group=False)
    expected = run_on_ranks(2, train, run, None, 2, init_group=False)[0]
    for found in run_on_ranks(2, train, run, None, 2, path, init_group=False):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def resume_on_another_base(run: Run, path: str, change: float) -> str:
    with pytest.raises(RuntimeError, match=r"model\.embed\.weight has other values") as error:
        run.trainer(max_epochs=2).fit(Module(change), loader(run.num_ranks), ckpt_path=path)
    with pytest.raises(RuntimeError, match=r"model\.embed\.weight has other values"):
        run.trainer(max_epochs=1).validate(Validated(change), loader(run.num_ranks), ckpt_path=path, verbose=False)
    return str(error.value)


@pytest.mark.parametrize("kind", ["fsdp2", "zero2"])
def test_a_module_is_made_of_its_base_and_a_checkpoint(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    expected = run_on_ranks(2, train, Run(kind), path, 1, init_group=False)[0]
    found = load_from_checkpoint(Module, path, emptied=True)
    torch.testing.assert_close(dict(found.state_dict()), expected, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"model\.embed\.weight has other values"):
        load_from_checkpoint(Module, path, change=1e-3)


class Validated(Module):
    def validation_step(self, batch: list[Tensor]) -> None:
        self.model(batch[0])


@pytest.mark.core("fsdp2", "zero2")
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "zero1", "zero2", "zero3"])
def test_another_base_is_an_error_on_all_ranks(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    run_on_ranks(2, train, Run(kind), path, 1, init_group=False)
    for message in run_on_ranks(2, resume_on_another_base, Run(kind), path, 1e-3, init_group=False):
        assert "Build the module with the same pretrained weights" in message
    info = inspect_checkpoint(path)
    frozen = {name for name, _ in Module().named_parameters() if name not in TRAINED}
    assert {name for name, why in info.skipped.items() if "save_trainable_only" in why} == frozen
    merge_fsdp_weights(path, tmp_path / "merged")
    assert set(load_file(tmp_path / "merged" / "model.safetensors")) == {*TRAINED, "seen"}


class Wide(Module):
    """Whose frozen part, which has two names, is most of it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(512, 512, bias=False).requires_grad_(False)
        self.twin = torch.nn.Linear(512, 512, bias=False)
        self.twin.weight = self.base.weight
        self.adapter = torch.nn.Linear(512, 128, bias=False)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return super().training_step(batch) + self.adapter(self.twin(self.base(torch.ones(1, 512)))).square().mean()


def save_wide(kind: str, path: str, form: str) -> None:
    strategy = AccelFSDPStrategy(fsdp_version=int(kind[-1]), save_trainable_only=True, state_dict_type=form)
    trainer = quiet_trainer(strategy, 2, max_epochs=1)
    trainer.fit(Wide(), loader(2))
    trainer.save_checkpoint(path, weights_only=True)
    trainer.strategy.save_safetensors(f"{path}.safetensors")  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", ["sharded_state_dict", "full_state_dict"])
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_what_is_frozen_takes_no_room(kind: str, form: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    run_on_ranks(2, save_wide, kind, str(path), form, init_group=False)
    trained = sum(one.numel() * 4 for one in Wide().parameters() if one.requires_grad)
    assert num_bytes(path) <= 1.1 * trained
    assert num_bytes(Path(f"{path}.safetensors")) <= 1.1 * trained
    if form == "sharded_state_dict":
        assert set(load_state_dict(path)) == set(load_file(f"{path}.safetensors"))


class ChangeFrozen(Callback):
    """What a user's teacher does: a frozen weight that follows."""

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        with torch.no_grad():
            pl_module.model.embed.weight.mul_(0.5)


def save_changed(kind: str, path: str) -> dict[str, Tensor]:
    run = Run(kind)
    trainer = run.trainer(ChangeFrozen(), max_epochs=1)
    trainer.fit(Module(), loader(2))
    trainer.save_checkpoint(path)
    expected = weights_of(trainer)
    again = run.trainer(max_epochs=1)
    again.fit(Module(emptied=True), loader(2), ckpt_path=path)  # nothing is left to train
    torch.testing.assert_close(weights_of(again), expected, rtol=0, atol=0)
    return expected


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_a_frozen_weight_that_changed_is_saved(kind: str, tmp_path: Path) -> None:
    run_on_ranks(2, save_changed, kind, str(tmp_path / "saved.ckpt"), init_group=False)
    assert not inspect_checkpoint(tmp_path / "saved.ckpt").skipped.get("model.embed.weight")


@pytest.mark.parametrize("kind", ["zero1", "zero3"])
def test_deepspeed_refuses_to_lose_a_frozen_weight_that_changed(kind: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"would lose model\.embed\.weight"):
        run_on_ranks(2, save_changed, kind, str(tmp_path / "saved.ckpt"), init_group=False)


def train_averaged(run: Run, path: str) -> None:
    trainer = run.trainer(ShardedEMA(0.5), max_epochs=1)
    trainer.fit(Module(), loader(2))
    trainer.save_checkpoint(path)
    run.trainer(ShardedEMA(0.5), max_epochs=2).fit(Module(emptied=True), loader(2), ckpt_path=path)


@pytest.mark.parametrize("kind", ["fsdp2", "zero2"])
def test_averages_are_of_what_trains_alone(kind: str, tmp_path: Path) -> None:
    run_on_ranks(2, train_averaged, Run(kind), str(tmp_path / "saved.ckpt"), init_group=False)
    merge_fsdp_weights(tmp_path / "saved.ckpt", tmp_path / "merged", weights="ema")
    assert set(load_file(tmp_path / "merged" / "model.safetensors")) == {*TRAINED, "seen"}


def digests(make: Callable[[], Tensor], cuts: int) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    full = make()
    mesh = init_device_mesh("cpu", (2,))
    tensors = {"whole": full, **{f"{dim}": distribute_tensor(full, mesh, [Shard(dim)]) for dim in range(cuts)}}
    return list(describe(tensors, torch.device("cpu")).values())


def odd() -> Tensor:
    return torch.arange(5 * 7 * 3, dtype=torch.float32).reshape(5, 7, 3).sin()


def half() -> Tensor:
    return odd().to(torch.bfloat16)


def integers() -> Tensor:
    return torch.arange(15, dtype=torch.uint8).reshape(5, 3)


@pytest.mark.parametrize(("make", "dims"), [(odd, 3), (half, 2), (integers, 2)])
def test_a_digest_is_the_same_for_every_sharding(make: Callable[[], Tensor], dims: int) -> None:
    found = run_on_ranks(2, digests, make, dims)
    alone = next(iter(describe({"": make()}, torch.device("cpu")).values()))
    assert found == [[alone] * (dims + 1)] * 2
    swapped = make().flatten()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert describe({"": swapped.reshape(make().shape)}, torch.device("cpu"))[""][2] != alone[2]
