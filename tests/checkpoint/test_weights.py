"""Weights are written so that transformers and plain safetensors read them, and foreign indexes cannot lead outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from accel_trainer.checkpoint.weights import SafetensorsDirectory, parse_size, save_weights
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError

STATE = {f"layer.{index}": torch.full((10, 10), float(index)) for index in range(5)}


@pytest.mark.parametrize(
    ("text", "expected"), [("10GB", 10**10), ("5MiB", 5 * 2**20), (1000, 1000), ("1.5kb", 1500), ("7B", 7)]
)
def test_sizes_are_read_with_their_units(text: int | str, expected: int):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "ten GB", "5XB", "-1GB", 0])
def test_a_size_that_is_none_is_refused(text: int | str):
    with pytest.raises(ConfigError, match="is not a positive number of bytes; write it like '10GB'"):
        parse_size(text)


def test_shards_hold_everything_once_and_the_index_says_where(tmp_path: Path):
    names = save_weights(STATE, tmp_path, max_shard_size="900B")
    assert len(names) == 3
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(STATE)
    assert index["metadata"]["total_size"] == 5 * 400
    loaded = SafetensorsDirectory(tmp_path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in STATE.items())


def test_tied_tensors_are_kept_once(tmp_path: Path):
    shared = torch.ones(3)
    save_weights({"a": shared, "b": shared, "c": torch.ones(3)}, tmp_path)
    assert sorted(SafetensorsDirectory(tmp_path)) == ["a", "c"]


def test_no_weights_is_an_error_with_the_path(tmp_path: Path):
    with pytest.raises(CheckpointNotFoundError, match=r"no model\.safetensors and no"):
        SafetensorsDirectory(tmp_path)


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
        SafetensorsDirectory(tmp_path)
