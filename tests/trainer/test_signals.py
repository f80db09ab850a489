"""A decision of one rank is heard by all, and acted on by all at one defined boundary: no rank waits for another."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback

from tests.cells import beyond, selected
from tests.ranks import preload, run_ranks
from tests.scenarios import refused
from tests.strategy_configs import HAS_DEEPSPEED, needs_deepspeed
from tests.trainer_jobs import Hearing, build_trainer

if HAS_DEEPSPEED:
    preload("deepspeed")

pytestmark = pytest.mark.timeout(240)  # the first test waits for the runs that all look at

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
ZERO_2 = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
# Two epochs of 5 updates: logs after 4 and 8, evaluates after 7 and 10, saves after 6 and 10.
RUN: dict[str, Any] = {
    "num_train_epochs": 2, "logging_steps": 4, "eval_strategy": "steps", "eval_steps": 7, "save_strategy": "steps",
    "save_steps": 6, "eval_samples": 4,
}  # fmt: skip

Decision = tuple[str, int, str]
"""An event, the update at which it counts, and the flag that is set there."""

# By what one rank decides: what one process would have to decide for the same run.
LATER: dict[tuple[str, int], tuple[str, int]] = {
    ("on_step_end", 2): ("on_step_end", 3),
    ("on_log", 8): ("on_step_end", 9),
    ("on_evaluate", 7): ("on_evaluate", 7),  # where the ranks exchange anyway
    ("on_save", 6): ("on_save", 6),
    ("on_epoch_end", 5): ("on_epoch_end", 5),
}


ACTS = {
    "on_log": "log", "on_evaluate": "evaluate", "on_save": "save", "on_epoch_end": "epoch", "on_train_end": "end",
}  # fmt: skip


class Decider(Hearing):
    """Sets a flag at an event after an update, on one rank or on all, and notes what the run did after which update."""

    def __init__(self, decision: Decision, rank: int | None, value: bool = True) -> None:
        self.decision, self.rank, self.value = decision, rank, value
        self.acts: list[tuple[str, int]] = []

    def hear(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if event == "on_log" and "loss" not in kwargs["logs"]:
            return
        if event in ACTS:
            self.acts.append((ACTS[event], state.global_step))
        own_event, step, flag = self.decision
        if (event, state.global_step) == (own_event, step) and self.rank in (None, args.process_index):
            setattr(control, flag, self.value)


def acts_of(folder: str, decider: Decider, global_batch: int = 8, **options: Any) -> list[tuple[str, int]]:
    """Train, and return what the run did."""
    run = {**RUN, "save_total_limit": 1, **options}
    accumulation = run.get("gradient_accumulation_steps", 1)
    trainer = build_trainer(folder, samples=5 * global_batch * accumulation, **run)
    trainer.args.per_device_train_batch_size = trainer._train_batch_size = global_batch // trainer.args.world_size
    trainer.add_callback(decider)
    trainer.train()
    return decider.acts


def decide_on_ranks(
    folder: str, decisions: list[Decision], rank: int | None, value: bool = True, **options: Any
) -> dict[Decision, list[tuple[str, int]]]:
    """Return what the runs with each of the decisions did on this rank."""
    return {decision: acts_of(folder, Decider(decision, rank, value), **options) for decision in decisions}


def run_on_two(folder: str, of_one: list[Decision], of_all: list[Decision]) -> dict[str, Any]:
    """What all tests look at that needs two ranks."""
    within: dict[str, Any] = {"strategy": "ddp", "gradient_accumulation_steps": 3}
    cleared: dict[str, Any] = {"strategy": "ddp", "value": False}
    return {
        "of one": decide_on_ranks(folder, of_one, 1, strategy="ddp"),
        "of all": decide_on_ranks(folder, of_all, None, strategy="ddp"),
        "within": [decide_on_ranks(folder, WITHIN, rank, **within) for rank in (1, None)],
        "cleared": [decide_on_ranks(folder, CLEARED, rank, **cleared) for rank in (1, None)],
        "restless": wish_always(folder),
        "differing flow": refused(lambda: differing_flow(folder)),
        "metrics": train_by_metrics(f"{folder}/metrics", "fsdp"),
        "metrics of rank 0": metrics_of_rank_0(folder),
    }


WITHIN: list[Decision] = [("on_substep_end", 2, flag) for flag in FLAGS[:2]]
CLEARED: list[Decision] = [("on_step_end", 6, "should_save"), ("on_step_end", 4, "should_log")]


@pytest.fixture(scope="module")
def on_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    tests = (
        test_a_flag_of_one_rank_is_acted_on_by_all_at_one_boundary,
        test_a_flag_of_all_ranks_is_acted_on_where_one_process_would,
    )
    chosen = [[decision for (decision,) in selected(request, test.__name__)] for test in tests]
    return run_ranks(run_on_two, 2, str(tmp_path_factory.mktemp("two")), *chosen, timeout=200)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Decision], list[tuple[str, int]]]:
    """What one process does with a decision; each runs once."""
    folder = str(tmp_path_factory.mktemp("alone"))
    return functools.cache(lambda decision: acts_of(folder, Decider(decision, None)))


def decisions(num_flags: int, shifts: tuple[int, ...]) -> list[Any]:
    """Return each boundary with each of the first flags; in the sample it has those that are so far from its own."""
    cells = []
    for (number, boundary), shift in itertools.product(enumerate(LATER), range(num_flags)):
        decision = (*boundary, FLAGS[(number + shift) % num_flags])
        cells.append(pytest.param(decision) if shift in shifts else beyond((decision,)))
    return cells


@pytest.mark.parametrize("decision", decisions(5, (0, 3)), ids=str)
def test_a_flag_of_one_rank_is_acted_on_by_all_at_one_boundary(on_two, alone, decision: Decision):
    event, step, flag = decision
    main, other = (found["of one"][decision] for found in on_two)
    assert main == other
    # A log that a log asks for is never written.
    assert main == alone(decision if (event, flag) == ("on_log", "should_log") else (*LATER[event, step], flag))


@pytest.mark.parametrize("decision", decisions(3, (0,)), ids=str)
def test_a_flag_of_all_ranks_is_acted_on_where_one_process_would(on_two, alone, decision: Decision):
    assert [found["of all"][decision] for found in on_two] == [alone(decision)] * 2


# The flags are the same whatever shards the model: under FSDP2 and an engine at one boundary alone.
@pytest.mark.parametrize(
    ("options", "flags"),
    [
        pytest.param({"deepspeed": ZERO_2}, (FLAGS[0], FLAGS[3]), marks=needs_deepspeed),
        beyond(pytest.param({"deepspeed": ZERO_2}, FLAGS, marks=needs_deepspeed)),
        beyond(({"strategy": "fsdp"}, FLAGS)),
    ],
)
def test_of_shards_and_under_an_engine_too(tmp_path, alone, options: dict[str, Any], flags: tuple[str, ...]):
    decisions = [("on_step_end", 2, flag) for flag in flags]
    main, other = run_ranks(decide_on_ranks, 2, str(tmp_path), decisions, 1, **options, timeout=60)
    assert main == other
    assert list(main.values()) == [alone(("on_step_end", 3, flag)) for flag in flags]


def test_a_stop_within_an_update_of_one_rank_waits_for_the_end_of_the_update(on_two, alone):
    (of_one, of_all), other = (found["within"] for found in on_two)
    assert [of_one, of_all] == other
    assert list(of_one.values()) == [alone(("on_step_end", 3, flag)) for flag in FLAGS[:2]]
    training_stop, epoch_stop = of_all.values()
    assert training_stop == [("epoch", 2), ("end", 2)]
    assert epoch_stop[0] == ("epoch", 2)


def test_what_one_rank_clears_and_the_arguments_ask_for_is_done(on_two, alone):
    main, other = ([list(each.values()) for each in found["cleared"]] for found in on_two)
    assert main[0] == other[0] == [alone(("on_step_end", 99, "should_save"))] * 2
    assert [("save", 6) in acts for acts in main[1]] == [("log", 4) not in acts for acts in main[1]] == [False, True]


def wish_always(folder: str) -> list[tuple[str, int]]:
    """Each rank asks for other things after every update."""

    class Restless(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if args.process_index == state.global_step % 3:
                control.should_log = True
            if args.process_index == 1:
                control.should_evaluate = state.global_step > 3
                control.should_training_stop = state.global_step > 8

    recorder = Decider(("nothing", 0, ""), None)
    trainer = build_trainer(folder, samples=80, num_train_epochs=2, options={"callbacks": [Restless(), recorder]})
    trainer.train()
    return recorder.acts


def test_ranks_that_always_want_something_else_stay_together(on_two):
    first, second = (found["restless"] for found in on_two)
    assert first == second
    assert ("evaluate", 5) in first  # asked for by one rank after update 4
    assert first[-1] == ("end", 9)  # where an evaluation that was due lets the ranks exchange what they want


def differing_flow(folder: str) -> None:
    trainer = build_trainer(folder, logging_steps=2)
    if trainer.args.process_index:
        trainer.args.logging_strategy = "no"
    trainer.train()


def test_ranks_that_would_log_at_different_updates_are_refused(on_two):
    for found in on_two:
        assert re.search(
            r"logging_strategy is steps on rank 0 and no on rank 1.*give it one value", found["differing flow"]
        )


# --- metrics ---------------------------------------------------------------------------------------------------------


def listen() -> list[str]:
    """Return the list to which what this process logs about metrics is added."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel_trainer.trainer.signals").addHandler(handler)
    return said


SCORES = [[1.0, 3.0, 2.0, 2.5, 9.0, 9.0], [1.0, 1.0, 4.0, 5.0, 6.0, 7.0]]
"""By rank, the metric of each evaluation."""


def train_by_metrics(folder: str, strategy: str) -> dict[str, Any]:
    """Train with metrics that differ by rank; return what was decided on them, and what was said."""
    rank, said = int(os.environ["RANK"]), listen()
    evaluations = iter(SCORES[rank])
    trainer = build_trainer(
        folder, strategy=strategy, samples=48, eval_samples=4, eval_strategy="steps", eval_steps=1,
        save_strategy="best", metric_for_best_model="score", greater_is_better=True, load_best_model_at_end=True,
        lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "mode": "max"},
        options={
            "callbacks": [EarlyStoppingCallback(2)],
            "compute_metrics": lambda prediction: {"score": next(evaluations), "note": f"of rank {rank}"},
        },
    )  # fmt: skip
    trainer.train()
    return {
        "step": trainer.state.global_step,
        "best": (trainer.state.best_metric, trainer.state.best_global_step, trainer.state.best_model_checkpoint),
        "scores": [entry["eval_score"] for entry in trainer.state.log_history if "eval_score" in entry],
        "rates": [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry],
        "said": said,
    }


@pytest.mark.parametrize("strategy", [beyond("ddp"), "fsdp"])
def test_metrics_that_differ_by_rank_are_those_of_rank_0_and_named_once(tmp_path, on_two, strategy: str):
    if strategy == "fsdp":
        main, other = (found["metrics"] for found in on_two)
    else:  # in processes that have not said it
        main, other = run_ranks(train_by_metrics, 2, str(tmp_path), strategy, timeout=60)

    (line,) = main["said"]
    assert "differ between the ranks: eval_score is 3.0 on rank 0 and 1.0 on rank 1. The best model" in line
    assert other["said"] == []
    assert {**main, "said": []} == other
    assert main["step"] == 4  # two evaluations after the best one
    assert main["best"][:2] == (3.0, 2)
    assert Path(main["best"][2]).name == "checkpoint-2"
    assert main["scores"] == SCORES[0][:4]
    assert main["rates"] == pytest.approx([1e-2, 1e-2, 1e-2, 1e-3])


def test_metrics_that_are_computed_on_rank_0_alone_reach_all(on_two):
    main, other = (found["metrics of rank 0"] for found in on_two)
    assert main["eval_score"] == other["eval_score"] == 0.5
    assert main["said"] == other["said"] == 0


def metrics_of_rank_0(folder: str) -> dict[str, Any]:
    rank, said = int(os.environ["RANK"]), listen()
    metrics = (lambda prediction: {}) if rank else (lambda prediction: {"score": 0.5, "bad": float("nan")})
    trainer = build_trainer(folder, options={"compute_metrics": metrics})
    return {**trainer.evaluate(), "said": len(said)}
