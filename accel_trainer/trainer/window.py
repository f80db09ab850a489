"""The batches of an update, which are read before the first of them is trained, and what each holds on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from accel_trainer.data.plan import BatchRows
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.process import ProcessContext

__all__ = ["WindowReader"]


class WindowReader:
    """One pass over a loader; where ranks may hold unequally many samples, what an update's batches hold is kept.

    That is on several ranks with `even_batches=False`. Else every batch counts as it is. Ranks do not communicate:
    each knows the rows of all.
    """

    def __init__(self, dataloader: Any, process: ProcessContext, even_batches: bool) -> None:
        self._dataloader = dataloader
        self._batches = iter(dataloader)
        self._process = process
        self._keeps_rows = process.world_size > 1 and not even_batches
        self._read: list[tuple[Any, BatchRows]] = []
        self._window: list[BatchRows] = []
        self._current: BatchRows | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        if self._keeps_rows:
            rows = getattr(self._dataloader, "rows", None)
            if rows is not None and len(rows.rows) == self._process.world_size:
                self._read.append((batch, rows))
        return batch

    def close(self) -> None:
        """End the pass now, not when the iterator is collected: the loader then knows that nobody reads it."""
        self.forget()
        close = getattr(self._batches, "close", None)
        if callable(close):
            close()

    def forget(self) -> None:
        """End an update: its batches are held no longer."""
        self._read, self._window, self._current = [], [], None

    def begin(self, batches: list[Any]) -> None:
        """Begin an update of these batches.

        Raises:
            ConfigError: they are not those that were read, and ranks hold unequally many samples.
        """
        self._window = [rows for batch in batches for read, rows in self._read if read is batch]
        uneven = [rows.rows for _, rows in self._read if len(set(rows.rows)) > 1]
        if uneven and len(self._window) != len(batches):
            raise ConfigError(
                f"get_batch_samples() returned {len(batches)} batches, {len(self._window)} of them as the loader gave "
                f"them, in an update that has {uneven[0]} samples on the ranks: their weights are not known. Return "
                "the batches of the iterator, or train with even_batches=True"
            )

    def begin_batch(self, index: int) -> None:
        """Begin the micro-batch `index` of the update."""
        self._current = self._window[index] if index < len(self._window) else None

    def without_stand_in(self, batch: Any) -> Any:
        """Return the batch to count from: without rows where it stands in for none, so that the rank takes part."""
        if not any(read is batch and not self._own(rows) for read, rows in self._read):
            return batch
        if not isinstance(batch, Mapping):
            return batch
        return {name: value[:0] if isinstance(value, Tensor) and value.ndim else value for name, value in batch.items()}

    def weight(self, by_items: bool, over_ranks: bool) -> float:
        """What the loss of the present micro-batch is multiplied by; the mean over ranks is then that over samples.

        Args:
            by_items: the loss is a sum, divided by the update's number of items; else a mean over the micro-batch.
            over_ranks: that number is one of all ranks: then only a rank without samples is not weighed by 1.
        """
        rows, rank = self._current, self._process.rank
        if rows is None:
            return 1.0
        if not by_items:
            return rows.weight(rank)
        if not self._own(rows):
            return 0.0
        if over_ranks:
            return 1.0
        update = tuple(map(sum, zip(*(each.rows for each in self._window), strict=True)))
        return BatchRows(update, update).weight(rank)

    def _own(self, rows: BatchRows) -> int:
        return rows.rows[self._process.rank]
