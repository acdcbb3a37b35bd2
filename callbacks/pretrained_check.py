"""Whether ``from_pretrained`` would build the model whose weights are written: checked before anything is trained."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from ..checkpoint.names import clean_name
from .pretrained_files import PretrainedFiles, own_class

_MOST_NAMES = 4
_INSTEAD = (
    "MergeShardedCheckpoint(pretrained_files=False) writes the weights alone, for load_state_dict of a model that is "
    "built in the same way"
)


def check_loadable(files: PretrainedFiles, module: nn.Module, trained: nn.Module | None = None) -> None:
    """Check that the model's class, built from its configuration, has the parameters that the trained one has.

    ``from_pretrained`` builds just that, initialises what it does not find and leaves out what it does not know, with
    no more than a warning. Buffers and shapes are not compared: without a word, nothing of them is lost.

    Args:
        files: The model and where it is.
        module: The LightningModule, sharded or not.
        trained: What the strategy has made of it, if it has.

    Raises:
        ValueError: If it has others.
    """
    model: nn.Module = files.model
    what = f"{files.prefix or 'the module'} ({own_class(model).__name__})"
    if _has_peft_around(files.prefix, module):
        raise ValueError(
            f"{what} is trained through PEFT, whose own parameters from_pretrained would not load with it. {_INSTEAD}; "
            "its save_pretrained then writes the adapter."
        )
    built = _built_anew(model, what)
    if built is None:
        return
    prefix = f"{files.prefix}." if files.prefix else ""
    names = [*_parameter_names(module), *(_flat_names(trained) if trained is not None else ())]
    found = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    ties: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in built.named_parameters(remove_duplicate=False):
        ties[parameter].append(name)
    tied = {name: names for names in ties.values() for name in names}
    missing = [name for name in tied if not found & set(tied[name])]
    unknown = sorted(found - set(tied))
    if getattr(model.config, "quantization_config", None) is not None:  # its layers are put in after the model is built
        missing, unknown = [], [name for name in unknown if "base_layer" in name.split(".")]
    if missing or unknown:
        raise ValueError(
            f"from_pretrained could not load what {what} is trained as: built from its configuration, it has no "
            f"{_listed(unknown) or 'further parameters'}, and "
            f"{f'would initialise {_listed(missing)} anew' if missing else 'all others'}. Were layers replaced or "
            f"added (adapters such as LoRA), or removed? {_INSTEAD}."
        )


def check_complete(files: PretrainedFiles, module: nn.Module) -> None:
    """Check that nothing of the model is frozen, for a strategy that leaves what is frozen out of its checkpoints.

    Raises:
        ValueError: If something is.
    """
    prefix = f"{files.prefix}." if files.prefix else ""
    named = [(clean_name(name), parameter) for name, parameter in module.named_parameters()]
    frozen = [name for name, one in named if name.startswith(prefix) and not one.requires_grad]
    if frozen:
        raise ValueError(
            f"exclude_frozen_parameters=True leaves {_listed(frozen)} out of checkpoints, and so of what is merged: "
            f"from_pretrained would initialise them anew. Leave exclude_frozen_parameters out; or {_INSTEAD}, with "
            "strict=False."
        )


def _has_peft_around(prefix: str, module: nn.Module) -> bool:
    """Whether a module around the model has PEFT's configuration; layers inside of it show by their names."""
    around: list[Any] = []
    for attribute in prefix.split(".")[:-1]:
        inner: Any = getattr(around[-1] if around else module, attribute, None)
        if inner is None:  # hidden by a wrapper
            break
        around.append(inner)
    return any(getattr(one, "peft_config", None) is not None for one in around)


def _built_anew(model: Any, what: str) -> nn.Module | None:
    """Return the model as ``from_pretrained`` builds it, without memory; None, said so, where its class needs more."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return own_class(model)(copy.deepcopy(model.config))
    except Exception as error:  # noqa: BLE001 (a class of one's own may do anything; then nothing is checked)
        rank_zero_warn(
            f"Whether from_pretrained can load {what} could not be checked before training: built from its "
            f"configuration on the meta device, it raises {type(error).__name__}: {error}"
        )
        return None


def _parameter_names(model: nn.Module) -> Iterator[str]:
    """Yield all names of all parameters, sharded or not, tied ones under each."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not hasattr(parameter, "_fqns"):
            yield clean_name(name)
    yield from _flat_names(model)


def _flat_names(model: nn.Module) -> Iterator[str]:
    """Yield the names of the parameters in FSDP1's flat ones; that of the root is outside of the LightningModule."""
    for name, parameter in model.named_parameters():
        prefix, _, _ = name.rpartition(".")
        for inside in getattr(parameter, "_fqns", ()):
            yield clean_name(f"{prefix}.{inside}" if prefix else inside)


def _listed(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
