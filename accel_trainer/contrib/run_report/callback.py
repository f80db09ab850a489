"""A run explains itself: its record, which checkpoints keep, the blocks in its log, and its page."""

from __future__ import annotations

import logging as standard_logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from accel_trainer import logging
from accel_trainer.accelerator.options import SetOption
from accel_trainer.checkpoint.changed_run import RECORD_KEY
from accel_trainer.config import SourceKind
from accel_trainer.contrib.run_report.charts import format_number
from accel_trainer.contrib.run_report.page import describe_peaks, describe_seconds, write_page
from accel_trainer.contrib.run_report.recorded_run import PAGE_NAME, build_run
from accel_trainer.runtime import collectives
from accel_trainer.runtime.memory import memory_in_use, peak_memory
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.trainer.arguments.training_arguments import list_options
from accel_trainer.trainer.run_clock import RunClock, RunObserver

if TYPE_CHECKING:
    from accel_trainer import Trainer

logger = logging.get_logger(__name__)
# The blocks are upstream's lines: users set their verbosity with `log_level` and with the switches of transformers.
upstream_logger = standard_logging.getLogger("transformers.trainer")

_MAX_POINTS = 400
"""Of throughput and memory: they go into the manifest of every checkpoint."""

Point = tuple[int, float, int | None]
"""Update, samples per second since the point before, bytes of memory in use."""


class RunLengths(NamedTuple):
    """The lengths of a run, as `set_initial_training_values` returns them."""

    num_epochs: int
    updates_per_epoch: int
    num_examples: int
    num_samples: float
    update_batch: int
    steps_in_epoch: int
    max_steps: int


class Duplicates(standard_logging.Filter):
    """Keeps the lines of upstream's block out of the log, once ours has said the same."""

    _BEGINNINGS = (
        "***** Running training *****",
        "  Num examples = ",
        "  Num Epochs = ",
        "  Num update steps per epoch = ",
        "  Instantaneous batch size per device = ",
        "  Training with DataParallel so batch size",
        "  Total train batch size (w. parallel, distributed & accumulation) = ",
        "  Gradient Accumulation steps = ",
        "  Total optimization steps = ",
        "  Number of trainable parameters = ",
        "  Resuming training from checkpoint with epoch ",
        "  Fast-forwarding the dataloader past ",
    )

    def filter(self, record: standard_logging.LogRecord) -> bool:
        """Whether a line is to be logged."""
        return not record.getMessage().startswith(self._BEGINNINGS)


class RunReport(RunObserver):
    """Account of a run by itself. Rank 0's is shown; every rank has one, since the last figures are gathered."""

    def __init__(self, trainer: Trainer) -> None:
        """Take the Trainer that it is a callback of."""
        self.trainer = trainer
        self._setup: list[tuple[str, str]] = []
        self._options: list[SetOption] = []
        self._points: list[Point] = []
        self._duplicates = Duplicates()
        self._clock: RunClock | None = None
        """Of the train() that has begun its updates."""
        self._begun_at = 0
        """The update after which the run goes on."""
        self._last_point = (0, 0.0)
        """The update of the last point, and the seconds of work until then."""
        self._final: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """The run's."""
        args = self.trainer.args
        return args.run_name or Path(args.output_dir).absolute().name

    # --- begin -----------------------------------------------------------------------------------------------------

    def begin(self, model: nn.Module) -> None:
        """Log the block of the beginning. No event calls it: upstream logs its own block before on_train_begin."""
        self._setup = describe_setup(self.trainer, model, RunLengths(*self.trainer.run_lengths))
        self._options = list_options(self.trainer.args)
        self.close()
        upstream_logger.info(log_lines("Running training", [*self._setup, *describe_options(self._options)]))
        upstream_logger.addFilter(self._duplicates)

    def close(self) -> None:
        """Let upstream log all of its lines again."""
        upstream_logger.removeFilter(self._duplicates)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take note that the first update is next."""
        trainer, clock = self.trainer, self.trainer.run_clock
        if self._clock is clock:
            return
        self._clock, self._begun_at = clock, state.global_step
        clock.end_startup(trainer.run_checkpoints.metrics.stalled_seconds)
        self._last_point, self._points = (self._begun_at, self._work_seconds()), []
        resumption = trainer.run_checkpoints.resumption
        if resumption is not None and resumption.manifest is not None:
            earlier = resumption.manifest.metadata.get(RECORD_KEY, {}).get("points", ())
            self._points = [(step, rate, memory) for step, rate, memory in earlier if step <= self._begun_at]

    # --- meanwhile -------------------------------------------------------------------------------------------------

    def _work_seconds(self) -> float:
        return self.trainer.run_clock.work_seconds(self.trainer.run_checkpoints.metrics.stalled_seconds)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add throughput and memory."""
        if "loss" in logs:
            self._add_point(state.global_step)

    def _add_point(self, step: int) -> None:
        if step < self._last_point[0]:  # the run has gone back
            self._points = [point for point in self._points if point[0] < step]
            self._last_point = (step - 1, self._last_point[1])
        last_step, last_seconds = self._last_point
        if step == last_step:
            return
        self.trainer.run_clock.take_sample(step - last_step)
        seconds, batch = self._work_seconds(), RunLengths(*self.trainer.run_lengths).update_batch
        throughput = (step - last_step) * batch / max(seconds - last_seconds, 1e-9)
        self._points.append((step, round(throughput, 3), memory_in_use(self.trainer.accelerator.device)))
        if len(self._points) > _MAX_POINTS:
            del self._points[::2]
        self._last_point = (step, seconds)

    def to_plain(self, peaks: Sequence[int] = (), num_tokens: int = 0) -> dict[str, Any]:
        """Return the record until now for JSON; `peaks` are bytes by rank, `num_tokens` of all. Not collective."""
        trainer = self.trainer
        seconds = trainer.run_clock.split(trainer.run_checkpoints.metrics.stalled_seconds, self._waited_seconds())
        updates = trainer.state.global_step - self._begun_at
        work = max(self._work_seconds(), 1e-9)
        own_peak, slow_ranks = peak_memory(trainer.accelerator.device), trainer.accelerator.slow_ranks
        return {
            "ranks": [] if slow_ranks is None else slow_ranks.to_plain(),
            "name": self.name,
            "setup": self._setup,
            "options": [(name, value, source.where, is_set) for name, value, source, is_set in self._options],
            "points": self._points,
            "seconds": {name: None if value is None else round(value, 4) for name, value in seconds.items()},
            "figures": {
                "samples_per_second": round(updates * RunLengths(*trainer.run_lengths).update_batch / work, 3),
                "tokens_per_second": round(num_tokens / work, 3) if num_tokens else None,
                "updates_per_second": round(updates / work, 4),
                "peak_memory_bytes": list(peaks) or ([own_peak] if own_peak else []),
                **{name: round(value, 4) for name, value in trainer.checkpoint_metrics.items()},
            },
        }

    def _waited_seconds(self) -> float | None:
        """Return for how long backwards have waited for gradients; None where the engine does not measure it."""
        trainer, accelerator = self.trainer, self.trainer.accelerator
        if accelerator.num_processes == 1:
            return 0.0
        each = accelerator.unit_of(trainer.model_wrapped).exposed_communication_seconds()
        if each is None:
            return None
        updates = trainer.state.global_step - self._begun_at
        is_each_batch = accelerator.config.accumulation.sync_each_batch
        return each * updates * (trainer.args.gradient_accumulation_steps if is_each_batch else 1)

    # --- end -------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Take the record at the end of the run, with the figures of all ranks. Collective.

        No event calls it: a callback, or an override of `log`, may keep the last log from this one, on one rank too.
        """
        accelerator, clock = self.trainer.accelerator, self.trainer.run_clock
        clock.take_sample(self.trainer.state.global_step - self._last_point[0])
        own = {"peak": peak_memory(accelerator.device), "tokens": clock.num_tokens}
        everyone = collectives.gather_object(own, accelerator.process)
        peaks = [each["peak"] for each in everyone if each["peak"] is not None]
        copies = accelerator.process.world_size // accelerator.readers.world_size
        self._final = self.to_plain(peaks, sum(each["tokens"] for each in everyone) // copies)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the block of the end on the main process, and write the page that `report_html` asks for."""
        if not state.is_world_process_zero:
            return
        rows = _describe_end(self._final, state.log_history)
        if args.report_html:
            directory = Path(self.trainer._get_output_dir(self.trainer._trial))
            path = directory / PAGE_NAME
            try:
                directory.mkdir(parents=True, exist_ok=True)  # a trial of a search may have saved nothing
                plain = {name: getattr(state, name) for name in _STATE_FIELDS}
                write_page(path, [build_run(self.name, plain, self._final)])
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


# --- a run before its first update, in words --------------------------------------------------------------------------


def describe_setup(trainer: Trainer, model: nn.Module, lengths: RunLengths) -> list[tuple[str, str]]:
    """Return labels and texts of the run and its prepared model. Not collective."""
    accelerator = trainer.accelerator
    process, layout = accelerator.process, accelerator.unit_of(model).layout()
    strategy = [accelerator.strategy.name]
    strategy += [f"mesh {' x '.join(f'{name}={size}' for name, size in layout.mesh.items())}"] if layout.mesh else []
    strategy += [layout.note] if layout.note else []
    if process.is_distributed and (local_steps := accelerator.config.local_steps) is not None:
        strategy += [f"weights exchanged every {_count(local_steps, 'update')}"]
    nodes = -(-process.world_size // max(process.local_world_size, 1))
    local = f", {layout.num_local:,} on this rank" if process.is_distributed else ""
    epochs = f"in {_count(lengths.num_epochs, 'epoch')} of {lengths.updates_per_epoch:,}"
    epochs = "over a stream" if lengths.num_epochs == sys.maxsize else epochs  # whose length is not known
    name = type(accelerator.unwrap_model(model)).__name__.removeprefix("FSDP")  # which torch's fully_shard puts before
    return [
        ("Strategy", f"{', '.join(strategy)}, {_count(process.world_size, 'rank')} on {_count(nodes, 'node')}"),
        ("Devices", _describe_devices(process)),
        ("Precision", _describe_precision(trainer, model)),
        ("Model", f"{name}, {layout.num_parameters:,} parameters, {layout.num_trainable:,} trainable{local}"),
        ("Examples", f"{lengths.num_examples:,}"),
        ("Global batch", trainer._update_batch().describe()),
        ("Updates", f"{lengths.max_steps:,} {epochs}"),
        ("Checkpoints", _describe_checkpoints(trainer)),
        ("Resume", _describe_resume(trainer)),
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _describe_devices(process: ProcessContext) -> str:
    kind = process.device.type
    if kind == "cpu":
        device = f"cpu, {_count(torch.get_num_threads(), 'thread')} for each rank"
    else:
        name = getattr(torch.get_device_module(process.device), "get_device_name", None)
        device = f"{kind}, {name(process.device)}" if name is not None else kind
    return f"{device}, {process.backend}" if process.backend is not None else device


def _describe_precision(trainer: Trainer, model: nn.Module) -> str:
    precision = trainer.accelerator.precision
    dtypes = sorted({_dtype_name(parameter.dtype) for parameter in model.parameters()})
    text = f"parameters in {' and '.join(dtypes) or 'nothing'}"
    if precision.compute is not None:
        text += f", computed in {_dtype_name(precision.compute)}"
    if precision.reduce is not None:
        text += f", gradients reduced in {_dtype_name(precision.reduce)}"
    return text + (", losses scaled" if precision.loss_scaling else "")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe_checkpoints(trainer: Trainer) -> str:
    args, state = trainer.args, trainer.state
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if strategy == "no":
        return "none"
    when = {"steps": f"every {_count(int(state.save_steps), 'update')}", "epoch": "after each epoch"}.get(
        strategy, "at each best metric"
    )
    kept = f", {args.save_total_limit} kept" if args.save_total_limit else ""
    best = f", the best by {args.metric_for_best_model} loaded at the end" if args.load_best_model_at_end else ""
    return f"{when}, in {args.output_dir}{kept}{best}"


def _describe_resume(trainer: Trainer) -> str:
    resumption, state = trainer.run_checkpoints.resumption, trainer.state
    if resumption is None:
        return "none, from the beginning"
    epoch = f", epoch {state.epoch:.2f}" if state.epoch is not None else ""
    return f"{resumption.path} at update {state.global_step:,}{epoch}"


def describe_options(options: Iterable[SetOption]) -> list[tuple[str, str]]:
    """Return the options that are not at their defaults, in one line for each place that they were set in."""
    lines: dict[str, list[str]] = {}
    for option in options:
        if not option.is_set:
            continue
        where, text = option.source.where, f"{option.name}={option.value}"
        match option.source.kind:
            case SourceKind.FILE:
                file, colon, line = where.rpartition(":")
                is_line = bool(colon) and line.isdecimal()
                lines.setdefault(f"Set in {file if is_line else where}", []).append(
                    f"{text} (line {line})" if is_line else text
                )
            case SourceKind.ENVIRONMENT:
                lines.setdefault("Set in the environment", []).append(f"{text} ({where})")
            case SourceKind.COMPAT:
                lines.setdefault(f"Set by {where}", []).append(text)
            case SourceKind.CLI:
                lines.setdefault("Set by flags", []).append(f"{text} ({where})")
            case _:
                lines.setdefault("Set by arguments", []).append(text)
    return [(label, ", ".join(texts)) for label, texts in lines.items()]


def log_lines(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a block as upstream's look: a title between stars, and an indented line for each row."""
    return "\n".join([f"***** {title} *****", *(f"  {label} = {text}" for label, text in rows)])
