"""auto_find_batch_size begins with what is planned to fit, and goes down by micro-batches of the same update."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from accel_trainer.errors import ConfigError
from tests.cells import beyond, crossed, selected
from tests.ranks import RankFailure, run_ranks
from tests.trainer_jobs import build_model, build_trainer, summary


def limited(trainer: Any, limit: int) -> None:
    """Let the trainer's steps run out of memory with more than `limit` rows."""
    step = trainer.training_step

    def training_step(model: Any, inputs: Any, num_items: Any = None) -> Any:
        if len(inputs["input_ids"]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return step(model, inputs, num_items)

    trainer.training_step = training_step


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Has trained in batches of 8, since there is memory for 14 rows and none for the 16 of an update."""
    folder = tmp_path_factory.mktemp("found")
    trainer = build_trainer(folder, save_strategy="steps", save_steps=1, **OF_SIXTEEN)
    limited(trainer, 14)
    trainer.train()
    return trainer


OF_SIXTEEN: dict[str, Any] = {"auto_find_batch_size": True, "per_device_train_batch_size": 16, "samples": 28}


def test_training_starts_again_with_a_batch_that_fits(tmp_path, trainer):
    reference = build_trainer(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=2, samples=28)
    reference.train()
    assert trainer.state.train_batch_size == 8
    assert summary(trainer)["losses"] == summary(reference)["losses"]
    assert trainer.args.auto_find_batch_size is True
    assert trainer.args.per_device_train_batch_size == 16
    assert trainer.args.gradient_accumulation_steps == 1


def test_as_upstream_an_update_becomes_smaller_by_nine_tenths(tmp_path):
    trainer = build_trainer(tmp_path, compat="transformers", **OF_SIXTEEN)
    limited(trainer, 14)
    trainer.train()
    reference = build_trainer(tmp_path / "reference", compat="transformers", per_device_train_batch_size=14, samples=28)
    reference.train()
    assert trainer.state.train_batch_size == 14
    assert summary(trainer)["losses"] == summary(reference)["losses"]


def begin_with_plan(folder: str, strategy: str, sizes: tuple[int, int]) -> tuple[list[int], Any, Any]:
    """Search where each rank has the memory of so many rows; return sizes that are tried, losses, and those wanted."""
    from accel_trainer.contrib.preflight import plan_training

    reference = build_trainer(folder, strategy=strategy, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    reference.train()
    trainer = build_trainer(folder, strategy=strategy, auto_find_batch_size=True, per_device_train_batch_size=8)
    planned = plan_training(trainer)
    own = sizes[trainer.args.process_index]
    trainer.args.preflight_memory = f"{int(1.05 * planned.replan(own).peak) + 1}B"
    tried = limit_one_rank(trainer, "forward")
    trainer.train()
    return tried, summary(trainer)["losses"], summary(reference)["losses"]


def test_a_search_begins_with_what_is_planned_to_fit_on_every_rank(tmp_path, on_two):
    alone = begin_with_plan(str(tmp_path), "single", (2, 8))
    for tried, losses, reference in (alone, *(found["planned"] for found in on_two)):
        assert tried == [2]
        assert losses == reference


class Deciding(torch.nn.Module):
    """A model whose step depends on values, which no plan follows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(64, 4)

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        vectors = self.table(input_ids)
        return {"loss": vectors.square().mean() if vectors.sum() > 0 else (1 - vectors).square().mean()}


def test_a_model_that_cannot_be_planned_is_searched_by_attempts(tmp_path):
    trainer = build_trainer(tmp_path, auto_find_batch_size=True, per_device_train_batch_size=8)
    trainer.model = trainer.model_wrapped = Deciding()
    limited(trainer, 4)
    trainer.train()
    assert trainer.state.train_batch_size == 4


def test_memory_that_suffices_for_no_batch_is_an_error(tmp_path):
    trainer = build_trainer(tmp_path, auto_find_batch_size=True, per_device_train_batch_size=3)
    limited(trainer, 0)

    with pytest.raises(ConfigError, match=r"none from 3 down to 1 lets auto_find_batch_size\(\) run"):
        trainer.train()


def test_other_errors_end_the_search(tmp_path):
    trainer = build_trainer(tmp_path, auto_find_batch_size=True)
    tried = []

    def training_step(model: Any, inputs: Any, num_items: Any = None) -> Any:
        tried.append(len(inputs["input_ids"]))
        raise RuntimeError("shapes differ")

    trainer.training_step = training_step
    with pytest.raises(RuntimeError, match=r"shapes differ"):
        trainer.train()
    assert tried == [4]


def test_resuming_begins_with_the_size_that_was_found(tmp_path, trainer):
    second = build_trainer(tmp_path, **OF_SIXTEEN)
    second.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-1")

    assert second.state.train_batch_size == 8
    assert summary(second)["losses"] == summary(trainer)["losses"]


def test_memory_that_runs_out_in_evaluation_is_not_answered_with_a_smaller_training_batch(tmp_path):
    trainer = build_trainer(tmp_path, auto_find_batch_size=True, eval_strategy="epoch")

    def evaluate(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    trainer.evaluate = evaluate

    with pytest.raises(RuntimeError, match=r"Evaluation hit an out-of-memory error.*per_device_eval_batch_size"):
        trainer.train()
    assert trainer._train_batch_size == 4


RUN: dict[str, Any] = {"dropout": 0.2, "samples": 48}
SIZE = 4
"""The second one that is tried, after 8; two make the same update."""


def limit_one_rank(trainer: Any, where: str, rank: int = 0) -> list[int]:
    """Let one rank run out of memory at its third update with more than `SIZE` rows; return the sizes that it tries."""
    step, tried = trainer.training_step, []

    def check() -> None:
        if tried[-1] > SIZE and trainer.state.global_step == 2 and trainer.args.process_index == rank:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def training_step(model: Any, inputs: Any, num_items: Any = None) -> Any:
        if trainer.state.global_step == 0 and tried[-1:] != [trainer._train_batch_size]:
            tried.append(trainer._train_batch_size)
        if where == "forward":
            check()
        return step(model, inputs, num_items)

    class InTheOptimizer(TrainerCallback):
        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            check()

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            if where == "before the optimizer":
                check()

    trainer.training_step = training_step
    if where != "forward":
        trainer.add_callback(InTheOptimizer)
    return tried


def search(folder: str, strategy: str, where: str, rank: int, builds_model: bool = False, **options: Any) -> Any:
    """Search on this rank; return the summary of the run that fits."""
    trainer = build_for_search(folder, strategy, builds_model, auto_find_batch_size=True, size=8, **options)
    tried = limit_one_rank(trainer, where, rank)
    begin = time.monotonic()
    trainer.train()
    assert time.monotonic() - begin < 40
    assert trainer.args.auto_find_batch_size is True
    return {**summary(trainer), "tried": tried}


def at_once(folder: str, strategy: str, builds_model: bool = False, **options: Any) -> Any:
    trainer = build_for_search(folder, strategy, builds_model, size=SIZE, gradient_accumulation_steps=2, **options)
    trainer.train()
    return summary(trainer)


def build_for_search(
    folder: str, strategy: str, builds_model: bool, *, size: int, gives: bool = False, **options: Any
) -> Any:
    trainer = build_trainer(folder, strategy=strategy, per_device_train_batch_size=size, **RUN, **options)
    if builds_model:
        trainer.model_init = lambda: build_model(dropout=RUN["dropout"], seed=5)
    if gives:
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9)
        trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2, 0.5)
    return trainer


def check_same_run(found: dict[str, Any], reference: dict[str, Any]) -> None:
    assert found["tried"] == [8, SIZE]
    for name in ("losses", "grad_norms", "step"):
        assert found[name] == reference[name]
    for name, value in reference["weights"].items():
        np.testing.assert_array_equal(found["weights"][name], value)


@pytest.mark.parametrize("options", [beyond({}), {"gives": True}, {"neftune_noise_alpha": 5.0}], ids=str)
def test_an_attempt_begins_where_the_first_one_began(tmp_path, options: dict[str, Any]):
    found = search(str(tmp_path / "found"), "single", "forward", 0, **options)
    check_same_run(found, at_once(str(tmp_path / "reference"), "single", **options))


def search_on_two(folder: str, cases: list[tuple[int, str]]) -> dict[Any, Any]:
    """Return the summary of the run that fits for each rank and place, and that of one without a search."""
    return {
        **{case: search(f"{folder}/{case[1]}", "ddp", case[1], case[0]) for case in cases},
        "at once": at_once(f"{folder}/reference", "ddp"),
        "sharded": search(f"{folder}/sharded", "fsdp", "forward", 1, builds_model=True),
        "sharded at once": at_once(f"{folder}/sharded reference", "fsdp", builds_model=True),
        "planned": begin_with_plan(f"{folder}/planned", "ddp", (4, 2)),
    }


@pytest.fixture(scope="module")
def on_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    cases = selected(request, "test_one_rank_out_of_memory_takes_the_others_along_to_the_next_size")
    return run_ranks(search_on_two, 2, str(tmp_path_factory.mktemp("two")), cases, timeout=110)


@pytest.mark.parametrize(("where", "rank"), crossed(["forward", "before the optimizer", "in the optimizer"], [0, 1]))
def test_one_rank_out_of_memory_takes_the_others_along_to_the_next_size(
    on_two: list[dict[Any, Any]], where: str, rank: int
):
    for found in on_two:
        check_same_run(found[rank, where], found["at once"])


def test_a_sharded_model_is_made_anew_for_each_attempt(on_two: list[dict[Any, Any]]):
    for found in on_two:
        check_same_run(found["sharded"], found["sharded at once"])


def fail_differently(folder: str) -> None:
    trainer = build_trainer(folder, strategy="ddp", auto_find_batch_size=True, ddp_timeout=20)
    step = trainer.training_step

    def training_step(model: Any, inputs: Any, num_items: Any = None) -> Any:
        if trainer.args.process_index:
            raise ValueError("a label is missing")
        return step(model, inputs, num_items)

    trainer.training_step = training_step
    trainer.train()


def test_another_error_of_one_rank_is_not_answered_with_a_smaller_batch(tmp_path):
    with pytest.raises(RankFailure) as caught:
        run_ranks(fail_differently, 2, str(tmp_path))
    assert "ValueError: a label is missing" in caught.value.failures[1]
