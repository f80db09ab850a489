"""The stock Trainer, where accelerate is installed: the same losses, and both work in one process."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from typing import Any

import pytest
import transformers

from tests.ranks import run_ranks
from tests.trainer_jobs import TokenDataset, arguments, build_model, build_trainer, summary

pytestmark = pytest.mark.beside_accelerate

HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None
needs_accelerate = pytest.mark.skipif(not HAS_ACCELERATE, reason="Hugging Face accelerate is not installed")

RUN: dict[str, Any] = {
    "num_train_epochs": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "samples": 26,
    "dropout": 0.1, "accelerator_config": {"even_batches": True},  # as the stock Trainer by default
}  # fmt: skip


def run_stock(output_dir: str) -> dict[str, Any]:
    transformers.utils.logging.disable_progress_bar()
    args = arguments(output_dir, **{key: value for key, value in RUN.items() if key not in ("samples", "dropout")})
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)} - {"fsdp_config"}
    stock = transformers.TrainingArguments(**{key: value for key, value in args.to_dict().items() if key in names})
    trainer = transformers.Trainer(
        build_model(dropout=RUN["dropout"]), stock, train_dataset=TokenDataset(RUN["samples"], uneven=True)
    )
    trainer.train()
    history = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "grad_norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
    }


def run_ours(output_dir: str) -> dict[str, Any]:
    trainer = build_trainer(output_dir, uneven=True, **RUN)
    trainer.train()
    return {key: summary(trainer)[key] for key in ("losses", "grad_norms")}


@needs_accelerate
def test_one_process_gives_exactly_the_losses_of_the_stock_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # accelerate sets it and leaves it
    ours, stock, again = run_ours(str(tmp_path)), run_stock(str(tmp_path)), run_ours(str(tmp_path))

    assert ours["losses"] == stock["losses"]
    assert ours["losses"] == again["losses"]
    assert ours["grad_norms"] == pytest.approx(stock["grad_norms"], rel=1e-5)


@needs_accelerate
@pytest.mark.multirank
def test_two_ranks_give_exactly_the_losses_of_the_stock_trainer(tmp_path):
    ours = run_ranks(run_ours, 2, str(tmp_path))
    stock = run_ranks(run_stock, 2, str(tmp_path), timeout=100)

    assert ours[0]["losses"] == stock[0]["losses"]


def test_accelerate_is_not_imported_by_a_run(tmp_path):
    trainer = build_trainer(tmp_path)
    before = "accelerate" in sys.modules

    trainer.train()

    # transformers imports it where it is installed; we add nothing to that.
    assert before is HAS_ACCELERATE
    assert ("accelerate" in sys.modules) is before
