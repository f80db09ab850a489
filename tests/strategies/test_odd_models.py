"""Models with parameters of unusual kinds: trained, saved and resumed under each strategy as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.ranks import preload, run_ranks
from tests.strategy_configs import config_of, marked, needs_deepspeed

preload("accel_trainer.accelerator")
BATCH, STEPS = 8, 4


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
    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=True, config=config_of(strategy, BATCH // 2))
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


@pytest.mark.parametrize("strategy", marked("ddp", "fsdp2", "zero1", "zero2", "zero3"))
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


def refuse(strategy: str, wrong: str) -> str:
    from accel_trainer import Accelerator
    from accel_trainer.errors import ConfigError

    model = build("plain")
    if wrong == "double":
        model[0].double()
    else:
        value = {
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(1.0),
            "complex": torch.ones(2, dtype=torch.complex64),
        }
        model.extra = nn.Parameter(value[wrong])
    accelerator = Accelerator(cpu=True, config=config_of(strategy, BATCH // 2))
    with pytest.raises(ConfigError) as refused:
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return str(refused.value)


@needs_deepspeed
@pytest.mark.parametrize(
    ("strategy", "wrong", "message"),
    [
        ("zero2", "double", "'0.weight' of Sequential is in torch.float64, and DeepSpeed trains in fp32, bf16 or fp16"),
        ("zero3", "complex", "'extra' of Sequential is in torch.complex64, and DeepSpeed trains in fp32, bf16 or fp16"),
        ("zero3", "empty", "'extra' of Sequential is a parameter of no elements, which ZeRO-3 of DeepSpeed cannot lay"),
        (
            "zero3",
            "scalar",
            "'extra' of Sequential is a parameter of no dimension, which ZeRO-3 of DeepSpeed cannot lay",
        ),
    ],
)
def test_deepspeed_refuses_parameters_that_it_cannot_train(strategy: str, wrong: str, message: str) -> None:
    assert all(said.startswith(message) for said in run_ranks(refuse, 2, strategy, wrong))
