"""Before: a loop for Accelerate, started by ``accelerate launch --config_file accelerate.yaml accelerate_before.py``.

On two GPUs it shards the model. On CPUs Accelerate trains whole copies.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=8, cpu=not torch.cuda.is_available())
    set_seed(0)
    inputs = torch.randn(64, 16)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=4)
    model = nn.Sequential(*[Block() for _ in range(3)], nn.Linear(16, 1))
    model = accelerator.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer, data = accelerator.prepare(optimizer, data)
    for _ in range(6):
        for x, y in data:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x).squeeze(1), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.save_state("run/sharded.ckpt")


if __name__ == "__main__":
    main()
