"""Weights from files into a model that exists: whole files or shards, safetensors or torch's own, without surprises."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_trainer import logging
from accel_trainer.checkpoint.format.boxes import Box
from accel_trainer.checkpoint.format.placement import local_box, local_tensor, materialize
from accel_trainer.checkpoint.weights.new_values import initialize_tensors
from accel_trainer.checkpoint.weights.reading import BroadcastFiles, WeightFiles
from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from accel_trainer.runtime.torch_private import ORIGINAL_MODULE

__all__ = ["LoadReport", "WeightFiles", "load_checkpoint_and_dispatch", "load_checkpoint_in_model"]

logger = logging.get_logger(__name__)

Device = int | str | torch.device
DeviceMap = Mapping[str, Device]


class LoadReport(NamedTuple):
    """What did not match, as `nn.Module.load_state_dict` reports it, and what is left without values."""

    missing_keys: list[str]
    """Of the model, and not in the files. A tied tensor is there when one of its names is."""
    unexpected_keys: list[str]
    """In the files, and not of the model."""
    left_on_meta: list[str]
    """Parameters and buffers of the model that have no values yet, those that no state dict names included."""


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: DeviceMap | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = False,
    *,
    init_missing: bool = False,
    broadcast_from_rank0: bool = False,
) -> LoadReport:
    """Load weights into a model, tensor by tensor, each rank reading only what it holds. Every rank calls it.

    Works for a model on the meta device, whose tensors get their memory here, and for one that `prepare()` has
    sharded, where each rank keeps its part and shards stay where they are: both together load a model that no process
    could hold. Parameters and buffers stay the objects they were, tied ones tied, so that an optimizer keeps them.
    Buffers on the meta device that no file has (rotary frequencies, positions) are computed as the model computes them.
    Ranks do not communicate, but for the two options that say so.

    Args:
        checkpoint: a directory with `model.safetensors` or `pytorch_model.bin`, whole or in shards with an index; an
            index; or one file.
        device_map: which device each module's tensors go to, by the start of their names; `{"": device}` is all of
            them. None leaves them where they are; those on the meta device go to the CPU, or the devices of their mesh.
        dtype: of floating-point tensors from now on; None keeps that of the model.
        strict: raise when names differ; otherwise they are logged as a warning, and returned.
        init_missing: initialise meta parameters that the files lack as their modules do, equal on all ranks (rank 0
            says from which seed: collective in a distributed job).
        broadcast_from_rank0: only rank 0 sees the files; it sends one tensor at a time. Collective.

    Raises:
        CheckpointNotFoundError: there are no weights.
        IncompatibleCheckpointError: shapes differ, or names with `strict`; nothing was loaded then.
        ConfigError: `device_map` does not say where a tensor goes, or `dtype` is not that of a sharded model.
    """
    model = _users_own(model)
    weights = _open(Path(checkpoint), broadcast_from_rank0)
    own = model.state_dict(keep_vars=True)
    sources, missing, unexpected = _match(own, weights)
    if strict and (missing or unexpected):
        raise IncompatibleCheckpointError(
            f"{weights.path} {_describe(missing, unexpected, model)}; load with strict=False to accept"
        )
    devices = {name: _device(name, device_map) for name in own}
    dtypes = {name: _dtype(name, own[name], dtype) for name in sources}
    order = {name: position for position, name in enumerate(weights)}
    for name, stored in sorted(sources.items(), key=lambda pair: order[pair[1]]):
        _fill(own[name], weights, stored, devices[name], dtypes[name])
    left = _fill_what_no_file_has(model, missing, init_missing, device_map)
    if missing or unexpected or left:
        logger.warning("%s %s", weights.path, _describe(missing, unexpected, model, left))
    return LoadReport(missing, unexpected, left)


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: DeviceMap | Device | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = False,
    *,
    init_missing: bool = False,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load weights and return the model ready to run on one device: each process has one. Arguments as for loading.

    Args:
        device_map: a device, `{"": device}`, or "auto" for the first one that this process sees. Layers are not spread
            over several devices of one process: `strategy="fsdp2"` spreads them over the processes.

    Raises:
        ConfigError: `device_map` names several devices, or none that can compute.
        IncompatibleCheckpointError: parameters or buffers would be left without values.
    """
    device = _only_device(device_map)
    report = load_checkpoint_in_model(
        model,
        checkpoint,
        None if device is None else {"": device},
        dtype,
        strict,
        init_missing=init_missing,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if report.left_on_meta:
        raise IncompatibleCheckpointError(
            f"{checkpoint} has no values for {_some(report.left_on_meta)} of {type(model).__name__}, which are on the "
            "meta device; give init_missing=True to initialise new parameters, and build the model with "
            "init_empty_weights(), which leaves computed buffers their values"
        )
    return model if device is None else model.to(device)


def _users_own(model: nn.Module) -> nn.Module:
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    # torch.compile(model) wraps the module whose tensors have the names of the files.
    unwrapped: nn.Module = getattr(model, ORIGINAL_MODULE, model)
    return unwrapped


def _open(checkpoint: Path, broadcast: bool) -> WeightFiles | BroadcastFiles:
    if broadcast and dist.is_initialized() and dist.get_world_size() > 1:
        return BroadcastFiles(checkpoint, _exchange_device())
    return WeightFiles(checkpoint)


def _exchange_device() -> torch.device:
    """Return a device whose tensors the process group can exchange."""
    if "cpu" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator() or "cpu")


def _match(
    own: Mapping[str, Tensor], weights: WeightFiles | BroadcastFiles
) -> tuple[dict[str, str], list[str], list[str]]:
    """Return the stored name of each distinct tensor of the model, what is missing and what is unexpected."""
    groups: dict[int, list[str]] = {}
    for name, tensor in own.items():
        groups.setdefault(id(tensor), []).append(name)
    sources, missing = {}, []
    for names in groups.values():
        stored = next((name for name in names if name in weights), None)
        if stored is None:
            missing.append(names[0])
        else:
            sources[names[0]] = stored
    shapes = [
        f"{name} is {weights.shape(stored)} in the file and {tuple(own[name].shape)} in the model"
        for name, stored in sources.items()
        if weights.shape(stored) != tuple(own[name].shape)
    ]
    if shapes:
        more = f" and {len(shapes) - 5} more" if len(shapes) > 5 else ""
        raise IncompatibleCheckpointError(
            f"{weights.path} does not fit the model: {'; '.join(shapes[:5])}{more}. Build the model that was saved"
        )
    return sources, missing, [name for name in weights if name not in own]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{', '.join(map(repr, names[:10]))}{more}"


def _describe(missing: list[str], unexpected: list[str], model: nn.Module, left: list[str] | None = None) -> str:
    parts = []
    for what, names in (("lacks", missing), ("has, and the model has not,", unexpected)):
        if names:
            parts.append(f"{what} {_some(names)}")
    text = f"does not match {type(model).__name__}: it {' and '.join(parts)}" if parts else "is loaded"
    return f"{text}; {len(left)} tensor(s) are left on the meta device, without values: {_some(left)}" if left else text


def _device(name: str, device_map: DeviceMap | None) -> torch.device | None:
    if device_map is None:
        return None
    if not isinstance(device_map, Mapping):
        raise ConfigError(f"device_map={device_map!r} is no mapping; expected names and devices, such as {{'': 'cpu'}}")
    fitting = [key for key in device_map if key == "" or name == key or name.startswith(f"{key}.")]
    if not fitting:
        raise ConfigError(f"device_map says nothing about {name!r}; add its module, or an entry '' for all the rest")
    value = device_map[max(fitting, key=len)]
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ConfigError(
            f"device_map has {value!r} for {name!r}; expected a device such as 'cpu' or 'cuda:0'"
        ) from error


def _only_device(device_map: DeviceMap | Device | None) -> torch.device | None:
    """Return the one device that a model goes to, or None to leave it where it is.

    Raises:
        ConfigError: there are several, or none that can compute.
    """
    if device_map is None:
        return None
    if isinstance(device_map, str) and device_map == "auto":
        return torch.device(torch.accelerator.current_accelerator() or "cpu")
    values = set(device_map.values()) if isinstance(device_map, Mapping) else {device_map}
    try:
        devices = {torch.device(value) for value in values}
    except (RuntimeError, TypeError):
        devices = set()
    if len(devices) != 1 or torch.device("meta") in devices:
        raise ConfigError(
            f"device_map={device_map!r}: a process computes on one device; give that device, 'auto', or "
            "{'': device}, and use strategy='fsdp2' for a model that does not fit on one"
        )
    return devices.pop()


def _dtype(name: str, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None or not tensor.is_floating_point() or dtype == tensor.dtype:
        return tensor.dtype
    if isinstance(tensor, DTensor):
        raise ConfigError(
            f"dtype={dtype}: {name!r} is sharded as {tensor.dtype}; change the model's dtype before prepare()"
        )
    return dtype


def _fill(
    tensor: Tensor,
    weights: WeightFiles | BroadcastFiles,
    stored: str,
    device: torch.device | None,
    dtype: torch.dtype,
) -> None:
    """Give one tensor of the model its values; a sharded one stays where its shards are."""
    if tensor.is_meta:
        if device is not None and device.type == "meta":
            return
        materialize(tensor, device, dtype)
    elif not isinstance(tensor, DTensor) and (
        tensor.dtype != dtype or (device is not None and tensor.device != device)
    ):
        tensor.data = torch.empty(tensor.shape, dtype=dtype, device=device or tensor.device)
    weights.fill(stored, local_box(tensor).within(Box.full(tensor.shape)), local_tensor(tensor))


def _fill_what_no_file_has(
    model: nn.Module, missing: list[str], init_missing: bool, device_map: DeviceMap | None
) -> list[str]:
    """Compute meta buffers that are in no state dict, and new parameters if asked; return what has no values."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    empty = [name for name, tensor in named.items() if tensor.is_meta]
    stored = model.state_dict(keep_vars=True)
    wanted = [name for name in empty if name not in stored or (init_missing and name in missing)]
    seed = torch.initial_seed()
    if init_missing and dist.is_initialized():
        box = [seed]
        dist.broadcast_object_list(box, src=0)
        seed = box[0]
    unknown = initialize_tensors(model, wanted, seed, lambda name: _device(name, device_map)) if wanted else []
    return [name for name in empty if name in unknown or name not in wanted]
