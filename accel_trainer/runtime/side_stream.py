"""A stream of an accelerator beside the one that computes, for copies that neither wait for it nor keep it waiting.

Batches go to the accelerator in one, while it computes on those before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from accel_trainer.config.schema import DataConfig
from accel_trainer.logging import get_logger
from accel_trainer.runtime.tensor_trees import send_to_device
from accel_trainer.tree import leaves, map_leaves


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


# --- batches ----------------------------------------------------------------------------------------------------------


logger = get_logger(__name__)

_copy_stream = functools.cache(SideStream)
"""One for each device: every stream keeps memory of its own for what is made in it."""


_COMPILING_DEVICES = ("tpu",)
"""Kinds of devices on which every new shape costs a compilation, of seconds to minutes."""


class DeviceCopies:
    """Copies of batches to an accelerator, in a stream of their own where it has streams."""

    def __init__(self, device: torch.device, config: DataConfig, *, pins: bool = False) -> None:
        """`pins` batches here, where the configuration wants them pinned: no thread of the loader has."""
        self._device = device
        self._non_blocking = config.non_blocking
        self._pins = pins and config.pin_memory and torch.accelerator.is_available()
        self._side = _copy_stream(device) if config.prefetch_to_device and has_streams(device) else None
        self._shapes: set[tuple[torch.Size, ...]] | None = set() if device.type in _COMPILING_DEVICES else None

    def begin(self, batch: Any) -> Callable[[], Any]:
        """Begin to copy a batch; return a function that returns it for use, once, and lets go of it.

        One that holds more than host tensors and plain values is copied where it is used: what another class's `.to`
        returns may hold tensors that nobody here can find, to keep their memory.
        """
        if self._shapes is not None:
            self._note_shapes(self._shapes, batch)
        side = self._side
        if side is None:
            return [send_to_device(batch, self._device, non_blocking=self._non_blocking)].pop
        if not all(map(_lies_on_host, leaves(batch, is_leaf=_is_moved))):
            return [send_to_device(batch, self._device, non_blocking=True)].pop
        if self._pins:
            batch = map_leaves(
                lambda leaf: leaf.pin_memory() if isinstance(leaf, Tensor) else leaf, batch, is_leaf=_is_moved
            )
        with side.entered():
            copies = [send_to_device(batch, self._device, non_blocking=True)]
            end = side.mark()

        def take() -> Any:
            moved = leaves(copies[0], is_leaf=_is_moved)
            side.hand_over(end, (leaf for leaf in moved if isinstance(leaf, Tensor)))
            return copies.pop()

        return take

    def _note_shapes(self, known: set[tuple[torch.Size, ...]], batch: Any) -> None:
        shapes = tuple(leaf.shape for leaf in leaves(batch) if isinstance(leaf, Tensor))
        if known and shapes not in known:
            before, now = (
                ", ".join("x".join(map(str, shape)) for shape in each) for each in (next(iter(known)), shapes)
            )
            logger.warning_once(
                f"batches differ in shape ({before}, then {now}), and "
                f"{self._device.type} compiles a step anew for each: pad all to the length of the longest row "
                "(pad_batches_to_multiple_of=N in TrainingArguments, pad_to_multiple_of=N of a collator), and drop "
                "a short last batch (drop_last=True)"
            )
        known.add(shapes)


def _is_moved(node: Any) -> bool:
    """Whether a node of a batch has a `.to` of its own; of mappings that do (BatchEncoding) the values count."""
    return hasattr(node, "to") and not isinstance(node, Mapping)


def _lies_on_host(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor):
        return not hasattr(leaf, "to")
    return leaf.device.type == "cpu" and leaf.layout is torch.strided and not leaf.is_nested
