"""Strategies and trackers by name: strings resolved at first use; nothing is imported before it is asked for."""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import entry_points
from typing import Any

from accel_trainer.errors import AccelTrainerError, ConfigError, MissingExtraError, did_you_mean

__all__ = [
    "ENTRY_POINT_GROUP", "TRACKER_ENTRY_POINT_GROUP", "installed_trackers", "load_arguments_adapter", "load_strategy",
    "load_tracker", "register_strategy", "register_tracker", "strategy_names", "tracker_names",
]  # fmt: skip

ENTRY_POINT_GROUP = "accel_trainer.strategies"
TRACKER_ENTRY_POINT_GROUP = "accel_trainer.trackers"


class _Catalogue:
    """Classes of one kind by name: ours, registered ones, and those that installed packages declare."""

    def __init__(self, kind: str, group: str, targets: dict[str, str], reserved: dict[str, str] | None = None) -> None:
        self.kind = kind
        self.group = group
        self.targets = targets
        self.reserved = reserved or {}
        """Names with a meaning of their own in a configuration, by that meaning."""

    def _all(self) -> dict[str, str]:
        # A name of ours wins over that which an installed package declares.
        return {point.name: point.value for point in entry_points(group=self.group)} | self.targets

    def add(self, name: str, target: str) -> None:
        if name in self.targets or name in self.reserved:
            owner = self.targets.get(name) or self.reserved[name]
            raise ConfigError(f"{self.kind} {name!r} is already registered as {owner!r}; choose another name")
        self._split(target)
        self.targets[name] = target

    def _split(self, target: str) -> tuple[str, str]:
        module_name, _, attribute = target.partition(":")
        if not module_name or not attribute or ":" in attribute:
            raise ConfigError(f"{self.kind} target {target!r} is not of the form 'package.module:ClassName'")
        return module_name, attribute

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._all()))

    def load(self, name: str) -> Any:
        # Installed packages are asked only for a name that is not ours.
        target = self.targets.get(name) or self._all().get(name)
        if target is None:
            known = (*self.reserved, *self.names())
            plural = "strategies" if self.kind == "strategy" else "trackers"
            raise ConfigError(
                f"unknown {self.kind} {name!r}{did_you_mean(name, known) or '.'} Known {plural}: {', '.join(known)}; "
                f"packages add more through the entry-point group {self.group!r}"
            )
        try:
            module_name, attribute = self._split(target)
            return getattr(importlib.import_module(module_name), attribute)
        except AccelTrainerError:
            raise
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{self.kind} {name!r} points to {target!r}, which cannot be loaded: {error}") from error


_STRATEGIES = _Catalogue(
    "strategy",
    ENTRY_POINT_GROUP,
    {
        "single": "accel_trainer.strategies.single:SingleStrategy",
        "ddp": "accel_trainer.strategies.ddp:DDPStrategy",
        "deepspeed": "accel_trainer.integrations.deepspeed.strategy:DeepSpeedStrategy",
        "fsdp2": "accel_trainer.strategies.fsdp2.strategy:FSDP2Strategy",
    },
    reserved={"auto": "the choice by the number of processes"},
)
# Readers of a Trainer's arguments, for strategies with a configuration in a format of their own.
_ARGUMENTS_ADAPTERS = {"deepspeed": "accel_trainer.integrations.deepspeed.strategy"}
_TRACKERS = _Catalogue(
    "tracker",
    TRACKER_ENTRY_POINT_GROUP,
    {
        "mlflow": "accel_trainer.integrations.experiment_trackers:MLflowTracker",
        "tensorboard": "accel_trainer.integrations.experiment_trackers:TensorBoardTracker",
        "trackio": "accel_trainer.integrations.experiment_trackers:TrackioTracker",
        "wandb": "accel_trainer.integrations.experiment_trackers:WandBTracker",
    },
)
TRACKER_CLASSES: dict[str, type] = {}
"""Tracker classes that a script has registered, by name: they come before those of packages."""
# Each of our trackers needs the package of its name, and the extra of that name installs it.
_EXTRAS = frozenset(_TRACKERS.targets)
OWN_TRACKERS = {target.rpartition(":")[2]: name for name, target in _TRACKERS.targets.items()}
"""Names of our trackers by that of their class."""


def register_strategy(name: str, target: str) -> None:
    """Add a strategy under `name`; `target` is `"package.module:ClassName"`, imported at first use.

    Raises:
        ConfigError: the name is taken, or the target is not of that form.
    """
    _STRATEGIES.add(name, target)


def strategy_names() -> tuple[str, ...]:
    """Return the names that `load_strategy` accepts, sorted."""
    return _STRATEGIES.names()


def load_strategy(name: str) -> Any:
    """Import the strategy called `name` and return a new instance of it.

    Raises:
        ConfigError: no strategy has that name, or its target cannot be loaded.
        MissingExtraError: the strategy needs an engine that is not installed.
    """
    strategy = _STRATEGIES.load(name)
    try:
        return strategy()
    except (AttributeError, TypeError) as error:
        target = f"{strategy.__module__}:{strategy.__qualname__}"
        raise ConfigError(f"strategy {name!r} points to {target!r}, which cannot be loaded: {error}") from error


def load_arguments_adapter(name: str) -> Any:
    """Import the module that completes a strategy's own configuration from a Trainer's arguments; None without one."""
    target = _ARGUMENTS_ADAPTERS.get(name)
    return importlib.import_module(target) if target is not None else None


def register_tracker(name: str, target: str) -> None:
    """Add a tracker under `name`; `target` and errors as of `register_strategy`."""
    _TRACKERS.add(name, target)


def tracker_names() -> tuple[str, ...]:
    """Return the names that `load_tracker` accepts, sorted."""
    return tuple(sorted({*_TRACKERS.names(), *TRACKER_CLASSES}))


def _is_missing(name: str) -> bool:
    if name not in _EXTRAS or name in TRACKER_CLASSES:
        return False
    # A folder of that name, as wandb leaves one beside a script, is found too; it has no file.
    return getattr(importlib.util.find_spec(name), "origin", None) is None


def installed_trackers() -> tuple[str, ...]:
    """Return the names of the trackers whose package is installed, sorted."""
    return tuple(name for name in tracker_names() if not _is_missing(name))


def load_tracker(name: str) -> Any:
    """Import the adapter of the tracker called `name` and return its class; the tracker's own package waits for a run.

    Raises:
        ConfigError: no tracker has that name, or its target cannot be imported.
        MissingExtraError: its package is not installed.
    """
    if name in TRACKER_CLASSES:
        return TRACKER_CLASSES[name]
    tracker = _TRACKERS.load(name)
    if _is_missing(name):
        raise MissingExtraError(
            f"tracker {name!r} needs the package {name!r}, which is not installed; run "
            f"`pip install 'accel-trainer[{name}]'`, or take {name!r} out of log_with"
        )
    return tracker
