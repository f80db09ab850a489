"""Sending tensors: dtypes and devices that a process group carries, and the plain gather under the collectives."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from accel_trainer.errors import UnsupportedTypeError
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.tensor_trees import is_tensor
from accel_trainer.runtime.whereabouts import mark_collectives
from accel_trainer.tree import leaves, map_leaves

mark_collectives(__file__)

# torch 2.13 renamed it; the old name warns there, the new one is missing before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# What gloo carries. Other dtypes (int16, float8, uint32 ...) travel as their bytes.
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SENDABLE_DTYPES = frozenset((*_FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool))


def map_tensors(name: str, function: Callable[[Tensor], Tensor], data: Any) -> Any:
    """Apply a function to the tensors of a nesting; None stays None, and other leaves are refused."""
    return map_leaves(lambda leaf: function(leaf) if _has_tensor(name, leaf) else None, data, is_leaf=is_tensor)


def tensors_of(name: str, data: Any) -> list[Tensor]:
    """Return the tensors of a nesting; leaves that are neither tensors nor None are refused."""
    return [leaf for leaf in leaves(data, is_leaf=is_tensor) if _has_tensor(name, leaf)]


def _has_tensor(name: str, leaf: Any) -> bool:
    if isinstance(leaf, DTensor):
        raise UnsupportedTypeError(
            f"{name} got a DTensor, whose ranks hold parts of one tensor; call its full_tensor(), on every rank"
        )
    if leaf is None or isinstance(leaf, Tensor):
        return leaf is not None
    raise UnsupportedTypeError(
        f"{name} takes tensors and nestings of tensors, and got a {type(leaf).__name__}; "
        "use gather_object or broadcast_object_list for other values"
    )


def to_sendable(tensor: Tensor, process: ProcessContext) -> Tensor:
    """Return the tensor, detached, contiguous, and on a device that the process group can carry."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and process.device.type != "cpu" and not backend_takes_cpu():
        tensor = tensor.to(process.device)
    return tensor.resolve_conj().resolve_neg().contiguous()


def backend_takes_cpu() -> bool:
    """Return whether the process group takes tensors on the CPU."""
    return "cpu" in dist.get_backend_config()


def as_sendable_dtype(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor in a dtype that every backend carries."""
    return tensor if tensor.dtype in SENDABLE_DTYPES else tensor.view(-1).view(torch.uint8)


def gather_tensor(tensor: Tensor, process: ProcessContext) -> Tensor:
    """Concatenate a tensor over the ranks; a 0-d one counts as one of shape (1,). Collective, of equal shapes."""
    return gather_tensors([tensor], process)[0]


_HEADER_BYTES = 1024


def gather_agreed(tensors: Sequence[Tensor], facts: Hashable, process: ProcessContext) -> list[Tensor] | None:
    """Concatenate each tensor over the ranks, where all ranks come with the same `facts`; None on every rank otherwise.

    Collective: ranks may come with any tensors, whose shapes and devices follow from the facts. An exchange of one size
    goes before the others: where sizes differ, gloo aborts a rank that gets more than it waits for, and leaves one that
    gets less with memory that nobody wrote. Small tensors on the host travel in it, and often there is no other.
    """
    parts, free = [_digest(facts)], _HEADER_BYTES - 8
    tensors = [tensor if tensor.ndim else tensor[None] for tensor in tensors]
    places: list[tuple[int, int] | None] = []
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        is_inside = tensor.device.type == "cpu" and size <= free
        places.append((_HEADER_BYTES - free, size) if is_inside else None)
        if is_inside:
            # Not reshape(-1), which leaves a column of a matrix with its gaps: no view of bytes.
            parts.append(tensor.detach().contiguous().view(-1).view(torch.uint8))
            free -= size
    header = torch.cat([*parts, parts[0].new_empty(free)])
    headers = gather_tensors([header], process)[0].view(process.world_size, -1)
    if len(set(headers.view(torch.int64)[:, 0].tolist())) > 1:
        return None
    others = iter(gather_tensors([each for each, place in zip(tensors, places, strict=True) if place is None], process))
    return [
        next(others)
        if place is None
        else headers.narrow(1, *place)
        .reshape(-1)
        .view(tensor.dtype)
        .view(len(headers) * len(tensor), *tensor.shape[1:])
        for tensor, place in zip(tensors, places, strict=True)
    ]


@functools.lru_cache(maxsize=256)
def _digest(facts: Hashable) -> Tensor:
    """Return 8 bytes that ranks compare in the place of the facts."""
    return torch.frombuffer(bytearray(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()), dtype=torch.uint8)


def gather_tensors(tensors: Sequence[Tensor], process: ProcessContext) -> list[Tensor]:
    """Concatenate each tensor over the ranks, all of them under way at once. Collective, of equal shapes."""
    tensors = [tensor if tensor.ndim else tensor[None] for tensor in tensors]
    if not process.is_distributed:
        return tensors
    under_way = []
    for tensor in tensors:
        wire = to_sendable(tensor, process)
        out = wire.new_empty((process.world_size * wire.shape[0], *wire.shape[1:]))
        work = all_gather(as_sendable_dtype(out), as_sendable_dtype(wire), group=process.group, async_op=True)
        under_way.append((out, wire, work))
    for _, _, work in under_way:
        work.wait()
    return [
        out if out.device == tensor.device else out.to(tensor.device)
        for (out, _, _), tensor in zip(under_way, tensors, strict=True)
    ]
