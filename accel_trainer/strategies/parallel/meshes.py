"""Meshes of a job's ranks: the axes along which they hold replicas and shards, and compute a batch together."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel_trainer.config import Resolved
from accel_trainer.config.parallel import AxisSizes, axis_sizes
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.rank_loss import noting_connections
from accel_trainer.runtime.torch_private import flatten_mesh, group_timeout, set_group_timeout, unflatten_mesh
from accel_trainer.strategies.api import TrainJob


class Meshes:
    """The meshes of a job's models, each created once: one optimizer may hold the parameters of several models."""

    def __init__(self) -> None:
        # Weak: models keep their mesh, and groups have to close with the last of them.
        self._by_shape: weakref.WeakValueDictionary[tuple[int, ...], DeviceMesh] = weakref.WeakValueDictionary()
        self._axes: DeviceMesh | None = None
        """Replicas, shards and parts of layers, where some ranks read the same data."""
        self._shared: dict[str, DeviceMesh] = {}
        """The axes, of more than one rank, along which ranks compute a batch together."""

    def readers(self, resolved: Resolved, process: ProcessContext) -> ProcessContext:
        """Return this process among the ranks along the dp axes. Collective: a mesh with other axes is created."""
        sizes = axis_sizes(resolved.config, resolved.describe, process.world_size, process.num_nodes)
        if sizes.num_readers == process.world_size:
            return process
        # Ranks of one sequence hold different shards: they see different tokens, as readers see different samples.
        self._axes = axes = init_mesh(process.device.type, (sizes.dp_replicate, sizes.num_shards, sizes.tp))
        readers = axes["replicate", "shard"]
        if sizes.tp > 1:
            flatten_mesh(axes["shard", "tp"], "shard_tp")  # norms are then reduced at once
            self._shared["tp"] = axes["tp"]
        if sizes.sequence > 1:
            name = resolved.config.parallel.sequence_axis
            cut = _wait_as_long(unflatten_mesh(axes, "shard", (sizes.dp_shard, sizes.sequence), ("dp_shard", name)))
            self._shared[name], readers = cut[name], cut["replicate", "dp_shard"]
        return process.among(flatten_mesh(readers, "dp").get_group())

    def axis(self, name: str) -> DeviceMesh | None:
        """Return an axis along which ranks compute a batch together; None where it has one rank."""
        return self._shared.get(name)

    def shards(self, process: ProcessContext, job: TrainJob) -> DeviceMesh:
        """Return the axes of replicas, if there are several, and of shards. Collective for a new mesh."""
        sizes = sizes_of(job, process)
        if self._axes is not None:
            return self._axes["replicate", "shard"] if sizes.dp_replicate > 1 else self._axes["shard"]
        shape = (sizes.num_shards,) if sizes.dp_replicate == 1 else (sizes.dp_replicate, sizes.num_shards)
        known = self._by_shape.get(shape)
        return known or self._by_shape.setdefault(shape, init_mesh(process.device.type, shape))

    def experts(self, process: ProcessContext, job: TrainJob) -> DeviceMesh:
        """Return the mesh with the axis of shards cut in two, by ranks of the same experts. Collective when new."""
        sizes, ep_size = sizes_of(job, process), job.config.parallel.ep_size
        shape = (sizes.dp_replicate, sizes.num_shards // ep_size, ep_size)
        axes = self._by_shape.get(shape)
        if axes is None:
            axes = unflatten_mesh(self.shards(process, job), "shard", shape[1:], ("ep_shard", "ep"))
            axes = self._by_shape.setdefault(shape, _wait_as_long(axes))
            flatten_mesh(axes["ep_shard", "ep"], "ep_shard_ep")  # norms are then reduced at once
        return axes


def sizes_of(job: TrainJob, process: ProcessContext) -> AxisSizes:
    """Return the size of each axis of the job's mesh."""
    return axis_sizes(job.config, job.resolved.describe, process.world_size, process.num_nodes)


def init_mesh(device_type: str, shape: tuple[int, ...]) -> DeviceMesh:
    """Create a mesh of shards, of replicas of them, or of both and parts of layers. Collective."""
    names = {1: ("shard",), 2: ("replicate", "shard"), 3: ("replicate", "shard", "tp")}[len(shape)]
    with noting_connections(adds=True):
        return _wait_as_long(init_device_mesh(device_type, shape, mesh_dim_names=names))


def _wait_as_long(mesh: DeviceMesh) -> DeviceMesh:
    """Give the groups of a new mesh the timeout of the job's own, and return it."""
    for axis in mesh.mesh_dim_names or ():
        group = mesh.get_group(axis)
        # new_group() inside init_device_mesh falls back to the backend's default of 10 or 30 minutes. An axis over all
        # ranks is the job's own group, which has its timeout.
        if group is not dist.group.WORLD:
            set_group_timeout(group, group_timeout().total_seconds())
    return mesh
