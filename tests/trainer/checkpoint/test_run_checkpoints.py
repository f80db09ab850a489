"""What saves and resumes cost is logged once, and the line of a resume says from where, why, and what is exact."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from accel_trainer.checkpoint import checkpointer
from accel_trainer.errors import CorruptCheckpointError, IncompatibleCheckpointError
from accel_trainer.trainer.checkpoint import saving
from accel_trainer.trainer.checkpoint.saving import RunMetrics, UpdateNote
from tests.publishing import flip
from tests.trainer_jobs import build_trainer

CKPT = {"ckpt/stall_s", "ckpt/duration_s", "ckpt/bytes"}
RESUME = {"resume/select_s", "resume/verify_s", "resume/load_s", "resume/data_s"}
FIGURES = CKPT | RESUME | {"lost_steps", "goodput"}
# 8 updates an epoch.
RUN: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}


class Stopped(Exception):
    pass


class Watch(TrainerCallback):
    """Keeps what callbacks see, and stops the run before an update."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.logs: list[tuple[int, set[str]]] = []
        self.stop_at = stop_at

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append((state.global_step, FIGURES.intersection(logs)))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.stop_at:
            raise Stopped


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory) -> Path:
    """A run that was stopped after update 7, with checkpoints of updates 2, 4 and 6."""
    directory = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Stopped):
        build_trainer(directory, options={"callbacks": [Watch(7)]}, **RUN).train()
    return directory


@pytest.fixture
def run_dir(stopped_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stopped_run, tmp_path / "run")


def resume(run_dir: Path, given: Any = True, **changes: Any) -> tuple[Any, Watch, Any]:
    watch = Watch()
    trainer = build_trainer(run_dir, options={"callbacks": [watch]}, **{**RUN, **changes})
    return trainer, watch, trainer.train(resume_from_checkpoint=given)


def training_logs(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what upstream's tests compare of two runs: `train_loss` is the mean since the resume."""
    skipped = ("_runtime", "_per_second", "train_loss")
    logs = [entry for entry in history if "eval_loss" not in entry]
    return [{name: value for name, value in entry.items() if not name.endswith(skipped)} for entry in logs]


def test_r18_figures_are_logged_once_and_a_resumed_run_compares_equal_to_a_whole_one(run_dir: Path):
    trainer, watch, output = resume(run_dir, eval_strategy="steps", eval_steps=1)
    whole = build_trainer(run_dir.parent / "whole", eval_strategy="steps", eval_steps=1)
    whole_output = whole.train()

    # The log of update 7 is the first after the resume, that of the end the first after the save of update 8.
    assert [entry for entry in watch.logs if entry[1]] == [
        (7, RESUME | {"lost_steps"}),
        (8, FIGURES),
    ]
    assert trainer.checkpoint_metrics["lost_steps"] == 1
    assert trainer.checkpoint_metrics["ckpt/bytes"] > 10_000
    assert 0 < trainer.checkpoint_metrics["goodput"] <= 0.5  # of two updates one had been done before
    assert output.metrics.keys() == whole_output.metrics.keys()
    assert whole.checkpoint_metrics == {}
    assert training_logs(trainer.state.log_history) == training_logs(whole.state.log_history)
    trainer.save_state()
    written = json.loads((run_dir / "trainer_state.json").read_text())["log_history"]
    assert training_logs(written) == training_logs(whole.state.log_history)
    assert trainer.evaluate().keys() == whole.evaluate().keys()


def test_goodput_is_the_share_of_the_time_in_new_updates(monkeypatch):
    now = iter([100.0, 101.0, 104.0, 110.0, 200.0, 201.0])
    for module in (checkpointer, saving):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    run = RunMetrics()
    with run.resuming("load"):
        pass
    run.record("ckpt/duration_s", 1.0)
    run.record("ckpt/stall_s", 2.0)
    run.stalled_seconds += 2.0
    run.record("lost_steps", 2.0)

    assert run.take() == {"resume/load_s": 3.0, "ckpt/stall_s": 2.0, "ckpt/duration_s": 1.0, "lost_steps": 2.0}
    assert run.take() == {}
    # 5 of 10 seconds were no training, and 2 of 10 updates nothing new.
    run.begun_at = 20
    run.finish(last_update=30)
    assert run.take()["goodput"] == pytest.approx(0.4)
    unsaved = RunMetrics()
    unsaved.finish(last_update=10)
    assert unsaved.take() == {}


def without_manifest(run_dir: Path) -> None:
    for checkpoint in run_dir.glob("checkpoint-*"):
        for name in ("manifest.json", "COMMITTED"):
            (checkpoint / name).unlink()


def test_r18_the_line_of_a_resume_is_right(run_dir: Path, info_log):

    def line(given: Any = True, **changes: Any) -> str:
        info_log.clear()
        resume(run_dir, given, num_train_epochs=2, max_steps=7, save_strategy="no", **changes)
        (found,) = [record.message for record in info_log.records if record.message.startswith("resuming")]
        return found

    head = "written by 1 process(es), read by 1, contents verified; random streams restored; data "
    sample = head + "goes on at the next sample"
    named = run_dir / "checkpoint-2"
    lost = "update(s) that were done after it are lost, and done again"
    note = (run_dir / "_last_update").read_bytes()
    assert line() == f"resuming at update 6 from {run_dir / 'checkpoint-6'}; {sample}; 1 {lost}"
    assert not (run_dir / "_last_update").exists()
    assert line(str(named)) == f"resuming at update 2 from {named}, as named; {sample}"
    assert (
        line(str(named), ignore_data_skip=True)
        == f"resuming at update 2 from {named}, as named; {head}begins its epoch again"
    )

    (run_dir / "_last_update").write_bytes(note)
    flip(run_dir / "checkpoint-6" / "optimizer.pt")
    found = line()
    assert found.startswith(f"resuming at update 4 from {run_dir / 'checkpoint-4'}; {sample}; 3 {lost}; passed over ")
    assert "checkpoint-6: " in found
    assert "optimizer.pt was changed after the save" in found

    without_manifest(run_dir)
    assert line() == (
        f"resuming at update 4 from {run_dir / 'checkpoint-4'}; written by 1 process(es), read by 1, not written by "
        "accel_trainer, contents not verified; random streams restored; data by number of updates"
    )


def test_r18_weights_alone_are_said_to_be_alone(tmp_path: Path, info_log):
    build_trainer(tmp_path, save_only_model=True, max_steps=1, **RUN).train()

    trainer, _, _ = resume(tmp_path, max_steps=2)

    assert "contents verified; weights only: optimizer, schedule and random streams are new; data goes" in info_log.text
    assert "lost_steps" not in trainer.checkpoint_metrics


def test_no_note_is_written_over_what_is_not_one(tmp_path: Path):
    precious = tmp_path / "bashrc"
    precious.write_text("alias ll='ls -l'\n")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "_last_update").symlink_to(precious)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "_last_update").write_text("to be done on Monday\n")
    (tmp_path / "waits").mkdir()
    os.mkfifo(tmp_path / "waits" / "_last_update")
    for name in ("linked", "other", "waits"):
        assert UpdateNote.read(tmp_path / name) is None
        build_trainer(str(tmp_path / name), max_steps=3, save_strategy="steps", save_steps=1).train()
        assert (tmp_path / name / "checkpoint-3" / "COMMITTED").is_file()
    assert precious.read_text() == "alias ll='ls -l'\n"
    assert (tmp_path / "other" / "_last_update").read_text() == "to be done on Monday\n"


BRACKETS = "[" * 200_000


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("trainer_state.json", lambda path: path.write_text(BRACKETS)),
        ("trainer_state.json", lambda path: path.write_text('{"global_stop": 6}')),
        ("scheduler.pt", lambda path: (path.unlink(), os.mkfifo(path))),
        ("model.safetensors", lambda path: (path.unlink(), os.mkfifo(path))),
        ("rng_state.pth", lambda path: torch.save({"x": Buffer()}, path)),
    ],
)
def test_a_checkpoint_of_the_stock_trainer_that_cannot_be_read_is_passed_over(
    run_dir: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Any
):
    without_manifest(run_dir)
    damage(run_dir / "checkpoint-6" / name)
    trainer, _, _ = resume(run_dir, max_steps=5)
    assert trainer.state.global_step == 5
    assert "checkpoint-6 is not a good checkpoint and is passed over" in caplog.text
    assert name in caplog.text
    named = next(run_dir.glob("_bad-checkpoint-6-*"))
    if name in ("scheduler.pt", "rng_state.pth"):
        with pytest.raises(CorruptCheckpointError, match=rf"{name} (is a FIFO|holds a bytearray)"):
            resume(run_dir, str(named))


class Buffer:
    def __reduce__(self) -> Any:
        return bytearray, (2**40,)


class FalseArray:
    """Numbers, four bytes of which are called "python", and are the address of an object."""

    def __reduce__(self) -> Any:
        reconstruct, arguments, _ = np.zeros(2, np.uint32).__reduce__()
        return reconstruct, arguments, (1, (2,), FalseType(), False, b"A" * 8)


class Objects:
    def __reduce__(self) -> Any:
        return np.dtype, ("O", False, True)


class FalseType:
    def __reduce__(self) -> Any:
        fields = {"python": (Objects(), 0)}
        return np.dtype, ("u4", False, True), (3, "<", None, ("python",), fields, -1, -1, 0)


def test_random_streams_that_upstream_would_follow_an_address_in_are_refused(run_dir: Path):
    without_manifest(run_dir)
    torch.save(FalseArray(), run_dir / "checkpoint-6" / "rng_state.pth")
    with pytest.raises(
        IncompatibleCheckpointError, match=r"rng_state\.pth holds more than tensors, numbers and strings"
    ):
        resume(run_dir, max_steps=7)
