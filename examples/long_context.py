"""Sequence parallelism: the processes of a group compute parts of the same long sequences, under FSDP2.

    python examples/long_context.py               # four processes, all of them for each sequence
    python examples/long_context.py --sp-size 1   # the same losses from FSDP2 alone, with more memory

Each step takes one sequence for each process: one after the other, or all at once. The model returns the loss of each
position, so that no process has the logits of a whole sequence.
"""

from __future__ import annotations

import argparse

if __name__ == "__main__":  # before the imports below, which take seconds: --help answers at once
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--sp-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=8192, help="positions in a sequence")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps")
    arguments = parser.parse_args()

import resource
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from accelight.state import PartialState
from accelight.strategies import AccelFSDPStrategy, ParallelismConfig

WIDTH, HEADS, TOKENS = 64, 4, 2048


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """Everything in here sees a part of each sequence, and so takes the positions as an argument."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.tokens(tokens) + self.positions(positions)))
        return functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


class LanguageModel(LightningModule):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.net = Net(length)
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch[0][:, :-1], batch[0][:, 1:]  # shifted here, where sequences are whole
        loss = self.net(tokens, torch.arange(tokens.shape[1], device=self.device)[None], targets).mean()
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if len(self.losses) == self.trainer.accumulate_grad_batches:
            losses: Any = self.all_gather(torch.stack(self.losses))
            PartialState().print(f"step {self.global_step}: loss {losses.mean():.4f}")
            self.losses.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main(arguments: argparse.Namespace) -> None:
    """Train."""
    seed_everything(1, verbose=False)
    size = arguments.sp_size
    start = torch.randint(TOKENS, (arguments.devices * arguments.steps, 1))
    data = (start + 7 * torch.arange(arguments.length + 1)) % TOKENS
    strategy = AccelFSDPStrategy(
        fsdp_version=2,
        auto_wrap_policy={Block},
        parallelism_config=ParallelismConfig(sp_size=size),
        sequence_modules=["net"] if size > 1 else None,
    )
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=arguments.devices, max_epochs=1, logger=False,
        accumulate_grad_batches=size, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(LanguageModel(arguments.length), DataLoader(TensorDataset(data), batch_size=1))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    PartialState().print(f"rank 0 has used {peak:.2f} GiB at most")


if __name__ == "__main__":
    main(arguments)
