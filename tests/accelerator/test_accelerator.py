"""The facade: what goes in comes out prepared, in order; steps and schedules follow windows; errors say the way out."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import math
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_trainer import (
    AcceleratedOptimizer,
    AcceleratedScheduler,
    Accelerator,
    DistributedType,
    InitProcessGroupKwargs,
    PartialState,
)
from accel_trainer.errors import ConfigError
from accel_trainer.utils import broadcast_object_list
from tests.loops import take_update
from tests.ranks import preload, run_ranks
from tests.scenarios import Scenarios

preload("accel_trainer.accelerator", "tests.scenarios")

SCENARIOS = Scenarios()


def build(
    num_samples: int = 24, batch_size: int = 4
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, LRScheduler]:
    """Return a linear model with its optimizer, loader and schedule."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.arange(num_samples * 3.0).view(-1, 3) / 50, torch.ones(num_samples, 1))
    return model, optimizer, DataLoader(data, batch_size=batch_size), torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def test_prepare_returns_real_torch_objects_in_the_order_they_came():
    model, optimizer, loader, scheduler = build()
    accelerator, other = Accelerator(cpu=True), object()
    scheduler_out, model_out, other_out, loader_out, optimizer_out = accelerator.prepare(
        scheduler, model, other, loader, optimizer
    )
    assert model_out is model
    assert other_out is other
    assert isinstance(optimizer_out, torch.optim.Optimizer)
    assert isinstance(optimizer_out, AcceleratedOptimizer)
    assert isinstance(scheduler_out, LRScheduler)
    assert isinstance(scheduler_out, AcceleratedScheduler)
    assert isinstance(loader_out, DataLoader)
    once = (scheduler_out, model_out, loader_out, optimizer_out)
    assert all(first is second for first, second in zip(once, accelerator.prepare(*once), strict=True))


def test_a_model_is_prepared_until_it_is_let_go_of():
    accelerator, (model, optimizer, loader, _) = Accelerator(cpu=True), build()
    assert not accelerator.is_prepared(model)
    accelerator.prepare(model, optimizer, loader)
    assert accelerator.is_prepared(model)
    assert not accelerator.is_prepared(nn.Linear(3, 1))
    assert accelerator.free_memory(model, optimizer) == (None, None)
    assert not accelerator.is_prepared(model)
    assert [*accelerator._models, *accelerator._dataloaders] == []


def test_a_model_is_prepared_by_the_configuration_in_force():
    accelerator = Accelerator(cpu=True)
    config = accelerator.config
    accumulation = dataclasses.replace(config.accumulation, num_steps=3)
    accelerator.reconfigure(
        dataclasses.replace(accelerator.resolved, config=dataclasses.replace(config, accumulation=accumulation))
    )
    assert accelerator.gradient_accumulation_steps == 3


def test_a_window_made_by_hand_is_divided_by_the_accumulation_steps():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, alone = nn.Linear(2, 1), nn.Linear(2, 1)
    alone.load_state_dict(model.state_dict())
    model = accelerator.prepare(model)
    micro_batches = [torch.randn(size, 2) for size in (1, 2, 3, 4)]
    for rows in micro_batches:
        with accelerator.no_sync(model):
            # As guides for losses over items weigh them: the division that follows is undone.
            accelerator.backward(model(rows).sum() * 4 / 10)
    alone(torch.cat(micro_batches)).mean().backward()
    assert model.weight.grad.flatten().tolist() == pytest.approx(alone.weight.grad.flatten().tolist(), abs=1e-6)


class Stream(IterableDataset):
    """Samples without a length."""

    def __iter__(self):
        return iter(torch.ones(6, 3))


@pytest.mark.parametrize("data", [torch.ones(6, 3), Stream()], ids=["known length", "stream that runs dry"])
@pytest.mark.parametrize("clips", [True, False])
def test_a_short_last_window_gets_the_mean_over_what_it_holds(data: Any, clips: bool):
    # 6 batches, windows of 4: the second window's gradient is the mean of 2, not half of it; also before the step.
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, loader = accelerator.prepare(*build()[:2], DataLoader(data, batch_size=1))
    norms, before, synced = [], model.bias.item(), []
    for _ in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model.bias.sum() * 3)
            synced.append(accelerator.sync_gradients)
            if clips:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
    assert synced == [False, False, False, True, False, True]
    # Between updates nothing is clipped, and the last norm is told.
    assert norms == pytest.approx([*[math.nan] * 3, 3.0, 3.0, 3.0] if clips else [], nan_ok=True)
    assert model.bias.item() == pytest.approx(before - 2 * 0.1 * (1 if clips else 3))


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, [0.1, 0.05, 0.05, 0.025, 0.025, 0.0125]),
        ({"step_scheduler_with_optimizer": False}, [0.1 / 2**step for step in range(1, 7)]),
    ],
    ids=["once per update", "by hand"],
)
def test_a_schedule_steps_with_its_optimizer_or_by_hand(options: dict[str, bool], rates: list[float]):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    model, optimizer, loader, scheduler = accelerator.prepare(*build())
    found = []
    for x, y in loader:
        with accelerator.accumulate(model):
            take_update(nn.functional.mse_loss(model(x), y), optimizer, accelerator)
            scheduler.step()
            found.append(scheduler.get_last_lr()[0])
    assert found == pytest.approx(rates)


@pytest.mark.parametrize("zero_first", [False, True])
def test_gradients_may_be_dropped_before_the_forward_or_after_the_step(zero_first: bool):
    reference, plain_optimizer, loader, _ = build()
    batches = list(loader)
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        plain_optimizer.zero_grad()
        for x, y in (first, second):
            (nn.functional.mse_loss(reference(x), y) / 2).backward()
        plain_optimizer.step()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader, _ = accelerator.prepare(*build())
    for x, y in loader:
        with accelerator.accumulate(model):
            if zero_first:
                optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            if not zero_first:
                optimizer.zero_grad()
    assert torch.equal(model.weight, reference.weight)


def test_an_update_can_be_left_out_by_dropping_its_gradients():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader, _ = accelerator.prepare(*build())
    before = model.weight.detach().clone()
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            if accelerator.sync_gradients:
                optimizer.zero_grad()
                optimizer.step()
    assert torch.equal(model.weight, before)


def test_an_explicit_argument_beats_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7")
    assert Accelerator(cpu=True).gradient_accumulation_steps == 7
    assert Accelerator(cpu=True, gradient_accumulation_steps=2).gradient_accumulation_steps == 2


def test_bf16_returns_fp32_outputs_and_keeps_the_model_picklable():
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(nn.Linear(3, 2))
    assert type(model) is nn.Linear
    assert model(torch.ones(1, 3)).dtype is torch.float32
    copied = copy.deepcopy(model)
    restored = pickle.loads(pickle.dumps(model))
    model.weight.data.zero_()
    assert not torch.equal(copied(torch.ones(1, 3)), model(torch.ones(1, 3)))
    assert torch.equal(copied(torch.ones(1, 3)), restored(torch.ones(1, 3)))


def test_unwrap_gives_the_users_object_and_takes_mixed_precision_off_on_request():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(3, 2)
    prepared = accelerator.prepare(model)
    assert accelerator.unwrap_model(prepared) is model
    assert "forward" in vars(model)
    accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert "forward" not in vars(model)
    never_wrapped = nn.Module()
    never_wrapped.module = nn.Linear(2, 2)  # as wrappers call what they wrap
    assert accelerator.unwrap_model(never_wrapped) is never_wrapped


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"mixed_precision": "fp16"},
            r"fp16 \(from Accelerator\(.*\)\): fp16 was asked for on the CPU.*'bf16' or 'no'",
        ),
        ({"strategy": "fdsp2"}, r"unknown strategy 'fdsp2'; did you mean 'fsdp2'\?"),
        ({"gradient_accumulation_steps": 0}, r"gradient_accumulation_steps"),
        ({"config": "no_such_config"}, r"no_such_config"),
        ({"config": {"mixed_precison": "bf16"}}, r"mixed_precison.*did you mean 'mixed_precision'"),
        ({"megatron_lm_plugin": object()}, r"asks for Megatron-LM, which this version does not offer; leave it out"),
        ({"config": {"num_processes": 4}}, r"and 1 process\(es\) run this job.*accel-trainer launch --num_processes 4"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_an_error(arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Accelerator(cpu=True, **arguments)


def test_an_option_of_another_name_is_no_option():
    with pytest.raises(TypeError, match="unexpected keyword argument 'mixed_precison'; did you mean 'mixed_precision'"):
        Accelerator(cpu=True, mixed_precison="bf16")
    unset = Accelerator(cpu=True, megatron_lm_plugin=None, parallelism_config=None, kwargs_handlers=None)
    assert unset.mixed_precision == "no"


def test_what_is_refused_changes_nothing():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    loader = DataLoader(torch.ones(2, 1))
    own, foreign = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model, nn.Linear(1, 1)))
    for objects in ((model, own, DataLoader([])), (model, foreign, loader)):
        with pytest.raises(ConfigError):
            accelerator.prepare(*objects)
        assert [*accelerator._models, *accelerator._optimizers, *accelerator._dataloaders] == []


def test_calls_before_prepare_say_so():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match="accumulate\\(\\) was called before a model was prepared"):
        accelerator.accumulate()
    with pytest.raises(ConfigError, match="was not prepared by this Accelerator"):
        accelerator.accumulate(nn.Linear(1, 1))


def facts(**arguments: Any) -> dict[str, Any]:
    """What a rank tells of itself."""
    state, accelerator = PartialState(), Accelerator(**arguments)
    return {
        "partial": (state.num_processes, state.process_index),
        "world": (accelerator.num_processes, accelerator.process_index, accelerator.is_main_process),
        "last": accelerator.is_last_process,
        "type": accelerator.distributed_type,
    }


@SCENARIOS.add  # the first: nothing has said before that the job is one of the CPU
def facts_of_ranks() -> list[dict[str, Any]]:
    return [facts(), facts(cpu=True, strategy="fsdp2")]


def test_two_ranks_on_a_cpu_machine_are_two_ranks_without_any_flag():
    for rank, found in enumerate(SCENARIOS.results("facts_of_ranks")):
        expected = {"partial": (2, rank), "world": (2, rank, rank == 0), "last": rank == 1}
        kinds = (DistributedType.MULTI_CPU, DistributedType.FSDP)
        assert found == [{**expected, "type": kind} for kind in kinds]


def updates_on_ranks() -> tuple[list[float], list[float], float]:
    """Learning rates and weights after each update, on 2 ranks, and the timeout of their group."""
    timeout = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=17))
    accelerator, group = Accelerator(cpu=True, kwargs_handlers=[timeout]), dist.group.WORLD
    seconds = group and group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    model, optimizer, loader, scheduler = accelerator.prepare(*build(batch_size=4 // accelerator.num_processes))
    rates = []
    for x, y in loader:
        take_update(nn.functional.mse_loss(model(x), y), optimizer, accelerator)
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates, accelerator.unwrap_model(model).weight.flatten().tolist(), seconds


def test_the_number_of_processes_changes_neither_schedule_nor_updates():
    alone = updates_on_ranks()
    for rates, weights, seconds in run_ranks(updates_on_ranks, 2):
        assert (rates, seconds) == (alone[0], 17.0)
        assert weights == pytest.approx(alone[1], abs=1e-6)


def test_a_loader_iterated_within_itself_stays_active_outside():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(build()[2])
    for _ in loader:
        for _ in loader:
            break
        assert accelerator.gradient_state.active_dataloader is loader
        break


@SCENARIOS.add
def save_thrice() -> list[list[str]]:
    """Save a model's weights in files of different sizes, over each other; return the files."""
    from accel_trainer.checkpoint.weights.weight_files import WeightFiles

    torch.manual_seed(3)
    accelerator, own = Accelerator(cpu=True, strategy="fsdp2"), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    directory = Path(*broadcast_object_list([tempfile.mkdtemp()]), "weights")
    expected, names = copy.deepcopy(own.state_dict()), []
    model = accelerator.prepare(own)
    for size in ("1200B", "10GB", "1200B"):
        accelerator.save_model(model, directory, max_shard_size=size)
        accelerator.wait_for_everyone()
        names.append(sorted(path.name for path in directory.iterdir()))
        saved = WeightFiles(directory)
        assert set(saved) == set(expected)
        assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())
    return names


def test_save_model_writes_the_whole_model_from_shards_and_removes_the_files_of_an_earlier_save():
    for first, whole, last in SCENARIOS.results("save_thrice"):
        assert (len(first), whole, last) == (3, ["model.safetensors"], first)


def test_an_accelerator_is_pickled_with_what_it_has_prepared():
    accelerator, bare = Accelerator(cpu=True), nn.Linear(1, 1)
    model, _, loader = accelerator.prepare(
        bare, torch.optim.SGD(bare.parameters(), lr=0.1), DataLoader(torch.arange(4.0)[:, None])
    )
    again = pickle.loads(pickle.dumps(accelerator))
    assert [batch.item() for batch in again._dataloaders[0]] == [batch.item() for batch in loader]
    assert torch.equal(again.unwrap_model(again._models[0]).weight, accelerator.unwrap_model(model).weight)
    again.backward(again._models[0](torch.ones(1, 1)).sum())
    again._optimizers[0].step()
    assert not torch.equal(again._models[0].weight, bare.weight)
