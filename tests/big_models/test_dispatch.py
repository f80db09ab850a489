"""Models whose blocks are on the host and on disk compute what the plain model computes."""

from __future__ import annotations

import copy
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from accel_trainer import (
    Accelerator,
    Trainer,
    TrainingArguments,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel_trainer.checkpoint.manifest import MANIFEST_NAME, MARKER_NAME, Manifest, hash_file
from accel_trainer.checkpoint.weights.weight_files import save_weights
from accel_trainer.errors import ConfigError, CorruptCheckpointError, IncompatibleCheckpointError, OffloadedModelError
from accel_trainer.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from accel_trainer.utils import (
    align_module_device,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
)
from tests.ranks import run_ranks


class Used(nn.Module):
    """Uses the weights of a module inside without calling it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.inner.weight.t() + self.inner.bias


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.used = Used(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(4))
        self.register_buffer("offset", torch.rand(4), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.hidden(self.embed(ids)))
        return self.head(self.used(x) * self.scale + self.offset)


IDS = torch.tensor([1, 5, 7])


@pytest.fixture
def model() -> Net:
    torch.manual_seed(1)
    return Net().eval()


@pytest.fixture
def expected(model: Net) -> Tensor:
    return model(IDS).detach()


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("to_disk", [False, True])
def test_an_offloaded_model_computes_the_same_and_comes_back(
    model: Net, expected: Tensor, tmp_path: Path, offload_buffers: bool, to_disk: bool
):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options: dict[str, Any] = {"offload_buffers": offload_buffers, "preload_module_classes": ["Used"]}
    if to_disk:
        disk_offload(model, tmp_path / "weights", **options)
    else:
        cpu_offload(model, **options)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.norm.running_mean.is_meta == offload_buffers
    for _ in range(2):  # the second time the order of the layers is known
        assert torch.equal(model(IDS), expected)
    assert all(parameter.is_meta for parameter in model.parameters())
    state = get_state_dict_offloaded_model(model)
    assert {name: tensor.tolist() for name, tensor in state.items()} == {n: t.tolist() for n, t in before.items()}
    remove_hook_from_submodules(model)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert torch.equal(model(IDS), expected)
    assert "forward" not in vars(model.hidden)
    assert model.head.weight is model.embed.weight  # tied as it was: else an optimizer would train two


@pytest.mark.parametrize("to_disk", [False, True])
def test_a_tied_weight_is_read_by_both_names_where_a_module_is_offloaded_whole(
    model: Net, expected: Tensor, tmp_path: Path, to_disk: bool
):
    tied = model.embed.weight.detach().clone()
    if to_disk:
        disk_offload(model, tmp_path / "weights", preload_module_classes=["Net"])
    else:
        cpu_offload(model, preload_module_classes=["Net"])
    assert model.head.weight.is_meta
    assert torch.equal(model(IDS), expected)
    assert torch.equal(get_state_dict_offloaded_model(model)["head.weight"], tied)


def test_a_model_computes_with_the_weights_that_it_was_dispatched_with(model: Net, expected: Tensor, tmp_path: Path):
    other, folder = Net().eval(), tmp_path / "weights"
    other_expected = other(IDS).detach()
    disk_offload(model, folder, preload_module_classes=["Used"])
    disk_offload(other, folder, preload_module_classes=["Used"])  # one folder for two models, neither of which has run
    assert torch.equal(model(IDS), expected)
    assert torch.equal(other(IDS), other_expected)
    (folder / "head.weight.dat").rename(folder / "gone.dat")  # the folder's index still has it
    small = nn.Sequential(nn.Linear(4, 2))
    small_expected = small(torch.ones(1, 4))
    disk_offload(small, folder)
    assert torch.equal(small(torch.ones(1, 4)), small_expected)


def test_gradients_flow_through_an_offloaded_model(model: Net):
    x = torch.rand(3, 4, requires_grad=True)
    plain = torch.autograd.grad(model.used(x).sum(), x)[0]
    cpu_offload(model.used)
    assert torch.equal(torch.autograd.grad(model.used.inner(x).sum(), x)[0], plain)


DISK = {"embed": "disk", "head": "disk", "hidden": "disk", "used": "disk", "norm": "disk", "scale": "cpu"}


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_checkpoint_runs_from_disk(model: Net, tmp_path: Path, safe: bool, dtype: torch.dtype | None):
    expected = model.to(dtype)(IDS).detach() if dtype else model(IDS).detach()
    save_weights(model.float().state_dict(), tmp_path, 100, safe_serialization=safe)
    with init_empty_weights():
        empty = Net().eval()
    empty.offset = model.offset
    folder = tmp_path / "copies"
    made = load_checkpoint_and_dispatch(
        empty,
        tmp_path,
        DISK,
        offload_folder=None if safe else folder,
        dtype=dtype,
        preload_module_classes=["Used"],
    )
    assert made is empty
    assert empty.hf_device_map == DISK
    assert folder.exists() == (not safe)
    for _ in range(2):
        torch.testing.assert_close(empty(IDS), expected, rtol=0, atol=0)
    assert empty.hidden.weight.is_meta
    assert not empty.norm.running_mean.is_meta
    # Tied names are one file entry, or one file.
    assert not list(folder.glob("head*")) or not list(folder.glob("embed*"))


def test_mapped_weights_are_the_files_own_pages_and_do_not_move(model: Net, tmp_path: Path):
    save_weights(model.state_dict(), tmp_path)
    load_checkpoint_and_dispatch(model, tmp_path, DISK)
    address = model.hidden._hf_hook.stored()[0].data_ptr()
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps if line.endswith(str(tmp_path / "model.safetensors"))]
    assert any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    with pytest.raises(OffloadedModelError, match=r"Net is offloaded: .* remove_hook_from_submodules\(model\)"):
        model.to("cpu")
    remove_hook_from_submodules(model)
    assert "to" not in vars(model)


def test_loading_and_dispatching_may_be_two_steps(model: Net, expected: Tensor, tmp_path: Path):
    save_weights(model.state_dict(), tmp_path)
    other = Net().eval()
    other.offset = model.offset
    report = load_checkpoint_in_model(other, tmp_path, DISK, offload_folder=tmp_path / "index")
    assert report.left_on_meta == []
    assert other.hidden.weight.is_meta
    assert other.head.weight is other.embed.weight
    dispatch_model(other, DISK, offload_dir=tmp_path / "index", preload_module_classes=["Used"])
    assert torch.equal(other(IDS), expected)


@pytest.mark.parametrize("safe", [True, False])
def test_an_offloaded_model_is_saved_over_its_own_checkpoint(model: Net, expected: Tensor, tmp_path: Path, safe: bool):
    accelerator = Accelerator()
    accelerator.save_model(model, tmp_path, safe_serialization=safe)
    graph = model(IDS)  # refers to the parameters as long as it lives
    load_checkpoint_and_dispatch(model, tmp_path, DISK, offload_folder=tmp_path, preload_module_classes=["Used"])
    assert graph.requires_grad
    state = accelerator.get_state_dict(model)
    assert not any(tensor.is_meta for tensor in state.values())
    accelerator.save_model(model, tmp_path, safe_serialization=safe)
    # The files that it computes with were replaced, and are still there for it.
    assert torch.equal(model(IDS), expected)
    again = Net().eval()
    again.offset = model.offset
    load_checkpoint_in_model(again, tmp_path)
    assert torch.equal(again(IDS), expected)


def test_a_deep_copy_computes_with_hooks_of_its_own(model: Net, expected: Tensor, tmp_path: Path):
    torch.manual_seed(2)
    disk_offload(Net(), tmp_path)  # which the weights of the next one replace
    disk_offload(model, tmp_path, preload_module_classes=["Used"])
    copied = copy.deepcopy(model)
    remove_hook_from_submodules(model)
    assert copied.hidden.weight.is_meta
    assert copied.hidden.forward.args[0] is copied.hidden
    assert torch.equal(copied(IDS), expected)


def test_what_has_no_values_is_an_error(model: Net, tmp_path: Path):
    with init_empty_weights():
        empty = Net()
    with pytest.raises(IncompatibleCheckpointError, match=r"'scale', .* of Net have no values: they are on the meta"):
        disk_offload(empty, tmp_path)
    with pytest.raises(ConfigError, match=r"to 'disk', and nothing says where that is; give offload_dir"):
        dispatch_model(model, {"": "disk"})
    for offload in (cpu_offload, lambda each: dispatch_model(each, {"": "cpu"})):
        with pytest.raises(
            ConfigError, match=r"'scale', .* of Net have no values: they are on the meta device, and not"
        ):
            offload(empty)
    with pytest.raises(OffloadedModelError, match="Linear is offloaded already; take its hooks off with remove_hook"):
        cpu_offload(cpu_offload(nn.Linear(2, 2)))
    disk_offload(nn.Linear(2, 2), tmp_path)
    with init_empty_weights():
        larger = nn.Linear(3, 2)
    with pytest.raises(IncompatibleCheckpointError, match=r"weight is \(2, 2\) in .* and \(2, 3\) in the model"):
        disk_offload(larger, tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="cannot be mapped tensor by tensor; give offload_folder"):
        load_checkpoint_and_dispatch(model, tmp_path / "pytorch_model.bin", {"": "disk"})


@pytest.mark.parametrize("entry", [{}, {"dtype": 3, "shape": [2, 2]}, {"dtype": "float32", "shape": "x"}])
def test_a_damaged_index_is_an_error(tmp_path: Path, entry: dict[str, Any]):
    disk_offload(nn.Linear(2, 2), tmp_path)
    (tmp_path / "index.json").write_text(json.dumps({"weight": entry}))
    with init_empty_weights():
        empty = nn.Linear(2, 2, bias=False)
    with pytest.raises(IncompatibleCheckpointError, match=r"index\.json is no index of offloaded weights"):
        disk_offload(empty, tmp_path)


class _WithState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize("how", ["save", "get", "load", "cpu", "disk"])
def test_a_state_that_is_no_tensor_is_an_error(tmp_path: Path, how: str):
    model, accelerator = _WithState(2, 2), Accelerator(cpu=True)
    save_weights(nn.Linear(2, 2).state_dict(), tmp_path)
    calls: dict[str, Any] = {
        "save": lambda: accelerator.save_model(model, tmp_path / "out"),
        "get": lambda: accelerator.get_state_dict(model),
        "load": lambda: load_checkpoint_in_model(model, tmp_path),
        "cpu": lambda: cpu_offload(model),
        "disk": lambda: disk_offload(model, tmp_path / "out"),
    }
    with pytest.raises(ConfigError, match=r"_extra_state of _WithState is a dict, and .*get_extra_state\(\): torch"):
        calls[how]()


def test_scales_of_eight_bits_are_saved_and_loaded(tmp_path: Path):
    model = nn.ParameterDict({"scale": nn.Parameter(torch.rand(4).to(torch.float8_e8m0fnu), requires_grad=False)})
    values = model["scale"].view(torch.uint8).clone()
    Accelerator(cpu=True).save_model(model, tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["scale"].view(torch.uint8), values)
    model["scale"].view(torch.uint8).zero_()
    load_checkpoint_in_model(model, tmp_path)
    assert torch.equal(model["scale"].view(torch.uint8), values)


def test_options_of_loading(model: Net, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save_weights(model.state_dict(), tmp_path)
    report = load_checkpoint_in_model(model, tmp_path, dtype="float16", keep_in_fp32_modules=["inner"])
    assert report.missing_keys == []
    assert model.hidden.weight.dtype == torch.float16
    assert model.used.inner.weight.dtype == torch.float32
    with pytest.raises(ConfigError, match="offload_8bit_bnb=True is not offered"):
        load_checkpoint_in_model(model, tmp_path, offload_8bit_bnb=True)
    with pytest.raises(ConfigError, match="dtype='float17' is no dtype of torch"):
        load_checkpoint_in_model(model, tmp_path, dtype="float17")


@pytest.mark.parametrize("device_map", [{"": "disk", "head": "cpu"}, {"": "cpu", "embed": "disk", "hidden": "disk"}])
def test_a_tied_weight_of_which_one_name_is_in_memory_stays_there(
    model: Net, expected: Tensor, tmp_path: Path, device_map: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    save_weights(model.state_dict(), tmp_path)
    with caplog.at_level(logging.WARNING):
        load_checkpoint_and_dispatch(model, tmp_path, device_map, preload_module_classes=["Used"])
    assert "tied parameters are sent to different devices" in caplog.text
    assert not model.head.weight.is_meta
    assert model.hidden.weight.is_meta
    assert torch.equal(model(IDS), expected)


def test_a_dispatched_model_is_prepared_where_it_is(model: Net, expected: Tensor, tmp_path: Path):
    device_map = {"": "cpu", "hidden": "disk"}
    dispatch_model(model, device_map, offload_dir=tmp_path, main_device="cpu")
    accelerator = Accelerator(cpu=True)
    assert accelerator.prepare(model) is model
    assert torch.equal(model(IDS), expected)
    assert model.hidden.weight.is_meta
    accelerator.free_memory()
    trained = torch.optim.SGD(model.norm.parameters(), lr=0.1)
    accelerator.prepare(model, trained)
    accelerator.free_memory()
    with pytest.raises(ConfigError, match="weights of Net stay in host memory or on disk and are read for each forwa"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_prepared_model_is_saved_with_its_offloaded_weights(tmp_path: Path, dtype: torch.dtype | None):
    model, x = _two_layers(), torch.ones(1, 4, dtype=dtype)
    save_weights(model.state_dict(), tmp_path / "weights")
    weights = {name: each.clone().to(dtype) for name, each in model.state_dict().items()}
    places = {"0": "disk", "1": "cpu"}
    load_checkpoint_and_dispatch(model, tmp_path / "weights", places, dtype=dtype)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
    accelerator.backward(model(x).sum())
    optimizer.step()
    expected = model(x)
    accelerator.save_model(model, tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    for state in (stored, accelerator.get_state_dict(model)):
        assert torch.equal(state["0.weight"], weights["0.weight"])
        assert torch.equal(state["1.bias"], model[1].bias)
    accelerator.save_state(tmp_path / "state")
    with torch.no_grad():
        model[1].bias.zero_()
    accelerator.load_state(tmp_path / "state")
    assert model[0].weight.is_meta
    assert torch.equal(model(x), expected)
    accelerator.free_memory()
    save_weights({name: each + 1 for name, each in weights.items()}, tmp_path / "others")
    other = load_checkpoint_and_dispatch(_two_layers(), tmp_path / "others", places, dtype=dtype)
    before = other[1].bias.clone()
    accelerator.prepare(other, torch.optim.SGD(other[1].parameters(), lr=0.1))
    with pytest.raises(IncompatibleCheckpointError, match=r"has other values for '0\.\w+', which is offloaded"):
        accelerator.load_state(tmp_path / "state")
    assert torch.equal(other[1].bias, before)


def test_a_word_chooses_the_map(model: Net, expected: Tensor, tmp_path: Path):
    save_weights(model.state_dict(), tmp_path)
    load_checkpoint_and_dispatch(model, tmp_path, "auto")
    assert model.hf_device_map == {"": "cpu"}
    assert not has_offloaded_params(model.hidden)
    remove_hook_from_submodules(model)
    load_checkpoint_and_dispatch(
        model, tmp_path, "sequential", {"cpu": 400}, no_split_module_classes="Used", preload_module_classes=["Used"]
    )
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(model(IDS), expected)


@pytest.mark.parametrize("hook", [None, ModelHook()])
def test_other_weights_are_loaded_into_an_offloaded_model_without_its_hooks_only(tmp_path: Path, hook: Any):
    other = _two_layers()
    for name, each in (("first", _two_layers()), ("second", other)):
        save_weights(each.state_dict(), tmp_path / name)
    model = load_checkpoint_and_dispatch(_two_layers(), tmp_path / "first", "disk")
    if hook is not None:
        add_hook_to_module(model[0], hook, append=True)
    with pytest.raises(OffloadedModelError, match=r"Sequential is offloaded: .* and not those of the checkpoint; take"):
        load_checkpoint_in_model(model, tmp_path / "second", strict=True)
    with pytest.raises(OffloadedModelError, match="and not those of the checkpoint"):
        load_checkpoint_and_dispatch(model, tmp_path / "second", "cpu")
    remove_hook_from_submodules(model)
    load_checkpoint_and_dispatch(model, tmp_path / "second", "cpu")
    assert torch.equal(model(torch.ones(1, 4)), other(torch.ones(1, 4)))


class _WithOwn(nn.Module):
    """Has parameters of its own beside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gain + self.bias


_OWN = {"0.gain": "disk", "0.bias": "cpu", "0.layer": "disk", "1": "disk"}


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (_OWN, {**_OWN, "0.gain": "cpu"}),
        ({"": "disk", "0.layer.bias": "cpu"}, {"": "disk"}),
        ({"0.layer.weight": "disk", **_OWN, "0.layer": "cpu"}, {**_OWN, "0.gain": "cpu", "0.layer": "cpu"}),
        ("sequential", {"0.gain": "cpu", "0.bias": "cpu", "0.layer": "disk", "1": "disk"}),
    ],
)
def test_a_tensor_is_offloaded_with_its_module_only(tmp_path: Path, given: Any, used: dict[str, str]):
    torch.manual_seed(0)
    model, x = nn.Sequential(_WithOwn(), _WithOwn()), torch.ones(1, 4)
    expected = model(x).detach()
    save_weights(model.state_dict(), tmp_path)
    with init_empty_weights():
        empty = nn.Sequential(_WithOwn(), _WithOwn())
    load_checkpoint_and_dispatch(empty, tmp_path, given, max_memory={"cpu": 100})
    assert empty.hf_device_map == used
    assert torch.equal(empty(x), expected)
    if given != "sequential":
        dispatch_model(model, given, offload_dir=tmp_path / "copies")
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("to_disk", [False, True])
def test_buffers_that_have_stayed_keep_their_values_when_the_hooks_come_off(tmp_path: Path, to_disk: bool):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    if to_disk:
        disk_offload(model, tmp_path)
    else:
        cpu_offload(model)
    model(torch.rand(8, 4) + 3)
    mean = model[1].running_mean.clone()
    remove_hook_from_submodules(model)
    assert torch.equal(model[1].running_mean, mean)
    assert model[1].num_batches_tracked == 1
    assert not model[1].weight.is_meta


@pytest.mark.parametrize("to_disk", [False, True])
def test_an_offloaded_model_does_not_move(tmp_path: Path, to_disk: bool):
    model = disk_offload(_two_layers(), tmp_path) if to_disk else cpu_offload(_two_layers())
    for _ in range(2):
        with pytest.raises(OffloadedModelError, match="load it again with another device_map, or take the hooks off"):
            model.to("cpu")
        add_hook_to_module(model, ModelHook(), append=True)
    remove_hook_from_submodules(model)
    assert model.to("cpu") is model


@pytest.mark.parametrize("places", [{"": "cpu"}, {"": "disk"}, "sequential"])
def test_an_encoder_and_decoder_that_is_dispatched_generates(tmp_path: Path, places: Any):
    config = T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    torch.manual_seed(0)
    model, ids = T5ForConditionalGeneration(config).eval(), torch.tensor([[3, 4, 5]])
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    Accelerator(cpu=True).save_model(model, tmp_path)
    with init_empty_weights():
        empty = T5ForConditionalGeneration(config).eval()
    empty.tie_weights()
    load_checkpoint_and_dispatch(
        empty, tmp_path, places, max_memory={"cpu": 30_000}, no_split_module_classes=model._no_split_modules
    )
    if places == "sequential":
        assert set(empty.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(empty.generate(ids, max_new_tokens=4, do_sample=False), expected)


def test_weights_are_verified_if_asked(tmp_path: Path):
    model = nn.Linear(4, 4)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"verify=True: there is no manifest.json"):
        load_checkpoint_and_dispatch(model, tmp_path, "disk", verify=True)
    text = Manifest(world_size=1, files={"model.safetensors": hash_file(tmp_path / "model.safetensors")}).encode()
    (tmp_path / MANIFEST_NAME).write_bytes(text)
    (tmp_path / MARKER_NAME).write_bytes(Manifest.digest(text))
    load_checkpoint_and_dispatch(nn.Linear(4, 4), tmp_path, "disk", verify=True)
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        load_checkpoint_and_dispatch(nn.Linear(4, 4), tmp_path, "disk", verify=True)


def test_a_module_is_aligned_for_a_while(model: Net):
    cpu_offload(model)
    with align_module_device(model.hidden):
        assert model.hidden.weight.device.type == "cpu"
        assert model.used.inner.weight.is_meta
    assert model.hidden.weight.is_meta
    found = get_state_dict_from_offload(model.hidden, "hidden.weight", {"hidden.weight": ""})
    assert found["hidden.weight"].shape == (4, 4)


def test_models_of_a_pipeline_take_turns(model: Net, expected: Tensor):
    first, hook = cpu_offload_with_hook(model)
    second, _ = cpu_offload_with_hook(nn.Linear(10, 2), prev_module_hook=hook)
    assert second(first(IDS)).shape == (3, 2)
    hook.offload()
    hook.remove()
    assert torch.equal(first(IDS), expected)


def peak_from_disk(folder: Path) -> tuple[float, bool]:
    """Run 64 MiB of layers from disk three times; return the MiB of memory that it took beyond the files."""

    def anonymous_mib() -> float:
        return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) / 1024

    x = torch.ones(1, 1024)
    layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
    save_weights(layers.state_dict(), folder)
    expected = layers(x).detach()
    with init_empty_weights():
        empty = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
    before, peaks = anonymous_mib(), []
    load_checkpoint_and_dispatch(empty, folder, {"": "disk"})
    for layer in empty:
        layer.register_forward_hook(lambda *_: peaks.append(anonymous_mib()))
    with torch.inference_mode():
        is_equal = all(torch.equal(empty(x), expected) for _ in range(3))
    assert len(peaks) == 48
    return max(peaks) - before, is_equal


def test_layers_from_disk_take_no_memory_of_their_own(tmp_path: Path):
    [(taken, is_equal)] = run_ranks(peak_from_disk, 1, tmp_path)
    assert is_equal
    assert taken < 12, f"{taken} MiB beside 64 MiB of mapped files"


@pytest.mark.parametrize("how", ["all on disk", "cpu and disk", "on the host"])
def test_a_wholly_offloaded_model_is_prepared_and_evaluated_by_a_trainer_where_it_is(how: str, tmp_path: Path):
    model, inputs = _two_layers(), torch.ones(1, 4)
    expected = model(inputs)
    save_weights(model.state_dict(), tmp_path)
    if how == "on the host":
        cpu_offload(model)
    else:
        places = {"": "disk"} if how == "all on disk" else {"0": "cpu", "1": "disk"}
        model = load_checkpoint_and_dispatch(model, tmp_path, places)
    accelerator = Accelerator(cpu=True)
    assert torch.equal(accelerator.prepare(model)(inputs), expected)
    trainer = Trainer(_WithLoss(model), TrainingArguments(str(tmp_path / "run"), use_cpu=True, report_to=[]))
    rows = [{"x": torch.ones(4), "labels": torch.zeros(2)}] * 2
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(expected.square().mean().item())


def test_a_trainer_saves_and_resumes_a_plain_model_with_offloaded_weights(tmp_path: Path):
    weights = _two_layers().state_dict()
    save_weights(weights, tmp_path)

    def trainer(max_steps: int) -> Trainer:
        model = load_checkpoint_and_dispatch(_two_layers(), tmp_path, {"0": "disk", "1": "cpu"})
        model[0].requires_grad_(False)
        args = TrainingArguments(str(tmp_path / "run"), use_cpu=True, report_to=[], max_steps=max_steps, save_steps=1)
        return Trainer(_WithLoss(model), args, train_dataset=[{"x": torch.ones(4), "labels": torch.zeros(2)}] * 4)

    trainer(1).train()
    resumed = trainer(2)
    resumed.train(resume_from_checkpoint=True)
    stored = load_file(tmp_path / "run" / "checkpoint-2" / "model.safetensors")
    assert torch.equal(stored["model.0.weight"], weights["0.weight"])
    assert torch.equal(stored["model.1.weight"], resumed.model.model[1].weight)


def _two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval()


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        found = self.model(x)
        return (found - labels).square().mean(), found


def test_a_dtype_is_that_of_what_the_files_lack_too_and_pages_are_not_copies(tmp_path: Path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval()
    save_weights({name: each for name, each in model.state_dict().items() if name.startswith("0.")}, tmp_path)
    report = load_checkpoint_in_model(model, tmp_path, dtype="bfloat16")
    assert report.missing_keys == ["1.weight", "1.bias"]
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    first = nn.Sequential(nn.Linear(4, 4))
    on_disk = load_checkpoint_and_dispatch(first, tmp_path, {"": "disk"}, dtype=torch.bfloat16)
    on_disk(torch.ones(1, 4, dtype=torch.bfloat16))
    assert on_disk[0]._hf_hook.pages() is None  # else the whole model would stay in memory, in copies
