"""Sequence parallelism under FSDP2: processes that share sequences train as one process does."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

from accelight.strategies import AccelFSDPStrategy, ParallelismConfig, full_state_dict
from tests.gpu import share_a_device
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.cut_model import Counting
from tests.strategies.oracle import quiet_trainer

BATCH, BATCHES, WIDTH, HEADS = 4, 4, 8, 4


class Block(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.norm, self.causal = nn.LayerNorm(WIDTH), causal
        self.qkv, self.proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        split = [WIDTH, WIDTH // 2, WIDTH // 2]  # two heads of keys and values for four of queries
        heads = [one.view(batch, length, -1, WIDTH // HEADS) for one in self.qkv(self.norm(x)).split(split, -1)]
        query, key, value = [one.transpose(1, 2) for one in heads]
        attended = functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=self.causal, enable_gqa=True
        )
        return x + self.dropout(self.proj(attended.transpose(1, 2).flatten(2)))


class Net(nn.Module):
    """Gives the loss of each position."""

    def __init__(self, causal: bool = True, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList([Block(causal) for _ in range(depth)])
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask)
        losses = functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape)


class Module(LightningModule):
    def __init__(self, net: type[nn.Module] = Net, length: int = 8, causal: bool = True, mask: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net, self.length, self.mask = net(causal), length, mask
        self.scale = nn.Parameter(torch.ones(()))
        """Outside of the module that is cut."""
        self.norms: list[float] = []

    def loss(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        positions, mask = torch.arange(self.length, device=tokens.device)[None], None
        if self.mask == "whole":
            mask = (
                torch.ones(self.length, self.length, dtype=torch.bool).tril()[None, None].repeat(len(tokens), 1, 1, 1)
            )
            mask[..., 0] &= torch.arange(self.length) < 3  # later positions do not see the first one
        return (self.net(inputs, positions, targets, mask) * self.scale).mean()

    def training_step(self, batch: Tensor) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append(sum(float(one.grad.norm()) ** 2 for one in self.parameters() if one.grad is not None))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Llama(Module):
    """Of transformers: labels are given whole."""

    def __init__(
        self, length: int = 8, padded: str = "", packed: bool = False, tied: bool = True, embedded: bool = False
    ) -> None:
        LightningModule.__init__(self)
        torch.manual_seed(4)
        self.net: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=12, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
            )
        )  # fmt: skip
        self.padded, self.packed, self.norms = padded, packed, []
        self.embed = nn.Embedding(12, 16) if embedded else None

    def loss(self, tokens: Tensor) -> Tensor:
        inputs, length = tokens[:, :-1], tokens.shape[1] - 1
        given: dict[str, Any] = {"labels": inputs.clone()}
        if self.padded:
            mask = torch.ones_like(inputs)
            mask[0, :3] = 0
            mask = mask if self.padded == "left" else mask.flip(1)
            given["labels"][mask == 0] = -100
            given["attention_mask"] = mask
        if self.packed:
            given["position_ids"] = torch.cat([torch.arange(3), torch.arange(length - 3)])[None].repeat(len(tokens), 1)
            given["use_cache"] = False  # else transformers sees one sequence
        given |= {"input_ids": inputs} if self.embed is None else {"inputs_embeds": self.embed(inputs)}
        return self.net(**given).loss


class Lora(Llama):
    """With adapters on layers that a plan cuts on either side."""

    def __init__(self, **options: Any) -> None:
        super().__init__(tied=False)
        names = ["q_proj", "v_proj", "o_proj", "down_proj"]
        self.net = get_peft_model(self.net, LoraConfig(r=2, target_modules=names, task_type="CAUSAL_LM", **options))
        for name, parameter in self.named_parameters():
            if "lora_B" in name:  # else zero
                nn.init.normal_(parameter, std=0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def loader(module: Module, num_replicas: int, **options: Any) -> DataLoader[Any]:
    length = getattr(module, "length", 8)
    tokens = torch.randint(0, 11, (BATCH * BATCHES, length + 1), generator=torch.Generator().manual_seed(5))
    return DataLoader(tokens, batch_size=BATCH // num_replicas, **options)  # type: ignore[arg-type]


KINDS: dict[str, Any] = {
    "gpt": lambda: Module(),
    "gpt, length 7": lambda: Module(length=7),
    "gpt, mask": lambda: Module(causal=False, mask="whole"),
    "gpt, mask, length 7": lambda: Module(causal=False, mask="whole", length=7),
    "gpt, all to all": lambda: Module(causal=False),
    "llama": lambda: Llama(),
    "llama, untied": lambda: Llama(tied=False),
    "llama, lora": lambda: Lora(),
    "llama, left": lambda: Llama(padded="left"),
    "llama, right": lambda: Llama(padded="right"),
    "llama, left, embedded": lambda: Llama(padded="left", embedded=True),
    "llama, packed": lambda: Llama(packed=True),
}


def train(arguments: dict[str, Any]) -> dict[str, Any]:
    return _train(**arguments)


def _train(
    kind: str = "gpt",
    sp: int = 1,
    cp: int = 1,
    tp: int = 1,
    accumulate: int = 1,
    clip: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    module = KINDS[kind]()
    plan = {"net.blocks.*.proj": "colwise_rep"} if tp > 1 else None
    if kind.startswith("llama"):
        plan = None
    options = {"auto_wrap_policy": {Block}, **options} if kind.startswith("gpt") else options
    strategy = AccelFSDPStrategy(
        fsdp_version=2,
        parallelism_config=ParallelismConfig(sp_size=sp, cp_size=cp, tp_size=tp),
        tp_plan=plan,
        sequence_modules=["net"] if kind.startswith("gpt") else None,
        **options,
    )
    world_size = dist.get_world_size()
    trainer = quiet_trainer(
        strategy, world_size, max_epochs=1, accumulate_grad_batches=accumulate, gradient_clip_val=clip
    )
    trainer.fit(module, loader(module, world_size // (sp * cp * tp)))
    [metrics] = trainer.validate(module, loader(module, world_size // (sp * cp * tp)), verbose=False)
    weights = {name: one.clone() for name, one in full_state_dict(strategy, module).items()}
    return {"weights": weights, "norms": module.norms, "loss": metrics["loss"]}


def plain(kind: str, accumulate: int = 1, clip: float | None = None) -> dict[str, Any]:
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=accumulate, gradient_clip_val=clip,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = KINDS[kind]()
    data = loader(module, 1)
    trainer.fit(module, loader(module, 1, sampler=DistributedSampler(data.dataset, num_replicas=1, rank=0)))
    [metrics] = trainer.validate(module, loader(module, 1), verbose=False)
    return {"weights": module.state_dict(), "norms": module.norms, "loss": metrics["loss"]}


CELLS: dict[str, tuple[int, dict[str, Any]]] = {
    "sp2 x shard2": (4, {"sp": 2}),
    "sp4": (4, {"sp": 4}),
    "cp2 x shard2": (4, {"cp": 2}),
    "cp4": (4, {"cp": 4}),
    "accumulated and clipped": (4, {"sp": 2, "accumulate": 2, "clip": 0.3}),
    "kept through accumulation": (2, {"sp": 2, "accumulate": 2, "reshard_during_accumulation": False}),
    "compiled": (2, {"sp": 2, "compile": True}),
    "recomputed": (2, {"sp": 2, "activation_checkpointing": True}),
    "recomputed, cp2": (2, {"cp": 2, "activation_checkpointing": True}),
    **{
        f"{kind}, {setting}2": (2, {"kind": kind, setting: 2})
        for kind in KINDS
        for setting in ("sp", "cp")
        if kind not in ("gpt", "llama, untied")
    },
    "llama, sp2 x shard2": (4, {"kind": "llama", "sp": 2}),
    "llama, cp4": (4, {"kind": "llama", "cp": 4}),
    "llama, lora, tp2": (2, {"kind": "llama, lora", "tp": 2}),
    "llama, tp2 x sp2": (4, {"kind": "llama, untied", "tp": 2, "sp": 2}),
    "llama, tp2 x cp2": (4, {"kind": "llama, untied", "tp": 2, "cp": 2}),
}


@pytest.mark.core("clipped", "left, sp2", "embedded, sp2", "packed, cp2")
@pytest.mark.parametrize("name", CELLS)
def test_it_trains_as_one_process(name: str) -> None:
    num_ranks, arguments = CELLS[name]
    expected = plain(
        arguments.get("kind", "gpt"), **{key: arguments[key] for key in ("accumulate", "clip") if key in arguments}
    )
    for found in run_on_ranks(num_ranks, train, arguments, timeout_s=100):
        torch.testing.assert_close(found["weights"], dict(expected["weights"]), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.tensor(found["norms"]), torch.tensor(expected["norms"]), rtol=1e-4, atol=1e-6)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


class OfHand(Block):
    """Attention that no function of torch's computes."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        split = self.qkv(self.norm(x)).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
        scores = split[1] @ split[2].transpose(1, 2)
        return x + self.proj(scores.softmax(-1) @ split[0])


class HandNet(Net):
    def __init__(self, causal: bool = True) -> None:
        super().__init__(causal)
        self.blocks = nn.ModuleList([OfHand(causal) for _ in range(2)])


class ZeroNet(HandNet):
    """Whose attention is hidden by the layers behind it until they have learnt."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__(causal)
        for block in self.blocks:
            nn.init.zeros_(block.proj.weight)  # type: ignore[arg-type, union-attr]


class CountingNet(Net):
    def forward(self, tokens: Tensor, positions: Tensor, *more: Any) -> Tensor:
        return super().forward(tokens, torch.arange(tokens.shape[1])[None], *more)


class MeanNet(Net):
    def forward(self, *args: Any) -> Tensor:
        return super().forward(*args).mean()


class ListNet(Net):
    def forward(self, *args: Any) -> Any:
        return super().forward(*args), 1.5


class LocalMask(Net):
    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor, mask: Any = None) -> Tensor:
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        return super().forward(tokens, positions, targets, mask)


class Normalised(Net):
    def __init__(self, causal: bool = True) -> None:
        super().__init__(causal)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor, mask: Any = None) -> Tensor:
        x = self.norm(self.tokens(tokens).transpose(1, 2)).transpose(1, 2)
        losses = functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape)


class InFunctions(Net):
    """Recomputes a function that calls attention."""

    reentrant = False

    def __init__(self, causal: bool = True) -> None:
        super().__init__(causal)
        for block in self.blocks:
            inner: Any = block.forward
            block.forward = partial(checkpoint, inner, use_reentrant=self.reentrant)


class InOldFunctions(InFunctions):
    reentrant = True


class OddHeads(Net):
    def __init__(self, causal: bool = True) -> None:
        super().__init__(causal, depth=0)
        self.attention = nn.TransformerEncoderLayer(WIDTH, 1, 8, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor, mask: Any = None) -> Tensor:
        x = self.tokens(tokens)[:, None]
        x = functional.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0]
        losses = functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape)


def _llama(**config: Any) -> Llama:
    module = Llama()
    for name, value in config.items():
        setattr(module.net.config, name, value)
    return module


_OTHER = "net computes something else from parts of a sequence than from all of it, so that sp_size=2"
REFUSED: dict[str, tuple[Any, list[str] | None, str]] = {
    "attention of one's own": (lambda: Module(HandNet), ["net"], _OTHER),
    "hidden by zeros": (lambda: Module(ZeroNet), ["net"], _OTHER),
    "positions counted": (lambda: Module(CountingNet), ["net"], _OTHER),
    "BatchNorm": (lambda: Module(Normalised), ["net"], _OTHER),
    "a mean": (lambda: Module(MeanNet), ["net"], "net returns a tensor of shape (), and its sequence has 4 positions"),
    "a number": (lambda: Module(ListNet), ["net"], "net returns a float, which knows a part of the sequence alone"),
    "a mask of a part": (
        lambda: Module(LocalMask, causal=False),
        ["net"],
        "attention with a mask of (4, 4) does not",
    ),
    "a length": (
        lambda: Module(causal=False, length=7),
        ["net"],
        "does not divide a sequence of 7 positions",
    ),
    "heads": (lambda: Module(OddHeads), ["net"], "net: sp_size=2 does not divide the 1 heads of its attention"),
    "functions": (lambda: Module(InFunctions), ["net"], "give torch.utils.checkpoint a module"),
    "old functions": (lambda: Module(InOldFunctions), ["net"], "set use_reentrant=False"),
    "no module": (Module, None, "sp_size > 1 needs the modules whose sequences it cuts"),
    "a wrong pattern": (Module, ["body"], "sequence_modules: 'body' matches no module. The model has net, net.tokens"),
    "inside of another": (Module, ["net", "net.blocks.0"], "net.blocks.0 lies inside of net, which is cut already"),
    "eager": (lambda: _llama(_attn_implementation="eager"), None, "net has attn_implementation='eager'"),
    "experts": (lambda: _llama(output_router_logits=True), None, "net adds a loss of its router over all positions"),
    "windows": (lambda: _llama(layer_types=["sliding_attention"]), None, "net has layers of sliding_attention"),
    "heads of llama": (lambda: _llama(num_attention_heads=3), None, "net has 3 heads of attention"),
}


def refused(name: str) -> str:
    make, names, _ = REFUSED[name]
    module = make()
    config = ParallelismConfig(sp_size=2)
    strategy = AccelFSDPStrategy(
        fsdp_version=2, auto_wrap_policy={Block}, parallelism_config=config, sequence_modules=names
    )
    with pytest.raises((ValueError, RuntimeError)) as error:
        quiet_trainer(strategy, 2, max_epochs=1).fit(module, loader(module, 1))
    return f"{error.value}"


@pytest.mark.core("one's own", "zeros", "counted", "old functions")
@pytest.mark.parametrize("name", REFUSED)
def test_what_sees_other_positions_is_an_error(name: str) -> None:
    for message in run_on_ranks(2, refused, name):
        assert REFUSED[name][2] in message


def refused_after_evaluation() -> tuple[str, int]:
    """BatchNorm sees all positions in training alone; the Trainer evaluates first."""
    module = Module(Normalised)
    strategy = AccelFSDPStrategy(
        fsdp_version=2, parallelism_config=ParallelismConfig(sp_size=2), sequence_modules=["net"]
    )
    trainer = quiet_trainer(strategy, 2, max_epochs=1, num_sanity_val_steps=2)
    with pytest.raises(RuntimeError) as error:
        trainer.fit(module, loader(module, 1), loader(module, 1))
    return f"{error.value}", trainer.global_step


def test_training_is_tried_although_an_evaluation_came_first() -> None:
    for message, step in run_on_ranks(2, refused_after_evaluation):
        assert _OTHER in message
        assert step == 0


def generated() -> list[str]:
    strategy, module = AccelFSDPStrategy(fsdp_version=2, parallelism_config=ParallelismConfig(sp_size=2)), Llama()
    trainer, messages = quiet_trainer(strategy, 2, max_epochs=1), []
    trainer.fit(module, loader(module, 1))
    module.predict_step = lambda batch: module.net.generate(batch[:, :4], max_new_tokens=2)  # type: ignore[method-assign, misc]
    with pytest.raises(ValueError, match="sp_size") as error:
        trainer.predict(module, loader(module, 1))
    messages.append(f"{error.value}")
    other = quiet_trainer(AccelFSDPStrategy(fsdp_version=2), 2, max_epochs=1)
    with pytest.raises(RuntimeError) as failure:
        other.fit(module, loader(module, 2))
    return [*messages, f"{failure.value}"]


@pytest.mark.exhaustive
def test_generation_and_other_sizes_are_errors() -> None:
    for generation, sizes in run_on_ranks(2, generated):
        assert "past_key_values works on whole sequences, which no rank has with sp_size > 1" in generation
        assert "sharded with tp_size=1, sp_size=2, and cannot be sharded again with tp_size=1" in sizes


def with_dora() -> str:
    config = ParallelismConfig(tp_size=2)
    trainer = quiet_trainer(AccelFSDPStrategy(fsdp_version=2, parallelism_config=config), 2, max_epochs=1)
    module = Lora(use_dora=True)
    with pytest.raises(ValueError, match="tp_plan") as error:
        trainer.fit(module, loader(module, 1))
    return f"{error.value}"


@pytest.mark.exhaustive
def test_adapters_that_no_plan_cuts_are_an_error() -> None:
    for message in run_on_ranks(2, with_dora):
        assert (
            "and LoRA of linear layers (without DoRA), and net.base_model.model.model.layers.0.self_attn.q_pro"
            in message
        )


class Dropping(Module):
    """Remembers what was dropped outside and inside of the module that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[Tensor] = []
        self.inside: list[Tensor] = []
        self.net.blocks[0].dropout.register_forward_hook(self._note)  # type: ignore[index, union-attr]
        self.net.blocks[0].dropout.p = 0.5  # type: ignore[index, union-attr]

    def _note(self, dropout: Any, args: Any, output: Tensor) -> None:
        self.inside.append(output == 0)

    def training_step(self, batch: Tensor) -> Tensor:
        self.outside.append(functional.dropout(torch.ones(20)))
        loss = self.loss(batch)
        self.outside.append(functional.dropout(torch.ones(20)))
        return loss


def dropped() -> tuple[Tensor, Tensor, int]:
    strategy = AccelFSDPStrategy(
        fsdp_version=2,
        auto_wrap_policy={Block},
        parallelism_config=ParallelismConfig(sp_size=2),
        sequence_modules=["net"],
        activation_checkpointing=True,
    )
    torch.manual_seed(dist.get_rank())  # as processes that nobody has seeded
    module = Dropping()
    with set_checkpoint_early_stop(False):
        quiet_trainer(strategy, 2, max_epochs=1).fit(module, loader(module, 1))
    inside = [one for one in module.inside if one.any()]  # else the trial, where nothing is
    return torch.stack(module.outside), torch.stack(inside[::2]), sum(map(torch.equal, inside[::2], inside[1::2]))


@pytest.mark.exhaustive
def test_dropout_differs_inside_alone() -> None:
    (outside, inside, recomputed), (other_outside, other_inside, _) = run_on_ranks(2, dropped)
    assert torch.equal(outside, other_outside)
    assert all(not torch.equal(one, other) for one, other in zip(inside, other_inside, strict=True))
    assert recomputed == len(inside) == BATCHES


def counted(setting: str, recompute: bool) -> dict[str, int]:
    counting, module = Counting(), Module()
    strategy = AccelFSDPStrategy(
        fsdp_version=2, auto_wrap_policy={Block}, parallelism_config=ParallelismConfig(**{setting: 2}),
        sequence_modules=["net"], activation_checkpointing=recompute,
    )  # fmt: skip
    quiet_trainer(strategy, 2, max_epochs=1, callbacks=[counting]).fit(module, loader(module, 1))
    return counting.counts


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", [False, True])
def test_collectives_of_a_step(recompute: bool) -> None:
    for found in run_on_ranks(2, counted, "sp_size", recompute):
        assert found["alltoall_base_"] == 2 * (6 if recompute else 4)  # each attention: to heads and back, and backward
        assert found["_reduce_scatter_base_"] == 3  # each unit
        assert found["_allgather_base_"] == 3 + 1 + 1  # each unit; the first block again in backward; the losses
    for found in run_on_ranks(2, counted, "cp_size", recompute):
        assert found["_reduce_scatter_base_"] == 3 + 2  # each unit; the keys and values of each attention
        assert found["_allgather_base_"] == 3 + 1 + 1 + 2 * (2 if recompute else 1)


def half(setting: str) -> dict[str, Tensor]:
    """Train in bf16, for which CUDA has fast kernels of attention."""
    given = {"parallelism_config": ParallelismConfig(**{setting: 2}), "sequence_modules": ["net"]} if setting else {}
    strategy = AccelFSDPStrategy(fsdp_version=2, auto_wrap_policy={Block}, **given)  # type: ignore[arg-type]
    where = {**share_a_device(), "precision": "bf16-mixed"}
    module = Module(length=64)
    quiet_trainer(strategy, 2, max_epochs=1, **where).fit(module, loader(module, 1 if setting else 2))
    return {name: one.cpu().clone() for name, one in full_state_dict(strategy, module).items()}


@pytest.mark.gpu
@pytest.mark.parametrize("setting", ["sp_size", "cp_size"])
def test_attention_in_half_precision(setting: str) -> None:
    expected = run_on_ranks(2, half, "")[0]
    for found in run_on_ranks(2, half, setting):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.01)  # of weights of order 1, after rounding


@pytest.mark.exhaustive
def test_the_example_has_the_same_losses_without() -> None:
    example = Path(__file__).parents[3] / "examples" / "long_context.py"
    printed = []
    for size in ("1", "4"):
        command = [sys.executable, str(example), "--sp-size", size, "--length", "512"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        printed.append([line for line in done.stdout.splitlines() if line.startswith("step")])
    assert printed[0] == printed[1]
    assert len(printed[0]) == 3
    assert "nan" not in printed[0][-1]
