"""Re-exports: PartialState and its relatives, at the path that users of similar libraries expect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_trainer.accelerator.shared_state import (
    AcceleratorState,
    DistributedType,
    GradientState,
    PartialState,
    is_initialized,
)
from accel_trainer.unsupported import explain_missing

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState", "is_initialized"]


if not TYPE_CHECKING:  # a type checker would take every name for one of this module's

    def __getattr__(name: str) -> Any:
        raise explain_missing(__name__, name)
