"""A shuffled loader with a generator of its own has the order of plain PyTorch, on all ranks and after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch import Generator
from torch.utils.data import DataLoader, RandomSampler

from accel_trainer import Accelerator
from accel_trainer.data import PreparedDataLoader, SeedableRandomSampler, skip_first_batches
from accel_trainer.errors import IncompatibleCheckpointError
from tests.number_sets import Numbers, prepare
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")

SAMPLES = 13


def build(generator: Generator, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(SAMPLES), batch_size, shuffle=True, generator=generator, **options)


def by_sampler(generator: Generator) -> DataLoader[Any]:
    return DataLoader(Numbers(SAMPLES), 4, sampler=RandomSampler(range(SAMPLES), generator=generator))


def one_by_one(generator: Generator) -> DataLoader[Any]:
    return DataLoader(Numbers(SAMPLES), None, shuffle=True, generator=generator)


def indices(loader: Any) -> list[int]:
    return [index for batch in loader for index in torch.as_tensor(batch).flatten().tolist()]


def seeded_passes(generator: Generator, loader: Any) -> list[Any]:
    """Return the orders of passes, and what the streams are after them; seed again, also alike, in between."""
    torch.manual_seed(5)
    found: list[Any] = []
    for seed in (42, None, 42, 7, None):
        if seed is not None:
            generator.manual_seed(seed)
        found += [indices(loader), generator.get_state().tolist(), torch.rand(()).item()]
    torch.rand(1, generator=generator)  # somebody else's draw
    return [*found, indices(loader)]


@pytest.mark.parametrize("seedable", [True, False])
@pytest.mark.parametrize("kind", [build, by_sampler, one_by_one])
def test_the_order_is_that_of_plain_pytorch(kind: Callable[[Generator], DataLoader[Any]], seedable: bool) -> None:
    plain, own = Generator(), Generator()
    expected = seeded_passes(plain, kind(plain))
    loader = prepare(kind(own), use_seedable_sampler=seedable)
    assert isinstance(loader, PreparedDataLoader)
    assert seeded_passes(own, loader) == expected


@pytest.mark.parametrize("persistent", [False, True])
def test_the_order_with_workers_is_that_of_plain_pytorch(persistent: bool) -> None:
    plain, own = Generator(), Generator()
    options = {"num_workers": 1, "persistent_workers": persistent}
    loaders = build(plain, **options), prepare(build(own, **options))
    for seed in (42, None, 42, None):
        if seed is not None:
            plain.manual_seed(seed)
            own.manual_seed(seed)
        assert indices(loaders[1]) == indices(loaders[0])


def plain_order(seed: int, passed: int) -> list[int]:
    """Return the order of a pass that begins after so many others since the generator was seeded."""
    loader = build(Generator().manual_seed(seed))
    for _ in range(passed):
        indices(loader)
    return indices(loader)


def test_set_epoch_chooses_the_order_that_that_pass_has() -> None:
    loader = prepare(build(Generator().manual_seed(3)))
    for epoch in (4, 1, 0):
        loader.set_epoch(epoch)
        assert indices(loader) == plain_order(3, epoch)
        assert loader.epoch == epoch + 1
    assert indices(loader) == plain_order(3, 1)


def test_a_pass_that_is_left_early_begins_again_with_its_order() -> None:
    loader = prepare(build(Generator().manual_seed(3)))
    assert indices(islice(loader, 2)) == plain_order(3, 0)[:8]
    assert indices(loader) == plain_order(3, 0)
    assert indices(loader) == plain_order(3, 1)


def test_skipped_batches_are_those_of_the_order_seeded_last() -> None:
    generator = Generator().manual_seed(3)
    loader = prepare(build(generator))
    indices(loader)
    generator.manual_seed(9)
    assert indices(skip_first_batches(loader, 2)) == plain_order(9, 0)[8:]
    assert indices(loader) == plain_order(9, 1)


@pytest.mark.parametrize("steps", [2, 4])
def test_a_resumed_pass_is_the_interrupted_one_whatever_the_generator_is_seeded_with(steps: int) -> None:
    generator = Generator().manual_seed(3)
    loader = prepare(build(generator))
    indices(loader)
    generator.manual_seed(8)
    indices(loader)
    passing = iter(loader)
    for _ in range(steps):
        next(passing)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = indices(passing)
    following = indices(loader)

    again = prepare(build(Generator().manual_seed(77)))
    again.load_state_dict(state)
    # The last batch of the epoch leaves an empty pass.
    assert [indices(again), indices(again)] == [rest, following]
    noted = prepare(build(Generator().manual_seed(77)))
    noted.note_state_dict(state)
    if steps == 4:
        assert indices(noted) == following
    else:
        assert [indices(skip_first_batches(noted, steps)), indices(noted)] == [rest, following]


def test_a_state_of_a_loader_without_the_generator_is_refused_and_the_other_way_round() -> None:
    own, without = prepare(build(Generator())), prepare(DataLoader(Numbers(SAMPLES), 4, shuffle=True))
    with pytest.raises(IncompatibleCheckpointError, match=r"of a loader with a generator .* this one has no generator"):
        without.load_state_dict(own.state_dict())
    with pytest.raises(IncompatibleCheckpointError, match=r"of a loader without a generator .* one has a generator"):
        own.load_state_dict(without.state_dict())
    own.load_state_dict({"epoch": 1})
    assert indices(own) == plain_order(Generator().initial_seed(), 1)


def passes_of_rank(rank_seed: int, dispatch: bool) -> Any:
    accelerator = Accelerator(config={"use_cpu": True, "data": {"dispatch_batches": dispatch}})
    generator = Generator()
    loader = accelerator.prepare(build(generator, batch_size=2))
    found = []
    for seed in (42, None, 7):
        if seed is not None:
            # Only rank 0 is what the order follows.
            generator.manual_seed(seed + accelerator.process_index * rank_seed)
        found.append([batch.tolist() for batch in loader])
    return found, generator.get_state()


def pass_by_torchs_seed() -> list[Any]:
    """Shuffle by torch's seed, once streams of ranks are their own."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(4 + accelerator.process_index)
    sampler = SeedableRandomSampler(range(SAMPLES))
    loader = accelerator.prepare(DataLoader(Numbers(SAMPLES), 2, sampler=sampler))
    return [batch.tolist() for batch in loader]


@pytest.mark.multirank
def test_a_shuffle_by_torchs_seed_has_that_of_rank_0_on_all_ranks() -> None:
    dealt = chain.from_iterable(chain.from_iterable(zip(*run_ranks(pass_by_torchs_seed, 2), strict=True)))
    assert list(dealt)[:SAMPLES] == list(SeedableRandomSampler(range(SAMPLES), 4))


@pytest.mark.multirank
@pytest.mark.parametrize("dispatch", [False, True])
def test_all_ranks_follow_rank_0(dispatch: bool) -> None:
    (first, state), (second, other) = run_ranks(passes_of_rank, 2, 1000, dispatch)
    for one, two, (seed, passed) in zip(first, second, [(42, 0), (42, 1), (7, 0)], strict=True):
        dealt = list(chain.from_iterable(chain.from_iterable(zip(one, two, strict=True))))
        assert dealt[:SAMPLES] == plain_order(seed, passed)
    if not dispatch:
        assert torch.equal(state, other)
