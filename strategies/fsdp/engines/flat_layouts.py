"""Where in the original parameters of an FSDP1 unit this rank's range lies."""

from __future__ import annotations

import itertools
from typing import Any

from ...common.flat_shards import FlatLayout, memory_order


def layouts_of(unit: Any) -> list[FlatLayout | None]:
    """Return where in each parameter of a sharded unit this rank's range lies; None for one without elements.

    Raises:
        ValueError: If a parameter lies in memory in a way that has no ranges.
    """
    handle = unit._handle
    flat_param, mesh = handle.flat_param, unit._device_mesh
    is_hybrid = mesh is not None and mesh.ndim == 2
    replica, num_replicas = (mesh.get_coordinate()[0], mesh.size(0)) if is_hybrid else (0, 1)
    layouts: list[FlatLayout | None] = []
    ends = itertools.accumulate(flat_param._numels_with_padding)
    begins = [
        end - numel
        for end, numel, is_padding in zip(
            ends, flat_param._numels_with_padding, flat_param._is_padding_mask, strict=True
        )
        if not is_padding
    ]
    for shape, strides, info, begin in zip(
        flat_param._shapes, flat_param._strides, flat_param._shard_param_infos, begins, strict=True
    ):
        order = memory_order(shape, strides)
        if order is None:
            raise ValueError(f"A parameter with the shape {tuple(shape)} and the strides {tuple(strides)} has gaps.")
        if not shape.numel():
            layouts.append(None)
            continue
        start, count = (info.intra_param_start_idx, info.numel_in_shard) if info.in_shard else (0, 0)
        place = FlatLayout(
            shape,
            tuple(strides),
            order,
            start,
            count,
            replica,
            num_replicas,
            handle.process_group,
            unit.compute_device,
            (begin, int(flat_param._local_shard.numel())),
        )
        layouts.append(place)
    return layouts
