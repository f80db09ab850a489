"""Modules that FSDP2 leaves whole: their gradients are averaged over the ranks like the sharded ones."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.ranks import preload
from tests.scenarios import Scenarios
from tests.sharded import Net, batch, build, full, own_rows, prepare, train, train_alone

preload("accel_trainer.accelerator", "tests.scenarios", "tests.sharded")

SCENARIOS = Scenarios()
results = SCENARIOS.results


@functools.cache  # not before the ranks are forked, which cannot use autograd's threads then
def reference() -> Any:
    return pytest.approx(train_alone(build()), abs=1e-6)


@SCENARIOS.add
def ignored() -> Any:
    found = {}
    for name, patterns in {"leaf": ("head",), "block": (r"blocks\.1",), "inside": (r"blocks\.\d\.linear",)}.items():
        model = build()
        unit = prepare(model, ignored_modules=patterns)
        losses = train(unit)
        plain = sorted(name for name, p in model.named_parameters() if not isinstance(p, DTensor))
        found[name] = losses, plain, {name: full(p) for name, p in model.named_parameters()}
    return found


def test_ignored_modules_stay_whole_and_equal_on_all_ranks():
    first, second = results("ignored")
    expected = {
        "leaf": ["head.bias", "head.weight"],
        "block": ["blocks.1.linear.bias", "blocks.1.linear.weight"],
        "inside": [f"blocks.{i}.linear.{kind}" for i in range(3) for kind in ("bias", "weight")],
    }
    for name, plain in expected.items():
        for result in (first, second):
            assert result[name][0] == reference()
            assert result[name][1] == plain
        for parameter, value in first[name][2].items():
            assert torch.equal(value, second[name][2][parameter]), (name, parameter)


@SCENARIOS.add
def ignored_in_windows() -> Any:
    found = []
    for each in (False, True):
        model = build()
        unit = prepare(model, ignored_modules=("head",))
        for index, rows in enumerate(own_rows().chunk(2)):
            unit.set_gradient_sync(each or index == 1)
            unit.backward(unit.model(rows) / 2)
        found.append((full(model.head.weight.grad), full(model.stem.weight.grad)))
    # The loss of two models, sent backward through the unit of the one without ignored modules.
    model, other = build(), build()
    unit = prepare(model, ignored_modules=("head",))
    first = prepare(other)
    first.backward(unit.model(own_rows()) + first.model(own_rows()))
    found.append((full(model.head.weight.grad), full(model.stem.weight.grad)))
    # Frozen when it was laid out, and trained later.
    model = build()
    model.head.requires_grad_(False)
    unit = prepare(model, ignored_modules=("head",), train=False)
    model.head.requires_grad_(True)
    unit.backward(unit.model(own_rows()))
    found.append((full(model.head.weight.grad), full(model.stem.weight.grad)))
    return found


def test_gradients_of_ignored_modules_are_averaged_once_per_window():
    model = build()
    model(batch()).backward()
    for found in results("ignored_in_windows"):
        for head, stem in found:
            torch.testing.assert_close(head, model.head.weight.grad)
            torch.testing.assert_close(stem, model.stem.weight.grad)


class Scaled(Net):
    """A model with a scalar parameter, as CLIP has one."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.logit_scale


def build_scaled() -> Scaled:
    torch.manual_seed(0)
    return Scaled()


@SCENARIOS.add
def scalar_parameter() -> Any:
    model = build_scaled()
    losses = train(prepare(model))
    return losses, isinstance(model.logit_scale, DTensor), model.logit_scale.item()


def test_a_scalar_parameter_is_left_whole_and_trains():
    reference = train_alone(model := build_scaled())
    for losses, is_sharded, value in results("scalar_parameter"):
        assert losses == pytest.approx(reference, abs=1e-6)
        assert not is_sharded
        assert value == pytest.approx(model.logit_scale.item())


@SCENARIOS.add
def ignored_in_bf16() -> Any:
    found = []
    for pattern in ("head", r"blocks\.1"):
        model = build()
        seen: list[torch.dtype] = []
        model.head.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output.dtype))
        losses = train(prepare(model, precision="bf16", ignored_modules=(pattern,)))
        found.append((losses, set(seen), {p.dtype for p in model.parameters()}))
    return found


def test_ignored_modules_compute_in_the_configured_precision():
    reference = train_alone(build())
    for found in results("ignored_in_bf16"):
        for losses, computed, kept in found:
            assert losses == pytest.approx(reference, rel=0.03)
            assert computed == {torch.bfloat16}
            assert kept == {torch.float32}


@SCENARIOS.add
def module_without_parameters() -> Any:
    prepare(build())  # joins the job
    unit = prepare(nn.MSELoss(), train=False)
    x = torch.ones(2, requires_grad=True)
    unit.backward(unit.model(x, torch.zeros(2)))
    return type(unit.model).__name__, x.grad.tolist()


def test_a_module_without_parameters_is_left_alone():
    assert results("module_without_parameters") == [("MSELoss", [1.0, 1.0])] * 2
