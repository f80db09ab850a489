"""Weights that stay on disk while a model computes: mapped where they are, in safetensors or in one file for each."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_trainer.checkpoint.disk import create_file, explain_full_disk, read_json
from accel_trainer.checkpoint.safetensors_file import SafetensorsFile
from accel_trainer.errors import AccelTrainerError, CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError

OFFLOAD_INDEX_NAME = "index.json"
HOOK = "_hf_hook"
"""Under this name other libraries, too, look for the hook of a module."""

Index = dict[str, dict[str, Any]]
"""By the name of a weight, `dtype` and `shape` of its own file, or the `safetensors_file` that holds it."""


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: Index | None = None
) -> Index | None:
    """Write a weight to a file of its own, `NAME.dat`, and return `index` with an entry for it."""
    if index is not None:
        index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    path = Path(offload_folder, f"{weight_name}.dat")
    begun = path.with_name(f"{path.name}.incomplete")
    values = weight.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    try:
        with explain_full_disk(path, weight.nbytes), create_file(begun) as file:
            file.write(values.data)
        # A model may have the older file of this name mapped: it keeps its pages, and computes on with them.
        os.replace(begun, path)
    finally:
        begun.unlink(missing_ok=True)
    return index


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> Tensor:
    """Return a weight of `offload_weight`, by its entry of the index, mapped: changes to it stay private."""
    path = Path(weight_file)
    dtype, shape = _dtype_of(weight_info["dtype"]), torch.Size(weight_info["shape"])
    num_bytes = shape.numel() * dtype.itemsize
    try:
        found_bytes = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path.absolute()} is missing; offload the model again") from None
    if found_bytes != num_bytes:
        raise IncompatibleCheckpointError(
            f"{path.absolute()} has {found_bytes} bytes, and {dtype} {tuple(shape)} takes {num_bytes}; offload the "
            "model again"
        )
    # An empty file cannot be mapped.
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=num_bytes)
    return torch.tensor([], dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload]


def _dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise IncompatibleCheckpointError(
            f"an index of offloaded weights has dtype {name!r}, which torch does not know"
        )
    return found


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or isinstance(entry.get("safetensors_file"), str):
        return isinstance(entry, dict)
    shape = entry.get("shape")
    return isinstance(entry.get("dtype"), str) and isinstance(shape, list) and all(type(n) is int for n in shape)


def read_offload_index(offload_folder: str | os.PathLike[str]) -> Index:
    """Return the index of a folder of offloaded weights."""
    path = Path(offload_folder, OFFLOAD_INDEX_NAME)
    try:
        found = read_json(path)
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"{path.absolute()} is missing; expected the index of offloaded weights, as offload_state_dict() writes it"
        ) from None
    except ValueError as error:
        raise IncompatibleCheckpointError(f"{path.absolute()} is no index of offloaded weights: {error}") from error
    if not isinstance(found, dict) or not all(map(_is_entry, found.values())):
        raise IncompatibleCheckpointError(
            f"{path.absolute()} is no index of offloaded weights; offload the model again"
        )
    return found


def save_offload_index(index: Index | None, offload_folder: str | os.PathLike[str]) -> None:
    """Add entries to the index of a folder; nothing is written for none."""
    if index:
        path = Path(offload_folder, OFFLOAD_INDEX_NAME)
        known = read_offload_index(offload_folder) if path.is_file() else {}
        # Replaced in one step: a kill meanwhile leaves the index of before, whose files are all there.
        begun = path.with_name(f"{path.name}.incomplete")
        with create_file(begun) as file:
            file.write(json.dumps({**known, **index}, indent=2).encode())
        os.replace(begun, path)


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, Tensor]) -> None:
    """Write each tensor of a state dict to a file of its own below `save_dir`, and all to its index."""
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    index: Index = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


class PrefixedDataset(Mapping[str, Any]):
    """The entries of a mapping whose names begin with `prefix`, found without it."""

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset, self.prefix = dataset, prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self.prefix) for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Weights by name, from host memory or from disk. Those on disk are mapped, and read as far as they are used."""

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: int | str | torch.device | None = None,
        *,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """Join weights in memory with those of a folder; of a name that both have, those in memory are returned.

        Args:
            save_folder: where `offload_state_dict` wrote files.
            index: entries by name; None is the index in `save_folder`.
            device: of the tensors that safetensors files yield; None is the host.
            aliases: by further names of tied weights, the one that is stored.

        Raises:
            ConfigError: nothing of it is given.
        """
        if state_dict is None and save_folder is None and index is None:
            raise ConfigError("there are no offloaded weights; give state_dict, save_folder or index")
        self.state_dict: Mapping[str, Tensor] = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None:
            index = {} if save_folder is None else read_offload_index(save_folder)
        self.index = index
        self.device = device
        self.aliases = dict(aliases or {})
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index, *self.aliases]))
        # They are opened now, and stay open: a file that is saved anew under the same name, by another model in the
        # same folder, does not change what this model computes. Nothing is read by that.
        self._open = lru_cache(None)(SafetensorsFile)
        self._mapped: dict[str, Tensor] = {}
        for key in self.index.keys() - self.state_dict.keys():
            with suppress(OSError, AccelTrainerError):  # of a model that was in the folder before: nobody asks for it
                self._mapped[key] = self._map(key)

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedWeightsLoader:
        """Return a loader with copies of the weights in memory; files are shared, and nobody changes them."""
        copied = copy.copy(self)
        copied.state_dict = copy.deepcopy(self.state_dict, memo)
        return copied

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        if key not in self.index and key in self.aliases:
            return self[self.aliases[key]]
        if key not in self._mapped:
            self._mapped[key] = self._map(key)
        found = self._mapped[key]
        entry = self.index[key]
        if "safetensors_file" in entry:
            found = found.to(self.device or "cpu", _dtype_of(entry["dtype"]) if "dtype" in entry else None)
        return found

    def _map(self, key: str) -> Tensor:
        entry = self.index[key]
        if entry.get("safetensors_file") is None:
            if self.save_folder is None:
                raise ConfigError(f"the index says that {key!r} has a file of its own, and not where; give save_folder")
            return load_offloaded_weight(Path(self.save_folder, f"{key}.dat"), entry)
        return self._open(Path(entry["safetensors_file"]))[entry.get("weight_name", key)]

    def pages(self, names: Iterable[str]) -> list[Tensor] | None:
        """Return those of some weights that are on disk, mapped; None where one is a copy, in another dtype."""
        found = []
        for key in (name for name in names if name not in self.state_dict):
            stored = key if key in self.index else self.aliases[key]
            found.append(self[stored])
            if found[-1].dtype != self._mapped[stored].dtype:
                return None
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


def outlines_of(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each offloaded tensor of a model, its placeholder in the model, and it as it is stored."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, placeholder, stored in getattr(getattr(module, HOOK, None), "outlines", tuple)():
            yield f"{path}.{name}" if path else name, placeholder, stored


def offloaded_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the offloaded tensors of a model by name, in the model's dtypes; tied ones are one object."""
    found: dict[int, Tensor] = {}
    return {
        name: found.setdefault(id(placeholder), stored.to(placeholder.dtype))
        for name, placeholder, stored in outlines_of(model)
    }


def extract_submodules_state_dict(state_dict: Mapping[str, Any], submodule_names: Iterable[str]) -> dict[str, Any]:
    """Return the entries of a state dict that belong to some modules, or have one of these names."""
    return {
        key: value
        for name in submodule_names
        for key, value in state_dict.items()
        if key == name or key.startswith(f"{name}.")
    }
