"""Statistics of batch norms, of which each rank has its own in training: what is evaluated, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.loops import take_update
from tests.ranks import preload, run_ranks
from tests.strategy_configs import config_of, marked

preload("accel_trainer.accelerator")
COMPILED = {"strategy": "fsdp2", "compile": {"backend": "eager", "regional": False}}
HELD_OUT = torch.randn(6, 4, generator=torch.Generator().manual_seed(9))


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)]
    return nn.Sequential(*layers)


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): value.clone() for name, value in model.named_buffers()}


def evaluate(model: nn.Module) -> list[float]:
    """Return what a model makes of the same rows on all ranks."""
    model.eval()
    with torch.no_grad():
        found = model(HELD_OUT)[:, 0].tolist()
    model.train()
    return found


def train(accelerator: Any, model: Any, optimizer: Any, seed: int) -> None:
    for step in range(3):
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed + step)) * (1 + dist.get_rank())
        take_update(model(rows.chunk(2)[dist.get_rank()]).square().mean(), optimizer, accelerator)


def run(strategy: str, folder: str) -> dict[str, Any]:
    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=True, config=COMPILED if strategy == "compiled" else config_of(strategy, 4))
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    inner = accelerator.unwrap_model(model)
    train(accelerator, model, optimizer, seed=0)
    found: dict[str, Any] = {"after training": statistics(inner)}
    accelerator.save_state(folder)
    found["evaluated"] = [evaluate(model), evaluate(model)]
    found["after evaluation"] = statistics(inner)
    train(accelerator, model, optimizer, seed=5)
    found["later"] = evaluate(model)
    accelerator.load_state(folder)
    found["after loading"] = statistics(inner)
    found["loaded"] = evaluate(model)
    saved = build()
    saved.load_state_dict(accelerator.get_state_dict(model), strict=accelerator.is_main_process)
    found["of the saved model"] = evaluate(saved)
    return found


@pytest.mark.parametrize("strategy", marked("ddp", "fsdp2", "compiled", "zero1", "zero2", "zero3"))
def test_the_statistics_of_rank_0_are_evaluated_and_saved(tmp_path: Path, strategy: str) -> None:
    first, second = run_ranks(run, 2, strategy, str(tmp_path / "state"))
    trained = first["after training"]
    assert any(not torch.equal(value, second["after training"][name]) for name, value in trained.items())
    for found in (first, second):
        for when in ("after evaluation", "after loading"):
            torch.testing.assert_close(found[when], trained, rtol=0, atol=0)
        assert found["evaluated"] == [pytest.approx(first["of the saved model"], rel=1e-5)] * 2
        assert found["loaded"] == pytest.approx(first["of the saved model"], rel=1e-5)
    assert first["later"] == pytest.approx(second["later"], rel=1e-6)
    assert first["later"] != pytest.approx(first["loaded"], rel=1e-3)
