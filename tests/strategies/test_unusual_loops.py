"""Loops that are right on one process, and that engines take for others: alike under each, or refused by words."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.loops import take_update
from tests.ranks import preload, run_ranks
from tests.scenarios import refused
from tests.strategy_configs import config_of, marked, needs_deepspeed

preload("accel_trainer.accelerator")
BATCH = 8


def begin(strategy: str) -> Any:
    from accel_trainer import Accelerator

    return Accelerator(cpu=True, config=config_of(strategy, BATCH // 2))


def build(seed: int = 0, width: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))


def own_rows(accelerator: Any, step: int) -> Tensor:
    rows = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step))
    return rows.chunk(accelerator.num_processes)[accelerator.process_index]


def adversaries(strategy: str) -> list[float]:
    """Train a generator against a discriminator, each in its own window, with the other frozen."""
    accelerator = begin(strategy)
    generator, judge = build(), build(1, width=1)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (generator, judge)]
    generator, judge, *optimizers = accelerator.prepare(generator, judge, *optimizers)
    losses = []
    for step in range(4):
        rows = own_rows(accelerator, step)
        with accelerator.accumulate(judge):
            loss = judge(generator(rows).detach()).square().mean() + (judge(rows[:, :1]) - 1).square().mean()
            take_update(loss, optimizers[1], accelerator)
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.unwrap_model(judge).requires_grad_(False)
        with accelerator.accumulate(generator):
            loss = (judge(generator(rows)) - 1).square().mean()
            take_update(loss, optimizers[0], accelerator)
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.unwrap_model(judge).requires_grad_(True)
    return losses


@pytest.mark.parametrize("strategy", marked("ddp", "fsdp2", "zero2", "zero3"))
def test_two_models_that_train_against_each_other_are_those_of_one_process(strategy: str) -> None:
    [alone] = run_ranks(adversaries, 1, "single")
    assert run_ranks(adversaries, 2, strategy)[0] == pytest.approx(alone, rel=1e-5)


def windows_by_turns(strategy: str, zeroes_first: bool, syncs_each: bool = False) -> list[float]:
    """Train two models in the windows of both, one after the other; "plain" is the plain loop of one process."""
    from accel_trainer import Accelerator

    # Under FSDP2 each layer is resharded after its forward, and the loss leads to other tensors than the model has.
    layers = {"fsdp": {"wrap_policy": "size", "min_num_params": 5}} if strategy == "fsdp2" else {}
    config = {"strategy": strategy, "accumulation": {"num_steps": 2, "sync_each_batch": syncs_each}, **layers}
    accelerator = None if strategy == "plain" else Accelerator(cpu=True, config=config)
    models: list[Any] = [build(), build(1)]
    optimizers: list[Any] = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in models]
    if accelerator is not None:
        *models, optimizers[0], optimizers[1] = accelerator.prepare(*models, *optimizers)
    losses = []
    for step in range(6):
        rows = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step))
        with nullcontext() if accelerator is None else accelerator.accumulate():
            for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                if accelerator is None:
                    loss = (model(rows) - index).square().mean()
                    (loss / 2).backward()
                    if step % 2:
                        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                        optimizer.step()
                        optimizer.zero_grad()
                    losses.append(loss.item())
                    continue
                if zeroes_first:
                    optimizer.zero_grad()
                loss = (model(own_rows(accelerator, step)) - index).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                if not zeroes_first:
                    optimizer.zero_grad()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


@pytest.mark.parametrize("zeroes_first", [True, False])
@pytest.mark.parametrize(
    ("strategy", "num_ranks", "syncs_each"),
    [("single", 1, False), ("ddp", 2, False), ("fsdp2", 2, False), ("fsdp2", 2, True)],  # synced, shards have gradients
)
def test_models_that_take_turns_in_a_micro_batch_keep_their_gradients(
    strategy: str, num_ranks: int, syncs_each: bool, zeroes_first: bool
) -> None:
    [alone] = run_ranks(windows_by_turns, 1, "plain", zeroes_first)
    found = run_ranks(windows_by_turns, num_ranks, strategy, zeroes_first, syncs_each)
    assert found[0] == pytest.approx(alone, rel=1e-5)


def two_losses_of_one_forward(strategy: str) -> list[float]:
    accelerator = begin(strategy)
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    losses = []
    for step in range(4):
        output = model(own_rows(accelerator, step))
        first, second = output.square().mean(), (output - 1).abs().mean()
        accelerator.backward(first, retain_graph=True)
        accelerator.backward(torch.ones((), requires_grad=True) * 2)  # of no parameter
        take_update(second, optimizer, accelerator)
        losses.append(accelerator.reduce((first + second).detach(), "mean").item())
        if step:
            model(own_rows(accelerator, step)).sum().item()  # a forward without a backward between
    return losses


def test_the_gradients_of_two_backwards_of_one_forward_are_averaged_under_fsdp2() -> None:
    [alone] = run_ranks(two_losses_of_one_forward, 1, "single")
    assert run_ranks(two_losses_of_one_forward, 2, "fsdp2")[0] == pytest.approx(alone, rel=1e-5)


def backwards_behind_all_forwards(strategy: str) -> list[float]:
    """Run all forwards of an update within no_sync(), and ask for an exchange in the last backward."""
    accelerator = begin(strategy)
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    means = []
    for step in range(3):
        with accelerator.no_sync(model):
            losses = [model(own_rows(accelerator, 3 * step + index)).square().mean() for index in range(3)]
        for loss in losses[:-1]:
            accelerator.backward(loss)
        with accelerator.trigger_sync_in_backward(model):
            take_update(losses[-1], optimizer, accelerator)
        means.append(accelerator.reduce(sum(losses).detach(), "mean").item())
    return means


def test_ddp_takes_backwards_of_forwards_without_an_exchange() -> None:
    [alone] = run_ranks(backwards_behind_all_forwards, 1, "single")
    assert run_ranks(backwards_behind_all_forwards, 2, "ddp")[0] == pytest.approx(alone, rel=1e-5)


def head_joins_in(strategy: str) -> list[float]:
    """Train with a head that joins the optimizer behind prepare(), by the parameters that it had before."""
    accelerator = begin(strategy)
    model = build()
    head = list(model[-1].named_parameters())
    optimizer = torch.optim.SGD(model[0].named_parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    optimizer.add_param_group({"params": head})
    losses = []
    for step in range(3):
        loss = (model(own_rows(accelerator, step)) - 1).square().mean()
        take_update(loss, optimizer, accelerator)
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def test_a_group_that_is_added_later_trains_under_fsdp2() -> None:
    [alone] = run_ranks(head_joins_in, 1, "single")
    assert run_ranks(head_joins_in, 2, "fsdp2")[0] == pytest.approx(alone, rel=1e-5)


def refusal(strategy: str, loop: Callable[[Any, Any, Any], None]) -> str:
    accelerator = begin(strategy)
    model = build()
    model[0].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained))
    return refused(lambda: loop(accelerator, model, optimizer))


def step_backward_twice(accelerator: Any, model: Any, optimizer: Any) -> None:
    for _ in range(2):
        accelerator.backward(model(own_rows(accelerator, 0)).square().mean(), retain_graph=True)
    accelerator.backward(torch.ones((), requires_grad=True) * 2)  # of no parameter of the model
    output = model(own_rows(accelerator, 0))
    accelerator.backward(output.square().mean(), retain_graph=True)
    accelerator.backward(output.abs().mean())


def step_backward_behind_two_forwards(accelerator: Any, model: Any, optimizer: Any) -> None:
    for _ in range(2):  # two forwards and one backward, and a backward behind each forward
        accelerator.backward(sum(model(own_rows(accelerator, step)).square().mean() for step in range(2)))
        accelerator.backward(model(own_rows(accelerator, 2)).square().mean())
    real, fake = model(own_rows(accelerator, 0)), model(own_rows(accelerator, 1))
    accelerator.backward(real.square().mean())
    accelerator.backward(fake.abs().mean())


def train_what_was_frozen(accelerator: Any, model: Any, optimizer: Any) -> None:
    judge = build(1, width=1).requires_grad_(False)
    judge = accelerator.prepare(judge)
    rows = own_rows(accelerator, 0)
    accelerator.backward(judge(model(rows)).square().mean())
    accelerator.unwrap_model(judge).requires_grad_(True)
    with torch.no_grad():
        judge(model(rows))
    accelerator.backward(judge(model(rows)).square().mean())


def add_a_group_of_no_model(accelerator: Any, model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": nn.Linear(1, 1).parameters()})


def add_losses_of_two(accelerator: Any, model: Any, optimizer: Any) -> None:
    another = build(1)
    another, _ = accelerator.prepare(another, torch.optim.AdamW(another.parameters()))
    rows = own_rows(accelerator, 0)
    accelerator.backward(model(rows).square().mean() + another(rows).square().mean())


def prepare_muon(accelerator: Any, model: Any, optimizer: Any) -> None:
    another = nn.Linear(4, 1, bias=False)
    accelerator.prepare(another, torch.optim.Muon(another.parameters()))


def penalise_gradients(accelerator: Any, model: Any, optimizer: Any) -> None:
    rows = own_rows(accelerator, 0).requires_grad_()
    if accelerator.strategy.name == "fsdp2":  # What makes no graph is as it was: a step towards the worst input, say.
        (worst,) = torch.autograd.grad(model(rows).sum(), rows)
        accelerator.backward(model(rows + worst.sign()).square().mean())
    torch.autograd.grad(model(rows).sum(), rows, create_graph=True)


@pytest.mark.parametrize(
    ("strategy", "loop", "message"),
    [
        ("ddp", step_backward_twice, "backward() was called a second time after one forward of Sequential, and DDP"),
        ("ddp", step_backward_behind_two_forwards, "a second backward reached parameters of Sequential since its last"),
        ("ddp", train_what_was_frozen, "'0.weight' of Sequential was frozen when the model was prepared, and is "),
        ("ddp", add_a_group_of_no_model, "2 of 2 parameters of the new group belong to no model that AdamW was"),
        (
            "fsdp2",
            prepare_muon,
            "torch.optim.Muon cannot train with strategy 'fsdp2': a matrix of shape (1, 4) has",
        ),
        ("fsdp2", penalise_gradients, "a backward of FSDPSequential with create_graph=True, for a gradient penalty"),
        pytest.param("zero2", penalise_gradients, "a backward of Sequential was not begun by ", marks=needs_deepspeed),
        pytest.param("zero2", add_losses_of_two, "backward() was called with a loss of 2", marks=needs_deepspeed),
    ],
)
def test_what_an_engine_would_train_otherwise_is_refused(strategy: str, loop: Any, message: str) -> None:
    found = run_ranks(refusal, 2, strategy, loop)
    assert all(said.startswith(message) for said in found), found
