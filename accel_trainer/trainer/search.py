"""A search for hyperparameters with Optuna: rank 0 has the study, and every rank runs every trial."""

from __future__ import annotations

import functools
import types
from typing import Any

from transformers.trainer_utils import BestRun

from accel_trainer.errors import ConfigError, ProcessGroupError
from accel_trainer.runtime.collectives import broadcast_object
from accel_trainer.runtime.memory import release_memory
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.trainer.running_trainer import TrialTrainer

__all__ = ["search_with_optuna"]

_DONE, _FAILED, _TRIAL = "done", "failed", "trial"


def search_with_optuna(
    trainer: TrialTrainer, n_trials: int, direction: str | list[str], **kwargs: Any
) -> BestRun | list[BestRun]:
    """Return the best of `n_trials` trials, on every rank; several for several objectives. Collective.

    Args:
        direction: "minimize" or "maximize", or one for each objective.
        kwargs: for `optuna.create_study`; `timeout`, `catch` and `gc_after_trial` for its `optimize`.

    Raises:
        ConfigError: `n_jobs` asks for trials at the same time.
    """
    if kwargs.pop("n_jobs", 1) != 1:
        raise ConfigError(
            "n_jobs asks for trials at the same time, and all of them train with this one Trainer; leave it out, and "
            "start several jobs on one study instead: study_name=..., storage=..., load_if_exists=True"
        )
    catch = kwargs.pop("catch", ())
    options = {"n_trials": n_trials, "catch": catch}
    options |= {name: kwargs.pop(name) for name in ("timeout", "gc_after_trial") if name in kwargs}
    process = trainer.accelerator.process
    if process.is_main:
        return _lead(trainer, direction, process, options, kwargs)
    return _follow(trainer, process, catch)


def _lead(
    trainer: TrialTrainer, direction: Any, process: ProcessContext, options: dict[str, Any], study_options: Any
) -> BestRun | list[BestRun]:
    """Run the study, and tell the other ranks of each trial and of the end."""
    import optuna

    is_in_trial = False

    def objective(trial: Any) -> Any:
        nonlocal is_in_trial
        facts = (trial.number, len(trial.study.directions) > 1)
        broadcast_object((_TRIAL, facts), process)
        is_in_trial = True
        result = _run_trial(trainer, _on_all_ranks(trial, facts, process))
        is_in_trial = False
        return result

    def after_caught(study: Any, trial: Any) -> None:
        nonlocal is_in_trial
        is_in_trial = False

    several = {"directions": direction} if isinstance(direction, list) else {"direction": direction}
    try:
        study = optuna.create_study(**several, **study_options)
        study.optimize(objective, callbacks=[after_caught], **options)
        if len(study.directions) > 1:
            best: Any = [BestRun(str(trial.number), trial.values, trial.params) for trial in study.best_trials]
        else:
            best = BestRun(str(study.best_trial.number), study.best_trial.value, study.best_trial.params)
    except BaseException as error:
        if not is_in_trial:  # else the others have failed in the same place, and hear nothing any more
            broadcast_object((_FAILED, f"{type(error).__name__}: {error}"), process)
        raise
    broadcast_object((_DONE, best), process)
    return best


def _follow(trainer: TrialTrainer, process: ProcessContext, catch: Any) -> BestRun | list[BestRun]:
    """Run the trials that rank 0 tells of; return the best when it has found that."""
    import optuna

    while True:
        what, content = broadcast_object(None, process)
        if what == _DONE:
            best: BestRun | list[BestRun] = content
            return best
        if what == _FAILED:
            raise ProcessGroupError(f"the search ended on rank 0, which has the study: {content}")
        try:
            _run_trial(trainer, _on_all_ranks(None, content, process))
        except optuna.TrialPruned:
            continue
        except catch:
            continue


def _run_trial(trainer: TrialTrainer, trial: Any) -> Any:
    """Train once, and return the value that the trial is judged by."""
    trainer.objective = None
    try:
        trainer.train(trial=trial)
        if trainer.objective is None:  # nothing was evaluated while it trained
            trainer.objective = trainer.compute_objective(trainer.evaluate())
        return trainer.objective
    finally:
        trainer.model_wrapped, trainer.model = release_memory(trainer.model_wrapped, trainer.model)
        trainer.accelerator.clear()


def _on_all_ranks(trial: Any, facts: tuple[int, bool], process: ProcessContext) -> Any:
    """Return rank 0's trial, which is None elsewhere, for every rank; on one process it is the trial itself."""
    if not process.is_distributed:
        return trial
    from optuna.trial import BaseTrial

    BaseTrial.register(_SharedTrial)  # transformers asks for its kind
    return _SharedTrial(trial, *facts, process)


class _SharedTrial:
    """A trial of which every rank has the same values, and the same word whether it is pruned.

    `hp_space`, `model_init` and callbacks may ask it; every rank asks for the same, in the same order.
    """

    def __init__(self, trial: Any, number: int, is_several: bool, process: ProcessContext) -> None:
        self.number = number
        self.params: dict[str, Any] = {}
        self.user_attrs: dict[str, Any] = {}
        self.study = types.SimpleNamespace(_is_multi_objective=lambda: is_several)
        """What transformers asks the study for: Optuna prunes nothing that has several objectives."""
        self._trial = trial
        self._process = process

    def __getattr__(self, name: str) -> Any:
        if name.startswith("suggest_"):
            return functools.partial(self._suggest, name)
        raise AttributeError(
            f"a trial on several ranks has no {name!r}; it has number, params, user_attrs, suggest_..."
        )

    def _suggest(self, method: str, name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in self.params:
            value = error = None
            if self._trial is not None:
                try:
                    value = getattr(self._trial, method)(name, *args, **kwargs)
                except Exception as raised:  # the others wait for the value
                    error = raised
            value, error = broadcast_object((value, error), self._process)
            if error is not None:
                raise error
            self.params[name] = value
        return self.params[name]

    def report(self, value: float, step: int) -> None:
        """Tell the study of a value in between."""
        if self._trial is not None:
            self._trial.report(value, step)

    def should_prune(self) -> bool:
        """Return whether rank 0's trial is pruned. Collective."""
        return bool(broadcast_object(self._trial is not None and self._trial.should_prune(), self._process))

    def set_user_attr(self, key: str, value: Any) -> None:
        """Keep a value with the trial."""
        self.user_attrs[key] = value
        if self._trial is not None:
            self._trial.set_user_attr(key, value)
