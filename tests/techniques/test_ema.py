"""Averages of the weights: torch's AveragedModel beside the plain loop, on 1 and 2 ranks, resumed, and by errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accel_trainer import Accelerator
from accel_trainer.config import resolve
from accel_trainer.errors import ConfigError
from accel_trainer.techniques.ema import AveragedWeights
from tests.loops import tiny_model
from tests.ranks import preload, run_ranks
from tests.scenarios import refused
from tests.strategy_configs import HAS_DEEPSPEED, config_of, needs_deepspeed

DECAY, UPDATES, SAVED = 0.9, 3, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": "fsdp2"},
    "gathered": {"strategy": "fsdp2", "fsdp": {"reshard_after_forward": False}},
    "tp": {"parallel": {"tp_size": 2}},
    **({f"zero{stage}": config_of(f"zero{stage}", 2) for stage in (1, 2)} if HAS_DEEPSPEED else {}),
}
preload("transformers.models.llama.modeling_llama", *(["deepspeed"] if HAS_DEEPSPEED else []))
State = dict[str, torch.Tensor]


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 64, (4, 8), generator=generator) for _ in range(UPDATES)]


def copied(state: Any) -> State:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def plain() -> tuple[State, State, list[float]]:
    """Return the weights, the averages and the averaged model's losses of the plain loop with torch's AveragedModel."""
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    losses = []
    for tokens in batches():
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        with torch.no_grad():
            losses.append(averaged.module(input_ids=tokens, labels=tokens).loss.item())
    return copied(model.state_dict()), copied(averaged.module.state_dict()), losses


class Loop:
    """A loop of one model, with all that is looked at."""

    def __init__(self, options: dict[str, Any], model: nn.Module | None = None) -> None:
        self.accelerator = Accelerator(config={"use_cpu": True, "ema_decay": DECAY, **options})
        model = tiny_model("llama") if model is None else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def train(self, begin: int, end: int) -> list[float]:
        """Return the losses of the averaged model after each update."""
        readers, losses = self.accelerator.readers, []
        for tokens in batches()[begin:end]:
            own = tokens.chunk(readers.world_size)[readers.rank]
            self.accelerator.backward(self.model(input_ids=own, labels=own).loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            with self.accelerator.averaged_weights(self.model), torch.no_grad():
                loss = self.model(input_ids=own, labels=own).loss
            losses.append(self.accelerator.reduce(loss.detach().float(), "mean").item())
        return losses

    def averages(self) -> State:
        """Return them in full on rank 0. Collective."""
        with self.accelerator.averaged_weights(self.model):
            return self.accelerator.get_state_dict(self.model)


def train(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return what a run ends with, and one that is resumed after `SAVED` updates."""
    loop = Loop(options)
    losses = loop.train(0, SAVED)
    loop.accelerator.save_state(f"{folder}/state")
    losses += loop.train(SAVED, UPDATES)
    loop.accelerator.save_model(loop.model, f"{folder}/model")
    loop.accelerator.save_model(loop.model, f"{folder}/averaged", averaged=True)
    averages, weights = loop.averages(), loop.accelerator.get_state_dict(loop.model)
    loop.accelerator.free_memory()
    again = Loop(options)
    again.accelerator.load_state(f"{folder}/state")
    return {
        "losses": losses,
        "weights": copied(weights),
        "averages": copied(averages),
        "resumed_losses": again.train(SAVED, UPDATES),
        "resumed": copied(again.averages()),
    }


def train_all(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {layout: train(options, f"{folder}/{layout}") for layout, options in LAYOUTS.items()}
    if HAS_DEEPSPEED:
        found["16 bits"] = train_16_bits()
        found["stage 3"] = refused(lambda: Loop(config_of("zero3", 2)))
    return found


def train_hybrid(folder: str) -> dict[str, Any]:
    return train({"strategy": "fsdp2", "fsdp": {"replicate_size": 2}}, folder)


def train_16_bits() -> list[State]:
    """Return the fp32 weights of an engine in bf16, with evaluations by the averages in between, and without."""
    found = []
    for evaluates in (True, False):
        loop = Loop({**config_of("zero2", 2), "mixed_precision": "bf16"})
        for _ in range(3):
            tokens = batches()[0].chunk(2)[loop.accelerator.process_index]
            loop.accelerator.backward(loop.model(input_ids=tokens, labels=tokens).loss)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            if evaluates:
                loop.averages()
        found.append(copied(loop.accelerator.get_state_dict(loop.model)))
        loop.accelerator.free_memory()
    return found


@pytest.fixture(scope="module")
def reference() -> tuple[State, State, list[float]]:
    torch.set_num_threads(1)
    return plain()


def same(found: State, expected: State, bound: float) -> None:
    assert found.keys() <= expected.keys()
    assert found
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=bound, msg=lambda text, n=name: f"{n}: {text}")


def test_one_process_is_torchs_averaged_model_bit_for_bit(reference, tmp_path):
    torch.set_num_threads(1)
    found = train({"strategy": "single"}, str(tmp_path))
    same(found["weights"], reference[0], 0)
    same(found["averages"], reference[1], 0)
    assert found["losses"] == pytest.approx(reference[2], abs=1e-6)
    same(found["resumed"], found["averages"], 0)
    same(load_file(tmp_path / "averaged" / "model.safetensors"), reference[1], 0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("averages")
    return folder, run_ranks(train_all, 2, str(folder), timeout=200)[0]


@pytest.mark.multirank
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_average_what_one_process_does_and_go_on_bit_for_bit(layout, reference, runs):
    folder, found = runs[0] / layout, runs[1][layout]
    same(found["weights"], reference[0], 1e-6)
    same(found["averages"], reference[1], 1e-6)
    assert found["losses"] == pytest.approx(reference[2], abs=1e-5)
    same(load_file(folder / "averaged" / "model.safetensors"), found["averages"], 0)
    same(load_file(folder / "model" / "model.safetensors"), found["weights"], 0)
    assert found["resumed_losses"] == found["losses"][SAVED:]
    same(found["resumed"], found["averages"], 0)


@pytest.mark.cell  # each rank averages what it holds, in whichever layout
@pytest.mark.multirank
def test_replicas_of_shards_average_alike(reference, tmp_path):
    found = run_ranks(train_hybrid, 4, str(tmp_path), timeout=200)[0]
    same(found["averages"], reference[1], 1e-6)
    same(found["resumed"], found["averages"], 0)


@pytest.mark.multirank
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name in ("fsdp2", "zero2")])
def test_another_number_of_ranks_reads_them(layout, reference, runs):
    loop = Loop({"strategy": "single"})
    loop.accelerator.load_state(runs[0] / layout / "state")
    assert loop.averages().keys() == reference[1].keys()
    assert loop.train(SAVED, UPDATES) == pytest.approx(reference[2][SAVED:], abs=1e-5)


def test_averages_of_16_bits_are_fp32_and_the_weights_come_back(tmp_path):
    model = nn.Linear(3, 2).to(torch.bfloat16)
    averages = AveragedWeights(model.parameters(), 0.75)
    expected: dict[str, torch.Tensor] = {}
    for step in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.37 * step)
        averages.update()
        for name, parameter in model.named_parameters():
            value = parameter.detach().float()
            expected[name] = value if step == 0 else torch.lerp(expected[name], value, 0.25)
    before = copied(model.state_dict())
    with averages.in_model():
        same(copied(model.state_dict()), {name: tensor.bfloat16() for name, tensor in expected.items()}, 0)
    same(copied(model.state_dict()), before, 0)
    for name, parameter in model.named_parameters():
        average = averages.of(parameter)
        assert average.dtype == torch.float32
        assert torch.equal(average, expected[name])


def test_frozen_parameters_have_none_until_they_are_trained():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    averages = AveragedWeights(model.parameters(), 0.5)
    averages.update()
    assert averages.of(model[0].weight) is None
    assert averages.of(model[1].weight) is not None
    model[0].requires_grad_(True)
    averages.update()
    assert torch.equal(averages.of(model[0].weight), model[0].weight)


def test_an_update_that_is_left_out_is_not_averaged():
    loop = Loop({"strategy": "single", "on_nonfinite": "skip_step"}, nn.Linear(2, 1))
    for value in (1.0, 2.0, float("nan"), 3.0):
        loop.accelerator.backward(loop.model(torch.full((1, 2), value)).sum())
        before = copied(loop.averages())
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        is_same = all(torch.equal(tensor, before[name]) for name, tensor in loop.averages().items())
        assert is_same == (value != value)


def test_an_optimizer_in_two_parts_is_one_update():
    accelerator = Accelerator(cpu=True, config={"ema_decay": 0.5})
    model = nn.Linear(2, 1)
    first, second = torch.optim.SGD([model.weight], lr=1.0), torch.optim.SGD([model.bias], lr=1.0)
    model, first, second = accelerator.prepare(model, first, second)
    for number in range(2):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        if number == 0:
            begun = copied(model.state_dict())
    with accelerator.averaged_weights(model):
        same(copied(model.state_dict()), {name: tensor - 0.5 for name, tensor in begun.items()}, 1e-6)


def test_what_needs_the_models_own_weights_is_refused_within_the_block(tmp_path):
    loop = Loop({"strategy": "single"}, nn.Linear(2, 1))
    loop.accelerator.backward(loop.model(torch.ones(1, 2)).sum())
    loop.optimizer.step()
    with loop.accelerator.averaged_weights(loop.model):
        for call in (
            lambda: loop.optimizer.step(),
            lambda: loop.accelerator.save_state(tmp_path / "state"),
            lambda: loop.accelerator.averaged_weights(loop.model).__enter__(),
        ):
            with pytest.raises(ConfigError, match=r"was called within averaged_weights\(\), where the model has"):
                call()
    assert not (tmp_path / "state").exists()


def test_a_model_without_averages_is_named():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1))
    with pytest.raises(ConfigError, match=r"averaged_weights\(\) was called for Linear, and no ave.*set ema_decay"):
        accelerator.save_model(model, "nowhere", averaged=True)


def test_a_state_without_averages_is_loaded_with_a_warning(tmp_path, caplog):
    loop = Loop({"strategy": "single", "ema_decay": None}, nn.Linear(2, 1))
    loop.accelerator.save_state(tmp_path / "state")
    again = Loop({"strategy": "single"}, nn.Linear(2, 1))
    again.accelerator.load_state(tmp_path / "state")
    assert "holds no averages of the weights (ema_decay): they begin anew with the next update" in caplog.text
    same(again.averages(), copied(loop.model.state_dict()), 0)


class ScheduleFree(torch.optim.SGD):
    def eval(self) -> None: ...

    def train(self) -> None: ...


class LayerWise(torch.optim.SGD):
    optimizer_dict: Any = None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(ScheduleFree, "which puts averages of its own"), (LayerWise, "which updates parameter by parameter")],
)
def test_optimizers_with_averages_or_without_updates_of_their_own_are_refused(kind, reason):
    model = nn.Linear(2, 1)
    accelerator = Accelerator(cpu=True, config={"ema_decay": 0.5})
    with pytest.raises(ConfigError, match=rf"ema_decay=0\.5 .*with {kind.__name__}, {reason}"):
        accelerator.prepare(model, kind(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ema_decay": 1.0}, r"ema_decay.* is 1\.0; expected a number above 0 and below 1"),
        ({"local_steps": 4, "ema_decay": 0.9}, r"local_steps=4 .*contradicts ema_decay=0\.9.*own replica"),
    ],
)
def test_a_decay_that_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        resolve(file=options)


@pytest.mark.multirank
@needs_deepspeed
def test_an_evaluation_leaves_the_engines_fp32_weights_alone(runs):
    evaluated, alone = runs[1]["16 bits"]
    assert evaluated["lm_head.weight"].dtype == torch.float32
    same(evaluated, alone, 0)


@pytest.mark.multirank
@needs_deepspeed
def test_stage_three_of_zero_is_refused(runs):
    message = r"ema_decay=0\.9 .*with stage 3 of ZeRO.*use stage 2, or strategy 'fsdp2'"
    assert re.search(message, runs[1]["stage 3"])
