"""The trackers that come along write for real, offline; one whose package is not installed is skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel_trainer import Accelerator, ProjectConfiguration
from accel_trainer.errors import ConfigError
from accel_trainer.integrations.experiment_trackers import WandBTracker
from accel_trainer.tracking import TensorBoardTracker

CONFIG = {"lr": 0.1, "name": "tiny", "layers": [1, 2], "optimizer": {"betas": 0.9}, "hub_token": "hf_secret"}
IMAGES = {"digits": np.zeros((2, 4, 4, 3), dtype=np.uint8)}


def run(name: str, tmp_path: Path, /, **options: Any) -> Accelerator:
    """Open a run, log three steps, images and leave it open."""
    accelerator = Accelerator(cpu=True, log_with=name, project_dir=tmp_path)
    accelerator.init_trackers("project", config=CONFIG, init_kwargs={name: options})
    for step in range(3):
        accelerator.log({"loss": torch.tensor(1.0 / (step + 1)), "epoch": 0}, step=step)
    return accelerator


def contents(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_tensorboard(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = run("tensorboard", tmp_path, flush_secs=10)
    tracker = accelerator.get_tracker("tensorboard")
    accelerator.log({"note": "half time", "losses": {"train": 1.0, "valid": 2.0}}, step=3)
    tracker.log_images(IMAGES, step=3)
    losses = {"train": torch.tensor(0.5), "best": None, "valid": np.float32(0.25), "name": "a"}
    accelerator.log({"losses": losses, "fine": 1.0, "odd": object()}, step=4)
    assert accelerator.get_tracker("tensorboard", unwrap=True) is tracker.writer
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "project")).Reload()
    assert [(event.step, round(event.value, 3)) for event in events.Scalars("loss")] == [(0, 1.0), (1, 0.5), (2, 0.333)]
    assert "fine" in events.Tags()["scalars"]
    assert any(
        "TensorBoard shows numbers, texts and dicts of numbers, and got {'losses/best': 'NoneType', "
        "'losses/name': 'str', 'odd': 'object'}" in m
        for m in caplog.messages
    )
    charts = (EventAccumulator(str(tmp_path / "project" / f"losses_{name}")).Reload() for name in ("train", "valid"))
    assert [[event.value for event in chart.Scalars("losses")] for chart in charts] == [[1.0, 0.5], [2.0, 0.25]]
    assert len(events.Images("digits")) + len(events.Tags()["images"]) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["project"]
    assert b"hf_secret" not in contents(tmp_path)


@pytest.mark.parametrize("by_name", [False, True])
def test_tensorboard_made_by_hand(tmp_path: Path, by_name: bool):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = {"run_name": "mine", "logging_dir": tmp_path} if by_name else {}
    tracker = TensorBoardTracker(**options, flush_secs=1) if by_name else TensorBoardTracker("mine", tmp_path)
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("project", config={"lr": 0.1})
    accelerator.log({"loss": 2.0}, step=7)
    assert (accelerator.trackers, tracker.run_name) == ([tracker], "mine")
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "mine")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(7, 2.0)]


def test_tensorboard_without_a_directory_is_an_error():
    pytest.importorskip("tensorboard")
    accelerator = Accelerator(cpu=True, log_with=TensorBoardTracker("mine"))
    with pytest.raises(ConfigError, match=r"tracker 'tensorboard' has no logging_dir.*TensorBoardTracker\(run_name"):
        accelerator.init_trackers("project")


def test_the_files_of_trackers_go_to_an_address(tmp_path: Path):
    pytest.importorskip("tensorboard")
    project = ProjectConfiguration(logging_dir=(tmp_path / "logs").as_uri())
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_config=project)
    writer = TensorBoardTracker("mine", project.logging_dir)
    accelerator.init_trackers("project")
    directory = accelerator.get_tracker("tensorboard", unwrap=True).log_dir
    assert (directory, writer.logging_dir) == (f"{project.logging_dir}/project", project.logging_dir)
    accelerator.end_training()


def test_wandb_keeps_no_files_at_an_address():
    tracker = WandBTracker("project", "gs://bucket/logs")
    with pytest.raises(ConfigError, match=r"tracker 'wandb' .* logging_dir='gs://bucket/logs' is an address.*\"dir\""):
        tracker.start()


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    accelerator = run("wandb", tmp_path, mode="offline", name="first", tags=["a"])
    tracker = accelerator.get_tracker("wandb")
    tracker.log_images(IMAGES, step=3)
    tracker.log_table("table", columns=["a", "b"], data=[[1, 2]], step=4)
    opened = accelerator.get_tracker("wandb", unwrap=True)
    assert (opened.project, opened.name, opened.config["lr"], opened.config["hub_token"]) == (
        "project",
        "first",
        0.1,
        "***",
    )
    assert opened.summary["loss"] == pytest.approx(1 / 3)
    accelerator.end_training()
    assert wandb.run is None
    wandb.teardown()
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert b"hf_secret" not in contents(tmp_path)


def test_mlflow_with_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    uri = (tmp_path / "store").as_uri()
    accelerator = run("mlflow", tmp_path, tracking_uri=uri, run_name="first", tags={"kind": "test"})
    accelerator.get_tracker("mlflow").log_table("table", columns=["a"], data=[[1], [2]])
    run_id = accelerator.get_tracker("mlflow", unwrap=True).info.run_id
    accelerator.end_training()
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient(tracking_uri=uri)
    stored = client.get_run(run_id)
    assert stored.info.status == "FINISHED"
    assert stored.data.params["optimizer/betas"] == "0.9"
    assert stored.data.params["hub_token"] == "***"
    assert [(m.step, round(m.value, 3)) for m in client.get_metric_history(run_id, "loss")] == [
        (0, 1.0),
        (1, 0.5),
        (2, 0.333),
    ]
    assert stored.data.tags["kind"] == "test"
    assert b"hf_secret" not in contents(tmp_path)


def test_mlflow_leaves_out_what_it_cannot_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    accelerator = Accelerator(cpu=True, log_with="mlflow")
    many = {f"option_{number}": number for number in range(230)}
    accelerator.init_trackers(
        "project",
        config={**many, "long": "x" * 7000, "odd[0]": 1},
        init_kwargs={"mlflow": {"tracking_uri": (tmp_path / "store").as_uri()}},
    )
    accelerator.log({"loss": 1.0, "note": "text"}, step=0)
    params = {path.name for path in tmp_path.glob("store/*/*/params/*")}
    accelerator.end_training()
    assert params == {*many, "odd_0_"}
    assert any("'long' is longer, left out" in message for message in caplog.messages)
    assert any("MLflow stores numbers, and got {'note': 'str'}" in message for message in caplog.messages)


def test_trackio_locally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    accelerator = run("trackio", tmp_path, name="first", auto_log_gpu=False, auto_log_cpu=False)
    assert accelerator.get_tracker("trackio", unwrap=True).name == "first"
    accelerator.end_training()
    logs = SQLiteStorage.get_logs("project", "first")
    assert [round(entry["loss"], 3) for entry in logs] == [1.0, 0.5, 0.333]
    assert SQLiteStorage.get_run_config("project", "first")["lr"] == 0.1
    assert b"hf_secret" not in contents(tmp_path)
