"""``python -m tools.docs.plan_plot``: writes the plan's picture of ``docs/howto/plan-memory.md``, in half a minute."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from accelight.command import main

PATH = Path(__file__).parents[2] / "docs" / "plots" / "plan.svg"
COMMAND = "--batch-size 4 --seq-len 2048 --world-size 8 --precision bf16-mixed --memory 24GB"
_LLAMA = {  # the sizes of Llama 3.2 1B
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def write(path: Path) -> None:
    """Write the picture to ``path``."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_LLAMA), encoding="utf-8")
        main(["plan", "--hf-config", folder, *COMMAND.split(), "--plot", str(path)])


if __name__ == "__main__":
    write(PATH)
