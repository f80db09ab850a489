"""Directories of torch.distributed.checkpoint, read without running anything that is in them.

Their `.metadata` is a pickle, which torch loads as it is: whoever wrote it runs code in whoever reads it. Here an
unpickler that knows nothing but records of names and numbers reads it, and torch's own restricted one each tensor.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_trainer.checkpoint.format.boxes import Box, Index
from accel_trainer.checkpoint.shards import ShardedTensors, TensorShards
from accel_trainer.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError

__all__ = ["METADATA_NAME", "DcpDirectory"]

METADATA_NAME = ".metadata"
_MAX_METADATA_BYTES = 256 * 2**20

_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
}


class _Record:
    """An object of torch's metadata, as plain attributes or constructor arguments."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(key): value for key, value in state.items()})
        else:
            self.arguments = state


class _RefusedError(Exception):
    """A pickle refers to something else than records."""


class _RecordUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return _Record
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            return _Record
        raise _RefusedError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise _RefusedError("it refers to objects outside of it")


@dataclass(frozen=True, slots=True)
class _Item:
    """The bytes of a stored object."""

    file: str
    offset: int
    length: int


class DcpDirectory(ShardedTensors):
    """The tensors of a directory by their flat names; `value` and `nested` read its other objects too."""

    def __init__(self, directory: Path) -> None:
        """Read the metadata.

        Raises:
            CheckpointNotFoundError: there is no `.metadata`, or a file that it names is missing.
            IncompatibleCheckpointError: it holds what could run code, leads outside, or is of an unknown kind.
            CorruptCheckpointError: it contradicts itself or the files.
        """
        super().__init__(directory)
        self.paths: dict[str, tuple[Any, ...]] = {}
        """Keys of the nested state for each flat name, where the writer has noted them."""
        self._objects: dict[str, _Item] = {}
        try:
            self._read(_read_records(directory / METADATA_NAME))
        except (AttributeError, KeyError, TypeError, IndexError) as error:
            raise CorruptCheckpointError(
                f"{directory / METADATA_NAME} is not the metadata of a checkpoint ({type(error).__name__}: {error})"
            ) from error

    def _read(self, metadata: Any) -> None:
        items = {(index.fqn, _offset(index)): self._item(info) for index, info in metadata.storage_data.items()}
        self.paths = {name: tuple(path) for name, path in (getattr(metadata, "planner_data", None) or {}).items()}
        for name, kind in metadata.state_dict_metadata.items():
            if not hasattr(kind, "chunks"):
                self._objects[name] = items[name, None]
                continue
            entry = TensorShards(kind.properties.arguments[0], tuple(kind.size))
            for chunk in kind.chunks:
                box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                item = items[name, box.offsets]
                if not box.fits(entry.shape) or prod(box.sizes) * entry.dtype.itemsize > item.length:
                    raise CorruptCheckpointError(
                        f"{self.path / METADATA_NAME}: {item.length} bytes cannot hold {box} of {name!r}"
                    )
                entry.boxes.append(box)
                entry.places.append(item)
            self.tensors[name] = entry

    def _item(self, info: Any) -> _Item:
        file, path = str(info.relative_path), self.path / str(info.relative_path)
        if getattr(info, "transform_descriptors", None):
            raise IncompatibleCheckpointError(
                f"{path} is compressed ({info.transform_descriptors}); save it without stream transformations"
            )
        if Path(file).name != file or path.is_symlink():
            raise IncompatibleCheckpointError(
                f"{self.path / METADATA_NAME} names {file!r}, which is not a plain file beside it; do not load it"
            )
        if not path.is_file():
            raise CheckpointNotFoundError(f"{self.path / METADATA_NAME} names {file!r}, which is missing")
        if info.offset < 0 or info.length < 0 or info.offset + info.length > path.stat().st_size:
            raise CorruptCheckpointError(f"{path} is too short: something lies at {info.offset} + {info.length} bytes")
        return _Item(file, info.offset, info.length)

    def read_shard(self, name: str, shard: int, index: Index) -> Tensor:
        """Return a slice of one stored shard; see `ShardedTensors.read_shard`."""
        tensor = self.tensors[name]
        stored = self._load(tensor.places[shard], name)
        if not isinstance(stored, Tensor) or tuple(stored.shape) != tensor.boxes[shard].sizes:
            raise CorruptCheckpointError(f"{self.path} holds something else under {name!r} than it says")
        return stored[index]

    def value(self, name: str) -> Any:
        """Return a tensor, or an object of numbers, strings, lists and dicts."""
        return self[name] if name in self.tensors else self._load(self._objects[name], name)

    def nested(self, first: Any, tensor: Callable[[str], Any] | None = None) -> dict[Any, Any]:
        """Return everything below a key of the outermost dict as the nested dicts and lists that were saved.

        Args:
            tensor: what stands for a tensor, by its flat name; None reads it.
        """
        tree: dict[Any, Any] = {}
        for name in (*self.tensors, *self._objects):
            path = self.paths.get(name, (name,))
            if path[0] == first and len(path) > 1:
                node = tree
                for key in path[1:-1]:
                    node = node.setdefault(key, {})
                node[path[-1]] = self.value(name) if tensor is None or name not in self.tensors else tensor(name)
        nested: dict[Any, Any] = _with_lists(tree)
        return nested

    def _load(self, item: _Item, name: str) -> Any:
        with open(self.path / item.file, "rb") as file:
            file.seek(item.offset)
            content = io.BytesIO(file.read(item.length))
        try:
            return torch.load(content, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise IncompatibleCheckpointError(
                f"{name!r} in {self.path} is more than tensors, numbers and strings, and loading it could run code"
            ) from error
        except Exception as error:  # torch has several errors of its own for a damaged file
            raise CorruptCheckpointError(f"{name!r} in {self.path} cannot be read: {error}") from error


def _read_records(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointNotFoundError(f"no {path.name} in {path.parent.absolute()}: its save has not ended")
    if path.stat().st_size > _MAX_METADATA_BYTES:
        raise CorruptCheckpointError(f"{path} has {path.stat().st_size} bytes; it is no metadata of a checkpoint")
    with open(path, "rb") as file:
        try:
            return _RecordUnpickler(file).load()
        except _RefusedError as error:
            raise IncompatibleCheckpointError(
                f"{path} holds more than names and numbers: {error}. Loading it elsewhere could run code that it "
                "contains; do not"
            ) from error
        except Exception as error:  # a damaged pickle raises almost anything
            raise CorruptCheckpointError(f"{path} cannot be read ({type(error).__name__}: {error})") from error


def _offset(index: Any) -> tuple[int, ...] | None:
    offset = getattr(index, "offset", None)
    return None if offset is None else tuple(offset)


def _with_lists(node: Any) -> Any:
    """Turn dicts whose keys count from 0 into the lists that were flattened."""
    if not isinstance(node, dict):
        return node
    children = {key: _with_lists(value) for key, value in node.items()}
    if children and all(isinstance(key, int) for key in children) and sorted(children) == list(range(len(children))):
        return [children[position] for position in range(len(children))]
    return children
