"""Where a pass over a loader stands, in samples, so that any number of processes can go on from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from accel_trainer.data.plan import BatchRows
from accel_trainer.errors import IncompatibleCheckpointError

__all__ = ["Pass", "Place", "Position"]


class Place(NamedTuple):
    """How much of an epoch has been handed out, over all shards."""

    samples: int = 0
    steps: int = 0


class Pass:
    """One iteration over a loader: how many batches it has handed out, and what the last one holds."""

    __slots__ = ("_before", "_since", "dataset_state", "epoch", "rows", "start", "taken", "total")

    def __init__(self, epoch: int, total: int | None) -> None:
        self.epoch = epoch
        self.total = total
        self.taken = 0
        self.rows: BatchRows | None = None
        self.start = Place()
        self.dataset_state: Any = None
        """What the dataset said of itself after the samples of the last batch, where it is asked."""
        self._before = 0
        self._since = 0

    def change(self, rows: BatchRows | None) -> None:
        """Note that steps from the next one on hold `rows`. Steps that hold the same share one object: no call."""
        self._before = self.num_samples
        self._since = self.taken
        self.rows = rows

    @property
    def num_samples(self) -> int:
        """Samples handed out in this pass, over all shards."""
        return self._before + (self.taken - self._since) * (self.rows.num_samples if self.rows is not None else 0)

    @property
    def is_complete(self) -> bool:
        """Whether the last batch has been handed out."""
        return self.rows is not None and self.rows.is_last


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a loader stands: what its `state_dict` holds. The same on every rank, and for any number of ranks."""

    epoch: int
    samples: int = 0
    """Samples of the epoch that loops have been given. Batches that workers have read ahead do not count."""
    steps: int = 0
    is_complete: bool = False
    """Whether that was the epoch's last batch."""
    seed: int | None = None
    """Seed of the order."""
    dataset_length: int | None = None
    global_batch: int | None = None
    """Samples of a full step; None where batches vary in size."""
    readers: int = 1
    """Into how many parts reading cuts a stream whose order depends on it: workers, or ranks with shards of their own;
    1 where the order does not depend on it."""
    dataset_state: Any = None
    """The dataset's own state, for streams that offer one."""

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Position:
        """Read what `to_dict` returned; an epoch alone is its beginning.

        Raises:
            IncompatibleCheckpointError: it is something else.
        """
        known = {field.name for field in fields(cls)}
        if not isinstance(state.get("epoch"), int) or not known.issuperset(state):
            raise IncompatibleCheckpointError(
                f"a loader's state holds {sorted(state)}, and this version knows {sorted(known)} with the epoch as an "
                "integer; load what state_dict() of a prepared loader returned"
            )
        return cls(**state)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name: numbers, and what the dataset gave."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
