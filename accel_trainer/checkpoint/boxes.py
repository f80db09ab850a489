"""Boxes, the n-dimensional regions of tensors that ranks hold and files store, and the reads that fill one from others.

Pure arithmetic, the heart of elasticity: a tensor that was saved as shards over any mesh is read as shards over any
other. Each reader intersects the box that it holds with the stored ones, and reads no more than that. A box is what
torch.distributed.checkpoint calls a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

Index = tuple[slice, ...]
"""One slice a dimension; `()` is all of a scalar."""


@dataclass(frozen=True, slots=True)
class Box:
    """The region of a tensor that begins at `offsets` and is `sizes` long, in every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """Return the box of a full tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        """The number of elements in it; a scalar has one."""
        return prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """Return the box of the elements that are in both, or None when there are none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(min(a, b) - start for a, b, start in zip(self._ends(), other._ends(), starts, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def subtract(self, hole: Box) -> list[Box]:
        """Return disjoint boxes of the elements in this one that are not in `hole`: at most two a dimension."""
        common = self.intersect(hole)
        if common is None:
            return [self] if self.num_elements else []
        rest = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dim, (start, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
            end = offsets[dim] + sizes[dim]
            for piece_start, piece_end in ((offsets[dim], start), (start + size, end)):
                if piece_end > piece_start:
                    piece_offsets = (*offsets[:dim], piece_start, *offsets[dim + 1 :])
                    piece_sizes = (*sizes[:dim], piece_end - piece_start, *sizes[dim + 1 :])
                    rest.append(Box(piece_offsets, piece_sizes))
            # The next dimension cuts what is left of this one: pieces that overlap would be read twice.
            offsets[dim], sizes[dim] = start, size
        return rest

    def within(self, outer: Box) -> Index:
        """Return the index of this box in a tensor that holds `outer`, which contains it."""
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.offsets, outer.offsets, self.sizes, strict=True)
        )

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it lies inside a tensor of `shape`."""
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            offset >= 0 and size >= 0 and offset + size <= extent
            for offset, size, extent in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def _ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


class Read(NamedTuple):
    """One copy: `target_tensor[target] = shard[source]`."""

    shard: int
    """Position among the stored shards."""
    source: Index
    target: Index


def plan_reads(target: Box, shards: Sequence[Box]) -> list[Read] | None:
    """Return the copies that fill `target` from `shards` in any order, each element once; None when they leave gaps."""
    reads = []
    missing = [target] if target.num_elements else []
    for position, shard in enumerate(shards):
        if not missing:
            break
        rest = []
        for box in missing:
            common = box.intersect(shard)
            if common is not None:
                reads.append(Read(position, common.within(shard), common.within(target)))
            rest += box.subtract(shard)
        missing = rest
    return None if missing else reads


def boxes_of_run(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return boxes of the elements `begin` to `end` of a row-major tensor: a run, as a shard of a flat buffer holds it.

    They are contiguous, in order, and at most `2 * len(shape) - 1`: partial rows at the ends, full rows in between.
    """
    if begin >= end:
        return []
    if len(shape) <= 1:
        return [Box((begin,), (end - begin,)) if shape else Box((), ())]
    inner = tuple(shape[1:])
    row_size = prod(inner)
    (first, head), (last, tail) = divmod(begin, row_size), divmod(end, row_size)
    if first == last:
        return _in_row(first, boxes_of_run(inner, head, tail))
    boxes = []
    if head:
        boxes += _in_row(first, boxes_of_run(inner, head, row_size))
        first += 1
    if last > first:
        boxes.append(Box((first, *(0 for _ in inner)), (last - first, *inner)))
    return boxes + _in_row(last, boxes_of_run(inner, 0, tail))


def _in_row(row: int, boxes: Sequence[Box]) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes]


def chunk_of(extent: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Return offset and size of a chunk of `range(extent)` as `torch.chunk` makes it; the last ones may be empty."""
    step = -(-extent // num_chunks)
    offset = min(extent, index * step)
    return offset, min(extent, offset + step) - offset


def box_at(
    shape: Sequence[int], sharded_dims: Sequence[int | None], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> Box:
    """Return the box of a tensor of `shape` that the rank at `coordinate` of a mesh holds.

    Args:
        sharded_dims: for each mesh axis the dimension of the tensor that is sharded over it, or None where it is
            replicated. A dimension over two axes is sharded over the first one first.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, num_chunks, index in zip(sharded_dims, mesh_shape, coordinate, strict=True):
        if dim is not None:
            offset, size = chunk_of(sizes[dim], num_chunks, index)
            offsets[dim], sizes[dim] = offsets[dim] + offset, size
    return Box(tuple(offsets), tuple(sizes))


def balance_bytes(sizes: Sequence[int], num_shares: int) -> list[int]:
    """Return the share that takes each item, such that no share has many more bytes than another."""
    # The largest item goes first, to the smallest share so far (longest processing time first, at most 4/3 of the
    # optimum): the same answer on every rank, without communication.
    loads = [0] * num_shares
    takers = [0] * len(sizes)
    # Equal sizes by position: each rank computes this alone, and all have to come to one answer.
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        taker = loads.index(min(loads))
        takers[item] = taker
        loads[taker] += sizes[item]
    return takers
