"""A save that fails on one rank fails on all: nothing is published, and nobody waits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.trainer.checkpoint.test_checkpoints import refusal
from tests.trainer_jobs import build_trainer, train


def fail(directory: str) -> None:
    raise OSError("no space left for the random streams")


def failing(directory: Path) -> None:
    trainer = build_trainer(directory, strategy="ddp", save_strategy="steps", save_steps=2)
    if trainer.args.process_index == 1:
        trainer._save_rng_state = fail
    trainer.train()


def failing_between(directory: Path, strategy: str) -> None:
    trainer = build_trainer(directory, strategy=strategy, save_strategy="steps", save_steps=2)
    save_model = trainer.save_model

    def save_and_more(directory: str, _internal_call: bool = False) -> None:
        save_model(directory, _internal_call)
        if trainer.is_world_process_zero():
            fail(directory)

    trainer.save_model = save_and_more
    trainer.train()


def failing_push(directory: Path, on_save_error: str) -> int:
    options = {"save_strategy": "steps", "save_steps": 4, "on_save_error": on_save_error}
    trainer = build_trainer(directory, strategy="ddp", samples=32, per_device_train_batch_size=2, **options)
    trainer.args.push_to_hub = True
    trainer._push_from_checkpoint = lambda _: fail("") if trainer.is_world_process_zero() else None
    trainer.train()
    return trainer.state.global_step


def fail_on_two(folder: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = {
        "failing": refusal(failing, folder / "failing"),
        "failing push": refusal(failing_push, folder / "failing-push", "raise"),
        "push": failing_push(folder / "push", "warn"),
    }
    for strategy in ("fsdp", "fsdp_sharded"):
        found[strategy, "failing between"] = refusal(failing_between, folder / strategy, strategy)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("failing")
    (directory / "failing" / "checkpoint-2").mkdir(parents=True)
    (directory / "failing" / "checkpoint-2" / "of_an_earlier_run.txt").touch()
    return directory


@pytest.fixture(scope="module")
def on_two(folder) -> list[dict[Any, Any]]:
    return run_ranks(fail_on_two, 2, folder, timeout=100)


@pytest.mark.multirank
def test_no_rank_waits_for_one_that_could_not_push(folder, on_two):
    own, told = (found["failing push"] for found in on_two)
    assert own == "OSError: no space left for the random streams"
    assert told.startswith("RemoteRankError: rank 0 failed in push of ")
    assert os.listdir(folder / "failing-push") == ["checkpoint-4"]
    assert [found["push"] for found in on_two] == [8, 8]
    assert sorted(os.listdir(folder / "push")) == ["checkpoint-4", "checkpoint-8"]


@pytest.mark.multirank
def test_a_checkpoint_appears_when_every_rank_has_written_its_part(folder, on_two):
    directory = folder / "failing"
    assert all("no space left for the random streams" in found["failing"] for found in on_two)
    assert os.listdir(directory) == ["checkpoint-2"]
    assert os.listdir(directory / "checkpoint-2") == ["of_an_earlier_run.txt"]
    train(directory, strategy="single", save_strategy="steps", save_steps=2)
    assert "of_an_earlier_run.txt" not in os.listdir(directory / "checkpoint-2")


@pytest.mark.multirank
def test_no_rank_waits_for_one_that_could_not_write_the_model(folder, on_two):
    for strategy in ("fsdp", "fsdp_sharded"):
        own, told = (found[strategy, "failing between"] for found in on_two)
        assert own == "OSError: no space left for the random streams"
        assert told.startswith("RemoteRankError: rank 0 failed in save of ")
        assert "no space left for the random streams" in told
        assert os.listdir(folder / strategy) == []
