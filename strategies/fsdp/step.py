"""Around a step: calls of units from users' code, one order of all-gathers on all ranks, changed weights, callbacks.

Between the strategy's steps every parameter is in its sharded form, so that what hooks read and change is what trains.
A module that is called there (sampling with ``self(x)``, a part of the model in a callback, a network in manual
optimization) needs gathered ones. `UnshardOnCall` gathers the unit that the module lies in for the while of the
outermost call, as the unit's own ``forward`` would, and shards it again afterwards.

Modules carry no hooks for it: one global hook of torch's stands while no step runs, so a step pays nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ...state.rendezvous import CollectiveOrderChecker, num_ranks
from ..common.grads import parameters_of
from ..parallelism.tensor import is_cut, own_part
from ..sharded_tensors.global_tensors import wait_for_streams
from ..sharded_tensors.guards import refuse_gathers_in_fork, refuse_in_threads
from ..sharded_tensors.kept_tensors import share_memory, storage_of
from ..sharded_tensors.shards import local_part, part_of
from ..sharded_tensors.user_code import after_call, call_of_module, lose_gradients
from ..upstream.lightning import Callback, LambdaCallback, LightningModule, Trainer, is_overridden
from ..upstream.patches import Patches, replace_for_good

Close = Callable[[Any], Any]
"""Ends a call that succeeded: given the module's output, returns what the caller gets."""
_ATTRIBUTE = "_accelight_outside_calls"


class UnitOpener(Protocol):
    """The engine as calls of the model see it."""

    path: CollectiveOrder
    """Follows what is gathered."""

    def sharded_modules(self, root: nn.Module) -> set[nn.Module]:
        """Return the modules with sharded parameters of their own."""
        ...

    def modules_in_units(self, root: nn.Module) -> Iterable[nn.Module]:
        """Return the modules whose calls need something gathered."""
        ...

    def unshard_for_call(
        self, root: nn.Module, module: nn.Module, args: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], Close]:
        """Gather what ``module`` needs; return its arguments, and what ends the call."""
        ...

    def reset_to_idle(self, root: nn.Module) -> None:
        """End whatever a failed call left open."""
        ...


class UnshardOnCall:
    """Takes care of the calls of one sharded model.

    Args:
        root: What the engine made of the model; it keeps this alive, and nobody here keeps it.
        opener: The engine.
        context: Entered around each call (autocast under mixed precision).
    """

    def __init__(
        self,
        root: nn.Module,
        opener: UnitOpener,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._root = weakref.ref(root)
        self._opener = opener
        self._context = context
        self._numbers: MutableMapping[nn.Module, int] = WeakIdKeyDictionary()
        self._parameters: MutableMapping[nn.Module, list[int]] = WeakIdKeyDictionary()
        root.__dict__[_ATTRIBUTE] = self  # to live as long as it
        known = weakref.ref(self)
        owners = opener.sharded_modules(root)
        for number, module in enumerate(opener.modules_in_units(root)):
            self._numbers[module] = number
            self._parameters[module] = _ids_of_parameters(module)
            if not owners.isdisjoint(module.modules()):  # any other needs nothing, such as an average in buffers
                _known[module] = known
        _watch()

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Begin the outermost call, of ``module``; what ends it are hooks that live as long as it."""
        root, context = self._root(), self._context()
        if root is None:
            return args
        self._check_parameters(module)
        succeeded: list[bool] = []
        library = call_of_module()

        def finish() -> None:
            library.__exit__(None, None, None)
            context.__exit__(None, None, None)
            _leave()
            if not succeeded:
                self._opener.reset_to_idle(root)

        library.__enter__()
        _enter()
        context.__enter__()
        path = self._opener.path
        try:
            path.begin(("call", self._numbers[module], torch.is_grad_enabled()))
            args, close = self._opener.unshard_for_call(root, module, args)
        except BaseException:
            finish()
            raise

        def succeed(_: nn.Module, __: Any, output: Any) -> Any:
            output = close(output)
            path.end()
            succeeded.append(True)
            return output

        after_call(module, finish, succeed)
        return args

    def _check_parameters(self, module: nn.Module) -> None:
        """Refuse a call with other parameters in the places of the sharded ones.

        Raises:
            RuntimeError: If users' code has replaced parameters; the call would use the sharded ones.
        """
        for inner in module.modules():
            if self._parameters.get(inner, _NO_IDS) not in (_NO_IDS, _ids_of_parameters(inner)):
                raise other_parameters(module)


def other_parameters(module: nn.Module) -> RuntimeError:
    """Return the error of a call with other parameters in the places of the sharded ones."""
    return RuntimeError(
        f"{type(module).__name__} was called with parameters other than the sharded ones "
        "(torch.func.functional_call, vmap, pruned or replaced in a hook): FSDP would use its own. Call the module "
        "itself, or a copy of it that was created in __init__() and is kept outside the model (in a list), with the "
        "values of 'strategy.full_state_dict()'; or keep the module in the root's unit and call it in "
        "training_step()."
    )


_NO_IDS: list[int] = [-1]


def _ids_of_parameters(module: nn.Module) -> list[int]:
    return [id(parameter) for parameter in module._parameters.values()]


_known: MutableMapping[nn.Module, weakref.ref[UnshardOnCall]] = WeakIdKeyDictionary()
"""Both are weak: the calls know the engine, which knows the modules. By identity, as a metric's hash changes."""
_depth = 0
"""The number of running steps, backwards and calls; inside them no call counts as one from outside."""
_handle: RemovableHandle | None = None


class _Inside:
    """A step or a backward runs in this context, whose calls find gathered what they need."""

    def __enter__(self) -> None:
        _enter()

    def __exit__(self, *_: object) -> None:
        _leave()


inside = _Inside()
"""It may be entered again inside of itself."""


def is_inside() -> bool:
    """Return whether a step, a backward or a call is under way."""
    return _depth > 0


def _enter() -> None:
    global _depth
    _depth += 1
    _watch()


def _leave() -> None:
    global _depth
    _depth -= 1
    _watch()


def _watch() -> None:
    """Register torch's hook where it is needed, and only there."""
    global _handle
    wanted = _depth == 0 and len(_known) > 0
    if wanted and _handle is None:
        _handle = register_module_forward_pre_hook(_before_call)  # type: ignore[arg-type] # it may return, too
    elif not wanted and _handle is not None:
        _handle.remove()
        _handle = None


def _before_call(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    known = _known.get(module)
    calls = None if known is None else known()
    if calls is None or torch._C._current_graph_task_id() != -1:  # recomputing, in a backward not the strategy's
        return None
    return calls.begin(module, args)


# ------------------------------------------------------------------------------------------------
# Refuses, by name, to gather or reduce a unit while other ranks gather or reduce another one.
#
# Units are gathered and reduced by all ranks together, in the order in which the model uses them. A rank that goes
# another way would mix its values with those of other units, or end the process.
#
# A way that all ranks have taken once, from the beginning of a step on, is a known path: a rank on one compares
# nothing. Where paths part, and where nothing is known yet, the ranks compare what each is about to do. A rank that
# leaves the only known path waits for the others to say the same.


WAY_OUT = (
    "FSDP gathers and reduces a unit on all processes together. Call the same units on each process (add 0 * "
    "unit(x).sum() to its loss), or set find_unused_parameters=True, which makes one unit of the whole model."
)
_END = 0
_MOST_KNOWN = 100_000
"""Steps of known paths, of some hundred bytes each; models of random depth take a new path each time."""


class CollectiveOrder:
    """Follows one rank through the units of a model.

    Args:
        names: Of the units, in the same order on every rank.
        timeout: How long ranks wait for each other where they compare.
    """

    def __init__(self, names: Sequence[str], timeout: timedelta) -> None:
        self._names, self._compared = names, CollectiveOrderChecker(WAY_OUT, timeout)
        self._known: dict[Hashable, dict[int, Any]] = {}
        self._num_known = 0
        self.at: dict[int, Any] | None = None
        """This rank's position; None if it follows nothing, for example as the only rank."""
        self._around: list[dict[int, Any] | None] = []
        self._alone = num_ranks() == 1

    def begin(self, kind: Hashable) -> None:
        """Begin a step, or a call within one; ``kind`` is alike on every rank, and names what has paths of its own."""
        refuse_in_threads()
        if not self._alone:
            refuse_gathers_in_fork()
        self._around.append(self.at)
        if self._num_known > _MOST_KNOWN:  # on all ranks at once, which have taken the same paths
            self._known, self._num_known = {}, 0
        self.at = None if self._alone else self._known.setdefault(kind, {})

    def gather(self, unit: int) -> None:
        """Say that this rank is about to gather a unit.

        Raises:
            RuntimeError: If the others are not.
        """
        self._take(2 * unit + 1)

    def reduce(self, unit: int) -> None:
        """Say that this rank is about to reduce a unit's gradients.

        Raises:
            RuntimeError: If the others are not.
        """
        self._take(2 * unit + 2)

    def end(self) -> None:
        """End what `begin` began last.

        Raises:
            RuntimeError: If the others continue.
        """
        self._take(_END)
        self.at = self._around.pop() if self._around else None

    def forget(self) -> None:
        """Follow nothing any more, until the next `begin`."""
        self.at, self._around = None, []

    def _take(self, step: int) -> None:
        at = self.at
        if at is None:
            return
        if step not in at or len(at) > 1:
            self._compared.compare(self._describe(step))
        self._num_known += step not in at
        self.at = at.setdefault(step, {})

    def _describe(self, step: int) -> str:
        if step == _END:
            return "ends its step"
        unit, reduces = divmod(step - 1, 2)
        return f"{'reduces' if reduces else 'gathers'} {self._names[unit] or 'the root unit'!r}"


# ------------------------------------------------------------------------------------------------
# Weights that users' code changes while they are unsharded: in a forward, a forward hook, or `training_step`.
#
# FSDP frees unsharded parameters, and every change with them. Under ``ddp`` a change stays: momentum encoders, initial
# values from the first batch, clamps before a forward. So before a unit is resharded, each rank takes the changed
# elements of its own part over.
#
# Version counters show changes in place, and `GlobalTensors` those through ``parameter.data``. Compiled code and
# kernels of one's own show nothing, so the first training step of a fit compares checksums as well; a unit whose
# weights it finds changed is compared in every step.


_PIECE = 2**17
_version = attrgetter("_version")


def checksum(tensor: Tensor) -> Tensor:
    """Return a sum over the bits of a tensor, each eight bytes weighted by their place."""
    flat = tensor.detach().contiguous().view(-1)
    size = flat.element_size()
    if flat.storage_offset() * size % 8:
        flat = flat.clone()
    count = flat.numel() - flat.numel() % max(8 // size, 1)
    words, rest = flat[:count].view(torch.int64), flat[count:].view(torch.uint8).to(torch.int64)
    weights = torch.arange(1, min(_PIECE, max(words.numel(), rest.numel())) + 1, device=flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for piece in (*torch.split(words, _PIECE), rest):  # products need memory of their own
        total = total * 31 + (piece * weights[: piece.numel()]).sum()
    return total


def take_changes(part: Tensor, shard: Tensor) -> None:
    """Copy to ``shard`` the elements of ``part`` that differ from it in the dtype of ``part``."""
    part = part.to(shard.device)
    torch.where(part != shard.to(part.dtype), part.to(shard.dtype), shard, out=shard)


class GroupChanges:
    """Follows one parameter group of FSDP2.

    Args:
        group: torch's.
        is_probing: Whether checksums are to be compared now.
    """

    def __init__(self, group: Any, is_probing: Callable[[], bool]) -> None:
        self._group, self._is_probing = group, is_probing
        self._versions: list[int] = []
        self._sums: list[Tensor] = []
        self._compares = self._shares_attributes = False
        self._reshard, self._wait = type(group).reshard, type(group).wait_for_unshard
        replace_for_good("FSDP2 groups", group, reshard=self.reshard, wait_for_unshard=self.wait_for_unshard)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in the memory of an unsharded parameter."""
        return self._group.is_unsharded and any(share_memory(leaf, local_part(tensor)) for leaf in self._leaves())

    def compare(self) -> None:
        """Compare the parameters with their shards from now on, when they are resharded."""
        self._compares = True

    def wait_for_unshard(self) -> None:
        """Note what the parameters are when they have been gathered."""
        group = self._group
        was_unsharded = group.is_unsharded
        self._wait(group)
        if was_unsharded or not group.is_unsharded:
            return
        leaves = self._leaves()
        self._versions = list(map(_version, leaves))
        if not self._shares_attributes:  # which users' code sets on parameters, in hooks or in steps
            self._shares_attributes = True
            for param in group.fsdp_params:
                param._unsharded_param.__dict__ = param.sharded_param.__dict__
        if self._is_probing():
            self._sums = [checksum(leaf) for leaf in leaves]

    def reshard(self) -> None:
        """Take over what has changed, then reshard."""
        group = self._group
        if group.is_unsharded and self._versions:
            leaves = self._leaves()
            versions = list(map(_version, leaves))
            if versions != self._versions or self._compares or self._sums:
                self._take(leaves, versions)
        self._reshard(group)

    def take(self) -> None:
        """Copy changes so far to the shards."""
        if self._group.is_unsharded and self._versions:
            leaves, was_probing = self._leaves(), bool(self._sums)
            self._take(leaves, list(map(_version, leaves)))
            self._sums = [checksum(leaf) for leaf in leaves] if was_probing else []

    def _leaves(self) -> list[Any]:
        return [local_part(param._unsharded_param) for param in self._group.fsdp_params]

    @torch.no_grad()
    def _take(self, leaves: list[Any], versions: list[int]) -> None:
        if self._sums:
            sums = [checksum(leaf) for leaf in leaves]
            self._compares |= any(bool(one != other) for one, other in zip(sums, self._sums, strict=True))
            self._sums = []
        if versions == self._versions and not self._compares:
            return
        self._versions = versions
        for param, leaf in zip(self._group.fsdp_params, leaves, strict=True):
            shard = param.sharded_param
            part = own_part(leaf, shard) if is_cut(param._unsharded_param) else local_part(part_of(leaf, shard))
            take_changes(part, local_part(shard))


class FlatChanges:
    """Follows the flat parameter of one unit of FSDP1.

    In training, changes in place of FSDP1's views raise an error of torch's; those in evaluations, and those through
    ``.data``, are taken over.

    Args:
        handle: torch's, of a sharded unit.
        is_probing: Whether checksums are to be compared now.
    """

    def __init__(self, handle: Any, is_probing: Callable[[], bool]) -> None:
        self._handle, self._is_probing = handle, is_probing
        self._sum: Tensor | None = None
        self._compares = False
        self._version: int | None = None
        self._reshard = type(handle).reshard
        replace_for_good("FSDP1 handles", handle, reshard=self.reshard)

    def after_unshard(self) -> None:
        """Note what the parameters are when they have been gathered."""
        if self._version is None:
            self._version = self._handle.flat_param._version
        if self._is_probing():
            self._sum = checksum(self._handle.flat_param)

    def takes_writes(self, storage: int) -> bool:
        """Return whether ``storage`` is that of the unsharded parameters; if so, they are compared from now on."""
        is_mine = storage == storage_of(self._handle.flat_param)
        self._compares |= is_mine
        return is_mine

    def has(self, storage: int) -> bool:
        """Return whether ``storage`` is that of the unsharded parameters, which is freed."""
        flat_param = self._handle.flat_param
        return storage == storage_of(flat_param) != storage_of(flat_param._local_shard)

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Take over what has changed, then reshard."""
        if self._may_have_changed:
            self._take()
        self._version = None
        self._reshard(self._handle, free_unsharded_flat_param)

    def take(self) -> None:
        """Copy changes so far to the shard."""
        was_probing = self._sum is not None
        if self._may_have_changed:
            self._take()
            self._sum = checksum(self._handle.flat_param) if was_probing else None

    @property
    def _is_written(self) -> bool:
        return self._version not in (None, self._handle.flat_param._version)

    @property
    def _may_have_changed(self) -> bool:
        return self._sum is not None or self._compares or self._is_written

    @torch.no_grad()
    def _take(self) -> None:
        flat_param = self._handle.flat_param
        shard: Tensor = flat_param._local_shard
        if flat_param.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr():
            return  # sharded already
        before, self._sum = self._sum, None
        if before is not None and bool(before != checksum(flat_param)):
            self._compares = True
        is_written, self._version = self._is_written, flat_param._version
        if self._compares or is_written:
            full = flat_param.detach().view(-1)
            begin = min(full.numel(), self._handle.rank * shard.numel())
            part = full.narrow(0, begin, min(shard.numel(), full.numel() - begin))
            take_changes(part, shard.narrow(0, 0, part.numel()))
            wait_for_streams(self._handle.device.type)  # the backward may gather them next


# ------------------------------------------------------------------------------------------------
# Accumulated gradients that are not reduced yet: cleared when the user clears gradients.
#
# The engines keep them beside the parameters, whose ``grad`` is None until a window's last backward has reduced it. So
# `zero_grad`, wherever it is called, has to reach them, too.


class ZeroGradFollowing:
    """Lets ``zero_grad`` of optimizers and of a module clear what is not reduced.

    Args:
        drop: Clears the unreduced gradients of the parameters it is given.
    """

    def __init__(self, drop: Callable[[Iterable[nn.Parameter]], None]) -> None:
        self._drop = drop
        self._patches = Patches("user code")

    def attach(self, module: LightningModule, optimizers: Iterable[Optimizer]) -> None:
        """Attach to these and to what ``module.optimizers()`` gives for them, and detach from those before."""
        self.detach()
        self._attach(module, lambda: module.parameters())
        given: Any = module.optimizers()
        for optimizer in (*optimizers, *(given if isinstance(given, list) else [given])):
            self._attach(optimizer, partial(parameters_of, optimizer))

    def detach(self) -> None:
        """Undo `attach`."""
        self._patches.remove()

    def _attach(self, owner: Any, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        clear = owner.zero_grad

        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            self._drop(parameters())
            if kwargs.get("set_to_none", args[0] if args else True):
                lose_gradients(parameters())
            return clear(*args, **kwargs)

        self._patches.put(owner, "zero_grad", zero_grad)


# ------------------------------------------------------------------------------------------------
# Whether users' code runs at certain moments of an accumulation window, where it may read or change parameters.


_BEFORE_BACKWARD = ("on_before_zero_grad", "on_before_backward", "optimizer_zero_grad")
_BETWEEN_BATCHES = (
    *_BEFORE_BACKWARD,
    "on_after_backward",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_validation_model_zero_grad",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_save_checkpoint",
)
_ONLY_LOOK = ("lightning.pytorch.callbacks.", "pytorch_lightning.callbacks.", "accelight.")
"""Modules whose callbacks change no weights there, but for those that say so by their names."""
_CHANGE_WEIGHTS = ("WeightAveraging", "StochasticWeightAveraging", "ShardedEMA")


def looks_before_backward(trainer: Trainer, module: LightningModule) -> bool:
    """Return whether anybody's code runs between a training step and its backward."""
    return _overrides(trainer, module, _BEFORE_BACKWARD)


def looks_after_backward(trainer: Trainer, module: LightningModule) -> bool:
    """Return whether anybody's code runs between a backward and the optimizer step that it is for."""
    return _overrides(trainer, module, ("on_after_backward",))


def looks_between_batches(trainer: Trainer, module: LightningModule) -> bool:
    """Return whether anybody's code runs between the micro-batches of a window."""
    return _overrides(trainer, module, _BETWEEN_BATCHES)


def _overrides(trainer: Trainer, module: LightningModule, hooks: tuple[str, ...]) -> bool:
    callbacks = [each for each in trainer.callbacks if not _only_looks(each)]  # type: ignore[attr-defined]
    return any(
        hasattr(parent, hook) and is_overridden(hook, each)
        for parent, each in [(LightningModule, module), *((Callback, each) for each in callbacks)]
        for hook in hooks
    )


def _only_looks(callback: Callback) -> bool:
    changes = any(cls.__name__ in _CHANGE_WEIGHTS for cls in type(callback).__mro__)
    is_users = isinstance(callback, LambdaCallback)
    return type(callback).__module__.startswith(_ONLY_LOOK) and not changes and not is_users
