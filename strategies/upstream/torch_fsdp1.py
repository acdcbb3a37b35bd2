"""Private names of torch's FSDP1 (2.13): ``FullyShardedDataParallel``, its handles and flat parameters."""

from __future__ import annotations

from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._runtime_utils import (
    _div_if_needed,
    _get_reduce_scatter_tensors,
    _lazy_init,
    _post_backward_hook,
    _post_forward,
    _post_forward_reshard,
    _pre_forward,
    _pre_forward_unshard,
    _register_pre_backward_hooks,
    _reshard,
    _root_pre_forward,
    _unshard,
)
from torch.distributed.fsdp.wrap import _Policy

__all__ = [
    "HandleTrainingState",  # units left by an exception are brought to rest
    "TrainingState",  # the same
    "_Policy",  # what users' wrap policies may derive from
    "_div_if_needed",  # gradients that torch has not reduced are reduced as it does
    "_get_reduce_scatter_tensors",  # the same
    "_lazy_init",  # a part may be called before the root ever was
    "_post_backward_hook",  # a second backward of a graph needs the hook again
    "_post_forward",  # a part called from outside goes through its unit's hooks
    "_post_forward_reshard",  # the same
    "_pre_forward",  # the same
    "_pre_forward_unshard",  # the same
    "_register_pre_backward_hooks",  # the same
    "_reshard",  # parameters are sharded between steps
    "_root_pre_forward",  # a part called from outside goes through its root's hooks
    "_unshard",  # what hooks before a backward have resharded is gathered again
]

_UNIT = "torch.distributed.fsdp.FullyShardedDataParallel"
_HANDLE = "torch.distributed.fsdp._flat_param.FlatParamHandle"
_FLAT = "torch.distributed.fsdp._flat_param.FlatParameter"
_STATE = "torch.distributed.fsdp._common_utils._FSDPState"
_INIT = "torch.distributed.fsdp._init_utils"
_RUNTIME = "torch.distributed.fsdp._runtime_utils"

ATTRIBUTES = {
    "_all_gather_flat_param": (_HANDLE, "ranks compare what they are about to gather"),
    "_buffer_name_to_orig_dtype": (_INIT, "buffers are saved in the dtype that they had"),
    "_buffer_names": (_INIT, "buffers are saved in the dtype that they had"),
    "_device_handle": (_STATE, "the stream that computes waits for what is gathered before a backward"),
    "_exec_order_data": (_STATE, "forwards without a backward are no part of the prefetching order"),
    "_fqns": (_FLAT, "names of the original parameters in a flat one"),
    "_fsdp_wrapped_module": (_UNIT, "the module itself"),
    "_fully_sharded_module": (_HANDLE, "the module whose parameters a handle has, for errors"),
    "_get_unflat_views": (_HANDLE, "pieces of a full gradient or state, one for each original parameter"),
    "_gradient_postdivide_factor": (_STATE, "gradients are averaged as torch averages them"),
    "_gradient_predivide_factor": (_STATE, "gradients are averaged as torch averages them"),
    "_handle": (_STATE, "a unit's flat parameter, and what gathers it"),
    "_ignored_buffer_names": (_STATE, "buffers are saved in the dtype that they had"),
    "_inter_node_pg": (_INIT, "hybrid sharding reduces over the copies, too"),
    "_is_padding_mask": (_FLAT, "where in a flat parameter the original ones begin"),
    "_is_root": (_STATE, "only a root ends its backward"),
    "_local_shard": (_FLAT, "this rank's part, whatever the parameter shows now"),
    "_mixed_precision_enabled_for_buffers": (_UNIT, "buffers are saved in the dtype that they had"),
    "_needs_pre_backward_unshard": (_HANDLE, "a second backward of a graph gathers again"),
    "_numels_with_padding": (_FLAT, "where in a flat parameter the original ones begin"),
    "_param_extensions": (_FLAT, "what has shards of its own inside is saved in torch's way"),
    "_param_infos": (_FLAT, "which module has which original parameter"),
    "_params": (_FLAT, "the original parameters, where users see them"),
    "_post_backward_callback_queued": (_RUNTIME, "an exception in backward leaves it set"),
    "_post_backward_called": (_FLAT, "an exception in backward leaves it set"),
    "_post_backward_hook_state": (_FLAT, "whether a unit waits for the backward of a forward"),
    "_post_forward_index": (_HANDLE, "forwards without a backward are no part of the prefetching order"),
    "_prefetched": (_HANDLE, "an exception leaves it set"),
    "_ran_pre_backward_hook": (_RUNTIME, "an exception leaves it set"),
    "_reduce_dtype": (_HANDLE, "gradients that torch has not reduced are reduced in its dtype"),
    "_reset_flat_param_grad_info_if_needed": (_HANDLE, "parameters may be frozen between forward and backward"),
    "_saved_grad_shard": (_FLAT, "where torch keeps the gradients of earlier reductions"),
    "_shard_param_infos": (_FLAT, "where an original parameter lies in this rank's part"),
    "_shared_param_infos": (_FLAT, "tied parameters"),
    "_skip_writeback_check": (_HANDLE, "whether torch looks at what users put in a parameter's place"),
    "_skipped_use_sharded_views": (_HANDLE, "whether torch still shows parameters that were gathered"),
    "_strides": (_FLAT, "how the original parameters lie in a flat one"),
    "_training_state": (_HANDLE, "an exception leaves it set"),
    "_pre_unshard_stream": (_RUNTIME, "what hooks before a backward have resharded is gathered again"),
    "_unpadded_unsharded_size": (_FLAT, "size of the full flat parameter"),
    "_unshard_stream": (_RUNTIME, "what hooks before a backward have resharded is gathered again"),
    "_use_orig_params": (_HANDLE, "whether users see flat parameters"),
    "_use_sharded_flat_param": (_HANDLE, "what stands in for flat parameters between steps"),
    "_use_sharded_views": (_HANDLE, "lets modules have parameters again where no backward did"),
    "_use_unsharded_flat_param": (_HANDLE, "what stands in for flat parameters between steps"),
    "_use_sharded_grad_views": (_HANDLE, "every rank has a gradient of a parameter, or none has"),
    "_use_unsharded_views": (_HANDLE, "which parameters a backward reaches"),
    "_writeback_orig_params": (_HANDLE, "what users put in a parameter's place is saved"),
    "_HYBRID_SHARD_ZERO2": ("torch.distributed.fsdp.ShardingStrategy", "Accelerate's HYBRID_SHARD_ZERO2"),
    "_run_policy": ("torch.distributed.fsdp.wrap._Policy", "policies that are objects"),
}
