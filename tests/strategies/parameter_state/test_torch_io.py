"""State by the user's parameter names: what is written, what is refused, and by whom it can be read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from accel_trainer.strategies.parameter_state.torch_io import TorchCheckpointIO
from tests.ranks import preload, run_ranks
from tests.sharded import adamw, assert_same, batch, build, full, own_rows, prepare

preload("accel_trainer.accelerator", "tests.sharded")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    optimizer = optimizer or adamw(model)
    model(batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


# --- models --------------------------------------------------------------------------------------------------------


def test_a_models_state_is_its_own_state_dict_apart_from_the_model():
    model = Tied()
    state = TorchCheckpointIO(model).full_model_state()
    assert_same(state, dict(model.state_dict()))
    assert state["embed.weight"] is state["head.weight"]
    with torch.no_grad():
        model.embed.weight.zero_()
    assert state["embed.weight"].abs().sum() > 0


def test_a_tied_parameter_may_be_stored_under_one_name():
    model, other = Tied(), Tied()
    state = TorchCheckpointIO(model).full_model_state()
    del state["head.weight"]
    TorchCheckpointIO(other).load_full_model_state(state)
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.head.weight, model.embed.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embed.weight": None, "head.weight": None}, r"missing in the checkpoint: 'embed.weight'\. Build the model"),
        ({"extra": torch.ones(1)}, r"not in the model: 'extra'\. Build the model that was saved, or .*strict=False"),
        ({"steps": torch.ones(2)}, r"does not fit Tied: steps is \(2,\) in the checkpoint and \(\) in the model"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_loaded(change: dict[str, Any], message: str):
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {name: value + 1 for name, value in before.items()} | change
    with pytest.raises(IncompatibleCheckpointError, match=message):
        TorchCheckpointIO(model).load_full_model_state({k: v for k, v in state.items() if v is not None})
    assert_same(dict(model.state_dict()), before)


def test_names_may_differ_when_loading_is_not_strict():
    model = Tied()
    state = {"steps": torch.tensor(9), "extra": torch.ones(1)}
    TorchCheckpointIO(model).load_full_model_state(state, strict=False)
    assert model.steps == 9
    with pytest.raises(IncompatibleCheckpointError, match=r"steps is \(3,\) in the checkpoint"):
        TorchCheckpointIO(model).load_full_model_state({"steps": torch.ones(3)}, strict=False)


class Counting(nn.Linear):
    """Keeps a history of any length beside its parameters."""

    def __init__(self, history: Any) -> None:
        super().__init__(2, 2)
        self.history = history

    def get_extra_state(self) -> Any:
        return self.history

    def set_extra_state(self, state: Any) -> None:
        self.history = state


def test_a_state_of_the_modules_own_making_is_saved_and_given_back():
    saved, other = (nn.Sequential(Counting(torch.arange(length))) for length in (5, 2))
    TorchCheckpointIO(other).load_full_model_state(TorchCheckpointIO(saved).full_model_state())
    assert other[0].history.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(other[0].weight, saved[0].weight)


def test_a_state_of_the_modules_own_making_has_to_be_a_tensor():
    model = nn.Sequential(Counting({"seen": 3}))
    with pytest.raises(ConfigError, match=r"0\._extra_state of Sequential is a dict, and .*get_extra_state"):
        TorchCheckpointIO(model).full_model_state()


# --- optimizers ----------------------------------------------------------------------------------------------------


def test_an_optimizers_state_is_keyed_by_name_and_continues_another():
    model, other = build(), build()
    optimizer, fresh = stepped(model), adamw(other)
    state = TorchCheckpointIO(model, [optimizer]).full_optimizer_state()
    assert list(state["state"]) == state["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    TorchCheckpointIO(other).load_full_model_state(TorchCheckpointIO(model).full_model_state())
    TorchCheckpointIO(other, [fresh]).load_full_optimizer_state(state)
    stepped(model, optimizer)
    stepped(other, fresh)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def refuse_for(groups: list[list[nn.Parameter]], other: nn.Module, message: str) -> None:
    model = build()
    state = TorchCheckpointIO(model, [stepped(model)]).full_optimizer_state()
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    with pytest.raises(IncompatibleCheckpointError, match=message):
        TorchCheckpointIO(other, [optimizer]).load_full_optimizer_state(state)
    assert not optimizer.state


def test_an_optimizer_of_other_parameters_or_groups_is_refused():
    model = build()
    own = list(model.parameters())
    refuse_for([own[:2]], model, r"saved for 1 .* of 10 .* has 1 group\(s\) of 2; not in this optimizer: 'blocks\.0")
    refuse_for([own[:5], own[5:]], model, r"2 group\(s\) of 10; they are the same, in other groups or another order\.")


def two_of(model: nn.Module, *, swapped: bool = False) -> list[torch.optim.Optimizer]:
    """Return an optimizer for the weights and one for the biases."""
    weights = torch.optim.AdamW([p for p in model.parameters() if p.ndim > 1], lr=0.01)
    biases = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=0.1, momentum=0.9)
    return [biases, weights] if swapped else [weights, biases]


def test_states_of_several_optimizers_are_merged_by_name_in_whatever_order_they_came():
    model, other = build(), build()
    optimizers, fresh = two_of(model), two_of(other, swapped=True)
    for optimizer in optimizers:
        stepped(model, optimizer)
    state = TorchCheckpointIO(model, optimizers).full_optimizer_state()
    assert {name: sorted(entry) for name, entry in state["state"].items() if "blocks" not in name} == {
        f"{layer}.{kind}": ["exp_avg", "exp_avg_sq", "step"] if kind == "weight" else ["momentum_buffer"]
        for layer in ("stem", "head")
        for kind in ("weight", "bias")
    }
    TorchCheckpointIO(other, fresh).load_full_optimizer_state(state)
    assert [type(optimizer).__name__ for optimizer in fresh] == ["SGD", "AdamW"]
    assert [optimizer.param_groups[0]["lr"] for optimizer in fresh] == [0.1, 0.01]
    assert_same(TorchCheckpointIO(other, fresh).full_optimizer_state()["state"], state["state"])


def test_the_state_of_a_shared_optimizer_is_saved_with_each_model():
    models = [build(), build()]
    optimizer = torch.optim.AdamW(
        [{"params": list(models[0].parameters())}, {"params": list(models[1].parameters()), "lr": 0.5}]
    )
    for model in models:
        model(batch()).backward()
    optimizer.step()
    ios = [TorchCheckpointIO(model, [optimizer]) for model in models]
    states = [io.full_optimizer_state() for io in ios]
    assert [[group["lr"] for group in state["param_groups"]] for state in states] == [[0.001], [0.5]]
    assert [list(state["state"]) for state in states] == [[name for name, _ in build().named_parameters()]] * 2
    again = torch.optim.AdamW([{"params": list(model.parameters())} for model in models])
    for model, state in zip(models, states, strict=True):
        TorchCheckpointIO(model, [again]).load_full_optimizer_state(state)
    assert again.state_dict()["param_groups"][1]["lr"] == 0.5
    assert_same(again.state_dict()["state"][12], optimizer.state_dict()["state"][12])
    with pytest.raises(ConfigError, match=r"10 parameter\(s\) of AdamW are another model's, and torch writes shards"):
        ios[0].save_sharded_optimizer(Path("nowhere"))


def test_without_an_optimizer_there_is_no_state_of_one():
    with pytest.raises(ConfigError, match=r"Net has no optimizer to save or load; pass one to prepare\(\)"):
        TorchCheckpointIO(build()).full_optimizer_state()


# --- names ---------------------------------------------------------------------------------------------------------


def test_a_model_that_was_compiled_keeps_the_names_it_had():
    plain = build()
    optimizer = stepped(plain)
    expected = TorchCheckpointIO(plain, [optimizer])
    inner = build()
    inner.blocks[0] = torch.compile(inner.blocks[0], backend="eager")
    whole = torch.compile(inner, backend="eager")
    for module in (inner, whole):
        io = TorchCheckpointIO(module, [adamw(module)])
        assert list(io.full_model_state()) == list(plain.state_dict())
        io.load_full_model_state(expected.full_model_state())
        io.load_full_optimizer_state(expected.full_optimizer_state())
        assert_same(io.full_model_state(), expected.full_model_state())
        assert_same(io.full_optimizer_state(), expected.full_optimizer_state())


# --- shards --------------------------------------------------------------------------------------------------------


def exchange(folder: str) -> dict[str, Any]:
    """Train one step on shards, and pass the whole state through both formats."""
    model = build()
    unit = prepare(model)
    unit.backward(unit.model(own_rows()))
    unit.step()
    io = unit.checkpoint_io()
    states = {"model": io.full_model_state(), "optimizer": io.full_optimizer_state()}
    io.save_sharded_optimizer(Path(folder))
    other = prepare(build())
    other.checkpoint_io().load_full_model_state(states["model"])
    other.checkpoint_io().load_sharded_optimizer(Path(folder))
    again = other.checkpoint_io().full_optimizer_state()
    message = None
    try:
        io.load_full_model_state({"stem.weight": torch.ones(1)} if states["model"] else {})
    except IncompatibleCheckpointError as error:
        message = str(error)
    weights = {name: full(p) for name, p in other.module.named_parameters()}
    return {"states": states, "again": again, "message": message, "weights": weights}


def test_shards_are_written_as_a_whole_and_read_again(tmp_path: Path):
    first, second = run_ranks(exchange, 2, str(tmp_path / "optimizer"))
    model = build()
    optimizer = stepped(model)
    expected = TorchCheckpointIO(model, [optimizer])
    for name, value in expected.full_model_state().items():
        torch.testing.assert_close(first["states"]["model"][name], value)
    for name, entry in expected.full_optimizer_state()["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(first["states"]["optimizer"]["state"][name][key], value)
    assert second["states"] == {"model": {}, "optimizer": {}}
    assert_same(first["again"]["state"], first["states"]["optimizer"]["state"])
    for result in (first, second):
        assert_same(result["weights"], first["states"]["model"])
        # Rank 0 finds out, and every rank says so.
        assert "stem.weight is (1,) in the checkpoint and (8, 4) in the model" in result["message"]


def test_files_of_an_engine_are_refused_with_the_way_out(tmp_path: Path):
    with pytest.raises(IncompatibleCheckpointError, match=r"holds files of an engine, and Linear is in none; load"):
        TorchCheckpointIO(nn.Linear(2, 2)).load_engine_files(tmp_path)
