"""Windows exchanged each time, made by hand, over the end of an epoch, of several models: the plain loop's numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from tests.conformance.models import GLOBAL_BATCH, build_model, build_samples, collate
from tests.loops import take_update
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")

WORLD_SIZES = {"single": 1, "ddp": 2, "fsdp2": 2}
STEPS = 2
"""Micro-batches of a window."""

Batch = dict[str, Tensor]


def batches() -> Iterator[Batch]:
    """Yield the whole batches that the ranks share."""
    samples = build_samples("mlp", 6 * GLOBAL_BATCH)
    for begin in range(0, len(samples), GLOBAL_BATCH):
        yield collate(samples[begin : begin + GLOBAL_BATCH])


def join(parts: list[Batch]) -> Batch:
    """Return one batch of all rows."""
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that no scale of the gradients is lost on."""
    return torch.optim.SGD(model.parameters(), lr=0.3)


def start(strategy: str, **options: Any) -> tuple[Any, nn.Module, Any, DataLoader]:
    """Return an Accelerator with the suite's small model, its optimizer and its loader."""
    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=True, strategy=strategy, **options)
    model = build_model("mlp", seed=accelerator.process_index)
    samples = build_samples("mlp", 6 * GLOBAL_BATCH)
    data = DataLoader(samples, batch_size=GLOBAL_BATCH // accelerator.num_processes, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), data)
    return accelerator, model, optimizer, loader


def mean(accelerator: Any, loss: Tensor) -> float:
    """Return the loss of the whole batch."""
    return float(accelerator.reduce(loss.detach(), "mean"))


def plain(windows: list[Batch], clip_value: float | None = None) -> list[float]:
    """Train with one forward for each window; return the losses."""
    model = build_model("mlp")
    optimizer, losses = sgd(model), []
    for window in windows:
        loss = model(**window)["loss"]
        loss.backward()
        if clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), clip_value)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def pairs(values: list[Any], length: int = STEPS) -> list[list[Any]]:
    """Return the members of each full window."""
    return [values[begin : begin + length] for begin in range(0, len(values), length)]


def means(losses: list[float], length: int = STEPS) -> list[float]:
    """Return the loss of each window."""
    return [sum(window) / length for window in pairs(losses, length)]


def accumulate(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    batches: Iterable[Any],
    loss_of: Callable[[Any], Tensor] | None = None,
    clip_value: float | None = None,
) -> list[float]:
    """Train in the Accelerator's windows; return the losses of whole batches."""
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"] if loss_of is None else loss_of(batch)
            accelerator.backward(loss)
            if clip_value is not None:
                accelerator.clip_grad_value_(model.parameters(), clip_value)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean(accelerator, loss))
    return losses


# --- one model -----------------------------------------------------------------------------------------------------


def exchanged_each_time(strategy: str) -> list[float]:
    """Exchange gradients on every micro-batch."""
    from accel_trainer import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=STEPS, sync_each_batch=True)
    return means(accumulate(*start(strategy, gradient_accumulation_plugin=plugin)))


def over_the_end(strategy: str) -> list[float]:
    """Windows of 4 go on from one epoch of 6 batches into the next."""
    from accel_trainer import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    *parts, loader = start(strategy, gradient_accumulation_plugin=plugin)
    return means(accumulate(*parts, loader) + accumulate(*parts, loader), 4)


def by_hand(strategy: str) -> tuple[list[float], bool]:
    """Keep gradients on the rank with no_sync(); say whether those of the first micro-batch differ between ranks."""
    accelerator, model, optimizer, loader = start(strategy)
    losses, is_local = [], True
    for index, batch in enumerate(loader):
        if index % STEPS == 0:
            with accelerator.no_sync(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss / STEPS)
            if strategy == "ddp":
                gathered = accelerator.gather(accelerator.unwrap_model(model).first.bias.grad.unsqueeze(0))
                is_local = is_local and not torch.equal(gathered[0], gathered[1])
        else:
            loss = model(**batch)["loss"]
            take_update(loss / STEPS, optimizer, accelerator)
        losses.append(mean(accelerator, loss))
    return means(losses), is_local


def triggered(strategy: str) -> tuple[list[float], bool]:
    """Run all forwards of a window without an exchange, which the last backward asks for; say where ranks differ."""
    accelerator, model, optimizer, loader = start(strategy)
    losses, is_local = [], True
    for window in pairs(list(loader)):
        with accelerator.no_sync(model):
            first, last = (model(**batch)["loss"] / STEPS for batch in window)
            accelerator.backward(first)
        if strategy == "ddp":
            gathered = accelerator.gather(accelerator.unwrap_model(model).first.bias.grad.unsqueeze(0))
            is_local = is_local and not torch.equal(gathered[0], gathered[1])
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(last)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(accelerator, first + last))
    return losses, is_local


def clipped_by_value(strategy: str) -> list[float]:
    """Clamp the gradients of the windows."""
    return means(accumulate(*start(strategy, gradient_accumulation_steps=STEPS), clip_value=0.01))


def evaluated_first(strategy: str) -> tuple[list[float], list[float]]:
    """Prepare a model for evaluation, use it, and prepare it for training then."""
    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=True, strategy=strategy)
    own = build_model("mlp", seed=accelerator.process_index)
    model = accelerator.prepare_model(own, evaluation_mode=True)
    with torch.no_grad():
        before = model(**next(batches()))["loss"].item()
    rows = slice(accelerator.process_index, None, accelerator.num_processes)
    own_batches = [{key: value[rows] for key, value in batch.items()} for batch in batches()]
    return [before], accumulate(accelerator, *accelerator.prepare(own, sgd(own)), own_batches)


# --- several models ------------------------------------------------------------------------------------------------


def build_gan(seed: int) -> tuple[nn.Module, nn.Module]:
    """Return a generator and a discriminator."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def discriminator_loss(discriminator: nn.Module, generator: nn.Module, x: Tensor) -> Tensor:
    """Real rows are to score 1 and made ones 0."""
    with torch.no_grad():
        made = generator(x.flip(1))
    scores = discriminator(torch.cat([x, made]))
    return mse_loss(scores, torch.cat([torch.ones(len(x), 1), torch.zeros(len(x), 1)]))


def generator_loss(discriminator: nn.Module, generator: nn.Module, x: Tensor) -> Tensor:
    """Made rows are to score 1."""
    return mse_loss(discriminator(generator(x.flip(1))), torch.ones(len(x), 1))


def gan(strategy: str) -> list[float]:
    """Accumulate a discriminator and a generator, each in windows of its own."""
    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=STEPS)
    made_by, judged_by = build_gan(accelerator.process_index)
    rows = slice(accelerator.process_index, None, accelerator.num_processes)
    generator, discriminator, *optimizers = accelerator.prepare(made_by, judged_by, sgd(made_by), sgd(judged_by))
    losses = []
    for batch in batches():
        x = batch["x"][rows]
        discriminator.requires_grad_(True)
        judge = functools.partial(discriminator_loss, discriminator, generator)
        losses += accumulate(accelerator, discriminator, optimizers[1], [x], judge)
        discriminator.requires_grad_(False)
        fool = functools.partial(generator_loss, accelerator.unwrap_model(discriminator), generator)
        losses += accumulate(accelerator, generator, optimizers[0], [x], fool)
    return losses


def plain_gan() -> list[float]:
    """Return the same losses from plain PyTorch in one process."""
    generator, discriminator = build_gan(0)
    optimizers, losses = (sgd(generator), sgd(discriminator)), []
    phases: list[tuple[Callable[..., Tensor], torch.optim.Optimizer]]
    phases = [(discriminator_loss, optimizers[1]), (generator_loss, optimizers[0])]
    for index, batch in enumerate(batches()):
        for loss_of, optimizer in phases:
            discriminator.requires_grad_(loss_of is discriminator_loss)
            loss = loss_of(discriminator, generator, batch["x"])
            (loss / STEPS).backward()
            if index % STEPS == STEPS - 1:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def distilled(strategy: str) -> tuple[list[float], bool]:
    """Train a student on what a frozen teacher returns; say whether the teacher stayed what it was."""
    accelerator, student, optimizer, loader = start(strategy, gradient_accumulation_steps=STEPS)
    teacher = accelerator.prepare_model(build_model("mlp", seed=9).eval().requires_grad_(False), evaluation_mode=True)
    before = accelerator.get_state_dict(teacher)

    def loss_of(batch: Batch) -> Tensor:
        with torch.no_grad():
            wanted = teacher(**batch)["logits"]
        return mse_loss(student(**batch)["logits"], wanted)

    losses = means(accumulate(accelerator, student, optimizer, loader, loss_of))
    after = accelerator.get_state_dict(teacher)
    return losses, all(torch.equal(after[name], before[name]) for name in before)


def plain_distilled() -> list[float]:
    """Return the same losses from plain PyTorch in one process."""
    student, teacher = build_model("mlp"), build_model("mlp", seed=9)
    optimizer, losses = sgd(student), []
    for parts in pairs(list(batches())):
        window = join(parts)
        loss = mse_loss(student(**window)["logits"], teacher(**window)["logits"].detach())
        losses.append(take_update(loss, optimizer).item())
    return losses


# --- the tests -----------------------------------------------------------------------------------------------------

RUNS = (exchanged_each_time, over_the_end, by_hand, triggered, clipped_by_value, evaluated_first, gan, distilled)


def run_all(strategy: str) -> dict[str, Any]:
    """Run all of them on this rank, in one job."""
    return {run.__name__: run(strategy) for run in RUNS}


@functools.cache
def results_of(strategy: str) -> list[dict[str, Any]]:
    """Return the results of `run_all` by rank."""
    return run_ranks(run_all, WORLD_SIZES[strategy], strategy)


def close(losses: list[float]) -> Any:
    """Return what compares as equal to these losses."""
    return pytest.approx(losses, abs=2e-6)


@pytest.mark.parametrize("strategy", WORLD_SIZES)
def test_windows_that_exchange_each_time_and_windows_made_by_hand_are_means(strategy: str):
    expected = close(plain([join(parts) for parts in pairs(list(batches()))]))
    for results in results_of(strategy):
        assert results["exchanged_each_time"] == expected
        assert results["by_hand"] == (expected, True)
        assert results["triggered"] == (expected, True)


@pytest.mark.parametrize("strategy", WORLD_SIZES)
def test_a_window_may_go_on_into_the_next_epoch(strategy: str):
    twice = [*batches(), *batches()]
    expected = close(plain([join(parts) for parts in pairs(twice, 4)]))
    assert [results["over_the_end"] for results in results_of(strategy)] == [expected] * WORLD_SIZES[strategy]


@pytest.mark.parametrize("strategy", WORLD_SIZES)
def test_gradients_are_clamped_once_they_are_whole(strategy: str):
    windows = [join(parts) for parts in pairs(list(batches()))]
    assert plain(windows, 0.01)[-1] > plain(windows)[-1] + 0.01  # or nothing would be clamped here
    expected = close(plain(windows, 0.01))
    assert [results["clipped_by_value"] for results in results_of(strategy)] == [expected] * WORLD_SIZES[strategy]


@pytest.mark.parametrize("strategy", WORLD_SIZES)
def test_a_model_that_was_prepared_for_evaluation_can_be_trained_then(strategy: str):
    expected = plain(list(batches()))
    for results in results_of(strategy):
        assert results["evaluated_first"] == (close(expected[:1]), close(expected))


@pytest.mark.parametrize("strategy", WORLD_SIZES)
def test_adversaries_accumulate_independently(strategy: str):
    expected = close(plain_gan())
    assert [results["gan"] for results in results_of(strategy)] == [expected] * WORLD_SIZES[strategy]


@pytest.mark.parametrize("strategy", WORLD_SIZES)
def test_a_student_learns_from_a_frozen_teacher(strategy: str):
    expected = close(plain_distilled())
    assert [results["distilled"] for results in results_of(strategy)] == [(expected, True)] * WORLD_SIZES[strategy]
