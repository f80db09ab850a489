"""Sizes of models, and the device maps that are computed from them."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from accel_trainer import init_empty_weights
from accel_trainer.big_modeling import get_balanced_memory, get_max_memory, infer_auto_device_map
from accel_trainer.errors import ConfigError
from accel_trainer.utils import (
    CustomDtype,
    calculate_maximum_sizes,
    check_device_map,
    clean_device_map,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_file_size_to_int,
    dtype_byte_size,
    fallback_allocate,
    get_max_layer_size,
)


class Block(nn.Module):
    """236 bytes: `first` has 64, `norm` 72, `second` 100."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 5)


def blocks(count: int = 3) -> nn.Sequential:
    return nn.Sequential(OrderedDict((f"block{index}", Block()) for index in range(count)))


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        (500, 500),
        (2.9e9 * 0.5, 1_450_000_000),
        ("0MB", 0),
        ("1.5GB", 1_500_000_000),
        ("2GiB", 2**31),
        ("512KiB", 2**19),
        ("20Gib", 20 * 2**30),
        ("3kib", 3072),
        ("8Mb", 10**6),
        ("7B", 7),
        ("1000000B", 10**6),
    ],
)
def test_a_size_is_a_number_of_bytes(size: float | str, num_bytes: int):
    assert convert_file_size_to_int(size) == num_bytes


@pytest.mark.parametrize("size", ["5MBB", "5k0MB", "-1GB", "10", "", "1IB"])
def test_what_is_no_size_is_an_error(size: str):
    with pytest.raises(ConfigError, match="is no number of bytes; write it like '10GB', '500MiB' or '1000000B'"):
        convert_file_size_to_int(size)


def test_dtypes_that_torch_does_not_have_are_counted_packed():
    assert [dtype_byte_size(dtype) for dtype in (torch.bool, torch.bfloat16, torch.float8_e5m2)] == [1 / 8, 2, 1]
    with pytest.raises(ConfigError, match="dtype='fp32' is no dtype of torch; give one"):
        dtype_byte_size("fp32")
    # A quantiser asks for them: 7B in int4 take an eighth of the bytes of fp32, and fit where that does not.
    assert [dtype_byte_size(each) for each in CustomDtype] == [1, 0.5, 0.25]
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 4))
    assert compute_module_sizes(model, dtype=CustomDtype.INT4)[""] == 5 + 2 + 8 + 2  # half a byte is a byte
    assert compute_module_sizes(model, special_dtypes={"1.weight": CustomDtype.INT2})["1"] == 4 + 16
    assert infer_auto_device_map(model, {0: 50, "cpu": 500}, dtype=CustomDtype.INT4) == {"": 0}
    assert infer_auto_device_map(model, {0: 50, "cpu": 500}, dtype="float32") == {"": "cpu"}


def test_sizes_are_those_of_the_tensors_and_sum_up():
    with init_empty_weights(include_buffers=True):
        model = Block()
    sizes = compute_module_sizes(model)
    assert [sizes[name] for name in ("", "first", "norm", "second.weight")] == [236, 64, 72, 80]
    # num_batches_tracked is an integer, and stays one.
    assert compute_module_sizes(model, dtype="float16")[""] == (236 - 8) // 2 + 8
    assert compute_module_sizes(model, dtype="float16", special_dtypes={"first.weight": "float32"})["first"] == 56
    assert compute_module_total_buffer_size(model) == 40
    assert calculate_maximum_sizes(model) == (236, (100, ["second"]))
    assert get_max_layer_size([("block", model)], {"block": 236}, ["Block"]) == (236, ["block"])


def test_devices_are_filled_in_order_with_room_for_the_largest_layer():
    # 200 bytes less 100 for the largest layer; the second device keeps no room.
    assert infer_auto_device_map(Block(), {0: 200, 1: 172, 2: 200}) == {"first": 0, "norm": 1, "second": 1}
    assert infer_auto_device_map(blocks(), {0: 500, 1: 500}) == {
        "block0": 0,
        "block1.first": 0,
        "block1.norm": 0,
        "block1.second": 1,
        "block2": 1,
    }
    assert infer_auto_device_map(blocks(), {0: 500, 1: 500}, no_split_module_classes="Block") == {
        "block0": 0,
        "block1": 1,
        "block2": 1,
    }
    assert infer_auto_device_map(Block(), {"cpu": 1000}) == {"": "cpu"}
    parts = infer_auto_device_map(Block(), {"cpu": 1000}, clean_result=False)
    assert parts == {"first": "cpu", "norm": "cpu", "second": "cpu"}


def test_tied_weights_come_together_and_count_once():
    model = blocks()
    model.block2.second.weight = model.block0.second.weight
    assert infer_auto_device_map(model, {0: 400, 1: 500}) == {
        "block0": 0,
        "block2.second": 0,
        "block1": 1,
        "block2.first": 1,
        "block2.norm": 1,
    }
    model = blocks(2)
    model.shared = model.block1.second.weight  # a parameter of the model itself, tied to one inside
    assert infer_auto_device_map(model, {0: 10_000}) == {"": 0}


def test_a_shared_layer_has_a_device_by_each_of_its_names():
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8)] * 3), nn.Linear(8, 8))

    found = infer_auto_device_map(build(), {"cpu": 700})
    assert {name for name in found if name.startswith("1")} == {"1"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_device_map(build(), found)
        check_device_map(build(), {"0": 0, "1.0": 0, "1.1": 0, "1.2": 0, "2": 1})


def test_buffers_of_a_module_that_is_split_have_a_device_too():
    model = nn.Sequential(Block())
    model[0].register_buffer("scale", torch.ones(2))
    found = infer_auto_device_map(model, {0: 170, 1: 1000})
    assert found["0.scale"] == 1
    check_device_map(model, found)


def test_a_later_module_takes_a_device_that_would_stay_empty(caplog: pytest.LogCaptureFixture):
    layers = [("a", nn.Linear(10, 4)), ("b", nn.Linear(4, 4)), ("c", nn.Linear(4, 8))]
    model = nn.Sequential(OrderedDict([("inner", nn.Sequential(OrderedDict(layers)))]))
    assert infer_auto_device_map(model, {0: 256}) == {"": "disk"}
    assert "insufficient memory on 0: no module was placed there" in caplog.text
    caplog.clear()
    found = infer_auto_device_map(model, {0: 256}, fallback_allocation=True)
    assert found == {"inner.a": "disk", "inner.b": 0, "inner.c": "disk"}
    assert "insufficient" not in caplog.text


def test_the_module_that_fits_is_found_at_any_depth():
    model = blocks(1)
    name, module, rest = fallback_allocate([("block0", model.block0)], compute_module_sizes(model), 80)
    assert (name, [entry for entry, _ in rest]) == ("block0.first", ["block0.norm", "block0.second"])
    assert module is model.block0.first
    assert fallback_allocate([("block0", model.block0)], compute_module_sizes(model), 10)[:2] == (None, None)


def test_buffers_that_fit_on_no_accelerator_are_a_warning():
    model = Block()
    for layer, length in ((model.first, 20), (model.norm, 30), (model.second, 30)):
        layer.register_buffer("extra", torch.zeros(length))
    budget = {0: 400, "cpu": "1GB"}
    with pytest.warns(UserWarning, match=r"take 280 bytes, which are left on none .* give offload_buffers=True"):
        found = infer_auto_device_map(model, budget)
    assert found == {"first": 0, "norm": "cpu", "second": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert infer_auto_device_map(model, budget, offload_buffers=True) == found


def test_balanced_memory_leaves_room_on_all_but_the_last():
    # Half of 236 bytes, and a quarter more than the mean layer of 78.
    assert get_balanced_memory(Block(), {0: 300, 1: 500}) == {0: 215, 1: 500}
    assert get_balanced_memory(Block(), {0: 0, 3: 300, 7: 300}) == {0: 0, 3: 215, 7: 300}
    assert get_balanced_memory(Block(), {"cpu": 100}) == {"cpu": 100}
    assert get_balanced_memory(Block(), {0: 300, 1: 300, 2: 300}, low_zero=True) == {0: 0, 1: 215, 2: 300}


def test_memory_is_bounded_by_what_is_there():
    assert 0 < get_max_memory()["cpu"] < 2**50
    assert list(get_max_memory({"cpu": "1KB", 1: 10, 0: 20})) == [0, 1, "cpu"]
    with pytest.raises(ConfigError, match="max_memory has 'gpu'; expected numbers of accelerators"):
        get_max_memory({"gpu": 1})


@pytest.mark.parametrize(
    ("given", "cleaned"),
    [
        ({"a": 0, "b": 0, "c": 0}, {"": 0}),
        ({"a.x": 0, "a.y": 0, "b.x": 1, "b.y": 1, "c": 1}, {"a": 0, "b": 1, "c": 1}),
        ({"a.x": 0, "a.y.p": 1, "a.y.q": 1}, {"a.x": 0, "a.y": 1}),
        ({"a1.x": 0, "a1.y": 0, "a10.x": 1}, {"a1": 0, "a10.x": 1}),
    ],
)
def test_modules_on_one_device_are_named_once(given: dict[str, Any], cleaned: dict[str, Any]):
    assert clean_device_map(given) == cleaned == given


def test_a_map_that_leaves_tensors_out_is_an_error():
    check_device_map(Block(), {"": 0})
    with pytest.raises(ConfigError, match=r"device_map says nothing about 'norm.weight', .* an entry '' for all"):
        check_device_map(Block(), {"first": 0, "second": 1})
    with pytest.warns(UserWarning, match="do not match any submodules of the model: \\['third'\\]"):
        check_device_map(Block(), {"": 0, "third": 1})
