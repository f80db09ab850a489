"""State of a DeepSpeed engine by parameter name: whole on rank 0, or each rank's own part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_trainer.checkpoint.commit.staging import StagedDirectory
from accel_trainer.checkpoint.format.manifest import Manifest
from accel_trainer.checkpoint.format.safetensors_file import LazyTensor
from accel_trainer.checkpoint.reader import StoredCheckpoint
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError
from accel_trainer.integrations.deepspeed.loading import part_files, plan_parts_load
from accel_trainer.integrations.deepspeed.partitions import (
    Partitions,
    Run,
    flat_partitions,
    opened_partition,
    whole_shape,
)
from accel_trainer.integrations.deepspeed.state_shards import part_bytes, save_parts
from accel_trainer.strategies.parameter_state.matching import plan_model_load
from accel_trainer.strategies.parameter_state.model_io import TorchCheckpointIO, options_of, outline_optimizer

__all__ = ["DeepSpeedCheckpointIO"]

_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What a dynamic loss scale follows."""


def _agree(plan: Any) -> Any:
    """Return rank 0's plan on every rank, or raise its message of what does not fit. Collective."""
    box = [plan]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], str):
        raise IncompatibleCheckpointError(box[0])
    return box[0]


def _gathered(tensor: Tensor) -> AbstractContextManager[Any]:
    """Context in which `tensor` is whole on every rank. Collective for a parameter of ZeRO-3."""
    if not hasattr(tensor, "ds_id"):
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([tensor])
    return gathered


class _Whole:
    """A parameter or buffer that is gathered when it is called; on ranks other than 0 there is nothing to see."""

    def __init__(self, io: DeepSpeedCheckpointIO, tensor: Tensor) -> None:
        self.dtype = tensor.dtype if io.partitions.trained(tensor) is None else io.master_dtype
        self.shape = whole_shape(tensor)
        self._io = io
        self._tensor = tensor

    def __call__(self) -> Tensor:
        full = self._io.whole(self._tensor)
        return torch.empty(self.shape, dtype=self.dtype, device="meta") if full is None else full.view(self.shape)


class DeepSpeedCheckpointIO:
    """Implements `strategies.api.CheckpointIO` for an engine of ZeRO-1, 2 or 3.

    Weights are the fp32 ones that the optimizer keeps, where it keeps any. `save` and `load` take each rank's own part.
    What is named "full" is collected on rank 0, one parameter at a time.
    """

    def __init__(self, engine: Any, optimizers: Sequence[Optimizer], groups: Sequence[Sequence[str]]) -> None:
        self.module: nn.Module = engine.module
        self.groups = groups
        """Names of the parameters of each group of the optimizer."""
        self.has_optimizer = bool(optimizers)
        self._engine = engine
        self._zero = engine.optimizer

    @cached_property
    def partitions(self) -> Partitions:
        """Where this rank keeps what."""
        return Partitions(self._zero)

    @property
    def master_dtype(self) -> torch.dtype:
        """Type of the values that the optimizer keeps of trained parameters."""
        return flat_partitions(self._zero)[0].dtype

    # --- weights ---------------------------------------------------------------------------------------------------

    def full_model_state(self) -> dict[str, Tensor]:
        """Return all parameters and persistent buffers as CPU tensors on rank 0, `{}` elsewhere. Collective.

        Tied parameters share one tensor, under every name they have.
        """
        state: dict[str, Tensor] = {}
        seen: dict[int, Tensor | None] = {}
        for name, tensor in self.model_tensors():
            if id(tensor) not in seen:
                seen[id(tensor)] = self.whole(tensor)
            full = seen[id(tensor)]
            if full is not None:
                state[name] = full
        return state

    def model_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and persistent buffers as the engine has them, tied ones under every name."""
        return TorchCheckpointIO(self.module).model_tensors()

    def with_extra_state(self) -> dict[str, nn.Module]:
        """Return the modules that keep a state of their own making, by its name."""
        return TorchCheckpointIO(self.module).with_extra_state()

    def lazy_model_state(self) -> dict[str, LazyTensor]:
        """Return what gathers each tensor when it is called; see `CheckpointIO.lazy_model_state`."""
        lazy: dict[int, LazyTensor] = {}
        return {name: lazy.setdefault(id(tensor), _Whole(self, tensor)) for name, tensor in self.model_tensors()}

    def whole(self, tensor: Tensor) -> Tensor | None:
        """Return the whole value on the CPU on rank 0, None elsewhere. Collective."""
        from deepspeed.utils import safe_get_full_fp32_param

        if self.partitions.trained(tensor) is not None:
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
        """Check a full state, and return what loads it; see `CheckpointIO.plan_full_model_load`."""
        own, extra = dict(self.model_tensors()), self.with_extra_state()
        plan = _agree(plan_model_load(self.module, own, state, strict, whole_shape) if dist.get_rank() == 0 else None)

        def load() -> None:
            for name, stored in plan:
                source = state[stored] if dist.get_rank() == 0 else None
                if name in extra:
                    extra[name].set_extra_state(_agree(source))
                else:
                    self._set(own[name], source)
            self.partitions.spread_all()

        return load

    @torch.no_grad()
    def _set(self, tensor: Tensor, source: Tensor | None) -> None:
        """Write rank 0's values into a parameter or buffer, and into what the optimizer keeps of it. Collective."""
        run = self.partitions.trained(tensor)
        value = self._from_rank_zero(source, whole_shape(tensor), tensor.dtype if run is None else self.master_dtype)
        if tuple(tensor.shape) == whole_shape(tensor):
            tensor.copy_(value)
        if run is not None:
            self.partitions.write(run, value)
        elif (run := self.partitions.frozen(tensor)) is not None:
            with opened_partition(tensor, changes=True) as partition:
                run.within(partition).copy_(run.of_whole(value))

    def _from_rank_zero(self, source: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        value = torch.empty(tuple(shape), dtype=dtype, device=self._engine.device)
        if source is not None:
            value.copy_(source)
        dist.broadcast(value, src=0)
        return value

    # --- optimizer -------------------------------------------------------------------------------------------------

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of the optimizer, in the order of `groups`.

        Raises:
            ConfigError: there is none.
        """
        if not self.has_optimizer:
            raise ConfigError(
                f"{type(self.module).__name__} has no optimizer to save or load; pass one to prepare() with the model"
            )
        groups: list[dict[str, Any]] = self._zero.optimizer.param_groups
        return groups

    def options(self) -> dict[str, Any]:
        """Return what the state holds beside that of each parameter: options of groups, and the fp16 loss scale."""
        groups = [
            {**options_of(group), "params": list(names)}
            for group, names in zip(self.param_groups(), self.groups, strict=True)
        ]
        scaler = self._scaler
        return {
            "param_groups": groups,
            "loss_scale": {name: vars(scaler)[name] for name in _SCALE if scaler is not None},
        }

    def trained(self) -> Iterator[tuple[str, nn.Parameter, Run]]:
        """Yield the parameters that have optimizer state with what this rank keeps of them, in the module's order."""
        for name, parameter in self.module.named_parameters():
            if (run := self.partitions.trained(parameter)) is not None:
                yield name.replace("_orig_mod.", ""), parameter, run

    def outlines(self) -> list[dict[str, Any]]:
        """Return the optimizer's state of each flat partition, with meta tensors for what has a value per element."""
        outlines = []
        for index in range(self.partitions.num_flat):
            with self.partitions.opened(index) as (flat, state):
                outlines.append({key: self._outline(key, value, flat) for key, value in state.items()})
        return outlines

    def _outline(self, key: str, value: Any, flat: Tensor) -> Any:
        if isinstance(value, Tensor):
            return value.to("meta") if value.shape == flat.shape else value.detach()
        # As torch's own optimizers have it: its type is the engine's business.
        return torch.tensor(float(value)) if key == "step" and self._counts_in_integers else value

    @property
    def _counts_in_integers(self) -> bool:
        return type(self._zero.optimizer).__module__.startswith("deepspeed.")

    def own_number(self, key: str, value: Any, before: Any) -> Any:
        """Return what the optimizer keeps once for all parameters, in the type and on the device that it wants."""
        optimizer = self._zero.optimizer
        if key == "step" and self._counts_in_integers:
            return int(value)
        if key == "step" and type(optimizer).__module__.startswith("torch.optim") and not isinstance(value, Tensor):
            value = torch.tensor(float(value))
        if not isinstance(value, Tensor):
            return value
        on_device = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
        device = self._engine.device if on_device else "cpu"
        return value.detach().to(before.device if isinstance(before, Tensor) else device, copy=True)

    def full_optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state keyed by parameter name on rank 0, `{}` elsewhere. Collective."""
        from deepspeed.utils import safe_get_full_optimizer_state

        options, keep = self.options(), dist.get_rank() == 0
        self._link_state()
        state: dict[str, Any] = {}
        outlines = self.outlines()
        for name, parameter, run in self.trained():
            entry: dict[str, Any] = {}
            for key, value in outlines[run.flat].items():
                if isinstance(value, Tensor) and value.is_meta:
                    full = safe_get_full_optimizer_state(parameter, key)
                    entry[key] = full.detach().to("cpu", copy=True).view(run.shape) if keep else None
                else:
                    entry[key] = value.to("cpu", copy=True) if isinstance(value, Tensor) else value
            if entry:
                state[name] = entry
        return {"state": state, **options} if keep else {}

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
        """Check a full optimizer state, and return what loads it; see `CheckpointIO.plan_full_optimizer_load`."""
        groups = self.param_groups()
        outline = _agree(self._outline_of(state) if dist.get_rank() == 0 else None)
        return partial(self._load_optimizer, groups, outline, state)

    def _load_optimizer(
        self, groups: list[dict[str, Any]], outline: Mapping[str, Any], state: Mapping[str, Any]
    ) -> None:
        for group, stored in zip(groups, outline["param_groups"], strict=True):
            group.update(options_of(stored))
        entries = outline["state"]
        runs = {name: run for name, _, run in self.trained() if name in entries}
        for index in range(self.partitions.num_flat):
            own = [entries[name] for name, run in runs.items() if run.flat == index]
            numbers = {key: value for entry in own for key, value in entry.items() if not isinstance(value, torch.Size)}
            keys = {key: None for entry in own for key in entry if key not in numbers}
            with self.partitions.opened(index, changes=True) as (flat, kept):
                self.reset_state(kept, flat, keys, numbers)
        for name, run in runs.items():
            source = state["state"][name] if dist.get_rank() == 0 else {}
            for key, shape in entries[name].items():
                if isinstance(shape, torch.Size):
                    value = self._from_rank_zero(source.get(key), shape, torch.float32)
                    self.partitions.write(run, value, key)
        self.finish_load(outline["loss_scale"])

    def _outline_of(self, state: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return rank 0's state with the shape in place of each tensor, or the message of what does not fit."""
        plan = outline_optimizer(state, [list(names) for names in self.groups])
        if isinstance(plan, str):
            return plan
        shapes = {name: run.shape for name, _, run in self.trained()}
        entries = {
            name: {
                key: torch.Size(value.shape)
                if isinstance(value, Tensor) and key != "step" and tuple(value.shape) == shapes[name]
                else value
                for key, value in entry.items()
            }
            for name, entry in state["state"].items()
            if name in shapes
        }
        return {"state": entries, "param_groups": plan["param_groups"], "loss_scale": state.get("loss_scale", {})}

    @torch.no_grad()
    def reset_state(self, state: dict[str, Any], flat: Tensor, keys: Iterable[str], numbers: Mapping[str, Any]) -> None:
        """Have the optimizer keep zeros of a flat partition's size under `keys`, and `numbers`; nothing else."""
        for key in state.keys() - {*keys, *numbers}:
            del state[key]
        for key in keys:
            before = state.get(key)
            if isinstance(before, Tensor) and before.shape == flat.shape:
                before.zero_()
            else:  # before its first step there is none
                state[key] = torch.zeros_like(flat)
        for key, value in numbers.items():
            state[key] = self.own_number(key, value, state.get(key))

    def finish_load(self, loss_scale: Mapping[str, Any]) -> None:
        """Take up the fp16 loss scale, and connect parameters with state that is new."""
        scaler = self._scaler
        for name, value in loss_scale.items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)
        self._link_state()

    def _link_state(self) -> None:
        """Connect the parameters of ZeRO-1 and 2 with their part of the optimizer's state.

        The engine does so after its first step of the first group, when the other groups have no state yet.
        """
        if hasattr(self._zero, "_hp_optimizer_states_linked"):
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    # --- whole checkpoints -----------------------------------------------------------------------------------------

    def save(self, staged: StagedDirectory, prefix: str, *, weights: bool = True) -> None:
        """Write this rank's part of model and optimizer; see `CheckpointIO.save`. Nothing is communicated."""
        save_parts(self, staged, prefix, weights=weights)

    def load(self, stored: StoredCheckpoint, prefix: str, *, weights: bool = True) -> None:
        """Read this rank's part of what any engine or native unit wrote; see `CheckpointIO.load`."""
        self.plan_load(stored, prefix, weights=weights)()

    def plan_load(self, stored: StoredCheckpoint, prefix: str, *, weights: bool = True) -> Callable[[], None]:
        """Check what `load` would read, and return what reads it; see `CheckpointIO.plan_load`."""
        return plan_parts_load(self, stored, prefix, weights=weights)

    def files(self, manifest: Manifest, prefix: str) -> set[str]:
        """Return the files that hold something of this rank's parts; see `CheckpointIO.files`."""
        return part_files(self, manifest, prefix)

    def load_engine_files(self, directory: Path) -> None:
        """Load what the engine's own `save_checkpoint` wrote, as transformers' Trainer has it do. Collective.

        Raises:
            IncompatibleCheckpointError: another number of ranks wrote it.
            CheckpointNotFoundError: the engine finds nothing there.
        """
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

    def local_bytes(self) -> int:
        """Return the size of this rank's part; see `CheckpointIO.local_bytes`."""
        return part_bytes(self)

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
