"""What a training leaves, written down by a callback, and compared with what one process leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accelight.checkpoint import merge_fsdp_weights
from accelight.strategies.upstream.lightning import Callback

LOSSES, FIRST, LAST = "losses.json", "first.pt", "last.pt"


class Recorder(Callback):
    """Notes the mean loss of each step; saves the weights when training ends, as the strategy saves them.

    Args:
        folder: Where.
        strategy: ``plain`` writes the reference.
    """

    def __init__(self, folder: Path, strategy: str) -> None:
        self.folder, self.strategy = folder, strategy
        self.losses: list[float] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Keep the first weights of the reference; what is drawn from here on is the same everywhere."""
        torch.manual_seed(2)
        if self.strategy == "plain":
            torch.save({name: tensor.clone() for name, tensor in pl_module.state_dict().items()}, self.folder / FIRST)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Keep the loss."""
        loss = outputs["loss"].detach().float().clone()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        self.losses.append(loss.item())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save: every process does."""
        own = self.folder / self.strategy
        own.mkdir(exist_ok=True)
        if self.strategy == "plain":
            torch.save(pl_module.state_dict(), own / LAST)
        else:
            trainer.save_checkpoint(own / "checkpoint")
            merge_fsdp_weights(own / "checkpoint", own / "merged")
        if trainer.is_global_zero:
            (own / LOSSES).write_text(json.dumps(self.losses))


def compare(folder: Path, strategy: str) -> dict[str, float]:
    """Return by how much losses and weights differ from those of one process.

    Returns:
        ``losses``: the largest difference, relative to the loss. ``weights``: the largest difference, relative to the
        largest change that training has made to any weight.

    Raises:
        ValueError: If names or numbers of steps differ, or nothing was trained.
    """
    from safetensors.torch import load_file

    if not (folder / strategy / LOSSES).exists():  # of another process
        return {}
    first, last = torch.load(folder / FIRST), torch.load(folder / "plain" / LAST)
    merged = load_file(folder / strategy / "merged" / "model.safetensors")
    ties = {tensor.data_ptr() for name, tensor in last.items() if name in merged}
    unlike = {name for name in merged.keys() ^ last.keys() if name in merged or last[name].data_ptr() not in ties}
    if unlike:
        raise ValueError(f"names differ: {sorted(unlike)[:3]}")
    trained = {name for name, tensor in last.items() if tensor.is_floating_point()}
    change = max((last[name] - first[name]).abs().max().item() for name in trained if last[name].numel())
    expected, found = (json.loads((folder / one / LOSSES).read_text()) for one in ("plain", strategy))
    if len(expected) != len(found) or not change:
        raise ValueError(f"{len(found)} steps instead of {len(expected)}, or nothing was trained ({change=})")
    shared = [name for name in trained if name in merged and last[name].numel()]
    difference = max((last[name] - merged[name]).abs().max().item() for name in shared)
    losses = max(abs(one - other) / max(abs(one), 1e-6) for one, other in zip(expected, found, strict=True))
    return {"losses": losses, "weights": difference / change}
