"""sentence-transformers' Trainer, and SetFit's around it, on accel_trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel_trainer
from tests.ecosystem.text_jobs import assert_equal, build_embedder, numbers_of, pairs, quiet, save_bert, sentence
from tests.ranks import preload
from tests.trainer_jobs import on_ranks, strategy_arguments

st = pytest.importorskip("sentence_transformers")
pytest.importorskip("accelerate")  # its Trainer asks for it

preload("sentence_transformers")


@dataclass
class Arguments(st.SentenceTransformerTrainingArguments, accel_trainer.TrainingArguments):
    pass


class Trainer(st.SentenceTransformerTrainer, accel_trainer.Trainer):
    training_args_class = Arguments


FIGURES = ("loss", "grad_norm", "eval_loss", "eval_sim_pearson_cosine")


def run(folder: str, strategy: str = "single", *, is_stock: bool = False) -> list[dict[str, Any]]:
    """Train four updates, and ours once more from the second; return the numbers of each."""
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    quiet()
    results = []
    for checkpoint in (None, str(Path(folder, "checkpoint-2")))[: 1 if is_stock else 2]:
        arguments_class = st.SentenceTransformerTrainingArguments if is_stock else Arguments
        args = arguments_class(
            output_dir=folder, use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1, max_steps=4,
            save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, learning_rate=1e-3,
            per_device_train_batch_size=4, per_device_eval_batch_size=4, **strategy_arguments(strategy),
        )  # fmt: skip
        model = build_embedder(str(Path(folder).parent / "model"))
        first, second = ([sentence(index + shift, 3) for index in range(6)] for shift in (0, 2))
        trainer = (st.SentenceTransformerTrainer if is_stock else Trainer)(
            model=model, args=args, train_dataset=pairs(22), eval_dataset=pairs(8, 3),
            loss=MultipleNegativesRankingLoss(model),
            evaluator=EmbeddingSimilarityEvaluator(first, second, [index / 6 for index in range(6)], name="sim"),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=checkpoint)
        results.append(numbers_of(trainer, FIGURES))
    return results


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    save_bert(str(tmp_path / "model"))
    return tmp_path


def test_one_process_gives_the_numbers_of_stock_and_resumes(folder: Path):
    ours, resumed = run(str(folder / "ours"))
    (stock,) = run(str(folder / "stock"), is_stock=True)

    assert ours["ours"].startswith("accel_trainer")
    assert not stock["ours"].startswith("accel_trainer")
    assert_equal(ours, stock, tolerance=1e-6)
    assert_equal(resumed, ours)


@pytest.mark.multirank
def test_sharded_ranks_give_the_numbers_of_replicas_resume_and_save_what_loads(folder: Path):
    runs = {}
    for strategy in ("ddp", "fsdp"):
        for whole, resumed in on_ranks(strategy, run, str(folder / strategy)):
            assert_equal(resumed, whole)
            runs[strategy] = whole
        saved = st.SentenceTransformer(str(folder / strategy / "checkpoint-4"), device="cpu")
        loaded = {name: p.detach().numpy() for name, p in saved.named_parameters()}
        assert loaded.keys() == runs[strategy]["weights"].keys()
        for name, value in loaded.items():
            np.testing.assert_array_equal(value, runs[strategy]["weights"][name])
        assert "FSDP" not in (folder / strategy / "checkpoint-4" / "README.md").read_text()
    assert_equal(runs["fsdp"], runs["ddp"], tolerance=1e-5)


def run_setfit(folder: Path) -> tuple[str, list[float], dict[str, Any]]:
    """Train a SetFit model; return whose Accelerator it ran on, the losses, and the weights of its body."""
    import setfit
    from datasets import Dataset
    from sklearn.linear_model import LogisticRegression

    quiet()
    data = Dataset.from_dict({"text": [sentence(row, 4) for row in range(8)], "label": [0, 1] * 4})
    model = setfit.SetFitModel(model_body=build_embedder(str(folder / "model")), model_head=LogisticRegression())
    args = setfit.TrainingArguments(
        output_dir=str(folder / "setfit"), batch_size=4, max_steps=4, report_to="none", logging_steps=1, seed=1
    )
    trainer = setfit.Trainer(model=model, args=args, train_dataset=data)
    trainer.train()
    body = trainer.st_trainer
    losses = [entry["embedding_loss"] for entry in body.state.log_history if "embedding_loss" in entry]
    weights = {name: p.detach().numpy().copy() for name, p in model.model_body.named_parameters()}
    return type(body.accelerator).__module__, losses, weights


def test_setfit_gives_the_numbers_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch):
    module = pytest.importorskip("setfit.trainer")
    _, losses, weights = run_setfit(folder)
    body_trainer = type(
        "BodyTrainer",
        (module.BCSentenceTransformersTrainer, accel_trainer.Trainer),
        {"training_args_class": Arguments},
    )
    monkeypatch.setattr(module, "BCSentenceTransformersTrainer", body_trainer)
    monkeypatch.setattr(module, "SentenceTransformerTrainingArguments", Arguments)

    owner, our_losses, our_weights = run_setfit(folder)

    assert owner.startswith("accel_trainer")
    assert len(losses) == 4
    assert our_losses == losses
    for name, value in weights.items():
        np.testing.assert_array_equal(our_weights[name], value)
