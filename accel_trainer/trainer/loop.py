"""One epoch of training: windows of micro-batches, read ahead, and the update and the callbacks at the end of each.

A rank that joins the others in the middle of a training is handed the place of the loop by one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from math import isfinite
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.optimization import GreedyLR
from transformers.trainer_callback import ExportableState
from transformers.utils import logging as transformers_logging

from accel_trainer.data.plan import BatchRows
from accel_trainer.errors import ConfigError
from accel_trainer.runtime import collectives
from accel_trainer.runtime.nonfinite import NonFiniteGuard
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.progress import PROGRESS
from accel_trainer.runtime.shared_errors import gather_or_raise
from accel_trainer.runtime.tensor_trees import find_batch_size
from accel_trainer.runtime.whereabouts import section
from accel_trainer.trainer.arguments.training_arguments import setting
from accel_trainer.trainer.loss import LossKind, count_labels
from accel_trainer.trainer.loss_spikes import answer_spike
from accel_trainer.trainer.run_clock import BACKWARD_DONE, BATCHES_READ, UPDATE_BEGUN, UPDATE_DONE, RunClock

if TYPE_CHECKING:
    from accel_trainer import Trainer


upstream_logger = transformers_logging.get_logger("transformers.trainer")

# Upstream steps these in _evaluate(), by a metric (5.23, trainer.py:3316).
_STEPPED_BY_METRIC = (ReduceLROnPlateau, GreedyLR)


class UpdateTakenBackError(Exception):
    """An update's gradients are no numbers, and the run goes back to a checkpoint. The same on every rank."""


def take_back(found: str) -> None:
    """Raise UpdateTakenBackError, on the guard's behalf."""
    raise UpdateTakenBackError(found)


class WindowReader:
    """A pass over the training loader that knows all ranks' rows of an update where they differ. Not collective."""

    def __init__(self, dataloader: Any, process: ProcessContext, clock: RunClock) -> None:
        self._clock = clock
        self._dataloader = dataloader
        self._reading = iter(dataloader)
        self._process = process
        self._is_even = getattr(dataloader, "even_batches", False)
        self._keeps_rows = process.world_size > 1 and not self._is_even
        self._read: list[tuple[Any, BatchRows]] = []
        self.batches: list[Any] = []
        """Of the present update."""
        self._rows: list[BatchRows] = []
        self.index = 0
        """Of the present micro-batch in the update."""
        self._weights: list[Any] | None = None
        self._num_rounds = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        begin = perf_counter()
        batch = next(self._reading)
        self._clock.data_seconds += perf_counter() - begin
        rows = getattr(self._dataloader, "rows", None)
        if rows is None or len(rows.rows) != self._process.world_size:
            return batch
        if self._keeps_rows or rows.weights is not None:
            self._read.append((batch, rows))
        return batch

    def close(self) -> None:
        """End the pass now, not when the iterator is collected: the loader then knows that nobody reads it."""
        self.forget()
        close = getattr(self._reading, "close", None)
        if callable(close):
            close()

    def forget(self) -> None:
        """End an update, and let go of its batches."""
        self._read, self._rows, self.batches, self._weights = [], [], [], None

    def begin(self, batches: list[Any], num_rounds: int = 1) -> None:
        """Begin an update of these batches; a ConfigError where they were not read, and ranks' rows differ.

        `num_rounds`: of how many it is on all the ranks that the job began with.
        """
        self.batches, self._num_rounds = batches, num_rounds
        if not self._read:
            return
        left, found = list(self._read), list[BatchRows]()
        for batch in batches:
            # A loader may give one object several times: each counts once.
            if (place := next((index for index, (read, _) in enumerate(left) if read is batch), None)) is not None:
                found.append(left.pop(place)[1])
        uneven = [rows.rows for _, rows in self._read if len(set(rows.rows)) > 1]
        if uneven and len(found) != len(batches):
            raise ConfigError(
                f"get_batch_samples() returned {len(batches)} batches, {len(found)} of them as the loader gave "
                f"them, in an update that has {uneven[0]} samples on the ranks: their weights are not known. Return "
                "the batches of the iterator, or train with even_batches=True"
            )
        self._rows = found if len(found) == len(batches) else []

    @property
    def rows(self) -> BatchRows | None:
        """Rows of every rank in the present micro-batch; None where ranks have as many in all of them."""
        return self._rows[self.index] if self._rows else None

    def without_filler(self, batch: Any) -> Any:
        """Return the batch, without rows if it only lets a rank take part that has no samples in this step."""
        reads = [self._own(rows) for read, rows in self._read if read is batch]
        if any(reads) or not reads or not isinstance(batch, Mapping):
            return batch
        return {name: value[:0] if isinstance(value, Tensor) and value.ndim else value for name, value in batch.items()}

    def weigh(self, loss: Tensor, kind: LossKind, *, has_items: bool, over_ranks: bool, shifts_labels: bool) -> Tensor:
        """Return the loss of the present micro-batch, weighted so that the mean over ranks is that of the update.

        Collective on the first micro-batch where a model's mean over sequences of labels is averaged over ranks.

        Args:
            has_items: a loss by items was divided by a number; there is none without labels.
            over_ranks: numbers of labels, and of items, are those of all ranks: then only a rank without samples is not
                weighed by 1.
            shifts_labels: a row's first label is no target.
        """
        if self._weights is None:
            if kind is LossKind.MODEL_MEAN and self._has_label_sequences():
                self._weights = self._label_weights(over_ranks, shifts_labels)
            elif kind is LossKind.BY_ITEMS and has_items:
                self._weights = self._item_weights(over_ranks)
            elif self._is_even and self._rows:
                self._weights = self._weights_among_those_left(self._num_rounds if kind is LossKind.BY_ITEMS else 1)
            else:
                self._weights = self._row_weights(is_sum=kind is LossKind.BY_ITEMS)
        weight = self._weights[self.index]
        has_none = weight == 0
        if has_none is not False:  # a tensor, at which to look would wait for the device, tells it there
            loss = loss.masked_fill(loss.isnan() & has_none, 0.0)  # the mean over no labels, of which 0 times is NaN
        return loss * weight

    def _has_label_sequences(self) -> bool:
        """Whether rows may differ in how many labels they have: all ranks have to exchange their numbers then."""
        labels = [batch.get("labels") if isinstance(batch, Mapping) else None for batch in self.batches]
        return all(isinstance(each, Tensor) and each.ndim > 1 and not each.is_floating_point() for each in labels)

    def _label_weights(self, over_ranks: bool, shifts_labels: bool) -> list[Any]:
        """Of the labels that the update has on this rank or, times ranks, on all, those of each micro-batch."""
        counts = [count_labels(self.without_filler(batch), shifts_labels) for batch in self.batches]
        numbers = torch.stack([count for count in counts if count is not None])
        total = numbers.sum()
        if over_ranks:
            numbers = numbers * self._process.world_size
            total = collectives.reduce(total, self._process)
        # A rank without samples has no labels, where ranks are not summed.
        shares = numbers / total.clamp(min=1)
        return [share * weight for share, weight in zip(shares, self._item_weights(over_ranks), strict=True)]

    def _row_weights(self, *, is_sum: bool) -> list[Any]:
        """Of all the rows that the update has, those of each micro-batch; as they are where micro-batches add up."""
        sizes = [rows.num_samples for rows in self._rows] or [find_batch_size(batch) or 0 for batch in self.batches]
        if is_sum:
            shares = [1.0] * len(sizes)
        elif len(set(sizes)) == 1:
            shares = [1 / len(sizes)] * len(sizes)
        else:
            shares = [size / sum(sizes) for size in sizes]
        if not self._rows:
            return shares
        rank = self._process.rank
        return [share * rows.weight_of_rows(rank) for share, rows in zip(shares, self._rows, strict=True)]

    def _weights_among_those_left(self, factor: int) -> list[float]:
        """Of filled-up micro-batches, which count alike, but for those that only let a rank take part."""
        return [factor * rows.weight(self._process.rank) / len(self._rows) for rows in self._rows]

    def _item_weights(self, over_ranks: bool) -> list[float]:
        if not self._rows:
            return [1.0] * len(self.batches)
        weight = 1.0
        if not over_ranks:
            update = tuple(map(sum, zip(*(each.rows for each in self._rows), strict=True)))
            weight = BatchRows(update, update).weight(self._process.rank)
        return [weight if self._own(rows) else 0.0 for rows in self._rows]

    def _own(self, rows: BatchRows) -> int:
        return rows.rows[self._process.rank]


@dataclass(slots=True)
class EpochRun:
    """State of one pass over the training data. Losses and the order of callbacks are those of transformers."""

    trainer: Trainer
    reader: WindowReader
    model: nn.Module
    epoch: int
    steps_in_epoch: int
    trial: Any
    ignore_keys_for_eval: list[str] | None
    start_time: float
    step: int
    """Index in the epoch of the last micro-batch that was trained; -1 before the first."""
    is_resumed: bool
    """Whether the next window is the first one that a resumed run reads."""
    grad_norm: Tensor | float | None = None
    learning_rate: float | None = None
    counts: tuple[int, float] = (0, 0.0)
    """Tokens and operations before the present update."""
    sync: bool | None = None
    """Last value of `set_gradient_sync`, which walks through all modules of a sharded model."""

    @property
    def guard(self) -> NonFiniteGuard | None:
        """None under fp16, whose loss scale finds them in every update."""
        return self.trainer.accelerator.nonfinite_guard

    def train(self, restore_rng_from: str | None) -> None:
        """Train the updates of the epoch that are left, until it ends or a callback stops it. Collective.

        Args:
            restore_rng_from: checkpoint whose random streams are restored once the first window has been read; None
                where they have been already.
        """
        accumulation = self.trainer.args.gradient_accumulation_steps
        steps = max(self.steps_in_epoch, 1)
        for begin in range(self.step + 1, steps, accumulation):
            if not self._outlive_losses(min(accumulation, steps - begin), restore_rng_from):
                break
            restore_rng_from = None
            control = self.trainer.control
            if control.should_epoch_stop or control.should_training_stop:
                break

    def _outlive_losses(self, num_batches: int, restore_rng_from: str | None) -> bool:
        """Train one update, and again where a rank is lost in it; see `_window`."""
        trainer, lost = self.trainer, self.trainer.accelerator.lost_ranks
        if lost is None:
            return self._window(num_batches, restore_rng_from)
        while True:
            step, updates, loss = self.step, lost.num_updates, trainer._tr_loss.clone()
            counts = trainer.state.num_input_tokens_seen, trainer.current_flos
            try:
                return self._window(num_batches, restore_rng_from)
            except RuntimeError as error:
                if lost.num_updates > updates:
                    raise  # behind the update, in what the callbacks of the ranks decide together
                failure = error
            trainer.go_on_without(failure)
            self.sync = None
            self.reader.forget()
            if lost.is_given:
                trainer.current_flos += 0.0  # a whole number, of a rank that has counted none, is gathered as such
                self._update()
                return True
            self.step = step
            trainer._tr_loss.copy_(loss)
            trainer.state.num_input_tokens_seen, trainer.current_flos = counts

    def _window(self, num_batches: int, restore_rng_from: str | None) -> bool:
        """Train the micro-batches of one update; return whether there were any."""
        trainer, reader, checkpoints = self.trainer, self.reader, self.trainer.run_checkpoints
        clock, first = trainer.run_clock, self.step
        num_read = self._begin_update(num_batches)
        # Before anything is read: a checkpoint within this update has the loader where the update begins.
        checkpoints.begin_update(trainer.callback_handler.train_dataloader)
        if clock.sample is not None:
            clock.sample.mark(UPDATE_BEGUN)
        begin, read = perf_counter(), clock.data_seconds
        with checkpoints.metrics.resuming("data") if self.is_resumed else nullcontext():
            batches, num_items = trainer.get_batch_samples(reader, num_read, trainer.args.device)
        if self.is_resumed:
            clock.data_seconds = read  # it is a part of the resume
        else:
            clock.counting_seconds += perf_counter() - begin - (clock.data_seconds - read)
        if clock.sample is not None:
            clock.sample.mark(BATCHES_READ)
        self.is_resumed = False
        num_before = trainer.state.global_step
        reader.begin(batches, num_batches)
        # Divides the loss of a model that does not normalise by `num_items` itself; the last window may be short.
        trainer.current_gradient_accumulation_steps = len(batches)
        # Not before: the stream was read up to here first, and those draws were for batches that are left out.
        if restore_rng_from is not None:
            trainer._load_rng_state(restore_rng_from)
        for index, inputs in enumerate(batches):
            # Where ranks are lost an update has more micro-batches than an epoch counts for it.
            self.step = first + min(index + 1, num_batches)
            reader.index = index
            try:
                self._micro_batch(inputs, num_items, is_first=index == 0, is_last=index == len(batches) - 1)
            except UpdateTakenBackError as taken:
                self._roll_back(str(taken), num_before + 1)
            if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                break
        reader.forget()
        if not batches:
            checkpoints.end_update(None)
        return bool(batches)

    def _begin_update(self, num_batches: int) -> int:
        """Return of how many micro-batches an update is made, once ranks that return have joined. Collective if any."""
        trainer, lost = self.trainer, self.trainer.accelerator.lost_ranks
        if lost is None:
            return num_batches
        trainer.handover.place = self.epoch, self.step
        if lost.admit():
            trainer.meet_anew()
            self.sync = None
            self.reader.forget()
        return lost.begin_update(num_batches)

    def _micro_batch(self, inputs: Any, num_items: Any, *, is_first: bool, is_last: bool) -> None:
        trainer, handler = self.trainer, self.trainer.callback_handler
        sync = is_last or trainer.accelerator.config.accumulation.sync_each_batch
        if sync != self.sync:
            trainer.accelerator.set_gradient_sync(self.model, sync)
            self.sync = sync
        trainer.accelerator.gradient_state.sync_gradients = is_last
        if is_first:
            self.counts = trainer.state.num_input_tokens_seen, trainer.current_flos
            trainer.control = handler.on_step_begin(trainer.args, trainer.state, trainer.control)
        begin = perf_counter()
        # An override may call accelerator.backward(), which weighs a loss by the batch that the loader gave last.
        with setting(trainer.accelerator.gradient_state, own_rows=self.reader.rows):
            loss = trainer.training_step(self.model, inputs, num_items)
        trainer.run_clock.compute_seconds += perf_counter() - begin
        self._add_loss(loss)
        if self.guard is not None:
            if is_first:
                self.guard.loss = None
            self.guard.add_loss(loss)
        trainer.current_flos += float(trainer.floating_point_ops(inputs))
        self._count_tokens(inputs)
        if is_last:
            self._meter()
            if trainer.loss_spikes is not None and self.guard is not None:
                steps = range(self.step - self.reader.index, self.step + 1)
                answer_spike(trainer, self.guard, self.epoch, steps)
            self._update()
        else:
            trainer.control = handler.on_substep_end(trainer.args, trainer.state, trainer.control)
            if trainer.decisions is not None:
                trainer.decisions.end_micro_batch(trainer.control)
            if trainer.is_preempted:
                # The run that resumes begins the update again.
                trainer.state.num_input_tokens_seen, trainer.current_flos = self.counts
                trainer.save_and_end(self.model, self.trial)

    def _count_tokens(self, inputs: Any) -> None:
        """Count the tokens of a micro-batch; upstream adds up all ranks, of which some may have read the same."""
        trainer, state = self.trainer, self.trainer.state
        before = state.num_input_tokens_seen
        trainer._track_num_input_tokens(self.reader.without_filler(inputs))
        state.num_input_tokens_seen = before + (state.num_input_tokens_seen - before) // trainer.get_tp_size()

    def _meter(self) -> None:
        """Count the micro-batches of the update for the meters and, of the first one, the operations of the model."""
        if (meters := self.trainer.accelerator.meters) is not None:
            for inputs in map(self.reader.without_filler, self.reader.batches):
                self.trainer.run_clock.startup_seconds += meters.compare(inputs)
                meters.add(inputs)

    def _add_loss(self, loss: Tensor) -> None:
        """Add to the running loss; a NaN or infinite one counts as the mean since the last log. Waits for no device."""
        trainer = self.trainer
        if trainer._tr_loss.device != loss.device:
            raise ValueError(
                f"Calculated loss must be on the original device: {trainer._tr_loss.device} but device in use is "
                f"{loss.device}"
            )
        # On a CPU a look at the number is the fastest; elsewhere it would wait for the device.
        if trainer.args.logging_nan_inf_filter and (loss.device.type != "cpu" or not isfinite(loss.item())):
            mean = trainer._tr_loss / (1 + trainer.state.global_step - trainer._globalstep_last_logged)
            loss = torch.where(loss.isfinite(), loss, mean)
        trainer._tr_loss += loss

    def _update(self) -> None:
        trainer, args, handler = self.trainer, self.trainer.args, self.trainer.callback_handler
        clock = trainer.run_clock
        if clock.sample is not None:
            clock.sample.mark(BACKWARD_DONE)
        begin = perf_counter()
        grad_norm = trainer._clip_grad_norm(self.model) if args.max_grad_norm > 0 else None
        self.grad_norm = trainer._get_grad_norm(self.model, grad_norm=grad_norm)
        trainer.control = handler.on_pre_optimizer_step(args, trainer.state, trainer.control)
        if self.guard is not None:
            self.guard.update, self.guard.norm = trainer.state.global_step, self.grad_norm
        trainer.optimizer.step()
        if trainer.local_replicas is not None:
            trainer.local_replicas.end_update(trainer.accelerator.config.local_steps or 1)
        trainer.control = handler.on_optimizer_step(args, trainer.state, trainer.control)
        self.learning_rate = trainer._get_learning_rate()
        scheduler = trainer.lr_scheduler
        was_applied = not trainer.accelerator.optimizer_step_was_skipped
        if was_applied and not isinstance(scheduler, _STEPPED_BY_METRIC):
            scheduler.step()
        self.model.zero_grad()
        clock.update_seconds += perf_counter() - begin
        if clock.sample is not None:
            clock.sample.mark(UPDATE_DONE)
        trainer.state.global_step += 1
        PROGRESS.updates = trainer.state.global_step
        trainer.run_checkpoints.end_update(trainer.state.global_step)
        trainer.state.epoch = self.epoch + (self.step + 1) / self.steps_in_epoch
        trainer.control = handler.on_step_end(args, trainer.state, trainer.control)
        if trainer.decisions is not None:
            trainer.decisions.end_update(trainer)
        # The guard may not have looked at this update yet, and what comes next saves its weights.
        if self.guard is not None and (trainer.control.should_save or trainer.control.should_training_stop):
            self.guard.look()
        self._log_save_evaluate(is_end=False)

    @section("load")
    def _roll_back(self, found: str, num_read: int) -> None:
        """Go back to the newest checkpoint, after data for so many updates has been read. Collective."""
        trainer = self.trainer
        trainer.roll_back(found, self.trial, num_read)
        trainer.run_checkpoints.end_update(None)
        self.model.zero_grad()
        control = trainer.control
        control.should_log = control.should_evaluate = control.should_save = False
        control.should_training_stop |= trainer.state.global_step >= trainer.state.max_steps
        PROGRESS.updates = trainer.state.global_step

    def _log_save_evaluate(self, *, is_end: bool) -> None:
        """Log, evaluate and save where that is due; where a signal ends the run, save and end. Collective."""
        self._repeat(partial(self._act_on_flags, is_end))

    def _repeat(self, part: Callable[[], None]) -> None:
        """Run what ranks do together behind an update; those that are left where one is lost do it again."""
        lost = self.trainer.accelerator.lost_ranks
        while True:
            try:
                return part()
            except RuntimeError as error:
                if lost is None:
                    raise
                failure = error
            self.trainer.go_on_without(failure)

    def _act_on_flags(self, is_end: bool) -> None:
        trainer = self.trainer
        trainer.finish_save(waits=False)
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss,
            self.grad_norm,
            self.model,
            self.trial,
            self.epoch,
            self.ignore_keys_for_eval,
            self.start_time,
            learning_rate=self.learning_rate,
        )
        if (trainer.decisions is not None or trainer.stop_signals.is_requested) and trainer.is_preempted:
            control = trainer.control
            is_last = self.step + 1 >= self.steps_in_epoch or control.should_epoch_stop or control.should_training_stop
            # The end of the epoch is next, and what is due there would never be: who resumes begins another epoch.
            if is_end or not is_last:
                trainer.save_and_end(self.model, self.trial)

    def end(self) -> None:
        """Call back at the end of the epoch, then log, save and evaluate where that is due. Collective."""
        trainer = self.trainer
        if self.step < 0:
            upstream_logger.warning(
                "There seems not to be a single sample in your epoch_iterator, stopping training at step"
                f" {trainer.state.global_step}! This is expected if you're using an IterableDataset and set"
                f" num_steps ({trainer.state.max_steps}) higher than the number of available samples."
            )
            trainer.control.should_training_stop = True
        error: BaseException | None = None
        try:
            trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
        except (Exception, SystemExit) as raised:  # as of `raise_together`
            error = raised
        lost = trainer.accelerator.lost_ranks
        with nullcontext() if lost is None else lost.counting_exchange():
            self._repeat(partial(self._decide_at_end, error))
        if self.guard is not None:
            try:
                self.guard.look()
            except UpdateTakenBackError as taken:
                self._roll_back(str(taken), trainer.state.global_step)
        self._log_save_evaluate(is_end=True)

    def _decide_at_end(self, error: BaseException | None) -> None:
        """Raise the error of a rank's `on_epoch_end` on all, or decide on its flags. Collective."""
        trainer = self.trainer
        gather_or_raise(trainer.accelerator.process, "on_epoch_end", error)
        if trainer.decisions is not None:
            trainer.decisions.end_epoch(trainer.control)


_PLAIN_TRAIN = ("torch.", "transformers.modeling_utils")


def plain_modules(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules of a model that `train()` sets a flag of alone; none where one has a `train` of its own."""
    modules = tuple(model.modules())
    return modules if all(type(each).train.__module__.startswith(_PLAIN_TRAIN) for each in modules) else ()


# --- a rank that joins the others in the middle -----------------------------------------------------------------------


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
