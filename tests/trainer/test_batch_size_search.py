"""auto_find_batch_size goes down by a tenth until memory suffices, and needs no accelerate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel_trainer.errors import ConfigError
from tests.trainer_jobs import build_trainer, summary


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


def test_memory_that_suffices_for_no_batch_is_an_error(tmp_path):
    trainer = build_trainer(tmp_path, auto_find_batch_size=True, per_device_train_batch_size=3)
    limited(trainer, 0)

    with pytest.raises(ConfigError, match=r"none from 3 down to 1 lets auto_find_batch_size\(\) run"):
        trainer.train()


def test_other_errors_end_the_search(tmp_path):
    trainer = build_trainer(tmp_path, auto_find_batch_size=True)
    tried = []

    def training_step(model: Any, inputs: Any, num_items: Any = None) -> Any:
        tried.append(len(inputs["input_ids"]))
        raise RuntimeError("shapes differ")

    trainer.training_step = training_step
    with pytest.raises(RuntimeError, match=r"shapes differ"):
        trainer.train()
    assert tried == [4]


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
