"""Gradient accumulation with FSDP2 in a plain PyTorch loop: no Trainer, only ``accelight.state``.

    torchrun --nproc-per-node 2 examples/accumulate_fsdp2.py
    python examples/accumulate_fsdp2.py                         # the same numbers on one process

It runs on the CPU with gloo, and on GPUs where there are some.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own habit)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from accelight.state import GradientAccumulationPlugin, GradientState, PartialState, gather_for_metrics, reduce

NUM_SAMPLES = 56
GLOBAL_BATCH_SIZE = 8  # 7 micro-batches an epoch: with 3 a step, the last step has only one


def make_model(state: PartialState) -> nn.Module:
    torch.manual_seed(0)  # the same weights everywhere, before they are sharded
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(state.device)
    if state.backend is not None:  # a process group is there
        mesh = init_device_mesh(state.device.type, (state.num_processes,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def make_data(state: PartialState) -> TensorDataset:
    with state.main_process_first():  # where the main process would download and the others read its cache
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(NUM_SAMPLES, 16, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def main() -> None:
    state = PartialState()
    gradients = GradientState(GradientAccumulationPlugin(num_steps=3))
    model, data = make_model(state), make_data(state)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        data, state.num_processes, state.process_index, shuffle=False
    )
    loader = DataLoader(data, batch_size=GLOBAL_BATCH_SIZE // state.num_processes, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    for epoch in range(3):
        num_optimizer_steps = 0
        total = torch.zeros((), device=state.device)
        for index, batch in enumerate(gradients.track(loader)):
            inputs, targets = (tensor.to(state.device) for tensor in batch)
            with gradients.accumulate(model):
                loss = F.mse_loss(model(inputs), targets)
                (loss / gradients.window_size(index, len(loader))).backward()
            if gradients.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
                num_optimizer_steps += 1
            total += loss.detach()
            if not torch.isfinite(loss):
                state.set_trigger("nan")
        if state.check_trigger("nan"):
            raise RuntimeError("The loss is not finite on some process.")
        mean = reduce(total / len(loader), "mean").item()
        state.print(f"epoch {epoch}: {num_optimizer_steps} optimizer steps, loss {mean:.4f}")

    with torch.no_grad():  # every sample once and in order, on any number of processes
        predictions = [gather_for_metrics(model(inputs.to(state.device))) for inputs, _ in gradients.track(loader)]
    state.print(f"{len(torch.cat(predictions))} predictions for {NUM_SAMPLES} samples")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
