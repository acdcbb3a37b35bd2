"""The one table of attributes that the product replaces in torch, Lightning, DeepSpeed and users' objects.

`Patches` applies and removes replacements of one row. A replacement that several apply goes with the last of them.
`replace_for_good` is for objects that belong to one engine and end with it. Versions in the table are those that need
it; "all" stands for those that pyproject.toml allows.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Self


class Patch(NamedTuple):
    """One row."""

    owner: str
    names: str
    why: str
    in_place: str
    """From when to when."""
    versions: str = "all"


TABLE: dict[str, Patch] = {
    # ---------------------------------------------------------------- classes and modules: of the whole process
    "clipping": Patch(
        "cells of torch.nn.utils.clip_grad's functions",
        "cell_contents",
        "norms and clipping that users call take one rank's part of a gradient for the whole",
        "a fit: setup_optimizers() to teardown()",
    ),
    "labels": Patch(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "record_function",
        "labels for profilers take a tenth of a step of small units while nobody profiles",
        "a run with FSDP2: its setup to teardown()",
    ),
    "scalars": Patch(
        "deepspeed: DeepSpeedEngine, zero.Init, zero.GatheredParameters",
        "_broadcast_model clip_fp32_gradients _zero_init_param _convert_to_deepspeed_param __exit__",
        "DeepSpeed cannot handle parameters without a dimension",
        "a run with DeepSpeed: setup_environment() to teardown()",
        "deepspeed 0.19",
    ),
    "init": Patch(
        "torch.nn.Module, transformers.PreTrainedModel",
        "register_parameter from_pretrained",
        "a model that receives its weights later takes no memory for them; torch.device('meta') moves buffers, too",
        "configure_model(), where weights come from rank 0 or a file",
    ),
    "plan": Patch(
        "torch.UntypedStorage, torch.Tensor; deepspeed.comm.torch, CPUAdamBuilder; the planned strategy, its Trainer",
        "resize_ numpy tolist build_shm_op load setup training_step backward optimizer_step prepare_data",
        "a plan counts storage and has no values, neither of which passes through a dispatch mode; it must not run "
        "compiled code, nor download; it learns which phase allocates",
        "a planning call",
    ),
    # ---------------------------------------------------------------- objects of a Trainer and users' objects
    "trainer": Patch(
        "the Trainer's signal connector, loops and ModelSummary",
        "_sigterm_notifier_fn _slurm_sigusr_handler_fn _broadcast_sigterm_tensor _should_accumulate _make_zero_grad_fn "
        "_on_before_fetch _summary",
        "all ranks leave at one batch after SIGTERM; accumulation windows end where `GradientState` says; checkpoints "
        "have the loaders' places; summaries count whole parameters",
        "a run: setup() to teardown(); accumulation: one fit's loop",
    ),
    "user code": Patch(
        "the Trainer's profiler, loops and callbacks, the LightningModule, its parameters, optimizers, metrics, "
        "loaders; threading.Thread, torch.nn.Module, FSDP1's class, torch.nn.Parameter, torch.Tensor",
        "profile start run stop setup_data reset training_step validation_step test_step predict_step zero_grad "
        "lr_scheduler_step step _step_supports_amp_scaling dist_sync_fn worker_init_fn state_dict _apply __new__ "
        "__class__ data numpy __array__ __dlpack__",
        "hooks and loaders see whole parameters, zero_grad() drops unreduced gradients, schedules wait for skipped "
        "steps, some optimizers step on whole tensors, fused ones leave scaling to the scaler, processes that share a "
        "model seed workers alike and count once in metrics, workers and threads refuse shards, module.to() leaves "
        "parameters where they are, steps and forwards notice aliases whose writes no version counts; the Trainer has "
        "no hook for these",
        "a run: setup() to teardown(); profile(): the Trainer lives; state_dict(): one save; classes: one step, one "
        "backward, one batch's loading, a forked process; scaling: one step",
    ),
    "loaders": Patch(
        "where the Trainer gets its training loaders",
        "dataloader",
        "ZeRO's config asks for a batch size before the fit; the Trainer then gets the loaders that were asked",
        "setup() to the Trainer's own request",
    ),
    "callbacks": Patch(
        "the Trainer, its strategy, profiler, precision plugin and data connector, the LightningModule, metrics",
        "accumulate_grad_batches limit_train_batches val_check_interval val_check_batch frequency training_step "
        "_prepare_dataloader resume_start process_dataloader log validation_step test_step on_validation_batch_end "
        "on_test_batch_end _sync_dist save_checkpoint load_checkpoint remove_checkpoint _clip_gradients profile start "
        "stop",
        "ElasticTraining, ExactEvaluation, MergeShardedCheckpoint, ReplicaCheck, ShardedEMA, StepGuard and Watchdog "
        "work under any strategy",
        "a callback's setup() to teardown()",
    ),
    # ---------------------------------------------------------------- objects of an engine: they end with it
    "FSDP2 groups": Patch(
        "FSDPParamGroup and FSDPState of a unit",
        "unshard reshard wait_for_unshard pre_backward post_backward _pre_forward _post_forward _pre_backward "
        "_root_post_backward_final_callback __class__",
        "ranks compare what they gather, changes by users reach the shards, unused parameters get zeros; what lies "
        "over fewer processes between forward and backward is nobody else's",
        "the engine lives",
    ),
    "FSDP1 handles": Patch(
        "FlatParamHandle of a unit",
        "reshard pre_unshard prepare_gradient_for_backward prepare_gradient_for_optim _use_unsharded_views "
        "_all_gather_flat_param _use_sharded_flat_param _use_unsharded_flat_param _use_sharded_grad_views",
        "as for FSDP2; a flat parameter's views are not left in modules while it is sharded; every rank has gradients "
        "and optimizer states of all parameters",
        "the engine lives",
    ),
    "sharded modules": Patch(
        "units of FSDP1 and FSDP2, and modules in them",
        "forward apply _apply named_modules requires_grad_ state_dict get_extra_state set_extra_state __deepcopy__ "
        "__class__ support_avx512bf16_for_cpu",
        "units are compiled inside their hooks; users see the names and shards that there are, and their state_dict() "
        "whole tensors; parameters keep their attributes when a module moves; copies, and freezing a part of a flat "
        "parameter, are refused; pickles have the modules' own classes; 4-bit weights are not repacked",
        "the module is sharded; classes: while it is pickled or checked",
    ),
    "ZeRO optimizers": Patch(
        "DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3 and the optimizer in it",
        "process_gradients reduce_ready_partitions_and_remove_grads finalize_gradient_accumulation_boundary "
        "independent_gradient_partition_epilogue _optimizer_step _update_scale _set_fp32_optimizer_param_groups "
        "_clear_fp32_optimizer_param_groups add_param_group state_dict load_state_dict __class__",
        "windows end where the Trainer's do; parameters step one by one; zero_grad() drops a window; users' code gets "
        "an error for states that are not torch's",
        "the engine lives; the class of a user's optimizer: one fit",
    ),
    "ZeRO-3 gathering": Patch(
        "PartitionedParameterCoordinator and parameters of stage 3",
        "fetch_sub_module trace_prologue reset_step all_gather partition",
        "ranks compare what they gather; changes of gathered parameters reach the masters",
        "the engine lives",
    ),
    "ZeRO files": Patch(
        "DeepSpeedEngine; torch",
        "checkpoint_engine _copy_recovery_script load load_universal_checkpoint",
        "a failure to write on one rank is raised on all; DeepSpeed's conversion takes extra states for weights; loads "
        "without the optimizer are of the checkpoint itself, not of its universal form",
        "one save; one conversion; one load",
    ),
}


# ------------------------------------------------------------------------------------------------
# Applying and removing replacements.

_MISSING = object()


@dataclass
class _Place:
    """An attribute that is replaced at present."""

    owner: Any
    before: Any
    """The owner's own attribute; `_MISSING` if it inherited one."""
    values: list[Any] = field(default_factory=list)


_places: dict[tuple[int, str], _Place] = {}


class Patches:
    """Replacements of one row of `TABLE`. They go together, in any order with those of others.

    Args:
        row: Its key.
    """

    def __init__(self, row: str) -> None:
        self._row = row
        self._put: list[tuple[tuple[int, str], Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of an object, class or module."""
        _check_listed(self._row, name)
        key, before = (id(owner), name), _own(owner, name)
        setattr(owner, name, value)
        _places.setdefault(key, _Place(owner, before)).values.append(value)
        self._put.append((key, value))

    def share(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute by the result of ``make``, or share the replacement that is there already."""
        place = _places.get((id(owner), name))
        self.put(owner, name, make(getattr(owner, name)) if place is None else place.values[-1])

    def remove(self) -> None:
        """Remove these replacements. A value that other code has set since then stays."""
        while self._put:
            key, value = self._put.pop()
            place, name = _places[key], key[1]
            is_in_place = _own(place.owner, name) is value
            del place.values[max(at for at, one in enumerate(place.values) if one is value)]
            after = place.values[-1] if place.values else place.before
            if not place.values:
                del _places[key]
            if is_in_place and after is _MISSING:
                delattr(place.owner, name)
            elif is_in_place:
                setattr(place.owner, name, after)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def replace_for_good(row: str, owner: Any, **values: Any) -> None:
    """Replace attributes of an object that ends with its engine."""
    for name, value in values.items():
        _check_listed(row, name)
        setattr(owner, name, value)


def set_classes(row: str, classes: Iterable[tuple[Any, type]]) -> None:
    """Give objects other classes, of the same layout."""
    _check_listed(row, "__class__")
    for owner, cls in classes:
        owner.__class__ = cls


def _check_listed(row: str, name: str) -> None:
    if name not in TABLE[row].names.split():
        raise KeyError(f"{name} is not listed in the row {row!r} of patches.TABLE.")


def _own(owner: Any, name: str) -> Any:
    """Return an object's, class's or module's own attribute, not one of its class or bases."""
    with suppress(AttributeError):
        if hasattr(inspect.getattr_static(type(owner), name), "__set__"):  # a property, as ``__class__`` is
            return getattr(owner, name)
    return vars(owner).get(name, _MISSING)
