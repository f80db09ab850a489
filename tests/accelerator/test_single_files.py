from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_trainer import Accelerator
from accel_trainer.accelerator.single_files import load, save
from accel_trainer.runtime.process import ProcessContext


def on_rank(rank: int, local_rank: int) -> ProcessContext:
    return ProcessContext(
        rank=rank, world_size=4, local_rank=local_rank, local_world_size=2, device=torch.device("cpu"), backend="gloo"
    )


@pytest.mark.parametrize("save_on_each_node", [False, True])
def test_one_rank_of_the_job_or_of_each_node_writes(save_on_each_node: bool, tmp_path: Path):
    for rank in range(4):
        save([rank], tmp_path / f"{rank}", save_on_each_node, process=on_rank(rank, rank % 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == (["0", "2"] if save_on_each_node else ["0"])
    assert load(tmp_path / "0") == [0]


def test_tied_tensors_are_written_once_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    layer = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": layer, "b": layer})
    Accelerator(cpu=True).save(model.state_dict(), tmp_path / "model.safetensors", safe_serialization=True)
    assert "Removed shared tensor ['b.bias', 'b.weight']" in caplog.text
    assert sorted(load_file(tmp_path / "model.safetensors")) == ["a.bias", "a.weight"]


def test_plain_data_and_arrays_are_read_and_code_is_not(tmp_path: Path):
    state = OrderedDict(step=3, array=np.arange(3, dtype=np.uint32), tensor=torch.ones(2))
    Accelerator(cpu=True).save(state, tmp_path / "state.bin")
    loaded = load(tmp_path / "state.bin", map_location="cpu")
    assert loaded["step"] == 3
    assert loaded["array"].tolist() == [0, 1, 2]
    buffer = io.BytesIO()
    torch.save(Path("code"), buffer)
    buffer.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="pathlib"):
        load(buffer)
