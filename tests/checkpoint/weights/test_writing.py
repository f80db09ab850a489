"""Weights are written so that transformers and plain safetensors read them, and foreign indexes cannot lead outside."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accel_trainer.checkpoint.weights.weight_files import WeightFiles, parse_size, save_weights
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")

STATE = {f"layer.{index}": torch.full((10, 10), float(index)) for index in range(5)}


@pytest.mark.parametrize(
    ("text", "expected"), [("10GB", 10**10), ("5MiB", 5 * 2**20), (1000, 1000), ("1.5kb", 1500), ("7B", 7)]
)
def test_sizes_are_read_with_their_units(text: int | str, expected: int):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "ten GB", "5XB", "-1GB", "inf", "infGB", 0])
def test_a_size_that_is_none_is_refused(text: int | str):
    with pytest.raises(ConfigError, match="is not a positive number of bytes; write it like '10GB'"):
        parse_size(text)


def test_shards_hold_everything_once_and_the_index_says_where(tmp_path: Path):
    names = save_weights(STATE, tmp_path, max_shard_size="900B")
    assert len(names) == 3
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(STATE)
    assert index["metadata"]["total_size"] == 5 * 400
    loaded = WeightFiles(tmp_path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in STATE.items())


@pytest.mark.parametrize("name", ["a", "ab", "weight" * 9])
def test_the_data_of_a_file_is_aligned_as_torch_aligns_a_tensor(tmp_path: Path, name: str):
    # At other addresses kernels of MKL round otherwise: a mapped model would not compute what the saved one did.
    weights = {name: torch.randn(16, 16), f"{name}.bias": torch.randn(16)}
    save_weights(weights, tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    assert (8 + int.from_bytes(content[:8], "little")) % 64 == 0
    files = WeightFiles(tmp_path)
    assert [files[each].data_ptr() % 64 for each in weights] == [0, 0]
    assert all(torch.equal(value, weights[each]) for each, value in load_file(tmp_path / "model.safetensors").items())


def test_tied_tensors_are_kept_once(tmp_path: Path):
    shared = torch.ones(3)
    save_weights({"a": shared, "b": shared, "c": torch.ones(3)}, tmp_path)
    assert sorted(WeightFiles(tmp_path)) == ["a", "c"]


@pytest.mark.parametrize(
    ("file", "error", "message"),
    [
        ("../outside.safetensors", IncompatibleCheckpointError, "is not a plain file name"),
        ("/etc/passwd", IncompatibleCheckpointError, "is not a plain file name"),
        ("gone.safetensors", CheckpointNotFoundError, "which is missing"),
    ],
)
def test_an_index_cannot_lead_outside_or_to_nothing(tmp_path: Path, file: str, error: type, message: str):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(error, match=message):
        WeightFiles(tmp_path)


def test_r15_a_name_that_stands_twice_in_an_index_is_an_error(tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x", "a": "y"}}')
    with pytest.raises(IncompatibleCheckpointError, match=r"is not an index of weights .*key 'a' stands twice"):
        WeightFiles(tmp_path)


class Gathered:
    """A tensor that counts how often it is made, and breaks when told."""

    def __init__(self, value: float, calls: list[float], broken: bool = False) -> None:
        self.dtype, self.shape = torch.float32, (100,)
        self.value, self.calls, self.broken = value, calls, broken

    def __call__(self) -> torch.Tensor:
        self.calls.append(self.value)
        return torch.full((100,), self.value, dtype=torch.float64 if self.broken else torch.float32)


@pytest.mark.parametrize("safe", [True, False])
def test_every_rank_makes_lazy_tensors_in_one_order_and_tied_ones_once(tmp_path: Path, safe: bool):
    calls: list[float] = []
    shared = Gathered(1.0, calls)
    state = {"a": shared, "b": shared, "c": Gathered(2.0, calls), "d": Gathered(3.0, calls)}
    names = save_weights(state, tmp_path, "500B", safe_serialization=safe)
    assert len(names) == 3
    written = list(calls)
    calls.clear()
    assert save_weights(state, tmp_path / "elsewhere", "500B", safe_serialization=safe, writes=False) == names
    assert calls == written == [1.0, 2.0, 3.0]
    assert not (tmp_path / "elsewhere").exists()
    model_files = WeightFiles(tmp_path)
    assert set(model_files) == ({"a", "c", "d"} if safe else {"a", "b", "c", "d"})
    assert torch.equal(model_files["d"], torch.full((100,), 3.0))


def test_an_error_of_the_writer_keeps_it_in_step_and_the_older_weights_in_place(tmp_path: Path):
    save_weights({"old": torch.ones(2)}, tmp_path)
    calls: list[float] = []
    state = {"a": Gathered(1.0, calls, broken=True), "b": Gathered(2.0, calls), "c": Gathered(3.0, calls)}
    with pytest.raises(ConfigError, match=r"tensor 'a' was announced as torch\.float32"):
        save_weights(state, tmp_path, "500B")
    assert calls == [1.0, 2.0, 3.0]
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert list(WeightFiles(tmp_path)) == ["old"]


def wide(num_layers: int = 24) -> torch.nn.Sequential:
    """Return layers of 4 MiB each."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(num_layers)))


def save_sharded(folder: str, safe: bool) -> float:
    """Save a sharded model; return by how many MiB memory rose while it was written."""
    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=True, strategy="fsdp2")
    model = accelerator.prepare(wide())
    accelerator.save_model(model, Path(folder, "warm"))  # buffers of the process group stay
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is counted from here
    before = memory_mib("VmRSS")
    accelerator.save_model(model, Path(folder, "weights"), "20MB", safe_serialization=safe)
    return memory_mib("VmHWM") - before


def memory_mib(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) / 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads memory from Linux's /proc")
@pytest.mark.parametrize("safe", [True, False])
def test_no_rank_holds_a_sharded_model_to_save_it(tmp_path: Path, safe: bool):
    rises = run_ranks(save_sharded, 2, str(tmp_path), safe)
    # 96 MiB in all, 4 a tensor; torch's own format holds one shard of 20 MB.
    assert max(rises) < (48 if safe else 64)
    assert len(set(WeightFiles(tmp_path / "weights")._files.values())) == 6
    expected = wide().state_dict()
    loaded = WeightFiles(tmp_path / "weights")
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def save_pretrained(folder: str) -> list[str]:
    """Save as scripts written for Hugging Face accelerate do; return what lies in the directory afterwards."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from accel_trainer import Accelerator

    torch.manual_seed(0)
    options = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=32, **options))
    accelerator = Accelerator(cpu=True, strategy="fsdp2")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model = accelerator.prepare(model)
    accelerator.unwrap_model(model).save_pretrained(
        folder,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    return sorted(path.name for path in Path(folder).iterdir())


def test_save_pretrained_takes_our_save_and_our_state(tmp_path: Path):
    for names in run_ranks(save_pretrained, 2, str(tmp_path)):
        assert names == ["config.json", "generation_config.json", "model.safetensors"]


class Killed(BaseException):
    """No handler of the code under test takes it for an error of the disk."""


def read_weights(directory: Path, order: list[str]) -> dict[str, torch.Tensor]:
    """Read what a loader reads that looks for `order`; plain reading, without our readers."""
    found = next(name for name in order if (directory / name).is_file())
    files = [found]
    if found.endswith("index.json"):
        weight_map = json.loads((directory / found).read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
    read = {}
    for name in files:
        path = directory / name
        read.update(load_file(path) if path.suffix == ".safetensors" else torch.load(path))
    return read


ORDERS = {
    "safetensors": ["model.safetensors", "model.safetensors.index.json"],
    "bin": ["pytorch_model.bin", "pytorch_model.bin.index.json"],
}


SAME, OTHER = ("safetensors", "safetensors"), ("safetensors", "bin")


@pytest.mark.parametrize(
    ("sizes", "kinds", "can_link"),
    [
        (("1MB", "1MB"), SAME, True),
        (("1MB", "900B"), SAME, True),
        (("900B", "1MB"), SAME, True),
        (("900B", "900B"), SAME, True),
        (("500B", "900B"), SAME, True),
        (("900B", "900B"), SAME, False),
        (("900B", "900B"), ("bin", "bin"), True),
        (("1MB", "900B"), OTHER, True),
        (("900B", "1MB"), OTHER, True),
    ],
)
def test_a_kill_leaves_the_old_weights_or_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[str, str], kinds: tuple[str, str], can_link: bool
):
    states = [{name: torch.full((10, 10), float(value + 1)) for name in "abcde"} for value in (0, 1)]
    left = [0]

    def counted(function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            if function is system["link"] and not can_link:
                raise OSError(errno.EPERM, "no links here")
            function(*args, **kwargs)

        return call

    system = {name: getattr(os, name) for name in ("replace", "rename", "link", "unlink")}
    outcomes = set()
    for survived in range(100):
        directory = tmp_path / str(survived)
        for name, function in system.items():
            monkeypatch.setattr(os, name, function)
        save_weights(states[0], directory, sizes[0], safe_serialization=kinds[0] == "safetensors")
        for name, function in system.items():
            monkeypatch.setattr(os, name, counted(function))
        left[0], was_killed = survived, False
        try:
            save_weights(states[1], directory, sizes[1], safe_serialization=kinds[1] == "safetensors")
        except Killed:
            was_killed = True
        every = [name for kind in ("safetensors", "bin") for name in ORDERS[kind]]
        reversed_every = [name for kind in ("safetensors", "bin") for name in reversed(ORDERS[kind])]
        for order in (every, reversed_every):
            try:
                read = read_weights(directory, order)
            except StopIteration:
                assert (can_link, was_killed) == (False, True)
                continue
            values = {float(tensor[0, 0]) for tensor in read.values()}
            assert read.keys() == states[0].keys()
            assert len(values) == 1
            outcomes |= values
        if not was_killed:
            break
    assert outcomes == {1.0, 2.0}
    monkeypatch.undo()
    kept = {path.name for path in directory.iterdir()}
    fresh = save_weights(states[1], tmp_path / "fresh", sizes[1], safe_serialization=kinds[1] == "safetensors")
    assert kept == {path.name for path in (tmp_path / "fresh").iterdir()}
    assert kept >= set(fresh)
