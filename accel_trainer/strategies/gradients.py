"""Norms and clipping of gradients, plain and sharded ones mixed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from accel_trainer.runtime.torch_private import foreach_clamp_max_, foreach_clamp_min_, foreach_mul_, foreach_norm

__all__ = ["choose_samples", "clip_grad_norm", "clip_grad_value", "gradients_of", "sample_sum", "scale_gradients"]

_NUM_SAMPLES = 4
_SMALL = 1 << 14
"""Elements of a parameter whose gradient is summed in microseconds."""


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of the parameters that have one; a tied parameter counts once."""
    seen: set[int] = set()
    gradients = []
    for parameter in parameters:
        if parameter.grad is not None and id(parameter) not in seen:
            seen.add(id(parameter))
            gradients.append(parameter.grad)
    return gradients


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _group_norm(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Norm over gradients that live on one mesh, or on none. Collective over the mesh."""
    first = gradients[0]
    if isinstance(first, DTensor) and norm_type == float("inf"):
        return _sharded_maximum(gradients, first.device_mesh)
    if _is_one_kind(gradients):
        return torch.linalg.vector_norm(torch.stack(foreach_norm(gradients, norm_type)), norm_type)
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _is_one_kind(gradients: list[Tensor]) -> bool:
    """Whether `torch.nn.utils.get_total_norm` would compute their norms by one kernel, which does not need its grouping.

    Grouping takes as long as the kernel of a small model: 14 us against 7 for four gradients on a CPU.
    """
    device, dtype = gradients[0].device, gradients[0].dtype
    if device.type not in ("cpu", "cuda"):
        return False
    for gradient in gradients:
        if type(gradient) is not Tensor or gradient.requires_grad:
            return False
        if gradient.dtype != dtype or gradient.device != device:
            return False
    return True


def _sharded_maximum(gradients: list[Tensor], mesh: DeviceMesh) -> Tensor:
    """Largest absolute value over gradients on `mesh`. Collective.

    torch refuses the maximum of nothing, and a rank's shard of a parameter with fewer rows than ranks is empty.
    """
    shards = [_local(gradient) for gradient in gradients]
    largest = torch.stack(
        [s.abs().amax().float() if s.numel() else s.new_zeros((), dtype=torch.float32) for s in shards]
    ).amax()
    for axis in range(mesh.ndim):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    return largest


def total_norm(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients as one vector: scalar, fp32 or the gradients' dtype.

    Collective over the meshes of sharded gradients. Plain gradients are the same on every rank and count once.
    """
    groups: dict[object, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        groups[gradient.device_mesh if isinstance(gradient, DTensor) else None].append(gradient)
    if len(groups) == 1:
        return _group_norm(gradients, norm_type)
    norms = [_group_norm(group, norm_type) for group in groups.values()]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients so that their global norm is at most `max_norm`; return the norm before that.

    Collective over the meshes of sharded parameters. `max_norm=inf` only computes. As torch's own: the factor is
    `max_norm / (norm + 1e-6)`, at most 1, applied without waiting for the device.
    """
    gradients = gradients_of(parameters)
    if not gradients:
        return torch.tensor(0.0)
    norm = total_norm(gradients, float(norm_type))  # torch takes "inf", too
    if max_norm != float("inf"):
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        _multiply(gradients, factor)
    return norm


def choose_samples(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return a few small parameters, from the first to the last, of which each rank holds as much as the others.

    The choice is the same on all ranks. A NaN that comes up in a backward is in the gradients of what lies before it,
    and one in the loss in all: the first and the last are among the small ones.
    """
    even = [p for p in parameters if p.requires_grad and p.numel() and _is_even(p)]
    small = [p for p in even if p.numel() <= _SMALL] or sorted(even, key=torch.numel)[:1]
    last = len(small) - 1
    places = {last * index // (_NUM_SAMPLES - 1) for index in range(_NUM_SAMPLES)} if small else ()
    return [small[place] for place in sorted(places)]


def _is_even(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return True
    mesh, placements = parameter.device_mesh, parameter.placements
    shards = prod(mesh.size(axis) for axis, placement in enumerate(placements) if not placement.is_replicate())
    return parameter.to_local().numel() * shards == parameter.numel()


def sample_sum(samples: Iterable[Tensor]) -> Tensor | None:
    """Return the sum of this rank's gradients of some parameters, NaN or infinite if one is; None without any."""
    sums = [_local(parameter.grad).sum() for parameter in samples if parameter.grad is not None]
    return sum((each.to(sums[0].device) for each in sums[1:]), sums[0]) if sums else None


def clip_grad_value(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clamp every gradient element to [-clip_value, clip_value]. Local to each rank: a shard is clamped where it is."""
    gradients = [_local(gradient) for gradient in gradients_of(parameters)]
    if gradients:
        foreach_clamp_min_(gradients, -clip_value)
        foreach_clamp_max_(gradients, clip_value)


def scale_gradients(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply all gradients by `factor`: a number, or a scalar on any device."""
    _multiply(gradients_of(parameters), factor)


def _multiply(gradients: list[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients by a number, or by a scalar, which is copied to each device that has some of them."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in gradients:  # a call for each would show: most are plain tensors, on every update
        by_device[gradient.device].append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    for device, group in by_device.items():
        foreach_mul_(group, factor.to(device) if isinstance(factor, Tensor) else factor)
