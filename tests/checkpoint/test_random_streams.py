"""Random streams come back to the ranks that had them; on another number of ranks new ones follow from them (R8)."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_trainer import Accelerator, set_seed
from accel_trainer.errors import CorruptCheckpointError
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")


def save(folder: str) -> list[float]:
    accelerator = Accelerator(cpu=True)
    set_seed(3)
    accelerator.prepare(nn.Linear(1, 1))
    torch.rand(5)
    accelerator.save_state(folder)
    return torch.rand(3).tolist()


def load(folder: str, seed: int) -> tuple[list[float], list[str]]:
    accelerator = Accelerator(cpu=True)
    set_seed(seed)
    accelerator.prepare(nn.Linear(1, 1))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("accel_trainer")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    accelerator.load_state(folder)
    return torch.rand(3).tolist(), [line for line in said if "random streams" in line]


def test_r8_as_many_ranks_go_on_with_their_own_streams(tmp_path: Path):
    drawn = run_ranks(save, 2, str(tmp_path / "s"))
    assert drawn[0] != drawn[1]
    assert [found for found, _ in run_ranks(load, 2, str(tmp_path / "s"), 9)] == drawn


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), (1, 2)])
def test_r8_another_number_of_ranks_gets_new_streams_that_follow_from_the_saved_ones(
    tmp_path: Path, saved_by: int, loaded_by: int
):
    drawn = run_ranks(save, saved_by, str(tmp_path / "s"))
    first = run_ranks(load, loaded_by, str(tmp_path / "s"), 9)
    again = run_ranks(load, loaded_by, str(tmp_path / "s"), 10)
    streams = [found for found, _ in first]
    assert streams == [found for found, _ in again], "whatever this run was seeded with"
    assert all(stream not in drawn for stream in streams)
    assert len({tuple(stream) for stream in streams}) == loaded_by
    said = first[0][1]
    assert len(said) == 1
    assert f"saved by {saved_by} process(es) and loaded by {loaded_by}: random streams new, from those saved" in said[0]


def test_r8_a_changed_stream_is_an_error(tmp_path: Path):
    run_ranks(save, 1, str(tmp_path / "s"))
    path = tmp_path / "s" / "random_0.json"
    path.write_text(path.read_text().replace("1", "2", 1))
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(CorruptCheckpointError, match=r"random_0\.json"):
        accelerator.load_state(tmp_path / "s")
