"""Sharded tensors in a checkpoint, by name: each rank writes shards that it holds, and reads the boxes that it needs.

    PREFIX.RRRRR.safetensors      shards of rank R; the manifest has the box of each in its full tensor
    PREFIX.replica_R.RRRRR.safetensors    all tensors of rank R, where every rank has values of its own

Of replicas each is written by one of their ranks, balanced by bytes. Nothing is communicated, in either direction.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from accel_trainer.checkpoint.boxes import Box, Index, Read, balance_bytes, box_at, plan_reads
from accel_trainer.checkpoint.manifest import TensorEntry
from accel_trainer.checkpoint.publication import StagedDirectory
from accel_trainer.checkpoint.reader import StoredCheckpoint
from accel_trainer.checkpoint.safetensors_file import TensorReader, copy_stored, dtype_of
from accel_trainer.errors import ConfigError, CorruptCheckpointError, IncompatibleCheckpointError
from accel_trainer.runtime.torch_private import dtensor_like, swap_values

_TARGET_DEVICE = "_accel_trainer_target_device"


def is_sharded_or_replicated(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor of which each rank holds one box: each axis of its mesh shards or replicates it."""
    return isinstance(tensor, DTensor) and all(
        p.is_replicate() or type(p) is Shard or _shards_again(tensor, axis) for axis, p in enumerate(tensor.placements)
    )


def is_sharded_again(placement: Placement) -> bool:
    """Whether an axis of the mesh shards the shards of later ones, as FSDP2 those of tensor parallelism."""
    # torch calls it a strided shard: it counts along the full tensor.
    return hasattr(placement, "split_factor")


def _shards_again(tensor: DTensor, axis: int) -> bool:
    """Whether all later axes that shard the same dimension come first, so that each rank holds one box."""
    own: Any = tensor.placements[axis]
    later = zip(tensor.placements[axis + 1 :], tensor.device_mesh.shape[axis + 1 :], strict=True)
    sizes = [size for placement, size in later if type(placement) is Shard and placement.dim == own.dim]
    return is_sharded_again(own) and own.split_factor == prod(sizes)


def local_box(tensor: Tensor) -> Box:
    """Return the box of the full tensor that this rank holds. Nothing is communicated."""
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
    # A strided shard is cut by later axes first: FSDP2 shards what tensor parallelism has left.
    axes = sorted(range(mesh.ndim), key=lambda axis: is_sharded_again(tensor.placements[axis]))
    dims = [getattr(tensor.placements[axis], "dim", None) for axis in axes]
    box = box_at(tensor.shape, dims, [mesh.shape[axis] for axis in axes], [coordinate[axis] for axis in axes])
    assert box.sizes == tuple(local_tensor(tensor).shape), (box, local_tensor(tensor).shape)
    return box


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of `tensor`, which shares its memory and has no gradients."""
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

    A DTensor gets memory for this rank's shard, on the device of its mesh; others on the CPU, unless `device` or
    `set_target_device` say otherwise.
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
    # What strategies and PEFT have noted on the parameter stays with it.
    filled.__dict__.update(tensor.__dict__)
    # Swapped, not assigned: modules, optimizers and tied names all hold this object.
    if weakref.getweakrefs(tensor) and not isinstance(tensor, DTensor):
        # torch's function refuses these, which an LSTM keeps to its weights: they mean the object, which stays.
        swap_values(tensor, filled)
    else:
        torch.utils.swap_tensors(tensor, filled)


def _default_device(tensor: Tensor) -> torch.device:
    target = getattr(tensor, _TARGET_DEVICE, None)
    if target is not None:
        return torch.device(target)
    if isinstance(tensor, DTensor) and tensor.device_mesh.device_type != "cpu":
        return torch.device(tensor.device_mesh.device_type, torch.get_device_module().current_device())
    return torch.device("cpu")


_MAX_OPEN_FILES = 64  # of the 1,024 that a process may have by default; shards of one tensor lie in few files


def write_shards(
    staged: StagedDirectory,
    prefix: str,
    tensors: Mapping[str, Tensor],
    rank: int,
    ranks: Sequence[int] | None = None,
    of_first_rank: Collection[str] = (),
) -> None:
    """Write this rank's share of `tensors`, plain or DTensors. Every rank calls it with the same names.

    Args:
        ranks: those that write the tensors together; all that write into the directory by default.
        of_first_rank: tensors of which the first of `ranks` writes its values: others may hold other ones.
    """
    own = own_share(tensors, rank, staged.ranks if ranks is None else ranks, of_first_rank)
    locals_, slices = {}, {}
    for name in own:
        box = local_box(tensors[name])
        locals_[name] = local_tensor(tensors[name])
        if box != Box.full(tensors[name].shape):
            slices[name] = (tuple(tensors[name].shape), box.offsets)
    if locals_:
        staged.write_tensors(f"{prefix}.{rank:05d}.safetensors", locals_, slices=slices)


def own_share(
    tensors: Mapping[str, Tensor], rank: int, ranks: Sequence[int], of_first_rank: Collection[str] = ()
) -> list[str]:
    """Return the tensors of which this rank writes its shard: of ranks with the same shard, one does."""
    groups: dict[tuple[int, ...], list[str]] = {}
    holders_of: dict[Any, tuple[int, ...]] = {}  # few layouts, and torch makes a tensor of all ranks for each question
    for name, tensor in tensors.items():
        # A rank whose shard is empty has nothing to write.
        if local_tensor(tensor).numel() or not tensor.numel():
            layout = (id(tensor.device_mesh), _replicated_axes(tensor)) if isinstance(tensor, DTensor) else None
            holders = holders_of.get(layout) or holders_of.setdefault(layout, _holders(tensor, ranks))
            groups.setdefault(holders[:1] if name in of_first_rank else holders, []).append(name)
    own = []
    for holders, names in groups.items():
        # Computed by every holder from the same names and sizes: the same answer without a message.
        takers = balance_bytes([local_tensor(tensors[name]).nbytes for name in names], len(holders))
        own += [name for name, taker in zip(names, takers, strict=True) if holders[taker] == rank]
    return own


def _replicated_axes(tensor: DTensor) -> tuple[bool, ...]:
    return tuple(placement.is_replicate() for placement in tensor.placements)


def _holders(tensor: Tensor, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return those of `ranks` that hold the same shard of `tensor` as this one."""
    if not isinstance(tensor, DTensor):
        return tuple(ranks)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    index = tuple(
        slice(None) if is_replicated else position
        for is_replicated, position in zip(_replicated_axes(tensor), coordinate, strict=True)
    )
    return tuple(holder for holder in tensor.device_mesh.mesh[index].flatten().tolist() if holder in ranks)


@dataclass
class TensorShards:
    """A stored tensor: the boxes of its shards, and for each the place where it is stored."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: list[Box] = field(default_factory=list)
    places: list[Any] = field(default_factory=list)


class ShardedTensors(TensorReader):
    """Stored tensors by name, any box of which is put together from shards; CorruptCheckpointError where some lack."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorShards] = {}

    def read_shard(self, name: str, shard: int, index: Index) -> Tensor:
        """Return a slice of one stored shard."""
        raise NotImplementedError

    def __getitem__(self, name: str) -> Tensor:
        return self.read_box(name, Box.full(self.shape(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a full tensor, from the metadata."""
        return self.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a tensor was saved in, from the metadata."""
        return self.tensors[name].dtype

    def files_for(self, name: str, box: Box) -> set[str]:
        """Return the files to verify before a box is read; none where there are no checksums."""
        return set()

    def plan(self, name: str, box: Box) -> list[Read]:
        """Return the reads that fill `box` of a tensor."""
        tensor = self.tensors[name]
        reads = plan_reads(box, tensor.boxes)
        if reads is None:
            raise CorruptCheckpointError(
                f"{self.path.absolute()} does not hold all of {name!r}: {len(tensor.boxes)} shard(s) leave gaps in "
                f"{box} of {tensor.shape}. Were nodes saved to disks of their own? Then load with as many of them"
            )
        return reads

    def read(self, name: str, target: Tensor) -> None:
        """Fill `target`, plain or a DTensor, with its box of a tensor. On the meta device, it gets its memory."""
        if target.is_meta:
            materialize(target)
        self.fill_box(name, local_box(target), local_tensor(target))

    def read_box(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor."""
        values = torch.empty(box.sizes, dtype=self.dtype(name))
        self.fill_box(name, box, values)
        return values

    def fill_box(self, name: str, box: Box, target: Tensor) -> None:
        """Fill a plain tensor of the shape of `box` with that box of a stored one."""
        for shard, source, place in self.plan(name, box):
            # From the mapped file by all threads of torch: twice as fast as reading into pages that are there.
            copy_stored(self.read_shard(name, shard, source), target[place])


class StoredShards(ShardedTensors):
    """The tensors that `write_shards` wrote, on however many ranks, by name."""

    def __init__(self, stored: StoredCheckpoint, prefix: str) -> None:
        super().__init__(stored.path)
        # Opened when read: a rank that needs 3 of 512 files opens 3.
        self._open = lru_cache(_MAX_OPEN_FILES)(stored.tensors)
        pattern = re.compile(re.escape(prefix) + r"\.\d+\.safetensors")
        for file, entries in sorted(stored.manifest.tensors.items()):
            if pattern.fullmatch(file):
                for name, entry in entries.items():
                    self._add(file, name, entry)

    def _add(self, file: str, name: str, entry: TensorEntry) -> None:
        dtype, box = dtype_of(entry.dtype), entry.box
        known = self.tensors.setdefault(name, TensorShards(dtype, entry.shape))
        if (known.dtype, known.shape) != (dtype, entry.shape) or not box.fits(entry.shape):
            raise CorruptCheckpointError(
                f"{self.path.absolute()}: {file} holds {box} of {name!r} as {entry.dtype} {entry.shape}, and another "
                f"file has it as {known.dtype} {known.shape}; load another checkpoint"
            )
        known.places.append(file)
        known.boxes.append(box)

    def files_for(self, name: str, box: Box) -> set[str]:
        """Return the files to verify before a box is read."""
        return {self.tensors[name].places[read.shard] for read in self.plan(name, box)}

    def read_shard(self, name: str, shard: int, index: Index) -> Tensor:
        """Return a slice of one stored shard."""
        file = self.tensors[name].places[shard]
        opened = self._open(file)
        if name not in opened:
            raise CorruptCheckpointError(f"{(self.path / file).absolute()} lacks {name!r}; load another")
        return opened.slice(name, index)


class MeanOfReplicas(ShardedTensors):
    """The mean of tensors of which every rank has saved values of its own; of integers, the first rank's values."""

    def __init__(self, path: Path, replicas: Sequence[ShardedTensors]) -> None:
        super().__init__(path)
        self._replicas = replicas
        self.tensors = replicas[0].tensors
        for replica in replicas:
            if differing := sorted(set(replica) ^ set(self)):
                raise IncompatibleCheckpointError(
                    f"{path.absolute()} holds {len(replicas)} replicas that were updated apart, and {len(differing)} "
                    f"tensor(s) are not in all of them (first: {differing[0]!r}), so that there is no mean; load it on "
                    f"{len(replicas)} ranks with strategy 'ddp'"
                )

    def files_for(self, name: str, box: Box) -> set[str]:
        """Return the files of all replicas."""
        return set().union(*(replica.files_for(name, box) for replica in self._replicas))

    def read_shard(self, name: str, shard: int, index: Index) -> Tensor:
        """Return the mean of a slice; that of half precision is computed in fp32."""
        first, *others = (replica.read_shard(name, shard, index) for replica in self._replicas)
        if not first.is_floating_point():
            return first
        # Copied: `first` may be a view of the mapped file, and the sum is made in place.
        total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
        for values in others:
            total += values
        return (total / len(self._replicas)).to(first.dtype)


def stored_tensors(stored: StoredCheckpoint, prefix: str) -> ShardedTensors:
    """Return the tensors below a prefix; where every rank has saved a replica of its own, their mean."""
    pattern = re.compile(re.escape(prefix) + r"\.replica_(\d+)\.")
    ranks = sorted({int(found[1]) for file in stored.manifest.tensors if (found := pattern.match(file))})
    if not ranks:
        return StoredShards(stored, prefix)
    if ranks != list(range(stored.manifest.world_size)):
        raise CorruptCheckpointError(
            f"{stored.path.absolute()} holds the replicas of ranks {ranks} of {stored.manifest.world_size}: were nodes "
            "saved to disks of their own? Then load with as many of them"
        )
    return MeanOfReplicas(stored.path, [StoredShards(stored, f"{prefix}.replica_{rank}") for rank in ranks])
