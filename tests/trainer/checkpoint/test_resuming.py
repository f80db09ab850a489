"""Resuming: from the newest good checkpoint, at the next sample, on any number of processes."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import Dataset, IterableDataset
from transformers import TrainerCallback

from accel_trainer.checkpoint import disk
from accel_trainer.checkpoint.adoption import adopt_weights
from accel_trainer.errors import (
    CheckpointLockedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DiskFullError,
    IncompatibleCheckpointError,
    ProcessGroupError,
)
from accel_trainer.launch.cli import main
from accel_trainer.runtime import rank_watch
from tests.cells import beyond
from tests.checkpoint.test_hostile_files import forge
from tests.fault_injection import fault_env
from tests.publishing import flip
from tests.ranks import RankFailure, map_jobs, run_ranks
from tests.trainer_jobs import SaveAt, SaveWithin, TokenDataset, build_model, build_trainer, on_ranks, summary, train

# 7 micro-batches of 4 samples, updates of 8: 4 in an epoch, the last of 4 samples.
SAMPLES, UPDATES = 28, 4
RUN: dict[str, Any] = {"samples": SAMPLES, "num_train_epochs": 2, "model": "gpt2"}
ROWS = {tuple(row["input_ids"].tolist()): index for index, row in enumerate(TokenDataset(SAMPLES).rows)}


class SaveWithNote(SaveAt):
    """Puts a file of its own into what was saved."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            Path(args.output_dir, f"checkpoint-{state.global_step}", "note.txt").write_text("of a callback")


def recorded(
    output_dir: str, resume: Any = None, steps: tuple[int, ...] = (2, 4), callbacks: tuple[Any, ...] = (), **build: Any
) -> dict[str, Any]:
    """Train, and return the samples of every update, of all ranks, by its number."""
    trainer = build_trainer(output_dir, options={"callbacks": [SaveWithNote(*steps), *callbacks]}, **{**RUN, **build})
    ids: dict[int, list[int]] = {}
    training_step = trainer.training_step

    def step(model: Any, inputs: Any, *rest: Any) -> Any:
        rows = trainer.accelerator.gather(inputs["input_ids"])
        ids.setdefault(trainer.state.global_step + 1, []).extend(ROWS[tuple(row)] for row in rows.tolist())
        return training_step(model, inputs, *rest)

    trainer.training_step = step
    trainer.train(resume_from_checkpoint=resume)
    noise = torch.rand(1).item()
    return {**summary(trainer), "ids": {number: sorted(row) for number, row in ids.items()}, "noise": noise}


def on_two(directory: Path) -> dict[str, Any]:
    """What two ranks do: a whole run, and resumes of what one process and two wrote."""
    window = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    found = {"whole": recorded(str(directory / "two"), **window)}
    for source, step in (("two", 2), ("one", 2), ("one", 4)):
        path = str(directory / source / f"checkpoint-{step}")
        found[f"{source}-{step}"] = recorded(str(directory / "again"), path, (), **window)
    return found


@pytest.mark.multirank
@pytest.mark.timeout(120)
def test_r7_samples_and_losses_go_on_on_another_number_of_processes(tmp_path: Path, info_log) -> None:
    one = recorded(str(tmp_path / "one"), per_device_train_batch_size=4, gradient_accumulation_steps=2)
    two, other = run_ranks(on_two, 2, tmp_path, timeout=110)
    for step in (2, 4):
        path = str(tmp_path / "two" / f"checkpoint-{step}")
        # Larger batches, no accumulation, workers: the updates have the same samples.
        options = {"per_device_train_batch_size": 8, "dataloader_num_workers": 2}
        two[f"1 of two-{step}"] = recorded(str(tmp_path / "again"), path, (), **options)

    for epoch in range(2):
        numbers = range(epoch * UPDATES + 1, (epoch + 1) * UPDATES + 1)
        assert sorted(row for number in numbers for row in one["ids"][number]) == list(range(SAMPLES))
    for name, result in two.items():
        begin = 0 if name == "whole" else int(name.rpartition("-")[2])
        assert result["ids"] == {number: row for number, row in one["ids"].items() if number > begin}, name
        np.testing.assert_allclose(result["losses"], one["losses"], rtol=1e-5, err_msg=name)
    # Streams of two ranks differ, and are new where the ranks are not those that wrote.
    assert two["one-2"]["noise"] != other["one-2"]["noise"]
    reader = "written by 2 process(es), read by 1, contents verified; random streams new, from seed 42, update and rank"
    assert f"checkpoint-4, as named; {reader}; data goes on at the next sample" in info_log.text

    changed = recorded(str(tmp_path / "again"), str(tmp_path / "two" / "checkpoint-2"), ())
    assert f"ends after update {2 + 3 + 7}" in info_log.text
    rest = [row for number in range(3, UPDATES + 1) for row in one["ids"][number]]
    assert sorted(row for number in range(3, 6) for row in changed["ids"][number]) == sorted(rest)
    assert max(changed["ids"]) == changed["step"] == 12


class EndEpoch(TrainerCallback):
    """Ends each epoch after its second update."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step % 2 == 0


@pytest.mark.parametrize(("steps", "options"), [((2,), {}), ((), {"save_strategy": "epoch"})])
def test_an_epoch_that_a_callback_has_ended_is_not_gone_on_with(
    tmp_path: Path, steps: tuple[int, ...], options: dict[str, Any]
) -> None:
    options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "dropout": 0.1}
    whole = recorded(str(tmp_path), None, steps, (EndEpoch(),), **options)
    resumed = recorded(str(tmp_path), str(tmp_path / "checkpoint-2"), (), (EndEpoch(),), **options)
    assert resumed["ids"] == {number: rows for number, rows in whole["ids"].items() if number > 2}
    assert (resumed["step"], resumed["losses"], resumed["noise"]) == (4, whole["losses"], whole["noise"])


class Uneven(Dataset):
    """Rows of three to eleven tokens; the first ones are the row's number."""

    def __init__(self) -> None:
        lengths = torch.randint(3, 12, (480,), generator=torch.Generator().manual_seed(0)).tolist()
        self.rows = [[index // 32, index % 32, *[3] * (length - 2)] for index, length in enumerate(lengths)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[index]}


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([row["input_ids"] + [0] * (11 - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "labels": ids}


def grouped(output_dir: str, resume: str | None = None, **changes: Any) -> dict[int, list[int]]:
    """Train 8 updates over rows that are grouped by length; return the rows of each, of all ranks."""
    trainer = build_trainer(
        output_dir, model="gpt2", max_steps=8, train_sampling_strategy="group_by_length",
        options={"callbacks": [SaveAt(3)], "data_collator": pad}, **changes,
    )  # fmt: skip
    trainer.train_dataset = Uneven()
    seen: dict[int, list[int]] = {}
    step = trainer.training_step

    def training_step(model: Any, inputs: Any, *rest: Any) -> Any:
        places = trainer.accelerator.gather(inputs["input_ids"][:, :2]).tolist()
        seen.setdefault(trainer.state.global_step + 1, []).extend(32 * high + low for high, low in places)
        return step(model, inputs, *rest)

    trainer.training_step = training_step
    trainer.train(resume_from_checkpoint=resume)
    return {number: sorted(rows) for number, rows in seen.items()}


@pytest.mark.multirank
@pytest.mark.timeout(120)
def test_rows_grouped_by_length_go_on_in_their_order_with_other_factors_of_an_update(tmp_path: Path) -> None:
    whole = grouped(str(tmp_path / "one"), per_device_train_batch_size=2, gradient_accumulation_steps=2)
    rest, path = {number: rows for number, rows in whole.items() if number > 3}, str(tmp_path / "one" / "checkpoint-3")

    # Groups are of 50 times the batch and the accumulation of one process: 200 rows, and 100 of these.
    for seen in run_ranks(grouped, 2, str(tmp_path / "two"), path, per_device_train_batch_size=2, timeout=110):
        assert seen == rest
    again = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "on_changed_run": "warn"}
    smaller = grouped(str(tmp_path / "again"), path, **again)
    assert sorted(smaller[4] + smaller[5]) == rest[4]


@pytest.mark.parametrize("event", ["on_step_begin", "on_substep_end", "on_pre_optimizer_step"])
def test_a_save_within_an_update_goes_on_with_the_samples_of_that_update(tmp_path: Path, event: str) -> None:
    callback = SaveWithin(event, 2)
    options = {**RUN, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    callback.trainer = build_trainer(tmp_path, options={"callbacks": [callback]}, **options)
    callback.trainer.train()

    resumed = recorded(str(tmp_path / "again"), str(tmp_path / "checkpoint-2"), (), **options)

    assert min(resumed["ids"]) == 3
    assert resumed["losses"] == summary(callback.trainer)["losses"]


class Stream(IterableDataset):
    """Rows in a fixed order, of which a run with `max_steps` makes several passes."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(TokenDataset(SAMPLES).rows[:12])


def test_a_stream_goes_on_in_its_second_pass(tmp_path: Path) -> None:
    options = {"max_steps": 10, "per_device_train_batch_size": 2, "model": "llama"}
    runs = []
    for resume in (None, str(tmp_path / "checkpoint-8")):
        trainer = build_trainer(tmp_path, options={"callbacks": [SaveAt(8)]}, **options)
        trainer.train_dataset = Stream()
        trainer.train(resume_from_checkpoint=resume)
        runs.append(summary(trainer))

    assert runs[1]["losses"] == runs[0]["losses"]
    assert runs[1]["step"] == 10


@pytest.mark.parametrize("dataset", [None, Stream()], ids=["rows", "stream"])
def test_a_run_that_is_over_trains_no_more_when_it_is_started_again(tmp_path: Path, dataset: Stream | None) -> None:
    results = []
    for resume in (False, True, True):
        trainer = build_trainer(tmp_path, max_steps=3, save_strategy="steps", save_steps=2)
        trainer.train_dataset = dataset or trainer.train_dataset
        trainer.train(resume_from_checkpoint=resume)
        saved = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
        results.append((trainer.state.global_step, trainer.state.epoch, saved, summary(trainer)))

    finished, *again = results
    assert finished[0] == 3
    assert finished[2] == ["checkpoint-2", "checkpoint-3"]
    for result in again:
        assert result[:3] == finished[:3]
        assert result[3]["losses"] == finished[3]["losses"]
        for name, value in finished[3]["weights"].items():
            np.testing.assert_array_equal(result[3]["weights"][name], value, err_msg=name)


def test_the_newest_good_checkpoint_is_taken_and_bad_ones_are_kept(tmp_path: Path, info_log) -> None:
    whole = recorded(str(tmp_path), steps=(2, 4, 6, 8), dropout=0.1)
    copy = shutil.copytree(tmp_path / "checkpoint-8", tmp_path / "copy")
    flip(tmp_path / "checkpoint-8" / "optimizer.pt")
    (tmp_path / "checkpoint-6" / "rng_state.pth").unlink()
    (tmp_path / "checkpoint-4" / "COMMITTED").unlink()
    with zipfile.ZipFile(tmp_path / "checkpoint-2" / "traced.pt", "w", zipfile.ZIP_DEFLATED) as exported:
        exported.writestr("code", "of a callback" * 100)

    with pytest.raises(CorruptCheckpointError, match=r"checkpoint-8/optimizer.pt was changed after the save"):
        recorded(str(tmp_path), str(tmp_path / "checkpoint-8"))
    resumed = recorded(str(tmp_path), True, (), dropout=0.1)

    assert min(resumed["ids"]) == 3
    assert resumed["losses"] == whole["losses"]
    kept = sorted(path.name[: len("_bad-checkpoint-N")] for path in tmp_path.glob("_bad-*"))
    assert kept == ["_bad-checkpoint-4", "_bad-checkpoint-6", "_bad-checkpoint-8"]
    assert "optimizer.pt was changed after the save" in info_log.text
    line = next(record.message for record in info_log.records if record.message.startswith("resuming at update 2"))
    for step, reason in ((8, "was changed"), (6, "rng_state.pth is missing"), (4, "COMMITTED is missing")):
        assert f"passed over checkpoint-{step}: " in line
        assert reason in line
    # What a reader would take may not be added, as callbacks may add other files.
    (copy / "optimizer.bin").write_bytes((copy / "optimizer.pt").read_bytes())
    with pytest.raises(CorruptCheckpointError, match=r"holds 'optimizer.bin', which its manifest does not name"):
        recorded(str(tmp_path), str(copy))
    for path in tmp_path.glob("checkpoint-*"):
        shutil.rmtree(path)
    with pytest.raises(CorruptCheckpointError, match=r"none of the checkpoints in .* is good; those that are not are"):
        recorded(str(tmp_path), True)
    with pytest.raises(ValueError, match=r"No valid checkpoint found in output directory"):
        recorded(str(tmp_path / "new"), True)


def test_a_checkpoint_of_the_stock_trainer_is_taken_as_far_as_it_is_whole(tmp_path: Path, caplog) -> None:
    whole = recorded(str(tmp_path), steps=(2, 4, 6))
    for path in tmp_path.glob("checkpoint-*"):
        for name in ("manifest.json", "COMMITTED", "note.txt"):
            (path / name).unlink()
    torn = tmp_path / "checkpoint-6" / "optimizer.pt"
    os.truncate(torn, torn.stat().st_size // 2)
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text("")

    resumed = recorded(str(tmp_path), True, ())

    assert min(resumed["ids"]) == 3
    assert resumed["ids"].items() <= whole["ids"].items()
    assert resumed["losses"] == whole["losses"]
    assert "optimizer.pt ends too early" in caplog.text
    assert "was not written by accel_trainer: it has no manifest.json, so that its contents cannot" in caplog.text
    assert "samples are repeated or left out" not in caplog.text
    (tmp_path / "checkpoint-2" / "rng_state.pth").unlink()
    recorded(str(tmp_path), str(tmp_path / "checkpoint-2"), (), per_device_train_batch_size=8)
    assert "was written after 0.286 epochs, and its number of updates is 0.500 epochs of this run" in caplog.text
    assert "has no rng_state.pth: random streams do not go on as they were" in caplog.text
    (tmp_path / "checkpoint-2" / "optimizer.pt").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"has the state of the schedule and no optimizer"):
        recorded(str(tmp_path), str(tmp_path / "checkpoint-2"))


def test_a_place_in_another_dataset_is_none_in_this(tmp_path: Path, caplog) -> None:
    recorded(str(tmp_path), steps=(3, 7), num_train_epochs=1)
    for step, place in ((3, "12 of epoch 0"), (7, "28 of epoch 0")):
        options: dict[str, Any] = {"resume": str(tmp_path / f"checkpoint-{step}"), "steps": (), "samples": 24}
        found = f"dataset of 28 samples, after {place}, and this run's has 24"
        with pytest.raises(
            IncompatibleCheckpointError, match=rf"{found}: .*Resume with .* 28, or set ignore_data_skip=True"
        ):
            recorded(str(tmp_path), **options)
        resumed = recorded(str(tmp_path), ignore_data_skip=True, **options)

        assert list(resumed["ids"]) == list(range(step + 1, 13))  # two epochs of six updates
        begun = [row for number in list(resumed["ids"])[:5] for row in resumed["ids"][number]]
        assert len(set(begun)) == 20
        assert f"{found}: training begins an epoch of it" in caplog.text


def test_r8_a_checkpoint_without_random_streams_is_an_error(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, save_strategy="steps", save_steps=4)
    trainer._save_rng_state = lambda directory: None
    trainer.train()

    with pytest.raises(CheckpointNotFoundError, match=r"rng_state.pth is missing, the random streams of rank 0"):
        train(tmp_path, str(tmp_path / "checkpoint-4"), strategy="single")


def chosen(output_dir: str, strategy: str, **build: Any) -> dict[str, Any]:
    trainer = build_trainer(output_dir, strategy=strategy, **build)
    trainer.train(resume_from_checkpoint=True)
    begun_at, lost = trainer.run_checkpoints.metrics.begun_at, trainer.checkpoint_metrics["lost_steps"]
    return {**summary(trainer), "begun_at": begun_at, "reached": begun_at + lost}


KILLED: dict[str, Any] = {
    "model": "gpt2", "dropout": 0.1, "samples": 24, "per_device_train_batch_size": 2, "save_strategy": "steps",
    "save_steps": 2, "save_total_limit": 1,
}  # fmt: skip


# Where, the checkpoint that is resumed from, and the last update that was done.
KILLS = [
    ("ddp", "save.mid_shard:rank=0:step=4", 2, 4),
    ("fsdp_sharded", "save.after_rename:rank=0:step=4", 4, 4),
    ("ddp", "save.retention_rm:rank=0:step=4", 4, 4),
    # In the forward of update 6: forwards count from 0, and trainer/loss.py evaluates the first micro-batch twice more.
    ("ddp", "train.forward:rank=1:step=7", 4, 5),
    ("fsdp", "save.before_rename:step=4", 2, 4),
]
# For a Trainer as before_rename; tests/checkpoint kills the save of a loop at each point.
OTHER_KILLS = [("ddp", "save.before_vote:rank=1:step=4", 2, 4)]


def train_watched(*args: Any, **build: Any) -> None:
    rank_watch._POLL_SECONDS = 0.1  # the other rank soon finds that one is gone
    train(*args, **build)


def run_killed(folder: Path, strategy: str, point: str) -> None:
    environ = fault_env(f"kill9@{point}")
    with pytest.raises(RankFailure, match="SIGKILL"):
        run_ranks(train_watched, 2, str(folder / point), strategy=strategy, env=environ, **KILLED)


def resume_killed(folder: Path, kills: list[tuple[str, str, int, int]]) -> list[dict[str, Any]]:
    found = [chosen(str(folder / point), strategy, **KILLED) for strategy, point, *_ in kills]
    return [*found, train(str(folder / "whole"), strategy=kills[-1][0], **KILLED)]


@pytest.mark.multirank
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kills", [KILLS, beyond(OTHER_KILLS)], ids=["each kind", "another point"])
def test_r1_a_run_that_is_killed_resumes_from_the_last_good_one(
    tmp_path: Path, kills: list[tuple[str, str, int, int]]
) -> None:
    map_jobs(lambda kill: run_killed(tmp_path, *kill[:2]), kills)

    ranks = run_ranks(resume_killed, 2, tmp_path, kills, timeout=150)

    for (_, point, begun_at, reached), *results in zip(kills, *(found[:-1] for found in ranks), strict=True):
        assert [result["begun_at"] for result in results] == [begun_at] * 2, point
        assert [result["reached"] for result in results] == [reached] * 2, point
        assert [path.name for path in (tmp_path / point).iterdir()] == ["checkpoint-6"]
        state = json.loads((tmp_path / point / "checkpoint-6" / "trainer_state.json").read_text())
        assert state["global_step"] == 6
    *resumed, whole = ranks[0]
    assert resumed[-1]["losses"] == whole["losses"]


class Saves(TrainerCallback):
    """After which updates callbacks are told of a save."""

    def __init__(self) -> None:
        self.updates: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.updates.append(state.global_step)


def train_on_a_full_disk(output_dir: str) -> Any:
    """The second save meets a full disk on rank 0: once the run ends with it, once it goes on."""
    with pytest.raises((DiskFullError, ProcessGroupError)) as error:
        train(f"{output_dir}/raises", strategy="ddp", **KILLED)
    saves = Saves()
    changes = {**KILLED, "save_total_limit": 2, "on_save_error": "warn", "metric_for_best_model": "score"}
    trainer = build_trainer(
        f"{output_dir}/warns", strategy="ddp", eval_strategy="steps", eval_steps=2, eval_samples=2,
        options={"callbacks": [saves]}, **changes,
    )  # fmt: skip
    trainer.compute_metrics = lambda _: {"score": float(trainer.state.global_step == 4)}
    trainer.train()
    return str(error.value), saves.updates, trainer.state


@pytest.mark.multirank
def test_r13_a_full_disk_leaves_the_last_checkpoint_and_may_be_no_more_than_a_warning(tmp_path: Path) -> None:
    environ = fault_env("enospc@save.mid_shard:rank=0:step=4")

    (error, saves, state), (told, *_) = run_ranks(train_on_a_full_disk, 2, str(tmp_path), env=environ)

    assert "optimizer.pt" in error
    assert "rank 0 failed" in told
    assert "DiskFullError" in told
    assert sorted(path.name for path in (tmp_path / "raises").iterdir()) == ["_last_update", "checkpoint-2"]
    assert state.global_step == 6
    assert saves == [2, 6]
    # The best model was that of update 4; of those that were saved it is the one before.
    assert state.best_global_step == 4
    assert state.best_model_checkpoint == str(tmp_path / "warns" / "checkpoint-2")
    assert sorted(path.name for path in (tmp_path / "warns").iterdir()) == ["checkpoint-2", "checkpoint-6"]


@pytest.mark.parametrize("alone", [True, False])
def test_r13_a_save_that_will_not_fit_is_not_begun(tmp_path: Path, monkeypatch, alone: bool) -> None:
    trainer = build_trainer(tmp_path, save_strategy="steps", save_steps=2, save_only_model=alone, max_steps=2)
    weights = sum(parameter.nbytes for parameter in trainer.model.parameters())
    monkeypatch.setattr(disk, "_free_bytes", lambda path: weights * (1 if alone else 2))

    with pytest.raises(DiskFullError, match=r"free, and the save needs .*; nothing was written"):
        trainer.train()

    assert list(tmp_path.iterdir()) == []


def test_retention_keeps_the_best_and_the_newest_and_counts_numbers(tmp_path: Path) -> None:
    trainer = build_trainer(
        tmp_path, samples=44, eval_samples=2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        save_total_limit=3, load_best_model_at_end=True, metric_for_best_model="score", greater_is_better=True,
    )  # fmt: skip
    trainer.compute_metrics = lambda _: {"score": float(trainer.state.global_step == 3)}
    # Number 9 is written before 10, and looks newer: numbers count, not times or names.
    (tmp_path / "checkpoint-of-mine").mkdir()

    trainer.train()

    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["checkpoint-10", "checkpoint-11", "checkpoint-3", "checkpoint-of-mine"]
    assert main(["ckpt", "prune", "--keep", "1", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-11", "checkpoint-3", "checkpoint-of-mine"]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-3")


class Lock(TrainerCallback):
    """Begins a second run in the directory of the first, in another process."""

    error = ""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with pytest.raises(RankFailure) as failure:
            run_ranks(train, 1, args.output_dir, strategy="single", save_strategy="steps", save_steps=2)
        self.error = str(failure.value)


def test_r19_a_second_run_in_the_directory_is_refused(tmp_path: Path) -> None:
    lock = Lock()

    build_trainer(tmp_path, options={"callbacks": [lock]}, save_strategy="steps", save_steps=8).train()

    assert f"is written to by another run (process {os.getpid()} on" in lock.error
    assert CheckpointLockedError.__name__ in lock.error
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-8"]


def resume_from(path: str, output_dir: str, strategy: str, **build: Any) -> dict[str, Any]:
    changes = {**KILLED, "save_strategy": "no", **build}
    trainer = build_trainer(output_dir, strategy=strategy, **changes)
    trainer.train(resume_from_checkpoint=path)
    return summary(trainer)


def save_anew(checkpoint: Path) -> None:
    """Store the weights of a checkpoint in several files, as a script does that loads and saves them."""
    transformers.AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(checkpoint, max_shard_size="20KB")
    assert (checkpoint / "model.safetensors.index.json").exists()
    (checkpoint / "model.safetensors").unlink()  # the one file, which `save_pretrained` leaves there


def resume_resharded(folder: Path) -> dict[str, dict[str, Any]]:
    again, resharded = str(folder / "again"), str(folder / "resharded" / "checkpoint-4")
    return {
        "resharded to ddp": resume_from(resharded, again, "ddp", verify="off"),
        "original to fsdp": resume_from(str(folder / "run" / "checkpoint-4"), again, "fsdp"),
        "resharded to fsdp": resume_from(resharded, again, "fsdp", verify="off"),
    }


@pytest.mark.multirank
def test_a_checkpoint_whose_weights_were_resharded_loads_once_it_is_not_to_be_verified(
    tmp_path: Path, info_log
) -> None:
    whole, _ = run_ranks(train, 2, str(tmp_path / "run"), strategy="ddp", **{**KILLED, "save_total_limit": None})
    path = shutil.copytree(tmp_path / "run" / "checkpoint-4", tmp_path / "resharded" / "checkpoint-4")
    save_anew(path)

    way_out = r"this one with verify='off' \(an argument of load_state\(\) and of TrainingArguments\)"
    for verify in ("full", "size"):
        with pytest.raises(CorruptCheckpointError, match=rf"which its manifest does not name: .* or load {way_out}"):
            resume_from(str(path), str(tmp_path / "again"), "single", verify=verify)
    for found in run_ranks(resume_resharded, 2, tmp_path, timeout=110):
        assert found["resharded to ddp"]["losses"] == whole["losses"]
        assert found["resharded to fsdp"]["losses"] == found["original to fsdp"]["losses"]
        assert {each["step"] for each in found.values()} == {6}
    alone = [
        resume_from(str(each), str(tmp_path / "again"), "single", verify="off")["losses"]
        for each in (tmp_path / "run" / "checkpoint-4", path)
    ]
    assert alone[0] == alone[1]
    assert f"{path}, as named; written by 2 process(es), read by 1, not verified" in info_log.text


def test_weights_that_were_saved_anew_are_adopted_and_resumed_from(tmp_path: Path) -> None:
    whole = build_trainer(tmp_path / "run", **{**KILLED, "save_total_limit": None, "samples": 12})
    whole.train()
    path = shutil.copytree(tmp_path / "run" / "checkpoint-4", tmp_path / "anew" / "checkpoint-4")
    save_anew(path)
    with pytest.raises(CorruptCheckpointError, match=rf"saved anew: `accel-trainer ckpt adopt {path}` makes it"):
        resume_from(str(path), str(tmp_path / "again"), "single")

    assert adopt_weights(path)

    resumed = resume_from(str(path), str(tmp_path / "again"), "single", samples=12)
    assert resumed["losses"] == summary(whole)["losses"]
    flip(next(path.glob("model-00001-of-*.safetensors")))
    with pytest.raises(CorruptCheckpointError, match=r"model-00001-of-\d+.safetensors was changed after the save"):
        resume_from(str(path), str(tmp_path / "again"), "single")


def test_a_changed_file_is_refused_by_a_message_that_names_the_argument(tmp_path: Path) -> None:
    build_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1).train()
    weights = tmp_path / "checkpoint-1" / "model.safetensors"
    flip(weights)

    with pytest.raises(CorruptCheckpointError, match=r"model.safetensors was changed .* or this one with verify='off'"):
        train(tmp_path, str(weights.parent), strategy="single", max_steps=2)
    for verify in ("size", "off"):
        assert train(tmp_path, str(weights.parent), strategy="single", max_steps=2, verify=verify)["step"] == 2
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match=r"it was cut or changed .* or this one with verify='off'"):
        train(tmp_path, str(weights.parent), strategy="single", max_steps=2, verify="size")


@pytest.mark.parametrize(
    ("name", "content"),
    [("trainer_state.json", {"global_step": "many", "log_history": 3, "unknown": 1}), ("model.safetensors", [1])],
)
def test_a_checkpoint_with_fitting_checksums_that_holds_something_else_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, content: Any
) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "samples": 16}
    whole = build_trainer(tmp_path, **options)
    whole.train()
    forge(tmp_path / "checkpoint-4", name, content)

    again = build_trainer(tmp_path, **options, learning_rate=0.5)
    again.train(resume_from_checkpoint=True)

    assert "checkpoint-4 is not a good checkpoint and is passed over; it is kept as _bad-checkpoint-4" in caplog.text
    assert again.run_checkpoints.metrics.begun_at == 2
    # R16: options that are others than those of the run that saved it.
    assert "checkpoint-2 is of a run that was set up otherwise: learning_rate: 0.01 -> 0.5" in caplog.text


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three updates with a checkpoint of the last, and weights alone."""
    folder = tmp_path_factory.mktemp("run")
    train(folder, save_strategy="steps", save_steps=3, max_steps=3)
    build_model().save_pretrained(folder / "weights")
    return folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("checkpoint-9", "checkpoint-9, which does not exist; resume_from_checkpoint takes the path of a checkpoint-N"),
        ("", "which holds checkpoint-3, and is none itself; resume_from_checkpoint takes"),
        ("checkpoint-3/model.safetensors", "model.safetensors, which is a file;"),
        ("weights", "which has no trainer_state.json; .* Weights alone are loaded by from_pretrained"),
    ],
)
def test_a_path_that_names_no_checkpoint_is_refused_before_anything_is_built(run_dir: Path, name: str, message: str):
    trainer = build_trainer(run_dir)

    with pytest.raises(CheckpointNotFoundError, match=f"Can't find a valid checkpoint at .*{message}"):
        trainer.train(resume_from_checkpoint=str(run_dir / name))

    assert trainer.optimizer is None


def test_words_of_a_command_line_ask_for_the_newest_and_for_none(run_dir: Path) -> None:
    assert train(run_dir, "True", max_steps=4)["step"] == 4
    assert build_trainer(run_dir, max_steps=2).train(resume_from_checkpoint="False").global_step == 2
    with pytest.raises(CheckpointNotFoundError, match="Can't find a valid checkpoint at Truth, which does not exist"):
        build_trainer(run_dir).train(resume_from_checkpoint="Truth")


def train_whole_and_resumed(folder: str, strategy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    options: dict[str, Any] = {"strategy": strategy, "max_steps": 8, "save_strategy": "steps", "save_steps": 3}
    options |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1, "logging_steps": 4}
    whole = train(f"{folder}/whole", **options)
    return whole, train(f"{folder}/resumed", f"{folder}/whole/checkpoint-6", **options)


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["single", beyond("ddp"), "fsdp"])
def test_the_first_log_after_a_resume_is_of_all_updates_since_the_last_one(tmp_path: Path, strategy: str) -> None:
    whole, resumed = on_ranks(strategy, train_whole_and_resumed, str(tmp_path))[0]
    assert len(whole["losses"]) == 2
    assert resumed["losses"] == whole["losses"]
    size = 2 if strategy == "single" else 4
    each = train(tmp_path / "each", max_steps=8, logging_steps=1, per_device_train_batch_size=size)["losses"]
    assert whole["losses"] == pytest.approx([sum(each[:4]) / 4, sum(each[4:]) / 4], rel=1e-5)
    # Of the updates since the resume; earlier releases of transformers divide their sum by those of the whole run.
    num_updates = 2 if "_initial_global_step" in inspect.getsource(transformers.trainer) else 8
    assert resumed["train_loss"] == pytest.approx(sum(each[6:]) / num_updates, rel=1e-5)

    if strategy == "fsdp":  # on another number of ranks
        changed = {"max_steps": 8, "logging_steps": 4, "per_device_train_batch_size": 4}
        alone = train(tmp_path / "alone", str(tmp_path / "whole" / "checkpoint-6"), **changed)
        assert alone["losses"] == pytest.approx(whole["losses"], rel=1e-6)
