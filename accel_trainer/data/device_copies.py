"""Batches on their way to an accelerator, while it computes on those before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from accel_trainer.config.schema import DataConfig
from accel_trainer.logging import get_logger
from accel_trainer.runtime.side_stream import SideStream, has_streams
from accel_trainer.runtime.tensor_trees import send_to_device
from accel_trainer.tree import leaves, map_leaves

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
