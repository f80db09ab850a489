"""Full tensors of a sharded model in a file instead of memory, for writers that want all of them at once."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from accel_trainer.checkpoint.commit.disk import explain_full_disk
from accel_trainer.checkpoint.format.safetensors_file import LazyTensor, tensor_file_bytes

__all__ = ["gather_to_file"]

_ALIGNMENT = 64


def gather_to_file(tensors: Mapping[str, LazyTensor], target: Path, *, writes: bool) -> dict[str, Tensor]:
    """Make every tensor once, and return all mapped from a file beside `target` that has no name and goes with them.

    One of them is in memory at a time. Collective where they gather: every rank calls it with the same names.

    Args:
        target: a directory, or where one will be.
        writes: False makes the tensors, and returns none.

    Raises:
        DiskFullError: there is no room; after the last tensor was made, so that nobody waits for it.
    """
    distinct = {id(tensor): tensor for tensor in tensors.values()}
    made = ((key, tensor()) for key, tensor in distinct.items())
    if not writes:
        deque(made, maxlen=0)
        return {}
    directory = next(each for each in (target.absolute(), *target.absolute().parents) if each.is_dir())
    offsets: dict[int, int] = {}
    need_bytes = sum(tensor_file_bytes({"": tensor}) for tensor in distinct.values())
    try:
        with (
            explain_full_disk(directory, need_bytes),
            tempfile.TemporaryFile(dir=directory, buffering=0) as file,
        ):
            for key, full in made:
                offsets[key] = _append(file, full)
                del full  # before the next one is made
            # Private: changes of the tensors reach neither the file nor anybody else. An empty file cannot be mapped.
            num_bytes = os.fstat(file.fileno()).st_size
            mapped = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY) if num_bytes else bytearray()
    except Exception:
        deque(made, maxlen=0)  # in step with other ranks; nothing where making one has failed
        raise
    found = {key: _view(mapped, offsets[key], tensor) for key, tensor in distinct.items()}
    return {name: found[id(tensor)] for name, tensor in tensors.items()}


def _append(file: IO[bytes], tensor: Tensor) -> int:
    """Write a tensor's bytes, and return their offset."""
    begin = file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
    rest = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data
    while rest:
        rest = rest[file.write(rest) :]
    return begin


def _view(mapped: mmap.mmap | bytearray, offset: int, tensor: LazyTensor) -> Tensor:
    num_bytes = tensor_file_bytes({"": tensor})
    if not num_bytes:
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
    raw = torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes, offset=offset)
    return raw.view(tensor.dtype).reshape(tuple(tensor.shape))
