"""Private names of torch's FSDP2 (2.13): the states and parameter groups behind ``fully_shard``."""

from __future__ import annotations

_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam"

ATTRIBUTES = {
    "_all_gather_result": (_GROUP, "an exception leaves a gather that nobody waits for"),
    "_comm_ctx": (_STATE, "the order of forwards, from which backward prefetches"),
    "_fsdp_param_group": (_STATE, "the parameters that a unit gathers together"),
    "_get_fsdp_state": ("torch.distributed.fsdp.FSDPModule", "the state behind a sharded module"),
    "_lazy_init": (_STATE, "a part may be called before the root ever was"),
    "_module_fqn": (_GROUP, "a unit's name, for errors"),
    "_orig_dtype": (_GROUP, "gradients that torch has not reduced have the parameters' dtype"),
    "_partial_reduce_output": (_GROUP, "hybrid sharding keeps gradients that are reduced in part"),
    "_post_forward": (_STATE, "a part called from outside goes through its unit's hooks"),
    "_post_forward_indices": (_GROUP, "forwards without a backward are no part of the prefetching order"),
    "_pre_forward": (_STATE, "a part called from outside goes through its unit's hooks"),
    "_reduce_dtype": (_GROUP, "gradients that torch has not reduced are reduced in its dtype"),
    "_training_state": (_GROUP, "an exception leaves it set"),
    "_unsharded_param": (_PARAM, "the gathered parameter, where unreduced gradients are"),
}
