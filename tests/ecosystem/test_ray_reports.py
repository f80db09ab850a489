"""What a Trainer reports to Ray Train or Tune, without a cluster: each checkpoint with the metrics of its own step."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.train")

from accel_trainer.integrations.ray_train import RayReportCallback
from tests.trainer_jobs import build_trainer


@pytest.mark.parametrize(
    "changes",
    [{"save_strategy": "steps", "save_steps": 2, "save_async": True}, {"save_strategy": "best"}],
    ids=["async", "best"],
)
def test_a_checkpoint_is_reported_with_the_evaluation_of_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    sync = os.fsync

    def sync_slowly(descriptor: int) -> None:
        time.sleep(
            0.1 * (threading.current_thread() is not threading.main_thread())
        )  # the next evaluation overtakes it
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_slowly)
    reports: dict[str, dict[str, Any]] = {}

    def report(metrics: dict[str, Any], checkpoint: Any = None) -> None:
        if checkpoint is not None:
            reports[Path(checkpoint.path).name] = metrics

    best = {"metric_for_best_model": "eval_loss", "greater_is_better": False}
    options = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1, **best, **changes}
    trainer = build_trainer(tmp_path, options={"callbacks": [RayReportCallback(report)]}, **options)
    trainer.train()
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    assert "checkpoint-2" in reports
    assert "checkpoint-6" in reports or "best" in changes.values()
    for name, metrics in reports.items():
        assert name == f"checkpoint-{metrics['step']}"
        assert metrics["eval_loss"] == losses[metrics["step"]]
