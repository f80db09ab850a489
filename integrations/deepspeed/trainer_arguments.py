"""The engine's configuration and start from a Trainer's arguments, before there is a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_trainer.config import Resolved
from accel_trainer.integrations.deepspeed.config import EngineConfig, Fact, Facts, hidden_size_of, resolve_engine_config
from accel_trainer.integrations.deepspeed.runtime import start_engine
from accel_trainer.runtime.process import ProcessContext

__all__ = ["resolve_arguments", "start_engine"]

Given = Mapping[str, tuple[Any, bool]]
"""Value of each argument by name, and whether it was left at its default."""


def resolve_arguments(
    resolved: Resolved,
    given: Given,
    process: ProcessContext,
    *,
    model: Any = None,
    num_steps: int | None = None,
    num_warmup_steps: int | None = None,
    given_optimizer: str = "none",
    given_scheduler: str = "none",
) -> EngineConfig:
    """Return the engine's configuration with every "auto" that the arguments answer.

    Args:
        resolved: of the run; its `deepspeed` block is read.
        given: the Trainer's arguments.
        model: for its sizes; None before there is one.
        num_steps: updates of the training. Without it, an "auto" that nothing fills yet is left out.
        given_optimizer: "torch", "dummy" for the one that the configuration describes, "none" if unknown.

    Raises:
        ConfigError: all that is wrong in the configuration, and all its conflicts with the arguments.
    """

    def fact(name: str) -> Fact:
        value, is_default = given[name]
        return Fact(value, f"TrainingArguments({name}=...)", is_default)

    (beta1, is_default1), (beta2, is_default2) = given["adam_beta1"], given["adam_beta2"]
    betas = Fact([beta1, beta2], "TrainingArguments(adam_beta1=..., adam_beta2=...)", is_default1 and is_default2)
    rate = fact("learning_rate")
    scheduler = {"warmup_max_lr": rate}
    if num_steps is not None:
        scheduler["total_num_steps"] = Fact(num_steps, "the Trainer's number of steps")
        scheduler["warmup_num_steps"] = Fact(num_warmup_steps or 0, "TrainingArguments(warmup_steps=...)")
    precision = str(resolved.config.mixed_precision)
    facts = Facts(
        world_size=process.world_size,
        micro_batch_size=fact("per_device_train_batch_size"),
        accumulation_steps=fact("gradient_accumulation_steps"),
        max_grad_norm=fact("max_grad_norm"),
        precision=Fact(precision, resolved.describe("mixed_precision"), not resolved.is_set("mixed_precision")),
        optimizer={"lr": rate, "betas": betas, "eps": fact("adam_epsilon"), "weight_decay": fact("weight_decay")},
        scheduler=scheduler,
        hidden_size=hidden_size_of(getattr(model, "config", None)),
        given_optimizer=given_optimizer,  # type: ignore[arg-type]
        given_scheduler=given_scheduler,  # type: ignore[arg-type]
        origins=resolved.block_origins(),
    )
    return resolve_engine_config(resolved.config.deepspeed, facts=facts, partial=num_steps is None)
