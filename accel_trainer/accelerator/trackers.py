"""Trackers of a run, and the methods of the Accelerator that log, profile and end it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, profiler

from accel_trainer import logging
from accel_trainer.accelerator.settings import AcceleratorSettings
from accel_trainer.accelerator.shared_state import Forwarded
from accel_trainer.errors import ConfigError, did_you_mean
from accel_trainer.plugins.kwargs import ProfileKwargs, ProjectConfiguration
from accel_trainer.registry import installed_trackers, load_tracker, tracker_names
from accel_trainer.runtime import collectives
from accel_trainer.runtime.own_watch import failing_together
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.tracking import BlankTracker, GeneralTracker, mask_secrets, redact, secrets_of

logger = logging.get_logger(__name__)

TrackerChoice = str | GeneralTracker | type[GeneralTracker]
"""A tracker by name, "all" for those that are installed (if any), one of one's own, or its class."""


class Trackers:
    """Trackers of a run; one that cannot be reached is left out, and one that fails later warns once."""

    def __init__(
        self,
        log_with: TrackerChoice | Sequence[TrackerChoice] | None,
        project: ProjectConfiguration,
        process: ProcessContext,
    ) -> None:
        self.chosen = _choose(log_with, project.logging_dir)
        self.opened: list[GeneralTracker] = []
        """Those that this rank logs to."""
        self._project = project
        self._process = process
        self._is_open = False
        self._secrets: frozenset[str] = frozenset()
        self._failed: set[str] = set()

    def init(
        self, project_name: str, config: Mapping[str, Any] | None, init_kwargs: Mapping[str, Mapping[str, Any]] | None
    ) -> None:
        """Open a run with every chosen tracker, on all ranks or on the main process alone."""
        options = dict(init_kwargs or {})
        self._check_options(options)
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(
                f"init_trackers(config=...) got a {type(config).__name__}; pass a dict, vars(args) for instance"
            )
        self.finish()
        self._secrets = frozenset(secrets_of(options) | secrets_of(config or {}))
        # No collective: scripts for accelerate call it under `if accelerator.is_main_process`, all of diffusers' among
        # them. Of an error on rank 0 alone (an option that the library does not take) the others hear when they wait.
        with failing_together():
            for choice in self.chosen:
                if self._process.is_main or not choice.main_process_only:
                    self._open(choice, project_name, options.get(choice.name, {}), config)
        self._is_open = True

    def _check_options(self, options: Mapping[str, Any]) -> None:
        for name in self._unknown(options):
            known = [tracker.name for tracker in self.chosen]
            raise ConfigError(
                f"init_kwargs has options for {name!r}{did_you_mean(name, known)} Trackers of this run: "
                f"{', '.join(known) or 'none, since log_with is not given'}"
            )
        objects = [tracker.name for tracker in self.chosen if not isinstance(tracker, type)]
        if given := [name for name in objects if options.get(name)]:
            raise ConfigError(
                f"init_kwargs has options for {given[0]!r}, which log_with has as an object; give them to its "
                "constructor, or give log_with its class"
            )

    def _open(
        self,
        choice: GeneralTracker | type[GeneralTracker],
        project_name: str,
        options: Mapping[str, Any],
        config: Mapping[str, Any] | None,
    ) -> None:
        tracker: Any = choice
        try:
            # Trackers that are written for other libraries open their run when they are made.
            if isinstance(choice, type):
                tracker = _make(choice, project_name, self._project.logging_dir, options)
            tracker.start()
        except (TypeError, ValueError, ImportError):
            raise
        except Exception as error:
            self._warn(choice, "start", error)
            return
        self.opened.append(tracker)
        if config is not None:
            self._call(tracker, "store_init_configuration", mask_secrets(config))

    def log(
        self, values: Mapping[str, Any], step: int | None, log_kwargs: Mapping[str, Mapping[str, Any]] | None
    ) -> None:
        """Log values to every open tracker. Not collective."""
        if self.chosen and not self._is_open:
            logger.warning_once("log() was called before init_trackers(): nothing is stored")
        for name in self._unknown(log_kwargs or {}):
            logger.warning_once(f"log_kwargs has options for {name!r}, and no tracker is called so")
        if self.opened:
            plain = {name: _plain_number(value) for name, value in values.items()}
            for tracker in self.opened:
                self._call(tracker, "log", dict(plain), step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def _unknown(self, options: Mapping[str, Any]) -> set[str]:
        """Return the names that are no tracker's. A script may have options for others than those of this run."""
        return set(options) - {tracker.name for tracker in self.chosen} - set(tracker_names()) if options else set()

    def get(self, name: str) -> GeneralTracker:
        """Return the tracker called `name`; on ranks that do not log, one that does nothing."""
        known = {tracker.name: tracker for tracker in self.chosen}
        chosen = known.get(name)
        # Others than the main process are not told that it has opened them alone, and have nothing to log to.
        if chosen is None or not self._is_open and (self._process.is_main or not chosen.main_process_only):
            state = "" if self._is_open else "; call init_trackers() first"
            raise ConfigError(
                f"no tracker {name!r} is open{did_you_mean(name, known)} Trackers of log_with: "
                f"{', '.join(known) or 'none'}{state}"
            )
        return next((tracker for tracker in self.opened if tracker.name == name), BlankTracker())

    def finish(self) -> None:
        """Close the open trackers."""
        for tracker in self.opened:
            self._call(tracker, "finish")
        self.opened = []
        self._failed = set()
        self._is_open = False

    def _call(self, tracker: GeneralTracker, method: str, *args: Any, **kwargs: Any) -> None:
        try:
            getattr(tracker, method)(*args, **kwargs)
        except Exception as error:
            self._warn(tracker, method, error)

    def _warn(self, tracker: GeneralTracker | type[GeneralTracker], method: str, error: Exception) -> None:
        if tracker.name not in self._failed:
            self._failed.add(tracker.name)
            logger.warning(
                f"tracker {tracker.name!r} failed in {method}, and the training goes on; further failures are not "
                f"reported: {type(error).__name__}: {redact(str(error), self._secrets)}",
                main_process_only=False,
            )


def _make(
    kind: type[GeneralTracker], project_name: str, logging_dir: str | Path | None, options: Mapping[str, Any]
) -> GeneralTracker:
    """Return a tracker of a class; one that is written for accelerate takes a directory only where it needs one."""
    parameters = inspect.signature(kind).parameters.values()
    takes = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    if takes_any or len(takes) > 1 and (kind.requires_logging_directory or takes[1].name == "logging_dir"):
        return kind(project_name, logging_dir, **options)
    return kind(project_name, **options)


def _choose(
    log_with: TrackerChoice | Sequence[TrackerChoice] | None, logging_dir: str | Path | None
) -> list[GeneralTracker | type[GeneralTracker]]:
    given = [log_with] if isinstance(log_with, str | GeneralTracker | type) else list(log_with or ())
    chosen = [tracker for item in given for tracker in _expand(item, logging_dir)]
    if given and not chosen:
        # "all" names none that has to be there: one script serves machines with trackers and without.
        logger.warning(
            "log_with='all', and no tracker can be used, so that nothing is logged: known are %s; for one, run `pip "
            "install 'accel-trainer[tensorboard]'`, and give Accelerator(project_dir=...)",
            ", ".join(tracker_names()),
        )
    unique: dict[str, GeneralTracker | type[GeneralTracker]] = {}
    for tracker in chosen:
        if not logging_dir and isinstance(tracker, type) and tracker.requires_logging_directory:
            raise ConfigError(
                f"Logging with `{tracker.name}` requires a `logging_dir`, and there is none for its files; pass "
                "Accelerator(project_dir=...), or ProjectConfiguration(logging_dir=...)"
            )
        if unique.setdefault(tracker.name, tracker) is not tracker:
            raise ConfigError(f"log_with holds two trackers called {tracker.name!r}; give each a name of its own")
    return list(unique.values())


def _expand(item: Any, logging_dir: str | Path | None) -> list[GeneralTracker | type[GeneralTracker]]:
    """Return the trackers that one entry of `log_with` names, or is."""
    if not isinstance(item, str):
        return [_check_tracker(item)]
    if item.lower() != "all":
        return [load_tracker(item if item in tracker_names() else item.lower())]
    everything = [load_tracker(name) for name in installed_trackers()]
    return [tracker for tracker in everything if logging_dir or not tracker.requires_logging_directory]


def _check_tracker(item: Any) -> GeneralTracker | type[GeneralTracker]:
    kind = item if isinstance(item, type) else type(item)
    if not issubclass(kind, GeneralTracker):
        raise ConfigError(
            f"log_with holds a {kind.__name__}; give a name ({', '.join(tracker_names())} or 'all'), or an object of a "
            "subclass of accel_trainer.tracking.GeneralTracker"
        )
    if inspect.isabstract(kind) or not isinstance(getattr(kind, "name", None), str):
        missing = sorted(getattr(kind, "__abstractmethods__", ())) or ["name"]
        raise ConfigError(f"tracker class {kind.__name__} lacks {', '.join(missing)}; see GeneralTracker")
    tracker: GeneralTracker | type[GeneralTracker] = item
    return tracker


class AcceleratorTracking(AcceleratorSettings):
    """Trackers and profiles."""

    _trackers: Trackers

    log_with = Forwarded[list[GeneralTracker | type[GeneralTracker]]]("_trackers.chosen")
    """Trackers that `init_trackers` opens."""
    trackers = Forwarded[list[GeneralTracker]]("_trackers.opened")
    """Open trackers that this rank logs to."""

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Open a run with every tracker of `log_with`, but those that cannot be reached, with a warning.

        All ranks call it, or the main process alone, as many scripts do.

        Args:
            project_name: of the project or experiment that the run belongs to.
            config: hyperparameters to store. Values of keys such as `api_key` or `hub_token` are stored as `***`.
            init_kwargs: options by tracker: `{"wandb": {"entity": ...}}`.

        Raises:
            ConfigError: an argument is wrong; also on the ranks that do not log.
        """
        self._trackers.init(project_name, config, init_kwargs)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Give values to every tracker, on the ranks that log; ranks do not communicate.

        A tracker that fails warns once and never stops the training. Without `log_with` nothing happens.

        Args:
            values: by name; tensors of one element become numbers, which waits for the device.
            log_kwargs: further arguments by tracker: `{"wandb": {"commit": False}}`.
        """
        self._trackers.log(values, step, log_kwargs)

    def perf(self) -> dict[str, Any]:
        """Return tokens and samples a second, MFU and more since the last call, for `log`. Collective.

        Figures are those of all ranks, by names that begin with `perf/`; docs/trackers.md lists them. Waits for the
        device: call it where the loop logs. Without the option `meters` nothing is counted, and the dict is empty.
        """
        if self.meters is None:
            return {}
        figures: dict[str, Any] = self.meters.read(self.process.world_size // self.readers.world_size)
        if self.slow_ranks is not None:
            own = self.slow_ranks.read().to(self.device)
            figures |= self.slow_ranks.judge(collectives.gather(own[None], self.process))
        return figures

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker called `name`, whose methods raise; on ranks that do not log, one that does nothing.

        Args:
            unwrap: return the library's own run object instead, None on ranks that do not log.

        Raises:
            ConfigError: the run has no such tracker.
        """
        tracker = self._trackers.get(name)
        return tracker.tracker if unwrap else tracker

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[profiler.profile]:
        """Record a block with torch's profiler, by default as `kwargs_handlers` says. Collective at its end."""
        handler = self._options.profile if profile_handler is None else profile_handler
        with handler.build(self.process.rank) as recorder:
            yield recorder
        if self.process.is_distributed:
            # Traces of all ranks are on disk when the first one goes on.
            dist.barrier()

    def end_training(self) -> None:
        """Finish a background save and uploads, whose errors are raised, and trackers; leave the job. Collective."""
        # An earlier call has left the job: there is nobody to exchange anything with.
        has_left = self.process.is_distributed and not dist.is_initialized()
        self._checkpointer.close(is_failed=has_left)
        self._trackers.finish()
        if not self._data_config.split_batches:
            for scheduler in self._prepared.schedulers:
                scheduler.warn_of_rest(self.num_processes)
        if self.process.is_distributed and not has_left:
            # Nobody leaves while another rank still needs the group.
            dist.barrier()
        self.state.destroy_process_group()


def _plain_number(value: Any) -> Any:
    """Return a tensor of one element, or a number of NumPy's, as Python's; trackers take those alone for numbers."""
    is_number = isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1)
    return value.item() if is_number else value
