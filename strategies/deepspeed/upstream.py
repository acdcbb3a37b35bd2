"""Every private name of torch and DeepSpeed that `strategies/deepspeed` relies on, each with the reason.

Private functions are imported here and nowhere else. Attributes of objects cannot be imported: the tables name them,
and ``tests/test_upstream.py`` looks for each in the versions that are installed.
"""

from __future__ import annotations

from pathlib import Path

# Whether the running backward gives a parameter a gradient; DeepSpeed itself relies on both.
from torch._C import _will_engine_execute_node
from torch.autograd.graph import _get_grad_fn_or_grad_acc

# Its kinds of device: from which the process group communicates.
from torch.distributed.distributed_c10d import _get_default_group

__all__ = [
    "ATTRIBUTES",
    "STAGE_3_ATTRIBUTES",
    "_get_default_group",
    "_get_grad_fn_or_grad_acc",
    "_will_engine_execute_node",
    "build_lock",
]


def build_lock(op: str) -> Path | None:
    """Return the file that locks an op while torch compiles it; None where it stays, and the system locks (2.15)."""
    # Not at the top: the module imports setuptools.
    from torch.utils import cpp_extension
    from torch.utils.cpp_extension import _get_build_directory

    has_own_locks = hasattr(cpp_extension, "FileBaton")
    return Path(_get_build_directory(op, False), "lock").resolve() if has_own_locks else None


_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_STAGE_1_2 = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
_STAGE_3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_BF16 = "deepspeed.runtime.bf16_optimizer.BF16_Optimizer"
_BASE = "deepspeed.runtime.base_optimizer"
_PARAMETERS = "deepspeed.runtime.zero.partition_parameters"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator"
_STRATEGY = "lightning.pytorch.strategies.DeepSpeedStrategy"
_GROUPS = "deepspeed.utils.groups"

ATTRIBUTES: dict[str, tuple[str, str]] = {
    # Its process groups
    "_WORLD_GROUP": (_GROUPS, "the group of all processes, beside the default one"),
    "_release_process_group_references": (_GROUPS, "forgets groups that are gone"),
    # The engine
    "_broadcast_model": (_ENGINE, "views parameters as bytes, which those without a dimension cannot be"),
    "_copy_recovery_script": (_ENGINE, "writes files between two meetings of the ranks: one that fails still comes"),
    "_running_engine_step": (_ENGINE, "says that gradients are reduced by a step, and not by a backward"),
    "_unmanaged_backward_count": (_ENGINE, "counts the backwards of a window; dropped with the window"),
    "_flush_coalesced_reduction_zero12": (_ENGINE, "reduces the gradients that a backward held back, stages 1 and 2"),
    "_flush_coalesced_reduction_zero3": (_ENGINE, "reduces the gradients that a backward held back, stage 3"),
    "basic_optimizer": (_ENGINE, "the optimizer that the engine made, before ZeRO puts another Adagrad in its place"),
    "allreduce_gradients": (_ENGINE, "reduces the gradients of a window at stages 0 and 1"),
    "enable_backward_allreduce": (_ENGINE, "off while the engine steps on gradients that are reduced already"),
    "inside_no_sync_ctxt": (_ENGINE, "lets a backward hold its gradients back"),
    "module_forward_pre_hook": (_ENGINE, "a hook to remove when another engine takes the module over"),
    "module_forward_post_hook": (_ENGINE, "a hook to remove when another engine takes the module over"),
    "param_names": (_ENGINE, "the parameters' names, for errors and checkpoints"),
    # Optimizers of ZeRO stages 1 and 2
    "_coalesce_grad_reduction": (_STAGE_1_2, "lets a backward hold its gradients back"),
    "_lazy_init_hp_params_optimizer_state": (_STAGE_1_2, "links optimizer state that a step on pieces has made"),
    "_offload_accumulated_param_ids": (_STAGE_1_2, "what is accumulated in host memory; dropped with the window"),
    "_optimizer_step": (_STAGE_1_2, "replaced to leave out parameters without a gradient"),
    "_release_ipg_buffers": (_STAGE_1_2, "drops the gradients that wait in buckets"),
    "_wait_for_offload_copies": (_STAGE_1_2, "ends copies to host memory before they are dropped"),
    "_update_scale": (_STAGE_1_2, "called between looking for overflows and the step: in fp32 none is left out"),
    "bit16_groups_flat": (_STAGE_1_2, "the weights that the model computes with, of all ranks"),
    "accumulated_grads_in_cpu": (_STAGE_1_2, "gradients in host memory; dropped with the window"),
    "all_grad_tensors": (_STAGE_1_2, "accumulated gradients; dropped with the window"),
    "averaged_gradients": (_STAGE_1_2, "reduced gradients; dropped with the window"),
    "bit16_groups": (_STAGE_1_2, "the parameters of each flat partition"),
    "extra_large_param_to_reduce": (_STAGE_1_2, "parameters larger than a bucket; dropped with the window"),
    "finalize_gradient_accumulation_boundary": (_STAGE_1_2, "completes the gradients of a window"),
    "grad_partition_insertion_offset": (_STAGE_1_2, "where a parameter's piece begins in the flat partition"),
    "grad_start_offset": (_STAGE_1_2, "where a rank's piece begins in a parameter"),
    "gradient_accumulation_dtype": (_STAGE_1_2, "dtype of the zeros for gradients that a rank lacks"),
    "ipg_buckets": (_STAGE_1_2, "gradients that wait to be reduced; dropped with the window"),
    "local_overflow": (_STAGE_1_2, "whether offloaded gradients have overflowed; dropped with the window"),
    "micro_step_id": (_STAGE_1_2, "micro-batches so far; starts anew with a window"),
    "norm_for_param_grads": (_STAGE_1_2, "norms of offloaded gradients; dropped with the window"),
    "parallel_partitioned_bit16_groups": (_STAGE_1_2, "flat partitions of the weights that the model computes with"),
    "params_already_reduced": (_STAGE_1_2, "what a backward has reduced; dropped with the window"),
    "params_in_partition": (_STAGE_1_2, "the parameters that a rank has a piece of"),
    "partition_size": (_STAGE_1_2, "elements in a flat partition"),
    "previous_reduced_grads": (_STAGE_1_2, "gradients of a reduction under way; dropped with the window"),
    "real_dp_process_group": (_STAGE_1_2, "the ranks that share a flat partition"),
    "reduce_ready_partitions_and_remove_grads": (_STAGE_1_2, "watched to note which parameters get a gradient"),
    "round_robin_bit16_groups": (_STAGE_1_2, "the parameters of each flat partition, in its order"),
    "round_robin_bit16_offsets": (_STAGE_1_2, "where each of those begins"),
    "setup_buckets": (_STAGE_1_2, "prepares buckets where no backward has"),
    "single_partition_of_fp32_groups": (_STAGE_1_2, "flat partitions of the weights that the optimizer steps on"),
    "use_grad_accum_attribute": (_STAGE_1_2, "whether gradients are in `grad_accum` and not in `grad`"),
    # Optimizers of ZeRO stage 3
    "_clear_fp32_optimizer_param_groups": (_STAGE_3, "takes out of the groups what the optimizer steps on"),
    "_set_fp32_optimizer_param_groups": (_STAGE_3, "puts into the groups what the optimizer steps on, for saves"),
    "_offload_boundary_param_ids": (_STAGE_3, "what is accumulated in host memory; dropped with the window"),
    "clear_params": ("deepspeed.runtime.zero.stage3", "empties a bucket of gradients that wait to be reduced"),
    "fp16_groups": (_STAGE_3, "the parameters of each flat partition"),
    "fp16_partitioned_groups_flat": (_STAGE_3, "flat partitions of the weights that the model computes with"),
    "fp32_partitioned_groups_flat": (_STAGE_3, "flat partitions of the weights that the optimizer steps on"),
    "grad_partitions_flat_buffer": (_STAGE_3, "accumulated gradients; zero at the start of a window"),
    "grad_position": (_STAGE_3, "where a parameter's piece begins in the flat partition"),
    "inf_or_nan_tracker": (_STAGE_3, "whether offloaded gradients have overflowed; dropped with the window"),
    "_PartitionedParameterCoordinator__inflight_param_registry": (_COORDINATOR, "a gather that users' code needs now"),
    "_PartitionedParameterCoordinator__allgather_stream": (_COORDINATOR, "where it runs"),
    "_PartitionedParameterCoordinator__params_to_release": (_COORDINATOR, "a cache that would keep layers for ever"),
    "parameter_offload": (_STAGE_3, "what gathers and partitions parameters"),
    "persistent_parameters": (_STAGE_3, "small parameters that stay gathered between steps"),
    "sub_group_to_group_id": (_STAGE_3, "the parameter group that a flat partition has its options from"),
    "swap_optimizer": (_STAGE_3, "whether the optimizer's state is on NVMe"),
    # Of both, and of DeepSpeed's optimizers for half precision
    "_grad_acc_hooks": (_STAGE_1_2, "hooks on gradients, which would keep an engine for ever"),
    "_backward_hook_state": (f"{_BASE}.ZeROOptimizer", "follows backwards; started anew after one that failed"),
    "backward_active_depth": (f"{_BASE}.BackwardHookStateManager", "follows backwards; zero after one that failed"),
    "reset_for_new_step": (f"{_BASE}.BackwardHookStateManager", "starts following backwards anew"),
    "bf16_groups": (_BF16, "the parameters of each group, as `fp32_groups_has_gradients` has them"),
    "clear_hp_grads": (_BF16, "drops the gradients in fp32"),
    "clear_lp_grads": (_BF16, "drops the gradients in bf16"),
    "fp32_groups_gradients": (_BF16, "the gradients in fp32, for their norm and the factor of a window"),
    "fp32_groups_has_gradients": (_BF16, "which parameters have a gradient"),
    "loss_scale_config": ("deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer", "the scale of fp16 at stage 0"),
    "cur_scale": ("deepspeed.runtime.fp16.loss_scaler.LossScalerBase", "by which a ZeRO optimizer divides gradients"),
    # Stage 3's parameters, and layers
    "_convert_to_deepspeed_param": (f"{_PARAMETERS}.Init", "notes a parameter's shape before it is broadcast as bytes"),
    "_zero_init_param": (f"{_PARAMETERS}.Init", "views a parameter as bytes, which needs a dimension"),
    "_in_forward": (f"{_OFFLOAD}.ZeROOrderedDict", "false again after a forward that failed"),
    "_original_parameters": (_OFFLOAD, "a layer's own dict of parameters, for an unpartitioned module"),
    "_orig_item": (_PARAMETERS, "added to parameters; removed when they are unpartitioned"),
    "_z3_optimizer": (_STAGE_3, "added to parameters; removed when they are unpartitioned"),
    "FWD_MODULE_STACK": (_OFFLOAD, "layers in a forward: those of one that failed go, models are held weakly"),
    "applied_pre_backward_ref_cnt": (_OFFLOAD, "counts down in a backward; kept for another of the same graph"),
    "ds_grads_remaining": (_OFFLOAD, "counts down in a backward; kept for another of the same graph"),
    "ds_active_sub_modules": (_PARAMETERS, "layers that still use a gathered parameter, which is not freed then"),
    "ds_id": (_PARAMETERS, "whether a parameter is partitioned"),
    "ds_numel": (_PARAMETERS, "elements of a partitioned parameter"),
    "ds_persist": (_PARAMETERS, "whether a parameter is kept gathered; each engine decides anew"),
    "ds_process_group": (_PARAMETERS, "the ranks that a parameter is partitioned over"),
    "ds_shape": (_PARAMETERS, "shape of a partitioned parameter"),
    "ds_status": (_PARAMETERS, "whether a parameter is gathered"),
    "ds_z3_leaf_module": (_OFFLOAD, "the leaf module of a parameter, for which DeepSpeed makes up zeros"),
    "is_external_param": (_PARAMETERS, "keeps a parameter gathered until the step"),
    "pre_bwd_fn": (_OFFLOAD, "an engine's function on a layer; the next engine has its own"),
    "post_bwd_fn": (_OFFLOAD, "an engine's function on a layer; the next engine has its own"),
    "get_param_coordinator": (f"{_OFFLOAD}.DeepSpeedZeRoOffload", "gives what gathers the layers' parameters"),
    "partition_all_parameters": (
        f"{_OFFLOAD}.DeepSpeedZeRoOffload",
        "releases what a failure left gathered",
    ),
    "release_backward_leftovers": (f"{_OFFLOAD}.DeepSpeedZeRoOffload", "releases what a failed backward has left"),
    "fetch_sub_module": (_COORDINATOR, "compared between ranks: which layer is gathered"),
    "is_complete_trace": (_COORDINATOR, "whether the order of the layers is recorded"),
    "_invalidate_trace": (_COORDINATOR, "lets the order be recorded anew, as where it finds another layer"),
    "reset_step": (_COORDINATOR, "off where ranks may use different layers"),
    "trace_prologue": (_COORDINATOR, "compared between ranks: whether the recorded order is left"),
    # The library
    "_loaded_ops": ("deepspeed.ops.op_builder.builder.OpBuilder", "ops that this process has: nobody builds those"),
    "_name": ("deepspeed.accelerator.cpu_accelerator.CPU_Accelerator", "the kind of device that DeepSpeed computes on"),
    # torch
    "_device_types": ("torch.distributed.ProcessGroup", "the kinds of device that a process group communicates from"),
    "_non_persistent_buffers_set": ("torch.nn.Module", "buffers that no state dict has"),
    "_opt_called": ("torch.optim.lr_scheduler", "else the schedule of a replaced optimizer warns that it never steps"),
    "_parameters": ("torch.nn.Module", "a plain dict again where stage 3 had its own"),
    "_version": ("torch.Tensor", "shows that a parameter was changed in place"),
    # Lightning
    "_after_closure": ("lightning.pytorch.plugins.precision.Precision", "calls hooks and clips before the step"),
    "_combined_loader": ("lightning.pytorch.loops.fit_loop._FitLoop", "the loaders, for their batch size"),
    "_init_config_if_needed": (_STRATEGY, "would make a config of Lightning's own"),
    "_precision_plugin": (_STRATEGY, "holds the precision, which has to be DeepSpeed's"),
    "_process_group_backend": (_STRATEGY, "given by the user, or chosen for the device"),
    "_set_deepspeed_activation_checkpointing": (_STRATEGY, "hands that section of the config to DeepSpeed"),
    "_set_node_environment_variables": (_STRATEGY, "gives DeepSpeed the nodes and ranks"),
    "_timeout": (_STRATEGY, "of collectives"),
}
"""From a name to the class or module that has it, and what it is used for."""

STAGE_3_ATTRIBUTES: dict[str, tuple[str, str]] = {
    "_coalesce_grad_reduction": (_STAGE_3, "lets a backward hold its gradients back"),
    "_optimizer_step": (_STAGE_3, "replaced to leave out parameters without a gradient"),
    "_update_scale": (_STAGE_3, "called between looking for overflows and the step: in fp32 none is left out"),
    "averaged_gradients": (_STAGE_3, "reduced gradients; dropped with the window"),
    "finalize_gradient_accumulation_boundary": (_STAGE_3, "completes the gradients of a window"),
    "ipg_buckets": (_STAGE_3, "gradients that wait to be reduced; dropped with the window"),
    "micro_step_id": (_STAGE_3, "micro-batches so far; each backward has to add to the gradients there are"),
    "norm_for_param_grads": (_STAGE_3, "norms of offloaded gradients; dropped with the window"),
    "params_already_reduced": (_STAGE_3, "what a backward has reduced; dropped with the window"),
    "reduce_ready_partitions_and_remove_grads": (_STAGE_3, "watched to note which parameters get a gradient"),
}
"""The same for names that the optimizers of stages 1 and 2 and of stage 3 both have: here, those of stage 3."""
