"""hyperparameter_search with Optuna, on one process, DDP and FSDP2: no accelerate is needed, and all ranks agree."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_trainer import Trainer
from accel_trainer.errors import ConfigError, ProcessGroupError
from tests.ranks import preload, run_ranks
from tests.trainer_jobs import TokenDataset, arguments, build_model, build_trainer, strategy_arguments

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.ERROR)
preload("optuna")
pytestmark = [pytest.mark.multirank, pytest.mark.timeout(280)]


def build(output_dir: Any, strategy: str, model_init: Any = None, **changes: Any) -> Trainer:
    ranks = 1 if strategy == "single" else 2
    options = {"per_device_train_batch_size": 4 // ranks, "eval_strategy": "steps", "eval_steps": 2, **changes}
    args = arguments(output_dir, **strategy_arguments(strategy), **options)
    data = {"train_dataset": TokenDataset(16), "eval_dataset": TokenDataset(6, seed=1)}
    return Trainer(args=args, model_init=model_init or build_model_for, **data)


def build_model_for(trial: Any = None) -> Any:
    """A model whose seed the trial suggests: on every rank, though only rank 0 has the study."""
    return build_model(seed=0 if trial is None else trial.suggest_int("seed", 0, 3))


def space(trial: Any) -> dict[str, Any]:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        "num_train_epochs": trial.suggest_categorical("num_train_epochs", [1, 2]),
    }


def search(output_dir: str, strategy: str) -> dict[str, Any]:
    trainer = build(output_dir, strategy, save_strategy="epoch")
    losses: dict[str, float] = {}

    def objective(metrics: dict[str, float]) -> float:
        losses[str(trainer._trial.number)] = metrics["eval_loss"]
        return metrics["eval_loss"]

    best = trainer.hyperparameter_search(
        space, objective, n_trials=3, backend="optuna", sampler=optuna.samplers.RandomSampler(seed=0)
    )
    again = build(Path(output_dir, "again"), strategy, lambda: build_model(seed=best.hyperparameters["seed"]))
    for name in ("learning_rate", "num_train_epochs"):
        setattr(again.args, name, best.hyperparameters[name])
    again.train()
    return {"best": tuple(best), "losses": losses, "again": again.evaluate()["eval_loss"], "folder": output_dir}


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_every_rank_gets_the_best_run_and_each_trial_its_checkpoints(searches, strategy):
    results = searches(search, strategy)

    for found in results:
        assert found == results[0]
        run_id, objective, parameters, _ = found["best"]
        assert objective == min(found["losses"].values()) == found["losses"][run_id]
        assert set(parameters) == {"learning_rate", "num_train_epochs", "seed"}
        assert found["again"] == pytest.approx(objective, rel=1e-6)
    for number in range(3):
        run = Path(results[0]["folder"], f"run-{number}")
        checkpoints = sorted(path.name for path in run.glob("checkpoint-*"))
        state = json.loads((run / checkpoints[-1] / "trainer_state.json").read_text())
        assert state["trial_params"]["seed"] in range(4)
        assert state["log_history"][-1]["eval_loss"] == pytest.approx(results[0]["losses"][str(number)])
        assert checkpoints in (["checkpoint-4"], ["checkpoint-4", "checkpoint-8"])


@pytest.mark.parametrize(
    ("name", "values", "given"),
    [
        ("label_smoothing_factor", [0.5, 0.9], {}), ("neftune_noise_alpha", [10.0, 50.0], {"neftune_noise_alpha": 1.0}),
        ("data_seed", [3, 4], {}),
    ],
)  # fmt: skip
def test_a_trial_trains_with_its_own_values(
    tmp_path: Path, name: str, values: list[Any], given: dict[str, Any]
) -> None:
    trainer = build(tmp_path, "single", lambda: build_model(), max_steps=2, logging_steps=1, **given)
    losses = {}

    def objective(metrics: dict[str, float]) -> float:
        losses[getattr(trainer.args, name)] = losses_of(trainer)
        return metrics["eval_loss"]

    sampler = optuna.samplers.GridSampler({name: values}, seed=0)
    trainer.hyperparameter_search(
        lambda trial: {name: trial.suggest_categorical(name, values)},
        objective, n_trials=2, backend="optuna", sampler=sampler,
    )  # fmt: skip

    for value in values:
        direct = build(
            tmp_path, "single", lambda: build_model(), max_steps=2, logging_steps=1, **(given | {name: value})
        )
        direct.train()
        assert losses[value] == losses_of(direct)


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_trial_goes_on_with_the_batch_size_that_it_has_found(tmp_path: Path) -> None:
    trainer = build(tmp_path, "single", lambda: build_model(), max_steps=1, auto_find_batch_size=True)
    sizes, step = [], trainer.training_step

    def full_once(model: Any, inputs: Any, *args: Any) -> Any:
        sizes.append((len(inputs["input_ids"]), trainer.args.gradient_accumulation_steps))
        if len(sizes) == 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
        return step(model, inputs, *args)

    trainer.training_step = full_once
    trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-3)}, n_trials=1, backend="optuna"
    )

    assert sizes == [(4, 1), (2, 2), (2, 2)]


def resume(output_dir: str, strategy: str) -> list[float]:
    trainer = build(output_dir, strategy, lambda: build_model(), save_strategy="steps", save_steps=2)
    trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-2, 2e-2)}, n_trials=1, backend="optuna"
    )
    state = json.loads(Path(output_dir, "run-0/checkpoint-4/trainer_state.json").read_text())
    again = build(Path(output_dir, "again"), strategy, lambda: build_model())
    again.args.learning_rate = state["trial_params"]["learning_rate"]
    again.train(resume_from_checkpoint=f"{output_dir}/run-0/checkpoint-2")
    return [
        [entry["loss"] for entry in log if "loss" in entry] for log in (state["log_history"], again.state.log_history)
    ]


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_trial_is_resumed_from_its_checkpoint(searches, strategy):
    for whole, again in searches(resume, strategy):
        assert again == whole


class Worse(optuna.pruners.BasePruner):
    """Prunes every trial but the first at its first report."""

    def prune(self, study: Any, trial: Any) -> bool:
        return trial.number > 0


def prune(output_dir: str, strategy: str) -> Any:
    trainer = build(output_dir, strategy)
    steps: list[tuple[int, int]] = []
    report = trainer._report_to_hp_search

    def reported(trial: Any, step: int, metrics: Any) -> None:
        steps.append((trial.number, step))
        report(trial, step, metrics)

    trainer._report_to_hp_search = reported
    best = trainer.hyperparameter_search(space, n_trials=3, backend="optuna", pruner=Worse())
    return best.run_id, steps, trainer.hp_search_backend


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_trial_that_is_pruned_ends_on_every_rank(searches, strategy):
    for best, steps, backend in searches(prune, strategy):
        assert best == "0"
        assert steps[0] == (0, 2)
        assert [entry for entry in steps if entry[0] > 0] == [(1, 2), (2, 2)]
        assert backend is None


def several(output_dir: str, strategy: str) -> Any:
    trainer = build(output_dir, strategy)
    best = trainer.hyperparameter_search(
        space, lambda metrics: (metrics["eval_loss"], -metrics["eval_loss"]), n_trials=2, backend="optuna",
        direction=["minimize", "minimize"],
    )  # fmt: skip
    return sorted(run.run_id for run in best)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_several_objectives_have_several_best_runs(searches, strategy):
    assert searches(several, strategy) == [["0", "1"]] * (1 if strategy == "single" else 2)


def fail(output_dir: str, strategy: str, catch: Any = ArithmeticError) -> Any:
    def model_init(trial: Any = None) -> Any:
        if trial is not None and trial.number == 0:
            raise ArithmeticError("no model for trial 0")
        return build_model()

    trainer = build(output_dir, strategy, model_init)
    return trainer.hyperparameter_search(space, n_trials=2, backend="optuna", catch=catch).run_id


def fail_uncaught(output_dir: str, strategy: str) -> str:
    with pytest.raises(ArithmeticError) as error:
        fail(output_dir, strategy, catch=())
    return str(error.value)


def test_a_trial_that_fails_is_left_out_or_ends_the_search_on_every_rank(searches):
    assert searches(fail, "ddp") == ["1", "1"]
    assert searches(fail_uncaught, "ddp") == ["no model for trial 0"] * 2


def time_out(output_dir: str, strategy: str) -> Any:
    def slow(metrics: dict[str, float]) -> float:
        time.sleep(0.2)
        return metrics["eval_loss"]

    trainer = build(output_dir, strategy)
    return trainer.hyperparameter_search(space, slow, n_trials=50, timeout=0.5, backend="optuna").run_id


def test_a_search_that_is_out_of_time_ends_on_every_rank(searches):
    first, second = searches(time_out, "ddp")
    assert first == second


def bad_study(output_dir: str, strategy: str) -> str:
    with pytest.raises((ValueError, ProcessGroupError)) as error:
        build(output_dir, strategy).hyperparameter_search(space, n_trials=1, backend="optuna", direction="sideways")
    return f"{type(error.value).__name__}: {error.value}"


def test_a_study_that_cannot_be_made_is_told_to_every_rank(searches):
    first, second = searches(bad_study, "ddp")
    assert first.startswith("ValueError: ")
    assert re.search(r"the search ended on rank 0, which has the study: ValueError", second)


def bad_suggestion(output_dir: str, strategy: str) -> None:
    with pytest.raises(ValueError, match="low"):
        build(output_dir, strategy).hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1.0, 0.1)}, backend="optuna"
        )


def test_a_suggestion_that_fails_fails_on_every_rank(searches):
    assert searches(bad_suggestion, "ddp") == [None, None]


SEARCHES = {
    "single": [search, resume, prune, several],
    "ddp": [search, prune, several, fail, fail_uncaught, time_out, bad_study, bad_suggestion],
    "fsdp": [search, resume, prune],
}


def run_searches(output_dir: str, strategy: str) -> dict[str, Any]:
    return {run.__name__: run(f"{output_dir}/{run.__name__}", strategy) for run in SEARCHES[strategy]}


@pytest.fixture(scope="module")
def searches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[..., Any], str], list[Any]]:
    """Return what gives the results of a search by rank; all of a strategy run in one job."""

    @functools.cache
    def run(strategy: str) -> list[dict[str, Any]]:
        folder = str(tmp_path_factory.mktemp(strategy))
        if strategy == "single":
            return [run_searches(folder, strategy)]
        return run_ranks(run_searches, 2, folder, strategy, timeout=250)

    return lambda search, strategy: [found[search.__name__] for found in run(strategy)]


def test_trials_at_the_same_time_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"n_jobs asks for trials at the same time.*storage=.*load_if_exists"):
        build(tmp_path, "single").hyperparameter_search(space, n_trials=2, backend="optuna", n_jobs=2)


def test_a_search_without_a_model_function_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="pass your model through a model_init function"):
        build_trainer(tmp_path).hyperparameter_search(backend="optuna")
