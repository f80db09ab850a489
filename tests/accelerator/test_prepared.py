"""Which optimizers go with which models, in any order, and the lists of prepared objects, which agree."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from accel_trainer import Accelerator, DataLoaderConfiguration, load_checkpoint_in_model
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


def test_a_parameter_in_two_optimizers_of_no_model_or_of_one_for_evaluation_is_refused():
    body, head = two_models()
    refused(r"2 parameter\(s\) are in two optimizers, SGD and Adam, .* give each parameter to one of them",
            body, head, joint(body, head), torch.optim.Adam(head.parameters()))  # fmt: skip
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(body, joint(body))
    refused(r"1 parameter\(s\) are in two optimizers", SGD([body.bias], lr=0.1), accelerator=accelerator)
    body, head = two_models()
    refused(r"2 of 4 parameters of SGD belong to no prepared model \(Body are\); pass the model that they are of",
            body, joint(body, head))  # fmt: skip
    refused(
        r"SGD was prepared without its model: it steps 2 parameters .* pass both to one prepare\(\)", body, joint(head)
    )
    # Of one for evaluation, nothing exchanges the gradients.
    accelerator = Accelerator(cpu=True)
    accelerator.prepare_model(body, evaluation_mode=True)
    refused(r"SGD holds parameters of Body, which was prepared for evaluation; pass both", joint(body),
            accelerator=accelerator)  # fmt: skip
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
    for models, ends in (((), False), (([body, head],), True)):  # all; a list, as in diffusers' scripts
        with accelerator.accumulate(*models):
            accelerator.backward(head(body(torch.ones(1, 2))).sum())
            optimizer.step()
        assert optimizer.ends_window is ends


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
    with pytest.raises(ConfigError) as caught:
        accelerator.prepare(body, wrong, optimizer, used)
    unchanged = type(body) is Body and optimizer.param_groups[0]["params"][0] is body.weight
    prepared_body, head, shared = accelerator.prepare(body, head, joint(body, head))
    inner = [accelerator.unwrap_model(model) for model in (prepared_body, head)]
    meshes = {id(p.device_mesh) for model in inner for p in model.parameters() if hasattr(p, "device_mesh")}
    loss = head(prepared_body(torch.ones(1, 2))).sum()
    accelerator.backward(loss)
    shared.step()
    return str(caught.value), unchanged, len(meshes)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_models_on_ranks_are_checked_before_one_is_laid_out_and_share_a_mesh(strategy: str):
    for message, unchanged, num_meshes in run_ranks(lay_out_wrongly, 2, strategy):
        assert (
            "2 parameter(s) of Head are on the meta" if strategy == "ddp" else "already holds state for 2"
        ) in message
        assert unchanged
        assert num_meshes == (1 if strategy == "fsdp2" else 0)


def bind_wrongly() -> None:
    """Prepare a model beside an optimizer of an earlier one that cannot follow: the model stays whole."""
    body, head = two_models()
    used = torch.optim.AdamW(body.parameters())
    body(torch.ones(1, 2)).sum().backward()
    used.step()
    accelerator = Accelerator(cpu=True, strategy="fsdp2")
    accelerator.prepare(body)
    with pytest.raises(ConfigError, match=r"AdamW already holds state for 2 .* and was built before prepare\(\)"):
        accelerator.prepare(head, used)
    assert type(head) is Head


def test_an_optimizer_that_cannot_follow_leaves_a_new_model_as_it_was():
    run_ranks(bind_wrongly, 2)


# --- the objects together ------------------------------------------------------------------------------------------


def test_prepared_objects_lead_to_their_unit_until_they_are_released():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    # The schedule first: it follows its optimizer when that is prepared.
    scheduled = accelerator.prepare(schedule)
    loader = DataLoader(torch.ones(2, 2))
    wrapped, stepped, loaded = accelerator.prepare(model, optimizer, loader)
    assert all(item._is_accelerate_prepared for item in (wrapped, stepped, scheduled, loaded))
    assert not any(getattr(item, "_is_accelerate_prepared", False) for item in (optimizer, schedule, loader))
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
    _, again = accelerator.prepare(wrapped, stepped)
    assert again.prepared[0] is accelerator._prepared.units[0]
    assert again.optimizer is stepped.optimizer


def train_in_a_freed_wrapper() -> tuple[list[float], bool]:
    """Train as transformers does a second time: its optimizer is prepared alone, and DDP wrapper was kept."""
    accelerator = Accelerator(cpu=True, strategy="ddp")
    body, _ = two_models()
    wrapped, optimizer = accelerator.prepare(body, SGD(body.parameters(), lr=0.1))
    for update in range(2):
        accelerator.backward(wrapped(torch.full((1, 2), update + accelerator.process_index + 1.0)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if update == 0:
            accelerator.free_memory()
            optimizer = accelerator.prepare(optimizer)
    return body.weight.detach().flatten().tolist(), accelerator.prepare(wrapped) is wrapped


def test_an_optimizer_trains_again_in_the_wrapper_whose_memory_was_freed():
    body, _ = two_models()
    expected = (body.weight - 0.1 * (1.5 + 2.5)).flatten().tolist()  # the mean rows of both ranks
    for weights, is_kept in run_ranks(train_in_a_freed_wrapper, 2):
        assert weights == pytest.approx(expected)
        assert is_kept


# --- what one Accelerator has prepared, and another is given: a second cell of a notebook -----------------------------


def prepare_twice(strategy: str) -> dict[str, Any]:
    """Train with the second of two Accelerators, on what the first has prepared."""
    first = Accelerator(cpu=True, strategy=strategy)
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(torch.arange(6 * first.num_processes + 1.0)[:, None], batch_size=2)
    prepared = first.prepare(model, optimizer, scheduler, loader)

    second = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
    model, optimizer, scheduler, loader = second.prepare(*prepared)
    assert loader is prepared[-1]
    steps, rows = [], []
    for batch in loader:
        rows += second.gather_for_metrics(batch).flatten().tolist()
        with second.accumulate(model):
            second.backward(model(batch).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        steps.append(scheduler.last_epoch)
    assert not first.gradient_state.in_dataloader
    assert not second.gradient_state.in_dataloader
    return {"steps": steps, "rows": rows}


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2)])
def test_what_one_has_prepared_follows_the_other(strategy: str, ranks: int):
    for result in run_ranks(prepare_twice, ranks, strategy):
        assert result["steps"] == [0, 1, 1, 2]
        assert result["rows"] == [float(number) for number in range(6 * ranks + 1)]


def test_a_loader_that_was_prepared_otherwise_is_refused():
    loader = Accelerator(cpu=True).prepare(DataLoader(torch.arange(4.0)))
    second = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=True))
    with pytest.raises(
        ConfigError, match="was prepared with even_batches=False, and is to be prepared with even_batch"
    ):
        second.prepare(loader)


def test_a_copy_of_what_holds_an_accelerator_holds_the_same():
    holder = {"accelerator": Accelerator(cpu=True), "steps": [1]}
    assert copy.deepcopy(holder)["accelerator"] is holder["accelerator"]


# --- what was not prepared, or not together with what belongs to it --------------------------------------------------


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
