"""Lay out a Trainer's model over the ranks, with its optimizer and its schedule, where a strategy shards it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from accel_trainer.trainer.accelerator_setup import complete_configuration

__all__ = ["keep_engine", "lay_out_engine", "lay_out_shards"]


def lay_out_shards(trainer: Any, max_steps: int) -> nn.Module:
    """Shard the model in place, and return it. Collective.

    The optimizer is built from the sharded parameters: nothing has to be re-bound.
    """
    model: nn.Module = trainer.accelerator.prepare_model(trainer.model)
    trainer.model = trainer.model_wrapped = model
    trainer.optimizer = trainer.accelerator.prepare_optimizer(trainer.create_optimizer(model))
    trainer.create_scheduler(num_training_steps=max_steps)
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")
    return model


def lay_out_engine(trainer: Any, max_steps: int) -> nn.Module:
    """Build an engine around model and optimizer, and return it; `trainer.model` stays the bare model. Collective.

    The optimizer of an earlier train() keeps its state.

    Raises:
        ConfigError: the engine's configuration contradicts the arguments, or leaves something open.
    """
    state = _release(trainer)
    complete_configuration(trainer, max_steps)
    optimizer = trainer.create_optimizer(trainer.model)
    engine: nn.Module
    engine, trainer.optimizer = trainer.accelerator.prepare(trainer.model, optimizer)
    keep_engine(trainer, engine)
    if state is not None:
        trainer.engine_unit.checkpoint_io().load_full_optimizer_state(state)
    trainer.create_scheduler(num_training_steps=max_steps)
    return engine


def keep_engine(trainer: Any, engine: nn.Module) -> None:
    """Have the Trainer call an engine from now on; what was prepared is only bare again when it is released."""
    trainer.engine_unit = trainer.accelerator.unit_of(engine)
    trainer.model_wrapped = trainer.deepspeed = engine


def _release(trainer: Any) -> Any:
    """Take the engine of an earlier train() or evaluate() off, and return its optimizer's state. Collective."""
    unit, trainer.engine_unit = trainer.engine_unit, None
    if unit is None or unit.model is unit.module:
        return None
    state = unit.checkpoint_io().full_optimizer_state() if unit.optimizers else None
    unit.release()
    return state
