"""`auto_find_batch_size`: train, and start again with a smaller batch whenever the device runs out of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from accel_trainer.errors import ConfigError

__all__ = ["EvaluationOutOfMemoryError", "find_executable_batch_size", "is_out_of_memory"]

T = TypeVar("T")

_MESSAGES = (
    "out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "can't allocate memory",  # DefaultCPUAllocator
)


class EvaluationOutOfMemoryError(RuntimeError):
    """Memory ran out in an evaluation during a search for the training batch size."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory, of the device or of the machine, ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


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
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        batch_size = int(batch_size * 0.9)
    raise ConfigError(
        f"auto_find_batch_size went down from {start} to a batch size of 1, and memory still ran out; use a smaller "
        "model, activation_checkpointing=True, or fsdp=True on more processes"
    )
