"""The contract between a prepared loader and the source of its batches, and reading on rank 0 for all ranks.

A source reads one pass at a time and writes into the pass's `Progress` which rows each batch holds. It knows nothing of
hooks or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from accel_trainer.data.plan import BatchRows
from accel_trainer.data.position import Position, Progress
from accel_trainer.errors import IncompatibleCheckpointError, ProcessGroupError
from accel_trainer.runtime.collectives import scatter_objects
from accel_trainer.runtime.process import ProcessContext

__all__ = ["RoundSource", "Source", "begin_silently", "check_length", "length_of", "read_for_all"]


class Source(Protocol):
    """A dataset, read for this shard."""

    @property
    def start(self) -> int:
        """Steps left out at the beginning of the next pass."""

    @property
    def has_exact_length(self) -> bool:
        """Whether a pass takes exactly `num_steps`."""

    @property
    def epoch(self) -> int:
        """The epoch of the next pass."""

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a full step over all shards; None where batches vary in size."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, in samplers and datasets."""

    def num_steps(self) -> int:
        """Steps of a full pass; TypeError where that is not known."""

    def num_left(self) -> int:
        """Steps of the next pass; TypeError where that is not known."""

    def starting_at(self, step: int) -> Source:
        """Return this source with its next pass beginning at `step`; the epoch stays shared."""

    def rewind(self) -> None:
        """Begin the next pass at the beginning of its epoch."""

    def settings(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Return the attributes that the prepared loader has in place of the user's."""

    def read(self, loader: Any, progress: Progress) -> Iterator[Any]:
        """Yield the batches of one pass, and keep `progress` up to date."""

    def position(self, epoch: int, progress: Progress | None) -> Position:
        """Return the position of a pass, or of the beginning of the next one."""

    def resume(self, position: Position) -> None:
        """Begin the next pass of an epoch at `position`.

        Raises:
            IncompatibleCheckpointError: this source cannot go on there exactly; nothing has changed.
        """

    @property
    def loaded(self) -> Position | None:
        """The position at which the next pass begins, if it came from `resume`."""

    def forget(self) -> None:
        """Drop the position that came from `resume`."""


class RoundSource(Source, Protocol):
    """A dataset that rank 0 can read for all shards."""

    def rounds(self, loader: Any, progress: Progress) -> Iterator[tuple[Any, BatchRows]]:
        """Yield the batches of all shards at each step, and their rows."""


def read_for_all(source: RoundSource, loader: Any, progress: Progress, process: ProcessContext) -> Iterator[Any]:
    """Yield this rank's batches, which rank 0 reads and sends as objects: anything that pickles travels.

    Collective: one scatter for each step.

    Raises:
        ProcessGroupError: rank 0 could not read; it raises the error itself.
    """
    parcels = _parcels(source, loader, progress, process.world_size) if process.is_main else None
    while True:
        parcel = scatter_objects(next(parcels) if parcels is not None else None, process)
        if isinstance(parcel, str):
            if parcels is not None:
                next(parcels)  # raises the error itself
            raise ProcessGroupError(f"rank 0, which reads for all ranks, failed: {parcel}; see its traceback")
        if parcel is None:
            return
        batch, rows, progress.start = parcel
        progress.change(rows)
        progress.num_yielded += 1
        yield batch
        if rows.is_last:
            return


def _parcels(source: RoundSource, loader: Any, progress: Progress, num_ranks: int) -> Iterator[list[Any]]:
    """Yield, for each rank, its batch with rows and start of the pass; an error's text; or None at the end."""
    try:
        for batches, rows in source.rounds(loader, progress):
            yield [(batch, rows, progress.start) for batch in batches]
    except Exception as error:
        yield [f"{type(error).__name__}: {error}"] * num_ranks
        raise
    yield [None] * num_ranks


def begin_silently(loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Begin a pass in the middle of an epoch without a draw from torch's global stream.

    A loader without workers draws a number there when an epoch begins. It is drawn already in the random state that a
    run goes on with, and another one would change every dropout after it.
    """
    kept, loader.generator = loader.generator, torch.Generator()
    try:
        return begin()
    finally:
        loader.generator = kept


def length_of(dataset: Any) -> int | None:
    """Return the length of a dataset that has one."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def check_length(dataset: Any, position: Position) -> None:
    """Raise unless a dataset is as long as the one that a position was taken from, where both lengths are known.

    Raises:
        IncompatibleCheckpointError: it is not; a place in one dataset says nothing about another.
    """
    length = length_of(dataset)
    if None not in (length, position.dataset_length) and length != position.dataset_length:
        raise IncompatibleCheckpointError(
            f"the state was saved after {position.samples} samples of a dataset of {position.dataset_length}, and this "
            f"loader's dataset has {length}; prepare the loader over the same dataset. To go over to another one, turn "
            "off use_stateful_dataloader for load_state, or give load_state_dict of the loader an epoch alone"
        )
