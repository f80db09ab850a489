"""At the end of a run, the best checkpoint is looked into before it is loaded and before others make room for it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from accel_trainer.errors import CorruptCheckpointError
from tests.publishing import flip
from tests.ranks import wait_until
from tests.trainer_jobs import build_trainer


class DamageBest(TrainerCallback):
    """Flips a bit in a file of the best checkpoint, before the last update is saved."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            flip(Path(state.best_model_checkpoint, self.name))


class AwaitUpload(TrainerCallback):
    """Goes on once a checkpoint is in the store: one that waits for its turn gives way to the next."""

    def __init__(self, uri: str) -> None:
        self.store = Path(uri.removeprefix("file://"))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wait_until((self.store / f"checkpoint-{state.global_step}" / "COMMITTED").exists)


def train_to_best(
    directory: Path, damaged: str | None = None, resumed: str | bool | None = None, **changes: Any
) -> Any:
    """Train 4 updates, of which the second is the best, and return the Trainer."""
    options = {"load_best_model_at_end": True, "save_total_limit": 1, "save_steps": 1, "max_steps": 4, **changes}
    callbacks: list[TrainerCallback] = [DamageBest(damaged)] if damaged else []
    if "checkpoint_uri" in options:
        callbacks.append(AwaitUpload(options["checkpoint_uri"]))
    trainer = build_trainer(
        directory, eval_strategy="steps", eval_steps=1, save_strategy="steps", eval_samples=2,
        metric_for_best_model="score", greater_is_better=True, options={"callbacks": callbacks}, **options,
    )  # fmt: skip
    trainer.compute_metrics = lambda _: {"score": float(trainer.state.global_step == 2)}
    trainer.train(resume_from_checkpoint=resumed)
    return trainer


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_best_one_is_left_alone_beside_what_is_not_ours(tmp_path: Path):
    (tmp_path / "checkpoint-1000").mkdir()
    (tmp_path / "checkpoint-1000" / "model.safetensors").write_bytes(b"of another run")

    trainer = train_to_best(tmp_path)

    assert names(tmp_path) == ["checkpoint-1000", "checkpoint-2"]
    assert trainer.args.save_total_limit == 1
    for name, value in load_file(tmp_path / "checkpoint-2" / "model.safetensors").items():
        assert torch.equal(trainer.model.state_dict()[name], value), name


def test_checkpoints_of_another_run_stay_where_the_best_one_is_its_own(tmp_path: Path):
    train_to_best(tmp_path / "before", save_total_limit=None)

    trainer = train_to_best(tmp_path / "now", resumed=str(tmp_path / "before" / "checkpoint-4"), max_steps=6)

    assert trainer.state.best_model_checkpoint == str(tmp_path / "before" / "checkpoint-2")
    assert names(tmp_path / "before") == [f"checkpoint-{step}" for step in range(1, 5)]
    assert names(tmp_path / "now") == ["checkpoint-6"]


def test_the_best_one_comes_from_the_store_where_its_disk_is_lost(tmp_path: Path):
    store = {"checkpoint_uri": f"file://{tmp_path}/store", "save_total_limit": 2}
    train_to_best(tmp_path / "lost", **store)
    shutil.rmtree(tmp_path / "lost")

    trainer = train_to_best(tmp_path / "new", resumed=True, max_steps=6, **store)

    assert names(tmp_path / "store")[-2:] == ["checkpoint-2", "checkpoint-6"]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "new" / "checkpoint-2")
    for name, value in load_file(tmp_path / "new" / "checkpoint-2" / "model.safetensors").items():
        assert torch.equal(trainer.model.state_dict()[name], value), name


@pytest.mark.parametrize("resumes", [False, True])
def test_a_checkpoint_of_an_earlier_run_is_not_the_best_of_this_one(tmp_path: Path, resumes: bool):
    store = {} if resumes else {"checkpoint_uri": f"file://{tmp_path}/store"}
    train_to_best(tmp_path / "earlier", save_total_limit=None, **store)
    resumed = None
    if resumes:
        train_to_best(tmp_path / "other", save_total_limit=None)
        shutil.rmtree(tmp_path / "other" / "checkpoint-2")
        resumed = str(tmp_path / "other" / "checkpoint-4")

    changes: dict[str, Any] = {"save_steps": 6, "max_steps": 6, "save_total_limit": None, **store}
    trainer = train_to_best(tmp_path / ("earlier" if resumes else "now"), resumed=resumed, **changes)

    assert Path(trainer.state.best_model_checkpoint or "none").parent != tmp_path / "earlier"
    assert not (tmp_path / "now" / "checkpoint-2").exists()


@pytest.mark.parametrize("loads", [True, False])
def test_r4_no_good_checkpoint_goes_for_a_best_one_that_is_corrupt(tmp_path: Path, caplog, loads: bool):
    # Its weights are as they were, and loading them needs no more.
    train_to_best(tmp_path, "optimizer.pt", load_best_model_at_end=loads)

    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    assert "the best checkpoint is not good, and the others stay" in caplog.text
    assert "optimizer.pt was changed after the save" in caplog.text


def test_corrupt_weights_of_the_best_one_are_not_loaded(tmp_path: Path):
    with pytest.raises(
        CorruptCheckpointError, match=r"model.safetensors was changed .* load_best_model_at_end=True wo"
    ):
        train_to_best(tmp_path, "model.safetensors")

    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]


def test_a_best_model_that_was_not_saved_is_missed(tmp_path: Path, caplog):
    train_to_best(tmp_path, save_steps=4, save_total_limit=None)

    assert "there is no checkpoint of the best model (its update was 2)" in caplog.text
