"""A model with `**kwargs` that returns its own mean is averaged, not multiplied, over ranks and micro-batches."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.test_training import GLOBAL_BATCH, assert_same_run, plain_loop
from tests.trainer_jobs import build_trainer, on_ranks, train


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_classifier_trains_alike_on_two_ranks_and_in_windows(tmp_path, strategy, accumulation):
    runs = on_ranks(
        strategy, train, tmp_path, model="bert", gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=GLOBAL_BATCH // 2 // accumulation,
    )  # fmt: skip

    assert_same_run(runs[0], plain_loop(model="bert"))
    assert runs[0]["train_loss"] == pytest.approx(np.mean(plain_loop(model="bert")["losses"]), rel=1e-4)


def test_accumulation_alone_averages_too(tmp_path):
    run = train(tmp_path, model="bert", gradient_accumulation_steps=4, per_device_train_batch_size=GLOBAL_BATCH // 4)

    assert_same_run(run, plain_loop(model="bert"))


@pytest.mark.parametrize(("model", "divides"), [("llama", True), ("bert", False)])
def test_the_model_is_asked_once_whether_it_divides_by_the_number_of_items(tmp_path, model, divides):
    trainer = build_trainer(tmp_path, model=model, gradient_accumulation_steps=2)
    trainer.train()

    assert trainer._loss_scale_is_settled
    assert trainer.model_accepts_loss_kwargs is divides
