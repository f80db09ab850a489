"""Muon: its formula by hand, torch's own, and the same on ranks that share matrices, resumed and on other ranks."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

from accel_trainer import Accelerator
from accel_trainer.errors import ConfigError
from accel_trainer.techniques.muon import Muon, muon_groups
from tests.cells import beyond
from tests.loops import tiny_model
from tests.ranks import preload, run_ranks
from tests.trainer_jobs import build_model, build_trainer

RATE, DECAY, UPDATES, SAVED = 1e-3, 0.1, 3, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": "fsdp2"},
    "tp": {"parallel": {"tp_size": 2}},
}
preload("transformers.models.llama.modeling_llama", "transformers.models.mixtral.modeling_mixtral")
State = dict[str, torch.Tensor]


class Rows(nn.Module):
    """Matrices with one row, more columns than rows, and more rows than columns, and 3 matrices in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tall, self.wide, self.row = nn.Linear(6, 9), nn.Linear(9, 5, bias=False), nn.Linear(5, 1)
        self.several = nn.Parameter(torch.randn(3, 5, 5) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(self.tall(x).tanh()).tanh()
        return self.row((hidden @ self.several).tanh().sum(0))


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """The iteration as its author has it, in the dtype of the matrix."""
    x = matrix / (matrix.norm() + 1e-7)
    if is_tall := len(matrix) > matrix.shape[1]:
        x = x.T
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if is_tall else x


def batches(model: nn.Module) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    if isinstance(model, Rows):
        return [torch.randn(4, 6, generator=generator) for _ in range(UPDATES)]
    return [torch.randint(3, 64, (4, 8), generator=generator) for _ in range(UPDATES)]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean() if batch.is_floating_point() else model(input_ids=batch, labels=batch).loss


@functools.cache
def by_hand(kind: str) -> State:
    model = build(kind)
    matrices = {p for group in muon_groups(model) if group["use_muon"] for p in group["params"]}
    others = [p for p in model.parameters() if p not in matrices]
    adamw = torch.optim.AdamW(others, lr=RATE, weight_decay=DECAY)
    momenta = {p: torch.zeros_like(p) for p in matrices}
    for batch in batches(model):
        loss_of(model, batch).backward()
        adamw.step()
        with torch.no_grad():
            for p, momentum in momenta.items():
                momentum.mul_(0.95).add_(p.grad, alpha=0.05)
                direction = 0.05 * p.grad + 0.95 * momentum
                update = torch.stack([orthogonalized(each) for each in direction.view(-1, *p.shape[-2:])]).view_as(p)
                p.copy_((1 - RATE * DECAY) * p - 0.2 * math.sqrt(max(p.shape[-2:])) * RATE * update)
        model.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def build(kind: str) -> nn.Module:
    return Rows() if kind == "rows" else tiny_model(kind)


class Loop:
    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        self.accelerator, model = Accelerator(cpu=True, config=options), build(kind)
        optimizer = Muon(muon_groups(model), lr=RATE, weight_decay=DECAY)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def train(self, begin: int, end: int) -> State:
        readers = self.accelerator.readers
        for batch in batches(self.accelerator.unwrap_model(self.model))[begin:end]:
            self.accelerator.backward(loss_of(self.model, batch.chunk(readers.world_size)[readers.rank]))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {name: tensor.clone() for name, tensor in self.accelerator.get_state_dict(self.model).items()}


def train(kind: str, options: dict[str, Any], folder: str) -> tuple[State, State]:
    """Return the weights of a run, and of one that goes on from its state after `SAVED` updates."""
    loop = Loop(kind, options)
    loop.train(0, SAVED)
    loop.accelerator.save_state(folder)
    weights = loop.train(SAVED, UPDATES)
    loop.accelerator.free_memory()
    return weights, resume(kind, options, folder)


def resume(kind: str, options: dict[str, Any], folder: str) -> State:
    loop = Loop(kind, options)
    loop.accelerator.load_state(folder)
    return loop.train(SAVED, UPDATES)


def same(found: State, expected: State, bound: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=bound, msg=lambda text, n=name: f"{n}: {text}")


BOUNDS = {"rows": 1e-6, "llama": 3e-6, "mixtral": 3e-6}
"""What is nearly orthogonal to all gradients grows by 485 in five iterations, and rounding errors with it."""


@pytest.mark.parametrize("kind", BOUNDS)
def test_one_process_updates_by_the_formula(kind, tmp_path):
    weights, resumed = train(kind, {"strategy": "single"}, str(tmp_path / "state"))
    same(weights, by_hand(kind), BOUNDS[kind])
    same(resumed, weights, 0)


CASES = [(kind, layout) for kind in BOUNDS for layout in LAYOUTS if (kind, layout) != ("rows", "tp")]


def train_all(folder: str) -> dict[tuple[str, str], tuple[State, State]]:
    return {(kind, layout): train(kind, LAYOUTS[layout], f"{folder}/{kind}-{layout}") for kind, layout in CASES}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[str, dict[tuple[str, str], tuple[State, State]]]:
    folder = str(tmp_path_factory.mktemp("muon"))
    return folder, run_ranks(train_all, 2, folder, timeout=200)[0]


@pytest.mark.multirank
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_ranks_that_share_matrices_update_as_one_process_does(kind, layout, runs):
    weights, resumed = runs[1][kind, layout]
    same(weights, by_hand(kind), BOUNDS[kind])
    same(resumed, weights, 0)
    same(resume(kind, {"strategy": "single"}, f"{runs[0]}/{kind}-{layout}"), weights, BOUNDS[kind])


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "hsdp": (4, {"strategy": "fsdp2", "fsdp": {"replicate_size": 2}}),
    "tp x shards": (4, {"parallel": {"tp_size": 2, "dp_shard_size": 2}}),
    "ep": (2, {"parallel": {"ep_size": 2}}),
    "ep x shards": (4, {"parallel": {"ep_size": 2}}),
}


def train_mesh(kind: str, mesh: str, folder: str) -> tuple[State, State]:
    return train(kind, MESHES[mesh][1], folder)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [("rows", "hsdp"), beyond(("llama", "tp x shards")), *(beyond(("mixtral", mesh)) for mesh in MESHES)],
)
def test_replicas_and_products_of_shards_update_alike(kind, mesh, tmp_path):
    weights, resumed = run_ranks(train_mesh, MESHES[mesh][0], kind, mesh, str(tmp_path), timeout=150)[0]
    same(weights, by_hand(kind), BOUNDS[kind])
    same(resumed, weights, 0)


def test_a_step_is_that_of_torchs_muon_to_the_digits_of_bf16():
    torch.manual_seed(0)
    for shape in ((48, 16), (16, 48), (32, 32)):
        ours, torchs = (nn.Parameter(torch.zeros(shape)) for _ in range(2))
        ours.grad = torchs.grad = torch.randn(shape)
        Muon([ours], lr=1.0, weight_decay=0.0).step()
        torch.optim.Muon([torchs], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
        assert (ours - torchs).norm() < 0.02 * torchs.norm()


def test_the_others_are_those_of_torchs_adamw_bit_for_bit():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    twin = copy.deepcopy(model)
    groups = [{"params": list(model.parameters()), "use_muon": False, "lr": 0.1}]
    ours, torchs = (
        Muon(groups, lr=1.0, weight_decay=0.2),
        torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.2),
    )
    for index in range(3):
        for each, optimizer in ((model, ours), (twin, torchs)):
            each(torch.full((2, 4), index + 0.5)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    same(dict(model.state_dict()), dict(twin.state_dict()), 0)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "mixtral"])
def test_embeddings_heads_and_vectors_are_left_to_adamw(kind):
    model = build_model(kind)
    names = {id(p): name for name, p in model.named_parameters()}
    hidden, others = ({names[id(p)] for p in group["params"]} for group in muon_groups(model))
    assert hidden | others == set(names.values())
    assert all(model.get_parameter(name).ndim in (2, 3) for name in hidden)
    left = {name for name in others if model.get_parameter(name).ndim > 1}
    expected = {"embed", "lm_head", "wte", "wpe", "classifier"}
    assert left
    assert all(any(word in name for word in expected) for name in left)


def test_a_group_of_vectors_is_refused():
    with pytest.raises(ConfigError, match=r"use_muon has a parameter of shape \(4,\).*muon_groups\(model\), or set"):
        Muon(nn.Linear(4, 4).parameters())


def test_a_copy_steps_as_the_optimizer_does():
    model = Rows()
    optimizer = Muon(muon_groups(model))
    loss_of(model, torch.ones(4, 6)).backward()
    optimizer.step()
    again = copy.deepcopy(optimizer)
    again.step()
    assert again.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_the_trainers_arguments_are_the_optimizers(tmp_path):
    trainer = build_trainer(
        tmp_path, optim="muon", optim_args="momentum=0.9, ns_steps=4", weight_decay=0.3, adam_beta2=0.95, max_steps=1
    )
    trainer.train()
    groups = trainer.optimizer.param_groups
    assert trainer.args.optim == "muon"
    assert isinstance(trainer.optimizer.optimizer, Muon)
    assert [(group["use_muon"], group["weight_decay"]) for group in groups] == [(True, 0.3), (False, 0.3), (False, 0.0)]
    assert all((g["momentum"], g["ns_steps"], g["betas"]) == (0.9, 4, (0.9, 0.95)) for g in groups)


def test_arguments_that_muon_has_not_are_refused(tmp_path):
    trainer = build_trainer(tmp_path, optim="muon", optim_args="momentum=0.9,rank=4", max_steps=1)
    with pytest.raises(ConfigError, match=r"optim_args='momentum=0.9,rank=4' has 'rank=4' for optim='muon'; expect"):
        trainer.train()
