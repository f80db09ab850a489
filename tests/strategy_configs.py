"""Strategies by the names that tests have for them ("ddp", "fsdp2", "zero2"), and the mark of those of DeepSpeed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from torch import nn

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")


def zero_section(stage: int, whole: int = 40, **options: Any) -> dict[str, Any]:
    """Return a section `zero_optimization` whose stage 3 shards the matrices of tiny models, as it does of real ones.

    Args:
        whole: elements up to which the engine keeps a parameter whole on each rank; its own default is 100,000.
    """
    return {"stage": stage, **({"stage3_param_persistence_threshold": whole} if stage == 3 else {}), **options}


def config_of(strategy: str, micro_batch_size: int) -> dict[str, Any]:
    """Return the configuration of an Accelerator: "zero1" to "zero3" are DeepSpeed's stages."""
    if not strategy.startswith("zero"):
        return {"strategy": strategy}
    block = {"zero_optimization": zero_section(int(strategy[4:])), "train_micro_batch_size_per_gpu": micro_batch_size}
    return {"strategy": "deepspeed", "deepspeed": block}


def marked(*strategies: str) -> list[Any]:
    return [pytest.param(name, marks=needs_deepspeed if name.startswith("zero") else ()) for name in strategies]


def prepare_unit(
    options: Mapping[str, Any],
    model: nn.Module,
    optimizers: Sequence[Any],
    precision: str = "no",
    use_cpu: bool = False,
    **job: Any,
) -> Any:
    """Prepare a model on this rank without the facade, with `options` such as "strategy"; return its unit."""
    from accel_trainer.config import resolve
    from accel_trainer.precision import build_precision
    from accel_trainer.registry import load_strategy
    from accel_trainer.runtime.process import init_process, read_environment
    from accel_trainer.strategies.api import TrainJob

    process = init_process(read_environment(), use_cpu=use_cpu, timeout_seconds=60)
    made = TrainJob(model, optimizers, resolve(explicit=options, environ={}), **job)
    return load_strategy(options["strategy"]).prepare(made, build_precision(precision, process.device), process)
