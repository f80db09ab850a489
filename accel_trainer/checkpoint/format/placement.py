"""This rank's shard of a tensor, plain or DTensor: its box, its local tensor, and memory for one on the meta device."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from accel_trainer.checkpoint.format.boxes import Box, box_at
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.torch_private import dtensor_like

__all__ = [
    "is_sharded_again",
    "is_sharded_or_replicated",
    "local_box",
    "local_tensor",
    "materialize",
    "set_target_device",
    "wrap_local_like",
]

_TARGET_DEVICE = "_accel_trainer_target_device"


def is_sharded_or_replicated(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor of which each rank holds one box: each axis of its mesh shards or replicates it."""
    return isinstance(tensor, DTensor) and all(
        p.is_replicate() or type(p) is Shard or _shards_again(tensor, axis) for axis, p in enumerate(tensor.placements)
    )


def is_sharded_again(placement: Placement) -> bool:
    """Whether an axis of the mesh shards the shards of later ones, as FSDP2 those of tensor parallelism.

    torch calls it a strided shard: it counts along the full tensor.
    """
    return hasattr(placement, "split_factor")


def _shards_again(tensor: DTensor, axis: int) -> bool:
    """Whether all later axes that shard the same dimension come first, so that each rank holds one box."""
    own: Any = tensor.placements[axis]
    later = zip(tensor.placements[axis + 1 :], tensor.device_mesh.shape[axis + 1 :], strict=True)
    sizes = [size for placement, size in later if type(placement) is Shard and placement.dim == own.dim]
    return is_sharded_again(own) and own.split_factor == prod(sizes)


def local_box(tensor: Tensor) -> Box:
    """Return the box of the full tensor that this rank holds. Nothing is communicated.

    Raises:
        ConfigError: a DTensor has other placements than `Shard` and `Replicate`.
    """
    if not isinstance(tensor, DTensor):
        return Box.full(tensor.shape)
    if not is_sharded_or_replicated(tensor):
        raise ConfigError(
            f"a tensor of shape {tuple(tensor.shape)} is laid out as {tensor.placements}; expected each axis of its "
            "mesh to shard or to replicate it"
        )
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the mesh of its own tensor"
    axes = sorted(range(mesh.ndim), key=lambda axis: is_sharded_again(tensor.placements[axis]))
    dims = [getattr(tensor.placements[axis], "dim", None) for axis in axes]
    box = box_at(tensor.shape, dims, [mesh.shape[axis] for axis in axes], [coordinate[axis] for axis in axes])
    assert box.sizes == tuple(local_tensor(tensor).shape), (box, local_tensor(tensor).shape)
    return box


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of `tensor`, sharing its memory and without gradients."""
    return _values_of(_shard(tensor)).detach()


def _shard(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # to_local() records a node of autograd else, and a load calls it for each tensor
            return tensor.to_local()
    return tensor


def _values_of(tensor: Tensor) -> Tensor:
    """Return the plain tensor in a subclass that only wraps it, as of weights that torchao has gathered in fp8."""
    if type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        for each in inner:
            if type(each) is Tensor and (each.shape, each.dtype) == (tensor.shape, tensor.dtype):
                return each
    return tensor


def wrap_local_like(tensor: Tensor, local: Tensor) -> Tensor:
    """Return `local`, this rank's shard, as a DTensor with the mesh and placements of `tensor` if that is one."""
    return dtensor_like(tensor, local) if isinstance(tensor, DTensor) else local


def set_target_device(tensor: Tensor, device: torch.device) -> None:
    """Note on a meta tensor the device that `materialize` gives it memory on."""
    setattr(tensor, _TARGET_DEVICE, device)


def materialize(tensor: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
    """Give a meta tensor uninitialised memory in place: it stays the object that modules and optimizers hold.

    A DTensor gets memory for this rank's shard.

    Args:
        device: None is the one that `set_target_device` noted, then that of the mesh, then the CPU.
    """
    place = device or _default_device(tensor)
    # Like the shard and not only of its shape: it may be of a class that FSDP2 asks how it is gathered.
    shard = _shard(tensor).detach()
    filled = torch.empty_like(
        shard, dtype=dtype or tensor.dtype, device=place, memory_format=torch.contiguous_format, requires_grad=False
    )
    filled = wrap_local_like(tensor, filled)
    if isinstance(tensor, nn.Parameter):
        filled = nn.Parameter(filled, requires_grad=tensor.requires_grad)
    filled.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, filled)


def _default_device(tensor: Tensor) -> torch.device:
    target = getattr(tensor, _TARGET_DEVICE, None)
    if target is not None:
        return torch.device(target)
    if isinstance(tensor, DTensor) and tensor.device_mesh.device_type != "cpu":
        return torch.device(tensor.device_mesh.device_type, torch.get_device_module().current_device())
    return torch.device("cpu")
