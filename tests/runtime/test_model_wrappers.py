from __future__ import annotations

import pickle
from types import SimpleNamespace

import torch
from torch import nn

from accel_trainer.accelerator.prepared import extract_model_from_parallel
from accel_trainer.precision import convert_outputs_to_fp32
from accel_trainer.runtime.model_wrappers import (
    get_model_tp_size,
    get_module_children_bottom_up,
    get_module_class_from_name,
    get_parameters_from_modules,
    has_compiled_regions,
    is_compiled_module,
    model_has_dtensor,
)


class Doubles(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_model_comes_out_of_whatever_was_put_around_it():
    model = Doubles()
    assert extract_model_from_parallel(model) is model
    assert extract_model_from_parallel(nn.DataParallel(model)) is model
    compiled = torch.compile(nn.DataParallel(model))
    kept = extract_model_from_parallel(compiled)
    assert is_compiled_module(kept)
    assert kept._orig_mod is model
    assert extract_model_from_parallel(torch.compile(nn.DataParallel(model)), keep_torch_compile=False) is model


def test_modules_inside_come_out_on_request():
    model = nn.Sequential(Doubles(), Doubles())
    inner = model[0]
    model[0] = nn.DataParallel(inner)
    assert extract_model_from_parallel(model) is model
    assert isinstance(model[0], nn.DataParallel)
    assert extract_model_from_parallel(model, recursive=True)[0] is inner


def test_a_forward_that_was_replaced_is_restored():
    model = Doubles().to(torch.bfloat16)
    model._original_forward = model.forward
    model.forward = convert_outputs_to_fp32(model.forward)
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    assert model(x).dtype == torch.float32
    assert pickle.loads(pickle.dumps(model))(x).dtype == torch.float32
    assert extract_model_from_parallel(model)(x).dtype == torch.float32
    assert extract_model_from_parallel(model, keep_fp32_wrapper=False)(x).dtype == torch.bfloat16
    assert "forward" not in model.__dict__


def test_compiled_regions_are_seen():
    model = nn.Sequential(Doubles(), Doubles())
    assert not has_compiled_regions(model)
    model[1] = torch.compile(model[1])
    assert (has_compiled_regions(model), is_compiled_module(model)) == (True, False)


def test_children_come_before_those_that_hold_them():
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.ReLU())
    names = [name for name, _ in get_module_children_bottom_up(model, return_fqns=True)]
    assert sorted(names) == ["", "0", "0.0", "1"]
    assert names.index("0.0") < names.index("0") < names.index("")
    assert get_module_children_bottom_up(model)[-1] is model


def test_the_tensor_parallel_degree_of_a_loaded_model():
    model = Doubles()
    assert get_model_tp_size(model) is None
    assert not model_has_dtensor(model)
    model.config = SimpleNamespace(distributed_config={"tp_size": 8})
    assert get_model_tp_size(model) == 8
    model.tp_size = 2
    assert get_model_tp_size(model) == 2


def test_classes_and_parameters_inside_are_found_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Doubles(), nn.ReLU()))
    assert get_module_class_from_name(model, "Doubles") is Doubles
    assert get_module_class_from_name(model, "Sequential") is nn.Sequential
    assert get_module_class_from_name(model, "Conv2d") is None
    assert get_parameters_from_modules(None, model, "cpu") == set()
    assert get_parameters_from_modules([model[0]], model, "cpu") == set(model[0].parameters())
    assert get_parameters_from_modules(r"1\.\d", model, "cpu") == set(model[1].parameters())
