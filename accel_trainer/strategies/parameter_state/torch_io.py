"""State of torch modules and torch optimizers, replicated or sharded (DTensor), in and out of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from accel_trainer import logging
from accel_trainer.checkpoint.boxes import Box
from accel_trainer.checkpoint.publication import StagedDirectory
from accel_trainer.checkpoint.run_state import OWN_STATE, encode
from accel_trainer.checkpoint.shards import (
    ShardedTensors,
    is_sharded_again,
    is_sharded_or_replicated,
    local_box,
    local_tensor,
    own_share,
    write_shards,
)
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.model_wrappers import uncompiled_name
from accel_trainer.runtime.process import current_process
from accel_trainer.runtime.tensor_trees import is_tensor
from accel_trainer.runtime.transport import as_sendable_dtype, to_sendable
from accel_trainer.strategies.local_replicas import LocalReplicas
from accel_trainer.strategies.optimizers import parameters_of
from accel_trainer.strategies.parameter_state.base_io import (
    CheckpointIO,
    HeldBoxes,
    PendingTensor,
    Reads,
    current_rank,
    group_options,
    world_size,
)
from accel_trainer.techniques.ema import AveragedWeights
from accel_trainer.tree import map_leaves

logger = logging.get_logger(__name__)

Make = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes the target of a saved tensor of this shape and dtype."""
_COUNTER = "step"
"""Name that torch's optimizers have for the number of updates of a parameter."""


def state_device(parameter: Tensor, options: Mapping[str, Any], key: Any) -> torch.device:
    """Return the device of one tensor of a parameter's optimizer state: the one on which the update reads it."""
    # The parameter's own, but for the counter of steps: that is on the host, where an update reads it without waiting,
    # unless a kernel on the device counts. Such a kernel takes the counter's address as it is: one of the host's memory
    # is an illegal access. Source: `torch.optim.Optimizer.load_state_dict`.
    if key == _COUNTER and not (options.get("capturable") or options.get("fused")):
        return torch.device("cpu")
    return parameter.device


@torch.no_grad()
def state_follows_parameters(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Move the state that an optimizer has of these parameters to where their update reads it."""
    wanted = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry: dict[Any, Any] = optimizer.state.get(parameter, {}) if id(parameter) in wanted else {}
            for key, value in list(entry.items()):
                move = partial(_moved, device=state_device(parameter, group, key))
                entry[key] = map_leaves(move, value, is_leaf=is_tensor)


def _moved(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


@dataclass(frozen=True)
class TensorShards:
    """This rank's shards of the tensors that `ranks` write together; the first of them alone writes `of_first_rank`."""

    _tensors: Mapping[str, Tensor]
    _ranks: Sequence[int]
    _of_first_rank: Collection[str] = ()

    @property
    def num_bytes(self) -> int:
        """Size of the tensors that this rank writes."""
        own = own_share(self._tensors, current_rank(), self._ranks, self._of_first_rank)
        return sum(local_tensor(self._tensors[name]).nbytes for name in own)

    def write(self, staged: StagedDirectory, prefix: str) -> None:
        """Write them. Collective where a DTensor is neither sharded nor replicated, which is gathered first."""
        boxed = dict(self._tensors)
        for name, tensor in self._tensors.items():
            if isinstance(tensor, DTensor) and not is_sharded_or_replicated(tensor):
                boxed[name] = tensor.full_tensor().detach()
        write_shards(staged, prefix, boxed, current_rank(), self._ranks, self._of_first_rank)


class TorchCheckpointIO(CheckpointIO):
    """State of plain modules, DDP's inner module and FSDP2 modules."""

    engine_name = "torch's"

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        replicas: LocalReplicas | None = None,
        averages: AveragedWeights | None = None,
    ) -> None:
        super().__init__(module, bool(optimizers), replicas, averages)
        self.optimizers = tuple(optimizers)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the unsharded tensor, on every rank. Collective for a DTensor."""
        full = tensor.detach()
        return full.full_tensor() if isinstance(full, DTensor) else full

    def boxed_model_state(self) -> dict[str, Tensor] | None:
        """Return parameters and persistent buffers, where each is replicated or sharded by boxes."""
        own = dict(self.model_tensors())
        is_boxed = all(not isinstance(t, DTensor) or is_sharded_or_replicated(t) for t in own.values())
        return own if is_boxed else None

    def fill(self, tensor: Tensor, source: Tensor | None) -> None:
        """Write rank 0's unsharded values into a parameter or buffer. Collective on several ranks."""
        _copy_from_rank_zero(tensor, source)

    def shard_model(self, tensors: Mapping[str, Tensor], ranks: Sequence[int]) -> TensorShards:
        """Return this rank's shards of parameters and buffers."""
        # A batch norm's statistics are each rank's own since its last forward, and rank 0's are those that DDP sends.
        buffers = {name for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)}
        return TensorShards(tensors, ranks, buffers)

    def held_boxes(self) -> tuple[HeldBoxes, HeldBoxes]:
        """Return the boxes of this rank; the state of an optimizer is sharded as its parameters are."""
        held = {name: (tuple(tensor.shape), [local_box(tensor)]) for name, tensor in self.model_tensors()}
        return held, held

    def _named_groups(self) -> list[tuple[dict[str, Any], dict[str, nn.Parameter], Optimizer]]:
        """Return the groups of all optimizers, each with its parameters of this module by name, and its optimizer."""
        # An optimizer of several models has groups without parameters of this one.
        self.require_optimizer()
        names, found = self._own_names(), []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                own = {names[id(p)]: p for p in group["params"] if id(p) in names}
                if own or not group["params"]:
                    found.append((group, own, optimizer))
        return found

    def group_names(self) -> list[list[str]]:
        """Return the names of this module's parameters in each group of the optimizers."""
        return [list(own) for _, own, _ in self._named_groups()]

    def names_by_optimizer(self) -> Sequence[Sequence[Sequence[str | None]]]:
        """Return the names of the parameters in each optimizer's groups; None for those of other models."""
        names, all_groups = self._own_names(), [optimizer.param_groups for optimizer in self.optimizers]
        return [[[names.get(id(p)) for p in group["params"]] for group in groups] for groups in all_groups]

    def _own_names(self) -> dict[int, str]:
        return {id(parameter): uncompiled_name(name) for name, parameter in self.module.named_parameters()}

    def _optimizer_state(self) -> dict[str, Any]:
        """Return the optimizers' state by parameter name, its tensors sharded as they are."""
        state: dict[str, Any] = {}
        groups = []
        seen: set[int] = set()
        for group, own, optimizer in self._named_groups():
            state.update({name: dict(optimizer.state[p]) for name, p in own.items() if optimizer.state.get(p)})
            _require_plain_tensors(optimizer, state)
            # Beside the states of parameters some optimizers keep counters of their own; saved with their first group.
            shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
            beside = {OWN_STATE: shared} if shared and id(optimizer) not in seen else {}
            groups.append({**group_options(group), **beside, "params": list(own)})
            seen.add(id(optimizer))
        return {"state": state, "param_groups": groups}

    def full_optimizer_state(self, keep: bool | None = None) -> dict[str, Any]:
        """Return the optimizers' state by parameter name where `keep` is set."""
        keeps, saved = current_rank() == 0 if keep is None else keep, self._optimizer_state()
        for entry in saved["state"].values():
            for key, value in entry.items():
                if isinstance(value, Tensor):
                    full = self.gather(value)
                    entry[key] = full.to("cpu", copy=True) if keeps else None
        return saved if keeps else {}

    def outline_optimizers(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state with tensors on the meta device in place of its own."""
        meta = torch.device("meta")
        outlined = state["state"].items()
        # Tensors within lists and dicts go along with their values.
        return {"state": {name: {key: _moved(value, meta) for key, value in entry.items()} for name, entry in outlined}}

    def load_optimizers(self, outline: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Load rank 0's full optimizer state. Collective."""
        holders: dict[str, tuple[nn.Parameter, Optimizer, dict[str, Any]]] = {}
        for (group, own, optimizer), saved in zip(self._named_groups(), outline["param_groups"], strict=True):
            group.update(group_options(saved))
            optimizer.state.update(saved.get(OWN_STATE, {}))
            holders.update({name: (parameter, optimizer, group) for name, parameter in own.items()})
        for name, entry in outline["state"].items():
            parameter, optimizer, group = holders[name]
            loaded: dict[str, Any] = {}
            for key, value in entry.items():
                source = state["state"][name][key] if current_rank() == 0 else None
                if isinstance(value, Tensor):
                    loaded[key] = _like_state(parameter, group, {}, key)(tuple(value.shape), value.dtype)
                    _copy_from_rank_zero(loaded[key], source)
                else:
                    loaded[key] = value
            optimizer.state[parameter] = loaded

    def save(self, staged: StagedDirectory, prefix: str, *, weights: bool = True) -> None:
        """Write this rank's shards of model and optimizers."""
        _warn_of_unsaved_entries(self.optimizers)
        super().save(staged, prefix, weights=weights)

    def shard_optimizers(self, ranks: Sequence[int]) -> tuple[TensorShards, Any]:
        """Return this rank's shards of the optimizers' state, and its outline."""
        tensors: dict[str, Tensor] = {}
        outline = encode(self._optimizer_state(), tensors, "optimizer")
        return TensorShards(tensors, ranks), outline

    def plan_optimizers(self, state: Mapping[str, Any], stored: ShardedTensors, reads: Reads, source: Path) -> None:
        """Plan the reads of a state whose tensors are pending."""
        groups = self.match_saved_groups(state, source)

        def build(entries: Mapping[Any, Any], make_for: Callable[[Any], Make]) -> dict[Any, Any]:
            return {key: _build(value, stored, reads, make_for(key)) for key, value in entries.items()}

        for (group, own, optimizer), saved in zip(self._named_groups(), groups, strict=True):
            options = build(group_options(saved), partial(_like_option, group))
            after = {**group, **options}
            reads.add_last(partial(group.update, options))
            shared = build(saved.get(OWN_STATE, {}), partial(_like_option, optimizer.state))
            reads.add_last(partial(optimizer.state.update, shared))
            for name, parameter in own.items():
                like = partial(_like_state, parameter, after, optimizer.state.get(parameter, {}))
                entry = build(state["state"].get(name, {}), like)
                reads.add_last(partial(_set_state, optimizer, parameter, entry))

    def _own_optimizers(self) -> tuple[Optimizer, ...]:
        """Return the optimizers, as torch's own functions want them: of this module alone."""
        self.require_optimizer()
        own = {id(parameter) for parameter in self.module.parameters()}
        for optimizer in self.optimizers:
            if others := sum(id(parameter) not in own for parameter in parameters_of(optimizer)):
                raise ConfigError(
                    f"{others} parameter(s) of {type(optimizer).__name__} are another model's, and torch writes "
                    f"shards of one model's optimizer; save the whole state, or give {type(self.module).__name__} an "
                    "optimizer of its own"
                )
        return self.optimizers

    def save_sharded_optimizer(self, path: Path) -> None:
        """Write the optimizers' state as a torch.distributed.checkpoint directory, each rank its shards. Collective."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        state = get_optimizer_state_dict(self.module, self._own_optimizers())
        dcp.save({"optimizer": state}, storage_writer=dcp.FileSystemWriter(path))


def _warn_of_unsaved_entries(optimizers: Iterable[Optimizer]) -> None:
    """Name the entries that an optimizer adds to its state_dict(): only it knows how they are to be loaded."""
    for optimizer in optimizers:
        if type(optimizer).state_dict is Optimizer.state_dict:
            continue
        more = sorted(map(repr, optimizer.state_dict().keys() - {"state", "param_groups"}))
        if more:
            logger.warning(
                "%s.state_dict() also has %s, which is not saved with the model; to resume with it, keep it in the "
                "optimizer's state or groups, or hand an object that has it to register_for_checkpointing()",
                type(optimizer).__name__,
                ", ".join(more),
            )


def _require_plain_tensors(optimizer: Optimizer, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse state in classes of tensors that only the optimizer can make: it would be loaded as plain values."""
    for name, entry in state.items():
        for key, value in entry.items():
            kind = type(local_tensor(value)) if isinstance(value, Tensor) else Tensor
            if kind not in (Tensor, nn.Parameter):
                raise ConfigError(
                    f"{key!r} of {name} in the state of {type(optimizer).__name__} is a {kind.__name__}, which cannot "
                    "be saved in shards and loaded again; save the weights alone (save_model(), save_only_model=True), "
                    "or train with an optimizer of torch"
                )


@torch.no_grad()
def _copy_from_rank_zero(target: Tensor, source: Tensor | None) -> None:
    """Fill `target`, unsharded or a DTensor, with rank 0's full tensor. Collective on several ranks."""
    if world_size() == 1:
        assert source is not None
        local_tensor(target).copy_(source)  # the only shard
        return
    full = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    if source is not None:
        full.copy_(source)
    # A mesh of some of the ranks, as that of a norm beside layers in parts, has a first rank of its own.
    spans = isinstance(target, DTensor) and target.device_mesh.size() == world_size()
    if isinstance(target, DTensor) and spans and not any(map(is_sharded_again, target.placements)):
        placed = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=0)
        target.to_local().copy_(placed.to_local())
    else:
        wire = to_sendable(full, current_process())
        dist.broadcast(as_sendable_dtype(wire), src=0)
        local_tensor(target).copy_(wire[local_box(target).within(Box.full(target.shape))])


def _set_state(optimizer: Optimizer, parameter: nn.Parameter, entry: dict[str, Any]) -> None:
    if entry:
        optimizer.state[parameter] = entry
    else:  # saved before this parameter's first update
        optimizer.state.pop(parameter, None)


def _build(value: Any, stored: ShardedTensors, reads: Reads, make: Make) -> Any:
    """Return `value` with its pending tensors replaced by targets that `reads` will fill."""

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, PendingTensor):
            return leaf
        target = make(stored.shape(leaf.name), stored.dtype(leaf.name))
        reads.add(stored, leaf.name, target)
        return target.numpy() if leaf.as_array else target

    return map_leaves(replace, value)


def _like_option(before: Mapping[Any, Any], key: Any) -> Make:
    """Make a tensor among a group's options, such as the learning rate, where the optimizer has it now."""
    held = before.get(key)
    device = held.device if isinstance(held, Tensor) else None
    return lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device)


def _can_hold(before: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    if before.is_meta or (tuple(before.shape), before.dtype) != (shape, dtype):
        return False
    return not isinstance(before, DTensor) or is_sharded_or_replicated(before)


def _like_state(parameter: nn.Parameter, options: Mapping[str, Any], before: Mapping[Any, Any], key: Any) -> Make:
    """Make a tensor of a parameter's state where the optimizer would: as it has it now, or like the parameter."""
    device = state_device(parameter, options, key)

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        held = before.get(key)
        # Options that were saved may say that another device counts from now on.
        if isinstance(held, Tensor) and _can_hold(held, shape, dtype) and (key != _COUNTER or held.device == device):
            return held.detach()
        if key != _COUNTER and shape == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        local = torch.empty(shape, dtype=dtype, device=device)
        if key == _COUNTER or not isinstance(parameter, DTensor):
            return local
        everywhere = [Replicate()] * parameter.device_mesh.ndim
        return DTensor.from_local(local, parameter.device_mesh, everywhere, run_check=False)

    return make
