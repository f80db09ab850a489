"""A worker that dies: the launcher starts all again, and training goes on from the newest checkpoint of the job."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from tests.launches import launch
from tests.ranks import run_ranks
from tests.trainer_jobs import build_trainer


class Death(TrainerCallback):
    """Kills rank 1 after an update, in the first attempt."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if state.global_step == self.update and is_first and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, dies_after: int = -1) -> dict[str, Any]:
    trainer = build_trainer(
        folder, model="gpt2", dropout=0.1, samples=32, per_device_train_batch_size=2,
        save_strategy="steps", save_steps=3, options={"callbacks": [Death(dies_after)]},
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "weights": trainer.model.state_dict(), "begun_at": trainer._initial_global_step}


SCRIPT = f"""
import os, sys
import torch
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.trainer.checkpoint.test_restarts import train

seen = train(sys.argv[1], 5)
if os.environ["RANK"] == "0":
    torch.save(seen, sys.argv[2])
"""


@pytest.mark.timeout(300)
def test_a_killed_worker_costs_what_came_after_the_newest_checkpoint_of_this_job(tmp_path: Path) -> None:
    runs = str(tmp_path / "runs")
    whole, _ = run_ranks(train, 2, runs)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    # In the folder of the other run, whose checkpoint-8 is not taken for one of this job.
    words = ["--num_processes", "2", "--cpu", "--max_restarts", "1", str(script), runs, str(tmp_path / "seen")]
    code, output = launch(tmp_path, *words, timeout=280)

    assert code == 0, output
    assert "was ended by SIGKILL" in output
    assert "the workers were started again, 1 time(s): training goes on from the newest checkpoint" in output
    restarted = torch.load(tmp_path / "seen")
    assert restarted["begun_at"] == 3
    assert restarted["losses"] == whole["losses"]
    for name, value in whole["weights"].items():
        assert torch.equal(value, restarted["weights"][name]), name


def test_a_job_that_had_saved_nothing_begins_anew(tmp_path: Path) -> None:
    first, _ = run_ranks(train, 2, str(tmp_path))
    # As another job's second attempt: the checkpoints are of the second train() of a job there has never been.
    again, _ = run_ranks(train_twice, 2, str(tmp_path), env={"TORCHELASTIC_RESTART_COUNT": "1"})
    assert again["begun_at"] == 0
    assert again["losses"] == first["losses"]


def train_twice(folder: str) -> dict[str, Any]:
    from accel_trainer.trainer.checkpoint import run_checkpoints

    next(run_checkpoints._trains)
    return train(folder)
