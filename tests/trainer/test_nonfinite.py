"""Gradients that are no numbers: found at the update that has them, on all ranks alike, before anything is saved."""

from __future__ import annotations

import copy
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from accel_trainer.errors import ConfigError, NonFiniteError
from tests import warm
from tests.cells import beyond
from tests.ranks import run_ranks
from tests.strategy_configs import needs_deepspeed
from tests.trainer_jobs import build_model, build_trainer, on_ranks, weights_of


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
    ended = warm.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=90)
    assert ended.returncode == 76
    assert ended.stderr.count("NonFiniteError: update 3: the norm of the gradients is NaN or infinite") == 1


EPSILON = 1e-4
"""Of AdamW: at its default of 1e-8 a gradient next to nothing, whose sign rounding decides, makes a whole step."""


class PoisonedRun:
    """A run whose losses are NaN in some of its updates, by their number in the order of the data."""

    def __init__(
        self, folder: str, strategy: str, poisoned: range, rank: int = 0, resume_from: Any = None, **options: Any
    ) -> None:
        given = {"save_strategy": "steps", "save_steps": 2, "on_nonfinite": "rollback", "adam_epsilon": EPSILON}
        given |= options
        trainer = build_trainer(folder, strategy=strategy, **given)
        self.trainer, self.updates = trainer, []
        compute_loss, process = trainer.compute_loss, trainer.accelerator.process
        micro_batches = trainer.args.gradient_accumulation_steps

        def poison(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.updates.append(inputs["input_ids"].tolist())
            number = 1 + (len(self.updates) - 1) // micro_batches
            loss = compute_loss(model, inputs, *args, **kwargs)
            return loss * float("nan") if number in poisoned and process.rank == rank else loss

        trainer.compute_loss = poison
        self.error = ""
        try:
            trainer.train(resume_from_checkpoint=resume_from)
        except NonFiniteError as raised:
            self.error = str(raised)

    def seen(self) -> dict[str, Any]:
        history = self.trainer.state.log_history
        return {
            "error": self.error,
            "rows": self.updates,
            "losses": {entry["step"]: entry["loss"] for entry in history if "loss" in entry},
            "rates": {entry["step"]: entry["learning_rate"] for entry in history if "loss" in entry},
            "train_loss": history[-1].get("train_loss"),
            "step": self.trainer.state.global_step,
            "weights": weights_of(self.trainer) if not self.error else {},
        }


def roll_back(folder: str, *, strategy: str) -> dict[str, Any]:
    size = 4 if strategy == "single" else 2
    two = {"per_device_train_batch_size": size, "num_train_epochs": 2, "save_steps": 4}
    once = PoisonedRun(f"{folder}/once", strategy, range(6, 7), **two)
    resume = f"{folder}/once/checkpoint-8"
    return {
        "once": once.seen(),
        "resumed": PoisonedRun(f"{folder}/once", strategy, range(0), resume_from=resume, **two).seen(),
        "again and again": PoisonedRun(
            f"{folder}/again", strategy, range(4, 20), per_device_train_batch_size=size, max_rollbacks=2
        ).seen(),
        "too early": PoisonedRun(f"{folder}/early", strategy, range(2, 3)).seen(),
    }


def train_by_hand(updates: list[tuple[Any, ...]]) -> dict[str, Any]:
    """A float64 loop over these updates, each in as many parts as there were ranks; the 6th goes back to the 4th."""
    model = build_model().double()  # what differs from it is the rounding of one run, and not of two
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPSILON, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 16)
    losses, kept = [], None
    for number, parts in enumerate(updates, start=1):
        if number == 6:
            for each, state in zip((model, optimizer, schedule), kept, strict=True):
                each.load_state_dict(state)
            losses = losses[:4]
            continue
        rows = [torch.tensor(part) for part in parts]
        loss = sum(model(input_ids=part, labels=part).loss for part in rows) / len(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if number == 4:
            kept = copy.deepcopy([each.state_dict() for each in (model, optimizer, schedule)])
    return {"losses": losses, "weights": {name: value.detach().numpy() for name, value in model.named_parameters()}}


@pytest.mark.parametrize(
    "strategy", ["single", beyond("ddp"), "fsdp", beyond(pytest.param("zero3", marks=needs_deepspeed))]
)
def test_r14_a_rollback_is_the_newest_checkpoint_with_the_data_behind_the_update(tmp_path: Path, strategy: str) -> None:
    ranks = on_ranks(strategy, roll_back, str(tmp_path))
    once = [seen["once"] for seen in ranks]
    updates = list(zip(*(seen["rows"] for seen in once), strict=True))
    assert len(updates) == 16
    by_hand = train_by_hand(updates)
    for seen in once:
        assert (seen["error"], seen["step"]) == ("", 14)
        assert list(seen["losses"]) == list(range(1, 15))
        assert list(seen["losses"].values()) == pytest.approx(by_hand["losses"], abs=1e-5)
        assert seen["rates"][5] == pytest.approx(1e-2 * 12 / 16)
        assert seen["train_loss"] == pytest.approx(sum(by_hand["losses"]) / 14, abs=1e-5)
        for name, value in seen["weights"].items():
            np.testing.assert_allclose(value, by_hand["weights"][name], rtol=0, atol=2e-6)
    assert once[0]["weights"]
    for seen, resumed in zip(once, (seen["resumed"] for seen in ranks), strict=True):
        assert resumed["rows"] == seen["rows"][10:]
        assert (resumed["step"], resumed["losses"]) == (14, seen["losses"])
        for name, value in seen["weights"].items():
            np.testing.assert_array_equal(resumed["weights"][name], value)
    for seen in ranks:
        assert re.match(
            r"update 3: .* the loss on rank 0 is, too; the run has gone back to \S+checkpoint-2 2 time\(s\) already, "
            r"and has come no further \(max_rollbacks=2\)",
            seen["again and again"]["error"],
        )
        assert re.match(
            r"update 2: .*; on_nonfinite='rollback' has no checkpoint of this run to go back to yet\. Save one before",
            seen["too early"]["error"],
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_only_model": True}, r"on_nonfinite=rollback .* and save_only_model=True leaves out"),
        ({"local_steps": 2}, r"local_steps=2 .* contradicts on_nonfinite=rollback .*, for which all ranks"),
    ],
)
def test_r14_rollbacks_are_refused_where_they_cannot_be(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_trainer(tmp_path, on_nonfinite="rollback", **options)


def test_weights_are_saved_and_loaded_where_the_environment_says_warn(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ACCEL_TRAINER_ON_NONFINITE", "warn")
    trainer = build_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1, logging_steps=2)
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("nan"))

    trainer.train()
    again = build_trainer(tmp_path, max_steps=2, logging_steps=2)
    # The loss of this update alone is a number.
    again.compute_loss = lambda model, inputs, **_: next(model.parameters()).nan_to_num().sum()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

    assert again.state.global_step == 2
    assert math.isnan(next(entry["loss"] for entry in again.state.log_history if "loss" in entry))
    assert next(again.model.parameters()).isnan().any()
