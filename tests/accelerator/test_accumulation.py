"""Accumulation windows: they partition what a loader yields, and each gradient is the mean over its window."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_trainer.accelerator.accumulation import AccumulationWindow
from accel_trainer.errors import ConfigError


@dataclass
class Step:
    """One micro-batch, as the loop that owns the window sees it."""

    epoch: int
    divisor: int
    ends: bool
    exchanges: bool
    correction: float


def run(window: AccumulationWindow, epochs: list[int], *, known: bool) -> list[Step]:
    """Take `window` through epochs of so many batches; a stream knows only at its last batch that it is the last."""
    steps = []
    for epoch, num_batches in enumerate(epochs):
        for index in range(num_batches):
            window.advance(num_batches - index if known else None, index + 1 == num_batches)
            steps.append(Step(epoch, window.divisor, window.is_last, window.exchanges_gradients, window.correction))
    return steps


def split(steps: list[Step]) -> list[list[Step]]:
    """Cut the steps after each that ends a window; the last part may be open."""
    windows: list[list[Step]] = [[]]
    for step in steps:
        windows[-1].append(step)
        if step.ends:
            windows.append([])
    return [part for part in windows if part]


epochs_of_batches = st.lists(st.integers(1, 25), min_size=1, max_size=4)


@given(num_steps=st.integers(1, 9), epochs=epochs_of_batches, known=st.booleans(), each=st.booleans())
def test_windows_partition_the_batches_of_each_epoch(num_steps: int, epochs: list[int], known: bool, each: bool):
    steps = run(AccumulationWindow(num_steps, sync_each_batch=each), epochs, known=known)
    windows = split(steps)
    expected = [
        min(num_steps, num_batches - begin) for num_batches in epochs for begin in range(0, num_batches, num_steps)
    ]
    assert [len(window) for window in windows] == expected
    assert all(len({step.epoch for step in window}) == 1 for window in windows)


@given(
    num_steps=st.integers(1, 9),
    epochs=epochs_of_batches,
    known=st.booleans(),
    at_end=st.booleans(),
    each=st.booleans(),
)
def test_a_windows_gradient_is_the_mean_over_what_it_held(
    num_steps: int, epochs: list[int], known: bool, at_end: bool, each: bool
):
    window = AccumulationWindow(num_steps, sync_with_dataloader=at_end, sync_each_batch=each)
    for part in split(run(window, epochs, known=known)):
        if not part[-1].ends:
            continue  # open: the next epoch would go on with it
        # Each loss is 1: their gradient is 1 whatever the window held.
        gradient = sum(1.0 / step.divisor for step in part) * part[-1].correction
        assert gradient == pytest.approx(1.0)
        # The divisor of a window never changes inside of it: its first backward has used it.
        assert len({step.divisor for step in part}) == 1
        assert [step.correction for step in part[:-1]] == [1.0] * (len(part) - 1)


@given(num_steps=st.integers(1, 9), epochs=epochs_of_batches, known=st.booleans())
def test_a_known_length_needs_no_correction(num_steps: int, epochs: list[int], known: bool):
    steps = run(AccumulationWindow(num_steps), epochs, known=known)
    if known:
        assert {step.correction for step in steps} == {1.0}
    else:
        assert {step.divisor for step in steps} == {num_steps}


@given(num_steps=st.integers(1, 9), epochs=epochs_of_batches, known=st.booleans())
def test_gradients_are_exchanged_once_per_window_or_always(num_steps: int, epochs: list[int], known: bool):
    once = run(AccumulationWindow(num_steps), epochs, known=known)
    assert [step.exchanges for step in once] == [step.ends for step in once]
    always = run(AccumulationWindow(num_steps, sync_each_batch=True), epochs, known=known)
    assert all(step.exchanges for step in always)
    assert [step.ends for step in always] == [step.ends for step in once]


@given(num_steps=st.integers(1, 9), epochs=epochs_of_batches, known=st.booleans())
def test_windows_may_go_on_into_the_next_epoch(num_steps: int, epochs: list[int], known: bool):
    steps = run(AccumulationWindow(num_steps, sync_with_dataloader=False), epochs, known=known)
    assert [index + 1 for index, step in enumerate(steps) if step.ends] == list(
        range(num_steps, sum(epochs) + 1, num_steps)
    )
    assert {(step.divisor, step.correction) for step in steps} == {(num_steps, 1.0)}


@given(num_steps=st.integers(2, 9), left_after=st.integers(1, 8), epochs=epochs_of_batches)
def test_a_loop_that_is_left_in_a_window_goes_on_with_it(num_steps: int, left_after: int, epochs: list[int]):
    window = AccumulationWindow(num_steps)
    left = min(left_after, num_steps - 1)
    before = []
    for index in range(left):
        window.advance(1000 - index, False)
        before.append(Step(0, window.divisor, window.is_last, window.exchanges_gradients, window.correction))
    for part in split(before + run(window, epochs, known=True)):
        gradient = sum(1.0 / step.divisor for step in part) * part[-1].correction
        assert gradient == pytest.approx(1.0)


def test_without_a_loader_windows_are_full():
    window = AccumulationWindow(3)
    ends = []
    for _ in range(7):
        window.advance(None, False)
        ends.append(window.is_last)
    assert ends == [False, False, True, False, False, True, False]


def test_a_new_window_is_at_its_end():
    # A step outside of accumulate() acts, and needs no correction.
    window = AccumulationWindow(4)
    assert (window.is_last, window.exchanges_gradients, window.correction, window.divisor) == (True, True, 1.0, 1)


@pytest.mark.parametrize("num_steps", [0, -1])
def test_a_window_of_nothing_is_refused(num_steps: int):
    with pytest.raises(ConfigError, match=rf"gradient_accumulation_steps={num_steps} must be 1 or more"):
        AccumulationWindow(num_steps)
