"""Shuffle buffers of streams of `datasets` that a run can leave and enter again.

Those of `datasets` (5.2, iterable_dataset.py:2006) keep half of their rows whenever they give the other half, so that a
row may stay for long, and a state without the rows cannot say which are held. Here a stream is read in blocks of half a
buffer. A block's rows are dealt out to two windows, its own and the next one, by a number that depends on the seed and
on the block: a window is known from two blocks, which are read again where a run goes on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from datasets.iterable_dataset import BufferShuffledExamplesIterable, _BaseExamplesIterable


class WindowShuffle(BufferShuffledExamplesIterable):
    """A shuffle buffer of `datasets` whose state is that of its source two blocks ago, and a count."""

    @classmethod
    def like(cls, node: BufferShuffledExamplesIterable) -> WindowShuffle:
        """Return one with the source, the size and the seed of another buffer."""
        return cls(node.ex_iterable, node.buffer_size, node.generator)

    def shift_rngs(self, value: int) -> WindowShuffle:
        """Return one that shuffles by another seed, for a worker or an epoch."""
        return self.like(super().shift_rngs(value))

    def shuffle_data_sources(self, generator: np.random.Generator) -> WindowShuffle:
        """Return one over shuffled shards."""
        return self.like(super().shuffle_data_sources(generator))

    def shard_data_sources(self, *args: Any, **kwargs: Any) -> WindowShuffle:
        """Return one over some of the shards."""
        return self.like(super().shard_data_sources(*args, **kwargs))

    def reshard_data_sources(self) -> WindowShuffle:
        """Return one over more shards."""
        return self.like(super().reshard_data_sources())

    def _init_state_dict(self) -> dict[str, Any]:
        # Not that of the source as it is now, as others have it: in a worker, `datasets` loads a state into the stream
        # of all shards first, whose sources may be more in number.
        self.ex_iterable._init_state_dict()
        self._state_dict = {"source": None, "window": 0, "num_given": 0, "type": type(self).__name__}
        return self._state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Begin the next pass at a state, without the warning of lost rows."""
        loaded: dict[str, Any] = _BaseExamplesIterable.load_state_dict(self, state_dict)
        return loaded

    def __iter__(self) -> Iterator[Any]:
        return self._windows(lambda: iter(self.ex_iterable), lambda _: 1, _take_rows)

    def _iter_arrow(self) -> Iterator[Any]:
        return self._windows(lambda: self.ex_iterable.iter_arrow(), lambda item: len(item[1]), _take_table)

    def _windows(
        self, read: Callable[[], Iterator[Any]], count: Callable[[Any], int], take: Callable[..., list[Any]]
    ) -> Iterator[Any]:
        """Yield rows, or tables of them, window by window.

        Args:
            read: begins to read the source.
            count: of the rows of what it yields.
            take: returns rows of these numbers, as one or many items.
        """
        state: Any = self._state_dict
        size = max(1, self.buffer_size // 2)
        seed = int(copy.deepcopy(self.generator).integers(0, 1 << 62))
        source, window, num_given = (state["source"], state["window"], state["num_given"]) if state else (None, 0, 0)
        if source is not None:
            self.ex_iterable.load_state_dict(source)
        items, block = read(), max(0, window - 1)
        kept: list[Any] = []
        while True:
            begin = self.ex_iterable.state_dict() if state else None
            held, num_rows = [], 0
            while num_rows < size and (item := next(items, None)) is not None:
                held.append(item)
                num_rows += count(item)
            generator = np.random.default_rng([seed, block])
            is_kept = generator.random(num_rows) < 0.5
            now, later = np.flatnonzero(~is_kept), np.flatnonzero(is_kept)
            given = [*kept, *take(held, now)]
            order = generator.permutation(sum(map(count, given)))
            if block >= window:
                pieces = take(given, order)
                for number, piece in enumerate(pieces[num_given:], num_given + 1):
                    if state:
                        is_over = number == len(pieces)
                        state.update(
                            {"source": begin, "window": block + 1, "num_given": 0}
                            if is_over
                            else {"source": source, "window": block, "num_given": number}
                        )
                    yield piece
                num_given = 0
            if not held:
                return
            kept, source, block = take(held, later), begin, block + 1


def _take_rows(items: list[Any], numbers: np.ndarray) -> list[Any]:
    return [items[number] for number in numbers]


def _take_table(items: list[Any], numbers: np.ndarray) -> list[Any]:
    if not len(numbers):
        return []
    return [(items[-1][0], pa.concat_tables([table for _, table in items]).take(numbers))]


def with_window_shuffles(dataset: Any) -> Any:
    """Return a stream of `datasets` with its shuffle buffers replaced; it shares its epoch with the one given."""
    replaced = _replaced(dataset._ex_iterable)
    if replaced is not dataset._ex_iterable:
        dataset = copy.copy(dataset)
        dataset._ex_iterable = replaced
    return dataset


def _replaced(node: Any) -> Any:
    changes: dict[str, Any] = {}
    if (inner := getattr(node, "ex_iterable", None)) is not None and (new := _replaced(inner)) is not inner:
        changes["ex_iterable"] = new
    several = getattr(node, "ex_iterables", None) or []
    new_ones = [_replaced(each) for each in several]
    if any(new is not old for new, old in zip(new_ones, several, strict=True)):
        changes["ex_iterables"] = new_ones
    if changes:
        node = copy.copy(node)
        vars(node).update(changes)
    return WindowShuffle.like(node) if type(node) is BufferShuffledExamplesIterable else node
