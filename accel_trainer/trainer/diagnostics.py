"""What a Trainer finds out about a run where it is asked to, or where the run fails.

Fingerprints are each module's results, its gradients and its weights in an update, as exact sums of bits. A sum of the
bits of all elements, as integers that wrap around, depends on no order, and changes with any one bit.
`accel-trainer report --diff` compares those of two runs, in the order in which an update comes by the modules. A trace
is that of some updates, one for each rank that was asked for: `TrainingArguments(profile="10:13")`. Where memory ran
out, the error gets an account of its use, and the cheapest changes with the peaks that follow from them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from accel_trainer import logging
from accel_trainer.checkpoint.shards import local_tensor
from accel_trainer.errors import ConfigError, size_in_words
from accel_trainer.plugins.kwargs import ProfileKwargs
from accel_trainer.runtime import collectives
from accel_trainer.runtime.memory import is_out_of_memory, peak_memory
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.torch_private import recording_allocations
from accel_trainer.tree import leaves

if TYPE_CHECKING:
    from accel_trainer import Trainer
    from accel_trainer.trainer.arguments.training_arguments import TrainingArguments

logger = logging.get_logger(__name__)

# --- fingerprints -----------------------------------------------------------------------------------------------------


_FINGERPRINTS_NAME = "fingerprints.jsonl"
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_of_bits(value: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, or of this rank's shard, taken as integers: scalar, int64."""
    local = (value.to_local() if isinstance(value, DTensor) else value).detach()
    if local.is_complex():
        local = torch.view_as_real(local)
    if local.dtype == torch.bool or local.element_size() not in _INTEGERS:
        return local.sum(dtype=torch.int64)
    return local.contiguous().view(_INTEGERS[local.element_size()]).sum(dtype=torch.int64)


class Fingerprints(TrainerCallback):
    """Writes those of every N-th update to `output_dir/fingerprints.jsonl`; sums over all ranks. Every rank has one."""

    def __init__(self, trainer: Trainer) -> None:
        """Take the Trainer that it is a callback of.

        Raises:
            ConfigError: `fingerprint_every` is no number of updates, or the strategy an engine.
        """
        self._trainer, self._every = trainer, trainer.args.fingerprint_every
        if self._every < 0:
            raise ConfigError(f"fingerprint_every={self._every} is a number of updates: give 1 or more, or 0 for none")
        facts = trainer.accelerator.strategy.capabilities
        if facts.builds_engine:
            raise ConfigError(
                f"fingerprint_every={self._every} sums gradients and weights by module, which strategy "
                f"{trainer.accelerator.strategy.name!r} keeps in buffers of its engine; use fsdp2, or leave it out"
            )
        self._before: dict[int, list[list[Any]]] = {}
        """Names and sums of updates that an earlier run had done after the checkpoint, on the main process."""
        self._sums: list[tuple[str, Tensor]] = []
        self._hooks: list[Any] = []
        self._has_repeated = False

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        model = self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                yield name or "the model", module

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the fingerprints that a run before the checkpoint has of the updates that come again."""
        path = Path(args.output_dir) / _FINGERPRINTS_NAME
        text = path.read_text(encoding="utf-8") if state.is_world_process_zero and path.exists() else ""
        if text and not text.endswith("\n"):
            with path.open("a", encoding="utf-8") as file:
                file.write("\n")
        if state.global_step:
            for line in text.splitlines():
                with suppress(ValueError):  # the last one of a run that was killed
                    content = json.loads(line)
                    self._before[content["update"]] = content["sums"]
            self._before = {update: sums for update, sums in self._before.items() if update > state.global_step}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the results of modules in an update that is due."""
        self.close()
        if not self._is_due(state.global_step + 1):
            return
        # A compiled model calls no hooks that come later: its gradients and weights alone are compared then.
        if self._trainer.accelerator.config.compile.backend == "no":
            self._hooks = [module.register_forward_hook(self._noting(name)) for name, module in self._modules()]

    def _noting(self, name: str) -> Any:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = (each for each in leaves(output) if isinstance(each, Tensor))
            self._sums += [(f"forward of {name}", sum_of_bits(tensor)) for tensor in tensors]

        return note

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add gradients, in the order of the backward."""
        if self._is_due(state.global_step + 1):
            for name, module in reversed(list(self._modules())):
                grads = [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
                self._sums += [(f"gradients of {name}", sum_of_bits(gradient)) for gradient in grads]

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the weights, sum all up over the ranks, and write the line. Collective."""
        if not self._is_due(update := state.global_step + 1):
            return
        for name, module in self._modules():
            self._sums += [(f"weights of {name}", sum_of_bits(p)) for p in module.parameters(recurse=False)]
        names, values = [name for name, _ in self._sums], torch.stack([value for _, value in self._sums])
        self.close()
        total = collectives.reduce(values, self._trainer.accelerator.process, "sum").tolist()
        if state.is_world_process_zero:
            sums = list(zip(names, total, strict=True))
            self._compare(update, sums)
            path = Path(args.output_dir) / _FINGERPRINTS_NAME
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"update": update, "sums": sums}) + "\n")

    def _compare(self, update: int, sums: list[tuple[str, int]]) -> None:
        """Say whether an update that was done before comes to the same bits: once, and whenever it does not."""
        before = self._before.pop(update, None)
        if before is None:
            return
        # From the end: a run that begins asks a forward or two more of its first micro-batch (LossNormalization).
        number = min(len(sums), len(before))
        pairs = zip(sums[-number:], map(tuple, before[-number:]), strict=True)
        part = next((mine for mine, other in pairs if mine != other), None)
        if part is not None:
            self._before = {}
            logger.warning(
                "update %d is not what it was before the resume: the first difference is the %s. With the same ranks, "
                "code and data this hardware does not repeat itself; see docs/reliability.md", update, part[0],
            )  # fmt: skip
        elif not self._has_repeated:
            self._has_repeated = True
            logger.info(
                "update %d comes to the bits that it had before the resume: this machine repeats itself", update
            )

    def _is_due(self, update: int) -> bool:
        return update % self._every == 0

    def close(self) -> None:
        """Take the hooks off the model, and forget the update under way."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._sums = [], []


# --- a trace of some updates ------------------------------------------------------------------------------------------


_TRACE_FOLDER = "profile"


def read_updates(text: str) -> range:
    """Return the updates of "start:stop", of which the last is `stop - 1`, as of a slice.

    Raises:
        ConfigError: it is something else.
    """
    start, _, stop = text.partition(":")
    if start.strip().isdecimal() and stop.strip().isdecimal() and 1 <= int(start) < int(stop):
        return range(int(start), int(stop))
    raise ConfigError(
        f"profile={text!r} is no range of updates: give START:STOP, such as '10:13' for the updates 10, 11 and 12, the "
        "first of a run being 1"
    )


def _is_asked_for(ranks: str, process: ProcessContext) -> bool:
    if str(ranks).strip() == "all":
        return True
    numbers = [each.strip() for each in str(ranks).split(",")]
    wrong = [each for each in numbers if not each.isdecimal() or int(each) >= process.world_size]
    if wrong:
        raise ConfigError(
            f"profile_ranks={ranks!r} names {wrong[0]!r}, and this job has the ranks 0 to {process.world_size - 1}; "
            "give numbers with commas between them, or 'all'"
        )
    return str(process.rank) in numbers


class UpdateProfile(TrainerCallback):
    """The trace of this rank, from the end of the update before the first one, whose data is in it."""

    def __init__(self, args: TrainingArguments, process: ProcessContext) -> None:
        """Check the arguments.

        Raises:
            ConfigError: `profile` is no range of updates, or `profile_ranks` names a rank that there is not.
        """
        self._updates = read_updates(args.profile or "")
        self._folder = Path(args.output_dir) / _TRACE_FOLDER
        self._process = process
        self._is_recorded = _is_asked_for(args.profile_ranks, process)
        self._recording = ExitStack()
        self._is_open = False

    def _begin_if_due(self, done: int) -> None:
        if not self._is_recorded or self._is_open or done + 1 != self._updates.start:
            return
        device, rank = self._process.device, self._process.rank
        self._folder.mkdir(parents=True, exist_ok=True)
        self._is_open = True
        self._recording.enter_context(recording_allocations(self._folder / f"memory_{rank}.pickle", device))
        profile = ProfileKwargs(record_shapes=True, output_trace_dir=self._folder)
        self._recording.enter_context(profile.build(rank))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin with the first update."""
        self._begin_if_due(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End with the last update, or begin with the next one."""
        if self._is_open and state.global_step >= self._updates.stop - 1:
            self.close()
        self._begin_if_due(state.global_step)

    def close(self) -> None:
        """Write the record: after the last update, and where training ends before it, or fails."""
        if self._is_open:
            self._is_open = False
            self._is_recorded = False  # a run that goes back to a checkpoint comes by again
            self._recording.close()
            logger.info(
                "the trace of updates %d to %d is %s; open it in ui.perfetto.dev", self._updates.start,
                self._updates.stop - 1, os.fspath(self._folder / f"profile_{self._process.rank}.json"),
                main_process_only=False,
            )  # fmt: skip


# --- the use of memory where it ran out -------------------------------------------------------------------------------


_REQUEST = re.compile(r"Tried to allocate ([\d.]+) (GiB|MiB|KiB|bytes)")
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}
_REST = "activations, temporaries and the rest"


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
    parts = {**sizes, _REST: max(peak - sum(sizes.values()), 0)}
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
