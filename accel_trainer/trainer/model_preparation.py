"""Lay out a Trainer's model over the ranks, with its optimizer and its schedule, where a strategy shards it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from accel_trainer.plugins.deepspeed_plugin import DummyOptim, DummyScheduler
from accel_trainer.trainer.accelerator_setup import complete_configuration
from accel_trainer.trainer.inputs import fill_empty
from accel_trainer.trainer.running_trainer import PreparingTrainer

__all__ = ["keep_engine", "lay_out_engine", "lay_out_shards", "release_engine"]


def lay_out_shards(trainer: PreparingTrainer, max_steps: int) -> nn.Module:
    """Shard the model in place, and return it. Collective.

    The optimizer is built from the sharded parameters: nothing has to be re-bound.
    """
    model: nn.Module = trainer.accelerator.prepare_model(trainer.model)
    fill_empty(model)
    trainer.model = trainer.model_wrapped = model
    trainer.optimizer = trainer.accelerator.prepare_optimizer(trainer.create_optimizer(model))
    trainer.create_scheduler(num_training_steps=max_steps)
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")
    return model


def lay_out_engine(trainer: PreparingTrainer, max_steps: int) -> nn.Module:
    """Build an engine around model and optimizer, and return it; `trainer.model` stays the bare model. Collective.

    The optimizer of an earlier train() keeps its state.

    Raises:
        ConfigError: the engine's configuration contradicts the arguments, or leaves something open.
    """
    release_engine(trainer)
    state, trainer.engine_state = trainer.engine_state, None
    query = trainer.args.hf_deepspeed_config
    described = [name for name in ("optimizer", "scheduler") if query.get_value(name)]
    if trainer.describes_optimizer:
        trainer.optimizer = None  # the engine built that of the earlier train()
    trainer.describes_optimizer = "optimizer" in described and trainer.optimizer is None
    describes_scheduler = "scheduler" in described and trainer.lr_scheduler is None
    complete_configuration(trainer, max_steps, trainer.describes_optimizer, describes_scheduler)
    optimizer = _build_optimizer(trainer)
    engine: nn.Module
    if describes_scheduler:
        # It steps with the engine: create_scheduler() finds it, and makes none.
        engine, trainer.optimizer, trainer.lr_scheduler = trainer.accelerator.prepare(
            trainer.model, optimizer, DummyScheduler(optimizer)
        )
        trainer._created_lr_scheduler = True
    else:
        engine, trainer.optimizer = trainer.accelerator.prepare(trainer.model, optimizer)
        trainer.create_scheduler(num_training_steps=max_steps)
    keep_engine(trainer, engine)
    if state is not None:
        _give_back(trainer, state)
    return engine


def _give_back(trainer: PreparingTrainer, state: Any) -> None:
    """Load the optimizer's state of an earlier train(); its options, such as the learning rate, begin anew."""
    groups = trainer.optimizer.param_groups
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    trainer.engine_unit.checkpoint_io().load_full_optimizer_state(state)
    for group, own in zip(groups, options, strict=True):
        group.update(own)


def _build_optimizer(trainer: PreparingTrainer) -> Any:
    """Return the Trainer's own optimizer, or what stands for that of the engine's configuration."""
    if trainer.describes_optimizer:
        return DummyOptim([parameter for parameter in trainer.model.parameters() if parameter.requires_grad])
    optimizer = trainer.create_optimizer(trainer.model)
    # Of a model whose every parameter decays, or none does. The engine drops empty groups, and schedules count them.
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer


def keep_engine(trainer: PreparingTrainer, engine: nn.Module) -> None:
    """Have the Trainer call an engine from now on; what was prepared is only bare again when it is released."""
    trainer.engine_unit = trainer.accelerator.unit_of(engine)
    trainer.model_wrapped = trainer.deepspeed = engine


def release_engine(trainer: PreparingTrainer) -> None:
    """Take the engine of an earlier train() or evaluate() off, and keep its optimizer's state. Collective."""
    unit, trainer.engine_unit = trainer.engine_unit, None
    if unit is None or unit.model is unit.module:
        return
    trainer.engine_state = unit.checkpoint_io().full_optimizer_state() if unit.optimizers else None
    unit.release()
