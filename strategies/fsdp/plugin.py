"""`FullyShardedDataParallelPlugin`: FSDP as users spell it, resolved into settings for the engines."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from ...state.utils import named_arguments
from . import settings as env
from .settings import (
    FSDP1Settings,
    FSDP2Settings,
    PrecisionSettings,
    WrapSettings,
    as_modules,
    as_policy,
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
    fitting_configs,
    full_state,
    layer_classes,
    replicated,
    reshard_for_fsdp2,
    strategy_for_fsdp1,
    warn_of_no_effect,
)
from .settings import StateDictType as StateDictName

if TYPE_CHECKING:
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        CPUOffloadPolicy,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        MixedPrecision,
        MixedPrecisionPolicy,
        OffloadPolicy,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictType,
    )


# ------------------------------------------------------------------------------------------------
# The fields of `FullyShardedDataParallelPlugin`: allowed values, and the settings that they become.


# Importing `torch.distributed.fsdp` costs half a second: it is imported where a plugin is made, not with this module.

# With FSDP2, the environment does not fill these: Accelerate's launcher exports every variable, asked for or not.
OBSOLETE_IN_FSDP2 = {
    "backward_prefetch": "FSDP2 always prefetches the next unit in backward",
    "use_orig_params": "FSDP2 always keeps the original parameters",
    "param_init_fn": "with FSDP2 the strategy materializes modules on the meta device",
}
_FLAGS = {
    "limit_all_gathers": True,
    "use_orig_params": True,  # Accelerate: False, where an optimizer over a part trains something else silently
    "sync_module_states": True,  # Accelerate: False, where shards of different models make up one
    "forward_prefetch": False,
    "activation_checkpointing": False,
    "activation_checkpointing_offload": False,
    "cpu_ram_efficient_loading": False,
}


@dataclass
class PluginFields:
    """See `FullyShardedDataParallelPlugin`."""

    fsdp_version: int | None = None
    """1 (the default) or 2."""
    sharding_strategy: str | ShardingStrategy | None = None
    """FSDP1: what is sharded, ``"FULL_SHARD"`` by default. With FSDP2 it is turned into ``reshard_after_forward``."""
    reshard_after_forward: str | ShardingStrategy | bool | int | None = None
    """FSDP2: free gathered parameters after forward, True by default; the last unit's backward comes at once, and it
    keeps them. A number keeps them until backward, sharded over
    so many processes (those of a node). With FSDP1, the same as ``sharding_strategy``."""
    backward_prefetch: str | BackwardPrefetch | None = None
    """FSDP1: ``"BACKWARD_PRE"``, ``"BACKWARD_POST"`` or ``"NO_PREFETCH"`` (the default, held as None)."""
    mixed_precision_policy: dict[str, Any] | str | MixedPrecision | MixedPrecisionPolicy | None = None
    """Dtypes: torch's policy for this version, a dict of its fields, or ``"bf16"``, ``"fp16"``, ``"fp32"`` for all.
    It wins over the Trainer's precision."""
    auto_wrap_policy: (
        Literal["transformer_based_wrap", "size_based_wrap", "no_wrap"]
        | set[type[nn.Module]]
        | Callable[..., bool]
        | None
    ) = None
    """The policy that chooses units: one of torch's, or a name; ``"no_wrap"`` (the default, held as None)."""
    cpu_offload: bool | CPUOffload | CPUOffloadPolicy | OffloadPolicy | None = None
    """Keep shards in host memory. False by default. Memory is pinned where there is an accelerator, unless a
    ``CPUOffloadPolicy`` says ``pin_memory=False``."""
    ignored_modules: Iterable[nn.Module] | str | None = None
    """Modules left unsharded, or a regular expression that has to match a module's whole name."""
    state_dict_type: str | StateDictType | None = None
    """``"full_state_dict"`` (the default of FSDP1), ``"sharded_state_dict"`` (of FSDP2) or ``"local_state_dict"``."""
    state_dict_config: FullStateDictConfig | ShardedStateDictConfig | None = None
    """Of the kind that ``state_dict_type`` asks for: where full weights are. None: on rank 0, in host memory."""
    optim_state_dict_config: FullOptimStateDictConfig | ShardedOptimStateDictConfig | None = None
    """The same for the optimizer's state."""
    limit_all_gathers: bool = True
    """FSDP1: hold back the host so that not too many gathers are in flight."""
    use_orig_params: bool | None = None
    """FSDP1: optimizers see the original parameters. True by default (Accelerate: False)."""
    param_init_fn: Callable[[nn.Module], None] | None = None
    """FSDP1: how a module on the meta device is materialized. With ``cpu_ram_efficient_loading`` or
    ``sync_module_states=True``, `to_empty` by default."""
    sync_module_states: bool | None = None
    """All processes begin with the parameters and buffers of process 0. True by default (Accelerate: False). With
    False each keeps its own, and different parameters are an error."""
    forward_prefetch: bool | None = None
    """Gather the next unit while the present one computes; for static graphs. False by default."""
    activation_checkpointing: bool | None = None
    """Recompute the units' activations in backward. False by default."""
    activation_checkpointing_offload: bool | None = None
    """Keep what each recomputed unit needs, its inputs, in host memory until backward. False by default."""
    cpu_ram_efficient_loading: bool | None = None
    """Only rank 0 holds real weights before sharding. False by default."""
    transformer_cls_names_to_wrap: list[str] | None = None
    """Class names for ``"transformer_based_wrap"`` (also comma-separated). None takes ``_no_split_modules``."""
    min_num_params: int | None = None
    """Smallest number of parameters of a unit for ``"size_based_wrap"``; 0 (the default) wraps nothing."""

    version_is_default = False
    """Whether neither ``fsdp_version`` nor a variable names the version of FSDP."""

    @property
    def _version(self) -> int:
        return cast("int", self.fsdp_version)

    def _fill(self, name: str, unset: Mapping[str, str], default: object = None) -> Any:
        """Return field ``name``, filled from ``unset``, else with ``default``, where it is None."""
        if getattr(self, name) is None:
            setattr(self, name, unset.get(name, default))
        return getattr(self, name)

    def _resolve_version(self, unset: Mapping[str, str]) -> None:
        if self.fsdp_version is None and "fsdp_version" not in unset:
            self.version_is_default = True
        version = env.as_int("fsdp_version", self._fill("fsdp_version", unset, 1))
        if version not in (1, 2):
            raise env.wrong_value("fsdp_version", version, (1, 2))
        self.fsdp_version = version

    def _resolve_sharding(self, unset: Mapping[str, str]) -> None:
        if self._version == 1:
            strategy = strategy_for_fsdp1(self.sharding_strategy, self.reshard_after_forward, unset)
            self.sharding_strategy = self.reshard_after_forward = strategy
        else:
            self.reshard_after_forward = reshard_for_fsdp2(self.sharding_strategy, self.reshard_after_forward, unset)
            self.sharding_strategy = None

    def _resolve_flags(self, unset: Mapping[str, str]) -> None:
        given = self.sync_module_states
        if given is None and "sync_module_states" in unset:
            given = env.as_bool("sync_module_states", unset["sync_module_states"])
        for name, default in _FLAGS.items():
            obsolete = self._version == 2 and name in OBSOLETE_IN_FSDP2
            value = self._fill(name, unset, None if obsolete else default)
            setattr(self, name, None if value is None else env.as_bool(name, value))
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            env.warn_once(
                "sync_module_states",
                "sync_module_states=False is overridden by cpu_ram_efficient_loading=True: only rank 0 has initial "
                "weights, and the other ranks need them.",
            )
            self.sync_module_states = True
        if self._version == 1 and self.param_init_fn is None and (given or self.cpu_ram_efficient_loading):
            self.param_init_fn = materialize
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ValueError(
                "activation_checkpointing_offload=True moves inputs of recomputed units, but nothing is recomputed. "
                "Set activation_checkpointing=True (or FSDP_ACTIVATION_CHECKPOINTING=true) too, or omit it."
            )

    def _resolve_backward_prefetch(self, unset: Mapping[str, str]) -> None:
        from torch.distributed.fsdp import BackwardPrefetch

        value = self._fill("backward_prefetch", unset)
        if isinstance(value, str) and value.upper() == "NO_PREFETCH":
            value = None
        allowed = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
        self.backward_prefetch = (
            None if value is None else env.as_member("backward_prefetch", value, BackwardPrefetch, allowed)
        )

    def _check_param_init_fn(self) -> None:
        if self.param_init_fn is not None and not callable(self.param_init_fn):
            raise env.wrong_type("param_init_fn", self.param_init_fn, "a function of a module")

    def _resolve_wrapping(self, unset: Mapping[str, str]) -> None:
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        policy: Any = self._fill("auto_wrap_policy", unset, "no_wrap")
        if isinstance(policy, str):
            named = {
                "transformer_based_wrap": transformer_auto_wrap_policy,
                "size_based_wrap": size_based_auto_wrap_policy,
                "no_wrap": None,
            }
            if policy.lower() not in named:
                raise env.wrong_value("auto_wrap_policy", policy, named)
            policy = self.auto_wrap_policy = named[policy.lower()]
        elif policy not in (transformer_auto_wrap_policy, size_based_auto_wrap_policy):
            policy = self.auto_wrap_policy = as_policy("auto_wrap_policy", policy)
        base = getattr(policy, "func", policy)
        self._resolve_cls_names(unset, used=base is transformer_auto_wrap_policy)
        self._resolve_min_num_params(unset, used=base is size_based_auto_wrap_policy)

    def _resolve_cls_names(self, unset: Mapping[str, str], *, used: bool) -> None:
        name = "transformer_cls_names_to_wrap"
        value = self._fill(name, unset if used else {})
        self.transformer_cls_names_to_wrap = None if value is None else env.as_names(name, value)
        if value is not None and not used:
            env.warn_once(name, f"{name}={value!r} has no effect without auto_wrap_policy='transformer_based_wrap'.")

    def _resolve_min_num_params(self, unset: Mapping[str, str], *, used: bool) -> None:
        name = "min_num_params"
        value = self._fill(name, unset if used else {}, 0 if used else None)
        self.min_num_params = None if value is None else env.as_int(name, value)
        if self.min_num_params is not None and self.min_num_params < 0:
            raise ValueError(f"{env.source(name, value)} must be >= 0; got {value!r}.")
        if value is not None and not used:
            env.warn_once(name, f"{name}={value!r} has no effect without auto_wrap_policy='size_based_wrap'.")

    def _resolve_ignored_modules(self, unset: Mapping[str, str]) -> None:
        value: Any = self._fill("ignored_modules", unset)
        if value is None or isinstance(value, str):
            return
        if not isinstance(value, Iterable):
            raise env.wrong_type("ignored_modules", value, "a regular expression or a list of modules")
        self.ignored_modules = modules = list(value)
        for module in modules:
            if not isinstance(module, nn.Module):
                raise env.wrong_type("ignored_modules", module, "a regular expression or a list of modules")

    def _drop_obsolete(self) -> None:
        for name, reason in OBSOLETE_IN_FSDP2.items():
            if getattr(self, name) is not None:
                env.warn_once(name, f"{name} is obsolete with fsdp_version=2 and ignored: {reason}.")
                setattr(self, name, None)
        if not self.limit_all_gathers:
            env.warn_once("limit_all_gathers", "limit_all_gathers=False has no effect with fsdp_version=2.")


def materialize(module: nn.Module) -> None:
    """Give the tensors that ``module`` itself holds (uninitialised) memory on the accelerator, or on the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module.to_empty(device=accelerator or torch.device("cpu"), recurse=False)


__all__ = [
    "FullyShardedDataParallelPlugin",
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
]

# Importing `torch.distributed.fsdp` costs half a second: it is imported where a plugin is made, not with this module.

_POLICY_DTYPES = {
    1: ("param_dtype", "reduce_dtype", "buffer_dtype"),
    2: ("param_dtype", "reduce_dtype", "output_dtype"),
}
_FORMS = {
    1: ("full_state_dict", "sharded_state_dict", "local_state_dict"),
    2: ("full_state_dict", "sharded_state_dict"),
}
_POLICY_FLAGS = {1: ("cast_forward_inputs", "cast_root_forward_inputs"), 2: ("cast_forward_inputs",)}


@named_arguments
@dataclass
class FullyShardedDataParallelPlugin(PluginFields):
    """The settings of sharding, in Accelerate's words.

    A field that is left None comes from its environment variable (see `VARIABLES`), else from the default.
    Strings, numbers and torch's own objects are accepted alike; once the plugin is made, each field holds torch's type.
    Objects given are copied, never changed. A field set later is checked when `settings` is called.

    Raises:
        ValueError: If a value is not allowed, alone or beside the others.
        TypeError: If a value has a type that the field does not take.

    Source: accelerate 1.15 ``utils/dataclasses.py``. Different here: what is explicit always wins over the environment;
    with FSDP2, ``forward_prefetch`` works and obsolete fields are read from arguments only, since Accelerate's launcher
    exports all of them; nothing is written to the environment.
    """

    def __post_init__(self) -> None:
        self._resolve(env.fields_from_env(os.environ))

    def _resolve(self, unset: Mapping[str, str]) -> None:
        """Give each field its documented type; ``unset`` holds what stands in for a field that is None."""
        self._resolve_version(unset)
        self._resolve_sharding(unset)
        if self._version == 2:
            unset = {name: value for name, value in unset.items() if name not in OBSOLETE_IN_FSDP2}
        self._resolve_flags(unset)
        self._resolve_backward_prefetch(unset)
        self._check_param_init_fn()
        self._resolve_wrapping(unset)
        self._resolve_ignored_modules(unset)
        self._resolve_mixed_precision()
        self._fill("cpu_offload", unset, False)
        self.set_cpu_offload()
        self.validate_cpu_offload()
        self._fill("state_dict_type", unset)
        self.set_state_dict_type()
        if self._version == 2:
            self._drop_obsolete()

    # ------------------------------------------------------------------ Accelerate's methods
    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Turn ``auto_wrap_policy`` into torch's callable for the classes of ``model``, as FSDP1 itself takes it.

        The strategy does not need it: it wraps by `settings`.

        Raises:
            ValueError: If ``model`` has no submodule of a named class, or there is no name to look for.
        """
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            classes = layer_classes(model, self.transformer_cls_names_to_wrap)
            self.auto_wrap_policy = partial(transformer_auto_wrap_policy, transformer_layer_cls=set(classes))
        elif self.auto_wrap_policy is size_based_auto_wrap_policy:
            size = self.min_num_params
            self.auto_wrap_policy = partial(size_based_auto_wrap_policy, min_num_params=size) if size else None

    def set_mixed_precision(
        self, mixed_precision: str | torch.dtype, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Set ``mixed_precision_policy`` to one dtype for computing, reducing and (FSDP1) buffers or (FSDP2) outputs.

        Args:
            mixed_precision: ``"bf16"``, ``"fp16"``, ``"fp32"`` or such a dtype; ``"fp8"`` computes in FP8 around a
                policy of bf16, as in Accelerate.
            buffer_autocast: Keep floating-point buffers in fp32 (FSDP1; FSDP2 leaves buffers alone).
            override: Whether to replace a policy that is there; else that one stays.

        Raises:
            ValueError: If the dtype is not one to compute in.
        """
        around_fp8 = isinstance(mixed_precision, str) and mixed_precision.lower() == "fp8"
        dtype = torch.bfloat16 if around_fp8 else env.as_dtype("mixed_precision", mixed_precision)
        if override or self.mixed_precision_policy is None:
            values: dict[str, Any] = dict.fromkeys(_POLICY_DTYPES[self._version], dtype)
            if buffer_autocast and "buffer_dtype" in values:
                values["buffer_dtype"] = torch.float32
            self.mixed_precision_policy = self._policy_class()(**values)

    def validate_mixed_precision_policy(self) -> None:
        """Check that ``mixed_precision_policy`` is of the class that this version of FSDP takes.

        Raises:
            TypeError: If it is not.
        """
        expected = self._policy_class()
        if not isinstance(self.mixed_precision_policy, expected):
            allowed = f"a str, a dict or (fsdp_version={self._version}) a torch.distributed.fsdp.{expected.__name__}"
            raise env.wrong_type("mixed_precision_policy", self.mixed_precision_policy, allowed)

    def set_state_dict_type(self, state_dict_type: str | StateDictType | None = None) -> None:
        """Set the form of saved checkpoints, and configs that fit it where they are unset.

        Args:
            state_dict_type: A new form (train with sharded, say, and save with full in the end); configs that do not
                fit it are replaced. None keeps the present one.

        Raises:
            ValueError: If there is no such form, or FSDP2 does not have it.
            TypeError: If a config belongs to another form.
        """
        from torch.distributed import fsdp

        default = fsdp.StateDictType.FULL_STATE_DICT if self._version == 1 else fsdp.StateDictType.SHARDED_STATE_DICT
        chosen = self.state_dict_type if state_dict_type is None else state_dict_type
        name, forms = "state_dict_type", _FORMS[self._version]
        if isinstance(chosen, str) and f"{chosen.lower()}_state_dict" in forms:  # Lightning's "full" and "sharded"
            chosen = f"{chosen}_state_dict"
        kind = default if chosen is None else env.as_member(name, chosen, fsdp.StateDictType, forms)
        if self._version == 2 and kind is fsdp.StateDictType.LOCAL_STATE_DICT:
            raise ValueError(
                f"{env.source(name, chosen)}='local_state_dict' is not possible with fsdp_version=2. "
                "Use 'sharded_state_dict' or 'full_state_dict', or fsdp_version=1."
            )
        for name, config in fitting_configs(kind).items():
            given = getattr(self, name)
            fits = isinstance(given, type(config))
            if given is not None and not fits and state_dict_type is None:
                raise env.wrong_type(name, given, f"a {type(config).__name__} with state_dict_type={kind.name.lower()}")
            setattr(self, name, copy.copy(given) if fits else config)
            if fits:
                warn_of_no_effect(name, given, kind)
        self.state_dict_type = kind

    def set_cpu_offload(self) -> None:
        """Turn a boolean ``cpu_offload`` (or FSDP1's ``CPUOffload`` under FSDP2) into this version's object."""
        from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

        value: object = self.cpu_offload
        if isinstance(value, bool | str):
            value = CPUOffload(offload_params=env.as_bool("cpu_offload", value))
        if isinstance(value, CPUOffload) and self._version == 2:
            value = CPUOffloadPolicy() if value.offload_params else OffloadPolicy()
        self.cpu_offload = cast("CPUOffload | OffloadPolicy", copy.copy(value))

    def validate_cpu_offload(self) -> None:
        """Check that ``cpu_offload`` is of the class that this version of FSDP takes.

        Raises:
            TypeError: If it is not.
        """
        from torch.distributed.fsdp import CPUOffload, OffloadPolicy

        expected = CPUOffload if self._version == 1 else OffloadPolicy
        if not isinstance(self.cpu_offload, expected):
            allowed = f"a bool or (fsdp_version={self._version}) a torch.distributed.fsdp.{expected.__name__}"
            raise env.wrong_type("cpu_offload", self.cpu_offload, allowed)

    # ------------------------------------------------------------------ for the engines
    def settings(
        self, *, precision: PrecisionSettings | None = None, dp_replicate: int = 1
    ) -> FSDP1Settings | FSDP2Settings:
        """Return the plugin as what the engine for its version takes, strict and frozen.

        Args:
            precision: Dtypes by ``Trainer(precision=...)``; ``mixed_precision_policy`` wins where it is set.
            dp_replicate: Model copies. With more than one, FSDP1's sharding strategy becomes its hybrid form.

        Raises:
            ValueError, TypeError: If a field that was set after the plugin was made is wrong, or (ValueError) if
                ``dp_replicate`` copies do not fit the sharding strategy.
        """
        plugin = copy.copy(self)
        plugin._resolve({})
        common = plugin._engine_settings(precision or PrecisionSettings())
        if plugin._version == 2:
            return FSDP2Settings(**common, reshard_after_forward=cast("bool | int", plugin.reshard_after_forward))
        default_init = plugin.param_init_fn is materialize  # the engine knows the device better
        return FSDP1Settings(
            **common,
            sharding_strategy=replicated(cast("ShardingStrategy", plugin.sharding_strategy), dp_replicate),
            backward_prefetch=cast("BackwardPrefetch | None", plugin.backward_prefetch),
            limit_all_gathers=plugin.limit_all_gathers,
            use_orig_params=bool(plugin.use_orig_params),
            param_init_fn=None if default_init else plugin.param_init_fn,
        )

    def _engine_settings(self, precision: PrecisionSettings) -> dict[str, Any]:
        offload: Any = self.cpu_offload
        kind = cast("StateDictType", self.state_dict_type)
        return {
            "wrap": self._wrap_settings(),
            "precision": self._precision() or precision,
            "cpu_offload": getattr(offload, "offload_params", hasattr(offload, "pin_memory")),
            # True is torch's default, and an error without an accelerator: left to the engine.
            "pin_memory": None if getattr(offload, "pin_memory", True) else False,
            "ignored_modules": as_modules(self.ignored_modules),
            "activation_checkpointing": bool(self.activation_checkpointing),
            "activation_checkpointing_offload": bool(self.activation_checkpointing_offload),
            "cpu_ram_efficient_loading": bool(self.cpu_ram_efficient_loading),
            "sync_module_states": bool(self.sync_module_states),
            "forward_prefetch": bool(self.forward_prefetch),
            "state_dict_type": cast("StateDictName", kind.name.lower()),
            "full_weights": full_state(self.state_dict_config),
            "full_optimizer": full_state(self.optim_state_dict_config),
        }

    def _wrap_settings(self) -> WrapSettings:
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        policy: Any = self.auto_wrap_policy
        if policy is transformer_auto_wrap_policy:
            names = None if self.transformer_cls_names_to_wrap is None else tuple(self.transformer_cls_names_to_wrap)
            return WrapSettings(kind="transformer_based_wrap", transformer_cls_names=names)
        if policy is size_based_auto_wrap_policy and self.min_num_params:
            return WrapSettings(kind="size_based_wrap", min_num_params=self.min_num_params)
        if policy is size_based_auto_wrap_policy:
            env.warn_once(
                "auto_wrap_policy",
                "auto_wrap_policy='size_based_wrap' with min_num_params=0 wraps nothing, so all parameters are "
                "gathered at once. Set min_num_params (or FSDP_MIN_NUM_PARAMS) to the parameter count of the "
                "smallest unit.",
            )
            return WrapSettings()
        return WrapSettings() if policy is None else WrapSettings(kind="callable", policy=policy)

    def _precision(self) -> PrecisionSettings | None:
        policy = self.mixed_precision_policy
        if policy is None:
            return None
        values = {key: getattr(policy, key) for key in _POLICY_DTYPES[self._version] + _POLICY_FLAGS[self._version]}
        # `fully_shard` has one flag for the root and the other units.
        return PrecisionSettings(**{"cast_root_forward_inputs": values["cast_forward_inputs"], **values})

    # ------------------------------------------------------------------ steps of _resolve beside the fields' own
    def _resolve_mixed_precision(self) -> None:
        value: Any = self.mixed_precision_policy
        if value is None:
            return
        if isinstance(value, str):
            self.set_mixed_precision(value, override=True)
        elif isinstance(value, Mapping):
            self.mixed_precision_policy = self._policy_class()(**self._policy_arguments(value))
        self.validate_mixed_precision_policy()
        self.mixed_precision_policy = copy.copy(self.mixed_precision_policy)
        plain = self._policy_class()()
        for name in ("keep_low_precision_grads", "_module_classes_to_ignore"):
            if getattr(value, name, None) not in (None, getattr(plain, name, None)):
                raise ValueError(f"mixed_precision_policy: {name} is not supported; keep its default.")

    def _policy_class(self) -> type[MixedPrecision | MixedPrecisionPolicy]:
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        return MixedPrecision if self._version == 1 else MixedPrecisionPolicy

    def _policy_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        dtypes, flags = _POLICY_DTYPES[self._version], _POLICY_FLAGS[self._version]
        arguments: dict[str, Any] = {}
        for key, value in given.items():
            label = f"mixed_precision_policy[{key!r}]"
            if key in dtypes:
                arguments[key] = None if value is None else env.as_dtype(label, value)
            elif key in flags:
                arguments[key] = env.as_bool(label, value)
            elif key == "buffer_dtype":
                env.warn_once(
                    "mixed_precision_policy", f"{label} has no effect with fsdp_version=2: buffers are unchanged."
                )
            else:
                raise env.wrong_value("a key of mixed_precision_policy", key, dtypes + flags)
        return arguments
