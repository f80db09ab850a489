"""A state that does not fit one of several models changes none of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from accel_trainer import Accelerator
from accel_trainer.errors import IncompatibleCheckpointError


def prepared(
    widths: Sequence[int], optimizers: Sequence[Callable[..., torch.optim.Optimizer]]
) -> tuple[Accelerator, list[Any]]:
    accelerator = Accelerator(cpu=True)
    models = [nn.Linear(width, width) for width in widths]
    made = [kind(m.parameters(), lr=0.1) for kind, m in zip(optimizers, models, strict=True)]
    things: list[Any] = list(accelerator.prepare(*models, *made))
    for model, optimizer, width in zip(things[: len(widths)], things[len(widths) :], widths, strict=True):
        accelerator.backward(model(torch.ones(1, width)).sum())
        optimizer.step()
    return accelerator, things


def in_two_groups(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [parameter]} for parameter in parameters], lr=lr)


def save_own(folder: Path, accelerator: Accelerator, things: Sequence[Any]) -> None:
    accelerator.save_state(folder)


def save_as_accelerate(folder: Path, accelerator: Accelerator, things: Sequence[Any]) -> None:
    folder.mkdir()
    for index, ending in enumerate(["", "_1"]):
        save_file(things[index].state_dict(), folder / f"model{ending}.safetensors")
        torch.save(things[2 + index].state_dict(), folder / f"optimizer{ending}.bin")
    torch.save({}, folder / "random_states_0.pkl")


SAVERS = {"own": save_own, "accelerate": save_as_accelerate}


@pytest.mark.parametrize("kind", SAVERS)
@pytest.mark.parametrize("differs", ["model", "optimizer"])
def test_what_does_not_fit_the_second_model_leaves_the_first_as_it_was(tmp_path: Path, kind: str, differs: str):
    SAVERS[kind](tmp_path / "s", *prepared([2, 3], [torch.optim.AdamW] * 2))
    if differs == "model":
        accelerator, things = prepared([2, 4], [torch.optim.AdamW] * 2)
        message = r"weight is \(3, 3\) in the checkpoint and \(4, 4\)"
    else:
        accelerator, things = prepared([2, 3], [torch.optim.AdamW, in_two_groups])
        message = r"optimizer('s)? state .* group"
    before = [copy.deepcopy(thing.state_dict()) for thing in things]
    with pytest.raises(IncompatibleCheckpointError, match=message):
        accelerator.load_state(tmp_path / "s")
    torch.testing.assert_close([thing.state_dict() for thing in things], before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", SAVERS)
def test_a_state_that_fits_all_models_reaches_all_of_them(tmp_path: Path, kind: str):
    accelerator, things = prepared([2, 3], [torch.optim.AdamW, torch.optim.Adagrad])
    saved = [copy.deepcopy(thing.state_dict()) for thing in things]
    SAVERS[kind](tmp_path / "s", accelerator, things)
    accelerator, things = prepared([2, 3], [torch.optim.AdamW, torch.optim.Adagrad])
    accelerator.load_state(tmp_path / "s")
    torch.testing.assert_close([thing.state_dict() for thing in things], saved, rtol=0, atol=0)


Things = tuple[list[nn.Module], list[torch.optim.Optimizer]]


def swapped() -> Things:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    return [a, b], [torch.optim.Adam(b.parameters()), torch.optim.Adam(a.parameters())]


def behind_a_teacher() -> Things:
    teacher, student = nn.Linear(2, 2), nn.Linear(2, 2)
    return [teacher.requires_grad_(False), student], [torch.optim.Adam(student.parameters())]


def two_of_one_model() -> Things:
    model = nn.Linear(2, 2)
    return [model], [torch.optim.Adam([model.bias]), torch.optim.Adam([model.weight])]


def one_of_two_models() -> Things:
    a, b = nn.Linear(2, 2), nn.Linear(2, 3)
    return [a, b], [torch.optim.Adam([{"params": [a.weight, b.weight]}, {"params": [b.bias]}, {"params": [a.bias]}])]


@pytest.mark.parametrize("build", [swapped, behind_a_teacher, two_of_one_model, one_of_two_models])
def test_optimizers_of_accelerate_are_numbered_as_they_were_prepared(tmp_path: Path, build: Callable[[], Things]):
    models, optimizers = build()
    for scale, model in enumerate(models, 1):
        if model.weight.requires_grad:
            model(torch.full((1, 2), float(scale))).sum().backward()
    for number, optimizer in enumerate(optimizers):
        optimizer.step()
        torch.save(optimizer.state_dict(), tmp_path / f"optimizer{f'_{number}' if number else ''}.bin")
    for number, model in enumerate(models):
        save_file(model.state_dict(), tmp_path / f"model{f'_{number}' if number else ''}.safetensors")
    torch.save({}, tmp_path / "random_states_0.pkl")
    accelerator, (own_models, own_optimizers) = Accelerator(cpu=True), build()
    accelerator.prepare(*own_models, *own_optimizers)
    accelerator.load_state(tmp_path)
    for saved, own in zip([*models, *optimizers], [*own_models, *own_optimizers], strict=True):
        torch.testing.assert_close(own.state_dict(), saved.state_dict(), rtol=0, atol=0)


def test_a_directory_of_one_model_is_not_loaded_into_two(tmp_path: Path):
    model = nn.Linear(2, 2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "s", no_dist=True)
    accelerator, policy, reference = Accelerator(cpu=True), nn.Linear(2, 2), nn.Linear(2, 2)
    accelerator.prepare(policy, reference)
    with pytest.raises(IncompatibleCheckpointError, match="which holds one model, and 2 are prepared; take the others"):
        accelerator.load_state(tmp_path / "s")
    accelerator.register_load_state_pre_hook(lambda models, folder: models.remove(reference))
    before = reference.weight.clone()
    accelerator.load_state(tmp_path / "s")
    assert torch.equal(policy.weight, model.weight)
    assert torch.equal(reference.weight, before)
