"""Random streams: seeding, and states that come back from a checkpoint."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from accel_trainer.errors import ConfigError
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.rng import (
    KeptStreams,
    OwnDraws,
    get_rng_state,
    seed_own_streams,
    set_rng_state,
    set_seed,
    stream_index,
)


@pytest.fixture(autouse=True)
def own_streams() -> Iterator[None]:
    state = get_rng_state()
    yield
    torch.use_deterministic_algorithms(False)
    set_seed(0, device_specific=True, rank=0)  # no seed is left in common
    set_rng_state(state)


def rank(number: int) -> ProcessContext:
    return ProcessContext(number, number, 4, 4, torch.device("cpu"), "gloo")


def draw() -> tuple[Any, ...]:
    """Draw from every stream, Gaussian numbers included: those keep one for later."""
    ours = random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.normal())
    return *ours, torch.rand(3).tolist(), torch.randn(1).item()


def drawn_after(seed: int, **options: Any) -> tuple[Any, ...]:
    set_seed(seed, **options)
    return draw()


# Any integer that torch takes.
@pytest.mark.parametrize("seed", [7, 0, -1, 2**32, 2**63])
def test_a_seed_fixes_every_stream(seed: int):
    first = drawn_after(seed)
    assert drawn_after(seed) == first
    assert not any(a == b for a, b in zip(drawn_after(8), first, strict=True))


def test_a_seed_is_that_of_plain_torch():
    set_seed(7)
    ours = torch.rand(4)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(4), ours)
    assert torch.initial_seed() == 7


def test_the_rank_counts_only_when_asked():
    assert drawn_after(7, rank=3) == drawn_after(7)
    assert drawn_after(7, rank=3, device_specific=True) == drawn_after(10)


@pytest.mark.parametrize("seed", [0, -1, 2**63])
def test_each_rank_gets_streams_of_its_own_and_rank_0_goes_on_with_the_seeds(seed: int):
    set_seed(seed)
    alone = draw(), draw()
    set_seed(seed)
    drawn = [draw()]
    for number in range(1, 4):
        set_seed(seed)
        assert draw() == alone[0]
        seed_own_streams(rank(number))
        drawn.append(draw())
        seed_own_streams(rank(number))  # once for each seed
        drawn.append(draw())
    set_seed(seed)
    draw()
    seed_own_streams(rank(0))
    assert draw() == alone[1]
    assert all(len(set(values)) == 7 for values in zip(*(map(str, row) for row in drawn), strict=True))


def test_streams_stay_where_nobody_seeded_them_or_a_state_was_loaded():
    set_seed(1)
    state = get_rng_state()
    expected = draw()
    set_seed(2)
    set_rng_state(state)
    seed_own_streams(rank(1))
    assert draw() == expected


def test_equal_streams_stay_equal_on_request():
    expected = drawn_after(1, same_on_all_ranks=True)
    set_seed(1, same_on_all_ranks=True)
    seed_own_streams(rank(1))
    assert draw() == expected
    assert stream_index(3) == 0
    set_seed(1)
    assert stream_index(3) == 3
    with pytest.raises(ConfigError, match="device_specific=True and same_on_all_ranks=True, which say the opposite"):
        set_seed(1, device_specific=True, same_on_all_ranks=True)


@pytest.mark.parametrize(
    ("cuda", "before", "after"),
    [(None, None, None), ("13.0", None, ":4096:8"), ("13.0", ":16:8", ":16:8")],
)
def test_deterministic_products_of_cuda_need_no_variable_of_the_users(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, before: str | None, after: str | None
):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", before or "")  # put back in the end, whatever happens here
    if before is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda is not None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    set_seed(1)
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == before
    set_seed(1, deterministic=True)
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == after
    assert not torch.backends.cudnn.benchmark
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_the_stream_of_the_machines_accelerator_is_saved(monkeypatch: pytest.MonkeyPatch, kind: str):
    stream = torch.Generator().manual_seed(3)
    module = SimpleNamespace(get_rng_state=stream.get_state, set_rng_state=stream.set_state)
    is_started = False
    if kind != "mps":  # which has no such function
        module.is_initialized = lambda: is_started
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert (kind in get_rng_state()) == (kind == "mps")
    is_started = True
    state = get_rng_state()
    expected = torch.rand(2, generator=stream)
    set_rng_state(state)
    assert torch.equal(torch.rand(2, generator=stream), expected)


def test_a_state_is_plain_data_and_continues_where_it_was_taken():
    drawn_after(5)
    buffer = io.BytesIO()
    torch.save(get_rng_state(), buffer)
    expected = [draw(), draw()]
    drawn_after(99)
    buffer.seek(0)
    # Nothing in a checkpoint may need code to run.
    set_rng_state(torch.load(buffer, weights_only=True))
    assert [draw(), draw()] == expected


def test_what_is_drawn_while_streams_are_kept_moves_none_of_them():
    drawn_after(7)  # of the Gaussian numbers, one is held back
    state = get_rng_state()
    alone = draw()
    set_rng_state(state)
    with KeptStreams():
        draw()
    assert draw() == alone


def test_ranks_still_part_after_streams_were_kept():
    numbers = []
    for number in (0, 1):
        set_seed(7)
        with KeptStreams():
            seed_own_streams(rank(number))
        seed_own_streams(rank(number))
        numbers.append(draw())
    assert numbers[0] != numbers[1]


def test_own_draws_differ_by_rank_and_leave_a_shared_stream_alike():
    def draw(index: int) -> list[float]:
        torch.manual_seed(3)
        own, seen = OwnDraws("cpu", index), []
        for _ in range(2):
            own.enter()
            own.enter()  # changes nothing
            seen.append(torch.rand(()).item())
            own.leave()
            own.leave()
            seen.append(torch.rand(()).item())
        return seen

    first, second, again = draw(0), draw(1), draw(0)
    assert first == again
    assert first[1::2] == second[1::2]
    assert len({*first, *second}) == 6


def test_own_draws_are_equal_where_all_streams_shall_be():
    set_seed(5, same_on_all_ranks=True)
    seen = []
    for index in range(2):
        torch.manual_seed(3)
        OwnDraws("cpu", index).enter()
        seen.append(torch.rand(()).item())
    assert seen[0] == seen[1]
