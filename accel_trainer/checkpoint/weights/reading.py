"""Weights in files, by name: safetensors or torch's own, whole or in shards, read as far as they are asked for."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from accel_trainer.checkpoint.format.boxes import Index
from accel_trainer.checkpoint.format.safetensors_file import dtype_of
from accel_trainer.checkpoint.weights.writing import BIN_INDEX_NAME, BIN_NAME, INDEX_NAME, WEIGHTS_NAME, read_index
from accel_trainer.errors import AccelTrainerError, CheckpointNotFoundError, IncompatibleCheckpointError

__all__ = ["BroadcastFiles", "WeightFiles"]


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
        self._rows: _Rows | None = None
        if path.name.endswith(".index.json"):
            self._files = read_index(path)
        else:
            names = list(self._open(path.name).keys())
            self._files = dict.fromkeys(names, path.name)

    def __getitem__(self, name: str) -> Tensor:
        file = self._open(self._files[name])
        tensor: Tensor = file[name] if isinstance(file, dict) else file.get_tensor(name)
        return tensor

    def read(self, name: str, index: Index) -> Tensor:
        """Return a part of a tensor; nothing else of it is read. It may be a view of the file."""
        file = self._open(self._files[name])
        part: Tensor = (file[name] if isinstance(file, dict) else file.get_slice(name))[index]
        return part

    @torch.no_grad()
    def fill(self, name: str, index: Index, target: Tensor) -> None:
        """Copy a part of a tensor into `target`, which has its shape, and any dtype and device.

        Whole rows of a safetensors file are read straight into memory on the host, without mapping the file.

        Raises:
            IncompatibleCheckpointError: the file ends before the tensor does.
        """
        file = self._files[name]
        self._open(file)
        if not (self._rows is not None and self._rows.fill(name, index, target)):
            target.copy_(self.read(name, index))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading its values."""
        file = self._open(self._files[name])
        return tuple(file[name].shape if isinstance(file, dict) else file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor without reading its values."""
        file = self._open(self._files[name])
        return file[name].dtype if isinstance(file, dict) else dtype_of(file.get_slice(name).get_dtype())

    def by_file(self) -> list[str]:
        """Return all names, those of one file together, so that each file is opened once."""
        return sorted(self._files, key=lambda name: self._files[name])

    def _open(self, file: str) -> Any:
        """Return a file's tensors: an open safetensors file, or a dict. One file is open at a time."""
        if self._opened is None or self._opened[0] != file:
            path = self.path.parent / file
            self._opened = (file, _read(path))
            self._rows = _Rows(path) if path.suffix == ".safetensors" else None
        return self._opened[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class _Rows:
    """A safetensors file, whose header is known to be good, as plain bytes: the rows of a tensor lie together."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  # closed with this object
        header_bytes = int.from_bytes(self._file.read(8), "little")
        self._begin = 8 + header_bytes
        self._entries: dict[str, Any] = json.loads(self._file.read(header_bytes))

    def __del__(self) -> None:
        self._file.close()

    def fill(self, name: str, index: Index, target: Tensor) -> bool:
        """Read into `target`, and return whether that could be done: whole rows, of its dtype, on the host."""
        entry = self._entries[name]
        shape = entry["shape"]
        whole_rows = all(
            each.start == 0 and each.stop == length for each, length in zip(index[1:], shape[1:], strict=True)
        )
        on_host = target.device.type == "cpu" and target.is_contiguous()
        if not (index and whole_rows and on_host and target.dtype == dtype_of(entry["dtype"]) and target.numel()):
            return False
        row_bytes = target.nbytes // target.shape[0]
        rest = target.reshape(-1).view(torch.uint8).numpy().data
        self._file.seek(self._begin + entry["data_offsets"][0] + index[0].start * row_bytes)
        while rest:
            count = self._file.readinto(rest)
            if not count:
                raise IncompatibleCheckpointError(f"{self._file.name} ends within {name!r}; is it being written?")
            rest = rest[count:]
        return True


class BroadcastFiles(Mapping[str, Tensor]):
    """The same for files that only rank 0 can see: it reads, and every rank is sent one tensor at a time.

    Collective: every rank builds it, and asks for the same tensors in the same order.
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
        box: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                self._weights = WeightFiles(checkpoint)
                names = self._weights.by_file()
                box = [{name: (self._weights.shape(name), self._weights.dtype(name)) for name in names}]
            except AccelTrainerError as error:
                box = [error]
        dist.broadcast_object_list(box, src=0)
        if isinstance(box[0], Exception):
            raise box[0]
        self._outline: dict[str, tuple[tuple[int, ...], torch.dtype]] = box[0]

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self._outline[name]
        if self._weights is not None:
            tensor = self._weights[name].to(self._device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0)  # gloo knows few types
        return tensor

    def read(self, name: str, index: Index) -> Tensor:
        """Return a part of a tensor, of which all is sent."""
        return self[name][index]

    @torch.no_grad()
    def fill(self, name: str, index: Index, target: Tensor) -> None:
        """Copy a part of a tensor, of which all is sent, into `target`."""
        target.copy_(self.read(name, index))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._outline[name][0]

    def by_file(self) -> list[str]:
        """Return all names, those of one file together."""
        return list(self._outline)

    def __iter__(self) -> Iterator[str]:
        return iter(self._outline)

    def __len__(self) -> int:
        return len(self._outline)


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
