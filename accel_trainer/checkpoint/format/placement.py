"""This rank's shard of a tensor, plain or DTensor: its box, its local tensor, and memory for one on the meta device."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from accel_trainer.checkpoint.format.boxes import Box, box_at
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.torch_private import dtensor_like

__all__ = [
    "is_sharded_or_replicated",
    "local_box",
    "local_tensor",
    "materialize",
    "set_target_device",
    "wrap_local_like",
]

_TARGET_DEVICE = "_accel_trainer_target_device"


def is_sharded_or_replicated(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor that each axis of its mesh shards evenly or replicates."""
    return isinstance(tensor, DTensor) and all(p.is_replicate() or type(p) is Shard for p in tensor.placements)


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
    dims = [placement.dim if isinstance(placement, Shard) else None for placement in tensor.placements]
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the mesh of its own tensor"
    box = box_at(tensor.shape, dims, tensor.device_mesh.shape, coordinate)
    assert box.sizes == tuple(local_tensor(tensor).shape), (box, local_tensor(tensor).shape)
    return box


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of `tensor`, sharing its memory and without gradients."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # to_local() records a node of autograd else, and a load calls it for each tensor
            tensor = tensor.to_local()
    return tensor.detach()


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
    local = local_tensor(tensor)
    filled = torch.empty(local.shape, dtype=dtype or tensor.dtype, device=device or _default_device(tensor))
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
