"""Model weights as safetensors, under the file names that `from_pretrained` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from accel_trainer.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError

__all__ = ["INDEX_NAME", "WEIGHTS_NAME", "SafetensorsDirectory", "parse_size", "remove_weights", "save_weights"]

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

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


def _distinct(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep each tied tensor once, under its first name: safetensors refuses shared memory, and loaders tie again."""
    kept: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        kept[name] = tensor.contiguous()
    return kept


def remove_weights(directory: Path) -> None:
    """Remove weights of earlier saves, so that no stale file is read in place of a new one."""
    for pattern in (WEIGHTS_NAME, INDEX_NAME, "model-*-of-*.safetensors"):
        for path in directory.glob(pattern):
            path.unlink()


def save_weights(state: Mapping[str, Tensor], directory: Path, max_shard_size: int | str = "10GB") -> list[str]:
    """Write `state` as `model.safetensors`, or as numbered shards with an index when it exceeds `max_shard_size`.

    Called by one process. Weights of an earlier save in `directory` are removed.

    Returns:
        The names of the weight files.
    """
    limit = parse_size(max_shard_size)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in _distinct(state).items():
        tensor_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + tensor_bytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor_bytes
    directory.mkdir(parents=True, exist_ok=True)
    remove_weights(directory)
    if len(shards) == 1:
        save_file(shards[0], directory / WEIGHTS_NAME, metadata={"format": "pt"})
        return [WEIGHTS_NAME]
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, directory / name, metadata={"format": "pt"})
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    total = sum(t.numel() * t.element_size() for shard in shards for t in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return names


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
            weight_map: dict[str, str] = json.loads((directory / INDEX_NAME).read_text())["weight_map"]
        elif (directory / WEIGHTS_NAME).is_file():
            with safe_open(directory / WEIGHTS_NAME, framework="pt") as file:
                weight_map = dict.fromkeys(file.keys(), WEIGHTS_NAME)
        else:
            raise CheckpointNotFoundError(f"no {WEIGHTS_NAME} and no {INDEX_NAME} in {directory.absolute()}")
        for name in sorted(set(weight_map.values())):
            if Path(name).name != name:
                raise IncompatibleCheckpointError(
                    f"{directory / INDEX_NAME} names {name!r}, which is not a plain file name; do not load it"
                )
            if not (directory / name).is_file():
                raise CheckpointNotFoundError(f"{directory / INDEX_NAME} names {name!r}, which is missing")
        self._files = weight_map

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.directory / self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
