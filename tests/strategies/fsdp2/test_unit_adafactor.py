"""Adafactor on shards: the update of one process, however parameters are sharded, and whatever the options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers.optimization import Adafactor

from accel_trainer.errors import ConfigError
from accel_trainer.strategies.fsdp2 import unit
from accel_trainer.strategies.fsdp2.unit import update_by_shards
from tests.ranks import preload, run_ranks

preload("transformers.optimization")

# Rows that do not divide, one row, and no second dimension.
SHAPES = [(7, 5), (8, 6), (3,), (2, 3, 5), (1, 4), (33, 17)]
OPTIONS: dict[str, dict[str, Any]] = {
    "trainer": {"lr": 1e-2, "scale_parameter": False, "relative_step": False},
    "first moment": {"lr": 1e-2, "scale_parameter": False, "relative_step": False, "beta1": 0.9, "weight_decay": 0.1},
    "relative": {"scale_parameter": True, "relative_step": True},
}
LAYOUTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "rows": ((2,), [Shard(0)]),
    "rows of three": ((3,), [Shard(0)]),
    "last dim": ((2,), [Shard(-1)]),
    "replicas": ((2, 2), [Replicate(), Shard(0)]),
    "both dims": ((2, 2), [Shard(0), Shard(-1)]),
}


def train(layout: str | None, kind: str, dtype: torch.dtype = torch.float32, state: Any = None) -> Any:
    """Take four steps, the last two after a reload of `state` if there is one; return the full parameters and state."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]

    def shard(full: torch.Tensor) -> torch.Tensor:
        return full if layout is None else distribute_tensor(full, mesh, LAYOUTS[layout][1])

    if layout is not None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", LAYOUTS[layout][0])
    parameters = [torch.nn.Parameter(shard(value.clone())) for value in values]
    optimizer = Adafactor(parameters, **OPTIONS[kind])
    schedule = LambdaLR(optimizer, lambda step: 0.5**step) if kind == "trainer" else None
    update_by_shards(optimizer)  # after the scheduler has wrapped step(), as in a script that makes both first
    for step in range(4):
        if step == 2 and state is not None:
            for parameter, saved, value in zip(parameters, state, values, strict=True):
                optimizer.state[parameter] = dict(saved["state"])
                parameter.data.copy_(shard(saved["value"].to(value.dtype)))
        gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = shard(gradient)
        optimizer.step()
        assert all(parameter.grad is not None for parameter in parameters)
        if schedule is not None:
            schedule.step()
        if step == 1:
            halfway = [{"state": full_state(optimizer.state[p]), "value": full(p).clone()} for p in parameters]
    return [full(parameter).float().numpy() for parameter in parameters], halfway


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def full_state(state: dict[str, Any]) -> dict[str, Any]:
    return {key: full(value).clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def train_all(layouts: list[str], cases: list[tuple[str, torch.dtype]], state: Any) -> dict[Any, Any]:
    found = {(layout, *case): train(layout, *case)[0] for layout in layouts for case in cases}
    return {**found, "reloaded": train(layouts[0], "trainer", state=state)[0]}


CASES = [*((kind, torch.float32) for kind in OPTIONS), ("trainer", torch.bfloat16)]


@pytest.mark.multirank
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_layout_trains_as_one_process(world_size, monkeypatch):
    layouts = [name for name, (shape, _) in LAYOUTS.items() if np.prod(shape) == world_size]
    one = {case: train(None, *case) for case in CASES}

    ranks = run_ranks(train_all, world_size, layouts, CASES, one[CASES[0]][1])

    for found in ranks:
        for layout in layouts:
            for kind, dtype in CASES:
                tolerance = 2e-6 if dtype == torch.float32 else 2e-2
                for mine, expected in zip(found[layout, kind, dtype], one[kind, dtype][0], strict=True):
                    np.testing.assert_allclose(mine, expected, atol=tolerance, err_msg=f"{layout} {kind} {dtype}")
        # A state that one process saved: unsharded statistics.
        for mine, expected in zip(found["reloaded"], one[CASES[0]][0], strict=True):
            np.testing.assert_allclose(mine, expected, atol=2e-6)


def in_chunks() -> Any:
    unit._MAX_CHUNK_NUMEL = 20
    return train("rows", "trainer")[0]


@pytest.mark.multirank
def test_chunks_change_nothing():
    for mine, expected in zip(run_ranks(in_chunks, 2)[0], train(None, "trainer")[0], strict=True):
        np.testing.assert_allclose(mine, expected, atol=2e-6)


def step_with_closure() -> None:
    dist.init_process_group("gloo")
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)]))
    optimizer = Adafactor([parameter])
    update_by_shards(optimizer)
    with pytest.raises(ConfigError, match=r"step\(closure\) of Adafactor .*call backward\(\) and then step\(\)"):
        optimizer.step(lambda: 0.0)


@pytest.mark.multirank
def test_a_closure_is_refused():
    run_ranks(step_with_closure, 2)


def test_other_optimizers_are_left_alone():
    optimizer = torch.optim.Adafactor([torch.nn.Parameter(torch.ones(2, 2))])
    update_by_shards(optimizer)
    assert not optimizer._optimizer_step_pre_hooks
