"""What the engines are told: frozen, strict, free of environment and of lenient spellings.

`FullyShardedDataParallelPlugin` is the face that users fill in; ``plugin.settings(...)`` resolves it into one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

StateDictType = Literal["full_state_dict", "sharded_state_dict", "local_state_dict"]
WrapKind = Literal["transformer_based_wrap", "size_based_wrap", "no_wrap", "callable"]


@dataclass(frozen=True, kw_only=True)
class WrapSettings:
    """Which submodules become units (gathered and freed together) of their own."""

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
            raise ValueError(f"kind={self.kind!r} and policy={self.policy!r} do not fit: 'callable' needs a policy.")
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
    """Where a full state dict is."""

    rank0_only: bool = True
    """Nothing of it on the other ranks."""
    offload_to_cpu: bool = True
    """In host memory, tensor by tensor; else on the device."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What both engines need."""

    wrap: WrapSettings = field(default_factory=WrapSettings)
    """Which submodules are sharded on their own."""
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
    """Which modules are recomputed where it is not the units."""
    compile_options: Mapping[str, Any] | None = None
    """Keyword arguments of `torch.compile` for each unit. None does not compile."""
    cpu_ram_efficient_loading: bool = False
    """Only rank 0 holds real weights before sharding."""
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
    dp_replicate: int = 1
    """Model copies (HSDP). 1 shards over every rank."""
    reshard_during_accumulation: bool = True
    """Whether the inner micro-batches of a window free what they gathered. False gathers each parameter once for each
    optimizer step, and holds the unsharded parameters and gradients meanwhile."""

    find_unused_parameters: bool = False
    """Whether ranks may use different parts of the model in one step: it is gathered as one unit then."""

    @property
    def weights_from_rank_zero(self) -> bool:
        """Whether rank 0's weights replace the other ranks', which may have none."""
        return self.cpu_ram_efficient_loading

    def __post_init__(self) -> None:
        if self.dp_replicate < 1:
            raise ValueError(f"dp_replicate must be >= 1, got {self.dp_replicate}. Use 1 for no replication.")

    def mesh_shape(self, world_size: int) -> tuple[int, int]:
        """Return (dp_replicate, dp_shard) for ``world_size`` ranks.

        Raises:
            ValueError: If ``dp_replicate`` does not divide ``world_size``.
        """
        if world_size % self.dp_replicate:
            raise ValueError(
                f"dp_replicate={self.dp_replicate} does not divide world_size={world_size}. "
                f"Start a multiple of {self.dp_replicate} processes, or lower dp_replicate."
            )
        return self.dp_replicate, world_size // self.dp_replicate


@dataclass(frozen=True, kw_only=True)
class FSDP1Settings(EngineSettings):
    """What the FSDP1 engine needs; each field feeds one ``FullyShardedDataParallel`` argument."""

    sharding_strategy: ShardingStrategy
    """``ShardingStrategy`` of torch."""
    backward_prefetch: BackwardPrefetch | None = None
    """When the next unit is gathered in backward. None does not prefetch."""
    limit_all_gathers: bool = True
    """Hold back the host so that not too many gathers are in flight."""
    use_orig_params: bool = False
    """Whether optimizers see the original parameters instead of flat ones."""
    param_init_fn: Callable[[nn.Module], None] | None = None
    """How a module on the meta device is materialized."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compile_options is not None and not self.use_orig_params:
            raise ValueError(
                "compile with fsdp_version=1 needs use_orig_params=True: torch does not compile over flat parameters. "
                "Set it, or use fsdp_version=2."
            )


@dataclass(frozen=True, kw_only=True)
class FSDP2Settings(EngineSettings):
    """What the FSDP2 engine needs; each field feeds one ``fully_shard`` argument."""

    reshard_after_forward: bool = True
    """Free a unit's gathered parameters after its forward and gather them again in backward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state_dict_type == "local_state_dict":
            raise ValueError(
                "state_dict_type='local_state_dict' is not possible with fsdp_version=2. "
                "Use 'sharded_state_dict' or 'full_state_dict'."
            )


def as_modules(modules: Iterable[nn.Module] | str | None) -> tuple[nn.Module, ...] | str | None:
    """Return what `EngineSettings.ignored_modules` holds from what a user may have given."""
    return modules if modules is None or isinstance(modules, str) else tuple(modules)
