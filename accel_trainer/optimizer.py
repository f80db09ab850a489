"""Re-exports: the prepared optimizer, at the path that users of similar libraries expect."""

from __future__ import annotations

from typing import Any

from accel_trainer.accelerator.accelerated_optimizer import AcceleratedOptimizer
from accel_trainer.unsupported import explain_missing

__all__ = ["AcceleratedOptimizer"]


def __getattr__(name: str) -> Any:
    raise explain_missing(__name__, name)
