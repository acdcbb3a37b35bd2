"""Train with sharded checkpoints, and find each of them as safetensors when training ends.

python examples/merge_after_training.py              # two CPU processes, or every GPU
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from accelight.callbacks import MergeShardedCheckpoint
from accelight.strategies import AccelFSDPStrategy


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            strategy=AccelFSDPStrategy(fsdp_version=2, state_dict_type="sharded_state_dict"),
            devices=torch.accelerator.device_count() or 2,
            max_epochs=4, logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[
                ModelCheckpoint(f"{folder}/checkpoints", "{epoch}", monitor="loss", save_top_k=2),
                MergeShardedCheckpoint(f"{folder}/merged", when="every_save", strip_prefix="model"),
            ],
        )  # fmt: skip
        trainer.fit(Regression(), DataLoader(data, batch_size=16, shuffle=True))
        if not trainer.is_global_zero:
            return
        print("checkpoints:", *sorted(path.name for path in Path(folder, "checkpoints").iterdir()))
        for merged in sorted(Path(folder, "merged").iterdir()):
            model = Regression().model  # plain torch from here on
            model.load_state_dict(load_file(merged / "model.safetensors"))
            with torch.no_grad():
                print(f"merged: {merged.name}   loss {functional.mse_loss(model(inputs), data.tensors[1]):.3f}")


if __name__ == "__main__":
    main()
