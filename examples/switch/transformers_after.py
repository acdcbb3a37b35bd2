"""After: ``transformers_before.py`` with accelight; ``python transformers_after.py`` starts it."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

from accelight.strategies import AccelFSDPStrategy


class LanguageModel(LightningModule):
    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    seed_everything(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    tokens = torch.randint(64, (64, 16))
    strategy = AccelFSDPStrategy(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    trainer = Trainer(
        strategy=strategy,
        devices=2,
        max_epochs=6,
        accumulate_grad_batches=8,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(LanguageModel(LlamaForCausalLM(config)), DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True))
    strategy.save_safetensors("run/model", strip_prefix="auto")
