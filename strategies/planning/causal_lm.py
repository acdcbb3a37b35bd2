"""A Hugging Face model for a plan: from its config alone, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor

from ..upstream.lightning import LightningModule

_TRANSFORMERS = RequirementCache("transformers>=4.46")


class HuggingFaceModule(LightningModule):
    """A model of transformers with the loss of its own and AdamW, built from a config: nothing is loaded.

    Args:
        config: A folder with ``config.json``, that file, or a model's name on the hub, whose config is downloaded then.
        activation_checkpointing: Whether the model recomputes its layers by its own means.

    Raises:
        ModuleNotFoundError: If transformers is not installed.
        ValueError: If the config names no architecture that transformers has.
    """

    def __init__(self, config: str, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.model: Any = _model_of(config)
        if activation_checkpointing:
            self.model.gradient_checkpointing_enable()
            self.model.config.use_cache = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the model's own loss."""
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Train everything with AdamW."""
        return torch.optim.AdamW(self.parameters())


def causal_lm_batch(batch_size: int, sequence_length: int) -> dict[str, Tensor]:
    """Return what a causal language model is trained on: ``input_ids`` and ``labels``."""
    text = torch.zeros(batch_size, sequence_length, dtype=torch.int64)
    return {"input_ids": text, "labels": text.clone()}


def _model_of(config: str) -> Any:
    if not _TRANSFORMERS:
        raise ModuleNotFoundError(f"--hf-config needs transformers: pip install 'accelight[hf]'. {_TRANSFORMERS}")
    import transformers

    auto: Any = transformers.AutoModelForCausalLM

    found: Any = transformers.AutoConfig.from_pretrained(_folder_or_name(config))
    names = list(getattr(found, "architectures", None) or [])
    for name in names:
        if (architecture := getattr(transformers, name, None)) is not None:
            return architecture(found)
    if not names:
        return auto.from_config(found)
    raise ValueError(
        f"{config} is for {', '.join(names)}, which transformers {transformers.__version__} does not have. Build it in "
        "a LightningModule of your own, and give that."
    )


def _folder_or_name(config: str) -> str:
    path = Path(config)
    return str(path.parent) if path.name == "config.json" and path.is_file() else config
