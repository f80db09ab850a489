"""Rounds: pure functions from a stream of batches of indices to the batches that the shards take at each step.

A *round* is one global step: one batch for every shard. Everything here works on indices, so one round can be looked
ahead without reading a sample; that is how the last step and the padding of each step are known before it is yielded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

import torch

from accel_trainer.errors import ConfigError

_UINT64 = 2**64


def seed_for_epoch(seed: int, epoch: int) -> int:
    """Return the seed of an epoch's order: `seed + epoch`, inside the range that torch generators take."""
    value = seed + epoch
    return value if value < _UINT64 else value - _UINT64


def mix_seed(*parts: int) -> int:
    """Hash integers to one 63-bit seed, so that neighbouring parts give unrelated streams.

    The mixing steps are those of splitmix64 (https://prng.di.unimi.it/splitmix64.c).
    """
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) % _UINT64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % _UINT64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % _UINT64
        state ^= state >> 31
    return state >> 1


def permutation(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the shuffled order of an epoch: shape (num_samples,), a function of its arguments only.

    int32 where that holds the number of samples: `torch.randperm` draws the same order as int64 in half the time.
    """
    generator = torch.Generator().manual_seed(seed_for_epoch(seed, epoch))
    dtype = torch.int32 if num_samples <= torch.iinfo(torch.int32).max else torch.int64
    return torch.randperm(num_samples, generator=generator, dtype=dtype)


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Rows of one global step, shard by shard; every shard knows all of them."""

    rows: tuple[int, ...]
    """Valid rows of each shard's batch. They come first, and padding follows them."""
    sizes: tuple[int, ...]
    """Rows that each shard's batch really has, padding included."""
    is_last: bool = False
    """Whether this is the last step of the pass."""
    weights: tuple[float, ...] | None = None
    """Factors of the shards' means that are no function of their rows; None where they are. See `share_windows`."""

    @property
    def padded(self) -> bool:
        """Whether any shard's batch holds rows that repeat samples of another step."""
        return self.rows != self.sizes

    @property
    def is_even(self) -> bool:
        """Whether the batches of all shards have the same size."""
        return len(set(self.sizes)) <= 1

    @property
    def num_samples(self) -> int:
        """Valid rows over all shards."""
        return sum(self.rows)

    def weight(self, shard: int) -> float:
        """Factor of a shard's mean that makes the mean over shards the mean over all valid rows.

        1 where shards hold equally many rows, and where batches were filled up with repeated samples: a mean that a
        model has taken over those cannot be undone. 0 for a shard without data.
        """
        return self.weight_of_rows(shard) if self.weights is None else self.weights[shard]

    def weight_of_rows(self, shard: int) -> float:
        """Return `weight` as it is where it is one of rows."""
        rows = self.rows
        if rows.count(rows[0]) == len(rows) or any(
            0 < valid < size for valid, size in zip(rows, self.sizes, strict=True)
        ):
            return 1.0
        return rows[shard] * len(rows) / sum(rows)


@dataclass(frozen=True, slots=True)
class RoundRule:
    """How a stream of batches becomes rounds.

    One shard takes the batches as they come. With several, shard r takes batch r of every `shards` batches, or with
    `split` slice r of every batch. The other fields are about a last round for which there are too few batches.
    """

    shards: int
    batch_size: int | None
    """Size of a full batch of the stream; None where batches vary in size, or are no lists at all."""
    split: bool = False
    even: bool = True
    """Fill the last round with samples from the beginning of the stream (with whole batches where sizes vary)."""
    drop_last: bool = False
    """Leave out a last round in which not every shard has a batch, whatever the size of those of one's own sampler."""
    join: bool = True
    """Where `even` is off: give a shard without samples some that are not valid, so that every shard takes part in
    every step: two where another has as many, since a batch norm refuses one. Off, such a shard has no batch then."""
    is_batched: bool = True
    """Whether the stream is one of batches; off, as with `batch_size=None`, of keys: names and tuples are one row."""

    @property
    def batches_per_round(self) -> int:
        """Batches of the stream that one round takes."""
        return 1 if self.split else self.shards

    @property
    def batches_needed(self) -> int:
        """Batches without which a round is not taken."""
        return self.batches_per_round if self.drop_last else 1

    def is_key(self, batch: Any) -> bool:
        """Whether an item of the stream is one sample's key that has a length."""
        return not self.is_batched and isinstance(batch, (str, bytes, tuple))

    def count_rows(self, batch: Any) -> int:
        """Return the rows of a batch of indices. An index that is no list, as with `batch_size=None`, is one row."""
        try:
            return 1 if self.is_key(batch) else len(batch)
        except TypeError:
            return 1


Round = tuple[Sequence[Any], BatchRows]
"""One batch for every shard (None where a shard has none), and their rows."""


def check_can_split(batch_size: int | None, shards: int) -> None:
    """Refuse a batch size, unless it varies (None), whose batches the shards cannot share evenly."""
    if batch_size is not None and batch_size % shards:
        raise ConfigError(
            f"split_batches=True cuts each batch over {shards} processes, and batch_size={batch_size} is no round "
            f"multiple of {shards}; choose such a batch size, or split_batches=False"
        )


def plan_rounds(first: list[Any], rest: Iterable[Any], rule: RoundRule) -> Iterator[Round]:
    """Yield the rounds of a stream of batches. The stream is read one round ahead, never further.

    Args:
        first: the first `rule.batches_per_round` batches of the pass; padding comes from here.
        rest: the batches to deal out, those of `first` included unless the pass starts later.
    """
    if rule.shards == 1:
        yield from _alone(iter(rest), rule)
        return
    source = iter(rest)
    width = rule.batches_per_round
    upcoming = list(islice(source, width))
    previous: BatchRows | None = None
    goes_on = len(upcoming) >= rule.batches_needed
    while goes_on:
        current, upcoming = upcoming, list(islice(source, width))
        goes_on = len(upcoming) >= rule.batches_needed
        is_last = not goes_on
        if rule.split:
            mine, rows, sizes = _split(current[0], first, rule)
        elif len(current) == width and not (is_last and rule.even and not rule.drop_last):
            mine, rows = current, tuple(map(rule.count_rows, current))
            sizes = rows
        else:
            mine, rows, sizes = _complete(current, first, rule)
        # Nearly all steps of a pass hold the same: they share one object.
        if is_last or previous is None or previous.sizes != sizes or previous.rows != rows:
            previous = BatchRows(rows, sizes, is_last)
        yield mine, previous


def full_rounds(
    order: range | torch.Tensor, rule: RoundRule, shard: int, start: int
) -> Iterator[tuple[list[int], BatchRows]]:
    """Yield one shard's batches of the rounds that are full and not the last, from round `start` on.

    They are those of `plan_rounds`, at a cost that does not grow with the number of shards: the indices of the others
    are not looked at. One shard reads its own some thousand at once.
    """
    assert rule.batch_size is not None
    length = rule.batch_size // rule.shards if rule.split else rule.batch_size
    width = length * rule.shards
    rows = BatchRows((length,) * rule.shards, (length,) * rule.shards)
    if rule.shards == 1:
        for indices in index_lists(order[start * width : max(0, len(order) // width - 1) * width], width):
            for begin in range(0, len(indices), width):
                yield indices[begin : begin + width], rows
        return
    for begin in range(start * width + shard * length, (len(order) // width - 1) * width, width):
        piece = order[begin : begin + length]
        yield piece.tolist() if isinstance(piece, torch.Tensor) else list(piece), rows


@dataclass(frozen=True, slots=True)
class RanksLeft:
    """The ranks that a job goes on with after it has lost some, and the rounds that an update had before."""

    rounds_per_update: int
    num_ranks: int
    rank: int

    def num_steps(self, num_batches: int) -> int:
        """Return the steps in which so many batches of an update are shared out."""
        return -(-num_batches // self.num_ranks)


def share_windows(rounds: Iterable[Round], left: RanksLeft) -> Iterator[tuple[Any, BatchRows]]:
    """Yield one rank's batches of rounds that were planned for more shards than there are ranks left.

    The batches of an update's rounds stay as they are, and are dealt out in turn, in as few steps as it takes: a loss
    that is a mean over a batch, of its tokens for instance, is the one of before. Each weighs what it did in the
    update; ranks that have none in the last step get one of them once more, which counts nothing.
    """
    source = iter(rounds)
    while update := list(islice(source, left.rounds_per_update)):
        held = [
            (batch, rows.rows[shard], rows.sizes[shard], rows.weight(shard))
            for batches, rows in update
            for shard, batch in enumerate(batches)
        ]
        steps = left.num_steps(len(held))
        # Of a mean over the ranks that are left, and over the steps of the update.
        scale = left.num_ranks * steps / len(held)
        held += [(held[0][0], 0, held[0][2], 0.0)] * (steps * left.num_ranks - len(held))
        for step in range(steps):
            batches, valid, sizes, weights = zip(*held[step * left.num_ranks :][: left.num_ranks], strict=True)
            is_last = update[-1][1].is_last and step == steps - 1
            yield batches[left.rank], BatchRows(valid, sizes, is_last, tuple(weight * scale for weight in weights))


_END = object()


def _alone(source: Iterator[Any], rule: RoundRule) -> Iterator[Round]:
    """Yield the rounds of one shard: every batch as it comes."""
    upcoming = next(source, _END)
    rows = BatchRows((), ())
    size = -1
    while upcoming is not _END:
        current, upcoming = upcoming, next(source, _END)
        length = rule.count_rows(current)
        if length != size or upcoming is _END:
            size = length
            rows = BatchRows((size,), (size,), upcoming is _END)
        yield (current,), rows


_Filled = tuple[list[Any], tuple[int, ...], tuple[int, ...]]
"""Batches of all shards, their valid rows, their sizes."""


def _split(batch: Any, first: list[Any], rule: RoundRule) -> _Filled:
    """Return contiguous slices of one batch, the first shards served first when it is short."""
    piece = -(-max(len(batch), rule.batch_size or 0) // rule.shards)
    mine = [batch[shard * piece : (shard + 1) * piece] for shard in range(rule.shards)]
    rows = tuple(map(len, mine))
    if rows[-1] == piece:
        return mine, rows, rows
    return _fill(mine, rows, first, rule, piece)


def _complete(batches: list[Any], first: list[Any], rule: RoundRule) -> _Filled:
    """Return a last round of unsplit batches with a batch for every shard."""
    missing = rule.shards - len(batches)
    rows = (*map(rule.count_rows, batches), *(0,) * missing)
    if rule.even and rule.batch_size is None:
        mine = [*batches, *islice(cycle(first), missing)]
        return mine, rows, tuple(map(rule.count_rows, mine))
    return _fill([*batches, *([],) * missing], rows, first, rule, rule.batch_size or 0)


def _fill(mine: list[Any], rows: tuple[int, ...], first: list[Any], rule: RoundRule, target: int) -> _Filled:
    if rule.even:
        # Consecutive shards continue the same cycle, so that a sample is repeated as rarely as possible.
        spare = cycle(list(chain.from_iterable(first)))
        mine = [[*batch, *islice(spare, max(0, target - len(batch)))] for batch in mine]
    else:
        lent = _lent_samples(first[0], min(2, max(rows)), rule) if rule.join else None
        mine = [batch if count else lent for batch, count in zip(mine, rows, strict=True)]
    return mine, rows, tuple(0 if batch is None else rule.count_rows(batch) for batch in mine)


def _lent_samples(batch: Any, count: int, rule: RoundRule) -> Any:
    try:
        return batch if rule.is_key(batch) else batch[:count]
    except TypeError:
        return batch


_INDICES_AT_ONCE = 4096  # 50 us for tolist()


def index_lists(order: range | torch.Tensor, multiple_of: int = 1) -> Iterator[list[int]]:
    """Yield an order as lists of some thousand indices: as one list, a million of them takes longer than a step."""
    size = max(1, _INDICES_AT_ONCE // multiple_of) * multiple_of
    for begin in range(0, len(order), size):
        piece = order[begin : begin + size]
        yield piece.tolist() if isinstance(piece, torch.Tensor) else list(piece)


def batch_indices(order: range | torch.Tensor, batch_size: int, drop_last: bool, start: int = 0) -> Iterator[list[int]]:
    """Yield the batches of an order of samples from batch `start` on, at the same cost for any `start`."""
    if drop_last:
        order = order[: len(order) // batch_size * batch_size]
    for indices in index_lists(order[start * batch_size :], batch_size):
        for begin in range(0, len(indices), batch_size):
            yield indices[begin : begin + batch_size]
