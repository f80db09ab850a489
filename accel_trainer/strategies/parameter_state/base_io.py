"""State of a unit in checkpoints, for every engine: saved by any number of ranks, loaded on any other number.

    PREFIX.json                            engine, tied names, the optimizers' state with tensors by name
    PREFIX.model.RRRRR.safetensors         rank R's shards of parameters and persistent buffers
    PREFIX.optimizer.RRRRR.safetensors     rank R's shards of the tensors in the optimizers' state
    PREFIX.replica_R.json, PREFIX.model.replica_R.*, PREFIX.optimizer.replica_R.*    instead, where every rank R has
                                           updated a replica of its own; for other ranks, the mean of all is read

Everything is keyed by parameter name, and each rank reads only the boxes that it holds.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_trainer import logging
from accel_trainer.checkpoint.boxes import Box
from accel_trainer.checkpoint.disk import as_corrupt
from accel_trainer.checkpoint.interop.dcp import DcpDirectory
from accel_trainer.checkpoint.manifest import Manifest, TensorEntry
from accel_trainer.checkpoint.publication import StagedDirectory
from accel_trainer.checkpoint.reader import StoredCheckpoint
from accel_trainer.checkpoint.run_state import OWN_STATE, decode
from accel_trainer.checkpoint.safetensors_file import LazyTensor
from accel_trainer.checkpoint.shards import ShardedTensors, StoredShards, local_box, stored_tensors
from accel_trainer.checkpoint.weights.into_model import describe_names, names_by_tensor, require_tensors
from accel_trainer.checkpoint.weights.offloaded import offloaded_tensors, outlines_of
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from accel_trainer.runtime.model_wrappers import uncompiled_name
from accel_trainer.runtime.shared_errors import raise_together
from accel_trainer.strategies.local_replicas import LocalReplicas
from accel_trainer.techniques.ema import AveragedWeights

EXTRA_STATE = "_extra_state"
"""Last part of the name under which torch saves what a module's get_extra_state() returns; of any shape."""


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an optimizer's parameter group, or of a saved one."""
    return {key: value for key, value in group.items() if key not in ("params", OWN_STATE)}


def _describe(problem: str, names: list[str]) -> list[str]:
    return [f"{problem}: {describe_names(names)}"] if names else []


def match_model(
    module: nn.Module,
    own: Mapping[str, Tensor],
    saved: Mapping[str, Tensor],
    strict: bool,
    shape_of: Callable[[Tensor], tuple[int, ...]],
) -> list[tuple[str, str]] | str:
    """Return (own name, saved name) of each distinct tensor, tied ones by one name, or the differences."""
    groups = names_by_tensor(own).values()
    saved_names = {names[0]: next((name for name in names if name in saved), None) for names in groups}
    pairs = [(name, saved_name) for name, saved_name in saved_names.items() if saved_name is not None]
    problems = _differing_shapes(own, saved, pairs, shape_of)[:10]
    if strict:
        missing = [name for name, saved_name in saved_names.items() if saved_name is None]
        problems += _describe("missing in the checkpoint", missing)
        problems += _describe("not in the model", [name for name in saved if name not in own])
    if problems:
        return (
            f"the checkpoint does not fit {type(module).__name__}: {'; '.join(problems)}. "
            "Build the model that was saved, or load with strict=False where names may differ"
        )
    return pairs


def _differing_shapes(
    own: Mapping[str, Tensor],
    saved: Mapping[str, Tensor],
    pairs: Sequence[tuple[str, str]],
    shape_of: Callable[[Tensor], tuple[int, ...]],
) -> list[str]:
    problems = []
    for name, saved_name in pairs:
        found, expected = tuple(saved[saved_name].shape), shape_of(own[name])
        if found != expected and name.rpartition(".")[2] != EXTRA_STATE:
            problems.append(f"{name} is {found} in the checkpoint and {expected} in the model")
    return problems


def match_groups(saved: Mapping[str, Any], own_groups: Sequence[Sequence[str]]) -> list[Any] | str:
    """Return the saved groups in the order of `own_groups` (names), without options where new, or the differences."""
    # Groups without parameters need none: DeepSpeed drops them, and a Trainer of adapters has one where nothing is
    # without weight decay.
    groups = saved.get("param_groups", [])
    names_saved, names_owned = ([list(names) for names in each] for each in ((g["params"] for g in groups), own_groups))
    if sorted(filter(None, names_saved)) != sorted(filter(None, names_owned)):
        return _describe_groups(names_saved, names_owned)
    # No name is in two groups, so that only those without any are the same.
    remaining = [*zip(names_saved, groups, strict=True)]
    ordered = []
    for names in names_owned:
        index = next((i for i, (found, _) in enumerate(remaining) if found == names), None)
        ordered.append({"params": []} if index is None else remaining.pop(index)[1])
    return ordered


def _describe_groups(saved: Sequence[list[str]], own: Sequence[list[str]]) -> str:
    saved_names, own_names = set(itertools.chain(*saved)), set(itertools.chain(*own))
    differences = _describe("missing in the state", sorted(own_names - saved_names))
    differences += _describe("not in this optimizer", sorted(saved_names - own_names))
    return (
        f"the optimizer state was saved for {len(saved)} group(s) of {len(saved_names)} parameter(s), and this "
        f"optimizer has {len(own)} group(s) of {len(own_names)}; "
        f"{'; '.join(differences) or 'they are the same, in other groups or another order'}. Build the optimizer that "
        "was saved"
    )


logger = logging.get_logger(__name__)

_ENGINE = "torch"
"""Whose layout the files have; engines of other layouts write another word."""
_OPTIMIZER_STATE = "optimizer.state."

HeldBoxes = Mapping[str, tuple[tuple[int, ...], Sequence[Box]]]
"""Unsharded shapes of tensors by name, and the boxes that this rank holds of them."""


def current_rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def broadcast_object(value: Any) -> Any:
    """Return rank 0's value on every rank. Collective."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


class PendingTensor:
    """A tensor of the optimizers' state that is still in its file."""

    def __init__(self, name: str, as_array: bool = False) -> None:
        self.name = name
        self.as_array = as_array

    def numpy(self) -> PendingTensor:
        """Return the same tensor, to be loaded as a NumPy array."""
        return PendingTensor(self.name, as_array=True)


class WritableShards(Protocol):
    """This rank's shards of tensors."""

    @property
    def num_bytes(self) -> int:
        """Their size."""

    def write(self, staged: StagedDirectory, prefix: str) -> None:
        """Write them to files whose names begin with `prefix`; every rank calls it."""


def _require_equal(name: str, offloaded: Tensor, found: Tensor) -> None:
    # Written into, the pages of a mapped file would be memory of this process: the whole model's, at each resume.
    if not torch.equal(offloaded, found.to(offloaded)):
        raise IncompatibleCheckpointError(
            f"the checkpoint has other values for {name!r}, which is offloaded and stays as it was dispatched; give "
            "the model those of the checkpoint: load_checkpoint_and_dispatch(model, checkpoint, device_map)"
        )


class Reads:
    """Reads of this rank: targets are made first, then files are verified, then targets are filled."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        """To verify before anything is read."""
        self._reads: list[Callable[[], Any]] = []
        self._last: list[Callable[[], Any]] = []

    def add(self, stored: ShardedTensors, name: str, target: Tensor) -> None:
        """Fill `target`, an unsharded tensor or a DTensor, on meta too."""
        self.files |= stored.files_for(name, local_box(target))
        self._reads.append(partial(stored.read, name, target))

    def add_weight(self, stored: ShardedTensors, name: str, tensor: Tensor) -> None:
        """Fill a parameter or buffer of the model."""
        self.add(stored, name, tensor)

    def add_offloaded(self, stored: ShardedTensors, name: str, tensor: Tensor) -> None:
        """Compare an offloaded weight, which stays as it is, before any target is filled."""
        self.files |= stored.files_for(name, local_box(tensor))
        self._reads.insert(0, lambda: _require_equal(name, tensor, stored[name]))

    def add_last(self, finish: Callable[[], Any]) -> None:
        """Call `finish` when every target is filled."""
        self._last.append(finish)

    @torch.no_grad()
    def run(self) -> None:
        """Fill the targets."""
        for call in (*self._reads, *self._last):
            call()


class CheckpointIO(ABC):
    """State in and out of a unit, keyed by the user's parameter names, never by rank.

    Every method is collective unless it says otherwise. An engine has its own way to gather, fill, shard and read one
    tensor. Loads come in two halves: `plan_*` checks all of a state, raises IncompatibleCheckpointError on every rank
    where names, shapes or groups differ, and returns the collective call that loads it; nothing changes before that
    call, so that a checkpoint which does not fit one of several units changes none.
    """

    engine_name: str
    """For messages."""

    def __init__(
        self,
        module: nn.Module,
        has_optimizer: bool,
        replicas: LocalReplicas | None = None,
        averages: AveragedWeights | None = None,
    ) -> None:
        self.module = module
        self.has_optimizer = has_optimizer
        self.replicas = replicas
        """Of a model whose ranks may update it apart."""
        self.averages = averages

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the unsharded shape."""
        return tuple(tensor.shape)

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype that a parameter or buffer is saved in."""
        return tensor.dtype

    @abstractmethod
    def gather(self, tensor: Tensor) -> Tensor:
        """Return the unsharded values on rank 0, on any device; elsewhere a tensor that nobody reads. Collective."""

    @abstractmethod
    def fill(self, tensor: Tensor, source: Tensor | None) -> None:
        """Write rank 0's unsharded values into a parameter or buffer. Collective; `source` is None on other ranks."""

    @abstractmethod
    def shard_model(self, tensors: Mapping[str, Tensor], ranks: Sequence[int]) -> WritableShards:
        """Return this rank's shards of parameters and buffers; `ranks` write them together."""

    @abstractmethod
    def shard_optimizers(self, ranks: Sequence[int]) -> tuple[WritableShards, Any]:
        """Return this rank's shards of the optimizers' state, and its outline as JSON, the same on every rank."""

    @abstractmethod
    def outline_optimizers(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a full optimizer state without the values of its tensors."""

    @abstractmethod
    def load_optimizers(self, outline: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Load rank 0's full optimizer state, of which every rank has the `outline`. Collective."""

    @abstractmethod
    def plan_optimizers(self, state: Mapping[str, Any], stored: ShardedTensors, reads: Any, source: Path) -> None:
        """Plan the reads of the optimizers' saved state, whose tensors are pending, and of its options."""

    @abstractmethod
    def group_names(self) -> list[list[str]]:
        """Return the names of this module's parameters in each group of the optimizers."""

    def names_by_optimizer(self) -> Sequence[Sequence[Sequence[str | None]]]:
        """Return the names of the parameters in each optimizer's groups; None for those of other models."""
        return [self.group_names()]  # an engine has one

    def new_reads(self) -> Reads:
        """Return an empty plan of reads."""
        return Reads()

    def model_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and persistent buffers as the engine holds them, tied ones under every name."""
        offloaded = offloaded_tensors(self.module)
        for name, value in require_tensors(self.module, self.module.state_dict(keep_vars=True)).items():
            yield uncompiled_name(name), offloaded.get(name, value)

    def _distinct_tensors(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return parameters and buffers under the first of their names, and that name by every other of a tied one."""
        own = dict(self.model_tensors())
        groups = names_by_tensor(own).values()
        return {first: own[first] for first, *_ in groups}, {name: first for first, *tied in groups for name in tied}

    def _offloaded_names(self) -> set[str]:
        return {uncompiled_name(name) for name, _, _ in outlines_of(self.module)}

    def _extra_states(self) -> dict[str, nn.Module]:
        """Return the modules that override get_extra_state(), by the name of their state."""
        return {
            uncompiled_name(f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE): module
            for prefix, module in self.module.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def full_model_state(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers, tied ones under every name, on the CPU of rank 0; {} elsewhere."""
        is_main = current_rank() == 0
        state: dict[str, Tensor] = {}
        own = dict(self.model_tensors())
        for names in names_by_tensor(own).values():
            full = self.gather(own[names[0]])
            if is_main:
                state |= dict.fromkeys(names, full.to("cpu", copy=True))
        return {name: state[name] for name in own if is_main}

    def lazy_model_state(self) -> dict[str, LazyTensor]:
        """Return tensors, one object for tied names, that are gathered when called, by every rank in one order."""
        named = list(self.model_tensors())
        lazy = {id(t): LazyTensor(self.dtype_of(t), self.shape_of(t), partial(self.gather, t)) for _, t in named}
        return {name: lazy[id(tensor)] for name, tensor in named}

    def boxed_model_state(self) -> dict[str, Tensor] | None:
        """Return tensors as `lazy_model_state` if this rank holds a box of each as it is saved; None where not."""
        return None

    def load_full_model_state(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Load a state of `full_model_state` at once; see `plan_full_model_load`."""
        self.plan_full_model_load(state, strict=strict)()

    def plan_full_model_load(self, state: Mapping[str, Tensor], *, strict: bool = True) -> Callable[[], None]:
        """Plan the load of rank 0's full state; a tied parameter may be stored under one of its names only."""
        own, extra, is_main = dict(self.model_tensors()), self._extra_states(), current_rank() == 0
        pairs = broadcast_object(match_model(self.module, own, state, strict, self.shape_of) if is_main else None)
        if isinstance(pairs, str):
            raise IncompatibleCheckpointError(pairs)

        offloaded = self._offloaded_names()

        def load() -> None:
            for name, saved_name in pairs:
                if name in offloaded:
                    _require_equal(name, own[name], state[saved_name])
            for name, saved_name in pairs:
                source = state[saved_name] if is_main else None
                if name in extra:
                    extra[name].set_extra_state(broadcast_object(source))
                elif name not in offloaded:
                    self.fill(own[name], source)

        return load

    def require_optimizer(self) -> None:
        """Refuse to go on without an optimizer."""
        if not self.has_optimizer:
            raise ConfigError(f"{type(self.module).__name__} has no optimizer to save or load; pass one to prepare()")

    @abstractmethod
    def full_optimizer_state(self, keep: bool | None = None) -> dict[str, Any]:
        """Return `{"state": {name: ...}, "param_groups": [...]}` of all optimizers; `{}` on ranks not to `keep` it."""

    def load_full_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Load a state of `full_optimizer_state` at once; see `plan_full_optimizer_load`."""
        self.plan_full_optimizer_load(state)()

    def plan_full_optimizer_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Plan the load of rank 0's full state, whose groups are found by their parameters, wherever they are now."""
        self.require_optimizer()
        groups = broadcast_object(match_groups(state, self.group_names()) if current_rank() == 0 else None)
        if isinstance(groups, str):
            raise IncompatibleCheckpointError(groups)
        outline = broadcast_object(self.outline_optimizers(state) if current_rank() == 0 else None)
        return partial(self.load_optimizers, {**outline, "param_groups": groups}, state)

    def match_saved_groups(self, state: Mapping[str, Any], source: Path) -> list[Any]:
        """Return the saved parameter groups in the order of the optimizers' own; refuse those of other parameters."""
        with as_corrupt(source):
            groups = match_groups(state, self.group_names())
            if isinstance(groups, str):
                raise IncompatibleCheckpointError(f"{source.absolute()}: {groups}")
            entries = [*state["state"].values(), *groups, *(group.get(OWN_STATE, {}) for group in groups)]
            if not all(isinstance(entry, Mapping) for entry in entries):
                raise TypeError("an optimizer's state is no mapping of names to values")
        return groups

    def save(self, staged: StagedDirectory, prefix: str, *, weights: bool = True) -> None:
        """Write this rank's shards of model (but for `weights=False`) and optimizers, under `prefix`."""
        tensors, tied = self._distinct_tensors() if weights else ({}, {})
        is_apart = self.replicas is not None and self.replicas.is_apart
        ranks, own = (staged.ranks, "") if not is_apart else ((current_rank(),), f".{_replica(current_rank())}")
        self.shard_model(tensors, ranks).write(staged, f"{prefix}.model{own}")
        outline: dict[str, Any] = {"engine": _ENGINE, "tied": tied, "optimizer": None}
        if self.has_optimizer:
            shards, outline["optimizer"] = self.shard_optimizers(ranks)
            shards.write(staged, f"{prefix}.optimizer{own}")
        if self.replicas is not None and (is_apart or self.replicas.num_steps < 0):
            outline["local_steps"] = self.replicas.num_steps
        if is_apart:
            staged.write_json(f"{prefix}{own}.json", outline)
        if staged.commits:
            staged.write_json(f"{prefix}.json", outline)

    def averaged_model(self) -> dict[str, Tensor]:
        """Return the averages of the weights by name, laid out as the weights; none before the first update."""
        if self.averages is None:
            return {}
        found = {name: self.averages.of(tensor) for name, tensor in self._distinct_tensors()[0].items()}
        return {name: average for name, average in found.items() if average is not None}

    def save_averages(self, staged: StagedDirectory, prefix: str) -> None:
        """Write this rank's shards of the averages of the weights, under `prefix`, if there are any."""
        if self.averages is not None:
            self.averages.require_own("a save of the training state")
            self.shard_model(self.averaged_model(), staged.ranks).write(staged, prefix)

    def plan_averages(self, stored: StoredCheckpoint, prefix: str) -> Callable[[], None]:
        """Verify the averages that `save_averages` wrote, and plan this rank's reads; missing ones begin anew."""
        shards, averages, reads, targets = StoredShards(stored, prefix), self.averages, Reads(), dict[Tensor, Tensor]()
        if averages is None:
            return lambda: None
        with raise_together(stored.process, f"load of {stored.path}"):
            own = self._distinct_tensors()[0]
            for name in own.keys() & set(shards):
                targets[own[name]] = averages.target(own[name])
                reads.add(shards, name, targets[own[name]])
            if not targets:
                logger.warning(
                    "%s holds no averages of the weights (ema_decay): they begin anew with the next update", stored.path
                )
        stored.verify_together(reads.files)

        def load() -> None:
            with raise_together(stored.process, f"load of {stored.path}"):
                reads.run()
            averages.resume(targets)

        return load

    def local_bytes(self, *, weights: bool = True) -> int:
        """Return the size of the tensors that `save` writes on this rank, averages among them. Not collective."""
        ranks = (current_rank(),) if self.replicas is not None and self.replicas.is_apart else range(world_size())
        total = self.shard_model(self._distinct_tensors()[0] if weights else {}, ranks).num_bytes
        total += self.shard_model(self.averaged_model(), ranks).num_bytes
        return total + self.shard_optimizers(ranks)[0].num_bytes if self.has_optimizer else total

    def load(self, stored: StoredCheckpoint, prefix: str, *, weights: bool = True) -> None:
        """Load a unit that `save` wrote, at once; see `plan_load`."""
        self.plan_load(stored, prefix, weights=weights)()

    def plan_load(self, stored: StoredCheckpoint, prefix: str, *, weights: bool = True) -> Callable[[], None]:
        """Verify a unit that `save` wrote, and plan the reads of this rank's boxes of it."""
        reads = self.new_reads()
        with raise_together(stored.process, f"load of {stored.path}"):
            own = self._own_replica(stored.manifest, prefix)
            outline = self._read_outline(stored, f"{prefix}.{own}" if own else prefix)

            def tensors(kind: str) -> ShardedTensors:
                name = f"{prefix}.{kind}"
                return StoredShards(stored, f"{name}.{own}") if own else stored_tensors(stored, name)

            if weights:
                self._plan_model(stored, tensors("model"), outline["tied"], reads)
            if self.has_optimizer:
                shards = tensors("optimizer")
                state = self._decode_optimizers(stored, outline["optimizer"], shards)
                self.plan_optimizers(state, shards, reads, stored.path)
            reads.add_last(partial(self._resume_replicas, stored, outline["local_steps"], is_own=bool(own)))
        stored.verify_together(reads.files)

        def load() -> None:
            with raise_together(stored.process, f"load of {stored.path}"):
                reads.run()

        return load

    def _own_replica(self, manifest: Manifest, prefix: str) -> str:
        """Return the word in the names of this rank's replica; empty where none was saved, or their mean is read."""
        own = _replica(current_rank())
        is_own = self.replicas is not None and manifest.world_size == world_size()
        return own if is_own and f"{prefix}.{own}.json" in manifest.files else ""

    def _resume_replicas(self, stored: StoredCheckpoint, num_steps: int | None, *, is_own: bool) -> None:
        was_apart = num_steps is not None and num_steps >= 0
        if was_apart and not is_own:
            logger.warning(
                "%s was saved by %d ranks after %d update(s) of a replica of their own: this run goes on with the mean "
                "of their weights and optimizers; as many ranks with strategy 'ddp' go on with each replica",
                stored.path, stored.manifest.world_size, num_steps,
            )  # fmt: skip
        if self.replicas is not None:
            self.replicas.resume(num_steps if is_own or not was_apart else None)

    def _read_outline(self, stored: StoredCheckpoint, prefix: str) -> Any:
        """Return the content of PREFIX.json; refuse another engine's layout."""
        outline = stored.json(f"{prefix}.json")
        with as_corrupt(stored.path / f"{prefix}.json"):
            engine = str(outline["engine"])
            if engine == _ENGINE:
                steps = outline.get("local_steps")
                return {
                    "tied": {str(alias): str(name) for alias, name in outline["tied"].items()},
                    "optimizer": outline["optimizer"],
                    "local_steps": None if steps is None else int(steps),
                }
        raise IncompatibleCheckpointError(
            f"{stored.path.absolute()} was saved by {engine!r}, whose state has a layout of its own, and "
            f"this run trains {type(self.module).__name__} with {self.engine_name}; load it with the strategy that "
            f"saved it, or load the weights that `accel-trainer ckpt export {stored.path} OUT` makes of it"
        )

    def _plan_model(
        self, stored: StoredCheckpoint, shards: ShardedTensors, tied: Mapping[str, str], reads: Reads
    ) -> None:
        own, extra, offloaded = dict(self.model_tensors()), self._extra_states(), self._offloaded_names()
        saved = {name: torch.empty(shards.shape(name), device="meta") for name in shards}
        saved |= {alias: saved[name] for alias, name in tied.items() if name in saved}
        pairs = match_model(self.module, own, saved, True, self.shape_of)
        if isinstance(pairs, str):
            raise IncompatibleCheckpointError(f"{stored.path.absolute()}: {pairs}")
        for name, saved_name in pairs:
            first_name = tied.get(saved_name, saved_name)
            if name in extra:
                state = torch.empty(shards.shape(first_name), dtype=shards.dtype(first_name))
                reads.add(shards, first_name, state)
                reads.add_last(partial(extra[name].set_extra_state, state))
            elif name in offloaded:
                reads.add_offloaded(shards, first_name, own[name])
            else:
                reads.add_weight(shards, first_name, own[name])

    def _decode_optimizers(self, stored: StoredCheckpoint, outline: Any, shards: ShardedTensors) -> Any:
        """Return the state that an outline of PREFIX.json describes, its tensors pending."""
        if outline is None:
            raise IncompatibleCheckpointError(
                f"{stored.path.absolute()} holds no optimizer state for {type(self.module).__name__}, which has an "
                "optimizer; an optimizer is never reset silently: load the weights alone to start it anew"
            )
        return decode(outline, {name: PendingTensor(name) for name in shards})  # type: ignore[misc]

    def files(self, manifest: Manifest, prefix: str) -> set[str]:
        """Return the files that `load` opens on this rank, for their verification. Not collective."""
        weights, state = self.held_boxes()
        own = self._own_replica(manifest, prefix)
        files = {f"{prefix}.json", f"{prefix}.{own}.json"} & manifest.files.keys()
        for file, entries in manifest.tensors.items():
            held = weights if file.startswith(f"{prefix}.model.") else state
            is_read = file.startswith(f"{prefix}.") and (not own or f".{own}." in file)
            if is_read and any(_is_needed(name, entry, held) for name, entry in entries.items()):
                files.add(file)
        return files

    def save_sharded_optimizer(self, path: Path) -> None:
        """Write the optimizers' state, each rank its shards, to a torch.distributed.checkpoint directory."""
        raise ConfigError(
            f"the state of {self.engine_name} cannot be written as a torch.distributed.checkpoint directory, which "
            "knows none of its partitions; save it in full (FULL_STATE_DICT), or with save_state()"
        )

    def load_sharded_optimizer(self, path: Path) -> None:
        """Read `optimizer` of a torch.distributed.checkpoint directory that any number of ranks has written."""
        self.require_optimizer()
        stored, reads = DcpDirectory(path), self.new_reads()
        state = {"state": {}, "param_groups": [], **stored.nested("optimizer", PendingTensor)}
        self.plan_optimizers(state, stored, reads, path)
        reads.run()

    def load_engine_files(self, directory: Path) -> None:
        """Load weights and optimizer state from files in the engine's own format, written by as many ranks."""
        raise IncompatibleCheckpointError(
            f"{directory} holds files of an engine, and {type(self.module).__name__} is in none; load the directory "
            "with the strategy that wrote it"
        )

    @abstractmethod
    def held_boxes(self) -> tuple[HeldBoxes, HeldBoxes]:
        """Return this rank's boxes of the weights, and those of parameters for which it holds the optimizers' state."""


def _replica(rank: int) -> str:
    return f"replica_{rank}"


def _is_needed(name: str, entry: TensorEntry, held: HeldBoxes) -> bool:
    if name.startswith(_OPTIMIZER_STATE):
        # optimizer.state.NAME.KEY, where a name has dots, and a key seldom
        name = name.removeprefix(_OPTIMIZER_STATE).rpartition(".")[0]
    if name not in held or held[name][0] != entry.shape:
        return True
    return any(own.intersect(entry.box) is not None for own in held[name][1])
