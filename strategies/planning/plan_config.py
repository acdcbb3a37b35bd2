"""The settings of a plan, which can be changed one by one, and made into a strategy and a module."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp1": {"fsdp_version": 1},
    "fsdp2": {"fsdp_version": 2},
    **{f"zero{stage}": {"zero_stage": stage} for stage in range(4)},
}
_FULL_SHARD: dict[str, dict[str, Any]] = {
    "fsdp1": {"sharding_strategy": "FULL_SHARD"},
    "fsdp2": {"reshard_after_forward": True},
}


@dataclass(frozen=True)
class PlanConfig:
    """The requested settings."""

    module: str | None = None
    """``package.module:Class`` or ``path/file.py:Class``; None with `hf_config`."""
    module_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    hf_config: str | None = None
    """Folder or file of a Hugging Face config, or a model's name on the hub."""
    batch: tuple[str, ...] = ()
    """Specifications of tensors, or one ``module:function``."""
    batch_size: int | None = None
    """Of one process, with `hf_config`."""
    sequence_length: int | None = None
    """With `hf_config`."""
    world_size: int = 1
    """Number of processes."""
    strategy: str = "fsdp2"
    """One of `STRATEGIES`."""
    strategy_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the strategy."""
    wrap: tuple[str, ...] = ()
    """Class names of the units."""
    activation_checkpointing: bool = False
    """Whether units are recomputed in backward."""
    precision: str = "32-true"
    """As for the Trainer."""
    accumulate: int = 1
    """Micro-batches for each optimizer step."""
    clip: float | None = None
    """Largest norm of the gradients."""

    # ------------------------------------------------------------------ changed
    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP shards."""
        return self.strategy.startswith("fsdp")

    @property
    def sharding_words(self) -> str:
        """The sharding in words."""
        return f"{self.strategy}, fully sharded" if self.is_fsdp else self.strategy.replace("zero", "ZeRO stage ")

    def fully_sharded(self) -> PlanConfig | None:
        """Return the same with everything sharded; None if it is."""
        if not self.is_fsdp:
            return None if self.strategy == "zero3" else replace(self, strategy="zero3")
        from torch.distributed.fsdp import ShardingStrategy

        from ..fsdp.plugin import FullyShardedDataParallelPlugin

        names = ("sharding_strategy", "reshard_after_forward")  # either of them, under both versions
        given = {name: self.strategy_args[name] for name in names if name in self.strategy_args}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=int(self.strategy[-1]), **given)
        if plugin.reshard_after_forward in (True, ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD):
            return None
        rest = {name: value for name, value in self.strategy_args.items() if name not in names}
        return replace(self, strategy_args={**rest, **_FULL_SHARD[self.strategy]})

    def recomputed(self) -> PlanConfig | None:
        """Return the same with activation checkpointing; None if it is, or is the module's own business."""
        if self.activation_checkpointing or self.strategy_args.get("activation_checkpointing"):
            return None
        if not self.is_fsdp and self.hf_config is None:
            return None
        return replace(self, activation_checkpointing=True)

    def in_micro_batches(self, factor: int) -> PlanConfig | None:
        """Return the same optimizer step in more, smaller micro-batches; None if the batch cannot be divided."""
        if self.hf_config is None or not self.batch_size or self.batch_size % factor:
            return None
        return replace(self, batch_size=self.batch_size // factor, accumulate=self.accumulate * factor)

    # ------------------------------------------------------------------ made
    def in_words(self) -> dict[str, Any]:
        """Return the relevant settings, for the table."""
        words: dict[str, Any] = {"strategy": self.strategy, "precision": self.precision, **self.strategy_args}
        if self.activation_checkpointing:
            words["activation_checkpointing"] = True
        if self.accumulate > 1:
            words["accumulate"] = self.accumulate
        if self.batch_size:
            words |= {"batch_size": self.batch_size, "sequence_length": self.sequence_length}
        return words

    def make_strategy(self) -> Any:
        """Return the strategy.

        Raises:
            ValueError: If activation checkpointing is the module's own business.
        """
        from .. import AccelDeepSpeedStrategy, AccelFSDPStrategy, ParallelismConfig

        arguments = {**STRATEGIES[self.strategy], **self.strategy_args}
        if isinstance(sizes := arguments.get("parallelism_config"), Mapping):
            arguments["parallelism_config"] = ParallelismConfig(**sizes)
        if not self.is_fsdp:
            if self.wrap:
                raise ValueError("--wrap names FSDP units; ZeRO has none.")
            if self.activation_checkpointing and self.hf_config is None:
                raise ValueError(
                    "Under ZeRO a module must recompute on its own (torch.utils.checkpoint): omit "
                    "--activation-checkpointing, and enable it in the module with --module-args."
                )
            return AccelDeepSpeedStrategy(**arguments)
        if self.activation_checkpointing:
            arguments["activation_checkpointing"] = True
        if self.wrap or self.hf_config is not None:
            arguments.setdefault("auto_wrap_policy", "transformer_based_wrap")
        if self.wrap:
            arguments.setdefault("transformer_cls_names_to_wrap", list(self.wrap))
        return AccelFSDPStrategy(**arguments)

    def make_module(self) -> Any:
        """Return the module.

        Raises:
            ValueError: If there is no such class.
        """
        if self.hf_config is not None:
            from .example_model import HuggingFaceModule

            own = self.activation_checkpointing and not self.is_fsdp
            return HuggingFaceModule(self.hf_config, activation_checkpointing=own)
        return named(self.module or "")(**self.module_args)

    def make_batch(self, module: Any) -> Any:
        """Return the micro-batch of one process.

        Raises:
            ValueError: If nothing says what it is.
        """
        from .example_model import batch_of, causal_lm_batch, is_tensor

        if self.batch:
            alone = self.batch[0] if len(self.batch) == 1 else ""
            return named(alone)() if ":" in alone and not is_tensor(alone) else batch_of(self.batch)
        if self.hf_config is not None:
            if not (self.batch_size and self.sequence_length):
                raise ValueError("--hf-config needs --batch-size and --seq-len (per process), or --batch.")
            return causal_lm_batch(self.batch_size, self.sequence_length)
        example = getattr(module, "example_input_array", None)
        if example is None:
            raise ValueError(
                "No batch is defined: use --batch input_ids:8x2048:int64 (once per tensor), --batch "
                "module:function, or set an example_input_array that is a whole batch on the module."
            )
        return example


def named(name: str) -> Callable[..., Any]:
    """Return a class or function.

    Args:
        name: ``package.module:name`` or ``path/file.py:name``.

    Raises:
        ValueError: If there is none.
    """
    where, _, attribute = name.rpartition(":")
    if not where:
        raise ValueError(f"{name!r} is not a valid name: use package.module:Class or path/file.py:Class.")
    module = _module_of(Path(where).resolve()) if where.endswith(".py") else _imported(where)
    if not hasattr(module, attribute):
        raise ValueError(f"{where} has no {attribute!r}.")
    return getattr(module, attribute)


def _imported(name: str) -> Any:
    _add_to_path("")
    return importlib.import_module(name)


@functools.cache  # what a file defines is made once
def _module_of(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ValueError(f"The file {str(file)!r} does not exist.")
    _add_to_path(str(file.parent))  # as for a script: it imports its neighbours
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _add_to_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
