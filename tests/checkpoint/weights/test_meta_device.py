"""Models built without memory keep what defines them, and get their values from files, modules and computation."""

from __future__ import annotations

import copy
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_trainer import init_empty_weights, init_on_device, load_checkpoint_and_dispatch
from accel_trainer.checkpoint.weights.into_model import LoadReport, load_checkpoint_in_model
from accel_trainer.checkpoint.weights.weight_files import save_weights
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError


class Net(nn.Module):
    """Two layers with one weight, a frozen parameter and a computed buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("positions", torch.arange(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale[0] + self.positions.sum()


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def test_parameters_take_no_memory_and_buffers_keep_their_values():
    with init_empty_weights():
        model = Net()
    assert all(p.is_meta for p in model.parameters())
    assert model.positions.tolist() == [0, 1, 2]
    assert model.second.weight is model.first.weight
    assert not model.scale.requires_grad
    assert not nn.Linear(1, 1).weight.is_meta


def test_buffers_take_none_either_when_asked():
    with init_empty_weights(include_buffers=True):
        model = Net()
    assert model.positions.is_meta
    assert model.first.weight.is_meta


def test_attributes_and_classes_of_parameters_are_kept():
    class Special(nn.Parameter):
        pass

    with init_on_device("meta"):
        module = nn.Module()
        parameter = Special(torch.ones(2))
        parameter.group = "no decay"
        module.weight = parameter
        module.lazy = nn.LazyLinear(3)
    assert type(module.weight) is Special
    assert module.weight.group == "no decay"


def test_the_inner_context_counts_and_other_threads_are_left_alone():
    found = {}

    def elsewhere() -> None:
        found["thread"] = nn.Linear(1, 1).weight.device.type

    with init_empty_weights():
        with init_on_device("cpu"):
            found["inner"] = nn.Linear(1, 1).weight.device.type
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        found["outer"] = nn.Linear(1, 1).weight.device.type
    assert found == {"inner": "cpu", "thread": "cpu", "outer": "meta"}


def test_the_context_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), init_empty_weights():
        raise ZeroDivisionError
    assert not nn.Linear(1, 1).weight.is_meta


def test_a_model_without_memory_is_loaded_and_dispatched(tmp_path: Path):
    save_weights(build(1).state_dict(), tmp_path)
    with init_empty_weights():
        model = Net()
    optimizer = torch.optim.SGD([model.first.weight], lr=0.1)
    assert load_checkpoint_and_dispatch(model, tmp_path, device_map={"": "cpu"}) is model
    x = torch.ones(1, 4)
    assert torch.equal(model(x), build(1)(x))
    assert model.second.weight is model.first.weight is optimizer.param_groups[0]["params"][0]


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("places", ["cpu", "disk", None])
def test_recurrent_modules_without_memory_are_loaded(tmp_path: Path, kind: type[nn.RNNBase], places: str | None):
    model, x = kind(4, 4, num_layers=2), torch.rand(3, 1, 4)
    save_weights(model.state_dict(), tmp_path)
    with init_empty_weights():
        empty = kind(4, 4, num_layers=2)
    weight = empty.weight_hh_l0
    load_checkpoint_and_dispatch(empty, tmp_path, places)
    assert (empty.weight_hh_l0 is weight) == (places != "disk")
    for _ in range(2):
        assert torch.equal(empty(x)[0], model(x)[0])
    if places != "disk":
        copied = copy.deepcopy(empty).double()
        torch.testing.assert_close(copied(x.double())[0].float(), model(x)[0])
        empty(x)[0].sum().backward()
        assert weight.grad is not None


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"first": 0, "second": 1}, "device_map says nothing about 'scale'"),
        ({}, "device_map says nothing about 'scale'"),
        ("meta", "device_map has 'meta', where nothing can compute"),
        ("evenly", "device_map='evenly' is no device; expected one, .* or one of 'auto', 'balanced'"),
    ],
)
def test_a_map_without_a_device_for_everything_is_refused(tmp_path: Path, device_map: Any, message: str):
    save_weights(build().state_dict(), tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_checkpoint_and_dispatch(build(), tmp_path, device_map=device_map)


def test_d25_what_has_no_values_is_an_error_when_dispatched(tmp_path: Path):
    save_weights({"first.weight": torch.ones(4, 4), "scale": torch.ones(2)}, tmp_path)
    with init_empty_weights(include_buffers=True):
        model = Net()
    with pytest.raises(
        IncompatibleCheckpointError,
        match=r"has no values for 'first.bias', 'second.bias', 'positions' of Net, which are on the meta device; give",
    ):
        load_checkpoint_and_dispatch(model, tmp_path, device_map="auto")


class Head(nn.Module):
    """Knows how to initialise itself, buffers included."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.zeros_(self.inner.bias)
        with torch.no_grad():
            self.steps.fill_(7)


def test_missing_parameters_are_initialised_by_their_own_modules(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save_weights({"inner.weight": torch.ones(4, 4), "inner.bias": torch.ones(4)}, tmp_path)
    weights = []
    for seed in (1, 1, 2):
        with init_empty_weights(include_buffers=True):
            model = Head()
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        with caplog.at_level(logging.WARNING):
            report = load_checkpoint_in_model(model, tmp_path, init_missing=True)
        assert report == LoadReport(["weight"], [], ["mask"])
        assert model.steps == 7
        assert torch.equal(model.inner.bias, torch.ones(4)), "what was loaded stays"
        assert torch.equal(torch.random.get_rng_state(), before)
        weights.append(model.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert "1 tensor(s) are left on the meta device, without values: 'mask'" in caplog.text


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_computed_buffers_of_transformers_are_computed_again(tmp_path: Path, kind: str):
    from transformers import AutoConfig, AutoModelForTokenClassification

    options = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(kind, vocab_size=32, max_position_embeddings=16, **options)
    saved = AutoModelForTokenClassification.from_config(config).eval()
    state = saved.state_dict()
    head = {name: state.pop(name) for name in list(state) if name.startswith(("classifier", "score"))}
    save_weights(state, tmp_path)
    with init_empty_weights(include_buffers=True):
        model = AutoModelForTokenClassification.from_config(config)
    report = load_checkpoint_in_model(model.eval(), tmp_path, init_missing=True)
    assert report == LoadReport(list(head), [], [])
    weight = next(tensor for name, tensor in model.state_dict().items() if name in head and tensor.ndim == 2)
    assert 0.01 < weight.std() < 0.03, "the model's own initializer_range is 0.02"
    model.load_state_dict(head, strict=False)
    tokens = torch.arange(12)[None]
    assert torch.equal(model(tokens).logits, saved(tokens).logits)


def test_what_has_memory_in_the_context_is_initialised_as_ever():
    drawn = torch.get_rng_state()
    with init_empty_weights():
        layer = nn.Linear(4, 4)
        own = torch.empty(64)
        assert nn.init.normal_(layer.weight) is layer.weight
        assert layer.weight.uniform_() is layer.weight
        assert torch.equal(torch.get_rng_state(), drawn), "nothing is drawn for what has no memory"
        nn.init.uniform_(own, 2.0, 3.0)
    assert layer.weight.is_meta
    assert own.min() >= 2.0
    torch.set_rng_state(drawn)
    assert torch.equal(nn.init.uniform_(torch.empty(64), 2.0, 3.0), own)
