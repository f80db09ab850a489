"""Peaks of a process's anonymous memory: what it allocated, without pages of files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def _anonymous_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def peak_mib(function: Callable[[], T]) -> tuple[float, T]:
    """Return how much memory `function` has at its peak beyond what there was before, and its result."""
    before, peak, done = _anonymous_mib(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, _anonymous_mib())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = function()
    finally:
        done.set()
        thread.join()
    return max(0.0, peak - before), result
