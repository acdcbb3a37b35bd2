"""The sharded model: its root, names of its tensors, switched optimizer parameters and references, hooks, mesh."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FlatParameter, FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from ...checkpoint.names import clean_name
from ...state.process_group import require_group
from ..common.grads import hook_leaf
from ..common.modules import NAME, SHARDED_MODEL, constants_aside, has_extra_state, refuse_module_of_stage_3
from ..parallelism.config import build_named_mesh
from ..parallelism.sequence import SequenceParallel
from ..parallelism.tensor import TensorParallel
from ..sharded_tensors.shards import gathered, part_of
from ..sharded_tensors.user_code import OwnStateDict, in_backward
from ..upstream.torch_core import compute_local_shape_and_global_offset
from ..upstream.torch_fsdp2 import groups_of_state


class RootWrapper(nn.Module):
    """Calls its one child; FSDP2 hooks its root unit here.

    Lightning sends ``training_step`` through ``forward`` of the outermost module. Were the LightningModule itself
    the FSDP2 root, ``self(x)`` inside ``training_step`` would enter the root's hooks a second time.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module.

        Raises:
            RuntimeError: If weights are used outside of the ``forward`` that they are gathered for.
        """
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            instead = explained_mixture(error)
            if instead is None:
                raise
            raise instead from error


def explained_mixture(error: BaseException) -> RuntimeError | None:
    """Return the error for sharded weights (DTensors) of FSDP2 that met plain tensors, which torch refuses."""
    if not isinstance(error, RuntimeError) or "mixed torch.Tensor and DTensor" not in str(error):
        return None
    return RuntimeError(
        "Sharded weights (DTensors) met plain tensors in a step. As a rule, a weight of a module that is gathered "
        "on its own was used without the module's forward: a module inside it, or another method, was called, or "
        "user code read the weight (a fused loss that reads the weight of the output head, a penalty). Call the "
        "module, or keep it in the root's unit: set auto_wrap_policy to a policy object such as "
        "ModuleWrapPolicy({Block}), which wraps nothing else. For a penalty, use weight_decay or "
        "parameter.full_tensor()."
    )


def unwrap_root(root: nn.Module) -> nn.Module:
    """Return the module whose names are the plain ones."""
    return root.module if isinstance(root, RootWrapper) else root


@dataclass(frozen=True)
class ShardedModel:
    """A sharded module, and facts about it that sharding hides."""

    root: nn.Module
    """The outermost sharded module."""
    has_root_unit: bool
    """Whether it is a unit, gathered around a whole step; else its parts are, see `parts_called_alone`."""
    version: int
    """FSDP version."""
    ties: Mapping[str, str]
    """Tied parameters before sharding, alias to kept name."""
    module_attribute: str | None
    """Attribute that held the whole model, see `module_attribute_of`."""
    unsharded: frozenset[nn.Parameter]
    """Parameters of ignored modules: unsharded, their gradients reduced by nobody but us."""
    order: Mapping[str, int]
    """Each parameter's place in ``parameters()`` before sharding, see `parameter_order`."""
    early: OriginalParameters
    """The parameters as they were, for optimizers made before sharding."""
    tensor_parallel: TensorParallel | None
    """The tensor parallelism that has cut layers."""
    sequence_parallel: SequenceParallel | None
    """The sequence parallelism that cuts sequences."""
    form: tuple[str, ...]
    """The settings that it keeps, in words; see `Engine.prepare`."""


def remember_sharded(module: nn.Module, sharded: ShardedModel) -> None:
    """Note on ``module`` what it was sharded into."""
    # Past nn.Module.__setattr__, which would register the root as a child of its own child.
    module.__dict__[SHARDED_MODEL] = sharded


def recall_sharded(module: nn.Module, version: int) -> ShardedModel | None:
    """Return the sharded model of ``module``, or None if it has not been sharded.

    Raises:
        RuntimeError: If it was sharded by the other FSDP version, or by DeepSpeed.
    """
    refuse_module_of_stage_3(module)
    sharded: ShardedModel | None = module.__dict__.get(SHARDED_MODEL)
    if sharded is not None and sharded.version != version:
        raise RuntimeError(
            f"{type(module).__name__} is already sharded with FSDP{sharded.version} and cannot be sharded again with "
            f"FSDP{version}. Build a new module, or keep fsdp_version={sharded.version}."
        )
    return sharded


# ------------------------------------------------------------------------------------------------
# The tensors of a sharded model as targets of loading: names, shapes, and this rank's part.


@dataclass(frozen=True, eq=False)
class NamedTensor:
    """One parameter or buffer, however many names it has."""

    names: tuple[str, ...]
    """Free of traces of wrappers; tied tensors have several."""
    tensor: Tensor
    persistent: bool
    """Whether it stands in state dicts."""

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the full tensor."""
        return tuple(self.tensor.shape)

    def part(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return offsets and sizes of the part that this rank holds.

        Raises:
            ValueError: If each rank holds a summand.
        """
        if not isinstance(self.tensor, DTensor):
            return (0,) * self.tensor.ndim, self.shape
        if any(placement.is_partial() for placement in self.tensor.placements):
            raise ValueError(f"{self.name!r} has placements {self.tensor.placements}; no partial sums are supported.")
        sizes, offsets = compute_local_shape_and_global_offset(
            self.tensor.shape, self.tensor.device_mesh, self.tensor.placements
        )
        return tuple(offsets), tuple(sizes)

    def local(self) -> Tensor:
        """Return this rank's part itself, to be written into."""
        with torch.no_grad():
            return self.tensor.to_local() if isinstance(self.tensor, DTensor) else self.tensor.detach()


def named_tensors(model: nn.Module) -> list[NamedTensor]:
    """Return the distinct parameters and buffers of ``model``, in the order of registration."""
    names: dict[Tensor, list[str]] = {}
    persistent: set[Tensor] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        own: dict[str, Any] = {**module._parameters, **module._buffers}
        for name, tensor in own.items():
            if tensor is None:
                continue
            full_name = clean_name(f"{prefix}.{name}" if prefix else name)
            known = names.setdefault(tensor, [])
            if full_name not in known:
                known.append(full_name)
            if name not in module._non_persistent_buffers_set:
                persistent.add(tensor)
    return [NamedTensor(tuple(found), tensor, tensor in persistent) for tensor, found in names.items()]


def reshard(model: nn.Module) -> None:
    """Leave no unit of ``model`` gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def open_tensors(root: nn.Module, device: torch.device) -> tuple[list[NamedTensor], Callable[[], list[Tensor]]]:
    """Return the tensors of an FSDP2 model that are to be filled, and a function that gives them memory.

    Non-persistent buffers that have values are left alone.

    Args:
        root: Sharded, on the meta device or with values; the strategy's own root is left out of names.
        device: Where meta tensors get memory; shards under CPU offloading get it on the CPU.
    """
    reshard(root)
    model = unwrap_root(root)
    tensors = [named for named in named_tensors(model) if named.persistent or named.tensor.is_meta]

    def targets() -> list[Tensor]:
        materialize(root, device)
        after = {named.names: named for named in named_tensors(model)}
        return [after[named.names].local() for named in tensors]

    return tensors, targets


Unit = TypeVar("Unit")


def roots_of(root: nn.Module, kind: type[Unit]) -> list[Unit]:
    """Return the outermost units of a kind: the root itself, or the parts that stand in its place."""
    if isinstance(root, kind):
        return [root]
    return [unit for child in root.children() for unit in roots_of(child, kind)]


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module that are not of the modules inside."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give meta tensors memory with undefined values, in place: optimizers, ties and sets still hold the same objects.

    Args:
        model: Sharded or not.
        device: Where to; shards under CPU offloading go to the CPU.
    """
    offloaded = _offloaded(model)
    for named in named_tensors(model):
        if named.tensor.is_meta:
            swap_for_empty(named.tensor, torch.device("cpu") if named.tensor in offloaded else device)
    # FSDP2 notices new memory here, and pads and pins it.
    model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]


def swap_for_empty(tensor: Tensor, device: torch.device) -> None:
    """Give ``tensor``, which stays the same object, undefined values on ``device``; on ``meta`` it takes no memory."""
    empty = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    attributes = vars(tensor)
    torch.utils.swap_tensors(tensor, empty)  # type: ignore[no-untyped-call]
    tensor.__dict__ = attributes  # what users' code has set there


def _offloaded(model: nn.Module) -> set[Tensor]:
    """Return the sharded parameters that torch keeps on the CPU."""
    found: set[Tensor] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in groups_of_state(module._get_fsdp_state()):
                found |= {param.sharded_param for param in group.fsdp_params if param.offload_to_cpu}
    return found


# ------------------------------------------------------------------------------------------------
# Optimizers that were made before sharding: switched to the sharded parameters, or refused.


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter of ``model`` under every name it has, free of traces of wrappers.

    Call it before sharding, keep the result until afterwards (it keeps the parameters alive, whose identity matters),
    and hand both to `map_parameters`.
    """
    return {clean_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}


def map_parameters(before: Mapping[str, nn.Parameter], model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Return original to present parameter, by name, for `fsdp2_switch_optimizer_parameters`.

    Args:
        before: Result of `parameters_by_name` before sharding.
        model: The same module, sharded since.
    """
    after = parameters_by_name(model)
    return {parameter: after[name] for name, parameter in before.items() if name in after}


class OriginalParameters:
    """The parameters of a model before sharding, for optimizers that may hold them.

    It keeps none of them alive: without such an optimizer they are freed.

    Args:
        model: Not sharded yet.
        kept: Those that sharding leaves alone.
    """

    def __init__(self, model: nn.Module, kept: Container[nn.Parameter]) -> None:
        named = parameters_by_name(model).items()
        self._parameters = {name: TensorWeakRef(parameter) for name, parameter in named if parameter not in kept}

    def switch(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Switch ``optimizer`` to the parameters of ``model``, sharded by now, as `fsdp2_switch_optimizer_parameters`.

        Raises:
            KeyError: If one of its parameters is no parameter of the model, or now part of a flat one.
        """
        before = {name: parameter for name, weak in self._parameters.items() if (parameter := weak()) is not None}
        mapping = map_parameters(before, model)
        mapping.update({parameter: parameter for parameter in model.parameters()})
        fsdp2_switch_optimizer_parameters(optimizer, mapping)


def fsdp2_switch_optimizer_parameters(
    optimizer: Optimizer, mapping: Mapping[int, nn.Parameter] | Mapping[nn.Parameter, nn.Parameter]
) -> None:
    """Switch ``optimizer`` from the original parameters to the sharded ones, in place.

    Groups, their options and their order stay. State that exists already (Adagrad makes it at once) is cut into the
    same shards; no process communicates. A parameter that is sharded already stays as it is.

    Args:
        optimizer: Made over the original parameters.
        mapping: Original to sharded parameter. Keys are the original parameters themselves (see `map_parameters`) or
            their ``data_ptr()``. Prefer the parameters: all meta and all empty tensors have the address 0, and the
            address of memory that was freed is given out again.

    Raises:
        KeyError: If a parameter has no sharded one, or address and shape do not identify it; nothing is changed then.
            Training on would leave the model's weights as they are.
        RuntimeError: If a parameter has state that cannot be cut into shards; nothing is changed then.

    Source: accelerate 1.15 ``utils/fsdp_utils.py``; different here: keys may be parameters, and state is carried along.
    """
    table: dict[Any, nn.Parameter] = dict(mapping)
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    taken: set[nn.Parameter] = set()
    problems: list[str] = []
    for described, parameter in _parameters_of(optimizer):
        sharded = _look_up(parameter, table)
        if sharded is None:
            problems.append(f"{described} has no sharded parameter")
        elif sharded.shape != parameter.shape:
            problems.append(f"{described} is mapped to a parameter of shape {tuple(sharded.shape)}")
        elif sharded in taken:
            problems.append(f"{described} is mapped to the same sharded parameter as another parameter")
        else:
            replaced[parameter] = sharded
            taken.add(sharded)
    if problems:
        raise KeyError(
            f"{type(optimizer).__name__} cannot be switched to the sharded parameters: {'; '.join(problems)}. Build "
            "the optimizer over parameters of the sharded model, or build it after sharding (under the Trainer: in "
            "configure_optimizers()). FSDP1 keeps parameters only with use_orig_params=True."
        )
    carried = {
        sharded: _carry(optimizer.state[parameter], parameter, sharded)
        for parameter, sharded in replaced.items()
        if parameter is not sharded and parameter in optimizer.state
    }
    for group in optimizer.param_groups:
        group["params"][:] = [replaced[parameter] for parameter in group["params"]]  # LBFGS keeps the list itself
    for parameter, sharded in replaced.items():
        if sharded in carried:
            del optimizer.state[parameter]
            optimizer.state[sharded] = carried[sharded]


def _parameters_of(optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter with the words that an error needs."""
    for group_index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [None] * len(group["params"])
        for index, (name, parameter) in enumerate(zip(names, group["params"], strict=True)):
            called = f" {name!r}" if name is not None else ""
            yield f"parameter{called} (group {group_index}, index {index}, shape {tuple(parameter.shape)})", parameter


def _look_up(parameter: nn.Parameter, table: Mapping[Any, nn.Parameter]) -> nn.Parameter | None:
    if parameter in table:
        return table[parameter]
    if any(parameter is sharded for sharded in table.values()):
        return parameter
    if isinstance(parameter, DTensor):  # one of another model: it has no address of its own
        return None
    address = parameter.data_ptr()
    return table.get(address) if address else None


def _carry(state: Mapping[str, Any], parameter: nn.Parameter, sharded: nn.Parameter) -> dict[str, Any]:
    """Return ``state`` of ``parameter`` as state of ``sharded``."""
    carried: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0:  # such as the step
            carried[key] = value
        elif value.is_meta or value.shape != parameter.shape or isinstance(value, DTensor):
            raise RuntimeError(
                f"The optimizer's state {key!r} (shape {tuple(value.shape)}, on {value.device}) of a parameter of "
                f"shape {tuple(parameter.shape)} cannot be sharded. Build the optimizer after sharding."
            )
        elif isinstance(sharded, DTensor):
            carried[key] = part_of(value, sharded)
        else:
            carried[key] = value.to(sharded.device)
    return carried


# ------------------------------------------------------------------------------------------------
# Facts about the model before sharding that readers of checkpoints need: order and attribute.


def parameter_order(model: nn.Module) -> dict[str, int]:
    """Return the place in ``model.parameters()`` of each parameter, under all its names without traces of wrappers.

    Ask before sharding: FSDP1's flat parameters come in another order than the parameters in them.
    """
    places = {parameter: place for place, parameter in enumerate(model.parameters())}
    named = model.named_parameters(remove_duplicate=False)
    return {clean_name(name): places[parameter] for name, parameter in named}


def module_attribute_of(model: nn.Module) -> str | None:
    """Return the attribute under which ``model`` holds all its parameters.

    Returns:
        The name; ``""`` if ``model`` holds parameters itself or in several children; None without parameters.
    """
    if next(model.parameters(recurse=False), None) is not None:
        return ""
    holders = [name for name, child in model.named_children() if next(child.parameters(), None) is not None]
    return None if not holders else holders[0] if len(holders) == 1 else ""


# ------------------------------------------------------------------------------------------------
# References to original parameters in attributes and containers, which FSDP2 replaces by sharded ones.
#
# Code marks parameters (``p._no_weight_decay = True``) and keeps them, or their ids, in attributes of modules before
# they are sharded. Where it reads those later, they must be the parameters that train.


_MODULES_OWN = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, tuple, dict, set, frozenset)
_MOST_LEVELS = 8


class References:
    """References that code may keep to the parameters of a model that is about to be sharded.

    It keeps none of them alive: each is freed when its unit is sharded.

    Args:
        model: Not sharded yet.
        kept: Parameters that sharding leaves alone.
    """

    def __init__(self, model: nn.Module, kept: Iterable[nn.Parameter]) -> None:
        left_alone = {id(parameter) for parameter in kept}
        named = parameters_by_name(model)
        self._names: dict[int, str] = {}
        for name, parameter in named.items():
            if id(parameter) not in left_alone:
                self._names.setdefault(id(parameter), name)
        self._alive = {key: TensorWeakRef(named[name]) for key, name in self._names.items()}
        self._attributes = {name: dict(vars(named[name])) for name in self._names.values() if vars(named[name])}
        self._hooks = {
            name: hooks for name in self._names.values() if (hooks := named[name]._backward_hooks) is not None
        }
        self._new: dict[int, nn.Parameter] = {}

    def switch(self, model: nn.Module) -> None:
        """Switch attributes and containers of modules to the parameters of ``model``, sharded by now."""
        after = parameters_by_name(model)
        self._new = {key: after[name] for key, name in self._names.items() if name in after}
        for name, attributes in self._attributes.items():
            if name in after:
                for attribute, value in attributes.items():
                    vars(after[name]).setdefault(attribute, value)
        for name, hooks in self._hooks.items():
            if name in after:  # the same dict: what register_hook() has returned removes them from it
                after[name]._backward_hooks = hooks
        visited: set[int] = set()
        for module in model.modules():
            attributes = vars(module)
            for name in [name for name in attributes if name not in _MODULES_OWN]:
                value = attributes[name]
                switched = self._switched(value, visited)
                if switched is not value:
                    attributes[name] = switched

    def _original(self, value: object) -> nn.Parameter | None:
        """Return the parameter that has taken the place of ``value``, if it is an original one."""
        if not isinstance(value, nn.Parameter) or id(value) not in self._new:
            return None
        return self._new[id(value)] if self._alive[id(value)]() is value else None

    def _switched(self, value: Any, visited: set[int]) -> Any:
        """Return ``value``, a mutable container changed in place, or what takes its place."""
        if isinstance(value, nn.Parameter):
            new = self._original(value)
            return value if new is None else new
        if type(value) is dict or (isinstance(value, dict) and type(value).__module__ == "collections"):
            return self._switched_dict(value, visited)
        if not isinstance(value, list | tuple | set | frozenset) or id(value) in visited:
            return value
        visited.add(id(value))
        items = list(value)
        new_items = self._switched_items(items, visited)
        if all(new is item for new, item in zip(new_items, items, strict=True)):
            return value
        if isinstance(value, list):
            value[:] = new_items
        elif isinstance(value, set):
            value.clear()
            value.update(new_items)
        else:
            return type(value)(*new_items) if hasattr(value, "_fields") else type(value)(new_items)
        return value

    def _switched_items(self, items: list[Any], visited: set[int]) -> list[Any]:
        if items and all(type(item) is int and item in self._new for item in items):  # ids
            return [id(self._new[item]) for item in items]
        return [self._switched(item, visited) for item in items]

    def _switched_dict(self, value: dict[Any, Any], visited: set[int]) -> dict[Any, Any]:
        if id(value) in visited:
            return value
        visited.add(id(value))
        keys, values = list(value), list(value.values())
        new_keys = self._switched_items(keys, visited)
        new_values = [self._switched(item, visited) for item in values]
        if any(new is not old for new, old in zip((*new_keys, *new_values), (*keys, *values), strict=True)):
            value.clear()
            value.update(zip(new_keys, new_values, strict=True))
        return value

    # ------------------------------------------------------------------ who is left
    def replaced(self) -> dict[int, tuple[TensorWeakRef, nn.Parameter]]:
        """Return the parameters in the place of original ones that something keeps, by the originals' identities."""
        return {
            key: (weak, self._new[key]) for key, weak in self._alive.items() if key in self._new and weak() is not None
        }

    def check_holders(self) -> None:
        """Check, after `switch`, that nobody keeps original parameters.

        Raises:
            RuntimeError: If an object does, optimizers left out; it names both.
        """
        if all(weak() is None for weak in self._alive.values()):
            return
        gc.collect()
        held = [parameter for weak in self._alive.values() if (parameter := weak()) is not None]
        if not held:
            return
        holders = _holders_of(held, {id(held): held, id(self.__dict__): self.__dict__})
        if holders:
            names = ", ".join(repr(self._names[id(parameter)]) for parameter in held[:3])
            raise RuntimeError(
                f"{', '.join(holders)} holds original parameters ({names}{', ...' if len(held) > 3 else ''}), which "
                "FSDP2 has replaced with sharded ones: reading or changing the originals does not affect the "
                "trained parameters. Store the module instead, and read its parameter where it is used; or keep the "
                "parameters in an attribute, list or dict of a module, which the strategy updates."
            )


def _holders_of(held: list[nn.Parameter], ours: Mapping[int, object]) -> list[str]:
    """Return the objects that keep tensors, as a type and an attribute; optimizers, which are switched, left out."""
    found: dict[str, None] = {}
    level: list[Any] = list(held)
    below = {id(each) for each in held}
    seen: set[int] = {*ours, id(level)}
    for _ in range(_MOST_LEVELS):
        upper: list[Any] = []
        seen |= {id(upper), id(level)}
        for referrer in gc.get_referrers(*level):
            if id(referrer) in seen or isinstance(referrer, types.FrameType | types.GeneratorType | types.CellType):
                continue
            seen.add(id(referrer))
            if isinstance(referrer, _CONTAINERS) and not isinstance(referrer, Optimizer):
                upper.append(referrer)
                below.add(id(referrer))
            elif not isinstance(referrer, Optimizer | Tensor | types.FunctionType | types.ModuleType):
                own = list(getattr(referrer, "__dict__", {}).items())
                name = next((name for name, value in own if id(value) in below), None)
                if name is not None:
                    found[f"{type(referrer).__name__}.{name}"] = None
        if not upper:
            break
        level = upper
    return list(found)


# ------------------------------------------------------------------------------------------------
# torch's state dicts of a sharded model, with modules' extra states.


def model_state_dict(
    module: nn.Module,
    options: StateDictOptions | None = None,
    *,
    with_constants: bool = False,
    is_checkpoint: bool = True,
) -> dict[str, Any]:
    """Return torch's state dict of a sharded model.

    Args:
        module: What ``Engine.state_dict_module`` returns of it.
        options: Torch's.
        with_constants: Whether to include those of quantized weights.
        is_checkpoint: Whether a ``state_dict()`` that the user has written has its say.
    """
    with _findable_extra_states(module), constants_aside(module) as constants:
        own = OwnStateDict.of(module) if is_checkpoint else None
        if own is None:
            state = cast("dict[str, Any]", get_model_state_dict(module, options=options))
        elif options is None or not options.full_state_dict:
            state = own.applied_to(get_model_state_dict(module, options=options))
        else:  # it runs on all ranks, and torch's state dict in host memory is on rank 0 alone
            is_flat = any(isinstance(one, FlatParameter) for one in module.parameters())
            shown = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)) if is_flat else None
            state = own.gathered(shown, on_rank_zero=options.cpu_offload)
    return {**state, **constants} if with_constants else state


def load_model_state_dict(
    module: nn.Module, state: dict[str, Any], *, strict: bool = True, is_checkpoint: bool = True
) -> None:
    """Load a state dict of a sharded model by torch's function, as `model_state_dict` returns one."""
    own = OwnStateDict.of(module) if is_checkpoint else None
    if own is not None:  # a wrapper would load without the user's load_state_dict()
        own.load(state, strict=strict)
        return
    with _findable_extra_states(module):
        set_model_state_dict(module, state, options=StateDictOptions(strict=strict))


@contextmanager
def _findable_extra_states(module: nn.Module) -> Iterator[None]:
    """Make torch's functions for state dicts find them inside of FSDP1's wrappers.

    They follow each name to what it names, and look for an attribute of this one's there (torch 2.13
    ``distributed/checkpoint/state_dict.py``, ``_get_fqns``).
    """
    with ExitStack() as stack:
        for one in module.modules():
            if has_extra_state(one) and NAME not in vars(one):
                vars(one)[NAME] = None
                stack.callback(partial(vars(one).pop, NAME))
        yield


# ------------------------------------------------------------------------------------------------
# The mesh over all ranks that a model is sharded on.


def build_mesh(given: tuple[int, int] | DeviceMesh | None, world_size: int, device_type: str) -> DeviceMesh:
    """Return the mesh ``("shard",)``, or ``("replicate", "shard")`` for hybrid sharding.

    Args:
        given: What the user asked for: the two sizes, a mesh of two dimensions, or None to shard over every rank.
        world_size: Number of ranks.
        device_type: Such as ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: If ``given`` has not two dimensions, or they do not multiply to ``world_size``.
    """
    if given is None:
        # Not init_device_mesh(): where CUDA is visible and the group is gloo's, it starts another one for each mesh.
        return DeviceMesh.from_group(require_group("Sharding"), device_type, mesh_dim_names=("shard",))
    shape = tuple(given.shape) if isinstance(given, DeviceMesh) else tuple(given)
    if len(shape) != 2 or shape[0] * shape[1] != world_size:
        raise ValueError(
            f"device_mesh={given} must be (replicate, shard) with replicate * shard = {world_size}, the number of "
            "processes."
        )
    if isinstance(given, DeviceMesh):
        return given
    return build_named_mesh(dict(zip(("replicate", "shard"), shape, strict=True)), device_type)


# ------------------------------------------------------------------------------------------------
# Users' own parameters: their classes, and the hooks on them (``parameter.register_hook``).
#
# Under ddp a hook runs on a parameter's local gradient in each backward, before gradients are reduced. With FSDP,
# autograd never reaches the parameter that users see: the hooks run on the unsharded one that is used in its place.


GUARD = "_accelight_guard"
"""The attribute of a parameter that holds the handle of a hook that is not the user's."""
HOOKED = "_accelight_hooks"
"""The same of the hook that runs those of users on an unsharded parameter, or on an FSDP1 unit."""
_FROM_LIBRARIES = ("torch.", "bitsandbytes.")
_COUNTS_NODES = (
    "register_multi_grad_hook() would never run on a parameter of FSDP, which is no node of autograd's graph. Use "
    'register_hook() on each, register_multi_grad_hook(..., mode="any"), or the module\'s on_after_backward().'
)


def check_parameters(
    model: nn.Module,
    unsharded: Collection[nn.Module] = (),
    *,
    version: int,
    keeps_parameters: bool,
    is_flattened: bool = False,
) -> None:
    """Check that sharding loses nothing of the parameters of ``model``.

    Args:
        model: Not sharded yet.
        unsharded: Modules whose own parameters stay as they are.
        version: Of FSDP.
        keeps_parameters: Whether users see the same objects afterwards.
        is_flattened: Whether they see flat parameters.

    Raises:
        ValueError: If it does; all parameters are listed, with what to do.
    """
    problems: list[str] = []
    for prefix, module in model.named_modules():
        if module not in unsharded:
            for name, parameter in module.named_parameters(prefix, recurse=False):
                problems += _problems(
                    clean_name(name), parameter, keeps_parameters=keeps_parameters, is_flattened=is_flattened
                )
    if problems:
        raise ValueError("\n".join([f"FSDP{version} cannot train this {type(model).__name__}:", *problems]))


def _problems(name: str, parameter: nn.Parameter, *, keeps_parameters: bool, is_flattened: bool) -> Iterator[str]:
    cls: Any = type(parameter)
    is_own = issubclass(cls, nn.Parameter) and cls not in (nn.Parameter, UninitializedParameter)
    if is_own and parameter.requires_grad and not cls.__module__.startswith(_FROM_LIBRARIES):
        behaves = cls.__torch_function__ is not nn.Parameter.__torch_function__
        if behaves or not keeps_parameters:
            yield (
                f"{name}: the class {cls.__name__} is lost when the parameter is sharded. Use nn.Parameter, and mark "
                "it with an attribute (parameter.kind = ...), which is kept."
            )
    if parameter._post_accumulate_grad_hooks:
        yield never_runs(name)
    if any(map(_counts_nodes, (parameter._backward_hooks or {}).values())):
        yield f"{name}: {_COUNTS_NODES}"
    if parameter._backward_hooks and is_flattened:
        yield (
            f"{name}: register_hook() on a part of a flat parameter never runs. Set use_orig_params=True (the default)."
        )


def never_runs(name: str) -> str:
    """Return the message for a parameter with a hook that FSDP never runs."""
    return (
        f"{name}: register_post_accumulate_grad_hook() would never run on a gradient that an optimizer uses. Use "
        "register_hook() for the local gradient, or the module's on_before_optimizer_step() for the reduced one."
    )


def _counts_nodes(hook: Any) -> bool:
    """Return whether ``torch.autograd.graph.register_multi_grad_hook`` waits for the gradients of all its tensors."""
    return getattr(hook, "__qualname__", "") == "register_multi_grad_hook.<locals>.get_inner_hook.<locals>.inner_hook"


def hooks_of(parameter: Any) -> list[Any]:
    """Return the hooks that users have registered on ``parameter``."""
    hooks = parameter._backward_hooks
    if not hooks:
        return []
    guard = getattr(parameter, GUARD, None)
    return [hook for key, hook in hooks.items() if guard is None or key != guard.id]


def run_hooks(parameter: Any, gradient: Tensor) -> Tensor | None:
    """Run the hooks on ``parameter`` on the local gradient of its unsharded form; return what replaces it, if any."""
    changed: Tensor | None = None
    for hook in hooks_of(parameter):
        if _counts_nodes(hook):
            raise RuntimeError(_COUNTS_NODES)
        with in_backward():
            result = hook(gradient)
        if result is not None:
            full = gathered(result)
            gradient = changed = full if not isinstance(gradient, DTensor) else part_of(full, gradient)
    return changed


def hooked_in_loss(module: nn.Module, name: str) -> str:
    """Return the message for a parameter with hooks that gets a part of its gradient from outside of its unit."""
    return (
        f"{type(module).__name__}.{name} has a hook (register_hook()) and was used in a loss outside of its unit's "
        "forward, as penalties on weights do: the hook would run on two gradients instead of on their sum. Compute the "
        "penalty in the forward of the module that has the parameter, set the optimizer's weight_decay, or change "
        "gradients in on_before_optimizer_step()."
    )


def run_hooks_on(leaf: Any, record: Any) -> None:
    """Run hooks on a parameter of FSDP2 on the gradient of its unsharded form.

    Args:
        leaf: The unsharded form.
        record: Torch's record of the parameter, with the ``sharded_param`` that users see.
    """
    if hasattr(leaf, HOOKED):
        return
    known = weakref.ref(record)  # a hook keeps what it knows, where no garbage collector looks

    def run(gradient: Tensor) -> Tensor | None:
        found = known()
        return None if found is None else run_hooks(found.sharded_param, gradient)

    hook_leaf(leaf, HOOKED, run)
