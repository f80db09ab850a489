"""A rank of a Trainer that fails, or is killed, is named by the others, who do not wait for their timeout."""

from __future__ import annotations

import re
from typing import Any

import pytest

from accel_trainer.errors import RemoteRankError
from accel_trainer.runtime import rank_watch
from accel_trainer.runtime.process import find_rank
from tests.cells import beyond
from tests.fault_injection import injected
from tests.fault_matrix import build_tests
from tests.ranks import RankFailure, run_ranks
from tests.trainer_jobs import Hearing, build_trainer


def fail_at(place: str, wanted: str) -> None:
    if place == wanted and find_rank() == 1:
        raise ValueError(f"no {place}")


class Failing(Hearing):
    """Fails on rank 1 in one event."""

    def __init__(self, event: str) -> None:
        self.event = event

    def hear(self, event: str, *args: Any, **kwargs: Any) -> None:
        fail_at(event, self.event)


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


# Of the matrix that `make test-faults` runs: each fault, and each place.
observed, test_a_fault_of_one_rank_ends_a_trainer_as_promised = build_tests(
    "Trainer",
    "raise-data-1-ddp raise-forward-0-fsdp2 raise-save-0-fsdp2 kill9-backward-0-ddp kill9-save-1-ddp "
    "exit0-gather-1-fsdp2 sleep-callback-1-fsdp2 stop-eval-1-fsdp2 gil-optimizer-1-ddp term-load-1-fsdp2 "
    "nan-load-0-ddp",
)


@pytest.mark.parametrize(("strategy", "event"), [("fsdp", "on_log"), ("ddp", "on_evaluate")])
def test_an_error_of_a_callback_reaches_the_other_rank(tmp_path, strategy: str, event: str):
    with pytest.raises(RankFailure) as failed:
        run_ranks(train, 2, str(tmp_path), strategy, event, timeout=60)
    failures = failed.value.failures

    section = f".*callback {event}"
    assert re.search(
        rf"RemoteRankError: rank 1 failed in {section} \(update 1, fail_at \(.*\)\): ValueError: no {event}\. Rank 0 ",
        failures[0],
    ), failures[0]
    assert f"ValueError: no {event}" in failures[1]


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


@pytest.mark.parametrize("strategy", ["ddp", beyond("fsdp")])
def test_where_the_ranks_can_vote_the_group_lives_on(tmp_path, strategy: str):
    told, failing = run_ranks(fail_and_go_on, 2, str(tmp_path), strategy, timeout=100)

    places = ("compute_metrics()", "on_save", "on_epoch_end")
    for place, (name, message, loss), own in zip(places, told, failing, strict=True):
        error = f"no {place.rstrip('()')}"
        assert name == "RemoteRankError"
        assert message.startswith(f"rank 1 failed in {place}: ValueError: {error}. This rank (0) stopped with it")
        assert own == ("ValueError", error, loss)


# --- faults strike at the points of training and evaluation ---


def recorded(output_dir: Any, seen: list[str]) -> None:
    """Train two updates and evaluate two batches; say what was done."""

    class Steps(Hearing):
        def hear(self, event: str, *args: Any, **kwargs: Any) -> None:
            if event == "on_optimizer_step":
                seen.append("step")

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append("metrics")
        return {}

    trainer = build_trainer(
        output_dir, samples=8, eval_samples=4, per_device_eval_batch_size=2, eval_strategy="epoch",
        options={"callbacks": [Steps], "compute_metrics": metrics},
    )  # fmt: skip
    read = trainer.get_batch_samples

    def get_batch_samples(*args: Any) -> Any:
        samples = read(*args)
        seen.append("batch")
        return samples

    trainer.get_batch_samples = get_batch_samples
    trainer.model.register_forward_hook(lambda model, *_: seen.append("forward" if model.training else "prediction"))
    trainer.model.lm_head.weight.register_post_accumulate_grad_hook(lambda _: seen.append("backward"))
    trainer.train()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[str]:
    """What a run without faults does."""
    seen: list[str] = []
    recorded(tmp_path_factory.mktemp("whole"), seen)
    return seen


@pytest.mark.parametrize(
    ("point", "missing"),
    [
        ("data.next", "batch"),
        ("train.forward", "forward"),
        ("train.backward", "backward"),
        ("train.opt", "step"),
        ("eval.batch", "prediction"),
        ("eval.gather", "metrics"),
    ],
)
def test_a_fault_strikes_a_trainer_at_its_point(tmp_path, whole, point: str, missing: str):
    seen: list[str] = []

    with injected(f"raise@{point}:step=1"), pytest.raises(RuntimeError, match=rf"fault injected at {point}"):
        recorded(tmp_path, seen)

    # The second time; predictions are gathered first, and labels next, before the metrics.
    assert seen == whole[: len(seen)]
    assert whole[len(seen)] == missing
    assert seen.count(missing) == (0 if point == "eval.gather" else 1)
