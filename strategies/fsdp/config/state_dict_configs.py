"""``state_dict_config`` and ``optim_state_dict_config`` of the plugin: which fit, and what is made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import environment as env
from .settings import FullState

if TYPE_CHECKING:
    from torch.distributed.fsdp import StateDictType

FIELDS = ("state_dict_config", "optim_state_dict_config")


def fitting_configs(kind: StateDictType) -> dict[str, Any]:
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


def warn_of_no_effect(name: str, given: Any, kind: StateDictType) -> None:
    """Warn once if ``given`` says what a form other than the full one cannot do: its shards stay as they are."""
    harmless = (fitting_configs(kind)[name], type(given)(offload_to_cpu=False))  # the latter is how it is
    if kind.name != "FULL_STATE_DICT" and given not in harmless:
        env.warn_once(
            name, f"{name}={given} has no effect with state_dict_type={kind.name.lower()}: shards stay as they are."
        )


def full_state(config: Any) -> FullState:
    """Return what a config says of a full state dict; the default where it is of another form."""
    if not hasattr(config, "rank0_only"):
        return FullState()
    return FullState(rank0_only=config.rank0_only, offload_to_cpu=config.offload_to_cpu)
