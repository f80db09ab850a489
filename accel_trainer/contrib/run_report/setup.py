"""A run before its first update, in words: its processes, model, batches and lengths, and who set which option."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from accel_trainer.accelerator.options import SetOption
from accel_trainer.checkpoint.changed_run import UpdateBatch
from accel_trainer.config import SourceKind
from accel_trainer.runtime.process import ProcessContext

if TYPE_CHECKING:
    from accel_trainer import Trainer


class RunLengths(NamedTuple):
    """The lengths of a run, as `set_initial_training_values` returns them."""

    num_epochs: int
    updates_per_epoch: int
    num_examples: int
    num_samples: float
    update_batch: int
    steps_in_epoch: int
    max_steps: int


class Duplicates(logging.Filter):
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

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is to be logged."""
        return not record.getMessage().startswith(self._BEGINNINGS)


def describe_setup(trainer: Trainer, model: nn.Module, lengths: RunLengths) -> list[tuple[str, str]]:
    """Return labels and texts. Not collective.

    Args:
        model: the prepared one.
    """
    accelerator = trainer.accelerator
    process, layout = accelerator.process, accelerator.unit_of(model).layout()
    strategy = [accelerator.strategy.name]
    strategy += [f"mesh {' x '.join(f'{name}={size}' for name, size in layout.mesh.items())}"] if layout.mesh else []
    strategy += [layout.note] if layout.note else []
    if process.is_distributed and (local_steps := accelerator.config.local_steps) is not None:
        strategy += [f"weights exchanged every {_count(local_steps, 'update')}"]
    local = f", {layout.num_local:,} on this rank" if process.is_distributed else ""
    name = type(accelerator.unwrap_model(model)).__name__.removeprefix("FSDP")  # which torch's fully_shard puts before
    return [
        ("Strategy", f"{', '.join(strategy)}, {_describe_ranks(process)}"),
        ("Devices", _describe_devices(process)),
        ("Precision", _describe_precision(trainer, model)),
        ("Model", f"{name}, {layout.num_parameters:,} parameters, {layout.num_trainable:,} trainable{local}"),
        ("Examples", f"{lengths.num_examples:,}"),
        ("Global batch", _describe_batch(trainer, lengths)),
        ("Updates", _describe_lengths(lengths)),
        ("Checkpoints", _describe_checkpoints(trainer)),
        ("Resume", _describe_resume(trainer)),
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _describe_ranks(process: ProcessContext) -> str:
    nodes = -(-process.world_size // max(process.local_world_size, 1))
    return f"{_count(process.world_size, 'rank')} on {_count(nodes, 'node')}"


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


def _describe_batch(trainer: Trainer, lengths: RunLengths) -> str:
    accumulation, ranks = trainer.args.gradient_accumulation_steps, trainer.accelerator.readers.world_size
    return UpdateBatch(lengths.update_batch, ranks, trainer._train_batch_size, accumulation).describe()


def _describe_lengths(lengths: RunLengths) -> str:
    if lengths.num_epochs == sys.maxsize:  # a stream, of unknown length
        return f"{lengths.max_steps:,} over a stream"
    return f"{lengths.max_steps:,} in {_count(lengths.num_epochs, 'epoch')} of {lengths.updates_per_epoch:,}"


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
            case SourceKind.CLI:
                lines.setdefault("Set by flags", []).append(f"{text} ({where})")
            case _:
                lines.setdefault("Set by arguments", []).append(text)
    return [(label, ", ".join(texts)) for label, texts in lines.items()]


def log_lines(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a block as upstream's look: a title between stars, and an indented line for each row."""
    return "\n".join([f"***** {title} *****", *(f"  {label} = {text}" for label, text in rows)])
