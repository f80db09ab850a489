"""What each precision means, and autocast put on a model and taken off again."""

from __future__ import annotations

import collections
import copy
import dataclasses
import importlib.util
import inspect
import pickle
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from accel_trainer.errors import ConfigError, MissingExtraError
from accel_trainer.precision import (
    AutocastForward,
    PrecisionPolicy,
    apply_autocast,
    build_precision,
    cast_floating,
    remove_autocast,
)

CPU = torch.device("cpu")
BF16 = build_precision("bf16", CPU)


class Pair(NamedTuple):
    loss: Tensor
    logits: Tensor


@dataclasses.dataclass
class Result:
    loss: Tensor
    name: str


class Net(nn.Module):
    """A layer whose dtype shows, in every kind of structure that a model may return."""

    def __init__(self, shape: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.shape = shape
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, labels: Tensor | None = None, *, flag: bool = False) -> Any:
        """Return the layer's output, once or in a structure."""
        y = self.layer(x)
        if self.shape == "tensor":
            return y
        self.seen.append(y.dtype)
        if self.shape == "model_output":
            from transformers.modeling_outputs import SequenceClassifierOutput

            return SequenceClassifierOutput(loss=y.mean(), logits=y, hidden_states=(y, y))
        kinds: dict[str, Any] = {
            "tuple": (y, [y], None),
            "dict": {"logits": y, "nested": {"ids": torch.arange(3)}},
            "ordered": collections.OrderedDict(logits=y),
            "namedtuple": Pair(y.mean(), y),
            "dataclass": Result(y, "x"),
            "others": (y, torch.arange(3), y.double(), "text", torch.Size([1, 2])),
        }
        return kinds[self.shape]


# --- policies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "device", "policy"),
    [
        ("no", "cpu", PrecisionPolicy(None, None, None, False)),
        ("bf16", "cpu", PrecisionPolicy(torch.bfloat16, torch.float32, torch.float32, False)),
        ("fp16", "cuda", PrecisionPolicy(torch.float16, torch.float32, torch.float32, True)),
    ],
)
def test_16_bits_reduce_in_fp32_and_fp16_scales_the_loss(name: str, device: str, policy: PrecisionPolicy):
    assert build_precision(name, torch.device(device)) == policy


def test_fp16_on_the_cpu_is_refused():
    with pytest.raises(ConfigError, match=r"^x\.yaml:3: fp16 was asked for on the CPU, .*fp32\); use 'bf16' or 'no'"):
        build_precision("fp16", CPU, origin="x.yaml:3")


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
def test_fp8_without_its_package_is_refused():
    with pytest.raises(MissingExtraError, match=r"'fp8': fp8 needs torchao, .*pip install 'accel-trainer\[fp8\]'"):
        build_precision("fp8", CPU)


def test_bf16_is_refused_where_the_device_only_emulates_it(monkeypatch: pytest.MonkeyPatch):
    # A GPU before Ampere: torch says yes and computes in fp32, several times slower.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    with pytest.raises(ConfigError, match=r"bf16 was asked for and cuda:0 does not support it; use 'no', or 'fp16'"):
        build_precision("bf16", torch.device("cuda", 0))


# --- outputs -------------------------------------------------------------------------------------------------------


def dtypes(data: Any) -> list[torch.dtype]:
    found: list[torch.dtype] = []
    cast_floating(data, torch.float32)  # must not touch what it is given

    def visit(node: Any) -> None:
        if isinstance(node, Tensor):
            found.append(node.dtype)
        elif isinstance(node, collections.abc.Mapping):
            for value in node.values():
                visit(value)
        elif isinstance(node, (list, tuple)):
            for value in node:
                visit(value)
        elif dataclasses.is_dataclass(node):
            visit(list(vars(node).values()))

    visit(data)
    return found


@pytest.mark.parametrize("shape", ["tuple", "dict", "ordered", "namedtuple", "dataclass", "model_output"])
def test_outputs_are_fp32_in_the_structure_that_the_model_returns(shape: str):
    model = Net(shape)
    plain = model(torch.ones(2, 4))
    apply_autocast(model, build_precision("bf16", CPU, output_dtype="fp32"))
    outputs = model(torch.ones(2, 4))
    assert model.seen == [torch.float32, torch.bfloat16]
    assert type(outputs) is type(plain)
    assert dtypes(outputs) == dtypes(plain)
    if shape == "model_output":
        assert torch.equal(outputs.logits, outputs["logits"])
        assert list(outputs.keys()) == ["loss", "logits", "hidden_states"]


def test_only_16_bit_tensors_are_cast():
    model = Net("others")
    apply_autocast(model, BF16)
    outputs = model(torch.ones(2, 4))
    assert [out.dtype for out in outputs[:3]] == [torch.float32, torch.int64, torch.float64]
    assert outputs[3:] == ("text", torch.Size([1, 2]))
    assert isinstance(outputs[4], torch.Size)


def test_the_gradient_flows_through_the_cast():
    model = Net()
    apply_autocast(model, BF16)
    model(torch.ones(2, 4)).sum().backward()
    assert model.layer.weight.grad is not None
    assert model.layer.weight.grad.dtype == torch.float32


# --- the model with autocast on it ---------------------------------------------------------------------------------


def bf16_model(model: nn.Module | None = None) -> nn.Module:
    model = Net("tuple") if model is None else model
    apply_autocast(model, BF16)
    return model


def test_class_names_state_and_signature_stay():
    model = Net()
    expected = inspect.signature(model.forward)
    assert inspect.signature(bf16_model(model).forward) == expected
    assert list(expected.parameters) == ["x", "labels", "flag"]
    assert type(model) is Net
    assert list(model.state_dict()) == ["layer.weight", "layer.bias"]
    assert [name for name, _ in model.named_modules()] == ["", "layer"]


def test_it_pickles():
    model = pickle.loads(pickle.dumps(bf16_model()))
    assert model.forward.module is model
    assert model(torch.ones(1, 4))[0].dtype == torch.float32
    assert model.seen == [torch.bfloat16]


def test_a_copys_forward_uses_the_copy():
    model = bf16_model()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.layer.weight.zero_()
        twin.layer.bias.zero_()
    assert twin.forward.module is twin
    assert twin(torch.ones(1, 4))[0].abs().sum() == 0
    assert model(torch.ones(1, 4))[0].abs().sum() > 0
    assert len(twin.seen) == 1


def test_two_applications_do_not_stack_and_removing_restores_the_class_forward():
    model = bf16_model()
    inner = model.forward
    apply_autocast(model, BF16)
    assert model.forward is inner
    apply_autocast(model, dataclasses.replace(BF16, output=None))  # of another Accelerator
    assert model(torch.ones(1, 4))[0].dtype is torch.bfloat16
    model.seen.clear()
    apply_autocast(model, build_precision("no", CPU))  # puts nothing on
    assert "forward" not in vars(model)
    remove_autocast(model)
    assert "forward" not in vars(model)
    model(torch.ones(1, 4))
    assert model.seen == [torch.float32]


def patched_forward(self: Net, x: Tensor) -> Tensor:
    """What kernels libraries and adapters put on an instance."""
    return self.layer(x) * 0 + 7


def test_a_forward_that_was_put_on_the_instance_is_kept():
    model = Net()
    model.forward = types.MethodType(patched_forward, model)
    own = model.forward
    bf16_model(model)
    assert isinstance(model.forward, AutocastForward)
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    outputs = model(torch.ones(1, 4))
    assert outputs.tolist() == [[7.0] * 4]
    assert outputs.dtype == torch.float32
    twin = copy.deepcopy(model)
    assert twin(torch.ones(1, 4)).tolist() == [[7.0] * 4]
    remove_autocast(model)
    assert model.forward is own


def test_a_model_that_the_user_has_compiled():
    model = torch.compile(Net(), backend="eager")
    bf16_model(model)
    assert model(torch.ones(1, 4)).dtype == torch.float32
    remove_autocast(model)
    assert model(torch.ones(1, 4)).dtype == torch.float32


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles_without_a_graph_break(backend: str):
    torch._dynamo.reset()
    model, compiled = bf16_model(Net()), bf16_model(Net())
    compiled.compile(backend=backend, fullgraph=True)
    x = torch.randn(2, 4)
    outputs = compiled(x)
    assert outputs.dtype == torch.float32
    assert torch.equal(outputs, model(x))
    outputs.sum().backward()
    model(x).sum().backward()
    torch.testing.assert_close(compiled.layer.weight.grad, model.layer.weight.grad)
    torch._dynamo.reset()


def test_the_device_is_that_of_the_call():
    # prepare(device_placement=False) comes before the user's own model.to(device).
    model = bf16_model(Net())
    entered: list[str] = []
    autocast = torch.autocast

    def spy(device_type: str, dtype: torch.dtype, **options: Any) -> Any:
        entered.append(device_type)
        return autocast("cpu", dtype=dtype)

    model.to("meta")
    try:
        torch.autocast = spy  # type: ignore[assignment, misc]
        model(torch.ones(1, 4, device="meta"))
    finally:
        torch.autocast = autocast  # type: ignore[misc]
    assert entered == ["meta"]


def test_a_model_without_parameters_computes_where_its_input_is():
    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.dtype = (x @ x).dtype
            return x @ x

    model = bf16_model(Product())
    assert model(torch.ones(2, 2)).dtype == torch.float32
    assert model.dtype == torch.bfloat16
