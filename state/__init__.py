"""Process, accelerator and gradient state; process control, triggers and gathering. Needs torch alone."""

from .accelerator_state import AcceleratorState, reset_state
from .collectives import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_for_metrics,
    gather_object,
    pad_across_processes,
    reduce,
)
from .environment import ProcessInfo
from .gradient_state import GradientAccumulationPlugin, GradientState
from .partial_state import PartialState
from .process_record import DistributedType, InitProcessGroupKwargs
from .triggers import check_trigger, check_triggers, set_trigger, triggered_by

__all__ = [
    # the states
    "PartialState",
    "AcceleratorState",
    "GradientState",
    # what they are made with
    "DistributedType",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "ProcessInfo",
    # triggers
    "check_trigger",
    "check_triggers",
    "set_trigger",
    "triggered_by",
    # gathering
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_for_metrics",
    "gather_object",
    "pad_across_processes",
    "reduce",
    # for tests
    "reset_state",
]
