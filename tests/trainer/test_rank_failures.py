"""A rank of a Trainer that fails, or is killed, is named by the others, who do not wait for their timeout."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest
from transformers import TrainerCallback

from accel_trainer.errors import RemoteRankError
from accel_trainer.runtime import rank_watch
from accel_trainer.runtime.process import find_rank
from tests.ranks import RankFailure, run_ranks
from tests.trainer_jobs import build_trainer


def fail_at(place: str, wanted: str) -> None:
    if place == wanted and find_rank() == 1:
        raise ValueError(f"no {place}")


class Failing(TrainerCallback):
    """Fails on rank 1 in one event."""

    def __init__(self, event: str) -> None:
        self.event = event

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        fail_at("on_step_end", self.event)

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        fail_at("on_log", self.event)

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        fail_at("on_evaluate", self.event)

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        fail_at("on_save", self.event)

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        fail_at("on_epoch_end", self.event)


def build(directory: str, strategy: str, place: str) -> Any:
    rank_watch._POLL_SECONDS = 0.1
    failing = Failing(place)

    def metrics(prediction: Any) -> dict[str, float]:
        fail_at("compute_metrics", failing.event)
        return {"score": 1.0}

    return build_trainer(
        directory, strategy=strategy, samples=16, eval_samples=4, eval_strategy="steps", eval_steps=1, save_steps=1,
        save_strategy="steps", num_train_epochs=1, options={"callbacks": [failing], "compute_metrics": metrics},
    )  # fmt: skip


def train(directory: str, strategy: str, place: str) -> None:
    build(directory, strategy, place).train()


def failures_of(directory: Any, strategy: str, place: str, fault: str = "") -> dict[int, str]:
    env = {"ACCEL_TRAINER_TEST_MODE": "1", "ACCEL_TRAINER_FAULT": fault}
    with pytest.raises(RankFailure) as failed:
        run_ranks(train, 2, str(directory), strategy, place, env=env, timeout=60)
    return failed.value.failures


@pytest.mark.parametrize(
    ("strategy", "point", "step"),
    [
        ("ddp", "data.next", 1),
        ("ddp", "train.forward", 1),
        ("ddp", "train.backward", 1),
        ("ddp", "train.opt", 1),
        ("fsdp", "eval.batch", 0),
        ("ddp", "eval.gather", 1),
        ("fsdp", "data.next", 1),
        ("fsdp", "train.forward", 1),
        ("fsdp", "train.backward", 1),
        ("fsdp", "eval.gather", 1),
    ],
)
def test_an_error_of_one_rank_reaches_the_other(tmp_path, strategy: str, point: str, step: int):
    failures = failures_of(tmp_path, strategy, "", f"raise@{point}:rank=1:step={step}")

    assert re.search(
        rf"RemoteRankError: rank 1 failed.* \(update \d, .*\): RuntimeError: fault injected at {point}\. "
        r"Rank 0 stopped with it, in \w+ \(update \d, ",
        failures[0],
    ), failures[0]
    assert "RemoteRankError" not in failures[1]
    assert f"RuntimeError: fault injected at {point}" in failures[1]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("event", ["on_step_end", "on_log", "on_evaluate"])
def test_an_error_of_a_callback_reaches_the_other_rank(tmp_path, strategy: str, event: str):
    failures = failures_of(tmp_path, strategy, event)

    section = f".*callback {event}"
    assert re.search(
        rf"RemoteRankError: rank 1 failed in {section} \(update 1, fail_at \(.*\)\): ValueError: no {event}\. Rank 0 ",
        failures[0],
    ), failures[0]
    assert f"ValueError: no {event}" in failures[1]


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        ("ddp", "kill9@train.backward:rank=1:step=1"),
        ("fsdp", "kill9@data.next:rank=1:step=1"),
        ("fsdp", "exit0@eval.gather:rank=1"),
        ("ddp", "kill9@save.before_vote:rank=1"),
    ],
)
def test_a_rank_that_is_gone_is_named(tmp_path, strategy: str, fault: str):
    failures = failures_of(tmp_path, strategy, "", fault)

    assert re.search(r"RemoteRankError: rank 1 is gone without a word \(killed, or its machine is\)", failures[0])


def hang(directory: str) -> None:
    """Sleep in a callback on rank 1."""
    os.dup2(os.open(f"{directory}/{find_rank()}.txt", os.O_WRONLY | os.O_CREAT), 2)
    trainer = build(directory, "fsdp", "")
    trainer.add_callback(Sleeping())
    trainer.train()


class Sleeping(TrainerCallback):
    """Never comes back from the end of update 2 on rank 1."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and find_rank() == 1:
            time.sleep(60)


def test_r10_a_callback_that_never_returns_ends_the_job_at_its_limit(tmp_path):
    env = {"ACCEL_TRAINER_HANG__STEP_SECONDS": "1", "ACCEL_TRAINER_HANG__USER_SECONDS": "2"}

    with pytest.raises(RankFailure) as failed:
        run_ranks(hang, 2, str(tmp_path), env=env, timeout=60)

    assert failed.value.failures == {rank: f"rank {rank} died without an answer: exit code 75" for rank in range(2)}
    printed = "".join((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert re.search(
        r"HangError: no progress for \d+ s, the limit there is [\d.]+ s\. rank 0 waits in \w+ \(number \d+ of "
        r"the group\) for rank 1, which has not arrived there:\n  rank 1 is in callback on_step_end, on_step_end "
        r"\(.*\): update 2, ",
        printed,
    ), printed


def fail_and_go_on(directory: str, strategy: str) -> list[tuple[str, str, float]]:
    """Fail where the ranks can vote, and evaluate afterwards."""
    told = []
    for place in ("compute_metrics", "on_save", "on_epoch_end"):
        trainer = build(directory, strategy, place)
        with pytest.raises((ValueError, RemoteRankError)) as caught:
            trainer.train()
        trainer.compute_metrics = None
        told.append((type(caught.value).__name__, str(caught.value), trainer.evaluate()["eval_loss"]))
    return told


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_where_the_ranks_can_vote_the_group_lives_on(tmp_path, strategy: str):
    told, failing = run_ranks(fail_and_go_on, 2, str(tmp_path), strategy, timeout=100)

    places = ("compute_metrics()", "on_save", "on_epoch_end")
    for place, (name, message, loss), own in zip(places, told, failing, strict=True):
        error = f"no {place.rstrip('()')}"
        assert name == "RemoteRankError"
        assert message.startswith(f"rank 1 failed in {place}: ValueError: {error}. This rank (0) stopped with it")
        assert own == ("ValueError", error, loss)
