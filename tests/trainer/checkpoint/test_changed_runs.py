"""R16: a Trainer's resume with other samples in an update, or with another seed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from accel_trainer.trainer import TrainingArguments
from tests.ranks import run_ranks
from tests.trainer.checkpoint.test_resuming import RUN, recorded
from tests.trainer_jobs import build_trainer

EIGHT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
"""Updates of eight samples on one process."""
SPLIT = {"accelerator_config": {"split_batches": True}}
"""Updates of four samples on any number of ranks."""
SEARCH: dict[str, Any] = {
    "max_steps": 4, "save_strategy": "steps", "save_steps": 1, "auto_find_batch_size": True,
    "compat": "transformers",  # else an update keeps its samples, whatever is found
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changed")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    """A run of one process, with checkpoints in `folder / "one"`."""
    return recorded(str(folder / "one"), steps=(1, 2, 4), dropout=0.1, **EIGHT)


@pytest.fixture(scope="module")
def searched(folder: Path) -> str:
    """A checkpoint of a run that has searched for its batch size."""
    build_trainer(folder / "searched", **SEARCH).train()
    return str(folder / "searched" / "checkpoint-1")


def refused(output_dir: str, resume: str, **build: Any) -> dict[str, Any]:
    """Resume, and return the error and what has changed by then."""
    trainer = build_trainer(output_dir, **{**RUN, **build})
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    sizes, error = (trainer._train_batch_size, trainer.args.gradient_accumulation_steps), ""
    try:
        trainer.train(resume_from_checkpoint=resume)
    except IncompatibleCheckpointError as raised:
        error = str(raised)
    after = trainer.model.state_dict()
    is_same = all(torch.equal(value, after[name]) for name, value in before.items())
    rest = trainer.optimizer, trainer.state.global_step, trainer._train_batch_size
    is_same &= rest == (None, 0, sizes[0]) and trainer.args.gradient_accumulation_steps == sizes[1]
    return {"error": error, "is_same": is_same, "step": trainer.state.global_step}


def test_r16_other_samples_in_an_update_are_refused_on_as_many_ranks_before_anything_is_loaded(
    folder: Path, one: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(shutil.copytree(folder / "one" / "checkpoint-1", tmp_path / "one" / "checkpoint-1"))
    larger = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}

    for given in (path, True):
        trainer = build_trainer(str(tmp_path / "one"), **RUN, **larger)
        with pytest.raises(
            IncompatibleCheckpointError,
            match=r"^TrainingArguments\(on_changed_run='warn'\) goes on with this run's options; on_changed_run=auto "
            r"\(default\) refuses this:\n"
            r".*checkpoint-1 is of a run whose updates had 8 samples = 4 x 2 x 1 \(micro-batch x accumulation x "
            r"ranks\), and this run's have 16 samples = 8 x 2 x 1 .*: from here on it would be another run\. The same "
            r"one goes on with as many samples in an update: set gradient_accumulation_steps=1 \(now 2\) or "
            r"per_device_train_batch_size=4 \(now 8\)$",
        ):
            trainer.train(resume_from_checkpoint=given)
    assert Path(path).is_dir()
    for action in ("auto", "refuse"):
        result = refused(str(tmp_path / "again"), path, on_changed_run=action, **larger)
        assert f"; on_changed_run={action} (" in result["error"]
        assert result["is_same"]

    warned = recorded(str(tmp_path / "again"), path, (), on_changed_run="warn", **larger)
    assert "it goes on at the same sample and ends after update 5; set gradient_accumulation_steps=1" in caplog.text
    # 20 of 28 samples were left in the epoch: 16 and 4.
    rest = [row for number in range(2, 5) for row in one["ids"][number]]
    assert sorted(warned["ids"][2] + warned["ids"][3]) == sorted(rest)
    # Other factors of the same number are the same run.
    same = {"per_device_train_batch_size": 8, "on_changed_run": "refuse"}
    assert recorded(str(tmp_path / "again"), path, (), **same)["ids"] == {
        number: row for number, row in one["ids"].items() if number > 1
    }


def resume_on_two(folder: Path) -> list[dict[str, Any]]:
    """Resume what one process wrote, and what as many wrote as there are."""
    path = str(folder / "one" / "checkpoint-1")
    found = [
        refused(str(folder / action), path, on_changed_run=action, num_train_epochs=1, **EIGHT)
        for action in ("refuse", "auto")
    ]
    build_trainer(folder / "two", max_steps=2, save_strategy="steps", save_steps=2, **RUN).train()
    build_trainer(folder / "split", max_steps=2, save_strategy="steps", save_steps=2, **SPLIT, **RUN).train()
    of_two = str(folder / "two" / "checkpoint-2")
    return [*found, *(refused(str(folder / "again"), of_two, **build) for build in (EIGHT, SPLIT))]


@pytest.mark.multirank
@pytest.mark.timeout(120)
def test_r16_on_other_ranks_the_setting_that_keeps_the_samples_is_named(folder: Path, one: dict[str, Any]) -> None:
    for strict, warned, of_two, split in run_ranks(resume_on_two, 2, folder, timeout=110):
        assert "had 8 samples = 4 x 2 x 1 (micro-batch" in strict["error"]
        assert "and this run's have 16 samples = 4 x 2 x 2 (micro-batch" in strict["error"]
        ways = "gradient_accumulation_steps=1 (now 2) or per_device_train_batch_size=2 (now 4)"
        assert f"in an update: set {ways}" in strict["error"]
        assert strict["is_same"]
        assert warned["error"] == ""
        assert warned["step"] == 1 + 2  # 20 samples are left, in updates of 16
        assert "had 8 samples = 4 x 1 x 2 (micro-batch" in of_two["error"]
        assert "and this run's have 16 samples = 4 x 2 x 2 (micro-batch" in of_two["error"]
        assert of_two["is_same"]
        assert "and this run's have 4 samples = 2 x 1 x 2 (micro-batch" in split["error"]
        assert "=2 (now 1) or per_device_train_batch_size / ranks=4 (now 2)" in split["error"]
    # Four samples on each number of ranks are the same run.
    resumed = recorded(str(folder / "again"), str(folder / "split" / "checkpoint-2"), (), on_changed_run="refuse")
    assert resumed["step"] == 14


def test_r16_the_size_that_a_search_had_found_is_no_change(searched: str, tmp_path: Path) -> None:
    changes = {"max_steps": 2, "per_device_train_batch_size": 16, "on_changed_run": "refuse"}
    again = build_trainer(tmp_path, **SEARCH | changes)
    again.train(resume_from_checkpoint=searched)
    assert again.state.train_batch_size == 4

    result = refused(str(tmp_path), searched, **SEARCH, gradient_accumulation_steps=2, on_changed_run="auto")
    assert "and this run's have 8 samples = 4 x 2 x 1" in result["error"]
    assert result["is_same"]


def test_r16_a_search_that_goes_below_the_size_of_the_checkpoint_goes_on_unless_it_is_refused(
    searched: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build(action: str) -> Any:
        """Return a Trainer on a device with memory for three samples."""
        trainer = build_trainer(tmp_path / action, on_changed_run=action, **SEARCH)
        step = trainer.training_step

        def training_step(model: Any, inputs: Any, *rest: Any) -> Any:
            if len(inputs["input_ids"]) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return step(model, inputs, *rest)

        trainer.training_step = training_step
        return trainer

    with pytest.raises(IncompatibleCheckpointError, match=r"have 3 samples = 3 x 1 x 1 .* set "):
        build("refuse").train(resume_from_checkpoint=searched)
    caplog.clear()
    trainer = build("auto")
    trainer.train(resume_from_checkpoint=searched)
    assert trainer.state.global_step == 4
    assert "had 4 samples = 4 x 1 x 1 (micro-batch" in caplog.text
    assert "and this run's have 3 samples = 3 x 1 x 1 (micro-batch" in caplog.text
    # Its own checkpoints are of a run with that size.
    last = build_trainer(tmp_path / "auto", on_changed_run="refuse", **SEARCH)
    last.train(resume_from_checkpoint=str(tmp_path / "auto" / "checkpoint-3"))
    assert last._train_batch_size == last.state.train_batch_size == 3


@pytest.mark.parametrize("step", [2, 4], ids=["within an epoch", "between two"])
def test_r16_the_order_and_the_streams_of_a_checkpoint_go_on_whatever_the_seeds(
    folder: Path, one: dict[str, Any], tmp_path: Path, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    other = recorded(
        str(tmp_path), str(folder / "one" / f"checkpoint-{step}"), (), dropout=0.1, seed=7, data_seed=5,
        on_changed_run="refuse", **EIGHT,
    )  # fmt: skip

    assert other["ids"] == {number: row for number, row in one["ids"].items() if number > step}
    assert other["losses"] == one["losses"]
    assert other["noise"] == one["noise"]
    kept = "(without effect, the run goes on with the checkpoint's)"
    assert f"otherwise: data.data_seed: null -> 5 {kept}, seed: 42 -> 7 {kept}\n" in caplog.text


def test_r16_another_seed_for_an_epoch_that_begins_anew_is_named_and_refused_on_request(
    folder: Path, one: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(folder / "one" / "checkpoint-2")
    anew = {"ignore_data_skip": True, "seed": 7, **EIGHT}

    result = refused(str(tmp_path / "again"), path, on_changed_run="refuse", **anew)
    assert result["is_same"]
    error = result["error"]
    assert "checkpoint-2 is of a run whose order of samples has seed 42, and with ignore_data_skip=True" in error
    assert "of seed 7. Set data_seed=42; or leave" in error
    assert error.startswith("TrainingArguments(on_changed_run='warn') goes on with this run's options;")
    for options in ({"data_seed": 42, "on_changed_run": "refuse"}, {}):
        caplog.clear()
        refused(str(tmp_path / "again"), path, **anew, **options)
        assert "ignore_data_skip: false -> true, seed: 42 -> 7\n" in caplog.text


def test_r16_a_loader_of_ones_own_is_refused_alike(tmp_path: Path) -> None:
    def build(directory: str, **options: Any) -> Any:
        trainer = build_trainer(directory, max_steps=3, save_strategy="steps", save_steps=1, **options)
        size = trainer.args.per_device_train_batch_size
        trainer.get_train_dataloader = lambda: DataLoader(trainer.train_dataset, size, shuffle=True)
        return trainer

    build(str(tmp_path / "one")).train()
    with pytest.raises(IncompatibleCheckpointError, match=r"this run's have 2 samples = 2 x 1 x 1"):
        build(str(tmp_path / "two"), per_device_train_batch_size=2).train(str(tmp_path / "one" / "checkpoint-1"))


def test_on_changed_run_is_an_argument_and_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = TrainingArguments(str(tmp_path), use_cpu=True, on_changed_run="warn")
    assert given.resolved.config.on_changed_run == "warn"
    with pytest.raises(ConfigError, match=r"on_changed_run.* is 'ask'; expected one of"):
        TrainingArguments(str(tmp_path), use_cpu=True, on_changed_run="ask")
    monkeypatch.setenv("ACCEL_TRAINER_ON_CHANGED_RUN", "refuse")
    assert TrainingArguments(str(tmp_path), use_cpu=True).resolved.config.on_changed_run == "refuse"
