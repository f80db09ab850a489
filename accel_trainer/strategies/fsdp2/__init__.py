"""Fully sharded data parallel with torch's `fully_shard` (FSDP2)."""

from accel_trainer.strategies.fsdp2.strategy import FSDP2Strategy

__all__ = ["FSDP2Strategy"]
