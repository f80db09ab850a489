"""The Accelerator of a Trainer, built from its arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

from accel_trainer.accelerator.accelerator import Accelerator
from accel_trainer.config import Resolved
from accel_trainer.errors import ConfigError
from accel_trainer.trainer.arguments.deepspeed_arguments import complete_engine_config
from accel_trainer.trainer.arguments.fsdp_arguments import check_recomputation, recomputes_activations
from accel_trainer.trainer.arguments.training_arguments import TrainingArguments

__all__ = ["build_accelerator", "resolve_for_model"]


def build_accelerator(args: TrainingArguments, model: Any) -> Accelerator:
    """Return the Accelerator of a Trainer. Collective.

    Raises:
        ConfigError: the arguments contradict each other, or cannot be honoured on this job.
    """
    _take_num_steps(args)
    accelerator = Accelerator(config=complete_engine_config(args, resolve_for_model(args, model), model))
    accelerator.gradient_state.plugin_kwargs.update(args.accelerator_config.gradient_accumulation_kwargs or {})
    shards = accelerator.strategy.capabilities.shards_parameters
    if shards:
        check_recomputation(args, accelerator.resolved)
    if shards and args.save_on_each_node:
        raise ConfigError(
            "save_on_each_node is set with a sharded model, whose full weights rank 0 alone gathers; leave it out; "
            "give an output_dir that all nodes share"
        )
    if args.auto_find_batch_size and accelerator.strategy.capabilities.builds_engine:
        raise ConfigError(
            f"auto_find_batch_size is set with strategy {accelerator.strategy.name!r}, whose engine is built for one "
            "batch size and keeps hold of the memory of an attempt that failed; set per_device_train_batch_size"
        )
    if args.auto_find_batch_size and accelerator.num_processes > 1:
        raise ConfigError(
            f"auto_find_batch_size is set on {accelerator.num_processes} processes: one that runs out of "
            "memory would leave the others waiting in a collective; set per_device_train_batch_size, and "
            "gradient_accumulation_steps for the rest of the batch. On one process it searches"
        )
    return accelerator


def _take_num_steps(args: TrainingArguments) -> None:
    """Take `num_steps` of `gradient_accumulation_kwargs` as the accumulation steps of the arguments."""
    given = args.accelerator_config.gradient_accumulation_kwargs or {}
    if "num_steps" not in given:
        return
    if args.gradient_accumulation_steps > 1 and args.gradient_accumulation_steps != given["num_steps"]:
        raise ConfigError(
            "The `AcceleratorConfig`'s `num_steps` is set but `gradient_accumulation_steps` is greater than 1 in the "
            f"passed `TrainingArguments` ({given['num_steps']} and {args.gradient_accumulation_steps}); keep one"
        )
    args.gradient_accumulation_steps = given["num_steps"]


def _recomputes(model: Any, args: TrainingArguments) -> bool:
    """Whether activations are computed again in the backward."""
    new_name = "is_activation_checkpointing"  # older releases have the other one, which the newest deprecates
    by_model = getattr(model, new_name if hasattr(type(model), new_name) else "is_gradient_checkpointing", False)
    return recomputes_activations(args) or bool(by_model)


def resolve_for_model(args: TrainingArguments, model: Any) -> Resolved:
    """Return the configuration of the Trainer's Accelerator.

    The Trainer makes the windows and divides the loss itself, so the Accelerator accumulates nothing. DDP looks for
    unused parameters unless the user decides: a pooler or a second head without gradient would stop it.
    """
    resolved, config = args.resolved, args.resolved.config
    changes: dict[str, Any] = {"accumulation": dataclasses.replace(config.accumulation, num_steps=1)}
    if not resolved.is_set("ddp.find_unused_parameters") and not config.ddp.static_graph:
        changes["ddp"] = dataclasses.replace(config.ddp, find_unused_parameters=not _recomputes(model, args))
    return dataclasses.replace(resolved, config=dataclasses.replace(config, **changes))
