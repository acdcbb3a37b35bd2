"""Tensor parallelism under FSDP2: four processes, two of which share the layers of each copy, train as one does."""

from __future__ import annotations

import subprocess
import sys
from collections import UserDict
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import TorchTensorParallelPlugin
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, DistributedSampler, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from accelight.checkpoint import load_state_dict, merge_fsdp_weights, verify_merged
from accelight.state import AcceleratorState, GradientAccumulationPlugin
from accelight.strategies import AccelFSDPStrategy, ParallelismConfig, full_state_dict
from accelight.strategies.parallelism.config import as_parallelism
from accelight.strategies.parallelism.tensor import is_cut
from accelight.strategies.sharded_tensors.user_code import library_code
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.cut_model import BATCH, BATCHES, Block, Counting, Module, Rows, loader, plain
from tests.strategies.oracle import quiet_trainer

PLAN = {"net.blocks.*.up": "colwise", "net.blocks.*.down": "rowwise", "net.head": "colwise_rep"}


def _strategy(tp: int, replicate: int = 1, fsdp_version: int = 2, **options: Any) -> Any:
    config = ParallelismConfig(tp_size=tp, dp_replicate_size=replicate)
    plan = PLAN if tp > 1 else None
    return AccelFSDPStrategy(
        fsdp_version=fsdp_version, auto_wrap_policy={Block}, parallelism_config=config, tp_plan=plan, **options
    )


def train(arguments: dict[str, Any]) -> dict[str, Any]:
    return _train(**arguments)


def _train(
    tp: int = 1,
    replicate: int = 1,
    epochs: int = 1,
    save_to: str = "",
    resume_from: str | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    strategy = _strategy(tp, replicate, **options)
    world_size = dist.get_world_size()
    trainer = quiet_trainer(
        strategy, world_size, max_epochs=epochs, accumulate_grad_batches=accumulate, gradient_clip_val=clip
    )
    module = Module()
    trainer.fit(module, loader(world_size // tp), ckpt_path=resume_from)
    if save_to:
        trainer.save_checkpoint(save_to)
    weights = {name: one.clone() for name, one in full_state_dict(strategy, module).items()}
    return {"weights": weights, "norms": module.norms, "step": trainer.global_step}


def _on(num_ranks: int, **arguments: Any) -> list[dict[str, Any]]:
    return run_on_ranks(num_ranks, train, arguments, timeout_s=100)


def _assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["step"] == expected["step"]
    torch.testing.assert_close(found["weights"], dict(expected["weights"]), rtol=1e-5, atol=1e-6)  # sums in other order
    torch.testing.assert_close(torch.tensor(found["norms"]), torch.tensor(expected["norms"]), rtol=1e-4, atol=1e-6)


CELLS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 x shard2": (4, {"tp": 2}),
    "tp4": (4, {"tp": 4}),
    "tp2": (2, {"tp": 2}),
    "accumulated and clipped": (4, {"tp": 2, "accumulate": 2, "clip": 0.05}),
}


@pytest.mark.core("clipped")
@pytest.mark.parametrize("name", CELLS)
def test_it_trains_as_one_process(name: str) -> None:
    num_ranks, arguments = CELLS[name]
    expected = plain(**{key: value for key, value in arguments.items() if key in ("accumulate", "clip")})
    for found in _on(num_ranks, **arguments):
        _assert_same(found, expected)


@pytest.mark.exhaustive
def test_copies_of_a_cut_model() -> None:
    """HSDP over tensor parallelism: eight processes."""
    for found in _on(8, tp=2, replicate=2):
        _assert_same(found, plain())


class _Unwatched(Module):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at no norms, which are reduced."""


def counted() -> tuple[dict[str, int], str]:
    counting = Counting()
    trainer = quiet_trainer(_strategy(2), 2, max_epochs=1, callbacks=[counting])
    trainer.fit(_Unwatched(), loader(1))
    table = trainer.strategy.engine.tensor_parallel.table()  # type: ignore[attr-defined]
    return counting.counts, "\n".join(table)


def test_collectives_of_a_step_and_the_table() -> None:
    for found, table in run_on_ranks(2, counted):
        # Each block once forward and once backward; the head's outputs are gathered, and the gradient of its inputs.
        assert (found["all_reduce"], found["all_gather_into_tensor"]) == (2 * 2 + 1, 1)
        assert (
            table == "net.blocks.*.up    colwise  2 x\nnet.blocks.*.down  rowwise  2 x\nnet.head           colwise  1 x"
        )


RESUMES: dict[str, tuple[dict[str, Any], tuple[int, dict[str, Any]]]] = {
    "the same": ({"tp": 2}, (4, {"tp": 2})),
    "tp4": ({"tp": 2}, (4, {"tp": 4})),
    "shard4": ({"tp": 2}, (4, {})),
    "one process": ({"tp": 2}, (1, {})),
    "from shard4": ({}, (4, {"tp": 2})),
    "fsdp1": ({"tp": 2}, (4, {"fsdp_version": 1})),
    "one file": ({"tp": 2, "state_dict_type": "full_state_dict"}, (4, {"tp": 2})),
    "in the background": ({"tp": 2, "async_save": True}, (2, {"tp": 2})),
}


@pytest.mark.core("one process")
@pytest.mark.parametrize("name", RESUMES)
def test_checkpoints_go_from_mesh_to_mesh(name: str, tmp_path: Path) -> None:
    saves, (num_ranks, resumes) = RESUMES[name]
    path, expected = str(tmp_path / "saved.ckpt"), plain(2)
    weights = _on(4, save_to=path, **saves)[0]["weights"]
    found = _on(num_ranks, epochs=2, resume_from=path, **resumes)[0]
    found["norms"] = expected["norms"][:BATCHES] + found["norms"]
    _assert_same(found, expected)
    if name != "one file":
        merge_fsdp_weights(path, tmp_path / "merged")
        assert verify_merged(path, tmp_path / "merged").is_equal
        assert all(torch.equal(one, weights[name]) for name, one in load_state_dict(path).items())


def with_dropout() -> tuple[list[float], bool]:
    strategy = _strategy(2)
    torch.manual_seed(dist.get_rank())  # as processes that nobody has seeded
    trainer, module = quiet_trainer(strategy, dist.get_world_size(), max_epochs=1), Module(0.5)
    trainer.fit(module, loader(dist.get_world_size() // 2))
    return module.losses, all(
        bool((one == others[0]).all())
        for others in map(_of_all, (one for one in module.parameters() if not is_cut(one)))
        for one in others[dist.get_rank() % 2 : 2]
    )


def _of_all(parameter: Any) -> list[Tensor]:
    own = parameter.to_local().detach()
    group = dist.new_subgroups_by_enumeration([[0, 1]])[0]
    found = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(found, own, group=group)
    return found


@pytest.mark.exhaustive
def test_dropout_is_the_same_in_a_group() -> None:
    (losses, are_equal), (others, _) = run_on_ranks(2, with_dropout)
    assert losses == others
    assert are_equal


def train_with_dropout(tp: int, epochs: int, save_to: str, resume_from: str | None) -> list[float]:
    module, size = Module(0.5), dist.get_world_size()
    trainer = quiet_trainer(_strategy(tp), size, max_epochs=epochs)
    torch.manual_seed(dist.get_rank() // tp)
    trainer.fit(module, loader(size // tp), ckpt_path=resume_from)
    trainer.save_checkpoint(save_to)
    return module.losses


RANDOM_RESUMES = {
    "the same": ((4, 2), (4, 2), True),
    "fewer processes": ((4, 2), (2, 1), True),
    "more processes": ((2, 1), (4, 2), True),
    "more groups": ((4, 2), (4, 1), False),
    "fewer groups": ((4, 1), (4, 2), False),
}


@pytest.mark.core("fewer groups")
@pytest.mark.parametrize("name", RANDOM_RESUMES)
def test_random_states_are_those_of_groups(name: str, tmp_path: Path) -> None:
    (size, tp), (size_after, tp_after), are_restored = RANDOM_RESUMES[name]
    first, second = str(tmp_path / "first.ckpt"), str(tmp_path / "second.ckpt")
    run_on_ranks(size, train_with_dropout, tp, 1, first, None)
    found = run_on_ranks(size_after, train_with_dropout, tp_after, 2, second, first)
    expected = run_on_ranks(2, train_with_dropout, 1, 2, second, None) if are_restored else []
    for rank, losses in enumerate(found):
        assert losses == found[rank // tp_after * tp_after]
        assert not are_restored or losses == pytest.approx(expected[rank // tp_after][BATCHES:], rel=1e-4)


class _Noisy(Rows):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + torch.rand(5), self.y[index]


def train_noisy(tp: int) -> dict[str, Tensor]:
    seed_everything(3, workers=True)
    strategy, module = _strategy(tp), Module()
    num_replicas = dist.get_world_size() // tp
    noisy = DataLoader(_Noisy(), batch_size=BATCH // num_replicas, num_workers=1)
    quiet_trainer(strategy, dist.get_world_size(), max_epochs=1).fit(module, noisy)
    return {name: one.clone() for name, one in full_state_dict(strategy, module).items()}


@pytest.mark.exhaustive
def test_workers_of_loaders_are_seeded_by_groups() -> None:
    expected = run_on_ranks(2, train_noisy, 1)[0]
    for found in run_on_ranks(4, train_noisy, 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class _TakesDicts(Module):
    """Its batches are like those of Hugging Face's tokenizers; it does not ask for their index."""

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return super().training_step([batch["x"], batch["y"]], 0)

    def validation_step(self, batch: Any) -> None:  # type: ignore[override]
        super().validation_step([batch["x"], batch["y"]], 0)


def _dict_of(rows: list[Any]) -> UserDict[str, Tensor]:
    return UserDict(zip("xy", default_collate(rows), strict=True))


def other_batches(call: str, dicts: bool) -> str:
    trainer = quiet_trainer(_strategy(2), 2, max_epochs=1, use_distributed_sampler=False)
    rows = Rows()
    rows.x += dist.get_rank()
    module, collate = (_TakesDicts(), _dict_of) if dicts else (Module(), None)
    with pytest.raises(RuntimeError) as error:
        getattr(trainer, call)(module, DataLoader(rows, batch_size=BATCH, collate_fn=collate))
    return f"{error.value}"


@pytest.mark.core("fit-False", "validate-True")
@pytest.mark.parametrize("dicts", [False, True])
@pytest.mark.parametrize("call", ["fit", "validate"])
def test_other_batches_in_a_group_are_an_error(call: str, dicts: bool) -> None:
    for message in run_on_ranks(2, other_batches, call, dicts):
        assert "The processes 0, 1 share one copy of the model (sp_size=1, tp_size=2), and got different" in message


class _Tied(Module):
    def __init__(self) -> None:
        super().__init__()
        blocks: Any = self.net.blocks
        blocks[0].up.weight = blocks[1].up.weight


def refused(plan: Any, kind: str) -> str:
    config = ParallelismConfig(tp_size=2)
    strategy = AccelFSDPStrategy(fsdp_version=2, parallelism_config=config, tp_plan=plan)
    module = _Tied() if kind == "tied" else Module()
    with pytest.raises(ValueError, match=r"tp_|tp ") as error:
        quiet_trainer(strategy, 2, max_epochs=1).fit(module, loader(1))
    return f"{error.value}"


@pytest.mark.parametrize(
    ("plan", "kind", "words"),
    [
        (None, "", "tp_size > 1 needs a plan"),
        ({"net.none": "colwise"}, "", "'net.none' matches no module. The model has net, net.embed"),
        ({"net.head": "columns"}, "", "'columns' for 'net.head' is no style. Allowed: colwise, rowwise"),
        ({"net.embed": "colwise", "net.e*": "rowwise"}, "", "net.embed is matched by several patterns"),
        ({"net.embed": "rowwise"}, "", "tp_plan: net.embed with in_features=5 cannot be divided by tp_size=2"),
        (PLAN, "tied", "tp_plan cuts net.blocks.0.up.weight, which is tied to net.blocks.1.up.weight"),
    ],
)
def test_what_does_not_fit_is_an_error(plan: Any, kind: str, words: str) -> None:
    for message in run_on_ranks(2, refused, plan, kind):
        assert words in message


def test_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    config = ParallelismConfig()
    assert (config.tp_size, config.dp_replicate_size, config.dp_shard_size) == (2, 1, None)
    found = config.for_processes(8)
    assert (found.dp_shard_size, found.data_parallel_size, found.total_size) == (4, 4, 8)
    with pytest.raises(ValueError, match=r"tp_size=2, which is not the number of processes, 3\. Change one"):
        config.for_processes(3)
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "two")
    with pytest.raises(ValueError, match="PARALLELISM_CONFIG_TP_SIZE='two' must be a number of processes"):
        ParallelismConfig()
    monkeypatch.delenv("PARALLELISM_CONFIG_TP_SIZE")
    with pytest.raises(ValueError, match=r"cp_size=2 and sp_size=3 both divide sequences\. Set one"):
        ParallelismConfig(cp_size=2, sp_size=3)
    theirs = accelerate.parallelism_config.ParallelismConfig(tp_size=2, dp_shard_size=2)
    assert as_parallelism(theirs) == ParallelismConfig(1, 2, 2, 1, 1)
    assert as_parallelism(TorchTensorParallelPlugin(tp_size=4)).tp_size == 4
    AccelFSDPStrategy(fsdp_version=2, parallelism_config=TorchTensorParallelPlugin(tp_size=2))
    launched = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}
    with monkeypatch.context() as launcher:
        for name, value in launched.items():
            launcher.setenv(name, value)
        assert AccelFSDPStrategy(fsdp_version=2).non_data_parallel_size == 2
        with pytest.raises(ValueError, match="tp_size=2 needs fsdp_version=2"):
            AccelFSDPStrategy(fsdp_version=1)
    with pytest.raises(TypeError, match="must be a ParallelismConfig, got dict"):
        AccelFSDPStrategy(fsdp_version=2, parallelism_config={"tp_size": 2})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dp_shard_size must be at least 1, got 0"):
        ParallelismConfig(dp_shard_size=0)
    with pytest.raises(ValueError, match="tp_size=2 needs fsdp_version=2"):
        AccelFSDPStrategy(fsdp_version=1, parallelism_config=ParallelismConfig(tp_size=2))
    with pytest.raises(ValueError, match="sp_size=2 needs fsdp_version=2"):
        AccelFSDPStrategy(fsdp_version=1, parallelism_config=ParallelismConfig(sp_size=2))
    with pytest.raises(ValueError, match="sequence_modules needs parallelism_config"):
        AccelFSDPStrategy(fsdp_version=2, parallelism_config=ParallelismConfig(tp_size=2), sequence_modules=["net"])
    with pytest.raises(ValueError, match="device_mesh and parallelism_config were both given"):
        AccelFSDPStrategy(fsdp_version=2, parallelism_config=ParallelismConfig(), device_mesh=(1, 2))
    with pytest.raises(ValueError, match=r"tp_plan needs parallelism_config=.*, greater than 1"):
        AccelFSDPStrategy(fsdp_version=2, parallelism_config=ParallelismConfig(), tp_plan=PLAN)
    with pytest.raises(ValueError, match="tp_plan needs parallelism_config"):
        AccelFSDPStrategy(fsdp_version=2, tp_plan=PLAN)


class Llama(LightningModule):
    """Cut as transformers says."""

    def __init__(self, heads: int = 4, key_value_heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(4)
        config = LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=heads,
            num_key_value_heads=key_value_heads, max_position_embeddings=16, tie_word_embeddings=False,
        )  # fmt: skip
        self.model: Any = LlamaForCausalLM(config)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _tokens() -> Any:
    return torch.utils.data.TensorDataset(torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(6)))


def train_llama(tp: int, heads: tuple[int, int] = (4, 2)) -> dict[str, Tensor]:
    strategy = AccelFSDPStrategy(
        fsdp_version=2, parallelism_config=ParallelismConfig(tp_size=tp), auto_wrap_policy="transformer_based_wrap",
        activation_checkpointing=True,
    )  # fmt: skip
    module, size = Llama(*heads), dist.get_world_size()
    trainer = quiet_trainer(strategy, size, max_epochs=2)
    trainer.fit(module, DataLoader(_tokens(), batch_size=8 // (size // tp)))
    return {name: one.clone() for name, one in full_state_dict(strategy, module).items()}


@pytest.mark.exhaustive
def test_a_model_of_transformers_brings_its_plan() -> None:
    module = Llama()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    order: Any = DistributedSampler(_tokens(), num_replicas=1, rank=0)
    trainer.fit(module, DataLoader(_tokens(), batch_size=8, sampler=order))
    for found in run_on_ranks(4, train_llama, 2):
        torch.testing.assert_close(found, dict(module.state_dict()), rtol=1e-5, atol=1e-6)


def too_few_heads() -> str:
    with pytest.raises(ValueError, match="num_key_value_heads") as error:
        train_llama(2, (4, 1))
    return f"{error.value}"


@pytest.mark.exhaustive
def test_heads_that_do_not_divide_are_an_error() -> None:
    for message in run_on_ranks(2, too_few_heads):
        assert "LlamaForCausalLM has num_key_value_heads=1, which tp_size=2 does not divide" in message


def begin_and_save(folder: str) -> dict[str, Tensor]:
    strategy = _strategy(2, pretrained_weights=f"{folder}/given")
    module = Module()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    quiet_trainer(strategy, dist.get_world_size(), max_steps=1, limit_train_batches=0).fit(module, loader(2))
    weights = {name: one.clone() for name, one in full_state_dict(strategy, module).items()}
    strategy.save_safetensors(f"{folder}/saved")
    return weights


@pytest.mark.exhaustive
def test_first_weights_and_saved_weights_are_safetensors(tmp_path: Path) -> None:
    given = {name: torch.randn_like(one) for name, one in Module().state_dict().items()}
    (tmp_path / "given").mkdir()
    save_file(given, tmp_path / "given" / "model.safetensors")
    for found in run_on_ranks(4, begin_and_save, str(tmp_path)):
        assert all(torch.equal(found[name], one) for name, one in given.items())
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == given.keys()
    assert all(torch.equal(saved[name], one) for name, one in given.items())


class _ByItems(Module):
    """Counts more items in some micro-batches than in others."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "num_items": 1 + batch_idx % 3}


def by_items(tp: int) -> dict[str, Tensor]:
    accumulation = GradientAccumulationPlugin(num_steps=3, average_over="items")
    strategy, module = _strategy(tp, gradient_accumulation=accumulation), _ByItems()
    quiet_trainer(strategy, dist.get_world_size(), max_epochs=1).fit(module, loader(dist.get_world_size() // tp))
    return {name: one.clone() for name, one in full_state_dict(strategy, module).items()}


@pytest.mark.exhaustive
def test_items_are_counted_once() -> None:
    expected = run_on_ranks(1, by_items, 1)[0]
    for found in run_on_ranks(2, by_items, 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class _Saves(Callback):
    def __init__(self, path: str) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self._path)


def save_in_the_midst(folder: str) -> list[int]:
    trainer = quiet_trainer(_strategy(2), 4, max_epochs=1, callbacks=[_Saves(f"{folder}/saved.ckpt")])
    trainer.fit(Module(), StatefulDataLoader(Rows(), batch_size=BATCH // 2))
    other = quiet_trainer(_strategy(1), 4, max_epochs=1)
    with pytest.raises(ValueError, match="holds the positions of the training loaders of 2 processes; 4 resume"):
        other.fit(Module(), StatefulDataLoader(Rows(), batch_size=BATCH // 4), ckpt_path=f"{folder}/saved.ckpt")
    again = quiet_trainer(_strategy(2), 4, max_epochs=1)
    module = Module()
    again.fit(module, StatefulDataLoader(Rows(), batch_size=BATCH // 2), ckpt_path=f"{folder}/saved.ckpt")
    return [again.global_step, len(module.losses)]


@pytest.mark.exhaustive
def test_places_of_loaders_are_those_of_groups(tmp_path: Path) -> None:
    for found in run_on_ranks(4, save_in_the_midst, str(tmp_path)):
        assert found == [BATCHES, BATCHES - 2]


@pytest.mark.exhaustive
def test_the_state_tells_of_it() -> None:
    assert run_on_ranks(2, state_of) == [(2, 1, {"num_replicas": 1, "rank": 0})] * 2


def state_of() -> tuple[int, int, dict[str, int]]:
    strategy = _strategy(2)
    quiet_trainer(strategy, 2, max_epochs=1).fit(Module(), loader(1))
    config = AcceleratorState().parallelism_config
    return config.tp_size, config.dp_shard_size, strategy.distributed_sampler_kwargs


class _Overflows(Module):
    """Its second step has a gradient that is infinite on one process alone."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing: norms are not compared."""

    def on_after_backward(self) -> None:
        self.num_backwards = getattr(self, "num_backwards", 0) + 1
        if self.num_backwards == 2 and dist.get_rank() == 1:
            blocks: Any = self.net.blocks
            with library_code():  # a fault of one process, and no users' code
                blocks[0].up.weight.grad.to_local().view(-1)[0] = torch.inf


def overflow() -> tuple[list[bool], dict[str, Tensor]]:
    strategy, module = _strategy(2), _Overflows()
    skipped: list[bool] = []
    noting = LambdaCallback(on_train_batch_end=lambda *_: skipped.append(strategy.step_was_skipped))
    quiet_trainer(strategy, 2, max_epochs=1, precision="16-mixed", callbacks=[noting]).fit(module, loader(1))
    return skipped, {name: one.clone() for name, one in full_state_dict(strategy, module).items()}


def test_all_ranks_skip_a_step_whose_gradients_overflow_on_one() -> None:
    (skipped, weights), (of_other, others) = run_on_ranks(2, overflow)
    assert skipped == of_other == [False, True, False, False, False, False]
    assert all(torch.equal(others[name], one) for name, one in weights.items())


def train_frozen(tp: int, save_to: str, resume_from: str | None) -> dict[str, Tensor]:
    strategy, module = _strategy(tp, save_trainable_only=True), Module()
    for part in (module.net.embed, module.net.blocks[0]):
        part.requires_grad_(False)
    trainer = quiet_trainer(strategy, 4, max_epochs=2 if resume_from else 1)
    trainer.fit(module, loader(4 // tp), ckpt_path=resume_from)
    trainer.save_checkpoint(save_to)
    return {name: one.clone() for name, one in full_state_dict(strategy, module).items()}


@pytest.mark.exhaustive
def test_checkpoints_of_what_trains_go_from_mesh_to_mesh(tmp_path: Path) -> None:
    first = str(tmp_path / "first.ckpt")
    run_on_ranks(4, train_frozen, 2, first, None)
    expected = run_on_ranks(4, train_frozen, 2, str(tmp_path / "second.ckpt"), first)[0]
    for found in run_on_ranks(4, train_frozen, 1, str(tmp_path / "third.ckpt"), first):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class _Sequences(Module):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        steps = torch.arange(1, 5).view(1, 4, 1) / 4
        return super().training_step(
            [batch[0].unsqueeze(1) * steps, batch[1].unsqueeze(1).expand(-1, 4, -1)], batch_idx
        )


def train_sequences(tp: int) -> dict[str, Any]:
    cut: dict[str, Any] = {
        "net.embed": ColwiseParallel(output_layouts=Shard(1)),
        "net.blocks.*.norm": "sequence_parallel",
        "net.blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "net.blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "net.head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    strategy = AccelFSDPStrategy(
        fsdp_version=2, auto_wrap_policy={Block}, parallelism_config=ParallelismConfig(tp_size=tp),
        tp_plan=cut if tp > 1 else None,
    )  # fmt: skip
    module, size = _Sequences(), dist.get_world_size()
    trainer = quiet_trainer(strategy, size, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.3)
    trainer.fit(module, loader(size // tp))
    return {
        "weights": {name: one.clone() for name, one in full_state_dict(strategy, module).items()},
        "norms": module.norms,
        "step": trainer.global_step,
    }


@pytest.mark.exhaustive
def test_activations_are_cut_along_the_sequence() -> None:
    expected = run_on_ranks(1, train_sequences, 1)[0]
    for found in run_on_ranks(4, train_sequences, 2):
        _assert_same(found, expected)


@pytest.mark.exhaustive
def test_the_example_has_the_same_losses_without() -> None:
    example = Path(__file__).parents[3] / "examples" / "tensor_parallel.py"
    printed = []
    for size in ("1", "2"):
        done = subprocess.run(
            [sys.executable, str(example), "--tp-size", size], capture_output=True, text=True, check=True
        )
        printed.append([line for line in done.stdout.splitlines() if line.startswith("epoch")])
    assert printed[0] == printed[1]
    assert len(printed[0]) == 3
    assert "nan" not in printed[0][-1]


class _NormOfHeads(nn.Module):
    """Its weight sees the heads of one process alone, and gets a part of its gradient there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.unflatten(-1, (-1, 3))).flatten(-2)


class _WithHeads(Module):
    def __init__(self) -> None:
        super().__init__()
        blocks: Any = self.net.blocks
        blocks[0].up = nn.Sequential(blocks[0].up, _NormOfHeads())


def partial_gradients(hidden: bool) -> str:
    plan = {"net.blocks.0.up.0": "colwise", "net.blocks.0.down": "rowwise"}
    strategy = AccelFSDPStrategy(fsdp_version=2, parallelism_config=ParallelismConfig(tp_size=2), tp_plan=plan)
    module = _WithHeads()
    if hidden:  # in the first step, in which no gradient comes through zeros
        nn.init.zeros_(module.net.get_parameter("blocks.0.down.weight"))
    with pytest.raises(RuntimeError) as error:
        quiet_trainer(strategy, 2, max_epochs=1).fit(module, loader(1))
    return f"{error.value}"


@pytest.mark.parametrize("hidden", [False, True])
def test_gradients_of_a_part_of_the_activations_are_an_error(hidden: bool) -> None:
    for message in run_on_ranks(2, partial_gradients, hidden):
        assert "The gradient of net.blocks.0.up.1.norm." in message
        assert "which tp_plan does not cut, differs between the processes that share layers" in message


class _Qwen(Llama):
    def __init__(self) -> None:
        super().__init__()
        config = Qwen3Config(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=4, tie_word_embeddings=False,
        )  # fmt: skip
        self.model = Qwen3ForCausalLM(config)


def unknown_style() -> str:
    strategy = AccelFSDPStrategy(fsdp_version=2, parallelism_config=ParallelismConfig(tp_size=2))
    with pytest.raises(ValueError, match="is no style") as error:
        quiet_trainer(strategy, 2, max_epochs=1).fit(_Qwen(), DataLoader(_tokens(), batch_size=8))
    return f"{error.value}"


def test_styles_that_only_transformers_has_are_an_error() -> None:
    """They were passed over, and the norms of the heads got gradients of their own on each process."""
    found = "'replicated_with_grad_allreduce' for 'model.layers.*.self_attn.q_norm'"
    for message in run_on_ranks(2, unknown_style):
        assert f"Qwen3ForCausalLM's own plan: {found}" in message
        assert "Give a plan of these: AccelFSDPStrategy(tp_plan={...})." in message
