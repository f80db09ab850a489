"""Writing and reading of an engine's partitions in shards by parameter name.

The files are those of `strategies.parameter_state.base_io`, and every native strategy loads them. A partition begins
and ends within rows, so that a rank's run of a tensor can be several boxes: the largest are in the file of the number
of the rank, the others in files with the numbers after the last rank, its own plus the number of ranks, etc.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_trainer.checkpoint.commit.staging import StagedDirectory
from accel_trainer.checkpoint.format.boxes import Box, balance_bytes
from accel_trainer.checkpoint.format.safetensors_file import LazyRead
from accel_trainer.checkpoint.shards import StoredShards
from accel_trainer.integrations.deepspeed.partitions import Partitions, Run, RunBox, opened_partition, unsharded_shape
from accel_trainer.strategies.parameter_state.base_io import PendingTensor, Reads
from accel_trainer.tree import leaves, map_leaves

__all__ = ["PartitionReads", "PartitionShards"]


class PartitionShards:
    """This rank's runs of tensors, and its share of those that every rank holds."""

    def __init__(self, partitions: Partitions, ranks: Sequence[int]) -> None:
        self._partitions = partitions
        self._ranks = ranks
        self._files: list[tuple[dict[str, Tensor | LazyRead], dict[str, Any]]] = []

    def add_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Add parameters and buffers, in the optimizer's type where it updates them."""
        replicated: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if (run := self._partitions.trained(tensor)) is not None:
                self.add_run(name, self._partitions.master_dtype, run, partial(self._partitions.read, run))
            elif (run := self._partitions.frozen(tensor)) is not None:
                self.add_run(name, tensor.dtype, run, partial(_read_frozen, tensor, run))
            else:
                replicated[name] = tensor
        self.add_replicated(replicated)

    def add_run(self, name: str, dtype: torch.dtype, run: Run, read: Callable[[], Tensor]) -> None:
        """Add a run of a tensor, each of its boxes in a file of its own; `read` returns its elements, flat."""
        for number, own in enumerate(run.boxes()):
            tensors, slices = self._file(number)
            tensors[name] = LazyRead(dtype, own.box.sizes, partial(_read_box, own, read))
            if own.box != Box.full(run.shape):
                slices[name] = (run.shape, own.box.offsets)

    def add_replicated(self, tensors: Mapping[str, Tensor]) -> None:
        """Add this rank's share of tensors that every rank holds."""
        takers = balance_bytes([tensor.nbytes for tensor in tensors.values()], len(self._ranks))
        rank = dist.get_rank()
        own = {name: t for (name, t), taker in zip(tensors.items(), takers, strict=True) if self._ranks[taker] == rank}
        if own:
            self._file(0)[0].update(own)

    def _file(self, number: int) -> tuple[dict[str, Tensor | LazyRead], dict[str, Any]]:
        while len(self._files) <= number:
            self._files.append(({}, {}))
        return self._files[number]

    @property
    def num_bytes(self) -> int:
        """Size of the tensors that this rank writes."""
        written = [tensor for tensors, _ in self._files for tensor in tensors.values()]
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in written)

    def write(self, staged: StagedDirectory, prefix: str) -> None:
        """Write the files. Nothing is communicated."""
        for number, (tensors, slices) in enumerate(self._files):
            if tensors:
                index = dist.get_rank() + number * dist.get_world_size()
                staged.write_tensors(f"{prefix}.{index:05d}.safetensors", tensors, slices=slices)


def _read_box(own: RunBox, read: Callable[[], Tensor]) -> Tensor:
    return own.within(read())


def _read_frozen(tensor: Tensor, run: Run) -> Tensor:
    with opened_partition(tensor) as partition:
        return run.within(partition).clone()


Fill = Callable[[Tensor], None]
"""Fills the elements of one run, in a tensor of its flat partition's size."""


@dataclass
class _FlatReads:
    """Reads into a flat partition, and into the optimizer's state for it."""

    values: list[Fill] = field(default_factory=list)
    state: dict[str, list[Fill]] = field(default_factory=dict)
    """By key of the state, for every parameter of the partition that has one."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Values that the optimizer keeps once for all parameters of a partition; its tensors are pending."""


class PartitionReads(Reads):
    """Reads into an engine's partitions, its model, and its optimizer's state and options."""

    def __init__(self, partitions: Partitions) -> None:
        super().__init__()
        self.replaces_state = False
        """Whether the optimizer's state is read, too."""
        self._partitions = partitions
        self._flats = [_FlatReads() for _ in range(partitions.num_flat)]

    def add_weight(self, stored: StoredShards, name: str, tensor: Tensor) -> None:
        """Fill a parameter or buffer: the tensor where this rank has it unsharded, and its run of a partitioned one."""
        trained, frozen = self._partitions.trained(tensor), self._partitions.frozen(tensor)
        is_unsharded = tuple(tensor.shape) == unsharded_shape(tensor)
        if is_unsharded:
            self.add(stored, name, tensor.detach())
        if frozen is not None:
            self._reads.append(partial(_fill_partition, self._fill(stored, name, frozen), tensor))
        elif trained is not None and is_unsharded and tensor.dtype == self._partitions.master_dtype:
            self._flats[trained.flat].values.append(partial(_copy_run, tensor, trained))
        elif trained is not None:
            self._flats[trained.flat].values.append(self._fill(stored, name, trained))

    def add_state(self, stored: StoredShards, run: Run, key: str, value: Any) -> None:
        """Fill the optimizer's state for a run, or replace a value that it keeps for a flat partition."""
        flat = self._flats[run.flat]
        # A parameter of one number has the shape of the count of its updates.
        if not isinstance(value, PendingTensor) or key == "step" or stored.shape(value.name) != run.shape:
            flat.shared.setdefault(key, self._pend(stored, value))
        else:
            flat.state.setdefault(key, []).append(self._fill(stored, value.name, run))

    def add_options(self, stored: StoredShards, group: dict[str, Any], options: Mapping[str, Any]) -> None:
        """Set options of a group of the optimizer, such as its learning rate."""
        pending = {key: self._pend(stored, value) for key, value in options.items()}
        self.add_last(lambda: group.update({key: read(group.get(key)) for key, read in pending.items()}))

    def _pend(self, stored: StoredShards, value: Any) -> Callable[[Any], Any]:
        """Return a function that returns `value` with its tensors read, on the device of its argument if a tensor."""
        for leaf in leaves(value):
            if isinstance(leaf, PendingTensor):
                self.files |= stored.files_for(leaf.name, Box.full(stored.shape(leaf.name)))

        def read(leaf: Any, before: Any) -> Any:
            if not isinstance(leaf, PendingTensor):
                return leaf
            tensor = torch.empty(stored.shape(leaf.name), dtype=stored.dtype(leaf.name))
            stored.read(leaf.name, tensor)
            tensor = tensor.to(before.device) if isinstance(before, Tensor) else tensor
            return tensor.numpy() if leaf.as_array else tensor

        return lambda before: map_leaves(lambda leaf: read(leaf, before), value)

    def _fill(self, stored: StoredShards, name: str, run: Run) -> Fill:
        boxes = run.boxes()
        for own in boxes:
            self.files |= stored.files_for(name, own.box)

        def fill(flat: Tensor) -> None:
            target = run.within(flat)
            for own in boxes:
                stored.fill_box(name, own.box, own.within(target))

        return fill

    @torch.no_grad()
    def run(self) -> None:
        """Fill model, partitions and the optimizer's state."""
        for read in self._reads:
            read()
        for index, reads in enumerate(self._flats):
            with self._partitions.opened(index, changes=True) as (flat, state):
                for fill in reads.values:
                    fill(flat)
                if reads.values:
                    self._partitions.update_model_from(index)
                if self.replaces_state:
                    shared = {key: read(None) for key, read in reads.shared.items()}
                    # Zeros stay for parameters without a state yet, and in the padding.
                    self._partitions.reset_state(state, flat, reads.state, shared)
                    for key, fills in reads.state.items():
                        for fill in fills:
                            fill(state[key])
        for finish in self._last:
            finish()


def _fill_partition(fill: Fill, parameter: Tensor) -> None:
    with opened_partition(parameter, changes=True) as partition:
        fill(partition)


def _copy_run(tensor: Tensor, run: Run, flat: Tensor) -> None:
    run.within(flat).copy_(run.of_full(tensor))
