"""How much is sharded: FSDP1's `ShardingStrategy`, FSDP2's ``reshard_after_forward``, and the way between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ....state.truth_values import TRUTH_VALUES
from .environment import as_bool, as_member, source, warn_once

if TYPE_CHECKING:
    from torch.distributed.fsdp import ShardingStrategy


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
            f"sharding_strategy={sharding_strategy!r} and reshard_after_forward={reshard_after_forward!r} differ; "
            "with fsdp_version=1 they mean the same. Give one of them."
        )
    return strategies[0]


def _strategy_from_environment(unset: Mapping[str, str]) -> ShardingStrategy:
    """Return what the variables say: Accelerate's launcher exports both, and means the first one for FSDP1.

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


def reshard_for_fsdp2(sharding_strategy: object, reshard_after_forward: object, unset: Mapping[str, str]) -> bool:
    """Return whether FSDP2 frees parameters after forward; a sharding strategy is translated, with a warning.

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
            "each other. With fsdp_version=2 give reshard_after_forward alone."
        )
    warn_once(
        "sharding_strategy",
        f"sharding_strategy={sharding_strategy!r} is obsolete with fsdp_version=2: taken as "
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
            f"sharding_strategy=NO_SHARD and {dp_replicate} model copies (device_mesh) do not fit: every rank has a "
            "whole copy already. Use 'HYBRID_SHARD', or no device_mesh."
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


def _as_reshard(value: object) -> bool:
    if isinstance(value, bool):
        return value
    try:
        return as_bool("reshard_after_forward", value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{source('reshard_after_forward', value)}={value!r} is not possible with fsdp_version=2. "
            "Use True (frees parameters after forward, as FULL_SHARD does) or False (keeps them, as SHARD_GRAD_OP)."
        ) from None


def _translated(strategy: ShardingStrategy) -> tuple[bool, str]:
    """Return FSDP2's ``reshard_after_forward`` for ``strategy``, and what is left to say about it."""
    name = strategy.name.lstrip("_")
    if name == "NO_SHARD":
        raise ValueError(
            "sharding_strategy=NO_SHARD is not possible with fsdp_version=2, which always shards. "
            "Use plain data parallelism (Lightning's 'ddp'), or fsdp_version=1."
        )
    hint = " For its model copies give the strategy device_mesh=(replicate, shard)." if "HYBRID" in name else ""
    return name in ("FULL_SHARD", "HYBRID_SHARD"), hint
