"""Strategies by name: strings resolved at first use, so that no engine is imported before it is asked for."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from accel_trainer.errors import AccelTrainerError, ConfigError, did_you_mean

__all__ = ["ENTRY_POINT_GROUP", "load_strategy", "register_strategy", "strategy_names"]

ENTRY_POINT_GROUP = "accel_trainer.strategies"

# Means "single or ddp, by the number of processes" in a configuration.
_AUTO = "auto"

_STRATEGIES: dict[str, str] = {
    "single": "accel_trainer.strategies.native:SingleStrategy",
    "ddp": "accel_trainer.strategies.ddp:DDPStrategy",
    "fsdp2": "accel_trainer.strategies.fsdp2:FSDP2Strategy",
}


def _entry_points() -> dict[str, str]:
    """Strategies that installed packages declare; a built-in name always wins over a package's."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def register_strategy(name: str, target: str) -> None:
    """Add a strategy under `name`; `target` is `"package.module:ClassName"`, imported at first use.

    Raises:
        ConfigError: the name is taken, or the target is not of that form.
    """
    if name in _STRATEGIES or name == _AUTO:
        owner = _STRATEGIES.get(name, "the choice by the number of processes")
        raise ConfigError(f"strategy {name!r} is already registered as {owner!r}; choose another name")
    _split_target(target)
    _STRATEGIES[name] = target


def _split_target(target: str) -> tuple[str, str]:
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute or ":" in attribute:
        raise ConfigError(f"strategy target {target!r} is not of the form 'package.module:ClassName'")
    return module_name, attribute


def strategy_names() -> tuple[str, ...]:
    """Return the names that `load_strategy` accepts, sorted."""
    return tuple(sorted({*_STRATEGIES, *_entry_points()}))


def load_strategy(name: str) -> Any:
    """Import the strategy called `name` and return a new instance of it.

    Raises:
        ConfigError: no strategy has that name, or its target cannot be imported.
        MissingExtraError: the strategy needs an engine that is not installed.
    """
    target = _STRATEGIES.get(name) or _entry_points().get(name)
    if target is None:
        known = (_AUTO, *strategy_names())
        raise ConfigError(
            f"unknown strategy {name!r}{did_you_mean(name, known) or '.'} Known strategies: {', '.join(known)}; "
            f"packages add more through the entry-point group {ENTRY_POINT_GROUP!r}"
        )
    try:
        module_name, attribute = _split_target(target)
        return getattr(importlib.import_module(module_name), attribute)()
    except AccelTrainerError:
        raise
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"strategy {name!r} points to {target!r}, which cannot be loaded: {error}") from error
