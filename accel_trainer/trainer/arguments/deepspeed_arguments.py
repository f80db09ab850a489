"""`deepspeed` of TrainingArguments, and the object that transformers asks, weakly held, to build sharded models."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainingArguments
from transformers.integrations import deepspeed as transformers_deepspeed
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from accel_trainer import logging
from accel_trainer.config import Resolved
from accel_trainer.errors import ConfigError
from accel_trainer.plugins.deepspeed_plugin import HfDeepSpeedConfig
from accel_trainer.registry import load_arguments_adapter
from accel_trainer.runtime.process import current_process
from accel_trainer.tracking import mask_secrets

logger = logging.get_logger(__name__)

_NUMBERS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_grad_norm",
    "learning_rate",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "weight_decay",
)


def deepspeed_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the options of `deepspeed` by dotted path; a ConfigError where `fsdp` is set, too."""
    if not args.deepspeed:
        return {}
    if args.fsdp:
        raise ConfigError(
            "fsdp and deepspeed are both set, and each of them would shard the model; leave one of them out"
        )
    return {"strategy": "deepspeed", "deepspeed": args.deepspeed}


def start_engine(args: TrainingArguments, resolved: Resolved) -> None:
    """Complete an engine's configuration, if any, from the arguments and start it; defaults take its. Collective.

    Raises:
        ConfigError: all conflicts of the configuration with the arguments, and all else that is wrong with it.
        MissingExtraError: the engine is not installed.
    """
    adapter = load_arguments_adapter(resolved.config.strategy)
    args.hf_deepspeed_config = None
    if adapter is None:
        return
    assert args.device is not None  # joins the job
    engine = adapter.resolve_arguments(resolved, _numbers(args), current_process())
    _fill_defaults(args, engine)
    adapter.start_engine(current_process(), engine.data)
    # The arguments hold it: transformers does not.
    args.hf_deepspeed_config = HfDeepSpeedConfig(engine.data)
    if engine.stage < 3 or engine.builds_in_pieces:
        set_hf_deepspeed_config(args.hf_deepspeed_config)


def masked_engine_config(args: Any) -> dict[str, Any]:
    """Return the attributes of the arguments in which the engine's configuration stands, by name, without secrets."""
    resolved, held = args.resolved, copy.copy(args.hf_deepspeed_config)
    if held is not None:
        held.config = mask_secrets(held.config)
    config = dataclasses.replace(resolved.config, deepspeed=mask_secrets(resolved.config.deepspeed))
    return {"resolved": dataclasses.replace(resolved, config=config), "hf_deepspeed_config": held}


@contextmanager
def unsharded_models() -> Iterator[None]:
    """Have transformers build full models in this block, whatever arguments live; not collective."""
    reference = transformers_deepspeed._hf_deepspeed_config_weak_ref
    config = None if reference is None else reference()
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if config is not None:
            set_hf_deepspeed_config(config)


def _numbers(args: TrainingArguments) -> dict[str, tuple[Any, bool]]:
    """Return the arguments that an engine's configuration may state as well, and whether each is at its default."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    return {name: (getattr(args, name), getattr(args, name) == defaults[name]) for name in _NUMBERS}


def _fill_defaults(args: TrainingArguments, engine: Any) -> None:
    """Set arguments at their default to the numbers of the configuration: conflicts were refused before."""
    params = engine.value("optimizer.params", {})
    numbers = {
        "per_device_train_batch_size": engine.micro_batch_size,
        "gradient_accumulation_steps": engine.accumulation_steps,
        "max_grad_norm": engine.gradient_clipping,
        "learning_rate": params.get("lr"),
        "adam_epsilon": params.get("eps"),
        "weight_decay": params.get("weight_decay"),
    }
    numbers["adam_beta1"], numbers["adam_beta2"] = params.get("betas") or (None, None)
    taken = {name: value for name, value in numbers.items() if value is not None and value != getattr(args, name)}
    for name, value in taken.items():
        setattr(args, name, value)
    if taken:
        shown = ", ".join(f"{name}={value}" for name, value in taken.items())
        logger.info("taken from the DeepSpeed configuration: %s", shown)


def complete_engine_config(
    args: TrainingArguments, resolved: Resolved, model: Any, *, num_steps: int | None = None, **given: str
) -> Resolved:
    """Return the configuration of a run with the engine's own one, if there is one, completed by the model's sizes.

    Args:
        num_steps: updates of the training; None leaves values open that depend on it, which evaluation does not need.
        given: `given_optimizer` and `given_scheduler`: "torch", or "dummy" for those that the configuration describes.
    """
    adapter = load_arguments_adapter(resolved.config.strategy)
    if adapter is None:
        return resolved
    warmup = None if num_steps is None else args.get_warmup_steps(num_steps)
    engine = adapter.resolve_arguments(
        resolved, _numbers(args), current_process(), model=model, num_steps=num_steps, num_warmup_steps=warmup, **given
    )
    in_pieces = {} if engine.stage < 3 or engine.builds_in_pieces else {"zero3_init_flag": False}
    return dataclasses.replace(
        resolved, config=dataclasses.replace(resolved.config, deepspeed={**engine.data, **in_pieces})
    )
