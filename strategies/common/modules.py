"""Modules around sharding: its artifacts, ties, extra states, quantized weights, and what cannot be sharded."""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from ...checkpoint.manifest import Adapter
from ...checkpoint.names import clean_name
from ...checkpoint.storage import check_no_password
from ..sharded_tensors.shards import FlatShard
from ..upstream.lightning import Callback
from ..upstream.patches import Patches, replace_for_good

T = TypeVar("T")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LOGGING = ("log", "log_dict")
"""Attributes of the module that the Trainer gives to callbacks."""


@dataclass(frozen=True, kw_only=True)
class ShardingArtifacts:
    """A library's artifacts on the modules that it shards."""

    packages: tuple[str, ...]
    """Hooks and functions from modules of Python that begin so are left out."""
    restore: Callable[[dict[str, Any]], None]
    """Takes its marks off the ``vars`` of a layer."""
    own_class: Callable[[nn.Module], type[nn.Module]] = type
    """Returns the class that a layer had before."""
    holds_shards: Callable[[nn.Module], bool]
    """Whether a layer has parameters of its own that are sharded."""
    reason: str
    """The words of an error for them: "parameters that ... has sharded"."""
    way_out: str = ""
    """Another way out than to leave the module out."""


@contextmanager
def strip_sharding(state: Mapping[str, Any], traces: ShardingArtifacts) -> Iterator[None]:
    """Make modules and callbacks in ``state`` picklable inside this context; they stay the same objects.

    Args:
        state: The Trainer's checkpoint. Looked into are dicts, lists and tuples.
        traces: What to take off the modules meanwhile.

    Raises:
        ValueError: If such a module has parameters that are sharded, which nobody could load.
    """
    layers = {layer: path for path, module in found_in(state, nn.Module) for layer in module.modules()}
    callbacks = {id(callback): callback for _, callback in found_in(state, Callback)}.values()
    logging = [(vars(each), {n: vars(each)[n] for n in _LOGGING if n in vars(each)}) for each in callbacks]
    for layer, path in layers.items():
        if traces.holds_shards(layer):
            raise ValueError(
                f"{path} is saved in the checkpoint and holds parameters that {traces.reason} ({path}: "
                f"{traces.own_class(layer).__name__}): it would be saved without their values. Exclude it from the "
                f"data saved next to the weights: save_hyperparameters(ignore=[...]).{traces.way_out}"
            )
    before = {layer: (type(layer), dict(vars(layer))) for layer in layers}
    try:
        for attributes, methods in logging:
            for name in methods:
                del attributes[name]
        for layer in layers:
            _strip(vars(layer), traces)
            _set_class(layer, traces.own_class(layer))
        yield
    finally:
        for attributes, methods in logging:
            attributes.update(methods)
        for layer, (cls, attributes) in before.items():
            vars(layer).clear()
            vars(layer).update(attributes)
            _set_class(layer, cls)


def check_whole(checkpoint: Mapping[str, Any], own: Collection[str]) -> None:
    """Check that what users' code has put into a checkpoint is whole: one process writes it for all.

    Args:
        checkpoint: The Trainer's.
        own: The keys of what the strategy saves itself.

    Raises:
        ValueError: If it holds a sharded tensor.
    """
    for kind in (DTensor, FlatShard):
        for path, _ in found_in({key: one for key, one in checkpoint.items() if key not in own}, kind):
            raise ValueError(
                f"checkpoint[{path}] is a sharded tensor, of which this process has a part, and it writes the file for "
                "all processes. Put the whole tensor there: average[:].clone() in a hook, on every process; or let "
                "accelight.callbacks.ShardedEMA keep averages."
            )


def found_in(value: Any, kind: type[T], path: str = "") -> Iterator[tuple[str, T]]:
    """Yield what is of a kind in nested mappings, lists and tuples, with its path."""
    if isinstance(value, kind):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from found_in(one, kind, f"{path}[{key!r}]" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from found_in(one, kind, f"{path}[{index}]")


def _set_class(layer: nn.Module, cls: type[nn.Module]) -> None:
    if type(layer) is not cls:
        replace_for_good("sharded modules", layer, __class__=cls)


def _strip(attributes: dict[str, Any], traces: ShardingArtifacts) -> None:
    traces.restore(attributes)
    for name, value in list(attributes.items()):
        if callable(value) and not isinstance(value, nn.Module) and _is_foreign(value, traces):
            del attributes[name]
        elif isinstance(value, torch.Tensor) and not value.is_leaf:  # a metric keeps the loss, with hooks on it
            attributes[name] = value.detach()
    foreign = {key for name in _HOOKS for key, hook in attributes[name].items() if _is_foreign(hook, traces)}
    for name, found in attributes.items():
        if "_hooks" in name and isinstance(found, dict):
            attributes[name] = type(found)((key, one) for key, one in found.items() if key not in foreign)


def _is_foreign(function: Any, traces: ShardingArtifacts) -> bool:
    function = getattr(function, "func", function)  # of a partial
    name = str(getattr(function, "__module__", ""))
    return any(name == package or name.startswith(f"{package}.") for package in traces.packages)


def find_ties(model: nn.Module) -> dict[str, str]:
    """Return alias to kept name for parameters that stand under several names; the first name is kept.

    Ask before FSDP1 shards: its flat parameters hide which name is which.
    """
    kept: dict[nn.Parameter, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in kept:
            ties[name] = kept[parameter]
        else:
            kept[parameter] = name
    return ties


# ------------------------------------------------------------------------------------------------
# Extra states of modules in state dicts: ``get_extra_state``.


NAME = "_extra_state"
"""Its last part in a state dict. Source: torch 2.13 ``torch/nn/modules/module.py``."""


def is_extra_state(name: str) -> bool:
    """Return whether a state dict's entry is none of the module's tensors."""
    return name == NAME or name.endswith(f".{NAME}")


def has_extra_state(module: nn.Module) -> bool:
    """Return whether a module has one of its own."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def extra_states(module: nn.Module) -> dict[str, Any]:
    """Return all of them, by their plain names in a state dict."""
    return {name: one.get_extra_state() for name, one in _modules_with_one(module)}


def load_extra_states(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give modules back what ``state`` has of theirs, by plain names."""
    for name, one in _modules_with_one(module):
        if name in state:
            one.set_extra_state(state[name])


def _modules_with_one(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, one in module.named_modules():
        if has_extra_state(one):
            yield clean_name(f"{name}.{NAME}" if name else NAME), one


# ------------------------------------------------------------------------------------------------
# Constants of weights that bitsandbytes holds in 4 and 8 bits: scales and tables, beside the weights in state dicts.
#
# torch's functions for state dicts take the names (``weight.absmax``) for tensors of a parameter, and strict loading
# takes most of them for unexpected. A module brings its own constants with its base: checkpoints hold them for other
# readers, and for a comparison.
#
# Source: bitsandbytes 0.50 ``nn/modules.py``.


_OF_8_BITS = ("SCB", "weight_format")


def is_constant(name: str, tensors: Container[str]) -> bool:
    """Return whether an entry of a state dict belongs to one of its tensors: ``weight.absmax`` to ``weight``."""
    owner, _, last = name.rpartition(".")
    if last in _OF_8_BITS:
        return f"{owner}.weight" in tensors
    while owner:
        if owner in tensors:
            return True
        owner = owner.rpartition(".")[0]
    return False


def constants_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the constants that ``module`` computes with, by plain names in a state dict."""
    found: dict[str, Tensor] = {}
    for name, one in module.named_modules():
        prefix = clean_name(f"{name}." if name else "")
        weight = dict(one.named_parameters(recurse=False)).get("weight")  # PEFT's layers show that of the one inside
        state = getattr(weight, "quant_state", None) or vars(one).get("quant_state")
        if state is not None and hasattr(state, "as_dict"):
            found.update({f"{prefix}weight.{key}": value for key, value in state.as_dict(packed=True).items()})
        scales = getattr(weight, "SCB", None)
        if scales is None:
            scales = getattr(vars(one).get("state"), "SCB", None)
        if isinstance(scales, Tensor):
            found[f"{prefix}SCB"] = scales
    return found


def with_constants(shards: Mapping[str, tuple[Tensor, bool]], module: nn.Module) -> dict[str, tuple[Tensor, bool]]:
    """Return parameters' shards, and the constants beside them, which do not train."""
    return {**shards, **{name: (one, False) for name, one in constants_of(module).items()}}


def check_constants(stored: Mapping[str, Any], module: nn.Module, path: object) -> None:
    """Check that a checkpoint's weights have the constants that ``module`` computes with.

    Args:
        stored: By plain names; others are left.
        module: With a base of its own.
        path: Of the checkpoint.

    Raises:
        RuntimeError: If constants differ.
    """
    for name, own in constants_of(module).items():
        if name in stored and not torch.equal(stored[name].cpu(), own.cpu()):
            raise RuntimeError(
                f"{path} holds quantized weights with another {name} than this module has. Build the module with the "
                "same pretrained weights, quantized in the same way."
            )


@contextmanager
def constants_aside(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Keep constants out of state dicts of ``module``, and of those that it loads.

    Yields:
        Those of these state dicts, by plain names.
    """
    found: dict[str, Any] = {}

    def stash(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        found.update({clean_name(name): state.pop(name) for name in [one for one in state if is_constant(one, state)]})

    saving = module.register_state_dict_post_hook(stash)  # type: ignore[no-untyped-call]
    loading = module.register_load_state_dict_pre_hook(stash)  # type: ignore[no-untyped-call]
    try:
        yield found
    finally:
        saving.remove()
        loading.remove()


def keep_packing(module: nn.Module) -> None:
    """Keep 4-bit weights from being packed in another way in evaluation on a CPU: they may be a shard, or a copy."""
    for one in module.modules():
        if getattr(one, "support_avx512bf16_for_cpu", False):
            replace_for_good("sharded modules", one, support_avx512bf16_for_cpu=False)


# ------------------------------------------------------------------------------------------------
# PEFT's adapters in a module: their configuration, and the names that PEFT saves their weights under.


_ADAPTERS: WeakKeyDictionary[nn.Module, dict[str, Adapter]] = WeakKeyDictionary()


def adapters_of(module: nn.Module, *, is_sharded: bool) -> dict[str, Adapter]:
    """Return PEFT's adapters in a module; call it first before FSDP1 puts wrappers between modules.

    PEFT itself names the weights: its function that saves an adapter is given tensors without values.

    Args:
        module: The LightningModule.
        is_sharded: Whether it has wrappers; then what was found before counts.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None or is_sharded:
        return _ADAPTERS.get(module, {})
    models = [(name, one) for name, one in module.named_modules() if isinstance(one, peft.PeftModel)]
    outermost = [(name, one) for name, one in models if not any(name.startswith(f"{other}.") for other, _ in models)]
    found: dict[str, Adapter] = {}
    for prefix, model in outermost:
        for name, config in model.peft_config.items():
            adapter = None if config.is_prompt_learning else _describe_adapter(peft, model, prefix, name)
            if adapter is not None:
                found[name if len(outermost) == 1 else f"{prefix}.{name}"] = adapter
    _ADAPTERS[module] = found
    return found


def _describe_adapter(peft: Any, model: Any, prefix: str, adapter: str) -> Adapter | None:
    """Return an adapter; None for a kind whose weights PEFT computes when it saves them."""
    stand_ins: dict[str, Tensor] = {
        clean_name(name): torch.empty(0, device="meta") for name in model.state_dict(keep_vars=True)
    }
    names = {id(one): name for name, one in stand_ins.items()}
    own = model.peft_config[adapter]
    base, resized = own.base_model_name_or_path, _is_resized(model, own.base_model_name_or_path)
    own.base_model_name_or_path = None  # else PEFT asks the hub for the size of the vocabulary
    try:
        saved = peft.get_peft_model_state_dict(
            model, state_dict=stand_ins, adapter_name=adapter, save_embedding_layers=True if resized else "auto"
        )
    finally:
        own.base_model_name_or_path = base
    if any(id(one) not in names for one in saved.values()):
        return None
    config = copy.copy(own)
    config.inference_mode = True
    if base is None:
        config.base_model_name_or_path = vars(getattr(model.base_model, "model", model)).get("name_or_path") or None
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        content = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    start = f"{prefix}." if prefix else ""
    return Adapter(content, {name: f"{start}{names[id(one)]}" for name, one in saved.items()})


def _is_resized(model: Any, base: str | None) -> bool:
    """Return whether the vocabulary is another one than that of the model on this disk that the base is."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is None or not base:
        return False
    try:
        return bool(type(model.config).from_pretrained(base, local_files_only=True).vocab_size != size)
    except OSError:  # not on this disk
        return False


# ------------------------------------------------------------------------------------------------
# Lightning's callbacks that would silently be wrong, or fail obscurely, with a sharded model.


PRUNING = (
    "replaces parameters with masked tensors, which are neither sharded nor known to optimizers. "
    "Prune the merged weights after training, or use Trainer(strategy='ddp')."
)


@dataclass(frozen=True)
class GatherReplicas:
    """A metric's ``dist_sync_fn`` where several processes see the same batches: the first one's states count."""

    group_size: int
    """Number of processes that do; they have consecutive ranks."""

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """Return the state of one process of each group."""
        return gather_all_tensors(state, group)[:: self.group_size]


def gather_metrics_once(module: nn.Module, group_size: int, patches: Patches) -> None:
    """Make the metrics in a module count each sample once, except those that choose what they gather.

    Args:
        module: With metrics of torchmetrics among its submodules.
        group_size: Processes that see the same batches; they have consecutive ranks.
        patches: Remove it.
    """
    for metric in module.modules() if group_size > 1 else ():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None and metric.process_group is None:
            patches.put(metric, "dist_sync_fn", GatherReplicas(group_size))


def check_callbacks(callbacks: Iterable[object], refused: Mapping[str, str]) -> None:
    """Check that callbacks can work with a strategy, before it trains.

    Args:
        callbacks: The Trainer's.
        refused: Names of Lightning's classes, and what each does, with what to do instead.

    Raises:
        ValueError: If one of them is of such a class, or saves to a URL with a password in it.
    """
    for callback in callbacks:
        check_no_password(getattr(callback, "dirpath", None) or "")
        lightnings = {cls.__name__ for cls in type(callback).__mro__ if cls.__module__.split(".")[0] != "accelight"}
        for name in lightnings & set(refused):
            raise ValueError(f"{type(callback).__name__} {refused[name]}")


def sparse_embeddings(model: nn.Module) -> Iterator[str]:
    """Yield a message for each embedding that is trained with sparse gradients.

    Args:
        model: Not sharded yet.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            yield (
                f"{clean_name(name)}: {type(module).__name__}(sparse=True) has sparse gradients, which cannot be "
                "reduced into shards. Remove sparse=True, or train with Trainer(strategy='ddp')."
            )


IN_REAL_NUMBERS = (
    "Hold torch.view_as_real(parameter) as the parameter, and compute with torch.view_as_complex(parameter)."
)
"""The way out for a complex parameter that cannot be trained."""

SHARDED_MODEL = "_accelight_sharded_model"
"""Attribute of a module that FSDP has sharded."""
_INSTEAD = (
    "Build a new module. To continue from the trained state, use fit(ckpt_path=...) with a full checkpoint, or "
    "merged weights (merge_fsdp_weights)."
)


def refuse_module_of_fsdp(module: nn.Module) -> None:
    """Refuse a module that FSDP has sharded.

    Raises:
        RuntimeError: If it is one.
    """
    if SHARDED_MODEL in module.__dict__:
        raise RuntimeError(
            f"{type(module).__name__} is already sharded with FSDP, and DeepSpeed cannot use it. {_INSTEAD}"
        )


def refuse_module_of_stage_3(module: nn.Module) -> None:
    """Refuse a module whose parameters DeepSpeed has partitioned.

    Raises:
        RuntimeError: If it is one.
    """
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        raise RuntimeError(
            f"{type(module).__name__} is already partitioned with DeepSpeed's stage 3, and FSDP cannot use it. "
            f"{_INSTEAD}"
        )
