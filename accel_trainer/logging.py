"""Rank-aware logging: one line per job unless a line asks for every rank.

The rank is set once by `runtime.process` when it is known; before that, a process is taken for the main one.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

__all__ = ["RankLogger", "get_logger", "set_rank"]

_rank = 0


def set_rank(rank: int) -> None:
    """Tell the loggers of this process which rank it is."""
    global _rank
    _rank = rank


class RankLogger(logging.LoggerAdapter):
    """A logger whose lines appear on the main process only, unless called with `main_process_only=False`."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._said: set[str] = set()

    def log(  # type: ignore[override]  # one keyword more than the standard library's
        self, level: int, msg: object, *args: Any, main_process_only: bool = True, **kwargs: Any
    ) -> None:
        """Log on rank 0, or on every rank with its number in front."""
        if main_process_only and _rank != 0:
            return
        if not self.isEnabledFor(level):
            return
        kwargs.setdefault("stacklevel", 2)
        prefixed = msg if main_process_only else f"[rank {_rank}] {msg}"
        self.logger.log(level, prefixed, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Leave the message as it is; the prefix is put on in `log`."""
        return msg, kwargs

    def warning_once(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """Warn with this message the first time only."""
        if msg not in self._said:
            self._said.add(msg)
            self.warning(msg, *args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """Return the rank-aware logger called `name`; `log_level` sets that logger's level and no other's."""
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return RankLogger(logger)
