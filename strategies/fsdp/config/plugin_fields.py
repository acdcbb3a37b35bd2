"""The fields of `FullyShardedDataParallelPlugin`: what each may be, and what it becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from . import environment as env
from .sharding_strategies import reshard_for_fsdp2, strategy_for_fsdp1
from .wrapping import as_policy

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
# Importing `torch.distributed.fsdp` costs half a second: it is imported where a plugin is made, not with this module.

# With FSDP2, the environment does not fill these: Accelerate's launcher exports every variable, asked for or not.
OBSOLETE_IN_FSDP2 = {
    "backward_prefetch": "FSDP2 always gathers the next unit ahead in backward",
    "use_orig_params": "FSDP2 always keeps the original parameters",
    "param_init_fn": "with FSDP2 the strategy materializes modules on the meta device",
}
_FLAGS = {
    "limit_all_gathers": True,
    "use_orig_params": True,  # Accelerate: False, where an optimizer over a part trains something else without a word
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
    reshard_after_forward: str | ShardingStrategy | bool | None = None
    """FSDP2: free gathered parameters after forward, True by default. With FSDP1, the same as ``sharding_strategy``."""
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
    """Which submodules become units: a policy of torch, or a name; ``"no_wrap"`` (the default, held as None)."""
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

    @property
    def _version(self) -> int:
        return cast("int", self.fsdp_version)

    def _fill(self, name: str, unset: Mapping[str, str], default: object = None) -> Any:
        """Return field ``name``, filled from ``unset``, else with ``default``, where it is None."""
        if getattr(self, name) is None:
            setattr(self, name, unset.get(name, default))
        return getattr(self, name)

    def _resolve_version(self, unset: Mapping[str, str]) -> None:
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
                "sync_module_states=False is overruled by cpu_ram_efficient_loading=True: only rank 0 has weights "
                "to begin with, and the other ranks need them.",
            )
            self.sync_module_states = True
        if self._version == 1 and self.param_init_fn is None and (given or self.cpu_ram_efficient_loading):
            self.param_init_fn = materialize
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ValueError(
                "activation_checkpointing_offload=True moves inputs of recomputed units, and nothing is recomputed. "
                "Set activation_checkpointing=True (or FSDP_ACTIVATION_CHECKPOINTING=true) too, or leave it out."
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
