"""A unit's state in parts: written by any number of ranks under any native strategy, read by any other.

    PREFIX.json                            engine, tied names, the optimizers' state with tensors by name
    PREFIX.model.RRRRR.safetensors         rank R's parts of parameters and persistent buffers
    PREFIX.optimizer.RRRRR.safetensors     rank R's parts of the tensors in the optimizers' state

Everything is keyed by parameter name, and each rank reads only the parts that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from accel_trainer import logging
from accel_trainer.checkpoint.commit.staging import StagedDirectory
from accel_trainer.checkpoint.format.boxes import Box
from accel_trainer.checkpoint.format.json_codec import OWN_STATE, encode
from accel_trainer.checkpoint.format.manifest import Manifest
from accel_trainer.checkpoint.format.placement import is_sharded_or_replicated, local_box, local_tensor
from accel_trainer.checkpoint.interop.dcp import DcpDirectory
from accel_trainer.checkpoint.reader import StoredCheckpoint
from accel_trainer.checkpoint.shards import StoredShards, write_shards
from accel_trainer.errors import IncompatibleCheckpointError
from accel_trainer.runtime.shared_errors import raise_together
from accel_trainer.strategies.parameter_state.stored_unit import (
    ENGINE,
    Pending,
    decode_optimizer,
    files_with,
    fit_model,
    read_outline,
)

if TYPE_CHECKING:
    from accel_trainer.strategies.parameter_state.model_io import TorchCheckpointIO

__all__ = ["bytes_to_write", "load_dcp_optimizer", "plan_unit_load", "save_unit", "unit_bytes", "unit_files"]

logger = logging.get_logger(__name__)


def _writable(tensor: Tensor) -> Tensor:
    """Return a tensor whose parts have places; one that is laid out in another way is made whole. Collective then."""
    if isinstance(tensor, DTensor) and not is_sharded_or_replicated(tensor):
        full: Tensor = tensor.full_tensor().detach()
        return full
    return tensor


def bytes_to_write(tensors: Iterable[Tensor]) -> int:
    """Return the size of this rank's shards; a tensor or shard that several ranks hold counts on the first of them."""
    return sum(local_tensor(tensor).nbytes for tensor in tensors if _holds_first(tensor))


def _holds_first(tensor: Tensor) -> bool:
    if not isinstance(tensor, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return not any(
        index for index, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()
    )


def unit_bytes(io: TorchCheckpointIO) -> int:
    """Return the size of what `save_unit` writes; see `CheckpointIO.local_bytes`."""
    held: dict[str, Tensor] = {}
    if io.optimizers:
        encode(_optimizer_state(io), held, "optimizer")
    model = {id(tensor): tensor for _, tensor in io.model_tensors()}
    return bytes_to_write([*model.values(), *held.values()])


def save_unit(io: TorchCheckpointIO, staged: StagedDirectory, prefix: str, rank: int, *, weights: bool = True) -> None:
    """Write what this rank holds of a module and its optimizers; see `CheckpointIO.save`."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[int, str] = {}
    for name, tensor in io.model_tensors() if weights else ():
        first = names.setdefault(id(tensor), name)
        if first == name:
            tensors[name] = tensor
        else:
            tied[name] = first
    write_shards(staged, f"{prefix}.model", {name: _writable(t) for name, t in tensors.items()}, rank)
    outline = None
    if io.optimizers:
        _warn_of_what_is_left_out(io.optimizers)
        held: dict[str, Tensor] = {}
        outline = encode(_optimizer_state(io), held, "optimizer")
        write_shards(staged, f"{prefix}.optimizer", {name: _writable(t) for name, t in held.items()}, rank)
    if staged.commits:
        staged.write_json(f"{prefix}.json", {"engine": ENGINE, "tied": tied, "optimizer": outline})


def _warn_of_what_is_left_out(optimizers: Iterable[Optimizer]) -> None:
    """Name what an optimizer adds to its state_dict(): only it knows how that is to be loaded."""
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


def _optimizer_state(io: TorchCheckpointIO) -> dict[str, Any]:
    """Return the optimizers' state by parameter name, its tensors as they are laid out."""
    from accel_trainer.strategies.parameter_state.model_io import options_of, own_states

    state, groups, named = {}, [], io.named_groups()
    beside = own_states([optimizer for *_, optimizer in named])
    for (group, own, optimizer), more in zip(named, beside, strict=True):
        state.update({name: dict(optimizer.state[p]) for name, p in own.items() if optimizer.state.get(p)})
        groups.append({**options_of(group), **more, "params": list(own)})
    return {"state": state, "param_groups": groups}


class Parts(Protocol):
    """Stored tensors that can be read in part."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a tensor was saved in."""

    def files_for(self, name: str, box: Box) -> set[str]:
        """Return the files to verify before a part is read."""

    def read(self, name: str, target: Tensor) -> None:
        """Fill a target with what this rank holds of it."""


class _Reads:
    """What this rank is going to read: targets are made first, then files are verified, then targets are filled."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._waiting: list[Callable[[], None]] = []

    def add(self, parts: Parts, name: str, target: Tensor, then: Callable[[], Any] | None = None) -> None:
        self.files |= parts.files_for(name, local_box(target))

        def read() -> None:
            parts.read(name, target)
            if then is not None:
                then()

        self._waiting.append(read)

    def run(self) -> None:
        with torch.no_grad():
            for read in self._waiting:
                read()


def plan_unit_load(
    io: TorchCheckpointIO, stored: StoredCheckpoint, prefix: str, *, weights: bool = True
) -> Callable[[], None]:
    """Check what `save_unit` wrote, and return what loads it; see `CheckpointIO.plan_load`."""
    reads = _Reads()
    finish: Callable[[], None] | None = None
    with raise_together(stored.process, f"load of {stored.path}"):
        outline = read_outline(stored, prefix, io.module, "torch's")
        if weights:
            _plan_model(io, stored, prefix, outline["tied"], reads)
        if io.optimizers:
            finish = _plan_optimizer(io, stored, prefix, outline["optimizer"], reads)
    stored.verify_together(reads.files)

    def load() -> None:
        with raise_together(stored.process, f"load of {stored.path}"):
            reads.run()
            if finish is not None:
                finish()

    return load


def unit_files(io: TorchCheckpointIO, manifest: Manifest, prefix: str) -> set[str]:
    """Return the files of a unit that hold something of what this rank holds; see `CheckpointIO.files`."""
    held = {name: (tuple(tensor.shape), [local_box(tensor)]) for name, tensor in io.model_tensors()}
    return files_with(manifest, prefix, held, held)


def _plan_model(
    io: TorchCheckpointIO, stored: StoredCheckpoint, prefix: str, tied: Mapping[str, str], reads: _Reads
) -> None:
    parts = StoredShards(stored, f"{prefix}.model")
    own, extra = dict(io.model_tensors()), io.with_extra_state()
    for name, stored_name in fit_model(stored, parts, tied, io.module, own):
        if name in extra:
            state = torch.empty(parts.shape(stored_name), dtype=parts.dtype(stored_name))
            reads.add(parts, stored_name, state, partial(extra[name].set_extra_state, state))
        else:
            reads.add(parts, stored_name, own[name])


def _plan_optimizer(
    io: TorchCheckpointIO, stored: StoredCheckpoint, prefix: str, outline: Any, reads: _Reads
) -> Callable[[], None]:
    """Make the targets of the optimizers' state, and return what puts them in place once they are filled."""
    parts = StoredShards(stored, f"{prefix}.optimizer")
    return _plan_groups(io, decode_optimizer(stored, outline, parts, io.module), parts, reads, stored.path)


def _plan_groups(
    io: TorchCheckpointIO, state: Mapping[str, Any], parts: Parts, reads: _Reads, source: Path
) -> Callable[[], None]:
    from accel_trainer.strategies.parameter_state.model_io import options_of, outline_optimizer

    groups = io.named_groups()
    plan = outline_optimizer(state, [list(own) for _, own, _ in groups])
    if isinstance(plan, str):
        raise IncompatibleCheckpointError(f"{source.absolute()}: {plan}")
    finishing: list[Callable[[], Any]] = []
    for (group, own, optimizer), saved in zip(groups, plan["param_groups"], strict=True):
        options = {
            key: _build(value, parts, reads, _like_option(group.get(key))) for key, value in options_of(saved).items()
        }
        finishing.append(partial(group.update, options))
        own_state = {
            key: _build(value, parts, reads, _like_option(optimizer.state.get(key)))
            for key, value in saved.get(OWN_STATE, {}).items()
        }
        finishing.append(partial(optimizer.state.update, own_state))
        for name, parameter in own.items():
            before = optimizer.state.get(parameter, {})
            entry = {
                key: _build(value, parts, reads, _like_state(key, parameter, group, before.get(key)))
                for key, value in plan["state"].get(name, {}).items()
            }
            finishing.append(partial(_set_state, optimizer, parameter, entry))

    def finish() -> None:
        for put in finishing:
            put()

    return finish


class _DcpParts:
    """The tensors of a torch.distributed.checkpoint directory."""

    def __init__(self, stored: DcpDirectory) -> None:
        self._stored = stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._stored.tensors[name].dtype

    def files_for(self, name: str, box: Box) -> set[str]:
        return set()

    def read(self, name: str, target: Tensor) -> None:
        self._stored.read_into(name, target)


def load_dcp_optimizer(io: TorchCheckpointIO, directory: Path) -> None:
    """Load the optimizers' state under `optimizer` of a torch.distributed.checkpoint directory, each rank its part.

    Raises:
        IncompatibleCheckpointError: it was saved for other parameters or groups; nothing was loaded.
    """
    stored = DcpDirectory(directory)
    reads = _Reads()
    state = {"state": {}, "param_groups": [], **stored.nested("optimizer", Pending)}
    finish = _plan_groups(io, state, _DcpParts(stored), reads, directory)
    reads.run()
    finish()


def _set_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, entry: dict[str, Any]) -> None:
    if entry:
        optimizer.state[parameter] = entry
    else:  # saved before this parameter's first update
        optimizer.state.pop(parameter, None)


Make = Callable[[tuple[int, ...], torch.dtype], Tensor]


def _build(value: Any, parts: Parts, reads: _Reads, make: Make) -> Any:
    """Return `value` with its pending tensors replaced by ones that `reads` will fill."""
    if isinstance(value, Pending):
        target = make(parts.shape(value.name), parts.dtype(value.name))
        reads.add(parts, value.name, target)
        return target.numpy() if value.as_array else target
    if isinstance(value, Mapping):
        return {key: _build(item, parts, reads, make) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_build(item, parts, reads, make) for item in value)
    return value


def _like_option(before: Any) -> Make:
    """Make a tensor among a group's options, such as the learning rate, where the optimizer has it now."""
    return lambda shape, dtype: torch.empty(
        shape, dtype=dtype, device=before.device if isinstance(before, Tensor) else None
    )


def _can_hold(before: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    if not isinstance(before, Tensor) or before.is_meta or (tuple(before.shape), before.dtype) != (shape, dtype):
        return False
    return is_sharded_or_replicated(before) if isinstance(before, DTensor) else True


def _like_state(key: Any, parameter: nn.Parameter, group: Mapping[str, Any], before: Any) -> Make:
    """Make a tensor of a parameter's state where the optimizer would: laid out as before, or like the parameter."""

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if _can_hold(before, shape, dtype):
            return before.detach()
        if key == "step":
            # As torch.optim.Optimizer.load_state_dict: on the host, unless a kernel on the device counts.
            on_device = group.get("capturable") or group.get("fused")
            return torch.empty(shape, dtype=dtype, device=parameter.device if on_device else "cpu")
        if shape == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        local = torch.empty(shape, dtype=dtype, device=parameter.device)
        if not isinstance(parameter, DTensor):
            return local
        everywhere = [Replicate()] * parameter.device_mesh.ndim
        return DTensor.from_local(local, parameter.device_mesh, everywhere, run_check=False)

    return make
