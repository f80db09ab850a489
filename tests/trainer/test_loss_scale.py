"""A model with `**kwargs` that returns its own mean is averaged, not multiplied, over ranks and micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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


def masked_eval_loss(output_dir: str, strategy: str, batch_size: int) -> float:
    """Evaluate a masked language model, whose loss is its own mean over the masked tokens, after one update."""
    import transformers

    from accel_trainer.trainer import Trainer
    from tests.trainer_jobs import TokenDataset, arguments, strategy_arguments

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    args = arguments(
        output_dir,
        max_steps=1,
        learning_rate=0.0,
        per_device_eval_batch_size=batch_size,
        **strategy_arguments(strategy),
    )
    data = TokenDataset(11, kind="lm", uneven=True)
    trainer = Trainer(transformers.BertForMaskedLM(config), args, train_dataset=data, eval_dataset=data)
    trainer.train()
    return trainer.evaluate()["eval_loss"]


@pytest.mark.multirank
def test_the_eval_loss_of_a_masked_model_is_the_token_mean_whatever_the_batches(tmp_path):
    exact = masked_eval_loss(str(tmp_path), "single", 11)

    for strategy in ("single", "ddp", "fsdp"):
        losses = on_ranks(strategy, masked_eval_loss, str(tmp_path), batch_size=2)
        assert losses == pytest.approx([exact] * len(losses), rel=1e-5)
