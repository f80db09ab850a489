"""State of a DeepSpeed engine by parameter name: full on rank 0, or each rank's shards.

The shards' files are those of `strategies.parameter_state.base_io`, and every native strategy loads them. A partition
begins and ends within rows, so that a rank's run of a tensor can be several boxes: the largest are in the file of the
number of the rank, the others in files with the numbers after the last rank, its own plus the number of ranks, etc.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_trainer.checkpoint.boxes import Box
from accel_trainer.checkpoint.publication import StagedDirectory
from accel_trainer.checkpoint.run_state import encode
from accel_trainer.checkpoint.safetensors_file import LazyTensor
from accel_trainer.checkpoint.shards import ShardedTensors, own_share
from accel_trainer.errors import CheckpointNotFoundError, IncompatibleCheckpointError
from accel_trainer.integrations.deepspeed.partitions import Partitions, Run, RunBox, opened_partition
from accel_trainer.runtime.model_wrappers import uncompiled_name, unsharded_shape
from accel_trainer.strategies.parameter_state.base_io import (
    CheckpointIO,
    HeldBoxes,
    PendingTensor,
    Reads,
    group_options,
)
from accel_trainer.techniques.ema import AveragedWeights
from accel_trainer.tree import leaves, map_leaves

_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of a dynamic loss scaler that its next values depend on."""


@contextmanager
def _unfrozen(parameter: Tensor) -> Iterator[None]:
    """Context in which DeepSpeed reads a parameter that was frozen after prepare(), for which it has no answer else."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(is_trained)


class DeepSpeedCheckpointIO(CheckpointIO):
    """State of an engine of ZeRO: fp32 weights where the optimizer keeps any, full on rank 0, one at a time."""

    engine_name = "DeepSpeed's engine"

    def __init__(
        self,
        engine: Any,
        optimizers: Sequence[Optimizer],
        groups: Sequence[Sequence[str]],
        averages: AveragedWeights | None = None,
        note_values: Callable[[], None] = lambda: None,
    ) -> None:
        """`note_values` is called where the engine itself has changed the parameters' values."""
        super().__init__(engine.module, bool(optimizers), averages=averages)
        self._note_values = note_values
        self._groups = groups
        self._engine = engine
        self._zero = engine.optimizer

    @cached_property
    def partitions(self) -> Partitions:
        """This rank's partitions."""
        return Partitions(self._zero)

    # --- the model --------------------------------------------------------------------------------------------------

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the unsharded shape."""
        return unsharded_shape(tensor)

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Return the type of the values that the optimizer updates, where it trains the parameter."""
        return tensor.dtype if self.partitions.trained(tensor) is None else self.partitions.master_dtype

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the unsharded values, on every rank. Collective."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        full: Tensor
        if self.averages is not None and self.averages.is_in_model:  # and the engine's fp32 weights are the own ones
            full = tensor.detach().to(self.dtype_of(tensor), copy=True)
        elif self.partitions.trained(tensor) is not None:
            with _unfrozen(tensor):
                full = safe_get_full_fp32_param(tensor)
        else:
            with GatheredParameters([tensor]):  # does nothing for a tensor that ZeRO-3 has not partitioned
                # Before it is partitioned again. Only rank 0 writes them, unless each node does.
                full = tensor.detach().to("cpu" if dist.get_rank() == 0 else tensor.device, copy=True)
        return full.detach().view(self.shape_of(tensor))

    @torch.no_grad()
    def fill(self, tensor: Tensor, source: Tensor | None) -> None:
        """Write rank 0's values into a parameter or buffer, and into the optimizer's copy of it. Collective."""
        run, shape = self.partitions.trained(tensor), self.shape_of(tensor)
        value = self._receive(source, shape, self.dtype_of(tensor))
        if tuple(tensor.shape) == shape:
            tensor.data.copy_(value)  # no change of a user's, which the next step would look for
        if run is not None:
            self.partitions.write(run, value)
        elif (run := self.partitions.frozen(tensor)) is not None:
            with opened_partition(tensor, changes=True) as partition:
                run.within(partition).copy_(run.of_full(value))

    def plan_full_model_load(self, state: Mapping[str, Tensor], *, strict: bool = True) -> Callable[[], None]:
        """Plan as ever; at the end the model gets the values of the optimizer's fp32 weights."""
        fill = super().plan_full_model_load(state, strict=strict)

        def load() -> None:
            fill()
            self.partitions.update_model()

        return load

    def _receive(self, source: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return rank 0's tensor on every rank. Collective."""
        value = torch.empty(tuple(shape), dtype=dtype, device=self._engine.device)
        if source is not None:
            value.copy_(source)
        dist.broadcast(value, src=0)
        return value

    def shard_model(self, tensors: Mapping[str, Tensor], ranks: Sequence[int]) -> PartitionShards:
        """Return this rank's shards of parameters and buffers. Nothing is communicated."""
        shards = PartitionShards(self.partitions, ranks)
        shards.add_weights(tensors)
        return shards

    def new_reads(self) -> PartitionReads:
        """Return an empty plan of reads."""
        return PartitionReads(self.partitions)

    def held_boxes(self) -> tuple[HeldBoxes, HeldBoxes]:
        """Return the boxes of this rank's runs; those of the weights are unsharded where the model is."""
        weights: dict[str, tuple[tuple[int, ...], list[Box]]] = {}
        state: dict[str, tuple[tuple[int, ...], list[Box]]] = {}
        for name, tensor in self.model_tensors():
            run = self.partitions.trained(tensor) or self.partitions.frozen(tensor)
            boxes = [] if run is None else [own.box for own in run.boxes()]
            shape = self.shape_of(tensor)
            state[name] = shape, boxes
            weights[name] = shape, [Box.full(shape)] if tuple(tensor.shape) == shape else boxes
        return weights, state

    # --- full states of the optimizer -------------------------------------------------------------------------------

    def group_names(self) -> list[list[str]]:
        """Return the names of the parameters of each group; the engine has replaced them by flat buffers."""
        return [list(names) for names in self._groups]

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._zero.optimizer.param_groups
        return groups

    def _options(self) -> dict[str, Any]:
        """Return the options of the groups, and the fp16 loss scale."""
        scaler = self._scaler
        named = zip(self._param_groups, self.group_names(), strict=True)
        return {
            "param_groups": [{**group_options(group), "params": names} for group, names in named],
            "loss_scale": {name: vars(scaler)[name] for name in _SCALE if scaler is not None},
        }

    def _trained(self) -> Iterator[tuple[str, nn.Parameter, Run]]:
        """Yield the parameters that have optimizer state with this rank's run of them, in the module's order."""
        for name, parameter in self.module.named_parameters():
            if (run := self.partitions.trained(parameter)) is not None:
                yield uncompiled_name(name), parameter, run

    @property
    def _scaler(self) -> Any:
        """The engine's dynamic fp16 loss scaler; None without one."""
        scaler = getattr(self._zero, "loss_scaler", None)
        return scaler if getattr(scaler, "dynamic", False) else None

    def full_optimizer_state(self, keep: bool | None = None) -> dict[str, Any]:
        """Return the optimizer's state by parameter name where `keep` is set."""
        from deepspeed.utils import safe_get_full_optimizer_state

        self.require_optimizer()
        options, keeps = self._options(), dist.get_rank() == 0 if keep is None else keep
        self.partitions.link_state()
        state: dict[str, Any] = {}
        outlines = self.partitions.state_outlines()
        for name, parameter, run in self._trained():
            entry: dict[str, Any] = {}
            for key, value in outlines[run.flat].items():
                if isinstance(value, Tensor) and value.is_meta:
                    full = safe_get_full_optimizer_state(parameter, key)
                    entry[key] = full.detach().to("cpu", copy=True).view(run.shape) if keeps else None
                else:
                    entry[key] = value.to("cpu", copy=True) if isinstance(value, Tensor) else value
            if entry:
                state[name] = entry
        return {"state": state, **options} if keeps else {}

    def outline_optimizers(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state with shapes in place of tensors of a parameter's shape, and the loss scale."""
        shapes = {name: run.shape for name, _, run in self._trained()}

        def outline(name: str, key: str, value: Any) -> Any:
            is_sharded = isinstance(value, Tensor) and key != "step" and tuple(value.shape) == shapes[name]
            return torch.Size(value.shape) if is_sharded else value

        entries = {
            name: {key: outline(name, key, value) for key, value in entry.items()}
            for name, entry in state["state"].items()
            if name in shapes
        }
        return {"state": entries, "loss_scale": state.get("loss_scale", {})}

    def load_optimizers(self, outline: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Load rank 0's full optimizer state. Collective."""
        for group, saved in zip(self._param_groups, outline["param_groups"], strict=True):
            group.update(group_options(saved))
        runs = {name: run for name, _, run in self._trained() if name in outline["state"]}
        self._reset_state(runs, outline["state"])
        for name, run in runs.items():
            source = state["state"][name] if dist.get_rank() == 0 else {}
            for key, shape in outline["state"][name].items():
                if isinstance(shape, torch.Size):
                    self.partitions.write(run, self._receive(source.get(key), shape, torch.float32), key)
        self._finish_optimizer_load(outline["loss_scale"])

    def _reset_state(self, runs: Mapping[str, Run], entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the state of all partitions: zeros where `entries` have shapes, and their other values."""
        for index in range(self.partitions.num_flat):
            own = [entries[name] for name, run in runs.items() if run.flat == index]
            shared = {key: value for entry in own for key, value in entry.items() if not isinstance(value, torch.Size)}
            keys = {key: None for entry in own for key in entry if key not in shared}
            with self.partitions.opened(index, changes=True) as (flat, kept):
                self.partitions.reset_state(kept, flat, keys, shared)

    def _finish_optimizer_load(self, loss_scale: Mapping[str, Any]) -> None:
        """Take up the fp16 loss scale, and connect parameters with state that is new."""
        scaler = self._scaler
        for name, value in loss_scale.items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)
        self.partitions.link_state()

    # --- the optimizer in shards ------------------------------------------------------------------------------------

    def shard_optimizers(self, ranks: Sequence[int]) -> tuple[PartitionShards, Any]:
        """Return this rank's shards of the optimizer's state, and its outline. Nothing is communicated."""
        shards = PartitionShards(self.partitions, ranks)
        state: dict[str, Any] = {}
        runs: list[tuple[Run, str]] = []
        outlines = self.partitions.state_outlines()
        for name, _, run in self._trained():
            entry = dict(outlines[run.flat])
            for key, value in entry.items():
                if isinstance(value, Tensor) and value.is_meta:
                    entry[key] = value.new_empty(run.shape)
                    runs.append((run, key))
            if entry:
                state[name] = entry
        tensors: dict[str, Tensor] = {}
        outline = encode({"state": state, **self._options()}, tensors, "optimizer")
        # In the order in which they were met above.
        in_runs = [(name, tensor) for name, tensor in tensors.items() if tensor.is_meta]
        for (name, tensor), (run, key) in zip(in_runs, runs, strict=True):
            shards.add_run(name, tensor.dtype, run, partial(self.partitions.read, run, key))
        shards.add_replicated({name: tensor for name, tensor in tensors.items() if not tensor.is_meta})
        return shards, outline

    def plan_optimizers(self, state: Mapping[str, Any], stored: Any, reads: PartitionReads, source: Path) -> None:
        """Plan the reads of a state whose tensors are pending; refuse tensors of other shapes than the parameters'."""
        groups = self.match_saved_groups(state, source)
        problems = []
        reads.replaces_state = True
        for name, _, run in self._trained():
            for key, value in state["state"].get(name, {}).items():
                shape = stored.shape(value.name) if isinstance(value, PendingTensor) else ()
                if shape in ((), run.shape):
                    reads.add_state(stored, run, key, value)
                else:
                    problems.append(f"{key} of {name} is {shape}, and the parameter is {run.shape}")
        if problems:
            raise IncompatibleCheckpointError(
                f"{source.absolute()} holds a state that DeepSpeed cannot shard: {'; '.join(problems[:10])}. Expected "
                "one of each parameter's shape, or a number; use the optimizer with strategy 'fsdp2', or load the "
                "weights alone"
            )
        for group, options in zip(self._param_groups, groups, strict=True):
            reads.add_options(stored, group, group_options(options))
        reads.add_last(partial(self._finish_optimizer_load, state.get("loss_scale", {})))

    # --- other formats -------------------------------------------------------------------------------

    def load_engine_files(self, directory: Path) -> None:
        """Load the files of the engine's own `save_checkpoint`, as transformers' Trainer calls it. Collective."""
        written, ranks = len(list(directory.glob("global_step*/*_optim_states.pt"))), dist.get_world_size()
        if written != ranks:
            raise IncompatibleCheckpointError(
                f"{directory} was written by DeepSpeed's engine on {written} ranks, and this run has {ranks}: its "
                f"shards cannot be split anew. Resume on {written} ranks once; what this Trainer saves then loads on "
                "any number"
            )
        path, _ = self._engine.load_checkpoint(str(directory))
        if path is None:
            raise CheckpointNotFoundError(
                f"DeepSpeed's engine finds nothing to load in {directory}: the file `latest` there does not lead to "
                "one of its global_step* directories"
            )
        self._note_values()


class PartitionShards:
    """This rank's runs of tensors, and its share of those that every rank holds."""

    def __init__(self, partitions: Partitions, ranks: Sequence[int]) -> None:
        self._partitions = partitions
        self._ranks = ranks
        self._files: list[tuple[dict[str, Tensor | LazyTensor], dict[str, Any]]] = []

    def add_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Add parameters and buffers, in the optimizer's type where it updates them."""
        replicated: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if (run := self._partitions.trained(tensor)) is not None:
                self.add_run(name, self._partitions.master_dtype, run, partial(self._partitions.read, run))
            elif (run := self._partitions.frozen(tensor)) is not None:
                self.add_run(name, tensor.dtype, run, partial(_read_frozen, tensor, run))
            else:
                replicated[name] = tensor
        # Of a batch norm's statistics, which differ, rank 0's are the model's.
        self.add_replicated(replicated, {name for name, t in replicated.items() if not isinstance(t, nn.Parameter)})

    def add_run(self, name: str, dtype: torch.dtype, run: Run, read: Callable[[], Tensor]) -> None:
        """Add a run of a tensor, each of its boxes in a file of its own; `read` returns its elements, flat."""
        for number, own in enumerate(run.boxes()):
            tensors, slices = self._file(number)
            tensors[name] = LazyTensor(dtype, own.box.sizes, partial(_read_box, own, read))
            if own.box != Box.full(run.shape):
                slices[name] = (run.shape, own.box.offsets)

    def add_replicated(self, tensors: Mapping[str, Tensor], of_first_rank: Collection[str] = ()) -> None:
        """Add this rank's share of tensors that every rank holds; the first one takes `of_first_rank`."""
        own = own_share(tensors, dist.get_rank(), self._ranks, of_first_rank)
        if own:
            self._file(0)[0].update((name, tensors[name]) for name in own)

    def _file(self, number: int) -> tuple[dict[str, Tensor | LazyTensor], dict[str, Any]]:
        while len(self._files) <= number:
            self._files.append(({}, {}))
        return self._files[number]

    @property
    def num_bytes(self) -> int:
        """Size of the tensors that this rank writes."""
        written = [tensor for tensors, _ in self._files for tensor in tensors.values()]
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in written)

    def write(self, staged: StagedDirectory, prefix: str) -> None:
        """Write the files. Nothing is communicated."""
        for number, (tensors, slices) in enumerate(self._files):
            if tensors:
                index = dist.get_rank() + number * dist.get_world_size()
                staged.write_tensors(f"{prefix}.{index:05d}.safetensors", tensors, slices=slices)


def _read_box(own: RunBox, read: Callable[[], Tensor]) -> Tensor:
    return own.within(read())


def _read_frozen(tensor: Tensor, run: Run) -> Tensor:
    with opened_partition(tensor) as partition:
        return run.within(partition).clone()


Fill = Callable[[Tensor], Any]
"""Fills the elements of one run, in a tensor of its flat partition's size."""


@dataclass
class _FlatReads:
    """Reads into a flat partition, and into the optimizer's state for it."""

    values: list[Fill] = field(default_factory=list)
    state: dict[str, list[Fill]] = field(default_factory=dict)
    """By key of the state, for every parameter of the partition that has one."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Values that the optimizer keeps once for all parameters of a partition; its tensors are pending."""


class PartitionReads(Reads):
    """Reads into an engine's partitions, its model, and its optimizer's state and options."""

    def __init__(self, partitions: Partitions) -> None:
        super().__init__()
        self.replaces_state = False
        """Whether the optimizer's state is read, too."""
        self._partitions = partitions
        self._flats = [_FlatReads() for _ in range(partitions.num_flat)]

    def add_weight(self, stored: ShardedTensors, name: str, tensor: Tensor) -> None:
        """Fill a parameter or buffer: the tensor where this rank has it unsharded, and its run of a partitioned one."""
        trained, frozen = self._partitions.trained(tensor), self._partitions.frozen(tensor)
        is_unsharded = tuple(tensor.shape) == unsharded_shape(tensor)
        if is_unsharded:
            self.add(stored, name, tensor.data)  # by `detach` it would count as a change of the user
        if frozen is not None:
            fill = self._fill(stored, name, frozen)

            def fill_partition() -> None:
                with opened_partition(tensor, changes=True) as partition:
                    fill(partition)

            self._reads.append(fill_partition)
        elif trained is not None and is_unsharded and tensor.dtype == self._partitions.master_dtype:
            self._flats[trained.flat].values.append(lambda flat: trained.within(flat).copy_(trained.of_full(tensor)))
        elif trained is not None:
            self._flats[trained.flat].values.append(self._fill(stored, name, trained))

    def add_state(self, stored: ShardedTensors, run: Run, key: str, value: Any) -> None:
        """Fill the optimizer's state for a run, or replace a value that it keeps for a flat partition."""
        flat = self._flats[run.flat]
        # A parameter of one number has the shape of the count of its updates.
        if not isinstance(value, PendingTensor) or key == "step" or stored.shape(value.name) != run.shape:
            flat.shared.setdefault(key, self._pend(stored, value))
        else:
            flat.state.setdefault(key, []).append(self._fill(stored, value.name, run))

    def add_options(self, stored: ShardedTensors, group: dict[str, Any], options: Mapping[str, Any]) -> None:
        """Set options of a group of the optimizer, such as its learning rate."""
        pending = {key: self._pend(stored, value) for key, value in options.items()}
        self.add_last(lambda: group.update({key: read(group.get(key)) for key, read in pending.items()}))

    def _pend(self, stored: ShardedTensors, value: Any) -> Callable[[Any], Any]:
        """Return a function that returns `value` with its tensors read, on the device of its argument if a tensor."""
        for leaf in leaves(value):
            if isinstance(leaf, PendingTensor):
                self.files |= stored.files_for(leaf.name, Box.full(stored.shape(leaf.name)))

        def read(leaf: Any, before: Any) -> Any:
            if not isinstance(leaf, PendingTensor):
                return leaf
            tensor = torch.empty(stored.shape(leaf.name), dtype=stored.dtype(leaf.name))
            stored.read(leaf.name, tensor)
            tensor = tensor.to(before.device) if isinstance(before, Tensor) else tensor
            return tensor.numpy() if leaf.as_array else tensor

        return lambda before: map_leaves(lambda leaf: read(leaf, before), value)

    def _fill(self, stored: ShardedTensors, name: str, run: Run) -> Fill:
        boxes = run.boxes()
        for own in boxes:
            self.files |= stored.files_for(name, own.box)

        def fill(flat: Tensor) -> None:
            target = run.within(flat)
            for own in boxes:
                stored.fill_box(name, own.box, own.within(target))

        return fill

    @torch.no_grad()
    def run(self) -> None:
        """Fill model, partitions and the optimizer's state."""
        for read in self._reads:
            read()
        for index, reads in enumerate(self._flats):
            with self._partitions.opened(index, changes=True) as (flat, state):
                for fill in reads.values:
                    fill(flat)
                if reads.values:
                    self._partitions.update_model_from(index)
                if self.replaces_state:
                    shared = {key: read(None) for key, read in reads.shared.items()}
                    # Zeros stay for parameters without a state yet, and in the padding.
                    self._partitions.reset_state(state, flat, reads.state, shared)
                    for key, fills in reads.state.items():
                        for fill in fills:
                            fill(state[key])
        for finish in self._last:
            finish()
