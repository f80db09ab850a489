"""Re-exports: PartialState and its relatives, at the path that users of similar libraries expect."""

from __future__ import annotations

from typing import Any

from accel_trainer.accelerator.shared_state import (
    AcceleratorState,
    DistributedType,
    GradientState,
    PartialState,
    is_initialized,
)
from accel_trainer.unsupported import explain_missing

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState", "is_initialized"]


def __getattr__(name: str) -> Any:
    raise explain_missing(__name__, name)
