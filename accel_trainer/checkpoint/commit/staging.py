"""The directory that a save writes into: every file is hashed while it is written, and recorded for the manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from torch import Tensor

from accel_trainer.checkpoint.commit.disk import check_space, explain_full_disk, fsync_path
from accel_trainer.checkpoint.format.boxes import Box
from accel_trainer.checkpoint.format.checksums import FileEntry, HashingFile, hash_file
from accel_trainer.checkpoint.format.manifest import TensorEntry, check_name
from accel_trainer.checkpoint.format.safetensors_file import (
    LazyTensor,
    StagingMemory,
    dtype_name,
    tensor_file_bytes,
    write_tensor_file,
)
from accel_trainer.errors import CheckpointNotFoundError, ConfigError
from accel_trainer.runtime.fault_injection import fault_point

__all__ = ["Slices", "StagedDirectory"]

Slices = Mapping[str, tuple[Sequence[int], Sequence[int]]]
"""Shape of the full tensor and offsets in it, for each tensor that is a shard."""


class StagedDirectory(os.PathLike[str]):
    """A directory that becomes a checkpoint when it is committed; `staged / "name"` is a path in it.

    Each rank has its own, over one directory (one per node with `each_node`), and writes files under names that no
    other rank uses. Files that are written by path and not adopted are adopted at the end, by the committing rank.

    When it is given memory, `write_tensors` and `write_json` keep copies, and `write_deferred` writes them, on any
    thread. The other methods act at once.
    """

    def __init__(
        self,
        path: Path,
        step: int | None = None,
        *,
        commits: bool = True,
        memory: StagingMemory | None = None,
        ranks: Sequence[int] = (0,),
    ) -> None:
        self.path = path
        self.ranks = ranks
        """The ranks that write into it."""
        self.commits = commits
        """Whether this rank commits the directory: it writes the files that would be the same on every rank."""
        self.step = step
        self.files: dict[str, FileEntry] = {}
        self.tensors: dict[str, dict[str, TensorEntry]] = {}
        self.metadata: dict[str, Any] = {}
        """For the manifest, as JSON; that of the committing rank counts."""
        self._memory = memory
        self._deferred: list[Callable[[], None]] = []

    def __fspath__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def write_tensors(
        self,
        name: str,
        tensors: Mapping[str, Tensor | LazyTensor],
        *,
        slices: Slices | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write a safetensors file, one tensor at a time; the caller's tensors are neither copied nor kept.

        Args:
            tensors: tensors, or callables with `dtype` and `shape` that return one when its turn comes.
            slices: of tensors that are shards.

        Raises:
            ConfigError: the name is not a plain one, or was written before; a dtype is unknown to the format.
            DiskFullError: there is no room.
        """
        self._claim(name)
        entries = {key: _tensor_entry(key, tensor, (slices or {}).get(key)) for key, tensor in tensors.items()}
        if self._memory is not None:
            fault_point("stage", self.step)
            tensors = self._memory.copy(tensors)

        def write() -> None:
            need = tensor_file_bytes(tensors)
            check_space(self.path, need)
            with self._create(name, need) as file:
                write_tensor_file(file, tensors, metadata)
            self.tensors[name] = entries

        self._write(write)

    def _write(self, write: Callable[[], None]) -> None:
        if self._memory is None:
            write()
        else:
            self._deferred.append(write)

    def write_json(self, name: str, value: Any) -> None:
        """Write plain data, such as `json.dumps` takes."""
        self._claim(name)
        self._write(partial(self._write_bytes, name, json.dumps(value).encode()))

    def _write_bytes(self, name: str, text: bytes) -> None:
        with self._create(name, len(text)) as file:
            file.write(text)

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Open a new file to write into, for `torch.save` and the like; it cannot seek."""
        self._claim(name)
        with self._create(name) as file:
            yield file

    @contextmanager
    def _create(self, name: str, need_bytes: int | None = None) -> Iterator[BinaryIO]:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with explain_full_disk(path, need_bytes):
            try:
                with HashingFile(path, on_chunk=partial(fault_point, "save.mid_shard", self.step, path)) as file:
                    yield cast(BinaryIO, file)
                fault_point("save.after_shard", self.step, path)
            except Exception:
                path.unlink(missing_ok=True)  # incomplete, and on a full disk a retry needs its room
                raise
            assert file.entry is not None
            self.files[name] = file.entry

    def adopt(self, name: str) -> None:
        """Record a file, or a folder with all its files, that was written by path; it is read once to be hashed.

        Raises:
            CheckpointNotFoundError: it is not there.
            ConfigError: it is a link.
        """
        path = self.path / name
        if path.is_symlink() or not path.exists():
            kind = ConfigError if path.is_symlink() else CheckpointNotFoundError
            raise kind(f"{path.absolute()} was to be part of a checkpoint; expected a file or a folder")
        if path.is_dir():
            for child in sorted(path.iterdir()):
                self.adopt(f"{name}/{child.name}")
        elif name not in self.files:
            check_name(name)
            fsync_path(path)
            self.files[name] = hash_file(path)

    def _claim(self, name: str) -> None:
        check_name(name)
        if name in self.files or (self.path / name).exists():
            raise ConfigError(f"{name!r} is in {self.path.absolute()} already; each file is written once")

    def write_deferred(self) -> None:
        """Write the copies that are not written yet, if there are any."""
        if self._memory is not None:
            self._memory.wait()
        while self._deferred:
            self._deferred[0]()
            del self._deferred[0]

    def sync_directories(self) -> None:
        """Bring the names of this rank's files to the disk."""
        for folder in sorted({(self.path / name).parent for name in self.files}, reverse=True):
            while folder != self.path:
                fsync_path(folder)
                folder = folder.parent
        fsync_path(self.path)


def _tensor_entry(
    name: str, tensor: Tensor | LazyTensor, place: tuple[Sequence[int], Sequence[int]] | None
) -> TensorEntry:
    dtype, sizes = dtype_name(tensor.dtype), tuple(int(length) for length in tensor.shape)
    if place is None:
        return TensorEntry(dtype, sizes)
    shape, offsets = (tuple(int(number) for number in numbers) for numbers in place)
    if not Box(offsets, sizes).fits(shape):
        raise ConfigError(f"the shard {sizes} of tensor {name!r} does not lie at {offsets} of {shape}")
    return TensorEntry(dtype, shape, offsets, sizes)
