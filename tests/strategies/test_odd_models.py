"""Models of unusual parameters and buffers: trained, saved and resumed under each strategy as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.cells import beyond
from tests.loops import take_update
from tests.ranks import preload, run_ranks
from tests.strategy_configs import config_of, marked

preload("accel_trainer.accelerator")
BATCH, STEPS = 8, 4
COMPILED = {"strategy": "fsdp2", "compile": {"backend": "eager", "regional": False}}


def begin(strategy: str) -> Any:
    from accel_trainer import Accelerator

    return Accelerator(cpu=True, config=COMPILED if strategy == "compiled" else config_of(strategy, BATCH // 2))


class Scaled(nn.Sequential):
    """With parameters of no dimension, of no elements and of one."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.none.sum()


class Listed(nn.Module):
    """With parameters in lists and dicts, tied and frozen ones, and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.second.weight
        self.second.bias.requires_grad_(False)
        self.factors = nn.ParameterList([nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(1))])
        self.offsets = nn.ParameterDict({"x": nn.Parameter(torch.zeros(5))})
        self.num_forwards = 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.num_forwards])

    def set_extra_state(self, state: Tensor) -> None:
        self.num_forwards = int(state[0])

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        x = torch.tanh(self.second(torch.tanh(self.first(x)) * self.factors[0]))
        return self.head(self.again(x)) * self.factors[1] + self.offsets["x"].mean()


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "listed":
        return Listed()
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)]
    if kind == "parametrized":
        layers[0], layers[2] = parametrizations.weight_norm(layers[0]), parametrizations.spectral_norm(layers[2])
    return Scaled(*layers) if kind == "scaled" else nn.Sequential(*layers)


def train(strategy: str, kind: str, folder: str) -> dict[str, Any]:
    accelerator = begin(strategy)
    model = build(kind)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=0.02))

    def steps(begin: int, end: int) -> list[tuple[float, float]]:
        found = []
        for step in range(begin, end):
            rows = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step))
            loss = model(rows.chunk(accelerator.num_processes)[accelerator.process_index]).square().mean()
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            found.append((accelerator.reduce(loss.detach(), "mean").item(), float(norm)))
        return found

    losses = steps(0, 2)
    accelerator.save_state(folder)
    rest = steps(2, STEPS)
    accelerator.load_state(folder)
    again = steps(2, STEPS)
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return {"losses": losses + rest, "again": again, "weights": weights}


def train_all(strategy: str, kinds: list[str], folder: str) -> dict[str, dict[str, Any]]:
    return {kind: train(strategy, kind, f"{folder}/{kind}") for kind in kinds}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    kinds = ["scaled", "listed", "parametrized"]
    return run_ranks(train_all, 1, "single", kinds, str(tmp_path_factory.mktemp("alone")))[0]


@pytest.mark.parametrize("strategy", [*marked("ddp", "fsdp2", "zero3"), *map(beyond, marked("zero1", "zero2"))])
def test_parameters_of_all_kinds_train_as_on_one_process(tmp_path: Any, strategy: str, alone: dict[str, Any]) -> None:
    kinds = [kind for kind in alone if (strategy, kind) != ("zero3", "scaled")]
    found, _ = run_ranks(train_all, 2, strategy, kinds, str(tmp_path))
    for kind in kinds:
        got, expected = found[kind], alone[kind]
        assert got["losses"] == [pytest.approx(step, rel=1e-5, abs=1e-6) for step in expected["losses"]], kind
        assert got["again"] == got["losses"][2:], kind
        assert got["weights"].keys() == expected["weights"].keys()
        for name, value in expected["weights"].items():
            assert torch.allclose(got["weights"][name], value, atol=1e-5, rtol=1e-4), (kind, name)


# --- statistics of batch norms, of which each rank has its own in training --------------------------------------------

HELD_OUT = torch.randn(6, 4, generator=torch.Generator().manual_seed(9))


def build_normed() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)]
    return nn.Sequential(*layers)


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): value.clone() for name, value in model.named_buffers()}


def evaluate(model: nn.Module) -> list[float]:
    """Return what a model makes of the same rows on all ranks."""
    model.eval()
    with torch.no_grad():
        found = model(HELD_OUT)[:, 0].tolist()
    model.train()
    return found


def train_normed(accelerator: Any, model: Any, optimizer: Any, seed: int) -> None:
    for step in range(3):
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed + step)) * (1 + dist.get_rank())
        take_update(model(rows.chunk(2)[dist.get_rank()]).square().mean(), optimizer, accelerator)


def run_normed(strategy: str, folder: str) -> dict[str, Any]:
    accelerator = begin(strategy)
    model = build_normed()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    inner = accelerator.unwrap_model(model)
    train_normed(accelerator, model, optimizer, seed=0)
    found: dict[str, Any] = {"after training": statistics(inner)}
    accelerator.save_state(folder)
    found["evaluated"] = [evaluate(model), evaluate(model)]
    found["after evaluation"] = statistics(inner)
    train_normed(accelerator, model, optimizer, seed=5)
    found["later"] = evaluate(model)
    accelerator.load_state(folder)
    found["after loading"] = statistics(inner)
    found["loaded"] = evaluate(model)
    saved = build_normed()
    saved.load_state_dict(accelerator.get_state_dict(model), strict=accelerator.is_main_process)
    found["of the saved model"] = evaluate(saved)
    return found


@pytest.mark.parametrize(
    "strategy", [*marked("ddp", "fsdp2", "compiled", "zero3"), *map(beyond, marked("zero1", "zero2"))]
)
def test_the_statistics_of_rank_0_are_evaluated_and_saved(tmp_path: Path, strategy: str) -> None:
    first, second = run_ranks(run_normed, 2, strategy, str(tmp_path / "state"))
    trained = first["after training"]
    assert any(not torch.equal(value, second["after training"][name]) for name, value in trained.items())
    for found in (first, second):
        for when in ("after evaluation", "after loading"):
            torch.testing.assert_close(found[when], trained, rtol=0, atol=0)
        assert found["evaluated"] == [pytest.approx(first["of the saved model"], rel=1e-5)] * 2
        assert found["loaded"] == pytest.approx(first["of the saved model"], rel=1e-5)
    assert first["later"] == pytest.approx(second["later"], rel=1e-6)
    assert first["later"] != pytest.approx(first["loaded"], rel=1e-3)
