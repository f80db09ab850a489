"""Re-exports: models that begin without memory, at the path that users of similar libraries expect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_trainer.checkpoint.weights.into_model import load_checkpoint_and_dispatch, load_checkpoint_in_model
from accel_trainer.checkpoint.weights.meta_device import init_empty_weights, init_on_device
from accel_trainer.unsupported import explain_missing

__all__ = ["init_empty_weights", "init_on_device", "load_checkpoint_and_dispatch", "load_checkpoint_in_model"]


if not TYPE_CHECKING:  # a type checker would take every name for one of this module's

    def __getattr__(name: str) -> Any:
        raise explain_missing(__name__, name)
