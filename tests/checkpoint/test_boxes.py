"""Parts cut in one way fill parts cut in any other, element by element, and gaps are seen."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_trainer.checkpoint.boxes import Box, balance_bytes, box_at, boxes_of_run, chunk_of, plan_reads

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    bounds = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return Box(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, list[Box]]:
    shape = draw(SHAPES)
    return shape, draw(boxes_in(shape)), draw(st.lists(boxes_in(shape), max_size=6))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """All boxes of a shape laid out over a mesh of one or two axes."""
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    dims = [draw(st.none() | st.integers(0, len(shape) - 1)) for _ in mesh]
    return shape, [box_at(shape, dims, mesh, coordinate) for coordinate in np.ndindex(*mesh)]


def values_of(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(prod(shape)).reshape(shape)


@given(cuts())
def test_a_plan_fills_exactly_what_the_parts_have(case: tuple[tuple[int, ...], Box, list[Box]]):
    shape, target, parts = case
    whole = values_of(shape)
    held = np.zeros(shape, dtype=bool)
    for part in parts:
        held[part.within(Box.full(shape))] = True
    wanted = whole[target.within(Box.full(shape))]
    reads = plan_reads(target, parts)
    if not held[target.within(Box.full(shape))].all():
        assert reads is None
        return
    assert reads is not None
    filled, times = np.full(target.sizes, -1), np.zeros(target.sizes, dtype=int)
    for read in reads:
        filled[read.target] = whole[parts[read.shard].within(Box.full(shape))][read.source]
        times[read.target] += 1
    assert np.array_equal(filled, wanted)
    assert (times == 1).all()


@given(layouts(), layouts())
def test_what_one_layout_saved_fills_every_other(
    saved: tuple[tuple[int, ...], list[Box]], other: tuple[tuple[int, ...], list[Box]]
):
    shape, parts = saved
    assert all(part.fits(shape) for part in parts)
    whole = values_of(shape)
    loaded_as = other[1] if other[0] == shape else [Box.full(shape)]
    for target in loaded_as:
        reads = plan_reads(target, parts)
        assert reads is not None
        filled = np.full(target.sizes, -1)
        for read in reads:
            filled[read.target] = whole[parts[read.shard].within(Box.full(shape))][read.source]
        assert np.array_equal(filled, whole[target.within(Box.full(shape))])


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    begin, end = sorted(draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    return shape, begin, end


@given(runs())
def test_a_run_of_elements_is_cut_into_few_boxes_in_order(case: tuple[tuple[int, ...], int, int]):
    shape, begin, end = case
    whole = np.arange(prod(shape)).reshape(shape)
    boxes = boxes_of_run(shape, begin, end)
    found = [whole[box.within(Box.full(shape))].reshape(-1) for box in boxes]
    assert np.concatenate([*found, []]).tolist() == list(range(begin, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.num_elements and box.fits(shape) for box in boxes)


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_those_of_torch(extent: int, num_chunks: int):
    expected = [chunk.tolist() for chunk in torch.arange(extent).chunk(num_chunks)]
    expected += [[]] * (num_chunks - len(expected))
    ours = [chunk_of(extent, num_chunks, index) for index in range(num_chunks)]
    assert [list(range(offset, offset + size)) for offset, size in ours] == (expected if extent else [[]] * num_chunks)


def test_a_plan_reads_no_part_that_it_does_not_need():
    parts = [Box((0, 0), (2, 4)), Box((2, 0), (2, 4)), Box((4, 0), (2, 4))]
    reads = plan_reads(Box((3, 1), (3, 2)), parts)
    assert reads == [
        (1, (slice(1, 2), slice(1, 3)), (slice(0, 1), slice(0, 2))),
        (2, (slice(0, 2), slice(1, 3)), (slice(1, 3), slice(0, 2))),
    ]


@pytest.mark.parametrize(
    ("box", "shape"),
    [(Box((-1,), (2,)), (4,)), (Box((3,), (2,)), (4,)), (Box((0,), (2,)), (4, 4)), (Box((0, 0), (2, -1)), (4, 4))],
)
def test_a_box_outside_its_tensor_is_seen(box: Box, shape: tuple[int, ...]):
    assert not box.fits(shape)


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 5))
def test_shares_differ_by_no_more_than_the_largest_item(sizes: list[int], num_shares: int):
    takers = balance_bytes(sizes, num_shares)
    loads = [
        sum(size for size, taker in zip(sizes, takers, strict=True) if taker == share) for share in range(num_shares)
    ]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)
