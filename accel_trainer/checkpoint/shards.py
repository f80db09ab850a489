"""Tensors in a checkpoint by name, in parts: each rank writes what it alone holds, and reads what it needs.

    PREFIX.RRRRR.safetensors      rank R's parts; the manifest says where each lies in its whole tensor

What several ranks hold alike is shared out over them by bytes. Nothing is communicated, in either direction.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accel_trainer.checkpoint.commit.staging import StagedDirectory
from accel_trainer.checkpoint.format.boxes import Box, Read, balance_bytes, plan_reads
from accel_trainer.checkpoint.format.placement import local_box, local_tensor, materialize
from accel_trainer.checkpoint.format.safetensors_file import SafetensorsFile, TensorReader, dtype_of
from accel_trainer.checkpoint.reader import StoredCheckpoint
from accel_trainer.errors import CorruptCheckpointError

__all__ = ["StoredShards", "StoredTensor", "own_share", "write_shards"]

_MAX_OPEN_FILES = 64


def write_shards(staged: StagedDirectory, prefix: str, tensors: Mapping[str, Tensor], rank: int) -> None:
    """Write this rank's part of `tensors`, whole or laid out over a mesh. Every rank calls it with the same names.

    Raises:
        ConfigError: a DTensor is neither sharded nor replicated, or a dtype is unknown to the format.
    """
    own = own_share(tensors, rank, staged.ranks)
    locals_, slices = {}, {}
    for name in own:
        box = local_box(tensors[name])
        locals_[name] = local_tensor(tensors[name])
        if box != Box.full(tensors[name].shape):
            slices[name] = (tuple(tensors[name].shape), box.offsets)
    if locals_:
        staged.write_tensors(f"{prefix}.{rank:05d}.safetensors", locals_, slices=slices)


def own_share(tensors: Mapping[str, Tensor], rank: int, ranks: Sequence[int]) -> list[str]:
    """Return the tensors of which this rank writes its part: one of those that hold the same part does."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in tensors.items():
        # A rank for which nothing is left of a tensor has nothing to write.
        if local_tensor(tensor).numel() or not tensor.numel():
            groups.setdefault(_holders(tensor, ranks), []).append(name)
    own = []
    for holders, names in groups.items():
        takers = balance_bytes([local_tensor(tensors[name]).nbytes for name in names], len(holders))
        own += [name for name, taker in zip(names, takers, strict=True) if holders[taker] == rank]
    return own


def _holders(tensor: Tensor, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return those of `ranks` that hold the same part of `tensor` as this one."""
    if not isinstance(tensor, DTensor):
        return tuple(ranks)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    index = tuple(
        slice(None) if placement.is_replicate() else position
        for placement, position in zip(tensor.placements, coordinate, strict=True)
    )
    return tuple(holder for holder in tensor.device_mesh.mesh[index].flatten().tolist() if holder in ranks)


@dataclass
class _TensorShards:
    dtype: torch.dtype
    shape: tuple[int, ...]
    files: list[str] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)


class StoredShards(TensorReader):
    """The tensors that `write_shards` wrote, on however many ranks, by name."""

    def __init__(self, stored: StoredCheckpoint, prefix: str) -> None:
        """Find the parts in the manifest; no file is opened.

        Raises:
            CorruptCheckpointError: parts of one tensor do not agree on what it is.
        """
        self._stored = stored
        self._tensors: dict[str, _TensorShards] = {}
        self._opened: OrderedDict[str, SafetensorsFile] = OrderedDict()
        pattern = re.compile(re.escape(prefix) + r"\.\d+\.safetensors")
        for file, entries in sorted(stored.manifest.tensors.items()):
            if not pattern.fullmatch(file):
                continue
            for name, entry in entries.items():
                dtype = dtype_of(entry.dtype)
                known = self._tensors.setdefault(name, _TensorShards(dtype, entry.shape))
                whole = Box.full(entry.shape)
                box = whole if entry.offsets is None else Box(entry.offsets, entry.sizes or ())
                if (known.dtype, known.shape) != (dtype, entry.shape) or not box.fits(entry.shape):
                    raise CorruptCheckpointError(
                        f"{stored.path.absolute()}: {file} holds {box} of {name!r} as {entry.dtype} {entry.shape}, and "
                        f"another file has it as {known.dtype} {known.shape}; load another checkpoint"
                    )
                known.files.append(file)
                known.boxes.append(box)

    def __getitem__(self, name: str) -> Tensor:
        full = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.read_box(name, Box.full(full.shape), full)
        return full

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a full tensor, from the manifest."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a tensor was saved in."""
        return self._tensors[name].dtype

    def plan(self, name: str, box: Box) -> list[Read]:
        """Return which parts fill `box` of a tensor.

        Raises:
            CorruptCheckpointError: not all of it was saved.
        """
        tensor = self._tensors[name]
        reads = plan_reads(box, tensor.boxes)
        if reads is None:
            raise CorruptCheckpointError(
                f"{self._stored.path.absolute()} does not hold all of {name!r}: {len(tensor.boxes)} part(s) leave gaps "
                f"in {box} of {tensor.shape}. Were nodes saved to disks of their own? Then load with as many of them"
            )
        return reads

    def files_for(self, name: str, box: Box) -> set[str]:
        """Return the files that `read` will open."""
        return {self._tensors[name].files[read.shard] for read in self.plan(name, box)}

    def read(self, name: str, target: Tensor) -> None:
        """Fill `target`, whole or laid out over a mesh, with what this rank holds of it. On meta, it gets its memory.

        Raises:
            CorruptCheckpointError: a file does not hold what the manifest says.
        """
        if target.is_meta:
            materialize(target)
        self.read_box(name, local_box(target), local_tensor(target))

    def read_box(self, name: str, box: Box, target: Tensor) -> None:
        """Fill a plain tensor of the shape of `box` with that part of a stored one; see `read` for the errors."""
        for part, source, place in self.plan(name, box):
            file = self._tensors[name].files[part]
            opened = self._open(file)
            if name not in opened:
                raise CorruptCheckpointError(f"{(self._stored.path / file).absolute()} lacks {name!r}; load another")
            # Copied from the mapping by all threads of torch: twice as fast as `fill` into pages that are there.
            target[place].copy_(opened.slice(name, source))

    def _open(self, file: str) -> SafetensorsFile:
        if file not in self._opened:
            self._opened[file] = self._stored.tensors(file)
            if len(self._opened) > _MAX_OPEN_FILES:
                self._opened.popitem(last=False)
        self._opened.move_to_end(file)
        return self._opened[file]


class StoredTensor:
    """One of the tensors in `StoredShards`, where it stands in a state that was decoded; of it, parts are read."""

    def __init__(self, parts: StoredShards, name: str) -> None:
        self._parts = parts
        self._name = name

    def read(self, box: Box) -> Tensor:
        """Return a part; see `StoredShards.read` for the errors."""
        part = torch.empty(box.sizes, dtype=self._parts.dtype(self._name))
        self._parts.read_box(self._name, box, part)
        return part
