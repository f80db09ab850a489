"""What a Trainer has beside its Accelerator, for a rank that joins the others in the middle of a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import ExportableState

from accel_trainer.trainer.loss import LossKind

if TYPE_CHECKING:
    from accel_trainer import Trainer

_OWN = {"is_local_process_zero", "is_world_process_zero", "stateful_callbacks"}
"""Fields of the state that are each rank's own, or are made of its callbacks."""
_RUNNING = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos")
"""Sums since the last log."""
_LOSS = ("is_multiplied", "has_terms", "_took_items")


class TrainerHandover:
    """The place of a training: its state, its callbacks', and what it has found out about the model's loss.

    Attributes:
        place: epoch, and index in it of the last micro-batch that was trained, of the update under way.
        given: what has been taken, until the epoch of the others begins here, too; None else.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.place = 0, -1
        self.given: Mapping[str, Any] | None = None

    def give(self) -> dict[str, Any]:
        """Return the place of this rank, between two updates."""
        trainer, loss = self._trainer, self._trainer._loss_normalization
        state, scheduler = trainer.state, trainer.lr_scheduler
        known = any(scheduler is each for each in trainer.accelerator._prepared.schedulers)
        return {
            "place": self.place,
            "state": {each.name: getattr(state, each.name) for each in fields(state) if each.name not in _OWN},
            "callbacks": {type(each).__name__: each.state() for each in self._exportable()},
            "running": {name: getattr(trainer, name) for name in _RUNNING},
            "scheduler": None if known or scheduler is None else scheduler.state_dict(),
            "loss": {name: getattr(loss, name) for name in _LOSS},
            "loss_kind": None if loss.kind is None else loss.kind.value,
            "accepts_items": trainer.model_accepts_loss_kwargs,
        }

    def take(self, given: Mapping[str, Any]) -> None:
        """Go on where another rank is."""
        trainer, loss = self._trainer, self._trainer._loss_normalization
        self.given = given
        for name, value in given["state"].items():
            setattr(trainer.state, name, value)
        for callback in self._exportable():
            saved = given["callbacks"].get(type(callback).__name__, {"args": {}, "attributes": {}})
            for name, value in {**saved["args"], **saved["attributes"]}.items():
                setattr(callback, name, value)
        if given["scheduler"] is not None:
            trainer.lr_scheduler.load_state_dict(given["scheduler"])
        for name, value in given["loss"].items():
            setattr(loss, name, value)
        loss.kind = None if given["loss_kind"] is None else LossKind(given["loss_kind"])
        trainer.model_accepts_loss_kwargs = given["accepts_items"]
        trainer.args.eval_on_start = False  # which the others have behind them

    def begin_epoch(self, epoch: int) -> int | None:
        """Return how many micro-batches of an epoch the others have trained before this rank joined; None for all."""
        given = self.given
        if given is None:
            return 0
        if epoch < given["place"][0]:
            return None
        self.given = None
        for name, value in given["running"].items():
            setattr(self._trainer, name, value)
        num_trained: int = given["place"][1] + 1
        return num_trained

    def _exportable(self) -> list[Any]:
        trainer = self._trainer
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        return [each for each in callbacks if isinstance(each, ExportableState)]
