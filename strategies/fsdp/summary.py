"""Lightning's ``ModelSummary`` of a sharded module: what it would print of the module that was not.

The callback counts in ``on_fit_start``, when the module is sharded: FSDP1's modules have this process's part of their
parameters, or none, and FSDP's wrappers among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FlatParameter, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ...checkpoint.names import clean_name
from ..common.launch import RunSummary, Unit, counted, short_dtype
from ..upstream.lightning import LayerSummary, LightningModule, ModelSummary, Summary, Trainer
from ..upstream.patches import Patches
from ..upstream.torch_core import ActivationWrapper
from .engine import Engine
from .flat_params import WholeParameter, parameters_by_owner
from .fsdp2 import own_class
from .settings import EngineSettings, FSDP2Settings
from .sharded_model import RootWrapper, ShardedModel, unwrap_root


def summarise_whole(callbacks: Iterable[object], root: nn.Module, patches: Patches) -> None:
    """Make the summaries among ``callbacks``, Rich's too, count whole parameters in the fit that begins.

    Args:
        callbacks: The Trainer's.
        root: The sharded module.
        patches: Removed when the fit ends.
    """
    patches.remove()
    for callback in callbacks:
        if isinstance(callback, ModelSummary):
            patches.put(callback, "_summary", partial(_summary, callback, root))


def _summary(callback: ModelSummary, root: nn.Module, trainer: Trainer, module: LightningModule) -> Summary:
    return _WholeSummary(module, WholeParameters(root), max_depth=callback._max_depth)


class _WholeLayer(LayerSummary):
    def __init__(self, module: nn.Module, parameters: WholeParameters) -> None:
        self._parameters = parameters
        super().__init__(module)

    @property
    @override
    def layer_type(self) -> str:
        return own_class(self._module).__name__

    @property
    @override
    def num_parameters(self) -> int:
        return sum(one.numel for one in self._parameters.of(self._module))


class _WholeSummary(Summary):
    def __init__(self, model: LightningModule, parameters: WholeParameters, max_depth: int) -> None:
        self._parameters = parameters
        super().__init__(model, max_depth=max_depth)

    def _modules(self) -> dict[str, nn.Module]:
        """Return the modules by name without wrappers, the root left out."""
        named = {clean_name(name): module for name, module in self._model.named_modules()}  # the innermost is the last
        return {name: module for name, module in named.items() if name}

    @property
    @override
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        if self._max_depth == 0:
            return []
        return [(name, one) for name, one in self._modules().items() if self._max_depth != 1 or "." not in name]

    @override
    def summarize(self) -> dict[str, LayerSummary]:
        rows: dict[str, LayerSummary] = {
            name: _WholeLayer(module, self._parameters) for name, module in self.named_modules
        }
        if self._model.example_input_array is not None:
            self._forward_example_input()
        for row in rows.values():
            row.detach_hook()
        return {name: row for name, row in rows.items() if self._max_depth < 1 or name.count(".") < self._max_depth}

    @property
    @override
    def total_training_modes(self) -> dict[str, int]:
        modes = [module.training for module in {id(one): one for one in self._modules().values()}.values()]
        return {"train": modes.count(True), "eval": modes.count(False)}

    @property
    @override
    def total_parameters(self) -> int:
        return sum(one.numel for one in self._parameters.of(self._model))

    @property
    @override
    def trainable_parameters(self) -> int:
        return sum(one.numel for one in self._parameters.of(self._model) if one.is_trained)

    @property
    @override
    def flop_counts(self) -> dict[str, dict[Any, int]]:
        counts = {clean_name(name): found for name, found in self._flop_counter.get_flop_counts().items()}
        return {name: counts.get(f"{type(self._model).__name__}.{name}", {}) for name in self.layer_names}


_SMALL, _MATTERS = 2**16, 10**6
"""Parameters of a unit whose all-gather takes as long as any, and of a model that is there for its speed."""
_BY_DEFAULT = "FSDP1 is Accelerate's default; prefer fsdp_version=2 for new code (docs: Choosing a strategy)"


def summarise_run(
    strategy: str,
    engine: Engine[Any],
    sharded: ShardedModel,
    precision: str,
    saved_by: str,
    *,
    version_is_default: bool,
) -> RunSummary:
    """Return the summary of a fit.

    Args:
        strategy: Name of its class.
        engine: What sharded the module.
        sharded: The sharded module, nothing of it gathered.
        precision: The Trainer's.
        saved_by: Who writes checkpoints, empty if training does.
        version_is_default: Whether the user has not chosen the version of FSDP.
    """
    settings, root = engine.settings, sharded.root
    parameters = WholeParameters(root)
    whole = sum(one.numel for one in parameters.of(unwrap_root(root)))
    return RunSummary(
        strategy=strategy,
        engine=f"FSDP{engine.version}",
        device=engine.device,
        world_size=engine.num_ranks,
        details=[_mesh(engine), _resharding(root, settings), *_details(settings)],
        parts=[f"units {counted(_unit_classes(root))}", f"{whole:,} parameters, {_held(root):,} of them on rank 0"],
        precision=", ".join([precision, *_dtypes(settings)]),
        checkpoints=f"{settings.state_dict_type}{saved_by}",
        tables=[
            *([_BY_DEFAULT] if version_is_default and engine.version == 1 else []),
            *_small_units(root, parameters, whole),
            *([] if engine.tensor_parallel is None else engine.tensor_parallel.table()),
        ],
    )


def _mesh(engine: Engine[Any]) -> str:
    mesh = engine.mesh
    sizes = [f"{name}={mesh.size(at)}" for at, name in enumerate(mesh.mesh_dim_names or ("shard",))]
    if engine.tensor_parallel is not None:
        sizes.append(f"tp={engine.tensor_parallel.size}")
    if (sequences := engine.sequence_parallel) is not None:
        sizes.append(f"of which {sequences.setting}={sequences.size} in {', '.join(sequences.names)}")
    return "mesh " + " x ".join(sizes)


def _resharding(root: nn.Module, settings: EngineSettings) -> str:
    for unit in root.modules():
        if isinstance(unit, FullyShardedDataParallel):  # torch's own: on one process it does not shard
            return unit.sharding_strategy.name
    after = settings.reshard_after_forward if isinstance(settings, FSDP2Settings) else True
    if not after:
        return "resharded after backward"
    if not isinstance(after, bool):
        return f"resharded over {after} processes after forward"
    return "resharded after forward"


def _details(settings: EngineSettings) -> list[str]:
    found: list[str] = []
    if settings.activation_checkpointing or settings.recomputed is not None:
        found.append("activation checkpointing")
    if settings.cpu_offload:
        found.append("CPU offload")
    if settings.compile_options is not None:
        found.append("compiled units")
    if not settings.reshard_during_accumulation:
        found.append("gathered through accumulation")
    return found


def _unit_classes(root: nn.Module) -> list[type[nn.Module]]:
    """Return the class of each unit as the user wrote it, children before parents."""
    return [own_class(_unwrapped(unit)) for unit in reversed(_units(root))]


def _units(root: nn.Module) -> list[nn.Module]:
    return [module for module in root.modules() if isinstance(module, (FSDPModule, FullyShardedDataParallel))]


def describe_units(engine: Engine[Any], sharded: ShardedModel) -> list[Unit]:
    """Return the units that a model is cut into, parents before children, with this process's shards.

    Args:
        engine: What sharded the module.
        sharded: The sharded module, nothing of it gathered. This is rank 0: others may have smaller shards.
    """
    units, whole = _units(sharded.root), WholeParameters(sharded.root)
    names = {module: clean_name(name) for name, module in unwrap_root(sharded.root).named_modules()}
    numels = {unit: {one.key: one.numel for one in whole.of(unit)} for unit in units}
    held = {unit: {id(one): one for one in unit.parameters()} for unit in units}
    unsharded = {id(one) for one in sharded.unsharded}
    found = []
    for unit in units:
        inner = [each for each in _units(unit) if each is not unit]
        others = unsharded.union(*(numels[each] for each in inner), *(held[each] for each in inner))
        numel = sum(size for key, size in numels[unit].items() if key not in others)
        own = [one for key, one in held[unit].items() if key not in others]
        local = [one.to_local() if isinstance(one, DTensor) else one for one in own]
        sizes = [(one.numel() * engine.mesh.size(-1), one.dtype) for one in local]  # with torch's padding
        if engine.version == 1:  # one flat parameter of one dtype; NO_SHARD leaves it whole
            sizes = [(numel, one.dtype) for one in local[:1]]
        cast = engine.settings.precision.param_dtype
        gathered = [
            size * (cast if cast is not None and dtype.is_floating_point else dtype).itemsize for size, dtype in sizes
        ]
        module, shard_bytes = _unwrapped(unit), sum(one.nbytes for one in local)
        if numel:
            found.append(Unit(names[module], own_class(module).__name__, numel, shard_bytes, sum(gathered)))
    return found


def _small_units(root: nn.Module, parameters: WholeParameters, whole: int) -> list[str]:
    """Name units that cost an all-gather each for next to nothing, in a model whose size matters."""
    if whole < _MATTERS:
        return []
    small = [one for one in _units(root) if sum(each.numel for each in parameters.of(one)) < _SMALL]
    if not small:
        return []
    what = f"{counted([own_class(_unwrapped(one)) for one in small])}: units of fewer than {_SMALL:,} parameters"
    return [
        f"{what} cost an all-gather each; without these classes in auto_wrap_policy, the units around them hold them"
    ]


def _unwrapped(module: nn.Module) -> nn.Module:
    while True:
        if isinstance(module, (FullyShardedDataParallel, RootWrapper)):
            module = module.module
        elif isinstance(module, ActivationWrapper):
            module = module._checkpoint_wrapped_module
        else:
            return module


def _held(root: nn.Module) -> int:
    """Return the number of elements that this process holds at rest, with padding."""
    found = [one.to_local() if isinstance(one, DTensor) else one for one in root.parameters()]
    return sum(one.numel() for one in found)


def _dtypes(settings: EngineSettings) -> list[str]:
    named = {"gathered": settings.precision.param_dtype, "reduced": settings.precision.reduce_dtype}
    return [f"{what} in {short_dtype(dtype)}" for what, dtype in named.items() if dtype is not None]


class WholeParameters:
    """The parameters of modules as they were before sharding.

    Args:
        root: Sharded.
    """

    def __init__(self, root: nn.Module) -> None:
        self._flattened = parameters_by_owner(root)
        self._hidden = {id(one) for one in root.parameters() if isinstance(one, FlatParameter)}
        for unit in self._flattened:  # original parameters are this process's part
            self._hidden.update(id(one) for one in unit.parameters(recurse=False))

    def of(self, module: nn.Module) -> Iterator[WholeParameter]:
        """Return the parameters inside ``module``, each once."""
        found: dict[object, WholeParameter] = {}
        for inner in module.modules():
            own = [
                WholeParameter(id(one), one.numel(), one.requires_grad)
                for one in inner.parameters(recurse=False)
                if id(one) not in self._hidden
            ]
            found.update((one.key, one) for one in (*self._flattened.get(inner, ()), *own))
        yield from found.values()
