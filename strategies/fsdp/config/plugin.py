"""`FullyShardedDataParallelPlugin`: FSDP as users spell it, resolved into what the engines need."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ....state.arguments import named_arguments
from . import environment as env
from .environment import disable_fsdp_ram_efficient_loading, enable_fsdp_ram_efficient_loading
from .plugin_fields import OBSOLETE_IN_FSDP2, PluginFields, materialize
from .settings import FSDP1Settings, FSDP2Settings, PrecisionSettings, WrapSettings, as_modules
from .settings import StateDictType as StateDictName
from .sharding_strategies import replicated
from .state_dict_configs import fitting_configs, full_state, warn_of_no_effect
from .wrapping import layer_classes

if TYPE_CHECKING:
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        MixedPrecision,
        MixedPrecisionPolicy,
        OffloadPolicy,
        ShardingStrategy,
        StateDictType,
    )
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
    """How to shard a model, in Accelerate's words.

    A field that is left None comes from its environment variable (see `environment.VARIABLES`), else from the default.
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
        common = plugin._engine_settings(precision or PrecisionSettings(), dp_replicate)
        if plugin._version == 2:
            return FSDP2Settings(**common, reshard_after_forward=cast("bool", plugin.reshard_after_forward))
        default_init = plugin.param_init_fn is materialize  # the engine knows the device better
        return FSDP1Settings(
            **common,
            sharding_strategy=replicated(cast("ShardingStrategy", plugin.sharding_strategy), dp_replicate),
            backward_prefetch=cast("BackwardPrefetch | None", plugin.backward_prefetch),
            limit_all_gathers=plugin.limit_all_gathers,
            use_orig_params=bool(plugin.use_orig_params),
            param_init_fn=None if default_init else plugin.param_init_fn,
        )

    def _engine_settings(self, precision: PrecisionSettings, dp_replicate: int) -> dict[str, Any]:
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
            "dp_replicate": dp_replicate,
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
                "auto_wrap_policy='size_based_wrap' with min_num_params=0 wraps nothing, so that all parameters are "
                "gathered at once. Set min_num_params (or FSDP_MIN_NUM_PARAMS) to the smallest unit's parameters.",
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
                raise ValueError(f"mixed_precision_policy: {name} is not supported, leave it at its default.")

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
                    "mixed_precision_policy", f"{label} has no effect with fsdp_version=2: buffers stay as they are."
                )
            else:
                raise env.wrong_value("a key of mixed_precision_policy", key, dtypes + flags)
        return arguments
