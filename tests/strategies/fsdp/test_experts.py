"""Experts, of which each process of a tensor-parallel group has its own: those of rank 0 never take others' place.

Transformers' pull request 45662 has the fault: weights of process 0 are broadcast over all, and each process trains a
part of its experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from accelight.checkpoint import load_state_dict
from accelight.strategies import AccelFSDPStrategy, ParallelismConfig, full_state_dict
from tests.ranks import run_on_ranks
from tests.strategies.fsdp.cut_model import Module, loader, train_plain
from tests.strategies.oracle import quiet_trainer

NUM_EXPERTS, WIDTH = 4, 6


class Experts(nn.Module):
    """A gate weighs the outputs of all experts; each process computes its own ones.

    Args:
        mesh: Of the processes that have different experts; None for one with all of them.
        seed: Of expert 0.
    """

    def __init__(self, mesh: Any, seed: int) -> None:
        super().__init__()
        self.gate, self.mesh = nn.Linear(WIDTH, NUM_EXPERTS), mesh
        size, rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
        self.own = slice(rank * NUM_EXPERTS // size, (rank + 1) * NUM_EXPERTS // size)
        numbers = range(NUM_EXPERTS)[self.own]
        experts = torch.stack(
            [torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed + at)) for at in numbers]
        )
        self.experts = nn.Parameter(experts if mesh is None else DTensor.from_local(experts, mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        experts: Any = self.experts
        if self.mesh is None:
            return x + torch.einsum("bi,eij,be->bj", x, experts, weights)
        own_x, weights = (
            DTensor.from_local(one, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])
            for one in (x, weights)
        )
        out = torch.einsum("bi,eij,be->bj", own_x, experts.to_local(), weights[:, self.own])
        return x + DTensor.from_local(out, self.mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


class Mixture(Module):
    """Groups build other experts; those of the first group are trained."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed

    def configure_model(self) -> None:
        mesh = None if self.device_mesh is None else self.device_mesh["tp"]
        torch.manual_seed(3 + self.seed)
        self.net: Any = nn.Sequential(
            nn.Linear(5, WIDTH), Experts(mesh, self.seed), Experts(mesh, self.seed + 9), nn.Linear(WIDTH, 4)
        )


def train_mixture(path: str) -> dict[str, Any]:
    strategy = AccelFSDPStrategy(
        fsdp_version=2, auto_wrap_policy={Experts}, parallelism_config=ParallelismConfig(tp_size=2)
    )
    trainer = quiet_trainer(strategy, 4, max_epochs=1, gradient_clip_val=0.3)
    module = Mixture(seed=100 * (dist.get_rank() // 2))
    trainer.fit(module, loader(2))
    trainer.save_checkpoint(path)
    return {"weights": dict(full_state_dict(strategy, module)), "norms": module.norms}


def test_each_process_keeps_its_experts(tmp_path: Path) -> None:
    expected = Mixture()
    train_plain(expected, clip=0.3)
    for found in run_on_ranks(4, train_mixture, str(tmp_path / "saved")):
        torch.testing.assert_close(found["weights"], dict(expected.state_dict()), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.tensor(found["norms"]), torch.tensor(expected.norms), rtol=1e-4, atol=1e-6)
    saved = load_state_dict(tmp_path / "saved")
    assert all(torch.equal(saved[name], one) for name, one in found["weights"].items())


class _PlainParts(Mixture):
    """As older versions of transformers leave a model whose experts they have dealt out."""

    tp_plan: dict[str, str] = {"net.1": "grouped_gemm"}  # noqa: RUF012
    tp_size = 2

    def configure_model(self) -> None:
        self.net = nn.Sequential(nn.Linear(5, WIDTH), Experts(None, self.seed), nn.Linear(WIDTH, 4))


def plain_parts(tp_size: int) -> str:
    config = ParallelismConfig(tp_size=tp_size)
    strategy = AccelFSDPStrategy(fsdp_version=2, parallelism_config=config)
    with pytest.raises(ValueError, match="plain tensors") as error:
        quiet_trainer(strategy, 2, max_epochs=1).fit(_PlainParts(dist.get_rank()), loader(2 // tp_size))
    return f"{error.value}"


@pytest.mark.parametrize("tp_size", [1, 2])
def test_parts_that_cannot_be_told_apart_are_an_error(tp_size: int) -> None:
    for message in run_on_ranks(2, plain_parts, tp_size):
        assert "_PlainParts was cut by transformers over 2 processes" in message


class Qwen(LightningModule):
    """Of transformers, with its own expert parallelism."""

    def configure_model(self) -> None:
        torch.manual_seed(3 + (dist.get_rank() // 2 if dist.is_initialized() else 0))  # of a group, each its experts
        sizes: dict[str, Any] = {"head_dim": 4, "experts_implementation": "eager"}
        config = Qwen3MoeConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_experts=4,
            num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=16, tie_word_embeddings=False, **sizes,
        )  # fmt: skip
        self.model: Any = Qwen3MoeForCausalLM(config)
        if self.device_mesh is None:
            return
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        plan = {}
        for at in range(config.num_hidden_layers):
            for pattern, style in self.model.ep_plan.items():
                plan[pattern.replace("*", f"{at}")] = style
        apply_expert_parallelism(self.model, self.device_mesh["tp"], self.device_mesh["tp"], plan)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _tokens() -> Any:
    return TensorDataset(torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(6)))


def train_qwen() -> dict[str, Tensor]:
    strategy = AccelFSDPStrategy(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", parallelism_config=ParallelismConfig(tp_size=2)
    )
    module = Qwen()
    quiet_trainer(strategy, 4, max_epochs=2).fit(module, DataLoader(_tokens(), batch_size=4))
    return {name: one.clone() for name, one in full_state_dict(strategy, module).items()}


@pytest.mark.exhaustive
def test_transformers_own_expert_parallelism() -> None:
    pytest.importorskip("transformers.distributed.expert_parallel")
    module = Qwen()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    order: Any = DistributedSampler(_tokens(), num_replicas=1, rank=0)
    trainer.fit(module, DataLoader(_tokens(), batch_size=8, sampler=order))
    for found in run_on_ranks(4, train_qwen):
        torch.testing.assert_close(found, dict(module.state_dict()), rtol=1e-5, atol=1e-6)
