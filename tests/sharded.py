"""A small model laid out under FSDP2 on this rank, trained on its part of a batch; and the same without any ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.loops import take_update
from tests.strategy_configs import prepare_unit


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + torch.tanh(self.dropout(self.linear(x)))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).square().mean()


def build(dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(dropout)


def batch() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(3))


def own_rows() -> Tensor:
    return batch().chunk(dist.get_world_size())[dist.get_rank()]


def assert_same(found: Any, expected: Any) -> None:
    """Compare nested states: keys, dtypes and values."""
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        for value, wanted in itertools.zip_longest(found, expected):
            assert_same(value, wanted)
    else:
        assert found == expected


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def prepare(
    model: nn.Module,
    precision: str = "no",
    loss_scale: Any = None,
    train: bool = True,
    optimizer: Any = None,
    **options: Any,
) -> Any:
    """Lay a model out under FSDP2, with an optimizer unless told otherwise; return its unit."""
    policy = options.pop("policy", None)
    options.setdefault("wrap_classes", ("Block",))
    asked = {"strategy": "fsdp2"} | {f"fsdp.{name}": value for name, value in options.items()}
    optimizers = [optimizer] if optimizer else [adamw(model)] if train else []
    return prepare_unit(asked, model, optimizers, precision, wrap_policy=policy, loss_scale=loss_scale)


def loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output


def train(unit: Any, steps: int = 3) -> list[float]:
    """Train on this rank's rows; return the losses of the whole batch."""
    losses = []
    for _ in range(steps):
        loss = loss_of(unit.model(own_rows()))
        unit.backward(loss)
        unit.step()
        unit.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def train_alone(model: nn.Module, steps: int = 3, optimizer: Any = None) -> list[float]:
    optimizer = optimizer or adamw(model)
    return [take_update(loss_of(model(batch())), optimizer).item() for _ in range(steps)]


def full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
