"""A small model under DeepSpeed on this rank, and the same in plain PyTorch, for tests of the engine's adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.strategy_configs import prepare_unit, zero_section


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 7)
        self.head = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (4 * self.head(torch.tanh(self.stem(x)))).square().mean()


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(step: int = 0) -> Tensor:
    return 3 * torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def own_rows(step: int = 0) -> Tensor:
    return batch(step).chunk(dist.get_world_size())[dist.get_rank()]


def block(stage: int, offload: bool = False, **options: Any) -> dict[str, Any]:
    """Return a DeepSpeed configuration of a stage, for whole models."""
    zero = zero_section(stage, whole=20)
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {"zero_optimization": zero, "zero3_init_flag": False, **options}


def accelerator(stage: int, offload: bool = False, config: Any = None, **options: Any) -> Any:
    from accel_trainer import Accelerator

    content = {"strategy": "deepspeed", "deepspeed": block(stage, offload, **(config or {}))}
    return Accelerator(cpu=True, config=content, **options)


def layout(stage: int, offload: bool = False, config: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    """Return an Accelerator with a prepared model and optimizer."""
    made = accelerator(stage, offload, config, **options)
    model = build()
    return made, *made.prepare(model, adamw(model))


def unit_of(stage: int, config: Any) -> Any:
    """Return a unit, laid out without the facade: what it refuses on the CPU, the engine can do."""
    model = build()
    asked = {"strategy": "deepspeed", "deepspeed": block(stage, **config)}
    return prepare_unit(asked, model, [adamw(model)], use_cpu=True)


def alone(
    change: Callable[[nn.Module], Any] = lambda model: None, rows: Iterable[Tensor] | None = None
) -> list[Tensor]:
    """Train in plain PyTorch on whole batches; `change` sees the model before each step. Return its parameters."""
    model = build()
    optimizer = adamw(model)
    for own in map(batch, range(3)) if rows is None else rows:
        model(own).backward()
        change(model)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def whole(made: Any, model: Any) -> list[Tensor]:
    """Return the parameters of a prepared model on rank 0, an empty list elsewhere. Collective."""
    return list(made.get_state_dict(model).values())
