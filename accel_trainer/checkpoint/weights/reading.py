"""Weight files of a model, safetensors or torch's own, one or several with an index, read as far as they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_trainer.checkpoint.boxes import Index
from accel_trainer.checkpoint.disk import check_regular
from accel_trainer.checkpoint.manifest import MANIFEST_NAME
from accel_trainer.checkpoint.safetensors_file import SafetensorsFile, TensorReader
from accel_trainer.checkpoint.torch_files import load_torch_file
from accel_trainer.checkpoint.weights.writing import read_index
from accel_trainer.errors import (
    AccelTrainerError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)


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
        # Errors too: a rank that waits for the first tensor would never hear of a missing file.
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
