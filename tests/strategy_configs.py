"""Strategies by the names that tests have for them ("ddp", "fsdp2", "zero2"), and the mark of those of DeepSpeed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")


def config_of(strategy: str, micro_batch_size: int) -> dict[str, Any]:
    """Return the configuration of an Accelerator: "zero1" to "zero3" are DeepSpeed's stages."""
    if not strategy.startswith("zero"):
        return {"strategy": strategy}
    block = {"zero_optimization": {"stage": int(strategy[4:])}, "train_micro_batch_size_per_gpu": micro_batch_size}
    return {"strategy": "deepspeed", "deepspeed": block}


def marked(*strategies: str) -> list[Any]:
    return [pytest.param(name, marks=needs_deepspeed if name.startswith("zero") else ()) for name in strategies]
