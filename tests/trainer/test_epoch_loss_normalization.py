"""A model with `**kwargs` that returns its own mean is averaged, not multiplied, over ranks and micro-batches."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_ranks
from tests.trainer.test_training import GLOBAL_BATCH, assert_same_run, plain_loop
from tests.trainer_jobs import build_trainer, train


def test_accumulation_alone_averages_too(tmp_path):
    run = train(tmp_path, model="bert", gradient_accumulation_steps=4, per_device_train_batch_size=GLOBAL_BATCH // 4)

    assert_same_run(run, plain_loop(model="bert"))


@pytest.mark.parametrize(("model", "divides"), [("llama", True), ("bert", False)])
def test_the_model_is_asked_once_whether_it_divides_by_the_number_of_items(tmp_path, model, divides):
    trainer = build_trainer(tmp_path, model=model, gradient_accumulation_steps=2)
    trainer.train()

    assert trainer._loss_normalization.is_known
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


def masked_eval_losses(output_dir: str) -> list[float]:
    return [masked_eval_loss(output_dir, strategy, 2) for strategy in ("ddp", "fsdp")]


@pytest.mark.multirank
def test_the_eval_loss_of_a_masked_model_is_the_token_mean_whatever_the_batches(tmp_path):
    exact = masked_eval_loss(str(tmp_path), "single", 11)

    assert masked_eval_loss(str(tmp_path), "single", 2) == pytest.approx(exact, rel=1e-5)
    for losses in run_ranks(masked_eval_losses, 2, str(tmp_path)):
        assert losses == pytest.approx([exact, exact], rel=1e-5)
