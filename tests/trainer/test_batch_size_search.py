"""auto_find_batch_size goes down by a tenth until memory suffices, and needs no accelerate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel_trainer.errors import ConfigError
from accel_trainer.trainer.batch_size_search import find_executable_batch_size, is_out_of_memory
from tests.trainer_jobs import build_trainer, summary


def out_of_memory_above(limit: int, tried: list[int]) -> Any:
    def run(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return batch_size

    return run


def test_sizes_are_nine_tenths_of_the_one_before():
    tried: list[int] = []

    assert find_executable_batch_size(out_of_memory_above(51, tried), 64) == 51
    assert tried == [64, 57, 51]


def test_nothing_fits():
    with pytest.raises(ConfigError, match=r"went down from 3 to a batch size of 1, and memory still ran out"):
        find_executable_batch_size(out_of_memory_above(0, []), 3)


def test_other_errors_end_the_search():
    def run(batch_size: int) -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match=r"shapes differ"):
        find_executable_batch_size(run, 8)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


def limited(trainer: Any, limit: int) -> None:
    """Let the trainer's steps run out of memory with more than `limit` rows."""
    step = trainer.training_step

    def training_step(model: Any, inputs: Any, num_items: Any = None) -> Any:
        if len(inputs["input_ids"]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return step(model, inputs, num_items)

    trainer.training_step = training_step


def test_training_starts_again_with_a_batch_that_fits(tmp_path):
    trainer = build_trainer(
        tmp_path, auto_find_batch_size=True, per_device_train_batch_size=16, samples=28, save_strategy="epoch"
    )
    limited(trainer, 14)

    trainer.train()

    reference = build_trainer(tmp_path / "reference", per_device_train_batch_size=14, samples=28)
    reference.train()
    assert trainer.state.train_batch_size == 14
    assert summary(trainer)["losses"] == summary(reference)["losses"]
    assert trainer.args.auto_find_batch_size is True
    assert trainer.args.per_device_train_batch_size == 16


def test_resuming_begins_with_the_size_that_was_found(tmp_path):
    options: dict[str, Any] = {"auto_find_batch_size": True, "per_device_train_batch_size": 16, "samples": 28}
    first = build_trainer(tmp_path, save_strategy="steps", save_steps=1, **options)
    limited(first, 14)
    first.train()

    second = build_trainer(tmp_path / "again", **options)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

    assert second.state.train_batch_size == 14
    assert summary(second)["losses"] == summary(first)["losses"]


def test_memory_that_runs_out_in_evaluation_is_not_answered_with_a_smaller_training_batch(tmp_path):
    trainer = build_trainer(tmp_path, auto_find_batch_size=True, eval_strategy="epoch")

    def evaluate(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    trainer.evaluate = evaluate

    with pytest.raises(RuntimeError, match=r"Evaluation hit an out-of-memory error.*per_device_eval_batch_size"):
        trainer.train()
    assert trainer._train_batch_size == 4
