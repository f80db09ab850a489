"""Files of tensors in the safetensors format: a header with every tensor's offsets, then their bytes, one by one."""

from __future__ import annotations

import functools
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accel_trainer.checkpoint.boxes import Index
from accel_trainer.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from accel_trainer.runtime.side_stream import SideStream, empty_pinned, has_streams
from accel_trainer.tree import map_leaves

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_CHUNK_BYTES = 16 * 2**20
_ALIGNMENT = 64  # of copies in host memory, and of the data of a file: torch's allocator aligns as much, for AVX-512


class LazyTensor:
    """A tensor that is made when it is called, to be written: nobody holds it before or after."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], make: Callable[[], Tensor]) -> None:
        self.dtype, self.shape = dtype, shape
        self._make = make

    def __call__(self) -> Tensor:
        """Return the tensor, of that dtype and shape, on any device."""
        return self._make()

    def numpy(self) -> Any:
        """Return it as an array."""
        return self._make().numpy()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in safetensors files."""
    if dtype not in _DTYPES:
        raise ConfigError(f"tensors of {dtype} cannot be saved: the safetensors format has no such type; convert them")
    return _DTYPES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name in safetensors files."""
    if name not in _BY_NAME:
        raise CorruptCheckpointError(f"{name!r} is no type of safetensors; load another checkpoint")
    return _BY_NAME[name]


def write_order(tensors: Mapping[str, Tensor | LazyTensor]) -> list[str]:
    """Return the order of tensors in a file, in which lazy ones are made."""
    # Large element types first, so that all are aligned without gaps, which the format forbids.
    return sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)


def _num_bytes(tensor: Tensor | LazyTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _header(tensors: Mapping[str, Tensor | LazyTensor], order: Sequence[str], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    position = 0
    for name in order:
        tensor = tensors[name]
        end = position + _num_bytes(tensor)
        header[name] = {
            "dtype": dtype_name(tensor.dtype),
            "shape": [int(length) for length in tensor.shape],
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Readers map the file into memory. Data that begins as torch's allocator begins a tensor leaves most weights the
    # alignment that they were trained with, and MKL the same digits: at a multiple of 8 it takes another kernel for
    # some products, whose last bits differ (1.9e-8 in 16 layers of 1024 from disk, on an EPYC).
    return text + b" " * (-(8 + len(text)) % _ALIGNMENT)


def tensor_file_bytes(tensors: Mapping[str, Tensor | LazyTensor]) -> int:
    """Return the size of the tensors' data; the header is small beside it."""
    return sum(_num_bytes(tensor) for tensor in tensors.values())


_copy_stream = functools.cache(SideStream)


class StagingMemory:
    """Host memory for copies. It is kept from one save to the next: most of a copy's time goes into fresh pages."""

    # Of a device with streams the memory is pinned, and the host does not wait for the copies: `wait` does, on the
    # thread that reads them. The device ends them before it computes further: not the optimizer alone changes what is
    # saved, a forward changes buffers. Copies from another device are complete when `copy` returns.

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = SideStream(device) if has_streams(device) else None
        self._ends: list[Any] = []
        self._free: list[Tensor] = []
        self._taken: list[Tensor] = []

    def begin(self) -> None:
        """Forget the copies of the last save; its memory serves the next one."""
        self._free, self._taken = sorted(self._taken, key=Tensor.numel), []

    def copy(self, tensors: Mapping[str, Tensor | LazyTensor]) -> dict[str, Tensor]:
        """Return copies of `tensors`, complete after `wait`; lazy ones are made in `write_order`.

        Each has a storage of its own. Tensors that are copies of this save already are returned as they are.
        """
        held = {name: tensor for name, tensor in tensors.items() if type(tensor) is Tensor and self._holds(tensor)}
        return held | self._copy({name: tensor for name, tensor in tensors.items() if name not in held})

    def _holds(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        return any(each.data_ptr() <= address < each.data_ptr() + each.numel() for each in self._taken)

    def _copy(self, tensors: Mapping[str, Tensor | LazyTensor]) -> dict[str, Tensor]:
        rooms = {name: -(-_num_bytes(tensor) // _ALIGNMENT) * _ALIGNMENT for name, tensor in tensors.items()}
        # One piece for all: each page-locked piece costs a call of the driver, and thousands of tensors are small.
        buffer = self._take(sum(rooms.values()))
        copies: dict[str, Tensor] = {}
        begin = 0
        for name in write_order(tensors):
            source, num_bytes = tensors[name], _num_bytes(tensors[name])
            # By way of NumPy: a view has the storage of all, which `torch.save` writes, and transformers copies again.
            own = torch.from_numpy(buffer[begin : begin + num_bytes].numpy())
            # NumPy gives nothing at all a stride of 0, which torch takes for no other dtype.
            own = own.view(source.dtype) if num_bytes else own.to(source.dtype)
            copies[name] = own.reshape(tuple(source.shape))
            source = source if isinstance(source, Tensor) else source()
            if self._side is not None and source.device == self._device:
                self._side.copy(source.detach(), copies[name])
            else:
                copies[name].copy_(source.detach())
            begin += rooms[name]
        if self._side is not None:
            end = self._side.mark()
            # The stream of the model waits for the copies: the optimizer must not update what is still being read.
            self._side.hand_over(end, ())
            self._ends.append(end)
        return copies

    def copy_nested(self, value: Any) -> Any:
        """Return nested values with copies of all tensors, complete after `wait`."""
        tensors: dict[str, Tensor] = {}

        def collect(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                tensors[str(len(tensors))] = leaf
            return leaf

        map_leaves(collect, value)
        copies, names = self.copy(tensors), iter(tensors)
        return map_leaves(lambda leaf: copies[next(names)] if isinstance(leaf, Tensor) else leaf, value)

    def wait(self) -> None:
        """Wait until the copies that have been begun are complete."""
        while self._ends:
            self._ends[0].synchronize()
            del self._ends[0]

    def _take(self, num_bytes: int) -> Tensor:
        index = next((index for index, free in enumerate(self._free) if free.numel() >= num_bytes), None)
        if index is not None:
            buffer = self._free.pop(index)
        else:
            buffer = torch.empty(num_bytes, dtype=torch.uint8) if self._side is None else empty_pinned(num_bytes)
        self._taken.append(buffer)
        return buffer


def chunks_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, each chunk valid until the next; of one on a device, they are copied to the host."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    chunks = flat.split(_CHUNK_BYTES) if flat.numel() else ()
    if not has_streams(flat.device):
        for chunk in chunks:
            yield chunk.cpu().numpy().data
        return
    # Two pinned buffers in turn: while one is hashed and written, the device fills the other.
    side, buffers = _copy_stream(flat.device), [empty_pinned(min(_CHUNK_BYTES, flat.numel())) for _ in chunks[:2]]
    begun: deque[tuple[Tensor, Any]] = deque()
    for index, chunk in enumerate((*chunks, None)):
        if chunk is not None:
            room = buffers[index % 2][: chunk.numel()]
            side.copy(chunk, room)
            begun.append((room, side.mark()))
        if begun and (chunk is None or len(begun) == 2):
            room, end = begun.popleft()
            end.synchronize()
            yield room.numpy().data


@torch.no_grad()
def copy_stored(source: Tensor, target: Tensor) -> None:
    """Copy a tensor of a mapped file into one of its shape, of any dtype and device."""
    is_plain = source.is_contiguous() and target.is_contiguous() and source.dtype == target.dtype
    if not has_streams(target.device) or source.device.type != "cpu" or not is_plain or not source.numel():
        target.copy_(source)
        return
    # Two pinned buffers in turn: one is read from the file while the device takes the other.
    side = _copy_stream(target.device)
    pieces = source.reshape(-1).view(torch.uint8).split(_CHUNK_BYTES)
    places = target.detach().reshape(-1).view(torch.uint8).split(_CHUNK_BYTES)
    buffers = [empty_pinned(len(piece)) for piece in pieces[:2]]
    ends: list[Any] = []
    for index, (piece, place) in enumerate(zip(pieces, places, strict=True)):
        if index >= 2:
            # The device may still read this buffer: the piece before last was copied from it.
            ends[index - 2].synchronize()
        room = buffers[index % 2][: len(piece)]
        room.copy_(piece)
        side.copy(room, place)
        ends.append(side.mark())
    side.hand_over(ends[-1], ())


def write_tensor_file(
    file: BinaryIO, tensors: Mapping[str, Tensor | LazyTensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write `tensors` to an open file, one at a time. Lazy ones are made in the order of `tensors` by element size."""
    order = write_order(tensors)
    header = _header(tensors, order, metadata or {})
    file.write(len(header).to_bytes(8, "little") + header)
    for name in order:
        announced = tensors[name]
        tensor = announced if isinstance(announced, Tensor) else announced()
        # The header with all offsets is on the disk by now: another size would shift every tensor behind it.
        if tensor.dtype != announced.dtype or tuple(tensor.shape) != tuple(announced.shape):
            raise ConfigError(
                f"tensor {name!r} was announced as {announced.dtype} {tuple(announced.shape)} and is {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )
        for chunk in chunks_of(tensor):
            file.write(chunk)
        del tensor


class TensorReader(Mapping[str, Tensor]):
    """Stored tensors by name: `reader[name]` reads one, full, into host memory; subclasses do it better."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a full tensor."""
        return tuple(self[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a tensor was saved in."""
        return self[name].dtype

    def slice(self, name: str, index: Index) -> Tensor:
        """Return a slice of a tensor, possibly a view of the file."""
        return self[name][index]

    @torch.no_grad()
    def fill(self, name: str, index: Index, target: Tensor) -> None:
        """Copy a slice of a tensor into `target`, which has its shape, and any dtype and device."""
        copy_stored(self.slice(name, index), target)

    def lazy(self, name: str) -> LazyTensor:
        """Return a tensor that is read when it is called."""
        return LazyTensor(self.dtype(name), self.shape(name), partial(self.__getitem__, name))


class RenamedTensors(TensorReader):
    """The tensors of another reader under other names.

    Args:
        names: the stored name of each.
    """

    def __init__(self, stored: TensorReader, names: Mapping[str, str]) -> None:
        self._stored, self._names = stored, names

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a full tensor."""
        return self._stored.shape(self._names[name])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a tensor was saved in."""
        return self._stored.dtype(self._names[name])

    def fill(self, name: str, index: Index, target: Tensor) -> None:
        """Copy a slice of a tensor into `target`."""
        self._stored.fill(self._names[name], index, target)


class SafetensorsFile(TensorReader):
    """The tensors of a safetensors file. It is mapped, and of a slice only its own bytes are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._raw: BinaryIO | None = None
        try:
            self._file: Any = safe_open(path, framework="pt")
            self._names = dict.fromkeys(self._file.keys())
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"{path.absolute()} is missing") from None
        except (SafetensorError, OSError) as error:
            raise CorruptCheckpointError(
                f"{path.absolute()} is not a safetensors file, and cannot be read as weights or state "
                f"({type(error).__name__}: {error}); is it damaged, or of another format?"
            ) from error

    def __del__(self) -> None:
        if self._raw is not None:
            self._raw.close()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the header."""
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, from the header."""
        return dtype_of(self._file.get_slice(name).get_dtype())

    def slice(self, name: str, index: Index) -> Tensor:
        """Return a slice of a tensor, possibly a view of the mapped file."""
        found: Tensor = self._file.get_slice(name)[index]
        return found

    @torch.no_grad()
    def fill(self, name: str, index: Index, target: Tensor) -> None:
        """Copy a slice of a tensor into `target`, which has its shape, and any dtype and device."""
        # Full rows lie together in the file, and go straight into host memory of their dtype: past the mapping, whose
        # pages would count as this process's memory.
        has_full_rows = index and all(
            each.start == 0 and each.stop == length
            for each, length in zip(index[1:], self.shape(name)[1:], strict=True)
        )
        on_host = target.device.type == "cpu" and target.is_contiguous() and target.numel()
        if has_full_rows and on_host and target.dtype == self.dtype(name):
            self._read_rows(name, index[0].start, target)
        else:
            copy_stored(self.slice(name, index), target)

    def _read_rows(self, name: str, first: int, target: Tensor) -> None:
        if self._raw is None:
            # Unbuffered: a buffer would be one more copy of weights.
            self._raw = open(self.path, "rb", buffering=0)  # noqa: SIM115  # closed with this object
            header_bytes = int.from_bytes(self._raw.read(8), "little")
            self._entries: dict[str, Any] = json.loads(self._raw.read(header_bytes))
            self._data_offset = 8 + header_bytes
        row_bytes = target.nbytes // target.shape[0]
        rest = target.reshape(-1).view(torch.uint8).numpy().data
        self._raw.seek(self._data_offset + self._entries[name]["data_offsets"][0] + first * row_bytes)
        while rest:
            count = self._raw.readinto(rest)  # type: ignore[attr-defined]  # FileIO has it
            if not count:
                raise IncompatibleCheckpointError(f"{self.path} ends within {name!r}; is it being written?")
            rest = rest[count:]
