"""Samplers: an order that depends on seed and epoch alone, and a shard of any batch sampler."""

from __future__ import annotations

import base64
import copy
from collections import deque
from collections.abc import Iterator, Sized
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_trainer.data.plan import (
    BatchRows,
    RanksLeft,
    RoundRule,
    batch_indices,
    check_can_split,
    full_rounds,
    index_lists,
    permutation,
    plan_rounds,
    seed_for_epoch,
    share_windows,
)
from accel_trainer.data.randomness import draw_alike
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from accel_trainer.runtime.collectives import broadcast_object
from accel_trainer.runtime.process import ProcessContext

_NESTED = ("batch_sampler", "sampler")
_NESTED_LIST = "batch_samplers"  # of sentence-transformers' samplers over several datasets
_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class SeedableRandomSampler(RandomSampler):
    """Shuffle by seed and epoch: the order is `torch.randperm` of a generator seeded with `seed + epoch`.

    The epoch advances by one after each full pass; `set_epoch` overrides it.
    """

    def __init__(
        self,
        data_source: Sized,
        seed: int | None = None,
        epoch: int = 0,
        *,
        data_seed: int | None = None,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Shuffle by `seed`, alike on every rank; if None by `data_seed` (accelerate's name), or torch's of rank 0.

        accelerate's calls give it `generator`, whose state decides nothing there either, and all of `num_samples`.

        Raises:
            ConfigError: `num_samples` is not the length of `data_source`.
        """
        if num_samples not in (None, len(data_source)):
            raise ConfigError(
                f"SeedableRandomSampler(num_samples={num_samples}) of {len(data_source)} samples: an epoch has each of "
                "them once; leave num_samples out, or shuffle with torch's RandomSampler"
            )
        super().__init__(data_source)
        given = data_seed if seed is None else seed
        self.seed = torch.initial_seed() if given is None else given
        self.has_torch_seed = given is None
        self.epoch = epoch

    @property
    def order(self) -> torch.Tensor:
        """The order of the present epoch: int32 or int64, one entry for each sample."""
        return permutation(len(self.data_source), self.seed, self.epoch)

    def __iter__(self) -> Iterator[int]:
        for indices in index_lists(self.order):
            yield from indices
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next pass takes."""
        self.epoch = epoch


class GeneratorRandomSampler(SeedableRandomSampler):
    """Shuffle by a generator of the user's as torch's loader does: by its state when a pass begins, rank 0's for all.

    From the state that was found last, those of later epochs follow by the draws of full passes: an order depends on
    that state and the epoch alone, and needs no pass before it.
    """

    def __init__(
        self,
        data_source: Sized,
        generator: torch.Generator,
        state: Tensor,
        *,
        draws_seed: bool,
        keeps_workers: bool = False,
    ) -> None:
        """`state` is that of rank 0's generator; `draws_seed`, whether a pass of the loader draws a seed from it.

        One whose workers live on draws it in the first epoch alone.
        """
        super().__init__(data_source, generator.initial_seed())
        self.generator = generator
        self.draws_seed = draws_seed
        self._keeps_workers = keeps_workers
        self._states = {0: state}
        """At the beginning of epochs: where the state was found, and of those reached since."""
        self._left = generator.get_state()
        self._is_loaded = False

    @property
    def order(self) -> Tensor:
        """The order of the present epoch: int64, one entry for each sample."""
        return self._draw(self.epoch, self._state_at(self.epoch))[0]

    def take(self, process: ProcessContext | None) -> None:
        """Take the generator as it is at the beginning of a pass, and leave it as after the pass.

        Collective: rank 0's counts; `process` of None is a rank that reads for all.
        """
        generator: Any = self.generator
        now = generator.get_state()
        # In an epoch that was loaded, its own state decides.
        found = None if self._is_loaded or torch.equal(now, self._left) else now
        if process is not None:
            found = broadcast_object(found, process)
        if found is not None:
            self._states = {self.epoch: found}
        self._is_loaded = False
        self._left = self._state_at(self.epoch + 1)
        generator.set_state(self._left)

    def saved_at(self, epoch: int) -> list[Any]:
        """Return an epoch, and the generator's state at its beginning in base64 (6,744 characters)."""
        return [epoch, base64.b64encode(self._state_at(epoch).numpy().tobytes()).decode()]

    def load(self, saved: list[Any]) -> None:
        """Take the result of `saved_at`."""
        self._states = {saved[0]: torch.frombuffer(bytearray(base64.b64decode(saved[1])), dtype=torch.uint8)}
        self._is_loaded = True

    def _state_at(self, epoch: int) -> Tensor:
        reached = max((known for known in self._states if known <= epoch), default=min(self._states))
        for passed in range(reached, epoch):
            self._states[passed + 1] = self._draw(passed, self._states[passed])[1]
        return self._states[max(reached, epoch)]

    def _draw(self, epoch: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the order of an epoch that begins with `state`, and the state after it, as torch's RandomSampler."""
        generator = torch.Generator()
        generator.set_state(state)
        if self.draws_seed and not (self._keeps_workers and epoch):
            torch.empty((), dtype=torch.int64).random_(generator=generator)
        count = len(self.data_source)
        order = torch.randperm(count, generator=generator)
        torch.randperm(count, generator=generator)  # torch 2.11 to 2.15 draw for a rest of no samples, too
        return order, generator.get_state()


class ShardedBatchSampler(Sampler[Any]):
    """One shard of a batch sampler: every `num_processes`-th batch, or a slice of every batch.

    `num_processes` and `process_index` are read when a pass begins, so they can be changed between passes.

    Args:
        batch_sampler: yields lists of indices; kept as it is under the same name. With a loader's `batch_size=None` it
            is the loader's sampler, whose items are passed on as they are.
        process_index: the shard to yield; None yields the batches of all processes, one after the other.
        even_batches: fill the last round from the beginning of the pass, so that every shard takes the same steps.
        join: with `even_batches=False`, give a shard that has no samples left one or two which `BatchRows` declares
            invalid; off, that shard's pass ends one step earlier.
        seed: seeds the samplers that draw random numbers, the same on every shard; None leaves them as they are.
        is_batched: off for a loader's sampler, whose items may be names or tuples.

    Raises:
        ConfigError: `split_batches` with a batch size that the shards cannot share evenly.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int | None = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        *,
        join: bool = False,
        seed: int | None = None,
        is_batched: bool = True,
    ) -> None:
        if split_batches:
            check_can_split(getattr(batch_sampler, "batch_size", None), num_processes)
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.join = join
        self.seed = seed
        self.is_batched = is_batched
        self.start = 0
        self.num_ahead = 0
        self.left: RanksLeft | None = None
        """Ranks among which all shards' batches are shared out, where the job has fewer ranks than shards by now."""
        self.began_at = (0, 0)
        """Samples and steps of the epoch that the pass begun last left out, over all shards."""
        self.planned: deque[BatchRows] = deque()
        """Rows of the batches whose indices the pass begun last has handed out; readers take them from the left."""
        self._origin: tuple[int, int] | None = None
        self._clock = SimpleNamespace(epoch=0)  # shared with copies that begin elsewhere

    @property
    def batch_size(self) -> int | None:
        """Size of the batches that are shared out; None where they vary."""
        return getattr(self.batch_sampler, "batch_size", None)

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last round is left out."""
        return bool(getattr(self.batch_sampler, "drop_last", False))

    @property
    def rule(self) -> RoundRule:
        """How batches become rounds, from the present attributes."""
        return RoundRule(
            shards=self.num_processes,
            batch_size=self.batch_size,
            split=self.split_batches,
            even=self.even_batches,
            drop_last=self.drop_last,
            join=self.join,
            is_batched=self.is_batched,
        )

    @property
    def epoch(self) -> int:
        """The epoch of the next pass: that of the sampler which decides the order, where it has one."""
        for node in _chain(self.batch_sampler):
            epoch = getattr(node, "epoch", None)
            if isinstance(epoch, int) and callable(getattr(node, "set_epoch", None)):
                return epoch
        return int(self._clock.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, here and in every sampler below."""
        self._clock.epoch = epoch
        for node in _chain(self.batch_sampler):
            if callable(getattr(node, "set_epoch", None)):
                node.set_epoch(epoch)

    def starting_at(self, step: int) -> ShardedBatchSampler:
        """Return this sampler with its next passes beginning at `step`; epoch and samplers stay shared."""
        moved = copy.copy(self)
        moved.begin_at(step)
        return moved

    def indices_at(self, epoch: int, step: int) -> list[int] | None:
        """Return the dataset's indices in this shard's batch at a step of a full pass; None where only a pass tells.

        Known of the orders of `shuffle=True` and `False`, and not of the epoch that was gone on with at a sample.
        """
        moved, base = copy.copy(self), copy.copy(self.batch_sampler)
        if type(base) is BatchSampler and isinstance(base.sampler, SeedableRandomSampler):
            base.sampler = copy.copy(base.sampler)
            base.sampler.epoch = epoch
        if _known_order(base) is None or self.process_index is None or (self._origin and self._origin[0] == epoch):
            return None
        moved.batch_sampler, moved._clock, moved.num_ahead = base, SimpleNamespace(epoch=epoch), 0
        moved.begin_at(step)
        return next(iter(moved), None)

    @property
    def counts_samples(self) -> bool:
        """Whether a pass can begin at any sample; else only where a batch of the user's batch sampler begins."""
        return type(self.batch_sampler) is BatchSampler

    def origin_of(self, num_samples: int) -> int:
        """Return the origin that leaves out the first samples of the present epoch."""
        if self.counts_samples or not num_samples:
            return num_samples
        found = num_batches = 0
        batches, rule = self._draw(self.batch_sampler), self.rule
        while found < num_samples and (batch := next(batches, None)) is not None:
            found += rule.count_rows(batch)
            num_batches += 1
        if found != num_samples:
            raise IncompatibleCheckpointError(
                f"the state was saved after {num_samples} samples, and {num_batches} batches of this loader's "
                f"{type(self.batch_sampler).__name__} have {found}: it cannot begin within a batch. Use the batch "
                "sizes that it was saved with"
            )
        return num_batches

    @property
    def origin(self) -> int:
        """Samples, or batches of the user's own batch sampler, left out at the beginning of the next pass."""
        return self._origin[1] if self._origin is not None and self._origin[0] == self.epoch else 0

    def begin_at(self, step: int, origin: tuple[int, int] | None = None) -> None:
        """Begin the next passes at `step`; in the epoch `origin[0]`, `origin[1]` samples or batches later."""
        self.start, self._origin = step, origin

    @property
    def shuffle(self) -> Any:
        """The sampler below the batches."""
        return getattr(self.batch_sampler, "sampler", self.batch_sampler)

    @property
    def order_seed(self) -> int | None:
        """The seed of the order; None where samplers are left as they are."""
        shuffle = self.shuffle
        return shuffle.seed if isinstance(shuffle, SeedableRandomSampler) else self.seed

    @order_seed.setter
    def order_seed(self, seed: int | None) -> None:
        shuffle = self.shuffle
        if isinstance(shuffle, SeedableRandomSampler) and seed is not None:
            shuffle.seed = seed
        self.seed = None if self.seed is None else seed

    def __iter__(self) -> Iterator[Any]:
        self.planned = planned = deque[BatchRows]()
        batches = self._shard(planned)
        return _LastHeldBack(batches, planned, self.num_ahead) if self.num_ahead else batches

    def _shard(self, planned: deque[BatchRows]) -> Iterator[Any]:
        rule, shard, start = self.rule, self.process_index, self.start
        first, rest, order = self._batches(rule.batches_per_round)
        if self.left is not None:
            for mine, rows in share_windows(plan_rounds(first, rest, rule), self.left):
                planned.append(rows)
                yield mine
            return
        if order is not None and shard is not None:
            for mine, rows in full_rounds(order, rule, shard, start):
                start += 1
                planned.append(rows)
                yield mine
            rest = batch_indices(order, self.batch_sampler.batch_size, self.drop_last, start * rule.batches_per_round)
        for batches, rows in plan_rounds(first, rest, rule):
            if shard is None:
                planned.append(rows)
                yield from batches
            elif (mine := batches[shard]) is not None:
                planned.append(rows)
                yield mine

    def _batches(self, width: int) -> tuple[list[Any], Iterator[Any], range | torch.Tensor | None]:
        """Return the first round's batches, the batches from where the pass begins on, and their order, if known."""
        base, origin, skip = self.batch_sampler, self.origin, self.start * width
        order = _known_order(base)
        if order is not None:
            size, drop_last = base.batch_size, base.drop_last
            self.began_at = (origin + skip * size, self.start)
            first = list(batch_indices(order[: width * size], size, drop_last))
            return first, batch_indices(order[origin:], size, drop_last, skip), order[origin:]
        if origin and self.counts_samples:
            # The rest is batched anew, whatever the size was before.
            size, drop_last = base.batch_size, self.drop_last
            self.began_at = (origin + skip * size, self.start)
            drawn = self._draw(BatchSampler(base.sampler, size, drop_last=False))
            first = list(islice(drawn, width))
            indices = islice(chain.from_iterable(chain(first, drawn)), origin, None)
            return first, islice(BatchSampler(indices, size, drop_last), skip, None), None
        source = self._draw(base)
        first = list(islice(source, width))
        rest = chain(first, source)
        samples = sum(map(self.rule.count_rows, islice(rest, origin + skip)))
        self.began_at = (samples, self.start)
        return first, rest, None

    def _draw(self, sampler: Any) -> Iterator[Any]:
        """Iterate a sampler, or a batch sampler, its randomness seeded alike on every shard."""
        if self.seed is None:
            return iter(sampler)
        seed = seed_for_epoch(self.seed, self.epoch)
        seeded, is_fixed = _seeded(sampler, seed)
        if is_fixed:
            return iter(seeded)
        # No generator to seed: a sampler of one's own may draw from the global streams, which differ between ranks.
        return draw_alike(seeded, seed)

    def __len__(self) -> int:
        rule, base, origin = self.rule, self.batch_sampler, self.origin
        if origin and self.counts_samples:
            left = max(0, len(base.sampler) - origin)
            num_batches = left // base.batch_size if base.drop_last else -(-left // base.batch_size)
        else:
            num_batches = max(0, len(base) - origin)
        full, extra = divmod(num_batches, rule.batches_per_round)
        if rule.drop_last:
            extra = 0
        elif rule.even or rule.join:
            extra = min(1, extra)
        else:
            extra = int((self.process_index or 0) < extra)
        num_rounds = max(0, full + extra - self.start)
        if self.left is None:
            return num_rounds
        updates, rest = divmod(num_rounds, self.left.rounds_per_update)
        per_round = self.num_processes
        return updates * self.left.num_steps(per_round * self.left.rounds_per_update) + self.left.num_steps(
            per_round * rest
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "planned": deque()}


class _LastHeldBack:
    """Batches for a loader that takes them as its workers finish (`in_order=False`): the last one stays last.

    All batches but the last hold the same, so any order of them fits the plan. Such a loader asks `num_ahead` times
    when a pass begins, then once for each batch that comes back; after a StopIteration it asks again.
    """

    def __init__(self, batches: Iterator[Any], planned: deque[BatchRows], num_ahead: int) -> None:
        self._batches = batches
        self._planned = planned
        self._came_back = -num_ahead
        self._given = 0
        self._last: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._came_back += 1
        if not self._last:
            batch = next(self._batches)
            if not self._planned[-1].is_last:
                self._given += 1
                return batch
            self._last = [batch]
        if self._given and self._came_back < self._given:
            raise StopIteration
        return self._last.pop()


def _known_order(batch_sampler: Any) -> range | torch.Tensor | None:
    """Return the order of samples, where the sampler's class gives it without being iterated."""
    if type(batch_sampler) is not BatchSampler:
        return None
    sampler = batch_sampler.sampler
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if type(sampler) is SeedableRandomSampler or type(sampler) is GeneratorRandomSampler:
        return sampler.order
    return None


def find_generator(sampler: Any) -> torch.Generator | None:
    """Return the generator that the user gave to a sampler or to one it wraps."""
    generators = (getattr(node, "generator", None) for node in _chain(sampler))
    return next((generator for generator in generators if isinstance(generator, torch.Generator)), None)


def find_replicated(sampler: Any) -> Any:
    """Return the sampler, or one that it wraps, that draws one shard of several ranks; None where none does."""
    return next((node for node in _chain(sampler) if num_shares(node) > 1), None)


def num_shares(sampler: Any) -> int:
    """Return over how many ranks a sampler shares out its samples, by torch's name or accelerate's."""
    counts = (getattr(sampler, name, None) for name in ("num_replicas", "num_processes"))
    return next((count for count in counts if isinstance(count, int)), 1)


def _seeded(sampler: Any, seed: int, fresh: dict[int, torch.Generator] | None = None) -> tuple[Any, bool]:
    """Return a copy of a sampler with generators seeded anew (`fresh`: by id), and whether that fixes its order."""
    fresh = {} if fresh is None else fresh
    changed: dict[str, Any] = {}
    generator = getattr(sampler, "generator", None)
    # Without one, torch's samplers shuffle all the same. What others do then is theirs, as one of another library is.
    if isinstance(generator, torch.Generator) or (generator is None and isinstance(sampler, _DRAWING)):
        changed["generator"] = fresh.setdefault(id(generator), torch.Generator().manual_seed(seed))
    elif isinstance(sampler, (SequentialSampler, SeedableRandomSampler, list, tuple, range)):
        return sampler, True
    is_own_fixed = bool(changed) or type(sampler) is BatchSampler
    nested, are_fixed = _seeded_inside(sampler, seed, fresh)
    changed |= nested
    if not changed:
        return sampler, is_own_fixed and are_fixed
    seeded = copy.copy(sampler)
    try:
        for name, value in changed.items():
            setattr(seeded, name, value)
    except AttributeError:  # a property without a setter
        return sampler, False
    return seeded, is_own_fixed and are_fixed


def _seeded_inside(sampler: Any, seed: int, fresh: dict[int, torch.Generator]) -> tuple[dict[str, Any], bool]:
    """Return the attribute of a sampler with those that it wraps, as copies; and whether that fixes their order."""
    for name in (*_NESTED, _NESTED_LIST):
        inner = getattr(sampler, name, None)
        if inner is None or inner is sampler:
            continue
        parts = [_seeded(part, seed, fresh) for part in (inner if name == _NESTED_LIST else [inner])]
        copies = [part for part, _ in parts]
        # Some keep their dataset under this name.
        are_fixed = all(fixed or not isinstance(part, Sampler) for part, fixed in parts)
        return {name: copies if name == _NESTED_LIST else copies[0]}, are_fixed
    return {}, True


def _chain(node: Any) -> Iterator[Any]:
    """Yield a sampler and, one inside the other, the samplers it wraps."""
    seen: set[int] = set()
    while node is not None and id(node) not in seen:
        seen.add(id(node))
        yield node
        node = next((inner for name in _NESTED if (inner := getattr(node, name, None)) is not None), None)
