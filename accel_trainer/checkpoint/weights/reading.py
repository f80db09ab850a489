"""Weight files of a model, safetensors or torch's own, one or several with an index, read as far as they are used."""

from __future__ import annotations

import errno
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from accel_trainer.checkpoint.format.boxes import Index
from accel_trainer.checkpoint.format.manifest import MANIFEST_NAME
from accel_trainer.checkpoint.format.pickles import PLAIN_ARRAYS, check_torch_pickles, has_all_pickles
from accel_trainer.checkpoint.format.regular_files import as_corrupt, check_regular
from accel_trainer.checkpoint.format.safetensors_file import SafetensorsFile, TensorReader
from accel_trainer.checkpoint.weights.writing import read_index
from accel_trainer.errors import (
    AccelTrainerError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)

__all__ = [
    "BroadcastFiles",
    "WeightFiles",
    "check_torch_bytes",
    "check_torch_file",
    "find_weight_file",
    "load_torch_file",
]

_MAX_PICKLE_BYTES = 256 * 2**20
_END = struct.Struct("<4s4H2IH")
"""Of an archive: its mark, four numbers, and bytes and place of its directory; then the length of a comment."""
_LOCATOR, _END_64 = struct.Struct("<4sIQI"), struct.Struct("<4sQ2H2I4Q")
"""Before that of a large one: the place of its own end, and that end, which has the place of the directory last."""


class WeightFiles(TensorReader):
    """The tensors of a model's weight files. One is read when it is asked for, and one file is open at a time."""

    def __init__(self, checkpoint: Path) -> None:
        """Open a directory, an index, or one file of weights.

        Raises:
            CheckpointNotFoundError: there are no weights.
            IncompatibleCheckpointError: a file cannot be read as weights.
        """
        self.path = path = find_weight_file(checkpoint) if checkpoint.is_dir() else checkpoint
        if checkpoint.is_dir():
            check_regular(path)
        elif not path.is_file():
            raise CheckpointNotFoundError(f"no file {path.absolute()}; expected a directory or a file of weights")
        self._open = lru_cache(1)(lambda file: _open_file(path.parent / file))
        if path.name.endswith(".index.json"):
            # In this order each file is opened once.
            self._files = dict(sorted(read_index(path).items(), key=lambda entry: entry[1]))
        else:
            self._files = dict.fromkeys(self._open(path.name), path.name)

    def __getitem__(self, name: str) -> Tensor:
        return self._holding(name)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def _holding(self, name: str) -> TensorReader:
        """Return the file that holds a tensor, opened."""
        opened = self._open(self._files[name])
        if name not in opened:
            raise CorruptCheckpointError(
                f"{self.file_of(name).absolute()} lacks {name!r}, which the index beside it says it holds; save the "
                "weights again"
            )
        return opened

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self.path.parent / self._files[name]

    def file_names(self) -> list[str]:
        """Return the names of the files with tensors."""
        return sorted(set(self._files.values()))

    def fill(self, name: str, index: Index, target: Tensor) -> None:
        """Copy a slice of a tensor into `target`; see `SafetensorsFile.fill`."""
        self._holding(name).fill(name, index, target)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading its values."""
        return self._holding(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor without reading its values."""
        return self._holding(name).dtype(name)


class BroadcastFiles(TensorReader):
    """Weight files that only rank 0 can see: it reads, and broadcasts one tensor at a time.

    Collective: every rank builds it, and reads the same tensors in the same order.
    """

    def __init__(self, checkpoint: Path, device: torch.device) -> None:
        """Open the weights on rank 0.

        Args:
            device: where tensors are exchanged; one of the process group's backend.

        Raises:
            CheckpointNotFoundError: on every rank alike, as are other errors of `WeightFiles`.
        """
        self.path = checkpoint
        self._device = device
        self._weights: WeightFiles | None = None
        message: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                self._weights = WeightFiles(checkpoint)
                outline = {name: (self._weights.shape(name), self._weights.dtype(name)) for name in self._weights}
                message = [outline]
            except AccelTrainerError as error:
                message = [error]
        dist.broadcast_object_list(message, src=0)
        if isinstance(message[0], Exception):
            raise message[0]
        self._outline: dict[str, tuple[tuple[int, ...], torch.dtype]] = message[0]

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self._outline[name]
        if self._weights is not None:
            tensor = self._weights[name].to(self._device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0)  # gloo knows few types
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._outline[name][0]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._outline[name][1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outline)

    def __len__(self) -> int:
        return len(self._outline)


class _TensorDict(dict[str, Tensor], TensorReader):
    """A state dict from one of torch's own files, which is mapped."""


def find_weight_file(directory: Path, unit: int = 0) -> Path:
    """Return the index or the file that holds a model's weights in `directory`; of `unit`, where there are several.

    Safetensors come before torch's own files, and an index before a single file: the file that lies beside an index is
    older, for a save that needed no index would have removed it. The only index of another name comes last. Names with
    a number are accelerate's, those with "fsdp" are accelerate's and its Trainer's for FULL_STATE_DICT.

    Raises:
        CheckpointNotFoundError: there are no weights.
    """
    suffix = f"_{unit}" if unit else ""
    stems = (f"model{suffix}.safetensors", f"pytorch_model{suffix}.bin", f"pytorch_model_fsdp{suffix}.bin")
    names = [name for stem in stems for name in (f"{stem}.index.json", stem)]
    found = next((directory / name for name in names if (directory / name).is_file()), None)
    if found is not None:
        return found
    indexes = [] if unit else list(directory.glob("*.index.json"))
    if len(indexes) == 1:
        return indexes[0]
    hint = ""
    if (directory / "adapter_config.json").is_file():
        hint = (
            "; it holds an adapter of PEFT, which goes on top of its base model: build that with its adapter "
            "(get_peft_model) to resume, or read it with PeftModel.from_pretrained(base_model, directory)"
        )
    elif (directory / MANIFEST_NAME).is_file():
        hint = "; save_state() wrote this directory, and accelerator.load_state() reads it"
    raise CheckpointNotFoundError(
        f"no weights in {directory.absolute()}: expected one of {', '.join(names)}, as save_model() and "
        f"save_pretrained() write them{hint}"
    )


def _open_file(path: Path) -> TensorReader:
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    state = load_torch_file(path, is_mapped=True)
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise IncompatibleCheckpointError(f"{path} is not a mapping of names to tensors; expected a model's state dict")
    return _TensorDict(state)


def check_torch_file(path: Path) -> None:
    """Refuse one of torch's files that would take far more memory than its size on the disk, or is no regular file.

    Raises:
        CheckpointNotFoundError: there is no file.
        CorruptCheckpointError: it is compressed, its pickle is too large, or asks for memory of any size it likes.
    """
    check_regular(path)
    with open(path, "rb") as file:
        check_torch_bytes(file, path)


def check_torch_bytes(file: BinaryIO, path: Path) -> None:
    """As `check_torch_file`, of an open file whose name is `path`."""
    is_archive = file.read(4) == b"PK\3\4"
    file.seek(0)
    for pickled in _pickles_in(file, path) if is_archive else [_pickles_before_values(file, path)]:
        check_torch_pickles(pickled, path)


def _pickles_before_values(file: BinaryIO, path: Path) -> bytes:
    """Return the pickles of a file of torch up to 1.5, one after the other, with some of the values behind them."""
    head = file.read(_MAX_PICKLE_BYTES)
    if file.read(1) and not has_all_pickles(head):
        raise CorruptCheckpointError(
            f"{path.absolute()} is no file of torch's, or begins with more than {_MAX_PICKLE_BYTES:,} bytes of "
            "pickles, and no more are read; the values of tensors lie behind them. Load another checkpoint"
        )
    return head


def _pickles_in(file: BinaryIO, path: Path) -> list[bytes]:
    """Return the pickles in an archive of torch's, once it is known to expand to no more than its size."""
    num_bytes = file.seek(0, os.SEEK_END)
    try:
        with as_corrupt(path, NotImplementedError, struct.error), zipfile.ZipFile(file) as archive:
            _check_directory(file, num_bytes, archive.start_dir, path)
            _check_members(archive.infolist(), num_bytes, path)
            return [archive.read(member) for member in archive.infolist() if _is_pickle(member)]
    except (zipfile.BadZipFile, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a place before the beginning of the file
            raise
        raise CorruptCheckpointError(
            f"{path.absolute()} ends too early, or is damaged ({error}); load another one"
        ) from error


def _is_pickle(member: zipfile.ZipInfo) -> bool:
    return member.filename.lower().endswith(".pkl")  # torch's reader finds "data.PKL", too


def _check_directory(file: BinaryIO, num_bytes: int, found: int, path: Path) -> None:
    """Refuse an archive with two directories: Python finds the one before the end, and torch the one that it names."""
    end = num_bytes - _END.size
    mark, *_, named, len_comment = _read(file, _END, end)
    locator, _, end_64, _ = _read(file, _LOCATOR, end - _LOCATOR.size)
    if locator == b"PK\6\7":
        is_near = end_64 == end - _LOCATOR.size - _END_64.size
        named = _read(file, _END_64, end_64)[-1] if is_near else None
    if mark != b"PK\5\6" or len_comment or named != found:
        raise CorruptCheckpointError(
            f"{path.absolute()} is an archive whose directory is not where its end says, or that has a comment, as "
            "torch.save() leaves none: readers may see other contents in it than each other. Load another checkpoint"
        )


def _read(file: BinaryIO, record: struct.Struct, place: int) -> tuple[Any, ...]:
    file.seek(max(place, 0))
    return record.unpack(file.read(record.size).ljust(record.size, b"\0"))


def _check_members(members: Sequence[zipfile.ZipInfo], num_bytes: int, path: Path) -> None:
    expanded = sum(member.file_size for member in members)
    if expanded > num_bytes or any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise CorruptCheckpointError(
            f"{path.absolute()} is compressed: its {num_bytes:,} bytes are {expanded:,} in memory, and no more than "
            "the file has are read. torch.save() does not compress: save it anew"
        )
    num_pickled = sum(member.file_size for member in members if _is_pickle(member))
    if num_pickled > _MAX_PICKLE_BYTES:
        raise CorruptCheckpointError(
            f"{path.absolute()} holds {num_pickled:,} bytes of pickles, and at most {_MAX_PICKLE_BYTES:,} are read; "
            "the values of tensors lie beside them. Load another checkpoint"
        )


def load_torch_file(path: Path, *, is_mapped: bool = False, has_arrays: bool = False) -> Any:
    """Return the plain data in a file of torch's.

    Args:
        is_mapped: tensors stay in the file, a zip file, until they are used.
        has_arrays: NumPy's arrays of numbers are plain data, too: random states have one.

    Raises:
        CheckpointNotFoundError: there is no file.
        CorruptCheckpointError: it is damaged, or takes more memory than its size; see `check_torch_file`.
        IncompatibleCheckpointError: it cannot be read, or holds more than tensors, numbers, strings, lists and dicts.
    """
    check_torch_file(path)
    try:
        with torch.serialization.safe_globals(PLAIN_ARRAYS if has_arrays else []):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path.absolute()} is missing") from None
    except pickle.UnpicklingError as error:
        raise IncompatibleCheckpointError(
            f"{path.absolute()} holds more than tensors, numbers and strings, and loading it could run code that it "
            "contains; if you trust it, load it with torch.load(path, weights_only=False) and save plain data"
        ) from error
    except Exception as error:  # torch has several errors of its own for a damaged file
        raise IncompatibleCheckpointError(
            f"{path.absolute()} cannot be read as weights or state ({type(error).__name__}: {error}); is it damaged, "
            "or of another format?"
        ) from error
