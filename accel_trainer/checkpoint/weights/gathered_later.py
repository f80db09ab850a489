"""Full weights of a sharded model in a background save: its shards are copied at once, and gathered by the writer.

Who writes gets placeholders, which take no memory. A thread of rank 0 asks the others for the shards of one tensor
after the other while it writes their file: training waits for a copy of its own shards, and nobody holds the whole.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from accel_trainer.checkpoint.boxes import Box
from accel_trainer.checkpoint.publication import StagedDirectory
from accel_trainer.checkpoint.safetensors_file import LazyTensor, tensor_file_bytes
from accel_trainer.checkpoint.shards import local_box, local_tensor, own_share
from accel_trainer.checkpoint.weights.weight_files import view_of
from accel_trainer.errors import RemoteRankError

_ALIGNMENT = 64
_ALL_WRITTEN, _FAILED = -1, -2


class NeedsValuesError(Exception):
    """A file would hold something else than placeholders, computed from them perhaps."""


class GatheredLater:
    """Full tensors of which every rank holds a box. Every rank makes one, and `register`s it, in the same order."""

    def __init__(self, tensors: Mapping[str, Tensor], staged: StagedDirectory, rank: int) -> None:
        """Copy this rank's share of the shards.

        Args:
            tensors: plain or DTensors, each once, by the same names on every rank; of plain ones rank 0's values count.
            staged: a background save, into which all ranks write.
        """
        assert staged.memory is not None
        self._staged, self._rank, self._names = staged, rank, list(tensors)
        self._full = {
            name: LazyTensor(t.dtype, tuple(t.shape), partial(self._gather, name)) for name, t in tensors.items()
        }
        plain = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
        own = own_share(tensors, rank, staged.ranks, plain)
        self._boxes = {name: local_box(tensors[name]) for name in own}
        self._copies = staged.memory.copy({name: local_tensor(tensors[name]) for name in own})
        self._holders: dict[str, list[tuple[int, Box]]] = {}
        self._placeholders: dict[str, Tensor] = {}
        self._files: list[tuple[str, dict[str, LazyTensor], Mapping[str, str] | None]] = []

    # --- rank 0, while it is told what to write ----------------------------------------------------------------------

    def placeholders(self) -> dict[str, Tensor]:
        """Return full tensors without values, to be written as they are, by nothing that reads them."""
        rooms = [-(-tensor_file_bytes({name: lazy}) // _ALIGNMENT) * _ALIGNMENT for name, lazy in self._full.items()]
        # Pages that nobody touches take no memory. The tensors keep the region.
        region = mmap.mmap(-1, max(sum(rooms), 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        offsets = accumulate(rooms, initial=0)
        self._placeholders = {name: view_of(region, next(offsets), lazy) for name, lazy in self._full.items()}
        return self._placeholders

    def write(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> None:
        """Note a file of placeholders, under any names.

        Raises:
            NeedsValuesError: one of the tensors is none. Nothing is written.
        """
        names = {_identity(tensor): name for name, tensor in self._placeholders.items()}
        found = {key: names.get(_identity(tensor)) for key, tensor in tensors.items()}
        if None in found.values():
            raise NeedsValuesError
        self._files.append((name, {key: self._full[name] for key, name in found.items() if name}, metadata))

    def register(self) -> None:
        """Have the save's thread gather the noted values, and write them on rank 0."""
        for name, _, _ in self._files:
            self._staged.claim(name)
        self._staged.defer(self._write_files if self._rank == 0 else self._serve)

    # --- the save's thread -------------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        boxes: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(self._boxes, boxes, dst=0, group=self._staged.group)
        self._holders = {name: [] for name in self._names}
        for rank, held in enumerate(boxes):
            for name, box in held.items():
                if box.num_elements:
                    self._holders[name].append((rank, box))
        try:
            while self._files:
                # Removed once it is written: where the disk fails here, a retry goes on with this file.
                self._staged.write_tensors_now(*self._files[0])
                del self._files[0]
        except BaseException as error:
            with suppress(RuntimeError):  # of a rank that is gone; the cause is the error that is on its way
                self._announce(_FAILED)
                dist.broadcast_object_list([f"{type(error).__name__}: {error}"], src=0, group=self._staged.group)
            raise
        self._announce(_ALL_WRITTEN)

    def _gather(self, name: str) -> Tensor:
        self._announce(self._names.index(name))
        full = torch.empty(self._full[name].shape, dtype=self._full[name].dtype)
        for rank, box in self._holders[name]:
            part = full[box.within(Box.full(full.shape))]
            if rank == 0:
                part.copy_(self._copies[name])
                continue
            values = part if part.is_contiguous() else torch.empty(box.sizes, dtype=full.dtype)
            dist.recv(_as_bytes(values), src=rank, group=self._staged.group)
            if values is not part:
                part.copy_(values)
        return full

    def _serve(self) -> None:
        """Send this rank's shards as rank 0 asks for them, until it has written all files, or failed to."""
        dist.gather_object(self._boxes, None, dst=0, group=self._staged.group)
        while (index := self._announce(0)) >= 0:
            copy = self._copies.get(self._names[index])
            if copy is not None and copy.numel():
                dist.send(_as_bytes(copy), dst=0, group=self._staged.group)
        if index == _FAILED:
            reasons = [""]
            dist.broadcast_object_list(reasons, src=0, group=self._staged.group)
            raise RemoteRankError(f"rank 0 failed to write the full weights: {reasons[0]}")

    def _announce(self, index: int) -> int:
        """Return rank 0's `index`, the place of a tensor's name or an outcome, on every rank."""
        said = torch.tensor(index)
        dist.broadcast(said, src=0, group=self._staged.group)
        return int(said.item())


def _identity(tensor: Tensor) -> Any:
    # Those without elements have no address; nothing of them is written.
    return tensor.data_ptr() if tensor.numel() else None, tensor.dtype, tuple(tensor.shape), tensor.stride()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
