"""Mixtures of experts under ZeRO-3: ranks that run different experts still gather the same parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("deepspeed")

from accel_trainer.errors import ConfigError
from tests.loops import take_update
from tests.ranks import preload, run_ranks
from tests.zero import accelerator, adamw, whole

preload("accel_trainer.accelerator", "deepspeed")


class Experts(nn.Module):
    """Sends each row to the expert that its first number chooses, and runs no other one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0].long()
        mixed = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            rows = (chosen == index).nonzero().squeeze(1)
            mixed = mixed.index_add(0, rows, self.experts[index](x[rows]))
        return mixed


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 3)
        self.experts = Experts()
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[:, :1], self.stem(x[:, 1:])], dim=1)
        return self.head(x + self.experts(x)).square().mean()


def build() -> Mixture:
    torch.manual_seed(0)
    return Mixture()


# Of each step, the expert of rank 0 and that of rank 1.
ROUTES = [(0, 1), (1, 2), (2, 2), (1, 0)]


def rows(step: int, rank: int) -> Tensor:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    x[:, 0] = ROUTES[step][rank]
    return x


def train_experts(classes: list[str] | str) -> Any:
    made = accelerator(3, config={"deepspeed_moe_layer_cls_names": classes})
    model = build()
    try:
        model, optimizer = made.prepare(model, adamw(model))
    except ConfigError as error:
        return str(error)
    for step in range(len(ROUTES)):
        take_update(model(rows(step, made.process_index)), optimizer, made)
    return whole(made, model)


def alone() -> list[Tensor]:
    model = build()
    optimizer = adamw(model)
    for step in range(len(ROUTES)):
        model(torch.cat([rows(step, 0), rows(step, 1)])).backward()
        for parameter in model.parameters():  # an expert that nobody chose: its gradient is zero under ZeRO
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def train_both() -> Any:
    refused = train_experts("Expert, Other")
    return train_experts("Experts"), refused


@pytest.mark.multirank
def test_ranks_that_choose_other_experts_train_as_one_process_does():
    (trained, refused), _ = run_ranks(train_both, 2, timeout=200)
    torch.testing.assert_close(trained, alone(), atol=1e-6, rtol=1e-5)
    assert "has no module of class Expert or Other, which zero_optimization.leaf_module.classes" in refused
    assert "ranks that run different experts would wait for each other" in refused
