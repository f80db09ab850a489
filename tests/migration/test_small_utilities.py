"""Small functions of accelerate's that nothing else here calls: each with what a script expects of it."""

from __future__ import annotations

import socket

import pytest
import torch
from torch import nn

from accel_trainer.big_modeling import init_empty_weights
from accel_trainer.errors import CheckpointNotFoundError
from accel_trainer.utils import (
    FullyShardedDataParallelPlugin,
    OffloadedWeightsLoader,
    check_device_same,
    compile_regions,
    extract_submodules_state_dict,
    filter_linear_layers,
    find_first_last_linear_layers,
    get_free_port,
    get_pretty_name,
    has_ao_layers,
    id_tensor_storage,
    is_port_in_use,
    load_offloaded_weights,
    load_state_dict,
    merge_dicts,
    offload_state_dict,
    offload_weight,
    recursive_getattr,
    save,
)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_storages_and_devices_are_compared():
    weight = torch.ones(4, 2)
    assert id_tensor_storage(weight) == id_tensor_storage(weight[1:].t()) != id_tensor_storage(weight.clone())
    assert id_tensor_storage(torch.empty(2, device="meta"))[:2] == (torch.device("meta"), 0)
    assert check_device_same(torch.device("cuda"), torch.device("cuda:0"))
    assert not check_device_same(torch.device("cuda:0"), torch.device("cuda:1"))
    assert not check_device_same(torch.device("cpu"), torch.device("cuda:0"))


def test_weights_in_a_file_each_are_read_into_a_model(tmp_path):
    torch.manual_seed(0)
    plain = Blocks()
    index: dict[str, dict[str, object]] = {}
    for name, value in plain.state_dict().items():
        index = offload_weight(value, name, tmp_path, index)
    with init_empty_weights():
        model = Blocks()
    load_offloaded_weights(model, index, tmp_path)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())

    (tmp_path / "head.bias.dat").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"head\.bias\.dat"):
        load_offloaded_weights(model, index, tmp_path)


def test_an_offloaded_state_dict_is_a_mapping(tmp_path):
    state = Blocks().state_dict()
    offload_state_dict(tmp_path, state)
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    assert len(loader) == len(state)
    assert set(loader) == set(state)
    assert all(torch.equal(loader[name], value) for name, value in state.items())
    assert list(extract_submodules_state_dict(state, ["layers.1", "head.bias"])) == [
        "layers.1.weight", "layers.1.bias", "head.bias",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.bin"])
def test_the_tensors_of_a_file(tmp_path, name):
    state = Blocks().state_dict()
    save(state, tmp_path / name, safe_serialization=name.endswith("safetensors"))
    found = load_state_dict(tmp_path / name)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], value) for key, value in state.items())


def test_a_device_map_places_the_tensors_of_a_file(tmp_path):
    save(Blocks().state_dict(), tmp_path / "weights.safetensors", safe_serialization=True)
    placed = load_state_dict(tmp_path / "weights.safetensors", {"": "cpu", "layers": "meta", "layers.1": "disk"})
    devices = {key: value.device.type for key, value in placed.items() if key.endswith("weight")}
    assert devices == {"embed.weight": "cpu", "layers.0.weight": "meta", "layers.1.weight": "cpu", "head.weight": "cpu"}


def test_which_layers_may_compute_in_fp8():
    model = Blocks()
    assert find_first_last_linear_layers(model) == ("embed", "head")
    assert find_first_last_linear_layers(nn.ReLU()) == (None, None)
    named = dict(model.named_modules())
    kept = [name for name, module in named.items() if filter_linear_layers(module, name, ["layers.0"])]
    assert kept == ["embed", "layers.1"]  # the head's 3 rows are no multiple of 16
    assert not has_ao_layers(model)


def test_blocks_are_compiled_one_by_one():
    model = Blocks()
    before, names = model(torch.ones(1, 16)), list(model.state_dict())
    assert compile_regions(model, backend="eager") is model
    assert torch.equal(model(torch.ones(1, 16)), before)
    assert list(model.state_dict()) == names
    assert [layer._compiled_call_impl is not None for layer in model.layers] == [True, True]
    assert model._compiled_call_impl is None


def test_ports():
    with socket.create_server(("localhost", 0)) as server:
        assert is_port_in_use(server.getsockname()[1])
    port = get_free_port()
    assert not is_port_in_use(port)
    socket.create_server(("", port)).close()


def test_names_paths_and_dicts():
    assert [get_pretty_name(each) for each in (Blocks, Blocks(), test_ports)] == ["Blocks", "Blocks", "test_ports"]
    assert recursive_getattr(Blocks(), "layers.1.out_features") == 32
    into = {"a": {"x": 1}, "b": 2}
    assert merge_dicts({"a": {"y": 3}, "c": {"z": 4}}, into) is into
    assert into == {"a": {"x": 1, "y": 3}, "b": 2, "c": {"z": 4}}


def test_the_kind_of_state_of_a_plugin_is_set_before_there_is_an_accelerator():
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert plugin.explicit()["fsdp.state_dict_type"] == "full"
