"""Rows of several ranks come back in sample order, whatever their shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from accel_trainer.errors import ConfigError
from accel_trainer.runtime import uneven_gather
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.uneven_gather import gather_steps
from accel_trainer.trainer.evaluation import to_numpy
from tests.ranks import run_ranks
from tests.trainer_jobs import build_trainer

ALONE = ProcessContext(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"), backend=None)


def test_steps_of_different_widths_are_padded():
    joined = gather_steps([torch.ones(2, 3), torch.ones(1, 5)], ALONE)

    assert joined.shape == (3, 5)
    assert joined[0].tolist() == [1, 1, 1, -100, -100]


def test_structures_are_joined_leaf_by_leaf():
    step = {"a": torch.ones(2), "b": (torch.zeros(2, 1), torch.tensor(1.0))}

    joined = gather_steps([step, step], ALONE)

    assert joined["a"].shape == (4,)
    assert joined["b"][0].shape == (4, 1)
    assert joined["b"][1].tolist() == [1.0, 1.0]


def test_different_numbers_of_dimensions_are_refused():
    with pytest.raises(ConfigError, match=r"dimensions in different batches"):
        gather_steps([torch.ones(2, 3), torch.ones(2)], ALONE)


def test_other_leaves_are_refused():
    with pytest.raises(ConfigError, match=r"returned a str among its predictions.*ignore_keys"):
        gather_steps([(torch.ones(2), "text")], ALONE)


def test_bfloat16_becomes_float32():
    assert to_numpy(torch.ones(2, dtype=torch.bfloat16)).dtype == np.float32


class CountSteps(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.num_steps = 0

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        self.num_steps += 1


def test_callbacks_hear_every_step(tmp_path):
    count = CountSteps()

    build_trainer(tmp_path, per_device_eval_batch_size=4, options={"callbacks": [count]}).evaluate()

    assert count.num_steps == 3


CASES = [(dtype, size) for dtype in (torch.float32, torch.int64, torch.bfloat16) for size in (1, 2**20)]


def gather_ragged(accelerator: Any, dtype: torch.dtype, piece_bytes: int) -> Any:
    """Rank r has r + 1 rows of width r + 2 in each of 3 steps, and rank 1 lacks the last step."""
    uneven_gather._PIECE_BYTES = piece_bytes
    rank = accelerator.process_index
    steps = [torch.full((rank + 1, rank + 2), 10 * step + rank).to(dtype) for step in range(3 if rank == 0 else 2)]
    return gather_steps(steps, accelerator.readers).float().numpy()


def gather_from_one(accelerator: Any) -> Any:
    steps = [{"a": torch.arange(3), "b": torch.ones(3, 2, dtype=torch.bool)}] if accelerator.is_main_process else []
    result = gather_steps(steps, accelerator.readers)
    return result["a"].tolist(), result["b"].shape, bool(result["b"].all())


def gather_all() -> Any:
    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=True)
    ragged = [gather_ragged(accelerator, dtype, piece_bytes) for dtype, piece_bytes in CASES]
    no_tensors = gather_steps([()] if accelerator.is_main_process else [], accelerator.readers)
    return ragged, gather_from_one(accelerator), no_tensors


@pytest.mark.multirank
def test_ranks_are_interleaved_step_by_step_and_one_without_steps_learns_the_structure():
    for ragged, from_one, no_tensors in run_ranks(gather_all, 2):
        assert len(ragged) == len(CASES)
        for result in ragged:
            assert result[:, 0].tolist() == [0, 1, 1, 10, 11, 11, 20]
            assert result[0].tolist() == [0, 0, -100]
            assert result[1].tolist() == [1, 1, 1]
        assert from_one == ([0, 1, 2], (3, 2), True)
        assert no_tensors == ()
