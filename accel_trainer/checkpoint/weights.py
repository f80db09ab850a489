"""Model weights as safetensors, or as torch's own files, under the names that `from_pretrained` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from accel_trainer.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError

__all__ = [
    "BIN_INDEX_NAME",
    "BIN_NAME",
    "INDEX_NAME",
    "WEIGHTS_NAME",
    "SafetensorsDirectory",
    "parse_size",
    "read_index",
    "remove_weights",
    "save_weights",
]

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
BIN_NAME = "pytorch_model.bin"
BIN_INDEX_NAME = "pytorch_model.bin.index.json"

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_size(size: int | str) -> int:
    """Return a size such as `"10GB"` or `"500MiB"` in bytes.

    Raises:
        ConfigError: it is not a positive number with one of the units B, KB, MB, GB, TB, KiB, MiB, GiB, TiB.
    """
    text = str(size).strip().upper()
    digits = text.rstrip("BKMGTI")
    unit = text[len(digits) :] or "B"
    try:
        value = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError):
        value = 0
    if value <= 0:
        raise ConfigError(f"size {size!r} is not a positive number of bytes; write it like '10GB', '500MiB' or 1000000")
    return value


def _memory(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """What two names of one tied tensor have in common."""
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def _distinct(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep each tied tensor once, under its first name: safetensors refuses shared memory, and loaders tie again."""
    kept: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, tensor in state.items():
        if tensor.numel() and _memory(tensor) in seen:
            continue
        seen.add(_memory(tensor))
        kept[name] = tensor.contiguous()
    return kept


def _split(state: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Cut `state` into parts of at most `limit` bytes, in its order; the names of a tied tensor stay together."""
    shards: list[dict[str, Tensor]] = [{}]
    homes: dict[tuple[int, tuple[int, ...], tuple[int, ...]], dict[str, Tensor]] = {}
    size = 0
    for name, tensor in state.items():
        home = homes.get(_memory(tensor)) if tensor.numel() else None
        if home is None:
            if shards[-1] and size + tensor.nbytes > limit:
                shards.append({})
                size = 0
            size += tensor.nbytes
            home = homes[_memory(tensor)] = shards[-1]
        home[name] = tensor
    return shards


def remove_weights(directory: Path, *, with_bin: bool = False) -> None:
    """Remove weights of earlier saves, so that no stale file is read in place of a new one.

    Args:
        with_bin: torch's own files too. They need not go when safetensors are written, which are read before them.
    """
    patterns = [WEIGHTS_NAME, INDEX_NAME, "model-*-of-*.safetensors"]
    if with_bin:
        patterns += [BIN_NAME, BIN_INDEX_NAME, "pytorch_model-*-of-*.bin"]
    for pattern in patterns:
        for path in directory.glob(pattern):
            path.unlink()


def save_weights(
    state: Mapping[str, Tensor],
    directory: Path,
    max_shard_size: int | str = "10GB",
    *,
    safe_serialization: bool = True,
) -> list[str]:
    """Write `state` as `model.safetensors`, or as numbered shards with an index when it exceeds `max_shard_size`.

    Called by one process. Weights of an earlier save in `directory` are removed.

    Args:
        safe_serialization: False writes torch's own files, `pytorch_model.bin`, with every name of tied tensors.

    Returns:
        The names of the weight files.
    """
    limit = parse_size(max_shard_size)
    shards = _split(_distinct(state) if safe_serialization else state, limit)
    directory.mkdir(parents=True, exist_ok=True)
    remove_weights(directory, with_bin=not safe_serialization)
    stem, suffix = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    names = [f"{stem}.{suffix}"]
    if len(shards) > 1:
        names = [f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        if safe_serialization:
            save_file(shard, directory / name, metadata={"format": "pt"})
        else:
            torch.save(shard, directory / name)
    if len(shards) > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total = sum(tensor.nbytes for shard in shards for tensor in _distinct(shard).values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return names


def read_index(path: Path) -> dict[str, str]:
    """Return which file beside the index `path` holds which tensor.

    Raises:
        IncompatibleCheckpointError: it is no index, or names a file outside its directory.
        CheckpointNotFoundError: it names a file that is missing.
    """
    try:
        weight_map: dict[str, str] = dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise IncompatibleCheckpointError(
            f"{path} is not an index of weights ({type(error).__name__}: {error}); expected a JSON object with "
            "'weight_map'. Save the weights again"
        ) from error
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise IncompatibleCheckpointError(f"{path} names {name!r}, which is not a plain file name; do not load it")
        if not (path.parent / name).is_file():
            raise CheckpointNotFoundError(f"{path} names {name!r}, which is missing")
    return weight_map


class SafetensorsDirectory(Mapping[str, Tensor]):
    """The weights in a directory by name; a tensor is read when it is asked for."""

    def __init__(self, directory: Path) -> None:
        """Open the index, or the single file.

        Raises:
            CheckpointNotFoundError: there are no safetensors weights.
            IncompatibleCheckpointError: the index names a file outside the directory, or one that is missing.
        """
        self.directory = directory
        if (directory / INDEX_NAME).is_file():
            weight_map = read_index(directory / INDEX_NAME)
        elif (directory / WEIGHTS_NAME).is_file():
            with safe_open(directory / WEIGHTS_NAME, framework="pt") as file:
                weight_map = dict.fromkeys(file.keys(), WEIGHTS_NAME)
        else:
            raise CheckpointNotFoundError(f"no {WEIGHTS_NAME} and no {INDEX_NAME} in {directory.absolute()}")
        self._files = weight_map

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.directory / self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
