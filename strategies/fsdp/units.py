"""The units of a model: which modules shard together, wrappers around them, refused models, master weights."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import enable_wrap
from torch.utils.checkpoint import CheckpointError

from ...checkpoint.files import listed
from ...checkpoint.names import WRAPPER_NAMES, clean_name
from ..common.modules import IN_REAL_NUMBERS, sparse_embeddings
from ..upstream.lightning import rank_zero_warn
from ..upstream.patches import replace_for_good
from ..upstream.torch_core import ActivationWrapper
from .settings import EngineSettings, PrecisionSettings, resolve_ignored, units_to_wrap


@dataclass(frozen=True)
class Plan:
    """The model that an engine shards."""

    units: list[nn.Module] = field(default_factory=list)
    """Gathered and freed on their own; children before parents."""
    ignored: set[nn.Module] = field(default_factory=set)
    """Modules whose own tensors stay unsharded."""
    scalars: frozenset[nn.Parameter] = frozenset()
    """Parameters without a dimension, which stay unsharded: nothing of them can be cut."""
    parts: list[nn.Module] = field(default_factory=list)
    """Empty where one root unit is gathered around the whole training step; else what stands in its place, see
    `parts_called_alone`."""
    deferred_init: bool = False
    """Whether all of the model is on the meta device, and its values come afterwards."""


def scalars_of(model: nn.Module, ignored: set[nn.Module]) -> frozenset[nn.Parameter]:
    """Return the parameters without a dimension (a temperature, CLIP's ``logit_scale``) outside of ignored modules."""
    unmanaged = {parameter for module in ignored for parameter in module.parameters(recurse=False)}
    return frozenset(one for one in model.parameters() if not one.ndim and one not in unmanaged)


def parts_called_alone(model: nn.Module, ignored: set[nn.Module]) -> list[nn.Module]:
    """Return the outermost modules of a LightningModule in manual optimization; nothing in automatic optimization.

    Automatic optimization runs one backward after ``training_step``, and a root unit stays gathered until then. In
    manual optimization backward runs inside ``training_step``, often several times with steps in between: a root unit
    would be gone after the first backward, and could not see ``toggle_optimizer``. So each child is gathered around
    its own calls instead. Containers without a ``forward`` are looked into.

    Args:
        model: What the strategy shards.
        ignored: Modules that are left alone.
    """
    if getattr(model, "automatic_optimization", True):
        return []
    return list(dict.fromkeys(_callable_children(model, ignored)))


def modules_outside(model: nn.Module, parts: list[nn.Module]) -> set[nn.Module]:
    """Return the modules outside of all ``parts``."""
    inside = {submodule for part in parts for submodule in part.modules()}
    return set(model.modules()) - inside


def _callable_children(module: nn.Module, ignored: set[nn.Module]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        if child in ignored or next(child.parameters(), None) is None:
            continue
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += _callable_children(child, ignored)
        else:
            found.append(child)
    return found


# ------------------------------------------------------------------------------------------------
# Parameters that are gathered and reduced together in addition to the wrap policy: ties and the output head.


_WORTH_A_COLLECTIVE = 2**20
"""Below about a million parameters, starting a collective takes longer than sending them."""


def without_split_ties(
    model: nn.Module, units: list[nn.Module], unsharded: Collection[nn.Module] = ()
) -> list[nn.Module]:
    """Return ``units`` without those that hold one use of a tied parameter while another use is outside of them.

    A module that several others hold is such a use for each of them, unless it is in a unit of its own.

    Their parameters then belong to the unit around all uses, at last to the root's. Two groups must not manage one
    parameter: FSDP1 would train two copies, and FSDP2 fails at the first forward since torch 2.13
    (huggingface/accelerate#4171).

    Args:
        model: The root.
        units: Candidates, children before parents.
        unsharded: Modules that nobody shards.
    """
    ties = [users for users in _users(model, unsharded).values() if len(users) > 1]
    kept = [unit for unit in units if not any(_splits(unit, users) for users in ties)]
    kept = _without_shared_modules(model, kept, unsharded)
    if len(kept) < len(units):
        names = {module: name for name, module in model.named_modules()}
        rank_zero_warn(
            "These modules share parameters with modules outside them, and are gathered with their parent's unit "
            f"instead of on their own: {', '.join(names[unit] for unit in units if unit not in kept)}."
        )
    return kept


def without_attention_of_encoders(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Return ``units`` without the attention of ``nn.TransformerEncoderLayer``, which reads its weights itself.

    In evaluation the layer hands them to one fused operation, past the attention's own forward.

    Args:
        model: Not sharded yet.
        units: What is to be gathered on its own.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    read = {inner for layer in layers for inner in layer.modules() if inner is not layer}
    return [unit for unit in units if unit not in read]


def output_heads(model: nn.Module, units: list[nn.Module], unsharded: Collection[nn.Module]) -> list[nn.Module]:
    """Return the large linear layers registered after the last unit, output heads as a rule.

    In the root's unit they would be gathered before the first layer runs, and reduced after the last one has, with
    nothing to hide behind. In a group of their own they are gathered while layers compute, their gradients are reduced
    first, and a step that does not use them does not gather them. The embeddings and the final norm stay with the
    root: what is needed first is gathered first either way, and a group more would be a collective more.

    Args:
        model: The root.
        units: What is sharded on its own already.
        unsharded: Modules that nobody shards.
    """
    taken = {submodule for unit in units for submodule in unit.modules()}
    users = _users(model, unsharded)
    modules = list(model.modules())
    last = max((index for index, module in enumerate(modules) if module in taken), default=len(modules))
    return [
        module
        for module in modules[last + 1 :]
        if type(module) is nn.Linear
        and module not in unsharded
        and module.weight.numel() >= _WORTH_A_COLLECTIVE
        and all(len(users[parameter]) == 1 for parameter in module.parameters())
    ]


def _users(model: nn.Module, unsharded: Collection[nn.Module]) -> dict[nn.Parameter, list[nn.Module]]:
    """Return the modules that hold each parameter themselves; without parameters of ``unsharded``."""
    unmanaged = {parameter for module in unsharded for parameter in module.parameters(recurse=False)}
    users: dict[nn.Parameter, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter not in unmanaged:
                users[parameter].append(module)
    return users


def _without_shared_modules(
    model: nn.Module, units: list[nn.Module], unsharded: Collection[nn.Module]
) -> list[nn.Module]:
    """Leave out units that would gather a module which is called from outside of them, too."""
    holders = Counter(child for module in model.modules() for child in module.children())
    if max(holders.values(), default=0) < 2:
        return units
    kept: list[nn.Module] = []
    for unit in units:
        inside = set(unit.modules())
        on_their_own = {module for other in kept if other in inside for module in other.modules()}
        gathered = {
            module
            for module in inside - on_their_own - set(unsharded)
            if next(module.parameters(recurse=False), None) is not None
        }
        if gathered.isdisjoint(_reachable_without(model, unit)):
            kept.append(unit)
    return kept


def _reachable_without(model: nn.Module, unit: nn.Module) -> set[nn.Module]:
    found, waiting = {model}, [model]
    while waiting:
        new = {child for child in waiting.pop().children() if child is not unit} - found
        found |= new
        waiting += new
    return found


def _splits(unit: nn.Module, users: list[nn.Module]) -> bool:
    inside = set(unit.modules())
    return 0 < sum(module in inside for module in users) < len(users)


# ------------------------------------------------------------------------------------------------
# ``wrap(module)`` of torch inside ``configure_model()``: the module becomes a unit, when the model is complete.


_ATTRIBUTE = "_accelight_marked_unit"


@contextmanager
def marking_units() -> Iterator[None]:
    """Make ``torch.distributed.fsdp.wrap.wrap`` mark modules instead of wrapping them."""
    with enable_wrap(wrapper_cls=_mark):
        yield


def is_marked(module: nn.Module) -> bool:
    """Return whether the user called ``wrap`` on ``module``."""
    return bool(module.__dict__.get(_ATTRIBUTE, False))


def _mark(module: nn.Module, **options: Any) -> nn.Module:
    if options:
        raise TypeError(
            f"wrap({type(module).__name__}(...), {', '.join(sorted(options))}=...): under AccelFSDPStrategy wrap() "
            "only selects units, and accepts no options. Pass these to the strategy."
        )
    module.__dict__[_ATTRIBUTE] = True
    return module


# ------------------------------------------------------------------------------------------------
# Wrapping units before sharding: activation checkpointing, and around that `torch.compile`.
#
# The outermost wrapper becomes the unit. With sharding outside, the parameters that backward has gathered serve the
# recomputation too, and no compiled graph is broken by the hooks that gather. Wrapper names never reach a state dict.
# Compiling wraps nothing: modules keep their classes, and parameters their names.


def checkpoint_units(model: nn.Module, units: list[nn.Module], *, offload: bool = False) -> list[nn.Module]:
    """Put a checkpoint wrapper around each unit inside ``model`` and return the wrappers, in the same order.

    Args:
        model: The root.
        units: Children before parents.
        offload: Keep what a wrapper saves, the unit's inputs, in host memory until backward.

    Raises:
        ValueError: If there is no unit.

    Source: accelerate 1.15 ``utils/fsdp_utils.py`` (``fsdp2_apply_ac``), which offloads with FSDP2 alone.
    """
    _require_units(units, "activation_checkpointing=True recomputes")
    return checkpoint_modules(model, units, units, offload=offload)


def checkpoint_modules(
    model: nn.Module, modules: list[nn.Module], units: list[nn.Module], *, offload: bool = False
) -> list[nn.Module]:
    """Put a checkpoint wrapper around any modules inside ``model``; return the units, some of them in wrappers now.

    Args:
        model: The root.
        modules: What is recomputed, children before parents.
        units: Children before parents.
        offload: As for units.

    Raises:
        ValueError: If there is no module to recompute.
    """
    from ..upstream.torch_core import CheckpointWrapper, checkpoint_wrapper, offload_wrapper

    def wrapper(unit: nn.Module) -> nn.Module:
        checkpointed = unit if isinstance(unit, CheckpointWrapper) else checkpoint_wrapper(unit)
        return offload_wrapper(checkpointed) if offload else checkpointed

    if not modules:
        raise ValueError(
            f"activation_checkpointing_policy selects no module of {type(model).__name__}. Pass classes of modules "
            "in the model, or a policy that returns True for some of them."
        )
    wrappers = _wrap(model, modules, wrapper)
    return [wrappers.get(unit, unit) for unit in units]


def explained_recomputation(error: BaseException) -> RuntimeError | None:
    """Return the error for a recomputation that differs from the forward."""
    if not isinstance(error, CheckpointError):
        return None
    return RuntimeError(
        "Activation checkpointing recomputed something other than the forward. Usually, parameters were frozen or "
        "unfrozen between training_step() and its backward (in on_before_zero_grad or on_before_backward), or the "
        "forward is not deterministic. Freeze before training_step(), or disable activation_checkpointing. With "
        "sp_size or cp_size > 1, give torch.utils.checkpoint a module, and not a function that calls attention itself. "
        f"torch says: {str(error).partition('.')[0]}."
    )


def compile_units(units: Iterable[nn.Module], options: Mapping[str, Any]) -> None:
    """Compile the ``forward`` of each unit at its first call.

    Not the whole call, as ``unit.compile()`` would: the hooks by which FSDP2 gathers belong to it, and would break each
    graph.

    Args:
        units: The units, in their wrappers.
        options: Keyword arguments of `torch.compile`.

    Raises:
        ValueError: If there is no unit.
    """
    units = list(units)
    _require_units(units, "compile compiles")
    for unit in units:
        compiled: Any = _traceable(unit)
        replace_for_good("sharded modules", compiled, forward=torch.compile(compiled.forward, **options))


def hide_wrapper_names(root: nn.Module) -> None:
    """Give ``named_parameters()`` and ``named_modules()`` of users' code the names that the model had.

    A wrapper stands under the name of what it wraps. torch's wrappers add a component of their own to every name.
    """
    for module in list(root.modules()):
        if _can_be_hidden(module):
            replace_for_good("sharded modules", module, named_modules=partial(_named_modules, module))


@contextmanager
def without_wrappers(root: nn.Module) -> Iterator[None]:
    """Register modules without their wrappers in this context: their classes, names and children are the original ones.

    A wrapper below a unit of FSDP1 with a flat parameter stays: the flat parameter is the wrapper's.
    """
    places = [
        (parent, name, child)
        for parent in list(root.modules())
        if not isinstance(parent, FullyShardedDataParallel | ActivationWrapper)
        for name, child in parent._modules.items()
        if child is not None and _can_be_hidden(child)
    ]
    for parent, name, child in places:
        parent._modules[name] = _wrapped(child)
    try:
        yield
    finally:
        for parent, name, child in places:
            parent._modules[name] = child


def _wrapped(module: nn.Module) -> nn.Module:
    while _can_be_hidden(module):
        module = next(module.children())
    return module


def _can_be_hidden(module: nn.Module) -> bool:
    """Return whether a module stands for the one that it wraps; flat parameters are the wrapper's own."""
    if isinstance(module, FullyShardedDataParallel):
        return bool(module._use_orig_params)
    return isinstance(module, ActivationWrapper)


def _named_modules(
    wrapper: nn.Module, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    memo = set() if memo is None else memo
    if wrapper in memo:
        return
    if remove_duplicate:
        memo.add(wrapper)
    yield prefix, wrapper
    for name, child in wrapper._modules.items():
        if child is not None:
            inner = f"{prefix}.{name}".lstrip(".")
            yield from child.named_modules(memo, prefix if name in WRAPPER_NAMES else inner, remove_duplicate)


def _traceable(unit: nn.Module) -> nn.Module:
    """Return the part of a unit that can be one graph: all of it, unless it offloads activations."""
    from ..upstream.torch_core import OffloadWrapper

    if not isinstance(unit, OffloadWrapper):
        return unit
    while isinstance(unit, ActivationWrapper):
        unit = unit._checkpoint_wrapped_module
    return unit


def _require_units(units: list[nn.Module], doing: str) -> None:
    if not units:
        raise ValueError(
            f"{doing} unit by unit, but the wrap policy creates no unit. "
            "Set auto_wrap_policy='transformer_based_wrap' (or 'size_based_wrap')."
        )


def _wrap(
    model: nn.Module, modules: list[nn.Module], wrapper: Callable[[nn.Module], nn.Module]
) -> dict[nn.Module, nn.Module]:
    wrappers = {module: wrapper(module) for module in modules}
    made = set(wrappers.values())
    for parent in list(model.modules()):
        if parent in made:
            continue
        for name, child in list(parent._modules.items()):  # named_children() shows a child under two names once
            if child is not None and child in wrappers:
                parent._modules[name] = wrappers[child]
    return wrappers


# ------------------------------------------------------------------------------------------------
# Models that FSDP would train wrongly or refuse obscurely: refused by name before sharding.


def check_modules(
    model: nn.Module,
    units: Sequence[nn.Module] = (),
    unsharded: Collection[nn.Module] = (),
    *,
    version: int,
    precision: PrecisionSettings | None = None,
) -> None:
    """Check that FSDP can train what ``model`` is made of.

    Args:
        model: Not sharded yet.
        units: What is gathered on its own, without the root; children before parents.
        unsharded: Modules whose own parameters stay unsharded.
        version: Of FSDP.
        precision: Dtypes of computation and reduction.

    Raises:
        ValueError: If it cannot; all modules and parameters are listed, with what to do.
    """
    names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    problems = [
        *_renormalised(model, unsharded),
        *sparse_embeddings(model),
        *_complex(names, [*parameters_by_unit(model, units, unsharded)], version, precision or PrecisionSettings()),
        *_packed(model, unsharded, precision or PrecisionSettings()),
    ]
    if problems:
        raise ValueError("\n".join([f"FSDP{version} cannot train this {type(model).__name__}:", *problems]))


def _renormalised(model: nn.Module, unsharded: Collection[nn.Module]) -> Iterator[str]:
    """Embeddings that change their weight in forward: of a sharded one a copy, of another the rows of this rank."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or module.max_norm is None:
            continue
        if module not in unsharded or module.weight.requires_grad:
            yield (
                f"{clean_name(name)}: {type(module).__name__}(max_norm={module.max_norm:g}) changes its weight in "
                "forward; the change reaches no other process and is lost. Omit max_norm and scale the output: x * "
                "(max_norm / x.norm(dim=-1, keepdim=True)).clamp(max=1)."
            )


def _complex(
    names: dict[nn.Parameter, str],
    units: Sequence[Sequence[nn.Parameter]],
    version: int,
    precision: PrecisionSettings,
) -> Iterator[str]:
    """Complex parameters: torch 2.13 flattens none, and reduces none together with others or in a real dtype."""
    by_reduction = precision.reduce_dtype not in (None, precision.param_dtype)
    for parameters in units:
        trained = {parameter.dtype for parameter in parameters if parameter.requires_grad}
        if version == 1:
            reason = "flattened"
        else:
            reason = f"reduced in {precision.reduce_dtype}" if by_reduction else "reduced in one unit with real ones"
        for parameter in parameters:
            is_reduced_alone = not parameter.requires_grad or (len(trained) == 1 and not by_reduction)
            if parameter.is_complex() and (version == 1 or not is_reduced_alone):
                yield (f"{names[parameter]}: {parameter.dtype} parameters cannot be {reason}. {IN_REAL_NUMBERS}")


def _packed(model: nn.Module, unsharded: Collection[nn.Module], precision: PrecisionSettings) -> Iterator[str]:
    """Weights of bitsandbytes. Of 4 bits: whoever converts or rebuilds the tensor that stores them loses them.

    Those of 8 bits are integers, and their module's forward needs the class of the parameter.
    """
    for name, module in model.named_modules():
        if module in unsharded:
            continue
        if _holds(module, "Int8Params"):
            yield (
                f"{clean_name(name)}: 8-bit weights cannot be sharded. Add the module to ignored_modules, quantize to "
                "4 bits with bnb_4bit_quant_storage=torch.bfloat16, or use AccelDeepSpeedStrategy."
            )
        if not holds_4bit(module):
            continue
        for own, parameter in module.named_parameters(recurse=False):
            if type(parameter) is nn.Parameter:  # a bias beside them
                continue
            stored, wanted = parameter.dtype, precision.param_dtype or torch.bfloat16
            if not stored.is_floating_point:
                problem = "cannot be sharded"
            elif precision.param_dtype not in (None, stored):
                problem = f"would be converted to {wanted} whenever they are gathered"
            else:
                continue
            yield (
                f"{clean_name(f'{name}.{own}')}: 4-bit weights stored as {stored} {problem}. Quantize with "
                f"bnb_4bit_quant_storage={wanted}, or add the module to ignored_modules."
            )


# ------------------------------------------------------------------------------------------------
# Weights under a precision before sharding: fp32 masters of trained parameters, and no others.


def make_masters(model: nn.Module, without: Collection[nn.Module] = ()) -> None:
    """Convert trainable floating-point parameters to fp32, also where the model was loaded in half precision.

    Frozen ones keep their dtype and so their memory, and nothing of a module with 4-bit weights (bitsandbytes) is
    touched: their bytes are packed numbers, whatever dtype they are stored as.

    Args:
        model: Not sharded yet.
        without: Modules whose own parameters stay as they are.

    Source: accelerate 1.15 ``utils/fsdp_utils.py`` (``fsdp2_prepare_model``); huggingface/accelerate#3979, #3987.
    """
    for module in model.modules():
        if module in without or holds_4bit(module):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                _upcast(parameter)


def one_dtype_in_each_unit(model: nn.Module, settings: EngineSettings) -> None:
    """Convert a unit of FSDP1 that has several dtypes to fp32: torch flattens it into one tensor.

    Args:
        model: Not sharded yet.
        settings: What its units will be.

    Raises:
        ValueError: If one of them is a 4-bit weight, which cannot be converted.
    """
    packed = {
        parameter for module in model.modules() if holds_4bit(module) for parameter in module.parameters(recurse=False)
    }
    changed: list[nn.Parameter] = []
    for parameters in _parameters_by_planned_unit(model, settings):
        floating = [parameter for parameter in parameters if parameter.is_floating_point()]
        dtypes = {parameter.dtype for parameter in floating}
        if len(dtypes) < 2:
            continue
        if not packed.isdisjoint(floating):
            raise ValueError(
                "FSDP1 flattens the parameters of a unit into one tensor, but one unit has 4-bit weights next to "
                f"others in {' and '.join(sorted(map(str, dtypes)))}: {_named(model, floating)}. Put trained "
                "parameters in separate units, or use fsdp_version=2."
            )
        changed += [parameter for parameter in floating if parameter.dtype != torch.float32]
        for parameter in floating:
            _upcast(parameter)
    if changed:
        rank_zero_warn(
            "FSDP1 flattens the parameters of a unit into one tensor of one dtype. These parameters are frozen, and "
            f"are converted to fp32, because their units also hold fp32: {_named(model, changed)}. Put frozen layers "
            "in separate units, or use fsdp_version=2, to keep their dtype."
        )


def convert_floats(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert floating-point parameters and buffers in place, as ``model.to(dtype)`` would.

    But complex ones, which that would make real, stay; and so do modules with 4-bit weights.
    """
    kept = {
        id(tensor)
        for module in model.modules()
        if holds_4bit(module)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and id(tensor) not in kept else tensor

    model._apply(convert)  # type: ignore[no-untyped-call]
    return model


def parameters_by_unit(
    model: nn.Module, units: Sequence[nn.Module], unsharded: Collection[nn.Module]
) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters that each unit gathers; the last one is the root's.

    Args:
        model: Not sharded yet.
        units: Without the root; children before parents.
        unsharded: Modules whose own parameters nobody gathers.
    """
    taken = {parameter for module in unsharded for parameter in module.parameters(recurse=False)}
    for unit in [*units, model]:
        yield [parameter for parameter in unit.parameters() if parameter not in taken]
        taken.update(unit.parameters())


def holds_4bit(module: nn.Module) -> bool:
    """Return whether a module itself has 4-bit weights of bitsandbytes."""
    return _holds(module, "Params4bit")


def _holds(module: nn.Module, name: str) -> bool:
    classes = (cls for parameter in module.parameters(recurse=False) for cls in type(parameter).__mro__)
    return any(cls.__name__ == name for cls in classes)


def _parameters_by_planned_unit(model: nn.Module, settings: EngineSettings) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters that each unit will gather, if there is anything to distinguish."""
    if len({parameter.dtype for parameter in model.parameters()}) < 2:
        return
    ignored = resolve_ignored(model, settings.ignored_modules)
    units = without_split_ties(model, [unit for _, unit in units_to_wrap(model, settings.wrap, ignored)], ignored)
    parts = without_split_ties(model, parts_called_alone(model, ignored), ignored)
    unsharded = ignored | modules_outside(model, parts) if parts else ignored
    yield from parameters_by_unit(model, [*units, *parts], unsharded)


def _upcast(parameter: nn.Parameter) -> None:
    if parameter.is_floating_point() and parameter.dtype != torch.float32:
        parameter.data = parameter.data.float()


def _named(model: nn.Module, parameters: Collection[nn.Parameter]) -> str:
    chosen = set(parameters)
    names = [clean_name(name) for name, parameter in model.named_parameters() if parameter in chosen]
    return listed(names, 3)
