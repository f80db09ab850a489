"""A stream of an accelerator beside the one that computes, for copies that neither wait for it nor keep it waiting."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def has_streams(device: torch.device) -> bool:
    """Whether devices of this kind have streams (cuda, xpu, ...): the CPU's do nothing, and mps has none."""
    return device.type != "cpu" and hasattr(getattr(torch, device.type, None), "Stream")


def empty_pinned(num_bytes: int) -> Tensor:
    """Return host memory that an accelerator copies to and from by itself: bytes, whatever they are."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class SideStream:
    """Copies in a stream of their own, and the points at which the computing stream goes on with them.

    The host waits nowhere. In order:

        with side.entered():            # 1. what is enqueued here runs beside the computation
            copied = tensor.to(device, non_blocking=True)
        event = side.mark()             # 2. the end of it
        side.hand_over(event, [copied]) # 3. the computing stream waits for 2, on the device, and may use the copies
    """

    def __init__(self, device: torch.device) -> None:
        """Make a stream on a device that has some."""
        self._device = device
        self._streams = torch.get_device_module(device)
        self._stream = self._streams.Stream(device=device)

    def empty_host(self, num_bytes: int) -> Tensor:
        """Return host memory to copy to and from; see `empty_pinned`."""
        return empty_pinned(num_bytes)

    def entered(self) -> AbstractContextManager[Any]:
        """Context in which work is enqueued in this stream."""
        context: AbstractContextManager[Any] = self._streams.stream(self._stream)
        return context

    def mark(self) -> Any:
        """Return an event at the end of all work that has been enqueued here by now."""
        return self._stream.record_event()

    def hand_over(self, event: Any, tensors: Iterable[Tensor]) -> None:
        """Let the computing stream use tensors that were made here before `event`."""
        computing = self._streams.current_stream(self._device)
        computing.wait_event(event)
        # Their memory is this stream's: without the record, it would be given to the next copy as soon as the host
        # drops them, which is long before the computation has read them.
        for tensor in tensors:
            tensor.record_stream(computing)

    def copy(self, source: Tensor, target: Tensor, *, is_held: bool = False) -> None:
        """Copy between device and pinned memory after the work so far; `mark` tells when the host may use it.

        Args:
            is_held: the caller keeps the device's side until the computing stream has waited for the copy.
        """
        self._stream.wait_stream(self._streams.current_stream(self._device))
        with self.entered():
            target.copy_(source, non_blocking=True)
        if not is_held:
            # The host may drop the device's side at once, long before the copy has read or written it.
            (source if target.is_cpu else target).record_stream(self._stream)
