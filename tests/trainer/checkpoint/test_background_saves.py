"""`save_async`: a Trainer's checkpoints are written by a thread, and are those of a run that waits for them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from accel_trainer.tree import leaves
from tests.cells import beyond
from tests.fault_injection import fault_env, injected
from tests.ranks import RankFailure, run_ranks
from tests.strategy_configs import marked
from tests.trainer_jobs import build_trainer, on_ranks, summary, weights_of

RUN: dict[str, Any] = {"model": "gpt2", "dropout": 0.1, "samples": 48, "save_strategy": "steps", "save_steps": 2}
SLOW = "sleep@save.before_vote:seconds=0.1"


class Committed(TrainerCallback):
    """Notes at which update each checkpoint was called saved, and whether it was there."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.seen: list[tuple[int, int, bool]] = []
        self.update = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.update = state.global_step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = Path(args.output_dir, f"checkpoint-{state.global_step}", "COMMITTED")
        self.seen.append((state.global_step, self.update, path.is_file()))


def run(directory: str, *, strategy: str = "single", resume: Any = None, **changes: Any) -> dict[str, Any]:
    committed = Committed()
    trainer = build_trainer(directory, strategy=strategy, options={"callbacks": [committed]}, **{**RUN, **changes})
    trainer.train(resume_from_checkpoint=resume)
    return {**summary(trainer), "committed": committed.seen, "metrics": trainer.checkpoint_metrics}


def numbers_of(checkpoint: Path) -> dict[str, Any]:
    """Return all tensors of a checkpoint's files, by file and place."""
    found: dict[str, Any] = {}
    for file in sorted(checkpoint.iterdir()):
        if file.suffix == ".safetensors":
            found |= {f"{file.name}:{name}": value for name, value in load_file(file).items()}
        elif file.name.startswith(("optimizer", "scheduler")) and file.suffix in (".pt", ".bin"):
            values = [value for value in leaves(torch.load(file)) if isinstance(value, torch.Tensor)]
            found |= {f"{file.name}:{index}": value for index, value in enumerate(values)}
    return found


def run_thrice(directory: Path, *, strategy: str) -> list[dict[str, Any]]:
    """Train and wait for each save, train with saves in the background, and go on from one of those."""
    waited = run(str(directory / "waited"), strategy=strategy)
    with injected(SLOW, int(os.environ.get("RANK", "0"))):
        found = run(str(directory / "found"), strategy=strategy, save_async=True)
    again = str(directory / "found" / "checkpoint-4")
    return [waited, found, run(str(directory / "resumed"), strategy=strategy, resume=again)]


@pytest.mark.multirank
@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", *marked("zero3"), beyond("single"), beyond("fsdp_sharded")])
def test_checkpoints_are_those_of_a_run_that_waits_for_them(tmp_path: Path, strategy: str) -> None:
    waited, found, resumed = on_ranks(strategy, run_thrice, tmp_path)[0]
    assert found["losses"] == waited["losses"]
    for name, value in waited["weights"].items():
        np.testing.assert_array_equal(found["weights"][name], value, err_msg=name)
    steps = range(2, found["step"] + 1, 2)
    assert [step for step, _, _ in found["committed"]] == list(steps)
    assert all(is_there for _, _, is_there in found["committed"])
    assert any(update > step for step, update, _ in found["committed"])
    for step in steps:
        ours, theirs = (numbers_of(tmp_path / name / f"checkpoint-{step}") for name in ("found", "waited"))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), (step, name)

    assert resumed["losses"] == waited["losses"]
    for name, value in waited["weights"].items():
        np.testing.assert_array_equal(resumed["weights"][name], value, err_msg=name)


def refused(directory: str, fault: str, **changes: Any) -> tuple[str, list[str], Any]:
    """Train with a fault on one rank; return what ended the run, the checkpoints, and the best one."""
    trainer = build_trainer(directory, strategy="ddp", **{**RUN, "save_async": True, **changes})
    try:
        trainer.train()
        ended = ""
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
    names = sorted((path.name for path in Path(directory).glob("*-*")), key=lambda name: (len(name), name))
    return ended, names, trainer.state.best_model_checkpoint


@pytest.mark.multirank
def test_a_failure_ends_the_run_at_the_next_update_with_the_error_of_its_rank(tmp_path: Path) -> None:
    faults = {"env": fault_env("raise@save.before_vote:rank=1:step=4")}
    others, own = run_ranks(refused, 2, str(tmp_path / "run"), "", timeout=100, **faults)
    assert own[0] == "RuntimeError: fault injected at save.before_vote"
    assert others[0].startswith("RemoteRankError: rank 1 failed in save of ")
    assert own[1] == ["checkpoint-2"]


@pytest.mark.multirank
def test_a_full_disk_is_passed_over_where_that_was_asked_for(tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 1e-6}
    faults = {"env": fault_env("enospc@save.before_vote:rank=1:step=12")}
    results = run_ranks(
        refused, 2, str(tmp_path / "run"), "", on_save_error="warn", num_train_epochs=2, timeout=100, **best, **faults
    )
    for ended, names, found in results:
        assert ended == ""
        assert names == [f"checkpoint-{step}" for step in (2, 4, 6, 8, 10)]
        assert Path(found).name in names


class Stop(TrainerCallback):
    """Sends this process a signal after an update."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)


def stopped(directory: str) -> None:
    build_trainer(directory, options={"callbacks": [Stop()]}, **RUN, save_async=True).train()


def test_a_signal_during_a_save_waits_for_it_and_saves_where_training_stands(tmp_path: Path) -> None:
    slow = fault_env("sleep@save.before_vote:seconds=1.5:step=2")
    with pytest.raises(RankFailure, match="85"):
        run_ranks(stopped, 1, str(tmp_path), env=slow)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    whole, resumed = run(str(tmp_path / "whole")), run(str(tmp_path), resume=True)
    assert resumed["losses"] == whole["losses"]


def resume_and_run(directory: str, *, strategy: str) -> list[list[float]]:
    """Return the losses of a run that goes on, and of a whole one."""
    runs = {directory: True, f"{directory}/whole": None}
    return [run(folder, strategy=strategy, resume=resume)["losses"] for folder, resume in runs.items()]


@pytest.mark.multirank
@pytest.mark.parametrize("point", ["save.mid_shard", beyond("save.before_rename")])
def test_a_kill_leaves_the_checkpoint_before_and_the_run_goes_on(tmp_path: Path, point: str) -> None:
    sharded: dict[str, Any] = {"strategy": "fsdp_sharded", "timeout": 60}
    with pytest.raises(RankFailure):
        run_ranks(run, 2, str(tmp_path), save_async=True, env=fault_env(f"kill9@{point}:rank=1:step=4"), **sharded)
    # Rank 0 publishes; what it did when rank 1 died is complete, whether or not anybody was told so.
    assert {path.name for path in tmp_path.glob("checkpoint-*")} - {"checkpoint-4"} == {"checkpoint-2"}
    found, whole = run_ranks(resume_and_run, 2, str(tmp_path), **sharded)[0]
    assert found == whole


def test_the_best_model_is_loaded_once_its_save_is_complete(tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    waited = run(str(tmp_path / "waited"), **best)
    with injected(SLOW):
        found = run(str(tmp_path / "found"), save_async=True, **best)
    assert Path(found["best"]).name == Path(waited["best"]).name
    np.testing.assert_equal(found["weights"], waited["weights"])
    names = [sorted(path.name for path in (tmp_path / name).glob("checkpoint-*")) for name in ("found", "waited")]
    assert names[0] == names[1]


def test_a_rollback_waits_for_the_save_in_flight(tmp_path: Path) -> None:
    class Spoil(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 4 and not self.done:
                self.done = True
                next(iter(model.parameters())).data[0, 0] = float("nan")

        done = False

    def rolled_back(name: str, **changes: Any) -> dict[str, Any]:
        options = {"callbacks": [Spoil()]}
        trainer = build_trainer(tmp_path / name, options=options, **RUN, on_nonfinite="rollback", **changes)
        trainer.train()
        return summary(trainer)

    waited = rolled_back("waited")
    with injected(SLOW):
        found = rolled_back("found", save_async=True)
    assert found["step"] == waited["step"] < 12
    np.testing.assert_equal(found["weights"], waited["weights"])


def test_a_push_follows_the_commit(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, **RUN, save_async=True)
    pushed: list[bool] = []
    trainer.args.push_to_hub = True
    trainer._push_from_checkpoint = lambda path: pushed.append(Path(path, "COMMITTED").is_file())
    with injected(SLOW):
        trainer.train()
    assert pushed == [True] * 6


def test_other_saves_of_the_same_run_are_written_at_once(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path / "run", **RUN, save_async=True)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    stored = load_file(tmp_path / "model" / "model.safetensors")
    for name, value in weights_of(trainer).items():
        if name in stored:
            np.testing.assert_array_equal(stored[name].numpy(), value)
