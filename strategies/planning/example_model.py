"""A model and batches for a memory plan: a Hugging Face model from its config alone, without weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor

from ..common.dataloader_state import tensors_in
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
    """Return a batch of a causal language model: ``input_ids`` and ``labels``."""
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
        f"{config} is for {', '.join(names)}, which transformers {transformers.__version__} does not have. Build it "
        "in your own LightningModule, and pass that."
    )


def _folder_or_name(config: str) -> str:
    path = Path(config)
    return str(path.parent) if path.name == "config.json" and path.is_file() else config


# ------------------------------------------------------------------------------------------------
# The batch that a plan trains on: by a specification of shapes, or from the module.


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_SPEC = re.compile(r"(?:(?P<name>[A-Za-z_]\w*):)?(?P<shape>\d+(?:x\d+)*):(?P<dtype>\w+)")


def batch_of(specs: Sequence[str]) -> Any:
    """Return a batch of zeros.

    Args:
        specs: Such as ``"input_ids:8x2048:int64"``: all with names make a dict. Without names, one makes a tensor,
            several a tuple.

    Raises:
        ValueError: If one cannot be read, or some have names and others not.
    """
    found = [_parsed(spec) for spec in specs]
    names = [name for name, _ in found]
    if all(name is not None for name in names):
        return dict(found)
    if any(name is not None for name in names):
        raise ValueError(f"Name all tensors of the batch, or none; got {', '.join(specs)}.")
    tensors = tuple(tensor for _, tensor in found)
    return tensors[0] if len(tensors) == 1 else tensors


def is_tensor(spec: str) -> bool:
    """Return whether a specification, which may not be readable, is of a tensor, and not ``module:function``."""
    return _SPEC.fullmatch(spec) is not None or spec.rpartition(":")[2] in _DTYPES


def _parsed(spec: str) -> tuple[str | None, torch.Tensor]:
    match = _SPEC.fullmatch(spec)
    if match is None or match["dtype"] not in _DTYPES:
        raise ValueError(
            f"{spec!r} is not a tensor of a batch: expected NAME:SHAPE:DTYPE or SHAPE:DTYPE, such as "
            f"input_ids:8x2048:int64, with DTYPE one of {', '.join(_DTYPES)}."
        )
    shape = [int(length) for length in match["shape"].split("x")]
    return match["name"], torch.zeros(shape, dtype=_DTYPES[match["dtype"]])


def batch_size_of(batch: Any) -> int:
    """Return the length of the first tensor that has one.

    Raises:
        ValueError: If there is no tensor.
    """
    for tensor in tensors_in(batch):
        if tensor.ndim:
            return tensor.shape[0]
    raise ValueError(f"The batch holds no tensor with a length: {type(batch).__name__}. Pass a batch as in training.")
