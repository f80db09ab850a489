"""`loss_chunk_tokens` and `loss_implementation` of the Trainer: the runs of whole logits, without these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel_trainer.errors import ConfigError
from accel_trainer.trainer import Trainer
from tests.cells import crossed
from tests.strategy_configs import needs_deepspeed
from tests.trainer_jobs import TokenDataset, arguments, build_model, build_trainer, on_ranks, train


class Watching(Trainer):
    """Notes whether training and evaluation have logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.seen = getattr(self, "seen", set()) | {(model.training, isinstance(outputs.get("logits"), torch.Tensor))}
        return (loss, outputs) if return_outputs else loss


def train_both(folder: str, *, strategy: str, accumulation: int) -> list[dict[str, Any]]:
    """Train in chunks, and with whole logits."""
    options = {"uneven": True, "gradient_accumulation_steps": accumulation, "eval_strategy": "epoch"}
    return [train(folder, strategy=strategy, **options, **chunks) for chunks in ({"loss_chunk_tokens": 7}, {})]


@pytest.mark.parametrize(
    ("strategy", "accumulation"),
    crossed(["single", "ddp", "fsdp", pytest.param("zero3", marks=needs_deepspeed)], [1, 3]),
)
def test_a_run_in_chunks_is_the_run_of_whole_logits(tmp_path: Path, strategy: str, accumulation: int):
    for ours, theirs in on_ranks(strategy, train_both, str(tmp_path), accumulation=accumulation):
        for name in ("losses", "grad_norms", "eval_losses"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_smoothed_labels_need_no_logits(tmp_path: Path, model: str):
    options: dict[str, Any] = {"model": model, "uneven": True, "label_smoothing_factor": 0.1}
    options |= {"eval_strategy": "epoch", "gradient_accumulation_steps": 2}
    found, expected = train(tmp_path, **options, loss_implementation="chunked"), train(tmp_path, **options)
    for name in ("losses", "grad_norms", "eval_losses"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)


def test_a_trained_model_smooths_no_labels_by_itself(tmp_path: Path):
    trainer = build_trainer(tmp_path, label_smoothing_factor=0.5, loss_implementation="chunked", max_steps=1)
    trainer.train()
    model, batch = trainer.model, trainer.data_collator([trainer.train_dataset[0]])

    with torch.no_grad():
        in_chunks = model.train()(**batch).loss
        whole = model.eval()(**batch).loss

    assert in_chunks.item() == pytest.approx(whole.item(), rel=1e-5)


def watched(tmp_path: Path, **options: Any) -> Watching:
    trainer = build_trainer(tmp_path, loss_implementation="chunked", **options)
    trainer.__class__ = type("Trainer", (Watching, type(trainer)), {})
    return trainer


def test_training_and_the_evaluation_of_a_loss_alone_make_no_logits(tmp_path: Path):
    trainer = watched(tmp_path, label_smoothing_factor=0.1)
    trainer.train()
    assert trainer.seen == {(True, False)}
    trainer = watched(tmp_path, eval_strategy="epoch")
    trainer.train()
    assert trainer.seen == {(True, False), (False, False)}
    predicted = trainer.predict(trainer.eval_dataset).predictions
    expected = build_trainer(tmp_path, eval_strategy="epoch")
    expected.train()
    np.testing.assert_allclose(predicted, expected.predict(trainer.eval_dataset).predictions, atol=2e-4)


def test_who_wants_logits_of_training_is_refused(tmp_path: Path):
    def function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return outputs.logits.sum()

    with pytest.raises(ConfigError, match=r"compute_loss_func was given, .* and loss=chunked .* leave one of them out"):
        build_trainer(tmp_path, loss_chunk_tokens=7, options={"compute_loss_func": function})
    with pytest.raises(ConfigError, match=r"use_liger_kernel replaces .* loss=chunked \(from TrainingArguments\(loss_"):
        arguments(tmp_path, use_liger_kernel=True, loss_chunk_tokens=7)
    with pytest.raises(ConfigError, match=r"loss=chunked .*: BertForSequenceClassification has no head"):
        build_trainer(tmp_path, model="bert", loss_implementation="chunked").train()


def test_the_arguments_are_options_of_files_and_variables_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert arguments(tmp_path).resolved.config.loss == "plain"
    given = arguments(tmp_path, loss_chunk_tokens=7).resolved
    assert (given.config.loss, given.config.loss_chunk_tokens) == ("chunked", 7)
    monkeypatch.setenv("ACCEL_TRAINER_LOSS", "chunked")
    assert arguments(tmp_path).resolved.config.loss == "chunked"


class Around(torch.nn.Module):
    """Has a language model inside, and takes no other arguments than these."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return self.model(input_ids=input_ids, labels=labels)


def test_a_language_model_inside_of_another_module_is_evaluated(tmp_path: Path):
    losses = []
    for loss in ("plain", "chunked"):
        data = TokenDataset(6)
        args = arguments(tmp_path, loss_implementation=loss, max_steps=2, prediction_loss_only=True)
        trainer = Trainer(Around(), args, train_dataset=data, eval_dataset=data)
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
