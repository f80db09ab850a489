"""What a policy keeps, what it computes again, and the same numbers, in one process; ranks are in test_layers.py."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_trainer.errors import ConfigError
from accel_trainer.techniques.activations import check_policy, release_layers, treat_layers
from tests.cells import crossed
from tests.loops import tiny_model

POLICIES = ("full", "selective", "every:2", "every:5", "ops:aten.silu,aten.mm")
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class Layer(nn.Module):
    """Attention without heads, a gated network behind a norm, and dropout behind both."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
        self.norm = nn.LayerNorm(16)
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((16, 32), (16, 32), (32, 16)))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, note: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any] | None]:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        x = x + self.dropout(self.out(mixed))
        y = self.norm(x)
        return x + self.dropout(self.down(nn.functional.silu(self.gate(y)) * self.up(y))), note


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, note = layer(x, note={"of": "nobody"})
            assert note == {"of": "nobody"}
        return x.square().mean()


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def build(policy: str = "off") -> Net:
    torch.manual_seed(0)
    net = Net()
    treat_layers(net.layers, policy)
    return net


def step(net: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor | None], Counter[str]]:
    """Return the loss, the gradients, and the operations of the backward."""
    torch.manual_seed(1)
    loss = net(*args, **kwargs)
    loss = getattr(loss, "loss", loss)
    with Counted() as counted:
        loss.backward()
    return loss.detach(), [p.grad for p in net.parameters()], counted.calls


def rows() -> Tensor:
    return torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def plain() -> tuple[Tensor, list[Tensor | None], Counter[str]]:
    return step(build(), rows())


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        ("full", {"mm": 5 * 3, ATTENTION: 3, "silu": 3, "native_layer_norm": 3}),
        ("selective", {"silu": 3, "native_layer_norm": 3}),
        ("every:2", {"mm": 5 * 2, ATTENTION: 2, "silu": 2, "native_layer_norm": 2}),
        ("every:5", {"mm": 5, ATTENTION: 1, "silu": 1, "native_layer_norm": 1}),
        ("ops:aten.silu,aten.mm", {ATTENTION: 3, "native_layer_norm": 3}),
        ("ops:aten.native_layer_norm.default", {"mm": 5 * 3, ATTENTION: 3, "silu": 3}),
    ],
)
def test_a_policy_says_which_operations_come_again_with_the_same_numbers(
    policy: str, again: dict[str, int], plain: Any
):
    loss, gradients, calls = step(build(policy), rows())
    assert torch.equal(loss, plain[0])
    assert all(torch.equal(found, expected) for found, expected in zip(gradients, plain[1], strict=True))
    watched = ("mm", ATTENTION, "silu", "native_layer_norm")
    assert {name: more for name in watched if (more := calls[name] - plain[2][name])} == again


def test_scores_of_attention_are_not_kept_and_wide_products_of_adapters_neither():
    class Scores(nn.Module):
        def forward(self, x: Tensor) -> Tensor:  # (B, L, 8), L = 100
            return torch.softmax(x @ x.mT, dim=-1) @ x

    layer = Scores()
    treat_layers([layer], "selective")
    with torch.enable_grad():
        output = layer(torch.randn(2, 100, 8, requires_grad=True))
    with Counted() as counted:
        output.sum().backward()
    assert counted.calls["bmm"] == 1 + 4  # the scores again; their sum with values is kept


@pytest.fixture
def own_operation() -> Iterator[Any]:
    library = torch.library.Library("checkpointing_test", "DEF")
    library.define("keep_some(Tensor x, float dropout_p) -> Tensor")
    seen: list[float] = []

    def keep_some(x: Tensor, dropout_p: float) -> Tensor:
        seen.append(dropout_p)
        return x * (torch.rand_like(x) >= dropout_p) if dropout_p else x.clone()

    library.impl("keep_some", keep_some, "CompositeExplicitAutograd")
    operation = torch.ops.checkpointing_test.keep_some.default
    torch.library.register_autograd(
        operation,
        lambda ctx, gradient: (gradient * ctx.saved_tensors[0], None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward((output != 0).float()),
        lib=library,
    )
    yield operation, seen
    library._destroy()


@pytest.mark.parametrize(("dropout_p", "calls"), [(0.0, 1), (0.5, 2)])
def test_an_operation_that_drops_elements_is_called_again_for_later_draws(own_operation, dropout_p, calls):
    operation, seen = own_operation

    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(operation(x, dropout_p).exp(), 0.5).square()

    gradients = []
    for policy in ("off", "ops:checkpointing_test.keep_some"):
        layer, x = Dropping(), torch.arange(1.0, 51.0).div(50).requires_grad_()
        treat_layers([layer], policy)
        torch.manual_seed(3)
        seen.clear()
        layer(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert seen == [dropout_p] * calls


class Shared(nn.Module):
    """A layer that runs twice, as in ALBERT: autocast casts its weight once in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x, _ = self.layers[0](x)
        return x.square().mean()


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_that_two_layers_share_are_cast_once(policy: str):
    found = []
    for each in ("off", policy):
        torch.manual_seed(0)
        net = Shared()
        treat_layers(net.layers, each)
        with torch.autocast("cpu", torch.bfloat16):
            torch.manual_seed(1)
            loss = net(rows())
        loss.backward()
        found.append((loss.detach(), [p.grad for p in net.parameters()]))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize(("kind", "policy"), crossed(["llama", "gpt2", "mixtral"], ["full", "selective", "every:2"]))
def test_models_of_transformers_train_with_the_same_numbers_and_go_on_with_a_cache(kind: str, policy: str):
    tokens = torch.arange(24).view(2, 12)
    found = []
    for each in ("off", policy):
        model = tiny_model(kind, resid_pdrop=0.1, attention_dropout=0.1)
        before = list(model.state_dict())
        treat_layers(list(next(m for m in model.modules() if isinstance(m, nn.ModuleList))), each)
        assert list(model.state_dict()) == before
        found.append(step(model.train(), input_ids=tokens, labels=tokens))
        with torch.no_grad():
            assert model.eval()(input_ids=tokens, use_cache=True).past_key_values.get_seq_length() == 12
    (loss, gradients, _), (again, others, _) = found
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True) if a is not None)


@pytest.mark.parametrize(("policy", "backend"), [("selective", "eager"), ("selective", "aot_eager"), ("full", "eager")])
def test_compiled_layers_keep_what_the_policy_says(policy: str, backend: str):
    found = []
    for each in ("off", policy):
        net = build(each)
        for layer in net.layers:
            layer.dropout.p = 0.0
            if each != "off":
                layer.compile(backend=backend, fullgraph=True)
        loss = net(rows())
        loss.backward()
        found.append((loss.detach(), [p.grad for p in net.parameters()]))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("policy", POLICIES)
def test_treated_layers_copy_pickle_and_go_back(policy: str, plain: Any):
    for twin in (copy.deepcopy(build(policy)), pickle.loads(pickle.dumps(build(policy)))):
        assert torch.equal(step(twin, rows())[0], plain[0])
        assert all(torch.equal(p.grad, g) for p, g in zip(twin.parameters(), plain[1], strict=True))
        release_layers(twin)
        assert not any("forward" in vars(layer) for layer in twin.layers)
    net = build("full")
    treat_layers(net.layers, "selective")  # in the place of the first policy, not around it
    assert step(net, rows())[2]["mm"] == plain[2]["mm"]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("ops:aten.mmm", r"ORIGIN: torch\.ops has no operation 'aten\.mmm'; did you mean 'mm.*Write NAMESPACE\.NAME"),
        ("ops:aten.mm,nothing.mm", r"torch\.ops has no operation 'nothing\.mm'"),
        ("ops:aten.mm.nothing", r"torch\.ops has no operation 'aten\.mm\.nothing'"),
        ("ops:aten.bernoulli", r"torch\.ops\.aten\.bernoulli draws random numbers.*leave it out, and it is computed"),
    ],
)
def test_operations_that_cannot_be_kept_are_refused_by_name(policy: str, message: str):
    with pytest.raises(ConfigError, match=message):
        check_policy(policy, "ORIGIN")
