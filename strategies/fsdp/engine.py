"""The interface that FSDP1 and FSDP2 implement, checks of optimizers, grad scalers, and the step runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer
from typing_extensions import override

from ...state.collectives import AllReduceMaxAsync, all_reduce_max_async
from ...state.process_group import is_planned
from ..common.grads import parameters_of
from ..common.modules import find_ties
from ..optimizers.classes import is_known, try_on_dtensors, try_on_owners, try_on_pieces
from ..optimizers.local_steps import LocalShardStep, can_step_locally
from ..optimizers.steps import WholeTensorStep
from ..parallelism.sequence import SequenceParallel
from ..parallelism.tensor import TensorParallel
from ..sharded_tensors.global_tensors import NoAccess, ShardAccess
from ..sharded_tensors.kept_tensors import OldMemory
from ..sharded_tensors.optimizer_states import OptimizerStates
from ..sharded_tensors.shards import FlatShard
from ..upstream.lightning import _MockOptimizer, rank_zero_info, rank_zero_warn
from ..upstream.patches import Patches
from .flat_params import units_of
from .settings import EngineSettings, resolve_ignored, units_to_wrap
from .sharded_model import (
    NamedTensor,
    OriginalParameters,
    References,
    ShardedModel,
    check_parameters,
    explained_mixture,
    module_attribute_of,
    parameter_order,
    recall_sharded,
    remember_sharded,
)
from .step import Close, CollectiveOrder, inside
from .units import (
    Plan,
    check_modules,
    checkpoint_modules,
    checkpoint_units,
    compile_units,
    explained_recomputation,
    hide_wrapper_names,
    is_marked,
    modules_outside,
    parts_called_alone,
    scalars_of,
    without_attention_of_encoders,
    without_split_ties,
)

SettingsT = TypeVar("SettingsT", bound=EngineSettings)


class Engine(ABC, Generic[SettingsT]):
    """Shards a model and knows what only its version of FSDP knows.

    Args:
        settings: What the plugin resolved to.
        mesh: One-dimensional (shard) or two-dimensional (replicate, shard) mesh over all ranks; with tensor parallelism
            over those with this one's part of the layers.
        device: Where this rank computes.
    """

    version: ClassVar[int]
    """The number users know: 1 or 2."""
    model_key: ClassVar[str]
    """Key of the weights in a sharded checkpoint, as Lightning's strategy for the same FSDP version names it."""
    renews_parameters: ClassVar[bool]
    """Whether sharding replaces each parameter by a new object."""
    refuses_holders: ClassVar[bool] = True
    """Whether it is an error that somebody still holds replaced parameters."""

    path: CollectiveOrder
    """The checker of this rank's all-gathers and reductions, from `lazy_init` on."""
    timeout: timedelta = default_pg_timeout
    """The time that a rank waits for the others at an action that is new to it."""
    in_step = False
    """Whether a training step of automatic optimization runs: a backward in it is the user's own."""

    def __init__(self, settings: SettingsT, mesh: DeviceMesh, device: torch.device) -> None:
        self.settings = settings
        self.mesh = mesh
        self.device = device
        self.all_reduce_max_async: AllReduceMaxAsync = all_reduce_max_async
        """For the messages of the ranks about each step."""
        self.tensor_parallel: TensorParallel | None = None
        """Cuts layers before the rest is sharded, over other ranks than those of the mesh."""
        self.sequence_parallel: SequenceParallel | None = None
        """Cuts the sequences of modules, over ranks of the mesh."""
        self._patches, self._steps = Patches("labels"), Patches("user code")
        self.optimizers: list[Optimizer] = []
        """Of the running fit."""

    @property
    def num_ranks(self) -> int:
        """Of the mesh, and of those that share the layers with them."""
        return self.mesh.size() * (1 if self.tensor_parallel is None else self.tensor_parallel.size)

    def prepare(self, model: nn.Module, *, deferred_init: bool = False) -> ShardedModel:
        """Shard ``model``, whose submodules are changed in place.

        A module that comes back (validation after training) keeps the form it has.

        Args:
            model: Under Lightning the LightningModule.
            deferred_init: Whether all of it is on the meta device, and its values come through `named_tensors`.

        Raises:
            RuntimeError: If ``model`` is sharded by the other FSDP version, or with other sizes or precision.
            ValueError: If the wrap policy or the ignored modules do not fit ``model``, or as `check_modules`.
        """
        sharded = recall_sharded(model, self.version)
        if sharded is None:
            ignored = resolve_ignored(model, self.settings.ignored_modules)
            ties, attribute, order = find_ties(model), module_attribute_of(model), parameter_order(model)
            units = [module for _, module in units_to_wrap(model, self.settings.wrap, ignored, also=is_marked)]
            if not units and not self.settings.find_unused_parameters:
                rank_zero_info(_one_unit(model, self.version))
            units = self._checkpoint(model, units, ignored)
            if (options := self.settings.compile_options) is not None:
                compile_units(units, options)
            if self.settings.find_unused_parameters:  # ranks may differ within a unit, and not in which they use
                units = []
            units = without_attention_of_encoders(model, units)
            units = without_split_ties(model, self._possible_units(model, units), ignored)
            parts = without_split_ties(model, parts_called_alone(model, ignored), ignored)
            unsharded = ignored | modules_outside(model, parts) if parts else ignored
            precision = self.settings.precision
            check_modules(model, [*units, *parts], unsharded, version=self.version, precision=precision)
            flat = not getattr(self.settings, "use_orig_params", True)
            keeps = not self.renews_parameters and not flat
            check_parameters(model, unsharded, version=self.version, keeps_parameters=keeps, is_flattened=flat)
            for module in unsharded:  # sharding moves what it manages; the rest is ours to move
                _move_own_tensors(module, self.device)
            scalars = scalars_of(model, unsharded)
            for parameter in scalars:
                if not parameter.is_meta:
                    parameter.data = parameter.data.to(self.device)
            unsharded_parameters = scalars.union(
                parameter for module in unsharded for parameter in module.parameters(recurse=False)
            )
            if not self.settings.reshard_during_accumulation:
                rank_zero_info(_memory_estimate(model))
            if self.settings.cpu_offload and self.device.type == "cpu":
                rank_zero_warn("cpu_offload has no effect on the CPU: the shards are in host memory already.")
            early = OriginalParameters(
                model, kept=unsharded_parameters if self.renews_parameters else set(model.parameters())
            )
            references = References(model, kept=unsharded_parameters) if self.renews_parameters else None
            old_memory = OldMemory.of(model)
            old_memory.take(model)
            root = self._shard(model, Plan(units, unsharded, scalars, parts, deferred_init))
            if references is not None:
                references.switch(model)
                if self.refuses_holders:
                    references.check_holders()
                old_memory.replaced = references.replaced()
            old_memory.forget(model)
            sharded = ShardedModel(
                root, not parts, self.version, ties, attribute, unsharded_parameters, order, early,
                self.tensor_parallel, self.sequence_parallel, self._form(),
            )  # fmt: skip
            hide_wrapper_names(root)
            remember_sharded(model, sharded)
        if sharded.form != (now := self._form()):
            differing = [(old, new) for old, new in zip(sharded.form, now, strict=True) if old != new]
            before, after = (", ".join(one) for one in zip(*differing, strict=True))
            raise RuntimeError(
                f"{type(model).__name__} is already sharded with {before}, and cannot be sharded again with {after}. "
                "Build a new module (and load its weights from a checkpoint), or keep these settings."
            )
        self.tensor_parallel, self.sequence_parallel = sharded.tensor_parallel, sharded.sequence_parallel
        return sharded

    def _form(self) -> tuple[str, ...]:
        """Return the settings that a sharded module keeps, and that decide what it computes, in words."""
        sizes = [f"tp_size={1 if self.tensor_parallel is None else self.tensor_parallel.size}"]
        if self.sequence_parallel is not None:
            sizes.append(f"{self.sequence_parallel.setting}={self.sequence_parallel.size}")
        precision = self.settings.precision
        return (
            ", ".join(sizes),
            f"a mesh of {' x '.join(map(str, self.mesh.shape))} processes",
            f"param_dtype {precision.param_dtype or 'as stored'}",
            f"reduce_dtype {precision.reduce_dtype or 'as stored'}",
        )

    def _checkpoint(self, model: nn.Module, units: list[nn.Module], ignored: set[nn.Module]) -> list[nn.Module]:
        recomputed, offload = self.settings.recomputed, self.settings.activation_checkpointing_offload
        if recomputed is not None:
            modules = [module for _, module in units_to_wrap(model, recomputed, ignored)]
            return checkpoint_modules(model, modules, units, offload=offload)
        if self.settings.activation_checkpointing:
            return checkpoint_units(model, units, offload=offload)
        return units

    def _possible_units(self, model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
        """Return ``units`` without those that torch cannot shard on their own; they stay with what is around them."""
        return units

    @abstractmethod
    def _shard(self, model: nn.Module, plan: Plan) -> nn.Module:
        """Shard the units, then the parts, or what is left as the root's unit."""

    @abstractmethod
    def named_tensors(
        self, sharded: ShardedModel
    ) -> AbstractContextManager[tuple[list[NamedTensor], Callable[[], list[torch.Tensor]]]]:
        """Open a model that was prepared ``deferred_init``.

        Returns:
            A context of its tensors and of a function that returns the memory to fill, one part for each tensor. The
            model has the values when the context ends.
        """

    @abstractmethod
    def lazy_init(self, root: nn.Module) -> None:
        """Begin a fit or an evaluation: nothing is gathered, and no gradient waits to be reduced."""

    def check_optimizers(self, root: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers that would not train what one process trains; let others step on local or on whole tensors.

        Raises:
            ValueError: As `choose_step` and `check_flat_parameters`.
        """
        self._steps.remove()
        self.optimizers[:] = optimizers
        shard_of = self.shard_access(root).shard_of
        for optimizer in optimizers:
            if isinstance(optimizer, _MockOptimizer):  # configure_optimizers() returned None
                continue
            way = choose_step(optimizer, self.settings, self.version, self.mesh, shard_of)
            if way == "whole" and self.tensor_parallel is not None:
                raise ValueError(
                    f"{type(optimizer).__name__} steps on whole tensors, which tp_size > 1 does not support. Use an "
                    "element-wise optimizer (AdamW, SGD), or tp_size=1."
                )
            if way == "whole":
                group = self.mesh.get_group(self.mesh.ndim - 1)
                WholeTensorStep(optimizer, group, torch.device(self.mesh.device_type), shard_of).attach(self._steps)
            elif way == "local":
                LocalShardStep(optimizer, try_on_pieces(optimizer).unlike_parameters).attach(self._steps)
            elif self.version == 2:
                step_mixtures_one_by_one(optimizer)

    @abstractmethod
    def sharded_modules(self, root: nn.Module) -> set[nn.Module]:
        """Return the modules with parameters of their own in shards, and what FSDP has put around modules."""

    @abstractmethod
    def modules_in_units(self, root: nn.Module) -> Iterable[nn.Module]:
        """Return the modules whose calls need something gathered, once `lazy_init` has been called."""

    @abstractmethod
    def unshard_for_call(
        self, root: nn.Module, module: nn.Module, args: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], Close]:
        """Gather what a call of ``module`` needs, see `UnitOpener`."""

    def translate_error(self, error: BaseException) -> RuntimeError | None:
        """Return a clearer error for one that ended a step and does not mention sharding; as a rule None."""
        return None

    @abstractmethod
    def reset_to_idle(self, root: nn.Module) -> None:
        """End whatever an exception left open: all that is gathered is sharded again."""

    @abstractmethod
    def discard_unreduced_grads(self, root: nn.Module, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Forget gradients that were accumulated and not reduced: those of ``parameters``, or all."""

    def end_training(self, root: nn.Module) -> None:
        """Release gradients and graphs: no backward will come any more, and no optimizer step."""
        self._patches.remove()
        self._steps.remove()
        OptimizerStates.leave(self.optimizers)
        self.optimizers.clear()
        self.discard_unreduced_grads(root)

    def begin_forward(self) -> None:
        """Do what must be done before a step's forward, training or not, of a module with a root unit."""

    def end_forward(self) -> None:
        """Do what must be done after it."""

    def begin_step(self, root: nn.Module) -> None:
        """Begin a training step: no backward of an earlier forward will come."""

    def end_step(self, root: nn.Module) -> None:
        """End a training step of automatic optimization, or what comes before a backward in manual optimization."""

    def reshard_before_backward(self, root: nn.Module) -> None:
        """Leave nothing gathered for hooks; `begin_backward` gathers again what the graph may read by itself.

        A penalty in a step reads weights that were still gathered then, and no hook of a unit comes before it.
        """
        self.reshard(root)

    def begin_backward(self, root: nn.Module) -> None:
        """Begin a backward of what was computed before."""

    def end_backward(self, root: nn.Module, *, reduced: bool) -> None:
        """Put right what a backward leaves behind; every rank calls it.

        Args:
            root: Sharded.
            reduced: Whether it was not inside `no_sync`.

        Raises:
            RuntimeError: On every rank, if the ranks did not use the same units.
        """

    @abstractmethod
    def reduce_left_over(self, root: nn.Module) -> None:
        """Reduce gradients that wait where the last backward of a window has not come, if there was one at all."""

    @abstractmethod
    def scale_unreduced_grads(self, root: nn.Module, parameters: Iterable[nn.Parameter], factor: float) -> None:
        """Multiply the gradients of these parameters that the ranks have not reduced yet."""

    def keep_graph(self) -> None:
        """Be ready for another backward of the graph that the last one kept (``retain_graph=True``)."""

    @abstractmethod
    def reshard(self, root: nn.Module) -> None:
        """Free what is gathered: ``root.parameters()`` are the sharded ones, and the next forward gathers anew."""

    @abstractmethod
    def no_sync(self, root: nn.Module) -> AbstractContextManager[Any]:
        """Accumulate gradients locally inside this context: nothing is reduced."""

    @abstractmethod
    def grad_norm(self, root: nn.Module, parameters: Collection[nn.Parameter], norm_type: float) -> torch.Tensor:
        """Return the norm of the gradients over all ranks, each of which calls it; a scalar."""

    def total_norm(self, root: nn.Module, gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor | None:
        """Return the norm of gradients of the model over all ranks, each of which calls it; None if torch knows it."""
        return None

    @abstractmethod
    def grad_scaler(self) -> torch.amp.GradScaler:
        """Return the gradient scaler for fp16 that agrees on overflows over all ranks."""

    def shard_access(self, root: nn.Module) -> ShardAccess:
        """Return users' code's access to shards, once `lazy_init` has been called."""
        return NoAccess()

    def hides_shards(self, root: nn.Module) -> bool:
        """Return whether a training step can meet shards that look like plain tensors."""
        return False

    @abstractmethod
    def state_dict_module(self, root: nn.Module) -> nn.Module:
        """Return the module to hand to ``torch.distributed.checkpoint.state_dict``, whose names are the plain ones."""


def _memory_estimate(model: nn.Module) -> str:
    num_bytes = sum(
        parameter.numel() * parameter.element_size() * (2 if parameter.requires_grad else 1)
        for parameter in model.parameters()
    )
    return (
        "reshard_during_accumulation=False: the unsharded parameters and gradients use up to "
        f"{num_bytes / 1e9:.2f} GB on each process while gradients accumulate."
    )


def _one_unit(model: nn.Module, version: int) -> str:
    numel = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"FSDP{version} shards {type(model).__name__} as one unit: all its {numel:,} parameters are gathered at once. "
        "To gather layer by layer, set auto_wrap_policy, such as {Layer} or 'transformer_based_wrap'."
    )


def _move_own_tensors(module: nn.Module, device: torch.device) -> None:
    """Move what has values; what is on the meta device gets memory with its values, later."""
    for parameter in module.parameters(recurse=False):
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    for name, buffer in module.named_buffers(recurse=False):
        if not buffer.is_meta:
            module._buffers[name] = buffer.to(device)


def choose_step(
    optimizer: Optimizer,
    settings: EngineSettings,
    version: int,
    mesh: DeviceMesh,
    shard_of: Callable[[torch.Tensor], FlatShard | None],
) -> Literal["as it is", "local", "whole"]:
    """Return how an optimizer steps on shards as one process steps on full parameters; every rank calls it.

    A class that treats each element alone steps on the pieces that FSDP1 shows, and on the local tensors of FSDP2's
    DTensors. Others step on whole tensors where users allow it. Over DTensors norms and means are right, too, in
    classes whose operations DTensors have.

    Args:
        optimizer: That will train.
        settings: Of the engine.
        version: Of FSDP.
        mesh: Over which parameters are sharded.
        shard_of: Returns the shard that a parameter of FSDP1 is; None for any other one.

    Raises:
        ValueError: If it cannot train; on every rank.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"{name} needs scalar products over all parameters, but with FSDP it sees only the shards of this "
            "rank. Use another optimizer, or train with Trainer(strategy='ddp')."
        )
    if is_planned() and not is_known(optimizer):  # there are no values
        return "as it is"
    on_pieces = try_on_pieces(optimizer)
    is_elementwise = on_pieces.problem is None
    if is_elementwise and version == 1:
        return "as it is"
    if is_elementwise and on_pieces.has_plain_states and can_step_locally(optimizer):
        return "local"

    def shape_of(parameter: torch.Tensor) -> torch.Size:
        shard = shard_of(parameter)
        return parameter.shape if shard is None else shard.shape

    on_owners = {one: try_on_owners(optimizer, shape_of, keeps_shapes=one == 1).problem for one in {version, 2}}
    if not getattr(settings, "use_orig_params", True):
        on_owners[1] = "use_orig_params=False puts several parameters into one"
    wants_whole = settings.whole_tensor_optimizers
    if wants_whole is None:
        wants_whole = type(optimizer) is getattr(torch.optim, "Muon", None)  # gathers 13 times for each matrix else
    if wants_whole and not is_elementwise and on_owners[version] is None:
        return "whole"
    if version == 1:
        problem = f"which gives optimizers parts of flattened parameters: {on_pieces.problem}"
        instead = f"fsdp_version=2, whose parameters keep their shapes, if {name} supports DTensors; an element-wise "
        instead += "optimizer"
    else:
        on_dtensors = try_on_dtensors(optimizer, mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(0)])
        if on_dtensors.problem is None:
            return "as it is"
        problem = f"whose parameters are DTensors: {on_dtensors.problem}"
        instead = f"{'fsdp_version=1, which needs no DTensors; ' if is_elementwise else ''}another optimizer"
    if wants_whole and not is_elementwise:
        problem += f", nor with whole_tensor_optimizers=True: {on_owners[version]}"
    allowed = [one for one, hindrance in on_owners.items() if hindrance is None and not is_elementwise]
    if allowed:
        of_version = "" if version in allowed else "fsdp_version=2, "
        argument = f"AccelFSDPStrategy({of_version}whole_tensor_optimizers=True)"
        instead = f"{argument}, which lets it step on whole tensors; {instead}"
    raise ValueError(
        f"{name} cannot train with FSDP{version}, {problem}. Use {instead} (AdamW, SGD); or Trainer(strategy='ddp')."
    )


def _mesh_of(parameter: torch.Tensor) -> DeviceMesh | None:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def step_mixtures_one_by_one(optimizer: Optimizer) -> None:
    """Turn ``foreach`` off for groups with sharded and unsharded parameters (of ignored modules).

    On CUDA torch's optimizers choose it by themselves, and it takes no such mixture.

    Args:
        optimizer: Whose groups hold DTensors and plain tensors.

    Raises:
        ValueError: If a group asks for ``foreach`` or ``fused`` there.
    """
    mixed: list[int] = []
    for index, group in enumerate(optimizer.param_groups):
        if "foreach" not in group or len({_mesh_of(parameter) for parameter in group["params"]}) < 2:
            continue
        asked = next((name for name in ("foreach", "fused") if group.get(name)), None)
        if asked is not None:
            raise ValueError(
                f"{type(optimizer).__name__}({asked}=True) cannot step on sharded and unsharded parameters (those of "
                f"ignored modules) together. Give each kind a group of its own, or leave {asked} out."
            )
        if group["foreach"] is None:
            mixed.append(index)

    def set_foreach(value: bool | None) -> None:
        for index in mixed:
            optimizer.param_groups[index]["foreach"] = value

    if mixed:
        optimizer.register_step_pre_hook(lambda *_: set_foreach(False))
        optimizer.register_step_post_hook(lambda *_: set_foreach(None))


def check_flat_parameters(root: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers over flat parameters unless they plainly hold all of them, each in one group.

    A module's ``parameters()`` leaves out what lies in a flat parameter elsewhere, and groups by name or dimension sort
    flat parameters, whatever is in them. The intent is unknown.

    Args:
        root: Sharded with ``use_orig_params=False``.
        optimizers: That will train.

    Raises:
        ValueError: If trainable parameters are in no optimizer, or an optimizer has several groups.
    """
    optimizers = [one for one in optimizers if not isinstance(one, _MockOptimizer)]
    held = {parameter for one in optimizers for group in one.param_groups for parameter in group["params"]}
    flat: list[Any] = [unit._handle.flat_param for unit in units_of(root)]
    left_out = [name for one in flat if one.requires_grad and one not in held for name in one._fqns]
    grouped = next((one for one in optimizers if len(one.param_groups) > 1), None)
    if optimizers and (left_out or grouped is not None):
        what = (
            f"{type(grouped).__name__} has {len(grouped.param_groups)} groups"
            if grouped is not None
            else f"no optimizer holds the flat parameters of {', '.join(left_out)}"
        )
        raise ValueError(
            f"With use_orig_params=False optimizers see one flat parameter for each unit, and {what}: this may be "
            "unintended. Set use_orig_params=True (the default), or pass all of self.parameters() to the "
            "optimizers, each in one group, and freeze parameters that are not trained."
        )


# ------------------------------------------------------------------------------------------------
# Gradient scalers for fp16.
#
# With ``cpu_offload=True`` gradients lie in host memory while the scale is on a device, and torch's scalers copy the
# inverse scale to host memory without waiting for it. The CPU may divide by what lay there before, and a copy that
# comes late may overwrite what was found out about overflows (github.com/pytorch/pytorch/issues/176429).


class FSDP2GradScaler(torch.amp.GradScaler):
    """torch's, where some gradients are whole: those of ignored modules and scalars, which the ranks have alike.

    torch 2.13 puts these and DTensors into one list, which no operator of DTensors takes.
    """

    @override
    def _unscale_grads_(self, optimizer: Optimizer, *args: Any) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = {}
        for is_sharded in (True, False):
            some = [each for each in parameters_of(optimizer) if isinstance(each.grad, DTensor) is is_sharded]
            part: Any = SimpleNamespace(param_groups=[{"params": some}])
            for device, one in super()._unscale_grads_(part, *args).items():
                found[device] = torch.maximum(found.get(device, one), one)
        return found


class _WaitingForScale(torch.amp.GradScaler):
    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, *more: Any
    ) -> Any:
        # Tensors in host memory are copied to devices in order, and to host memory at once.
        return super()._unscale_grads_(optimizer, inv_scale.cpu(), found_inf.cpu(), *more)


class CPUOffloadGradScaler(_WaitingForScale, FSDP2GradScaler):
    """FSDP2's, dividing by a scale that has arrived."""


class CPUOffloadShardedGradScaler(_WaitingForScale, ShardedGradScaler):
    """FSDP1's, dividing by a scale that has arrived."""


class GroupGradScaler(CPUOffloadGradScaler):
    """FSDP2's with tensor parallelism: what overflows on one rank of a group is skipped by all.

    torch looks at the ranks of the first gradient's mesh alone, which are those of other groups.

    Args:
        device: Type of the gradients' device.
        group: Of the ranks that share layers.
    """

    def __init__(self, device: str, group: dist.ProcessGroup) -> None:
        super().__init__(device)
        self._group = group

    @override
    def _unscale_grads_(self, *args: Any) -> Any:
        found = super()._unscale_grads_(*args)
        for one in found.values():
            dist.all_reduce(one, dist.ReduceOp.MAX, group=self._group)
        return found


# ------------------------------------------------------------------------------------------------
# Steps and backwards of a sharded module: parameters are unsharded only while they run.


T = TypeVar("T")


class StepRunner:
    """Runs the steps of one sharded module.

    Args:
        engine: What sharded it.
        sharded: The sharded module.
        is_manual: Whether it optimizes manually; it may change between fits.
    """

    def __init__(self, engine: Engine[Any], sharded: ShardedModel, is_manual: Callable[[], bool]) -> None:
        self._engine, self._sharded, self._is_manual = engine, sharded, is_manual
        self._accumulating = False
        self.resharded_before_backward = False
        """Whether hooks before backward see parameters at rest."""
        self.kept_gathered = False
        """Whether what a micro-batch gathers serves the next one of its window."""

    def train(self, step: Callable[[], T]) -> T:
        """Run a training step."""
        root, path, manual = self._sharded.root, self._engine.path, self._is_manual()
        self._engine.begin_step(root)
        if not manual:
            path.forget()
            path.begin(("train", self._accumulating))
        self._engine.in_step = not manual
        try:
            result = self._run(step, reshard=self.resharded_before_backward or manual)
        finally:
            self._engine.in_step = False
        if not manual:  # else before each backward: hooks come between the two
            self._engine.end_step(root)
        return result

    def evaluate(self, stage: str, step: Callable[[], T]) -> T:
        """Run a validation, test or predict step.

        Args:
            stage: Which of them.
            step: The module's.
        """
        if not self._sharded.has_root_unit:
            return self._run(step, reshard=True)
        path = self._engine.path
        path.begin(stage)

        def to_its_end() -> T:
            result = step()
            path.end()
            return result

        return self._run(to_its_end, reshard=True)

    def _run(self, step: Callable[[], T], *, reshard: bool) -> T:
        """Run one of the module's steps, around which the root's unit is gathered, if there is one.

        Where there is none (manual optimization), each call inside of the step gathers what it needs.
        """
        root, has_root_unit = self._sharded.root, self._sharded.has_root_unit
        if has_root_unit:
            self._engine.begin_forward()
        with inside if has_root_unit else nullcontext():
            try:
                result = step()
            except BaseException as error:  # whoever catches it may save, evaluate and fit again
                instead = self._engine.translate_error(error)
                self._engine.reset_to_idle(root)
                if instead is not None:
                    raise instead from error
                raise
        if reshard:
            self._engine.reshard_before_backward(root)
        if has_root_unit:
            self._engine.end_forward()
        return result

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced at the end of a backward."""
        return not self._accumulating

    def before_backward(self) -> None:
        """End what the step opened; hooks come between this and the backward."""
        if self._is_manual():
            self._engine.end_step(self._sharded.root)

    def backward(self, run: Callable[[], None], *, keeps_graph: bool) -> None:
        """Run a backward; gradients are what one process would have when it ends, if it reduces them.

        Args:
            run: The backward.
            keeps_graph: Whether there may be another one of the same graph.
        """
        root, sequences = self._sharded.root, self._sharded.sequence_parallel
        self._engine.begin_backward(root)
        with inside:
            try:
                if self._is_manual():
                    self._engine.path.begin("backward")
                with nullcontext() if sequences is None else sequences.running_backward():
                    run()
                self._engine.path.end()
            except BaseException as error:
                self._engine.reset_to_idle(root)
                instead = (
                    explained_mixture(error) or explained_recomputation(error) or self._engine.translate_error(error)
                )
                if instead is not None:
                    raise instead from error
                raise
            self._engine.end_backward(root, reduced=self.reduces)
            if keeps_graph:
                self._engine.keep_graph()
            if not (self.kept_gathered and self._accumulating):  # a step follows: also units that this batch left out
                self._engine.reshard(root)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Run a micro-batch whose gradients are not reduced."""
        self._accumulating = True
        try:
            with self._engine.no_sync(self._sharded.root):
                yield
        finally:
            self._accumulating = False
