"""The mesh over all ranks that a model is sharded on."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def build_mesh(given: tuple[int, int] | DeviceMesh | None, world_size: int, device_type: str) -> DeviceMesh:
    """Return the mesh ``("shard",)``, or ``("replicate", "shard")`` for hybrid sharding.

    Args:
        given: What the user asked for: the two sizes, a mesh of two dimensions, or None to shard over every rank.
        world_size: Number of ranks.
        device_type: Such as ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: If ``given`` has not two dimensions, or they do not multiply to ``world_size``.
    """
    if given is None:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    shape = tuple(given.shape) if isinstance(given, DeviceMesh) else tuple(given)
    if len(shape) != 2 or shape[0] * shape[1] != world_size:
        raise ValueError(
            f"device_mesh={given} must be (replicate, shard) with replicate * shard = {world_size}, the number of "
            "processes."
        )
    if isinstance(given, DeviceMesh):
        return given
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
