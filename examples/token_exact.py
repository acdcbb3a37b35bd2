"""Train a language model on sequences of different lengths so that every token weighs the same, and measure the rest.

python examples/token_exact.py                  # two CPU processes, or every GPU
python examples/token_exact.py --devices 4
"""

from __future__ import annotations

import argparse

if __name__ == "__main__":  # before the imports below, which take seconds: --help answers at once
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, help="processes (default: all GPUs, else 2)")
    arguments = parser.parse_args()

import random
import sysconfig
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from accelight.state import GradientAccumulationPlugin
from accelight.strategies import AccelFSDPStrategy

NUM_STEPS, ACCUMULATE, SEQUENCES = 5, 4, 3  # sequences of a micro-batch
IGNORED = -100


def sequences(number: int) -> list[Tensor]:
    """Return pieces of 3 to 500 bytes of the standard library's sources."""
    folder, rng = Path(sysconfig.get_path("stdlib")), random.Random(0)
    text = b"".join((folder / f"{name}.py").read_bytes() for name in ("argparse", "datetime", "inspect", "typing"))
    pieces = []
    for _ in range(number):
        begin = rng.randrange(len(text) - 500)
        pieces.append(torch.tensor(list(text[begin : begin + rng.choice((rng.randint(3, 30), rng.randint(3, 500)))])))
    return pieces


def padded(pieces: list[Tensor]) -> dict[str, Tensor]:
    """Return a batch with one row for each sequence."""
    tokens = pad_sequence(pieces, batch_first=True)
    labels = pad_sequence([piece[1:] for piece in pieces], batch_first=True, padding_value=IGNORED)
    attended = pad_sequence([torch.ones_like(piece) for piece in pieces], batch_first=True)
    return {"input_ids": tokens, "attention_mask": attended, "labels": labels}


def packed(pieces: list[Tensor]) -> dict[str, Tensor]:
    """Return a batch whose one row has all sequences, each of which attends to itself alone."""
    owner = torch.cat([torch.full_like(piece, number) for number, piece in enumerate(pieces)])
    seen = (owner[:, None] == owner[None, :]).tril()
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    places = torch.cat([torch.arange(len(piece)) for piece in pieces])
    labels = torch.cat([functional.pad(piece[1:], (0, 1), value=IGNORED) for piece in pieces])
    batch = {"input_ids": torch.cat(pieces), "position_ids": places, "labels": labels[:-1]}
    return {**{name: each[None] for name, each in batch.items()}, "attention_mask": mask[None, None]}


class LanguageModel(LightningModule):
    def __init__(self, batches: list[dict[str, Tensor]] | None = None) -> None:
        super().__init__()
        self.batches = batches or []
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> dict[str, Any]:
        labels = batch["labels"]
        logits = self.model(**{name: each for name, each in batch.items() if name != "labels"}).logits[:, :-1]
        num_tokens = int((labels != IGNORED).sum())
        total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return {"loss": total / num_tokens, "num_items": num_tokens}

    def train_dataloader(self) -> Any:
        own = self.batches[self.trainer.global_rank :: self.trainer.world_size]  # the Trainer's sampler would shuffle
        return DataLoader(own, batch_size=None)  # type: ignore[arg-type] # a list is a dataset

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(average_over: Any, batches: list[dict[str, Tensor]], devices: int) -> dict[str, Tensor]:
    module = LanguageModel(batches)
    strategy = AccelFSDPStrategy(
        fsdp_version=2, gradient_accumulation=GradientAccumulationPlugin(ACCUMULATE, average_over=average_over)
    )
    trainer = Trainer(
        strategy=strategy, devices=devices, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module)
    return {name: each.cpu() for name, each in strategy.full_state_dict(module.model).items()}


def train_on_one_process(pieces: list[Tensor], of_step: int) -> dict[str, Tensor]:
    """Return the weights that training with all tokens of a step in one batch leaves."""
    module = LanguageModel()
    optimizer = module.configure_optimizers()
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        module.training_step(padded(pieces[step * of_step : (step + 1) * of_step]))["loss"].backward()
        optimizer.step()
    return {name: each.detach() for name, each in module.model.state_dict().items()}


def main(devices: int) -> None:
    of_step = devices * ACCUMULATE * SEQUENCES
    pieces = sequences(NUM_STEPS * of_step)
    micro_batches = [pieces[begin : begin + SEQUENCES] for begin in range(0, len(pieces), SEQUENCES)]
    expected = train_on_one_process(pieces, of_step)
    moved = sum((expected[name] - each).square().sum() for name, each in LanguageModel().model.state_dict().items())
    for form in (padded, packed):
        for average_over in ("micro_batches", "items"):
            found = train(average_over, [form(each) for each in micro_batches], devices)
            off = sum((found[name] - each).square().sum() for name, each in expected.items())
            share = float((off / moved).sqrt())
            if torch.distributed.get_rank() == 0:
                print(f"{form.__name__:8} average over {average_over:14} {share:.1e} of the training's way off")
            assert average_over == "micro_batches" or share < 1e-4  # fp32 sums in another order


if __name__ == "__main__":
    main(arguments.devices or torch.accelerator.device_count() or 2)
