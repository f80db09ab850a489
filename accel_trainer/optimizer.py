"""Re-exports: the prepared optimizer, at the path that users of similar libraries expect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_trainer.accelerator.accelerated_optimizer import AcceleratedOptimizer, move_to_device
from accel_trainer.unsupported import explain_missing

__all__ = ["AcceleratedOptimizer", "move_to_device"]


if not TYPE_CHECKING:  # a type checker would take every name for one of this module's

    def __getattr__(name: str) -> Any:
        raise explain_missing(__name__, name)
