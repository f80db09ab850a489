"""State of a DeepSpeed engine by parameter name, one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_trainer.checkpoint.directory import StagedDirectory, StoredCheckpoint
from accel_trainer.checkpoint.manifest import Manifest
from accel_trainer.checkpoint.tensor_file import LazyTensor
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from accel_trainer.strategies.fitting import describe_names, plan_model_load
from accel_trainer.strategies.whole_state import plan_whole, save_whole, whole_files

__all__ = ["DeepSpeedCheckpointIO", "flat_partitions"]

_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What a dynamic loss scale follows."""


def _agree(plan: Any) -> Any:
    """Return rank 0's plan on every rank, or raise its message of what does not fit. Collective."""
    box = [plan]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], str):
        raise IncompatibleCheckpointError(box[0])
    return box[0]


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the whole shape of a parameter that ZeRO-3 may have partitioned."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _own_part(parameter: Tensor, value: Tensor) -> Tensor:
    """Return this rank's partition of the whole value of a ZeRO-3 parameter, filled up with zeros on the last ranks.

    The engine's own setter of whole values fails where the elements do not divide by the ranks.
    """
    zero_parameter: Any = parameter
    size = zero_parameter.partition_numel()
    begin = size * dist.get_rank(zero_parameter.ds_process_group)
    part = value.flatten()[begin : begin + size]
    return nn.functional.pad(part, (0, size - part.numel()))


def _gathered(tensor: Tensor, modifier_rank: int | None = None) -> AbstractContextManager[Any]:
    """Context in which `tensor` is whole on every rank. Collective for a parameter of ZeRO-3."""
    if not hasattr(tensor, "ds_id"):
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([tensor], modifier_rank=modifier_rank)
    return gathered


def flat_partitions(zero: Any) -> list[Tensor]:
    """Return the flat fp32 partitions of this rank that stand in the engine's optimizer for the parameters."""
    flats: list[Tensor] | None = getattr(zero, "single_partition_of_fp32_groups", None)
    if flats is None:
        flats = getattr(zero, "fp32_partitioned_groups_flat", None)
    return list(zero.fp32_groups_flat_partition) if flats is None else list(flats)


class _Whole:
    """A parameter or buffer that is gathered when it is called; on ranks other than 0 there is nothing to see."""

    def __init__(self, io: DeepSpeedCheckpointIO, tensor: Tensor) -> None:
        self.dtype = torch.float32 if io.keeps_master(tensor) else tensor.dtype
        self.shape = _shape(tensor)
        self._io = io
        self._tensor = tensor

    def __call__(self) -> Tensor:
        full = self._io.whole(self._tensor)
        return torch.empty(self.shape, dtype=self.dtype, device="meta") if full is None else full.view(self.shape)


class DeepSpeedCheckpointIO:
    """Implements `strategies.api.CheckpointIO` for an engine of ZeRO-1, 2 or 3.

    Weights are the fp32 ones that the optimizer keeps, where it keeps any. At any time, a rank holds one whole
    parameter besides its own part; what comes out is collected on rank 0 only.
    """

    def __init__(self, engine: Any, optimizers: Sequence[Optimizer], groups: Sequence[Sequence[str]]) -> None:
        self._engine = engine
        self._module: nn.Module = engine.module
        self._zero = engine.optimizer
        self._optimizers = optimizers
        self._groups = groups

    # --- weights ---------------------------------------------------------------------------------------------------

    def full_model_state(self) -> dict[str, Tensor]:
        """Return all parameters and persistent buffers as CPU tensors on rank 0, `{}` elsewhere. Collective.

        Tied parameters share one tensor, under every name they have.
        """
        state: dict[str, Tensor] = {}
        seen: dict[int, Tensor | None] = {}
        for name, tensor in self._model_tensors():
            if id(tensor) not in seen:
                seen[id(tensor)] = self.whole(tensor)
            full = seen[id(tensor)]
            if full is not None:
                state[name] = full
        return state

    def _model_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((name.replace("_orig_mod.", ""), t) for name, t in self._module.state_dict(keep_vars=True).items())

    def lazy_model_state(self) -> dict[str, LazyTensor]:
        """Return what gathers each tensor when it is called; see `CheckpointIO.lazy_model_state`."""
        lazy: dict[int, LazyTensor] = {}
        return {name: lazy.setdefault(id(tensor), _Whole(self, tensor)) for name, tensor in self._model_tensors()}

    def keeps_master(self, tensor: Tensor) -> bool:
        """Whether the optimizer keeps values of its own for a parameter, from which the model's are copied."""
        return bool(self._optimizers) and tensor.requires_grad

    def whole(self, tensor: Tensor) -> Tensor | None:
        """Return the whole value on the CPU on rank 0, None elsewhere. Collective."""
        from deepspeed.utils import safe_get_full_fp32_param

        if self.keeps_master(tensor):
            full = safe_get_full_fp32_param(tensor)
            return full.detach().to("cpu", copy=True) if dist.get_rank() == 0 else None
        with _gathered(tensor):
            return tensor.detach().to("cpu", copy=True) if dist.get_rank() == 0 else None

    def load_full_model_state(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Load a full state; rank 0's mapping is what counts. Collective.

        Raises:
            IncompatibleCheckpointError: names or shapes differ; every rank raises, and nothing was loaded.
        """
        self.plan_full_model_load(state, strict=strict)()

    def plan_full_model_load(self, state: Mapping[str, Tensor], *, strict: bool = True) -> Callable[[], None]:
        """Check that a full state fits, and return what loads it. Both are collective."""
        own = dict(self._model_tensors())
        plan = _agree(plan_model_load(self._module, own, state, strict, _shape) if dist.get_rank() == 0 else None)

        def load() -> None:
            for name, stored in plan:
                self._set(own[name], state[stored] if dist.get_rank() == 0 else None)

        return load

    @torch.no_grad()
    def _set(self, tensor: Tensor, source: Tensor | None) -> None:
        """Write rank 0's values into a parameter or buffer, and into what the optimizer keeps of it. Collective."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        keeps_master = self.keeps_master(tensor)
        value = torch.empty(
            _shape(tensor), dtype=torch.float32 if keeps_master else tensor.dtype, device=self._engine.device
        )
        if source is not None:
            value.copy_(source)
        dist.broadcast(value, src=0)
        with _gathered(tensor, modifier_rank=0):
            tensor.data.copy_(value)
        if keeps_master and hasattr(tensor, "ds_id"):
            safe_set_local_fp32_param(tensor, _own_part(tensor, value))
        elif keeps_master:
            safe_set_full_fp32_param(tensor, value)

    # --- optimizer -------------------------------------------------------------------------------------------------

    def _optimizer(self) -> Optimizer:
        if not self._optimizers:
            raise ConfigError(
                f"{type(self._module).__name__} has no optimizer to save or load; pass one to prepare() with the model"
            )
        return self._optimizers[0]

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that have optimizer state, by name."""
        return {name.replace("_orig_mod.", ""): p for name, p in self._module.named_parameters() if p.requires_grad}

    def _flat_of(self, parameter: nn.Parameter) -> Tensor:
        """Return the partition whose optimizer state covers `parameter`."""
        if hasattr(parameter, "ds_id"):
            return flat_partitions(self._zero)[self._zero.grad_position[self._zero.get_param_id(parameter)][0]]
        for flat, group in zip(flat_partitions(self._zero), self._lp_groups(), strict=True):
            if any(parameter is own for own in group):
                return flat
        raise AssertionError("a trained parameter is in no group of the engine")

    def _lp_groups(self) -> list[list[nn.Parameter]]:
        groups = getattr(self._zero, "bit16_groups", None)
        return list(self._zero.bf16_groups) if groups is None else list(groups)

    def full_optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state keyed by parameter name on rank 0, `{}` elsewhere. Collective."""
        from deepspeed.utils import safe_get_full_optimizer_state

        optimizer, keep = self._optimizer(), dist.get_rank() == 0
        self._link_state()
        state: dict[str, Any] = {}
        for name, parameter in self._trained().items():
            flat = self._flat_of(parameter)
            entry: dict[str, Any] = {}
            for key, value in optimizer.state.get(flat, {}).items():
                if isinstance(value, Tensor) and value.shape == flat.shape:
                    full = safe_get_full_optimizer_state(parameter, key)
                    entry[key] = full.detach().to("cpu", copy=True).view(_shape(parameter)) if keep else None
                else:
                    entry[key] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
            if entry and keep:
                state[name] = entry
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": list(names)}
            for group, names in zip(optimizer.param_groups, self._groups, strict=True)
        ]
        scale = {name: getattr(self._scaler, name) for name in _SCALE if hasattr(self._scaler, name)}
        return {"state": state, "param_groups": groups, "loss_scale": scale} if keep else {}

    @property
    def _scaler(self) -> Any:
        """What follows the fp16 loss scale in the engine; without it, there is nothing to follow."""
        scaler = getattr(self._zero, "loss_scaler", None)
        return scaler if getattr(scaler, "dynamic", False) else None

    def load_full_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Load a full optimizer state; rank 0's mapping is what counts. Collective.

        Raises:
            IncompatibleCheckpointError: it was saved for other parameters or groups; every rank raises.
        """
        self.plan_full_optimizer_load(state)()

    def plan_full_optimizer_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check that a full optimizer state fits, and return what loads it. Both are collective."""
        self._optimizer()
        outline = _agree(self._outline(state) if dist.get_rank() == 0 else None)
        return partial(self._set_optimizer, state, outline)

    def _set_optimizer(self, state: Mapping[str, Any], outline: Mapping[str, Any]) -> None:
        optimizer = self._optimizer()
        for group, stored in zip(optimizer.param_groups, outline["param_groups"], strict=True):
            group.update({key: value for key, value in stored.items() if key != "params"})
        for name, value in outline["loss_scale"].items():
            if hasattr(self._scaler, name):
                setattr(self._scaler, name, value)
        parameters = self._trained()
        self._init_state({name: entry for name, entry in outline["state"].items() if name in parameters})
        for name, entry in outline["state"].items():
            if name in parameters:
                source = state["state"][name] if dist.get_rank() == 0 else {}
                self._set_state(parameters[name], entry, source)

    def _outline(self, state: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return rank 0's state with the shape in place of each tensor, or the message of what does not fit."""
        stored = [list(group["params"]) for group in state.get("param_groups", [])]
        own = [list(names) for names in self._groups]
        if stored != own:
            stored_names, own_names = {n for group in stored for n in group}, {n for group in own for n in group}
            differences = [
                f"{said}: {describe_names(sorted(names))}"
                for said, names in (
                    ("missing in the state", own_names - stored_names),
                    ("not in this optimizer", stored_names - own_names),
                )
                if names
            ]
            return (
                f"the optimizer state was saved for {len(stored)} group(s) of {len(stored_names)} parameter(s), and "
                f"this optimizer has {len(own)} group(s) of {len(own_names)}; "
                f"{'; '.join(differences) or 'they are the same, in other groups or another order'}. "
                "Build the optimizer that was saved"
            )
        entries = {
            name: {
                key: torch.Size(value.shape) if isinstance(value, Tensor) and value.ndim else value
                for key, value in entry.items()
            }
            for name, entry in state["state"].items()
        }
        return {"state": entries, "param_groups": state["param_groups"], "loss_scale": state.get("loss_scale", {})}

    def _init_state(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Make room for the stored state in the optimizer, which has none before its first step."""
        optimizer, parameters = self._optimizer(), self._trained()
        for name, entry in entries.items():
            flat = self._flat_of(parameters[name])
            own = optimizer.state[flat]
            for key, value in entry.items():
                if not isinstance(value, torch.Size):
                    own[key] = value.clone() if isinstance(value, Tensor) else value
                elif key not in own:
                    own[key] = torch.zeros_like(flat)
        self._link_state()

    def _link_state(self) -> None:
        """Connect the parameters of ZeRO-1 and 2 with their part of the optimizer's state.

        The engine does so after its first step of the first group, when the other groups have no state yet.
        """
        if hasattr(self._zero, "_hp_optimizer_states_linked"):
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _set_state(self, parameter: nn.Parameter, entry: Mapping[str, Any], source: Mapping[str, Any]) -> None:
        """Write rank 0's tensors into the state of a parameter. Collective."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        for key, shape in entry.items():
            if isinstance(shape, torch.Size):
                value = torch.empty(shape, dtype=torch.float32, device=self._engine.device)
                if key in source:
                    value.copy_(source[key])
                dist.broadcast(value, src=0)
                if hasattr(parameter, "ds_id"):
                    safe_set_local_optimizer_state(parameter, _own_part(parameter, value), key)
                else:
                    safe_set_full_optimizer_state(parameter, value, key)

    # --- whole checkpoints -----------------------------------------------------------------------------------------

    def save(self, staged: StagedDirectory, prefix: str, *, weights: bool = True) -> None:
        """Write model and optimizer by parameter name, gathered on rank 0; see `CheckpointIO.save`."""
        save_whole(self, staged, prefix, dist.get_rank(), weights=weights, optimizer=bool(self._optimizers))

    def load(self, stored: StoredCheckpoint, prefix: str, *, weights: bool = True) -> None:
        """Read what an engine or a native unit wrote; see `CheckpointIO.load`."""
        self.plan_load(stored, prefix, weights=weights)()

    def plan_load(self, stored: StoredCheckpoint, prefix: str, *, weights: bool = True) -> Callable[[], None]:
        """Check what `load` would read, and return what loads it; see `CheckpointIO.plan_load`."""
        return plan_whole(self, stored, prefix, dist.get_rank(), weights=weights, optimizer=bool(self._optimizers))

    def files(self, manifest: Manifest, prefix: str) -> list[str]:
        """Return the files that rank 0 reads; see `CheckpointIO.files`."""
        return whole_files(manifest, prefix, dist.get_rank())

    def save_sharded_optimizer(self, path: Path) -> None:
        """Refuse: torch.distributed.checkpoint does not know the engine's partitions.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "the state of a DeepSpeed engine cannot be written as a torch.distributed.checkpoint directory; save it in "
            "the engine's own format, or as a full state"
        )

    def load_sharded_optimizer(self, path: Path) -> None:
        """Refuse, as `save_sharded_optimizer` does.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{path} is a torch.distributed.checkpoint directory, which a DeepSpeed engine cannot read; load it with "
            "strategy 'fsdp2', and save a full state there"
        )
