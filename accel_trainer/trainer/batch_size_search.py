"""`auto_find_batch_size`: attempts with ever smaller batches, each of which begins where the first one began."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_utils import TrainOutput

from accel_trainer.accelerator.accelerated_optimizer import AcceleratedOptimizer
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.memory import find_executable_batch_size, register_memory_owner
from accel_trainer.runtime.rng import KeptStreams
from accel_trainer.trainer.preparation import ModelPreparation
from accel_trainer.trainer.running_trainer import SearchingTrainer

__all__ = ["BatchSizeSearch"]


class BatchSizeSearch:
    """The state that a train() begins with, for each attempt of a search to begin with it again.

    transformers 5.23 goes on with the weights of the attempt that failed, after as many updates as that one had done,
    and on several ranks it hangs. Where a `model_init` makes the model, it makes one for each attempt; otherwise the
    weights are kept in the memory of the machine meanwhile.
    """

    def __init__(self, trainer: SearchingTrainer) -> None:
        """Keep the state.

        Raises:
            ConfigError: the model is sharded, and nothing can make another.
        """
        self._trainer = trainer
        self._builds_model = trainer.model_init is not None
        if trainer.is_sharded and not self._builds_model:
            raise ConfigError(
                f"auto_find_batch_size is set with strategy {trainer.accelerator.strategy.name!r}, which shards the "
                "model in place: an attempt that runs out of memory leaves nothing for the next one to begin with; "
                "give Trainer(model_init=...), which makes the model of each attempt, or set "
                "per_device_train_batch_size"
            )
        self._streams = KeptStreams()
        self._values = {name: value.detach().to("cpu", copy=True) for name, value in self._list_values()}
        self._optimizer, self._scheduler, self._created_scheduler = None, None, False
        if not self._builds_model:
            self._optimizer, self._scheduler = _bare(trainer.optimizer), trainer.lr_scheduler
            self._created_scheduler = trainer._created_lr_scheduler
        self._states = [copy.deepcopy(each.state_dict()) for each in self._list_given()]

    def run(self, train: Callable[[], TrainOutput], start: int) -> TrainOutput:
        """Train until memory suffices on every rank; return that attempt's result. Collective.

        Args:
            start: the batch size of each device to try first.

        Raises:
            ConfigError: memory does not suffice for one sample.
        """
        trainer = self._trainer
        is_first = True

        def auto_find_batch_size(batch_size: int) -> TrainOutput:
            nonlocal is_first
            if not is_first:
                self._begin_again()
            is_first = False
            trainer._train_batch_size = batch_size
            trainer.args.auto_find_batch_size = False  # upstream would search, too
            return train()

        register_memory_owner(self)  # a rank that runs out of memory, or hears of it, drops what the attempt holds
        output: TrainOutput = find_executable_batch_size(auto_find_batch_size, start)()
        return output

    def free_memory(self) -> None:
        """Drop the memory of an attempt, and all references to its process group."""
        trainer = self._trainer
        trainer.end_decisions(is_failed=True)
        trainer.accelerator.free_memory()
        trainer._preparation = ModelPreparation()
        if trainer.neftune_hook_handle is not None:
            trainer.neftune_hook_handle.remove()
        if self._builds_model:
            trainer.model = None
        else:
            trainer.model = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
            trainer.model.zero_grad()
        trainer.model_wrapped = trainer.model
        trainer.optimizer, trainer.lr_scheduler = self._optimizer, self._scheduler
        trainer._created_lr_scheduler = self._created_scheduler
        for name in ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"):
            setattr(trainer.callback_handler, name, getattr(trainer, name, None))

    def _begin_again(self) -> None:
        self.free_memory()  # on one process nobody else has
        self._streams.put_back()
        with torch.no_grad():
            for name, value in self._list_values():
                value.copy_(self._values[name])
        for each, state in zip(self._list_given(), self._states, strict=True):
            each.load_state_dict(copy.deepcopy(state))

    def _list_values(self) -> list[tuple[str, Tensor]]:
        """Return parameters and buffers, by name; none where they are made anew."""
        if self._builds_model:
            return []
        model = self._trainer.accelerator.unwrap_model(self._trainer.model, keep_torch_compile=False)
        return [*model.named_parameters(), *model.named_buffers()]

    def _list_given(self) -> list[Any]:
        """Return the optimizer and the schedule that the Trainer was given, or has from an earlier train()."""
        return [each for each in (self._optimizer, self._scheduler) if each is not None]


def _bare(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
