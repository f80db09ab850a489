"""Weights are found, matched and put into models: whole, sharded, without memory, on every rank."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_trainer.checkpoint.weights.into_model import LoadReport, exchange_device, load_checkpoint_in_model
from accel_trainer.checkpoint.weights.weight_files import WeightFiles, save_weights
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")


class Tied(nn.Module):
    """Two names for one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)
        self.outer = nn.Linear(4, 4)
        self.outer.weight = self.inner.weight
        self.register_buffer("scale", torch.ones(2))


def build(seed: int = 0) -> nn.Sequential:
    """Return two layers; the same values for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def equal(model: nn.Module, expected: nn.Module) -> bool:
    state = model.state_dict()
    return all(torch.equal(state[name], tensor) for name, tensor in expected.state_dict().items())


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["10GB", "150B"])
def test_every_layout_of_files_is_loaded(tmp_path: Path, safe: bool, size: str):
    names = save_weights(build(1).state_dict(), tmp_path, size, safe_serialization=safe)
    assert len(names) == (1 if size == "10GB" else 2)
    model = build(2)
    identities = [id(p) for p in model.parameters()]
    assert load_checkpoint_in_model(model, tmp_path) == LoadReport([], [], [])
    assert equal(model, build(1))
    assert [id(p) for p in model.parameters()] == identities


def test_a_compiled_model_is_loaded_under_the_users_names(tmp_path: Path):
    save_weights(build(1).state_dict(), tmp_path)
    model = torch.compile(build(2), backend="eager")
    assert load_checkpoint_in_model(model, tmp_path, strict=True) == LoadReport([], [], [])
    assert equal(model._orig_mod, build(1))


def test_an_index_or_a_single_file_may_be_named(tmp_path: Path):
    save_weights(build(1).state_dict(), tmp_path / "parts", "150B")
    torch.save(build(3).state_dict(), tmp_path / "own_name.pt")
    model = build(2)
    load_checkpoint_in_model(model, tmp_path / "parts" / "model.safetensors.index.json")
    assert equal(model, build(1))
    load_checkpoint_in_model(model, str(tmp_path / "own_name.pt"))
    assert equal(model, build(3))


def test_d24_a_stale_single_file_never_wins_over_newer_shards(tmp_path: Path):
    save_weights(build(1).state_dict(), tmp_path)
    stale = (tmp_path / "model.safetensors").read_bytes()
    save_weights(build(2).state_dict(), tmp_path, "150B")
    # Of another program:
    (tmp_path / "model.safetensors").write_bytes(stale)
    model = build(3)
    load_checkpoint_in_model(model, tmp_path)
    assert equal(model, build(2))


def test_shards_of_torchs_own_files_keep_every_name_of_a_tied_tensor(tmp_path: Path):
    save_weights(Tied().state_dict(), tmp_path, "70B", safe_serialization=False)
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    assert set(index["weight_map"]) == set(Tied().state_dict())
    assert index["metadata"]["total_size"] == 64 + 16 + 8


def test_d25_names_that_differ_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    state = build(1).state_dict()
    state["2.weight"] = state.pop("1.bias")
    save_weights(state, tmp_path)
    model = build(2)
    before = model[1].bias.detach().clone()
    with caplog.at_level(logging.WARNING):
        report = load_checkpoint_in_model(model, tmp_path)
    assert report == LoadReport(["1.bias"], ["2.weight"], [])
    assert "it lacks '1.bias' and has '2.weight', which were not used when it was loaded" in caplog.text
    assert torch.equal(model[1].bias, before)
    with pytest.raises(IncompatibleCheckpointError, match=r"it lacks '1.bias'.*load with strict=False"):
        load_checkpoint_in_model(build(3), tmp_path, strict=True)


def test_shapes_that_differ_leave_the_model_as_it_was(tmp_path: Path):
    state = build(1).state_dict()
    state["1.bias"] = torch.zeros(3)
    save_weights(state, tmp_path)
    model = build(2)
    with pytest.raises(IncompatibleCheckpointError, match=r"1\.bias is \(3,\) in the file and \(2,\) in the model"):
        load_checkpoint_in_model(model, tmp_path)
    assert equal(model, build(2))


@pytest.mark.parametrize("safe", [True, False])
def test_a_model_without_memory_gets_it_and_stays_tied(tmp_path: Path, safe: bool):
    torch.manual_seed(1)
    saved = Tied()
    save_weights(saved.state_dict(), tmp_path, safe_serialization=safe)
    with torch.device("meta"):
        model = Tied()
    model.inner.weight.requires_grad_(False)
    report = load_checkpoint_in_model(model, tmp_path, device_map={"": torch.device("cpu")}, dtype=torch.bfloat16)
    assert report == LoadReport([], [], [])
    assert model.outer.weight is model.inner.weight
    assert not model.inner.weight.requires_grad
    assert {t.dtype for t in model.state_dict().values()} == {torch.bfloat16}
    assert torch.equal(model.inner.weight, saved.inner.weight.bfloat16())
    assert not isinstance(model.scale, nn.Parameter)


def test_tensors_left_without_values_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save_weights({"0.weight": torch.zeros(8, 4)}, tmp_path)
    with torch.device("meta"):
        model = build()
    with caplog.at_level(logging.WARNING):
        report = load_checkpoint_in_model(model, tmp_path)
    assert report.missing_keys == ["0.bias", "1.weight", "1.bias"]
    assert "3 tensor(s) are left on the meta device, without values: '0.bias'" in caplog.text


def test_a_device_map_goes_by_the_longest_name_that_fits(tmp_path: Path):
    save_weights(build(1).state_dict(), tmp_path)
    with torch.device("meta"):
        model = build()
    load_checkpoint_in_model(model, tmp_path, device_map={"": "meta", "1": "cpu"})
    assert [p.device.type for p in model.parameters()] == ["meta", "meta", "cpu", "cpu"]


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ("auto", "device_map='auto' is no mapping"),
        ({"0": "cpu"}, "says nothing about '1.weight'"),
        ({"": "disc"}, "has 'disc' for '0.weight'; expected a device"),
        ({"": "disk"}, "nothing says where dispatch_model() will find them; give offload_folder"),
    ],
)
def test_a_device_map_that_says_nothing_usable_is_an_error(tmp_path: Path, device_map: Any, message: str):
    save_weights(build(1).state_dict(), tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_checkpoint_in_model(build(), tmp_path, device_map=device_map)


def test_a_directory_without_weights_says_what_was_expected(tmp_path: Path):
    with pytest.raises(
        CheckpointNotFoundError, match=r"no weights in .*: expected one of model\.safetensors\.index\.json, model\.saf"
    ):
        load_checkpoint_in_model(build(), tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match=r"accelerator\.load_state\(\) reads it"):
        load_checkpoint_in_model(build(), tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"no file .*gone; expected a directory or a file of weights"):
        load_checkpoint_in_model(build(), tmp_path / "gone")


class Code:
    """Something that is no tensor."""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("pytorch_model.bin", Code(), "holds more than tensors, numbers and strings, and loading it could run code"),
        ("pytorch_model.bin", {"epoch": 3}, "is not a mapping of names to tensors"),
        ("pytorch_model.bin", b"not a zip file", "cannot be read as weights"),
        ("model.safetensors", b"short", "cannot be read as weights"),
        ("model.safetensors.index.json", b"{}", "is not an index of weights"),
    ],
)
def test_a_file_that_holds_no_weights_is_an_error(tmp_path: Path, name: str, content: Any, message: str):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        torch.save(content, tmp_path / name)
    with pytest.raises(IncompatibleCheckpointError, match=message):
        load_checkpoint_in_model(build(), tmp_path)


def load_prepared(folder: str) -> list[tuple[LoadReport, bool]]:
    """Load whole weights into prepared models; return what did not match, and whether the values are there."""
    from accel_trainer import Accelerator

    found = []
    for strategy in ("ddp", "fsdp2"):
        accelerator = Accelerator(cpu=True, strategy=strategy)
        model = accelerator.prepare(build(2))
        report = load_checkpoint_in_model(model, folder, device_map={"": accelerator.device})
        state, expected = accelerator.get_state_dict(model), build(1).state_dict()
        found.append((report, all(torch.equal(tensor, expected[name]) for name, tensor in state.items())))
    return found


def test_prepared_models_are_loaded_on_every_rank(tmp_path: Path):
    save_weights(build(1).state_dict(), tmp_path, "150B")
    for found in run_ranks(load_prepared, 2, str(tmp_path)):
        assert found == [(LoadReport([], [], []), True)] * 2


def test_parts_of_any_form_are_read_into_any_memory(tmp_path: Path):
    values = {"a": torch.randn(6, 4, 3), "b": torch.arange(5), "c": torch.tensor(2.0), "d": torch.randn(0, 3)}
    save_weights(values, tmp_path)
    files = WeightFiles(tmp_path)
    whole = slice(0, 4), slice(0, 3)
    for name, index, dtype in (
        ("a", (slice(2, 5), *whole), torch.float32),
        ("a", (slice(2, 5), *whole), torch.bfloat16),
        ("a", (slice(0, 6), slice(1, 3), slice(0, 3)), torch.float32),
        ("b", (slice(4, 5),), torch.int64),
        ("c", (), torch.float32),
        ("d", (slice(0, 0), slice(0, 3)), torch.float32),
    ):
        expected = values[name][index].to(dtype)
        target = torch.full_like(expected, 7)
        files.fill(name, index, target)
        assert torch.equal(target, expected), (name, index)
    turned = torch.empty(3, 4, 6).permute(2, 1, 0)
    files.fill("a", (slice(0, 6), *whole), turned)
    assert torch.equal(turned, values["a"])


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(tmp_path: Path):
    save_weights({"a": torch.randn(64, 64)}, tmp_path)
    files = WeightFiles(tmp_path)
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(IncompatibleCheckpointError, match=r"model\.safetensors ends within 'a'; is it being written"):
        files.fill("a", (slice(0, 64), slice(0, 64)), torch.empty(64, 64))


@pytest.mark.parametrize(
    ("own", "backends", "expected"),
    [
        ("cuda:1", "cpu:gloo,cuda:nccl", "cuda:1"),
        ("cuda:1", "cuda:nccl", "cuda:1"),
        ("cuda:1", "cpu:gloo", "cpu"),
        ("cpu", "cpu:gloo,cuda:nccl", "cpu"),
        (None, "cpu:gloo", "cpu"),
    ],
)
def test_weights_are_broadcast_by_the_backend_of_the_ranks_own_device(own: str | None, backends: str, expected: str):
    assert exchange_device(None if own is None else torch.device(own), backends) == torch.device(expected)
