"""What save_state and load_state refuse, name and keep; state goes through JSON and tensors and comes back the same."""

from __future__ import annotations

import json
import logging
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel_trainer import Accelerator, ProjectConfiguration
from accel_trainer.checkpoint.run_state import decode, encode
from accel_trainer.errors import (
    CheckpointNotFoundError,
    ConfigError,
    DiskFullError,
    IncompatibleCheckpointError,
    ProcessGroupError,
)
from tests.checkpoint.small_run import Counter
from tests.fault_injection import fault_env
from tests.ranks import run_ranks


def prepared(**arguments: Any) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    accelerator = Accelerator(cpu=True, **arguments)
    model = nn.Linear(3, 1)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def step(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    optimizer.zero_grad()


def test_an_object_without_a_state_is_refused():
    with pytest.raises(ConfigError, match=r"Item at index 1 \(object\) cannot be registered .*give it state_dict"):
        Accelerator(cpu=True).register_for_checkpointing(Counter(), object())


def test_the_checkpoint_holds_no_pickle(tmp_path: Path):
    accelerator, model, optimizer = prepared()
    step(accelerator, model, optimizer)
    accelerator.save_state(tmp_path / "s")
    names = {path.name for path in (tmp_path / "s").iterdir()} - {"COMMITTED"}
    assert {Path(name).suffix for name in names} == {".json", ".safetensors"}


def test_automatic_naming_counts_on_after_a_load_and_keeps_the_newest(tmp_path: Path):
    configuration = ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    accelerator, *_ = prepared(project_config=configuration)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "notes.txt").write_text("a stray file")
    assert [accelerator.save_state().name for _ in range(3)] == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    again = ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    resumed, *_ = prepared(project_config=again)
    resumed.load_state()
    assert resumed.save_state().name == "checkpoint_3"
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name != "_lock")
    assert kept == ["checkpoint_2", "checkpoint_3", "notes.txt"]


def test_a_limit_that_keeps_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"total_limit=0\): keep 1 or more"):
        ProjectConfiguration(total_limit=0)


def test_an_explicit_directory_is_honoured_beside_automatic_naming(tmp_path: Path):
    configuration = ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True)
    accelerator, *_ = prepared(project_config=configuration)
    assert accelerator.save_state(tmp_path / "mine") == tmp_path / "mine"
    assert not (tmp_path / "checkpoints").exists()


def test_an_explicit_directory_is_not_copied_to_a_store_and_a_warning_says_so(tmp_path: Path, caplog: Any):
    accelerator, *_ = prepared(config={"checkpoint_uri": f"file://{tmp_path}/store"})
    logging.getLogger("accel_trainer").addHandler(caplog.handler)
    accelerator.save_state(tmp_path / "checkpoint_6")
    logging.getLogger("accel_trainer").removeHandler(caplog.handler)
    accelerator.end_training()
    assert not (tmp_path / "store").exists()
    assert any("checkpoint_uri is set, and save_state(directory) copies nothing there" in m for m in caplog.messages)


def test_without_any_directory_saving_says_what_to_give():
    with pytest.raises(ConfigError, match=r"without a directory; pass output_dir, or turn on"):
        prepared()[0].save_state()
    with pytest.raises(ConfigError, match=r"without a directory; pass one"):
        prepared()[0].load_state()


def test_a_directory_without_a_checkpoint_has_nothing_to_load(tmp_path: Path):
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint_N in .*checkpoints"):
        prepared(project_dir=tmp_path)[0].load_state()
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint in .*manifest.json is missing"):
        prepared()[0].load_state(tmp_path)


@pytest.mark.parametrize(
    ("model", "trained", "message"),
    [
        (nn.Linear(4, 1), 2, r"weight is \(1, 3\) in the checkpoint and \(1, 4\)"),
        (nn.Sequential(nn.Linear(3, 1)), 2, r"missing in the checkpoint: '0\.weight', '0\.bias'; not in"),
        (nn.Linear(3, 1), 1, r"not in this optimizer: 'bias'\. Build the"),
    ],
    ids=["another shape", "other names", "other optimizer groups"],
)
def test_what_does_not_fit_is_told_and_loads_nothing(tmp_path: Path, model: nn.Module, trained: int, message: str):
    accelerator, *saved = prepared()
    step(accelerator, *saved)
    accelerator.save_state(tmp_path / "s")
    other = Accelerator(cpu=True)
    other.prepare(model, torch.optim.AdamW(list(model.parameters())[:trained]))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(IncompatibleCheckpointError, match=message):
        other.load_state(tmp_path / "s")
    assert all(map(torch.equal, model.parameters(), before))


def test_a_missing_registered_object_is_an_error(tmp_path: Path):
    accelerator, *_ = prepared()
    accelerator.save_state(tmp_path / "s")
    accelerator.register_for_checkpointing(Counter())
    with pytest.raises(IncompatibleCheckpointError, match=r"registered and not in it: 'Counter'\. Register"):
        accelerator.load_state(tmp_path / "s")


class Gathered:
    """An object whose state is the same on all ranks once they have gathered it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {name: parameter.full_tensor() for name, parameter in self.model.named_parameters()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take."""


def save_what_is_gathered(directory: Path, within_a_window: bool) -> str:
    accelerator, model, _ = prepared(strategy="fsdp2", gradient_accumulation_steps=2)
    if within_a_window:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 3)).sum())
    else:
        accelerator.register_for_checkpointing(Gathered(model))
    try:
        accelerator.save_state(directory)
    except (DiskFullError, ProcessGroupError) as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_an_object_that_gathers_is_not_asked_once_a_rank_has_failed(tmp_path: Path):
    env = fault_env("enospc@save.mid_shard:rank=1")
    told = run_ranks(save_what_is_gathered, 2, tmp_path / "s", False, env=env)
    assert told[0].startswith("RemoteRankError: rank 1 failed in save of the state: accel_trainer.errors.DiskFullError")
    assert told[1].startswith("DiskFullError: ")
    assert list(tmp_path.iterdir()) == []


def test_gradients_of_a_window_are_gathered_before_a_rank_may_fail(tmp_path: Path):
    # Pass 0 writes the model's part, pass 1 the random streams: there is no optimizer state before the first step.
    env = fault_env("enospc@save.mid_shard:rank=1:step=1")
    told = run_ranks(save_what_is_gathered, 2, tmp_path / "s", True, env=env)
    assert told[0].startswith("RemoteRankError: rank 1 failed in save of the state: accel_trainer.errors.DiskFull")
    assert "random_1" in told[0]


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NESTED = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.frozensets(st.integers()).map(set)
    ),
    max_leaves=12,
)


def round_trip(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    return decode(json.loads(json.dumps(encode(value, tensors))), tensors)


@given(NESTED)
def test_plain_structures_come_back_equal_and_of_the_same_classes(value: Any):
    restored = round_trip(value)
    assert restored == value
    assert type(restored) is type(value)


def test_tensors_arrays_and_nan_come_back():
    value = {"t": [torch.arange(3), (torch.tensor(1.5),)], "a": np.arange(2), "n": float("nan"), "s": np.float32(2)}
    value |= {"of no axis": np.array(3.0)}
    restored = round_trip(value)
    assert torch.equal(restored["t"][0], torch.arange(3))
    assert restored["t"][1][0] == 1.5
    assert isinstance(restored["a"], np.ndarray)
    assert restored["n"] != restored["n"]
    assert restored["s"] == 2.0
    assert restored["of no axis"].shape == ()


def test_an_optimizer_state_comes_back():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    restored = round_trip(optimizer.state_dict())
    assert restored["param_groups"] == optimizer.state_dict()["param_groups"]
    assert torch.equal(restored["state"][0]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_something_else_is_refused_with_its_place():
    with pytest.raises(ConfigError, match=r"state\.a\.0 is a random\.Random, which a checkpoint cannot hold"):
        encode({"a": [random.Random(0)]}, {})
    for value, what in (
        (np.array(["a"]), r"numpy\.ndarray of <U1"),
        (torch.eye(2).to_sparse(), "Tensor of torch.sparse"),
    ):
        with pytest.raises(ConfigError, match=rf"state\.words is a .*{what}.*, which a checkpoint cannot hold"):
            encode({"words": value}, {})
    assert round_trip({None, 1, "a"}) == {None, 1, "a"}


def test_mapping_subclasses_come_back_as_dicts():
    assert round_trip(defaultdict(list, a=[1])) == {"a": [1]}


def test_a_missing_tensor_is_named():
    with pytest.raises(IncompatibleCheckpointError, match=r"'state\.x' is named in the JSON and missing"):
        decode({"$tensor": "state.x"}, {})
