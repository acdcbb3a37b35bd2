"""A Llama with PEFT's LoRA under a LightningModule."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from tools.clients_cases.sharing import shared


class Tuning(LightningModule):
    """Trains the adapters; the rest is frozen."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
        adapters = LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
        self.net = get_peft_model(LlamaForCausalLM(config), adapters)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss."""
        return self.net(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.5, momentum=0.9)


def fit(trainer_options: dict[str, Any], batch_size: int) -> None:
    """Train on drawn tokens."""
    tokens = torch.randint(32, (64, 12), generator=torch.Generator().manual_seed(2))
    Trainer(**trainer_options).fit(Tuning(), shared(DataLoader(TensorDataset(tokens), batch_size)))
