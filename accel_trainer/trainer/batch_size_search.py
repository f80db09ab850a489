"""`auto_find_batch_size`: train, and start again with a smaller batch whenever the device runs out of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accel_trainer.errors import ConfigError
from accel_trainer.runtime.memory import clear_device_cache, is_out_of_memory

__all__ = ["EvaluationOutOfMemoryError", "find_executable_batch_size", "is_out_of_memory"]

T = TypeVar("T")


class EvaluationOutOfMemoryError(RuntimeError):
    """Memory ran out in an evaluation during a search for the training batch size."""


def find_executable_batch_size(function: Callable[[int], T], start: int) -> T:
    """Call `function` with `start`, then with nine tenths of it, and so on, until it does not run out of memory.

    Raises:
        ConfigError: it does so even with a batch size of 1. Any other error of `function` is passed on.
    """
    batch_size = start
    while batch_size > 0:
        try:
            return function(batch_size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Outside of the handler: the traceback held the failed step's tensors.
        clear_device_cache(garbage_collection=True)
        batch_size = int(batch_size * 0.9)
    raise ConfigError(
        f"auto_find_batch_size went down from {start} to a batch size of 1, and memory still ran out; use a smaller "
        "model, activation_checkpointing=True, or fsdp=True on more processes"
    )
