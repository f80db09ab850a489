"""The facade: what goes in comes out prepared, in order; steps and schedules follow windows; errors say the way out."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_trainer import (
    AcceleratedOptimizer,
    AcceleratedScheduler,
    Accelerator,
    DataLoaderConfiguration,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    PartialState,
)
from accel_trainer.errors import ConfigError
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")


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
    other = object()
    scheduler_out, model_out, other_out, loader_out, optimizer_out = Accelerator(cpu=True).prepare(
        scheduler, model, other, loader, optimizer
    )
    assert model_out is model
    assert other_out is other
    assert isinstance(optimizer_out, torch.optim.Optimizer)
    assert isinstance(optimizer_out, AcceleratedOptimizer)
    assert isinstance(scheduler_out, LRScheduler)
    assert isinstance(scheduler_out, AcceleratedScheduler)
    assert isinstance(loader_out, DataLoader)


def test_preparing_twice_returns_the_same_objects():
    accelerator = Accelerator(cpu=True)
    once = accelerator.prepare(*build())
    twice = accelerator.prepare(*once)
    assert all(first is second for first, second in zip(once, twice, strict=True))


def test_a_model_is_prepared_until_it_is_let_go_of():
    accelerator, (model, other) = Accelerator(cpu=True), (nn.Linear(3, 1), nn.Linear(3, 1))
    assert not accelerator.is_prepared(model)
    accelerator.prepare(model)
    assert accelerator.is_prepared(model)
    assert not accelerator.is_prepared(other)
    accelerator.free_memory()
    assert not accelerator.is_prepared(model)


def test_a_model_is_prepared_by_the_configuration_in_force():
    accelerator = Accelerator(cpu=True)
    config = accelerator.config
    accumulation = dataclasses.replace(config.accumulation, num_steps=3)
    accelerator.reconfigure(
        dataclasses.replace(accelerator.resolved, config=dataclasses.replace(config, accumulation=accumulation))
    )
    assert accelerator.gradient_accumulation_steps == 3


def test_the_tutorial_loop_equals_plain_pytorch():
    reference, plain_optimizer, loader, plain_scheduler = build()
    for x, y in loader:
        plain_optimizer.zero_grad()
        nn.functional.mse_loss(reference(x), y).backward()
        plain_optimizer.step()
        plain_scheduler.step()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, scheduler = accelerator.prepare(*build())
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        scheduler.step()
    assert torch.equal(model.weight, reference.weight)
    assert scheduler.get_last_lr() == plain_scheduler.get_last_lr()


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


def test_a_short_last_window_gets_the_mean_over_what_it_holds():
    # 6 batches, windows of 4: the second window's gradient is the mean of 2, not half of it.
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, loader, _ = accelerator.prepare(*build())
    gradients, synced = [], []
    for x, _ in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean() * 0 + model.bias.sum())
            synced.append(accelerator.sync_gradients)
            if accelerator.sync_gradients:
                gradients.append(model.bias.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    assert synced == [False, False, False, True, False, True]
    assert gradients == pytest.approx([1.0, 1.0])


class Stream(IterableDataset):
    """Samples without a length."""

    def __iter__(self):
        return iter(torch.ones(6, 3))


def test_a_window_of_a_stream_that_runs_dry_is_corrected_before_the_step():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, _, _ = build()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Stream(), batch_size=1))
    norms = []
    for _ in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model.bias.sum())
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 100.0).item())
            optimizer.step()
            optimizer.zero_grad()
    assert norms[3] == pytest.approx(1.0)
    assert norms[5] == pytest.approx(1.0)


def test_the_schedule_steps_once_per_update():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = accelerator.prepare(*build())
    rates = []
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
    assert rates == pytest.approx([0.1, 0.05, 0.05, 0.025, 0.025, 0.0125])


def test_the_schedule_can_be_stepped_by_hand():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
    model, optimizer, loader, scheduler = accelerator.prepare(*build())
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            scheduler.step()
    assert scheduler.last_epoch == 6


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


def test_clipping_between_updates_clips_nothing_and_tells_the_last_norm():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader, _ = accelerator.prepare(*build())
    norms = []
    for _ in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model.bias.sum() * 3)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
    assert norms[0] != norms[0]
    assert norms[1:] == pytest.approx([3.0] * 5)


def test_an_explicit_argument_beats_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7")
    assert Accelerator(cpu=True).gradient_accumulation_steps == 7
    assert Accelerator(cpu=True, gradient_accumulation_steps=2).gradient_accumulation_steps == 2


def test_two_accelerators_share_no_settings():
    first = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    second = Accelerator(cpu=True)
    assert (first.gradient_accumulation_steps, first.mixed_precision) == (2, "bf16")
    assert (second.gradient_accumulation_steps, second.mixed_precision) == (1, "no")


def test_nothing_is_written_to_the_environment():
    before = dict(os.environ)
    Accelerator(cpu=True, mixed_precision="bf16").prepare(*build())
    assert dict(os.environ) == before


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


class Holder(nn.Module):
    """A model with a submodule that is called `module`, as wrappers have."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def test_unwrap_leaves_a_model_that_was_never_wrapped():
    model = Holder()
    assert Accelerator(cpu=True).unwrap_model(model) is model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixed_precision": "fp16"}, r"fp16 was asked for on the CPU.*'bf16' or 'no'"),
        (
            {"strategy": "fsdp2"},
            r"needs at least 2 processes and this job has 1.*accel-trainer launch --num_processes 2",
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


def test_two_different_accumulation_settings_are_an_error():
    with pytest.raises(
        ConfigError, match=r"gradient_accumulation_steps=2 and GradientAccumulationPlugin\(num_steps=4\)"
    ):
        Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4))


def test_what_is_refused_changes_nothing():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    loader = DataLoader(torch.ones(2, 1))
    own, foreign = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model, nn.Linear(1, 1)))
    for objects in ((model, own, DataLoader([])), (model, foreign, loader)):
        with pytest.raises(ConfigError):
            accelerator.prepare(*objects)
        assert [*accelerator._models, *accelerator._optimizers, *accelerator._dataloaders] == []


def test_an_optimizer_may_be_prepared_after_its_model():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(3, 1))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model.bias.sum())
    before = model.bias.item()
    optimizer.step()
    assert model.bias.item() == pytest.approx(before - 1.0)


def test_calls_before_prepare_say_so():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match="accumulate\\(\\) was called before a model was prepared"):
        accelerator.accumulate()
    with pytest.raises(ConfigError, match="was not prepared by this Accelerator"):
        accelerator.accumulate(nn.Linear(1, 1))


def test_models_accumulate_independently():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    first_optimizer = torch.optim.SGD(first.parameters(), lr=1.0)
    second_optimizer = torch.optim.SGD(second.parameters(), lr=1.0)
    first, second, first_optimizer, second_optimizer = accelerator.prepare(
        first, second, first_optimizer, second_optimizer
    )
    with accelerator.accumulate(first):
        accelerator.backward(first.bias.sum())
    with accelerator.accumulate(second):
        accelerator.backward(second.bias.sum())
        assert not accelerator.sync_gradients
    with accelerator.accumulate(first):
        accelerator.backward(first.bias.sum())
        assert accelerator.sync_gradients
    assert first_optimizer.ends_window
    assert not second_optimizer.ends_window


def test_free_memory_lets_go_and_gives_nones():
    accelerator = Accelerator(cpu=True)
    model, optimizer, _loader, _scheduler = accelerator.prepare(*build())
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert model is None
    assert optimizer is None
    assert not accelerator._models
    assert not accelerator._dataloaders


def facts(**arguments: Any) -> dict[str, Any]:
    """What a rank tells of itself."""
    state = PartialState()
    accelerator = Accelerator(**arguments)
    shown = []
    with accelerator.main_process_first():
        shown.append(accelerator.process_index)
    return {
        "partial": (state.num_processes, state.process_index, str(state.device)),
        "world": (accelerator.num_processes, accelerator.process_index, accelerator.is_main_process),
        "type": accelerator.distributed_type,
        "last": accelerator.is_last_process,
        "only_main": accelerator.on_main_process(lambda: "main")(),
    }


def test_two_ranks_on_a_cpu_machine_are_two_ranks_without_any_flag():
    results = run_ranks(facts, 2)
    assert [result["world"] for result in results] == [(2, 0, True), (2, 1, False)]
    assert [result["partial"][:2] for result in results] == [(2, 0), (2, 1)]
    assert [result["last"] for result in results] == [False, True]
    assert [result["only_main"] for result in results] == ["main", None]


@pytest.mark.parametrize(
    ("strategy", "expected"), [("ddp", DistributedType.MULTI_CPU), ("fsdp2", DistributedType.FSDP)]
)
def test_the_distributed_type_is_what_was_asked_for_on_the_cpu_too(strategy: str, expected: DistributedType):
    assert {result["type"] for result in run_ranks(facts, 2, cpu=True, strategy=strategy)} == {expected}


def timeout_of_group() -> float:
    """The timeout of the default group, in seconds."""
    Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=17))])
    group = torch.distributed.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_the_timeout_reaches_the_group_on_the_cpu():
    assert run_ranks(timeout_of_group, 2) == [17.0, 17.0]


def updates_on_ranks() -> tuple[list[float], list[float]]:
    """Learning rates and weights after each update, on 2 ranks."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, scheduler = accelerator.prepare(*build(batch_size=4 // accelerator.num_processes))
    rates = []
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    return rates, accelerator.unwrap_model(model).weight.flatten().tolist()


def test_the_number_of_processes_changes_neither_schedule_nor_updates():
    (alone,) = run_ranks(updates_on_ranks, 1)
    for rates, weights in run_ranks(updates_on_ranks, 2):
        assert rates == alone[0]
        assert weights == pytest.approx(alone[1], abs=1e-6)


def uneven_updates(num_samples: int) -> tuple[list[int], list[float]]:
    """Train without padding on samples that do not divide by the batches; return rows per step and the weights."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    model, optimizer, loader, _ = build(num_samples, batch_size=4 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    rows = []
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        rows.append(loader.rows.num_samples)
    return rows, accelerator.unwrap_model(model).weight.flatten().tolist()


@pytest.mark.parametrize("num_samples", [9, 10, 11])
def test_without_padding_two_ranks_train_on_uneven_data_as_one_process(num_samples: int):
    # 9 leave one sample for the last step: the second rank has none, and takes part with weight zero.
    (alone,) = run_ranks(uneven_updates, 1, num_samples)
    for rows, weights in run_ranks(uneven_updates, 2, num_samples):
        assert sum(rows) == num_samples
        assert weights == pytest.approx(alone[1], abs=1e-6)


def test_a_loader_iterated_within_itself_stays_active_outside():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(build()[2])
    for _ in loader:
        for _ in loader:
            break
        assert accelerator.gradient_state.active_dataloader is loader
        break


def save_and_load(directory: str, max_shard_size: str) -> list[str]:
    """Save a model's weights on 2 ranks; return the files."""
    accelerator = Accelerator(cpu=True, strategy="fsdp2")
    torch.manual_seed(3)
    model = accelerator.prepare(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    accelerator.save_model(model, directory, max_shard_size=max_shard_size)
    accelerator.wait_for_everyone()
    return sorted(path.name for path in Path(directory).iterdir())


@pytest.mark.parametrize(("size", "files"), [("10GB", 1), ("1200B", 3)])
def test_save_model_writes_the_whole_model_from_shards(tmp_path: Path, size: str, files: int):
    from accel_trainer.checkpoint.weights.weight_files import WeightFiles

    names = run_ranks(save_and_load, 2, str(tmp_path / "weights"), size)[0]
    assert len(names) == files
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).state_dict()
    saved = WeightFiles(tmp_path / "weights")
    assert set(saved) == set(expected)
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())


def test_a_smaller_save_removes_the_files_of_a_larger_one(tmp_path: Path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    accelerator.save_model(model, tmp_path, max_shard_size="1200B")
    accelerator.save_model(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    accelerator.save_model(model, tmp_path, max_shard_size="1200B")
    assert not (tmp_path / "model.safetensors").exists()


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
