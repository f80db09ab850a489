"""The use of memory where it ran out, and the cheapest changes with the peaks that follow from it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from accel_trainer import logging
from accel_trainer.checkpoint.shards import local_tensor
from accel_trainer.errors import size_in_words
from accel_trainer.runtime.memory import is_out_of_memory, peak_memory

if TYPE_CHECKING:
    from accel_trainer import Trainer

logger = logging.get_logger(__name__)

_REQUEST = re.compile(r"Tried to allocate ([\d.]+) (GiB|MiB|KiB|bytes)")
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}
REST = "activations, temporaries and the rest"


@contextmanager
def explaining_memory(trainer: Trainer) -> Iterator[None]:
    """Add the account of this rank to an error of a training that says that memory ran out. Not collective."""
    try:
        yield
    except Exception as error:
        if trainer.is_in_train and is_out_of_memory(error):
            try:
                error.add_note(_account(trainer, str(error)))
            except Exception as other:  # a half-built model, or a device that fails: the error itself is what counts
                logger.info("no account of the memory (%s: %s)", type(other).__name__, other)
        raise


def _account(trainer: Trainer, message: str) -> str:
    accelerator, sizes = trainer.accelerator, _lasting_sizes(trainer)
    found = _REQUEST.search(message)
    request = float(found[1]) * _UNITS[found[2]] if found else 0.0
    peak = peak_memory(accelerator.device) or 0
    facts = accelerator.strategy.capabilities
    replicas = 1 if facts.shards_parameters or facts.builds_engine else accelerator.num_processes
    failed = f"; {size_in_words(request)} more were not to be had" if found else ""
    lines = [f"rank {accelerator.process.rank}: {describe_peak(sizes, peak)}{failed}"]
    if (planned := trainer.planned_run) is not None:
        # What the plan has missed is missed by those of the changes, too. A CPU's peak is that of the whole process.
        missed = 0.0 if accelerator.device.type == "cpu" else max(peak + request - planned.plan.peak, 0.0)
        changes = planned.changes(planned.limit - missed)[:2]
        return "\n".join([*lines, f"  planned: {planned.describe()}", *map(str, changes)])
    rows, steps = trainer._train_batch_size, trainer.args.gradient_accumulation_steps
    lines += advise(sizes, peak, request, rows=rows, num_steps=steps, replicas=replicas)
    return "\n".join(lines)


def _lasting_sizes(trainer: Trainer) -> dict[str, float]:
    """Return the bytes on this rank's device that do not depend on the batch."""
    parameters = list(trainer.model_wrapped.parameters())
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    states = [value for state in getattr(optimizer, "state", {}).values() for value in state.values()]
    held = {
        "weights": parameters,
        "gradients": [each for each in parameters if each.requires_grad],
        "optimizer state": [each for each in states if isinstance(each, Tensor)],
    }
    kind = trainer.accelerator.device.type
    shards = {name: map(local_tensor, tensors) for name, tensors in held.items()}
    return {name: sum(each.nbytes for each in own if each.device.type == kind) for name, own in shards.items()}


def describe_peak(sizes: Mapping[str, float], peak: float) -> str:
    """Return the peak by purpose in words; `sizes` in bytes of weights and others that are there all the time."""
    parts = {**sizes, REST: max(peak - sum(sizes.values()), 0)}
    words = ", ".join(f"{size_in_words(size)} {name}" for name, size in parts.items())
    return f"{size_in_words(peak)} at the peak: {words}"


def advise(
    sizes: Mapping[str, float], peak: float, request: float, *, rows: int, num_steps: int, replicas: int
) -> list[str]:
    """Return the cheapest changes in words, cheapest first, with about the peak of each until the same place.

    Args:
        sizes: bytes that do not depend on the batch: weights, gradients and optimizer state.
        peak: bytes at most, until the request that failed.
        request: its bytes; 0 where they are not known.
        rows: of a micro-batch on this rank.
        num_steps: micro-batches of an update.
        replicas: ranks that each hold all of `sizes`.
    """
    fixed = sum(sizes.values())
    rest = max(peak - fixed, 0) + request
    advice: list[tuple[str, Any]] = []
    if rows > 1:
        fewer = next(number for number in range(rows // 2, 0, -1) if rows * num_steps % number == 0)
        text = f"per_device_train_batch_size={fewer} with gradient_accumulation_steps={rows * num_steps // fewer}"
        advice.append((f"{text}, the same update", fixed + rest * fewer / rows))
    if replicas > 1:
        advice.append((f"fsdp=True, which shards all but the rest over {replicas} ranks", fixed / replicas + rest))
    found = [f"  {text}: about {size_in_words(size)}" for text, size in advice]
    return [
        *found,
        "  activation_checkpointing and others, with their peaks and times: TrainingArguments(preflight='warn')",
    ]
