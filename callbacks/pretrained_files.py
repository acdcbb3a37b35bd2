"""What belongs beside the weights of a Hugging Face model: configuration, tokenizer, processors."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..checkpoint.names import clean_name

_COMPANIONS = ("tokenizer", "processor", "image_processor", "feature_extractor")


@dataclass(frozen=True)
class PretrainedFiles:
    """A Hugging Face model inside a LightningModule, and what is saved with it."""

    prefix: str
    """The attribute that holds it; empty if it is the module itself."""
    model: Any
    companions: tuple[Any, ...]

    def write(self, folder: Path, dtype: str | None) -> None:
        """Save everything but the weights.

        Args:
            folder: Where; made where missing.
            dtype: What the weights are converted to, if they are.
        """
        config = copy.deepcopy(self.model.config)
        config.architectures = [own_class(self.model).__name__]
        if dtype is not None:
            setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)
        config.save_pretrained(folder)
        if getattr(self.model, "generation_config", None) is not None:
            self.model.generation_config.save_pretrained(folder)
        for companion in self.companions:
            companion.save_pretrained(folder)


def find_pretrained(
    module: nn.Module, strip_prefix: str | None, others: tuple[Any, ...] = ()
) -> PretrainedFiles | None:
    """Find the Hugging Face model that is to be saved.

    Args:
        module: The LightningModule.
        strip_prefix: Where the user says that it is; None or ``"auto"`` takes the only one there is.
        others: Where to look for a tokenizer beside ``module`` (a datamodule).
    """
    modeling = sys.modules.get("transformers.modeling_utils")  # imported by whoever made such a model
    if modeling is None:
        return None
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        name = clean_name(name)
        inside = any(name.startswith(f"{outer}.") or not outer for outer in found if outer != name)
        if isinstance(child, modeling.PreTrainedModel) and not inside:
            found[name] = child
    if strip_prefix not in (None, "auto"):
        found = {name: child for name, child in found.items() if name == strip_prefix}
    if len(found) != 1:
        return None
    [(prefix, model)] = found.items()
    companions: dict[str, Any] = {}
    for owner in (module, *others):
        for attribute in _COMPANIONS:
            companion = getattr(owner, attribute, None)
            if hasattr(companion, "save_pretrained"):
                companions.setdefault(attribute, companion)
    return PretrainedFiles(prefix, model, tuple(companions.values()))


def own_class(model: nn.Module) -> Any:
    """Return the model's class before FSDP2 made a class of its own of it."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
