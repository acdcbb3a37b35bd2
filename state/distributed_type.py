"""The kinds of distributed environment, under the names that Accelerate's users know."""

from __future__ import annotations

import enum


class DistributedType(str, enum.Enum):
    """Kind of distributed environment; a ``str`` too, so that it compares with and serialises as its name.

    ``MULTI_GPU`` is CUDA and ROCm, and any accelerator that has no member of its own. ``FSDP`` and ``DEEPSPEED`` are
    set when a strategy (or :class:`AcceleratorState` with a plugin) shards the model, on whatever device.

    Source: accelerate 1.15 ``utils/dataclasses.py`` (``DistributedType``): same members and values.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"

    @classmethod
    def of_device(cls, device_type: str) -> DistributedType:
        """Return the type that several processes on ``device_type`` devices have."""
        return cls.__members__.get(f"MULTI_{device_type.upper()}", cls.MULTI_GPU)
