"""Train a small byte-level language model on Python's own standard library, merge its checkpoint, and use it again.

It leaves a report in ``demo_output/report.html``: what ran, loss and gradient norm, the merged file, how to go on.

python examples/train_gpt.py                             # two CPU processes, or every GPU
python examples/train_gpt.py --strategy accel_fsdp1 --accumulate 4 --steps 50
python examples/train_gpt.py --strategy accel_deepspeed_stage_3 --steps 50
torchrun --nproc-per-node 3 examples/train_gpt.py --devices 3
"""

from __future__ import annotations

import argparse
import html
import logging
import math
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before the imports below, which take seconds: --help answers at once
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = ["accel_fsdp1", "accel_fsdp2", "accel_deepspeed_stage_2", "accel_deepspeed_stage_3"]
    parser.add_argument("--strategy", choices=choices, default="accel_fsdp2")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, help="processes on this machine (default: all GPUs, else 2)")
    parser.add_argument("--precision", default="32-true", help="32-true, bf16-mixed, 16-mixed, bf16-true, 16-true")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches for each optimizer step")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--output", type=Path, default=Path("demo_output"))
    parser.add_argument("--use", type=Path, nargs=2, metavar=("WEIGHTS", "LOGITS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

CONTEXT, WIDTH, HEADS, DEPTH = 128, 128, 4, 4
PROMPT = b"import os\nimport sys\n\n\ndef main():\n"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(DEPTH)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Logits [batch, length, 256] of each next byte after ``text`` [batch, length]."""
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        return self.head(self.norm(self.blocks(x)))


class LanguageModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT()
        self.started, self.num_batches = time.monotonic(), 0
        self.losses: list[Tensor] = []  # since the last line printed
        self.curves: dict[str, list[float]] = {"loss": [], "grad_norm": []}  # of each optimizer step

    def loss(self, batch: list[Tensor]) -> Tensor:
        text = batch[0].long()
        return functional.cross_entropy(self.model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.detach())
        self.num_batches += 1
        if self.num_batches % 50 == 0:
            tokens = self.num_batches * batch[0].shape[0] * CONTEXT * self.trainer.world_size
            mean, speed = torch.stack(self.losses).mean(), tokens / (time.monotonic() - self.started)
            self.print(f"batch {self.num_batches:5}   loss {mean:.3f}   {speed:,.0f} tokens/s")
            self.losses.clear()
        return loss

    def on_train_start(self) -> None:
        self.started = time.monotonic()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step > len(self.curves["loss"]):
            for name, values in self.curves.items():
                values.append(float(self.trainer.callback_metrics[name]))

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        return self.model(batch[0].long())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.01)


class StandardLibrary(LightningDataModule):
    """Windows of CONTEXT + 1 bytes over the sources of Python's standard library."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        windows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
        windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
        self.train, self.val = windows[256:], windows[:256]

    def unigram_loss(self) -> float:
        """Loss of the best model that knows only how frequent each byte is."""
        counts = torch.bincount(self.train.flatten().long(), minlength=256) + 1.0
        return -(counts / counts.sum()).log()[self.val.flatten().long()].mean().item()

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(self.train), self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(self.val), self.batch_size)


def use_merged(weights: Path, expected: Path) -> None:
    """In a process of its own, with torch and safetensors alone: check the logits, then write a few lines."""
    from safetensors.torch import load_file

    assert "accelight" not in sys.modules
    model = GPT().eval()
    model.load_state_dict(load_file(weights))
    text, logits = torch.frombuffer(bytearray(PROMPT), dtype=torch.uint8)[None].long(), torch.load(expected)
    with torch.no_grad():
        difference = (model(text) - logits).abs().max().item()
        # Not bit for bit: the sharded run computed with other thread counts, on a GPU, or in lower precision.
        tolerance = (1e-4 if logits.dtype == torch.float32 else 0.05) * logits.abs().max().item()
        assert difference <= tolerance, f"logits differ by {difference}, more than {tolerance}"
        print(f"logits differ by at most {difference:.1e} from the trained model's")
        for _ in range(240):
            probabilities = functional.softmax(model(text[:, -CONTEXT:])[:, -1] / 0.7, dim=-1)
            text = torch.cat([text, torch.multinomial(probabilities, 1)], dim=1)
    print("---\n" + bytes(text[0].tolist()).decode(errors="replace") + "\n---")


class RunSummary(logging.Handler):
    """Keeps what the strategy logs of the run at its start."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("accelight "):
            self.text = record.getMessage()


def chart(what: str, values: Sequence[float]) -> str:
    """A curve over the optimizer steps, as SVG."""
    points = [(step, value) for step, value in enumerate(values, 1) if math.isfinite(value)]  # fp16 skips some steps
    if not points:
        return f"<p>No {what} was finite.</p>"
    low, high = min(value for _, value in points), max(value for _, value in points)
    x, y = 640 / max(len(values) - 1, 1), 180 / ((high - low) or 1)
    line = " ".join(f"{50 + (step - 1) * x:.1f},{190 - (value - low) * y:.1f}" for step, value in points)
    words = f"{what}: {points[0][1]:.3g} at step {points[0][0]}, {points[-1][1]:.3g} at step {points[-1][0]}"
    return f"""<figure><svg viewBox="0 0 700 220" role="img" aria-label="{words}" font-size="12" fill="currentColor">
<title>{words}</title><path d="M50 10V190H690" fill="none" stroke="currentColor" opacity="0.4"/>
<text x="44" y="14" text-anchor="end">{high:.3g}</text><text x="44" y="194" text-anchor="end">{low:.3g}</text>
<text x="50" y="208">1</text><text x="690" y="208" text-anchor="end">step {len(values)}</text>
<polyline points="{line}" fill="none" stroke="#1b6ca8" stroke-width="1.5"/></svg>
<figcaption>{words}</figcaption></figure>"""


def write_report(path: Path, model: LanguageModel, texts: dict[str, str]) -> None:
    """One page without scripts or anything from the network."""
    ran, result, merged, written = (html.escape(texts[name]) for name in ("ran", "result", "merged", "written"))
    path.write_text(f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>accelight: the demo</title>
<style>:root {{ color-scheme: light dark }} body {{ max-width: 46rem; margin: 2rem auto; padding: 0 1rem;
font: 16px/1.5 system-ui, sans-serif }} figure {{ margin: 0 }} svg {{ width: 100%; height: auto }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere }}</style>
<h1>A language model, sharded</h1>
<h2>What ran</h2><pre>{ran}</pre><p>{result}</p>
<h2>Loss</h2>{chart("loss", model.curves["loss"])}
<h2>Gradient norm, before clipping at 1</h2>{chart("gradient norm", model.curves["grad_norm"])}
<h2>The merged file</h2><p>{merged}</p>
<p>A process with torch and safetensors alone loaded it, compared its logits, and wrote a few lines:</p>
<pre>{written}</pre>
<h2>How to go on</h2><ul>
<li>Train the same under another strategy: <code>python examples/train_gpt.py --strategy accel_fsdp1</code></li>
<li>Look into the sharded checkpoint: <code>accelight inspect {html.escape(str(path.parent / "checkpoint"))}</code></li>
<li>Plan the memory of your model: <code>accelight plan train.py:Model --batch 8x2048:int64 --plot plan.svg</code></li>
<li>Choose a strategy: <code>docs/choosing.md</code>; move your code: <code>docs/from-lightning.md</code></li>
</ul></html>
""", encoding="utf-8")  # fmt: skip


def train(args: argparse.Namespace) -> None:
    from accelight.callbacks import GradNormMonitor
    from accelight.checkpoint import merge_fsdp_weights
    from accelight.state import PartialState
    from accelight.strategies import AccelDeepSpeedStrategy, AccelFSDPStrategy

    number = int(args.strategy[-1])  # FSDP's version, or ZeRO's stage
    strategy: Any = AccelDeepSpeedStrategy(zero_stage=number) if "deepspeed" in args.strategy else AccelFSDPStrategy(
        fsdp_version=number,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type="sharded_state_dict",
    )  # fmt: skip
    trainer = Trainer(
        strategy=strategy, accelerator=args.accelerator, devices=args.devices, precision=args.precision,
        max_steps=args.steps, accumulate_grad_batches=args.accumulate, gradient_clip_val=1.0,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, logger=False,
        num_sanity_val_steps=0, check_val_every_n_epoch=1_000_000,  # validated once, below
        callbacks=[GradNormMonitor()],
    )  # fmt: skip
    summary = RunSummary()
    logging.getLogger("lightning.pytorch").addHandler(summary)
    model, data = LanguageModel(), StandardLibrary(batch_size=16)
    trainer.print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {data.train.numel():,} bytes of text")
    trainer.fit(model, data)
    [metrics] = trainer.validate(model, data, verbose=False)
    result = f"validation loss {metrics['val_loss']:.3f}, that of a unigram model {data.unigram_loss():.3f}"
    trainer.print(result)

    state, checkpoint, merged = PartialState(), args.output / "checkpoint", args.output / "merged"
    trainer.save_checkpoint(checkpoint)
    for shard in sorted([*checkpoint.glob("*.distcp"), *checkpoint.rglob("*_states.pt")]):
        state.print(f"{shard}   {shard.stat().st_size:,} bytes")
    prompt = torch.frombuffer(bytearray(PROMPT), dtype=torch.uint8)
    prompts = DataLoader(TensorDataset(prompt.repeat(trainer.world_size, 1)))  # one for each process
    predictions: Any = trainer.predict(model, prompts)
    report = merge_fsdp_weights(checkpoint, merged, strip_prefix="model")
    words = f"merged {report.num_tensors} tensors, {report.num_bytes:,} bytes, in {report.seconds:.2f} s"
    state.print(words)
    assert metrics["val_loss"] < data.unigram_loss() - 0.3 or args.steps < 200, "the model has learnt too little"
    if state.is_main_process:
        torch.save(predictions[0].cpu(), args.output / "logits.pt")
        weights, expected = merged / "model.safetensors", args.output / "logits.pt"
        command = [sys.executable, __file__, "--use", weights, expected]
        written = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        print(written, end="")
        texts = {"ran": summary.text, "result": result, "merged": f"{weights}: {words}", "written": written}
        write_report(args.output / "report.html", model, texts)
        print(f"report: {args.output / 'report.html'}")


if __name__ == "__main__":
    if arguments.devices is None:
        arguments.devices = max(torch.accelerator.device_count(), 1) if torch.accelerator.is_available() else 2
    if arguments.use:
        use_merged(*arguments.use)
    else:
        train(arguments)
