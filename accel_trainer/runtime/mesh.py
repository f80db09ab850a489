"""Device meshes: which ranks hold replicas and which hold shards."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel_trainer.errors import ConfigError
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.torch_private import group_timeout, set_group_timeout

__all__ = ["build_mesh_shape", "init_mesh"]


def build_mesh_shape(world_size: int, replicate_size: int) -> tuple[int, ...]:
    """Return `(world_size,)`, or `(replicas, shards)` when the job keeps several replicas of the sharded model.

    Raises:
        ConfigError: the world size is not a multiple of the number of replicas.
    """
    if replicate_size == 1:
        return (world_size,)
    if world_size % replicate_size or replicate_size == world_size:
        raise ConfigError(
            f"fsdp.replicate_size={replicate_size} does not fit {world_size} processes: it must divide the world size "
            "and leave at least 2 shards per replica; use 1 for one sharded copy, or strategy 'ddp' for replicas only"
        )
    return (replicate_size, world_size // replicate_size)


def init_mesh(process: ProcessContext, shape: tuple[int, ...]) -> DeviceMesh:
    """Create the mesh, with axes `shard` or `replicate` x `shard`, whose collectives wait as long as the job's own.

    Collective: every rank calls it with the same shape.
    """
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    mesh = init_device_mesh(process.device.type, shape, mesh_dim_names=names)
    for axis in names:
        group = mesh.get_group(axis)
        # new_group() inside init_device_mesh falls back to the backend's default of 10 or 30 minutes. An axis over all
        # ranks is the job's own group, which has its timeout.
        if group is not dist.group.WORLD:
            set_group_timeout(group, group_timeout().total_seconds())
    return mesh
