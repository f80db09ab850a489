"""Retries of saves that meet an error of the disk: the run ends, goes on without the save, or waits for room."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import torch.distributed as dist

from accel_trainer import logging
from accel_trainer.errors import AccelTrainerError, ConfigError, DiskFullError, ProcessGroupError, did_you_mean
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import gather_or_raise

__all__ = ["RETRY_SECONDS", "SaveErrorAction", "SavePolicy", "save_persistently"]

logger = logging.get_logger(__name__)

T = TypeVar("T")

SaveErrorAction = Literal["raise", "warn", "pause"]

RETRY_SECONDS = 60.0
"""Between two attempts of a save that pauses the run: an operator needs minutes to make room, not milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavePolicy:
    """The answer to a save that fails for the disk's sake, and limits on waiting."""

    on_save_error: SaveErrorAction = "raise"
    """"warn" goes on without the save; "pause" tries again every minute."""
    max_pause_s: float = 3600.0
    """With "pause": the error is raised after so many seconds."""
    max_wait_s: float | None = None
    """Longest wait of a save for the background save before it; None waits until that has ended."""

    def __post_init__(self) -> None:
        known = get_args(SaveErrorAction)
        if self.on_save_error not in known:
            hint = did_you_mean(str(self.on_save_error), known)
            raise ConfigError(f"on_save_error={self.on_save_error!r}; expected one of {', '.join(known)}{hint}")
        for name in ("max_pause_s", "max_wait_s"):
            seconds = getattr(self, name)
            is_time = isinstance(seconds, int | float) and 0 <= seconds <= 1e9
            if not is_time and (seconds is not None or name != "max_wait_s"):
                raise ConfigError(f"{name}={seconds!r}; expected a number of seconds from 0 to 1e9")

    @property
    def wait_s(self) -> float | None:
        """Longest wait of a save for the one before it; a save that pauses may take its time on top."""
        if self.max_wait_s is None:
            return None
        return self.max_wait_s + (self.max_pause_s if self.on_save_error == "pause" else 0.0)


def save_persistently(
    save: Callable[[], T],
    process: ProcessContext,
    policy: SavePolicy,
    section: str,
    group: dist.ProcessGroup | None = None,
) -> T | None:
    """Call `save` until it succeeds, as long as the policy allows. Collective, and all ranks act alike.

    The policy is for errors of the disk only: those of the system (`OSError`: full, over the quota, unreachable) and
    `DiskFullError`. Any other one is raised.

    Args:
        save: raises on all ranks when it fails on one of them; it can be called again.
        section: what is saved, for the messages: "save of run/checkpoint_3".
        group: see `gather_or_raise`.

    Returns:
        What `save` returned; None where it failed and the policy is to warn.
    """
    attempts_left = int(policy.max_pause_s // RETRY_SECONDS)
    while True:
        try:
            return save()
        except Exception as error:
            if policy.on_save_error == "raise" or not _is_of_a_disk(error, process, section, group):
                raise
            if policy.on_save_error == "warn":
                logger.warning("%s failed, and the run goes on without it (on_save_error='warn'): %s", section, error)
                return None
            if not attempts_left:
                raise
            logger.warning(
                "%s failed: %s. The run is paused (on_save_error='pause'): the next of %d more attempts is in %.0f s",
                section,
                error,
                attempts_left,
                RETRY_SECONDS,
            )
        attempts_left -= 1
        time.sleep(RETRY_SECONDS)


def _is_of_a_disk(error: Exception, process: ProcessContext, section: str, group: dist.ProcessGroup | None) -> bool:
    """Whether every rank failed for its own disk's sake, or because another rank did. Collective."""
    is_others = isinstance(error, ProcessGroupError)
    is_own = isinstance(error, OSError) and (
        isinstance(error, DiskFullError) or not isinstance(error, AccelTrainerError)
    )
    votes = gather_or_raise(process, section, None, (is_others, is_own), group)
    return all(others or own for others, own in votes) and any(own for _, own in votes)
