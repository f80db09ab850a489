"""Loading a state in parts into an engine: each rank reads what it will hold, whatever wrote the parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_trainer.checkpoint.format.boxes import Box
from accel_trainer.checkpoint.format.manifest import Manifest
from accel_trainer.checkpoint.reader import StoredCheckpoint
from accel_trainer.checkpoint.shards import StoredShards
from accel_trainer.errors import IncompatibleCheckpointError
from accel_trainer.integrations.deepspeed.partitions import Run, opened_partition, whole_shape
from accel_trainer.runtime.shared_errors import raise_together
from accel_trainer.strategies.parameter_state.model_io import options_of, outline_optimizer
from accel_trainer.strategies.parameter_state.stored_unit import (
    Pending,
    decode_optimizer,
    files_with,
    fit_model,
    read_outline,
)
from accel_trainer.tree import leaves, map_leaves

if TYPE_CHECKING:
    from accel_trainer.integrations.deepspeed.checkpoint_io import DeepSpeedCheckpointIO

__all__ = ["part_files", "plan_parts_load"]

Fill = Callable[[Tensor], None]
"""Fills the elements of one run, in a tensor of its flat partition's size."""


@dataclass
class _FlatPlan:
    """What goes into a flat partition, and into the optimizer's state for it."""

    values: list[Fill] = field(default_factory=list)
    state: dict[str, list[Fill]] = field(default_factory=dict)
    """By key of the state; every parameter of the partition that has a state is in it."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """What the optimizer keeps once for all of a partition's parameters; its tensors are still in their files."""


class _Plan:
    """What this rank is going to read, and where to; files are verified before the first is read."""

    def __init__(self, io: DeepSpeedCheckpointIO, stored: StoredCheckpoint, prefix: str) -> None:
        self.files: set[str] = set()
        self.weights = StoredShards(stored, f"{prefix}.model")
        self.held = StoredShards(stored, f"{prefix}.optimizer")
        self.flats = [_FlatPlan() for _ in range(io.partitions.num_flat)]
        self.replaces_state = False
        self._io = io
        self._first: list[Callable[[], Any]] = []
        self._last: list[Callable[[], Any]] = []

    def add_weight(self, name: str, tensor: Tensor) -> None:
        """Read a parameter or buffer: all of it where this rank has it whole, and its part of what is partitioned."""
        trained, frozen = self._io.partitions.trained(tensor), self._io.partitions.frozen(tensor)
        is_whole = tuple(tensor.shape) == whole_shape(tensor)
        if is_whole:
            self.files |= self.weights.files_for(name, Box.full(tensor.shape))
            self._first.append(partial(self.weights.read, name, tensor.detach()))
        if frozen is not None:
            self._first.append(partial(_fill_partition, self._fill(self.weights, name, frozen), tensor))
        elif trained is not None and is_whole and tensor.dtype == self._io.master_dtype:
            self.flats[trained.flat].values.append(partial(_copy_run, tensor, trained))
        elif trained is not None:
            self.flats[trained.flat].values.append(self._fill(self.weights, name, trained))

    def add_extra_state(self, name: str, put: Callable[[Tensor], Any]) -> None:
        """Read what a module has made itself, and hand it to it."""
        state = torch.empty(self.weights.shape(name), dtype=self.weights.dtype(name))
        self.files |= self.weights.files_for(name, Box.full(state.shape))
        self._first.append(partial(self.weights.read, name, state))
        self._last.append(partial(put, state))

    def add_state(self, run: Run, key: str, value: Any) -> None:
        """Read a part of a parameter's optimizer state: of the parameter's shape, or a number for a whole partition."""
        flat = self.flats[run.flat]
        if _is_number(self.held, run, key, value):
            flat.numbers.setdefault(key, self.noted(value))
        else:
            flat.state.setdefault(key, []).append(self._fill(self.held, value.name, run))

    def add_options(self, group: dict[str, Any], options: Mapping[str, Any]) -> None:
        """Set options of a group of the optimizer, such as its learning rate."""
        noted = self.noted(dict(options))
        self._last.append(lambda: group.update({k: self._read(v, group.get(k)) for k, v in noted.items()}))

    def add_last(self, finish: Callable[[], Any]) -> None:
        """Do something when all is read."""
        self._last.append(finish)

    def noted(self, value: Any) -> Any:
        """Return `value`, whose tensors will be read whole."""
        for leaf in leaves(value):
            if isinstance(leaf, Pending):
                self.files |= self.held.files_for(leaf.name, Box.full(self.held.shape(leaf.name)))
        return value

    def _read(self, value: Any, before: Any = None) -> Any:
        """Return `value` with its tensors read, on the device of what was there before."""

        def read(leaf: Any) -> Any:
            if not isinstance(leaf, Pending):
                return leaf
            tensor = torch.empty(self.held.shape(leaf.name), dtype=self.held.dtype(leaf.name))
            self.held.read(leaf.name, tensor)
            tensor = tensor.to(before.device) if isinstance(before, Tensor) else tensor
            return tensor.numpy() if leaf.as_array else tensor

        return map_leaves(read, value)

    def _fill(self, parts: StoredShards, name: str, run: Run) -> Fill:
        places = run.places()
        for place in places:
            self.files |= parts.files_for(name, place.box)

        def fill(flat: Tensor) -> None:
            target = run.within(flat)
            for place in places:
                parts.read_box(name, place.box, place.within(target))

        return fill

    @torch.no_grad()
    def run(self) -> None:
        """Read everything."""
        for read in self._first:
            read()
        for index, plan in enumerate(self.flats):
            with self._io.partitions.opened(index, changes=True) as (flat, state):
                for fill in plan.values:
                    fill(flat)
                if plan.values:
                    self._io.partitions.spread(index)
                if self.replaces_state:
                    self._replace(state, flat, plan)
        for finish in self._last:
            finish()

    def _replace(self, state: dict[str, Any], flat: Tensor, plan: _FlatPlan) -> None:
        """Put what was stored in place of the optimizer's state."""
        # Zeros stay for parameters without a state yet, and in the padding.
        self._io.reset_state(state, flat, plan.state, {key: self._read(value) for key, value in plan.numbers.items()})
        for key, fills in plan.state.items():
            for fill in fills:
                fill(state[key])


def _is_number(held: StoredShards, run: Run, key: str, value: Any) -> bool:
    # Of a parameter of one number, the count of its updates has the same shape.
    return not isinstance(value, Pending) or key == "step" or held.shape(value.name) != run.shape


def _fill_partition(fill: Fill, parameter: Tensor) -> None:
    with opened_partition(parameter, changes=True) as partition:
        fill(partition)


def _copy_run(tensor: Tensor, run: Run, flat: Tensor) -> None:
    run.within(flat).copy_(run.of_whole(tensor))


def plan_parts_load(
    io: DeepSpeedCheckpointIO, stored: StoredCheckpoint, prefix: str, *, weights: bool
) -> Callable[[], None]:
    """Check what `save_parts`, or a native unit, wrote, and return what loads it; see `CheckpointIO.plan_load`."""
    with raise_together(stored.process, f"load of {stored.path}"):
        outline = read_outline(stored, prefix, io.module, "DeepSpeed's engine")
        plan = _Plan(io, stored, prefix)
        if weights:
            _plan_model(io, plan, outline["tied"], stored)
        if io.has_optimizer:
            _plan_optimizer(io, plan, outline["optimizer"], stored)
    stored.verify_together(plan.files)

    def load() -> None:
        with raise_together(stored.process, f"load of {stored.path}"):
            plan.run()

    return load


def _plan_model(io: DeepSpeedCheckpointIO, plan: _Plan, tied: Mapping[str, str], stored: StoredCheckpoint) -> None:
    own, extra = dict(io.model_tensors()), io.with_extra_state()
    for name, stored_name in fit_model(stored, plan.weights, tied, io.module, own, whole_shape):
        if name in extra:
            plan.add_extra_state(stored_name, extra[name].set_extra_state)
        else:
            plan.add_weight(stored_name, own[name])


def _plan_optimizer(io: DeepSpeedCheckpointIO, plan: _Plan, outline: Any, stored: StoredCheckpoint) -> None:
    saved = decode_optimizer(stored, outline, plan.held, io.module)
    found = outline_optimizer(saved, [list(names) for names in io.groups])
    if isinstance(found, str):
        raise IncompatibleCheckpointError(f"{stored.path.absolute()}: {found}")
    problems = []
    plan.replaces_state = True
    for name, _, run in io.trained():
        for key, value in found["state"].get(name, {}).items():
            shape = plan.held.shape(value.name) if isinstance(value, Pending) else ()
            if shape in ((), run.shape):
                plan.add_state(run, key, value)
            else:
                problems.append(f"{key} of {name} is {shape}, and the parameter is {run.shape}")
    if problems:
        raise IncompatibleCheckpointError(
            f"{stored.path.absolute()} holds a state that DeepSpeed cannot shard: {'; '.join(problems[:10])}. Expected "
            "one of each parameter's shape, or a number; use the optimizer with strategy 'fsdp2', or load the weights "
            "alone"
        )
    for group, options in zip(io.param_groups(), found["param_groups"], strict=True):
        plan.add_options(group, options_of(options))
    plan.add_last(partial(io.finish_load, saved.get("loss_scale", {})))


def part_files(io: DeepSpeedCheckpointIO, manifest: Manifest, prefix: str) -> set[str]:
    """Return the files of a unit that hold something of what this rank holds; see `CheckpointIO.files`."""
    weights: dict[str, tuple[tuple[int, ...], list[Box]]] = {}
    state: dict[str, tuple[tuple[int, ...], list[Box]]] = {}
    for name, tensor in io.model_tensors():
        run = io.partitions.trained(tensor) or io.partitions.frozen(tensor)
        boxes = [] if run is None else [place.box for place in run.places()]
        shape = whole_shape(tensor)
        state[name] = shape, boxes
        weights[name] = shape, [Box.full(shape)] if tuple(tensor.shape) == shape else boxes
    return files_with(manifest, prefix, weights, state)
