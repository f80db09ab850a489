"""Weights whose memory is not in the order of their rows: transposed ones, and images with channels last."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.loops import take_update
from tests.ranks import preload, run_ranks
from tests.strategy_configs import config_of, marked, needs_deepspeed

preload("accel_trainer.accelerator")


def begin(strategy: str) -> Any:
    from accel_trainer import Accelerator

    return Accelerator(cpu=True, config=config_of(strategy, 4))


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 6), nn.Linear(6, 2))
    model.to(memory_format=torch.channels_last)
    model[2].weight = nn.Parameter(torch.randn(144, 6).mul(0.1).t())
    assert [p.is_contiguous() for p in model.parameters()] == [False, True, False, True, True, True]
    return model


def train(strategy: str) -> tuple[list[float], dict[str, Any]]:
    accelerator = begin(strategy)
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    images, losses = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)), []
    for _ in range(3):
        loss = model(images).pow(2).mean()
        take_update(loss, optimizer, accelerator)
        losses.append(loss.item())
    return losses, {name: value.numpy() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("strategy", marked("ddp", "fsdp2", "zero2", "zero3"))
def test_weights_in_another_order_train_as_on_one_process(strategy):
    (expected, weights), *_ = run_ranks(train, 1, "single")
    losses, found = run_ranks(train, 2, strategy)[0]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses[2] < losses[0]
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


class Twin(nn.Module):
    """Decodes by the transposed memory of its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)
        self.decoder.weight = nn.Parameter(self.encoder.weight.detach().t())


def refuse(strategy: str) -> str:
    from accel_trainer.errors import ConfigError

    model = Twin()
    with pytest.raises(ConfigError) as caught:
        begin(strategy).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "engine"), [("fsdp2", "FSDP2"), pytest.param("zero3", "DeepSpeed", marks=needs_deepspeed)]
)
def test_a_transposed_view_of_another_weight_is_refused_where_it_would_part_from_it(strategy, engine):
    message = (
        f"decoder.weight of Twin is not contiguous, and a view of the memory of encoder.weight: {engine} would make "
        "two parameters of them. Tie them by one Parameter object, transposed in forward "
        "(nn.functional.linear(x, other.weight.t())), or train with strategy: ddp"
    )
    assert run_ranks(refuse, 2, strategy) == [message] * 2
