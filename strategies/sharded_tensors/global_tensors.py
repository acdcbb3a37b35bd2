"""Gives operations of users' code on sharded tensors their global meaning.

Between steps every parameter is a shard: a DTensor (FSDP2), this rank's range of a flat parameter (FSDP1), or a
partition that the parameter itself does not show (ZeRO-3). Users' hooks are written for whole tensors: they look at
shapes and norms, edit rows, draw random values, assign ``p.data`` and ``p.grad``. `GlobalTensors` is active while such
a hook runs, and decides for each operation:

- An operation that treats every element alone runs on the shards, without communication. Plain tensors of the full
  shape, such as masks, are cut to this rank's part first.
- Any other operation runs on the full tensor, which the ranks gather for it. What it changes is written back to each
  rank's shard, also through views of the full tensor, which stays open until the hook ends if the operation returned
  one.

Every rank runs the same operations in the same order, as it does with all collectives. Results are those of ``ddp``;
random numbers too, which are drawn for the full tensor.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from ...state.rendezvous import CollectiveOrderChecker
from ..upstream.torch_core import (
    _get_current_function_mode,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
)
from .kept_tensors import (
    Aliases,
    OldMemory,
    OpenTensor,
    check_not_freed,
    has_storage,
    is_array_of,
    share_memory,
    storage_of,
    weak_storage,
)
from .shards import FlatShard, Sharded, gathered, is_sharded_alike, local_part, part_of, replicated

_ELEMENT_BY_ELEMENT = frozenset(
    [
        "clone",
        "detach",
        "copy_",
        "fill_",
        "zero_",
        "to",
        "type_as",
        "type",
        "float",
        "double",
        "half",
        "bfloat16",
        "cpu",
        "cuda",
        "contiguous",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "masked_fill",
        "masked_fill_",
        "subtract",
        "multiply",
        "divide",
        "true_divide",
        "subtract_",
        "multiply_",
        "divide_",
        "floor_divide",
        "floor_divide_",
        "rsub",
        "__rsub__",
        "__rdiv__",
        "__rtruediv__",
        "__rpow__",
        "__rfloordiv__",
        "__radd__",
        "__rmul__",
        "square_",
        "where",
    ]
)
"""Names of operations that treat every element alone and do not have torch's tag for it."""
_BEFORE_BACKWARD = ("on_before_zero_grad", "on_before_backward")
"""Hooks that the Trainer runs between a forward and its backward."""
OF_THE_SHARD = frozenset(
    [
        "requires_grad",
        "requires_grad_",
        "device",
        "dtype",
        "layout",
        "is_leaf",
        "grad_fn",
        "_version",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "retains_grad",
        "is_floating_point",
        "is_complex",
        "get_device",
        "element_size",
        "__hash__",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "data_ptr",
        "untyped_storage",
        "is_shared",
        "is_pinned",
        "is_inference",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "output_nr",
        "names",
        "grad_dtype",
        "_is_view",
        "_base",
        "__deepcopy__",
    ]
)
"""Names of what has the same meaning for a shard as for the full tensor, or none for the latter."""
_OF_THE_SHAPE = frozenset(
    ["shape", "ndim", "size", "dim", "ndimension", "numel", "nelement", "stride", "__len__", "nbytes", "is_contiguous"]
)
_OF_ATTRIBUTES = frozenset(["__get__", "__set__", "__delete__"])
_HAS_NO_NODE = (
    "register_multi_grad_hook() of a sharded parameter in a hook or a step: it is no node of autograd's graph there. "
    'Use register_hook() on each, register_multi_grad_hook(..., mode="any"), or the module\'s on_after_backward().'
)
_NOT_OF_VALUES = OF_THE_SHARD | _OF_THE_SHAPE
UNCOUNTED = frozenset(["numpy", "__array__", "__dlpack__"])
"""Operations whose results share memory, and whose writes raise no version counter."""
_OF_PARTS = frozenset(["__getitem__", "__setitem__"])
"""Operations on a part of a tensor, which a flat one has another of."""
_UNCOUNTED_WRITES = frozenset(["apply_", "map_", "map2_"])
"""Operations that write and raise no version counter."""
_OPERATORS = "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift"
_WRITING_OPERATORS = frozenset(f"__{name}__" for name in _OPERATORS.split())
_FREED_MEMORY = (
    "FSDP frees its memory after the forward. Read a copy (weight.detach().clone()), and change the parameter itself: "
    "with torch.no_grad(): weight[0] = 0.25, or in a hook through NumPy, too."
)
WRITES_TO_COPY = f"A step wrote to the NumPy array of an unsharded parameter, which is a copy. {_FREED_MEMORY}"
_COLLECTIVES = frozenset(["all_reduce", "broadcast", "recv"])
"""Functions of torch.distributed that write to a tensor, and hand it to a mode; others refuse sharded ones."""
_REDUCTIONS = frozenset(
    ["norm", "sum", "mean", "max", "min", "amax", "amin", "any", "all", "vector_norm", "linalg_vector_norm"]
)
"""Operations that DTensor reduces over all elements with a small message instead of an all-gather."""


class ShardAccess(Protocol):
    """An engine's knowledge of the parameters that it has sharded and that are no `Sharded` themselves."""

    shows_shards: bool
    """Whether such a parameter is this rank's part itself, so that it takes gradients."""
    in_step: bool
    """Whether a training step runs, and no hook."""
    ends_window: bool
    """Whether what asks for a gradient runs in the last backward of an accumulation window."""
    gave_states: bool
    """Whether a step has asked for an optimizer's states by what only steps have, and may have set whole tensors."""

    def begin(self) -> None:
        """Take note that users' code starts or resumes; the engine's states may have changed since."""
        ...

    def end(self) -> None:
        """Take note that users' code that has met sharded tensors ends; it may have made states of them."""
        ...

    def shard_of(self, tensor: Tensor) -> FlatShard | None:
        """Return this rank's part of a parameter or of its optimizer's state, sharing memory; None for all else."""
        ...

    def writable(self, tensor: Tensor, *, assigns: bool) -> Tensor | None:
        """Return the tensor that takes a write to ``tensor``, or ``tensor.data = values``; None for itself."""
        ...

    def linked(self, full: Tensor, tensor: Tensor) -> Tensor:
        """Return a full tensor whose gradient reaches ``tensor``, a parameter that `shard_of` knows."""
        ...

    def release(self) -> None:
        """Reshard what calls of modules have left unsharded; no such call runs."""
        ...

    def sync_to_model(self) -> None:
        """Copy what was written to weights of the optimizer's own to the model; every rank calls it."""
        ...

    def sync_to_optimizer(self, tensor: Tensor) -> None:
        """Copy what a hook or a step has written to the model's weight to the one that the optimizer steps on."""
        ...

    def check_whole(self, tensor: Tensor) -> None:
        """Check that a reduction over all elements may have a tensor that is not sharded."""
        ...

    def note_result(self, result: Any, inputs: Iterable[Tensor]) -> None:
        """Take note of what an operation has made of tensors that are not sharded, for `check_whole`."""
        ...

    def note_write(self, tensor: Tensor) -> None:
        """Take note that a training step changes a tensor, which may share memory with an unsharded parameter."""
        ...

    def lends(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in the memory of an unsharded parameter, which the engine takes back."""
        ...

    def note_alias(self, tensor: Tensor) -> None:
        """Take note that a step has an alias of a tensor, whose writes no version counts."""
        ...

    def note_write_to_shard(self, tensor: Tensor) -> None:
        """Report a training step's write to a `Sharded` parameter to the engine; every rank calls it."""
        ...

    def is_unreduced(self, tensor: Tensor) -> bool:
        """Return whether a parameter has a gradient that the ranks have not reduced yet."""
        ...

    @property
    def has_deferred(self) -> bool:
        """Whether gradients are to be clipped or multiplied, which is left to the optimizer's step."""
        ...

    def apply_deferred(self) -> None:
        """Do it now: users' code looks at gradients. Every rank calls it."""
        ...

    def owns_gradient(self, tensor: Tensor) -> bool:
        """Return whether the gradient of ``tensor`` is elsewhere than torch has it, or in another form."""
        ...

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient of such a parameter, sharing memory; None if no rank has one."""
        ...

    def optimizers_own(self) -> Iterable[Tensor]:
        """Return the tensors that an optimizer steps on in place of parameters; their versions show changes."""
        ...

    def place_of_gradient(self, parameter: Tensor) -> FlatShard | None:
        """Return the split of a gradient of such a parameter, where there may be none; None: as the parameter."""
        ...

    def set_gradient(self, parameter: Tensor, gradient: FlatShard | None) -> None:
        """Replace the gradient of such a parameter."""
        ...


class NoAccess:
    """The `ShardAccess` where all sharded parameters are DTensors."""

    shows_shards, in_step, ends_window, gave_states = False, False, False, False

    def begin(self) -> None:
        """Do nothing: states are DTensors like their parameters."""

    def end(self) -> None:
        """Do nothing."""

    def shard_of(self, tensor: Tensor) -> FlatShard | None:
        """Return None."""
        return None

    def writable(self, tensor: Tensor, *, assigns: bool) -> Tensor | None:
        """Return None."""
        return None

    def linked(self, full: Tensor, tensor: Tensor) -> Tensor:
        """Return ``full``."""
        return full

    def release(self) -> None:
        """Do nothing: units reshard themselves."""

    def sync_to_model(self) -> None:
        """Do nothing: the optimizer steps on the model's weights."""

    def sync_to_optimizer(self, tensor: Tensor) -> None:
        """Do nothing: it is the model's."""

    def check_whole(self, tensor: Tensor) -> None:
        """Do nothing: flat parameters are known as such."""

    def note_result(self, result: Any, inputs: Iterable[Tensor]) -> None:
        """Do nothing: a result of a flat parameter is known as such, too."""

    def note_write(self, tensor: Tensor) -> None:
        """Do nothing: version counters show changes."""

    def lends(self, tensor: Tensor) -> bool:
        """Return False."""
        return False

    def note_alias(self, tensor: Tensor) -> None:
        """Do nothing."""

    def note_write_to_shard(self, tensor: Tensor) -> None:
        """Do nothing: parameters are the same ones wherever a step has them."""

    def is_unreduced(self, tensor: Tensor) -> bool:
        """Return False."""
        return False

    @property
    def has_deferred(self) -> bool:
        """Whether anything is left to the optimizer's step: nothing."""
        return False

    def apply_deferred(self) -> None:
        """Do nothing."""

    def owns_gradient(self, tensor: Tensor) -> bool:
        """Return False."""
        return False

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient."""
        return parameter.grad

    def optimizers_own(self) -> Iterable[Tensor]:
        """Return nothing."""
        return ()

    def place_of_gradient(self, parameter: Tensor) -> FlatShard | None:
        """Return None."""
        return None

    def set_gradient(self, parameter: Tensor, gradient: FlatShard | None) -> None:
        """Set the gradient."""
        parameter.grad = gradient


UNREDUCED = (
    "while gradients accumulate: the ranks reduce them in the last micro-batch of an accumulation window, and p.grad "
    "holds them only from then on. Use it in on_before_optimizer_step()."
)


class GlobalTensors(TorchFunctionMode):
    """The mode; enter it while users' code runs.

    Args:
        access: The engine's.
        in_step: Whether it is for training steps, whose backward the engine runs; else it is for hooks.
        in_backward: Whether it is for hooks on gradients, whose other tensors differ between the ranks.
        aliases: Those of another mode of the same parameters.
    """

    def __init__(
        self,
        access: ShardAccess,
        *,
        in_step: bool = False,
        in_backward: bool = False,
        aliases: Aliases | None = None,
    ) -> None:
        super().__init__()
        self._access, self._in_step, self._in_backward = access, in_step, in_backward
        self.old_memory = OldMemory()
        self.places: CollectiveOrderChecker | None = None
        """Compares the lines at which the ranks gather; None compares nothing."""
        self._open: dict[int, OpenTensor] = {}
        """By the identity of what `Aliases.original` returns."""
        self._aliases = Aliases() if aliases is None else aliases
        self._is_entered = self._is_paused = False
        self.unreduced: Collection[int] = ()
        """Identities of parameters that are not sharded, and whose gradients are of this rank alone now."""
        self.has_met_shards = False
        """Whether an operation has had a sharded tensor."""
        self._has_met_since_end = False
        """Whether one has since the access last took note that users' code ends."""
        self.hook = ""
        """Name of the hook that runs, or ran last."""
        self._written_on = "cpu"
        """Parameters whose values, written by users' code during a forward, the engine is to gather."""
        self.num_changes = 0
        """The number of possible changes of shards: by the library, an optimizer, or a change of its own weights."""
        self.copies: dict[int, StorageWeakRef] = {}
        """Of unsharded parameters, that NumPy arrays are of, by their addresses."""

    @property
    def has_views(self) -> bool:
        """Whether users may have views of full tensors, or NumPy's copies of unsharded ones."""
        return bool(self._open or self.copies)

    def enter(self, *, reads: bool = True) -> None:
        """Begin, or continue after `leave`.

        Args:
            reads: Whether NumPy arrays are to have what shards have been changed to; all ranks are at this place then.
        """
        self._is_paused = False
        self._access.begin()
        for one in self._open.values() if reads else ():
            if one.seen is not None:  # a NumPy array asks for nothing
                one.refresh(self.num_changes)
        if not self._is_entered:
            self._is_entered = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Stop; below a mode of the user's own this one stays on torch's stack and does nothing."""
        if _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self._is_entered = False
            self.__exit__(None, None, None)
        else:
            self._is_paused = True

    def pause(self) -> None:
        """Do nothing from now on, wherever this mode is on torch's stack."""
        self._is_paused = True

    @torch.no_grad()
    def write_back(self, *, forget: bool = True) -> None:
        """Copy what was changed through views of full tensors to the shards.

        Args:
            forget: Whether to free the full tensors.
        """
        for key in list(self._open):
            self._write_back(self._open[key])
        if forget:
            self._aliases.keep(self._open)
        if self._has_met_since_end or self._access.gave_states:
            self._has_met_since_end = self._access.gave_states = False
            self._access.end()
        wait_for_streams(self._written_on)
        self._written_on = "cpu"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; the mode itself is off inside."""
        kwargs = kwargs or {}
        if self.old_memory.replaced:
            args, kwargs = self._map(args, self.old_memory.present), self._map(kwargs, self.old_memory.present)
        owner = getattr(func, "__self__", None)
        if getattr(owner, "__name__", None) == "grad" and not self._is_paused:
            if id(args[0]) in self.unreduced:
                raise RuntimeError(
                    "p.grad of a parameter of ignored_modules was used in backward(): the processes average it after "
                    "that. Use p.grad in on_after_backward(), or in on_before_optimizer_step() where gradients "
                    "accumulate."
                )
            self._check_reduced(args[0])
            if self._access.owns_gradient(args[0]):
                return self._own_gradient(args[0], func.__name__, args[1:])
        if self._is_paused:
            return func(*args, **kwargs)
        if func.__name__ in _COLLECTIVES and func.__module__.startswith("torch.distributed"):
            func = _counted(func, f"{func.__name__}_")
        elif func.__name__ in _UNCOUNTED_WRITES:
            func = _counted(func, func.__name__)
        name = func.__name__
        if getattr(owner, "__name__", name) not in _NOT_OF_VALUES:
            if peek_interpreter_stack() is not None:
                self._check_not_transformed(name, args, kwargs)
            if self._access.has_deferred and any(map(self._is_of_gradient, tensors_in(args, kwargs))):
                self._access.apply_deferred()
            self._check_kept(name, args, kwargs)
        if not any(map(self.is_sharded, tensors_in(args, kwargs))):
            return self._on_plain(func, args, kwargs)
        self.has_met_shards = self._has_met_since_end = True
        return self._on_sharded(func, args, kwargs)

    def meets_shards(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether an operation uses the values of sharded tensors, and not only of a tensor-parallel layer's."""
        name = getattr(getattr(func, "__self__", None), "__name__", func.__name__)
        return name not in _NOT_OF_VALUES and any(
            self._is_optimizers_own(one)
            or (self.is_sharded(one) and not (isinstance(one, DTensor) and one.device_mesh.mesh_dim_names == ("tp",)))
            for one in tensors_in(args, kwargs)
        )

    def _on_sharded(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.__name__
        if name in _OF_ATTRIBUTES:
            return self._attribute(func, func.__self__.__name__, name, args)
        if name == "__deepcopy__" and isinstance(args[0], DTensor):
            return self._copied(*args)
        if name == "__reduce_ex__" and isinstance(args[0], DTensor) and _is_shallow_copy(sys._getframe(2)):
            return _itself, (self.data_of(args[0]),)
        if name == "view_as" and sys._getframe(2).f_globals.get("__name__") == "torch.autograd.graph":
            raise RuntimeError(_HAS_NO_NODE)
        if name in OF_THE_SHARD:  # the address of a DTensor, and of an empty part, is 0: no two parameters are one
            return id(self._aliases.original(args[0])) if name == "data_ptr" else func(*args, **kwargs)
        if name in _OF_THE_SHAPE:
            return func(*self._map(args, self._shard), **kwargs)
        for one in tensors_in(args, kwargs) if self._in_step else ():
            self._access.sync_to_optimizer(self._aliases.original(one))
        if name == "grad":
            raise RuntimeError(
                "torch.autograd.grad() with respect to sharded parameters: the graph has the unsharded parameters, "
                "which are freed. Take gradients of activations, or of weights in the root's unit (in training_step "
                "with automatic optimization), or train with Trainer(strategy='ddp')."
            )
        if name.startswith("_foreach_") and (base := _foreach_base(name)) is not None:
            return self._foreach(base, args, kwargs)
        if name == "detach":
            detached: Tensor = func(self._shard(args[0]))
            return self._aliases.add(args[0], detached)
        if any(self._is_open(one) for one in tensors_in(args, kwargs)):  # there are views of it, which see this
            return self._on_full(func, args, kwargs)
        if is_element_by_element(name) and not self._needs_full(name, args, kwargs):
            result = self._element_by_element(func, args, kwargs)
            if result is not NotImplemented:
                return result
        is_reduction = name in _REDUCTIONS and len(args) == 1 and not set(kwargs) - {"p"}
        if is_reduction and isinstance(args[0], DTensor) and _all_have_elements(args[0]):
            self._check_same_line(name)
            return _reduced(func, args[0], kwargs)
        self._check_same_line(name)
        return self._on_full(func, args, kwargs)

    def _is_of_gradient(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a gradient that users have kept, or a view of one."""
        original = self._aliases.original(tensor)
        fulls = [(one.tensor, one.full) for one in self._open.values()]
        fulls += [(one.tensor, full) for one in self._aliases.kept.values() if (full := one.full()) is not None]
        for gradient in self._aliases.gradients.values():
            if original is gradient or any(
                owner is gradient and has_storage(tensor) and share_memory(full, tensor) for owner, full in fulls
            ):
                return True
        return False

    def _check_kept(self, name: str, args: Any, kwargs: Any) -> None:
        """Update views that users have to the present values; refuse those from before sharding."""
        self.old_memory.check(tensors_in(args, kwargs), self.hook, in_step=self._in_step)
        for tensor in tensors_in(args, kwargs) if name not in _OF_ATTRIBUTES else ():
            check_not_freed(tensor, self.hook)
        if not (self._aliases.kept or self._open):
            return
        old = [(one.tensor, one.full()) for one in self._aliases.kept.values()]
        old += [(one.tensor, one.full) for one in self._open.values() if one.num_changes != self.num_changes]
        for tensor in tensors_in(args, kwargs) if old else ():
            for owner, full in old:
                if full is not None and has_storage(tensor) and share_memory(full, tensor):
                    self._check_same_line(name)
                    self._opened(owner)

    def _check_not_transformed(self, name: str, args: Any, kwargs: Any) -> None:
        """Refuse shards inside of `torch.func`'s transforms, which hand out wrappers of them below all modes.

        Raises:
            RuntimeError: If an operation has one.
        """
        if any(self.is_sharded(_unwrapped(one)) for one in tensors_in(args, kwargs)):
            raise RuntimeError(
                f"{name}() of a sharded parameter inside of torch.func.vmap, grad, jvp, or another of torch's function "
                "transforms, which would see this process's part. Take the whole tensor before: full = weight[:]; "
                "torch.func.vmap(function)(full)."
            )

    def _write_back(self, opened: OpenTensor) -> None:
        if opened.is_changed:
            self._before_write(opened.shard)
            opened.write_back()
            self._after_write(opened.tensor)

    def _before_write(self, shard: Tensor) -> None:
        """Wait for the engine's copies of offloaded shards before a write during a forward or a backward."""
        if self._written_on != "cpu" or not (self._in_step or self.hook in _BEFORE_BACKWARD):
            return
        self._written_on = _engines_device(shard)
        if local_part(shard).device.type == "cpu":
            wait_for_streams(self._written_on)

    def _after_write(self, tensor: Tensor) -> None:
        original = self._aliases.original(tensor)
        is_optimizers_own = self._is_optimizers_own(original)
        if self._in_step or is_optimizers_own:
            self._access.note_write_to_shard(original)
        if is_optimizers_own:
            self.has_met_shards = True
            self.num_changes += 1

    def _check_same_line(self, name: str) -> None:
        if self.places is not None:
            self.places.compare_at_line(f"gathers a sharded tensor for {name}()")

    def _on_plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation without sharded tensors, which may write to an unsharded parameter."""
        name = func.__name__
        result: Any
        for one in tensors_in(args, kwargs):
            if self._is_optimizers_own(one):
                self._access.sync_to_optimizer(one)
        if name.removeprefix("_foreach_") in _REDUCTIONS or name in _OF_PARTS:
            for one in tensors_in(args, kwargs):
                self._access.check_whole(one)
        reads_data, assigns = (name == each and func.__self__.__name__ == "data" for each in ("__get__", "__set__"))
        if self._open and args and (reads_data or name == "detach" or name in UNCOUNTED):
            opened = next((one for one in self._open.values() if share_memory(one.full, args[0])), None)
            if opened is not None and name in UNCOUNTED:
                result = func(*args, **kwargs)
                opened.show_uncounted(result)
                return result
            if opened is not None:
                detached: Any = args[0].detach()  # also for `.data`, whose writes would not be counted
                detached._accelight_full = opened.full  # which lives as long as a view of it, and this is none to torch
                return detached
        if args and (reads_data or name in UNCOUNTED):
            if not reads_data and self._access.lends(args[0]):
                return self._of_a_copy(func, *args, **kwargs)
            self._access.note_alias(args[0])
        if args and (reads_data or name == "detach"):
            result = args[0].detach() if self._is_optimizers_own(args[0]) else func(*args, **kwargs)
            is_alias = isinstance(result, Tensor) and self._access.writable(args[0], assigns=True) is args[0]
            return self._aliases.add(args[0], result) if is_alias else result
        if not args and _is_in_place(name) and "tensor" in kwargs:  # as functions of torch.nn.init come here
            args, kwargs = (kwargs["tensor"],), {key: one for key, one in kwargs.items() if key != "tensor"}
        written = list(tensors_in(args[:1] if assigns or _is_in_place(name) else (kwargs.get("out"),), {}))
        if not written:
            result = func(*args, **kwargs)
            self._access.note_result(result, tensors_in(args, kwargs))
            return result
        for one in written if self.copies else ():
            self._check_not_copied(one)
        self._note_write(written, assigns=assigns)
        result = self._assign_to_plain(func, *args) if assigns else self._write_to_plain(func, args, kwargs, written)
        for one in written:
            self._after_write(one)
        return result

    def _of_a_copy(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return a NumPy array of what an engine frees, which refuses writes: no forward would see them.

        Raises:
            RuntimeError: For DLPack, which has no arrays that do.
        """
        if func.__name__ == "__dlpack__":
            raise RuntimeError(f"DLPack of an unsharded parameter in a step. {_FREED_MEMORY}")
        copied = tensor.clone()
        array = func(copied, *args, **kwargs)
        if is_array_of(array, copied):
            self.copies = {key: one for key, one in self.copies.items() if not one.expired()}  # type: ignore[no-untyped-call]
            self.copies[storage_of(copied)] = weak_storage(copied)
            array.setflags(write=False)
        return array

    def _check_not_copied(self, tensor: Tensor) -> None:
        copied = self.copies.get(storage_of(tensor)) if has_storage(tensor) else None
        if copied is not None and not copied.expired():  # type: ignore[no-untyped-call]
            raise RuntimeError(WRITES_TO_COPY)

    def _write_to_plain(self, func: Any, args: Any, kwargs: Any, written: Sequence[Tensor]) -> Any:
        self._access.note_result(written[0], tensors_in(args, kwargs))
        if torch.is_grad_enabled():
            return func(*args, **kwargs)
        aliases = [(one, self._access.writable(one, assigns=False)) for one in written]
        taking = {id(one): alias for one, alias in aliases if alias is not None}
        own = {id(alias): one for one, alias in aliases}
        for alias in taking.values():
            self._before_write(alias)
        args, kwargs = (self._map(each, lambda one: taking.get(id(one), one)) for each in (args, kwargs))
        return self._map(func(*args, **kwargs), lambda one: own.get(id(one), one))

    def _assign_to_plain(self, func: Any, tensor: Tensor, value: Tensor) -> Any:
        target = self._access.writable(tensor, assigns=True)
        if target is None:
            return func(tensor, value)
        self._before_write(target)
        self._check_assignable()
        if value.shape != target.shape:
            raise RuntimeError(
                f"p.data = value: the parameter has shape {tuple(target.shape)}, but the value has "
                f"{tuple(value.shape)}."
            )
        if self._aliases.original(value) is not self._aliases.original(tensor):
            self._aliases.separate(tensor)
            self._access.note_alias(target)
            with torch.no_grad():
                target.data.copy_(value)
            if self._is_optimizers_own(target):
                increment_version(target)
        return tensor

    # ------------------------------------------------------------------ what is sharded
    def is_sharded(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a part of one."""
        return isinstance(tensor, Sharded) or self._access.shard_of(tensor) is not None

    def _is_optimizers_own(self, tensor: Tensor) -> bool:
        return any(each is tensor for each in self._access.optimizers_own())

    def _shard(self, tensor: Tensor) -> Any:
        """Return a parameter as a `Sharded`; any other tensor as it is."""
        if isinstance(tensor, Sharded):
            return tensor
        shard = self._access.shard_of(tensor)
        return tensor if shard is None else shard

    def _needs_full(self, name: str, args: Any, kwargs: Any) -> bool:
        """Return whether an operation is a part of a graph that shards lack: FSDP1's, or full tensors next to them."""
        tensors = [self._shard(one) for one in tensors_in(args, kwargs)] if self._in_backward else []
        first: Any = next((one for one in tensors if isinstance(one, Sharded)), None)
        if "out" in kwargs or any(not is_sharded_alike(one, first) for one in tensors):
            return True  # in a backward, ranks have other values in what is not sharded like parameters
        return (
            not name.endswith("_like")
            and not _is_in_place(name)
            and torch.is_grad_enabled()
            and any(
                one.requires_grad
                and not isinstance(one, DTensor)
                and (self._in_step or self._access.shows_shards or not self.is_sharded(one))
                for one in tensors_in(args, kwargs)
            )
        )

    def _map(self, value: Any, change: Callable[[Tensor], Any]) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if type(value) in (list, tuple):
            return type(value)(self._map(one, change) for one in value)
        if type(value) is dict:
            return {key: self._map(one, change) for key, one in value.items()}
        return value

    # ------------------------------------------------------------------ attributes
    def _attribute(self, func: Any, name: str, action: str, args: Sequence[Any]) -> Any:
        tensor = args[0]
        if not self.is_sharded(tensor):
            if name == "data" and action == "__set__":  # a plain tensor takes the values of a sharded one
                return self._on_plain(func, (tensor, self._full(args[1])), {})
            return func(*args)
        if name == "data":
            return self.data_of(tensor) if action == "__get__" else self._assign(tensor, args[1])
        if name == "grad":
            return self._gradient(func, tensor, action, args[1:])
        if name in OF_THE_SHARD or name.startswith("_"):  # torch's own notes
            return func(*args)
        if name in _OF_THE_SHAPE:
            return func(self._shard(tensor))
        return self._on_full(func, args, {})

    def data_of(self, tensor: Tensor) -> Tensor:
        """Return ``tensor.data`` of a sharded tensor."""
        if self._in_step and isinstance(tensor, DTensor):  # an unsharded one of a tensor-parallel layer
            self._access.note_alias(tensor)
        shard = self._shard(tensor)
        return self._aliases.add(tensor, shard.data if isinstance(shard, DTensor) else shard)

    @torch.no_grad()
    def _copied(self, tensor: DTensor, memo: dict[int, Any]) -> Tensor:
        """Return a copy of a DTensor, which has no storage of its own that torch could copy."""
        copied: Tensor = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, tensor.requires_grad)
        memo[id(tensor)] = copied
        return copied

    def _is_open(self, tensor: Tensor) -> bool:
        return bool(self._open) and id(self._aliases.original(tensor)) in self._open

    @torch.no_grad()
    def _assign(self, tensor: Tensor, value: Tensor) -> None:
        """Take over ``tensor.data = value``: the memory of the shard stays where the engine knows it."""
        self._check_assignable()
        if self._aliases.original(value) is self._aliases.original(tensor):
            return
        shard = self._shard(tensor)
        if value.shape != shard.shape or value.dtype != shard.dtype:
            raise RuntimeError(
                f"p.data = value: the sharded parameter has shape {tuple(shard.shape)} and dtype {shard.dtype}, but "
                f"the value has {tuple(value.shape)} and {value.dtype}. Assign a tensor of the same shape and dtype; "
                "create a parameter of another shape before the model is sharded (in configure_model())."
            )
        part = local_part(self._like(value, shard))
        self._open.pop(id(self._aliases.separate(tensor)), None)
        self._before_write(shard)
        local_part(shard).copy_(part)
        self._after_write(tensor)

    def _check_assignable(self) -> None:
        """Refuse to assign to ``p.data`` between a forward and its backward.

        On one device the backward of some operations (`nn.Linear`'s) then has the old values, that of others the new.

        Raises:
            RuntimeError: If the present hook runs there.
        """
        if self.hook in _BEFORE_BACKWARD and not self._in_step:
            raise RuntimeError(
                f"p.data = value in {self.hook}(), between a forward and its backward, which would compute some "
                "gradients with the old values. Use p.data.copy_(value), which all gradients are computed with, or "
                "assign in on_train_batch_start() or on_train_batch_end()."
            )

    def _note_write(self, written: Iterable[Tensor], *, assigns: bool = False) -> None:
        """Report a training step's write to tensors that are not sharded to the engine."""
        if self._in_step:
            for one in written:
                if assigns or not (torch.is_grad_enabled() and one.requires_grad):
                    self._access.note_write(one)

    def _gradient(self, func: Any, tensor: Tensor, action: str, values: Sequence[Any]) -> Any:
        return func(tensor, *(self._as_gradient(tensor, value, tensor) for value in values))

    def _own_gradient(self, tensor: Tensor, action: str, values: Sequence[Any]) -> Any:
        if action == "__get__":
            gradient = self._access.gradient_of(tensor)
            if gradient is None:  # cleared; where another rank has all elements, no ``p.grad = None`` follows
                self._lose_gradient(tensor, None)
            else:
                self._aliases.add(self._aliases.gradients.setdefault(id(tensor), gradient), gradient)
            return gradient
        value = values[0] if action == "__set__" else None
        shard = None
        if value is not None:
            place = self._access.place_of_gradient(tensor)
            shard = self._as_gradient(tensor, value, self._shard(tensor) if place is None else place)
        self._lose_gradient(tensor, value)
        return self._access.set_gradient(tensor, shard)

    def lose_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Separate tensors that users hold of gradients from these, which the engine clears now; on every rank."""
        for parameter in parameters if self._aliases.gradients else ():
            self._lose_gradient(parameter, None)

    def _lose_gradient(self, tensor: Tensor, value: Tensor | None) -> None:
        """Separate tensors that users hold of a gradient from it, unless ``value``, which follows it, is the same."""
        first = self._aliases.gradients.get(id(tensor))
        if first is not None and (value is None or self._aliases.original(value) is not first):
            del self._aliases.gradients[id(tensor)]
            self._open.pop(id(first), None)
            self._aliases.separate(first, also_itself=True)

    def _check_reduced(self, tensor: Tensor) -> None:
        if self._access.is_unreduced(tensor):
            raise RuntimeError(f"p.grad was used in a hook {UNREDUCED}")

    def _as_gradient(self, tensor: Tensor, value: Tensor | None, shard: Any) -> Any:
        if value is None:
            return None
        shape = self._shard(tensor).shape
        if value.shape != shape:
            raise RuntimeError(
                f"p.grad = value: the parameter has shape {tuple(shape)}, but the value has {tuple(value.shape)}."
            )
        if not isinstance(value, Sharded):
            _check_equal_on_ranks(value, "p.grad = value")
        return self._like(value.detach(), shard)

    # ------------------------------------------------------------------ on shards
    def _element_by_element(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on the shards; NotImplemented where its result would not be one of theirs."""
        tensors = [self._shard(one) for one in tensors_in(args, kwargs)]
        is_in_place = _is_in_place(func.__name__)
        first = tensors[0] if is_in_place else next(one for one in tensors if isinstance(one, Sharded))
        if not isinstance(first, Sharded):
            return NotImplemented
        shape = first.shape
        for one in tensors:
            if one.dim() > len(shape) or _broadcast(one.shape, shape) != shape:
                return NotImplemented

        def convert(tensor: Tensor) -> Tensor:
            return self._like(self._shard(tensor), first)

        if is_in_place:
            self._before_write(first)
            func(first, *self._map(tuple(args[1:]), convert), **self._map(kwargs, convert))
            self._after_write(args[0])
            return args[0]
        try:
            return func(*self._map(args, convert), **self._map(kwargs, convert))
        except (NotImplementedError, RuntimeError):  # an operation that shards do not know
            return NotImplemented

    def _like(self, tensor: Tensor, shard: Sharded) -> Tensor:
        """Return ``tensor`` with the sharding of ``shard``; a single number is left as it is."""
        if is_sharded_alike(tensor, shard):
            return tensor
        if isinstance(tensor, Sharded):
            tensor = self._full(tensor)
        if tensor.numel() == 1 and tensor.shape != shard.shape:
            return replicated(tensor.reshape(()), shard)
        return part_of(tensor.expand(shard.shape), shard)

    def _foreach(self, base: str, args: Any, kwargs: Any) -> Any:
        """Run a `torch._foreach_` operation one by one."""
        operation = getattr(Tensor, base, None) or getattr(torch, base)
        results = [
            self.__torch_function__(
                operation,
                (),
                tuple(one[index] if type(one) in (list, tuple) else one for one in args),
                {key: one[index] if type(one) in (list, tuple) else one for key, one in kwargs.items()},
            )
            for index in range(len(args[0]))
        ]
        return None if base.endswith("_") else results

    # ------------------------------------------------------------------ on full tensors
    def _on_full(self, func: Any, args: Any, kwargs: Any) -> Any:
        used: dict[int, OpenTensor] = {}
        users: dict[int, Tensor] = {}
        linked: dict[int, Tensor] = {}
        known = set(self._open)

        def full_of(tensor: Tensor) -> Tensor:
            if not self.is_sharded(tensor):
                return tensor
            opened = self._opened(tensor)
            used[id(opened.full)] = opened
            users.setdefault(id(opened.full), tensor)
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                return opened.full
            if id(tensor) not in linked:
                linked[id(tensor)] = self._linked(opened, tensor)
            return linked[id(tensor)]

        full_args, full_kwargs = self._map(args, full_of), self._map(kwargs, full_of)
        if _is_in_place(func.__name__):
            self._note_write([next(tensors_in(full_args, full_kwargs))])
        result = func(*full_args, **full_kwargs)
        with torch.no_grad():
            for one in used.values():
                self._write_back(one)
        returned = {storage_of(one) for one in tensors_in((result,), {}) if not isinstance(one, Sharded)}
        for one in used.values():
            if func.__name__ in UNCOUNTED:
                one.show_uncounted(result)
            elif id(one.tensor) not in known and storage_of(one.full) not in returned:
                del self._open[id(one.tensor)]
        return self._map(result, lambda one: users.get(id(one), one))

    @torch.no_grad()
    def _opened(self, tensor: Tensor) -> OpenTensor:
        if isinstance(tensor, FlatParameter) or (isinstance(tensor, FlatShard) and tensor.place.holds_several):
            raise RuntimeError(
                "A flat parameter of FSDP1 was used in a way that is not element-wise (its shape, rows, norm, or "
                "random values): it holds several of the model's parameters. Set use_orig_params=True (the default)."
            )
        shard = self._shard(tensor)
        original = self._aliases.original(tensor)
        if id(original) not in self._open:
            kept = self._aliases.kept.pop(id(original), None)
            self._open[id(original)] = OpenTensor.gathered(
                original, shard, self.num_changes, None if kept is None else kept.full()
            )
        self._write_back(self._open[id(original)])
        self._open[id(original)].refresh(self.num_changes)
        return self._open[id(original)]

    def _linked(self, opened: OpenTensor, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FlatShard):
            raise RuntimeError(
                "requires_grad_() of what was made from a sharded parameter, used where gradients are on: this process "
                "has a part of it, and so of its gradient. Make it from the whole tensor: "
                "weight[:].detach().requires_grad_()."
            )
        if isinstance(tensor, DTensor) or (self._access.shows_shards and not self._in_step):
            linked: Tensor = _Link.apply(opened.full, tensor, opened.shard)  # type: ignore[no-untyped-call]
            return linked
        return self._access.linked(opened.full, tensor) if self._in_step else opened.full

    def _full(self, tensor: Tensor) -> Tensor:
        return gathered(self._shard(tensor)) if self.is_sharded(tensor) else tensor


def wait_for_streams(device_type: str) -> None:
    """Wait for all that runs on an accelerator: writes to shards, and copies of them.

    Engines gather on streams of their own. Those wait for the stream that computes where a forward of the root begins,
    and not where users' code changes weights in the midst of it; and they copy offloaded shards while the host goes on.
    """
    if device_type != "cpu":
        torch.accelerator.synchronize()


def _engines_device(tensor: Tensor) -> str:
    """Return the type of device that the engine gathers on."""
    if isinstance(tensor, DTensor):
        return tensor.device_mesh.device_type
    return (tensor.place.device if isinstance(tensor, FlatShard) else tensor.device).type


def _check_equal_on_ranks(value: Tensor, what: str) -> None:
    """Refuse a full tensor that differs between the ranks, of which each would keep another part.

    Raises:
        RuntimeError: On every rank.
    """
    bits = value.detach().double().sum().nan_to_num()
    ends = torch.stack([bits, -bits])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    if float(ends[0]) != -float(ends[1]):
        raise RuntimeError(
            f"{what}: the ranks assigned different values, and each rank would keep a part of a different tensor "
            "(under ddp the weights of the ranks would diverge). Average it first: "
            "torch.distributed.all_reduce(value, torch.distributed.ReduceOp.SUM), then divide by the number of "
            "ranks."
        )


def _broadcast(one: torch.Size, other: torch.Size) -> torch.Size | None:
    try:
        return torch.broadcast_shapes(one, other)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None


def tensors_in(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of an operation, and in lists and tuples of them."""
    for one in (*args, *kwargs.values()):
        if isinstance(one, Tensor):
            yield one
        elif type(one) in (list, tuple):
            yield from tensors_in(one, {})


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _is_shallow_copy(frame: FrameType | None) -> bool:
    """Return whether ``copy.copy()`` asks for what torch would pickle."""
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith("torch."):
        frame = frame.f_back
    return frame is not None and frame.f_code is copy.copy.__code__


def _unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor that function transforms were handed."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


@cache
def is_element_by_element(name: str) -> bool:
    """Return whether the operation of this name treats every element alone, and draws no random numbers."""
    if name in _ELEMENT_BY_ELEMENT or name in _REDUCTIONS:
        return name in _ELEMENT_BY_ELEMENT
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name.startswith("__"):
        return False
    tags = [getattr(packet, overload).tags for overload in packet.overloads()]
    return any(torch.Tag.pointwise in each for each in tags) and not any(
        torch.Tag.nondeterministic_seeded in each for each in tags
    )


@cache
def _counted(func: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function whose write to its first tensor raises the version counter, and has happened in the end."""

    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = func(tensor, *args, **kwargs)
        if isinstance(result, dist.Work):
            result.wait()
        increment_version(tensor)
        return result

    run.__name__ = name
    return run


def hands_out_memory(func: Any) -> bool:
    """Return whether writes to what an operation returns raise no version counter, or it is ``p.data = values``."""
    owner = getattr(getattr(func, "__self__", None), "__name__", "")
    return func.__name__ in UNCOUNTED or (owner == "data" and func.__name__ in _OF_ATTRIBUTES)


def _is_in_place(name: str) -> bool:
    return name in _WRITING_OPERATORS or (name.endswith("_") and not name.endswith("__"))


@cache
def _foreach_base(name: str) -> str | None:
    base = name.removeprefix("_foreach_")
    return base if hasattr(Tensor, base) or hasattr(torch, base) else None


class _Link(torch.autograd.Function):
    """The full tensor as a function of a shard, whose gradient is the mean over the ranks, as ``ddp`` has it."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, tensor: Tensor, shard: Sharded) -> Tensor:
        ctx.shard, ctx.averages_over_ranks = shard.detach(), True
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        part = part_of(_mean(gradient), ctx.shard)
        return None, part.held if isinstance(part, FlatShard) else part, None


class _Average(torch.autograd.Function):
    """A result that is the same on all ranks; its gradient is the mean over them."""

    @staticmethod
    def forward(ctx: Any, result: Tensor) -> Tensor:
        ctx.averages_over_ranks = True
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _mean(gradient)


def _mean(gradient: Tensor) -> Tensor:
    total = gradient.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


class _KeepPlacements(torch.autograd.Function):
    """The DTensor itself, whose gradient has its placements: that of a sum, for one, is replicated."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, tensor.placements
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.redistribute(ctx.mesh, ctx.placements)


def _reduced(reduction: Callable[..., Any], tensor: DTensor, kwargs: Any) -> Tensor:
    """Return a reduction over all elements; a gradient reaches the shards as the mean over the ranks."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        result: Tensor = reduction(tensor, **kwargs).full_tensor()
        return result
    kept = _KeepPlacements.apply(tensor)  # type: ignore[no-untyped-call]
    averaged: Tensor = _Average.apply(reduction(kept, **kwargs).full_tensor())  # type: ignore[no-untyped-call]
    return averaged


def _all_have_elements(tensor: DTensor) -> bool:
    """Return whether no process's part is empty, of which there is no maximum."""
    num_parts = [1] * tensor.dim()
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, Shard):
            num_parts[placement.dim] *= size
    return all(-(-size // parts) * (parts - 1) < size for size, parts in zip(tensor.shape, num_parts, strict=True))
