"""Activation offload: tensors kept for the backward wait in host memory, and come back in reverse order."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from accel_trainer.checkpoint.shards import local_tensor
from accel_trainer.runtime.side_stream import SideStream, has_streams
from accel_trainer.runtime.torch_private import is_fake

_LEAST_BYTES = 64 * 2**10
"""Less stays on the device: it would travel for a few microseconds, and take as long to be asked for."""
_MOST_BYTES_IN_FLIGHT = 512 * 2**20
"""Of the device, each way: copies that have not arrived yet, and what has come back before it is used. A layer of a 7B
keeps about a gigabyte for 4,096 tokens in 16 bits, in pieces of up to 90 MB."""

_copy_stream = functools.cache(SideStream)


class _Sent:
    """A storage that has been sent to the host."""

    def __init__(self, storage: Any, host: Tensor, place: int) -> None:
        self.host = host
        self.place = place
        """In the order in which storages were sent."""
        self.back: weakref.ref[Any] = weakref.ref(storage)
        """The storage on the device, as long as it is there."""
        self.num_views = 0
        """Those that autograd holds and has not asked for."""
        self.held: Any = None
        """The storage that has come back, until the last of them is asked for."""


class _Arrival(NamedTuple):
    storage: Any
    event: Any


class _View(NamedTuple):
    """A stand-in that autograd holds in the place of a tensor."""

    sent: _Sent
    dtype: torch.dtype
    offset: Any
    shape: torch.Size
    stride: tuple[int, ...]


class ActivationOffload:
    """Sends tensors that layers keep to the host, in a stream of their own where the device has streams.

    Storages are sent: several views of one, or a tensor that is kept twice, are one copy. On the CPU they are plain
    copies. Parameters stay, and so does what is small, sparse or a subclass of Tensor.
    """

    def __init__(self, device: torch.device) -> None:
        """Send tensors on `device`, to pinned memory if it has streams."""
        self._device = device
        self._side = _copy_stream(device) if has_streams(device) else None
        self._known: dict[int, tuple[weakref.ref[Any], weakref.ref[_Sent]]] = {}
        """By the id of a storage that has been sent, while it is on the device."""
        self._order: list[weakref.ref[_Sent]] = []
        self._leaving: dict[int, _Arrival] = {}
        """By place, storages whose copies the computing stream has not waited for: it may not reuse their memory."""
        self._coming: dict[int, _Arrival] = {}
        """By place, storages that come back ahead of their use."""

    def copy_in(self, side: SideStream) -> None:
        """Copy in a stream from now on, whatever the device: a plan has one that copies nothing."""
        self._side = side

    def __reduce__(self) -> tuple[Any, ...]:
        return (ActivationOffload, (self._device,))  # a copied model has nothing on its way

    def keeping(self, layer: nn.Module) -> AbstractContextManager[Any]:
        """Context in which tensors that a layer's forward keeps are sent to the host."""
        owners = [module for module in layer.modules() if next(module.parameters(recurse=False), None) is not None]
        return saved_tensors_hooks(functools.partial(self.send, owners), self.bring)

    def send(self, owners: Sequence[nn.Module], tensor: Tensor) -> Any:
        """Return a stand-in for a tensor while it is on the host; the tensor itself if it stays.

        Args:
            owners: modules whose own parameters stay, under FSDP2 those that are gathered now.
        """
        if not self._may_leave(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < _LEAST_BYTES or _is_parameter(storage, owners):
            return tensor
        known = self._known.get(id(storage))
        sent = None if known is None else known[1]()
        if sent is None:
            sent = self._send(storage)
        sent.num_views += 1
        return _View(sent, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _may_leave(self, tensor: Tensor) -> bool:
        is_plain = (type(tensor) is Tensor or is_fake(tensor)) and tensor.layout is torch.strided
        return is_plain and tensor.device.type == self._device.type and not (tensor.is_conj() or tensor.is_neg())

    def send_results(self, results: Iterable[Any]) -> None:
        """Send the results that selective checkpointing keeps, `val` of each."""
        for result in results:
            result.val, result.version = self.send((), result.get_val(False)), None

    def bring_results(self, results: Iterable[Any]) -> None:
        """Bring it back."""
        for result in results:
            result.val = self.bring(result.val)

    @torch.no_grad()
    def _send(self, storage: Any) -> _Sent:
        flat = _as_tensor(storage, torch.uint8)
        self._forget_graphs()
        if self._side is None:
            sent = _Sent(storage, flat.to("cpu", copy=True), len(self._order))
        else:
            sent = _Sent(storage, self._side.empty_host(len(flat)), len(self._order))
            self._side.copy(flat, sent.host, is_held=True)
            self._leaving[sent.place] = _Arrival(storage, self._side.mark())
            self._settle(_MOST_BYTES_IN_FLIGHT)
        self._order.append(weakref.ref(sent))
        key = id(storage)
        self._known[key] = (weakref.ref(storage, lambda _: self._known.pop(key, None)), weakref.ref(sent))
        return sent

    def _forget_graphs(self) -> None:
        """Give the places of graphs free that are gone."""
        while self._order and self._order[-1]() is None:
            self._order.pop()
            self._coming.pop(len(self._order), None)
            if self._side is not None and (arrival := self._leaving.pop(len(self._order), None)):
                self._side.hand_over(arrival.event, ())

    def _settle(self, most: int) -> None:
        """Let go of storages that have left, the first ones first, until at most `most` bytes are on their way."""
        total = _total(self._leaving)
        while total > most and self._side is not None:
            arrival = self._leaving.pop(next(iter(self._leaving)))
            total -= arrival.storage.nbytes()
            # The computing stream waits, and not the host: memory that is freed now is reused behind the copy.
            self._side.hand_over(arrival.event, ())

    @torch.no_grad()
    def bring(self, kept: Any) -> Tensor:
        """Return the tensor that `send` was given, and begin to bring those back that were sent before it."""
        if not isinstance(kept, _View):
            tensor: Tensor = kept
            return tensor
        sent = kept.sent
        storage = self._arrived(sent)
        sent.num_views -= 1
        sent.held = storage if sent.num_views > 0 else None
        if self._side is not None:
            self._bring_ahead(sent.place)
        view = torch.empty(0, dtype=kept.dtype, device=self._device)
        return view.set_(storage, kept.offset, kept.shape, kept.stride)

    def _arrived(self, sent: _Sent) -> Any:
        """Return a storage on the device, which the computing stream may read."""
        if self._side is None:
            return sent.host.to(self._device).untyped_storage()
        found = self._leaving.pop(sent.place, None) or self._coming.pop(sent.place, None)
        if found is None and (storage := sent.back()) is not None:
            return storage
        arrival = found or self._fetch(sent)
        self._side.hand_over(arrival.event, ())
        return arrival.storage

    def _fetch(self, sent: _Sent) -> _Arrival:
        assert self._side is not None
        # Of the computing stream's memory: what frees it is ordered behind what reads it.
        flat = torch.empty(len(sent.host), dtype=torch.uint8, device=self._device)
        self._side.copy(sent.host, flat, is_held=True)
        arrival = _Arrival(flat.untyped_storage(), self._side.mark())
        sent.back = weakref.ref(arrival.storage)
        return arrival

    def _bring_ahead(self, place: int) -> None:
        total = _total(self._coming)
        for earlier in range(place - 1, -1, -1):
            sent = self._order[earlier]()
            if sent is None or sent.num_views <= 0 or sent.back() is not None:
                continue
            total += len(sent.host)
            if total > _MOST_BYTES_IN_FLIGHT:
                break
            self._coming[earlier] = self._fetch(sent)


def _as_tensor(storage: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def _total(arrivals: dict[int, _Arrival]) -> int:
    return sum(arrival.storage.nbytes() for arrival in arrivals.values())


def _is_parameter(storage: Any, owners: Sequence[nn.Module]) -> bool:
    own = (parameter for module in owners for parameter in module.parameters(recurse=False))
    return any(local_tensor(parameter).untyped_storage() is storage for parameter in own)
