"""The clock of one train(), at no cost to an update, and the interface of the callback that reads it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from accel_trainer.runtime.process import ProcessContext

UPDATE_BEGUN, BATCHES_READ, BACKWARD_DONE, UPDATE_DONE = range(4)
"""The boundaries of an update."""

PHASES = ("start-up", "data", "forward + backward", "exposed communication", "update", "evaluation", "checkpoints")
"""Of a run, in the order in which they are shown; the rest of the time is "other": callbacks and logging, for the most
part. "update" is clipping, the optimizer's step and that of the schedule."""


class RunObserver(TrainerCallback):
    """A callback that gives an account of the run. It stands above this floor, and is loaded by its name."""

    def begin(self, model: nn.Module) -> None:
        """Log how the run is set up, on the main process; `model` is the prepared one. Before upstream logs its own."""

    def finish(self) -> None:
        """Take the last figures of the run, before a best model is loaded. Collective."""

    def close(self) -> None:
        """End a train(), whether it has failed or not."""

    def to_plain(self) -> dict[str, Any]:
        """Return the figures of the run that a checkpoint keeps, as plain values for JSON. Not collective."""
        return {}


class DeviceSample:
    """The times of one update on an accelerator, by events in its stream; the host does not wait for them."""

    def __init__(self, events: Sequence[Any], num_skipped: int) -> None:
        """Take four events, one for each boundary, and the number of updates to let pass first."""
        self._events = events
        self._num_skipped = num_skipped
        self._next = UPDATE_BEGUN

    def mark(self, boundary: int) -> None:
        """Record the event of a boundary."""
        if self._num_skipped:
            self._num_skipped -= boundary == UPDATE_DONE
        elif boundary == self._next:
            self._events[boundary].record()
            self._next += 1

    @property
    def is_complete(self) -> bool:
        """Whether all four have been recorded, and the device has passed them."""
        return self._next > UPDATE_DONE and bool(self._events[UPDATE_DONE].query())

    def seconds(self) -> list[float]:
        """Return the times of data, forward and backward, and update."""
        pairs = zip(self._events[:-1], self._events[1:], strict=True)
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs]


class RunClock:
    """Seconds of one train() on this rank, by phase.

    On a CPU, the host's clock is read around each read of the loader, around `training_step` and around the update: the
    differences are the times of the work. An accelerator works behind the host, and asking for its time at each
    boundary would make the host wait. There, one update between two logs is measured, by events that are read at the
    later log, which has waited for the device anyway; it stands for all updates between the two.
    """

    def __init__(self, process: ProcessContext) -> None:
        self.data_seconds = self.compute_seconds = self.update_seconds = 0.0
        """Of updates by the host's clock: reading, forward and backward, and what follows; EpochRun adds to them."""
        self.counting_seconds = 0.0
        """In which ranks have told each other how many items an update has: those that are early wait here first."""
        self._device_seconds = [0.0, 0.0, 0.0]
        """The same by the accelerator's events."""
        self.num_tokens = 0
        """Of this rank's inputs, padding included; 0 where inputs are no tokens."""
        self.evaluation_seconds = 0.0
        self.startup_seconds = 0.0
        self.sample: DeviceSample | None = None
        """On an accelerator, the measurement that the present update belongs to."""
        self.is_sampled = process.device.type != "cpu"
        """Whether the times of updates stand for more updates than were measured."""
        self.num_samples = 0
        self._process = process
        self._begin = time.perf_counter()
        self._arm(num_skipped=2)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self._begin

    def work_seconds(self, stalled_seconds: float) -> float:
        """Return the seconds until now in which updates were trained, without those that saves and a resume took."""
        return self.seconds - self.startup_seconds - self.evaluation_seconds - stalled_seconds

    def end_startup(self, stalled_seconds: float) -> None:
        """Take note that the first update begins; `stalled_seconds` of the time until now were a resume's."""
        if not self.startup_seconds:
            self.startup_seconds = max(self.seconds - stalled_seconds, 0.0)

    def take_sample(self, num_updates: int) -> None:
        """Count the measured update for the updates since the last call, and begin to look out for the next one."""
        if not self.is_sampled or not num_updates:
            return
        if self.sample is not None and self.sample.is_complete:
            for phase, seconds in enumerate(self.sample.seconds()):
                self._device_seconds[phase] += seconds * num_updates
            self.num_samples += 1
        # Not the first one after a log: the device has just run dry, and works at the pace of the host.
        self._arm(num_skipped=1 if num_updates > 1 else 0)

    def _arm(self, num_skipped: int) -> None:
        self.sample = None
        if self.is_sampled:
            with suppress(RuntimeError, TypeError):  # a device that has no such events is not measured
                events = [torch.Event(self._process.device, enable_timing=True) for _ in range(4)]
                self.sample = DeviceSample(events, num_skipped)

    def split(self, checkpoint_seconds: float, waited_seconds: float | None) -> dict[str, float | None]:
        """Return the seconds of each phase, which add up to `total`; None for one that was not measured."""
        total = self.seconds
        around = self.startup_seconds + self.evaluation_seconds + checkpoint_seconds
        updates = [self.data_seconds, self.compute_seconds, self.update_seconds]
        counting = self.counting_seconds if self._process.is_distributed else 0.0
        if self.is_sampled:
            updates, counting = self._device_seconds, 0.0  # which is in the time of data
        # What one update stands for can be more than there is.
        scale = min(1.0, max(total - around, 0.0) / max(sum(updates) + counting, 1e-9))
        data, compute, update = (seconds * scale for seconds in updates)
        waited = None if waited_seconds is None else min(waited_seconds, compute)
        exposed = None if waited is None else waited + counting
        seconds: list[float | None] = [data, compute - (waited or 0.0), exposed, update]
        if self.is_sampled and not self.num_samples:
            seconds = [None] * len(seconds)
        seconds = [self.startup_seconds, *seconds, self.evaluation_seconds, checkpoint_seconds]
        phases: dict[str, float | None] = dict(zip(PHASES, seconds, strict=True))
        phases["other"] = max(total - sum(filter(None, seconds)), 0.0)
        return phases | {"total": total}
