"""Accumulation windows: they partition what a loader yields, and each gradient is the mean over its window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_trainer import Accelerator
from accel_trainer.accelerator.accumulation import AccumulationWindow, TokenWindow
from accel_trainer.errors import ConfigError
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")


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


@given(num_steps=st.integers(1, 9), epochs=epochs_of_batches, known=st.booleans())
def test_windows_partition_the_batches_of_each_epoch_and_exchange_gradients_once_or_always(
    num_steps: int, epochs: list[int], known: bool
):
    steps = run(AccumulationWindow(num_steps), epochs, known=known)
    windows = split(steps)
    expected = [
        min(num_steps, num_batches - begin) for num_batches in epochs for begin in range(0, num_batches, num_steps)
    ]
    assert [len(window) for window in windows] == expected
    assert all(len({step.epoch for step in window}) == 1 for window in windows)
    assert [step.exchanges for step in steps] == [step.ends for step in steps]
    # The divisor of a known length needs no correction; that of an unknown one is always the full window's.
    assert {step.correction for step in steps} == {1.0} if known else {step.divisor for step in steps} == {num_steps}
    always = run(AccumulationWindow(num_steps, sync_each_batch=True), epochs, known=known)
    assert all(step.exchanges for step in always)
    assert [step.ends for step in always] == [step.ends for step in steps]


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


def test_without_a_loader_windows_are_full_and_one_of_nothing_is_refused():
    window, ends = AccumulationWindow(3), []
    # A step outside of accumulate() acts, and needs no correction.
    assert (window.is_last, window.exchanges_gradients, window.correction, window.divisor) == (True, True, 1.0, 1)
    for _ in range(7):
        window.advance(None, False)
        ends.append(window.is_last)
    assert ends == [False, False, True, False, False, True, False]
    for num_steps in (0, -1):
        with pytest.raises(ConfigError, match=rf"gradient_accumulation_steps={num_steps} must be 1 or more"):
            AccumulationWindow(num_steps)


# --- tokens: the gradient is that of the mean over all of them, however they are spread ------------------------------


# T tokens of a micro-batch, D features.
DIM = 3

Case = list[list[list[int]]]
"""Tokens by update, micro-batch and rank; every update has as many micro-batches."""


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, 5), nn.Tanh(), nn.Linear(5, 1))


def tokens_of(case: Case) -> list[list[list[Tensor]]]:
    """Values for every token, shape (T, D + 1): features, and the label behind them."""
    generator = torch.Generator().manual_seed(1)
    return [[[torch.randn(t, DIM + 1, generator=generator) for t in ranks] for ranks in update] for update in case]


def loss_sum(model: nn.Module, tokens: Tensor) -> Tensor:
    return (model(tokens[:, :DIM]).squeeze(-1) - tokens[:, DIM]).square().sum()


def one_big_batch(updates: Iterable[Tensor], clip: bool) -> list[dict[str, Any]]:
    """Plain PyTorch on one process: all tokens of an update in one batch."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for tokens in updates:
        optimizer.zero_grad()
        (loss_sum(model, tokens) / max(len(tokens), 1)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).item() if clip else None
        optimizer.step()
        results.append({"norm": norm, "weights": torch.cat([p.detach().flatten() for p in model.parameters()])})
    return results


def spread(strategy: str, cases: list[Case], clip: bool) -> list[list[dict[str, Any]]]:
    """The same updates with the tokens spread over ranks and micro-batches."""
    results = []
    for case in cases:
        accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=len(case[0]))
        model = build()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        updates = []
        for update in tokens_of(case):
            for ranks in update:
                tokens = ranks[accelerator.process_index]
                with accelerator.accumulate(model):
                    loss = accelerator.global_token_mean(loss_sum(model, tokens), torch.tensor(len(tokens)))
                    optimizer.zero_grad()
                    accelerator.backward(loss)
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if clip else None
                    optimizer.step()
            state = accelerator.get_state_dict(model)
            weights = torch.cat([value.flatten() for value in state.values()]) if state else None
            updates.append({"norm": None if norm is None else norm.item(), "weights": weights})
        results.append(updates)
    return results


@st.composite
def cases(draw: st.DrawFn, world_size: int) -> Case:
    num_steps = draw(st.integers(1, 4))
    counts = st.integers(0, 6)
    ranks = st.lists(counts, min_size=world_size, max_size=world_size)
    return draw(st.lists(st.lists(ranks, min_size=num_steps, max_size=num_steps), min_size=1, max_size=3))


def compare(results: list[list[dict[str, Any]]], drawn: list[Case], clip: bool = True) -> None:
    for case, updates in zip(drawn, results, strict=True):
        batches = [torch.cat([tokens for ranks in update for tokens in ranks]) for update in tokens_of(case)]
        for update, expected in zip(updates, one_big_batch(batches, clip), strict=True):
            if clip:
                assert update["norm"] == pytest.approx(expected["norm"], abs=1e-6, rel=1e-6)
            torch.testing.assert_close(update["weights"], expected["weights"], atol=1e-6, rtol=1e-6)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=cases(1))
def test_one_rank_equals_one_big_batch(drawn: Case):
    compare(spread("single", [drawn], clip=True), [drawn])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=st.lists(cases(2), min_size=12, max_size=12))
def test_two_ranks_equal_one_big_batch(strategy: str, drawn: list[Case]):
    compare(run_ranks(spread, 2, strategy, drawn, True)[0], drawn)


def test_three_ranks_with_thousands_of_tokens_equal_one_big_batch():
    drawn: list[Case] = [[[[900, 3, 0], [0, 0, 1], [40, 2000, 7]], [[1, 0, 0], [0, 0, 0], [0, 5, 0]]]]
    compare(run_ranks(spread, 3, "ddp", drawn, True)[0], drawn)


def test_without_clipping_the_optimizer_closes_the_window():
    drawn: list[Case] = [[[[3], [1]], [[2], [6]]]]
    compare(spread("single", drawn, clip=False), drawn, clip=False)


class Stream(IterableDataset):
    """Six samples, of unknown number."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(6.0)[:, None])


def test_a_short_last_window_is_divided_by_its_own_tokens():
    # Windows of 4 samples over 6: the second one holds two. A "token" of sample i weighs the bias with i.
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Stream(), batch_size=1)
    )
    gradients = []
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(accelerator.global_token_mean((model.bias * x.flatten()).sum(), int(x.item())))
            optimizer.step()
            if accelerator.sync_gradients:
                gradients.append(model.bias.grad.item())
            optimizer.zero_grad()
    assert gradients == pytest.approx([1.0, 1.0])


def test_without_accumulate_each_step_is_a_window_of_the_losses_that_were_not_dropped():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for losses in ([(1.0, 5)], [(1.0, 2)], [(2.0, 6), (5.0, 2)]):  # weights and tokens; the last two are of one batch
        accelerator.backward(accelerator.global_token_mean(model.bias.sum() * 100, 100))
        optimizer.zero_grad()
        before = model.bias.item()
        for weight, tokens in losses:
            accelerator.backward(accelerator.global_token_mean(model.bias.sum() * weight * tokens, tokens))
        optimizer.step()
        optimizer.zero_grad()
        mean = sum(weight * tokens for weight, tokens in losses) / sum(tokens for _, tokens in losses)
        assert model.bias.item() == pytest.approx(before - mean)


def test_models_that_share_a_loss_share_the_count():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    first, first_optimizer = accelerator.prepare(first, torch.optim.SGD(first.parameters(), lr=1.0))
    second, second_optimizer = accelerator.prepare(second, torch.optim.SGD(second.parameters(), lr=1.0))
    before = first.bias.item(), second.bias.item()
    for tokens in (4, 1):
        with accelerator.accumulate(first, second):
            loss = (first.bias + second.bias).sum() * tokens
            accelerator.backward(accelerator.global_token_mean(loss, tokens))
            for optimizer in (first_optimizer, second_optimizer):
                optimizer.step()
                optimizer.zero_grad()
    assert (first.bias.item(), second.bias.item()) == pytest.approx((before[0] - 1.0, before[1] - 1.0))


def test_plain_losses_beside_weighed_ones_are_an_error():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with accelerator.accumulate(model):
        accelerator.backward(accelerator.global_token_mean(model.bias.sum(), 1))
    with accelerator.accumulate(model):
        accelerator.backward(model.bias.sum())
        with pytest.raises(
            ConfigError, match=r"1 of 2 losses of this accumulation window came from global_token_mean\(\)"
        ):
            optimizer.step()
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model.bias.sum())
            optimizer.step()


def test_other_models_within_a_window_are_an_error():
    process = Accelerator(cpu=True).process
    window = TokenWindow(process)
    window.add(torch.tensor(3), torch.tensor(1.0))
    window.take_backward()
    with pytest.raises(ConfigError, match="models that share a loss have to share the window"):
        window.add(torch.tensor(3), torch.tensor(2.0))


@pytest.mark.parametrize(
    ("loss", "tokens"), [(torch.ones(3), 3), (torch.ones(()), torch.ones(2).long()), (torch.ones(()), 2.5)]
)
def test_what_is_no_sum_or_no_number_is_an_error(loss: Tensor, tokens: Any):
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=r"for 0 prepared model\(s\)"):
        accelerator.global_token_mean(torch.ones(()), 3)
    accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(
        ConfigError, match=r"global_token_mean\(\) got a loss of shape .*it takes a sum .*and an integer"
    ):
        accelerator.global_token_mean(loss, tokens)


def uneven(strategy: str) -> Tensor:
    """Train over 5 samples of 1..5 tokens on 2 ranks without filling up: in the last step rank 1 has none."""
    accelerator = Accelerator(cpu=True, strategy=strategy, config={"data": {"even_batches": False}})
    model = build()
    data = TensorDataset(torch.arange(5))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=1)
    )
    samples = samples_of_lengths()
    for (index,) in loader:
        tokens = torch.cat([samples[i] for i in index.tolist()])
        accelerator.backward(accelerator.global_token_mean(loss_sum(model, tokens), len(tokens)))
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([value.flatten() for value in accelerator.get_state_dict(model).values()] or [torch.empty(0)])


def samples_of_lengths() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(n, DIM + 1, generator=generator) for n in range(1, 6)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_rank_without_samples_counts_no_tokens(strategy: str):
    samples = samples_of_lengths()
    expected = one_big_batch([torch.cat(samples[begin : begin + 2]) for begin in (0, 2, 4)], clip=False)[-1]
    torch.testing.assert_close(run_ranks(uneven, 2, strategy)[0], expected["weights"], atol=1e-6, rtol=1e-6)


def hold_in_each(inner: DataLoader[Any], held: list[Any]) -> None:
    held[:] = [iter(inner)]
    for _ in held[0]:
        break


def hold_once(inner: DataLoader[Any], held: list[Any]) -> None:
    if not held:
        hold_in_each(inner, held)


def leave(inner: DataLoader[Any], held: list[Any]) -> None:
    next(iter(inner))


def sync_with_inner(take: str) -> tuple[list[bool], list[float]]:
    """Train 3 steps of 2, of which the last is short, with another loader in the loop; return what each step was."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    size = 2 * accelerator.num_processes
    model = nn.Linear(1, 1)
    outer, inner = DataLoader(range(3 * size - 1), batch_size=2), DataLoader(range(4 * size), batch_size=2)
    model, outer, inner = accelerator.prepare(model, outer, inner)
    held: list[Any] = []
    syncs, weights = [], []
    for _ in outer:
        globals()[take](inner, held)
        with accelerator.accumulate(model):
            syncs.append(accelerator.sync_gradients)
            weights.append(accelerator.gradient_state.loss_weight(accelerator.readers))
    return syncs, weights


@pytest.mark.parametrize("take", ["hold_in_each", "hold_once", "leave"])
def test_an_inner_loader_that_was_left_leaves_the_outer_ones_last_batch_the_last(take: str):
    assert sync_with_inner(take) == ([False, True, True], [1.0] * 3)
    for rank, (syncs, weights) in enumerate(run_ranks(sync_with_inner, 2, take)):
        assert syncs == [False, True, True]
        # A loss may be that of the batch drawn last.
        assert weights[2] == (1.0 if take == "hold_in_each" else pytest.approx([4 / 3, 2 / 3][rank]))


def test_loops_over_an_inner_loader_end_windows_where_it_ends():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, outer, inner = accelerator.prepare(nn.Linear(1, 1), DataLoader(range(2)), DataLoader(range(3)))
    syncs = []
    for _ in outer:
        for _ in inner:
            with accelerator.accumulate(model):
                syncs.append(accelerator.sync_gradients)
    assert syncs == [False, True, True] * 2

    active = []
    for _ in zip(outer, inner, strict=False):  # the one that leads begins last
        with accelerator.accumulate(model):
            active.append(accelerator.gradient_state.active_dataloader)
    assert active == [inner] * 2


def test_a_loader_that_was_left_is_active_again_with_its_next_batch():
    accelerator = Accelerator(cpu=True)
    model, outer, inner = accelerator.prepare(nn.Linear(1, 1), DataLoader(range(3)), DataLoader(range(3)))
    evaluated = iter(inner)
    active = []
    for index, _ in enumerate(outer):
        if index == 0:
            next(evaluated)
        with accelerator.accumulate(model):
            active.append(accelerator.gradient_state.active_dataloader)
        if index == 1:
            assert accelerator.gradient_state.active_dataloader is outer
            next(evaluated)
            active.append(accelerator.gradient_state.active_dataloader)
    assert active == [inner, outer, inner, inner]
    assert accelerator.gradient_state.dataloader_references == [None, inner]


class Graphed(torch.autograd.Function):
    """A product whose gradient of its weight lies in the same memory each time, as a replayed CUDA graph writes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, memory: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.memory = memory
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        ctx.memory.copy_(gradient.T @ ctx.saved_tensors[0])
        return None, ctx.memory.detach(), None


class Replayed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.memory = nn.Parameter(torch.ones(1, 4)), torch.empty(1, 4)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return Graphed.apply(x, self.weight, self.memory).square().mean()


def accumulate_three(accelerator: Accelerator, model: nn.Module, optimizer: Any, batches: Tensor, way: str) -> Tensor:
    """Accumulate gradients of three batches in one way of opening windows, step, and return the weight."""
    for index, batch in enumerate(batches):
        if way == "no_sync":
            with accelerator.no_sync(model) if index < 2 else nullcontext():
                accelerator.backward(model(batch) / 3)
        elif way == "accumulate":
            with accelerator.accumulate(model):
                accelerator.backward(model(batch))
        else:
            accelerator.set_gradient_sync(model, index == 2)
            accelerator.backward(model(batch) / 3)
    optimizer.step()
    return model.get_parameter("weight").detach()


@pytest.mark.parametrize("way", ["accumulate", "no_sync", "set_gradient_sync"])
def test_gradients_that_cuda_graphs_write_to_are_kept_until_the_window_ends(way: str):
    graphs = {"backend": "eager", "mode": "reduce-overhead"}
    accelerator = Accelerator(
        cpu=True, config={"compile": graphs}, gradient_accumulation_steps=3 if way == "accumulate" else 1
    )
    model = Replayed()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    batches = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
    weight = torch.ones(1, 4, requires_grad=True)
    sum((batch @ weight.T).square().mean() for batch in batches).div(3).backward()
    expected = weight.detach() - weight.grad
    torch.testing.assert_close(accumulate_three(accelerator, model, optimizer, batches, way), expected)
