"""What was not prepared, or not together with what belongs to it: scripts hand it to an Accelerator, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

from accel_trainer import Accelerator, load_checkpoint_in_model
from accel_trainer.errors import ConfigError
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")


def step(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()


def reference(updates: int) -> dict[str, Tensor]:
    """Weights of the same model in torch's own loop."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(updates):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("is_safe", [True, False])
def test_weights_of_a_model_that_was_never_prepared_are_saved(is_safe: bool, tmp_path: Path):
    model, _ = build()
    accelerator = Accelerator(cpu=True)
    assert same(accelerator.get_state_dict(torch.compile(model)), model.state_dict())
    accelerator.save_model(torch.compile(model), tmp_path, safe_serialization=is_safe)
    other = nn.Linear(2, 1)
    load_checkpoint_in_model(other, tmp_path)
    assert same(other.state_dict(), model.state_dict())
    assert accelerator.unwrap_model(model) is model


def test_an_optimizer_without_its_model_steps_on_one_process():
    accelerator = Accelerator(cpu=True)
    model, optimizer = build()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
    optimizer, schedule = accelerator.prepare(optimizer, schedule)
    for _ in range(3):
        step(accelerator, model, optimizer)
        schedule.step()
    assert same(model.state_dict(), reference(3))
    assert schedule.last_epoch == 3
    accelerator.backward(model(torch.full((1, 2), 3.0)).sum())
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() == pytest.approx(19**0.5)
    accelerator.clip_grad_value_(model.parameters(), 0.1)
    assert max(parameter.grad.abs().max().item() for parameter in model.parameters()) == pytest.approx(0.1)


def test_an_optimizer_joins_its_model_when_that_is_prepared_later():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = build()
    optimizer = accelerator.prepare(optimizer)
    assert optimizer.prepared == ()
    model = accelerator.prepare(model)
    assert len(optimizer.prepared) == 1
    for _ in range(6):
        with accelerator.accumulate(model):
            step(accelerator, model, optimizer)
    assert same(accelerator.get_state_dict(model), reference(3))


def test_an_optimizer_without_its_model_is_saved_and_resumed(tmp_path: Path):
    accelerator = Accelerator(cpu=True)
    model, optimizer = build()
    optimizer = accelerator.prepare(optimizer)
    step(accelerator, model, optimizer)
    accelerator.save_state(tmp_path / "state")
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step(accelerator, model, optimizer)
    model.load_state_dict(weights)
    accelerator.load_state(tmp_path / "state")
    step(accelerator, model, optimizer)
    assert same(model.state_dict(), reference(2))


def on_two_ranks(directory: str) -> Any:
    model, optimizer = build()
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=r"Adam was prepared without its model: it steps 2 parameters \(of shapes"):
        accelerator.prepare(optimizer)
    with torch.no_grad():
        model.weight.fill_(accelerator.process_index)
    accelerator.save_model(model, directory)
    sharded = nn.Linear(2, 1)
    mesh = init_device_mesh("cpu", (2,))
    sharded.weight = nn.Parameter(DTensor.from_local(torch.zeros(1, 2), mesh, [Replicate()]))
    with pytest.raises(ConfigError, match="Linear was not prepared by this Accelerator"):
        accelerator.save_model(sharded, directory)
    return accelerator.get_state_dict(model)["weight"]


def test_on_two_ranks_a_model_is_named_and_rank_0s_weights_are_saved(tmp_path: Path):
    found = run_ranks(on_two_ranks, 2, str(tmp_path))
    assert load_file(tmp_path / "model.safetensors")["weight"].eq(0).all()
    assert [tensor.mean().item() for tensor in found] == [0.0, 1.0]


def test_what_is_prepared_says_so():
    model, optimizer = build()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = torch.utils.data.DataLoader(torch.ones(2, 2))
    prepared = Accelerator(cpu=True).prepare(model, optimizer, schedule, loader)
    assert all(item._is_accelerate_prepared for item in prepared)
    assert not any(getattr(item, "_is_accelerate_prepared", False) for item in (optimizer, schedule, loader))
