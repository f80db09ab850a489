"""Gradients that are no numbers: found at the update that has them, on all ranks alike, before anything is saved."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from accel_trainer.errors import NonFiniteError
from tests.ranks import run_ranks
from tests.trainer_jobs import build_trainer


class Poison(TrainerCallback):
    """Makes the gradients of one update, on one rank, NaN by way of its loss."""

    def __init__(self, update: int, rank: int) -> None:
        self.update, self.rank = update, rank
        self.weights: dict[int, torch.Tensor] = {}

    def arm(self, trainer: Any) -> None:
        compute_loss = trainer.compute_loss

        def poisoned(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = compute_loss(model, inputs, *args, **kwargs)
            is_due = trainer.state.global_step + 1 == self.update and trainer.accelerator.process_index == self.rank
            return loss * float("nan") if is_due else loss

        trainer.compute_loss = poisoned

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights[state.global_step] = next(model.parameters()).detach().clone()


def train_poisoned(folder: str, rank: int = 0, **options: Any) -> tuple[str, list[str], dict[int, torch.Tensor], Any]:
    poison = Poison(3, rank)
    given = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "logging_steps": 1, **options}
    trainer = build_trainer(folder, options={"callbacks": [poison]}, **given)
    poison.arm(trainer)
    error = ""
    try:
        trainer.train()
    except NonFiniteError as raised:
        error = str(raised)
    saved = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    return error, saved, poison.weights, trainer.state.log_history


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_r14_the_update_that_has_them_is_named_and_nothing_of_it_is_saved(tmp_path: Path, max_grad_norm: float):
    error, saved, weights, _ = train_poisoned(str(tmp_path), max_grad_norm=max_grad_norm)
    assert re.match(r"update 3: the norm of the gradients is NaN or infinite, and the loss on rank 0 is, too", error)
    assert "resume from the last checkpoint, or set on_nonfinite='skip_step'" in error
    assert saved == ["checkpoint-1", "checkpoint-2"]
    assert sorted(weights) == [1, 2]


def test_r14_one_ranks_nan_ends_all_and_names_it(tmp_path: Path):
    for error, saved, _, _ in run_ranks(train_poisoned, 2, str(tmp_path), 1):
        assert error.startswith(
            "update 3: the norm of the gradients is NaN or infinite, and the loss on rank 1 is, too"
        )
        assert saved == ["checkpoint-1", "checkpoint-2"]


def test_r14_a_step_that_is_skipped_changes_no_weight_on_any_rank(tmp_path: Path):
    for error, saved, weights, history in run_ranks(train_poisoned, 2, str(tmp_path), 1, on_nonfinite="skip_step"):
        assert error == ""
        assert len(saved) == 5
        assert torch.equal(weights[3], weights[2])
        assert not torch.equal(weights[4], weights[3])
        assert weights[5].isfinite().all()
        logged = {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
        assert [step for step, loss in logged.items() if loss != loss] == [3]  # NaN is logged as NaN


def test_r14_where_it_is_a_warning_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    error, _, weights, _ = train_poisoned(str(tmp_path), on_nonfinite="warn", save_strategy="no")
    assert error == ""
    assert not weights[5].isfinite().all()
    assert "update 3: the norm of the gradients" in caplog.text
    assert "the weights have it (on_nonfinite='warn')" in caplog.text


SCRIPT = """
import sys
from tests.trainer.test_nonfinite import Poison
from tests.trainer_jobs import build_trainer
trainer = build_trainer(sys.argv[1], max_steps=5, save_strategy="no")
Poison(3, 0).arm(trainer)
trainer.train()
"""


def test_r14_the_process_ends_with_a_code_of_its_own(tmp_path: Path):
    ended = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 76
    assert ended.stderr.count("NonFiniteError: update 3: the norm of the gradients is NaN or infinite") == 1
