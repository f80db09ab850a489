"""A Trainer's model prepared by its Accelerator: for training, with optimizer and schedule, or for evaluation."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from accel_trainer.plugins.deepspeed_plugin import DummyOptim, DummyScheduler
from accel_trainer.strategies.api import TrainUnit
from accel_trainer.trainer.accelerator_setup import resolve_for_model
from accel_trainer.trainer.arguments.deepspeed_arguments import complete_engine_config
from accel_trainer.trainer.inputs import fill_empty
from accel_trainer.trainer.running_trainer import PreparingTrainer

__all__ = ["ModelPreparation"]


class ModelPreparation:
    """The prepared model of one Trainer, and the optimizer state that outlives an engine around it.

    An engine that is a module around the model, with the optimizer in it, is built for one `train()` or `evaluate()`
    and released before the next.
    """

    def __init__(self) -> None:
        self._unit: TrainUnit | None = None
        self._optimizer_state: dict[str, Any] | None = None
        """Of an engine that was released, for the next one to load."""
        self._builds_optimizer = False
        """Whether the engine builds the optimizer, as its configuration describes it."""

    def prepare_for_training(self, trainer: PreparingTrainer, max_steps: int) -> nn.Module:
        """Shard the model, build optimizer and schedule, and return the module to call. Collective.

        Raises:
            ConfigError: an engine's configuration contradicts the arguments, or leaves something open.
        """
        if trainer.accelerator.strategy.capabilities.builds_engine:
            return self._build_engine(trainer, max_steps)
        model: nn.Module = trainer.accelerator.prepare_model(trainer.model)
        self._adopt(trainer, model)
        # Built from the sharded parameters: nothing has to be re-bound.
        trainer.optimizer = trainer.accelerator.prepare_optimizer(trainer.create_optimizer(model))
        trainer.create_scheduler(num_training_steps=max_steps)
        return model

    def prepare_for_evaluation(self, trainer: PreparingTrainer) -> tuple[nn.Module, float | None]:
        """Return the module to call, and the seconds it took to prepare it where it was not prepared for training.

        Collective when there is something to prepare.
        """
        args, accelerator = trainer.args, trainer.accelerator
        model = trainer._wrap_model(trainer.model, training=False)
        dtype = torch.float16 if args.fp16_full_eval else torch.bfloat16 if args.bf16_full_eval else None
        if dtype is not None and not trainer.is_in_train:
            # Before it is prepared: a sharded model owns its placement.
            model = model.to(dtype=dtype) if trainer.is_sharded else model.to(dtype=dtype, device=args.device)
        if model is trainer.model and not accelerator.is_prepared(model):
            start_time = time.time()
            model = accelerator.prepare_model(model, evaluation_mode=True)
            self._adopt(trainer, model)
            return model, round(time.time() - start_time, 4)
        # An engine, in training too: it computes in its own dtype, and gathers the parameters that it has sharded.
        return (trainer.model_wrapped if trainer.is_sharded else model), None

    def release(self) -> None:
        """Take the engine of an earlier train() or evaluate() off the model; keep its optimizer's state. Collective."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.model is not unit.module:
            self._optimizer_state = unit.checkpoint_io().full_optimizer_state() if unit.optimizers else None
            unit.release()

    def _adopt(self, trainer: PreparingTrainer, model: nn.Module) -> None:
        fill_empty(model)
        self._unit = trainer.accelerator.unit_of(model)
        trainer.model_wrapped = model
        if trainer.accelerator.strategy.capabilities.builds_engine:
            trainer.deepspeed = model
        if hasattr(model, "generate"):
            # generate() calls modules by themselves, which FSDP2 has to gather; torch leaves other models as they are.
            register_fsdp_forward_method(model, "generate")

    def _build_engine(self, trainer: PreparingTrainer, max_steps: int) -> nn.Module:
        """Build an engine around model and optimizer, and return it; `trainer.model` stays the bare model."""
        self.release()
        state, self._optimizer_state = self._optimizer_state, None
        args, accelerator = trainer.args, trainer.accelerator
        describes = args.hf_deepspeed_config.get_value
        if self._builds_optimizer:
            trainer.optimizer = None  # the engine built that of the earlier train()
        self._builds_optimizer = trainer.optimizer is None and bool(describes("optimizer"))
        builds_scheduler = trainer.lr_scheduler is None and bool(describes("scheduler"))
        # Only now are the model's sizes and the number of updates known, which the configuration may leave open.
        accelerator.reconfigure(
            complete_engine_config(
                args,
                resolve_for_model(args, trainer.model),
                trainer.model,
                num_steps=max_steps,
                given_optimizer="dummy" if self._builds_optimizer else "torch",
                given_scheduler="dummy" if builds_scheduler else "torch",
            )
        )
        optimizer = self._optimizer_of(trainer)
        engine: nn.Module
        if builds_scheduler:
            # It steps with the engine: create_scheduler() finds it, and makes none.
            engine, trainer.optimizer, trainer.lr_scheduler = accelerator.prepare(
                trainer.model, optimizer, DummyScheduler(optimizer)
            )
            trainer._created_lr_scheduler = True
        else:
            engine, trainer.optimizer = accelerator.prepare(trainer.model, optimizer)
            trainer.create_scheduler(num_training_steps=max_steps)
        self._adopt(trainer, engine)
        if state is not None:
            self._restore(trainer, state)
        return engine

    def _optimizer_of(self, trainer: PreparingTrainer) -> Any:
        """Return the Trainer's own optimizer, or a placeholder for the one that the engine builds."""
        if self._builds_optimizer:
            return DummyOptim([parameter for parameter in trainer.model.parameters() if parameter.requires_grad])
        optimizer = trainer.create_optimizer(trainer.model)
        # Of a model whose every parameter decays, or none does. DeepSpeed drops empty groups, and schedules count them.
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def _restore(self, trainer: PreparingTrainer, state: dict[str, Any]) -> None:
        """Load the optimizer's state of an earlier train(); its options, such as the learning rate, begin anew."""
        groups = trainer.optimizer.param_groups
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        trainer.accelerator.unit_of(trainer.model).checkpoint_io().load_full_optimizer_state(state)
        for group, own in zip(groups, options, strict=True):
            group.update(own)
