"""A unit's state through rank 0: for engines that shard in ways of their own, and can gather and scatter by name.

The files are those of `elastic_state`, with everything in rank 0's: whatever wrote them, each can load them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from accel_trainer.checkpoint.codec import decode, encode
from accel_trainer.checkpoint.directory import StagedDirectory, StoredCheckpoint
from accel_trainer.checkpoint.manifest import Manifest
from accel_trainer.checkpoint.parts import StoredParts
from accel_trainer.errors import IncompatibleCheckpointError
from accel_trainer.runtime.health import shared_fate
from accel_trainer.strategies.elastic_state import ENGINE

if TYPE_CHECKING:
    from accel_trainer.strategies.api import CheckpointIO

__all__ = ["WholeIO", "plan_whole", "save_whole", "whole_files"]


def save_whole(
    io: CheckpointIO, staged: StagedDirectory, prefix: str, rank: int, *, weights: bool, optimizer: bool
) -> None:
    """Write a unit's model and optimizer state from rank 0. Collective; see `CheckpointIO.save`."""
    model = io.full_model_state() if weights else {}
    state = io.full_optimizer_state() if optimizer else None
    if rank != 0:
        return
    names: dict[int, str] = {}
    tied = {name: first for name, tensor in model.items() if (first := names.setdefault(id(tensor), name)) != name}
    alone = {name: tensor for name, tensor in model.items() if name not in tied}
    held: dict[str, Tensor] = {}
    outline = encode(state, held, "optimizer") if optimizer else None
    for kind, tensors in (("model", alone), ("optimizer", held)):
        if tensors:
            staged.write_tensors(f"{prefix}.{kind}.00000.safetensors", tensors)
    staged.write_json(f"{prefix}.json", {"engine": ENGINE, "tied": tied, "optimizer": outline})


class _WholeTensors(Mapping[str, Tensor]):
    """The tensors of a unit by name, each put together from its parts when it is asked for."""

    def __init__(self, parts: StoredParts, tied: Mapping[str, str]) -> None:
        self._parts = parts
        self._tied = tied

    def __getitem__(self, name: str) -> Tensor:
        stored = self._tied.get(name, name)
        if stored not in self._parts:
            raise KeyError(name)
        whole = torch.empty(self._parts.shape(stored), dtype=self._parts.dtype(stored))
        self._parts.read(stored, whole)
        return whole

    def __iter__(self) -> Iterator[str]:
        yield from self._parts
        yield from self._tied

    def __len__(self) -> int:
        return len(self._parts) + len(self._tied)


class WholeIO(Protocol):
    """What is asked of an engine's `CheckpointIO`. Plans are collective, and so is what they return, which loads."""

    def plan_full_model_load(self, state: Mapping[str, Tensor], *, strict: bool = True) -> Callable[[], None]:
        """Check that rank 0's state fits the model, and return what loads it."""

    def plan_full_optimizer_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check that rank 0's state fits the optimizer, and return what loads it."""


def plan_whole(
    io: WholeIO, stored: StoredCheckpoint, prefix: str, rank: int, *, weights: bool, optimizer: bool
) -> Callable[[], None]:
    """Check what `save_whole` or a native unit wrote, read by rank 0, and return what loads it.

    Collective; see `CheckpointIO.plan_load`.
    """
    model: Mapping[str, Tensor] = {}
    state: dict[str, Any] = {}
    with shared_fate(stored.process, f"load of {stored.path}"):
        outline = stored.json(f"{prefix}.json")
        if outline["engine"] != ENGINE or (optimizer and outline["optimizer"] is None):
            found = "no optimizer state" if outline["engine"] == ENGINE else f"the state of {outline['engine']!r}"
            raise IncompatibleCheckpointError(
                f"{stored.path.absolute()} holds {found}, which this run cannot continue from; "
                f"load the weights that `accel-trainer ckpt export {stored.path} OUT` makes of it"
            )
    stored.verify_together(whole_files(stored.manifest, prefix, rank))
    with shared_fate(stored.process, f"load of {stored.path}"):
        if rank == 0:
            model = _WholeTensors(StoredParts(stored, f"{prefix}.model"), outline["tied"])
            if optimizer:
                held = StoredParts(stored, f"{prefix}.optimizer")
                state = decode(outline["optimizer"], _WholeTensors(held, {}))
    loads = [io.plan_full_model_load(model)] if weights else []
    if optimizer:
        loads.append(io.plan_full_optimizer_load(state))

    def load() -> None:
        for part in loads:
            part()

    return load


def whole_files(manifest: Manifest, prefix: str, rank: int) -> list[str]:
    """Return the files that `plan_whole` reads on this rank."""
    if rank != 0:
        return [f"{prefix}.json"] if f"{prefix}.json" in manifest.files else []
    return [name for name in manifest.files if name.startswith(f"{prefix}.")]
