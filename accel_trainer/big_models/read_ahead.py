"""Reads the weights of the next offloaded module while the present one computes."""

from __future__ import annotations

import copy
import ctypes
import threading
from collections import deque
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from accel_trainer.big_models.module_tensors import Device
from accel_trainer.runtime.process import with_index

__all__ = ["OffloadedModule", "ReadAhead"]

_WINDOW_BYTES = 64 * 2**20
"""How much of the mapped files the system is asked for in advance: page cache, no memory of this process."""

_MADV_WILLNEED = 3


class OffloadedModule(Protocol):
    """A module whose weights are read for each forward."""

    execution_device: Device | None

    def read(self, device: Device | None) -> list[Tensor]:
        """Return its weights on a device."""

    def pages(self) -> list[Tensor] | None:
        """Return those of its weights that are mapped, where `read` copies nothing; None where it does."""


class ReadAhead:
    """Knows in which order the modules of a model are called, and reads one call ahead.

    Weights that are copied, to an accelerator or into another dtype, are copied by a thread, one module ahead. Of
    mapped ones that the host computes with as they are, the system is asked for the pages, up to 64 MiB ahead.
    """

    def __init__(self) -> None:
        self._order: list[OffloadedModule] = []
        self._next: dict[OffloadedModule, OffloadedModule] = {}
        self._first: OffloadedModule | None = None
        self._last: OffloadedModule | None = None
        self._reading: _Reading | None = None
        self._asked: deque[tuple[OffloadedModule, int]] = deque()
        self._bytes_asked = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadAhead:
        made = memo[id(self)] = ReadAhead()
        made._order = copy.deepcopy(self._order, memo)
        made._guess()
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {"_order": self._order}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self._order = state["_order"]

    def add(self, module: OffloadedModule) -> None:
        """Take a module for the one that is called after those that were added before."""
        if self._order:
            self._next[self._order[-1]] = module
        self._order.append(module)

    def _guess(self) -> None:
        self._next = dict(zip(self._order, self._order[1:], strict=False))

    def take(self, module: OffloadedModule) -> list[Tensor]:
        """Return a module's weights on its device, and begin to read those of the one that came next the last time."""
        if self._last is not None and self._last is not module:
            self._next[self._last] = module
        self._first = self._first or module
        self._last = module
        reading, self._reading = self._reading, None
        values = reading.result() if reading is not None and reading.module is module else None
        if values is None:
            values = module.read(module.execution_device)
        follower = self._follower(module)
        if follower is not None and follower.pages() is None:
            self._reading = _Reading(follower)
        else:
            self._ask(module)
        return values

    def _follower(self, module: OffloadedModule) -> OffloadedModule | None:
        """Return the module that comes next; None at the end: what begins the next pass is not held until then."""
        follower = self._next.get(module)
        return None if follower is self._first else follower

    def _ask(self, module: OffloadedModule) -> None:
        """Ask the system for the pages of the modules that follow."""
        if self._asked and self._asked[0][0] is module:
            self._bytes_asked -= self._asked.popleft()[1]
        else:
            self._asked.clear()
            self._bytes_asked = 0
        follower = self._follower(self._asked[-1][0] if self._asked else module)
        while follower is not None and self._bytes_asked < _WINDOW_BYTES and len(self._asked) < len(self._order):
            pages = follower.pages() or []
            for tensor in pages:
                _want_pages(tensor)
            num_bytes = sum(tensor.nbytes for tensor in pages)
            self._asked.append((follower, num_bytes))
            self._bytes_asked += num_bytes
            follower = self._follower(follower)


class _Reading:
    """Weights that a thread is reading."""

    def __init__(self, module: OffloadedModule) -> None:
        self.module = module
        self._device = module.execution_device
        self._values: list[Tensor] | None = None
        self._error: BaseException | None = None
        self._stream = _current_stream(self._device)
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._stream is not None:
                # Kernels on this stream come after the copies: nobody has to wait for them on the host.
                torch.accelerator.set_stream(self._stream)
            self._values = self.module.read(self._device)
        except BaseException as error:  # raised where the weights are needed
            self._error = error

    def result(self) -> list[Tensor] | None:
        """Return the weights; None if the module computes elsewhere by now."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._device != self.module.execution_device:
            return None
        present = _current_stream(self._device)
        if present is not None and self._stream is not None and present != self._stream:
            present.wait_stream(self._stream)
        return self._values


def _current_stream(device: Device | None) -> torch.Stream | None:
    if device is None or (target := with_index(device)).type in ("cpu", "meta", "mps"):
        return None
    return torch.accelerator.current_stream(target)


@lru_cache(1)
def _madvise() -> Any:
    found = getattr(ctypes.CDLL(None), "madvise", None)
    if found is not None:
        found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found


def _want_pages(tensor: Tensor) -> None:
    """Ask the system to read the pages of a mapped tensor; of one in memory, it has nothing to do."""
    madvise = _madvise()
    if madvise is not None and tensor.device.type == "cpu" and tensor.nbytes:
        begin = tensor.data_ptr()
        begin -= begin % 4096
        madvise(begin, tensor.data_ptr() + tensor.nbytes - begin, _MADV_WILLNEED)
