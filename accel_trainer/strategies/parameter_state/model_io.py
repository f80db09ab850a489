"""State of torch modules and torch optimizers by parameter name, sharded (DTensor) or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from accel_trainer.checkpoint.commit.staging import StagedDirectory
from accel_trainer.checkpoint.format.json_codec import OWN_STATE
from accel_trainer.checkpoint.format.manifest import Manifest
from accel_trainer.checkpoint.format.safetensors_file import LazyTensor
from accel_trainer.checkpoint.reader import StoredCheckpoint
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from accel_trainer.runtime.torch_private import ORIGINAL_MODULE
from accel_trainer.strategies.parameter_state.matching import EXTRA_STATE, describe_names, plan_model_load
from accel_trainer.strategies.parameter_state.sharded_io import (
    load_dcp_optimizer,
    plan_unit_load,
    save_unit,
    unit_bytes,
    unit_files,
)

__all__ = ["TorchCheckpointIO", "options_of", "outline_optimizer", "own_states"]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _to_full_cpu(tensor: Tensor, keep: bool) -> Tensor | None:
    """Return the whole tensor on the CPU where `keep`, else None. Collective for a DTensor."""
    full = tensor.detach()
    if isinstance(full, DTensor):
        full = full.full_tensor()
    return full.to("cpu", copy=True) if keep else None


def _broadcast_object(value: Any) -> Any:
    """Return rank 0's value on every rank. Collective."""
    if _world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _copy_from_rank_zero(target: Tensor, source: Tensor | None) -> None:
    """Fill `target`, whole or a shard, with the full tensor that rank 0 passes. Collective on several ranks."""
    with torch.no_grad():
        if _world_size() == 1:
            assert source is not None
            target.copy_(source)
            return
        device = target.device
        full = torch.empty(target.shape, dtype=target.dtype, device=device)
        if source is not None:
            full.copy_(source)
        if isinstance(target, DTensor):
            placed = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=0)
            target.to_local().copy_(placed.to_local())
        else:
            dist.broadcast(full, src=0)
            target.copy_(full)


def _own_name(name: str) -> str:
    """Return the name that the user's own module has: torch.compile(module) puts its wrapper's name in between."""
    return name.replace(f"{ORIGINAL_MODULE}.", "")


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an optimizer's group, or of a saved one."""
    return {key: value for key, value in group.items() if key not in ("params", OWN_STATE)}


def own_states(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """Return what is saved beside each group, given by its optimizer: counters and the like of all its parameters."""
    found: list[dict[str, Any]] = []
    for index, optimizer in enumerate(optimizers):
        own = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
        found.append({OWN_STATE: own} if own and optimizer not in optimizers[:index] else {})
    return found


class _Whole:
    """A tensor that is gathered when it is called."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        self._tensor = tensor

    def __call__(self) -> Tensor:
        tensor: Tensor = self._tensor.detach()
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class TorchCheckpointIO:
    """Implements `strategies.api.CheckpointIO` for plain modules, DDP's inner module and FSDP2 modules."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        self.module = module
        self.optimizers = tuple(optimizers)

    def full_model_state(self) -> dict[str, Tensor]:
        """Return all parameters and persistent buffers as CPU tensors on rank 0, `{}` elsewhere. Collective.

        Tied parameters share one tensor, under every name they have.
        """
        keep = _rank() == 0
        state: dict[str, Tensor] = {}
        gathered: dict[int, Tensor | None] = {}
        for name, tensor in self.model_tensors():
            if id(tensor) not in gathered:
                gathered[id(tensor)] = _to_full_cpu(tensor, keep)
            full = gathered[id(tensor)]
            if full is not None:
                state[name] = full
        return state

    def model_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and persistent buffers as they are laid out, tied ones under every name they have."""
        for name, value in self.module.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                raise ConfigError(
                    f"{name} of {type(self.module).__name__} is a {type(value).__name__}, and a model's state holds "
                    "tensors; return one from get_extra_state(): torch.frombuffer(bytearray(data), dtype=torch.uint8)"
                )
            yield _own_name(name), value

    def lazy_model_state(self) -> dict[str, LazyTensor]:
        """Return what gathers each tensor when it is called; see `CheckpointIO.lazy_model_state`."""
        lazy: dict[int, LazyTensor] = {}
        state = {}
        for name, tensor in self.model_tensors():
            state[name] = lazy.setdefault(id(tensor), _Whole(tensor))
        return state

    def with_extra_state(self) -> dict[str, nn.Module]:
        """Return the modules that keep a state of their own making, by its name."""
        return {
            _own_name(f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE): module
            for prefix, module in self.module.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def load_full_model_state(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Load a full state; rank 0's mapping is what counts. Collective.

        A tied parameter may be stored under one of its names only.

        Raises:
            IncompatibleCheckpointError: names or shapes differ; every rank raises, and nothing was loaded.
        """
        self.plan_full_model_load(state, strict=strict)()

    def plan_full_model_load(self, state: Mapping[str, Tensor], *, strict: bool = True) -> Callable[[], None]:
        """Check a full state, and return what loads it; see `CheckpointIO.plan_full_model_load`."""
        own = dict(self.model_tensors())
        plan = _broadcast_object(plan_model_load(self.module, own, state, strict) if _rank() == 0 else None)
        if isinstance(plan, str):
            raise IncompatibleCheckpointError(plan)
        extra = self.with_extra_state()

        def load() -> None:
            for name, stored_name in plan:
                source = state[stored_name] if _rank() == 0 else None
                if name in extra:
                    extra[name].set_extra_state(_broadcast_object(source))
                else:
                    _copy_from_rank_zero(own[name], source)

        return load

    def _require_optimizer(self) -> None:
        if not self.optimizers:
            raise ConfigError(f"{type(self.module).__name__} has no optimizer to save or load; pass one to prepare()")

    def named_groups(self) -> list[tuple[dict[str, Any], dict[str, nn.Parameter], Optimizer]]:
        """Return the groups of all optimizers: each with its parameters of this module by name, and its optimizer.

        An optimizer of several models has groups that are not of this one.
        """
        self._require_optimizer()
        names = {id(parameter): _own_name(name) for name, parameter in self.module.named_parameters()}
        found = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                own = {names[id(p)]: p for p in group["params"] if id(p) in names}
                if own or not group["params"]:
                    found.append((group, own, optimizer))
        return found

    def full_optimizer_state(self) -> dict[str, Any]:
        """Return the optimizers' state keyed by parameter name on rank 0, `{}` elsewhere. Collective."""
        keep, groups = _rank() == 0, self.named_groups()
        state: dict[str, Any] = {}
        for _, own, optimizer in groups:
            for name, parameter in own.items():
                entry = {
                    key: _to_full_cpu(value, keep) if isinstance(value, Tensor) else value
                    for key, value in optimizer.state.get(parameter, {}).items()
                }
                if entry:
                    state[name] = entry
        beside = own_states([optimizer for *_, optimizer in groups])
        outlines = [
            {**options_of(group), **more, "params": list(own)}
            for (group, own, _), more in zip(groups, beside, strict=True)
        ]
        return {"state": state, "param_groups": outlines} if keep else {}

    def load_full_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Load a full optimizer state; rank 0's mapping is what counts. Collective.

        Groups are found by their parameters: in which optimizer they are, and in what order, may have changed.

        Raises:
            IncompatibleCheckpointError: it was saved for other parameters or groups; every rank raises.
        """
        self.plan_full_optimizer_load(state)()

    def plan_full_optimizer_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a full optimizer state, and return what loads it; see `CheckpointIO.plan_full_optimizer_load`."""
        groups = self.named_groups()
        own_groups = [list(own) for _, own, _ in groups]
        outline = _broadcast_object(outline_optimizer(state, own_groups) if _rank() == 0 else None)
        if isinstance(outline, str):
            raise IncompatibleCheckpointError(outline)

        def load() -> None:
            holders: dict[str, tuple[nn.Parameter, Optimizer]] = {}
            for (group, own, optimizer), stored in zip(groups, outline["param_groups"], strict=True):
                group.update(options_of(stored))
                optimizer.state.update(stored.get(OWN_STATE, {}))
                holders.update({name: (parameter, optimizer) for name, parameter in own.items()})
            for name, entry in outline["state"].items():
                parameter, optimizer = holders[name]
                loaded: dict[str, Any] = {}
                for key, value in entry.items():
                    source = state["state"][name][key] if _rank() == 0 and isinstance(value, _TensorOutline) else None
                    loaded[key] = value.build(parameter, source) if isinstance(value, _TensorOutline) else value
                optimizer.state[parameter] = loaded

        return load

    def _own_optimizers(self) -> tuple[Optimizer, ...]:
        """Return the optimizers, as torch's own functions want them: of this module alone.

        Raises:
            ConfigError: there is none, or one of several models.
        """
        self._require_optimizer()
        own = {id(parameter) for parameter in self.module.parameters()}
        for optimizer in self.optimizers:
            foreign = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
            if foreign:
                raise ConfigError(
                    f"{foreign} parameter(s) of {type(optimizer).__name__} are another model's, and torch writes "
                    f"shards of one model's optimizer; save the whole state, or give {type(self.module).__name__} an "
                    "optimizer of its own"
                )
        return self.optimizers

    def save(self, staged: StagedDirectory, prefix: str, *, weights: bool = True) -> None:
        """Write this rank's part of model and optimizers; see `CheckpointIO.save`."""
        save_unit(self, staged, prefix, _rank(), weights=weights)

    def load(self, stored: StoredCheckpoint, prefix: str, *, weights: bool = True) -> None:
        """Read this rank's part of what any number of ranks wrote; see `CheckpointIO.load`."""
        self.plan_load(stored, prefix, weights=weights)()

    def plan_load(self, stored: StoredCheckpoint, prefix: str, *, weights: bool = True) -> Callable[[], None]:
        """Check what `load` would read, and return what reads it; see `CheckpointIO.plan_load`."""
        return plan_unit_load(self, stored, prefix, weights=weights)

    def files(self, manifest: Manifest, prefix: str) -> set[str]:
        """Return the files that hold something of this rank's parts; see `CheckpointIO.files`."""
        return unit_files(self, manifest, prefix)

    def load_engine_files(self, directory: Path) -> None:
        """Refuse: there is no engine with a format of its own.

        Raises:
            IncompatibleCheckpointError: always.
        """
        raise IncompatibleCheckpointError(
            f"{directory} holds files of an engine, and {type(self.module).__name__} is in none; load the directory "
            "with the strategy that wrote it"
        )

    def local_bytes(self) -> int:
        """Return the size of this rank's part; see `CheckpointIO.local_bytes`."""
        return unit_bytes(self)

    def save_sharded_optimizer(self, path: Path) -> None:
        """Write the optimizer's state as a torch.distributed.checkpoint directory, each rank its part. Collective."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        state = get_optimizer_state_dict(self.module, self._own_optimizers())
        dcp.save({"optimizer": state}, storage_writer=dcp.FileSystemWriter(path))

    def load_sharded_optimizer(self, path: Path) -> None:
        """Read a torch.distributed.checkpoint directory written by any number of ranks. Collective."""
        self._require_optimizer()
        load_dcp_optimizer(self, path)


class _TensorOutline:
    """Shape and dtype of a tensor that rank 0 holds, sent ahead of its values."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype

    def build(self, parameter: Tensor, source: Tensor | None) -> Tensor:
        """Return the tensor, laid out like `parameter` when it has its shape. Collective on several ranks."""
        like_parameter = self.shape == tuple(parameter.shape)
        if like_parameter:
            target = torch.empty_like(parameter, dtype=self.dtype, requires_grad=False)
        else:
            # Adam's step counter stays on the CPU unless the optimizer is capturable or fused on the device.
            target = torch.empty(self.shape, dtype=self.dtype, device=self._device(parameter))
        _copy_from_rank_zero(target, source)
        return target

    def _device(self, parameter: Tensor) -> torch.device:
        on_group = dist.is_initialized() and "cpu" not in dist.get_backend_config()
        return parameter.device if on_group else torch.device("cpu")


def outline_optimizer(state: Mapping[str, Any], own_groups: list[list[str]]) -> dict[str, Any] | str:
    """Return rank 0's optimizer state with tensors replaced by outlines, or the message of what does not fit.

    The groups come in the order of `own_groups`.
    """
    stored_groups = [list(group["params"]) for group in state.get("param_groups", [])]
    if sorted(stored_groups) != sorted(own_groups):
        stored_names = {name for group in stored_groups for name in group}
        own_names = {name for group in own_groups for name in group}
        missing, unexpected = sorted(own_names - stored_names), sorted(stored_names - own_names)
        differences = [f"missing in the state: {describe_names(missing)}"] if missing else []
        differences += [f"not in this optimizer: {describe_names(unexpected)}"] if unexpected else []
        return (
            f"the optimizer state was saved for {len(stored_groups)} group(s) of {len(stored_names)} parameter(s), and "
            f"this optimizer has {len(own_groups)} group(s) of {len(own_names)}; "
            f"{'; '.join(differences) or 'they are the same, in other groups or another order'}. "
            "Build the optimizer that was saved"
        )
    outlined = {
        name: {key: _TensorOutline(value) if isinstance(value, Tensor) else value for key, value in entry.items()}
        for name, entry in state["state"].items()
    }
    ordered, remaining = [], list(state["param_groups"])
    for names in own_groups:
        index = next(i for i, group in enumerate(remaining) if list(group["params"]) == names)
        ordered.append(remaining.pop(index))
    return {"state": outlined, "param_groups": ordered}
