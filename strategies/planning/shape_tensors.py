"""Tensors without contents: training runs as usual, but no kernel runs and no page of memory is written.

[Note: shape tensors] torch's fake tensors have no storage that can be freed, resized, viewed and compared as FSDP and
ZeRO do it, and what is done to a module with them differs (``Module.to``). Here tensors are real, with real storages:
the operating system gives no memory to what nobody writes. The results' shapes come from torch's fake tensors, in place
of each kernel. What is computed from values that are known (indices, masks, agreements between ranks) is computed as it
is, as long as it is small.
"""

from __future__ import annotations

import sysconfig
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from typing_extensions import override

from ..upstream.patches import Patches
from ..upstream.torch_fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    FakeWork,
    TorchDispatchMode,
    UnsupportedOperatorException,
    fake_mode_is_on,
    tree_leaves,
    tree_map_only,
)

_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_SMALL_BYTES = 1 << 20
"""Up to here, what is computed from known values is computed."""
_ALWAYS_RUN = {
    *("_unsafe_view", "_to_dense", "resize_", "resize_as_", "set_", "detach_", "as_strided_", "t_", "transpose_"),
    *("squeeze_", "unsqueeze_", "is_pinned", "record_stream", "_local_scalar_dense", "is_same_size"),
}
"""Operations beside views that look at no values."""
_UNWRITTEN = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"}
_COPIED_BY_GLOO = {"_reduce_scatter_base_"}
"""Collectives that gloo runs on a copy of what is sent (torch 2.13: reduced whole, then cut)."""
_COPYING = {"allgather_", "_allgather_base_"}
"""Collectives that torch's backend without peers fills in."""
_NAMESPACES_TO_RUN = ("profiler", "prim", "prims")
_BETWEEN = {"_tensor.py", "_compile.py", "_ops.py", "utils", "_dynamo"}
"""Of torch: what is between an operation and who asked for it."""
_OF_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "deepspeed", "torchmetrics")


class PlanningError(RuntimeError):
    """Something cannot be planned: the message says why, and what to do."""


class ShapeTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs everything inside without kernels.

    Args:
        storages: Told of every storage.
    """

    def __init__(self, storages: Storages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = storages
        self._fake = FakeTensorMode()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if fake_mode_is_on():
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) for tensor in tensors):
            if any(isinstance(tensor, FakeTensor) for tensor in tensors):
                return func(*args, **kwargs)
            if any(hasattr(tensor, "__tensor_flatten__") for tensor in tensors):
                return NotImplemented  # torch asks the tensor's class, which comes back with what is inside
        if any(tensor.is_meta for tensor in tensors) or str(kwargs.get("device", "")) == "meta":
            return func(*args, **kwargs)
        for tensor in tensors:
            self._storages.track(tensor, is_shape_only=False)
        shape_only = [tensor for tensor in tensors if self._storages.is_shape_only(tensor)]
        return self._run(func, args, kwargs, tensors, shape_only)

    def _run(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], shape_only: list[torch.Tensor]
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        if name == "_local_scalar_dense" and shape_only:
            return self._answer(args[0])
        if func.namespace == "c10d":
            return self._communicate(name, func, args, kwargs, tensors)
        if func.is_view or name in _ALWAYS_RUN or name in _UNWRITTEN or func.namespace in _NAMESPACES_TO_RUN:
            result = func(*args, **kwargs)
            self._follow(result, is_shape_only=name in _UNWRITTEN)
            return result
        written = _written(func, args, kwargs)
        if name == "_amp_foreach_non_finite_check_and_unscale_":  # gradients are finite; whether they are is asked
            return None
        if not shape_only and sum(tensor.nbytes for tensor in tensors) <= _SMALL_BYTES and tensors:
            known = self._run_if_small(func, args, kwargs)
            if known is not _UNKNOWN:
                return known
        for tensor in written:
            self._storages.mark_shape_only(tensor)
        if _returns_only_what_is_written(func):
            return _returned_arguments(func, args, kwargs)
        return self._shape_only_result(func, args, kwargs, tensors)

    def _communicate(self, name: str, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Every other rank says what this one says, and that at once."""
        self._storages.is_communicated(tensors)
        if name in _COPIED_BY_GLOO:  # and freed at once: the work is done
            copy = torch.empty_like(args[1])
            self._storages.track(copy, is_shape_only=True)
            self._storages.is_communicated([copy])
        if sum(tensor.nbytes for tensor in tensors) > _SMALL_BYTES:
            return _fake_work(func, args)
        result = func(*args, **kwargs)
        if name in _COPYING:
            received, sent = tree_leaves(args[0]), tree_leaves(args[1])
            if not any(self._storages.is_shape_only(tensor) for tensor in sent):
                for tensor in received:
                    self._storages.mark_shape_only(tensor, False)
        return result

    def _run_if_small(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            shapes = self._shapes(func, args, kwargs, {})
        except PlanningError:  # its shape depends on values, which are known
            shapes = None
        if sum(leaf.nbytes for leaf in tree_leaves(shapes) if isinstance(leaf, torch.Tensor)) > _SMALL_BYTES:
            return _UNKNOWN
        result = func(*args, **kwargs)
        self._follow(result, is_shape_only=False)
        return result

    def _shape_only_result(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        fakes: dict[int, FakeTensor] = {}
        shapes = self._shapes(func, args, kwargs, fakes)
        if not tensors and (factory := _small_factory(shapes)):
            result = func(*args, **kwargs)
            self._follow(result, is_shape_only=not factory)
            return result
        by_fake = {id(fakes[id(tensor)]): tensor for tensor in tensors if id(tensor) in fakes}
        by_storage = {fakes[id(tensor)].untyped_storage()._cdata: tensor for tensor in tensors if id(tensor) in fakes}

        def real(fake: torch.Tensor) -> torch.Tensor:
            if id(fake) in by_fake:
                return by_fake[id(fake)]
            if (base := by_storage.get(fake.untyped_storage()._cdata)) is not None:
                return base.as_strided(fake.size(), fake.stride(), fake.storage_offset())
            tensor = _unwritten(fake)
            self._storages.track(tensor, is_shape_only=True)
            return tensor

        return tree_map_only(torch.Tensor, real, shapes)

    def _shapes(self, func: Any, args: Any, kwargs: Any, fakes: dict[int, FakeTensor]) -> Any:
        """Run an operation on fake tensors; ``fakes`` takes those that stand for its arguments."""

        def fake(tensor: torch.Tensor) -> FakeTensor:
            if id(tensor) not in fakes:
                meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
                fakes[id(tensor)] = FakeTensor(self._fake, meta, tensor.device)
            return fakes[id(tensor)]

        fake_args, fake_kwargs = tree_map_only(torch.Tensor, fake, (args, kwargs))
        try:
            with self._fake:
                return func(*fake_args, **fake_kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise PlanningError(
                f"The output size of {func} depends on values that are computed from weights{_place()}, but a plan "
                "has no values. Plan with that part replaced by one of fixed size."
            ) from error
        except (UnsupportedOperatorException, RuntimeError) as error:  # NotImplementedError among them
            if type(error) is RuntimeError and "fake impl" not in str(error):
                raise  # the user's own: shapes that do not fit
            raise PlanningError(
                f"{func}{_place()} cannot report its output without running: it has no fake implementation. "
                "Register one with torch.library.register_fake."
            ) from error

    def _follow(self, result: Any, *, is_shape_only: bool) -> None:
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._storages.track(leaf, is_shape_only=is_shape_only)

    # ------------------------------------------------------------------ values
    def _answer(self, tensor: torch.Tensor) -> Any:
        """Return a harmless value to a library that checks for overflows and the like.

        Raises:
            PlanningError: If it is anybody else who asks: what is done next may depend on it.
        """
        if _asker_is_a_library():
            return 0.0 if tensor.is_floating_point() else False if tensor.dtype == torch.bool else 0
        raise PlanningError(
            f"A value that is computed from weights is read{_place()} (item(), float(), bool(), an if on a tensor), "
            "but a plan has no values. A value that is only logged can stay a tensor: self.log('loss', "
            "loss.detach()). Control flow that depends on values cannot be planned."
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the block without kernels."""
        storages = self._storages

        def resizing(resize: Any) -> Any:
            def run(storage: Any, size: int) -> Any:
                result = resize(storage, size)
                storages.resized(storage)
                return result

            return run

        def read(function: Any) -> Any:
            def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                if type(tensor) in (torch.Tensor, torch.nn.Parameter) and storages.is_shape_only(tensor):
                    self._answer(tensor)
                return function(tensor, *args, **kwargs)

            return run

        with Patches("plan") as patches, self:
            patches.put(torch.UntypedStorage, "resize_", resizing(torch.UntypedStorage.resize_))
            for name in ("numpy", "tolist"):
                patches.put(torch.Tensor, name, read(getattr(torch.Tensor, name)))
            yield


_UNKNOWN = object()


def _unwritten(fake: torch.Tensor) -> torch.Tensor:
    """Return memory that nobody has written, and that takes none therefore.

    Raises:
        PlanningError: If the operating system does not even give addresses for it.
    """
    try:
        return torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=fake.device)
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise PlanningError(
            f"The operating system refuses to reserve addresses for a tensor of {fake.nbytes:,} bytes, although "
            "nothing writes to it. Plan on a system that allows it (sysctl vm.overcommit_memory=1, or 0 and more "
            "memory; no ulimit -v)."
        ) from error


def _small_factory(shapes: Any) -> bool:
    return sum(leaf.nbytes for leaf in tree_leaves(shapes) if isinstance(leaf, torch.Tensor)) <= _SMALL_BYTES


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the arguments that an operation writes."""
    return [
        leaf
        for argument, value in _arguments(func, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    ]


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _returns_only_what_is_written(func: Any) -> bool:
    schema = func._schema
    return schema.is_mutable and all(
        returned.alias_info is not None and returned.alias_info.is_write for returned in schema.returns
    )


def _returned_arguments(func: Any, args: Any, kwargs: Any) -> Any:
    by_set = {
        frozenset(argument.alias_info.before_set): value
        for argument, value in _arguments(func, args, kwargs)
        if argument.alias_info is not None
    }
    found = [by_set[frozenset(returned.alias_info.before_set)] for returned in func._schema.returns]
    return None if not found else found[0] if len(found) == 1 else tuple(found)


def _fake_work(func: Any, args: Any) -> Any:
    """Return the result of a collective that has ended."""
    work = FakeWork().boxed()
    returns = func._schema.returns
    return work if len(returns) == 1 else (args[0], work)


def _frames() -> Iterable[traceback.FrameSummary]:
    return reversed(traceback.extract_stack()[:-2])


def _asker_is_a_library() -> bool:
    here = Path(__file__).parent
    for frame in _frames():
        if frame.filename.startswith(str(here)):
            continue
        if frame.filename.startswith(str(here.parent)):  # the strategies
            return True
        parts = Path(frame.filename).parts
        if "torch" in parts and _BETWEEN & set(parts):
            continue
        return "site-packages" in parts and parts[parts.index("site-packages") + 1] in _OF_LIBRARIES
    return False


def _place() -> str:
    """Return the present line of the user's code."""
    for frame in _frames():
        theirs = not frame.filename.startswith((str(Path(__file__).parents[1]), _STANDARD_LIBRARY))
        if theirs and "site-packages" not in frame.filename and "<" not in frame.filename:
            return f" at {frame.filename}:{frame.lineno} ({(frame.line or '').strip()})"
    return ""


# ------------------------------------------------------------------------------------------------
# The memory of tensors while a plan runs: held bytes by kind, and their peak.


Part = Literal["parameters", "gathered", "gradients", "optimizer", "activations", "temporary"]
PARTS: tuple[Part, ...] = ("parameters", "gathered", "gradients", "optimizer", "activations", "temporary")
"""The kinds of memory; see `MemoryPlan`."""

Phase = Literal["building", "forward", "backward", "optimizer step", "between steps"]
_BY_PHASE: dict[Phase, Part] = {
    "building": "gathered",  # parameters are distinguished by their owner; the rest are buffers
    "forward": "activations",
    "backward": "temporary",
    "optimizer step": "temporary",
    "between steps": "temporary",
}


@dataclass
class _Held:
    """One storage."""

    reference: weakref.ref[torch.UntypedStorage]
    num_bytes: int
    part: Part
    is_shape_only: bool


@dataclass
class Peak:
    """The most that was held at one time since the last look."""

    num_bytes: int = 0
    phase: Phase = "building"
    parts: Counter[Part] = field(default_factory=Counter)


class Storages:
    """Follows every storage from the first operation that returns it until it is freed.

    Args:
        classify: Called when as many bytes are held as `expect` was given; returns of which part some storages
            are, by their addresses in C++.
    """

    def __init__(self, classify: Callable[[], dict[int, Part]]) -> None:
        self._held: dict[int, _Held] = {}
        self._classify = classify
        self._expected: int | None = None
        self.num_bytes = 0
        self.phase: Phase = "building"
        self.peak = Peak()

    # ------------------------------------------------------------------ following
    def track(self, tensor: torch.Tensor, *, is_shape_only: bool) -> None:
        """Begin to follow a tensor's storage; one that is known stays what it is."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return
        reference = weakref.ref(storage, partial(self._forget, key))
        self._held[key] = _Held(reference, storage.nbytes(), _BY_PHASE[self.phase], is_shape_only)
        self._add(storage.nbytes())

    def _forget(self, key: int, reference: Any) -> None:
        held = self._held.get(key)
        if held is not None and held.reference is reference:
            del self._held[key]
            self.num_bytes -= held.num_bytes

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Take note of a storage's new size."""
        held = self._held.get(storage._cdata)
        if held is not None:
            before, held.num_bytes = held.num_bytes, storage.nbytes()
            if before == 0:
                held.part = _BY_PHASE[self.phase] if held.part == "temporary" else held.part
            self._add(held.num_bytes - before)

    def _add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > self.peak.num_bytes:
            self.peak.num_bytes, self.peak.phase = self.num_bytes, self.phase
        if self._expected is not None and self.num_bytes >= self._expected:
            self._expected = None
            self.peak.parts = self._by_part()

    # ------------------------------------------------------------------ what is in them
    def is_shape_only(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory was never written."""
        held = self._held.get(tensor.untyped_storage()._cdata)
        return held is not None and held.is_shape_only

    def mark_shape_only(self, tensor: torch.Tensor, is_shape_only: bool = True) -> None:
        """Take note that a tensor's values are not what they would be, or that they are again."""
        self._held[tensor.untyped_storage()._cdata].is_shape_only = is_shape_only

    def is_communicated(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take note that tensors are sent or received: buffers, unless they are known as something else."""
        for tensor in tensors:
            held = self._held.get(tensor.untyped_storage()._cdata)
            if held is not None and held.part in ("activations", "temporary"):
                held.part = "gathered"

    # ------------------------------------------------------------------ peaks
    def pop_peak(self) -> Peak:
        """Return the highest since the last look, and begin again."""
        peak, self.peak = self.peak, Peak(self.num_bytes, self.phase)
        return peak

    def expect(self, num_bytes: int) -> None:
        """Sort what is held into parts as soon as it is so much."""
        self._expected = num_bytes

    def _by_part(self) -> Counter[Part]:
        classified = self._classify()
        parts: Counter[Part] = Counter()
        for key, held in self._held.items():
            parts[classified.get(key, held.part)] += held.num_bytes
        return parts
