"""What is sent to the host, once, and what stays; the same numbers; waits of streams on a device that stands in."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_trainer.techniques import activations
from accel_trainer.techniques.activations import ActivationOffload, treat_layers
from tests import stand_in
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator", "accel_trainer.techniques.activations")

POLICIES = ("off", "full", "selective", "every:2", "ops:aten.silu")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.dropout(self.down(nn.functional.silu(self.gate(y)) * self.up(y)))


def build(policy: str = "off", offload: ActivationOffload | None = None) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(*(Layer() for _ in range(3)))
    treat_layers(list(net), policy, offload)
    return net


def rows() -> Tensor:
    return torch.randn(1024, 64, generator=torch.Generator().manual_seed(2))


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    net(x).square().mean().backward()
    return [p.grad.clone() for p in net.parameters()]


class Noted(ActivationOffload):
    """Notes what it sends."""

    def __init__(self, kind: str = "cpu") -> None:
        super().__init__(torch.device(kind))
        self.sent: list[Any] = []

    def _send(self, storage: Any) -> Any:
        self.sent.append(super()._send(storage))
        return self.sent[-1]


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_those_of_activations_that_stay(policy: str):
    expected = gradients(build(), rows())
    for _ in range(2):
        found = gradients(build(policy, ActivationOffload(torch.device("cpu"))), rows())
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("policy", "widths"),
    [
        # Of each layer: its input, the norm's output, gate, silu, up, their product, and the mask of dropout.
        ("off", 3 * [64, 64, 128, 128, 128, 128, 64]),
        ("full", 3 * [64]),
        ("selective", 3 * [64, 128, 128, 64]),
        ("ops:aten.silu", 3 * [64, 128]),
        ("every:2", [64, 64, 128, 128, 128, 128, 64, 64, 64]),
    ],
)
def test_what_a_layer_keeps_is_sent_once_and_parameters_stay(policy: str, widths: list[int]):
    noted = Noted()
    loss = build(policy, noted)(rows()).sum()
    assert sorted(len(each.host) for each in noted.sent) == sorted(4 * 1024 * width for width in widths)
    loss.backward()


def test_views_of_a_storage_are_one_copy_and_come_back_as_they_were():
    noted = Noted()

    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            whole = x * 2
            left, right = whole.chunk(2, dim=-1)
            return left * right + left.T.sin().T * whole[:, ::2]

    layer, plain = Cut(), Cut()
    treat_layers([layer], "off", noted)
    found = []
    for each in (layer, plain):
        x = rows().requires_grad_()
        each(x).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)
    assert sorted(len(each.host) for each in noted.sent) == [
        4 * 1024 * 32,
        4 * 1024 * 64,
    ]  # the sine, and all of `whole`


def test_what_is_small_sparse_or_another_kind_of_tensor_stays():
    class Odd(Tensor):
        pass

    offload = ActivationOffload(torch.device("cpu"))
    for tensor in (
        torch.ones(100),
        torch.eye(2000).to_sparse(),
        torch.ones(200, 200).as_subclass(Odd),
        torch.ones(200, 200, dtype=torch.complex64).conj(),
        torch.ones(200, 200, device="meta"),
    ):
        assert offload.send((), tensor) is tensor


def test_several_graphs_a_dropped_one_and_a_second_backward():
    expected = gradients(build(), rows())
    net = build("off", ActivationOffload(torch.device("cpu")))
    net(rows())  # nobody goes backward
    torch.manual_seed(1)
    first = net(rows()).square().mean()
    second = net(rows()).square().mean()
    second.backward()
    net.zero_grad()
    first.backward(retain_graph=True)
    first.backward()
    assert all(torch.allclose(p.grad, 2 * g) for p, g in zip(net.parameters(), expected, strict=True))


def test_a_treated_model_copies_and_pickles_between_forward_and_backward():
    net = build("selective", ActivationOffload(torch.device("cpu")))
    expected = gradients(build(), rows())
    loss = net(rows()).sum()
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert all(torch.equal(a, b) for a, b in zip(gradients(twin, rows()), expected, strict=True))
    loss.backward()


def test_without_gradients_nothing_is_sent():
    noted = Noted()
    with torch.no_grad():
        build("off", noted)(rows())
    assert not noted.sent


def on_a_device(policy: str, most_bytes: int) -> dict[str, Any]:
    """Train on a device whose copies in streams of their own come late; return numbers, and what was on their way."""
    stand_in.install()
    activations._MOST_BYTES_IN_FLIGHT = most_bytes
    device = torch.device("stand_in", 0)
    noted = Noted("stand_in:0")
    found: dict[str, Any] = {"in flight": 0, "ahead": 0}

    def watch(name: str, method: Any, arrivals: str) -> Any:
        def watched(*args: Any) -> Any:
            result = method(*args)
            total = sum(each.storage.nbytes() for each in getattr(noted, arrivals).values())
            found[name] = max(found[name], total)
            return result

        return watched

    noted._send = watch("in flight", noted._send, "_leaving")
    noted._bring_ahead = watch("ahead", noted._bring_ahead, "_coming")
    for name, each in (("plain", build()), ("offloaded", build(policy, noted))):
        net = each.to(device)
        found[name] = [[gradient.cpu() for gradient in gradients(net, rows().to(device))] for _ in range(2)]
    found["left"] = len(noted._coming), len(noted._leaving)
    return found


@pytest.mark.multirank
@pytest.mark.parametrize(("policy", "most_bytes"), [("off", 600_000), ("selective", 600_000), ("off", 2**40)])
def test_copies_beside_the_computation_are_bounded_and_waited_for(policy: str, most_bytes: int):
    (found,) = run_ranks(on_a_device, 1, policy, most_bytes, env=stand_in.ALONE, timeout=200)
    for plain, offloaded in zip(found["plain"], found["offloaded"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(offloaded, plain, strict=True))
    assert 0 < found["in flight"] <= most_bytes
    assert found["ahead"] <= most_bytes
    assert (found["ahead"] > 0) == (most_bytes < 2**40)  # what never left need not come back
    assert found["left"] == (0, 0)
