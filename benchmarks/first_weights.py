"""Peak memory of each process while a Hugging Face model gets its first weights under AccelFSDPStrategy.

Every process builds it, rank 0 sends it (``cpu_ram_efficient_loading``), or all read their slices
(``pretrained_weights``). The files hold bf16, the model fp32: with equal dtypes transformers maps the files, which
costs page cache alone. ACCELIGHT_BENCH_HIDDEN sets the model's width: 1024 (the default) makes about 1.0 GB in fp32.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

NUM_PROCESSES = 2
VARIANTS = ("every process", "from rank 0", "from files")


def run() -> None:
    """Start a job for each variant and print what its processes report."""
    hidden = os.environ.get("ACCELIGHT_BENCH_HIDDEN", "1024")
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = int(_start(["save", folder, hidden], 1)[-1].split()[-1])
        largest = int(hidden) * 32000 * 4
        print(f"model: {num_bytes / 1e6:.0f} MB in fp32, largest tensor {largest / 1e6:.0f} MB, 2 processes")
        print(f"{'first weights':16} {'rank 0':>10} {'rank 1':>10}   peak of anonymous memory over the start, MB")
        for variant in VARIANTS:
            lines = sorted(
                line for line in _start(["load", folder, variant], NUM_PROCESSES) if line.startswith("rank ")
            )
            peaks = [float(line.split()[-1]) for line in lines]
            print(f"{variant:16} {peaks[0]:10.0f} {peaks[1]:10.0f}")


def _start(arguments: list[str], num_processes: int) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    done = subprocess.run([*launcher, __file__, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def _anonymous_mb() -> float:
    """Memory that is this process's own: pages of mapped files are the system's to take back."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(("RssAnon", "RssShmem"))) / 1e3


class _Peak(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_mb = self.peak_mb = _anonymous_mb()

    def run(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, _anonymous_mb())
            time.sleep(0.002)


def _config(hidden: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=32000,
        tie_word_embeddings=True,
    )


def _save(folder: str, hidden: str) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(_config(int(hidden)))
    model.bfloat16().save_pretrained(folder, max_shard_size="200MB")
    print("bytes:", sum(parameter.numel() * 4 for parameter in model.parameters()))


def _load(folder: str, variant: str) -> None:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from transformers import AutoModelForCausalLM

    from accelight.strategies import AccelFSDPStrategy

    class Module(LightningModule):
        def configure_model(self) -> None:
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.model(input_ids=batch, labels=batch).loss

        def on_fit_start(self) -> None:  # sharded by now
            print(f"rank {self.global_rank}: {peak.peak_mb - peak.start_mb:.0f}", flush=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    options: dict[str, dict[str, Any]] = {
        "every process": {},
        "from rank 0": {"cpu_ram_efficient_loading": True},
        "from files": {"pretrained_weights": folder},
    }
    strategy = AccelFSDPStrategy(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **options[variant])
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=NUM_PROCESSES,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    peak = _Peak()
    peak.start()
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(4, 8, dtype=torch.long)))  # type: ignore[arg-type]


if __name__ == "__main__":
    {"save": _save, "load": _load}[sys.argv[1]](sys.argv[2], sys.argv[3])
