"""Odd batches and datasets: in a loop over a prepared loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from tests.odd.loop import Loop, odd
from tests.odd.models import Net, sgd, square

ROWS = 14
"""Three whole steps of 4 rows and one of 2; of 4 ranks, two have none of the last."""


def rows(number: int = ROWS) -> list[Tensor]:
    return list(torch.randn(number, 4, generator=torch.Generator().manual_seed(3)))


def epoch(
    loop: Loop,
    data: Any,
    take: Callable[[Any], Tensor] = lambda batch: batch,
    per_step: int = 4,
    **options: Any,
) -> None:
    """Train an epoch with a loss that is the mean over the rows of a step; note all rows and keep the weights."""
    model = Net()
    model, optimizer = loop.prepare(model, sgd(model))
    for batch in loop.loader(data, per_step, **options):
        x = take(batch)
        loop.backward(square(model(x)))
        optimizer.step()
        optimizer.zero_grad()
        loop.noted.append(loop.gather(x))
    loop.keep(model)


class Named(NamedTuple):
    """A batch."""

    x: Any
    label: Any = None


@dataclass
class Data:
    """A batch."""

    x: Any
    name: str = ""


class Own:
    """A batch that only its own methods move."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: Any, non_blocking: bool = False) -> Own:
        return Own(self.x.to(device))


def _batch(
    title: str, name: str, collate: Callable[[list[Tensor]], Any], take: Callable[[Any], Tensor], **refused: str
) -> None:
    def run(loop: Loop) -> None:
        epoch(loop, rows(), take, collate_fn=collate)

    run.__name__ = name
    odd(title, **refused)(run)


stack = torch.stack
_batch(
    "batches that are dicts of dicts, lists and text",
    "dict_batch",
    lambda r: {"in": {"x": [stack(r)]}, "id": ["a"] * len(r)},
    lambda b: b["in"]["x"][0],
)
_batch("a batch that is a namedtuple", "named_batch", lambda r: Named(stack(r)), lambda b: b.x)
_batch("a batch that is a dataclass", "data_batch", lambda r: Data(stack(r), "text"), lambda b: b.x)
_batch("a batch of a class with a .to of its own", "own_batch", lambda r: Own(stack(r)), lambda b: b.x)
_batch(
    "a batch with None and numbers of no dimension in it",
    "none_batch",
    lambda r: (None, stack(r), torch.tensor(2.0), 3),
    lambda b: b[1],
)
_batch("a batch that is a list of tensors of any length", "ragged_batch", list, lambda b: stack(b))


@odd("samples that a collator leaves out (None)")
def left_out(loop: Loop) -> None:
    found: list[Any] = rows(12)
    found[1] = found[6] = None
    model = Net()
    model, optimizer = loop.prepare(model, sgd(model))
    for batch in loop.loader(found, collate_fn=lambda r: [x for x in r if x is not None]):
        # A mean over all rows of the step, of which a rank may have none.
        loss = model(torch.stack([*batch]) if batch else torch.zeros(0, 4)).square().mean(1).sum() / 4
        loop.backward(loss * loop.world_size)
        optimizer.step()
        optimizer.zero_grad()
    loop.keep(model)


@odd("a loader without batches of its own (batch_size=None)")
def unbatched(loop: Loop) -> None:
    model = Net()
    model, optimizer = loop.prepare(model, sgd(model))
    found = torch.stack(rows(12)).view(-1, 4 // loop.world_size, 4)
    loader = loop.prepare(torch.utils.data.DataLoader(found, batch_size=None))
    for x in loader:
        loop.backward(square(model(x)))
        optimizer.step()
        optimizer.zero_grad()
    loop.keep(model)


@odd("a batch sampler of batches of several sizes")
def own_batches(loop: Loop) -> None:
    sizes = (4, 8, 4)
    batches, begin = [], 0
    for size in sizes:
        for part in torch.arange(begin, begin + size).chunk(loop.world_size):
            batches.append(part.tolist())
        begin += size
    model = Net()
    model, optimizer = loop.prepare(model, sgd(model))
    for x in loop.prepare(torch.utils.data.DataLoader(rows(16), batch_sampler=batches)):
        loop.backward(square(model(x)))
        optimizer.step()
        optimizer.zero_grad()
        loop.noted.append(loop.gather(x))
    loop.keep(model)


@odd("fewer samples than ranks: others have none")
def one_sample(loop: Loop) -> None:
    epoch(loop, rows(1))


@odd("a dataset without samples", all="the dataset has 0 samples")
def no_samples(loop: Loop) -> None:
    epoch(loop, rows(0))


@odd("a short last step is dropped (drop_last)")
def dropped(loop: Loop) -> None:
    epoch(loop, rows(), drop_last=True)


@odd("a Subset in an order of its own")
def subset(loop: Loop) -> None:
    epoch(loop, Subset(rows(20), [3, 19, 0, 7, 7, 2]))


@odd("a dataset with __getitems__, read by two workers")
def many_items(loop: Loop) -> None:
    class Many(Dataset):
        found = rows()

        def __len__(self) -> int:
            return len(self.found)

        def __getitem__(self, index: int) -> Tensor:
            raise AssertionError("read one by one")

        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            return [self.found[index] for index in indices]

    epoch(loop, Many(), num_workers=2)


class Stream(IterableDataset):
    """Yields rows; on no two ranks alike many, where it `differs`."""

    is_sharded_by_rank = False

    def __init__(self, number: int = ROWS) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Tensor]:
        yield from rows(self.number)


@odd("a generator's rows (IterableDataset)")
def generator(loop: Loop) -> None:
    epoch(loop, Stream())


@odd("a stream of fewer samples than ranks")
def short_stream(loop: Loop) -> None:
    epoch(loop, Stream(1))


@odd("a stream without samples")
def empty_stream(loop: Loop) -> None:
    epoch(loop, Stream(0))


@odd("a stream without an end, left by break")
def endless(loop: Loop) -> None:
    class Endless(IterableDataset):
        def __iter__(self) -> Iterator[Tensor]:
            while True:
                yield from rows()

    model = Net()
    model, optimizer = loop.prepare(model, sgd(model))
    for step, x in enumerate(loop.loader(Endless())):
        loop.backward(square(model(x)))
        optimizer.step()
        optimizer.zero_grad()
        loop.noted.append(loop.gather(x))
        if step == 4:
            break
    loop.keep(model)


@odd("streams of unequal length, each rank's its own")
def unequal_streams(loop: Loop) -> None:
    class Part(IterableDataset):
        is_sharded_by_rank = True

        def __iter__(self) -> Iterator[Tensor]:
            # Rank r of n has rows r, r + n, ... of the first 14, so that steps hold 4 rows, and the last one 2.
            yield from rows()[loop.rank :: loop.world_size]

    model = Net()
    model, optimizer = loop.prepare(model, sgd(model))
    for x in loop.loader(Part()):
        loop.backward(square(model(x)))
        optimizer.step()
        optimizer.zero_grad()
        loop.noted.append(sorted(loop.gather(x)))
    loop.keep(model)


@odd("two loaders zipped, of unequal length")
def zipped(loop: Loop) -> None:
    model = Net()
    model, optimizer = loop.prepare(model, sgd(model))
    for x, y in zip(loop.loader(rows(20)), loop.loader(rows(12)), strict=False):
        loop.backward(square(model(x)) + square(model(y) - 1))
        optimizer.step()
        optimizer.zero_grad()
    loop.keep(model)


@odd("two epochs of a loader left by break in the first")
def left_early(loop: Loop) -> None:
    model = Net()
    model, optimizer = loop.prepare(model, sgd(model))
    loader = loop.loader(rows())
    for stop in (2, 100):
        for step, x in enumerate(loader):
            if step == stop:
                break
            loop.backward(square(model(x)))
            optimizer.step()
            optimizer.zero_grad()
            loop.noted.append(loop.gather(x))
    loop.keep(model)
