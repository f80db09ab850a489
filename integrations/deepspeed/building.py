"""Models built in pieces: transformers' own hook for `deepspeed.zero.Init`, so that no rank holds a whole one."""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accel_trainer.integrations.deepspeed.config import EngineConfig

__all__ = ["PiecewiseBuilding", "build_in_pieces"]


class PiecewiseBuilding:
    """What transformers asks while it builds a model; it keeps a weak reference, so the strategy holds this."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.is_asked_for = True

    def is_zero3(self) -> bool:
        """Whether parameters are to be partitioned as they are made."""
        return self.is_asked_for

    @contextmanager
    def switched(self, in_pieces: bool) -> Iterator[None]:
        """Build in pieces in this block, or whole."""
        before, self.is_asked_for = self.is_asked_for, in_pieces
        try:
            yield
        finally:
            self.is_asked_for = before


# What was asked for last: of one process, since transformers has one switch for all.
_latest: weakref.ref[PiecewiseBuilding] | None = None


def build_in_pieces(config: EngineConfig) -> PiecewiseBuilding | None:
    """Have `from_pretrained` and `from_config` partition parameters as they are made from now on, or no longer.

    Returns:
        What has to live as long as that shall hold; None when it is not asked for, or transformers is not installed.
    """
    global _latest
    before = None if _latest is None else _latest()
    if before is not None:
        before.is_asked_for = False
    if not config.builds_in_pieces or importlib.util.find_spec("transformers") is None:
        return None
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, set_hf_deepspeed_config

    if is_deepspeed_zero3_enabled():  # by the Trainer's arguments, which say the same and more
        return None
    building = PiecewiseBuilding(config.data)
    _latest = weakref.ref(building)
    set_hf_deepspeed_config(building)
    return building
