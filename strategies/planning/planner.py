"""`plan_memory`: the memory of training, before it is launched: a run in a fork, its tensors by part, suggestions."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from typing_extensions import override

from ..common.launch import Unit
from ..fsdp.flat_params import units_of
from ..fsdp.fsdp2 import Units
from ..sharded_tensors.shards import local_part
from ..upstream.lightning import ClusterEnvironment, LightningModule, Trainer
from ..upstream.patches import Patches
from ..upstream.torch_fake import FAKE_BACKEND, tree_leaves
from .example_model import batch_size_of
from .memory_plan import MemoryPlan, size
from .plan_config import PlanConfig
from .shape_tensors import PARTS, Part, Peak, Phase, PlanningError, ShapeTensors, Storages


def plan_memory(
    module: Callable[[], LightningModule],
    batch: Any,
    strategy: Any,
    *,
    world_size: int,
    precision: str = "32-true",
    accumulate_grad_batches: int = 1,
    gradient_clip_val: float | None = None,
) -> MemoryPlan:
    """Find out how much memory training takes of each process, in one process and without that memory.

    The Trainer runs three optimizer steps with the strategy itself, as rank 0 of so many processes that nobody else is
    in. Tensors have storages of their real sizes, which nobody writes, so that they take no memory; no kernel runs. It
    happens in a fork of this process.

    Args:
        module: Makes the module: a class or a function without arguments. What it builds takes no memory.
        batch: What ``training_step`` gets of one process, the micro-batch; or a function of the module that makes it.
        strategy: An `AccelFSDPStrategy` or `AccelDeepSpeedStrategy` that no Trainer has had, or a function that
            makes one.
        world_size: Number of processes.
        precision: As for the Trainer.
        accumulate_grad_batches: As for the Trainer.
        gradient_clip_val: As for the Trainer.

    Returns:
        The peak, where in a step it is, and what it is made of.

    Raises:
        PlanningError: If the training cannot be planned: it depends on values that are computed from weights, has
            operations that do not say what they return, compiles, or optimizes manually with several optimizers.
        RuntimeError: If this process is in a process group.
        ValueError: If ``world_size`` or ``accumulate_grad_batches`` is less than 1.
    """
    for name, number in (("world_size", world_size), ("accumulate_grad_batches", accumulate_grad_batches)):
        if number < 1:
            raise ValueError(f"{name} must be >= 1, got {number}.")
    order = Order(
        module=module,
        batch=batch if callable(batch) else lambda _: batch,
        strategy=strategy if callable(strategy) else lambda: strategy,
        world_size=world_size,
        precision=precision,
        accumulate_grad_batches=accumulate_grad_batches,
        gradient_clip_val=gradient_clip_val,
    )
    plan, is_sorted = run_in_fork(partial(run_plan, order), "The plan")
    if not is_sorted:  # the most is held before the last step: sort what is held when it comes to that again
        plan, is_sorted = run_in_fork(partial(run_plan, order, plan.peak_bytes), "The plan")
    if not is_sorted:
        raise RuntimeError(f"The peak of {plan.peak_bytes} bytes was different in the second run.")
    said = {"precision": precision, "accumulate": accumulate_grad_batches}
    return replace(plan, settings=said)


# ------------------------------------------------------------------------------------------------
# One plan: the Trainer runs some steps with the strategy itself, over tensors without contents.


_MOST_MICRO_BATCHES = 3
"""Of a window: the first, the last and those between, which are alike."""
_STEPS = 3
"""The first makes the optimizer's state, the second is like all others, in the third what is held is sorted."""


@dataclass(frozen=True)
class Order:
    """The arguments of a plan."""

    module: Callable[[], LightningModule]
    batch: Callable[[LightningModule], Any]
    strategy: Callable[[], Any]
    world_size: int
    precision: Any = "32-true"
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None


class _Steps:
    """Follows a strategy through its steps, and looks where the most is held.

    Args:
        strategy: Whose methods are followed.
        storages: What is held.
        num_sorted_after: Number of training steps after which what is held at the highest is sorted; None at once.
        expected: The highest, where it is known already.
        patches: Removed when the plan is made.
    """

    def __init__(
        self, strategy: Any, storages: Storages, num_sorted_after: int, expected: int | None, patches: Patches
    ) -> None:
        self._strategy, self._storages, self._patches = strategy, storages, patches
        self._num_sorted_after, self._expected = num_sorted_after, expected
        self.building: Peak | None = None
        self.steady_state_bytes = 0
        self.peaks: list[Peak] = []
        self.num_steps = 0
        self.num_parameters = 0
        self.units: list[Unit] = []
        self._follow("setup", before=self._count, after="building")
        self._follow("training_step", before=self._begin_step, after="backward")
        self._follow("backward", before=None, after="optimizer step")
        self._follow("optimizer_step", before=None, after="between steps")

    def _follow(self, name: str, before: Callable[[], None] | None, after: Phase) -> None:
        method = getattr(self._strategy, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before()
            result = method(*args, **kwargs)
            self._storages.phase = after
            return result

        self._patches.put(self._strategy, name, run)

    def _count(self) -> None:
        """The module is complete, and not sharded yet, except by ZeRO-3."""
        parameters = self._strategy.lightning_module.parameters()
        self.num_parameters = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)

    def _begin_step(self) -> None:
        _check_optimizers(self._strategy)
        self.steady_state_bytes = max(self._storages.num_bytes, self.steady_state_bytes) if self.peaks else 0
        peak = self._storages.pop_peak()
        if self.building is None:
            self.building = peak
            self.units = _units(self._strategy)
            if self._expected is not None:
                self._storages.expect(self._expected)
        else:
            self.peaks.append(peak)
        if self._expected is None and self.num_steps == self._num_sorted_after:
            self._storages.expect(max(each.num_bytes for each in self.peaks))
        self.num_steps += 1
        self._storages.phase = "forward"

    def end(self) -> Peak:
        """Return the highest of all steps."""
        self.peaks.append(self._storages.pop_peak())
        return max(self.peaks, key=lambda peak: (peak.num_bytes, bool(peak.parts)))


def run_plan(order: Order, expected: int | None = None) -> tuple[MemoryPlan, bool]:
    """Make a plan in this process, which is not to be used for anything else afterwards.

    Args:
        order: What to plan.
        expected: The highest of all, where an earlier plan of the same order has found it.

    Returns:
        The plan, and whether what is held at its highest could be sorted into parts.

    Raises:
        PlanningError: If what is to be planned cannot be.
    """
    _be_quiet()
    strategy = order.strategy()
    classify: list[Callable[[], dict[int, Part]]] = []
    storages = Storages(lambda: classify[0]() if classify else {})
    window = min(order.accumulate_grad_batches, _MOST_MICRO_BATCHES)
    patches = Patches("plan")
    _prepare(strategy, patches)
    with patches, fake_process_group(order.world_size), ShapeTensors(storages).running():
        module = order.module()
        if not isinstance(module, LightningModule):
            raise PlanningError(f"A plan needs a LightningModule, got {type(module).__name__}.")
        batch = order.batch(module)
        steps = _Steps(strategy, storages, window * (_STEPS - 1), expected, patches)
        classify.append(lambda: parts_of(strategy.model, strategy.optimizers))
        trainer = Trainer(
            strategy=strategy,
            plugins=[FakeClusterEnvironment(order.world_size)],
            accelerator="cpu",
            devices=order.world_size,
            precision=order.precision,
            accumulate_grad_batches=window,
            gradient_clip_val=order.gradient_clip_val,
            max_steps=_STEPS,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        patches.put(trainer._data_connector, "prepare_data", lambda: None)  # it may download
        trainer.fit(module, _loader(batch, window * (_STEPS + 1)))
        highest = steps.end()
    if steps.building is None or steps.num_steps < window * _STEPS:
        raise PlanningError(
            f"Training ended after {steps.num_steps} micro-batches of {window * _STEPS}: the module or one of its "
            "callbacks ends it early, or training_step() returns None."
        )
    parts: dict[str, int] = {part: highest.parts.get(part, 0) for part in PARTS}
    plan = MemoryPlan(
        peak_bytes=highest.num_bytes,
        phase=highest.phase,
        parts=parts,
        init_peak_bytes=steps.building.num_bytes,
        steady_state_bytes=steps.steady_state_bytes,
        num_parameters=steps.num_parameters,
        world_size=order.world_size,
        units=steps.units,
    )
    return plan, sum(parts.values()) == highest.num_bytes


def _units(strategy: Any) -> list[Unit]:
    from ..deepspeed import engine as deepspeed_engine
    from ..fsdp.strategy import AccelFSDPStrategy
    from ..fsdp.summary import describe_units

    if isinstance(strategy, AccelFSDPStrategy):
        return describe_units(strategy.engine, strategy.sharded)
    return deepspeed_engine.describe_units(strategy.model)


def _loader(batch: Any, num_batches: int) -> DataLoader[Any]:
    """Return a loader of one batch, again and again, that knows its size: ZeRO's config asks for it."""
    size = batch_size_of(batch)
    return DataLoader(range(size * num_batches), size, collate_fn=lambda _: batch)  # type: ignore[arg-type]


def _check_optimizers(strategy: Any) -> None:
    module = strategy.lightning_module
    if module is not None and not module.automatic_optimization and len(strategy.optimizers) > 1:
        raise PlanningError(
            f"{type(module).__name__} optimizes manually with {len(strategy.optimizers)} optimizers: only its code "
            "determines which of them steps when, and so which memory is held. Plan a module with one optimizer at "
            "a time."
        )


def _prepare(strategy: Any, patches: Patches) -> None:
    """Refuse what a plan would be wrong about; let DeepSpeed run without kernels of its own.

    Raises:
        PlanningError: If the strategy compiles, or is none of ours.
    """
    from ..deepspeed.strategy import AccelDeepSpeedStrategy
    from ..fsdp.strategy import AccelFSDPStrategy

    if isinstance(strategy, AccelDeepSpeedStrategy):
        if "nvme" in str(strategy.deepspeed_config):
            raise PlanningError("Offloading to NVMe cannot be planned. Plan with offloading to the CPU.")
        without_compiled_kernels(patches)
    elif not isinstance(strategy, AccelFSDPStrategy):
        raise PlanningError(
            f"Plans are for AccelFSDPStrategy and AccelDeepSpeedStrategy, not for {type(strategy).__name__}."
        )
    elif strategy._compile_options is not None:
        raise PlanningError(
            "compile decides what is kept for backward, and a plan runs no compiled code. Plan without it: compiled "
            "code usually needs less memory."
        )


def _be_quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.manual_seed(0)


# ------------------------------------------------------------------------------------------------
# A fake process group in which this process is rank 0 and the other ranks do not exist.


class FakeClusterEnvironment(ClusterEnvironment):
    """All processes on one node, this one the first.

    Args:
        world_size: Number of processes.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    @override
    def main_port(self) -> int:
        return 0

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return self._world_size

    @override
    def set_world_size(self, size: int) -> None:
        pass

    @override
    def global_rank(self) -> int:
        return 0

    @override
    def set_global_rank(self, rank: int) -> None:
        pass

    @override
    def local_rank(self) -> int:
        return 0

    @override
    def node_rank(self) -> int:
        return 0


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Be rank 0 of ``world_size`` processes, of which nobody else is there.

    Raises:
        RuntimeError: If there is a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "A plan simulates several processes, but this process already belongs to a process group. Plan in a "
            "separate script, before training is launched."
        )
    torch.set_num_threads(1)
    dist.init_process_group(FAKE_BACKEND, rank=0, world_size=world_size, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------
# The kind of each storage of a strategy in training, determined at the peak.


_FLAT_GATHERED = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")
_FLAT_GRADIENTS = ("grad", "_saved_grad_shard", "_cpu_grad")
_ZERO_GATHERED = ("_ipg", "ipg_", "param_gradients_buffer", "_ds_secondary")
_ZERO_GRADIENTS = ("averaged_gradients", "_accumulated_grad", "grad_partitions", "all_grad_tensors", "param_dict")
_ZERO_MASTERS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
_ZERO_PARAMETERS = ("bit16_groups", "fp16_groups", "fp16_partitioned_groups", "parallel_partitioned", "lp_param")


def parts_of(model: nn.Module, optimizers: list[Any]) -> dict[int, Part]:
    """Return of which part storages are, by their addresses; the others are classified by the phase that made them.

    Args:
        model: What the strategy trains: the sharded root, or DeepSpeed's engine.
        optimizers: The strategy's.
    """
    found: dict[int, Part] = {}

    def assign(part: Part, tensors: Iterator[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                found[local_part(tensor).untyped_storage()._cdata] = part

    assign("gathered", _gathered(model))
    for optimizer in optimizers:
        assign("optimizer", _states(optimizer))
        assign("optimizer", _of_zero(optimizer, _ZERO_MASTERS))
        assign("gathered", _of_zero(optimizer, _ZERO_GATHERED))
        assign("gradients", _of_zero(optimizer, _ZERO_GRADIENTS))
        assign("parameters", _of_zero(optimizer, _ZERO_PARAMETERS))
    assign("gradients", _gradients(model))
    assign("parameters", _parameters(model))
    return found


def _parameters(model: nn.Module) -> Iterator[Any]:
    parameter: Any
    of_fsdp2 = Units(model).params
    unsharded = {id(getattr(param, "_unsharded_param", None)) for param in of_fsdp2}  # a module has these meanwhile
    for parameter in model.parameters():
        if id(parameter) not in unsharded and (not hasattr(parameter, "ds_tensor") or parameter.ds_persist):
            yield parameter.data
        yield getattr(parameter, "ds_tensor", None)
    yield from (param.sharded_param for param in of_fsdp2)
    yield from model.buffers()
    for unit in units_of(model):
        yield unit._handle.flat_param._local_shard


def _gradients(model: nn.Module) -> Iterator[Any]:
    for parameter in model.parameters():
        yield parameter.grad
        yield getattr(parameter, "grad_accum", None)
    for unit in units_of(model):
        yield from (getattr(unit._handle.flat_param, name, None) for name in _FLAT_GRADIENTS)
    for param in Units(model).params:
        yield param.unsharded_accumulated_grad
        unsharded = getattr(param, "_unsharded_param", None)
        yield None if unsharded is None else unsharded.grad


def _gathered(model: nn.Module) -> Iterator[Any]:
    for parameter in model.parameters():
        if hasattr(parameter, "ds_tensor"):
            yield parameter.data
    for unit in units_of(model):
        yield from (getattr(unit._handle.flat_param, name, None) for name in _FLAT_GATHERED)
    for param in Units(model).params:
        yield from param.all_gather_outputs
        yield getattr(param, "_unsharded_param", None)


def _states(optimizer: Any) -> Iterator[Any]:
    inner = getattr(optimizer, "optimizer", optimizer)
    for state in getattr(inner, "state", {}).values():
        yield from tree_leaves(state if not isinstance(state, Mapping) else dict(state))


def _of_zero(optimizer: Any, names: tuple[str, ...]) -> Iterator[Any]:
    if isinstance(optimizer, torch.optim.Optimizer):
        return
    for name, value in vars(optimizer).items():
        if any(one in name for one in names):
            yield from tree_leaves(value)


# ------------------------------------------------------------------------------------------------
# Runs a plan in a process of its own, so that torch's and DeepSpeed's state of fake processes ends with it.


T = TypeVar("T")


def run_in_fork(action: Callable[[], T], what: str) -> T:
    """Run ``action`` in a fork of this process, which has everything that this one has, and return its result.

    Args:
        action: Anything that can be called; its result is pickled.
        what: For errors.

    Raises:
        RuntimeError: If the fork ended without a result.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(action, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        reply = ours.recv_bytes()
    except EOFError:
        process.join()
        raise RuntimeError(f"{what} ended with status {process.exitcode} and no message.") from None
    finally:
        ours.close()
    process.join()
    error, details, result = pickle.loads(reply)
    if error is not None:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(details)
        raise error
    return result


def _run(action: Callable[[], T], connection: Connection) -> None:
    sys.stdout.flush()
    os.dup2(2, 1)  # what is printed meanwhile is no part of the result
    try:
        reply = pickle.dumps((None, "", action()))
    except BaseException as error:  # noqa: BLE001 (raised again in the process that asked)
        details = traceback.format_exc()
        try:
            reply = pickle.dumps((error, details, None))
            pickle.loads(reply)
        except Exception:  # noqa: BLE001 (an exception that does not travel: its text does)
            reply = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), details, None))
    connection.send_bytes(reply)
    connection.close()


# ------------------------------------------------------------------------------------------------
# DeepSpeed without compiled operations, which would write to memory that a plan does not have.


class _NoKernels:
    """Stands for the compiled Adam on the CPU."""

    def create_adam(self, *_: Any) -> None:
        """Do nothing: steps read and write nothing."""

    adam_update = adam_rollback = destroy_adam = create_adam


def without_compiled_kernels(patches: Patches) -> None:
    """Keep DeepSpeed from compiling and running its own kernels until the patches are removed.

    Raises:
        RuntimeError: If DeepSpeed computes on an accelerator in this process already.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.comm.torch as communication
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import CPUAdamBuilder

    if get_accelerator()._name != "cpu":
        raise RuntimeError(
            f"DeepSpeed computes on {get_accelerator()._name!r} in this process, but plans run on the CPU. Set "
            "DS_ACCELERATOR=cpu in the environment, or plan in a separate script."
        )
    patches.put(communication, "build_shm_op", lambda: None)
    patches.put(CPUAdamBuilder, "load", lambda self, verbose=True: _NoKernels())


# ------------------------------------------------------------------------------------------------
# Settings that fit into the available memory: the requested ones, and alternatives.


@dataclass(frozen=True)
class Variant:
    """Settings, and what they take."""

    change: str
    """The difference from the request; empty for the request itself."""
    plan: MemoryPlan | None
    refused: str = ""
    """Why there is no plan."""

    def fits(self, memory_bytes: int) -> bool:
        """Return whether there is a plan, and it fits."""
        return self.plan is not None and self.plan.fits(memory_bytes)


def try_variants(plan_config: PlanConfig, memory_bytes: int, plan: Callable[[PlanConfig], MemoryPlan]) -> list[Variant]:
    """Plan what is asked for, and what could be set otherwise while it does not fit, the least intrusive first.

    Args:
        plan_config: The plan that the user asks for.
        memory_bytes: What each process has.
        plan: Makes a plan.

    Returns:
        All that were planned; where what is asked for fits, that alone.

    Raises:
        PlanningError: If what is asked for cannot be planned.
    """
    found = [Variant("", plan(plan_config))]
    if found[0].fits(memory_bytes):
        return found
    for change, changed in _changes(plan_config):
        try:
            found.append(Variant(change, plan(changed)))
        except (PlanningError, ValueError) as error:
            found.append(Variant(change, None, str(error)))
    return found


def _changes(plan_config: PlanConfig) -> Iterator[tuple[str, PlanConfig]]:
    """Yield other settings, first those that change neither results nor the number of processes."""
    sharded = None
    if (other := plan_config.fully_sharded()) is not None:
        sharded = other
        yield f"{other.sharding_words}", other
    base = sharded or plan_config
    recomputed = base.recomputed()
    if recomputed is not None:
        yield _joined(sharded and base.sharding_words, "activation checkpointing"), recomputed
    for factor in (2, 4):
        smaller = (recomputed or base).in_micro_batches(factor)
        if smaller is not None:
            words = _joined(
                sharded and base.sharding_words,
                recomputed and "activation checkpointing",
                f"{factor} times smaller micro-batches, {factor} times as many",
            )
            yield words, smaller
    for factor in (2, 4):
        more = replace(recomputed or base, world_size=plan_config.world_size * factor)
        words = _joined(
            sharded and base.sharding_words, recomputed and "activation checkpointing", f"{more.world_size} processes"
        )
        yield words, more


def _joined(*words: object) -> str:
    return " and ".join(str(word) for word in words if word)


def table(variants: list[Variant], memory_bytes: int) -> str:
    """Return the tried settings, a line each."""
    names = [variant.change or "as requested" for variant in variants]
    width = max(map(len, names))
    lines = [f"{'':{width}}  {'peak':>10}  fits {size(memory_bytes)}"]
    for name, variant in zip(names, variants, strict=True):
        if variant.plan is None:
            lines.append(f"{name:{width}}  {'-':>10}  cannot be planned: {variant.refused}")
        else:
            fits = "yes" if variant.fits(memory_bytes) else "no"
            lines.append(f"{name:{width}}  {size(variant.plan.peak_bytes):>10}  {fits}")
    return "\n".join(lines)


def advice(variants: list[Variant], memory_bytes: int) -> str:
    """Return one sentence: what fits with the least change."""
    there = size(memory_bytes)
    for variant in variants:
        if variant.fits(memory_bytes):
            peak = "" if variant.plan is None else f" ({size(variant.plan.peak_bytes)})"
            return f"Fits {there} with {variant.change}{peak}." if variant.change else f"Fits {there} unchanged{peak}."
    planned = [variant.plan.peak_bytes for variant in variants if variant.plan is not None]
    return (
        f"None of the tried variants fits {there}: the smallest needs {size(min(planned))}. Use more processes, a "
        "shorter sequence, or a smaller model."
    )
