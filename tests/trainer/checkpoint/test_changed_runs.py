"""R16: a Trainer's resume with other samples in an update, or with another seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from accel_trainer.trainer import TrainingArguments
from tests.ranks import run_ranks
from tests.trainer.checkpoint.test_resuming import RUN, recorded
from tests.trainer_jobs import SaveAt, build_trainer

EIGHT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
"""Updates of eight samples on one process."""


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
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = recorded(str(tmp_path / "one"), steps=(3,), **EIGHT)
    path = str(tmp_path / "one" / "checkpoint-3")
    larger = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}

    for given in (path, True):
        trainer = build_trainer(str(tmp_path / "one"), **RUN, **larger)
        with pytest.raises(
            IncompatibleCheckpointError,
            match=r"^TrainingArguments\(on_changed_run='warn'\) goes on with this run's options; on_changed_run=auto "
            r"\(default\) refuses this:\n"
            r".*checkpoint-3 is of a run whose updates had 8 samples = 4 x 2 x 1 \(micro-batch x accumulation x "
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
    assert "it goes on at the same sample and ends after update 9; set gradient_accumulation_steps=1" in caplog.text
    # 28 of 52 samples were left in the epoch: 16 and 12.
    rest = [row for number in range(4, 8) for row in one["ids"][number]]
    assert sorted(warned["ids"][4] + warned["ids"][5]) == sorted(rest)
    # Other factors of the same number are the same run.
    same = {"per_device_train_batch_size": 8, "on_changed_run": "refuse"}
    assert recorded(str(tmp_path / "again"), path, (), **same)["ids"] == {
        number: row for number, row in one["ids"].items() if number > 3
    }


def resume_both(output_dir: str, path: str) -> list[dict[str, Any]]:
    return [
        refused(f"{output_dir}/{action}", path, on_changed_run=action, num_train_epochs=1, **EIGHT)
        for action in ("refuse", "auto")
    ]


@pytest.mark.multirank
@pytest.mark.timeout(120)
def test_r16_on_other_ranks_the_setting_that_keeps_the_samples_is_named(tmp_path: Path, caplog) -> None:
    build_trainer(str(tmp_path / "one"), options={"callbacks": [SaveAt(3)]}, **RUN, **EIGHT).train()

    for strict, warned in run_ranks(resume_both, 2, str(tmp_path), str(tmp_path / "one" / "checkpoint-3"), timeout=110):
        assert "had 8 samples = 4 x 2 x 1 (micro-batch" in strict["error"]
        assert "and this run's have 16 samples = 4 x 2 x 2 (micro-batch" in strict["error"]
        ways = "gradient_accumulation_steps=1 (now 2) or per_device_train_batch_size=2 (now 4)"
        assert f"in an update: set {ways}" in strict["error"]
        assert strict["is_same"]
        assert warned["error"] == ""
        assert warned["step"] == 3 + 2  # 28 samples are left, in updates of 16

    run_ranks(save_on_two, 2, str(tmp_path / "two"), timeout=110)
    refusals = run_ranks(refused, 2, str(tmp_path / "again"), str(tmp_path / "two" / "checkpoint-2"), **EIGHT)
    for result in refusals:  # as many ranks as wrote it
        assert "had 8 samples = 4 x 1 x 2 (micro-batch" in result["error"]
        assert "and this run's have 16 samples = 4 x 2 x 2 (micro-batch" in result["error"]
        assert result["is_same"]


def save_on_two(output_dir: str) -> None:
    build_trainer(output_dir, max_steps=2, save_strategy="steps", save_steps=2, **RUN).train()


def test_r16_the_size_that_a_search_had_found_is_no_change(tmp_path: Path) -> None:
    found = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "auto_find_batch_size": True}
    found |= {"compat": "transformers"}  # else an update keeps its samples, whatever is found
    build_trainer(tmp_path, **found).train()
    path = str(tmp_path / "checkpoint-1")

    again = build_trainer(tmp_path, **found | {"per_device_train_batch_size": 16, "on_changed_run": "refuse"})
    again.train(resume_from_checkpoint=path)
    assert again.state.train_batch_size == 4

    result = refused(str(tmp_path), path, **found | {"gradient_accumulation_steps": 2, "on_changed_run": "auto"})
    assert "and this run's have 8 samples = 4 x 2 x 1" in result["error"]
    assert result["is_same"]


@pytest.mark.parametrize("action", ["auto", "refuse"])
def test_r16_a_search_that_goes_below_the_size_of_the_checkpoint_goes_on_unless_it_is_refused(
    tmp_path: Path, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "auto_find_batch_size": True}
    found |= {"compat": "transformers"}  # else an update keeps its samples, whatever is found
    build_trainer(tmp_path, **found).train()
    trainer = build_trainer(tmp_path / "again", on_changed_run=action, **found)
    step = trainer.training_step

    def training_step(model: Any, inputs: Any, *rest: Any) -> Any:
        if len(inputs["input_ids"]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return step(model, inputs, *rest)

    trainer.training_step = training_step
    if action == "refuse":
        with pytest.raises(IncompatibleCheckpointError, match=r"have 3 samples = 3 x 1 x 1 .* set "):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        return
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.state.global_step == 4
    assert "had 4 samples = 4 x 1 x 1 (micro-batch" in caplog.text
    assert "and this run's have 3 samples = 3 x 1 x 1 (micro-batch" in caplog.text
    # Its own checkpoints are of a run with that size.
    last = build_trainer(tmp_path / "again", on_changed_run="refuse", **found)
    last.train(resume_from_checkpoint=str(tmp_path / "again" / "checkpoint-3"))
    assert last._train_batch_size == last.state.train_batch_size == 3


@pytest.mark.parametrize("step", [3, 7])
def test_r16_the_order_and_the_streams_of_a_checkpoint_go_on_whatever_the_seeds(
    tmp_path: Path, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    # Within an epoch, and between two.
    whole = recorded(str(tmp_path / "one"), steps=(step,), dropout=0.1, **EIGHT)
    path = str(tmp_path / "one" / f"checkpoint-{step}")

    other = recorded(
        str(tmp_path / "again"), path, (), dropout=0.1, seed=7, data_seed=5, on_changed_run="refuse", **EIGHT
    )

    assert other["ids"] == {number: row for number, row in whole["ids"].items() if number > step}
    assert other["losses"] == whole["losses"]
    assert other["noise"] == whole["noise"]
    kept = "(without effect, the run goes on with the checkpoint's)"
    assert f"otherwise: data.data_seed: null -> 5 {kept}, seed: 42 -> 7 {kept}\n" in caplog.text


def test_r16_another_seed_for_an_epoch_that_begins_anew_is_named_and_refused_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorded(str(tmp_path / "one"), steps=(3,), **EIGHT)
    path = str(tmp_path / "one" / "checkpoint-3")
    anew = {"ignore_data_skip": True, "seed": 7, **EIGHT}

    result = refused(str(tmp_path / "again"), path, on_changed_run="refuse", **anew)
    assert result["is_same"]
    error = result["error"]
    assert "checkpoint-3 is of a run whose order of samples has seed 42, and with ignore_data_skip=True" in error
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
