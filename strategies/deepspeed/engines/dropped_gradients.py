"""Dropping all gradients of an engine, wherever DeepSpeed keeps them, so that the next window starts from nothing.

The attributes are those of DeepSpeed 0.19.
"""

from __future__ import annotations

from typing import Any

from . import partitions


def drop_gradients(engine: Any) -> None:
    """Drop the gradients in DeepSpeed's optimizer, and what a backward that failed has left in the engine."""
    zero = engine.optimizer
    if partitions.is_stage_3(zero):
        _drop_stage_3(zero)
    elif partitions.is_partitioned_optimizer(zero):
        _drop_stages_1_2(zero)
    elif hasattr(zero, "clear_hp_grads"):
        zero.clear_hp_grads()
        zero.clear_lp_grads()
    state = getattr(zero, "_backward_hook_state", None)
    if state is not None:
        state.backward_active_depth = 0
        state.reset_for_new_step()
    engine._unmanaged_backward_count = 0


def _drop_stages_1_2(zero: Any) -> None:
    for parameter in (each for group in zero.bit16_groups for each in group):
        parameter.grad_accum = None
    for group in range(len(zero.bit16_groups)):
        zero.averaged_gradients[group] = zero.all_grad_tensors[group] = None
    for bucket in zero.ipg_buckets.values():
        bucket.clear()
    zero.extra_large_param_to_reduce.clear()
    zero.previous_reduced_grads.clear()
    zero.params_already_reduced[:] = [False] * len(zero.params_already_reduced)
    zero._release_ipg_buffers()
    zero.micro_step_id = -1
    if zero.cpu_offload:
        zero._wait_for_offload_copies()
        for gradient in zero.accumulated_grads_in_cpu.values():
            gradient.zero_()
        for master in zero.single_partition_of_fp32_groups:
            master.grad.zero_()
        zero.norm_for_param_grads = {}
        zero._offload_accumulated_param_ids = set()
        zero.local_overflow = False


def _drop_stage_3(zero: Any) -> None:
    zero.grad_partitions_flat_buffer.zero_()
    zero.averaged_gradients = {}
    for bucket in zero.ipg_buckets.values():
        bucket.clear_params()
    for parameter_id in zero.params_already_reduced:
        zero.params_already_reduced[parameter_id] = False
    zero._offload_boundary_param_ids = set()
    if zero.offload_optimizer:
        zero.norm_for_param_grads = {}
        zero.inf_or_nan_tracker.zero_()
        for master in zero.fp32_partitioned_groups_flat:
            if master.grad is not None:
                master.grad.zero_()
