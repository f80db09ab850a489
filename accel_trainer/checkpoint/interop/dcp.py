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

from accel_trainer.checkpoint.boxes import Box, Index
from accel_trainer.checkpoint.disk import check_regular, read_regular
from accel_trainer.checkpoint.manifest import checked_sizes
from accel_trainer.checkpoint.shards import ShardedTensors, TensorShards
from accel_trainer.checkpoint.torch_files import check_numbering, check_torch_bytes
from accel_trainer.errors import (
    AccelTrainerError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)

METADATA_NAME = ".metadata"
_MAX_METADATA_BYTES = 256 * 2**20
_MAX_DEPTH = 32

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


def _member(owner: Any, name: Any) -> _Record:
    """Return the member of an enumeration as a record of its name."""
    if owner is not _Record or not isinstance(name, str):
        raise _RefusedError("it takes attributes of what is no record")
    return _Record(name)


class _RecordUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return _Record
        if (module, name) == ("builtins", "getattr"):
            return _member  # Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) pickles members of enumerations so
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
        # No metadata has any: persistent ids are how torch.save refers to storages.
        raise _RefusedError("it refers to objects outside of it")


@dataclass(frozen=True, slots=True)
class _Item:
    """The bytes of a stored object."""

    file: str
    offset: int
    length: int


class DcpDirectory(ShardedTensors):
    """The tensors of a directory by their flat names; `nested` reads its other objects too.

    Raises:
        CheckpointNotFoundError: there is no `.metadata`, or a file that it names is missing.
        IncompatibleCheckpointError: it holds what could run code, leads outside, or is of an unknown kind.
        CorruptCheckpointError: it contradicts itself or the files.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.paths: dict[str, tuple[Any, ...]] = {}
        """Keys of the nested state for each flat name, where the writer has noted them."""
        self._objects: dict[str, _Item] = {}
        self._sizes: dict[str, int] = {}
        try:
            self._read(_read_records(directory / METADATA_NAME))
        except (AttributeError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            if isinstance(error, AccelTrainerError):
                raise
            # Without the error's text: it may quote a value, which an author of ill will can make as long as he likes.
            raise CorruptCheckpointError(
                f"{directory / METADATA_NAME} is not the metadata of a checkpoint ({type(error).__name__})"
            ) from error

    def _read(self, metadata: Any) -> None:
        items = {(_text(index.fqn), _offset(index)): self._item(info) for index, info in metadata.storage_data.items()}
        self.paths = self._read_paths(getattr(metadata, "planner_data", None) or {})
        for name, kind in metadata.state_dict_metadata.items():
            _text(name)
            if not hasattr(kind, "chunks"):
                self._objects[name] = items[name, None]
                continue
            entry = TensorShards(_dtype(kind.properties.arguments[0]), checked_sizes(kind.size))
            for chunk in kind.chunks:
                box = Box(checked_sizes(chunk.offsets), checked_sizes(chunk.sizes))
                item = items[name, box.offsets]
                if not box.fits(entry.shape) or prod(box.sizes) * entry.dtype.itemsize > item.length:
                    raise CorruptCheckpointError(
                        f"{self.path / METADATA_NAME}: {item.length} bytes cannot hold {box} of {name!r}"
                    )
                entry.boxes.append(box)
                entry.places.append(item)
            self.tensors[name] = entry

    def _read_paths(self, planned: Any) -> dict[str, tuple[Any, ...]]:
        paths = {_text(name): tuple(map(_key, path)) for name, path in planned.items()}
        if any(len(path) > _MAX_DEPTH for path in paths.values()):
            raise CorruptCheckpointError(
                f"{self.path / METADATA_NAME} has objects in more than {_MAX_DEPTH} dicts and lists, which is the bound"
            )
        return paths

    def _item(self, info: Any) -> _Item:
        file = _text(info.relative_path)
        path = self.path / file
        if getattr(info, "transform_descriptors", None):
            raise IncompatibleCheckpointError(f"{path} is compressed; save it without stream transformations")
        if Path(file).name != file:
            raise IncompatibleCheckpointError(
                f"{self.path / METADATA_NAME} names {file[:200]!r}, which is not a plain file beside it; do not load it"
            )
        if file not in self._sizes:
            try:
                self._sizes[file] = check_regular(path).st_size
            except CheckpointNotFoundError as error:
                raise CheckpointNotFoundError(
                    f"{self.path / METADATA_NAME} names {file!r}, which is missing"
                ) from error
        offset, length = checked_sizes((info.offset, info.length))
        if offset + length > self._sizes[file]:
            raise CorruptCheckpointError(f"{path} is too short: something lies at {offset} + {length} bytes")
        return _Item(file, offset, length)

    def read_shard(self, name: str, shard: int, index: Index) -> Tensor:
        """Return a slice of one stored shard."""
        tensor = self.tensors[name]
        stored = self._load(tensor.places[shard], name)
        if not isinstance(stored, Tensor) or tuple(stored.shape) != tensor.boxes[shard].sizes:
            raise CorruptCheckpointError(f"{self.path} holds something else under {name!r} than it says")
        return stored[index]

    def value(self, name: str) -> Any:
        """Return an object of numbers, strings, lists and dicts."""
        return self._load(self._objects[name], name)

    def nested(self, first: Any, tensor: Callable[[str], Any] | None = None) -> dict[Any, Any]:
        """Return the nested dicts and lists below a key of the outermost one, with `tensor` of each flat name."""
        tree: dict[Any, Any] = {}
        read = tensor or self.__getitem__
        for name in (*self.tensors, *self._objects):
            path = self.paths.get(name, (name,))
            if path[0] == first and len(path) > 1:
                node = tree
                for key in path[1:-1]:
                    node = node.setdefault(key, {})
                node[path[-1]] = read(name) if name in self.tensors else self.value(name)
        nested: dict[Any, Any] = _with_lists(tree)
        return nested

    def _load(self, item: _Item, name: str) -> Any:
        with open(self.path / item.file, "rb") as file:
            file.seek(item.offset)
            content = io.BytesIO(file.read(item.length))
        # Each item is a file of torch.save of its own, at an offset: it can hold what such a file can.
        check_torch_bytes(content, self.path / item.file)
        content.seek(0)
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
    content = read_regular(path, _MAX_METADATA_BYTES)
    check_numbering(content, path)
    with io.BytesIO(content) as file:
        try:
            return _RecordUnpickler(file).load()
        except _RefusedError as error:
            raise IncompatibleCheckpointError(
                f"{path} holds more than names and numbers: {error}. Loading it elsewhere could run code that it "
                "contains; do not"
            ) from error
        except Exception as error:  # a damaged pickle raises almost anything
            raise CorruptCheckpointError(f"{path} cannot be read ({type(error).__name__})") from error


# Of what a pickle holds, only values of a known type are looked at; see `checked_sizes`.


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} stands where a name was expected")
    return value


def _key(value: Any) -> str | int:
    return value if isinstance(value, int) else _text(value)


def _dtype(value: Any) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        raise TypeError(f"a {type(value).__name__} stands where a dtype was expected")
    return value


def _offset(index: Any) -> tuple[int, ...] | None:
    offset = getattr(index, "offset", None)
    return None if offset is None else checked_sizes(offset)


def _with_lists(node: Any) -> Any:
    """Turn dicts whose keys count from 0 into the lists that were flattened."""
    if not isinstance(node, dict):
        return node
    children = {key: _with_lists(value) for key, value in node.items()}
    if children and all(isinstance(key, int) for key in children) and sorted(children) == list(range(len(children))):
        return [children[position] for position in range(len(children))]
    return children
