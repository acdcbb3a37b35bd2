"""``python -m accelight.strategies.deepspeed.universal CHECKPOINT``: to DeepSpeed's universal form, by hand."""

from __future__ import annotations

from .checkpoints.universal import main

if __name__ == "__main__":
    main()
