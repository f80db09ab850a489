"""One process: the user's own objects, loss scaling by hand on the CPU, and who may have which optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_trainer import Accelerator
from accel_trainer.config import resolve
from accel_trainer.errors import ConfigError
from accel_trainer.precision import build_precision
from accel_trainer.runtime.process import init_process
from accel_trainer.strategies.api import Strategy, TrainJob, TrainUnit
from accel_trainer.strategies.gradients import LossScale
from accel_trainer.strategies.single import NativeUnit, SingleStrategy
from accel_trainer.tree import leaves

Scaler = torch.amp.GradScaler


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def batch(factor: float = 1.0) -> Tensor:
    return torch.arange(6.0).reshape(2, 3) * factor / 6


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def prepare(model: nn.Module, optimizer: Any = None, loss_scale: Any = None, **explicit: Any) -> NativeUnit:
    process = init_process({}, use_cpu=True)
    resolved = resolve(explicit=explicit, environ={})
    job = TrainJob(model, [optimizer] if optimizer else [], resolved, loss_scale=loss_scale)
    return SingleStrategy().prepare(job, build_precision("no", process.device), process)


def step_alone(model: nn.Module, max_norm: float = float("inf"), steps: int = 1) -> list[Tensor]:
    """Return the parameters after plain steps."""
    optimizer = sgd(model)
    for _ in range(steps):
        model(batch()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(model: nn.Module, expected: list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value)


# --- the user's own objects ----------------------------------------------------------------------------------------


def test_an_engine_of_ones_own_inherits_what_it_does_not_need():
    class Unit(TrainUnit):
        def __init__(self, model: nn.Module) -> None:
            self.model = self.module = model

    class OwnStrategy(Strategy):
        pass

    model = Net()
    unit = Unit(model)
    unit.set_gradient_sync(False)
    unit.unscale_gradients()
    unit.release()
    with unit.sync_in_backward(), OwnStrategy().building(in_pieces=True):
        assert unit.known_parameters() == {id(p): p for p in model.parameters()}
    assert (unit.held_gradients(), unit.take_scheduler(), unit.local_bytes(in_window=True)) == (None, None, 0)
    resolved = resolve(environ={})
    assert OwnStrategy().start(resolved, init_process({}, use_cpu=True)) is resolved


def test_the_unit_holds_the_users_own_objects():
    model = Net()
    optimizer = sgd(model)
    unit = prepare(model, optimizer)
    assert isinstance(unit, TrainUnit)
    assert unit.model is unit.module is model
    assert unit.optimizers == [optimizer]
    assert list(vars(model)) == list(vars(Net()))


@pytest.mark.parametrize("fused", [False, True])
def test_state_from_before_prepare_comes_to_where_the_parameters_are(fused: bool):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    lbfgs = torch.optim.LBFGS(model.parameters())
    for each in (optimizer, lbfgs):
        model(batch()).backward()
        each.step(lambda: model(batch()))
    entries = [dict(optimizer.state[p]) for p in model.parameters()]
    lists = dict(lbfgs.state[model.layer.weight])
    model.to("meta")  # the parameters become other objects there, which they do on no accelerator
    moved = list(model.parameters())
    for each in (optimizer, lbfgs):
        each.param_groups[0]["params"] = moved
    optimizer.state.update(zip(moved, entries, strict=True))
    lbfgs.state[moved[0]] = lists

    unit = NativeUnit(model, model)
    unit.bind_optimizer(optimizer)
    for parameter in moved:
        devices = {key: value.device.type for key, value in optimizer.state[parameter].items()}
        assert devices == {"exp_avg": "meta", "exp_avg_sq": "meta", "step": "meta" if fused else "cpu"}
    NativeUnit(model, model).bind_optimizer(lbfgs)
    assert {t.device.type for t in leaves(lbfgs.state[moved[0]]) if isinstance(t, Tensor)} == {"meta"}


def test_a_closure_is_called():
    model = Net()
    unit = prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2))
    calls = []

    def closure() -> Tensor:
        unit.zero_grad()
        loss = unit.model(batch())
        loss.backward()
        calls.append(loss.item())
        return loss

    unit.step(closure)
    assert len(calls) >= 2
    assert unit.model(batch()).item() < calls[0]


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ConfigError, match=r"2 parameter\(s\) of Net are on the meta device \(first: 'layer.weight'\)"):
        prepare(model)


# --- which optimizer -----------------------------------------------------------------------------------------------


def test_an_optimizer_that_is_not_the_models_alone_is_refused():
    with pytest.raises(ConfigError, match=r"2 of 2 parameters of the optimizer do not belong to Net; .* one prep"):
        prepare(Net(), sgd(Net()))
    model = Net()
    unit = prepare(model, sgd(model))
    with pytest.raises(ConfigError, match=r"2 parameter\(s\) are in two optimizers, SGD and SGD, .*to one of them"):
        unit.bind_optimizer(sgd(model))
    unit.bind_optimizer(unit.optimizers[0])  # the same one again is no second
    assert len(unit.optimizers) == 1


def test_a_step_of_no_optimizer_or_of_several_is_refused():
    unit = prepare(model := Net())
    with pytest.raises(ConfigError, match=r"Net was prepared without an optimizer; pass one to prepare\(\)"):
        unit.step()
    for optimizer in weight_and_bias(model):
        unit.bind_optimizer(optimizer)
    with pytest.raises(ConfigError, match=r"Net has several optimizers \(SGD, SGD\); name the one that steps"):
        unit.step()


# --- fp16's loss scale ---------------------------------------------------------------------------------------------


def test_scaled_losses_give_plain_steps():
    model = Net()
    unit = prepare(model, sgd(model), LossScale(Scaler("cpu", init_scale=1024.0)))
    unit.backward(unit.model(batch()))
    unit.unscale_gradients()
    unit.unscale_gradients()  # once a step, however often it is asked for
    norm = unit.clip_grad_norm(model.parameters(), 0.01)
    reference = Net()
    reference(batch()).backward()
    assert norm is not None
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(reference.parameters(), 1.0).item())
    assert unit.step().applied
    assert_equal(model, step_alone(Net(), 0.01))


def test_an_overflow_skips_the_step_and_lowers_the_scale():
    model = Net()
    scaler = Scaler("cpu", init_scale=1024.0, growth_interval=1)
    unit = prepare(model, sgd(model), LossScale(scaler))
    before = [p.detach().clone() for p in model.parameters()]
    unit.backward(unit.model(batch(float("inf"))))
    assert not unit.step().applied
    assert_equal(model, before)
    assert scaler.get_scale() == 512.0
    unit.zero_grad()
    unit.backward(unit.model(batch()))
    assert unit.step().applied
    assert_equal(model, step_alone(Net()))
    assert scaler.get_scale() == 1024.0


def test_gradients_that_are_dropped_after_clipping_do_not_disturb_the_next_step():
    # "Skip this batch, its norm is not finite": without a step in between.
    model = Net()
    scaler = Scaler("cpu", init_scale=1024.0)
    unit = prepare(model, sgd(model), LossScale(scaler))
    unit.backward(unit.model(batch(float("inf"))))
    unit.clip_grad_norm(model.parameters(), 1.0)
    unit.zero_grad()
    assert scaler.get_scale() == 512.0  # or every later batch would overflow, too
    unit.backward(unit.model(batch()))
    unit.clip_grad_norm(model.parameters(), 0.01)
    assert unit.step().applied
    assert_equal(model, step_alone(Net(), 0.01))


@pytest.mark.parametrize("clipped", [False, True])
def test_one_scale_serves_the_units_that_a_loss_reaches(clipped: bool):
    # Every update of the scale doubles it: the second unit's gradients carry the scale from before.
    scaler = Scaler("cpu", init_scale=4.0, growth_interval=1)
    models = [Net(0), Net(1)]
    loss_scale = LossScale(scaler)
    units = [prepare(model, sgd(model), loss_scale) for model in models]
    bound = 0.01 if clipped else float("inf")
    for _ in range(2):
        units[0].backward(units[0].model(batch()) + units[1].model(batch()))
        if clipped:
            for unit in units:
                unit.clip_grad_norm(unit.module.parameters(), bound)
        assert [unit.step().applied for unit in units] == [True, True]
        for unit in units:
            unit.zero_grad()
    for seed, model in enumerate(models):
        assert_equal(model, step_alone(Net(seed), bound, steps=2))


def test_an_overflow_in_one_unit_is_not_the_others():
    scaler = Scaler("cpu", init_scale=4.0)
    loss_scale = LossScale(scaler)
    good, bad = (prepare(model, sgd(model), loss_scale) for model in (Net(), Net()))
    good.backward(good.model(batch()) + bad.model(batch(float("inf"))))
    for unit in (good, bad):
        unit.unscale_gradients()
    assert [good.step().applied, bad.step().applied] == [True, False]
    assert_equal(good.module, step_alone(Net()))
    assert_equal(bad.module, [p.detach() for p in Net().parameters()])
    assert scaler.get_scale() == 2.0


def weight_and_bias(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]


def of_two_optimizers(scaler: Any) -> tuple[NativeUnit, list[torch.optim.Optimizer]]:
    """Return a unit of a model with an optimizer for its weight and one for its bias, and both."""
    model = Net()
    unit, optimizers = prepare(model, loss_scale=LossScale(scaler)), weight_and_bias(model)
    for optimizer in optimizers:
        unit.bind_optimizer(optimizer)
    return unit, optimizers


@pytest.mark.parametrize("clipped", [False, True])
def test_the_scale_follows_a_window_once_all_its_optimizers_have_stepped(clipped: bool):
    scaler = Scaler("cpu", init_scale=4.0, growth_interval=1)
    unit, (weight, bias) = of_two_optimizers(scaler)
    model = unit.module
    bound = 0.01 if clipped else float("inf")
    scales = []
    for _ in range(2):
        unit.backward(unit.model(batch()))
        if clipped:
            unit.clip_grad_norm(model.parameters(), bound)
        for optimizer in (weight, bias):
            assert unit.step(optimizer=optimizer).applied
            scales.append(scaler.get_scale())
        for optimizer in (weight, bias):
            unit.zero_grad(optimizer=optimizer)
    assert scales == [4.0, 8.0, 8.0, 16.0]
    assert_equal(model, step_alone(Net(), bound, steps=2))


def test_an_overflow_skips_the_optimizer_that_it_is_in_and_lowers_the_scale_once():
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = Scaler("cpu", init_scale=1024.0)
    model = Net()
    model, weight, bias = accelerator.prepare(model, *weight_and_bias(model))
    accelerator.backward(model(batch()))
    model.layer.bias.grad.fill_(float("inf"))
    before = [p.detach().clone() for p in model.parameters()]
    weight.step()
    bias.step()
    assert [optimizer.step_was_skipped for optimizer in (weight, bias)] == [False, True]
    assert accelerator.optimizer_step_was_skipped
    assert not torch.equal(model.layer.weight, before[0])
    assert torch.equal(model.layer.bias, before[1])
    assert accelerator.scaler.get_scale() == 512.0


@pytest.mark.parametrize("clipped", [False, True])
def test_an_optimizer_may_step_on_every_second_window(clipped: bool):
    # The scale doubles in between, and what waits for the step doubles with it.
    scaler = Scaler("cpu", init_scale=4.0, growth_interval=1)
    unit, (weight, bias) = of_two_optimizers(scaler)
    model, reference = unit.module, Net()
    plain_weight, plain_bias = weight_and_bias(reference)
    for window in range(4):
        reference(batch()).backward()
        unit.backward(unit.model(batch()))
        if clipped:
            unit.clip_grad_norm([model.layer.weight], 0.01)
            nn.utils.clip_grad_norm_([reference.layer.weight], 0.01)
        for optimizer, plain in ((weight, plain_weight), (bias, plain_bias))[: 1 + window % 2]:
            assert unit.step(optimizer=optimizer).applied
            unit.zero_grad(optimizer=optimizer)
            plain.step()
            plain.zero_grad()
    assert_equal(model, [p.detach() for p in reference.parameters()])
    assert scaler.get_scale() == 64.0


def test_a_scale_that_waits_for_an_optimizer_is_updated_before_it_is_saved():
    scaler = Scaler("cpu", init_scale=4.0, growth_interval=1)
    unit, optimizers = of_two_optimizers(scaler)
    model, loss_scale = unit.module, unit._scale
    unit.backward(unit.model(batch()))
    gradient = model.layer.bias.grad.clone()
    unit.step(optimizer=optimizers[0])
    assert scaler.get_scale() == 4.0
    loss_scale.flush()
    assert scaler.get_scale() == 8.0
    assert torch.equal(model.layer.bias.grad, gradient * 2)
    loss_scale.flush()
    assert scaler.get_scale() == 8.0


def test_an_optimizer_over_two_models_is_unscaled_and_stepped_as_one():
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = Scaler("cpu", init_scale=4.0, growth_interval=1)
    models = [Net(0), Net(1)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    *models, optimizer = accelerator.prepare(*models, optimizer)
    for factor in (1.0, float("inf"), 1.0):
        accelerator.backward(models[0](batch()) + models[1](batch(factor)))
        for model in models:
            accelerator.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        assert optimizer.step_was_skipped == (factor == float("inf"))
        optimizer.zero_grad()
    assert accelerator.scaler.get_scale() == 8.0
    for seed, model in enumerate(models):
        assert_equal(model, step_alone(Net(seed), 0.01, steps=2))


def test_a_closure_with_a_loss_scale_is_refused():
    model = Net()
    unit = prepare(model, sgd(model), LossScale(Scaler("cpu")))
    with pytest.raises(ConfigError, match=r"SGD.step\(closure\) cannot be combined with fp16.*use bf16"):
        unit.step(lambda: 0.0)


def test_a_skipped_step_is_reported_and_not_scheduled():
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = Scaler("cpu", init_scale=1024.0)
    model = Net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    seen = []
    for factor in (1.0, float("inf"), 1.0):
        accelerator.backward(model(batch(factor)))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append((accelerator.optimizer_step_was_skipped, optimizer.step_was_skipped, scheduler.last_epoch))
    assert seen == [(False, False, 1), (True, True, 1), (False, False, 2)]
    assert scheduler.get_last_lr() == [pytest.approx(0.1 / 3)]
    assert accelerator.scaler.get_scale() == 512.0


def test_gradients_are_unscaled_on_request_for_one_optimizer_or_all():
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = Scaler("cpu", init_scale=1024.0)
    model, reference = Net(), Net()
    reference(batch()).backward()
    model, weight, bias = accelerator.prepare(model, *weight_and_bias(model))
    accelerator.backward(model(batch()))
    expected = [p.grad for p in reference.parameters()]
    accelerator.unscale_gradients(weight)
    torch.testing.assert_close(model.layer.weight.grad, expected[0])
    torch.testing.assert_close(model.layer.bias.grad, expected[1] * 1024)
    accelerator.unscale_gradients([weight, bias])
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)
    for optimizer in (weight, bias):
        optimizer.step()
        optimizer.zero_grad()
    reference.load_state_dict(model.state_dict())
    reference.zero_grad()
    reference(batch()).backward()
    accelerator.backward(model(batch()))
    accelerator.unscale_gradients()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
