"""Rank-aware logging and progress bars: one line, and one bar, per job unless every rank is asked for.

The rank is set once by `runtime.process` when it is known; before that, a process is taken for the main one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any

from accel_trainer.errors import ConfigError

__all__ = [
    "LEVEL_VARIABLE", "RankLogger", "current_rank", "get_logger", "set_level", "set_rank", "tqdm", "write_stderr",
]  # fmt: skip

LEVEL_VARIABLE = "ACCEL_TRAINER_LOG_LEVEL"

_rank = 0
_world_size = 1
_said: set[tuple[str, str]] = set()


def _wait_for_nobody() -> None:
    """The barrier of a process that is alone."""


_wait: Callable[[], None] = _wait_for_nobody


def set_rank(rank: int, world_size: int = 1, wait: Callable[[], None] = _wait_for_nobody) -> None:
    """Set the rank of this process's loggers; `wait` returns when every rank has called it, and orders their lines."""
    global _rank, _world_size, _wait
    _rank, _world_size, _wait = rank, world_size, wait


def set_level(name: str) -> None:
    """Set the level of this package's lines alone; a ConfigError where the logging module has no such level."""
    levels = logging.getLevelNamesMapping()
    if name.upper() not in levels:
        known = ", ".join(level.lower() for level in levels)
        raise ConfigError(f"environment variable {LEVEL_VARIABLE} is {name!r}; expected one of {known}")
    logging.getLogger("accel_trainer").setLevel(name.upper())


def write_stderr(text: str) -> None:
    """Write a line, or lines, to standard error where somebody reads it; a pipe to nobody ends nothing."""
    # `accel-trainer launch ... 2>&1 | tee log`: ctrl-C ends `tee` as well, before the run has saved.
    with suppress(OSError, ValueError, AttributeError):  # a pipe or a terminal that is gone, a closed stream, none
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def current_rank() -> int:
    """Return this process's rank; 0 as long as it has not joined a job."""
    return _rank


class RankLogger(logging.LoggerAdapter):
    """A logger whose lines appear on the main process only, unless called with `main_process_only=False`."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})

    def log(  # type: ignore[override]  # two keywords more than the standard library's
        self,
        level: int,
        msg: object,
        *args: Any,
        main_process_only: bool = True,
        in_order: bool = False,
        **kwargs: Any,
    ) -> None:
        """Log on rank 0, or on every rank with its number in front.

        Args:
            main_process_only: False logs on every rank.
            in_order: log on every rank, one after the other; whatever `main_process_only` says. Collective: every rank
                calls it, also where the level hides the line.
        """
        kwargs.setdefault("stacklevel", 2)
        if not in_order:
            if not main_process_only:
                self.logger.log(level, f"[rank {_rank}] {msg}", *args, **kwargs)
            elif _rank == 0:
                self.logger.log(level, msg, *args, **kwargs)
            return
        for turn in range(_world_size):
            if turn == _rank:
                self.logger.log(level, f"[rank {_rank}] {msg}", *args, **kwargs)
            # The next rank's line follows when this one's is out.
            _wait()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Leave the message as it is; the prefix is put on in `log`."""
        return msg, kwargs

    def warning_once(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """Warn with this message the first time only, in this process and under this logger's name.

        Takes the keywords of `log`, except `in_order`: the ranks may not all be here for the first time.
        """
        if (self.logger.name, msg) not in _said:
            _said.add((self.logger.name, msg))
            # One frame more than `warning` has: the line reported is the caller's.
            kwargs.setdefault("stacklevel", 3)
            self.warning(msg, *args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """Return the rank-aware logger called `name`; `log_level` sets that logger's level and no other's.

    Raises:
        ValueError: `log_level` is no level of the logging module.
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return RankLogger(logger)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return tqdm's bar, for a notebook or a terminal; on other ranks than 0 it iterates without showing anything.

    Args:
        main_process_only: False shows a bar on every rank.

    Raises:
        ConfigError: a bool comes first, as it did in old releases of accelerate.
    """
    from tqdm.auto import tqdm as bar

    if args and isinstance(args[0], bool):
        raise ConfigError(
            f"tqdm got {args[0]} as its first argument; give what to iterate over there, and "
            f"main_process_only={args[0]} by its name"
        )
    if main_process_only and current_rank() != 0:
        kwargs["disable"] = True
    return bar(*args, **kwargs)
