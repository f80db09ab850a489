"""The record of one train(): how it was set up, its throughput and memory, and where its time went."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import logging as transformers_logging

from accel_trainer import logging
from accel_trainer.accelerator.options import SetOption
from accel_trainer.checkpoint.changed_run import describe_changes
from accel_trainer.checkpoint.format.manifest import MANIFEST_NAME
from accel_trainer.checkpoint.format.regular_files import as_corrupt
from accel_trainer.report.charts import format_number
from accel_trainer.report.page import describe_peaks, describe_seconds, write_page
from accel_trainer.report.recorded_run import PAGE_NAME, RECORD_KEY, build_run
from accel_trainer.runtime import collectives
from accel_trainer.runtime.memory import memory_in_use, peak_memory
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.trainer.run_clock import RunClock
from accel_trainer.trainer.run_setup import (
    Duplicates,
    RecordedTrainer,
    RunLengths,
    describe_options,
    describe_setup,
    list_options,
    log_lines,
)

__all__ = ["RunRecord"]

logger = logging.get_logger(__name__)
# The blocks are upstream's lines: users set their verbosity with `log_level` and with the switches of transformers.
upstream_logger = transformers_logging.get_logger("transformers.trainer")

_MAX_POINTS = 400
"""Of throughput and memory: they go into the manifest of every checkpoint."""

Point = tuple[int, float, int | None]
"""Update, samples per second since the point before, bytes of memory in use."""


class RunRecord:
    """Account of a run by itself. Rank 0's is shown; every rank has one, since the last figures are gathered."""

    def __init__(self, process: ProcessContext) -> None:
        self.clock = RunClock(process)
        self.num_tokens = 0
        """Of this rank's inputs, padding included; 0 where inputs are no tokens."""
        self.lengths: RunLengths | None = None
        self._device = process.device
        self._setup: list[tuple[str, str]] = []
        self._options: list[SetOption] = []
        self._points: list[Point] = []
        self._duplicates = Duplicates()
        self._begun_at = 0
        """The update after which the run goes on."""
        self._last_point = (0, 0.0)
        """The update of the last point, and the seconds of work until then."""
        self._name = ""

    # --- begin -----------------------------------------------------------------------------------------------------

    def begin(self, trainer: RecordedTrainer, model: nn.Module) -> None:
        """Log the block of the beginning on the main process, in place of upstream's. Not collective."""
        if not trainer.is_world_process_zero() or self.lengths is None:
            return
        args = trainer.args
        self._name = args.run_name or Path(args.output_dir).absolute().name
        self._setup, self._options = describe_setup(trainer, model, self.lengths), list_options(args)
        self._warn_of_changes(trainer)
        self.close()
        upstream_logger.info(log_lines("Running training", [*self._setup, *describe_options(self._options)]))
        upstream_logger.addFilter(self._duplicates)

    def _warn_of_changes(self, trainer: RecordedTrainer) -> None:
        """Warn of options and versions that are others than those of the run that saved the checkpoint."""
        resumption, accelerator = trainer.run_checkpoints.resumption, trainer.accelerator
        if resumption is None or resumption.manifest is None:
            return
        with as_corrupt(resumption.path / MANIFEST_NAME):
            changes = describe_changes(
                resumption.path,
                resumption.manifest,
                resumption.saved_options,
                {option.name: option.value for option in self._options},
                without_effect=resumption.replaced_seeds(trainer.args, accelerator.process, accelerator.readers),
            )
        if changes is not None:
            logger.warning("%s", changes)

    def close(self) -> None:
        """Let upstream log all of its lines again."""
        upstream_logger.removeFilter(self._duplicates)

    def begin_updates(self, trainer: RecordedTrainer) -> None:
        """Take note that the first update is next."""
        if self.clock.startup_seconds:
            return
        self.clock.end_startup(trainer.run_checkpoints.metrics.stalled_seconds)
        self._begun_at = trainer.state.global_step
        self._last_point = (self._begun_at, self._work_seconds(trainer))
        resumption = trainer.run_checkpoints.resumption
        if resumption is not None and resumption.manifest is not None:
            earlier = resumption.manifest.metadata.get(RECORD_KEY, {}).get("points", ())
            self._points = [(step, rate, memory) for step, rate, memory in earlier if step <= self._begun_at]

    # --- meanwhile -------------------------------------------------------------------------------------------------

    def _work_seconds(self, trainer: RecordedTrainer) -> float:
        """Return the seconds until now in which updates were trained."""
        clock, stalled = self.clock, trainer.run_checkpoints.metrics.stalled_seconds
        return clock.seconds - clock.startup_seconds - clock.evaluation_seconds - stalled

    def add_point(self, trainer: RecordedTrainer) -> None:
        """Add throughput and memory of now to the curves. Called where upstream logs, which waits for the device."""
        step, (last_step, last_seconds) = trainer.state.global_step, self._last_point
        if step == last_step or self.lengths is None:
            return
        self.clock.take_sample(step - last_step)
        seconds = self._work_seconds(trainer)
        throughput = (step - last_step) * self.lengths.update_batch / max(seconds - last_seconds, 1e-9)
        self._points.append((step, round(throughput, 3), memory_in_use(self._device)))
        if len(self._points) > _MAX_POINTS:
            del self._points[::2]
        self._last_point = (step, seconds)

    def to_plain(self, trainer: RecordedTrainer, peaks: Sequence[int] = (), num_tokens: int = 0) -> dict[str, Any]:
        """Return the record until now as plain values, for JSON. Not collective.

        Args:
            peaks: bytes of memory by rank; this rank's alone where they have not been gathered.
            num_tokens: of all ranks; 0 where they are not known.
        """
        seconds = self.clock.split(trainer.run_checkpoints.metrics.stalled_seconds, self._waited_seconds(trainer))
        updates = trainer.state.global_step - self._begun_at
        work = max(self._work_seconds(trainer), 1e-9)
        own_peak = peak_memory(self._device)
        batch = 0 if self.lengths is None else self.lengths.update_batch
        return {
            "name": self._name,
            "setup": self._setup,
            "options": [(name, value, source.where, is_set) for name, value, source, is_set in self._options],
            "points": self._points,
            "seconds": {name: None if value is None else round(value, 4) for name, value in seconds.items()},
            "figures": {
                "samples_per_second": round(updates * batch / work, 3),
                "tokens_per_second": round(num_tokens / work, 3) if num_tokens else None,
                "updates_per_second": round(updates / work, 4),
                "peak_memory_bytes": list(peaks) or ([own_peak] if own_peak else []),
            },
        }

    def _waited_seconds(self, trainer: RecordedTrainer) -> float | None:
        """Return for how long backwards have waited for gradients; None where the engine does not measure it."""
        accelerator = trainer.accelerator
        if accelerator.num_processes == 1:
            return 0.0
        each = accelerator.unit_of(trainer.model_wrapped).exposed_communication_seconds()
        if each is None:
            return None
        updates = trainer.state.global_step - self._begun_at
        is_each_batch = accelerator.config.accumulation.sync_each_batch
        return each * updates * (trainer.args.gradient_accumulation_steps if is_each_batch else 1)

    # --- end -------------------------------------------------------------------------------------------------------

    def finish(self, trainer: RecordedTrainer) -> dict[str, Any]:
        """Return the record at the end of the run, with the figures of all ranks. Collective."""
        self.clock.take_sample(trainer.state.global_step - self._last_point[0])
        own = {"peak": peak_memory(self._device), "tokens": self.num_tokens}
        everyone = collectives.gather_object(own, trainer.accelerator.process)
        peaks = [each["peak"] for each in everyone if each["peak"] is not None]
        accelerator = trainer.accelerator
        copies = accelerator.process.world_size // accelerator.readers.world_size
        return self.to_plain(trainer, peaks, sum(each["tokens"] for each in everyone) // copies)

    def tell_end(self, trainer: RecordedTrainer, record: Mapping[str, Any], directory: Path) -> None:
        """Log the block of the end on the main process, and write the page that `report_html` asks for."""
        if not trainer.is_world_process_zero():
            return
        rows = _describe_end(record, trainer.state.log_history)
        if trainer.args.report_html:
            path = directory / PAGE_NAME
            try:
                directory.mkdir(parents=True, exist_ok=True)  # a trial of a search may have saved nothing
                state = {name: getattr(trainer.state, name) for name in _STATE_FIELDS}
                write_page(path, [build_run(self._name, state, record)])
                rows.append(("Report", os.fspath(path)))
            except Exception as error:  # of a disk, mostly: the run has been trained, and is not to end with it
                logger.warning(
                    "the report %s could not be written (%s: %s); `accel-trainer report %s` makes it from a checkpoint",
                    path, type(error).__name__, error, directory,
                )  # fmt: skip
        upstream_logger.info(log_lines("Training finished", rows))


_STATE_FIELDS = ("log_history", "global_step", "max_steps", "best_metric", "best_global_step")


def _describe_losses(history: Sequence[Mapping[str, Any]]) -> str:
    last: dict[str, Any] = {}
    for entry in history:
        last |= entry
    names = {"train_loss": "mean of the run", "loss": "last logged"}
    names |= {name: name for name in last if name.startswith("eval_") and name.endswith("loss")}
    losses = [f"{format_number(last[name])} ({text})" for name, text in names.items() if name in last]
    return ", ".join(losses) or "none logged"


def _describe_end(record: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    figures, seconds = record["figures"], record["seconds"]
    rates = [f"{format_number(figures['samples_per_second'], 3)} samples/s"]
    if figures["tokens_per_second"]:
        rates.append(f"{format_number(figures['tokens_per_second'], 3)} tokens/s")
    rates.append(f"{format_number(figures['updates_per_second'], 3)} updates/s")
    total = max(seconds["total"], 1e-9)
    parts = [
        f"{name} not measured" if value is None else f"{name} {100 * value / total:.1f}%"
        for name, value in seconds.items()
        if name != "total" and (value is None or value >= total * 0.0005)
    ]
    rows = [
        ("Loss", _describe_losses(history)),
        ("Throughput", f"{', '.join(rates)} (evaluation and checkpoints left out)"),
        ("Time", f"{describe_seconds(total)}: {', '.join(parts)}"),
    ]
    if figures["peak_memory_bytes"]:
        rows.append(("Peak memory", describe_peaks(figures["peak_memory_bytes"])))
    return rows
