"""Searches that train several times, each trial on every rank: hyperparameters with Optuna, and batch sizes."""

from __future__ import annotations

import copy
import functools
import importlib
import math
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.hyperparameter_search import ALL_HYPERPARAMETER_SEARCH_BACKENDS
from transformers.trainer_utils import BestRun, HPSearchBackend, TrainOutput, default_compute_objective

from accel_trainer import logging
from accel_trainer.accelerator.accelerated_optimizer import AcceleratedOptimizer
from accel_trainer.config import Compat
from accel_trainer.errors import ConfigError, ProcessGroupError
from accel_trainer.runtime.collectives import broadcast_object
from accel_trainer.runtime.memory import find_executable_batch_size, register_memory_owner, release_memory
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.rng import KeptStreams
from accel_trainer.trainer.arguments.training_arguments import setting
from accel_trainer.trainer.preparation import ModelPreparation

if TYPE_CHECKING:
    from accel_trainer import Trainer

logger = logging.get_logger(__name__)

_DONE, _FAILED, _TRIAL = "done", "failed", "trial"


# --- hyperparameters --------------------------------------------------------------------------------------------------


def check_search(trainer: Trainer) -> None:
    """Refuse a search by a strategy that can train one model in a process.

    Raises:
        ConfigError: it builds an engine.
    """
    strategy = trainer.accelerator.strategy
    if strategy.capabilities.builds_engine:
        raise ConfigError(
            "hyperparameter_search() builds a model and an optimizer for each trial in one process, and the engine "
            f"of strategy {strategy.name!r} keeps hold of those before; start each trial as a job of its own, or "
            "search with fsdp=True"
        )


def search_with_optuna(
    trainer: Trainer,
    hp_space: Callable[[Any], dict[str, Any]] | None,
    compute_objective: Callable[[dict[str, float]], Any] | None,
    n_trials: int,
    direction: str | list[str],
    hp_name: Callable[[Any], str] | None,
    **kwargs: Any,
) -> BestRun | list[BestRun]:
    """Return the best of `n_trials` trials, on every rank; several for several objectives. Collective.

    Upstream's loop (5.23, integration_utils.py:235) needs accelerate, and waits for ever for a pruned rank 0.

    Args:
        direction: "minimize" or "maximize", or one for each objective.
        kwargs: for `optuna.create_study`; `timeout`, `catch` and `gc_after_trial` for its `optimize`.

    Raises:
        ConfigError: `n_jobs` asks for trials at the same time.
        RuntimeError: Optuna is not installed, or there is no `model_init`.
    """
    optuna = ALL_HYPERPARAMETER_SEARCH_BACKENDS[HPSearchBackend.OPTUNA]()
    optuna.ensure_available()
    if trainer.model_init is None:
        raise RuntimeError("To use hyperparameter search, you need to pass your model through a model_init function.")
    trainer.hp_search_backend, trainer.hp_name = HPSearchBackend.OPTUNA, hp_name
    trainer.hp_space = hp_space or optuna.default_hp_space
    trainer.compute_objective = compute_objective or default_compute_objective
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
    trainer: Trainer, direction: Any, process: ProcessContext, options: dict[str, Any], study_options: Any
) -> BestRun | list[BestRun]:
    """Run the study, and tell the other ranks of each trial and of the end."""
    import optuna

    is_in_trial = False

    def objective(trial: Any) -> Any:
        nonlocal is_in_trial
        facts = (trial.number, len(trial.study.directions) > 1)
        broadcast_object((_TRIAL, facts), process)
        is_in_trial = True
        result = _run_trial(trainer, trial, facts)
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
    # Ctrl-C, too: the others wait in _follow() for the next trial.
    except BaseException as error:
        if not is_in_trial:  # else the others have failed in the same place, and hear nothing any more
            broadcast_object((_FAILED, f"{type(error).__name__}: {error}"), process)
        raise
    broadcast_object((_DONE, best), process)
    return best


def _follow(trainer: Trainer, process: ProcessContext, catch: Any) -> BestRun | list[BestRun]:
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
            _run_trial(trainer, None, content)
        except optuna.TrialPruned:
            continue
        except catch:
            continue


def _run_trial(trainer: Trainer, trial: Any, facts: tuple[int, bool]) -> Any:
    """Train once, with rank 0's trial, which is None elsewhere; return the value that the trial is judged by."""
    process = trainer.accelerator.process
    if process.is_distributed:
        from optuna.trial import BaseTrial

        BaseTrial.register(_SharedTrial)  # transformers asks for its kind
        trial = _SharedTrial(trial, *facts, process)
    trainer.objective = None
    try:
        trainer.train(trial=trial)
        if trainer.objective is None:  # nothing was evaluated while it trained
            trainer.objective = trainer.compute_objective(trainer.evaluate())
        return trainer.objective
    finally:
        trainer.model_wrapped, trainer.model = release_memory(trainer.model_wrapped, trainer.model)
        trainer.accelerator.clear()


class _SharedTrial:
    """A trial of which every rank has the same values and pruning; every rank asks for the same, in the same order."""

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


# --- batch sizes ------------------------------------------------------------------------------------------------------


class BatchSizeSearch:
    """The state that a train() begins with, for each attempt of a search to begin with it again.

    transformers 5.23 goes on with the weights of the attempt that failed, after as many updates as that one had done,
    and on several ranks it hangs. Where a `model_init` makes the model, it makes one for each attempt; otherwise the
    weights are kept in the memory of the machine meanwhile.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Keep the state; a ConfigError where the model is sharded, and nothing can make another."""
        self._trainer = trainer
        self._builds_model = trainer.model_init is not None
        if trainer.is_sharded and not self._builds_model:
            raise ConfigError(
                f"auto_find_batch_size is set with strategy {trainer.accelerator.strategy.name!r}, which shards the "
                "model in place: an attempt that runs out of memory leaves nothing for the next one to begin with; "
                "give Trainer(model_init=...), which makes the model of each attempt, or set "
                "per_device_train_batch_size"
            )
        self._keeps_update = trainer.args.resolved.config.compat is not Compat.TRANSFORMERS
        self._num_samples = 0
        """Of an update on a rank that reads."""
        self._streams = KeptStreams()
        # A copy on a CPU as well, where .to() would return the tensor itself, which training changes.
        self._values = {name: value.detach().to("cpu", copy=True) for name, value in self._list_values()}
        self._optimizer, self._scheduler, self._created_scheduler = None, None, False
        if not self._builds_model:
            given_optimizer = trainer.optimizer
            if isinstance(given_optimizer, AcceleratedOptimizer):
                given_optimizer = given_optimizer.optimizer
            self._optimizer, self._scheduler = given_optimizer, trainer.lr_scheduler
            self._created_scheduler = trainer._created_lr_scheduler
        given = [each for each in (self._optimizer, self._scheduler) if each is not None]
        self._states = [(each, copy.deepcopy(each.state_dict())) for each in given]

    def run(self, train: Callable[[], TrainOutput]) -> TrainOutput:
        """Train until memory suffices on all ranks; a ConfigError at no size. Collective. Within `keeping_update`."""
        trainer = self._trainer
        is_first = True

        def auto_find_batch_size(batch_size: int) -> TrainOutput:
            nonlocal is_first
            if not is_first:
                self._begin_again()
            is_first = False
            self._take(batch_size)
            trainer.args.auto_find_batch_size = False  # upstream would search, too
            return train()

        register_memory_owner(self)  # a rank that runs out of memory, or hears of it, drops what the attempt holds
        reduce_size = self._next_size if self._keeps_update else None
        start = self._planned_size(trainer._train_batch_size)
        output: TrainOutput = find_executable_batch_size(auto_find_batch_size, start, reduce_size)()
        return output

    @contextmanager
    def keeping_update(self, found: int | None) -> Iterator[None]:
        """Context in which the samples of an update, and their order, are those of the arguments, whatever the size.

        With `compat` the accumulation stays in their place, as upstream's.

        Args:
            found: size that a search had found before the checkpoint.
        """
        trainer, args = self._trainer, self._trainer.args
        given = trainer._train_batch_size, args.gradient_accumulation_steps
        self._num_samples = math.prod(given)
        with ExitStack() as kept:
            if self._keeps_update:
                batch = {"given_batch": trainer.given_batch or given, "_train_batch_size": given[0]}
                kept.enter_context(setting(trainer, **batch))
                kept.enter_context(setting(args, gradient_accumulation_steps=given[1]))
            if found is not None:
                fits_in = not self._keeps_update or self._num_samples % found == 0
                self._take(found if fits_in else self._next_size(found))
            yield

    def _take(self, size: int) -> None:
        self._trainer._train_batch_size = size
        if self._keeps_update:
            self._trainer.args.gradient_accumulation_steps = self._num_samples // size

    def _next_size(self, size: int) -> int:
        """Return the next smaller size of which several make the same update; 0 behind 1."""
        return next((smaller for smaller in range(size - 1, 0, -1) if self._num_samples % smaller == 0), 0)

    def _planned_size(self, start: int) -> int:
        """Return the size that is planned to fit on all ranks; `start` where this run cannot be planned. Collective."""
        trainer, size = self._trainer, start
        planning = importlib.import_module("accel_trainer.contrib.preflight")  # by name: contrib imports the core
        try:
            size = (trainer.planned_run or planning.plan_training(trainer)).largest_rows()
        except Exception as error:  # whatever a model's step does without values; attempts will show
            logger.info("the search for a batch size goes by attempts alone (%s: %s)", type(error).__name__, error)
        if trainer.accelerator.num_processes > 1:
            sizes = torch.tensor(size, device=trainer.accelerator.device)
            size = int(trainer.accelerator.reduce(sizes, "min"))
        if size < start:
            logger.warning("%d samples in a micro-batch are planned not to fit; trying %d", start, size)
        return size

    def free_memory(self) -> None:
        """Drop the memory of an attempt, and all references to its process group."""
        trainer = self._trainer
        trainer.end_decisions(is_failed=True)
        trainer.accelerator.free_memory()
        trainer._preparation = ModelPreparation()
        # An attempt that failed has not come to upstream's deactivate_neftune() (5.23, trainer.py:2038).
        if trainer.neftune_hook_handle is not None:
            trainer.neftune_hook_handle.remove()
        if self._builds_model:
            trainer.model = None
        else:
            trainer.model = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
            trainer.model.zero_grad()
        trainer.model_wrapped = trainer.model
        trainer.optimizer, trainer.lr_scheduler = self._optimizer, self._scheduler
        trainer._created_lr_scheduler = self._created_scheduler
        for name in ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"):
            setattr(trainer.callback_handler, name, getattr(trainer, name, None))

    def _begin_again(self) -> None:
        self.free_memory()  # on one process nobody else has
        self._streams.put_back()
        with torch.no_grad():
            for name, value in self._list_values():
                value.copy_(self._values[name])
        for each, state in self._states:
            # A copy for each attempt: torch's optimizers keep the tensors that they load, and change them in place.
            each.load_state_dict(copy.deepcopy(state))

    def _list_values(self) -> list[tuple[str, Tensor]]:
        """Return parameters and buffers, by name; none where they are made anew."""
        if self._builds_model:
            return []
        model = self._trainer.accelerator.unwrap_model(self._trainer.model, keep_torch_compile=False)
        return [*model.named_parameters(), *model.named_buffers()]
