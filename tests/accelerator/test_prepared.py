"""Which optimizers go with which models, in any order, and the lists of prepared objects, which agree."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from accel_trainer import Accelerator
from accel_trainer.errors import ConfigError
from accel_trainer.strategies.api import Capabilities
from accel_trainer.strategies.single import SingleStrategy
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")


class Body(nn.Linear):
    """Named apart from the other, for messages."""


class Head(nn.Linear):
    """Named apart from the other, for messages."""


def two_models() -> tuple[Body, Head]:
    """Return a body and its head."""
    torch.manual_seed(0)
    return Body(2, 2), Head(2, 1)


def joint(*models: nn.Module) -> Optimizer:
    """Return one optimizer over all of the models."""
    return SGD([p for model in models for p in model.parameters()], lr=0.1)


def refused(message: str, *objects: Any, accelerator: Accelerator | None = None) -> None:
    """Prepare what cannot be, and see that nothing was laid out."""
    accelerator = accelerator or Accelerator(cpu=True)
    before = list(accelerator._prepared.units)
    with pytest.raises(ConfigError, match=message):
        accelerator.prepare(*objects)
    assert accelerator._prepared.units == before


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_order_in_which_things_are_prepared_does_not_matter(order: tuple[int, ...]):
    body, head = two_models()
    objects = [body, head, joint(body, head)]
    results = dict(zip(order, Accelerator(cpu=True).prepare(*(objects[index] for index in order)), strict=True))
    reference = two_models()
    (reference[1](reference[0](torch.ones(1, 2))).sum()).backward()
    joint(*reference).step()
    results[1](results[0](torch.ones(1, 2))).sum().backward()
    results[2].step()
    for model, expected in zip((body, head), reference, strict=True):
        assert torch.equal(model.weight, expected.weight)


def test_optimizers_may_follow_their_models_one_by_one():
    accelerator = Accelerator(cpu=True)
    body, head = two_models()
    body = accelerator.prepare(body)
    weights = accelerator.prepare(SGD([body.weight], lr=0.1))
    head, shared = accelerator.prepare(head, SGD([body.bias, head.weight, head.bias], lr=0.1))
    assert [type(each.unit.module) for each in shared.prepared] == [Body, Head]
    assert accelerator.unit_of(body).optimizers == [weights.optimizer, shared.optimizer]
    assert accelerator.unit_of(head).optimizers == [shared.optimizer]
    assert accelerator.prepare(weights, shared) == (weights, shared)
    assert accelerator.prepare(weights.optimizer) is weights


def test_a_parameter_in_two_optimizers_is_refused():
    body, head = two_models()
    refused(r"2 parameter\(s\) are in two optimizers, SGD and Adam, .* give each parameter to one of them",
            body, head, joint(body, head), torch.optim.Adam(head.parameters()))  # fmt: skip
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(body, joint(body))
    refused(r"1 parameter\(s\) are in two optimizers", SGD([body.bias], lr=0.1), accelerator=accelerator)


def test_a_parameter_of_no_prepared_model_is_refused():
    body, head = two_models()
    refused(r"2 of 4 parameters of SGD belong to no prepared model \(Body are\); pass the model that they are of",
            body, joint(body, head))  # fmt: skip
    refused(
        r"SGD was prepared without its model: it steps 2 parameters .* pass both to one prepare\(\)", body, joint(head)
    )


def test_an_optimizer_for_a_model_that_was_prepared_for_evaluation_is_refused():
    # Nothing exchanges its gradients.
    accelerator = Accelerator(cpu=True)
    body, _ = two_models()
    accelerator.prepare_model(body, evaluation_mode=True)
    with pytest.raises(ConfigError, match=r"SGD holds parameters of Body, which was prepared for evaluation; pass"):
        accelerator.prepare(joint(body))
    accelerator.prepare(body, joint(body))


class OneForEach(SingleStrategy):
    """As an engine that is built around a model and its optimizer."""

    capabilities = Capabilities(joint_optimizers=False)


def test_an_engine_that_takes_one_optimizer_for_each_model_says_so():
    body, head = two_models()
    accelerator = Accelerator(cpu=True)
    accelerator.strategy = OneForEach()
    apart = [SGD([p], lr=0.1) for p in body.parameters()]
    several = r"Body has several optimizers \(SGD, SGD\), .* a parameter group for each part"
    refused(several, body, *apart, accelerator=accelerator)
    refused(r"SGD holds parameters of Body and Head, .* build one for each", body, head, joint(body, head),
            accelerator=accelerator)  # fmt: skip
    accelerator.prepare(joint(head), head, body, apart[0])
    refused(several, apart[1], accelerator=accelerator)


def test_an_optimizer_without_parameters_goes_with_the_only_model():
    # The embedding is frozen, say, and all that a group was built for.
    body, _ = two_models()
    empty = SGD([{"params": []}], lr=0.1)
    body, optimizer = Accelerator(cpu=True).prepare(body, empty)
    optimizer.step()
    assert optimizer.prepared[0].unit.module is body


# --- windows -------------------------------------------------------------------------------------------------------


def test_models_with_one_optimizer_have_to_accumulate_together():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    body, head = two_models()
    body, head, optimizer = accelerator.prepare(body, head, joint(body, head))
    with pytest.raises(ConfigError, match=r"given Body, and SGD steps Body and Head together; .*accumulate\(a, b\)"):
        accelerator.accumulate(body)
    for _ in range(2):
        with accelerator.accumulate():  # all that are prepared
            accelerator.backward(head(body(torch.ones(1, 2))).sum())
            optimizer.step()
    assert optimizer.ends_window


def test_windows_made_by_hand_that_end_apart_are_refused():
    accelerator = Accelerator(cpu=True)
    body, head = two_models()
    body, head, optimizer = accelerator.prepare(body, head, joint(body, head))
    accelerator.set_gradient_sync(body, False)
    with pytest.raises(ConfigError, match=r"SGD steps Body and Head together, .* window of some ends here"):
        optimizer.step()
    accelerator.set_gradient_sync(head, False)
    optimizer.step()  # neither ends
    before = body.weight.clone()
    body(torch.ones(1, 2)).sum().backward()
    accelerator.set_gradient_sync(body, True)
    accelerator.set_gradient_sync(head, True)
    optimizer.step()
    assert not torch.equal(body.weight, before)


def test_dropping_the_gradients_of_one_optimizer_leaves_those_of_the_other_right():
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(*two_models())
    model, first, second = accelerator.prepare(model, joint(model[0]), joint(model[1]))
    with accelerator.accumulate(model):
        # The mean over the tokens has gradient 2, whatever the stand-in that the losses are divided by meanwhile.
        accelerator.backward(accelerator.global_token_mean(12 * (2 * model[1].bias + model[0].bias[:1]).sum(), 12))
        first.zero_grad()
        assert model[0].bias.grad is None
        before = model[1].bias.item()
        second.step()
    assert model[1].bias.item() == pytest.approx(before - 0.1 * 2)


# --- errors in one of several --------------------------------------------------------------------------------------


def test_an_error_in_one_of_several_models_leaves_the_others_as_they_were():
    body, _ = two_models()
    with torch.device("meta"):
        without_values = Head(2, 1)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    refused(r"2 parameter\(s\) of Head are on the meta device", body, without_values, accelerator=accelerator)
    assert "forward" not in vars(body)
    body, _ = accelerator.prepare(body, joint(body))
    assert "forward" in vars(body)


def lay_out_wrongly(strategy: str) -> Any:
    """Prepare two models, of which the second cannot be laid out; say what the first has become."""
    body, head = two_models()
    accelerator = Accelerator(cpu=True, strategy=strategy)
    optimizer = joint(body)
    with torch.device("meta" if strategy == "ddp" else "cpu"):
        wrong = Head(2, 1)
    used = torch.optim.AdamW(wrong.parameters())
    if strategy == "fsdp2":
        wrong(torch.ones(1, 2)).sum().backward()
        used.step()
    message = ""
    try:
        accelerator.prepare(body, wrong, optimizer, used)
    except ConfigError as error:
        message = str(error)
    unchanged = type(body) is Body and optimizer.param_groups[0]["params"][0] is body.weight
    prepared_body, head, shared = accelerator.prepare(body, head, joint(body, head))
    inner = [accelerator.unwrap_model(model) for model in (prepared_body, head)]
    meshes = {id(p.device_mesh) for model in inner for p in model.parameters() if hasattr(p, "device_mesh")}
    loss = head(prepared_body(torch.ones(1, 2))).sum()
    accelerator.backward(loss)
    shared.step()
    return message, unchanged, len(meshes)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_models_on_ranks_are_checked_before_one_is_laid_out_and_share_a_mesh(strategy: str):
    for message, unchanged, num_meshes in run_ranks(lay_out_wrongly, 2, strategy):
        assert (
            "2 parameter(s) of Head are on the meta" if strategy == "ddp" else "already holds state for 2"
        ) in message
        assert unchanged
        assert num_meshes == (1 if strategy == "fsdp2" else 0)


def bind_wrongly() -> tuple[str, bool]:
    """Prepare a model beside an optimizer of an earlier one that cannot follow; say whether the model stayed whole."""
    body, head = two_models()
    used = torch.optim.AdamW(body.parameters())
    body(torch.ones(1, 2)).sum().backward()
    used.step()
    accelerator = Accelerator(cpu=True, strategy="fsdp2")
    accelerator.prepare(body)
    try:
        accelerator.prepare(head, used)
    except ConfigError as error:
        return str(error), type(head) is Head
    raise AssertionError("nothing was refused")


def test_an_optimizer_that_cannot_follow_leaves_a_new_model_as_it_was():
    for message, is_whole in run_ranks(bind_wrongly, 2):
        assert "AdamW already holds state for 2 parameter(s) and was built before prepare()" in message
        assert is_whole


# --- the objects together ------------------------------------------------------------------------------------------


def test_prepared_objects_lead_to_their_unit_until_they_are_released():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    # The schedule first: it follows its optimizer when that is prepared.
    scheduled = accelerator.prepare(schedule)
    wrapped, stepped = accelerator.prepare(model, optimizer)
    prepared = accelerator._prepared
    (unit,) = prepared.units
    assert {id(prepared.find(item)) for item in (model, wrapped, optimizer)} == {id(unit)}
    assert prepared.get(stepped) is unit
    assert prepared.models == [wrapped]
    assert prepared.optimizers == [stepped]
    assert scheduled.optimizers == (stepped,)
    accelerator.free_memory()
    assert [prepared.units, prepared.models, prepared.optimizers, prepared.schedulers, prepared.dataloaders] == [[]] * 5
    with pytest.raises(ConfigError, match="was not prepared by this Accelerator"):
        prepared.get(stepped)
