"""First values that come from rank 0 or from files: the model trains as the one that one process would have built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from accelight.state import PartialState
from accelight.strategies import AccelFSDPStrategy
from accelight.strategies.fsdp import fsdp1
from tests.ranks import run_on_ranks
from tests.strategies.oracle import (
    WIDTH,
    Block,
    Case,
    Outcome,
    TinyModule,
    build_model,
    dataset,
    quiet_trainer,
    rank_loader,
    train_plain,
)

Engine = Literal["fsdp1", "fsdp1_orig", "fsdp2"]
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp1": {"fsdp_version": 1, "use_orig_params": False},
    "fsdp1_orig": {"fsdp_version": 1, "use_orig_params": True},
    "fsdp2": {"fsdp_version": 2},
}
WRAP = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
STEPS = 3


class Everything(nn.Module):
    """Ties, a persistent and a non-persistent buffer, a module to ignore, and a parameter that no module made."""

    table: Tensor
    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(5, WIDTH, bias=False), nn.Sequential(Block(), Block())
        self.left_out = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(5, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(1))
        self.register_buffer("table", torch.linspace(1, 2, 3), persistent=False)
        self.register_buffer("running", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.left_out(self.blocks(self.embed(x))) * self.running
        return functional.linear(hidden, self.head.weight.T)[:, :3] * self.table * self.scale


def build(seed: int) -> Everything:
    torch.manual_seed(seed)
    return Everything()


class Module(LightningModule):
    """Builds its model in `configure_model`, or takes one; each rank would make other weights."""

    def __init__(self, make: Callable[[], nn.Module], model: nn.Module | None = None) -> None:
        super().__init__()
        self.make, self.model = make, model
        self.had_values: set[bool] = set()

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.make()
            self.had_values = {not parameter.is_meta for parameter in self.model.parameters()}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        return functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def plain_weights(model: nn.Module, world_size: int) -> dict[str, Tensor]:
    """Weights after the same steps in one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = (part.split(2 * world_size) for part in dataset(world_size).tensors)
    for step in range(STEPS):
        optimizer.zero_grad()
        functional.mse_loss(model(inputs[step]), targets[step]).backward()
        optimizer.step()
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def _fit(module: Module, **options: Any) -> tuple[dict[str, Tensor], set[bool]]:
    world_size = dist.get_world_size()
    strategy = AccelFSDPStrategy(state_dict_type="full_state_dict", **options)
    trainer = quiet_trainer(strategy, world_size, max_steps=STEPS)
    trainer.fit(module, rank_loader(world_size))
    weights = strategy.lightning_module_state_dict()
    return {name: tensor.clone() for name, tensor in weights.items()}, module.had_values


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To fp32 sums in another order, as in `oracle.assert_same`."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=f"{name}: {found[name]} {tensor}")


def _fit_from_rank_zero(options: dict[str, Any], where: str) -> tuple[dict[str, Tensor], set[bool]]:
    rank = dist.get_rank()
    if where == "init":
        return _fit(Module(lambda: build(rank), build(rank)), **options)
    if where == "init_module":
        trainer = quiet_trainer(AccelFSDPStrategy(**options), dist.get_world_size(), max_steps=1)
        with trainer.init_module():
            model = build(rank)
        module = Module(lambda: model, model)
        module.had_values = {not parameter.is_meta for parameter in model.parameters()}
        weights, _ = _fit(module, **options)
        return weights, module.had_values
    return _fit(Module(lambda: build(rank)), **options)


@pytest.mark.core("2-configure_model", "3-configure_model-options1-fsdp2", "2-init_module-options2-fsdp2")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("world_size", "where", "options"),
    [
        (2, "configure_model", {"cpu_ram_efficient_loading": True}),
        (3, "configure_model", {"cpu_ram_efficient_loading": True, "ignored_modules": r"model\.left_out"}),
        (2, "init_module", {"cpu_ram_efficient_loading": True, "activation_checkpointing": True}),
        (2, "init", {"cpu_ram_efficient_loading": True, "cpu_offload": True}),
    ],
)
def test_rank_zeros_weights_are_everybodys(engine: str, world_size: int, where: str, options: dict[str, Any]) -> None:
    """huggingface/accelerate#3930, verl-project/verl#7834: parameters, both kinds of buffers, and ties."""
    expected = plain_weights(build(0), world_size)
    outcomes = run_on_ranks(world_size, _fit_from_rank_zero, {**ENGINES[engine], **WRAP, **options}, where)
    assert_same(outcomes[0][0], expected)
    if where != "init":
        assert [outcome[1] for outcome in outcomes] == [{True}] + [{False}] * (world_size - 1)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp1_orig"])
def test_sync_module_states_gives_rank_zeros_weights(engine: str) -> None:
    options = {**ENGINES[engine], **WRAP, "sync_module_states": True}
    assert_same(run_on_ranks(2, _fit_from_rank_zero, options, "init")[0][0], plain_weights(build(0), 2))


def _fit_from_files(options: dict[str, Any], path: str) -> tuple[dict[str, Tensor], set[bool]]:
    return _fit(Module(lambda: build(1 + dist.get_rank())), pretrained_weights=path, **options)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("names", ["inner", "outer"])
def test_every_rank_reads_its_slices(engine: str, names: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    module = Module(lambda: build(0), build(0))
    save_model(module.model if names == "inner" and module.model else module, str(path))
    options = {**ENGINES[engine], **WRAP}
    outcomes = run_on_ranks(2, _fit_from_files, options, str(path if names == "inner" else tmp_path))
    assert_same(outcomes[0][0], plain_weights(build(0), 2))
    assert [outcome[1] for outcome in outcomes] == [{False}, {False}]


def _refused(kind: str, path: str) -> str:
    module = Module(lambda: build(0))
    options: dict[str, Any] = {"fsdp_version": 2}
    if kind == "metric":
        options["cpu_ram_efficient_loading"] = True
        module.make = lambda: nn.ModuleDict({"net": build(0), "metric": _meta_metric()})
    else:
        options["pretrained_weights"] = path
    with pytest.raises(RuntimeError) as caught:
        _fit(module, **options)
    return str(caught.value)


def _meta_metric() -> MeanMetric:
    return MeanMetric() if PartialState().is_main_process else MeanMetric().to("meta")


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("metric", r"process 1: the metrics \['model.metric'\] are on the meta device: create them in __init__"),
        ("missing", r"missing in the file: model.blocks.0.linear.weight"),
        ("no_file", r"no such file"),
    ],
)
def test_what_cannot_be_filled_is_refused_everywhere(kind: str, match: str, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in build(0).state_dict().items() if name != "head.weight"}
    del state["blocks.0.linear.weight"]
    save_file(state, tmp_path / "missing.safetensors")
    for message in run_on_ranks(2, _refused, kind, str(tmp_path / f"{kind}.safetensors")):
        with pytest.raises(RuntimeError, match=match):
            raise RuntimeError(message)


class EarlyOptimizer(Module):
    def __init__(self) -> None:
        super().__init__(lambda: build(0), build(0))
        self.early = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.early


def _fit_with_early_optimizer(options: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    try:
        return _fit(EarlyOptimizer(), **options)[0], ""
    except KeyError as error:
        return {}, str(error)


@pytest.mark.parametrize("ram_efficient", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_optimizer_made_in_init_trains_the_sharded_parameters(engine: str, ram_efficient: bool) -> None:
    """pytorch/pytorch#149205, pytorch/pytorch#107843: training parameters that the model no longer uses."""
    options = {**ENGINES[engine], **WRAP, "cpu_ram_efficient_loading": ram_efficient}
    for weights, error in run_on_ranks(2, _fit_with_early_optimizer, options):
        if engine == "fsdp1":  # its flat parameters may span groups
            assert "has no sharded parameter" in error
            assert "use_orig_params=True" in error
        elif weights:
            assert_same(weights, plain_weights(build(0), 2))
        else:
            assert not error


def _llama_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )


class LanguageModule(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.model is not None
        return self.model(input_ids=batch, labels=batch).loss


TOKENS = torch.arange(48).reshape(6, 8) % 61


def _fit_llama(options: dict[str, Any], folder: str) -> tuple[dict[str, Tensor], set[bool], dict[str, bool]]:
    from transformers import AutoModelForCausalLM

    world_size, rank = dist.get_world_size(), dist.get_rank()
    module = LanguageModule(lambda: AutoModelForCausalLM.from_pretrained(folder))
    strategy = AccelFSDPStrategy(state_dict_type="full_state_dict", **options)
    trainer = quiet_trainer(strategy, world_size, max_steps=1, use_distributed_sampler=False)
    tokens = TOKENS[rank::world_size]  # in this order: Lightning's own sampler would shuffle
    trainer.fit(module, torch.utils.data.DataLoader(tokens, 3))  # type: ignore[arg-type]
    assert module.model is not None
    fresh = AutoModelForCausalLM.from_config(_llama_config())
    buffers = {name: torch.equal(tensor, module.model.get_buffer(name)) for name, tensor in fresh.named_buffers()}
    weights = strategy.lightning_module_state_dict()
    return {name: tensor.clone() for name, tensor in weights.items()}, module.had_values, buffers


@pytest.mark.core("rank_zero-fsdp2", "files-fsdp1]")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("source", ["rank_zero", "files"])
def test_a_pretrained_transformer_is_held_by_one_process_or_none(engine: str, source: str, tmp_path: Path) -> None:
    """huggingface/transformers#43749: `from_pretrained` alone holds the weights on every process."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(_llama_config()).save_pretrained(tmp_path, max_shard_size="8KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    options: dict[str, Any] = {**ENGINES[engine], "auto_wrap_policy": "transformer_based_wrap"}
    where = {"cpu_ram_efficient_loading": True} if source == "rank_zero" else {"pretrained_weights": str(tmp_path)}
    outcomes = run_on_ranks(2, _fit_llama, {**options, **where}, str(tmp_path))
    assert_same(outcomes[0][0], {f"model.{name}": tensor for name, tensor in model.state_dict().items()})
    assert [had_values for _, had_values, _ in outcomes] == [{source == "rank_zero"}, {False}]
    for _, _, buffers in outcomes:
        assert buffers
        assert all(buffers.values())


def _losses_with_pinned_copies(source: dict[str, Any]) -> list[float]:
    """Train on one process as on CUDA, where FSDP1 copies what it offloads into pinned memory."""
    outcome = Outcome()

    class Module(TinyModule):
        def __init__(self) -> None:
            super().__init__(Case(), outcome)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "pin_memory", Tensor.clone)
        patch.setattr(torch.cpu.Stream, "synchronize", lambda _: None, raising=False)
        patch.setattr(fsdp1, "CPUOffload", lambda offload_params: CPUOffload(offload_params=True))
        strategy = AccelFSDPStrategy(fsdp_version=1, cpu_offload=True, **{**WRAP, **source})
        quiet_trainer(strategy, 1, max_epochs=1).fit(Module(), rank_loader(1))
    return outcome.losses


@pytest.mark.parametrize("source", ["rank_zero", "files"])
def test_first_weights_reach_what_fsdp1_offloads(source: str, tmp_path: Path) -> None:
    """A process alone has whole units, which torch shows from other memory than it trains until the first forward."""
    save_file({f"model.{name}": one for name, one in build_model().state_dict().items()}, tmp_path / "w.safetensors")
    options = {
        "rank_zero": {"cpu_ram_efficient_loading": True},
        "files": {"pretrained_weights": str(tmp_path / "w.safetensors")},
    }
    losses = run_on_ranks(1, _losses_with_pinned_copies, options[source])[0]
    assert losses == pytest.approx(train_plain(Case(epochs=1), 1).losses, rel=1e-5)  # sums in another order


class _Partly(LightningModule):
    """A model with values, and a head and a bias on the meta device."""

    def configure_model(self) -> None:
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        with torch.device("meta"):
            self.head = nn.Linear(4, 1)
            self.body[0].bias = nn.Parameter(torch.empty(4))
        nn.init.constant_(self.body.get_parameter("0.weight"), 3.0)
        for parameter in self.body[1].parameters():
            nn.init.constant_(parameter, 3.0)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.head(self.body(batch[0])).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _fit_partly(engine: dict[str, Any]) -> dict[str, Tensor]:
    strategy, module = AccelFSDPStrategy(**engine), _Partly()
    loader = DataLoader(TensorDataset(torch.randn(8, 4)), 4)
    quiet_trainer(strategy, dist.get_world_size(), max_steps=1).fit(module, loader)
    return {name: one.clone() for name, one in strategy.full_state_dict(module).items()}


@pytest.mark.parametrize("engine", [{"fsdp_version": 1}, {"fsdp_version": 2}], ids=["fsdp1", "fsdp2"])
def test_only_what_is_on_the_meta_device_gets_initial_values(engine: dict[str, Any]) -> None:
    weights = run_on_ranks(2, _fit_partly, engine)
    for name in ("body.1.weight", "body.1.bias", *(("body.0.weight",) if engine["fsdp_version"] == 2 else ())):
        assert weights[0][name].eq(3.0).all(), name
    for name, one in weights[0].items():
        assert one.isfinite().all()
        assert torch.equal(one, weights[1][name])
        assert "head" not in name or one.abs().max() <= 0.5
