"""Preflight: the peak that this rank is going to have, planned before anything is prepared, beside what its device has.

`Accelerator.preflight` and a Trainer's `preflight` name this module, and load it where they are asked for a plan.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_trainer import logging
from accel_trainer.big_models.device_map import convert_file_size_to_int
from accel_trainer.config import LossImplementation, Resolved
from accel_trainer.contrib.layouts import MARGIN, cost_of
from accel_trainer.contrib.planner import (
    Cluster,
    LayoutPlan,
    Workload,
    num_rows_of,
    optimizer_builder,
    plan_layout,
    with_options,
)
from accel_trainer.errors import AccelTrainerError, ConfigError, size_in_words
from accel_trainer.precision import scales_of
from accel_trainer.runtime.memory import available_host_bytes
from accel_trainer.runtime.model_wrappers import unsharded_shape
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.rng import KeptStreams
from accel_trainer.trainer.training_data import packing_collator

if TYPE_CHECKING:
    from accel_trainer import Trainer

logger = logging.get_logger(__name__)

_NUM_ROWS_READ = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A run with other options, or other micro-batches of the same update, as it is planned."""

    text: str
    rows: int
    """Of a micro-batch; those of an update are the same."""
    options: Mapping[str, Any]
    """Of the configuration."""
    plan: LayoutPlan
    slowdown: float
    """Times the time of an update as it was asked for; of computation, and of exchange that nothing hides."""

    @property
    def needed_bytes(self) -> float:
        """Planned peak, with the margin."""
        return MARGIN * self.plan.peak

    def __str__(self) -> str:
        return f"  {self.text}: about {size_in_words(self.plan.peak)} at the peak, {self.slowdown:.2f} of the time"


class PlannedRun:
    """This rank's part of a run that has not begun: a model without memory, its micro-batch, and plans of them."""

    def __init__(
        self,
        model: nn.Module,
        resolved: Resolved,
        process: ProcessContext,
        workload: Workload,
        *,
        memory: int | None = None,
        is_trainer: bool = False,
    ) -> None:
        """Copy the model's sizes.

        Args:
            model: not prepared yet; on any device, the meta device too.
            memory: bytes that the rank may take; None is what is free on its device now.
            is_trainer: whether options are named as TrainingArguments has them.
        """
        self._model = _without_memory(model)
        self._plans: dict[Any, LayoutPlan] = {}
        self.process, self._workload = process, workload
        self._resolved, self._is_trainer = resolved, is_trainer
        self.limit, self.where = _memory_limit(process, memory)
        inputs = workload.inputs
        self.rows = workload.batch if inputs is None else num_rows_of(inputs)
        self.num_steps = resolved.config.accumulation.num_steps

    @property
    def plan(self) -> LayoutPlan:
        """Plan of the run as it was asked for."""
        return self.replan()

    def replan(self, rows: int | None = None, **options: Any) -> LayoutPlan:
        """Return the plan with other rows in a micro-batch, of the same update, and other options at their paths."""
        key = (rows or self.rows, tuple(sorted(options.items())))
        if key not in self._plans:  # two searches for changes, for one, have most of them in common
            self._plans[key] = self._plan(*key)
        return self._plans[key]

    def _plan(self, rows: int, options: tuple[tuple[str, Any], ...]) -> LayoutPlan:
        process, inputs = self.process, self._workload.inputs
        num_steps = max(1, self.rows * self.num_steps // rows)
        accumulation = dataclasses.replace(self._resolved.config.accumulation, num_steps=num_steps)
        resolved = with_options(self._resolved, accumulation=accumulation, **dict(options))
        if inputs is not None:
            inputs = {
                name: each.new_empty((rows, *each.shape[1:]), device="meta")
                if each.ndim and len(each) == self.rows
                else each
                for name, each in inputs.items()
            }
        workload = dataclasses.replace(self._workload, batch=rows, inputs=inputs)
        cluster = Cluster(ranks_per_node=process.local_world_size)
        return plan_layout(_without_memory(self._model), resolved, process.world_size, workload, cluster)

    def largest_rows(self) -> int:
        """Return the most rows of a micro-batch of the same update that fit; 1 at least."""
        total = self.rows * self.num_steps
        sizes = [size for size in range(self.rows, 0, -1) if total % size == 0]
        # Memory grows with rows by no more than in proportion: the first that fits is sought by halves.
        low, high = 0, len(sizes) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if MARGIN * self.replan(sizes[middle]).peak <= self.limit else (middle + 1, high)
        return sizes[low]

    def changes(self, limit: float) -> list[Change]:
        """Return what makes the run fit `limit` bytes, cheapest in time first; what needs least where nothing does."""
        found: list[Change] = []
        for candidates in self._candidates():
            for words, rows, options in candidates:
                try:
                    plan = self.replan(rows, **options)
                except AccelTrainerError:
                    continue  # a model without layers, or whose loss cannot be made in chunks
                if plan.peak < self.plan.peak:
                    slowdown = cost_of(options) * plan.seconds_per_row / self.plan.seconds_per_row
                    text = ", ".join([*words, *[self._words_of(rows)] * (rows != self.rows)])
                    found.append(Change(text=text, rows=rows, options=options, plan=plan, slowdown=slowdown))
            fitting = [change for change in found if change.needed_bytes <= limit]
            if len(fitting) > 1:
                break  # the next ones compute more again
        fitting.sort(key=lambda change: round(change.slowdown, 2))
        return fitting or sorted(found, key=lambda change: change.plan.peak)

    def _candidates(self) -> Iterator[list[tuple[list[str], int, dict[str, Any]]]]:
        """Yield words, rows of a micro-batch and options, for each policy of checkpointing from the cheapest on."""
        config, total = self._resolved.config, self.rows * self.num_steps
        halves = [size for size in range(self.rows // 2, 0, -1) if total % size == 0]
        sizes = (self.rows, *halves[:1], *halves[-1:] * (len(halves) > 1))
        losses: list[Any] = [{}, *[{"loss": LossImplementation.CHUNKED}] * (config.loss is LossImplementation.PLAIN)]
        layouts: list[Any] = [{"strategy": "fsdp2"}] * (self.process.world_size > 1 and not self.plan.is_sharded)
        for policy in (config.recomputation, *["selective", "every:2", "full"] * (config.recomputation == "off")):
            own = {} if policy == config.recomputation else {"activation_checkpointing": policy}
            pairs = [*itertools.product(losses, sizes), *itertools.product(layouts, sizes[:1])]
            ways = [({**options, **own}, rows) for options, rows in pairs]
            yield [
                ([self._name(*item) for item in options.items()], rows, options)
                for options, rows in ways
                if options or rows != self.rows
            ]

    def _name(self, option: str, value: Any) -> str:
        if self._is_trainer and option == "strategy":
            return "fsdp=True"
        return f"{'loss_implementation' if self._is_trainer and option == 'loss' else option}={value}"

    def _words_of(self, rows: int) -> str:
        name = "per_device_train_batch_size" if self._is_trainer else "the loader's batch_size"
        steps = self.rows * self.num_steps // rows
        return f"{name}={rows} with gradient_accumulation_steps={steps}, the same update"

    def describe(self) -> str:
        """Return the planned peak by purpose, in words."""
        parts = {name.replace("_", " "): size for name, size in self.plan.peak_parts.items() if size}
        words = ", ".join(f"{size_in_words(size)} {name}" for name, size in parts.items())
        return f"{size_in_words(self.plan.peak)} at the peak: {words}"

    def shortage(self) -> str:
        """Return by how much the limit does not suffice, and the two cheapest changes with which it does; or ""."""
        if MARGIN * self.plan.peak <= self.limit:
            return ""
        changes = self.changes(self.limit)[:2]
        fits = bool(changes) and changes[0].needed_bytes <= self.limit
        advice = "the cheapest changes with which it fits" if fits else "nothing that is planned here makes it fit"
        rows = f"{self.rows} row{'s' * (self.rows > 1)}"
        return (
            f"rank {self.process.rank} is planned to take {self.describe()}, for a micro-batch of {rows}; with the 5 % "
            f"that a plan may miss it needs {size_in_words(MARGIN * self.plan.peak)}, and {self.where}: {advice}\n"
            + "".join(f"{change}\n" for change in changes)
            + "  other layouts: accel-trainer estimate MODEL --num_processes N --global_batch ROWS --fit SIZE"
        )


def _without_memory(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device; nothing of it is copied on the way there.

    One that ZeRO-3 has built in pieces has its full parameters there.
    """
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} is sharded already, and a plan begins with a full model; ask before prepare()"
        )
    copies: dict[int, Any] = {
        id(each): nn.Parameter(_without_values(each), each.requires_grad) for each in model.parameters()
    }
    scales = (tensor for module in model.modules() for _, _, tensor in scales_of(module))
    copies |= {id(each): torch.empty_like(each, device="meta") for each in (*model.buffers(), *scales)}
    return copy.deepcopy(model, copies)


def _without_values(parameter: Tensor) -> Tensor:
    shape = unsharded_shape(parameter)
    if parameter.shape != shape:
        return parameter.new_empty(shape, device="meta")
    # A class of bitsandbytes quantises what is moved; what is planned takes the tensor alone.
    packed = type(parameter).__name__ == "Params4bit"
    return torch.empty_like(parameter.detach().as_subclass(Tensor) if packed else parameter, device="meta")


def _memory_limit(process: ProcessContext, asked: int | None) -> tuple[int, str]:
    """Return the bytes that this rank may take, and where they are, in words. Not collective.

    Args:
        asked: bytes of a rank; None is what is free on the device beside what this process holds, on a CPU
            this rank's share of what the machine has.
    """
    device = process.device
    if asked is not None:
        return asked, f"{size_in_words(asked)} may be taken"
    if device.type == "cpu":
        limit = available_host_bytes() // process.local_world_size
        return limit, f"{size_in_words(limit)} of the machine's memory are free for it"
    limit = torch.get_device_module(device).mem_get_info(device)[0]
    with suppress(RuntimeError):  # an allocator that counts nothing
        limit += torch.accelerator.memory_reserved(device)
    return limit, f"{size_in_words(limit)} of {device} are free for it"


def check_run(run: Callable[[], PlannedRun], mode: str, way_out: str) -> PlannedRun | None:
    """Plan, and refuse or warn where this rank needs more memory than it has; None where it cannot be planned.

    Not collective: each rank plans by itself, and looks at its own device.

    Args:
        mode: "refuse" or "warn".
        way_out: what begins the run all the same, for messages.

    Raises:
        ConfigError: with "refuse": memory does not suffice, or nobody can say so.
    """
    try:
        planned = run()
        problem = planned.shortage()
        logger.info("planned: %s", planned.describe())
    except Exception as error:
        planned = None
        problem = f"this run cannot be planned ({type(error).__name__}: {error})"
        if mode == "refuse":
            raise ConfigError(f"{problem}; {way_out}") from error
    if problem and mode == "refuse":
        raise ConfigError(f"{problem}\n  {way_out}")
    if problem:
        logger.warning("%s", problem, main_process_only=False)
    return planned


def preflight_loop(
    accelerator: Any, model: nn.Module, optimizer: Any, batch: Any, mode: str, memory: Any, compute_loss: Any
) -> LayoutPlan | None:
    """Plan a loop of one's own; see `Accelerator.preflight`."""
    limit = None if memory is None else convert_file_size_to_int(memory)

    def run() -> PlannedRun:
        inputs = {name: each for name, each in batch.items() if isinstance(each, Tensor)}
        is_on_gpu = accelerator.device.type != "cpu"
        build = optimizer_builder(type(optimizer), optimizer.defaults, is_on_gpu=is_on_gpu)
        workload = Workload(dtype=None, optimizer=build, inputs=inputs, is_on_gpu=is_on_gpu, compute_loss=compute_loss)
        return PlannedRun(model, accelerator.resolved, accelerator.process, workload, memory=limit)

    planned = check_run(run, mode, "preflight(mode='warn') goes on all the same")
    return None if planned is None else planned.plan


# --- a Trainer's run --------------------------------------------------------------------------------------------------


def preflight_training(trainer: Trainer) -> PlannedRun | None:
    """Plan a Trainer's run as its arguments ask for it, and refuse it or warn; see `check_run`."""
    # A search for a batch size that fits begins with the one that is planned to, and answers by smaller ones.
    mode = "warn" if trainer._searches_batch_size else trainer.args.preflight
    return check_run(partial(plan_training, trainer), mode, "TrainingArguments(preflight='warn') begins all the same")


def plan_training(trainer: Trainer) -> PlannedRun:
    """Return a Trainer's run on this rank, with the longest of some rows of its data. Not collective.

    Raises:
        ConfigError: its data is a stream. Others, of a model or an optimizer that cannot be planned, come as they are.
    """
    args, accelerator = trainer.args, trainer.accelerator
    memory = None if args.preflight_memory is None else convert_file_size_to_int(args.preflight_memory)
    is_on_gpu = accelerator.device.type != "cpu"
    given = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    kind, options = (
        trainer.get_optimizer_cls_and_kwargs(args, trainer.model) if given is None else (type(given), given.defaults)
    )
    inputs = _packed_batch(trainer) if args.packing else _longest_batch(trainer, trainer._train_batch_size)
    optimizer = optimizer_builder(kind, options, is_on_gpu=is_on_gpu)
    workload = Workload(dtype=None, optimizer=optimizer, is_on_gpu=is_on_gpu, inputs=inputs)
    accumulation = dataclasses.replace(accelerator.config.accumulation, num_steps=args.gradient_accumulation_steps)
    resolved = with_options(accelerator.resolved, accumulation=accumulation)
    return PlannedRun(trainer.model, resolved, accelerator.process, workload, memory=memory, is_trainer=True)


def _packed_batch(trainer: Trainer) -> Mapping[str, Tensor]:
    """Return a micro-batch of packed rows, whose positions tell documents apart."""
    shape = (trainer._train_batch_size, trainer.args.max_length or 0)
    names = ("input_ids", "labels", "position_ids")
    return {name: torch.empty(shape, dtype=torch.long, device="meta") for name in names}


def _longest_batch(trainer: Trainer, rows: int) -> Mapping[str, Tensor]:
    """Return a micro-batch of the longest of some rows that are spread over the training data."""
    dataset = trainer.train_dataset
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"the rows of a {type(dataset).__name__} are not known before they are read; plan a batch of your own: "
            "trainer.accelerator.preflight(model, optimizer, batch)"
        )
    if trainer.args.padding_free:
        collate = packing_collator(trainer)
    else:
        collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="Training")
    picked = sorted({index * len(dataset) // _NUM_ROWS_READ for index in range(_NUM_ROWS_READ)})
    with KeptStreams():  # data sets and collators draw: masks, for one
        samples = sorted((dataset[index] for index in picked), key=_length, reverse=True)
        batch = dict(collate((samples * rows)[:rows]))
    if isinstance(mask := batch.get("attention_mask"), Tensor) and bool(mask.all()):
        del batch["attention_mask"]  # a model takes it for none, by its values, which a plan has not
    return {name: each for name, each in batch.items() if isinstance(each, Tensor)}


def _length(sample: Any) -> int:
    value = sample.get("input_ids") if isinstance(sample, Mapping) else None
    return 0 if value is None else len(value)
