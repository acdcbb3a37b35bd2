"""Settings of the engines, frozen and strict: from environment variables, sharding strategies and wrap policies."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import nn

from ...checkpoint.names import clean_name
from ...state.utils import TRUTH_VALUES
from ..common.config import (
    FromVariable,
    as_bool,
    as_int,
    as_member,
    as_names,
    classes_by_name,
    source,
    warn_once,
    wrong_type,
    wrong_value,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
    from torch.distributed.fsdp import StateDictType as TorchStateDictType

    from ..upstream.torch_fsdp1 import _Policy


StateDictType = Literal["full_state_dict", "sharded_state_dict", "local_state_dict"]
WrapKind = Literal["transformer_based_wrap", "size_based_wrap", "no_wrap", "callable"]


@dataclass(frozen=True, kw_only=True)
class WrapSettings:
    """The submodules that become units, which are gathered and freed together."""

    kind: WrapKind = "no_wrap"
    """The policy; ``"no_wrap"`` leaves everything in the root's unit."""
    transformer_cls_names: tuple[str, ...] | None = None
    """Class names for ``"transformer_based_wrap"``. None takes the model's ``_no_split_modules``."""
    min_num_params: int = 0
    """Smallest number of parameters of a unit for ``"size_based_wrap"``."""
    policy: Callable[..., bool] | None = None
    """For ``"callable"``: torch's form, called with ``module``, ``recurse`` and ``nonwrapped_numel``."""

    def __post_init__(self) -> None:
        if (self.kind == "callable") != (self.policy is not None):
            raise ValueError(f"kind={self.kind!r} and policy={self.policy!r} do not match: 'callable' needs a policy.")
        if self.min_num_params < 0:
            raise ValueError(f"min_num_params must be >= 0, got {self.min_num_params}.")


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings:
    """Dtypes of computation and communication. None keeps the dtype that is there."""

    param_dtype: torch.dtype | None = None
    """Dtype of forward, backward and all-gather; the stored (master) parameters keep theirs."""
    reduce_dtype: torch.dtype | None = None
    """Dtype of the gradients' reduction."""
    buffer_dtype: torch.dtype | None = None
    """Dtype of floating-point buffers (FSDP1 only: FSDP2 leaves buffers alone)."""
    output_dtype: torch.dtype | None = None
    """Dtype of each unit's floating-point outputs (FSDP2 only)."""
    cast_forward_inputs: bool = True
    """Whether a unit casts its floating-point inputs to ``param_dtype``."""
    cast_root_forward_inputs: bool = False
    """Whether the root casts the batch. Off under autocast, which casts where it is right and leaves targets alone."""


@dataclass(frozen=True, kw_only=True)
class FullState:
    """The ranks and devices that get a full state dict."""

    rank0_only: bool = True
    """Nothing of it on the other ranks."""
    offload_to_cpu: bool = True
    """In host memory, tensor by tensor; else on the device."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of both engines."""

    wrap: WrapSettings = field(default_factory=WrapSettings)
    """The submodules that are sharded as units."""
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    """Dtypes; the strategy fills them from ``Trainer(precision=...)`` where the plugin leaves them open."""
    cpu_offload: bool = False
    """Whether sharded parameters, gradients and optimizer state live in host memory."""
    pin_memory: bool | None = None
    """Pin the offloaded memory. None pins where there is an accelerator."""
    ignored_modules: tuple[nn.Module, ...] | str | None = None
    """Modules left unsharded; a string is a regular expression, fully matched on module names."""
    activation_checkpointing: bool = False
    """Recompute the wrapped units' activations in backward instead of keeping them."""
    activation_checkpointing_offload: bool = False
    """Keep the inputs of recomputed units in host memory until backward."""
    recomputed: WrapSettings | None = None
    """The modules that are recomputed, if these are not the units."""
    compile_options: Mapping[str, Any] | None = None
    """Keyword arguments of `torch.compile` for each unit. None does not compile."""
    cpu_ram_efficient_loading: bool = False
    """Whether rank 0's weights replace the other ranks', which may have none."""
    sync_module_states: bool = True
    """Whether every rank begins with rank 0's parameters and buffers; else differences between ranks are an error."""
    forward_prefetch: bool = False
    """Gather the next unit's parameters while the present one computes (static graphs only)."""
    state_dict_type: StateDictType = "full_state_dict"
    """Form of saved checkpoints."""
    full_weights: FullState = field(default_factory=FullState)
    """For the full form: where the weights are."""
    full_optimizer: FullState = field(default_factory=FullState)
    """For the full form: where the optimizer's state is."""
    reshard_during_accumulation: bool = True
    """Whether the inner micro-batches of a window free what they gathered. False gathers each parameter once for each
    optimizer step, and holds the unsharded parameters and gradients meanwhile."""

    find_unused_parameters: bool = False
    """Whether ranks may use different parts of the model in one step: it is gathered as one unit then."""

    whole_tensor_optimizers: bool | None = None
    """Whether optimizers that look further than an element step on whole tensors. None: torch's Muon alone does."""


@dataclass(frozen=True, kw_only=True)
class FSDP1Settings(EngineSettings):
    """Settings of the FSDP1 engine; each field feeds one ``FullyShardedDataParallel`` argument."""

    sharding_strategy: ShardingStrategy
    """``ShardingStrategy`` of torch."""
    backward_prefetch: BackwardPrefetch | None = None
    """When the next unit is gathered in backward. None does not prefetch."""
    limit_all_gathers: bool = True
    """Hold back the host so that not too many gathers are in flight."""
    use_orig_params: bool = False
    """Whether optimizers see the original parameters instead of flat ones."""
    param_init_fn: Callable[[nn.Module], None] | None = None
    """The function that materializes a module on the meta device."""

    def __post_init__(self) -> None:
        if self.compile_options is not None and not self.use_orig_params:
            raise ValueError(
                "compile with fsdp_version=1 needs use_orig_params=True: torch cannot compile with flat parameters. "
                "Set it, or use fsdp_version=2."
            )


@dataclass(frozen=True, kw_only=True)
class FSDP2Settings(EngineSettings):
    """Settings of the FSDP2 engine; each field feeds one ``fully_shard`` argument."""

    reshard_after_forward: bool | int = True
    """Free a unit's gathered parameters after its forward and gather them again in backward. A number keeps each
    parameter over so many processes meanwhile, and backward gathers among these alone."""

    def __post_init__(self) -> None:
        if not isinstance(self.reshard_after_forward, bool) and not self.reshard_during_accumulation:
            raise ValueError(
                f"reshard_after_forward={self.reshard_after_forward} reshards over fewer processes, and "
                "reshard_during_accumulation=False keeps parameters gathered. Set only one of them."
            )
        if self.state_dict_type == "local_state_dict":
            raise ValueError(
                "state_dict_type='local_state_dict' is not possible with fsdp_version=2. "
                "Use 'sharded_state_dict' or 'full_state_dict'."
            )


def as_modules(modules: Iterable[nn.Module] | str | None) -> tuple[nn.Module, ...] | str | None:
    """Convert a user's value to that of `EngineSettings.ignored_modules`."""
    return modules if modules is None or isinstance(modules, str) else tuple(modules)


# ------------------------------------------------------------------------------------------------
# The ``FSDP_*`` variables of Accelerate's launcher, and the spellings that they share with arguments.


__all__ = [
    "VARIABLES",
    "as_bool",
    "as_dtype",
    "as_int",
    "as_member",
    "as_names",
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "fields_from_env",
    "source",
    "warn_once",
    "wrong_type",
    "wrong_value",
]

VARIABLES: Mapping[str, str] = {
    "fsdp_version": "FSDP_VERSION",
    "sharding_strategy": "FSDP_SHARDING_STRATEGY",
    "reshard_after_forward": "FSDP_RESHARD_AFTER_FORWARD",
    "backward_prefetch": "FSDP_BACKWARD_PREFETCH",
    "auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "transformer_cls_names_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "min_num_params": "FSDP_MIN_NUM_PARAMS",
    "cpu_offload": "FSDP_OFFLOAD_PARAMS",
    "state_dict_type": "FSDP_STATE_DICT_TYPE",
    "use_orig_params": "FSDP_USE_ORIG_PARAMS",
    "sync_module_states": "FSDP_SYNC_MODULE_STATES",
    "forward_prefetch": "FSDP_FORWARD_PREFETCH",
    "activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
    "activation_checkpointing_offload": "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
    "cpu_ram_efficient_loading": "FSDP_CPU_RAM_EFFICIENT_LOADING",
    "ignored_modules": "FSDP_IGNORED_MODULES",
}
"""The plugin's fields that a variable can fill."""

_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def fields_from_env(env: Mapping[str, str]) -> dict[str, FromVariable]:
    """Return the plugin's fields that ``env`` sets, unparsed. An empty variable counts as unset."""
    texts = {field: env.get(variable, "").strip() for field, variable in VARIABLES.items()}
    return {field: FromVariable(text, VARIABLES[field]) for field, text in texts.items() if text}


def enable_fsdp_ram_efficient_loading() -> None:
    """Tell this process and its children, Hugging Face libraries among them, that only rank 0 loads weights.

    Source: accelerate 1.15 ``utils/fsdp_utils.py``; transformers ``integrations/fsdp.py`` reads both variables.
    """
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")
    os.environ[VARIABLES["cpu_ram_efficient_loading"]] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Take back `enable_fsdp_ram_efficient_loading`: every process loads the weights."""
    os.environ[VARIABLES["cpu_ram_efficient_loading"]] = "False"


def as_dtype(field: str, value: object) -> torch.dtype:
    """Return the floating-point dtype that ``value`` is or names.

    Raises:
        ValueError: If it is no dtype that a model computes in.
        TypeError: If it is neither dtype nor string.
    """
    if not isinstance(value, torch.dtype | str):
        raise wrong_type(field, value, "a str or a torch.dtype")
    dtype = _DTYPES.get(value.lower().removeprefix("torch.")) if isinstance(value, str) else value
    if dtype is None or dtype not in _DTYPES.values():
        raise wrong_value(field, value, _DTYPES)
    return dtype


# ------------------------------------------------------------------------------------------------
# FSDP1's `ShardingStrategy`, FSDP2's ``reshard_after_forward``, and the conversion between them.


def strategy_for_fsdp1(
    sharding_strategy: object, reshard_after_forward: object, unset: Mapping[str, str]
) -> ShardingStrategy:
    """Return the strategy that two fields of one meaning ask for; FULL_SHARD by default.

    Args:
        sharding_strategy: The field of this name, or None.
        reshard_after_forward: The field of this name, or None.
        unset: What the environment says, for where both are None.

    Raises:
        ValueError: If there is no such strategy, or the two fields differ.
    """
    given = {"sharding_strategy": sharding_strategy, "reshard_after_forward": reshard_after_forward}
    strategies = [_as_strategy(name, value) for name, value in given.items() if value is not None]
    if not strategies:
        strategies = [_strategy_from_environment(unset)]
    if len(set(strategies)) > 1:
        raise ValueError(
            f"sharding_strategy={sharding_strategy!r} and reshard_after_forward={reshard_after_forward!r} differ, "
            "but with fsdp_version=1 they set the same option. Set only one of them."
        )
    return strategies[0]


def _strategy_from_environment(unset: Mapping[str, str]) -> ShardingStrategy:
    """Return the variables' setting: Accelerate's launcher exports both, and means the first one for FSDP1.

    The second one alone may name a strategy, too. A truth value there is FSDP2's, which Accelerate ignores for FSDP1.
    """
    name = "sharding_strategy" if "sharding_strategy" in unset else "reshard_after_forward"
    value = unset.get(name, "FULL_SHARD")
    truth = TRUTH_VALUES.get(value.lower()) if name == "reshard_after_forward" else None
    if truth is None:
        return _as_strategy(name, value)
    if not truth:
        warn_once(
            name,
            f"FSDP_RESHARD_AFTER_FORWARD={value} is for FSDP2 and ignored with fsdp_version=1, which frees parameters "
            "after forward. Set FSDP_SHARDING_STRATEGY=SHARD_GRAD_OP to keep them, or FSDP_VERSION=2.",
        )
    return _as_strategy(name, "FULL_SHARD")


def reshard_for_fsdp2(sharding_strategy: object, reshard_after_forward: object, unset: Mapping[str, str]) -> bool | int:
    """Return whether FSDP2 frees parameters after forward, or over how many processes it keeps them.

    A sharding strategy is translated, with a warning.

    Args:
        sharding_strategy: The field of this name, or None.
        reshard_after_forward: The field of this name, or None.
        unset: What the environment says, for where both are None. Its sharding strategy is only looked at when it says
            nothing of ``reshard_after_forward``: Accelerate's launcher exports both, asked for or not.

    Raises:
        ValueError: If a value is not possible with FSDP2, or the two fields contradict each other.
    """
    if sharding_strategy is None and reshard_after_forward is None:
        reshard_after_forward = unset.get("reshard_after_forward")
        if reshard_after_forward is None:
            sharding_strategy = unset.get("sharding_strategy")
    reshard = None if reshard_after_forward is None else _as_reshard(reshard_after_forward)
    if sharding_strategy is None:
        return reshard is None or reshard
    translated, hint = _translated(_as_strategy("sharding_strategy", sharding_strategy))
    if reshard not in (None, translated):
        raise ValueError(
            f"sharding_strategy={sharding_strategy!r} and reshard_after_forward={reshard_after_forward!r} contradict "
            "each other. With fsdp_version=2 set only reshard_after_forward."
        )
    warn_once(
        "sharding_strategy",
        f"sharding_strategy={sharding_strategy!r} is obsolete with fsdp_version=2: interpreted as "
        f"reshard_after_forward={translated}.{hint}",
    )
    return translated


def replicated(strategy: ShardingStrategy, dp_replicate: int) -> ShardingStrategy:
    """Return the form of ``strategy`` for ``dp_replicate`` model copies: with more than one, the hybrid one.

    Raises:
        ValueError: If ``strategy`` does not shard.
    """
    from torch.distributed.fsdp import ShardingStrategy

    if dp_replicate == 1 or "HYBRID" in strategy.name:
        return strategy
    if strategy is ShardingStrategy.NO_SHARD:
        raise ValueError(
            f"sharding_strategy=NO_SHARD and {dp_replicate} model copies (device_mesh) do not match: every rank "
            "already has a full copy. Use 'HYBRID_SHARD', or no device_mesh."
        )
    frees = strategy is ShardingStrategy.FULL_SHARD
    return ShardingStrategy.HYBRID_SHARD if frees else ShardingStrategy._HYBRID_SHARD_ZERO2


def _as_strategy(field: str, value: object) -> ShardingStrategy:
    from torch.distributed.fsdp import ShardingStrategy

    if isinstance(value, bool):
        raise ValueError(
            f"{field}={value!r} is not possible with fsdp_version=1. Use 'FULL_SHARD' (frees parameters after "
            "forward) or 'SHARD_GRAD_OP' (keeps them), or fsdp_version=2."
        )
    return as_member(field, value, ShardingStrategy)


def _as_reshard(value: object) -> bool | int:
    if isinstance(value, bool):
        return value
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    if type(number) is int and number > 1:
        return number
    try:
        return as_bool("reshard_after_forward", value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{source('reshard_after_forward', value)}={value!r} is not possible with fsdp_version=2. "
            "Use True (frees parameters after forward, as FULL_SHARD does), False (keeps them, as SHARD_GRAD_OP), or a "
            "number of processes from 2 on (keeps them sharded over as many)."
        ) from None


def _translated(strategy: ShardingStrategy) -> tuple[bool, str]:
    """Return FSDP2's ``reshard_after_forward`` for ``strategy``, and what is left to say about it."""
    name = strategy.name.lstrip("_")
    if name == "NO_SHARD":
        raise ValueError(
            "sharding_strategy=NO_SHARD is not possible with fsdp_version=2, which always shards. "
            "Use plain data parallelism (Lightning's 'ddp'), or fsdp_version=1."
        )
    hint = " For its model copies, pass device_mesh=(replicate, shard) to the strategy." if "HYBRID" in name else ""
    return name in ("FULL_SHARD", "HYBRID_SHARD"), hint


# ------------------------------------------------------------------------------------------------
# ``state_dict_config`` and ``optim_state_dict_config`` of the plugin: checks and conversion.


FIELDS = ("state_dict_config", "optim_state_dict_config")


def fitting_configs(kind: TorchStateDictType) -> dict[str, Any]:
    """Return the configs that fit ``kind``, by field."""
    from torch.distributed import fsdp

    configs: dict[str, tuple[Any, Any]] = {
        "FULL_STATE_DICT": (
            fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
            fsdp.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
        ),
        "SHARDED_STATE_DICT": (
            fsdp.ShardedStateDictConfig(offload_to_cpu=True),
            fsdp.ShardedOptimStateDictConfig(offload_to_cpu=True),
        ),
        "LOCAL_STATE_DICT": (fsdp.LocalStateDictConfig(), fsdp.LocalOptimStateDictConfig()),
    }
    return dict(zip(FIELDS, configs[kind.name], strict=True))


def warn_of_no_effect(name: str, given: Any, kind: TorchStateDictType) -> None:
    """Warn once if ``given`` says what a form other than the full one cannot do: its shards stay as they are."""
    harmless = (fitting_configs(kind)[name], type(given)(offload_to_cpu=False))  # the latter is how it is
    if kind.name != "FULL_STATE_DICT" and given not in harmless:
        warn_once(name, f"{name}={given} has no effect with state_dict_type={kind.name.lower()}: shards are unchanged.")


def full_state(config: Any) -> FullState:
    """Return a config's setting for a full state dict; the default where it is of another form."""
    if not hasattr(config, "rank0_only"):
        return FullState()
    return FullState(rank0_only=config.rank0_only, offload_to_cpu=config.offload_to_cpu)


# ------------------------------------------------------------------------------------------------
# The choice of submodules that become units.


# Attributes of torch (2.6 to 2.13) for the module in an activation wrapper and in a compiled module. The names stand
# for the classes, because importing `torch._dynamo` for an `isinstance` costs seconds.
_TRANSPARENT = ("_checkpoint_wrapped_module", "_orig_mod")
_MAX_CANDIDATES = 8


class WithSettings(Protocol):
    """A `FullyShardedDataParallelPlugin`."""

    def settings(self) -> FSDP1Settings | FSDP2Settings:
        """Return the settings for the engines."""


def units_to_wrap(
    model: nn.Module,
    wrap: WrapSettings,
    ignored: set[nn.Module],
    *,
    also: Callable[[nn.Module], bool] = lambda module: False,
) -> list[tuple[str, nn.Module]]:
    """Return the submodules of ``model`` that are gathered and freed on their own.

    A module inside an activation-checkpoint or ``torch.compile`` wrapper is judged by what it is itself, and its
    outermost wrapper is what is returned.

    Args:
        model: The root, which is never part of the answer.
        wrap: The policy.
        ignored: Modules that are left alone, with everything in them.
        also: What is a unit whatever the policy says.

    Returns:
        Name and module, children before parents, otherwise in the order of registration; a module that is reachable
        under two names comes once, under the first.

    Raises:
        ValueError: If a class name is not found in ``model``, if there is no class name at all, or if a policy object
            asks for arguments that differ from unit to unit.

    Source: torch 2.13 ``distributed/fsdp/wrap.py`` (``_recursive_wrap``); accelerate 1.15 ``utils/fsdp_utils.py``.
    """
    ignored = {submodule for module in ignored for submodule in module.modules()}
    is_chosen = _choice(model, wrap, ignored)
    return [
        (name, module)
        for name, module in _bottom_up(model, ignored)
        if is_chosen(module) or is_chosen(_inside(module)) or also(_inside(module))
    ]


def _choice(model: nn.Module, wrap: WrapSettings, ignored: set[nn.Module]) -> Callable[[nn.Module], bool]:
    if wrap.kind == "no_wrap":
        return lambda module: False
    if wrap.kind == "transformer_based_wrap":
        classes = layer_classes(model, wrap.transformer_cls_names)
        return lambda module: isinstance(module, classes)
    if wrap.kind == "size_based_wrap":
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

        policy: Any = functools.partial(size_based_auto_wrap_policy, min_num_params=wrap.min_num_params)
    else:
        policy = wrap.policy
    if hasattr(policy, "_run_policy"):  # `ModuleWrapPolicy`, `CustomPolicy` and what users derive from their base
        chosen = _chosen_by_object(policy, model, ignored)
    else:
        chosen = _chosen_by_call(policy, model, ignored)
    return chosen.__contains__


def resolve_ignored(model: nn.Module, ignored_modules: tuple[nn.Module, ...] | str | None) -> set[nn.Module]:
    """Return the modules of ``model`` to leave unsharded, each with all its submodules.

    Args:
        model: The root; names are counted from it, without the traces of wrappers.
        ignored_modules: The modules, or a regular expression that has to match a whole name.

    Raises:
        ValueError: If the expression is invalid or matches nothing, or if a module is not a submodule of ``model``.

    Source: accelerate 1.15 ``accelerator.py`` (``prepare_model``: ``re.fullmatch`` on the names).
    """
    if ignored_modules is None:
        return set()
    if isinstance(ignored_modules, str):
        roots = _modules_matching(model, ignored_modules)
    else:
        roots = list(ignored_modules)
        inside = set(model.modules()) - {model}
        for module in roots:
            if module not in inside:
                where = "the whole model" if module is model else f"not a part of {type(model).__name__}"
                raise ValueError(
                    f"ignored_modules holds a {type(module).__name__} that is {where}. Pass submodules of the "
                    "trained model, or a regular expression for their names."
                )
    return {submodule for module in roots for submodule in module.modules()}


def layer_classes(model: nn.Module, names: Iterable[str] | None) -> tuple[type[nn.Module], ...]:
    """Return the classes of submodules of ``model`` with these names.

    Args:
        model: The root.
        names: None takes ``_no_split_modules`` of every Hugging Face model in it (or that it is).

    Raises:
        ValueError: If there is no name, or no submodule of a class of that name.
    """
    classes = classes_by_name(_submodules(model))
    names = _no_split_names(model, classes) if names is None else list(names)
    if not names:
        raise ValueError(
            "auto_wrap_policy='transformer_based_wrap' needs class names: transformer_cls_names_to_wrap is empty or "
            "unset, and no submodule of the model has _no_split_modules. Set transformer_cls_names_to_wrap (or "
            f"FSDP_TRANSFORMER_CLS_TO_WRAP) to the repeated layer's class: {_candidates(model)}."
        )
    for name in names:
        if name not in classes:
            raise ValueError(
                f"transformer_cls_names_to_wrap holds {name!r}, but the model has no submodule of that class. "
                f"Classes in the model: {_candidates(model)}."
            )
    return tuple(cls for name in names for cls in classes[name])


def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: WithSettings, model: nn.Module) -> Callable[[nn.Module], bool] | None:
    """Return whether a module of ``model`` is to be sharded on its own, or None where the plugin wraps nothing.

    Unlike Accelerate's, the function knows every kind of policy, and is true of the very modules of ``model`` as it is
    now (prepare it after wrappers have been put in).

    Raises:
        ValueError: As `units_to_wrap` and `resolve_ignored`.
    """
    settings = fsdp2_plugin.settings()
    if settings.wrap.kind == "no_wrap":
        return None
    ignored = resolve_ignored(model, settings.ignored_modules)
    units = {module for _, module in units_to_wrap(model, settings.wrap, ignored)}
    return lambda module: module in units


def as_policy(field: str, policy: Any) -> Any:
    """Return a wrap policy of torch: a set of module classes becomes one, as in Lightning, a policy stays.

    Args:
        field: What errors call it.
        policy: Classes, a policy object, or a function that is called as torch calls wrap policies.

    Raises:
        TypeError: If it is something else.
    """
    from ..upstream.torch_fsdp1 import _Policy

    if isinstance(policy, set | frozenset | list | tuple):
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        others = [each for each in policy if not (isinstance(each, type) and issubclass(each, nn.Module))]
        if others or not policy:
            raise wrong_type(field, others[0] if others else policy, "a set of module classes")
        return ModuleWrapPolicy(policy)
    if policy is None or isinstance(policy, _Policy):
        return policy
    if not callable(policy):
        raise wrong_type(field, policy, "a str, a set of module classes or a wrap policy of torch")
    try:
        signature = inspect.signature(policy)
    except ValueError:  # a builtin has none
        return policy
    try:
        signature.bind(module=None, recurse=True, nonwrapped_numel=0)
    except TypeError as error:
        raise TypeError(
            f"{field} is called as policy(module=..., recurse=..., nonwrapped_numel=...), which {policy!r} does not "
            f"accept: {error}. For a function of only the module, use torch.distributed.fsdp.wrap.CustomPolicy."
        ) from error
    return policy


def _inside(module: nn.Module) -> nn.Module:
    """Return the module inside transparent wrappers; one without them is returned itself."""
    for attribute in _TRANSPARENT:
        hidden = module._modules.get(attribute)
        if hidden is not None:
            return _inside(hidden)
    return module


def _bottom_up(model: nn.Module, ignored: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield every proper submodule once, wrappers and what they hide as one (the wrapper), children first."""
    names = {module: name for name, module in model.named_modules()}
    seen = {_inside(model)}

    def visit(parent: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for child in parent.children():
            inside = _inside(child)
            if inside not in seen and not {child, inside} & ignored:
                seen.add(inside)
                yield from visit(inside)
                yield names[child], child

    yield from visit(_inside(model))


def _chosen_by_call(policy: Callable[..., bool], model: nn.Module, ignored: set[nn.Module]) -> set[nn.Module]:
    """Ask ``policy`` from the root downwards and decide from the leaves upwards, with the counts that FSDP1 uses."""
    ignored_params = {parameter for module in ignored for parameter in module.parameters()}
    chosen: set[nn.Module] = set()
    wrapped_numel: dict[nn.Module, int] = {}  # of modules visited before: one under two names is asked about once

    def visit(wrapper: nn.Module) -> int:
        module = _inside(wrapper)
        if module in wrapped_numel:
            return wrapped_numel[module]
        numel = sum(parameter.numel() for parameter in module.parameters() if parameter not in ignored_params)
        wrapped = 0
        if policy(module=module, recurse=True, nonwrapped_numel=numel):
            wrapped = sum(visit(child) for child in module.children() if not {child, _inside(child)} & ignored)
            if wrapper is not model and policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
                chosen.add(module)
                wrapped = numel
        wrapped_numel[module] = wrapped
        return wrapped

    visit(model)
    return chosen


def _chosen_by_object(policy: _Policy, model: nn.Module, ignored: set[nn.Module]) -> set[nn.Module]:
    chosen = policy._run_policy(model, ignored, {})
    for module, overrides in chosen.items():
        if overrides:
            raise ValueError(
                f"auto_wrap_policy {policy!r} returns {sorted(overrides)} for a {type(module).__name__}. "
                "All units share one setup: the policy must return True or False."
            )
    return set(chosen)


def _no_split_names(model: nn.Module, present: Container[str]) -> list[str]:
    """Return the classes that Hugging Face models at any depth list, less those that are not there."""
    wanted = (name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ())
    return [name for name in dict.fromkeys(wanted) if name in present]


def _candidates(model: nn.Module) -> str:
    """List the classes of submodules: first layers repeated in a ModuleList or Sequential, then the most frequent."""
    repeated: Counter[str] = Counter()
    for container in (module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)):
        layers = (module for module in map(_inside, container) if any(module.children()))
        counts = Counter(type(module).__name__ for module in layers)
        repeated.update({name: count for name, count in counts.items() if count > 1})
    frequent = Counter(type(module).__name__ for module in _submodules(model))
    names = list(dict.fromkeys(name for counts in (repeated, frequent) for name, _ in counts.most_common()))
    return ", ".join(names[:_MAX_CANDIDATES]) + (", ..." if len(names) > _MAX_CANDIDATES else "")


def _submodules(model: nn.Module) -> list[nn.Module]:
    return [_inside(module) for _, module in _bottom_up(model, set())]


def _modules_matching(model: nn.Module, pattern: str) -> list[nn.Module]:
    given = f"{source('ignored_modules', pattern)}={pattern!r}"
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{given} is not a valid regular expression: {error}.") from error
    named = [(clean_name(name), m) for name, m in model.named_modules(remove_duplicate=False)]
    matching = [module for name, module in named if name and regex.fullmatch(name)]
    if not matching:
        examples = ", ".join(list(dict.fromkeys(name for name, _ in named if name))[:_MAX_CANDIDATES])
        raise ValueError(
            f"{given} fully matches no module name of {type(model).__name__}. "
            f"Names look like: {examples or '(there are no submodules)'}."
        )
    return matching
