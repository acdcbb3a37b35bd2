"""What is planned and trained in these tests."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(self.norm1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class LanguageModel(LightningModule):
    """A GPT as in examples/train_gpt.py, of any size."""

    def __init__(self, width: int = 64, depth: int = 2, length: int = 64, optimizer: str = "adamw") -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        self.optimizer = optimizer

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        return self.head(self.norm(self.blocks(x)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self(batch).flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class ReadsItsLoss(LanguageModel):
    """Decides by a value what it computes."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss.item() > 1 else loss


class PicksTokens(LanguageModel):
    """The size of what it computes depends on values."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch)
        return logits[logits > 0].mean()


class ReadsItsBatch(LanguageModel):
    """Decides by the batch, which is known."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch[:, : 8 + int(batch.max())], batch_idx)


class TwoOptimizers(LanguageModel):
    """In manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(functional.cross_entropy(self(batch).flatten(0, 1), batch.flatten()))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.blocks, self.head)]


def text(batch_size: int, length: int) -> Tensor:
    return torch.zeros(batch_size, length, dtype=torch.int64)


def small_llama(folder: str, activation_checkpointing: bool = False) -> LightningModule:
    """What ``accelight plan --hf-config`` plans."""
    from accelight.strategies.planning.example_model import HuggingFaceModule

    return HuggingFaceModule(folder, activation_checkpointing)


def write_llama_config(folder: str) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=2000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip


@torch.library.custom_op("planning_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_autograd(lambda context, gradient: gradient * 2)


class HasAnOperationOfItsOwn(LanguageModel):
    """Nobody has said what shape it returns."""

    def forward(self, text: Tensor) -> Tensor:
        return doubled(super().forward(text))


class BuiltLate(LightningModule):
    """Built in ``configure_model``."""

    def configure_model(self) -> None:
        if not hasattr(self, "layer"):
            self.layer = nn.Linear(64, 64)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Images(LightningModule):
    """Convolutions, statistics of batches, dropout."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 64, 128, 256]
        self.layers = nn.Sequential(
            *[
                nn.Sequential(
                    nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.Dropout(0.1),
                    nn.MaxPool2d(2),
                )
                for before, after in itertools.pairwise(widths)
            ],
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256 * 16, 1024), nn.Linear(1024, 10),
        )  # fmt: skip

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self.layers(batch), batch.new_zeros(len(batch), dtype=torch.int64))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def images(batch_size: int) -> Tensor:
    return torch.zeros(batch_size, 3, 64, 64)
