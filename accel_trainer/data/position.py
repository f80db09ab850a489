"""Positions within an epoch, counted in samples, so that any number of processes can go on from one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from accel_trainer.data.plan import BatchRows
from accel_trainer.errors import IncompatibleCheckpointError


@dataclass(slots=True, eq=False)
class Progress:
    """A pass over a loader that is under way: the samples and steps it has yielded, and the rows of its last batch."""

    epoch: int
    total: int | None
    """Steps of the pass; None where the length is not known."""
    num_yielded: int = 0
    rows: BatchRows | None = None
    start: tuple[int, int] = (0, 0)
    """Samples and steps of the epoch, over all shards, before the pass."""
    dataset_state: Any = None
    """The dataset's own state after the samples of the last batch, for streams that offer one."""
    gathered_rows: set[int] = field(default_factory=set)
    """Rows of the tensors that were gathered for metrics in full steps."""
    is_moved: bool = False
    """Whether the pass goes on from another step than the next, and its batches have to be read from there."""
    _before: int = 0
    _since: int = 0

    def change(self, rows: BatchRows | None) -> None:
        """Take `rows` for those of the next steps. Steps with equal rows share one object: no call."""
        self._before = self._num_samples
        self._since = self.num_yielded
        self.rows = rows

    def restart(self, samples: int, steps: int, total: int | None) -> None:
        """Go on after so many samples and steps of the epoch, with `total` steps that are left."""
        self.start, self.total, self.rows, self.is_moved = (samples, steps), total, None, True
        self.num_yielded = self._before = self._since = 0

    def copy(self) -> Progress:
        """Return the position that has been reached by now."""
        return copy.copy(self)

    def move_to(self, reached: Progress) -> None:
        """Take all of another pass's progress."""
        for each in fields(self):
            setattr(self, each.name, getattr(reached, each.name))

    @property
    def _num_samples(self) -> int:
        """Samples yielded in this pass, over all shards."""
        return self._before + (self.num_yielded - self._since) * (self.rows.num_samples if self.rows is not None else 0)

    @property
    def samples(self) -> int:
        """Samples of the epoch yielded by now, over all shards."""
        return self.start[0] + self._num_samples

    @property
    def steps(self) -> int:
        """Steps of the epoch taken by now."""
        return self.start[1] + self.num_yielded

    @property
    def is_complete(self) -> bool:
        """Whether the last batch has been yielded."""
        return self.rows is not None and self.rows.is_last


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A loader's `state_dict`: the same on every rank, and for any number of ranks."""

    epoch: int
    samples: int = 0
    """Samples of the epoch that loops have been given. Batches that workers have read ahead do not count."""
    steps: int = 0
    is_complete: bool = False
    """Whether that was the epoch's last batch."""
    seed: int | None = None
    """Seed of the order."""
    generator: list[Any] | None = None
    """An epoch, and the state that the loader's own generator has at its beginning; None without one."""
    dataset_length: int | None = None
    global_batch: int | None = None
    """Samples of a full step; None where batches vary in size."""
    readers: int = 1
    """Into how many shards reading cuts a stream whose order depends on it: workers, or ranks with shards of their own;
    1 where the order does not depend on it."""
    workers: int | None = None
    """Workers, of each part of a stream, that its order is made for; None where that is not known, or no matter."""
    dataset_state: Any = None
    """The dataset's own state, for streams that offer one: for several readers, those of each with their turn."""

    @classmethod
    def at(cls, reached: Progress | Position | None, epoch: int, **facts: Any) -> Position:
        """Return the position of a pass or loaded position, else the epoch's beginning; `facts` are the source's."""
        if reached is not None:
            names = ("samples", "steps", "is_complete", "dataset_state")
            facts.update((name, getattr(reached, name)) for name in names)
        return cls(epoch=epoch, **facts)

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Position:
        """Read the dictionary of `to_dict`; an epoch alone is its beginning."""
        known = {field.name for field in fields(cls)}
        if not isinstance(state.get("epoch"), int) or not known.issuperset(state):
            raise IncompatibleCheckpointError(
                f"a loader's state holds {sorted(state)}, and this version knows {sorted(known)} with the epoch as an "
                "integer; load what state_dict() of a prepared loader returned"
            )
        return cls(**state)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name: numbers, and the dataset's state."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
