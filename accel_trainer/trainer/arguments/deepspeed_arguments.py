"""`deepspeed` of TrainingArguments: one resolved configuration, and the object in which transformers looks it up.

transformers asks for that object wherever a model is built or loaded (`deepspeed.zero.Init`), and holds it by a weak
reference: while the arguments live, models are built in pieces, and no longer than that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers.integrations import deepspeed as transformers_deepspeed
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from accel_trainer import logging
from accel_trainer.config import Resolved
from accel_trainer.plugins.deepspeed_plugin import HfDeepSpeedConfig
from accel_trainer.registry import load_arguments_adapter
from accel_trainer.runtime.process import current_process

if TYPE_CHECKING:
    from accel_trainer.trainer.arguments.training_arguments import TrainingArguments

__all__ = ["complete_block", "settle_engine", "whole_models"]

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


def settle_engine(args: TrainingArguments) -> None:
    """Resolve the engine's configuration against the arguments, and bring the engine up. Collective.

    A number of the configuration goes into an argument that was left at its default. Nothing happens under a strategy
    without a configuration of its own.

    Raises:
        ConfigError: all conflicts of the configuration with the arguments, and all else that is wrong with it.
        MissingExtraError: the engine is not installed.
    """
    adapter = load_arguments_adapter(args.resolved.config.strategy)
    args.hf_deepspeed_config = None
    if adapter is None:
        return
    assert args.device is not None  # joins the job
    engine = adapter.resolve_arguments(args.resolved, _given(args), current_process())
    _take_numbers(args, engine)
    adapter.start_engine(current_process(), engine)
    # The arguments hold it: transformers does not.
    args.hf_deepspeed_config = HfDeepSpeedConfig(engine.data)
    if engine.stage < 3 or engine.builds_in_pieces:
        set_hf_deepspeed_config(args.hf_deepspeed_config)


@contextmanager
def whole_models() -> Iterator[None]:
    """Have transformers build whole models in this block, whatever arguments live; not collective."""
    reference = transformers_deepspeed._hf_deepspeed_config_weak_ref
    held = None if reference is None else reference()
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if held is not None:
            set_hf_deepspeed_config(held)


def _given(args: TrainingArguments) -> dict[str, tuple[Any, bool]]:
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    return {name: (getattr(args, name), getattr(args, name) == defaults[name]) for name in _NUMBERS}


def _take_numbers(args: TrainingArguments, engine: Any) -> None:
    """Give arguments that were left at their default the numbers of the configuration: one truth for both."""
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


def complete_block(
    args: TrainingArguments, resolved: Resolved, model: Any, *, num_steps: int | None = None, **given: str
) -> Resolved:
    """Return the configuration of the run with an engine's own configuration complete in it.

    Args:
        model: whose sizes the configuration may follow.
        num_steps: updates of the training; None leaves out what follows from it, which evaluation does not need.
        given: `given_optimizer` and `given_scheduler`: "torch", or "dummy" for those that the configuration describes.

    Raises:
        ConfigError: it contradicts the arguments, or nothing tells a value that it leaves open.
    """
    adapter = load_arguments_adapter(resolved.config.strategy)
    if adapter is None:
        return resolved
    warmup = None if num_steps is None else args.get_warmup_steps(num_steps)
    engine = adapter.resolve_arguments(
        resolved, _given(args), current_process(), model=model, num_steps=num_steps, num_warmup_steps=warmup, **given
    )
    return dataclasses.replace(resolved, config=dataclasses.replace(resolved.config, deepspeed=engine.data))
