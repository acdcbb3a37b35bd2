"""Private names of torch (2.13) outside of its FSDP: autograd, modules, DTensor, DCP, pytrees; one of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    CheckpointWrapper,
    OffloadWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

__all__ = [
    "ActivationWrapper",  # what is inside of a unit's wrappers is compiled where they cannot be
    "CheckpointWrapper",  # a unit that recomputes already is not wrapped again
    "OffloadWrapper",  # what moves activations to host memory is not compiled
    "ShardedTensor",  # what FSDP1 without a mesh has in sharded state dicts
    "TorchDispatchMode",  # whether an optimizer computes in half precision
    "StateDictStager",  # the way through nested states of any kind, each tensor copied to host memory
    "all_gather_single",  # its name until torch 2.12 is deprecated
    "_StoragePrefix",  # how the files of a rank begin
    "_get_current_function_mode",  # a mode of the user's own may be above ours
    "_StorageInfo",  # where a DCP folder's tensors lie: one of the few classes that its pickle may name
    "checkpoint_wrapper",  # activation checkpointing, as FSDP's own documentation has it
    "compute_local_shape_and_global_offset",  # which part of a DTensor a rank has
    "get_unwrapped",  # what a function transform was handed
    "is_functorch_wrapped_tensor",  # the same
    "peek_interpreter_stack",  # whether a function transform runs
    "is_traceable_wrapper_subclass",  # which tensors keep their values in other tensors
    "offload_wrapper",  # inputs of recomputed units in host memory, as Accelerate has it
    "reduce_scatter_single",  # the same
    "tree_leaves",  # tensors inside state dicts
    "tree_map_only",  # the same, to change them
    "unflatten_state_dict",  # what modules keep beside tensors, as it was before DCP took it apart
]

ATTRIBUTES = {
    "_attn_implementation": ("transformers.PretrainedConfig", "which attention a model computes; nothing public says"),
    "_C": ("torch", "whether a backward runs"),
    "_MEM_FORMAT_ENCODING": ("torch.distributed.checkpoint.metadata", "one of the few names of a DCP folder's pickle"),
    "_wrapped_by_lr_sched": ("torch.optim.lr_scheduler", "else schedules warn that the step is another"),
    "_apply": ("torch.nn.Module", "dtypes change in place, with ties and attributes kept"),
    "_backward_hooks": ("torch.Tensor", "users' hooks on parameters run on the unsharded ones"),
    "_post_accumulate_grad_hooks": ("torch.Tensor", "hooks that would never run are refused"),
    "_buffers": ("torch.nn.Module", "buffers and parameters are put into their places"),
    "_checkpoint_wrapped_module": (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper",
        "what is inside of a unit's wrappers is compiled where they cannot be",
    ),
    "_clip_grads_with_norm_": ("torch.nn.utils.clip_grad", "users' own clipping takes the global norm"),
    "_compiled_call_impl": ("torch.nn.Module", "whether a module is compiled"),
    "_current_graph_task_id": ("torch._C", "whether a backward runs"),
    "_disabled_torch_function_impl": ("torch._C", "a tensor of a class of ours is asked below autograd alone"),
    "_foreach_mul_": ("torch", "gradients are scaled in one call"),
    "_foreach_norm": ("torch", "norms of many gradients in one call"),
    "_get_total_norm": ("torch.nn.utils.clip_grad", "users' own clipping takes the global norm"),
    "_local_tensor": (
        "torch.distributed.tensor.DTensor",
        "optimizers step on shards; to_local() of a parameter makes a new view each time",
    ),
    "_load_state_dict_post_hooks": (
        "torch.nn.Module",
        "users' state dicts have shards, which FSDP's hooks would gather",
    ),
    "_load_state_dict_pre_hooks": (
        "torch.nn.Module",
        "users' state dicts have shards, which FSDP's hooks would gather",
    ),
    "_make_wrapper_subclass": ("torch.Tensor", "a tensor of a class of ours has no memory of its own"),
    "_modules": ("torch.nn.Module", "units are wrapped in their places"),
    "_non_persistent_buffers_set": ("torch.nn.Module", "which buffers state dicts have"),
    "_per_optimizer_states": ("torch.amp.GradScaler", "whether an optimizer's gradients are unscaled already"),
    "_save_to_state_dict": ("torch.nn.Module", "whether a module saves its weights in its own way"),
    "_spec": ("torch.distributed.tensor.DTensor", "copies of states are laid out as what they are of"),
    "_stage_untyped_storage": (
        "torch.distributed.checkpoint._state_dict_stager.StateDictStager",
        "copies of states go into memory that is kept",
    ),
    "_state_dict_hooks": ("torch.nn.Module", "whether somebody has a say in a module's state dict"),
    "_state_dict_pre_hooks": ("torch.nn.Module", "whether somebody has a say in a module's state dict"),
    "_step_supports_amp_scaling": ("torch.optim.AdamW", "a fused optimizer leaves unscaling to the scaler"),
    "_to_copy": ("torch.ops.aten", "shards can be converted"),
    "_unsafe_preserve_version_counter": ("torch.autograd", "buffers that a graph has saved are broadcast all the same"),
    "_version": ("torch.Tensor", "whether somebody has written into a tensor"),
    "_unscale_grads_": ("torch.amp.GradScaler", "gradients in host memory wait for the scale; whole ones go apart"),
}
