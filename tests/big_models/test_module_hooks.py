"""Hooks around the forward of a module, and reading ahead."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import threading
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from accel_trainer import cpu_offload
from accel_trainer.big_models.alignment import ReadAhead
from accel_trainer.errors import ConfigError
from accel_trainer.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_layerwise_casting_hooks,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel_trainer.utils import (
    PrefixedDataset,
    get_non_persistent_buffers,
    named_module_tensors,
    set_module_tensor_to_device,
)


class AddOne(ModelHook):
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (args[0] + 1, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output * 2


class Named(nn.Linear):
    def forward(self, x: Tensor, bias: bool = True) -> Tensor:
        return super().forward(x)


def test_a_hook_runs_around_forward_and_leaves_no_trace():
    module = Named(2, 2)
    x = torch.rand(1, 2)
    plain, once, twice = module(x), module(x + 1) * 2, module(x + 2) * 4
    add_hook_to_module(module, AddOne())
    assert list(inspect.signature(module.forward).parameters) == ["x", "bias"]
    torch.testing.assert_close(module(x), once)
    add_hook_to_module(module, AddOne())  # in the place of the first
    torch.testing.assert_close(module(x), once)
    add_hook_to_module(module, AddOne(), append=True)
    assert isinstance(module._hf_hook, SequentialHook)
    torch.testing.assert_close(module(x), twice)
    module._hf_hook.no_grad = True
    assert not module(x).requires_grad
    remove_hook_from_module(module)
    torch.testing.assert_close(module(x), plain)
    assert not {"forward", "_hf_hook", "_old_forward"} & vars(module).keys()


def test_a_traced_module_can_still_be_changed():
    traced = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    remove_hook_from_module(add_hook_to_module(traced, AddOne()), recurse=True)
    x = torch.rand(1, 2)
    plain = traced(x)
    (output,) = [node for node in traced.graph.nodes if node.op == "output"]
    with traced.graph.inserting_before(output):
        output.args = (traced.graph.call_function(torch.neg, (output.args[0],)),)
    traced.recompile()
    torch.testing.assert_close(traced(x), -plain)


@pytest.mark.parametrize("pattern", ["skipped", ["skipped"]])
def test_layers_keep_a_small_dtype_and_compute_in_another(pattern: Any):
    model = nn.ModuleDict({"kept": nn.Linear(2, 2), "skipped": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
    exact = model["kept"].weight.detach().to(torch.float8_e4m3fn).float()
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32, skip_modules_pattern=pattern)
    found = {name: layer.weight.dtype for name, layer in model.items()}
    assert found == {"kept": torch.float8_e4m3fn, "skipped": torch.float32, "norm": torch.float32}
    x = torch.eye(2)
    with torch.no_grad():
        output = model["kept"](x)
    torch.testing.assert_close(output - model["kept"].bias.float(), exact.T)
    assert model["kept"].weight.dtype == torch.float8_e4m3fn


def offloaded(read_ahead: ReadAhead | None) -> tuple[nn.Sequential, Tensor, list[str]]:
    """A bfloat16 model with float32 weights in its map, which are converted for each forward; who reads them when."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).bfloat16()
    weights = {name: tensor.float() for name, tensor in model.state_dict().items()}
    expected = model(torch.ones(1, 4, dtype=torch.bfloat16)).detach()
    readers: list[str] = []

    class Watched(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            readers.append(threading.current_thread().name)
            return super().__getitem__(name)

    attach_align_device_hook(model, "cpu", offload=True, weights_map=Watched(weights), read_ahead=read_ahead)
    return model, expected, readers


def test_weights_that_are_copied_are_read_by_a_thread_one_layer_ahead():
    model, expected, readers = offloaded(ReadAhead())
    for _ in range(2):
        assert torch.equal(model(torch.ones(1, 4, dtype=torch.bfloat16)), expected)
    assert "read-ahead" in readers
    assert not any(thread.name == "read-ahead" for thread in threading.enumerate())


class Keeping(nn.Linear):
    """Keeps what it was called with."""

    seen: tuple[Any, ...] = ()

    def forward(self, x: Tensor, *rest: Any, **options: Any) -> Tensor:
        self.seen = (x, *rest, options)
        return super().forward(x)


def test_inputs_that_lie_where_a_module_computes_are_handed_on_as_they_are():
    @dataclasses.dataclass
    class Wrapped:
        value: Tensor

    x, pair, nested = torch.ones(1, 2), [torch.ones(1), None], {"a": (torch.ones(1), 3)}
    model = cpu_offload(Keeping(2, 2), "cpu")
    model(x, pair, mask=nested)
    assert model.seen[0] is x
    assert model.seen[1] is pair
    assert model.seen[2]["mask"] is nested
    away = nn.Identity()
    add_hook_to_module(away, AlignDevicesHook("meta"))
    assert away([torch.ones(1), torch.ones(1, device="meta")])[0].is_meta
    assert away({"a": (1, Wrapped(torch.ones(1)))})["a"][1].value.is_meta


def test_a_compiled_model_computes_with_its_offloaded_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    x = torch.randn(4, 2)
    expected = model(x)
    offloaded = cpu_offload(model, "cpu")
    compiled = torch.compile(offloaded, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(x), expected)
        assert all(each.is_meta for each in offloaded.parameters())


def test_a_hook_takes_few_frames_of_python():
    model = cpu_offload(nn.Sequential(*[nn.Linear(2, 2) for _ in range(10)]), "cpu")
    x, frames = torch.ones(1, 2), Counter[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "accel_trainer" in frame.f_code.co_filename:
            frames[frame.f_code.co_name] += 1

    model(x)
    sys.setprofile(note)
    try:
        model(x)
    finally:
        sys.setprofile(None)
    # 43 a layer with the arguments rebuilt, and with a window of pages of which there are none.
    assert sum(frames.values()) / 10 <= 28, frames.most_common(20)


def test_layers_in_another_order_get_their_own_weights():
    model, _, _ = offloaded(ReadAhead())
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    expected = [layer(x).detach() for layer in model]
    for order in ([3, 1, 0, 2], [0, 0, 2], [3, 1, 0, 2]):
        assert all(torch.equal(model[index](x), expected[index]) for index in order)


def test_an_error_of_reading_ahead_is_raised_where_the_weights_are_needed():
    model, _, _ = offloaded(ReadAhead())
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    model(x)
    hook: AlignDevicesHook = model[1]._hf_hook
    hook.read = lambda device: [][0]  # type: ignore[method-assign]
    model[0](x)
    with pytest.raises(IndexError):
        model[1](x)


def test_weights_come_back_without_values_of_their_own():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attach_align_device_hook(model, "cpu", offload=True, offload_buffers=True)
    assert model[1].running_mean.is_meta
    remove_hook_from_submodules(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_persistent_buffer_is_told_from_one_inside_of_its_name():
    model = nn.ModuleDict({"inner": nn.Module()})
    model.register_buffer("mask", torch.zeros(1))
    model["inner"].register_buffer("mask", torch.zeros(1), persistent=False)
    found = [name for name, _ in named_module_tensors(model, recurse=True, remove_non_persistent=True)]
    assert found == ["mask"]
    assert get_non_persistent_buffers(model, recurse=True, fqns=True) == {"inner.mask"}
    assert get_non_persistent_buffers(model, recurse=True) == {"mask"}


def test_a_tensor_is_set_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight.note = "kept"
    set_module_tensor_to_device(model, "0.weight", "meta")
    assert model[0].weight.is_meta
    assert model[0].weight.note == "kept"
    with pytest.raises(ConfigError, match=r"'0.weight' is on the meta device and has no values to put on cpu"):
        set_module_tensor_to_device(model, "0.weight", "cpu")
    set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(2, 2), dtype="float16")
    assert model[0].weight.dtype == torch.float16
    set_module_tensor_to_device(model, "1.num_batches_tracked", "cpu", value=torch.tensor(3), dtype=torch.float16)
    assert model[1].num_batches_tracked.dtype == torch.int64
    with pytest.raises(ConfigError, match=r"value for '0.weight' has shape \(3,\), and the module's tensor \(2, 2\)"):
        set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(3))
    with pytest.raises(ConfigError, match=r"Sequential has no parameter or buffer '0\.scale'"):
        set_module_tensor_to_device(model, "0.scale", "cpu")
    with pytest.raises(ConfigError, match="dtype='float17' is no dtype of torch"):
        set_module_tensor_to_device(model, "0.weight", "cpu", dtype="float17")


def test_tied_weights_share_one_copy_on_a_device():
    layer = nn.Linear(2, 2)
    shared: dict[int, dict[Any, Tensor]] = {layer.weight.data_ptr(): {}}
    other = nn.Linear(2, 2)
    other.weight = layer.weight
    value = layer.weight.detach()
    set_module_tensor_to_device(layer, "weight", "cpu", value=value, dtype=torch.float64, tied_params_map=shared)
    set_module_tensor_to_device(other, "weight", "cpu", value=value, dtype=torch.float64, tied_params_map=shared)
    assert layer.weight is other.weight


def test_a_prefix_is_left_out_of_the_names():
    found = PrefixedDataset({"a.x": 1, "a.y": 2, "b.x": 3}, "a.")
    assert (list(found), len(found), found["y"]) == (["x", "y"], 2, 2)
