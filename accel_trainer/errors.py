"""Errors of accel_trainer. Every message has three parts: the value found, the one expected, and the way out.

Each class is also the builtin that callers already catch, so `except ValueError` keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "AccelTrainerError", "BatchSizeError", "CannotPadNestedTensorWarning", "CheckpointLockedError",
    "CheckpointNotFoundError", "ConfigError", "CorruptCheckpointError", "DesyncError", "DiskFullError",
    "DistributedOperationException", "HangError", "IncompatibleCheckpointError", "MissingExtraError",
    "NonFiniteError", "ProcessGroupError", "RemoteRankError", "SaveTimeoutError", "UnsupportedTypeError",
    "did_you_mean", "size_in_words",
]  # fmt: skip


MISSING_TORCHAO = "fp8 needs torchao, which is not installed: pip install 'accel-trainer[fp8]'; or use 'bf16'"


class AccelTrainerError(Exception):
    """Base of every error that accel_trainer raises on purpose."""


class ConfigError(AccelTrainerError, ValueError):
    """An option has a value that cannot be honoured."""


class ProcessGroupError(AccelTrainerError, RuntimeError):
    """The processes of a job contradict each other, or one of them failed."""


class DistributedOperationException(ProcessGroupError):
    """The ranks called different collectives, or one on tensors that do not fit; nothing was sent."""


class RemoteRankError(ProcessGroupError):
    """Another rank has failed or is gone (`failure`: its record), and this one cannot go on without it."""

    def __init__(self, message: str, failure: Any = None) -> None:
        super().__init__(message)
        self.failure = failure


class RankLostError(ProcessGroupError):
    """A rank was killed, and the others cannot go on without it, though they were to."""


class HangError(ProcessGroupError):
    """A rank did not come to a collective within its timeout."""

    exit_code = 75  # of the process, where nobody catches it


class DesyncError(DistributedOperationException):
    """The ranks have taken different paths: one of them calls another collective than the others."""

    exit_code = 75  # of the process, where nobody catches it


class UnsupportedTypeError(ConfigError, TypeError):
    """A value is of a class that an operation cannot be applied to, or a function got other arguments than it takes."""


class BatchSizeError(ConfigError, RuntimeError):
    """No batch size leaves enough memory."""


class OffloadedModelError(ConfigError, RuntimeError):
    """A model whose weights come to their device for each forward only was to be moved or cast."""


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor was to be padded, and is left as it is."""


class CheckpointNotFoundError(AccelTrainerError, FileNotFoundError):
    """A checkpoint, or a file that belongs to it, is not where it was looked for."""


class IncompatibleCheckpointError(AccelTrainerError, ValueError):
    """A checkpoint exists, and does not fit the model, the optimizer or the job."""


class CorruptCheckpointError(IncompatibleCheckpointError):
    """A checkpoint differs from the one that was written: a file was changed, cut or added."""


class CheckpointLockedError(AccelTrainerError, RuntimeError):
    """Another run writes to the directory."""


class DiskFullError(AccelTrainerError, OSError):
    """A save does not fit on its disk; earlier checkpoints are untouched."""


class SaveTimeoutError(AccelTrainerError, TimeoutError):
    """The background save before this one has not ended in time."""


class NonFiniteError(AccelTrainerError, ArithmeticError):
    """Gradients are NaN or infinite, and training on would spread them to every weight."""

    exit_code = 76


class MissingExtraError(AccelTrainerError, ImportError):
    """An optional dependency is needed; the message names the extra to install."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest known name, or an empty string."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    return f"; did you mean {by_lower[matches[0]]!r}?" if matches else ""


def size_in_words(num_bytes: float) -> str:
    """Return bytes in GiB, or in MiB or KiB where they are less than one."""
    size, unit = num_bytes / 2**10, 0
    while size >= 2**10 and unit < 2:
        size, unit = size / 2**10, unit + 1
    return f"{size:.2f} {('KiB', 'MiB', 'GiB')[unit]}"
