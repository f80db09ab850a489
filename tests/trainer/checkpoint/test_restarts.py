"""A worker that dies: the launcher starts all again, and training goes on from the newest checkpoint of the job."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from tests.launches import launch, read_samples
from tests.ranks import RankFailure, run_ranks
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
    begun_at = trainer.run_checkpoints.metrics.begun_at
    return {"losses": losses, "weights": trainer.model.state_dict(), "begun_at": begun_at}


def train_twice(folder: str) -> dict[str, Any]:
    """Train as in the second train() of a job."""
    from accel_trainer.trainer.checkpoint import saving

    next(saving._trains)
    return train(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Runs in one folder, without a launcher, whose part is in the tests of fewer ranks and of tests/launch."""
    folder = str(tmp_path_factory.mktemp("restarts"))
    second_attempt = {"TORCHELASTIC_RESTART_COUNT": "1"}
    # Of another job, whose checkpoint-8 is not taken for one of the next.
    whole, _ = run_ranks(train_twice, 2, folder)
    with pytest.raises(RankFailure, match=r"rank 1 died without an answer: killed by signal 9"):
        run_ranks(train, 2, folder, 5, env={"TORCHELASTIC_RESTART_COUNT": "0"})
    restarted, _ = run_ranks(train, 2, folder, 5, env=second_attempt)
    # All checkpoints are those of a first train() now, and this is the second one of a job that has saved nothing.
    anew, _ = run_ranks(train_twice, 2, folder, env=second_attempt)
    return {"whole": whole, "restarted": restarted, "anew": anew}


def test_a_killed_worker_costs_what_came_after_the_newest_checkpoint_of_this_job(runs: dict[str, Any]) -> None:
    assert runs["restarted"]["begun_at"] == 3
    assert runs["restarted"]["losses"] == runs["whole"]["losses"]
    torch.testing.assert_close(runs["restarted"]["weights"], runs["whole"]["weights"], rtol=0, atol=0)


def test_a_job_that_had_saved_nothing_begins_anew(runs: dict[str, Any]) -> None:
    assert runs["anew"]["begun_at"] == 0
    assert runs["anew"]["losses"] == runs["whole"]["losses"]


class SeenSamples:
    """Writes down which rows each micro-batch of a Trainer has, before it is trained."""

    def __init__(self, trainer: Any, folder: Path) -> None:
        self._trainer, self._step = trainer, trainer.training_step
        attempt, rank = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("RANK", "0")
        self._file = folder / f"{attempt}-{rank}.txt"
        rows = trainer.train_dataset.rows
        self._numbers = {tuple(row["input_ids"].tolist()): index for index, row in enumerate(rows)}

    def __call__(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        numbers = [self._numbers[tuple(row)] for row in inputs["input_ids"].tolist()]
        with self._file.open("a") as file:
            file.write(f"{self._trainer.state.global_step} {' '.join(map(str, numbers))}\n")
        return self._step(model, inputs, *args, **kwargs)


def train_elastic(folder: str, num_steps: int, dies_after: int = -1) -> dict[str, Any]:
    trainer = build_trainer(
        f"{folder}/run", uneven=True, samples=30, per_device_train_batch_size=2, gradient_accumulation_steps=num_steps,
        save_strategy="steps", save_steps=3, train_sampling_strategy="group_by_length",
        options={"callbacks": [Death(dies_after)]},
    )  # fmt: skip
    trainer.training_step = SeenSamples(trainer, Path(folder))
    trainer.train()
    given = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
    return {"weights": trainer.model.state_dict(), "begun_at": trainer.run_checkpoints.metrics.begun_at, "given": given}


SCRIPT = f"""
import os, sys
import torch
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.trainer.checkpoint.test_restarts import train_elastic

seen = train_elastic(sys.argv[1], 1, 5)
if os.environ["RANK"] == "0":
    torch.save(seen, sys.argv[2])
"""


@pytest.mark.timeout(300)
def test_with_fewer_ranks_a_job_goes_on_as_it_would_have_with_all(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    [reference] = run_ranks(train_elastic, 1, str(one), 2)
    script, config = tmp_path / "train.py", tmp_path / "train.yaml"
    script.write_text(SCRIPT)
    config.write_text("use_cpu: true\nlaunch:\n  num_processes: 1:2\n  max_restarts: 1\n")

    words = ["--config_file", str(config), str(script), str(two), str(tmp_path / "seen")]
    code, output = launch(tmp_path, *words, timeout=280)

    assert code == 0, output
    assert "was ended by SIGKILL, exit code 137; starting the workers again on 1 rank(s) instead of 2" in output
    assert "the workers were started again, 1 time(s): training goes on from the newest checkpoint" in output
    assert (
        "1 of 2 processes are left: an update has 4 samples as before = 2 x 2 x 1, instead of 2 x 1 x 2 (micro-batch x "
        "accumulation x ranks) on 2 processes" in output
    )
    assert "set batch size and accumulation so that" not in output  # of a resume with other updates
    restarted = torch.load(tmp_path / "seen")
    assert restarted["begun_at"] == 3
    assert restarted["given"] == (2, 1)
    whole = read_samples(one, "*.txt")
    before, after = read_samples(two, "0-*.txt"), read_samples(two, "1-*.txt")
    assert {step: before[step] for step in range(3)} | after == whole
    assert sorted(number for numbers in whole.values() for number in numbers) == list(range(30))
    torch.testing.assert_close(restarted["weights"], reference["weights"], rtol=0, atol=1e-6)


def share_out(folder: str) -> dict[str, Any]:
    """On two ranks of a job that began with three."""
    from accel_trainer import Accelerator
    from accel_trainer.errors import ConfigError

    trainer = build_trainer(folder, samples=24, per_device_train_batch_size=4)
    steps = SeenSamples(trainer, Path(folder))
    trainer.training_step = steps
    trainer.train()
    errors = []
    refused: list[dict[str, Any]] = [
        {"per_device_train_batch_size": 1}, {"auto_find_batch_size": True}, {"dataloader_drop_last": True},
    ]  # fmt: skip
    for changes in refused:
        with pytest.raises(ConfigError) as caught:
            build_trainer(folder, **changes).train()
        errors.append(str(caught.value))
    keeping = {"accumulation": {"keep_global_batch": True}}
    with pytest.raises(ConfigError) as caught:
        Accelerator(cpu=True, config=keeping)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, config=keeping)
    return {"errors": [*errors, str(caught.value)], "num_steps": accelerator.gradient_accumulation_steps}


def test_updates_keep_their_samples_on_any_number_of_ranks_or_are_refused(tmp_path: Path) -> None:
    results = run_ranks(share_out, 2, str(tmp_path), env={"ACCEL_TRAINER_LAUNCH__NUM_PROCESSES": "1:3"})
    # 4 x 1 x 3 samples are 3 x 2 x 2: no micro-batch is larger than it was.
    lines = (tmp_path / "0-0.txt").read_text().splitlines()
    assert [(line.split()[0], len(line.split()) - 1) for line in lines] == [("0", 3), ("0", 3), ("1", 3), ("1", 3)]
    for result in results:
        shared, searched, dropped, native = result["errors"]
        assert shared.startswith(
            "an update has 3 samples = 1 x 1 x 3 (micro-batch x accumulation x ranks) on 3 processes, and the 2 that "
            "are left cannot share them out: 3 / 2 is no whole number. Choose"
        )
        assert "with auto_find_batch_size=True they depend on how many there are" in searched
        assert "with dataloader_drop_last=True they depend on how many there are" in dropped
        assert "an update has 1 x 3 batches (micro-batches x processes), and the 2 processes that are left" in native
        assert result["num_steps"] == 6
