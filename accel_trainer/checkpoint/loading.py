"""Weights from files into a model that exists: whole files or shards, safetensors or torch's own, without surprises."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from accel_trainer import logging
from accel_trainer.checkpoint.weights import BIN_INDEX_NAME, BIN_NAME, INDEX_NAME, WEIGHTS_NAME, read_index
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError

__all__ = ["LoadReport", "WeightFiles", "load_checkpoint_in_model"]

logger = logging.get_logger(__name__)

DeviceMap = Mapping[str, "int | str | torch.device"]


class LoadReport(NamedTuple):
    """What did not match, as `nn.Module.load_state_dict` reports it."""

    missing_keys: list[str]
    """Of the model, and not in the files. A tied tensor is there when one of its names is."""
    unexpected_keys: list[str]
    """In the files, and not of the model."""


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name; one is read when it is asked for."""

    def __init__(self, checkpoint: Path) -> None:
        """Open a directory, an index, or one file of weights.

        In a directory, safetensors are taken before torch's own files, and an index before a single file: the file
        that lies beside an index is older, for a save that needed no index would have removed it.

        Raises:
            CheckpointNotFoundError: there are no weights.
            IncompatibleCheckpointError: a file cannot be read as weights.
        """
        path = _find(checkpoint) if checkpoint.is_dir() else checkpoint
        if not path.is_file():
            raise CheckpointNotFoundError(f"no file {path.absolute()}; expected a directory or a file of weights")
        self.path = path
        self._opened: tuple[str, Any] | None = None
        if path.name.endswith(".index.json"):
            self._files = read_index(path)
        else:
            names = list(self._open(path.name).keys())
            self._files = dict.fromkeys(names, path.name)

    def __getitem__(self, name: str) -> Tensor:
        file = self._open(self._files[name])
        tensor: Tensor = file[name] if isinstance(file, dict) else file.get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading its values."""
        file = self._open(self._files[name])
        return tuple(file[name].shape if isinstance(file, dict) else file.get_slice(name).get_shape())

    def by_file(self) -> list[str]:
        """Return all names, those of one file together, so that each file is opened once."""
        return sorted(self._files, key=lambda name: self._files[name])

    def _open(self, file: str) -> Any:
        """Return a file's tensors: an open safetensors file, or a dict. One file is open at a time."""
        if self._opened is None or self._opened[0] != file:
            self._opened = (file, _read(self.path.parent / file))
        return self._opened[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _find(directory: Path) -> Path:
    known = (INDEX_NAME, WEIGHTS_NAME, BIN_INDEX_NAME, BIN_NAME)
    found = next((directory / name for name in known if (directory / name).is_file()), None)
    if found is None:
        hint = ""
        if (directory / "manifest.json").is_file():
            hint = "; save_state() wrote this directory, and accelerator.load_state() reads it"
        raise CheckpointNotFoundError(
            f"no weights in {directory.absolute()}: expected one of {', '.join(known)}, as save_model() and "
            f"save_pretrained() write them{hint}"
        )
    return found


def _read(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            return safe_open(path, framework="pt")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path.absolute()} is missing") from None
    except pickle.UnpicklingError as error:
        raise IncompatibleCheckpointError(
            f"{path} holds more than tensors, and loading it could run code that it contains; if you trust it, load it "
            "with torch.load(path, weights_only=False) and save its tensors again"
        ) from error
    except Exception as error:  # safetensors and torch each have errors of their own for a damaged file
        raise IncompatibleCheckpointError(
            f"{path} cannot be read as weights ({type(error).__name__}: {error}); is it damaged, or of another format?"
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise IncompatibleCheckpointError(f"{path} is not a mapping of names to tensors; expected a model's state dict")
    return dict(state)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: DeviceMap | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = False,
) -> LoadReport:
    """Load weights into a model, tensor by tensor. Every rank calls it; ranks do not communicate.

    Works for a model on the meta device, whose tensors get their memory here, and for one that `prepare()` has
    sharded, where each rank keeps its part and shards stay where they are. Tied weights stay tied.

    Args:
        checkpoint: a directory with `model.safetensors` or `pytorch_model.bin`, whole or in shards with an index; an
            index; or one file.
        device_map: which device each module's tensors go to, by the start of their names; `{"": device}` is all of
            them. None leaves them where they are; those on the meta device go to the CPU.
        dtype: of floating-point tensors from now on; None keeps that of the model.
        strict: raise when names differ; otherwise they are logged as a warning, and returned.

    Raises:
        CheckpointNotFoundError: there are no weights.
        IncompatibleCheckpointError: shapes differ, or names with `strict`; nothing was loaded then.
        ConfigError: `device_map` does not say where a tensor goes.
    """
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    model = getattr(model, "_orig_mod", model)  # what torch.compile(model) wraps has the names of the files
    weights = WeightFiles(Path(checkpoint))
    own = model.state_dict(keep_vars=True)
    sources, report = _match(own, weights)
    if strict and (report.missing_keys or report.unexpected_keys):
        raise IncompatibleCheckpointError(
            f"{weights.path} {_describe(report, model)}; load with strict=False to accept"
        )
    devices = {name: _device(name, device_map) for name in sources}
    order = {name: position for position, name in enumerate(weights.by_file())}
    for name, stored in sorted(sources.items(), key=lambda pair: order[pair[1]]):
        _fill(model, own, name, weights[stored], devices[name], dtype)
    if report.missing_keys or report.unexpected_keys:
        logger.warning("%s %s", weights.path, _describe(report, model))
    return report


def _match(own: Mapping[str, Tensor], weights: WeightFiles) -> tuple[dict[str, str], LoadReport]:
    """Return the stored name of each distinct tensor of the model, and what does not match."""
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
    return sources, LoadReport(missing, [name for name in weights if name not in own])


def _describe(report: LoadReport, model: nn.Module) -> str:
    own = model.state_dict(keep_vars=True)
    empty = [name for name in report.missing_keys if own[name].is_meta]
    parts = []
    for what, names in (("lacks", report.missing_keys), ("has, and the model has not,", report.unexpected_keys)):
        if names:
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            parts.append(f"{what} {', '.join(map(repr, names[:10]))}{more}")
    without = f" ({len(empty)} of them on the meta device, without values)" if empty else ""
    return f"does not match {type(model).__name__}: it {' and '.join(parts)}{without}"


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


def _fill(
    model: nn.Module,
    own: Mapping[str, Tensor],
    name: str,
    value: Tensor,
    device: torch.device | None,
    dtype: torch.dtype | None,
) -> None:
    """Give one tensor of the model its values."""
    tensor = own[name]
    dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            # src_data_rank=None: each rank takes its part of what it has read, without communication.
            tensor.copy_(distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None))
        elif tensor.is_meta:
            # copy=True: not a view of the file, which may be replaced while the model lives.
            loaded = value.to(device or "cpu", dtype, copy=True)
            is_parameter = isinstance(tensor, nn.Parameter)
            if is_parameter:
                loaded = nn.Parameter(loaded, requires_grad=tensor.requires_grad)
            for alias in [other for other, known in own.items() if known is tensor]:
                owner, _, leaf = alias.rpartition(".")
                module = model.get_submodule(owner)
                held: dict[str, Any] = module._parameters if is_parameter else module._buffers
                held[leaf] = loaded
        elif tensor.dtype != dtype or (device is not None and tensor.device != device):
            tensor.data = value.to(device or tensor.device, dtype, copy=True)
        else:
            tensor.copy_(value)
