"""An engine's state in parts: each rank writes what its flat partitions hold, by parameter name and place in the whole.

The files are those of `strategies.parameter_state.sharded_io`, and whatever wrote them, each can load them. A partition
begins and ends within rows, so that a rank's part of a tensor can be several boxes: the largest are in the file of the
number of the rank, the others in files with the numbers after the last rank, its own plus the number of ranks, etc.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_trainer.checkpoint.commit.staging import StagedDirectory
from accel_trainer.checkpoint.format.boxes import Box, balance_bytes
from accel_trainer.checkpoint.format.json_codec import encode
from accel_trainer.checkpoint.format.safetensors_file import LazyTensor
from accel_trainer.integrations.deepspeed.partitions import Place, Run, opened_partition
from accel_trainer.strategies.parameter_state.stored_unit import ENGINE

if TYPE_CHECKING:
    from accel_trainer.integrations.deepspeed.checkpoint_io import DeepSpeedCheckpointIO

__all__ = ["part_bytes", "save_parts"]


class _Piece:
    """A box of a tensor that is read out of the engine when it is written."""

    def __init__(self, dtype: torch.dtype, place: Place, read: Callable[[], Tensor]) -> None:
        self.dtype = dtype
        self.shape = place.box.sizes
        self._place = place
        self._read = read

    def __call__(self) -> Tensor:
        return self._place.within(self._read())


class _Parts:
    """What this rank writes of the tensors of one kind."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Take the ranks that write one checkpoint together."""
        self._ranks = ranks
        self._files: list[tuple[dict[str, Tensor | LazyTensor], dict[str, Any]]] = []

    def add_run(self, name: str, dtype: torch.dtype, run: Run, read: Callable[[], Tensor]) -> None:
        """Write a run of a tensor, each of its boxes in a file of its own; `read` returns its elements, flat."""
        for number, place in enumerate(run.places()):
            tensors, slices = self._file(number)
            tensors[name] = _Piece(dtype, place, read)
            if place.box != Box.full(run.shape):
                slices[name] = (run.shape, place.box.offsets)

    def add_shared(self, tensors: Mapping[str, Tensor]) -> None:
        """Write this rank's share of what all of them have whole."""
        takers = balance_bytes([tensor.nbytes for tensor in tensors.values()], len(self._ranks))
        rank = dist.get_rank()
        own = {name: t for (name, t), taker in zip(tensors.items(), takers, strict=True) if self._ranks[taker] == rank}
        if own:
            self._file(0)[0].update(own)

    def _file(self, number: int) -> tuple[dict[str, Tensor | LazyTensor], dict[str, Any]]:
        while len(self._files) <= number:
            self._files.append(({}, {}))
        return self._files[number]

    @property
    def num_bytes(self) -> int:
        """Size of this rank's tensors."""
        written = [tensor for tensors, _ in self._files for tensor in tensors.values()]
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in written)

    def write(self, staged: StagedDirectory, prefix: str) -> None:
        """Write the files."""
        for number, (tensors, slices) in enumerate(self._files):
            if tensors:
                index = dist.get_rank() + number * dist.get_world_size()
                staged.write_tensors(f"{prefix}.{index:05d}.safetensors", tensors, slices=slices)


def save_parts(io: DeepSpeedCheckpointIO, staged: StagedDirectory, prefix: str, *, weights: bool) -> None:
    """Write what this rank holds of a model and its optimizer; see `CheckpointIO.save`. Nothing is communicated."""
    model, optimizer = _Parts(staged.ranks), _Parts(staged.ranks)
    tied = _add_model(io, model) if weights else {}
    model.write(staged, f"{prefix}.model")
    outline = _add_optimizer(io, optimizer) if io.has_optimizer else None
    optimizer.write(staged, f"{prefix}.optimizer")
    if staged.commits:
        staged.write_json(f"{prefix}.json", {"engine": ENGINE, "tied": tied, "optimizer": outline})


def part_bytes(io: DeepSpeedCheckpointIO) -> int:
    """Return the size of what this rank writes in `save_parts`."""
    parts = _Parts(range(dist.get_world_size()))
    _add_model(io, parts)
    if io.has_optimizer:
        _add_optimizer(io, parts)
    return parts.num_bytes


def _add_model(io: DeepSpeedCheckpointIO, parts: _Parts) -> dict[str, str]:
    """Add this rank's part of the weights, fp32 where the optimizer keeps them so; return the names of tied ones."""
    tied: dict[str, str] = {}
    names: dict[int, str] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in io.model_tensors():
        if (first := names.setdefault(id(tensor), name)) != name:
            tied[name] = first
        elif (run := io.partitions.trained(tensor)) is not None:
            parts.add_run(name, io.master_dtype, run, partial(io.partitions.read, run))
        elif (run := io.partitions.frozen(tensor)) is not None:
            parts.add_run(name, tensor.dtype, run, partial(_read_frozen, tensor, run))
        else:
            whole[name] = tensor
    parts.add_shared(whole)
    return tied


def _read_frozen(tensor: Tensor, run: Run) -> Tensor:
    with opened_partition(tensor) as partition:
        return run.within(partition).clone()


def _add_optimizer(io: DeepSpeedCheckpointIO, parts: _Parts) -> Any:
    """Add this rank's part of the optimizer's state, and return its outline, the same on every rank."""
    state: dict[str, Any] = {}
    runs: list[tuple[Run, str]] = []
    outlines = io.outlines()
    for name, _, run in io.trained():
        entry = state[name] = dict(outlines[run.flat])
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.is_meta:
                entry[key] = value.new_empty(run.shape)
                runs.append((run, key))
        if not entry:
            del state[name]
    held: dict[str, Tensor] = {}
    outline = encode({"state": state, **io.options()}, held, "optimizer")
    # In the order in which they were met above.
    in_runs = [(name, tensor) for name, tensor in held.items() if tensor.is_meta]
    for (name, tensor), (run, key) in zip(in_runs, runs, strict=True):
        parts.add_run(name, tensor.dtype, run, partial(io.partitions.read, run, key))
    parts.add_shared({name: tensor for name, tensor in held.items() if not tensor.is_meta})
    return outline
